"""onnxruntime's contrib operators MatMulNBits (accuracy level 4: int8 activations) and QMoE."""

from importlib.metadata import version
from typing import Any

import numpy as np

from peers.base import Entry, Environment
from peers.problem import Files, Problem, from_bfloat16

ENVIRONMENT = Environment("onnxruntime", ("onnxruntime==1.31.0", "onnx==1.22.0", "numpy>=1.24,<3"))
DOMAIN = "com.microsoft"


class Onnx(Entry):
    environment = ENVIRONMENT
    bytes_per_weight = 1.3  # the model's bytes and its own order of them

    @classmethod
    def versions(cls) -> dict[str, str]:
        return {"onnxruntime": version("onnxruntime")}

    def session(self, node: Any, inputs: dict[str, tuple], constants: dict[str, np.ndarray], width: int) -> Any:
        """A model of one node: inputs name -> shape, float32; the constants come as external initializers."""
        import onnxruntime
        from onnx import TensorProto, helper

        kinds = {np.dtype(np.uint8): TensorProto.UINT8, np.dtype(np.float32): TensorProto.FLOAT}
        initializers = []
        for name, array in constants.items():
            location = TensorProto.EXTERNAL
            tensor = TensorProto(name=name, data_type=kinds[array.dtype], dims=array.shape, data_location=location)
            tensor.external_data.add(key="location", value=f"{name}.bin")
            initializers.append(tensor)
        graph = helper.make_graph(
            [node],
            "peer",
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, width])],
            initializers,
        )
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        self.kept = [*getattr(self, "kept", []), constants]  # the session reads this memory
        values = [onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array)) for array in constants.values()]
        options.add_external_initializers(list(constants), values)
        return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


class Linear(Onnx):
    name = "onnxruntime MatMulNBits"
    kind = "linear"

    @classmethod
    def refuse(cls, problem: Problem) -> str | None:
        # Block sizes are powers of two from 16 to 256.
        return "no channelwise scales" if problem.group not in (16, 32, 64, 128, 256) else None

    def __init__(self, files: Files, threads: int):
        super().__init__(files, threads)
        from onnx import helper

        n, k, group = self.problem.n, self.problem.k, self.problem.group
        node = helper.make_node(
            "MatMulNBits", ["x", "w", "s"], ["y"], domain=DOMAIN, K=k, N=n, bits=4, block_size=group, accuracy_level=4
        )
        constants = {
            "w": np.array(files["w"][0]).reshape(n, k // group, group // 2),
            "s": np.array(files["s"][0], np.float32),
        }
        sessions = range(self.problem.copies)
        self.sessions = [self.session(node, {"x": (None, k)}, constants, n) for _ in sessions]

    def inputs(self, m: int) -> None:
        self.x = {"x": from_bfloat16(self.files[f"x-{m}"])}

    def call(self, i: int) -> Any:
        return self.sessions[i % len(self.sessions)].run(None, self.x)[0]


class Moe(Onnx):
    """QMoE routes by itself: it gets the logarithms of the router weights, and -1e4 for experts not chosen."""

    name = "onnxruntime QMoE"
    kind = "moe"

    def __init__(self, files: Files, threads: int):
        super().__init__(files, threads)
        from onnx import helper

        p = self.problem
        h, inner = p.hidden, p.intermediate
        node = helper.make_node(
            "QMoE",
            ["x", "router", "w13", "s13", "", "w2", "s2", ""],
            ["y"],
            domain=DOMAIN,
            k=p.top_k,
            activation_type="swiglu",
            swiglu_fusion=1,  # gate and up are interleaved
            swiglu_limit=1e30,
            activation_alpha=1.0,
            activation_beta=0.0,
            normalize_routing_weights=1,
            expert_weight_bits=4,
            **({} if p.group == -1 else {"block_size": p.group}),
        )
        order = np.arange(2 * inner).reshape(2, inner).T.reshape(-1)  # gate 0, up 0, gate 1, ...
        s13, s2 = np.array(files["s13"])[:, order], np.array(files["s2"])
        if p.group == -1:
            s13, s2 = s13[:, :, 0], s2[:, :, 0]
        constants = {"w13": np.array(files["w13"])[:, order], "s13": s13, "w2": np.array(files["w2"]), "s2": s2}
        constants = {name: np.ascontiguousarray(array) for name, array in constants.items()}
        inputs = {"x": (None, h), "router": (None, p.experts)}
        self.sessions = [self.session(node, inputs, constants, h) for _ in range(self.problem.copies)]

    def inputs(self, m: int) -> None:
        self.feeds = []
        for ids, gates in zip(self.files[f"ids-{m}"], self.files[f"gates-{m}"]):
            router = np.full((m, self.problem.experts), -1e4, np.float32)
            np.put_along_axis(router, ids.astype(np.int64), np.log(gates), 1)
            self.feeds.append({"x": from_bfloat16(self.files[f"x-{m}"]), "router": router})

    def call(self, i: int) -> Any:
        return self.sessions[i % len(self.sessions)].run(None, self.feeds[i % len(self.feeds)])[0]


ENTRIES = [Linear, Moe]
