"""The twin of the reference, which bench/validate.py takes for it, equals the reference.

Both compute in float64, in different orders of summation: what depends on a sum agrees to 1e-9,
and kept sets are equal where no decision is that close.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import DTYPES, INF, KINDS, SHARE_FLOOR, SHARE_TOLERANCE, random_params, random_row
from hypothesis import given, settings
from hypothesis import strategies as st
from twin import FILTERS, Filters, Twin, share_tolerance, twin

from graphed_sampling import SamplingParams
from graphed_sampling.reference import RowResult, raw_logprobs, sample_row

CLOSE = 1e-9
OFF = SamplingParams()


def filters_of(rng: np.random.Generator, vocab: int, rate: float) -> SamplingParams:
    """Random filters alone: masks, bias and penalties come before the rows that the twin sees."""
    params = random_params(rng, vocab, rate=rate)
    return replace(OFF, **{name: getattr(params, name) for name in ("temperature", *FILTERS)})


def check(logits: torch.Tensor, requests: list[SamplingParams], words: np.ndarray) -> int:
    """Every row against the reference; returns in how many a set was too close to call."""
    result = twin(logits, Filters.of(requests))
    vocab = logits.shape[1]
    canonical = np.random.default_rng(vocab).permutation(vocab)
    draws = result.draw(torch.from_numpy(words), torch.from_numpy(canonical))
    values = logits.float().numpy()
    close = 0
    for row, params in enumerate(requests):
        expected = sample_row(values[row], params, word=int(words[row]), order=canonical)
        what = f"row {row}, V {vocab}, {params}"
        same = set(torch.nonzero(result.kept[row])[:, 0].tolist()) == set(
            expected.survivors.tolist()
        )
        assert same or expected.margin < CLOSE, what
        assert np.array_equal(result.y[row].numpy(), expected.processed_logits), what
        assert int(result.flags[row]) == int(expected.flags), what
        np.testing.assert_allclose(
            result.raw_logprobs[row].numpy(), raw_logprobs(values[row]), rtol=CLOSE, atol=CLOSE
        )
        close += not same
        if same:
            check_row(result, row, expected, canonical, what)
            check_token(draws.token, draws.distance(draws.token), row, expected, what)
    return close


def check_row(
    result: Twin, row: int, expected: RowResult, canonical: np.ndarray, what: str
) -> None:
    assert int(result.num_kept[row]) == expected.num_kept, what
    for name, margin in zip(FILTERS, result.margins[row].tolist(), strict=True):
        # A tie in float64 makes a margin of 0, or of what rounding leaves.
        wanted = expected.margins.get(name, INF)
        assert margin == wanted or abs(margin - wanted) < CLOSE * max(1, wanted), (name, what)
    dense = np.zeros(len(canonical))
    dense[expected.survivors] = expected.probabilities
    probabilities = result.logprobs[row].exp().numpy()
    np.testing.assert_allclose(probabilities, dense, rtol=CLOSE, atol=CLOSE, err_msg=what)
    boundaries = result.cumulative(torch.from_numpy(canonical))[row]
    place = np.argsort(canonical)[expected.survivors]
    exact = [float(b) for b in expected.boundaries]
    np.testing.assert_allclose(boundaries[place], exact, rtol=0, atol=CLOSE, err_msg=what)


def check_token(
    tokens: torch.Tensor, distances: torch.Tensor, row: int, expected: RowResult, what: str
) -> None:
    assert int(tokens[row]) in expected.tokens_near(CLOSE), what
    assert float(distances[row]) == 0, what


def words_of(rng: np.random.Generator, count: int) -> np.ndarray:
    words = rng.integers(-(2**63), 2**63, count)
    words[rng.random(count) < 0.2] = rng.choice([0, -1])
    return words


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_each_kind_equal_the_reference(kind: str) -> None:
    rng = np.random.default_rng(KINDS.index(kind))
    rows = close = 0
    for vocab in (1, 2, 3, 13, 37, 300):
        count = 40
        values = np.stack([random_row(rng, vocab, kind) for _ in range(count)])
        requests = [filters_of(rng, vocab, rate=rng.choice([0.15, 0.5])) for _ in range(count)]
        close += check(torch.from_numpy(values), requests, words_of(rng, count))
        rows += count
    # Subnormal logits differ by less than float64 tells apart in a probability.
    assert close <= (0.3 if kind == "subnormal" else 0.02) * rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*FILTERS, "none"])
def test_each_filter_alone_on_rows_with_ties(name: str, dtype: str) -> None:
    rng = np.random.default_rng([len(name), len(dtype)])
    vocab, count = 211, 40
    values = rng.normal(0, 2, (count, vocab)).round(1)
    requests = []
    while len(requests) < count:
        params = filters_of(rng, vocab, rate=1.0)
        alone = replace(OFF, temperature=params.temperature)
        if name != "none":
            alone = replace(alone, **{name: getattr(params, name)})
        requests.append(alone)
    check(torch.from_numpy(values).to(DTYPES[dtype]), requests, words_of(rng, count))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    vocab=st.integers(1, 300),
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(list(DTYPES.values())),
)
def test_random_batches_equal_the_reference(
    seed: int, vocab: int, kind: str, dtype: torch.dtype
) -> None:
    rng = np.random.default_rng(seed)
    values = np.stack([random_row(rng, vocab, kind) for _ in range(8)])
    requests = [filters_of(rng, vocab, rate=0.4) for _ in range(8)]
    check(torch.from_numpy(values).to(dtype), requests, words_of(rng, 8))


def test_a_large_row_equals_the_reference() -> None:
    rng = np.random.default_rng(0)
    vocab = 32000
    values = np.stack([random_row(rng, vocab, kind) for kind in ("zipf", "smooth", "ties")])
    requests = [
        SamplingParams(top_k=50, top_p=0.95),
        SamplingParams(typical_p=0.9, eta_cutoff=1e-4),
        SamplingParams(top_n_sigma=1.5, temperature=0.7),
    ]
    assert check(torch.from_numpy(values), requests, words_of(rng, 3)) == 0


def test_chunks_change_nothing() -> None:
    rng = np.random.default_rng(1)
    values = torch.from_numpy(np.stack([random_row(rng, 50, "smooth") for _ in range(10)]))
    filters = Filters.of([filters_of(rng, 50, 0.5) for _ in range(10)])
    whole, parts = twin(values, filters), twin(values, filters, chunk_elements=150)
    for name in ("y", "flags", "order", "kept", "num_kept"):
        assert torch.equal(getattr(whole, name), getattr(parts, name))
    for name in ("logprobs", "raw_logprobs", "margins", "margin"):
        torch.testing.assert_close(getattr(whole, name), getattr(parts, name))


def test_words_outside_of_an_interval_have_their_distance() -> None:
    logits = torch.tensor([[0.25, 0.25, 0.5]]).log().expand(3, 3)
    words = torch.tensor([0, 2**62, -1])  # 0, 1/4 and 1 - 2**-64
    draws = twin(logits, Filters.of([OFF] * 3)).draw(words, torch.tensor([2, 0, 1]))
    assert draws.token.tolist() == [2, 2, 1]
    expected = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    torch.testing.assert_close(draws.distance(torch.tensor([0, 0, 0])), expected)


def test_the_tolerance_is_the_one_of_the_tests() -> None:
    for vocab in (1, 128256):
        assert share_tolerance(vocab) == SHARE_TOLERANCE + vocab * SHARE_FLOOR


@pytest.mark.parametrize("mutant", ["", "top_p", "top_k"])
def test_validate_passes_and_fails(mutant: str) -> None:
    """The program built on the twin; a mutant's kept sets are one token off now and then."""
    pytest.importorskip("rich")
    program = Path(__file__).resolve().parents[1] / "bench" / "validate.py"
    options = "--backend torch --device cpu --parts small large --rows-small 4000 --rows-large 2"
    options += " --vocabs 3 32 100 1001 --vocab-large 5000"
    command = [sys.executable, str(program), *options.split(), f"--mutant={mutant}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == (1 if mutant else 0), done.stdout + done.stderr
    assert ("FAILED small: kept set" in done.stdout) == bool(mutant), done.stdout + done.stderr
