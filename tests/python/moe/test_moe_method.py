"""The method and the experts: parameters, and layers against the op called by hand."""

import moe_build
import pytest
import reference
import torch
from common import DTYPES, assert_within
from moe_build import (
    ACTIVATIONS,
    GROUP_SIZES,
    TOKEN_INT8,
    assert_raises,
    interleaved,
    logits_for,
    make_config,
    make_layer,
    make_stacks,
    op_moe,
    op_pack,
    weight_args,
)

from w4a8.core.routing import ROUTING_METHODS
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

METHODS = [CompressedTensorsW4A8Int8MoEMethod, method_v0_17.CompressedTensorsW4A8Int8MoEMethod]
both_methods = pytest.mark.parametrize("cls", METHODS, ids=["v0_24", "v0_17"])


def ids_of(value):
    return getattr(value, "name", getattr(value, "value", None)) or str(value)


# ---- construction ----


@both_methods
def test_constructor(cls):
    moe, grouped = make_config(has_bias=True), weight_args(64)
    method = cls(grouped, TOKEN_INT8, moe, "model.layers.0.mlp.experts")
    assert method.moe is moe and method.weight_quant is grouped and method.input_quant is TOKEN_INT8
    assert (method.group_size, method.has_bias, method.static_input_scales) == (64, True, False)
    assert method.is_monolithic and method.moe_kernel is None and method.moe_quant_config is None
    assert method.layer_name == "model.layers.0.mlp.experts"
    assert cls(weight_args(None), TOKEN_INT8, moe).group_size == -1
    assert not method_module.FusedMoEMethodBase(moe).is_monolithic  # of no experts
    static = moe_build.QuantizationArgs(strategy=QuantizationStrategy.TOKEN, dynamic=False)
    tensor = moe_build.QuantizationArgs(strategy=QuantizationStrategy.TENSOR, dynamic=True)
    for weights, inputs, kind, message in (
        (grouped, static, ValueError, "W4A8-int MoE needs dynamic per-token activation quantization."),
        (grouped, tensor, ValueError, "W4A8-int MoE needs dynamic per-token activation quantization."),
        (weight_args(32, num_bits=8), TOKEN_INT8, ValueError, "This method only supports 4-bit weights (num_bits=4)."),
        (
            weight_args(32, symmetric=False),
            TOKEN_INT8,
            NotImplementedError,
            "No W4A8 Int8 MoE backend supports the deployment configuration.",
        ),
    ):
        assert_raises(kind, message, cls, weights, inputs, moe)


@pytest.mark.parametrize(
    ("group_size", "shape", "scale_dtype"),
    [(None, (-1, 1), torch.float32), (32, (1, 32), torch.bfloat16), (96, (1, 96), torch.bfloat16)],
)
def test_weight_key(group_size, shape, scale_dtype, monkeypatch):
    """The key that the oracle is asked with."""
    asked = []
    monkeypatch.setattr(
        method_module,
        "select_w4a8_int8_moe_backend",
        lambda *args, **named: asked.append((args, named)) or (None, None),
    )
    moe = make_config(hidden_dim=192, intermediate_size=288)
    CompressedTensorsW4A8Int8MoEMethod(weight_args(group_size), TOKEN_INT8, moe)
    scale = ScaleDesc(scale_dtype, static=True, group_shape=GroupShape(*shape))
    assert asked == [((moe, QuantKey(torch.int8, scale, symmetric=True)), {"activation_key": None})]


# ---- create_weights ----


@both_methods
@pytest.mark.parametrize("activation", ["silu", "silu_no_mul"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_create_weights(group_size, bias, activation, cls):
    moe = make_config(has_bias=bias, activation=activation)
    layer, loader = torch.nn.Module(), object()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # as vLLM does while it loads a model
    try:
        method = cls(weight_args(group_size), TOKEN_INT8, moe)
        method.create_weights(layer, 8, 128, 256, torch.float16, weight_loader=loader, extra=3)
    finally:
        torch.set_default_dtype(before)
    rows = 512 if activation == "silu" else 256
    groups = (1, 1) if group_size == -1 else (128 // group_size, 256 // group_size)
    scale_dtype = torch.float32 if group_size == -1 else torch.bfloat16
    expected = {
        "w13_weight": (torch.int8, (8, rows, 128)),
        "w2_weight": (torch.int8, (8, 128, 256)),
        "w13_weight_scale": (scale_dtype, (8, rows, groups[0])),
        "w2_weight_scale": (scale_dtype, (8, 128, groups[1])),
        "w13_weight_packed": (torch.uint8, (0,)),
        "w2_weight_packed": (torch.uint8, (0,)),
    }
    if bias:
        expected.update(w13_bias=(torch.float16, (8, rows)), w2_bias=(torch.float16, (8, 128)))
    parameters = dict(layer.named_parameters())
    assert {name: (p.dtype, tuple(p.shape)) for name, p in parameters.items()} == expected
    for name, parameter in parameters.items():
        assert parameter.weight_loader is loader and parameter.extra == 3 and not parameter.requires_grad
        kind = ("channel" if group_size == -1 else "group") if name.endswith("scale") else None
        assert getattr(parameter, "quant_method", None) == kind
        assert not name.endswith("scale") or (parameter == 1).all()
        assert not name.endswith("bias") or (parameter == 0).all()
    sizes = (layer.w13_in_features, layer.w13_out_features, layer.w2_in_features, layer.w2_out_features)
    assert sizes == (128, rows, 256, 128) and layer.group_size == group_size


@pytest.mark.parametrize(
    ("hidden", "intermediate", "message"),
    [
        (144, 256, "kernel does not support hidden size 144: group .block_size. is 32, expected k = 144 "),
        (
            128,
            80,
            "kernel does not support intermediate size per partition 80: group .block_size. is 32, expected k = 80",
        ),
    ],
)
def test_create_weights_refuses_cut_groups(hidden, intermediate, message):
    method = CompressedTensorsW4A8Int8MoEMethod(weight_args(32), TOKEN_INT8, make_config())
    with pytest.raises(ValueError, match=message):
        method.create_weights(torch.nn.Module(), 8, hidden, intermediate, torch.float32)


# ---- process_weights_after_loading ----


@both_methods
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("group_size", "block_shape"), [(-1, [-1, 1]), (32, [1, 32])])
def test_process_weights_after_loading(group_size, block_shape, bias, cls):
    """Packs, frees the raw parameters and, of vLLM 0.24, makes the kernel."""
    layer, w13, w2 = make_layer(make_config(has_bias=bias), group_size, method_cls=cls)
    assert torch.equal(layer.w13_weight_packed.data, op_pack(w13, group_size))
    assert torch.equal(layer.w2_weight_packed.data, op_pack(w2, group_size))
    empty = {name for name, parameter in layer.named_parameters() if parameter.numel() == 0}
    names = {"w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale"}
    assert empty == names | ({"w13_bias", "w2_bias"} if bias else set())
    assert all(parameter.weight_loader is layer.weight_loader for parameter in layer.parameters())
    method = layer.quant_method
    config = method.get_fused_moe_quant_config(layer)
    assert method.is_monolithic and config == method.moe_quant_config
    if cls is METHODS[0]:
        assert method.moe_kernel.is_monolithic
        assert (config.block_shape, config.group_size) == (block_shape, group_size)
    else:
        assert config is None and method.moe_kernel is None


# ---- running: against the op by hand (same bits) ----


def check_layer(moe, group_size, w13=None, w2=None, as_loaded=lambda w13: w13, **layer_args):
    """The layer's bits are the op's. Routing: test_moe_routing.py."""
    if w13 is None:
        w13, w2 = make_stacks(moe, group_size)
    layer, *_ = make_layer(moe, group_size, as_loaded(w13), w2, **layer_args)
    x, logits = torch.randn(9, moe.hidden_dim).to(moe.in_dtype), logits_for(9, moe.num_experts)
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


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("group_size", [*GROUP_SIZES, 96])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=ids_of)
def test_activations(activation, group_size, bias):
    sizes = {"hidden_dim": 192, "intermediate_size": 288} if group_size == 96 else {}
    check_layer(make_config(activation=activation, has_bias=bias, **sizes), group_size)


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype, group_size):
    check_layer(make_config(in_dtype=dtype, has_bias=True), group_size)


@pytest.mark.parametrize("group_size", [-1, 64])
@pytest.mark.parametrize("method", sorted(ROUTING_METHODS), ids=ids_of)
def test_routing_methods(method, group_size):
    moe = make_config(routing_method=method)
    check_layer(moe, group_size, apply_router_weight_on_input=method is RoutingMethodType.Llama4)


@pytest.mark.parametrize(
    ("cls", "method"), [(METHODS[0], "DeepSeekV3"), (METHODS[0], "Default"), (METHODS[1], "Default")]
)
def test_grouped_routing(cls, method):
    moe = make_config(routing_method=RoutingMethodType[method], num_experts=16)
    # On a grid that no difference of two sigmoids of the logits' grid meets.
    bias = torch.tensor([0.0137 * ((5 * e) % 16) for e in range(16)]) if method == "DeepSeekV3" else None
    groups = {"num_expert_group": 4, "topk_group": 2, "e_score_correction_bias": bias, "routed_scaling_factor": 2.5}
    check_layer(moe, 32, method_cls=cls, **groups)


@both_methods
def test_any_shape_and_string(cls):
    """Leading dimensions, no tokens, activations by name; a token with NaN changes no other."""
    layer, *_ = make_layer(make_config(), 32, method_cls=cls)
    x, logits = torch.randn(2, 3, 128), torch.randn(2, 3, 8)
    flat = layer(x.view(6, 128), logits.view(6, 8))
    assert torch.equal(layer(x, logits), flat.view(2, 3, 128))
    assert layer(x[:0], logits[:0]).shape == (0, 3, 128)
    layer.activation = "silu"
    assert torch.equal(layer(x, logits), flat.view(2, 3, 128))
    x[0, 1, 5] = float("nan")
    dirty = layer(x, logits).view(6, 128)
    assert torch.isnan(dirty[1]).all() and torch.equal(dirty[[0, 2, 3, 4, 5]], flat[[0, 2, 3, 4, 5]])


def test_old_method():
    moe = make_config(routing_method=RoutingMethodType.Renormalize)
    w13, w2 = make_stacks(moe, 32)
    x, logits = torch.randn(9, 128), logits_for(9, 8)
    layers = [make_layer(moe, 32, w13, w2, method_cls=cls)[0] for cls in METHODS]
    assert torch.equal(layers[0](x, logits), layers[1](x, logits))
    for name, value, kind, message in (
        ("activation", 7, ValueError, "Unknown activation '7'"),
        ("enable_eplb", True, NotImplementedError, "EPLB not supported for W4A8-int MoE yet."),
    ):
        setattr(layers[1], name, value)
        assert_raises(kind, message, layers[1], x, logits)


@pytest.mark.parametrize("group_size", [-1, 32])
def test_interleaved_w13_is_the_same_layer(group_size):
    moe = make_config(activation=MoEActivation.SWIGLUOAI, has_bias=True)
    check_layer(moe, group_size, as_loaded=interleaved, w13_interleaved=True)
    with pytest.raises(ValueError, match="w13_interleaved needs a gate, which activation 'relu2_no_mul' does not have"):
        make_layer(make_config(activation="relu2_no_mul"), 32, w13_interleaved=True)


# ---- modular ----


@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_modular_experts(dtype, on_input):
    """The router is outside; its weights may be put into the input, and then are not applied again."""
    moe = make_config(routing_method=RoutingMethodType.Custom, experts_per_token=1 if on_input else 3, in_dtype=dtype)
    layer, w13, w2 = make_layer(moe, 32, apply_router_weight_on_input=on_input)
    assert not layer.quant_method.is_monolithic
    assert layer.quant_method.moe_kernel.fused_experts.expects_unquantized_inputs
    x = torch.randn(5, 128).to(dtype)
    k = moe.experts_per_token
    ids, weights = torch.rand(5, 8).argsort(1)[:, :k], torch.rand(5, k)
    given = (x * weights.to(dtype), ids, torch.ones_like(weights)) if on_input else (x, ids, weights)
    expected = op_moe(moe, 32, *given, w13, w2)
    for some_ids in (ids, ids.to(torch.int32)):
        assert torch.equal(layer(x, topk_weights=weights, topk_ids=some_ids), expected)


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


# ---- expert parallelism, in one process ----


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
        parts = [stack.experts(mine) for stack in (w13, w2)]
        parallel = FusedMoEParallelConfig(ep_size=ranks, ep_rank=rank, use_ep=True)
        moe = make_config(has_bias=True, routing_method=method, moe_parallel_config=parallel, num_local_experts=local)
        out = run(make_layer(moe, 32, *parts, method_cls=cls, expert_map=expert_map)[0])
        remote_skipped = torch.where(torch.isin(ids.long(), mine), ids, torch.full_like(ids, -1))
        assert torch.equal(out, op_moe(whole, 32, x, remote_skipped, weights, w13, w2))
        total += out.double()
    size = sum(op_moe(whole, 32, x, ids[:, j : j + 1], weights[:, j : j + 1], w13, w2).abs().double() for j in range(3))
    # Each side rounds once per slot, to less than the sum of absolute values.
    bound = 2 * 3 * reference.U * size * (1 + 8 * reference.U)
    assert_within(one.numpy(), total.numpy(), bound.numpy())


def test_printing_and_a_missing_map():
    text = "experts=8/8, top_k=3, hidden=128, intermediate=256, group_size=32, activation=silu"
    assert repr(make_layer(make_config(), 32)[0]) == f"RoutedExperts({text})"
    moe = make_config(num_local_experts=4)
    with pytest.raises(ValueError, match="4 of 8 experts are local: an expert_map is needed"):
        RoutedExperts(moe, CompressedTensorsW4A8Int8MoEMethod(weight_args(32), TOKEN_INT8, moe))


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
