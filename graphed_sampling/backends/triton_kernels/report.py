"""What a row reports, and its next state."""

from __future__ import annotations

import triton
import triton.language as tl

from graphed_sampling.backends.triton_kernels.constants import (
    BATCH,
    EMPTY_ROW,
    F_FILTERED,
    F_GREEDY,
    F_LOGPROBS,
    F_PROCESSED,
    F_RANK,
    FINISH_LENGTH,
    FINISH_STOP,
    FLT_MAX,
    GROUP_LIST,
    INF,
    LISTED,
    LN_2,
    LOG2_E,
    MAX_LISTED_TOP_K,
    NEG_INF,
    NORMAL,
    NOTHING,
    O_FINISH_REASON,
    O_FLAGS,
    O_GENERATION,
    O_LISTS,
    O_LOGPROB,
    O_NUM_KEPT,
    O_RANK,
    O_TOKEN_ID,
    P_MAX_TOKENS,
    P_NUM_GIVEN,
    P_NUM_STOP,
    P_TOP_LOGPROBS,
    P_WIDE_SCALE,
    R_FINISHED,
    R_PADDING,
    RAW_MAXIMA,
    RAW_SUMS,
    S_FINISH_REASON,
    S_GENERATION,
    S_LAST_TOKEN,
    S_NUM_GENERATED,
    S_POSITION,
    S_RECENT,
    SHORT,
    SUMS,
    SUPER_LIST,
)
from graphed_sampling.backends.triton_kernels.groups import (
    _list_groups,
    _listed_tokens,
    _statistics,
    _super_masses,
    _super_maxima,
    _top_bound,
)
from graphed_sampling.backends.triton_kernels.lists import (
    _list_candidates,
    _list_checked_candidates,
    _reaching,
    _reaching_x,
)
from graphed_sampling.backends.triton_kernels.numbers import (
    _bit_count,
    _f32,
    _from_key,
    _i64,
    _key,
    _log_mass,
    _store_f32,
    _store_i64,
)
from graphed_sampling.backends.triton_kernels.rows import (
    _processed,
    _sanitised,
    _special,
    _survives,
)


@triton.jit(noinline=True)
def _write_idle(out, state, admitted, max_logprobs, max_logprob_ids):
    """The record of a row in which nothing is drawn."""
    nan = tl.full((), float("nan"), tl.float32)
    _store_i64(out + O_TOKEN_ID, tl.full((), -1, tl.int64))
    _store_f32(out + O_LOGPROB, nan)
    tl.store(out + O_RANK, 0)
    tl.store(out + O_NUM_KEPT, 0)
    tl.store(out + O_FINISH_REASON, tl.where(admitted, tl.load(state + S_FINISH_REASON), 0))
    tl.store(out + O_FLAGS, tl.where(admitted, R_FINISHED, R_PADDING))
    tl.store(out + O_GENERATION, tl.where(admitted, tl.load(state + S_GENERATION), 0))
    _clear_lists(out, max_logprobs, max_logprob_ids, 0)


@triton.jit
def _clear_part(out, max_logprobs, max_logprob_ids, asked, first):
    i = first + tl.arange(0, 32)
    nan = tl.full([32], float("nan"), tl.float32)
    _store_i64(out + O_LISTS + 2 * i, tl.full([32], -1, tl.int64), mask=i < max_logprobs)
    empty = tl.where(i < asked, NEG_INF, nan)
    _store_f32(out + O_LISTS + 2 * max_logprobs + i, empty, mask=i < max_logprobs)
    _store_f32(out + O_LISTS + 3 * max_logprobs + i, nan, mask=i < max_logprob_ids)


@triton.jit(noinline=True)
def _clear_lists(out, max_logprobs, max_logprob_ids, asked):
    """Top lists with no token in them, -inf as far as they were asked for; given logprobs NaN."""
    for first in range(0, tl.maximum(max_logprobs, max_logprob_ids), 32):
        _clear_part(out, max_logprobs, max_logprob_ids, asked, first)


@triton.jit
def _raw_logprobs(x, largest, log_total):
    """fp32 log_softmax of sanitised x; equals of the maximum are told apart, it may be inf."""
    difference = tl.where(x == largest, 0.0, x.to(tl.float64) - largest.to(tl.float64))
    return tl.where(x == NEG_INF, NEG_INF, difference - log_total).to(tl.float32)


@triton.jit
def _processed_logprobs(y, ids, highest, lowest, lowest_id, scale, log_total):
    logprob = (y.to(tl.float64) - highest.to(tl.float64)) * scale * LN_2 - log_total
    kept = _survives(y, ids, highest, lowest, lowest_id)
    return tl.where(kept, logprob, NEG_INF).to(tl.float32)


@triton.jit
def _logprobs(
    x, y, ids, processed, raw_largest, raw_log, highest, lowest, lowest_id, scale, log_total
):
    return tl.where(
        processed,
        _processed_logprobs(y, ids, highest, lowest, lowest_id, scale, log_total),
        _raw_logprobs(x, raw_largest, raw_log),
    )


@triton.jit
def _store_top(out, max_logprobs, position, n, ids, logprobs, mask):
    mask = mask & (position < n)
    _store_i64(out + O_LISTS + 2 * position, ids.to(tl.int64), mask=mask)
    _store_f32(out + O_LISTS + 2 * max_logprobs + position, logprobs, mask=mask)


@triton.jit(noinline=True)
def _row_top(
    out, max_logprobs, n, row, vocab, num_bias, num_bans, special, fallback, processed,
    raw_largest, raw_log, highest, lowest, lowest_id, scale, log_total,
):  # fmt: skip
    """The n best one after the other, each found by going over the row."""
    last = tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64)
    position = 0
    searching = n > 0
    while searching:
        best = tl.full((), -0x7FFFFFFFFFFFFFFF, tl.int64)
        for first in range(0, vocab, 512):
            ids = first + tl.arange(0, 512)
            inside = ids < vocab
            x = _sanitised(row[0], ids, inside)
            y = _special(
                _processed(x, ids, inside, row, num_bias, num_bans), ids, special, fallback
            )
            raw_kept = x > tl.where(raw_largest == INF, FLT_MAX, NEG_INF)
            kept = tl.where(
                processed, _survives(y, ids, highest, lowest, lowest_id), raw_kept & inside
            )
            value = tl.where(processed, y, x)
            order = (_key(value).to(tl.int64) << 32) + (0x7FFFFFFF - ids)
            order = tl.where(kept & (order < last), order, -0x7FFFFFFFFFFFFFFF)
            best = tl.maximum(best, tl.max(order))
        searching = best > -0x7FFFFFFFFFFFFFFF
        if searching:
            ids = 0x7FFFFFFF - (best & 0xFFFFFFFF).to(tl.int32)
            value = _from_key((best >> 32).to(tl.int32))
            logprob = _logprobs(
                value, value, ids, processed, raw_largest, raw_log, highest, lowest, lowest_id,
                scale, log_total,
            )  # fmt: skip
            _store_top(out, max_logprobs, position, n, ids, logprob, True)
            last = best
            position += 1
            searching = position < n


@triton.jit(noinline=True)
def _listed_top(
    out, max_logprobs, n, list_y, list_ids, count, processed, raw_largest, raw_log, highest,
    lowest, lowest_id, scale, log_total,
):  # fmt: skip
    """The n best of a list, which holds all that are as good; of equals at the end of the kept ones
    it may hold more."""
    i = tl.arange(0, SHORT)
    if count <= SHORT:
        value = tl.load(list_y + i, mask=i < count, other=0).to(tl.float32, bitcast=True)
        order = (_key(value).to(tl.int64) << 32) | (0x7FFFFFFF - i)
        order = tl.sort(tl.where(i < count, order, NOTHING), descending=True)
        value = _from_key((order >> 32).to(tl.int32))
        at = 0x7FFFFFFF - (order & 0x7FFFFFFF).to(tl.int32)
        ids = tl.load(list_ids + at, mask=order > NOTHING, other=0)
        logprob = _logprobs(
            value, value, ids, processed, raw_largest, raw_log, highest, lowest, lowest_id,
            scale, log_total,
        )  # fmt: skip
        kept = (processed == 0) | _survives(value, ids, highest, lowest, lowest_id)
        _store_top(out, max_logprobs, i, n, ids, logprob, kept & (order > NOTHING))
    else:
        # Each at the position that the number of better ones gives it.
        for first in range(0, count, SHORT):
            value = tl.load(list_y + first + i, mask=first + i < count, other=0)
            value = value.to(tl.float32, bitcast=True)
            ids = tl.load(list_ids + first + i, mask=first + i < count, other=0)
            position = tl.zeros([SHORT], tl.int32)
            for j in range(count):
                against = _f32(list_y + j)
                better = (against > value) | ((against == value) & (j < first + i))
                position += better.to(tl.int32)
            logprob = _logprobs(
                value, value, ids, processed, raw_largest, raw_log, highest, lowest, lowest_id,
                scale, log_total,
            )  # fmt: skip
            kept = (processed == 0) | _survives(value, ids, highest, lowest, lowest_id)
            _store_top(out, max_logprobs, position, n, ids, logprob, kept & (first + i < count))


@triton.jit(noinline=True)
def _given_logprobs(
    out, given, num_given, row, num_bias, num_bans, special, fallback, processed, raw_largest,
    raw_log, highest, lowest, lowest_id, scale, log_total,
):  # fmt: skip
    """The logprobs of the ids that the request names."""
    for first in range(0, num_given, 32):
        i = first + tl.arange(0, 32)
        inside = i < num_given
        ids = tl.load(given + i, mask=inside, other=0)
        x = _sanitised(row[0], ids, inside)
        y = _processed(x, ids, inside, row, num_bias, num_bans)
        y = _special(y, ids, special, fallback)
        logprobs = _logprobs(
            x, y, ids, processed, raw_largest, raw_log, highest, lowest, lowest_id, scale,
            log_total,
        )  # fmt: skip
        _store_f32(out + i, logprobs, mask=inside)


@triton.jit(noinline=True)
def _top(
    out, max_logprobs, n, row, maxima, scratch, list_y, list_ids, groups, vocab,
    num_bias, num_bans, special, fallback, processed, largest, raw_largest, raw_log,
    highest, lowest, lowest_id, scale, log_total, SUPER: tl.constexpr,
):  # fmt: skip
    """The n best tokens by (value descending, id ascending), with their logprobs."""
    value_largest = tl.where(processed, largest, raw_largest)
    count = LISTED + 1
    finite = (value_largest > NEG_INF) & (value_largest < INF)
    # Survivors that are no head of the order (typical_p) are looked for in the row itself.
    head = (processed == 0) | ((special == NORMAL) & (highest == largest))
    if finite & head & (n <= MAX_LISTED_TOP_K):
        group_list = scratch + groups * GROUP_LIST
        super_maxima = _super_maxima(maxima, groups, SUPER)
        bound = _top_bound(super_maxima, maxima, groups, value_largest, n)
        listed = _list_groups(
            super_maxima, maxima, scratch + groups * SUPER_LIST, group_list, bound, SUPER
        )
        count = 0
        if processed == 0:
            count = _list_candidates(row, group_list, listed, list_y, list_ids, bound, 0, 0, True)
        else:
            # The bound of the best, or of the survivors.
            bound = tl.maximum(bound, lowest)
            count = _list_checked_candidates(
                row, group_list, listed, list_y, list_ids, bound, num_bias, num_bans
            )
    if count <= LISTED:
        _listed_top(
            out, max_logprobs, n, list_y, list_ids, count, processed, raw_largest, raw_log,
            highest, lowest, lowest_id, scale, log_total,
        )  # fmt: skip
    else:
        _row_top(
            out, max_logprobs, n, row, vocab, num_bias, num_bans, special, fallback,
            processed, raw_largest, raw_log, highest, lowest, lowest_id, scale, log_total,
        )  # fmt: skip


@triton.jit(noinline=True)
def _rank(value, row, maxima, scratch, groups, num_bias, num_bans, processed, SUPER: tl.constexpr):
    """1 + the number of tokens with a larger value."""
    vocab = row[11]
    rank = 1
    larger = _from_key(_key(value) + 1)
    group_list = scratch + groups * GROUP_LIST
    super_maxima = _super_maxima(maxima, groups, SUPER)
    listed = _list_groups(
        super_maxima, maxima, scratch + groups * SUPER_LIST, group_list, larger, SUPER
    )
    for first in range(0, listed, BATCH):
        first_ids, ids, inside = _listed_tokens(group_list, first, listed, vocab, BATCH)
        x = tl.load(row[0] + ids, mask=inside, other=NEG_INF).to(tl.float32)
        if processed:
            bits = _reaching(x, inside, first_ids, row, larger, num_bias, num_bans)
        else:
            bits = _reaching_x(x, larger)
        rank += tl.sum(_bit_count(bits))
    return rank


@triton.jit(noinline=True)
def _processed_token(row, token, special, fallback, num_bias, num_bans):
    """y of one token."""
    ids = token + tl.zeros([1], tl.int32)
    x = _sanitised(row[0], ids, ids >= 0)
    y = _special(_processed(x, ids, ids >= 0, row, num_bias, num_bans), ids, special, fallback)
    return tl.sum(y)


@triton.jit(noinline=True)
def _raw_normaliser(raw_maxima, raw_sums, groups, SUPER: tl.constexpr):
    """The largest of the raw logits, and ln of their weights' sum relative to it."""
    raw_scale = tl.full((), LOG2_E, tl.float32)
    # Added up as where one sum serves the draw as well: a row's raw logprobs have the same bits
    # whatever its request asks.
    _supers, raw_largest, masses = _statistics(raw_maxima, raw_sums, groups, raw_scale, True, SUPER)
    if (raw_largest == NEG_INF) | (raw_largest == INF):
        masses = _super_masses(raw_maxima, raw_sums, groups, raw_largest, raw_scale, SUPER)
    return raw_largest, _log_mass(tl.sum(masses))


@triton.jit(noinline=True)
def _remember(state, recent_tokens, token):
    """Shift the recent tokens, newest first, by one."""
    for step in range(0, recent_tokens, 32):
        # From the end, so that no word is overwritten before it has moved.
        i = recent_tokens - 1 - step - tl.arange(0, 32)
        older = tl.load(state + S_RECENT + i - 1, mask=i > 0, other=0)
        tl.debug_barrier()
        tl.store(state + S_RECENT + i, tl.where(i == 0, token, older), mask=i >= 0)
        tl.debug_barrier()


@triton.jit
def _report(
    row, out, params, state, scratch, flags, row_flags, token, highest, lowest, lowest_id, total,
    num_kept, special, fallback, largest, raw_total, groups, vocab, num_bias, num_bans, split,
    both, candidates_at, stop_ids, given_ids, max_logprobs, max_logprob_ids, recent_tokens,
    penalties, SUPER: tl.constexpr,
):  # fmt: skip
    """Everything about a row whose token is drawn: logprobs, rank, finish, output and state.

    raw_total: the mass of the raw logits relative to `largest`, -1 where that is not known.
    """
    # All that is to be loaded first: it comes at the same time.
    x = tl.load(row[0] + token).to(tl.float32)
    position = _i64(state + S_POSITION)
    generated = tl.load(state + S_NUM_GENERATED) + 1
    generation = tl.load(state + S_GENERATION)
    max_tokens = tl.load(params + P_MAX_TOKENS)
    num_stop = tl.load(params + P_NUM_STOP)
    stop = tl.arange(0, 32)
    stops = tl.load(params + stop_ids + stop, mask=stop < num_stop, other=-1)
    seen = 0
    seen_before = 0
    if penalties:
        seen = tl.load(row[5] + (token >> 5))
        seen_before = tl.load(row[6] + token)
    older = tl.load(state + S_RECENT + stop - 1, mask=(stop > 0) & (stop < recent_tokens), other=0)
    n = tl.load(params + P_TOP_LOGPROBS)
    num_given = tl.load(params + P_NUM_GIVEN)

    processed = (flags & F_PROCESSED) != 0
    scale = _i64(params + P_WIDE_SCALE).to(tl.float64, bitcast=True)
    raw_at = tl.where(split, groups * RAW_MAXIMA, 0)
    list_y = scratch + candidates_at
    list_ids = list_y + LISTED
    wants_logprob = (flags & F_LOGPROBS) != 0
    wants_rank = (flags & F_RANK) != 0

    raw_largest = largest
    raw_log = tl.full((), 0.0, tl.float64)
    log_total = tl.full((), 0.0, tl.float64)
    if processed:
        log_total = _log_mass(total)
    elif wants_logprob | wants_rank | (n > 0) | (num_given > 0):
        if raw_total >= 0:
            raw_log = _log_mass(raw_total)
        else:
            raw_sums = scratch + groups * tl.where(split | both, RAW_SUMS, SUMS)
            raw_largest, raw_log = _raw_normaliser(scratch + raw_at, raw_sums, groups, SUPER)

    x = tl.where(x != x, NEG_INF, x) + 0.0
    y = x
    if processed:
        y = _processed_token(row, token, special, fallback, num_bias, num_bans)
    logprob = tl.full((), float("nan"), tl.float32)
    if wants_logprob:
        logprob = _logprobs(
            x, y, token, processed, raw_largest, raw_log, highest, lowest, lowest_id, scale,
            log_total,
        )  # fmt: skip
    if (max_logprobs > 32) | (max_logprob_ids > 32):
        _clear_lists(out, max_logprobs, max_logprob_ids, n)
    else:
        _clear_part(out, max_logprobs, max_logprob_ids, n, 0)
    if num_given > 0:
        tl.debug_barrier()
        _given_logprobs(
            out + O_LISTS + 3 * max_logprobs, params + given_ids, num_given, row, num_bias,
            num_bans, special, fallback, processed, raw_largest, raw_log, highest, lowest,
            lowest_id, scale, log_total,
        )  # fmt: skip
    values = scratch + tl.where(processed, 0, raw_at)
    if n > 0:
        tl.debug_barrier()
        _top(
            out, max_logprobs, n, row, values, scratch, list_y, list_ids, groups, vocab,
            num_bias, num_bans, special, fallback, processed, largest, raw_largest, raw_log,
            highest, lowest, lowest_id, scale, log_total, SUPER,
        )  # fmt: skip
    rank = 0
    if wants_rank:
        rank = 1
        if (processed == 0) | (special == NORMAL):
            tl.debug_barrier()
            rank = _rank(
                tl.where(processed, y, x), row, values, scratch, groups, num_bias, num_bans,
                processed, SUPER,
            )  # fmt: skip

    reason = tl.where((max_tokens > 0) & (generated >= max_tokens), FINISH_LENGTH, 0)
    stopped = tl.max((stops == token).to(tl.int32))
    for first in range(32, num_stop, 32):
        ids = tl.load(params + stop_ids + first + stop, mask=first + stop < num_stop, other=-1)
        stopped |= tl.max((ids == token).to(tl.int32))
    reason = tl.where(stopped != 0, FINISH_STOP, reason)
    counted = ((flags & (F_FILTERED | F_GREEDY)) != 0) | (special == EMPTY_ROW)

    wide_token = token.to(tl.int64)
    _store_i64(out + O_TOKEN_ID, wide_token)
    _store_f32(out + O_LOGPROB, logprob)
    tl.store(out + O_RANK, rank)
    tl.store(out + O_NUM_KEPT, tl.where(counted, num_kept, 0))
    tl.store(out + O_FINISH_REASON, reason)
    tl.store(out + O_FLAGS, row_flags)
    tl.store(out + O_GENERATION, generation)

    _store_i64(state + S_POSITION, position + 1)
    _store_i64(state + S_LAST_TOKEN, wide_token)
    tl.store(state + S_NUM_GENERATED, generated)
    tl.store(state + S_FINISH_REASON, reason)
    if recent_tokens > 32:
        _remember(state, recent_tokens, token)
    else:
        older = tl.where(stop == 0, token, older)
        tl.store(state + S_RECENT + stop, older, mask=stop < recent_tokens)
    if penalties:
        bit = tl.full((), 1, tl.int32) << (token & 31)
        tl.store(row[6] + token, tl.where((seen & bit) != 0, seen_before, 0) + 1)
        tl.store(row[5] + (token >> 5), seen | bit)
