"""w4a8.linear: the kernel class, every answer of can_implement, and a layer from loading to its output."""

from dataclasses import replace

import numpy as np
import pytest
import reference
import torch
from common import DTYPES, ROUNDING, assert_same_bits, assert_within

import w4a8
from w4a8.linear import CPUW4A8IntLinearKernel, MPLinearLayerConfig, scalar_types

CONFIG = MPLinearLayerConfig((64, 24), (64, 24), scalar_types.int4, torch.bfloat16, 32, False, False)


def names(kernel_config):
    return CPUW4A8IntLinearKernel(kernel_config, "weight_packed", "weight_scale")


ROWS = {
    "as it is": ({}, None),
    "float32": ({"act_type": torch.float32}, None),
    "float16": ({"act_type": torch.float16}, None),
    "channelwise": ({"group_size": -1}, None),
    "any even K, any N": ({"group_size": -1, "partition_weight_shape": (38, 5)}, None),
    "float64": ({"act_type": torch.float64}, "CPUW4A8Int requires FP32/BF16/FP16 activations, got torch.float64"),
    "uint4": ({"weight_type": scalar_types.uint4}, "CPUW4A8Int requires int4 weights, got uint4"),
    "int8": ({"weight_type": scalar_types.int8}, "CPUW4A8Int requires int4 weights, got int8"),
    "uint4b8": ({"weight_type": scalar_types.uint4b8}, "CPUW4A8Int requires int4 weights, got uint4b8"),
    "uint8b128": ({"weight_type": scalar_types.uint8b128}, "CPUW4A8Int requires int4 weights, got uint8b128"),
    "integer activations": (
        {"act_type": torch.int8},
        "CPUW4A8Int requires FP32/BF16/FP16 activations, got torch.int8",
    ),
    "zero points": ({"zero_points": True}, "CPUW4A8Int only supports symmetric weight quantization"),
    "g_idx": ({"has_g_idx": True}, "CPUW4A8Int does not support reordered input features (g_idx)"),
    "groups of 16": ({"group_size": 16}, None),
    "group 24": ({"group_size": 24}, "Group size (24) not supported by CPUW4A8Int, must be 16 or a multiple of 32"),
    "group 0": ({"group_size": 0}, "Group size (0) not supported by CPUW4A8Int, must be 16 or a multiple of 32"),
    "group -2": ({"group_size": -2}, "Group size (-2) not supported by CPUW4A8Int, must be 16 or a multiple of 32"),
    "group 48": ({"group_size": 48}, "Group size (48) not supported by CPUW4A8Int, must be 16 or a multiple of 32"),
    "no K": ({"group_size": -1, "partition_weight_shape": (0, 24)}, "in size (0) must be even"),
    "odd K": ({"group_size": -1, "partition_weight_shape": (63, 24)}, "in size (63) must be even"),
    "group does not divide": (
        {"partition_weight_shape": (48, 24)},
        "in size (48) must be a multiple of the group size (32)",
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_can_implement(name):
    changes, reason = ROWS[name]
    config = replace(CONFIG, **changes)
    assert CPUW4A8IntLinearKernel.can_implement(config) == (reason is None, reason)
    if reason is not None:
        with pytest.raises(ValueError) as error:
            names(config)
        assert str(error.value) == f"CPUW4A8IntLinearKernel cannot implement this layer: {reason}"


def test_other_platforms_are_refused(monkeypatch):
    monkeypatch.setattr("w4a8.moe.platforms.CpuPlatform.is_cpu", lambda self: False)
    assert CPUW4A8IntLinearKernel.can_implement(CONFIG) == (False, "CPUW4A8Int only supported on CPU")


def test_min_capability():
    assert CPUW4A8IntLinearKernel.get_min_capability() == -1


def make_layer(n, k, group, scale_dtype=torch.float32):
    layer = torch.nn.Module()
    weight = torch.randint(-8, 8, (n, k), dtype=torch.int8)
    scale = (torch.rand(n, 1 if group == -1 else k // group) / 100).to(scale_dtype)
    layer.register_parameter("weight_packed", torch.nn.Parameter(weight, requires_grad=False))
    layer.register_parameter("weight_scale", torch.nn.Parameter(scale, requires_grad=False))
    layer.register_parameter("weight", torch.nn.Parameter(weight, requires_grad=False))
    return layer, weight, scale


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [-1, 32, 16])
def test_layer(group, scale_dtype, dtype):
    """The same bits as the operators with the weight as int32 words."""
    layer, weight, scale = make_layer(21, 64, group, scale_dtype)
    kernel = names(replace(CONFIG, partition_weight_shape=(64, 21), act_type=dtype, group_size=group))
    words = kernel._pack_int4_weight(weight)
    assert words.shape == (21, 8)
    for i in range(8):
        assert torch.equal((words >> 4 * i & 15).to(torch.int8), weight[:, i::8] + 8)
    kernel.process_weights_after_loading(layer)
    assert w4a8.read_header(layer.weight_packed)["scale_dtype"] == str(scale_dtype).removeprefix("torch.")
    eight = torch.tensor([8], dtype=torch.int8)
    assert torch.equal(layer.weight_zero_point.data, eight)
    for x in (torch.randn(5, 64).to(dtype), torch.randn(2, 3, 64).to(dtype), torch.empty(0, 64, dtype=dtype)):
        for bias in (None, torch.randn(21).to(dtype)):
            quantized = w4a8.dynamic_per_token_int8_quant(x, True, 8)
            want = w4a8.int4_gemm_w4a8(*quantized, words.t(), scale.t(), eight, group, None, bias, dtype)
            assert_same_bits(kernel.apply_weights(layer, x, bias), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("n", "k", "group"), [(1, 2, -1), (5, 38, -1), (16, 8, -1), (17, 96, 32), (33, 320, 64), (3, 192, 96)], ids=str
)
def test_against_float64(n, k, group, dtype, supported_kernels):
    """Both forms of the weight, with and without bias and leading dimensions; every kernel gives the same bits."""
    layer, weight, scale = make_layer(n, k, group)
    kernel = names(replace(CONFIG, partition_weight_shape=(k, n), act_type=dtype, group_size=group))
    words = kernel._pack_int4_weight(weight).t() if k % 8 == 0 else None
    kernel.process_weights_after_loading(layer)
    real = weight.double() * scale.double().repeat_interleave(k if group == -1 else group, 1)
    relative, absolute = ROUNDING[dtype]
    for lead in ((), (1,), (7,), (2, 3), (4, 0)):
        x = torch.randn(*lead, k).to(dtype)
        quantized = w4a8.dynamic_per_token_int8_quant(x, True, 8)
        rows = quantized[0].double() * quantized[1].double()
        for bias in (None, torch.randn(n).to(dtype)):
            added = torch.zeros(n).double() if bias is None else bias.double()
            exact = (rows @ real.t() + added).numpy()
            # Two roundings per group, the product with the scale of the row, the bias; then the output.
            terms = (rows.abs() @ real.abs().t() + added.abs()).numpy()
            allowed = (2 * scale.shape[1] + 4) * reference.U * terms
            allowed = allowed + relative * (np.abs(exact) + allowed) + absolute
            first = None
            for name in supported_kernels:
                with w4a8.use_kernel(name):
                    y = kernel.apply_weights(layer, x, bias)
                    if words is not None:
                        eight = layer.weight_zero_point
                        from_words = w4a8.int4_gemm_w4a8(*quantized, words, scale.t(), eight, group, None, bias, dtype)
                        assert_same_bits(from_words, y, f"{name}, words")
                first = y if first is None else first
                assert_same_bits(y, first, name)
            assert first.shape == (*lead, n)
            assert first.dtype == dtype
            assert_within(first.double().numpy(), exact, allowed)


def test_packs_once_and_frees():
    layer, _, _ = make_layer(24, 64, 32)
    kernel = names(CONFIG)
    kernel.process_weights_after_loading(layer)
    packed = layer.weight_packed
    assert packed.dtype == torch.uint8
    assert layer.weight is None
    assert layer.weight_scale.shape == (0, 24)
    kernel.process_weights_after_loading(layer)
    assert layer.weight_packed is packed


def test_odd_shapes():
    layer, weight, scale = make_layer(5, 38, -1)
    config = replace(CONFIG, group_size=-1, partition_weight_shape=(38, 5), act_type=torch.float32)
    kernel = names(config)
    with pytest.raises(ValueError, match="int32 words hold 8 values each, but the weight has 38 input features"):
        kernel._pack_int4_weight(weight)
    kernel.process_weights_after_loading(layer)
    x = torch.randn(7, 38)
    q, s, _ = w4a8.dynamic_per_token_int8_quant(x, True, 8)
    exact = (q.double() * s.double()) @ (weight.double() * scale.double()).t()
    # Three roundings, docs/numerics.md section 2.
    assert ((kernel.apply_weights(layer, x).double() - exact).abs() <= 4 * 2.0**-24 * exact.abs()).all()


def test_values_beyond_int4_are_refused():
    layer, weight, _ = make_layer(24, 64, 32)
    weight[3, 5] = 8
    with pytest.raises(ValueError, match=r"weight_packed holds values in \[-8, 8\], but int4 values are in \[-8, 7\]"):
        names(CONFIG).process_weights_after_loading(layer)
