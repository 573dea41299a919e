"""The oracle: the conversion of weights."""

import meter
import moe_build
import pytest
import torch
from moe_build import make_config, op_pack, random_stack

from w4a8.core.nibbles import from_int32, from_nibbles, to_nibbles
from w4a8.moe.oracle import w4a8_int8 as oracle


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
        def dyn_quant_pack_4bit_weight(weights, *rest, **kind):
            shapes.append(tuple(weights.shape))
            return real(weights, *rest, **kind)

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
