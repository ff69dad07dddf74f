"""The `cuda` backend: the whole step in one kernel of the native library (csrc/sample_step.cu).

It runs on GPUs. For tests there is an emulation of the kernel on the CPU (csrc/emulation), which is
used where a test has loaded it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from itertools import pairwise
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from graphed_sampling._build_info import build_info
from graphed_sampling.backends.position_records import Positions
from graphed_sampling.checks import check_logits
from graphed_sampling.layout import TableLayout

NAME: Final = "cuda"
CHOSEN_FOR: Final = "tables on a GPU for which the native library is built"
REFUSES: Final[frozenset[str]] = frozenset()
TAKES_GROUP_STATS: Final = True
SCORES_TEMPERATURES: Final = True

# The geometry and the scratch of csrc: tokens of a group and groups of a tile; words of a row, of a
# group and of the list around the cut of a flat row, which smaller vocabularies go without.
_GROUP: Final = 64
_GROUPS_OF_TILE: Final = 32
_HEADER: Final = 32
_WAY: Final = 1  # which of the header's words
_OF_GROUP: Final = 7
_BRACKET: Final = 2 * 16384
_LISTED: Final = 2048
# And of the kernel of many positions: blocks at most, and groups that shared memory holds.
_SCORING_BLOCKS: Final = 512
_SHARED_GROUPS: Final = 4096
# And of exchange buffers: words of their header, of a row's signals, and of a group; which of the
# header's words tell of a failure, and from which bits on for whom the rank waited, and in what.
MOST_SHARDS: Final = 16
_EXCHANGE_HEADER: Final = 64
_SIGNALS: Final = 32
_EXCHANGED_OF_GROUP: Final = 5
_FAILURE: Final = slice(2, 4)
_FAILED_RANK_BIT: Final = 8
_FAILED_PHASE_BIT: Final = 16
FAILURE_WORDS: Final = 4
"""So many first words of an exchange buffer are enough for `failure`."""


def unusable(device: torch.device) -> str:
    """Why the backend cannot run on `device`; empty where it can."""
    if device.type not in ("cuda", "cpu"):
        return "its kernel runs on CUDA GPUs"
    if not _has_kernel("CUDA" if device.type == "cuda" else "CPU"):
        if device.type == "cpu":
            return "it runs on GPUs; on the CPU only in the emulation that its tests load"
        info = build_info()
        return f"the native library is not loaded: {info['load_error'] or info['reason']}"
    if device.type == "cpu":
        return ""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    major, minor = _capability(device)
    if not any(architecture <= 10 * major + minor for architecture in _architectures()):
        built = ", ".join(map(str, _architectures()))
        return f"it was built for {built}, and the GPU is {major}.{minor}"
    return ""


# A step asks whether it may run: neither answer changes.
@functools.lru_cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@functools.cache
def _architectures() -> tuple[int, ...]:
    """What the native library was built for: 90 is compute capability 9.0."""
    # CMake's names may go on, as in 90-real.
    numbers = (re.match(r"\d+", name) for name in build_info()["architectures"])
    return tuple(int(number[0]) for number in numbers if number)


_kernels_found: set[str] = set()


def _has_kernel(key: str) -> bool:
    # One that is there stays; a test may load one later.
    if key not in _kernels_found:
        has_kernel: Any = torch._C._dispatch_has_kernel_for_dispatch_key
        if has_kernel("graphed_sampling::cuda_step", key):
            _kernels_found.add(key)
    return key in _kernels_found


def canonical_order(vocab_size: int) -> Tensor:
    """int64 [vocab_size]: ids ascending."""
    return torch.arange(vocab_size, device="cpu")


def _groups(layout: TableLayout) -> int:
    """Of a row, whose last tile may have less tokens."""
    return -(-layout.vocab_size // (_GROUP * _GROUPS_OF_TILE)) * _GROUPS_OF_TILE


@functools.lru_cache
def scratch_words(layout: TableLayout, rows: int) -> int:
    """int32 words of scratch that a step of up to `rows` rows needs."""
    words = _HEADER + _OF_GROUP * _groups(layout) + layout.max_stop_ids + layout.max_bad_words
    if layout.vocab_size > _LISTED:
        words += _BRACKET
    return rows * (-(-words // 32) * 32)


class Way(IntEnum):
    """How a row was filtered and drawn from: by lists of candidates, or a bracket around its cut;
    by surveys of the whole row, a few for each filter; or by tens of them for one."""

    LISTS = 0
    SURVEYS = 1
    BIT_BY_BIT = 2


def ways(scratch: Tensor, layout: TableLayout, rows: int) -> list[Way]:
    """Of the rows of a last step. It says nothing of what else goes over a row: top_n_sigma, three
    times, and each of more top logprobs than a list holds."""
    return [Way(word) for word in scratch[_WAY :: scratch_words(layout, 1)][:rows].tolist()]


def warm_up(
    layout: TableLayout, device: torch.device, logits_dtypes: Sequence[torch.dtype]
) -> None:
    """Nothing: the kernel is compiled already."""


def sample_step(
    logits: Tensor,
    slots: Tensor,
    params: Tensor,
    state: Tensor,
    tables: Tensor,
    output: Tensor,
    scratch: Tensor,
    layout: TableLayout,
    *,
    grammar_bitmask: Tensor | None,
    words: Tensor | None,
    given: Tensor | None,
    group_stats: Tensor | None = None,
) -> None:
    """One step in place; arguments as the op `sample_step`, checked there."""
    torch.ops.graphed_sampling.cuda_step(
        logits,
        slots.contiguous(),
        params,
        state,
        tables,
        output,
        scratch,
        layout.to_ints(),
        grammar_bitmask,
        None if words is None else words.contiguous(),
        given,
        group_stats,
    )


class Phases(IntFlag):
    """What a launch of a sharded step does; a step is all of them, in this order."""

    STREAM = 1
    """Reads the rank's shard and sends all ranks what is to know of it. Waits for nobody."""
    FINISH = 2
    """Waits until all ranks have sent that, and takes rows from there to their next state."""
    CLOSE = 4
    """Waits until no rank reads this one's memory for this step any more."""
    ALL = 7


class Reason(IntEnum):
    """Why a rank has given up."""

    MISSING = 1
    MISMATCH = 2


class Failure(NamedTuple):
    """That a rank has given up: why, waiting for which rank, in which phase, at which row."""

    reason: Reason
    rank: int
    phase: Phases
    row: int

    def __str__(self) -> str:
        closes = self.phase == Phases.CLOSE
        where = "at the end of a step" if closes else f"for its shard of row {self.row}"
        if self.reason == Reason.MISMATCH:
            told = "has come with another step, or another number of rows"
        else:
            told = "has not come in time"
        return f"rank {self.rank} {told} ({where})"


@dataclass(frozen=True, kw_only=True)
class Shards:
    """The shards of a vocabulary, where they lie, and whose steps these are: the same on all ranks
    but for `rank`, and for addresses, which are those at which this rank's device reaches them.

    ValueError for what is no such thing.
    """

    rank: int
    starts: tuple[int, ...]
    """Rank r has the tokens from starts[r] to before starts[r + 1], of which there may be none."""
    logits_addresses: tuple[int, ...]
    """Of the first token of the first row of each rank's logits; of an empty shard anything."""
    exchange_addresses: tuple[int, ...]
    """Of each rank's exchange buffer, aligned to 16 bytes."""
    limit_ns: int
    """Nanoseconds that a step waits for another rank before it gives up."""

    def __post_init__(self) -> None:
        ranks = len(self.logits_addresses)
        if not 1 <= ranks <= MOST_SHARDS:
            raise ValueError(f"there are {ranks} shards: there may be 1 to {MOST_SHARDS}")
        if not 0 <= self.rank < ranks:
            raise ValueError(f"rank is {self.rank}: it must be in [0, {ranks})")
        if len(self.exchange_addresses) != ranks or len(self.starts) != ranks + 1:
            raise ValueError(
                f"there are {ranks} addresses of logits, {len(self.exchange_addresses)} of "
                f"exchange buffers and {len(self.starts)} starts: there must be one of each for "
                "every rank, and the last shard's end"
            )
        if self.starts[0] != 0 or any(a > b for a, b in pairwise(self.starts)):
            raise ValueError(f"starts are {self.starts}: they must ascend from 0")
        if any(address % 16 for address in self.exchange_addresses):
            raise ValueError("exchange buffers must be aligned to 16 bytes")
        if self.limit_ns <= 0:
            raise ValueError(f"limit_ns is {self.limit_ns}: it must be positive")

    @property
    def width(self) -> int:
        """Tokens of the rank's own shard."""
        return self.starts[self.rank + 1] - self.starts[self.rank]


@functools.lru_cache
def exchange_words(layout: TableLayout, rows: int) -> int:
    """int32 words of every rank's exchange buffer, for sharded steps of up to `rows` rows."""
    row = _SIGNALS + _EXCHANGED_OF_GROUP * _groups(layout)
    return _EXCHANGE_HEADER + rows * row


def sharded_step(
    logits: Tensor,
    slots: Tensor,
    params: Tensor,
    state: Tensor,
    tables: Tensor,
    output: Tensor,
    scratch: Tensor,
    exchange: Tensor,
    layout: TableLayout,
    shards: Shards,
    *,
    phases: Phases = Phases.ALL,
    grammar_bitmask: Tensor | None = None,
    words: Tensor | None = None,
    given: Tensor | None = None,
) -> None:
    """One step in place of a table of which every rank has a replica, and a shard of the logits.

    Shards may begin anywhere; where that is a multiple of 1024 a step is quickest.

    logits: [n, >= shards.width], the rank's own. n, the row stride, dtype and everything else but
    addresses must be the same on all ranks, parameters, states and tables bit for bit; then so are
    their outputs and next states, which are those of `sample_step` on the whole logits. What
    `sample_step` takes is as there and checked by the caller; scratch likewise, of
    `scratch_words(layout, n)`.

    exchange: int32 [>= exchange_words(layout, n)], contiguous, zeroed once on all ranks before the
    first step of any. Other ranks read `logits` and write `exchange` while they step, so both lie
    in memory that all devices reach (torch.distributed._symmetric_memory). When the step has ended
    on a rank's stream nobody reads that rank's memory for it any more: logits may be written again.

    Ranks wait for each other on their devices: every rank enqueues the same steps in the same
    order, eager or replayed, and nothing in front of them may wait for a later one of another rank.
    Where a rank waits longer than `shards.limit_ns`, rows that lack something get the record of
    padding rows (token -1) and keep their state, and the rank has given up: its later steps do
    nothing but write such records, until all ranks have zeroed their exchange buffers. `failure`
    tells why. Rows that were complete have advanced, here or on other ranks.

    phases: several ranks' steps can be run on one device, a phase of all ranks after the other.

    ValueError for logits or an exchange buffer that are not what `shards` says.
    """
    check_logits(logits, shards.width)
    needed = exchange_words(layout, logits.shape[0])
    if not (
        exchange.dim() == 1
        and exchange.dtype == torch.int32
        and exchange.is_contiguous()
        and exchange.numel() >= needed
    ):
        raise ValueError(
            f"exchange is {exchange.dtype} {list(exchange.shape)}: it must be contiguous "
            f"torch.int32 [>= {needed}]"
        )
    if shards.starts[-1] != layout.vocab_size:
        raise ValueError(
            f"the last shard ends at {shards.starts[-1]}: it must end at {layout.vocab_size}, the "
            "vocabulary's size"
        )
    if shards.width and logits.data_ptr() != shards.logits_addresses[shards.rank]:
        raise ValueError("logits do not lie at the rank's address")
    if exchange.data_ptr() != shards.exchange_addresses[shards.rank]:
        raise ValueError("exchange does not lie at the rank's address")
    if not logits.shape[0]:
        return
    torch.ops.graphed_sampling.cuda_sharded_step(
        logits,
        slots.contiguous(),
        params,
        state,
        tables,
        output,
        scratch,
        exchange,
        layout.to_ints(),
        shards.rank,
        shards.starts,
        shards.logits_addresses,
        shards.exchange_addresses,
        shards.limit_ns,
        int(phases),
        grammar_bitmask,
        None if words is None else words.contiguous(),
        given,
    )


def failure(exchange: Tensor) -> Failure | None:
    """Why the rank with this exchange buffer has given up; None if it has not. Synchronises.

    exchange: the buffer, or a copy of its first `FAILURE_WORDS` words, which may be taken while the
    rank steps.
    """
    why, row = exchange[_FAILURE].tolist()
    if not why:
        return None
    rank = why >> _FAILED_RANK_BIT & (1 << _FAILED_PHASE_BIT - _FAILED_RANK_BIT) - 1
    reason = Reason(why & (1 << _FAILED_RANK_BIT) - 1)
    return Failure(reason, rank, Phases(why >> _FAILED_PHASE_BIT), row)


def score_rows(
    logits: Tensor,
    positions: Positions,
    output: Tensor,
    layout: TableLayout,
    *,
    rank: bool,
    entropy: bool,
) -> None:
    """Logprobs at many positions: see `backends`."""
    selection, asked = positions.selection, positions.asked_filters
    temperature = None
    if asked is not None:
        temperature = asked.temperature
        if temperature is None:
            temperature = torch.ones_like(positions.token_ids, dtype=torch.float32)
    processed = positions.processed
    scratch = torch.empty(
        _score_scratch_words(layout, entropy), dtype=torch.int32, device=logits.device
    )
    torch.ops.graphed_sampling.cuda_score_rows(
        logits,
        None if selection.rows is None else selection.rows.contiguous(),
        selection.num_rows,
        positions.token_ids.contiguous(),
        positions.given_ids.contiguous(),
        None if temperature is None else temperature.contiguous(),
        None if processed is None else processed.contiguous(),
        output,
        scratch,
        layout.to_ints(),
        rank,
        entropy,
    )


def _score_scratch_words(layout: TableLayout, entropy: bool) -> int:
    """int32 words of scratch: of each block three values of every group, where it needs any."""
    groups = _groups(layout)
    return _SCORING_BLOCKS * 3 * groups if entropy or groups > _SHARED_GROUPS else 0
