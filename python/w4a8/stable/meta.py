"""Meta kernels of the operators: what torch.compile and Meta tensors ask for.

The library has them for sizes that are numbers, as operators of the namespace ``w4a8_internal``, with all checks and
messages. The stable ABI has no symbols for sizes: what is traced with them is handed on with numbers in their place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from w4a8.stable.operators import operators

# Arguments of operators whose sizes before the last are tokens: no check looks at them, so symbols stay symbols. Every
# other size becomes a number, which what is traced is then made for.
_TOKENS = (
    "inp",
    "x",
    "quant_x",
    "x_scale",
    "x_zero",
    "topk_ids",
    "topk_weights",
    "router_logits",
    "key",
    "value",
    "query",
    "qkv",
    "z",
    "ba",
    "decay",
    "xbc",
    "dt",
    "bcx",
)


def _has_symbols(value: object) -> bool:
    return isinstance(value, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape)


def _in_numbers(tensor: torch.Tensor, tokens: bool) -> torch.Tensor:
    """A tensor like it, of one token where the number of them is a symbol."""
    last = tensor.dim() - 1
    free = [tokens and i < last and isinstance(size, torch.SymInt) for i, size in enumerate(tensor.shape)]
    sizes = [1 if one else int(size) for one, size in zip(free, tensor.shape)]
    return torch.empty(sizes, dtype=tensor.dtype, device=tensor.device)


def _in_symbols(output: Any, first: torch.Tensor) -> Any:
    """An output with the tokens of the first argument."""
    if not isinstance(output, torch.Tensor) or output.dim() != first.dim():
        return output
    return torch.empty((*first.shape[:-1], output.shape[-1]), dtype=output.dtype, device=output.device)


def _kernel(op: Any) -> Callable[..., Any]:
    names = [argument.name for argument in op._schema.arguments]
    has_tokens = not set(names).isdisjoint(_TOKENS)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            arguments = {**dict(zip(names, args)), **kwargs}
            if not any(map(_has_symbols, arguments.values())):
                return op(*args, **kwargs)
            numbers = {
                name: _in_numbers(value, name in _TOKENS) if _has_symbols(value) else value
                for name, value in arguments.items()
            }
            outputs = op(**numbers)
            if not has_tokens:
                return outputs
            if isinstance(outputs, tuple):
                return tuple(_in_symbols(output, args[0]) for output in outputs)
            return _in_symbols(outputs, args[0])

    return kernel


def register_meta() -> torch.library.Library:
    """Registers one for each operator that the library has for numbers; they last as long as what is returned."""
    library = torch.library.Library("w4a8", "IMPL")
    for name, op in operators("w4a8_internal"):
        if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "Meta"):
            library.impl(name, _kernel(op), "Meta")
    return library
