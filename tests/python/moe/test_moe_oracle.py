"""The oracle: selection with every message, and the conversion of weights."""

import logging
import subprocess
import sys
from dataclasses import replace

import moe_build
import pytest
import torch
from moe_build import make_config, op_pack, random_stack

from w4a8.core.activation import kernel_activation_kind, upstream_activation_kind
from w4a8.core.nibbles import from_int32, from_nibbles, to_nibbles
from w4a8.core.platforms import current_platform
from w4a8.moe import (
    CPUExpertsInt4,
    CPUExpertsInt4Modular,
    FusedMoEParallelConfig,
    MoEActivation,
    RoutingMethodType,
    W4A8Int8MoeBackend,
)
from w4a8.moe import method_v0_17 as old
from w4a8.moe.log import forget_logged
from w4a8.moe.modular_kernel import FusedMoEActivationFormat, FusedMoEExperts
from w4a8.moe.oracle import w4a8_int8 as oracle
from w4a8.moe.quant_key import (
    GroupShape,
    QuantKey,
    ScaleDesc,
    int4_weight_key,
    kInt4W4A8StaticChannelSym,
    kInt4W4A8StaticGroup32Sym,
    kInt4W4A8StaticGroup64Sym,
    kInt4W4A8StaticGroup128Sym,
    kInt4W4A8StaticGroupSym,
)

G32 = kInt4W4A8StaticGroup32Sym


@pytest.fixture(autouse=True)
def say_everything_again():
    forget_logged()


@pytest.fixture
def not_a_cpu(monkeypatch):
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)


def logged(caplog):
    return [(record.levelname, record.getMessage()) for record in caplog.records if record.name.startswith("w4a8")]


# ---- selection ----


def test_selects_and_says_so_once(caplog):
    caplog.set_level(logging.DEBUG, "w4a8")
    for _ in range(3):
        selected = oracle.select_w4a8_int8_moe_backend(make_config(), G32, None)
        assert selected == (W4A8Int8MoeBackend.CPU_INT4, CPUExpertsInt4)
    message = "Using CPU_INT4 W4A8 Int8 MoE backend out of potential backends: ['CPU_INT4']."
    assert logged(caplog) == [("INFO", message)]


def test_demanded_backend():
    selected = oracle.select_w4a8_int8_moe_backend(make_config(moe_backend="cpu"), G32, None)
    assert selected == (W4A8Int8MoeBackend.CPU_INT4, CPUExpertsInt4)
    assert oracle.map_w4a8_int8_backend("cpu") is W4A8Int8MoeBackend.CPU_INT4


def test_unknown_backend_name():
    expected = "moe_backend='marlin' is not supported for W4A8 Int8 MoE. Expected one of ['cpu']."
    for call in (
        lambda: oracle.map_w4a8_int8_backend("marlin"),
        lambda: oracle.select_w4a8_int8_moe_backend(make_config(moe_backend="marlin"), G32, None),
    ):
        with pytest.raises(ValueError) as caught:
            call()
        assert str(caught.value) == expected


def test_unknown_backend():
    class Other:
        value = "OTHER"

    with pytest.raises(ValueError) as caught:
        oracle.backend_to_kernel_cls(Other())
    assert str(caught.value) == "Unknown W4A8 Int8 MoE backend: OTHER"


def test_backend_classes():
    assert oracle._get_priority_backends(make_config()) == [W4A8Int8MoeBackend.CPU_INT4]
    assert oracle.backend_to_kernel_cls(W4A8Int8MoeBackend.CPU_INT4) == [CPUExpertsInt4, CPUExpertsInt4Modular]


def test_only_cpus(not_a_cpu):
    assert oracle._get_priority_backends(make_config()) == []
    with pytest.raises(NotImplementedError) as caught:
        oracle.select_w4a8_int8_moe_backend(make_config(), G32, None)
    assert str(caught.value) == "W4A8 Int8 MoE is only supported on CPU platforms"
    with pytest.raises(ValueError) as caught:
        old.CompressedTensorsW4A8Int8MoEMethod(moe_build.weight_args(32), moe_build.TOKEN_INT8, make_config())
    assert str(caught.value) == "CompressedTensorsW4A8Int8MoEMethod is CPU-only."


def test_unsupported_layer(caplog):
    caplog.set_level(logging.DEBUG, "w4a8")
    with pytest.raises(NotImplementedError) as caught:
        oracle.select_w4a8_int8_moe_backend(make_config(), int4_weight_key(48), None)
    assert str(caught.value) == "No W4A8 Int8 MoE backend supports the deployment configuration."
    reason = f"kernel does not support quantization scheme {int4_weight_key(48)}xNone"
    text = f"W4A8 Int8 MoE backend CPU_INT4 does not support the deployment configuration since {reason}."
    assert logged(caplog) == [("DEBUG", text)]
    with pytest.raises(ValueError) as caught:
        oracle.select_w4a8_int8_moe_backend(make_config(moe_backend="cpu"), int4_weight_key(48), None)
    assert str(caught.value) == text


def test_unsupported_without_a_reason(monkeypatch):
    for experts_cls in (CPUExpertsInt4, CPUExpertsInt4Modular):
        monkeypatch.setattr(experts_cls, "is_supported_config", staticmethod(lambda *args: (False, None)))
    with pytest.raises(ValueError) as caught:
        oracle.select_w4a8_int8_moe_backend(make_config(moe_backend="cpu"), G32, None)
    expected = "W4A8 Int8 MoE backend 'CPU_INT4' does not support the deployment configuration."
    assert str(caught.value) == expected


def test_custom_routing_selects_the_modular_experts(caplog):
    caplog.set_level(logging.INFO, "w4a8")
    for method in (RoutingMethodType.Custom, RoutingMethodType.Unspecified):
        _, experts_cls = oracle.select_w4a8_int8_moe_backend(make_config(routing_method=method), G32, None)
        assert experts_cls is CPUExpertsInt4Modular


# ---- is_supported_config: the reasons, in order ----


class NoGate(CPUExpertsInt4):
    _supports_no_act_and_mul = staticmethod(lambda: False)


class NoGelu(CPUExpertsInt4):
    _supports_activation = staticmethod(lambda activation: activation is not MoEActivation.GELU)


def parallel(**sizes):
    return FusedMoEParallelConfig(**sizes)


ASYMMETRIC = int4_weight_key(32, symmetric=False)
UNSUPPORTED = [
    (NoGate, {"activation": "silu_no_mul"}, G32, None, "no act_and_mul MLP layer"),
    (NoGelu, {"activation": "gelu"}, G32, None, "MoEActivation.GELU activation"),
    (CPUExpertsInt4, {}, None, None, "quantization scheme NonexNone"),
    (CPUExpertsInt4, {}, ASYMMETRIC, None, f"quantization scheme {ASYMMETRIC}xNone"),
    (CPUExpertsInt4, {}, G32, G32, f"quantization scheme {G32}x{G32}"),
    (
        CPUExpertsInt4,
        {"moe_parallel_config": parallel(dp_size=2)},
        G32,
        None,
        f"parallel config {parallel(dp_size=2)}",
    ),
    (
        CPUExpertsInt4,
        {"moe_parallel_config": parallel(pcp_size=2)},
        G32,
        None,
        f"parallel config {parallel(pcp_size=2)}",
    ),
    (
        CPUExpertsInt4,
        {"routing_method": RoutingMethodType.Custom},
        G32,
        None,
        f"routing method {RoutingMethodType.Custom!r}",
    ),
    (CPUExpertsInt4, {"in_dtype": torch.float64}, G32, None, "input dtype torch.float64"),
    (
        CPUExpertsInt4,
        {"hidden_dim": 144},
        G32,
        None,
        "hidden size 144, which is not a multiple of the group size 32",
    ),
    (
        CPUExpertsInt4,
        {"intermediate_size": 1408, "moe_parallel_config": parallel(tp_size=2)},
        kInt4W4A8StaticGroup128Sym,
        None,
        "intermediate size per partition 704, which is not a multiple of the group size 128",
    ),
    (
        CPUExpertsInt4,
        {"intermediate_size": 77},
        kInt4W4A8StaticChannelSym,
        None,
        "intermediate size per partition 77, which is odd (two int4 values share a byte)",
    ),
]


@pytest.mark.parametrize(("cls", "changes", "weight_key", "activation_key", "reason"), UNSUPPORTED)
def test_reason(cls, changes, weight_key, activation_key, reason):
    supported, found = cls.is_supported_config(
        cls, make_config(**changes), weight_key, activation_key, FusedMoEActivationFormat.Standard
    )
    assert not supported
    assert found == f"kernel does not support {reason}"


def test_reason_device(not_a_cpu):
    _, found = CPUExpertsInt4.is_supported_config(
        CPUExpertsInt4, make_config(), None, None, FusedMoEActivationFormat.Standard
    )
    assert found == "kernel does not support current device cpu"  # the first of several


def test_reason_activation_format(caplog):
    batched = make_config(moe_parallel_config=parallel(use_batched_activation_format=True), moe_backend="cpu")
    _, found = CPUExpertsInt4.is_supported_config(
        CPUExpertsInt4, batched, G32, None, FusedMoEActivationFormat.BatchedExperts
    )
    assert found == "kernel does not support batched_experts activation format"
    with pytest.raises(ValueError, match=f"since {found}"):
        oracle.select_w4a8_int8_moe_backend(batched, G32, None)


@pytest.mark.parametrize("cls", [CPUExpertsInt4, CPUExpertsInt4Modular])
def test_supported(cls):
    configs = [make_config(activation=activation) for activation in MoEActivation]
    configs += [make_config(routing_method=m) for m in RoutingMethodType if m.name not in ("Custom", "Unspecified")]
    configs += [make_config(in_dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    logits = (None, torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8)
    configs += [make_config(router_logits_dtype=dtype) for dtype in logits]
    configs += [make_config(moe_parallel_config=parallel(ep_size=2, use_ep=True), num_local_experts=4)]
    configs += [make_config(moe_parallel_config=parallel(tp_size=2)), make_config(has_bias=True)]
    for config in configs:
        for key in (G32, kInt4W4A8StaticGroup64Sym, kInt4W4A8StaticGroup128Sym, kInt4W4A8StaticChannelSym):
            found = cls.is_supported_config(cls, config, key, None, FusedMoEActivationFormat.Standard)
            assert found == (True, None)
        assert cls(config, oracle.make_w4a8_int8_moe_quant_config()).supports_expert_map()


def test_every_multiple_of_32_is_a_supported_scheme():
    for size in range(1, 513):
        for dtype in (torch.float32, torch.bfloat16):
            key = int4_weight_key(size, scale_dtype=dtype)
            assert CPUExpertsInt4._supports_quant_scheme(key, None) == (size % 32 == 0)
    half = int4_weight_key(32, scale_dtype=torch.float16)
    assert not CPUExpertsInt4._supports_quant_scheme(half, None)


def test_named_keys_are_supported_and_their_neighbours_are_not():
    """Each name is the scheme that it says; one field of it changed is another scheme, which nothing here runs."""
    named = {32: G32, 64: kInt4W4A8StaticGroup64Sym, 128: kInt4W4A8StaticGroup128Sym, -1: kInt4W4A8StaticChannelSym}
    assert kInt4W4A8StaticGroupSym == kInt4W4A8StaticChannelSym
    for size, key in named.items():
        shape = GroupShape(-1, 1) if size == -1 else GroupShape(1, size)
        dtype = torch.float32 if size == -1 else torch.bfloat16
        assert key == QuantKey(torch.int8, ScaleDesc(dtype, True, shape))
        assert CPUExpertsInt4._supports_quant_scheme(key, None)
        scales = [{"static": False}, {"dtype": torch.float16}]
        scales += [{"group_shape": GroupShape(*other)} for other in [(1, 48), (1, -1), (-1, -1), (2, 32), (32, 1)]]
        others = [replace(key, scale=replace(key.scale, **change)) for change in scales]
        others += [replace(key, dtype=torch.uint8), replace(key, scale2=key.scale), replace(key, symmetric=False)]
        for other in others:
            assert not CPUExpertsInt4._supports_quant_scheme(other, None), other
        assert not CPUExpertsInt4._supports_quant_scheme(key, key)


def test_activation_integers():
    """The kinds that compute the true formulas, and upstream's integers."""
    kinds = {activation: moe_build.kernel_kind(activation) for activation in MoEActivation}
    assert {activation: kernel_activation_kind(activation) for activation in MoEActivation} == kinds
    experts = CPUExpertsInt4(make_config(), oracle.make_w4a8_int8_moe_quant_config())
    assert {activation: experts._activation_kind(activation) for activation in MoEActivation} == kinds
    assert upstream_activation_kind(MoEActivation.SWIGLUSTEP) == 0
    assert upstream_activation_kind(MoEActivation.SWIGLUOAI) == 1
    assert upstream_activation_kind(MoEActivation.SILU) == 2


def test_activation_errors():
    with pytest.raises(ValueError) as caught:
        upstream_activation_kind(MoEActivation.GELU)
    assert str(caught.value) == "Unsupported activation 'MoEActivation.GELU'"
    with pytest.raises(ValueError) as caught:
        kernel_activation_kind(None)
    assert str(caught.value) == "Unsupported activation 'None'"
    with pytest.raises(ValueError, match=r"Unknown MoE activation: 'tanh'. Valid activations: \['silu', "):
        MoEActivation.from_str("tanh")


# ---- the kernel ----


def test_kernel_log(caplog):
    caplog.set_level(logging.INFO, "w4a8")
    quant_config = oracle.make_w4a8_int8_moe_quant_config((1, 32))
    for _ in range(2):
        kernel = oracle.make_w4a8_int8_moe_kernel(quant_config, make_config(), CPUExpertsInt4)
        assert kernel.is_monolithic
    assert logged(caplog) == [("INFO", "Using MoEPrepareAndFinalizeNoDPEPMonolithic")]


def test_kernel_wants_monolithic_experts(caplog):
    caplog.set_level(logging.INFO, "w4a8")
    quant_config = oracle.make_w4a8_int8_moe_quant_config((1, 32))
    with pytest.raises(ValueError) as caught:
        oracle.make_w4a8_int8_moe_kernel(quant_config, make_config(), CPUExpertsInt4Modular)
    assert str(caught.value) == "W4A8 Int8 MoE only supports monolithic experts, but got CPUExpertsInt4Modular"
    kernel = oracle.make_w4a8_int8_moe_kernel(quant_config, make_config(), CPUExpertsInt4Modular, allow_modular=True)
    assert not kernel.is_monolithic
    assert logged(caplog) == [("INFO", "Using MoEPrepareAndFinalizeNoDPEPModular")]

    class Neither(FusedMoEExperts):
        pass

    with pytest.raises(ValueError, match="only supports monolithic experts, but got Neither"):
        oracle.make_w4a8_int8_moe_kernel(quant_config, make_config(), Neither, allow_modular=True)


@pytest.mark.parametrize(("block_shape", "group_size"), [(None, -1), ((-1, 1), -1), ((1, 32), 32), ((1, 96), 96)])
def test_quant_config(block_shape, group_size):
    config = oracle.make_w4a8_int8_moe_quant_config(block_shape=block_shape)
    assert config.group_size == group_size
    assert not config.is_per_act_token
    shape = None if block_shape is None else GroupShape(*block_shape)
    assert [desc.shape for desc in (config._a1, config._a2, config._w1, config._w2)] == [shape] * 4
    assert config._w1.dtype is None and config._w2.dtype is None


# ---- packing ----


def test_nibbles():
    values = torch.arange(-8, 8, dtype=torch.int8).repeat(3, 2)
    nibbles = to_nibbles(values)
    assert nibbles.dtype == torch.uint8 and nibbles.shape == (3, 16)
    assert nibbles[0, :8].tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    assert torch.equal(from_nibbles(nibbles), values)
    every_pair = torch.cartesian_prod(values[0, :16], values[0, :16])
    assert torch.equal(from_nibbles(to_nibbles(every_pair)), every_pair)


@pytest.mark.parametrize("columns", [8, 10, 12, 14, 64])
def test_int32_words(columns):
    values = torch.randint(-8, 8, (5, columns), dtype=torch.int8)
    words = []
    for row in values.tolist():
        padded = row + [0] * (-columns % 8)
        unsigned = [
            sum((value + 8) << 4 * i for i, value in enumerate(padded[k : k + 8])) for k in range(0, len(padded), 8)
        ]
        words.append([word - 2**32 if word >= 2**31 else word for word in unsigned])
    assert torch.equal(from_int32(torch.tensor(words, dtype=torch.int32), columns), values)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("group_size", moe_build.GROUP_SIZES)
def test_pack_one_matrix(group_size, bias):
    stack = random_stack(3, 48, 256, group_size, bias)
    expected = op_pack(stack, group_size)
    for expert in range(3):
        values, scales, expert_bias = stack.of(expert)
        packed = oracle.pack_int4_weights_for_kleidi(values, scales, expert_bias, 256, 48, group_size)
        assert torch.equal(packed, expected[expert])


def test_pack_converts_scales_as_upstream():
    """Groups are kept in bfloat16, channelwise scales in float32, whatever they come in."""
    stack = random_stack(1, 16, 64, 32)
    exact = stack.scales.float() * 1.001
    packed = oracle.pack_int4_weights_for_kleidi(stack.values[0], exact[0], None, 64, 16, 32)
    stack.scales = exact.to(torch.bfloat16)
    assert torch.equal(packed, op_pack(stack, 32)[0])
    stack = random_stack(1, 16, 64, -1)
    stack.scales = stack.scales.to(torch.bfloat16)
    packed = oracle.pack_int4_weights_for_kleidi(stack.values[0], stack.scales[0], None, 64, 16, -1)
    stack.scales = stack.scales.float()
    assert torch.equal(packed, op_pack(stack, -1)[0])


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("group_size", moe_build.GROUP_SIZES)
def test_convert(group_size, bias, in_place, monkeypatch):
    moe = make_config(has_bias=bias)
    w13, w2 = moe_build.make_stacks(moe, group_size)
    expected13, expected2 = op_pack(w13, group_size), op_pack(w2, group_size)
    before13, before2 = w13.values.clone(), w2.values.clone()
    result = oracle.convert_to_w4a8_int8_moe_format(
        w13.values, w2.values, w13.scales, w2.scales, group_size, w13.bias, w2.bias, in_place=in_place
    )
    assert torch.equal(result[0], expected13) and torch.equal(result[1], expected2)
    assert all(rest.numel() == 0 for rest in result[2:])
    assert (torch.equal(w13.values, before13) and torch.equal(w2.values, before2)) == (not in_place)


def test_convert_packs_each_stack_with_one_call(monkeypatch):
    moe = make_config()
    w13, w2 = moe_build.make_stacks(moe, 32)
    real, shapes = torch.ops.w4a8.dyn_quant_pack_4bit_weight, []

    class Ops:
        @staticmethod
        def dyn_quant_pack_4bit_weight(weights, *rest):
            shapes.append(tuple(weights.shape))
            return real(weights, *rest)

    monkeypatch.setattr(torch.ops, "w4a8", Ops)
    oracle.convert_to_w4a8_int8_moe_format(w13.values, w2.values, w13.scales, w2.scales, 32)
    assert shapes == [(8, 512, 64), (8, 128, 128)]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("group_size", [-1, 32])
def test_convert_deinterleaves(group_size, in_place):
    """Rows g0 u0 g1 u1 ... give the packed tensor of rows g0 g1 ... u0 u1 ..."""
    moe = make_config(has_bias=True)
    w13, w2 = moe_build.make_stacks(moe, group_size)
    half = moe.intermediate_size
    order = torch.arange(2 * half).view(2, half).t().flatten()  # position in the halves of each interleaved row
    result = oracle.convert_to_w4a8_int8_moe_format(
        w13.values[:, order].contiguous(),
        w2.values.clone(),
        w13.scales[:, order],
        w2.scales,
        group_size,
        w13.bias[:, order],
        w2.bias,
        w13_interleaved=True,
        in_place=in_place,
    )
    assert torch.equal(result[0], op_pack(w13, group_size)) and torch.equal(result[1], op_pack(w2, group_size))


def test_convert_keeps_float32_scales_when_asked():
    stack = random_stack(2, 32, 64, 32)
    stack.scales = stack.scales.float() * 1.001
    packed = oracle.convert_to_w4a8_int8_moe_format(
        stack.values, stack.values, stack.scales, stack.scales, 32, scale_dtype=torch.float32
    )[0]
    assert torch.equal(packed, op_pack(stack, 32))


@pytest.mark.parametrize("bad", [-9, 8, 127])
def test_values_outside_int4_are_refused_before_anything_is_overwritten(bad):
    w13, w2 = moe_build.make_stacks(make_config(), 32)
    w2.values[3, 5, 7] = bad
    before = w13.values.clone()
    low, high = int(w2.values.min()), int(w2.values.max())
    message = rf"w2_weight holds values in \[{low}, {high}\], but int4 values are in \[-8, 7\]"
    with pytest.raises(ValueError, match=message):
        oracle.convert_to_w4a8_int8_moe_format(w13.values, w2.values, w13.scales, w2.scales, 32, in_place=True)
    assert torch.equal(w13.values, before)
    with pytest.raises(ValueError, match="int4_as_int8 holds values in"):
        oracle.pack_int4_weights_for_kleidi(w2.values[3], w2.scales[3], None, 256, 128, 32)


def test_in_place_needs_contiguous_weights():
    w13, w2 = moe_build.make_stacks(make_config(), 32)
    with pytest.raises(ValueError, match="weights must be contiguous to be packed in place"):
        oracle.convert_to_w4a8_int8_moe_format(
            w13.values.transpose(1, 2).contiguous().transpose(1, 2), w2.values, w13.scales, w2.scales, 32, in_place=True
        )


MEASURE_PEAK = """
import resource, sys
import torch
import moe_build
from w4a8.moe import CompressedTensorsW4A8Int8MoEMethod, RoutedExperts

def kib(field):  # of /proc/self/status: VmRSS now, VmHWM the most there ever was
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field + ":"))

torch.set_num_threads(2)
# Everything is loaded and warm before the measurement: kernels, thread pool, allocator.
moe_build.make_layer(moe_build.make_config(), 32)
moe = moe_build.make_config(num_experts=32, hidden_dim=1024, intermediate_size=1024, in_dtype=torch.bfloat16)
method = CompressedTensorsW4A8Int8MoEMethod(moe_build.weight_args(32), moe_build.TOKEN_INT8, moe)
before = kib("VmRSS")
layer = RoutedExperts(moe, method)
for parameter in layer.parameters():
    parameter.data.fill_(1)  # touches every page
raw = sum(p.numel() * p.element_size() for p in layer.parameters())
layer.process_weights_after_loading()
packed = sum(p.numel() * p.element_size() for p in layer.parameters())
print(raw, packed, 1024 * (kib("VmHWM") - before), 1024 * (kib("VmRSS") - before))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_peak_memory_of_converting_a_layer(child_environment):
    """Raw (100 MiB) + packed (50 MiB) + 10 %; measured by the operating system, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE_PEAK], env=child_environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    raw, packed, peak, after = map(int, done.stdout.split())
    assert raw > 100 * 2**20 and packed > 50 * 2**20  # large against what else a process allocates meanwhile
    assert peak <= 1.1 * (raw + packed), (
        f"peak {peak / 2**20:.0f} MiB, raw {raw / 2**20:.0f}, packed {packed / 2**20:.0f}"
    )
    assert after <= 1.1 * packed, "the raw weights are not freed"
