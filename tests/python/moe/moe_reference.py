"""A mixture-of-experts layer in float64, with a bound on what a correct implementation may differ from it.

Shares no code with the package. Rows are quantized as docs/numerics.md section 1 defines (float32, operation by
operation: the integers are part of the definition); everything after that is float64. The bound follows the error
through the layer:

    w13         the roundings of float32 sums, relative to the sum of absolute values
    activation  the error of its arguments times its Lipschitz constant, plus the error granted to exp and erfc
    quantizing  an integer may differ by one where its value is within the error of the middle between two
    w2          the roundings again, and one step times |weight| for each integer that may differ
    combining   one rounding per slot, and one to the type of the output
"""

import math
from itertools import pairwise

import torch

U = 2.0**-24
OUTPUT_ROUNDING = {torch.float32: (U, 0.0), torch.bfloat16: (2.0**-8, 0.0), torch.float16: (2.0**-11, 2.0**-25)}


def quantize_rows(x):
    """float32 [M, K] -> q - zp, recip, as float64 [M, K], [M, 1], and zp float64 [M, 1]."""
    zero = torch.zeros(())
    low = torch.minimum(zero, x.amin(1, keepdim=True))
    high = torch.maximum(zero, x.amax(1, keepdim=True))
    # A tensor divided by a tensor: torch computes 255 / tensor as 255 * reciprocal, which rounds twice.
    scale = torch.where(high == low, torch.ones_like(high), torch.full_like(high, 255) / (high - low))
    recip = 1 / scale
    from_low, from_high = -128 - low * scale, 127 - high * scale
    zp = torch.where((-128 + low * scale) + (127 + high * scale) > 0, from_low, from_high).clamp(-128, 127).round()
    q = ((x * scale).round() + zp).clamp(-128, 127)
    return (q - zp).double(), recip.double(), zp.double()


def dequantize(values, scales):
    """int8 [N, K] and scales [N, G] -> float64 [N, K]."""
    values, scales = values.double(), scales.double()
    return (values.view(len(values), scales.shape[1], -1) * scales.unsqueeze(-1)).flatten(1)


def _rounding(rows, zp, recip, weight, groups, bias):
    """Bound on the float32 roundings of rows @ weight.T * recip + bias; rows = q - zp."""
    q_size, size = (rows + zp).abs(), weight.abs()
    total = recip.abs() * (q_size @ size.T + zp.abs() * size.sum(1))
    # Per group one rounding in the sum and one in W; two conversions, recip * s, and the last multiply.
    return (2 * groups + 5) * U * total + 3 * U * (0 if bias is None else bias.abs().double())


def silu(x):
    return x / (1 + torch.exp(-x))


def _gate(name, g):
    """The function of the gate, and a bound on its derivative."""
    if name == "silu":
        return silu(g), 1.1
    if name.startswith("swigluoai"):
        c = g.clamp(max=7)
        return c / (1 + torch.exp(-1.702 * c)), 1.1
    if name == "swiglustep":
        return silu(g).clamp(max=7), 1.1
    if name == "gelu":
        return g * torch.special.erfc(-g / math.sqrt(2)) / 2, 1.13
    if name == "gelu_tanh":
        return g * (1 + torch.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))) / 2, 1.13
    assert name == "relu2", name
    return g.clamp(min=0) ** 2, 2 * g.abs() + 1e-3


def activate(name, gate_up, error):
    """MoEActivation value -> h and its error; gate_up [M, 2 I] (halves) or, for *_no_mul, [M, I]."""
    if name.endswith("_no_mul"):
        g, g_error = gate_up, error
        value, slope = _gate(name[: -len("_no_mul")], g)
        h, h_error = value, slope * g_error
    else:
        (g, u), (g_error, u_error) = gate_up.chunk(2, 1), error.chunk(2, 1)
        value, slope = _gate(name, g)
        if name.startswith("swigluoai"):
            factor = u.clamp(-7, 7) + 1
        elif name == "swiglustep":
            factor = u.clamp(-7, 7)
        else:
            factor = u
        h = value * factor
        h_error = slope * g_error * (factor.abs() + u_error) + value.abs() * u_error
    # exp within 2e-7, erfc within 5e-7; arguments rounded: condition |a| of exp(a), a^2 + 1 of the normal distribution.
    granted = 5e-7 + 8 * U + 12 * U * (g**2 + 1)
    return h, h_error + granted * h.abs() + 1e-37


def _near_half(value, margin):
    return (value - value.floor() - 0.5).abs() <= margin


def _w2(h, error, weight, groups, bias):
    """quantize(h) @ weight.T + bias, and its error."""
    error = error + U * h.abs()
    rows, recip, zp = quantize_rows(h.float())
    y = rows @ weight.T * recip + (0 if bias is None else bias.double())
    low, high = h.amin(1, keepdim=True).clamp(max=0), h.amax(1, keepdim=True).clamp(min=0)
    span = high - low
    scale = torch.where(span > 0, 255 / span, torch.ones_like(span))
    worst = error.amax(1, keepdim=True)
    relative = torch.where(span > 0, 2 * worst / span, torch.zeros_like(span)) + 4 * U  # of scale and recip
    undecided = _near_half(h * scale, h.abs() * scale * relative + error * scale)
    # Another zero point moves only what is clamped, which any element at the end of the range may be.
    zp_margin = 255 * relative + worst * scale + 512 * U
    other_zp = _near_half(-128 - low * scale, zp_margin) | _near_half(127 - high * scale, zp_margin)
    at_end = ((rows + zp).abs() >= 126) & other_zp
    moved = (undecided | at_end).double() @ weight.abs().T * recip
    shared = (relative + 2 * U) * ((rows.abs() @ weight.abs().T) * recip)
    return y, moved + shared + _rounding(rows, zp, recip, weight, groups, bias) * (1 + relative)


def moe(x, ids, router, experts, activation, weight_on_input=False, router_error=0.0):
    """The layer.

    Args:
        x: [T, H], any dtype.
        ids: int [T, k]; -1 is skipped.
        router: float64 [T, k].
        experts: list of ((values int8 [N, H], scales [N, G], bias [N] or None), the same of w2).
        activation: value of a MoEActivation.
        weight_on_input: router weights multiply the rows.
        router_error: relative error granted to the router weights.

    Returns:
        float64 [T, H], and the bound, float64 [T, H].
    """
    rows, recip, zp = quantize_rows(x.float())
    out, bound, size = (torch.zeros(x.shape, dtype=torch.float64) for _ in range(3))
    for slot in range(ids.shape[1]):
        for expert in sorted(set(ids[:, slot].tolist()) - {-1}):
            mine = (ids[:, slot] == expert).nonzero().flatten()
            (v13, s13, b13), (v2, s2, b2) = experts[expert]
            w13, w2 = dequantize(v13, s13), dequantize(v2, s2)
            weight = router[mine, slot].unsqueeze(1)
            on_input = weight if weight_on_input else torch.ones_like(weight)
            r = recip[mine] * on_input
            gate_up = rows[mine] @ w13.T * r + (0 if b13 is None else b13.double())
            error = _rounding(rows[mine], zp[mine], r, w13, s13.shape[1], b13)
            if weight_on_input:
                error = error + (router_error + U) * (rows[mine].abs() @ w13.abs().T * r.abs())
            h, error = activate(activation, gate_up, error)
            y, error = _w2(h, error, w2, s2.shape[1], b2)
            factor = torch.ones_like(weight) if weight_on_input else weight
            out[mine] += factor * y
            bound[mine] += factor.abs() * (error + router_error * y.abs())
            size[mine] += (factor * y).abs()
    bound += (ids.shape[1] + 1) * U * (size + bound)
    relative, absolute = OUTPUT_ROUNDING[x.dtype]
    return out, bound + relative * (out.abs() + bound) + absolute


def assert_close(actual, expected, bound):
    """Every element within its bound, the worst one named."""
    excess = (actual.double() - expected).abs() - bound
    assert not torch.isnan(excess).any()
    worst = int(excess.argmax())
    assert excess.max() <= 0, (
        f"{int((excess > 0).sum())} of {excess.numel()} out of tolerance; worst at {divmod(worst, excess.shape[-1])}: "
        f"{actual.flatten()[worst].item()!r}, expected {expected.flatten()[worst].item()!r} "
        f"+- {bound.flatten()[worst].item()!r}"
    )


# ---- routing ----


def route(method, logits, top_k, groups=None, keep=None, bias=None, scale=1.0):
    """One token at a time, by the table of routing methods; ties to the lower index.

    Args:
        method: name of a RoutingMethodType.
        logits: [T, E].
        top_k, groups, keep, bias, scale: as of the layer.

    Returns:
        weights float64 [T, k], ids [T, k], and the smallest difference of two scores that are not equal.
    """
    score = {
        "Default": lambda v: torch.softmax(v, 0),
        "Renormalize": lambda v: torch.softmax(v, 0),
        "RenormalizeNaive": lambda v: torch.softmax(v, 0),
        "TopK": lambda v: v,
        "DeepseekV4": lambda v: torch.log1p(torch.exp(v)).sqrt(),
    }.get(method, lambda v: 1 / (1 + torch.exp(-v)))
    renormalize = method in (
        "Renormalize",
        "RenormalizeNaive",
        "DeepSeekV3",
        "SigmoidRenorm",
        "MiniMax2",
        "DeepseekV4",
    )
    all_weights, all_ids, gap = [], [], math.inf
    for row in logits.double():
        scores = score(row)
        ranked = (scores if bias is None else scores + bias.double()).tolist()
        experts = range(len(ranked))
        distinct = sorted(set(ranked))
        gap = min([gap] + [b - a for a, b in pairwise(distinct)])
        if groups is not None:
            size = len(ranked) // groups
            value = []
            for group in range(groups):
                best = sorted(ranked[group * size : (group + 1) * size], reverse=True)
                value.append(best[0] if bias is None else sum(best[:2]))
            distinct = sorted(set(value))
            gap = min([gap] + [b - a for a, b in pairwise(distinct)])
            kept = sorted(range(groups), key=lambda group: (-value[group], group))[:keep]
            experts = [expert for expert in experts if expert // size in kept]
        chosen = sorted(experts, key=lambda expert: (-ranked[expert], expert))[:top_k]
        weights = scores[chosen]
        if renormalize:
            weights = weights / weights.sum()
        all_weights.append(weights * scale)
        all_ids.append(chosen)
    return torch.stack(all_weights), torch.tensor(all_ids), gap
