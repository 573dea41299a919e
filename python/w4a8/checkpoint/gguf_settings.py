"""What the keys of a GGUF file say about mixture-of-experts layers. All readers ask here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from w4a8.checkpoint.gguf_architectures import ARCHITECTURES, GROUPS, NORM, SCALE, SIGMOID, SOFTMAX, Architecture, named
from w4a8.checkpoint.gguf_key_table import check_keys
from w4a8.checkpoint.gguf_keys import Keys
from w4a8.checkpoint.settings import MoESettings
from w4a8.core.json_fields import CheckpointError
from w4a8.core.routing import RoutingMethodType


@dataclass(frozen=True)
class Router:
    """What a file says of the router, which its model computes.

    Attributes:
        method: how logits become experts and weights.
        renormalize: the weights of a token's experts are divided by their sum.
        scale: of the weights.
        groups: of experts; 1 is none.
        kept: groups that experts are taken from.
    """

    method: RoutingMethodType
    renormalize: bool
    scale: float
    groups: int
    kept: int


def router_of(keys: Keys, known: Architecture, has_bias: bool | None) -> Router:
    """The router of an architecture with experts.

    Args:
        keys: of the file.
        known: the architecture.
        has_bias: there are tensors ``exp_probs_b``; None: not known here.

    Raises:
        CheckpointError: a key is not as it should be, or the model computes something else; names the key.
    """
    routing = known.routing
    gating = keys.typed("expert_gating_func", int, routing.gating)
    renormalize = keys.typed(NORM, bool, routing.renormalize)
    scale = keys.typed(SCALE, float, 1.0) or 1.0  # 0 is none, as in llama.cpp
    groups = keys.count(GROUPS, 1, least=0) or 1
    stated = {"expert_gating_func": (gating, routing.gating), NORM: (renormalize, routing.renormalize)}
    stated |= {SCALE: (scale, 1.0), GROUPS: (groups, 1)}
    for key, (value, computed) in stated.items():
        if value != computed and (key not in routing.follows or not math.isfinite(value)):
            raise CheckpointError(
                f"{keys.architecture}.{key} is {value} in the GGUF file, but {known.model_type} computes {computed}"
            )
    kept = keys.count("expert_group_used_count") if groups > 1 else 1
    experts, used = keys.count("expert_count"), keys.count("expert_used_count")
    if kept > groups or experts % groups != 0 or used > experts // groups * kept:
        which = f"{keys.architecture}.{GROUPS} is {groups} and expert_group_used_count {kept}"
        raise CheckpointError(f"{which}, which does not fit {used} of {experts} experts")
    if has_bias is not None and has_bias != routing.has_bias:
        which, where = ("has", "has none") if has_bias else ("lacks", "has one")
        raise CheckpointError(f"the GGUF file {which} a correction bias (exp_probs_b), but {known.model_type} {where}")
    if gating == SIGMOID:
        method = RoutingMethodType.DeepSeekV3 if renormalize else RoutingMethodType.Sigmoid
    elif gating == SOFTMAX:
        method = RoutingMethodType.Renormalize if renormalize else RoutingMethodType.Default
    else:
        method = RoutingMethodType.Renormalize
    return Router(method, renormalize, scale, groups, kept)


def settings_from_keys(keys: Mapping[str, Any], has_correction_bias: bool) -> MoESettings:
    """Settings of the layers of experts of a file.

    Args:
        keys: of the file.
        has_correction_bias: there are tensors ``exp_probs_b``.

    Raises:
        CheckpointError: an architecture whose experts are not known here, or a key that is missing or wrong.
    """
    check_keys(keys)
    name, found = named(keys), Keys(keys)
    known = ARCHITECTURES.get(name)
    if known is None or known.routing is None:
        names = ", ".join(sorted(name for name, each in ARCHITECTURES.items() if each.routing is not None))
        raise CheckpointError(
            f"general.architecture is {found.architecture!r}, whose experts are not known here (known: {names})"
        )
    router = router_of(found, known, has_correction_bias)
    return MoESettings(
        hidden_size=found.count("embedding_length"),
        top_k=found.count("expert_used_count"),
        routing_method=router.method,
        activation=known.routing.activation,
        num_experts=found.count("expert_count"),
        intermediate_size=found.count(known.routing.size_key),
        routed_scaling_factor=router.scale,
        has_correction_bias=has_correction_bias,
        num_expert_group=router.groups if router.groups > 1 else None,
        topk_group=router.kept if router.groups > 1 else None,
    )
