"""PyTorch's own operators, of the torch that runs the benchmark."""

from typing import Any

from peers.base import TorchEntry
from peers.problem import Files, Problem


class DynQuant(TorchEntry):
    """aten::_dyn_quant_matmul_4bit; on x86 a portable reference, on Arm KleidiAI."""

    def pack(self, name: str, expert: int) -> Any:
        torch = self.torch
        _, n, k = self.problem.matrices()[name]
        channelwise = self.problem.group == -1
        scales = self.scales(name)[expert].to(torch.float32 if channelwise else torch.bfloat16)
        weights = self.tensor(self.files[name][expert])
        return torch.ops.aten._dyn_quant_pack_4bit_weight(weights, scales, None, self.files.group(k), k, n)

    def multiply(self, x: Any, packed: Any, name: str) -> Any:
        _, n, k = self.problem.matrices()[name]
        # Groups take float32 rows only.
        x = x if self.problem.group == -1 else x.float()
        return self.torch.ops.aten._dyn_quant_matmul_4bit(x, packed, self.files.group(k), k, n)


class DynQuantLinear(DynQuant):
    name = "ATen dyn_quant W4A8"
    kind = "linear"
    bytes_per_weight = 0.8

    def __init__(self, files: Files, threads: int):
        super().__init__(files, threads)
        self.layers = self.copies(self.pack("w", 0))

    def call(self, i: int) -> Any:
        return self.multiply(self.x, self.layers[i % len(self.layers)][0], "w")


class DynQuantMoe(DynQuant):
    """What vLLM composes of it: expert by expert."""

    name = "ATen dyn_quant W4A8, composed"
    kind = "moe"
    bytes_per_weight = 0.8

    def __init__(self, files: Files, threads: int):
        super().__init__(files, threads)
        experts = range(self.problem.experts)
        self.w13 = [self.pack("w13", e) for e in experts]
        self.w2 = [self.pack("w2", e) for e in experts]

    def call(self, i: int) -> Any:
        torch = self.torch
        ids, gates = self.ids[i % len(self.ids)], self.gates[i % len(self.gates)]
        out = torch.zeros(self.x.shape, dtype=torch.float32)
        for expert in ids.unique().tolist():
            token, slot = torch.where(ids == expert)
            gate, up = self.multiply(self.x[token], self.w13[expert], "w13").chunk(2, 1)
            y = self.multiply(torch.nn.functional.silu(gate) * up, self.w2[expert], "w2")
            out.index_add_(0, token, y.float() * gates[token, slot, None])
        return out.bfloat16()


class Int4PackLinear(TorchEntry):
    """aten::_weight_int4pack_mm_for_cpu: int4 weights, bfloat16 activations."""

    name = "ATen int4pack W4A16"
    kind = "linear"

    @classmethod
    def refuse(cls, problem: Problem) -> str | None:
        if problem.group not in (32, 64, 128, 256):
            return "groups of 32, 64, 128 or 256 only"
        return None

    def __init__(self, files: Files, threads: int):
        super().__init__(files, threads)
        torch = self.torch
        q = self.tensor(files.int_weights("w", 0)).to(torch.int32) + 8
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q, 1)
        scales = self.scales("w")[0].t().bfloat16()
        scales_zeros = torch.stack([scales, torch.zeros_like(scales)], 2).contiguous()  # [K/g, N, 2]; zero: of value 8
        self.layers = self.copies(packed, scales_zeros)

    def call(self, i: int) -> Any:
        packed, scales_zeros = self.layers[i % len(self.layers)]
        return self.torch.ops.aten._weight_int4pack_mm_for_cpu(self.x, packed, self.problem.group, scales_zeros)


class BFloat16Linear(TorchEntry):
    name = "torch bf16 linear"
    kind = "linear"
    weights = "bf16"
    bytes_per_weight = 2.0

    def __init__(self, files: Files, threads: int):
        super().__init__(files, threads)
        self.layers = self.copies(self.tensor(files.float_weights("w", 0)).bfloat16())

    def call(self, i: int) -> Any:
        return self.torch.nn.functional.linear(self.x, self.layers[i % len(self.layers)][0])


class Int8Linear(TorchEntry):
    """aten::_int_mm with int8 weights per row, and rows quantized and scaled by torch operators around it."""

    name = "torch _int_mm W8A8"
    kind = "linear"
    weights = "int8"
    bytes_per_weight = 1.0

    def __init__(self, files: Files, threads: int):
        super().__init__(files, threads)
        self.layers = [(q.t(), scale) for q, scale in self.copies(*self.int8_weights("w", 0))]

    def call(self, i: int) -> Any:
        q, scale = self.layers[i % len(self.layers)]
        x = self.x.float()
        row_scale = x.abs().amax(1, keepdim=True) / 127
        rows = (x / row_scale).round().to(self.torch.int8)
        return (self.torch._int_mm(rows, q) * (row_scale * scale)).bfloat16()


class Int8Matmul(Int8Linear):
    """aten::_int_mm alone: rows that were quantized before, int32 sums."""

    name = "torch _int_mm int8 alone"

    def inputs(self, m: int) -> None:
        super().inputs(m)
        x = self.x.float()
        self.row_scale = x.abs().amax(1, keepdim=True) / 127
        self.rows = (x / self.row_scale).round().to(self.torch.int8)

    def call(self, i: int) -> Any:
        self.used = self.layers[i % len(self.layers)]
        return self.torch._int_mm(self.rows, self.used[0])

    def to_numpy(self, output: Any) -> Any:
        return (output * (self.row_scale * self.used[1])).numpy()


ENTRIES = [DynQuantLinear, Int4PackLinear, BFloat16Linear, Int8Linear, Int8Matmul, DynQuantMoe]
