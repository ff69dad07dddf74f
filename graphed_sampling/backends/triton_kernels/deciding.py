"""What is found out of a row before somebody else draws its token, and how that is to be drawn."""

from __future__ import annotations

import triton
import triton.language as tl

from graphed_sampling.backends.triton_kernels.constants import (
    D_BANS,
    D_FALLBACK,
    D_FLAGS,
    D_HIGHEST,
    D_LARGEST,
    D_LOWEST,
    D_LOWEST_ID,
    D_NUM_KEPT,
    D_RAW_TOTAL,
    D_SPECIAL,
    D_TOKEN,
    D_TOTAL,
    D_WRITTEN,
    DECISION_WORDS,
    F_GREEDY,
    HOTTEST,
    LEAST_SPREAD,
    NORMAL,
    P_SCALE,
    P_SEED,
    P_TEMPERATURE,
    S_POSITION,
    SLAB_SIZE,
)
from graphed_sampling.backends.triton_kernels.numbers import (
    _f32,
    _i64,
    _store_f32,
    _store_i64,
)


@triton.jit
def _draws(kinds, rows):
    """Where the inputs of the draw stand, behind the lists behind `kinds`: int64 seeds and offsets,
    int32 top_k, fp32 temperatures, int32 tokens and a byte whether each is valid."""
    base = kinds + ((3 * rows + 3) & -4)
    return base, base + 2 * rows, base + 4 * rows, base + 5 * rows, base + 6 * rows


@triton.jit
def _decision(kinds, rows, index):
    """The row's decision, and its top_k of the draw."""
    base, _, top_k, _, _ = _draws(kinds, rows)
    return base + 8 * rows + index * DECISION_WORDS, top_k + index


@triton.jit
def _slab(kinds, rows, index):
    """The row's slab, best tokens that somebody else found, in any order: int32 how many are asked
    for, how many there are, their fp32 probabilities and int32 ids."""
    sizes = kinds + ((3 * rows + 3) & -4)
    values = sizes + ((2 * rows + 3) & -4)
    first = index * SLAB_SIZE
    return sizes + index, sizes + rows + index, values + first, values + rows * SLAB_SIZE + first


@triton.jit
def _set_draw(kinds, rows, index, params, state, idle, offset_step, vocab):
    """All of the draw's inputs that do not depend on the logits.

    offset_step: how many random numbers lie between a position's first and the next one's.
    """
    seeds, offsets, _, temperatures, _ = _draws(kinds, rows)
    _store_i64(seeds + 2 * index, _i64(params + P_SEED))
    _store_i64(offsets + 2 * index, _i64(state + S_POSITION) * offset_step)
    _store_f32(temperatures + index, _f32(params + P_TEMPERATURE))
    if idle:
        decision, top_k = _decision(kinds, rows, index)
        tl.store(top_k, vocab)
        tl.store(decision + D_WRITTEN, 1)


@triton.jit
def _decide(
    place, row, params, flags, row_flags, token, highest, lowest, lowest_id, total, num_kept,
    special, fallback, largest, raw_total, vocab, num_bias, num_bans,
):  # fmt: skip
    """Note all that is known of a row; place: `_decision`.

    Softmax and filter of the draw see the model's logits. Where that is not what is to be drawn
    from, or fp32 does not tell probabilities apart any more, `probabilities` writes the row.
    """
    decision, top_k = place
    greedy = (flags & F_GREEDY) != 0
    temperature = _f32(params + P_TEMPERATURE)
    as_given = (row[7] == 0) & (num_bias + num_bans == 0) & (special == NORMAL) & (row_flags == 0)
    in_range = (temperature <= HOTTEST) & (tl.abs(largest) < temperature * 1e30)
    # Logits that are next to each other may have equal probabilities, which matters where a filter
    # comes between them. Survivors that are all but equal lie so.
    scale = _f32(params + P_SCALE)
    apart = (num_kept <= 1) | ((largest - lowest) * scale > LEAST_SPREAD)
    written = (as_given & in_range & apart & (highest == largest)) == 0
    tl.store(top_k, tl.where(written | greedy | (num_kept == 0), vocab, num_kept))
    tl.store(decision + D_TOKEN, tl.where(greedy | (num_kept == 1), token, -1))
    tl.store(decision + D_FLAGS, row_flags)
    _store_f32(decision + D_HIGHEST, highest)
    _store_f32(decision + D_LOWEST, lowest)
    tl.store(decision + D_LOWEST_ID, lowest_id)
    tl.store(decision + D_NUM_KEPT, num_kept)
    _store_i64(decision + D_TOTAL, total)
    _store_i64(decision + D_RAW_TOTAL, raw_total)
    tl.store(decision + D_SPECIAL, special)
    tl.store(decision + D_FALLBACK, fallback)
    _store_f32(decision + D_LARGEST, largest)
    tl.store(decision + D_BANS, num_bans)
    tl.store(decision + D_WRITTEN, written.to(tl.int32))
