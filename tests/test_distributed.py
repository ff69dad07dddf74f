"""Samplers of several ranks: processes on this machine, joined by gloo; on GPUs by NCCL."""

from __future__ import annotations

import os
import runpy
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import BENIGN_KINDS, KINDS
from histories import History, used_state
from hypothesis import given
from hypothesis import strategies as st
from ranks import Ranks

from graphed_sampling import (
    RequestTable,
    RowFlags,
    Sampler,
    SamplingParams,
    StepOutput,
    backends,
)
from graphed_sampling.backends import cuda
from graphed_sampling.distributed import (
    RankError,
    SingleRankSampler,
    VocabParallelSampler,
    even_vocab_ranges,
    symmetric,
    transports,
    vocab_parallel,
)
from graphed_sampling.distributed.shards import check_vocab_ranges

EXAMPLE = Path(__file__).parents[1] / "examples" / "vocab_parallel.py"
V = 70
TIMEOUT = 2.0
BOUND = 2 * TIMEOUT + 3.0
"""Seconds within which an error is there: the timeout, then the posts, on a busy machine."""
CPU_BACKENDS = [
    name for name in ("cpu", "torch") if not backends.module(name).unusable(torch.device("cpu"))
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    for backend in CPU_BACKENDS:
        Sampler(make_table(), backend)  # what this compiles, the ranks take from the cache
    pool = Ranks(4)
    yield pool
    pool.close()


# Which rank has what.


def test_even_ranges_are_those_of_a_padded_vocabulary() -> None:
    assert even_vocab_ranges(8, 2) == ((0, 4), (4, 8))
    assert even_vocab_ranges(7, 2) == ((0, 4), (4, 7))
    assert even_vocab_ranges(7, 2, 16) == ((0, 7), (7, 7))
    assert even_vocab_ranges(7, 4, 16) == ((0, 4), (4, 7), (7, 7), (7, 7))
    for wrong in ((0, 2, None), (7, 0, None), (7, 2, 9), (7, 2, 6)):
        with pytest.raises(ValueError, match=r"vocab_size|padded_size"):
            even_vocab_ranges(*wrong)


@given(st.integers(1, 1000), st.integers(1, 40), st.integers(0, 50))
def test_even_ranges_tile_the_vocabulary(vocab_size: int, num_ranks: int, more: int) -> None:
    width = -(-vocab_size // num_ranks) + more
    ranges = even_vocab_ranges(vocab_size, num_ranks, width * num_ranks)
    assert check_vocab_ranges(vocab_size, num_ranks, None, ranges) == ranges
    assert all(end - start <= width for start, end in ranges)
    assert [i for start, end in ranges for i in range(start, end)] == list(range(vocab_size))


@pytest.mark.parametrize(
    ("sizes", "ranges", "message"),
    [
        ([3, 4], [(0, 3), (3, 7)], "say the same"),
        ([3, 4, 0], None, "one for each of 2 ranks"),
        ([3, 5], None, "end at 8"),
        ([8, -1], None, "without gaps"),
        (None, [(0, 3), (4, 7)], "without gaps"),
        (None, [(0, 4), (3, 7)], "without gaps"),
        (None, [(0, 3, 4), (3, 7)], "pairs"),
        (None, [(0, 7), ()], "pairs"),
        (None, [0, 7], "pairs"),
        (None, 5, "vocab_ranges = 5"),
        (7, None, "shard_sizes = 7"),
        (None, [(0.5, 3), (3, 7)], "vocab_ranges"),
    ],
)
def test_ranges_that_do_not_tile_the_vocabulary_are_refused(
    sizes: Any, ranges: Any, message: str
) -> None:
    assert check_vocab_ranges(7, 2, [3, 4]) == check_vocab_ranges(7, 2, None, [(0, 3), (3, 7)])
    with pytest.raises(ValueError, match=message):
        check_vocab_ranges(7, 2, sizes, ranges)


# The contract, on all ranks.


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Of a rank: processes joined by NCCL have a GPU each."""
    on_gpu = dist.get_backend(group) == "nccl"
    return torch.device("cuda", group.rank()) if on_gpu else torch.device("cpu")


def same_records(one: StepOutput, other: StepOutput) -> bool:
    """Bit for bit, but that a NaN is as good as another."""

    def canonical(record: torch.Tensor) -> torch.Tensor:
        return record.masked_fill(record.view(torch.float32).isnan(), -1)

    return torch.equal(canonical(one.record), canonical(other.record))


def shard(
    logits: torch.Tensor, sampler: VocabParallelSampler, rank: int, *, poison: bool
) -> torch.Tensor:
    """The rank's part of full logits; with poison, padded to the buffer's width, which would win
    if it were read."""
    start, end = sampler.vocab_ranges[rank]
    part = logits[:, start:end]
    if not poison:
        return part
    padded = logits.new_full((len(logits), sampler.logits_width), float("inf"))
    padded[:, : end - start] = part
    return padded


def live(
    group: dist.ProcessGroup,
    backend: str,
    dtype: torch.dtype,
    steps: int,
    options: dict[str, Any],
    kinds: Sequence[str] = KINDS,
    most_rows: int = 6,
    change_every: int = 1,
    state_every: int = 1,
) -> dict[str, int]:
    """Steps of a random history, compared with those of one device that has all logits."""
    rank, device = group.rank(), device_of(group)
    history = History(len(kinds), V, 7, kinds=kinds, dtype=dtype)
    table, expected_table = history.table(device), history.table(device)
    sampler = VocabParallelSampler(
        table, group, backend=backend, logits_dtype=dtype, row_buckets=(1, 3, 6), **options
    )
    single = Sampler(expected_table, backend)
    counts = {"rows": 0, "finished": 0}
    for number in range(steps):
        if number % change_every == 0:
            history.change(table, expected_table)
        inputs = history.step(most_rows)
        whole = inputs.logits.to(device)
        expected = single(whole, inputs.slots, **inputs.optional)
        logits = shard(whole, sampler, rank, poison=number % 2 == 0)
        if number % 3 == 0:
            buffer = sampler.logits_buffer(len(logits))
            buffer[:, : logits.shape[1]] = logits
            logits = buffer
        output = sampler(logits, inputs.slots, **inputs.optional)
        assert same_records(output, expected), number
        if number % state_every == 0:
            assert torch.equal(used_state(table), used_state(expected_table)), number
        counts["rows"] += int((output.token_ids >= 0).sum())
        counts["finished"] += int((output.finish_reason > 0).sum())
    sampler.close()
    return counts


SHARDS = {
    "even": {},
    "wide": {"logits_width": 90},
    "uneven": {"shard_sizes": [1, 40, 9, 20]},
    "empty": {"vocab_ranges": [(0, 0), (0, 33), (33, 33), (33, 70)]},
    "one": {"shard_sizes": [0, 0, 0, 70]},
}


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_all_ranks_have_what_one_device_has(ranks: Ranks, backend: str, shards: str) -> None:
    dtype = {"even": torch.bfloat16, "uneven": torch.float16}.get(shards, torch.float32)
    found = ranks.run(live, backend, dtype, 40, SHARDS[shards])
    assert found[0]["rows"] > 60 and found[0]["finished"] > 0
    assert all(counts == found[0] for counts in found)


# The symmetric transport, where the cuda backend runs in its emulation: processes that share memory
# stand for GPUs that do.

needs_emulation = pytest.mark.skipif(
    not hasattr(cuda, "sharded_step") or bool(cuda.unusable(torch.device("cpu"))),
    reason="the emulation of the cuda backend's sharded step is not loaded",
)


def shared_memory(
    group: dist.ProcessGroup, count: int, dtype: torch.dtype, device: torch.device
) -> symmetric.SymmetricMemory:
    """`symmetric.symmetric_memory` of processes on the CPU."""
    names: list[Any] = [None] * group.size()
    dist.all_gather_object(names, f"/dev/shm/{secrets.token_hex(8)}", group=group)
    own = Path(names[group.rank()])
    own.write_bytes(bytes(count * dtype.itemsize + 64))
    dist.barrier(group)
    mapped = [torch.from_file(name, shared=True, size=count, dtype=dtype) for name in names]
    dist.barrier(group)
    own.unlink()
    addresses = tuple(tensor.data_ptr() for tensor in mapped)
    return symmetric.SymmetricMemory(mapped[group.rank()], addresses, mapped)


def with_shared_memory(
    group: dist.ProcessGroup, function: Callable[..., Any], *arguments: Any
) -> Any:
    """Run a function with a transport "symmetric" that serves here."""
    place_of = vocab_parallel.place_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symmetric, "symmetric_memory", shared_memory)
        patch.setattr(transports, "_unreachable", lambda places, certainly: "")
        patch.setattr(
            vocab_parallel, "place_of", lambda *args: place_of(*args)._replace(obstacle="")
        )
        return function(group, *arguments)


@needs_emulation
@pytest.mark.parametrize("shards", SHARDS)
def test_the_symmetric_transport_has_what_one_device_has(ranks: Ranks, shards: str) -> None:
    dtype = {"even": torch.bfloat16, "uneven": torch.float16}.get(shards, torch.float32)
    options = SHARDS[shards] | {"transport": "symmetric"}
    found = ranks.run(with_shared_memory, live, "cuda", dtype, 15, options)
    assert found[0]["rows"] > 20
    assert all(counts == found[0] for counts in found)


def step_alone(group: dist.ProcessGroup) -> tuple[Any, ...] | None:
    """What rank 0 gets where rank 1 does not come, and nobody but the kernel waits for it."""
    table = make_table()
    sampler = VocabParallelSampler(
        table, group, backend="cuda", transport="symmetric", timeout=TIMEOUT
    )
    slots = torch.tensor([table.admit(SamplingParams())], dtype=torch.int32)
    sampler(sampler.logits_buffer(1), slots)
    dist.barrier(group)
    if group.rank() == 1:
        time.sleep(BOUND)
        return None
    sampler._agreement._confirm = lambda: None  # type: ignore[method-assign]
    start = time.monotonic()
    output = sampler(sampler.logits_buffer(1), slots)
    assert output.token_ids.tolist() == [-1] and output.flags.tolist() == [RowFlags.PADDING]
    assert table.positions[0] == 1  # it did not advance
    errors = []
    for _ in range(2):
        with pytest.raises(RankError) as error:
            sampler(sampler.logits_buffer(1), slots)
        errors.append(error.value)
    return errors[0].ranks, str(errors[0]), time.monotonic() - start, errors[0] is errors[1]


@needs_emulation
def test_the_kernel_names_a_rank_that_does_not_come(ranks: Ranks) -> None:
    found, _ = ranks.run(with_shared_memory, step_alone, ranks=[0, 1])
    named, text, elapsed, again = found
    assert named == (1,) and "step 2 or before, rank 1 has not come in time" in text
    assert TIMEOUT <= elapsed < BOUND and again


def test_the_symmetric_transport_is_for_gpus(ranks: Ranks) -> None:
    for kind, text in ranks.run(make_unlike, 4, "symmetric", ranks=[0, 1]):
        assert kind == "ValueError"
        assert "transport = 'symmetric' is not possible: rank 0: the table is on cpu" in text


def test_ten_thousand_steps(ranks: Ranks) -> None:
    backend = CPU_BACKENDS[0]
    arguments = (backend, torch.float32, 10_000, {}, BENIGN_KINDS, 3, 4, 10)
    found = ranks.run(live, *arguments, ranks=[0, 1])
    assert found[0]["rows"] > 10_000 and found[0] == found[1]


def step_nothing(group: dist.ProcessGroup) -> None:
    table = make_table()
    sampler = VocabParallelSampler(table, group)
    output = sampler(torch.zeros(0, sampler.logits_width), torch.zeros(0, dtype=torch.int32))
    assert output.token_ids.shape == (0,)
    padding = torch.full((3,), -1, dtype=torch.int32)
    output = sampler(sampler.logits_buffer(3), padding)
    assert (output.flags == RowFlags.PADDING).all() and (output.token_ids == -1).all()
    slots = torch.tensor([table.admit(SamplingParams())], dtype=torch.int32)
    for wrong, message in (
        ((torch.zeros(1, 3), slots), "logits have shape"),
        ((torch.zeros(1, 900), slots), "columns"),
        ((torch.zeros(1, 40).bfloat16(), slots), "dtype"),
        ((torch.zeros(1, 35), slots + 1), "not admitted"),
        ((torch.zeros(9, 35), padding.repeat(3)), "largest bucket"),
        ((torch.zeros(35, 1).t()[:, ::2], slots), "logits"),
        ((sampler.logits_buffer(4)[1:], padding), "own buffer"),
    ):
        with pytest.raises(ValueError, match=message):
            sampler(*wrong)
    # What one rank refuses, it refuses before the others hear of it: what a table refuses when it
    # uploads too.
    if group.rank() == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(table, "upload", refuse)
            with pytest.raises(ValueError, match="given to another"):
                sampler(sampler.logits_buffer(1), slots)
    assert sampler(torch.zeros(1, sampler.logits_width), slots).token_ids.shape == (1,)
    sampler.close()
    with pytest.raises(RuntimeError, match="the sampler was closed"):
        sampler(sampler.logits_buffer(1), slots)


def refuse(claim: object) -> None:
    raise ValueError("slot 0 was given to another request")


def test_nothing_and_what_is_refused(ranks: Ranks) -> None:
    ranks.run(step_nothing, ranks=[1, 2])


def refuse_own_rows(group: dist.ProcessGroup) -> None:
    table = make_table()
    sampler = VocabParallelSampler(
        table, group, shard_sizes=[1, V - 1], backend="cuda", transport="symmetric"
    )
    # Rows lie as far apart as those of the widest shard.
    for begin in range(1, 4):
        with pytest.raises(ValueError, match="own buffer"):
            sampler(sampler.logits_buffer(4)[begin:], torch.full((4 - begin,), -1).int())


@needs_emulation
def test_rows_within_the_buffer_are_refused(ranks: Ranks) -> None:
    ranks.run(with_shared_memory, refuse_own_rows, ranks=[0, 1])


def step_two_samplers(group: dist.ProcessGroup, alike: bool) -> tuple[Any, ...]:
    """What comes of steps of two samplers of one group: the same order on all ranks, or another."""
    tables = [make_table(), make_table()]
    samplers = [
        VocabParallelSampler(tables[0], group, timeout=TIMEOUT),
        SingleRankSampler(tables[1], group, group.size() - 1, timeout=TIMEOUT),
    ]
    slots = torch.tensor([0], dtype=torch.int32)
    logits = samplers[0].logits_buffer(1), None
    if group.rank() == samplers[1].source_rank:
        logits = logits[0], torch.zeros(1, V)
    for table in tables:
        table.admit(SamplingParams())
    order = (0, 1, 0, 1, 1)
    for number, i in enumerate(order):
        if number == 3 and group.rank() == 1 and not alike:
            i = 0
        try:
            samplers[i](logits[i], slots)
        except RankError as error:
            return number, error.ranks, str(error)
    return tuple(int(table.positions[0]) for table in tables)


def test_samplers_of_one_group_are_not_confused(ranks: Ranks) -> None:
    assert ranks.run(step_two_samplers, True, ranks=[0, 1, 2]) == [(2, 3)] * 3
    for number, named, text in ranks.run(step_two_samplers, False, ranks=[0, 1, 2]):
        assert number == 3 and named == (1,)
        assert "rank 1 steps another sampler of the group" in text


# One rank samples.


def listen(
    group: dist.ProcessGroup, backend: str, source: int, reports: bool, overlap: bool = False
) -> dict[str, int]:
    """Steps of a random history that one rank takes, compared with those of one device."""

    def supported(params: SamplingParams) -> SamplingParams:
        quiet = {} if reports else {"logprobs": None, "rank": False, "logprob_token_ids": ()}
        return replace(params, **quiet)

    is_source = group.rank() == source
    history = History(source, V, 7, supported=supported)
    device = device_of(group)
    table, expected_table = history.table(device), history.table(device)
    sampler = SingleRankSampler(
        table, group, source, row_buckets=(2, 5, 6), backend=backend, overlap=overlap
    )
    single = Sampler(expected_table, backend)
    sizes: set[int] = set()
    broadcast = sampler._agreement.collectives.broadcast

    def spy(tensor: torch.Tensor, source: int) -> None:
        sizes.add(tensor.numel() * tensor.element_size())
        broadcast(tensor, source)

    sampler._agreement.collectives.broadcast = spy  # type: ignore[method-assign]
    counts = {"rows": 0, "finished": 0, "least bytes": 0, "most bytes": 0}
    for number in range(60):
        history.change(table, expected_table)
        inputs = history.step(1 + number % 6)
        whole = inputs.logits.to(device)
        expected = single(whole, inputs.slots, **inputs.optional)
        if is_source:
            logits = whole
            if number % 2:
                logits = sampler.logits_buffer(len(logits))
                logits.copy_(whole)
            output = sampler(logits, inputs.slots, **inputs.optional)
        else:
            output = sampler(None, inputs.slots)
        if overlap:
            sampler.wait()
        assert same_records(output, expected), number
        assert torch.equal(used_state(table), used_state(expected_table)), number
        counts["rows"] += int((output.token_ids >= 0).sum())
        counts["finished"] += int((output.finish_reason > 0).sum())

    def zeros(rows: int) -> torch.Tensor | None:
        return torch.zeros(rows, V, device=device) if is_source else None

    assert sampler(zeros(0), inputs.slots[:0]).flags.shape == (0,)
    for wrong in (None, torch.zeros(3, V, device=device)):
        if is_source == (wrong is None):
            with pytest.raises(ValueError, match="logits are"):
                sampler(wrong, torch.full((3,), -1, dtype=torch.int32))
    for slots in (torch.zeros(7, dtype=torch.int32), torch.tensor([9]).int(), torch.zeros(1)):
        with pytest.raises(ValueError, match=r"largest bucket|slots"):
            sampler(zeros(len(slots)), slots)
    if not is_source:
        with pytest.raises(ValueError, match="logits are the source's"):
            sampler.logits_buffer(1)
    sampler.close()
    with pytest.raises(RuntimeError, match="the sampler was closed"):
        sampler(zeros(1), torch.tensor([-1], dtype=torch.int32))
    return counts | {"least bytes": min(sizes), "most bytes": max(sizes)}


@pytest.mark.parametrize("source", [0, 2])
@pytest.mark.parametrize("reports", [False, True])
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_all_ranks_hear_what_one_has_sampled(
    ranks: Ranks, backend: str, reports: bool, source: int
) -> None:
    found = ranks.run(listen, backend, source, reports, ranks=[0, 1, 2])
    assert found[0]["rows"] > 60 and found[0]["finished"] > 0
    assert all(counts == found[0] for counts in found)
    if not reports:
        assert found[0]["least bytes"] == 16 * 2 and found[0]["most bytes"] == 16 * 6
    else:
        assert found[0]["most bytes"] == 4 * 6 * History(0, V, 7).table().layout.output_words


def listen_and_fail(group: dist.ProcessGroup, mode: str, odd_one: int) -> tuple[Any, ...]:
    """As `step_and_fail`, of a sampler whose source is rank 0."""
    table = make_table()
    sampler = SingleRankSampler(table, group, timeout=TIMEOUT)
    slots = torch.tensor([table.admit(SamplingParams(), [i]) for i in range(3)], dtype=torch.int32)
    logits = torch.zeros(3, V) if group.rank() == 0 else None
    for _ in range(10):
        sampler(logits, slots)
    if group.rank() == odd_one:
        if mode == "late":
            time.sleep(BOUND)
        if mode == "slots":
            slots = slots.flip(0)
        if mode == "reports":
            table.update(0, SamplingParams(logprobs=0))
    start = time.monotonic()
    errors = []
    for _ in range(2):
        try:
            sampler(logits, slots)
        except RankError as error:
            errors.append(error)
    return errors[0].ranks, str(errors[0]), time.monotonic() - start, len(errors) == 2


@pytest.mark.parametrize(
    ("mode", "odd_one"), [("slots", 0), ("slots", 1), ("reports", 2), ("late", 0)]
)
def test_a_rank_that_listens_for_something_else_is_named(
    ranks: Ranks, mode: str, odd_one: int
) -> None:
    for named, text, elapsed, again in ranks.run(listen_and_fail, mode, odd_one, ranks=[0, 1, 2]):
        assert named == (odd_one,), text
        assert "step 11" in text and elapsed < BOUND and again


# The example.


def run_example(group: dist.ProcessGroup) -> list[list[int]]:
    example = runpy.run_path(str(EXAMPLE))
    with torch.no_grad():
        texts: list[list[int]] = example["generate"](group, torch.device("cpu"), 6)
    return texts


@pytest.mark.skipif(not EXAMPLE.is_file(), reason="the examples are not here")
def test_the_example_has_the_same_tokens_for_any_number_of_ranks(ranks: Ranks) -> None:
    alone = ranks.run(run_example, ranks=[3])
    assert [len(text) for text in alone[0]] == [6, 6, 6]
    assert ranks.run(run_example, ranks=[0, 1]) == alone * 2


# Ranks that are not alike.


def make_table(**changes: Any) -> RequestTable:
    return RequestTable(
        4, V, device="cpu", **({"seed": 3, "penalties": False, "eos_token_ids": (5,)} | changes)
    )


def make_unlike(group: dist.ProcessGroup, odd_one: int, name: str) -> tuple[str, str]:
    """The error's type and text where one rank's sampler is made with something else."""
    tables: dict[str, Any] = {
        "sizes": {"max_logprobs": 3},
        "eos_token_ids": {"eos_token_ids": (4,)},
        "seed": {"seed": 4},
        "no seed": {"seed": None},
    }
    if name == "symmetric":
        odd_one = group.rank()
    samplers: dict[str, Any] = {
        "symmetric": {"transport": "symmetric"},
        "backend": {"backend": "torch"},
        "row_buckets": {"row_buckets": (1, 7)},
        "logits_dtype": {"logits_dtype": torch.float16},
        "vocab_ranges": {"shard_sizes": [1, V - 1]},
        "timeout": {"timeout": 3.0},
        "transport": {"transport": "exchange"},
        "wrong": {"transport": "pigeon"},
        "wrong width": {"logits_width": 2},
        "wrong type": {"shard_sizes": map(len, [5])},
        "short": {"timeout": 1e-4},
        "long": {"timeout": 1e14},
    }
    is_odd = group.rank() == odd_one
    table = make_table(**(tables.get(name, {}) if is_odd else {}))
    options = {"backend": CPU_BACKENDS[0]} | (samplers.get(name, {}) if is_odd else {})
    try:
        VocabParallelSampler(table, group, **options)
    except (TypeError, ValueError) as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sizes", "table's sizes must be the same on all ranks; rank 1 differs"),
        ("eos_token_ids", "table's eos_token_ids must be the same on all ranks; rank 1 differs"),
        ("seed", "table's seed must be the same on all ranks; rank 1 differs"),
        ("no seed", "the tables of all ranks with the same seed"),
        ("backend", "backend must be the same on all ranks; rank 1 differs"),
        ("row_buckets", "row_buckets must be the same"),
        ("logits_dtype", "logits_dtype must be the same"),
        ("vocab_ranges", "vocab_ranges must be the same"),
        ("timeout", "timeout must be the same"),
        ("transport", "transport must be the same"),
        ("wrong", "'pigeon' is not accepted"),
        ("wrong width", "logits_width = 2 is not accepted"),
        ("wrong type", "object of type 'int' has no len()"),
        ("short", "timeout = 0.0001 is not accepted"),
        ("long", "timeout = 100000000000000.0 is not accepted"),
    ],
)
def test_ranks_that_are_not_alike_are_refused_by_all(ranks: Ranks, name: str, message: str) -> None:
    if name == "backend" and CPU_BACKENDS[0] == "torch":
        pytest.skip("there is one backend")
    (kind, text), (own_kind, own_text) = ranks.run(make_unlike, 1, name, ranks=[0, 1])
    assert kind == "ValueError" and message in text, text
    assert own_kind == ("TypeError" if name == "wrong type" else kind) and message in own_text


def test_a_process_without_a_group_is_told_so() -> None:
    with pytest.raises(ValueError, match="init_process_group"):
        VocabParallelSampler(make_table())


# Ranks that fail.


def step_and_fail(group: dist.ProcessGroup, mode: str, odd_one: int) -> tuple[Any, ...] | None:
    """Ten steps; then the odd one does something else. The error that each rank gets: its ranks,
    its text, after how many seconds, and whether the next call raises the same."""
    table = make_table()
    sampler = VocabParallelSampler(table, group, row_buckets=(4, 8), timeout=TIMEOUT)
    slots = torch.tensor(
        [table.admit(SamplingParams(logprobs=0), [i]) for i in range(3)], dtype=torch.int32
    )
    buffer = sampler.logits_buffer(8)
    buffer.zero_()
    for _ in range(10):
        sampler(buffer[:3], slots)
    is_odd = group.rank() == odd_one
    dist.barrier(group)
    call = {"logits": buffer[:3], "slots": slots}
    if is_odd:
        if mode == "killed":
            os._exit(1)
        if mode == "late":
            time.sleep(BOUND)
        if mode == "rows":
            call = {"logits": buffer[:2], "slots": slots[:2]}
        if mode == "bucket":
            padding = torch.full((3,), -1, dtype=torch.int32)
            call = {"logits": buffer[:6], "slots": torch.cat([slots, padding])}
        if mode == "slots":
            call["slots"] = slots.flip(0)
        if mode == "inputs":
            call["words"] = torch.zeros(3, dtype=torch.int64)
        if mode == "parameters":
            table.update(1, SamplingParams(temperature=0.5, logprobs=0))
        if mode == "seed":
            table.update(1, SamplingParams(seed=1, logprobs=0))
        if mode == "another request":
            table.release(2)
            table.admit(SamplingParams(logprobs=0), [7], slot=2)
    start = time.monotonic()
    errors = []
    for _ in range(2):
        try:
            sampler(**call)
        except RankError as error:
            errors.append(error)
    assert len(errors) == 2
    elapsed = time.monotonic() - start
    state = used_state(table) if mode in ("rows", "slots", "bucket") else None
    if state is not None:
        assert table.positions[:3].tolist() == [11, 11, 11]  # nothing was done
    return errors[0].ranks, str(errors[0]), elapsed, str(errors[0]) == str(errors[1])


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("rows", "disagree, rows: 3 on rank 0, 3 on rank 1, 2 on rank 2"),
        ("bucket", "disagree, rows"),
        ("inputs", "disagree, inputs"),
        ("slots", "rank 2 has other slots"),
        ("parameters", "rank 2 has other slots, or other requests"),
        ("seed", "rank 2 has other slots, or other requests"),
        ("another request", "rank 2 has other slots, or other requests"),
        ("late", "rank 2 did not reach it"),
    ],
)
def test_a_rank_that_does_something_else_is_named(ranks: Ranks, mode: str, message: str) -> None:
    found = ranks.run(step_and_fail, mode, 2, ranks=[0, 1, 2])
    for named, text, elapsed, again in found:
        assert named == (2,) and message in text and "step 11" in text, text
        assert elapsed < BOUND and again
    if mode == "late":
        assert "does not answer" not in found[0][1]


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_is_killed_is_named(size: int) -> None:
    pool = Ranks(size)
    try:
        found = pool.run(step_and_fail, "killed", size - 1)
    finally:
        pool.close()
    assert found[-1] is None
    for named, text, elapsed, again in found[:-1]:
        assert named == (size - 1,) and f"the process of rank {size - 1} does not answer" in text
        assert elapsed < BOUND and again


# GPUs, joined by NCCL.

GPUS = torch.cuda.device_count()
on_gpus = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason=f"needs two CUDA devices, there are {GPUS}"),
]
GPU_CASES = [
    pytest.param(backend, transport, marks=on_gpus)
    for backend, transport in (
        ("cuda", "symmetric"),
        ("cuda", "exchange"),
        ("triton", "exchange"),
        ("torch", "exchange"),
    )
]


@pytest.fixture(scope="module")
def gpu_ranks() -> Iterator[Ranks]:
    pool = Ranks(2, "nccl")
    yield pool
    pool.close()


@pytest.mark.parametrize("shards", ["even", "wide", "uneven", "empty"])
@pytest.mark.parametrize(("backend", "transport"), GPU_CASES)
def test_all_gpus_have_what_one_has(
    gpu_ranks: Ranks, backend: str, transport: str, shards: str
) -> None:
    options = {
        "even": {},
        "wide": {"logits_width": 90},
        "uneven": {"shard_sizes": [1, 69]},
        "empty": {"shard_sizes": [70, 0]},
    }[shards]
    dtype = torch.bfloat16 if shards == "even" else torch.float32
    found = gpu_ranks.run(live, backend, dtype, 60, options | {"transport": transport})
    assert found[0]["rows"] > 60 and found[0] == found[1]


def choose_on_gpus(group: dist.ProcessGroup) -> str:
    table = RequestTable(2, V, device=device_of(group), seed=0)
    return VocabParallelSampler(table, group, backend="cuda").transport


@pytest.mark.parametrize("_", [pytest.param(None, marks=on_gpus)])
def test_gpus_that_reach_each_other_take_the_symmetric_transport(gpu_ranks: Ranks, _: None) -> None:
    assert gpu_ranks.run(choose_on_gpus) == ["symmetric"] * 2


def close_and_destroy(group: dist.ProcessGroup, transport: str) -> int:
    table = RequestTable(2, V, device=device_of(group), seed=0)
    sampler = VocabParallelSampler(table, group, backend="cuda", transport=transport)
    slots = torch.tensor([table.admit(SamplingParams())], dtype=torch.int32)
    sampler(sampler.logits_buffer(1), slots)
    sampler.close()
    dist.destroy_process_group(group)  # it waits for graphs that hold its communicator
    return sampler.row_buckets[-1]


@pytest.mark.parametrize(
    "transport", [pytest.param(t, marks=on_gpus) for t in ("symmetric", "exchange")]
)
def test_a_group_is_destroyed_when_its_sampler_is_closed(transport: str) -> None:
    pool = Ranks(2, "nccl")  # of its own: one that waits does so for ever
    try:
        assert pool.run(close_and_destroy, transport) == [2, 2]
    finally:
        pool.close()


@pytest.mark.parametrize("reports", [pytest.param(r, marks=on_gpus) for r in (False, True)])
@pytest.mark.parametrize("overlap", [False, True])
def test_all_gpus_hear_what_one_has_sampled(gpu_ranks: Ranks, reports: bool, overlap: bool) -> None:
    found = gpu_ranks.run(listen, "cuda", 1, reports, overlap)
    assert found[0]["rows"] > 60 and found[0] == found[1]


def fail_on_gpus(group: dist.ProcessGroup, transport: str, mode: str) -> tuple[Any, ...]:
    """Steps until an error comes, of which the last rank takes none, or others."""
    device = device_of(group)
    table = RequestTable(4, V, device=device, seed=0)
    sampler = VocabParallelSampler(
        table, group, backend="cuda", transport=transport, timeout=TIMEOUT
    )
    slots = torch.tensor([table.admit(SamplingParams(), [i]) for i in range(3)], dtype=torch.int32)
    buffer = sampler.logits_buffer(3)
    for _ in range(10):
        sampler(buffer, slots)
    torch.cuda.synchronize()
    if group.rank() == group.size() - 1:
        if mode == "killed":
            os._exit(1)
        if mode == "late":
            time.sleep(BOUND + TIMEOUT)
        if mode == "slots":
            slots = slots.flip(0)
    start = time.monotonic()
    error = None
    while error is None and time.monotonic() < start + BOUND:
        try:
            sampler(buffer, slots)
            torch.cuda.synchronize()  # it must end, whatever the other rank does
        except RankError as caught:
            error = caught
        time.sleep(0.01)
    assert error is not None
    return error.ranks, str(error), time.monotonic() - start


@pytest.mark.parametrize("mode", ["slots", "late", "killed"])
@pytest.mark.parametrize(
    "transport", [pytest.param(t, marks=on_gpus) for t in ("symmetric", "exchange")]
)
def test_gpus_name_the_one_that_fails(transport: str, mode: str) -> None:
    pool = Ranks(2, "nccl")  # of its own: what is broken may stay so
    try:
        found = pool.run(fail_on_gpus, transport, mode)
    finally:
        pool.close()
    for told in found if mode != "killed" else found[:1]:
        named, text, elapsed = told
        assert named == (1,), text
        assert elapsed < BOUND
