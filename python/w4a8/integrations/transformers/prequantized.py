"""Checkpoints that others have quantized: their codes are packed as they are (readers: ``w4a8.formats``)."""

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
from w4a8.formats import METHODS, LeftOut, Scheme, method_of, rules_of, scheme_of
from w4a8.formats.format import all_suffixes, quantized_suffixes
from w4a8.formats.matrix import groups_of
from w4a8.formats.rules import are_stacked
from w4a8.formats.scheme import wanted_by_all
from w4a8.integrations.transformers import guard
from w4a8.integrations.transformers.memory import Pages
from w4a8.integrations.transformers.names import Names, left_out, refuse_missing, slices
from w4a8.integrations.transformers.tied import packed_experts, put, stand_in, untie
from w4a8.nn import linear_from_matrix
from w4a8.progress import progress_bar
from w4a8.quantization import QuantizationReport
from w4a8.quantization.moe_blocks import Experts, fused_experts, is_gpt_oss
from w4a8.quantization.readers import reader_of
from w4a8.quantization.size import Large

logger = logging.getLogger(__name__)

# MXFP4 as gpt-oss has it: all experts in one tensor, ``model.layers.0.mlp.experts.gate_up_proj_blocks``.
_STACKED = re.compile(r"(.+\.experts\.\w+)_(blocks|scales|bias)")
# The same of each expert, as AMD Quark has it: ``model.layers.0.mlp.experts.3.gate_up_proj``.
_ONE_OF_A_STACK = re.compile(r"(.+\.experts)\.\d+\.(gate_up_proj|down_proj)")

# Beside a matrix, without an effect here: inputs are rounded by scales of their own, and a cache is not quantized.
_BESIDE = re.compile(r".+\.((input|output)_(scale|global_scale|zero_point)|[qkv]_(scale|zero_point)|prob_output_scale)")


def _is_int8(parts: Mapping[str, Any]) -> bool:
    """Whether ``weight`` of some lazy tensors is an int8 matrix."""
    shape = parts["weight"].get_shape()
    return len(shape) == 2 and shape[0] > 0 and parts["weight"][:1].dtype == torch.int8


class ModulesApart:
    """The modules of a model that are packed of a file; transformers loads all others, and sees nothing of these.

    Attributes:
        old: the float modules by name, on the meta device.
        activation_group: as :class:`W4A8Config` has it.
        refuses_one: within a dry run a module that cannot be packed is reported, and the next one is looked at.
    """

    old: dict[str, torch.nn.Module]
    activation_group: int | None
    refuses_one = False

    def pack(self, name: str) -> torch.nn.Module:
        """What stands for a module.

        Raises:
            ValueError, RuntimeError: it cannot be packed; the second: values that the operators do not have.
        """
        raise NotImplementedError

    def kinds(self, name: str) -> str:
        """What the weights of a module are, in words, within a dry run."""
        raise NotImplementedError

    def why_float(self, parameter: str) -> str:
        """Why a large parameter stays a float."""
        raise NotImplementedError

    def finish(self, model: torch.nn.Module) -> QuantizationReport:
        """Packs, module by module, and puts the modules into the model.

        Raises:
            ValueError: a tensor is missing, or has another shape or values than it should; names the module.
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
        """What is to be done when a module is in the model."""


class PrequantizedModules(ModulesApart):
    """The quantized modules of a model."""

    refuses_one = True

    def __init__(
        self,
        model: torch.nn.Module,
        source: Mapping[str, Any],
        files: Sequence[str],
        activation_group: int | None = None,
    ) -> None:
        """Finds the modules, and takes them out of the model, which is on the meta device, until ``finish``.

        Raises:
            ValueError: the method of ``source``, the quantization_config, cannot be run, a tensor belongs to nothing
                in the model, or a layer has none.
        """
        if method_of(source) is None:
            raise ValueError(
                f"the checkpoint is quantized with {source.get('quant_method')!r}; W4A8Config reads "
                f"{', '.join(METHODS[:-1])} and {METHODS[-1]}. Load it without W4A8Config, or an unquantized "
                "checkpoint with it"
            )
        self.rules = rules_of(source)
        self.stacked = are_stacked(self.rules)
        self.files = files
        self.activation_group = activation_group
        self.tensors: dict[str, dict[str, Any]] = {}  # by name of the matrix, then the last part of the tensor's
        keys: dict[str, tuple[str, str]] = {}
        with torch.device("cpu"):  # transformers builds models with the meta device as default
            for key, part in slices(files):
                stacked = _STACKED.fullmatch(key) if self.stacked else None
                name, suffix = keys[key] = stacked.groups() if stacked else key.rpartition(".")[::2]
                if suffix in all_suffixes():
                    self.tensors.setdefault(name, {})[suffix] = part
        self.tensors = {name: parts for name, parts in self.tensors.items() if self._is_quantized(name, parts)}
        if not self.tensors:
            raise ValueError(f"no quantized tensors, though config.json says {source.get('quant_method')!r}")
        self.old = {}
        # Module -> parameter -> for each of its sources the names of the matrices in the files, by expert; one name for
        # all where they are stacked.
        self.matrices: dict[str, dict[str, list[list[str]]]] = {}
        self.unread: dict[str, str] = {}  # module: what is wrong with a tensor of it
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
        known = {name: self._known(name) for name in self.tensors}
        self.keys = {key for key, (name, suffix) in keys.items() if suffix in known.get(name, ())}
        given = self._check_others(model, names, [key for key in keys if keys[key][0] not in unknown])
        for name, old in self.old.items():
            hole = torch.nn.Module()
            stand_in(hole, old)
            put(model, name, hole)
            untie(model, name)
        refuse_missing(model, given)

    def _known(self, name: str) -> tuple[str, ...]:
        """Last parts of the names of the tensors that a matrix is made of."""
        scheme = scheme_of(self.rules, name, self.tensors[name], partial(_is_int8, self.tensors[name]))
        if isinstance(scheme, LeftOut):  # which is said when it is to be read
            return all_suffixes()
        return (*scheme.required, *scheme.optional, "bias")

    def _check_others(self, model: torch.nn.Module, names: Names, keys: Sequence[str]) -> set[str]:
        """The parameters that the tensors go to which no matrix is made of.

        Of what transformers finds no place for, it is to report what this leaves to it alone: heads and other parts
        that the model does not have at all.

        Raises:
            ValueError: a tensor in a part that the model has, which has no use for it. (Of a quantized module it is
                said when that is packed: it may lack others, which says more.)
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
        return set(renamed.values())

    def _is_quantized(self, name: str, parts: Mapping[str, Any]) -> bool:
        if any(suffix in quantized_suffixes() for suffix in parts):
            return True
        return "weight" in parts and isinstance(scheme_of(self.rules, name, parts, partial(_is_int8, parts)), Scheme)

    def _add(self, model: torch.nn.Module, names: Names, name: str) -> bool:
        """Whether the model has a module for a matrix."""
        parameter, sources, pattern = names.parameter(name if self.stacked else f"{name}.weight")
        one = _ONE_OF_A_STACK.fullmatch(name)
        if parameter is None and one is not None:
            parameter, sources, pattern = names.parameter(".".join(one.groups()))
            if parameter is not None and not is_gpt_oss(model.get_submodule(parameter.rpartition(".")[0])):
                parameter = None  # whether rows alternate is not known
        if parameter is None:
            return False
        path, _, leaf = parameter.rpartition(".")
        reader = reader_of(model, path)
        if reader is not None:
            raise ValueError(f"{name} is quantized, but {reader} reads its weight or bias itself")
        self.old.setdefault(path, model.get_submodule(path))
        lists = self.matrices.setdefault(path, {}).setdefault(leaf, [[] for _ in sources or [None]])
        lists[sources.index(pattern) if sources else 0].append(name)
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
        return "it is not quantized in the checkpoint"

    def pack(self, name: str) -> torch.nn.Module:
        """As :meth:`ModulesApart.pack`."""
        self._kinds.clear()
        new = self._pack(self.old[name], self.matrices[name])
        if name in self.unread:
            raise ValueError(self.unread[name])
        return new

    def _pack(self, old: torch.nn.Module, matrices: Mapping[str, list[list[str]]]) -> torch.nn.Module:
        pages = Pages(self.files)
        if type(old) is torch.nn.Linear:
            name = matrices["weight"][0][0]
            matrix = self._matrix(name, old.bias is not None, pages)
            if (matrix.rows, matrix.columns) != (old.out_features, old.in_features):
                shape = [old.out_features, old.in_features]
                raise ValueError(f"{name} is [{matrix.rows}, {matrix.columns}], but {shape} is expected")
            return linear_from_matrix(matrix, self._wanted(matrices))
        experts = fused_experts(old)
        if experts is None:
            raise ValueError(f"quantized {sorted(matrices)} of a {type(old).__name__}, which is not supported")
        if experts.activation is None:
            raise ValueError(f"activation {type(experts.act_fn).__name__} is not one of the operator")
        fused = is_gpt_oss(old)
        if self.stacked and not fused:
            raise ValueError(f"all experts of a {type(old).__name__} in one tensor: do its rows alternate?")
        given = {leaf: len(lists) for leaf, lists in matrices.items()}
        up = "gate_up_proj" if experts.gated else "up_proj"
        expected = {up: 1 if fused or not experts.gated else 2, "down_proj": 1}
        if given != expected:
            raise ValueError(f"matrices of {given} in the files, expected {expected}")
        sources = [*matrices[up], *matrices["down_proj"]]
        apart = ("w1", "w3", "w2") if experts.gated else ("w1", "w2")
        shards = dict(zip(("w13", "w2") if fused else apart, sources))
        packed, group = self._pack_experts(matrices, shards, experts, pages)
        return packed_experts(experts, packed["w13"], packed["w2"], (group, group))

    def _pack_experts(
        self, matrices: Mapping[str, list[list[str]]], shards: Mapping[str, list[str]], experts: Experts, pages: Pages
    ) -> tuple[dict[str, torch.Tensor], int]:
        """``w13`` and ``w2``, uint8 [E, bytes], and their group size.

        Of ``w1``, ``w3`` and ``w2``, or of ``w13``, whose rows alternate, and ``w2``, ``shards`` has the names of the
        matrices by expert, or one name for all of a stack.
        """
        count, hidden, intermediate = experts.sizes
        for lists in matrices.values():
            given = [len(names) for names in lists]
            if not self.stacked and set(given) != {count}:
                raise ValueError(f"matrices of {given} experts, expected {count}")
            if self.stacked:
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
        """The activation group to be asked for."""
        names = (name for lists in matrices.values() for names in lists for name in names)
        return wanted_by_all((self._scheme(name) for name in names), self.activation_group)

    def _scheme(self, name: str) -> Scheme:
        parts = self.tensors[name]
        scheme = scheme_of(self.rules, name, parts, partial(_is_int8, parts))
        if isinstance(scheme, LeftOut):
            raise ValueError(scheme.reason)
        return scheme

    def _matrix(self, name: str, biased: bool, pages: Pages, expert: int | None = None) -> Matrix:
        """Reads a matrix, or that of one expert of a stack, which must have a bias if the model has."""
        parts = self.tensors[name]
        if expert is None:
            tensors = {suffix: part[...] for suffix, part in parts.items()}
        else:
            tensors = {suffix: part[expert : expert + 1][0] for suffix, part in parts.items()}
        matrix = self._scheme(name).read(tensors, name)
        # Whatever the matrix has of the tensors is a view; it comes from the file again.
        pages.release(tensors.values())
        matrix = _with_bias(matrix, biased, name)
        if matrix.codes.is_meta:
            matrix = matrix.on_meta()
            self._kinds[weights_in_words(matrix.header)] = None
        return matrix


def _with_bias(matrix: Matrix, biased: bool, name: str) -> Matrix:
    """The matrix, with a bias exactly if the model has one. (Older tools wrote zeros where it has none.)"""
    if biased and matrix.bias is None:
        raise ValueError(f"{name} has no bias, but the model has")
    if biased or matrix.bias is None:
        return matrix
    if not matrix.bias.is_meta and matrix.bias.any():
        raise ValueError(f"{name} has a bias, but the model has none")
    return replace(matrix, bias=None)
