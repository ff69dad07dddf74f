"""The finishing pass: from a row's statistics to its token."""

from __future__ import annotations

import triton
import triton.language as tl

from graphed_sampling.backends.triton_kernels.constants import (
    BINS,
    BRACKETED,
    BY_BRACKET,
    BY_LIST,
    BY_ROW,
    BY_SIGMA,
    DECIDE,
    DONE,
    F_ADMITTED,
    F_GREEDY,
    F_LISTS,
    F_MEAN,
    F_RAW,
    F_TOTAL,
    FEW,
    FLT_MAX,
    GROUP,
    GROUP_LIST,
    INF,
    JOINT,
    LISTED,
    LOG2_E,
    LONGER,
    MAX_GROUPS_READ,
    MAX_LISTED_TOP_K,
    MIDDLE,
    MOMENTS,
    NEG_INF,
    NORMAL,
    ONE,
    P_EPSILON,
    P_ETA,
    P_FLAGS,
    P_MIN_P,
    P_MIN_P_OFFSET,
    P_MIN_TOKENS,
    P_NUM_BAD_WORDS,
    P_NUM_BIAS,
    P_NUM_STOP,
    P_SCALE,
    P_SIGMA,
    P_TOP_K,
    P_TOP_P,
    P_TYPICAL,
    P_WIDE_SCALE,
    PLAN_ABOVE,
    PLAN_BANS,
    PLAN_COLLECTED,
    PLAN_COUNT,
    PLAN_FACTOR,
    PLAN_HIGH,
    PLAN_LARGEST,
    PLAN_LISTED,
    PLAN_LOW,
    PLAN_NAN,
    PLAN_ROWS_TAKEN,
    PLAN_TILES_TAKEN,
    PLAN_Z_BOUND,
    R_NAN,
    RAW_MAXIMA,
    RAW_SUMS,
    S_FINISH_REASON,
    S_NUM_GENERATED,
    S_RECENT,
    SHORT,
    SLAB,
    SLAB_SIZE,
    SUMS,
    SUPER_LIST,
    SUPERS,
    TINY,
)
from graphed_sampling.backends.triton_kernels.deciding import (
    _decide,
    _decision,
    _set_draw,
    _slab,
)
from graphed_sampling.backends.triton_kernels.groups import (
    _draw_from_groups,
    _first_maximum,
    _list_groups,
    _mass_bound,
    _mean,
    _nucleus_bound,
    _statistics,
    _super_masses,
    _super_maxima,
    _top_bound,
)
from graphed_sampling.backends.triton_kernels.lists import (
    _filter_list,
    _filter_long_list,
    _list_candidates,
    _list_checked_candidates,
    _list_from_slab,
)
from graphed_sampling.backends.triton_kernels.numbers import (
    _f32,
    _i64,
    _round_down,
    _round_up,
    _store_f32,
    _store_i64,
    _z,
)
from graphed_sampling.backends.triton_kernels.report import (
    _report,
    _write_idle,
)
from graphed_sampling.backends.triton_kernels.rows import (
    _processed,
    _row,
    _row_word,
    _sanitised,
    _split,
    _wishes,
)
from graphed_sampling.backends.triton_kernels.streaming import (
    INTEGERS,
    POINTERS,
    _store_statistics,
)
from graphed_sampling.backends.triton_kernels.whole_row import (
    _sigma_bound,
)


@triton.jit(noinline=True)
def _list_bans(params, state, bans, stop_ids, bad_words, bad_word_length):
    """List the ids that stop ids below min_tokens and bad words ban now; their number."""
    count = 0
    num_stop = tl.load(params + P_NUM_STOP)
    if tl.load(state + S_NUM_GENERATED) < tl.load(params + P_MIN_TOKENS):
        for first in range(0, num_stop, 32):
            i = first + tl.arange(0, 32)
            ids = tl.load(params + stop_ids + i, mask=i < num_stop, other=0)
            tl.store(bans + i, ids, mask=i < num_stop)
        count = num_stop
    num_bad = tl.load(params + P_NUM_BAD_WORDS)
    for first in range(0, num_bad, 32):
        i = first + tl.arange(0, 32)
        inside = i < num_bad
        word = params + bad_words + i * bad_word_length
        matches = inside
        for j in range(1, bad_word_length):
            wanted = tl.load(word + j, mask=inside, other=-1)
            matches = matches & ((wanted == -1) | (wanted == tl.load(state + S_RECENT + j - 1)))
        ids = tl.load(word, mask=inside, other=0)
        position = count + tl.cumsum(matches.to(tl.int32), 0) - 1
        tl.store(bans + position, ids, mask=matches)
        count += tl.sum(matches.to(tl.int32))
    tl.debug_barrier()
    return count


@triton.jit(noinline=True)
def _keep_raw(scratch, groups, both):
    """The statistics become those of the processed logits: keep them as those of the raw ones."""
    for first in range(0, groups, 1024):
        i = first + tl.arange(0, 1024)
        maxima = tl.load(scratch + i, mask=i < groups, other=0)
        tl.store(scratch + groups * RAW_MAXIMA + i, maxima, mask=i < groups)
        if both == 0:
            sums = tl.load(scratch + groups * SUMS + i, mask=i < groups, other=0)
            tl.store(scratch + groups * RAW_SUMS + i, sums, mask=i < groups)
    tl.debug_barrier()


@triton.jit(noinline=True)
def _list_unusual(maxima, super_list, group_list, groups, SUPER: tl.constexpr):
    """List the groups that `stream` marked; their number."""
    tl.debug_barrier()  # Triton puts none before a call: see tests/ptx_hazards.py
    super_maxima = _super_maxima(maxima, groups, SUPER)
    return _list_groups(super_maxima, maxima, super_list, group_list, INF, SUPER)


@triton.jit(noinline=True)
def _repair_groups(
    row, scratch, ids_list, count, tokens, groups, vocab, num_bias, num_bans, split, both,
    wants_sum, wants_moment, scale,
):  # fmt: skip
    """The statistics anew of listed groups, or of those that hold the listed tokens (tokens):
    lists change their y, or they hold what `stream` does not count with. Returns whether NaN."""
    seen_nan = 0
    for first in range(0, count, FEW):
        i = first + tl.arange(0, FEW)
        inside = i < count
        g = tl.load(ids_list + i, mask=inside, other=0) >> tl.where(tokens, 6, 0)
        first_ids = g * 64
        ids = first_ids[:, None] + tl.arange(0, GROUP)[None, :]
        real = inside[:, None] & (ids < vocab)
        x = tl.load(row[0] + ids, mask=real, other=NEG_INF).to(tl.float32)
        seen_nan |= tl.max((x != x).to(tl.int32))
        x = tl.where(x != x, NEG_INF, x) + 0.0
        y = _processed(x, ids, real, row, num_bias, num_bans, first_ids)
        # Several listed tokens of one group write the same.
        _store_statistics(
            scratch + g, groups, x, y, split, both, wants_sum, wants_moment, scale, inside
        )
    tl.debug_barrier()
    return seen_nan


@triton.jit
def _first_bound(
    row, params, scratch, super_maxima, groups, vocab, num_bias, num_bans, largest,
    narrow_scale, total, mean, SUPER: tl.constexpr, SIGMA: tl.constexpr,
):  # fmt: skip
    """(bound, z_bound): no survivor of the first filter has y < bound, which is at z_bound.

    Where the filter goes by mass, that is to be verified when it is applied: sums are rounded.
    """
    flags = tl.load(params + P_FLAGS)
    bound = tl.full((), -FLT_MAX, tl.float32)
    z_bound = tl.full((), -1e300, tl.float64)
    if (flags & F_TOTAL) != 0:
        top_p = _f32(params + P_TOP_P)
        typical = _f32(params + P_TYPICAL)
        epsilon = _f32(params + P_EPSILON)
        eta = _f32(params + P_ETA)
        narrow_mean = tl.full((), INF, tl.float32)
        if top_p >= 1:
            narrow_mean = mean.to(tl.float32)
        if (top_p < 1) | (typical < 1):
            found = top_p > 1  # not yet
            z = tl.full((), 0.0, tl.float32)
            if top_p < 1:
                z, found = _nucleus_bound(
                    scratch, groups, largest, narrow_scale, total, top_p, SUPER
                )
                # What weighs much may share its group.
                reaching = tl.sum((_z(super_maxima, largest, narrow_scale) >= z).to(tl.int32))
                found = found & (reaching <= SUPERS // 4)
            if found == 0:
                share = 1.0 - tl.where(top_p < 1, top_p, typical)
                z = _mass_bound(
                    scratch, scratch + groups * SUMS, groups, largest, narrow_scale, total, share,
                    narrow_mean, SUPER,
                )  # fmt: skip
        else:
            cutoff = tl.where(epsilon > 0, epsilon, eta)
            z = tl.log2(cutoff) + tl.log2(total.to(tl.float32) / ONE)
            if epsilon <= 0:
                z = tl.minimum(z, 0.5 * tl.log2(cutoff) + narrow_mean)
            z = z - 0.001
        z_bound = tl.minimum(z, 0.0).to(tl.float64)
        scale = _i64(params + P_WIDE_SCALE).to(tl.float64, bitcast=True)
        bound = tl.maximum(bound, _round_down(largest.to(tl.float64) + z_bound / scale))
    else:
        top_k = tl.load(params + P_TOP_K)
        if _f32(params + P_MIN_P) > 0:
            offset = _i64(params + P_MIN_P_OFFSET).to(tl.float64, bitcast=True)
            bound = tl.maximum(bound, _round_down(largest.to(tl.float64) + offset))
        sigma = _f32(params + P_SIGMA)
        if SIGMA and sigma > 0:
            least = _sigma_bound(row, vocab, num_bias, num_bans, largest, sigma)
            bound = tl.maximum(bound, tl.minimum(_round_up(least), largest))
        if (top_k > 0) & (top_k <= MAX_LISTED_TOP_K):
            bound = tl.maximum(bound, _top_bound(super_maxima, scratch, groups, largest, top_k))
    return bound, z_bound


@triton.jit
def _select(
    row, scratch, params, super_maxima, super_masses, total, groups, vocab, num_bias, num_bans,
    largest, word, plain, candidates_at, z_bound_at, place, seen_nan, SUPER: tl.constexpr,
    LAW: tl.constexpr,
):  # fmt: skip
    """The filters and the draw from group statistics.

    Returns (kind, count, token, highest, lowest, lowest_id, total, num_kept); kind tells what is
    left for `dense`, count is the length of the list. largest: of y, finite. super_masses, total:
    of the sums of weights; those of y where they are wanted.
    """
    flags = tl.load(params + P_FLAGS)
    scale = _i64(params + P_WIDE_SCALE).to(tl.float64, bitcast=True)
    narrow_scale = _f32(params + P_SCALE)
    sums = scratch + groups * SUMS
    token = 0
    highest = largest
    lowest = tl.full((), NEG_INF, tl.float32)
    lowest_id = vocab
    num_kept = 0
    kind = DONE
    count = 0
    if (flags & F_GREEDY) != 0:
        total = tl.full((), 1, tl.int64) << 40
        token = _first_maximum(
            row, scratch, super_maxima, largest, vocab, num_bias, num_bans, plain, SUPER
        )
        lowest = largest
        lowest_id = token
        num_kept = 1
    else:
        mean = tl.full((), 0.0, tl.float64)
        wants_sum = (flags & F_TOTAL) != 0
        from_stats = wants_sum
        if LAW & JOINT:
            from_stats = from_stats | (_f32(params + P_TOP_P) < 1)
        if (flags & F_MEAN) != 0:
            moments = scratch + groups * MOMENTS
            mean = _mean(scratch, sums, moments, groups, largest, narrow_scale, total)
        top_k = tl.load(params + P_TOP_K)
        unfiltered = wants_sum & (_f32(params + P_TOP_P) >= 1) & (_f32(params + P_TYPICAL) >= 1)
        unfiltered = unfiltered & (_f32(params + P_EPSILON) <= 0) & (_f32(params + P_ETA) <= 0)
        if unfiltered:
            if not LAW & DECIDE:
                token = _draw_from_groups(
                    row, scratch, sums, super_masses, scale, narrow_scale, total, word, vocab,
                    num_bias, num_bans, plain, SUPER,
                )  # fmt: skip
        elif _f32(params + P_SIGMA) > 0:
            kind = BY_SIGMA
        else:
            bound, z_bound = _first_bound(
                row, params, scratch, super_maxima, groups, vocab, num_bias, num_bans,
                largest, narrow_scale, total, mean, SUPER, False,
            )  # fmt: skip
            group_list = scratch + groups * GROUP_LIST
            list_y = scratch + candidates_at
            list_ids = list_y + LISTED
            later = (_f32(params + P_TYPICAL) < 1) | (_f32(params + P_EPSILON) > 0)
            later = later | (_f32(params + P_ETA) > 0)
            bracketed = wants_sum & (_f32(params + P_TOP_P) < 1) & (vocab >= BRACKETED)
            bracketed = bracketed & (later == 0)
            few = True
            of_slab = -1
            if LAW & SLAB:
                if plain & (seen_nan == 0) & (top_k > 0) & (top_k < SLAB_SIZE):
                    of_slab = _list_from_slab(row, place, top_k, bound, list_y, list_ids)
                few = of_slab < 0
            if bracketed:
                # Of flat rows nearly all groups reach the bound: none of them need be listed.
                few = tl.sum((super_maxima >= bound).to(tl.int32)) <= SUPERS // 2
            listed = LISTED + 1  # more than are read
            if few:
                listed = _list_groups(
                    super_maxima, scratch, scratch + groups * SUPER_LIST, group_list, bound,
                    SUPER,
                )  # fmt: skip
            readable = tl.where((top_k > 0) & (top_k <= MAX_LISTED_TOP_K), LISTED, MAX_GROUPS_READ)
            count = LISTED + 1
            if listed <= readable:
                if plain:
                    count = _list_candidates(
                        row, group_list, listed, list_y, list_ids, bound, 0, 0, True
                    )
                else:
                    count = _list_checked_candidates(
                        row, group_list, listed, list_y, list_ids, bound, num_bias, num_bans
                    )
            if LAW & SLAB:
                count = tl.where(of_slab >= 0, of_slab, count)
            if (count <= TINY) & (later == 0):
                complete, token, highest, lowest, lowest_id, total, num_kept = _filter_list(
                    list_y, list_ids, count, largest, scale, params, top_k, from_stats, total,
                    mean, z_bound, word, TINY, False, LAW,
                )  # fmt: skip
                kind = tl.where(complete != 0, DONE, BY_ROW)
            elif (count <= SHORT) & (later == 0):
                complete, token, highest, lowest, lowest_id, total, num_kept = _filter_list(
                    list_y, list_ids, count, largest, scale, params, top_k, from_stats, total,
                    mean, z_bound, word, SHORT, False, LAW,
                )  # fmt: skip
                kind = tl.where(complete != 0, DONE, BY_ROW)
            elif (count <= MIDDLE) & (later == 0):
                complete, token, highest, lowest, lowest_id, total, num_kept = _filter_long_list(
                    list_y, list_ids, count, largest, scale, params, top_k, from_stats, total,
                    mean, z_bound, word, MIDDLE, False, LAW,
                )  # fmt: skip
                kind = tl.where(complete != 0, DONE, BY_ROW)
            elif count <= LONGER:
                complete, token, highest, lowest, lowest_id, total, num_kept = _filter_long_list(
                    list_y, list_ids, count, largest, scale, params, top_k, from_stats, total,
                    mean, z_bound, word, LONGER, True, LAW,
                )  # fmt: skip
                kind = tl.where(complete != 0, DONE, BY_ROW)
            elif count <= LISTED:
                kind = BY_LIST
                _store_i64(z_bound_at, z_bound.to(tl.int64, bitcast=True))
            else:
                kind = BY_ROW
            if (kind == BY_ROW) & bracketed:
                kind = BY_BRACKET
    return kind, count, token, highest, lowest, lowest_id, total, num_kept


@triton.jit(noinline=True)
def _store_sample(row, to, vocab, num_bias, num_bans):
    """Store y of 32 groups, evenly spaced."""
    for first in range(0, 32, FEW):
        i = first + tl.arange(0, FEW)
        first_ids = ((i * (vocab // 64)) >> 5) * 64
        ids = first_ids[:, None] + tl.arange(0, GROUP)[None, :]
        inside = ids < vocab
        x = _sanitised(row[0], ids, inside)
        y = _processed(x, ids, inside, row, num_bias, num_bans, first_ids)
        _store_f32(to + i[:, None] * GROUP + tl.arange(0, GROUP)[None, :], y)
    tl.debug_barrier()


@triton.jit(noinline=True)
def _bracket(
    row, maxima, sums, list_y, groups, vocab, num_bias, num_bans, largest, narrow_scale, share,
    SUPER: tl.constexpr,
):  # fmt: skip
    """(low, high): y between which the cut of top_p very probably is, for a flat row.

    From 32 groups, evenly spaced: the mass below a bound is `ratio` times what they hold of it,
    give or take. Its standard deviation is at most the root of ratio * mass * (weight at the
    bound), since no token below the bound weighs more.
    """
    masses = _super_masses(maxima, sums, groups, largest, narrow_scale, SUPER)
    budget = tl.sum(masses).to(tl.float32) * (share / ONE)
    ratio = (vocab // 64).to(tl.float32) / 32.0
    i = tl.arange(0, 2048)
    if (row[7] != 0) | (num_bias + num_bans > 0):
        _store_sample(row, list_y, vocab, num_bias, num_bans)
        y = tl.load(list_y + i).to(tl.float32, bitcast=True)
    else:
        ids = ((((i >> 6) * (vocab // 64)) >> 5) * 64) + (i & 63)
        y = _sanitised(row[0], ids, ids < vocab)
    y_z = tl.maximum(_z(y, largest, narrow_scale), -1000.0)
    weights = tl.exp2(y_z)
    start = tl.log2(budget / vocab.to(tl.float32))
    low = start
    high = tl.full((), 0.0, tl.float32)
    center = low
    found_low = low
    which = (tl.arange(0, 2)[:, None] + 2 * tl.arange(0, 2)[None, :] + 1).to(tl.float32)
    for step in range(8):
        # 4 steps to the middle of the bracket, then 2 to each of its ends.
        part = 0.2 * (high - low)
        below0 = tl.where(y_z < low + part, weights, 0.0)
        below1 = tl.where(y_z < low + part * 2.0, weights, 0.0)
        below2 = tl.where(y_z < low + part * 3.0, weights, 0.0)
        below3 = tl.where(y_z < low + part * 4.0, weights, 0.0)
        below = tl.sum(tl.join(tl.join(below0, below1), tl.join(below2, below3)), 0) * ratio
        error = 5.0 * tl.sqrt(ratio * tl.exp2(low + part * which) * below)
        below += tl.where(step < 4, 0.0, tl.where(step < 6, error, -error))
        number = tl.sum(tl.sum((below <= budget).to(tl.int32), 1)).to(tl.float32)
        high = tl.where(number < 4, low + part * (number + 1.0), high)
        low = low + part * number
        if step == 3:
            center = low
            low = center - 1.5
            high = center + part
        if step == 5:
            found_low = low
            low = center
            high = tl.minimum(center + 1.5, 0.0)
    return largest + found_low / narrow_scale, largest + high / narrow_scale


@triton.jit
def _finish_row(
    row, state, word, index, out, scratch, plan, flags, groups, stop_ids,
    bad_words, bad_word_length, given_ids, max_logprobs, max_logprob_ids, recent_tokens, bans_at,
    candidates_at, bins_at, penalties, place, SUPER: tl.constexpr, LAW: tl.constexpr,
):  # fmt: skip
    """From a row's statistics to its token and its next state, or to a plan for `dense`: what is
    left to be done."""
    params, bias_ids, vocab = row[1], row[8], row[11]
    wants_sum, wants_moment, _, scale = _wishes(flags, params, LAW)
    num_bias = tl.load(params + P_NUM_BIAS)
    num_bans = 0
    seen_nan = 0
    bans = scratch + bans_at
    if (flags & F_LISTS) != 0:
        num_bans = _list_bans(params, state, bans, stop_ids, bad_words, bad_word_length)
    split, both = _split(flags, params, row, num_bias + num_bans, LAW)
    sums = scratch + groups * SUMS
    first_scale = tl.where(wants_sum, scale, LOG2_E)
    wanted = wants_sum | ((flags & F_RAW) != 0)
    if (num_bias + num_bans > 0) & (row[7] == 0):
        _keep_raw(scratch, groups, both)
    super_maxima, largest, masses = _statistics(scratch, sums, groups, first_scale, wanted, SUPER)
    anew = num_bias + num_bans > 0
    if largest == INF:
        group_list = scratch + groups * GROUP_LIST
        unusual = _list_unusual(scratch, scratch + groups * SUPER_LIST, group_list, groups, SUPER)
        seen_nan = _repair_groups(
            row, scratch, group_list, unusual, False, groups, vocab, num_bias, num_bans, split,
            both, wants_sum, wants_moment, scale,
        )  # fmt: skip
        anew = True
    if num_bias + num_bans > 0:
        _repair_groups(
            row, scratch, bias_ids, num_bias, True, groups, vocab, num_bias, num_bans, split, both,
            wants_sum, wants_moment, scale,
        )  # fmt: skip
        _repair_groups(
            row, scratch, bans, num_bans, True, groups, vocab, num_bias, num_bans, split, both,
            wants_sum, wants_moment, scale,
        )  # fmt: skip
    if anew:
        super_maxima, largest, masses = _statistics(
            scratch, sums, groups, first_scale, wanted, SUPER
        )
    kind = BY_ROW
    count = 0
    token = 0
    highest = largest
    lowest = largest
    lowest_id = 0
    total = tl.full((), 1, tl.int64)
    raw_total = tl.full((), -1, tl.int64)
    num_kept = 0
    if (largest > NEG_INF) & (largest < INF):
        plain = (row[7] == 0) & (num_bias + num_bans == 0)
        total = tl.sum(masses)
        if (split | both) == 0:
            raw_total = total
        elif split == 0:
            _raw_maxima, _raw_largest, raw_masses = _statistics(
                scratch, scratch + groups * RAW_SUMS, groups, LOG2_E, True, SUPER
            )
            raw_total = tl.sum(raw_masses)
        kind, count, token, highest, lowest, lowest_id, total, num_kept = _select(
            row, scratch, params, super_maxima, masses, total, groups, vocab, num_bias, num_bans,
            largest, word, plain, candidates_at, plan + PLAN_Z_BOUND, place, seen_nan, SUPER, LAW,
        )  # fmt: skip
    if kind == DONE:
        tl.debug_barrier()
        row_flags = tl.where(seen_nan != 0, R_NAN, 0)
        if LAW & DECIDE:
            _decide(
                place, row_flags, highest, lowest, lowest_id, total, num_kept, NORMAL, 0, largest,
                raw_total, num_bans,
            )  # fmt: skip
        else:
            _report(
                row, out, params, state, scratch, flags, row_flags, token, highest, lowest,
                lowest_id, total, num_kept, NORMAL, 0, largest, raw_total, groups, vocab, num_bias,
                num_bans, split, both, candidates_at, stop_ids, given_ids, max_logprobs,
                max_logprob_ids, recent_tokens, penalties, SUPER,
            )  # fmt: skip
    else:
        tl.store(plan + PLAN_BANS, num_bans)
        tl.store(plan + PLAN_NAN, seen_nan)
        tl.store(plan + PLAN_COUNT, count)
        if kind == BY_BRACKET:
            low, high = _bracket(
                row, scratch, sums, scratch + candidates_at, groups, vocab, num_bias, num_bans,
                largest, scale, 1.0 - _f32(params + P_TOP_P), SUPER,
            )  # fmt: skip
            _store_f32(plan + PLAN_LARGEST, largest)
            _store_f32(plan + PLAN_LOW, low)
            _store_f32(plan + PLAN_HIGH, high)
            _store_f32(plan + PLAN_FACTOR, BINS / (high - low))
            bins = (scratch + bins_at).to(tl.pointer_type(tl.int64))
            tl.store(bins + tl.arange(0, BINS), tl.zeros([BINS], tl.int64))
            tl.store(plan + PLAN_LISTED, 0)
            tl.store(plan + PLAN_ABOVE, 0)
            tl.store(plan + PLAN_COLLECTED, 0)
    return kind


@triton.jit(
    do_not_specialize=(
        *INTEGERS,
        "max_requests",
        "bad_words",
        "bad_word_length",
        "offset_step",
    ),
    do_not_specialize_on_alignment=POINTERS,
)
def finish(
    logits, stride, slots, all_params, state, tables, bitmask, bitmask_stride, words, given, output,
    scratch, scratch_32, mode, vocab_units, groups_64, params_words, state_words, output_words,
    bias_ids, bias_values, stop_ids, given_ids, max_logprobs, max_logprob_ids, recent_tokens,
    bans_at, plan_at, candidates_at, bins_at, prompt_bits, output_bits, counts_at, penalties,
    max_requests, bad_words, bad_word_length, offset_step, SUPER: tl.constexpr, UNIT: tl.constexpr,
    PDL: tl.constexpr, LAW: tl.constexpr,
):  # fmt: skip
    """One row a program: from its groups' statistics to its token and its next state.

    What is left of each row for `dense` stands behind the rows' scratch. offset_step: see
    `_set_draw`.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # Passed in parts, so that the compiler knows what divides them.
    groups = groups_64 * 64
    scratch_words = scratch_32 * 32
    vocab = vocab_units * UNIT
    index = tl.program_id(0).to(tl.int64)
    kinds = scratch + tl.num_programs(0).to(tl.int64) * scratch_words
    # `stream` lets this kernel begin when all that came before it has ended, so that what it does
    # not write itself may be read before it has ended.
    slot = tl.load(slots + index).to(tl.int64)
    slot = tl.where((slot >= 0) & (slot < max_requests), slot, max_requests)
    params = all_params + slot * params_words
    row_state = state + slot * state_words
    row_scratch = scratch + index * scratch_words
    out = output + index * output_words
    flags = tl.load(params + P_FLAGS)
    admitted = (flags & F_ADMITTED) != 0
    idle = (admitted == 0) | (tl.load(row_state + S_FINISH_REASON) != 0)
    word = _row_word(params, row_state, words, given, mode, index)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if tl.program_id(0) == 0:
        tl.store(scratch + plan_at + PLAN_TILES_TAKEN, 0)
        tl.store(scratch + plan_at + PLAN_ROWS_TAKEN, 0)
    rows = tl.num_programs(0)
    if LAW & DECIDE:
        _set_draw(kinds, rows, index, params, row_state, offset_step)
    if idle:
        _write_idle(out, row_state, admitted, max_logprobs, max_logprob_ids)
        tl.store(kinds + index, DONE)
    else:
        logits_row = logits + index * stride * UNIT
        if UNIT > 1:
            logits_row = tl.multiple_of(logits_row, 16)
        row = _row(
            logits_row, params, slot, index, tables, bitmask, bitmask_stride, given,
            row_scratch, mode, flags, vocab, bias_ids, bias_values, bans_at, prompt_bits,
            output_bits, counts_at,
        )  # fmt: skip
        place = _slab(kinds, rows, index) if LAW & SLAB else _decision(kinds, rows, index)
        kind = _finish_row(
            row, row_state, word, index, out, row_scratch, row_scratch + plan_at, flags, groups,
            stop_ids, bad_words, bad_word_length, given_ids, max_logprobs, max_logprob_ids,
            recent_tokens, bans_at, candidates_at, bins_at, penalties, place, SUPER, LAW,
        )  # fmt: skip
        tl.store(kinds + index, kind)
