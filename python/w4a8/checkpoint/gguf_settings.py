"""What the keys of a GGUF file say about mixture-of-experts layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from w4a8.checkpoint.settings import MoESettings
from w4a8.core.activation import MoEActivation
from w4a8.core.json_fields import CheckpointError, shorten
from w4a8.core.routing import RoutingMethodType

# expert_gating_func in the file (llama_expert_gating_func_type).
_SOFTMAX, _SIGMOID, _SOFTMAX_OF_SELECTED = 1, 2, 3


@dataclass(frozen=True)
class _Architecture:
    """What llama.cpp takes where the file does not say.

    Attributes:
        gating: ``expert_gating_func``.
        renormalize: ``expert_weights_norm``.
        size_key: of an expert's intermediate size.
        layer: the name of its experts in transformers.
        more: of the settings.
    """

    gating: int = _SOFTMAX
    renormalize: bool = False
    size_key: str = "expert_feed_forward_length"
    layer: str = "model.layers.{}.mlp.experts"
    more: Mapping[str, Any] | None = None


_ARCHITECTURES = {
    "qwen2moe": _Architecture(),
    "qwen3moe": _Architecture(renormalize=True),
    "olmoe": _Architecture(size_key="feed_forward_length"),
    "llama": _Architecture(renormalize=True, size_key="feed_forward_length"),  # Mixtral
    "gpt-oss": _Architecture(_SOFTMAX_OF_SELECTED, more={"activation": MoEActivation.SWIGLUOAI}),
    "deepseek2": _Architecture(),
    "glm4moe": _Architecture(_SIGMOID, renormalize=True),
}


def architecture_of(keys: Mapping[str, Any]) -> str:
    """``general.architecture``.

    Raises:
        CheckpointError: there is none.
    """
    name = keys.get("general.architecture")
    if not isinstance(name, str):
        raise CheckpointError(f"general.architecture is {shorten(name)}, but a string is expected")
    return name


def layer_name(keys: Mapping[str, Any], layer: int) -> str:
    """Of the experts of a layer, as transformers has it."""
    return _known(keys).layer.format(layer)


def _known(keys: Mapping[str, Any]) -> _Architecture:
    name = architecture_of(keys)
    if name not in _ARCHITECTURES:
        known = ", ".join(sorted(_ARCHITECTURES))
        raise CheckpointError(f"general.architecture is {name!r}, whose experts are not known here (known: {known})")
    return _ARCHITECTURES[name]


class _Keys:
    """Keys of one architecture, checked."""

    def __init__(self, keys: Mapping[str, Any]) -> None:
        self._keys, self._prefix = keys, architecture_of(keys)

    def get(self, name: str, kind: type, default: Any) -> Any:
        key = f"{self._prefix}.{name}"
        value = self._keys.get(key, default)
        if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
            return value
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        raise CheckpointError(f"{key} is {shorten(value)}, but {kind.__name__} is expected")

    def count(self, name: str, default: int | None = None) -> int:
        value = self.get(name, int, default)
        if not 1 <= value < 2**31:
            raise CheckpointError(f"{self._prefix}.{name} is {value}, but 1..2**31-1 is expected")
        return value


def settings_from_keys(keys: Mapping[str, Any], has_correction_bias: bool) -> MoESettings:
    """Settings of the layers of experts of a file.

    Args:
        keys: of the file.
        has_correction_bias: there are tensors ``exp_probs_b``.

    Raises:
        CheckpointError: an architecture whose experts are not known here, or a key that is missing or wrong.
    """
    known, found = _known(keys), _Keys(keys)
    gating = found.get("expert_gating_func", int, known.gating)
    renormalize = found.get("expert_weights_norm", bool, known.renormalize)
    if gating == _SIGMOID:
        method = RoutingMethodType.DeepSeekV3 if renormalize else RoutingMethodType.Sigmoid
    elif gating == _SOFTMAX:
        method = RoutingMethodType.Renormalize if renormalize else RoutingMethodType.Default
    elif gating == _SOFTMAX_OF_SELECTED:
        method = RoutingMethodType.Renormalize
    else:
        raise CheckpointError(f"expert_gating_func is {gating}, but 1, 2 or 3 is expected")
    more = dict(known.more or {})
    groups = found.get("expert_group_count", int, 1)
    if groups > 1:
        more.update(num_expert_group=groups, topk_group=found.count("expert_group_used_count"))
    return MoESettings(
        hidden_size=found.count("embedding_length"),
        top_k=found.count("expert_used_count"),
        routing_method=method,
        num_experts=found.count("expert_count"),
        intermediate_size=found.count(known.size_key),
        routed_scaling_factor=found.get("expert_weights_scale", float, 1.0) or 1.0,
        has_correction_bias=has_correction_bias,
        **more,
    )
