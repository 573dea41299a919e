"""decoder_step with latent attention (MLA), bit for bit beside the single operators and the floats between them in the
order of docs/numerics.md section 10."""

import pytest
import torch
from common import KERNELS, assert_same_bits, make_matrix
from test_decoder import EPS, HIDDEN, POSITIONS, Steps, dots, matmul, rms_norm, rotate

import w4a8
from w4a8.decoder import Decoder

HEADS, RANK, NOPE, TURNED, VALUE, Q_RANK, INNER = 3, 80, 32, 16, 96, 64, 96
KEY = RANK + TURNED
NUMBERS = {"heads": HEADS, "kv_heads": 1, "head_size": KEY, "scale": 0.2, "kind": "latent"}


def pack(n, k, kind="int4"):
    return make_matrix(n, k, 32 if k % 32 == 0 else 16, kind=kind, bias=True).pack()


def norm(n):
    return 1 + 0.2 * torch.randn(n)


def up(x, weight):
    """[T, heads, k] times floats [heads, n, k]: [T, heads, n]."""
    return torch.stack([dots(x[:, h].contiguous(), weight[h].float()) for h in range(len(weight))], 1)


class Model(Steps):
    """Random layers and the last norm, by the operators one by one and as a Decoder."""

    def __init__(self, q_up=True, fused=False, dtype=torch.float32, bias=False, scale=1.0, kv_up=None, eps=None):
        self.norm, self.rope, self.layers = norm(HIDDEN), scale * torch.randn(POSITIONS, TURNED), []
        self.more_ropes = [scale * torch.randn(POSITIONS, TURNED)]  # of queries
        self.decoder, self.eps = Decoder(self.norm, None, hidden_size=HIDDEN, eps=EPS), eps or EPS
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
            if kv_up is not None:
                layer["kv_up"] = pack(HEADS * (NOPE + VALUE), RANK) if kv_up == "packed" else self.joined(layer)
            if bias:
                layer["out_bias"] = torch.randn(HIDDEN)
            self.decoder.add_layer(**layer, **NUMBERS, rope=0, query_rope=1, interleaved=True, qk_norm_eps=eps)
            self.layers.append(layer)
        block = w4a8.attention_block_bytes("latent", KEY, RANK)
        self.caches = [torch.full((5, 1, 2 * block), 255, dtype=torch.uint8) for _ in self.layers]

    @staticmethod
    def joined(layer):
        """k_up and v_up as one matrix of floats, which takes latent rows."""
        return torch.cat([layer["k_up"].transpose(1, 2), layer["v_up"]], 1).flatten(0, 1)

    def tables(self, lengths, fresh):
        """Sequence b has the pages 2b + 1 and 2b, of 128 tokens."""
        _, *rest = super().tables(lengths, fresh)
        return torch.arange(2 * len(lengths), dtype=torch.int32).view(-1, 2).flip(1), *rest

    def by_heads(self, layer, q, key, lengths, begun):
        """Attention of the first ``begun`` tokens of each sequence over keys and values of each head, and these rows.

        Their bits do not depend on the tokens behind them.
        """
        ends = torch.tensor(lengths).cumsum(0)
        rows = torch.cat([torch.arange(end - n, end - n + b) for end, n, b in zip(ends, lengths, begun)])
        latent, k_pe = key[:, 0].split([RANK, TURNED], 1)
        weight = layer["kv_up"]
        floats = weight.is_floating_point()
        both = dots(latent, weight.float()) if floats else matmul(latent, weight, RANK)
        nope, values = both.view(-1, HEADS, NOPE + VALUE).split([NOPE, VALUE], 2)
        keys = torch.cat([nope, k_pe[:, None].expand(-1, HEADS, -1)], 2)[rows].contiguous()
        cache = torch.zeros(5, HEADS, 2 * w4a8.attention_block_bytes("bfloat16", NOPE + TURNED, VALUE)).byte()
        tables = self.tables(begun, begun)
        w4a8.paged_attention_write(keys, values[rows].contiguous(), cache, *tables, kind="bfloat16")
        seen = w4a8.paged_attention(
            q[rows].contiguous(), cache, *tables, NUMBERS["scale"], kind="bfloat16", value_size=VALUE
        )
        return rows, seen

    def one_by_one(self, x, lengths, begun=None):
        """``begun``: tokens of each sequence that have come with its first one; None: not by heads."""
        tables, angles = self.tables(lengths, lengths), self.rope[self.positions(lengths, lengths)]
        for layer in self.layers:
            normed = rms_norm(x, layer["input_norm"])
            rows = torch.cat([matmul(normed, each, HIDDEN) for each in layer["qkv"]], 1)
            q, latent, k_pe = rows.split([rows.shape[1] - KEY, RANK, TURNED], 1)
            if "q_up" in layer:
                q = matmul(rms_norm(q, layer["q_norm"], self.eps), layer["q_up"], Q_RANK)
            nope, q_pe = q.reshape(-1, HEADS, NOPE + TURNED).split([NOPE, TURNED], 2)
            latent, k_pe = rms_norm(latent, layer["k_norm"], self.eps)[:, None], rotate(k_pe[:, None], angles, True)
            key = torch.cat([latent, k_pe], 2)
            cache = torch.zeros_like(self.caches[0])
            w4a8.paged_attention_write(key, key[..., :RANK], cache, *tables, kind="latent")
            q_pe = rotate(q_pe, self.more_ropes[0][self.positions(lengths, lengths)], True)
            query = torch.cat([up(nope, layer["k_up"]), q_pe], 2)
            seen = w4a8.paged_attention(query, cache, *tables, NUMBERS["scale"], kind="latent", value_size=RANK)
            values = up(seen, layer["v_up"])
            if begun is not None:
                rows, seen = self.by_heads(layer, torch.cat([nope, q_pe], 2), key, lengths, begun)
                values[rows] = seen
            y = matmul(values.flatten(1), layer["out"], HEADS * VALUE)
            x = x + (y + layer.get("out_bias", 0))
            normed, ids = rms_norm(x, layer["mlp_input_norm"]), torch.zeros(len(x), 1, dtype=torch.int32)
            mlp = (layer["gate_up"][0][None], layer["down"][None], HIDDEN, INNER, 2 * INNER, 0, False, 0)
            x = x + w4a8.dynamic_4bit_int_moe(normed, ids, torch.ones(len(x), 1), *mlp)
        return rms_norm(x, self.norm)


MODELS = {
    "low-rank queries": {},
    "whole queries": {"q_up": False},
    "one matrix": {"fused": True},
    "another eps": {"eps": 0.5},
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


# Steps: tokens of two sequences of 90 and 40 tokens. What has come with the first token, if that are several.
BEGUN = {
    "both": ([[90, 40]], [90, 40]),
    "one after the other": ([[60, 0], [1, 40], [29, 0]], [60, 40]),
    "the second first": ([[0, 2], [90, 1], [0, 37]], [90, 2]),
    "one token first": ([[1, 40], [70, 0], [19, 0]], [0, 40]),
}


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("steps", BEGUN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_up", ["packed", "floats"])
def test_sequences_that_begin_have_keys_and_values_of_each_head(kv_up, dtype, steps, threads):
    lengths, (steps, begun) = [90, 40], BEGUN[steps]
    x = torch.randn(sum(lengths), HIDDEN)
    model = Model(dtype=dtype, kv_up=kv_up)
    expected = model.one_by_one(x, lengths, begun)
    assert not torch.equal(expected, model.one_by_one(x, lengths))
    before, done = torch.get_num_threads(), [0, 0]
    torch.set_num_threads(threads)
    try:
        for fresh in steps:
            done = [a + b for a, b in zip(done, fresh)]
            rows = torch.cat([torch.arange(a - b, a) + first for a, b, first in zip(done, fresh, (0, 90))])
            assert_same_bits(model.step(x[rows], done, fresh), expected[rows])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_by_heads(kernel):
    """All tokens of a sequence that begins, beside the kernel that is active."""
    model, x = Model(kv_up="packed"), torch.randn(70, HIDDEN)
    expected, before = model.step(x, [70], [70]), w4a8.active_kernel()
    w4a8.use_kernel(kernel)
    try:
        assert_same_bits(model.step(x, [70], [70]), expected)
    finally:
        w4a8.use_kernel(before)


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels(kernel):
    Model().check_kernel(kernel)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_heads": 3}, "kv_heads is 3, expected 1 for a cache of kind 'latent'"),
        ({"window": 5}, "window is 5 and chunk 0, expected 0 for a cache of kind 'latent'"),
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
        ({"qk_norm_eps": -1.0}, "qk_norm_eps is -1, expected"),
        ({"q_norm": torch.ones(3)}, r"q_norm has shape \[3\], expected \[64\]"),
        ({"q_up": None}, "qkv has 160 out_features, expected 240"),
        ({"k_norm": torch.ones(KEY)}, r"k_norm has shape \[96\], expected \[80\]"),
        ({"qkv": [pack(Q_RANK - 1, HIDDEN), pack(KEY + 1, HIDDEN)]}, "qkv has 2 tensors, of which the first has 63"),
        ({"out": pack(HIDDEN, HEADS * RANK + 16)}, "out has in_features 256, expected 288"),
        ({"kv_up": pack(HEADS * (NOPE + VALUE) + 1, RANK)}, "kv_up has 385 out_features, expected 384"),
        ({"kv_up": pack(HEADS * (NOPE + VALUE), RANK + 16)}, "kv_up has in_features 96, expected 80"),
        ({"kv_up": torch.ones(HEADS * (NOPE + VALUE), KEY)}, r"kv_up has shape \[384, 96\], expected \[384, 80\]"),
        (
            {"kv_up": torch.ones(HEADS * (NOPE + 90), RANK), "v_up": torch.ones(HEADS, 90, RANK)},
            "kv_up is given for heads of 48 and 90 channels of keys and values, expected multiples of 16 up to 512",
        ),
        ({"kind": "int8"}, "q_up, k_up, v_up or kv_up is given, expected a cache of kind 'latent' for it"),
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
