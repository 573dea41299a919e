"""What config.json of a model says about its mixture-of-experts layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from w4a8.core.activation import OWN_NUMBERS, GateNumbers, MoEActivation
from w4a8.core.json_fields import CheckpointError, json_field, read_json, shorten
from w4a8.core.routing import RoutingMethodType

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class MoESettings:
    """Everything about the layers that their tensors do not show.

    Attributes:
        hidden_size: H.
        top_k: experts per token.
        routing_method: how router logits are read.
        activation: between w13 and w2.
        num_experts: of a layer; None: as many as there are tensors for.
        intermediate_size: of an expert; None: as the first expert's tensors say.
        num_expert_group, topk_group: grouped routing, or None.
        routed_scaling_factor: multiplies router weights.
        apply_router_weight_on_input: router weights multiply the input.
        w13_interleaved: rows of a fused gate and up projection alternate gate and up.
        has_correction_bias: the router has an ``e_score_correction_bias``, which must then be in the checkpoint.
        dtype: of the activations.
        numbers: of the activation.
    """

    hidden_size: int
    top_k: int
    routing_method: RoutingMethodType
    activation: MoEActivation = MoEActivation.SILU
    num_experts: int | None = None
    intermediate_size: int | None = None
    num_expert_group: int | None = None
    topk_group: int | None = None
    routed_scaling_factor: float = 1.0
    apply_router_weight_on_input: bool = False
    w13_interleaved: bool = False
    has_correction_bias: bool = False
    dtype: torch.dtype = torch.bfloat16
    numbers: GateNumbers = OWN_NUMBERS


# What config.json does not say is as the model's configuration class in transformers has it.


def _renormalizes(text: Mapping[str, Any], default: bool) -> bool:
    found = json_field(text, "norm_topk_prob", bool, "config.json: norm_topk_prob")
    return bool(found) if "norm_topk_prob" in text else default


def _softmax(text: Mapping[str, Any], renormalize: bool = False) -> dict[str, Any]:
    renormalize = _renormalizes(text, renormalize)
    return {"routing_method": RoutingMethodType.Renormalize if renormalize else RoutingMethodType.Default}


def _qwen3_next(text: Mapping[str, Any]) -> dict[str, Any]:
    return _softmax(text, renormalize=True)


def _always_renormalized(text: Mapping[str, Any]) -> dict[str, Any]:
    return {"routing_method": RoutingMethodType.Renormalize}


def _number(text: Mapping[str, Any], name: str, own: float) -> float | None:
    """None: the activation's own."""
    found = json_field(text, name, (int, float), f"config.json: {name}")
    if found is not None and not 0 < found <= torch.finfo(torch.float32).max:
        raise CheckpointError(f"config.json: {name} is {shorten(found)}, but a finite number above 0 is expected")
    return None if found == own else found


def _gpt_oss(text: Mapping[str, Any]) -> dict[str, Any]:
    # hidden_act says silu; the model's code has the clamped SwiGLU.
    return {
        "routing_method": RoutingMethodType.Renormalize,
        "activation": MoEActivation.SWIGLUOAI,
        "numbers": GateNumbers(_number(text, "swiglu_limit", 7.0), _number(text, "swiglu_alpha", 1.702)),
        "w13_interleaved": True,
    }


def _groups(text: Mapping[str, Any], groups: int = 1, kept: int = 1) -> dict[str, Any]:
    groups = text.get("n_group", groups) or 1
    if groups == 1:  # one group is none
        return {}
    kept = text.get("topk_group", kept)
    _check_positive("n_group", groups)
    _check_positive("topk_group", kept)
    return {"num_expert_group": groups, "topk_group": kept}


def _scaling_factor(text: Mapping[str, Any], default: float = 1.0) -> float:
    factor = json_field(text, "routed_scaling_factor", (int, float), "config.json: routed_scaling_factor")
    if factor is None:
        factor = default if "routed_scaling_factor" not in text else 1.0
    if not abs(factor) <= torch.finfo(torch.float32).max:
        raise CheckpointError(
            f"config.json: routed_scaling_factor is {shorten(factor)}, but a finite number is expected"
        )
    return float(factor)


def _deepseek_v2(text: Mapping[str, Any]) -> dict[str, Any]:
    found = _softmax(text)
    found["routed_scaling_factor"] = _scaling_factor(text)
    if text.get("topk_method") == "group_limited_greedy":
        found.update(_groups(text))
    return found


def _glm4_moe(text: Mapping[str, Any], factor: float = 1.0, groups: int = 1, kept: int = 1) -> dict[str, Any]:
    renormalize = _renormalizes(text, True)
    return {
        "routing_method": RoutingMethodType.DeepSeekV3 if renormalize else RoutingMethodType.Sigmoid,
        "routed_scaling_factor": _scaling_factor(text, factor),
        "has_correction_bias": True,
        **_groups(text, groups, kept),
    }


def _deepseek_v3(text: Mapping[str, Any]) -> dict[str, Any]:
    return _glm4_moe(text, 2.5, 8, 4)


def _llama4(text: Mapping[str, Any]) -> dict[str, Any]:
    return {"routing_method": RoutingMethodType.Llama4, "apply_router_weight_on_input": True}


def _minimax_m2(text: Mapping[str, Any]) -> dict[str, Any]:
    return {"routing_method": RoutingMethodType.MiniMax2, "has_correction_bias": True}


# Keys of how many experts there are. Of several in one file the first counts, as in transformers: another name of a
# class's own key replaces that one, wherever it stands. What the class does not know is looked at last.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_LOCAL = ("num_local_experts", "num_experts", "n_routed_experts")
_ROUTED = ("num_experts", "n_routed_experts", "num_local_experts")
_LOCAL_ROUTED = ("num_local_experts", "n_routed_experts", "num_experts")

# model_type: (what it says of routing, key of an expert's intermediate size, keys of how many experts there are)
_MODELS = {
    "qwen2_moe": (_softmax, "moe_intermediate_size", _EXPERTS),
    "qwen3_moe": (_softmax, "moe_intermediate_size", _LOCAL),
    "qwen3_next": (_qwen3_next, "moe_intermediate_size", _EXPERTS),
    "olmoe": (_softmax, "intermediate_size", _LOCAL),
    "mixtral": (_always_renormalized, "intermediate_size", _EXPERTS),
    "gpt_oss": (_gpt_oss, "intermediate_size", _EXPERTS),
    "deepseek_v2": (_deepseek_v2, "moe_intermediate_size", _ROUTED),
    "deepseek_v3": (_deepseek_v3, "moe_intermediate_size", _LOCAL_ROUTED),
    "kimi_k2": (_deepseek_v3, "moe_intermediate_size", _LOCAL_ROUTED),
    "glm4_moe": (_glm4_moe, "moe_intermediate_size", _LOCAL_ROUTED),
    "llama4_text": (_llama4, "intermediate_size", _LOCAL),
    "minimax_m2": (_minimax_m2, "intermediate_size", _EXPERTS),
}


def _first(text: Mapping[str, Any], *names: str) -> Any:
    return next((text[name] for name in names if text.get(name) is not None), None)


def _check_positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise CheckpointError(f"config.json: {name} is {shorten(value)}, but an integer is expected")
    if not 1 <= value < 2**31:
        raise CheckpointError(f"config.json: {name} is {shorten(value)}, but 1..2**31-1 is expected")


def _activation(text: Mapping[str, Any]) -> MoEActivation:
    name = _first(text, "hidden_act", "hidden_activation") or "silu"
    try:
        return MoEActivation.from_str(name)
    except (ValueError, TypeError, AttributeError):
        known = ", ".join(activation.value for activation in MoEActivation)
        raise CheckpointError(f"config.json: hidden_act is {shorten(name)}, but one of {known} is expected") from None


def settings_from_config(config: Mapping[str, Any]) -> MoESettings:
    """Settings from the content of config.json.

    Raises:
        CheckpointError: a model type whose routing is not known here, or a key that is missing.
    """
    text = json_field(config, "text_config", dict, "config.json: text_config") or config
    model_type = text.get("model_type")
    if not isinstance(model_type, str) or model_type not in _MODELS:
        raise CheckpointError(
            f"config.json: routing of model_type {shorten(model_type)} is not known "
            f"(known: {', '.join(sorted(_MODELS))}); pass settings=MoESettings(...)"
        )
    routing, intermediate_key, experts_keys = _MODELS[model_type]
    top_k = _first(text, "num_experts_per_tok", "num_experts_per_token", "experts_per_token")
    hidden_size = text.get("hidden_size")
    num_experts = _first(text, *experts_keys)
    intermediate_size = text.get(intermediate_key)
    _check_positive("hidden_size", hidden_size)
    _check_positive("num_experts_per_tok", top_k)
    if num_experts is not None:
        _check_positive("num_experts", num_experts)
    if intermediate_size is not None:
        _check_positive(intermediate_key, intermediate_size)
    dtype = str(_first(text, "dtype", "torch_dtype") or _first(config, "dtype", "torch_dtype") or "bfloat16")
    if dtype not in _DTYPES:
        raise CheckpointError(f"config.json: dtype is {shorten(dtype)}, but one of {', '.join(_DTYPES)} is expected")
    found = {"activation": _activation(text), **routing(text)}
    return MoESettings(
        hidden_size=hidden_size,
        top_k=top_k,
        num_experts=num_experts,
        intermediate_size=intermediate_size,
        dtype=_DTYPES[dtype],
        **found,
    )


def read_settings(path: str | Path) -> MoESettings:
    """Settings of a checkpoint directory; change them with ``dataclasses.replace`` and give them to ``load``."""
    return settings_from_config(read_json(Path(path) / "config.json"))
