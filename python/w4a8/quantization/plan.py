"""Finds what can be replaced in a model, before anything is replaced."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from w4a8.nn import QuantOptions
from w4a8.nn.hooks import has_hooks, has_own_forward
from w4a8.quantization.moe_blocks import (
    Experts,
    fused_experts,
    has_stacks,
    listed_experts,
    stacks_problem,
)
from w4a8.quantization.readers import reader_of
from w4a8.quantization.size import Large
from w4a8.quantization.skip import Skipped, heads

_WEIGHT_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_LOST = "it has hooks, which would be lost"


@dataclass
class Job:
    """One replacement.

    Attributes:
        kind: ``linear``, ``fused`` (experts of transformers 5) or ``listed`` (a block of transformers 4).
        names: of the module in the model; a shared one has several.
        places: owner and key of the module; for ``listed`` the block itself, which stays.
        matrices: how many will be packed.
        options: of rounding the matrices.
    """

    kind: str
    names: list[str]
    places: list[tuple[torch.nn.Module, str]]
    matrices: int = 1
    options: QuantOptions = field(default_factory=QuantOptions)


@dataclass
class Plan:
    """Jobs in the order of the model, and the reason for each module that is left alone."""

    jobs: list[Job] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def leave_linear(self, reason: str) -> None:
        """Leaves all linear layers alone, for this reason."""
        self.skipped.update((name, reason) for job in self.jobs if job.kind == "linear" for name in job.names)
        self.jobs = [job for job in self.jobs if job.kind != "linear"]


class _Planner:
    def __init__(self, model: torch.nn.Module, options: QuantOptions, skip: Skipped) -> None:
        self.model = model
        self.options = options
        self.large = Large(model)  # parameters that are named if they stay
        self.skip = skip
        self.plan = Plan()
        self.found: dict[int, Job] = {}  # by id of the module, in the order of the model
        self.heads: dict[int, str] = {}  # by id of an output layer: why it is left alone
        self.excluded: dict[int, str] = {}  # by id of a module to leave alone under all of its names: the reason

    def visit(self, module: torch.nn.Module, name: str, owner: torch.nn.Module | None, key: str, left: bool) -> None:
        """Looks at a module and its submodules; ``left``: a module above is left alone."""
        left = left or (owner is not None and bool(self.skip(name, module)))
        if isinstance(module, torch.nn.Linear):
            reason = "skip" if left else self.heads.get(id(module)) or self.linear_problem(module, name)
            self.add(module, name, owner, key, reason)
            return
        fused = fused_experts(module)
        if fused is not None:
            reason = "skip" if left else self.experts_problem(module, fused)
            self.add(module, name, owner, key, reason, Job("fused", [], [], 2 * len(fused.w2)))
            return
        self.name_large(module, name, left)
        below = [(child_key, child) for child_key, child in module._modules.items() if child is not None]
        listed = listed_experts(module)
        if listed is not None:
            reason = "skip" if left or self.skip(_join(name, "experts"), module.experts) else None
            if reason is None:
                reason = self.experts_problem(module.experts, listed)
            job = Job("listed", [], [], 2 * len(listed.w2))
            self.add(module, _join(name, "experts"), module, "experts", reason, job)
            if reason is None:
                below = [(child_key, child) for child_key, child in below if child_key != "experts"]
        for child_key, child in below:
            self.visit(child, _join(name, child_key), module, child_key, left)

    def add(
        self,
        module: torch.nn.Module,
        name: str,
        owner: torch.nn.Module | None,
        key: str,
        reason: str | None,
        job: Job | None = None,
    ) -> None:
        """Notes the job, or the reason, of a module under one of its names."""
        if reason is None and owner is None:
            raise ValueError(
                f"model is itself a {type(module).__name__}, which cannot be replaced in place: use "
                "w4a8.nn.W4A8Linear.from_float or w4a8.nn.W4A8Experts.from_float"
            )
        reason = self.excluded.get(id(module), reason)
        if reason is not None:
            self.plan.skipped[name] = reason
            self.leave(id(module), reason)
            return
        entry = self.found.setdefault(id(module), job or Job("linear", [], []))
        entry.names.append(name)
        if not any(place[0] is owner and place[1] == key for place in entry.places):
            entry.places.append((owner, key))

    def name_large(self, module: torch.nn.Module, name: str, left: bool) -> None:
        """Names a module of another kind with large parameters of its own; of the model itself, the parameters."""
        large = self.large.of(module)
        reason = "skip" if left else f"{', '.join(large)} of {type(module).__name__}, which is not replaced"
        if not left and has_stacks(module):
            reason = stacks_problem(module) or reason
        if large:
            self.plan.skipped.update(dict.fromkeys([name] if name else large, reason))

    def leave(self, key: int, reason: str) -> None:
        """Leaves a module alone, and drops its job."""
        self.excluded[key] = reason
        earlier = self.found.pop(key, None)
        if earlier is not None:
            self.plan.skipped.update(dict.fromkeys(earlier.names, reason))

    def form_problem(self, rows: int, columns: int) -> str:
        """Why a matrix [rows, columns] cannot be packed, or ""."""
        return self.options.form.problem(rows, columns, self.options.group_size)

    def linear_problem(self, linear: torch.nn.Linear, name: str) -> str | None:
        """Why a linear layer cannot be replaced, or None."""
        if type(linear) is not torch.nn.Linear:
            return f"{type(linear).__name__} is a subclass of Linear, which may do something else"
        reader = reader_of(self.model, name)
        if reader is not None:
            return f"{reader} reads its weight or bias itself"
        if has_hooks(linear) or has_own_forward(linear):
            return _LOST
        form = self.form_problem(linear.out_features, linear.in_features)
        return self.weight_problem(linear.weight) or form or None

    def experts_problem(self, module: torch.nn.Module, experts: Experts) -> str | None:
        """Why the experts of a module cannot be replaced, or None."""
        if any(map(has_hooks, module.modules())):
            return _LOST
        if experts.activation is None:
            return f"activation {type(experts.act_fn).__name__} is not one of the operator"
        _, hidden, intermediate = experts.sizes
        problem = self.weight_problem(experts.w2[0])
        for what, rows, columns in (("hidden", intermediate, hidden), ("intermediate", hidden, intermediate)):
            form = self.form_problem(rows, columns)
            problem = problem or (f"{what} size = {columns}: {form}" if form else None)
        return problem

    def weight_problem(self, weight: torch.Tensor) -> str | None:
        """Why a weight cannot be read as floats on a CPU, or None."""
        if type(weight) not in (torch.nn.Parameter, torch.Tensor) or weight.dtype not in _WEIGHT_TYPES:
            return f"its weight is a {type(weight).__name__} of {weight.dtype}: not float32, bfloat16 or float16"
        if weight.device.type not in ("cpu", "meta"):
            return f"its weight is on {weight.device}, and the operators run on CPUs"
        return None

    def leave_shared(self, model: torch.nn.Module) -> None:
        """Leaves a linear layer alone if a module that stays, such as an embedding, has the same weight."""
        holders: dict[int, list[tuple[int, str]]] = {}
        for name, module in model.named_modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    holders.setdefault(id(parameter), []).append((id(module), name))
        for key, entry in list(self.found.items()):
            if entry.kind == "linear":
                weight = getattr(*entry.places[0]).weight
                others = [name for other, name in holders[id(weight)] if other not in self.found]
                if others:
                    self.leave(key, f"its weight is shared with {others[0]}")

    def finish(self) -> Plan:
        """The jobs, linear layers with the same weight and bias in one."""
        tied: dict[tuple[int, int], Job] = {}
        for job in self.found.values():
            first = job
            if job.kind == "linear":
                linear = getattr(*job.places[0])
                first = tied.setdefault((id(linear.weight), id(linear.bias)), job)
            if first is job:
                self.plan.jobs.append(job)
            else:
                first.names += job.names
                first.places += job.places
        return self.plan


def _join(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key


def make_plan(model: torch.nn.Module, options: QuantOptions, skip: Skipped) -> Plan:
    """Finds what to replace.

    Args:
        model: is not changed.
        options: of quantizing.
        skip: what to leave alone.

    Raises:
        ValueError: the model itself would have to be replaced, or an entry of ``skip`` names nothing in it.
    """
    skip.check(model)
    planner = _Planner(model, options, skip)
    if skip.default_skip:
        planner.heads = heads(model)
    planner.visit(model, "", None, "", left=False)
    planner.leave_shared(model)
    return planner.finish()
