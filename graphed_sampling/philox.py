"""Philox4x32-10, the one source of random words in this package.

One 64-bit word per draw, a pure function of (seed, position, stream):

    key     = (seed low 32 bits, seed high 32 bits)
    counter = (position low, position high, stream, 0)
    word    = out[1] << 32 | out[0]

Source of the generator: J. K. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
SC 2011. `word` is the definition in Python integers; `words` is the same on tensors of any device.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import torch

_MULTIPLIER_0: Final = 0xD2511F53
_MULTIPLIER_1: Final = 0xCD9E8D57
_WEYL_0: Final = 0x9E3779B9
_WEYL_1: Final = 0xBB67AE85
_ROUNDS: Final = 10
_MASK32: Final = 0xFFFFFFFF
_MASK64: Final = 0xFFFFFFFFFFFFFFFF


class Stream(IntEnum):
    """Independent streams of one request; the third counter word."""

    TARGET = 0
    DRAFT = 1
    ACCEPTANCE = 2
    RESIDUAL = 3
    # Seeds are derived from seeds here, far from the streams that draw tokens.
    CHILD_SEED = 0xFFFFFFFE
    ADMISSION_SEED = 0xFFFFFFFF


def block(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 itself: four 32-bit words out of a counter and a key of 32-bit words."""
    c0, c1, c2, c3 = counter
    key0, key1 = key
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ key0,
            product1 & _MASK32,
            (product0 >> 32) ^ c3 ^ key1,
            product0 & _MASK32,
        )
        key0, key1 = (key0 + _WEYL_0) & _MASK32, (key1 + _WEYL_1) & _MASK32
    return c0, c1, c2, c3


def word(seed: int, position: int, stream: int = Stream.TARGET) -> int:
    """The 64-bit word of one draw, in [0, 2**64).

    Only the low 64 bits of seed and position and the low 32 of stream count.
    """
    low, high, _, _ = block(
        (position & _MASK32, (position >> 32) & _MASK32, stream & _MASK32, 0),
        (seed & _MASK32, (seed >> 32) & _MASK32),
    )
    return (high << 32) | low


def words(seed: torch.Tensor, position: torch.Tensor, stream: int = Stream.TARGET) -> torch.Tensor:
    """The words of many draws: int64 [n], the 64 bits in two's complement.

    seed, position: int64 [n], the 64 bits in two's complement.
    """

    # Both halves of a round in one tensor operation each: on a GPU every operation is a launch.
    # `even` is (c0, c2), `odd` is (c3, c1), and everything is int64 in [0, 2**32).
    def pair(first: int, second: int) -> torch.Tensor:
        return torch.stack([torch.full_like(seed, first), torch.full_like(seed, second)])

    multiplier, weyl = pair(_MULTIPLIER_0, _MULTIPLIER_1), pair(_WEYL_1, _WEYL_0)
    even = torch.stack([position, torch.full_like(position, stream)]) & _MASK32
    odd = torch.stack([torch.zeros_like(position), (position >> 32) & _MASK32])
    key = torch.stack([(seed >> 32) & _MASK32, seed & _MASK32])
    for _ in range(_ROUNDS):
        # The product wraps in int64, which leaves its 64 bits right; the masks undo the sign.
        product = even * multiplier
        # (c2, c0) of the next round: the high words of (c0, c2), each with its own half of the key.
        swapped = ((product >> 32) & _MASK32) ^ odd ^ key
        even, odd = swapped.flip(0), product & _MASK32
        key = (key + weyl) & _MASK32
    # In the last round odd is (low of c0, low of c2), which are (c3, c1).
    return (odd[1] << 32) | even[0]
