"""decoder_step with latent attention (MLA), bit for bit beside the single operators and the floats between them in the
order of docs/numerics.md section 10."""

import pytest
import torch
from common import KERNELS, make_matrix
from test_decoder import EPS, HIDDEN, POSITIONS, Steps, dots, matmul, rms_norm, rotate

import w4a8
from w4a8.decoder import Decoder

HEADS, RANK, NOPE, TURNED, VALUE, Q_RANK, INNER = 3, 80, 32, 16, 96, 64, 96
KEY = RANK + TURNED
NUMBERS = {"heads": HEADS, "kv_heads": 1, "head_size": KEY, "scale": 0.2, "kind": "latent"}


def pack(n, k, kind="int4"):
    return make_matrix(n, k, 32, kind=kind, bias=True).pack()


def norm(n):
    return 1 + 0.2 * torch.randn(n)


def up(x, weight):
    """[T, heads, k] times floats [heads, n, k]: [T, heads, n]."""
    return torch.stack([dots(x[:, h].contiguous(), weight[h].float()) for h in range(len(weight))], 1)


class Model(Steps):
    """Random layers and the last norm, by the operators one by one and as a Decoder."""

    def __init__(self, q_up=True, fused=False, dtype=torch.float32, bias=False, scale=1.0):
        self.norm, self.rope, self.layers = norm(HIDDEN), scale * torch.randn(POSITIONS, TURNED), []
        self.decoder = Decoder(self.norm, None, hidden_size=HIDDEN, eps=EPS)
        q_size = HEADS * (NOPE + TURNED)
        first = Q_RANK if q_up else q_size
        for _ in range(2):
            layer = {
                "qkv": [pack(first + KEY, HIDDEN)] if fused else [pack(first, HIDDEN), pack(KEY, HIDDEN, "int8")],
                "out": pack(HIDDEN, HEADS * VALUE),
                "gate_up": [pack(2 * INNER, HIDDEN)],
                "down": pack(HIDDEN, INNER),
                "input_norm": norm(HIDDEN),
                "mlp_input_norm": norm(HIDDEN),
                "k_norm": norm(RANK),
                "k_up": (torch.randn(HEADS, RANK, NOPE) / 4).to(dtype),
                "v_up": (torch.randn(HEADS, VALUE, RANK) / 4).to(dtype),
            }
            if q_up:
                layer |= {"q_up": pack(q_size, Q_RANK), "q_norm": norm(Q_RANK)}
            if bias:
                layer["out_bias"] = torch.randn(HIDDEN)
            self.decoder.add_layer(**layer, **NUMBERS, rope=0, interleaved=True)
            self.layers.append(layer)
        block = w4a8.attention_block_bytes("latent", KEY, RANK)
        self.caches = [torch.full((5, 1, 2 * block), 255, dtype=torch.uint8) for _ in self.layers]

    def tables(self, lengths, fresh):
        """Sequence b has the pages 2b + 1 and 2b, of 128 tokens."""
        _, *rest = super().tables(lengths, fresh)
        return torch.arange(2 * len(lengths), dtype=torch.int32).view(-1, 2).flip(1), *rest

    def one_by_one(self, x, lengths):
        tables, angles = self.tables(lengths, lengths), self.rope[self.positions(lengths, lengths)]
        for layer in self.layers:
            normed = rms_norm(x, layer["input_norm"])
            rows = torch.cat([matmul(normed, each, HIDDEN) for each in layer["qkv"]], 1)
            q, latent, k_pe = rows.split([rows.shape[1] - KEY, RANK, TURNED], 1)
            if "q_up" in layer:
                q = matmul(rms_norm(q, layer["q_norm"]), layer["q_up"], Q_RANK)
            nope, q_pe = q.reshape(-1, HEADS, NOPE + TURNED).split([NOPE, TURNED], 2)
            key = torch.cat([rms_norm(latent, layer["k_norm"])[:, None], rotate(k_pe[:, None], angles, True)], 2)
            cache = torch.zeros_like(self.caches[0])
            w4a8.paged_attention_write(key, key[..., :RANK], cache, *tables, kind="latent")
            query = torch.cat([up(nope, layer["k_up"]), rotate(q_pe, angles, True)], 2)
            seen = w4a8.paged_attention(query, cache, *tables, NUMBERS["scale"], kind="latent", value_size=RANK)
            y = matmul(up(seen, layer["v_up"]).flatten(1), layer["out"], HEADS * VALUE)
            x = x + (y + layer.get("out_bias", 0))
            normed, ids = rms_norm(x, layer["mlp_input_norm"]), torch.zeros(len(x), 1, dtype=torch.int32)
            mlp = (layer["gate_up"][0][None], layer["down"][None], HIDDEN, INNER, 2 * INNER, 0, False, 0)
            x = x + w4a8.dynamic_4bit_int_moe(normed, ids, torch.ones(len(x), 1), *mlp)
        return rms_norm(x, self.norm)


MODELS = {
    "low-rank queries": {},
    "whole queries": {"q_up": False},
    "one matrix": {"fused": True},
    "bfloat16": {"dtype": torch.bfloat16, "bias": True},
    "float16, whole queries, one matrix": {"dtype": torch.float16, "q_up": False, "fused": True},
}


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_is_the_operators_one_by_one(name, threads):
    """Whole, and again in chunks and tokens of several sequences."""
    lengths = [90, 40]
    x = torch.randn(sum(lengths), HIDDEN)
    model = Model(**MODELS[name])
    expected = model.one_by_one(x, lengths)
    assert expected.abs().max() > 0.5
    model.check_in_pieces(x, expected, threads)


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels(kernel):
    Model().check_kernel(kernel)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_heads": 3}, "kv_heads is 3, expected 1 for a cache of kind 'latent'"),
        ({"window": 5}, "window is 5, expected 0 for a cache of kind 'latent'"),
        ({"drops_pages": True}, "drops_pages is true and window is 0, expected a window"),
        ({"qkv_bias": torch.ones(Q_RANK + KEY)}, "qkv_bias is given"),
        ({"k_up": None}, "k_up is not given"),
        ({"v_up": None}, "v_up is not given"),
        ({"k_up": torch.ones(2, RANK, NOPE)}, r"k_up has shape \[2, 80, 32\], expected \[3, "),
        ({"k_up": torch.ones(HEADS, RANK, 40)}, r"k_up has shape \[3, 80, 40\]"),
        (
            {"k_up": torch.ones(HEADS, KEY, NOPE)},
            r"k_up has shape \[3, 96, 32\], expected \[3, .* head_size - 16 = 80, ",
        ),
        (
            {"k_up": torch.ones(HEADS, RANK - 8, NOPE)},
            r"k_up has shape \[3, 72, 32\], expected \[3, a multiple of 16 up",
        ),
        ({"k_up": torch.ones(HEADS, 64, NOPE)}, r"v_up has shape \[3, 96, 80\], expected \[3, values, 64\]"),
        ({"v_up": torch.ones(HEADS, VALUE, RANK).half()}, "v_up has dtype Half, expected Float, the dtype of k_up"),
        ({"k_up": torch.ones(HEADS, RANK, NOPE).int()}, "k_up has dtype Int"),
        ({"q_up": pack(99, Q_RANK)}, "q_up has 99 out_features, expected 144"),
        ({"q_up": torch.ones(3)}, "q_up"),
        ({"q_norm": torch.ones(3)}, r"q_norm has shape \[3\], expected \[64\]"),
        ({"q_up": None}, "qkv has 160 out_features, expected 240"),
        ({"k_norm": torch.ones(KEY)}, r"k_norm has shape \[96\], expected \[80\]"),
        ({"qkv": [pack(Q_RANK - 1, HIDDEN), pack(KEY + 1, HIDDEN)]}, "qkv has 2 tensors, of which the first has 63"),
        ({"out": pack(HIDDEN, HEADS * RANK + 16)}, "out has in_features 256, expected 288"),
        ({"kind": "int8"}, "q_up, k_up or v_up is given, expected a cache of kind 'latent' for it"),
    ],
)
def test_layers_refuse(change, message):
    model = Model()
    with pytest.raises(RuntimeError, match=f"w4a8::decoder_add_(layer|attention): {message}"):
        model.decoder.add_layer(**model.layers[0] | NUMBERS | change)


def test_more_is_turned_than_a_query_has_for_it():
    model = Model()
    model.rope = torch.randn(POSITIONS, TURNED + 2)
    with pytest.raises(RuntimeError, match="ropes turn 18 numbers of a head, expected at most 16"):
        model.step(torch.randn(2, HIDDEN), [2], [2])
