"""What a packed model cannot do is refused in words, before torch fails somewhere inside or half a model has moved."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch


def inference_only(model: torch.nn.Module) -> None:
    """Lets a model neither be trained nor leave the CPU."""
    model.requires_grad_(False)
    # On the instance: a class made here would show in config.json and could not be pickled.
    model.train = partial(_train, model)
    model.to = partial(_to, model)
    model.cuda = partial(_cuda, model)


def refuse_device(device: Any) -> None:
    """Raises RuntimeError for anything but CPUs."""
    if device is not None and torch.device(device).type not in ("cpu", "meta"):
        raise RuntimeError(
            f"the model cannot go to {device}: its weights are packed for the w4a8 operators, which run on CPUs. Load "
            "the unquantized checkpoint without W4A8Config instead"
        )


def _train(model: torch.nn.Module, mode: bool = True) -> torch.nn.Module:
    if mode:
        raise RuntimeError(
            "the model cannot be trained: int4 weights and the w4a8 operators have no gradients. Train the unquantized "
            "model, and quantize it then"
        )
    return type(model).train(model, False)


def _to(model: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
    refuse_device(torch._C._nn._parse_to(*args, **kwargs)[0])
    return type(model).to(model, *args, **kwargs)


def _cuda(model: torch.nn.Module, device: Any = None) -> torch.nn.Module:
    refuse_device("cuda")
    return model
