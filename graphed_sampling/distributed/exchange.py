"""Transport "exchange": the ranks share the rows out, by collectives of any backend.

    logits [n, V_r]  --all-to-all-->  [n / ranks, V]  --a step of these rows-->  records
    records  --all-gather-->  all records  --apply_records-->  the other rows' slots

Every logit crosses the wire once. A row is stepped by one rank, with the backend of a single
device, so that its token is that device's, bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphed_sampling.distributed.collectives import Collectives
from graphed_sampling.distributed.shards import VocabRanges
from graphed_sampling.sampler import TableStep, new_output
from graphed_sampling.table import RequestTable


class ExchangeStep:
    """`TableStep` for logits that are sharded.

    rows: of the largest step, a multiple of the number of ranks, as all steps are. widths: of the
    ranks' logits.
    """

    def __init__(
        self,
        owner: object,
        table: RequestTable,
        backend: str,
        logits_dtype: torch.dtype,
        vocab_ranges: VocabRanges,
        widths: list[int],
        collectives: Collectives,
        rows: int,
    ) -> None:
        self.table = table
        self._collectives = collectives
        self._ranges, self._widths = vocab_ranges, widths
        size, rank = collectives.size, collectives.rank
        self._own_rows = rows // size
        self._inner = TableStep(owner, table, backend, self._own_rows, (logits_dtype,))
        self.backend = self._inner.backend
        self.takes_words = self._inner.takes_words
        self.output = new_output(table, rows)
        self._layout = table.layout.to_ints()
        self._rank = rank
        # Equal shards lie in the full rows as they lie in the ranks, padding at the end.
        width = widths[0]
        self._even = all(w == width for w in widths) and all(
            start == min(i * width, table.vocab_size) for i, (start, _) in enumerate(vocab_ranges)
        )
        full_width = size * width if self._even else table.vocab_size
        with torch.inference_mode(False), torch.device(table.device):
            self._received = torch.zeros(self._own_rows * sum(widths), dtype=logits_dtype)
            self._full = torch.zeros(self._own_rows, full_width, dtype=logits_dtype)
            self._others = torch.full((rows,), -1, dtype=torch.int32)

    def check_words(self, words: Tensor | None) -> None:
        self._inner.check_words(words)

    def __call__(
        self,
        logits: Tensor,
        slots: Tensor,
        grammar_bitmask: Tensor | None,
        words: Tensor | None,
        given: Tensor | None = None,
        group_stats: Tensor | None = None,
    ) -> None:
        """logits: contiguous [rows, width of this rank]."""
        if group_stats is not None:
            raise ValueError("group_stats are of whole rows: there are none of shards")
        rows = slots.shape[0]
        count = rows // self._collectives.size
        own = slice(self._rank * count, (self._rank + 1) * count)
        self._inner(
            self._exchange_logits(logits, count),
            slots[own],
            None if grammar_bitmask is None else grammar_bitmask[own],
            None if words is None else words[own],
            given,
        )
        records = self.output.record[:rows]
        self._collectives.all_gather(records.view(-1), self._inner.output.record[:count].view(-1))
        others = self._others[:rows]
        others.copy_(slots)
        others[own].fill_(-1)
        torch.ops.graphed_sampling.apply_records(
            records, others, self.table.state, self.table.tables, self._layout
        )

    def _exchange_logits(self, logits: Tensor, count: int) -> Tensor:
        """[count, >= vocab_size]: the full rows that this rank steps."""
        size = self._collectives.size
        received = self._received[: count * sum(self._widths)]
        sizes = [count * width for width in self._widths]
        own_size = count * logits.shape[1]
        self._collectives.all_to_all(received, logits.flatten(), sizes, [own_size] * size)
        full = self._full[:count]
        if self._even:
            by_rank = received.view(size, count, -1)
            full.view(count, size, -1).copy_(by_rank.transpose(0, 1))
            return full
        begin = 0
        for (start, end), width in zip(self._ranges, self._widths, strict=True):
            part = received[begin : begin + count * width].view(count, width)
            full[:, start:end].copy_(part[:, : end - start])
            begin += count * width
        return full
