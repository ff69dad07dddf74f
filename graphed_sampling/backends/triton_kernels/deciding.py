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
    D_TOTAL,
    DECISION_WORDS,
    P_SEED,
    S_POSITION,
    SLAB_SIZE,
)
from graphed_sampling.backends.triton_kernels.numbers import (
    _i64,
    _store_f32,
    _store_i64,
)


@triton.jit
def _draws(kinds, rows):
    """Where what the two draws take and give stands, behind the lists behind `kinds`: int64 seeds,
    offsets of the draw of a group and of that of a token in it, int32 groups and tokens; then a
    byte whether each is valid."""
    base = kinds + ((3 * rows + 3) & -4)
    return base, base + 2 * rows, base + 4 * rows, base + 6 * rows, base + 7 * rows


@triton.jit
def _decision(kinds, rows, index):
    """The row's decision."""
    seeds, _, _, _, _ = _draws(kinds, rows)
    return seeds + 9 * rows + index * DECISION_WORDS


@triton.jit
def _slab(kinds, rows, index):
    """The row's slab, best tokens that somebody else found, in any order: int32 how many are asked
    for, how many there are, their fp32 probabilities and int32 ids."""
    sizes = kinds + ((3 * rows + 3) & -4)
    values = sizes + ((2 * rows + 3) & -4)
    first = index * SLAB_SIZE
    return sizes + index, sizes + rows + index, values + first, values + rows * SLAB_SIZE + first


@triton.jit
def _set_draw(kinds, rows, index, params, state, offset_step):
    """The draws' seed and offsets, which do not depend on the logits.

    offset_step: how many random numbers lie between a position's first and the next one's.
    """
    seeds, group_offsets, token_offsets, _, _ = _draws(kinds, rows)
    offset = _i64(state + S_POSITION) * offset_step
    _store_i64(seeds + 2 * index, _i64(params + P_SEED))
    _store_i64(group_offsets + 2 * index, offset)
    _store_i64(token_offsets + 2 * index, offset + 1)


@triton.jit
def _decide(
    decision, row_flags, highest, lowest, lowest_id, total, num_kept, special, fallback, largest,
    raw_total, num_bans,
):  # fmt: skip
    """Note all that is known of a row."""
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
