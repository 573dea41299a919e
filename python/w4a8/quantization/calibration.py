"""Rounds the layers of a model one after another, each for its inputs behind the layers rounded before."""

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

# The inputs of a job: Inputs of a linear layer, ExpertRows of experts; None: no batch reaches the job.
Found = Any
Round = Callable[[Job, Found], None]


def batches_of(calibration: Iterable[Any]) -> list[Any]:
    """The batches of a calibration. Each is a tensor, a tuple or list of arguments, or a dict of named arguments.

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

    The model is run unit by unit. A unit is an element of a ``ModuleList``, such as a decoder layer, or a single layer.
    If the input of a unit is the output of the unit before, that output is kept, and the units before are not run
    again. All else in the model is. Outputs are kept twice, behind rounded units and of the float model. Memory holds
    the outputs of one unit, and the float inputs inside one unit.

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
        jobs: of the module and its submodules.
        alone: a job replaces the module itself; it is no element of a list with jobs inside.
        stages: jobs with the same input, in the order of their calls.
        calls: by id of a job: how often the first batch calls the job's modules.
        before: units that need not run for this unit: a chain, where each unit's output is the next unit's input.
        feeds: this unit is in ``before`` of the next unit.
    """

    module: torch.nn.Module
    jobs: list[Job]
    alone: bool
    stages: list[list[Job]] = field(default_factory=list)
    calls: Counter = field(default_factory=Counter)
    before: list[_Unit] = field(default_factory=list)
    feeds: bool = False


class _Enough(BaseException):
    """Ends a run of the model when nothing more is needed."""


class _Runner:
    def __init__(self, model: torch.nn.Module, batches: list[Any], jobs: list[Job]) -> None:
        self.model, self.batches, self.jobs = model, batches, jobs
        self.units: list[_Unit] = []  # in the order of their first calls
        self.rounded: set[int] = set()  # ids of jobs
        # Outputs of the last unit of a chain, by batch: behind rounded units, and in the float model.
        self.outputs: list[Any] = []
        self.exact: list[Any] = []

    def record(self) -> None:
        """Finds units, stages and chains by running the first batch."""
        units = _units(self.model, self.jobs)
        calls: list[tuple[_Unit, Any]] = []  # with the first argument
        given: dict[int, Any] = {}  # by id of a unit: its output
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
        # Units whose own forward is never called: the model calls the layers inside.
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
        """Inputs of the first job of each stage in the float model; the unit is not rounded yet."""
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
        """Inputs of a job behind the layers rounded so far; None: no batch reaches the job."""
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
        """Runs a unit on a batch, with the kept output of the unit before, and returns the unit's output."""
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
    """Elements of the outermost module lists with jobs inside, and jobs outside of such lists."""
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
    """Puts jobs that are called one after another with the same tensor into one stage."""
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
    """The modules that get the inputs of a job: for listed experts each expert's gate."""
    owner, _ = job.places[0]
    if job.kind == "listed":
        return [gate for gate, _, _ in listed_linears(owner)]
    modules = [getattr(place, name) for place, name in job.places]
    return list({id(module): module for module in modules}.values())


def _first(out: Any) -> Any:
    return out[0] if isinstance(out, (tuple, list)) and out else out


def _copy(out: Any) -> Any:
    """A copy of a unit's output, which the model may change in place."""
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
    """Calls hooks with the arguments of a module, given by position or by name, and with its output.

    Hooks of torch 1.13 do not get arguments given by name.
    """
    forward = module.forward
    signature = inspect.signature(forward)

    @wraps(forward)  # keeps the signature, for a module that is watched twice
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
    """The model's output for a batch: a tensor, a tuple or list of arguments, or a dict of named arguments."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
