"""The mixture-of-experts layers of a quantized checkpoint, packed and ready to run."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from w4a8.checkpoint.gguf_experts import load_gguf
from w4a8.checkpoint.gguf_file import gguf_in
from w4a8.checkpoint.modules import Module, check_input, say_int8
from w4a8.checkpoint.moe_layer import checked_correction_bias, moe_layer, sizes_of_rank
from w4a8.checkpoint.settings import MoESettings, settings_from_config
from w4a8.checkpoint.tensors import CheckpointTensors
from w4a8.core.activation_groups import check_activation_group
from w4a8.core.experts import ExpertSizes, determine_expert_map
from w4a8.core.json_fields import CheckpointError, read_json
from w4a8.core.memory import on_cpu
from w4a8.core.packer import ExpertPacker
from w4a8.formats import LeftOut, Rules, Scheme, find_config, rules_of, scheme_of
from w4a8.formats.format import FORMATS, quantized_suffixes
from w4a8.formats.scheme import wanted_by_all
from w4a8.nn import W4A8MoE
from w4a8.progress import progress_bar

logger = logging.getLogger(__name__)

_EXPERT_KEY = re.compile(
    r"(?P<layer>.+\.experts)\.(?P<expert>[0-9]{1,9})\.(?P<projection>\w+)\."
    rf"(?P<tensor>weight|bias|scales|{'|'.join(quantized_suffixes())})"
)
# One tensor for all experts.
_FUSED_KEY = re.compile(
    r"(?P<layer>.+\.experts)\.(?P<projection>gate_up_proj|down_proj)_(?P<tensor>blocks|scales|bias)"
)

# Names of the projections in checkpoints: what each is in a layer.
_GATED = (
    {"gate_up_proj": "w13", "down_proj": "w2"},
    {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
    {"w1": "w1", "w3": "w3", "w2": "w2"},
)
_UNGATED = ({"up_proj": "w1", "down_proj": "w2"}, {"w1": "w1", "w2": "w2"})


class _Ranks(NamedTuple):
    """Which part of the experts this process holds: a slice of each (``tp``), or some of them whole (``ep``)."""

    tp_rank: int = 0
    tp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1


class _Layer:
    """What the names of the tensors say about one layer."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.experts: set[int] = set()  # none if all experts are in one tensor
        self.projections: set[str] = set()
        self.tensors: set[str] = set()  # kinds of tensors: weight, weight_scale, bias, ...

    def module(self, tensors: CheckpointTensors, expert: int, projection: str) -> Module:
        """One linear module."""
        if self.experts:
            return Module(tensors, f"{self.name}.{expert}.{projection}")
        return Module(tensors, f"{self.name}.{projection}", expert)

    def shards(self, gated: bool) -> dict[str, str]:
        """Projection name -> shard; the family of names of which most are there."""
        families = _GATED if gated else _UNGATED
        return max(families, key=lambda family: len(self.projections & family.keys()) / len(family))


def _natural(name: str) -> list[Any]:
    """Sorts names by the numbers in them: a number by how many digits it has, then by these."""
    parts = re.split(r"([0-9]+)", name)  # every second one is a number
    for index, digits in enumerate(parts[1::2]):
        value = digits.lstrip("0")
        parts[2 * index + 1] = (len(value), value)
    return parts


def _find_layers(keys: list[str], only: Callable[[str], bool] | None) -> list[_Layer]:
    layers: dict[str, _Layer] = {}
    for key in keys:
        match = _EXPERT_KEY.fullmatch(key) or _FUSED_KEY.fullmatch(key)
        if match is None or (only is not None and not only(match["layer"])):
            continue
        layer = layers.setdefault(match["layer"], _Layer(match["layer"]))
        if "expert" in match.groupdict():
            layer.experts.add(int(match["expert"]))
        layer.projections.add(match["projection"])
        layer.tensors.add(match["tensor"])
    return sorted(layers.values(), key=lambda layer: _natural(layer.name))


class _ExpertsReader:
    """Reads the experts of one layer."""

    def __init__(
        self,
        tensors: CheckpointTensors,
        rules: Rules,
        settings: MoESettings,
        ranks: _Ranks,
        w13_interleaved: bool,
        layer: _Layer,
    ) -> None:
        """Takes what the names of the tensors and config.json say.

        Raises:
            CheckpointError: there are more or fewer experts than config.json says.
        """
        self.tensors = tensors
        self.settings = settings
        self.ranks = ranks
        self.w13_interleaved = w13_interleaved
        self.layer = layer
        self.shards = layer.shards(settings.activation.is_gated)
        self.num_experts = self._count_experts()
        _, self.expert_map = determine_expert_map(ranks.ep_size, ranks.ep_rank, self.num_experts)
        everyone = range(self.num_experts)
        self.local: Sequence[int] = everyone
        if self.expert_map is not None:
            self.local = torch.nonzero(self.expert_map != -1).flatten().tolist()
        self.scheme = {module.name: self._scheme_of(rules, module) for _, module in self._modules(everyone)}

    def _count_experts(self) -> int:
        """Fails before anything is allocated or listed for experts that the checkpoint only claims to have."""
        layer, experts = self.layer, self.settings.num_experts
        if not layer.experts:
            first = layer.module(self.tensors, 0, next(iter(self.shards)))
            shape = self.tensors.shape(first.key("blocks"))
            if len(shape) != 4:
                raise CheckpointError(
                    f"tensor {first.key('blocks')!r} has shape {shape}, but 4 dimensions are expected"
                )
            there = shape[0]
            if experts is not None and experts != there:
                raise CheckpointError(
                    f"tensor {first.key('blocks')!r} has {there} experts, but config.json says {experts}"
                )
            return there
        experts = max(layer.experts) + 1 if experts is None else experts
        if max(layer.experts) >= experts:
            raise CheckpointError(
                f"{layer.name} has an expert {max(layer.experts)}, but config.json says {experts} experts"
            )
        # A rank of expert parallelism may have a part of the files.
        if experts > len(layer.experts) * self.ranks.ep_size:
            missing = next(expert for expert in range(experts) if expert not in layer.experts)
            codes = (each.parts[0].suffix for each in FORMATS.values())
            weight = next((suffix for suffix in codes if suffix in layer.tensors), "weight")
            raise CheckpointError(
                f"tensor {f'{layer.name}.{missing}.{next(iter(self.shards))}.{weight}'!r} is missing: of {experts} "
                f"experts there are {len(layer.experts)}"
            )
        return experts

    def _scheme_of(self, rules: Rules, module: Module) -> Scheme | LeftOut:
        return scheme_of(rules, module.name, self.layer.tensors, lambda: self.tensors.is_int8(module.key("weight")))

    def _module(self, expert: int, projection: str) -> Module:
        return self.layer.module(self.tensors, expert, projection)

    def _modules(self, experts: Sequence[int]) -> Iterator[tuple[str, Module]]:
        """Their projections, each with its module: where one tensor is for all experts, that of one of them."""
        for expert in experts if self.layer.experts else experts[:1]:
            for projection in self.shards:
                yield projection, self._module(expert, projection)

    def reason_left_out(self) -> str | None:
        """Why no expert is of codes that are read here, or None."""
        found = list(self.scheme.values())
        return found[0].reason if all(isinstance(scheme, LeftOut) for scheme in found) else None

    def check_files(self) -> None:
        """Fails before anything is read if a file with tensors of this rank's experts is missing."""
        kinds = sorted(self.layer.tensors)
        for _, module in self._modules(self.local):
            self.tensors.check_files(module.key(kind) for kind in kinds)

    def check_schemes(self, quantize_w4a16: bool) -> int:
        """Their group size.

        All modules must be quantized, in groups of one size. w13 and w2 may be stored differently, and any matrix with
        zero points or without.
        """
        firsts: dict[str, tuple[str, Scheme]] = {}  # of all, and of each stack
        for projection, module in self._modules(range(self.num_experts)):
            name, scheme = module.name, self.scheme[module.name]
            if isinstance(scheme, LeftOut):
                raise CheckpointError(scheme.reason)
            first, of_all = firsts.setdefault("", (name, scheme))
            if scheme.group_size != of_all.group_size:
                raise CheckpointError(f"{name} is quantized differently from {first}")
            first, of_stack = firsts.setdefault("w2" if self.shards[projection] == "w2" else "w13", (name, scheme))
            if scheme.kind != of_stack.kind:
                raise CheckpointError(f"{name} is quantized differently from {first}")
            check_input(scheme, self.layer.name, quantize_w4a16)
        return firsts[""][1].group_size

    def _intermediate_size(self) -> int:
        """Of the whole model: as the settings say, or the first tensor that this rank has."""
        if self.settings.intermediate_size is not None:
            return self.settings.intermediate_size
        first = next(iter(self.shards))
        module = self._module(self.local[0] if self.local else 0, first)
        rows, _ = module.shape(self.scheme[module.name])
        return rows // 2 if self.shards[first] == "w13" else rows

    def _check_shapes(self, intermediate: int) -> None:
        """Fails before memory is taken for this rank's experts if the files do not hold as many weights."""
        hidden = self.settings.hidden_size
        because = f" for hidden_size {hidden} and intermediate_size {intermediate}"
        shapes = {"w13": (2 * intermediate, hidden), "w2": (hidden, intermediate)}
        for projection, module in self._modules(self.local):
            shape = shapes.get(self.shards[projection], (intermediate, hidden))
            module.check_shape(self.scheme[module.name], shape, because)

    def _activation_groups(self, sizes: ExpertSizes, asked: int | None) -> dict[str, int]:
        """Of w13 and w2, alike for all experts; call after :meth:`check_schemes`."""
        try:
            return sizes.activation_groups(wanted_by_all(self.scheme.values(), asked))
        except ValueError as error:
            raise ValueError(f"{self.layer.name}: {error}") from None

    def _has_bias(self) -> bool:
        """Whether this rank's experts have biases: each one, or one that is not zero.

        Zeros of some alone are none: older tools wrote them where a model has no biases.
        """
        modules = [module for _, module in self._modules(self.local)]
        biased = [module for module in modules if "bias" in module]
        return "bias" in self.layer.tensors and (
            len(biased) == len(modules) or any(bool(module.get("bias").any()) for module in biased)
        )

    def pack(
        self, sizes: ExpertSizes, activation_groups: Mapping[str, int], packed_one: Callable[[], object]
    ) -> ExpertPacker:
        """Reads this rank's part of its experts one by one."""
        has_bias = self._has_bias()
        bias_dtype = self.settings.dtype if has_bias else None
        ranks = (self.ranks.tp_rank, self.ranks.tp_size)
        packer = ExpertPacker(sizes, bias_dtype, *ranks, self.w13_interleaved, activation_groups=activation_groups)
        for local, expert in enumerate(self.local):
            for projection, shard in self.shards.items():
                module = self._module(expert, projection)
                matrix = module.matrix(self.scheme[module.name], has_bias or "bias" in module)
                matrix = matrix if has_bias else replace(matrix, bias=None)
                try:
                    packer.put(local, shard, matrix, module.name)
                except ValueError as error:
                    raise CheckpointError(str(error)) from error
            packed_one()
        self.tensors.release()
        return packer

    def build(self, quantize_w4a16: bool, activation_group: int | None, packed_one: Callable[[], object]) -> W4A8MoE:
        """The layer, packed.

        Raises:
            NotImplementedError: the operators cannot run it.
            ValueError: the experts cannot be cut for so many ranks, or ``activation_group`` does not fit.
        """
        group_size = self.check_schemes(quantize_w4a16)
        intermediate = self._intermediate_size()
        self._check_shapes(intermediate)
        groups, tp_size = (group_size, group_size), self.ranks.tp_size
        whole = intermediate, self.settings.hidden_size, self.settings.activation.is_gated
        sizes = sizes_of_rank(self.layer.name, len(self.local), *whole, tp_size, groups)
        activation_groups = self._activation_groups(sizes, activation_group)
        packed = self.pack(sizes, activation_groups, packed_one).pack()
        return moe_layer(self.settings, sizes, packed, self.expert_map, self._correction_bias())

    def _correction_bias(self) -> torch.Tensor | None:
        """float32 [experts], if the model's router has one."""
        if not self.settings.has_correction_bias:
            return None
        block = self.layer.name[: -len(".experts")]
        keys = [f"{block}.gate.e_score_correction_bias", f"{block}.e_score_correction_bias"]
        key = next((key for key in keys if key in self.tensors), keys[0])
        return checked_correction_bias(self.tensors.get(key), key, self.num_experts)


def _without_left_out(readers: list[_ExpertsReader]) -> list[_ExpertsReader]:
    """Those of layers of codes that are read here; the others are reported.

    Raises:
        CheckpointError: there is none.
    """
    reasons = [reader.reason_left_out() for reader in readers]
    if all(reasons):
        raise CheckpointError(reasons[0])
    for reader, reason in zip(readers, reasons):
        if reason is not None:
            logger.warning("%s is left out: %s", reader.layer.name, reason)
    return [reader for reader, reason in zip(readers, reasons) if reason is None]


def _build(
    readers: list[_ExpertsReader], quantize_w4a16: bool, activation_group: int | None, progress: bool
) -> dict[str, W4A8MoE]:
    """The layers, one after the other."""
    for reader in readers:
        reader.check_files()
    loaded: dict[str, W4A8MoE] = {}
    with progress_bar(sum(len(reader.local) for reader in readers), progress, "expert", "packing experts") as advance:
        for reader in readers:
            loaded[reader.layer.name] = reader.build(quantize_w4a16, activation_group, advance)
    return loaded


def load(
    path: str | Path,
    *,
    settings: MoESettings | None = None,
    only: Callable[[str], bool] | None = None,
    tp_rank: int = 0,
    tp_size: int = 1,
    ep_rank: int = 0,
    ep_size: int = 1,
    quantize_w4a16: bool = True,
    activation_group: int | None = None,
    w13_interleaved: bool | None = None,
    progress: bool = False,
) -> dict[str, W4A8MoE]:
    """Reads and packs the mixture-of-experts layers of a checkpoint with 4-bit weights, or 8-bit ones beside them.

    GPTQ (versions 1 and 2), AWQ, AutoRound and compressed-tensors, with zero points or without, MXFP4 and NVFP4 (of
    AMD Quark and nvidia-modelopt too), whose experts are linear modules of their own: ``<layer>.experts.<n>.up_proj``,
    ``gate_proj``, ``down_proj`` (or ``w1``, ``w3``, ``w2``, or ``gate_up_proj``); and MXFP4 as gpt-oss has it,
    ``<layer>.experts.gate_up_proj_blocks`` of all experts. Codes stay as they are.

    An expert is packed as soon as it has been read. Memory peaks at the packed layers, a few
    experts and about 128 MiB of mapped files. The router itself is not read (but for its correction bias): a layer
    takes its logits. Linear layers are :func:`w4a8.checkpoint.load_linear`'s.

    Experts may have codes of 8 bits in GPTQ, AutoRound (packed as GPTQ) and weight-only ``pack-quantized``: of some
    layers, or of ``down_proj`` alone, say; all experts of a layer alike. A layer of other codes than are read here
    (left out in config.json, with weights without scales, of other widths) is left out, and the log names it.

    Args:
        path: directory with config.json and model.safetensors (or several files and their index); or a GGUF file, the
            first of a split one, or a directory with one.
        settings: what config.json does not say or says wrongly (``read_settings`` reads what it says).
        only: takes the name of a layer, ``model.layers.0.mlp.experts`` say, and tells whether to load it.
        tp_rank, tp_size: tensor parallel: this rank's slice of each expert.
        ep_rank, ep_size: expert parallel: only this rank's experts are read, and files with others may be missing.
        quantize_w4a16: run weight-only (W4A16) checkpoints, which most are, with activations quantized to int8 as
            well, and say so in the log; as vLLM with the plugin and transformers with ``W4A8Config`` do. False refuses
            them.
        activation_group: values of k of an input that share a scale when it is quantized to int8: 32, 64 or 128 that
            divides the weights' group, or K of groups of 16; -1, all of a row. None: -1 where the checkpoint says that
            inputs are quantized per token (W4A8), else 32, or -1 of a matrix that 32 does not fit.
        w13_interleaved: rows of ``gate_up_proj`` alternate gate and up, as gpt-oss has them; None is what the
            settings say. Separate gate and up projections are never mistaken for such rows.
        progress: show a progress bar, if tqdm is installed.

    Returns:
        Layers by name, in the order of the model, on the CPU. Under tensor or expert parallelism their outputs are
        summands.

    Raises:
        ImportError: safetensors is not installed.
        CheckpointError: a tensor that is missing or has the wrong dtype, shape or values; names the key. No layer of
            experts has weights that are read here; says why.
        NotImplementedError: a layer that the op cannot run, as when tensor parallelism cuts groups; names the sizes.
    """
    if tp_size > 1 and ep_size > 1:
        raise ValueError("experts are either cut (tp_size) or distributed (ep_size), not both")
    check_activation_group(activation_group)
    found = gguf_in(path)
    if found is not None:
        ranks = tp_rank, tp_size, ep_rank, ep_size
        return load_gguf(found, settings, only, ranks, activation_group, progress)
    config = read_json(Path(path) / "config.json")
    rules = rules_of(find_config(config, Path(path)))
    settings = settings if settings is not None else settings_from_config(config)
    tensors = CheckpointTensors(path)
    ranks = _Ranks(tp_rank, tp_size, ep_rank, ep_size)
    layers = _find_layers(tensors.keys(), only)
    if not layers:
        raise CheckpointError(
            f"{path} holds no tensors of experts (<layer>.experts.<n>.<projection>.weight); "
            "fused three-dimensional experts must be linearized before they are quantized"
        )
    interleaved = settings.w13_interleaved if w13_interleaved is None else w13_interleaved
    with on_cpu():
        all_readers = [_ExpertsReader(tensors, rules, settings, ranks, interleaved, layer) for layer in layers]
        readers = _without_left_out(all_readers)
        loaded = _build(readers, quantize_w4a16, activation_group, progress)
    say_int8((scheme for reader in readers for scheme in reader.scheme.values()), activation_group)
    logger.info("packed %d layers of %s", len(loaded), path)
    return loaded
