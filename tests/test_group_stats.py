"""Statistics of groups: what they are, what makes them, and steps that are given them."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    DTYPES,
    INF,
    KINDS,
    NAN,
    PLACEMENTS,
    BackendDevice,
    CheckedTable,
    assert_logprobs,
    backend_devices,
    place,
    random_bitmask,
    random_row,
    random_words,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from test_contract import admit_random, run_random_steps
from test_cuda_backend import launches, threads_in_order, tickets
from test_ways_through_a_row import route_cases

from graphed_sampling import (
    GROUP_SIZE,
    GraphedSampler,
    RequestTable,
    RowFlags,
    Sampler,
    SamplingParams,
    StepOutput,
    UnsupportedFeatureError,
    backends,
    group_stats,
    group_stats_shape,
    new_output,
    new_scratch,
)
from graphed_sampling.distributed.exchange import ExchangeStep
from graphed_sampling.distributed.symmetric import SymmetricStep
from graphed_sampling.testing import lm_like_logits

TAKERS = [p for p in backend_devices() if p.values[0].backend == "cuda"]
TAKES_NONE = [
    p for p in backend_devices() if p.values[0].backend != "cuda" and "route" not in str(p.id)
]


@pytest.fixture(params=TAKERS)
def pair(request: pytest.FixtureRequest) -> BackendDevice:
    """The backend that takes them, wherever it can be used."""
    value: BackendDevice = request.param
    return value


class Informed:
    """A sampler that is given the statistics of all logits that come."""

    def __init__(self, sampler: Sampler | GraphedSampler) -> None:
        self._sampler = sampler

    def __call__(self, logits: torch.Tensor, slots: torch.Tensor, **inputs: Any) -> StepOutput:
        stats = group_stats(logits, self._sampler.table.vocab_size)
        return self._sampler(logits, slots, group_stats=stats, **inputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


def informed(table: RequestTable, backend: str) -> Informed:
    return Informed(Sampler(table, backend, group_stats=True))


# What they are.


@pytest.mark.parametrize(
    ("vocab", "groups"),
    [(1, 4), (64, 4), (256, 4), (257, 8), (128256, 2004), (151936, 2376), (262144, 4096)],
)
def test_shape(vocab: int, groups: int) -> None:
    assert GROUP_SIZE == 64
    assert group_stats_shape(3, vocab) == (3, 2, groups)


def tokens_of_group(group: int) -> list[int]:
    """Every other 8 tokens of a window of 128."""
    return [i for i in range(group // 2 * 128, group // 2 * 128 + 128) if i // 8 % 2 == group % 2]


def test_values() -> None:
    logits = torch.full((2, 140), -INF)
    logits[0, tokens_of_group(0)] = 2.5
    logits[0, 9] = -1.0
    logits[0, 127] = -1.0 - math.log(2)
    logits[0, 130], logits[0, 131] = NAN, 3.0
    logits[0, 135] = 9.0  # behind the vocabulary
    logits[1, 0] = INF
    stats = group_stats(logits, 135)
    assert stats.dtype == torch.float32
    assert stats.is_contiguous()
    assert stats[:, 0].tolist() == [[2.5, -1.0, 3.0, -INF], [INF, -INF, -INF, -INF]]
    sums = stats[:, 1]
    assert sums[0, [0, 3]].tolist() == [64.0, 0.0]
    assert abs(float(sums[0, 1]) - 1.5) < 1e-6
    assert sums[[0, 1], [2, 0]].isnan().all()
    assert sums[1, 1:].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_those_of_stored_logits(dtype: str) -> None:
    rng = np.random.default_rng(0)
    for placement in PLACEMENTS:
        placed = place(rng.normal(0, 4, (3, 1000)), torch.device("cpu"), DTYPES[dtype], placement)
        stats = group_stats(placed.logits, 1000).double().numpy()
        stored = placed.logits[:, :1000].double().numpy()
        for group in range(16):
            values = stored[:, [i for i in tokens_of_group(group) if i < 1000]]
            assert (stats[:, 0, group] == values.max(1)).all()
            exact = np.exp(values - values.max(1, keepdims=True)).sum(1)
            assert np.abs(stats[:, 1, group] / exact - 1).max() < 1e-5


@pytest.mark.parametrize(("vocab", "message"), [(0, "vocab_size = 0"), (5, "vocab_size = 5")])
def test_it_refuses_other_vocabularies(vocab: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        group_stats(torch.zeros(2, 4), vocab)


def test_it_refuses_what_is_no_such_thing() -> None:
    with pytest.raises(ValueError, match="logits is list"):
        group_stats([[1.0]], 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"vocab_size = 2\.0"):
        group_stats(torch.zeros(2, 5), 2.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="logits is sparse or nested"):
        group_stats(torch.zeros(2, 5).to_sparse(), 5)
    with pytest.raises(ValueError, match="rows = -1"):
        group_stats_shape(-1, 5)
    with pytest.raises(ValueError, match="rows = True"):
        group_stats_shape(True, 5)
    with pytest.raises(ValueError, match="vocab_size = 0"):
        group_stats_shape(1, 0)


def test_numbers_may_be_numpy_s() -> None:
    assert group_stats_shape(np.int64(1), np.int32(5)) == (1, 2, 4)  # type: ignore[arg-type]
    logits = torch.randn(2, 5)
    stats = group_stats(logits, np.int64(5))  # type: ignore[arg-type]
    assert torch.equal(stats, group_stats(logits, 5))


def test_compiled_in_full_with_rows_of_any_number() -> None:
    torch.compiler.reset()
    compiled = torch.compile(
        lambda logits: group_stats(logits, logits.shape[1]),
        fullgraph=True,
        dynamic=True,
        backend="aot_eager",
    )
    for rows in (3, 2):
        logits = torch.randn(rows, 70)
        assert torch.equal(compiled(logits), group_stats(logits, 70))


# What makes them: tiles of a kernel of Triton's.


needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


def stored_by_tiles(
    logits: torch.Tensor, vocab: int, rows_of_tile: int, tokens_of_tile: int
) -> torch.Tensor:
    """Statistics of logits [n, width] by a kernel that stores those of tiles."""
    from epilogue_kernel import copy_with_stats

    rows, width = logits.shape
    stats = torch.full(group_stats_shape(rows + 1, vocab), -7.0, device=logits.device)
    copy = torch.empty_like(logits)
    grid = (-(-rows // rows_of_tile), -(-width // tokens_of_tile))
    copy_with_stats[grid](
        logits, copy, stats, rows, width, vocab, ROWS=rows_of_tile, TOKENS=tokens_of_tile
    )
    assert (stats[rows:] == -7.0).all(), "rows that are not there were written"
    return stats[:rows].cpu()


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens_of_tile", [128, 256])
def test_tiles_store_them(dtype: str, tokens_of_tile: int) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rng = np.random.default_rng(tokens_of_tile)
    for vocab in (1, 8, 9, 127, 128, 129, 300, 1000):
        kinds = [*KINDS, "nan"]
        values = np.stack([random_row(rng, vocab, kind) for kind in kinds]).clip(-6e4, 6e4)
        padded = np.concatenate([values, np.full((len(kinds), 5), INF)], 1)  # must not count
        logits = torch.from_numpy(padded).to(DTYPES[dtype]).to(device)
        stored = stored_by_tiles(logits, vocab, 8, tokens_of_tile)
        expected = group_stats(logits, vocab).cpu()
        # Tiles end where the logits do; behind that nothing is looked at.
        written = -(-vocab // 128) * 2
        stored, expected = stored[:, :, :written], expected[:, :, :written]
        marked = expected[:, 1].isnan()
        assert torch.equal(stored[:, 1].isnan(), marked)
        assert torch.equal(stored[:, 0][~marked], expected[:, 0][~marked])
        ratio = stored[:, 1][~marked] - expected[:, 1][~marked]
        assert ratio.abs().max() <= 64 * 2e-6
    assert marked.any()


@needs_triton
def test_tiles_of_half_a_window_are_refused() -> None:
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import InterpreterError

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with pytest.raises((CompilationError, InterpreterError), match="whole windows of 128 tokens"):
        stored_by_tiles(torch.zeros(2, 128, device=device), 128, 8, 64)


@needs_triton
@pytest.mark.parametrize("rows", [3, 40])
def test_the_fused_head_of_the_example(pair: BackendDevice, rows: int) -> None:
    """Its logits, their statistics, and the tokens of both steps: `check` compares them."""
    path = Path(__file__).parents[1] / "examples/fused_lm_head.py"
    if not path.is_file():
        pytest.skip("the sources are not here")
    spec = importlib.util.spec_from_file_location("fused_lm_head", path)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    generator = torch.Generator().manual_seed(rows)
    hidden, weight = (torch.randn(n, 256, generator=generator) for n in (rows, 300))
    # Triton's interpreter multiplies bf16 as if it were integers.
    dtype = torch.float16 if pair.emulated else torch.bfloat16
    ways = example.Pipelines(hidden.to(pair.device, dtype), (weight / 6).to(pair.device, dtype))
    for ways.tile in example.tiles_for(rows)[:2]:
        assert ways.check().fused.shape == (rows,)


# Steps that are given them.

SUFFICES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 2},
    "top_k": {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "logprobs": 3, "rank": True},
    "processed": {"top_k": 30, "logprobs": 3, "logprobs_mode": "processed"},
    "wide_top_k": {"top_k": 600, "temperature": 1.3, "logprob_token_ids": [1, 2]},
    "min_p": {"min_p": 0.05, "temperature": 0.6},
    "biased": {"top_k": 20, "logit_bias": {7: 12.0, 900: -INF}, "logprobs": 0},
    "bans": {"top_k": 9, "bad_words_ids": [[3]], "min_tokens": 5, "stop_token_ids": [8]},
}
"""Of these the first pass is spared, and no rounding of sums decides their tokens."""
ROUNDED: dict[str, dict[str, Any]] = {
    "unfiltered": {"logprobs": 3, "rank": True},
    "top_p": {"top_p": 0.9, "logprobs": 2},
    "epsilon": {"epsilon_cutoff": 1e-4},
    "biased_unfiltered": {"logit_bias": {7: 12.0}},
}
"""The same, but the sums decide."""
READS: dict[str, dict[str, Any]] = {
    "other_temperature": {"temperature": 0.7, "logprobs": 1},
    "top_p_other_temperature": {"temperature": 0.7, "top_p": 0.9},
    "typical": {"typical_p": 0.9},
    "eta": {"eta_cutoff": 1e-3},
    "penalties": {"repetition_penalty": 1.3, "top_k": 20},
    "allowed": {"allowed_token_ids": [1, 5, 900, 1400]},
    "biased_rank": {"top_k": 20, "logit_bias": {7: 12.0}, "rank": True, "logprobs": 2},
}
"""Rows that are read all the same."""


def step_record(
    pair: BackendDevice,
    logits: torch.Tensor,
    asked: list[dict[str, Any]],
    stats: torch.Tensor | None,
    *,
    graphed: bool = False,
    slots: list[int] | None = None,
    vocab: int = 1500,
    **inputs: torch.Tensor,
) -> StepOutput:
    """On the host: two steps' last. Request i is slot i, and row i's unless `slots` says more."""
    table = RequestTable(len(asked), vocab, device=pair.device, seed=0, max_logprobs=4)
    for seed, values in enumerate(asked):
        table.admit(SamplingParams(seed=seed, **values), [1, 2, 9])
    sampler: Sampler | GraphedSampler
    if graphed:
        sampler = GraphedSampler(
            table, None, logits.dtype, logits.shape[1], pair.backend, group_stats=True
        )
    else:
        sampler = Sampler(table, pair.backend, group_stats=stats is not None)
    rows = torch.tensor(slots or range(len(asked)), dtype=torch.int32)
    given = {} if stats is None else {"group_stats": stats.to(pair.device)}
    for _ in range(2):
        output = sampler(logits.to(pair.device), rows, **given, **inputs)
    return StepOutput(output.record.cpu().clone(), table.layout)


def some_logits(rows: int, seed: int = 0, width: int = 1500) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, width, generator=generator) * 3).bfloat16()


NUMBERS = ("token_ids", "ranks", "num_kept", "top_token_ids", "finish_reason", "flags")
LOGPROBS = ("logprobs", "top_logprobs", "given_logprobs")


@pytest.mark.parametrize("graphed", [False, True], ids=["eager", "graphed"])
def test_tokens_are_those_without(pair: BackendDevice, graphed: bool) -> None:
    """Of rows that suffice and rows that are read, side by side; their seeds are fixed, and none of
    their words lies within rounding of a boundary."""
    asked = [*SUFFICES.values(), *ROUNDED.values(), *READS.values()]
    for seed in range(pair.rows(20, 4)):
        logits = some_logits(len(asked), seed)
        plain = step_record(pair, logits, asked, None)
        given = step_record(pair, logits, asked, group_stats(logits, 1500), graphed=graphed)
        for name in NUMBERS:
            assert torch.equal(getattr(given, name), getattr(plain, name)), name
        for name in LOGPROBS:
            assert_logprobs(getattr(given, name), getattr(plain, name), name)
        first_read = len(asked) - len(READS)
        assert torch.equal(given.record[first_read:], plain.record[first_read:])


def test_penalties_that_raise_no_logit_spare_the_first_pass(pair: BackendDevice) -> None:
    """Nobody looks at groups that hold none of the best tokens: there may be anything."""
    vocab = 20_000
    penalties = {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.1}
    asked: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 0},
        {"top_k": 50, "top_p": 0.95, "temperature": 0.8, "logprobs": 3},
        {"top_k": 5, "logprobs": 0, "logprobs_mode": "processed"},
    ]
    generator = torch.Generator().manual_seed(1)
    logits = lm_like_logits(len(asked), vocab, generator).bfloat16()
    logits[:, [1, 2, 9]] = 3.0  # the prompt's are among the best
    stats = group_stats(logits, vocab)
    windows = torch.cat([logits, logits[:, : -vocab % 128]], dim=1).view(len(asked), -1, 128)
    spoilt = windows.clone()
    spoilt[windows.amax(dim=2) < windows.amax(dim=2).topk(100).values[:, -1:]] = float("nan")
    asked = [penalties | params for params in asked]
    expected = step_record(pair, logits, asked, None, vocab=vocab)
    given = step_record(pair, spoilt.flatten(1)[:, :vocab], asked, stats, vocab=vocab)
    for name in NUMBERS:
        assert torch.equal(getattr(given, name), getattr(expected, name)), name
    for name in LOGPROBS:
        assert_logprobs(getattr(given, name), getattr(expected, name), name)


def test_rows_that_are_read_do_not_look_at_them(pair: BackendDevice) -> None:
    asked = list(READS.values())
    logits = some_logits(len(asked))
    stats = torch.full(group_stats_shape(len(asked), 1500), 1e30)
    plain = step_record(pair, logits, asked, None)
    assert torch.equal(step_record(pair, logits, asked, stats).record, plain.record)


@pytest.mark.parametrize("name", ["greedy", "top_k", "processed", "min_p", "biased", "unfiltered"])
def test_rows_for_which_they_suffice_are_not_read(pair: BackendDevice, name: str) -> None:
    """But for the groups that may be drawn: NaN anywhere else changes no bit and sets no flag."""
    asked = [(SUFFICES | ROUNDED)[name]]
    if name == "biased":  # as many as there are threads that have groups; more take a second look
        asked = [asked[0] | {"top_k": 5}]
    logits = some_logits(1)
    logits[0, ::64] += 8.0  # a few tokens stand out
    logits[0, 640:896] -= 60.0  # these groups nobody draws
    stats = group_stats(logits, -1)
    whole = step_record(pair, logits, asked, stats)
    logits[0, 640:896] = NAN
    assert torch.equal(step_record(pair, logits, asked, stats).record, whole.record)
    assert step_record(pair, logits, asked, None).flags.tolist() == [int(RowFlags.NAN)]


@pytest.mark.parametrize("graphed", [False, True], ids=["eager", "graphed"])
def test_masks_words_and_statistics_go_together(pair: BackendDevice, graphed: bool) -> None:
    asked = [*SUFFICES.values(), *READS.values()]
    rng = np.random.default_rng(1)
    logits = some_logits(len(asked))
    stats = torch.full(group_stats_shape(len(asked), 1500), 1e30)  # nobody may look at them
    inputs = {
        "grammar_bitmask": random_bitmask(rng, len(asked), 1500),
        "words": random_words(rng, len(asked)),
    }
    plain = step_record(pair, logits, asked, None, **inputs)
    given = step_record(pair, logits, asked, stats, graphed=graphed, **inputs)
    assert torch.equal(given.record, plain.record)


@pytest.mark.parametrize("graphed", [False, True], ids=["eager", "graphed"])
@pytest.mark.parametrize("vocab", [1, 50, 64, 129, 3000], ids=lambda v: f"V{v}")
def test_random_rows_equal_the_reference(pair: BackendDevice, vocab: int, graphed: bool) -> None:
    """Everything that a request may ask, logits of every kind, idle rows among them."""

    def sampler(table: RequestTable, backend: str) -> Informed:
        if not graphed:
            return informed(table, backend)
        made = GraphedSampler(table, None, torch.bfloat16, backend=backend, group_stats=True)
        return Informed(made)

    rng = np.random.default_rng([vocab, graphed])
    checked = CheckedTable(pair, vocab, 20, eos_token_ids=[vocab // 2], sampler=sampler)
    for rate in (0.05, 0.25):
        slots = admit_random(checked, rng, 10, rate) if rate < 0.1 else list(checked.requests)
        run_random_steps(checked, rng, slots, pair.rows(30, 3), dtype=torch.bfloat16)
    checked.tally.check(ambiguous=0.3 if vocab < 200 else 0.5, differences=0.05)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_way_through_a_row(pair: BackendDevice, dtype: str) -> None:
    cases = route_cases()
    values = np.stack([row for row, _, _ in cases.values()]).astype(np.float32)
    checked = CheckedTable(pair, values.shape[1], len(cases), sampler=informed, max_logprobs=4)
    for i, (_, asked, _) in enumerate(cases.values()):
        mode = "processed" if i % 2 else "raw"
        params = SamplingParams(seed=i, logprobs=i % 5, rank=True, logprobs_mode=mode, **asked)
        checked.admit(params, [1, 2, 3])
    logits = torch.from_numpy(values).to(DTYPES[dtype])
    checked.step(logits.to(pair.device), range(len(cases)))
    checked.check_state()
    checked.tally.check()


@pytest.mark.parametrize("clusters", [True, False], ids=["clusters", "tickets"])
def test_a_row_has_the_same_bits_anywhere(pair: BackendDevice, clusters: bool) -> None:
    """Alone, in any batch, read by several blocks or one; scratch is left for the next step."""
    vocab = 70_000
    asked = [*SUFFICES.values(), *ROUNDED.values(), *READS.values()]
    logits = some_logits(len(asked), width=vocab)
    logits[:, 900:] -= 4.0
    stats = group_stats(logits, -1)

    def records(rows: list[int]) -> torch.Tensor:
        table = RequestTable(len(asked), vocab, device=pair.device, seed=0, max_logprobs=4)
        for seed, values in enumerate(asked):
            table.admit(SamplingParams(seed=seed, **values), [1, 2, 9])
        sampler = Sampler(table, pair.backend, group_stats=True)
        with launches(pair, clusters=clusters):
            output = sampler(
                logits[rows].to(pair.device),
                torch.tensor(rows, dtype=torch.int32),
                group_stats=stats[rows].to(pair.device),
            )
        assert not tickets(sampler, len(rows)).any()
        return output.record.cpu().clone()

    whole = records(list(range(len(asked))))
    order = [int(i) for i in np.random.default_rng(0).permutation(len(asked))]
    assert torch.equal(records(order), whole[order])
    for row in (0, 1, len(SUFFICES), len(asked) - 1):
        assert torch.equal(records([row]), whole[[row]]), row


def test_more_groups_than_are_kept_close_by(pair: BackendDevice) -> None:
    vocab = 600_001
    asked: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"top_k": 40, "top_p": 0.9, "logprobs": 4},
        {"top_p": 0.5, "temperature": 0.5},
        {"top_k": 9, "logit_bias": {vocab - 1: 30.0, 3: 30.0}},
    ]
    checked = CheckedTable(
        pair, vocab, len(asked), sampler=informed, max_logprobs=4, penalties=False
    )
    for seed, values in enumerate(asked):
        checked.admit(SamplingParams(**{"seed": seed, "logprobs": 0, **values}), slot=seed)
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(0, 5, (len(asked), vocab)).astype(np.float32))
    logits[:, -20:] += 12
    checked.step(logits.to(pair.device), range(len(asked)))
    checked.tally.check(ambiguous=1.0)


FLAT: list[dict[str, Any]] = [
    {"top_p": 0.95, "logprobs": 2},
    {"min_p": 0.01},
    {"min_p": 0.001, "top_p": 0.9, "rank": True},
    {"top_n_sigma": 1.0, "top_p": 0.8},
    {"top_p": 0.7, "logit_bias": {7: 12.0}},
    {"epsilon_cutoff": 1e-6},
]
"""Of flat rows they take a second pass."""


def wrong_statistics(rng: np.random.Generator, rows: int, vocab: int) -> torch.Tensor:
    """Anything at all, nothing yet, or what stands for other logits."""
    shape = group_stats_shape(rows, vocab)
    values = [0.0, -1.0, 1.0, 50.0, 1e30, -1e30, INF, -INF, NAN, 1e-30]
    anything = torch.from_numpy(rng.choice(values, shape).astype(np.float32))
    others = torch.from_numpy(rng.normal(0, rng.choice([0.1, 3]), (rows, vocab))).float()
    right = group_stats(others, vocab)
    kind = rng.integers(6)
    if kind == 0:
        anything[:, 0] = anything[:, 0].nan_to_num(nan=3.0, posinf=9.0, neginf=-9.0)
    if kind <= 1:
        return anything
    if kind == 2:
        return torch.zeros(shape)
    if kind == 3:
        return group_stats(others.log_softmax(-1), vocab)
    if kind == 4:
        right[:, 0] += rng.choice([-30.0, -3.0, -0.1, 0.1, 3.0, 30.0])
        return right
    return torch.where(torch.rand(shape) < 0.9, right, anything)


@pytest.mark.parametrize(("vocab", "examples"), [(1500, 40), (5000, 60), (70_000, 12)])
def test_wrong_statistics_draw_tokens_still(vocab: int, examples: int) -> None:
    """Whatever they say, a row ends, and in a token of the vocabulary."""
    if not TAKERS or TAKERS[0].values[0].device.type != "cpu":
        pytest.skip("the emulation of CUDA is not here")
    pair = TAKERS[0].values[0]
    cases = [*SUFFICES.values(), *ROUNDED.values(), *FLAT, *FLAT]

    @settings(max_examples=examples, deadline=None)
    @given(st.integers(0, 2**32 - 1))
    def check(seed: int) -> None:
        rng = np.random.default_rng(seed)
        asked = [cases[int(i)] for i in rng.integers(len(cases), size=4)]
        logits = torch.from_numpy(rng.normal(0, rng.choice([0.1, 3]), (4, vocab))).bfloat16()
        stats = wrong_statistics(rng, 4, vocab)
        tokens = step_record(pair, logits, asked, stats, vocab=vocab).token_ids
        assert ((tokens >= 0) & (tokens < vocab)).all()

    check()


@pytest.mark.parametrize("value", [50.0, 3e38, INF, NAN], ids=str)
def test_wrong_statistics_draw_the_same_in_any_order(value: float) -> None:
    """What a row draws follows from what it is given, also where logits are above all maxima."""
    if not TAKERS or TAKERS[0].values[0].device.type != "cpu":
        pytest.skip("the emulation of CUDA is not here")
    pair, vocab = TAKERS[0].values[0], 16_392
    rng = np.random.default_rng(71)
    asked = [
        {"temperature": 1.0, "top_p": 0.97},
        {"temperature": 1.0, "top_p": 0.9, "logprobs": 0},
        {"temperature": 1.0, "min_p": 0.002},
        {"temperature": 1.0, "min_p": 0.01, "top_p": 0.9},
    ]
    clean = np.stack([random_row(rng, vocab, "zipf") for _ in asked])
    right = group_stats(torch.from_numpy(clean).bfloat16(), vocab)
    logits = torch.from_numpy(np.where(rng.random(clean.shape) < 0.01, value, clean)).bfloat16()
    drawn = []
    for order in range(6):
        with threads_in_order(order):
            drawn.append(step_record(pair, logits, asked, right, vocab=vocab).token_ids.tolist())
    assert all(tokens == drawn[0] for tokens in drawn), drawn


def test_statistics_of_other_logits_than_those_that_flat_rows_have(pair: BackendDevice) -> None:
    """Of logits before or after a log_softmax, and none yet: the step ends, in a token."""
    for vocab in (5000, 128_256):
        generator = torch.Generator().manual_seed(0)
        raw = torch.randn(len(FLAT), vocab, generator=generator)
        normal = raw.log_softmax(-1)
        right = group_stats(raw, vocab)
        wrong = [(normal, right), (raw, group_stats(normal, vocab)), (raw - 20, 0 * right)]
        for logits, stats in wrong:
            tokens = step_record(pair, logits, FLAT, stats, vocab=vocab).token_ids
            assert ((tokens >= 0) & (tokens < vocab)).all()


@pytest.mark.parametrize("counts", [True, False])
def test_a_flag_on_the_device_tells_whether_they_count(pair: BackendDevice, counts: bool) -> None:
    """What a captured graph is told, with and without a mask and words beside them."""
    asked = list(SUFFICES.values())
    rows = len(asked)
    logits = some_logits(rows).to(pair.device)
    slots = torch.arange(rows, dtype=torch.int32, device=pair.device)
    mask = torch.full((rows, 47), -1, dtype=torch.int32, device=pair.device)
    words = random_words(np.random.default_rng(2), rows).to(pair.device)
    good = group_stats(logits, -1)
    wrong = torch.full_like(good, 1e30)

    def record(given: list[int] | None, stats: torch.Tensor | None) -> torch.Tensor:
        table = RequestTable(rows, 1500, device=pair.device, seed=0, max_logprobs=4)
        for seed, values in enumerate(asked):
            table.admit(SamplingParams(seed=seed, **values), [1, 2, 9])
        table.upload()
        flags = None if given is None else torch.tensor(given).int().to(pair.device)
        step = Sampler(table, pair.backend, group_stats=True)._step
        optional = (None, None) if given is None else (mask, words)
        step(logits, slots, *optional, flags, stats)
        return step.output.record.cpu().clone()

    for has_words in (0, 1):
        if counts:
            expected = record([0, has_words, 1], good)
            if not has_words:
                assert torch.equal(record(None, good), expected)
            assert not torch.equal(record([0, has_words, 1], wrong), expected)
        else:
            expected = record([0, has_words], None)
            assert torch.equal(record([0, has_words, 0], wrong), expected)


def test_graphed_samplers_have_a_buffer(pair: BackendDevice) -> None:
    """Rows in the buffer are the step's without a copy; each step may come with or without."""
    table = RequestTable(4, 1500, device=pair.device)
    for seed in range(4):
        table.admit(SamplingParams(seed=seed, top_k=20))
    sampler = GraphedSampler(table, (2, 4), backend=pair.backend, group_stats=True)
    buffer = sampler.group_stats_buffer(3)
    assert buffer.shape == group_stats_shape(3, 1500)
    assert buffer.data_ptr() == sampler.group_stats_buffer(4).data_ptr()
    slots = torch.arange(3, dtype=torch.int32)
    logits = sampler.logits_buffer(3)
    logits.copy_(some_logits(3))
    buffer.copy_(group_stats(logits, -1))
    for stats in ({"group_stats": buffer}, {}, {"group_stats": buffer.clone()}):
        table.state[:, 0] = 0  # the same position
        output = sampler(logits, slots, **stats)
        expected = StepOutput(output.record.clone(), table.layout)
        table.state[:, 0] = 0
        buffer.fill_(1e30)
        if not stats:
            assert torch.equal(sampler(logits, slots).record, expected.record)
        buffer.copy_(group_stats(logits, -1))
    with pytest.raises(ValueError, match="5 rows are more than"):
        sampler.group_stats_buffer(5)
    with pytest.raises(ValueError, match="n = -1"):
        sampler.group_stats_buffer(-1)
    plain = GraphedSampler(RequestTable(2, 9, device=pair.device), backend=pair.backend)
    with pytest.raises(ValueError, match="make the sampler with group_stats=True"):
        plain.group_stats_buffer(1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_graphs_refuse_another_part_of_the_buffer() -> None:
    table = RequestTable(4, 1500, device="cuda")
    sampler = GraphedSampler(table, (4,), backend="cuda", group_stats=True)
    slots = torch.full((2,), -1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"they must be group_stats_buffer\(n\)"):
        sampler(sampler.logits_buffer(2), slots, group_stats=sampler.group_stats_buffer(4)[1:3])


WRONG: list[tuple[str, Callable[[torch.Tensor], Any]]] = [
    ("Tensor", lambda s: s.tolist()),
    ("float64", lambda s: s.double()),
    (r"\[3, 2, 24\]", lambda s: s[:2]),
    (r"\[3, 2, 24\]", lambda s: s[..., :-4]),
    (r"\[3, 2, 24\]", lambda s: s.transpose(1, 2)),
    ("contiguous", lambda s: s.repeat(1, 1, 2)[..., ::2]),
    ("aligned", lambda s: torch.zeros(s.numel() + 1, device=s.device)[1:].view_as(s)),
    ("on meta", lambda s: s.to("meta")),
]


@pytest.mark.parametrize("kind", [Sampler, GraphedSampler])
@pytest.mark.parametrize(("message", "change"), WRONG)
def test_wrong_inputs_raise(
    pair: BackendDevice, kind: Any, message: str, change: Callable[[torch.Tensor], Any]
) -> None:
    table = RequestTable(3, 1500, device=pair.device)
    table.admit(SamplingParams())
    sampler = kind(table, backend=pair.backend, group_stats=True)
    slots = torch.tensor([0, -1, -1], dtype=torch.int32)
    logits = torch.zeros(3, 1500, device=pair.device)
    stats = group_stats(logits, -1)
    with pytest.raises(ValueError, match=message):
        sampler(logits, slots, group_stats=change(stats))
    assert int(table.positions[0]) == 0
    with pytest.raises(ValueError, match="a sampler made without group_stats=True"):
        kind(table, backend=pair.backend)(logits, slots, group_stats=stats)


@pytest.mark.parametrize("kind", [Sampler, GraphedSampler])
@pytest.mark.parametrize("other", TAKES_NONE)
def test_backends_that_take_none_say_so(other: BackendDevice, kind: Any) -> None:
    table = RequestTable(2, 64, device=other.device)
    name = backends.module(other.backend).NAME
    with pytest.raises(UnsupportedFeatureError, match=f"'{name}' does not support group_stats"):
        kind(table, backend=other.backend, group_stats=True)


@pytest.mark.parametrize("backend", ["cuda", "torch"])
def test_the_op_checks_them(pair: BackendDevice, backend: str) -> None:
    table = RequestTable(3, 1500, device=pair.device)
    table.admit(SamplingParams())
    table.upload()
    arguments = (
        torch.zeros(3, 1500, device=pair.device),
        torch.tensor([0, -1, -1], dtype=torch.int32, device=pair.device),
        table.params,
        table.state,
        table.tables,
        new_output(table, 3).record,
        new_scratch(table, backend, 3),
        table.layout.to_ints(),
        backend,
    )
    stats = group_stats(arguments[0], -1)
    for wrong in (
        {"group_stats": stats[:2]},
        {"group_stats": stats, "given": stats[0, 0, :2].int()},
    ):
        message = "given is|group_stats is" if backend == "cuda" else "given is|does not support"
        with pytest.raises(ValueError, match=message):
            torch.ops.graphed_sampling.sample_step(*arguments, **wrong)
    assert int(table.positions[0]) == 0
    if backend == "torch":
        with pytest.raises(UnsupportedFeatureError, match="'torch' does not support group_stats"):
            torch.ops.graphed_sampling.sample_step(*arguments, group_stats=stats)
    else:
        torch.ops.graphed_sampling.sample_step(*arguments, group_stats=stats)
        assert int(table.positions[0]) == 1


@pytest.mark.parametrize("step", [ExchangeStep, SymmetricStep])
def test_steps_of_shards_take_none(step: Any) -> None:
    none: Any = None
    with pytest.raises(ValueError, match="there are none of shards"):
        step.__call__(none, none, none, none, none, group_stats=torch.zeros(1))
