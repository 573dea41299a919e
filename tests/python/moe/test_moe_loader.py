"""The weight loader: where each tensor goes, on each rank, and what it refuses."""

import pytest
import torch
from common import least_scales
from moe_build import TOKEN_INT8, Stack, assert_packed, make_config, make_layer, make_stacks, weight_args

from w4a8.core.nibbles import to_nibbles
from w4a8.moe import CompressedTensorsW4A8Int8MoEMethod, FusedMoEParallelConfig, MoEWeightLoader, RoutedExperts


def empty_layer(moe, group_size, **layer_args):
    return RoutedExperts(
        moe, CompressedTensorsW4A8Int8MoEMethod(weight_args(group_size), TOKEN_INT8, moe), **layer_args
    )


def tensors_of(w13, w2, expert, gated=True):
    """The tensors a checkpoint has for an expert: (parameter suffix, tensor, shard)."""
    found = []
    for shard in ("w1", "w3", "w2") if gated else ("w1", "w2"):
        stack = w2 if shard == "w2" else w13
        half = stack.values.shape[1] // 2
        rows = {"w1": slice(0, half), "w3": slice(half, None)}.get(shard, slice(None)) if gated else slice(None)
        prefix = "w2" if shard == "w2" else "w13"
        found.append((f"{prefix}_weight", stack.values[expert, rows], shard))
        found.append((f"{prefix}_weight_scale", stack.scales[expert, rows], shard))
        if stack.bias is not None:
            found.append((f"{prefix}_bias", stack.bias[expert, rows], shard))
    return found


def load_all(layer, w13, w2, experts=8, gated=True):
    for expert in range(experts):
        for name, tensor, shard in tensors_of(w13, w2, expert, gated):
            parameter = getattr(layer, name)
            result = parameter.weight_loader(parameter, tensor, f"experts.{expert}.{name}", shard, expert)
            assert result is None


@pytest.mark.parametrize("group_size", [-1, 32])
@pytest.mark.parametrize("activation", ["silu", "relu2_no_mul"])
def test_one_rank(activation, group_size):
    moe = make_config(has_bias=True, activation=activation)
    w13, w2 = make_stacks(moe, group_size)
    layer = empty_layer(moe, group_size)
    load_all(layer, w13, w2, gated=moe.is_act_and_mul)
    assert torch.equal(layer.w13_weight.data, w13.values) and torch.equal(layer.w2_weight.data, w2.values)
    assert torch.equal(layer.w13_weight_scale.data, w13.scales) and torch.equal(layer.w2_weight_scale.data, w2.scales)
    assert torch.equal(layer.w13_bias.data, w13.bias) and torch.equal(layer.w2_bias.data, w2.bias)


@pytest.mark.parametrize("group_size", [-1, 32])
@pytest.mark.parametrize("activation", ["silu", "relu2_no_mul"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_tensor_parallel(ranks, activation, group_size):
    """Rows of w1 and w3, columns of w2; group scales of w2 with their columns, channel scales whole, its bias once."""
    whole = make_config(has_bias=True, activation=activation)
    w13, w2 = make_stacks(whole, group_size)
    inner = 256 // ranks
    for rank in range(ranks):
        parallel = FusedMoEParallelConfig(tp_size=ranks, tp_rank=rank)
        layer = empty_layer(make_config(has_bias=True, activation=activation, moe_parallel_config=parallel), group_size)
        load_all(layer, w13, w2, gated=whole.is_act_and_mul)
        mine = torch.arange(rank * inner, (rank + 1) * inner)
        rows = torch.cat([mine, 256 + mine]) if whole.is_act_and_mul else mine
        assert torch.equal(layer.w13_weight.data, w13.values[:, rows])
        assert torch.equal(layer.w13_weight_scale.data, w13.scales[:, rows])
        assert torch.equal(layer.w13_bias.data, w13.bias[:, rows])
        assert torch.equal(layer.w2_weight.data, w2.values[:, :, mine])
        groups = slice(None) if group_size == -1 else slice(rank * inner // 32, (rank + 1) * inner // 32)
        assert torch.equal(layer.w2_weight_scale.data, w2.scales[:, :, groups])
        assert torch.equal(layer.w2_bias.data, w2.bias if rank == 0 else torch.zeros_like(w2.bias))


def test_tensor_parallel_ranks_add_up():
    """The sum over ranks is the layer with each rank's slice quantized by itself; per rank the op's bits."""
    from moe_build import Stack, op_moe

    from w4a8.moe import route

    whole = make_config(has_bias=True)
    w13, w2 = make_stacks(whole, 32)
    x, logits = torch.randn(5, 128), torch.randn(5, 8)
    weights, ids = route(whole.routing_method, x, logits, 3)
    for rank in range(2):
        moe = make_config(has_bias=True, moe_parallel_config=FusedMoEParallelConfig(tp_size=2, tp_rank=rank))
        layer = empty_layer(moe, 32)
        load_all(layer, w13, w2)
        layer.process_weights_after_loading()
        mine = torch.arange(rank * 128, (rank + 1) * 128)
        rows = torch.cat([mine, 256 + mine])
        part13 = Stack(w13.values[:, rows], w13.scales[:, rows], w13.bias[:, rows])
        bias = w2.bias if rank == 0 else torch.zeros_like(w2.bias)
        part2 = Stack(w2.values[:, :, mine], w2.scales[:, :, rank * 4 : rank * 4 + 4], bias)
        assert torch.equal(layer(x, logits), op_moe(moe, 32, x, ids, weights, part13, part2))


def test_expert_parallel_skips_remote_experts():
    moe = make_config(num_local_experts=2)
    expert_map = torch.tensor([-1, -1, 1, 0, -1, -1, -1, -1], dtype=torch.int32)
    w13, w2 = make_stacks(make_config(), 32)
    layer = empty_layer(moe, 32, expert_map=expert_map)
    load_all(layer, w13, w2)
    assert torch.equal(layer.w13_weight.data, w13.values[[3, 2]])
    assert torch.equal(layer.w2_weight_scale.data, w2.scales[[3, 2]])
    loader, parameter = layer.weight_loader, layer.w2_weight
    assert loader(parameter, w2.values[0], "w", "w2", 0, return_success=True) is False
    assert loader(parameter, w2.values[2], "w", "w2", 2, return_success=True) is True


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_fused_w13(ranks, interleaved):
    """A fused w13 gives the same packed layer as w1 and w3, interleaved or not, on every rank."""
    w13, w2 = make_stacks(make_config(has_bias=True), 32)
    order = torch.arange(512).view(2, 256).t().flatten() if interleaved else torch.arange(512)
    for rank in range(ranks):
        moe = make_config(has_bias=True, moe_parallel_config=FusedMoEParallelConfig(tp_size=ranks, tp_rank=rank))
        apart, fused = empty_layer(moe, 32), empty_layer(moe, 32, w13_interleaved=interleaved)
        load_all(apart, w13, w2)
        for expert in range(8):
            for name, tensor in (
                ("w13_weight", w13.values[expert]),
                ("w13_weight_scale", w13.scales[expert]),
                ("w13_bias", w13.bias[expert]),
            ):
                fused.weight_loader(getattr(fused, name), tensor[order], name, "w13", expert)
            for name, tensor, shard in tensors_of(w13, w2, expert):
                if shard == "w2":
                    fused.weight_loader(getattr(fused, name), tensor, name, "w2", expert)
        apart.process_weights_after_loading()
        fused.process_weights_after_loading()
        assert torch.equal(apart.w13_weight_packed, fused.w13_weight_packed)
        assert torch.equal(apart.w2_weight_packed, fused.w2_weight_packed)


def test_packed_words():
    moe = make_config()
    w13, _ = make_stacks(moe, 32)
    layer = empty_layer(moe, 32)
    words = to_nibbles(w13.values[2, :256]).view(torch.int32)  # little-endian words of eight nibbles
    layer.weight_loader(layer.w13_weight, words, "w", "w1", 2)
    assert torch.equal(layer.w13_weight[2, :256], w13.values[2, :256])


def test_scales_are_converted():
    moe = make_config()
    layer = empty_layer(moe, -1)
    scale = torch.rand(256, 1).to(torch.bfloat16)
    layer.weight_loader(layer.w13_weight_scale, scale, "s", "w3", 0)
    assert torch.equal(layer.w13_weight_scale[0, 256:], scale.float())


BAD = [
    (
        "w13_weight",
        torch.zeros(256, 128, dtype=torch.int8),
        "w4",
        "shard_id must be ['w1','w2','w3','w13'] but got w4.",
    ),
    (
        "w13_weight",
        torch.zeros(255, 128, dtype=torch.int8),
        "w1",
        "key: dimension 0 is 255, but 1 tensor-parallel rank of 256 make 256",
    ),
    ("w13_weight", torch.zeros(256, 64, dtype=torch.int8), "w1", "key: shape (256, 64), but (256, 128) is expected"),
    ("w13_weight", torch.zeros(128, dtype=torch.int8), "w1", "key: shape (128,), but 2 dimensions are expected"),
    ("w13_weight", torch.zeros(256, 128), "w1", "key: dtype torch.float32, but int8 or packed int32 is expected"),
    (
        "w13_weight",
        torch.zeros(256, 15, dtype=torch.int32),
        "w1",
        "key: shape (256, 15), but 128 columns make 16 words",
    ),
    (
        "w2_weight",
        torch.zeros(128, 128, dtype=torch.int8),
        "w2",
        "key: dimension 1 is 128, but 1 tensor-parallel rank of 256 make 256",
    ),
    ("w2_weight", torch.zeros(64, 256, dtype=torch.int8), "w2", "key: shape (64, 256), but (128, 256) is expected"),
    ("w13_weight_scale", torch.zeros(256, 4, dtype=torch.int8), "w1", "key: dtype torch.int8, but a float is expected"),
    ("w13_weight_scale", torch.zeros(256, 1), "w3", "key: shape (256, 1), but (256, 4) is expected"),
    ("w2_bias", torch.zeros(64), "w2", "key: shape (64,), but (128,) is expected"),
    ("w13_bias", torch.zeros(64), "w1", "key: dimension 0 is 64, but 1 tensor-parallel rank of 256 make 256"),
]


@pytest.mark.parametrize(("name", "tensor", "shard", "message"), BAD)
def test_errors(name, tensor, shard, message):
    layer = empty_layer(make_config(has_bias=True), 32)
    parameter = getattr(layer, name)
    before = parameter.clone()
    with pytest.raises(ValueError) as caught:
        layer.weight_loader(parameter, tensor, "key", shard, 0)
    assert str(caught.value) == message
    assert torch.equal(parameter, before)


def test_ungated_layers_have_no_w3():
    layer = empty_layer(make_config(activation="silu_no_mul"), 32)
    with pytest.raises(ValueError, match="key: a layer without a gate has w1 and w2, but no w3"):
        layer.weight_loader(layer.w13_weight, torch.zeros(256, 128, dtype=torch.int8), "key", "w3", 0)


def test_loader_alone():
    """Without a layer, as another framework's parameter attribute."""
    loader = MoEWeightLoader(tp_rank=1, tp_size=2)
    parameter = torch.nn.Parameter(torch.zeros(1, 4, 8, dtype=torch.int8), requires_grad=False)
    loader(parameter, torch.arange(32, dtype=torch.int8).view(4, 8), "w", "w3", 0)
    assert parameter[0, 2:].flatten().tolist() == list(range(16, 32)) and not parameter[0, :2].any()


def test_loaded_layer_runs_like_a_filled_one():
    moe = make_config(has_bias=True)
    filled, w13, w2 = make_layer(moe, 32)
    loaded = empty_layer(moe, 32)
    load_all(loaded, w13, w2)
    loaded.process_weights_after_loading()
    x, logits = torch.randn(5, 128), torch.randn(5, 8)
    assert torch.equal(loaded(x, logits), filled(x, logits))


@pytest.mark.parametrize("group_size", [-1, 32])
@pytest.mark.parametrize("ranks", [1, 2])
def test_separate_gate_and_up_in_an_interleaved_layer(ranks, group_size):
    """Only a fused w13 alternates: w1 and w3 are gate and up, and both ways may meet in one layer."""
    w13, w2 = make_stacks(make_config(has_bias=True), group_size)
    order = torch.arange(512).view(2, 256).t().flatten()
    for rank in range(ranks):
        moe = make_config(has_bias=True, moe_parallel_config=FusedMoEParallelConfig(tp_size=ranks, tp_rank=rank))
        plain, marked = empty_layer(moe, group_size), empty_layer(moe, group_size, w13_interleaved=True)
        load_all(plain, w13, w2)
        load_all(marked, w13, w2)
        for name, tensor in (
            ("w13_weight", w13.values[3]),
            ("w13_weight_scale", w13.scales[3]),
            ("w13_bias", w13.bias[3]),
        ):
            marked.weight_loader(getattr(marked, name), tensor[order], name, "w13", 3)
        plain.process_weights_after_loading()
        marked.process_weights_after_loading()
        assert torch.equal(marked.w13_weight_packed, plain.w13_weight_packed)
        assert torch.equal(marked.w2_weight_packed, plain.w2_weight_packed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_scales_that_bfloat16_would_round_are_kept(dtype):
    """One stack in a type that holds one tensor more; the other stays bfloat16."""
    moe = make_config()
    w13, w2 = make_stacks(moe, 32)
    layer = empty_layer(moe, 32)
    load_all(layer, w13, w2)
    finer = (w2.scales[5].float() * 1.01).to(dtype)
    layer.weight_loader(layer.w2_weight_scale, finer, "s", "w2", 5)
    layer.process_weights_after_loading()
    scales = w2.scales.float()
    scales[5] = finer.float()
    assert_packed(layer, w13, Stack(w2.values, least_scales(scales), None))
