"""Modules of vLLM's models as a decoder's layers, by the table of families (w4a8/core/families.py).

A class outside of the table, or an unexpected attribute, is :class:`Unfit`: the class may compute something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.deepseek_scaling_rope import DeepseekScalingRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.phi3_long_rope_scaled_rope import Phi3LongRoPEScaledRotaryEmbedding

from w4a8 import ops
from w4a8.checkpoint.routers import router_in_config
from w4a8.core.activation import MoEActivation, as_activation, kernel_activation_kind, xielu_fields
from w4a8.core.families import FAMILIES, Family
from w4a8.integrations.rotary import FIXED, angles, for_queries, unturned
from w4a8.integrations.vllm import attention, ranks, settings
from w4a8.integrations.vllm.decoder_parts import (
    Unfit,
    any_weight,
    float_weight,
    only,
    packed,
    summed,
    summed_without_bias,
    without_bias,
)
from w4a8.integrations.vllm.moe import W4A8MoEMethod
from w4a8.integrations.vllm.state_layers import fields_of, state_layer_of

# Of MRotaryEmbedding for text, whose positions are the same on all axes.
_ROTATIONS = tuple(each.forward_native for each in (RotaryEmbedding, MRotaryEmbedding, DeepseekScalingRotaryEmbedding))
# vLLM's matrices of latent attention, and fields of ``Decoder.add_layer``.
_LATENTS = (("W_UK_T", "k_up"), ("W_UV", "v_up"))
# RMS norms of MiniMax's heads, and in transformers' modules; where these classes are differs between versions of vLLM.
_CUT_NORM = "MiniMaxText01RMSNormTP"
_NORMS = (_CUT_NORM, "TPAwareRMSNorm")
_LAYER_NORMS = ("commandr.LayerNorm", "torch.nn.modules.normalization.LayerNorm")
# Activation of a dense MLP, by vLLM's class.
_ACTIVATIONS = {
    "SiluAndMul": MoEActivation.SILU,
    "GeluAndMul": MoEActivation.GELU,
    "ReLUSquaredActivation": MoEActivation.RELU2_NO_MUL,
}


def class_name(module: Any) -> str:
    """Module and name of the class of a vLLM model or of a part of one."""
    name = f"{type(module).__module__}.{type(module).__qualname__}"
    return name.removeprefix("vllm.model_executor.models.")


def family_of(inner: torch.nn.Module) -> Family:
    """The family of a model, or of a head for further tokens, without its output layer.

    Raises:
        Unfit: there is no table for the class.
    """
    for family in FAMILIES.values():
        if family.vllm and class_name(inner) in (*family.classes("Model"), family.head):
            return family
    raise Unfit(f"there is no table for {class_name(inner)}")


def _expect(module: Any, classes: Sequence[str]) -> None:
    if class_name(module) not in classes:
        raise Unfit(f"there is no table for {class_name(module)}")


class Norms:
    """Norms of one kind, with one epsilon."""

    def __init__(self, centered: bool) -> None:
        """None yet. ``centered``: they are layer norms, otherwise RMS norms."""
        self.centered = centered
        self.eps: float | None = None

    def weight(self, norm: Any) -> torch.Tensor:
        """The factors of a normed row, float32; [2, n] if there is a bias, which is the second row.

        Raises:
            Unfit: another norm, or another epsilon.
        """
        is_rms = type(norm) in (RMSNorm, GemmaRMSNorm) or type(norm).__name__ in _NORMS
        if not (class_name(norm) in _LAYER_NORMS if self.centered else is_rms):
            raise Unfit(f"there is no table for the norm {class_name(norm)}")
        if getattr(norm, "variance_size_override", None) is not None:
            raise Unfit("a norm of some values of a row")
        eps = norm.eps if isinstance(norm, torch.nn.LayerNorm) else norm.variance_epsilon
        if self.eps not in (None, eps):
            raise Unfit(f"norms of several epsilons, {self.eps} and {eps}")
        self.eps = eps
        weight, bias = norm.weight.data.float(), getattr(norm, "bias", None)
        if bias is not None:
            return torch.stack([weight, bias.data.float()])
        return 1 + weight if type(norm) is GemmaRMSNorm else weight


class Ropes:
    """Tables of rotary embeddings, float32 [positions, 2 * half]: cosines, then sines."""

    def __init__(self, positions: int, shared: Any = None) -> None:
        """No tables yet; each will be for ``positions`` positions. ``shared``: an embedding of transformers."""
        self.positions, self.shared = positions, shared
        self.tables: list[torch.Tensor] = []
        self._numbers: dict[Any, int] = {}

    def number(self, rotary: Any, layer_type: str | None = None) -> int:
        """Index of the table of an embedding; transformers' may have one for each type of layers.

        Raises:
            Unfit: another kind of embedding, or fewer positions.
        """
        key = id(rotary), layer_type
        if key not in self._numbers:
            self._numbers[key] = len(self.tables)
            self.tables.append(self._table(rotary) if rotary is not self.shared else self._angles(layer_type))
        return self._numbers[key]

    def of_queries(self, module: Any) -> int:
        """Index of the table of queries that are not turned, but have factors by their position; -1: they have none."""
        if not getattr(module, "attn_temperature_tuning", False):
            return -1
        key = (module.head_dim, int(module.floor_scale), float(module.attn_scale), 1)
        if key not in self._numbers:
            self._numbers[key] = len(self.tables)
            self.tables.append(for_queries(unturned(self.positions, key[0]), *key[1:]))
        return self._numbers[key]

    def _angles(self, layer_type: str | None) -> torch.Tensor:
        kind = self.shared.rope_type if layer_type is None else self.shared.rope_type[layer_type]
        if kind not in FIXED and not (kind == "dynamic" and self.positions <= self.shared.original_max_seq_len):
            raise Unfit(f"rotary embeddings of type {kind} depend on the length of the text")
        return angles(self.shared, self.positions, layer_type)

    def _table(self, rotary: Any) -> torch.Tensor:
        kept, exact = _tables(rotary)
        if len(kept) < self.positions:
            raise Unfit(f"a rotary embedding of {len(kept)} positions, fewer than the {self.positions} of an answer")
        kept = kept[: self.positions].float()
        # vLLM keeps the table in the type of the model. A new table is exact; vLLM's is taken if it was changed since.
        exact = exact[: self.positions].float()
        same = exact.shape == kept.shape and bool((exact - kept).abs().max() <= 2.0**-8 * kept.abs().max())
        return (exact if same else kept).contiguous()


def _tables(rotary: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The table of an embedding as vLLM keeps it, and a new one."""
    if isinstance(rotary, Phi3LongRoPEScaledRotaryEmbedding):  # has one for short texts, then one for long ones
        short = rotary.original_max_position_embeddings
        if rotary.use_long_rope:
            numbers = (rotary.max_position_embeddings, rotary.long_factor, rotary.long_mscale)
            return rotary.long_short_cos_sin_cache[short:], rotary._compute_cos_sin_cache(*numbers)
        numbers = (short, rotary.short_factor, rotary.short_mscale)
        return rotary.long_short_cos_sin_cache[:short], rotary._compute_cos_sin_cache(*numbers)
    if getattr(type(rotary), "forward_native", None) not in _ROTATIONS:
        raise Unfit(f"there is no table for {type(rotary).__qualname__}")
    return rotary.cos_sin_cache, rotary._compute_cos_sin_cache()


def attention_fields(module: Any, family: Family, norms: Norms, ropes: Ropes) -> dict[str, Any]:
    """The fields of ``Decoder.add_layer`` for attention.

    Raises:
        Unfit: attention is not computed here, or differs from a decoder's.
    """
    impl = module.attn.impl
    if not isinstance(impl, attention.Impl):
        raise Unfit(f"attention is vLLM's ({settings.ATTENTION}, or what the log says of it)")
    shares_keys = impl.kv_sharing_target_layer_name is not None
    qkv, qkv_bias = packed(module.q_proj if shares_keys else module.qkv_proj)
    out, out_bias = summed(getattr(module, family.name("o_proj")))
    rotary = getattr(module, "rotary_emb", ropes.shared)
    turns = rotary is not None and _turns(module)
    layer_type = module.attention_type if hasattr(rotary, "layer_types") else None
    fields: dict[str, Any] = {
        "qkv": qkv,
        "projected": "q" if shares_keys else "qkv",
        "out": out,
        "qkv_bias": qkv_bias,
        "out_bias": out_bias,
        "heads": impl.num_heads,
        "kv_heads": impl.num_kv_heads,
        "head_size": impl.head_size,
        "scale": impl.scale,
        "kind": impl.kind,
        "window": impl.sliding_window,
        "chunk": impl.chunk,
        "drops_pages": impl.sliding_window > 0,
        "soft_cap": impl.logits_soft_cap,
        "sinks": None if impl.sinks is None else impl.sinks.data,
        "rope": ropes.number(rotary, layer_type) if turns else -1,
        "query_rope": None if turns else ropes.of_queries(module),
        "gated": bool(getattr(module, "attn_output_gate", False)),
        "interleaved": turns and not getattr(rotary, "is_neox_style", True),
        "turn_first": family.turn_first,
    }
    return fields | norms_of_heads(module, impl, family, norms)


def norms_of_heads(module: Any, impl: Any, family: Family, norms: Norms) -> dict[str, torch.Tensor]:
    """The norms of queries, keys and values; of a norm of the heads of all ranks this rank's part.

    Raises:
        Unfit: another norm; or such a norm on ranks of one head, which a decoder would take for a norm of each head.
    """
    found: dict[str, torch.Tensor] = {}
    for name, heads in (("q_norm", impl.num_heads), ("k_norm", impl.num_kv_heads), ("v_norm", impl.num_kv_heads)):
        norm = getattr(module, family.name(name), None)
        if norm is None:
            continue
        weight = norms.weight(norm)
        # Of each head, of this rank's heads, or of more, which ranks may have copies of.
        parts = max(1, weight.numel() // (heads * impl.head_size))
        found[name] = weight.chunk(parts)[ranks.own() * parts // ranks.count()]
        is_cut = parts > 1 or (ranks.count() > 1 and type(norm).__name__ == _CUT_NORM)
        if is_cut and name == "q_norm" and heads == 1:
            raise Unfit("a norm of the heads of all ranks, of which each has one")
    return found


def _turns(module: Any) -> bool:
    """Whether an attention has rotary embeddings."""
    for name in ("apply_rope_all_layers", "v1"):  # of EXAONE 4, of Command R: without windows
        if hasattr(module, name):
            return bool(module.sliding_window or getattr(module, name))
    return bool(getattr(module, "use_rope", True))


def vllm_attention(layer: Any, family: Family) -> Any:
    """vLLM's attention of a layer, which owns the cache; None: the layer has none.

    Raises:
        Unfit: there is no table for the class of the layer or of its attention.
    """
    module = _attention_of(layer, family)
    if module is None:
        return None
    return module.mla_attn.mla_attn if family.is_latent else module.attn


def _attention_of(layer: Any, family: Family) -> Any:
    """The module around that attention."""
    _expect(layer, family.classes(family.layer, *family.more_layers))
    if state_layer_of(layer) is not None and not hasattr(layer, family.attention_at):
        return None
    module = getattr(layer, family.part or family.attention_at)
    known = family.classes(family.attention)
    if family.part and class_name(module) not in known:
        return None
    _expect(module, known)
    return module


def latent_fields(module: Any, norms: Norms, ropes: Ropes) -> dict[str, Any]:
    """The fields of ``Decoder.add_layer`` for latent attention. k_up and v_up are copies (:func:`share_latents`).

    Raises:
        Unfit: attention is not computed here, or differs from a decoder's.
    """
    parts, inner = module.mla_attn, module.mla_attn.mla_attn
    impl = inner.impl
    if getattr(impl, "kind", None) != attention.LATENT:
        raise Unfit(f"latent attention is vLLM's ({settings.ATTENTION}, or what the log says of it)")
    if parts.is_sparse or any(getattr(parts, name, None) is not None for name in ("indexer", "g_proj")):
        raise Unfit("sparse or gated attention")
    fields: dict[str, Any] = {}
    if parts.q_lora_rank is None:
        qkv = without_bias(parts.q_proj) + without_bias(parts.kv_a_proj_with_mqa)
    else:
        qkv = without_bias(parts.fused_qkv_a_proj)
        fields["q_up"] = only(parts.q_b_proj)
        fields["q_norm"] = norms.weight(parts.q_a_layernorm)
    for name, field in _LATENTS:
        fields[field] = getattr(inner, name).data.transpose(1, 2).contiguous()
    if all(size in ops.HEAD_SIZES for size in (impl.qk_head_dim, impl.v_head_dim)):
        fields["kv_up"] = any_weight(impl.kv_b_proj)
    out, out_bias = summed(parts.o_proj)
    rotary = parts.rotary_emb
    return fields | {
        "qkv": qkv,
        "out": out,
        "out_bias": out_bias,
        "heads": inner.num_heads,
        "kv_heads": 1,
        "head_size": impl.head_size,
        "scale": impl.scale,
        "kind": attention.LATENT,
        "k_norm": norms.weight(parts.kv_a_layernorm),
        "rope": ropes.number(rotary),
        "interleaved": not rotary.is_neox_style,
    }


def share_latents(inner: Any, fields: dict[str, Any]) -> None:
    """Makes vLLM's matrices of a latent attention views of the decoder's, so that a model has them once."""
    for name, field in _LATENTS:
        getattr(inner, name).data = fields[field].transpose(1, 2)


def mlp_fields(module: Any, family: Family) -> dict[str, Any]:
    """The fields of ``Decoder.add_layer`` for a dense MLP.

    Raises:
        Unfit: the MLP is not packed, or has another activation.
    """
    both = family.name("gate_up_proj")
    return {
        "gate_up": without_bias(getattr(module, both if hasattr(module, both) else "up_proj")),
        "down": summed_without_bias(getattr(module, family.name("down_proj"))),
        **_activation_fields(module.act_fn),
    }


def _activation_fields(act: Any) -> dict[str, Any]:
    """The activation and its numbers.

    Raises:
        Unfit: a decoder does not have it.
    """
    if type(act).__name__ == "XIELU":
        try:
            return xielu_fields(act)
        except ValueError as error:
            raise Unfit(str(error)) from error
    kind = _ACTIVATIONS.get(type(act).__name__)
    if kind is None:
        raise Unfit(f"there is no table for {type(act).__name__}")
    if kind == MoEActivation.GELU and act.approximate == "tanh":
        kind = MoEActivation.GELU_TANH
    return {"activation_kind": kernel_activation_kind(kind)}


def _routing(runner: Any, block: Any, family: Family) -> dict[str, Any]:
    """How a router chooses experts, arguments of ``Decoder.add_experts``. ``block``: the module around the experts.

    Raises:
        Unfit: routing that a decoder does not have.
    """
    routed = runner.routed_experts
    if _routes_before(runner):
        config = block.config
        return router_in_config(config.model_type, config.to_dict()).arguments
    has_own = routed.custom_routing_function is not None and not family.scoring
    if has_own or type(runner.router).__name__ == "ZeroExpertRouter":
        raise Unfit(f"{routed.layer_name} routes by a function of its own")
    grouped = routed.use_grouped_topk
    return {
        "renormalize": routed.renormalize,
        "scoring_func": family.scoring or routed.scoring_func,
        "num_expert_group": routed.num_expert_group if grouped else None,
        "topk_group": routed.topk_group if grouped else None,
        "routed_scaling_factor": routed.routed_scaling_factor * runner.routed_scaling_factor,
    }


def _routes_before(runner: Any) -> bool:
    """Whether a router of transformers chooses experts, which it gives to vLLM's layer."""
    return type(runner).__name__ == "TransformersMoERunner"


def own_expert_fields(layer: Any, family: Family, norms: Norms) -> dict[str, Any]:
    """The arguments of ``Decoder.add_experts`` for experts that are, with their router, parts of a layer.

    Raises:
        Unfit: as :func:`expert_fields`.
    """
    router = layer.router
    if layer.experts.routed_experts.custom_routing_function != router.routing_function:
        raise Unfit(f"{layer.experts.routed_experts.layer_name} routes by another function")
    fields = {field: norms.weight(getattr(layer, name)) for field, name in family.expert_norms}
    fields["router_norm"] = norms.weight(router.norm) * (router.scale.data.float() * router.root_size.float())
    fields["expert_factors"] = router.per_expert_scale.data
    return fields | expert_fields(layer.experts, layer, family)


def input_fields(layer: Any, family: Family, norms: Norms, activation_kind: int) -> dict[str, Any]:
    """The arguments of ``Decoder.add_layer_input``; {}: the layer has none.

    Raises:
        Unfit: a projection or a norm that a decoder does not have.
    """
    if not family.layer_input or getattr(layer, family.layer_input[0]) is None:
        return {}
    gate, down, norm = (getattr(layer, name) for name in family.layer_input)
    return {
        "gate": any_weight(gate),
        "down": any_weight(down),
        "norm": norms.weight(norm),
        "activation_kind": activation_kind,
    }


def expert_fields(runner: Any, block: Any, family: Family) -> dict[str, Any]:
    """The arguments of ``Decoder.add_experts``, except the gate of a shared expert.

    Raises:
        Unfit: experts or a router that a decoder does not have.
    """
    routed = runner.routed_experts
    method = routed.quant_method
    if not isinstance(method, W4A8MoEMethod) or not method.routes:
        raise Unfit(f"{routed.layer_name} is not packed")
    if runner.routed_input_transform is not None or runner.routed_output_transform is not None:
        raise Unfit(f"{routed.layer_name} transforms its inputs or outputs")
    weight, bias = float_weight(block.get_submodule(family.router))
    return {
        "router": weight,
        "router_bias": bias,
        "w13": routed.w13_weight_packed.data,
        "w2": routed.w2_weight_packed.data,
        "expert_map": routed.expert_map,
        "top_k": routed.top_k,
        "apply_router_weight_on_input": routed.apply_router_weight_on_input,
        "e_score_correction_bias": routed.e_score_correction_bias,
        "activation_kind": kernel_activation_kind(as_activation(method.activation)),
        **method.numbers._asdict(),
        **_routing(runner, block, family),
    }


class LayerFields(NamedTuple):
    """Arguments of the methods of ``Decoder`` by which a layer is added; {}: not called."""

    layer: dict[str, Any]
    linear_attention: dict[str, Any]
    experts: dict[str, Any]
    layer_input: dict[str, Any]


def layer_fields(layer: Any, family: Family, norms: Norms, ropes: Ropes) -> LayerFields:
    """The arguments for a layer.

    Raises:
        Unfit: a part differs from the table.
    """
    experts, known = family.classes(family.experts), family.classes(*family.mlps)
    module, states, norm_names = _attention_of(layer, family), state_layer_of(layer), family.norms
    mlp = beside = None
    if family.part:
        mlp = getattr(layer, family.part) if module is None and states is None else None
        norm_names = (("input_norm" if mlp is None else "mlp_input_norm", "norm"),)
    else:
        mlp = getattr(layer, family.mlp_at)
        beside = getattr(layer, family.beside) if family.beside else None
        if mlp is None:
            mlp, beside = beside, None
    if mlp is not None:
        _expect(mlp, known + experts)
    if states is None and hasattr(layer, "mamba"):
        raise Unfit(f"there is no table for {class_name(layer.mamba)}")
    for name in family.nothing:
        if any(getattr(owner, name, None) for owner in (layer, module or states)):
            raise Unfit(f"{class_name(layer)} with {name}")
    fields = {field: norms.weight(getattr(layer, name)) for field, name in norm_names}
    fields |= {"residual": float(getattr(layer, "residual_multiplier", 1.0)), "parallel": family.parallel}
    if family.output_scale:
        fields["output_scale"] = float(getattr(layer, family.output_scale))
    if module is not None and family.is_latent:
        fields |= latent_fields(module, norms, ropes)
    elif module is not None:
        fields |= attention_fields(module, family, norms, ropes)
    linear = {} if states is None else fields_of(states)
    if mlp is None or class_name(mlp) not in experts:
        fields |= {} if mlp is None else mlp_fields(mlp, family)
        beside_mlp = family.expert_norms and layer.experts is not None
        routed = own_expert_fields(layer, family, norms) if beside_mlp else {}
        return LayerFields(fields, linear, routed, input_fields(layer, family, norms, fields.get("activation_kind", 0)))
    routed = expert_fields(mlp.experts, mlp, family)
    shared = beside if mlp.experts.shared_experts is None else mlp.experts.shared_experts._layer
    if family.shared[0] and _routes_before(mlp.experts):
        shared = getattr(mlp, family.shared[0])
    if shared is not None:
        _expect(shared, known)
        fields |= mlp_fields(shared, family)
        gate = getattr(shared, "expert_gate", None)
        routed["shared_gate"] = None if gate is None else float_weight(gate)[0].flatten()
    return LayerFields(fields, linear, routed, {})
