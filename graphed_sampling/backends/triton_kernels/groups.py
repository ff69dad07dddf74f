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
)
from graphed_sampling.backends.triton_kernels.numbers import (
    _exp2,
    _f32,
    _from_key,
    _key,
    _masses,
    _mulhi,
    _share,
    _store_f32,
    _store_i64,
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
def _of_supers(pointer, first, supers, WIDE: tl.constexpr):
    """[WIDE / 8, 8] floats of the groups of supers, from the super `first` on."""
    i = first + tl.arange(0, WIDE // 8)
    at = i[:, None] * 8 + tl.arange(0, 8)[None, :]
    return _floats(pointer, at, (i < supers)[:, None])


@triton.jit
def _super_maxima(maxima, super_maxima, supers, WIDE: tl.constexpr):
    """Store the supers' maxima; the largest."""
    largest = tl.full([WIDE // 8], NEG_INF, tl.float32)
    for first in range(0, supers, WIDE // 8):
        maximum = tl.max(_of_supers(maxima, first, supers, WIDE), 1)
        i = first + tl.arange(0, WIDE // 8)
        _store_f32(super_maxima + i, maximum, mask=i < supers)
        largest = tl.maximum(largest, maximum)
    tl.debug_barrier()
    return tl.max(largest)


@triton.jit
def _maximum(maxima, groups, WIDE: tl.constexpr):
    largest = tl.full([WIDE], NEG_INF, tl.float32)
    for first in range(0, groups, WIDE):
        i = first + tl.arange(0, WIDE)
        largest = tl.maximum(largest, _floats(maxima, i, i < groups))
    return tl.max(largest)


@triton.jit
def _group_masses(maximum, sums, largest, scale):
    """int64 masses of groups, the row's largest weight being 2**40. largest may be +inf."""
    z = tl.where(maximum == largest, 0.0, _z(maximum, largest, scale))
    mass = sums * tl.exp2(z) * ONE
    return tl.where(maximum == NEG_INF, 0.0, mass).to(tl.int64)


@triton.jit
def _total(maxima, sums, groups, largest, scale, WIDE: tl.constexpr):
    """int64 mass of all tokens."""
    total = tl.zeros([WIDE], tl.int64)
    for first in range(0, groups, WIDE):
        i = first + tl.arange(0, WIDE)
        maximum = _floats(maxima, i, i < groups)
        total += _group_masses(maximum, _floats(sums, i, i < groups), largest, scale)
    return tl.sum(total)


@triton.jit
def _super_masses(maxima, sums, super_masses, supers, largest, scale, WIDE: tl.constexpr):
    """Store the supers' int64 masses; the mass of all tokens."""
    total = tl.zeros([WIDE // 8], tl.int64)
    for first in range(0, supers, WIDE // 8):
        maximum = _of_supers(maxima, first, supers, WIDE)
        mass = _group_masses(maximum, _of_supers(sums, first, supers, WIDE), largest, scale)
        mass = tl.sum(mass, 1)
        i = first + tl.arange(0, WIDE // 8)
        _store_i64(super_masses + 2 * i, mass, mask=i < supers)
        total += mass
    tl.debug_barrier()
    return tl.sum(total)


@triton.jit
def _mean(maxima, sums, moments, groups, largest, scale, total, WIDE: tl.constexpr):
    """float64: the mean of z over all tokens."""
    moment = tl.zeros([WIDE], tl.int64)
    for first in range(0, groups, WIDE):
        i = first + tl.arange(0, WIDE)
        z = _z(_floats(maxima, i, i < groups), largest, scale)
        value = _floats(sums, i, i < groups) * z + _floats(moments, i, i < groups)
        moment += tl.where(z > -126.0, value * tl.exp2(z) * ONE, 0.0).to(tl.int64)
    return tl.sum(moment).to(tl.float64) / total.to(tl.float64)


@triton.jit
def _numbers_above(maxima, count, bound0, bound1, bound2):
    """How many of the maxima reach each of three bounds: 20 bits each of an int64."""
    above = tl.zeros([256], tl.int64)
    for first in range(0, count, 256):
        i = first + tl.arange(0, 256)
        maximum = _floats(maxima, i, i < count)
        above += (maximum >= bound0).to(tl.int64)
        above += (maximum >= bound1).to(tl.int64) << 20
        above += (maximum >= bound2).to(tl.int64) << 40
    return tl.sum(above)


@triton.jit
def _between(low, high, part, by_bits):
    """A bound at `part` of the way from low to high: by value, or by the floats' bits."""
    low_key = _key(low).to(tl.int64)
    reach = ((_key(high) - low_key).to(tl.float32) * part).to(tl.int64)
    by_key = _from_key((low_key + reach).to(tl.int32))
    return tl.where(by_bits, by_key, low * (1.0 - part) + high * part)


@triton.jit
def _top_bound(maxima, count, largest, k):
    """A bound that at least k of the maxima reach, and so k tokens; few more do.

    -FLT_MAX where fewer than k hold a token. largest: of the maxima, finite.
    """
    smallest = tl.full([256], INF, tl.float32)
    for first in range(0, count, 256):
        i = first + tl.arange(0, 256)
        maximum = _floats(maxima, i, i < count)
        smallest = tl.minimum(smallest, tl.where(maximum > NEG_INF, maximum, INF))
    low = tl.min(smallest)
    high = largest
    numbers = _numbers_above(maxima, count, low, largest, largest)
    at_low = (numbers & 0xFFFFF).to(tl.int32)
    at_high = ((numbers >> 20) & 0xFFFFF).to(tl.int32)
    if at_low < k:
        low = tl.full((), -FLT_MAX, tl.float32)
    elif at_high >= k:
        low = largest
    else:
        # k or more reach `low`, fewer reach `high`. Numbers above a bound fall about
        # exponentially: three bounds around where k would be if they did. That gives way to
        # bounds by bits, which end.
        enough = k + k // 4 + 4
        step = 0
        while (at_low > enough) & (_key(high).to(tl.int64) - _key(low) > 1):
            slope = tl.log2(at_low.to(tl.float32) / at_high.to(tl.float32))
            part = tl.log2(at_low.to(tl.float32) / (k + k // 8 + 2).to(tl.float32)) / slope
            by_bits = step >= 4
            part = tl.where(by_bits, 0.5, tl.minimum(tl.maximum(part, 0.05), 0.95))
            bound0 = _between(low, high, 0.7 * part, by_bits)
            bound1 = _between(low, high, part, by_bits)
            bound2 = _between(low, high, 0.6 * part + 0.4, by_bits)
            numbers = _numbers_above(maxima, count, bound0, bound1, bound2)
            number0 = (numbers & 0xFFFFF).to(tl.int32)
            number1 = ((numbers >> 20) & 0xFFFFF).to(tl.int32)
            number2 = (numbers >> 40).to(tl.int32)
            if number2 >= k:
                low = bound2
                at_low = number2
            elif number1 >= k:
                low = bound1
                at_low = number1
                high = bound2
                at_high = tl.maximum(number2, 1)
            elif number0 >= k:
                low = bound0
                at_low = number0
                high = bound1
                at_high = tl.maximum(number1, 1)
            else:
                high = bound0
                at_high = tl.maximum(number0, 1)
            step += 1
    return low


@triton.jit
def _group_weights(maxima, sums, first, groups, largest, scale, unit):
    """Of 2048 groups: z of the maximum; and in units, as int32, the weight of all tokens, and of
    all but the maximum."""
    i = first + tl.arange(0, 2048)
    z = _z(_floats(maxima, i, i < groups), largest, scale)
    top = tl.exp2(z) * unit
    weight = tl.where(z > -126.0, _floats(sums, i, i < groups) * top, 0.0)
    return z, weight.to(tl.int32), tl.maximum(weight - top, 0.0).to(tl.int32)


@triton.jit
def _outside(z, weight, rest, middle, most, mean):
    """At most what tokens of groups weigh below z = middle and above 2 * mean - middle."""
    wholly = (z < middle) | (z > 2.0 * mean - middle)
    return tl.sum(tl.where(wholly, weight, tl.minimum(rest, most)))


@triton.jit(noinline=True)
def _outside_of_many(maxima, sums, groups, largest, scale, unit, middle, most, mean):
    outside = 0
    for first in range(0, groups, 2048):
        z, weight, rest = _group_weights(maxima, sums, first, groups, largest, scale, unit)
        outside += _outside(z, weight, rest, middle, most, mean)
    return outside


@triton.jit
def _mass_bound(maxima, sums, groups, largest, scale, total, share, mean):
    """z such that tokens below it, and above 2 * mean - z, weigh less than `share` of the total.

    What a group holds below z is at most what it holds beside its maximum, and at most 63 * 2**z.
    In units of 2**-30 of the total, less what rounding them down may hide.
    """
    unit = 1073741824.0 * ONE / total.to(tl.float32)
    budget = (share * 1073741824.0).to(tl.int32) - groups
    tokens = (groups * 64).to(tl.float32)
    low = tl.minimum(tl.log2(tl.maximum(share * 536870912.0, 1.0) / (tokens * unit)), 0.0)
    high = tl.full((), 0.0, tl.float32)
    z, weight, rest = _group_weights(maxima, sums, 0, groups, largest, scale, unit)
    for _step in range(7):
        middle = 0.5 * (low + high)
        most = tl.minimum(tl.exp2(middle) * 63.0 * unit, 1073741824.0).to(tl.int32) + 1
        if groups <= 2048:
            outside = _outside(z, weight, rest, middle, most, mean)
        else:
            outside = _outside_of_many(
                maxima, sums, groups, largest, scale, unit, middle, most, mean
            )
        fits = outside <= budget
        low = tl.where(fits, middle, low)
        high = tl.where(fits, high, middle)
    return low


@triton.jit
def _list_groups(maxima, super_maxima, super_list, group_list, supers, bound, STRICT: tl.constexpr):
    """List the groups whose maximum is >= bound (> bound where STRICT), ascending; their number."""
    listed = 0
    for first in range(0, supers, 256):
        i = first + tl.arange(0, 256)
        maximum = _floats(super_maxima, i, i < supers)
        flagged = (maximum > bound if STRICT else maximum >= bound) & (i < supers)
        position = listed + tl.cumsum(flagged.to(tl.int32), 0) - 1
        tl.store(super_list + position, i, mask=flagged)
        listed += tl.sum(flagged.to(tl.int32))
    tl.debug_barrier()
    count = 0
    for first in range(0, listed, 32):
        i = first + (tl.arange(0, 256) >> 3)
        super_ = tl.load(super_list + i, mask=i < listed, other=0)
        g = super_ * 8 + (tl.arange(0, 256) & 7)
        maximum = _floats(maxima, g, i < listed)
        flagged = (maximum > bound if STRICT else maximum >= bound) & (i < listed)
        position = count + tl.cumsum(flagged.to(tl.int32), 0) - 1
        tl.store(group_list + position, g, mask=flagged)
        count += tl.sum(flagged.to(tl.int32))
    tl.debug_barrier()
    return count


@triton.jit
def _group_tokens(group_list, first, count, vocab, BATCH: tl.constexpr):
    """Of listed groups: their first ids [BATCH], all ids [BATCH, 64], and which are tokens."""
    i = first + tl.arange(0, BATCH)
    group_ids = tl.load(group_list + i, mask=i < count, other=0) * 64
    ids = group_ids[:, None] + tl.arange(0, GROUP)[None, :]
    return group_ids, ids, (i < count)[:, None] & (ids < vocab)


@triton.jit
def _inside_group(
    row, group, maximum, scale, share, vocab, num_bias, num_bans, PLAIN: tl.constexpr
):
    """The token at `share` (float64 in [0, 1)) of a group's mass."""
    ids = group * 64 + tl.arange(0, GROUP)
    inside = ids < vocab
    y = _sanitised(row[0], ids, inside)
    if not PLAIN:
        y = _processed(y, ids, inside, row, num_bias, num_bans)
    z = tl.where(y > NEG_INF, (y.to(tl.float64) - maximum.to(tl.float64)) * scale, 0.0)
    q = tl.where(y > NEG_INF, _masses(_exp2(z)), 0)
    total = tl.sum(q)
    position = tl.minimum((share * total.to(tl.float64)).to(tl.int64), total - 1)
    return group * 64 + tl.sum((tl.cumsum(q, 0) <= position).to(tl.int32))


@triton.jit(noinline=True)
def _inside_checked_group(row, group, maximum, scale, share, vocab, num_bias, num_bans):
    return _inside_group(row, group, maximum, scale, share, vocab, num_bias, num_bans, False)


@triton.jit
def _draw_from_groups(
    row, maxima, sums, super_masses, supers, largest, scale, narrow_scale, total, word, vocab,
    num_bias, num_bans, plain,
):  # fmt: skip
    """A token drawn from all: its super and group by their masses, then inside the group."""
    position = _mulhi(word, total)
    before = tl.full((), 0, tl.int64)
    passed = tl.full((), 0, tl.int64)
    super_ = 0
    for first in range(0, supers, 256):
        i = first + tl.arange(0, 256)
        low = tl.load(super_masses + 2 * i, mask=i < supers, other=0).to(tl.int64) & 0xFFFFFFFF
        high = tl.load(super_masses + 2 * i + 1, mask=i < supers, other=0).to(tl.int64)
        mass = (high << 32) | low
        over = (i < supers) & ((passed + tl.cumsum(mass, 0)) <= position)
        super_ += tl.sum(over.to(tl.int32))
        before += tl.sum(tl.where(over, mass, 0))
        passed += tl.sum(mass)
    super_ = tl.minimum(super_, supers - 1)
    g = super_ * 8 + tl.arange(0, 8)
    inside = g >= 0
    mass = _group_masses(
        _floats(maxima, g, inside), _floats(sums, g, inside), largest, narrow_scale
    )
    over = (before + tl.cumsum(mass, 0)) <= position
    before += tl.sum(tl.where(over, mass, 0))
    group = super_ * 8 + tl.minimum(tl.sum(over.to(tl.int32)), 7)
    maximum = _f32(maxima + group)
    of_group = _group_masses(maximum, _f32(sums + group), largest, narrow_scale)
    share = _share(word, total, before, of_group)
    if plain:
        token = _inside_group(row, group, maximum, scale, share, vocab, 0, 0, True)
    else:
        token = _inside_checked_group(row, group, maximum, scale, share, vocab, num_bias, num_bans)
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
def _first_maximum(row, maxima, super_maxima, supers, largest, vocab, num_bias, num_bans, plain):
    """The lowest id among the largest y."""
    nearest = tl.full([256], 0x7FFFFFFF, tl.int32)
    for first in range(0, supers, 256):
        i = first + tl.arange(0, 256)
        maximum = _floats(super_maxima, i, i < supers)
        nearest = tl.minimum(nearest, tl.where(maximum == largest, i, 0x7FFFFFFF))
    g = tl.min(nearest) * 8 + tl.arange(0, 8)
    group = tl.min(tl.where(_floats(maxima, g, g >= 0) == largest, g, 0x7FFFFFFF))
    if plain:
        token = _first_in_group(row, group, largest, vocab, 0, 0, True)
    else:
        token = _first_in_checked_group(row, group, largest, vocab, num_bias, num_bans)
    return token
