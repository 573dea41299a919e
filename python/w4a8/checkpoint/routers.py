"""Routers of mixture-of-experts layers, by config.json or the keys of a GGUF file.

ARCHITECTURES (gguf_architectures.py) has the differences of models, one entry each for both kinds of files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
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
from w4a8.checkpoint.gguf_keys import Keys
from w4a8.core.json_fields import CheckpointError, json_field, shorten
from w4a8.core.routing import Router

# Which route as DeepSeek-V3 does.
_LIKE_DEEPSEEK = dict.fromkeys(("glm4_moe_lite", "kimi_k2"), BY_MODEL_TYPE["deepseek_v3"])
_GLM = BY_MODEL_TYPE["glm4_moe"]
_DOTS = {"dots1": replace(_GLM, routing=replace(_GLM.routing, in_config={NORM: False}))}
_KIMI = {"kimi_linear": replace(_GLM, routing=replace(_GLM.routing, in_config={SCALE: 2.446}))}
_NAMES_OF_KIMI = {"moe_renormalize": "norm_topk_prob", "num_expert_group": "n_group"}  # in its config.json
# By model_type.
_MODELS = {
    name: each for name, each in (BY_MODEL_TYPE | _LIKE_DEEPSEEK | _DOTS | _KIMI).items() if each.routing is not None
}
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


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


def router_in_config(model_type: str, text: Mapping[str, Any]) -> Router:
    """The router of a model of ``_MODELS``; ``text``: config.json or its text part.

    Missing fields have the defaults of the model's configuration class in transformers.

    Raises:
        CheckpointError: a value of another type, or out of range; names the key.
    """
    text = {_NAMES_OF_KIMI.get(name, name): value for name, value in text.items()}
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


def _check_positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise CheckpointError(f"config.json: {name} is {shorten(value)}, but an integer is expected")
    if not 1 <= value < 2**31:
        raise CheckpointError(f"config.json: {name} is {shorten(value)}, but 1..2**31-1 is expected")
