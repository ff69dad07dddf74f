"""Faults that samplers have had in public: each a test on every backend, named by its symptom."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    DTYPES,
    FLT_MAX,
    INF,
    KINDS,
    NAN,
    BackendDevice,
    Case,
    CheckedTable,
    assert_logprobs,
    check_fresh_draws,
    check_padded_ids,
    check_padding_writes_nothing,
    check_raw_logprobs,
    check_seeds,
    check_spaced_words,
    flat_draws,
    on_host,
    place,
    random_params,
    random_row,
)

from graphed_sampling import (
    FinishReason,
    GraphedSampler,
    RequestTable,
    RowFlags,
    Sampler,
    SamplingParams,
    StepOutput,
    philox,
)
from graphed_sampling.layout import Output
from graphed_sampling.testing import EXTREME_WORDS, chi_square

GREEDY = SamplingParams(temperature=0.0, seed=0, logprobs=0)
EAGER_AND_GRAPHED = pytest.mark.parametrize("graphed", [False, True], ids=["eager", "graphed"])


def log(*probabilities: float) -> np.ndarray:
    """A row of logits with these probabilities; 0 is a logit of -inf."""
    with np.errstate(divide="ignore"):
        return np.log(np.array(probabilities)).astype(np.float32)


def one_step(
    pair: BackendDevice,
    rows: list[np.ndarray],
    params: list[SamplingParams],
    *,
    words: list[int] | None = None,
    dtype: torch.dtype = torch.float32,
    placement: str = "contiguous",
    bitmask: torch.Tensor | None = None,
    **options: Any,
) -> StepOutput:
    """One checked step of requests in slots 0, 1, ..., so that every field is the reference's."""
    checked = CheckedTable(pair, len(rows[0]), len(rows), **options)
    for slot, request_params in enumerate(params):
        checked.admit(request_params, slot=slot)
    placed = place(np.stack(rows), pair.device, dtype, placement)
    given = None if words is None else torch.tensor(words)
    host = checked.step(placed.logits, range(len(rows)), words=given, bitmask=bitmask)
    placed.check_unmodified()
    checked.check_state()
    assert checked.tally.differences == 0
    return host


# Random numbers.


def test_replay_draws_the_same_token_for_ever(backend_device: BackendDevice) -> None:
    """A seed baked into the graph (Megatron #5697, flashinfer #2284): 1000 replays of one graph."""
    vocab, steps = 1024, backend_device.rows(1000, 40)
    drawn = flat_draws(backend_device, [5, 6], steps, vocab)
    check_fresh_draws(drawn[:, 0].tolist())
    # A flat row draws word * V / 2^64 along the canonical order: the very words of the seed.
    order = backend_device.order(vocab)
    for column, seed in enumerate((5, 6)):
        words = [philox.word(seed, position) for position in range(steps)]
        assert drawn[:, column].tolist() == [order[w * vocab >> 64] for w in words]
    hits = torch.bincount(drawn.flatten() // 32, minlength=vocab // 32)
    chi_square(hits, torch.full((32,), 1 / 32), false_alarm=1e-5)
    # The same seeds give the same sequence, and eager steps give it too.
    few = steps // 10
    assert torch.equal(drawn[:few], flat_draws(backend_device, [5, 6], few, vocab))
    eager = flat_draws(backend_device, [5, 6], few, vocab, graphed=False)
    assert torch.equal(drawn[:few], eager)


@EAGER_AND_GRAPHED
def test_only_the_first_seed_is_read(backend_device: BackendDevice, graphed: bool) -> None:
    """Rows' own seeds (flashinfer #4861, TRT-LLM #17172)."""
    check_seeds(backend_device, graphed=graphed)


def test_high_bits_of_the_seed_are_ignored(backend_device: BackendDevice) -> None:
    """All 64 bits count, signs included: seeds that differ in one bit draw differently."""
    seeds = [0, 1 << 31, 1 << 32, 1 << 63, 2**64 - 1, -(2**63) + 1]
    drawn = flat_draws(backend_device, seeds, 4, 4096)
    for one, other in combinations(range(len(seeds)), 2):
        assert (drawn[:, one] != drawn[:, other]).any(), (seeds[one], seeds[other])
    # -1 is 2^64 - 1 in two's complement.
    assert torch.equal(flat_draws(backend_device, [-1], 4, 4096), drawn[:, 4:5])


class Batch:
    """Requests that are the same wherever they run, and the packed records that they get."""

    def __init__(self, pair: BackendDevice, vocab: int = 257, count: int = 9) -> None:
        rng = np.random.default_rng(17)
        self.pair, self.vocab, self.count = pair, vocab, count
        self.sequences = [
            tuple([int(i) for i in rng.integers(0, vocab, n)] for n in (6, 4)) for _ in range(count)
        ]
        self.params = [
            replace(
                pair.supported(random_params(rng, vocab, output, rate=0.3)),
                max_tokens=None,
                stop_token_ids=(),
            )
            for _, output in self.sequences
        ]
        rows = [random_row(rng, vocab, KINDS[i % len(KINDS)]) for i in range(3 * count)]
        self.logits = torch.from_numpy(np.stack(rows)).view(3, count, vocab)[: pair.rows(3, 1)]

    def run(
        self,
        order: list[int],
        *,
        slots: dict[int, int] | None = None,
        padding: int = 0,
        sampler: Callable[..., Any] = Sampler,
    ) -> dict[int, torch.Tensor]:
        """Steps of those requests in that row order; request -> its records [steps, words].

        slots: request -> slot, by default its number. padding: rows of slot -1 put in front.
        """
        slots = slots or {i: i for i in order}
        table = RequestTable(16, self.vocab, device=self.pair.device, eos_token_ids=[1])
        for i in order:
            prompt, output = self.sequences[i]
            table.admit(self.params[i], prompt, output_token_ids=output, slot=slots[i])
        step = sampler(table, backend=self.pair.backend)
        rows = torch.tensor([-1] * padding + [slots[i] for i in order], dtype=torch.int32)
        records = []
        for values in self.logits:
            logits = torch.cat([torch.zeros(padding, self.vocab), values[order]])
            records.append(step(logits.to(self.pair.device), rows).record.cpu().clone())
        stacked = torch.stack(records)
        return {i: stacked[:, padding + row] for row, i in enumerate(order)}


def one_bucket(rows: int) -> Callable[..., Any]:
    return lambda table, backend: GraphedSampler(table, (rows,), backend=backend)


VARIATIONS: dict[str, Callable[[Batch], dict[int, torch.Tensor]]] = {
    "alone": lambda b: {i: b.run([i])[i] for i in range(b.count)},
    "permuted": lambda b: b.run(list(range(b.count))[::-1]),
    "subset": lambda b: b.run([7, 2, 3]),
    "other-slots": lambda b: b.run(list(range(b.count)), slots={i: 15 - i for i in range(9)}),
    "padded": lambda b: b.run(list(range(b.count)), padding=3),
    "bucket-9": lambda b: b.run(list(range(b.count)), sampler=one_bucket(9)),
    "bucket-16": lambda b: b.run(list(range(b.count)), sampler=one_bucket(16)),
    "bucket-1": lambda b: {i: b.run([i], sampler=one_bucket(1))[i] for i in range(b.count)},
    "again": lambda b: b.run(list(range(b.count))),
}


@functools.cache
def batch_together(pair: BackendDevice) -> tuple[Batch, dict[int, torch.Tensor]]:
    batch = Batch(pair)
    return batch, batch.run(list(range(batch.count)))


@pytest.mark.parametrize("variation", VARIATIONS)
def test_batchmates_change_a_request(backend_device: BackendDevice, variation: str) -> None:
    """Tokens, logprobs, all of the record, bit for bit (sglang #35697)."""
    backend_device.require_words()
    batch, together = batch_together(backend_device)
    for i, records in VARIATIONS[variation](batch).items():
        assert torch.equal(records, together[i]), f"request {i}: {batch.params[i]}"


def test_number_of_threads_changes_a_request(backend_device: BackendDevice) -> None:
    """Enough elements that torch and numba do split the work."""
    backend_device.require_words()
    if backend_device.interpreted:
        pytest.skip("Triton's interpreter has one thread")
    batch = Batch(backend_device, vocab=40_000, count=9)
    before = torch.get_num_threads()
    try:
        runs = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            runs.append(batch.run(list(range(batch.count))))
    finally:
        torch.set_num_threads(before)
    for i in range(batch.count):
        assert torch.equal(runs[0][i], runs[1][i]), f"request {i}: {batch.params[i]}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 2, 33, 111, 32000], ids=lambda v: f"V{v}")
def test_extreme_words_draw_a_masked_token_or_id_v(
    backend_device: BackendDevice, vocab: int, dtype: str
) -> None:
    """u = 0 and u = 1 (sglang #25106, flashinfer #2438, #384): first and last survivor.

    First and last id of the row are masked where there are others, and beyond it lies poison.
    """
    row = np.round(np.random.default_rng(0).normal(0, 1, vocab)).astype(np.float32)
    row[[0, -1]] = -INF if vocab > 2 else 1.0
    survivors = backend_device.order(vocab)
    survivors = survivors[row[survivors] > -INF]
    backend_device.require_words()
    kept = SamplingParams(seed=0, logprobs=1, top_p=0.99) if vocab == 111 else GREEDY
    params = [SamplingParams(seed=0, logprobs=1)] * 2 + [kept] * 2
    host = one_step(
        backend_device,
        [row] * 4,
        params,
        words=[*EXTREME_WORDS] * 2,
        dtype=DTYPES[dtype],
        placement="padded",
    )
    assert host.token_ids[:2].tolist() == [survivors[0], survivors[-1]]
    assert host.logprobs.isfinite().all()


def test_next_step_sees_shifted_numbers(backend_device: BackendDevice) -> None:
    """offset + 1 in place of a block apart: no window of draws stands twice, in any slot."""
    steps = backend_device.rows(64, 8)
    drawn = flat_draws(backend_device, list(range(16)), steps, 1024).T.tolist()
    windows = [tuple(row[i : i + 4]) for row in drawn for i in range(steps - 3)]
    # 976 windows of 40 bits: two equal by chance has probability 5e-7.
    assert len(set(windows)) == len(windows)


def test_n_samples_of_one_seed_are_identical(backend_device: BackendDevice) -> None:
    """Seed and index both enter (tt-metal #53077), and the same seed gives the same texts."""
    params = SamplingParams(seed=99)
    seeds = [params.child(i).seed for i in range(8)]
    assert None not in seeds
    drawn = flat_draws(backend_device, [s for s in seeds if s is not None], 4, 4096).T.tolist()
    assert len({tuple(text) for text in drawn}) == 8
    again = flat_draws(backend_device, [params.child(i).seed or 0 for i in range(8)], 4, 4096)
    assert again.T.tolist() == drawn


def test_preempted_request_starts_its_stream_afresh(backend_device: BackendDevice) -> None:
    """Admitted again with its output, a request goes on as if it had never left."""
    backend_device.require_words()
    rng = np.random.default_rng(4)
    logits = torch.from_numpy(rng.normal(0, 1, (8, 1, 50)).astype(np.float32))
    params = SamplingParams(seed=3, frequency_penalty=0.5, logprobs=2)
    whole = CheckedTable(backend_device, 50, 2)
    whole.admit(params, [1, 2, 3], slot=0)
    for row in logits:
        whole.step(row.to(backend_device.device), [0])
    halved = CheckedTable(backend_device, 50, 2)
    halved.admit(params, [1, 2, 3], slot=0)
    for step, row in enumerate(logits):
        if step == 4:
            output = halved.requests[0].output
            halved.release(0)
            halved.admit(params, [1, 2, 3], output, slot=1)
        halved.step(row.to(backend_device.device), [step // 4])
    assert halved.requests[1].output == whole.requests[0].output


# Filters.


@pytest.mark.parametrize("dtype", DTYPES)
def test_argmax_loses_a_tie(backend_device: BackendDevice, dtype: str) -> None:
    """The lowest of the equals (Megatron #7061, mstar #254), whatever the word and the scale."""
    row = np.full(2000, -5.0, np.float32)
    row[[1999, 700, 1203]] = 4.001  # one value in bf16
    asked = [
        GREEDY,
        replace(GREEDY, temperature=9.9e-6),
        SamplingParams(top_k=1, seed=1),
        SamplingParams(top_k=1, seed=1, temperature=50.0),
        SamplingParams(top_k=1, seed=1, temperature=1e-4),
    ]
    for word in (*EXTREME_WORDS, 12345):
        host = one_step(backend_device, [row] * 5, asked, words=[word] * 5, dtype=DTYPES[dtype])
        assert host.token_ids.tolist() == [700] * 5
        assert host.num_kept.tolist() == [1] * 5


def test_division_by_the_temperature_makes_ties(backend_device: BackendDevice) -> None:
    """Logits one ulp apart stay apart: comparisons come before the division."""
    row = np.full(40, 1.0, np.float32)
    row[9] = np.nextafter(np.float32(1), np.float32(2))
    params = [
        SamplingParams(top_k=1, temperature=temperature, seed=0)
        for temperature in (3e38, 1e10, 3.0, 1.0)
    ]
    host = one_step(backend_device, [row] * 4, params)
    assert host.token_ids.tolist() == [9] * 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_top_k_keeps_all_ties_at_the_kth(backend_device: BackendDevice, dtype: str) -> None:
    """[.4, .3, .3, 0] and k = 2: ids 0 and 1, with 4/7 and 3/7 (flashinfer #3774)."""
    row = torch.from_numpy(log(0.4, 0.3, 0.3, 0)).to(DTYPES[dtype]).float().numpy()
    params = SamplingParams(
        top_k=2, seed=0, logprobs=4, logprobs_mode="processed", logprob_token_ids=[0, 1, 2, 3]
    )
    host = one_step(backend_device, [row] * 2, [params] * 2, words=[*EXTREME_WORDS])
    assert set(host.token_ids.tolist()) <= {0, 1}
    if backend_device.takes_words:
        assert sorted(host.token_ids.tolist()) == [0, 1]
    assert host.num_kept.tolist() == [2, 2]
    assert host.top_token_ids[0, :4].tolist() == [0, 1, -1, -1]
    if dtype == "fp32":
        assert_logprobs(host.given_logprobs[0, :4], [math.log(4 / 7), math.log(3 / 7), -INF, -INF])
    check_spaced_words(backend_device, Case(row, SamplingParams(top_k=2)), 2**14)


@pytest.mark.parametrize("k", [1, 2, 63, 64, 65, 999, 1000])
def test_top_k_of_one_tie_keeps_another_number(backend_device: BackendDevice, k: int) -> None:
    """A flat row of 1000: exactly the k lowest ids."""
    host = one_step(
        backend_device,
        [np.zeros(1000, np.float32)] * 2,
        [SamplingParams(top_k=k, seed=0)] * 2,
        words=[*EXTREME_WORDS],
    )
    # k = V is off, and then there is no number of survivors to report.
    assert host.num_kept.tolist() == [k if k < 1000 else 0] * 2
    # Whatever the canonical order: both words draw an id below k, and two ends of it if k > 1.
    ids = [i for i in backend_device.order(1000).tolist() if i < k]
    assert set(host.token_ids.tolist()) <= set(ids)
    if backend_device.takes_words:
        assert host.token_ids.tolist() == [ids[0], ids[-1]]


def test_zero_temperature_is_uniform_or_nan(backend_device: BackendDevice) -> None:
    """T = 0 with and without masks: the argmax, and finite logprobs (flashinfer, Megatron)."""
    row = log(0.1, 0.6, 0.2, 0.1)
    masked = np.where(np.arange(4) == 1, -INF, row).astype(np.float32)
    banned = replace(GREEDY, logit_bias={1: -INF})
    host = one_step(backend_device, [row, masked, row], [GREEDY, GREEDY, banned])
    assert host.token_ids.tolist() == [1, 2, 2]
    assert host.logprobs.isfinite().all()


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_greedy_row_flips_minus_inf_among_sampled_rows(
    backend_device: BackendDevice, mode: Any
) -> None:
    """A temperature of -1 as a mark turned -inf into +inf (vllm #22180)."""
    masked = np.array([-INF, 1.0, -INF, 2.0, -INF], np.float32)
    sampled = SamplingParams(temperature=0.7, seed=1, logprobs=5, logprobs_mode=mode)
    greedy = replace(sampled, temperature=0.0)
    host = one_step(
        backend_device,
        [masked] * 4,
        [sampled, greedy, sampled, greedy],
        words=[-1, 0, 0, -1],
    )
    assert host.token_ids[[1, 3]].tolist() == [3, 3]
    drawn = set(host.token_ids[[0, 2]].tolist())
    assert drawn == {1, 3} if backend_device.takes_words else drawn <= {1, 3}
    assert host.flags.tolist() == [0] * 4


def test_top_k_with_top_p_asserts_or_drops_one(backend_device: BackendDevice) -> None:
    """Both apply (Megatron asserted inside the step): each is the narrower one once."""
    row = log(0.3, 0.25, 0.2, 0.15, 0.1)
    params = [SamplingParams(top_k=k, top_p=p, seed=0) for k, p in ((2, 0.99), (4, 0.5))]
    host = one_step(backend_device, [row] * 2, params, words=[-1, -1])
    assert host.num_kept.tolist() == [2, 2]
    # Within k = 3 the first has .4 of the mass, in the whole row .3.
    params = [SamplingParams(top_k=k, top_p=0.39, seed=0) for k in (3, 0)]
    assert one_step(backend_device, [row] * 2, params).num_kept.tolist() == [1, 2]


OFF = {
    "top_k-0": {"top_k": 0},
    "top_k--1": {"top_k": -1},
    "top_k-V": {"top_k": 50},
    "top_k-V+9": {"top_k": 59},
    "top_k-2^40": {"top_k": 2**40},
    "top_p-1": {"top_p": 1.0},
    "min_p-0": {"min_p": 0.0},
    "typical_p-1": {"typical_p": 1.0},
    "penalties": {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": -0.0},
    "no-bias": {"logit_bias": {}, "bad_words_ids": [], "stop_token_ids": []},
    "zero-bias": {"logit_bias": {3: 0.0}},
    "all-allowed": {"allowed_token_ids": tuple(range(50))},
}


@pytest.mark.parametrize("name", OFF)
def test_an_off_filter_changes_bits(backend_device: BackendDevice, name: str) -> None:
    """Off is the same as not asked, bit for bit, also num_kept."""
    kinds = KINDS[:: backend_device.rows(1, 4)]
    rows = torch.from_numpy(
        np.stack([random_row(np.random.default_rng(i), 50, k) for i, k in enumerate(kinds)])
    )
    records, steps = [], backend_device.rows(3, 1)
    for values in ({}, OFF[name]):
        table = RequestTable(len(rows), 50, device=backend_device.device)
        for i in range(len(rows)):
            params = SamplingParams(seed=i, logprobs=3, rank=True, temperature=0.8, **values)
            backend_device.require(params)
            table.admit(params, [1, 2], output_token_ids=[3, 4, 3])
        sampler = Sampler(table, backend_device.backend)
        slots = torch.arange(len(rows), dtype=torch.int32)
        logits = rows.to(backend_device.device)
        records.append(torch.stack([sampler(logits, slots).record.clone() for _ in range(steps)]))
    assert torch.equal(*records)


def test_min_p_of_one_keeps_one_or_all(backend_device: BackendDevice) -> None:
    """min_p = 1 keeps the maximum's equals and nothing else, at any temperature."""
    row = np.array([0, 3, 1, 3, np.nextafter(np.float32(3), np.float32(0)), 3], np.float32)
    params = [SamplingParams(min_p=1.0, temperature=t, seed=0) for t in (1e-4, 1.0, 100.0)]
    host = one_step(backend_device, [row] * 3, params)
    assert host.num_kept.tolist() == [3] * 3
    check_spaced_words(backend_device, Case(row, params[2]), 2**12)


def test_top_p_loses_the_token_that_crosses(backend_device: BackendDevice) -> None:
    """The token with which the mass reaches p is kept (flashinfer #2202)."""
    row = log(0.5, 0.3, 0.2)
    params = [SamplingParams(top_p=p, seed=0) for p in (0.01, 0.499, 0.501, 0.79, 0.81, 0.999)]
    host = one_step(backend_device, [row] * 6, params, words=[-1] * 6)
    assert host.num_kept.tolist() == [1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1000, 4096, 32000], ids=lambda v: f"V{v}")
def test_top_p_boundary_drifts_in_low_precision(
    backend_device: BackendDevice, vocab: int, dtype: str
) -> None:
    """Flat rows, where a bf16 or fp32 running sum stalls (Megatron #7182): the count is exact."""
    backend_device.require_dtype(dtype)
    row = np.full(vocab, 2.5, np.float32)
    fractions = (0.1, 0.37, 0.5, 0.9, 0.999)[:: backend_device.rows(1, 4)]
    params = [SamplingParams(top_p=p, seed=0) for p in fractions]
    n = len(params)
    host = one_step(backend_device, [row] * n, params, words=[-1] * n, dtype=DTYPES[dtype])
    exact = [math.ceil(float(np.float32(p)) * vocab) for p in fractions]
    assert host.num_kept.tolist() == exact


def test_top_p_after_top_k_is_not_renormalised(backend_device: BackendDevice) -> None:
    """[.35, .25, .2, .05, ...], k = 4, p = .82: of .85 it takes .697, and so three of them."""
    row = log(0.35, 0.25, 0.2, 0.05, *[0.015] * 10)
    host = one_step(
        backend_device,
        [row] * 2,
        [SamplingParams(top_k=4, top_p=0.82, seed=0), SamplingParams(top_p=0.82, seed=0)],
        words=[-1, -1],
    )
    # Of the whole row p = .82 needs .35 + .25 + .2 + .05 = .85: four.
    assert host.num_kept.tolist() == [3, 4]


def test_min_p_is_skipped_with_a_seed(backend_device: BackendDevice) -> None:
    """(sglang #33695) Seeded rows beside rows whose seed the table draws."""
    row = log(0.6, 0.3, 0.07, 0.03)
    params = [SamplingParams(min_p=0.2, seed=1), SamplingParams(min_p=0.2)]
    host = one_step(backend_device, [row] * 2, params, words=[-1, -1])
    assert host.num_kept.tolist() == [2, 2]
    assert set(host.token_ids.tolist()) <= {0, 1}


FILTERS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"top_k": 3},
    {"top_p": 0.5},
    {"min_p": 0.3},
    {"top_k": 7, "top_p": 0.6},
    {"top_n_sigma": 0.7},
    {"typical_p": 0.4},
    {"epsilon_cutoff": 0.1},
    {"eta_cutoff": 0.2},
    {"repetition_penalty": 1.9, "frequency_penalty": 1.0},
    {"logit_bias": {0: -INF, 1: 5.0}},
    {"allowed_token_ids": [4, 9]},
    {"logprobs": 5, "rank": True, "logprob_token_ids": [1, 2]},
]


def test_a_neighbours_filter_changes_an_unfiltered_row(backend_device: BackendDevice) -> None:
    """A plain row beside one with each feature, and alone: bit for bit (vLLM's batch cliff)."""
    rng = np.random.default_rng(1)
    rows = torch.from_numpy(rng.normal(0, 2, (2, 60)).astype(np.float32)).to(backend_device.device)
    plain = backend_device.supported(SamplingParams(seed=5, temperature=0.9, logprobs=2))
    table = RequestTable(2, 60, device=backend_device.device, seed=1)
    table.admit(plain, [1, 2], slot=0)
    sampler = Sampler(table, backend_device.backend)
    alone = sampler(rows[:1], torch.tensor([0], dtype=torch.int32)).record.clone()
    for values in FILTERS:
        table = RequestTable(2, 60, device=backend_device.device, seed=1)
        table.admit(plain, [1, 2], slot=0)
        neighbour = backend_device.supported(SamplingParams(seed=6, **values))
        table.admit(neighbour, [1, 2], output_token_ids=[1, 1], slot=1)
        sampler = Sampler(table, backend_device.backend)
        both = sampler(rows, torch.tensor([0, 1], dtype=torch.int32))
        assert torch.equal(both.record[:1], alone), values


@pytest.mark.parametrize("dtype", DTYPES)
def test_last_kept_id_takes_the_missing_mass(backend_device: BackendDevice, dtype: str) -> None:
    """bf16 probabilities do not sum to 1: the remainder must not fall to the last id kept."""
    backend_device.require_speed()
    rng = np.random.default_rng(0)
    row = torch.from_numpy(rng.normal(0, 0.1, 111)).to(DTYPES[dtype]).float().numpy()
    # 2^-9, the rounding of a bf16 sum, would be 16 of so many words.
    check_spaced_words(backend_device, Case(row), 2**13)
    check_spaced_words(backend_device, Case(row, SamplingParams(top_p=0.5)), 2**13)


# Bad rows.

BAD_ROWS = {
    "nan": np.full(33, NAN),
    "one-nan": np.where(np.arange(33) == 5, NAN, 1.0),
    "minus-inf": np.full(33, -INF),
    "plus-inf": np.full(33, INF),
    "one-plus-inf": np.where(np.arange(33) == 32, INF, 1.0),
    "inf-and-nan": np.where(np.arange(33) % 3 == 0, NAN, np.where(np.arange(33) % 3, INF, -INF)),
    "one-finite": np.where(np.arange(33) == 31, -3.0, -INF),
    "all-equal": np.full(33, -7.0),
    "largest": np.full(33, FLT_MAX),
    "both-ends": np.where(np.arange(33) % 2, FLT_MAX, -FLT_MAX),
    "subnormal": np.arange(33) * 2.0**-149,
    "minus-zero": np.where(np.arange(33) % 2, -0.0, 0.0),
    "adjacent": np.nextafter(np.float32(1), np.float32(2)) ** (np.arange(33) % 3),
}
BAD_FLAGS = {
    "nan": RowFlags.NAN | RowFlags.EMPTY,
    "one-nan": RowFlags.NAN,
    "minus-inf": RowFlags.EMPTY,
    "plus-inf": RowFlags.POS_INF,
    "one-plus-inf": RowFlags.POS_INF,
    "inf-and-nan": RowFlags.NAN | RowFlags.POS_INF,
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_row_hangs_traps_or_spoils_its_neighbours(
    backend_device: BackendDevice, name: str
) -> None:
    """A bad row under every filter, a good row after each (flashinfer #1575, #769; vllm #20177)."""
    bad = BAD_ROWS[name].astype(np.float32)
    good = np.linspace(-2, 2, 33).astype(np.float32)
    params, filters = [], FILTERS[:: backend_device.rows(1, 3)]
    for i, values in enumerate(filters):
        values = {"logprobs": 3, "rank": True, **values}
        mode: Any = "processed" if i % 2 else "raw"
        asked = backend_device.supported(SamplingParams(seed=i, logprobs_mode=mode, **values))
        params += [asked, SamplingParams(seed=i, logprobs=1, top_k=5)]
    checked = CheckedTable(backend_device, 33, len(params))
    for slot, request_params in enumerate(params):
        checked.admit(request_params, slot=slot)
    logits = torch.from_numpy(np.stack([bad, good] * len(filters))).to(backend_device.device)
    for words in (None, [0] * len(params), [-1] * len(params))[: backend_device.rows(3, 1)]:
        host = checked.step(
            logits, range(len(params)), words=None if words is None else torch.tensor(words)
        )
        assert ((host.token_ids >= 0) & (host.token_ids < 33)).all()
        assert not host.top_logprobs[1::2, 0].isnan().any()
        # Row 2 has a filter alone; others ban ids, so that more may be left empty.
        assert host.flags[4] == BAD_FLAGS.get(name, 0)
        assert (host.flags[1::2] == 0).all()
    checked.check_state()
    limit = 0.5 if name in ("subnormal", "adjacent") else 0.02
    checked.tally.check(ambiguous=1.0, differences=limit)


def test_empty_row_emits_a_token_that_the_grammar_forbids(backend_device: BackendDevice) -> None:
    """No candidate left: the lowest id of the bitmask, 0 where that is empty or absent."""
    vocab = 70
    rows = [np.full(vocab, -INF, np.float32)] * 3
    bitmask = torch.zeros(3, 3, dtype=torch.int32)
    bitmask[0, 2] = 0b100  # id 66
    bitmask[1, 2] = 1 << 10  # id 74 lies beyond the vocabulary
    bitmask[2] = -1
    params = SamplingParams(seed=0, logprobs=1, logprobs_mode="processed")
    host = one_step(backend_device, rows, [params] * 3, bitmask=bitmask)
    assert host.token_ids.tolist() == [66, 0, 0]
    assert (host.flags == int(RowFlags.EMPTY)).all()
    assert host.logprobs.tolist() == [0.0] * 3
    assert host.num_kept.tolist() == [1] * 3


# Memory and layout.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 2, 111, 1000, 32000, 50257], ids=lambda v: f"V{v}")
def test_row_stride_is_ignored(backend_device: BackendDevice, vocab: int, dtype: str) -> None:
    """logits = padded[:, :V] equals its contiguous copy (vllm #42684, flashinfer #1866)."""
    backend_device.require_dtype(dtype)
    rng = np.random.default_rng(vocab)
    values = rng.normal(0, 2, (4, vocab + 7)).astype(np.float32)
    values[:, vocab:] = 1e4  # would win everywhere
    padded = torch.from_numpy(values).to(DTYPES[dtype]).to(backend_device.device)
    records = []
    for logits in (padded[:, :vocab], padded[:, :vocab].contiguous(), padded):
        table = RequestTable(4, vocab, device=backend_device.device)
        for i in range(4):
            params = SamplingParams(seed=i, logprobs=2, top_p=(0.9, 1.0)[i % 2])
            backend_device.require(params)
            table.admit(params)
        output = Sampler(table, backend_device.backend)(logits, torch.arange(4).int())
        records.append(output.record.clone())
        check_raw_logprobs(on_host(output), logits.float().cpu().numpy(), vocab)
    assert torch.equal(records[0], records[1])
    assert torch.equal(records[0], records[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "vocab", [1, 2, 3, 31, 111, 1023, 32000, 128256, 151936, 262144], ids=lambda v: f"V{v}"
)
def test_odd_vocabulary_or_address_reads_elsewhere(
    backend_device: BackendDevice, vocab: int, dtype: str
) -> None:
    """Base addresses at every residue of a 16-byte vector, the row's ends being the answer."""
    backend_device.require_dtype(dtype)
    # By threes: all that counts for kernels that take an aligned row's vectors or single elements.
    for offset in range(0, 8, backend_device.rows(1, 1, 3)):
        buffer = torch.full((offset + 2 * vocab + 8,), INF, dtype=DTYPES[dtype])
        logits = buffer[offset : offset + 2 * vocab].view(2, vocab)
        logits.zero_()
        logits[0, 0] = logits[1, vocab - 1] = 5.0
        buffer = buffer.to(backend_device.device)
        table = RequestTable(2, vocab, device=backend_device.device, penalties=False)
        for _ in range(2):
            table.admit(GREEDY)
        output = on_host(
            Sampler(table, backend_device.backend)(
                buffer[offset : offset + 2 * vocab].view(2, vocab), torch.arange(2).int()
            )
        )
        assert output.token_ids.tolist() == [0, vocab - 1]
        logprob = -math.log1p((vocab - 1) * math.exp(-5))
        assert_logprobs(output.logprobs, [logprob] * 2)
        if vocab > 2000 and offset >= 2:
            break  # large rows: an aligned one, and two that are not


@EAGER_AND_GRAPHED
def test_padded_ids_win_or_enter_the_normaliser(
    backend_device: BackendDevice, graphed: bool
) -> None:
    """vocab_size < V_logits (Megatron, mirage #751): the tail may hold anything."""
    check_padded_ids(backend_device, graphed=graphed)


@EAGER_AND_GRAPHED
def test_padding_rows_write_their_results(backend_device: BackendDevice, graphed: bool) -> None:
    """Slot -1 writes nothing but its own output row (TRT-LLM #5058)."""
    check_padding_writes_nothing(backend_device, graphed=graphed)


def test_two_tables_share_scratch(backend_device: BackendDevice) -> None:
    """Two tables stepped at once, on two threads and streams (flashinfer #3618, #4692).

    Each has to give what it gives alone.
    """
    on_gpu = backend_device.device.type == "cuda"
    rounds = 1000 if on_gpu else backend_device.rows(60, 1)
    vocab = 3000

    def stepper(number: int) -> Callable[[], torch.Tensor]:
        """Makes a table and its sampler; the function returned steps them for all records."""
        generator = torch.Generator().manual_seed(number)
        logits = torch.randn(8, vocab, generator=generator).to(backend_device.device)
        table = RequestTable(8, vocab, device=backend_device.device, seed=number)
        for i in range(8):
            params = SamplingParams(seed=100 * number + i, top_p=0.9, logprobs=2)
            table.admit(backend_device.supported(params))
        sampler = GraphedSampler(table, (8,), backend=backend_device.backend)
        slots = torch.arange(8, dtype=torch.int32, device=backend_device.device)
        records = torch.empty(rounds, 8, table.layout.output_words, dtype=torch.int32)
        records = records.to(backend_device.device)

        def steps() -> torch.Tensor:
            for record in records:
                record.copy_(sampler(logits, slots).record)
            return records.cpu()

        return steps

    alone = [stepper(number)() for number in (1, 2)]
    # Captures are made before the threads start: only the replays are to overlap.
    steppers = [stepper(number) for number in (1, 2)]
    if on_gpu:
        torch.cuda.synchronize()
    results: dict[int, torch.Tensor] = {}
    barrier = threading.Barrier(2)

    def run(index: int) -> None:
        stream = torch.cuda.Stream(backend_device.device) if on_gpu else None
        with torch.cuda.stream(stream):  # nothing where it is None
            barrier.wait()
            results[index] = steppers[index]()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(2):
        assert torch.equal(results[index], alone[index])


@EAGER_AND_GRAPHED
def test_update_in_flight_is_overwritten_by_the_next(
    backend_device: BackendDevice, graphed: bool
) -> None:
    """The pinned source is re-used before its copy ran (Megatron #5715).

    Twenty updates and steps go out with no wait between: each step must see its own.
    """
    steps = backend_device.rows(20, 20, 5)
    vocab = 64
    table = RequestTable(4, vocab, device=backend_device.device)
    for _ in range(4):
        table.admit(GREEDY)
    sampler: Any = (
        GraphedSampler(table, (4,), backend=backend_device.backend)
        if graphed
        else Sampler(table, backend_device.backend)
    )
    logits = torch.zeros(4, vocab, device=backend_device.device)
    slots = torch.arange(4, dtype=torch.int32)
    if backend_device.device.type == "cuda":
        # The stream is busy for some milliseconds, so that all of it is in flight at once.
        torch.cuda._sleep(20_000_000)
    drawn = []
    for step in range(steps):
        for slot in range(4):
            bias = {(4 * step + slot) % vocab: 3.0}
            table.update(slot, replace(GREEDY, logit_bias=bias))
        drawn.append(sampler(logits, slots).token_ids.clone())
    assert [t.tolist() for t in drawn] == [
        [(4 * step + slot) % vocab for slot in range(4)] for step in range(steps)
    ]


def test_reruns_differ(backend_device: BackendDevice) -> None:
    """Float atomics and racing sums (flashinfer #5034: 99 of 99 reruns differed)."""
    runs = 1000 if backend_device.device.type == "cuda" else backend_device.rows(50, 1)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(8, 5000, generator=generator).to(backend_device.device)
    table = RequestTable(8, 5000, device=backend_device.device)
    for i, values in enumerate(FILTERS[1:9]):
        asked = {"logprobs": 4, "rank": True, **values}
        table.admit(backend_device.supported(SamplingParams(seed=i, **asked)))
    sampler = Sampler(table, backend_device.backend)
    slots = torch.arange(8, dtype=torch.int32, device=backend_device.device)
    table.upload()
    state, tables = table.state.clone(), table.tables.clone()
    first = sampler(logits, slots).record.clone()
    differing = torch.zeros((), dtype=torch.int64, device=backend_device.device)
    for _ in range(runs):
        table.state.copy_(state)
        table.tables.copy_(tables)
        differing += (sampler(logits, slots).record != first).any()
    assert differing.item() == 0


# State.


def test_finished_neighbour_leaves_stale_metadata(backend_device: BackendDevice) -> None:
    """A request ends and another takes its slot in the middle (vllm #13076, Megatron #6420).

    The others go on bit for bit as if nothing had happened, and the new one as in a fresh table.
    """
    rng = np.random.default_rng(6)
    vocab, device = 40, backend_device.device
    logits = torch.from_numpy(rng.normal(0, 1.5, (6, 3, vocab)).astype(np.float32)).to(device)
    old = SamplingParams(
        seed=1,
        frequency_penalty=1.5,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        logit_bias={1: 4.0, 2: -INF},
        allowed_token_ids=list(range(20)),
        bad_words_ids=[[3, 4], [5]],
        stop_token_ids=[7],
        min_tokens=4,
        top_k=6,
        logprobs=3,
        logprob_token_ids=[1, 2, 3],
        rank=True,
    )
    others = [SamplingParams(seed=10, top_p=0.9), SamplingParams(seed=11, frequency_penalty=0.3)]
    new = SamplingParams(seed=2, logprobs=0, repetition_penalty=1.2)

    checked = CheckedTable(backend_device, vocab, 3)
    for slot, params in zip((0, 1, 2), (others[0], old, others[1]), strict=True):
        checked.admit(params, [1, 2, 3, 4], [5, 6], slot=slot)
    for step, row in enumerate(logits):
        if step == 3:
            checked.release(1)
            assert checked.admit(new, [9], slot=1) == 1
        host = checked.step(row, [0, 1, 2])
        checked.check_state()
    assert host.generation.tolist() == [1, 2, 1]

    if not backend_device.takes_words:
        return  # its draws depend on the row
    fresh = CheckedTable(backend_device, vocab, 3)
    fresh.admit(new, [9], slot=1)
    for row in logits[3:]:
        fresh.step(row[1:2], [1])
    assert fresh.requests[1].output == checked.requests[1].output


def test_late_row_of_a_released_slot_cannot_be_told(backend_device: BackendDevice) -> None:
    """`generation` tells the tenants of a slot apart, also in a step that was under way."""
    checked = CheckedTable(backend_device, 20, 1)
    logits = torch.zeros(1, 20, device=backend_device.device)
    for generation in (1, 2, 3):
        checked.admit(SamplingParams(seed=generation), slot=0)
        assert checked.step(logits, [0]).generation.tolist() == [generation]
        checked.release(0)


@EAGER_AND_GRAPHED
def test_penalties_read_the_last_steps_counts(backend_device: BackendDevice, graphed: bool) -> None:
    """The device counts (vllm #27878): eight greedy steps without the host looking once.

    Frequency 1 on logits 0.6 apart: each token drawn falls behind the next at once.
    """
    table = RequestTable(1, 8, device=backend_device.device)
    params = replace(GREEDY, frequency_penalty=1.0)
    backend_device.require(params)
    table.admit(params)
    sampler: Any = (
        GraphedSampler(table, (1,), backend=backend_device.backend)
        if graphed
        else Sampler(table, backend_device.backend)
    )
    logits = torch.arange(8, dtype=torch.float32, device=backend_device.device)[None] * 0.6
    slots = torch.zeros(1, dtype=torch.int32, device=backend_device.device)
    drawn = torch.cat([sampler(logits, slots).token_ids.clone() for _ in range(8)])
    expected, counts = [], np.zeros(8, np.float32)
    for _ in range(8):
        token = int(np.argmax(np.arange(8, dtype=np.float32) * np.float32(0.6) - counts))
        expected.append(token)
        counts[token] += 1
    assert len(set(expected)) > 2 and max(expected.count(t) for t in expected) > 1
    assert drawn.tolist() == expected


GOLDEN_PENALTIES = {
    # Logits of ids 0 .. 3 are 2, -2, 1, 0.5. Prompt 0 1; output 2 2 1.
    "repetition": ({"repetition_penalty": 2.0}, [1.0, -4.0, 0.5, 0.5]),
    "repetition-below-1": ({"repetition_penalty": 0.5}, [4.0, -1.0, 2.0, 0.5]),
    "frequency": ({"frequency_penalty": 0.5}, [2.0, -2.5, 0.0, 0.5]),
    "presence": ({"presence_penalty": 0.5}, [2.0, -2.5, 0.5, 0.5]),
    "negative": ({"frequency_penalty": -1.0, "presence_penalty": -0.25}, [2.0, -0.75, 3.25, 0.5]),
    "all": (
        {"repetition_penalty": 2.0, "frequency_penalty": 0.5, "presence_penalty": 0.25},
        [1.0, -4.75, -0.75, 0.5],
    ),
    "bias-comes-first": ({"logit_bias": {2: -2.0}, "repetition_penalty": 2.0}, [1, -4, -2, 0.5]),
}


@pytest.mark.parametrize("name", GOLDEN_PENALTIES)
def test_penalty_applied_twice_or_to_the_wrong_tokens(
    backend_device: BackendDevice, name: str
) -> None:
    """Golden values (sglang #1360, #28179, #22049), read from the processed distribution."""
    values, y = GOLDEN_PENALTIES[name]
    logprobs = np.array(y) - np.log(np.exp(y).sum())
    checked = CheckedTable(backend_device, 4, 1)
    checked.admit(
        SamplingParams(
            seed=0, logprobs=4, logprobs_mode="processed", logprob_token_ids=[0, 1, 2, 3], **values
        ),
        [0, 1],
        [2, 2, 1],
    )
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.5]], device=backend_device.device)
    host = checked.step(logits, [0])
    assert_logprobs(host.given_logprobs[0, :4], logprobs)


@pytest.mark.parametrize("count", [1, 2, 31, 33, 1000, 31_999], ids=lambda c: f"{c}-ids")
def test_allowed_ids_are_dropped(backend_device: BackendDevice, count: int) -> None:
    """Long lists beside short ones (vllm #46245): exactly the allowed ids, and never token 0."""
    vocab = 32_000
    rng = np.random.default_rng(count)
    allowed = np.sort(rng.permutation(np.arange(1, vocab))[:count])
    row = np.zeros(vocab, np.float32)
    params = SamplingParams(seed=0, allowed_token_ids=[int(i) for i in allowed], logprobs=0)
    params = replace(params, logprobs_mode="processed")
    other = SamplingParams(seed=1, allowed_token_ids=[7])
    host = one_step(backend_device, [row] * 4, [params, other, params, other], words=[0, 0, -1, -1])
    order = backend_device.order(vocab)
    survivors = order[np.isin(order, allowed)]
    if backend_device.takes_words:
        assert host.token_ids.tolist() == [survivors[0], 7, survivors[-1], 7]
    assert set(host.token_ids[::2].tolist()) <= set(survivors.tolist())
    assert_logprobs(host.logprobs[[0, 2]], [-math.log(count)] * 2)


def test_logprob_lists_reach_the_wrong_request(backend_device: BackendDevice) -> None:
    """Who asks gets exactly what it asked for, its neighbours nothing (Megatron)."""
    rng = np.random.default_rng(0)
    rows = [rng.normal(0, 1, 30).astype(np.float32) for _ in range(6)]
    params = [
        SamplingParams(seed=0, logprobs=5),
        SamplingParams(seed=0),
        SamplingParams(seed=0, logprobs=0),
        SamplingParams(seed=0, logprob_token_ids=[4, 2]),
        SamplingParams(seed=0, rank=True),
        SamplingParams(seed=0, logprobs=20, logprob_token_ids=[1], logprobs_mode="processed"),
    ]
    host = one_step(backend_device, rows, params)
    assert host.logprobs.isnan().tolist() == [False, True, False, True, True, False]
    assert (host.top_token_ids >= 0).sum(1).tolist() == [5, 0, 0, 0, 0, 20]
    assert (~host.top_logprobs.isnan()).sum(1).tolist() == [5, 0, 0, 0, 0, 20]
    assert (~host.given_logprobs.isnan()).sum(1).tolist() == [0, 0, 0, 2, 0, 1]
    assert (host.ranks > 0).tolist() == [False] * 4 + [True, False]


@pytest.mark.parametrize("what", ["stop", "eos", "length", "stop-beats-length"])
def test_request_goes_on_after_its_end(backend_device: BackendDevice, what: str) -> None:
    """The stop token is emitted, and a finished slot is sticky until it is released."""
    values: dict[str, Any] = {
        "stop": {"stop_token_ids": [3]},
        "eos": {},
        "length": {"max_tokens": 2, "ignore_eos": True},
        "stop-beats-length": {"max_tokens": 2, "stop_token_ids": [3], "ignore_eos": True},
    }[what]
    checked = CheckedTable(backend_device, 10, 2, eos_token_ids=[3])
    checked.admit(replace(GREEDY, **values), [1], slot=0)
    checked.admit(SamplingParams(seed=4, ignore_eos=True), [1], slot=1)
    best = [1, 3, 4, 5]
    hosts = []
    for token in best:
        logits = torch.zeros(2, 10, device=backend_device.device)
        logits[0, token] = 9.0
        hosts.append(checked.step(logits, [0, 1]))
        checked.check_state()
    assert [int(h.token_ids[0]) for h in hosts] == [1, 3, -1, -1]
    reason = FinishReason.LENGTH if what == "length" else FinishReason.STOP
    assert [int(h.finish_reason[0]) for h in hosts] == [0, reason, reason, reason]
    assert len(checked.requests[1].output) == 4
    # Released and admitted again, the slot lives.
    checked.release(0)
    checked.admit(GREEDY, [1], slot=0)
    assert checked.step(logits, [0, 1]).token_ids[0] == 5


def test_min_tokens_bans_stop_ids_too_long_or_too_short(backend_device: BackendDevice) -> None:
    checked = CheckedTable(backend_device, 10, 2, eos_token_ids=[3])
    checked.admit(replace(GREEDY, min_tokens=2, stop_token_ids=[4]), [1], slot=0)
    checked.admit(replace(GREEDY, min_tokens=2, stop_token_ids=[4], ignore_eos=True), [1], slot=1)
    logits = torch.zeros(2, 10, device=backend_device.device)
    logits[:, 3], logits[:, 4], logits[:, 8] = 9.0, 8.0, 7.0
    tokens = [checked.step(logits, [0, 1]).token_ids.tolist() for _ in range(3)]
    assert tokens == [[8, 3], [8, 3], [3, 3]]


def test_bad_words_forget_the_prefix(backend_device: BackendDevice) -> None:
    """A sequence is banned where the output ends in its prefix, across admission and steps."""
    words = [[1, 2, 3], [7], [0, 0, 0, 0, 0, 0, 0, 4]]
    checked = CheckedTable(backend_device, 10, 3)
    params = replace(GREEDY, bad_words_ids=words)
    checked.admit(params, [1, 2], slot=0)  # the prompt does not count
    checked.admit(params, [5], [1, 2], slot=1)
    checked.admit(params, [5], [0] * 7, slot=2)
    logits = torch.zeros(3, 10, device=backend_device.device)
    for i, token in enumerate((7, 3, 4, 1, 2)):
        logits[:, token] = 9.0 - i
    tokens = [checked.step(logits, [0, 1, 2]).token_ids.tolist() for _ in range(2)]
    assert tokens[0] == [3, 4, 3]
    logits[:, 1], logits[:, 2] = 20.0, 0.0
    checked.step(logits, [0, 1, 2])
    logits[:, 1], logits[:, 2] = 0.0, 20.0
    checked.step(logits, [0, 1, 2])
    # All outputs end in 1 2 now.
    assert (
        checked.step(torch.where(logits > 10, -9.0, logits), [0, 1, 2]).token_ids.tolist()
        == [4] * 3
    )


# Logprobs.


def test_processed_logprob_of_a_greedy_token_is_nan_or_log_half(
    backend_device: BackendDevice,
) -> None:
    """0, also where the argmax was tied (Megatron)."""
    rows = [log(0.5, 0.5), log(0.2, 0.8), np.array([INF, INF], np.float32)]
    host = one_step(backend_device, rows, [replace(GREEDY, logprobs_mode="processed")] * 3)
    assert host.logprobs.tolist() == [0.0] * 3


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_logprob_of_another_distribution(backend_device: BackendDevice, mode: Any) -> None:
    """Each mode against its own formula (sglang #2664, #8375; trl #4159), under everything."""
    row = np.array([1.5, -0.5, 0.25, 2.0, -3.0], np.float32)
    params = SamplingParams(
        temperature=0.5,
        top_k=2,
        logit_bias={3: -1.25},
        seed=0,
        logprobs=5,
        logprobs_mode=mode,
        logprob_token_ids=[0, 1, 2, 3, 4],
        rank=True,
    )
    host = one_step(backend_device, [row] * 2, [params] * 2, words=[*EXTREME_WORDS])
    if mode == "raw":
        logprobs = row - np.log(np.exp(row.astype(np.float64)).sum())
        order, rank = [3, 0, 2, 1, 4], {0: 2, 3: 1}
    else:
        kept = np.array([1.5, 0.75]) / 0.5
        kept -= np.log(np.exp(kept).sum())
        logprobs = np.array([kept[0], -INF, -INF, kept[1], -INF])
        order, rank = [0, 3, -1, -1, -1], {0: 1, 3: 2}
    assert_logprobs(host.given_logprobs[0, :5], logprobs)
    assert host.top_token_ids[0, :5].tolist() == order
    for i, token in enumerate(host.token_ids.tolist()):
        assert_logprobs(host.logprobs[i], logprobs[token])
        assert host.ranks[i] == rank[token]
    assert sorted(host.token_ids.tolist()) == [0, 3]


def test_rank_is_ambiguous_under_ties(backend_device: BackendDevice) -> None:
    """1 + the number of strictly larger logits: equals share a rank."""
    row = np.array([1, 3, 3, 2, 2, 2, 0], np.float32)
    params = [SamplingParams(seed=0, rank=True, allowed_token_ids=[token]) for token in range(7)]
    host = one_step(backend_device, [row] * 7, params)
    assert host.token_ids.tolist() == list(range(7))
    assert host.ranks.tolist() == [6, 1, 1, 3, 3, 3, 7]
    params = [replace(p, logprobs_mode="processed") for p in params]
    assert one_step(backend_device, [row] * 7, params).ranks.tolist() == [1] * 7


@pytest.mark.parametrize("dtype", DTYPES)
def test_top_n_breaks_ties_by_chance(backend_device: BackendDevice, dtype: str) -> None:
    """By id among equals, and -1 with -inf where fewer than n are finite."""
    vocab = 300
    ties = np.zeros(vocab, np.float32)
    ties[[250, 17, 99]] = 1.0
    few = np.full(vocab, -INF, np.float32)
    few[[200, 4]] = [1.0, 2.0]
    nans = np.full(vocab, NAN, np.float32)
    nans[7] = 0.0
    infs = np.zeros(vocab, np.float32)
    infs[[8, 3]] = INF
    params = SamplingParams(seed=0, logprobs=6)
    host = one_step(backend_device, [ties, few, nans, infs], [params] * 4, dtype=DTYPES[dtype])
    assert host.top_token_ids[:, :6].tolist() == [
        [17, 99, 250, 0, 1, 2],
        [4, 200, -1, -1, -1, -1],
        [7, -1, -1, -1, -1, -1],
        [3, 8, -1, -1, -1, -1],
    ]
    assert (host.top_logprobs[1:, 2:6] == -INF).all()


def test_top_n_is_longer_than_the_vocabulary(backend_device: BackendDevice) -> None:
    host = one_step(backend_device, [np.zeros(3, np.float32)], [SamplingParams(seed=0, logprobs=5)])
    assert host.top_token_ids[0, :6].tolist() == [0, 1, 2, -1, -1, -1]
    assert (host.top_logprobs[0, 3:5] == -INF).all()
    assert host.top_logprobs[0, 5:].isnan().all()


def test_top_n_drops_a_logprob_below_fp32(backend_device: BackendDevice) -> None:
    """A finite logit is listed, though its logprob, -2 * FLT_MAX, is -inf in fp32."""
    row = np.array([0.0, FLT_MAX, -FLT_MAX, -INF], np.float32)
    params = SamplingParams(seed=0, logprobs=4)
    modes = [params, replace(params, logprobs_mode="processed")]
    host = one_step(backend_device, [row] * 2, modes)
    assert host.top_token_ids[:, :4].tolist() == [[1, 0, 2, -1]] * 2


def test_equal_tokens_are_merged(backend_device: BackendDevice) -> None:
    """Ids are ids (Megatron keyed by text): tokens with equal logits stand side by side."""
    row = np.repeat(np.array([2.0, 1.0], np.float32), 4)
    params = SamplingParams(seed=0, logprobs=8, logprob_token_ids=[5, 5, 0])
    host = one_step(backend_device, [row], [params])
    assert host.top_token_ids[0, :8].tolist() == list(range(8))
    assert len(set(host.top_logprobs[0, :8].tolist())) == 2
    assert host.given_logprobs[0, 0] == host.given_logprobs[0, 1]


def test_output_is_not_one_record_at_one_address(backend_device: BackendDevice) -> None:
    """One copy takes a step to the host: the fields are views of one record that stays put."""
    table = RequestTable(2, 12, device=backend_device.device)
    for _ in range(2):
        table.admit(GREEDY)
    sampler = Sampler(table, backend_device.backend)
    logits = torch.zeros(2, 12, device=backend_device.device)
    outputs = [sampler(logits, torch.tensor([0, 1], dtype=torch.int32)) for _ in range(2)]
    assert outputs[0].record.data_ptr() == outputs[1].record.data_ptr()
    assert outputs[0].logprobs.data_ptr() - outputs[0].record.data_ptr() == 4 * Output.LOGPROB
