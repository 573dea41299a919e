"""Linear layers without an engine: what the plugin notices to be missing."""

import pytest
import torch

from w4a8.formats.pieces import Packing
from w4a8.integrations.vllm.linear import W4A8LinearScheme

N, K, GROUP = 64, 128, 32
NAME = "model.layers.0.mlp.gate_up_proj"


def make_layer(monkeypatch, format_):
    """A layer of two parts of N / 2 columns each, with a loader like vLLM's."""
    for what, value in (("rank", 0), ("world_size", 1)):
        name = f"vllm.model_executor.parameter.get_tensor_model_parallel_{what}"
        monkeypatch.setattr(name, lambda value=value: value)
    layer = torch.nn.Module()
    layer.scheme = W4A8LinearScheme(Packing(format_, GROUP), NAME)

    def load(param, loaded, part):
        rows = param.shape[0] // 2
        param.data[part * rows : (part + 1) * rows].copy_(loaded)

    layer.scheme.create_weights(layer, N, K, [N // 2, N // 2], K, torch.bfloat16, load)
    return layer


def tensors(format_):
    if format_ == "pack-quantized":
        weight = {"weight_packed": torch.zeros(N // 2, K // 8, dtype=torch.int32)}
    else:
        weight = {"weight": torch.zeros(N // 2, K, dtype=torch.int8)}
    return {**weight, "weight_scale": torch.ones(N // 2, K // GROUP, dtype=torch.bfloat16)}


@pytest.mark.parametrize("format_", ["int-quantized", "pack-quantized"])
def test_a_missing_part(format_, monkeypatch):
    """Whichever it is, the layer is named; with all of them it is packed."""
    found = tensors(format_)
    for lost in (*found, None):
        layer = make_layer(monkeypatch, format_)
        for name, tensor in found.items():
            for part in range(1 if name == lost else 2):
                parameter = getattr(layer, name)
                parameter.weight_loader(parameter, tensor, part)
        if lost is None:
            layer.scheme.process_weights_after_loading(layer)
            assert layer.weight_packed.dtype == torch.uint8
            continue
        total = 2 * found[lost].numel()
        with pytest.raises(ValueError) as caught:
            layer.scheme.process_weights_after_loading(layer)
        message = f"w4a8: {NAME}: the checkpoint lacks weights: {lost}: {total // 2} of {total} elements"
        assert str(caught.value) == message


def test_nothing_came(monkeypatch):
    layer = make_layer(monkeypatch, "int-quantized")
    with pytest.raises(ValueError, match=r"weight: 0 of 8192 elements, weight_scale: 0 of 256 elements"):
        layer.scheme.process_weights_after_loading(layer)
