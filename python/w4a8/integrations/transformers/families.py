"""Finds the parts of a Decoder's layer among the modules of transformers' models."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any

import torch

from w4a8.checkpoint.routers import router_in_config
from w4a8.core.activation import xielu_fields
from w4a8.core.families import FAMILIES
from w4a8.core.matrix import matrix_of
from w4a8.core.product_factors import product_factors
from w4a8.decoder import Decoder
from w4a8.integrations.rotary import FIXED, angles, for_queries, unturned
from w4a8.integrations.transformers.linear_attention import operator_of
from w4a8.nn.experts import W4A8Experts
from w4a8.nn.hooks import computes_more
from w4a8.nn.packed import PackedLinear
from w4a8.nn.watch import Watch
from w4a8.ops import HEAD_SIZES, Activation

_CORRECTIONS = ("e_score_correction_bias", "expert_bias")
_ACTIVATIONS = {
    "relu2": Activation.RELU2,
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}


class NotFusedError(ValueError):
    """Why a model stays as it is."""


Place = tuple[torch.nn.Module, str, torch.nn.Module]  # parent, name, module


def _places(parent: torch.nn.Module, without: torch.nn.Module | None) -> Iterator[Place]:
    """All modules below a module, but for one and those below that one."""
    for name, module in parent.named_children():
        if module is not without:
            yield parent, name, module
            yield from _places(module, without)


def _shares_keys(attention: Any) -> bool:
    """Whether keys and values are those of an earlier layer."""
    return bool(getattr(attention, "is_kv_shared_layer", False))


def _require(condition: object, reason: str) -> None:
    if not condition:
        raise NotFusedError(reason)


class Stack:
    """A model's layers as a Decoder.

    Args:
        model: with ``model`` (the layers) and ``lm_head``.
        kind: of the cache.

    Raises:
        NotFusedError: a part of the model is not known here, or has a hook; names the part.
    """

    def __init__(self, model: Any, kind: str) -> None:
        try:
            self._read(model, kind)
        except (ValueError, RuntimeError, AttributeError) as error:
            if isinstance(error, NotFusedError):
                raise
            raise NotFusedError(f"{type(model).__name__} is not as expected: {error}") from error

    def _read(self, model: Any, kind: str) -> None:
        config = model.config.get_text_config(decoder=True)
        _require(config.model_type in FAMILIES, f"models of type {config.model_type} are not known")
        self.family, self.config, self.kind = FAMILIES[config.model_type], config, kind
        refusal = self.family.refusal(config)
        _require(refusal is None, refusal)
        inner, head = self._part(model, "model"), self._part(model, "lm_head")
        # The embeddings are called as ever.
        self.places = [(model, "model", inner), (model, "lm_head", head), *_places(head, None)]
        self.places += _places(inner, model.get_input_embeddings())
        self.watch = Watch(model, [module for _, _, module in self.places])
        reason = self.changed()
        _require(reason is None, reason)
        self.rotary = getattr(inner, self.family.name("rotary_emb"), None)  # some models have none
        layers = list(self._part(inner, "layers"))[: config.num_hidden_layers]
        norm = self._part(inner, self.family.name("norm"))
        self.eps = self._eps(norm)
        # Factors of Granite, of Command R, and of Falcon-H1.
        self.embedding_factor = float(getattr(config, "embedding_multiplier", 1.0))
        self.logits_divisor = float(getattr(config, "logits_scaling", 1.0))
        self.logits_factor = float(getattr(config, "logit_scale", getattr(config, "lm_head_multiplier", 1.0)))
        self.factors = product_factors(config) if self.family.scaled else {}
        packed = isinstance(head, PackedLinear)
        self.head = None if packed else head
        self.decoder = Decoder(
            self._norm(norm), head.packed if packed else None, hidden_size=config.hidden_size, eps=self.eps,
            centered=self.family.centered,
        )  # fmt: skip
        window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
        same = "full_attention" if window is None else "sliding_attention"  # where the config does not list types
        types = getattr(config, "layer_types", None) or [same] * len(layers)
        ropes = getattr(config, "rope_parameters", None) or {}
        by_type = isinstance(next(iter(ropes.values()), None), dict)
        self.rope_types = [] if self.rotary is None else sorted(set(types)) if by_type else [None]
        self.limit = sys.maxsize  # of positions: behind it some models have other angles
        self.parameters = [ropes[layer_type] if by_type else ropes for layer_type in self.rope_types]
        for parameters in self.parameters:
            rope = parameters.get("rope_type", "default")
            known = (*FIXED, "longrope", "dynamic")
            _require(rope in known, f"rotary embeddings of type {rope} depend on the length of the text")
            if rope == "longrope":
                self.limit = min(self.limit, parameters["original_max_position_embeddings"])
            elif rope == "dynamic":
                self.limit = min(self.limit, config.max_position_embeddings)
        self.has_inputs = False  # of each layer
        self.query_tables: list[tuple[int, int, int, float, int]] = []  # rope, head size, for for_queries
        for layer, layer_type in zip(layers, types):
            self._add(layer, layer_type, self.rope_types.index(layer_type) if by_type else 0)
        attentions = [each for each in map(self._attention_of, layers) if each is not None]
        own = [each for each in attentions if not _shares_keys(each)]
        self.heads = [self._heads(each) for each in own]
        self.caches = [own.index(each if each in own else self._owner(each, own)) for each in attentions]
        self.linear = [operator for operator in map(operator_of, layers) if operator is not None]
        self.ropes: list[torch.Tensor] = []
        self.positions = 0

    def _part(self, parent: Any, name: str) -> Any:
        module = getattr(parent, name, None)
        _require(isinstance(module, torch.nn.Module), f"{type(parent).__name__} has no {name}")
        return module

    def _packed(self, parent: Any, name: str) -> torch.Tensor:
        module = self._part(parent, name)
        _require(isinstance(module, PackedLinear), f"{type(parent).__name__}.{name} is not packed")
        return module.packed

    @staticmethod
    def _weight(linear: Any) -> torch.Tensor:
        """The packed matrix of a linear layer, or its floats."""
        return linear.packed if isinstance(linear, PackedLinear) else linear.weight.detach()

    @staticmethod
    def _eps(norm: Any) -> float:
        return float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 0.0)))

    def _norm(self, module: Any, size: int = 0) -> torch.Tensor:
        """The factors of a normed row, and its bias; ``size``: of the row, for a norm that may have no factors."""
        eps = self._eps(module)
        _require(eps == self.eps, f"norms have different eps, {eps} and {self.eps}")
        if size and getattr(module, "weight", None) is None:
            return torch.ones(size)
        weight, bias = module.weight.detach().float(), getattr(module, "bias", None)
        if bias is not None:
            return torch.stack([weight, bias.detach().float()])
        return 1 + weight if self.family.one_more else weight

    def _heads(self, attention: Any) -> tuple[int, int, int]:
        """Number of key heads, and sizes of their keys and values, in the cache."""
        if self.family.is_latent:
            return 1, attention.kv_lora_rank + attention.qk_rope_head_dim, attention.kv_lora_rank
        return self._kv_heads(attention), attention.head_dim, attention.head_dim

    def _query_heads(self, attention: Any) -> int:
        return getattr(attention, self.family.name("o_proj")).in_features // attention.head_dim

    def _kv_heads(self, attention: Any) -> int:
        projection = getattr(attention, "k_proj", None)
        if _shares_keys(attention):
            return self._query_heads(attention) // attention.num_key_value_groups
        return attention.num_key_value_heads if projection is None else projection.out_features // attention.head_dim

    @staticmethod
    def _owner(attention: Any, own: list[Any]) -> Any:
        """The last of these attentions that is of the same type: the other's keys and values are its own."""
        return [each for each in own if each.layer_type == attention.layer_type][-1]

    def _attention_of(self, layer: Any) -> Any:
        """The module of a layer's attention; None: the layer has none."""
        if self.family.part:
            part = self._part(layer, self.family.part)
            return part if hasattr(part, "q_proj") else None
        attention = getattr(layer, "self_attn", None)
        return None if hasattr(attention, "conv1d") else attention  # linear attention

    def _joined(self, parent: Any, whole: str, parts: tuple[str, ...]) -> list[torch.Tensor]:
        """Packed matrices that are one in some models."""
        names = (whole,) if hasattr(parent, whole) else map(self.family.name, parts)
        return [self._packed(parent, name) for name in names]

    def _add(self, layer: Any, layer_type: str, rope: int) -> None:
        family, operator, attention = self.family, operator_of(layer), self._attention_of(layer)
        beside = getattr(layer, family.beside) if family.beside else None
        norms = family.linear_norms if operator is not None and family.linear_norms else family.norms
        part = getattr(layer, family.part) if family.part else None
        is_mlp = any(hasattr(part, name) for name in ("experts", "down_proj"))
        has_states = getattr(layer, "mamba", None) is not None  # beside attention, or in its place
        known = operator is not None or (not has_states and (attention is not None or is_mlp))
        _require(known, f"linear attention of {type(layer).__name__} is not packed")
        if family.part:
            mlp, norms = part if is_mlp else None, (("mlp_input_norm" if is_mlp else "input_norm", "norm"),)
        else:
            mlp = getattr(layer, family.name("mlp") if hasattr(layer, family.name("mlp")) else family.mlp_at)
            mlp = beside if mlp is None else mlp
        fields: dict[str, Any] = {name: self._norm(self._part(layer, at)) for name, at in norms}
        if attention is not None:
            is_latent = family.is_latent
            fields |= self._latent(attention) if is_latent else self._attention(attention, layer_type, rope)
        experts = hasattr(mlp, "experts")
        shared, gate = family.shared
        dense = (self._part(mlp, shared) if shared else beside) if experts else mlp
        if dense is not None:
            fields |= self._mlp(dense)
        if family.output_scale:
            fields["output_scale"] = float(getattr(layer, family.output_scale))
        residual = float(getattr(layer, "residual_multiplier", 1.0))
        self.decoder.add_layer(residual=residual, parallel=family.parallel, **fields)
        if operator is not None:
            self.decoder.add_linear_attention(**operator.decoder_fields())
        for product, factors in self.factors.items():
            self.decoder.set_factors(product, factors)
        if experts:
            self._add_experts(mlp, gate)
        elif family.expert_norms and getattr(layer, "experts", None) is not None:
            self._add_experts(layer, "")
        if family.layer_input and getattr(layer, family.layer_input[0], None) is not None:
            self._add_layer_input(layer)

    def _activation(self) -> int:
        config, family = self.config, self.family
        told = (getattr(config, name, None) for name in ("hidden_activation", family.name("hidden_act")))
        name = next(filter(None, told), family.activation)
        _require(name in _ACTIVATIONS, f"the activation {name} is not known")
        return int(_ACTIVATIONS[name])

    def _mlp(self, mlp: Any) -> dict[str, Any]:
        """The fields of ``Decoder.add_layer`` for an MLP."""
        family = self.family
        parts = ("gate_proj", "up_proj") if hasattr(mlp, family.name("gate_proj")) else ("up_proj",)
        is_xielu = getattr(self.config, "hidden_act", None) == "xielu"
        return {
            **(xielu_fields(mlp.act_fn) if is_xielu else {"activation_kind": self._activation()}),
            "gate_up": self._joined(mlp, family.name("gate_up_proj"), parts),
            "down": self._packed(mlp, family.name("down_proj")),
        }

    def _add_layer_input(self, layer: Any) -> None:
        gate, down, norm = (self._part(layer, name) for name in self.family.layer_input)
        self.decoder.add_layer_input(
            self._weight(gate), self._weight(down), norm=self._norm(norm), activation_kind=self._activation()
        )
        self.has_inputs = True

    def _attention(self, attention: Any, layer_type: str, rope: int) -> dict[str, Any]:
        """The fields of ``Decoder.add_layer`` for attention."""
        config, family = self.config, self.family
        window = (config.sliding_window or 0) if layer_type == "sliding_attention" else 0
        chunk = config.attention_chunk_size if layer_type == "chunked_attention" else 0
        turns = getattr(attention, "use_rope", True) and self.rotary is not None
        if family.turns_windows_alone and config.sliding_window is not None:
            turns = window > 0
        parts = ("q_proj", "k_proj", "v_proj")
        if _shares_keys(attention):
            parts = ("q_proj",)
        elif getattr(attention, "v_proj", attention) is None:  # values are keys
            parts = ("q_proj", "k_proj")
        fields = {
            "qkv": self._joined(attention, "qkv_proj", parts),
            "projected": "qkv"[: len(parts)],
            "out": self._packed(attention, family.name("o_proj")),
            "heads": self._query_heads(attention),
            "kv_heads": self._kv_heads(attention),
            "head_size": attention.head_dim,
            "scale": float(attention.scaling),
            "kind": self.kind,
            "window": window,
            "chunk": chunk,
            "soft_cap": float(getattr(attention, "attn_logit_softcapping", None) or 0.0),
            "rope": rope if turns else -1,
            "query_rope": self._query_rope(attention, rope if turns else -1),
            "interleaved": family.interleaved,
            "gated": family.gated,
            "turn_first": family.turn_first,
        }
        for name in ("q_norm", "k_norm", "v_norm"):
            if getattr(attention, family.name(name), None) is not None:
                fields[name] = self._norm(self._part(attention, family.name(name)), attention.head_dim)
        if getattr(attention, "sinks", None) is not None:
            fields["sinks"] = attention.sinks.detach()
        return fields

    def _query_rope(self, attention: Any, rope: int) -> int:
        """The table of queries, which may have factors by their position; ``rope``, that of keys, if they have none."""
        beta = self.parameters[rope].get("llama_4_scaling_beta") if rope >= 0 else None
        if beta:
            table = (rope, attention.head_dim, self.parameters[rope]["original_max_position_embeddings"], beta, 0)
        elif rope < 0 and getattr(attention, "attn_temperature_tuning", False):
            table = (rope, attention.head_dim, int(attention.floor_scale), float(attention.attn_scale), 1)
        else:
            return rope
        if table not in self.query_tables:
            self.query_tables.append(table)
        return len(self.rope_types) + self.query_tables.index(table)

    def _latent(self, attention: Any) -> dict[str, Any]:
        """The fields of ``Decoder.add_layer`` for latent attention (MLA)."""
        nope, values = attention.qk_nope_head_dim, attention.v_head_dim
        up, k_norm = self._part(attention, "kv_b_proj"), self._part(attention, "kv_a_layernorm")
        weight = self._weight(up)
        floats = matrix_of(weight, "kv_b_proj").floats() if isinstance(up, PackedLinear) else weight
        heads = floats.to(k_norm.weight.dtype).view(attention.num_heads, nope + values, -1)
        first = "q_proj" if attention.q_lora_rank is None else "q_a_proj"
        kv_heads, head_size, _ = self._heads(attention)
        fields: dict[str, Any] = {
            "qkv": [self._packed(attention, name) for name in (first, "kv_a_proj_with_mqa")],
            "out": self._packed(attention, "o_proj"),
            "heads": attention.num_heads,
            "kv_heads": kv_heads,
            "head_size": head_size,
            "scale": float(attention.scaling),
            "kind": "latent",
            "rope": -1 if self.rotary is None else 0,
            "interleaved": getattr(attention.config, "rope_interleave", True),
            "k_norm": k_norm.weight.detach().float(),
            "qk_norm_eps": self._eps(k_norm),
            "k_up": heads[:, :nope].transpose(1, 2).contiguous(),
            "v_up": heads[:, nope:].contiguous(),
        }
        if all(size in HEAD_SIZES for size in (attention.qk_head_dim, values)):
            fields["kv_up"] = weight
        if attention.q_lora_rank is not None:
            q_norm = self._part(attention, "q_a_layernorm")
            _require(self._eps(q_norm) == self._eps(k_norm), "norms of queries and keys have different eps")
            fields |= {"q_up": self._packed(attention, "q_b_proj"), "q_norm": q_norm.weight.detach().float()}
        return fields

    def _add_experts(self, mlp: Any, gate: str) -> None:
        """Experts and a router, which are parts of ``mlp``; ``gate``: the name of the shared expert's, or ""."""
        experts = self._part(mlp, "experts")
        name = "router" if hasattr(mlp, "router") else self.family.router
        router, matrix = self._part(mlp, name.partition(".")[0]), mlp.get_submodule(name)
        _require(isinstance(experts, W4A8Experts), f"{type(mlp).__name__}.experts are not packed")
        own = {field: self._norm(self._part(mlp, name)) for field, name in self.family.expert_norms}
        top_k = getattr(router, "top_k", None)
        if own:  # the router norms its rows, which then have factors
            factors = router.scale.detach().float() * router.scalar_root_size
            own["router_norm"] = self._norm(router.norm, len(factors)) * factors
            own["expert_factors"] = router.per_expert_scale.detach()
            matrix, top_k = self._part(router, "proj"), self.config.top_k_experts
        bias, routed = getattr(matrix, "bias", None), router_in_config(self.config.model_type, self.config.to_dict())
        floats, correction = (*mlp.named_parameters(), *mlp.named_buffers()), None
        if routed.has_correction_bias:  # of the router, of the module around it, or of one in it
            (correction,) = (found for name, found in floats if name.endswith(_CORRECTIONS))
        routing = routed.arguments
        if self.family.scoring == "sparsemixer":
            noise = self.config.router_jitter_noise
            _require(noise == 0.01, f"config.router_jitter_noise is {noise}")
            routing["scoring_func"] = self.family.scoring
        self.decoder.add_experts(
            matrix.weight.detach(), None if bias is None else bias.detach(), experts.w13_packed, experts.w2_packed,
            top_k=top_k, activation_kind=int(experts.activation),
            shared_gate=self._part(mlp, gate).weight.detach()[0] if gate else None, **routing,
            apply_router_weight_on_input=routed.apply_router_weight_on_input,
            e_score_correction_bias=None if correction is None else correction.detach().flatten(),
            **experts.numbers._asdict(), **own,
        )  # fmt: skip

    def layer_inputs(self, model: Any, input_ids: torch.Tensor | None, embeds: torch.Tensor) -> torch.Tensor | None:
        """The numbers [batch, tokens, numbers] of all layers; None: they get none."""
        if not self.has_inputs:
            return None
        inner = model.model
        return inner.project_per_layer_inputs(embeds, inner.get_per_layer_inputs(input_ids, embeds)).flatten(2)

    def changed(self) -> str | None:
        """The first module of the model that was replaced or got a hook, or None."""
        for parent, name, module in self.places:
            if getattr(parent, name, None) is not module:
                return f"{name} of {type(parent).__name__} was replaced"
            if computes_more(module):
                return f"{name} of {type(parent).__name__} has a hook"
        return None

    def tables(self, positions: int) -> list[torch.Tensor]:
        """Angles of at least ``positions`` positions."""
        if positions > self.positions:
            self.positions = min(max(2 * self.positions, positions, 1024), self.limit)
            rotary = copy.deepcopy(self.rotary)  # some write to their buffers, which are watched
            for layer_type in self.rope_types:  # a short text undoes what a long one has changed
                angles(rotary, 1, layer_type)
            self.ropes = [angles(rotary, self.positions, layer_type) for layer_type in self.rope_types]
            for rope, size, *factors in self.query_tables:
                turned = unturned(self.positions, size) if rope < 0 else self.ropes[rope]
                self.ropes.append(for_queries(turned, *factors))
        return self.ropes
