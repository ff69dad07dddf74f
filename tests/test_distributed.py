"""Samplers of several ranks: processes on this machine, joined by gloo; on GPUs by NCCL."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import BENIGN_KINDS, KINDS
from histories import History, used_state
from ranks import Ranks

from graphed_sampling import RequestTable, RowFlags, Sampler, SamplingParams, backends
from graphed_sampling.distributed import RankError, VocabParallelSampler, even_vocab_ranges
from graphed_sampling.distributed.shards import check_vocab_ranges

V = 70
TIMEOUT = 2.0
BOUND = 2 * TIMEOUT + 3.0
"""Seconds within which an error is there: the timeout, then the posts, on a busy machine."""
CPU_BACKENDS = [
    name for name in ("cpu", "torch") if not backends.module(name).unusable(torch.device("cpu"))
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
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
        with pytest.raises(ValueError, match="vocab_size|padded_size"):
            even_vocab_ranges(*wrong)


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


def shard(
    logits: torch.Tensor, sampler: VocabParallelSampler, rank: int, *, poison: bool
) -> torch.Tensor:
    """The rank's part of full logits; with poison, padded to the buffer's width, which would win
    if it were read."""
    start, end = sampler.vocab_ranges[rank]
    part = logits[:, start:end]
    if not poison:
        return part
    padded = torch.full((len(logits), sampler.logits_width), float("inf"), dtype=logits.dtype)
    padded[:, : end - start] = part
    return padded


def live(
    group: dist.ProcessGroup,
    backend: str,
    dtype: torch.dtype,
    steps: int,
    options: dict[str, Any],
    kinds: Sequence[str] = KINDS,
) -> dict[str, int]:
    """Steps of a random history, compared with those of one device that has all logits."""
    rank = group.rank()
    history = History(len(kinds), V, 7, kinds=kinds, dtype=dtype)
    table, expected_table = history.table(), history.table()
    sampler = VocabParallelSampler(
        table, group, backend=backend, logits_dtype=dtype, row_buckets=(1, 3, 6), **options
    )
    single = Sampler(expected_table, backend)
    counts = {"rows": 0, "finished": 0}
    for number in range(steps):
        history.change(table, expected_table)
        inputs = history.step(6)
        expected = single(inputs.logits, inputs.slots, **inputs.optional)
        logits = shard(inputs.logits, sampler, rank, poison=number % 2 == 0)
        if number % 3 == 0:
            buffer = sampler.logits_buffer(len(logits))
            buffer[:, : logits.shape[1]] = logits
            logits = buffer
        output = sampler(logits, inputs.slots, **inputs.optional)
        assert torch.equal(output.record, expected.record), number
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
    "one": {"shard_sizes": [0, 0, 0, 70], "transport": "exchange"},
}


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_all_ranks_have_what_one_device_has(ranks: Ranks, backend: str, shards: str) -> None:
    dtype = {"even": torch.bfloat16, "uneven": torch.float16}.get(shards, torch.float32)
    found = ranks.run(live, backend, dtype, 40, SHARDS[shards])
    assert found[0]["rows"] > 60 and found[0]["finished"] > 0
    assert all(counts == found[0] for counts in found)


def test_ten_thousand_steps(ranks: Ranks) -> None:
    backend = CPU_BACKENDS[0]
    found = ranks.run(live, backend, torch.float32, 10_000, {}, BENIGN_KINDS, ranks=[0, 1])
    assert found[0]["rows"] > 20_000 and found[0] == found[1]
