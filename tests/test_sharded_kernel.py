"""A step whose logits are sharded: every rank draws what one device with all logits draws.

The ranks' steps run one after the other, phase by phase, on one device or in the emulation; those
that wait for each other are at the end, on two streams of a GPU. Every step of `ShardedSampler` is
compared with the `cuda` backend's own, bit for bit, and by `CheckedTable` with the reference.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
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
    BackendDevice,
    CheckedTable,
    backend_devices,
    random_bitmask,
    random_params,
    random_row,
    random_words,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from test_contract import admit_random, run_random_steps
from test_cuda_backend import launches, threads_in_order
from test_ways_through_a_row import route_cases

from graphed_sampling import (
    RequestTable,
    RowFlags,
    Sampler,
    SamplingParams,
    StepOutput,
    new_output,
    new_scratch,
)
from graphed_sampling.backends import cuda
from graphed_sampling.backends.cuda import Failure, Phases, Reason, Shards

CSRC = Path(__file__).parents[1] / "csrc"
needs_sources = pytest.mark.skipif(not CSRC.is_dir(), reason="the sources are not here")
SECOND = 10**9


@pytest.fixture(params=[p for p in backend_devices() if p.values[0].backend == "cuda"])
def pair(request: pytest.FixtureRequest) -> BackendDevice:
    """The backend wherever it can be used."""
    pair: BackendDevice = request.param
    return pair


# What stands for a group of devices.


def even(vocab: int, ranks: int) -> tuple[int, ...]:
    return tuple(vocab * i // ranks for i in range(ranks + 1))


def cut(*shares: float) -> Callable[[int], tuple[int, ...]]:
    """Shards that begin at these shares of the vocabulary, wherever that is."""
    return lambda vocab: (0, *(int(vocab * share) for share in shares), vocab)


SHARDINGS: dict[str, Callable[[int], tuple[int, ...]]] = {
    "1": lambda vocab: even(vocab, 1),
    "2": lambda vocab: even(vocab, 2),
    "3": lambda vocab: even(vocab, 3),
    "4": lambda vocab: even(vocab, 4),
    "8": lambda vocab: even(vocab, 8),
    "16": lambda vocab: even(vocab, 16),
    "uneven": cut(0.05, 0.07, 0.9),
    "empty": cut(0, 0, 0.4, 0.4, 1),
    "odd": lambda vocab: (0, vocab // 2 | 1 if vocab > 2 else vocab, vocab),
    "one-token": lambda vocab: (0, min(1, vocab), max(vocab - 1, min(1, vocab)), vocab),
    "sets": lambda vocab: (0, min(1024, vocab), min(3072, vocab), vocab),
}
shardings = pytest.mark.parametrize("sharding", SHARDINGS)


class Ranks:
    """Replicas of a table, and what ranks of a group have besides: rank 0's table is the table.

    starts: of the shards. rows: of the largest step.
    """

    def __init__(
        self, table: RequestTable, starts: Sequence[int], rows: int, limit_ns: int = SECOND
    ) -> None:
        self.table, self.starts, self.limit_ns = table, tuple(starts), limit_ns
        self.count = len(starts) - 1
        words = cuda.exchange_words(table.layout, rows)
        self.exchange = [self._zeros(words) for _ in range(self.count)]
        self.outputs = [new_output(table, rows).record for _ in range(self.count)]
        self.scratch = [new_scratch(table, "cuda", rows) for _ in range(self.count)]
        self.tables: list[tuple[torch.Tensor, ...]] = []
        self.replicate()

    def _zeros(self, words: int) -> torch.Tensor:
        return torch.zeros(words, dtype=torch.int32, device=self.table.device)

    def replicate(self) -> None:
        """Every rank has the table as it is now."""
        own = (self.table.params, self.table.state, self.table.tables)
        if not self.tables:
            self.tables = [own]
            self.tables += [tuple(t.clone() for t in own) for _ in range(self.count - 1)]
        for replica in self.tables[1:]:
            for tensor, original in zip(replica, own, strict=True):
                tensor.copy_(original)

    def split(self, logits: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's part, in memory whose other elements are poison: a wider row, where the
        part is not the widest, and some tokens more."""
        rows, offset = logits.shape[0], logits.storage_offset() % 8
        widest = max(b - a for a, b in zip(self.starts, self.starts[1:], strict=False))
        width = -(-widest // 8) * 8 + 8
        poison = torch.tensor([INF, NAN, torch.finfo(logits.dtype).max], dtype=logits.dtype)
        parts = []
        for start, end in zip(self.starts, self.starts[1:], strict=False):
            buffer = poison.repeat(-(-(offset + rows * width) // 3) + 1).to(logits.device)
            part = buffer.as_strided((rows, width), (width, 1), offset)
            part[:, : end - start] = logits[:, start:end]
            parts.append(part)
        return parts

    def shards(self, rank: int, parts: Sequence[torch.Tensor]) -> Shards:
        return Shards(
            rank=rank,
            starts=self.starts,
            logits_addresses=tuple(p.data_ptr() for p in parts),
            exchange_addresses=tuple(e.data_ptr() for e in self.exchange),
            limit_ns=self.limit_ns,
        )

    def launch(
        self,
        rank: int,
        parts: Sequence[torch.Tensor],
        slots: torch.Tensor,
        phases: Phases,
        **given: torch.Tensor | None,
    ) -> None:
        options: dict[str, Any] = {"grammar_bitmask": None, "words": None, "given": None, **given}
        cuda.sharded_step(
            parts[rank],
            slots,
            *self.tables[rank],
            self.outputs[rank],
            self.scratch[rank],
            self.exchange[rank],
            self.table.layout,
            self.shards(rank, parts),
            phases=phases,
            **options,
        )

    def step(
        self, parts: Sequence[torch.Tensor], slots: torch.Tensor, **given: torch.Tensor | None
    ) -> None:
        for phase in (Phases.STREAM, Phases.FINISH, Phases.CLOSE):
            for rank in range(self.count):
                self.launch(rank, parts, slots, phase, **given)

    def check_equal(self, rows: int) -> None:
        """Outputs and tables are the same on all ranks, and nobody has given up."""
        for rank in range(self.count):
            assert cuda.failure(self.exchange[rank]) is None, rank
            same_bits(self.outputs[rank][:rows], self.outputs[0][:rows])
            for tensor, first in zip(self.tables[rank], self.tables[0], strict=True):
                same_bits(tensor, first)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> None:
    differing = int((one != other).sum())
    assert differing == 0, f"{differing} of {one.numel()} words differ"


class ShardedSampler:
    """A sampler of a table, by a sharded step, with the one device's step beside it."""

    def __init__(self, table: RequestTable, starts: Sequence[int]) -> None:
        self.table = table
        self.rows = table.max_requests
        self.ranks = Ranks(table, starts, self.rows)
        self.scratch = new_scratch(table, "cuda", self.rows)
        self.output = new_output(table, self.rows).record

    def __call__(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        *,
        grammar_bitmask: torch.Tensor | None = None,
        words: torch.Tensor | None = None,
    ) -> StepOutput:
        table, rows = self.table, logits.shape[0]
        table.upload()
        given = {
            name: None if tensor is None else tensor.to(table.device)
            for name, tensor in (("grammar_bitmask", grammar_bitmask), ("words", words))
        }
        slots = slots.to(table.device)
        self.ranks.replicate()
        twin = [t.clone() for t in self.ranks.tables[0]]
        if rows:
            torch.ops.graphed_sampling.cuda_step(
                logits, slots, *twin, self.output, self.scratch, table.layout.to_ints(), **given
            )
        parts = self.ranks.split(logits)
        before = [p.view(torch.uint8).clone() for p in parts]
        self.ranks.step(parts, slots, **given)
        for part, was in zip(parts, before, strict=True):
            assert torch.equal(part.view(torch.uint8), was), "the logits were modified"
        self.ranks.check_equal(rows)
        same_bits(self.ranks.outputs[0][:rows], self.output[:rows])
        for tensor, one in zip(self.ranks.tables[0], twin, strict=True):
            same_bits(tensor, one)
        return StepOutput(self.ranks.outputs[0][:rows], table.layout)


def sharded(sharding: str, vocab: int) -> Any:
    def make(table: RequestTable, _: str) -> ShardedSampler:
        return ShardedSampler(table, SHARDINGS[sharding](vocab))

    return make


# The contract.


@shardings
@pytest.mark.parametrize("vocab", [1, 5, 33, 1000, 5000], ids=lambda v: f"V{v}")
def test_random_rows(pair: BackendDevice, vocab: int, sharding: str) -> None:
    rng = np.random.default_rng([vocab, list(SHARDINGS).index(sharding)])
    checked = CheckedTable(
        pair, vocab, 20, sampler=sharded(sharding, vocab), eos_token_ids=[vocab // 2]
    )
    slots = admit_random(checked, rng, pair.rows(20, 1, 1) if vocab > 100 else 10, rate=0.3)
    dtype = tuple(DTYPES.values())[len(sharding) % 3]
    run_random_steps(checked, rng, slots, 3, dtype=dtype)
    # bf16 and fp16 make ties, and of 5000 tokens many are narrower than the tolerance.
    checked.tally.check(ambiguous=0.5)


@pytest.mark.parametrize("vocab", [128256, 151936], ids=lambda v: f"V{v}")
@pytest.mark.parametrize("sharding", ["2", "8", "odd"])
def test_large_vocabularies(pair: BackendDevice, vocab: int, sharding: str) -> None:
    rng = np.random.default_rng(vocab)
    checked = CheckedTable(pair, vocab, 4, sampler=sharded(sharding, vocab))
    slots = admit_random(checked, rng, 3)
    run_random_steps(
        checked, rng, slots, 1, dtype=torch.bfloat16, placement="padded", kinds=("zipf", "nan")
    )
    checked.tally.check(ambiguous=0.5)


@pytest.mark.parametrize("vocab", [300_001, 262_144], ids=lambda v: f"V{v}")
def test_as_many_groups_as_are_kept_close_by_and_more(pair: BackendDevice, vocab: int) -> None:
    asked: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"top_k": 40, "top_p": 0.9, "logprobs": 4},
        {"top_k": 9, "logit_bias": {vocab - 1: 30.0, 3: 30.0}, "rank": True, "logprobs": 0},
    ]
    checked = CheckedTable(
        pair, vocab, len(asked), sampler=sharded("3", vocab), max_logprobs=4, penalties=False
    )
    for seed, values in enumerate(asked):
        checked.admit(SamplingParams(seed=seed, **values), slot=seed)
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(0, 5, (len(asked), vocab)).astype(np.float32))
    checked.step(logits.to(pair.device), range(len(asked)))
    checked.tally.check(ambiguous=1.0)


@pytest.mark.parametrize("sharding", ["2", "8", "odd", "empty"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_way_through_a_row(pair: BackendDevice, sharding: str, dtype: str) -> None:
    """Among them those that go over the whole row, several times, in all ranks' memory."""
    cases = route_cases()
    logits = torch.from_numpy(np.stack([row for row, _, _ in cases.values()]).astype(np.float32))
    vocab = logits.shape[1]
    checked = CheckedTable(
        pair, vocab, len(cases), sampler=sharded(sharding, vocab), max_logprobs=4
    )
    for i, (_, values, _) in enumerate(cases.values()):
        mode: Any = "processed" if i % 2 else "raw"
        params = SamplingParams(
            seed=i, logprobs=i % 5, rank=True, logprobs_mode=mode,
            logprob_token_ids=[5, vocab - 1], **values,
        )  # fmt: skip
        checked.admit(params, [1, 2, 3])
    checked.step(logits.to(DTYPES[dtype]).to(pair.device), range(len(cases)))
    checked.check_state()
    checked.tally.check()


@pytest.mark.parametrize("sharding", ["2", "odd"])
def test_flat_rows(pair: BackendDevice, sharding: str) -> None:
    """Whose cut is in a bracket that takes a second pass over the row."""
    vocab = 20_000
    asked: list[dict[str, Any]] = [
        {"top_p": 0.95},
        {"min_p": 0.01},
        {"top_p": 0.9, "frequency_penalty": 1.0, "logit_bias": {9: 2.0, 77: -INF}},
        {"typical_p": 0.5},
        {"top_n_sigma": 1.5, "top_p": 0.4},
    ]
    checked = CheckedTable(pair, vocab, len(asked), sampler=sharded(sharding, vocab))
    for seed, values in enumerate(asked):
        checked.admit(SamplingParams(seed=seed, logprobs=0, **values), [1, 2], [3, 4], slot=seed)
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(0, 1, (len(asked), vocab)).astype(np.float32))
    checked.step(logits.bfloat16().to(pair.device), range(len(asked)))
    checked.check_state()
    checked.tally.check(ambiguous=0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_row(pair: BackendDevice, kind: str) -> None:
    rng = np.random.default_rng(KINDS.index(kind))
    checked = CheckedTable(pair, 37, 40, sampler=sharded("3", 37), eos_token_ids=[0, 36])
    slots = admit_random(checked, rng, 40, rate=0.4)
    run_random_steps(checked, rng, slots, 1, kinds=(kind,))
    limits = {"ambiguous": 0.3, "differences": 0.15} if kind == "subnormal" else {}
    checked.tally.check(**limits)


@pytest.mark.parametrize("placement", ["contiguous", "unaligned"])
def test_one_set_of_several_ranks(pair: BackendDevice, placement: str) -> None:
    """A piece of 8 tokens that six ranks have, beside pieces and sets that one has."""
    vocab = 2100
    starts = (0, 1, 2, 3, 4, 6, 1031, 1032, 2048, 2099, vocab)
    rng = np.random.default_rng(0)
    checked = CheckedTable(pair, vocab, 9, sampler=lambda t, _: ShardedSampler(t, starts))
    slots = admit_random(checked, rng, 9, rate=0.4)
    run_random_steps(checked, rng, slots, 2, dtype=torch.bfloat16, placement=placement)
    checked.tally.check(ambiguous=0.5)


@st.composite
def shard_starts(draw: st.DrawFn, vocab: int) -> tuple[int, ...]:
    ranks = draw(st.integers(1, cuda.MOST_SHARDS))
    near = st.sampled_from([0, 64, 1000, 1016, 1024, 1025, 2048, vocab])
    inner = draw(st.lists(st.integers(0, vocab) | near, min_size=ranks - 1, max_size=ranks - 1))
    return (0, *sorted(inner), vocab)


def test_any_shards_give_the_same_bits(pair: BackendDevice) -> None:
    vocab, rows = 2500, 4
    rng = np.random.default_rng(0)
    logits = np.stack([random_row(rng, vocab, k) for k in ("smooth", "zipf", "ties", "nan")])
    mask = random_bitmask(rng, rows, vocab)

    @settings(max_examples=pair.rows(100, 3), deadline=None, derandomize=True, database=None)
    @given(starts=shard_starts(vocab), masked=st.booleans(), seed=st.integers(0, 9))
    def check(starts: tuple[int, ...], masked: bool, seed: int) -> None:
        rng = np.random.default_rng(seed)
        table = RequestTable(rows, vocab, device=pair.device, seed=0)
        for _ in range(rows):
            table.admit(replace(random_params(rng, vocab), max_tokens=None), [1, 2, 2400])
        sampler = ShardedSampler(table, starts)  # it compares
        sampler(
            torch.from_numpy(logits).to(pair.device),
            torch.arange(rows, dtype=torch.int32),
            grammar_bitmask=mask if masked else None,
        )

    check()


# Launches.


@pytest.mark.parametrize("clusters", [True, False], ids=["clusters", "none"])
@pytest.mark.parametrize("rows", [1, 5, 20, 40], ids=lambda n: f"n{n}")
def test_the_grid_changes_no_bit(pair: BackendDevice, rows: int, clusters: bool) -> None:
    """Rows of several blocks, and a block a row."""
    vocab = 70_000
    table = RequestTable(rows, vocab, device=pair.device, penalties=False, seed=0)
    for seed in range(rows):
        table.admit(SamplingParams(seed=seed, top_k=50, top_p=0.95, logprobs=0))
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(3)) * 3
    with launches(pair, clusters=clusters):
        ShardedSampler(table, SHARDINGS["3"](vocab))(
            logits.to(pair.device), torch.arange(rows, dtype=torch.int32)
        )


@pytest.mark.parametrize("clusters", [True, False], ids=["one-launch", "two-launches"])
@pytest.mark.parametrize("rows", [1, 6], ids=lambda n: f"n{n}")
def test_all_phases_of_a_rank_by_itself(pair: BackendDevice, rows: int, clusters: bool) -> None:
    vocab = 40_000
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1)) * 3
    records = []
    for ranks in (None, 1):
        table = RequestTable(rows, vocab, device=pair.device, seed=0)
        for seed in range(rows):
            params = SamplingParams(seed=seed, top_p=0.9, frequency_penalty=0.5, logprobs=2)
            table.admit(params, [1, 2, 3])
        slots = torch.arange(rows, dtype=torch.int32, device=pair.device)
        if ranks is None:
            sampler = Sampler(table, "cuda")
            for _ in range(3):
                records.append(sampler(logits.to(pair.device), slots).record.clone())
            continue
        table.upload()
        group = Ranks(table, (0, vocab), rows)
        parts = group.split(logits.to(pair.device))
        for expected in records:
            with launches(pair, clusters=clusters):
                group.launch(0, parts, slots, Phases.ALL)
            same_bits(group.outputs[0][:rows], expected)
        group.check_equal(rows)


def test_many_steps_of_changing_rows(pair: BackendDevice) -> None:
    """1000 steps that grow and shrink, with padding and finished rows among them."""
    vocab, most, steps = 1100, 6, 1000
    rng = np.random.default_rng(0)
    table = RequestTable(most, vocab, device=pair.device, penalties=False, seed=0)
    for seed in range(most):
        table.admit(SamplingParams(seed=seed, max_tokens=None if seed else 3))
    table.upload()
    group = Ranks(table, (0, 500, vocab), most)
    logits = torch.from_numpy(rng.normal(0, 2, (most, vocab)).astype(np.float32)).to(pair.device)
    twin = [t.clone() for t in group.tables[0]]
    output, scratch = new_output(table, most).record, new_scratch(table, "cuda", most)
    for step in range(steps):
        rows = int(rng.integers(1, most + 1))
        order = rng.permutation(most)[:rows]
        order[rng.random(rows) < 0.5] = -1
        slots = torch.from_numpy(order.astype(np.int32)).to(pair.device)
        group.step(group.split(logits[:rows]), slots)
        torch.ops.graphed_sampling.cuda_step(
            logits[:rows], slots, *twin, output, scratch, table.layout.to_ints()
        )
        same_bits(group.outputs[1][:rows], output[:rows])
        assert int(group.exchange[0][0]) == step + 1
    group.check_equal(most)
    same_bits(group.tables[1][1], twin[1])


def test_no_rows_is_no_operation(pair: BackendDevice) -> None:
    table = RequestTable(2, 40, device=pair.device)
    group = Ranks(table, (0, 20, 40), 2)
    parts = group.split(torch.zeros(0, 40, device=pair.device))
    group.step(parts, torch.zeros(0, dtype=torch.int32, device=pair.device))
    assert not any(exchange.any() for exchange in group.exchange)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_order_of_threads_changes_no_bit(pair: BackendDevice, seed: int) -> None:
    if not pair.emulated:
        pytest.skip("the order of a GPU's threads cannot be chosen")
    vocab, rows = 9000, 12
    rng = np.random.default_rng(5)
    table = RequestTable(rows, vocab, device=pair.device, seed=0)
    for _ in range(rows):
        output = rng.integers(0, vocab, 6).tolist()
        params = replace(random_params(rng, vocab, output, 0.4), max_tokens=None)
        table.admit(params, rng.integers(0, vocab, 6).tolist(), output_token_ids=output)
    logits = torch.from_numpy(rng.normal(0, 2, (rows, vocab)).astype(np.float32))
    with threads_in_order(seed):
        ShardedSampler(table, SHARDINGS["uneven"](vocab))(
            logits, torch.arange(rows, dtype=torch.int32), words=random_words(rng, rows, 0.2)
        )


# Failures.


def group_of_two(pair: BackendDevice, rows: int, limit_ns: int) -> tuple[Ranks, list[Any]]:
    table = RequestTable(rows, 3000, device=pair.device, seed=0)
    for seed in range(rows):
        table.admit(SamplingParams(seed=seed), [1])
    table.upload()
    group = Ranks(table, (0, 1500, 3000), rows, limit_ns)
    logits = torch.randn(rows, 3000, generator=torch.Generator().manual_seed(0)).to(pair.device)
    slots = torch.arange(rows, dtype=torch.int32, device=pair.device)
    return group, [group.split(logits), slots]


def assert_idle(group: Ranks, rank: int, rows: int, before: Sequence[torch.Tensor]) -> None:
    output = StepOutput(group.outputs[rank][:rows].cpu(), group.table.layout)
    assert output.token_ids.tolist() == [-1] * rows
    assert (output.flags == int(RowFlags.PADDING)).all()
    for tensor, was in zip(group.tables[rank], before, strict=True):
        same_bits(tensor, was)


def test_a_rank_that_does_not_come(pair: BackendDevice) -> None:
    """The others give up within the limit, once for all rows, and stay so until they are reset."""
    rows, limit = 5, SECOND // 20
    group, inputs = group_of_two(pair, rows, limit)
    before = [t.clone() for t in group.tables[0]]
    group.launch(0, *inputs, Phases.STREAM)
    start = time.monotonic()
    group.launch(0, *inputs, Phases.FINISH | Phases.CLOSE)
    failure = cuda.failure(group.exchange[0])
    # Blocks of a GPU wait side by side, and any of them may be the first to give up.
    row = 0 if pair.emulated else failure.row
    assert 0 <= row < rows
    assert failure == Failure(Reason.MISSING, 1, Phases.FINISH, row)
    assert str(failure) == f"rank 1 has not come in time (for its shard of row {row})"
    passed = time.monotonic() - start
    assert passed >= 0.99 * limit / SECOND
    assert_idle(group, 0, rows, before)

    # Rank 1 comes late: it finds what rank 0 sent, but not that rank 0 is through.
    group.launch(1, *inputs, Phases.ALL)
    failure = cuda.failure(group.exchange[1][: cuda.FAILURE_WORDS])
    assert failure == Failure(Reason.MISSING, 0, Phases.CLOSE, 0)
    assert str(failure) == "rank 0 has not come in time (at the end of a step)"
    for rank in (0, 1):
        before = [t.clone() for t in group.tables[rank]]
        group.launch(rank, *inputs, Phases.ALL)
        assert_idle(group, rank, rows, before)
    assert [int(e[0]) for e in group.exchange] == [0, 0]

    for exchange in group.exchange:
        exchange.zero_()
    group.replicate()
    group.step(*inputs)
    group.check_equal(rows)
    assert (group.outputs[0][:, 0] >= 0).all()


def test_giving_up_takes_the_limit_once(pair: BackendDevice) -> None:
    rows, limit = 40, SECOND // 2
    group, inputs = group_of_two(pair, rows, limit)
    start = time.monotonic()
    for _ in range(3):
        group.launch(0, *inputs, Phases.ALL)
    assert cuda.failure(group.exchange[0])
    # Rows and steps one after the other would take 60 s.
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("clusters", [True, False], ids=["one-launch", "two-launches"])
def test_the_step_of_a_failure_is_sent_whole_and_none_after_it(
    pair: BackendDevice, clusters: bool
) -> None:
    """What others take for complete is complete, in whatever order a failing step's blocks run."""
    rows = 7
    group, inputs = group_of_two(pair, rows, SECOND // 20)
    other, start = group.exchange[1], cuda._EXCHANGE_HEADER
    with launches(pair, clusters=clusters):
        group.launch(0, *inputs, Phases.ALL)
        assert cuda.failure(group.exchange[0])
        records = other[start:].view(rows, -1)
        assert records[:, :2].tolist() == [[1, rows]] * rows  # rank 0's signals, of step 1
        maxima = records[:, cuda._SIGNALS :].view(torch.float32)[:, : 1024 // cuda._GROUP]
        windows = inputs[0][0][:, :1024].unflatten(1, (8, 8, 2, 8))  # pieces of 8 by turns
        expected = windows.amax((2, 4)).flatten(1)
        same_bits(maxima, expected)
        other.fill_(7)
        group.launch(0, *inputs, Phases.ALL)
    assert (other == 7).all()


@pytest.mark.parametrize("other_rows", [2, 5], ids=lambda n: f"n{n}")
def test_ranks_that_step_other_rows(pair: BackendDevice, other_rows: int) -> None:
    rows = 3
    group, (parts, slots) = group_of_two(pair, 5, SECOND // 20)
    before = [t.clone() for t in group.tables[0]]
    for rank, number in ((0, rows), (1, other_rows)):
        some = [p[:number] for p in parts]
        group.launch(rank, some, slots[:number], Phases.STREAM)
    for rank, number, other in ((0, rows, 1), (1, other_rows, 0)):
        some = [p[:number] for p in parts]
        group.launch(rank, some, slots[:number], Phases.FINISH | Phases.CLOSE)
        told = str(cuda.failure(group.exchange[rank]))
        assert told.startswith(
            f"rank {other} has come with another step, or another number of rows"
        ), told
        assert_idle(group, rank, number, before)


def test_a_rank_that_is_a_step_ahead(pair: BackendDevice) -> None:
    """As after a reset of one rank alone."""
    group, inputs = group_of_two(pair, 2, SECOND // 20)
    group.step(*inputs)
    group.exchange[1].zero_()
    group.launch(0, *inputs, Phases.STREAM)
    group.launch(1, *inputs, Phases.ALL)
    assert str(cuda.failure(group.exchange[1])).startswith("rank 0 has come with another step")


# Arguments, and what C++ repeats of Python.


def shards(**changed: Any) -> Shards:
    values: dict[str, Any] = {
        "rank": 0,
        "starts": (0, 20, 40),
        "logits_addresses": (64, 128),
        "exchange_addresses": (256, 512),
        "limit_ns": SECOND,
    }
    return Shards(**values | changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rank": 2}, r"rank is 2: it must be in \[0, 2\)"),
        ({"rank": -1}, r"rank is -1: it must be in \[0, 2\)"),
        ({"logits_addresses": ()}, "there are 0 shards: there may be 1 to 16"),
        ({"logits_addresses": (64,) * 17}, "there are 17 shards: there may be 1 to 16"),
        ({"exchange_addresses": (256,)}, "1 of exchange buffers"),
        ({"starts": (0, 40)}, "2 starts"),
        ({"starts": (0, 41, 40)}, "they must ascend from 0"),
        ({"starts": (1, 20, 40)}, "they must ascend from 0"),
        ({"exchange_addresses": (256, 520)}, "aligned to 16 bytes"),
        ({"limit_ns": 0}, "limit_ns is 0: it must be positive"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_shards_are_checked(changed: dict[str, Any], message: str) -> None:
    assert shards().width == 20
    with pytest.raises(ValueError, match=message):
        shards(**changed)


def test_a_step_checks_logits_and_exchange(pair: BackendDevice) -> None:
    group, (parts, slots) = group_of_two(pair, 2, SECOND)
    given = [*group.tables[0], group.outputs[0], group.scratch[0]]
    known = group.shards(0, parts)

    def step(**changed: Any) -> None:
        values = {
            "logits": parts[0],
            "exchange": group.exchange[0],
            "layout": group.table.layout,
            "shards": known,
        } | changed
        cuda.sharded_step(
            values["logits"], slots, *given, values["exchange"], values["layout"], values["shards"]
        )

    for changed, message in (
        ({"logits": parts[0][:, :1499]}, r"they must be \[n, >= 1500\]"),
        ({"logits": parts[0].double()}, "logits have dtype"),
        ({"logits": parts[0].clone()}, "logits do not lie at the rank's address"),
        ({"exchange": group.exchange[0].clone()}, "exchange does not lie at the rank's address"),
        ({"exchange": group.exchange[0][:-1]}, "it must be contiguous torch.int32"),
        ({"exchange": group.exchange[0].float()}, "it must be contiguous torch.int32"),
        ({"shards": replace(known, starts=(0, 1500, 2999))}, "it must end at 3000"),
    ):
        with pytest.raises(ValueError, match=message):
            step(**changed)
    assert not any(e.any() for e in group.exchange)


def test_the_op_checks_what_could_harm_others(pair: BackendDevice) -> None:
    group, (parts, slots) = group_of_two(pair, 2, SECOND)
    names = (
        "logits", "slots", "params", "state", "tables", "output", "scratch", "exchange", "layout",
        "rank", "starts", "logits_addresses", "exchange_addresses", "limit_ns", "phases",
    )  # fmt: skip
    known = group.shards(0, parts)
    values = (
        parts[0], slots, *group.tables[0], group.outputs[0], group.scratch[0], group.exchange[0],
        group.table.layout.to_ints(), 0, known.starts, known.logits_addresses,
        known.exchange_addresses, SECOND, 7,
    )  # fmt: skip
    good = dict(zip(names, values, strict=True))
    other = known.exchange_addresses[1]
    for name, value, message in (
        ("logits", parts[0][:, :9], "logits have 9 columns; the shard has 1500 tokens"),
        ("logits", parts[0].clone(), "do not lie at the rank's address"),
        ("exchange", group.exchange[0][:-1], "exchange must be contiguous int32 of at least"),
        ("exchange", group.exchange[1], "does not lie at the rank's address"),
        ("rank", 2, "rank is 2 of 2"),
        ("starts", [0, 3000], "there are 2 starts"),
        ("starts", [0, 3001, 3000], "must ascend"),
        ("starts", [0, 1500, 2999], "from 0 to the vocabulary's size"),
        ("logits_addresses", [], "there are 0 ranks"),
        ("exchange_addresses", [known.exchange_addresses[0], other + 8], "aligned to 16 bytes"),
        ("limit_ns", 0, "limit_ns is 0"),
        ("phases", 0, "phases are 0"),
        ("phases", 5, "phases are 5"),
        ("phases", 8, "phases are 8"),
    ):
        with pytest.raises(RuntimeError, match=message):
            torch.ops.graphed_sampling.cuda_sharded_step(*(good | {name: value}).values())
    assert not any(e.any() for e in group.exchange)


def test_exchange_buffers_are_what_cpp_takes(pair: BackendDevice) -> None:
    """A word less than `exchange_words` is refused by either, so both count the same."""
    for vocab, rows in ((5, 1), (2049, 7), (300_000, 2)):
        table = RequestTable(rows, vocab, device=pair.device, penalties=False)
        group = Ranks(table, (0, vocab), rows)
        parts = group.split(torch.zeros(rows, vocab, device=pair.device))
        slots = torch.full((rows,), -1, dtype=torch.int32, device=pair.device)
        group.launch(0, parts, slots, Phases.ALL)
        known = group.shards(0, parts)
        arguments = (
            parts[0], slots, *group.tables[0], group.outputs[0], group.scratch[0],
            group.exchange[0][:-1], table.layout.to_ints(), 0, known.starts,
            known.logits_addresses, known.exchange_addresses, SECOND, 7,
        )  # fmt: skip
        words = cuda.exchange_words(table.layout, rows)
        with pytest.raises(RuntimeError, match=f"exchange must be .* of at least {words} words"):
            torch.ops.graphed_sampling.cuda_sharded_step(*arguments)


@needs_sources
def test_numbers_are_the_same_in_cpp() -> None:
    source = "".join(
        (CSRC / name).read_text() for name in ("sharded_step.h", "step/exchange.h", "logits_type.h")
    )
    found = {name: int(value) for name, value in re.findall(r"\bk(\w+) = (\d+)", source)}
    assert slice(found["Failure"], found["FailedRow"] + 1) == cuda._FAILURE
    assert found["FailedRow"] + 1 == cuda.FAILURE_WORDS
    bits = (found["FailedRankBit"], found["FailedPhaseBit"])
    assert bits == (cuda._FAILED_RANK_BIT, cuda._FAILED_PHASE_BIT)
    assert found["MostShards"] == cuda.MOST_SHARDS
    assert found["Closed"] == 0
    for word in Reason:
        assert found[word.name.capitalize()] == word
    for phase in (Phases.STREAM, Phases.FINISH, Phases.CLOSE):
        assert found[f"{str(phase.name).capitalize()}Phase"] == phase
    assert int(Phases.ALL) == 7


# Ranks that wait for each other.


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("graphed", [False, True], ids=["eager", "graphed"])
@pytest.mark.parametrize("rows", [1, 4, 40], ids=lambda n: f"n{n}")
def test_two_ranks_on_two_streams(rows: int, graphed: bool) -> None:
    """Both steps are on the device at once, and each waits for the other."""
    device, vocab, steps = torch.device("cuda"), 128_256, 51
    table = RequestTable(rows, vocab, device=device, seed=0)
    for seed in range(rows):
        table.admit(SamplingParams(seed=seed, top_k=50, top_p=0.95, logprobs=0), [1, 2])
    table.upload()
    group = Ranks(table, even(vocab, 2), rows, 5 * SECOND)
    logits = torch.randn(rows, vocab, device=device).bfloat16() * 3
    parts = group.split(logits)
    slots = torch.arange(rows, dtype=torch.int32, device=device)
    twin = [t.clone() for t in group.tables[0]]
    output, scratch = new_output(table, rows).record, new_scratch(table, "cuda", rows)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    sizes = (rows, rows // 2 or 1)

    def launch(rank: int, size: int) -> None:
        group.launch(rank, [p[:size] for p in parts], slots[:size], Phases.ALL)

    graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
    for step in range(steps):
        size = sizes[step % 2]
        for rank, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                if (rank, size) in graphs:
                    graphs[rank, size].replay()
                else:
                    launch(rank, size)
        if graphed and not step:  # the kernel has been loaded
            torch.cuda.synchronize()
            for rank, stream in enumerate(streams):
                for each in set(sizes):
                    graphs[rank, each] = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graphs[rank, each], stream=stream):
                        launch(rank, each)
        torch.ops.graphed_sampling.cuda_step(
            logits[:size], slots[:size], *twin, output, scratch, table.layout.to_ints()
        )
    torch.cuda.synchronize()
    group.check_equal(rows)
    same_bits(group.outputs[0][:rows], output[:rows])
    same_bits(group.tables[0][1], twin[1])
