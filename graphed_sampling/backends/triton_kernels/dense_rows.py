"""Rows that `finish` leaves: long lists, flat rows, and what takes whole-row passes."""

from __future__ import annotations

import triton
import triton.language as tl

from graphed_sampling.backends.triton_kernels.constants import (
    BRACKETED,
    BY_BRACKET,
    BY_LIST,
    BY_SIGMA,
    EMPTY_ROW,
    F_MEAN,
    F_TOTAL,
    GROUP,
    GROUP_LIST,
    GROUPS_OF_TILE,
    INF,
    LISTED,
    MOMENTS,
    NEG_INF,
    NORMAL,
    ONE,
    P_EPSILON,
    P_ETA,
    P_FLAGS,
    P_NUM_BIAS,
    P_SCALE,
    P_TOP_K,
    P_TOP_P,
    P_TYPICAL,
    P_WIDE_SCALE,
    PLAN_ABOVE,
    PLAN_BANS,
    PLAN_COUNT,
    PLAN_HIGH,
    PLAN_LISTED,
    PLAN_LOW,
    PLAN_NAN,
    POSITIVE_INFINITY,
    R_EMPTY,
    R_NAN,
    R_POS_INF,
    SUMS,
    SUPER_LIST,
    SUPERS,
    TILE,
)
from graphed_sampling.backends.triton_kernels.finishing import (
    _first_bound,
)
from graphed_sampling.backends.triton_kernels.groups import (
    _floats,
    _group_masses,
    _list_groups,
    _mean,
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
    _INTEGERS,
    _POINTERS,
    _sums,
)
from graphed_sampling.backends.triton_kernels.whole_row import (
    _dense_row,
    _fallback_id,
)


@triton.jit(
    do_not_specialize=(*_INTEGERS, "plan_at", "bracket_at", "rows"),
    do_not_specialize_on_alignment=_POINTERS,
)
def collect(
    logits, stride, slots, all_params, tables, bitmask, bitmask_stride, given, scratch, scratch_32,
    mode, vocab_units, tiles, groups_64, params_words, bias_ids, bias_values, bans_at, plan_at,
    bracket_at, prompt_bits, output_bits, counts_at, rows, UNIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A second pass over the flat rows: of each group, the sum of what is above the bracket; and
    the tokens inside the bracket. Grid: any, the programs share the tiles of the listed rows."""
    # Passed in parts, so that the compiler knows what divides them.
    groups = groups_64 * 64
    scratch_words = scratch_32 * 32
    vocab = vocab_units * UNIT
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    dense_list = scratch + (tl.full((), 0, tl.int64) + rows) * scratch_words
    items = tl.load(dense_list) * tiles
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        index = tl.load(dense_list + 1 + item // tiles).to(tl.int64)
        row_scratch = scratch + index * scratch_words
        plan = row_scratch + plan_at
        if tl.load(plan) == BY_BRACKET:
            tile = item % tiles
            slot = tl.load(slots + index).to(tl.int64)
            params = all_params + slot * params_words
            flags = tl.load(params + P_FLAGS)
            logits_row = logits + index * stride * UNIT
            if UNIT > 1:
                logits_row = tl.multiple_of(logits_row, 16)
            row = _row(
                logits_row, params, slot, index, tables, bitmask, bitmask_stride,
                given, row_scratch, mode, flags, vocab, bias_ids, bias_values, bans_at,
                prompt_bits, output_bits, counts_at,
            )  # fmt: skip
            ids = tile * TILE + tl.arange(0, TILE)
            inside = ids < vocab
            y = _sanitised(row[0], ids, inside)
            num_bias = tl.load(params + P_NUM_BIAS)
            num_bans = tl.load(plan + PLAN_BANS)
            if (row[7] != 0) | (num_bias + num_bans > 0):
                y = _processed(y, ids, inside, row, num_bias, num_bans)
            low = _f32(plan + PLAN_LOW)
            high = _f32(plan + PLAN_HIGH)
            at = row_scratch + tile * GROUPS_OF_TILE + tl.arange(0, GROUPS_OF_TILE)
            maximum = tl.load(at).to(tl.float32, bitcast=True)
            above = tl.where(y >= high, y, NEG_INF)
            sums = _sums(
                tl.reshape(above, [GROUPS_OF_TILE, GROUP]), maximum, _f32(params + P_SCALE)
            )
            _store_f32(at + groups * MOMENTS, tl.where(maximum > NEG_INF, sums, 0.0))
            tl.atomic_add(plan + PLAN_ABOVE, tl.sum((y >= high).to(tl.int32)))
            listed = ((y >= low) & (y < high)).to(tl.int32)
            number = tl.sum(listed)
            if number > 0:
                # The order of the list decides nothing: every use of it sums or compares.
                place = tl.atomic_add(plan + PLAN_LISTED, number)
                position = place + tl.cumsum(listed, 0) - 1
                store = (listed != 0) & (position < BRACKETED)
                list_y = row_scratch + bracket_at
                _store_f32(list_y + position, y, mask=store)
                tl.store(list_y + BRACKETED + position, ids, mask=store)


@triton.jit
def _bracket_sums(list_y, count, largest, scale, key):
    """Of the bracket's tokens with a key >= key: number and mass."""
    number = tl.zeros([4096], tl.int32)
    mass = tl.zeros([4096], tl.int64)
    for first in range(0, count, 4096):
        i = first + tl.arange(0, 4096)
        y = _floats(list_y, i, i < count)
        kept = (i < count) & (_key(y).to(tl.int64) >= key)
        number += kept.to(tl.int32)
        mass += tl.where(kept, tl.exp2(_z(y, largest, scale)) * ONE, 0.0).to(tl.int64)
    return tl.sum(number), tl.sum(mass)


@triton.jit(noinline=True)
def _bracket_cut(list_y, list_ids, count, low, high, largest, scale, target, vocab):
    """Where the bracket's tokens first weigh `target`: (lowest, lowest_id, how many are kept)."""
    low_key = _key(low).to(tl.int64)
    high_key = _key(high).to(tl.int64)
    at_low, mass_low = _bracket_sums(list_y, count, largest, scale, low_key)
    at_high = 0
    mass_high = tl.full((), 0, tl.int64)
    step = 0
    while (high_key - low_key > 1) & (at_low - at_high > 1):
        part = (target - mass_high).to(tl.float32) / (mass_low - mass_high).to(tl.float32)
        part = tl.where(step < 12, tl.minimum(tl.maximum(part, 0.02), 0.98), 0.5)
        reach = ((high_key - low_key).to(tl.float32) * part).to(tl.int64)
        middle = high_key - tl.minimum(tl.maximum(reach, 1), high_key - low_key - 1)
        number, mass = _bracket_sums(list_y, count, largest, scale, middle)
        reached = mass >= target
        low_key = tl.where(reached, middle, low_key)
        at_low = tl.where(reached, number, at_low)
        mass_low = tl.where(reached, mass, mass_low)
        high_key = tl.where(reached, high_key, middle)
        at_high = tl.where(reached, at_high, number)
        mass_high = tl.where(reached, mass_high, mass)
        step += 1
    lowest = tl.full([4096], NEG_INF, tl.float32)
    for first in range(0, count, 4096):
        i = first + tl.arange(0, 4096)
        y = _floats(list_y, i, i < count)
        wide = _key(y).to(tl.int64)
        lowest = tl.maximum(
            lowest, tl.where((i < count) & (wide >= low_key) & (wide < high_key), y, NEG_INF)
        )
    lowest = tl.max(lowest)
    each = tl.maximum((tl.exp2(_z(lowest, largest, scale)) * ONE).to(tl.int64), 1)
    ties = ((target - mass_high + each - 1) // each).to(tl.int32)
    lowest_id = vocab
    kept = at_low
    if ties < at_low - at_high:
        # Of the equals at the cut, the lowest ids.
        kept = at_high + ties
        below = -1
        while lowest_id - below > 1:
            middle = below + ((lowest_id - below) >> 1)
            number = tl.zeros([4096], tl.int32)
            for first in range(0, count, 4096):
                i = first + tl.arange(0, 4096)
                y = _floats(list_y, i, i < count)
                ids = tl.load(list_ids + i, mask=i < count, other=0)
                number += ((i < count) & (y == lowest) & (ids <= middle)).to(tl.int32)
            enough = tl.sum(number) >= ties
            lowest_id = tl.where(enough, middle, lowest_id)
            below = tl.where(enough, below, middle)
    return lowest, lowest_id, kept


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
def _from_bracket(
    row, params, scratch, plan, bracket_at, masses_at, groups, vocab, num_bias, num_bans, largest,
    word, SUPER: tl.constexpr,
):  # fmt: skip
    """top_p and the draw of a flat row that `collect` went over.

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
    above_mass = tl.sum(above)
    count = tl.load(plan + PLAN_LISTED)
    low = _f32(plan + PLAN_LOW)
    high = _f32(plan + PLAN_HIGH)
    list_y = scratch + bracket_at
    list_ids = list_y + BRACKETED
    complete = 0
    token = 0
    lowest = low
    lowest_id = vocab
    total = tl.full((), 1, tl.int64)
    num_kept = 0
    if (count > 0) & (count <= BRACKETED) & (above_mass < target):
        _, mass = _bracket_sums(list_y, count, largest, scale, tl.full((), -0x80000000, tl.int64))
        if above_mass + mass >= target:
            complete = 1
            lowest, lowest_id, kept = _bracket_cut(
                list_y, list_ids, count, low, high, largest, scale, target - above_mass, vocab
            )
            num_kept = tl.load(plan + PLAN_ABOVE) + kept
            for first in range(0, count, 1024):
                i = first + tl.arange(0, 1024)
                y = _floats(list_y, i, i < count)
                ids = tl.load(list_ids + i, mask=i < count, other=0)
                survives = (i < count) & ((y > lowest) | ((y == lowest) & (ids <= lowest_id)))
                q = (tl.exp2(_z(y, largest, scale)) * ONE).to(tl.int64)
                # Integers: the order of the additions decides nothing.
                tl.atomic_add(masses + (ids >> 6), q, mask=survives)
            tl.debug_barrier()
            token, total = _draw_from_masses(
                row, scratch, masses, groups, lowest, lowest_id, wide_scale, word, vocab,
                num_bias, num_bans,
            )  # fmt: skip
    return complete, token, lowest, lowest_id, total, num_kept


@triton.jit(noinline=True)
def _after_sigma(
    row, params, scratch, candidates_at, groups, tiles, vocab, num_bias, num_bans, largest, word,
    SUPER: tl.constexpr,
):  # fmt: skip
    """The filters and the draw of a row whose first filter is top_n_sigma; complete is 0 where the
    list is too short for its survivors."""
    scale = _i64(params + P_WIDE_SCALE).to(tl.float64, bitcast=True)
    super_maxima = _super_maxima(scratch, groups, SUPER)
    nothing = tl.full((), 0, tl.int64)
    mean = tl.full((), 0.0, tl.float64)
    bound, z_bound = _first_bound(
        row, params, scratch, super_maxima, groups, tiles, vocab, num_bias, num_bans, largest,
        _f32(params + P_SCALE), nothing, mean, SUPER, True,
    )  # fmt: skip
    group_list = scratch + groups * GROUP_LIST
    listed = _list_groups(
        super_maxima, scratch, scratch + groups * SUPER_LIST, group_list, bound, SUPER, False
    )
    list_y = scratch + candidates_at
    list_ids = list_y + LISTED
    count = _list_checked_candidates(
        row, group_list, listed, list_y, list_ids, bound, vocab, num_bias, num_bans
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
            nothing, mean, z_bound, word, LISTED,
        )  # fmt: skip
    return complete, token, highest, lowest, lowest_id, total, num_kept


@triton.jit(
    do_not_specialize=(
        *_INTEGERS, "output_words", "stop_ids", "given_ids", "max_logprobs", "max_logprob_ids",
        "recent_tokens", "plan_at", "candidates_at", "bracket_at", "masses_at", "penalties",
        "rows",
    ),
    do_not_specialize_on_alignment=(*_POINTERS, "words", "output"),
)  # fmt: skip
def dense(
    logits, stride, slots, all_params, state, tables, bitmask, bitmask_stride, words, given, output,
    scratch, scratch_32, mode, vocab_units, tiles, groups_64, params_words, state_words,
    output_words, bias_ids, bias_values, stop_ids, given_ids, max_logprobs, max_logprob_ids,
    recent_tokens, bans_at, plan_at, candidates_at, bracket_at, masses_at, prompt_bits, output_bits,
    counts_at, penalties, rows, SUPER: tl.constexpr, UNIT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The rows that `finish` left, one after the other a program. Grid: any."""
    # Passed in parts, so that the compiler knows what divides them.
    groups = groups_64 * 64
    scratch_words = scratch_32 * 32
    vocab = vocab_units * UNIT
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    dense_list = scratch + (tl.full((), 0, tl.int64) + rows) * scratch_words
    for item in range(tl.program_id(0), tl.load(dense_list), tl.num_programs(0)):
        index = tl.load(dense_list + 1 + item).to(tl.int64)
        slot = tl.load(slots + index).to(tl.int64)
        params = all_params + slot * params_words
        row_state = state + slot * state_words
        row_scratch = scratch + index * scratch_words
        plan = row_scratch + plan_at
        flags = tl.load(params + P_FLAGS)
        logits_row = logits + index * stride * UNIT
        if UNIT > 1:
            logits_row = tl.multiple_of(logits_row, 16)
        row = _row(
            logits_row, params, slot, index, tables, bitmask, bitmask_stride, given,
            row_scratch, mode, flags, vocab, bias_ids, bias_values, bans_at, prompt_bits,
            output_bits, counts_at,
        )  # fmt: skip
        num_bias = tl.load(params + P_NUM_BIAS)
        num_bans = tl.load(plan + PLAN_BANS)
        split, both = _split(flags, params, row, num_bias + num_bans)
        word = _row_word(params, row_state, words, given, mode, index)
        largest = tl.max(_super_maxima(row_scratch, groups, SUPER))
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
        kind = tl.load(plan)
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
            sums = row_scratch + groups * SUMS
            z_bound = tl.full((), -1e300, tl.float64)
            if (flags & F_TOTAL) != 0:
                stats_total = tl.sum(
                    _super_masses(row_scratch, sums, groups, largest, narrow_scale, SUPER)
                )
                if (flags & F_MEAN) != 0:
                    mean = _mean(
                        row_scratch, sums, row_scratch + groups * MOMENTS, groups, largest,
                        narrow_scale, stats_total,
                    )  # fmt: skip
                # Where the list ends, as `finish` bounded it.
                z_bound = _i64(plan + PLAN_LOW).to(tl.float64, bitcast=True)
            list_y = row_scratch + candidates_at
            complete, token, highest, lowest, lowest_id, total, num_kept = _filter_long_list(
                list_y, list_y + LISTED, tl.load(plan + PLAN_COUNT), largest,
                scale, params, tl.load(params + P_TOP_K), (flags & F_TOTAL) != 0, stats_total,
                mean, z_bound, word, LISTED,
            )  # fmt: skip
        if kind == BY_SIGMA:
            complete, token, highest, lowest, lowest_id, total, num_kept = _after_sigma(
                row, params, row_scratch, candidates_at, groups, tiles, vocab, num_bias, num_bans,
                largest, word, SUPER,
            )  # fmt: skip
        if kind == BY_BRACKET:
            complete, token, lowest, lowest_id, total, num_kept = _from_bracket(
                row, params, row_scratch, plan, bracket_at, masses_at, groups, vocab, num_bias,
                num_bans, largest, word, SUPER,
            )  # fmt: skip
            later = (_f32(params + P_TYPICAL) < 1) | (_f32(params + P_EPSILON) > 0)
            if later | (_f32(params + P_ETA) > 0):
                complete = 0
        if complete == 0:
            token, highest, lowest, lowest_id, total, num_kept = _dense_row(
                row, params, tiles, vocab, num_bias, num_bans, special, fallback, largest, word
            )
        row_flags = tl.where(tl.load(plan + PLAN_NAN) != 0, R_NAN, 0)
        row_flags |= tl.where(special == POSITIVE_INFINITY, R_POS_INF, 0)
        row_flags |= tl.where(special == EMPTY_ROW, R_EMPTY, 0)
        tl.debug_barrier()
        _report(
            row, output + index * output_words, params, row_state, row_scratch, flags, row_flags,
            token, highest, lowest, lowest_id, total, num_kept, special, fallback, largest, groups,
            tiles, vocab, num_bias, num_bans, split, both, candidates_at, stop_ids, given_ids,
            max_logprobs, max_logprob_ids, recent_tokens, penalties, SUPER,
        )  # fmt: skip
        tl.debug_barrier()
