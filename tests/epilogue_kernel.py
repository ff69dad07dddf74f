"""A kernel that stores the statistics of the tiles that it copies."""

from __future__ import annotations

import triton
import triton.language as tl

from graphed_sampling.epilogue import store_group_stats


@triton.jit
def copy_with_stats(
    logits, copy, stats, num_rows, width, vocab_size, ROWS: tl.constexpr, TOKENS: tl.constexpr
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first_token = tl.program_id(1) * TOKENS
    tokens = first_token + tl.arange(0, TOKENS)
    places = rows[:, None] * width + tokens[None, :]
    inside = (rows < num_rows)[:, None] & (tokens < width)[None, :]
    tile = tl.load(logits + places, mask=inside, other=0.0)
    tl.store(copy + places, tile, mask=inside)
    store_group_stats(tile, stats, rows, first_token, num_rows, vocab_size)
