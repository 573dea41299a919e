"""Layers of Mamba-2 and of short convolutions: one call between a layer's projections.

The operators ``state_space`` and ``short_conv`` (docs/numerics.md section 11) take the place of vLLM's. They are called
where vLLM's are: within operators of vLLM's library, into which torch.compile does not look.
"""

from __future__ import annotations

from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from vllm.forward_context import get_forward_context

from w4a8 import ops
from w4a8.integrations.vllm.linear_attention import FLOATS, drafts_of, fresh_sequences, run_here, states_of
from w4a8.linear_attention import conv_rows

_CHECKPOINTS = {"num_prefill_checkpoint_blocks": 0, "prefill_checkpoint_alignment": None}


def attach(model: torch.nn.Module, vllm_config: Any, model_config: Any) -> None:
    """Replaces what the layers of a loaded model do between their projections, or logs why not."""
    run_here(model, _METHODS, reason_against, _take)


def reason_against(layer: Any) -> str | None:
    """Why a layer is left to vLLM, or None."""
    name, _ = _METHODS[type(layer).__name__]
    if not hasattr(layer, name):
        return "layers with another forward"
    of_conv, *of_state = layer.get_state_dtype()
    if of_conv not in FLOATS:
        return f"states of convolutions of {of_conv}"
    if type(layer).__name__ == "ShortConv":
        channels = len(layer.conv.weight)
        return None if channels % 16 == 0 and 2 <= layer.L_cache <= 8 else "another convolution"
    if of_state[0] != torch.float32:
        return f"states of {of_state[0]} (--mamba-ssm-cache-dtype float32: here)"
    if not 2 <= layer.conv_kernel_size <= 8:
        return "another convolution"
    if layer.activation not in ("silu", "swish") or getattr(layer, "use_replayssm", False):
        return "another form of Mamba-2"
    if not {layer.head_dim, layer.ssm_state_size}.issubset(ops.STATE_SIZES):
        return f"states of heads of {layer.head_dim} x {layer.ssm_state_size}"
    return "a norm over some of the ranks" if layer.norm.n_groups > 1 and _norms_over_ranks(layer) else None


def _norms_over_ranks(layer: Any) -> bool:
    """Whether a layer of Mamba-2 has a norm of more than this rank's heads."""
    return layer.norm.use_rms_norm and layer.norm.n_groups % layer.tp_size != 0


def _take(layer: Any) -> None:
    """Lets a layer run here."""
    name, core = _METHODS[type(layer).__name__]
    setattr(layer, name, MethodType(core, layer))
    if type(layer).__name__ == "MambaMixer2":
        if not _norms_over_ranks(layer):
            layer.norm._forward_method = _normed
        layer.get_kv_cache_spec = MethodType(_kv_cache_spec, layer)


def _normed(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """In place of vLLM's gated norm, which was the operator's part."""
    return x


def _kv_cache_spec(self: Any, vllm_config: Any) -> Any:
    """As upstream's. The operator gives states at the ends of pieces of a prompt, so vLLM cuts where it caches."""
    spec = type(self).get_kv_cache_spec(self, vllm_config)
    known = {name: value for name, value in _CHECKPOINTS.items() if hasattr(spec, name)}
    return replace(spec, **known) if known else spec


def weights_of(layer: Any) -> dict[str, torch.Tensor | None]:
    """The weights that ``state_space`` or ``short_conv`` takes, as float32; made once."""
    if layer.w4a8_weights is None:
        layer.w4a8_weights = _convolution(layer.conv) if hasattr(layer, "conv") else _state_space_weights(layer)
    return layer.w4a8_weights


def _state_space_weights(layer: Any) -> dict[str, torch.Tensor | None]:
    return {
        **_convolution(layer.conv1d),
        "a": -layer.A.detach().float(),
        "dt_bias": layer.dt_bias.detach().float(),
        "d": layer.D.detach().float(),
        "norm": layer.norm.weight.detach().float() if layer.norm.use_rms_norm else None,
    }


def _convolution(linear: Any) -> dict[str, torch.Tensor | None]:
    """vLLM keeps the kernels of a depthwise convolution as a linear layer, [channels, 1, width]."""
    weight = getattr(linear, "_cpu_unpacked_conv_weight", None)  # vLLM's copy of what it packed
    weight = linear.weight if weight is None else weight
    bias = None if linear.bias is None else linear.bias.detach().float()
    return {"conv_weight": conv_rows(weight.detach().reshape(len(weight), -1)), "conv_bias": bias}


def norm_numbers(layer: Any) -> dict[str, Any]:
    """``norm_eps`` and ``norm_groups`` of ``Decoder.add_linear_attention``, of this rank's heads."""
    groups = 0 if _norms_over_ranks(layer) else max(1, layer.norm.n_groups // layer.tp_size)
    return {"norm_eps": layer.norm.variance_epsilon, "norm_groups": groups}


def state_space(self: Any, projected_states: torch.Tensor, output: torch.Tensor) -> None:
    """In place of upstream's ``conv_ssm_forward``, with the gated norm unless that is over several ranks.

    Args:
        projected_states: [tokens, ..], the projections z, x, B, C and dt of this rank. Tokens behind those of the step
            are padding.
        output: [tokens, heads * head_dim], which is written to.
    """
    step = _step_of(self)
    sizes = (self.intermediate_size // self.tp_size, self.conv_dim // self.tp_size, self.num_heads // self.tp_size)
    if step is None:  # vLLM warms up
        output.zero_()
    else:
        tokens, where = step.num_decode_tokens + step.num_prefill_tokens, sequences_of(step)
        z, xbc, dt = projected_states[:tokens].split(sizes, -1)
        fields = weights_of(self) | norm_numbers(self)
        if _norms_over_ranks(self):  # vLLM's, of the gated rows
            z, fields = None, fields | {"norm": None, "norm_groups": 1}
        conv_state, state = states_of(self, drafts_of(where))
        output[:tokens] = ops.state_space(
            xbc,
            z,
            dt,
            **fields,
            groups=self.n_groups // self.tp_size,
            conv_state=conv_state,
            state=state,
            **where,
        )
        output[tokens:] = 0


def short_conv(self: Any, hidden_states: torch.Tensor, output: torch.Tensor) -> None:
    """In place of upstream's ``forward_native``: a whole layer, of tokens of which the last may be padding."""
    step = _step_of(self)
    if step is None:  # vLLM warms up
        output.zero_()
    else:
        tokens, where = step.num_decode_tokens + step.num_prefill_tokens, sequences_of(step)
        bcx = self.in_proj(hidden_states[:tokens])[0]
        conv_state, _ = states_of(self, drafts_of(where))
        rows = ops.short_conv(bcx, **weights_of(self), conv_state=conv_state, **where)
        output[:tokens] = self.out_proj(rows)[0]
        output[tokens:] = 0


def _step_of(layer: Any) -> Any:
    """vLLM's metadata of a step; None: there is no cache yet."""
    metadata = get_forward_context().attn_metadata
    return metadata.get(layer.prefix) if metadata else None


def sequences_of(step: Any) -> dict[str, torch.Tensor]:
    """Slots, ends and beginnings of the sequences of a step, and the slots behind guesses. Its layers share them.

    In an engine that guesses, a sequence behind its prompt has a page for the state behind each guess, also in a step
    without guesses.
    """
    found = getattr(step, "w4a8_sequences", None)
    if found is None:
        decodes, fresh = step.num_decodes, fresh_sequences(step)
        guesses = decodes > 0 and step.num_accepted_tokens is not None
        starts = step.query_start_loc_d[: decodes + 1] if guesses else torch.arange(decodes + 1, dtype=torch.int32)
        if step.num_prefills > 0:
            starts = torch.cat([starts[:-1], step.query_start_loc_p + step.num_decode_tokens])
        pages = [each for each in (step.state_indices_tensor_d, step.state_indices_tensor_p) if each is not None]
        slots = torch.cat([each[:, 0] if each.dim() == 2 else each for each in pages])[: len(fresh)]
        found = {"slots": slots, "query_start_loc": starts, "fresh": fresh}
        if guesses:
            table, accepted = step.state_indices_tensor_d, torch.zeros(len(fresh), dtype=torch.int32)
            accepted[:decodes] = step.num_accepted_tokens[:decodes]
            found |= {"out_slots": torch.cat([table, table.new_zeros(len(fresh) - decodes, table.shape[1])])}
            found["accepted"] = accepted
        step.w4a8_sequences = found
    return found


# By vLLM's class: the method that is replaced, and by which.
_METHODS = {"MambaMixer2": ("conv_ssm_forward", state_space), "ShortConv": ("forward_native", short_conv)}
