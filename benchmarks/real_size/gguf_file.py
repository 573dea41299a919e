"""The same model as GGUF for llama.cpp: the int4 weights copied to Q4_0, the output layer as Q6_K.

Q4_0 has 32 values of 4 bits and a float16 scale. The checkpoint's scales are exact in float16, and a larger group
repeats its scale, so every dequantized weight is the checkpoint's. Embeddings are rounded to Q4_0 and the output layer
to Q6_K, as llama.cpp's own converter has them in a Q4_0 model; vLLM keeps both in bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from peers.problem import from_bfloat16

from real_size.files import Reader
from real_size.shapes import Shapes
from real_size.values import MOST_VALUES

BLOCK = 32  # values of Q4_0
SUPERBLOCK = 256  # of Q6_K
Q4_0_BYTES, Q6_K_BYTES = 18, 210


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


class _Parts:
    """GGUF tensors of one model: name, type, shape, and how to make the data."""

    def __init__(self, shapes: Shapes, reader: Reader) -> None:
        from gguf import GGMLQuantizationType, quants

        self.types, self.quants = GGMLQuantizationType, quants
        self.shapes, self.reader = shapes, reader

    def _quantized(self, module: str) -> np.ndarray:
        scales = from_bfloat16(self.reader.get(f"{module}.weight_scale"))
        return q4_0(self.reader.get(f"{module}.weight_packed"), scales)

    def _stack(self, layer: int, projection: str) -> np.ndarray:
        experts = range(self.shapes.experts)
        return np.stack([self._quantized(f"model.layers.{layer}.mlp.experts.{e}.{projection}") for e in experts])

    def _float(self, name: str) -> np.ndarray:
        return from_bfloat16(self.reader.get(f"{name}.weight"))

    def _rows(self, name: str, convert: Any) -> np.ndarray:
        parts = self.reader.parts(f"{name}.weight", MOST_VALUES)
        return np.concatenate([convert(from_bfloat16(part)) for part in parts])

    def _q4_0_rounded(self, values: np.ndarray) -> np.ndarray:
        return self.quants.quantize(values, self.types.Q4_0)

    def tensors(self) -> Iterator[tuple[str, Any, tuple[int, ...], Any]]:
        """Name, type, shape in values (rows first), and a function that makes the data."""
        s, t = self.shapes, self.types
        table = (s.vocabulary, s.hidden)
        yield "token_embd.weight", t.Q4_0, table, lambda: self._rows("model.embed_tokens", self._q4_0_rounded)
        for layer in range(s.layers):
            yield from self._layer(layer)
        yield "output_norm.weight", t.F32, (s.hidden,), lambda: self._float("model.norm")
        yield "output.weight", t.Q6_K, table, lambda: self._rows("lm_head", q6_k)

    def _layer(self, layer: int) -> Iterator[tuple[str, Any, tuple[int, ...], Any]]:
        s, t = self.shapes, self.types
        source, target = f"model.layers.{layer}", f"blk.{layer}"
        wide, narrow = s.heads * s.head_dim, s.kv_heads * s.head_dim
        for name, module, shape in (
            ("attn_norm", "input_layernorm", (s.hidden,)),
            ("ffn_norm", "post_attention_layernorm", (s.hidden,)),
            ("attn_q_norm", "self_attn.q_norm", (s.head_dim,)),
            ("attn_k_norm", "self_attn.k_norm", (s.head_dim,)),
            ("ffn_gate_inp", "mlp.gate", (s.experts, s.hidden)),
        ):
            yield f"{target}.{name}.weight", t.F32, shape, lambda m=module: self._float(f"{source}.{m}")
        for name, module, shape in (
            ("attn_q", "q_proj", (wide, s.hidden)),
            ("attn_k", "k_proj", (narrow, s.hidden)),
            ("attn_v", "v_proj", (narrow, s.hidden)),
            ("attn_output", "o_proj", (s.hidden, wide)),
        ):
            yield f"{target}.{name}.weight", t.Q4_0, shape, lambda m=module: self._quantized(f"{source}.self_attn.{m}")
        for name, projection in (("gate", "gate_proj"), ("up", "up_proj"), ("down", "down_proj")):
            one = (s.hidden, s.intermediate) if name == "down" else (s.intermediate, s.hidden)
            shape = (s.experts, *one)
            yield f"{target}.ffn_{name}_exps.weight", t.Q4_0, shape, lambda p=projection: self._stack(layer, p)


def nbytes(shapes: Shapes) -> int:
    """About how large the file is: 4.5 bits a weight, 6.6 bits of the output layer."""
    table = shapes.vocabulary * shapes.hidden
    layer = shapes.hidden * (2 * shapes.heads + 2 * shapes.kv_heads) * shapes.head_dim
    layer += 3 * shapes.experts * shapes.hidden * shapes.intermediate
    other = shapes.layers * 4 * shapes.hidden * (shapes.experts + 4) + (64 << 10)
    return (shapes.layers * layer + table) * Q4_0_BYTES // BLOCK + table * Q6_K_BYTES // SUPERBLOCK + other


def write(shapes: Shapes, checkpoint: Path, path: Path, wrote: Any) -> None:
    """Writes the file; calls wrote(bytes) after each tensor. At most one tensor is in memory.

    Args:
        shapes: of the checkpoint.
        checkpoint: folder of the W4A8 (or W4A16) checkpoint.
        path: of the file, which has its name only when it is whole.
        wrote: told how many bytes were written.
    """
    import gguf

    if shapes.hidden % SUPERBLOCK != 0:
        raise ValueError(f"hidden is {shapes.hidden}, expected a multiple of {SUPERBLOCK} (Q6_K)")
    part = path.with_suffix(".part")
    writer = gguf.GGUFWriter(part, "qwen3moe")
    writer.add_name(f"random Qwen3-30B-A3B, {shapes.layers} layers")
    writer.add_context_length(shapes.positions)
    writer.add_block_count(shapes.layers)
    writer.add_embedding_length(shapes.hidden)
    writer.add_feed_forward_length(8 * shapes.intermediate)
    writer.add_head_count(shapes.heads)
    writer.add_head_count_kv(shapes.kv_heads)
    writer.add_key_length(shapes.head_dim)
    writer.add_value_length(shapes.head_dim)
    writer.add_rope_freq_base(1000000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_expert_count(shapes.experts)
    writer.add_expert_used_count(shapes.top_k)
    writer.add_expert_feed_forward_length(shapes.intermediate)
    writer.add_vocab_size(shapes.vocabulary)
    writer.add_tokenizer_model("none")  # token ids only
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    tensors = list(_Parts(shapes, Reader(checkpoint)).tensors())
    for name, kind, shape, _ in tensors:
        if kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor_info(name, shape, np.dtype(np.float32), 4 * int(np.prod(shape)))
        else:
            bytes_shape = gguf.quant_shape_to_byte_shape(shape, kind)
            writer.add_tensor_info(name, bytes_shape, np.dtype(np.uint8), int(np.prod(bytes_shape)), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, _, _, make in tensors:
        data = make()
        writer.write_tensor_data(data)
        wrote(data.nbytes)
    writer.close()
    part.rename(path)
