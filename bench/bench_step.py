"""Time of a whole sampling step: this package's backends, one read of the logits, and rivals.

    python bench/bench_step.py [--quick] [--json FILE] [--time-limit SECONDS]
    python bench/bench_step.py --batch 1 32 --dtype bf16 --classes topk50_topp95 --no-peers

All contenders of a row of the tables ran one after the other on the same logits, as replays of a
CUDA graph; before one is timed, its results are compared with the float64 reference (a rival's
tokens must lie in the support). bench/README.md says how times are taken and how to read them.
Without a GPU the same is timed eagerly on the CPU. The exit status is 1 if a contender failed.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

import common
import numpy as np
import peers
import torch
from common import DTYPES, MIXED_FLAT, Deadline, Inputs, Timing
from peers import CheckFailedError, Contestant, Filters, ReadOnce, Rival
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

from graphed_sampling import (
    RequestTable,
    SamplingParams,
    StepOutput,
    UnsupportedFeatureError,
    backends,
    group_stats,
    group_stats_shape,
)
from graphed_sampling.layout import RowFlags
from graphed_sampling.reference import RowResult, raw_logprobs, sample_row
from graphed_sampling.sampler import TableStep

HOME_VOCAB: Final = 128256
FEATURES_BATCH: Final = 256
P99_BATCHES: Final = (32, 256)
PADDING: Final = (33, 64)


# What is asked of a step.


@dataclass(frozen=True)
class Request:
    params: SamplingParams
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()


MakeRequest: TypeAlias = Callable[[int, np.random.Generator, int], Request]
"""The request of a row: its number, random numbers of its own, the vocabulary size."""


@dataclass(frozen=True)
class Case:
    """A batch: what its rows ask for, and the kind of logits they get.

    over: the case that a feature is added to. filters: what rivals are told; None for no rivals.
    group_stats: whether steps are given the statistics of their logits.
    """

    name: str
    request: MakeRequest
    inputs: str = "lm"
    over: str = ""
    filters: Filters | None = None
    bitmask: bool = False
    penalties: bool = False
    group_stats: bool = False


def _plain(**params: Any) -> MakeRequest:
    return lambda row, random, vocab: Request(
        SamplingParams(**({"seed": row, "logprobs": 0} | params))
    )


def _ids(random: np.random.Generator, vocab: int, count: int) -> tuple[int, ...]:
    return tuple(random.integers(vocab, size=count).tolist())


_HOME: Final[dict[str, Any]] = {"temperature": 0.8, "top_k": 50, "top_p": 0.95}


def _penalised(row: int, random: np.random.Generator, vocab: int) -> Request:
    penalties = {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.1}
    request = _plain(**_HOME, **penalties)(row, random, vocab)
    return Request(request.params, _ids(random, vocab, 1000), _ids(random, vocab, 100))


def _with_bad_words(row: int, random: np.random.Generator, vocab: int) -> Request:
    words = [_ids(random, vocab, 1 + i % 4) for i in range(16)]
    return _plain(**_HOME, bad_words_ids=words)(row, random, vocab)


def _with_bias(row: int, random: np.random.Generator, vocab: int) -> Request:
    bias = {i: float(random.normal(0, 2)) for i in _ids(random, vocab, 8)}
    return _plain(**_HOME, logit_bias=bias)(row, random, vocab)


_WITH_STATS: Final[dict[str, dict[str, Any]]] = {
    "topk50_topp95": _HOME,
    "unfiltered": {"temperature": 1.0},
    "greedy": {"temperature": 0.0},
}
"""Classes of which there is one with `group_stats` ready, as a GEMM would leave them."""


def _classes() -> list[Case]:
    def of(name: str, inputs: str = "lm", rivals: bool = True, **params: Any) -> Case:
        known = {k: v for k, v in params.items() if k in Filters.__dataclass_fields__}
        filters = Filters(**known) if rivals else None
        return Case(name, _plain(**params), inputs, filters=filters)

    return [
        of("topk50_topp95", **_HOME),
        of("minp05_topp95", temperature=0.8, min_p=0.05, top_p=0.95),
        of("topp95", temperature=0.8, top_p=0.95),
        # A nucleus of some 550 tokens, where at 0.8 it has some 60; and of 3,000.
        of("topp90_t1", temperature=1.0, top_p=0.9),
        of("topp95_t1", temperature=1.0, top_p=0.95),
        of("unfiltered", temperature=1.0),
        of("greedy", temperature=0.0),
        of("flat_topp95", "flat", temperature=0.8, top_p=0.95),
        of("typical95", rivals=False, temperature=0.8, typical_p=0.95),
        of("eta", rivals=False, temperature=0.8, eta_cutoff=1e-3),
        # Tokens alone, without logprobs.
        of("topk50_topp95_tokens", rivals=False, logprobs=None, **_HOME),
        of("greedy_tokens", rivals=False, temperature=0.0, logprobs=None),
        # What no list of candidates holds.
        of("topk4000", rivals=False, temperature=0.8, top_k=4000),
        of("flat_typical95", "flat", rivals=False, temperature=0.8, typical_p=0.95),
        of("flat_eta", "flat", rivals=False, temperature=0.8, eta_cutoff=1e-3),
        *(
            Case(f"{name}_stats", _plain(**params), group_stats=True)
            for name, params in _WITH_STATS.items()
        ),
        of("recorded_topk50_topp95", "recorded", **_HOME),
        of("recorded_topp95", "recorded", temperature=0.8, top_p=0.95),
        of("recorded_unfiltered", "recorded", temperature=1.0),
    ]


_HOME_NAME: Final = "topk50_topp95"
CLASSES: Final = {case.name: case for case in _classes()}
FEATURES: Final = {
    case.name: case
    for case in (
        Case("penalties", _penalised, over=_HOME_NAME, penalties=True),
        Case("bitmask", _plain(**_HOME), over=_HOME_NAME, bitmask=True),
        Case("bad_words", _with_bad_words, over=_HOME_NAME),
        Case("top20", _plain(**_HOME, logprobs=20), over=_HOME_NAME),
        Case("logit_bias", _with_bias, over=_HOME_NAME),
    )
}
MIXED_PARTS: Final = ("greedy", "topk50_topp95", "flat_topp95", "penalties", "top20")
"""The rows of a mixed batch, in turn; those of `flat_topp95` get flat logits."""
assert MIXED_PARTS.index("flat_topp95") == MIXED_FLAT[1] and len(MIXED_PARTS) == MIXED_FLAT[0]
EXTRAS: Final = ("mixed", "padding", "p99")


def _mixed(row: int, random: np.random.Generator, vocab: int) -> Request:
    name = MIXED_PARTS[row % len(MIXED_PARTS)]
    return (CLASSES | FEATURES)[name].request(row, random, vocab)


MIXED: Final = Case("mixed", _mixed, "mixed", penalties=True)


# The bars.


@dataclass(frozen=True)
class Bar:
    """The most that a step may take: microseconds, or multiples of one read of the logits."""

    fp32: float
    bf16: float
    of_read: bool

    def limit(self, dtype: str) -> float | None:
        return {"fp32": self.fp32, "bf16": self.bf16}.get(dtype)


def us(limit: float) -> Bar:
    return Bar(limit, limit, of_read=False)


def times(fp32: float, bf16: float) -> Bar:
    return Bar(fp32, bf16, of_read=True)


# At a vocabulary of 128256, with raw logprobs of the sampled tokens.
_USUAL: Final = {
    1: us(10),
    8: us(10),
    32: us(13),
    128: times(1.8, 2.0),
    256: times(1.5, 1.6),
    1024: times(1.35, 1.4),
}
_MANY_PASSES: Final = {
    1: us(30),
    8: us(30),
    32: us(35),
    128: times(5, 5),
    256: times(4, 4),
    1024: times(4, 4),
}
_MIN_P: Final = {
    1: us(12),
    8: us(12),
    32: us(15),
    128: times(1.8, 2.1),
    256: times(1.5, 1.7),
    1024: times(1.35, 1.4),
}
BARS: Final[Mapping[str, Mapping[int, Bar]]] = {
    "topk50_topp95": _MIN_P | {1024: times(1.3, 1.35)},
    "minp05_topp95": _MIN_P,
    "topp95": {
        1: us(14),
        8: us(14),
        32: us(17),
        128: times(2.0, 2.3),
        256: times(1.6, 1.9),
        1024: times(1.45, 1.5),
    },
    "unfiltered": _USUAL,
    "greedy": _USUAL,
    "flat_topp95": {
        1: us(20),
        8: us(20),
        32: us(24),
        128: times(3.3, 3.6),
        256: times(2.8, 3.2),
        1024: times(2.6, 2.7),
    },
    "typical95": _MANY_PASSES,
    "eta": _MANY_PASSES,
    # Nothing is read but the statistics and the groups that may be drawn.
    "topk50_topp95_stats": {256: times(0.5, 0.5)},
}
# Other vocabularies: by how much more a ratio may be there.
RATIO_ALLOWANCE: Final = {32000: 1.35, 151936: 1.2, 201088: 1.2, 262144: 1.2}
READ_ALLOWANCE: Final = 1.5
FEATURE_LIMIT: Final = 1.25
PADDING_LIMIT: Final = 1.1
P99_LIMIT: Final = 1.3
# What the backend that draws with FlashInfer is compared with: FlashInfer's calls written down one
# after the other, the fewest that do the same, with raw logprobs by one read more, or as usual.
HAND_WRITTEN: Final = {
    "topk50_topp95": "FlashInfer joint",
    "minp05_topp95": "FlashInfer top_p, min_p",
    "topp95": "FlashInfer top_p",
    "flat_topp95": "FlashInfer top_p",
    "unfiltered": "FlashInfer softmax, draw",
}
HAND_WRITTEN_LIMIT: Final = 1.15
USUAL_LIMIT: Final = 1 / 1.3

Reads: TypeAlias = Mapping[tuple[str, int, int], float]
"""Microseconds of one read, by dtype, batch and vocabulary size."""


def target(name: str, dtype: str, batch: int, vocab: int, reads: Reads) -> float | None:
    """The most microseconds that a step of a class may take; None where there is no bar.

    At other vocabularies: up to 32 rows the bar at 128256 and 1.5 times what one read costs more;
    above, 1.2 times the ratio (1.35 at 32000), but no less than 32 rows may take.
    """
    bar = BARS.get(name, {}).get(batch)
    limit = bar.limit(dtype) if bar else None
    read = reads.get((dtype, batch, vocab))
    if bar is None or limit is None or read is None:
        return None
    if vocab == HOME_VOCAB:
        return limit * read if bar.of_read else limit
    if vocab not in RATIO_ALLOWANCE:
        return None
    if bar.of_read:
        at_32 = target(name, dtype, 32, vocab, reads)
        return None if at_32 is None else max(at_32, RATIO_ALLOWANCE[vocab] * limit * read)
    home = reads.get((dtype, batch, HOME_VOCAB))
    return None if home is None else limit + READ_ALLOWANCE * (read - home)


def reads_needed(batches: Iterable[int], vocabs: Iterable[int]) -> list[tuple[int, int]]:
    """Batch and vocabulary size of every read that a bar of these refers to."""
    pairs = {(b, v) for b in batches for v in vocabs}
    for batch, vocab in tuple(pairs):
        if vocab in RATIO_ALLOWANCE:
            pairs |= {(32, vocab), (32, HOME_VOCAB), (batch, HOME_VOCAB)}
    return sorted(pairs, key=lambda pair: pair[::-1])


# This package's backends.


@cache
def canonical_order(backend: str, vocab: int) -> np.ndarray:
    order: np.ndarray = backends.canonical_order(vocab, backend).cpu().numpy()
    return order


@cache
def random_words() -> Tensor:
    """int64 [4096]: the word of each row in the checks."""
    generator = torch.Generator().manual_seed(9)
    halves = torch.randint(2**32, (2, 4096), generator=generator)
    return (halves[0] << 32) | halves[1]


@dataclass
class References:
    """Results of the float64 reference. A row's is the same in every batch that begins alike."""

    known: dict[Any, RowResult] = field(default_factory=dict)

    def get(self, key: Any, compute: Callable[[], RowResult]) -> RowResult:
        if key not in self.known:
            self.known[key] = compute()
        return self.known[key]


def stats_bytes(vocab: int) -> int:
    """Of a row's `group_stats`, the least that a step with them reads."""
    return 4 * math.prod(group_stats_shape(1, vocab))


def stats_of(logits: Tensor) -> Tensor:
    """Their `group_stats`, by parts: each takes several times its logits' memory."""
    return torch.cat([group_stats(part, -1) for part in logits.split(128)])


_ROUNDING_FILTERS: Final = {"top_n_sigma", "top_p", "typical_p", "epsilon_cutoff", "eta_cutoff"}


class BackendStep:
    """`sample_step` of a table whose rows all hold a request of the case, on rotating inputs.

    rows: how many of the rows have a request; the others are padding, slot -1.
    """

    def __init__(
        self,
        backend: str,
        case: Case,
        inputs: Sequence[Tensor],
        references: References,
        rows: int | None = None,
    ) -> None:
        self.backend, self.case, self.inputs, self.references = backend, case, inputs, references
        batch, self.vocab = inputs[0].shape
        self.device = inputs[0].device
        self.rows = batch if rows is None else rows
        self.table = RequestTable(
            batch, self.vocab, device=self.device, penalties=case.penalties, seed=0
        )
        randoms = (np.random.default_rng((7, row)) for row in range(self.rows))
        self.requests = [case.request(row, r, self.vocab) for row, r in enumerate(randoms)]
        refused = backends.module(backend).REFUSES
        self.takes_words = "words" not in refused
        if "seed" in refused:
            self.requests = [replace(r, params=replace(r.params, seed=None)) for r in self.requests]
        for request in self.requests:
            self.table.admit(request.params, request.prompt, output_token_ids=request.output)
        self.step = TableStep(self, self.table, backend, batch, group_stats=case.group_stats)
        self.table.upload()
        slots = torch.full((batch,), -1, dtype=torch.int32)
        slots[: self.rows] = torch.arange(self.rows, dtype=torch.int32)
        self.slots = slots.to(self.device)
        self.masks = self._bitmasks() if case.bitmask else []
        self.stats = [stats_of(x) for x in inputs] if case.group_stats else []
        self._start = (self.table.state.clone(), self.table.tables.clone())
        common.synchronize()

    def _bitmasks(self) -> list[Tensor]:
        """One per input, half of the tokens allowed."""
        shape = (self.inputs[0].shape[0], self.table.layout.bitmap_words)
        generator = torch.Generator(self.device).manual_seed(5)
        return [
            torch.randint(
                -(2**31),
                2**31,
                shape,
                generator=generator,
                device=self.device,
                dtype=torch.int64,
            ).to(torch.int32)
            for _ in self.inputs
        ]

    def call(self, i: int, words: Tensor | None = None) -> None:
        i %= len(self.inputs)
        mask = self.masks[i] if self.masks else None
        stats = self.stats[i] if self.stats else None
        self.step(self.inputs[i], self.slots, mask, words, None, stats)

    def reset(self) -> None:
        """The requests as they were admitted, where the cost of a step depends on what they drew:
        with every output token there are more to penalise."""
        if self.case.penalties:
            self.table.state.copy_(self._start[0])
            self.table.tables.copy_(self._start[1])

    def check(self) -> None:
        """Tokens with given words and logprobs are the reference's, in some rows; then `reset`."""
        logits = self.inputs[0]
        words = random_words()[: logits.shape[0]]
        self.call(0, words.to(self.device) if self.takes_words else None)
        common.synchronize()
        output = StepOutput(self.step.output.record.cpu(), self.table.layout)
        self._check_all(output, logits)
        wanted = {0, *range(len(MIXED_PARTS))} if self.case is MIXED else {0}
        for row in sorted(wanted & set(range(self.rows)) | {self.rows - 1}):
            self._check_row(output, row, logits[row], int(words[row]))
        self.reset()
        common.synchronize()

    def _check_survivor(self, row: int, token: int, expected: RowResult) -> None:
        """The token is as good as some survivor, where it is drawn with numbers of the backend's
        own, and ties of the last survivor may be kept. Another law is another test's business."""
        y = expected.processed_logits
        lowest = y[expected.survivors].min()
        if "joint" not in self.backend and not y[token] >= lowest - 1e-5 * max(1.0, abs(lowest)):
            self._fail(f"row {row} drew {token}, which is no survivor")

    def _fail(self, what: str) -> None:
        raise CheckFailedError(f"{self.backend}, {self.case.name}: {what}")

    def _check_all(self, output: StepOutput, logits: Tensor) -> None:
        tokens, padding = output.token_ids[: self.rows], output.token_ids[self.rows :]
        if not bool(((tokens >= 0) & (tokens < self.vocab)).all()):
            self._fail("an id outside the vocabulary was drawn")
        if not bool((output.flags[: self.rows] == 0).all()):
            self._fail("a row was flagged")
        flags = output.flags[self.rows :]
        if not bool((padding == -1).all() and (flags == int(RowFlags.PADDING)).all()):
            self._fail("a padding row drew something")
        if self.requests[0].params.logprobs is None:
            return
        peers.check_logprobs(
            logits[: self.rows],
            tokens.to(self.device),
            output.logprobs[: self.rows].to(self.device),
            f"{self.backend}, {self.case.name}",
        )

    def _reference(self, row: int, logits: Tensor, word: int) -> RowResult:
        request, order = self.requests[row], canonical_order(self.backend, self.vocab)
        ascending = bool((order[1:] > order[:-1]).all())
        whose = "ascending" if ascending else self.backend
        key = (self.case.name, self.vocab, logits.dtype, row, whose)
        return self.references.get(
            key,
            lambda: sample_row(
                logits.float().cpu().numpy(),
                request.params,
                prompt_token_ids=request.prompt,
                output_token_ids=request.output,
                grammar_bitmask=self.masks[0][row].cpu().numpy() if self.masks else None,
                word=word,
                order=order,
            ),
        )

    def _check_row(self, output: StepOutput, row: int, logits: Tensor, word: int) -> None:
        expected = self._reference(row, logits, word)
        # The contract: a share errs by 2**-20 of itself and 2**-36 of the largest probability.
        tolerance = 2.0**-20 + self.vocab * 2.0**-36
        margins = [m for name, m in expected.margins.items() if name in _ROUNDING_FILTERS]
        token = int(output.token_ids[row])
        if not self.takes_words:
            if min(margins, default=np.inf) > tolerance:
                self._check_survivor(row, token, expected)
        elif min(margins, default=np.inf) <= tolerance:  # another set may be kept
            if not expected.processed_logits[token] > -np.inf:
                self._fail(f"row {row} drew {token}, which was banned")
        elif token not in expected.tokens_near(tolerance):
            self._fail(f"row {row} drew {token}, the reference {expected.token_id}")
        elif int(output.num_kept[row]) != expected.num_kept:
            kept = int(output.num_kept[row])
            self._fail(f"row {row} kept {kept} tokens, the reference {expected.num_kept}")
        if self.requests[row].params.logprobs is None:
            return
        exact = expected.logprob
        if token != expected.token_id:
            exact = float(raw_logprobs(logits.float().cpu().numpy())[token])
        if not abs(float(output.logprobs[row]) - exact) <= 2e-6 * max(1.0, abs(exact) / 8):
            self._fail(f"row {row} has logprob {float(output.logprobs[row])}, not {exact}")
        top = len(expected.top_token_ids)
        if output.top_token_ids[row, :top].tolist() != list(expected.top_token_ids):
            self._fail(f"row {row} lists other top tokens than the reference")


# Measuring.


@dataclass
class Figure:
    """One contender on one input shape. status: ok, failed or refused."""

    case: str
    contender: str
    group: str  # read, backend, rival
    dtype: str
    batch: int
    vocab: int
    status: str = "ok"
    reason: str = ""
    cold: Timing | None = None
    hot: Timing | None = None
    read: float | None = None
    target: float | None = None

    @property
    def us(self) -> float | None:
        return self.cold.median if self.cold else None

    @property
    def times_read(self) -> float | None:
        return self.us / self.read if self.us and self.read else None

    @property
    def within(self) -> bool | None:
        return None if self.us is None or self.target is None else self.us <= self.target

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"times_read": self.times_read, "ok": self.within}


class Contender(Protocol):
    """Something that is timed."""

    inputs: Sequence[Tensor]

    def call(self, i: int) -> None:
        """Enqueue one call on input `i`, modulo their number."""

    def check(self) -> None:
        """CheckFailedError where it computes something else than it should."""

    def reset(self) -> None:
        """Undo what calls did to state that their cost depends on."""


@dataclass
class Comparison:
    """A time against another that it is bound to."""

    what: str
    backend: str
    dtype: str
    batch: int
    vocab: int
    us: float
    against_us: float
    limit: float | None
    note: str = ""

    @property
    def ratio(self) -> float:
        return self.us / self.against_us

    @property
    def within(self) -> bool | None:
        return None if self.limit is None else self.ratio <= self.limit

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"ratio": self.ratio, "ok": self.within}


@dataclass(frozen=True)
class Options:
    """What to measure; see `--help`."""

    device: torch.device
    batches: tuple[int, ...]
    vocabs: tuple[int, ...]
    dtypes: tuple[str, ...]
    names: tuple[str, ...]
    backends: tuple[str, ...]
    rivals: bool
    rival_classes: tuple[str, ...]
    hot: bool
    p99_inputs: int
    recorded: Tensor | None

    @property
    def features_batch(self) -> int:
        """256 if that is among the batches, else the largest."""
        return FEATURES_BATCH if FEATURES_BATCH in self.batches else max(self.batches)

    @property
    def recorded_vocab(self) -> int | None:
        return None if self.recorded is None else int(self.recorded.shape[1])


@dataclass(frozen=True)
class Job:
    """One piece of work: a class at one shape, or one of the extras."""

    name: str
    dtype: str
    batch: int
    vocab: int

    def __str__(self) -> str:
        return f"{self.name}, {self.dtype}, B = {self.batch}, V = {self.vocab}"


def plan(options: Options) -> list[Job]:
    """All work, shape by shape, so that what is compared runs close together."""
    jobs = []
    recorded = options.recorded_vocab
    vocabs = dict.fromkeys((*options.vocabs, *([recorded] if recorded else [])))
    selected = [n for n in options.names if n in CLASSES]
    for vocab in vocabs:
        for dtype in options.dtypes:
            for batch in options.batches:
                for name in selected:
                    on_file = CLASSES[name].inputs == "recorded"
                    if (vocab == recorded) if on_file else (vocab in options.vocabs):
                        jobs.append(Job(name, dtype, batch, vocab))
                if batch == options.features_batch and vocab == options.vocabs[0]:
                    others = [n for n in options.names if n in FEATURES or n in EXTRAS]
                    jobs += [Job(n, dtype, batch, vocab) for n in others if n != "p99"]
                for_p99 = batch in P99_BATCHES or batch == options.features_batch
                if "p99" in options.names and for_p99 and vocab == options.vocabs[0]:
                    jobs.append(Job("p99", dtype, batch, vocab))
    return jobs


class Bench:
    """Runs jobs and keeps what they gave."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.timer = common.make_timer(options.device)
        self.on_gpu = options.device.type == "cuda"
        largest = max(options.batches)
        if self.on_gpu and "padding" in options.names:
            largest = max(largest, *PADDING)
        least_rows = options.features_batch + options.p99_inputs if "p99" in options.names else 0
        if self.on_gpu and any(n in CLASSES and CLASSES[n].group_stats for n in options.names):
            bytes_read = stats_bytes(min(options.vocabs))
            least_rows = max(least_rows, common.rows_for_cold(options.device, bytes_read))
        self.inputs = Inputs(options.device, largest, least_rows, options.recorded)
        self.references = References()
        self.figures: list[Figure] = []
        self.comparisons: list[Comparison] = []
        self.absent: dict[str, str] = {}
        """Rivals that cannot be used here, and why."""
        self.notes: list[str] = []
        self.read_shapes: dict[str, tuple[int, int]] = {}
        self.reads: dict[tuple[str, int, int], float] = {}
        self._vocab: int | None = None

    # One contender.

    def _measure(self, figure: Figure, make: Callable[[], Contender]) -> Figure:
        """Make a contender, check it, time it; what goes wrong becomes the figure's status."""
        try:
            contender = make()
            contender.check()
            reset = contender.reset
            figure.cold = self.timer.time(contender.call, len(contender.inputs), reset)
            if self.options.hot:
                figure.hot = self.timer.time(lambda _: contender.call(0), 1, reset)
        except UnsupportedFeatureError as error:
            figure.status, figure.reason = "refused", str(error)
        except Exception as error:  # reported, and the exit status tells
            figure.status, figure.cold, figure.hot = "failed", None, None
            figure.reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        self.figures.append(figure)
        return figure

    def _read(self, job: Job, kind: str = "lm") -> float | None:
        """Microseconds of one read at a shape, measured at its first use."""
        key = (job.dtype, job.batch, job.vocab)
        if key not in self.reads:
            buffers = self.inputs.buffers(kind, job.vocab, DTYPES[job.dtype], job.batch)
            shape = self._read_shape(job.dtype, job.vocab)
            figure = Figure("read", "read once", "read", *key)
            self._measure(figure, lambda: ReadOnce(buffers, shape))
            if figure.us is not None:
                self.reads[key] = figure.us
        return self.reads.get(key)

    def _read_shape(self, dtype: str, vocab: int) -> tuple[int, int]:
        """The fastest block of the read-once kernel, found once per dtype."""
        if not self.on_gpu:
            return peers.READ_SHAPES[0]
        if dtype not in self.read_shapes:
            batch = self.options.features_batch
            kind = "recorded" if vocab == self.options.recorded_vocab else "lm"
            buffers = self.inputs.buffers(kind, vocab, DTYPES[dtype], batch)
            took = {
                shape: self.timer.time(ReadOnce(buffers, shape).call, len(buffers)).median
                for shape in peers.READ_SHAPES
            }
            self.read_shapes[dtype] = min(took, key=lambda shape: took[shape])
        return self.read_shapes[dtype]

    def _backend(self, backend: str, case: Case, job: Job, *, rows: int | None = None) -> Figure:
        """A backend's step of a case at a job's shape; `rows` of them real, if not all."""
        name = case.name if rows is None else f"{case.name}, {rows} in {job.batch}"
        row_bytes = stats_bytes(job.vocab) if case.group_stats else None
        buffers = self.inputs.buffers(
            case.inputs, job.vocab, DTYPES[job.dtype], job.batch, row_bytes
        )
        return self._measure(
            Figure(name, backend, "backend", job.dtype, job.batch, job.vocab),
            lambda: BackendStep(backend, case, buffers, self.references, rows),
        )

    def _found(self, backend: str, case: Case, job: Job) -> Figure:
        """As `_backend`, unless that was measured before."""
        key = (case.name, backend, job.dtype, job.batch, job.vocab)
        for f in self.figures:
            if (f.case, f.contender, f.dtype, f.batch, f.vocab) == key:
                return f
        return self._backend(backend, case, job)

    def _rivals(self, case: Case, job: Job) -> None:
        buffers = self.inputs.buffers(case.inputs, job.vocab, DTYPES[job.dtype], job.batch)
        filters = case.filters
        assert filters is not None
        for rival in peers.RIVALS:
            if not rival.is_for(filters) or (rival.given_probabilities and job.dtype != "fp32"):
                continue
            if rival.absent:
                self.absent[rival.name] = rival.absent
                continue
            ways = {"": None} if rival.given_probabilities else peers.LOGPROBS
            for way, logprob in ways.items():
                name = f"{rival.name}, {way}" if way else rival.name
                figure = Figure(case.name, name, "rival", job.dtype, job.batch, job.vocab)
                self._measure(figure, self._contestant(rival, logprob, buffers, filters))

    @staticmethod
    def _contestant(
        rival: Rival, logprob: peers.Logprob | None, buffers: list[Tensor], filters: Filters
    ) -> Callable[[], Contestant]:
        return lambda: Contestant(rival, logprob, buffers, filters)

    # Jobs.

    def run(self, job: Job) -> None:
        if job.vocab != self._vocab:
            self.inputs.release()
            self._vocab = job.vocab
        if job.name in CLASSES:
            self._class(job)
        elif job.name in FEATURES:
            self._feature(job)
        else:
            {"mixed": self._mixed, "padding": self._padding, "p99": self._p99}[job.name](job)
        if self.on_gpu:
            # Graphs' memory comes back here, where there is little else to free.
            torch.cuda.empty_cache()

    def _class(self, job: Job) -> None:
        case = CLASSES[job.name]
        self._read(job, "recorded" if case.inputs == "recorded" else "lm")
        for backend in self.options.backends:
            self._found(backend, case, job)
        if self.options.rivals and case.filters and job.name in self.options.rival_classes:
            self._rivals(case, job)
            self._against_hand_written(case, job)

    def _against_hand_written(self, case: Case, job: Job) -> None:
        key = (case.name, job.dtype, job.batch, job.vocab)
        figures = {
            f.contender: f for f in self.figures if (f.case, f.dtype, f.batch, f.vocab) == key
        }
        for way, limit in (("one-read logprob", HAND_WRITTEN_LIMIT), ("log_softmax", USUAL_LIMIT)):
            name = f"{HAND_WRITTEN.get(case.name)}, {way}"
            for backend in self.options.backends:
                if backend.startswith("flashinfer") and name in figures:
                    what = f"{case.name} over {name}"
                    self._compare(what, figures[backend], figures[name], limit)

    def _feature(self, job: Job) -> None:
        case = FEATURES[job.name]
        self._read(job)
        for backend in self.options.backends:
            without = self._found(backend, CLASSES[case.over], job)
            self._compare(f"{case.name} over {case.over}", self._found(backend, case, job), without)

    def _compare(
        self, what: str, figure: Figure, base: Figure, limit: float = FEATURE_LIMIT
    ) -> None:
        if figure.us is None or base.us is None:
            return
        self.comparisons.append(
            Comparison(
                what,
                figure.contender,
                figure.dtype,
                figure.batch,
                figure.vocab,
                figure.us,
                base.us,
                limit if self.on_gpu else None,  # the bars are a GPU's
            )
        )

    def _mixed(self, job: Job) -> None:
        """A mixed batch against the sum of pure batches, each weighted by its share of the rows."""
        for backend in self.options.backends:
            mixed = self._backend(backend, MIXED, job)
            parts = [
                self._found(backend, (CLASSES | FEATURES)[name], job).us for name in MIXED_PARTS
            ]
            shares = [
                len(range(i, job.batch, len(MIXED_PARTS))) / job.batch
                for i in range(len(MIXED_PARTS))
            ]
            if mixed.us is None or None in parts:
                continue
            pure = sum(share * (part or 0.0) for share, part in zip(shares, parts, strict=True))
            self.comparisons.append(
                Comparison(
                    "mixed over pure batches",
                    backend,
                    job.dtype,
                    job.batch,
                    job.vocab,
                    mixed.us,
                    pure,
                    None,
                    ", ".join(MIXED_PARTS),
                )
            )

    def _padding(self, job: Job) -> None:
        rows, bucket = PADDING
        if bucket > self.inputs.largest_batch:
            self.notes.append(f"padding: it needs a batch of {bucket}")
            return
        case = CLASSES[_HOME_NAME]
        for backend in self.options.backends:
            alone = self._backend(backend, case, Job("padding", job.dtype, rows, job.vocab))
            padded = Job("padding", job.dtype, bucket, job.vocab)
            among = self._backend(backend, case, padded, rows=rows)
            self._compare(f"{rows} rows in {bucket} over {rows} alone", among, alone, PADDING_LIMIT)

    def _p99(self, job: Job) -> None:
        """Time over many different inputs: the 99th percentile against the median.

        Each input has a graph of one call, whose replay costs what surrounds it too. That is the
        same for all, so differences between inputs are differences between steps; the level
        is the step's time as measured in a graph of many calls.
        """
        case = CLASSES[_HOME_NAME]
        dtype = DTYPES[job.dtype]
        for backend in self.options.backends:
            usual = self._found(backend, case, job)
            if usual.us is None:
                continue
            if self.on_gpu and usual.us > 2000:
                self.notes.append(f"{backend}, {job}: a step takes over 2 ms")
                continue
            windows = self.inputs.windows(
                "lm", job.vocab, dtype, job.batch, self.options.p99_inputs
            )
            try:
                step = BackendStep(backend, case, windows, self.references)
                step.check()
                samples = np.asarray(self.timer.each(step.call, len(windows), 3))
            except Exception as error:  # reported, and the exit status tells
                failed = Figure("p99", backend, "backend", job.dtype, job.batch, job.vocab)
                failed.status, failed.reason = "failed", f"{type(error).__name__}: {error}"
                self.figures.append(failed)
                continue
            median, p99 = np.quantile(samples, [0.5, 0.99]).tolist()
            self.comparisons.append(
                Comparison(
                    f"p99 of {len(windows)} inputs over the median",
                    backend,
                    job.dtype,
                    job.batch,
                    job.vocab,
                    usual.us + p99 - median,
                    usual.us,
                    P99_LIMIT if self.on_gpu else None,
                    f"alone: median {median:.2f}, p99 {p99:.2f}, most {samples.max():.2f}",
                )
            )

    # The end.

    def finish(self, *, reads: bool) -> None:
        """Fill in reads and targets; measure, if there is time, reads that bars refer to."""
        if reads and self.on_gpu:
            wanted = reads_needed(self.options.batches, self.options.vocabs)
            for dtype in self.options.dtypes:
                for batch, vocab in wanted:
                    if (dtype, batch, vocab) not in self.reads:
                        self._read(Job("read", dtype, batch, vocab), "flat")
        for figure in self.figures:
            figure.read = self.reads.get((figure.dtype, figure.batch, figure.vocab))
            if figure.group == "backend" and self.on_gpu:
                shape = (figure.dtype, figure.batch, figure.vocab)
                figure.target = target(figure.case, *shape, self.reads)


# Reporting.


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def _verdict(within: bool | None) -> str:
    return {None: "", True: "ok", False: "NO"}[within]


def _table(title: str, columns: Sequence[str], text_columns: int) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i < text_columns else "right", no_wrap=True)
    return table


def backend_table(figures: Sequence[Figure], title: str) -> Table:
    columns = ("class", "backend", "B", "us", "p10", "p90", "p99", "hot", "x read")
    table = _table(title, (*columns, "target", "ok"), 2)
    for f in figures:
        if f.cold is None:
            shown = [f.status.upper()] + ["-"] * 5
        else:
            cold = f.cold
            shown = [_number(v) for v in (cold.median, cold.p10, cold.p90, cold.p99)]
            shown += [_number(f.hot.median if f.hot else None), _number(f.times_read)]
        verdict = "FAILED" if f.status == "failed" else _verdict(f.within)
        table.add_row(f.case, f.contender, str(f.batch), *shown, _number(f.target), verdict)
    return table


def rival_table(figures: Sequence[Figure], title: str) -> Table:
    """One row per contender, one column per batch; a rival's time and multiples of the best of
    ours."""
    batches = sorted({f.batch for f in figures if f.group == "rival"})
    table = _table(title, ("class", "contender", *(f"B = {b}" for b in batches)), 2)
    cells = {(f.case, f.contender, f.batch): f for f in figures}
    best = best_of_ours(figures)
    rows = dict.fromkeys((f.case, f.contender) for f in figures)
    for case, contender in rows:
        shown = []
        for batch in batches:
            f = cells.get((case, contender, batch))
            if f is None or f.us is None:
                shown.append("-" if f is None else f.status.upper())
            elif f.group == "rival" and (case, batch) in best:
                shown.append(f"{_number(f.us)} ({f.us / best[case, batch]:.1f}x)")
            else:
                shown.append(_number(f.us))
        table.add_row(case, contender, *shown)
    return table


def best_of_ours(figures: Iterable[Figure]) -> dict[tuple[str, int], float]:
    """Microseconds of the fastest of our backends, by class and batch."""
    best: dict[tuple[str, int], float] = {}
    for f in figures:
        if f.group == "backend" and f.us is not None:
            key = (f.case, f.batch)
            best[key] = min(best.get(key, f.us), f.us)
    return best


def comparison_table(comparisons: Sequence[Comparison]) -> Table:
    columns = ("what", "backend", "dtype", "B", "us", "against", "ratio", "at most", "ok")
    table = _table("comparisons", columns, 3)
    for c in comparisons:
        numbers = [_number(v) for v in (c.us, c.against_us, c.ratio, c.limit)]
        table.add_row(c.what, c.backend, c.dtype, str(c.batch), *numbers, _verdict(c.within))
    return table


def report(bench: Bench, console: Console, left: Sequence[Job]) -> None:
    shapes = dict.fromkeys((f.dtype, f.vocab) for f in bench.figures)
    for dtype, vocab in shapes:
        here = [f for f in bench.figures if (f.dtype, f.vocab) == (dtype, vocab)]
        steps = [f for f in here if f.group != "rival"]
        console.print(backend_table(steps, f"{dtype}, V = {vocab}: microseconds a step, cold"))
        with_rivals = {f.case for f in here if f.group == "rival"}
        if with_rivals:
            compared = [f for f in here if f.case in with_rivals and f.group != "read"]
            console.print(rival_table(compared, f"{dtype}, V = {vocab}: rivals (x our best)"))
    if bench.comparisons:
        console.print(comparison_table(bench.comparisons))
    refused = {
        f"{f.contender}, {f.case}: {f.reason}" for f in bench.figures if f.status == "refused"
    }
    absent = [f"{name}: {reason}" for name, reason in bench.absent.items()]
    for text in (*absent, *sorted(refused), *bench.notes):
        console.print(f"not measured: {text}", highlight=False, markup=False)
    if left:
        names = "; ".join(str(job) for job in left[:6])
        console.print(
            f"time limit: {len(left)} jobs were not run: {names}{' ...' * (len(left) > 6)}"
        )
    for f in bench.figures:
        if f.status == "failed":
            what = f"{f.contender}, {f.case}, {f.dtype}, B = {f.batch}, V = {f.vocab}"
            console.print(f"FAILED: {what}: {f.reason}", highlight=False, markup=False)
    verdicts = [x.within for x in bench.figures] + [x.within for x in bench.comparisons]
    verdicts = [v for v in verdicts if v is not None]
    if verdicts:
        console.print(f"bars: {sum(verdicts)} of {len(verdicts)} met")


def to_json(bench: Bench, record: dict[str, Any], deadline: Deadline, left: Sequence[Job]) -> Any:
    options = bench.options
    return {
        "environment": record | {"gpu_after": common.gpu_state()},
        "options": {
            "batches": options.batches,
            "vocabs": options.vocabs,
            "dtypes": options.dtypes,
            "classes": options.names,
            "backends": options.backends,
            "rivals": options.rivals,
            "p99_inputs": options.p99_inputs,
            "argv": sys.argv[1:],
        },
        "seconds": deadline.elapsed,
        "graph_overhead_us": getattr(bench.timer, "overhead", None),
        "read_shapes": bench.read_shapes,
        "figures": [f.to_json() for f in bench.figures],
        "comparisons": [c.to_json() for c in bench.comparisons],
        "absent": bench.absent,
        "notes": bench.notes,
        "left": [asdict(job) for job in left],
    }


# The command line.


def usable_backends(device: torch.device) -> tuple[str, ...]:
    """The fastest first: as `describe` lists them."""
    return tuple(info.name for info in backends.describe(device) if info.usable)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not accepted: an integer >= 1")
    return value


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    names = (*CLASSES, *FEATURES, *EXTRAS)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=_positive, nargs="+", help="default 1 8 32 128 256 1024")
    parser.add_argument("--vocab-size", type=_positive, nargs="+", help=f"default {HOME_VOCAB}")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, help="default fp32 bf16")
    parser.add_argument("--classes", nargs="+", choices=names, metavar="NAME", help=str(names))
    parser.add_argument(
        "--backends",
        nargs="+",
        metavar="NAME",
        help=f"{', '.join(backends.NAMES)}, with options as in flashinfer:ties=keep; default: "
        "those that are usable",
    )
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--hot", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--quick", action="store_true", help="a minute's choice of everything")
    parser.add_argument("--recorded", type=Path, help="a model's logits, for classes recorded_*")
    parser.add_argument("--p99-inputs", type=_positive, help="default 1000")
    parser.add_argument("--threads", type=_positive, default=1, help="of the CPU; default 1")
    parser.add_argument("--time-limit", type=float, help="seconds, after which nothing is begun")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--commit", default="", help="of this tree, where git cannot tell")
    options = parser.parse_args(arguments)
    # Said now, not after minutes of measuring.
    if options.json and not options.json.resolve().parent.is_dir():
        parser.error(f"--json {options.json}: there is no such folder")
    if options.recorded and not options.recorded.is_file():
        parser.error(f"--recorded {options.recorded}: there is no such file")
    if not options.recorded and any(c.startswith("recorded") for c in options.classes or ()):
        parser.error("classes recorded_* need --recorded FILE")
    device = common.default_device()
    for name in options.backends or ():
        try:
            reason = backends.module(name).unusable(device)
        except ValueError as error:
            parser.error(f"--backends {name}: {error}")
        if reason:
            parser.error(f"--backends {name}: it cannot be used on {device}: {reason}")
    return options


_QUICK_CLASSES: Final = (
    *("topk50_topp95", "topp95", "unfiltered", "flat_topp95"),
    *("penalties", "bitmask", "mixed", "padding", "p99"),
)


def options_of(arguments: argparse.Namespace) -> Options:
    device = common.default_device()
    on_gpu, quick = device.type == "cuda", arguments.quick
    batches: tuple[int, ...]
    vocabs: tuple[int, ...]
    dtypes: tuple[str, ...]
    names: tuple[str, ...]
    if on_gpu:
        batches = (1, 32, 256) if quick else (1, 8, 32, 128, 256, 1024)
        vocabs, dtypes = (HOME_VOCAB,), ("fp32", "bf16")
        p99_inputs = 300 if quick else 1000
        names = _QUICK_CLASSES if quick else (*CLASSES, *FEATURES, *EXTRAS)
    else:
        batches = (1, 4) if quick else (1, 8, 32)
        vocabs, dtypes = ((32000,), ("fp32",)) if quick else ((HOME_VOCAB,), ("fp32", "bf16"))
        p99_inputs = 20 if quick else 50
        names = (*CLASSES, *FEATURES, *EXTRAS)
    recorded = common.load_recorded(arguments.recorded) if arguments.recorded else None
    if recorded is None:
        names = tuple(n for n in names if not n.startswith("recorded"))
    elif quick:
        names = (*names, "recorded_topk50_topp95")
    rival_classes = (_HOME_NAME,) if quick and on_gpu else tuple(CLASSES)
    return Options(
        device=device,
        batches=tuple(sorted(set(arguments.batch or batches))),
        vocabs=tuple(dict.fromkeys(arguments.vocab_size or vocabs)),
        dtypes=tuple(arguments.dtype or dtypes),
        names=tuple(arguments.classes or names),
        backends=tuple(arguments.backends or usable_backends(device)),
        rivals=arguments.peers,
        rival_classes=rival_classes,
        hot=arguments.hot,
        p99_inputs=arguments.p99_inputs or p99_inputs,
        recorded=recorded,
    )


def run_all(bench: Bench, jobs: list[Job], deadline: Deadline) -> list[Job]:
    """Run jobs until the time is up or somebody interrupts; returns those that were not run."""
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    done = 0
    try:
        with progress:
            task = progress.add_task("", total=len(jobs))
            for job in jobs:
                if deadline.reached:
                    break
                progress.update(task, description=str(job))
                bench.run(job)
                done += 1
                progress.advance(task)
    except KeyboardInterrupt:
        bench.notes.append("interrupted")
    return jobs[done:]


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def main() -> int:
    arguments = parse()
    deadline = Deadline(arguments.time_limit)
    signal.signal(signal.SIGTERM, _interrupt)
    options = options_of(arguments)
    if options.device.type != "cuda":
        torch.set_num_threads(arguments.threads)
    record = common.environment(options.device)
    record["commit"] = record["commit"] or arguments.commit
    if options.rivals and options.device.type == "cuda":
        record["flashinfer"] = peers.flashinfer_version()
        record["vllm"] = common.package_version("vllm")
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 140
    console = Console(width=width)
    with torch.no_grad():
        bench = Bench(options)
        left = run_all(bench, plan(options), deadline)
        bench.finish(reads=not deadline.reached)
    console.print(
        f"{record['name']}, torch {record['torch']}, triton {record['triton'] or 'none'}, "
        f"{record['commit'] or 'no git'}, {deadline.elapsed:.0f} s",
        highlight=False,
    )
    report(bench, console, left)
    if arguments.json:
        content = to_json(bench, record, deadline, left)
        arguments.json.write_text(json.dumps(content, indent=1))
    return int(any(f.status == "failed" for f in bench.figures))


if __name__ == "__main__":
    sys.exit(main())
