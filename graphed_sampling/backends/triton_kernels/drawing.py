"""What is done around a draw, or a choice of the best, that somebody else makes."""

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
    F_ADMITTED,
    ONE,
    P_FLAGS,
    P_NUM_BIAS,
    P_SCALE,
    P_TOP_K,
    S_FINISH_REASON,
    SLAB_SIZE,
    TILE,
)
from graphed_sampling.backends.triton_kernels.deciding import (
    _decision,
    _draws,
    _slab,
)
from graphed_sampling.backends.triton_kernels.numbers import (
    _f32,
    _i64,
    _z,
)
from graphed_sampling.backends.triton_kernels.report import (
    _processed_token,
    _report,
)
from graphed_sampling.backends.triton_kernels.rows import (
    _processed,
    _row,
    _sanitised,
    _special,
    _split,
    _survives,
)
from graphed_sampling.backends.triton_kernels.streaming import (
    INTEGERS,
    POINTERS,
)


@triton.jit(do_not_specialize=(*INTEGERS, "max_requests"), do_not_specialize_on_alignment=POINTERS)
def ask(
    logits, stride, slots, all_params, state, tables, bitmask, bitmask_stride, words, given, output,
    scratch, scratch_32, mode, vocab_units, groups_64, params_words, state_words, output_words,
    bias_ids, bias_values, stop_ids, given_ids, max_logprobs, max_logprob_ids, recent_tokens,
    bans_at, plan_at, candidates_at, bins_at, prompt_bits, output_bits, counts_at, penalties,
    max_requests, SUPER: tl.constexpr, UNIT: tl.constexpr, PDL: tl.constexpr, LAW: tl.constexpr,
):  # fmt: skip
    """How many tokens each row's slab is to hold: one more than top_k, which tells whether the last
    one stands apart. One row a program."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    index = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0)
    slot = tl.load(slots + index).to(tl.int64)
    slot = tl.where((slot >= 0) & (slot < max_requests), slot, max_requests)
    top_k = tl.load(all_params + slot * params_words + P_TOP_K)
    kinds = scratch + rows.to(tl.int64) * (scratch_32 * 32)
    size, _, _, _ = _slab(kinds, rows, index)
    wanted = tl.where((top_k > 0) & (top_k < SLAB_SIZE), top_k + 1, 1)
    tl.store(size, tl.minimum(wanted, vocab_units * UNIT - 1))  # all of a row it does not list


@triton.jit(
    do_not_specialize=(*INTEGERS, "max_requests", "rows", "every_row"),
    do_not_specialize_on_alignment=POINTERS,
)
def probabilities(
    logits, stride, slots, all_params, state, tables, bitmask, bitmask_stride, words, given, output,
    scratch, scratch_32, mode, vocab_units, groups_64, params_words, state_words, output_words,
    bias_ids, bias_values, stop_ids, given_ids, max_logprobs, max_logprob_ids, recent_tokens,
    bans_at, plan_at, candidates_at, bins_at, prompt_bits, output_bits, counts_at, penalties,
    max_requests, weights, rows, every_row, SUPER: tl.constexpr, UNIT: tl.constexpr,
    PDL: tl.constexpr, LAW: tl.constexpr,
):  # fmt: skip
    """A tile of a row's probabilities, of its survivors alone. Grid: rows, tiles.

    weights: fp32 [rows, vocab]. Rows that a softmax of the logits serves stay as they are, unless
    every_row. Rows in which nothing is drawn are all on token 0.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    index = tl.program_id(0).to(tl.int64)
    kinds = scratch + (tl.full((), 0, tl.int64) + rows) * (scratch_32 * 32)
    decision, _ = _decision(kinds, rows, index)
    vocab = vocab_units * UNIT
    if (every_row != 0) | (tl.load(decision + D_WRITTEN) != 0):
        ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
        inside = ids < vocab
        slot = tl.load(slots + index).to(tl.int64)
        slot = tl.where((slot >= 0) & (slot < max_requests), slot, max_requests)
        params = all_params + slot * params_words
        flags = tl.load(params + P_FLAGS)
        finished = tl.load(state + slot * state_words + S_FINISH_REASON) != 0
        p = tl.where(ids == 0, 1.0, 0.0)
        if ((flags & F_ADMITTED) != 0) & (finished == 0):
            logits_row = logits + index * stride * UNIT
            if UNIT > 1:
                logits_row = tl.multiple_of(logits_row, 16)
            y = _sanitised(logits_row, ids, inside)
            row = _row(
                logits_row, params, slot, index, tables, bitmask, bitmask_stride, given,
                scratch + index * (scratch_32 * 32), mode, flags, vocab, bias_ids, bias_values,
                bans_at, prompt_bits, output_bits, counts_at,
            )  # fmt: skip
            num_bias = tl.load(params + P_NUM_BIAS)
            num_bans = tl.load(decision + D_BANS)
            if (row[7] != 0) | (num_bias + num_bans > 0):
                y = _processed(y, ids, inside, row, num_bias, num_bans)
            y = _special(y, ids, tl.load(decision + D_SPECIAL), tl.load(decision + D_FALLBACK))
            highest = _f32(decision + D_HIGHEST)
            kept = _survives(
                y, ids, highest, _f32(decision + D_LOWEST), tl.load(decision + D_LOWEST_ID)
            )
            each = (ONE / _i64(decision + D_TOTAL).to(tl.float64)).to(tl.float32)
            z = _z(y, highest, _f32(params + P_SCALE))
            p = tl.where(kept, tl.exp2(z) * each, 0.0)
        tl.store(weights + index * vocab + ids, p, mask=inside)


@triton.jit(do_not_specialize=(*INTEGERS, "max_requests"), do_not_specialize_on_alignment=POINTERS)
def conclude(
    logits, stride, slots, all_params, state, tables, bitmask, bitmask_stride, words, given, output,
    scratch, scratch_32, mode, vocab_units, groups_64, params_words, state_words, output_words,
    bias_ids, bias_values, stop_ids, given_ids, max_logprobs, max_logprob_ids, recent_tokens,
    bans_at, plan_at, candidates_at, bins_at, prompt_bits, output_bits, counts_at, penalties,
    max_requests, SUPER: tl.constexpr, UNIT: tl.constexpr, PDL: tl.constexpr, LAW: tl.constexpr,
):  # fmt: skip
    """One row a program: from its token to its report and its next state."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    groups = groups_64 * 64
    scratch_words = scratch_32 * 32
    vocab = vocab_units * UNIT
    index = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0)
    kinds = scratch + rows.to(tl.int64) * scratch_words
    slot = tl.load(slots + index).to(tl.int64)
    slot = tl.where((slot >= 0) & (slot < max_requests), slot, max_requests)
    params = all_params + slot * params_words
    row_state = state + slot * state_words
    flags = tl.load(params + P_FLAGS)
    if ((flags & F_ADMITTED) != 0) & (tl.load(row_state + S_FINISH_REASON) == 0):
        logits_row = logits + index * stride * UNIT
        if UNIT > 1:
            logits_row = tl.multiple_of(logits_row, 16)
        row_scratch = scratch + index * scratch_words
        row = _row(
            logits_row, params, slot, index, tables, bitmask, bitmask_stride, given,
            row_scratch, mode, flags, vocab, bias_ids, bias_values, bans_at, prompt_bits,
            output_bits, counts_at,
        )  # fmt: skip
        decision, _ = _decision(kinds, rows, index)
        _, _, _, _, tokens = _draws(kinds, rows)
        token = tl.load(tokens + index)
        decided = tl.load(decision + D_TOKEN)
        token = tl.where(decided >= 0, decided, token)
        num_bias = tl.load(params + P_NUM_BIAS)
        num_bans = tl.load(decision + D_BANS)
        special = tl.load(decision + D_SPECIAL)
        fallback = tl.load(decision + D_FALLBACK)
        highest = _f32(decision + D_HIGHEST)
        lowest = _f32(decision + D_LOWEST)
        lowest_id = tl.load(decision + D_LOWEST_ID)
        # In fp32 probabilities may be equal where the logits are not: then the draw's filter kept
        # one more than there were to be kept.
        y = _processed_token(row, token, special, fallback, num_bias, num_bans)
        if _survives(y, token, highest, lowest, lowest_id) == 0:
            lowest = tl.minimum(y, lowest)
            lowest_id = vocab
        split, both = _split(flags, params, row, num_bias + num_bans, LAW)
        _report(
            row, output + index * output_words, params, row_state, row_scratch, flags,
            tl.load(decision + D_FLAGS), token, highest, lowest, lowest_id,
            _i64(decision + D_TOTAL), tl.load(decision + D_NUM_KEPT), special, fallback,
            _f32(decision + D_LARGEST), _i64(decision + D_RAW_TOTAL), groups, vocab, num_bias,
            num_bans, split, both, candidates_at, stop_ids, given_ids, max_logprobs,
            max_logprob_ids, recent_tokens, penalties, SUPER,
        )  # fmt: skip
