"""The method and the experts: parameters, and layers against the op called by hand."""

import moe_build
import pytest
import reference
import torch
from common import assert_within
from moe_build import ACTIVATIONS, GROUP_SIZES, TOKEN_INT8, make_config, make_layer, make_stacks, op_moe, weight_args

from w4a8.core.experts import local_expert_ids
from w4a8.core.routing import ROUTING_METHODS
from w4a8.core.weight_utils import replace_parameter, set_weight_attrs
from w4a8.moe import (
    CompressedTensorsW4A8Int8MoEMethod,
    FusedMoEParallelConfig,
    GroupShape,
    MoEActivation,
    QuantizationStrategy,
    QuantKey,
    RoutedExperts,
    RoutingMethodType,
    ScaleDesc,
    determine_expert_map,
    method_v0_17,
    route,
)
from w4a8.moe import method as method_module

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
METHODS = [CompressedTensorsW4A8Int8MoEMethod, method_v0_17.CompressedTensorsW4A8Int8MoEMethod]


def ids_of(value):
    return getattr(value, "name", getattr(value, "value", None)) or str(value)


# ---- construction ----


@pytest.mark.parametrize("cls", METHODS)
def test_constructor_errors(cls):
    moe = make_config()
    not_dynamic = "W4A8-int MoE needs dynamic per-token activation quantization."
    for input_quant in (
        moe_build.QuantizationArgs(strategy=QuantizationStrategy.TENSOR, dynamic=True),
        moe_build.QuantizationArgs(strategy=QuantizationStrategy.TOKEN, dynamic=False),
    ):
        with pytest.raises(ValueError) as caught:
            cls(weight_args(32), input_quant, moe)
        assert str(caught.value) == not_dynamic
    with pytest.raises(ValueError) as caught:
        cls(weight_args(32, num_bits=8), TOKEN_INT8, moe)
    assert str(caught.value) == "This method only supports 4-bit weights (num_bits=4)."
    with pytest.raises(NotImplementedError, match="No W4A8 Int8 MoE backend supports the deployment"):
        cls(weight_args(32, symmetric=False), TOKEN_INT8, moe)


@pytest.mark.parametrize("cls", METHODS)
def test_attributes(cls):
    moe = make_config(has_bias=True)
    grouped, channel = weight_args(64), weight_args(None)
    method = cls(grouped, TOKEN_INT8, moe, "model.layers.0.mlp.experts")
    assert method.moe is moe and method.weight_quant is grouped and method.input_quant is TOKEN_INT8
    assert (method.group_size, method.has_bias, method.static_input_scales) == (64, True, False)
    assert method.is_monolithic and method.moe_kernel is None and method.moe_quant_config is None
    assert method.layer_name == "model.layers.0.mlp.experts"
    assert cls(channel, TOKEN_INT8, moe).group_size == -1


@pytest.mark.parametrize(
    ("group_size", "shape", "scale_dtype"),
    [(None, (-1, 1), torch.float32), (32, (1, 32), torch.bfloat16), (96, (1, 96), torch.bfloat16)],
)
def test_weight_key(group_size, shape, scale_dtype, monkeypatch):
    """The key that the oracle is asked with."""
    asked = []
    real = method_module.select_w4a8_int8_moe_backend

    def select(config, weight_key, activation_key):
        asked.append((weight_key, activation_key))
        return real(config, weight_key, activation_key)

    monkeypatch.setattr(method_module, "select_w4a8_int8_moe_backend", select)
    moe = make_config(hidden_dim=192, intermediate_size=288)
    CompressedTensorsW4A8Int8MoEMethod(weight_args(group_size), TOKEN_INT8, moe)
    scale = ScaleDesc(scale_dtype, static=True, group_shape=GroupShape(*shape))
    assert asked == [(QuantKey(torch.int8, scale, symmetric=True), None)]


def test_method_without_experts_is_not_monolithic():
    from w4a8.moe.method import FusedMoEMethodBase

    assert not FusedMoEMethodBase(make_config()).is_monolithic


# ---- create_weights ----


@pytest.mark.parametrize("cls", METHODS)
@pytest.mark.parametrize("activation", ["silu", "silu_no_mul"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_create_weights(group_size, bias, activation, cls):
    moe = make_config(has_bias=bias, activation=activation)
    layer, loader = torch.nn.Module(), object()
    method = cls(weight_args(group_size), TOKEN_INT8, moe)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # as vLLM does while it loads a model
    try:
        method.create_weights(layer, 8, 128, 256, torch.float16, weight_loader=loader, extra=3)
    finally:
        torch.set_default_dtype(before)
    rows = 512 if activation == "silu" else 256
    groups = {128: 1, 256: 1} if group_size == -1 else {128: 128 // group_size, 256: 256 // group_size}
    scale_dtype = torch.float32 if group_size == -1 else torch.bfloat16
    expected = {
        "w13_weight": (torch.int8, (8, rows, 128)),
        "w2_weight": (torch.int8, (8, 128, 256)),
        "w13_weight_scale": (scale_dtype, (8, rows, groups[128])),
        "w2_weight_scale": (scale_dtype, (8, 128, groups[256])),
        "w13_weight_packed": (torch.uint8, (0,)),
        "w2_weight_packed": (torch.uint8, (0,)),
    }
    if bias:
        expected["w13_bias"] = (torch.float16, (8, rows))
        expected["w2_bias"] = (torch.float16, (8, 128))
    parameters = dict(layer.named_parameters())
    assert {name: (p.dtype, tuple(p.shape)) for name, p in parameters.items()} == expected
    for name, parameter in parameters.items():
        assert parameter.weight_loader is loader and parameter.extra == 3 and not parameter.requires_grad
        if name.endswith("scale"):
            assert parameter.quant_method == ("channel" if group_size == -1 else "group")
            assert (parameter == 1).all()
        else:
            assert not hasattr(parameter, "quant_method")
        if name.endswith("bias"):
            assert (parameter == 0).all()
    sizes = (layer.w13_in_features, layer.w13_out_features, layer.w2_in_features, layer.w2_out_features)
    assert sizes == (128, rows, 256, 128) and layer.group_size == group_size


@pytest.mark.parametrize(
    ("hidden", "intermediate", "message"),
    [
        (144, 256, "kernel does not support hidden size 144, which is not a multiple of the group size 32"),
        (128, 80, "kernel does not support intermediate size per partition 80, which is not a multiple of the group"),
    ],
)
def test_create_weights_refuses_cut_groups(hidden, intermediate, message):
    method = CompressedTensorsW4A8Int8MoEMethod(weight_args(32), TOKEN_INT8, make_config())
    with pytest.raises(ValueError, match=message):
        method.create_weights(torch.nn.Module(), 8, hidden, intermediate, torch.float32)


def test_set_weight_attrs_and_replace_parameter():
    layer = torch.nn.Module()
    parameter = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    set_weight_attrs(parameter, None)
    set_weight_attrs(parameter, {"weight_loader": "loader", "other": 1})
    with pytest.raises(ValueError, match="parameter attribute 'other' is already set and would be overwritten"):
        set_weight_attrs(parameter, {"other": 2})
    layer.register_parameter("weight", parameter)
    replace_parameter(layer, "weight", torch.nn.Parameter(torch.ones(3)))
    assert layer.weight.tolist() == [1, 1, 1] and layer.weight.weight_loader == "loader"
    assert not layer.weight.requires_grad and not hasattr(layer.weight, "other")
    replace_parameter(layer, "new", torch.ones(1, dtype=torch.uint8))
    assert dict(layer.named_parameters())["new"].dtype == torch.uint8


# ---- process_weights_after_loading ----


@pytest.mark.parametrize("cls", METHODS)
@pytest.mark.parametrize("bias", [False, True])
def test_raw_parameters_are_freed(bias, cls):
    moe = make_config(has_bias=bias)
    layer, w13, w2 = make_layer(moe, 32, method_cls=cls)
    assert torch.equal(layer.w13_weight_packed.data, moe_build.op_pack(w13, 32))
    assert torch.equal(layer.w2_weight_packed.data, moe_build.op_pack(w2, 32))
    empty = [name for name, parameter in layer.named_parameters() if parameter.numel() == 0]
    names = ["w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale"]
    assert sorted(empty) == sorted(names + (["w13_bias", "w2_bias"] if bias else []))
    assert all(parameter.weight_loader is layer.weight_loader for parameter in layer.parameters())


def test_kernel_and_quant_config():
    for group_size, block_shape in ((-1, [-1, 1]), (32, [1, 32])):
        layer, *_ = make_layer(make_config(), group_size)
        method = layer.quant_method
        assert method.is_monolithic and method.moe_kernel.is_monolithic
        assert method.moe_quant_config.block_shape == block_shape
        assert method.get_fused_moe_quant_config(layer) == method.moe_quant_config
        assert method.moe_quant_config.group_size == group_size


def test_old_method_has_no_kernel():
    layer, *_ = make_layer(make_config(), 32, method_cls=METHODS[1])
    assert layer.quant_method.moe_kernel is None
    assert layer.quant_method.get_fused_moe_quant_config(layer) is None


# ---- running: against the op by hand (same bits) ----


def check_layer(layer, w13, w2, x, logits, group_size):
    """The layer's bits are the op's. Routing: test_moe_routing.py."""
    moe = layer.moe_config
    routing = {
        "num_expert_group": layer.num_expert_group,
        "topk_group": layer.topk_group,
        "e_score_correction_bias": layer.e_score_correction_bias,
        "routed_scaling_factor": layer.routed_scaling_factor,
    }
    out = layer(x, logits)
    assert out.dtype == x.dtype and out.shape == x.shape
    weights, ids = route(moe.routing_method, x, logits, moe.experts_per_token, **routing)
    on_input = layer.apply_router_weight_on_input
    assert torch.equal(out, op_moe(moe, group_size, x, ids, weights, w13, w2, on_input))


def logits_for(tokens, experts):
    """Logits on a grid, a permutation per token: no ties and no near-ties."""
    grid = (torch.arange(experts) - experts / 2) / 4
    return torch.stack([grid[torch.randperm(experts)] for _ in range(tokens)])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("group_size", [*GROUP_SIZES, 96])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=ids_of)
def test_activations(activation, group_size, bias):
    sizes = {"hidden_dim": 192, "intermediate_size": 288} if group_size == 96 else {}
    moe = make_config(activation=activation, has_bias=bias, **sizes)
    layer, w13, w2 = make_layer(moe, group_size)
    check_layer(layer, w13, w2, torch.randn(9, moe.hidden_dim), logits_for(9, 8), group_size)


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype, group_size):
    moe = make_config(in_dtype=dtype, has_bias=True)
    layer, w13, w2 = make_layer(moe, group_size)
    check_layer(layer, w13, w2, torch.randn(9, 128).to(dtype), logits_for(9, 8), group_size)


@pytest.mark.parametrize("group_size", [-1, 64])
@pytest.mark.parametrize("method", sorted(ROUTING_METHODS), ids=ids_of)
def test_routing_methods(method, group_size):
    moe = make_config(routing_method=method)
    on_input = method is RoutingMethodType.Llama4
    layer, w13, w2 = make_layer(moe, group_size, apply_router_weight_on_input=on_input)
    check_layer(layer, w13, w2, torch.randn(9, 128), logits_for(9, 8), group_size)


@pytest.mark.parametrize("method", [RoutingMethodType.DeepSeekV3, RoutingMethodType.Default], ids=ids_of)
def test_grouped_routing(method):
    moe = make_config(routing_method=method, num_experts=16)
    # On a grid that no difference of two sigmoids of the logits' grid meets.
    bias = torch.tensor([0.0137 * ((5 * e) % 16) for e in range(16)]) if method.name == "DeepSeekV3" else None
    layer, w13, w2 = make_layer(
        moe, 32, num_expert_group=4, topk_group=2, e_score_correction_bias=bias, routed_scaling_factor=2.5
    )
    check_layer(layer, w13, w2, torch.randn(9, 128), logits_for(9, 16), 32)


def test_old_method_gives_the_same_bits():
    moe = make_config(routing_method=RoutingMethodType.Renormalize)
    w13, w2 = make_stacks(moe, 32)
    x, logits = torch.randn(9, 128), logits_for(9, 8)
    layers = [make_layer(moe, 32, w13, w2, method_cls=cls)[0] for cls in METHODS]
    assert torch.equal(layers[0](x, logits), layers[1](x, logits))


def test_old_method_errors():
    moe = make_config()
    layer, *_ = make_layer(moe, 32, method_cls=METHODS[1])
    x, logits = torch.randn(2, 128), torch.randn(2, 8)
    layer.enable_eplb = True
    with pytest.raises(NotImplementedError) as caught:
        layer(x, logits)
    assert str(caught.value) == "EPLB not supported for W4A8-int MoE yet."
    layer.enable_eplb = False
    layer.activation = 7
    with pytest.raises(ValueError) as caught:
        layer(x, logits)
    assert str(caught.value) == "Unknown activation '7'"


def test_activation_may_be_a_string():
    moe = make_config()
    layer, *_ = make_layer(moe, 32)
    x, logits = torch.randn(2, 128), torch.randn(2, 8)
    expected = layer(x, logits)
    layer.activation = "silu"
    assert torch.equal(layer(x, logits), expected)


def test_leading_dimensions_and_zero_tokens():
    layer, *_ = make_layer(make_config(), 32)
    x, logits = torch.randn(2, 3, 128), torch.randn(2, 3, 8)
    flat = layer(x.view(6, 128), logits.view(6, 8))
    assert torch.equal(layer(x, logits), flat.view(2, 3, 128))
    assert layer(x[:0], logits[:0]).shape == (0, 3, 128)


def test_a_token_with_nan_changes_no_other():
    layer, *_ = make_layer(make_config(), 32)
    x, logits = torch.randn(3, 128), torch.randn(3, 8)
    clean = layer(x, logits)
    x[1, 5] = float("nan")
    dirty = layer(x, logits)
    assert torch.isnan(dirty[1]).all() and torch.equal(dirty[[0, 2]], clean[[0, 2]])


# ---- interleaved w13 ----


@pytest.mark.parametrize("group_size", [-1, 32])
def test_interleaved_w13_is_the_same_layer(group_size):
    moe = make_config(activation=MoEActivation.SWIGLUOAI, has_bias=True)
    halves, w2 = make_stacks(moe, group_size)
    order = torch.arange(2 * moe.intermediate_size).view(2, -1).t().flatten()
    rows = moe_build.Stack(halves.values[:, order], halves.scales[:, order], halves.bias[:, order])
    layer, *_ = make_layer(moe, group_size, rows, w2, w13_interleaved=True)
    check_layer(layer, halves, w2, torch.randn(9, 128), logits_for(9, 8), group_size)


def test_interleaved_w13_needs_a_gate():
    moe = make_config(activation="relu2_no_mul")
    with pytest.raises(ValueError, match="w13_interleaved needs a gate, which activation 'relu2_no_mul' does not have"):
        make_layer(moe, 32, w13_interleaved=True)


# ---- modular ----


@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_modular_experts(dtype, on_input):
    """The router is outside; its weights may be put into the input, by `prepare`, and then are not applied again."""
    moe = make_config(routing_method=RoutingMethodType.Custom, experts_per_token=1 if on_input else 3, in_dtype=dtype)
    layer, w13, w2 = make_layer(moe, 32, apply_router_weight_on_input=on_input)
    assert not layer.quant_method.is_monolithic
    x = torch.randn(5, 128).to(dtype)
    k = moe.experts_per_token
    ids, weights = torch.rand(5, 8).argsort(1)[:, :k], torch.rand(5, k)
    for given in (ids, ids.to(torch.int32)):
        out = layer(x, topk_weights=weights, topk_ids=given)
        if on_input:
            weighted = x * weights.to(dtype)
            expected = op_moe(moe, 32, weighted, ids, torch.ones_like(weights), w13, w2)
        else:
            expected = op_moe(moe, 32, x, ids, weights, w13, w2)
        assert torch.equal(out, expected)


def test_modular_problem_size_and_workspaces():
    for activation, rows in (("silu", 512), ("silu_no_mul", 256)):
        moe = make_config(routing_method=RoutingMethodType.Custom, activation=activation)
        layer, *_ = make_layer(moe, 32)
        experts = layer.quant_method.moe_kernel.fused_experts
        packed = (layer.w13_weight_packed, layer.w2_weight_packed)
        assert experts.expects_unquantized_inputs
        size = experts.moe_problem_size(torch.zeros(5, 128), *packed, torch.zeros(5, 3))
        assert size == (8, 5, rows, 128, 3)
        assert experts.workspace_shapes(5, rows, 128, 3, 8, 8, None, moe.activation) == ((0,), (0,), (5, 128))


def test_modular_errors():
    moe = make_config(routing_method=RoutingMethodType.Custom)
    layer, *_ = make_layer(moe, 32, apply_router_weight_on_input=True)
    x, ids, weights = torch.randn(2, 128), torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 3)
    with pytest.raises(ValueError, match="only implemented for top-1, but each token has 3 experts"):
        layer(x, topk_weights=weights, topk_ids=ids)
    with pytest.raises(ValueError, match="this layer's router is outside: it needs topk_weights and topk_ids"):
        layer(x, torch.randn(2, 8))
    with pytest.raises(ValueError, match="shared experts are not run here"):
        layer.quant_method.apply(layer, x, weights, ids, torch.nn.Identity(), x)
    monolithic, *_ = make_layer(make_config(), 32)
    with pytest.raises(ValueError, match="this layer routes by itself: it needs router_logits"):
        monolithic(x, topk_weights=weights, topk_ids=ids)


# ---- expert parallelism and tensor parallelism, in one process ----


def test_determine_expert_map():
    assert determine_expert_map(1, 0, 8) == (8, None)
    maps = [determine_expert_map(3, rank, 8) for rank in range(3)]
    assert [count for count, _ in maps] == [3, 3, 2]
    assert [m.tolist() for _, m in maps] == [
        [0, 1, 2, -1, -1, -1, -1, -1],
        [-1, -1, -1, 0, 1, 2, -1, -1],
        [-1, -1, -1, -1, -1, -1, 0, 1],
    ]
    with pytest.raises(ValueError, match=r"ep_rank 2 is outside \[0, 2\)"):
        determine_expert_map(2, 2, 8)


def test_local_expert_ids():
    ids = torch.tensor([[0, 3], [-1, 2]], dtype=torch.int32)
    assert local_expert_ids(ids, None) is ids  # the operator takes both types
    expert_map = torch.tensor([0, -1, 1, -1], dtype=torch.int32)
    assert local_expert_ids(ids, expert_map).tolist() == [[0, -1], [-1, 1]]
    assert local_expert_ids(ids, expert_map).dtype == torch.int64


@pytest.mark.parametrize(("cls", "custom"), [(METHODS[0], False), (METHODS[0], True), (METHODS[1], False)])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_expert_parallel_ranks_add_up(ranks, cls, custom):
    """Each rank's bits are those of the op that skips the other experts; float64 sums differ from one process by
    the float32 additions only."""
    method = RoutingMethodType.Custom if custom else RoutingMethodType.Renormalize
    whole = make_config(has_bias=True, routing_method=method)
    w13, w2 = make_stacks(whole, 32)
    x, logits = torch.randn(9, 128), logits_for(9, 8)
    weights, ids = route(RoutingMethodType.Renormalize, x, logits, 3)

    def run(layer):
        return layer(x, topk_weights=weights, topk_ids=ids) if custom else layer(x, logits)

    one = run(make_layer(whole, 32, w13, w2, method_cls=cls)[0])
    total = torch.zeros(9, 128, dtype=torch.float64)
    for rank in range(ranks):
        local, expert_map = determine_expert_map(ranks, rank, 8)
        mine = (expert_map >= 0).nonzero().flatten()
        part13 = moe_build.Stack(w13.values[mine], w13.scales[mine], w13.bias[mine])
        part2 = moe_build.Stack(w2.values[mine], w2.scales[mine], w2.bias[mine])
        parallel = FusedMoEParallelConfig(ep_size=ranks, ep_rank=rank, use_ep=True)
        moe = make_config(has_bias=True, routing_method=method, moe_parallel_config=parallel, num_local_experts=local)
        layer, *_ = make_layer(moe, 32, part13, part2, method_cls=cls, expert_map=expert_map)
        out = run(layer)
        remote_skipped = torch.where(torch.isin(ids.long(), mine), ids, torch.full_like(ids, -1))
        assert torch.equal(out, op_moe(whole, 32, x, remote_skipped, weights, w13, w2))
        total += out.double()
    size = sum(op_moe(whole, 32, x, ids[:, j : j + 1], weights[:, j : j + 1], w13, w2).abs().double() for j in range(3))
    # Each side rounds once per slot, to less than the sum of absolute values.
    bound = 2 * 3 * reference.U * size * (1 + 8 * reference.U)
    assert_within(one.numpy(), total.numpy(), bound.numpy())


def test_remote_experts_need_a_map():
    moe = make_config(num_local_experts=4)
    with pytest.raises(ValueError, match="4 of 8 experts are local: an expert_map is needed"):
        RoutedExperts(moe, CompressedTensorsW4A8Int8MoEMethod(weight_args(32), TOKEN_INT8, moe))


def test_printing():
    layer, *_ = make_layer(make_config(), 32)
    text = "experts=8/8, top_k=3, hidden=128, intermediate=256, group_size=32, activation=silu"
    assert repr(layer) == f"RoutedExperts({text})"


@pytest.mark.skipif(not hasattr(torch, "compile"), reason="torch.compile needs torch 2")
@pytest.mark.parametrize("custom", [False, True])
def test_compiles_to_one_graph(custom):
    """Routing, expert map and op in one graph, for any number of tokens, with the same bits."""
    method = RoutingMethodType.Custom if custom else RoutingMethodType.DeepSeekV3
    local, expert_map = determine_expert_map(2, 0, 16)
    parallel = FusedMoEParallelConfig(ep_size=2, use_ep=True)
    moe = make_config(num_experts=16, num_local_experts=local, routing_method=method, moe_parallel_config=parallel)
    groups = {"num_expert_group": 4, "topk_group": 2, "e_score_correction_bias": torch.randn(16)}
    layer, *_ = make_layer(moe, 32, expert_map=expert_map, **({} if custom else groups))
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch.no_grad():
        for tokens in (1, 5, 7):
            x, logits = torch.randn(tokens, 128), torch.randn(tokens, 16)
            weights, ids = route(RoutingMethodType.Renormalize, x, logits, 3)
            args = (x, None, weights, ids) if custom else (x, logits)
            assert torch.equal(compiled(*args), layer(*args))
