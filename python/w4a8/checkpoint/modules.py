"""One linear module of a checkpoint: its tensors, checked, as a matrix."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from w4a8.checkpoint.tensors import CheckpointTensors
from w4a8.core.json_fields import CheckpointError
from w4a8.core.matrix import Matrix
from w4a8.formats import Stored


class Module:
    """Where the tensors of a module are: in tensors of its own, or one of the experts of some that are for all."""

    def __init__(self, tensors: CheckpointTensors, name: str, expert: int | None = None) -> None:
        """A module.

        Args:
            tensors: of the checkpoint.
            name: of the module, ``<layer>.experts.3.up_proj`` say. Of a fused one, ``<layer>.experts.down_proj``, whose
                tensors are ``..._blocks`` and so on.
            expert: of a fused one, index into the first dimension.
        """
        self.tensors = tensors
        self.name = name
        self.expert = expert

    def key(self, suffix: str) -> str:
        """Name of a tensor, by its last part."""
        return f"{self.name}{'.' if self.expert is None else '_'}{suffix}"

    def __contains__(self, suffix: str) -> bool:
        return self.key(suffix) in self.tensors

    def get(self, suffix: str) -> torch.Tensor:
        """A tensor, or what this expert has of it.

        Raises:
            CheckpointError: it is not there, or not readable; names the key.
        """
        return self.tensors.get(self.key(suffix), self.expert)

    def shape(self, stored: Stored) -> tuple[int, int]:
        """(N, K), as its tensors say.

        Raises:
            CheckpointError: the one that says so is missing, or has no such shape.
        """
        suffix = "weight_shape" if stored.format == "pack-quantized" else stored.weight
        return self._shape(stored, {suffix: self.get(suffix)})

    def _shape(self, stored: Stored, found: Mapping[str, torch.Tensor]) -> tuple[int, int]:
        try:
            return stored.shape(found)
        except ValueError as error:
            raise CheckpointError(f"tensor {self.key(str(error))}") from error

    def matrix(self, stored: Stored, has_bias: bool, shape: tuple[int, int] | None = None, because: str = "") -> Matrix:
        """The matrix of the module.

        Args:
            stored: how it is stored.
            has_bias: it must have a bias.
            shape: (N, K) that it must have; None is what its tensors say.
            because: end of the message if it has another one.

        Raises:
            CheckpointError: a tensor is missing, or has another dtype, shape or value than it should.
        """
        names = [*stored.required, *(name for name in stored.optional if name in self)]
        if has_bias:
            names.append("bias")
        found = {name: self.get(name) for name in names}
        if shape is not None:
            self._check_shape(stored, found, shape, because)
        try:
            return stored.read(found, self.name)
        except ValueError as error:
            # A reader joins names by a point.
            text = str(error).replace(f"{self.name}.", self.key(""), 1)
            expert = "" if self.expert is None else f" (expert {self.expert})"
            raise CheckpointError(f"tensor {text}{expert}") from error

    def _check_shape(
        self, stored: Stored, found: Mapping[str, torch.Tensor], shape: tuple[int, int], because: str
    ) -> None:
        """Compares the size of the weight with what is needed, before anything of that size is made."""
        stated = self._shape(stored, found)
        if stated == shape:
            return
        if stored.format == "pack-quantized":
            what = f"{self.key('weight_shape')!r} says {list(stated)}, but {list(shape)} is expected"
        elif stored.format == "int-quantized":
            what = f"{self.key(stored.weight)!r} has shape {stated}, but {shape} is expected"
        else:
            size = tuple(found[stored.weight].shape)
            what = f"{self.key(stored.weight)!r} has shape {size}, which is {stated}, but {shape} is expected"
        raise CheckpointError(f"tensor {what}{because}")


def check_input(stored: Stored, name: str, quantize_w4a16: bool) -> None:
    """Raises CheckpointError for a weight-only module unless it was asked for."""
    if stored.weight_only is not None and not quantize_w4a16:
        raise CheckpointError(
            f"{stored.weight_only}: {name} is W4A16; pass quantize_w4a16=True to run it with activations quantized to "
            "int8"
        )
