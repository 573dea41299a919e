"""Checkpoints of other quantization methods (readers: ``w4a8.formats``).

Codes are packed unchanged. Floats of 8 bits, times their scales, are rounded as by ``quantize_``.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers.utils.logging import is_progress_bar_enabled

from w4a8.checkpoint.folder import say_int8
from w4a8.core.experts import ExpertSizes
from w4a8.core.matrix import Matrix
from w4a8.core.memory import on_cpu
from w4a8.core.packer import ExpertPacker
from w4a8.core.words import weights_in_words
from w4a8.formats import METHODS, LeftOut, Scheme, float8, method_of, scheme_of
from w4a8.formats.float8 import Float8Scheme
from w4a8.formats.format import all_suffixes, quantized_suffixes
from w4a8.formats.matrix import groups_of
from w4a8.formats.scheme import wanted_by_all
from w4a8.integrations.transformers import guard
from w4a8.integrations.transformers.config import W4A8Config
from w4a8.integrations.transformers.memory import Pages
from w4a8.integrations.transformers.names import FLOATS, Names, left_out, refuse_missing, slices
from w4a8.integrations.transformers.tied import packed_experts, put, stand_in, untie
from w4a8.nn import QuantOptions, W4A8Linear, linear_from_matrix
from w4a8.progress import progress_bar
from w4a8.quantization import QuantizationReport
from w4a8.quantization.moe_blocks import Each, Experts, GateUp, fused_experts, is_gpt_oss
from w4a8.quantization.plan import make_plan
from w4a8.quantization.readers import reader_of
from w4a8.quantization.recipe import choose
from w4a8.quantization.size import Large

logger = logging.getLogger(__name__)

# MXFP4 as gpt-oss has it: all experts in one tensor, ``model.layers.0.mlp.experts.gate_up_proj_blocks``.
_STACKED = re.compile(r"(.+\.experts\.\w+)_(blocks|scales|bias)")
# A matrix of one expert where the model has a stack, and transformers no converter: of gpt-oss by AMD Quark
# ``model.layers.0.mlp.experts.3.gate_up_proj``, of Granite and Gemma 4 by llm-compressor gate_proj and up_proj.
_ONE_OF_A_STACK = re.compile(r"(.+\.experts)\.\d+\.(gate_up_proj|gate_proj|up_proj|down_proj)")
_HALVES = ["gate_proj", "up_proj"]  # of gate_up_proj
_EXPERT = re.compile(r".+\.experts\.(\d+)\..+")

# Beside a matrix, without an effect here: inputs are rounded by scales of their own, and a cache is not quantized.
_BESIDE = re.compile(r".+\.((input|output)_(scale|global_scale|zero_point)|[qkv]_(scale|zero_point)|prob_output_scale)")


def _has_codes(parts: Mapping[str, Any]) -> bool:
    """Whether ``weight`` of some lazy tensors is a matrix of int8 or float8_e4m3fn."""
    shape = parts["weight"].get_shape()
    return len(shape) == 2 and shape[0] > 0 and parts["weight"].get_dtype() in ("I8", "F8_E4M3")


class ModulesApart:
    """The modules of a model that are packed from a file, without transformers, which loads all others.

    Attributes:
        old: the float modules by name, on the meta device.
        activation_group: of :class:`W4A8Config`.
        refuses_one: within a dry run a module that cannot be packed is reported, and the next one is checked.
    """

    old: dict[str, torch.nn.Module]
    activation_group: int | None
    refuses_one = False

    def pack(self, name: str) -> torch.nn.Module:
        """The packed module; the float module itself if it is left alone.

        Raises:
            ValueError: the module cannot be packed.
            RuntimeError: the operators do not have the values.
        """
        raise NotImplementedError

    def kinds(self, name: str) -> str:
        """Kinds of weights of a module, in words, within a dry run."""
        raise NotImplementedError

    def why_float(self, parameter: str) -> str:
        """Why a large parameter stays a float."""
        raise NotImplementedError

    def finish(self, model: torch.nn.Module) -> QuantizationReport:
        """Packs the modules one by one, and puts them into the model.

        Raises:
            ValueError: a tensor is missing, or has a wrong shape or wrong values; names the module.
        """
        report, shows = QuantizationReport(), is_progress_bar_enabled()
        with on_cpu(), progress_bar(len(self.old), shows, "layer", "Packing") as advance:
            for name, old in self.old.items():
                try:
                    new = self.pack(name)
                except (ValueError, RuntimeError) as error:
                    if not self.refuses_one or guard.device != "meta":
                        raise ValueError(f"{name}: {error}") from error
                    report.refused[name] = str(error)
                    put(model, name, old.eval())
                    continue
                put(model, name, new.eval())
                if new is old:
                    report.skipped[name] = self.why_float(f"{name}.weight")
                    advance()
                    continue
                report.replaced[name] = repr(new)
                kinds = self.kinds(name) if guard.device == "meta" else ""
                if kinds:
                    report.weights[name] = kinds
                report.float_bytes += sum(weight.numel() * weight.element_size() for weight in old.parameters())
                report.packed_bytes += sum(packed.numel() for packed in new.buffers())
                self.finish_one(model, name, report)
                advance()
        large = Large(model)
        for name, module in model.named_modules():
            for parameter in large.of(module):
                report.skipped[name or parameter] = self.why_float(f"{name}.{parameter}")
        report.measure(model)
        return report

    def finish_one(self, model: torch.nn.Module, name: str, report: QuantizationReport) -> None:
        """Called when a module is in the model."""


class PrequantizedModules(ModulesApart):
    """The quantized modules of a model."""

    refuses_one = True

    def __init__(
        self,
        model: torch.nn.Module,
        source: Mapping[str, Any],
        files: Sequence[str],
        config: W4A8Config,
    ) -> None:
        """Finds the modules, and takes them out of the model, which is on the meta device, until ``finish``.

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
        self.rules = float8.rules_with_float8(source)
        default = getattr(self.rules, "default", None)
        self.stacked = isinstance(default, Scheme) and default.facts.is_stacked
        self.files = files
        self.activation_group = config.activation_group
        codes: dict[str, str] = {}  # tensors that are no floats of 16 bits or more: their types by the keys
        self.tensors: dict[str, dict[str, Any]] = {}  # by name of the matrix, then last part of the tensor's name
        keys: dict[str, tuple[str, str]] = {}
        with on_cpu():  # transformers builds models with the meta device as default
            for key, part in slices(files):
                stacked = _STACKED.fullmatch(key) if self.stacked else None
                name, suffix = keys[key] = stacked.groups() if stacked else key.rpartition(".")[::2]
                if suffix in all_suffixes():
                    self.tensors.setdefault(name, {})[suffix] = part
                if part.get_dtype() not in FLOATS:
                    codes[key] = part.get_dtype()
        self.tensors = {name: parts for name, parts in self.tensors.items() if self._is_quantized(name)}
        if not self.tensors:
            raise ValueError(f"no quantized tensors, though config.json says {source.get('quant_method')!r}")
        self.old = {}
        # Module -> parameter -> for each source of the parameter, the names of the matrices in the files, by expert;
        # one name for a stack.
        self.matrices: dict[str, dict[str, list[list[str]]]] = {}
        self.unread: dict[str, str] = {}  # module: the problem of one of its tensors
        self._kinds: dict[str, None] = {}  # of a module that is packed on the meta device
        names = Names(model)
        unknown = {name for name in self.tensors if not self._add(model, names, name)}
        renamed = {key: names.renamed(key) for key, (name, _) in keys.items() if name in unknown}
        ignored = left_out(model, renamed.values())
        for key, (name, _) in keys.items():
            if name in unknown and renamed[key] not in ignored:
                raise ValueError(f"{name} is quantized, but {type(model).__name__} has no such weight")
        self.left_out = sorted(unknown)
        if unknown:
            count, owner = len(unknown), type(model).__name__
            logger.warning("%d quantized matrices are left out, which %s ignores: %s ...", count, owner, min(unknown))
        for name in unknown:
            del self.tensors[name]
        self.schemes = {name: self._found(name) for name in self.tensors}
        known = {name: _known(scheme) for name, scheme in self.schemes.items()}
        self.keys = {key for key, (name, suffix) in keys.items() if suffix in known.get(name, ())}
        for key, dtype in codes.items():
            if key in self.keys or keys[key][0] in unknown:
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
            self._plan(model, config)
        given = self._check_others(model, names, [key for key in keys if keys[key][0] not in unknown])
        for name, old in self.old.items():
            hole = torch.nn.Module()
            stand_in(hole, old)
            put(model, name, hole)
            untie(model, name)
        refuse_missing(model, given)

    def _found(self, name: str) -> Scheme | LeftOut:
        parts = self.tensors[name]
        return scheme_of(self.rules, name, parts, partial(_has_codes, parts))

    def _plan(self, model: torch.nn.Module, config: W4A8Config) -> None:
        """Chooses which modules of floats of 8 bits are rounded, and how, as for a model of floats."""
        options = config.quant_options()
        plan = make_plan(model, options, config.skipped())
        for path in self.old:
            names = (name for lists in self.matrices[path].values() for names in lists for name in names)
            self.are_float8[path] = {isinstance(self.schemes[name], Float8Scheme) for name in names}
        ours = {path for path, found in self.are_float8.items() if True in found}
        jobs = [job for job in plan.jobs if ours.issuperset(job.names)]
        choose(model, jobs, options)
        self.options = {name: job.options for job in jobs for name in job.names}
        self.reasons = {name: reason for name, reason in plan.skipped.items() if name in ours}

    def _check_others(self, model: torch.nn.Module, names: Names, keys: Sequence[str]) -> set[str]:
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
            ours = owners & self.old.keys()
            if not ours:
                raise ValueError(problem)
            self.unread.setdefault(ours.pop(), problem)
        model._keys_to_ignore_on_load_unexpected = {rf"^(?!(?:{'|'.join(theirs)})$)"}
        return {name for key in renamed for name in names.all_renamed(key)}

    def _is_quantized(self, name: str) -> bool:
        parts = self.tensors[name]
        if any(suffix in quantized_suffixes() for suffix in parts):
            return True
        return "weight" in parts and isinstance(self._found(name), Scheme)

    def _add(self, model: torch.nn.Module, names: Names, name: str) -> bool:
        """Whether the model has a module for a matrix."""
        parameter, sources, pattern = names.parameter(name if self.stacked else f"{name}.weight")
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
        reader = reader_of(model, path)
        if reader is not None:
            raise ValueError(f"{name} is quantized, but {reader} reads its weight or bias itself")
        self.old.setdefault(path, model.get_submodule(path))
        lists = self.matrices.setdefault(path, {}).setdefault(leaf, [[] for _ in sources or [None]])
        experts, number = lists[sources.index(pattern) if sources else 0], _EXPERT.fullmatch(name)
        if leaf != "weight" and number is not None and int(number[1]) != len(experts):
            self.unread.setdefault(path, f"{name} is there, but expert {len(experts)} is not")
        experts.append(name)
        return True

    def finish(self, model: torch.nn.Module) -> QuantizationReport:
        """As :meth:`ModulesApart.finish`."""
        report = super().finish(model)
        if not report.refused:
            say_int8(map(self._scheme, self.tensors), self.activation_group)
        report.skipped.update(dict.fromkeys(self.left_out, f"{type(model).__name__} ignores it"))
        return report

    def kinds(self, name: str) -> str:
        """As :meth:`ModulesApart.kinds`."""
        return " and ".join(self._kinds)

    def why_float(self, parameter: str) -> str:
        """As :meth:`ModulesApart.why_float`."""
        return self.reasons.get(parameter.rpartition(".")[0], "it is not quantized in the checkpoint")

    def pack(self, name: str) -> torch.nn.Module:
        """As :meth:`ModulesApart.pack`."""
        self._kinds.clear()
        are_float8 = self.are_float8.get(name, ())
        if len(are_float8) > 1:
            raise ValueError("some of its matrices are floats of 8 bits, others are not")
        new = self._round(name) if True in are_float8 else self._pack(self.old[name], self.matrices[name])
        if name in self.unread:
            raise ValueError(self.unread[name])
        return new

    def _pack(self, old: torch.nn.Module, matrices: Mapping[str, list[list[str]]]) -> torch.nn.Module:
        """The packed module of a module of codes."""
        pages = Pages(self.files)
        if type(old) is torch.nn.Linear:
            name = matrices["weight"][0][0]
            matrix = self._matrix(name, old.bias is not None, pages)
            _check_shape(name, (matrix.rows, matrix.columns), old.weight.shape)
            return linear_from_matrix(matrix, self._wanted(matrices))
        experts, shards = self._shards(old, matrices)
        if experts.activation is None:
            raise ValueError(f"activation {type(experts.act_fn).__name__} is not one of the operator")
        packed, group = self._pack_experts(matrices, shards, experts, pages)
        return packed_experts(experts, packed["w13"], packed["w2"], (group, group))

    def _round(self, path: str) -> torch.nn.Module:
        """The packed module of floats of 8 bits; one matrix, or one expert, is read at a time."""
        old, matrices, options, pages = self.old[path], self.matrices[path], self.options.get(path), Pages(self.files)
        if list(matrices) == ["weight"]:
            name = matrices["weight"][0][0]
            weight, bias = self._floats(name, old.weight.shape, pages)
            bias = _checked_bias(bias, getattr(old, "bias", None) is not None, name)
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
            return Each(shards[shard], lambda name: self._floats(name, shape, pages)[0])

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
        """The experts of a module, and the names of their matrices: see :meth:`_pack_experts`."""
        experts = fused_experts(old)
        if experts is None:
            raise ValueError(f"quantized {sorted(matrices)} of a {type(old).__name__}, which is not supported")
        fused = is_gpt_oss(old)
        if self.stacked and not fused:
            raise ValueError(f"all experts of a {type(old).__name__} in one tensor: do its rows alternate?")
        given = {leaf: len(lists) for leaf, lists in matrices.items()}
        up = "gate_up_proj" if experts.gated else "up_proj"
        expected = {up: 1 if fused or not experts.gated else 2, "down_proj": 1}
        if given != expected:
            raise ValueError(f"matrices of {given} in the files, expected {expected}")
        count = experts.sizes[0]
        for lists in matrices.values():
            found = [len(names) for names in lists]
            if not self.stacked and set(found) != {count}:
                raise ValueError(f"matrices of {found} experts, expected {count}")
        sources = [*matrices[up], *matrices["down_proj"]]
        apart = ("w1", "w3", "w2") if experts.gated else ("w1", "w2")
        return experts, dict(zip(("w13", "w2") if fused else apart, sources))

    def _pack_experts(
        self, matrices: Mapping[str, list[list[str]]], shards: Mapping[str, list[str]], experts: Experts, pages: Pages
    ) -> tuple[dict[str, torch.Tensor], int]:
        """``w13`` and ``w2``, uint8 [E, bytes], and their group size.

        ``shards`` has ``w1``, ``w3`` and ``w2``, or ``w13``, whose rows alternate, and ``w2``: names of matrices by
        expert, or one name for a stack.
        """
        count, hidden, intermediate = experts.sizes
        for lists in matrices.values() if self.stacked else ():
            found = {suffix: part.get_shape()[0] for suffix, part in self.tensors[lists[0][0]].items()}
            if set(found.values()) != {count}:
                raise ValueError(f"{lists[0][0]} is of {found} experts, expected {count}")
        for shard, names in shards.items():
            scheme = self._scheme(names[0])
            groups_of(intermediate if shard == "w2" else hidden, scheme.group_size, names[0], scheme.weight)
        packer, biased = None, experts.w13_bias is not None
        for expert in range(count):
            for shard, names in shards.items():
                name = names[0 if self.stacked else expert]
                matrix = self._matrix(name, biased, pages, expert if self.stacked else None)
                if packer is None:
                    sizes = ExpertSizes(count, hidden, intermediate, self._scheme(name).group_size, experts.gated)
                    activations = sizes.activation_groups(self._wanted(matrices))
                    bias = None if matrix.bias is None else matrix.bias.dtype
                    packer = ExpertPacker(sizes, bias, w13_interleaved=True, activation_groups=activations)
                packer.put(expert, shard, matrix, name)
        return packer.pack(), sizes.group_size

    def _wanted(self, matrices: Mapping[str, list[list[str]]]) -> int | None:
        """The activation group to ask for."""
        schemes = [self._scheme(name) for lists in matrices.values() for names in lists for name in names]
        return wanted_by_all(schemes, self.activation_group)

    def _scheme(self, name: str) -> Scheme:
        scheme = self.schemes[name]
        if isinstance(scheme, LeftOut):
            raise ValueError(scheme.reason)
        return scheme

    def _floats(self, name: str, shape: Sequence[int], pages: Pages) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Reads a matrix of floats of 8 bits, as float32 of a shape, and its bias."""
        tensors = {suffix: part[...] for suffix, part in self.tensors[name].items()}
        floats, bias = self._scheme(name).floats(tensors, name)
        pages.release(tensors.values())
        _check_shape(name, floats.shape, shape)
        return floats, bias

    def _matrix(self, name: str, biased: bool, pages: Pages, expert: int | None = None) -> Matrix:
        """Reads a matrix, or one expert's matrix of a stack. ``biased``: there must be a bias."""
        parts = self.tensors[name]
        if expert is None:
            tensors = {suffix: part[...] for suffix, part in parts.items()}
        else:
            tensors = {suffix: part[expert : expert + 1][0] for suffix, part in parts.items()}
        matrix = self._scheme(name).read(tensors, name)
        # The matrix may have views of the tensors; their pages come from the file again.
        pages.release(tensors.values())
        bias = _checked_bias(matrix.bias, biased, name)
        if bias is not matrix.bias:
            matrix = replace(matrix, bias=bias)
        if matrix.codes.is_meta:
            matrix = matrix.on_meta()
            self._kinds[weights_in_words(matrix.header)] = None
        return matrix


def _known(scheme: Scheme | LeftOut) -> tuple[str, ...]:
    """Last parts of the names of a matrix's tensors."""
    if isinstance(scheme, LeftOut):  # the error comes when the matrix is read
        return all_suffixes()
    return (*scheme.required, *scheme.optional, "bias")


def _parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor, requires_grad=False)


def _check_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if tuple(found) != tuple(expected):
        raise ValueError(f"{name} is {list(found)}, but {list(expected)} is expected")


def _checked_bias(bias: torch.Tensor | None, biased: bool, name: str) -> torch.Tensor | None:
    """The bias of a matrix, exactly if the model has one. (Older tools wrote zeros where it has none.)"""
    if biased and bias is None:
        raise ValueError(f"{name} has no bias, but the model has")
    if biased or bias is None:
        return bias
    if not bias.is_meta and bias.any():
        raise ValueError(f"{name} has a bias, but the model has none")
    return None
