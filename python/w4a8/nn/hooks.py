"""Looks for hooks on a module, and for a forward of its own."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from w4a8.nn.output_layer import own_strides

OF_FORWARD = ("_forward_hooks", "_forward_pre_hooks")
_ALL = (
    *OF_FORWARD,
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def has_hooks(module: torch.nn.Module, kinds: Iterable[str] = _ALL) -> bool:
    """Whether this very module has a hook of these kinds that is not this package's."""
    return any(hook is not own_strides for kind in kinds for hook in (getattr(module, kind, None) or {}).values())


def has_own_forward(module: torch.nn.Module) -> bool:
    """Whether someone has put another forward into this very module, as hooks of accelerate do.

    After recording outputs transformers leaves the forward of the class in the module: that does not count.
    """
    own = module.__dict__.get("forward")
    return own is not None and getattr(own, "__func__", None) is not type(module).forward
