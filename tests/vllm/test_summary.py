"""The line that says what runs in a loaded model."""

import pytest
import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from w4a8.cpu import active_kernel
from w4a8.integrations.vllm import loaded
from w4a8.integrations.vllm.configs import W4A8GPTQConfig
from w4a8.integrations.vllm.products import Product
from w4a8.ops import dyn_quant_pack_4bit_weight

K = 128


def packed(group, rows=32, **more):
    """One packed matrix, uint8 [bytes]."""
    options = {"activation_group": 32, **more}
    codes = torch.zeros(rows, K if options.get("values") == "int8" else K // 2, dtype=torch.uint8)
    groups = 1 if group == K else K // group
    scales = options.pop("scales", torch.ones(rows, groups))
    return dyn_quant_pack_4bit_weight(codes, scales, None, group, K, rows, **options)


def layer(cls, quant_method=None, **tensors):
    """A layer without the rest of vLLM."""
    made = cls.__new__(cls)
    torch.nn.Module.__init__(made)
    made.quant_method = quant_method
    made.w4a8 = [Product(name, 0, 0, 1) for name in tensors if name.endswith(("_packed", "_rounded"))]
    for name, tensor in tensors.items():
        setattr(made, name, torch.nn.Parameter(tensor, requires_grad=False))
    return made


def model(*layers):
    return torch.nn.ModuleList(layers)


def experts(count, **stacks):
    return layer(RoutedExperts, **{name: torch.stack([matrix] * count) for name, matrix in stacks.items()})


def test_what_runs_here():
    q4, q8 = packed(32), packed(K, values="int8")
    zeros = packed(64, zero_points=torch.full((32, 2), 8, dtype=torch.uint8))
    found = loaded.summary(
        model(
            layer(LinearBase, weight_packed=q4),
            layer(LinearBase, weight_packed=q4),
            layer(LinearBase, weight_packed=q8),
            experts(3, w13_weight_packed=zeros, w2_weight_packed=q8),
            layer(ParallelLMHead, weight_rounded=q8),
        )
    )
    total = 2 * q4.nbytes + 2 * q8.nbytes + 3 * (zeros.nbytes + q8.nbytes)
    assert found == (
        "runs 3 linear layers (2 int4 in groups of 32, 1 int8 channelwise), "
        "1 layer of experts (int4 with zero points in groups of 64 and int8 channelwise), "
        "1 output layer (int8 channelwise): "
        f"{total:,} bytes packed, activations in groups of 32, kernel {active_kernel()}"
    )


def test_formats_with_a_name():
    mxfp4 = packed(32, values="e2m1", scales=torch.full((32, K // 32), 127, dtype=torch.uint8))
    per_token = packed(32, activation_group=-1)
    found = loaded.summary(model(layer(LinearBase, weight_packed=mxfp4), layer(LinearBase, weight_packed=per_token)))
    assert "runs 2 linear layers (1 MXFP4 in groups of 32, 1 int4 in groups of 32): " in found
    assert "activations in groups of 32 and per token, kernel " in found


class Marlin:
    """A method of vLLM's."""


def test_what_vllm_runs_and_why():
    floats, codes = torch.zeros(4, 8), torch.zeros(4, 8, dtype=torch.uint8)
    found = loaded.summary(
        model(
            layer(LinearBase, weight_packed=packed(32)),
            layer(LinearBase, UnquantizedLinearMethod(), weight=floats),
            layer(ParallelLMHead, UnquantizedLinearMethod(), weight=floats),
            layer(VocabParallelEmbedding, UnquantizedLinearMethod(), weight=floats),
            layer(RoutedExperts, Marlin(), w13_weight=codes),
            layer(RoutedExperts, Marlin(), w13_weight=codes),
        )
    )
    first, _, second = found.partition("; ")
    assert first.startswith("runs 1 linear layer (int4 in groups of 32): ")
    assert second == (
        "vLLM runs 2 layers of experts (by its Marlin), 1 linear layer (not quantized), 1 output layer (not quantized)"
    )


def test_nothing_runs_here():
    found = loaded.summary(model(layer(LinearBase, UnquantizedLinearMethod(), weight=torch.zeros(4, 8))))
    assert found == "runs no layer of this model; vLLM runs 1 linear layer (not quantized)"


@pytest.fixture
def said(monkeypatch):
    lines = []

    class Log:
        def info(self, message, *args):
            lines.append(message % args)

        warning = info

    monkeypatch.setattr(loaded, "logger", Log)
    monkeypatch.setattr(BaseModelLoader, "load_model", lambda self, loaded, *configs: loaded)
    loaded.after_loading(loaded.say_what_is_loaded)
    loaded.after_loading(loaded.say_what_is_loaded)
    return lines


def test_said_once_for_a_model(said):
    made = model(layer(LinearBase, weight_packed=packed(32)))
    assert BaseModelLoader.load_model(None, made, None, None) is made
    assert [line.partition(":")[0] for line in said] == ["w4a8"]
    assert "w4a8: runs 1 linear layer (int4 in groups of 32): " in said[0]


def test_what_fails_is_said_and_stops_nothing(said):
    assert BaseModelLoader.load_model(None, 3, None, None) == 3
    assert said == ["w4a8: cannot say what runs here: AttributeError: 'int' object has no attribute 'modules'"]


def test_models_that_are_not_quantized_here(said):
    seen, ours = [], W4A8GPTQConfig.__new__(W4A8GPTQConfig)
    loaded.after_loading(lambda model, config, _: seen.append(config.quant_config), of_all=False)
    for config in (None, object(), ours):
        made = model()  # stands for vLLM's config, too
        made.quant_config = config
        BaseModelLoader.load_model(None, made, None)
    assert seen == [ours] and sum("runs no layer" in line for line in said) == 3
