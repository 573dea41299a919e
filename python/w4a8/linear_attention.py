"""The operators of linear attention: layers whose past is a state of a fixed size. Part of :mod:`w4a8.ops`."""

import torch

from w4a8.compiled import operator


@operator
def gated_delta(
    qkv: torch.Tensor,
    z: torch.Tensor,
    ba: torch.Tensor,
    conv_weight: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    norm: torch.Tensor,
    conv_state: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    query_start_loc: torch.Tensor,
    fresh: torch.Tensor,
    *,
    key_heads: int,
    value_heads: int,
    norm_eps: float,
    gate: str = "silu",
    decay: torch.Tensor | None = None,
    out_slots: torch.Tensor | None = None,
    accepted: torch.Tensor | None = None,
    beta_scale: float = 1.0,
) -> torch.Tensor:
    """A layer of linear attention by the gated delta rule, between its projections (docs/numerics.md section 11).

    Short convolution, gates, recurrence and gated norm, of prompts and single tokens in one call: of Qwen3-Next and
    Qwen3.5, with ``beta_scale`` of OLMo-Hybrid, with ``decay`` of Kimi-Linear (KDA). The bits of a sequence depend on
    its tokens alone: not on how they are cut into calls, on other sequences or on the number of threads. C is 2 *
    key_heads * K + value_heads * V.

    Args:
        qkv: float32, bfloat16 or float16 [T, C]: the projections of queries, keys [key_heads, K] and values
            [value_heads, V], before the convolution.
        z: [T, value_heads * V], the gate behind the norm. z, ba and decay may have another of these types.
        ba: [T, 2 * value_heads]: b, whose sigmoid is beta, then what the decay is made of. [T, value_heads] with
            ``decay``.
        conv_weight: floating point [C, width], width 2 to 8. Is not copied if it is the transpose of a contiguous
            float32 [width, C].
        a: floating point [value_heads], exp(A_log): a decay is exp(-a * softplus(. + dt_bias)).
        dt_bias: floating point [value_heads]; [value_heads, K] with ``decay``.
        norm: floating point [V], the weight of the norm as it is (not 1 + weight).
        conv_state: float32, bfloat16 or float16 [slots, width - 1, C] of any strides, changed in place: the last rows
            of qkv, which is rounded to this type in front of the convolution.
        state: float32 [slots, value_heads, K, V], changed in place; of any strides but the last, which is 1. K and V
            are multiples of 16 up to 256. Value head h takes key head h // (value_heads / key_heads).
        slots: int32 [B], the slot of each sequence in both states. Sequences with tokens have different ones.
        query_start_loc: int32 [B + 1]: qkv[query_start_loc[b] : query_start_loc[b + 1]] are the next tokens of
            sequence b. A sequence without tokens leaves its slot as it is.
        fresh: bool [B]: the sequence begins here. What its slot holds, NaN too, counts as zeros.
        norm_eps: added to the mean of squares of the norm. That of the norms of queries and keys is 1e-6.
        gate: "silu" or "sigmoid", of z.
        decay: [T, value_heads, K], what the decay of each channel of the keys is made of (KDA). None: one decay for a
            head, from ba.
        out_slots: int32 [B, 1 + drafts], for guessed tokens, of which the next call may take back some; with
            ``accepted``. The state behind token t of sequence b goes to slot ``out_slots[b, t]``. conv_state then is
            [slots, width - 1 + drafts, C], and slot ``out_slots[b, 0]`` gets width - 2 rows from before, then those of
            the tokens.
        accepted: int32 [B], how many tokens of the sequence's last call are right, 1 to 1 + drafts: the sequence goes
            on behind these, with up to 1 + drafts tokens. 0: no guesses; the last state alone goes to ``slots``, and
            the last rows to the first width - 1 of conv_state. Before its first guesses a sequence has accepted 1
            token, its slot being ``out_slots[b, 0]``.
        beta_scale: a positive factor of beta. 2: keys may turn the sign of what a state has of them (OLMo-Hybrid).

    Returns:
        [T, value_heads * V] of the dtype of qkv.
    """


@operator
def state_space(
    xbc: torch.Tensor,
    z: torch.Tensor | None,
    dt: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    d: torch.Tensor,
    norm: torch.Tensor | None,
    conv_state: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    query_start_loc: torch.Tensor,
    fresh: torch.Tensor,
    *,
    groups: int,
    norm_eps: float,
    norm_groups: int = 1,
    norm_first: bool = False,
    out_slots: torch.Tensor | None = None,
    accepted: torch.Tensor | None = None,
) -> torch.Tensor:
    """A layer of Mamba-2 between its projections (docs/numerics.md section 11).

    Of Nemotron-H, Granite 4, Falcon-H1 and Bamba. Short convolution, steps, recurrence, gate and norm, of prompts and
    single tokens in one call. Bits as of :func:`gated_delta`. C is heads * P + 2 * groups * N.

    Args:
        xbc: float32, bfloat16 or float16 [T, C]: the projections of x [heads, P], B and C [groups, N], before the
            convolution.
        z: [T, heads * P], whose SiLU multiplies the result; or None. z and dt may have another of these types.
        dt: [T, heads]: a step is softplus(dt + dt_bias). There are no limits of steps.
        conv_weight: as for gated_delta, [C, width].
        conv_bias: floating point [C], or None.
        a: floating point [heads], exp(A_log): a decay is exp(-a * step).
        dt_bias: floating point [heads].
        d: floating point [heads], how much of x is added to the result.
        norm: floating point [heads * P], the weight of the norm, as it is; None: there is no norm.
        conv_state: as for gated_delta, the last rows of xbc.
        state: float32 [slots, heads, P, N], changed in place; of any strides but the last, which is 1. P and N are
            multiples of 16 up to 256. Head h takes B and C of group h // (heads / groups).
        slots, query_start_loc, fresh: as for gated_delta.
        groups: a divisor of the heads.
        norm_eps: added to the mean of squares of the norm.
        norm_groups: a divisor of the heads: so many parts of a row are normed by themselves.
        norm_first: the norm comes before the gate; else after.
        out_slots, accepted: as for gated_delta.

    Returns:
        [T, heads * P] of the dtype of xbc.
    """


@operator
def short_conv(
    bcx: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    slots: torch.Tensor,
    query_start_loc: torch.Tensor,
    fresh: torch.Tensor,
    *,
    out_slots: torch.Tensor | None = None,
    accepted: torch.Tensor | None = None,
) -> torch.Tensor:
    """A short convolution between two gates, C * conv(B * x) (LFM2; docs/numerics.md section 11).

    Args:
        bcx: float32, bfloat16 or float16 [T, 3 * H]: the projections B, C and x. H is a multiple of 16.
        conv_weight: as for gated_delta, [H, width].
        conv_bias: floating point [H], or None.
        conv_state: as for gated_delta, [slots, width - 1, H]: the last rows of B * x.
        slots, query_start_loc, fresh, out_slots, accepted: as for gated_delta.

    Returns:
        [T, H] of the dtype of bcx.
    """


def layer_weights(conv_weight: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor) -> dict[str, torch.Tensor]:
    """Arguments of gated_delta and state_space, made of a layer's parameters, that the operators do not copy.

    Args:
        conv_weight: floating point [C, width].
        a_log: floating point, the logarithms of ``a``.
        dt_bias: floating point.

    Returns:
        ``conv_weight``, ``a`` and ``dt_bias``, float32.
    """
    return {
        "conv_weight": conv_rows(conv_weight),
        "a": a_log.detach().float().exp(),
        "dt_bias": dt_bias.detach().float(),
    }


def conv_rows(conv_weight: torch.Tensor) -> torch.Tensor:
    """A weight [C, width] as float32 in the order of [width, C], which the operators do not copy."""
    return conv_weight.detach().float().T.contiguous().T
