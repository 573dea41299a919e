"""Layers of linear attention by one operator, in the place of transformers' loops (docs/transformers.md)."""

from __future__ import annotations

from abc import abstractmethod
from functools import lru_cache
from typing import Any

import torch
from transformers import Cache

from w4a8 import ops
from w4a8.nn.packed import PackedModule
from w4a8.quantization.float_guard import Guard

_CACHE = ("get_conv_state", "update_conv_state", "get_recurrent_state", "update_recurrent_state", "is_recording_past")


def use_operators(model: torch.nn.Module) -> None:
    """Lets the packed layers of linear attention of a model on CPUs compute by operators.

    They do for inference without ``torch.compile``, where the layer and its cache are as the operators need them.
    Everything else, and packed sequences (``cu_seq_lens_q``), goes to transformers' own code. So do all layers if
    transformers' caches are not as expected.
    """
    if all(hasattr(Cache, name) for name in _CACHE):
        for module in model.modules():
            operator = _OPERATORS.get(type(module).__name__)
            if operator is not None and any(isinstance(part, PackedModule) for part in module.modules()):
                module.forward = operator(module)


@lru_cache(maxsize=64)
def _sequences(batch: int, tokens: int) -> dict[str, torch.Tensor]:
    """A batch of as many tokens each, in slots of the same numbers."""
    ends = torch.arange(0, (batch + 1) * tokens, max(tokens, 1), dtype=torch.int32)
    return {"slots": torch.arange(batch, dtype=torch.int32), "query_start_loc": ends[: batch + 1]}


class _Operator(Guard):
    """``forward`` of one layer."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        self._of: Any = None  # the parameters that the weights were made of
        self._weights: dict[str, torch.Tensor] = {}

    def __call__(
        self,
        hidden_states: torch.Tensor,
        cache_params: Any = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        layer = self._module()
        states = None
        if not self._is_apart(layer, hidden_states, kwargs):
            states = self._states(layer, hidden_states, cache_params)
        if states is None:
            return type(layer).forward(
                layer, hidden_states, cache_params=cache_params, attention_mask=attention_mask, **kwargs
            )
        if attention_mask is not None:  # as transformers: padding has hidden states of zeros
            hidden_states = (hidden_states * attention_mask[:, :, None]).to(hidden_states.dtype)
        batch, tokens = hidden_states.shape[:2]
        found = self._compute(layer, hidden_states.flatten(0, 1), {**states, **_sequences(batch, tokens)})
        return layer.out_proj(found.unflatten(0, (batch, tokens)))

    def _is_apart(self, layer: Any, hidden_states: torch.Tensor, kwargs: dict[str, Any]) -> bool:
        """Whether the operators do not compute this call."""
        return (
            hidden_states.device.type != "cpu"
            or hidden_states.shape[1] == 0
            or torch.compiler.is_compiling()
            or (torch.is_grad_enabled() and hidden_states.requires_grad)
            or kwargs.get("cu_seq_lens_q") is not None
            or not self._fits(layer)
        )

    def _states(self, layer: Any, hidden_states: torch.Tensor, cache: Any) -> dict[str, torch.Tensor] | None:
        """The operator's states of the batch, parts of the cache if there is one; None: of other sizes."""
        batch, index, dtype = len(hidden_states), layer.layer_idx, hidden_states.dtype
        conv_shape, shape = (batch, *self._conv_shape(layer)), (batch, *self._state_shape(layer))
        conv = state = None
        if cache is not None:
            if cache.is_recording_past(index):
                return None
            conv, state = cache.get_conv_state(index), cache.get_recurrent_state(index)
        fresh = conv is None
        if fresh:
            conv, state = torch.zeros(conv_shape, dtype=dtype), torch.zeros(shape)
            if cache is not None:
                cache.update_conv_state(conv, index)
                cache.update_recurrent_state(state, index)
                conv, state = cache.get_conv_state(index), cache.get_recurrent_state(index)
        if state is None or conv.shape != conv_shape or state.shape != shape or state.dtype != torch.float32:
            return None
        rows = conv[:, :, 1:].transpose(1, 2)  # transformers keeps one more than is read
        return {"conv_state": rows, "state": state, "fresh": torch.full((batch,), fresh)}

    def weights(self, layer: Any) -> dict[str, torch.Tensor]:
        """The floats of the layer as the operator takes them without copies; made anew if they change."""
        parameters = [layer.conv1d.weight, layer.A_log, layer.dt_bias]
        of = [(each.data_ptr(), each._version, each.dtype) for each in parameters]
        if of != self._of:
            conv = layer.conv1d.weight.detach().squeeze(1).float()
            self._weights = {
                "conv_weight": conv.T.contiguous().T,
                "a": layer.A_log.detach().float().exp(),
                "dt_bias": layer.dt_bias.detach().float(),
            }
            self._of = of
        return self._weights

    @abstractmethod
    def _fits(self, layer: Any) -> bool:
        """Whether the operator computes the layer."""

    @abstractmethod
    def _conv_shape(self, layer: Any) -> tuple[int, int]:
        """Channels and width of the convolution."""

    @abstractmethod
    def _state_shape(self, layer: Any) -> tuple[int, int, int]:
        """The state of a sequence."""

    @abstractmethod
    def _compute(self, layer: Any, hidden_states: torch.Tensor, states: dict[str, torch.Tensor]) -> torch.Tensor:
        """What the last projection takes: [T, ..] of the hidden states [T, H]."""


class _GatedDelta(_Operator):
    """Qwen3.5's layer, and Qwen3-Next's, whose projections are interleaved."""

    def _fits(self, layer: Any) -> bool:
        sizes = layer.head_k_dim, layer.head_v_dim
        return (
            all(size % 16 == 0 and size <= 256 for size in sizes)
            and layer.activation in ("silu", "swish")
            and layer.norm.activation in ("silu", "sigmoid")
            and layer.conv1d.bias is None
            and 2 <= layer.conv_kernel_size <= 8
        )

    def _conv_shape(self, layer: Any) -> tuple[int, int]:
        return layer.conv_dim, layer.conv_kernel_size

    def _state_shape(self, layer: Any) -> tuple[int, int, int]:
        return layer.num_v_heads, layer.head_k_dim, layer.head_v_dim

    def _projected(self, layer: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(qkv, z, ba) of the operator."""
        if hasattr(layer, "in_proj_qkv"):
            return layer.in_proj_qkv(x), layer.in_proj_z(x), torch.cat((layer.in_proj_b(x), layer.in_proj_a(x)), -1)
        parts = layer.fix_query_key_value_ordering(layer.in_proj_qkvz(x)[None], layer.in_proj_ba(x)[None])
        q, k, v, z, b, a = (part[0].flatten(1) for part in parts)
        return torch.cat((q, k, v), -1), z, torch.cat((b, a), -1)

    def _compute(self, layer: Any, hidden_states: torch.Tensor, states: dict[str, torch.Tensor]) -> torch.Tensor:
        qkv, z, ba = self._projected(layer, hidden_states)
        return ops.gated_delta(
            *(qkv, z, ba),
            **self.weights(layer),
            norm=layer.norm.weight.detach(),
            **states,
            key_heads=layer.num_k_heads,
            value_heads=layer.num_v_heads,
            norm_eps=layer.layer_norm_epsilon,
            gate=layer.norm.activation,
        )


_OPERATORS = {
    "Qwen3NextGatedDeltaNet": _GatedDelta,
    "Qwen3_5GatedDeltaNet": _GatedDelta,
    "Qwen3_5MoeGatedDeltaNet": _GatedDelta,
}
