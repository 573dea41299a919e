"""hypothesis: steps of a decoder with hostile tables, lengths, positions, strides and windows, and with tensors that
are replaced, freed or resized between steps. A step that is as it should be gives the right rows, bit for bit. Others
give rows, or an error that begins with the operator's name, after which a text goes on where it was. Under ASan, too.
"""

import gc
from contextlib import suppress

import pytest
import torch
from common import assert_same_bits
from test_decoder import HIDDEN, KV, MODELS, POSITIONS, SIZE, Model
from test_decoder_memory import storage_of

import w4a8

pytest.importorskip("hypothesis")
from fuzzing import fuzz
from hypothesis import strategies as st

HOSTILE = [-(2**63), -(2**62), -(2**31), -129, -1, 0, 1, 2, 7, 8, 9, 127, 128, 129, POSITIONS, POSITIONS + 1]
HOSTILE += [2**20, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1]
WINDOWS = [0, 1, 40, 128, 2**31, 2**63 - 129, 2**63 - 1]
PAGES, PAGE, WIDE = 9, 128, 5  # pages of a cache, tokens of a page, columns of a table


class Texts:
    """Sequences with their tokens so far and their pages, and the arguments of steps."""

    def __init__(self, model, count):
        self.model, self.rows = model, [torch.zeros(0, HIDDEN) for _ in range(count)]
        pages = torch.randperm(PAGES)[: 2 * count].view(count, 2)
        self.table = torch.full((count, WIDE), 2**31 - 1, dtype=torch.int32)  # pages that no sequence has
        self.table[:, :2] = pages

    def next(self, fresh):
        """The arguments of a step of so many new tokens of each sequence, and the right result."""
        new = [torch.randn(n, HIDDEN) for n in fresh]
        self.after = [torch.cat(pair) for pair in zip(self.rows, new)]
        lengths = [len(rows) for rows in self.after]
        expected = self.model.one_by_one(torch.cat(self.after), lengths, lengths).split(lengths)
        arguments = {
            "hidden": torch.cat(new),
            "positions": torch.cat([torch.arange(n - f, n) for n, f in zip(lengths, fresh)]),
            "caches": list(self.model.caches),
            "block_tables": [self.table],
            "seq_lens": torch.tensor(lengths, dtype=torch.int32),
            "query_start_loc": torch.tensor([0, *fresh], dtype=torch.int32).cumsum(0, dtype=torch.int32),
            "ropes": [self.model.rope, *self.model.more_ropes],
            "rows": None,
            "normed": None,
            "threads": 0,
            "layer_inputs": self.model.layer_inputs(torch.cat(new)),
        }
        return arguments, torch.cat([rows[len(rows) - f :] for rows, f in zip(expected, fresh)])

    def took(self):
        self.rows = self.after


def run(decoder, arguments):
    a = dict(arguments)
    tables = (a.pop("block_tables"), a.pop("seq_lens"), a.pop("query_start_loc"))
    return decoder.step(a.pop("hidden"), a.pop("positions"), a.pop("caches"), tables, **a)


def numbers(tensor, index, value):
    """A copy with a hostile number in one place; numbers that the type has not stay away."""
    changed = tensor.clone()
    info = torch.iinfo(tensor.dtype)
    if tensor.numel():
        changed.view(-1)[index % tensor.numel()] = max(info.min, min(info.max, value))
    return changed


def narrow(table, width):
    """A table at the same address with rows of another width, as another layer's."""
    return table.view(-1)[: len(table) * width].view(len(table), width)


@st.composite
def changes(draw):
    """What a caller should not do to the arguments of one step: (name, function of the arguments)."""
    index, value = draw(st.integers(0, 99)), draw(st.sampled_from(HOSTILE))

    def number(name):
        def change(a):
            if isinstance(a[name], list):
                a[name] = [numbers(each, index, value) for each in a[name]]
            else:
                a[name] = numbers(a[name], index, value)

        return change

    def cache(make):
        def change(a):
            place = index % len(a["caches"])
            a["caches"][place] = make(a["caches"][place])

        return change

    def tables_of_layers(a):
        table, count = a["block_tables"][0], len(a["caches"])
        a["block_tables"] = [table, *(narrow(table, 1 + (index + i) % WIDE) for i in range(count - 1))]

    def rows(a):
        a["rows"] = torch.tensor([0, value])

    def normed(a):
        a["normed"] = torch.zeros(len(a["hidden"]) + index % 3 - 1, HIDDEN)

    def threads(a):
        a["threads"] = value

    def aliased(a):
        memory = a["caches"][0].view(-1)[: 4 * a["seq_lens"].numel()].view(torch.int32)
        a["seq_lens"] = memory.copy_(a["seq_lens"])

    def stepped(a):
        a["positions"] = a["positions"].repeat_interleave(2)[::2]
        a["hidden"] = a["hidden"].T.contiguous().T
        a["seq_lens"] = a["seq_lens"].expand(1 + index % 2, -1)[-1]

    def freed(name):
        def change(a):
            tensor = (a[name][0] if isinstance(a[name], list) else a[name]).clone()
            a[name] = [tensor, *a[name][1:]] if isinstance(a[name], list) else tensor
            storage_of(tensor).resize_(0)

        return change

    how = {
        "nothing": lambda a: None,
        **{name: number(name) for name in ("positions", "block_tables", "seq_lens", "query_start_loc")},
        "fewer pages": cache(lambda each: each[: index % PAGES]),
        "other heads": cache(lambda each: each[:, :1]),
        "one page": cache(lambda each: each[:1].expand(PAGES, -1, -1)),
        "one head": cache(lambda each: each[:, :1].expand(-1, KV, -1)),
        "shorter pages": cache(lambda each: each[:, :, : each.shape[2] // 2]),
        "cut pages": cache(lambda each: each[:, :, :index]),
        "tables of layers": tables_of_layers,
        "no layers": lambda a: a.update(caches=a["caches"][1:]),
        "rope of fewer positions": lambda a: a.update(ropes=[each[:index] for each in a["ropes"]]),
        "rope without columns": lambda a: a.update(ropes=[each[:, :0] for each in a["ropes"]]),
        "rows": rows,
        "normed": normed,
        "threads": threads,
        "lengths in a cache": aliased,
        "strides": stepped,
        **{f"{name} freed": freed(name) for name in ("hidden", "positions", "block_tables", "seq_lens", "ropes")},
    }
    name = draw(st.sampled_from(sorted(how)))
    return name, how[name]


def replaced(tensor):
    tensor.data = torch.zeros_like(tensor)


def other_storage(tensor):
    tensor.set_(torch.zeros_like(tensor))


def emptied(tensor):
    with suppress(RuntimeError):  # memory of numpy cannot be resized
        storage_of(tensor).resize_(0)


SAME = ("nothing", "rows", "normed", "threads", "strides")  # changes after which the result is the same
LIVES = {"nothing": lambda tensor: None, "replaced": replaced, "set_": other_storage, "emptied": emptied}


def weights_of(model):
    """Tensors that the decoder reads where they are, and vectors that it has copies of or keeps."""
    found = [model.norm]
    for layer in model.layers:
        for value in (*layer.values(), *layer.get("own", {}).values()):
            found += [each for each in (value if isinstance(value, list) else [value]) if torch.is_tensor(each)]
    return found


@fuzz(data=st.data())
def test_steps(data):
    name, window = data.draw(st.sampled_from(sorted(MODELS))), data.draw(st.sampled_from(WINDOWS))
    given = {"layers": data.draw(st.integers(1, 2)), **MODELS[name], "window": window}
    model = Model(**given)
    texts = Texts(model, data.draw(st.integers(1, 3)))
    for _ in range(data.draw(st.integers(1, 4))):
        fresh = [data.draw(st.integers(0 if i else 1, 9)) for i in range(len(texts.rows))]
        if max(map(len, texts.rows)) + max(fresh) > 2 * PAGE:
            break
        arguments, expected = texts.next(fresh)
        what, change = data.draw(changes())
        hostile = {key: list(value) if isinstance(value, list) else value for key, value in arguments.items()}
        before = [cache.clone() for cache in model.caches]
        change(hostile)
        try:
            found = run(model.decoder, hostile)
        except (RuntimeError, ValueError) as error:
            assert what != "nothing" and "w4a8::decoder_step" in str(error), (what, str(error))
            if what == "lengths in a cache":
                model.caches[0].copy_(before[0])
        else:
            if what in SAME:
                wanted = hostile["rows"]
                assert_same_bits(found, expected if wanted is None else expected[wanted])
            else:  # other numbers that a caller may give
                assert found.shape[1:] == expected.shape[1:]
                for cache, old in zip(model.caches, before):
                    cache.copy_(old)
        # Whatever came of it: nothing that was there is lost.
        assert_same_bits(run(model.decoder, arguments), expected)
        texts.took()
    life = data.draw(st.sampled_from(sorted(LIVES)))
    weights = weights_of(model)
    arguments, expected = texts.next([1] * len(texts.rows))
    tensor = weights[data.draw(st.integers(0, len(weights) - 1))]
    LIVES[life](tensor)
    gc.collect()
    taken = [torch.full((size,), 255, dtype=torch.uint8) for size in range(64, 8192, 64)]  # what was freed
    try:
        assert_same_bits(run(model.decoder, arguments), expected)
    except RuntimeError as error:
        assert life == "emptied" and "w4a8::decoder_step" in str(error), (life, str(error))
    del taken


@fuzz(
    window=st.sampled_from(HOSTILE),
    soft_cap=st.sampled_from([0.0, 1.0, -1.0, float("nan"), float("inf"), 1e39, 1e-46]),
    scale=st.sampled_from([0.1, 0.0, -1.0, float("nan"), float("inf"), 1e39]),
    residual=st.sampled_from([1.0, 0.0, float("nan"), float("-inf"), 1e39]),
    rope=st.sampled_from([-(2**31), -1, 0, 1, 2**31]),
    query_rope=st.sampled_from([None, -(2**31), -1, 0, 1, 2**31]),
    chunk=st.sampled_from(HOSTILE),
    alpha=st.sampled_from([0.8, 0.0, -1.0, float("nan"), float("inf"), 1e39]),
    beta=st.sampled_from([0.8, 0.0, -1.0, float("nan"), float("-inf"), 1e39]),
)
def test_numbers_of_a_layer(window, soft_cap, scale, residual, rope, query_rope, chunk, alpha, beta):
    """A layer is added, or refused with the number's name; what was added runs."""
    model = Model(layers=1)
    parts = model.layers[0]
    given = {"window": window, "soft_cap": soft_cap, "scale": scale, "residual": residual, "rope": rope}
    given |= {"alpha": alpha, "beta": beta, "query_rope": query_rope, "chunk": chunk}
    decoder = w4a8.decoder.Decoder(model.norm, None, hidden_size=HIDDEN, eps=1e-5)
    try:
        decoder.add_layer(
            parts["qkv"], parts["out"], parts["gate_up"], parts["down"], heads=6, kv_heads=KV, head_size=SIZE,
            kind=model.kind, activation_kind=8, **given,
        )  # fmt: skip
    except (RuntimeError, ValueError, TypeError) as error:
        assert any(name in str(error) for name in given), str(error)
        return
    assert window >= 0 and chunk >= 0 and abs(scale) < 1e38 and abs(residual) < 1e38 and 0 <= soft_cap < 1e38
    assert abs(alpha) < 1e38 and abs(beta) < 1e38
    lengths, tables = [3], model.tables([3], [3])
    try:
        found = decoder.step(torch.randn(3, HIDDEN), torch.arange(3), model.caches, tables, [model.rope])
    except RuntimeError as error:
        assert max(rope, query_rope or 0) > 0 and "rope" in str(error), str(error)
    else:
        assert found.shape == (sum(lengths), HIDDEN) and found.isfinite().all()
