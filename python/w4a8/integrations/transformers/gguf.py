"""GGUF files: ``from_pretrained(folder, gguf_file=...)`` packs matrices in blocks unchanged.

transformers makes the config (``gguf_config``) and the tokenizer of the file, builds the model and loads the floats.
Matrices of linear layers and experts are loaded here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import transformers.modeling_utils as modeling

from w4a8.checkpoint.gguf_architectures import ARCHITECTURES, BY_MODEL_TYPE
from w4a8.checkpoint.gguf_config import config_of, scale_rope
from w4a8.checkpoint.gguf_file import GGUFFile
from w4a8.checkpoint.gguf_linear import GGUFLinears, without_ones
from w4a8.checkpoint.gguf_names import sources_of
from w4a8.core.memory import on_cpu
from w4a8.integrations.expectations import missing, parameters
from w4a8.integrations.transformers.config import W4A8Config
from w4a8.integrations.transformers.modules import Found, Modules
from w4a8.integrations.transformers.quantizer import W4A8HfQuantizer, on_cpus
from w4a8.integrations.transformers.tied import is_packable

logger = logging.getLogger(__name__)

# Parts of a matrix.
_JOINED = (".attn_k_b.weight", ".attn_v_b.weight")
# Arguments of transformers' call; an older version has no gguf_file there.
_CALLED_WITH = ("config", "quantization_config", "device_map", "weights_only", "user_agent", "gguf_file")


def linears_of(path: str) -> GGUFLinears:
    """The linear layers of a file."""
    return GGUFLinears(GGUFFile(path))


open_linears = linears_of  # within dry_run a function that reads no weights


class GGUFModules(Modules):
    """The modules of a model whose weights are in blocks.

    Attributes:
        floats: parameter that transformers loads -> tensors of the file.
    """

    def __init__(self, model: torch.nn.Module, linears: GGUFLinears, activation_group: int | None) -> None:
        """Finds the modules, and takes them out of the model, which is on the meta device.

        Raises:
            ValueError: a tensor or a parameter has no counterpart, or another shape.
        """
        self.file, self.linears = linears.file, linears
        self._shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        parts, weights = self._parts(model), {}
        for parameter, names in parts.items():
            mine = weights.setdefault(parameter.rpartition(".")[0], [])
            mine += [name for name in names if name.endswith(".weight")]
        self.weights = {path: names for path, names in weights.items() if self._is_packed(model, path, names)}
        self.floats = {name: names for name, names in parts.items() if name.rpartition(".")[0] not in self.weights}
        super().__init__(model, self.weights, self._find, activation_group, self._why_float)

    def _is_packed(self, model: torch.nn.Module, path: str, names: list[str]) -> bool:
        """Whether a module is packed: a linear layer, an embedding, or experts."""
        module = model.get_submodule(path)
        if not names or any(map(self.file.is_float, names)):
            return False
        if type(module) is torch.nn.Linear:
            return all(len(self.file.tensors[name].shape) == 2 for name in names)
        return path.endswith(".experts") or is_packable(model, path)

    def _find(self, path: str, old: torch.nn.Module) -> Found:
        is_experts = path.endswith(".experts")
        return (
            self.linears.experts(self.weights[path], path) if is_experts else [self.linears.weight(self.weights[path])]
        )

    def _parts(self, model: torch.nn.Module) -> dict[str, list[str]]:
        """Parameter: the tensors that make it."""
        shapes, file = self._shapes, self.file
        sources = sources_of(model, file.tensors, self.linears.keys.architecture)
        parts = {parameter: list(source.tensors) for parameter, source in sources.items()}
        for parameter, names in parts.items():
            found, expected = file.tensors[names[0]].shape, shapes[parameter]
            part = len(names) > 1 or "_exps." in names[0]  # compared later, as a parameter
            if not part and without_ones(found) != without_ones(expected):
                raise ValueError(f"tensor {names[0]!r} has shape {found}, but {expected} is expected")
        tied = set(model.all_tied_weights_keys)
        lacking = sorted(set(shapes) - set(parts) - tied)
        if lacking:
            raise ValueError(f"{file.paths[0]} holds no tensor for {', '.join(lacking[:3])}")
        for name in self.linears.unused(sources.values()):
            raise ValueError(f"tensor {name!r} of {file.paths[0]}: {type(model).__name__} has no such weight")
        return parts

    def state_dict(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The parameters that transformers loads: blocks as ``dtype``, floats in the type of the file."""
        with on_cpu():
            return {
                parameter: self.linears.parameter(names, self._shapes[parameter], parameter, dtype)
                for parameter, names in self.floats.items()
            }

    def _why_float(self, parameter: str) -> str:
        tensors = self.floats.get(parameter, [])
        if all(map(self.file.is_float, tensors)):
            return "it is not quantized in the file"
        if any(map(self.file.is_float, tensors)):
            return "a part of it is not quantized in the file"
        joined = any(name.endswith(_JOINED) for name in tensors)
        return "a part of it is quantized along the other axis" if joined else "it is no linear layer and no experts"


class GGUFQuantizer(W4A8HfQuantizer):
    """Packs the blocks of a GGUF file."""

    def __init__(self, quantization_config: W4A8Config, model_config: Any) -> None:
        super().__init__(quantization_config, pre_quantized=True)
        self._model_config = model_config
        self._linears: GGUFLinears | None = None
        self._dtype = torch.get_default_dtype()

    def read_header(self, gguf_file: str) -> None:
        """Opens the file as soon as transformers has its path; settings by tensors go into the config."""
        self._linears = open_linears(gguf_file)
        config, file = self._model_config, self._linears.file
        config.tie_word_embeddings = "output.weight" not in file
        scale_rope(config, file)

    def update_dtype(self, dtype: torch.dtype | None) -> torch.dtype:
        """float32 (torch's default) if no type is given."""
        self._dtype = super().update_dtype(self._dtype if dtype is None else dtype)
        return self._dtype

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        if self._linears is None:
            raise RuntimeError("transformers has not said where the GGUF file is: this version is not supported")
        with on_cpu():
            self._modules = GGUFModules(model, self._linears, self.quantization_config.activation_group)
        self._check_beside(model)

    def get_state_dict(self, checkpoint_file: str, model: Any) -> dict[str, torch.Tensor]:
        """The parameters that transformers loads."""
        return self._modules.state_dict(self._dtype)


def gguf_problems() -> list[str]:
    """Why GGUF files are left to transformers; empty: they are not."""
    try:
        from transformers.integrations.gguf import GGUF_CONFIG_ARCHS
    except ImportError as error:
        return [str(error)]
    hook = getattr(modeling, "get_hf_quantizer", None)
    found = missing("get_hf_quantizer", _CALLED_WITH, parameters(hook) if callable(hook) else ())
    return found + ([] if isinstance(GGUF_CONFIG_ARCHS, dict) else ["GGUF_CONFIG_ARCHS is no dict"])


def register_gguf() -> None:
    """Once per process: configs of ARCHITECTURES, and the quantizer."""
    from transformers.integrations.gguf import GGUF_CONFIG_ARCHS

    for name in ARCHITECTURES:
        GGUF_CONFIG_ARCHS[name] = config_of
    # A quantizer registered by name would not learn which model it is for.
    modeling.get_hf_quantizer = with_gguf(modeling.get_hf_quantizer)


def with_gguf(get: Callable[..., Any]) -> Callable[..., Any]:
    """Lets GGUFQuantizer load GGUF files; transformers loads all others."""

    @wraps(get)
    def got(config: Any, quantization_config: Any, device_map: Any, *args: Any, **kwargs: Any) -> Any:
        ours = isinstance(quantization_config, W4A8Config)
        if kwargs.get("gguf_file") is None or not (ours or _may_pack(quantization_config, device_map)):
            return get(config, quantization_config, device_map, *args, **kwargs)
        if config.model_type not in BY_MODEL_TYPE:
            problem = f"w4a8 packs GGUF files of {', '.join(BY_MODEL_TYPE)}, but this is {config.model_type}"
            if ours:
                raise ValueError(f"{problem}: load it without W4A8Config")
            logger.warning("%s: transformers loads it", problem)
            return get(config, quantization_config, device_map, *args, **kwargs)
        quantizer = GGUFQuantizer(quantization_config if ours else W4A8Config(), config)
        quantizer.validate_environment(device_map=device_map)
        return quantizer, config, quantizer.update_device_map(device_map)

    return got


def _may_pack(asked: Any, device_map: Any) -> bool:
    """Whether packing is allowed without a W4A8Config."""
    if asked is not None and (type(asked).__name__ != "GgufConfig" or asked.dequantize):
        return False
    return on_cpus(device_map)
