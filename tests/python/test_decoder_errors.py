"""What decoders refuse: each error names the operator, the argument, the given and the expected value."""

import pytest
import torch
from common import make_matrix
from test_decoder import EPS, HEADS, HIDDEN, INNER, KV, SIZE, Model

from w4a8.decoder import Decoder

NAN, INF = float("nan"), float("inf")
PAGES, *LENGTHS = torch.tensor([[1, 2]]).int(), torch.tensor([3]).int(), torch.tensor([0, 3]).int()


def good():
    model = Model(layers=1)
    tables = model.tables([3], [3])
    return model, {
        "hidden": torch.randn(3, HIDDEN), "positions": torch.arange(3), "caches": model.caches,
        "tables": tables, "ropes": [model.rope], "rows": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("hidden", torch.zeros(3, 95), r"hidden has shape \[3, 95\], expected \[tokens, 96\]"),
        ("hidden", torch.zeros(3, HIDDEN, dtype=torch.int32), "hidden has dtype"),
        ("positions", torch.arange(3).int(), "positions has dtype Int"),
        ("positions", torch.tensor([0, 1, 512]), "positions of token 2 is 512, expected 0..511"),
        ("positions", torch.tensor([0, -1, 2]), "positions of token 1 is -1"),
        ("caches", [], "caches has 0 tensors, expected 1, the layers of decoder"),
        ("caches", [torch.zeros(9, KV, 100, dtype=torch.uint8)], "cache has 100 bytes"),
        ("tables", ([], *LENGTHS), "block_tables has 0 tensors, expected 1, or 1, the layers of decoder"),
        ("tables", ([PAGES, PAGES], *LENGTHS), "block_tables has 2 tensors, expected 1, or 1"),
        ("tables", (PAGES.long(), *LENGTHS), "block_table has dtype Long"),
        ("ropes", [], "ropes has 0 tables, expected more than 0"),
        ("ropes", [torch.zeros(9, 2 * SIZE)], "ropes turn 64 numbers of a head, expected at most 32"),
        ("ropes", [torch.zeros(9, SIZE, dtype=torch.float64)], "ropes has dtype Double"),
        ("rows", torch.tensor([3]), "rows has token 3, expected 0..2"),
        ("rows", torch.tensor([0.0]), "rows has dtype Float"),
        ("normed", torch.zeros(2, HIDDEN), r"normed has dtype Float and shape \[2, 96\], expected a contiguous tensor"),
        ("normed", torch.zeros(HIDDEN, 3).T, "normed has dtype Float"),
        ("normed", torch.zeros(3, HIDDEN).half(), "normed has dtype Half"),
        ("threads", -1, "threads is -1, expected 0..4096"),
        ("threads", 4097, "threads is 4097, expected 0..4096"),
        ("layer_inputs", torch.zeros(3, 48), "layer_inputs is given, expected 0 numbers of each token"),
    ],
)
def test_step_refuses(name, value, message):
    model, arguments = good()
    with pytest.raises(RuntimeError, match=f"w4a8::decoder_step: {message}"):
        model.decoder.step(**arguments | {name: value})
    model.decoder.step(**arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 4}, "qkv has 320 out_features, expected 256"),
        ({"kv_heads": 4}, "kv_heads is 4, expected a divisor of heads, 6"),
        ({"head_size": -(2**63)}, "head_size is -9223372036854775808, expected 1..576"),
        ({"head_size": 2**62}, "head_size is 4611686018427387904, expected 1..576"),
        ({"head_size": 24}, "the head size of the keys is 24"),
        ({"input_norm": torch.ones(95)}, r"input_norm has shape \[95\], expected \[96\]"),
        ({"qkv_bias": torch.ones(319)}, r"qkv_bias has shape \[319\], expected \[320\]"),
        ({"out_bias": torch.ones(95)}, r"out_bias has shape \[95\], expected \[96\]"),
        ({"q_norm": torch.ones(31)}, r"q_norm has shape \[31\], expected \[192\]"),
        ({"q_norm": torch.ones(2, 32)}, r"q_norm has shape \[2, 32\], expected \[6, 32\]"),
        (
            {"q_norm": torch.ones(6, 32), "k_norm": torch.ones(32)},
            r"k_norm has shape \[32\], expected \[2, 32\]",
        ),
        ({"input_norm": torch.ones(3, 96)}, r"input_norm has shape \[3, 96\], expected \[2, 96\]"),
        ({"input_norm": torch.ones(2, 96).int()}, "input_norm has dtype Int, expected a floating point type"),
        ({"parallel": True, "mlp_input_norm": torch.ones(96)}, "mlp_input_norm is given, expected none with parallel"),
        ({"sinks": torch.ones(2)}, r"sinks has shape \[2\], expected \[6\]"),
        ({"kind": "int4"}, "kind is 'int4', expected 'int8', 'bfloat16' or 'latent'"),
        ({"window": -1}, "window is -1, expected 0"),
        ({"drops_pages": True}, "drops_pages is true and window is 0, expected a window"),
        ({"chunk": -1}, "chunk is -1, expected 0"),
        ({"rope": -2}, "rope is -2, expected -1"),
        ({"query_rope": -2}, "query_rope is -2, expected -1"),
        ({"scale": NAN}, "scale is nan, expected a finite number of float32"),
        ({"scale": 1e300}, r"scale is 1e\+300, expected a finite number of float32"),
        ({"residual": NAN}, "residual is nan, expected a finite number of float32"),
        ({"residual": -INF}, "residual is -inf, expected a finite number of float32"),
        ({"soft_cap": NAN}, r"soft_cap is nan, expected 0 \(none\) or a positive number"),
        ({"soft_cap": INF}, r"soft_cap is inf, expected 0 \(none\) or a positive number"),
        ({"soft_cap": 1e-300}, r"soft_cap is 1e-300, expected 0 \(none\) or a positive number"),
        ({"activation_kind": 9}, "activation_kind is 9"),
        ({"activation_kind": 7, "alpha": 1.5}, "alpha is 1.5, expected none with activation_kind 7"),
        ({"beta": NAN}, "beta is nan, expected a finite number of float32"),
        ({"output_scale": NAN}, "output_scale is nan, expected a finite number of float32"),
        ({"v_norm": torch.ones(64)}, r"v_norm has shape \[64\], expected \[32\]"),
        ({"projected": "kv"}, "projected is 'kv', expected 'qkv', 'qk' or 'q'"),
        ({"projected": "qk"}, "qkv has 320 out_features, expected 256"),
        ({"projected": "q"}, "qkv has 320 out_features, expected 192"),
        ({"projected": "q", "k_norm": torch.ones(32)}, "k_norm or v_norm is given, expected neither with proj"),
        ({"down": None}, "gate_up has 2 tensors and down is not given"),
        (
            {"gate_up": [make_matrix(2 * INNER + 16, HIDDEN, 32).pack()]},
            "gate_up has 336 out_features, expected those of",
        ),
        ({"gate_up": [make_matrix(INNER // 2, HIDDEN, 32).pack()] * 2}, "gate_up has 2 tensors of 160 out_features"),
        ({"out": torch.zeros(64, dtype=torch.uint8)}, "out"),
    ],
)
def test_layers_refuse(change, message):
    model = Model(layers=1)
    parts = {key: model.layers[0][key] for key in ("qkv", "out", "gate_up", "down")}
    numbers = {"heads": HEADS, "kv_heads": KV, "head_size": SIZE, "scale": 1.0}
    with pytest.raises(RuntimeError, match=f"w4a8::decoder_add_(layer|attention): {message}"):
        model.decoder.add_layer(**parts | numbers | change)


def test_a_matrix_that_ends_within_q():
    model = Model(layers=1)
    qkv = [model.pack(HEADS * SIZE - 16, HIDDEN), model.pack(2 * KV * SIZE + 16, HIDDEN)]
    parts = {key: model.layers[0][key] for key in ("out", "gate_up", "down")}
    message = r"qkv has tensors whose first 1 have 176 out_features, expected one of \[192, 256, 320\]"
    with pytest.raises(RuntimeError, match=message):
        model.decoder.add_layer(qkv, **parts, heads=HEADS, kv_heads=KV, head_size=SIZE, scale=1.0)


def test_experts_refuse():
    model = Model(layers=1, experts=2)
    w13, w2 = (torch.stack([model.pack(*shape)]) for shape in ((2 * INNER, HIDDEN), (HIDDEN, INNER)))
    with pytest.raises(RuntimeError, match="the last layer of decoder has experts, expected one without"):
        model.decoder.add_experts(torch.zeros(1, HIDDEN), None, w13, w2, top_k=1, renormalize=True)
    model = Model(layers=1, experts=2)
    parts = {"heads": HEADS, "kv_heads": KV, "head_size": SIZE, "scale": 1.0}
    model.decoder.add_layer(model.layers[0]["qkv"], model.layers[0]["out"], **parts)
    two = {"w13": model.layers[0]["w13"], "w2": model.layers[0]["w2"], "top_k": 1, "renormalize": True}
    with pytest.raises(RuntimeError, match="w4a8::decoder_add_experts: limit is -1, expected a number above 0"):
        model.decoder.add_experts(torch.zeros(2, HIDDEN), None, **two, limit=-1.0)
    with pytest.raises(RuntimeError, match="routed_scaling_factor is nan, expected a finite number of float32"):
        model.decoder.add_experts(torch.zeros(2, HIDDEN), None, **two, routed_scaling_factor=NAN)
    decoder = Decoder(model.norm, None, hidden_size=HIDDEN, eps=EPS)
    with pytest.raises(RuntimeError, match="decoder has no layer yet"):
        decoder.add_experts(torch.zeros(1, HIDDEN), None, w13, w2, top_k=1, renormalize=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_norm": torch.ones(95)}, r"input_norm has shape \[95\], expected \[96\]"),
        ({"router_norm": torch.ones(95)}, r"router_norm has shape \[95\], expected \[96\]"),
        ({"output_norm": torch.ones(95)}, r"output_norm has shape \[95\], expected \[96\]"),
        ({"shared_norm": torch.ones(96)}, "shared_gate or shared_norm is given, expected a layer with gate_up"),
        ({"expert_factors": torch.ones(3)}, r"expert_factors has shape \[3\], expected \[2\]"),
    ],
)
def test_norms_of_experts_refuse(change, message):
    model = Model(layers=1, experts=2)
    parts = {"heads": HEADS, "kv_heads": KV, "head_size": SIZE, "scale": 1.0}
    model.decoder.add_layer(model.layers[0]["qkv"], model.layers[0]["out"], **parts)
    two = {"w13": model.layers[0]["w13"], "w2": model.layers[0]["w2"], "top_k": 1, "renormalize": True}
    with pytest.raises(RuntimeError, match=f"w4a8::decoder_add_experts: {message}"):
        model.decoder.add_experts(torch.zeros(2, HIDDEN), None, **two, **change)


GATE, DOWN = torch.zeros(48, HIDDEN), torch.zeros(HIDDEN, 48)


@pytest.mark.parametrize(
    ("gate", "down", "more", "message"),
    [
        (GATE[:40], DOWN[:, :40], {}, "gate has 40 out_features, expected a multiple of 16"),
        (GATE[:, :80], DOWN, {}, r"gate has shape \[48, 80\], expected \[48, 96\]"),
        (GATE, DOWN.T, {}, r"down has shape \[48, 96\], expected \[96, 48\]"),
        (GATE, make_matrix(80, 48, 16).pack(), {}, "down has 80 out_features, expected 96"),
        (GATE.double(), DOWN, {}, "gate has dtype Double"),
        (GATE, DOWN, {"norm": torch.ones(48)}, r"norm has shape \[48\], expected \[96\]"),
        (GATE, DOWN, {"activation_kind": 9}, "activation_kind is 9"),
    ],
)
def test_layer_inputs_refuse(gate, down, more, message):
    model = Model(layers=1)
    with pytest.raises(RuntimeError, match=f"w4a8::decoder_add_layer_input: {message}"):
        model.decoder.add_layer_input(gate, down, **more)


def test_steps_refuse_layer_inputs():
    model = Model(layers=1, inputs="floats")
    with pytest.raises(RuntimeError, match="the last layer of decoder has an input, expected one without"):
        model.decoder.add_layer_input(GATE, DOWN)
    model.layer_inputs = lambda x: None
    with pytest.raises(RuntimeError, match="layer_inputs is not given, expected 48 numbers of each token"):
        model.step(torch.zeros(3, HIDDEN), [3], [3])
    for numbers, message in ((torch.zeros(3, 47), r"has shape \[3, 47\], expected \[3, 48\]"),
                             (torch.zeros(3, 48).int(), "has dtype Int")):  # fmt: skip
        model.layer_inputs = lambda x, numbers=numbers: numbers
        with pytest.raises(RuntimeError, match=f"w4a8::decoder_step: layer_inputs {message}"):
            model.step(torch.zeros(3, HIDDEN), [3], [3])
    decoder = Decoder(model.norm, None, hidden_size=HIDDEN, eps=EPS)
    with pytest.raises(RuntimeError, match="decoder has no layer yet"):
        decoder.add_layer_input(GATE, DOWN)


def test_decoders_refuse():
    with pytest.raises(RuntimeError, match="hidden_size is 100, expected a multiple of 16"):
        Decoder(torch.ones(100), None, hidden_size=100, eps=EPS)
    for eps, message in ((0.0, "eps is 0, expected a positive"), (1e-300, "eps is 1e-300, expected a positive"),
                         (NAN, "eps is nan, expected a finite"), (INF, "eps is inf, expected a finite")):  # fmt: skip
        with pytest.raises(RuntimeError, match=message):
            Decoder(torch.ones(96), None, hidden_size=96, eps=eps)
    with pytest.raises(RuntimeError, match="decoder -1 does not exist, or was destroyed"):
        torch.ops.w4a8.decoder_step(
            torch.tensor([-1]), torch.zeros(1, 96), torch.zeros(1).long(), [], [PAGES], *LENGTHS, [], [], [], [], None,
            [], None, None,
        )  # fmt: skip


def test_gradients_are_an_error():
    x = torch.randn(3, HIDDEN, requires_grad=True)
    with pytest.raises(RuntimeError, match="decoder_step"):
        Model().step(x, [3], [3]).sum().backward()
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="decoder_step"):
        Model().step(torch.autograd.forward_ad.make_dual(x.detach(), torch.ones_like(x)), [3], [3])
