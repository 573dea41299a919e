"""Quantizes modules while transformers loads a checkpoint: each as soon as all of its weights are there."""

from __future__ import annotations

from collections import UserList
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from transformers.core_model_loading import Concatenate, ConversionOps, MergeModulelist, WeightConverter

from w4a8.core.pages import Pages
from w4a8.integrations.transformers.config import W4A8Config
from w4a8.integrations.transformers.guard import goes_to
from w4a8.integrations.transformers.names import refuse_made_up
from w4a8.integrations.transformers.tied import give_stand_ins
from w4a8.quantization import QuantizationError, QuantizationReport
from w4a8.quantization.moe_blocks import GateUp
from w4a8.quantization.plan import Job, make_plan
from w4a8.quantization.quantize import run_job
from w4a8.quantization.recipe import choose
from w4a8.quantization.skip import NOT_LOADED

# A parameter as transformers gives it: a tensor, or the experts' tensors, not stacked.
Value = Sequence[torch.Tensor]


@dataclass
class _Pending:
    """A module that waits for its weights."""

    job: Job
    module: torch.nn.Module
    missing: set[str]
    given: dict[str, Value] = field(default_factory=dict)


class Collector:
    """The modules of a model to quantize, and the weights read so far.

    Attributes:
        report: what became of the modules.
    """

    def __init__(
        self, model: torch.nn.Module, config: W4A8Config, files: Sequence[str], beside: torch.device | None = None
    ) -> None:
        """Plans, for a model on the meta device whose weights are mapped from files.

        Args:
            model: of transformers.
            config: how to quantize.
            files: of the weights.
            beside: the device that linear layers go to, as floats; None: they are quantized.

        Raises:
            ValueError: an ``activation_group`` that does not divide the group size, an entry of ``skip`` that matches
                no module, or ``bits`` below those of ``values``.
        """
        self.files = files
        self.default_skip = config.default_skip
        self.error: QuantizationError | None = None
        self.pending: dict[str, tuple[_Pending, str]] = {}  # by name in the model: module and parameter
        options = config.quant_options()
        plan = make_plan(model, options, config.skipped())
        if beside is not None:
            plan.leave_linear(goes_to(beside))
        choose(model, plan.jobs, options)
        self.report = QuantizationReport(skipped=plan.skipped)
        # transformers ties weights after loading, so the plan could not see ties.
        tied = {**model.all_tied_weights_keys, **{v: k for k, v in model.all_tied_weights_keys.items()}}
        for job in plan.jobs:
            partner = next((tied[f"{name}.weight"] for name in job.names if f"{name}.weight" in tied), None)
            if job.kind == "linear" and partner is not None:
                reason = f"its weight is shared with {partner.rpartition('.')[0]}"
                self.report.skipped.update(dict.fromkeys(job.names, reason))
                continue
            owner, key = job.places[0]
            module = getattr(owner, key)
            parameters = [name for name, _ in module.named_parameters()]
            pending = _Pending(job, module, set(parameters))
            self.pending.update({f"{name}.{part}": (pending, part) for name in job.names for part in parameters})

    def give(self, name: str, value: Value) -> None:
        """Takes a parameter, and replaces the module after its last parameter.

        An error is kept for ``finish``: transformers would only log it.
        """
        if self.error is not None:
            return
        pending, part = self.pending[name]
        expected, shape = pending.module.get_parameter(part).shape, _shape_of(value)
        if shape != expected:  # transformers does not check shapes of quantized parameters
            problem = f"{name} has shape {list(shape)}, but {list(expected)} is expected"
            self.error = QuantizationError(problem, self.report)
            return
        pending.given[part] = value
        pending.missing.discard(part)
        if not pending.missing:
            self._replace(pending)

    def finish(self, model: torch.nn.Module) -> QuantizationReport:
        """Quantizes modules with missing weights (new heads), with the weights that transformers has made up.

        Linear layers without a weight are left alone, unless ``default_skip`` is False.

        Raises:
            QuantizationError: a weight has another shape, a NaN or an infinity, or an ``activation_group`` does not
                fit; names the parameter or the module.
            ValueError: the checkpoint lacks another weight; names it.
        """
        if self.error is None:
            refuse_made_up(model, [name for name, (pending, part) in self.pending.items() if part in pending.missing])
        for pending, _ in list(self.pending.values()):
            if self.default_skip and pending.job.kind == "linear" and "weight" in pending.missing:
                self.report.skipped.update(dict.fromkeys(pending.job.names, NOT_LOADED))
            elif self.error is None and pending.missing:
                pending.missing.clear()
                self._replace(pending)
        if self.error is not None:
            raise self.error
        self.pending.clear()
        self.report.measure(model)
        return self.report

    def _replace(self, pending: _Pending) -> None:
        stacks = {}
        for part, value in pending.given.items():
            if not isinstance(value, torch.Tensor):
                stacks[part] = value
                continue
            path, _, leaf = part.rpartition(".")
            setattr(pending.module.get_submodule(path), leaf, torch.nn.Parameter(value, requires_grad=False))
        values, pages, packed = list(pending.given.values()), Pages(self.files), count()

        def packed_one() -> None:  # of experts: w13 and w2 in turns
            expert, is_w2 = divmod(next(packed), 2)
            if is_w2 and pending.job.kind == "fused":
                pages.release(tensor for value in values for tensor in _of_expert(value, expert))

        try:
            run_job(pending.job, packed_one, self.report, weights=stacks)
        except (ValueError, RuntimeError) as error:
            self.error = QuantizationError(f"{pending.job.names[0]}: {error}", self.report)
            self.error.__cause__ = error
        else:
            owner, key = pending.job.places[0]
            give_stand_ins(getattr(owner, key), pending.module)
        pages.release(tensor for value in values for tensor in _tensors(value))
        pending.given.clear()
        del pending.module


def _tensors(value: Value) -> list[torch.Tensor]:
    """All tensors of a parameter."""
    return [value] if isinstance(value, torch.Tensor) else [t for e in range(len(value)) for t in _of_expert(value, e)]


def _shape_of(value: Value) -> torch.Size:
    """The shape of all tensors of a value; 0 for a dimension in which experts differ."""
    if isinstance(value, torch.Tensor):
        return value.shape
    shapes = {tuple(tensor.shape for tensor in _of_expert(value, expert)) for expert in range(len(value))}
    one = shapes.pop()
    if shapes or any(len(shape) != 2 or shape[1] != one[0][1] for shape in one):
        return torch.Size((len(value), 0, 0))
    return torch.Size((len(value), sum(shape[0] for shape in one), one[0][1]))


def _of_expert(value: Value, expert: int) -> list[torch.Tensor]:
    return [value.gates[expert], value.ups[expert]] if isinstance(value, GateUp) else [value[expert]]


class _Op(ConversionOps):
    """An operation that stays one object for the model: transformers copies operations for each parameter."""

    def __init__(self, collector: Collector) -> None:
        self.collector = collector

    def __deepcopy__(self, memo: dict[int, Any]) -> _Op:
        return self

    @property
    def reverse_op(self) -> ConversionOps:
        raise NotImplementedError("rounding cannot be undone")


class Give(_Op):
    """Gives parameters to the collector; transformers sets those that the collector does not take."""

    def convert(
        self, input_dict: dict[str, Any], full_layer_name: str, missing_keys: set[str] | None = None, **_: Any
    ) -> dict[str, torch.Tensor]:
        """One parameter, which ``input_dict`` may wrap into a list; or those into which one tensor was split."""
        others = {}
        for name, value in input_dict.items() if len(input_dict) > 1 else [(full_layer_name, *input_dict.values())]:
            if isinstance(value, list) and len(value) == 1:
                value = value[0]
            if name not in self.collector.pending:
                others[name] = value
                continue
            if missing_keys is not None:
                missing_keys.discard(name)
            self.collector.give(name, value)
        return others


class Unstacked(_Op):
    """Leaves the experts' tensors apart: stacking makes several copies of a layer."""

    def __init__(self, collector: Collector, operations: list[ConversionOps]) -> None:
        super().__init__(collector)
        self.operations = operations

    def convert(
        self,
        input_dict: dict[str, list[torch.Tensor]],
        source_patterns: list[str],
        target_patterns: list[str],
        full_layer_name: str,
        **options: Any,
    ) -> dict[str, Any]:
        """The tensors of each source, in the order of the experts."""
        if full_layer_name not in self.collector.pending:
            for operation in self.operations:
                input_dict = operation.convert(
                    input_dict,
                    source_patterns=source_patterns,
                    target_patterns=target_patterns,
                    full_layer_name=full_layer_name,
                    **options,
                )
            return input_dict
        lists = [input_dict[pattern] for pattern in source_patterns]
        if any(len(tensors) != len(lists[0]) for tensors in lists):
            raise ValueError(f"{full_layer_name}: {[len(tensors) for tensors in lists]} tensors of {source_patterns}")
        # Of a list transformers would take the first.
        return {target_patterns[0]: GateUp(*lists) if len(lists) == 2 else UserList(lists[0])}


def unstacked(converter: Any, collector: Collector) -> WeightConverter | None:
    """The converter without the copies, or None if the converter does more than stacking experts."""
    if not isinstance(converter, WeightConverter) or len(converter.target_patterns) != 1:
        return None
    merge, *others = converter.operations
    if type(merge) is not MergeModulelist or merge.dim != 0 or len(converter.source_patterns) != 1 + len(others):
        return None
    if others and (type(others[0]) is not Concatenate or others[0].dim != 1 or len(others) != 1):
        return None
    other = WeightConverter(
        list(converter._original_source_patterns),
        list(converter._original_target_patterns),
        [Unstacked(collector, converter.operations)],
    )
    other.scope_prefix = converter.scope_prefix
    other.base_model_prefix = getattr(converter, "base_model_prefix", None)
    return other
