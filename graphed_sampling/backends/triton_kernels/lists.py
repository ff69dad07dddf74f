"""Lists of candidates (y, id), ids ascending: all filters and the draw on a short list."""

from __future__ import annotations

import triton
import triton.language as tl

from graphed_sampling.backends.triton_kernels.constants import (
    BATCH,
    CHECK_ALLOWED,
    CHECK_GRAMMAR,
    CHECK_PENALTIES,
    DECIDE,
    F_PROCESSED,
    F_TOTAL,
    INF,
    JOINT,
    KEEP_TIES,
    LISTED,
    LONGER,
    NEG_INF,
    NOTHING,
    ONE,
    P_EPSILON,
    P_ETA,
    P_FLAGS,
    P_TOP_P,
    P_TYPICAL,
    ROUND,
    SHORT,
    SLAB_SIZE,
    TOLD_APART,
)
from graphed_sampling.backends.triton_kernels.groups import (
    _listed_tokens,
)
from graphed_sampling.backends.triton_kernels.numbers import (
    _bit_count,
    _exp2,
    _f32,
    _from_key,
    _key,
    _lowest_bit,
    _masses,
    _mulhi,
    _store_f32,
    _target,
)
from graphed_sampling.backends.triton_kernels.rows import (
    _processed,
    _sanitised,
)


@triton.jit
def _append(list_y, list_ids, count, left, first_ids, row, num_bias, num_bans, PLAIN: tl.constexpr):
    """Append tokens of halves of groups, ids ascending; the new length, which may exceed the list.

    left, first_ids: int32 [H]: which of each half's 32 tokens, and its first id. PLAIN: y is x.
    Few of a half are listed, mostly one: they are taken one after the other, in all halves at once.
    """
    number = _bit_count(left)
    up_to = count + tl.cumsum(number, 0)
    position = up_to - number
    for _hit in range(tl.max(number)):
        ids = first_ids + _lowest_bit(left)
        store = (left != 0) & (position < LISTED)
        if PLAIN:
            y = tl.load(row[0] + ids, mask=store, other=0.0).to(tl.float32) + 0.0
        else:
            y = _processed(_sanitised(row[0], ids, store), ids, store, row, num_bias, num_bans)
        _store_f32(list_y + position, y, mask=store)
        tl.store(list_ids + position, ids, mask=store)
        left = left & (left - 1)
        position += 1
    return tl.max(up_to)


@triton.jit
def _words(bitmap, first_ids, vocab):
    """The bitmap's words of the 32 ids from each of the ids on."""
    return tl.load(bitmap + (first_ids >> 5), mask=first_ids < vocab, other=0)


@triton.jit
def _listed_bits(list_ids, count, first_ids):
    """Bits of those of the 32 ids from each of the ids on that are in a list."""
    bits = tl.zeros_like(first_ids)
    for i in range(count):
        id_ = tl.load(list_ids + i)
        bits |= tl.where(first_ids == (id_ & -32), tl.full((), 1, tl.int32) << (id_ & 31), 0)
    return bits


@triton.jit
def _reaching_x(x, bound):
    """Which of halves' tokens [H, 32] have x >= bound, NaN never: bits [H]."""
    return tl.sum(tl.where(x >= bound, 1 << tl.arange(0, 32)[None, :], 0), 1)


@triton.jit
def _reaching(x, inside, first_ids, row, bound, num_bias, num_bans):
    """Which of halves' tokens [H, 32], of which x are the logits, have y >= bound: bits [H]."""
    _, _, grammar, allowed, prompt, output, _ = row[:7]
    checks, bias_ids, _, bans, vocab = row[7:]
    column = tl.arange(0, 32)[None, :]
    reaching = _reaching_x(x, bound)
    inside_bits = tl.sum(tl.where(inside, 1 << column, 0), 1)
    allowed_bits = ~_listed_bits(bans, num_bans, first_ids)
    changed = _listed_bits(bias_ids, num_bias, first_ids)
    if (checks & CHECK_GRAMMAR) != 0:
        allowed_bits &= _words(grammar, first_ids, vocab)
    if (checks & CHECK_ALLOWED) != 0:
        allowed_bits &= _words(allowed, first_ids, vocab)
    if (checks & CHECK_PENALTIES) != 0:
        changed |= _words(prompt, first_ids, vocab) | _words(output, first_ids, vocab)
    reaching &= allowed_bits & ~changed
    left = changed & allowed_bits & inside_bits
    for _changed in range(tl.max(_bit_count(left))):
        bit = _lowest_bit(left)
        ids = first_ids + bit
        some = left != 0
        y = _processed(_sanitised(row[0], ids, some), ids, some, row, num_bias, num_bans)
        reaching |= tl.where(some & (y >= bound), 1 << bit, 0)
        left = left & (left - 1)
    return reaching


@triton.jit
def _list_candidates(
    row, group_list, listed, list_y, list_ids, bound, num_bias, num_bans, PLAIN: tl.constexpr
):
    """List the tokens of listed groups with y >= bound; how many there are, more than LISTED if
    they do not fit. PLAIN: y is x."""
    vocab = row[11]
    count = 0
    first = 0
    while (first < listed) & (count <= LISTED):
        first_ids, ids, inside = _listed_tokens(group_list, first, listed, vocab, BATCH)
        x = tl.load(row[0] + ids, mask=inside, other=NEG_INF).to(tl.float32)
        if PLAIN:
            reaching = _reaching_x(x, bound)
        else:
            reaching = _reaching(x, inside, first_ids, row, bound, num_bias, num_bans)
        count = _append(
            list_y, list_ids, count, reaching, first_ids, row, num_bias, num_bans, PLAIN
        )
        first += BATCH
    tl.debug_barrier()
    return count


@triton.jit(noinline=True)
def _list_checked_candidates(row, group_list, listed, list_y, list_ids, bound, num_bias, num_bans):
    return _list_candidates(
        row, group_list, listed, list_y, list_ids, bound, num_bias, num_bans, False
    )


@triton.jit(noinline=True)
def _list_from_slab(row, slab, top_k, bound, list_y, list_ids):
    """List the top_k best of a row, and of them those with y >= bound, from its slab; their number,
    -1 where the slab does not tell which they are: it goes by probabilities, which may be equal
    where the logits are not. Nor does one that names tokens which do not exist. y is x."""
    tl.debug_barrier()  # Triton puts none before a call: see tests/ptx_hazards.py
    _, number, values, ids = slab
    i = tl.arange(0, SLAB_SIZE)
    inside = i < tl.load(number)
    bits = tl.load(values + i, mask=inside, other=0)
    listed = tl.load(ids + i, mask=inside, other=0)
    exist = tl.min(((listed >= 0) & (listed < row[11])).to(tl.int32)) != 0
    order = (bits.to(tl.int64) << 32) | (0x7FFFFFFF - listed)
    order = tl.sort(tl.where(inside, order, NOTHING), descending=True)
    p = tl.where(order > NOTHING, (order >> 32).to(tl.int32), 0).to(tl.float32, bitcast=True)
    last = tl.sum(tl.where(i == top_k - 1, p, 0.0))
    after = tl.sum(tl.where(i == top_k, p, 0.0))
    told = exist & (tl.load(number) > top_k) & (last > after * TOLD_APART)
    best = 0x7FFFFFFF - (order & 0x7FFFFFFF).to(tl.int32)
    kept = (i < top_k) & (order > NOTHING) & told
    kept = kept & (_sanitised(row[0], best, kept) >= bound)
    best = tl.sort(tl.where(kept, best, 0x7FFFFFFF))
    count = tl.sum(kept.to(tl.int32))
    _store_f32(list_y + i, _sanitised(row[0], best, i < count), mask=i < count)
    tl.store(list_ids + i, best, mask=i < count)
    tl.debug_barrier()
    return tl.where(told, count, -1)


@triton.jit
def _last(order, kept, LAW: tl.constexpr):
    """The last of the kept in descending int64 `order`: or, of ties that are all kept, what none of
    them comes after."""
    last = tl.min(tl.where(kept, order, -NOTHING))
    if LAW & KEEP_TIES:
        last = (last >> 32) << 32
    return last


@triton.jit
def _sorted_cut(
    order, largest, scale, top_k, top_p, from_stats, stats_total, bounded, LAW: tl.constexpr
):
    """The last that top_k and top_p keep of int64 `order`, and whether it holds the whole nucleus.

    See `_filter_list`. Entries that count are above NOTHING. bounded: other filters decided what is
    listed, all of which counts.
    """
    order = tl.sort(order, descending=True)
    i = tl.arange(0, order.shape[0])
    kept = order > NOTHING
    if top_k > 0:
        if LAW & KEEP_TIES:
            kept = kept & (order >= _last(order, kept & (i < top_k), LAW))
        else:
            kept = kept & (i < top_k)
    complete = 1
    if top_p < 1:
        y = _from_key((order >> 32).to(tl.int32))
        z = tl.where(kept, (y.to(tl.float64) - largest.to(tl.float64)) * scale, 0.0)
        q = tl.where(kept, _masses(_exp2(z)), 0)
        up_to = tl.cumsum(q, 0)
        inside = tl.max(up_to)
        target = _target(top_p, tl.where(from_stats, stats_total, inside))
        complete = (inside >= target).to(tl.int32)
        if LAW & JOINT:
            complete |= bounded.to(tl.int32)
        kept = kept & (up_to - q < target)
    return _last(order, kept, LAW), complete


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
def _within_cut(keys, q, kept, target, LAW: tl.constexpr):
    key, ties = _cut(keys, q, kept, target)
    if LAW & KEEP_TIES:
        ties = 0x7FFFFFFF
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
def _nearest_sorted(distance, q, kept, target):
    """`_nearest` of up to 256: distances that differ by less than 2**-44 of themselves may change
    places."""
    i = tl.arange(0, distance.shape[0])
    order = (distance.to(tl.int64, bitcast=True) & -256) | i
    order = tl.sort(tl.where(kept, order, -NOTHING))
    inside = order < -NOTHING
    which = (order & 255).to(tl.int32)
    weights = tl.where(inside, tl.gather(q, which, 0), 0)
    needed = inside & (tl.cumsum(weights, 0) - weights < target)
    return tl.max(tl.where(needed, tl.gather(distance, which, 0), -1.0))


@triton.jit
def _mean_z(z, q, total):
    moment = ((q.to(tl.float64) * z + ROUND) - ROUND).to(tl.int64)
    return tl.sum(moment).to(tl.float64) / total.to(tl.float64)


@triton.jit
def _filter_list(
    list_y, list_ids, count, largest, scale, params, top_k, from_stats, stats_total,
    stats_mean, z_bound, word, SIZE: tl.constexpr, LATER: tl.constexpr, LAW: tl.constexpr,
):  # fmt: skip
    """All filters on a list, and the draw. LATER: those after top_p too.

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
    complete = 1
    bounded = top_k < 0  # never: what lacks of the mass is in tokens that are not listed
    if LAW & JOINT:
        bounded = (tl.load(params + P_FLAGS) & F_TOTAL) == 0

    if (top_k > 0) | (top_p < 1):
        # y descending, then ids ascending.
        order = (keys.to(tl.int64) << 32) | (0x7FFFFFFF - i)
        order = tl.where(kept, order, NOTHING)
        if SIZE <= LONGER:
            cut, complete = _sorted_cut(
                order, largest, scale, top_k, top_p, from_stats, stats_total, bounded, LAW
            )
            kept = kept & (order >= cut)
        else:
            if (top_k > 0) & (top_k < count):
                ones = tl.full([SIZE], 1, tl.int64)
                kept = _within_cut(keys, ones, kept, tl.cast(top_k, tl.int64), LAW)
            if top_p < 1:
                inside = tl.sum(tl.where(kept, q, 0))
                target = _target(top_p, tl.where(from_stats, stats_total, inside))
                complete = (inside >= target).to(tl.int32)
                if LAW & JOINT:
                    complete |= bounded.to(tl.int32)
                if inside >= target:
                    kept = _within_cut(keys, q, kept, target, LAW)
    if LATER:
        typical = _f32(params + P_TYPICAL)
        from_stats = from_stats & (top_p >= 1)

        if typical < 1:
            q = tl.where(kept, q, 0)
            inside = tl.sum(q)
            total = tl.where(from_stats, stats_total, inside)
            mean = tl.where(from_stats, stats_mean, _mean_z(z, q, inside))
            distance = tl.abs(mean - z)
            target = _target(typical, total)
            if inside >= target:
                if SIZE <= LONGER:
                    reach = _nearest_sorted(distance, q, kept, target)
                else:
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
    if SIZE <= SHORT:
        both = tl.sum((q << 8) + kept.to(tl.int64))
        total = both >> 8
        num_kept = (both & 0xFF).to(tl.int32)
    else:
        total = tl.sum(q)
        num_kept = tl.sum(kept.to(tl.int32))
    highest = largest
    lowest = largest
    lowest_id = 0
    wants_cut = (tl.load(params + P_FLAGS) & F_PROCESSED) != 0
    if LAW & DECIDE:
        wants_cut = total > 0
    if wants_cut:
        highest = tl.max(tl.where(kept, y, NEG_INF))
        lowest = tl.min(tl.where(kept, y, INF))
        lowest_id = tl.max(tl.where(kept & (y == lowest), ids, -1))
    token = tl.full((), 0, tl.int32)
    if not LAW & DECIDE:
        drawn = tl.sum((tl.cumsum(q, 0) <= _mulhi(word, total)).to(tl.int32))
        token = tl.load(list_ids + tl.minimum(drawn, count - 1))
    return complete, token, highest, lowest, lowest_id, total, num_kept


@triton.jit(noinline=True)
def _filter_long_list(
    list_y, list_ids, count, largest, scale, params, top_k, from_stats, stats_total,
    stats_mean, z_bound, word, SIZE: tl.constexpr, LATER: tl.constexpr, LAW: tl.constexpr,
):  # fmt: skip
    return _filter_list(
        list_y, list_ids, count, largest, scale, params, top_k, from_stats, stats_total,
        stats_mean, z_bound, word, SIZE, LATER, LAW,
    )  # fmt: skip
