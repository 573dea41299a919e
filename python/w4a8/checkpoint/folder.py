"""The quantized layers of a directory of safetensors files: experts, and linear layers."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from w4a8.checkpoint.experts import Experts, Ranks
from w4a8.checkpoint.settings import MoESettings
from w4a8.checkpoint.tensors import CheckpointTensors
from w4a8.core.activation_groups import in_words
from w4a8.core.json_fields import CheckpointError
from w4a8.core.matrix import Matrix
from w4a8.formats import LeftOut, Rules, Scheme, scheme_of
from w4a8.formats.compressed_tensors import check_words
from w4a8.formats.format import FORMATS, all_suffixes, quantized_suffixes
from w4a8.formats.matrix import groups_of
from w4a8.formats.scheme import wanted_by_all
from w4a8.nn import W4A8MoE

logger = logging.getLogger(__name__)

_EXPERT_KEY = re.compile(
    r"(?P<layer>.+\.experts)\.(?P<expert>[0-9]{1,9})\.(?P<projection>\w+)\."
    rf"(?P<tensor>{'|'.join(all_suffixes())})"
)
# One tensor for all experts.
_FUSED_KEY = re.compile(
    r"(?P<layer>.+\.experts)\.(?P<projection>gate_up_proj|down_proj)_(?P<tensor>blocks|scales|bias)"
)

# Projection of a layer by its names in checkpoints.
_GATED = (
    {"gate_up_proj": "w13", "down_proj": "w2"},
    {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
    {"w1": "w1", "w3": "w3", "w2": "w2"},
)
_UNGATED = ({"up_proj": "w1", "down_proj": "w2"}, {"w1": "w1", "w2": "w2"})
_LINEAR_KEY = re.compile(rf"(?P<module>.+)\.(?P<tensor>weight|{'|'.join(quantized_suffixes())})")
_LINEAR_OF_EXPERT = re.compile(r".+\.experts\.[0-9]+\.\w+")


@dataclass
class Module:
    """The place of a module's tensors: tensors of its own, or one expert's part of tensors for all experts (fused).

    Attributes:
        tensors: of the checkpoint.
        name: ``<layer>.experts.3.up_proj`` say. Fused: ``<layer>.experts.down_proj``, with tensors ``..._blocks`` and
            so on.
        expert: fused: index into the first dimension.
    """

    tensors: CheckpointTensors
    name: str
    expert: int | None = None

    def key(self, suffix: str) -> str:
        """Name of a tensor, by its last part."""
        return f"{self.name}{'.' if self.expert is None else '_'}{suffix}"

    def __contains__(self, suffix: str) -> bool:
        return self.key(suffix) in self.tensors

    def get(self, suffix: str) -> torch.Tensor:
        """A tensor, or this expert's part.

        Raises:
            CheckpointError: the tensor is missing or not readable; names the key.
        """
        return self.tensors.get(self.key(suffix), self.expert)

    def shape(self, scheme: Scheme) -> tuple[int, int]:
        """(N, K) by the module's tensors; for codes only the header of the file is read.

        Raises:
            CheckpointError: the tensor with the shape is missing, or has another number of dimensions.
        """
        stated = self.get("weight_shape") if scheme.states_shape else None
        try:
            return scheme.shape(self._codes_shape(scheme), self.name, stated)
        except CheckpointError:
            raise
        except ValueError as error:
            raise self._named(error) from error

    def _codes_shape(self, scheme: Scheme) -> tuple[int, ...]:
        shape = self.tensors.shape(self.key(scheme.weight))
        return shape if self.expert is None else shape[1:]

    def check_shape(self, scheme: Scheme, shape: tuple[int, int], because: str) -> None:
        """Compares (N, K) of the weight with the expected shape, before the weight is read or memory is taken.

        Raises:
            CheckpointError: another size (the message ends with ``because``), a size that the groups do not divide, or
                a missing tensor.
        """
        stated, codes = self.shape(scheme), self._codes_shape(scheme)
        if stated != shape:
            if scheme.states_shape:
                what = f"{self.key('weight_shape')!r} says {list(stated)}, but {list(shape)} is expected"
            elif stated == codes:
                what = f"{self.key(scheme.weight)!r} has shape {stated}, but {shape} is expected"
            else:
                what = f"{self.key(scheme.weight)!r} has shape {codes}, which is {stated}, but {shape} is expected"
            raise CheckpointError(f"tensor {what}{because}")
        try:
            groups_of(shape[1], scheme.group_size, self.name, scheme.weight)
            if scheme.states_shape:
                check_words(codes, self.name, *shape, scheme.bits)
        except ValueError as error:
            raise self._named(error) from error

    def matrix(self, scheme: Scheme, has_bias: bool) -> Matrix:
        """The matrix of the module; ``has_bias``: it must have one.

        Raises:
            CheckpointError: a tensor is missing, or has another dtype, shape or value than it should.
        """
        names = [*scheme.required, *(name for name in scheme.optional if name in self)]
        if has_bias:
            names.append("bias")
        found = {name: self.get(name) for name in names}
        try:
            return scheme.read(found, self.name)
        except ValueError as error:
            raise self._named(error) from error

    def _named(self, error: ValueError) -> CheckpointError:
        """The error of a reader, with this module's key: readers join names by a point."""
        text = str(error).replace(f"{self.name}.", self.key(""), 1)
        expert = "" if self.expert is None else f" (expert {self.expert})"
        return CheckpointError(f"tensor {text}{expert}")


@dataclass
class LayerNames:
    """One layer of experts, by the names of its tensors.

    Attributes:
        name: of the layer.
        experts: numbers of experts; empty if all experts are in one tensor.
        projections: ``up_proj`` and so on.
        tensors: kinds of tensors: weight, weight_scale, bias ...
    """

    name: str
    experts: set[int] = field(default_factory=set)
    projections: set[str] = field(default_factory=set)
    tensors: set[str] = field(default_factory=set)


def _natural(name: str) -> list[Any]:
    """A key that sorts names by the numbers inside: by count of digits, then by digits."""
    parts = [part.lstrip("0") if i % 2 else part for i, part in enumerate(re.split(r"([0-9]+)", name))]
    return [(len(part), part) if i % 2 else part for i, part in enumerate(parts)]  # every second one is a number


def find_layers(keys: Sequence[str], only: Callable[[str], bool] | None) -> list[LayerNames]:
    """The layers of experts in the order of the model, by the names of all tensors."""
    layers: dict[str, LayerNames] = {}
    for key in keys:
        match = _EXPERT_KEY.fullmatch(key) or _FUSED_KEY.fullmatch(key)
        if match is None or (only is not None and not only(match["layer"])):
            continue
        layer = layers.setdefault(match["layer"], LayerNames(match["layer"]))
        if "expert" in match.groupdict():
            layer.experts.add(int(match["expert"]))
        layer.projections.add(match["projection"])
        layer.tensors.add(match["tensor"])
    return sorted(layers.values(), key=lambda layer: _natural(layer.name))


class FolderExperts(Experts):
    """The experts of one layer.

    Attributes:
        schemes: of each module, by name; if one tensor is for all experts, of one expert.
    """

    def __init__(
        self,
        tensors: CheckpointTensors,
        rules: Rules,
        settings: MoESettings,
        ranks: Ranks,
        w13_interleaved: bool,
        names: LayerNames,
    ) -> None:
        """Takes the names of the tensors and the settings of config.json.

        Raises:
            CheckpointError: there are more or fewer experts than config.json says.
        """
        self.name, self.names, self.tensors, self.settings = names.name, names, tensors, settings
        self.hidden, self.is_gated = settings.hidden_size, settings.activation.is_gated
        self.w13_interleaved = w13_interleaved
        # Projection -> shard: of the families of names, the one with most names present.
        families, there = _GATED if self.is_gated else _UNGATED, names.projections
        self.shards = max(families, key=lambda family: len(there & family.keys()) / len(family))
        self.experts = self._count_experts(ranks.ep_size)
        self.local, _ = ranks.local(self.experts)
        self.schemes = {
            module.name: scheme_of(rules, module.name, names.tensors, partial(tensors.is_int8, module.key("weight")))
            for _, module in self._modules(range(self.experts))
        }

    def _count_experts(self, ep_size: int) -> int:
        """Fails before memory is taken for experts that the checkpoint only claims to have."""
        there, experts, first = self.names.experts, self.settings.num_experts, next(iter(self.shards))
        if not there:
            key = self._module(0, first).key("blocks")
            shape = self.tensors.shape(key)
            if len(shape) != 4:
                raise CheckpointError(f"tensor {key!r} has shape {shape}, but 4 dimensions are expected")
            if experts not in (None, shape[0]):
                raise CheckpointError(f"tensor {key!r} has {shape[0]} experts, but config.json says {experts}")
            return shape[0]
        most = max(there)
        experts = most + 1 if experts is None else experts
        if most >= experts:
            raise CheckpointError(f"{self.name} has an expert {most}, but config.json says {experts} experts")
        # A rank of expert parallelism may have a part of the files.
        if experts > len(there) * ep_size:
            missing = next(expert for expert in range(experts) if expert not in there)
            codes = (each.parts[0].suffix for each in FORMATS.values())
            weight = next((suffix for suffix in codes if suffix in self.names.tensors), "weight")
            raise CheckpointError(
                f"tensor {f'{self.name}.{missing}.{first}.{weight}'!r} is missing: of {experts} experts there are "
                f"{len(there)}"
            )
        return experts

    def _module(self, expert: int, projection: str) -> Module:
        if self.names.experts:
            return Module(self.tensors, f"{self.name}.{expert}.{projection}")
        return Module(self.tensors, f"{self.name}.{projection}", expert)

    def _modules(self, experts: Sequence[int]) -> Iterator[tuple[str, Module]]:
        """Shard (``w1``, ``w13`` ...) and module of each matrix of ``experts``; fused: of the first expert alone."""
        for expert in experts if self.names.experts else experts[:1]:
            for projection, shard in self.shards.items():
                yield shard, self._module(expert, projection)

    @property
    def reason_left_out(self) -> str | None:
        """Why the codes of no expert are read here, or None."""
        found = list(self.schemes.values())
        return found[0].reason if all(isinstance(scheme, LeftOut) for scheme in found) else None

    def check_files(self) -> None:
        """Fails before anything is read if a file with tensors of this rank's experts is missing."""
        for _, module in self._modules(self.local):
            self.tensors.check_files(module.key(kind) for kind in sorted(self.names.tensors))

    def _check_schemes(self, quantize_w4a16: bool) -> int:
        """Their group size.

        All modules must be quantized, in groups of one size. w13 and w2 may be of different schemes, and any matrix
        with zero points or without.
        """
        firsts: dict[str, tuple[str, Scheme]] = {}  # of all, and of each stack
        for shard, module in self._modules(range(self.experts)):
            scheme = self.schemes[module.name]
            if isinstance(scheme, LeftOut):
                raise CheckpointError(scheme.reason)
            of_all = firsts.setdefault("", (module.name, scheme))
            of_stack = firsts.setdefault("w2" if shard == "w2" else "w13", (module.name, scheme))
            for (first, other), part in ((of_all, "group_size"), (of_stack, "kind")):
                if getattr(scheme, part) != getattr(other, part):
                    raise CheckpointError(f"{module.name} is quantized differently from {first}")
            check_input(scheme, self.name, quantize_w4a16)
        return firsts[""][1].group_size

    def check(self, quantize_w4a16: bool) -> None:
        """Fails, before memory is taken for this rank's experts, if the files do not hold their weights.

        Raises:
            CheckpointError: a module is not quantized, is quantized differently from the others, has another shape, or
                is weight-only without ``quantize_w4a16``; names the module, or for weight-only the layer.
        """
        self.group_sizes = (self._check_schemes(quantize_w4a16),) * 2
        size, hidden = self.settings.intermediate_size, self.hidden
        if size is None:  # as the first tensor that this rank has says
            shard, module = next(self._modules(self.local or [0]))
            rows, _ = module.shape(self.schemes[module.name])
            size = rows // 2 if shard == "w13" else rows
        self.intermediate = size
        because = f" for hidden_size {hidden} and intermediate_size {size}"
        shapes = {"w13": (2 * size, hidden), "w2": (hidden, size)}
        for shard, module in self._modules(self.local):
            module.check_shape(self.schemes[module.name], shapes.get(shard, (size, hidden)), because)

    def build(self, ranks: Ranks, activation_group: int | None, packed_one: Callable[[], object]) -> W4A8MoE:
        """As :meth:`Experts.build`, after :meth:`check`."""
        # There are biases if each expert has one, or one is not zero: older tools wrote zeros for a model without
        # biases.
        modules = [module for _, module in self._modules(self.local)]
        biased = [module for module in modules if "bias" in module]
        has_bias = len(biased) == len(modules) or any(bool(module.get("bias").any()) for module in biased)
        self.bias_dtype = self.settings.dtype if "bias" in self.names.tensors and has_bias else None
        built = super().build(ranks, activation_group, packed_one)
        self.tensors.release()
        return built

    def wanted_activation_group(self, asked: int | None) -> int | None:
        """As :meth:`Experts.wanted_activation_group`, alike for all experts."""
        return wanted_by_all(self.schemes.values(), asked)

    def matrices(self, expert: int) -> Iterator[tuple[str, Matrix, str]]:
        """As :meth:`Experts.matrices`."""
        has_bias = self.bias_dtype is not None
        for projection, shard in self.shards.items():
            module = self._module(expert, projection)
            matrix = module.matrix(self.schemes[module.name], has_bias or "bias" in module)
            yield shard, matrix if has_bias else replace(matrix, bias=None), module.name

    def correction_bias(self) -> tuple[torch.Tensor, str] | None:
        """As :meth:`Experts.correction_bias`."""
        if not self.settings.has_correction_bias:
            return None
        block = self.name[: -len(".experts")]
        keys = [f"{block}.gate.e_score_correction_bias", f"{block}.e_score_correction_bias"]
        key = next((key for key in keys if key in self.tensors), keys[0])
        return self.tensors.get(key), key


def linear_schemes(tensors: CheckpointTensors, rules: Rules, only: Callable[[str], bool] | None) -> dict[str, Scheme]:
    """Name of a quantized linear layer (no experts) -> its scheme; layers that are left out are logged.

    Raises:
        CheckpointError: all layers are left out.
    """
    suffixes: dict[str, list[str]] = {}
    for key in tensors.keys():  # noqa: SIM118 (no mapping)
        match = _LINEAR_KEY.fullmatch(key)
        if match is None or _LINEAR_OF_EXPERT.fullmatch(match["module"]) is not None:
            continue
        if only is None or only(match["module"]):
            suffixes.setdefault(match["module"], []).append(match["tensor"])
    found: dict[str, Scheme | LeftOut] = {}
    for name, there in suffixes.items():
        scheme = scheme_of(rules, name, there, partial(tensors.is_int8, f"{name}.weight"))
        if isinstance(scheme, Scheme) or there != ["weight"]:
            found[name] = scheme
    kept = without_left_out({name: getattr(scheme, "reason", None) for name, scheme in found.items()})
    return {name: found[name] for name in kept}


def check_input(scheme: Scheme, name: str, quantize_w4a16: bool) -> None:
    """Raises CheckpointError for a weight-only module unless int8 activations are allowed."""
    if scheme.weight_only is not None and not quantize_w4a16:
        raise CheckpointError(
            f"{scheme.weight_only}: {name} is W4A16; pass quantize_w4a16=True to run it with activations quantized to "
            "int8"
        )


def say_int8(scheme: Iterable[Scheme], activation_group: int | None) -> None:
    """Logs that weight-only modules were loaded, and the type of their activations."""
    if any(each.weight_only is not None for each in scheme):
        logger.info(
            "weights made for float activations run with activations rounded to int8 %s (activation_group)",
            in_words(activation_group),
        )


def without_left_out(reasons: Mapping[str, str | None]) -> list[str]:
    """The layers without a reason; the reasons of the others are logged.

    Raises:
        CheckpointError: there are some, and all are left out.
    """
    if reasons and all(reasons.values()):
        raise CheckpointError(next(iter(reasons.values())))
    for name, reason in reasons.items():
        if reason is not None:
            logger.warning("%s is left out: %s", name, reason)
    return [name for name, reason in reasons.items() if reason is None]
