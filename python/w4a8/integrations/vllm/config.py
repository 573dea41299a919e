"""The common part of this package's configuration classes for vLLM: which layers run here, by which method."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.models.utils import WeightsMapper

from w4a8.formats import NotRead, Scheme
from w4a8.formats.checks import FLOAT_TYPES, check_consecutive
from w4a8.formats.packed_directory import METHOD
from w4a8.integrations.vllm.linear_layers import lm_head_method, received
from w4a8.integrations.vllm.log import logger
from w4a8.integrations.vllm.moe import ReceivedExperts, experts_method
from w4a8.integrations.vllm.settings import runs_w4a16, say_int8


def projections(layer: Any, prefix: str) -> list[str]:
    """Names in a checkpoint of all matrices of vLLM's RoutedExperts with the name ``prefix``."""
    names = [layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name]
    return [f"{prefix}.{e}.{name}" for e in range(layer.moe_config.num_experts) for name in names if name is not None]


def names_joined_in(prefix: str, packed_modules_mapping: Mapping[str, Sequence[str]]) -> list[str]:
    """The matrices that vLLM joins in a linear layer of this name: three for ``qkv_proj``, one for most layers."""
    owner, _, last = prefix.rpartition(".")
    return [f"{owner}.{part}" for part in packed_modules_mapping.get(last, ())] or [prefix]


def check_joined_alike(prefix: str, ways: Mapping[str, str]) -> None:
    """Checks the matrices that vLLM joins in a linear layer.

    Args:
        prefix: name of the layer.
        ways: how each matrix is quantized, in words, by its name in the checkpoint.

    Raises:
        ValueError: the ways differ.
    """
    if len(set(ways.values())) > 1:
        listed = ", ".join(f"{name.rpartition('.')[2]} has {way}" for name, way in ways.items())
        raise ValueError(
            f"w4a8: {prefix}: vLLM joins matrices that are not quantized alike, which it cannot run: {listed}"
        )


def are_alike(ways: Sequence[Any], prefix: str) -> bool:
    """Whether all matrices of a layer of experts are quantized in one way; warns if they are not."""
    if all(way == ways[0] for way in ways):
        return True
    logger().warning_once("w4a8: leaves %s to vLLM: its experts are not quantized alike", prefix)
    return False


def is_ours(thing: Any) -> bool:
    """Whether vLLM's method of a layer, or an engine's ``quant_config``, is an object of this package."""
    return type(thing).__module__.startswith("w4a8.")


def unquantized(layer: torch.nn.Module) -> Any:
    """vLLM's method of a layer that is not quantized."""
    if isinstance(layer, RoutedExperts):
        return UnquantizedFusedMoEMethod(layer.moe_config)
    return UnquantizedEmbeddingMethod() if isinstance(layer, ParallelLMHead) else UnquantizedLinearMethod()


class OwnConfig(QuantizationConfig):
    """A base of configurations that vLLM does not have. Without another word they are of the method ``w4a8``."""

    def get_name(self) -> str:
        """Of the method in vLLM."""
        return METHOD

    @classmethod
    def get_min_capability(cls) -> int:
        """CPUs have no such number."""
        return -1

    @staticmethod
    def get_config_filenames() -> list[str]:
        """No files are needed."""
        return []

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Each type that the operators have."""
        return list(FLOAT_TYPES)


class RunsLayersHere:
    """A base class before vLLM's class. It runs the layers that are read here, and leaves others to vLLM's class.

    :meth:`scheme_of_layer` decides which layers these are; or :meth:`method_of`, if vLLM has its own rules.

    Attributes:
        w4a8_says: name of the checkpoints in the log.
    """

    w4a8_says: str
    _runs_some = False  # whether layers so far run here; models make their output layer last

    def scheme_of_layer(self, layer: torch.nn.Module, prefix: str) -> Scheme | NotRead | None:
        """How the weights of a layer are stored, if the layer runs here, or that they are not quantized.

        None leaves the layer to vLLM's own rules, which may wrongly take a layer for quantized.

        Args:
            layer: vLLM's LinearBase, ParallelLMHead or RoutedExperts.
            prefix: name of the layer.
        """
        raise NotImplementedError

    def method_of(self, layer: torch.nn.Module, prefix: str) -> Any:
        """The method of a layer, or None for vLLM's."""
        return self.method_for(self.scheme_of_layer(layer, prefix), layer, prefix)

    def method_for(self, scheme: Scheme | NotRead | None, layer: torch.nn.Module, prefix: str) -> Any:
        """The method of a layer for a scheme, or None to leave it to vLLM; weight-only layers can be switched off."""
        if isinstance(scheme, NotRead):
            return None if scheme.quantized or not runs_w4a16() else unquantized(layer)
        if scheme is None or (scheme.weight_only is not None and not runs_w4a16()):
            return None
        if isinstance(layer, RoutedExperts):
            method = self.experts_method(scheme, layer, prefix)
        else:
            method = received(scheme, prefix)
        if method is not None and scheme.weight_only is not None:
            say_int8(self.w4a8_says)
        return method

    def experts_method(self, scheme: Scheme, layer: RoutedExperts, prefix: str) -> Any:
        """The method of a layer of experts; None, with a warning, if it cannot be run here."""
        return experts_method(ReceivedExperts(scheme), layer, prefix)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """The method of a layer, or None (upstream's contract)."""
        ours = isinstance(layer, (LinearBase, ParallelLMHead, RoutedExperts))
        method = self.method_of(layer, prefix) if ours else None
        if method is None:
            method = super().get_quant_method(layer, prefix)
        self._runs_some = self._runs_some or is_ours(method) or is_ours(getattr(layer, "scheme", None))
        return lm_head_method(layer, method, by_default=self._runs_some)

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """The types of the operators; upstream's types if weight-only models are left to vLLM."""
        if not runs_w4a16():
            return super().get_supported_act_dtypes()
        return list(FLOAT_TYPES)


class _ChecksOrder(WeightsMapper):
    """Drops ``g_idx`` as upstream's mapper does, but looks at it first: groups must be consecutive input features."""

    def __ror__(self, other: WeightsMapper) -> WeightsMapper:
        """``other | self``: Python asks the subclass first."""
        return _ChecksOrder(**vars(WeightsMapper.__or__(other, self)))

    def __or__(self, other: WeightsMapper) -> WeightsMapper:
        """As upstream's."""
        return _ChecksOrder(**vars(super().__or__(other)))

    def apply(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterable[tuple[str, torch.Tensor]]:
        """As upstream's."""

        def seen() -> Iterable[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                if name.endswith(".g_idx"):
                    check_consecutive(tensor, f"w4a8: {name}")
                yield name, tensor

        return super().apply(seen())


class ChecksActivationOrder:
    """For formats with ``g_idx``, the order of the input features of groups, which vLLM drops."""

    def get_cache_scale_mapper(self) -> WeightsMapper:
        """Upstream's mapper, which every model's loader applies. ``g_idx`` is checked, then dropped."""
        return super().get_cache_scale_mapper() | _ChecksOrder(orig_to_new_suffix={".g_idx": None})
