"""The shapes of Qwen3.5-35B-A3B, three layers of linear attention to one of attention: a GGUF file alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from real_size.gguf_shapes import EXPERTS, GGUFShapes

INTERVAL = 4  # every so many layers one has attention


@dataclass(frozen=True)
class HybridShapes(GGUFShapes):
    """Sizes of the model, and of its layers of linear attention."""

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
    guessing: int = 0  # layers behind the last, which guess further tokens (MTP)

    model: ClassVar[str] = "Qwen3.5-35B-A3B"
    architecture: ClassVar[str] = "qwen35moe"
    checkpoint: ClassVar[bool] = False

    @property
    def blocks(self) -> int:
        """With those that guess."""
        return self.layers + self.guessing

    def keys(self) -> dict[str, int | list[int]]:
        """Those that the dense model's file does not have."""
        guessing = {"nextn_predict_layers": self.guessing} if self.guessing else {}
        return guessing | {
            "expert_shared_feed_forward_length": self.intermediate,
            "ssm.conv_kernel": self.width,
            "ssm.state_size": self.state_size,
            "ssm.group_count": self.key_heads,
            "ssm.time_step_rank": self.value_heads,
            "ssm.inner_size": self.value_heads * self.state_size,
            "full_attention_interval": INTERVAL,
            "rope.dimension_count": self.head_dim // 4,
            "rope.dimension_sections": [11, 11, 10, 0],
        }

    def layer_parts(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes of a layer's tensors."""
        values = self.value_heads * self.state_size
        channels = 2 * self.key_heads * self.state_size + values
        yield "attn_norm.weight", (self.hidden,)
        yield "post_attention_norm.weight", (self.hidden,)
        if (layer + 1) % INTERVAL == 0 or layer >= self.layers:
            wide, narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim
            yield "attn_q_norm.weight", (self.head_dim,)
            yield "attn_k_norm.weight", (self.head_dim,)
            yield "attn_q.weight", (2 * wide, self.hidden)
            yield "attn_k.weight", (narrow, self.hidden)
            yield "attn_v.weight", (narrow, self.hidden)
            yield "attn_output.weight", (self.hidden, wide)
        else:
            yield "attn_qkv.weight", (channels, self.hidden)
            yield "attn_gate.weight", (values, self.hidden)
            yield "ssm_conv1d.weight", (channels, self.width)
            yield "ssm_dt.bias", (self.value_heads,)
            yield "ssm_a", (self.value_heads,)
            yield "ssm_beta.weight", (self.value_heads, self.hidden)
            yield "ssm_alpha.weight", (self.value_heads, self.hidden)
            yield "ssm_norm.weight", (self.state_size,)
            yield "ssm_out.weight", (self.hidden, values)
        if layer >= self.layers:
            yield "nextn.eh_proj.weight", (self.hidden, 2 * self.hidden)
            for norm in ("enorm", "hnorm", "shared_head_norm"):
                yield f"nextn.{norm}.weight", (self.hidden,)
        yield from self.sized(EXPERTS)
        yield "ffn_gate_inp_shexp.weight", (self.hidden,)
        yield "ffn_gate_shexp.weight", (self.intermediate, self.hidden)
        yield "ffn_up_shexp.weight", (self.intermediate, self.hidden)
        yield "ffn_down_shexp.weight", (self.hidden, self.intermediate)
