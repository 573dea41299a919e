"""The rule and the search of docs/numerics.md, section 8, in NumPy, operation by operation in float32: slow, and
sharing no code with csrc, which must give the same bits."""

import numpy as np
import torch
from reference import F32, fma32

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # by code; the fourth bit is the sign


def steps(begin, end, step):
    """From begin to end, both included; exact."""
    return np.arange(begin, end + step / 2, step)


def ladder(kind, effort, group):
    """Multiples of the rule's 1 / scale, whether neighbours of the zero point are tried, and the number of refits."""
    long = group > 128
    if kind == "int4":
        if effort == 1:
            tries = (steps(1, 2.25, 0.25), steps(0.875, 2.125, 0.25)) if long else (steps(1, 1.25, 0.125),) * 2
            if not long:
                tries = tries[0], steps(0.875, 1.125, 0.125)
        elif long:
            tries = steps(0.9375, 3.0625, 0.125), steps(0.875, 3, 0.125)
        else:
            tries = steps(0.875, 1.625, 0.0625), steps(0.8125, 1.5625, 0.0625)
        return np.concatenate([tries[0], -tries[1]]), False, 2 if long or effort == 2 else 1
    if kind in ("int6", "int8"):
        turned = 31 / 32 if kind == "int6" else 127 / 128  # makes the peak the largest code instead of the least one
        tries = (steps(1, 1, 1), np.array([turned]))
        if effort == 2:
            tries = steps(1, 1.25, 0.0625), steps(turned, turned + 0.25, 0.0625)
        return np.concatenate([tries[0], -tries[1]]), False, effort
    if kind == "zeros":
        fine, coarse = {
            (1, False): (steps(0.875, 1.3125, 0.0625), np.array([])),
            (2, False): (steps(0.8125, 1.1875, 0.03125), steps(1.25, 1.75, 0.125)),
            (1, True): (steps(0.875, 1.1875, 0.0625), steps(1.4375, 2.1875, 0.25)),
            (2, True): (steps(0.8125, 1.25, 0.0625), steps(1.375, 3, 0.125)),
        }[effort, long]
        return np.concatenate([fine, coarse]), effort == 2 or long, effort
    if effort == 1:
        return (steps(0.625, 2.375, 0.25), False, 2) if long else (steps(0.6875, 1.125, 0.0625), False, 1)
    return (steps(0.625, 3, 0.125) if long else steps(0.625, 1.6875, 0.0625)), False, 2


def nearest_e2m1(x):
    """The nearest number of e2m1, by comparing; of two as near the even code."""
    distances = np.abs(np.abs(x.astype(np.float64))[..., None] - E2M1)
    as_near = distances == distances.min(-1, keepdims=True)
    choice = (np.where(np.arange(8) % 2 == 0, 2, 1) * as_near).argmax(-1)
    return (E2M1[choice] * np.sign(x)).astype(F32)


def nearest(x, zero, kind):
    """float64 or float32 [groups, g] to values float32; zero [groups]."""
    if kind == "e2m1":
        return nearest_e2m1(x)
    ends = {"int4": (-8, 7), "int6": (-32, 31), "int8": (-128, 127), "zeros": (-zero[:, None], 15 - zero[:, None])}
    low, high = ends[kind]
    return np.clip(np.rint(x), low, high).astype(F32)


def kept(x, dtype, kind):
    """float32 as a scale keeps it; e2m1's halves are exact."""

    def rounded(a):
        return torch.from_numpy(np.ascontiguousarray(a)).to(dtype).float().numpy()

    x = np.asarray(x, F32)
    return F32(2) * rounded(F32(0.5) * rounded(x)) if kind == "e2m1" else rounded(x)


def rule(w, kind, dtype):
    """Of float32 [groups, g]: u, exponents, scales as they are kept and for u, zero points, and the range of u."""
    peak = w[np.arange(len(w)), np.abs(w).argmax(1)]
    e = np.where(peak == 0, 0, np.frexp(np.abs(peak).astype(np.float64))[1] - 1)
    half = np.trunc(e / 2).astype(np.int64)
    first, second = (np.ldexp(F32(1), -part).astype(F32)[:, None] for part in (half, e - half))
    u = (w * first).astype(F32) * second
    top = np.ldexp(peak.astype(np.float64), -e).astype(F32)
    low = np.minimum(0, np.ldexp(w.min(1).astype(np.float64), -e)).astype(F32)
    high = np.maximum(0, np.ldexp(w.max(1).astype(np.float64), -e)).astype(F32)
    factor = {
        "int4": lambda: top / F32(-8),
        "int6": lambda: top / F32(-32),
        "int8": lambda: top / F32(-128),
        "e2m1": lambda: np.abs(top) / F32(6),
        "zeros": lambda: high / F32(15) - low / F32(15),
    }[kind]()
    scale = kept(np.ldexp(factor.astype(np.float64), e).astype(F32), dtype, kind)
    none = scale == 0
    u, e, scale = np.where(none[:, None], F32(0), u), np.where(none, 0, e), np.where(none, F32(1), scale)
    low, high = np.where(none, F32(0), low), np.where(none, F32(0), high)
    factor = np.ldexp(scale.astype(np.float64), -e).astype(F32)
    zero = np.minimum(15, np.rint(-low / factor)).astype(F32) if kind == "zeros" else np.zeros(len(w), F32)
    return u, e, scale, factor, zero, low, high


def own_counts(u):
    """What errors count without importance, float32 [groups, g]: |u| + the root of the mean of u u."""
    squares = np.zeros(len(u), F32)
    for k in range(u.shape[1]):
        squares = fma32(u[:, k], u[:, k], squares)
    return np.abs(u) + np.sqrt(squares / F32(u.shape[1]))[:, None]


class Best:
    """The best try of each group."""

    def __init__(self, u, importance, kind, factor, zero):
        self.u, self.importance, self.kind = u, importance, kind
        self.gain, self.factor, self.zero = np.zeros_like(factor), factor, zero

    def attempt(self, inverse, zero):
        product = self.u * inverse[:, None] if self.kind == "e2m1" else self.u.astype(np.float64) * inverse[:, None]
        q = nearest(product, zero, self.kind)
        a = b = np.zeros_like(self.gain)
        for k in range(q.shape[1]):
            iq = q[:, k] * self.importance[:, k]
            a, b = fma32(self.u[:, k], iq, a), fma32(q[:, k], iq, b)
        with np.errstate(invalid="ignore", divide="ignore"):
            gain, factor = a * a / b, a / b
        larger = gain > self.gain
        self.gain, self.factor = np.where(larger, gain, self.gain), np.where(larger, factor, self.factor)
        self.zero = np.where(larger, zero, self.zero)

    def lost(self, factor, zero):
        q = nearest(self.u / factor[:, None], zero, self.kind)
        total = np.zeros_like(factor)
        for k in range(q.shape[1]):
            error = fma32(-q[:, k], factor, self.u[:, k])
            total = fma32(error, error * self.importance[:, k], total)
        return total


def clamped(zero):
    return np.clip(np.rint(zero), 0, 15).astype(F32)


def searched(u, e, scale, factor, zero, low, high, importance, kind, dtype, effort):
    """Scales, those for u and zero points, better than the rule's where they can be."""
    best = Best(u, importance, kind, factor, zero)
    tries, neighbours, refits = ladder(kind, effort, u.shape[1])
    inverse = F32(1) / factor
    for t in tries.astype(F32):
        middle = (low + high) * (F32(0.5) * inverse)
        best.attempt(t * inverse, clamped(F32(7.5) - middle * t) if kind == "zeros" else np.zeros_like(zero))
    if neighbours:
        found, middle = F32(1) / best.factor, best.zero
        for step in (-1, 1):
            best.attempt(found, clamped(middle + F32(step)))
    for _ in range(refits):
        best.attempt(F32(1) / best.factor, best.zero)
    new = kept(np.ldexp(best.factor.astype(np.float64), e).astype(F32), dtype, kind)
    new_factor = np.where(new == 0, factor, np.ldexp(new.astype(np.float64), -e).astype(F32))
    share = F32(1) - F32(u.shape[1] + 64) * F32(2.0**-23)
    better = best.lost(new_factor, best.zero) < best.lost(factor, zero) * share - F32(2.0**-100)
    better &= new != 0
    return np.where(better, new, scale), np.where(better, new_factor, factor), np.where(better, best.zero, zero)


def round_weights(weight, group, kind="int4", dtype=torch.float32, effort=0, importance=None):
    """Of float32 [N, K], K/group groups to a row.

    Returns:
        values float32 [N, K] (of e2m1 the numbers), scales float32 [N, G] and zero points [N, G] (0 without).
    """
    n, k = weight.shape
    w = np.ascontiguousarray(weight, F32).reshape(-1, group)
    u, e, scale, factor, zero, low, high = rule(w, kind, dtype)
    if effort > 0:
        counts = own_counts(u)
        if importance is not None:
            i = np.tile(np.asarray(importance, F32).reshape(-1, group), (n, 1))
            most = i.max(1)
            exponents = np.where(most == 0, 0, np.frexp(most.astype(np.float64))[1] - 1)
            given = np.ldexp(i.astype(np.float64), -exponents[:, None]).astype(F32)
            counts = np.where(most[:, None] == 0, counts, given)
        scale, factor, zero = searched(u, e, scale, factor, zero, low, high, counts, kind, dtype, effort)
    values = nearest(u / factor[:, None], zero, kind)
    return values.reshape(n, k), scale.reshape(n, -1), zero.reshape(n, -1)
