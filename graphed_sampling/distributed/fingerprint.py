"""One number of what a step is about to do, by which ranks tell whether they do the same."""

from __future__ import annotations

import torch
from torch import Tensor

from graphed_sampling.layout import HEADER_WORDS, State
from graphed_sampling.table import RequestTable

_STATE_WORDS = State.RECENT
_COLUMNS = 1 + HEADER_WORDS // 2 + _STATE_WORDS // 2


class Fingerprint:
    """Of the slots of a step, their parameters' headers and their state; all ranks hash alike.

    Lists (biases, stop ids, masks) are not looked at. Nothing waits for the device.
    """

    def __init__(self, table: RequestTable, rows: int) -> None:
        self._table = table
        generator = torch.Generator().manual_seed(0)

        def odd(count: int) -> Tensor:
            numbers = torch.randint(-(2**62), 2**62, (count,), generator=generator, device="cpu")
            return (2 * numbers + 1).to(table.device)

        self._column_weights, self._row_weights = odd(_COLUMNS), odd(rows)
        table_rows = table.layout.rows
        self._headers = table.params[:, :HEADER_WORDS].view(torch.int64)
        self._states = table.state[:, :_STATE_WORDS].view(torch.int64)
        assert self._headers.shape[0] == table_rows

    def __call__(self, slots: Tensor, given: Tensor) -> Tensor:
        """int64 [1]. slots: int32 [n]; given: int32 [2], as `sample_step` takes it."""
        layout = self._table.layout
        outside = (slots < 0) | (slots >= layout.max_requests)
        slot = slots.long().masked_fill_(outside, layout.max_requests)
        words = torch.cat(
            [
                slot.unsqueeze(1),
                self._headers.index_select(0, slot),
                self._states.index_select(0, slot),
            ],
            1,
        )
        # Padding rows of different tables hold different leavings.
        hashed = words.mul_(self._column_weights).sum(1).masked_fill_(outside, 0)
        hashed = hashed ^ (hashed >> 29)
        total = hashed.mul_(self._row_weights[: slots.shape[0]]).sum(0, keepdim=True)
        return total + given.sum(0, dtype=torch.int64) + given[:1]
