"""What the keys of a GGUF file say about mixture-of-experts layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from w4a8.checkpoint.gguf_architectures import ARCHITECTURES, SIGMOID, SOFTMAX, SOFTMAX_OF_SELECTED, Routing, named
from w4a8.checkpoint.gguf_keys import Keys
from w4a8.checkpoint.settings import MoESettings
from w4a8.core.json_fields import CheckpointError
from w4a8.core.routing import RoutingMethodType


def _routing(keys: Mapping[str, Any]) -> Routing:
    name = named(keys)
    routing = ARCHITECTURES[name].routing if name is not None else None
    if routing is None:
        known = ", ".join(sorted(name for name, each in ARCHITECTURES.items() if each.routing is not None))
        raise CheckpointError(
            f"general.architecture is {Keys(keys).architecture!r}, whose experts are not known here (known: {known})"
        )
    return routing


def settings_from_keys(keys: Mapping[str, Any], has_correction_bias: bool) -> MoESettings:
    """Settings of the layers of experts of a file.

    Args:
        keys: of the file.
        has_correction_bias: there are tensors ``exp_probs_b``.

    Raises:
        CheckpointError: an architecture whose experts are not known here, or a key that is missing or wrong.
    """
    known, found = _routing(keys), Keys(keys)
    gating = found.typed("expert_gating_func", int, known.gating)
    renormalize = found.typed("expert_weights_norm", bool, known.renormalize)
    if gating == SIGMOID:
        method = RoutingMethodType.DeepSeekV3 if renormalize else RoutingMethodType.Sigmoid
    elif gating == SOFTMAX:
        method = RoutingMethodType.Renormalize if renormalize else RoutingMethodType.Default
    elif gating == SOFTMAX_OF_SELECTED:
        method = RoutingMethodType.Renormalize
    else:
        raise CheckpointError(f"expert_gating_func is {gating}, but 1, 2 or 3 is expected")
    more = {}
    groups = found.typed("expert_group_count", int, 1)
    if groups > 1:
        more.update(num_expert_group=groups, topk_group=found.count("expert_group_used_count"))
    return MoESettings(
        hidden_size=found.count("embedding_length"),
        top_k=found.count("expert_used_count"),
        routing_method=method,
        activation=known.activation,
        num_experts=found.count("expert_count"),
        intermediate_size=found.count(known.size_key),
        routed_scaling_factor=found.typed("expert_weights_scale", float, 1.0) or 1.0,
        has_correction_bias=has_correction_bias,
        **more,
    )
