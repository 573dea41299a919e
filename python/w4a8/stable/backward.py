"""Operators are for inference: with gradients on they run, and backward through their outputs is an error.

The key Autograd falls through: a call without gradients pays nothing. With gradients on, the library asks for the error
by ``w4a8_internal::refuse_backward``. What torch.compile traces never reaches the library: its dispatcher, which is in
Python, gets a kernel of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: str, output: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.op = op
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise RuntimeError(f"derivative for {ctx.op} is not implemented")


def _refuse(output: torch.Tensor, inputs: list[torch.Tensor], op: str) -> torch.Tensor:
    """The same values, from which torch cannot go back to `inputs`."""
    return _Refused.apply(op, output, *inputs)


def _traced(op: Any) -> Callable[..., Any]:
    name = op._schema.name

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            outputs = op(*args, **kwargs)
        inputs = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor) and a.requires_grad]
        if not inputs or not torch.is_grad_enabled():
            return outputs

        def refused(output: Any) -> Any:
            differentiable = isinstance(output, torch.Tensor) and output.is_floating_point()
            return _refuse(output, inputs, name) if differentiable else output

        return tuple(map(refused, outputs)) if isinstance(outputs, tuple) else refused(outputs)

    return kernel


def register() -> tuple[torch.library.Library, torch.library.Library]:
    """Registers it for all operators; it lasts as long as what is returned."""
    internal = torch.library.Library("w4a8_internal", "FRAGMENT")
    internal.define("refuse_backward(Tensor output, Tensor[] inputs, str op) -> Tensor")
    internal.impl("refuse_backward", _refuse, "CompositeImplicitAutograd")
    library = torch.library.Library("w4a8", "IMPL")
    schemas = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("w4a8::")]
    for schema in schemas:
        name, overload = schema.name.removeprefix("w4a8::"), schema.overload_name
        op = getattr(getattr(torch.ops.w4a8, name), overload or "default")
        full = f"{name}.{overload}" if overload else name
        library.impl(full, torch.library.fallthrough_kernel, "Autograd")
        op.py_impl(torch._C.DispatchKey.Autograd)(_traced(op))
    return internal, library
