"""The oracle: selection with every message."""

import logging
from dataclasses import replace

import moe_build
import pytest
import torch
from moe_build import make_config

from w4a8.core.activation import kernel_activation_kind
from w4a8.core.log import forget_logged
from w4a8.moe import (
    CPUExpertsInt4,
    CPUExpertsInt4Modular,
    FusedMoEParallelConfig,
    MoEActivation,
    RoutingMethodType,
    W4A8Int8MoeBackend,
    upstream_activation_kind,
)
from w4a8.moe import method_v0_17 as old
from w4a8.moe.modular_kernel import FusedMoEActivationFormat, FusedMoEExperts
from w4a8.moe.oracle import w4a8_int8 as oracle
from w4a8.moe.platforms import current_platform
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


def test_16_and_every_multiple_of_32_is_a_supported_scheme():
    for size in range(1, 513):
        for dtype in (torch.float32, torch.bfloat16):
            key = int4_weight_key(size, scale_dtype=dtype)
            assert CPUExpertsInt4._supports_quant_scheme(key, None) == (size == 16 or size % 32 == 0)
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
