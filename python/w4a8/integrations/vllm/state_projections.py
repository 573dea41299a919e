"""The projections of Mamba-2 on several ranks: z, x, B, C and dt, which files have as one matrix, are cut one by one.

vLLM's layer of this matrix has no parts where the ranks have copies of one group of B and C. After the layer is made,
vLLM replaces loaders of its parameters by one that cuts rows of floats.
"""

from __future__ import annotations

from functools import wraps
from inspect import signature
from typing import Any

from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

from w4a8.integrations.vllm.products import Share

# By the name of a layer that is being made: the rows of its parts.
_parts: dict[str, list[int]] = {}


def register_state_projections() -> None:
    """Once per process."""
    make = MambaMixer2.__init__

    @wraps(make)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature(make).bind(self, *args, **kwargs)
        given.apply_defaults()
        fields, name = given.arguments, f"{given.arguments['prefix']}.in_proj"
        inner, groups = fields["intermediate_size"], fields["n_groups"] * fields["ssm_state_size"]
        if fields["n_groups"] % get_tensor_model_parallel_world_size() != 0:
            _parts[name] = [inner, inner, groups, groups, fields["num_heads"]]
        try:
            make(self, *args, **kwargs)
        finally:
            _parts.pop(name, None)
        for param, load in vars(self.in_proj).pop("w4a8_loaders", ()):
            param.weight_loader = load

    MambaMixer2.__init__ = wrapped


def in_parts(layer: Any, share: Share) -> Share:
    """What a rank holds of a layer of vLLM, with the parts of the projections of Mamba-2."""
    parts = _parts.get(getattr(layer, "prefix", ""))
    if parts is None:
        return share
    own = [rows // layer.tp_size for rows in parts]
    own[2:4] = parts[2:4]
    return share._replace(sizes=own, parts=parts)


def keep_loaders(layer: Any, share: Share) -> None:
    """Lets the parameters of such a layer have the present loaders again, after vLLM has replaced them."""
    if share.parts:
        layer.w4a8_loaders = [(param, param.weight_loader) for param in layer.parameters(recurse=False)]
