"""hypothesis: shapes, types, strides and sizes that a caller should not give. Each call gives the right answer, bit for
bit, or is refused by an error that begins with the operator's name, and takes no memory before that."""

import numpy as np
import pytest
import reference
import torch
from common import DTYPES, KERNELS, activation_groups, assert_same_bits, bits, from_numpy, make_layer, make_matrix

import w4a8

pytest.importorskip("hypothesis")
from fuzzing import fuzz
from hypothesis import strategies as st

HOSTILE = [-(2**63), -(2**31), -2, -1, 0, 1, 2, 31, 32, 33, 63, 64, 66, 96]
HOSTILE += [2**20, 2**20 + 2, 2**31, 2**32, 2**62, 2**63 - 1]
SIZES = st.one_of(st.sampled_from(HOSTILE), st.integers(0, 200))
SPECIAL = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-45, -1e-40, 3e38, -3e38, 65504.0, 1.0, -7.5]
ANY_DTYPE = [*DTYPES, torch.float64, torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool, torch.complex64]


@st.composite
def strided(draw, t):
    """The same values behind other strides: transposed storage, every second element, an offset, expanded rows."""
    how = draw(st.sampled_from(["plain", "transposed", "stepped", "offset"]))
    if how == "transposed" and t.dim() >= 2:
        return t.transpose(0, -1).contiguous().transpose(0, -1)
    if how == "stepped" and t.dim() >= 1:
        wide = torch.zeros([*t.shape[:-1], t.shape[-1] * 2], dtype=t.dtype)
        wide[..., ::2] = t
        return wide[..., ::2]
    if how == "offset":
        flat = torch.cat([torch.zeros(3, dtype=t.dtype), t.reshape(-1)])
        return flat[3:].view(t.shape)
    return t


@st.composite
def shapes(draw):
    """K and the group."""
    if draw(st.booleans()):
        group = 32 * draw(st.integers(1, 4))
        return group * draw(st.integers(1, 4)), group
    k = 2 * draw(st.integers(1, 70))
    return k, k


@st.composite
def activations(draw, rows, k, dtype):
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    x = torch.randn(rows, k, generator=generator) * draw(st.sampled_from([1.0, 1e-40, 1e30, 0.0]))
    for _ in range(draw(st.integers(0, 3)) if rows else 0):
        x[draw(st.integers(0, rows - 1)), draw(st.integers(0, k - 1))] = draw(st.sampled_from(SPECIAL))
    return x.to(dtype)


def canonical(t):
    """NaN with the one payload the operators write."""
    return torch.where(torch.isnan(t), torch.full_like(t, float("nan")), t)


def refused(call, name):
    with pytest.raises((RuntimeError, ValueError, TypeError)) as caught:
        call()
    message = str(caught.value)
    assert len(message) < 5000
    return message


@fuzz(st.data(), st.sampled_from(DTYPES), st.integers(1, 40), st.integers(0, 9), shapes(), st.booleans(), st.booleans())
def test_matmul(data, dtype, n, rows, shape, with_bias, narrow):
    k, group = shape
    torch.manual_seed(data.draw(st.integers(0, 2**16)))
    activation_group = data.draw(st.sampled_from(activation_groups(group, k)))
    scale_dtype = torch.bfloat16 if narrow else torch.float32
    matrix = make_matrix(n, k, group, scale_dtype, with_bias, activation_group=activation_group)
    matrix.weights = data.draw(strided(matrix.weights))
    matrix.scales = data.draw(strided(matrix.scales))
    packed = matrix.pack()
    back = w4a8.dyn_quant_unpack_4bit_weight(packed, group, k, n)
    assert_same_bits(back[0], matrix.weights.contiguous())
    assert_same_bits(back[1], matrix.scales.contiguous())
    x = data.draw(strided(data.draw(activations(rows, k, dtype))))
    with np.errstate(all="ignore"):
        y = reference.matmul(x.float().numpy(), *matrix.arrays(), activation_group=activation_group)
    expected = canonical(from_numpy(y).to(dtype))
    for kernel in KERNELS:
        with w4a8.use_kernel(kernel):
            y = w4a8.dyn_quant_matmul_4bit(x, data.draw(strided(packed)), group, k, n)
        assert_same_bits(y, expected, kernel)


@fuzz(st.data(), st.integers(0, 6), st.integers(0, 3), st.integers(1, 4), st.sampled_from(DTYPES), st.integers(0, 7))
def test_moe(data, tokens, top_k, experts, dtype, kind):
    """All kernels and every batch give a token the same bits, whatever is in it."""
    torch.manual_seed(data.draw(st.integers(0, 2**16)))
    group = data.draw(st.sampled_from([-1, 32]))
    hidden, inner = (64, 32) if group == 32 else data.draw(st.sampled_from([(34, 18), (2, 2), (64, 46)]))
    allowed = (activation_groups(k if group == -1 else group, k) for k in (hidden, inner))
    groups = data.draw(st.tuples(*map(st.sampled_from, allowed)))
    gated, bias = data.draw(st.booleans()), data.draw(st.booleans())
    layer = make_layer(experts, hidden, inner, group, gated, bias, activation_groups=groups)
    x = data.draw(strided(data.draw(activations(tokens, hidden, dtype))))
    ids = torch.randint(-1, experts, (tokens, top_k), dtype=data.draw(st.sampled_from([torch.int32, torch.int64])))
    router = torch.randn(tokens, top_k).to(data.draw(st.sampled_from([*DTYPES, torch.float64])))
    ids, router = data.draw(strided(ids)), data.draw(strided(router))
    on_input = data.draw(st.booleans())
    numbers = {"limit": data.draw(st.sampled_from([None, 0.25, 7.0, float("inf")]))} if kind < 5 else {}
    if kind < 4:
        numbers |= {name: data.draw(st.none() | st.floats(-3, 3)) for name in ("alpha", "beta")}
    answers = []
    for kernel in KERNELS:
        with w4a8.use_kernel(kernel):
            answers.append(layer(x, ids, router, kind, on_input, **numbers))
            rows = [slice(t, t + 1) for t in range(tokens)]
            alone = [layer(x[row], ids[row], router[row], kind, on_input, **numbers) for row in rows]
        assert_same_bits(answers[-1], answers[0], kernel)
        for t, row in enumerate(alone):
            assert_same_bits(row[0], answers[0][t], f"{kernel}, token {t} alone")
    for t in range(tokens):
        if not (ids[t] >= 0).any():
            assert (answers[0][t] == 0).all()
        elif not torch.isfinite(x[t]).all():
            assert torch.isnan(answers[0][t]).all()


@fuzz(st.data())
def test_sizes_of_anything(data):
    """Integer arguments of any size beside tensors of ordinary ones: right or refused."""
    torch.manual_seed(data.draw(st.integers(0, 2**16)))
    matrix = make_matrix(6, 64, 32)
    packed = matrix.pack()
    layer = make_layer(2, 64, 32)
    draw = lambda true: data.draw(st.one_of(st.just(true), SIZES))  # noqa: E731
    group, k, n = draw(32), draw(64), draw(6)
    right = (group, k, n) == (32, 64, 6)
    x = torch.randn(2, 64)
    calls = {
        "dyn_quant_pack_4bit_weight": lambda: torch.ops.w4a8.dyn_quant_pack_4bit_weight(
            matrix.weights, matrix.scales, None, group, k, n
        ),
        "dyn_quant_unpack_4bit_weight": lambda: torch.ops.w4a8.dyn_quant_unpack_4bit_weight(packed, group, k, n),
        "dyn_quant_matmul_4bit": lambda: torch.ops.w4a8.dyn_quant_matmul_4bit(x, packed, group, k, n),
    }
    for name, call in calls.items():
        if right:
            call()
        else:
            assert refused(call, name).startswith(f"w4a8::{name}: ")
    sizes = (draw(64), draw(32), draw(64), draw(32))
    kind = data.draw(st.one_of(st.integers(0, 7), SIZES))
    limit = data.draw(st.none() | st.floats())
    weights, ids = torch.rand(2, 2), torch.zeros(2, 2, dtype=torch.int64)
    call = lambda: torch.ops.w4a8.dynamic_4bit_int_moe(  # noqa: E731
        x, ids, weights, layer.w13_packed, layer.w2_packed, *sizes, False, kind, limit=limit
    )
    # group_size 0: as the packed tensors say. Half of the least float32 above 0 is rounded to 0.
    good = 0 <= kind <= 7 and (limit is None or (kind <= 4 and limit > 2.0**-150))
    if sizes in ((64, 32, 64, 32), (64, 32, 64, 0)) and good:
        call()
    else:
        assert refused(call, "dynamic_4bit_int_moe").startswith("w4a8::dynamic_4bit_int_moe: ")


@fuzz(st.data())
def test_tensors_of_anything(data):
    """Arguments of other types and shapes, some of them right: a finished call or an error with a name."""
    torch.manual_seed(data.draw(st.integers(0, 2**16)))
    layer = make_layer(2, 64, 32)
    right = {
        "x": torch.randn(3, 64),
        "topk_ids": torch.zeros(3, 2, dtype=torch.int64),
        "topk_weights": torch.rand(3, 2),
        "w13_packed": layer.w13_packed,
        "w2_packed": layer.w2_packed,
    }
    name = data.draw(st.sampled_from(sorted(right)))
    shape = data.draw(st.lists(st.integers(0, 5), max_size=4))
    replaced = torch.ones(shape).to(data.draw(st.sampled_from(ANY_DTYPE)))
    if data.draw(st.booleans()):
        replaced = right[name].to(data.draw(st.sampled_from(ANY_DTYPE)))
    arguments = {**right, name: replaced}
    call = lambda: torch.ops.w4a8.dynamic_4bit_int_moe(*arguments.values(), 64, 32, 64, 32, False, 0)  # noqa: E731
    try:
        y = call()
    except RuntimeError as error:
        assert str(error).startswith("w4a8::dynamic_4bit_int_moe: "), error
        assert replaced.dtype != right[name].dtype or replaced.shape != right[name].shape
        return
    assert y.shape == arguments["x"].shape
    assert y.dtype == arguments["x"].dtype


@fuzz(st.data())
def test_packed_tensor_of_anything(data):
    """Bytes of a packed tensor changed or cut off: refused, or all kernels agree on what they mean."""
    torch.manual_seed(data.draw(st.integers(0, 2**16)))
    matrix = make_matrix(20, 34, 34, bias=True)
    packed = matrix.pack()
    for _ in range(data.draw(st.integers(0, 5))):
        at = data.draw(st.one_of(st.integers(0, 63), st.integers(64, len(packed) - 1)))
        packed[at] = data.draw(st.integers(0, 255))
    packed = packed[: data.draw(st.one_of(st.just(len(packed)), st.integers(0, len(packed))))]
    x = torch.randn(3, 34)
    answers = []
    for kernel in KERNELS:
        with w4a8.use_kernel(kernel):
            try:
                answers.append(w4a8.dyn_quant_matmul_4bit(x, packed, 34, 34, 20))
            except RuntimeError as error:
                assert str(error).startswith("w4a8::dyn_quant_matmul_4bit: ")
                answers.append(None)
    assert all((a is None) == (answers[0] is None) for a in answers)
    for answer in answers:
        if answer is not None:
            assert (bits(answer) == bits(answers[0])).all()


@fuzz(st.data(), st.integers(0, 5), st.integers(1, 12), st.integers(1, 12))
def test_routing(data, tokens, experts, top_k):
    """The experts of a token are the best by score, the lower one among equals, whatever the logits are."""
    from w4a8.core.routing import ROUTING_METHODS, route

    method = data.draw(st.sampled_from(sorted(ROUTING_METHODS, key=str)))
    values = st.one_of(st.floats(-5, 5, width=32), st.sampled_from([1.0, 88.0, -104.0, *SPECIAL]))
    logits = torch.tensor([[data.draw(values) for _ in range(experts)] for _ in range(tokens)]).view(tokens, experts)
    if top_k > experts:
        with pytest.raises(ValueError, match=f"top_k {top_k} is outside"):
            route(method, torch.zeros(tokens, 4), logits, top_k)
        return
    weights, ids = route(method, torch.zeros(tokens, 4), logits, top_k)
    assert weights.shape == ids.shape == (tokens, top_k)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
    for t in range(tokens):
        row = [float("inf") if value != value else value for value in logits[t].tolist()]
        order = sorted(range(experts), key=lambda e: (not logits[t, e].isnan(), -row[e], e))[:top_k]
        assert ids[t].tolist() == order


@pytest.mark.parametrize("sizes", [(2**31, 2**20), (2**31 - 1, 2**20 - 2), (2**30, 2**20)])
def test_huge_sizes_are_refused_before_memory_is_taken(sizes):
    """What the arguments claim is compared with the tensors first: a terabyte is never asked for."""
    n, k = sizes
    matrix = make_matrix(6, 64, 32)
    message = refused(lambda: w4a8.dyn_quant_pack_4bit_weight(matrix.weights, matrix.scales, None, k, k, n), "pack")
    assert "weights has shape [6, 32]" in message
    message = refused(lambda: w4a8.dyn_quant_matmul_4bit(torch.randn(2, 64), matrix.pack(), k, k, n), "matmul")
    assert "inp has shape [2, 64]" in message
