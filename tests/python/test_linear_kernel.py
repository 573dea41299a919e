"""w4a8.linear.cpu_w4a8_int: the kernel class, every answer of can_implement, and a layer from loading to its output."""

from dataclasses import replace

import numpy as np
import pytest
import reference
import torch
from common import DTYPES, ROUNDING, assert_same_bits, assert_within

import w4a8
from w4a8.linear.cpu_w4a8_int import CPUW4A8IntLinearKernel, MPLinearLayerConfig, scalar_types

CONFIG = MPLinearLayerConfig((64, 24), (64, 24), scalar_types.int4, torch.bfloat16, 32, False, False)


def names(kernel_config):
    return CPUW4A8IntLinearKernel(kernel_config, "weight_packed", "weight_scale")


INT = "CPUW4A8Int"
GROUPS = "or 16 or a multiple of 32 that divides it"
EVEN = "2..1048576"
ACTIVATIONS = f"{INT} requires FP32/BF16/FP16 activations, got"
ODD = {"group_size": -1, "partition_weight_shape": (63, 24)}
ROWS = [
    ({}, None),
    ({"act_type": torch.float32}, None),
    ({"act_type": torch.float16}, None),
    ({"group_size": 16}, None),
    ({"group_size": -1}, None),
    ({"group_size": -1, "partition_weight_shape": (38, 5)}, None),
    ({"act_type": torch.float64}, f"{ACTIVATIONS} torch.float64"),
    ({"act_type": torch.int8}, f"{ACTIVATIONS} torch.int8"),
    *(
        ({"weight_type": getattr(scalar_types, name)}, f"{INT} requires int4 weights, got {name}")
        for name in ("uint4", "int8", "uint4b8", "uint8b128")
    ),
    ({"zero_points": True}, f"{INT} only supports symmetric weight quantization"),
    ({"has_g_idx": True}, f"{INT} does not support reordered input features (g_idx)"),
    *(
        ({"group_size": size}, f"{INT}: group (block_size) is {size}, expected k = 64 (channelwise), {GROUPS}")
        for size in (24, 0, -2, 48)
    ),
    *(
        (
            {**ODD, "partition_weight_shape": (k, 24)},
            f"{INT}: k (in_features) is {k}, expected an even number in {EVEN}",
        )
        for k in (0, 63)
    ),
    (
        {"partition_weight_shape": (48, 24)},
        f"{INT}: group (block_size) is 32, expected k = 48 (channelwise), {GROUPS}",
    ),
]


@pytest.mark.parametrize(("changes", "reason"), ROWS)
def test_can_implement(changes, reason):
    config = replace(CONFIG, **changes)
    assert CPUW4A8IntLinearKernel.can_implement(config) == (reason is None, reason)
    if reason is not None:
        with pytest.raises(ValueError) as error:
            names(config)
        assert str(error.value) == f"CPUW4A8IntLinearKernel cannot implement this layer: {reason}"


def test_platform(monkeypatch):
    assert CPUW4A8IntLinearKernel.get_min_capability() == -1
    monkeypatch.setattr("w4a8.moe.config.CpuPlatform.is_cpu", lambda self: False)
    assert CPUW4A8IntLinearKernel.can_implement(CONFIG) == (False, "CPUW4A8Int only supported on CPU")


def make_layer(n, k, group, scale_dtype=torch.float32):
    layer = torch.nn.Module()
    weight = torch.randint(-8, 8, (n, k), dtype=torch.int8)
    scale = (torch.rand(n, 1 if group == -1 else k // group) / 100).to(scale_dtype)
    layer.register_parameter("weight_packed", torch.nn.Parameter(weight, requires_grad=False))
    layer.register_parameter("weight_scale", torch.nn.Parameter(scale, requires_grad=False))
    layer.register_parameter("weight", torch.nn.Parameter(weight, requires_grad=False))
    return layer, weight, scale


SHAPES = [(1, 2, -1), (5, 38, -1), (16, 8, -1), (17, 96, 32), (33, 320, 64), (3, 192, 96)]
SHAPES = [(*shape, torch.float32) for shape in SHAPES]
SHAPES += [(21, 64, group, scale_dtype) for group in (-1, 32, 16) for scale_dtype in DTYPES]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k", "group", "scale_dtype"), SHAPES, ids=str)
def test_layer(n, k, group, scale_dtype, dtype, supported_kernels):
    """Within the rounding of float64, with and without bias and leading dimensions; the weight as int32 words, which
    the operator takes too, and every kernel give the same bits."""
    layer, weight, scale = make_layer(n, k, group, scale_dtype)
    kernel = names(replace(CONFIG, partition_weight_shape=(k, n), act_type=dtype, group_size=group))
    if k % 8 == 0:
        words = kernel._pack_int4_weight(weight)
        assert words.shape == (n, k // 8)
        for i in range(8):
            assert torch.equal((words >> 4 * i & 15).to(torch.int8), weight[:, i::8] + 8)
    else:
        words = None
        with pytest.raises(ValueError, match=f"int32 words hold 8 values each, but the weight has {k} input features"):
            kernel._pack_int4_weight(weight)
    kernel.process_weights_after_loading(layer)
    assert w4a8.read_header(layer.weight_packed)["scale_dtype"] == str(scale_dtype).removeprefix("torch.")
    eight = torch.tensor([8], dtype=torch.int8)
    assert torch.equal(layer.weight_zero_point.data, eight)
    real = weight.double() * scale.double().repeat_interleave(k if group == -1 else group, 1)
    relative, absolute = ROUNDING[dtype]
    for lead in ((), (1,), (7,), (2, 3), (0,), (4, 0)):
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
                        args = (*quantized, words.t(), scale.t(), eight, group, None, bias, dtype)
                        assert_same_bits(w4a8.int4_gemm_w4a8(*args), y, f"{name}, words")
                first = y if first is None else first
                assert_same_bits(y, first, name)
            assert first.shape == (*lead, n)
            assert first.dtype == dtype
            assert_within(first.double().numpy(), exact, allowed)


def test_packs_once_and_frees():
    layer, weight, _ = make_layer(24, 64, 32)
    kernel = names(CONFIG)
    weight[3, 5] = 8
    with pytest.raises(ValueError, match=r"weight_packed holds values in \[-8, 8\], but int4 values are in \[-8, 7\]"):
        kernel.process_weights_after_loading(layer)
    weight[3, 5] = 7
    kernel.process_weights_after_loading(layer)
    packed = layer.weight_packed
    assert packed.dtype == torch.uint8
    assert layer.weight is None
    assert layer.weight_scale.shape == (0, 24)
    kernel.process_weights_after_loading(layer)
    assert layer.weight_packed is packed
