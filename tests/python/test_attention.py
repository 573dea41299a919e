"""paged_attention beside exact attention in float64, and what the operators refuse. That all kernels give the bits of
docs/numerics.md is in tests/cpp/attention_test.cpp."""

import math

import numpy as np
import pytest
import torch
from attention_data import Sequences
from common import DTYPES, KERNELS, assert_same_bits

import w4a8

KINDS = ["int8", "bfloat16", "latent"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "case",
    [
        {"lengths": [1], "fresh": [1]},
        {"lengths": [300, 65, 2], "fresh": [3, 65, 1]},
        {"lengths": [700], "fresh": [2], "size": 128, "group": 8},
        {"lengths": [150], "fresh": [150], "size": 80, "value_size": 48, "heads": 1},
        {"lengths": [200], "fresh": [5], "window": 40},
        {"lengths": [200], "fresh": [5], "window": 130, "page_blocks": 1},
        {"lengths": [200, 90], "fresh": [12, 90], "chunk": 48},
        {"lengths": [140], "fresh": [9], "causal": False},
        {"lengths": [140], "fresh": [9], "causal": False, "window": 30},
        {"lengths": [90], "fresh": [4], "soft_cap": 5.0},
        {"lengths": [90], "fresh": [4], "sinks": torch.tensor([0.5, -3.0, 2.0, 9.0, 0.0, 1.0])},
    ],
)
def test_is_near_exact_attention(kind, case):
    sequences = Sequences(kind=kind, **case).write()
    exact, bound = sequences.exact()
    got = sequences.attend().double().numpy()
    assert got.shape == exact.shape
    assert (np.abs(got - exact) <= bound).all(), (np.abs(got - exact) / bound).max()
    assert np.median(bound) < 0.12  # of a use: values are about 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_types(kind, dtype):
    """Numbers of a narrower type are exact in the wider one: the same, rounded once more."""
    narrow = Sequences([100], [7], dtype=dtype, kind=kind).write()
    wide = Sequences([100], [7], dtype=dtype, kind=kind)
    wide.key, wide.value, wide.query = wide.key.float(), wide.value.float(), wide.query.float()
    wide.write()
    assert narrow.attend().dtype == dtype
    assert_same_bits(narrow.attend(), wide.attend().to(dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_strides(kind):
    sequences = Sequences([100, 30], [7, 1], kind=kind).write()
    plain = sequences.attend()
    strided = Sequences([100, 30], [7, 1], kind=kind)
    pages, heads, width = strided.cache.shape
    strided.cache = torch.full((heads, pages, width + 64), 255, dtype=torch.uint8)[..., :width].transpose(0, 1)
    both = torch.cat([strided.key, strided.value], -1)  # as one projection gives them
    strided.key, strided.value = both[..., : strided.size], both[..., strided.size :]
    strided.query = strided.query.transpose(0, 1).contiguous().transpose(0, 1)
    strided.table = strided.table.t().contiguous().t()
    strided.write()
    assert_same_bits(strided.attend(), plain)
    spread = torch.zeros(*sequences.query.shape, 2)
    spread[..., 0] = sequences.query
    sequences.query = spread[..., 0]
    assert_same_bits(sequences.attend(), plain)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_kernel_and_number_of_threads(kind, threads):
    expected = Sequences([1500, 40], [2, 40], kind=kind).write().attend()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for kernel in KERNELS:
            with w4a8.use_kernel(kernel):
                assert_same_bits(Sequences([1500, 40], [2, 40], kind=kind).write().attend(), expected, kernel)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", KINDS)
def test_token_by_token(kind):
    """What a prompt gives at once is what its tokens give one by one, beside another sequence."""
    whole = Sequences([150, 70], [150, 70], kind=kind).write().attend()
    sequences = Sequences([150, 70], [150, 70], kind=kind)
    for t in range(150):
        begin, end = [t, min(t, 70)], [t + 1, min(t + 1, 70)]
        sequences.write(begin, end)
        out = sequences.attend(begin, end)
        assert_same_bits(out[0], whole[t])
        if t < 70:
            assert_same_bits(out[1], whole[150 + t])


LARGE = [90, 2**31 - 1, 2**31, 2**62, 2**63 - 91, 2**63 - 90, 2**63 - 2, 2**63 - 1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [True, False])
def test_a_window_that_all_tokens_are_in_is_none(kind, causal):
    expected = Sequences([90, 70], [90, 5], kind=kind, causal=causal).write().attend()
    for window in LARGE:
        sequences = Sequences([90, 70], [90, 5], kind=kind, causal=causal, window=window).write()
        assert_same_bits(sequences.attend(), expected, f"window {window}")


@pytest.mark.parametrize("first", [0, 1])
def test_pages_shared_within_a_call(first):
    """A sequence continues pages that another one of the same call is writing, whichever comes first."""
    alone = Sequences([300, 300], [300, 300], heads=4, page_blocks=1, seed=3)
    for part in (alone.key, alone.value, alone.query):
        part[300 : 300 + 192] = part[:192]
    expected = alone.write().attend()
    shared = Sequences([300, 300], [300, 300], heads=4, page_blocks=1, seed=3)
    shared.key, shared.value, shared.query = alone.key, alone.value, alone.query
    other = 1 - first
    shared.table[other, :3] = shared.table[first, :3]
    begin = [192, 192]
    begin[first] = 0
    shared.write(begin, [300, 300])
    out = shared.attend(begin, [300, 300])
    wanted = [expected[:300], expected[300:]]
    wanted[other] = wanted[other][192:]
    assert_same_bits(out, torch.cat(wanted))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", ["key", "value", "query"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_not_finite(kind, part, dtype):
    """NaN, also of all ones, infinity, and what bfloat16 would round to it: NaN for the rows that see it, no bit of the
    others."""
    ones = {torch.float32: 0x7FFFFFFF, torch.bfloat16: 0x7FFF, torch.float16: 0x7FFF}[dtype]
    whole = torch.int32 if dtype == torch.float32 else torch.int16
    bad = [
        torch.tensor(ones, dtype=whole).view(dtype),
        torch.tensor(math.nan).to(dtype),
        torch.tensor(-math.inf).to(dtype),
    ]
    if dtype == torch.float32:
        bad += [torch.tensor(x) for x in (float.fromhex("0x1.ffp127"), -float.fromhex("0x1.fffffep127"))]
    expected = Sequences([60], [60], dtype=dtype, kind=kind, window=20).write().attend()
    seen = torch.zeros(60, 6, dtype=torch.bool)  # by what is bad in head 1 of token 25
    seen[slice(25, 26) if part == "query" else slice(25, 45), 1 if part == "query" else slice(3, 6)] = True
    for kernel in KERNELS:
        for number in bad:
            sequences = Sequences([60], [60], dtype=dtype, kind=kind, window=20)
            getattr(sequences, part)[25, 1, 7] = number
            with w4a8.use_kernel(kernel):
                out = sequences.write().attend()
            assert torch.equal(out.isnan(), seen[..., None].expand_as(out)), (kernel, number)
            assert_same_bits(out[~seen], expected[~seen], f"{kernel}, {number}")


def test_bytes_of_a_block():
    assert w4a8.attention_block_bytes("int8", 128, 128) == 64 * 264 + 256
    assert w4a8.attention_block_bytes("int8", 80, 80) == 64 * 168 + 192
    assert w4a8.attention_block_bytes("bfloat16", 128, 64) == 64 * 384
    assert w4a8.attention_block_bytes("latent", 576, 512) == 64 * 1152
    with pytest.raises(ValueError, match="kind is 'fp8', expected 'int8', 'bfloat16' or 'latent'"):
        w4a8.attention_block_bytes("fp8", 128, 128)


def arguments():
    sequences = Sequences([100, 30], [2, 1])
    lens, starts, rows = sequences.call([98, 29], [100, 30])
    shared = {"cache": sequences.cache, "block_table": sequences.table, "seq_lens": lens, "query_start_loc": starts}
    write = {"key": sequences.key[rows], "value": sequences.value[rows], **shared}
    return write, {"query": sequences.query[rows], **shared, "scale": 0.125}


ints = lambda *numbers: torch.tensor(numbers, dtype=torch.int32)  # noqa: E731
BOTH = [
    ({"cache": torch.zeros(4, 2, 100, dtype=torch.uint8)}, "cache has 100 bytes for each page and head, expected a mu"),
    ({"cache": torch.zeros(4, 2, 0, dtype=torch.uint8)}, "cache has 0 bytes for each page and head"),
    ({"cache": torch.zeros(4, 2, 17408)}, "cache has dtype Float, expected uint8 or int8"),
    ({"cache": torch.zeros(4, 17408, dtype=torch.uint8)}, "cache has 2 dimensions, expected [pages, key heads, bytes]"),
    ({"block_table": torch.zeros(2, 1)}, "block_table has dtype Float, expected int32"),
    ({"block_table": torch.zeros(2, 1, dtype=torch.int64)}, "block_table has dtype Long, expected int32"),
    ({"block_table": ints(0, 1)}, "block_table has 1 dimensions, expected 2"),
    ({"block_table": ints(0, 1, 2)[:, None]}, "block_table has 3 rows, expected 2, the elements of seq_lens"),
    ({"block_table": ints(0, 9)[:, None]}, "block_table of sequence 1 has page 9 at 0, expected 0..2, the pages of"),
    ({"block_table": ints(-1, 1)[:, None]}, "block_table of sequence 0 has page -1 at 0, expected 0..2, the pages of"),
    ({"seq_lens": ints(1, 30)}, "seq_lens of sequence 0 is 1, expected 2 (its tokens of this call) to 128 (what block"),
    ({"seq_lens": ints(129, 30)}, "seq_lens of sequence 0 is 129, expected 2"),
    ({"seq_lens": ints(100)}, "block_table has 2 rows, expected 1, the elements of seq_lens"),
    ({"query_start_loc": ints(0, 2)}, "query_start_loc has 2 elements, expected 3, one more than seq_lens"),
    ({"query_start_loc": ints(1, 2, 3)}, "query_start_loc begins with 1, expected 0"),
    ({"query_start_loc": ints(0, 2, 4)}, "query_start_loc ends with 4, expected 3, the number of tokens"),
    ({"query_start_loc": ints(0, 4, 3)}, "query_start_loc falls from 4 to 3 at sequence 1, expected ascending"),
    ({"kind": "fp8"}, "kind is 'fp8', expected 'int8', 'bfloat16' or 'latent'"),
    # No page, and more tokens in all than an int64 counts.
    (
        {
            "cache": torch.zeros(0, 2, 2**48 * w4a8.attention_block_bytes("int8", 64, 64), dtype=torch.uint8),
            "block_table": torch.zeros(2, 1024, dtype=torch.int32),
        },
        "block_table of sequence 0 has page 0 at 0, expected 0..-1, the pages of",
    ),
    ({"window": -1}, "window is -1, expected 0 (none) or more"),
]
cache = lambda pages, heads: torch.zeros(  # noqa: E731
    pages, heads, 2 * w4a8.attention_block_bytes("int8", 64, 64), dtype=torch.uint8
)
WRITE = [
    ({"key": torch.zeros(3, 2, 72)}, "the head size of the keys is 72, expected a multiple of 16 in 16..512"),
    ({"key": torch.zeros(3, 128)}, "key has shape [3, 128], expected [tokens, heads, head size]"),
    ({"key": torch.zeros(3, 2, 64).double()}, "key has dtype Double, expected float32, bfloat16 or float16"),
    ({"value": torch.zeros(3, 2, 64).half()}, "value has dtype Half, expected Float, that of key"),
    ({"value": torch.zeros(2, 2, 64)}, "value has shape [2, 2, 64], expected the tokens and heads of key, [3, 2, 64]"),
    ({"key": torch.zeros(3, 3, 64), "value": torch.zeros(3, 3, 64)}, "cache has 2 heads, expected 3, those of key"),
    ({"key": torch.zeros(3, 2, 64, requires_grad=True)}, "key requires gradients, which a cache does not keep"),
    (
        {"cache": cache(1, 2).expand(3, 2, -1)},
        "cache has stride 0 in dimension 0, expected at least 1: it is written",
    ),
    (
        {"cache": cache(3, 1).expand(3, 2, -1)},
        "cache has stride 0 in dimension 1, expected at least 1: it is written",
    ),
    (
        {"cache": cache(4, 1).as_strided((3, 2, 17664), (17664, 17664, 1))},
        "cache has stride 17664 in dimension 0, expec",
    ),
    ({"kind": "latent"}, "value is other memory than key, expected key[..., :V] for a cache of kind 'latent'"),
]
ATTEND = [
    ({"query": torch.zeros(3, 5, 64)}, "query has 5 heads, expected a multiple of 2, those of cache"),
    ({"query": torch.zeros(3, 2, 64, dtype=torch.int8)}, "query has dtype Char, expected float32, bfloat16 or float16"),
    ({"value_size": 40}, "the head size of the values is 40, expected a multiple of 16 in 16..512"),
    ({"soft_cap": -1.0}, "soft_cap is -1, expected 0 (none) or a positive number of float32 up to 2^127"),
    ({"soft_cap": math.nan}, "soft_cap is nan, expected 0 (none) or a positive number"),
    ({"soft_cap": math.inf}, "soft_cap is inf, expected 0 (none) or a positive number"),
    ({"soft_cap": 3e38}, "soft_cap is 3e+38, expected 0 (none) or a positive number"),
    ({"soft_cap": 1e-300}, "soft_cap is 1e-300, expected 0 (none) or a positive number"),
    ({"scale": math.nan}, "scale is nan, expected a finite number of float32"),
    ({"scale": -math.inf}, "scale is -inf, expected a finite number of float32"),
    ({"scale": 1e300}, "scale is 1e+300, expected a finite number of float32"),
    ({"chunk": -1}, "chunk is -1, expected 0 (none), or more with causal"),
    ({"chunk": 8, "causal": False}, "chunk is 8, expected 0 (none), or more with causal"),
    ({"sinks": torch.zeros(5)}, "sinks has 5 elements, expected 6, the heads of query"),
    ({"sinks": torch.zeros(6, 1)}, "sinks has 2 dimensions, expected [heads]"),
    ({"sinks": torch.zeros(6, dtype=torch.int32)}, "sinks has dtype Int, expected a floating point type"),
]


@pytest.mark.parametrize("change, message", [*BOTH, *WRITE])
def test_writing_refuses(change, message):
    given = {**arguments()[0], **change}
    before = given["cache"].clone()
    with pytest.raises(RuntimeError) as caught:
        w4a8.paged_attention_write(**given)
    assert message in str(caught.value)
    assert str(caught.value).startswith("w4a8::paged_attention_write: ")
    assert torch.equal(given["cache"], before)


@pytest.mark.parametrize("name", ["block_table", "seq_lens", "query_start_loc"])
def test_numbers_in_the_memory_that_is_written(name):
    given = arguments()[0]
    memory = given["cache"][1, 0, :512].view(torch.int32)
    given[name] = memory[: given[name].numel()].copy_(given[name].flatten()).view(given[name].shape)
    with pytest.raises(
        RuntimeError, match=f"{name} lies in the memory of cache, which is written, expected other memory"
    ):
        w4a8.paged_attention_write(**given)


def test_a_cache_that_is_only_read_may_overlap():
    sequences = Sequences([60, 60], [60, 60], page_blocks=1)
    for part in (sequences.key, sequences.value, sequences.query):
        part[60:] = part[:60]
    expected = sequences.write().attend()
    sequences.cache = sequences.cache[sequences.table[0].item()].expand(3, -1, -1)
    assert_same_bits(sequences.attend(), expected)


@pytest.mark.parametrize("change, message", [*BOTH, *ATTEND])
def test_attending_refuses(change, message):
    with pytest.raises(RuntimeError) as caught:
        w4a8.paged_attention(**{**arguments()[1], **change})
    assert message in str(caught.value)
    assert str(caught.value).startswith("w4a8::paged_attention: ")


def test_nothing_to_do():
    write, attend = arguments()
    none = {"seq_lens": ints(5, 0), "query_start_loc": ints(0, 0, 0)}
    before = write["cache"].clone()
    w4a8.paged_attention_write(**{**write, **none, "key": torch.zeros(0, 2, 64), "value": torch.zeros(0, 2, 64)})
    assert torch.equal(write["cache"], before)
    assert w4a8.paged_attention(**{**attend, **none, "query": torch.zeros(0, 6, 64)}).shape == (0, 6, 64)
