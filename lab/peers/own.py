"""w4a8 itself."""

import platform
from typing import Any

from peers.base import Environment, TorchEntry
from peers.problem import Files, Problem

AVX2 = Environment("own", torch="any", variables={"W4A8_KERNEL": "x86_avx2"})


class Own(TorchEntry):
    def __init__(self, files: Files, threads: int):
        super().__init__(files, threads)
        import w4a8

        self.w4a8 = w4a8
        # As checkpoints have them: bfloat16 scales of groups, float32 ones of channels.
        self.scale_dtype = self.torch.float32 if self.problem.group == -1 else self.torch.bfloat16

    def pack(self, name: str) -> Any:
        _, n, k = self.problem.matrices()[name]
        weights, scales = self.tensor(self.files[name]), self.scales(name).to(self.scale_dtype)
        return self.w4a8.dyn_quant_pack_4bit_weight(weights, scales, None, self.files.group(k), k, n)

    @classmethod
    def versions(cls) -> dict[str, str]:
        import w4a8

        kernel = w4a8.cpu.active_kernel()
        return {**super().versions(), "w4a8": w4a8.__version__, "kernel": kernel}


class Linear(Own):
    name = "w4a8"
    kind = "linear"
    always = True

    def __init__(self, files: Files, threads: int):
        super().__init__(files, threads)
        self.layers = [self.pack("w")[0] for _ in range(self.problem.copies)]  # packed tensors have pages of their own
        self.group = files.group(self.problem.k)

    def call(self, i: int) -> Any:
        weights = self.layers[i % len(self.layers)]
        return self.w4a8.dyn_quant_matmul_4bit(self.x, weights, self.group, self.problem.k, self.problem.n)


class Moe(Own):
    name = "w4a8"
    kind = "moe"
    always = True

    def __init__(self, files: Files, threads: int):
        super().__init__(files, threads)
        self.layers = [(self.pack("w13"), self.pack("w2")) for _ in range(self.problem.copies)]

    def call(self, i: int) -> Any:
        p = self.problem
        w13, w2 = self.layers[i % len(self.layers)]
        ids, gates = self.ids[i % len(self.ids)], self.gates[i % len(self.gates)]
        h, inner = p.hidden, p.intermediate
        return self.w4a8.dynamic_4bit_int_moe(self.x, ids, gates, w13, w2, h, inner, 2 * inner, p.group, False, 0)


class Avx2(Own):
    """What a CPU without AVX-512 would run."""

    environment = AVX2
    always = False

    @classmethod
    def refuse(cls, problem: Problem) -> str | None:
        return None if platform.machine() == "x86_64" else "x86 only"

    @classmethod
    def versions(cls) -> dict[str, str]:
        return {}


class Avx2Linear(Avx2, Linear):
    name = "w4a8 x86_avx2"


class Avx2Moe(Avx2, Moe):
    name = "w4a8 x86_avx2"


ENTRIES = [Linear, Moe, Avx2Linear, Avx2Moe]
