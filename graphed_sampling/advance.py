"""What a step leaves in a table: state and counts move on by the token that was drawn.

In torch operations for any device, without synchronisation or data-dependent shapes, so that they
can be captured in a CUDA graph. The kernels of `cuda`, `triton` and `cpu` do the same themselves,
and the native library has an `apply_records` of its own (csrc/apply_records.h).
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphed_sampling.layout import FinishReason, Output, State, TableLayout


def advance(
    state: Tensor,
    tables: Tensor,
    layout: TableLayout,
    before: Tensor,
    target: Tensor,
    token: Tensor,
    finish: Tensor,
) -> None:
    """Advance n slots by a token each.

    before: int32 [n, state_words], their state records. target: int64 [n], the table's row to write
    to: the slot, or the padding row where nothing is to happen. token: int64 [n], in [0,
    vocab_size). finish: int32 [n], `FinishReason` after the step.
    """
    column = token.unsqueeze(1)
    long = before.view(torch.int64)
    advanced = [
        (long[:, State.POSITION // 2].unsqueeze(1) + 1).view(torch.int32),
        column.view(torch.int32),
        before[:, State.NUM_GENERATED].unsqueeze(1) + 1,
        finish.unsqueeze(1),
        before[:, State.GENERATION : State.RECENT],
    ]
    if layout.recent_tokens:
        end = State.RECENT + layout.recent_tokens
        advanced += [column.to(torch.int32), before[:, State.RECENT : end - 1]]
    advanced.append(before[:, State.RECENT + layout.recent_tokens :])
    state.index_copy_(0, target, torch.cat(advanced, 1))
    if not layout.penalties:
        return
    word = layout.output_bits + target * layout.bitmap_words + token // 32
    bit = 1 << (token % 32)
    bits = tables.index_select(0, word).long()
    count_at = layout.counts + target * layout.vocab_size + token
    count = tables.index_select(0, count_at).masked_fill_((bits & bit) == 0, 0) + 1
    tables.index_copy_(0, count_at, count)
    tables.index_copy_(0, word, (bits | bit).to(torch.int32))


def apply_records(
    records: Tensor, slots: Tensor, state: Tensor, tables: Tensor, layout: TableLayout
) -> None:
    """Advance a table by the records of a step that another table took: see the op in ops.py."""
    count = slots.shape[0]
    outside = (slots < 0) | (slots >= layout.max_requests)
    slot = slots.long().masked_fill_(outside, layout.max_requests)
    before = state.index_select(0, slot)
    token = records.view(torch.int64)[:count, Output.TOKEN_ID // 2]
    idle = outside | (token < 0) | (token >= layout.vocab_size)
    idle |= records[:count, Output.GENERATION] != before[:, State.GENERATION]
    idle |= before[:, State.FINISH_REASON] != FinishReason.NONE
    target = slot.masked_fill_(idle, layout.max_requests)
    token = token.masked_fill(idle, 0)
    advance(state, tables, layout, before, target, token, records[:count, Output.FINISH_REASON])
