"""What the keys of a GGUF file say about mixture-of-experts layers. All readers ask here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from w4a8.checkpoint.gguf_architectures import ARCHITECTURES, GROUPS, NORM, SCALE, SIGMOID, SOFTMAX, named
from w4a8.checkpoint.gguf_key_table import check_keys
from w4a8.checkpoint.gguf_keys import Keys
from w4a8.checkpoint.settings import MoESettings
from w4a8.core.json_fields import CheckpointError
from w4a8.core.routing import RoutingMethodType


@dataclass(frozen=True)
class Router:
    """What the keys say: of ``expert_gating_func`` and of its neighbours, checked.

    Attributes:
        gating: SOFTMAX, SIGMOID or SOFTMAX_OF_SELECTED.
        renormalize: weights of a token add up to one.
        scale: that they are multiplied by.
        groups, kept: groups of experts, and how many of them a token has.
        experts, used: of a layer, and of a token.
    """

    gating: int
    renormalize: bool
    scale: float
    groups: int
    kept: int
    experts: int
    used: int


def router_of(keys: Mapping[str, Any], has_bias: bool | None) -> Router:
    """The router of a file of one of ARCHITECTURES that has experts.

    Args:
        keys: of the file.
        has_bias: there are tensors ``exp_probs_b``; None: not known here.

    Raises:
        CheckpointError: a key that is missing or wrong, or another router than the model's; names the key.
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
    kept = found.count("expert_group_used_count") if groups > 1 else 1
    experts, used = found.count("expert_count"), found.count("expert_used_count")
    if kept > groups or experts % groups != 0 or used > experts // groups * kept:
        which = f"{found.architecture}.{GROUPS} is {groups} and expert_group_used_count {kept}"
        raise CheckpointError(f"{which}, which does not fit {used} of {experts} experts")
    if has_bias is not None and has_bias != routing.has_bias:
        which, where = ("has", "has none") if has_bias else ("lacks", "has one")
        raise CheckpointError(f"the GGUF file {which} a correction bias (exp_probs_b), but {model} {where}")
    return Router(gating, renormalize, scale, groups, kept, experts, used)


def settings_from_keys(keys: Mapping[str, Any], has_bias: bool | None) -> MoESettings:
    """Settings of the layers of experts of a file, with the router that its model computes.

    Args:
        keys: of the file.
        has_bias: there are tensors ``exp_probs_b``; None: not known here.

    Raises:
        CheckpointError: an architecture whose experts are not known here, and as :func:`router_of`.
    """
    check_keys(keys)
    name, found = named(keys), Keys(keys)
    known = ARCHITECTURES.get(name)
    if known is None or known.routing is None or not known.routing.is_known:
        names = ", ".join(
            sorted(name for name, each in ARCHITECTURES.items() if each.routing and each.routing.is_known)
        )
        raise CheckpointError(
            f"general.architecture is {found.architecture!r}, whose experts are not known here (known: {names})"
        )
    router = router_of(keys, has_bias)
    if router.gating == SIGMOID and router.renormalize:
        grouped = GROUPS in known.routing.follows
        method = RoutingMethodType.DeepSeekV3 if grouped else RoutingMethodType.MiniMax2
    elif router.gating == SIGMOID:
        method = RoutingMethodType.Sigmoid
    elif router.gating == SOFTMAX and not router.renormalize:
        method = RoutingMethodType.Default
    else:
        method = RoutingMethodType.Renormalize
    return MoESettings(
        hidden_size=found.count("embedding_length"),
        top_k=router.used,
        routing_method=method,
        activation=known.routing.activation,
        num_experts=router.experts,
        intermediate_size=found.count(known.routing.size_key),
        routed_scaling_factor=router.scale,
        has_correction_bias=known.routing.has_bias,
        num_expert_group=router.groups if router.groups > 1 else None,
        topk_group=router.kept if router.groups > 1 else None,
    )
