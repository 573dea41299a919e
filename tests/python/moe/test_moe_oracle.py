"""The oracle: selection, the kernel and the conversion of weights, with every message."""

import logging
from dataclasses import replace

import meter
import moe_build
import pytest
import torch
from moe_build import GROUP_SIZES, Stack, assert_raises, interleaved, make_config, make_stacks, op_pack, random_stack

from w4a8.core.activation import kernel_activation_kind
from w4a8.core.logger import forget_logged
from w4a8.moe import (
    CPUExpertsInt4,
    CPUExpertsInt4Modular,
    FusedMoEParallelConfig,
    MoEActivation,
    RoutingMethodType,
    W4A8Int8MoeBackend,
    config,
    method_v0_17,
    modular_kernel,
    upstream_activation_kind,
)
from w4a8.moe.config import GroupShape, QuantKey, ScaleDesc, int4_weight_key
from w4a8.moe.modular_kernel import FusedMoEActivationFormat, FusedMoEExperts
from w4a8.moe.oracle import w4a8_int8 as oracle

G32 = config.kInt4W4A8StaticGroup32Sym
G128, CHANNEL = config.kInt4W4A8StaticGroup128Sym, config.kInt4W4A8StaticChannelSym
KEYS = {32: G32, 64: config.kInt4W4A8StaticGroup64Sym, 128: G128, -1: CHANNEL}
STANDARD = FusedMoEActivationFormat.Standard
QUANT_CONFIG = oracle.make_w4a8_int8_moe_quant_config((1, 32))


@pytest.fixture(autouse=True)
def say_everything_again():
    forget_logged()


@pytest.fixture
def not_a_cpu(monkeypatch):
    monkeypatch.setattr(config.CpuPlatform, "is_cpu", lambda self: False)


@pytest.fixture
def logged(caplog):
    caplog.set_level(logging.DEBUG, "w4a8")
    return lambda: [(record.levelname, record.getMessage()) for record in caplog.records if record.name[:4] == "w4a8"]


def select(key=G32, **changes):
    return oracle.select_w4a8_int8_moe_backend(make_config(**changes), key, None)


def parallel(**sizes):
    return {"moe_parallel_config": FusedMoEParallelConfig(**sizes)}


# ---- selection ----


def test_selects_and_says_so_once(logged):
    for backend in ("auto", "auto", "cpu"):
        assert select(moe_backend=backend) == (W4A8Int8MoeBackend.CPU_INT4, CPUExpertsInt4)
    message = "Using CPU_INT4 W4A8 Int8 MoE backend out of potential backends: ['CPU_INT4']."
    assert logged() == [("INFO", message)]


def test_backends():
    assert oracle._get_priority_backends(make_config()) == [W4A8Int8MoeBackend.CPU_INT4]
    assert oracle.backend_to_kernel_cls(W4A8Int8MoeBackend.CPU_INT4) == [CPUExpertsInt4, CPUExpertsInt4Modular]
    assert oracle.map_w4a8_int8_backend("cpu") is W4A8Int8MoeBackend.CPU_INT4
    message = "moe_backend='marlin' is not supported for W4A8 Int8 MoE. Expected one of ['cpu']."
    assert_raises(ValueError, message, oracle.map_w4a8_int8_backend, "marlin")
    assert_raises(ValueError, message, select, moe_backend="marlin")
    other = type("Other", (), {"value": "OTHER"})
    assert_raises(ValueError, "Unknown W4A8 Int8 MoE backend: OTHER", oracle.backend_to_kernel_cls, other)


def test_only_cpus(not_a_cpu):
    assert oracle._get_priority_backends(make_config()) == []
    assert_raises(NotImplementedError, "W4A8 Int8 MoE is only supported on CPU platforms", select)
    args = (moe_build.weight_args(32), moe_build.TOKEN_INT8, make_config())
    message = "CompressedTensorsW4A8Int8MoEMethod is CPU-only."
    assert_raises(ValueError, message, method_v0_17.CompressedTensorsW4A8Int8MoEMethod, *args)
    args = (CPUExpertsInt4, make_config(), None, None, STANDARD)
    reason = "kernel does not support current device cpu"  # the first of several
    assert CPUExpertsInt4.is_supported_config(*args) == (False, reason)


def test_unsupported_layer(logged, monkeypatch):
    nothing = "No W4A8 Int8 MoE backend supports the deployment configuration."
    assert_raises(NotImplementedError, nothing, select, int4_weight_key(48))
    reason = f"kernel does not support quantization scheme {int4_weight_key(48)}xNone"
    text = f"W4A8 Int8 MoE backend CPU_INT4 does not support the deployment configuration since {reason}."
    assert logged() == [("DEBUG", text)]
    assert_raises(ValueError, text, select, int4_weight_key(48), moe_backend="cpu")
    for experts_cls in (CPUExpertsInt4, CPUExpertsInt4Modular):
        monkeypatch.setattr(experts_cls, "is_supported_config", staticmethod(lambda *args: (False, None)))
    text = "W4A8 Int8 MoE backend 'CPU_INT4' does not support the deployment configuration."
    assert_raises(ValueError, text, select, moe_backend="cpu")


@pytest.mark.parametrize("method", [RoutingMethodType.Custom, RoutingMethodType.Unspecified])
def test_custom_routing_selects_the_modular_experts(method):
    assert select(routing_method=method)[1] is CPUExpertsInt4Modular
    # Of a layer that neither class runs, the last one's reason.
    with pytest.raises(ValueError, match=r"since kernel does not support input dtype torch\.float64"):
        select(routing_method=method, in_dtype=torch.float64, moe_backend="cpu")


# ---- is_supported_config: the reasons, in order ----


class NoGate(CPUExpertsInt4):
    _supports_no_act_and_mul = staticmethod(lambda: False)


class NoGelu(CPUExpertsInt4):
    _supports_activation = staticmethod(lambda activation: activation is not MoEActivation.GELU)


class NoLogits(CPUExpertsInt4):
    _supports_router_logits_dtype = staticmethod(lambda dtype, method: False)


DATA, CONTEXT = parallel(dp_size=2), parallel(pcp_size=2)
CUSTOM = RoutingMethodType.Custom
ASYMMETRIC = int4_weight_key(32, symmetric=False)
PER_RANK = "intermediate size per partition"


def cut(size, group):
    groups = "or 16 or a multiple of 32 that divides it"
    return f"{size}: group (block_size) is {group}, expected k = {size} (channelwise), {groups}"


UNSUPPORTED = [
    ({"activation": "silu_no_mul"}, "no act_and_mul MLP layer", NoGate),
    ({"activation": "gelu"}, "MoEActivation.GELU activation", NoGelu),
    ({}, "router logits dtype None", NoLogits),
    ({}, "quantization scheme NonexNone", CPUExpertsInt4, None),
    ({}, f"quantization scheme {ASYMMETRIC}xNone", CPUExpertsInt4, ASYMMETRIC),
    ({}, f"quantization scheme {G32}x{G32}", CPUExpertsInt4, G32, G32),
    (DATA, f"parallel config {DATA['moe_parallel_config']}"),
    (CONTEXT, f"parallel config {CONTEXT['moe_parallel_config']}"),
    ({"routing_method": CUSTOM}, f"routing method {CUSTOM!r}"),
    ({"in_dtype": torch.float64}, "input dtype torch.float64"),
    ({"hidden_dim": 144}, f"hidden size {cut(144, 32)}"),
    ({"intermediate_size": 1408, **parallel(tp_size=2)}, f"{PER_RANK} {cut(704, 128)}", CPUExpertsInt4, G128),
    (
        {"intermediate_size": 77},
        f"{PER_RANK} 77: k (in_features) is 77, expected an even number in 2..1048576",
        CPUExpertsInt4,
        CHANNEL,
    ),
    ({}, "batched_experts activation format", CPUExpertsInt4, G32, None, FusedMoEActivationFormat.BatchedExperts),
]


@pytest.mark.parametrize("case", UNSUPPORTED, ids=lambda case: case[1][:40])
def test_reason(case):
    def check(changes, reason, cls=CPUExpertsInt4, weight_key=G32, activation_key=None, layout=STANDARD):
        args = (cls, make_config(**changes), weight_key, activation_key, layout)
        assert cls.is_supported_config(*args) == (False, f"kernel does not support {reason}")

    check(*case)


def test_selection_asks_for_the_layout_of_the_layer():
    with pytest.raises(ValueError, match="since kernel does not support batched_experts activation format"):
        select(**parallel(use_batched_activation_format=True), moe_backend="cpu")


@pytest.mark.parametrize("cls", [CPUExpertsInt4, CPUExpertsInt4Modular])
def test_supported(cls):
    changes = [{"activation": activation} for activation in MoEActivation]
    changes += [{"routing_method": m} for m in RoutingMethodType if m.name not in ("Custom", "Unspecified")]
    changes += [{"in_dtype": dtype} for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    logits = (None, torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8)
    changes += [{"router_logits_dtype": dtype} for dtype in logits]
    changes += [{**parallel(ep_size=2, use_ep=True), "num_local_experts": 4}, parallel(tp_size=2), {"has_bias": True}]
    for moe in (make_config(**change) for change in changes):
        for key in KEYS.values():
            assert cls.is_supported_config(cls, moe, key, None, STANDARD) == (True, None)
        assert cls(moe, QUANT_CONFIG).supports_expert_map()


def test_supported_schemes():
    """Groups of 16 and of every multiple of 32. The named keys are what they say; one field changed is another scheme,
    which nothing here runs."""
    for size in range(1, 513):
        for dtype in (torch.float32, torch.bfloat16):
            key = int4_weight_key(size, scale_dtype=dtype)
            assert CPUExpertsInt4._supports_quant_scheme(key, None) == (size == 16 or size % 32 == 0)
    assert config.kInt4W4A8StaticGroupSym == CHANNEL
    for size, key in KEYS.items():
        shape = GroupShape(-1, 1) if size == -1 else GroupShape(1, size)
        dtype = torch.float32 if size == -1 else torch.bfloat16
        assert key == QuantKey(torch.int8, ScaleDesc(dtype, True, shape))
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
    experts = CPUExpertsInt4(make_config(), QUANT_CONFIG)
    assert {activation: experts._activation_kind(activation) for activation in MoEActivation} == kinds
    upstream = [MoEActivation.SWIGLUSTEP, MoEActivation.SWIGLUOAI, MoEActivation.SILU]
    assert [upstream_activation_kind(activation) for activation in upstream] == [0, 1, 2]
    message = "Unsupported activation 'MoEActivation.GELU'"
    assert_raises(ValueError, message, upstream_activation_kind, MoEActivation.GELU)
    assert_raises(ValueError, "Unsupported activation 'None'", kernel_activation_kind, None)
    with pytest.raises(ValueError, match=r"Unknown MoE activation: 'tanh'. Valid activations: \['silu', "):
        MoEActivation.from_str("tanh")


# ---- the kernel ----


@pytest.mark.parametrize(("cls", "kind"), [(CPUExpertsInt4, "Monolithic"), (CPUExpertsInt4Modular, "Modular")])
def test_kernel(cls, kind, logged):
    make = oracle.make_w4a8_int8_moe_kernel
    for _ in range(2):
        kernel = make(QUANT_CONFIG, make_config(), cls, allow_modular=True)
        assert kernel.is_monolithic == (kind == "Monolithic")
    assert logged() == [("INFO", f"Using MoEPrepareAndFinalizeNoDPEP{kind}")]
    message = "W4A8 Int8 MoE only supports monolithic experts, but got "
    neither = type("Neither", (FusedMoEExperts,), {})
    assert_raises(ValueError, message + "Neither", make, QUANT_CONFIG, make_config(), neither, allow_modular=True)
    if kind == "Monolithic":
        assert make(QUANT_CONFIG, make_config(), cls).is_monolithic
        text = "MoEPrepareAndFinalizeNoDPEPModular and CPUExpertsInt4 are not of the same kind"
        parts = modular_kernel.MoEPrepareAndFinalizeNoDPEPModular(), kernel.fused_experts
        assert_raises(ValueError, text, modular_kernel.FusedMoEKernel, *parts)
    else:
        assert_raises(ValueError, message + "CPUExpertsInt4Modular", make, QUANT_CONFIG, make_config(), cls)


# ---- conversion ----


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_convert(group_size, bias, in_place):
    """Halves or alternating rows of w13 to the same bytes; one matrix alone too. Only in place the input changes."""
    w13, w2 = make_stacks(make_config(has_bias=bias), group_size)
    expected = op_pack(w13, group_size), op_pack(w2, group_size)
    for expert in range(8):
        alone = oracle.pack_int4_weights_for_kleidi(*w13.of(expert), 128, 512, group_size)
        assert torch.equal(alone, expected[0][expert])
    for alternate in (False, True):
        first = interleaved(w13) if alternate else Stack(w13.values.clone(), w13.scales, w13.bias)
        values = first.values.clone(), w2.values.clone()
        scales_and_biases = (first.scales, w2.scales, group_size, first.bias, w2.bias)
        options = {"w13_interleaved": alternate, "in_place": in_place}
        result = oracle.convert_to_w4a8_int8_moe_format(*values, *scales_and_biases, **options)
        assert torch.equal(result[0], expected[0]) and torch.equal(result[1], expected[1])
        assert all(rest.numel() == 0 for rest in result[2:])
        assert [torch.equal(*both) for both in zip(values, (first.values, w2.values))] == [not in_place] * 2


def test_scales_of_one_matrix_are_converted_as_upstream():
    """Groups are kept in bfloat16, channelwise scales in float32, whatever they come in."""
    for group_size, dtype in ((32, torch.bfloat16), (-1, torch.float32)):
        stack = random_stack(1, 16, 64, group_size)
        given = (stack.scales.float() * 1.001).to(torch.float32 if group_size == 32 else torch.bfloat16)
        packed = oracle.pack_int4_weights_for_kleidi(stack.values[0], given[0], None, 64, 16, group_size)
        assert torch.equal(packed, op_pack(Stack(stack.values, given.to(dtype), None), group_size)[0])
    with pytest.raises(ValueError, match=r"int4_as_int8 has shape \(16, 64\), but \(16, 32\) is expected"):
        oracle.pack_int4_weights_for_kleidi(stack.values[0], stack.scales[0], None, 32, 16, -1)


def test_convert_packs_each_stack_with_one_call_and_keeps_the_scales_asked_for(monkeypatch):
    stack = random_stack(2, 32, 64, 32)
    stack.scales = stack.scales.float() * 1.001
    expected = op_pack(stack, 32)
    real, shapes = torch.ops.w4a8.dyn_quant_pack_4bit_weight, []

    class Ops:
        @staticmethod
        def dyn_quant_pack_4bit_weight(weights, *rest, **kind):
            shapes.append(tuple(weights.shape))
            return real(weights, *rest, **kind)

    monkeypatch.setattr(torch.ops, "w4a8", Ops)
    given = (stack.values, stack.values[:, :16], stack.scales, stack.scales[:, :16], 32)
    packed = oracle.convert_to_w4a8_int8_moe_format(*given, scale_dtype=torch.float32)[0]
    assert torch.equal(packed, expected) and shapes == [(2, 32, 32), (2, 16, 32)]


@pytest.mark.parametrize("bad", [-9, 8, 127])
def test_wrong_values_are_refused_before_anything_is_overwritten(bad):
    w13, w2 = make_stacks(make_config(), 32)
    w2.values[3, 5, 7] = bad
    before = w13.values.clone()
    low, high = int(w2.values.min()), int(w2.values.max())
    message = rf"w2_weight holds values in \[{low}, {high}\], but int4 values are in \[-8, 7\]"
    with pytest.raises(ValueError, match=message):
        oracle.convert_to_w4a8_int8_moe_format(w13.values, w2.values, w13.scales, w2.scales, 32, in_place=True)
    assert torch.equal(w13.values, before)
    with pytest.raises(ValueError, match="int4_as_int8 holds values in"):
        oracle.pack_int4_weights_for_kleidi(w2.values[3], w2.scales[3], None, 256, 128, 32)
    w13.values[0, 0, 0] = bad
    with pytest.raises(ValueError, match="w13_weight holds values in"):
        oracle.convert_to_w4a8_int8_moe_format(w13.values, w2.values, w13.scales, w2.scales, 32)


def test_in_place_needs_contiguous_weights():
    w13, w2 = make_stacks(make_config(), 32)
    strided = w13.values.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="weights must be contiguous to be packed in place"):
        oracle.convert_to_w4a8_int8_moe_format(strided, w2.values, w13.scales, w2.scales, 32, in_place=True)


MEASURE_PEAK = """
import torch
import moe_build
from w4a8.moe import CompressedTensorsW4A8Int8MoEMethod, RoutedExperts

torch.set_num_threads(2)
# Everything is loaded and warm before the measurement: kernels, thread pool, allocator.
moe_build.make_layer(moe_build.make_config(), 32)
moe = moe_build.make_config(num_experts=32, hidden_dim=1024, intermediate_size=1024, in_dtype=torch.bfloat16)
method = CompressedTensorsW4A8Int8MoEMethod(moe_build.weight_args(32), moe_build.TOKEN_INT8, moe)
before = memory("VmRSS")
layer = RoutedExperts(moe, method)
for parameter in layer.parameters():
    parameter.data.fill_(1)  # touches every page
raw = sum(p.numel() * p.element_size() for p in layer.parameters())
layer.process_weights_after_loading()
packed = sum(p.numel() * p.element_size() for p in layer.parameters())
print(raw, packed, memory("VmHWM") - before, memory("VmRSS") - before)
"""


@meter.needs_proc
def test_peak_memory_of_converting_a_layer():
    """Raw (100 MiB) + packed (50 MiB) + 10 %; measured by the operating system, in a process of its own."""
    raw, packed, peak, after = meter.run(MEASURE_PEAK)
    assert raw > 100 * 2**20 and packed > 50 * 2**20  # large against what else a process allocates meanwhile
    assert peak <= 1.1 * (raw + packed), (
        f"peak {peak / 2**20:.0f} MiB, raw {raw / 2**20:.0f}, packed {packed / 2**20:.0f}"
    )
    assert after <= 1.1 * packed, "the raw weights are not freed"
