"""The contract under rows and parameters that hypothesis looks for, on every backend."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import DTYPES, FLT_MAX, INF, NAN, BackendDevice, CheckedTable, Tally, place

from graphed_sampling import SamplingParams

pytest.importorskip("hypothesis")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

# Capacities of the tables here, small so that hypothesis reaches them.
LIMITS: dict[str, Any] = {
    "max_logprobs": 4,
    "max_logit_bias": 4,
    "max_stop_ids": 3,
    "max_bad_words": 3,
    "max_bad_word_length": 3,
    "max_logprob_ids": 3,
}

# bf16 rounds these to a grid, which is where ties come from; the rest is what breaks samplers.
LOGITS = st.one_of(
    st.integers(-8, 8).map(lambda i: i / 4),
    st.floats(-30, 30, width=32),
    st.floats(width=32),
    st.sampled_from([-INF, INF, NAN, 0.0, -0.0, FLT_MAX, -FLT_MAX, 2.0**-149, -(2.0**-149)]),
)
WORDS = st.one_of(st.sampled_from([0, -1, -(2**63), 2**63 - 1]), st.integers(-(2**63), 2**63 - 1))


def fp32_between(low: float, high: float) -> st.SearchStrategy[float]:
    """fp32 values in [low, high], which fp32 must store exactly."""
    return st.floats(low, high, width=32)


# The largest fp32 below 1, and the smallest positive normal one.
BELOW_ONE, TINY = 1 - 2.0**-24, 2.0**-126


def fields(vocab: int) -> dict[str, st.SearchStrategy[Any]]:
    """Fields of SamplingParams and their values, but for those that depend on the output."""
    ids = st.integers(0, vocab - 1)
    return {
        "temperature": st.one_of(
            st.sampled_from([0.0, 9e-6, 1e-5, 0.5, 1.0, 1e4, FLT_MAX]), fp32_between(0.125, 4)
        ),
        "top_k": st.integers(-1, vocab + 1),
        "top_p": fp32_between(TINY, 1.0),
        "min_p": fp32_between(0.0, 1.0),
        "top_n_sigma": fp32_between(0.0, 4.0),
        "typical_p": fp32_between(TINY, 1.0),
        "epsilon_cutoff": fp32_between(0.0, BELOW_ONE),
        "eta_cutoff": fp32_between(0.0, BELOW_ONE),
        "repetition_penalty": fp32_between(2.0**-10, 1024.0),
        "frequency_penalty": fp32_between(-2.0, 2.0),
        "presence_penalty": fp32_between(-2.0, 2.0),
        "logit_bias": st.dictionaries(
            ids, st.one_of(st.just(-INF), fp32_between(-FLT_MAX, FLT_MAX)), max_size=4
        ),
        "allowed_token_ids": st.lists(ids, min_size=1, max_size=5),
        "bad_words_ids": st.lists(st.lists(ids, min_size=1, max_size=3), max_size=3),
        "stop_token_ids": st.lists(ids, max_size=3),
        "ignore_eos": st.booleans(),
        "logprobs": st.integers(0, 4),
        "logprobs_mode": st.sampled_from(["raw", "processed"]),
        "logprob_token_ids": st.lists(ids, max_size=3),
        "rank": st.booleans(),
    }


@dataclass(frozen=True)
class FuzzRequest:
    params: SamplingParams
    prompt: list[int]
    output: list[int]


@st.composite
def requests(draw: st.DrawFn, vocab: int) -> FuzzRequest:
    ids = st.lists(st.integers(0, vocab - 1), max_size=5)
    prompt, output = draw(ids), draw(ids)
    # Few fields at a time: failures shrink well, and filters do not hide each other.
    names = draw(st.sets(st.sampled_from(sorted(fields(vocab))), max_size=6))
    values = {name: draw(fields(vocab)[name]) for name in sorted(names)}
    values["seed"] = draw(st.integers(-(2**63), 2**64 - 1))
    min_tokens = values["min_tokens"] = draw(st.integers(0, 8))
    if draw(st.booleans()):
        lowest = max(min_tokens, len(output) + 1)
        values["max_tokens"] = draw(st.integers(lowest, lowest + 2))
    return FuzzRequest(SamplingParams(**values), prompt, output)


@dataclass(frozen=True)
class FuzzRun:
    vocab: int
    dtype: str
    requests: list[FuzzRequest]
    steps: list[tuple[np.ndarray, list[int] | None, np.ndarray | None]]  # logits, words, bitmask


@st.composite
def runs(draw: st.DrawFn) -> FuzzRun:
    vocab = draw(st.one_of(st.integers(1, 6), st.sampled_from([31, 32, 33, 40])))
    count = draw(st.integers(1, 4))
    asked = [draw(requests(vocab)) for _ in range(count)]
    steps = []
    for _ in range(draw(st.integers(1, 3))):
        # Long rows repeat a short pattern, which keeps hypothesis quick and makes more ties.
        patterns = [draw(st.lists(LOGITS, min_size=1, max_size=6)) for _ in range(count)]
        rows = [list(itertools.islice(itertools.cycle(p), vocab)) for p in patterns]
        words = draw(st.none() | st.lists(WORDS, min_size=count, max_size=count))
        word = st.integers(-(2**31), 2**31 - 1)
        mask_words = draw(st.none() | st.tuples(word, word))
        mask = None
        if mask_words is not None:
            mask = np.tile(np.array(mask_words, np.int32)[: math.ceil(vocab / 32)], (count, 1))
        steps.append((np.array(rows, np.float32), words, mask))
    return FuzzRun(vocab, draw(st.sampled_from(sorted(DTYPES))), asked, steps)


def settings_of(pair: BackendDevice) -> settings:
    return settings(
        max_examples=pair.rows(150, 10, 6),
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )


def test_any_run_equals_the_reference(backend_device: BackendDevice) -> None:
    total = Tally()

    @settings_of(backend_device)
    @given(run=runs())
    def check(run: FuzzRun) -> None:
        checked = CheckedTable(
            backend_device, run.vocab, len(run.requests), eos_token_ids=[run.vocab - 1], **LIMITS
        )
        for slot, request in enumerate(run.requests):
            params = backend_device.supported(request.params)
            checked.admit(params, request.prompt, request.output, slot)
        for rows, words, mask in run.steps:
            placed = place(
                rows, backend_device.device, DTYPES[run.dtype], "padded-strided-unaligned"
            )
            checked.step(
                placed.logits,
                range(len(run.requests)),
                words=None if words is None else torch.tensor(words),
                bitmask=None if mask is None else torch.from_numpy(mask),
            )
            placed.check_unmodified()
        checked.check_state()
        total.add(checked.tally)

    check()
    # Hypothesis likes extreme words and equal logits, where rounding decides often.
    total.check(ambiguous=0.2)


def test_no_row_is_empty_or_out_of_range(backend_device: BackendDevice) -> None:
    """Without the reference: both extreme words draw an id of the vocabulary."""

    @settings_of(backend_device)
    @given(
        pattern=st.lists(LOGITS, min_size=1, max_size=8),
        repeats=st.integers(1, 6),
        request=requests(8),
        other=st.sampled_from([-INF, NAN, 0.0]),
    )
    def check(pattern: list[float], repeats: int, request: FuzzRequest, other: float) -> None:
        row = np.array([*pattern * repeats, *[other] * 8], np.float32)
        checked = CheckedTable(backend_device, len(row), 2, **LIMITS)
        params = replace(backend_device.supported(request.params), max_tokens=None)
        for slot in range(2):
            checked.table.admit(params, request.prompt, output_token_ids=request.output, slot=slot)
        logits = torch.from_numpy(np.stack([row, row])).to(backend_device.device)
        slots = torch.tensor([0, 1], dtype=torch.int32)
        words = torch.tensor([0, -1]) if backend_device.takes_words else None
        output = checked.sampler(logits, slots, words=words)
        assert ((output.token_ids >= 0) & (output.token_ids < len(row))).all()
        if 0 < params.top_k < len(row) and not params.is_greedy:
            assert ((output.num_kept >= 1) & (output.num_kept <= params.top_k)).all()

    check()
