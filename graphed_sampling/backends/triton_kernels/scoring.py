"""Raw logprobs of given tokens at many positions: the step's first pass, and a short finish."""

from __future__ import annotations

import triton
import triton.language as tl

from graphed_sampling.backends.triton_kernels.constants import (
    GROUP_LIST,
    GROUPS_OF_TILE,
    INF,
    LISTED,
    LN_2,
    LOG2_E,
    MOMENTS,
    NEG_INF,
    NORMAL,
    O_LISTS,
    POSITION_ENTROPY,
    POSITION_FLAGS,
    POSITION_LARGEST,
    POSITION_LOG,
    POSITION_LOGPROB,
    POSITION_NUM_KEPT,
    POSITION_RANK,
    R_EMPTY,
    R_NAN,
    R_PADDING,
    R_POS_INF,
    SUMS,
    SUPER_LIST,
    TILE,
)
from graphed_sampling.backends.triton_kernels.finishing import _list_unusual, _repair_groups
from graphed_sampling.backends.triton_kernels.groups import _mean, _statistics
from graphed_sampling.backends.triton_kernels.numbers import _log_mass, _store_f32
from graphed_sampling.backends.triton_kernels.report import (
    _clear_lists,
    _rank,
    _raw_logprobs,
    _raw_normaliser,
    _top,
)
from graphed_sampling.backends.triton_kernels.rows import _sanitised
from graphed_sampling.backends.triton_kernels.streaming import (
    _moments,
    _store_plain_statistics,
    _tile,
)

_POINTERS = ("logits", "rows", "token_ids", "given_ids", "output")


@triton.jit(
    do_not_specialize=("stride", "count", "scratch_32", "vocab_units", "groups_64"),
    do_not_specialize_on_alignment=_POINTERS[:2],
)
def survey(
    logits, stride, rows, count, scratch, scratch_32, vocab_units, groups_64,
    ROWS: tl.constexpr, ENTROPY: tl.constexpr, UNIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of ROWS positions' rows: its groups' maxima and sums, as `stream` keeps them.

    Grid: positions / ROWS, tiles. A program has several rows so that those which are not asked for
    cost no program.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    first = tl.program_id(1) * TILE
    # Passed in parts, so that the compiler knows what divides them.
    groups = groups_64 * 64
    scratch_words = scratch_32 * 32
    vocab = vocab_units * UNIT
    scale = tl.full((), LOG2_E, tl.float32)
    for j in range(ROWS):
        index = tl.program_id(0).to(tl.int64) * ROWS + j
        at_row = tl.load(rows + index, mask=index < count, other=-1)
        if at_row >= 0:
            logits_row = logits + at_row * stride * UNIT
            if UNIT > 1:
                logits_row = tl.multiple_of(logits_row, 16)
            at = scratch + index * scratch_words + first // 64 + tl.arange(0, GROUPS_OF_TILE)
            x = _tile(logits_row, first, vocab)
            maximum = _store_plain_statistics(at, groups, x, scale)
            if ENTROPY:
                grouped = tl.reshape(x.to(tl.float32), [GROUPS_OF_TILE, 64])
                _store_f32(at + groups * MOMENTS, _moments(grouped, maximum, scale))


@triton.jit
def _store_position(out, largest, raw_log, logprob, rank, entropy, flags):
    _store_f32(out + POSITION_LARGEST, largest)
    _store_f32(out + POSITION_LOG, raw_log.to(tl.float32))
    _store_f32(out + POSITION_LOGPROB, logprob)
    tl.store(out + POSITION_RANK, rank)
    tl.store(out + POSITION_NUM_KEPT, 0)
    _store_f32(out + POSITION_ENTROPY, entropy)
    tl.store(out + POSITION_FLAGS, flags)


@triton.jit
def _row_of_logits(logits_row, scratch, vocab):
    """What `_processed` has to know of a row that nothing masks or penalises: see `_row`."""
    checks = 0
    return (
        logits_row, scratch, scratch, scratch, scratch, scratch, scratch, checks, scratch, scratch,
        scratch, vocab,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=(
        "stride", "output_words", "scratch_32", "candidates_at", "vocab_units", "groups_64",
        "top_n", "num_given",
    ),
    do_not_specialize_on_alignment=_POINTERS,
)  # fmt: skip
def score(
    logits, stride, rows, token_ids, given_ids, output, output_words, scratch, scratch_32,
    candidates_at, vocab_units, groups_64, top_n, num_given, TOP: tl.constexpr,
    RANK: tl.constexpr, ENTROPY: tl.constexpr, SUPER: tl.constexpr, UNIT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One position a program: from its groups' statistics to its record.

    TOP, RANK, ENTROPY: whether best tokens, ranks and entropies are wanted.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    groups = groups_64 * 64
    vocab = vocab_units * UNIT
    index = tl.program_id(0).to(tl.int64)
    at_row = tl.load(rows + index)
    token = tl.load(token_ids + index)
    out = output + index * output_words
    nan = tl.full((), float("nan"), tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if at_row < 0:
        nothing = tl.full((), NEG_INF, tl.float32)
        _store_position(out, nothing, tl.full((), 0.0, tl.float64), nan, 0, nan, R_PADDING)
        _clear_lists(out, top_n, num_given, 0)
    else:
        logits_row = logits + at_row * stride * UNIT
        if UNIT > 1:
            logits_row = tl.multiple_of(logits_row, 16)
        row_scratch = scratch + index * (scratch_32 * 32)
        row = _row_of_logits(logits_row, row_scratch, vocab)
        sums = row_scratch + groups * SUMS
        scale = tl.full((), LOG2_E, tl.float32)
        seen_nan = 0
        _supers, largest, masses = _statistics(row_scratch, sums, groups, scale, True, SUPER)
        if largest == INF:
            group_list = row_scratch + groups * GROUP_LIST
            unusual = _list_unusual(
                row_scratch, row_scratch + groups * SUPER_LIST, group_list, groups, SUPER
            )
            seen_nan = _repair_groups(
                row, row_scratch, group_list, unusual, False, groups, vocab, 0, 0, False, False,
                False, ENTROPY, scale,
            )  # fmt: skip
            _supers, largest, masses = _statistics(row_scratch, sums, groups, scale, True, SUPER)
        total = tl.sum(masses)
        flags = tl.where(seen_nan != 0, R_NAN, 0)
        entropy = nan
        raw_log = tl.full((), 0.0, tl.float64)
        if (largest > NEG_INF) & (largest < INF):
            raw_log = _log_mass(total)
            if ENTROPY:
                moments = row_scratch + groups * MOMENTS
                mean = _mean(row_scratch, sums, moments, groups, largest, scale, total)
                entropy = tl.maximum(raw_log - mean * LN_2, 0.0).to(tl.float32)
        elif largest == INF:
            flags += R_POS_INF
            _largest, raw_log = _raw_normaliser(row_scratch, sums, groups, SUPER)
            if ENTROPY:
                entropy = raw_log.to(tl.float32)
        else:
            flags += R_EMPTY
        _clear_lists(out, top_n, num_given, top_n)
        tl.debug_barrier()
        logprob = nan
        rank = 0
        raw = tl.full((), 0, tl.int32) != 0  # not processed
        if token >= 0:
            x = tl.load(logits_row + token).to(tl.float32)
            x = tl.where(x != x, NEG_INF, x) + 0.0
            logprob = _raw_logprobs(x, largest, raw_log)
            if RANK:
                rank = _rank(x, row, row_scratch, row_scratch, groups, 0, 0, raw, SUPER)
        for first in range(0, num_given, 32):
            i = first + tl.arange(0, 32)
            ids = tl.load(given_ids + index * num_given + i, mask=i < num_given, other=-1)
            logprobs = _raw_logprobs(_sanitised(logits_row, ids, ids >= 0), largest, raw_log)
            logprobs = tl.where(ids < 0, nan, logprobs)
            _store_f32(out + O_LISTS + 3 * top_n + i, logprobs, mask=i < num_given)
        if TOP:
            list_y = row_scratch + candidates_at
            _top(
                out, top_n, top_n, row, row_scratch, row_scratch, list_y, list_y + LISTED, groups,
                vocab, 0, 0, NORMAL, 0, raw, largest, largest, raw_log, largest,
                tl.full((), NEG_INF, tl.float32), vocab, tl.full((), LOG2_E, tl.float64), raw_log,
                SUPER,
            )  # fmt: skip
        _store_position(out, largest, raw_log, logprob, rank, entropy, flags)
