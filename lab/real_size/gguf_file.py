"""A GGUF file of the model: keys, names and shapes as llama.cpp's converter writes them for Qwen3-MoE."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from qwen3_moe import Shapes

from real_size.qwen35 import HybridShapes

SUPERBLOCK = 256  # values of a block of a K-quant
# Weights and bytes of a block.
BLOCKS = {"F32": (1, 4), "Q4_0": (32, 18), "Q4_K": (SUPERBLOCK, 144), "Q6_K": (SUPERBLOCK, 210)}


@dataclass(frozen=True)
class Part:
    """A tensor of the file.

    Attributes:
        name: in the file.
        module: in the checkpoint; of a stack of experts with {} for the expert.
        shape: in values, rows first.
        layer: or None.
    """

    name: str
    module: str
    shape: tuple[int, ...]
    layer: int | None = None

    @property
    def is_float(self) -> bool:
        """Norms, routers and convolutions."""
        return len(self.shape) == 1 or "gate_inp" in self.name or "conv1d" in self.name


class Source(Protocol):
    """Where the tensors come from."""

    def type_of(self, part: Part) -> str:
        """A name of BLOCKS, for a tensor that is not float32."""

    def data(self, part: Part) -> np.ndarray:
        """float32 of the shape, or uint8 with the blocks of a row along the last axis."""


def parts(shapes: Shapes) -> Iterator[Part]:
    """All tensors in the order of the model."""
    table = (shapes.vocabulary, shapes.hidden)
    yield Part("token_embd.weight", "model.embed_tokens", table)
    for layer in range(shapes.blocks):
        yield from (_layer if shapes.architecture == "qwen3moe" else _hybrid_layer)(shapes, layer)
    yield Part("output_norm.weight", "model.norm", (shapes.hidden,))
    yield Part("output.weight", "lm_head", table)


def _layer(s: Shapes, layer: int) -> Iterator[Part]:
    wide, narrow = s.heads * s.head_dim, s.kv_heads * s.head_dim
    for name, module, shape in (
        ("attn_norm", "input_layernorm", (s.hidden,)),
        ("ffn_norm", "post_attention_layernorm", (s.hidden,)),
        ("attn_q_norm", "self_attn.q_norm", (s.head_dim,)),
        ("attn_k_norm", "self_attn.k_norm", (s.head_dim,)),
        ("attn_q", "self_attn.q_proj", (wide, s.hidden)),
        ("attn_k", "self_attn.k_proj", (narrow, s.hidden)),
        ("attn_v", "self_attn.v_proj", (narrow, s.hidden)),
        ("attn_output", "self_attn.o_proj", (s.hidden, wide)),
    ):
        yield Part(f"blk.{layer}.{name}.weight", f"model.layers.{layer}.{module}", shape, layer)
    yield from _experts(s, layer)


def _experts(s: Shapes, layer: int) -> Iterator[Part]:
    for name, module, shape in (
        ("ffn_gate_inp", "mlp.gate", (s.experts, s.hidden)),
        ("ffn_gate_exps", "mlp.experts.{}.gate_proj", (s.experts, s.intermediate, s.hidden)),
        ("ffn_up_exps", "mlp.experts.{}.up_proj", (s.experts, s.intermediate, s.hidden)),
        ("ffn_down_exps", "mlp.experts.{}.down_proj", (s.experts, s.hidden, s.intermediate)),
    ):
        yield Part(f"blk.{layer}.{name}.weight", f"model.layers.{layer}.{module}", shape, layer)


def _hybrid_layer(s: HybridShapes, layer: int) -> Iterator[Part]:
    for name, shape in s.layer_parts(layer):
        yield Part(f"blk.{layer}.{name}", "", shape, layer)
    yield from _experts(s, layer)


def _type(part: Part, source: Source) -> str:
    return "F32" if part.is_float else source.type_of(part)


def _bytes_shape(part: Part, kind: str) -> tuple[int, ...]:
    weights, size = BLOCKS[kind]
    if part.shape[-1] % weights != 0:
        raise ValueError(f"{part.name} has rows of {part.shape[-1]}, expected a multiple of {weights} ({kind})")
    return *part.shape[:-1], part.shape[-1] // weights * size


def nbytes(shapes: Shapes, source: Source) -> int:
    """About how large the file is: its tensors, and room for keys and names."""
    return (64 << 10) + sum(math.prod(_bytes_shape(part, _type(part, source))) for part in parts(shapes))


def write(shapes: Shapes, source: Source, file_type: str, path: Path, wrote: Callable[[int], None]) -> None:
    """Writes the file; calls wrote(bytes) after each tensor. At most one tensor is in memory.

    Args:
        shapes: of the model.
        source: of the tensors.
        file_type: the name in gguf.LlamaFileType.
        path: of the file, which has its name only when it is whole.
        wrote: told how many bytes were written.

    Raises:
        ValueError: a row is not whole blocks.
    """
    import gguf

    part_path = path.with_suffix(".part")
    writer = gguf.GGUFWriter(part_path, shapes.architecture)
    writer.add_name(f"random {shapes.architecture}, {shapes.layers} layers")
    writer.add_context_length(shapes.positions)
    writer.add_block_count(shapes.blocks)
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
    for key, value in shapes.keys().items():
        name = f"{shapes.architecture}.{key}"
        writer.add_array(name, value) if isinstance(value, list) else writer.add_uint32(name, value)
    writer.add_tokenizer_model("none")  # token ids only
    writer.add_file_type(gguf.LlamaFileType[file_type])
    found = list(parts(shapes))
    for part in found:
        kind = _type(part, source)
        size = _bytes_shape(part, kind)
        if kind == "F32":
            writer.add_tensor_info(part.name, part.shape, np.dtype(np.float32), math.prod(size))
        else:
            raw = gguf.GGMLQuantizationType[kind]
            writer.add_tensor_info(part.name, size, np.dtype(np.uint8), math.prod(size), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for part in found:
        data = source.data(part)
        writer.write_tensor_data(data)
        wrote(data.nbytes)
    writer.close()
    part_path.rename(path)
