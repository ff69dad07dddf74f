"""The first pass: every logit once, of which it keeps maxima and sums of groups."""

from __future__ import annotations

import triton
import triton.language as tl

from graphed_sampling.backends.triton_kernels.constants import (
    F_ADMITTED,
    GROUP,
    GROUPS_OF_TILE,
    INF,
    LOG2_E,
    MOMENTS,
    NEG_INF,
    P_FLAGS,
    RAW_MAXIMA,
    RAW_SUMS,
    S_FINISH_REASON,
    SUMS,
    TILE,
)
from graphed_sampling.backends.triton_kernels.numbers import (
    _fast_exp2,
    _store_f32,
    _z,
)
from graphed_sampling.backends.triton_kernels.rows import (
    _processed,
    _row,
    _wishes,
)


@triton.jit
def _tree_sum(values):
    """Sums of rows of 64, in one order whatever the layout: a sum of two has no order."""
    rows: tl.constexpr = values.shape[0]
    values = tl.sum(tl.reshape(values, [rows * 32, 2]), 1)
    values = tl.sum(tl.reshape(values, [rows * 16, 2]), 1)
    values = tl.sum(tl.reshape(values, [rows * 8, 2]), 1)
    values = tl.sum(tl.reshape(values, [rows * 4, 2]), 1)
    values = tl.sum(tl.reshape(values, [rows * 2, 2]), 1)
    return tl.sum(tl.reshape(values, [rows, 2]), 1)


@triton.jit
def _sums(y, maximum, scale):
    """Of groups [G, 64] with their maxima [G]: the weights' sums, relative to the maximum."""
    base = tl.where(maximum == NEG_INF, 0.0, maximum)
    return _tree_sum(_fast_exp2(_z(y, base[:, None], scale)))


@triton.jit
def _careful_sums(y, maximum, scale):
    """The same for groups that may hold +inf: where they do, their number."""
    y, maximum = tl.broadcast(y, maximum[:, None])
    z = tl.where(y == maximum, 0.0, _z(y, maximum, scale))
    return _tree_sum(tl.where(y == NEG_INF, 0.0, _fast_exp2(z)))


@triton.jit
def _moments(y, maximum, scale):
    """Sums of weight * z over groups."""
    base = tl.where((maximum == NEG_INF) | (maximum == INF), 0.0, maximum)
    z = _z(y, base[:, None], scale)
    return _tree_sum(tl.where(z < -126.0, 0.0, _fast_exp2(z) * z))


@triton.jit
def _tile(logits, first, vocab):
    """A tile of a row's logits, from `first` on; -inf past its end."""
    offsets = first + tl.arange(0, TILE)
    if first + TILE <= vocab:
        x = tl.load(logits + offsets)
    else:
        x = tl.load(logits + offsets, mask=offsets < vocab, other=NEG_INF)
    return x


@triton.jit
def _store_statistics(at, groups, x, y, split, both, wants_sum, wants_moment, scale, mask):
    """The statistics of groups [G, 64] of sanitised x and processed y; at: [G], of the maxima."""
    raw_scale = tl.full((), LOG2_E, tl.float32)
    maximum = tl.max(y, 1)
    raw_maximum = tl.max(x, 1)
    _store_f32(at, maximum, mask=mask)
    raw_sums = _careful_sums(x, raw_maximum, raw_scale)
    if wants_sum:
        _store_f32(at + groups * SUMS, _careful_sums(y, maximum, scale), mask=mask)
    else:
        _store_f32(at + groups * SUMS, raw_sums, mask=mask)
    if wants_moment:
        _store_f32(at + groups * MOMENTS, _moments(y, maximum, scale), mask=mask)
    if split:
        _store_f32(at + groups * RAW_MAXIMA, raw_maximum, mask=mask)
    if split | both:
        _store_f32(at + groups * RAW_SUMS, raw_sums, mask=mask)


@triton.jit(noinline=True)
def _stream_checked(row, first, vocab, at, groups, wants_sum, wants_moment, scale):
    """`stream` of a tile in which masks or penalties count."""
    raw_scale = tl.full((), LOG2_E, tl.float32)
    for start in range(first, first + TILE, 1024):
        group_ids = start + tl.arange(0, 16) * 64
        ids = group_ids[:, None] + tl.arange(0, GROUP)[None, :]
        inside = ids < vocab
        x = tl.load(row[0] + ids, mask=inside, other=NEG_INF).to(tl.float32)
        unusual = tl.max(((x != x) | (x == INF)).to(tl.int32), 1) != 0
        x = tl.where(x != x, NEG_INF, x) + 0.0
        y = _processed(x, ids, inside, row, 0, 0, group_ids)
        to = at + start // 64 + tl.arange(0, 16)
        maximum = tl.max(y, 1)
        raw_maximum = tl.max(x, 1)
        _store_f32(to, tl.where(unusual, INF, maximum))
        _store_f32(to + groups * RAW_MAXIMA, raw_maximum)
        _store_f32(to + groups * RAW_SUMS, _sums(x, raw_maximum, raw_scale))
        if wants_sum:
            _store_f32(to + groups * SUMS, _sums(y, maximum, scale))
        if wants_moment:
            _store_f32(to + groups * MOMENTS, _moments(y, maximum, scale))


# Integers are never compiled in, and callers' tensors may be aligned as they like: a step must not
# find that a kernel has yet to be compiled.
INTEGERS = (
    "stride", "bitmask_stride", "scratch_32", "mode", "vocab_units", "groups_64", "params_words",
    "state_words", "output_words", "bias_ids", "bias_values", "stop_ids", "given_ids",
    "max_logprobs", "max_logprob_ids", "recent_tokens", "bans_at", "plan_at", "candidates_at",
    "bins_at", "prompt_bits", "output_bits", "counts_at", "penalties",
)  # fmt: skip
POINTERS = (
    "logits", "slots", "all_params", "state", "tables", "bitmask", "words", "given", "output",
)  # fmt: skip


@triton.jit(
    do_not_specialize=(*INTEGERS, "max_requests", "tiles"), do_not_specialize_on_alignment=POINTERS
)
def stream(
    logits, stride, slots, all_params, state, tables, bitmask, bitmask_stride, words, given, output,
    scratch, scratch_32, mode, vocab_units, groups_64, params_words, state_words, output_words,
    bias_ids, bias_values, stop_ids, given_ids, max_logprobs, max_logprob_ids, recent_tokens,
    bans_at, plan_at, candidates_at, bins_at, prompt_bits, output_bits, counts_at, penalties,
    max_requests, SUPER: tl.constexpr, UNIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of a row: its groups' maxima and sums. Grid: rows, tiles.

    A group that holds NaN or +inf, either of which makes its sum NaN, gets the maximum +inf, so
    that `finish` has to look for such groups only where a row's maximum is that.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    index = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * TILE
    # Passed in parts, so that the compiler knows what divides them.
    groups = groups_64 * 64
    scratch_words = scratch_32 * 32
    vocab = vocab_units * UNIT
    given_slot = tl.load(slots + index)
    if (given_slot >= 0) & (given_slot < max_requests):
        slot = given_slot.to(tl.int64)
        params = all_params + slot * params_words
        flags = tl.load(params + P_FLAGS)
        wants_sum, wants_moment, wants_raw, scale = _wishes(flags, params)
        finished = tl.load(state + slot * state_words + S_FINISH_REASON) != 0
        logits_row = logits + index * stride * UNIT
        if UNIT > 1:
            logits_row = tl.multiple_of(logits_row, 16)
        x = _tile(logits_row, first, vocab)
        if ((flags & F_ADMITTED) != 0) & (finished == 0):
            row_scratch = scratch + index * scratch_words
            row = _row(
                logits_row, params, slot, index, tables, bitmask, bitmask_stride, given,
                row_scratch, mode, flags, vocab, bias_ids, bias_values, bans_at, prompt_bits,
                output_bits, counts_at,
            )  # fmt: skip
            if row[7] != 0:
                _stream_checked(
                    row, first, vocab, row_scratch, groups, wants_sum, wants_moment, scale
                )
            else:
                raw_scale = tl.full((), LOG2_E, tl.float32)
                first_scale = tl.where(wants_sum, scale, raw_scale)
                at = row_scratch + first // GROUP + tl.arange(0, GROUPS_OF_TILE)
                grouped = tl.reshape(x.to(tl.float32), [GROUPS_OF_TILE, GROUP])
                maximum = tl.max(grouped, 1)
                sums = _sums(grouped, maximum, first_scale)
                _store_f32(at, tl.where(sums != sums, INF, maximum + 0.0))
                _store_f32(at + groups * SUMS, sums)
                if wants_sum & wants_raw & (scale != raw_scale):
                    _store_f32(at + groups * RAW_SUMS, _sums(grouped, maximum, raw_scale))
                if wants_moment:
                    _store_f32(at + groups * MOMENTS, _moments(grouped, maximum, scale))
