"""Sizes of a model in a GGUF file, and tables of its tensors: a subclass for each architecture (architectures.py)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from qwen3_moe import Shapes

# Tensors of a layer by name, and the names of their sizes, rows first.
ATTENTION = {
    "attn_norm.weight": "hidden",
    "attn_q.weight": "wide hidden",
    "attn_k.weight": "narrow hidden",
    "attn_v.weight": "narrow hidden",
    "attn_output.weight": "hidden wide",
}
NORMS_OF_HEADS = {"attn_q_norm.weight": "head_dim", "attn_k_norm.weight": "head_dim"}
EXPERTS = {
    "ffn_gate_inp.weight": "experts hidden",
    "ffn_gate_exps.weight": "experts intermediate hidden",
    "ffn_up_exps.weight": "experts intermediate hidden",
    "ffn_down_exps.weight": "experts hidden intermediate",
}
# The same of the whole model.
EMBEDDING = {"token_embd.weight": "vocabulary hidden"}
OUTPUT = {"output_norm.weight": "hidden", "output.weight": "vocabulary hidden"}


@dataclass(frozen=True)
class GGUFShapes(Shapes):
    """Sizes of a model; the defaults are those of Qwen3-30B-A3B.

    Attributes:
        model: whose sizes the defaults are.
        architecture: of the file.
        kinds: a letter for each layer; repeated if there are more layers.
        tables: of the tensors of a layer of each kind.
        outer: the tensors of no layer.
        checkpoint: whether the other formats can be written, too.
    """

    model: ClassVar[str] = "Qwen3-30B-A3B"
    architecture: ClassVar[str] = "qwen3moe"
    kinds: ClassVar[str] = "A"
    tables: ClassVar[dict[str, dict[str, str]]] = {
        "A": {**ATTENTION, **NORMS_OF_HEADS, "ffn_norm.weight": "hidden", **EXPERTS}
    }
    outer: ClassVar[dict[str, str]] = {**EMBEDDING, **OUTPUT}
    checkpoint: ClassVar[bool] = True

    def config(self) -> dict[str, Any]:
        """config.json; beside a file that says all there is nothing in it."""
        return super().config() if self.checkpoint else {}

    @property
    def wide(self) -> int:
        """Of all heads of queries."""
        return self.heads * self.head_dim

    @property
    def narrow(self) -> int:
        """Of all heads of keys."""
        return self.kv_heads * self.head_dim

    @property
    def blocks(self) -> int:
        """Layers of the file, with those behind the last that guess further tokens (MTP)."""
        return self.layers

    def kind(self, layer: int) -> str:
        """A letter of `kinds`."""
        return self.kinds[layer % len(self.kinds)]

    def per_layer(self, kinds: str, value: int) -> list[int]:
        """The value for layers of these kinds, 0 for the others."""
        return [value if self.kind(layer) in kinds else 0 for layer in range(self.layers)]

    def keys(self) -> dict[str, Any]:
        """Keys of the file, without the architecture, which it has besides those of gguf_file.py or instead of them."""
        return {}

    def sized(self, table: dict[str, str]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes of a table."""
        for name, sizes in table.items():
            yield name, tuple(int(size) if size.isdigit() else getattr(self, size) for size in sizes.split())

    def layer_parts(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes of a layer's tensors."""
        return self.sized(self.tables[self.kind(layer)])
