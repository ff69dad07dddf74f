"""Elementary functions whose bits do not depend on where in a tensor an element lies.

On the CPU, torch's vectorised loops and their scalar tails may round exp and log differently, so a
row's result would depend on its neighbours. There, these use IEEE additions, multiplications and
bit operations alone. A CUDA kernel evaluates one formula for every element, so torch's is taken.
"""

from __future__ import annotations

import math
from typing import Final

import torch

LN_2: Final = math.log(2.0)
MASS_BITS: Final = 40
"""A probability mass is rint(weight * 2**MASS_BITS), its row's largest weight being 1."""
_SCAN_BLOCK: Final = 512
_MASK32: Final = 0xFFFFFFFF

# Taylor's series of 2**f on [-1/2, 1/2]: relative error below 2**-36 (0.3466**10 / 10! = 2**-37).
EXP2_COEFFICIENTS: Final = [LN_2**k / math.factorial(k) for k in range(10)]
# ln m = 2 atanh(s), s = (m - 1) / (m + 1), |s| <= 0.172 on [sqrt(1/2), sqrt(2)]: 2**-53 at 11.
_LOG_TERMS: Final = 11


def exp2(exponent: torch.Tensor) -> torch.Tensor:
    """2**exponent, float64; exponents below -1000 count as -1000."""
    exponent = exponent.clamp(min=-1000.0)
    if exponent.is_cuda:
        return torch.exp2_(exponent)
    whole = exponent.round()
    fraction = exponent.sub_(whole)
    result = torch.full_like(fraction, EXP2_COEFFICIENTS[-1])
    for coefficient in reversed(EXP2_COEFFICIENTS[:-1]):
        result.mul_(fraction).add_(coefficient)
    # A float64 whose exponent field is n + 1023 and whose mantissa is 0 is 2**n.
    power = whole.long().add_(1023).bitwise_left_shift_(52).view(torch.float64)
    return result.mul_(power)


def log(value: torch.Tensor) -> torch.Tensor:
    """Natural logarithm, float64, of positive finite values."""
    if value.is_cuda:
        return torch.log(value)
    mantissa, exponent = torch.frexp(value)  # mantissa in [1/2, 1)
    small = mantissa < math.sqrt(0.5)
    mantissa = torch.where(small, mantissa * 2.0, mantissa)
    exponent = exponent.to(torch.float64) - small.to(torch.float64)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    series = torch.full_like(s, 1.0 / (2 * _LOG_TERMS - 1))
    for k in range(_LOG_TERMS - 2, -1, -1):
        series = series * square + 1.0 / (2 * k + 1)
    return exponent * LN_2 + 2.0 * s * series


def masses(weights: torch.Tensor) -> torch.Tensor:
    """Integer probability masses, int64, of float64 weights in [0, 1]."""
    return (weights * 2.0**MASS_BITS).round_().long()


def cumulative_sum(values: torch.Tensor) -> torch.Tensor:
    """Cumulative sums of int64 [c, V] along the rows: `cumsum`, in two levels where rows are long.

    On a GPU torch scans a row by one block, which leaves most of the device idle.
    """
    count, length = values.shape
    if length <= 4 * _SCAN_BLOCK:
        return values.cumsum(1)
    padded = torch.nn.functional.pad(values, (0, -length % _SCAN_BLOCK))
    inner = padded.view(count, -1, _SCAN_BLOCK).cumsum(2)
    totals = inner[:, :, -1]
    inner += (totals.cumsum(1) - totals).unsqueeze(2)
    return inner.flatten(1)[:, :length]


def multiply_high(word: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """floor(word * total / 2**64), int64; word is 64 unsigned bits, total in [0, 2**62)."""
    word_low, word_high = word & _MASK32, (word >> 32) & _MASK32
    total_low, total_high = total & _MASK32, total >> 32
    low, cross = word_low * total_low, word_high * total_low  # both may wrap: bits stay right
    other = word_low * total_high
    middle = ((low >> 32) & _MASK32) + (cross & _MASK32) + (other & _MASK32)
    return word_high * total_high + ((cross >> 32) & _MASK32) + (other >> 32) + (middle >> 32)


def round_down_to_fp32(value: torch.Tensor) -> torch.Tensor:
    """The largest fp32 that is <= value (float64)."""
    nearest = value.to(torch.float32)
    below = torch.nextafter(nearest, torch.full_like(nearest, -torch.inf))
    return torch.where(nearest.to(torch.float64) > value, below, nearest)
