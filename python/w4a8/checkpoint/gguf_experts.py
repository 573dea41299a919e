"""The mixture-of-experts layers of a GGUF file, packed and ready to run. Codes stay as they are."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from w4a8.checkpoint.gguf_file import GGUFFile
from w4a8.checkpoint.gguf_keys import Keys
from w4a8.checkpoint.gguf_settings import settings_from_keys
from w4a8.checkpoint.moe_layer import checked_correction_bias, moe_layer, sizes_of_rank
from w4a8.checkpoint.settings import MoESettings
from w4a8.core.activation_groups import in_words
from w4a8.core.experts import ExpertSizes, determine_expert_map
from w4a8.core.json_fields import CheckpointError
from w4a8.core.matrix import Matrix
from w4a8.core.memory import on_cpu
from w4a8.core.packer import ExpertPacker
from w4a8.formats.gguf_blocks import TYPES
from w4a8.nn import W4A8MoE
from w4a8.progress import progress_bar

logger = logging.getLogger(__name__)

_STACK = re.compile(r"blk\.([0-9]{1,4})\.ffn_(gate_up|gate|up|down)_exps\.weight")
# What a stack is of a layer.
SHARDS = {"gate": "w1", "up": "w3", "down": "w2", "gate_up": "w13"}


def _name(layer: int) -> str:
    """As transformers calls the experts of a layer."""
    return f"model.layers.{layer}.mlp.experts"


class ExpertStacks:
    """The experts of one layer: one stack for each projection."""

    def __init__(
        self, file: GGUFFile, index: int, names: Iterable[str], name: str, settings: MoESettings | None = None
    ) -> None:
        """Compares types and shapes, before anything is read.

        Args:
            file: that has them.
            index: of the layer.
            names: of the stacks: gate, up, down, or gate_up; without a gate up and down.
            name: of the experts in the model, for errors.
            settings: what the keys say of the layer; None: its sizes are those of its tensors.

        Raises:
            CheckpointError: other stacks, shapes or types.
        """
        self.file, self.index, self.name, self.settings = file, index, name, settings
        self.names = {stack: f"blk.{index}.ffn_{stack}_exps" for stack in sorted(names)}
        self.has_bias = any(f"{name}.bias" in file for name in self.names.values())
        if set(self.names) not in ({"gate", "up", "down"}, {"gate_up", "down"}, {"up", "down"}):
            raise CheckpointError(f"blk.{index} has stacks of {', '.join(self.names)}, expected gate, up, down")
        self.is_gated = len(self.names) == 3 or "gate_up" in self.names
        if settings is not None and settings.activation.is_gated != self.is_gated:
            raise CheckpointError(f"blk.{index} has stacks of {', '.join(self.names)}, expected gate, up, down")
        down = self._shape("down")
        if settings is not None:
            down = settings.num_experts, settings.hidden_size, settings.intermediate_size
        self.experts, self.hidden, self.intermediate = down
        self._check()

    @classmethod
    def of_tensors(cls, file: GGUFFile, tensors: Iterable[str], name: str) -> ExpertStacks:
        """Those of one layer by the names of its tensors, of sizes that these have; biases may be among them."""
        found = [match for match in map(_STACK.fullmatch, tensors) if match is not None]
        return cls(file, int(found[0][1]), [match[2] for match in found], name)

    def _shape(self, stack: str) -> tuple[int, ...]:
        shape = self.file.tensors[f"{self.names[stack]}.weight"].shape
        if len(shape) != 3:
            raise CheckpointError(f"tensor '{self.names[stack]}.weight' has shape {shape}, expected 3 dimensions")
        return shape

    def _check(self) -> None:
        hidden, inner = self.hidden, self.intermediate
        shapes = {"gate": (inner, hidden), "up": (inner, hidden), "gate_up": (2 * inner, hidden)}
        for name, stack in self.names.items():
            shape = (self.experts, *shapes.get(name, (hidden, inner)))
            self.file.expect_shape(f"{stack}.weight", shape)
            if self.has_bias:
                self.file.expect_shape(f"{stack}.bias", shape[:2])
            if self.file.tensors[f"{stack}.weight"].type not in TYPES:
                kind = self.file.type_name(f"{stack}.weight")
                raise CheckpointError(f"tensor '{stack}.weight' is {kind}, but a quantized type is expected")

    @property
    def group_sizes(self) -> tuple[int, int]:
        """Weights that share a scale, of w13 and of w2."""
        first = next(name for name in ("gate", "gate_up", "up") if name in self.names)
        types = (self.file.tensors[f"{self.names[name]}.weight"].type for name in (first, "down"))
        return tuple(TYPES[kind].group for kind in types)

    def matrices(self, expert: int) -> Iterator[tuple[str, Matrix, str]]:
        """Of one expert: what each of its matrices is called (``w1``, ``w13`` ...), the matrix, and its tensor."""
        for name, stack in self.names.items():
            rows = self.file.tensors[f"{stack}.weight"].shape[1]
            matrix = self.file.matrix(f"{stack}.weight", expert * rows, (expert + 1) * rows)
            if self.has_bias:
                matrix = replace(matrix, bias=self.file.floats(f"{stack}.bias", expert, expert + 1)[0].float())
            yield SHARDS[name] if self.is_gated or name == "down" else "w1", matrix, stack

    def correction_bias(self) -> torch.Tensor | None:
        """float32 [experts], or None."""
        name = f"blk.{self.index}.exp_probs_b.bias"
        if name not in self.file and not self.settings.has_correction_bias:
            return None
        return checked_correction_bias(self.file.tensor(name), name, self.experts)

    def pack(
        self,
        experts: Sequence[int],
        tp_rank: int,
        tp_size: int,
        activation_group: int | None,
        packed_one: Callable[[], object] = lambda: None,
    ) -> tuple[ExpertSizes, dict[str, torch.Tensor]]:
        """Packed stacks of ``w13`` and ``w2``, uint8 [E, bytes], and their sizes.

        Args:
            experts: those of this rank.
            tp_rank, tp_size: which part of each expert this rank holds.
            activation_group: as of :func:`w4a8.load`.
            packed_one: called after each expert.

        Raises:
            CheckpointError: gate and up are of different types.
            NotImplementedError: the operators cannot run it.
            ValueError: the experts cannot be cut for so many ranks, or ``activation_group`` does not fit; names the
                layer.
        """
        whole = self.intermediate, self.hidden, self.is_gated
        sizes = sizes_of_rank(self.name, len(experts), *whole, tp_size, self.group_sizes)
        try:
            activation_groups = sizes.activation_groups(activation_group)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None
        bias_dtype = torch.float32 if self.has_bias else None
        packer = ExpertPacker(sizes, bias_dtype, tp_rank, tp_size, activation_groups=activation_groups)
        for index, expert in enumerate(experts):
            for shard, matrix, name in self.matrices(expert):
                try:
                    packer.put(index, shard, matrix, name)
                except ValueError as error:
                    raise CheckpointError(str(error)) from error
            packed_one()
        return sizes, packer.pack()


def layers_of(file: GGUFFile, settings: MoESettings | None, only: Callable[[str], bool] | None) -> list[ExpertStacks]:
    """The layers of experts of a file, in the order of the model.

    Raises:
        CheckpointError: there is none, or one is not as the keys say.
    """
    stacks: dict[int, list[str]] = {}
    keys = Keys(file.keys)
    for name in file.tensors:
        match = _STACK.fullmatch(name)
        if match is not None and not keys.is_left_out(name) and (only is None or only(_name(int(match[1])))):
            stacks.setdefault(int(match[1]), []).append(match[2])
    if not stacks:
        raise CheckpointError(f"{file.paths[0]} holds no stacks of experts (blk.<n>.ffn_<projection>_exps.weight)")
    if settings is None:
        has_bias = any(f"blk.{index}.exp_probs_b.bias" in file for index in stacks)
        settings = settings_from_keys(file.keys, has_bias)
    return [ExpertStacks(file, index, stacks[index], _name(index), settings) for index in sorted(stacks)]


def build(
    layer: ExpertStacks,
    ranks: tuple[int, int, int, int],
    activation_group: int | None,
    packed_one: Callable[[], object],
) -> W4A8MoE:
    """The layer, packed.

    Args:
        layer: of :func:`layers_of`.
        ranks: tp_rank, tp_size, ep_rank, ep_size as of :func:`w4a8.load`.
        activation_group: as of :func:`w4a8.load`.
        packed_one: called after each expert.

    Raises:
        CheckpointError: the correction bias is not one finite number an expert.
        CheckpointError, NotImplementedError, ValueError: as of :meth:`ExpertStacks.pack`.
    """
    tp_rank, tp_size, ep_rank, ep_size = ranks
    count, expert_map = determine_expert_map(ep_size, ep_rank, layer.experts)
    local = range(count) if expert_map is None else torch.nonzero(expert_map != -1).flatten().tolist()
    correction_bias = layer.correction_bias()
    sizes, packed = layer.pack(local, tp_rank, tp_size, activation_group, packed_one)
    return moe_layer(layer.settings, sizes, packed, expert_map, correction_bias)


def load_gguf(
    path: Path,
    settings: MoESettings | None,
    only: Callable[[str], bool] | None,
    ranks: tuple[int, int, int, int],
    activation_group: int | None,
    progress: bool,
) -> dict[str, W4A8MoE]:
    """:func:`w4a8.load` of a GGUF file."""
    file = GGUFFile(path)
    loaded: dict[str, W4A8MoE] = {}
    with on_cpu():
        layers = layers_of(file, settings, only)
        count, _ = determine_expert_map(ranks[3], ranks[2], layers[0].experts)
        with progress_bar(len(layers) * count, progress, "expert", "packing experts") as advance:
            for layer in layers:
                loaded[layer.name] = build(layer, ranks, activation_group, advance)
    logger.info("packed %d layers of %s: activations rounded to int8 %s", len(loaded), path, in_words(activation_group))
    return loaded
