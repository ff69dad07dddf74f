"""The cuda backend's own: its geometry and scratch, what its op checks, and barriers.

Its results are the business of the tests of the contract. On a machine without a GPU they run in an
emulation of CUDA, which can put a block's threads in any order: see test_emulation.py.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from enum import IntEnum, IntFlag
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    EMULATED,
    INF,
    NAN,
    BackendDevice,
    CheckedTable,
    backend_devices,
    place,
    random_bitmask,
    random_params,
    random_words,
)

from graphed_sampling import (
    GraphedSampler,
    PromptLogprobs,
    RequestTable,
    Sampler,
    SamplingParams,
    backends,
    new_prompt_output,
    positions,
)
from graphed_sampling.backends import cuda
from graphed_sampling.backends.position_records import Positions, Selection
from graphed_sampling.layout import (
    HEADER_WORDS,
    FinishReason,
    Output,
    Param,
    ParamFlags,
    PositionRecord,
    RowFlags,
    State,
    TableLayout,
)
from graphed_sampling.positions import position_layout
from graphed_sampling.testing import lm_like_logits

CSRC = Path(__file__).parents[1] / "csrc"
needs_sources = pytest.mark.skipif(not CSRC.is_dir(), reason="the sources are not here")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(params=[p for p in backend_devices() if p.values[0].backend == "cuda"])
def pair(request: pytest.FixtureRequest) -> BackendDevice:
    """The backend wherever it can be used."""
    pair: BackendDevice = request.param
    return pair


# What C++ repeats of Python.


@needs_sources
def test_records_are_the_same_in_cpp() -> None:
    source = (CSRC / "common/layout.h").read_text()
    found = {name: int(value) for name, value in re.findall(r"\bk(\w+) = (\d+)", source)}
    expected: dict[str, int] = {"HeaderWords": HEADER_WORDS, "Ints": 9}
    prefixes: list[tuple[str, type[IntEnum] | type[IntFlag]]] = [
        ("", ParamFlags),
        ("Param", Param),
        ("State", State),
        ("Output", Output),
        ("Position", PositionRecord),
        ("Finish", FinishReason),
        ("Row", RowFlags),
    ]
    for prefix, words in prefixes:
        for word in words:
            name = "".join(part.capitalize() for part in word.name.split("_"))
            expected[prefix + name] = int(word)
    assert found == expected


def test_scratch_is_what_cpp_takes(pair: BackendDevice) -> None:
    """A word less than `scratch_words` is refused, so both count the same."""
    for vocab, options in ((5, {}), (2048, {"max_bad_words": 3}), (70_001, {"max_stop_ids": 40})):
        for rows in (1, 33):
            table = RequestTable(rows, vocab, device=pair.device, penalties=False, **options)
            step = Arguments(table, rows, pair)
            assert step.scratch.numel() == cuda.scratch_words(table.layout, rows)
            step.run()
            step.scratch = step.scratch[:-1]
            with pytest.raises(RuntimeError, match="scratch must be contiguous int32 of at least"):
                step.run()


class Arguments:
    """The op's arguments, to be changed one by one."""

    def __init__(self, table: RequestTable, rows: int, pair: BackendDevice) -> None:
        layout = table.layout
        self.logits = torch.zeros(rows, layout.vocab_size, device=pair.device)
        self.slots = torch.full((rows,), -1, dtype=torch.int32, device=pair.device)
        self.params, self.state, self.tables = table.params, table.state, table.tables
        self.output, self.scratch = (
            torch.zeros(shape, dtype=torch.int32, device=pair.device)
            for shape in ((rows, layout.output_words), cuda.scratch_words(layout, rows))
        )
        self.layout = layout.to_ints()
        self.grammar_bitmask: torch.Tensor | None = None
        self.words: torch.Tensor | None = None
        self.given: torch.Tensor | None = None
        self.group_stats: torch.Tensor | None = None

    def run(self) -> None:
        torch.ops.graphed_sampling.cuda_step(*vars(self).values())


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("logits", lambda t: t[:, :-1], "logits must be"),
        ("logits", lambda t: t[0], "logits must be"),
        ("logits", lambda t: t.double(), "float32, bfloat16 or float16"),
        ("logits", lambda t: t[:0], "there are 0 rows"),
        ("logits", lambda t: t.expand(2, 2, 40)[0].T.contiguous().T, "logits must be"),
        ("slots", lambda t: t.long(), "slots must be"),
        ("slots", lambda t: t[:1], "slots must be"),
        ("params", lambda t: t[:-1], "params must be"),
        ("state", lambda t: t.float(), "state must be"),
        ("tables", lambda t: t[:-1], "tables must be"),
        ("output", lambda t: t[:1], "output must be"),
        ("layout", lambda t: t[:-1], "layout has 8 numbers"),
        ("layout", lambda t: [2**32 + 40, *t[1:]], "a vocabulary of 4294967336 tokens"),
        ("layout", lambda t: [0, *t[1:]], "a vocabulary of 0 tokens"),
        ("layout", lambda t: [*t[:2], 2**31 - 1, *t[3:]], r"layout\[2\] is 2147483647"),
        ("layout", lambda t: [*t[:7], -1000, *t[8:]], r"layout\[7\] is -1000"),
        ("layout", lambda t: [*t[:5], 2**20, 2**20, *t[7:]], "bad words of 1048576 tokens"),
        ("words", lambda _: torch.zeros(1, dtype=torch.int64), "words must be"),
        ("grammar_bitmask", lambda _: torch.zeros(2, 1, dtype=torch.int32), "grammar_bitmask"),
        (
            "grammar_bitmask",
            lambda _: torch.zeros(8, 2, dtype=torch.int32).T,
            "the last dimension contiguous",
        ),
        ("given", lambda _: torch.zeros(1, dtype=torch.int32), "given must be"),
        ("group_stats", lambda _: torch.zeros(2, 2, 1), r"group_stats must be .* \[n, 2, 4\]"),
        ("group_stats", lambda _: torch.zeros(1, 2, 4), "group_stats must be"),
        ("group_stats", lambda _: torch.zeros(2, 2, 4).double(), "group_stats must be"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_op_checks_what_it_is_given(
    pair: BackendDevice, name: str, change: Callable[[Any], Any], message: str
) -> None:
    step = Arguments(RequestTable(2, 40, device=pair.device), 2, pair)
    step.run()
    changed = change(getattr(step, name))
    if isinstance(changed, torch.Tensor):
        changed = changed.to(pair.device)
    setattr(step, name, changed)
    with pytest.raises(RuntimeError, match=message):
        step.run()


class ScoreArguments:
    """The arguments of `cuda_score_rows`, to be changed one by one."""

    def __init__(self, pair: BackendDevice, vocab: int = 40, *, entropy: bool = False) -> None:
        layout = position_layout(vocab, 2, 1)
        self.logits = torch.zeros(3, vocab, device=pair.device)
        self.rows: torch.Tensor | None = torch.tensor([0, 2], device=pair.device)
        self.num_rows: torch.Tensor | None = None
        self.token_ids = torch.tensor([1, 3], device=pair.device)
        self.given_ids = torch.tensor([[1], [3]], device=pair.device)
        self.temperature: torch.Tensor | None = torch.ones(2, device=pair.device)
        self.processed: torch.Tensor | None = None
        self.output, self.scratch = (
            torch.zeros(shape, dtype=torch.int32, device=pair.device)
            for shape in ((2, layout.output_words), cuda._score_scratch_words(layout, entropy))
        )
        self.layout = layout.to_ints()
        self.rank = False
        self.entropy = entropy

    def run(self) -> None:
        torch.ops.graphed_sampling.cuda_score_rows(*vars(self).values())


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("logits", lambda t: t[:, :-1], "logits must be"),
        ("logits", lambda t: t.double(), "float32, bfloat16 or float16"),
        ("rows", lambda t: t.int(), "rows must be"),
        ("rows", lambda t: t[:0], "there are 0 positions"),
        ("rows", lambda t: t > 0, "a mask of rows must be contiguous, one of each"),
        ("rows", lambda _: None, "token_ids must be"),  # a position of each of three rows
        ("num_rows", lambda _: torch.zeros(1, dtype=torch.int64), "num_rows must be"),
        ("num_rows", lambda _: torch.zeros(0, dtype=torch.int32), "num_rows must be"),
        ("token_ids", lambda t: t[:1], "token_ids must be"),
        ("given_ids", lambda t: t[:1], "given_ids must be"),
        ("temperature", lambda t: t[:1], "temperature must be"),
        ("temperature", lambda t: t.double(), "temperature must be"),
        ("processed", lambda _: torch.ones(1, dtype=torch.bool), "processed must be"),
        ("processed", lambda _: torch.ones(2), "processed must be"),
        ("output", lambda t: t[:1], "output must be"),
        ("output", lambda t: t.float(), "output must be"),
        ("layout", lambda t: t[:-1], "layout has 8 numbers"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_the_op_of_many_positions_checks_what_it_is_given(
    pair: BackendDevice, name: str, change: Callable[[Any], Any], message: str
) -> None:
    arguments = ScoreArguments(pair)
    arguments.run()
    changed = change(getattr(arguments, name))
    if isinstance(changed, torch.Tensor):
        changed = changed.to(pair.device)
    setattr(arguments, name, changed)
    with pytest.raises(RuntimeError, match=message):
        arguments.run()


def test_the_op_of_many_positions_takes_a_length_of_a_list_alone(pair: BackendDevice) -> None:
    arguments = ScoreArguments(pair)
    arguments.num_rows = torch.ones(1, dtype=torch.int32, device=pair.device)
    arguments.run()
    arguments.logits = arguments.logits[:2]
    arguments.rows = torch.ones(2, dtype=torch.bool, device=pair.device)
    with pytest.raises(RuntimeError, match="num_rows is of a list"):
        arguments.run()
    arguments.rows = None
    with pytest.raises(RuntimeError, match="num_rows is of a list"):
        arguments.run()


@pytest.mark.parametrize("kind", ["all", "mask", "list", "length"])
@pytest.mark.parametrize("rounds", [1, 8])  # of rows a block, and of a relay
def test_the_kernels_find_out_what_is_none(pair: BackendDevice, kind: str, rounds: int) -> None:
    """Rows and ids that do not exist, as torch operations look through them."""
    vocab, count = 16_384, rounds * multiprocessors(pair)
    rng = np.random.default_rng(rounds)
    logits = rows_of_every_kind(24, vocab, torch.bfloat16)[torch.arange(count) % 24]
    # The last row of memory that is not the logits': nobody may read it.
    logits = torch.cat([logits, logits[:1]]).to(pair.device)[:count]
    far = [-1, -(2**40), count, count + 7, 2**40, 2**63 - 1]
    rows, num_rows = None, None
    if kind == "mask":
        rows = torch.from_numpy(rng.random(count) < 0.5)
    elif kind != "all":
        rows = torch.from_numpy(rng.choice([*range(count), *far], count))
        num_rows = torch.tensor([count * 2 // 3], dtype=torch.int32) if kind == "length" else None
    ids = [0, vocab - 1, vocab, vocab + 1, -1, -(2**40), 2**32, 2**63 - 1]
    token_ids = torch.from_numpy(rng.choice(ids, count)).to(pair.device)
    given_ids = torch.from_numpy(rng.choice(ids, (count, 2))).to(pair.device)
    selection = Selection(
        count, *(None if t is None else t.to(pair.device) for t in (rows, num_rows))
    )
    asked = Positions(selection, token_ids, given_ids, vocab)
    told = replace(
        asked,
        selection=Selection(count, asked.rows),
        token_ids=asked.accepted_token_ids,
        given_ids=asked.accepted_given_ids,
    )
    layout = position_layout(vocab, 2, 2)
    records = []
    for chosen in (asked, told):
        record = torch.zeros(count, layout.output_words, dtype=torch.int32, device=pair.device)
        cuda.score_rows(logits, chosen, record, layout, rank=False, entropy=False)
        records.append(record)
    assert torch.equal(*records)
    padding = records[0][:, PositionRecord.FLAGS] == RowFlags.PADDING
    assert torch.equal(padding, asked.rows < 0)
    assert padding.any() == (kind != "all")


TEMPERATURES = [0.0, 1e-6, 1e-5, 0.3, 0.8, 1.0, 2.5, 1e10, 1e31, -1.0, np.nan, np.inf]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [5_003, 16_384])
@pytest.mark.parametrize("mixed", [False, True])
def test_temperatures_have_the_bits_of_a_step(
    pair: BackendDevice,
    dtype: torch.dtype,
    vocab: int,
    mixed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows that a temperature alone processes: by their own kernel, and by the sampling step."""
    rows = rows_of_every_kind(16, vocab, dtype)
    rows[12, ::7] = torch.inf
    rows[13] = -6e5  # so far down that raw weights are worked out anew
    rows[13, 11] = -5.9e5
    logits = rows.repeat(len(TEMPERATURES), 1).to(pair.device)
    count = len(logits)
    temperature = torch.tensor(TEMPERATURES).repeat_interleave(len(rows)).to(pair.device)
    rng = np.random.default_rng(vocab)
    token_ids = torch.from_numpy(rng.integers(0, vocab, count)).to(pair.device)
    token_ids[::3] = logits[::3].nan_to_num(nan=-torch.inf).argmax(1)
    given_ids = torch.from_numpy(rng.integers(-1, vocab, (count, 3))).to(pair.device)
    given_ids[:, 0] = 0
    processed = torch.from_numpy(rng.random(count) < 0.5).to(pair.device) if mixed else None
    chosen = torch.from_numpy(rng.random(count) < 0.8).to(pair.device)
    records, steps = {}, []
    score_by_step = positions.score_by_step

    def counted_step(*arguments: Any, **wishes: Any) -> None:
        steps.append(1)
        score_by_step(*arguments, **wishes)

    monkeypatch.setattr(positions, "score_by_step", counted_step)
    for alone in (True, False):
        monkeypatch.setattr(cuda, "SCORES_TEMPERATURES", alone)
        steps.clear()
        told = torch.ops.graphed_sampling.prompt_logprobs(
            logits, token_ids, chosen, None, given_ids, temperature, processed=processed, top_n=5,
            rank=True, entropy=True, backend="cuda",
        )  # fmt: skip
        records[alone] = PromptLogprobs(*(t.cpu() for t in told))
        assert bool(steps) != alone
    own, by_step = records[True], records[False]
    for name in PromptLogprobs._fields:
        mine, expected = getattr(own, name), getattr(by_step, name)
        if name == "entropies":
            near = 2e-6 * expected.abs().clamp(min=8) / 8
            wrong = ~((mine - expected).abs() <= near) & ~(mine.isnan() & expected.isnan())
        else:
            both_nan = (mine != mine) & (expected != expected)
            wrong = ~((mine == expected) | both_nan)
        bad = wrong.reshape(count, -1).any(1).nonzero()[:, 0].tolist()
        kinds = {(i % len(rows), TEMPERATURES[i // len(rows)]) for i in bad}
        assert not bad, (name, kinds, mine[bad[:3]], expected[bad[:3]])
    assert own.num_kept.any() and (own.logprobs > -torch.inf).any()


@pytest.mark.parametrize(("vocab", "entropy"), [(40, True), (70_001, True), (262_145, False)])
def test_scratch_of_many_positions_is_what_cpp_takes(
    pair: BackendDevice, vocab: int, entropy: bool
) -> None:
    arguments = ScoreArguments(pair, vocab, entropy=entropy)
    assert arguments.scratch.numel() > 0
    arguments.run()
    arguments.scratch = arguments.scratch[:-1]
    with pytest.raises(RuntimeError, match="scratch must be contiguous int32 of at least"):
        arguments.run()


def tickets(sampler: Sampler, rows: int) -> torch.Tensor:
    """How many blocks of each row are through."""
    words = cuda.scratch_words(sampler.table.layout, 1)
    return sampler._step._scratch[::words][:rows].cpu()


@contextmanager
def launches(pair: BackendDevice, *, clusters: bool) -> Iterator[None]:
    """Whether the device holds clusters. Without, the blocks of a row take tickets."""
    if clusters:
        yield
        return
    if not pair.emulated:
        pytest.skip("a GPU's clusters cannot be taken away")
    set_most_clusters = ctypes.CDLL(str(EMULATED)).graphed_sampling_emulation_set_most_clusters
    set_most_clusters(0)
    try:
        yield
    finally:
        set_most_clusters(1000)


by_clusters = pytest.mark.parametrize("clusters", [True, False], ids=["clusters", "tickets"])


def counted(pair: BackendDevice, what: str) -> int:
    """How many of them the emulation has come upon, ever; 0 on a GPU."""
    if not pair.emulated:
        return 0
    count = getattr(ctypes.CDLL(str(EMULATED)), f"graphed_sampling_emulation_count_{what}")
    count.restype = ctypes.c_int64
    return int(count())


def ways(checked: CheckedTable, rows: int) -> list[cuda.Way]:
    """By which way each row of the last step went."""
    return cuda.ways(checked.sampler._step._scratch, checked.table.layout, rows)


@by_clusters
def test_a_step_leaves_scratch_for_the_next(pair: BackendDevice, clusters: bool) -> None:
    """How many of a row's blocks are through is 0 again, whichever rows had work."""
    rows, vocab = 5, 40_000
    table = RequestTable(rows, vocab, device=pair.device)
    for seed in range(3):
        table.admit(SamplingParams(seed=seed, max_tokens=1 + seed))
    sampler = Sampler(table, pair.backend)
    logits = torch.randn(rows, vocab, device=pair.device)
    for slots in ([0, 1, 2, -1, -1], [2, -1, 0, 1, -1], [-1] * 5):
        with launches(pair, clusters=clusters):
            sampler(logits, torch.tensor(slots, dtype=torch.int32))
        assert not tickets(sampler, rows).any()


@by_clusters
def test_rows_of_one_slot_leave_scratch_for_the_next(pair: BackendDevice, clusters: bool) -> None:
    """What nobody may do, and nothing checks on a device: one row ends the request while blocks of
    the other begin. That step is anybody's; the next one is not."""
    if not pair.emulated:
        pytest.skip("which block runs first cannot be chosen on a GPU")
    if "races" in EMULATED.name:
        pytest.skip("it is a race, on purpose")
    vocab = 40_000
    table = RequestTable(1, vocab, device=pair.device, penalties=False)
    step = Arguments(table, 2, pair)
    step.logits = torch.randn(2, vocab, generator=torch.Generator().manual_seed(0))
    step.slots = torch.zeros(2, dtype=torch.int32)
    words = cuda.scratch_words(table.layout, 1)
    for seed in range(12):
        slot = table.admit(SamplingParams(seed=seed, max_tokens=1))
        table.upload()
        with threads_in_order(seed), launches(pair, clusters=clusters):
            step.run()
        assert not step.scratch[::words].any(), seed
        table.release(slot)


@by_clusters
@pytest.mark.parametrize("graphed", [False, True], ids=["eager", "graphed"])
def test_steps_of_any_number_of_rows_share_scratch(
    pair: BackendDevice, graphed: bool, clusters: bool
) -> None:
    """Rows that several blocks read, in steps that grow and shrink."""
    vocab, most = 40_000, 70

    def graphed_sampler(table: RequestTable, backend: str) -> GraphedSampler:
        return GraphedSampler(table, (1, 8, 40, most), backend=backend)

    checked = CheckedTable(
        pair, vocab, most, sampler=graphed_sampler if graphed else Sampler, penalties=False
    )
    for seed in range(most):
        checked.admit(SamplingParams(seed=seed, top_k=50, top_p=0.95, logprobs=0), slot=seed)
    rng = np.random.default_rng(0)
    for rows in (8, 40, 1, most, 8, 33):
        logits = torch.from_numpy(rng.normal(0, 2, (rows, vocab)).astype(np.float32))
        with launches(pair, clusters=clusters):
            checked.step(logits.to(pair.device), rng.permutation(most)[:rows].tolist())
    checked.check_state()
    checked.tally.check()


def test_flat_rows_of_any_scale_go_by_a_bracket(pair: BackendDevice) -> None:
    """Up to 262144 tokens nearly as likely as each other, of which most survive."""
    for vocab in (20_000, 262_144):
        asked = [(scale, p, {}) for scale in (0.05, 0.3, 2.0) for p in (0.3, 0.8, 0.95)]
        asked += [(0.3, 0.9, {"min_p": 0.2}), (0.3, 0.4, {"top_n_sigma": 1.5})]
        asked += [(1.0, 1.0, {"min_p": 0.01}), (1.0, 0.9, {"frequency_penalty": 1.0})]
        checked = CheckedTable(pair, vocab, len(asked))
        rng = np.random.default_rng(vocab)
        rows = []
        for seed, (scale, p, values) in enumerate(asked):
            params = SamplingParams(seed=seed, top_p=p, logprobs=0, **values)
            checked.admit(params, [1, 2], [3, 4, 5], slot=seed)
            rows.append(rng.normal(0, scale, vocab).astype(np.float32))
        logits = torch.from_numpy(np.stack(rows)).bfloat16()
        checked.step(logits.to(pair.device), range(len(asked)))
        # Of 262144 tokens the tolerated errors of their masses add up to most words' neighbourhood.
        checked.tally.check(ambiguous=1.0 if vocab > 100_000 else 0.1)
        assert set(ways(checked, len(asked))) == {cuda.Way.LISTS}, vocab


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_brackets_hold_cuts_far_down(pair: BackendDevice, dtype: torch.dtype) -> None:
    """Where tokens weigh a millionth of the largest, and little of the whole is left out."""
    vocab = 128_256
    asked = [(scale, p) for scale in (0.05, 1.0, 2.0, 3.0) for p in (0.999, 0.9999, 0.99999)]
    checked = CheckedTable(pair, vocab, len(asked))
    rng = np.random.default_rng(5)
    rows = []
    for seed, (scale, p) in enumerate(asked):
        checked.admit(SamplingParams(seed=seed, top_p=p, logprobs=0), [], slot=seed)
        rows.append(rng.normal(0, scale, vocab).astype(np.float32))
    logits = torch.from_numpy(np.stack(rows)).to(dtype)
    checked.step(logits.to(pair.device), range(len(asked)))
    # At such cuts the tolerated errors are many tokens.
    checked.tally.check(ambiguous=1.0, differences=0.3)
    assert set(ways(checked, len(asked))) == {cuda.Way.LISTS}


# Filters whose survivors no list holds, and whose cuts a bracket holds.
SURVEYED: list[dict[str, Any]] = [
    {"top_k": 1500},
    {"top_k": 6000, "top_p": 0.9},
    {"top_k": 8000, "temperature": 0.2},
    {"top_k": 5000, "temperature": 0.04},
    {"top_k": 9000, "top_p": 0.999, "min_p": 1e-4},
    {"top_n_sigma": 2.5, "top_k": 3000},
    {"typical_p": 0.5, "top_n_sigma": 3.0},
    {"typical_p": 0.1},
    {"typical_p": 0.95},
    {"typical_p": 0.9, "top_p": 0.99},
    {"typical_p": 0.8, "top_k": 5000},
    {"epsilon_cutoff": 1e-6, "top_p": 0.9},
    {"eta_cutoff": 1e-6, "typical_p": 0.99},
    {"epsilon_cutoff": 2e-5, "eta_cutoff": 1e-5, "top_p": 0.99, "typical_p": 0.9},
]


@pytest.mark.parametrize(
    "kind", ["lm-like", "normal", "narrow", "hardly any", "wide", "outliers", "sparse"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_few_surveys_of_a_row_are_enough(
    pair: BackendDevice, dtype: torch.dtype, kind: str
) -> None:
    """For each filter, wherever its cut lies; and blocks that share them change no bit."""
    vocab, rows = 20_000, len(SURVEYED)
    rng = np.random.default_rng(9)
    values = {
        "lm-like": lambda: (
            lm_like_logits(rows, vocab, torch.Generator().manual_seed(3)).numpy().astype(np.float64)
        ),
        "normal": lambda: rng.normal(0, 1, (rows, vocab)),
        "narrow": lambda: rng.normal(0, 0.02, (rows, vocab)),
        "hardly any": lambda: rng.normal(0, 1e-4, (rows, vocab)),
        "wide": lambda: rng.normal(0, 4, (rows, vocab)),
        # A caller's mask, and far above it, and above the rest, one token.
        "outliers": lambda: (
            np.where(np.arange(vocab) % 3 == 1, -1e9, rng.normal(0, 1, (rows, vocab)))
            + 5.0 * (np.arange(vocab) == 6)
        ),
        "sparse": lambda: np.where(
            rng.random((rows, vocab)) < 0.4, -np.inf, rng.normal(0, 1.5, (rows, vocab))
        ),
    }[kind]()
    records = []
    for clusters in (True, False):
        checked = CheckedTable(pair, vocab, rows)
        for seed, asked in enumerate(SURVEYED):
            params = SamplingParams(
                **{"seed": seed, "temperature": 1.3, "logprobs": 0} | asked,
                logprobs_mode="processed",
            )
            checked.admit(params, [1, 2], [3])
        placed = place(values, pair.device, dtype, "padded")
        waits = counted(pair, "first_block_waits")
        with launches(pair, clusters=clusters):
            records.append(checked.step(placed.logits, range(rows)).record)
        if pair.emulated and clusters:  # two each are of the first pass
            assert counted(pair, "first_block_waits") - waits > 2 * 2 * rows * 256
        # Where hardly any weigh more than others, the tolerated errors are many tokens.
        checked.tally.check(ambiguous=1.0 if kind == "hardly any" else 0.3)
        assert cuda.Way.BIT_BY_BIT not in ways(checked, rows)
        assert kind == "wide" or ways(checked, rows).count(cuda.Way.SURVEYS) >= rows - 4
    assert torch.equal(*records)


def test_equals_by_the_thousand_are_told_apart_bit_by_bit(pair: BackendDevice) -> None:
    vocab = 40_000
    asked = [{"top_k": 30_000}, {"top_k": 5000, "top_p": 0.6}, {"top_p": 0.5}, {"typical_p": 0.4}]
    checked = CheckedTable(pair, vocab, len(asked))
    for seed, values in enumerate(asked):
        checked.admit(SamplingParams(seed=seed, logprobs=0, **values))
    logits = torch.full((len(asked), vocab), 0.5)
    logits[:, 17::4000] = 0.75
    host = checked.step(logits.to(pair.device), range(len(asked)))
    checked.tally.check(ambiguous=1.0)
    assert host.num_kept.tolist()[:2] == [30_000, 2999]
    assert set(ways(checked, len(asked))) == {cuda.Way.BIT_BY_BIT}


def test_more_rows_than_a_grid_has_in_its_second_dimension(pair: BackendDevice) -> None:
    rows, vocab = 66_000, 5
    table = RequestTable(rows, vocab, device=pair.device, penalties=False, max_logprobs=0)
    slots = torch.full((rows,), -1, dtype=torch.int32)
    slots[-2:] = torch.tensor(
        [table.admit(SamplingParams(temperature=0.0)) for _ in range(2)]
    ).int()
    logits = torch.zeros(rows, vocab, device=pair.device)
    logits[-2:, 3] = 1.0
    tokens = Sampler(table, pair.backend)(logits, slots).token_ids.cpu()
    assert tokens[-2:].tolist() == [3, 3]
    assert (tokens[:-2] == -1).all()


@pytest.mark.parametrize("vocab", [600_001, 1_300_001], ids=lambda v: f"V{v}")
def test_more_groups_than_are_kept_close_by(pair: BackendDevice, vocab: int) -> None:
    """Above 262144 tokens maxima are read where they lie, above 524288 groups are listed in parts,
    above 1048576 windows drawn from by parts."""
    asked: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"top_k": 40, "top_p": 0.9, "logprobs": 4},
        {"top_p": 0.5, "temperature": 0.5},
        {"top_k": 9, "logit_bias": {vocab - 1: 30.0, 3: 30.0}, "rank": True},
    ]
    checked = CheckedTable(pair, vocab, len(asked), max_logprobs=4, penalties=False)
    for seed, values in enumerate(asked):
        checked.admit(SamplingParams(**{"seed": seed, "logprobs": 0, **values}), slot=seed)
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(0, 5, (len(asked), vocab)).astype(np.float32))
    # The largest lie in the last part of the row too.
    logits[:, -20:] += 12
    checked.step(logits.to(pair.device), range(len(asked)))
    checked.tally.check(ambiguous=1.0)
    assert set(ways(checked, len(asked))) == {cuda.Way.LISTS}


# Where it can be used.


def test_it_says_why_it_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cuda.unusable(torch.device("meta")) == "its kernel runs on CUDA GPUs"
    monkeypatch.setattr(cuda, "_has_kernel", lambda key: False)
    assert "in the emulation that its tests load" in cuda.unusable(CPU)
    assert "the native library is not loaded" in cuda.unusable(CUDA)
    monkeypatch.setattr(cuda, "_has_kernel", lambda key: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "_architectures", lambda: (90, 100))
    for capability, reason in (
        ((8, 9), "it was built for 90, 100, and the GPU is 8.9"),
        ((9, 0), ""),
        ((12, 0), ""),
    ):
        monkeypatch.setattr(cuda, "_capability", lambda _, c=capability: c)
        assert cuda.unusable(CUDA) == reason


def test_auto_takes_it_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backends.resolve("auto", CPU) == "cpu"
    monkeypatch.setattr(cuda, "unusable", lambda _: "")
    assert backends.resolve("auto", CUDA) == "cuda"
    monkeypatch.setattr(cuda, "unusable", lambda _: "the library is missing")
    assert backends.resolve("auto", CUDA) != "cuda"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_clusters_change_no_bit(pair: BackendDevice, dtype: torch.dtype) -> None:
    """The records of rows that 5 blocks read, with clusters and with tickets."""
    vocab, rows = 70_000, 5
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(3)).to(dtype) * 3
    asked: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"top_k": 50, "top_p": 0.95, "logprobs": 5},
        {"top_p": 0.9},
        {"repetition_penalty": 1.3, "top_k": 20},
        {"logit_bias": {5: 9.0}, "temperature": 0.7},
    ]
    records = []
    for clusters in (True, False):
        table = RequestTable(rows, vocab, device=pair.device, max_logprobs=5, seed=0)
        for i, params in enumerate(asked):
            table.admit(SamplingParams(seed=i, **params), [1, 2, 9])
        sampler = Sampler(table, pair.backend)
        with launches(pair, clusters=clusters):
            for _ in range(2):
                sampler(logits.to(pair.device), torch.arange(rows, dtype=torch.int32))
        records.append(sampler._step.output.record.clone())
        assert not tickets(sampler, rows).any()
    assert torch.equal(*records)


def test_a_thread_of_a_small_vocabulary_takes_nothing_from_one_of_a_large(
    pair: BackendDevice,
) -> None:
    """How much shared memory a kernel may have is one number of the driver's for all threads."""

    def step(vocab: int) -> int:
        table = RequestTable(1, vocab, device=pair.device, penalties=False)
        table.admit(SamplingParams(temperature=0.0))
        logits = torch.zeros(1, vocab, device=pair.device)
        logits[0, vocab // 3] = 1.0
        output = Sampler(table, "cuda")(logits, torch.zeros(1, dtype=torch.int32))
        return int(output.token_ids[0])

    with ThreadPoolExecutor(1) as others:
        for _ in range(2):
            assert step(200_000) == 200_000 // 3
            assert others.submit(step, 100).result() == 100 // 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rows", [(3, 40), (100, 20), (200, 300)], ids=str)
def test_two_graphs_beside_kernels_that_hold_multiprocessors(rows: tuple[int, int]) -> None:
    """10,000 replays each on streams of their own draw what they draw one after the other: clusters
    of every size, rows alone, and rows in waves. A third stream copies 128 MB a step."""
    vocab, steps = 20_000, 10_000
    asked: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 2},
        {"top_k": 50, "top_p": 0.95, "logprobs": 0},
        {"top_p": 0.9, "temperature": 50.0},  # flat
        {"presence_penalty": 1.3, "min_p": 0.1},
        {},
    ]
    logits = [
        lm_like_logits(n, vocab, torch.Generator().manual_seed(n), torch.bfloat16).cuda()
        for n in rows
    ]

    def totals(together: bool) -> list[torch.Tensor]:
        """Of every word of the output, over all steps: wrapping sums, each step's odd multiple."""
        samplers = []
        for n in rows:
            table = RequestTable(n, vocab, device="cuda", max_logprobs=2, seed=0)
            for i in range(n):
                table.admit(SamplingParams(seed=i, **asked[i % len(asked)]), [1, 2, 9], slot=i)
            samplers.append(
                GraphedSampler(table, (n,), backend="cuda", logits_dtype=torch.bfloat16)
            )
        slots = [torch.arange(n, dtype=torch.int32) for n in rows]
        streams, others = [torch.cuda.Stream() for _ in rows], torch.cuda.Stream()
        filler = torch.ones(2, 2**25, device="cuda")
        sums: list[torch.Tensor] = []
        torch.cuda.synchronize()
        for step in range(steps):
            if together:
                with torch.cuda.stream(others):
                    filler[step % 2].copy_(filler[1 - step % 2])
            for i, sampler in enumerate(samplers):
                with torch.cuda.stream(streams[i]):
                    record = sampler(logits[i], slots[i]).record
                    if step == 0:
                        sums.append(record.clone())
                    else:
                        sums[i].mul_(31).add_(record)
                if not together:
                    torch.cuda.synchronize()
            if step % 500 == 499:
                torch.cuda.synchronize()
        return sums

    for beside, apart in zip(totals(True), totals(False), strict=True):
        assert torch.equal(beside, apart)


@pytest.mark.parametrize(("dtype", "vocab"), [(torch.float32, 32_000), (torch.bfloat16, 70_001)])
def test_more_rows_than_blocks_at_once(pair: BackendDevice, dtype: torch.dtype, vocab: int) -> None:
    """Of rows that come in waves, where every second block begins later, those a few at a time."""
    rows = 2 * multiprocessors(pair) + 7
    kinds = rows_of_every_kind(12, vocab, dtype).to(pair.device)
    logits = kinds[torch.arange(rows, device=pair.device) % 12]
    asked: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 0},
        {"top_k": 50, "top_p": 0.95, "logprobs": 2},
        {"top_p": 0.9, "temperature": 0.8},
        {"presence_penalty": 1.3, "min_p": 0.1},
        {},
    ]
    records = []
    for at_once in (rows, 5):
        table = RequestTable(rows, vocab, device=pair.device, max_logprobs=2, seed=0)
        for i in range(rows):
            table.admit(SamplingParams(seed=i, **asked[i % len(asked)]), [1, 2, 9])
        sampler = Sampler(table, pair.backend)
        parts = []
        for _ in range(2):
            for first in range(0, rows, at_once):
                some = slice(first, first + at_once)
                sampler(logits[some], torch.arange(rows, dtype=torch.int32)[some])
                number = min(at_once, rows - first)
                parts.append(sampler._step.output.record[:number].clone())
        records.append(torch.cat(parts))
    assert torch.equal(*records)


def test_blocks_of_a_cluster_share_flat_rows(pair: BackendDevice) -> None:
    """A second pass by 5 blocks of a cluster, and by the one block that takes the last ticket: the
    same records. Rows that need it lie beside others that do not."""
    vocab = 70_000
    asked: list[dict[str, Any]] = [
        {"top_p": 0.9},
        {"top_k": 50},
        {"min_p": 0.01},
        {"min_p": 0.2, "top_p": 0.8},
        {"top_n_sigma": 1.5, "top_p": 0.5},
        {"frequency_penalty": 1.0, "repetition_penalty": 1.2, "top_p": 0.95},
        {"logit_bias": {5: 1.0, 69_999: -1.0}, "bad_words_ids": [[7]], "top_p": 0.7},
        {"temperature": 0.0},
        {"top_p": 0.9},
    ]
    rows = len(asked)
    rng = np.random.default_rng(11)
    values = rng.normal(0, 0.3, (rows, vocab)).astype(np.float32)
    values[4, 3] = np.nan
    values[8, [1, 4097, 65_000]] = np.inf
    for placement in ("contiguous", "unaligned"):
        records = []
        for clusters in (True, False):
            checked = CheckedTable(pair, vocab, rows, seed=0)
            for i, params in enumerate(asked):
                checked.admit(SamplingParams(seed=i, logprobs=0, **params), [1, 2, 9], [3, 3, 4])
            placed = place(values, pair.device, torch.bfloat16, placement)
            waits = counted(pair, "first_block_waits")
            with launches(pair, clusters=clusters):
                host = checked.step(placed.logits, range(rows))
            if pair.emulated:
                # Two each are of the first pass. Only a second one that is shared takes more.
                waits = counted(pair, "first_block_waits") - waits
                threads = 256
                assert waits > 2 * rows * threads if clusters else waits == 0
            checked.check_state()
            checked.tally.check(ambiguous=0.2)
            assert set(ways(checked, 7)) == {cuda.Way.LISTS}
            records.append(host.record)
        assert torch.equal(*records), placement


@pytest.mark.parametrize("tokens", [200, 500, 520, 1900])
def test_typical_p_of_lists_of_any_length(pair: BackendDevice, tokens: int) -> None:
    """So many tokens hold nearly everything, at few distances from the mean or at many."""
    vocab, rows = 20_000, 4
    rng = np.random.default_rng(tokens)
    values = np.full((rows, vocab), -30.0, np.float32)
    for row in range(rows):
        ids = rng.permutation(vocab)[:tokens]
        values[row, ids] = rng.integers(-3, 4, tokens) if row % 2 else rng.normal(0, 2, tokens)
    checked = CheckedTable(pair, vocab, rows)
    for row, typical_p in enumerate((0.2, 0.5, 0.9, 0.95)):
        checked.admit(SamplingParams(seed=row, typical_p=typical_p, top_p=1.0, logprobs=0))
    for _ in range(3):
        checked.step(torch.from_numpy(values).to(pair.device), range(rows))
    checked.check_state()
    checked.tally.check(ambiguous=0.2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_where_logits_lie_changes_no_bit_of_masked_or_penalised_rows(
    pair: BackendDevice, dtype: torch.dtype
) -> None:
    """The records of rows that are read by tiles, and by sets where they are not aligned."""
    vocab = 3 * 2048 + 1024 + 8
    rng = np.random.default_rng(8)
    penalties = {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.1}
    masks = {"allowed_token_ids": list(range(0, vocab, 3))}
    filters: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"top_k": 20, "logprobs": 5},
        {"top_p": 0.9, "temperature": 0.7},
        {"typical_p": 0.8},
        {},
    ]
    asked = [{**f, **touch} for f in filters for touch in (penalties, masks, penalties | masks)]
    rows = len(asked)
    values = torch.from_numpy(rng.normal(0, 3, (rows, vocab)))
    mask = random_bitmask(rng, rows, vocab)
    mask[::2] = -1
    records = []
    for placement in ("contiguous", "unaligned"):
        table = RequestTable(rows, vocab, device=pair.device, max_logprobs=5, seed=0)
        for i, params in enumerate(asked):
            seen = np.random.default_rng(i).integers(0, vocab, 400).tolist()
            table.admit(
                SamplingParams(**{"seed": i, "logprobs": 0, **params}),
                seen[:350],
                output_token_ids=seen[300:],
            )
        sampler = Sampler(table, pair.backend)
        logits = place(values, pair.device, dtype, placement).logits
        sampler(logits, torch.arange(rows, dtype=torch.int32), grammar_bitmask=mask)
        records.append(sampler._step.output.record.clone())
    assert torch.equal(*records)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seen", [0, 12, 60, 150, 800])
def test_penalties_that_lower_the_best_tokens(
    pair: BackendDevice, seen: int, dtype: torch.dtype
) -> None:
    """So many of a row's largest logits are of tokens that were seen: the groups that are read
    first hold enough others, or more groups do, or the row is read once more."""
    vocab = 20_000
    penalties = {"repetition_penalty": 1.6, "frequency_penalty": 0.3, "presence_penalty": 2.0}
    processed = {"logprobs": 0, "logprobs_mode": "processed"}
    asked: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.0, **processed},
        {"top_k": 50, "top_p": 0.95, "temperature": 0.8, "logprobs": 3, "rank": True},
        {"top_k": 5, "logprob_token_ids": [3, 4], **processed},
        {"top_k": 60, "temperature": 1.5},
        {"top_k": 7, "presence_penalty": 0.0, "frequency_penalty": 0.0, "logprobs": 1},
        {"top_k": 9, "repetition_penalty": 1.0, "presence_penalty": 0.1, **processed},
        {"top_k": 50, "logprobs": 0, "repetition_penalty": 0.7},  # raises some
        {"top_k": 50, "logprobs": 0, "frequency_penalty": -0.5},
        {"top_k": 9, "min_p": 0.1, "logprobs": 0},
        {"top_k": 9, "logprobs": 3, "logprobs_mode": "processed"},
        {"top_k": 20, "logprobs": 0},  # NaN among its logits
        {"top_k": 20, "logprobs": 0},  # +inf
        {"temperature": 0.0, "logprobs": 0},  # equals
    ]
    generator = torch.Generator().manual_seed(seen)
    logits = lm_like_logits(len(asked), vocab, generator) + 8.0
    logits[-1] = 1.0
    best = logits.argsort(dim=1, descending=True)[:, :seen]
    logits[-3, 777] = NAN
    logits[-2, 777] = INF
    checked = CheckedTable(pair, vocab, len(asked), max_logprobs=3)
    for row, params in enumerate(asked):
        ids = [*best[row].tolist(), 5, 19_999]
        checked.admit(
            SamplingParams(**{"seed": row, **penalties, **params}),
            ids[::2],
            ids[1::2] + ids[1:20:4],
        )
    for _ in range(3):
        checked.step(logits.to(pair.device, dtype), range(len(asked)))
    checked.check_state()
    checked.tally.check(ambiguous=0.2)


# Barriers.


@contextmanager
def threads_in_order(seed: int) -> Iterator[None]:
    """In the emulation, a block's threads run in an order that the seed gives; 0: ascending."""
    library = ctypes.CDLL(str(EMULATED))
    set_order = library.graphed_sampling_emulation_set_order
    set_order.argtypes = [ctypes.c_uint64]
    set_order(seed)
    try:
        yield
    finally:
        set_order(0)


# Rows that follow each other without a pause, each worked out by one warp.


def rows_of_every_kind(count: int, vocab: int, dtype: torch.dtype) -> torch.Tensor:
    """Usual rows, and those that a warp leaves to the block."""
    rng = np.random.default_rng(vocab)
    rows = torch.from_numpy(rng.standard_normal((count, vocab), np.float32)) * 3
    rows[3, 17], rows[4, 5000], rows[5] = torch.nan, torch.inf, -torch.inf
    rows[6] = 1.5  # more equals than a list holds
    rows[7, 40:] = -torch.inf  # fewer tokens than groups
    rows[8, 2:] = -torch.inf
    rows[9] *= 1e-3
    rows[10] *= 1e30
    rows[11] = rows[11].round()
    return rows.to(dtype)


@pytest.mark.parametrize("top_n", [0, 5, 24, 25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("tempered", [False, True], ids=["raw", "tempered"])
def test_a_relay_of_warps_gives_the_bits_of_a_block(
    pair: BackendDevice, dtype: torch.dtype, top_n: int, seed: int, tempered: bool
) -> None:
    if seed and not pair.emulated:
        pytest.skip("the order of a GPU's threads cannot be chosen")
    count, vocab = (40 if pair.emulated else 1500), 34_824  # 18 tiles, the last one of 8 tokens
    rng = np.random.default_rng(top_n)
    logits = rows_of_every_kind(24, vocab, dtype).to(pair.device)
    rows = torch.arange(count) % 25 - 1
    rows[count // 2 :] = rows[torch.randperm(count - count // 2)]
    tokens, given = (
        torch.from_numpy(rng.integers(-1 if shape[1:] else 0, vocab, shape)).to(pair.device)
        for shape in ((count,), (count, 3))
    )
    filters = {}
    if tempered:
        temperature = torch.from_numpy(rng.choice(TEMPERATURES, count)).float().to(pair.device)
        processed = torch.from_numpy(rng.random(count) < 0.8).to(pair.device)
        filters = {"temperature": temperature, "processed": processed}

    def score(some: slice) -> torch.Tensor:
        record = new_prompt_output(len(rows[some]), top_n, 3, device=pair.device)
        torch.ops.graphed_sampling.prompt_logprobs_out(
            logits, tokens[some], record, backend="cuda", rows=rows[some].to(pair.device),
            given_ids=given[some], top_n=top_n, **{name: f[some] for name, f in filters.items()},
        )  # fmt: skip
        return record.cpu()

    before = gates_made(pair)
    with threads_in_order(seed) if seed else nullcontext():
        together = score(slice(count))
    relayed = gates_made(pair)
    assert (relayed > before) == (pair.emulated and top_n <= 24)  # else it is no relay
    for first in range(0, count, 8):
        alone = score(slice(first, first + 8))
        assert torch.equal(together[first : first + 8], alone), first
    assert gates_made(pair) == relayed


def gates_made(pair: BackendDevice) -> int:
    """What tells the relay from the block's way, which has none; 0 on a GPU."""
    return counted(pair, "gates")


def multiprocessors(pair: BackendDevice) -> int:
    if pair.emulated:
        return 4
    return torch.cuda.get_device_properties(pair.device).multi_processor_count


@pytest.mark.parametrize("vocab", [16_384, 16_392], ids=lambda v: f"V{v}")  # 8 tiles, and 9
def test_a_relay_of_more_rounds_than_it_lists(pair: BackendDevice, vocab: int) -> None:
    """Blocks list 256 rounds at a time: full lists, empty ones, and what is left of the rounds."""
    blocks = 2 * multiprocessors(pair)
    listed, count = 256 * blocks, 3 * 256 * blocks + 77
    logits = rows_of_every_kind(24, vocab, torch.bfloat16).to(pair.device)
    rng = np.random.default_rng(vocab)
    rows = torch.from_numpy(rng.integers(0, 24, count))
    if pair.emulated:  # some of the first list, none of the second
        rows[torch.from_numpy(rng.random(count) < 0.9)] = -1
    rows[listed : 2 * listed] = -1
    tokens = torch.from_numpy(rng.integers(0, vocab, count)).to(pair.device)
    rows = rows.to(pair.device)

    def score(some: slice) -> torch.Tensor:
        record = new_prompt_output(len(rows[some]), 3, device=pair.device)
        torch.ops.graphed_sampling.prompt_logprobs_out(
            logits, tokens[some], record, backend="cuda", rows=rows[some], top_n=3
        )
        return record

    together = score(slice(count))
    step = 2 * blocks  # so few rows take the other kernel
    for first in range(0, count, step):
        some = slice(first, first + step)
        assert torch.equal(together[some], score(some)), first
    assert (together[listed : 2 * listed, PositionRecord.FLAGS] == RowFlags.PADDING).all()


def test_more_rows_than_31_bits_number(pair: BackendDevice) -> None:
    """Rows that lie in the same memory: there may be any number of them."""
    vocab, count = 16_384, 8 * multiprocessors(pair)
    logits = rows_of_every_kind(24, vocab, torch.float32)[1:2].to(pair.device)
    tokens = torch.arange(count, device=pair.device) % vocab
    records = []
    for number in (1, 2**31 + 8):
        record = new_prompt_output(count, 3, device=pair.device)
        torch.ops.graphed_sampling.prompt_logprobs_out(
            logits.expand(number, vocab), tokens, record, backend="cuda", top_n=3,
            rows=torch.full((count,), number - 1, device=pair.device),
        )  # fmt: skip
        records.append(record)
    assert torch.equal(*records)
    assert not records[0][:, PositionRecord.FLAGS].any()


@pytest.mark.parametrize("vocab", [40, 3000, 20_000], ids=lambda v: f"V{v}")
def test_the_order_of_threads_changes_no_bit(pair: BackendDevice, vocab: int) -> None:
    """Whatever runs first between two barriers: the same records and states."""
    if not pair.emulated:
        pytest.skip("the order of a GPU's threads cannot be chosen")

    def run(seed: int) -> list[torch.Tensor]:
        rng = np.random.default_rng(vocab)
        checked = CheckedTable(pair, vocab, 24, max_logprobs=5, eos_token_ids=[0])
        for slot in range(24):
            prompt, output = (rng.integers(0, vocab, 6).tolist() for _ in range(2))
            checked.admit(random_params(rng, vocab, output, 0.4), prompt, output, slot)
        records = []
        with threads_in_order(seed):
            for step in range(2):
                logits = torch.from_numpy(rng.normal(0, 2, (24, vocab)).astype(np.float32))
                if step:
                    logits = (logits * 4).round() / 4  # ties
                mask = random_bitmask(rng, 24, vocab) if step else None
                words = random_words(rng, 24, 0.1)
                host = checked.step(logits, range(24), bitmask=mask, words=words)
                records.append(host.record)
        checked.check_state()
        return [*records, checked.table.state, checked.table.tables]

    expected = run(0)
    for seed in range(1, 4):
        for record, one in zip(run(seed), expected, strict=True):
            assert torch.equal(record, one), seed


def test_layout_sizes(pair: BackendDevice) -> None:
    """Odd capacities, which move every list of the records."""
    options = {
        "max_logprobs": 3,
        "max_logit_bias": 5,
        "max_stop_ids": 3,
        "max_bad_words": 2,
        "max_bad_word_length": 4,
        "max_logprob_ids": 7,
    }
    rng = np.random.default_rng(1)
    checked = CheckedTable(pair, 77, 6, **options)
    assert isinstance(checked.table.layout, TableLayout)
    for seed in range(6):
        checked.admit(
            SamplingParams(
                seed=seed,
                logit_bias={seed: 1.0, 70: -np.inf},
                bad_words_ids=[[5, 6, 7, 8], [9]],
                stop_token_ids=[3, 76],
                min_tokens=1,
                logprobs=3,
                logprob_token_ids=range(7),
            ),
            [1, 2],
            [5, 6, 7],
        )
    for _ in range(3):
        live = [slot for slot, r in checked.requests.items() if not r.finish]
        logits = torch.from_numpy(rng.normal(0, 1, (len(live), 77)).astype(np.float32))
        checked.step(logits.to(pair.device), live)
    checked.check_state()
    checked.tally.check()
