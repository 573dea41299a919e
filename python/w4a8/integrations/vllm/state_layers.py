"""vLLM's layers whose past is a state of a fixed size, as a Decoder has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from w4a8.decoder import States
from w4a8.integrations.vllm import linear_attention, mamba
from w4a8.integrations.vllm.decoder_parts import Unfit, float_weight, summed_without_bias, without_bias
from w4a8.integrations.vllm.products import products_of


def state_layer_of(layer: Any) -> Any:
    """vLLM's module of a layer that owns its states; None: the layer has none."""
    parts = (each for child in layer.children() for each in (child, *child.children()))
    return next((each for each in parts if type(each).__name__ in _FIELDS), None)


def fields_of(module: Any) -> dict[str, Any]:
    """The arguments of ``Decoder.add_linear_attention``.

    Raises:
        Unfit: a Decoder does not compute the module.
    """
    if not getattr(module, "w4a8_runs_core", False):
        raise Unfit("linear attention is vLLM's (the log says why)")
    return {"gates": None, "out": summed_without_bias(module.out_proj), **_FIELDS[type(module).__name__](module)}


def step_states(modules: Sequence[Any], metadata: dict[str, Any]) -> States | None:
    """The states of a step, by vLLM's metadata; None: no module has any."""
    if not modules:
        return None
    steps = [metadata[each.prefix] for each in modules]
    if all(step is steps[0] for step in steps):
        steps = steps[:1]
    source = linear_attention if hasattr(steps[0], "spec_sequence_masks") else mamba
    where = [source.sequences_of(step) for step in steps]
    drafts = linear_attention.drafts_of(where[0])
    found = [linear_attention.states_of(each, drafts) for each in modules]
    return States(
        conv_states=[conv for conv, _ in found],
        states=[state for _, state in found if state is not None],
        slots=[each["slots"] for each in where],
        fresh=where[0]["fresh"],
        out_slots=[each["out_slots"] for each in where if "out_slots" in each],
        accepted=where[0].get("accepted"),
    )


def _gated_delta(module: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {"projections": without_bias(module.in_proj_qkvz)}
    small = products_of(module.in_proj_ba)
    if small and all(product.group is not None for product in small):
        fields["projections"] += without_bias(module.in_proj_ba)
    else:
        fields["gates"] = float_weight(module.in_proj_ba)[0]
    return {
        **fields,
        "kind": "gated_delta",
        "key_size": module.head_k_dim,
        "value_size": module.head_v_dim,
        "interleaved": module.gqa_interleaved_layout,
        **linear_attention.weights_of(module),
        **linear_attention.numbers_of(module),
    }


def _state_space(module: Any) -> dict[str, Any]:
    return {
        "projections": without_bias(module.in_proj),
        "kind": "state_space",
        "key_heads": module.n_groups // module.tp_size,
        "value_heads": module.num_heads // module.tp_size,
        "key_size": module.ssm_state_size,
        "value_size": module.head_dim,
        **mamba.weights_of(module),
        **mamba.norm_numbers(module),
    }


def _short_conv(module: Any) -> dict[str, Any]:
    return {"projections": without_bias(module.in_proj), "kind": "short_conv", **mamba.weights_of(module)}


# By vLLM's class.
_FIELDS = {"QwenGatedDeltaNetAttention": _gated_delta, "MambaMixer2": _state_space, "ShortConv": _short_conv}
