"""Random layers for the tests."""

from dataclasses import dataclass

import pytest
import torch

from w4a8.moe import (
    CompressedTensorsW4A8Int8MoEMethod,
    FusedMoEConfig,
    MoEActivation,
    QuantizationArgs,
    QuantizationStrategy,
    RoutedExperts,
)

TOKEN_INT8 = QuantizationArgs(num_bits=8, strategy=QuantizationStrategy.TOKEN, dynamic=True)


def assert_raises(kind, message, function, *args, **named):
    """The whole message."""
    with pytest.raises(kind) as caught:
        function(*args, **named)
    assert str(caught.value) == message


def weight_args(group_size, **changes):
    """QuantizationArgs of int4 weights; group size None or -1 is channelwise."""
    channel = group_size in (None, -1)
    strategy = QuantizationStrategy.CHANNEL if channel else QuantizationStrategy.GROUP
    args = {"num_bits": 4, "strategy": strategy, "group_size": None if channel else group_size}
    return QuantizationArgs(**{**args, **changes})


@dataclass
class Stack:
    """Experts of one matrix: values int8 [E, N, K], scales [E, N, G], bias [E, N] or None."""

    values: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None

    def of(self, expert):
        return self.values[expert], self.scales[expert], None if self.bias is None else self.bias[expert]

    def experts(self, which):
        return Stack(*self.of(which))

    def rows(self, order):
        return Stack(self.values[:, order], self.scales[:, order], None if self.bias is None else self.bias[:, order])


def random_stack(experts, rows, columns, group_size, bias=False, dtype=torch.bfloat16):
    """Values over the whole range, -8 included; scales that keep outputs near 1."""
    groups = 1 if group_size == -1 else columns // group_size
    scale_dtype = torch.float32 if group_size == -1 else torch.bfloat16
    values = torch.randint(-8, 8, (experts, rows, columns), dtype=torch.int8)
    scales = (torch.rand(experts, rows, groups) + 0.5) * 0.3 / columns**0.5
    return Stack(values, scales.to(scale_dtype), torch.randn(experts, rows).to(dtype) * 0.3 if bias else None)


def interleaved(stack):
    """The same experts with rows g0 u0 g1 u1 ... instead of g0 g1 ... u0 u1 ..."""
    return stack.rows(torch.arange(stack.values.shape[1]).view(2, -1).t().flatten())


def part_of_rank(w13, w2, rank, ranks):
    """What a tensor-parallel rank has: rows of w1 and w3; columns of w2 and of its groups; the bias of w2 once."""
    inner = w2.values.shape[2]
    mine = torch.arange(inner).chunk(ranks)[rank]
    rows = mine if w13.values.shape[1] == inner else torch.cat([mine, inner + mine])
    scales = w2.scales if w2.scales.shape[2] == 1 else w2.scales.chunk(ranks, 2)[rank]
    bias = w2.bias if rank == 0 or w2.bias is None else torch.zeros_like(w2.bias)
    return w13.rows(rows), Stack(w2.values[:, :, mine], scales, bias)


def op_pack(stack, group_size, **options):
    """The pack op called by hand, one expert at a time: uint8 [E, bytes]."""
    packed = []
    for expert in range(len(stack.values)):
        values, scales, bias = stack.of(expert)
        unsigned = (values.to(torch.int16) + 8).to(torch.uint8)
        nibbles = unsigned[:, ::2] | (unsigned[:, 1::2] << 4)
        rows, columns = values.shape
        block = columns if group_size == -1 else group_size
        bias = None if bias is None else bias.float()
        pack = torch.ops.w4a8.dyn_quant_pack_4bit_weight
        packed.append(pack(nibbles, scales, bias, block, columns, rows, **options))
    return torch.stack(packed)


def make_config(**changes):
    """A small layer."""
    config = {
        "num_experts": 8,
        "experts_per_token": 3,
        "hidden_dim": 128,
        "intermediate_size": 256,
        "in_dtype": torch.float32,
        **changes,
    }
    config.setdefault("num_local_experts", config["num_experts"])
    return FusedMoEConfig(**config)


def make_stacks(moe, group_size):
    """Random w13 and w2 of this rank's part of a layer."""
    inner, experts = moe.intermediate_size_per_partition, moe.num_local_experts
    rows = 2 * inner if moe.is_act_and_mul else inner
    w13 = random_stack(experts, rows, moe.hidden_dim, group_size, moe.has_bias, moe.in_dtype)
    return w13, random_stack(experts, moe.hidden_dim, inner, group_size, moe.has_bias, moe.in_dtype)


def fill(layer, w13, w2):
    """Puts stacks into the parameters without the weight loader."""
    for name, stack in (("w13", w13), ("w2", w2)):
        getattr(layer, f"{name}_weight").data.copy_(stack.values)
        getattr(layer, f"{name}_weight_scale").data.copy_(stack.scales)
        if stack.bias is not None:
            getattr(layer, f"{name}_bias").data.copy_(stack.bias)


def make_layer(moe, group_size, w13=None, w2=None, method_cls=CompressedTensorsW4A8Int8MoEMethod, **layer_args):
    """A layer ready to run: (layer, w13 stack, w2 stack)."""
    if w13 is None:
        w13, w2 = make_stacks(moe, group_size)
    layer = RoutedExperts(moe, method_cls(weight_args(group_size), TOKEN_INT8, moe), **layer_args)
    fill(layer, w13, w2)
    layer.process_weights_after_loading()
    return layer, w13, w2


def logits_for(tokens, experts=8):
    """Logits on a grid, a permutation per token: no ties and no near-ties."""
    grid = (torch.arange(experts) - experts / 2) / 4
    return torch.stack([grid[torch.randperm(experts)] for _ in range(tokens)])


def kernel_kind(activation):
    """activation_kind of the op, by docs/numerics.md section 5 (not by the package's own table)."""
    kinds = {"silu": 2, "swigluoai": 3, "swigluoai_uninterleave": 3, "swiglustep": 4}
    kinds.update({"gelu": 5, "gelu_tanh": 6, "relu2": 7})
    return kinds[activation.value.replace("_no_mul", "")]


def op_moe(moe, group_size, x, ids, weights, w13, w2, weight_on_input=False):
    """The fused op called by hand with stacks. What it computes is in test_moe.py."""
    inner = moe.intermediate_size_per_partition
    return torch.ops.w4a8.dynamic_4bit_int_moe(
        x,
        ids,
        weights,
        op_pack(w13, group_size),
        op_pack(w2, group_size),
        moe.hidden_dim,
        inner,
        2 * inner if moe.is_act_and_mul else inner,
        group_size,
        weight_on_input,
        kernel_kind(moe.activation),
    )


ACTIVATIONS = list(MoEActivation)
GROUP_SIZES = [-1, 32, 64, 128]


def assert_packed(layer, w13, w2, **options):
    for packed, stack in zip((layer.w13_weight_packed, layer.w2_weight_packed), (w13, w2)):
        assert torch.equal(packed, op_pack(stack, 32, **options))
