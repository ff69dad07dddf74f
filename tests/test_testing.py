"""The test helpers, tested: right samplers pass, mutants fail, at the rates that they state."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from graphed_sampling.testing import (
    EXTREME_WORDS,
    MIN_EXPECTED,
    chi_square,
    lm_like_logits,
    nan_poison,
    recommended_draws,
    spaced_words,
)

ZIPF = torch.arange(1, 201, dtype=torch.float64) ** -1.3
ZIPF /= ZIPF.sum()


def multinomial(probabilities: torch.Tensor, draws: int, seed: int) -> torch.Tensor:
    counts = np.random.default_rng(seed).multinomial(draws, probabilities.numpy())
    return torch.from_numpy(counts)


# chi_square.


def test_statistic_and_p_value_by_hand() -> None:
    # (60 - 50)**2 / 50 + (40 - 50)**2 / 50 = 4 on one degree: p = erfc(sqrt(4 / 2)) = .0455003.
    assert chi_square([60, 40], [0.5, 0.5], false_alarm=0.01) == pytest.approx(0.0455003, rel=1e-5)
    # 100 / 25 + 0 + 100 / 25 = 8 on two degrees: p = exp(-4) = .0183156.
    observed, law = [35, 50, 15], [0.25, 0.5, 0.25]
    assert chi_square(observed, law, false_alarm=0.01) == pytest.approx(0.0183156, rel=1e-5)
    with pytest.raises(AssertionError, match=r"chi-square 8\.0 on 2 degrees .* p-value 0\.0183"):
        chi_square(observed, law, false_alarm=0.02)


def test_p_value_agrees_with_scipy() -> None:
    stats = pytest.importorskip("scipy.stats", reason="scipy is the second opinion")
    for draws in (40_000, 1_000_000):
        observed = multinomial(ZIPF, draws, seed=draws)
        assert float((ZIPF * draws).min()) >= MIN_EXPECTED  # nothing is pooled
        expected = stats.chisquare(observed.numpy(), ZIPF.numpy() * draws).pvalue
        assert chi_square(observed, ZIPF, false_alarm=1e-6) == pytest.approx(expected, rel=1e-6)


def test_rare_outcomes_are_pooled() -> None:
    # 100 draws: the last three expect 4 each, together 12. (12 - 12)**2 / 12 + (88 - 88)**2 / 88.
    law = [0.88, 0.04, 0.04, 0.04]
    assert chi_square([88, 12, 0, 0], law, false_alarm=0.01) == pytest.approx(1.0)
    # Two rare ones expect 8 < 10: the rarest of the others joins them. 12 + 4 + 4 = 20.
    law = [0.80, 0.12, 0.04, 0.04]
    assert chi_square([80, 0, 20, 0], law, false_alarm=0.01) == pytest.approx(1.0)
    # All together expect fewer than the minimum: one bin, nothing to test.
    assert chi_square([1, 4], [0.5, 0.5], false_alarm=0.01) == 1.0


def test_support() -> None:
    law = [0.5, 0.0, 0.5, 0.0]
    assert chi_square([50, 0, 50, 0], law, false_alarm=0.01) == pytest.approx(1.0)
    with pytest.raises(AssertionError, match=r"1 hits outside the support, at \[3\]"):
        chi_square([50_000, 0, 50_000, 1], law, false_alarm=1e-9)


@pytest.mark.parametrize("false_alarm", [0.05, 0.01])
@pytest.mark.parametrize("draws", [500, 20_000])
def test_a_right_sampler_fails_at_the_stated_rate(false_alarm: float, draws: int) -> None:
    runs = 2000
    failures = 0
    for seed in range(runs):
        try:
            chi_square(multinomial(ZIPF, draws, seed), ZIPF, false_alarm=false_alarm)
        except AssertionError:
            failures += 1
    # Five standard deviations of a binomial count, and a tenth for the law being an approximation.
    slack = 5 * math.sqrt(runs * false_alarm) + 0.1 * runs * false_alarm
    assert abs(failures - runs * false_alarm) <= slack


def test_a_right_sampler_passes() -> None:
    for seed in range(100):
        chi_square(multinomial(ZIPF, 100_000, seed), ZIPF, false_alarm=1e-6)


@pytest.mark.parametrize("outcome", [0, 3, 40])
@pytest.mark.parametrize("factor", [0.9, 1.1])
@pytest.mark.parametrize("false_alarm", [1e-4, 1e-6])
def test_a_mutant_with_one_wrong_probability_fails(
    outcome: int, factor: float, false_alarm: float
) -> None:
    mutant = ZIPF.clone()
    mutant[outcome] *= factor
    others = torch.arange(len(ZIPF)) != outcome
    mutant[others] *= (1 - mutant[outcome]) / mutant[others].sum()
    draws = recommended_draws(float(ZIPF[outcome]), len(ZIPF))
    for seed in range(20):
        with pytest.raises(AssertionError, match="chi-square"):
            chi_square(multinomial(mutant, draws, seed), ZIPF, false_alarm=false_alarm)


def swap_two_ids(p: torch.Tensor) -> torch.Tensor:
    p[[1, 2]] = p[[2, 1]]
    return p


def drop_one_id(p: torch.Tensor) -> torch.Tensor:
    p[10] = 0
    return p


def give_the_remainder_to_the_last_id(p: torch.Tensor) -> torch.Tensor:
    p[:-1] *= 0.99
    p[-1] += 1 - p.sum()
    return p


def change_the_temperature(p: torch.Tensor) -> torch.Tensor:
    return p**1.02


@pytest.mark.parametrize(
    "mutate",
    [swap_two_ids, drop_one_id, give_the_remainder_to_the_last_id, change_the_temperature],
    ids=lambda f: f.__name__,
)
def test_other_mutants_fail(mutate: Any) -> None:
    mutant = mutate(ZIPF.clone())
    mutant /= mutant.sum()
    draws = recommended_draws(float(ZIPF[10]), len(ZIPF))
    with pytest.raises(AssertionError, match="chi-square"):
        chi_square(multinomial(mutant, draws, seed=0), ZIPF, false_alarm=1e-6)


def test_recommended_draws() -> None:
    # L = 60 + 12 sqrt(99) = 179.40; draws = 179.40 / (.5 * .01) and / (.01 * .04)
    assert recommended_draws(0.5, 100) == pytest.approx(35880, rel=1e-3)
    assert recommended_draws(0.01, 100, relative_error=0.2) == pytest.approx(448_500, rel=1e-3)


@pytest.mark.parametrize(
    ("observed", "law", "kwargs", "message"),
    [
        ([1, 2], [1.0], {}, "one equal, non-empty dimension"),
        ([], [], {}, "one equal, non-empty dimension"),
        ([[1]], [[1.0]], {}, "one equal, non-empty dimension"),
        ([1, -2], [0.5, 0.5], {}, "non-negative counts"),
        ([1, 0.5], [0.5, 0.5], {}, "non-negative counts"),
        ([0, 0], [0.5, 0.5], {}, "not all 0"),
        ([1, 2], [0.5, 0.6], {}, "sum to 1"),
        ([1, 2], [1.5, -0.5], {}, "must be >= 0"),
        ([1, 2], [0.5, math.nan], {}, "must be >= 0"),
        ([1, 2], [0.5, 0.5], {"false_alarm": 0.0}, "false_alarm"),
        ([1, 2], [0.5, 0.5], {"false_alarm": 1.0}, "false_alarm"),
    ],
)
def test_refused(observed: Any, law: Any, kwargs: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chi_square(observed, law, **{"false_alarm": 0.01, **kwargs})


def test_any_dtype_of_counts() -> None:
    for dtype in (torch.int32, torch.int64, torch.float32):
        observed = torch.tensor([60, 40], dtype=dtype)
        assert chi_square(observed, [0.5, 0.5], false_alarm=0.01) == pytest.approx(0.0455003)


# Words.


def test_spaced_words() -> None:
    # Mid-points of quarters: 1/8, 3/8, 5/8, 7/8 of 2**64, the upper two negative as int64.
    words = spaced_words(4)
    assert words.dtype == torch.int64
    assert words.tolist() == [2**61, 3 * 2**61, -3 * 2**61, -(2**61)]
    assert spaced_words(1).tolist() == [-(2**63)]
    # Mid-points of thirds: 2**64 / 6 = 3074457345618258602.67, 2**63, 5/6 2**64 - 2**64.
    assert spaced_words(3).tolist() == [3074457345618258602, -(2**63), -3074457345618258603]
    with pytest.raises(ValueError, match="n = 0"):
        spaced_words(0)


def test_spaced_words_ascend_in_equal_steps() -> None:
    unsigned = [w % 2**64 for w in spaced_words(1000).tolist()]
    steps = {after - word for word, after in pairwise(unsigned)}
    assert steps <= {2**64 // 1000, 2**64 // 1000 + 1}


def test_extreme_words() -> None:
    assert [w % 2**64 for w in EXTREME_WORDS] == [0, 2**64 - 1]
    assert torch.tensor(EXTREME_WORDS, dtype=torch.int64).tolist() == [0, -1]


# Inputs.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lm_like_logits(dtype: torch.dtype) -> None:
    rows, vocab = 4, 5000
    logits = lm_like_logits(rows, vocab, torch.Generator().manual_seed(0), dtype)
    again = lm_like_logits(rows, vocab, torch.Generator().manual_seed(0), dtype)
    assert logits.shape == (rows, vocab)
    assert logits.dtype == dtype
    assert torch.equal(logits, again)
    wide = logits.double()
    # Mean of -1.3 ln(rank): -1.3 ln(V!) / V = -1.3 (ln V - 1) = -9.77 by Stirling; the standard
    # deviation of ln(rank) is 1, so of the logits sqrt(1.69 + .09) = 1.33.
    assert wide.mean(dim=1).tolist() == pytest.approx([-9.77] * rows, abs=0.1)
    assert wide.std(dim=1).tolist() == pytest.approx([1.33] * rows, abs=0.1)
    assert len(set(wide.argmax(dim=1).tolist())) == rows  # the ranks are shuffled in each row


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
def test_nan_poison_of_floats(dtype: torch.dtype) -> None:
    tensor = torch.zeros(2, 3, dtype=dtype)
    assert nan_poison(tensor) is tensor
    assert tensor.isnan().all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_nan_poison_of_records(dtype: torch.dtype) -> None:
    poisoned = nan_poison(torch.zeros(4, dtype=dtype))
    assert poisoned.view(torch.float32).isnan().all()
    assert (poisoned > 2**30).all()  # no id, count or length


def test_nan_poison_of_the_rest() -> None:
    assert nan_poison(torch.zeros(2, dtype=torch.uint8)).tolist() == [255, 255]
    assert nan_poison(torch.zeros(2, dtype=torch.bool)).tolist() == [True, True]
    view = torch.zeros(4)
    nan_poison(view[::2])
    assert view.isnan().tolist() == [True, False, True, False]
