"""Helpers for testing samplers: distribution tests, words, realistic and poisoned inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, TypeAlias

import torch

Numbers: TypeAlias = torch.Tensor | Sequence[float] | Sequence[int]

EXTREME_WORDS: Final = (0, -1)
"""The words 0 and 2**64 - 1 in two's complement: they draw the first and the last survivor."""

MIN_EXPECTED: Final = 10.0
"""Bins that expect fewer hits are pooled: the chi-square law is a poor fit for rarer ones.

Cochran's rule of 5 is for false-alarm rates of some per cent; far in the tail it errs.
"""

_POISON_32: Final = 0x7FC0DEAD  # a NaN where it is read as fp32, and no id where it is read as int


def chi_square(
    observed: Numbers,
    expected_probabilities: Numbers,
    *,
    false_alarm: float,
    min_expected: float = MIN_EXPECTED,
) -> float:
    """Pearson's goodness-of-fit test; returns the p-value, or raises AssertionError below the bar.

    observed: [n] hits by outcome (integers in any dtype).
    expected_probabilities: [n], each >= 0, sum 1 within 1e-6. Outcomes of probability 0 lie outside
        the support: one hit there fails, whatever the counts.
    false_alarm: in (0, 1): how often a right sampler may fail. Split a suite's rate over its cases
        and fix the seeds.
    min_expected: outcomes that expect fewer hits are pooled into one bin, with the rarest of the
        others as far as that bin needs them.

    `recommended_draws` says how many draws make a given error show. Raises ValueError for
    malformed input.
    """
    hits = torch.as_tensor(observed).to(torch.float64).cpu()
    probabilities = torch.as_tensor(expected_probabilities).to(torch.float64).cpu()
    if hits.ndim != 1 or hits.shape != probabilities.shape or hits.numel() == 0:
        raise ValueError(
            f"observed {tuple(hits.shape)} and expected_probabilities "
            f"{tuple(probabilities.shape)} must have one equal, non-empty dimension"
        )
    if not 0 < false_alarm < 1:
        raise ValueError(f"false_alarm = {false_alarm} must be in (0, 1)")
    if not bool((hits >= 0).all()) or not bool((hits == hits.round()).all()) or hits.sum() == 0:
        raise ValueError("observed must hold non-negative counts, not all 0")
    total = float(probabilities.sum())
    if not bool((probabilities >= 0).all()) or not abs(total - 1) <= 1e-6:
        raise ValueError(f"expected_probabilities must be >= 0 and sum to 1, not to {total}")

    outside = torch.nonzero((probabilities == 0) & (hits > 0)).flatten()
    if outside.numel():
        raise AssertionError(
            f"{int(hits[outside].sum())} hits outside the support, at {outside[:10].tolist()}"
        )

    expected = probabilities / total * hits.sum()
    pooled_hits, pooled_expected = _pool(hits, expected, min_expected)
    degrees = pooled_hits.numel() - 1
    if degrees == 0:
        return 1.0
    terms = (pooled_hits - pooled_expected) ** 2 / pooled_expected
    half = torch.tensor(degrees / 2, dtype=torch.float64)
    p_value = float(torch.special.gammaincc(half, terms.sum() / 2))
    if p_value < false_alarm:
        worst = int(torch.argmax((hits - expected) ** 2 / expected.clamp(min=min_expected)))
        raise AssertionError(
            f"chi-square {float(terms.sum()):.1f} on {degrees} degrees of freedom has p-value "
            f"{p_value:.3g} < {false_alarm:.3g}; outcome {worst} was hit {int(hits[worst])} times, "
            f"{float(expected[worst]):.1f} expected"
        )
    return p_value


def _pool(
    hits: torch.Tensor, expected: torch.Tensor, min_expected: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the rarest outcomes into one bin, so that every bin expects at least min_expected."""
    expected, by_rarity = torch.sort(expected)
    hits = hits[by_rarity]
    rare = int((expected < min_expected).sum())
    if rare == 0:
        return hits, expected
    cumulative = torch.cumsum(expected, 0)
    pooled = max(rare, int((cumulative < min_expected).sum()) + 1)
    pooled = min(pooled, hits.numel())
    return (
        torch.cat([hits[:pooled].sum().view(1), hits[pooled:]]),
        torch.cat([expected[:pooled].sum().view(1), expected[pooled:]]),
    )


def recommended_draws(probability: float, outcomes: int, *, relative_error: float = 0.1) -> int:
    """Draws with which `chi_square` catches one outcome whose probability is off, almost surely.

    probability: of the outcome in question; relative_error: how far it is off; outcomes: how many
    bins the test has after pooling. For false_alarm >= 1e-6 fewer than one run in 5000 misses it,
    unless the outcome is so rare that it is pooled.

    A wrong sampler's statistic follows a noncentral chi-square law of d = outcomes - 1 degrees of
    freedom and noncentrality L >= draws * probability * relative_error**2. Its mass below the
    1 - 1e-6 quantile of the central law is < 1.7e-4 at L = 60 + 12 sqrt(d), for d = 1 .. 1e5.
    """
    if not 0 < probability <= 1 or not relative_error > 0:
        raise ValueError(
            f"probability = {probability} must be in (0, 1], relative_error = {relative_error} > 0"
        )
    noncentrality = 60 + 12 * math.sqrt(max(outcomes - 1, 1))
    return math.ceil(noncentrality / (probability * relative_error**2))


def spaced_words(n: int) -> torch.Tensor:
    """The mid-points of n equal parts of [0, 2**64): int64 [n], two's complement, ascending.

    Over these words each survivor is drawn n times its probability, within 2.
    """
    if n < 1:
        raise ValueError(f"n = {n} must be >= 1")
    words = (((2 * i + 1) << 63) // n for i in range(n))
    return torch.tensor([w - (w >> 63 << 64) for w in words], dtype=torch.int64)


def lm_like_logits(
    rows: int, vocab: int, generator: torch.Generator, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Logits shaped as a language model's: [rows, vocab] on the generator's device.

    -1.3 ln(rank) (Zipf's law, about what open models show) with ranks shuffled per row, plus
    N(0, 0.3) noise.
    """
    device = generator.device
    shuffled = torch.rand(rows, vocab, generator=generator, device=device).argsort(dim=1)
    noise = torch.randn(rows, vocab, generator=generator, device=device)
    return (-1.3 * torch.log(shuffled + 1.0) + 0.3 * noise).to(dtype)


def nan_poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a fresh allocation, in place, with what a read before the write cannot survive.

    Floats become NaN. Integers of 32 and 64 bits become 0x7fc0dead, once and twice: a NaN to who
    reads them as fp32, and no id, count or length to anybody else. Smaller ones get their maximum.
    """
    if tensor.is_floating_point():
        tensor.fill_(math.nan)
    elif tensor.dtype == torch.int32:
        tensor.fill_(_POISON_32)
    elif tensor.dtype == torch.int64:
        tensor.fill_(_POISON_32 << 32 | _POISON_32)
    else:
        tensor.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max)
    return tensor
