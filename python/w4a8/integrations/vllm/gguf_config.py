"""vLLM's configuration class for GGUF files: which layers take what is in the file in blocks.

It is at module level because vLLM pickles it for its worker processes.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from w4a8.integrations.vllm.gguf_folder import NAME, SAYS, experts_of, linears_of
from w4a8.integrations.vllm.gguf_layers import TiedGGUFOutputMethod, W4A8GGUFLinearMethod, W4A8GGUFMoEMethod
from w4a8.integrations.vllm.lm_head import lm_head_method
from w4a8.integrations.vllm.moe import unsupported
from w4a8.integrations.vllm.names import checkpoint_name, joined_from
from w4a8.integrations.vllm.settings import lm_head_is_set, say_int8

_EMBEDDINGS = "model.embed_tokens"


class W4A8GGUFConfig(QuantizationConfig):
    """Linear layers and experts that are in blocks are packed as they are; what is float stays float."""

    def __init__(self, path: str) -> None:
        """Of a file.

        Raises:
            ValueError: it is none that can be run.
        """
        super().__init__()
        self.path, linears = path, linears_of(path)
        self.matrices: dict[str, str] = {}  # vLLM's name: tensor, of two dimensions
        for name, tensor in linears.file.tensors.items():
            parameter = checkpoint_name(linears.architecture, name)
            if parameter is not None and parameter.endswith(".weight") and len(tensor.shape) == 2:
                self.matrices[parameter.removesuffix(".weight")] = name
        experts = experts_of(path).items()
        self.experts = {checkpoint_name(linears.architecture, layer.name): index for index, layer in experts}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> W4A8GGUFConfig:
        """Of what the folder says (upstream's contract)."""
        return cls(config["file"])

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Where that is, if the config is another one (upstream's contract)."""
        return [SAYS]

    def get_name(self) -> str:
        """Of the method (upstream's contract)."""
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Each type that the operators have."""
        return [torch.float16, torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """CPUs have no such number."""
        return -1

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Gives modules the names that vLLM has for them (upstream's contract)."""
        self.matrices = hf_to_vllm_mapper.apply_dict(self.matrices)
        self.experts = hf_to_vllm_mapper.apply_dict(self.experts)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """The method of a layer, or None (upstream's contract).

        Raises:
            ValueError: a layer that cannot be run, or that the file has not all matrices of.
        """
        method = None
        if isinstance(layer, RoutedExperts):
            return self._of_experts(layer, prefix)
        if isinstance(layer, (LinearBase, ParallelLMHead)):
            method = self._of_linear(prefix)
        if method is None and isinstance(layer, LinearBase):
            method = UnquantizedLinearMethod()
        if isinstance(layer, ParallelLMHead) and method is None and not lm_head_is_set():
            method = self._of_tied_output(prefix)
        if isinstance(method, W4A8GGUFLinearMethod):
            say_int8("GGUF")
        return lm_head_method(layer, method)

    def _of_linear(self, prefix: str) -> W4A8GGUFLinearMethod | None:
        names = joined_from(prefix, self.packed_modules_mapping)
        found = [self.matrices[name] for name in names if name in self.matrices]
        if found and len(found) < len(names):
            lacking = ", ".join(name for name in names if name not in self.matrices)
            raise ValueError(f"w4a8: {self.path} holds no tensor for {lacking}")
        if all(map(linears_of(self.path).file.is_float, found)):
            return None
        return W4A8GGUFLinearMethod(self.path, prefix, found)

    def _of_tied_output(self, prefix: str) -> TiedGGUFOutputMethod | None:
        """In the bits that the file has for the embeddings, where these are its output layer too."""
        name = self.matrices.get(_EMBEDDINGS)
        if name is None or linears_of(self.path).file.is_float(name):
            return None
        return TiedGGUFOutputMethod(self.path, prefix, [name])

    def _of_experts(self, layer: RoutedExperts, prefix: str) -> W4A8GGUFMoEMethod:
        if prefix not in self.experts:
            raise ValueError(f"w4a8: {self.path} holds no tensors for {prefix}")
        reason = unsupported(layer.moe_config)
        if reason is not None:
            raise ValueError(f"w4a8: {prefix}: experts of a GGUF file cannot be served with {reason}")
        say_int8("GGUF")
        return W4A8GGUFMoEMethod(self.path, self.experts[prefix], layer, prefix)
