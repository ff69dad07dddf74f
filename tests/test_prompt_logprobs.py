"""Logprobs of given tokens at many positions, on every backend, against reference and step."""

from __future__ import annotations

import math
import runpy
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    DTYPES,
    KINDS,
    PLACEMENTS,
    BackendDevice,
    assert_logprobs,
    far_rows,
    near_a_cut,
    place,
    random_row,
)
from test_cpu_backend import run_python
from torch import Tensor

from graphed_sampling import (
    PromptLogprobs,
    RequestTable,
    RowFlags,
    Sampler,
    SamplingParams,
    UnsupportedFeatureError,
    backends,
    new_prompt_output,
    next_token_ids,
    positions,
    prompt_logprobs,
)
from graphed_sampling.backends.position_records import Forward, Positions, Selection, Upstream
from graphed_sampling.reference import sample_row, score_row

OPS = torch.ops.graphed_sampling
INF, NAN = math.inf, math.nan
V = 203
needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def scorers() -> list[Any]:
    """The pairs of `backend_device` whose backend scores positions."""
    from helpers import backend_devices

    return [
        p for p in backend_devices() if hasattr(backends.module(p.values[0].backend), "score_rows")
    ]


@pytest.fixture(params=scorers())
def pair(request: pytest.FixtureRequest) -> BackendDevice:
    chosen: BackendDevice = request.param
    return chosen


def random_filters(rng: np.random.Generator, vocab: int) -> SamplingParams:
    def maybe(value: Any, off: Any) -> Any:
        return value if rng.random() < 0.4 else off

    return SamplingParams(
        temperature=float(rng.choice([0.0, 0.1, 0.7, 1.0, 1.5, 20.0])),
        top_k=maybe(int(rng.integers(1, vocab + 2)), 0),
        top_p=maybe(float(rng.uniform(0.02, 0.999)), 1.0),
        min_p=maybe(float(rng.choice([rng.uniform(0.001, 0.5), 1.0])), 0.0),
        logprobs_mode="processed",
    )


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, NaN being itself."""
    integers = {4: torch.int32, 8: torch.int64}
    return a.shape == b.shape and torch.equal(
        a.contiguous().view(integers[a.element_size()]),
        b.contiguous().view(integers[b.element_size()]),
    )


def assert_same(a: PromptLogprobs, b: PromptLogprobs) -> None:
    for name, x, y in zip(PromptLogprobs._fields, a, b, strict=True):
        assert same(x, y), f"{name}: {x}, {y}"


def assert_row(
    got: PromptLogprobs,
    i: int,
    logits: np.ndarray,
    token: int,
    params: SamplingParams,
    given: list[int],
    top_n: int,
) -> bool:
    """Position i against the reference. Returns whether it could be compared."""
    asked = replace(params, logprobs=top_n, logprob_token_ids=given)
    processed = params.logprobs_mode == "processed"
    if processed and near_a_cut(sample_row(logits, asked, word=0)):
        return False
    expected = score_row(logits, token, asked)
    assert_logprobs(got.logprobs[i], expected.logprob, f"logprob of row {i}")
    assert int(got.ranks[i]) == expected.rank
    assert tuple(got.top_token_ids[i].tolist()) == expected.top_token_ids
    assert_logprobs(got.top_logprobs[i], expected.top_logprobs)
    assert_logprobs(got.given_logprobs[i], expected.given_logprobs)
    assert int(got.num_kept[i]) == expected.num_kept
    assert int(got.flags[i]) == expected.flags
    entropy = float(got.entropies[i])
    if math.isnan(expected.entropy):
        assert math.isnan(entropy)
    else:
        assert entropy == pytest.approx(expected.entropy, abs=2e-6, rel=2e-6)
    return True


# Against the reference.


@pytest.mark.parametrize("kind", KINDS)
def test_raw_rows_equal_the_reference(pair: BackendDevice, kind: str) -> None:
    rng = np.random.default_rng(KINDS.index(kind))
    count = pair.rows(24, 3)
    rows = np.stack([random_row(rng, V, kind) for _ in range(count)])
    tokens = rng.integers(0, V, count)
    given = rng.integers(0, V, (count, 2))
    got = prompt_logprobs(
        torch.from_numpy(rows).to(pair.device),
        torch.from_numpy(tokens).to(pair.device),
        given_ids=torch.from_numpy(given).to(pair.device),
        top_n=5,
        rank=True,
        entropy=True,
        backend=pair.backend,
    )
    host = PromptLogprobs(*(t.cpu() for t in got))
    for i in range(count):
        assert assert_row(host, i, rows[i], int(tokens[i]), SamplingParams(), given[i].tolist(), 5)


def test_processed_and_raw_rows_of_one_batch_equal_the_reference(pair: BackendDevice) -> None:
    rng = np.random.default_rng(5)
    count = pair.rows(160, 16)
    rows = np.stack([random_row(rng, V, str(rng.choice(KINDS))) for _ in range(count)])
    tokens = np.where(
        rng.random(count) < 0.5,
        rng.integers(0, V, count),
        np.nanargmax(np.where(np.isnan(rows), -INF, rows), 1),
    )
    given = rng.integers(0, V, (count, 1))
    params = [
        random_filters(rng, V) if rng.random() < 0.7 else SamplingParams() for _ in range(count)
    ]
    got = prompt_logprobs(
        torch.from_numpy(rows).to(pair.device),
        torch.from_numpy(tokens).to(pair.device),
        params=params,
        given_ids=torch.from_numpy(given).to(pair.device),
        top_n=4,
        rank=True,
        entropy=True,
        backend=pair.backend,
    )
    host = PromptLogprobs(*(t.cpu() for t in got))
    compared = [
        assert_row(host, i, rows[i], int(tokens[i]), params[i], given[i].tolist(), 4)
        for i in range(count)
    ]
    assert sum(compared) >= 0.8 * count


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_any_layout_and_dtype(pair: BackendDevice, placement: str, dtype: str) -> None:
    pair.require_dtype(dtype)
    rng = np.random.default_rng(7)
    count = pair.rows(9, 2)
    values = np.stack([random_row(rng, V, "smooth") for _ in range(count)])
    placed = place(values, pair.device, DTYPES[dtype], placement)
    tokens = torch.from_numpy(rng.integers(0, V, count)).to(pair.device)
    mode = SamplingParams(temperature=0.7, logprobs_mode="processed")
    params = [SamplingParams() if i % 2 else mode for i in range(count)]
    got = prompt_logprobs(
        placed.logits, tokens, params=params, top_n=3, rank=True, entropy=True, vocab_size=V,
        backend=pair.backend,
    )  # fmt: skip
    placed.check_unmodified()
    host = PromptLogprobs(*(t.cpu() for t in got))
    stored = torch.from_numpy(values).to(DTYPES[dtype]).float().numpy()
    for i in range(count):
        assert assert_row(host, i, stored[i], int(tokens[i]), params[i], [], 3)


def test_several_tiles_and_no_whole_group(pair: BackendDevice) -> None:
    rng = np.random.default_rng(8)
    vocab, count = 5003, pair.rows(6, 2)
    rows = np.stack([random_row(rng, vocab, "zipf") for _ in range(count)])
    rows[1, [0, 4100, 5002]] = [NAN, INF, INF]
    tokens = rng.integers(0, vocab, count)
    got = prompt_logprobs(
        torch.from_numpy(rows).to(pair.device), torch.from_numpy(tokens).to(pair.device),
        top_n=20, rank=True, entropy=True, backend=pair.backend,
    )  # fmt: skip
    host = PromptLogprobs(*(t.cpu() for t in got))
    for i in range(count):
        assert assert_row(host, i, rows[i], int(tokens[i]), SamplingParams(), [], 20)


def test_more_best_tokens_than_the_vocabulary_has(pair: BackendDevice) -> None:
    row = np.array([1.0, 3.0, 2.0], np.float32)
    got = prompt_logprobs(
        torch.from_numpy(row)[None].to(pair.device), torch.tensor([1], device=pair.device),
        top_n=5, backend=pair.backend,
    )  # fmt: skip
    assert got.top_token_ids.tolist() == [[1, 2, 0, -1, -1]]
    assert_logprobs(
        got.top_logprobs.cpu()[0], score_row(row, 1, SamplingParams(logprobs=5)).top_logprobs
    )


def test_what_was_not_asked_says_so(pair: BackendDevice) -> None:
    logits = torch.randn(3, V).to(pair.device)
    tokens = torch.tensor([3, -1, 5], device=pair.device)
    given = torch.tensor([[1], [2], [-1]], device=pair.device)
    got = prompt_logprobs(logits, tokens, given_ids=given, backend=pair.backend)
    assert got.logprobs.isnan().tolist() == [False, True, False]
    assert got.given_logprobs.isnan().tolist() == [[False], [False], [True]]
    assert got.top_token_ids.shape == got.top_logprobs.shape == (3, 0)
    assert got.entropies.isnan().all() and not got.ranks.any()
    asked = prompt_logprobs(logits, tokens, top_n=1, rank=True, entropy=True, backend=pair.backend)
    assert asked.ranks[1] == 0 and asked.ranks[0] > 0
    assert not asked.entropies.isnan().any()
    assert asked.top_token_ids[1, 0] == int(logits[1].argmax())


def test_no_positions(pair: BackendDevice) -> None:
    empty = torch.zeros(0, dtype=torch.int64, device=pair.device)
    for logits, rows in ((torch.zeros(0, V), None), (torch.zeros(4, V), empty)):
        got = prompt_logprobs(
            logits.to(pair.device), empty, rows=rows, top_n=2, backend=pair.backend
        )
        assert got.logprobs.shape == (0,) and got.top_token_ids.shape == (0, 2)


# The same bits as the step's.


RAW_REQUESTS: list[dict[str, Any]] = [
    {}, {"temperature": 0.8}, {"temperature": 0.0}, {"top_k": 50, "top_p": 0.9},
    {"top_p": 0.97}, {"top_k": 1000}, {"top_n_sigma": 1.5}, {"typical_p": 0.9},
    {"logit_bias": {3: 2.0}, "temperature": 0.8}, {"repetition_penalty": 1.3}, {"min_tokens": 2},
    {"allowed_token_ids": list(range(100))}, {"bad_words_ids": [[4]], "eta_cutoff": 0.01},
]  # fmt: skip
"""What must not show in a raw logprob: each makes a backend go another way through the row."""


def test_the_bits_are_those_of_the_step(pair: BackendDevice) -> None:
    """Raw and processed, of the drawn token, of given ones and of the best."""
    rng = np.random.default_rng(11)
    vocab, count = pair.rows(4500, 700), pair.rows(104, 26)
    kinds = ["smooth", "zipf", "ties", "flat", "holes", "nan", "inf"]
    rows = np.stack([random_row(rng, vocab, kinds[i // 2 % len(kinds)]) for i in range(count)])
    logits = torch.from_numpy(rows).to(pair.device)
    table = RequestTable(
        count, vocab, device=pair.device, max_logprobs=4, max_logprob_ids=3, seed=1,
        eos_token_ids=(5,),
    )  # fmt: skip
    params = []
    for i in range(count):
        raw = SamplingParams(**RAW_REQUESTS[i // 2 % len(RAW_REQUESTS)])
        chosen = random_filters(rng, vocab) if i % 2 else raw
        given = [int(t) for t in rng.integers(0, vocab, 3)]
        params.append(replace(chosen, seed=i, logprobs=4, logprob_token_ids=given))
        table.admit(params[-1], [7, 8])
    slots = torch.arange(count, dtype=torch.int32)
    step = Sampler(table, pair.backend)(logits, slots)
    got = prompt_logprobs(
        logits,
        step.token_ids.clone(),
        params=params,
        given_ids=torch.tensor([p.logprob_token_ids for p in params], device=pair.device),
        top_n=4,
        backend=pair.backend,
    )
    assert same(got.logprobs, step.logprobs)
    assert same(got.given_logprobs, step.given_logprobs)
    assert torch.equal(got.top_token_ids, step.top_token_ids)
    assert same(got.top_logprobs, step.top_logprobs)
    kept = torch.tensor([p.logprobs_mode == "processed" for p in params], device=pair.device)
    assert torch.equal(got.num_kept[kept], step.num_kept[kept])


def test_a_vocabulary_too_large_for_shared_memory(pair: BackendDevice) -> None:
    """And of more than 8 groups a super: the sums are made elsewhere, but the same."""
    vocab, rng = 300_007, np.random.default_rng(14)
    row = np.append(random_row(rng, vocab - 1, "zipf"), np.float32(1.0))
    logits = torch.from_numpy(row)[None].to(pair.device)
    table = RequestTable(1, vocab, device=pair.device, max_logprobs=3, penalties=False)
    table.admit(SamplingParams(temperature=0.0, logprobs=3, rank=True))
    step = Sampler(table, pair.backend)(logits, torch.zeros(1, dtype=torch.int32))
    got = prompt_logprobs(
        logits, step.token_ids.clone(), top_n=3, rank=True, entropy=True, backend=pair.backend
    )
    assert same(got.logprobs, step.logprobs) and torch.equal(got.ranks, step.ranks)
    assert torch.equal(got.top_token_ids, step.top_token_ids)
    assert same(got.top_logprobs, step.top_logprobs)
    expected = score_row(row, 0, SamplingParams())
    assert float(got.entropies[0]) == pytest.approx(expected.entropy, abs=2e-6, rel=2e-6)


def test_a_row_has_its_bits_in_any_company(pair: BackendDevice) -> None:
    rng = np.random.default_rng(12)
    count = pair.rows(40, 5)
    rows = torch.from_numpy(np.stack([random_row(rng, V, "zipf") for _ in range(count)]))
    logits, tokens = (
        rows.to(pair.device),
        torch.from_numpy(rng.integers(0, V, count)).to(pair.device),
    )
    options: dict[str, Any] = {
        "top_n": 3, "rank": True, "entropy": True, "backend": pair.backend
    }  # fmt: skip
    together = prompt_logprobs(logits, tokens, **options)
    for i in (0, count // 2, count - 1):
        alone = prompt_logprobs(logits[i : i + 1], tokens[i : i + 1], **options)
        assert_same(alone, PromptLogprobs(*(t[i : i + 1] for t in together)))


# Which rows.


def test_a_mask_touches_the_rows_asked_for_alone(pair: BackendDevice) -> None:
    check_selection(pair, lambda rows, n: (torch.zeros(n).index_fill(0, rows, 1).bool(), None))


def test_a_list_of_rows_has_a_length_on_the_device(pair: BackendDevice) -> None:
    def listed(rows: Tensor, _: int) -> tuple[Tensor, Tensor]:
        slack = torch.tensor([0, 3, -1])
        return torch.cat([rows, slack]), torch.tensor([rows.shape[0]], dtype=torch.int32)

    check_selection(pair, listed)


def test_a_list_of_rows_may_repeat_and_skip(pair: BackendDevice) -> None:
    logits = torch.randn(4, V).to(pair.device)
    rows = torch.tensor([2, -1, 2, 0], device=pair.device)
    tokens = torch.tensor([5, 6, 7, 8], device=pair.device)
    for params in (None, SamplingParams(top_k=9, logprobs_mode="processed")):
        got = prompt_logprobs(
            logits, tokens, rows=rows, params=params, top_n=2, rank=True, backend=pair.backend
        )
        for i, row in enumerate(rows.tolist()):
            one = PromptLogprobs(*(t[i : i + 1] for t in got))
            if row < 0:
                assert_nothing(one)
                continue
            alone = prompt_logprobs(
                logits[row : row + 1], tokens[i : i + 1], params=params, top_n=2, rank=True,
                backend=pair.backend,
            )  # fmt: skip
            assert_same(one, alone)


def test_slack_may_hold_anything(pair: BackendDevice) -> None:
    """On the CPU too, where ids are checked."""
    device, backend = pair.device, pair.backend
    logits = torch.randn(3, V, device=device)
    tokens = torch.tensor([1, 999, -7], device=device)
    given = torch.tensor([[1], [-9], [999]], device=device)
    mask = torch.tensor([True, False, False], device=device)
    listed = {
        "rows": torch.tensor([0, 77, -5], device=device),
        "num_rows": torch.tensor([1], dtype=torch.int32, device=device),
    }
    expected = prompt_logprobs(logits[:1], tokens[:1], given_ids=given[:1], backend=backend)
    for selection in ({"rows": mask}, listed):
        got = prompt_logprobs(logits, tokens, given_ids=given, backend=backend, **selection)
        assert_same(PromptLogprobs(*(t[:1] for t in got)), expected)
        assert_nothing(PromptLogprobs(*(t[1:] for t in got)))


@pytest.mark.parametrize("filters", ["temperature", "top_k"])
@pytest.mark.parametrize("kind", ["mask", "list"])
def test_some_of_the_rows_asked_for_are_processed(
    pair: BackendDevice, kind: str, filters: str
) -> None:
    logits = torch.randn(8, V).to(pair.device)
    tokens = torch.arange(8).to(pair.device)
    columns: dict[str, Tensor] = {"temperature": torch.full((8,), 0.7)}
    if filters == "top_k":
        columns["top_k"] = torch.full((8,), 9, dtype=torch.int32)
    columns["processed"] = torch.tensor([1, 1, 0, 0, 1, 0, 0, 1], dtype=torch.bool)
    columns = {name: column.to(pair.device) for name, column in columns.items()}
    live = [True, False, True, False, True, True, False, False]
    rows, num_rows = torch.tensor(live), None
    of_position = range(8)
    if kind == "list":
        live = [True] * 5 + [False] * 3
        of_position = [7, 0, 0, 3, 1, 2, 2, 2]
        rows, num_rows = torch.tensor(of_position), torch.tensor([5], dtype=torch.int32)
        num_rows = num_rows.to(pair.device)
    options = {"top_n": 2, "rank": True, "entropy": True, "backend": pair.backend}

    def score(rows: Tensor, num_rows: Tensor | None, some: slice) -> PromptLogprobs:
        return PromptLogprobs(
            *OPS.prompt_logprobs(
                logits, tokens[some], rows.to(pair.device), num_rows, None,
                **{name: column[some] for name, column in columns.items()}, **options,
            )
        )  # fmt: skip

    together = score(rows, num_rows, slice(8))
    for i in range(8):
        one = PromptLogprobs(*(t[i : i + 1] for t in together))
        if live[i]:
            alone = score(torch.tensor([of_position[i]]), None, slice(i, i + 1))
            assert_same(one, alone)
            row = logits[of_position[i] : of_position[i] + 1]
            raw = prompt_logprobs(row, tokens[i : i + 1], **options)
            assert same(one.logprobs, raw.logprobs) != bool(columns["processed"][i])
        else:
            assert_nothing(one)
    kept = together.num_kept.tolist()
    expected = columns["processed"].tolist()
    if filters == "top_k":
        assert kept == [9 if live[i] and expected[i] else 0 for i in range(8)]


def test_what_is_out_of_range_counts_as_none_on_a_device(
    pair: BackendDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There nobody waits to look at it; on the CPU as it is on a device. Gradients too."""
    monkeypatch.setattr("graphed_sampling.wishes.is_on_cpu", lambda _: False)
    far = [V, V + 1, -1, -2, 2**32, 2**32 + 3, -(2**40), 2**63 - 1, -(2**63)]
    rows = torch.tensor([4, *far[1:], 0, 1, 2, 3, 3], device=pair.device)  # of 4 rows
    ids = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8, 9, V, 2**32 + 1, 5, -4, V - 1], device=pair.device)
    given = torch.tensor([[V], [5], [-3]] * 4 + [[2**33], [0]], device=pair.device)
    clean_rows = rows.masked_fill((rows < 0) | (rows >= 4), -1)
    clean_ids, clean_given = (t.masked_fill((t < 0) | (t >= V), -1) for t in (ids, given))
    results, gradients = [], []
    for asked in ((rows, ids, given), (clean_rows, clean_ids, clean_given)):
        logits = torch.randn(4, V, generator=torch.Generator().manual_seed(1)).to(pair.device)
        logits.requires_grad_()
        got = prompt_logprobs(
            logits, asked[1], rows=asked[0], given_ids=asked[2], top_n=2, rank=True, entropy=True,
            backend=pair.backend,
        )  # fmt: skip
        told = [got.logprobs, got.given_logprobs, got.top_logprobs, got.entropies]
        results.append(PromptLogprobs(*(t.detach() for t in got)))
        gradients += torch.autograd.grad(told, logits, [torch.ones_like(t) for t in told])
    assert_same(*results)
    assert same(*gradients) and gradients[0].abs().max() > 0
    assert_nothing(PromptLogprobs(*(t[: len(far)] for t in results[0])))
    told_of = ~results[0].logprobs.isnan()
    assert told_of.tolist() == [False] * (len(far) + 2) + [True, False, True]


def test_rows_in_any_memory(pair: BackendDevice) -> None:
    """A mask or list that is not contiguous."""
    logits, tokens = torch.randn(4, V).to(pair.device), torch.arange(4).to(pair.device)
    mask = torch.tensor([1, 9, 0, 9, 1, 9, 0, 9]).to(pair.device)[::2] == 1
    strided = torch.stack([mask, ~mask], 1)[:, 0]
    listed = torch.tensor([[3, 0], [1, 0], [-1, 0], [1, 0]]).to(pair.device)[:, 0]
    yes = torch.ones(1, dtype=torch.bool, device=pair.device).expand(4)
    for rows in (strided, listed, yes):
        assert not rows.is_contiguous()
        got, expected = (
            prompt_logprobs(logits, tokens, rows=chosen, top_n=1, backend=pair.backend)
            for chosen in (rows, rows.clone(memory_format=torch.contiguous_format))
        )
        assert_same(got, expected)


def assert_nothing(got: PromptLogprobs) -> None:
    assert got.logprobs.isnan().all() and got.given_logprobs.isnan().all()
    assert got.top_logprobs.isnan().all() and (got.top_token_ids == -1).all()
    assert got.entropies.isnan().all()
    assert not got.ranks.any() and not got.num_kept.any()
    assert (got.flags == int(RowFlags.PADDING)).all()


def check_selection(
    pair: BackendDevice, select: Callable[[Tensor, int], tuple[Tensor, Tensor | None]]
) -> None:
    rng = np.random.default_rng(13)
    count = pair.rows(30, 8)
    values = np.stack([random_row(rng, V, "smooth") for _ in range(count)])
    chosen = torch.from_numpy(np.sort(rng.choice(count, count // 2, replace=False)))
    rows, num_rows = select(chosen, count)
    num_rows = None if num_rows is None else num_rows.to(pair.device)
    tokens = torch.from_numpy(rng.integers(0, V, rows.shape[0])).to(pair.device)
    is_mask = rows.dtype == torch.bool
    live = rows if is_mask else torch.arange(rows.shape[0]) < len(chosen)
    of_position = torch.arange(count) if is_mask else rows
    filters = [SamplingParams(temperature=0.8, top_k=20, logprobs_mode="processed"), None]
    for params in filters:
        results = []
        for poison in (NAN, INF):
            spoiled = torch.full((count, V), poison)
            spoiled[chosen] = torch.from_numpy(values)[chosen]
            results.append(
                prompt_logprobs(
                    spoiled.to(pair.device),
                    tokens,
                    params=params,
                    rows=rows.to(pair.device),
                    num_rows=num_rows,
                    top_n=2,
                    rank=True,
                    entropy=True,
                    backend=pair.backend,
                )
            )
        assert_same(*results)
        host = PromptLogprobs(*(t.cpu() for t in results[0]))
        assert_nothing(PromptLogprobs(*(t[~live] for t in host)))
        for i in live.nonzero()[:, 0].tolist():
            row = values[int(of_position[i])]
            assert_row(host, i, row, int(tokens[i]), params or SamplingParams(), [], 2)


# The op that writes to memory that is there.


def test_the_out_op_writes_the_same(pair: BackendDevice) -> None:
    logits = torch.randn(5, V).to(pair.device)
    tokens = torch.randint(V, (5,)).to(pair.device)
    given = torch.randint(V, (5, 2)).to(pair.device)
    expected = prompt_logprobs(
        logits, tokens, given_ids=given, top_n=3, rank=True, entropy=True, backend=pair.backend
    )
    record = new_prompt_output(7, 3, 2, device=pair.device)
    OPS.prompt_logprobs_out(
        logits, tokens, record, given_ids=given, top_n=3, rank=True, entropy=True,
        backend=pair.backend,
    )  # fmt: skip
    assert_same(PromptLogprobs.of(record[:5], 3, 2), expected)
    assert not record[5:].any()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
def test_the_example_scores_the_rows_that_ask(device: str) -> None:
    path = Path(__file__).parent.parent / "examples" / "prompt_logprobs.py"
    if not path.is_file():
        pytest.skip("the examples are not here")
    example: dict[str, Any] = runpy.run_path(str(path))
    backend = backends.resolve("auto", torch.device(device))
    logits = torch.zeros(example["MOST_ROWS"], example["VOCAB_SIZE"], device=device)
    scorer = example["PromptScorer"](logits, backend)
    for rows in ([4, 0, 63], [1], []):
        logits.normal_()
        positions = torch.tensor(rows, dtype=torch.int64, device=device)
        tokens = positions + 7
        scorer.score(positions, tokens)
        expected = prompt_logprobs(
            logits, tokens, rows=positions, top_n=example["TOP_N"], rank=True, backend=backend
        )
        assert_same(scorer.results(len(rows)), PromptLogprobs(*(t.cpu() for t in expected)))


# Packed prompts.


def packed(lengths: list[int], rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    tokens = torch.from_numpy(rng.integers(0, V, sum(lengths)))
    cumulative = torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32)
    return tokens, cumulative


def test_next_tokens_of_packed_prompts() -> None:
    tokens = torch.tensor([10, 11, 12, 20, 30, 31, 99, 98])
    cumulative = torch.tensor([0, 3, 3, 4, 6], dtype=torch.int32)
    following = torch.tensor([1, 2, 3, -1])
    expected = [11, 12, 1, 3, 31, -1, -1, -1]
    assert next_token_ids(tokens, cumulative, following).tolist() == expected
    nothing = torch.zeros(0, dtype=torch.int64)
    assert next_token_ids(nothing, torch.tensor([0, 0]), torch.tensor([7])).tolist() == []
    assert next_token_ids(tokens[:1], torch.tensor([0]), nothing).tolist() == [-1]


@pytest.mark.parametrize("seed", range(5))
def test_next_tokens_are_shifted_within_each_prompt(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 4, 6).tolist()
    tokens, cumulative = packed(lengths, rng)
    following = torch.from_numpy(rng.integers(0, V, len(lengths)))
    got = next_token_ids(tokens, cumulative.long(), following).tolist()
    expected: list[int] = []
    for i in range(len(lengths)):
        prompt = tokens[cumulative[i] : cumulative[i + 1]].tolist()
        expected += [*prompt[1:], int(following[i])] if prompt else []
    assert got == expected


def test_chunks_of_a_prefill_give_the_bits_of_the_whole(pair: BackendDevice) -> None:
    rng = np.random.default_rng(17)
    lengths = [5, 1, 3]
    tokens, cumulative = packed(lengths, rng)
    sampled = torch.from_numpy(rng.integers(0, V, 3))
    logits = torch.randn(sum(lengths), V, generator=torch.Generator().manual_seed(1))

    def score(logits: Tensor, tokens: Tensor, cumulative: Tensor, following: Tensor) -> Tensor:
        following = next_token_ids(tokens, cumulative, following)
        got = prompt_logprobs(
            logits.to(pair.device), following.to(pair.device), backend=pair.backend
        )
        return got.logprobs.cpu()

    whole = score(logits, tokens, cumulative, sampled)
    # A step takes the first two tokens of each prompt, the next one what is left.
    starts, ends = cumulative[:-1].tolist(), cumulative[1:].tolist()
    parts: dict[int, float] = {}
    for low, high in ((0, 2), (2, 100)):
        spans = [(min(s + low, e), min(s + high, e)) for s, e in zip(starts, ends, strict=True)]
        place = torch.cat([torch.arange(a, b) for a, b in spans])
        sizes = [b - a for a, b in spans]
        following = torch.tensor(
            [
                int(tokens[b]) if b < e else int(sampled[i])
                for i, ((_, b), e) in enumerate(zip(spans, ends, strict=True))
            ]
        )
        cumulative_part = torch.tensor([0, *np.cumsum(sizes).tolist()])
        got = score(logits[place], tokens[place], cumulative_part, following)
        parts |= dict(zip(place.tolist(), got.tolist(), strict=True))
    assert [parts[i] for i in range(sum(lengths))] == whole.tolist()


# Gradients.


def double_reference(
    logits: Tensor, tokens: Tensor, given: Tensor, params: list[SamplingParams]
) -> tuple[Tensor, Tensor, Tensor]:
    """logprobs, given logprobs and entropies in float64, for the reference's survivors."""
    logprobs, others, entropies = [], [], []
    for i, p in enumerate(params):
        x = logits[i]
        if p.logprobs_mode == "processed":
            kept = sample_row(x.detach().float().numpy(), p, word=0).survivors
            mask = torch.full_like(x, -INF)
            mask[torch.from_numpy(kept)] = 0.0
            x = x / p.temperature + mask
        log_p = x.log_softmax(0)
        logprobs.append(log_p[tokens[i]])
        others.append(log_p[given[i]])
        finite = log_p[log_p > -INF]
        entropies.append(-(finite.exp() * finite).sum())
    return torch.stack(logprobs), torch.stack(others), torch.stack(entropies)


UNFILTERED = [
    SamplingParams(),
    SamplingParams(temperature=0.6, logprobs_mode="processed"),
]
FILTERED = [
    SamplingParams(temperature=1.7, top_k=30, top_p=0.9, logprobs_mode="processed"),
    SamplingParams(min_p=0.01, logprobs_mode="processed"),
]


def test_raw_logprobs_of_logits_far_from_0(pair: BackendDevice) -> None:
    vocab = 3000
    values = np.stack(list(far_rows(vocab).values())).astype(np.float32)
    logits = torch.from_numpy(values).to(pair.device)
    # NaN counts as -inf.
    exact = torch.from_numpy(np.where(np.isnan(values), -np.inf, values)).double()
    tokens = torch.stack([exact.argmax(1), torch.full((len(values),), 5)], 1)
    expected = exact.log_softmax(1).gather(1, tokens).float().double()
    for column in range(2):
        got = prompt_logprobs(
            logits, tokens[:, column].to(pair.device), backend=pair.backend
        ).logprobs.cpu()
        assert_logprobs(got, expected[:, column].numpy())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "choices", [UNFILTERED[:1], UNFILTERED, UNFILTERED + FILTERED], ids=["raw", "warm", "filtered"]
)
def test_gradients_equal_torch_s_in_float64(
    pair: BackendDevice, choices: list[SamplingParams], dtype: str
) -> None:
    pair.require_dtype(dtype)
    rng = np.random.default_rng(19)
    count = pair.rows(12, 4)
    values = torch.from_numpy(np.stack([random_row(rng, V, "smooth") for _ in range(count)]))
    logits = values.to(DTYPES[dtype])
    exact = logits.double().requires_grad_()
    logits = logits.to(pair.device).requires_grad_()
    # The likeliest tokens, which every filter keeps.
    order = exact.argsort(1, descending=True)
    tokens, given = order[:, 0], order[:, 1:2]
    params = [choices[i % len(choices)] for i in range(count)]
    upstream = torch.randn(3, count, generator=torch.Generator().manual_seed(2)).double()
    expected = double_reference(exact, tokens, given, params)
    torch.autograd.backward([expected[0], expected[1][:, 0], expected[2]], list(upstream))
    got = prompt_logprobs(
        logits, tokens.to(pair.device), params=params, given_ids=given.to(pair.device),
        entropy=True, backend=pair.backend,
    )  # fmt: skip
    torch.autograd.backward(
        [got.logprobs, got.given_logprobs[:, 0], got.entropies],
        list(upstream.float().to(pair.device)),
    )
    assert logits.grad is not None and exact.grad is not None
    assert logits.grad.dtype == DTYPES[dtype]
    spacing = {"fp32": 1e-6, "bf16": 2.0**-8, "fp16": 2.0**-10}[dtype]
    if pair.interpreted:
        spacing *= 2  # Triton's interpreter cuts off where GPUs round
    difference = (logits.grad.cpu().double() - exact.grad).abs()
    assert (difference <= 2e-6 + spacing * exact.grad.abs()).all(), difference.max()


@pytest.mark.parametrize("listed", [False, True])
def test_parts_of_a_vocabulary_have_the_gradients_of_all_of_it(
    pair: BackendDevice, listed: bool
) -> None:
    """As shards and tiles have them: other parts' tokens count for a part's, but lie elsewhere."""
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(4, V, generator=generator)
    logits[1, 3] = -INF
    log_p = logits.log_softmax(1)
    rows = torch.tensor([2, 0, -1, 1, 2]) if listed else torch.tensor([0, 1, -1, 3])
    ids = torch.randint(V, (len(rows), 4), generator=generator)
    ids[0, 0], ids[1, 1], ids[3, 2] = 0, -1, V - 1
    if listed:
        ids[3, 0] = 3  # whose logprob is -inf
    of = log_p[rows.clamp(min=0)]
    largest = logits.amax(1)[rows.clamp(min=0)]
    entropies = -(of.exp() * of.where(of > -INF, 0.0)).sum(1)
    normalisers = torch.stack([largest, logits.logsumexp(1)[rows.clamp(min=0)] - largest], 1)
    told = [
        ids, of.gather(1, ids.clamp(min=0)), torch.randn(ids.shape, generator=generator),
        torch.randn(len(rows), generator=generator),
    ]  # fmt: skip
    upstream = Upstream.of(*(t.to(pair.device) for t in told))
    forward = Forward(normalisers.to(pair.device), entropies.to(pair.device), None)
    rows, ids, logits = (t.to(pair.device) for t in (rows, ids, logits))
    selection = Selection(len(logits), rows if listed else rows >= 0)
    chosen = Positions(selection, ids[:, 0], ids[:, :0], V)
    module = positions.scoring_module(pair.backend, pair.device)

    def gradients(first: int, end: int) -> Tensor:
        part = logits[:, first:end]
        own = upstream.of_tokens_from(first)
        return positions.logit_gradients(part, chosen, own, forward, end - first, module)

    whole = gradients(0, V)
    assert whole.abs().amax(1).min() == 0 < whole.abs().max()  # a row nobody asked for
    bounds = [0, 0, 1, 5, V // 2, V]
    parts = torch.cat([gradients(*some) for some in pairwise(bounds)], 1)
    torch.testing.assert_close(parts, whole, rtol=1e-6, atol=1e-6)


def test_gradcheck(pair: BackendDevice) -> None:
    """Numerically, in fp32, for raw and for processed rows."""
    if pair.interpreted or pair.emulated:
        pytest.skip("hundreds of calls, each of which takes long here; the gradient has no kernel")
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2, 7, generator=generator).to(pair.device).requires_grad_()
    tokens = torch.tensor([2, 5], device=pair.device)
    given = torch.tensor([[1, 3], [0, 5]], device=pair.device)
    for params in (
        None,
        SamplingParams(temperature=0.7, logprobs_mode="processed"),
        [SamplingParams(), SamplingParams(temperature=1.5, logprobs_mode="processed")],
    ):

        def scores(x: Tensor, params: Any = params) -> tuple[Tensor, ...]:
            got = prompt_logprobs(
                x, tokens, params=params, given_ids=given, top_n=2, entropy=True,
                backend=pair.backend,
            )  # fmt: skip
            return got.logprobs, got.given_logprobs, got.top_logprobs, got.entropies

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that fp32 is coarse: eps is chosen for it
            assert torch.autograd.gradcheck(scores, (logits,), eps=1e-2, atol=2e-3, rtol=1e-2)


def test_gradients_reach_the_rows_asked_for_alone(pair: BackendDevice) -> None:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(4, V, generator=generator)
    tokens = torch.tensor([5, 6, 7])
    for rows in (torch.tensor([2, -1, 2]), torch.tensor([True, False, True, False])):
        x = logits.to(pair.device, copy=True).requires_grad_()
        is_mask = rows.dtype == torch.bool
        ids = torch.tensor([5, 6, 7, 8]) if is_mask else tokens
        got = prompt_logprobs(
            x, ids.to(pair.device), rows=rows.to(pair.device), backend=pair.backend
        )
        got.logprobs.nansum().backward()
        y = logits.double().requires_grad_()
        pairs = [(0, 5), (2, 7)] if is_mask else [(2, 5), (2, 7)]
        torch.stack([y[row].log_softmax(0)[token] for row, token in pairs]).sum().backward()
        assert x.grad is not None and y.grad is not None
        assert torch.allclose(x.grad.cpu().double(), y.grad, atol=1e-6)


def test_what_is_constant_has_no_gradient(pair: BackendDevice) -> None:
    """-inf, rows with +inf or nothing, greedy rows; the padded vocabulary."""
    logits = torch.randn(5, 10, generator=torch.Generator().manual_seed(5))
    logits[0, 3] = -INF
    logits[1, 4] = INF
    logits[2] = NAN
    best = int(logits[3, :8].argmax())
    logits = logits.to(pair.device).requires_grad_()
    greedy = SamplingParams(temperature=0.0, logprobs_mode="processed")
    params = [*[SamplingParams()] * 3, greedy, SamplingParams()]
    tokens = torch.tensor([3, 4, 0, best, 1], device=pair.device)
    got = prompt_logprobs(
        logits, tokens, params=params, entropy=True, vocab_size=8, backend=pair.backend
    )
    (got.logprobs[[0, 1, 3, 4]].sum() + got.entropies[3]).backward()
    assert logits.grad is not None
    assert not logits.grad[:4].any()
    assert logits.grad[4, 1] > 0 and not logits.grad[:, 8:].any()


def test_the_gradient_has_no_gradient_of_its_own() -> None:
    logits = torch.randn(2, V, requires_grad=True)
    got = prompt_logprobs(logits, torch.tensor([1, 2]))
    (gradient,) = torch.autograd.grad(got.logprobs.sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        gradient.sum().backward()
    assert not got.ranks.requires_grad and not got.normalisers.requires_grad


# What is not accepted.

Change = dict[str, Any]
WRONG: list[tuple[str, Change]] = [
    (r"logits have shape \(5,\)", {"logits": torch.zeros(5)}),
    ("logits have dtype", {"logits": torch.zeros(3, V, dtype=torch.float64)}),
    ("last dimension must be contiguous", {"logits": torch.zeros(V, 3).t()}),
    (r"next_token_ids is torch\.int32", {"next_token_ids": torch.zeros(3, dtype=torch.int32)}),
    (r"next_token_ids is torch\.int64 \[2\]", {"next_token_ids": torch.zeros(2).long()}),
    (rf"next_token_ids holds {V}, ", {"next_token_ids": torch.tensor([0, V, 1])}),
    ("next_token_ids holds -2, ", {"next_token_ids": torch.tensor([0, -2, 1])}),
    ("given_ids is", {"given_ids": torch.zeros(3).long()}),
    ("given_ids holds 999", {"given_ids": torch.full((3, 1), 999)}),
    ("rows is torch.int32", {"rows": torch.zeros(3, dtype=torch.int32)}),
    (r"rows is torch.bool \[2\]", {"rows": torch.zeros(2, dtype=torch.bool)}),
    ("rows holds 3, ", {"rows": torch.tensor([0, 3, 1])}),
    ("num_rows is the length of a list", {"num_rows": torch.zeros(1, dtype=torch.int32)}),
    (
        r"num_rows is torch.int64",
        {"rows": torch.tensor([0, 1, 2]), "num_rows": torch.zeros(1, dtype=torch.int64)},
    ),
    (r"top_n = -1 is not accepted", {"top_n": -1}),
    (r"top_n = 1025 is not accepted", {"top_n": 1025}),
    (r"vocab_size = 204 is not accepted", {"vocab_size": V + 1}),
    ("backend = 'cake' is not known", {"backend": "cake"}),
    ("temperature is torch.float64", {"temperature": torch.ones(3).double()}),
    (r"top_k is torch.int64", {"top_k": torch.ones(3).long()}),
    (r"top_p is torch.float32 \[2\]", {"top_p": torch.ones(2)}),
    (r"processed is torch.float32", {"processed": torch.ones(3)}),
]


@pytest.mark.parametrize(("match", "change"), WRONG, ids=[match for match, _ in WRONG])
def test_the_ops_name_the_wrong_argument(match: str, change: Change) -> None:
    arguments: dict[str, Any] = {
        "logits": torch.zeros(3, V), "next_token_ids": torch.zeros(3).long(), **change
    }  # fmt: skip
    record = new_prompt_output(3, device="cpu")
    with pytest.raises(ValueError, match=match):
        OPS.prompt_logprobs(**arguments)
    with pytest.raises(ValueError, match=match):
        OPS.prompt_logprobs_out(output=record, **arguments)
    assert not record.any()


def test_what_is_no_tensor_is_named() -> None:
    logits, tokens = torch.zeros(2, V), torch.zeros(2).long()
    for name, change in (
        ("logits", {"logits": logits.tolist()}),
        ("next_token_ids", {"next_token_ids": [1, 2]}),
        ("rows", {"rows": [True, False]}),
        ("given_ids", {"given_ids": [[1], [2]]}),
    ):
        arguments: dict[str, Any] = {"logits": logits, "next_token_ids": tokens, **change}
        with pytest.raises(ValueError, match=f"{name} is list"):
            prompt_logprobs(**arguments)


@pytest.mark.parametrize(
    ("match", "change"),
    [
        ("top_n = 1.0", {"top_n": 1.0}),
        ("top_n = True", {"top_n": True}),
        ("vocab_size = 2.5", {"vocab_size": 2.5}),
        ("backend = None is not known", {"backend": None}),
        ("logits is sparse or nested", {"logits": torch.zeros(2, V).to_sparse()}),
    ],
)
def test_what_the_ops_would_not_name_is_named(match: str, change: Change) -> None:
    arguments = {"logits": torch.zeros(2, V), "next_token_ids": torch.zeros(2).long(), **change}
    with pytest.raises(ValueError, match=match):
        prompt_logprobs(**arguments)


@pytest.mark.parametrize(
    ("match", "change"),
    [
        ("rows = -1", {"rows": -1}),
        ("rows = True", {"rows": True}),
        ("top_n = 2.0", {"top_n": 2.0}),
        ("top_n = 1025", {"top_n": 1025}),
        ("num_given = -1", {"num_given": -1}),
    ],
)
def test_records_of_no_size(match: str, change: Change) -> None:
    arguments = {"rows": 2, "device": "cpu", **change}
    with pytest.raises(ValueError, match=match):
        new_prompt_output(**arguments)


def test_the_out_op_names_a_wrong_record() -> None:
    logits, tokens = torch.zeros(3, V), torch.zeros(3).long()
    for wrong in (
        new_prompt_output(2, device="cpu"),
        new_prompt_output(3, 1, device="cpu"),
        new_prompt_output(3, device="cpu").float(),
    ):
        with pytest.raises(ValueError, match="output is"):
            OPS.prompt_logprobs_out(logits, tokens, wrong)


def test_params_that_need_a_history_or_another_filter_raise() -> None:
    logits, tokens = torch.zeros(2, V), torch.zeros(2).long()
    refused: dict[str, Any] = {
        "repetition_penalty": 1.1, "frequency_penalty": 0.5, "presence_penalty": 0.5,
        "logit_bias": {1: 1.0}, "allowed_token_ids": [1], "bad_words_ids": [[1]], "min_tokens": 1,
        "top_n_sigma": 1.0, "typical_p": 0.9, "epsilon_cutoff": 0.1, "eta_cutoff": 0.1,
    }  # fmt: skip
    accepted = {
        "temperature", "top_k", "top_p", "min_p", "max_tokens", "stop_token_ids", "ignore_eos",
        "seed", "logprobs", "logprobs_mode", "logprob_token_ids", "rank",
    }  # fmt: skip
    assert refused.keys() | accepted == set(SamplingParams.__dataclass_fields__)
    for name, value in refused.items():
        fields: dict[str, Any] = {name: value}
        processed = SamplingParams(logprobs_mode="processed", **fields)
        with pytest.raises(UnsupportedFeatureError, match=name):
            prompt_logprobs(logits, tokens, params=[SamplingParams(), processed])
        # Raw logprobs come before all of that.
        prompt_logprobs(logits, tokens, params=SamplingParams(**fields))
    with pytest.raises(ValueError, match="params is not accepted"):
        prompt_logprobs(logits, tokens, params=[SamplingParams()])
    with pytest.raises(ValueError, match="params hold 3"):
        prompt_logprobs(logits, tokens, params=[SamplingParams(), 3])  # type: ignore[list-item]


def test_a_backend_that_does_not_score_positions_is_named() -> None:
    if backends.module("flashinfer").unusable(torch.device("cpu")):
        pytest.skip("flashinfer stands for such backends, and cannot be used here")
    with pytest.raises(UnsupportedFeatureError, match="'flashinfer' does not support"):
        prompt_logprobs(torch.zeros(2, V), torch.zeros(2).long(), backend="flashinfer")


@pytest.mark.parametrize(
    ("match", "change"),
    [
        ("token_ids is", {"token_ids": torch.zeros(3)}),
        ("cu_lengths is", {"cu_lengths": torch.zeros(3)}),
        ("cu_lengths = ", {"cu_lengths": torch.tensor([0, 2, 1])}),
        ("cu_lengths = ", {"cu_lengths": torch.tensor([0, 2, 4])}),
        ("following is", {"following": torch.tensor([1])}),
    ],
)
def test_next_tokens_name_the_wrong_argument(match: str, change: Change) -> None:
    arguments: dict[str, Any] = {
        "token_ids": torch.tensor([1, 2, 3]), "cu_lengths": torch.tensor([0, 2, 3]),
        "following": torch.tensor([1, 2]), **change,
    }  # fmt: skip
    with pytest.raises(ValueError, match=match):
        next_token_ids(**arguments)


# As torch ops.


def test_opcheck(pair: BackendDevice) -> None:
    def column(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((2,), value, dtype=dtype, device=pair.device)

    logits = torch.randn(2, 40).to(pair.device)
    tokens = torch.tensor([3, 4], device=pair.device)
    given = torch.tensor([[1], [2]], device=pair.device)
    processed = torch.tensor([True, False], device=pair.device)
    raw = (None, None, given, None, None, None, None, None, 2, True, True, 39, pair.backend)
    filtered = (
        torch.tensor([1, 0], device=pair.device), torch.ones(1, dtype=torch.int32).to(pair.device),
        None, column(0.7), column(5, torch.int32), column(0.9), column(0.1), processed, 1, False,
        False, -1, pair.backend,
    )  # fmt: skip
    few = ("test_schema", "test_faketensor")
    all_of_them = (*few, "test_autograd_registration", "test_aot_dispatch_dynamic")
    for wishes, tests in ((raw, all_of_them), (filtered, few)):
        asked = logits.clone().requires_grad_()
        torch.library.opcheck(
            OPS.prompt_logprobs.default, (asked, tokens, *wishes),
            test_utils=few if pair.interpreted else tests,
        )  # fmt: skip
        record = new_prompt_output(2, wishes[8], 0 if wishes[2] is None else 1, device=pair.device)
        torch.library.opcheck(
            OPS.prompt_logprobs_out.default, (logits, tokens, record, *wishes), test_utils=few
        )


def test_compiled_in_full_with_its_gradient() -> None:
    torch.compiler.reset()
    tokens = torch.tensor([3, 4])

    def loss(x: Tensor) -> Tensor:
        return OPS.prompt_logprobs(x * 2, tokens, entropy=True)[0].sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    gradients = []
    for function in (loss, compiled):
        x = torch.randn(2, V, generator=torch.Generator().manual_seed(6)).requires_grad_()
        function(x).backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


# On a GPU.


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("backend", ["torch", "triton", "cuda"])
def test_captured_on_a_side_stream_without_synchronising(backend: str) -> None:
    device = torch.device("cuda")
    if reason := backends.module(backend).unusable(device):
        pytest.skip(f"backend {backend}: {reason}")
    logits = torch.randn(6, V, device=device)
    tokens = torch.randint(V, (6,), device=device)
    rows = torch.arange(6, device=device)
    num_rows = torch.full((1,), 6, dtype=torch.int32, device=device)
    record = new_prompt_output(6, 2, device=device)
    temperature = torch.full((6,), 0.7, device=device)
    processed = torch.arange(6, device=device) % 2 == 0

    def score() -> None:
        OPS.prompt_logprobs_out(
            logits, tokens, record, rows, num_rows, None, temperature, None, None, None, processed,
            2, True, True, -1, backend,
        )  # fmt: skip

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        score()
        torch.cuda.set_sync_debug_mode("error")
        try:
            score()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            score()
    torch.cuda.synchronize()
    for count in (6, 3, 0):
        logits.normal_()
        tokens.random_(V)
        num_rows.fill_(count)
        graph.replay()
        torch.cuda.synchronize()
        captured = PromptLogprobs(*(t.clone() for t in PromptLogprobs.of(record, 2)))
        score()
        torch.cuda.synchronize()
        assert_same(captured, PromptLogprobs.of(record, 2))
        assert_nothing(PromptLogprobs(*(t[count:] for t in captured)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_many_rows_take_little_memory(backend: str) -> None:
    """More than 2^32 logits, which shows offsets of 64 bits too."""
    device = torch.device("cuda")
    if reason := backends.module(backend).unusable(device):
        pytest.skip(f"backend {backend}: {reason}")
    vocab, count = 151936, 32768
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GB of device memory")
    logits = torch.randn(1024, vocab, device=device, dtype=torch.bfloat16).repeat(32, 1)
    tokens = torch.randint(vocab, (count,), device=device)
    record = new_prompt_output(count, device=device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    OPS.prompt_logprobs_out(logits, tokens, record, backend=backend)
    assert torch.cuda.max_memory_allocated() - before < 200e6
    got = PromptLogprobs.of(record)
    last = logits[-1024:].float().log_softmax(1).gather(1, tokens[-1024:, None])[:, 0]
    assert torch.allclose(got.logprobs[-1024:], last, atol=1e-5)


# Found by trying.


def test_a_compiled_function_may_return_what_was_not_asked_for() -> None:
    """It hands gradients of zero to every result, among them the entropies that are NaN."""
    logits, tokens = torch.randn(5, 50), torch.randint(50, (5,))
    gradients = []
    for score in (prompt_logprobs, torch.compile(prompt_logprobs, backend="aot_eager")):
        leaf = logits.clone().requires_grad_()
        score(leaf, tokens).logprobs.sum().backward()
        gradients.append(leaf.grad)
    assert torch.equal(gradients[0], gradients[1])
    leaf = logits.clone().requires_grad_()
    result = prompt_logprobs(leaf, tokens)
    (result.logprobs.sum() + result.entropies.nansum()).backward()
    assert torch.equal(gradients[0], leaf.grad)


def test_the_first_call_of_a_process_may_be_compiled() -> None:
    run_python(
        """
import torch
from graphed_sampling import RequestTable, Sampler, SamplingParams, prompt_logprobs
logits, tokens = torch.randn(5, 50), torch.randint(50, (5,))
compiled = torch.compile(lambda x: prompt_logprobs(x, tokens).logprobs, backend="aot_eager")
first = compiled(logits)
assert torch.equal(first, prompt_logprobs(logits, tokens).logprobs)
table = RequestTable(1, 50, device="cpu")
table.admit(SamplingParams(temperature=0.0))
drawn = Sampler(table)(logits[:1], torch.zeros(1, dtype=torch.int32)).token_ids
assert drawn.tolist() == [int(logits[0].argmax())]
"""
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_survivors_of_the_gradient_are_those_of_the_logprobs(dtype: torch.dtype) -> None:
    """Of logits so near that their logprobs are equal, which those of fp16 never are."""
    tiny = 1e-9
    logits = torch.tensor([[tiny, 2 * tiny, 4 * tiny, 1.0]], dtype=dtype, requires_grad=True)
    kept = SamplingParams(top_k=2, logprobs_mode="processed")
    result = prompt_logprobs(logits, torch.tensor([2]), params=kept, top_n=4)
    assert result.top_token_ids[0, :2].tolist() == [3, 2]
    result.logprobs.sum().backward()
    p = torch.softmax(torch.tensor([4 * tiny, 1.0], dtype=torch.float64), 0)
    expected = torch.tensor([0.0, 0.0, 1.0 - float(p[0]), -float(p[1])])
    torch.testing.assert_close(logits.grad[0].float(), expected, rtol=4e-3, atol=1e-6)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("params", [None, SamplingParams(top_k=2, logprobs_mode="processed")])
def test_a_list_that_asks_for_none_of_no_rows(backend: str, params: SamplingParams | None) -> None:
    logits = torch.zeros(0, 9, requires_grad=True)
    result = prompt_logprobs(
        logits, torch.tensor([1, 2]), rows=torch.tensor([-1, -1]), params=params, backend=backend
    )
    assert result.logprobs.isnan().all()
    assert result.flags.tolist() == [RowFlags.PADDING] * 2
    result.logprobs.nansum().backward()
    assert logits.grad is not None and logits.grad.shape == (0, 9)


def test_a_record_is_split_as_it_was_filled_or_not_at_all() -> None:
    record = new_prompt_output(4, 2, device="cpu")
    OPS.prompt_logprobs_out(torch.randn(4, 32), torch.tensor([1, 2, 3, 4]), record, top_n=2)
    for wrong, top_n in ((record, 20), (record.float(), 2), (record[0], 2), ([1], 2)):
        with pytest.raises(ValueError, match="record"):
            PromptLogprobs.of(wrong, top_n=top_n)
    for top_n, num_given, name in ((-1, 0, "top_n"), (5000, 0, "top_n"), (0, -1, "num_given")):
        with pytest.raises(ValueError, match=name):
            new_prompt_output(4, top_n, num_given, device="cpu")


def test_what_has_the_wrong_shape_is_named_before_params_are_looked_at() -> None:
    logits, tokens = torch.randn(4, 9), torch.tensor([1, 2, 3, 4])
    params = SamplingParams(top_k=2, logprobs_mode="processed")
    for wrong, message in (
        ((logits, torch.tensor(3), params), "next_token_ids"),
        ((torch.tensor(1.0), tokens, params), "logits"),
        ((logits, tokens, (p for p in [params] * 4)), "params"),
    ):
        with pytest.raises(ValueError, match=message):
            prompt_logprobs(wrong[0], wrong[1], params=wrong[2])
    with pytest.raises(ValueError, match="token_ids"):
        next_token_ids([1, 2], torch.tensor([0, 2]), torch.tensor([3]))
    with pytest.raises(ValueError, match="cu_lengths"):
        next_token_ids(tokens, [0, 4], torch.tensor([3]))
    with pytest.raises(ValueError, match="rows holds 99"):
        parameter = torch.nn.Parameter(torch.tensor([99]), requires_grad=False)
        prompt_logprobs(logits, tokens[:1], rows=parameter)
