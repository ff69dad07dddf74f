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
    D_TOTAL,
    F_ADMITTED,
    GROUP,
    GROUPS_OF_TILE,
    NEG_INF,
    NORMAL,
    ONE,
    P_FLAGS,
    P_NUM_BIAS,
    P_SCALE,
    P_TOP_K,
    S_FINISH_REASON,
    SLAB_SIZE,
    SUMS,
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
    _tree_sum,
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


@triton.jit
def _survivors(row, decision, ids, inside):
    """y of a row's tokens, and which of them are to be drawn from."""
    params = row[1]
    y = _sanitised(row[0], ids, inside)
    num_bias = tl.load(params + P_NUM_BIAS)
    num_bans = tl.load(decision + D_BANS)
    if (row[7] != 0) | (num_bias + num_bans > 0):
        y = _processed(y, ids, inside, row, num_bias, num_bans)
    y = _special(y, ids, tl.load(decision + D_SPECIAL), tl.load(decision + D_FALLBACK))
    lowest, lowest_id = _f32(decision + D_LOWEST), tl.load(decision + D_LOWEST_ID)
    return y, _survives(y, ids, _f32(decision + D_HIGHEST), lowest, lowest_id)


@triton.jit(
    do_not_specialize=(*INTEGERS, "max_requests", "rows"), do_not_specialize_on_alignment=POINTERS
)
def group_probabilities(
    logits, stride, slots, all_params, state, tables, bitmask, bitmask_stride, words, given, output,
    scratch, scratch_32, mode, vocab_units, groups_64, params_words, state_words, output_words,
    bias_ids, bias_values, stop_ids, given_ids, max_logprobs, max_logprob_ids, recent_tokens,
    bans_at, plan_at, candidates_at, bins_at, prompt_bits, output_bits, counts_at, penalties,
    max_requests, probabilities, rows, SUPER: tl.constexpr, UNIT: tl.constexpr, PDL: tl.constexpr,
    LAW: tl.constexpr,
):  # fmt: skip
    """The probabilities of a tile's groups, of their survivors alone. Grid: rows, tiles.

    probabilities: fp32 [rows, groups]. Rows in which nothing is drawn are all in group 0.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    groups = groups_64 * 64
    scratch_words = scratch_32 * 32
    vocab = vocab_units * UNIT
    index = tl.program_id(0).to(tl.int64)
    kinds = scratch + (tl.full((), 0, tl.int64) + rows) * scratch_words
    group = tl.program_id(1) * GROUPS_OF_TILE + tl.arange(0, GROUPS_OF_TILE)
    row_scratch = scratch + index * scratch_words
    # Loaded before it is known whether the row has any of it: all that can comes at the same time.
    decision = _decision(kinds, rows, index)
    maximum = _f32(row_scratch + group)
    highest = _f32(decision + D_HIGHEST)
    lowest = _f32(decision + D_LOWEST)
    num_kept = tl.load(decision + D_NUM_KEPT)
    normal = tl.load(decision + D_SPECIAL) == NORMAL
    total = _i64(decision + D_TOTAL)
    slot = tl.load(slots + index).to(tl.int64)
    slot = tl.where((slot >= 0) & (slot < max_requests), slot, max_requests)
    params = all_params + slot * params_words
    flags = tl.load(params + P_FLAGS)
    scale = _f32(params + P_SCALE)
    finished = tl.load(state + slot * state_words + S_FINISH_REASON) != 0
    p = tl.where(group == 0, 1.0, 0.0)
    if ((flags & F_ADMITTED) != 0) & (finished == 0):
        each = (ONE / total.to(tl.float64)).to(tl.float32)
        p = tl.zeros([GROUPS_OF_TILE], tl.float32)
        if normal & (num_kept == 0):
            # No filter: these are the weights that `stream` has added up.
            sums = _f32(row_scratch + groups * SUMS + group)
            sums *= tl.exp2(_z(maximum, highest, scale))
            p = tl.where(maximum > NEG_INF, sums * each, 0.0)
        elif (normal == 0) | (tl.max(maximum) >= lowest):
            logits_row = logits + index * stride * UNIT
            if UNIT > 1:
                logits_row = tl.multiple_of(logits_row, 16)
            row = _row(
                logits_row, params, slot, index, tables, bitmask, bitmask_stride, given,
                row_scratch, mode, flags, vocab, bias_ids, bias_values, bans_at, prompt_bits,
                output_bits, counts_at,
            )  # fmt: skip
            ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
            y, kept = _survivors(row, decision, ids, ids < vocab)
            weights = tl.where(kept, tl.exp2(_z(y, highest, scale)), 0.0)
            p = _tree_sum(tl.reshape(weights, [GROUPS_OF_TILE, GROUP])) * each
    tl.store(probabilities + index * groups + group, p)


@triton.jit(do_not_specialize=(*INTEGERS, "max_requests"), do_not_specialize_on_alignment=POINTERS)
def token_probabilities(
    logits, stride, slots, all_params, state, tables, bitmask, bitmask_stride, words, given, output,
    scratch, scratch_32, mode, vocab_units, groups_64, params_words, state_words, output_words,
    bias_ids, bias_values, stop_ids, given_ids, max_logprobs, max_logprob_ids, recent_tokens,
    bans_at, plan_at, candidates_at, bins_at, prompt_bits, output_bits, counts_at, penalties,
    max_requests, probabilities, SUPER: tl.constexpr, UNIT: tl.constexpr, PDL: tl.constexpr,
    LAW: tl.constexpr,
):  # fmt: skip
    """The probabilities of the tokens of the group that was drawn. One row a program.

    probabilities: fp32 [rows, 64]. Rows in which nothing is drawn are all on the first token.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    scratch_words = scratch_32 * 32
    vocab = vocab_units * UNIT
    index = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0)
    kinds = scratch + rows.to(tl.int64) * scratch_words
    slot = tl.load(slots + index).to(tl.int64)
    slot = tl.where((slot >= 0) & (slot < max_requests), slot, max_requests)
    params = all_params + slot * params_words
    flags = tl.load(params + P_FLAGS)
    finished = tl.load(state + slot * state_words + S_FINISH_REASON) != 0
    place = tl.arange(0, GROUP)
    p = tl.where(place == 0, 1.0, 0.0)
    if ((flags & F_ADMITTED) != 0) & (finished == 0):
        row_scratch = scratch + index * scratch_words
        logits_row = logits + index * stride * UNIT
        if UNIT > 1:
            logits_row = tl.multiple_of(logits_row, 16)
        row = _row(
            logits_row, params, slot, index, tables, bitmask, bitmask_stride, given, row_scratch,
            mode, flags, vocab, bias_ids, bias_values, bans_at, prompt_bits, output_bits, counts_at,
        )  # fmt: skip
        _, _, _, drawn, _ = _draws(kinds, rows)
        group = tl.maximum(tl.minimum(tl.load(drawn + index), groups_64 * 64 - 1), 0)
        ids = group * GROUP + place
        y, kept = _survivors(row, _decision(kinds, rows, index), ids, ids < vocab)
        # Relative to the group's own largest: a group may be drawn whose tokens are all unlikely.
        highest = tl.max(tl.where(kept, y, NEG_INF))
        weights = tl.where(kept, tl.exp2(_z(y, highest, _f32(params + P_SCALE))), 0.0)
        p = weights / tl.sum(_tree_sum(tl.reshape(weights, [1, GROUP])))
    tl.store(probabilities + index * GROUP + place, p)


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
        decision = _decision(kinds, rows, index)
        _, _, _, drawn, tokens = _draws(kinds, rows)
        token = tl.load(drawn + index) * GROUP + tl.load(tokens + index)
        # The state is written at the token: were one drawn that does not exist, outside the table.
        token = tl.maximum(tl.minimum(token, vocab - 1), 0)
        num_bias = tl.load(params + P_NUM_BIAS)
        num_bans = tl.load(decision + D_BANS)
        special = tl.load(decision + D_SPECIAL)
        fallback = tl.load(decision + D_FALLBACK)
        highest = _f32(decision + D_HIGHEST)
        lowest = _f32(decision + D_LOWEST)
        lowest_id = tl.load(decision + D_LOWEST_ID)
        split, both = _split(flags, params, row, num_bias + num_bans, LAW)
        _report(
            row, output + index * output_words, params, row_state, row_scratch, flags,
            tl.load(decision + D_FLAGS), token, highest, lowest, lowest_id,
            _i64(decision + D_TOTAL), tl.load(decision + D_NUM_KEPT), special, fallback,
            _f32(decision + D_LARGEST), _i64(decision + D_RAW_TOTAL), groups, vocab, num_bias,
            num_bans, split, both, candidates_at, stop_ids, given_ids, max_logprobs,
            max_logprob_ids, recent_tokens, penalties, SUPER,
        )  # fmt: skip
