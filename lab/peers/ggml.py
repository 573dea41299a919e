"""ggml, the library below llama.cpp, which llama-cpp-python builds from its source package.

q4_0 weights in the repacked buffer type, its fast path, through the C interface. q4_0 has a float16 scale for 32
weights; larger groups repeat it.
"""

import ctypes
import importlib.util
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from peers.base import Entry, Environment
from peers.problem import Files, Problem, from_bfloat16

ENVIRONMENT = Environment(
    "ggml",
    ("numpy>=1.24,<3", "--no-binary llama-cpp-python llama-cpp-python==0.3.36"),
    build_variables={"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAMA_BUILD_TOOLS=OFF -DLLAVA_BUILD=OFF"},
)
F32, Q4_0, I32 = 0, 2, 26
BLOCK = 32


class InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class Library:
    """The C functions. All handles are void pointers."""

    def __init__(self) -> None:
        folder = Path(importlib.util.find_spec("llama_cpp").origin).parent / "lib"
        self.libraries = [
            ctypes.CDLL(str(folder / f"lib{name}.so"), ctypes.RTLD_GLOBAL) for name in ("ggml-base", "ggml-cpu")
        ]

    def __call__(self, name: str, *arguments: Any, returns: Any = ctypes.c_void_p) -> Any:
        function = next(getattr(lib, name) for lib in self.libraries if hasattr(lib, name))
        function.restype = returns
        return function(
            *(ctypes.c_int64(a) if isinstance(a, int) and not isinstance(a, bool) else a for a in arguments)
        )

    def handle(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        return ctypes.c_void_p(self(name, *arguments))

    def context(self, tensors: int) -> ctypes.c_void_p:
        size = tensors * self("ggml_tensor_overhead", returns=ctypes.c_size_t)
        size += self("ggml_graph_overhead", returns=ctypes.c_size_t)
        return self.handle("ggml_init", InitParams(size, None, True))

    def tensor(self, context: Any, kind: int, *shape: int) -> ctypes.c_void_p:
        return self.handle(f"ggml_new_tensor_{len(shape)}d", context, ctypes.c_int(kind), *shape)

    def repacked_buffers(self) -> ctypes.c_void_p:
        """The buffer type that keeps weights in the order of this CPU's kernels."""
        registry = self.handle("ggml_backend_cpu_reg")
        device = self.handle("ggml_backend_reg_dev_get", registry, 0)
        get = self("ggml_backend_reg_get_proc_address", registry, b"ggml_backend_dev_get_extra_bufts")
        types = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(get)(device)
        i = 0
        while types[i]:
            if self("ggml_backend_buft_name", ctypes.c_void_p(types[i]), returns=ctypes.c_char_p) == b"CPU_REPACK":
                return ctypes.c_void_p(types[i])
            i += 1
        raise RuntimeError("this build has no repacked buffer type")


class Ggml(Entry):
    environment = ENVIRONMENT

    @classmethod
    def refuse(cls, problem: Problem) -> str | None:
        widths = [k for _, _, k in problem.matrices().values()]
        return None if all(k % BLOCK == 0 for k in widths) else f"K must be a multiple of {BLOCK}"

    @classmethod
    def versions(cls) -> dict[str, str]:
        return {"ggml of llama-cpp-python": version("llama-cpp-python")}

    def __init__(self, files: Files, threads: int):
        super().__init__(files, threads)
        self.ggml = Library()
        self.backend = self.ggml.handle("ggml_backend_cpu_init")
        self.ggml("ggml_backend_cpu_set_n_threads", self.backend, ctypes.c_int(threads))
        self.layers = [self.weights_of_layer() for _ in range(self.problem.copies)]
        self.scratch: list[tuple[Any, Any]] = []

    def weights_of_layer(self) -> dict[str, Any]:
        """Tensors in the repacked buffer type."""
        shapes = self.shapes()
        context = self.ggml.context(len(shapes))
        tensors = {name: self.ggml.tensor(context, Q4_0, *shape) for name, (shape, _) in shapes.items()}
        self.ggml("ggml_backend_alloc_ctx_tensors_from_buft", context, self.ggml.repacked_buffers())
        for name, (_, blocks) in shapes.items():
            self.set(tensors[name], blocks())
        return tensors

    def shapes(self) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Name -> (shape, innermost first; function that gives its q4_0 blocks)."""
        raise NotImplementedError

    def blocks(self, name: str, expert: int) -> np.ndarray:
        """uint8 [N, K/32, 18]: the float16 scale, then 16 bytes; low nibbles are the first 16 values."""
        q = (self.files.int_weights(name, expert) + 8).astype(np.uint8)
        n, k = q.shape
        q = q.reshape(n, k // BLOCK, 2, 16)
        scales = self.files["s" + name[1:]][expert].astype(np.float16)
        blocks = np.empty((n, k // BLOCK, 18), np.uint8)
        blocks[..., :2] = np.repeat(scales, k // BLOCK // scales.shape[1], 1)[..., None].view(np.uint8)
        blocks[..., 2:] = q[:, :, 0] | (q[:, :, 1] << 4)
        return blocks

    def set(self, tensor: Any, array: np.ndarray) -> None:
        array = np.ascontiguousarray(array)
        self.ggml(
            "ggml_backend_tensor_set", tensor, array.ctypes.data_as(ctypes.c_void_p), 0, array.nbytes, returns=None
        )

    def graph(self, context: Any, result: Any) -> Any:
        graph = self.ggml.handle("ggml_new_graph", context)
        self.ggml("ggml_build_forward_expand", graph, result, returns=None)
        self.scratch.append((self.ggml.handle("ggml_backend_alloc_ctx_tensors", context, self.backend), context))
        return graph

    def free_scratch(self) -> None:
        for buffer, context in self.scratch:
            self.ggml("ggml_backend_buffer_free", buffer, returns=None)
            self.ggml("ggml_free", context, returns=None)
        self.scratch = []

    def compute(self, graph: Any) -> None:
        status = self.ggml("ggml_backend_graph_compute", self.backend, graph, returns=ctypes.c_int)
        if status != 0:
            raise RuntimeError(f"ggml_backend_graph_compute returned {status}")

    def to_numpy(self, output: Any) -> np.ndarray:
        result = np.empty((self.m, self.features), np.float32)
        self.ggml(
            "ggml_backend_tensor_get", output, result.ctypes.data_as(ctypes.c_void_p), 0, result.nbytes, returns=None
        )
        return result


class Linear(Ggml):
    name = "ggml q4_0"
    kind = "linear"

    def shapes(self) -> dict[str, tuple[tuple[int, ...], Any]]:
        return {"w": ((self.problem.k, self.problem.n), lambda: self.blocks("w", 0))}

    def inputs(self, m: int) -> None:
        self.free_scratch()
        self.m, self.features = m, self.problem.n
        self.graphs = []
        for layer in self.layers:
            context = self.ggml.context(4)
            x = self.ggml.tensor(context, F32, self.problem.k, m)
            y = self.ggml.handle("ggml_mul_mat", context, layer["w"], x)
            self.graphs.append((self.graph(context, y), y))
            self.set(x, from_bfloat16(self.files[f"x-{m}"]))

    def call(self, i: int) -> Any:
        graph, y = self.graphs[i % len(self.graphs)]
        self.compute(graph)
        return y


class Moe(Ggml):
    """The graph that llama.cpp makes: mul_mat_id for gate and up, swiglu, mul_mat_id, weights, sum."""

    name = "ggml q4_0"
    kind = "moe"

    def shapes(self) -> dict[str, tuple[tuple[int, ...], Any]]:
        p = self.problem
        h, inner, experts = p.hidden, p.intermediate, range(p.experts)

        def half(first: int) -> Any:
            return lambda: np.stack([self.blocks("w13", e)[first : first + inner] for e in experts])

        return {
            "gate": ((h, inner, p.experts), half(0)),
            "up": ((h, inner, p.experts), half(inner)),
            "down": ((inner, h, p.experts), lambda: np.stack([self.blocks("w2", e) for e in experts])),
        }

    def inputs(self, m: int) -> None:
        self.free_scratch()
        self.m, self.features = m, self.problem.hidden
        self.ids, self.gates = self.files[f"ids-{m}"], self.files[f"gates-{m}"]
        self.graphs = [self.layer_graph(layer, m) for layer in self.layers]

    def layer_graph(self, layer: dict[str, Any], m: int) -> tuple:
        p, ggml = self.problem, self.ggml
        context = ggml.context(16 + 3 * p.top_k)
        x = ggml.tensor(context, F32, p.hidden, 1, m)
        ids = ggml.tensor(context, I32, p.top_k, m)
        gates = ggml.tensor(context, F32, 1, p.top_k, m)
        gate = ggml.handle("ggml_mul_mat_id", context, layer["gate"], x, ids)
        up = ggml.handle("ggml_mul_mat_id", context, layer["up"], x, ids)
        hidden = ggml.handle("ggml_swiglu_split", context, gate, up)
        down = ggml.handle("ggml_mul_mat_id", context, layer["down"], hidden, ids)  # [H, k, m]
        down = ggml.handle("ggml_mul", context, down, gates)
        row = 4 * p.hidden
        out = None
        for slot in range(p.top_k):
            one = ggml.handle("ggml_view_2d", context, down, p.hidden, m, row * p.top_k, row * slot)
            out = one if out is None else ggml.handle("ggml_add", context, out, one)
        graph = self.graph(context, out)
        self.set(x, from_bfloat16(self.files[f"x-{m}"]))
        return graph, out, ids, gates

    def call(self, i: int) -> Any:
        graph, out, ids, gates = self.graphs[i % len(self.graphs)]
        self.set(ids, self.ids[i % len(self.ids)])
        self.set(gates, self.gates[i % len(self.gates)])
        self.compute(graph)
        return out


ENTRIES = [Linear, Moe]
