"""LoRA beside packed layers: importing this lets PEFT put adapters there (docs/transformers.md).

Layers without adapters are left to PEFT. What reads the weight of the layer cannot be done: merging, and DoRA.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from peft import LoraConfig
from peft.tuners.lora.layer import Linear

from w4a8.nn.packed import PackedLinear


class LoraPackedLinear(Linear):
    """A packed layer and its adapters."""

    def __init__(self, base_layer: PackedLinear, adapter_name: str, **options: Any) -> None:
        """As PEFT calls it.

        Raises:
            ValueError: an option that reads the weight of the layer, as DoRA and PiSSA do.
        """
        try:
            super().__init__(base_layer, adapter_name, **options)
        except AttributeError as error:
            raise ValueError(
                f"an option of LoraConfig reads the weight of a layer, which is packed: {error}"
            ) from error

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Raises ValueError: packed weights are not changed."""
        raise ValueError("adapters cannot be merged into packed weights: run them beside, or merge before quantizing")


def _with_packed(post_init: Callable[[LoraConfig], None]) -> Callable[[LoraConfig], None]:
    @wraps(post_init)
    def after(config: LoraConfig) -> None:
        post_init(config)
        config._register_custom_module({PackedLinear: LoraPackedLinear})

    return after


# There is no place to register it but in each config.
LoraConfig.__post_init__ = _with_packed(LoraConfig.__post_init__)
