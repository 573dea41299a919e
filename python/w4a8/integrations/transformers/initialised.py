"""What transformers' ``_init_weights`` finds of layers that are packed while a checkpoint loads."""

from __future__ import annotations

import torch

_NAMES = ("weight", "bias")


def stand_in(new: torch.nn.Module, old: torch.nn.Linear) -> None:
    """Gives a packed layer, until :func:`let_go`, a weight and a bias without storage that count as initialised.

    transformers initialises whatever the checkpoint had not, module by module, and the code for one that holds linear
    layers (T5, Mamba) reads theirs, loaded or not.

    Args:
        new: what stands for the linear layer. Other modules are left alone.
        old: the linear layer.
    """
    if not isinstance(old, torch.nn.Linear):
        return
    for name in _NAMES:
        tensor = getattr(old, name)
        if tensor is not None:
            tensor = torch.empty_like(tensor, device="meta", requires_grad=False)
            tensor._is_hf_initialized = True
        new.__dict__[name] = tensor


def let_go(module: torch.nn.Module) -> None:
    """Takes away what :func:`stand_in` gave."""
    for name in _NAMES:
        module.__dict__.pop(name, None)
