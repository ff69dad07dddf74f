"""The `triton` backend: the whole step in one streaming pass and one finishing pass.

The kernels (triton_kernels/) run on any GPU that Triton compiles for, and on the CPU through
Triton's interpreter, which exists for tests: it is chosen by the environment variable
TRITON_INTERPRET=1, set before Triton is imported.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import importlib.util
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from graphed_sampling.backends.position_records import Forward, Positions, Upstream
from graphed_sampling.layout import TableLayout

NAME: Final = "triton"
CHOSEN_FOR: Final = "tables on other GPUs, where Triton is installed"
REFUSES: Final[frozenset[str]] = frozenset()

GROUP: Final = 64
"""Tokens of which a maximum and a sum are kept: a cache line of bf16."""
TILE: Final = 2048
"""Tokens of which a program of `stream` keeps the statistics."""
ROW_TILE: Final = 2048
"""Tokens that `dense` reads at a time."""
LISTED: Final = 2048
"""Candidates that a row's list holds."""
SUPERS: Final = 512
"""Into how many supers, of whole groups, a row is parted: a warp holds a value of each."""
SHORT: Final = 64
"""Candidates of the lists that most rows have."""
BRACKETED: Final = 16384
"""Tokens around the cut of a flat row that its list holds."""
BINS: Final = 1024
"""Parts of the bracket around the cut of a flat row, whose masses are added up."""
HAS_BITMASK, HAS_WORDS, HAS_GIVEN = 1, 2, 4
"""Bits of `mode`: which optional inputs there are."""
KEEP_TIES, JOINT, DECIDE, SLAB = 1, 2, 4, 8
"""Bits of LAW, which is 0 here: see triton_kernels/__init__.py."""
DECISION_WORDS: Final = 13
"""Words that tell what is known of a row before somebody else draws its token."""
SLAB_SIZE: Final = 1024
"""Places that FlashInfer's slab of a row's best tokens has."""

# Launches, measured on an H200 (bench/log_triton.md): warps a program, and the most registers a
# thread, which rare branches would otherwise drive up. None of it changes a result: see
# triton_kernels/__init__.py.
_STREAM_16_BITS: Final = {"num_warps": 4, "maxnreg": 32}
_STREAM_32_BITS: Final = {"num_warps": 4, "maxnreg": 40}
_FINISH: Final = {"num_warps": 4, "maxnreg": 128}
_DENSE: Final = {"num_warps": 8, "maxnreg": 128}
_GROUP: Final = {"num_warps": 1, "maxnreg": 128}  # for the tokens of one group
_DENSE_PROGRAMS: Final = 264  # that share what `finish` leaves: mostly nothing
# Of `survey` and `score`: how many rows a program takes a tile of, and the scratch of the rows that
# they take at a time, whose statistics the L2 then still holds.
_SURVEY_ROWS: Final = 4
_SCORE_BYTES: Final = 64 * 2**20
_SCORE: Final = {"num_warps": 4, "maxnreg": 64}
_INTERPRETER_LOCK: Final = threading.Lock()


def unusable(device: torch.device) -> str:
    """Why the backend cannot run on `device`; empty where it can."""
    if device.type not in ("cuda", "cpu"):
        return "Triton's kernels run on GPUs"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    error = _triton_error()
    if error:
        return error
    if device.type == "cpu":
        if not _interpreted():
            return "it runs on GPUs; on the CPU only in Triton's interpreter (TRITON_INTERPRET=1)"
        return ""
    if _interpreted():
        return "Triton's interpreter is on (TRITON_INTERPRET=1), which serves the CPU only"
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if _capability(device) < (8, 0):
        return "the GPU is older than compute capability 8.0"
    return ""


@functools.cache
def _triton_error() -> str:
    """Why Triton, which is installed, does not import."""
    try:
        _kernels()
    except Exception as error:
        return " ".join(f"triton does not import: {type(error).__name__}: {error}".split())
    return ""


@functools.cache
def _interpreted() -> bool:
    """Whether the kernels were made for Triton's interpreter."""
    return "interpreter" in type(_kernels().stream).__module__


@functools.lru_cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def has_pdl(device: torch.device) -> bool:
    """Whether kernels there may begin before the ones they follow have ended."""
    return device.type == "cuda" and torch.version.hip is None and _capability(device) >= (9, 0)


def _kernels() -> Any:
    return importlib.import_module("graphed_sampling.backends.triton_kernels")


def canonical_order(vocab_size: int) -> Tensor:
    """int64 [vocab_size]: ids ascending."""
    return torch.arange(vocab_size, device="cpu")


@dataclass(frozen=True)
class _Scratch:
    """Where things lie in a row of scratch, in words: arrays of a word a group, then lists.

    super_groups: the number of groups in a super.
    """

    groups: int
    super_groups: int
    masses: int
    plan: int
    candidates: int
    bracket: int
    bins: int
    bans: int
    words: int


@functools.lru_cache
def _scratch(layout: TableLayout) -> _Scratch:
    # Whole tiles, whose programs write the statistics of all their groups.
    groups = -(-layout.vocab_size // (2 * TILE)) * (2 * TILE // GROUP)
    super_groups = 1 << (-(-groups // SUPERS) - 1).bit_length()
    groups += -groups % super_groups  # whole supers too
    masses = 6 * groups + SUPERS
    plan = masses + 2 * groups
    candidates = plan + 16
    bracket = candidates + 2 * LISTED
    # Rows of smaller vocabularies never need a bracket.
    bins = bracket + (2 * BRACKETED if layout.vocab_size >= BRACKETED else 0)
    bans = bins + (2 * BINS if layout.vocab_size >= BRACKETED else 0)
    words = bans + layout.max_stop_ids + layout.max_bad_words
    words += -words % 32
    return _Scratch(groups, super_groups, masses, plan, candidates, bracket, bins, bans, words)


def group_count(layout: TableLayout) -> int:
    """Into how many groups of GROUP tokens a row is cut; the last ones may hold none."""
    return _scratch(layout).groups


def scratch_words(layout: TableLayout, rows: int) -> int:
    """int32 words of scratch that a step of `rows` rows needs."""
    # Behind the rows: what is left of each to `dense`, and the lists of those.
    return rows * _scratch(layout).words + 3 * rows


@dataclass(frozen=True)
class _Launch:
    """A launch of a kernel: its arguments in order, constants and options."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: Sequence[Any]
    keywords: dict[str, Any]

    def __call__(self) -> None:
        self.kernel[self.grid](*self.arguments, **self.keywords)


@dataclass
class _Arguments:
    """What the kernels take. Tensors, or for a compilation their dtypes.

    unit: the number of logits in 16 bytes where all rows are aligned to that and the vocabulary is
    a multiple, else 1. stride, bitmask_stride: in elements. logits_bytes: of one.
    """

    logits: Any
    slots: Any
    params: Any
    state: Any
    tables: Any
    output: Any
    scratch: Any
    bitmask: Any
    words: Any
    given: Any
    stride: int
    bitmask_stride: int
    logits_bytes: int
    unit: int
    mode: int


@dataclass(frozen=True)
class Draw:
    """What the kernels need where another draws the tokens.

    law: bits of LAW. offset_step: random numbers between a position's first and the next one's.
    groups, tokens: the probabilities that are drawn with, fp32 [rows, group_count] and
    [rows, GROUP], or their dtype. With SLAB only the law counts.
    """

    law: int
    offset_step: int = 0
    groups: Any = None
    tokens: Any = None


def launches(
    a: _Arguments,
    layout: TableLayout,
    rows: int,
    device: torch.device,
    draw: Draw | None = None,
) -> Iterator[_Launch]:
    """The launches of one step, in order.

    draw: where another draws, or finds the best tokens. Its draws come before and after the last
    but one launch, `token_probabilities`; what it finds, after the first one, `ask`.
    """
    kernels, at = _kernels(), _scratch(layout)
    law = 0 if draw is None else draw.law
    penalties = (0, 0, 0)
    if layout.penalties:
        penalties = (layout.prompt_bits, layout.output_bits, layout.counts)
    on_gpu, pdl = device.type == "cuda", has_pdl(device)

    def launch(
        kernel: Any,
        grid: tuple[int, ...],
        arguments: Sequence[Any],
        options: dict[str, int],
        heeds: int,
    ) -> _Launch:
        """heeds: what of the law makes another kernel of it; all others share what is compiled."""
        keywords: dict[str, Any] = {
            "SUPER": at.super_groups,
            "UNIT": a.unit,
            "PDL": pdl,
            "LAW": law & heeds,
        }
        if on_gpu:
            # No contraction: every operation of y rounds once.
            keywords |= {"num_warps": options["num_warps"], "enable_fp_fusion": False}
            if torch.version.hip is None:
                keywords |= {"maxnreg": options["maxnreg"], "launch_pdl": pdl}
        return _Launch(kernel, grid, arguments, keywords)

    arguments = (
        a.logits, a.stride // a.unit, a.slots, a.params, a.state, a.tables, a.bitmask,
        a.bitmask_stride, a.words, a.given, a.output, a.scratch, at.words // 32, a.mode,
        layout.vocab_size // a.unit, at.groups // 64, layout.params_words, layout.state_words,
        layout.output_words, layout.bias_ids, layout.bias_values, layout.stop_ids,
        layout.given_ids, layout.max_logprobs, layout.max_logprob_ids, layout.recent_tokens,
        at.bans, at.plan, at.candidates, at.bins, *penalties, layout.penalties,
    )  # fmt: skip
    if law & SLAB:
        yield launch(kernels.ask, (rows,), (*arguments, layout.max_requests), _FINISH, 0)
    yield launch(
        kernels.stream,
        (rows, at.groups * GROUP // TILE),
        (*arguments, layout.max_requests),
        _STREAM_32_BITS if a.logits_bytes == 4 else _STREAM_16_BITS,
        JOINT,
    )
    yield launch(
        kernels.finish,
        (rows,),
        (
            *arguments,
            layout.max_requests,
            layout.bad_words,
            layout.max_bad_word_length,
            0 if draw is None else draw.offset_step,
        ),
        _FINISH,
        KEEP_TIES | JOINT | DECIDE | SLAB,
    )
    yield launch(
        kernels.dense,
        (_DENSE_PROGRAMS if on_gpu else 1,),
        (*arguments, at.bracket, at.masses, rows),
        _DENSE,
        KEEP_TIES | JOINT | DECIDE,
    )
    if draw is None or not law & DECIDE:
        return
    yield launch(
        kernels.group_probabilities,
        (rows, at.groups * GROUP // TILE),
        (*arguments, layout.max_requests, draw.groups, rows),
        _STREAM_32_BITS,
        0,
    )
    yield launch(
        kernels.token_probabilities,
        (rows,),
        (*arguments, layout.max_requests, draw.tokens),
        _GROUP,
        0,
    )
    yield launch(kernels.conclude, (rows,), (*arguments, layout.max_requests), _FINISH, JOINT)


def _unit(logits: Tensor, stride: int, vocab_size: int) -> int:
    unit = 16 // logits.element_size()
    if logits.data_ptr() % 16 or stride % unit or vocab_size % unit:
        return 1
    return unit


def step_arguments(
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
) -> _Arguments:
    """What the kernels take of the arguments of `sample_step`."""
    rows = slots.shape[0]
    stride = logits.stride(0) if rows > 1 else logits.shape[1]
    mode = HAS_BITMASK * (grammar_bitmask is not None) + HAS_WORDS * (words is not None)
    mode += HAS_GIVEN * (given is not None)
    # What was not handed over is not read; a pointer of its type stands for it.
    return _Arguments(
        logits=logits,
        slots=slots.contiguous(),
        params=params,
        state=state,
        tables=tables,
        output=output,
        scratch=scratch,
        bitmask=slots if grammar_bitmask is None else grammar_bitmask,
        words=state.view(torch.int64) if words is None else words.contiguous(),
        given=slots if given is None else given,
        stride=stride,
        bitmask_stride=0 if grammar_bitmask is None else grammar_bitmask.stride(0),
        logits_bytes=logits.element_size(),
        unit=_unit(logits, stride, layout.vocab_size),
        mode=mode,
    )


def interpreter_lock() -> contextlib.AbstractContextManager[object]:
    """The interpreter keeps the program's index in one place for all threads."""
    return _INTERPRETER_LOCK if _interpreted() else contextlib.nullcontext()


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
) -> None:
    """One step in place; arguments as the op `sample_step`, checked there."""
    arguments = step_arguments(
        logits,
        slots,
        params,
        state,
        tables,
        output,
        scratch,
        layout,
        grammar_bitmask=grammar_bitmask,
        words=words,
        given=given,
    )
    with interpreter_lock():
        for launch in launches(arguments, layout, slots.shape[0], logits.device):
            launch()


@dataclass(frozen=True)
class _Scoring:
    """What `survey` and `score` are compiled for."""

    rank: bool
    entropy: bool


def scoring_launches(
    logits: Any,
    stride: int,
    unit: int,
    rows: Any,
    token_ids: Any,
    given_ids: Any,
    output: Any,
    scratch: Any,
    layout: TableLayout,
    count: int,
    device: torch.device,
    wishes: _Scoring,
) -> Iterator[_Launch]:
    """The launches for `count` positions; tensors, or for a compilation their dtypes."""
    kernels, at = _kernels(), _scratch(layout)
    pdl = has_pdl(device)
    itemsize = logits.itemsize if isinstance(logits, torch.dtype) else logits.element_size()

    def options(launch: dict[str, int]) -> dict[str, Any]:
        keywords: dict[str, Any] = {"UNIT": unit, "PDL": pdl}
        if device.type == "cuda":
            keywords |= {"num_warps": launch["num_warps"], "enable_fp_fusion": False}
            if torch.version.hip is None:
                keywords |= {"maxnreg": launch["maxnreg"], "launch_pdl": pdl}
        return keywords

    words, units = _score_words(layout) // 32, layout.vocab_size // unit
    yield _Launch(
        kernels.survey,
        (-(-count // _SURVEY_ROWS), at.groups * GROUP // TILE),
        (logits, stride // unit, rows, count, scratch, words, units, at.groups // 64),
        {"ROWS": _SURVEY_ROWS, "ENTROPY": wishes.entropy}
        | options(_STREAM_32_BITS if itemsize == 4 else _STREAM_16_BITS),
    )
    top = layout.max_logprobs > 0
    yield _Launch(
        kernels.score,
        (count,),
        (
            logits, stride // unit, rows, token_ids, given_ids, output, layout.output_words,
            scratch, words, _score_list(layout), units, at.groups // 64, layout.max_logprobs,
            layout.max_logprob_ids,
        ),
        {"TOP": top, "RANK": wishes.rank, "ENTROPY": wishes.entropy, "SUPER": at.super_groups}
        | options(_FINISH if top or wishes.rank else _SCORE),
    )  # fmt: skip


def _score_list(layout: TableLayout) -> int:
    """Where a position's list of candidates begins in its scratch: behind what `_scratch` has
    before the masses."""
    return _scratch(layout).masses


def _score_words(layout: TableLayout) -> int:
    words = _score_list(layout) + 2 * LISTED
    return words + -words % 32


def score_rows(
    logits: Tensor,
    positions: Positions,
    output: Tensor,
    layout: TableLayout,
    *,
    rank: bool,
    entropy: bool,
) -> None:
    """Raw logprobs at many positions: see `backends`. The first call of a kind compiles."""
    count, words = positions.count, _score_words(layout)
    stride = logits.stride(0) if logits.shape[0] > 1 else logits.shape[1]
    unit = _unit(logits, stride, layout.vocab_size)
    at_once = min(max(_SCORE_BYTES // (4 * words), 1), count)
    scratch = torch.empty(at_once * words, dtype=torch.int32, device=logits.device)
    with interpreter_lock():
        for start in range(0, count, at_once):
            part = slice(start, min(start + at_once, count))
            for launch in scoring_launches(
                logits, stride, unit, positions.rows[part].contiguous(),
                positions.accepted_token_ids[part].contiguous(),
                positions.accepted_given_ids[part].contiguous(), output[part], scratch, layout,
                part.stop - start, logits.device, _Scoring(rank, entropy),
            ):  # fmt: skip
                launch()


def gradient_rows(
    result: Tensor,
    logits: Tensor,
    positions: Positions,
    upstream: Upstream,
    forward: Forward,
    scale: Tensor | None,
    vocab_size: int,
) -> None:
    """Gradients of positions in order, of rows without filters: see `backends`."""
    count = positions.count
    if count == 0:
        return
    strides = [t.stride(0) if count > 1 else t.shape[1] for t in (logits, result)]
    unit = min(_unit(logits, strides[0], vocab_size), _unit(result, strides[1], vocab_size))
    ids, entropies = upstream.ids.contiguous(), forward.entropies.contiguous()
    of_entropies = entropies if upstream.of_entropies is None else upstream.of_entropies
    keywords: dict[str, Any] = {
        "ENTROPY": upstream.of_entropies is not None,
        "SCALED": scale is not None,
        "UNIT": unit,
    }
    if logits.device.type == "cuda":
        keywords |= {"num_warps": 4}
    with interpreter_lock():
        _kernels().differentiate[(count, -(-vocab_size // TILE))](
            logits, strides[0] // unit, result, strides[1] // unit, positions.rows.contiguous(),
            ids, upstream.gradients.contiguous(), ids.shape[1], upstream.totals.contiguous(),
            forward.normalisers.contiguous(), entropies, of_entropies.contiguous(),
            entropies if scale is None else scale.reshape(-1).contiguous(), vocab_size // unit,
            **keywords,
        )  # fmt: skip


def warm_up(
    layout: TableLayout, device: torch.device, logits_dtypes: Sequence[torch.dtype]
) -> None:
    """Compile every kernel for logits of these dtypes, or load it from Triton's cache: a step
    never waits for that."""
    compile_kernels(layout, device, logits_dtypes, None)


def compile_kernels(
    layout: TableLayout,
    device: torch.device,
    logits_dtypes: Sequence[torch.dtype],
    draw: Draw | None,
) -> None:
    """`warm_up` for a draw."""
    if device.type != "cuda":
        return

    def warm_all() -> None:
        import triton

        int32, int64 = torch.int32, torch.int64
        with (
            torch.cuda.device(device),
            ThreadPoolExecutor(min(os.cpu_count() or 1, 16)) as executor,
            triton.AsyncCompileMode(executor),
        ):
            for dtype in logits_dtypes:
                for unit in {16 // dtype.itemsize, 1}:
                    if layout.vocab_size % unit:
                        continue
                    arguments = _Arguments(
                        dtype, int32, int32, int32, int32, int32, int32, int32, int64, int32,
                        stride=unit, bitmask_stride=0, logits_bytes=dtype.itemsize, unit=unit,
                        mode=0,
                    )  # fmt: skip
                    for launch in launches(arguments, layout, 1, device, draw):
                        launch.kernel.warmup(*launch.arguments, grid=launch.grid, **launch.keywords)

    # In a context of its own: where a compilation fails, Triton leaves its mode on, and whatever
    # is compiled afterwards would fail of that.
    contextvars.copy_context().run(warm_all)
