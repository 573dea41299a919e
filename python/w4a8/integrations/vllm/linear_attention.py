"""Linear attention by the gated delta rule (Qwen3-Next, Qwen3.5): one call between a layer's projections.

The operator ``gated_delta`` (docs/numerics.md section 11) takes the place of vLLM's convolution, gates, recurrence and
norm. It is called by an operator in vLLM's library, into which torch.compile does not look.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from types import MethodType
from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.utils.torch_utils import direct_register_custom_op

from w4a8.integrations.vllm import settings
from w4a8.integrations.vllm.loaded import before_loading_again
from w4a8.integrations.vllm.log import logger
from w4a8.linear_attention import layer_weights
from w4a8.ops import STATE_SIZES, gated_delta

FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # of a convolution's state
_OPERATOR = "w4a8_gated_delta"


def attach(model: torch.nn.Module, vllm_config: Any, model_config: Any) -> None:
    """Replaces the forward of the layers of a loaded model, or logs why not."""
    run_here(model, ("QwenGatedDeltaNetAttention",), reason_against, _take)


def run_here(
    model: torch.nn.Module,
    classes: Collection[str],
    reason_against: Callable[[Any], str | None],
    take: Callable[[Any], None],
) -> None:
    """Lets the layers of a loaded model run here, or logs why not.

    Args:
        model: of vLLM.
        classes: names of the layers' classes.
        reason_against: why a layer is left to vLLM, or None.
        take: replaces the forward of a layer.
    """
    layers = [layer for layer in model.modules() if type(layer).__name__ in classes]
    if not layers:
        return
    reason = None if settings.attends() else f"{settings.ATTENTION}=0"
    try:
        reason = reason or next(filter(None, map(reason_against, layers)), None)
    except (ImportError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
    if reason is not None:
        logger().info("w4a8: linear attention is vLLM's: %s", reason)
        return
    for layer in layers:
        take(layer)
        layer.w4a8_runs_core = True  # compiled graphs are named after numbers of layers
        layer.w4a8_weights = layer.w4a8_states = None
    before_loading_again(model, lambda: [setattr(layer, "w4a8_weights", None) for layer in layers])
    logger().info("w4a8: linear attention runs here, in %d layers (%s=0: vLLM's)", len(layers), settings.ATTENTION)


def reason_against(layer: Any) -> str | None:
    """Why a layer is left to vLLM, or None."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention  # noqa: F401 (weights_of calls it)

    norm, (of_conv, of_state) = layer.norm, layer.get_state_dtype()[:2]
    if layer._forward_method != layer.forward_cpu or hasattr(layer, "in_proj_qkv"):
        return "layers with another forward"
    for size in (layer.head_k_dim, layer.head_v_dim):
        if size not in STATE_SIZES:
            return f"heads of {size}"
    if of_state != torch.float32:
        return f"states of {of_state} (--mamba-ssm-cache-dtype float32: here)"
    if of_conv not in FLOATS:
        return f"states of convolutions of {of_conv}"
    if layer.activation != "silu" or layer.conv1d.bias is not None or not 2 <= layer.conv_kernel_size <= 8:
        return "another convolution"
    plain = norm.norm_before_gate and norm.group_size in (None, layer.head_v_dim)
    return None if plain and norm.activation in ("silu", "swish", "sigmoid") else "another norm"


def _take(layer: Any) -> None:
    layer._forward_method = MethodType(forward, layer)


def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """As upstream's ``forward_cpu``."""
    qkvz, ba = self.in_proj_qkvz(hidden_states)[0], self.in_proj_ba(hidden_states)[0]
    if self.gqa_interleaved_layout:
        *qkv, z, b, a = self.fix_query_key_value_ordering(qkvz, ba)
        qkv, z, ba = torch.cat([each.flatten(1) for each in qkv], -1), z.flatten(1), torch.cat((b, a), -1)
    else:
        qkv, z = qkvz.split([(2 * self.key_dim + self.value_dim) // self.tp_size, self.value_dim // self.tp_size], -1)
    return self.out_proj(getattr(torch.ops.vllm, _OPERATOR)(qkv, z, ba, self.prefix))[0]


def core(qkv: torch.Tensor, z: torch.Tensor, ba: torch.Tensor, layer_name: str) -> torch.Tensor:
    """The tokens of a step, behind the norm.

    Args:
        qkv, z, ba: as for gated_delta, of this rank's heads. Tokens behind those of the step are padding.
        layer_name: the layer's prefix.

    Returns:
        The shape of z, the dtype of qkv.
    """
    context = get_forward_context()
    if context.attn_metadata is None:  # vLLM warms up
        return qkv.new_zeros(z.shape)
    layer, step = context.no_compile_layers[layer_name], context.attn_metadata[layer_name]
    where = sequences_of(step)
    tokens = int(where["query_start_loc"][-1])
    if tokens == 0:
        return qkv.new_zeros(z.shape)
    conv_state, state = states_of(layer, drafts_of(where))
    out = gated_delta(
        qkv[:tokens],
        z[:tokens],
        ba[:tokens],
        **weights_of(layer),
        conv_state=conv_state,
        state=state,
        **where,
        **numbers_of(layer),
    )
    return out if tokens == len(qkv) else torch.cat([out, out.new_zeros(len(qkv) - tokens, out.shape[1])])


def _shape(qkv: torch.Tensor, z: torch.Tensor, ba: torch.Tensor, layer_name: str) -> torch.Tensor:
    return qkv.new_empty(z.shape)


if not hasattr(torch.ops.vllm, _OPERATOR):
    direct_register_custom_op(_OPERATOR, core, fake_impl=_shape)


def weights_of(layer: Any) -> dict[str, torch.Tensor]:
    """conv_weight, a, dt_bias and norm of gated_delta, as float32; made once."""
    from vllm.model_executor.layers.mamba.ops.cpu.gdn_attention import _unpacked_conv_weight

    if layer.w4a8_weights is None:
        found = layer_weights(_unpacked_conv_weight(layer), layer.A_log, layer.dt_bias)
        layer.w4a8_weights = {**found, "norm": layer.norm.weight.detach().float()}
    return layer.w4a8_weights


def numbers_of(layer: Any) -> dict[str, Any]:
    """The other arguments of gated_delta, of this rank's heads."""
    return {
        "key_heads": layer.num_k_heads // layer.tp_size,
        "value_heads": layer.num_v_heads // layer.tp_size,
        "norm_eps": layer.norm.eps,
        "gate": "sigmoid" if layer.norm.activation == "sigmoid" else "silu",
    }


def states_of(layer: Any, drafts: int = 0) -> tuple[torch.Tensor, torch.Tensor | None]:
    """conv_state and state of gated_delta, state_space or short_conv: vLLM's pages. For guesses there are more rows.

    They are kept until vLLM has other pages: a step asks every layer.

    Args:
        layer: vLLM's module.
        drafts: the most guesses for a sequence of the step; 0: none has any.
    """
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    pages, kept = layer.kv_cache, layer.w4a8_states
    if kept is None or kept[0] is not pages or kept[1] != drafts:
        width = layer.L_cache if hasattr(layer, "conv") else layer.conv_kernel_size
        state = pages[1] if len(pages) > 1 else None
        if hasattr(layer, "head_k_dim"):
            slots, heads, value_size, key_size = state.shape
            state = state.view(slots, heads, key_size, value_size)
        conv_state = pages[0].transpose(1, 2) if is_conv_state_dim_first() else pages[0]
        kept = layer.w4a8_states = pages, drafts, (conv_state[:, : width - 1 + drafts], state)
    return kept[2]


def fresh_sequences(step: Any) -> torch.Tensor:
    """Which sequences of a step, by vLLM's metadata, begin with it: bool [sequences]."""
    fresh = torch.zeros(step.num_decodes + step.num_prefills, dtype=torch.bool)
    if step.num_prefills > 0 and hasattr(step, "has_initial_state"):
        fresh[step.num_decodes :] = ~step.has_initial_state[step.num_decodes : len(fresh)]
    elif step.num_prefills > 0:  # of Mamba and short convolutions: of prompts alone
        fresh[step.num_decodes :] = ~step.has_initial_states_p[: step.num_prefills]
    return fresh


def sequences_of(step: Any) -> dict[str, torch.Tensor]:
    """Where the sequences of a step are, by vLLM's metadata for gated delta nets: arguments of gated_delta.

    vLLM has the state behind each guess in a page of its own, and all rows of the convolution in the first of these.
    """
    guess = step.spec_sequence_masks
    if guess is None:
        fresh = fresh_sequences(step)
        slots, starts = step.non_spec_state_indices_tensor, step.non_spec_query_start_loc
        return {"slots": slots[: len(fresh)], "query_start_loc": starts[: len(fresh) + 1], "fresh": fresh}
    count, guesses = len(guess), step.num_spec_decodes
    slots, lengths, accepted = (torch.zeros(count, dtype=torch.int32) for _ in range(3))
    fresh = torch.zeros(count, dtype=torch.bool)
    out_slots = torch.zeros(count, step.spec_state_indices_tensor.shape[1], dtype=torch.int32)
    lengths[guess] = step.spec_query_start_loc[: guesses + 1].diff()
    accepted[guess] = step.num_accepted_tokens[:guesses]
    out_slots[guess] = step.spec_state_indices_tensor[:guesses]
    if step.non_spec_query_start_loc is not None:
        slots[~guess] = step.non_spec_state_indices_tensor
        lengths[~guess] = step.non_spec_query_start_loc.diff()
    if step.has_initial_state is not None:
        fresh[~guess] = ~step.has_initial_state
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    return {"slots": slots, "query_start_loc": starts, "fresh": fresh, "out_slots": out_slots, "accepted": accepted}


def drafts_of(where: dict[str, torch.Tensor]) -> int:
    """The most guesses for a sequence, by :func:`sequences_of`."""
    return where["out_slots"].shape[1] - 1 if "out_slots" in where else 0
