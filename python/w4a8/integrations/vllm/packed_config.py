"""Lets vLLM read directories of packed weights: their configuration, and their tensors as they are read.

The class is at module level because vLLM pickles it for its worker processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import wraps
from typing import Any

import torch
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from w4a8.formats.packed_directory import METHOD
from w4a8.integrations.vllm.config import W4A8CompressedTensorsConfig
from w4a8.integrations.vllm.packed import compressed_tensors_config, unpacked


class W4A8PackedConfig(W4A8CompressedTensorsConfig):
    """That of a compressed-tensors checkpoint of the same weights, once the files are known."""

    packed_config: dict[str, Any]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> W4A8PackedConfig:
        """Takes the quantization_config of the directory; what is packed, and how, is in the files."""
        made = cls(target_scheme_map={}, ignore=[], quant_format="pack-quantized", config=config)
        made.packed_config = dict(config)
        return made

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Reads the headers of the files (upstream's contract).

        Raises:
            ValueError: ``model_name`` is no local directory of packed weights that this can read.
        """
        config = compressed_tensors_config(model_name, self.packed_config, getattr(hf_config, "model_type", None))
        found = W4A8CompressedTensorsConfig.from_config(config)
        self.target_scheme_map, self.ignore = found.target_scheme_map, found.ignore


def _read_packed(get_all_weights: Any) -> Any:
    @wraps(get_all_weights)
    def wrapped(self: Any, model_config: Any, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        weights = get_all_weights(self, model_config, model)
        if model_config.quantization != METHOD:
            return weights
        config = compressed_tensors_config(
            model_config.model, model_config.hf_config.quantization_config, model_config.hf_config.model_type
        )
        first = next(iter(config["config_groups"].values()))
        return unpacked(weights, first["weights"]["symmetric"])

    return wrapped


def register() -> None:
    """Once per process. vLLM has no place to register a form of files, only loaders that users would have to name."""
    register_quantization_config(METHOD)(W4A8PackedConfig)
    DefaultModelLoader.get_all_weights = _read_packed(DefaultModelLoader.get_all_weights)
