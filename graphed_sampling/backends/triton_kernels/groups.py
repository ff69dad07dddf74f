"""What the statistics of groups tell: masses, bounds, which groups to read again."""

from __future__ import annotations

import triton
import triton.language as tl

from graphed_sampling.backends.triton_kernels.constants import (
    FLT_MAX,
    GROUP,
    INF,
    NEG_INF,
    NEG_INF_BITS,
    ONE,
    SUPERS,
)
from graphed_sampling.backends.triton_kernels.numbers import (
    _exp2,
    _f32,
    _fast_exp2,
    _from_key,
    _key,
    _masses,
    _mulhi,
    _share,
    _z,
)
from graphed_sampling.backends.triton_kernels.rows import (
    _processed,
    _sanitised,
)


@triton.jit
def _floats(pointer, i, inside):
    """Floats of an array, -inf where not inside."""
    return tl.load(pointer + i, mask=inside, other=NEG_INF_BITS).to(tl.float32, bitcast=True)


@triton.jit
def _part(j, SUPER: tl.constexpr):
    """Indices of groups [SUPERS, up to 8]: of each super those from its j-th on."""
    width: tl.constexpr = SUPER if SUPER < 8 else 8
    first = tl.arange(0, SUPERS) * SUPER + j
    return first[:, None] + tl.arange(0, width)[None, :]


@triton.jit
def _super_maxima(maxima, groups, SUPER: tl.constexpr):
    """The supers' maxima [SUPERS]."""
    super_maxima = tl.full([SUPERS], NEG_INF, tl.float32)
    for j in range(0, SUPER, 8):
        g = _part(j, SUPER)
        super_maxima = tl.maximum(super_maxima, tl.max(_floats(maxima, g, g < groups), 1))
    return super_maxima


@triton.jit
def _group_masses(maximum, sums, largest, scale):
    """int64 masses of groups, the row's largest weight being 2**40. largest may be +inf."""
    z = tl.where(maximum == largest, 0.0, _z(maximum, largest, scale))
    mass = sums * tl.exp2(z) * ONE
    return tl.where(maximum == NEG_INF, 0.0, mass).to(tl.int64)


@triton.jit
def _super_masses(maxima, sums, groups, largest, scale, SUPER: tl.constexpr):
    """The supers' masses, int64 [SUPERS], each the sum of its groups'."""
    masses = tl.zeros([SUPERS], tl.int64)
    for j in range(0, SUPER, 8):
        g = _part(j, SUPER)
        maximum = _floats(maxima, g, g < groups)
        mass = _group_masses(maximum, _floats(sums, g, g < groups), largest, scale)
        masses += tl.sum(mass, 1)
    return masses


@triton.jit
def _finite(maximum):
    """A value to take differences from where a maximum may be that of nothing."""
    return tl.where(maximum == NEG_INF, 0.0, maximum)


@triton.jit
def _weights_in_supers(maximum, sums, super_maxima, scale):
    """Of groups [S, W]: their weights' sums, the weights of a super being relative to its largest;
    added up, in one order whatever the layout."""
    supers: tl.constexpr = maximum.shape[0]
    width: tl.constexpr = maximum.shape[1]
    base = _finite(super_maxima)[:, None]
    weights = sums * _fast_exp2(_z(maximum, base, scale))
    if width >= 8:
        weights = tl.sum(tl.reshape(weights, [supers, 4, 2]), 2)
    if width >= 4:
        weights = tl.sum(tl.reshape(weights, [supers, 2, 2]), 2)
    return tl.sum(weights, 1)


@triton.jit
def _statistics(maxima, sums, groups, scale, wanted, SUPER: tl.constexpr):
    """(super_maxima [SUPERS], the largest, int64 masses of the supers [SUPERS]).

    The masses are 0 where not wanted, and anything where the largest is not finite.
    """
    if SUPER <= 8:
        # All loads before anything is worked out.
        g = _part(0, SUPER)
        maximum = _floats(maxima, g, g < groups)
        sum_ = tl.load(sums + g, mask=(g < groups) & wanted, other=0)
        super_maxima = tl.max(maximum, 1)
        largest = tl.max(super_maxima)
        weights = _weights_in_supers(
            maximum, sum_.to(tl.float32, bitcast=True), super_maxima, scale
        )
    else:
        super_maxima = _super_maxima(maxima, groups, SUPER)
        largest = tl.max(super_maxima)
        weights = tl.zeros([SUPERS], tl.float32)
        if wanted:
            for j in range(0, SUPER, 8):
                g = _part(j, SUPER)
                maximum = _floats(maxima, g, g < groups)
                sum_ = tl.load(sums + g, mask=g < groups, other=0).to(tl.float32, bitcast=True)
                weights += _weights_in_supers(maximum, sum_, super_maxima, scale)
    weights *= _fast_exp2(_z(super_maxima, largest, scale))
    return super_maxima, largest, (weights * ONE).to(tl.int64)


@triton.jit(noinline=True)
def _mean(maxima, sums, moments, groups, largest, scale, total):
    """float64: the mean of z over all tokens."""
    moment = tl.zeros([SUPERS], tl.int64)
    for first in range(0, groups, SUPERS):
        i = first + tl.arange(0, SUPERS)
        z = _z(_floats(maxima, i, i < groups), largest, scale)
        value = _floats(sums, i, i < groups) * z + _floats(moments, i, i < groups)
        moment += tl.where(z > -126.0, value * tl.exp2(z) * ONE, 0.0).to(tl.int64)
    return tl.sum(moment).to(tl.float64) / total.to(tl.float64)


@triton.jit
def _between(low, high, part, by_bits):
    """A bound at `part` of the way from low to high: by value, or by the floats' bits."""
    low_key = _key(low).to(tl.int64)
    reach = ((_key(high) - low_key).to(tl.float32) * part).to(tl.int64)
    by_key = _from_key((low_key + reach).to(tl.int32))
    return tl.where(by_bits, by_key, low * (1.0 - part) + high * part)


@triton.jit
def _numbers_above(values, count, bound0, bound1, bound2, LOADED: tl.constexpr):
    """How many of the values reach each of three bounds. They are a block [SUPERS], LOADED, or
    `count` of them in memory."""
    if LOADED:
        above = (values >= bound0).to(tl.int32)
        above += (values >= bound1).to(tl.int32) << 10
        above += (values >= bound2).to(tl.int32) << 20
        numbers = tl.sum(above)
        number0 = numbers & 0x3FF
        number1 = (numbers >> 10) & 0x3FF
        number2 = numbers >> 20
    else:
        wide = tl.zeros([SUPERS], tl.int64)
        for first in range(0, count, SUPERS):
            i = first + tl.arange(0, SUPERS)
            value = _floats(values, i, i < count)
            wide += (value >= bound0).to(tl.int64)
            wide += (value >= bound1).to(tl.int64) << 20
            wide += (value >= bound2).to(tl.int64) << 40
        numbers_wide = tl.sum(wide)
        number0 = (numbers_wide & 0xFFFFF).to(tl.int32)
        number1 = ((numbers_wide >> 20) & 0xFFFFF).to(tl.int32)
        number2 = (numbers_wide >> 40).to(tl.int32)
    return number0, number1, number2


@triton.jit
def _search_top_bound(values, count, smallest, largest, k, LOADED: tl.constexpr):
    low = smallest
    high = largest
    at_low, at_high, _ = _numbers_above(values, count, low, largest, largest, LOADED)
    if at_low < k:
        low = tl.full((), -FLT_MAX, tl.float32)
    elif at_high >= k:
        low = largest
    else:
        # k or more reach `low`, fewer reach `high`. Numbers above a bound fall about
        # exponentially: three bounds around where k would be if they did. That gives way to
        # bounds by bits, which end.
        enough = k + (k >> 3) + 4
        wanted = tl.log2((k + (k >> 4) + 2).to(tl.float32))
        log_low = tl.log2(at_low.to(tl.float32))
        log_high = tl.log2(at_high.to(tl.float32))
        step = 0
        while (at_low > enough) & (_key(high).to(tl.int64) - _key(low) > 1):
            part = (log_low - wanted) / (log_low - log_high)
            by_bits = step >= 4
            part = tl.where(by_bits, 0.5, tl.minimum(tl.maximum(part, 0.05), 0.95))
            bound0 = _between(low, high, 0.8 * part, by_bits)
            bound1 = _between(low, high, part, by_bits)
            bound2 = _between(low, high, 0.8 * part + 0.2, by_bits)
            number0, number1, number2 = _numbers_above(
                values, count, bound0, bound1, bound2, LOADED
            )
            in0, in1, in2 = number0 >= k, number1 >= k, number2 >= k
            high = tl.where(in2, high, tl.where(in1, bound2, tl.where(in0, bound1, bound0)))
            at_high = tl.where(
                in2, at_high, tl.where(in1, number2, tl.where(in0, number1, number0))
            )
            low = tl.where(in2, bound2, tl.where(in1, bound1, tl.where(in0, bound0, low)))
            at_low = tl.where(in2, number2, tl.where(in1, number1, tl.where(in0, number0, at_low)))
            log_low = tl.log2(at_low.to(tl.float32))
            log_high = tl.log2(tl.maximum(at_high, 1).to(tl.float32))
            step += 1
    return low


@triton.jit(noinline=True)
def _top_bound_of_groups(maxima, groups, largest, k):
    smallest = tl.full([SUPERS], INF, tl.float32)
    for first in range(0, groups, SUPERS):
        i = first + tl.arange(0, SUPERS)
        maximum = _floats(maxima, i, i < groups)
        smallest = tl.minimum(smallest, tl.where(maximum > NEG_INF, maximum, INF))
    return _search_top_bound(maxima, groups, tl.min(smallest), largest, k, False)


@triton.jit
def _top_bound(super_maxima, maxima, groups, largest, k):
    """A bound that at least k of the supers' maxima reach, or of the groups' where k is large; and
    so k tokens. Few more do.

    -FLT_MAX where fewer than k hold a token. largest: of the maxima, finite.
    """
    if k <= SUPERS // 4:
        smallest = tl.min(tl.where(super_maxima > NEG_INF, super_maxima, INF))
        bound = _search_top_bound(super_maxima, 0, smallest, largest, k, True)
    else:
        bound = _top_bound_of_groups(maxima, groups, largest, k)
    return bound


@triton.jit
def _largest_weights(maxima, j, groups, largest, scale, SUPER: tl.constexpr):
    g = _part(j, SUPER)
    z = tl.maximum(_z(_floats(maxima, g, g < groups), largest, scale), -1000.0)
    return z, tl.exp2(z)


@triton.jit
def _reach(z, weight, low, part):
    """What groups' largest tokens weigh, [S, W], that reach each of four bounds: [2, 2]."""
    weight0 = tl.sum(tl.where(z >= low + part, weight, 0.0), 1)
    weight1 = tl.sum(tl.where(z >= low + part * 2.0, weight, 0.0), 1)
    weight2 = tl.sum(tl.where(z >= low + part * 3.0, weight, 0.0), 1)
    weight3 = tl.sum(tl.where(z >= low + part * 4.0, weight, 0.0), 1)
    return tl.sum(tl.join(tl.join(weight0, weight1), tl.join(weight2, weight3)), 0)


@triton.jit
def _nucleus_bound(maxima, groups, largest, scale, total, top_p, SUPER: tl.constexpr):
    """(z, found): the largest tokens of groups that reach z weigh top_p of the total by themselves.

    Not found where distributions are so flat that groups hold several tokens of the nucleus.
    """
    of_largest = total.to(tl.float32) / ONE
    # What is rounded here is told by the list itself later.
    needed = of_largest * tl.minimum(top_p * 1.0001, 1.0)
    tokens = (groups * GROUP).to(tl.float32)
    start = tl.minimum(tl.log2(of_largest * tl.maximum(1.0 - top_p, 1e-6) / tokens) - 1.0, -1.0)
    low = start
    high = tl.full((), 0.0, tl.float32)
    if SUPER <= 8:
        z, weight = _largest_weights(maxima, 0, groups, largest, scale, SUPER)
    for _step in range(3):
        part = 0.2 * (high - low)
        if SUPER <= 8:
            reached = _reach(z, weight, low, part)
        else:
            reached = tl.zeros([2, 2], tl.float32)
            for j in range(0, SUPER, 8):
                z, weight = _largest_weights(maxima, j, groups, largest, scale, SUPER)
                reached += _reach(z, weight, low, part)
        number = tl.sum(tl.sum((reached >= needed).to(tl.int32), 1)).to(tl.float32)
        high = tl.where(number < 4, low + part * (number + 1.0), high)
        low = tl.where(number > 0, low + part * number, low)
    return low, low > start


@triton.jit
def _group_weights(maxima, sums, j, groups, largest, scale, unit, SUPER: tl.constexpr):
    """Of groups [SUPERS, up to 8]: z of the maximum; and in units, as int32, the weight of all
    tokens, and of all but the maximum."""
    g = _part(j, SUPER)
    z = _z(_floats(maxima, g, g < groups), largest, scale)
    top = tl.exp2(z) * unit
    weight = tl.where(z > -126.0, _floats(sums, g, g < groups) * top, 0.0)
    return z, weight.to(tl.int32), tl.maximum(weight - top, 0.0).to(tl.int32)


@triton.jit
def _outside(z, weight, rest, middle, most, mean):
    """At most what tokens of groups weigh below z = middle and above 2 * mean - middle: [S]."""
    wholly = (z < middle) | (z > 2.0 * mean - middle)
    return tl.sum(tl.where(wholly, weight, tl.minimum(rest, most)), 1)


@triton.jit(noinline=True)
def _mass_bound(maxima, sums, groups, largest, scale, total, share, mean, SUPER: tl.constexpr):
    """z such that tokens below it, and above 2 * mean - z, weigh less than `share` of the total;
    of flat rows, whose largest tokens of groups weigh little together, a z far below.

    What a group holds below z is at most what it holds beside its maximum, and at most 63 * 2**z.
    In units of 2**-30 of the total, less what rounding them down may hide.
    """
    unit = 1073741824.0 * ONE / total.to(tl.float32)
    budget = (share * 1073741824.0).to(tl.int32) - groups
    tokens = (groups * GROUP).to(tl.float32)
    low = tl.minimum(tl.log2(tl.maximum(share * 536870912.0, 1.0) / (tokens * unit)), 0.0)
    high = tl.full((), 0.0, tl.float32)
    z, weight, rest = _group_weights(maxima, sums, 0, groups, largest, scale, unit, SUPER)
    besides = tl.sum(tl.sum(rest, 1))
    for j in range(8, SUPER, 8):
        z, weight, rest = _group_weights(maxima, sums, j, groups, largest, scale, unit, SUPER)
        besides += tl.sum(tl.sum(rest, 1))
    steps = tl.where(besides.to(tl.float32) > (1.0 + share) * 536870912.0, 0, 7)
    for _step in range(steps):
        middle = 0.5 * (low + high)
        most = tl.minimum(tl.exp2(middle) * 63.0 * unit, 1073741824.0).to(tl.int32) + 1
        if SUPER <= 8:
            outside = _outside(z, weight, rest, middle, most, mean)
        else:
            outside = tl.zeros([SUPERS], tl.int32)
            for j in range(0, SUPER, 8):
                z, weight, rest = _group_weights(
                    maxima, sums, j, groups, largest, scale, unit, SUPER
                )
                outside += _outside(z, weight, rest, middle, most, mean)
        fits = tl.sum(outside) <= budget
        low = tl.where(fits, middle, low)
        high = tl.where(fits, high, middle)
    return low


@triton.jit
def _list_groups(super_maxima, maxima, super_list, group_list, bound, SUPER: tl.constexpr):
    """List the groups whose maximum is >= bound, ascending; their number."""
    flagged = super_maxima >= bound
    up_to = tl.cumsum(flagged.to(tl.int32), 0)
    tl.store(super_list + up_to - 1, tl.arange(0, SUPERS), mask=flagged)
    listed = tl.max(up_to)
    tl.debug_barrier()
    rows: tl.constexpr = 256 // SUPER
    count = 0
    for first in range(0, listed, rows):
        i = first + tl.arange(0, rows)
        super_ = tl.load(super_list + i, mask=i < listed, other=0)
        g = super_[:, None] * SUPER + tl.arange(0, SUPER)[None, :]
        maximum = _floats(maxima, g, (i < listed)[:, None])
        flags = (maximum >= bound) & (i < listed)[:, None]
        flat = tl.reshape(flags.to(tl.int32), [256])
        up_to_group = count + tl.cumsum(flat, 0)
        tl.store(group_list + up_to_group - 1, tl.reshape(g, [256]), mask=flat != 0)
        count = tl.max(up_to_group)
    tl.debug_barrier()
    return count


@triton.jit
def _listed_tokens(group_list, first, count, vocab, NUMBER: tl.constexpr):
    """Of NUMBER listed groups, taken as halves of 32 tokens: the halves' first ids [2 * NUMBER],
    all ids [2 * NUMBER, 32], and which are tokens."""
    i = 2 * first + tl.arange(0, 2 * NUMBER)
    group = tl.load(group_list + (i >> 1), mask=i < 2 * count, other=0)
    first_ids = group * 64 + (i & 1) * 32
    ids = first_ids[:, None] + tl.arange(0, 32)[None, :]
    return first_ids, ids, (i < 2 * count)[:, None] & (ids < vocab)


@triton.jit
def _position(share, inside, mass, total):
    """How far into parts of an int64 total a draw reaches that reaches `inside` far into their
    mass, a share (float64 in [0, 1)) of it. Where both add up to the same nothing is rounded."""
    rounded = tl.minimum((share * total.to(tl.float64)).to(tl.int64), total - 1)
    return tl.where(total == mass, inside, rounded)


@triton.jit
def _inside_group(
    row, group, maximum, scale, share, place, mass, vocab, num_bias, num_bans, PLAIN: tl.constexpr
):
    """The token at `share` (float64 in [0, 1)) of a group's mass, `place` far into it."""
    ids = group * 64 + tl.arange(0, GROUP)
    inside = ids < vocab
    y = _sanitised(row[0], ids, inside)
    if not PLAIN:
        y = _processed(y, ids, inside, row, num_bias, num_bans)
    z = tl.where(y > NEG_INF, (y.to(tl.float64) - maximum.to(tl.float64)) * scale, 0.0)
    q = tl.where(y > NEG_INF, _masses(_exp2(z)), 0)
    total = tl.sum(q)
    position = _position(share, place, mass, total)
    return group * 64 + tl.sum((tl.cumsum(q, 0) <= position).to(tl.int32))


@triton.jit(noinline=True)
def _inside_checked_group(
    row, group, maximum, scale, share, place, mass, vocab, num_bias, num_bans
):
    return _inside_group(
        row, group, maximum, scale, share, place, mass, vocab, num_bias, num_bans, False
    )


@triton.jit
def _draw_from_groups(
    row, maxima, sums, super_masses, scale, narrow_scale, total, word, vocab, num_bias, num_bans,
    plain, SUPER: tl.constexpr,
):  # fmt: skip
    """A token drawn from all: its super by mass, then a group of it, then inside the group."""
    up_to = tl.cumsum(super_masses, 0)
    place = _mulhi(word, total)
    over = up_to <= place
    super_ = tl.minimum(tl.sum(over.to(tl.int32)), SUPERS - 1)
    before = tl.max(tl.where(over, up_to, 0))
    of_super = tl.min(tl.where(over, total, up_to)) - before
    share = _share(word, total, before, of_super)
    g = super_ * SUPER + tl.arange(0, SUPER)
    group_maxima = _floats(maxima, g, g >= 0)
    base = tl.max(group_maxima)
    mass = _group_masses(group_maxima, _floats(sums, g, g >= 0), base, narrow_scale)
    inner = tl.sum(mass)
    place = _position(share, place - before, of_super, inner)
    over = tl.cumsum(mass, 0) <= place
    group = super_ * SUPER + tl.sum(over.to(tl.int32))
    before = tl.sum(tl.where(over, mass, 0))
    of_group = tl.sum(tl.where(g == group, mass, 0))
    place -= before
    share = (share * inner.to(tl.float64) - before.to(tl.float64)) / of_group.to(tl.float64)
    share = tl.minimum(tl.maximum(share, 0.0), 0.9999999999999999)
    maximum = _f32(maxima + group)
    if plain:
        token = _inside_group(row, group, maximum, scale, share, place, of_group, vocab, 0, 0, True)
    else:
        token = _inside_checked_group(
            row, group, maximum, scale, share, place, of_group, vocab, num_bias, num_bans
        )
    return token


@triton.jit
def _first_in_group(row, group, largest, vocab, num_bias, num_bans, PLAIN: tl.constexpr):
    ids = group * 64 + tl.arange(0, GROUP)
    inside = ids < vocab
    y = _sanitised(row[0], ids, inside)
    if not PLAIN:
        y = _processed(y, ids, inside, row, num_bias, num_bans)
    return tl.min(tl.where(y == largest, ids, vocab))


@triton.jit(noinline=True)
def _first_in_checked_group(row, group, largest, vocab, num_bias, num_bans):
    return _first_in_group(row, group, largest, vocab, num_bias, num_bans, False)


@triton.jit
def _first_maximum(
    row, maxima, super_maxima, largest, vocab, num_bias, num_bans, plain, SUPER: tl.constexpr
):
    """The lowest id among the largest y."""
    super_ = tl.min(tl.where(super_maxima == largest, tl.arange(0, SUPERS), SUPERS - 1))
    g = super_ * SUPER + tl.arange(0, SUPER)
    group = tl.min(tl.where(_floats(maxima, g, g >= 0) == largest, g, 0x7FFFFFFF))
    if plain:
        token = _first_in_group(row, group, largest, vocab, 0, 0, True)
    else:
        token = _first_in_checked_group(row, group, largest, vocab, num_bias, num_bans)
    return token
