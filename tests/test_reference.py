"""The reference against values worked out by hand, in the comments, from the contract's text.

Nothing here is computed by the code under test in another way. Where a whole rule is defined by
another library (typical, epsilon, eta), its code is the second opinion.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike, NDArray

from graphed_sampling.layout import FinishReason, RowFlags
from graphed_sampling.params import SamplingParams, fp32
from graphed_sampling.philox import Stream
from graphed_sampling.reference import RowResult, raw_logprobs, sample_row, sanitise
from graphed_sampling.testing import EXTREME_WORDS, spaced_words

INF, NAN = math.inf, math.nan
FLT_MAX = float(np.finfo(np.float32).max)
TINY = 2.0**-149  # the smallest positive fp32
NO_FLAG = RowFlags(0)

# Row-wise arguments of `sample_row`; everything else is a field of SamplingParams.
CONTEXT = {
    "vocab_size",
    "prompt_token_ids",
    "output_token_ids",
    "eos_token_ids",
    "grammar_bitmask",
    "word",
    "position",
    "seed",
    "stream",
    "order",
    "num_generated",
}


def row(logits: ArrayLike, **kwargs: Any) -> RowResult:
    """sample_row at word 0, with context and parameters in one list of keywords."""
    context = {k: v for k, v in kwargs.items() if k in CONTEXT}
    params = SamplingParams(**{k: v for k, v in kwargs.items() if k not in CONTEXT})
    return sample_row(logits, params, **{"word": 0, **context})


def ln(probabilities: Sequence[float]) -> list[float]:
    return [math.log(p) if p > 0 else -INF for p in probabilities]


def kept(probabilities: Sequence[float], **kwargs: Any) -> list[int]:
    """Ids that survive where the model's softmax is `probabilities`."""
    result: list[int] = row(ln(probabilities), **kwargs).survivors.tolist()
    return result


def bitmask(allowed: Sequence[int], vocab_size: int) -> NDArray[np.int32]:
    words = np.zeros(-(-vocab_size // 32), dtype=np.uint32)
    for i in allowed:
        words[i // 32] |= np.uint32(1 << (i % 32))
    return words.view(np.int32)


def y_of(logits: ArrayLike, **kwargs: Any) -> list[float]:
    result: list[float] = row(logits, **kwargs).processed_logits.tolist()
    return result


# Sanitise.


def test_plain_row() -> None:
    result = row(ln([0.5, 0.25, 0.25]))
    assert result.survivors.tolist() == [0, 1, 2]
    assert result.probabilities == pytest.approx([0.5, 0.25, 0.25], rel=1e-6)
    assert (result.token_id, result.num_kept, result.flags) == (0, 0, NO_FLAG)
    assert result.finish_reason == FinishReason.NONE
    # Not asked = not computed.
    assert math.isnan(result.logprob)
    assert (result.rank, result.top_token_ids, result.given_logprobs) == (0, (), ())
    assert result.margin == INF


def test_nan_counts_as_banned_and_is_flagged() -> None:
    result = row([NAN, 1.0, NAN, 0.0])
    assert result.survivors.tolist() == [1, 3]
    assert result.flags == RowFlags.NAN


@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF])
def test_every_nan_is_nan(bits: int) -> None:
    logits = np.array([bits, 0], dtype=np.uint32).view(np.float32)
    assert row(logits).flags == RowFlags.NAN
    assert row(logits).survivors.tolist() == [1]


@pytest.mark.parametrize("logits", [[-0.0, 0.0], [0.0, -0.0]])
def test_minus_zero_is_zero(logits: list[float]) -> None:
    result = row(logits, temperature=0)
    assert result.token_id == 0
    assert not np.signbit(result.processed_logits).any()
    assert not np.signbit(sanitise(logits)).any()


def test_subnormals_count() -> None:
    assert row([0.0, TINY], temperature=0).token_id == 1
    assert row([-TINY, 0.0, -2 * TINY], top_k=2).survivors.tolist() == [0, 1]
    assert row([TINY, 2 * TINY], min_p=1.0).survivors.tolist() == [1]


def test_adjacent_values_are_told_apart() -> None:
    above_one = float(np.nextafter(np.float32(1), np.float32(2)))
    assert row([1.0, above_one], temperature=0).token_id == 1
    # Divided by T = 3e38 both are the same number in fp32; the order is of y, before the division.
    assert row([1.0, above_one], temperature=3e38, top_k=1).survivors.tolist() == [1]


def test_padded_vocabulary_is_never_looked_at() -> None:
    padded = [0.0, 1.0, INF, NAN, 50.0]
    result = row(padded, vocab_size=2, logprobs=4, logprob_token_ids=[1])
    assert (result.flags, result.survivors.tolist()) == (NO_FLAG, [0, 1])
    # ln(e / (1 + e)) = -ln(1 + 1/e) = -0.3132617
    assert result.given_logprobs == pytest.approx([-0.3132617])
    assert result.top_token_ids == (1, 0, -1, -1)
    assert len(result.processed_logits) == 2


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_logits_are_not_modified(dtype: Any) -> None:
    logits = np.array([NAN, -0.0, 1.0, INF], dtype=dtype)
    before = logits.tobytes()
    row(logits, repetition_penalty=2.0, output_token_ids=[2], logit_bias={1: 3.0})
    assert logits.tobytes() == before


def test_tensors_are_taken() -> None:
    logits = torch.tensor([0.0, 2.0, 1.0], dtype=torch.bfloat16)
    assert row(logits.float(), temperature=0).token_id == 1
    assert row(logits.half(), temperature=0).token_id == 1


# Bans.


def test_grammar_bitmask() -> None:
    allowed = [0, 31, 32, 39]  # sign bit, word border and last bit
    assert row([0.0] * 40, grammar_bitmask=bitmask(allowed, 40)).survivors.tolist() == allowed


def test_grammar_bitmask_may_be_longer_than_the_vocabulary() -> None:
    words = np.array([-1, -1, -1], dtype=np.int32)
    assert row([0.0] * 40, grammar_bitmask=words).survivors.tolist() == list(range(40))


def test_allowed_token_ids() -> None:
    assert row([0.0, 5.0, 1.0, 2.0], allowed_token_ids=[3, 0, 3]).survivors.tolist() == [0, 3]


def test_a_long_allowed_list() -> None:
    allowed = list(range(1, 5000, 2))
    assert row(np.zeros(5000), allowed_token_ids=allowed).survivors.tolist() == allowed


def test_bans_are_joined() -> None:
    result = row(
        [-INF] + [0.0] * 7,
        grammar_bitmask=bitmask([0, 1, 2, 3, 4, 5, 6], 8),  # bans 7
        allowed_token_ids=[0, 1, 2, 3, 4, 5, 7],  # bans 6
        logit_bias={5: -INF, 0: 100.0},  # bans 5; a banned token stays banned whatever its bias
        min_tokens=1,
        stop_token_ids=[4],
        bad_words_ids=[[3]],
    )
    assert result.survivors.tolist() == [1, 2]
    assert result.processed_logits.tolist() == [-INF, 0.0, 0.0, -INF, -INF, -INF, -INF, -INF]


@pytest.mark.parametrize(
    ("kwargs", "survivors"),
    [
        # Generated before this token: 1 < 2, so stop and EOS ids are banned.
        ({"min_tokens": 2}, [0]),
        ({"min_tokens": 2, "ignore_eos": True}, [0, 2]),
        ({"min_tokens": 1}, [0, 1, 2]),
        ({"min_tokens": 0}, [0, 1, 2]),
        ({"min_tokens": 2, "num_generated": 2}, [0, 1, 2]),
        # Prompt tokens are not generated.
        ({"min_tokens": 2, "prompt_token_ids": [0] * 9}, [0]),
    ],
)
def test_min_tokens(kwargs: dict[str, Any], survivors: list[int]) -> None:
    result = row([0.0] * 3, stop_token_ids=[1], eos_token_ids=[2], output_token_ids=[0], **kwargs)
    assert result.survivors.tolist() == survivors


@pytest.mark.parametrize(
    ("bad_words", "output", "survivors"),
    [
        pytest.param([[1]], [], [0, 2, 3], id="one token, always"),
        pytest.param([[0, 1]], [0], [0, 2, 3], id="prefix matches"),
        pytest.param([[0, 1]], [0, 2], [0, 1, 2, 3], id="prefix is not last"),
        pytest.param([[0, 1]], [], [0, 1, 2, 3], id="no output"),
        pytest.param([[2, 0, 1]], [2, 0], [0, 2, 3], id="longer prefix"),
        pytest.param([[2, 0, 1]], [3, 2, 0], [0, 2, 3], id="longer prefix, at the end"),
        pytest.param([[2, 0, 1]], [0], [0, 1, 2, 3], id="output shorter than the prefix"),
        pytest.param([[2, 0, 1]], [0, 2], [0, 1, 2, 3], id="prefix in another order"),
        pytest.param([[0, 1], [0, 2], [3]], [0], [0], id="several"),
        pytest.param([[1, 1]], [1], [0, 2, 3], id="a token after itself"),
    ],
)
def test_bad_words(bad_words: list[list[int]], output: list[int], survivors: list[int]) -> None:
    result = row([0.0] * 4, bad_words_ids=bad_words, output_token_ids=output)
    assert result.survivors.tolist() == survivors


def test_bad_words_do_not_look_into_the_prompt() -> None:
    result = row([0.0] * 3, bad_words_ids=[[2, 0, 1]], prompt_token_ids=[2], output_token_ids=[0])
    assert result.survivors.tolist() == [0, 1, 2]


# Bias and penalties. Prompt [0, 4], output [1, 1, 2] unless said otherwise.

PENALTY_ROW = [2.0, -2.0, 1.0, 0.0, -1.0]


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        pytest.param({}, [2, -2, 1, 0, -1], id="none"),
        # Tokens 0, 4 (prompt), 1, 2 (output): positive ones halved, negative ones doubled.
        pytest.param({"repetition_penalty": 2.0}, [1, -4, 0.5, 0, -2], id="repetition"),
        pytest.param({"repetition_penalty": 0.5}, [4, -1, 2, 0, -0.5], id="repetition reward"),
        # Counts of the output alone: token 1 twice, token 2 once.
        pytest.param({"frequency_penalty": 0.5}, [2, -3, 0.5, 0, -1], id="frequency"),
        pytest.param({"frequency_penalty": -2.0}, [2, 2, 3, 0, -1], id="frequency reward"),
        pytest.param({"presence_penalty": 0.25}, [2, -2.25, 0.75, 0, -1], id="presence"),
        pytest.param({"presence_penalty": -0.25}, [2, -1.75, 1.25, 0, -1], id="presence reward"),
        pytest.param({"logit_bias": {0: 1.0, 3: -0.5}}, [3, -2, 1, -0.5, -1], id="bias"),
        # [2, -2, 1, 0, -1] -> [1, -4, .5, 0, -2] -> [1, -5, 0, 0, -2] -> [1, -5.25, -.25, 0, -2]
        pytest.param(
            {"repetition_penalty": 2.0, "frequency_penalty": 0.5, "presence_penalty": 0.25},
            [1, -5.25, -0.25, 0, -2],
            id="repetition, frequency, presence",
        ),
        # Bias first: -2 + 3 = 1 -> 0.5. The other way round it were -4 + 3 = -1.
        pytest.param(
            {"repetition_penalty": 2.0, "logit_bias": {1: 3.0}},
            [1, 0.5, 0.5, 0, -2],
            id="bias before repetition",
        ),
        # Repetition first: 1 / 2 - 1 = -0.5. The other way round it were (1 - 1) / 2 = 0.
        pytest.param(
            {"repetition_penalty": 2.0, "frequency_penalty": 1.0},
            [1, -6, -0.5, 0, -2],
            id="repetition before frequency",
        ),
    ],
)
def test_penalties(kwargs: dict[str, Any], expected: list[float]) -> None:
    y = y_of(PENALTY_ROW, prompt_token_ids=[0, 4], output_token_ids=[1, 1, 2], **kwargs)
    assert y == expected


def test_a_token_in_prompt_and_output_is_penalised_once() -> None:
    y = y_of([4.0], prompt_token_ids=[0, 0], output_token_ids=[0, 0], repetition_penalty=2.0)
    assert y == [2.0]


def test_prompt_tokens_have_neither_frequency_nor_presence() -> None:
    kwargs = {"frequency_penalty": 1.0, "presence_penalty": 1.0}
    assert y_of([4.0, 4.0], prompt_token_ids=[0, 0], **kwargs) == [4.0, 4.0]


def test_each_operation_is_rounded_once() -> None:
    # fp32(0.1) = 0.100000001490116..., times 3 = 0.300000004470348..., which fp32 rounds to
    # 0.300000011920928955078125 = fp32(0.3). Fused, the subtraction would leave 7.45e-9.
    y = y_of([0.3, 1.0], output_token_ids=[0, 0, 0], frequency_penalty=0.1)
    assert y == [0.0, 1.0]
    # Bias: 1 + 2**-24 is a tie that rounds to the even 1; twice 2**-24 at once would not.
    y = y_of([1.0], logit_bias={0: 2.0**-24}, output_token_ids=[0], presence_penalty=-(2.0**-24))
    assert y == [1.0]


def test_parameters_take_part_as_fp32_stores_them() -> None:
    # 1 / fp32(1.1): fp32(1.1) = 1.10000002384185791015625; the quotient 0.90909088938694... lies
    # between 15252014 and 15252015 / 2**24, nearer to 15252014.3 -> 15252014 / 2**24.
    y = y_of([1.0], prompt_token_ids=[0], repetition_penalty=1.1)
    assert y == [15252014 / 2**24]
    # fp32(0.3) = 10066330 / 2**25, three times that 15099495 / 2**24; fp32(0.9) is one less.
    y = y_of([0.0], output_token_ids=[0] * 3, frequency_penalty=0.3)
    assert y == [-15099495 / 2**24]


def test_underflow_of_a_penalty_is_gradual() -> None:
    y = y_of([2 * TINY, -TINY], prompt_token_ids=[0, 1], repetition_penalty=2.0)
    assert y == [TINY, -2 * TINY]
    # Half of the smallest rounds to the even 0, whose sign does not count.
    result = row([-TINY], prompt_token_ids=[0], repetition_penalty=0.5)
    assert result.processed_logits.tolist() == [0.0]
    assert not np.signbit(result.processed_logits).any()


def test_overflow_is_clamped_and_is_no_ban() -> None:
    result = row([-3e38, 3e38, -INF], prompt_token_ids=[0], repetition_penalty=10.0)
    assert result.processed_logits.tolist() == [-FLT_MAX, fp32(3e38), -INF]
    assert result.survivors.tolist() == [0, 1]
    only = row([-3e38, -INF], prompt_token_ids=[0], repetition_penalty=10.0)
    assert (only.token_id, only.flags) == (0, NO_FLAG)


def test_overflow_on_the_way_keeps_its_sign_and_is_clamped_once_at_the_end() -> None:
    # 3e38 + 3e38 = inf, inf / 2 = inf -> FLT_MAX. Clamped on the way it were FLT_MAX / 2.
    y = y_of([3e38], logit_bias={0: 3e38}, prompt_token_ids=[0], repetition_penalty=2.0)
    assert y == [FLT_MAX]
    y = y_of([-3e38], logit_bias={0: -3e38}, output_token_ids=[0], presence_penalty=-2.0)
    assert y == [-FLT_MAX]


# Greedy.


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    result = row([1.0, 3.0, 3.0, 2.0], temperature=0, word=-1)
    assert (result.token_id, result.num_kept) == (1, 1)
    assert result.probabilities.tolist() == [1.0]


def test_greedy_is_of_the_processed_logits() -> None:
    result = row([1.0, 3.0], temperature=0, output_token_ids=[1], presence_penalty=2.0, word=-1)
    assert result.token_id == 0  # 1 and 3 - 2 = 1: equals
    assert row([1.0, 3.0], temperature=0, logit_bias={1: -INF}).token_id == 0


@pytest.mark.parametrize(
    ("temperature", "survivors"), [(0.0, 1), (9.99e-6, 1), (1e-5, 2), (1.1e-5, 2)]
)
def test_greedy_ends_at_1e_minus_5(temperature: float, survivors: int) -> None:
    result = row([1.0, 1.0], temperature=temperature)
    assert len(result.survivors) == survivors
    assert result.num_kept == (1 if survivors == 1 else 0)


def test_greedy_ignores_the_other_filters() -> None:
    # typical_p alone would keep id 1, see test_typical_p.
    result = row(ln([0.5, 0.3, 0.2]), temperature=0, typical_p=0.2, top_k=3)
    assert result.survivors.tolist() == [0]
    assert result.margins.keys() == {"top_k"}


def test_greedy_needs_no_seed() -> None:
    assert sample_row([0.0, 1.0], SamplingParams(temperature=0)).token_id == 1


# Each filter.


@pytest.mark.parametrize(
    ("k", "survivors"),
    [(1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (4, [0, 1, 2, 3]), (0, [0, 1, 2, 3])],
)
def test_top_k(k: int, survivors: list[int]) -> None:
    assert kept([0.4, 0.3, 0.2, 0.1], top_k=k) == survivors


def test_top_k_breaks_ties_by_id() -> None:
    result = row(ln([0.4, 0.3, 0.3, 0.0]), top_k=2)
    assert result.survivors.tolist() == [0, 1]
    assert result.probabilities == pytest.approx([4 / 7, 3 / 7], rel=1e-6)
    assert row([1.0] * 5, top_k=3).survivors.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("p", "survivors"),
    [
        (1e-6, [0]),
        (0.39, [0]),
        (0.41, [0, 1]),  # the token that crosses p is kept
        (0.69, [0, 1]),
        (0.71, [0, 1, 2]),
        (0.89, [0, 1, 2]),
        (0.91, [0, 1, 2, 3]),
        (1.0, [0, 1, 2, 3]),
    ],
)
def test_top_p(p: float, survivors: list[int]) -> None:
    assert kept([0.4, 0.3, 0.2, 0.1], top_p=p) == survivors


def test_top_p_reached_exactly_is_reached() -> None:
    # Four equals: masses 1/4, 1/2, ... are exact.
    assert row([7.0] * 4, top_p=0.5).survivors.tolist() == [0, 1]
    just_above = 0.5 + 2.0**-24
    assert row([7.0] * 4, top_p=just_above).survivors.tolist() == [0, 1, 2]


def test_top_p_orders_by_logit_then_id() -> None:
    assert row(ln([0.1, 0.4, 0.1, 0.4]), top_p=0.85).survivors.tolist() == [0, 1, 3]


def test_top_p_applies_the_temperature() -> None:
    # p proportional to .64, .16, .04; at T = 2 to .8, .4, .2, i.e. 4/7, 2/7, 1/7. 6/7 = .857.
    logits = ln([0.64, 0.16, 0.04])
    assert row(logits, temperature=2.0, top_p=0.85).survivors.tolist() == [0, 1]
    assert row(logits, temperature=2.0, top_p=0.86).survivors.tolist() == [0, 1, 2]
    # At T = 1: .64 / .84 = .762, .952.
    assert row(logits, top_p=0.86).survivors.tolist() == [0, 1]
    assert row(logits, top_p=0.76).survivors.tolist() == [0]


@pytest.mark.parametrize(
    ("temperature", "survivors"),
    [
        (1.0, [0, 1, 2]),  # ln 0.1 = -2.30
        (2.0, [0, 1, 2, 3]),  # 2 ln 0.1 = -4.61
        (0.5, [0, 1]),  # ln 0.1 / 2 = -1.15
        (0.25, [0]),  # ln 0.1 / 4 = -0.58
    ],
)
def test_min_p(temperature: float, survivors: list[int]) -> None:
    result = row([0.0, -1.0, -2.0, -3.0], temperature=temperature, min_p=0.1)
    assert result.survivors.tolist() == survivors


def test_min_p_of_one_keeps_the_equals_of_the_maximum() -> None:
    below = float(np.nextafter(np.float32(3), np.float32(0)))
    for temperature in (1e-5, 1.0, 3e38):
        result = row([3.0, below, 3.0, -INF], temperature=temperature, min_p=1.0)
        assert result.survivors.tolist() == [0, 2]


def test_min_p_rounds_its_bound_down() -> None:
    # 1 + ln 0.75 = 0.71231792754821907... = 11950711.73 / 2**24 -> 11950711 / 2**24.
    logits = [1.0, 11950712 / 2**24, 11950711 / 2**24, 11950710 / 2**24]
    assert row(logits, min_p=0.75).survivors.tolist() == [0, 1, 2]


def test_min_p_bound_below_the_finite_range() -> None:
    assert row([-FLT_MAX, 3e38], temperature=3e38, min_p=0.01).survivors.tolist() == [0, 1]
    assert row([-FLT_MAX, -3e38], temperature=3e38, min_p=0.01).survivors.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("n", "survivors"),
    [
        # [2, 0, 0, -2]: mean 0, population variance 8 / 4 = 2, sigma = 1.4142.
        (1.0, [0]),  # bound 0.59
        # 2 - 1.3 * 1.4142 = 0.16. With the sample deviation sqrt(8 / 3) = 1.633 it were -0.12.
        (1.3, [0]),
        (1.5, [0, 1, 2]),  # bound -0.12
        (2.8, [0, 1, 2]),  # bound -1.96
        (2.9, [0, 1, 2, 3]),  # bound -2.10
    ],
)
@pytest.mark.parametrize("temperature", [0.1, 1.0, 10.0])
def test_top_n_sigma(n: float, survivors: list[int], temperature: float) -> None:
    result = row([2.0, 0.0, 0.0, -2.0], top_n_sigma=n, temperature=temperature)
    assert result.survivors.tolist() == survivors


def test_top_n_sigma_looks_at_unbanned_tokens_alone() -> None:
    result = row(
        [2.0, 0.0, 0.0, -2.0, -INF, NAN, 9.0],
        top_n_sigma=1.3,
        logit_bias={6: -INF},
    )
    assert result.survivors.tolist() == [0]


def test_top_n_sigma_of_equals_keeps_all() -> None:
    assert row([5.0] * 3, top_n_sigma=1e-3).survivors.tolist() == [0, 1, 2]
    assert row([5.0], top_n_sigma=1e-3).survivors.tolist() == [0]


@pytest.mark.parametrize(
    ("p", "survivors"),
    [
        # [.5, .3, .2]: entropy .5 * .69315 + .3 * 1.20397 + .2 * 1.60944 = 1.02965, so the
        # distances are .33651, .17432, .57979: by distance id 1 (mass .3), 0 (.8), 2 (1).
        (0.2, [1]),
        (0.29, [1]),
        (0.31, [0, 1]),
        (0.79, [0, 1]),
        (0.81, [0, 1, 2]),
        (1.0, [0, 1, 2]),
    ],
)
def test_typical_p(p: float, survivors: list[int]) -> None:
    assert kept([0.5, 0.3, 0.2], typical_p=p) == survivors


def test_typical_p_keeps_equal_distances_together() -> None:
    # Entropy .4 * .91629 + .6 * 1.60944 = 1.33218: distances .41589, then .27726 three times.
    assert kept([0.4, 0.2, 0.2, 0.2], typical_p=0.1) == [1, 2, 3]
    assert kept([0.4, 0.2, 0.2, 0.2], typical_p=0.59) == [1, 2, 3]
    assert kept([0.4, 0.2, 0.2, 0.2], typical_p=0.61) == [0, 1, 2, 3]
    assert row([7.0] * 6, typical_p=0.01).survivors.tolist() == list(range(6))


@pytest.mark.parametrize(
    ("epsilon", "survivors"),
    [(0.01, [0, 1, 2, 3]), (0.1, [0, 1, 2]), (0.2, [0, 1]), (0.4, [0]), (0.9, [0])],
)
def test_epsilon_cutoff(epsilon: float, survivors: list[int]) -> None:
    assert kept([0.5, 0.3, 0.15, 0.05], epsilon_cutoff=epsilon) == survivors


def test_epsilon_cutoff_always_keeps_the_equals_of_the_maximum() -> None:
    assert kept([0.25, 0.25, 0.25, 0.2, 0.05], epsilon_cutoff=0.9) == [0, 1, 2]


@pytest.mark.parametrize(
    ("epsilon", "survivors"),
    [
        # [.5, .3, .15, .05]: entropy .34657 + .36119 + .28457 + .14979 = 1.14212,
        # exp(-entropy) = .31914.
        (0.04, [0, 1, 2, 3]),  # sqrt * .31914 = .06383 > epsilon: cutoff .04
        (0.1, [0, 1, 2]),  # sqrt * .31914 = .10092 > epsilon: cutoff .1
        (0.2, [0, 1, 2]),  # .14272; epsilon itself would drop id 2
        (0.3, [0, 1]),  # .17480
        (0.9, [0]),  # .30276
    ],
)
def test_eta_cutoff(epsilon: float, survivors: list[int]) -> None:
    assert kept([0.5, 0.3, 0.15, 0.05], eta_cutoff=epsilon) == survivors


def test_eta_cutoff_always_keeps_the_equals_of_the_maximum() -> None:
    # p_max >= exp(-entropy), so the cutoff exceeds the maximum by rounding only: V equals have
    # p = 1 / V and the cutoff sqrt(epsilon) / V.
    nearly_one = 1 - 2.0**-24
    assert row([1.0] * 7, eta_cutoff=nearly_one).survivors.tolist() == list(range(7))


@pytest.mark.parametrize(
    "off",
    [
        {"top_k": 0},
        {"top_k": -1},
        {"top_k": 4},
        {"top_k": 5},
        {"top_k": 2**40},
        {"top_p": 1.0},
        {"top_p": 1 - 1e-9},  # 1 where fp32 stores it
        {"min_p": 0.0},
        {"min_p": 1e-60},
        {"top_n_sigma": 0.0},
        {"typical_p": 1.0},
        {"epsilon_cutoff": 0.0},
        {"eta_cutoff": 0.0},
    ],
    ids=str,
)
def test_off_is_the_same_as_not_asked(off: dict[str, Any]) -> None:
    logits = ln([0.4, 0.3, 0.2, 0.1])
    for word in spaced_words(64).tolist():
        asked, plain = row(logits, word=word, **off), row(logits, word=word)
        assert asked.token_id == plain.token_id
        assert asked.cumulative == plain.cumulative
        assert asked.num_kept == plain.num_kept == 0
        assert not asked.margins


@pytest.mark.parametrize(
    "on",
    [
        {"top_k": 3},
        {"top_p": 0.999},
        {"min_p": 1e-6},
        {"top_n_sigma": 50.0},
        {"typical_p": 0.999},
        {"epsilon_cutoff": 1e-6},
        {"eta_cutoff": 1e-6},
    ],
    ids=str,
)
def test_num_kept_where_a_filter_is_on(on: dict[str, Any]) -> None:
    result = row(ln([0.4, 0.3, 0.2, 0.1]), **on)
    assert result.num_kept == len(result.survivors) == (3 if "top_k" in on else 4)
    assert result.margins.keys() == on.keys()


# Order: each filter sees the survivors of the one before, renormalised.


def test_top_k_then_top_p() -> None:
    # The four are .85 of the mass: .41176, .70588, .94118, 1. Without renormalisation .82 would
    # need .35 + .25 + .2 + .05 = .85, all four.
    result = row(ln([0.35, 0.25, 0.2, 0.05, 0.05, 0.05, 0.05]), top_k=4, top_p=0.82)
    assert result.survivors.tolist() == [0, 1, 2]
    assert result.probabilities == pytest.approx([0.4375, 0.3125, 0.25], rel=1e-6)
    assert result.num_kept == 3


@pytest.mark.parametrize(
    ("probabilities", "kwargs", "survivors"),
    [
        # min_p .5 keeps .5 and .3, renormalised .625: top_p .6 needs one. The other way round
        # top_p keeps both.
        pytest.param([0.5, 0.3, 0.2], {"min_p": 0.5, "top_p": 0.6}, [0], id="min_p, top_p"),
        # top_p .75 keeps .625, .375: entropy .66156, distances .19156, .31927, so typical .2
        # keeps id 0. Typical first keeps id 1 alone.
        pytest.param([0.5, 0.3, 0.2], {"top_p": 0.75, "typical_p": 0.2}, [0], id="top_p, typical"),
        # typical .2 keeps id 1, whose probability is then 1. Epsilon first keeps ids 0 and 1,
        # of which typical keeps id 0.
        pytest.param(
            [0.5, 0.3, 0.2], {"typical_p": 0.2, "epsilon_cutoff": 0.25}, [1], id="typical, epsilon"
        ),
        # epsilon .1 keeps .52632, .31579, .15789: entropy .99328, eta sqrt(.2) * .37036 = .16563
        # drops id 2. Eta first is .14272 and keeps .15, which epsilon keeps too.
        pytest.param(
            [0.5, 0.3, 0.15, 0.05],
            {"epsilon_cutoff": 0.1, "eta_cutoff": 0.2},
            [0, 1],
            id="epsilon, eta",
        ),
    ],
)
def test_order_of_filters(
    probabilities: list[float], kwargs: dict[str, Any], survivors: list[int]
) -> None:
    assert kept(probabilities, **kwargs) == survivors


def test_top_n_sigma_sees_the_whole_row_before_top_k() -> None:
    # sigma of all four is 1.4142: the bound 2 - 1.5 sigma = -.12 keeps three, of which k = 2 leaves
    # two. Of the first two alone sigma is 1, and the bound .5 would leave one.
    assert row([2.0, 0.0, 0.0, -2.0], top_n_sigma=1.5, top_k=2).survivors.tolist() == [0, 1]


def test_min_p_before_top_k_and_after_top_n_sigma() -> None:
    # All three cut: sigma 1.5 leaves [2, 0, 0], min_p .1 at T = 1 (bound -.30) leaves all, at
    # T = .5 (bound .85) one.
    logits = [2.0, 0.0, 0.0, -2.0]
    assert row(logits, top_n_sigma=1.5, min_p=0.1).num_kept == 3
    assert row(logits, top_n_sigma=1.5, min_p=0.1, temperature=0.5).num_kept == 1
    assert row(logits, top_n_sigma=1.5, min_p=0.1, top_k=2).num_kept == 2


def test_no_filter_empties_a_row() -> None:
    everything = {
        "top_n_sigma": TINY,
        "min_p": 1.0,
        "top_k": 1,
        "top_p": TINY,
        "typical_p": TINY,
        "epsilon_cutoff": 1 - 2.0**-24,
        "eta_cutoff": 1 - 2.0**-24,
    }
    for name, value in everything.items():
        assert kept([0.1, 0.2, 0.3, 0.4], **{name: value}), name
    assert kept([0.1, 0.2, 0.3, 0.4], **everything) == [3]


# The draw.


def test_the_first_and_the_last_word() -> None:
    first, last = (row(ln([0.0, 0.4, 0.3, 0.3, 0.0]), word=w).token_id for w in EXTREME_WORDS)
    assert (first, last) == (1, 3)
    assert row([0.0, 0.0], word=2**64 - 1).token_id == row([0.0, 0.0], word=-1).token_id == 1


def test_the_order_of_the_draw_is_an_argument() -> None:
    logits = ln([0.4, 0.3, 0.2, 0.1])
    first, last = (row(logits, word=w, order=[2, 3, 0, 1]).token_id for w in EXTREME_WORDS)
    assert (first, last) == (2, 1)
    assert row(logits, order=[2, 3, 0, 1], top_k=3).survivors.tolist() == [2, 0, 1]


def test_the_order_changes_no_set() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=50)
    kwargs = {"top_k": 30, "top_p": 0.9, "typical_p": 0.8}
    permuted = row(logits, order=rng.permutation(50), **kwargs)
    assert sorted(permuted.survivors.tolist()) == row(logits, **kwargs).survivors.tolist()


def test_words_at_exact_boundaries() -> None:
    # Four equals: token i owns the words i * 2**62 .. (i + 1) * 2**62 - 1.
    for i in range(4):
        assert row([1.5] * 4, word=i * 2**62).token_id == i
        assert row([1.5] * 4, word=(i + 1) * 2**62 - 1).token_id == i


def test_the_inverse_cdf_takes_the_floor() -> None:
    # Three equals: total 3 m. Word w draws token 1 from floor(w * 3 m / 2**64) >= m, i.e. from
    # w >= 2**64 / 3 = 6148914691236517205.33 on.
    assert row([0.0] * 3, word=6148914691236517205).token_id == 0
    assert row([0.0] * 3, word=6148914691236517206).token_id == 1


@pytest.mark.parametrize(
    "kwargs",
    [
        pytest.param({}, id="plain"),
        pytest.param({"top_k": 3}, id="top_k"),
        pytest.param({"order": [3, 1, 0, 2], "top_p": 0.85}, id="top_p, permuted"),
    ],
)
def test_equally_spaced_words_give_the_law(kwargs: dict[str, Any]) -> None:
    n = 1 << 10
    probabilities = [0.4, 0.3, 0.2, 0.1]
    logits = ln(probabilities)
    counts = Counter(row(logits, word=w, **kwargs).token_id for w in spaced_words(n).tolist())
    survivors = [0, 1, 2, 3] if not kwargs else [0, 1, 2]
    total = sum(probabilities[i] for i in survivors)
    assert set(counts) == set(survivors)
    for i in survivors:
        assert abs(counts[i] - n * probabilities[i] / total) <= 2


def test_2_to_the_16_words_give_the_law() -> None:
    # 65536 * (.4, .3, .2, .1) = 26214.4, 19660.8, 13107.2, 6553.6. The token ascends with the word
    # (the sweep above walks them all), so bisection finds where each begins.
    logits, words = ln([0.4, 0.3, 0.2, 0.1]), spaced_words(1 << 16).tolist()
    begins = [bisect_left(words, i, key=lambda w: row(logits, word=w).token_id) for i in range(5)]
    counts = [after - begin for begin, after in pairwise(begins)]
    assert sum(counts) == 1 << 16
    for count, expected in zip(counts, [26214.4, 19660.8, 13107.2, 6553.6], strict=True):
        assert abs(count - expected) <= 2


def test_a_survivor_without_mass_is_kept_and_never_drawn() -> None:
    result = row([0.0, -1000.0], word=-1)
    assert result.survivors.tolist() == [0, 1]
    assert result.token_id == 0
    assert row([-1000.0, 0.0], word=0).token_id == 1


def test_the_whole_finite_range_at_every_temperature() -> None:
    for temperature in (1e-5, 1.0, FLT_MAX):
        result = row([-FLT_MAX, FLT_MAX], temperature=temperature)
        # (2 FLT_MAX) / FLT_MAX = 2: odds e**2.
        share = 1 / (1 + math.exp(2)) if temperature > 1 else 0.0
        assert result.probabilities == pytest.approx([share, 1 - share])


def test_word_of_seed_and_position() -> None:
    # Random123's vector for counter 0 and key 0 begins 6627e8d5 e169c58d, so the word is
    # e169c58d6627e8d5, and its first hexadecimal digit, 14, the token out of 16 equals.
    drawn = sample_row([0.0] * 16, SamplingParams(seed=0))
    assert (drawn.word, drawn.token_id) == (0xE169C58D6627E8D5, 14)


def test_position_is_the_length_of_the_sequence() -> None:
    params = SamplingParams(seed=3)
    implied = sample_row([0.0] * 9, params, prompt_token_ids=[1, 2], output_token_ids=[3])
    assert implied.word == sample_row([0.0] * 9, params, position=3).word
    # A preempted request, its output now part of the prompt, goes on with the same words.
    assert implied.word == sample_row([0.0] * 9, params, prompt_token_ids=[1, 2, 3]).word
    assert implied.word != sample_row([0.0] * 9, params, position=4).word


def test_seed_and_stream() -> None:
    params = SamplingParams(seed=3)
    by_argument = sample_row([0.0], SamplingParams(), seed=3, position=7)
    assert by_argument.word == sample_row([0.0], params, position=7).word
    words = {sample_row([0.0], params, position=7, stream=s).word for s in Stream}
    assert len(words) == len(Stream)
    assert sample_row([0.0], params, seed=4, position=7).word not in words
    negative = sample_row([0.0], SamplingParams(seed=-1)).word
    assert negative == sample_row([0.0], SamplingParams(seed=2**64 - 1)).word


def test_a_missing_seed_is_refused() -> None:
    with pytest.raises(ValueError, match="seed = None is not accepted"):
        sample_row([0.0], SamplingParams())


def test_boundaries_are_exact() -> None:
    assert row([2.0] * 4).boundaries == tuple(Fraction(i, 4) for i in (1, 2, 3, 4))
    boundaries = row(ln([0.5, 0.3, 0.2])).boundaries
    assert [float(b) for b in boundaries] == pytest.approx([0.5, 0.8, 1.0], rel=1e-6)
    assert boundaries[-1] == 1


def test_tokens_near() -> None:
    equals = [0.0] * 4
    assert row(equals, word=2**61).tokens_near(0.0) == {0}
    assert row(equals, word=2**61).tokens_near(0.12) == {0}
    assert row(equals, word=2**61).tokens_near(0.13) == {0, 1}  # 1/8 from the boundary at 1/4
    assert row(equals, word=2**62).tokens_near(1e-9) == {0, 1}
    assert row(equals, word=0).tokens_near(1e-9) == {0}
    assert row(equals, word=-1).tokens_near(1e-9) == {3}
    assert row(equals, word=-1).tokens_near(1.0) == {0, 1, 2, 3}
    assert row([0.0, -1000.0], word=-1).tokens_near(1.0) == {0}  # no mass, never drawn


# Bad rows.


@pytest.mark.parametrize("temperature", [0.0, 0.7, 3e38])
def test_pos_inf_alone_survives(temperature: float) -> None:
    logits = [1.0, INF, NAN, INF, 3e38]
    result = row(logits, temperature=temperature, word=-1)
    assert result.flags == RowFlags.NAN | RowFlags.POS_INF
    assert result.processed_logits.tolist() == [-INF, 0.0, -INF, 0.0, -INF]
    if temperature == 0:
        assert (result.token_id, result.num_kept) == (1, 1)
    else:
        assert result.survivors.tolist() == [1, 3]
        assert result.probabilities.tolist() == [0.5, 0.5]
        assert (result.token_id, result.num_kept) == (3, 0)


def test_pos_inf_skips_bias_and_penalties() -> None:
    result = row(
        [INF, INF, 0.0],
        logit_bias={0: -5.0, 2: 5.0},
        output_token_ids=[1, 1],
        repetition_penalty=2.0,
        frequency_penalty=2.0,
        presence_penalty=2.0,
    )
    assert result.processed_logits.tolist() == [0.0, 0.0, -INF]


def test_filters_apply_to_pos_inf_rows() -> None:
    logits = [INF, 1.0, INF, INF, INF]
    assert row(logits, top_k=2).survivors.tolist() == [0, 2]
    assert row(logits, top_p=0.7).survivors.tolist() == [0, 2, 3]
    for keeps_equals in ("min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_n_sigma"):
        result = row(logits, **{keeps_equals: 0.5})
        assert (result.survivors.tolist(), result.num_kept) == ([0, 2, 3, 4], 4)


@pytest.mark.parametrize(
    "ban",
    [
        {"logit_bias": {1: -INF}},
        {"allowed_token_ids": [0, 2]},
        {"grammar_bitmask": bitmask([0, 2], 3)},
        {"bad_words_ids": [[1]]},
        {"stop_token_ids": [1], "min_tokens": 1},
    ],
    ids=lambda ban: next(iter(ban)),
)
def test_bans_come_before_pos_inf(ban: dict[str, Any]) -> None:
    result = row([1.0, INF, 2.0], **ban)
    assert (result.flags, result.survivors.tolist()) == (NO_FLAG, [0, 2])
    assert result.processed_logits.tolist() == [1.0, -INF, 2.0]


@pytest.mark.parametrize(
    ("logits", "flags"),
    [
        ([-INF] * 3, RowFlags.EMPTY),
        ([NAN] * 3, RowFlags.EMPTY | RowFlags.NAN),
        ([-INF, NAN, -INF], RowFlags.EMPTY | RowFlags.NAN),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_empty_row_gives_id_0(logits: list[float], flags: RowFlags, temperature: float) -> None:
    result = row(
        logits,
        temperature=temperature,
        word=-1,
        logprobs=2,
        logprobs_mode="processed",
        logprob_token_ids=[0, 1],
        rank=True,
    )
    assert (result.token_id, result.flags, result.num_kept) == (0, flags, 1)
    assert (result.logprob, result.rank) == (0.0, 1)
    assert result.top_token_ids == (0, -1)
    assert result.top_logprobs == (0.0, -INF)
    assert result.given_logprobs == (0.0, -INF)
    assert result.survivors.tolist() == [0]
    assert result.probabilities.tolist() == [1.0]


def test_empty_row_under_a_bitmask_gives_its_lowest_id() -> None:
    mask = bitmask([37, 38], 64)
    result = row([-INF] * 64, grammar_bitmask=mask, word=-1)
    assert (result.token_id, result.flags) == (37, RowFlags.EMPTY)
    # The fallback looks at the bitmask alone, not at what else banned the row.
    result = row([0.0] * 64, grammar_bitmask=mask, allowed_token_ids=[1])
    assert (result.token_id, result.flags) == (37, RowFlags.EMPTY)
    result = row([0.0] * 64, grammar_bitmask=mask, logit_bias={37: -INF, 38: -INF})
    assert (result.token_id, result.flags) == (37, RowFlags.EMPTY)


def test_empty_row_whose_bitmask_allows_nothing_gives_id_0() -> None:
    result = row([0.0] * 40, grammar_bitmask=bitmask([], 40))
    assert (result.token_id, result.flags) == (0, RowFlags.EMPTY)
    beyond = bitmask([45], 64)  # allows an id outside the vocabulary only
    result = row([0.0] * 64, vocab_size=40, grammar_bitmask=beyond)
    assert (result.token_id, result.flags) == (0, RowFlags.EMPTY)


def test_empty_row_with_its_raw_logprobs() -> None:
    # Everything banned: the raw logprobs are of the model all the same. ln(.25) = -1.3863.
    result = row(
        ln([0.25, 0.75]), allowed_token_ids=[0], logit_bias={0: -INF}, logprobs=1, rank=True
    )
    assert (result.token_id, result.flags, result.rank) == (0, RowFlags.EMPTY, 2)
    assert result.logprob == pytest.approx(-1.3862944, rel=1e-6)
    assert result.top_token_ids == (1,)
    nothing = row([-INF, NAN], logprobs=1, logprob_token_ids=[1], rank=True)
    assert (nothing.logprob, nothing.given_logprobs) == (-INF, (-INF,))
    assert (nothing.top_token_ids, nothing.top_logprobs, nothing.rank) == ((-1,), (-INF,), 1)


def test_empty_rows_take_part_in_the_state_like_any_other() -> None:
    kwargs: dict[str, Any] = {"min_tokens": 1, "allowed_token_ids": [0], "output_token_ids": []}
    result = row([0.0, 0.0], stop_token_ids=[0], **kwargs)
    assert (result.flags, result.token_id) == (RowFlags.EMPTY, 0)
    assert result.finish_reason == FinishReason.STOP
    result = row([-INF], max_tokens=1)
    assert result.finish_reason == FinishReason.LENGTH


def test_pos_inf_that_is_banned_leaves_an_empty_row() -> None:
    result = row([INF, -INF], allowed_token_ids=[1], logprobs=0)
    assert (result.token_id, result.flags) == (0, RowFlags.EMPTY)
    assert result.logprob == 0.0  # raw: the only +inf entry


def test_one_finite_id() -> None:
    for word in EXTREME_WORDS:
        for kwargs in ({}, {"top_p": 0.1}, {"typical_p": 0.1}, {"top_n_sigma": 1.0}):
            result = row([-INF, NAN, -80.0, -INF], word=word, logprobs=0, **kwargs)
            assert (result.token_id, result.logprob) == (2, 0.0)


def test_vocabulary_of_one() -> None:
    result = row([5.0], word=-1, top_k=1, top_p=0.5, logprobs=2, rank=True)
    assert (result.token_id, result.logprob, result.rank) == (0, 0.0, 1)
    assert result.num_kept == 1  # top_p is on; top_k = 1 >= vocab is off
    assert row([5.0], top_k=1).num_kept == 0


# Logprobs and rank.


def test_raw_logprobs_know_no_mask_bias_penalty_or_temperature() -> None:
    result = row(
        ln([0.5, 0.25, 0.125, 0.125]),
        temperature=0.1,
        top_k=1,
        logit_bias={0: -INF, 1: 3.0},
        output_token_ids=[2],
        presence_penalty=2.0,
        logprobs=2,
        logprob_token_ids=[3, 0],
        rank=True,
    )
    # ln .5 = -.6931, ln .25 = -1.3863, ln .125 = -2.0794
    assert result.token_id == 1
    assert result.logprob == pytest.approx(-1.3862944, rel=1e-6)
    assert result.rank == 2
    assert result.top_token_ids == (0, 1)
    assert result.top_logprobs == pytest.approx([-0.6931472, -1.3862944], rel=1e-6)
    assert result.given_logprobs == pytest.approx([-2.0794415, -0.6931472], rel=1e-6)


def test_processed_logprobs_are_of_the_final_distribution() -> None:
    # k = 2 leaves 4/7 and 3/7: ln(4/7) = -.5596158, ln(3/7) = -.8472979.
    result = row(
        ln([0.4, 0.3, 0.3, 0.0]),
        word=-1,
        top_k=2,
        logprobs=4,
        logprobs_mode="processed",
        logprob_token_ids=[2, 0],
        rank=True,
    )
    assert (result.token_id, result.rank) == (1, 2)
    assert result.logprob == pytest.approx(-0.8472979, rel=1e-6)
    assert result.top_token_ids == (0, 1, -1, -1)
    assert result.top_logprobs[:2] == pytest.approx([-0.5596158, -0.8472979], rel=1e-6)
    assert result.top_logprobs[2:] == (-INF, -INF)
    assert result.given_logprobs == pytest.approx([-INF, -0.5596158], rel=1e-6)


def test_processed_logprobs_apply_the_temperature() -> None:
    # .64, .16 at T = 2: 2/3, 1/3. ln(2/3) = -.4054651, ln(1/3) = -1.0986123.
    result = row(ln([0.64, 0.16]), temperature=2.0, logprobs=2, logprobs_mode="processed")
    assert result.top_logprobs == pytest.approx([-0.4054651, -1.0986123], rel=1e-6)


def test_processed_logprob_of_a_greedy_tie_is_0() -> None:
    result = row([1.0, 1.0, -INF], temperature=0, logprobs=3, logprobs_mode="processed")
    assert result.logprob == 0.0
    assert result.top_token_ids == (0, -1, -1)
    assert result.top_logprobs == (0.0, -INF, -INF)
    raw = row([1.0, 1.0, -INF], temperature=0, logprobs=0)
    assert raw.logprob == pytest.approx(-0.6931472)  # ln(1/2)


def test_processed_top_n_is_ordered_by_y_before_the_temperature() -> None:
    above_one = float(np.nextafter(np.float32(1), np.float32(2)))
    result = row([1.0, above_one], temperature=3e38, logprobs=2, logprobs_mode="processed")
    assert result.top_token_ids == (1, 0)


def test_logprob_of_a_survivor_without_mass_is_finite() -> None:
    result = row([0.0, -1000.0], logprobs=2, logprobs_mode="processed")
    assert result.top_logprobs == (0.0, -1000.0)


@pytest.mark.parametrize(
    ("word", "token_id", "rank"), [(0, 0, 1), (2**63, 1, 1), (3 * 2**62, 2, 1), (-1, 3, 4)]
)
def test_rank_under_ties(word: int, token_id: int, rank: int) -> None:
    # Cumulative .31, .62, .93, 1, drawn at 0, .5, .75 and 1 - 2**-64: three equals of rank 1, and
    # one with three strictly above it.
    for mode in ("raw", "processed"):
        logits = ln([0.31, 0.31, 0.31, 0.07])
        result = row(logits, word=word, rank=True, logprobs_mode=mode)
        assert (result.token_id, result.rank) == (token_id, rank)
        assert math.isnan(result.logprob)


def test_rank_in_the_modes_logits() -> None:
    # The drawn token 2 is second in the raw row, and third in y: 1 goes up by 5.
    kwargs: dict[str, Any] = {"logit_bias": {1: 5.0}, "word": -1, "rank": True}
    assert row([3.0, 1.0, 2.0], **kwargs).rank == 2
    assert row([3.0, 1.0, 2.0], **kwargs, logprobs_mode="processed").rank == 3


def test_processed_rank_counts_tokens_that_filters_removed() -> None:
    # typical .2 keeps id 1 alone (see test_typical_p); id 0 has the larger logit.
    result = row(ln([0.5, 0.3, 0.2]), typical_p=0.2, rank=True, logprobs_mode="processed")
    assert (result.token_id, result.rank) == (1, 2)
    # ... but not banned ones.
    result = row([3.0, 2.0], logit_bias={0: -INF}, rank=True, logprobs_mode="processed")
    assert (result.token_id, result.rank) == (1, 1)


def test_top_n_ties_by_lowest_id_and_padding() -> None:
    result = row([1.0, -INF, 2.0, 1.0, NAN, 1.0], logprobs=6)
    assert result.top_token_ids == (2, 0, 3, 5, -1, -1)
    # The denominator is e**2 + 3 e = 15.5439017, its logarithm 2.7436682.
    assert result.top_logprobs[:4] == pytest.approx([-0.7436682] + [-1.7436682] * 3, rel=1e-6)
    assert result.top_logprobs[4:] == (-INF, -INF)
    assert row([1.0, -INF, 2.0, 1.0], logprobs=2).top_token_ids == (2, 0)


def test_logprobs_zero_is_the_drawn_token_alone() -> None:
    result = row([0.0, 0.0], logprobs=0)
    assert result.logprob == pytest.approx(-0.6931472)
    assert result.top_token_ids == result.top_logprobs == ()


def test_given_logprobs_without_logprobs() -> None:
    result = row([0.0, 0.0, -INF], logprob_token_ids=[2, 1, 1])
    assert result.given_logprobs == pytest.approx([-INF, -0.6931472, -0.6931472])
    assert math.isnan(result.logprob)


def test_logprobs_of_pos_inf_rows() -> None:
    kwargs: dict[str, Any] = {"logprobs": 4, "logprob_token_ids": [0, 1], "rank": True, "word": -1}
    raw = row([5.0, INF, -INF, INF], **kwargs)
    # Two +inf: ln(1/2) each.
    assert (raw.token_id, raw.rank) == (3, 1)
    assert raw.logprob == pytest.approx(-0.6931472)
    assert raw.top_token_ids == (1, 3, -1, -1)
    assert raw.given_logprobs == pytest.approx([-INF, -0.6931472])
    banned = row([5.0, INF, -INF, INF], allowed_token_ids=[0, 1], **kwargs)
    # Raw counts the banned +inf too; processed does not.
    assert banned.logprob == pytest.approx(-0.6931472)
    processed = row(
        [5.0, INF, -INF, INF], allowed_token_ids=[0, 1], logprobs_mode="processed", **kwargs
    )
    assert (processed.token_id, processed.logprob, processed.rank) == (1, 0.0, 1)
    # A finite token drawn beside banned +inf has two strictly larger raw logits.
    finite = row([5.0, INF, -INF, INF], allowed_token_ids=[0], **kwargs)
    assert (finite.token_id, finite.logprob, finite.rank) == (0, -INF, 3)


def test_raw_logprobs_of_a_row() -> None:
    assert raw_logprobs(ln([0.5, 0.3, 0.2])) == pytest.approx(ln([0.5, 0.3, 0.2]), rel=1e-6)
    assert raw_logprobs([1.0, NAN, 9.0], vocab_size=2).tolist() == [0.0, -INF]
    assert raw_logprobs([INF, 3.0]).tolist() == [0.0, -INF]
    assert raw_logprobs([-INF, NAN]).tolist() == [-INF, -INF]
    assert raw_logprobs([3e38, -3e38]) == pytest.approx([0.0, -6e38], rel=1e-6)


# How a request ends.


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        pytest.param({}, FinishReason.NONE, id="nothing set"),
        pytest.param({"stop_token_ids": [1]}, FinishReason.STOP, id="stop id"),
        pytest.param({"stop_token_ids": [0]}, FinishReason.NONE, id="another stop id"),
        pytest.param({"eos_token_ids": [1, 2]}, FinishReason.STOP, id="EOS"),
        pytest.param({"eos_token_ids": [1], "ignore_eos": True}, FinishReason.NONE, id="no EOS"),
        pytest.param(
            {"eos_token_ids": [1], "ignore_eos": True, "stop_token_ids": [1]},
            FinishReason.STOP,
            id="EOS ignored but a stop id",
        ),
        # Two tokens were generated; this is the third.
        pytest.param({"max_tokens": 3}, FinishReason.LENGTH, id="length"),
        pytest.param({"max_tokens": 4}, FinishReason.NONE, id="one left"),
        pytest.param({"max_tokens": 3, "stop_token_ids": [1]}, FinishReason.STOP, id="both"),
        pytest.param({"max_tokens": 3, "num_generated": 0}, FinishReason.NONE, id="other count"),
        pytest.param({"min_tokens": 2, "stop_token_ids": [1]}, FinishReason.STOP, id="minimum met"),
    ],
)
def test_finish_reason(kwargs: dict[str, Any], reason: FinishReason) -> None:
    result = row([0.0, 5.0, 0.0], temperature=0, output_token_ids=[0, 0], **kwargs)
    assert result.token_id == 1  # the token that ends a request is emitted
    assert result.finish_reason == reason


def test_min_tokens_puts_the_stop_off() -> None:
    for generated in range(4):
        result = row(
            [0.0, 5.0], temperature=0, stop_token_ids=[1], min_tokens=3, num_generated=generated
        )
        assert result.token_id == (0 if generated < 3 else 1)
        expected = FinishReason.NONE if generated < 3 else FinishReason.STOP
        assert result.finish_reason == expected


# Margins: how near a decision was to going the other way.


def test_margin_of_top_p() -> None:
    # Cumulative .4, .7, .9, 1: at .69 the sum .7 is .01 away, .4 is .29 away.
    logits = ln([0.4, 0.3, 0.2, 0.1])
    assert row(logits, top_p=0.69).margins["top_p"] == pytest.approx(0.01, rel=1e-3)
    assert row(logits, top_p=0.405).margins["top_p"] == pytest.approx(0.005, rel=1e-3)
    # All are kept: only the sum before the last can move the cut.
    assert row(logits, top_p=0.999).margins["top_p"] == pytest.approx(0.099, rel=1e-3)
    assert row(logits, top_p=0.1).margins["top_p"] == pytest.approx(0.3, rel=1e-3)
    assert row([0.0], top_p=0.1).margins["top_p"] == INF


def test_margin_of_the_other_filters() -> None:
    logits = ln([0.5, 0.3, 0.15, 0.05])
    # |.15 / .1 - 1| = .5 and |.05 / .1 - 1| = .5; the maximum does not count.
    assert row(logits, epsilon_cutoff=0.1).margin == pytest.approx(0.5, rel=1e-5)
    # min_p .28: p_i / p_max = .6, .3, .1; |ln .3 - ln .28| = .06899.
    assert row(logits, min_p=0.28).margin == pytest.approx(0.06899, rel=1e-3)
    # eta: cutoff .14272 (see test_eta_cutoff), .15 / .14272 - 1 = .0510.
    assert row(logits, eta_cutoff=0.2).margin == pytest.approx(0.0510, rel=1e-2)
    # sigma 1.4142, n 1.3: bound .16152, distance .16152, over n sigma = 1.83848: .08786.
    assert row([2.0, 0.0, 0.0, -2.0], top_n_sigma=1.3).margin == pytest.approx(0.08786, rel=1e-3)
    # Typical at .31, see test_typical_p: the mass .3 is .01 away, the next distances .162.
    assert row(ln([0.5, 0.3, 0.2]), typical_p=0.31).margin == pytest.approx(0.01, rel=1e-3)
    assert row(logits, top_k=2).margin == INF
    assert row(logits, top_k=2, top_p=0.5).margins.keys() == {"top_k", "top_p"}


def test_margin_of_mirrored_distances_is_0() -> None:
    # [.5, .25, .25]: entropy 1.5 ln 2, all three distances are ln 2 / 2 but for rounding.
    assert row(ln([0.5, 0.25, 0.25]), typical_p=0.3).margin < 1e-6


# Malformed arguments.


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"logits": []}, r"logits of shape \(0,\)"),
        ({"logits": [[0.0, 1.0]]}, r"logits of shape \(1, 2\)"),
        ({"vocab_size": 4}, r"at least vocab_size = 4"),
        ({"vocab_size": 0}, r"vocab_size = 0"),
        ({"grammar_bitmask": np.array([1], dtype=np.int64)}, "grammar_bitmask of dtype int64"),
        ({"grammar_bitmask": np.zeros(0, dtype=np.int32)}, "at least 1 elements"),
        ({"grammar_bitmask": np.zeros((1, 1), dtype=np.int32)}, r"shape \(1, 1\)"),
        ({"order": [0, 1]}, r"permutation of range\(3\)"),
        ({"order": [0, 1, 1]}, r"permutation of range\(3\)"),
        ({"prompt_token_ids": [3]}, r"prompt_token_ids holds 3, .* \[0, 3\)"),
        ({"output_token_ids": [0, -1]}, r"output_token_ids holds -1, .* \[0, 3\)"),
        ({"eos_token_ids": [3]}, r"eos_token_ids holds 3"),
        ({"logit_bias": {3: 1.0}}, r"logit_bias holds 3"),
        ({"allowed_token_ids": [0, 3]}, r"allowed_token_ids holds 3"),
        ({"bad_words_ids": [[0], [3, 1]]}, r"bad_words_ids holds 3"),
        ({"stop_token_ids": [3]}, r"stop_token_ids holds 3"),
        ({"logprob_token_ids": [3]}, r"logprob_token_ids holds 3"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_refused(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        row(**{"logits": [0.0, 1.0, 2.0], **kwargs})


# The warpers of Hugging Face transformers, which define typical, epsilon and eta.


@pytest.fixture(scope="module")
def warpers() -> Any:
    return pytest.importorskip(
        "transformers.generation.logits_process", reason="transformers is the second opinion"
    )


def warped(warper: Any, logits: NDArray[np.float32], temperature: float) -> list[int]:
    scores = torch.from_numpy(logits).double().unsqueeze(0) / temperature
    ids: list[int] = torch.nonzero(warper(None, scores)[0] > -INF).flatten().tolist()
    return ids


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
@pytest.mark.parametrize(
    ("name", "class_name", "values"),
    [
        ("typical_p", "TypicalLogitsWarper", (0.05, 0.2, 0.5, 0.9, 0.99)),
        ("epsilon_cutoff", "EpsilonLogitsWarper", (1e-4, 1e-3, 1e-2, 0.1, 0.9)),
        ("eta_cutoff", "EtaLogitsWarper", (1e-4, 1e-3, 1e-2, 0.1, 0.9)),
        ("min_p", "MinPLogitsWarper", (1e-4, 1e-2, 0.1, 0.9)),
    ],
)
def test_as_transformers(
    warpers: Any, name: str, class_name: str, values: tuple[float, ...], temperature: float
) -> None:
    rng = np.random.default_rng(7)
    compared = 0
    for vocab_size in (2, 17, 1000):
        for scale in (0.1, 1.0, 3.0):
            logits = rng.normal(size=vocab_size, scale=scale).astype(np.float32)
            for value in values:
                result = row(logits, temperature=temperature, **{name: value})
                # Both round in float64, and the other rounds thresholds to fp32 in places.
                if result.margin < 1e-6:
                    continue
                warper = getattr(warpers, class_name)(fp32(value))
                assert result.survivors.tolist() == warped(warper, logits, fp32(temperature))
                compared += 1
    assert compared > 30


# Whatever comes, the result is sound.

ANY_LOGIT = st.one_of(
    st.floats(width=32),
    st.floats(-30, 30, width=32),
    st.sampled_from([0.0, -0.0, 1.0, INF, -INF, NAN, FLT_MAX, -FLT_MAX, TINY]),
)
ANY_PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 1e-5, 0.7, 1.0, 3.0, FLT_MAX]),
        "top_k": st.integers(-1, 9),
        "top_p": st.sampled_from([TINY, 0.1, 0.5, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, TINY, 0.1, 0.9, 1.0]),
        "top_n_sigma": st.sampled_from([0.0, TINY, 1.0, 3.0, FLT_MAX]),
        "typical_p": st.sampled_from([TINY, 0.2, 0.9, 1.0]),
        "epsilon_cutoff": st.sampled_from([0.0, TINY, 0.1, 0.99]),
        "eta_cutoff": st.sampled_from([0.0, TINY, 0.1, 0.99]),
        "repetition_penalty": st.sampled_from([TINY, 0.5, 1.0, 2.0, FLT_MAX]),
        "frequency_penalty": st.sampled_from([-2.0, 0.0, 0.3]),
        "presence_penalty": st.sampled_from([-2.0, 0.0, 0.3]),
        "logit_bias": st.sampled_from([{}, {0: -INF}, {0: FLT_MAX}, {0: -FLT_MAX}]),
        "allowed_token_ids": st.sampled_from([None, [0]]),
        "logprobs_mode": st.sampled_from(["raw", "processed"]),
        "output_token_ids": st.sampled_from([[], [0], [0, 0, 0]]),
    },
)


@settings(deadline=None)
@given(
    logits=st.lists(ANY_LOGIT, min_size=1, max_size=8),
    kwargs=ANY_PARAMS,
    word=st.one_of(st.sampled_from(EXTREME_WORDS), st.integers(-(2**63), 2**63 - 1)),
)
def test_any_row_gives_a_sound_result(
    logits: list[float], kwargs: dict[str, Any], word: int
) -> None:
    with np.errstate(invalid="raise", divide="raise"):
        result = row(logits, word=word, logprobs=3, rank=True, **kwargs)
    survivors = result.survivors.tolist()
    assert survivors == sorted(set(survivors))
    assert result.token_id in survivors
    assert result.token_id in result.tokens_near(0.0)
    assert result.probabilities.sum() == pytest.approx(1.0)
    assert result.boundaries[-1] == 1
    y = result.processed_logits
    assert np.isfinite(y[survivors]).all()
    assert not np.isnan(y).any()
    assert result.num_kept in (0, len(survivors))
    assert not math.isnan(result.logprob)
    assert result.logprob <= 0
    assert 1 <= result.rank <= len(logits)
    assert len(result.top_token_ids) == len(result.top_logprobs) == 3
    assert list(result.top_logprobs) == sorted(result.top_logprobs, reverse=True)
    top = zip(result.top_token_ids, result.top_logprobs, strict=True)
    assert all((i == -1) == (logprob == -INF) for i, logprob in top)
    assert all(m >= 0 for m in result.margins.values())


def test_real_vocabulary_sizes() -> None:
    rng = np.random.default_rng(1)
    for vocab_size in (111, 32000, 128256):
        logits = rng.normal(size=vocab_size + 64).astype(np.float32)
        result = row(
            logits, vocab_size=vocab_size, word=rng.integers(2**63), top_p=0.9, logprobs=20
        )
        best = np.sort(logits[:vocab_size])[::-1][:20]
        assert logits[list(result.top_token_ids)].tolist() == best.tolist()
        assert result.token_id < vocab_size
