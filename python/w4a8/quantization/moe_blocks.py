"""The mixture-of-experts blocks of transformers, recognized by class name and attributes; it is never imported.

transformers 5    a block has an ``experts`` module with all weights in two parameters. Only that one is replaced, so
                  the block, its router and its shared experts, and what hooks read of them, stay what they are. The
                  decorator ``use_experts_implementation`` says of its class what it computes, whatever its name.
transformers 4    ``experts`` is a ModuleList. It is replaced, and the block gets a subclass of its class that calls it:
                  whoever looks for blocks by class (to record router logits) still finds it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch

from w4a8.core.experts import gate_and_up
from w4a8.core.routing import RoutingMethodType, route
from w4a8.nn import QuantOptions, W4A8Experts
from w4a8.nn.experts import RoundExpert
from w4a8.ops import Activation

_SOFTMAX = re.compile(r"(Qwen2Moe|Qwen3Moe|Mixtral|Olmoe)SparseMoeBlock")
_DEEPSEEK = re.compile(r"Deepseek(V2|V3)(MoE|Moe)")

# What the operator's activation has as constants.
SWIGLU_OAI = (1.702, 7.0)
_GPT_OSS_PARAMETERS = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")

# What use_experts_implementation says of a class, where it is what the operator computes. Older versions lack some.
_INTERFACE = {
    "has_gate": True,
    "is_concatenated": True,
    "has_bias": False,
    "has_post_expert_norm": False,
}

# Names of an expert's projections: gate, up, down.
_PROJECTIONS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))

_ACTIVATIONS = {
    "SiLU": Activation.SILU,
    "SiLUActivation": Activation.SILU,
    "GELUActivation": Activation.GELU,
    "GELUTanh": Activation.GELU_TANH,
    "PytorchGELUTanh": Activation.GELU_TANH,
    "NewGELUActivation": Activation.GELU_TANH,
    "ReLUSquaredActivation": Activation.RELU2,
}


class Experts:
    """The float weights of a block's experts: what W4A8Experts.from_float takes.

    Attributes:
        w13: sequence of [2I, H], gate rows, then up rows.
        w2: sequence of [H, I].
        w13_bias, w2_bias: sequences, or None.
        act_fn: the module or function between them, or the operator's activation itself.
    """

    def __init__(
        self,
        w13: Sequence[torch.Tensor],
        w2: Sequence[torch.Tensor],
        activation: Callable[[torch.Tensor], torch.Tensor] | Activation,
        w13_bias: Sequence[torch.Tensor] | None = None,
        w2_bias: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self.w13, self.w2, self.w13_bias, self.w2_bias = w13, w2, w13_bias, w2_bias
        self.act_fn = activation

    @property
    def activation(self) -> Activation | None:
        """None if the op does not have it."""
        if isinstance(self.act_fn, Activation):
            return self.act_fn
        if isinstance(self.act_fn, torch.nn.GELU):
            return Activation.GELU if self.act_fn.approximate == "none" else Activation.GELU_TANH
        if self.act_fn is torch.nn.functional.silu:
            return Activation.SILU
        return _ACTIVATIONS.get(type(self.act_fn).__name__)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """E, H, I."""
        return len(self.w2), *self.w2[0].shape

    def quantize(
        self,
        options: QuantOptions,
        packed_one: Callable[[], object] = lambda: None,
        round_one: RoundExpert | None = None,
    ) -> W4A8Experts:
        """The packed experts; arguments as in :meth:`W4A8Experts.from_float`."""
        return W4A8Experts.from_float(
            self.w13,
            self.w2,
            options,
            self.activation,
            w13_bias=self.w13_bias,
            w2_bias=self.w2_bias,
            round_one=round_one,
            packed_one=packed_one,
        )


class GateUp(Sequence):
    """Gate and up tensors of the experts, joined when one is asked for."""

    def __init__(self, gates: Sequence[torch.Tensor], ups: Sequence[torch.Tensor]) -> None:
        self.gates, self.ups = gates, ups

    def __getitem__(self, expert: int) -> torch.Tensor:
        return torch.cat((self.gates[expert], self.ups[expert]))

    def __len__(self) -> int:
        return len(self.gates)


class _Each(Sequence):
    """A function of each expert's tensor, called when it is asked for."""

    def __init__(self, tensors: Sequence[torch.Tensor], function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.tensors, self.function = tensors, function

    def __getitem__(self, expert: int) -> torch.Tensor:
        return self.function(self.tensors[expert])

    def __len__(self) -> int:
        return len(self.tensors)


def fused_experts(
    module: torch.nn.Module, weights: Mapping[str, Sequence[torch.Tensor]] | None = None
) -> Experts | None:
    """The experts of transformers 5, or None if this is no such module.

    Args:
        module: what to recognize.
        weights: parameter name -> the experts' tensors of it, to take instead of the module's.
    """
    if not has_stacks(module) or stacks_problem(module) is not None:
        return None
    chosen = {**dict(module.named_parameters(recurse=False)), **(weights or {})}
    if is_gpt_oss(module):
        return _gpt_oss_experts(*(chosen[parameter] for parameter in _GPT_OSS_PARAMETERS))
    w13, w2 = chosen["gate_up_proj"], chosen["down_proj"]
    if _is_transposed(module):
        w13, w2 = (_Each(stack, lambda weight: weight.T) for stack in (w13, w2))
    return Experts(w13, w2, module.act_fn)


def has_stacks(module: torch.nn.Module) -> bool:
    """Whether a module has the weights of several experts in one parameter, ``down_proj`` [E, ., .]."""
    down = getattr(module, "down_proj", None)
    return isinstance(down, torch.Tensor) and down.dim() == 3


def stacks_problem(module: torch.nn.Module) -> str | None:
    """Why a module that has stacks is not computed as the operator does, or None."""
    if has_own_forward(module):
        return "it has a forward of its own"
    if is_gpt_oss(module):
        return None if _is_gpt_oss_of_5(module) else "its experts are not those of gpt-oss in transformers 5"
    gate = getattr(type(module), "_apply_gate", None)
    if gate is None and not _is_llama4(module):
        return f"{type(module).__name__} has not the common interface of experts, so what it computes is not known"
    for name, usual in _INTERFACE.items():
        if getattr(module, name, usual) != usual:
            return f"its experts have {name} = {not usual}"
    if gate is not None and gate.__name__ != "_default_apply_gate":
        return "its experts join gate and up in a way of their own"
    w13, w2, act_fn = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj", "act_fn"))
    if not isinstance(w13, torch.Tensor) or act_fn is None or len(list(module.parameters())) != 2:
        return "its experts have other parameters than gate_up_proj and down_proj"
    count, hidden, intermediate = w2.transpose(1, 2).shape if _is_transposed(module) else w2.shape
    expected = [2 * intermediate, hidden]
    expected = [count, *(reversed(expected) if _is_transposed(module) else expected)]
    if list(w13.shape) != expected:
        return f"gate_up_proj is {list(w13.shape)} beside a down_proj of {list(w2.shape)}, expected {expected}"
    return None


def _is_transposed(module: torch.nn.Module) -> bool:
    """Whether the matrices are [H, 2I] and [I, H]."""
    return _is_llama4(module) or getattr(module, "is_transposed", False)


def _is_llama4(module: torch.nn.Module) -> bool:
    """Called with a run of rows for each expert, and nothing else (see ``W4A8Experts.forward``)."""
    return type(module).__name__ == "Llama4TextExperts"


def is_gpt_oss(module: torch.nn.Module) -> bool:
    """Whether gate and up are one matrix of each expert, whose rows alternate."""
    return type(module).__name__ == "GptOssExperts"


def _is_gpt_oss_of_5(module: torch.nn.Module) -> bool:
    """Its matrices are [H, 2I] with gate and up in turns, and [I, H]; both have biases."""
    if hasattr(module, "expert_dim"):  # transformers 4 calls it with the weights of all experts, [T, E]
        return False
    tensors = [getattr(module, name, None) for name in _GPT_OSS_PARAMETERS]
    if not all(isinstance(tensor, torch.Tensor) for tensor in tensors) or [t.dim() for t in tensors] != [3, 2, 3, 2]:
        return False
    w13, w13_bias, w2, w2_bias = tensors
    count, intermediate, hidden = w2.shape
    if w13.shape != (count, hidden, 2 * intermediate) or w13_bias.shape != w13.shape[::2]:
        return False
    constants = (getattr(module, "alpha", None), getattr(module, "limit", None))
    return w2_bias.shape == w2.shape[::2] and constants == SWIGLU_OAI


def _gpt_oss_experts(
    w13: Sequence[torch.Tensor],
    w13_bias: Sequence[torch.Tensor],
    w2: Sequence[torch.Tensor],
    w2_bias: Sequence[torch.Tensor],
) -> Experts:
    return Experts(
        _Each(w13, lambda weight: _gate_then_up(weight.T)),
        _Each(w2, lambda weight: weight.T),
        Activation.SWIGLU_OAI,
        _Each(w13_bias, _gate_then_up),
        w2_bias,
    )


def _gate_then_up(rows: torch.Tensor) -> torch.Tensor:
    """[2I, H] or [2I] whose rows alternate gate and up, as gate rows and then up rows (a copy)."""
    return torch.cat([rows[half] for half in gate_and_up(len(rows), True)])


def listed_experts(module: torch.nn.Module) -> Experts | None:
    """The experts of a block of transformers 4, or None if this is no such block."""
    name = type(module).__name__
    experts = getattr(module, "experts", None)
    if not isinstance(experts, torch.nn.ModuleList) or len(experts) == 0 or getattr(module, "gate", None) is None:
        return None
    if has_own_forward(module):
        return None
    if not (_SOFTMAX.fullmatch(name) and hasattr(module, "top_k")) and not (
        _DEEPSEEK.fullmatch(name) and callable(getattr(module, "moe", None))
    ):
        return None
    linears = listed_linears(module)
    if linears is None:
        return None
    gates, ups, downs = zip(*linears)
    biased = [linear.bias is not None for three in linears for linear in three]
    if any(biased) and not all(biased):
        return None
    return Experts(
        GateUp([gate.weight for gate in gates], [up.weight for up in ups]),
        [down.weight for down in downs],
        getattr(experts[0], "act_fn", None),
        GateUp([gate.bias for gate in gates], [up.bias for up in ups]) if all(biased) else None,
        [down.bias for down in downs] if all(biased) else None,
    )


def listed_linears(block: torch.nn.Module) -> list[list[torch.nn.Linear]] | None:
    """Gate, up and down of each expert of a block's ``experts``; None if they are not linear layers of known names."""
    for names in _PROJECTIONS:
        linears = [[getattr(expert, name, None) for name in names] for expert in block.experts]
        if all(type(linear) is torch.nn.Linear for three in linears for linear in three):
            return linears
    return None


def has_own_forward(module: torch.nn.Module) -> bool:
    """Whether someone has put another forward into this very module, as hooks of accelerate do.

    transformers, after recording outputs, leaves the forward of the class there.
    """
    own = module.__dict__.get("forward")
    return own is not None and getattr(own, "__func__", None) is not type(module).forward


def adopt(block: torch.nn.Module, experts: W4A8Experts) -> None:
    """Gives a block of transformers 4 its new experts and the forward that calls them."""
    block.__dict__.pop("forward", None)
    block.experts = experts
    block.__class__ = _subclass(type(block))


class _SoftmaxBlock:
    """[B, S, H] to the same and the router's logits [B * S, E], by one call of the experts."""

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        router_logits = self.gate(tokens)
        # Mixtral has no such attribute and always normalizes.
        renormalize = getattr(self, "norm_topk_prob", True)
        method = RoutingMethodType.Renormalize if renormalize else RoutingMethodType.Default
        weights, ids = route(method, tokens, router_logits, self.top_k)
        out = self.experts(tokens, ids, weights)
        if hasattr(self, "shared_expert"):
            out = out + torch.sigmoid(self.shared_expert_gate(tokens)) * self.shared_expert(tokens)
        return out.view(hidden_states.shape), router_logits

    def __reduce__(self):
        return _rebuild, (type(self).__mro__[2],), self.__dict__


class _DeepseekBlock:
    """Its forward and its router (groups, correction bias, scaling) stay; the loop over experts becomes one call."""

    def moe(self, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weight: torch.Tensor) -> torch.Tensor:
        return self.experts(hidden_states, topk_ids, topk_weight)

    def __reduce__(self):
        return _rebuild, (type(self).__mro__[2],), self.__dict__


@cache
def _subclass(original: type) -> type:
    base = _SoftmaxBlock if _SOFTMAX.fullmatch(original.__name__) else _DeepseekBlock
    return type(f"W4A8{original.__name__}", (base, original), {"__module__": __name__})


def _rebuild(original: type) -> torch.nn.Module:
    # The class was made at run time, so pickle cannot find it by name.
    cls = _subclass(original)
    return cls.__new__(cls)
