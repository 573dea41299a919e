"""What decoders with layers of linear attention refuse: each error names the operator, the argument and its value."""

import pytest
import torch
from common import assert_same_bits
from test_decoder import EPS, HIDDEN, INNER
from test_decoder_linear import RANK, SLOTS, Linear, Model, pack

from w4a8.decoder import Decoder


@pytest.mark.parametrize(
    ("product", "factors", "message"),
    [
        ("head", torch.ones(HIDDEN), "product is 'head', expected 'qkv', 'out', 'projections', 'linear_out'"),
        ("out", torch.ones(HIDDEN), "the last layer of decoder has no out, expected one with the product"),
        ("down", torch.ones(HIDDEN + 1), r"factors has shape \[97\], expected \[96\]"),
        ("down", torch.ones(HIDDEN).int(), "factors has dtype Int"),
    ],
)
def test_factors_refuse(product, factors, message):
    decoder = Decoder(torch.ones(HIDDEN), None, hidden_size=HIDDEN, eps=EPS)
    with pytest.raises(RuntimeError, match="w4a8::decoder_set_factors: decoder has no layer yet, expected"):
        decoder.set_factors(product, factors)
    decoder.add_layer(gate_up=[pack(2 * INNER, HIDDEN)], down=pack(HIDDEN, INNER))
    with pytest.raises(RuntimeError, match=f"w4a8::decoder_set_factors: {message}"):
        decoder.set_factors(product, factors)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "mamba"}, "kind is 'mamba', expected 'gated_delta', 'state_space' or 'short_conv'"),
        ({"key_heads": 4}, "key_heads is 4, expected a divisor of value_heads, 6"),
        ({"value_heads": 0}, r"value_heads is 0, expected 1\.\."),
        ({"key_size": 24}, r"key_size is 24, expected a multiple of 16 in 16\.\.256"),
        ({"value_size": 2**62}, "value_size is 4611686018427387904, expected a multiple of 16"),
        ({"key_size": 32}, "conv_weight has 256 channels, expected 320"),
        ({"a": None}, r"a is not given, expected floats \[6\]"),
        ({"a": torch.ones(5)}, r"a has shape \[5\], expected \[6\]"),
        ({"dt_bias": torch.ones(6).int()}, "dt_bias has dtype Int"),
        ({"norm": torch.ones(33)}, r"norm has shape \[33\], expected \[32\]"),
        ({"norm_eps": 0.0}, "norm_eps is 0, expected a positive"),
        ({"gate": "tanh"}, "gate is 'tanh', expected 'silu' or 'sigmoid'"),
        ({"beta_scale": -1.0}, "beta_scale is -1, expected a positive number of float32"),
        ({"kind": "short_conv", "beta_scale": 2.0}, "beta_scale is 2, expected 1 for short_conv"),
        ({"projections": [pack(40, HIDDEN), pack(408, HIDDEN)]}, "projections has tensors whose first 1 have 40 out"),
        ({"projections": [pack(64, HIDDEN)] * 7}, r"projections has 7 tensors, expected 1\.\.6"),
        ({"conv_weight": torch.ones(256, 9)}, r"conv_weight has shape \[256, 9\], expected"),
        ({"conv_weight": torch.ones(256)}, r"conv_weight has shape \[256\], expected"),
        ({"conv_bias": torch.ones(255)}, r"conv_bias has shape \[255\], expected \[256\]"),
        ({"gates": torch.zeros(12, 95)}, r"gates has shape \[12, 95\], expected \[12, 96\]"),
        ({"gates": None}, "projections has 448 out_features, expected 460"),
        ({"projections": [pack(240, HIDDEN), pack(208, HIDDEN)]}, "projections has tensors whose first 1 have 240"),
        ({"out": pack(HIDDEN, 176)}, "out has in_features 176, expected 192"),
        ({"z_up": pack(176, RANK)}, "z_up has 176 out_features, expected 192"),
        ({"z_up": pack(192, RANK)}, "projections has 448 out_features, expected 304"),
        ({"z_up": torch.ones(192, 24)}, r"z_up has shape \[192, 24\], expected \[192, 16\]"),
        ({"z_up": torch.ones(16, RANK)}, r"z_up has shape \[16, 48\], expected \[192, 48\]"),
        ({"decay_up": torch.ones(96, RANK).int()}, "decay_up has dtype Int, expected float32, bfloat16 or float16"),
        ({"decay_up": pack(192, RANK)}, "decay_up has 192 out_features, expected 96"),
        ({"decay_up": pack(96, RANK)}, r"dt_bias has shape \[6\], expected \[6, 16\]"),
        ({"decay_up": pack(96, RANK), "dt_bias": None}, r"dt_bias is not given, expected floats \[6, 16\]"),
        (
            {"decay_up": pack(96, RANK), "dt_bias": torch.ones(6, 16)},  # a row of low rank and b
            r"gates has shape \[12, 96\], expected \[54, 96\]",
        ),
        (
            {"decay_up": pack(96, RANK), "dt_bias": torch.ones(6, 16), "gates": torch.zeros(6, HIDDEN)},
            "projections has 448 out_features, expected 496",
        ),
        ({"interleaved": True, "z_up": pack(192, RANK)}, "z_up or decay_up is given, expected neither for gated_delta"),
        ({"kind": "short_conv", "decay_up": pack(96, RANK)}, "z_up or decay_up is given, expected neither for short_"),
    ],
)
def test_layers_refuse(change, message):
    linear = Linear("gated_delta", gates=torch.float32)
    decoder = Decoder(torch.ones(HIDDEN), None, hidden_size=HIDDEN, eps=EPS)
    decoder.add_layer()
    given = {"projections": linear.projections, "gates": linear.gates, "out": linear.out, "kind": "gated_delta"}
    given |= {"conv_weight": linear.conv_weight} | linear.fields
    with pytest.raises(RuntimeError, match=f"w4a8::decoder_add_linear_attention: {message}"):
        decoder.add_linear_attention(**given | change)
    decoder.add_linear_attention(**given)
    with pytest.raises(RuntimeError, match="the last layer of decoder has linear attention, expected one without"):
        decoder.add_linear_attention(**given)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm_groups": 4}, "norm_groups is 4, expected a divisor of value_heads, 6, or 0"),
        ({"norm_groups": -1}, "norm_groups is -1, expected a divisor of value_heads, 6, or 0"),
        ({"norm_groups": 0, "norm": None}, "norm_groups is 0, expected a norm with it, and norm_first false"),
        ({"norm_groups": 0, "norm_first": True}, "norm_groups is 0, expected a norm with it, and norm_first false"),
    ],
)
def test_groups_of_norms_refuse(change, message):
    linear = Linear("state_space")
    decoder = Decoder(torch.ones(HIDDEN), None, hidden_size=HIDDEN, eps=EPS)
    decoder.add_layer()
    given = {"gates": linear.gates, "kind": "state_space", "conv_weight": linear.conv_weight} | linear.fields
    with pytest.raises(RuntimeError, match=f"w4a8::decoder_add_linear_attention: {message}"):
        decoder.add_linear_attention(linear.projections, out=linear.out, **given | change)
    decoder.add_linear_attention(linear.projections, out=linear.out, **given)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("conv_states", [], "conv_states has 0 tensors, expected 1, the layers of decoder with linear attention"),
        ("states", [], "states has 0 tensors, expected 1, the layers of decoder with a state"),
        ("slots", [], "slots has 0 tensors, expected 1, or 1, the layers of decoder with linear attention"),
        ("fresh", None, r"fresh is not given, expected bool \[sequences\]"),
        ("fresh", torch.zeros(1), "fresh has dtype Float, expected bool"),
        ("fresh", torch.zeros(2).bool(), r"fresh has shape \[2\], expected \[1\]"),
        ("slots", [torch.tensor([7]).int()], r"slots of sequence 0 is 7, expected 0\.\.6, the slots of conv_states"),
        ("slots", [torch.tensor([0])], "slots has dtype Long"),
        ("out_slots", [torch.zeros(1, 1).int()] * 2, "out_slots has 2 tensors, expected none, or 1, as many as slots"),
        (
            "out_slots",
            [torch.zeros(1, 1).int()],
            "accepted is not given, expected both out_slots and accepted or neither",
        ),
        ("accepted", torch.zeros(1).int(), "out_slots is not given, expected both out_slots and accepted or neither"),
        ("conv_states", [torch.zeros(SLOTS, 2, 256)], r"conv_states has shape \[7, 2, 256\], expected \[7, 3, 256\]"),
        ("conv_states", [torch.zeros(SLOTS, 3, 256).double()], "conv_states has dtype Double"),
        ("states", [torch.zeros(SLOTS, 6, 32, 16)], r"states has shape \[7, 6, 32, 16\], expected \[7, 6, 16, 32\]"),
        ("states", [torch.zeros(SLOTS, 6, 16, 32).half()], "states has dtype Half, expected float32"),
        ("states", [torch.zeros(SLOTS, 6, 32, 16).transpose(2, 3)], "states has stride 16 in its last dimension"),
        ("states", [torch.zeros(1, 6, 16, 32).expand(SLOTS, -1, -1, -1)], "states"),
    ],
)
def test_step_refuses(name, value, message):
    model, x = Model(["gates of floats"]), torch.randn(3, HIDDEN)
    step = (x, torch.arange(3), [], model.tables([3], [3]), [])
    with pytest.raises(RuntimeError, match=f"w4a8::decoder_step: {message}"):
        model.decoder.step(*step, states=model.states([3], [3], **{name: value}))
    assert_same_bits(model.step(x, [3], [3]), model.one_by_one(x, [3]))
