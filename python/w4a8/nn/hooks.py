"""Looks for hooks on a module, and for a forward of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules import module as of_all_modules

from w4a8.nn.output_layer import own_strides

_OF_FORWARD = ("_forward_hooks", "_forward_pre_hooks")
_ALL = (
    *_OF_FORWARD,
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
# transformers leaves hooks here after the first call for hidden states. They do nothing in other calls.
_RECORDS_OUTPUTS = "transformers.utils.output_capturing"


def _hooks(module: torch.nn.Module, kinds: tuple[str, ...]) -> list[Any]:
    """The hooks of this very module that are not this package's."""
    found = [hook for kind in kinds for hook in (getattr(module, kind, None) or {}).values()]
    return [hook for hook in found if hook is not own_strides]


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether this very module has a hook that is not this package's."""
    return bool(_hooks(module, _ALL))


def computes_more(module: torch.nn.Module) -> bool:
    """Whether a hook, or a forward put into this very module, may change what the module computes."""
    if of_all_modules._global_forward_hooks or of_all_modules._global_forward_pre_hooks or has_own_forward(module):
        return True
    return any(getattr(hook, "__module__", None) != _RECORDS_OUTPUTS for hook in _hooks(module, _OF_FORWARD))


def has_own_forward(module: torch.nn.Module) -> bool:
    """Whether someone has put another forward into this very module, as hooks of accelerate do.

    After recording outputs transformers leaves the forward of the class in the module: that does not count. Nor does
    one of this package that computes the same (``computes_the_same``).
    """
    own = module.__dict__.get("forward")
    if getattr(own, "computes_the_same", False):
        return False
    return own is not None and getattr(own, "__func__", None) is not type(module).forward
