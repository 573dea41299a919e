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

from w4a8.integrations.vllm.gguf_folder import NAME, SAYS, config_of_file, experts_of, linears_of, sources_of_file
from w4a8.integrations.vllm.gguf_layers import TiedGGUFOutputMethod, W4A8GGUFLinearMethod, W4A8GGUFMoEMethod
from w4a8.integrations.vllm.lm_head import lm_head_method
from w4a8.integrations.vllm.moe import unsupported
from w4a8.integrations.vllm.names import joined_from
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
        self.matrices: dict[str, tuple[str, ...]] = {}  # vLLM's name: tensors of two dimensions, one below the other
        for source in sources_of_file(path).values():
            shapes = [linears.file.tensors[name].shape for name in source.tensors]
            is_matrix = source.checkpoint.endswith(".weight") and all(len(shape) == 2 for shape in shapes)
            if is_matrix and not source.of_experts and linears.joined_order(source.tensors) is None:
                self.matrices[source.checkpoint.removesuffix(".weight")] = source.tensors
        # Where a layer has no values, its keys are these as well (Gemma 4).
        self.keys_are_values = getattr(config_of_file(path), "attention_k_eq_v", False)
        # vLLM's name: that of checkpoints. Its models have one or that of transformers.
        self.experts = {name: name for name in experts_of(path)}
        for parameter, source in sources_of_file(path).items():
            if source.of_experts:
                self.experts[parameter.rpartition(".")[0]] = source.checkpoint

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
        found = [tensor for name in names for tensor in self.matrices.get(name, ())]
        lacking = [name for name in names if name not in self.matrices]
        if lacking and lacking == [name for name in names if name.endswith(".v_proj")] and self.keys_are_values:
            found, lacking = [*found, found[-1]], []
        if found and lacking:
            raise ValueError(f"w4a8: {self.path} holds no tensor for {', '.join(lacking)}")
        if all(map(linears_of(self.path).file.is_float, found)):
            return None
        return W4A8GGUFLinearMethod(self.path, prefix, found)

    def _of_tied_output(self, prefix: str) -> TiedGGUFOutputMethod | None:
        """In the bits that the file has for the embeddings, where these are its output layer too."""
        names = self.matrices.get(_EMBEDDINGS)
        if names is None or linears_of(self.path).file.is_float(names[0]):
            return None
        return TiedGGUFOutputMethod(self.path, prefix, list(names))

    def _of_experts(self, layer: RoutedExperts, prefix: str) -> W4A8GGUFMoEMethod:
        if prefix not in self.experts:
            raise ValueError(f"w4a8: {self.path} holds no tensors for {prefix}")
        reason = unsupported(layer.moe_config)
        if reason is not None:
            raise ValueError(f"w4a8: {prefix}: experts of a GGUF file cannot be served with {reason}")
        say_int8("GGUF")
        return W4A8GGUFMoEMethod(self.path, self.experts[prefix], layer, prefix)
