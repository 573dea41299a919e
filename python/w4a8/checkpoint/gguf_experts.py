"""The mixture-of-experts layers of a GGUF file, packed and ready to run. Codes stay as they are."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from w4a8.checkpoint.gguf_file import GGUFFile
from w4a8.checkpoint.gguf_keys import Keys
from w4a8.checkpoint.gguf_settings import settings_from_keys
from w4a8.checkpoint.moe_layer import checked_correction_bias, moe_layer, sizes_of_rank
from w4a8.checkpoint.settings import MoESettings
from w4a8.core.activation_groups import in_words
from w4a8.core.experts import determine_expert_map
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


class _Layer:
    """The experts of one layer: one stack for each projection."""

    def __init__(self, file: GGUFFile, index: int, names: list[str], settings: MoESettings) -> None:
        self.file, self.index, self.settings = file, index, settings
        self.names = {name: f"blk.{index}.ffn_{name}_exps" for name in sorted(names)}
        self.name = _name(index)
        self.has_bias = any(f"{name}.bias" in file for name in self.names.values())
        self._check()

    def _check(self) -> None:
        """Types and shapes, before anything is read."""
        hidden, inner = self.settings.hidden_size, self.settings.intermediate_size
        shapes = {"gate": (inner, hidden), "up": (inner, hidden), "gate_up": (2 * inner, hidden)}
        expected = set(self.names)
        if expected not in ({"gate", "up", "down"}, {"gate_up", "down"}):
            raise CheckpointError(
                f"blk.{self.index} has stacks of {', '.join(sorted(expected))}, expected gate, up, down"
            )
        for name, stack in self.names.items():
            shape = (self.settings.num_experts, *shapes.get(name, (hidden, inner)))
            self.file.expect_shape(f"{stack}.weight", shape)
            if self.has_bias:
                self.file.expect_shape(f"{stack}.bias", shape[:2])
            if self.file.tensors[f"{stack}.weight"].type not in TYPES:
                kind = self.file.type_name(f"{stack}.weight")
                raise CheckpointError(f"tensor '{stack}.weight' is {kind}, but a quantized type is expected")

    def group_size(self, name: str) -> int:
        """Weights that share a scale."""
        return TYPES[self.file.tensors[f"{self.names[name]}.weight"].type].group

    def matrix(self, name: str, expert: int) -> Matrix:
        """One projection of one expert."""
        stack = self.names[name]
        rows = self.file.tensors[f"{stack}.weight"].shape[1]
        matrix = self.file.matrix(f"{stack}.weight", expert * rows, (expert + 1) * rows)
        if not self.has_bias:
            return matrix
        return replace(matrix, bias=self.file.floats(f"{stack}.bias", expert, expert + 1)[0].float())

    def correction_bias(self) -> torch.Tensor | None:
        """float32 [experts], or None."""
        name = f"blk.{self.index}.exp_probs_b.bias"
        if name not in self.file and not self.settings.has_correction_bias:
            return None
        return checked_correction_bias(self.file.tensor(name), name, self.settings.num_experts)


def layers_of(file: GGUFFile, settings: MoESettings | None, only: Callable[[str], bool] | None) -> list[_Layer]:
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
    return [_Layer(file, index, stacks[index], settings) for index in sorted(stacks)]


def build(
    layer: _Layer,
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
        CheckpointError: gate and up are of different types, or the correction bias is not one finite number an expert.
        NotImplementedError: the operators cannot run it.
        ValueError: the experts cannot be cut for so many ranks, or ``activation_group`` does not fit; names the layer.
    """
    settings, (tp_rank, tp_size, ep_rank, ep_size) = layer.settings, ranks
    count, expert_map = determine_expert_map(ep_size, ep_rank, settings.num_experts)
    local = range(count) if expert_map is None else torch.nonzero(expert_map != -1).flatten().tolist()
    first = next(name for name in ("gate", "gate_up") if name in layer.names)
    groups = layer.group_size(first), layer.group_size("down")
    sizes = sizes_of_rank(layer.name, settings, count, settings.intermediate_size, tp_size, groups)
    try:
        activation_groups = sizes.activation_groups(activation_group)
    except ValueError as error:
        raise ValueError(f"{layer.name}: {error}") from None
    correction_bias, bias_dtype = layer.correction_bias(), torch.float32 if layer.has_bias else None
    packer = ExpertPacker(sizes, bias_dtype, tp_rank, tp_size, activation_groups=activation_groups)
    for index, expert in enumerate(local):
        for name, stack in layer.names.items():
            try:
                packer.put(index, SHARDS[name], layer.matrix(name, expert), stack)
            except ValueError as error:
                raise CheckpointError(str(error)) from error
        packed_one()
    return moe_layer(settings, sizes, packer.pack(), expert_map, correction_bias)


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
        count, _ = determine_expert_map(ranks[3], ranks[2], layers[0].settings.num_experts)
        with progress_bar(len(layers) * count, progress, "expert", "packing experts") as advance:
            for layer in layers:
                loaded[layer.name] = build(layer, ranks, activation_group, advance)
    logger.info("packed %d layers of %s: activations rounded to int8 %s", len(loaded), path, in_words(activation_group))
    return loaded
