"""All filters and the draw by going over a whole row: slow, for what nothing else can do."""

from __future__ import annotations

import triton
import triton.language as tl

from graphed_sampling.backends.triton_kernels.constants import (
    CHECK_GRAMMAR,
    F_GREEDY,
    FLT_MAX,
    INF,
    JOINT,
    KEEP_TIES,
    NEG_INF,
    NORMAL,
    ONE,
    P_EPSILON,
    P_ETA,
    P_FLAGS,
    P_MIN_P,
    P_MIN_P_OFFSET,
    P_SIGMA,
    P_TOP_K,
    P_TOP_P,
    P_TYPICAL,
    P_WIDE_SCALE,
    ROUND,
    ROW_TILE,
)
from graphed_sampling.backends.triton_kernels.numbers import (
    _exp2,
    _f32,
    _from_key,
    _i64,
    _key,
    _masses,
    _mulhi,
    _round_down,
    _round_up,
    _target,
)
from graphed_sampling.backends.triton_kernels.rows import (
    _bits,
    _processed,
    _sanitised,
    _special,
    _survives,
)


@triton.jit
def _tile_y(row, first, vocab, num_bias, num_bans, special, fallback):
    ids = first + tl.arange(0, ROW_TILE)
    inside = ids < vocab
    y = _processed(_sanitised(row[0], ids, inside), ids, inside, row, num_bias, num_bans)
    return _special(y, ids, special, fallback), ids


@triton.jit(noinline=True)
def _row_sums(
    row, vocab, num_bias, num_bans, special, fallback, highest, lowest, lowest_id, scale, key
):
    """Of the survivors with a key >= key: number, mass, and sum of mass * z; z is from highest."""
    number = 0
    mass = tl.full((), 0, tl.int64)
    moment = tl.full((), 0, tl.int64)
    for first in range(0, vocab, ROW_TILE):
        y, ids = _tile_y(row, first, vocab, num_bias, num_bans, special, fallback)
        kept = _survives(y, ids, highest, lowest, lowest_id) & (_key(y).to(tl.int64) >= key)
        z = tl.where(kept, (y.to(tl.float64) - highest.to(tl.float64)) * scale, 0.0)
        q = tl.where(kept, _masses(_exp2(z)), 0)
        number += tl.sum(kept.to(tl.int32))
        mass += tl.sum(q)
        moment += tl.sum(((q.to(tl.float64) * z + ROUND) - ROUND).to(tl.int64))
    return number, mass, moment


@triton.jit(noinline=True)
def _row_cut(
    row, vocab, num_bias, num_bans, special, fallback, highest, lowest, lowest_id, scale,
    target, by_count, LAW: tl.constexpr,
):  # fmt: skip
    """`_cut` over a row: the new lowest, lowest_id."""
    low = tl.maximum(
        _key(lowest).to(tl.int64), _key(tl.full((), -FLT_MAX, tl.float32)).to(tl.int64)
    )
    high = _key(highest).to(tl.int64) + 1
    while high - low > 1:
        middle = low + (high - low) // 2
        number, mass, _ = _row_sums(
            row, vocab, num_bias, num_bans, special, fallback, highest, lowest, lowest_id,
            scale, middle,
        )  # fmt: skip
        reached = tl.where(by_count, number.to(tl.int64), mass) >= target
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    number, mass, _ = _row_sums(
        row, vocab, num_bias, num_bans, special, fallback, highest, lowest, lowest_id,
        scale, low + 1,
    )  # fmt: skip
    cut = _from_key(low.to(tl.int32))
    z = (cut.to(tl.float64) - highest.to(tl.float64)) * scale
    each = tl.where(by_count, tl.full((), 1, tl.int64), tl.maximum(_masses(_exp2(z)), 1))
    ties = (target - tl.where(by_count, number.to(tl.int64), mass) + each - 1) // each
    if LAW & KEEP_TIES:
        cut_id = vocab
    else:
        seen = tl.full((), 0, tl.int64)
        cut_id = -1
        for first in range(0, vocab, ROW_TILE):
            y, ids = _tile_y(row, first, vocab, num_bias, num_bans, special, fallback)
            tie = _survives(y, ids, highest, lowest, lowest_id) & (y == cut)
            position = seen + tl.cumsum(tie.to(tl.int64), 0)
            cut_id = tl.maximum(cut_id, tl.max(tl.where(tie & (position <= ties), ids, -1)))
            seen += tl.sum(tie.to(tl.int64))
    return cut, cut_id


@triton.jit(noinline=True)
def _sigma_bound(row, vocab, num_bias, num_bans, largest, n):
    """float64: y_max - n standard deviations of the unbanned y."""
    number = 0
    smallest = tl.full((), INF, tl.float32)
    for first in range(0, vocab, ROW_TILE):
        y, _ = _tile_y(row, first, vocab, num_bias, num_bans, NORMAL, 0)
        number += tl.sum((y > NEG_INF).to(tl.int32))
        smallest = tl.minimum(smallest, tl.min(tl.where(y > NEG_INF, y, INF)))
    wide = largest.to(tl.float64)
    spread = tl.maximum(wide - smallest.to(tl.float64), 2.2250738585072014e-308)
    number = number.to(tl.float64) * ONE
    moment = tl.full((), 0, tl.int64)
    for first in range(0, vocab, ROW_TILE):
        y, _ = _tile_y(row, first, vocab, num_bias, num_bans, NORMAL, 0)
        distance = (wide - y.to(tl.float64)) / spread
        moment += tl.sum(_masses(tl.where(y > NEG_INF, distance, 0.0)))
    mean = moment.to(tl.float64) / number
    square = tl.full((), 0, tl.int64)
    for first in range(0, vocab, ROW_TILE):
        y, _ = _tile_y(row, first, vocab, num_bias, num_bans, NORMAL, 0)
        distance = tl.where(y > NEG_INF, (wide - y.to(tl.float64)) / spread, mean) - mean
        square += tl.sum(_masses(distance * distance))
    return wide - n.to(tl.float64) * (tl.sqrt(square.to(tl.float64) / number) * spread)


@triton.jit(noinline=True)
def _row_typical(
    row, vocab, num_bias, num_bans, special, fallback, highest, lowest, lowest_id, scale,
    typical,
):  # fmt: skip
    """`typical_p` over a row: the new highest, lowest, lowest_id."""
    _, total, moment = _row_sums(
        row, vocab, num_bias, num_bans, special, fallback, highest, lowest, lowest_id,
        scale, -0x80000000,
    )  # fmt: skip
    mean = moment.to(tl.float64) / total.to(tl.float64)
    target = _target(typical, total)
    low = tl.full((), -1, tl.int64)
    far = (lowest.to(tl.float64) - highest.to(tl.float64)) * scale
    far = tl.maximum(far, -1e300)
    high = tl.maximum(tl.abs(mean - far), tl.abs(mean)).to(tl.int64, bitcast=True)
    while high - low > 1:
        middle = low + (high - low) // 2
        reach = middle.to(tl.float64, bitcast=True)
        mass = tl.full((), 0, tl.int64)
        for first in range(0, vocab, ROW_TILE):
            y, ids = _tile_y(row, first, vocab, num_bias, num_bans, special, fallback)
            kept = _survives(y, ids, highest, lowest, lowest_id)
            z = tl.where(kept, (y.to(tl.float64) - highest.to(tl.float64)) * scale, 0.0)
            kept = kept & (tl.abs(mean - z) <= reach)
            mass += tl.sum(tl.where(kept, _masses(_exp2(z)), 0))
        reached = mass >= target
        low = tl.where(reached, low, middle)
        high = tl.where(reached, middle, high)
    reach = high.to(tl.float64, bitcast=True)
    new_highest = tl.full((), NEG_INF, tl.float32)
    new_lowest = tl.full((), INF, tl.float32)
    for first in range(0, vocab, ROW_TILE):
        y, ids = _tile_y(row, first, vocab, num_bias, num_bans, special, fallback)
        kept = _survives(y, ids, highest, lowest, lowest_id)
        z = tl.where(kept, (y.to(tl.float64) - highest.to(tl.float64)) * scale, 0.0)
        kept = kept & (tl.abs(mean - z) <= reach)
        new_highest = tl.maximum(new_highest, tl.max(tl.where(kept, y, NEG_INF)))
        new_lowest = tl.minimum(new_lowest, tl.min(tl.where(kept, y, INF)))
    return new_highest, new_lowest, tl.where(new_lowest > lowest, vocab, lowest_id)


@triton.jit(noinline=True)
def _lowest_reaching(
    row, vocab, num_bias, num_bans, special, fallback, highest, lowest, lowest_id, scale,
    bound,
):  # fmt: skip
    """The cut that leaves survivors with a weight >= bound, and the largest: lowest, lowest_id."""
    new_lowest = highest
    for first in range(0, vocab, ROW_TILE):
        y, ids = _tile_y(row, first, vocab, num_bias, num_bans, special, fallback)
        kept = _survives(y, ids, highest, lowest, lowest_id)
        z = tl.where(kept, (y.to(tl.float64) - highest.to(tl.float64)) * scale, 0.0)
        kept = kept & (_exp2(z) >= bound)
        new_lowest = tl.minimum(new_lowest, tl.min(tl.where(kept, y, INF)))
    return new_lowest, tl.where(new_lowest > lowest, vocab, lowest_id)


@triton.jit(noinline=True)
def _draw_from_row(
    row, vocab, num_bias, num_bans, special, fallback, highest, lowest, lowest_id, scale,
    word, total,
):  # fmt: skip
    """The token at which the survivors' masses, ids ascending, exceed the word's position."""
    position = _mulhi(word, total)
    before = tl.full((), 0, tl.int64)
    token = 0
    first = 0
    found = 0
    while (first < vocab) & (found == 0):
        y, ids = _tile_y(row, first, vocab, num_bias, num_bans, special, fallback)
        kept = _survives(y, ids, highest, lowest, lowest_id)
        z = tl.where(kept, (y.to(tl.float64) - highest.to(tl.float64)) * scale, 0.0)
        q = tl.where(kept, _masses(_exp2(z)), 0)
        cumulative = before + tl.cumsum(q, 0)
        token = first + tl.sum((cumulative <= position).to(tl.int32))
        before += tl.sum(q)
        found = (before > position).to(tl.int32)
        first += ROW_TILE
    return token


@triton.jit
def _dense_row(
    row, params, vocab, num_bias, num_bans, special, fallback, largest, word, LAW: tl.constexpr
):
    """All filters over a row, and the draw: (token, highest, lowest, lowest_id, total, num_kept).

    largest: of y, after `_special`.
    """
    flags = tl.load(params + P_FLAGS)
    scale = _i64(params + P_WIDE_SCALE).to(tl.float64, bitcast=True)
    highest = largest
    lowest = tl.full((), NEG_INF, tl.float32)
    lowest_id = vocab
    if (flags & F_GREEDY) != 0:
        lowest, lowest_id = _row_cut(
            row, vocab, num_bias, num_bans, special, fallback, highest, lowest, lowest_id,
            scale, tl.full((), 1, tl.int64), True, 0,
        )  # fmt: skip
    of_all = tl.full((), 0, tl.int64)
    if LAW & JOINT:
        _number_of_all, of_all, _moment_of_all = _row_sums(
            row, vocab, num_bias, num_bans, special, fallback, highest, lowest, lowest_id,
            scale, -0x80000000,
        )  # fmt: skip
    sigma = _f32(params + P_SIGMA)
    if (sigma > 0) & (special == NORMAL):
        bound = _sigma_bound(row, vocab, num_bias, num_bans, largest, sigma)
        lowest = tl.maximum(lowest, tl.minimum(_round_up(bound), largest))
    if _f32(params + P_MIN_P) > 0:
        offset = _i64(params + P_MIN_P_OFFSET).to(tl.float64, bitcast=True)
        lowest = tl.maximum(lowest, _round_down(largest.to(tl.float64) + offset))
    top_k = tl.load(params + P_TOP_K)
    if top_k > 0:
        number, _, _ = _row_sums(
            row, vocab, num_bias, num_bans, special, fallback, highest, lowest, lowest_id,
            scale, -0x80000000,
        )  # fmt: skip
        if number > top_k:
            lowest, lowest_id = _row_cut(
                row, vocab, num_bias, num_bans, special, fallback, highest, lowest,
                lowest_id, scale, top_k.to(tl.int64), True, LAW,
            )  # fmt: skip
    top_p = _f32(params + P_TOP_P)
    if top_p < 1:
        _, total, _ = _row_sums(
            row, vocab, num_bias, num_bans, special, fallback, highest, lowest, lowest_id,
            scale, -0x80000000,
        )  # fmt: skip
        target = _target(top_p, total)
        if LAW & JOINT:
            target = tl.minimum(_target(top_p, of_all), total)
        lowest, lowest_id = _row_cut(
            row, vocab, num_bias, num_bans, special, fallback, highest, lowest, lowest_id,
            scale, target, False, LAW,
        )  # fmt: skip
    typical = _f32(params + P_TYPICAL)
    if typical < 1:
        highest, lowest, lowest_id = _row_typical(
            row, vocab, num_bias, num_bans, special, fallback, highest, lowest, lowest_id,
            scale, typical,
        )  # fmt: skip
    epsilon = _f32(params + P_EPSILON)
    if epsilon > 0:
        _, total, _ = _row_sums(
            row, vocab, num_bias, num_bans, special, fallback, highest, lowest, lowest_id,
            scale, -0x80000000,
        )  # fmt: skip
        lowest, lowest_id = _lowest_reaching(
            row, vocab, num_bias, num_bans, special, fallback, highest, lowest, lowest_id,
            scale, epsilon.to(tl.float64) * (total.to(tl.float64) / ONE),
        )  # fmt: skip
    eta = _f32(params + P_ETA)
    if eta > 0:
        _, total, moment = _row_sums(
            row, vocab, num_bias, num_bans, special, fallback, highest, lowest, lowest_id,
            scale, -0x80000000,
        )  # fmt: skip
        mean = moment.to(tl.float64) / total.to(tl.float64)
        wide = eta.to(tl.float64)
        bound = tl.minimum(wide * (total.to(tl.float64) / ONE), tl.sqrt(wide) * _exp2(mean))
        lowest, lowest_id = _lowest_reaching(
            row, vocab, num_bias, num_bans, special, fallback, highest, lowest, lowest_id,
            scale, bound,
        )  # fmt: skip
    num_kept, total, _ = _row_sums(
        row, vocab, num_bias, num_bans, special, fallback, highest, lowest, lowest_id,
        scale, -0x80000000,
    )  # fmt: skip
    token = _draw_from_row(
        row, vocab, num_bias, num_bans, special, fallback, highest, lowest, lowest_id,
        scale, word, total,
    )  # fmt: skip
    return token, highest, lowest, lowest_id, total, num_kept


@triton.jit(noinline=True)
def _fallback_id(grammar, checks, vocab):
    """The lowest id that the grammar bitmask allows; 0 without one, or if it allows none."""
    lowest = vocab
    if (checks & CHECK_GRAMMAR) != 0:
        for first in range(0, vocab, ROW_TILE):
            ids = first + tl.arange(0, ROW_TILE)
            allowed = _bits(grammar, ids, ids < vocab, None, vocab) != 0
            lowest = tl.minimum(lowest, tl.min(tl.where(allowed, ids, vocab)))
    return tl.where(lowest == vocab, 0, lowest)
