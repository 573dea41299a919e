"""The experts of a mixture-of-experts layer with 4-bit or 8-bit weights, for a given choice of the router."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from w4a8.core.activation import OWN_NUMBERS, GateNumbers
from w4a8.core.experts import ExpertSizes
from w4a8.core.kind import Kind
from w4a8.core.matrix import Matrix, PackedAs, pack_as
from w4a8.nn.options import DEFAULT_GROUP_SIZE, QuantOptions
from w4a8.nn.packed import PackedModule
from w4a8.nn.rounding import round_weight
from w4a8.ops import Activation, dynamic_4bit_int_moe


class PackedStacks(PackedModule):
    """A module with two packed stacks, uint8 [E, bytes]; loading checks that they have the sizes of the experts.

    Attributes:
        sizes: of the experts in the stacks.
        suffix: the stacks are ``w13_`` and ``w2_`` with this suffix.
    """

    sizes: ExpertSizes
    suffix = "packed"

    def packed_shapes(self) -> dict[str, dict[str, int | str]]:
        """The sizes that the headers must have."""
        groups = self.sizes.group_sizes
        return {
            f"{name}_{self.suffix}": {"n": rows, "k": columns, "group": columns if groups[name] == -1 else groups[name]}
            for name, rows, columns in self.sizes.stacks
        }

    def check_packed(self, name: str, packed: torch.Tensor) -> None:
        """Raises ValueError if a tensor cannot be the stack of this name; says why."""
        if packed.dim() != 2 or len(packed) != self.sizes.experts:
            raise ValueError(f"{name} is {list(packed.shape)}, expected [{self.sizes.experts}, bytes]")
        super().check_packed(name, packed)

    def routed_repr(self, num_experts: int, top_k: int) -> str:
        """For print(): the sizes; a router chooses ``top_k`` of ``num_experts``."""
        sizes = self.sizes
        return (
            f"experts={sizes.experts}/{num_experts}, top_k={top_k}, hidden={sizes.hidden}, "
            f"intermediate={sizes.intermediate}, group_size={sizes.group_size}"
        )


class PackedExperts(PackedStacks):
    """The two packed stacks as buffers, and so part of the state dict.

    Attributes:
        w13_packed: uint8 [E, bytes] of ``dyn_quant_pack_4bit_weight``: gate rows, then up rows.
        w2_packed: uint8 [E, bytes].
        stays_on_cpu: ``to`` moves the module to no accelerator (:func:`w4a8.nn.beside`).
    """

    w13_packed: torch.Tensor
    w2_packed: torch.Tensor
    stays_on_cpu = False

    def __init__(self, w13_packed: torch.Tensor, w2_packed: torch.Tensor, sizes: ExpertSizes) -> None:
        """Takes the stacks.

        Raises:
            ValueError: a stack is not of these sizes; says why.
        """
        super().__init__()
        self.sizes = sizes
        for name, packed in (("w13_packed", w13_packed), ("w2_packed", w2_packed)):
            self.check_packed(name, packed)
            self.register_buffer(name, packed)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], *args: object, **kwargs: object) -> PackedExperts:
        if self.stays_on_cpu and fn(torch.empty(0)).device.type not in ("cpu", "meta"):
            return self
        return super()._apply(fn, *args, **kwargs)


# Name of the stack, expert, weight [N, K] and bias [N] or None -> the matrix.
RoundExpert = Callable[[str, int, torch.Tensor, "torch.Tensor | None"], Matrix]


class W4A8Experts(PackedExperts):
    """All experts in one call, with the arguments of the experts modules of transformers 5."""

    def __init__(
        self,
        w13_packed: torch.Tensor,
        w2_packed: torch.Tensor,
        hidden_size: int,
        intermediate_size: int,
        group_size: int = DEFAULT_GROUP_SIZE,
        activation: Activation = Activation.SILU,
        w2_group_size: int | None = None,
        *,
        numbers: GateNumbers = OWN_NUMBERS,
        gated: bool = True,
    ) -> None:
        """Takes packed stacks.

        Args:
            w13_packed: uint8 [E, bytes] of dyn_quant_pack_4bit_weight: gate rows, then up rows; without a gate up rows.
            w2_packed: uint8 [E, bytes].
            hidden_size: H.
            intermediate_size: I.
            group_size: values of k per scale; -1 is channelwise.
            activation: between w13 and w2.
            w2_group_size: of w2, if it has groups of another size than w13.
            numbers: of the activation.
            gated: w13 has a gate half and an up half.

        Raises:
            ValueError: a stack is not of these sizes; says why.
        """
        sizes = ExpertSizes(len(w13_packed), hidden_size, intermediate_size, group_size, gated, w2_group_size)
        super().__init__(w13_packed, w2_packed, sizes)
        self.num_experts = len(w13_packed)
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.group_size = group_size
        self.activation = Activation(activation)
        self.numbers = numbers

    @classmethod
    def from_float(
        cls,
        w13: Sequence[torch.Tensor],
        w2: Sequence[torch.Tensor],
        options: QuantOptions | int | None = None,
        activation: Activation = Activation.SILU,
        *,
        numbers: GateNumbers = OWN_NUMBERS,
        w13_bias: Sequence[torch.Tensor] | None = None,
        w2_bias: Sequence[torch.Tensor] | None = None,
        w13_importance: torch.Tensor | None = None,
        w2_importance: torch.Tensor | None = None,
        round_one: RoundExpert | None = None,
        packed_one: Callable[[], object] = lambda: None,
        **fields: Any,
    ) -> W4A8Experts:
        """Quantizes experts one by one (docs/quantization.md, "Rounding").

        Args:
            w13: [E, 2I, H], or a sequence of E matrices [2I, H]: gate rows, then up rows. Any floating point type.
                [I, H] without a gate.
            w2: [E, H, I], or a sequence of E matrices [H, I].
            options: a :class:`QuantOptions`, whose group divides H and I, or its group size alone.
            activation: between them.
            numbers: of the activation.
            w13_bias: [E, 2I] or a sequence of E; None for none.
            w2_bias: [E, H] or a sequence of E; None for none.
            w13_importance: floating point [E, H], factors of the squared errors of weights, such as the mean square of
                the input channel; None: all alike.
            w2_importance: [E, I].
            round_one: rounds a matrix instead of :func:`round_weight`, w13 of an expert before its w2; then without
                importances.
            packed_one: called after each of the 2 E matrices.
            **fields: of :class:`QuantOptions`, by name.

        Raises:
            TypeError, ValueError: as :class:`QuantOptions`.
            ValueError: an odd size, a group that does not divide, a NaN or an infinity; names the expert. An
                ``activation_group`` that does not fit, importances of another shape; names the stack.
        """
        stacks: list[torch.Tensor | None] = [None, None]
        hidden, intermediate = w2[0].shape
        options = QuantOptions.of(options, fields)
        group_size = options.group_size
        sizes = ExpertSizes(len(w13), hidden, intermediate, group_size, len(w13[0]) != intermediate)
        groups = sizes.activation_groups(options.activation_group)
        packed_as = PackedAs(Kind(options.values), options.scale_dtype, zero_points=not options.symmetric)
        parts = (("w13", w13, w13_bias, w13_importance), ("w2", w2, w2_bias, w2_importance))
        for name, weights, _, importances in parts:
            if importances is not None and importances.shape != (len(w13), weights[0].shape[1]):
                expected = [len(w13), weights[0].shape[1]]
                raise ValueError(f"{name}_importance is {list(importances.shape)}, expected {expected}")
        for expert in range(len(w13)):
            for which, (name, weights, biases, importances) in enumerate(parts):
                importance = None if importances is None else importances[expert]
                bias = None if biases is None else biases[expert]
                try:
                    if round_one is None:
                        matrix = round_weight(weights[expert], options, bias, importance)
                    else:
                        matrix = round_one(name, expert, weights[expert], bias)
                except ValueError as error:
                    raise ValueError(f"{name} of expert {expert}: {error}") from error
                tensors = {"codes": matrix.codes, "scales": matrix.scales, "zero_points": matrix.zero_points}
                kept_as = replace(packed_as, activation_group=groups[name])
                packed = pack_as({**tensors, "bias": bias}, group_size, kept_as)
                if stacks[which] is None:
                    stacks[which] = packed.new_empty(len(w13), len(packed))
                stacks[which][expert] = packed
                packed_one()
        return cls(*stacks, hidden, intermediate, group_size, activation, numbers=numbers, gated=sizes.gated)

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor | None = None,
        top_k_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The weighted sum of each token's experts.

        Tensors of an accelerator are copied to packed experts on the CPU, and the result is copied back.

        Args:
            hidden_states: float32, bfloat16 or float16 [..., H], T rows in all.
            top_k_index: int32 or int64 [T, k], in [0, E); -1 or E is a slot without an expert. None, with
                ``top_k_weights``, for Llama 4: T / E rows for each expert in turn, already multiplied by the router's
                weight. A row of zeros gives zeros, and is not multiplied.
            top_k_weights: floating point [T, k].

        Returns:
            The shape and dtype of hidden_states.

        Raises:
            ValueError: only one of index and weights is given, or the rows are no multiple of the experts.
        """
        if top_k_index is None and top_k_weights is None:
            top_k_index, top_k_weights = self._in_turn(hidden_states)
        if top_k_index is None or top_k_weights is None:
            raise ValueError("top_k_index and top_k_weights are given both or not at all")
        if hidden_states.device.type not in ("cpu", "meta") and self.w13_packed.device.type == "cpu":
            from w4a8.core.bridge import run_on_cpu  # imports torch's compiler, two seconds

            rows = hidden_states.reshape(-1, self.hidden_size)
            return run_on_cpu(self, rows, top_k_index, top_k_weights).view(hidden_states.shape)
        ids = top_k_index.masked_fill(top_k_index == self.num_experts, -1)
        weights, numbers = self.operator_arguments()
        return dynamic_4bit_int_moe(hidden_states, ids, top_k_weights, *weights, **numbers)

    def operator_arguments(self) -> tuple[tuple[Any, ...], dict[str, float | None]]:
        """What the operator takes behind hidden states, index and weights: by position, and by name."""
        numbers = {"limit": self.numbers.limit, "alpha": self.numbers.alpha, "beta": self.numbers.beta}
        sizes = self.hidden_size, self.intermediate_size, self.sizes.w13_rows, self.sizes.operator_group_size
        return (self.w13_packed, self.w2_packed, *sizes, False, self.activation), numbers

    def _in_turn(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """ids and weights [T, 1] of rows that belong to each expert in turn."""
        rows = hidden_states.reshape(-1, self.hidden_size)
        if len(rows) % self.num_experts != 0:
            raise ValueError(f"hidden_states has {len(rows)} rows, expected a multiple of {self.num_experts} experts")
        ids = torch.arange(self.num_experts, device=rows.device).repeat_interleave(len(rows) // self.num_experts)
        return ids.masked_fill((rows == 0).all(1), -1).unsqueeze(1), rows.new_ones(len(rows), 1)

    def extra_repr(self) -> str:
        """Sizes and kind, for print()."""
        groups = list(dict.fromkeys(self.sizes.group_sizes.values()))
        gate = "" if self.sizes.gated else ", gated=False"
        return (
            f"num_experts={self.num_experts}, hidden_size={self.hidden_size}, "
            f"intermediate_size={self.intermediate_size}, group_size={groups[0] if len(groups) == 1 else groups}, "
            f"activation={self.activation.name}{self.numbers}{gate}{self.kind_repr()}"
        )
