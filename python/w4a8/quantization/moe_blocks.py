"""The mixture-of-experts blocks of transformers, recognized by class name and attributes.

Nothing is imported from transformers.

transformers 5    a block has an ``experts`` module with all weights in two parameters. Only ``experts`` is replaced:
                  the block, its router, its shared experts and hooks on these stay. The decorator
                  ``use_experts_implementation`` says what a class computes; the name of the class does not matter.
transformers 4    ``experts`` is a ModuleList and is replaced. The block gets a subclass of its class, which calls the
                  new experts. Code that looks for blocks by class (to record router logits) still finds the block.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from w4a8.core.activation import OWN_NUMBERS, GateNumbers
from w4a8.core.experts import gate_and_up
from w4a8.core.matrix import matrix_of
from w4a8.core.routing import select_experts
from w4a8.nn import QuantOptions, W4A8Experts
from w4a8.nn.experts import RoundExpert
from w4a8.nn.hooks import has_own_forward
from w4a8.ops import Activation

_SOFTMAX = re.compile(r"(Qwen2Moe|Qwen3Moe|Mixtral|Olmoe)SparseMoeBlock")
_DEEPSEEK = re.compile(r"Deepseek(V2|V3)(MoE|Moe)")

# Classes without the decorator whose forward is the common one.
_UNDECORATED = ("Llama4TextExperts", "Step3p7Experts")

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
    """The float weights of a block's experts, for W4A8Experts.from_float.

    Attributes:
        w13: sequence of [2I, H], gate rows, then up rows.
        w2: sequence of [H, I].
        w13_bias, w2_bias: sequences, or None.
        act_fn: the module or function between them, or the operator's activation itself.
        numbers: of the operator's activation.
        gated: w13 has a gate half and an up half, else [I, H].
    """

    def __init__(
        self,
        w13: Sequence[torch.Tensor],
        w2: Sequence[torch.Tensor],
        activation: Callable[[torch.Tensor], torch.Tensor] | Activation,
        w13_bias: Sequence[torch.Tensor] | None = None,
        w2_bias: Sequence[torch.Tensor] | None = None,
        numbers: GateNumbers = OWN_NUMBERS,
        gated: bool = True,
    ) -> None:
        self.w13, self.w2, self.w13_bias, self.w2_bias = w13, w2, w13_bias, w2_bias
        self.act_fn, self.numbers, self.gated = activation, numbers, gated

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

    def between(self, rows: torch.Tensor) -> torch.Tensor:
        """The activation, by torch: output of w13 (gate, then up) to the input of w2 [., I]."""
        if not self.gated:
            return self.act_fn(rows)
        gate, up = rows.chunk(2, -1)
        if isinstance(self.act_fn, Activation):
            return _gate_times_up(gate, up, self.act_fn, self.numbers)
        return self.act_fn(gate) * up

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
            numbers=self.numbers,
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


class Each(Sequence):
    """A function of each expert's tensor, or of the tensor's source, called when the expert is asked for."""

    def __init__(self, tensors: Sequence[Any], function: Callable[[Any], torch.Tensor]) -> None:
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
        weights: parameter name -> the experts' tensors, to take instead of the module's.
    """
    if not has_stacks(module) or stacks_problem(module) is not None:
        return None
    chosen = {**dict(module.named_parameters(recurse=False)), **(weights or {})}
    names = _parameters(module)
    w13, w2, w13_bias, w2_bias = (*(chosen[name] for name in names), None, None)[:4]
    if _is_transposed(module):
        w13, w2 = (Each(stack, lambda weight: weight.T) for stack in (w13, w2))
    if _is_interleaved(module):
        w13, w13_bias = (None if stack is None else Each(stack, _gate_then_up) for stack in (w13, w13_bias))
    activation, numbers = _gate(module)
    return Experts(w13, w2, activation, w13_bias, w2_bias, numbers, _has_gate(module))


def unpack_into(module: torch.nn.Module, w13: torch.Tensor, w2: torch.Tensor) -> None:
    """Makes the parameters of a module that :func:`fused_experts` knows: the floats that packed stacks mean.

    Args:
        module: with parameters on the meta device, whose types stay.
        w13: uint8 [E, bytes], gate rows, then up rows.
        w2: uint8 [E, bytes].
    """
    names = _parameters(module)
    floats = {name: torch.empty_like(getattr(module, name), device=w2.device) for name in names}
    for stack, (leaf, *bias) in ((w13, names[::2]), (w2, names[1::2])):
        halved = stack is w13 and _is_interleaved(module)
        for expert, packed in enumerate(stack):
            matrix = matrix_of(packed, f"{leaf}[{expert}]")
            weight = floats[leaf][expert].T if _is_transposed(module) else floats[leaf][expert]
            pairs = [(weight, matrix.floats()), *((floats[each][expert], matrix.bias) for each in bias)]
            for target, values in pairs:
                rows = gate_and_up(len(target), True) if halved else [slice(None)]
                for half, part in zip(rows, values.chunk(len(rows))):
                    target[half] = part
    for name, values in floats.items():
        setattr(module, name, torch.nn.Parameter(values, requires_grad=False))


def has_stacks(module: torch.nn.Module) -> bool:
    """Whether a module has the weights of several experts in one parameter, ``down_proj`` [E, ., .]."""
    down = getattr(module, "down_proj", None)
    return isinstance(down, torch.Tensor) and down.dim() == 3


def stacks_problem(module: torch.nn.Module) -> str | None:
    """Why a module that has stacks is not computed as the operator does, or None."""
    if has_own_forward(module):
        return "it has a forward of its own"
    if is_gpt_oss(module) and hasattr(module, "expert_dim"):  # called with the weights of all experts, [T, E]
        return "its experts are not those of gpt-oss in transformers 5"
    gate, name = getattr(type(module), "_apply_gate", None), type(module).__name__
    # The decorator gives a class its gate, if it has none, and says how the matrices are.
    decorated = gate is not None and (_has_usual_gate(module) or hasattr(module, "is_transposed"))
    if not decorated and name not in _UNDECORATED:
        return f"{name} has not the common interface of experts, so what it computes is not known"
    if getattr(module, "has_post_expert_norm", False):
        return "its experts have has_post_expert_norm = True"
    if _is_interleaved(module) and _has_usual_gate(module):
        return "its experts have is_concatenated = False"
    names = _parameters(module)
    given = dict(module.named_parameters())
    if set(given) != set(names) or (_has_usual_gate(module) and getattr(module, "act_fn", None) is None):
        return f"its experts have other parameters than {', '.join(names[:-1])} and {names[-1]}"
    if _gate(module) is None:
        return "its experts join gate and up in a way of their own"
    w13, w2, *biases = (given[name] for name in names)
    count, hidden, intermediate = w2.transpose(1, 2).shape if _is_transposed(module) else w2.shape
    rows = (1 + _has_gate(module)) * intermediate
    for found, name, expected in zip(
        [w13, *biases],
        [names[0], *names[2:]],
        ([count, *((hidden, rows) if _is_transposed(module) else (rows, hidden))], [count, rows], [count, hidden]),
    ):
        if list(found.shape) != expected:
            return f"{name} is {list(found.shape)} beside a down_proj of {list(w2.shape)}, expected {expected}"
    return None


def _has_gate(module: torch.nn.Module) -> bool:
    """Whether there is a gate, and one matrix of each expert for gate and up."""
    return getattr(module, "has_gate", True)


def _parameters(module: torch.nn.Module) -> tuple[str, ...]:
    """Names of w13 and w2, and of their biases if there are any."""
    names = ("gate_up_proj" if _has_gate(module) else "up_proj", "down_proj")
    return (*names, *(f"{name}_bias" for name in names)) if getattr(module, "has_bias", False) else names


def _is_transposed(module: torch.nn.Module) -> bool:
    """Whether the matrices are [H, 2I] and [I, H]."""
    # The class of Llama 4 has no attribute that says so.
    return type(module).__name__ == "Llama4TextExperts" or getattr(module, "is_transposed", False)


def is_gpt_oss(module: torch.nn.Module) -> bool:
    """Whether a module is gpt-oss's class of experts, in which the rows of gate and up alternate."""
    return type(module).__name__ == "GptOssExperts"


def _is_interleaved(module: torch.nn.Module) -> bool:
    return is_gpt_oss(module) or not getattr(module, "is_concatenated", True)


def _has_usual_gate(module: torch.nn.Module) -> bool:
    """Whether gate and up are joined by ``act_fn(gate) * up``, or there is no gate."""
    gate = getattr(type(module), "_apply_gate", None)
    return gate is None or not _has_gate(module) or getattr(gate, "__name__", "") == "_default_apply_gate"


def _gate(module: torch.nn.Module) -> tuple[Callable[[torch.Tensor], torch.Tensor] | Activation, GateNumbers] | None:
    """The activation that joins gate and up; None if the operator does not have it.

    The gate that a class defines is compared with the operator's, with the numbers of the module, near the bends and
    far outside. The name of the gate proves nothing: the next version may compute something else.
    """
    if _has_usual_gate(module):
        return module.act_fn, OWN_NUMBERS
    limit, alpha = (
        next((found for name in names if isinstance(found := getattr(module, name, None), (int, float))), default)
        for names, default in ((("swiglu_limit", "limit"), math.inf), (("swiglu_alpha", "alpha"), 1.0))
    )
    scale = limit if 0 < limit < math.inf else 10.0
    steps = torch.linspace(-2.5 * scale, 2.5 * scale, 41, dtype=torch.double, device="cpu")
    steps = torch.cat([steps, *(steps.new_tensor([-size, size]) for size in (1e3, 1e6))])
    gate, up = torch.meshgrid(steps, steps, indexing="ij")
    rows = torch.stack([gate, up], -1).flatten(-2) if _is_interleaved(module) else torch.cat([gate, up], -1)
    try:
        given = type(module)._apply_gate(module, rows)
    except Exception:  # whatever it needs besides
        return None
    if not isinstance(given, torch.Tensor) or given.shape != gate.shape:
        return None
    for activation, numbers in (
        (Activation.SWIGLU_OAI, GateNumbers(limit, alpha)),
        (Activation.SILU, GateNumbers(limit, alpha)),
        (Activation.SWIGLU_STEP, GateNumbers(limit)),
    ):
        if torch.allclose(given, _gate_times_up(gate, up, activation, numbers), 1e-6, 0.0):
            own = _DEFAULTS[activation]
            return activation, GateNumbers(*(None if x == y else x for x, y in zip(numbers, own)))
    return None


# Of the operator, where none are given.
_DEFAULTS = {
    Activation.SILU: GateNumbers(math.inf, 1.0, 0.0),
    Activation.SWIGLU_OAI: GateNumbers(7.0, 1.702, 1.0),
    Activation.SWIGLU_STEP: GateNumbers(7.0, 1.0, 0.0),
}


def _gate_times_up(gate: torch.Tensor, up: torch.Tensor, activation: Activation, numbers: GateNumbers) -> torch.Tensor:
    """The operator's activation, by torch (docs/numerics.md, section 5)."""
    limit, alpha, beta = (own if x is None else x for x, own in zip(numbers, _DEFAULTS[activation]))
    up = up.clamp(-limit, limit)
    if activation == Activation.SWIGLU_STEP:
        return torch.nn.functional.silu(gate).clamp(max=limit) * up
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(alpha * gate) * (up + beta)


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
        weights, ids = select_experts(tokens, router_logits, self.top_k, False, renormalize)
        out = self.experts(tokens, ids, weights)
        if hasattr(self, "shared_expert"):
            out = out + torch.sigmoid(self.shared_expert_gate(tokens)) * self.shared_expert(tokens)
        return out.view(hidden_states.shape), router_logits

    def __reduce__(self):
        return _rebuild, (type(self).__mro__[2],), self.__dict__


class _DeepseekBlock:
    """Forward and router (groups, correction bias, scaling) stay; the loop over experts becomes one call."""

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
