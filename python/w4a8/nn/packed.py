"""Base classes of modules with packed weights. They check the tensors that are loaded."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from w4a8.core.matrix import Matrix
from w4a8.nn.options import DEFAULT_GROUP_SIZE
from w4a8.ops import dyn_quant_matmul_4bit, read_header


class PackedModule(torch.nn.Module):
    """A module whose weights are packed matrices (uint8 [bytes]) or stacks of them ([E, bytes]), by default buffers."""

    def packed_shapes(self) -> dict[str, dict[str, int | str]]:
        """Buffer name -> required fields of the header: ``n``, ``k`` and ``group``, and perhaps ``values``."""
        raise NotImplementedError

    def check_packed(self, name: str, packed: torch.Tensor) -> None:
        """Raises ValueError if a tensor cannot stand in the buffer of this name; says why."""
        if packed.dtype != torch.uint8:
            raise ValueError(f"{name} is {packed.dtype}, expected uint8")
        if packed.is_meta:
            return
        expected = self.packed_shapes()[name]
        for index, matrix in enumerate(packed if packed.dim() == 2 else [packed]):
            header = read_header(matrix)
            for field, value in expected.items():
                if header[field] != value:
                    where = f"{name}[{index}]" if packed.dim() == 2 else name
                    raise ValueError(f"{where}: {field} is {header[field]}, expected {value}")

    def kind_repr(self) -> str:
        """For print(): everything but plain int4; nothing on the meta device."""
        kinds = []
        for name in self.packed_shapes():
            packed = getattr(self, name)
            if packed.is_meta or packed.numel() == 0:
                return ""
            header = read_header(packed[0] if packed.dim() == 2 else packed)
            plain = "zero points" if header["has_zero_points"] else ""
            kinds.append(plain if header["values"] == "int4" else header["values"])
        return "".join(f", {kind}" for kind in dict.fromkeys(kinds) if kind)

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors):
        # Bytes of a matrix of another shape may have the same size: they would load, and fail only in forward. A
        # matrix with or without a bias, or with scales of another type, has another size and fits.
        count = len(errors)
        given = {name: state_dict[prefix + name] for name in self.packed_shapes() if prefix + name in state_dict}
        for name, packed in given.items():
            try:
                self.check_packed(name, packed)
            except (ValueError, TypeError) as error:
                errors.append(f"{prefix}{error}" if str(error).startswith(name) else f"{prefix}{name}: {error}")
        if len(errors) == count:
            self._make_room(given)
            super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)

    def _make_room(self, given: Mapping[str, torch.Tensor]) -> None:
        """Gives the buffers the sizes of the checked tensors that will be loaded."""
        for name, packed in given.items():
            own = getattr(self, name)
            if packed.shape != own.shape and packed.shape[:-1] == own.shape[:-1]:
                setattr(self, name, torch.empty_like(packed, device=own.device))


class PackedLinear(PackedModule):
    """A linear layer with one packed matrix."""

    packed: torch.Tensor

    def __init__(
        self, packed: torch.Tensor, in_features: int, out_features: int, group_size: int = DEFAULT_GROUP_SIZE
    ) -> None:
        """Takes a packed matrix.

        Args:
            packed: uint8 [bytes] of dyn_quant_pack_4bit_weight; its bias, if it has one, is the layer's.
            in_features: K.
            out_features: N.
            group_size: values of k per scale; -1 is channelwise.

        Raises:
            ValueError: ``packed`` is no packed matrix of these sizes; says why.
        """
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.group_size = in_features if group_size == -1 else group_size
        self.check_packed("packed", packed)
        self.register_buffer("packed", packed)

    @classmethod
    def from_matrix(
        cls, matrix: Matrix, scale_dtype: torch.dtype | None = None, *, activation_group: int | None = None
    ) -> PackedLinear:
        """A layer of a matrix from a reader (:mod:`w4a8.formats`).

        Args:
            matrix: of any kind.
            scale_dtype: float32, bfloat16 or float16: rounds the scales. None: the smallest type that holds all scales
                exactly (docs/formats.md).
            activation_group: as in :class:`QuantOptions`.

        Raises:
            ValueError: an ``activation_group`` that does not fit; names sizes that fit.
        """
        packed = matrix.pack(scale_dtype, activation_group=activation_group)
        return cls(packed, matrix.columns, matrix.rows, matrix.group)

    @property
    def qweight(self) -> torch.Tensor:
        """The packed matrix, by the name that PEFT asks quantized layers for."""
        return self.packed

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``input`` float32, bfloat16 or float16 [..., in_features] to [..., out_features] of its type."""
        return dyn_quant_matmul_4bit(input, self.packed, self.group_size, self.in_features, self.out_features)

    def extra_repr(self) -> str:
        """Sizes and kind, for print()."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, group_size={self.group_size}"
        return sizes + self.kind_repr()

    def packed_shapes(self) -> dict[str, dict[str, int | str]]:
        """The required fields of the header."""
        return {"packed": {"n": self.out_features, "k": self.in_features, "group": self.group_size}}
