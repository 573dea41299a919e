"""The mixture-of-experts layers of a GGUF file, packed and ready to run. Codes stay as they are."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch

from w4a8.checkpoint.experts import Experts
from w4a8.checkpoint.gguf_file import GGUFFile
from w4a8.checkpoint.gguf_keys import Keys
from w4a8.checkpoint.settings import MoESettings, settings_from_keys
from w4a8.core.json_fields import CheckpointError
from w4a8.core.matrix import Matrix
from w4a8.formats.gguf_blocks import TYPES

_STACK = re.compile(r"blk\.([0-9]{1,4})\.ffn_(gate_up|gate|up|down)_exps\.weight")
# Kind of a stack in a layer.
SHARDS = {"gate": "w1", "up": "w3", "down": "w2", "gate_up": "w13"}


def _name(layer: int) -> str:
    """As transformers calls the experts of a layer."""
    return f"model.layers.{layer}.mlp.experts"


class ExpertStacks(Experts):
    """The experts of one layer: one stack for each projection."""

    def __init__(
        self, file: GGUFFile, index: int, names: Iterable[str], name: str, settings: MoESettings | None = None
    ) -> None:
        """Compares types and shapes, before anything is read.

        Args:
            file: with the stacks.
            index: of the layer.
            names: of the stacks: gate, up, down, or gate_up; without a gate up and down.
            name: of the experts in the model, for errors.
            settings: of the layer, by the keys; None: sizes by the tensors.

        Raises:
            CheckpointError: other stacks, shapes or types.
        """
        self.file, self.index, self.name, self.settings = file, index, name, settings
        self.names = {stack: f"blk.{index}.ffn_{stack}_exps" for stack in sorted(names)}
        self.has_bias = any(f"{name}.bias" in file for name in self.names.values())
        self.bias_dtype = torch.float32 if self.has_bias else None
        self.is_gated = len(self.names) == 3 or "gate_up" in self.names
        known = set(self.names) in ({"gate", "up", "down"}, {"gate_up", "down"}, {"up", "down"})
        if not known or (settings is not None and settings.activation.is_gated != self.is_gated):
            raise CheckpointError(
                f"blk.{index} has the stacks of experts {', '.join(self.names)}, but gate, up, down are expected"
            )
        down = self._shape("down")
        if settings is not None:
            down = settings.num_experts, settings.hidden_size, settings.intermediate_size
        self.experts, self.hidden, self.intermediate = down
        self._check()
        first = next(stack for stack in ("gate", "gate_up", "up") if stack in self.names)
        types = (file.tensors[f"{self.names[stack]}.weight"].type for stack in (first, "down"))
        self.group_sizes = tuple(TYPES[kind].group for kind in types)

    @classmethod
    def of_tensors(cls, file: GGUFFile, tensors: Iterable[str], name: str) -> ExpertStacks:
        """The stacks of one layer, by names and sizes of its tensors; biases may be among them."""
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

    def matrices(self, expert: int) -> Iterator[tuple[str, Matrix, str]]:
        """The matrices of one expert: kind (``w1``, ``w13`` ...), matrix, tensor."""
        for name, stack in self.names.items():
            rows = self.file.tensors[f"{stack}.weight"].shape[1]
            matrix = self.file.matrix(f"{stack}.weight", expert * rows, (expert + 1) * rows)
            if self.has_bias:
                matrix = replace(matrix, bias=self.file.floats(f"{stack}.bias", expert, expert + 1)[0].float())
            yield SHARDS[name] if self.is_gated or name == "down" else "w1", matrix, stack

    def correction_bias(self) -> tuple[torch.Tensor, str] | None:
        """As :meth:`Experts.correction_bias`."""
        name = f"blk.{self.index}.exp_probs_b.bias"
        if name not in self.file and not self.settings.has_correction_bias:
            return None
        return self.file.tensor(name), name


def layers_of(file: GGUFFile, settings: MoESettings | None, only: Callable[[str], bool] | None) -> list[ExpertStacks]:
    """The layers of experts of a file, in the order of the model.

    Raises:
        CheckpointError: there is no such layer, or a layer contradicts the keys.
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
