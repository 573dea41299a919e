"""Settings of mixture-of-experts layers, by config.json or the keys of a GGUF file, for all readers.

ARCHITECTURES (gguf_architectures.py) has the differences of models, one entry each for both kinds of files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from w4a8.checkpoint.gguf_architectures import (
    ARCHITECTURES,
    BY_MODEL_TYPE,
    GROUPS,
    KEPT_GROUPS,
    NORM,
    SCALE,
    named,
)
from w4a8.checkpoint.gguf_features import greedy_or_grouped
from w4a8.checkpoint.gguf_key_table import check_keys
from w4a8.checkpoint.gguf_keys import Keys
from w4a8.core.activation import OWN_NUMBERS, GateNumbers, MoEActivation
from w4a8.core.json_fields import CheckpointError, json_field, read_json, shorten
from w4a8.core.routing import Router, RoutingMethodType

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# By model_type. Experts of Llama 4 are known from config.json alone; Kimi K2 has DeepSeek-V3's classes.
_MODELS = {
    model_type: each
    for model_type, each in {**BY_MODEL_TYPE, "kimi_k2": BY_MODEL_TYPE["deepseek_v3"]}.items()
    if each.routing is not None and (each.routing.is_known or each.routing.on_input)
}
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class MoESettings:
    """The properties of the layers that tensors do not show.

    Attributes:
        hidden_size: H.
        top_k: experts per token.
        routing_method: how router logits are read.
        activation: between w13 and w2.
        num_experts: of a layer; None: by the tensors.
        intermediate_size: of an expert; None: by the first expert's tensors.
        num_expert_group, topk_group: grouped routing, or None.
        routed_scaling_factor: multiplies router weights.
        apply_router_weight_on_input: router weights multiply the input.
        w13_interleaved: rows of a fused gate and up projection alternate gate and up.
        has_correction_bias: the checkpoint must have the router's ``e_score_correction_bias``.
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


def router_in_file(keys: Mapping[str, Any], has_bias: bool | None) -> Router:
    """The router of a GGUF file of one of ARCHITECTURES that has experts.

    Args:
        keys: of the file.
        has_bias: there are tensors ``exp_probs_b``; None: not known here.

    Raises:
        CheckpointError: a key is missing or wrong, or the router is not the model's; names the key.
    """
    known, found = ARCHITECTURES[named(keys)], Keys(keys)
    routing, model = known.routing, known.model_type
    gating = found.typed("expert_gating_func", int, routing.gating)
    renormalize = found.typed(NORM, bool, routing.renormalize)
    scale = found.typed(SCALE, float, 1.0) or 1.0  # 0 is none, as in llama.cpp
    groups = found.count(GROUPS, 1, least=0) or 1
    stated = {"expert_gating_func": (gating, routing.gating), NORM: (renormalize, routing.renormalize)}
    for key, (value, computed) in {**stated, SCALE: (scale, 1.0), GROUPS: (groups, 1)}.items():
        if value != computed and (key not in routing.follows or not math.isfinite(value)):
            key = f"{found.architecture}.{key}"
            raise CheckpointError(f"{key} is {value} in the GGUF file, but {model} computes {computed}")
    kept = found.count(KEPT_GROUPS) if groups > 1 else 1
    experts, used = found.count("expert_count"), found.count("expert_used_count")
    if kept > groups or experts % groups != 0 or used > experts // groups * kept:
        which = f"{found.architecture}.{GROUPS} is {groups} and {KEPT_GROUPS} {kept}"
        raise CheckpointError(f"{which}, which does not fit {used} of {experts} experts")
    if has_bias is not None and has_bias != routing.has_bias:
        which, where = ("has", "has none") if has_bias else ("lacks", "has one")
        raise CheckpointError(f"the GGUF file {which} a correction bias (exp_probs_b), but {model} {where}")
    return routing.router(renormalize, scale, groups, kept)


def settings_from_keys(keys: Mapping[str, Any], has_bias: bool | None) -> MoESettings:
    """Settings of the layers of experts of a GGUF file; arguments as of :func:`router_in_file`.

    Raises:
        CheckpointError: an architecture whose experts are not known here, and as :func:`router_in_file`.
    """
    check_keys(keys)
    found, known = Keys(keys), ARCHITECTURES.get(named(keys))
    if known is None or known.routing is None or not known.routing.is_known:
        names = sorted(name for name, each in ARCHITECTURES.items() if each.routing and each.routing.is_known)
        raise CheckpointError(
            f"general.architecture is {found.architecture!r}, whose experts are not known here (known: "
            f"{', '.join(names)})"
        )
    router = router_in_file(keys, has_bias)
    return MoESettings(
        hidden_size=found.count("embedding_length"),
        top_k=found.count("expert_used_count"),
        activation=known.routing.activation,
        num_experts=found.count("expert_count"),
        intermediate_size=found.count(known.routing.size_key),
        **router._asdict(),
    )


def router_in_config(model_type: str, text: Mapping[str, Any]) -> Router:
    """The router of a model that :func:`settings_from_config` knows; ``text``: config.json or its text part.

    Missing fields have the defaults of the model's configuration class in transformers.

    Raises:
        CheckpointError: a value of another type, or out of range; names the key.
    """
    known = _MODELS[model_type]
    routing = known.routing
    meant = {NORM: routing.renormalize, SCALE: 1.0, GROUPS: 1, KEPT_GROUPS: 1, **routing.in_config}
    for key, name, kind in ((NORM, "norm_topk_prob", bool), (SCALE, "routed_scaling_factor", (int, float))):
        if name in text and key in {*routing.follows, *routing.in_config}:
            meant[key] = json_field(text, name, kind, f"config.json: {name}")
    scale = 1.0 if meant[SCALE] is None else meant[SCALE]
    if not abs(scale) <= torch.finfo(torch.float32).max:
        raise CheckpointError(
            f"config.json: routed_scaling_factor is {shorten(scale)}, but a finite number is expected"
        )
    greedy = greedy_or_grouped in known.features and text.get("topk_method") != "group_limited_greedy"
    groups = kept = 1
    if GROUPS in routing.follows and not greedy:
        groups = text.get("n_group", meant[GROUPS]) or 1
    if groups != 1:  # one group is none
        kept = text.get("topk_group", meant[KEPT_GROUPS])
        _check_positive("n_group", groups)
        _check_positive("topk_group", kept)
    return routing.router(bool(meant[NORM]), float(scale), groups, kept)


def settings_from_config(config: Mapping[str, Any]) -> MoESettings:
    """Settings from the content of config.json.

    Raises:
        CheckpointError: the routing of the model type is not known here, or a key is missing, of another type or out of
            range; names the key.
    """
    text = json_field(config, "text_config", dict, "config.json: text_config") or config
    model_type = text.get("model_type")
    if not isinstance(model_type, str) or model_type not in _MODELS:
        raise CheckpointError(
            f"config.json: routing of model_type {shorten(model_type)} is not known "
            f"(known: {', '.join(sorted(_MODELS))}); pass settings=MoESettings(...)"
        )
    known, routing = _MODELS[model_type], _MODELS[model_type].routing
    size_key = known.keys[routing.size_key]
    # Of several names in one file the first here counts, as in transformers: another name for a key of a class
    # replaces the key, in any order of the file. Names that the class does not know come last.
    counts = (*((routing.also,) if routing.also else ()), known.keys["expert_count"], *EXPERT_COUNTS)
    hidden_size, intermediate_size, num_experts = text.get("hidden_size"), text.get(size_key), _first(text, *counts)
    top_k = _first(text, "num_experts_per_tok", "num_experts_per_token", "experts_per_token")
    _check_positive("hidden_size", hidden_size)
    _check_positive("num_experts_per_tok", top_k)
    for name, size in (("num_experts", num_experts), (size_key, intermediate_size)):
        if size is not None:
            _check_positive(name, size)
    dtype = str(_first(text, "dtype", "torch_dtype") or _first(config, "dtype", "torch_dtype") or "bfloat16")
    if dtype not in _DTYPES:
        raise CheckpointError(f"config.json: dtype is {shorten(dtype)}, but one of {', '.join(_DTYPES)} is expected")
    activation, numbers = _activation(text), OWN_NUMBERS
    router = router_in_config(model_type, text)
    if routing.activation is MoEActivation.SWIGLUOAI:  # hidden_act says silu; the model's code has the clamped SwiGLU
        activation = routing.activation
        numbers = GateNumbers(_number(text, "swiglu_limit", 7.0), _number(text, "swiglu_alpha", 1.702))
    return MoESettings(
        hidden_size=hidden_size,
        top_k=top_k,
        activation=activation,
        num_experts=num_experts,
        intermediate_size=intermediate_size,
        w13_interleaved=known.in_turns,
        dtype=_DTYPES[dtype],
        numbers=numbers,
        **router._asdict(),
    )


def read_settings(path: str | Path) -> MoESettings:
    """Settings of a checkpoint directory; change them with ``dataclasses.replace`` and give them to ``load``."""
    return settings_from_config(read_json(Path(path) / "config.json"))


def _first(text: Mapping[str, Any], *names: str) -> Any:
    return next((text[name] for name in names if text.get(name) is not None), None)


def _number(text: Mapping[str, Any], name: str, own: float) -> float | None:
    """None: the activation's own."""
    found = json_field(text, name, (int, float), f"config.json: {name}")
    if found is not None and not 0 < found <= torch.finfo(torch.float32).max:
        raise CheckpointError(f"config.json: {name} is {shorten(found)}, but a finite number above 0 is expected")
    return None if found == own else found


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
