"""A model whose packed experts stay on the CPU, while an accelerator has everything else."""

from __future__ import annotations

from typing import Any

import torch

from w4a8.core.matrix import matrix_of
from w4a8.nn.embedding import PackedEmbedding
from w4a8.nn.experts import PackedExperts
from w4a8.nn.packed import PackedLinear, PackedModule


class ScaledEmbedding(torch.nn.Embedding):
    """An embedding whose rows are multiplied by a factor, as Gemma's are."""

    def __init__(self, weight: torch.nn.Parameter, scale: float) -> None:
        super().__init__(*weight.shape, _weight=weight)
        self.scale = scale

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Integers [...] to [..., embedding_dim]."""
        rows = super().forward(input)
        return rows * torch.tensor(self.scale, dtype=rows.dtype).item()  # rounded, as the packed embedding does


def accelerator(device: Any) -> torch.device:
    """The device of this name, with its index.

    Raises:
        ValueError: the device is a CPU, or the meta device.
        RuntimeError: torch cannot use the device here; says why.
    """
    try:
        found = torch.device(device)
        if found.type in ("cpu", "meta"):
            raise ValueError(f"device is {found}, expected an accelerator such as cuda")
        return torch.empty(0, device=found).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise RuntimeError(f"device is {device}, which torch cannot use here: {error}") from error


def beside(model: torch.nn.Module, device: torch.device | str, dtype: torch.dtype | None = None) -> list[str]:
    """Moves a model to an accelerator, all but its packed experts, which stay on the CPU and are called from there.

    Packed linear layers and embeddings become layers of floats there. From then on ``model.to`` moves the model to
    other accelerators without its experts, and back to the CPU.

    Args:
        model: with packed experts; changed in place.
        device: such as "cuda".
        dtype: of the weights that were packed; None: of the model's first floating-point parameter, or torch's default.

    Returns:
        Names of the packed layers that became floats.

    Raises:
        ValueError: the model has no packed experts; or a packed module that has no floats, which is named.
        RuntimeError: torch cannot use the device here.
    """
    device = accelerator(device)
    if dtype is None:
        types = (tensor.dtype for tensor in model.parameters() if tensor.is_floating_point())
        dtype = next(types, torch.get_default_dtype())
    packed = {name: module for name, module in model.named_modules() if isinstance(module, PackedModule)}
    experts = [module for module in packed.values() if isinstance(module, PackedExperts)]
    if not experts:
        raise ValueError(f"the model has no packed experts, so nothing would stay on the CPU beside {device}")
    layers = {name: module for name, module in packed.items() if not isinstance(module, PackedExperts)}
    for name, module in layers.items():
        if not isinstance(module, (PackedLinear, PackedEmbedding)):
            raise ValueError(f"{name} is a {type(module).__name__}, which has no floats for {device}")
    weights: dict[int, torch.nn.Parameter] = {}  # by address of packed bytes, which several modules may share
    made = {id(module): _floats_of(module, device, dtype, weights) for module in layers.values()}
    for owner in list(model.modules()):
        for key, child in list(owner._modules.items()):
            if id(child) in made:
                setattr(owner, key, made[id(child)])
    for module in experts:
        module.stays_on_cpu = True
    model.to(device)
    return list(layers)


def _floats_of(
    module: PackedLinear | PackedEmbedding,
    device: torch.device,
    dtype: torch.dtype,
    weights: dict[int, torch.nn.Parameter],
) -> torch.nn.Module:
    """The layer of floats of a packed one, on a device."""
    packed = module.packed if isinstance(module, PackedLinear) else module.rows_packed
    matrix = matrix_of(packed, "weight")
    weight = weights.get(packed.data_ptr())
    if weight is None:
        weight = torch.nn.Parameter(matrix.floats().to(dtype).to(device), requires_grad=False)
        weights[packed.data_ptr()] = weight
    if isinstance(module, PackedEmbedding):
        scale = module.scale
        new = torch.nn.Embedding(*weight.shape, _weight=weight) if scale is None else ScaledEmbedding(weight, scale)
        new.weight = weight
        return new.train(module.training)
    new = torch.nn.Linear(1, 1, matrix.bias is not None, device="meta")
    new.in_features, new.out_features, new.weight = module.in_features, module.out_features, weight
    if matrix.bias is not None:
        new.bias = torch.nn.Parameter(matrix.bias.to(dtype).to(device), requires_grad=False)
    return new.train(module.training)
