"""Tables of angles from the rotary embeddings of transformers, whose modules vLLM runs for some models, too."""

from __future__ import annotations

from typing import Any

import torch

# Types whose angles do not depend on the length of the text.
FIXED = ("default", "linear", "llama3", "yarn", "proportional")


def for_queries(table: torch.Tensor, every: int, scale: float, ahead: int = 0) -> torch.Tensor:
    """A table of angles, times the factor ``1 + scale * log(1 + floor((position + ahead) / every))`` of a query."""
    steps = torch.div(torch.arange(len(table)) + ahead, every, rounding_mode="floor")
    return table * (1 + scale * steps.float().log1p())[:, None]


def unturned(positions: int, size: int) -> torch.Tensor:
    """Angles by which a head of ``size`` channels stays as it is."""
    return torch.tensor([[1.0], [0.0]]).repeat(1, size // 2).view(1, size).repeat(positions, 1)


def angles(rotary: Any, positions: int, layer_type: str | None) -> torch.Tensor:
    """Float32 [positions, 2 * half]: cosines, then sines.

    Args:
        rotary: of transformers.
        positions: the number of rows.
        layer_type: an embedding may have angles for each type of layers; None: for all.
    """
    more = {} if layer_type is None else {"layer_type": layer_type}
    found = rotary(torch.zeros(1, dtype=torch.float32), torch.arange(positions)[None], **more)
    cos, sin = (found.real, found.imag) if isinstance(found, torch.Tensor) else found  # DeepSeek V2: complex numbers
    # Most models write each angle twice, for both halves of a head, or Command R for neighbours.
    half = getattr(rotary, "inv_freq" if layer_type is None else f"{layer_type}_inv_freq").numel()
    of_neighbours = cos.shape[-1] == 2 * half and torch.equal(cos[..., ::2], cos[..., 1::2])
    once = slice(None, None, 2) if of_neighbours else slice(half)
    return torch.cat([cos[0, :, once], sin[0, :, once]], -1).contiguous()
