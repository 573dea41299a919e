"""Operators are for inference: with gradients on they run, and backward through their outputs is an error. A tangent of
forward mode is one at once.

The key Autograd falls through: a call without gradients pays nothing. What looks after the gradients instead:

* the library itself, for tensors with values: it asks for the error by ``w4a8_internal::refuse_backward``;
* a kernel for calls that go to Python below Autograd: in a dispatch mode or with a subclass of tensors. torch.compile
  traces with both;
* a kernel for the transformations of torch.func, each of which has gradients of its own.

The last two are for keys that no other call has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from w4a8.stable.operators import operators


class _Refused(torch.autograd.Function):
    """The output itself, not a view of it: that could not be changed in place."""

    @staticmethod
    def forward(op: str, output: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        return output

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.op = inputs[0]
        ctx.mark_dirty(inputs[1])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise RuntimeError(f"derivative for {ctx.op} is not implemented")

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor) -> Any:
        raise NotImplementedError(f"forward derivative for {ctx.op} is not implemented")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[torch.Tensor, int | None]:
        return _Refused.apply(*args), in_dims[1]


def _refuse(output: torch.Tensor, inputs: list[torch.Tensor], op: str) -> torch.Tensor:
    """The same values, from which torch cannot go back to `inputs`."""
    return _Refused.apply(op, output, *inputs)


def _refuse_all(outputs: Any, arguments: list[Any], op: str) -> Any:
    """`_refuse` for each output that could have a derivative."""
    inputs = [a for a in arguments if isinstance(a, torch.Tensor) and a.is_floating_point()]
    if isinstance(outputs, tuple):
        return tuple(_refuse_all(output, inputs, op) for output in outputs)
    differentiable = isinstance(outputs, torch.Tensor) and outputs.is_floating_point()
    return _refuse(outputs, inputs, op) if differentiable and inputs else outputs


def _has_tangent(argument: Any) -> bool:
    """Of forward mode outside torch.func."""
    if not isinstance(argument, torch.Tensor) or not argument.is_floating_point() or argument.is_inference():
        return False
    return forward_ad.unpack_dual(argument).tangent is not None


def _in_python(op: Any) -> Callable[..., Any]:
    def kernel(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        # Whether a kernel further out, of Autograd or this one, looks after the gradients.
        below = torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradCPU)
        arguments = [*args, *kwargs.values()]
        if not (below or torch.is_inference_mode_enabled()) and any(map(_has_tangent, arguments)):
            raise RuntimeError(f"forward derivative for {op._schema.name} is not implemented")
        with torch._C._AutoDispatchBelowAutograd():
            outputs = op.redispatch(keyset & torch._C._after_autograd_keyset, *args, **kwargs)
        if below or not torch.is_grad_enabled() or not torch._C._any_requires_grad(*arguments):
            return outputs
        return _refuse_all(outputs, arguments, op._schema.name)

    return kernel


def _transformed(op: Any, lower: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        return _refuse_all(lower(*args, **kwargs), [*args, *kwargs.values()], op._schema.name)

    return kernel


def register_backward() -> list[torch.library.Library]:
    """Registers it for all operators; it lasts as long as what is returned."""
    internal = torch.library.Library("w4a8_internal", "FRAGMENT")
    internal.define("refuse_backward(Tensor output, Tensor[] inputs, str op) -> Tensor")
    internal.impl("refuse_backward", _refuse, "CompositeImplicitAutograd")
    library = torch.library.Library("w4a8", "IMPL")
    # The operators once more, without a kernel for transformations: torch's own one, which peels them off, is taken.
    lower = torch.library.Library("w4a8_transformed", "DEF")
    of_name = dict(operators("w4a8"))
    for name, op in of_name.items():
        lower.define(str(op._schema).removeprefix("w4a8::"))
        lower.impl(name, op, "CompositeExplicitAutograd")
        lower.impl(name, torch.library.fallthrough_kernel, "Autograd")
        library.impl(name, torch.library.fallthrough_kernel, "Autograd")
        library.impl(name, _in_python(op), "PythonTLSSnapshot", with_keyset=True)
    for name, lower_op in operators("w4a8_transformed"):
        library.impl(name, _transformed(of_name[name], lower_op), "FuncTorchDynamicLayerFrontMode")
    return [internal, library, lower]
