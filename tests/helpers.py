"""What the tests of the contract share: inputs, and a table beside the reference's view of it.

The checks live here as functions, so that test_mutants.py can show that each of them can fail.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flashinfer_stand_in import StandIn

from graphed_sampling import (
    FinishReason,
    GraphedSampler,
    RequestTable,
    RowFlags,
    Sampler,
    SamplingParams,
    StepOutput,
    backends,
)
from graphed_sampling.backends import flashinfer
from graphed_sampling.layout import State
from graphed_sampling.packing import active_features
from graphed_sampling.reference import RowResult, raw_logprobs, sample_row
from graphed_sampling.testing import chi_square, spaced_words

EMULATED = Path(__file__).parent / os.getenv("GRAPHED_SAMPLING_EMULATION", "_emulated.so")
if not torch.cuda.is_available() and EMULATED.exists():
    # Without a GPU the kernels of the cuda backend run in an emulation, on the CPU.
    torch.ops.load_library(str(EMULATED))
if not torch.cuda.is_available():
    # And what stands for FlashInfer between the kernels of the flashinfer backend.
    flashinfer.STAND_IN = StandIn()

INF, NAN = math.inf, math.nan
FLT_MAX = float(np.finfo(np.float32).max)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

LOGPROB_TOLERANCE = 2e-6
"""Of a logprob lp, times max(1, |lp| / 8): the contract lets masses err by 2^-20 relative, which is
1e-6 in a logprob, and fp32 stores lp within |lp| * 2^-24 = |lp| / 8 * 5e-7."""

SHARE_TOLERANCE = 2.0**-20
SHARE_FLOOR = 2.0**-36
"""The contract's: a survivor's share is its probability within 2^-20 relative plus 2^-36 of the
largest probability."""


# Backends and devices.


@dataclass(frozen=True)
class BackendDevice:
    backend: str
    device: torch.device

    def __str__(self) -> str:
        return f"{self.backend}-{self.device.type}"

    @property
    def name(self) -> str:
        """The backend's, without options."""
        return self.backend.partition(":")[0]

    @property
    def takes_words(self) -> bool:
        """Whether a request's own seed, or a word that is given, decides the token."""
        return "words" not in backends.module(self.backend).REFUSES

    def require_words(self) -> None:
        self.require_features({"words"})

    def require_features(self, names: Set[str]) -> None:
        """Skip the test, by name, where the backend refuses any of what it rests on."""
        refused = names & backends.module(self.backend).REFUSES
        if refused:
            pytest.skip(f"{self.backend} refuses {', '.join(sorted(refused))}")

    @property
    def interpreted(self) -> bool:
        """Whether it runs in Triton's interpreter, where a row takes some 50 ms."""
        return self.name in ("triton", "flashinfer") and self.device.type == "cpu"

    @property
    def emulated(self) -> bool:
        """Whether it runs in the emulation of CUDA, where a row takes some 5 ms."""
        return self.backend == "cuda" and self.device.type == "cpu"

    def rows(self, many: int, few: int, fewest: int | None = None) -> int:
        """How many rows, steps or examples a test takes: few in the interpreter.

        fewest: for flashinfer there, most of whose kernels are those that `few` rows of the triton
        backend go through.
        """
        if self.emulated:
            return min(many, 10 * few)
        if self.interpreted and self.name == "flashinfer" and fewest is not None:
            return fewest
        return few if self.interpreted else many

    def require_speed(self) -> None:
        """Skip a test that proves nothing with a few hundred rows."""
        if self.interpreted or self.emulated:
            pytest.skip("needs thousands of rows, which would take minutes here")

    def require_dtype(self, dtype: str) -> None:
        """Skip all dtypes but one in the interpreter, where only a load depends on it."""
        if self.interpreted and dtype != "bf16":
            pytest.skip("in Triton's interpreter bf16 stands for all dtypes here")

    def order(self, vocab_size: int) -> np.ndarray:
        return backends.canonical_order(vocab_size, self.backend).numpy()

    def refused(self, params: SamplingParams) -> set[str]:
        # As for a vocabulary that no top_k reaches.
        return set(backends.module(self.backend).REFUSES & active_features(params, 2**31))

    def require(self, params: SamplingParams) -> None:
        """Skip the test, by name, where the backend refuses what it is about."""
        if self.refused(params):
            pytest.skip(f"{self.backend} refuses {', '.join(sorted(self.refused(params)))}")

    def supported(self, params: SamplingParams) -> SamplingParams:
        """params without what the backend refuses: for random ones."""
        off = SamplingParams()
        return replace(params, **{name: getattr(off, name) for name in self.refused(params)})


def backend_devices() -> list[Any]:
    """Parameters: the pairs that can be used, and once each backend that cannot be used at all.

    CUDA pairs carry the mark `gpu`; without a GPU they are there, and skipped.
    """
    params = []
    for name in (*backends.NAMES, "flashinfer:route=slab"):
        reasons = {
            kind: backends.module(name).unusable(torch.device(kind)) for kind in ("cpu", "cuda")
        }
        kinds = [kind for kind, reason in reasons.items() if not reason]
        if ":" in name:
            # On the CPU that would be the triton backend's kernels once more, which takes minutes.
            kinds = [kind for kind in kinds if kind == "cuda"]
            if not kinds:
                continue
        for kind in kinds or ["cuda"]:
            pair = BackendDevice(name, torch.device(kind))
            marks = []
            if kind == "cuda":
                marks.append(pytest.mark.gpu)
                if not torch.cuda.is_available():
                    marks.append(pytest.mark.skip(reason="no CUDA device"))
            if not kinds:
                marks.append(pytest.mark.skip(reason=f"backend {name}: {reasons}"))
            params.append(pytest.param(pair, id=str(pair), marks=marks))
    return params


# Inputs.

PLACEMENTS = ("contiguous", "strided", "unaligned", "padded", "padded-strided-unaligned")


@dataclass
class Placed:
    """Logits [n, width] somewhere in a buffer whose other bytes are poison."""

    logits: torch.Tensor
    buffer: torch.Tensor
    before: torch.Tensor

    def check_unmodified(self) -> None:
        """By bytes, so that NaN equals itself; the poison around the rows counts too."""
        assert torch.equal(self.buffer.view(torch.uint8), self.before), "the logits were modified"


def place(
    values: np.ndarray | torch.Tensor,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    placement: str = "contiguous",
) -> Placed:
    """values [n, V] as logits of that dtype, laid out in memory as the placement says.

    strided: row stride > width. unaligned: the base address is one element past an allocation's.
    padded: a padded vocabulary, whose ids would win or spoil the normaliser if anything read them.
    """
    values = torch.as_tensor(values).to(dtype)
    rows, vocab = values.shape
    width = vocab + (5 if "padded" in placement else 0)
    stride = width + (3 if "strided" in placement else 0)
    offset = 1 if "unaligned" in placement else 0
    poison = torch.tensor([INF, NAN, torch.finfo(dtype).max], dtype=dtype)
    buffer = poison.repeat(-(-(offset + rows * stride) // 3) + 1)
    buffer.as_strided((rows, vocab), (stride, 1), offset).copy_(values)
    buffer = buffer.to(device)
    logits = buffer.as_strided((rows, width), (stride, 1), offset)
    return Placed(logits, buffer, buffer.view(torch.uint8).clone())


KINDS = ("smooth", "zipf", "ties", "holes", "huge", "subnormal", "flat", "nan", "inf", "dead")
BENIGN_KINDS = ("smooth", "zipf", "ties", "holes")


def random_row(rng: np.random.Generator, vocab: int, kind: str) -> np.ndarray:
    """fp32 [vocab] of a kind: smooth and zipf as models make them, the others as they break."""
    row = rng.normal(0, 3, vocab)
    if kind == "zipf":
        row = rng.permutation(-1.3 * np.log(1 + np.arange(vocab))) + rng.normal(0, 0.3, vocab)
    elif kind == "ties":
        row = np.round(row)
    elif kind == "holes":
        row[rng.random(vocab) < 0.6] = -INF
    elif kind == "huge":
        row = rng.choice([FLT_MAX, -FLT_MAX, 1e30, -1e30, 3.0, 0.0, -0.0], vocab)
    elif kind == "subnormal":
        row = rng.integers(-9, 9, vocab) * 2.0**-149
    elif kind == "flat":
        row[:] = rng.normal(0, 3)
    elif kind == "nan":
        row[rng.random(vocab) < 0.3] = NAN
    elif kind == "inf":
        row[rng.random(vocab) < 0.3] = INF
        row[rng.random(vocab) < 0.2] = NAN
    elif kind == "dead":
        row[:] = rng.choice([NAN, -INF])
    return row.astype(np.float32)


def far_rows(vocab: int) -> dict[str, np.ndarray]:
    """fp32 [vocab] each: logits that differ as usual ones do, far from 0, and finite stand-ins of
    what masks ban."""
    rng = np.random.default_rng(23)
    usual = rng.normal(0, 3, vocab)
    masked = np.full(vocab, -1e9)
    masked[[5, 900, 2100]] = [3.0, 2.0, 2.5]
    half = np.where(rng.random(vocab) < 0.5, usual, -FLT_MAX)
    steps = rng.integers(0, 4, vocab) * 1024.0
    apart = np.where(rng.random(vocab) < 0.5, usual, usual - 3e6)
    return {
        "lowest": np.full(vocab, -FLT_MAX),
        "all masked": np.full(vocab, -1e9),
        "masked": masked,
        "half masked": half,
        "apart": apart,
        "below": usual - 6e5,
        "far below": usual * 64 - 3e6,
        "above": usual * 64 + 3e6,
        "far above": steps + 1.5e9,
        "one above all": np.where(np.arange(vocab) == 77, FLT_MAX, -FLT_MAX),
        "nan": np.where(np.arange(vocab) == 3, NAN, usual - 6e5),
        "nan far below": np.where(np.arange(vocab) == 70, NAN, np.round(usual * 4) / 4 - 2e6),
        # All of what a thread of the cuda backend has of some tokens, and of what a group has.
        "nan apart": np.where(
            np.arange(vocab) // 8 % 4 == 1, NAN, np.round(usual * 4) / 4 - 999_914
        ),
        "nan by groups": np.where(
            np.arange(vocab) // 8 % 2 == 1, NAN, np.round(usual * 4) / 4 - 999_914
        ),
    }


def random_params(
    rng: np.random.Generator, vocab: int, output: Sequence[int] = (), rate: float = 0.25
) -> SamplingParams:
    """Parameters in which every field is on with about that rate."""

    def maybe(value: Any, off: Any) -> Any:
        return value if rng.random() < rate else off

    def ids(most: int) -> list[int]:
        return [int(i) for i in rng.integers(0, vocab, rng.integers(1, most + 1))]

    bad_words = [ids(3) for _ in range(3)]
    # A word whose prefix the output ends in, so that one of them bites.
    bad_words.append([*output[-2:], int(rng.integers(vocab))])
    min_tokens = maybe(int(len(output) + rng.integers(0, 4)), 0)
    max_tokens = maybe(max(min_tokens, len(output) + int(rng.integers(1, 5))), None)
    return SamplingParams(
        temperature=float(rng.choice([0.0, 9e-6, 0.1, 0.7, 1.0, 1.0, 1.5, 20.0])),
        top_k=maybe(int(rng.integers(-1, vocab + 2)), 0),
        top_p=maybe(float(rng.uniform(0.02, 0.999)), 1.0),
        min_p=maybe(float(rng.choice([rng.uniform(0.001, 0.5), 1.0])), 0.0),
        top_n_sigma=maybe(float(rng.uniform(0.1, 2.5)), 0.0),
        typical_p=maybe(float(rng.uniform(0.05, 0.99)), 1.0),
        epsilon_cutoff=maybe(float(rng.uniform(1e-4, 0.2)), 0.0),
        eta_cutoff=maybe(float(rng.uniform(1e-4, 0.4)), 0.0),
        repetition_penalty=maybe(float(rng.uniform(0.5, 2.0)), 1.0),
        frequency_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        presence_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        logit_bias=maybe({i: float(rng.choice([1.5, -3.25, -INF])) for i in ids(5)}, {}),
        allowed_token_ids=maybe(tuple(ids(vocab)), None),
        bad_words_ids=maybe(bad_words, []),
        min_tokens=min_tokens,
        max_tokens=max_tokens,
        stop_token_ids=maybe(ids(2), []),
        ignore_eos=bool(rng.random() < 0.5),
        seed=int(rng.integers(0, 2**64, dtype=np.uint64)),
        logprobs=maybe(int(rng.integers(0, 5)), None),
        logprobs_mode="processed" if rng.random() < 0.5 else "raw",
        logprob_token_ids=maybe(ids(4), []),
        rank=bool(rng.random() < 0.5),
    )


def random_bitmask(rng: np.random.Generator, rows: int, vocab: int) -> torch.Tensor:
    """int32 [rows, ceil(vocab / 32)]: about half allowed, the last bits of the row set too."""
    words = rng.integers(-(2**31), 2**31, (rows, -(-vocab // 32)))
    return torch.from_numpy(words.astype(np.int32))


def random_words(rng: np.random.Generator, rows: int, extremes: float = 0.0) -> torch.Tensor:
    """int64 [rows], uniform; the given share of them is 0 or 2**64 - 1."""
    words = rng.integers(-(2**63), 2**63, rows)
    extreme = rng.random(rows) < extremes
    words[extreme] = rng.choice([0, -1], int(extreme.sum()))
    return torch.from_numpy(words)


# Comparison with the reference.


@dataclass
class Tally:
    """How often rounding may have decided a row, and how often it did.

    ambiguous: rows in which the contract leaves two outcomes open, because the word lies within the
    tolerated error of a boundary or a filter's decision within that of its cut. differences: rows
    of these in which the backend took another than the reference. All other rows are exact.
    """

    rows: int = 0
    ambiguous: int = 0
    differences: int = 0

    def add(self, other: Tally) -> None:
        self.rows += other.rows
        self.ambiguous += other.ambiguous
        self.differences += other.differences

    def check(self, *, ambiguous: float = 0.1, differences: float = 0.02) -> None:
        """The test has to be strict on nearly all rows to be worth anything."""
        assert self.rows > 0, "nothing was compared"
        assert self.ambiguous <= 2 + ambiguous * self.rows, self
        assert self.differences <= 1 + differences * self.rows, self


def share_tolerance(expected: RowResult) -> float:
    """How far a boundary, or a cumulative mass, may be from the reference's: the contract's sum."""
    return SHARE_TOLERANCE + expected.processed_logits.size * SHARE_FLOOR


def near_a_cut(expected: RowResult) -> bool:
    """Whether a filter's decision lies within rounding; those of min_p and top_k are exact."""
    rounding = {"top_n_sigma", "top_p", "typical_p", "epsilon_cutoff", "eta_cutoff"}
    margins = [m for name, m in expected.margins.items() if name in rounding]
    return min(margins, default=INF) <= share_tolerance(expected)


def assert_logprobs(got: Any, expected: Any, what: str = "logprobs") -> None:
    """Within LOGPROB_TOLERANCE; NaN equals NaN, and what overflows fp32 is -inf."""
    got = np.atleast_1d(np.asarray(got, np.float64))
    with np.errstate(over="ignore"):
        expected = np.atleast_1d(np.asarray(expected, np.float64)).astype(np.float32)
    expected = expected.astype(np.float64)
    assert got.shape == expected.shape, f"{what}: {got.shape}, expected {expected.shape}"
    same = (got == expected) | (np.isnan(got) & np.isnan(expected))
    finite = np.isfinite(got) & np.isfinite(expected)
    difference = np.abs(np.where(finite, got - np.where(finite, expected, 0), INF))
    close = difference <= LOGPROB_TOLERANCE * np.maximum(1, np.abs(expected) / 8)
    assert (same | close).all(), f"{what}: {got}, expected {expected}"


def on_host(output: StepOutput) -> StepOutput:
    """A copy that the next step does not overwrite."""
    return StepOutput(output.record.cpu().clone(), output._layout)


def assert_nothing_asked(host: StepOutput, row: int, params: SamplingParams | None) -> None:
    """What was not asked for says so: NaN, -1, 0. params None: a row in which nothing was drawn."""
    asked = params or SamplingParams()
    if asked.logprobs is None:
        assert math.isnan(host.logprobs[row])
    if not asked.rank:
        assert host.ranks[row] == 0
    assert (host.top_token_ids[row, asked.logprobs or 0 :] == -1).all()
    assert host.top_logprobs[row, asked.logprobs or 0 :].isnan().all()
    assert host.given_logprobs[row, len(asked.logprob_token_ids) :].isnan().all()


@dataclass
class Request:
    """What the reference must know of a request."""

    params: SamplingParams
    prompt: list[int]
    output: list[int]
    seed: int
    generation: int
    finish: FinishReason = FinishReason.NONE

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.output)


class CheckedTable:
    """A table and its sampler, with every step of every request checked against the reference.

    sampler: a factory taking table and backend name; the default steps eagerly.
    """

    def __init__(
        self,
        pair: BackendDevice,
        vocab_size: int,
        max_requests: int,
        *,
        sampler: Callable[[RequestTable, str], Sampler | GraphedSampler] = Sampler,
        eos_token_ids: Sequence[int] = (),
        **options: Any,
    ) -> None:
        self.pair = pair
        self.table = RequestTable(
            max_requests,
            vocab_size,
            device=pair.device,
            eos_token_ids=eos_token_ids,
            **{"seed": 1, **options},
        )
        self.sampler = sampler(self.table, pair.backend)
        self.requests: dict[int, Request] = {}
        self.tally = Tally()
        self._order = pair.order(vocab_size)

    def admit(
        self,
        params: SamplingParams,
        prompt: Sequence[int] = (),
        output: Sequence[int] = (),
        slot: int | None = None,
    ) -> int:
        if not self.pair.takes_words:
            params = replace(params, seed=None)
        self.pair.require(params)
        slot = self.table.admit(params, prompt, output_token_ids=output, slot=slot)
        admitted = self.table.request(slot)
        self.requests[slot] = Request(
            params, list(prompt), list(output), admitted.seed, admitted.generation
        )
        return slot

    def release(self, slot: int) -> None:
        self.table.release(slot)
        del self.requests[slot]

    def update(self, slot: int, params: SamplingParams) -> None:
        if not self.pair.takes_words:
            params = replace(params, seed=None)
        self.table.update(slot, params)
        self.requests[slot].params = params
        self.requests[slot].seed = self.table.request(slot).seed

    def expected(
        self,
        slot: int,
        logits: np.ndarray,
        word: int | None = None,
        bitmask: np.ndarray | None = None,
    ) -> RowResult:
        request = self.requests[slot]
        return sample_row(
            logits,
            request.params,
            vocab_size=self.table.vocab_size,
            prompt_token_ids=request.prompt,
            output_token_ids=request.output,
            eos_token_ids=self.table.eos_token_ids,
            grammar_bitmask=bitmask,
            word=word,
            seed=request.seed,
            order=self._order,
        )

    def step(
        self,
        logits: torch.Tensor,
        slots: Sequence[int],
        *,
        bitmask: torch.Tensor | None = None,
        words: torch.Tensor | None = None,
        device_inputs: bool = False,
    ) -> StepOutput:
        """One step, checked; device_inputs: slots, bitmask and words go in as device tensors."""
        if not self.pair.takes_words:
            words = None
        inputs = [torch.tensor(slots, dtype=torch.int32), bitmask, words]
        if device_inputs:
            inputs = [None if i is None else i.to(self.pair.device) for i in inputs]
        host = on_host(self.sampler(logits, inputs[0], grammar_bitmask=inputs[1], words=inputs[2]))
        values = logits.float().cpu().numpy()
        for row, slot in enumerate(slots):
            request = self.requests.get(slot)
            if request is None or request.finish:
                self._check_idle_row(host, row, request)
                continue
            word = None if words is None else int(words[row])
            mask = None if bitmask is None else bitmask[row].cpu().contiguous().numpy()
            self._check_row(host, row, slot, values[row], word, mask)
        return host

    def _check_idle_row(self, host: StepOutput, row: int, request: Request | None) -> None:
        assert host.token_ids[row] == -1
        assert host.flags[row] == (RowFlags.FINISHED if request else RowFlags.PADDING)
        assert host.finish_reason[row] == (request.finish if request else 0)
        assert host.generation[row] == (request.generation if request else 0)
        assert host.num_kept[row] == 0
        assert_nothing_asked(host, row, None)

    def _check_row(
        self,
        host: StepOutput,
        row: int,
        slot: int,
        logits: np.ndarray,
        word: int | None,
        bitmask: np.ndarray | None,
    ) -> None:
        request = self.requests[slot]
        expected = self.expected(slot, logits, word, bitmask)
        token = int(host.token_ids[row])
        if not self.pair.takes_words and token in expected.survivors:
            # Any survivor will do: that all are drawn as often as they should is another test's.
            expected = self.expected(slot, logits, word_of(expected, token), bitmask)
        near_cut = near_a_cut(expected)
        near_word = expected.tokens_near(share_tolerance(expected))
        self.tally.rows += 1
        self.tally.ambiguous += near_cut or len(near_word) > 1
        what = f"row {row}, slot {slot}, {request.params}"

        same_set = int(host.num_kept[row]) == expected.num_kept
        if request.params.logprobs_mode == "processed":  # as many may be others
            shown = host.top_token_ids[row, : len(expected.top_token_ids)].tolist()
            same_set = same_set and shown == list(expected.top_token_ids)
        if near_cut and not (same_set and token in near_word):
            # Another set was kept, and every field that depends on it may differ.
            assert expected.processed_logits[token] > -INF, what
            assert host.flags[row] == expected.flags, what
            self.tally.differences += 1
        else:
            if token != expected.token_id and token in near_word:
                self.tally.differences += 1
                expected = self.expected(slot, logits, word_of(expected, token), bitmask)
            check_fields(host, row, expected, request.params, what)
        assert host.generation[row] == request.generation
        request.output.append(token)
        request.finish = FinishReason(int(host.finish_reason[row]))

    def check_state(self) -> None:
        """The state records and the counts are what the requests' histories say."""
        table, layout = self.table, self.table.layout
        state, tables = table.state.cpu(), table.tables.cpu()
        positions, last = table.positions.cpu(), table.last_token_ids.cpu()
        for slot, request in self.requests.items():
            sequence = request.prompt + request.output
            assert positions[slot] == request.position
            assert last[slot] == (sequence[-1] if sequence else -1)
            assert state[slot, State.NUM_GENERATED] == len(request.output)
            assert state[slot, State.FINISH_REASON] == request.finish
            assert state[slot, State.GENERATION] == request.generation
            newest = request.output[::-1][: layout.recent_tokens]
            newest += [-1] * (layout.recent_tokens - len(newest))
            recent = state[slot, State.RECENT :][: layout.recent_tokens]
            assert recent.tolist() == newest
            if layout.penalties:
                self._check_counts(slot, request, tables)

    def _check_counts(self, slot: int, request: Request, tables: torch.Tensor) -> None:
        layout = self.table.layout
        for start, ids in (
            (layout.prompt_bits, request.prompt),
            (layout.output_bits, request.output),
        ):
            words = tables[start + slot * layout.bitmap_words :][: layout.bitmap_words]
            bits = np.unpackbits(words.numpy().view(np.uint8), bitorder="little")
            assert set(np.flatnonzero(bits).tolist()) == set(ids)
        counts = tables[layout.counts + slot * layout.vocab_size :][: layout.vocab_size]
        for token, count in Counter(request.output).items():
            assert counts[token] == count


def word_of(expected: RowResult, token: int) -> int:
    """A word that makes the reference draw that survivor: the middle one."""
    index = expected.survivors.tolist().index(token)
    first = expected.cumulative[index - 1] if index else 0
    assert expected.cumulative[index] > first, f"token {token} has no mass"
    return ((first + expected.cumulative[index]) << 63) // expected.cumulative[-1]


def check_fields(
    host: StepOutput, row: int, expected: RowResult, params: SamplingParams, what: str = ""
) -> None:
    """One output row is the reference's: everything exact but logprobs."""
    exact = {
        "token_ids": expected.token_id,
        "num_kept": expected.num_kept,
        "flags": int(expected.flags),
        "finish_reason": int(expected.finish_reason),
        "ranks": expected.rank,
    }
    got = {name: int(getattr(host, name)[row]) for name in exact}
    assert got == exact, what
    assert_logprobs(host.logprobs[row], expected.logprob, f"logprob, {what}")
    top = len(expected.top_token_ids)
    assert host.top_token_ids[row, :top].tolist() == list(expected.top_token_ids), what
    assert_logprobs(host.top_logprobs[row, :top], expected.top_logprobs, f"top-n, {what}")
    given = len(expected.given_logprobs)
    assert_logprobs(host.given_logprobs[row, :given], expected.given_logprobs, f"given, {what}")
    assert_nothing_asked(host, row, params)


# The checks that need many draws of one distribution. Each takes what the mutants break.


@dataclass(frozen=True)
class Case:
    """One distribution: the row of logits and all that shapes it."""

    logits: np.ndarray
    params: SamplingParams = field(default_factory=SamplingParams)
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    bitmask: np.ndarray | None = None

    def expected(self, pair: BackendDevice) -> RowResult:
        return sample_row(
            self.logits,
            self.params,
            prompt_token_ids=self.prompt,
            output_token_ids=self.output,
            grammar_bitmask=self.bitmask,
            word=0,
            order=pair.order(len(self.logits)),
        )

    def probabilities(self, pair: BackendDevice) -> torch.Tensor:
        """fp64 [V]; exactly 0 outside the survivors."""
        expected = self.expected(pair)
        dense = torch.zeros(len(self.logits), dtype=torch.float64)
        dense[torch.from_numpy(expected.survivors)] = torch.from_numpy(expected.probabilities)
        return dense


def draw(
    pair: BackendDevice,
    cases: Sequence[Case],
    slots: int,
    steps: int,
    *,
    words: torch.Tensor | None = None,
    graphed: bool = False,
    first_seed: int = 0,
) -> torch.Tensor:
    """Token ids, int64 [steps, slots]: slot i draws from cases[i % len(cases)], seed first + i.

    words: int64 [steps * slots], taken instead of the seeds' own. The state is put back before
    every step but for the positions, so that penalties see the same history in all of them.
    """
    if words is not None:
        pair.require_words()
    vocab = len(cases[0].logits)
    table = RequestTable(slots, vocab, device=pair.device, seed=0)
    row_cases = [cases[i % len(cases)] for i in range(slots)]
    for i, case in enumerate(row_cases):
        pair.require(replace(case.params, seed=None))
        seeded = pair.supported(replace(case.params, seed=first_seed + i))
        table.admit(seeded, case.prompt, output_token_ids=case.output)
    sampler: Any = (
        GraphedSampler(table, (slots,), backend=pair.backend)
        if graphed
        else Sampler(table, pair.backend)
    )
    logits = torch.from_numpy(np.stack([case.logits for case in row_cases])).to(pair.device)
    bitmask = None
    if any(case.bitmask is not None for case in cases):
        everything = np.full(-(-vocab // 32), -1, np.int32)
        masks = [everything if c.bitmask is None else c.bitmask for c in row_cases]
        bitmask = torch.from_numpy(np.stack(masks)).to(pair.device)
    if words is not None:
        words = words.to(pair.device).view(steps, slots)
    numbers = torch.arange(slots, dtype=torch.int32, device=pair.device)
    table.upload()
    state, tables = table.state.clone(), table.tables.clone()
    drawn = torch.empty(steps, slots, dtype=torch.int64, device=pair.device)
    for step in range(steps):
        positions = table.positions.clone()
        table.state.copy_(state)
        table.tables.copy_(tables)
        table.positions.copy_(positions)
        step_words = None if words is None else words[step]
        drawn[step] = sampler(logits, numbers, grammar_bitmask=bitmask, words=step_words).token_ids
    return drawn.cpu()


def check_extreme_words(pair: BackendDevice, case: Case) -> None:
    """The words 0 and 2^64 - 1 draw the first and the last survivor."""
    survivors = case.expected(pair).survivors
    drawn = draw(pair, [case], 2, 1, words=torch.tensor([0, -1]))
    assert drawn[0].tolist() == [survivors[0], survivors[-1]]


def check_spaced_words(pair: BackendDevice, case: Case, num_words: int = 2**16) -> None:
    """Over equally spaced words every id is drawn as often as its probability says, within 2.

    The words and their mid-points are those of an exact inverse CDF; 1 for the end of either side,
    and nothing for rounding, which moves a boundary by 2^-20 at most.
    """
    num_words = pair.rows(num_words, 24)
    slots = min(1024, num_words)
    drawn = draw(pair, [case], slots, num_words // slots, words=spaced_words(num_words))
    assert ((drawn >= 0) & (drawn < len(case.logits))).all(), "an id out of range"
    counts = torch.bincount(drawn.flatten(), minlength=len(case.logits))
    wanted = case.probabilities(pair) * num_words
    outside = torch.nonzero((wanted == 0) & (counts > 0)).flatten()
    assert not outside.numel(), f"ids {outside.tolist()} are no survivors"
    error = (counts - wanted).abs()
    worst = int(error.argmax())
    assert error[worst] <= 2, f"id {worst}: {counts[worst]} of {num_words}, {wanted[worst]} due"


def check_law(
    pair: BackendDevice,
    cases: Sequence[Case],
    *,
    false_alarm: float,
    slots: int = 1024,
    draws: int = 20_000,
    graphed: bool = False,
) -> None:
    """Real draws of every case, all cases in one batch, follow the reference's probabilities.

    draws: at least so many of each case. false_alarm: of the whole check.
    """
    pair.require_speed()
    slots -= slots % len(cases)
    steps = -(-draws * len(cases) // slots)
    drawn = draw(pair, cases, slots, steps, graphed=graphed, first_seed=1000)
    for i, case in enumerate(cases):
        hits = torch.bincount(drawn[:, i :: len(cases)].flatten(), minlength=len(case.logits))
        chi_square(hits, case.probabilities(pair), false_alarm=false_alarm / len(cases))


def check_independence(drawn: torch.Tensor, probability: torch.Tensor, false_alarm: float) -> None:
    """drawn [steps, slots], all of one distribution: no draw tells anything of its neighbours.

    Pairs of a draw with the next one of its slot, with the same step's of the next seed, and with
    the next step's of the next and of the previous seed (a generator that counts seed + position
    would give one word twice there) follow the product of the two laws.
    """
    both = torch.outer(probability, probability).flatten()
    size = len(probability)
    neighbours = {
        "next draw": (drawn[:-1], drawn[1:]),
        "next seed": (drawn[:, :-1], drawn[:, 1:]),
        "next draw, next seed": (drawn[:-1, :-1], drawn[1:, 1:]),
        "next draw, previous seed": (drawn[:-1, 1:], drawn[1:, :-1]),
    }
    for name, (one, other) in neighbours.items():
        hits = torch.bincount((one * size + other).flatten(), minlength=size * size)
        try:
            chi_square(hits, both, false_alarm=false_alarm / len(neighbours))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


def check_fresh_draws(sequence: Sequence[int]) -> None:
    """A sequence of draws from a flat row is not stuck: it does not repeat itself."""
    repeats = sum(a == b for a, b in pairwise(sequence))
    assert repeats < 0.5 * len(sequence), f"{repeats} of {len(sequence)} draws repeat the last one"


def check_raw_logprobs(host: StepOutput, logits: np.ndarray, vocab_size: int) -> None:
    """The drawn tokens' raw logprobs are those of the model's logits over the vocabulary alone."""
    for row, values in enumerate(logits):
        logprobs = raw_logprobs(values, vocab_size=vocab_size)
        assert_logprobs(host.logprobs[row], logprobs[int(host.token_ids[row])])


def check_padding_writes_nothing(pair: BackendDevice, *, graphed: bool = False) -> None:
    """A step of padding rows alone, and some among others, leave every other slot as it was."""
    vocab = 40
    table = RequestTable(4, vocab, device=pair.device, eos_token_ids=[0])
    for seed in range(3):
        params = pair.supported(SamplingParams(seed=seed, logprobs=1))
        table.admit(params, [1, 2], output_token_ids=[3])
    sampler: Any = (
        GraphedSampler(table, (4,), backend=pair.backend)
        if graphed
        else Sampler(table, pair.backend)
    )
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(0)).to(pair.device)
    table.upload()

    def live() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """All but the padding rows; of tables the counts alone may be stale where no bit is set."""
        layout = table.layout
        bits = table.tables[: layout.counts].view(3, layout.rows, layout.bitmap_words)[:, :4]
        return table.params[:4].clone(), table.state[:4].clone(), bits.clone()

    before = live()
    host = on_host(sampler(logits, torch.full((4,), -1, dtype=torch.int32)))
    assert host.token_ids.tolist() == [-1] * 4
    assert (host.flags == int(RowFlags.PADDING)).all()
    for was, now in zip(before, live(), strict=True):
        assert torch.equal(was, now), "a padding row wrote something"
    slots = torch.tensor([-1, 1, -1], dtype=torch.int32)
    host = on_host(sampler(logits[:3], slots))
    assert host.token_ids[[0, 2]].tolist() == [-1, -1] and host.token_ids[1] >= 0
    after = live()
    others = [0, 2, 3]
    assert torch.equal(after[1][others], before[1][others])
    assert torch.equal(after[2][:, others], before[2][:, others])
    assert int(table.positions[1]) == 4


def check_padded_ids(pair: BackendDevice, *, graphed: bool = False) -> None:
    """vocab_size < V_logits: the tail is never drawn, listed, or in a normaliser."""
    vocab, width = 50, 64
    values = np.random.default_rng(0).normal(0, 1, (6, width)).astype(np.float32)
    for row, poison in enumerate((INF, NAN, FLT_MAX, 80.0, 0.0, -INF)):
        values[row, vocab:] = poison
    table = RequestTable(6, vocab, device=pair.device)
    for i in range(6):
        table.admit(pair.supported(SamplingParams(seed=i, logprobs=1, rank=True)))
    sampler: Any = (
        GraphedSampler(table, logits_width=width, backend=pair.backend)
        if graphed
        else Sampler(table, pair.backend)
    )
    logits = torch.from_numpy(values).to(pair.device)
    slots = torch.arange(6, dtype=torch.int32)
    extremes = (torch.zeros(6, dtype=torch.int64), torch.full((6,), -1))
    for words in (None, *(extremes if pair.takes_words else ())):
        host = on_host(sampler(logits, slots, words=words))
        assert (host.token_ids < vocab).all(), "a padded id was drawn"
        assert (host.top_token_ids < vocab).all(), "a padded id was listed"
        assert (host.flags == 0).all()
        check_raw_logprobs(host, values, vocab)


def flat_draws(
    pair: BackendDevice, seeds: Sequence[int], steps: int, vocab: int, *, graphed: bool = True
) -> torch.Tensor:
    """int64 [steps, slots]: draws of those seeds from a flat row, through one graph on a GPU."""
    pair.require_words()
    table = RequestTable(len(seeds), vocab, device=pair.device)
    for seed in seeds:
        table.admit(SamplingParams(seed=seed))
    sampler: Any = (
        GraphedSampler(table, (len(seeds),), backend=pair.backend)
        if graphed
        else Sampler(table, pair.backend)
    )
    logits = torch.zeros(len(seeds), vocab, device=pair.device)
    slots = torch.arange(len(seeds), dtype=torch.int32, device=pair.device)
    return torch.stack([sampler(logits, slots).token_ids.clone() for _ in range(steps)]).cpu()


def check_seeds(pair: BackendDevice, *, graphed: bool = False) -> None:
    """Each row has its own seed: equal seeds draw equally, and others differently."""
    seeds = [1111, 2222, 3333, 4444]
    drawn = flat_draws(pair, seeds, 3, 4096, graphed=graphed)
    same = flat_draws(pair, [1111] * 4, 3, 4096, graphed=graphed)
    assert (same == same[:, :1]).all()
    assert torch.equal(drawn[:, 0], same[:, 0])
    assert all(len(set(row)) == 4 for row in drawn.tolist()), "two seeds drew the same"
