"""Checkpoints of other quantization methods (readers: ``w4a8.formats``).

Codes are packed unchanged. Floats of 8 bits, times their scales, are rounded as by ``quantize_``.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from w4a8.checkpoint.folder import FolderSource, checked_bias
from w4a8.core.activation_groups import in_words
from w4a8.core.memory import on_cpu
from w4a8.core.weight import ExpertWeights
from w4a8.formats import METHODS, float8, method_of
from w4a8.formats.checks import groups_of
from w4a8.formats.float8 import Float8Scheme
from w4a8.integrations.transformers import guard
from w4a8.integrations.transformers.config import W4A8Config
from w4a8.integrations.transformers.modules import Found, Modules
from w4a8.integrations.transformers.names import FLOATS, Names, left_out, refuse_missing
from w4a8.nn import QuantOptions, W4A8Linear
from w4a8.quantization import QuantizationReport
from w4a8.quantization.moe_blocks import Each, Experts, GateUp, fused_experts, is_gpt_oss
from w4a8.quantization.plan import make_plan
from w4a8.quantization.recipe import choose

logger = logging.getLogger(__name__)

# A matrix of one expert where the model has a stack, and transformers no converter: of gpt-oss by AMD Quark
# ``model.layers.0.mlp.experts.3.gate_up_proj``, of Granite and Gemma 4 by llm-compressor gate_proj and up_proj.
_ONE_OF_A_STACK = re.compile(r"(.+\.experts)\.\d+\.(gate_up_proj|gate_proj|up_proj|down_proj)")
_HALVES = ["gate_proj", "up_proj"]  # of gate_up_proj
_EXPERT = re.compile(r".+\.experts\.(\d+)\..+")

# Beside a matrix, without an effect here: inputs are rounded by scales of their own, and a cache is not quantized.
_BESIDE = re.compile(r".+\.((input|output)_(scale|global_scale|zero_point)|[qkv]_(scale|zero_point)|prob_output_scale)")


class PrequantizedModules(Modules):
    """The quantized modules of a model."""

    def __init__(
        self,
        model: torch.nn.Module,
        source: Mapping[str, Any],
        files: Sequence[str],
        config: W4A8Config,
        beside: torch.device | None = None,
    ) -> None:
        """Finds the modules, and takes them out of the model, which is on the meta device, until ``finish``.

        ``beside``: the device that linear layers of floats of 8 bits go to, as floats; None: they are rounded.

        Raises:
            ValueError: the method of ``source``, the quantization_config, cannot be run, a tensor has no place in the
                model, or a layer has no tensors.
        """
        has_float8 = float8.has_float8(source)
        if method_of(source) is None and not has_float8:
            raise ValueError(
                f"the checkpoint is quantized with {source.get('quant_method')!r}; W4A8Config reads "
                f"{', '.join(METHODS)} and {float8.METHOD}. Load it without W4A8Config, or an unquantized checkpoint "
                "with it"
            )
        with on_cpu():  # transformers builds models with the meta device as default
            self.source = FolderSource(files, source)
        if not self.source.tensors:
            raise ValueError(f"no quantized tensors, though config.json says {source.get('quant_method')!r}")
        # Module -> parameter -> for each source of the parameter, the names of the matrices in the files, by expert;
        # one name for a stack.
        self.matrices: dict[str, dict[str, list[list[str]]]] = {}
        problems: dict[str, str] = {}  # by module: of one of its tensors
        keys, names = self.source.keys, Names(model)
        unknown = {name for name in self.source.tensors if not self._add(model, names, name, problems)}
        renamed = {key: names.renamed(key) for key, (name, _) in keys.items() if name in unknown}
        ignored = left_out(model, renamed.values())
        for key, (name, _) in keys.items():
            if name in unknown and renamed[key] not in ignored:
                raise ValueError(f"{name} is quantized, but {type(model).__name__} has no such weight")
        self.left_out = sorted(unknown)
        if unknown:
            count, owner = len(unknown), type(model).__name__
            logger.warning("%d quantized matrices are left out, which %s ignores: %s ...", count, owner, min(unknown))
        known = {name: self.source.suffixes(name) for name in self.source.tensors if name not in unknown}
        self.keys = {key for key, (name, suffix) in keys.items() if suffix in known.get(name, ())}
        for key, dtype in self.source.types.items():
            if key in self.keys or keys[key][0] in unknown or dtype in FLOATS:
                continue
            if dtype.startswith("F8"):  # transformers would load it without its scales
                raise ValueError(f"tensor {key!r} is of {dtype}, which is read of single matrices alone")
            if names.casts(key):
                raise ValueError(
                    f"tensor {key!r} is of {dtype}, but the quantization_config leaves its module in floats"
                )
        # By module: whether its matrices are floats of 8 bits; how they are rounded, or why not.
        self.are_float8: dict[str, set[bool]] = {}
        self.options: dict[str, QuantOptions] = {}
        self.reasons: dict[str, str] = {}
        if has_float8:
            self._plan(model, config, beside)
        others = [key for key in keys if keys[key][0] not in unknown]
        given = self._check_others(model, names, others, problems)
        super().__init__(
            model, self.matrices, self._find, config.activation_group, self._why_float, problems, refuses_one=True
        )
        refuse_missing(model, given)

    def _plan(self, model: torch.nn.Module, config: W4A8Config, beside: torch.device | None) -> None:
        """Chooses which modules of floats of 8 bits are rounded, and how, as for a model of floats."""
        options = config.quant_options()
        plan = make_plan(model, options, config.skipped())
        if beside is not None:
            plan.leave_linear(guard.goes_to(beside))
        for path in self.matrices:
            names = (name for lists in self.matrices[path].values() for names in lists for name in names)
            self.are_float8[path] = {isinstance(self.source.scheme(name), Float8Scheme) for name in names}
        ours = {path for path, found in self.are_float8.items() if True in found}
        jobs = [job for job in plan.jobs if ours.issuperset(job.names)]
        choose(model, jobs, options)
        self.options = {name: job.options for job in jobs for name in job.names}
        self.reasons = {name: reason for name, reason in plan.skipped.items() if name in ours}

    def _check_others(
        self, model: torch.nn.Module, names: Names, keys: Sequence[str], problems: dict[str, str]
    ) -> set[str]:
        """The parameters of the tensors that belong to no matrix.

        transformers shall report only tensors of parts that the model does not have at all, such as heads.

        Raises:
            ValueError: a part of the model has no use for one of its tensors. (For a quantized module the error comes
                when it is packed: a missing tensor is the better error.)
        """
        renamed = {key: names.renamed(key) for key in keys if key not in self.keys}
        unknown = {key: target for key, target in renamed.items() if target not in names.parameters}
        ignored = left_out(model, unknown.values()) | {name for name, _ in model.named_buffers()}
        modules, prefix = {name for name, _ in model.named_modules()}, f"{model.base_model_prefix}."
        modules.discard(model.base_model_prefix)
        theirs = []
        for key, target in unknown.items():
            if target in ignored or _BESIDE.fullmatch(key) is not None:
                continue
            spellings = (target, target.removeprefix(prefix), prefix + target)
            owners = {each[: point.start()] for each in spellings for point in re.finditer("[.]", each)}
            if not owners & modules:
                theirs.append(re.escape(target))
                continue
            problem = f"tensor {key!r} is not read: {type(model).__name__} has no use for it"
            ours = owners & self.matrices.keys()
            if not ours:
                raise ValueError(problem)
            problems.setdefault(ours.pop(), problem)
        model._keys_to_ignore_on_load_unexpected = {rf"^(?!(?:{'|'.join(theirs)})$)"}
        return {name for key in renamed for name in names.all_renamed(key)}

    def _add(self, model: torch.nn.Module, names: Names, name: str, problems: dict[str, str]) -> bool:
        """Whether the model has a module for a matrix."""
        parameter, sources, pattern = names.parameter(name if self.source.is_stacked else f"{name}.weight")
        one = _ONE_OF_A_STACK.fullmatch(name)
        if parameter is None and one is not None:
            owner, leaf = one.groups()
            parameter, sources, pattern = names.parameter(f"{owner}.{'gate_up_proj' if leaf in _HALVES else leaf}")
            if leaf in _HALVES:
                sources, pattern = _HALVES, leaf
            joined = parameter is not None and leaf == "gate_up_proj"
            if joined and not is_gpt_oss(model.get_submodule(parameter.rpartition(".")[0])):
                parameter = None  # whether rows alternate is not known
        if parameter is None:
            return False
        parts = names.all_renamed(f"{name}.weight")
        if len(parts) > 1:
            raise ValueError(f"{name} is quantized, but {type(model).__name__} makes {' and '.join(parts)} of it")
        path, _, leaf = parameter.rpartition(".")
        lists = self.matrices.setdefault(path, {}).setdefault(leaf, [[] for _ in sources or [None]])
        experts, number = lists[sources.index(pattern) if sources else 0], _EXPERT.fullmatch(name)
        if leaf != "weight" and number is not None and int(number[1]) != len(experts):
            problems.setdefault(path, f"{name} is there, but expert {len(experts)} is not")
        experts.append(name)
        return True

    def finish(self, model: torch.nn.Module) -> QuantizationReport:
        """As :meth:`Modules.finish`."""
        report = super().finish(model)
        if not report.refused:
            self._say_int8()
        report.skipped.update(dict.fromkeys(self.left_out, f"{type(model).__name__} ignores it"))
        return report

    def _say_int8(self) -> None:
        """Logs that weight-only modules were loaded, and the type of their activations."""
        names = (name for lists in self.matrices.values() for each in lists.values() for some in each for name in some)
        if any(self.source.readable(name).weight_only is not None for name in names):
            logger.info(
                "weights made for float activations run with activations rounded to int8 %s (activation_group)",
                in_words(self.activation_group),
            )

    def _why_float(self, parameter: str) -> str:
        return self.reasons.get(parameter.rpartition(".")[0], "it is not quantized in the checkpoint")

    def _find(self, name: str, old: torch.nn.Module) -> Found:
        """What a module is packed from; of floats of 8 bits the module itself."""
        are_float8, matrices = self.are_float8.get(name, ()), self.matrices[name]
        if len(are_float8) > 1:
            raise ValueError("some of its matrices are floats of 8 bits, others are not")
        if True in are_float8:
            return self._round(name)
        if type(old) is torch.nn.Linear:
            return [self.source.weight(matrices["weight"][0][0], old.weight.shape, old.bias is not None)]
        experts, shards = self._shards(old, matrices)
        if experts.activation is None:
            raise ValueError(f"activation {type(experts.act_fn).__name__} is not one of the operator")
        (count, hidden, inner), biased = experts.sizes, experts.w13_bias is not None
        shapes = {"w13": (2 * inner, hidden), "w2": (hidden, inner)}
        found = {}
        for shard, names in shards.items():
            shape, scheme = shapes.get(shard, (inner, hidden)), self.source.readable(names[0])
            groups_of(shape[-1], scheme.group_size, names[0], scheme.weight)
            if self.source.is_stacked:
                shape = (count, *shape)
            found[shard] = [self.source.weight(each, shape, biased) for each in names]
        return ExpertWeights(name, found, interleaved=True)

    def _round(self, path: str) -> torch.nn.Module:
        """The packed module of floats of 8 bits; one matrix, or one expert, is read at a time."""
        old, matrices, options = self.old[path], self.matrices[path], self.options.get(path)
        if list(matrices) == ["weight"]:
            name = matrices["weight"][0][0]
            weight, bias = self.source.floats(name, old.weight.shape)
            bias = checked_bias(bias, getattr(old, "bias", None) is not None, name)
            bias = None if bias is None else bias.to(weight.device)  # within a dry run its values were looked at
            new = old if options is None else torch.nn.Linear(1, 1, bias is not None, device="meta")
            for leaf, tensor in (("weight", weight), ("bias", bias)):
                if tensor is not None:
                    setattr(new, leaf, _parameter(tensor if new is not old else tensor.to(getattr(old, leaf).dtype)))
            return old if options is None else W4A8Linear.from_float(new, options)
        experts, shards = self._shards(old, matrices)
        _, hidden, intermediate = experts.sizes

        def of_shard(shard: str) -> Sequence[torch.Tensor]:
            shape = (hidden, intermediate) if shard == "w2" else (intermediate, hidden)
            return Each(shards[shard], lambda name: self.source.floats(name, shape)[0])

        if experts.w13_bias is not None or (options is None and not isinstance(experts.w13, torch.Tensor)):
            raise ValueError(f"floats of 8 bits of a {type(old).__name__}, which is not supported")
        w2, w13 = of_shard("w2"), GateUp(of_shard("w1"), of_shard("w3")) if experts.gated else of_shard("w1")
        if options is not None:
            return Experts(w13, w2, experts.act_fn, numbers=experts.numbers, gated=experts.gated).quantize(options)
        for leaf in matrices:
            floats = torch.empty_like(getattr(old, leaf), device=guard.device)
            for expert, target in enumerate(floats):
                target.copy_((w2 if leaf == "down_proj" else w13)[expert])
            setattr(old, leaf, _parameter(floats))
        return old

    def _shards(
        self, old: torch.nn.Module, matrices: Mapping[str, list[list[str]]]
    ) -> tuple[Experts, dict[str, list[str]]]:
        """The experts of a module, and the names of their matrices by shard: of each expert, or of a stack."""
        experts = fused_experts(old)
        if experts is None:
            raise ValueError(f"quantized {sorted(matrices)} of a {type(old).__name__}, which is not supported")
        fused = is_gpt_oss(old)
        if self.source.is_stacked and not fused:
            raise ValueError(f"all experts of a {type(old).__name__} in one tensor: do its rows alternate?")
        given = {leaf: len(lists) for leaf, lists in matrices.items()}
        up = "gate_up_proj" if experts.gated else "up_proj"
        expected = {up: 1 if fused or not experts.gated else 2, "down_proj": 1}
        if given != expected:
            raise ValueError(f"matrices of {given} in the files, expected {expected}")
        count = experts.sizes[0]
        for lists in matrices.values():
            found = [len(names) for names in lists]
            if not self.source.is_stacked and set(found) != {count}:
                raise ValueError(f"matrices of {found} experts, expected {count}")
        sources = [*matrices[up], *matrices["down_proj"]]
        apart = ("w1", "w3", "w2") if experts.gated else ("w1", "w2")
        return experts, dict(zip(("w13", "w2") if fused else apart, sources))


def _parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor, requires_grad=False)
