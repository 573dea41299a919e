"""The shapes of Qwen3.5-35B-A3B, three layers of linear attention to one of attention: a GGUF file alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from real_size.gguf_shapes import ATTENTION, EXPERTS, NORMS_OF_HEADS, GGUFShapes

_NORMS = {"attn_norm.weight": "hidden", "post_attention_norm.weight": "hidden"}
_EXPERTS = {
    **EXPERTS,
    "ffn_gate_inp_shexp.weight": "hidden",
    "ffn_gate_shexp.weight": "intermediate hidden",
    "ffn_up_shexp.weight": "intermediate hidden",
    "ffn_down_shexp.weight": "hidden intermediate",
}
_ATTENTION = {
    **_NORMS,
    **NORMS_OF_HEADS,
    **ATTENTION,
    "attn_q.weight": "gated hidden",
}


@dataclass(frozen=True)
class HybridShapes(GGUFShapes):
    """L linear attention, A attention, G attention of a layer behind the last, which guesses further tokens (MTP)."""

    layers: int = 40
    vocabulary: int = 248320
    heads: int = 16
    kv_heads: int = 2
    head_dim: int = 256
    intermediate: int = 512
    experts: int = 256
    positions: int = 262144
    key_heads: int = 16
    value_heads: int = 32
    state_size: int = 128  # of a key and of a value
    width: int = 4  # of the convolution
    guessing: int = 0  # layers that guess

    model: ClassVar[str] = "Qwen3.5-35B-A3B"
    architecture: ClassVar[str] = "qwen35moe"
    checkpoint: ClassVar[bool] = False
    kinds: ClassVar[str] = "LLLA"
    tables: ClassVar[dict[str, dict[str, str]]] = {
        "L": {
            **_NORMS,
            "attn_qkv.weight": "channels hidden",
            "attn_gate.weight": "values hidden",
            "ssm_conv1d.weight": "channels width",
            "ssm_dt.bias": "value_heads",
            "ssm_a": "value_heads",
            "ssm_beta.weight": "value_heads hidden",
            "ssm_alpha.weight": "value_heads hidden",
            "ssm_norm.weight": "state_size",
            "ssm_out.weight": "hidden values",
            **_EXPERTS,
        },
        "A": {**_ATTENTION, **_EXPERTS},
        "G": {
            **_ATTENTION,
            "nextn.eh_proj.weight": "hidden both",
            **{f"nextn.{norm}.weight": "hidden" for norm in ("enorm", "hnorm", "shared_head_norm")},
            **_EXPERTS,
        },
    }

    @property
    def values(self) -> int:
        """Of all heads of values."""
        return self.value_heads * self.state_size

    @property
    def channels(self) -> int:
        """Of the convolution."""
        return 2 * self.key_heads * self.state_size + self.values

    @property
    def gated(self) -> int:
        """Queries and their gates."""
        return 2 * self.wide

    @property
    def both(self) -> int:
        """A token's row, and that of the layers in front of it."""
        return 2 * self.hidden

    @property
    def blocks(self) -> int:
        """With those that guess."""
        return self.layers + self.guessing

    def kind(self, layer: int) -> str:
        """As above."""
        return super().kind(layer) if layer < self.layers else "G"

    def keys(self) -> dict[str, int | list[int]]:
        """Those that the dense model's file does not have."""
        guessing = {"nextn_predict_layers": self.guessing} if self.guessing else {}
        return guessing | {
            "expert_shared_feed_forward_length": self.intermediate,
            "ssm.conv_kernel": self.width,
            "ssm.state_size": self.state_size,
            "ssm.group_count": self.key_heads,
            "ssm.time_step_rank": self.value_heads,
            "ssm.inner_size": self.values,
            "full_attention_interval": len(self.kinds),
            "rope.dimension_count": self.head_dim // 4,
            "rope.dimension_sections": [11, 11, 10, 0],
        }
