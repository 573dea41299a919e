"""Replaces the linear layers and the experts of a model by quantized ones, in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from w4a8.nn import QuantOptions, W4A8Linear
from w4a8.progress import progress_bar
from w4a8.quantization.calibration import Found, batches_of, round_in_turn
from w4a8.quantization.expert_rows import ExpertRounding
from w4a8.quantization.float_guard import refuse_resizing
from w4a8.quantization.moe_blocks import adopt, fused_experts, listed_experts
from w4a8.quantization.plan import Job, make_plan
from w4a8.quantization.recipe import choose, moments_of
from w4a8.quantization.size import float_bytes, weight_bytes
from w4a8.quantization.skip import Skip, Skipped


@dataclass
class QuantizationReport:
    """What became of the layers of a model.

    Attributes:
        replaced: name -> the new module, as text. A shared module is there under each of its names.
        skipped: name -> why a module was left alone: linear layers, experts, and other modules with a large parameter
            (two or more dimensions, 1/10,000 or more of the model's bytes).
        float_bytes: of the weights that were replaced.
        packed_bytes: of the packed weights in their place.
        left_bytes: of the model's floating-point parameters now.
        model_bytes: of the model's parameters and packed weights now.
        weights: name -> kind of the packed weights; on the meta device, where headers are missing.
        refused: name -> why a layer cannot be packed; within a dry run, of a checkpoint of another method.
        uncalibrated: name -> which part of a module got too few inputs from ``calibration``.
    """

    replaced: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    float_bytes: int = 0
    packed_bytes: int = 0
    left_bytes: int = 0
    model_bytes: int = 0
    weights: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    uncalibrated: dict[str, str] = field(default_factory=dict)

    def measure(self, model: torch.nn.Module) -> None:
        """Takes the sizes of the model as it is now."""
        self.left_bytes, self.model_bytes = float_bytes(model), weight_bytes(model)

    @property
    def left_share(self) -> float:
        """The part of the model's bytes that stays float, 0 to 1."""
        return self.left_bytes / self.model_bytes if self.model_bytes else 0.0

    def __str__(self) -> str:
        lines = [
            f"{len(self.replaced)} replaced ({self.float_bytes:,} bytes of weights to {self.packed_bytes:,}), "
            f"{len(self.skipped)} left alone; {self.left_bytes:,} bytes stay float, {self.left_share:.1%} of the model "
            "now"
        ]
        lines += [f"  {name}: {reason}" for name, reason in self.skipped.items()]
        lines += [f"  {name}: not calibrated: {reason}" for name, reason in self.uncalibrated.items()]
        return "\n".join(lines)


class QuantizationError(ValueError):
    """A layer could not be quantized. ``report`` tells which were replaced before it: they stay, and the model runs."""

    def __init__(self, message: str, report: QuantizationReport) -> None:
        super().__init__(message)
        self.report = report


def quantize_(
    model: torch.nn.Module,
    options: QuantOptions | int | None = None,
    *,
    skip: Skip = (),
    default_skip: bool = True,
    calibration: Iterable[Any] | None = None,
    progress: bool = False,
    **fields: Any,
) -> QuantizationReport:
    """Quantizes the weights of a model in place, by default to int4; inputs are then quantized to int8 in each call.

    ``torch.nn.Linear`` becomes ``w4a8.nn.W4A8Linear`` (int8: ``W8A8Linear``), experts ``w4a8.nn.W4A8Experts``: those of
    transformers 5 with the common interface of experts (Qwen, Mixtral, DeepSeek, GLM, MiniMax, Ernie and many others),
    gpt-oss and Llama 4; of transformers 4 those of Qwen2-MoE, Qwen3-MoE, Mixtral, OLMoE, DeepSeek-V2 and -V3. Routers,
    shared experts and what a block returns stay. Float weights of a module are freed when it is replaced, so memory
    peaks at the model, the packed weights of one module, and one matrix before packing.

    The report names each module that is left alone, with the reason (docs/quantization.md, "What is left alone").
    Quantized modules are not listed. Modules on the meta device become modules there, to be filled by
    ``load_state_dict(..., assign=True)``.

    Args:
        model: for inference: the quantized layers have no gradients. An exception leaves it usable, each module either
            replaced or untouched.
        options: a :class:`QuantOptions`, or its group size alone.
        skip: other modules to leave alone, with their submodules: names, ``re:`` with a regular expression, or a
            function of name and module.
        default_skip: leave output layers and routers (``w4a8.quantization.DEFAULT_SKIP``) alone as well; in models of
            transformers also linear layers that the checkpoint did not have. False quantizes those that can be.
        calibration: batches of inputs: each a tensor, a tuple or list of arguments, or a dict of named arguments. The
            model runs on them several times. Other weights of an output feature make up for the error of a weight
            (docs/quantization.md, "Calibration"). None: each weight by itself.
        progress: show a progress bar, if tqdm is installed.
        **fields: of :class:`QuantOptions` by name: ``quantize_(model, group_size=64, symmetric=False)``.

    Returns:
        What was replaced and what was not; printing it gives a summary.

    Raises:
        TypeError, ValueError: as :class:`QuantOptions`.
        TypeError: calibration is a batch instead of a list of them.
        ValueError: calibration without a batch or with effort = 0, a name or pattern in ``skip`` that matches no
            module, or the model is itself a layer to replace; ``bits`` below those of ``values``, or with calibration
            and a model without derivatives.
        QuantizationError: a weight, a bias or an input of calibration has a NaN or an infinity, or an
            ``activation_group`` does not fit; names the layer.
    """
    options = QuantOptions.of(options, fields)
    plan = make_plan(model, options, Skipped(skip, default_skip))
    if calibration is not None and options.effort == 0:
        raise ValueError("calibration is given, expected None for effort = 0, which searches for nothing")
    batches = None if calibration is None else batches_of(calibration)
    measured = batches is not None and options.bits is not None
    choose(model, plan.jobs, options, moments_of(model, plan.jobs, batches) if measured else None)
    report = QuantizationReport(skipped=plan.skipped)
    matrices = sum(job.matrices for job in plan.jobs)
    try:
        with progress_bar(matrices, progress, "matrix", "quantizing") as advance:

            def round_job(job: Job, found: Found = None) -> None:
                if batches is not None and found is None:
                    report.uncalibrated.update(dict.fromkeys(job.names, "no batch reached it"))
                try:
                    run_job(job, advance, report, found)
                except (ValueError, RuntimeError) as error:
                    raise QuantizationError(
                        f"{job.names[0]}: {error}; {len(report.replaced)} modules were replaced before it and stay so",
                        report,
                    ) from error

            if batches is not None:
                round_in_turn(model, plan.jobs, batches, round_job)
            else:
                for job in plan.jobs:
                    round_job(job)
    finally:
        refuse_resizing(model)
        report.measure(model)
    return report


def run_job(
    job: Job,
    packed_one: Callable[[], object],
    report: QuantizationReport,
    found: Found = None,
    weights: Mapping[str, Sequence[torch.Tensor]] | None = None,
) -> None:
    """Makes the new module, and only then puts it in its places; the old one is freed on return.

    Args:
        job: of a plan.
        packed_one: called after each matrix.
        report: gets an entry.
        found: inputs of the job (:func:`round_in_turn`); None: not calibrated.
        weights: for ``fused`` experts: parameter name -> the tensors of the experts, instead of the module's own.
    """
    owner, key = job.places[0]
    old = getattr(owner, key)
    if job.kind == "linear":
        new: torch.nn.Module = W4A8Linear.from_float(old, job.options, inputs=found)
        packed_one()
    else:
        experts = fused_experts(old, weights) if job.kind == "fused" else listed_experts(owner)
        round_one = None if found is None else ExpertRounding(experts, found, job.options)
        new = experts.quantize(job.options, packed_one, round_one)
        if round_one is not None and round_one.few > 0:
            few = f"{round_one.few} of {round_one.count} experts got fewer tokens than the hidden size"
            report.uncalibrated.update(dict.fromkeys(job.names, f"{few}: those of all experts stand in"))
    new.train(old.training)
    if job.kind == "listed":
        adopt(owner, new)
    else:
        for place, name in job.places:
            setattr(place, name, new)
    report.float_bytes += sum(weight.numel() * weight.element_size() for weight in old.parameters())
    report.packed_bytes += sum(packed.numel() * packed.element_size() for packed in new.buffers())
    report.replaced.update(dict.fromkeys(job.names, repr(new)))
