"""What modules with packed weights have in common: they check what is loaded into them."""

from __future__ import annotations

import torch

from w4a8.ops import read_header


class PackedModule(torch.nn.Module):
    """A module whose weights are packed matrices (uint8 [bytes]) or stacks of them ([E, bytes]) in buffers."""

    def packed_shapes(self) -> dict[str, dict[str, int]]:
        """Buffer name -> what its header must say: ``n``, ``k`` and ``group``."""
        raise NotImplementedError

    def check_packed(self, name: str, packed: torch.Tensor) -> None:
        """Raises ValueError if a tensor cannot stand in the buffer of this name; says why."""
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
        """For print(): what is not plain int4; nothing on the meta device."""
        kinds = []
        for name in self.packed_shapes():
            packed = getattr(self, name)
            if packed.is_meta or packed.numel() == 0:
                return ""
            header = read_header(packed[0] if packed.dim() == 2 else packed)
            kinds.append("e2m1" if header["values"] == "e2m1" else "zero points" if header["has_zero_points"] else "")
        return "".join(f", {kind}" for kind in dict.fromkeys(kinds) if kind)

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors):
        # Bytes of another matrix of the same size would load, and fail only in forward. One with a bias (or without,
        # or with scales of another type) is as good, whatever its size.
        count = len(errors)
        for name in self.packed_shapes():
            packed = state_dict.get(prefix + name)
            if packed is None:
                continue
            try:
                self.check_packed(name, packed)
            except (ValueError, TypeError) as error:
                errors.append(f"{prefix}{error}" if str(error).startswith(name) else f"{prefix}{name}: {error}")
                continue
            own = getattr(self, name)
            if packed.shape != own.shape and packed.shape[:-1] == own.shape[:-1]:
                setattr(self, name, torch.empty_like(packed, device=own.device))
        if len(errors) == count:
            super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)
