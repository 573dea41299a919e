"""The Q4_0 file: the int4 weights of the checkpoint copied, the output layer as Q6_K.

Q4_0 has 32 values of 4 bits and a float16 scale. The checkpoint's scales are exact in float16, and a larger group
repeats its scale, so every dequantized weight is the checkpoint's. Embeddings are rounded to Q4_0 and the output layer
to Q6_K, as llama.cpp's own converter has them in a Q4_0 model; vLLM keeps both in bfloat16.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from peers.problem import from_bfloat16

from real_size.files import Reader
from real_size.gguf_file import BLOCKS, SUPERBLOCK, Part
from real_size.gguf_shapes import GGUFShapes
from real_size.values import MOST_VALUES

# Modules of the checkpoint, by the tensor of the file; {} is the expert.
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
MODULES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
(BLOCK, Q4_0_BYTES), Q6_K_BYTES = BLOCKS["Q4_0"], BLOCKS["Q6_K"][1]


def q4_0(words: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """compressed-tensors' words and scales as Q4_0.

    Args:
        words: int32 [N, K / 8], nibble i = column i, value + 8.
        scales: float32 [N, K / g], g a multiple of 32.

    Returns:
        uint8 [N, K / 32 * 18]; in a block byte j has value j in its low nibble and value j + 16 in its high one.
    """
    rows, columns = words.shape[0], words.shape[1] * 8
    pairs = np.ascontiguousarray(words).view(np.uint8).reshape(rows, columns // BLOCK, BLOCK // 2)
    values = np.empty((*pairs.shape, 2), np.uint8)
    values[..., 0], values[..., 1] = pairs & 15, pairs >> 4
    values = values.reshape(rows, columns // BLOCK, BLOCK)
    half = scales.astype("<f2")
    if not np.array_equal(half.astype(np.float32), scales):
        raise ValueError("scales are not exact in float16, which Q4_0 has")
    out = np.empty((rows, columns // BLOCK, Q4_0_BYTES), np.uint8)
    repeated = np.repeat(half, columns // BLOCK // scales.shape[1], axis=1)
    out[..., :2] = np.ascontiguousarray(repeated).view(np.uint8).reshape(rows, -1, 2)
    out[..., 2:] = values[..., : BLOCK // 2] | (values[..., BLOCK // 2 :] << 4)
    return out.reshape(rows, -1)


def q6_k(values: np.ndarray) -> np.ndarray:
    """float32 [N, K] rounded to Q6_K, uint8 [N, K / 256 * 210].

    A block is 256 values v = d * s * (q - 32): ql (128 bytes, the low 4 bits of q), qh (64, the high 2), s (16, int8,
    one for 16 values), d (float16). Of each half of 128 values, value l + 32 i (l < 32) has its low bits in byte
    l + 32 (i % 2) of ql, nibble i / 2, and its high ones in byte l of qh, bits 2 i.
    """
    rows, columns = values.shape
    blocks = values.reshape(rows, columns // SUPERBLOCK, 16, 16)
    largest = np.abs(blocks).max(-1) / 31
    d = (largest.max(-1, keepdims=True) / 127).astype("<f2")
    unit = np.maximum(d.astype(np.float32), 1e-30)
    steps = np.maximum(np.ceil(largest / unit), 1).clip(max=127)
    q = (np.rint(blocks / (steps * unit)[..., None]).clip(-32, 31) + 32).astype(np.uint8)
    q = q.reshape(rows, -1, 2, 4, 32)  # half, i, l
    low, high = q & 15, q >> 4
    out = np.empty((rows, columns // SUPERBLOCK, Q6_K_BYTES), np.uint8)
    out[..., :128] = (low[..., :2, :] | (low[..., 2:, :] << 4)).reshape(rows, -1, 128)
    out[..., 128:192] = (high[..., 0, :] | high[..., 1, :] << 2 | high[..., 2, :] << 4 | high[..., 3, :] << 6).reshape(
        rows, -1, 64
    )
    out[..., 192:208] = steps.astype(np.int8).view(np.uint8)
    out[..., 208:] = d.view(np.uint8)
    return out.reshape(rows, -1)


def module_of(part: Part) -> str:
    """The module of the checkpoint that has a tensor of the file."""
    leaf = part.name.removesuffix(".weight").split(".")[-1]
    return OUTER[leaf] if part.layer is None else f"model.layers.{part.layer}.{MODULES[leaf]}"


class FromCheckpoint:
    """The data of a tensor, made of the checkpoint."""

    def __init__(self, shapes: GGUFShapes, checkpoint: Path) -> None:
        self.shapes, self.checkpoint = shapes, checkpoint

    @cached_property
    def reader(self) -> Reader:
        """Of the checkpoint, which may be written after this was made."""
        return Reader(self.checkpoint)

    def type_of(self, part: Part) -> str:
        """The type of a tensor that is not float32."""
        return "Q6_K" if part.name == "output.weight" else "Q4_0"

    def data(self, part: Part) -> np.ndarray:
        """float32, or uint8 blocks, rows first."""
        module = module_of(part)
        if part.is_float:
            return from_bfloat16(self.reader.get(f"{module}.weight"))
        if part.layer is None:
            return self._rows(module, q6_k if self.type_of(part) == "Q6_K" else self._rounded)
        if len(part.shape) == 2:
            return self._quantized(module)
        return np.stack([self._quantized(module.format(e)) for e in range(self.shapes.experts)])

    def _quantized(self, module: str) -> np.ndarray:
        scales = from_bfloat16(self.reader.get(f"{module}.weight_scale"))
        return q4_0(self.reader.get(f"{module}.weight_packed"), scales)

    def _rows(self, name: str, convert: Any) -> np.ndarray:
        parts = self.reader.parts(f"{name}.weight", MOST_VALUES)
        return np.concatenate([convert(from_bfloat16(part)) for part in parts])

    @staticmethod
    def _rounded(values: np.ndarray) -> np.ndarray:
        from gguf import GGMLQuantizationType, quants

        return quants.quantize(values, GGMLQuantizationType.Q4_0)
