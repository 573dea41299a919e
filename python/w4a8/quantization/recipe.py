"""Chooses the bits of each matrix of a model for a given average."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from w4a8.formats.packed_directory import joined_layer_of
from w4a8.nn import QuantOptions
from w4a8.nn.rounding import round_weight
from w4a8.quantization.calibration import call, watched
from w4a8.quantization.moe_blocks import fused_experts, listed_experts
from w4a8.quantization.plan import Job

# Squared error over the squares of normal weights in groups of 32 (docs/quantization.md, "Rounding"). Without
# calibration the error of a job is this number, times the weights that a token reads, times a factor by its name.
_LOST = {
    ("int4", True): 0.0066,
    ("int4", False): 0.0059,
    ("e2m1", True): 0.0080,
    ("int6", True): 4e-4,
    ("int8", True): 25e-6,
}
_FACTORS = (
    (re.compile(r"(v_proj|qkv_proj|c_attn|query_key_value|kv_b_proj)$"), 2.0),
    (re.compile(r"(down_proj|w2|fc2|c_proj|experts)$"), 2.0),
)


# [N, K] of the matrices of a job, of one expert, and how many weights a token reads.
_Sizes = tuple[list[tuple[int, int]], float]


@dataclass
class _Choice:
    """One way to round matrices of one kind: bits that a token reads, the error, options."""

    bits: float
    lost: float
    options: QuantOptions


@dataclass
class Moments:
    """Sums over the tokens of a calibration, of a layer.

    Attributes:
        inputs: of the squares of each input channel of a linear layer.
        outputs: of the squares of each output feature of experts.
        slopes: of the squares of the derivative of the logarithm of a token's probability by each output feature: the
            diagonal of the Fisher information.
    """

    inputs: torch.Tensor | float = 0.0
    outputs: torch.Tensor | float = 0.0
    slopes: torch.Tensor | float = 0.0


def choose(
    model: torch.nn.Module, jobs: list[Job], options: QuantOptions, moments: dict[int, Moments] | None = None
) -> None:
    """Gives each job its options, such that all have ``options.bits`` of a weight on average, or a little less.

    Without ``options.bits`` all jobs get ``options``.

    A weight of an expert counts as often as a token reads the weight. The steps to more bits that reduce the error most
    for a bit come first. Matrices that vLLM joins get the same kind.

    Args:
        model: is not changed.
        jobs: of its plan.
        options: whose kind is the one of the fewest bits.
        moments: by id of a job (:func:`moments_of`); None: errors are guessed from names.

    Raises:
        ValueError: the kind of the fewest bits has more than ``options.bits``.
    """
    base = replace(options, bits=None)
    for job in jobs:
        job.options = base
    if options.bits is None or not jobs:
        return
    together: dict[object, list[Job]] = {}
    for job in jobs:
        together.setdefault(joined_layer_of(job.names[0]) or job.names[0], []).append(job)
    sizes = {id(job): _matrices(model, job) for job in jobs}
    ladders = [_ladder(group, sizes, base, moments) for group in together.values()]
    weights, least = sum(read for _, read in sizes.values()), sum(ladder[0].bits for ladder in ladders)
    left = options.bits * weights - least
    if left < 0:
        least /= weights
        raise ValueError(f"bits is {options.bits}, expected {least:.2f} or more: those of {base.values} in such groups")
    taken = [0] * len(ladders)
    steps = sorted(
        (_gain(here, there), i, step)
        for i, ladder in enumerate(ladders)
        for step, (here, there) in enumerate(pairwise(ladder))
    )
    for _, i, step in reversed(steps):
        cost = ladders[i][step + 1].bits - ladders[i][step].bits
        if taken[i] == step and cost <= left:
            taken[i], left = step + 1, left - cost
    for ladder, step, group in zip(ladders, taken, together.values()):
        for job in group:
            job.options = ladder[step].options


def _ladder(
    jobs: list[Job], sizes: dict[int, _Sizes], base: QuantOptions, moments: dict[int, Moments] | None
) -> list[_Choice]:
    """Ways to round jobs of one kind, from few bits to many: each further bit reduces the error less."""
    kinds = [base]
    if base.values == "int4" and base.symmetric:
        kinds.append(replace(base, symmetric=False))
    kinds += [replace(base, values=values, symmetric=True) for values in ("int6", "int8") if values != base.values]
    found: list[_Choice] = []
    for options in kinds:
        own = [sizes[id(job)] for job in jobs]
        if any(options.form.problem(*shape, options.group_size) for shapes, _ in own for shape in shapes):
            continue
        bits = sum(_bits(shapes, options) * weights for shapes, weights in own)
        lost = sum(_lost(job, options, weights, moments) for job, (_, weights) in zip(jobs, own))
        way = _Choice(bits, lost, options)
        # A way above the line between its neighbours is never the best.
        while len(found) > 1 and _gain(found[-2], found[-1]) <= _gain(found[-1], way):
            found.pop()
        if not found or (bits > found[-1].bits and lost < found[-1].lost):
            found.append(way)
    return found


def _gain(here: _Choice, there: _Choice) -> float:
    """The error that each bit from one way to the next takes away."""
    return (here.lost - there.lost) / (there.bits - here.bits)


def _matrices(model: torch.nn.Module, job: Job) -> _Sizes:
    owner, key = job.places[0]
    if job.kind == "linear":
        shape = tuple(getattr(owner, key).weight.shape)
        return [shape], float(shape[0] * shape[1])
    experts = fused_experts(getattr(owner, key)) if job.kind == "fused" else listed_experts(owner)
    count, hidden, intermediate = experts.sizes
    shapes = [((1 + experts.gated) * intermediate, hidden), (hidden, intermediate)]
    config = getattr(model, "config", None)
    config = getattr(config, "get_text_config", lambda: config)()
    used = getattr(config, "num_experts_per_tok", None) or count
    return shapes, float(used * sum(rows * columns for rows, columns in shapes))


def _bits(shapes: list[tuple[int, int]], options: QuantOptions) -> float:
    """Of a weight, scales and all."""
    packed = sum(8 * options.form.bytes(*shape, options.group_size) for shape in shapes)
    return packed / sum(rows * columns for rows, columns in shapes)


def _lost(job: Job, options: QuantOptions, weights: float, moments: dict[int, Moments] | None) -> float:
    """The error of a job, in one unit for all jobs."""
    usual = _LOST[options.values, options.symmetric]
    if moments is None:
        return usual * weights * next((factor for name, factor in _FACTORS if name.search(job.names[0])), 1.0)
    found = moments.get(id(job))
    if found is None:  # no batch reaches it
        return 0.0
    if job.kind != "linear":
        return usual * float((found.slopes * found.outputs).sum())
    owner, key = job.places[0]
    weight = getattr(owner, key).weight.detach()
    rounded = round_weight(weight, options, importance=found.inputs).floats()
    return float(found.slopes @ (weight.float() - rounded).square() @ found.inputs)


def moments_of(model: torch.nn.Module, jobs: list[Job], batches: Iterable[Any]) -> dict[int, Moments]:
    """Runs the model forward and backward on batches.

    For a model that returns ``logits``: the derivative of the logarithm of the probability of a token, drawn from the
    model's own distribution. For other models: the derivative of a sum of the outputs with random signs.

    Args:
        model: is not changed.
        jobs: of its plan.
        batches: as of a calibration.

    Returns:
        By id of a job; jobs that no batch reaches are left out.

    Raises:
        ValueError: the model has no derivative.
    """
    found: dict[int, Moments] = {}
    generator = torch.Generator().manual_seed(0)
    with ExitStack() as stack, torch.enable_grad():
        stack.enter_context(_frozen(model))
        for job in jobs:
            owner, _ = job.places[0]
            for module in [owner] if job.kind == "listed" else watched(job):
                hook = module.register_forward_hook(_Observer(job, found))
                stack.callback(hook.remove)
        for batch in batches:
            out = call(model, batch)
            logits = getattr(out, "logits", None)
            try:
                if logits is not None:
                    logs = logits.float().log_softmax(-1).flatten(0, -2)
                    # torch.multinomial takes three times as long.
                    sums = logs.detach().exp().cumsum(-1)
                    point = torch.rand(len(sums), 1, generator=generator) * sums[:, -1:]
                    logs.gather(1, torch.searchsorted(sums, point)).sum().backward()
                else:
                    out = out[0] if isinstance(out, (tuple, list)) else out
                    signs = torch.randint(2, out.shape, generator=generator) * 2 - 1
                    (out.float() * signs).sum().backward()
            except (RuntimeError, AttributeError) as error:
                raise ValueError(
                    f"calibration with bits needs derivatives of the model, which fails: {error}; give either alone"
                ) from error
    return found


@dataclass
class _Observer:
    """A forward hook that adds to the moments of a job."""

    job: Job
    found: dict[int, Moments]

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        first = out[0] if isinstance(out, tuple) else out
        of = self.found.setdefault(id(self.job), Moments())
        if self.job.kind == "linear":
            of.inputs = of.inputs + _squares(args[0])
        else:
            of.outputs = of.outputs + _squares(first)
        if not first.requires_grad:  # derivatives begin at the first layers
            first = first.detach().requires_grad_().clone()
        first.register_hook(lambda slope: setattr(of, "slopes", of.slopes + _squares(slope)))
        return (first, *out[1:]) if isinstance(out, tuple) else first


def _squares(values: torch.Tensor) -> torch.Tensor:
    """float32, of each feature over all tokens."""
    return values.detach().float().flatten(0, -2).square().sum(0)


@contextmanager
def _frozen(model: torch.nn.Module) -> Iterator[None]:
    """No derivatives by parameters."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
