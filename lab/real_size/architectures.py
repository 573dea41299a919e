"""The architectures of GGUF files that can be written, and the sizes of two of them: data that gguf_shapes.py reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from real_size.gguf_shapes import ATTENTION, EMBEDDING, EXPERTS, NORMS_OF_HEADS, GGUFShapes
from real_size.qwen35 import HybridShapes


@dataclass(frozen=True)
class NemotronShapes(GGUFShapes):
    """Nemotron-3-Nano-30B-A3B: M Mamba-2, E experts without a gate and a shared one, * attention without rotation."""

    layers: int = 52
    vocabulary: int = 131072
    group: int = 32
    hidden: int = 2688
    kv_heads: int = 2
    intermediate: int = 1856
    top_k: int = 6
    positions: int = 262144
    shared: int = 3712  # of the shared expert
    mixers: int = 64  # heads of Mamba-2
    mixer_dim: int = 64
    groups: int = 8  # of these heads
    state_size: int = 128
    width: int = 4  # of the convolution

    model: ClassVar[str] = "Nemotron-3-Nano-30B-A3B"
    architecture: ClassVar[str] = "nemotron_h_moe"
    checkpoint: ClassVar[bool] = False
    kinds: ClassVar[str] = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
    tables: ClassVar[dict[str, dict[str, str]]] = {
        "M": {
            "attn_norm.weight": "hidden",
            "ssm_in.weight": "projected hidden",
            "ssm_conv1d.weight": "channels width",
            "ssm_conv1d.bias": "channels",
            "ssm_dt.bias": "mixers",
            "ssm_a": "mixers 1",
            "ssm_d": "mixers 1",
            "ssm_norm.weight": "groups group_dim",
            "ssm_out.weight": "hidden inner",
        },
        "E": {
            "attn_norm.weight": "hidden",
            **{name: sizes for name, sizes in EXPERTS.items() if name != "ffn_gate_exps.weight"},
            "exp_probs_b.bias": "experts",
            "ffn_up_shexp.weight": "shared hidden",
            "ffn_down_shexp.weight": "hidden shared",
        },
        "*": ATTENTION,
    }

    @property
    def inner(self) -> int:
        """Of all heads of Mamba-2."""
        return self.mixers * self.mixer_dim

    @property
    def group_dim(self) -> int:
        """Of the heads of a group."""
        return self.inner // self.groups

    @property
    def channels(self) -> int:
        """Of the convolution."""
        return self.inner + 2 * self.groups * self.state_size

    @property
    def projected(self) -> int:
        """Gate, channels and a time step for each head."""
        return self.inner + self.channels + self.mixers

    def keys(self) -> dict[str, Any]:
        """Those that differ."""
        return {
            "feed_forward_length": self.per_layer("E", self.intermediate),
            "attention.head_count_kv": self.per_layer("*", self.kv_heads),
            "attention.layer_norm_epsilon": 1e-5,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.dimension_count": self.hidden // self.heads,
            "rope.scaling.finetuned": False,
            "expert_group_count": 1,
            "expert_group_used_count": 1,
            "expert_shared_count": 1,
            "expert_shared_feed_forward_length": self.shared,
            "expert_weights_norm": True,
            "expert_weights_scale": 2.5,
            "ssm.conv_kernel": self.width,
            "ssm.state_size": self.state_size,
            "ssm.group_count": self.groups,
            "ssm.inner_size": self.inner,
            "ssm.time_step_rank": self.mixers,
        }


_CONVOLUTION = {
    "attn_norm.weight": "hidden",
    "shortconv.in_proj.weight": "gated hidden",
    "shortconv.conv.weight": "hidden width",
    "shortconv.out_proj.weight": "hidden hidden",
}
_EXPERTS = {"ffn_norm.weight": "hidden", **EXPERTS, "exp_probs_b.bias": "experts"}


@dataclass(frozen=True)
class Lfm2Shapes(GGUFShapes):
    """LFM2-8B-A1B: A attention, C short convolution, both with experts; c a convolution with an MLP."""

    layers: int = 24
    vocabulary: int = 65536
    kv_heads: int = 8
    head_dim: int = 64
    intermediate: int = 1792
    experts: int = 32
    top_k: int = 4
    positions: int = 128000
    dense: int = 7168  # of an MLP
    width: int = 3  # of the convolution

    model: ClassVar[str] = "LFM2-8B-A1B"
    architecture: ClassVar[str] = "lfm2moe"
    checkpoint: ClassVar[bool] = False
    kinds: ClassVar[str] = "ccACCCACCCACCCACCCACCACC"
    tables: ClassVar[dict[str, dict[str, str]]] = {
        "A": {**ATTENTION, **NORMS_OF_HEADS, **_EXPERTS},
        "C": {**_CONVOLUTION, **_EXPERTS},
        "c": {
            **_CONVOLUTION,
            "ffn_norm.weight": "hidden",
            "ffn_gate.weight": "dense hidden",
            "ffn_up.weight": "dense hidden",
            "ffn_down.weight": "hidden dense",
        },
    }
    outer: ClassVar[dict[str, str]] = {**EMBEDDING, "token_embd_norm.weight": "hidden"}  # the output layer is tied

    @property
    def gated(self) -> int:
        """What is convolved, and its two gates."""
        return 3 * self.hidden

    def keys(self) -> dict[str, Any]:
        """Those that differ."""
        return {
            "feed_forward_length": self.dense,
            "attention.head_count_kv": self.per_layer("A", self.kv_heads),
            "attention.layer_norm_rms_epsilon": 1e-5,
            "expert_gating_func": 2,  # sigmoid
            "leading_dense_block_count": len(self.kinds) - len(self.kinds.lstrip("c")),
            "shortconv.l_cache": self.width,
        }


MODELS = {each.architecture: each for each in (GGUFShapes, HybridShapes, NemotronShapes, Lfm2Shapes)}
