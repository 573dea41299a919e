"""The experts of gpt-oss as AMD Quark writes them.

vLLM's model of gpt-oss asks no loader for these: it copies what it reads into parameters of the names that vLLM's own
method has, cut for the rank. So they have memory here, and are packed when the model has been loaded, layer by layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from w4a8.formats import Scheme
from w4a8.formats.mxfp4 import MXFP4
from w4a8.integrations.vllm.moe import W4A8MoEMethod


def _nothing(name: str) -> float:
    """What is in a parameter that nothing has come for: codes of -0, exponents that are no numbers, NaN for biases."""
    if name.endswith("_weight"):
        return 0x88
    return 255 if name.endswith("_weight_scale") else float("nan")


class W4A8QuarkGptOssMethod(W4A8MoEMethod):
    """Of a layer of experts, which may be cut among ranks, not dealt out: vLLM's model copies to global indices."""

    weight_dtype = MXFP4.name  # vLLM's model asks for it

    def __init__(self, scheme: Scheme, layer: torch.nn.Module, layer_name: str) -> None:
        """A method for one layer, whose tensors vLLM's model gives the shapes of gpt-oss's own MXFP4."""
        super().__init__(replace(scheme, format=MXFP4.name), layer, layer_name)

    def create_weights(
        self,
        layer: torch.nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Registers the parameters that vLLM's model fills."""
        super().create_weights(
            layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **extra_weight_attrs
        )
        for name in self._raw:
            meta = getattr(layer, name)
            data = torch.full(meta.shape, _nothing(name), dtype=meta.dtype, device="cpu")
            layer.register_parameter(name, torch.nn.Parameter(data, requires_grad=False))
        for stack in ("w13", "w2"):  # of inputs that are FP8 in other engines; nothing here needs it
            scales = torch.zeros(num_experts, dtype=torch.float32, device="cpu")
            layer.register_parameter(f"{stack}_input_scale", torch.nn.Parameter(scales, requires_grad=False))

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Packs what has come; once.

        Raises:
            ValueError: the checkpoint did not have all weights of the layer.
        """
        if not self.dummy and getattr(layer, self._raw[0]).numel() > 0:
            self._check(layer)
            for expert in range(self.sizes.experts):
                for name in self._raw:
                    param = getattr(layer, name)
                    shard = f"gpt_oss_{name.partition('_')[0]}"
                    layer.w4a8_loader(param, param.data[expert], name, shard_id=shard, expert_id=expert)
        super().process_weights_after_loading(layer)

    def _check(self, layer: torch.nn.Module) -> None:
        for name in self._raw:
            nothing = torch.tensor(_nothing(name))
            for expert, part in enumerate(getattr(layer, name).data):
                if (part.isnan() if nothing.isnan() else part == nothing).all():
                    message = f"the checkpoint lacks weights: {name} of expert {expert}"
                    raise ValueError(f"w4a8: {self.layer_name}: {message}")
