"""decoder_step bit for bit beside the single operators, which have their own tests. The norms, the rotation and the
residual between them are computed here in the order of docs/numerics.md section 10."""

import dataclasses

import numpy as np
import pytest
import torch
from common import KERNELS, assert_same_bits, make_matrix

import w4a8
from w4a8.decoder import Decoder

HIDDEN, HEADS, KV, SIZE, INNER, VOCAB, POSITIONS = 96, 6, 2, 32, 160, 75, 512
INPUTS = HIDDEN // 2  # numbers of a token for each of two layers
EPS = 1e-5
KINDS = ["int4", "int4 minimums", "int8"]  # of q, k and v: they want rows quantized in different ways


def mean_of(rows):
    """[rows, 1], of rows [rows, n]: sums in 16 lanes, which are added by halves; float32 throughout."""
    n = rows.shape[1]
    padded = np.zeros((len(rows), -(-n // 16) * 16), np.float32)
    padded[:, :n] = rows
    lanes = np.zeros((len(rows), 16), np.float32)
    for i in range(0, padded.shape[1], 16):
        lanes = lanes + padded[:, i : i + 16]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes / np.float32(n)


def rms_norm(x, weight, eps=EPS, centered=False):
    """weight [n], or [2, n] with a bias. centered: a LayerNorm."""
    rows = np.asarray(x, np.float32).reshape(-1, x.shape[-1])
    rows = rows - mean_of(rows) if centered else rows
    r = np.float32(1) / np.sqrt(mean_of(rows * rows) + np.float32(eps))
    factors, *bias = weight.view(-1, rows.shape[1]).numpy()
    return torch.from_numpy(rows * r * factors + (bias[0] if bias else np.float32(0))).view(x.shape)


def rotate(x, angles, interleaved):
    """x [T, heads, size]; angles [T, 2 * half]."""
    half = angles.shape[1] // 2
    cos, sin = angles[:, None, :half], angles[:, None, half:]
    x = x.clone()
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(half), slice(half, 2 * half))
    )
    a, b = x[..., first].clone(), x[..., second].clone()
    x[..., first], x[..., second] = a * cos - b * sin, b * cos + a * sin
    return x


class Steps:
    """Steps of a subclass's ``decoder`` with its ``caches`` and ``rope``."""

    more_ropes = ()

    def tables(self, lengths, fresh):
        """Sequence b has the pages 2b + 1 and 2b + 2, of 128 tokens."""
        pages = torch.arange(1, 2 * len(lengths) + 1, dtype=torch.int32).view(-1, 2)
        starts = torch.tensor([0, *np.cumsum(fresh)], dtype=torch.int32)
        return pages, torch.tensor(lengths, dtype=torch.int32), starts

    def positions(self, lengths, fresh):
        return torch.cat([torch.arange(n - f, n) for n, f in zip(lengths, fresh)])

    def step(self, x, lengths, fresh, rows=None, normed=None, threads=0):
        rows = None if rows is None else torch.tensor(rows, dtype=torch.int64)
        return self.decoder.step(
            x, self.positions(lengths, fresh), self.caches, self.tables(lengths, fresh), [self.rope, *self.more_ropes],
            rows, normed, threads, layer_inputs=self.layer_inputs(x),
        )  # fmt: skip

    def layer_inputs(self, x):
        """The layers' own numbers of the tokens of x: those of x itself."""
        return

    def check_in_pieces(self, x, expected, threads):
        """Sequences of 90 and 40 tokens: one token, chunks, both in a call, and whole."""
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            done = [0, 0]
            for fresh in ([37, 2], [1, 1], [3, 8], [0, 9], [49, 20]):
                done = [a + b for a, b in zip(done, fresh)]
                rows = torch.cat([torch.arange(a - b, a) + first for a, b, first in zip(done, fresh, (0, 90))])
                assert_same_bits(self.step(x[rows], done, fresh), expected[rows])
            assert_same_bits(self.step(x, [90, 40], [90, 40]), expected)
        finally:
            torch.set_num_threads(before)

    def check_kernel(self, kernel):
        """All rows, and the last one alone, beside the kernel that is active."""
        x = torch.randn(11, HIDDEN)
        expected = self.step(x, [11], [11])
        before = w4a8.active_kernel()
        w4a8.use_kernel(kernel)
        try:
            assert_same_bits(self.step(x, [11], [11]), expected)
            assert_same_bits(self.step(x[10:], [11], [1]), expected[10:])
        finally:
            w4a8.use_kernel(before)


class Model(Steps):
    """A random decoder, by the operators one by one and as a Decoder."""

    def __init__(self, *, layers=2, fused=False, experts=0, shared=None, four_norms=False, head_norm=None, window=0,
                 kind="int8", interleaved=False, turned=SIZE, head=True, activation=0, biases=False, matrices="qkv",
                 numbers=None, gated=True, centered=False, biased_norms=False, parallel=False, turn_first=False,
                 projected=("qkv",), v_norm=False, own_norms=False, output_scale=1.0, inputs=None,
                 mlp_numbers=None, common=None, places=None, query_rope=False, weighs_inputs=False,
                 **attention):  # fmt: skip
        """common: generates what all ranks have. places: of the experts, where in its stacks a rank has each, or -1."""
        shape_of_row = (2, HIDDEN) if biased_norms else (HIDDEN,)
        norm = lambda *shape: 1 + 0.2 * torch.randn(shape or shape_of_row, generator=common)  # noqa: E731
        self.places = None if places is None else torch.tensor(places, dtype=torch.int32)
        self.centered, self.parallel, self.turn_first = centered, parallel, turn_first
        self.kind, self.window, self.interleaved, self.experts = kind, window, interleaved, experts
        self.attention, self.activation = {"scale": SIZE**-0.5, "soft_cap": 0.0, "sinks": None} | attention, activation
        self.numbers, self.mlp_numbers = numbers or {}, mlp_numbers or {}  # of the experts, and of the MLP
        self.up = 2 * INNER if gated else INNER  # rows of up, or of gate and up
        self.inputs, self.output_scale = inputs, output_scale
        self.rope = torch.randn(POSITIONS, turned, generator=common)
        self.more_ropes = [torch.randn(POSITIONS, SIZE)] if query_rope else []  # of queries
        self.weighs_inputs = weighs_inputs
        self.norm, self.layers = norm(), []
        self.head = self.pack(VOCAB, HIDDEN, "int8") if head else None
        self.decoder = Decoder(self.norm, self.head, hidden_size=HIDDEN, eps=EPS, centered=centered)
        for i in range(layers):
            makes = projected[i % len(projected)]
            layer = {"input_norm": norm()} | ({} if parallel else {"mlp_input_norm": norm()})
            if four_norms:
                layer |= {"attention_norm": norm(), "mlp_norm": norm()}
            if head_norm is not None:
                shape = {"whole": lambda n: (n * SIZE,), "head": lambda n: (SIZE,), "apart": lambda n: (n, SIZE)}
                layer |= {"q_norm": norm(*shape[head_norm](HEADS)), "k_norm": norm(*shape[head_norm](KV))}
            if makes == "q":
                layer.pop("k_norm", None)
            elif v_norm:
                layer["v_norm"] = norm(SIZE)
            widths = [HEADS * SIZE, KV * SIZE, KV * SIZE][: len(makes)]
            if biases:
                layer |= {"qkv_bias": torch.randn(sum(widths)), "out_bias": torch.randn(HIDDEN)}
            if matrices != "qkv":  # two of the three are one matrix
                widths = [widths[0] + widths[1], widths[2]] if matrices == "qk, v" else [widths[0], 2 * widths[1]]
            qkv = (
                [self.pack(sum(widths), HIDDEN)]
                if fused
                else [self.pack(n, HIDDEN, kind) for n, kind in zip(widths, KINDS)]
            )
            out = self.pack(HIDDEN, HEADS * SIZE)
            both = make_matrix(self.up, HIDDEN, 32)
            gate_up = [both.pack()] if fused or not gated else [half_of(both, 0), half_of(both, 1)]
            gate_up = [] if experts and shared is None else gate_up
            down = self.pack(HIDDEN, INNER, "int8") if gate_up else None
            self.decoder.add_layer(
                qkv, out, gate_up, down, heads=HEADS, kv_heads=KV, head_size=SIZE, kind=kind, window=window, rope=0,
                interleaved=interleaved, activation_kind=activation, residual=0.5, parallel=parallel,
                turn_first=turn_first, projected=makes, output_scale=output_scale,
                query_rope=len(self.more_ropes) if query_rope else None, **layer, **self.attention,
                **self.mlp_numbers,
            )  # fmt: skip
            parts = {"qkv": qkv, "out": out, "gate_up": gate_up, "down": down, "both": both.pack(), "makes": makes}
            if experts:
                parts |= {
                    "router": torch.randn(experts, HIDDEN, generator=common),
                    "router_bias": torch.randn(experts, generator=common),
                    "w13": torch.stack([self.pack(self.up, HIDDEN) for _ in range(1 + max(places or [experts - 1]))]),
                    "w2": torch.stack([self.pack(HIDDEN, INNER) for _ in range(1 + max(places or [experts - 1]))]),
                }  # fmt: skip
                parts["shared_gate"] = torch.randn(HIDDEN, generator=common) if shared == "gated" else None
                parts["own"] = {} if not own_norms else {
                    "input_norm": norm(), "router_norm": norm(), "output_norm": norm(), "shared_norm": norm(),
                    "expert_factors": 1 + torch.rand(experts, generator=common),
                }  # fmt: skip
                self.decoder.add_experts(
                    parts["router"], parts["router_bias"], parts["w13"], parts["w2"], top_k=2, renormalize=True,
                    activation_kind=activation, shared_gate=parts["shared_gate"], expert_map=self.places,
                    apply_router_weight_on_input=weighs_inputs, **self.numbers, **parts["own"],
                )  # fmt: skip
            if inputs is not None:
                sizes = ((INPUTS, HIDDEN), (HIDDEN, INPUTS))
                floats = [torch.randn(size, generator=common) for size in sizes]
                both_ways = floats if inputs == "floats" else [make_matrix(*size, 16).pack() for size in sizes]
                parts |= {"input": both_ways, "after_input": norm()}
                self.decoder.add_layer_input(*both_ways, norm=parts["after_input"], activation_kind=7)
            self.layers.append(layer | parts)
        block = w4a8.attention_block_bytes(kind, SIZE, SIZE)
        self.caches = []
        for layer in self.layers:  # one that makes no keys has the cache before
            shares = layer["makes"] == "q"
            self.caches.append(self.caches[-1] if shares else torch.full((9, KV, 2 * block), 255, dtype=torch.uint8))

    def layer_inputs(self, x):
        return x[:, : INPUTS * len(self.layers)] if self.inputs else None

    def pack(self, n, k, kind="int4"):
        return make_matrix(n, k, 32, kind=kind, bias=True).pack()

    def one_by_one(self, x, lengths, fresh):
        x, tables = x.float(), self.tables(lengths, fresh)
        angles, numbers = self.rope[self.positions(lengths, fresh)], x
        for i, layer in enumerate(self.layers):
            normed = self.norm_of(x, layer["input_norm"])
            rows = torch.cat([matmul(normed, p, HIDDEN) for p in layer["qkv"]], 1) + layer.get("qkv_bias", 0)
            q, *kv = rows.split([HEADS * SIZE, KV * SIZE, KV * SIZE][: len(layer["makes"])], 1)
            of_queries = [angles, *(each[self.positions(lengths, fresh)] for each in self.more_ropes)][-1]
            q = self.prepared(q.view(len(x), -1, SIZE), layer.get("q_norm"), of_queries)
            if kv:
                k = self.prepared(kv[0].reshape(len(x), -1, SIZE), layer.get("k_norm"), angles)
                v = self.norm_of(kv[-1].reshape(len(x), -1, SIZE), layer.get("v_norm"))
                cache = torch.zeros_like(self.caches[i])
                w4a8.paged_attention_write(k, v, cache, *tables, kind=self.kind)
            options = {"kind": self.kind, "window": self.window, **self.attention}
            y = w4a8.paged_attention(q, cache, *tables, options.pop("scale"), **options)
            y = self.of_all_ranks(matmul(y.flatten(1), layer["out"], HEADS * SIZE) + layer.get("out_bias", 0))
            x = x + np.float32(0.5) * self.norm_of(y, layer.get("attention_norm"))
            y = self.mlp(layer, x, normed if self.parallel else self.norm_of(x, layer["mlp_input_norm"]))
            x = x + np.float32(0.5) * self.norm_of(y, layer.get("mlp_norm"))
            if self.inputs:
                gate, down = layer["input"]
                g = project(x, gate).clamp(min=0)
                y = project(g * g * numbers[:, i * INPUTS : (i + 1) * INPUTS], down)
                x = x + np.float32(0.5) * self.norm_of(y, layer["after_input"])
            x = x * np.float32(self.output_scale)
        x = self.norm_of(x, self.norm)
        return x if self.head is None else matmul(x, self.head, HIDDEN)

    def of_all_ranks(self, y):
        """The sum of what each rank makes."""
        return y

    def norm_of(self, rows, weight):
        return rows if weight is None else rms_norm(rows, weight, centered=self.centered)

    norm_of_all_heads = norm_of

    def prepared(self, heads, weight, angles):
        """Queries or keys [T, heads, size], behind their norms and the rotation."""
        heads = rotate(heads, angles, self.interleaved) if self.turn_first else heads
        if weight is not None and weight.dim() == 2:
            heads = torch.stack([self.norm_of(heads[:, h], weight[h]) for h in range(len(weight))], 1)
        elif weight is not None:
            norm = self.norm_of if len(weight) == SIZE else self.norm_of_all_heads
            heads = norm(heads.reshape(len(heads), -1, len(weight)), weight).view(heads.shape)
        return heads if self.turn_first else rotate(heads, angles, self.interleaved)

    def mlp(self, layer, rows, x):
        """rows: of the layer; x: behind the norm in front of the MLP."""
        own = layer.get("own", {})
        of_experts, of_router = (
            self.norm_of(rows, own[name]) if name in own else x for name in ("input_norm", "router_norm")
        )
        moe = lambda x, ids, weights, w13, w2, **numbers: w4a8.dynamic_4bit_int_moe(  # noqa: E731
            x, ids, weights, w13, w2, HIDDEN, INNER, self.up, 0, self.weighs_inputs, self.activation, **numbers
        )
        y = None
        if layer["down"] is not None:
            # An MLP is an expert of weight 1.
            ones = torch.ones(len(x), 1)
            stacks, numbers = (layer["both"][None], layer["down"][None]), self.mlp_numbers
            y = moe(x, torch.zeros(len(x), 1, dtype=torch.int32), ones, *stacks, **numbers)
        if not self.experts:
            return self.of_all_ranks(y)
        logits = dots(of_router, layer["router"]) + layer["router_bias"]
        weights, ids = w4a8.topk_routing(logits, 2, True)
        weights = weights * own["expert_factors"][ids.long()] if own else weights
        ids = ids if self.places is None else self.places[ids.long()]
        experts = moe(of_experts, ids, weights, layer["w13"], layer["w2"], **self.numbers)
        if y is None:
            return self.norm_of(self.of_all_ranks(experts), own.get("output_norm"))
        if own:
            experts = self.norm_of(self.of_all_ranks(experts), own["output_norm"])
            y = self.norm_of(self.of_all_ranks(y), own["shared_norm"])
        gate = layer["shared_gate"]
        factor = torch.ones(()) if gate is None else dots(x, gate[None]).double().sigmoid().float()
        return experts + factor * y if own else self.of_all_ranks(experts + factor * y)


def matmul(x, packed, k):
    header = w4a8.read_header(packed)
    return w4a8.dyn_quant_matmul_4bit(x.contiguous(), packed, header["group"], k, header["n"])


def project(x, matrix):
    return matmul(x, matrix, x.shape[1]) if matrix.dtype == torch.uint8 else dots(x, matrix)


def half_of(matrix, half):
    """The first or the second half of its rows, packed."""
    rows = slice(half * INNER, (half + 1) * INNER)
    return dataclasses.replace(matrix, weights=matrix.weights[rows], scales=matrix.scales[rows], n=INNER).pack()


def dots(x, router):
    """Even and odd vectors of 16 are summed apart."""
    products = (x[:, None] * router[None]).numpy().reshape(len(x), len(router), -1, 16)
    sums = [np.zeros((len(x), len(router), 16), np.float32) for _ in range(2)]
    pairs = products.shape[2] // 2 * 2
    for i in range(products.shape[2]):
        sums[i % 2 if i < pairs else 0] += products[:, :, i]
    lanes = sums[0] + sums[1]
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return torch.from_numpy(lanes[..., 0].copy())


MODELS = {
    "plain": {},
    "fused": {"fused": True},
    "bfloat16": {"kind": "bfloat16"},
    "gemma": {"four_norms": True, "head_norm": "head", "activation": 6, "window": 70},
    "whole rows": {"head_norm": "whole", "head": False},
    "half turned": {"turned": SIZE // 2, "interleaved": True},
    "gpt-oss": {"sinks": torch.linspace(-1, 1, HEADS), "experts": 5, "window": 64, "activation": 3},
    "other numbers": {"experts": 4, "shared": "plain", "numbers": {"limit": 0.25, "alpha": 1.3, "beta": 0.5}},
    "step": {"experts": 4, "activation": 4, "numbers": {"limit": 0.25}},
    "soft cap": {"soft_cap": 3.0},
    "experts": {"experts": 4, "fused": True},
    "biases": {"biases": True},
    "q and k are one": {"matrices": "qk, v"},
    "k and v are one": {"matrices": "q, kv"},
    "shared": {"experts": 4, "shared": "plain"},
    "shared, gated": {"experts": 4, "shared": "gated"},
    "no gate": {"gated": False, "activation": 7},
    "apertus": {"gated": False, "activation": 8, "mlp_numbers": {"alpha": 0.3, "beta": 1.7}, "head_norm": "head"},
    "numbers of an MLP": {"mlp_numbers": {"alpha": 1.3, "beta": 0.5}},
    "command r": {"centered": True, "parallel": True, "head_norm": "apart", "interleaved": True},
    "parallel": {"parallel": True, "experts": 4, "shared": "plain", "four_norms": True},
    "phi-moe": {"centered": True, "biased_norms": True, "biases": True, "experts": 4},
    "norms with biases": {"biased_norms": True, "head": False, "four_norms": True},
    "hunyuan": {"turn_first": True, "head_norm": "head"},
    "turned whole rows": {"turn_first": True, "head_norm": "whole", "turned": SIZE // 2, "centered": True},
    "experts without a gate": {"gated": False, "activation": 7, "experts": 4, "shared": "plain"},
    "keys are values": {"projected": ("qk",), "fused": True, "biases": True, "head_norm": "head", "v_norm": True},
    "keys of another layer": {"projected": ("qkv", "q"), "biases": True, "head_norm": "head", "v_norm": True},
    "values and whole rows": {"head_norm": "whole", "v_norm": True, "output_scale": 0.7},
    "own norms": {"experts": 4, "shared": "gated", "own_norms": True, "four_norms": True},
    "llama 4": {"turn_first": True, "head_norm": "head", "interleaved": True, "query_rope": True, "chunk": 24},
    "weights of inputs": {"experts": 4, "shared": "plain", "weighs_inputs": True},
    "inputs": {"inputs": "packed"},
    "inputs, floats": {"inputs": "floats", "output_scale": 1.3},
}


@pytest.mark.parametrize("name", MODELS)
def test_is_the_operators_one_by_one(name):
    lengths = [100, 33, 7]
    x = torch.randn(sum(lengths), HIDDEN)
    model = Model(**MODELS[name])
    expected = model.one_by_one(x, lengths, lengths)
    assert expected.abs().max() > 0.5
    assert_same_bits(model.step(x, lengths, lengths), expected)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(
    "name",
    ["plain", "gemma", "experts", "experts without a gate", "biases", "q and k are one", "shared, gated", "command r",
     "keys are values", "keys of another layer", "own norms", "inputs", "inputs, floats", "llama 4",
     "weights of inputs"],
)  # fmt: skip
def test_bits_depend_on_nothing_else(name, threads):
    """One token, chunks, several sequences in a call, and any number of threads."""
    lengths = [90, 40]
    x = torch.randn(sum(lengths), HIDDEN)
    model = Model(**MODELS[name])
    expected = model.one_by_one(x, lengths, lengths)
    model.check_in_pieces(x, expected, threads)


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels(kernel):
    Model(experts=4, head_norm="head").check_kernel(kernel)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_types(dtype):
    """The type is that of what comes in and goes out, and of what the output layer gets; within, all is float32."""
    x = torch.randn(5, HIDDEN).to(dtype)
    model = Model()
    normed, exact = torch.empty_like(x), torch.empty(5, HIDDEN)
    got = model.step(x, [5], [5], normed=normed)
    assert got.dtype == dtype
    model.step(x.float(), [5], [5], normed=exact)
    assert_same_bits(normed, exact.to(dtype))
    assert_same_bits(got, matmul(normed, model.head, HIDDEN))


def test_rows():
    x = torch.randn(20, HIDDEN)
    model = Model()
    everything = model.step(x, [12, 8], [12, 8])
    for rows in ([11, 19, 11], []):
        normed = torch.empty(20, HIDDEN)
        got = model.step(x, [12, 8], [12, 8], rows, normed)
        assert got.shape == (len(rows), VOCAB)
        assert_same_bits(got, everything[rows])
        assert_same_bits(matmul(normed, model.head, HIDDEN), everything)


def test_a_block_table_for_each_layer():
    """The second layer has its pages in another order; without pages where a window has left them."""
    x = torch.randn(150, HIDDEN)
    model = Model(window=70)
    expected = model.step(x, [150], [150])
    first, *lengths = model.tables([150], [150])
    caches = [model.caches[0], torch.full_like(model.caches[1], 255)]
    tables = ([first, torch.tensor([[7, 3]], dtype=torch.int32)], *lengths)
    got = model.decoder.step(x, torch.arange(150), caches, tables, [model.rope])
    assert_same_bits(got, expected)
    assert torch.equal(caches[1][[7, 3]], model.caches[1][[1, 2]])
    assert bool((caches[1][1] == 255).all())


@pytest.mark.parametrize("drops_pages", [False, True])
def test_a_window_that_all_tokens_are_in_is_none(drops_pages):
    x = torch.randn(150, HIDDEN)
    model = Model(layers=1)
    expected = model.step(x, [100, 50], [100, 50])
    parts = {name: model.layers[0][name] for name in ("qkv", "out", "gate_up", "down", "input_norm", "mlp_input_norm")}
    for window in (100, 2**31, 2**63 - 100, 2**63 - 1):
        decoder = Decoder(model.norm, model.head, hidden_size=HIDDEN, eps=EPS)
        decoder.add_layer(
            **parts, heads=HEADS, kv_heads=KV, head_size=SIZE, scale=SIZE**-0.5, rope=0, residual=0.5, window=window,
            drops_pages=drops_pages,
        )  # fmt: skip
        model.decoder = decoder
        assert_same_bits(model.step(x, [100, 50], [100, 50]), expected, f"window {window}")


def test_block_tables_of_other_widths_that_begin_alike():
    model = Model()
    numbers = torch.tensor([1, 2, 9, 3], dtype=torch.int32)
    tables = [numbers[:2].view(2, 1), numbers.view(2, 2)]
    lengths, starts = torch.tensor([3, 3]).int(), torch.tensor([0, 3, 6]).int()
    step = lambda: model.decoder.step(  # noqa: E731
        torch.randn(6, HIDDEN), torch.arange(6), model.caches, (tables, lengths, starts), [model.rope]
    )
    with pytest.raises(RuntimeError, match=r"block_table of sequence 1 has page 9 at 0, expected 0\.\.8, the pages of"):
        step()
    numbers[2] = 8
    step()


def test_rows_without_a_norm():
    """And with an output layer, whose rows are those."""
    x, starts = torch.randn(5, 96), torch.tensor([0, 5]).int()
    step = (x, torch.arange(5), [], ([], starts[1:], starts), [])
    assert_same_bits(Decoder(None, None, hidden_size=96, eps=EPS).step(*step), x)
    head = make_matrix(48, 96, 16).pack()
    assert_same_bits(Decoder(None, head, hidden_size=96, eps=EPS).step(*step), matmul(x, head, 96))
    with pytest.raises(RuntimeError, match=r"norm has shape \[0, 96\], expected \[2, 96\]"):
        Decoder(torch.ones(0, 96), None, hidden_size=96, eps=EPS)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("n", [16, 96, 2000])
def test_norms_beside_float64(n, centered, biased):
    """A decoder without layers is its last norm, which rounds n / 16 sums of a lane, and less than 16 times besides.
    Without the mean, which is rounded as the largest value is, values are about 1."""
    x, weight = torch.randn(5, n) + 10, torch.randn(n)
    bias = torch.randn(n) if biased else torch.zeros(n)
    norm = torch.stack([weight, bias]) if biased else weight
    decoder = Decoder(norm, None, hidden_size=n, eps=EPS, centered=centered)
    starts = torch.tensor([0, 5]).int()
    got = decoder.step(x, torch.arange(5), [], ([], starts[1:], starts), [])
    exact = x.double() - x.double().mean(1, keepdim=True) if centered else x.double()
    expected = exact / (exact.square().mean(1, keepdim=True) + EPS).sqrt() * weight + bias
    largest = x.abs().max() if centered else 1.5
    assert (got - expected).abs().max() < 2.0**-24 * (n / 16 + 16) * largest * (weight.abs().max() + bias.abs().max())


def test_input_stays():
    x = torch.randn(3, HIDDEN)
    copy = x.clone()
    Model().step(x, [3], [3])
    assert torch.equal(x, copy)


def test_a_row_that_is_not_finite():
    x = torch.randn(6, HIDDEN)
    x[2, 5] = float("nan")
    model = Model()
    got = model.step(x, [3, 3], [3, 3])
    assert got[2].isnan().all()
    x[2] = 0
    assert_same_bits(got[[0, 1, 3, 4, 5]], model.step(x, [3, 3], [3, 3])[[0, 1, 3, 4, 5]])
