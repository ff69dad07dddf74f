"""One number of what a step is about to do, by which ranks tell whether they do the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graphed_sampling.layout import HEADER_WORDS, State
from graphed_sampling.table import RequestTable

MARK_WORDS = 4
"""int32 words in front of what a rank sends, with a fingerprint in the first two: a multiple of 16
bytes, so that what follows is aligned."""
_STATE_WORDS = int(State.RECENT)
_COLUMNS = 1 + HEADER_WORDS // 2 + _STATE_WORDS // 2


class Fingerprint:
    """Of the slots of a step, their parameters' headers and their state; all ranks hash alike.

    rows: of the largest step. ranks: those whose fingerprints will be compared with this rank's.
    Lists (biases, stop ids, masks) are not looked at. Nothing waits for the device.
    """

    def __init__(self, table: RequestTable, rows: int, ranks: Sequence[int]) -> None:
        self._max_requests = table.max_requests
        self._ranks = tuple(ranks)
        self._headers = table.params[:, :HEADER_WORDS].view(torch.int64)
        self._states = table.state[:, :_STATE_WORDS].view(torch.int64)
        generator = torch.Generator().manual_seed(0)

        def odd(count: int) -> Tensor:
            numbers = torch.randint(-(2**62), 2**62, (count,), generator=generator, device="cpu")
            return (2 * numbers + 1).to(table.device)

        with torch.inference_mode(False):
            self._column_weights, self._row_weights = odd(_COLUMNS), odd(rows)
            bits = torch.arange(len(self._ranks), dtype=torch.int64, device="cpu")
            self._bits = (1 << bits).to(table.device)
            # Which of the ranks have differed, never cleared; and where the host sees it without
            # waiting.
            self._differing = torch.zeros(1, dtype=torch.int64, device=table.device)
            on_gpu = table.device.type == "cuda"
            self._told = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=on_gpu)

    def __call__(self, slots: Tensor, given: Tensor | None = None) -> Tensor:
        """int64 [1], 0 where all rows are padding.

        slots: int32 [n]; given: int32 [2], as `sample_step` takes it.
        """
        outside = (slots < 0) | (slots >= self._max_requests)
        slot = slots.long().masked_fill_(outside, self._max_requests)
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
        return total if given is None else total + given[:1] + 2 * given[1:]

    def compare(self, marks: Tensor, own: Tensor) -> None:
        """Note who differs. marks: int32 [ranks, >= 2], each a fingerprint; own: int64 [1]."""
        theirs = marks[:, :2].contiguous().view(torch.int64)[:, 0]
        differing = ((theirs != own) * self._bits).sum(0, keepdim=True)
        self._differing.bitwise_or_(differing)
        self._told.copy_(self._differing, non_blocking=True)

    def differing_ranks(self) -> list[int]:
        """Ranks that in a step which has ended did something else than this one."""
        bits = int(self._told)
        return [rank for i, rank in enumerate(self._ranks) if bits >> i & 1]
