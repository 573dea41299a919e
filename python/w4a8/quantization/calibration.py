"""Rounds the layers of a model one after another, each for the inputs that it gets behind those rounded before it."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch

from w4a8.nn.compensation import Inputs
from w4a8.quantization.expert_rows import ExpertRows
from w4a8.quantization.moe_blocks import listed_linears
from w4a8.quantization.plan import Job

# What is known of the inputs of a job: Inputs of a linear layer, ExpertRows of experts; None: no batch reaches it.
Found = Any
Round = Callable[[Job, Found], None]


def batches_of(calibration: Iterable[Any]) -> list[Any]:
    """The batches of a calibration: a tensor, or a tuple or list of arguments, or a dict of named ones, each.

    Raises:
        ValueError: there are none.
        TypeError: ``calibration`` is a batch itself.
    """
    if isinstance(calibration, (torch.Tensor, Mapping, str)):
        name = type(calibration).__name__
        raise TypeError(f"calibration is a {name}, expected a list of batches: [calibration] of one")
    batches = list(calibration)
    if not batches:
        raise ValueError("calibration has no batches, expected one or more")
    return batches


def round_in_turn(model: torch.nn.Module, jobs: Iterable[Job], batches: list[Any], round_job: Round) -> None:
    """Runs the model on batches, and rounds each job when its inputs are known.

    The model is run unit by unit: a unit is an element of a ``ModuleList``, as a decoder layer is, or a layer by
    itself. A unit whose input is the output of the unit before it gets what that unit gave: the units before it are not
    run again, whatever else the model computes is. Beside the inputs behind rounded units, those of the float model are
    kept; what is kept of both are the outputs of one unit, and the float inputs inside it.

    Args:
        model: is changed by ``round_job`` alone.
        jobs: of its plan.
        batches: of :func:`batches_of`.
        round_job: called for each job with :class:`Inputs` of a linear layer, :class:`ExpertRows` of experts, or None
            if no batch reaches it.
    """
    runner = _Runner(model, batches, list(jobs))
    with torch.no_grad():
        runner.record()
        for unit in runner.units:
            runner.round(unit, round_job)
    for job in runner.jobs:
        if id(job) not in runner.rounded:
            round_job(job, None)


@dataclass
class _Unit:
    """A module that is run by itself.

    Attributes:
        module: it.
        jobs: below it, or it.
        alone: it is what a job replaces, not a list's element around some.
        stages: jobs that have an input in common, in the order in which they are called.
        calls: of the modules of a stage's first job, by id of the job, in one batch.
        before: units that need not run when this one does: a chain, each with the output of the one before as input.
        feeds: the next unit has this one in ``before``.
    """

    module: torch.nn.Module
    jobs: list[Job]
    alone: bool
    stages: list[list[Job]] = field(default_factory=list)
    calls: Counter = field(default_factory=Counter)
    before: list[_Unit] = field(default_factory=list)
    feeds: bool = False


class _Enough(BaseException):
    """Ends a run of the model when what was wanted of it is there."""


class _Runner:
    def __init__(self, model: torch.nn.Module, batches: list[Any], jobs: list[Job]) -> None:
        self.model, self.batches, self.jobs = model, batches, jobs
        self.units: list[_Unit] = []  # in the order of their first calls
        self.rounded: set[int] = set()  # ids of jobs
        # Of each batch: what the last unit of a chain gave, behind rounded units and in the float model.
        self.outputs: list[Any] = []
        self.exact: list[Any] = []

    def record(self) -> None:
        """Finds units, stages and chains by running the first batch."""
        units = _units(self.model, self.jobs)
        calls: list[tuple[_Unit, Any]] = []  # with the first argument
        given: dict[int, Any] = {}  # by id of a unit: what it gave
        inputs: dict[int, list[tuple[Job, Any]]] = {id(unit): [] for unit in units}
        with ExitStack() as stack:
            for unit in units:
                before = lambda args, unit=unit: calls.append((unit, args[0] if args else None))  # noqa: E731
                after = lambda out, unit=unit: given.__setitem__(id(unit), out)  # noqa: E731
                stack.enter_context(_watching(unit.module, before, after))
                for job in unit.jobs:
                    see = lambda args, unit=unit, job=job: inputs[id(unit)].append((job, args[0]))  # noqa: E731
                    for module in watched(job):
                        stack.enter_context(_watching(module, see))
            call(self.model, self.batches[0])
        times = Counter(id(unit) for unit, _ in calls)
        last: _Unit | None = None
        for unit, first in calls:
            if unit in self.units:
                continue
            self.units.append(unit)
            chained = last is not None and first is not None and _first(given[id(last)]) is first
            if chained and not unit.alone and times[id(unit)] == times[id(last)] == 1:
                unit.before, last.feeds = [*last.before, last], True
            last = None if unit.alone else unit
        # Those whose own forward is not what is called, but those of layers below.
        self.units += [unit for unit in units if inputs[id(unit)] and unit not in self.units]
        for unit in self.units:
            _find_stages(unit, inputs[id(unit)])

    def round(self, unit: _Unit, round_job: Round) -> None:
        """Rounds the jobs of a unit, stage by stage."""
        exact: dict[int, list[list[torch.Tensor]]] = {}  # by id of a stage's first job: of each batch, its calls
        if unit.before or unit.feeds:
            exact = self._float_inputs(unit)
        for stage in unit.stages:
            stage = [job for job in stage if id(job) not in self.rounded]
            if not stage:
                continue
            found = self._inputs(unit, stage[0], exact.get(id(stage[0]), []))
            for job in stage:
                self.rounded.add(id(job))
                round_job(job, found)
        if unit.feeds:
            self.outputs = [self._run(unit, i, self.outputs) for i in range(len(self.batches))]

    def _float_inputs(self, unit: _Unit) -> dict[int, list[list[torch.Tensor]]]:
        """What goes into the first job of each stage in the float model; the unit is not rounded yet."""
        found: dict[int, list[list[torch.Tensor]]] = {id(stage[0]): [] for stage in unit.stages}
        given = []
        for i in range(len(self.batches)):
            watchers = []
            for stage in (stage for stage in unit.stages if stage[0].kind != "listed"):
                calls: list[torch.Tensor] = []
                found[id(stage[0])].append(calls)
                keep = lambda args, calls=calls: calls.append(args[0].detach().clone())  # noqa: E731
                watchers += [(module, keep) for module in watched(stage[0])]
            given.append(self._run(unit, i, self.exact, watchers))
        self.exact = given
        return found

    def _inputs(self, unit: _Unit, job: Job, exact: list[list[torch.Tensor]]) -> Found:
        """What goes into a job behind whatever is rounded; None for nothing."""
        modules = watched(job)
        found = Inputs.none(modules[0].in_features) if job.kind == "linear" else ExpertRows()
        for i in range(len(self.batches)):
            seen = 0

            def take(args: tuple[Any, ...], expert: int, i: int = i) -> None:
                nonlocal seen
                pairs = exact[i] if exact else []
                beside = pairs[seen] if seen < len(pairs) and pairs[seen].shape == args[0].shape else None
                if job.kind == "linear":
                    found.add(args[0], beside)
                else:
                    rows = args[0].detach().reshape(-1, args[0].shape[-1]).clone()
                    found.rows.append(rows)
                    found.exact.append(None if beside is None else beside.reshape(rows.shape))
                    found.ids.append(expert if job.kind == "listed" else args[1] if len(args) > 1 else None)
                seen += 1
                if seen == unit.calls[id(job)] and job.kind != "listed":
                    raise _Enough

            hooks = [(module, lambda args, e=e: take(args, e)) for e, module in enumerate(modules)]
            self._run(unit, i, self.outputs, hooks)
        if not found.rows:
            return None
        return found.filled() if job.kind == "linear" else found

    def _run(self, unit: _Unit, batch: int, outputs: list[Any], watchers: Iterable[tuple] = ()) -> Any:
        """Runs a unit on a batch, behind outputs of the unit before it, and returns what it gives."""
        given = None

        def end(out: Any) -> None:
            nonlocal given
            given = out
            if unit.feeds or unit.before:
                raise _Enough

        with ExitStack() as stack:
            for earlier in unit.before:
                stack.enter_context(_replaced(earlier.module, lambda *_, **__: _copy(outputs[batch])))
            if not unit.alone:
                stack.enter_context(_watching(unit.module, after=end))
            for module, hook in watchers:
                stack.enter_context(_watching(module, hook))
            with suppress(_Enough):
                call(self.model, self.batches[batch])
        return given


def _units(model: torch.nn.Module, jobs: list[Job]) -> list[_Unit]:
    """Elements of the outermost lists of modules that have jobs below, and jobs that are in no list."""
    own = {id(owner if job.kind == "listed" else getattr(owner, key)): job for job in jobs for owner, key in job.places}
    units, taken = [], set()

    def walk(module: torch.nn.Module, listed: bool) -> None:
        below = {id(own[id(part)]): own[id(part)] for part in module.modules() if id(part) in own}
        new = [job for key, job in below.items() if key not in taken]
        if not new:
            return
        if listed or id(module) in own:
            taken.update(below)
            units.append(_Unit(module, new, id(module) in own))
            return
        for child in module.children():
            walk(child, isinstance(module, torch.nn.ModuleList))

    walk(model, False)
    return units


def _find_stages(unit: _Unit, inputs: list[tuple[Job, Any]]) -> None:
    """Jobs that are called one after another with the same tensor are a stage."""
    last = None
    for job, rows in inputs:
        if unit.calls[id(job)] == 0:
            if last is not None and last is rows and job.kind == unit.stages[-1][0].kind == "linear":
                unit.stages[-1].append(job)
            else:
                unit.stages.append([job])
        unit.calls[id(job)] += 1
        last = rows


def watched(job: Job) -> list[torch.nn.Module]:
    """The modules that are called with the inputs of a job: of listed experts the gate of each."""
    owner, _ = job.places[0]
    if job.kind == "listed":
        return [gate for gate, _, _ in listed_linears(owner)]
    modules = [getattr(place, name) for place, name in job.places]
    return list({id(module): module for module in modules}.values())


def _first(out: Any) -> Any:
    return out[0] if isinstance(out, (tuple, list)) and out else out


def _copy(out: Any) -> Any:
    """What a unit gave, so that the model may change it in place."""
    if isinstance(out, torch.Tensor):
        return out.clone()
    return type(out)(_copy(each) for each in out) if type(out) in (tuple, list) else out


@contextmanager
def _replaced(module: torch.nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Gives a module another forward."""
    own = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


@contextmanager
def _watching(
    module: torch.nn.Module,
    before: Callable[[tuple[Any, ...]], None] | None = None,
    after: Callable[[Any], None] | None = None,
) -> Iterator[None]:
    """Calls hooks with what the module is called with, by position or by name, and with what it gives.

    Hooks of torch 1.13 do not get what is passed by name.
    """
    forward = module.forward
    signature = inspect.signature(forward)

    @wraps(forward)  # so that the signature of what is watched twice is known
    def watched(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(signature.bind(*args, **kwargs).args)
        out = forward(*args, **kwargs)
        if after is not None:
            after(out)
        return out

    with _replaced(module, watched):
        yield


def call(model: torch.nn.Module, batch: Any) -> Any:
    """What a model answers to a batch: a tensor, a tuple or list of arguments, or a dict of named ones."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
