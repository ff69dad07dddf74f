"""Gradients of logprobs and entropies with respect to the logits."""

from __future__ import annotations

import triton
import triton.language as tl

from graphed_sampling.backends.triton_kernels.constants import INF, NEG_INF, TILE
from graphed_sampling.backends.triton_kernels.streaming import _tile


@triton.jit(
    do_not_specialize=("stride", "result_stride", "vocab_units", "num_ids"),
    do_not_specialize_on_alignment=(
        "logits", "result", "rows", "ids", "gradients", "totals", "normalisers", "entropies",
        "of_entropies", "scales",
    ),
)  # fmt: skip
def differentiate(
    logits, stride, result, result_stride, rows, ids, gradients, num_ids, totals, normalisers,
    entropies, of_entropies, scales, vocab_units, ENTROPY: tl.constexpr, SCALED: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """A tile of a position's gradient, which may take the logits' place. Grid: positions, tiles.

    ids, gradients: [m, num_ids], tokens whose logprobs have gradients; others' ids lie elsewhere.
    totals: fp32 [m], their sums. of_entropies: fp32 [m], gradients of the entropies. scales:
    fp32 [m], 1 / T. Read with ENTROPY and SCALED alone.
    """
    index = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * TILE
    vocab = vocab_units * UNIT
    offsets = first + tl.arange(0, TILE)
    row = result + index * result_stride * UNIT
    logits_row = logits + index * stride * UNIT
    if UNIT > 1:
        row = tl.multiple_of(row, 16)
        logits_row = tl.multiple_of(logits_row, 16)
    largest = tl.load(normalisers + 2 * index)
    there = (tl.load(rows + index) >= 0) & (largest > NEG_INF) & (largest < INF)
    gradient = tl.zeros([TILE], tl.float32)
    if there:
        x = _tile(logits_row, first, vocab).to(tl.float32)
        log_p = x - largest
        scale = tl.full((), 1.0, tl.float32)
        if SCALED:
            scale = tl.load(scales + index)
            log_p = log_p * scale
        log_p = log_p - tl.load(normalisers + 2 * index + 1)
        p = tl.where(x == x, tl.exp(log_p), 0.0)
        slope = tl.zeros([TILE], tl.float32) - tl.load(totals + index)
        if ENTROPY:
            # d H / d z_i = -p_i (ln p_i + H)
            slope = slope - tl.load(of_entropies + index) * (log_p + tl.load(entropies + index))
        gradient = tl.where(p > 0, p * slope, 0.0)
        for k in range(num_ids):
            token = tl.load(ids + index * num_ids + k)
            own = tl.load(gradients + index * num_ids + k)
            gradient += tl.where(offsets == token, own, 0.0)
        gradient = gradient * scale
    tl.store(row + offsets, gradient.to(result.dtype.element_ty), mask=offsets < vocab)
