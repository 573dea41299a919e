"""Linear layers (attention, shared experts, dense MLPs) with int4 weights."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsScheme
from vllm.model_executor.parameter import (
    BasevLLMParameter,
    ChannelQuantScaleParameter,
    GroupQuantScaleParameter,
    ModelWeightParameter,
    PackedvLLMParameter,
)

from w4a8.core.memory import fresh_bytes
from w4a8.core.weight_utils import replace_parameter
from w4a8.cpu import active_kernel
from w4a8.integrations.vllm.loading import fill_dummy, is_dummy_load
from w4a8.integrations.vllm.log import logger
from w4a8.integrations.vllm.scheme import describe, group_size, packed_scale_dtype
from w4a8.nn import W4A8Linear
from w4a8.ops import dyn_quant_matmul_4bit

WORD = 8  # values in an int32


class _CopiedValues(TorchDispatchMode):
    """Counts the values that are copied: how much of a parameter a loader has filled."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.count += args[0].numel()
        return func(*args, **(kwargs or {}))


def load_linear(
    layer: torch.nn.Module, param: torch.Tensor, loaded_weight: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """The loader of a parameter, bound to its layer: see ``load_expert``."""
    return layer.scheme.load(layer, param, loaded_weight, *args, **kwargs)


class W4A8LinearScheme(CompressedTensorsScheme):
    """Creates the parameters a checkpoint fills, packs them once, and multiplies."""

    def __init__(self, weights: Any, format_: str, layer_name: str | None) -> None:
        """A scheme for one layer.

        Args:
            weights: QuantizationArgs, checked by ``is_w4a8``.
            format_: ``pack-quantized`` (int32 words) or another, which has one int8 per value.
            layer_name: of the layer, for errors.
        """
        self.group_size = group_size(weights)
        self.words = format_ == "pack-quantized"
        self.layer_name = layer_name
        self.scale_dtype: torch.dtype | None = None  # of the packed weight

    @classmethod
    def get_min_capability(cls) -> int:
        """CPUs have no such number."""
        return -1

    def create_weights(
        self,
        layer: torch.nn.Module,
        output_size: int,
        input_size: int,
        output_partition_sizes: list[int],
        input_size_per_partition: int,
        params_dtype: torch.dtype,
        weight_loader: Callable,
        **kwargs: Any,
    ) -> None:
        """Registers weight (int8 [N, K] or int32 [N, K/8]) and scales (float32 [N, K/g]) of this rank's part.

        Raises:
            ValueError: K of this rank is no multiple of the group size, or of a word.
        """
        n, k = sum(output_partition_sizes), input_size_per_partition
        groups = 1 if self.group_size == -1 else k // self.group_size
        step = max(self.group_size, WORD if self.words else 2)
        if k % step != 0:
            raise ValueError(
                f"w4a8: {self.layer_name}: {k} input features per rank (of {input_size}) are not a multiple of {step}"
            )
        self._load = weight_loader
        common = {"weight_loader": MethodType(load_linear, layer)}
        if self.words:
            weight = PackedvLLMParameter(
                data=fresh_bytes(n, k // 2).view(torch.int32),
                input_dim=1,
                output_dim=0,
                packed_dim=1,
                packed_factor=WORD,
                **common,
            )
            layer.register_parameter("weight_packed", weight)
            shape = BasevLLMParameter(data=torch.zeros(2, dtype=torch.int64), **common)
            shape.weight_loader_numel = 0  # not counted among what a layer lacks: it comes once per part of a layer
            layer.register_parameter("weight_shape", shape)
        else:
            weight = ModelWeightParameter(data=fresh_bytes(n, k).view(torch.int8), input_dim=1, output_dim=0, **common)
            layer.register_parameter("weight", weight)
        scales = fresh_bytes(n, 4 * groups).view(torch.float32)
        if self.group_size == -1:
            scale = ChannelQuantScaleParameter(data=scales, output_dim=0, **common)
        else:
            scale = GroupQuantScaleParameter(data=scales, output_dim=0, input_dim=1, **common)
        layer.register_parameter("weight_scale", scale)
        self.n, self.k = n, k
        self._lacking = {id(weight): weight.numel(), id(scale): scale.numel()}
        self.dummy = is_dummy_load()

    def load(self, layer: torch.nn.Module, param: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """vLLM's loader of a parameter; packs the weight when that was the last of its first tensors."""
        with _CopiedValues() as copied:
            found = self._load(param, *args, **kwargs)
        if id(param) in self._lacking:
            self._lacking[id(param)] -= copied.count
            if all(count <= 0 for count in self._lacking.values()):
                self._lacking = {}
                parts = [layer.weight_packed if self.words else layer.weight, layer.weight_scale]
                self.process_weights_after_loading(layer)
                for part in parts:  # the model's loader keeps them until it has loaded all layers
                    part.data = torch.empty(0, dtype=part.dtype)
        return found

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Packs the weight into ``layer.weight_packed``, uint8 [bytes], and frees the rest.

        Again when vLLM has loaded another weight.

        Raises:
            ValueError: the checkpoint did not have all of the weight or the scales; scales do not fit into what the
                first weight was packed as.
        """
        name = "weight_packed" if self.words else "weight"
        weight = getattr(layer, name, None)
        if weight is None or weight.dtype == torch.uint8:
            return
        if self.dummy:
            fill_dummy(weight.data)
            self.dummy = False
        else:
            self._check_complete(layer, name)
        self._lacking = {}
        scales = layer.weight_scale.data
        self.scale_dtype = packed_scale_dtype([scales], self.scale_dtype, self.layer_name)
        packed = W4A8Linear.from_compressed_tensors(weight.data, scales, scale_dtype=self.scale_dtype).packed
        # The shape stays: of other weights, the last one comes when its layer is complete.
        for old in ("weight", "weight_scale"):
            if hasattr(layer, old):
                delattr(layer, old)
        replace_parameter(layer, "weight_packed", packed)
        logger().info_once("w4a8: runs int4 linear layers (%s), kernel %s", describe(self.group_size), active_kernel())

    def _check_complete(self, layer: torch.nn.Module, weight: str) -> None:
        """Fails if the first tensors of the layer have not all come: it would run on zeros."""
        missing = []
        for name in (weight, "weight_scale"):
            parameter = getattr(layer, name)
            count = self._lacking.get(id(parameter), 0)
            if count > 0:
                missing.append(f"{name}: {parameter.numel() - count} of {parameter.numel()} elements")
        if missing:
            raise ValueError(f"w4a8: {self.layer_name}: the checkpoint lacks weights: {', '.join(missing)}")

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., K] to [..., N] of its type."""
        group = self.k if self.group_size == -1 else self.group_size
        out = dyn_quant_matmul_4bit(x, layer.weight_packed, group, self.k, self.n)
        return out if bias is None else out + bias
