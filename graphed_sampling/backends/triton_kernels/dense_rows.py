"""Rows that `finish` leaves: long lists, flat rows, and what takes whole-row passes."""

from __future__ import annotations

import triton
import triton.language as tl

from graphed_sampling.backends.triton_kernels.constants import (
    BINS,
    BRACKETED,
    BY_BRACKET,
    BY_LIST,
    BY_SIGMA,
    DECIDE,
    DONE,
    EMPTY_ROW,
    F_MEAN,
    F_TOTAL,
    GROUP,
    GROUP_LIST,
    INF,
    JOINT,
    KEEP_TIES,
    LISTED,
    MOMENTS,
    NEG_INF,
    NORMAL,
    ONE,
    P_FLAGS,
    P_NUM_BIAS,
    P_SCALE,
    P_TOP_K,
    P_TOP_P,
    P_WIDE_SCALE,
    PLAN_ABOVE,
    PLAN_BANS,
    PLAN_BY_ROW,
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
    POSITIVE_INFINITY,
    R_EMPTY,
    R_NAN,
    R_POS_INF,
    ROW_TILE,
    SUMS,
    SUPER_LIST,
    SUPERS,
)
from graphed_sampling.backends.triton_kernels.deciding import (
    _decide,
    _decision,
)
from graphed_sampling.backends.triton_kernels.finishing import (
    _first_bound,
)
from graphed_sampling.backends.triton_kernels.groups import (
    _floats,
    _group_masses,
    _list_groups,
    _mean,
    _statistics,
    _super_masses,
    _super_maxima,
)
from graphed_sampling.backends.triton_kernels.lists import (
    _filter_long_list,
    _list_checked_candidates,
)
from graphed_sampling.backends.triton_kernels.numbers import (
    _exp2,
    _f32,
    _i64,
    _key,
    _masses,
    _mulhi,
    _share,
    _store_f32,
    _target,
    _z,
)
from graphed_sampling.backends.triton_kernels.report import (
    _report,
)
from graphed_sampling.backends.triton_kernels.rows import (
    _processed,
    _row,
    _row_word,
    _sanitised,
    _split,
    _survives,
)
from graphed_sampling.backends.triton_kernels.streaming import (
    INTEGERS,
    POINTERS,
    _sums,
)
from graphed_sampling.backends.triton_kernels.whole_row import (
    _dense_row,
    _fallback_id,
)


@triton.jit
def _bracket_masses(y, largest, scale):
    return (tl.exp2(_z(y, largest, scale)) * ONE).to(tl.int64)


@triton.jit
def _bin(y, low, factor):
    """The part of the bracket that y lies in. Never falls as y rises."""
    return tl.minimum(tl.maximum(((y - low) * factor).to(tl.int32), 0), BINS - 1)


@triton.jit(noinline=True)
def _collect(row, plan, scratch, first, bracket_at, bins_at, groups):
    """A second pass over a tile of a flat row: of each group, the sum of what is above the
    bracket; and the tokens inside the bracket."""
    params, vocab = row[1], row[11]
    num_bias = tl.load(params + P_NUM_BIAS)
    num_bans = tl.load(plan + PLAN_BANS)
    ids = first + tl.arange(0, ROW_TILE)
    inside = ids < vocab
    y = _sanitised(row[0], ids, inside)
    if (row[7] != 0) | (num_bias + num_bans > 0):
        y = _processed(y, ids, inside, row, num_bias, num_bans)
    largest = _f32(plan + PLAN_LARGEST)
    low = _f32(plan + PLAN_LOW)
    high = _f32(plan + PLAN_HIGH)
    tile_groups: tl.constexpr = ROW_TILE // GROUP
    at = scratch + first // GROUP + tl.arange(0, tile_groups)
    maximum = tl.load(at).to(tl.float32, bitcast=True)
    above = tl.where(y >= high, y, NEG_INF)
    sums = _sums(tl.reshape(above, [tile_groups, GROUP]), maximum, _f32(params + P_SCALE))
    _store_f32(at + groups * MOMENTS, tl.where(maximum > NEG_INF, sums, 0.0))
    tl.atomic_add(plan + PLAN_ABOVE, tl.sum((y >= high).to(tl.int32)), sem="relaxed")
    listed = ((y >= low) & (y < high)).to(tl.int32)
    number = tl.sum(listed)
    if number > 0:
        # The order of the list decides nothing: every use of it sums or compares.
        place = tl.atomic_add(plan + PLAN_LISTED, number, sem="relaxed")
        position = place + tl.cumsum(listed, 0) - 1
        store = (listed != 0) & (position < BRACKETED)
        list_y = scratch + bracket_at
        _store_f32(list_y + position, y, mask=store)
        tl.store(list_y + BRACKETED + position, ids, mask=store)
        mass = _bracket_masses(y, largest, _f32(params + P_SCALE))
        bins = (scratch + bins_at).to(tl.pointer_type(tl.int64))
        bin_ = _bin(y, low, _f32(plan + PLAN_FACTOR))
        tl.atomic_add(bins + bin_, mass, mask=listed != 0, sem="relaxed")


@triton.jit
def _bracket_sums(list_y, count, largest, scale, key0, key1, key2):
    """Of a list's tokens that reach each of three keys: numbers, 20 bits each, and masses."""
    number = tl.zeros([ROW_TILE], tl.int64)
    mass0 = tl.zeros([ROW_TILE], tl.int64)
    mass1 = tl.zeros([ROW_TILE], tl.int64)
    mass2 = tl.zeros([ROW_TILE], tl.int64)
    for first in range(0, count, ROW_TILE):
        i = first + tl.arange(0, ROW_TILE)
        y = _floats(list_y, i, i < count)
        q = _bracket_masses(y, largest, scale)
        wide = _key(y).to(tl.int64)
        in0 = (i < count) & (wide >= key0)
        in1 = (i < count) & (wide >= key1)
        in2 = (i < count) & (wide >= key2)
        number += in0.to(tl.int64) + (in1.to(tl.int64) << 20) + (in2.to(tl.int64) << 40)
        mass0 += tl.where(in0, q, 0)
        mass1 += tl.where(in1, q, 0)
        mass2 += tl.where(in2, q, 0)
    return tl.sum(number), tl.sum(mass0), tl.sum(mass1), tl.sum(mass2)


@triton.jit(noinline=True)
def _bracket_cut(
    list_y, list_ids, count, low, high, largest, scale, target, vocab, LAW: tl.constexpr
):
    """Where a list's tokens, between low and high, first weigh `target`: (lowest, lowest_id, how
    many are kept). None are kept where all of them together weigh less."""
    low_key = _key(low).to(tl.int64)
    high_key = _key(high).to(tl.int64)
    at_low = count
    at_high = 0
    mass_high = tl.full((), 0, tl.int64)
    numbers, mass_low, mass1, mass2 = _bracket_sums(
        list_y, count, largest, scale, low_key, high_key, high_key
    )
    possible = mass_low >= target
    step = 0
    while possible & (high_key - low_key > 1) & (at_low - at_high > 1):
        # Three keys around where the mass would be if it lay evenly; later, that halve the rest.
        part = (target - mass_high).to(tl.float32) / (mass_low - mass_high).to(tl.float32)
        spread = tl.where(step < 1, 0.05, 0.1)
        width = (high_key - low_key).to(tl.float32)
        evenly = step >= 6
        part0 = tl.where(evenly, 0.75, tl.minimum(part + spread, 0.99))
        part1 = tl.where(evenly, 0.5, tl.minimum(tl.maximum(part, 0.01), 0.98))
        part2 = tl.where(evenly, 0.25, tl.maximum(part - spread, 0.005))
        most = high_key - low_key - 1
        key0 = high_key - tl.minimum(tl.maximum((width * part0).to(tl.int64), 1), most)
        key1 = high_key - tl.minimum(tl.maximum((width * part1).to(tl.int64), 1), most)
        key2 = high_key - tl.minimum(tl.maximum((width * part2).to(tl.int64), 1), most)
        numbers, mass0, mass1, mass2 = _bracket_sums(
            list_y, count, largest, scale, key0, key1, key2
        )
        number0 = (numbers & 0xFFFFF).to(tl.int32)
        number1 = ((numbers >> 20) & 0xFFFFF).to(tl.int32)
        number2 = (numbers >> 40).to(tl.int32)
        if mass2 >= target:
            low_key, at_low, mass_low = key2, number2, mass2
        elif mass1 >= target:
            low_key, at_low, mass_low = key1, number1, mass1
            high_key, at_high, mass_high = key2, number2, mass2
        elif mass0 >= target:
            low_key, at_low, mass_low = key0, number0, mass0
            high_key, at_high, mass_high = key1, number1, mass1
        else:
            high_key, at_high, mass_high = key0, number0, mass0
        step += 1
    lowest = tl.full([ROW_TILE], NEG_INF, tl.float32)
    for first in range(0, count, ROW_TILE):
        i = first + tl.arange(0, ROW_TILE)
        y = _floats(list_y, i, i < count)
        wide = _key(y).to(tl.int64)
        lowest = tl.maximum(
            lowest, tl.where((i < count) & (wide >= low_key) & (wide < high_key), y, NEG_INF)
        )
    lowest = tl.max(lowest)
    lowest_id = vocab
    kept = at_low
    # Not compiled where all ties stay: Triton 3.6 fails on loads under a condition that it learns
    # late never to hold, like `ties < at_low - at_high` of ties = at_low - at_high.
    if not LAW & KEEP_TIES:
        each = tl.maximum(_bracket_masses(lowest, largest, scale), 1)
        ties = ((target - mass_high + each - 1) // each).to(tl.int32)
        if ties < at_low - at_high:
            # Of the equals at the cut, the lowest ids: seven parts at a time.
            kept = at_high + ties
            below = -1
            while lowest_id - below > 1:
                part = (lowest_id - below + 3) >> 2
                number = tl.zeros([ROW_TILE], tl.int64)
                for first in range(0, count, ROW_TILE):
                    i = first + tl.arange(0, ROW_TILE)
                    y = _floats(list_y, i, i < count)
                    ids = tl.load(list_ids + i, mask=i < count, other=0)
                    tie = (i < count) & (y == lowest)
                    number += (tie & (ids <= below + part)).to(tl.int64)
                    number += (tie & (ids <= below + 2 * part)).to(tl.int64) << 20
                    number += (tie & (ids <= below + 3 * part)).to(tl.int64) << 40
                numbers = tl.sum(number)
                enough0 = (numbers & 0xFFFFF) >= ties
                enough1 = ((numbers >> 20) & 0xFFFFF) >= ties
                enough2 = (numbers >> 40) >= ties
                reached = below + tl.where(enough0, 1, tl.where(enough1, 2, 3)) * part
                found = enough0 | enough1 | enough2
                below = tl.where(
                    enough0, below, below + tl.where(enough1, 1, tl.where(enough2, 2, 3)) * part
                )
                lowest_id = tl.where(found, tl.minimum(reached, lowest_id), lowest_id)
    return lowest, lowest_id, tl.where(possible, kept, 0)


@triton.jit(noinline=True)
def _draw_from_masses(
    row, maxima, masses, groups, lowest, lowest_id, scale, word, vocab, num_bias, num_bans
):
    """(token, total): a token drawn from the groups' int64 masses, then from the survivors among
    the group's tokens."""
    # Atomic additions went past the nearest cache, and so do these loads.
    total = tl.full((), 0, tl.int64)
    for first in range(0, groups, 1024):
        i = first + tl.arange(0, 1024)
        total += tl.sum(tl.load(masses + i, mask=i < groups, other=0, cache_modifier=".cg"))
    position = _mulhi(word, total)
    before = tl.full((), 0, tl.int64)
    passed = tl.full((), 0, tl.int64)
    group = 0
    for first in range(0, groups, 1024):
        i = first + tl.arange(0, 1024)
        mass = tl.load(masses + i, mask=i < groups, other=0, cache_modifier=".cg")
        over = (i < groups) & ((passed + tl.cumsum(mass, 0)) <= position)
        group += tl.sum(over.to(tl.int32))
        before += tl.sum(tl.where(over, mass, 0))
        passed += tl.sum(mass)
    group = tl.minimum(group, groups - 1)
    of_group = tl.load(masses + group, cache_modifier=".cg")
    share = _share(word, total, before, of_group)
    maximum = _f32(maxima + group)
    ids = group * 64 + tl.arange(0, GROUP)
    inside = ids < vocab
    y = _processed(_sanitised(row[0], ids, inside), ids, inside, row, num_bias, num_bans)
    kept = _survives(y, ids, maximum, lowest, lowest_id)
    z = tl.where(kept, (y.to(tl.float64) - maximum.to(tl.float64)) * scale, 0.0)
    q = tl.where(kept, _masses(_exp2(z)), 0)
    inner = tl.sum(q)
    inner_position = tl.minimum((share * inner.to(tl.float64)).to(tl.int64), inner - 1)
    token = group * 64 + tl.sum((tl.cumsum(q, 0) <= inner_position).to(tl.int32))
    return token, total


@triton.jit
def _add_survivors(masses, list_y, list_ids, count, lowest, lowest_id, largest, scale):
    """Add the masses of a list's survivors to those of their groups."""
    for first in range(0, count, ROW_TILE):
        i = first + tl.arange(0, ROW_TILE)
        y = _floats(list_y, i, i < count)
        ids = tl.load(list_ids + i, mask=i < count, other=0)
        survives = (i < count) & ((y > lowest) | ((y == lowest) & (ids <= lowest_id)))
        # Integers: the order of the additions decides nothing.
        mass = _bracket_masses(y, largest, scale)
        tl.atomic_add(masses + (ids >> 6), mass, mask=survives, sem="relaxed")


@triton.jit(noinline=True)
def _from_bracket(
    row, params, scratch, plan, candidates_at, bracket_at, bins_at, masses_at, groups, vocab,
    num_bias, num_bans, largest, word, SUPER: tl.constexpr, LAW: tl.constexpr,
):  # fmt: skip
    """top_p and the draw of a flat row that was collected.

    Returns (complete, token, lowest, lowest_id, total, num_kept); complete is 0 where the bracket
    does not hold the cut.
    """
    wide_scale = _i64(params + P_WIDE_SCALE).to(tl.float64, bitcast=True)
    scale = _f32(params + P_SCALE)
    target = _target(
        _f32(params + P_TOP_P),
        tl.sum(_super_masses(scratch, scratch + groups * SUMS, groups, largest, scale, SUPER)),
    )
    masses = (scratch + masses_at).to(tl.pointer_type(tl.int64))
    above = tl.zeros([SUPERS], tl.int64)
    for first in range(0, groups, SUPERS):
        i = first + tl.arange(0, SUPERS)
        maximum = _floats(scratch, i, i < groups)
        of_group = _group_masses(
            maximum, _floats(scratch + groups * MOMENTS, i, i < groups), largest, scale
        )
        tl.store(masses + i, of_group, mask=i < groups)
        above += of_group
    tl.debug_barrier()
    bin_ = tl.arange(0, BINS)
    bins = (scratch + bins_at).to(tl.pointer_type(tl.int64))
    # Atomic additions went past the nearest cache, and so does this load.
    in_bins = tl.load(bins + bin_, cache_modifier=".cg")
    left = target - tl.sum(above) - tl.sum(in_bins)
    # Of the bins from the top, the first with which the target is reached.
    up_to = tl.cumsum(in_bins, 0)
    cut_bin = tl.sum((left + up_to - in_bins <= 0).to(tl.int32)) - 1
    left += tl.sum(tl.where(bin_ <= cut_bin, in_bins, 0))
    count = tl.load(plan + PLAN_LISTED)
    low = _f32(plan + PLAN_LOW)
    factor = _f32(plan + PLAN_FACTOR)
    list_y = scratch + bracket_at
    list_ids = list_y + BRACKETED
    cut_y = scratch + candidates_at
    cut_ids = cut_y + LISTED
    complete = 0
    token = 0
    lowest = low
    lowest_id = vocab
    total = tl.full((), 1, tl.int64)
    num_kept = 0
    if (count > 0) & (count <= BRACKETED) & (tl.sum(above) < target) & (cut_bin >= 0):
        number = tl.load(plan + PLAN_ABOVE)
        in_cut = 0
        for first in range(0, count, ROW_TILE):
            i = first + tl.arange(0, ROW_TILE)
            y = _floats(list_y, i, i < count)
            ids = tl.load(list_ids + i, mask=i < count, other=0)
            where = _bin(y, low, factor)
            higher = (i < count) & (where > cut_bin)
            number += tl.sum(higher.to(tl.int32))
            mass = _bracket_masses(y, largest, scale)
            tl.atomic_add(masses + (ids >> 6), mass, mask=higher, sem="relaxed")
            here = ((i < count) & (where == cut_bin)).to(tl.int32)
            position = in_cut + tl.cumsum(here, 0) - 1
            store = (here != 0) & (position < LISTED)
            _store_f32(cut_y + position, y, mask=store)
            tl.store(cut_ids + position, ids, mask=store)
            in_cut += tl.sum(here)
        tl.debug_barrier()
        if in_cut <= LISTED:
            lowest, lowest_id, kept = _bracket_cut(
                cut_y, cut_ids, in_cut, low, _f32(plan + PLAN_HIGH), largest, scale, left, vocab,
                LAW,
            )  # fmt: skip
            if kept > 0:
                complete = 1
                num_kept = number + kept
                _add_survivors(masses, cut_y, cut_ids, in_cut, lowest, lowest_id, largest, scale)
                tl.debug_barrier()
                token, total = _draw_from_masses(
                    row, scratch, masses, groups, lowest, lowest_id, wide_scale, word, vocab,
                    num_bias, num_bans,
                )  # fmt: skip
    return complete, token, lowest, lowest_id, total, num_kept


@triton.jit(noinline=True)
def _after_sigma(
    row, params, scratch, candidates_at, groups, vocab, num_bias, num_bans, largest, word,
    SUPER: tl.constexpr, LAW: tl.constexpr,
):  # fmt: skip
    """The filters and the draw of a row whose first filter is top_n_sigma; complete is 0 where the
    list is too short for its survivors."""
    scale = _i64(params + P_WIDE_SCALE).to(tl.float64, bitcast=True)
    super_maxima = _super_maxima(scratch, groups, SUPER)
    nothing = tl.full((), 0, tl.int64)
    mean = tl.full((), 0.0, tl.float64)
    bound, z_bound = _first_bound(
        row, params, scratch, super_maxima, groups, vocab, num_bias, num_bans, largest,
        _f32(params + P_SCALE), nothing, mean, SUPER, True,
    )  # fmt: skip
    group_list = scratch + groups * GROUP_LIST
    listed = _list_groups(
        super_maxima, scratch, scratch + groups * SUPER_LIST, group_list, bound, SUPER
    )
    list_y = scratch + candidates_at
    list_ids = list_y + LISTED
    count = _list_checked_candidates(
        row, group_list, listed, list_y, list_ids, bound, num_bias, num_bans
    )
    complete = 0
    token = 0
    highest = largest
    lowest = largest
    lowest_id = vocab
    total = tl.full((), 1, tl.int64)
    num_kept = 0
    if count <= LISTED:
        complete, token, highest, lowest, lowest_id, total, num_kept = _filter_long_list(
            list_y, list_ids, count, largest, scale, params, tl.load(params + P_TOP_K), False,
            nothing, mean, z_bound, word, LISTED, True, LAW,
        )  # fmt: skip
    return complete, token, highest, lowest, lowest_id, total, num_kept


@triton.jit
def _dense(
    row, state, words, given, index, out, scratch, plan, kind, flags, mode, groups, stop_ids,
    given_ids, max_logprobs, max_logprob_ids, recent_tokens, candidates_at, bracket_at, bins_at,
    masses_at, penalties, decision, SUPER: tl.constexpr, LAW: tl.constexpr,
):  # fmt: skip
    """All that `finish` left of a row."""
    params, vocab = row[1], row[11]
    num_bias = tl.load(params + P_NUM_BIAS)
    num_bans = tl.load(plan + PLAN_BANS)
    split, both = _split(flags, params, row, num_bias + num_bans, LAW)
    word = _row_word(params, state, words, given, mode, index)
    super_maxima = _super_maxima(scratch, groups, SUPER)
    largest = tl.max(super_maxima)
    special = NORMAL
    fallback = 0
    if largest == INF:
        special = POSITIVE_INFINITY
        largest = tl.full((), 0.0, tl.float32)
    elif largest == NEG_INF:
        special = EMPTY_ROW
        fallback = _fallback_id(row[2], row[7], vocab)
        largest = tl.full((), 0.0, tl.float32)
    scale = _i64(params + P_WIDE_SCALE).to(tl.float64, bitcast=True)
    complete = 0
    token = 0
    highest = largest
    lowest = largest
    lowest_id = vocab
    total = tl.full((), 1, tl.int64)
    num_kept = 0
    if kind == BY_LIST:
        narrow_scale = _f32(params + P_SCALE)
        stats_total = total
        mean = tl.full((), 0.0, tl.float64)
        z_bound = tl.full((), -1e300, tl.float64)
        from_stats = (flags & F_TOTAL) != 0
        if LAW & JOINT:
            from_stats = from_stats | (_f32(params + P_TOP_P) < 1)
        if from_stats:
            sums = scratch + groups * SUMS
            _maxima, _same, masses = _statistics(scratch, sums, groups, narrow_scale, True, SUPER)
            stats_total = tl.sum(masses)
            if (flags & F_MEAN) != 0:
                mean = _mean(
                    scratch, sums, scratch + groups * MOMENTS, groups, largest, narrow_scale,
                    stats_total,
                )  # fmt: skip
            # Where the list ends, as `finish` bounded it.
            z_bound = _i64(plan + PLAN_Z_BOUND).to(tl.float64, bitcast=True)
        list_y = scratch + candidates_at
        complete, token, highest, lowest, lowest_id, total, num_kept = _filter_long_list(
            list_y, list_y + LISTED, tl.load(plan + PLAN_COUNT), largest, scale, params,
            tl.load(params + P_TOP_K), from_stats, stats_total, mean, z_bound, word, LISTED, True,
            LAW,
        )  # fmt: skip
    elif kind == BY_SIGMA:
        complete, token, highest, lowest, lowest_id, total, num_kept = _after_sigma(
            row, params, scratch, candidates_at, groups, vocab, num_bias, num_bans, largest, word,
            SUPER, LAW,
        )  # fmt: skip
    elif kind == BY_BRACKET:
        complete, token, lowest, lowest_id, total, num_kept = _from_bracket(
            row, params, scratch, plan, candidates_at, bracket_at, bins_at, masses_at, groups,
            vocab, num_bias, num_bans, largest, word, SUPER, LAW,
        )  # fmt: skip
    # For who wants to know by which way a row went.
    tl.store(plan + PLAN_BY_ROW, tl.where(complete == 0, 1, 0))
    if complete == 0:
        token, highest, lowest, lowest_id, total, num_kept = _dense_row(
            row, params, vocab, num_bias, num_bans, special, fallback, largest, word, LAW
        )
    row_flags = tl.where(tl.load(plan + PLAN_NAN) != 0, R_NAN, 0)
    row_flags |= tl.where(special == POSITIVE_INFINITY, R_POS_INF, 0)
    row_flags |= tl.where(special == EMPTY_ROW, R_EMPTY, 0)
    tl.debug_barrier()
    raw_total = tl.full((), -1, tl.int64)
    if LAW & DECIDE:
        _decide(
            decision, row_flags, highest, lowest, lowest_id, total, num_kept, special, fallback,
            largest, raw_total, num_bans,
        )  # fmt: skip
    else:
        _report(
            row, out, params, state, scratch, flags, row_flags, token, highest, lowest, lowest_id,
            total, num_kept, special, fallback, largest, raw_total, groups, vocab, num_bias,
            num_bans, split, both, candidates_at, stop_ids, given_ids, max_logprobs,
            max_logprob_ids, recent_tokens, penalties, SUPER,
        )  # fmt: skip
    tl.debug_barrier()


@triton.jit
def _list_left(kinds, rows):
    """List, behind their kinds, the rows of which something is left, and those to be collected
    first; the number of either. All programs write the same."""
    number = 0
    number_flat = 0
    for first in range(0, rows, 1024):
        i = first + tl.arange(0, 1024)
        kind = tl.load(kinds + i, mask=i < rows, other=DONE)
        left = (kind != DONE).to(tl.int32)
        found = tl.sum(left)
        if found > 0:
            tl.store(kinds + rows + number + tl.cumsum(left, 0) - 1, i, mask=left != 0)
            number += found
            flat = (kind == BY_BRACKET).to(tl.int32)
            at = kinds + 2 * rows + number_flat + tl.cumsum(flat, 0) - 1
            tl.store(at, i, mask=flat != 0)
            number_flat += tl.sum(flat)
    tl.debug_barrier()
    return number, number_flat


@triton.jit(
    do_not_specialize=(*INTEGERS, "bracket_at", "masses_at", "rows"),
    do_not_specialize_on_alignment=POINTERS,
)
def dense(
    logits, stride, slots, all_params, state, tables, bitmask, bitmask_stride, words, given, output,
    scratch, scratch_32, mode, vocab_units, groups_64, params_words, state_words, output_words,
    bias_ids, bias_values, stop_ids, given_ids, max_logprobs, max_logprob_ids, recent_tokens,
    bans_at, plan_at, candidates_at, bins_at, prompt_bits, output_bits, counts_at, penalties,
    bracket_at, masses_at, rows, SUPER: tl.constexpr, UNIT: tl.constexpr, PDL: tl.constexpr,
    LAW: tl.constexpr,
):  # fmt: skip
    """The rows that `finish` left. Grid: any; programs take tiles of flat rows until none is left,
    then rows.

    A program waits for tiles only of programs that have taken them, which never wait themselves.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # Passed in parts, so that the compiler knows what divides them.
    groups = groups_64 * 64
    scratch_words = scratch_32 * 32
    vocab = vocab_units * UNIT
    kinds = scratch + (tl.full((), 0, tl.int64) + rows) * scratch_words
    number, number_flat = _list_left(kinds, rows)
    if number > 0:
        tiles = tl.cdiv(vocab, ROW_TILE)
        tiles_taken = scratch + plan_at + PLAN_TILES_TAKEN
        rows_taken = scratch + plan_at + PLAN_ROWS_TAKEN
        item = 0
        # With many rows several tiles at a time, for which a row is looked up once.
        tiles_each = tl.where(number_flat >= 32, 8, 1)
        parts = tl.cdiv(tiles, tiles_each)
        items = number_flat * parts
        while item < items:
            item = tl.atomic_add(tiles_taken, 1, sem="relaxed")
            if item < items:
                index = tl.load(kinds + 2 * rows + item // parts).to(tl.int64)
                logits_row = logits + index * stride * UNIT
                if UNIT > 1:
                    logits_row = tl.multiple_of(logits_row, 16)
                row_scratch = scratch + index * scratch_words
                slot = tl.load(slots + index).to(tl.int64)
                params = all_params + slot * params_words
                row = _row(
                    logits_row, params, slot, index, tables, bitmask, bitmask_stride, given,
                    row_scratch, mode, tl.load(params + P_FLAGS), vocab, bias_ids, bias_values,
                    bans_at, prompt_bits, output_bits, counts_at,
                )  # fmt: skip
                plan = row_scratch + plan_at
                begin = item % parts * tiles_each
                for tile in range(begin, tl.minimum(begin + tiles_each, tiles)):
                    _collect(row, plan, row_scratch, tile * ROW_TILE, bracket_at, bins_at, groups)
                    tl.debug_barrier()
                tl.atomic_add(plan + PLAN_COLLECTED, 1, sem="release")
        item = 0
        while item < number:
            item = tl.atomic_add(rows_taken, 1, sem="relaxed")
            if item < number:
                index = tl.load(kinds + rows + item).to(tl.int64)
                kind = tl.load(kinds + index)
                row_scratch = scratch + index * scratch_words
                slot = tl.load(slots + index).to(tl.int64)
                params = all_params + slot * params_words
                flags = tl.load(params + P_FLAGS)
                row = _row(
                    logits + index * stride * UNIT, params, slot, index, tables, bitmask,
                    bitmask_stride, given, row_scratch, mode, flags, vocab, bias_ids, bias_values,
                    bans_at, prompt_bits, output_bits, counts_at,
                )  # fmt: skip
                plan = row_scratch + plan_at
                if kind == BY_BRACKET:
                    while tl.atomic_add(plan + PLAN_COLLECTED, 0, sem="acquire") < parts:
                        pass
                    tl.debug_barrier()
                _dense(
                    row, state + slot * state_words, words, given, index,
                    output + index * output_words, row_scratch, plan, kind, flags, mode,
                    groups, stop_ids, given_ids, max_logprobs, max_logprob_ids, recent_tokens,
                    candidates_at, bracket_at, bins_at, masses_at, penalties,
                    _decision(kinds, rows, index), SUPER, LAW,
                )  # fmt: skip
