"""Layers of experts without an engine: what the plugin refuses, in words, and what it notices to be missing."""

import re
from types import SimpleNamespace

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from layers import EXPERTS, HIDDEN, make_layer
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

import w4a8
from w4a8.core.json_fields import CheckpointError
from w4a8.formats import Scheme
from w4a8.formats.compressed_tensors import scheme_of_args
from w4a8.integrations.vllm import moe
from w4a8.integrations.vllm.moe import ReceivedExperts, W4A8MoEMethod, experts_method, unsupported
from w4a8.nn import W4A8Experts


def load(layer, name, shape, shard, expert, dtype=torch.bfloat16):
    parameter = getattr(layer, name)
    return parameter.weight_loader(
        param=parameter,
        loaded_weight=torch.ones(shape, dtype=dtype),
        weight_name=f"model.layers.0.mlp.experts.{name}",
        shard_id=shard,
        expert_id=expert,
        return_success=True,
    )


def load_weights(layer, without=(), experts=range(EXPERTS)):
    for expert in experts:
        for stack, shard, n, k in (("w13", "w1", 64, 128), ("w13", "w3", 64, 128), ("w2", "w2", 128, 64)):
            for name, shape, dtype in (
                (f"{stack}_weight", (n, k), torch.int8),
                (f"{stack}_weight_scale", (n, k // 32), torch.bfloat16),
                (f"{stack}_bias", (n,), torch.bfloat16),
            ):
                if hasattr(layer, name) and (name, shard, expert) not in without:
                    held = layer._map_global_expert_id_to_local_expert_id(expert) != -1
                    assert load(layer, name, shape, shard, expert, dtype) == held


def test_groups_that_tensor_parallelism_cuts():
    """DeepSeek-V2-Lite in groups of 128 on two ranks: the sentence that docs/vllm.md promises, with the sizes."""
    message = (
        "w4a8: model.layers.0.mlp.experts: kernel does not support intermediate size per partition 704: group "
        "(block_size) is 128, expected k = 704 (channelwise), or 16 or a multiple of 32 that divides it"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        make_layer(group_size=128, intermediate=1408, tp_size=2)


@pytest.mark.parametrize("name", ["dp_size", "pcp_size", "sp_size"])
def test_parallelism_that_is_left_to_vllm(name):
    """docs/vllm.md: data, context and sequence parallel."""
    layer, _ = make_layer()
    assert unsupported(layer.moe_config) is None
    setattr(layer.moe_config.moe_parallel_config, name, 2)
    assert unsupported(layer.moe_config) == f"{name} 2"


@pytest.mark.parametrize(
    ("activation", "numbers", "reason"),
    [
        ("swigluoai", {"swiglu_limit": 7.0, "swiglu_alpha": 1.702, "swiglu_beta": 1.0}, None),
        ("swigluoai", {"swiglu_alpha": 1.5}, None),
        ("swigluoai_uninterleave", {"swiglu_limit": 5.0, "swiglu_alpha": 1.5, "swiglu_beta": 0.0}, None),
        (
            "swigluoai_uninterleave",
            {"swiglu_limit": 7.0, "swiglu_alpha": 1.702},
            "swiglu_beta not given with activation swigluoai_uninterleave",
        ),
        ("silu", {"swiglu_limit": 10.0}, None),
        ("silu", {"swiglu_limit": 0.0}, "swiglu_limit 0.0 with activation silu"),
        ("silu", {"swiglu_limit": 10.0, "swiglu_alpha": 1.5}, "swiglu_alpha 1.5 with activation silu"),
        ("swigluoai", {"swiglu_alpha": float("inf")}, "swiglu_alpha inf with activation swigluoai"),
        ("swiglustep", {"swiglu_limit": 16.0}, None),
        ("gelu_tanh", {}, None),
        ("gelu_tanh", {"swiglu_limit": 7.0}, "swiglu_limit 7.0 with activation gelu_tanh"),
        ("relu2_no_mul", {}, None),
        ("relu2_no_mul", {"swiglu_limit": 7.0}, "swiglu_limit 7.0 with activation relu2_no_mul"),
        ("situ", {}, "activation situ"),
    ],
)
def test_numbers_of_the_clamped_activation(activation, numbers, reason):
    layer, _ = make_layer()
    layer.moe_config.activation = MoEActivation(activation)
    vars(layer.moe_config).update(numbers)
    assert unsupported(layer.moe_config) == reason


@pytest.mark.parametrize(
    ("activation", "numbers", "kind"),
    [
        ("silu", {"swiglu_limit": 0.5}, 2),
        ("swigluoai_uninterleave", {"swiglu_limit": 0.5, "swiglu_alpha": 1.3, "swiglu_beta": 0.25}, 3),
        ("swiglustep", {"swiglu_limit": 0.5}, 4),
        ("gelu_tanh", {}, 6),
        ("relu2_no_mul", {}, 7),
    ],
)
def test_the_numbers_are_computed_with(activation, numbers, kind):
    """The layer gives what the operator gives with them."""
    layer, made = make_layer(activation=activation)
    vars(layer.moe_config).update(numbers)
    method = W4A8MoEMethod(made.filler, layer, "experts")
    gated = not activation.endswith("no_mul")
    packed = W4A8Experts.from_float(torch.randn(EXPERTS, (1 + gated) * 64, HIDDEN), torch.randn(EXPERTS, HIDDEN, 64))
    for name in ("w13", "w2"):
        stack = torch.nn.Parameter(getattr(packed, f"{name}_packed"), requires_grad=False)
        setattr(layer, f"{name}_weight_packed", stack)
    layer.expert_map, layer.apply_router_weight_on_input = None, False
    x, ids, weights = torch.randn(5, HIDDEN), torch.tensor([[0, 1]] * 5), torch.rand(5, 2)
    arguments = (x, ids, weights, layer.w13_weight_packed, layer.w2_weight_packed, HIDDEN, 64, (1 + gated) * 64, 32)
    given = {name.removeprefix("swiglu_"): value for name, value in numbers.items()}
    expected = w4a8.dynamic_4bit_int_moe(*arguments, False, kind, **given)
    found = method.apply(layer, x, weights, ids)
    assert torch.equal(found, expected)
    assert not numbers or not torch.equal(found, w4a8.dynamic_4bit_int_moe(*arguments, False, kind))


@pytest.mark.parametrize(("bits", "taken"), [(4, True), (8, True), (2, False)])
def test_weights_without_quantized_inputs(bits, taken):
    weights = QuantizationArgs(num_bits=bits, strategy="group", group_size=32)
    if not taken:
        with pytest.raises(CheckpointError, match=r"group\.weights\.num_bits is 2, but 4 or 8 is expected"):
            scheme_of_args("pack-quantized", weights, None, "group")
        return
    assert scheme_of_args("pack-quantized", weights, None, "group").weight_only == "group.input_activations is missing"
    if bits == 4:
        inputs = QuantizationArgs(num_bits=8, strategy="token", dynamic=True)
        assert scheme_of_args("pack-quantized", weights, inputs, "group").weight_only is None


def test_what_is_left_to_vllm(monkeypatch):
    said = []
    log = SimpleNamespace(warning_once=lambda message, *args: said.append(message % args))
    monkeypatch.setattr(moe, "logger", lambda: log)
    layer, _ = make_layer(form="gptq")
    for bits in (4, 8):
        assert (
            experts_method(ReceivedExperts(Scheme("gptq", 32, True, bits=bits)), layer, "layers.0") is not None
            and not said
        )
    layer.moe_config.is_lora_enabled = True
    assert experts_method(ReceivedExperts(Scheme("gptq", 32, True, bits=8)), layer, "layers.0") is None
    assert said == ["w4a8: leaves layers of experts to vLLM, because of LoRA"]
    with pytest.raises(ValueError, match=r"intermediate size per partition 41: k .in_features. is 41, expected"):
        make_layer(-1, 41, form="gptq", bits=8)


def stored_8_bits(form, n, k, symmetric):
    """The tensors of a matrix of 8-bit codes in groups of 32, and the matrix multiplied out, float64 [n, k]."""
    codes, scales = torch.randint(256, (n, k)), torch.rand(n, k // 32).half()
    zeros = torch.full(scales.shape, 128) if symmetric else torch.randint(1, 256, scales.shape)
    plain = (codes - zeros.repeat_interleave(32, 1)) * scales.double().repeat_interleave(32, 1)

    def words(values):
        shifted = values.unflatten(-1, (-1, 4)) << 8 * torch.arange(4)
        return shifted.sum(-1).to(torch.uint32).view(torch.int32)

    if form == "gptq":
        return {"qweight": words(codes).T, "qzeros": words((zeros - 1).T), "scales": scales.T}, plain
    found = {"weight_packed": words(codes), "weight_scale": scales, "weight_shape": torch.tensor([n, k])}
    return found if symmetric else {**found, "weight_zero_point": words(zeros.T).T}, plain


def load_8_bits(layer, form, symmetric, order, intermediate=64):
    """Loads random experts, tensor by tensor, and gives (w13, w2) multiplied out, by expert."""
    calls, plain = [], {}
    for expert in range(EXPERTS):
        for stack, shard in SHARDS:
            n, k = (HIDDEN, intermediate) if stack == "w2" else (intermediate, HIDDEN)
            found, plain[expert, shard] = stored_8_bits(form, n, k, symmetric)
            calls += [(f"{stack}_{name}", tensor.contiguous(), shard, expert) for name, tensor in found.items()]
    for name, tensor, shard, expert in sorted(calls, key=order):
        param = getattr(layer, name)
        param.weight_loader(param, tensor, f"experts.{name}", shard_id=shard, expert_id=expert, return_success=True)
    return [(torch.cat([plain[e, "w1"], plain[e, "w3"]]), plain[e, "w2"]) for e in range(EXPERTS)]


def assert_packed(layer, experts, intermediate=64):
    for expert, wanted in enumerate(experts):
        for stack, weight in zip(("w13", "w2"), wanted):
            packed = getattr(layer, f"{stack}_weight_packed")[expert]
            n, k = weight.shape
            found = torch.ops.w4a8.dyn_quant_unpack_any_4bit_weight(packed, 32, k, n)
            codes, scales, zeros, _, values, *_ = found
            zeros = zeros if zeros.numel() > 0 else torch.full(scales.shape, 128)
            centred = codes.double() - zeros.double().repeat_interleave(32, 1)
            assert values == "int8"
            assert torch.equal(centred * scales.double().repeat_interleave(32, 1), weight)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("form", ["gptq", "pack-quantized"])
def test_experts_of_8_bits(form, symmetric):
    """Expert by expert, and by kinds of tensors; then other weights into the same places."""
    layer, method = make_layer(form=form, symmetric=symmetric, bits=8)
    loader, raw = layer.w4a8_loader, dict(layer.named_parameters())
    first = load_8_bits(layer, form, symmetric, lambda call: (call[3], call[2]))
    method.process_weights_after_loading(layer)
    assert_packed(layer, first)
    size = layer.w13_weight_packed.shape
    for name, param in raw.items():  # as vLLM does when it loads again
        if param.is_meta:
            data = torch.zeros(param.shape, dtype=param.dtype)
            layer.register_parameter(name, torch.nn.Parameter(data, requires_grad=False))
            getattr(layer, name).weight_loader = param.weight_loader
    second = load_8_bits(layer, form, symmetric, lambda call: (call[0], -call[3]))
    assert not loader.nothing_new
    method.process_weights_after_loading(layer)
    assert_packed(layer, second)
    assert layer.w13_weight_packed.shape == size


@pytest.mark.parametrize("form", ["gptq", "pack-quantized"])
def test_experts_of_8_bits_on_two_ranks(form):
    layers = [make_layer(intermediate=128, tp_size=2, tp_rank=r, form=form, symmetric=False, bits=8) for r in (0, 1)]
    for rank, (layer, method) in enumerate(layers):
        torch.manual_seed(0)
        whole = load_8_bits(layer, form, False, lambda call: call[3], 128)
        method.process_weights_after_loading(layer)
        mine = slice(64 * rank, 64 * rank + 64)
        halves = [(torch.cat([w13[:128][mine], w13[128:][mine]]), w2[:, mine]) for w13, w2 in whole]
        assert_packed(layer, halves)


def test_experts_of_8_bits_lack_something():
    layer, method = make_layer(form="gptq", symmetric=False, bits=8)
    found, _ = stored_8_bits("gptq", 64, HIDDEN, False)
    for name in ("qweight", "scales"):
        param = getattr(layer, f"w13_{name}")
        param.weight_loader(param, found[name], f"experts.w13_{name}", shard_id="w1", expert_id=0)
    with pytest.raises(ValueError, match=r"lacks weights: w13_qweight: 1 of 4 tensors, .*w13_qzeros: 0 of 4 tensors"):
        method.process_weights_after_loading(layer)
    param = layer.w13_qzeros
    with pytest.raises(ValueError, match=r"zero points in \[256, 256\], but \[0, 255\] is expected"):
        minus_one = torch.full_like(found["qzeros"], -1)
        param.weight_loader(param, minus_one, "experts.w13_qzeros", shard_id="w1", expert_id=0)
    for name in ("qzeros", "scales"):
        param = getattr(layer, f"w13_{name}")
        param.weight_loader(param, found[name], f"experts.w13_{name}", shard_id="w3", expert_id=0)
    param = layer.w13_qweight
    message = r"experts\.0\.w3\.scales: shape \(4, 64\), but 64 x 64 features in groups of 32 make \(2, 64\)"
    with pytest.raises(ValueError, match=message):
        param.weight_loader(param, found["qweight"][:16], "experts.w13_qweight", shard_id="w3", expert_id=0)


@pytest.mark.parametrize("symmetric", [True, False])
def test_random_experts_of_8_bits(symmetric):
    """As ``--load-format dummy`` makes them."""
    layer, method = make_layer(form="gptq", symmetric=symmetric, bits=8)
    method.filler.dummy = True
    method.process_weights_after_loading(layer)
    unpack = torch.ops.w4a8.dyn_quant_unpack_any_4bit_weight
    codes, scales, zeros, _, values, *_ = unpack(layer.w2_weight_packed, 32, 64, HIDDEN)
    assert values == "int8" and codes.float().std() > 60 and scales.any()
    assert zeros.numel() == 0 if symmetric else 100 < zeros.float().mean() < 156 and zeros.float().std() > 10


def test_random_experts_of_mxfp4():
    """Of the size of real ones: other weights fit in their place."""
    layer, method = make_layer(form="mxfp4", has_bias=True, activation="swigluoai")
    method.filler.dummy = True
    method.process_weights_after_loading(layer)
    for stack, n, k in (("w13", 128, HIDDEN), ("w2", HIDDEN, 64)):
        packed = getattr(layer, f"{stack}_weight_packed")
        codes, scales, *_ = torch.ops.w4a8.dyn_quant_unpack_any_4bit_weight(packed, 32, k, n)
        assert scales.dtype == torch.uint8 and codes.float().std() > 60
        assert int(scales.max()) <= 117  # 2^-10


def test_experts_of_other_ranks():
    """They are not taken, and not missed."""
    layer, method = make_layer()
    layer._map_global_expert_id_to_local_expert_id = lambda expert: {1: 0, 3: 1}.get(expert, -1)
    load_weights(layer, experts=range(4))
    method.process_weights_after_loading(layer)
    assert layer.w13_weight_packed.shape[0] == EXPERTS


@pytest.mark.parametrize("has_bias", [False, True])
def test_everything_is_there(has_bias):
    layer, method = make_layer(has_bias=has_bias)
    load_weights(layer)
    method.process_weights_after_loading(layer)
    assert layer.w13_weight_packed.shape[0] == EXPERTS


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        (("w13_bias", "w3", 1), "w13_bias: 3 of 4 tensors"),
        (("w2_bias", "w2", 0), "w2_bias: 1 of 2 tensors"),
        (("w2_weight_scale", "w2", 1), "w2_weight_scale: 1 of 2 tensors"),
    ],
)
def test_a_missing_tensor(lost, message):
    """A bias as well: the layer would run on zeros."""
    layer, method = make_layer(has_bias=True)
    load_weights(layer, without=(lost,))
    with pytest.raises(ValueError, match=f"model.layers.0.mlp.experts: the checkpoint lacks weights: {message}"):
        method.process_weights_after_loading(layer)


@pytest.mark.parametrize("shard", ["w1", "w3"])
def test_separate_gate_and_up_where_rows_alternate(shard):
    """vLLM calls the halves of a fused tensor w1 and w3 too, so it cannot be told which rows these are."""
    layer, _ = make_layer(activation="swigluoai")
    with pytest.raises(ValueError, match=rf"w13_weight: {shard} of a layer whose rows alternate gate and up"):
        load(layer, "w13_weight", (64, 128), shard, 0, torch.int8)
    assert load(layer, "w13_weight", (128, 128), "gpt_oss_w13", 0, torch.int8)
    layer, _ = make_layer()
    assert load(layer, "w13_weight", (64, 128), shard, 0, torch.int8)


GPTQ = {"qweight": (16, 64), "qzeros": (4, 8), "scales": (4, 64)}  # of w1, [64, 128] in groups of 32


def gptq_tensor(layer, stack, shard, name, value, expert=0):
    shapes = GPTQ if stack == "w13" else {"qweight": (8, 128), "qzeros": (2, 16), "scales": (2, 128)}
    dtype = torch.float16 if name == "scales" else torch.int32
    parameter = getattr(layer, f"{stack}_{name}")
    assert parameter.shape[1:] == torch.Size((*shapes[name][:1], shapes[name][1] * (2 if stack == "w13" else 1)))
    return parameter.weight_loader(
        param=parameter,
        loaded_weight=torch.full(shapes[name], value, dtype=dtype),
        weight_name=f"model.layers.0.mlp.experts.{stack}_{name}",
        shard_id=shard,
        expert_id=expert,
        return_success=True,
    )


SHARDS = (("w13", "w1"), ("w13", "w3"), ("w2", "w2"))
ALL_8 = 0x77777777  # GPTQ's first version stores one less


def test_gptq_in_any_order():
    """Scales last, as in files that are ordered by dtype; with the zero points that a symmetric file has."""
    layer, method = make_layer(form="gptq")
    for name, value in (("qzeros", ALL_8), ("qweight", 0), ("scales", 1)):
        for expert in range(EXPERTS):
            for stack, shard in SHARDS:
                assert gptq_tensor(layer, stack, shard, name, value, expert)
    method.process_weights_after_loading(layer)
    assert layer.w13_weight_packed.shape[0] == EXPERTS and layer.w13_qweight.numel() == 0


@pytest.mark.parametrize(
    ("symmetric", "value", "message"),
    [
        (True, 0, r"experts.1.w1.qzeros: zero points in \[1, 1\], but the configuration says symmetric"),
        (False, -1, r"experts.1.w1.qzeros: zero points in \[16, 16\], but \[0, 15\] is expected"),
    ],
)
def test_zero_points_that_the_format_does_not_have(symmetric, value, message):
    layer, _ = make_layer(form="gptq", symmetric=symmetric)
    for name in ("qweight", "scales"):
        gptq_tensor(layer, "w13", "w1", name, 1, expert=1)
    with pytest.raises(ValueError, match=message):
        gptq_tensor(layer, "w13", "w1", "qzeros", value, expert=1)


def test_zero_points_are_missing():
    """Without them there is no matrix; of a symmetric file they may be missing."""
    for symmetric in (True, False):
        layer, method = make_layer(form="gptq", symmetric=symmetric)
        for expert in range(EXPERTS):
            for stack, shard in SHARDS:
                for name, value in (("qweight", 0), ("scales", 1)):
                    gptq_tensor(layer, stack, shard, name, value, expert)
        if symmetric:
            method.process_weights_after_loading(layer)
            continue
        with pytest.raises(ValueError, match="lacks weights: w13_qzeros: 0 of 4 tensors, w2_qzeros: 0 of 2 tensors"):
            method.process_weights_after_loading(layer)


def test_biases_of_a_layer_without_them():
    """Some tools write zeros."""
    layer, _ = make_layer(form="gptq")
    for value in (0, 1):
        call = {"weight_name": "experts.w2_bias", "shard_id": "w2", "expert_id": 0, "return_success": True}
        bias = torch.full((HIDDEN,), value, dtype=torch.float16)
        if value == 0:
            assert layer.w2_bias.weight_loader(layer.w2_bias, bias, **call)
            continue
        with pytest.raises(
            ValueError, match=r"experts.0.w2.bias: a bias, but the layers of experts of this model have"
        ):
            layer.w2_bias.weight_loader(layer.w2_bias, bias, **call)


def test_stacks_of_all_experts():
    """As vLLM hands over gpt-oss's, cut for the rank; rows alternate gate and up."""
    layer, method = make_layer(form="mxfp4", has_bias=True, activation="swigluoai")
    shapes = {
        "w13_bias": (128,),
        "w2_bias": (128,),
        "w2_weight": (128, 32),
        "w2_weight_scale": (128, 2),
        "w13_weight": (128, 64),
        "w13_weight_scale": (128, 4),
    }
    for name, shape in shapes.items():
        dtype = torch.bfloat16 if name.endswith("bias") else torch.uint8
        value = torch.full((EXPERTS, *shape), 127, dtype=dtype)
        value[:, 1::2] = 126 if name.endswith("scale") else 127  # up: half as large
        parameter = getattr(layer, name)
        parameter.weight_loader(parameter, value, weight_name=f"experts.{name}", shard_id=None, expert_id=None)
    method.process_weights_after_loading(layer)
    unpack = torch.ops.w4a8.dyn_quant_unpack_any_4bit_weight
    _, scales, _, bias, kind, *_ = unpack(layer.w13_weight_packed, 32, HIDDEN, 128)
    assert kind == "e2m1" and bias.shape == (EXPERTS, 128)
    assert scales.dtype == torch.uint8  # exponents, as they came
    assert bool((scales[:, :64] == 127).all()) and bool((scales[:, 64:] == 126).all())
