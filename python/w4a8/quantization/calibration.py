"""What goes into the layers of a model: the mean squares of their input channels, by which errors of weights count."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from w4a8.quantization.moe_blocks import Experts, fused_experts, listed_linears
from w4a8.quantization.plan import Job


class MeanSquares:
    """Of the inputs of several matrices that have their input channels in common, as the experts of a layer have.

    Attributes:
        sums: float64 [matrices, K], of the squares.
        rows: float64 [matrices], how many there were.
    """

    def __init__(self, matrices: int, columns: int) -> None:
        self.sums = torch.zeros(matrices, columns, dtype=torch.float64)
        self.rows = torch.zeros(matrices, dtype=torch.float64)

    def add(self, matrix: int, rows: torch.Tensor) -> None:
        """Takes inputs [..., K]."""
        rows = rows.detach().reshape(-1, self.sums.shape[1]).float()
        self.sums[matrix] += rows.square().sum(0, dtype=torch.float64)
        self.rows[matrix] += len(rows)

    def importance(self) -> torch.Tensor | None:
        """float32 [matrices, K], or None if there were no rows.

        A matrix without rows gets the mean of all rows, a channel that was always 0 the mean of the matrix's channels.
        """
        if not self.rows.any():
            return None
        means = self.sums / self.rows.clamp(min=1).unsqueeze(1)
        means = torch.where(self.rows.unsqueeze(1) > 0, means, self.sums.sum(0) / self.rows.sum())
        means = torch.where(means > 0, means, means.mean(1, keepdim=True))
        return means.clamp(max=torch.finfo(torch.float32).max).float()


def calibrate(model: torch.nn.Module, jobs: Iterable[Job], batches: Iterable[Any]) -> list[dict[str, torch.Tensor]]:
    """Runs the model on batches and returns for each job what ``from_float`` takes of it.

    Args:
        model: as it is before anything is replaced; it is so again when this returns.
        jobs: of its plan.
        batches: a tensor, or a tuple or list of arguments, or a dict of named ones, each; none of these itself.

    Returns:
        ``importance`` [K] of a linear layer; ``w13_importance`` [E, H] and ``w2_importance`` [E, I] of experts; nothing
        for what no batch reached.

    Raises:
        ValueError: there are no batches.
        TypeError: ``batches`` is a batch.
    """
    if isinstance(batches, (torch.Tensor, Mapping, str)):
        raise TypeError(f"calibration is a {type(batches).__name__}, expected a list of batches: [calibration] of one")
    watched, count = [], 0
    with ExitStack() as stack, torch.no_grad():
        for job in jobs:
            squares, hooks = _watch(job)
            watched.append(squares)
            for module, hook in hooks:
                stack.enter_context(_watching(module, hook))
        for batch in batches:
            count += 1
            _call(model, batch)
    if count == 0:
        raise ValueError("calibration has no batches, expected one or more")
    return [_importance(squares) for squares in watched]


@contextmanager
def _watching(module: torch.nn.Module, hook: Callable[..., None]) -> Iterator[None]:
    """Calls a hook with what the module is called with, by position or by name: torch 1.13's hooks lack the latter."""
    own, forward = module.__dict__.get("forward"), module.forward
    signature = inspect.signature(forward)

    def watched(*args: Any, **kwargs: Any) -> Any:
        hook(module, signature.bind(*args, **kwargs).args)
        return forward(*args, **kwargs)

    module.forward = watched
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


def _call(model: torch.nn.Module, batch: Any) -> None:
    if isinstance(batch, Mapping):
        model(**batch)
    elif isinstance(batch, (tuple, list)):
        model(*batch)
    else:
        model(batch)


def _importance(squares: dict[str, MeanSquares]) -> dict[str, torch.Tensor]:
    found = {name: mean.importance() for name, mean in squares.items()}
    found = {name: mean for name, mean in found.items() if mean is not None}
    return {name: mean[0] if name == "importance" else mean for name, mean in found.items()}


_Hooks = list[tuple[torch.nn.Module, Callable[..., None]]]


def _watch(job: Job) -> tuple[dict[str, MeanSquares], _Hooks]:
    """What is added up of a job, and what does it when a module is called."""
    owner, key = job.places[0]
    if job.kind == "linear":
        modules = {id(module): module for module in (getattr(place, name) for place, name in job.places)}
        squares = MeanSquares(1, getattr(owner, key).in_features)
        return {"importance": squares}, [(module, _adds(squares, 0)) for module in modules.values()]
    if job.kind == "listed":
        linears = listed_linears(owner)
        w13, w2 = (MeanSquares(len(linears), linears[0][which].in_features) for which in (0, 2))
        hooks = [(three[0], _adds(w13, expert)) for expert, three in enumerate(linears)]
        hooks += [(three[2], _adds(w2, expert)) for expert, three in enumerate(linears)]
        return {"w13_importance": w13, "w2_importance": w2}, hooks
    module = getattr(owner, key)
    experts = fused_experts(module)
    count, hidden, intermediate = experts.sizes
    w13, w2 = MeanSquares(count, hidden), MeanSquares(count, intermediate)

    def hook(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        rows = args[0].detach().reshape(-1, hidden)
        for expert in range(count):
            mine = _routed_to(expert, rows, args[1] if len(args) > 1 else None, count)
            if len(mine) > 0:
                w13.add(expert, mine)
                w2.add(expert, _between(experts, expert, mine))

    return {"w13_importance": w13, "w2_importance": w2}, [(module, hook)]


def _routed_to(expert: int, rows: torch.Tensor, ids: torch.Tensor | None, count: int) -> torch.Tensor:
    """The rows [., H] of an expert: ids [T, k] choose them, or without there is an equal run for each (Llama 4)."""
    if ids is not None:
        return rows[(ids.reshape(len(rows), -1) == expert).any(1)]
    mine = rows.reshape(count, -1, rows.shape[1])[expert]
    return mine[(mine != 0).any(1)]


def _between(experts: Experts, expert: int, rows: torch.Tensor) -> torch.Tensor:
    """What w2 of an expert is multiplied by, for rows [., H]."""
    w13 = experts.w13[expert]
    bias = None if experts.w13_bias is None else experts.w13_bias[expert]
    return experts.between(torch.nn.functional.linear(rows.to(w13.dtype), w13, bias).float())


def _adds(squares: MeanSquares, matrix: int) -> Callable[..., None]:
    def hook(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        squares.add(matrix, args[0])

    return hook
