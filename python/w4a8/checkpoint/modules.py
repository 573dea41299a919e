"""One linear module of a compressed-tensors checkpoint: its tensors, checked, as a Matrix4."""

from __future__ import annotations

import torch

from w4a8.checkpoint.scheme import QuantizationScheme, Scheme
from w4a8.checkpoint.tensors import CheckpointError, CheckpointTensors
from w4a8.core.matrix import Matrix4
from w4a8.formats import from_int_quantized, from_pack_quantized

# Of each format: the function that reads it, and the tensors that must be there.
_FORMATS = {
    "int-quantized": (from_int_quantized, ("weight", "weight_scale")),
    "pack-quantized": (from_pack_quantized, ("weight_packed", "weight_shape", "weight_scale")),
}
_OPTIONAL = ("weight_zero_point", "weight_g_idx")


class ModuleReader:
    """Reads linear modules, of experts or not; every error names the tensor."""

    def __init__(self, tensors: CheckpointTensors, schemes: QuantizationScheme, quantize_w4a16: bool) -> None:
        self.tensors = tensors
        self.schemes = schemes
        self.quantize_w4a16 = quantize_w4a16

    def check_input(self, scheme: Scheme, name: str) -> None:
        """Refuses a weight-only scheme unless it was asked for."""
        if not scheme.quantizes_input and not self.quantize_w4a16:
            raise CheckpointError(
                f"{scheme.key}.input_activations is missing: {name} is W4A16; pass quantize_w4a16=True to run "
                "it with activations quantized to int8"
            )

    def rows(self, module: str, scheme: Scheme) -> int:
        """Output features, as the weight says."""
        key = f"{module}.{_FORMATS[scheme.format][1][0]}"
        weight = self.tensors.get(key)
        if weight.dim() != 2:
            raise CheckpointError(f"tensor {key}: shape {tuple(weight.shape)}, but 2 dimensions are expected")
        return weight.shape[0]

    def matrix(
        self,
        module: str,
        scheme: Scheme,
        has_bias: bool,
        shape: tuple[int, int] | None = None,
        because: str = "",
    ) -> Matrix4:
        """The matrix of a module.

        Args:
            module: its name.
            scheme: of its tensors.
            has_bias: it must have a bias.
            shape: (N, K) that it must have; None is what its tensors say.
            because: end of the message if it has another one.

        Raises:
            CheckpointError: a tensor is missing, or has another dtype, shape or value than it should.
        """
        read, required = _FORMATS[scheme.format]
        names = [*required, *(name for name in _OPTIONAL if f"{module}.{name}" in self.tensors)]
        if has_bias:
            names.append("bias")
        found = {name: self.tensors.get(f"{module}.{name}") for name in names}
        try:
            if shape is not None:
                self._check_shape(found, module, shape, because)
            return read(found, module, scheme.weights.group_size or -1, True)
        except ValueError as error:
            raise CheckpointError(f"tensor {error}") from error

    @staticmethod
    def _check_shape(found: dict[str, torch.Tensor], module: str, shape: tuple[int, int], because: str) -> None:
        """Compares the size of the weight with what is needed, before anything of that size is made."""
        stated = found.get("weight_shape")
        if stated is not None:
            sizes = stated.tolist() if stated.numel() <= 4 else f"{stated.numel()} numbers"
            if sizes != list(shape):
                raise ValueError(f"{module + '.weight_shape'!r} says {sizes}, but {list(shape)} is expected{because}")
        elif found["weight"].shape != shape and found["weight"].dim() == 2:
            size = tuple(found["weight"].shape)
            raise ValueError(f"{module + '.weight'!r} has shape {size}, but {shape} is expected{because}")
