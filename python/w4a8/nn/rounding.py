"""From float weights to int4 values and their scales."""

from __future__ import annotations

import torch

from w4a8.core.nibbles import to_nibbles

# Weights that are rounded at a time (or one row): bounds the temporaries, which are some 30 bytes per weight.
CHUNK = 1 << 18
# Scales that the search tries, as shares of the one that makes the largest magnitude 7. Ones above 1 serve groups whose
# weights are nearly multiples of something larger.
SHARES = tuple(1.2 - 0.04 * i for i in range(21))


def round_weight(
    weight: torch.Tensor,
    group_size: int = -1,
    scale_dtype: torch.dtype = torch.float32,
    clip_search: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds a matrix to nearest, a chunk of rows at a time.

    Args:
        weight: floating point [N, K], K even.
        group_size: values of k per scale, a divisor of K; -1 is channelwise.
        scale_dtype: float32 or bfloat16. Weights are rounded with the scale as it is stored.
        clip_search: False: the largest magnitude of a group becomes 7 or -7. True: each group gets a scale that
            makes the squared error smaller (``searched_scales``).

    Returns:
        uint8 [N, K/2] and scales [N, K / group_size], as dyn_quant_pack_4bit_weight takes them. A weight on the meta
        device gives tensors on the meta device.

    Raises:
        ValueError: the group does not fit, another scale_dtype, or the weight has a NaN or an infinity.
    """
    n, k = weight.shape
    group = k if group_size == -1 else group_size
    if group <= 0 or k % group != 0:
        raise ValueError(f"group_size is {group_size}, expected -1 or a divisor of in_features = {k}")
    if scale_dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"scale_dtype is {scale_dtype}, expected torch.float32 or torch.bfloat16")
    nibbles = torch.empty(n, k // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(n, k // group, dtype=scale_dtype, device=weight.device)
    if weight.is_meta:
        return nibbles, scales
    rows = max(1, CHUNK // k)
    for begin in range(0, n, rows):
        chunk = weight[begin : begin + rows].detach().float().contiguous()
        if not torch.isfinite(chunk).all():
            raise ValueError("the weight has a NaN or an infinite element")
        groups = chunk.reshape(len(chunk), k // group, group)
        chosen = covering_scales(groups, scale_dtype)
        if clip_search:
            chosen = searched_scales(groups, chosen)
        scales[begin : begin + rows] = chosen
        nibbles[begin : begin + rows] = to_nibbles(_round(groups, chosen).to(torch.int8).reshape(len(chunk), k))
    return nibbles, scales


def covering_scales(groups: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float32 [..., g] to scales [...] that make the largest magnitude 7; 1 for zeros."""
    scales = (groups.abs().amax(-1) / 7).to(dtype)
    return torch.where(scales == 0, torch.ones_like(scales), scales)


def searched_scales(groups: torch.Tensor, covering: torch.Tensor) -> torch.Tensor:
    """Scales with a small squared error of rounding to nearest, never more than that of ``covering``.

    Each of SHARES times ``covering`` gives values q. The best scale for these is A / B with A = sum(w q) and
    B = sum(q q), and leaves the error sum(w w) - A^2 / B; so the largest A^2 / B wins.

    Args:
        groups: float32 [..., g].
        covering: float32 or bfloat16 [...], not zero.

    Returns:
        The dtype and shape of ``covering``.
    """
    u = groups / covering.float().unsqueeze(-1)  # at most about 8, so no sum overflows
    most = torch.zeros(covering.shape)
    factor = torch.ones(covering.shape)
    q, product = torch.empty_like(u), torch.empty_like(u)
    for share in SHARES:
        torch.mul(u, 1 / share, out=q).round_().clamp_(-8, 7)
        a = torch.mul(q, u, out=product).sum(-1)
        b = torch.mul(q, q, out=product).sum(-1)
        gain = a * a / b  # NaN if all of q is 0, and then not larger
        larger = gain > most
        most = torch.where(larger, gain, most)
        factor = torch.where(larger, a / b, factor)
    scales = (covering.float() * factor).to(covering.dtype)
    scales = torch.where(scales > 0, scales, covering)
    # Storing the scale, or the sums, may have rounded the gain away.
    better = squared_error(groups, scales) < squared_error(groups, covering)
    return torch.where(better, scales, covering)


def squared_error(groups: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float64 [...]: what rounding float32 [..., g] with scales [...] loses."""
    rounded = _round(groups, scales).double() * scales.double().unsqueeze(-1)
    return rounded.sub_(groups).square_().sum(-1)


def _round(groups: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (groups / scales.float().unsqueeze(-1)).round_().clamp_(-8, 7)
