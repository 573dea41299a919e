"""The naive reference of docs/numerics.md in NumPy. It shares no code with csrc and knows no packed layout.

`quantize` and `matmul` follow the definition operation by operation, with float32 roundings and exact fma, so a kernel
must give the same bits. `moe` cannot: exp and erfc are free within an error bound; it returns the largest difference
that this bound explains together with its answer.
"""

import math

import numpy as np

F32 = np.float32
U = 2.0**-24  # relative error of one float32 rounding


def fma32(a, b, c):
    """float32(a * b + c) rounded once. All arguments float32."""
    product = np.asarray(a, np.float64) * np.asarray(b, np.float64)  # exact: 24 + 24 bits
    c = np.broadcast_to(np.asarray(c, np.float64), product.shape)
    total = product + c
    virtual = total - product
    error = (product - (total - virtual)) + (c - virtual)  # exact sum = total + error (two-sum)
    # Round the exact sum to odd in float64: then the second rounding, to float32, is as if it were the only one.
    total = np.atleast_1d(total)
    even = (total.view(np.int64) & 1) == 0
    odd = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    inexact = np.isfinite(total) & (error != 0)
    return np.where(inexact & even, odd, total).astype(F32).reshape(product.shape)


def unpack_nibbles(weights):
    """uint8 [..., K/2] (low nibble = even k, value + 8) -> int64 [..., K] in [-8, 7]."""
    low, high = weights & 15, weights >> 4
    return np.stack([low, high], -1).reshape(*weights.shape[:-1], -1).astype(np.int64) - 8


def e4m3fn(bits):
    """Bits of float8_e4m3fn -> float32: a sign, four bits of exponent (bias 7), three of mantissa."""
    bits = np.asarray(bits).astype(int)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    size = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), np.ldexp(1 + mantissa / 8, exponent - 7))
    size = np.where((exponent == 15) & (mantissa == 7), np.nan, size)
    return np.where(bits & 128, -size, size).astype(F32)


def integers(weights, zero_points=None, values="int4"):
    """uint8 [..., N, K/2], of int6 and int8 [..., N, K] -> the integers int64 [..., N, K] that scales multiply; of e2m1
    half of the scales; of iq4 numbers of ggml's kvalues_iq4nl."""
    codes = weights.astype(np.int64) if values in ("int6", "int8") else unpack_nibbles(weights) + 8
    if values == "e2m1":
        sign, exponent, mantissa = codes >> 3, codes >> 1 & 3, codes & 1
        value = np.where(exponent == 0, mantissa * 0.5, (1 + mantissa * 0.5) * 2.0 ** (exponent - 1))
        return (2 * value * np.where(sign == 1, -1, 1)).astype(np.int64)
    if values == "iq4":
        return np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])[codes]
    if values == "int6":
        return codes - 32
    if zero_points is None:
        return codes - (128 if values == "int8" else 8)
    size = codes.shape[-1] // zero_points.shape[-1]
    return codes - np.repeat(zero_points.astype(np.int64), size, axis=-1)


def _as_integers(weights):
    return weights if weights.dtype == np.int64 else unpack_nibbles(weights)


def cut(scale):
    """float32 with zeros as its last two bits."""
    return (np.ascontiguousarray(scale, F32).view(np.uint32) & np.uint32(0xFFFFFFFC)).view(F32)


def limit_scales(scales, recip):
    """Scales float32 [M, G] and recip float32 [M] of rows in groups, in larger units where a scale is above 2^104."""
    large = (np.abs(scales) > F32(2.0**104)).any(1)
    smaller = cut(scales * F32(2.0**-24))
    return np.where(large[:, None], smaller, scales), np.where(large, recip * F32(2.0**24), recip)


def quantize_in_groups(x, size):
    """float32 [M, K] -> q int64 [M, K], zero points of 0 float32 [M], recip float32 [M], 1, 2^24 or NaN, scales float32
    [M, K / size]: each `size` values have one, symmetrically."""
    groups = x.reshape(len(x), x.shape[1] // size, size)
    finite = np.isfinite(x).all(1)
    safe = np.where(finite[:, None, None], groups, F32(0))
    with np.errstate(all="ignore"):
        scale = F32(127) / np.abs(safe).max(2)
        scale = np.where(np.isinf(scale), F32(0), scale).astype(F32)
        q = np.rint(safe * scale[:, :, None])
        scales = np.where(scale == 0, F32(0), cut(F32(1) / scale)).astype(F32)
    scales = np.where(finite[:, None], scales, F32(0))
    scales, recip = limit_scales(scales, np.where(finite, F32(1), F32(np.nan)).astype(F32))
    return q.reshape(x.shape).astype(np.int64), np.zeros(len(x), F32), recip, scales


def quantize(x, activation_group=-1):
    """float32 [M, K] -> q int64 [M, K], zero point float32 [M], recip float32 [M]; docs/numerics.md section 1. In
    groups also their scales (`quantize_in_groups`)."""
    x = np.asarray(x, F32)
    if activation_group != -1:
        return quantize_in_groups(x, activation_group)
    zero = F32(0)
    finite = np.isfinite(x).all(1)
    safe = np.where(finite[:, None], x, zero)
    with np.errstate(all="ignore"):
        mn, mx = np.minimum(zero, safe.min(1)), np.maximum(zero, safe.max(1))
        span = mx - mn
        scale = np.where(span == 0, F32(1), F32(255) / span)
        scale = np.where(np.isinf(span), F32(127.5) / (mx / F32(2) - mn / F32(2)), scale)
        scale = np.where(np.isinf(scale), F32(1), scale).astype(F32)
        recip = F32(1) / scale
        low, high = F32(-128) - mn * scale, F32(127) - mx * scale
        use_low = (F32(-128) + mn * scale) + (F32(127) + mx * scale) > 0
        zp = np.rint(np.clip(np.where(use_low, low, high), F32(-128), F32(127)))
        zp = np.where(np.isinf(F32(255) / span), zero, zp)  # a row of zeros, which adds and subtracts nothing
        q = np.clip(np.rint(safe * scale[:, None]) + zp[:, None], F32(-128), F32(127))
    q = np.where(finite[:, None], q, zero).astype(np.int64)
    return q, np.where(finite, zp, zero).astype(F32), np.where(finite, recip, F32(np.nan)).astype(F32)


def _dot(q, w):
    """Exact integer q [M, K] @ w [N, K].T: all sums are below 2**53."""
    return (q.astype(np.float64) @ w.T.astype(np.float64)).astype(np.int64)


def _of_minimums(q, minimums, x_scales, step):
    """What the sum over groups begins at: float32 [M, N]; x_scales float32 [M, parts] of `step` values, or None."""
    f = np.zeros((len(q), len(minimums)), F32)
    size = q.shape[1] // minimums.shape[1]
    for g in range(minimums.shape[1]):
        group = q[:, g * size : (g + 1) * size]
        offset = -group.sum(1, keepdims=True).astype(F32)
        if x_scales is not None:
            offset = np.zeros((len(q), 1), F32)
            for begin in range(0, size, min(step, size)):
                total = group[:, begin : begin + step].sum(1, keepdims=True).astype(F32)
                offset = fma32(-total, x_scales[:, (g * size + begin) // step, None], offset)
        f = fma32(minimums[None, :, g], offset, f)
    return f


def _sum_in_groups(q, x_scales, w, scales, minimums=None):
    """The sum over k of docs/numerics.md, of activations with scales in groups: float32 [M, N]."""
    k = w.shape[1]
    size, activation_group = k // scales.shape[1], k // x_scales.shape[1]
    step = min(size, activation_group)
    f = np.zeros((len(q), len(w)), F32) if minimums is None else _of_minimums(q, minimums, x_scales, activation_group)
    for g in range(scales.shape[1]):
        p = np.zeros_like(f)
        for begin in range(g * size, (g + 1) * size, step):
            part = slice(begin, begin + step)
            recip = x_scales[:, begin // activation_group, None]
            p = fma32(_dot(q[:, part], w[:, part]).astype(F32), recip, p)
        f = fma32(p, scales[None, :, g], f)
    return f


def matmul_quantized(q, zp, recip, weights, scales, bias, channel_scales=None, minimums=None, x_scales=None):
    """The bits of docs/numerics.md sections 2 and 3. weights uint8 [N, K/2] (int4) or the int64 [N, K] of `integers`,
    scales and minimums float32 [N, G], channel_scales float32 [N] (of groups), x_scales float32 [M, K / activation
    group]."""
    w = _as_integers(weights)
    scales = np.asarray(scales, F32)
    k, groups = w.shape[1], scales.shape[1]
    size = k // groups
    bias = F32(0) if bias is None else np.asarray(bias, F32)
    with np.errstate(all="ignore"):
        channel = F32(1) if channel_scales is None else np.asarray(channel_scales, F32)[None]
        if x_scales is not None:
            return _sum_in_groups(q, np.asarray(x_scales, F32), w, scales, minimums) * (recip[:, None] * channel) + bias
        if groups == 1 and minimums is None:  # one group is the channelwise definition
            total = _dot(q - zp.astype(np.int64)[:, None], w).astype(F32)
            return total * (recip[:, None] * scales[None, :, 0]) + bias
        f = np.zeros((len(q), len(w)), F32) if minimums is None else _of_minimums(q, minimums, None, 0)
        weight_sum = np.zeros(len(w), F32)
        for g in range(0 if minimums is None else groups):
            weight_sum = fma32(minimums[:, g], F32(-size), weight_sum)
        for g in range(groups):
            part = slice(g * size, (g + 1) * size)
            f = fma32(_dot(q[:, part], w[:, part]).astype(F32), scales[None, :, g], f)
            weight_sum = fma32(scales[:, g], w[:, part].sum(1).astype(F32), weight_sum)
        f = fma32(-zp[:, None], weight_sum[None], f)
        return f * (recip[:, None] * channel) + bias


def matmul(x, weights, scales, bias=None, channel_scales=None, minimums=None, activation_group=-1):
    """float32 [M, K] times a 4-bit matrix, bit for bit."""
    q, zp, recip, *x_scales = quantize(x, activation_group)
    return matmul_quantized(q, zp, recip, weights, scales, bias, channel_scales, minimums, *x_scales)


def dequantize(weights, scales):
    """The real numbers a 4-bit matrix stands for: float64 [N, K]."""
    w = _as_integers(weights)
    scales = np.asarray(scales, np.float64)
    return w * np.repeat(scales, w.shape[1] // scales.shape[1], axis=1)


def sizes(weights, scales, channel_scales=None, minimums=None):
    """What an input can add at most, of a code and of its minimum: float64 [N, K]."""
    found = np.abs(dequantize(weights, scales))
    if minimums is not None:
        found += np.repeat(np.abs(np.asarray(minimums, np.float64)), found.shape[1] // np.shape(minimums)[1], axis=1)
    return found if channel_scales is None else found * np.asarray(channel_scales, np.float64)[:, None]


def sum_of_terms(q, zp, recip, weights, scales, channel_scales=None):
    """All that a matmul of section 2 or 3 adds and subtracts, without signs: float64 [M, N]."""
    w = sizes(weights, scales, channel_scales)
    if w.shape[1] == 2 * q.shape[1]:
        q = np.concatenate([q, q], 1)
    return (np.abs(q) @ w.T + np.abs(zp)[:, None] * w.sum(1)) * recip[:, None].astype(np.float64)


def rounding_bound(terms, groups, bias=0.0, products=0):
    """How far the float32 of section 2 or 3 may be from the real number that its integers and scales stand for.

    terms: as of `sum_of_terms`. The sum over G groups rounds each conversion and fma: G + 1 times; W likewise G times;
    fma(-zp, W, f) once; the product with recip once: no term more than G + 3 times. `products`: roundings of factors
    before, of recip * c say. The last addition rounds everything once more, and the bias. Section 2 rounds four times.
    With minimums groups count twice; with activation groups and P parts a group, P + G + 2 are enough.
    """
    times = groups + 4 + products
    grown = U / (1 - times * U)  # n roundings: a factor within n U / (1 - n U)
    return times * grown * terms + grown * np.abs(bias)


# What docs/numerics.md section 5 grants exp and erfc, relative.
EXP_ERROR, ERFC_ERROR = 2e-7, 5e-7


def activation(kind, g, u, numbers=None):
    """float32 g, u (u None when ungated) -> h float64, and a bound on how far float32 arithmetic may be from it.

    numbers: limit, alpha and beta, where they are not the kind's own.
    The bound adds, relative to h: the error of exp or erfc, U for each rounding, and the error of the argument times
    the condition of the function (|a| for exp(a); a**2 + 1 for the normal distribution function at a).
    """
    g = np.asarray(g, np.float64)
    gate, up = g, (np.ones_like(g) if u is None else np.asarray(u, np.float64))

    def silu(v):
        with np.errstate(over="ignore"):
            return v / (1 + np.exp(-v))

    own = {3: (7, 1.702, 1), 4: (7, 1, 0), 8: (np.inf, 0.8, 0.8)}.get(kind, (np.inf, 1, 0))
    limit, alpha, beta = {**dict(zip(("limit", "alpha", "beta"), own)), **(numbers or {})}.values()
    silu_error = EXP_ERROR + 2 * U
    if kind == 1 and u is not None:
        gate, up = up, gate
    if kind in (0, 1, 2, 3):
        c = np.minimum(limit, gate)
        a = alpha * c
        with np.errstate(over="ignore"):
            h = c / (1 + np.exp(-a)) * (1 if u is None else np.clip(up, -limit, limit) + beta)
        relative = EXP_ERROR + 3 * U if (alpha, beta) == (1, 0) else EXP_ERROR + 2 * U * np.abs(a) + 5 * U
    elif kind == 4:
        h = np.minimum(limit, silu(gate)) * (1 if u is None else np.clip(up, -limit, limit))
        relative = silu_error + U
    elif kind == 5:
        phi = np.vectorize(math.erfc, otypes=[np.float64])(-gate / math.sqrt(2)) / 2
        h, relative = gate * phi * up, ERFC_ERROR + 2 * U * (gate**2 + 1) + 3 * U
    elif kind == 6:
        t = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        with np.errstate(over="ignore"):
            h = gate / (1 + np.exp(-2 * t)) * up
        relative = EXP_ERROR + 12 * U * np.abs(t) + 3 * U
    elif kind == 7:
        h, relative = np.maximum(0, gate) ** 2 * up, 2 * U
    elif kind == 8:  # terms of both signs
        e = np.expm1(np.minimum(F32(-1e-6), gate))
        above, below = alpha * gate**2, beta * (e - gate)
        h, relative = (np.where(gate > 0, above, below) + gate / 2) * up, 3 * U
        off = np.where(gate > 0, 2 * U * np.abs(above), abs(beta) * (EXP_ERROR * np.abs(e) + 2 * U * np.abs(e - gate)))
        return h, relative * np.abs(h) + off * np.abs(up)
    else:
        raise ValueError(kind)
    # exp(87) is the largest value exp may return: an absolute error below |g u| exp(-87).
    return h, relative * np.abs(h) + np.abs(gate * up) * math.exp(-87)


def _half_distance(v):
    """Distance to the nearest n + 1/2, where rint changes its answer."""
    return np.abs(v - np.floor(v) - 0.5)


def _second_matmul_in_groups(h, error, weights, scales, bias, channel_scales, minimums, activation_group):
    """`second_matmul` where each group of activations has its own scale."""
    q, zp, recip, x_scales = quantize(h.astype(F32), activation_group)
    y = matmul_quantized(q, zp, recip, weights, scales, bias, channel_scales, minimums, x_scales)

    def spread(of_group):
        return np.repeat(of_group, activation_group, axis=1)

    groups = h.reshape(len(h), h.shape[1] // activation_group, activation_group)
    most = np.abs(groups).max(2)
    span = np.where(most > 0, most, 1)
    scale = np.where(most > 0, 127 / span, 0)
    # Relative, of a scale: m is off by the largest error; 127 / m and 1 / scale round, and the last two bits of recip,
    # which is less than 2**-21 of it, may be others.
    scale_error = np.where(most > 0, error.reshape(groups.shape).max(2) / span + 4 * U + 2.0**-21, 0)
    steps = np.abs(h) * spread(scale * scale_error) + error * spread(scale)
    undecided = (_half_distance(h * spread(scale)) <= steps) & (spread(most) > 0)

    size = sizes(weights, scales, channel_scales, minimums)
    step = spread(x_scales.astype(np.float64))
    terms = np.abs(q) * step
    moved = (undecided * step * (1 + spread(scale_error))) @ size.T
    shared = (terms * spread(scale_error)) @ size.T
    # Other scales, so all is rounded differently: one rounding per part and per group, the bias's, and three more.
    weight_groups = np.asarray(scales).shape[1] * (1 if minimums is None else 2)
    parts = max(x_scales.shape[1], weight_groups)
    rounding = 2 * (parts + weight_groups + 4) * U * ((terms @ size.T) + moved) + 2 * U * np.abs(y)
    return y, moved + shared + rounding


def second_matmul(h, error, weights, scales, bias, channel_scales=None, minimums=None, activation_group=-1):
    """y = quantize(h) times a 4-bit matrix, and how far off a kernel may be whose h is within `error` of this one.

    Integers differ only where a value sits within `error` (in steps) of the middle between two: each such value moves
    its product by one step of q. The rest is the error of recip, which all values share.
    """
    h32 = h.astype(F32)
    error = error + U * np.abs(h)
    if activation_group != -1:
        return _second_matmul_in_groups(h, error, weights, scales, bias, channel_scales, minimums, activation_group)
    q, zp, recip = quantize(h32)
    y = matmul_quantized(q, zp, recip, weights, scales, bias, channel_scales, minimums)

    mn, mx = np.minimum(0, h.min(1)), np.maximum(0, h.max(1))
    span = np.where(mx > mn, mx - mn, 1)
    scale = np.where(mx > mn, 255 / span, 1)
    worst = error.max(1)
    scale_error = 2 * worst / span + 4 * U  # relative, of scale and recip
    steps = np.abs(h) * scale[:, None] * scale_error[:, None] + error * scale[:, None]
    undecided = _half_distance(h * scale[:, None]) <= steps
    zp_error = 255 * scale_error + worst * scale + 512 * U  # -128 - mn * scale: two more roundings below 256
    undecided |= (_half_distance(-128 - mn * scale) <= zp_error)[:, None]
    undecided &= (mx > mn)[:, None]

    size = sizes(weights, scales, channel_scales, minimums)  # [N, K]
    moved = undecided.astype(np.float64) @ size.T / scale[:, None]
    # Where an integer moved, the sums of the groups round differently: one rounding per group and two more.
    groups = np.asarray(scales).shape[1] * (1 if minimums is None else 2)
    terms = np.abs(q - zp[:, None]) @ size.T + np.abs(zp)[:, None] * size.sum(1)[None]
    rounding = np.where(undecided.any(1)[:, None], (2 * groups + 4) * U * terms / scale[:, None], 0)
    without_bias = np.abs(y if bias is None else y - np.asarray(bias, np.float64))
    products = 2 if channel_scales is None else 4  # f * recip, and recip * c, rounded here and there
    shared = (scale_error[:, None] + products * U) * (without_bias + moved) + 2 * U * np.abs(y)
    return y, moved + rounding + shared


def moe(x, ids, router, w13, w2, intermediate, gated, weight_on_input, kind, activation_groups=(-1, -1), numbers=None):
    """The fused layer.

    x float32 [T, H], ids int [T, k], router float32 [T, k], w13 and w2 lists of (weights, scales, bias or None[,
    channel scales or None[, minimums]]) per expert, activation groups of w13 and w2 -> out float32 [T, H] and the
    explained difference float64 [T, H].
    """
    tokens, slots = ids.shape
    hidden = x.shape[1]
    y = np.zeros((tokens, slots, hidden), F32)
    y_error = np.zeros((tokens, slots, hidden))
    q, zp, recip, *x_scales = quantize(x, activation_groups[0])
    for expert in sorted(set(ids.ravel().tolist()) - {-1}):
        rows, slot = np.nonzero(ids == expert)
        row_recip = recip[rows] * router[rows, slot] if weight_on_input else recip[rows]
        in_groups = {"x_scales": x_scales[0][rows]} if x_scales else {}
        gu = matmul_quantized(q[rows], zp[rows], row_recip, *w13[expert], **in_groups)
        h, error = activation(kind, gu[:, :intermediate], gu[:, intermediate:] if gated else None, numbers)
        y[rows, slot], y_error[rows, slot] = second_matmul(h, error, *w2[expert], activation_group=activation_groups[1])

    out = np.zeros((tokens, hidden), F32)
    explained = np.zeros((tokens, hidden))
    for j in range(slots):
        held = (ids[:, j] >= 0)[:, None]
        weight = np.ones((tokens, 1), F32) if weight_on_input else router[:, j : j + 1]
        out = np.where(held, fma32(weight, y[:, j], out), out)
        explained += held * np.abs(weight) * y_error[:, j]
        explained += held * U * (np.abs(out) + explained)  # this fma rounds a slightly different number
    return out, explained
