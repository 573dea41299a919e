"""One linear module of a checkpoint: its tensors, checked, as a matrix."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from w4a8.checkpoint.tensors import CheckpointTensors
from w4a8.core.activation_groups import in_words
from w4a8.core.json_fields import CheckpointError
from w4a8.core.matrix import Matrix
from w4a8.formats import Scheme
from w4a8.formats.compressed_tensors import check_words
from w4a8.formats.matrix import groups_of

logger = logging.getLogger(__name__)


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

    def shape(self, scheme: Scheme) -> tuple[int, int]:
        """(N, K), as its tensors say; of the codes the header of the file is read alone.

        Raises:
            CheckpointError: the one that says so is missing, or has no such shape.
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
        """Compares the size of the weight with what is needed, before it is read or anything of that size is made.

        Args:
            scheme: how it is stored.
            shape: (N, K) that it must have.
            because: end of the message if it has another one.

        Raises:
            CheckpointError: it has another size, or one that its groups do not divide, or a tensor is missing.
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
        """The matrix of the module.

        Args:
            scheme: how it is stored.
            has_bias: it must have a bias.

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
        """The error of a reader, which joins names by a point."""
        text = str(error).replace(f"{self.name}.", self.key(""), 1)
        expert = "" if self.expert is None else f" (expert {self.expert})"
        return CheckpointError(f"tensor {text}{expert}")


def check_input(scheme: Scheme, name: str, quantize_w4a16: bool) -> None:
    """Raises CheckpointError for a weight-only module if it is not to run with int8 activations."""
    if scheme.weight_only is not None and not quantize_w4a16:
        raise CheckpointError(
            f"{scheme.weight_only}: {name} is W4A16; pass quantize_w4a16=True to run it with activations quantized to "
            "int8"
        )


def say_int8(scheme: Iterable[Scheme], activation_group: int | None) -> None:
    """Tells the log if weight-only modules are among those that were loaded, and what they are computed with."""
    if any(each.weight_only is not None for each in scheme):
        logger.info(
            "weights made for float activations run with activations rounded to int8 %s (activation_group)",
            in_words(activation_group),
        )
