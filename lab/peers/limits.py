"""What the machine can do, measured like a peer: reading as many bytes as w4a8 does, and its multiply instruction.

Both are C++ (benchmarks/machine_limits.cpp), called through build/bench/benchmarks/libw4a8_limits.so.
"""

import ctypes
import os
import platform

import numpy as np
from folders import NATIVE

from peers.base import Entry
from peers.own import AVX2
from peers.problem import Files, Problem, experts_used

LIBRARY = NATIVE / "libw4a8_limits.so"


def weight_bytes(problem: Problem) -> list[int]:
    """Bytes of weights and scales of one expert's matrices: bfloat16 scales, float32 when channelwise."""
    sizes = []
    for _, n, k in problem.matrices().values():
        sizes.append(n * k // 2 + (4 * n if problem.group == -1 else 2 * n * k // problem.group))
    return sizes


class Limit(Entry):
    kind = "any"
    weights = ""
    always = True
    checked = False

    def __init__(self, files: Files, threads: int):
        super().__init__(files, threads)
        self.library = ctypes.CDLL(str(LIBRARY))
        self.library.w4a8_limits_open.argtypes = [ctypes.c_int64]
        self.library.w4a8_limits_read.argtypes = [ctypes.c_int64, ctypes.c_int]
        self.library.w4a8_limits_read.restype = ctypes.c_double
        self.library.w4a8_limits_multiply.argtypes = [ctypes.c_int]
        self.library.w4a8_limits_multiply.restype = ctypes.c_double

    def call(self, i: int) -> np.ndarray:
        return np.zeros(0)


class Reading(Limit):
    """Reads the bytes of the weights that a call touches; the place moves through as many bytes as w4a8 cycles."""

    name = "limit: reading"
    bytes_per_weight = 0.55

    def __init__(self, files: Files, threads: int):
        super().__init__(files, threads)
        experts = next(iter(self.problem.matrices().values()))[0]
        self.library.w4a8_limits_open(sum(weight_bytes(self.problem)) * experts * self.problem.copies)

    def inputs(self, m: int) -> None:
        used = experts_used(self.files, m) if self.problem.kind == "moe" else 1
        self.bytes = int(used * sum(weight_bytes(self.problem)))

    def timed(self, i: int) -> float:
        return self.library.w4a8_limits_read(self.bytes, self.threads)


class Multiplying(Limit):
    """The time the multiply instruction of w4a8's kernel would take for all multiply-accumulates of a call."""

    name = "limit: multiply"
    bytes_per_weight = 0
    calls = 25  # of about 7 ms each, whatever time they stand for

    @classmethod
    def refuse(cls, problem: Problem) -> str | None:
        if os.environ.get("W4A8_KERNEL") == "scalar":
            return "the scalar kernel has no multiply instruction of its own"
        return None

    def inputs(self, m: int) -> None:
        self.macs = self.problem.macs(m)

    def timed(self, i: int) -> float:
        rate = self.library.w4a8_limits_multiply(self.threads)
        if rate <= 0:
            raise RuntimeError("no multiply instruction is measured for this kernel")
        return self.macs / rate


class Avx2Multiplying(Multiplying):
    name = "limit: multiply x86_avx2"
    environment = AVX2
    always = False

    @classmethod
    def refuse(cls, problem: Problem) -> str | None:
        return None if platform.machine() == "x86_64" else "x86 only"


ENTRIES = [Reading, Multiplying, Avx2Multiplying]
