"""LoRA beside packed layers: importing this lets PEFT put adapters there (docs/transformers.md).

Layers without adapters are left to PEFT. What reads the weight of the layer cannot be done: merging, and DoRA. Parts of
an adapter for packed experts, or in place of a packed layer, are refused: PEFT would drop them without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel
from peft.tuners.lora.layer import Linear
from peft.tuners.tuners_utils import BaseTuner
from transformers.integrations.peft import PeftAdapterMixin

from w4a8.nn.experts import PackedExperts
from w4a8.nn.packed import PackedLinear, PackedModule


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


def _is_packed(module: torch.nn.Module) -> bool:
    return any(isinstance(part, PackedModule) for part in module.modules())


def _refusal(what: str, name: str) -> ValueError:
    return ValueError(
        f"{what} is for {name}, whose weights are packed: merge the adapter into the float model and quantize that, or "
        f"keep {name} a float"
    )


def _check_config(model: torch.nn.Module, config: PeftConfig) -> None:
    """Raises ValueError if an adapter has parameters in a packed module, or a module in its place."""
    saved, parameters = (getattr(config, name, None) or () for name in ("modules_to_save", "target_parameters"))
    for name, module in model.named_modules():
        for end in saved:
            if name.endswith(end) and _is_packed(module):
                raise _refusal(f"{end!r} of modules_to_save", name)
        for parameter in parameters if isinstance(module, PackedModule) else ():
            owner = parameter.rpartition(".")[0]
            if f".{name}".endswith(f".{owner}") if owner else isinstance(module, PackedExperts):
                raise _refusal(f"{parameter!r} of target_parameters", name)


def _with_check(inject: Callable[..., None]) -> Callable[..., None]:
    @wraps(inject)
    def checked(tuner: BaseTuner, model: torch.nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        _check_config(model, tuner.peft_config[adapter_name])
        inject(tuner, model, adapter_name, *args, **kwargs)

    return checked


def _with_comparison(load: Callable[..., Any]) -> Callable[..., Any]:
    """Compares the tensors of an adapter's file with those that have come into a model with packed modules."""

    @wraps(load)
    def compared(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = load(model, *args, **kwargs)
        if any(config.is_prompt_learning for config in model.peft_config.values()) or not _is_packed(model):
            return result
        modules = dict(model.named_modules())
        for key in sorted(result.unexpected_keys):
            owner = key
            while owner not in modules:
                owner = owner.rpartition(".")[0]
            if isinstance(modules[owner], PackedModule):
                raise _refusal(f"tensor {key!r} of the adapter", owner)
            raise ValueError(f"the model has no place for tensor {key!r} of the adapter")
        return result

    return compared


# There is no place to register it but in each config.
LoraConfig.__post_init__ = _with_packed(LoraConfig.__post_init__)
BaseTuner.inject_adapter = _with_check(BaseTuner.inject_adapter)
PeftModel.load_adapter = _with_comparison(PeftModel.load_adapter)
PeftAdapterMixin.load_adapter = _with_comparison(PeftAdapterMixin.load_adapter)
