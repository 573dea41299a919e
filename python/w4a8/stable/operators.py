"""The operators of a namespace, as torch has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def operators(namespace: str) -> Iterator[tuple[str, Any]]:
    """Each operator of ``torch.ops.<namespace>`` with its name; the name of an overload is ``name.overload``."""
    for schema in torch._C._jit_get_all_schemas():
        space, _, name = schema.name.partition("::")
        if space == namespace:
            overload = schema.overload_name
            yield (
                f"{name}.{overload}" if overload else name,
                getattr(getattr(getattr(torch.ops, namespace), name), overload or "default"),
            )
