"""The backends that work from statistics of groups: every way through a row, every end of a group.

Their kernels differ, and what is hard for them is the same. Without a GPU `triton` runs in Triton's
interpreter, `cuda` in an emulation.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    DTYPES,
    FLT_MAX,
    INF,
    NAN,
    PLACEMENTS,
    BackendDevice,
    CheckedTable,
    Tally,
    backend_devices,
    place,
    random_bitmask,
    random_params,
    random_row,
    random_words,
)

from graphed_sampling import (
    RequestTable,
    Sampler,
    SamplingParams,
    StepOutput,
    new_output,
    new_scratch,
)
from graphed_sampling.backends import cuda, triton

GROUPED = ("triton", "cuda")


@pytest.fixture(params=[p for p in backend_devices() if p.values[0].backend in GROUPED])
def pair(request: pytest.FixtureRequest) -> BackendDevice:
    """Each of them wherever it can be used."""
    value: BackendDevice = request.param
    return value


# Memory.


@pytest.mark.parametrize("vocab", [136, 135], ids=lambda v: f"V{v}")
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtype_and_layout_change_no_bit(pair: BackendDevice, dtype: str, vocab: int) -> None:
    """Logits that all dtypes hold exactly, wherever they lie: the same records."""
    rng = np.random.default_rng(vocab)
    values = rng.integers(-32, 33, (4, vocab)) / 8
    params = [
        SamplingParams(seed=0, logprobs=3, rank=True),
        SamplingParams(seed=1, top_k=9, top_p=0.8, logprobs=2, logprobs_mode="processed"),
        SamplingParams(seed=2, typical_p=0.7, frequency_penalty=0.5, logprobs=1),
        SamplingParams(temperature=0.0, logit_bias={3: 1.5}, logprobs=0),
    ]

    def record(dtype: torch.dtype, placement: str) -> torch.Tensor:
        checked = CheckedTable(pair, vocab, len(params), max_logprobs=3)
        for one in params:
            checked.admit(one, [1, 2], [3])
        placed = place(values, pair.device, dtype, placement)
        host = checked.step(placed.logits, range(len(params)))
        placed.check_unmodified()
        return host.record

    expected = record(torch.float32, "contiguous")
    for placement in PLACEMENTS:
        assert torch.equal(record(DTYPES[dtype], placement), expected), placement


def test_slots_and_words_with_gaps_between_them(pair: BackendDevice) -> None:
    tables = [RequestTable(3, 50, device=pair.device) for _ in range(2)]
    records = []
    for table, gap in zip(tables, (1, 3), strict=True):
        for seed in range(3):
            table.admit(SamplingParams(seed=seed, logprobs=0))
        table.upload()
        output, scratch = new_output(table, 3), new_scratch(table, pair.backend, 3)
        slots, words = torch.full((3 * gap,), 99).int(), torch.full((3 * gap,), 99)
        slots[::gap], words[::gap] = torch.tensor([2, -1, 0]).int(), torch.tensor([-1, 0, 1 << 40])
        torch.ops.graphed_sampling.sample_step(
            torch.linspace(-2, 2, 150, device=pair.device).view(3, 50),
            slots.to(pair.device)[::gap],
            table.params,
            table.state,
            table.tables,
            output.record,
            scratch,
            table.layout.to_ints(),
            pair.backend,
            words=words.to(pair.device)[::gap],
        )
        records.append(output.record.cpu())
    assert torch.equal(*records)


# Ways through a row.


def routes(checked: CheckedTable, rows: int) -> list[str]:
    """By which kernel of triton, and from what, each row of the last step was finished."""
    kinds: Any = importlib.import_module("graphed_sampling.backends.triton_kernels.constants")
    names = {
        int(getattr(kind, "value", kind)): name
        for kind, name in (
            (kinds.DONE, "finish"),
            (kinds.BY_ROW, "row"),
            (kinds.BY_LIST, "list"),
            (kinds.BY_BRACKET, "bracket"),
            (kinds.BY_SIGMA, "sigma"),
        )
    }
    at = triton._scratch(checked.table.layout)
    scratch: torch.Tensor = checked.sampler._step._scratch.cpu()
    by_row = int(getattr(kinds.PLAN_BY_ROW, "value", kinds.PLAN_BY_ROW))
    found = []
    for row, kind in enumerate(scratch[rows * at.words :][:rows].tolist()):
        fell_back = names[kind] != "finish" and scratch[row * at.words + at.plan + by_row]
        found.append("row" if fell_back else names[kind])
    return found


# Rows that triton goes over as a whole and cuda does not.
BRACKETED_BY_CUDA = {"row of top_p"}


def check_ways(
    checked: CheckedTable, cases: dict[str, tuple[np.ndarray, dict[str, Any], str]]
) -> None:
    """The last step's rows took the stated ways; of cuda, whose block does all: none went over the
    whole row without need."""
    expected = {name: way for name, (_, _, way) in cases.items()}
    if checked.pair.backend == "triton":
        assert dict(zip(cases, routes(checked, len(cases)), strict=True)) == expected
        return
    ways = cuda.ways(checked.sampler._step._scratch, checked.table.layout, len(cases))
    slow = {name for name, way in expected.items() if way == "row"} - BRACKETED_BY_CUDA
    assert {n for n, way in zip(cases, ways, strict=True) if way != cuda.Way.LISTS} == slow


def run_alone(
    pair: BackendDevice,
    params: SamplingParams,
    row: torch.Tensor,
    prompt: list[int],
    **options: Any,
) -> torch.Tensor:
    """The record of a request that has the batch to itself."""
    table = RequestTable(1, row.numel(), device=pair.device, **options)
    slots = torch.tensor([table.admit(params, prompt)], dtype=torch.int32)
    logits = row[None].to(pair.device)
    return Sampler(table, pair.backend)(logits, slots).record[0].cpu()


def check_routes(
    pair: BackendDevice,
    cases: dict[str, tuple[np.ndarray, dict[str, Any], str]],
    dtype: torch.dtype,
    alone: Sequence[str],
) -> None:
    """All cases in one batch equal the reference and take the stated ways; those that `alone` names
    give the same bits by themselves."""
    values = np.stack([row for row, _, _ in cases.values()]).astype(np.float32)
    logits = torch.from_numpy(values).to(dtype)
    options = {"max_logprobs": 4}
    checked = CheckedTable(pair, values.shape[1], len(cases), **options)
    asked = [
        SamplingParams(
            seed=i,
            logprobs=i % 5,
            rank=True,
            logprobs_mode="processed" if i % 2 else "raw",
            logprob_token_ids=[5, 70],
            **values,
        )
        for i, (_, values, _) in enumerate(cases.values())
    ]
    for params in asked:
        checked.admit(params, [1, 2, 3])
    host = checked.step(logits.to(pair.device), range(len(cases)))
    checked.check_state()
    checked.tally.check()
    check_ways(checked, cases)
    for i, name in enumerate(cases):
        if name in alone:
            record = run_alone(pair, asked[i], logits[i], [1, 2, 3], **options)
            assert torch.equal(record, host.record[i]), name


def route_cases(vocab: int = 3000) -> dict[str, tuple[np.ndarray, dict[str, Any], str]]:
    """name -> logits, parameters, way. 3000 tokens are 48 groups, more than a list holds."""
    rng = np.random.default_rng(0)
    wide, plain, narrow = (rng.normal(0, sigma, vocab) for sigma in (2, 1, 0.3))
    equal, dead = np.full(vocab, 1.5), np.full(vocab, -INF)
    few = np.where(np.arange(vocab) % 2, -INF, wide)  # 1500 tokens
    infinite = np.where(np.arange(vocab) % 700 == 5, INF, wide)
    unknown = np.where(np.arange(vocab) % 3 == 0, NAN, wide)
    touched = {"frequency_penalty": 0.5, "repetition_penalty": 1.2, "logit_bias": {9: 2.0}}
    return {
        "unfiltered": (wide, {}, "finish"),
        "unfiltered, touched": (wide, touched, "finish"),
        "greedy": (wide, {"temperature": 0.0}, "finish"),
        "short list of top_k": (wide, {"top_k": 20, "top_p": 0.9}, "finish"),
        "short list, touched": (wide, {"top_k": 20, "top_p": 0.9, **touched}, "finish"),
        "short list of min_p": (plain, {"min_p": 0.3, "typical_p": 0.8}, "finish"),
        "short list of a sigma": (plain, {"top_n_sigma": 1.0, "eta_cutoff": 0.02}, "sigma"),
        "middle list of min_p": (plain, {"min_p": 0.2, "top_p": 0.9}, "finish"),
        "middle list, touched": (plain, {"min_p": 0.2, "top_k": 99, **touched}, "finish"),
        "long list of top_p": (wide, {"top_p": 0.5}, "list"),
        "long list, touched": (wide, {"top_p": 0.5, **touched}, "list"),
        "long list of min_p": (plain, {"min_p": 0.05, "top_k": 500}, "list"),
        "long list of typical_p": (wide, {"typical_p": 0.5}, "list"),
        "long list of epsilon": (plain, {"epsilon_cutoff": 5e-4}, "list"),
        "long list of a great k": (few, {"top_k": 1300, "top_p": 0.97}, "list"),
        "row of a great k": (wide, {"top_k": 2000}, "row"),
        "row of equals": (equal, {"top_k": 50}, "row"),
        "row of equals, touched": (equal, {"top_k": 50, "top_p": 0.6, **touched}, "row"),
        "row of top_p": (narrow, {"top_p": 0.99}, "row"),
        "row of typical_p": (plain, {"typical_p": 0.5}, "row"),
        "row of eta": (plain, {"eta_cutoff": 1e-3}, "row"),
        "plus infinity": (infinite, {"top_k": 2}, "row"),
        "dead": (dead, {"top_k": 2}, "row"),
        "unknown": (unknown, {"top_k": 12}, "finish"),
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_way_through_a_row(pair: BackendDevice, dtype: str) -> None:
    cases = route_cases()
    alone = cases if dtype == "fp32" else ()
    if pair.interpreted and dtype != "fp32":
        cases = {name: case for name, case in cases.items() if "touched" in name}
    check_routes(pair, cases, DTYPES[dtype], list(alone))


def test_flat_rows_of_a_large_vocabulary(pair: BackendDevice) -> None:
    """top_p's cut in a bracket that a sample of the row tells, beside rows of other ways."""
    vocab = 16_500
    rng = np.random.default_rng(2)
    flat, other = rng.normal(0, 2, vocab), rng.normal(0, 1, vocab)
    steep = rng.normal(0, 8, vocab)
    holes, steps = np.where(rng.random(vocab) < 0.3, -INF, flat), np.round(flat * 8) / 8
    holes[::97], holes[::101] = NAN, -NAN
    cases = {
        "steep": (steep, {"top_p": 0.9}, "finish"),
        "flat": (flat, {"top_p": 0.95, "temperature": 0.8}, "bracket"),
        "holes": (holes, {"top_p": 0.95, "temperature": 0.8}, "bracket"),
        "steps": (steps, {"top_p": 0.9, "temperature": 1.5}, "bracket"),
        # What lies around the cut lies side by side.
        "slope": (np.linspace(0.3, 0.0, vocab), {"top_p": 0.9}, "bracket"),
        "short": (flat, {"top_k": 20, "top_p": 0.9}, "finish"),
        "touched": (
            other,
            {"top_p": 0.9, "frequency_penalty": 0.5, "logit_bias": {9: 2.0, 77: -INF}},
            "bracket",
        ),
        "greedy": (flat, {"temperature": 0.0}, "finish"),
    }
    check_routes(pair, cases, torch.bfloat16, ["flat", "holes", "steps", "slope"])


def test_many_flat_rows(pair: BackendDevice) -> None:
    """More flat rows than programs take tiles of one by one."""
    rows, vocab = pair.rows(40, 2), 16_500
    checked = CheckedTable(pair, vocab, rows)
    for seed in range(rows):
        checked.admit(SamplingParams(seed=seed, top_p=0.95, temperature=0.8, logprobs=0))
    rng = np.random.default_rng(4)
    logits = place(rng.normal(0, 2, (rows, vocab)), pair.device, torch.float32, "padded").logits
    checked.step(logits, range(rows), words=random_words(rng, rows, 0.1))
    checked.check_state()
    checked.tally.check()
    if pair.backend == "triton":
        assert routes(checked, rows) == ["bracket"] * rows
    else:
        ways = cuda.ways(checked.sampler._step._scratch, checked.table.layout, rows)
        assert set(ways) == {cuda.Way.LISTS}


NUCLEI: list[dict[str, Any]] = [
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.9, "top_p": 0.95},
    {"temperature": 1.0, "top_p": 0.8, "logit_bias": {7: 3.0, 900: -INF}},
    {"temperature": 1.1, "top_p": 0.7, "frequency_penalty": 0.3},
    {"temperature": 1.0, "min_p": 0.004},
    {"temperature": 1.0, "min_p": 0.002, "top_p": 0.9},
    {"temperature": 1.2, "min_p": 0.004, "bad_words_ids": [[11], [2, 12]]},
    {"temperature": 1.0, "top_p": 0.99},
    {"temperature": 1.0, "min_p": 0.0002},  # thousands
]


@pytest.mark.parametrize("kind", ["zipf", "ties", "holes", "ragged", "unaligned"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nuclei_of_hundreds_of_tokens(pair: BackendDevice, dtype: str, kind: str) -> None:
    """As language models' at temperature 1: too many for a short list, by far not all."""
    pair.require_dtype(dtype)
    vocab = 39_944 if kind == "ragged" else 39_936  # the last group has 8 tokens, or 64
    rng = np.random.default_rng([len(kind), len(dtype)])
    rows = pair.rows(6 * len(NUCLEI), 3)
    checked = CheckedTable(pair, vocab, rows, max_logprobs=5)
    values = np.stack([random_row(rng, vocab, "zipf") for _ in range(rows)])
    if kind == "ties":
        # Some tens of equals each, and one row in which hundreds have the bin of the cut.
        values = np.round(values * 16) / 16
        values[0] = np.round(values[0])
    elif kind == "holes":
        values[rng.random(values.shape) < 0.5] = -INF
        values[1, 20_000:] = -INF
    for i in range(rows):
        checked.admit(
            SamplingParams(
                seed=i,
                logprobs=i % 6,
                rank=i % 3 == 0,
                logprobs_mode="processed" if i % 2 else "raw",
                **NUCLEI[i % len(NUCLEI)],
            ),
            [1, 2],
            [2, 5, 5],
        )
    placement = "unaligned" if kind == "unaligned" else "contiguous"
    placed = place(values, pair.device, DTYPES[dtype], placement)
    checked.step(placed.logits, range(rows), words=random_words(rng, rows))
    placed.check_unmodified()
    checked.check_state()
    # Of hundreds of tokens each is small beside what a boundary may err by.
    checked.tally.check(ambiguous=0.2)


def test_min_p_of_few_tokens_all_over_a_row(pair: BackendDevice) -> None:
    """They reach hundreds of groups, and no other token is there to be kept by mistake."""
    vocab, few = 40_000, 1500
    rng = np.random.default_rng(31)
    asked: list[dict[str, Any]] = [
        {"min_p": 0.1},
        {"min_p": 0.1, "temperature": 0.8, "logprobs": 0},
        {"min_p": 0.2, "top_p": 0.9, "logprobs": 0, "logprobs_mode": "processed"},
        {"min_p": 0.1, "allowed_token_ids": range(0, vocab, 3)},
    ]
    checked = CheckedTable(pair, vocab, len(asked))
    values = np.full((len(asked), vocab), -INF)
    for row, params in zip(values, asked, strict=True):
        row[rng.choice(vocab // 3, few, replace=False) * 3] = rng.uniform(-6, 0, few)
        checked.admit(SamplingParams(seed=1, **params))
    logits = torch.from_numpy(values).float().to(pair.device)
    checked.step(logits, range(len(asked)))
    checked.check_state()
    checked.tally.check(ambiguous=1.0, differences=0.3)


def test_flat_rows_of_later_filters_go_by_a_list(pair: BackendDevice) -> None:
    """Some hundred candidates all over a row whose vocabulary would allow for a bracket."""
    vocab = 65_536
    rng = np.random.default_rng(6)
    row = rng.normal(-20, 0.5, vocab)
    row[rng.permutation(vocab)[:480]] = rng.normal(0, 0.1, 480)
    cases = {
        "typical_p": (row, {"typical_p": 0.9}, "list"),
        "eta": (row, {"eta_cutoff": 1e-4}, "list"),
    }
    check_routes(pair, cases, torch.float32, [])


def test_rows_of_one_tile_more_or_less(pair: BackendDevice) -> None:
    """Around the sizes at which a row's tiles and groups end."""
    tally = Tally()
    for vocab in (8, 9, 63, 64, 65, 127, 128, 129, 136, 137, 2047, 2048, 2049, 4097):
        rng = np.random.default_rng(vocab)
        checked = CheckedTable(pair, vocab, 4, max_logprobs=3)
        last = {"logit_bias": {vocab - 1: 6.0}}
        for seed, values in enumerate(({}, {"top_k": 7, **last}, {"top_p": 0.8}, {"min_p": 0.2})):
            checked.admit(SamplingParams(seed=seed, logprobs=3, rank=True, **values))
        placed = place(rng.normal(0, 3, (4, vocab)), pair.device, torch.bfloat16, "padded")
        checked.step(placed.logits, range(4), words=random_words(rng, 4, 0.3))
        tally.add(checked.tally)
    tally.check(ambiguous=0.3)


# What changes single logits.

SAMPLED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {},
    {"top_k": 5},
    {"top_p": 0.9},
    {"typical_p": 0.9},
)


def check_touched(
    pair: BackendDevice,
    rows: Sequence[np.ndarray],
    touches: Sequence[dict[str, Any]],
    *,
    bitmask: np.ndarray | None = None,
    steps: int = 1,
    output: Sequence[int] = (7, 8),
) -> StepOutput:
    """Every touch under every filter, in the interpreter under two, on the rows in turn."""
    asked = [
        {**touch, **SAMPLED[(i + j) % len(SAMPLED)]}
        for i, touch in enumerate(touches)
        for j in range(0, len(SAMPLED), pair.rows(1, 3))
    ]
    vocab = rows[0].size
    checked = CheckedTable(pair, vocab, len(asked), max_logprobs=4, eos_token_ids=[0])
    for i, values in enumerate(asked):
        mode: Any = "processed" if i % 2 else "raw"
        params = SamplingParams(seed=i, logprobs=i % 4, logprobs_mode=mode, rank=True, **values)
        checked.admit(params, [1, 2, 100], output)
    values = np.stack([rows[i % len(rows)] for i in range(len(asked))])
    mask = None
    if bitmask is not None:
        mask = torch.from_numpy(np.tile(bitmask, (len(asked), 1)))
    for _ in range(steps):
        host = checked.step(place(values, pair.device).logits, range(len(asked)), bitmask=mask)
    checked.check_state()
    checked.tally.check()
    return host


def peaks(vocab: int = 300) -> np.ndarray:
    """A row whose largest logits lie in its first window of 128 tokens, its second and its last."""
    row = np.random.default_rng(1).normal(0, 1, vocab).astype(np.float32)
    row[[10, 130, vocab - 2]] = [9.0, 8.5, 8.0]
    return row


def test_bias_and_bans_of_the_largest_logits(pair: BackendDevice) -> None:
    touches: list[dict[str, Any]] = [
        {"logit_bias": {5: 20.0}},  # a token of no account becomes the largest
        {"logit_bias": {10: -INF}},
        {"logit_bias": {10: -30.0, 130: -30.0, 298: -30.0}},
        {"logit_bias": {11: 3.5, 12: 3.5, 13: -INF, 10: -0.5}},  # one group's
        {"logit_bias": {299: 9.0, 128: 9.0, 127: 9.0}},  # the ends of windows and of the row
        {"logit_bias": {298: FLT_MAX, 10: -FLT_MAX}},
        {"bad_words_ids": [[10], [130]]},
        {"bad_words_ids": [[7, 8, 10], [8, 130], [9, 298]]},
        {"min_tokens": 9, "stop_token_ids": [10, 130]},
        {"logit_bias": {10: 2.0}, "bad_words_ids": [[10]], "frequency_penalty": 1.0},
    ]
    check_touched(pair, [peaks()], touches)


def test_every_token_of_a_group_is_banned(pair: BackendDevice) -> None:
    by_turns = [i for i in range(300) if not (i < 128 and i // 8 % 2 == 1)]
    neighbours = [i for i in range(300) if not 64 <= i < 128 and i not in (10, 298)]
    none_left = dict.fromkeys((0, 1, 2, 3), -INF)
    touches: list[dict[str, Any]] = [
        {"allowed_token_ids": by_turns},
        {"allowed_token_ids": neighbours},
        {"allowed_token_ids": [10], "logit_bias": {10: -INF}},
        {"allowed_token_ids": [0, 1, 2, 3], "logit_bias": none_left},
    ]
    check_touched(pair, [peaks()], touches)


def test_listed_ids_lie_anywhere(pair: BackendDevice) -> None:
    """In the first and the last group, neighbours, ids that several lists name, and 300 biases."""
    vocab = 2051
    rng = np.random.default_rng(7)
    ends = [1, 2, 127, 128, vocab - 2, vocab - 1]
    words = [[i] for i in [*ends[::2], 1, 1]]
    lists: list[dict[str, Any]] = [
        {"logit_bias": dict.fromkeys(ends, 2.0), "bad_words_ids": words},
        {"logit_bias": {i: float(rng.normal(0, 2)) for i in rng.permutation(vocab)[:300].tolist()}},
        {
            "stop_token_ids": ends,
            "min_tokens": 9,
            "logit_bias": {1: 5.0, 500: -INF, vocab - 3: 4.0},
        },
    ]
    penalties = {"repetition_penalty": 1.5, "frequency_penalty": 0.1}
    asked = [
        {**touch, **penalty, **filters}
        for touch in lists
        for penalty in ({}, penalties)
        for filters in SAMPLED[:: pair.rows(1, 3)]
    ]
    options = {"max_logit_bias": 300, "max_bad_words": 8, "max_stop_ids": 8}
    checked = CheckedTable(pair, vocab, len(asked), max_logprobs=3, eos_token_ids=[0], **options)
    values = rng.normal(0, 2, (len(asked), vocab))
    values[:, ends] += 6.0
    for row, params in enumerate(asked):
        checked.admit(SamplingParams(seed=row, logprobs=row % 4, **params), ends[:4], ends[2:])
    checked.step(
        place(values, pair.device).logits, range(len(asked)), words=random_words(rng, len(asked))
    )
    checked.check_state()
    checked.tally.check(ambiguous=0.3)


def test_unusual_logits_beside_everything_that_touches_them(pair: BackendDevice) -> None:
    """NaN and +inf in groups with biases, penalties, bans and masks."""
    nans, one, several = (peaks() for _ in range(3))
    nans[[9, 10, 101, 250]] = NAN
    one[10] = INF
    several[[10, 11, 100, 299]] = INF
    several[[12, 102]] = NAN
    rows = [nans, one, several]
    touches: list[dict[str, Any]] = [
        {},
        {"logit_bias": {10: -INF, 9: 4.0}},
        {"logit_bias": {10: -5.0, 11: 2.0, 100: -INF, 299: -INF}},
        {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "presence_penalty": -0.5},
        {"bad_words_ids": [[10], [8, 11]], "logit_bias": {250: 8.0}},
        {"allowed_token_ids": [9, 10, 99, 101, 250]},
        {"allowed_token_ids": [9, 101], "frequency_penalty": 1.0},
    ]
    check_touched(pair, rows, touches)
    mask = np.full(10, -1, np.int32)
    mask[0] ^= 1 << 10
    check_touched(pair, rows, touches[::2], bitmask=mask)


@pytest.mark.parametrize(("temperature", "above"), [(1.0, 100.0), (0.1, 9.0), (0.02, 1e30)])
def test_lists_that_ban_a_token_far_above_the_rest(
    pair: BackendDevice, temperature: float, above: float
) -> None:
    """Its neighbours' weights, relative to it, are nothing; without it they are all there is."""
    vocab, banned = 2500, 5
    lists: list[dict[str, Any]] = [
        {"logit_bias": {banned: -INF}},
        {"logit_bias": {banned: -INF, 70: 0.5 * temperature}},
        {"min_tokens": 3, "stop_token_ids": [banned]},
        {"bad_words_ids": [[banned]]},
        {"bad_words_ids": [[banned]], "presence_penalty": 0.5 * temperature},
    ]
    filters: list[dict[str, Any]] = [
        {},
        {"top_p": 0.9},
        {"typical_p": 0.8},
        {"epsilon_cutoff": 1e-4},
        {"logprobs": 3, "logprobs_mode": "processed"},
        {"top_k": 20, "logprobs": 3, "rank": True},
    ]
    asked = [a | b for a in lists for b in filters]
    checked = CheckedTable(pair, vocab, len(asked), max_logprobs=3)
    rng = np.random.default_rng(0)
    for seed, values in enumerate(asked):
        checked.admit(SamplingParams(temperature=temperature, seed=seed, **values), (), [9])
    rows = rng.normal(0, 0.3 * temperature, (len(asked), vocab)).astype(np.float32)
    rows[:, banned] = above
    for mask in (None, random_bitmask(rng, len(asked), vocab)):
        words = random_words(rng, len(asked))
        logits = torch.from_numpy(rows).to(pair.device)
        checked.step(logits, range(len(asked)), bitmask=mask, words=words)
    checked.tally.check(ambiguous=0.3)


def test_min_p_of_the_least_logits_at_a_high_temperature(pair: BackendDevice) -> None:
    """What min_p leaves reaches below the least float, but not to -inf."""
    rows = np.full((3, 64), -INF, np.float32)
    rows[:, :3] = np.finfo(np.float32).min
    checked = CheckedTable(pair, 64, 3)
    for seed, values in enumerate(({}, {"presence_penalty": 1.0}, {"top_k": 2})):
        params = SamplingParams(temperature=1e25, min_p=0.5, seed=seed, **values)
        checked.admit(params, (), [1])
    for word in (0, 1 << 62, -1):
        checked.step(torch.from_numpy(rows).to(pair.device), range(3), words=torch.full((3,), word))
    checked.tally.check()


@pytest.mark.parametrize("seed", range(3))
def test_grammar_allowed_ids_and_penalties_at_once(pair: BackendDevice, seed: int) -> None:
    rng = np.random.default_rng(seed)
    vocab, rows = 300, 5
    checked = CheckedTable(pair, vocab, rows, max_logprobs=5, eos_token_ids=[0])
    for _ in range(rows):
        output = [int(i) for i in rng.integers(0, vocab, 5)]
        params = random_params(rng, vocab, output, rate=0.6)
        checked.admit(params, [int(i) for i in rng.integers(0, vocab, 20)], output)
    for kind in ("zipf", "ties"):
        values = np.stack([random_row(rng, vocab, kind) for _ in range(rows)])
        mask = random_bitmask(rng, rows, vocab)
        placed = place(values, pair.device, torch.bfloat16, "padded-strided-unaligned")
        checked.step(placed.logits, range(rows), bitmask=mask, words=random_words(rng, rows))
        placed.check_unmodified()
    checked.check_state()
    checked.tally.check()


# Which tokens of a row of tiles of 2048 and groups of 64, neighbours or by turns, were seen before.
SEEN: dict[str, Callable[[int], Sequence[int]]] = {
    "none": lambda vocab: [],
    "first and last": lambda vocab: [0, vocab - 1, vocab - 2],
    "neighbours": lambda vocab: range(128, 192),
    "by turns": lambda vocab: [i for i in range(128, 256) if i // 8 % 2 == 0],
    "a tile and the next token": lambda vocab: range(2048, 4097),
    "every 50th": lambda vocab: range(17, vocab, 50),
}


@pytest.mark.parametrize("vocab", [4104, 4099], ids=lambda v: f"V{v}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tokens_seen_before_lie_anywhere(
    pair: BackendDevice, dtype: torch.dtype, vocab: int
) -> None:
    """In the prompt, in the output, or often in it; also where they are the largest of a group."""
    rng = np.random.default_rng(vocab)
    penalties = {"repetition_penalty": 1.5, "frequency_penalty": 0.01, "presence_penalty": 0.2}
    kinds = list(SEEN)[:: pair.rows(1, 2)]
    asked = [(kind, filters) for kind in kinds for filters in SAMPLED[:: pair.rows(1, 2)]]
    checked = CheckedTable(pair, vocab, len(asked), max_logprobs=3)
    values = rng.normal(0, 2, (len(asked), vocab))
    for row, (kind, filters) in enumerate(asked):
        tokens = list(SEEN[kind](vocab))
        params = SamplingParams(seed=row, logprobs=row % 4, **penalties, **filters)
        output = tokens[::3] + tokens[:1] * 1000 + tokens[-1:] * 2
        checked.admit(params, tokens[::2] + tokens[1::4], output)
        values[row, tokens] += 3.0
    checked.step(
        place(values, pair.device, dtype, "padded").logits,
        range(len(asked)),
        words=random_words(rng, len(asked)),
    )
    checked.check_state()
    checked.tally.check(ambiguous=0.3)


@pytest.mark.parametrize("penalties", [False, True], ids=["masks", "masks and penalties"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_masks_whose_words_are_all_ones_or_all_zeros(
    pair: BackendDevice, dtype: torch.dtype, penalties: bool
) -> None:
    """For 64 tokens, a window and a group by turns, 1024 tokens and a tile, beside single bits."""
    vocab = 6152
    rng = np.random.default_rng(4)
    penalty = {"repetition_penalty": 1.5, "presence_penalty": 0.2} if penalties else {}
    filters = SAMPLED[:: pair.rows(1, 2)]
    checked = CheckedTable(pair, vocab, 2 * len(filters), max_logprobs=3)
    values = rng.normal(0, 2, (2 * len(filters), vocab))
    mask = np.full((len(values), -(-vocab // 32)), -1, np.int32)
    mask[:, :2] = mask[:, 4:8] = 0
    mask[:, 8:12] = 0x00FF00FF
    mask[:, 64:96] = 0
    mask[:, 100] = 1 << 7
    mask[:, 101] = np.int32(-(2**31))
    mask[1::2, :] = ~mask[1::2, :]
    for row in range(len(values)):
        params = SamplingParams(seed=row, logprobs=2, **penalty, **filters[row // 2])
        seen = rng.integers(0, vocab, 200).tolist()
        checked.admit(params, seen[:150], seen[100:])
        values[row, seen] += 3.0
    checked.step(
        place(values, pair.device, dtype).logits,
        range(len(values)),
        bitmask=torch.from_numpy(mask),
        words=random_words(rng, len(values)),
    )
    checked.check_state()
    checked.tally.check(ambiguous=0.3)


# Logprobs.


def test_top_logprobs_of_more_equals_than_are_listed(pair: BackendDevice) -> None:
    """The lowest ids of the equals, however many there are, and wherever the larger ones lie."""
    vocab, most = 3000, 40
    rng = np.random.default_rng(5)
    equal = np.zeros(vocab, np.float32)
    stairs = np.floor(np.arange(vocab) / 300).astype(np.float32)  # the largest are the last 300
    sparse = np.full(vocab, -INF, np.float32)
    sparse[rng.permutation(vocab)[:30]] = 1.0
    peaked = equal.copy()
    peaked[[2999, 1500, 7]] = [3.0, 2.0, 2.0]
    rows = [equal, stairs, sparse, peaked]
    checked = CheckedTable(pair, vocab, 2 * len(rows), max_logprobs=most)
    asked: list[dict[str, Any]] = [{}, {"top_k": 35}]
    values = []
    for i, (row, filters) in enumerate((r, f) for r in rows for f in asked):
        mode: Any = "processed" if filters else "raw"
        checked.admit(SamplingParams(seed=i, logprobs=most, logprobs_mode=mode, **filters))
        values.append(row)
    host = checked.step(place(np.stack(values), pair.device).logits, range(len(values)))
    assert host.top_token_ids[0].tolist() == list(range(most))
    assert host.top_token_ids[2].tolist() == list(range(2700, 2700 + most))
    assert host.top_token_ids[6, :5].tolist() == [2999, 7, 1500, 0, 1]
    checked.tally.check()
