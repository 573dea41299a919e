"""Layers of linear attention, and layers with a part alone, in decoder_step: bit for bit as the single operators."""

import pytest
import torch
from common import KERNELS, assert_same_bits, make_matrix
from test_decoder import EPS, HIDDEN, INNER, POSITIONS, Steps, dots, matmul, rms_norm, rotate

import w4a8
from w4a8 import ops
from w4a8.decoder import Decoder, States
from w4a8.linear_attention import layer_weights

KEYS, VALUES, K, V, WIDTH, SLOTS = 2, 6, 16, 32, 4, 7
CHANNELS = {
    "gated_delta": 2 * KEYS * K + VALUES * V,
    "state_space": VALUES * V + 2 * KEYS * K,
    "short_conv": 48,
}
PARTS = {  # of the projections, in their order
    "gated_delta": [CHANNELS["gated_delta"], VALUES * V, VALUES, VALUES],
    "state_space": [VALUES * V, CHANNELS["state_space"], VALUES],
    "short_conv": [48, 48, 48],
}
STATES = {"gated_delta": (VALUES, K, V), "state_space": (VALUES, V, K)}
HEADS, KV, SIZE = 3, 1, 32  # of attention, whose q is gated
RANK, DECAY_RANK = 48, 64  # of z and of the decays of each channel, in some layers
LAYERS = {
    "as one": ("gated_delta", {"parts": 1}),
    "four matrices": ("gated_delta", {"gate": "sigmoid"}),
    "gates of floats": ("gated_delta", {"gates": torch.bfloat16}),
    "six matrices": ("gated_delta", {"parts": 6, "beta_scale": 2.0}),
    "four matrices and gates of floats": ("gated_delta", {"parts": 6, "gates": torch.float32}),
    "decays of channels": ("gated_delta", {"parts": 6, "low": ["z_up", "decay_up"], "gate": "sigmoid"}),
    "decays of channels, b of floats": ("gated_delta", {"low": ["decay_up"], "gates": torch.float32}),
    "low rank, as one": ("gated_delta", {"parts": 1, "low": ["z_up", "decay_up"]}),
    "low rank, of floats": ("gated_delta", {"low": ["z_up", "decay_up"], "gates": torch.bfloat16, "floats": 3}),
    "decays of floats": ("gated_delta", {"parts": 6, "low": ["z_up", "decay_up"], "gates": torch.float32, "floats": 2}),
    "z of low rank": ("gated_delta", {"low": ["z_up"], "gates": torch.float32, "beta_scale": 0.5}),
    "interleaved": ("gated_delta", {"interleaved": True, "gates": torch.float32}),
    "interleaved, packed": ("gated_delta", {"interleaved": True, "parts": 2}),
    "state space": ("state_space", {"norm_groups": 2}),
    "state space, norm over ranks": ("state_space", {"norm_groups": 0}),
    "state space, norm first": ("state_space", {"norm_first": True, "gates": torch.float16}),
    "state space without a norm": ("state_space", {"norm": None, "parts": 1}),
    "short convolution": ("short_conv", {"parts": 1}),
    "three matrices": ("short_conv", {}),
}


def pack(n, k, kind="int4"):
    return make_matrix(n, k, 16, kind=kind, bias=True).pack()


class Linear:
    """A layer of linear attention, by its operator and as arguments of ``add_linear_attention``."""

    def __init__(self, kind, parts=None, gates=None, low=(), floats=0, **fields):
        """``floats``: how many of the projections are; 0: b and a, or b or dt alone, if ``gates`` is their type."""
        self.kind, self.has_state, self.channels = kind, kind in STATES, CHANNELS[kind]
        self.sizes = sizes = list(PARTS[kind])
        self.interleaved, self.low = fields.get("interleaved", False), low
        last = len(sizes) if kind == "short_conv" else 2  # the others are gates
        if "z_up" in low:
            sizes[1], fields["z_up"] = RANK, make_matrix(VALUES * V, RANK, 16).pack()
        if "decay_up" in low:
            sizes[2:], last = [DECAY_RANK, VALUES], 3
            fields["decay_up"] = make_matrix(VALUES * K, DECAY_RANK, 16, bias=True).pack()
        if floats:
            last = len(sizes) - floats
            fields["decay_up"] = torch.randn(VALUES * K, DECAY_RANK).to(gates)
        in_floats = 0 if gates is None else sum(sizes[last:])
        widths = sizes[:last] if in_floats else sizes
        if parts == 1 or (self.interleaved and in_floats):
            widths = [sum(widths)]
        elif parts == 2:
            widths = [sum(widths[:last]), sum(widths[last:])]
        elif parts == 6:  # queries, keys and values apart
            widths = [KEYS * K, KEYS * K, VALUES * V, *widths[1:]]
        kinds = ["int4", "int8", "int4 minimums", "int4"] * 2
        self.projections = [pack(n, HIDDEN, each) for n, each in zip(widths, kinds)]
        self.gates = torch.randn(in_floats, HIDDEN).to(gates) if in_floats else None
        self.out = pack(HIDDEN, VALUES * V if self.has_state else self.channels)
        self.conv_weight = torch.randn(self.channels, WIDTH)
        self.fields = fields
        if self.has_state:
            bias = torch.randn(VALUES, K) if "decay_up" in low else torch.randn(VALUES)
            made = layer_weights(self.conv_weight, torch.randn(VALUES), bias)
            fields |= {"key_heads": KEYS, "value_heads": VALUES, "key_size": K, "value_size": V, "norm_eps": 1e-5}
            fields |= {"a": made["a"], "dt_bias": made["dt_bias"]}
            wide = V if kind == "gated_delta" else VALUES * V
            fields.setdefault("norm", 1 + 0.1 * torch.randn(wide))
        if kind == "state_space":
            fields["d"] = torch.randn(VALUES)
        if kind != "gated_delta":
            fields["conv_bias"] = torch.randn(self.channels)
        self.conv_state = torch.full((SLOTS, WIDTH - 1, self.channels), float("nan"), dtype=torch.bfloat16)
        self.state = torch.full((SLOTS, *STATES[kind]), float("nan")) if self.has_state else None

    def add_to(self, decoder):
        decoder.add_linear_attention(
            self.projections, self.gates, self.out, self.conv_weight, kind=self.kind, **self.fields
        )

    def rows(self, x):
        """The results of the projections, in parts."""
        rows = torch.cat([matmul(x, each, HIDDEN) for each in self.projections], 1)
        if self.gates is not None:
            rows = torch.cat([rows, dots(x, self.gates.float())], 1)
        if not self.interleaved:
            return rows.split(self.sizes, 1)
        group = VALUES // KEYS
        main, gates = rows.split([sum(PARTS[self.kind][:2]), 2 * VALUES], 1)
        heads = main.view(len(x), KEYS, -1).split([K, K, group * V, group * V], 2)
        q, k, v, z = (part.flatten(1) for part in heads)
        b, a = (part.flatten(1) for part in gates.view(len(x), KEYS, -1).split(group, 2))
        return torch.cat([q, k, v], 1), z, b, a

    def alone(self, x, starts, norm_of_all_heads=rms_norm):
        """What the operator gives for whole sequences, in states of their own."""
        parts, count = self.rows(x), len(starts) - 1
        where = {
            "conv_state": torch.zeros_like(self.conv_state),
            "slots": torch.arange(count, dtype=torch.int32),
            "query_start_loc": starts,
            "fresh": torch.ones(count, dtype=torch.bool),
        }
        f = self.fields
        if self.has_state:
            where["state"] = torch.zeros_like(self.state)
            weights = {name: f[name] for name in ("a", "dt_bias", "norm", "norm_eps")}
        if self.kind == "gated_delta":
            if "decay_up" in self.low:
                qkv, z, a, b = parts
                up = f["decay_up"]
                decay = dots(a, up.float()) if up.is_floating_point() else matmul(a, up, DECAY_RANK)
                where["decay"] = decay.view(-1, VALUES, K)
                ba = b
            else:
                qkv, z, *ba = parts
                ba = torch.cat(ba, 1)
            if "z_up" in self.low:
                z = matmul(z, f["z_up"], RANK)
            heads = {"key_heads": KEYS, "value_heads": VALUES, "gate": f.get("gate", "silu")}
            heads["beta_scale"] = f.get("beta_scale", 1.0)
            y = ops.gated_delta(qkv, z, ba, self.conv_weight, **weights, **heads, **where)
        elif self.kind == "state_space":
            z, xbc, dt = parts
            norms = {name: f[name] for name in ("norm_groups", "norm_first") if f.get(name)}
            over_ranks = f.get("norm_groups") == 0
            weights["norm"] = None if over_ranks else f["norm"]
            y = ops.state_space(
                xbc, z, dt, self.conv_weight, f["conv_bias"], d=f["d"], groups=KEYS, **weights, **norms, **where
            )
            y = norm_of_all_heads(y, f["norm"]) if over_ranks else y
        else:
            y = ops.short_conv(torch.cat(parts, 1), self.conv_weight, f["conv_bias"], **where)
        return matmul(y, self.out, y.shape[1])


class Model(Steps):
    """Layers of linear attention with an MLP each, and one of attention whose heads are gated."""

    def __init__(self, names, residual=0.5, common=None):
        """common: generates the norms of rows, which all ranks have."""
        norm_of_rows = lambda: 1 + 0.2 * torch.randn(HIDDEN, generator=common)  # noqa: E731
        self.norm, self.rope, self.residual = norm_of_rows(), torch.randn(POSITIONS, 16), residual
        self.decoder = Decoder(self.norm, None, hidden_size=HIDDEN, eps=EPS)
        self.layers, self.caches = [], []
        for name in names:
            norm = {"input_norm": norm_of_rows()}
            mlp = {}
            if name != "attention":
                mlp = {"gate_up": [pack(2 * INNER, HIDDEN)], "down": pack(HIDDEN, INNER)}
                mlp["mlp_input_norm"] = norm_of_rows()
            layer = {"name": name, "norm": norm["input_norm"], "mlp": mlp}
            attention = {}
            if name == "attention":
                qkv = [pack(2 * HEADS * SIZE, HIDDEN), pack(2 * KV * SIZE, HIDDEN)]
                attention = {
                    "qkv": qkv, "out": pack(HIDDEN, HEADS * SIZE), "heads": HEADS, "kv_heads": KV, "head_size": SIZE,
                    "scale": SIZE**-0.5, "gated": True, "rope": 0, "q_norm": torch.rand(SIZE),
                    "k_norm": torch.rand(SIZE),
                    "qkv_bias": torch.randn(2 * HEADS * SIZE + 2 * KV * SIZE),
                }  # fmt: skip
                block = w4a8.attention_block_bytes("int8", SIZE, SIZE)
                self.caches.append(torch.full((9, KV, 2 * block), 255, dtype=torch.uint8))
            self.decoder.add_layer(**attention, **mlp, **norm, residual=residual)
            layer["attention"] = attention
            if name in LAYERS:
                kind, how = LAYERS[name]
                layer["linear"] = Linear(kind, **how)
                layer["linear"].add_to(self.decoder)
            self.layers.append(layer)
        self.linear = [layer["linear"] for layer in self.layers if "linear" in layer]
        self.seen = {}  # tokens of each sequence so far

    def slots(self, count):
        return torch.arange(SLOTS - 1, SLOTS - 1 - count, -1, dtype=torch.int32)

    def states(self, lengths, new, **change):
        found = {
            "conv_states": [each.conv_state for each in self.linear],
            "states": [each.state for each in self.linear if each.has_state],
            "slots": [self.slots(len(lengths))],
            "fresh": torch.tensor([n == f for n, f in zip(lengths, new)]),
        }
        return States(**found | change)

    def step(self, x, lengths, fresh, rows=None, normed=None, threads=0):
        return self.decoder.step(
            x, self.positions(lengths, fresh), self.caches, self.tables(lengths, fresh), [self.rope], rows, normed,
            threads, self.states(lengths, fresh),
        )  # fmt: skip

    def one_by_one(self, x, lengths):
        tables, angles = self.tables(lengths, lengths), self.rope[self.positions(lengths, lengths)]
        for layer in self.layers:
            normed = rms_norm(x, layer["norm"])
            if "linear" in layer:
                y = layer["linear"].alone(normed, tables[2], self.norm_of_all_heads)
                x = x + self.residual * self.of_all_ranks(y)
            elif layer["attention"]:
                x = x + self.residual * self.attention(layer["attention"], normed, tables, angles)
            if layer["mlp"]:
                ids = torch.zeros(len(x), 1, dtype=torch.int32)
                (both,), down = layer["mlp"]["gate_up"], layer["mlp"]["down"]
                normed = rms_norm(x, layer["mlp"]["mlp_input_norm"])
                y = w4a8.dynamic_4bit_int_moe(
                    normed, ids, torch.ones(len(x), 1), both[None], down[None], HIDDEN, INNER, 2 * INNER, 0, False, 0
                )
                x = x + self.residual * self.of_all_ranks(y)
        return rms_norm(x, self.norm)

    def of_all_ranks(self, y):
        """The sum of what each rank makes."""
        return y

    def norm_of_all_heads(self, rows, weight):
        return rms_norm(rows, weight)

    def attention(self, layer, x, tables, angles):
        rows = torch.cat([matmul(x, each, HIDDEN) for each in layer["qkv"]], 1) + layer["qkv_bias"]
        q, k, v = rows.split([2 * HEADS * SIZE, KV * SIZE, KV * SIZE], 1)
        q, gate = q.view(-1, HEADS, 2 * SIZE).split(SIZE, 2)
        q = rotate(rms_norm(q.contiguous(), layer["q_norm"]), angles, False)
        k = rotate(rms_norm(k.reshape(-1, KV, SIZE), layer["k_norm"]), angles, False)
        cache = torch.zeros_like(self.caches[0])
        w4a8.paged_attention_write(k, v.reshape(-1, KV, SIZE), cache, *tables)
        y = w4a8.paged_attention(q, cache, *tables, SIZE**-0.5).flatten(1)
        return matmul(y * sigmoid(gate.flatten(1)), layer["out"], HEADS * SIZE)


def sigmoid(x):
    """The sigmoid of gated_delta's gate, whose other factor is one here.

    All channels are 1024 behind the convolution and its SiLU, a head has 16 of them, and beta is 1: the state's result
    is 256 in each channel, and the norm's 1, without any rounding.
    """
    tokens = x.numel() // 16
    kernel = torch.tensor([[0.0, 1.0]]).expand(48, 2)
    out = ops.gated_delta(
        torch.full((tokens, 48), 1024.0), x.reshape(tokens, 16), torch.full((tokens, 2), 100.0), kernel, torch.ones(1),
        torch.zeros(1), torch.ones(16), torch.zeros(tokens, 1, 48), torch.zeros(tokens, 1, 16, 16),
        torch.arange(tokens, dtype=torch.int32), torch.arange(tokens + 1, dtype=torch.int32),
        torch.ones(tokens, dtype=torch.bool), key_heads=1, value_heads=1, norm_eps=1e-30, gate="sigmoid",
    )  # fmt: skip
    assert torch.allclose(out.double().flatten(), x.double().sigmoid().flatten(), rtol=1e-6, atol=0)
    return out.view(x.shape)


@pytest.mark.parametrize("name", LAYERS)
def test_is_the_operator_alone(name):
    lengths = [100, 33, 7]
    x = torch.randn(sum(lengths), HIDDEN)
    model = Model([name])
    expected = model.one_by_one(x, lengths)
    assert expected.abs().max() > 0.5
    assert_same_bits(model.step(x, lengths, lengths), expected)


MIXED = [
    "as one", "attention", "nothing", "state space", "short convolution", "six matrices", "attention", "interleaved",
    "decays of channels", "z of low rank", "decays of floats",
]  # fmt: skip


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_bits_depend_on_nothing_else(threads):
    """Layers of all kinds: one token, chunks, several sequences in a call, and any number of threads."""
    model, x = Model(MIXED), torch.randn(130, HIDDEN)
    expected = model.one_by_one(x, [90, 40])
    assert expected.isfinite().all()
    model.check_in_pieces(x, expected, threads)


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels(kernel):
    model = Model(MIXED)
    x = torch.randn(11, HIDDEN)
    expected = model.one_by_one(x, [11])
    before = w4a8.active_kernel()
    w4a8.use_kernel(kernel)
    try:
        assert_same_bits(model.step(x[:10], [10], [10]), expected[:10])
        assert_same_bits(model.step(x[10:], [11], [1]), expected[10:])
    finally:
        w4a8.use_kernel(before)


def test_a_sequence_without_tokens_keeps_its_states():
    model, x = Model(MIXED), torch.randn(9, HIDDEN)
    expected = model.one_by_one(x, [5, 4])
    model.step(torch.cat([x[:3], x[5:7]]), [3, 2], [3, 2])
    assert_same_bits(model.step(x[3:5], [5, 2], [2, 0]), expected[3:5])
    assert_same_bits(model.step(x[7:], [5, 4], [0, 2]), expected[7:])


def test_guessed_tokens_change_no_bit():
    """A prompt, then steps with wrong tokens behind the right ones."""
    model, x, wrong = Model(MIXED), torch.randn(12, HIDDEN), torch.randn(2, HIDDEN)
    expected = model.one_by_one(x, [12])
    where = {"out_slots": [torch.tensor([[4, 2, 6]], dtype=torch.int32)], "slots": [torch.tensor([4]).int()]}
    before = [each.conv_state for each in model.linear]
    where["conv_states"] = [each.new_full((SLOTS, each.shape[1] + 2, each.shape[2]), torch.nan) for each in before]
    at, accepted = 0, 0
    for take, guesses in ((5, 0), (1, 2), (2, 1), (3, 0), (1, 1)):
        length, new = [at + take + guesses], [take + guesses]
        states = model.states(length, new, accepted=torch.tensor([accepted]).int(), **where)
        given, at_once = torch.cat([x[at : at + take], wrong[:guesses]]), model.positions(length, new)
        tables = model.tables(length, new)
        got = model.decoder.step(given, at_once, model.caches, tables, [model.rope], states=states)
        assert_same_bits(got[:take], expected[at : at + take])
        at, accepted = at + take, take if accepted else 1


def test_slots_of_each_layer():
    model, x = Model(MIXED), torch.randn(6, HIDDEN)
    expected = model.step(x, [6], [6])
    for at in (3, 6):
        slots = [torch.tensor([(at + i) % SLOTS], dtype=torch.int32) for i in range(len(model.linear))]
        states = model.states([6], [6], slots=slots)
        got = model.decoder.step(x, torch.arange(6), model.caches, model.tables([6], [6]), [model.rope], states=states)
        assert_same_bits(got, expected)
    for each, slot in zip(model.linear, slots):
        assert_same_bits(each.conv_state[slot.item()], each.conv_state[SLOTS - 1])


def test_experts_beside_linear_attention():
    """With a layer of experts alone behind a layer of linear attention alone, as Nemotron-H has them."""
    model, x = Model([]), torch.randn(5, HIDDEN)
    linear = Linear("state_space")
    w13, w2 = (torch.stack([pack(*size) for _ in range(4)]) for size in ((2 * INNER, HIDDEN), (HIDDEN, INNER)))
    router = torch.randn(4, HIDDEN)
    model.decoder.add_layer(input_norm=model.norm)
    linear.add_to(model.decoder)
    model.decoder.add_layer(mlp_input_norm=model.norm)
    model.decoder.add_experts(router, None, w13, w2, top_k=2, renormalize=True)
    model.linear = [linear]
    hidden = x + linear.alone(rms_norm(x, model.norm), torch.tensor([0, 5], dtype=torch.int32))
    normed = rms_norm(hidden, model.norm)
    weights, ids = w4a8.topk_routing(dots(normed, router), 2, True)
    hidden = hidden + w4a8.dynamic_4bit_int_moe(normed, ids, weights, w13, w2, HIDDEN, INNER, 2 * INNER, 0, False, 0)
    assert_same_bits(model.step(x, [5], [5]), rms_norm(hidden, model.norm))


class Both(Steps):
    """A layer with attention and linear attention side by side, then an MLP.

    Args:
        scaled: matrices have the factors in their scales and biases; else the decoder has them.
    """

    NAMES = ("qkv", "out", "projections", "linear_out", "gate_up", "down")

    def __init__(self, scaled, factors=True):
        torch.manual_seed(3)
        columns = {name: [HIDDEN] for name in self.NAMES}
        columns |= {"qkv": [HEADS * SIZE, KV * SIZE, KV * SIZE], "gate_up": [INNER, INNER]}
        columns["projections"] = PARTS["state_space"]
        inputs, packed = {"out": HEADS * SIZE, "linear_out": VALUES * V, "down": INNER}, {}
        # Powers of two are exact.
        self.factors = {name: torch.randint(-3, 4, (sum(columns[name]),)).float().exp2() for name in self.NAMES}
        for name in self.NAMES:
            matrices = [make_matrix(n, inputs.get(name, HIDDEN), 16, bias=True) for n in columns[name]]
            parts = self.factors[name].split(columns[name]) if scaled else [torch.ones(1)] * len(matrices)
            packed[name] = [
                each.pack(scales_zeros=each.scales * f[:, None], bias=each.bias * f) for each, f in zip(matrices, parts)
            ]
        linear = Linear("state_space")
        self.linear, self.rope, norm = [linear], torch.randn(POSITIONS, 16), 1 + 0.2 * torch.randn(HIDDEN)
        self.decoder = Decoder(norm, None, hidden_size=HIDDEN, eps=EPS)
        self.packed, self.norm = packed, norm
        numbers = {"heads": HEADS, "kv_heads": KV, "head_size": SIZE, "scale": SIZE**-0.5, "rope": 0}
        norms = {"input_norm": norm, "mlp_input_norm": norm}
        self.decoder.add_layer(
            packed["qkv"], *packed["out"], packed["gate_up"], *packed["down"], **numbers, **norms, residual=0.5
        )
        self.decoder.add_linear_attention(
            packed["projections"], None, *packed["linear_out"], linear.conv_weight, kind="state_space", **linear.fields
        )
        for name in self.NAMES if factors and not scaled else ():
            self.decoder.set_factors(name, self.factors[name])
        block = w4a8.attention_block_bytes("int8", SIZE, SIZE)
        self.caches = [torch.full((9, KV, 2 * block), 255, dtype=torch.uint8)]

    slots, states, step = Model.slots, Model.states, Model.step


def test_attention_beside_linear_attention():
    """Both of the same normed row, the state first."""
    model, x = Both(scaled=True), torch.randn(120, HIDDEN)
    normed, tables = rms_norm(x, model.norm), model.tables([80, 40], [80, 40])
    linear = model.linear[0]
    linear.projections, (linear.out,) = model.packed["projections"], model.packed["linear_out"]
    expected = x + 0.5 * linear.alone(normed, tables[2])
    angles = model.rope[model.positions([80, 40], [80, 40])]
    q, k, v = (matmul(normed, each, HIDDEN).view(120, -1, SIZE) for each in model.packed["qkv"])
    cache = torch.zeros_like(model.caches[0])
    w4a8.paged_attention_write(rotate(k, angles, False), v, cache, *tables)
    y = w4a8.paged_attention(rotate(q, angles, False), cache, *tables, SIZE**-0.5).flatten(1)
    expected = expected + 0.5 * matmul(y, *model.packed["out"], HEADS * SIZE)
    gate, up = (matmul(rms_norm(expected, model.norm), each, HIDDEN) for each in model.packed["gate_up"])
    h = gate.double().sigmoid() * gate * up
    expected = expected + 0.5 * matmul(h.float(), *model.packed["down"], INNER)
    got = model.step(x, [80, 40], [80, 40])
    # One step of the int8 of h, at a tie.
    torch.testing.assert_close(got, rms_norm(expected, model.norm), rtol=0, atol=2e-2)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_factors_of_products(threads):
    """The bits of matrices that have them."""
    x = torch.randn(130, HIDDEN)
    expected = Both(scaled=True).step(x, [90, 40], [90, 40])
    assert expected.isfinite().all()
    Both(scaled=False).check_in_pieces(x, expected, threads)
    for name in Both.NAMES:  # each of them matters
        model = Both(scaled=False)
        model.decoder.set_factors(name, torch.ones_like(model.factors[name]))
        assert not torch.equal(model.step(x, [90, 40], [90, 40]), expected)
