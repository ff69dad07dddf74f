"""The first pass: every logit once, of which it keeps maxima and sums of groups."""

from __future__ import annotations

import triton
import triton.language as tl

from graphed_sampling.backends.triton_kernels.constants import (
    CHECK_ALLOWED,
    CHECK_GRAMMAR,
    CHECK_PENALTIES,
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
    _bit_count,
    _fast_exp2,
    _lowest_bit,
    _store_f32,
    _z,
)
from graphed_sampling.backends.triton_kernels.rows import (
    _checks,
    _penalised,
    _row,
    _settled,
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


@triton.jit
def _store_plain_statistics(at, groups, x, scale):
    """Maxima and sums of a tile's groups where nothing is masked or penalised. Returns the maxima.

    A group that holds NaN or +inf, either of which makes its sum NaN, gets the maximum +inf.
    """
    grouped = tl.reshape(x.to(tl.float32), [GROUPS_OF_TILE, GROUP])
    maximum = tl.max(grouped, 1)
    sums = _sums(grouped, maximum, scale)
    _store_f32(at, tl.where(sums != sums, INF, maximum + 0.0))
    _store_f32(at + groups * SUMS, sums)
    return maximum


@triton.jit
def _packed_bits(bitmap, first_ids, inside):
    """The bits of up to 8 tokens from each of the ids on, which are multiples of that number; above
    them there may be others."""
    bytes_ = bitmap.to(tl.pointer_type(tl.uint8))
    byte = tl.load(bytes_ + (first_ids >> 3), mask=inside, other=0).to(tl.int32)
    return byte >> (first_ids & 7)


@triton.jit(noinline=True)
def _stream_checked(row, first, at, groups, wants_sum, wants_moment, scale, WIDTH: tl.constexpr):
    """`stream` of a tile in which masks or penalties count."""
    params, grammar, allowed, prompt, output, counts, checks = row[1:8]
    vocab = row[11]
    parts: tl.constexpr = TILE // WIDTH
    groups_of: tl.constexpr = TILE // GROUP
    # A thread has the WIDTH tokens that it loads at once, and their bits.
    column = tl.arange(0, WIDTH)[None, :]
    first_ids = first + tl.arange(0, parts) * WIDTH
    some = first_ids < vocab
    ids = first_ids[:, None] + column
    allowed_bits = tl.full([parts], -1, tl.int32)
    in_output = tl.zeros([parts], tl.int32)
    left = tl.zeros([parts], tl.int32)
    # All that is to be loaded first: it comes at the same time. Groups that hold NaN or +inf are
    # marked, as `stream` does it.
    x = tl.load(row[0] + ids, mask=ids < vocab, other=NEG_INF).to(tl.float32)
    if (checks & CHECK_GRAMMAR) != 0:
        allowed_bits = _packed_bits(grammar, first_ids, some)
    if (checks & CHECK_ALLOWED) != 0:
        allowed_bits &= _packed_bits(allowed, first_ids, some)
    if (checks & CHECK_PENALTIES) != 0:
        in_output = _packed_bits(output, first_ids, some)
        left = (in_output | _packed_bits(prompt, first_ids, some)) & ((1 << WIDTH) - 1)
    raw = tl.reshape(x, [groups_of, GROUP])
    to = at + first // GROUP + tl.arange(0, groups_of)
    raw_maximum = tl.max(raw, 1)
    raw_sums = _sums(raw, raw_maximum, tl.full((), LOG2_E, tl.float32))
    _store_f32(to + groups * RAW_MAXIMA, raw_maximum + 0.0)
    _store_f32(to + groups * RAW_SUMS, raw_sums)
    y = x
    # Few tokens were seen: they are taken one after the other, in all parts at once.
    for _seen in range(tl.max(_bit_count(left))):
        bit = _lowest_bit(left) & 31
        here = (column == bit[:, None]) & (left != 0)[:, None]
        value = tl.sum(tl.where(here, y, 0.0), 1)
        counted = (left != 0) & (((in_output >> bit) & 1) != 0)
        changed = _penalised(value, counted, counts + first_ids + bit, params)
        changed = _settled(value, changed, value == NEG_INF)
        y = tl.where(here, changed[:, None], y)
        left = left & (left - 1)
    y = tl.where(((allowed_bits[:, None] >> column) & 1) == 0, NEG_INF, y)
    y = tl.reshape(y, [groups_of, GROUP])
    maximum = tl.max(y, 1)
    _store_f32(to, tl.where(raw_sums != raw_sums, INF, maximum + 0.0))
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


@triton.jit(do_not_specialize=(*INTEGERS, "max_requests"), do_not_specialize_on_alignment=POINTERS)
def stream(
    logits, stride, slots, all_params, state, tables, bitmask, bitmask_stride, words, given, output,
    scratch, scratch_32, mode, vocab_units, groups_64, params_words, state_words, output_words,
    bias_ids, bias_values, stop_ids, given_ids, max_logprobs, max_logprob_ids, recent_tokens,
    bans_at, plan_at, candidates_at, bins_at, prompt_bits, output_bits, counts_at, penalties,
    max_requests, SUPER: tl.constexpr, UNIT: tl.constexpr, PDL: tl.constexpr, LAW: tl.constexpr,
):  # fmt: skip
    """A tile of a row: its groups' maxima and sums. Grid: rows, tiles.

    A group that holds NaN or +inf gets the maximum +inf, so that `finish` has to look for such
    groups only where a row's maximum is that.
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
        wants_sum, wants_moment, wants_raw, scale = _wishes(flags, params, LAW)
        finished = tl.load(state + slot * state_words + S_FINISH_REASON) != 0
        logits_row = logits + index * stride * UNIT
        if UNIT > 1:
            logits_row = tl.multiple_of(logits_row, 16)
        x = _tile(logits_row, first, vocab)
        if ((flags & F_ADMITTED) != 0) & (finished == 0):
            row_scratch = scratch + index * scratch_words
            if _checks(flags, mode, given) != 0:
                row = _row(
                    logits_row, params, slot, index, tables, bitmask, bitmask_stride, given,
                    row_scratch, mode, flags, vocab, bias_ids, bias_values, bans_at, prompt_bits,
                    output_bits, counts_at,
                )  # fmt: skip
                width: tl.constexpr = UNIT if UNIT > 1 else 8
                _stream_checked(
                    row, first, row_scratch, groups, wants_sum, wants_moment, scale, width
                )
            else:
                raw_scale = tl.full((), LOG2_E, tl.float32)
                first_scale = tl.where(wants_sum, scale, raw_scale)
                at = row_scratch + first // GROUP + tl.arange(0, GROUPS_OF_TILE)
                maximum = _store_plain_statistics(at, groups, x, first_scale)
                both = wants_sum & wants_raw & (scale != raw_scale)
                if both | wants_moment:
                    # Loaded again: kept until here, the logits would take registers in every row.
                    x = _tile(logits_row, first, vocab)
                    grouped = tl.reshape(x.to(tl.float32), [GROUPS_OF_TILE, GROUP])
                    if both:
                        _store_f32(at + groups * RAW_SUMS, _sums(grouped, maximum, raw_scale))
                    if wants_moment:
                        _store_f32(at + groups * MOMENTS, _moments(grouped, maximum, scale))
