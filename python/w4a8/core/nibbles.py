"""Converts 4-bit codes between the forms of checkpoints and of the operators.

int8:    one value in [-8, 7] per byte                                            [..., K]
codes:   one code in [0, 15] per byte, value + 8 of int4                          [..., K], uint8
nibbles: codes in pairs, low nibble = even k, high nibble = odd k                 [..., K / 2], uint8
int32:   words of 8 codes, code i in bits 4i to 4i + 3 (8-bit codes: 4 a word)    [..., ceil(K / 8)]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

CODES = 8  # codes of 4 bits in a word


def to_nibbles(values: torch.Tensor) -> torch.Tensor:
    """Packs int8 values in pairs.

    Args:
        values: int8 [..., K] in [-8, 7], K even.

    Returns:
        uint8 [..., K / 2]. Its temporaries never exceed one copy of ``values``.
    """
    # The nibble v + 8 is the low half of v in two's complement, with the sign bit flipped.
    packed = values[..., 1::2] << 4
    low = values[..., ::2] & 0xF
    packed |= low
    packed ^= -0x78  # 0x88 as int8: both sign bits
    return packed.view(torch.uint8)


def from_nibbles(nibbles: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`to_nibbles`: uint8 [..., K / 2] to int8 [..., K]."""
    values = apart(nibbles)
    values -= 8  # wraps around in uint8; the same bits are right as int8
    return values.view(torch.int8)


def apart(nibbles: torch.Tensor) -> torch.Tensor:
    """uint8 nibbles [..., K / 2] to uint8 codes [..., K]."""
    return torch.stack((nibbles & 0xF, nibbles >> 4), dim=-1).flatten(-2)


def pairs(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes [N, K] to nibbles [N, K / 2]."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def word_bytes(words: torch.Tensor) -> torch.Tensor:
    """int32 [..., W] to uint8 [..., 4 W]: nibbles, or 8-bit codes, in order."""
    # Flatten first: a "contiguous" tensor may have any stride in a dimension of size 1.
    found = words.contiguous().reshape(-1).view(torch.uint8).view(*words.shape[:-1], -1)
    if sys.byteorder == "big":
        found = found.unflatten(-1, (-1, 4)).flip(-1).flatten(-2)
    return found


def words_of(nibbles: torch.Tensor) -> torch.Tensor:
    """uint8 [R, B] to int32 [R, ceil(B / 4)]: the inverse of :func:`word_bytes`, padded with zeros."""
    padded = torch.nn.functional.pad(nibbles, (0, -nibbles.shape[1] % 4))
    if sys.byteorder == "big":
        padded = padded.unflatten(-1, (-1, 4)).flip(-1).flatten(-2)
    return padded.reshape(-1).view(torch.int32).view(len(padded), padded.shape[1] // 4)


def word_codes(words: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """int32 [..., W] to uint8 codes of 4 or 8 bits [..., 32 / bits W]."""
    found = word_bytes(words)
    return found if bits == 8 else apart(found)


@dataclass(frozen=True)
class Words:
    """Codes that are not decoded, uint8 [N, K / 2] or of 8 bits [N, K], in words that :func:`w4a8.pack_words` takes.

    Attributes:
        words: int32, ``gptq`` [K / codes in a word, N] or ``awq`` [K, N / 8], on the CPU, K a multiple of 8.
        order: ``gptq`` or ``awq``.
        bits: of a code.
        read: words to codes.
    """

    words: torch.Tensor
    order: str
    bits: int
    read: Callable[[torch.Tensor], torch.Tensor]
    dtype = torch.uint8
    is_meta = False

    @classmethod
    def of(cls, words: torch.Tensor, order: str, bits: int, read: Callable[[torch.Tensor], torch.Tensor]) -> Codes:
        """Words as they are, or decoded where the operator does not take them."""
        found = cls(words, order, bits, read)
        return found if words.device.type == "cpu" and found.columns % 8 == 0 else found.decoded()

    @property
    def _along(self) -> int:
        """Codes of a row in a word."""
        return 1 if self.order == "awq" else 32 // self.bits

    @property
    def columns(self) -> int:
        """K."""
        return self._along * self.words.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """Of the codes."""
        rows = self.words.shape[1] * (CODES if self.order == "awq" else 1)
        return rows, self.columns * self.bits // 8

    def decoded(self) -> torch.Tensor:
        """The codes."""
        return self.read(self.words)

    def __getitem__(self, index: slice | torch.Tensor | tuple[slice, slice]) -> Codes:
        """Some rows, and bytes of columns: of whole words not decoded."""
        rows, columns = index if isinstance(index, tuple) else (index, slice(None))
        begin, end = (at * 8 // self.bits for at in columns.indices(self.shape[1])[:2])
        if self.order == "awq":
            first, last, step = rows.indices(self.shape[0]) if isinstance(rows, slice) else (1, 1, 1)
            if step != 1 or first % CODES != 0 or last % CODES != 0:
                return self.decoded()[index]
            rows = slice(first // CODES, last // CODES)
        if begin % 8 != 0 or end % 8 != 0:
            return self.decoded()[index]
        return replace(self, words=self.words[begin // self._along : end // self._along, rows])


Codes = torch.Tensor | Words


def from_int32(words: torch.Tensor, columns: int) -> torch.Tensor:
    """compressed-tensors' ``weight_packed``, int32 [..., ceil(columns / 8)], to int8 [..., columns], columns even."""
    return from_nibbles(word_bytes(words)[..., : columns // 2])


def check_int4_range(values: torch.Tensor, name: str) -> None:
    """Raises ValueError if int8 values are outside [-8, 7]: packing would change such values."""
    if values.numel() == 0 or values.is_meta:
        return
    low, high = (int(bound) for bound in torch.aminmax(values))
    if low < -8 or high > 7:
        raise ValueError(f"{name} holds values in [{low}, {high}], but int4 values are in [-8, 7]")
