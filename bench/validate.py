"""Validate a backend at a scale that the tests cannot: millions of rows against the twin.

    python bench/validate.py --backend NAME [--device cuda|cpu] [--parts small large ...]
        [--rows-small 1000000] [--rows-large 10000] [--vocab-large 128256] [--draws 100000000]
        [--recorded FILE] [--time-limit 540] [--json FILE] [--mutant NAME]

The expected values come from tests/twin.py, float64 on the same device. The parts:

    small       random rows of 40 vocabularies up to 4096 under random filters: kept sets, logprobs,
                top ids, ranks, flags, and tokens of random and extreme words
    large       the same at --vocab-large
    tokens      many words for each of some thousand rows: how often the token is not the twin's
    sweeps      equally spaced words: every token as often as its probability says, within 2
    draws       the requests' own words: a chi-square test of every distribution
    invariance  the packed record bit for bit: reruns, batches, slots, graphs, memory layouts

How a kept set is seen: each row asks for the processed logprobs of ids next to the twin's cut and
of random others (of all ids where the vocabulary is small), and a set of the right size with the
right ids next to the cut is the twin's. The ids are written into the table's records on the device,
since an admission per row would take more time than all else.

A difference is explained where the twin's margin ("near a cut"), or the word's distance from a
boundary, is within the contract's tolerance, 2^-20 + V 2^-36. All others are failures: printed with
what reproduces them, and the exit status is 1. A part that runs out of its share of the time limit
stops and says how far it came. --mutant spoils one parameter of what the backend reads: the run
must then fail.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table
from torch import Tensor

from graphed_sampling import (
    GraphedSampler,
    RequestTable,
    Sampler,
    SamplingParams,
    StepOutput,
    backends,
    philox,
)
from graphed_sampling.layout import Param
from graphed_sampling.testing import EXTREME_WORDS, chi_square, lm_like_logits, spaced_words

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from twin import Filters, Twin, draw, share_tolerance, twin

SMALL_VOCABS: Final = (
    *(1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 31, 32, 33, 50, 63, 64, 65, 100, 111, 127),
    *(128, 129, 200, 255, 256, 257, 500, 511, 512, 513, 1000, 1023, 1024, 1025, 1500, 2047),
    *(2048, 2049, 4095, 4096),
)
KINDS: Final = ("smooth", "zipf", "ties", "holes", "bf16", "flat", "confident", "poisoned")
LARGE_KINDS: Final = ("zipf", "broad")
DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
ALL_IDS_UP_TO: Final = 1000
"""In vocabularies up to this size a row asks for the logprobs of all ids."""
GIVEN_IDS: Final = 64
MAX_LOGPROBS: Final = 8
LOGPROB_TOLERANCE: Final = 2e-6
"""Times max(1, |logprob| / 8): masses may err by 2^-20, and fp32 stores 24 bits."""
TOP_K_RATE: Final = 1e-5
"""At most so many of the words draw another token than the twin's, where top_k = 50."""
FALSE_ALARM: Final = 1e-4
"""Of all chi-square tests together."""

CASES: Final = {
    "none": SamplingParams(),
    "cold": SamplingParams(temperature=0.6),
    "hot": SamplingParams(temperature=1.6),
    "top_k": SamplingParams(top_k=50),
    "top_p": SamplingParams(top_p=0.9),
    "top_k, top_p": SamplingParams(top_k=40, top_p=0.95, temperature=0.8),
    "min_p": SamplingParams(min_p=0.03, temperature=1.2),
    "top_n_sigma": SamplingParams(top_n_sigma=1.2),
    "typical_p": SamplingParams(typical_p=0.8),
    "epsilon": SamplingParams(epsilon_cutoff=3e-4),
    "eta": SamplingParams(eta_cutoff=2e-3),
}


# What is reported.


@dataclass
class Report:
    """Of one part: how much of it was done, its numbers, and what failed."""

    part: str
    unit: str
    asked: int = 0
    done: int = 0
    seconds: float = 0.0
    numbers: dict[str, float] = field(default_factory=dict)
    num_failures: int = 0
    failures: list[str] = field(default_factory=list)

    def add(self, name: str, value: float) -> None:
        self.numbers[name] = self.numbers.get(name, 0) + value

    def largest(self, name: str, value: float) -> None:
        self.numbers[name] = max(self.numbers.get(name, 0.0), value)

    def fail(self, message: str, count: int = 1) -> None:
        self.num_failures += count
        if len(self.failures) < 20:
            self.failures.append(message)


@dataclass
class Run:
    """What all parts share. until: the moment at which the part should stop."""

    backend: str
    device: torch.device
    seed: int
    mutant: str
    progress: Progress
    options: argparse.Namespace
    until: float = math.inf

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def late(self) -> bool:
        """Whether the part's time is over; waits for the device, so that its queue counts."""
        self.wait()
        return time.perf_counter() > self.until

    def canonical(self, vocab: int) -> Tensor:
        return backends.canonical_order(vocab, self.backend).to(self.device)

    def generator(self, *key: int) -> torch.Generator:
        state = np.random.SeedSequence([self.seed, *key]).generate_state(1, np.uint64)
        return torch.Generator(self.device).manual_seed(int(state[0] >> np.uint64(1)))

    def supported(self, params: SamplingParams) -> SamplingParams:
        """params without what the backend refuses."""
        off = SamplingParams()
        refused = backends.module(self.backend).REFUSES & params.features()
        return replace(params, **{name: getattr(off, name) for name in refused})

    def cases(self) -> dict[str, SamplingParams]:
        return {name: p for name, p in CASES.items() if self.supported(p) == p}

    def table(self, requests: Sequence[SamplingParams], vocab: int, **sizes: int) -> RequestTable:
        """A table whose slots hold the requests, in order, or mutants of them."""
        sizes = {"max_logprobs": 0, "max_logprob_ids": 0, **sizes}
        table = self.empty_table(len(requests), vocab, **sizes)
        for params in requests:
            table.admit(params)
        self.upload(table)
        return table

    def empty_table(self, slots: int, vocab: int, **sizes: int) -> RequestTable:
        nothing = {"max_logit_bias": 0, "max_stop_ids": 0, "max_bad_words": 0}
        return RequestTable(
            slots,
            vocab,
            device=self.device,
            max_bad_word_length=1,
            penalties=False,
            seed=self.seed,
            **nothing,
            **sizes,
        )

    def upload(self, table: RequestTable) -> None:
        table.upload()
        if self.mutant:
            MUTANTS[self.mutant](table.params[: table.max_requests])


# Mutants: a backend that reads something else than what was asked for.


def _scaled(name: str, factor: float) -> Callable[[Tensor], None]:
    column, off = Param[name.upper()], getattr(SamplingParams(), name)

    def spoil(params: Tensor) -> None:
        value = params.view(torch.float32)[:, column]
        value.copy_(torch.where(value == off, value, value * factor))

    return spoil


def _scale_temperature(params: Tensor, factor: float | Tensor) -> None:
    real, wide = params.view(torch.float32), params.view(torch.float64)
    real[:, Param.TEMPERATURE] *= factor
    real[:, Param.SCALE] /= factor
    wide[:, Param.WIDE_SCALE // 2] /= factor


def _hotter(params: Tensor) -> None:
    _scale_temperature(params, 1 + 2.0**-10)


def _one_token_short(params: Tensor) -> None:
    params[:, Param.TOP_K] -= (params[:, Param.TOP_K] > 1).int()


def _larger_min_p(params: Tensor) -> None:
    params.view(torch.float64)[:, Param.MIN_P_OFFSET // 2] *= 1 - 2.0**-10


def _seeds_in_pairs(params: Tensor) -> None:
    seeds = params.view(torch.int64)[:, Param.SEED // 2]
    seeds[1::2] = seeds[: len(seeds) // 2 * 2 : 2]


def _by_slot(params: Tensor) -> None:
    slot = torch.arange(len(params), device=params.device)
    _scale_temperature(params, 1 + 1e-6 * slot)


MUTANTS: Final[dict[str, Callable[[Tensor], None]]] = {
    "temperature": _hotter,
    "top_k": _one_token_short,
    "top_p": _scaled("top_p", 1 - 2.0**-10),
    "min_p": _larger_min_p,
    "top_n_sigma": _scaled("top_n_sigma", 1 - 2.0**-10),
    "typical_p": _scaled("typical_p", 1 - 2.0**-10),
    "epsilon_cutoff": _scaled("epsilon_cutoff", 1 + 2.0**-10),
    "eta_cutoff": _scaled("eta_cutoff", 1 + 2.0**-10),
    "seed": _seeds_in_pairs,
    "slot": _by_slot,
}


# Random inputs.


def random_request(rng: np.random.Generator, vocab: int) -> SamplingParams:
    """Filters none, one or several, at the values that are used and somewhat beyond."""

    def log_uniform(low: float, high: float) -> float:
        return float(np.exp(rng.uniform(np.log(low), np.log(high))))

    values = {
        "top_n_sigma": float(rng.uniform(0.1, 3)),
        "min_p": 1.0 if rng.random() < 0.05 else log_uniform(1e-4, 0.9),
        "top_k": int(log_uniform(1, vocab + 2)),
        "top_p": float(rng.uniform(0.02, 0.999)),
        "typical_p": float(rng.uniform(0.05, 0.99)),
        "epsilon_cutoff": log_uniform(1e-5, 0.3),
        "eta_cutoff": log_uniform(1e-5, 0.3),
    }
    names = list(values)
    style = rng.random()
    if style < 0.05:
        chosen = []
    elif style < 0.5:
        chosen = [names[rng.integers(len(names))]]
    else:
        chosen = [name for name in names if rng.random() < 0.4]
    temperature = float(rng.choice([1.0, rng.uniform(0.1, 2), rng.uniform(0.1, 2)]))
    return SamplingParams(
        temperature=0.0 if rng.random() < 0.04 else temperature,
        seed=int(rng.integers(0, 2**64, dtype=np.uint64)),
        logprobs=int(rng.integers(0, MAX_LOGPROBS + 1)),
        logprobs_mode="raw" if rng.random() < 0.125 else "processed",
        rank=bool(rng.random() < 0.9),
        **{name: values[name] for name in chosen},
    )


def random_logits(
    rows: int, vocab: int, kinds: Sequence[str], generator: torch.Generator
) -> Tensor:
    """fp32 [rows, vocab], each row of a random kind."""
    device = generator.device
    normal = torch.randn(rows, vocab, generator=generator, device=device)
    uniform = torch.rand(rows, vocab, generator=generator, device=device)
    number = torch.randint(len(kinds), (rows,), generator=generator, device=device)
    logits = 3 * normal
    for i, kind in enumerate(kinds):
        of_kind = torch.nonzero(number == i)[:, 0]
        some, chance = logits[of_kind], uniform[of_kind]
        if kind == "zipf":
            some = lm_like_logits(len(of_kind), vocab, generator)
        elif kind == "ties":
            some = some.round()
        elif kind == "holes":
            some = some.masked_fill(chance < 0.6, -torch.inf)
        elif kind == "bf16":
            some = some.bfloat16().float()
        elif kind == "flat":
            some = some[:, :1].expand(-1, vocab)
        elif kind == "confident":
            some = some + 20 * (chance == chance.amax(1, keepdim=True))
        elif kind == "poisoned":
            some = some.masked_fill(chance < 0.1, torch.nan)
            some = some.masked_fill(
                (chance > 0.98) & (chance.amin(1, keepdim=True) < 0.01), math.inf
            )
        elif kind == "broad":
            some = some * (2 / 3)
        logits[of_kind] = some
    return logits


def random_words(count: int, generator: torch.Generator, extremes: float = 0.0) -> Tensor:
    """int64 [count], uniform; the given share of them is 0 or 2^64 - 1."""
    device = generator.device
    low, high = (
        torch.randint(2**32, (count,), generator=generator, device=device) for _ in range(2)
    )
    words = (high << 32) | low
    chance = torch.rand(count, generator=generator, device=device)
    words.masked_fill_(chance < extremes / 2, EXTREME_WORDS[0])
    return words.masked_fill_(chance > 1 - extremes / 2, EXTREME_WORDS[1])


# Kept sets, and all else that a record says.


@dataclass(frozen=True)
class Batch:
    """A step that was taken: its rows, and what each asked. where: to find the batch again."""

    logits: Tensor
    requests: list[SamplingParams]
    twin: Twin
    given: Tensor
    words: Tensor
    where: str


def revealing_ids(expected: Twin, count: int, generator: torch.Generator) -> Tensor:
    """int64 [n, count]: all ids where that is the vocabulary, else those next to the twin's cuts,
    in the order of logits, and random ones: half from the whole order, half from about the kept.
    """
    rows, vocab = expected.kept.shape
    device = generator.device
    if count == vocab:
        return torch.arange(vocab, device=device).expand(rows, vocab)
    by_rank = expected.kept.gather(1, expected.order).to(torch.uint8)
    first = by_rank.argmax(1, keepdim=True)
    last = vocab - 1 - by_rank.flip(1).argmax(1, keepdim=True)
    near = torch.arange(-4, 5, device=device)
    rest = count - 2 * len(near)
    anywhere = torch.rand(rows, rest, generator=generator, device=device)
    reach = torch.full((rows, rest), vocab, device=device)
    reach[:, ::2] = (2 * last + 2).clamp(max=vocab)
    ranks = torch.cat([first + near, last + near, (anywhere * reach).long()], 1)
    return expected.order.gather(1, ranks.clamp(0, vocab - 1))


def is_close(got: Tensor, wanted: Tensor) -> Tensor:
    """Logprobs, elementwise: within the tolerance, equal, or both NaN."""
    tolerance = LOGPROB_TOLERANCE * (wanted.abs() / 8).clamp(min=1)
    near = (got.double() - wanted).abs() <= tolerance
    return near | (got == wanted) | (got.isnan() & wanted.isnan())


def compare(run: Run, report: Report, batch: Batch, output: StepOutput, canonical: Tensor) -> None:
    """Count and explain every difference between the output and the twin."""
    expected, given = batch.twin, batch.given
    rows, vocab = expected.y.shape
    tolerance = share_tolerance(vocab)

    def of_requests(value: Callable[[SamplingParams], float]) -> Tensor:
        return torch.tensor([value(p) for p in batch.requests], device=run.device)

    raw_mode = of_requests(lambda p: p.logprobs_mode == "raw")
    column = raw_mode.unsqueeze(1)
    logprobs = torch.where(column, expected.raw_logprobs, expected.logprobs)

    # The set, and which rows may have another one.
    kept_there = (output.given_logprobs > -torch.inf) == expected.kept.gather(1, given)
    other_set = (output.num_kept != expected.num_kept) | ~(kept_there | column).all(1)
    explained = other_set & (expected.margin <= tolerance)
    # A raw row shows the size of its set alone.
    same = ~other_set & ~(raw_mode & (expected.margin <= tolerance))

    # The token. An id outside of the vocabulary counts as wrong and is read as 0.
    inside = (output.token_ids >= 0) & (output.token_ids < vocab)
    token = output.token_ids.masked_fill(~inside, 0)
    at_token = token.unsqueeze(1)
    drawn = expected.draw(batch.words, canonical)
    distance = drawn.distance(token)
    is_kept = expected.kept.gather(1, at_token)[:, 0]
    is_candidate = (expected.y.gather(1, at_token) > -torch.inf)[:, 0]
    wrong_token = ~inside | ~torch.where(same, is_kept & (distance <= tolerance), is_candidate)

    # The rest follows from set and token.
    sanitised = batch.logits.float().nan_to_num(-math.inf, math.inf, -math.inf)
    ranked = torch.where(column, sanitised, expected.y)
    rank = 1 + (ranked > ranked.gather(1, at_token)).sum(1)
    rank.masked_fill_(~of_requests(lambda p: p.rank), 0)
    listed = (logprobs > -torch.inf).gather(1, expected.order)
    asked = torch.arange(MAX_LOGPROBS, device=run.device) < of_requests(
        lambda p: p.logprobs or 0
    ).unsqueeze(1)
    place = listed.cumsum(1) - 1
    place = place.masked_fill_(~listed | (place >= MAX_LOGPROBS), MAX_LOGPROBS)
    top = torch.full((rows, MAX_LOGPROBS + 1), -1, device=run.device)
    top = top.scatter_(1, place, expected.order)[:, :MAX_LOGPROBS].masked_fill_(~asked, -1)
    top_logprobs = logprobs.gather(1, top.clamp(min=0)).masked_fill_(top < 0, -torch.inf)
    top_logprobs.masked_fill_(~asked, torch.nan)

    wrong = {
        "kept set": other_set & ~explained,
        "token": wrong_token,
        "flags": output.flags != expected.flags,
        "rank": same & (output.ranks != rank),
        "drawn logprob": same & ~is_close(output.logprobs, logprobs.gather(1, at_token)[:, 0]),
        "given logprobs": same & ~is_close(output.given_logprobs, logprobs.gather(1, given)).all(1),
        "top ids": same & (output.top_token_ids != top).any(1),
        "top logprobs": same & ~is_close(output.top_logprobs, top_logprobs).all(1),
    }
    another = same & (token != drawn.token)
    sums = [(expected.margin <= tolerance).sum(), explained.sum(), another.sum()]
    names = ["near a cut", "other set, explained", "other token, explained"]
    largest = [
        torch.where(explained, expected.margin, 0.0).amax(),
        torch.where(another & inside, distance, 0.0).amax(),
    ]
    counts = torch.stack([*sums, *(w.sum() for w in wrong.values())]).tolist()
    for name, count in zip(names, counts[: len(names)], strict=True):
        report.add(name, count)
    report.largest("largest margin explained", float(largest[0]))
    report.largest("largest token distance", float(largest[1]))
    for (name, mask), count in zip(wrong.items(), counts[len(names) :], strict=True):
        for row in torch.nonzero(mask)[:2, 0].tolist() if count else ():
            report.fail(
                f"{name}: V = {vocab}, {batch.where}, row {row} (of {count} such rows): "
                f"num_kept {int(output.num_kept[row])}, expected {int(expected.num_kept[row])}, "
                f"margin {float(expected.margin[row]):.3g}; token {int(output.token_ids[row])}, "
                f"expected {int(drawn.token[row])}, distance {float(distance[row]):.3g}, logprob "
                f"{float(output.logprobs[row])}, expected "
                f"{float(logprobs.gather(1, at_token)[row])}, word {int(batch.words[row])}; "
                f"{batch.requests[row]}",
                count=0,
            )
        report.num_failures += count


def kept_sets(
    run: Run,
    report: Report,
    vocab: int,
    rows: int,
    slots: int,
    kinds: Sequence[str],
    task: TaskID,
    again: str,
) -> None:
    """`rows` random rows, in batches of `slots`, each batch in another order of the slots.

    again: options that ask for this vocabulary alone.
    """
    again = f"--parts {report.part} {again} --rows-{report.part} {rows} --seed {run.seed}"
    rng = np.random.default_rng([run.seed, vocab])
    slots = min(slots, rows)
    requests = [run.supported(random_request(rng, vocab)) for _ in range(slots)]
    given = vocab if vocab <= ALL_IDS_UP_TO else GIVEN_IDS
    table = run.table(requests, vocab, max_logprobs=MAX_LOGPROBS, max_logprob_ids=given)
    table.params[:slots, Param.NUM_GIVEN] = given
    sampler = Sampler(table, run.backend)
    filters, canonical = Filters.of(requests, run.device), run.canonical(vocab)
    ids_at = slice(table.layout.given_ids, table.layout.given_ids + given)
    for number, start in enumerate(range(0, rows, slots)):
        if number and run.late():
            break
        generator = run.generator(vocab, number)
        count = min(slots, rows - start)
        order = torch.randperm(slots, generator=generator, device=run.device)[:count]
        dtype = DTYPES[number % len(DTYPES)]
        logits = random_logits(count, vocab, kinds, generator).to(dtype)
        expected = twin(logits, filters[order])
        ids = revealing_ids(expected, given, generator)
        table.params[order, ids_at] = ids.int()
        words = random_words(count, generator, extremes=0.1)
        output = sampler(logits, order.int(), words=words)
        where = f"{again}, batch {number}, {dtype}"
        batch = Batch(logits, [requests[i] for i in order.tolist()], expected, ids, words, where)
        compare(run, report, batch, output, canonical)
        report.done += count
        run.progress.advance(task, count)


def part_small(run: Run, report: Report) -> None:
    vocabs = run.options.vocabs or SMALL_VOCABS
    each = max(1, run.options.rows_small // len(vocabs))
    report.asked = each * len(vocabs)
    task = run.progress.add_task("small", total=report.asked)
    end = run.until
    for i, vocab in enumerate(vocabs):
        now = time.perf_counter()
        run.until = now + max(0.0, end - now) / (len(vocabs) - i)
        kept_sets(run, report, vocab, each, 2048, KINDS, task, f"--vocabs {vocab}")


def part_large(run: Run, report: Report) -> None:
    report.asked = run.options.rows_large
    task = run.progress.add_task("large", total=report.asked)
    slots = 256 if run.on_gpu else 4
    vocab = run.options.vocab_large
    again = f"--vocab-large {vocab}"
    kept_sets(run, report, vocab, report.asked, slots, LARGE_KINDS, task, again)


# Tokens of many words.


def part_tokens(run: Run, report: Report) -> None:
    vocab, asked = run.options.vocab_large, run.options.words
    groups = {"top_k 50": 8, "none": 1, "top_p 0.9": 1, "typical_p 0.9": 1}
    settings: dict[str, dict[str, Any]] = {
        "top_k 50": {"top_k": 50},
        "none": {},
        "top_p 0.9": {"top_p": 0.9},
        "typical_p 0.9": {"typical_p": 0.9},
    }
    batches, rows = (4, 512) if run.on_gpu else (1, 16)
    steps = {g: max(1, share * asked // (8 * rows * batches)) for g, share in groups.items()}
    report.asked = rows * batches * sum(steps.values())
    task = run.progress.add_task("tokens", total=report.asked)
    canonical = run.canonical(vocab)
    tolerance = share_tolerance(vocab)
    slots = torch.arange(rows, dtype=torch.int32, device=run.device)
    for name in groups:
        requests = [
            run.supported(SamplingParams(temperature=(0.7, 1.0, 1.3)[i % 3], **settings[name]))
            for i in range(rows)
        ]
        sampler = Sampler(run.table(requests, vocab), run.backend)
        filters = Filters.of(requests, run.device)
        words_done = different = 0
        for number in range(batches):
            generator = run.generator(vocab, number, 1)
            logits = random_logits(rows, vocab, LARGE_KINDS, generator).bfloat16()
            expected = twin(logits, filters)
            cumulative, kept = expected.cumulative(canonical), expected.kept
            near_cut = expected.margin <= tolerance
            del expected
            others = torch.zeros((), dtype=torch.int64, device=run.device)
            worst = torch.zeros(rows, dtype=torch.float64, device=run.device)
            worst_word = torch.zeros(rows, dtype=torch.int64, device=run.device)
            for step in range(steps[name]):
                if step % 16 == 0 and (words_done or step) and run.late():
                    break
                words = random_words(rows, generator)
                token = sampler(logits, slots, words=words).token_ids
                drawn = draw(words, cumulative, canonical)
                wrong = (token < 0) | (token >= vocab)
                token = token.masked_fill(wrong, 0)
                wrong |= ~kept.gather(1, token.unsqueeze(1))[:, 0]
                distance = drawn.distance(token).masked_fill(wrong, 2.0)
                # Of rows near a cut the backend may have kept another set.
                distance.masked_fill_(near_cut, 0.0)
                others += ((token != drawn.token) & ~near_cut).sum()
                worst_word = torch.where(distance > worst, words, worst_word)
                worst = torch.maximum(worst, distance)
                words_done += rows
                report.done += rows
                run.progress.advance(task, rows)
            different += int(others)
            report.largest("largest token distance", float(worst.amax()))
            for row in torch.nonzero(worst > tolerance)[:, 0].tolist():
                report.fail(
                    f"token: V = {vocab}, {name}, --seed {run.seed}, batch {number}, row {row}: "
                    f"the word {int(worst_word[row])} draws a token {float(worst[row]):.3g} off "
                    f"(2: no survivor), {requests[row]}"
                )
            del cumulative, kept
        report.add(f"{name}: words", words_done)
        report.add(f"{name}: other token", different)
        due = TOP_K_RATE * words_done
        if name == "top_k 50" and different > due + 4 * math.sqrt(due) + 1:
            report.fail(f"{name}: {different} of {words_done} words draw another token")


# Word sweeps.


def count_tokens(counts: Tensor, token: Tensor, offset: Tensor | int = 0) -> None:
    """Add one to counts[offset + token]; the last entry counts ids that are none."""
    size = counts.numel() - 1
    index = (token + offset).masked_fill((token < 0) | (token >= size), size)
    counts.scatter_add_(0, index, torch.ones_like(index))


def part_sweeps(run: Run, report: Report) -> None:
    cases = run.cases()
    # A CPU sweeps large vocabularies by fewer words.
    vocabs = {
        vocab: 2**16 if run.on_gpu else min(2**16, max(64, 2 ** int(math.log2(2**22 / vocab))))
        for vocab in (13, 1000, run.options.vocab_large)
    }
    report.asked = len(cases) * sum(vocabs.values())
    task = run.progress.add_task("sweeps", total=report.asked)
    for vocab, num_words in vocabs.items():
        generator = run.generator(vocab, 2)
        if vocab <= 1000:
            row = (random_logits(1, vocab, ["broad"], generator) * 4).round() / 4
        else:
            row = lm_like_logits(1, vocab, generator, torch.bfloat16)
        canonical = run.canonical(vocab)
        rows = min(1024, num_words)
        slots = torch.arange(rows, dtype=torch.int32, device=run.device)
        words = spaced_words(num_words).to(run.device).view(-1, rows)
        extremes = torch.tensor(EXTREME_WORDS, device=run.device)
        for name, params in cases.items():
            if run.late():
                return
            expected = twin(row, Filters.of([params], run.device))
            sampler = Sampler(run.table([params] * rows, vocab), run.backend)
            counts = torch.zeros(vocab + 1, dtype=torch.int64, device=run.device)
            for step_words in words:
                # One row of logits for all: a row stride of 0.
                count_tokens(
                    counts, sampler(row.expand(rows, -1), slots, words=step_words).token_ids
                )
            what = f"V = {vocab}, {name}, --seed {run.seed}"
            wanted = expected.logprobs[0].exp() * num_words
            hits = counts[:vocab].double()
            error = (hits - wanted).abs()
            worst = int(error.argmax())
            report.largest("largest error in counts", float(error[worst]))
            near_cut = float(expected.margin) <= share_tolerance(vocab)
            if int(counts[vocab]):
                report.fail(f"{what}: {int(counts[vocab])} ids out of range", int(counts[vocab]))
            outside = torch.nonzero((hits > 0) & ~expected.kept[0])[:, 0].tolist()
            if outside and not near_cut:
                report.fail(f"{what}: ids {outside[:10]} are no survivors", len(outside))
            if float(error[worst]) > 2 and not near_cut:
                report.fail(
                    f"{what}: id {worst} was drawn {int(hits[worst])} times of {num_words} words, "
                    f"{float(wanted[worst]):.2f} due"
                )
            output = sampler(row.expand(2, -1), slots[:2], words=extremes)
            drawn = draw(
                extremes, expected.cumulative(canonical).expand(2, -1).contiguous(), canonical
            )
            far = drawn.distance(output.token_ids.clamp(0, vocab - 1)) > share_tolerance(vocab)
            # The last survivor has no word of its own where its mass is below the tolerance.
            survivors = canonical[expected.kept[0, canonical]]
            ends = survivors[[0, -1]]
            heavy = expected.logprobs[0, ends].exp() > share_tolerance(vocab)
            wrong = (heavy & (output.token_ids != ends)) | far
            if bool(wrong.any()) and not near_cut:
                report.fail(
                    f"{what}: words 0 and 2^64 - 1 drew {output.token_ids.tolist()}, first and "
                    f"last survivor are {ends.tolist()}"
                )
            report.done += num_words
            run.progress.advance(task, num_words)


# Draws from the requests' own streams.


def draws_rows(run: Run, count: int) -> Tensor:
    """[count, V] logits to draw from: recorded ones, or language-model-like."""
    if run.options.recorded:
        recorded = torch.load(run.options.recorded, weights_only=True)["logits"]
        picked = torch.linspace(0, len(recorded) - 1, count).long()
        return recorded[picked].to(run.device)
    vocab = run.options.vocab_large if run.on_gpu else 1000
    return lm_like_logits(count, vocab, run.generator(vocab, 3), torch.bfloat16)


def part_draws(run: Run, report: Report) -> None:
    cases = run.cases()
    logits = draws_rows(run, len(cases))
    vocab = logits.shape[1]
    repeats = (8192 if run.on_gpu else 256) // len(cases)
    slots = repeats * len(cases)
    steps = max(1, run.options.draws // slots)
    report.asked = steps * slots
    task = run.progress.add_task("draws", total=report.asked)
    # Slot i draws from case i modulo the number of cases, with a seed of its own.
    requests = [
        replace(params, seed=seed * len(cases) + i)
        for seed in range(repeats)
        for i, params in enumerate(cases.values())
    ]
    table = run.table(requests, vocab)
    sampler = Sampler(table, run.backend)
    expected = twin(logits, Filters.of(list(cases.values()), run.device))
    case = torch.arange(slots, device=run.device) % len(cases)
    numbers = torch.arange(slots, dtype=torch.int32, device=run.device)
    batch = logits.repeat(repeats, 1)
    counts = torch.zeros(len(cases) * vocab + 1, dtype=torch.int64, device=run.device)
    for step in range(steps):
        if step % 32 == 0 and step and run.late():
            break
        token = sampler(batch, numbers).token_ids
        if step < 2:
            check_own_words(run, report, table, expected, case, token)
        outside = (token < 0) | (token >= vocab)
        count_tokens(counts, token.masked_fill(outside, counts.numel()), case * vocab)
        report.done += slots
        run.progress.advance(task, slots)
    report.numbers["vocabulary"] = vocab
    if int(counts[-1]):
        report.fail(f"{int(counts[-1])} ids out of range", int(counts[-1]))
    smallest = 1.0
    for i, name in enumerate(cases):
        hits = counts[i * vocab : (i + 1) * vocab]
        if float(expected.margin[i]) <= share_tolerance(vocab):
            report.add("cases near a cut, not tested", 1)
            continue
        probabilities = expected.logprobs[i].exp()
        try:
            p_value = chi_square(hits, probabilities, false_alarm=FALSE_ALARM / len(cases))
        except AssertionError as error:
            report.fail(f"{name}, row {i}, --seed {run.seed}, {int(hits.sum())} draws: {error}")
        else:
            smallest = min(smallest, p_value)
    report.numbers["smallest p-value"] = smallest


def check_own_words(
    run: Run, report: Report, table: RequestTable, expected: Twin, case: Tensor, token: Tensor
) -> None:
    """After a step: its tokens are what Philox's words at seeds and positions draw."""
    some = min(128, len(case))
    vocab = expected.y.shape[1]
    seeds = [table.request(slot).seed for slot in range(some)]
    seed = torch.tensor([s - (s >> 63 << 64) for s in seeds], device=run.device)
    words = philox.words(seed, table.positions[:some] - 1)
    canonical = run.canonical(vocab)
    drawn = draw(words, expected.cumulative(canonical)[case[:some]], canonical)
    distance = drawn.distance(token[:some].clamp(0, vocab - 1))
    tested = expected.margin[case[:some]] > share_tolerance(vocab)
    wrong = int((tested & (distance > share_tolerance(vocab))).sum())
    if wrong:
        report.fail(f"{wrong} of {some} tokens are not those of the requests' own words", wrong)


# Bit for bit.


def placed(values: Tensor, width: int, stride: int, offset: int) -> Tensor:
    """A copy of values [n, V] as the first columns of [n, width] in a buffer of NaN."""
    rows = len(values)
    buffer = torch.full(
        (offset + rows * stride,), torch.nan, dtype=values.dtype, device=values.device
    )
    buffer.as_strided(values.shape, (stride, 1), offset).copy_(values)
    return buffer.as_strided((rows, width), (stride, 1), offset)


class SameBits:
    """Records of rows against those of a first step; counts what differs, without waiting."""

    def __init__(self, base: Tensor) -> None:
        self.base = base
        self.checked = 0
        self._differ: dict[str, Tensor] = {}

    def __call__(self, name: str, record: Tensor, rows: Tensor | slice = slice(None)) -> None:
        base = self.base[rows]
        differ = (record != base).any(1).sum() if len(record) == len(base) else len(base)
        self._differ[name] = self._differ.get(name, 0) + differ
        self.checked += len(record)

    def finish(self, report: Report, what: str) -> None:
        report.done += self.checked
        for name, differ in self._differ.items():
            if int(differ):
                report.fail(f"{what}: {name}: {int(differ)} rows differ in a bit", int(differ))


def part_invariance(run: Run, report: Report) -> None:
    vocabs = (111, 1000, run.options.vocab_large) if run.on_gpu else (111, 1000)
    reruns = run.options.reruns
    task = run.progress.add_task("invariance", total=len(vocabs))
    end = run.until
    for i, vocab in enumerate(vocabs):
        now = time.perf_counter()
        run.until = now + max(0.0, end - now) / (len(vocabs) - i)
        rows = 512 if run.on_gpu else 64
        report.asked += 2 * reruns * rows
        bits_of_rows(run, report, vocab, rows, reruns)
        run.progress.advance(task)


def bits_of_rows(run: Run, report: Report, vocab: int, rows: int, reruns: int) -> None:
    rng = np.random.default_rng([run.seed, vocab, 4])
    ids = [int(i) for i in rng.integers(0, vocab, 4)]
    requests = [
        replace(run.supported(random_request(rng, vocab)), logprob_token_ids=ids)
        for _ in range(rows)
    ]
    sizes = {"max_logprobs": MAX_LOGPROBS, "max_logprob_ids": len(ids)}
    table = run.table(requests, vocab, **sizes)
    sampler = Sampler(table, run.backend)
    generator = run.generator(vocab, 4)
    logits = random_logits(rows, vocab, KINDS, generator)
    logits = logits.bfloat16()
    words = random_words(rows, generator, extremes=0.05)
    slots = torch.arange(rows, dtype=torch.int32, device=run.device)
    state = table.state.clone()
    what = f"V = {vocab}, --seed {run.seed}"

    given = SameBits(sampler(logits, slots, words=words).record.clone())
    table.state.copy_(state)
    own = SameBits(sampler(logits, slots).record.clone())

    # Rows alone, some of them, in another order, with padding between; eager and as graphs.
    sizes_of_batches = [
        n for n in (1, 2, 3, 7, 16, 33, 64, 100, 128, 200, 256, 400, 511) if n < rows
    ]
    buckets = tuple(2**i for i in range(rows.bit_length()))
    graphed = GraphedSampler(table, buckets, logits.dtype, vocab, run.backend)
    for size in (*sizes_of_batches, rows):
        for _ in range(16 if size == 1 else 4):
            some = torch.randperm(rows, generator=generator, device=run.device)[:size]
            batch, picked = logits[some], some.int()
            for name, each in (("eager", sampler), ("graphed", graphed)):
                what_batch = f"{name}, {size} of the rows, permuted"
                record = each(batch, picked, words=words[some]).record
                given(what_batch, record, some)
                table.state.copy_(state)
                own(what_batch, each(batch, picked).record, some)
            buffer = graphed.logits_buffer(size)
            buffer.copy_(batch)
            given("the graphs' own buffer", graphed(buffer, picked, words=words[some]).record, some)
            if 2 * size <= rows:
                padded = torch.full((2 * size,), -1, dtype=torch.int32, device=run.device)
                padded[::2] = picked
                twice = words[some].repeat_interleave(2)
                for each in (sampler, graphed):
                    record = each(batch.repeat_interleave(2, 0), padded, words=twice).record
                    given("padding rows between", record[::2], some)
        if run.late():
            break
    del graphed

    # The same requests in other slots.
    other = run.empty_table(rows, vocab, **sizes)
    slot_of = torch.randperm(rows, generator=generator, device=run.device)
    for params, slot in zip(requests, slot_of.tolist(), strict=True):
        other.admit(params, slot=slot)
    run.upload(other)
    moved = Sampler(other, run.backend)
    own("other slots", moved(logits, slot_of.int()).record)
    given("other slots", moved(logits, slot_of.int(), words=words).record)

    # Where the logits lie.
    table.state.copy_(state)
    for dtype in DTYPES:
        values = logits.to(dtype)
        plain = SameBits(sampler(values, slots, words=words).record.clone())
        for extra, gap, offset in (
            (0, 0, 1),
            (0, 3, 0),
            (5, 0, 0),
            (5, 3, 1),
            (8, 8, 8),
            (0, 1, 3),
        ):
            width = vocab + extra
            there = placed(values, width, width + gap, offset)
            name = f"width + {extra}, stride + {gap}, offset {offset}"
            plain(name, sampler(there, slots, words=words).record)
        one = values[:1].expand(rows, -1)
        first = sampler(one.contiguous(), slots, words=words).record.clone()
        plain_one = SameBits(first)
        plain_one("row stride 0", sampler(one, slots, words=words).record)
        plain.finish(report, f"{what}, {dtype}")
        plain_one.finish(report, f"{what}, {dtype}")

    for number in range(reruns):
        given("reruns", sampler(logits, slots, words=words).record)
        table.state.copy_(state)
        own("reruns", sampler(logits, slots).record)
        report.add("reruns", 1)
        if number % 16 == 15 and run.late():
            break
    given.finish(report, f"{what}, given words")
    own.finish(report, f"{what}, own words")


# All of it.

PARTS: Final[dict[str, tuple[str, float, Callable[[Run, Report], None]]]] = {
    "small": ("rows", 0.35, part_small),
    "large": ("rows", 0.15, part_large),
    "tokens": ("words", 0.15, part_tokens),
    "sweeps": ("words", 0.1, part_sweeps),
    "draws": ("draws", 0.15, part_draws),
    "invariance": ("rows", 0.1, part_invariance),
}
"""Unit, share of the time limit, and function. What a part leaves of its time goes to the next."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--backend", required=True, choices=backends.NAMES)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--rows-small", type=int, default=1_000_000)
    parser.add_argument("--rows-large", type=int, default=10_000)
    parser.add_argument("--vocab-large", type=int, default=128256)
    parser.add_argument("--vocabs", type=int, nargs="+", help="of the part small, instead of 40")
    parser.add_argument("--words", type=int, help="of the part tokens (2^20, on a CPU 128)")
    parser.add_argument("--draws", type=int, default=100_000_000)
    parser.add_argument("--recorded", help='torch file {"logits": [n, V]} for the part draws')
    parser.add_argument("--reruns", type=int, help="of the part invariance (1000, on a CPU 20)")
    parser.add_argument("--time-limit", type=float, default=540, help="seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--mutant", default="", choices=["", *MUTANTS], help="must fail")
    options = parser.parse_args()
    on_gpu = torch.device(options.device).type == "cuda"
    options.words = options.words or (2**20 if on_gpu else 128)
    options.reruns = options.reruns or (1000 if on_gpu else 20)
    return options


def summary(reports: list[Report], title: str) -> Table:
    table = Table(title=title)
    for name, justify in (("part", "left"), ("done", "right"), ("s", "right"), ("", "left")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    table.add_column("failures", justify="right")
    for report in reports:
        numbers = "\n".join(f"{name}: {value:.6g}" for name, value in report.numbers.items())
        short = f"\nof {report.asked}" if report.done < report.asked else ""
        table.add_row(
            report.part,
            f"{report.done} {report.unit}{short}",
            f"{report.seconds:.1f}",
            numbers,
            f"[red]{report.num_failures}" if report.num_failures else "0",
            end_section=True,
        )
    return table


def main() -> int:
    options = parse()
    console = Console()
    device = torch.empty(0, device=options.device).device
    reason = backends.module(options.backend).unusable(device)
    if reason:
        console.print(f"backend {options.backend} cannot be used on {device}: {reason}")
        return 2
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    title = f"{options.backend} on {name}" + (f", mutant {options.mutant}" * bool(options.mutant))
    reports: list[Report] = []
    total = sum(PARTS[part][1] for part in options.parts)
    start, share = time.perf_counter(), 0.0
    if device.type == "cpu":
        # The rows are small, and the barriers between OpenMP's threads cost ten times the work.
        torch.set_num_threads(1)
    with Progress(console=console) as progress, torch.no_grad():
        run = Run(options.backend, device, options.seed, options.mutant, progress, options)
        for part in options.parts:
            unit, weight, function = PARTS[part]
            share += weight / total
            report = Report(part, unit)
            reports.append(report)
            began = time.perf_counter()
            run.until = start + share * options.time_limit
            function(run, report)
            run.wait()
            report.seconds = time.perf_counter() - began
            if report.done == 0:
                report.fail("nothing was done within the time limit")
            for failure in report.failures:
                text = f"FAILED {part}: {failure}"
                console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.print(summary(reports, title))
    if options.json:
        facts = {
            "backend": options.backend,
            "device": name,
            "torch": torch.__version__,
            "options": {key: str(value) for key, value in vars(options).items()},
            "parts": [asdict(report) for report in reports],
        }
        options.json.write_text(json.dumps(facts, indent=1) + "\n")
    return int(any(report.num_failures for report in reports))


if __name__ == "__main__":
    sys.exit(main())
