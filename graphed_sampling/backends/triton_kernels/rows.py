"""A row's parameters, its logits, and what processing makes of them."""

from __future__ import annotations

import triton
import triton.language as tl

from graphed_sampling.backends.triton_kernels.constants import (
    CHECK_ALLOWED,
    CHECK_GRAMMAR,
    CHECK_PENALTIES,
    EMPTY_ROW,
    F_ALLOWED,
    F_MEAN,
    F_PENALTIES,
    F_RAW,
    F_TOTAL,
    FLT_MAX,
    HAS_BITMASK,
    HAS_GIVEN,
    HAS_WORDS,
    INF,
    JOINT,
    LOG2_E,
    NEG_INF,
    P_FREQUENCY,
    P_PRESENCE,
    P_REPETITION,
    P_SCALE,
    P_SEED,
    P_TOP_P,
    POSITIVE_INFINITY,
    S_POSITION,
)
from graphed_sampling.backends.triton_kernels.numbers import (
    _f32,
    _i64,
)


@triton.jit
def _checks(flags, mode, given):
    """CHECK_* bits of a row."""
    grammar = (mode & HAS_BITMASK) != 0
    if (mode & HAS_GIVEN) != 0:
        grammar = grammar & (tl.load(given) != 0)
    checks = tl.where(grammar, CHECK_GRAMMAR, 0)
    checks |= tl.where((flags & F_ALLOWED) != 0, CHECK_ALLOWED, 0)
    return checks | tl.where((flags & F_PENALTIES) != 0, CHECK_PENALTIES, 0)


@triton.jit
def _wishes(flags, params, LAW: tl.constexpr):
    """What `stream` has to compute for a row: sums at its temperature; sums of weight * z; sums of
    the raw logits. Raw and processed logits have statistics of their own where masks or penalties
    count, and only sums of their own where just the temperature does: see `_split`."""
    wants_sum = (flags & F_TOTAL) != 0
    if LAW & JOINT:
        wants_sum = wants_sum | (_f32(params + P_TOP_P) < 1)
    wants_raw = (flags & F_RAW) != 0
    scale = _f32(params + P_SCALE)
    return wants_sum, (flags & F_MEAN) != 0, wants_raw, scale


@triton.jit
def _bits(bitmap, ids, inside, first_ids, vocab):
    """The ids' bits, 0 or 1. first_ids: where ids are rows [B, 32 or 64] of whole words of the
    bitmap, the first ones [B]; else None."""
    if first_ids is None:
        bits = tl.load(bitmap + (ids >> 5), mask=inside, other=0) >> (ids & 31)
    else:
        rows: tl.constexpr = ids.shape[0]
        width: tl.constexpr = ids.shape[1]
        at = (first_ids >> 5)[:, None] + tl.arange(0, width // 32)[None, :]
        words = tl.load(bitmap + at, mask=at < (vocab + 31) // 32, other=0)
        bits = tl.reshape(words[:, :, None] >> tl.arange(0, 32)[None, None, :], [rows, width])
    return bits & 1


@triton.jit
def _sanitised(logits, ids, inside):
    """The row's logits as fp32, NaN as -inf, -0.0 as 0.0; -inf where not inside."""
    x = tl.load(logits + ids, mask=inside, other=NEG_INF).to(tl.float32)
    return tl.where(x != x, NEG_INF, x) + 0.0


@triton.jit
def _processed(x, ids, inside, row, num_bias, num_bans, first_ids=None):
    """y of sanitised x: +inf where an unbanned x is, -inf where banned.

    row: see `_row`. The lists of bias and bans are applied up to the given lengths. first_ids: see
    `_bits`.
    """
    _, params, grammar, allowed, prompt, output, counts = row[:7]
    checks, bias_ids, bias_values, bans, vocab = row[7:]
    y = x
    banned = x == NEG_INF
    for i in range(num_bias):
        hit = ids == tl.load(bias_ids + i)
        bias = tl.where(hit, _f32(bias_values + i), 0.0)
        banned |= bias == NEG_INF
        y = tl.where(hit & (bias > NEG_INF), y + bias, y)
    for i in range(num_bans):
        banned |= ids == tl.load(bans + i)
    if (checks & CHECK_GRAMMAR) != 0:
        banned |= _bits(grammar, ids, inside, first_ids, vocab) == 0
    if (checks & CHECK_ALLOWED) != 0:
        banned |= _bits(allowed, ids, inside, first_ids, vocab) == 0
    if (checks & CHECK_PENALTIES) != 0:
        in_output = _bits(output, ids, inside, first_ids, vocab) != 0
        seen = in_output | (_bits(prompt, ids, inside, first_ids, vocab) != 0)
        y = tl.where(seen, _penalised(y, in_output & inside, counts + ids, params), y)
    return _settled(x, y, banned)


@triton.jit
def _penalised(y, in_output, counts, params):
    """y of tokens seen in the prompt or, in_output, in the output."""
    repetition = _f32(params + P_REPETITION)
    y = tl.where(y > 0, tl.div_rn(y, repetition + tl.zeros_like(y)), y * repetition)
    count = tl.load(counts, mask=in_output, other=0).to(tl.float32)
    y = y - count * _f32(params + P_FREQUENCY)
    return tl.where(in_output, y - _f32(params + P_PRESENCE), y)


@triton.jit
def _settled(x, y, banned):
    """y in its range, and where it does not come from what was worked out."""
    y = tl.minimum(tl.maximum(y, -FLT_MAX), FLT_MAX) + 0.0
    y = tl.where(x == INF, INF, y)
    return tl.where(banned, NEG_INF, y)


@triton.jit
def _special(y, ids, special, fallback):
    """y of rows that hold +inf, or nothing: the entries that alone survive count as 0."""
    if special == POSITIVE_INFINITY:
        y = tl.where(y == INF, 0.0, NEG_INF)
    elif special == EMPTY_ROW:
        y = tl.where(ids == fallback, 0.0, NEG_INF)
    return y


@triton.jit
def _row(
    logits_row, params, slot, index, tables, bitmask, bitmask_stride, given, scratch, mode, flags,
    vocab, bias_ids, bias_values, bans_at, prompt_bits, output_bits, counts_at,
):  # fmt: skip
    """What `_processed` has to know of a row."""
    bitmap = (vocab + 31) // 32
    at = slot * bitmap
    return (
        logits_row,
        params,
        bitmask + index * bitmask_stride,
        tables + at,
        tables + prompt_bits + at,
        tables + output_bits + at,
        tables + counts_at + slot * vocab,
        _checks(flags, mode, given),
        params + bias_ids,
        params + bias_values,
        scratch + bans_at,
        vocab,
    )


@triton.jit
def _survives(y, ids, highest, lowest, lowest_id):
    return (y > NEG_INF) & (y <= highest) & ((y > lowest) | ((y == lowest) & (ids <= lowest_id)))


@triton.jit
def _word(seed, position):
    """The 64 bits of a draw of stream 0."""
    low, high = position.to(tl.int32), (position >> 32).to(tl.int32)
    out0, out1, _, _ = tl.philox(seed.to(tl.uint64), low, high, low * 0, low * 0)
    return (out1.to(tl.uint32).to(tl.int64) << 32) | out0.to(tl.uint32).to(tl.int64)


@triton.jit
def _row_word(params, state, words, given, mode, index):
    """The row's word: its own of this position, or the caller's."""
    use_words = (mode & HAS_WORDS) != 0
    if (mode & HAS_GIVEN) != 0:
        use_words = use_words & (tl.load(given + 1) != 0)
    word = _word(_i64(params + P_SEED), _i64(state + S_POSITION))
    if use_words:
        word = tl.load(words + index)
    return word


@triton.jit
def _split(flags, params, row, num_listed, LAW: tl.constexpr):
    """Whether raw and processed logits have statistics of their own; or sums only. num_listed: how
    many logits bias and bans change."""
    wants_sum, _, wants_raw, scale = _wishes(flags, params, LAW)
    return (num_listed > 0) | (row[7] != 0), wants_sum & wants_raw & (scale != LOG2_E)
