"""Lists of candidates (y, id), ids ascending: all filters and the draw on a short list."""

from __future__ import annotations

import triton
import triton.language as tl

from graphed_sampling.backends.triton_kernels.constants import (
    F_PROCESSED,
    GROUP,
    INF,
    LISTED,
    NEG_INF,
    ONE,
    P_EPSILON,
    P_ETA,
    P_FLAGS,
    P_TOP_P,
    P_TYPICAL,
    ROUND,
    SHORT,
)
from graphed_sampling.backends.triton_kernels.groups import (
    _group_tokens,
)
from graphed_sampling.backends.triton_kernels.numbers import (
    _exp2,
    _f32,
    _i64,
    _key,
    _masses,
    _mulhi,
    _store_f32,
    _store_i64,
    _target,
)
from graphed_sampling.backends.triton_kernels.rows import (
    _processed,
    _sanitised,
)


@triton.jit
def _append(list_y, list_ids, count, y, group_ids, kept, logits, RELOAD: tl.constexpr):
    """Append what is kept of groups [B, 64], ids ascending; the new length, which may exceed the
    list. group_ids: int32 [B]: the first id of each. RELOAD: y is the row's logits.

    Few of a group are kept, mostly one: they are taken one after the other, in all groups at once.
    """
    column = tl.arange(0, GROUP)[None, :]
    of_group = tl.sum(kept.to(tl.int32), 1)
    position = count + tl.cumsum(of_group, 0) - of_group
    left = tl.where(kept, column, 64)
    for _hit in range(tl.max(of_group)):
        next_ = tl.min(left, 1)
        ids = group_ids + next_
        store = (next_ < 64) & (position < LISTED)
        if RELOAD:
            value = tl.load(logits + ids, mask=store, other=0.0).to(tl.float32) + 0.0
        else:
            value = tl.max(tl.where(column == next_[:, None], y, NEG_INF), 1)
        _store_f32(list_y + position, value, mask=store)
        tl.store(list_ids + position, ids, mask=store)
        left = tl.where(column == next_[:, None], 64, left)
        position += 1
    return count + tl.sum(of_group)


@triton.jit
def _list_candidates(
    row, group_list, listed, list_y, list_ids, bound, vocab, num_bias, num_bans,
    PLAIN: tl.constexpr, BATCH: tl.constexpr,
):  # fmt: skip
    """List the tokens of listed groups with y >= bound; how many there are, more than LISTED if
    they do not fit. PLAIN: y is x."""
    count = 0
    first = 0
    while (first < listed) & (count <= LISTED):
        group_ids, ids, inside = _group_tokens(group_list, first, listed, vocab, BATCH)
        if PLAIN:
            # NaN is above no bound.
            y = tl.load(row[0] + ids, mask=inside, other=NEG_INF).to(tl.float32)
        else:
            y = _sanitised(row[0], ids, inside)
            y = _processed(y, ids, inside, row, num_bias, num_bans, group_ids)
        count = _append(list_y, list_ids, count, y, group_ids, y >= bound, row[0], PLAIN)
        first += BATCH
    tl.debug_barrier()
    return count


@triton.jit(noinline=True)
def _list_checked_candidates(
    row, group_list, listed, list_y, list_ids, bound, vocab, num_bias, num_bans,
    BATCH: tl.constexpr,
):  # fmt: skip
    return _list_candidates(
        row, group_list, listed, list_y, list_ids, bound, vocab, num_bias, num_bans, False, BATCH
    )


@triton.jit
def _cut(keys, q, kept, target):
    """Where the kept, by key descending and position ascending, first weigh `target`.

    q: int64 weights, equal among equal keys. Their sum is >= target >= 1. Returns the key, and how
    many of those with that key are within the cut.
    """
    wide = keys.to(tl.int64)
    low = tl.min(tl.where(kept, wide, 0x7FFFFFFF))
    high = tl.max(tl.where(kept, wide, -0x80000000)) + 1
    while high - low > 1:
        middle = low + (high - low) // 2
        reached = tl.sum(tl.where(kept & (wide >= middle), q, 0)) >= target
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    above = tl.sum(tl.where(kept & (wide > low), q, 0))
    each = tl.max(tl.where(kept & (wide == low), q, 0))
    return low.to(tl.int32), ((target - above + each - 1) // each).to(tl.int32)


@triton.jit
def _within_cut(keys, q, kept, target):
    key, ties = _cut(keys, q, kept, target)
    tie = kept & (keys == key)
    return kept & ((keys > key) | (tie & (tl.cumsum(tie.to(tl.int32), 0) <= ties)))


@triton.jit
def _nearest(distance, q, kept, target):
    """The smallest distance (float64) within which the kept weigh >= target."""
    bits = distance.to(tl.int64, bitcast=True)
    low = tl.full((), -1, tl.int64)
    high = tl.max(tl.where(kept, bits, 0))
    # Until one distance is left between low and high, or the same one several times.
    left = 2
    while (left > 1) & (high - low > 1):
        middle = low + ((high - low) >> 1)
        reached = tl.sum(tl.where(kept & (bits <= middle), q, 0)) >= target
        low = tl.where(reached, low, middle)
        high = tl.where(reached, middle, high)
        left = tl.sum((kept & (bits > low) & (bits <= high)).to(tl.int32))
    found = tl.max(tl.where(kept & (bits > low) & (bits <= high), bits, -1))
    return found.to(tl.float64, bitcast=True)


@triton.jit
def _mean_z(z, q, total):
    moment = ((q.to(tl.float64) * z + ROUND) - ROUND).to(tl.int64)
    return tl.sum(moment).to(tl.float64) / total.to(tl.float64)


@triton.jit
def _filter_list(
    list_y, list_ids, list_q, count, largest, scale, params, top_k, from_stats, stats_total,
    stats_mean, z_bound, word, SIZE: tl.constexpr,
):  # fmt: skip
    """All filters on a list, and the draw.

    from_stats: the list is the head of all tokens, which weigh stats_total and have the mean
    stats_mean; z_bound is where it ends. Otherwise it is the survivors of filters before.
    Returns (complete, token, highest, lowest, lowest_id, total, num_kept): complete is 0 where the
    list turned out not to hold all survivors; survivors are those from highest down to lowest, of
    whose equals those up to lowest_id.
    """
    i = tl.arange(0, SIZE)
    kept = i < count
    y = tl.load(list_y + i, mask=kept, other=0).to(tl.float32, bitcast=True)
    ids = tl.load(list_ids + i, mask=kept, other=0)
    z = tl.where(kept, (y.to(tl.float64) - largest.to(tl.float64)) * scale, 0.0)
    q = tl.where(kept, _masses(_exp2(z)), 0)
    keys = _key(y)
    top_p = _f32(params + P_TOP_P)
    typical = _f32(params + P_TYPICAL)
    complete = 1
    ones = tl.full([SIZE], 1, tl.int64)

    if (top_k > 0) | (top_p < 1):
        if SIZE == SHORT:
            # Every candidate against every other: how many come before it, and what they weigh.
            _store_i64(list_q + 2 * i, q, mask=kept)
            tl.debug_barrier()
            # Read back, so that the loop finds it in the nearest cache.
            q = tl.where(kept, _i64(list_q + 2 * i), 0)
            number_before = tl.zeros([SIZE], tl.int32)
            mass_before = tl.zeros([SIZE], tl.int64)
            for first in range(0, count, 4):
                for step in tl.static_range(4):
                    j = first + step
                    other = tl.where(j < count, _f32(list_y + j), NEG_INF)
                    before = (other > y) | ((other == y) & (j < i))
                    number_before += before.to(tl.int32)
                    mass_before += tl.where(before, _i64(list_q + 2 * j), 0)
            if top_k > 0:
                kept = kept & (number_before < top_k)
            if top_p < 1:
                inside = tl.sum(tl.where(kept, q, 0))
                target = _target(top_p, tl.where(from_stats, stats_total, inside))
                complete = (inside >= target).to(tl.int32)
                kept = kept & (mass_before < target)
        else:
            if (top_k > 0) & (top_k < count):
                kept = _within_cut(keys, ones, kept, tl.cast(top_k, tl.int64))
            if top_p < 1:
                inside = tl.sum(tl.where(kept, q, 0))
                target = _target(top_p, tl.where(from_stats, stats_total, inside))
                complete = (inside >= target).to(tl.int32)
                if inside >= target:
                    kept = _within_cut(keys, q, kept, target)
    from_stats = from_stats & (top_p >= 1)

    if typical < 1:
        q = tl.where(kept, q, 0)
        inside = tl.sum(q)
        total = tl.where(from_stats, stats_total, inside)
        mean = tl.where(from_stats, stats_mean, _mean_z(z, q, inside))
        distance = tl.abs(mean - z)
        target = _target(typical, total)
        if inside >= target:
            reach = _nearest(distance, q, kept, target)
            kept = kept & (distance <= reach)
            if from_stats:
                complete = (mean - reach >= z_bound).to(tl.int32)
        else:
            complete = 0
        from_stats = from_stats & (typical >= 1)

    epsilon = _f32(params + P_EPSILON)
    eta = _f32(params + P_ETA)
    if (typical < 1) | (epsilon > 0) | (eta > 0):
        # typical_p may drop the row's maximum: masses start again from the survivors' own.
        z = z - tl.max(tl.where(kept, z, -1e300))
        weights = _exp2(z)
        if epsilon > 0:
            inside = tl.sum(tl.where(kept, _masses(weights), 0))
            total = tl.where(from_stats, stats_total, inside).to(tl.float64) / ONE
            kept = kept & ((weights >= epsilon.to(tl.float64) * total) | (z == 0))
            from_stats = from_stats & (epsilon <= 0)
        if eta > 0:
            q = tl.where(kept, _masses(weights), 0)
            inside = tl.sum(q)
            total = tl.where(from_stats, stats_total, inside).to(tl.float64) / ONE
            mean = tl.where(from_stats, stats_mean, _mean_z(z, q, inside))
            wide = eta.to(tl.float64)
            bound = tl.minimum(wide * total, tl.sqrt(wide) * _exp2(mean))
            kept = kept & ((weights >= bound) | (z == 0))
        q = _masses(weights)
    q = tl.where(kept, q, 0)
    total = tl.sum(q)
    num_kept = tl.sum(kept.to(tl.int32))
    highest = largest
    lowest = largest
    lowest_id = 0
    if (tl.load(params + P_FLAGS) & F_PROCESSED) != 0:
        highest = tl.max(tl.where(kept, y, NEG_INF))
        lowest = tl.min(tl.where(kept, y, INF))
        lowest_id = tl.max(tl.where(kept & (y == lowest), ids, -1))
    drawn = tl.sum((tl.cumsum(q, 0) <= _mulhi(word, total)).to(tl.int32))
    token = tl.load(list_ids + tl.minimum(drawn, count - 1))
    return complete, token, highest, lowest, lowest_id, total, num_kept


@triton.jit(noinline=True)
def _filter_long_list(
    list_y, list_ids, list_q, count, largest, scale, params, top_k, from_stats, stats_total,
    stats_mean, z_bound, word, SIZE: tl.constexpr,
):  # fmt: skip
    return _filter_list(
        list_y, list_ids, list_q, count, largest, scale, params, top_k, from_stats, stats_total,
        stats_mean, z_bound, word, SIZE,
    )  # fmt: skip
