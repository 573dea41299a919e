"""Layers of linear attention by one operator, in the place of transformers' loops (docs/transformers.md)."""

from __future__ import annotations

from abc import abstractmethod
from functools import lru_cache
from itertools import takewhile
from typing import Any

import torch
from transformers import Cache

from w4a8 import ops
from w4a8.decoder import States
from w4a8.linear_attention import conv_rows, layer_weights
from w4a8.nn.packed import PackedLinear, PackedModule
from w4a8.nn.watch import version
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


def operator_of(layer: torch.nn.Module) -> _Operator | None:
    """The operator of a layer's linear attention, by :func:`use_operators`; None: the layer has none."""
    found = (vars(module).get("forward") for module in layer.children())
    return next((each for each in found if isinstance(each, _Operator)), None)


def step_states(operators: list[_Operator], cache: Any, batch: int, dtype: torch.dtype) -> States | None:
    """The states of all layers in a cache, for ``Decoder.step``.

    Args:
        operators: of the layers with linear attention.
        cache: of transformers.
        batch: as many sequences, each with a slot of its number.
        dtype: of the model.

    Returns:
        None: the cache records its past, or has states of other sizes.
    """
    found = [each.states(batch, dtype, cache) for each in operators]
    if any(each is None for each in found):
        return None
    states = [each["state"] for each in found if "state" in each]
    slots = _sequences(batch, 1)["slots"]
    return States([each["conv_state"] for each in found], states, [slots], found[0]["fresh"])


class _Operator(Guard):
    """``forward`` of one layer."""

    computes_the_same = True  # as the layer's own, for w4a8.nn.hooks
    kind = ""  # of the layer, in a Decoder
    # Of the argument and of the modules, in transformers.
    cache_name, conv_name, out_name = "cache_params", "conv1d", "out_proj"

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        self._made_of: Any = None
        self._weights: dict[str, Any] = {}

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        layer, mask = self._module(), kwargs.get("attention_mask")
        states = None
        if not args and not self._is_apart(layer, hidden_states, mask, kwargs):
            states = self.states(len(hidden_states), hidden_states.dtype, kwargs.get(self.cache_name))
        if states is None:
            return type(layer).forward(layer, hidden_states, *args, **kwargs)
        if mask is not None:  # as transformers: padding has hidden states of zeros
            hidden_states = (hidden_states * mask[:, :, None]).to(hidden_states.dtype)
        batch, tokens = hidden_states.shape[:2]
        found = self._compute(layer, hidden_states.flatten(0, 1), {**states, **_sequences(batch, tokens)})
        return getattr(layer, self.out_name)(found.unflatten(0, (batch, tokens)))

    def _is_apart(self, layer: Any, hidden_states: torch.Tensor, mask: Any, kwargs: dict[str, Any]) -> bool:
        """Whether the operators do not compute this call."""
        convolution = getattr(layer, self.conv_name)
        return (
            hidden_states.device.type != "cpu"
            or hidden_states.shape[1] == 0
            or torch.compiler.is_compiling()
            or (torch.is_grad_enabled() and hidden_states.requires_grad)
            or kwargs.get("cu_seq_lens_q") is not None
            or (mask is not None and convolution.bias is not None)  # padding would not stay zeros
            or not 2 <= layer.conv_kernel_size <= 8
            or not self._fits(layer)
        )

    def states(self, batch: int, dtype: torch.dtype, cache: Any) -> dict[str, torch.Tensor] | None:
        """The operator's states of a batch, parts of the cache if there is one; None: of other sizes."""
        layer = self._module()
        index, size = layer.layer_idx, self._state_size(layer)
        conv_size = batch, getattr(layer, self.conv_name).in_channels, layer.conv_kernel_size
        conv, fresh = None, True
        if cache is not None:
            if cache.is_recording_past(index):
                return None
            conv = cache.get_conv_state(index)
            fresh = conv is None
        if conv is None:
            conv = torch.zeros(conv_size, dtype=dtype)
            state = torch.zeros(batch, *size) if size else None
            if cache is not None:
                cache.update_conv_state(conv, index)
                if size:
                    cache.update_recurrent_state(state, index)
        if cache is not None:
            conv, state = cache.get_conv_state(index), cache.get_recurrent_state(index) if size else None
        # transformers keeps one column more than is read
        found = {"conv_state": conv[:, :, 1:].transpose(1, 2), "fresh": torch.full((batch,), fresh)}
        if conv.shape != conv_size:
            return None
        if size:
            if state is None or state.shape != (batch, *size) or state.dtype != torch.float32:
                return None
            found["state"] = state
        return found

    def decoder_fields(self) -> dict[str, Any]:
        """The arguments of ``Decoder.add_linear_attention``.

        Raises:
            ValueError: a projection is not packed, or the operator does not compute the layer.
        """
        layer = self._module()
        if not self._fits(layer):
            raise ValueError(f"{type(layer).__name__} is not computed by {self.kind}")
        large, small = self._projections(layer)
        packed = [*large, *takewhile(lambda each: isinstance(each, PackedLinear), small)]
        found, floats = [_packed(each) for each in packed], small[len(packed) - len(large) :]
        if any(isinstance(each, PackedLinear) for each in floats):
            raise ValueError(f"a projection of {type(layer).__name__} is packed behind one of floats")
        gates = torch.cat([each.weight.detach() for each in floats]) if floats else None
        projections = {"projections": found, "gates": gates, "kind": self.kind}
        projections["out"] = _packed(getattr(layer, self.out_name))
        return {**projections, **self.weights(layer), **self._sizes(layer)}

    def _projections(self, layer: Any) -> tuple[list[Any], list[Any]]:
        """The modules of the projections in a Decoder's order: large ones, and small ones, the last of which may be
        floats."""
        return [layer.in_proj], []

    def _sizes(self, layer: Any) -> dict[str, Any]:
        """The other arguments."""
        return {}

    def weights(self, layer: Any) -> dict[str, Any]:
        """Arguments made of the layer's floats, such that the operator does not copy them; made anew if they change."""
        made_of = [(each.data_ptr(), version(each), each.dtype) for each in self._floats(layer) if each is not None]
        if made_of != self._made_of:
            self._weights, self._made_of = self._made(layer), made_of
        return self._weights

    def _floats(self, layer: Any) -> list[torch.Tensor | None]:
        convolution = getattr(layer, self.conv_name)
        return [convolution.weight, convolution.bias]

    @abstractmethod
    def _made(self, layer: Any) -> dict[str, Any]:
        """Those arguments."""

    def _state_size(self, layer: Any) -> tuple[int, ...]:
        """Of the state of a sequence; (): the convolution's is all."""
        return ()

    @abstractmethod
    def _fits(self, layer: Any) -> bool:
        """Whether the operator computes the layer."""

    @abstractmethod
    def _compute(self, layer: Any, hidden_states: torch.Tensor, states: dict[str, torch.Tensor]) -> torch.Tensor:
        """What the last projection takes: [T, ..] of the hidden states [T, H]."""


def _packed(module: Any) -> torch.Tensor:
    if not isinstance(module, PackedLinear):
        raise ValueError(f"a projection of linear attention is a {type(module).__name__}, which is not packed")
    return module.packed


class _GatedDelta(_Operator):
    """Qwen3.5's layer, and Qwen3-Next's, whose projections are interleaved."""

    kind = "gated_delta"
    norm_name = "norm"

    def _fits(self, layer: Any) -> bool:
        return (
            {layer.head_k_dim, layer.head_v_dim}.issubset(ops.STATE_SIZES)
            and layer.activation in ("silu", "swish")
            and getattr(layer, self.norm_name).activation in ("silu", "sigmoid")
            and layer.conv1d.bias is None
        )

    def _state_size(self, layer: Any) -> tuple[int, ...]:
        return layer.num_v_heads, layer.head_k_dim, layer.head_v_dim

    def _floats(self, layer: Any) -> list[torch.Tensor | None]:
        return [*super()._floats(layer), layer.A_log, layer.dt_bias, getattr(layer, self.norm_name).weight]

    def _made(self, layer: Any) -> dict[str, Any]:
        found = layer_weights(layer.conv1d.weight.squeeze(1), layer.A_log, layer.dt_bias)
        return {**found, "norm": getattr(layer, self.norm_name).weight.detach().float()}

    def _projected(self, layer: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(qkv, z, ba) of the operator."""
        if hasattr(layer, "in_proj_qkvz"):
            parts = layer.fix_query_key_value_ordering(layer.in_proj_qkvz(x)[None], layer.in_proj_ba(x)[None])
            q, k, v, z, b, a = (part[0].flatten(1) for part in parts)
            return torch.cat((q, k, v), -1), z, torch.cat((b, a), -1)
        large, small = self._projections(layer)
        *qkv, z = (each(x) for each in large)
        ba = torch.cat([each(x) for each in small], -1)
        return qkv[0] if len(qkv) == 1 else torch.cat(qkv, -1), z, ba

    def _projections(self, layer: Any) -> tuple[list[Any], list[Any]]:
        if hasattr(layer, "in_proj_qkv"):
            return [layer.in_proj_qkv, layer.in_proj_z], [layer.in_proj_b, layer.in_proj_a]
        return [layer.in_proj_qkvz], [layer.in_proj_ba]

    def _sizes(self, layer: Any) -> dict[str, Any]:
        sizes = {"key_size": layer.head_k_dim, "value_size": layer.head_v_dim}
        return {**self._heads(layer), **sizes, "interleaved": hasattr(layer, "in_proj_qkvz")}

    def _heads(self, layer: Any) -> dict[str, Any]:
        heads = {"key_heads": layer.num_k_heads, "value_heads": layer.num_v_heads}
        norm = getattr(layer, self.norm_name)
        numbers = {"norm_eps": norm.variance_epsilon, "gate": norm.activation}
        return {**heads, **numbers, "beta_scale": 2.0 if getattr(layer, "allow_neg_eigval", False) else 1.0}

    def _compute(self, layer: Any, hidden_states: torch.Tensor, states: dict[str, torch.Tensor]) -> torch.Tensor:
        rows = self._projected(layer, hidden_states)
        return ops.gated_delta(*rows, **self.weights(layer), **states, **self._heads(layer))


class _OlmoDelta(_GatedDelta):
    """OLMo-Hybrid's layer, whose queries, keys and values have projections of their own."""

    out_name, norm_name = "o_proj", "o_norm"

    def _projections(self, layer: Any) -> tuple[list[Any], list[Any]]:
        return [layer.q_proj, layer.k_proj, layer.v_proj, layer.g_proj], [layer.b_proj, layer.a_proj]


class _KimiDelta(_Operator):
    """Kimi-Linear's layer (KDA): each channel of the keys has a decay of its own."""

    kind, out_name = "gated_delta", "o_proj"

    def _fits(self, layer: Any) -> bool:
        activations = layer.activation in ("silu", "swish"), layer.o_norm.activation == "sigmoid"
        return layer.head_dim in ops.STATE_SIZES and all(activations) and layer.conv1d.bias is None

    def _state_size(self, layer: Any) -> tuple[int, ...]:
        return layer.num_heads, layer.head_dim, layer.head_dim

    def _floats(self, layer: Any) -> list[torch.Tensor | None]:
        return [*super()._floats(layer), layer.forget_gate.A_log, layer.forget_gate.dt_bias, layer.o_norm.weight]

    def _made(self, layer: Any) -> dict[str, Any]:
        gate = layer.forget_gate
        rates, bias = gate.A_log.flatten(), gate.dt_bias.view(layer.num_heads, layer.head_dim)
        found = layer_weights(layer.conv1d.weight.squeeze(1), rates, bias)
        return {**found, "norm": layer.o_norm.weight.detach().float()}

    def _projections(self, layer: Any) -> tuple[list[Any], list[Any]]:
        large = [layer.q_proj, layer.k_proj, layer.v_proj]
        return large, [layer.g_a_proj, layer.forget_gate.f_a_proj, layer.b_proj]

    def _sizes(self, layer: Any) -> dict[str, Any]:
        sizes = {"key_size": layer.head_dim, "value_size": layer.head_dim, **self._heads(layer)}
        ups = {"z_up": layer.g_b_proj, "decay_up": layer.forget_gate.f_b_proj}
        packed = {name: isinstance(each, PackedLinear) for name, each in ups.items()}
        return sizes | {name: each.packed if packed[name] else each.weight.detach() for name, each in ups.items()}

    def _heads(self, layer: Any) -> dict[str, Any]:
        heads = {"key_heads": layer.num_heads, "value_heads": layer.num_heads}
        return {**heads, "norm_eps": layer.layer_norm_epsilon, "gate": "sigmoid"}

    def _compute(self, layer: Any, hidden_states: torch.Tensor, states: dict[str, torch.Tensor]) -> torch.Tensor:
        gate = layer.forget_gate
        qkv = torch.cat([layer.q_proj(hidden_states), layer.k_proj(hidden_states), layer.v_proj(hidden_states)], -1)
        return ops.gated_delta(
            qkv,
            layer.g_b_proj(layer.g_a_proj(hidden_states)),
            layer.b_proj(hidden_states),
            **self.weights(layer),
            **states,
            **self._heads(layer),
            decay=gate.f_b_proj(gate.f_a_proj(hidden_states)).view(-1, layer.num_heads, layer.head_dim),
        )


class _StateSpace(_Operator):
    """Mamba-2. The steps have no limits, as in transformers' code for one token."""

    kind = "state_space"

    def _fits(self, layer: Any) -> bool:
        fits = {layer.head_dim, layer.ssm_state_size}.issubset(ops.STATE_SIZES)
        return fits and layer.activation in ("silu", "swish")

    def _state_size(self, layer: Any) -> tuple[int, ...]:
        return layer.num_heads, layer.head_dim, layer.ssm_state_size

    def _floats(self, layer: Any) -> list[torch.Tensor | None]:
        norm = layer.norm.weight if getattr(layer, "mamba_rms_norm", True) else None
        return [*super()._floats(layer), layer.A_log, layer.dt_bias, layer.D, norm]

    def _made(self, layer: Any) -> dict[str, Any]:
        _, bias, *_, d, norm = (None if each is None else each.detach().float() for each in self._floats(layer))
        found = layer_weights(layer.conv1d.weight.squeeze(1), layer.A_log, layer.dt_bias)
        return {**found, "conv_bias": bias, "d": d, "norm": norm}

    def _compute(self, layer: Any, hidden_states: torch.Tensor, states: dict[str, torch.Tensor]) -> torch.Tensor:
        weights = self.weights(layer)
        if hasattr(layer, "ssm_in_multiplier"):  # Falcon-H1
            projected = layer.in_proj(hidden_states * layer.ssm_in_multiplier) * layer.mup_vector[0]
        else:
            projected = layer.in_proj(hidden_states)
        z, xbc, dt = projected.split([layer.intermediate_size, layer.conv_dim, layer.num_heads], -1)
        return ops.state_space(xbc, z, dt, **weights, **states, groups=layer.n_groups, **self._norms(layer))

    def _norms(self, layer: Any) -> dict[str, Any]:
        if self.weights(layer)["norm"] is None:
            return {"norm_eps": 1.0}  # of no norm
        norm = layer.norm
        parts = getattr(norm, "n_groups", 0) or layer.intermediate_size // norm.group_size
        first = getattr(norm, "norm_before_gate", False)
        return {"norm_eps": norm.variance_epsilon, "norm_groups": parts, "norm_first": first}

    def _sizes(self, layer: Any) -> dict[str, Any]:
        heads = {"key_heads": layer.n_groups, "value_heads": layer.num_heads}
        sizes = {"key_size": layer.ssm_state_size, "value_size": layer.head_dim}
        return {**heads, **sizes, **self._norms(layer)}


class _ShortConv(_Operator):
    """LFM2's layer."""

    kind = "short_conv"
    cache_name, conv_name = "past_key_values", "conv"

    def _fits(self, layer: Any) -> bool:
        return layer.conv.in_channels % 16 == 0

    def _made(self, layer: Any) -> dict[str, Any]:
        bias = layer.conv.bias
        weight = conv_rows(layer.conv.weight.squeeze(1))
        return {"conv_weight": weight, "conv_bias": None if bias is None else bias.detach().float()}

    def _compute(self, layer: Any, hidden_states: torch.Tensor, states: dict[str, torch.Tensor]) -> torch.Tensor:
        return ops.short_conv(layer.in_proj(hidden_states), **self.weights(layer), **states)


_OPERATORS = {
    "Qwen3NextGatedDeltaNet": _GatedDelta,
    "Qwen3_5GatedDeltaNet": _GatedDelta,
    "Qwen3_5MoeGatedDeltaNet": _GatedDelta,
    "OlmoHybridGatedDeltaNet": _OlmoDelta,
    "KimiLinearDeltaAttention": _KimiDelta,
    "BambaMixer": _StateSpace,
    "FalconH1Mixer": _StateSpace,
    "GraniteMoeHybridMambaLayer": _StateSpace,
    "NemotronHMamba2Mixer": _StateSpace,
    "Lfm2ShortConv": _ShortConv,
    "Lfm2MoeShortConv": _ShortConv,
}
