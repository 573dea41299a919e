"""GGUF files in vLLM: what is registered, and how a path becomes a model.

vLLM reads a config before it asks any of what can be registered, and a GGUF file has none. So the arguments of an
engine get the folder that is made of the file (gguf_folder.py) in its place.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from w4a8.checkpoint.gguf_file import gguf_in
from w4a8.integrations.selftest import missing, more_to_implement
from w4a8.integrations.vllm.arguments import read_arguments
from w4a8.integrations.vllm.gguf_config import W4A8GGUFConfig
from w4a8.integrations.vllm.gguf_folder import NAME, folder_of
from w4a8.integrations.vllm.gguf_loader import W4A8GGUFLoader

_ARGUMENTS = (
    *("model", "tokenizer", "skip_tokenizer_init", "served_model_name"),
    *("quantization", "load_format", "config_format"),
)
# What users may say of a file: the second name is what a plugin for GPUs registers.
_MAY_BE = {"quantization": (None, "gguf"), "load_format": ("auto", "gguf"), "config_format": ("auto", "hf", "gguf")}


def problems() -> list[str]:
    """What of vLLM is not as this expects it."""
    return [
        *missing("EngineArgs", _ARGUMENTS, [field.name for field in fields(EngineArgs)]),
        *missing("vllm.envs", ("VLLM_CACHE_ROOT",), dir(envs)),
        *more_to_implement(BaseModelLoader, ("download_model", "load_weights")),
    ]


def take_file(arguments: Any) -> None:
    """Puts the folder of a GGUF file in its place, if the model is one.

    Args:
        arguments: vLLM's EngineArgs.

    Raises:
        ValueError: a file that cannot be run, or an argument that a GGUF file cannot have.
    """
    path = gguf_in(arguments.model)
    if path is None:
        return
    for name, allowed in _MAY_BE.items():
        given = getattr(arguments, name)
        if given not in allowed:
            expected = " or ".join(str(each) for each in allowed)
            raise ValueError(f"w4a8: {name} is {given!r}, but for a GGUF file {expected} is expected")
    model = arguments.model
    if arguments.tokenizer == model:
        arguments.tokenizer = None
    wants_tokenizer = arguments.tokenizer is None and not arguments.skip_tokenizer_init
    arguments.model = str(folder_of(path, Path(envs.VLLM_CACHE_ROOT) / NAME, wants_tokenizer))
    arguments.quantization = arguments.load_format = NAME
    arguments.config_format = "auto"
    if arguments.served_model_name is None:
        arguments.served_model_name = model


def register() -> None:
    """Once per process.

    Under a name of its own: ``gguf`` is that of vllm-gguf-plugin, which may be loaded before or after this one.

    Raises:
        RuntimeError: vLLM is not as this expects it.
    """
    found = problems()
    if found:
        raise RuntimeError("; ".join(found))
    read_arguments(take_file)  # first: it may refuse
    register_quantization_config(NAME)(W4A8GGUFConfig)
    register_model_loader(NAME)(W4A8GGUFLoader)
