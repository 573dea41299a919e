"""The experts of one layer: sizes, the part that a rank holds, and the call of the operator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from w4a8.core.activation import OWN_NUMBERS, GateNumbers, MoEActivation, as_activation, kernel_activation_kind
from w4a8.core.activation_groups import resolve_activation_group
from w4a8.core.matrix import PackedAs


@dataclass(frozen=True)
class ExpertSizes:
    """Sizes of the experts that a rank holds.

    Attributes:
        experts: E.
        hidden: H.
        intermediate: I, of this rank.
        group_size: input features per scale; -1 is channelwise.
        gated: w13 has a gate half and an up half.
        w2_group_size: group size of w2; None: that of w13.
    """

    experts: int
    hidden: int
    intermediate: int
    group_size: int = -1
    gated: bool = True
    w2_group_size: int | None = None

    @property
    def group_sizes(self) -> dict[str, int]:
        """The group sizes of ``w13`` and ``w2``, by name."""
        return {"w13": self.group_size, "w2": self.group_size if self.w2_group_size is None else self.w2_group_size}

    @property
    def operator_group_size(self) -> int:
        """``group_size`` of ``dynamic_4bit_int_moe``: 0 (as each packed tensor says) if w13 and w2 differ."""
        return self.group_size if len(set(self.group_sizes.values())) == 1 else 0

    @property
    def w13_rows(self) -> int:
        """Rows of w13: 2 I, or I without a gate."""
        return 2 * self.intermediate if self.gated else self.intermediate

    @property
    def stacks(self) -> tuple[tuple[str, int, int], ...]:
        """(name, rows, columns) of the two stacks."""
        return (("w13", self.w13_rows, self.hidden), ("w2", self.hidden, self.intermediate))

    def scale_columns(self, columns: int) -> int:
        """Scales in a row of ``columns`` columns, in groups of ``group_size``."""
        return 1 if self.group_size == -1 else columns // self.group_size

    def activation_groups(self, asked: int | Mapping[str, int | None] | None) -> dict[str, int]:
        """The activation group of each of the two stacks, by name (:func:`resolve_activation_group`).

        ``asked`` is for both, or for each by its name.

        Raises:
            ValueError: ``asked`` does not fit a stack; names the stack.
        """
        found = {}
        for name, _, columns in self.stacks:
            try:
                mine = asked[name] if isinstance(asked, Mapping) else asked
                found[name] = resolve_activation_group(mine, self.group_sizes[name], columns)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        return found

    def check(self) -> None:
        """Raises ValueError if experts of these sizes cannot be packed."""
        problem = self.unsupported()
        if problem is not None:
            raise ValueError(f"kernel does not support {problem}")

    def unsupported(self) -> str | None:
        """Why experts of these sizes cannot be packed, in words, or None."""
        names = {"w13": "hidden size", "w2": "intermediate size per partition"}
        for stack, rows, columns in self.stacks:
            problem = PackedAs().problem(rows, columns, self.group_sizes[stack])
            if problem:
                return f"{names[stack]} {columns}: {problem}"
        return None


def gate_and_up(rows: int, interleaved: bool) -> tuple[slice, slice]:
    """The gate's rows and the up projection's rows of a fused w13.

    Args:
        rows: 2 I.
        interleaved: gate and up rows alternate, gate first, as in gpt-oss; otherwise the gate is the first half.
    """
    if interleaved:
        return slice(0, None, 2), slice(1, None, 2)
    return slice(0, rows // 2), slice(rows // 2, None)


def slice_of_rank(loaded: torch.Tensor, dim: int, size: int, rank: int, ranks: int, name: str) -> torch.Tensor:
    """This rank's part of ``loaded``, a view: elements [rank * size, (rank + 1) * size) of dimension ``dim``.

    Raises:
        ValueError: dimension ``dim`` of ``loaded`` is not ``size`` * ``ranks``; the message begins with ``name``.
    """
    if loaded.shape[dim] != size * ranks:
        raise ValueError(
            f"{name}: dimension {dim} is {loaded.shape[dim]}, but {ranks} tensor-parallel "
            f"rank{'s' if ranks > 1 else ''} of {size} make {size * ranks}"
        )
    return loaded.narrow(dim, rank * size, size)


def determine_expert_map(ep_size: int, ep_rank: int, global_num_experts: int) -> tuple[int, torch.Tensor | None]:
    """The consecutive experts that a rank of expert parallelism holds. The first ranks hold the remainder, one each.

    Args:
        ep_size: number of ranks.
        ep_rank: this rank.
        global_num_experts: experts of the model.

    Returns:
        The number of experts of this rank, and int32 [global experts]: local index or -1; None for a single rank.

    Raises:
        ValueError: ``ep_rank`` is outside [0, ``ep_size``).
    """
    if not 0 <= ep_rank < ep_size:
        raise ValueError(f"ep_rank {ep_rank} is outside [0, {ep_size})")
    if ep_size == 1:
        return global_num_experts, None
    share, remainder = divmod(global_num_experts, ep_size)
    count = share + (ep_rank < remainder)
    start = ep_rank * share + min(ep_rank, remainder)
    expert_map = torch.full((global_num_experts,), -1, dtype=torch.int32)
    expert_map[start : start + count] = torch.arange(count, dtype=torch.int32)
    return count, expert_map


def local_expert_ids(topk_ids: torch.Tensor, expert_map: torch.Tensor | None) -> torch.Tensor:
    """Indices of this rank's experts, -1 for experts of other ranks.

    Args:
        topk_ids: int32 or int64 [T, k], global; -1 stays -1.
        expert_map: int32 or int64 [global experts], local index or -1; None if this rank holds all.

    Returns:
        int64 [T, k]; without a map ``topk_ids`` itself.
    """
    if expert_map is None:
        return topk_ids
    ids = topk_ids.to(torch.long)
    mapped = expert_map.to(torch.long)[ids.clamp(min=0)]
    return torch.where(ids < 0, ids, mapped)


def run_experts(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13_packed: torch.Tensor,
    w2_packed: torch.Tensor,
    sizes: ExpertSizes,
    activation: MoEActivation | str,
    expert_map: torch.Tensor | None = None,
    apply_router_weight_on_input: bool = False,
    numbers: GateNumbers = OWN_NUMBERS,
) -> torch.Tensor:
    """Runs the experts that a router has chosen, in one call of the operator.

    Args:
        hidden_states: float32, bfloat16 or float16 [T, H].
        topk_weights: [T, k].
        topk_ids: int32 or int64 [T, k], global; -1 is a slot without an expert.
        w13_packed, w2_packed: uint8 [E, bytes].
        sizes: sizes of the experts; ``experts`` is not read.
        activation: the function between w13 and w2.
        expert_map: [global experts], local index or -1; None if this rank holds all.
        apply_router_weight_on_input: the router weights multiply the input instead of the output.
        numbers: limit, alpha and beta of the activation.

    Returns:
        [T, H] in the dtype of hidden_states.
    """
    return torch.ops.w4a8.dynamic_4bit_int_moe(
        hidden_states,
        local_expert_ids(topk_ids, expert_map),
        topk_weights,
        w13_packed,
        w2_packed,
        sizes.hidden,
        sizes.intermediate,
        sizes.w13_rows,
        sizes.operator_group_size,
        apply_router_weight_on_input,
        kernel_activation_kind(as_activation(activation)),
        limit=numbers.limit,
        alpha=numbers.alpha,
        beta=numbers.beta,
    )
