"""ktransformers' kt-kernel: its compiled module, without its Python package, which wants a checkpoint."""

import importlib.util
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

from peers.base import Environment, TorchEntry
from peers.problem import Files

ENVIRONMENT = Environment("kt-kernel", ("--no-deps kt-kernel==0.7.2",), torch="any", machines=("x86_64",))


def extension() -> ModuleType:
    """The variant that its own detection picks for this CPU."""
    package = Path(importlib.util.find_spec("kt_kernel").origin).parent
    spec = importlib.util.spec_from_file_location("kt_kernel_cpu_detect", package / "_cpu_detect.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.initialize()[0]


class Moe(TorchEntry):
    name = "kt-kernel int4"
    kind = "moe"
    environment = ENVIRONMENT
    bytes_per_weight = 1.3  # the weights as given and in its own order

    @classmethod
    def versions(cls) -> dict[str, str]:
        return {**super().versions(), "kt-kernel": version("kt-kernel")}

    def __init__(self, files: Files, threads: int):
        super().__init__(files, threads)
        self.kt = extension()
        pool = self.kt.WorkerPoolConfig()
        pool.subpool_count = 1
        pool.subpool_numa_map = [0]
        pool.subpool_thread_count = [self.workers(threads)]
        self.pool = self.kt.CPUInfer(pool)
        inner = self.problem.intermediate
        w13, w2 = self.tensor(files["w13"]), self.tensor(files["w2"])
        s13, s2 = self.scales_of_32("w13"), self.scales_of_32("w2")
        given = {
            "gate": (w13[:, :inner], s13[:, :inner]),
            "up": (w13[:, inner:], s13[:, inner:]),
            "down": (w2, s2),
        }
        self.masks = self.torch.zeros(self.problem.experts, dtype=self.torch.bool)  # none of them on a GPU
        self.layers = [self.layer(given, index) for index in range(self.problem.copies)]

    def workers(self, threads: int) -> int:
        return threads

    def scales_of_32(self, name: str) -> Any:
        """Larger groups repeat their scale: given a group of 64 or 128, its result is NaN."""
        scales = self.scales(name).bfloat16()
        return scales.repeat_interleave(self.problem.matrices()[name][2] // 32 // scales.shape[2], 2).contiguous()

    def layer(self, given: dict[str, tuple], index: int) -> Any:
        p = self.problem
        config = self.kt.moe.MOEConfig(p.experts, p.top_k, p.hidden, p.intermediate, self.masks.data_ptr())
        config.layer_idx = index
        config.pool = self.pool.backend_
        config.max_len = 8192
        config.quant_config.bits = 4
        config.quant_config.group_size = 32
        config.quant_config.zero_point = False
        for name, (weights, scales) in given.items():
            setattr(config, f"{name}_projs", [[w.data_ptr() for w in weights]])
            setattr(config, f"{name}_scales", [[s.data_ptr() for s in scales]])
        layer = self.kt.moe.AMXInt4_KGroup_MOE(config)  # without AMX it runs on AVX-512
        order = self.torch.arange(p.experts)
        self.pool.submit(layer.load_weights_task(order.data_ptr()))
        self.pool.sync()
        return layer

    def inputs(self, m: int) -> None:
        super().inputs(m)
        self.ids = [ids.long() for ids in self.ids]
        self.out = self.torch.empty_like(self.x)
        self.rows = self.torch.tensor([m], dtype=self.torch.int32)

    def call(self, i: int) -> Any:
        ids, gates = self.ids[i % len(self.ids)], self.gates[i % len(self.gates)]
        pointers = [t.data_ptr() for t in (ids, gates, self.x, self.out)]
        layer = self.layers[i % len(self.layers)]
        self.pool.submit(layer.forward_task(self.rows.data_ptr(), self.problem.top_k, *pointers, False))
        self.pool.sync()
        return self.out


class MoeOneLess(Moe):
    """Its workers and the thread that hands out tasks spin: with a worker per core a call takes whole time slices."""

    name = "kt-kernel int4, a worker less"

    def workers(self, threads: int) -> int:
        return max(1, threads - 1)


ENTRIES = [Moe, MoeOneLess]
