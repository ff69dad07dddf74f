"""Positions whose logprobs are wanted, and their records as torch operations write them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from graphed_sampling.layout import RowFlags, TableLayout
from graphed_sampling.stateless import Filters


@dataclass(frozen=True)
class Positions:
    """Which rows are asked about what; all tensors are on the logits' device.

    rows: int64 [m], for each position the row of its logits, negative for none. in_order: whether
    position i, where it has a row, has row i. token_ids: int64 [m]; given_ids: int64 [m, g];
    negative for none. filters: where any row is processed. processed: bool [m], which rows are,
    None for all of them where there are filters.
    """

    rows: Tensor
    in_order: bool
    token_ids: Tensor
    given_ids: Tensor
    filters: Filters | None
    processed: Tensor | None

    def chunk(self, part: slice) -> Positions:
        filters = self.filters and Filters(*(f[part] for f in self.filters))
        return Positions(
            rows=self.rows[part],
            in_order=self.in_order,
            token_ids=self.token_ids[part],
            given_ids=self.given_ids[part],
            filters=filters,
            processed=None if self.processed is None else self.processed[part],
        )

    def logits(self, logits: Tensor, part: slice) -> Tensor:
        """[c, width]: of a chunk, the part of all positions, its logits; any rows where none is."""
        if self.in_order:
            return logits[part]
        if logits.shape[0] == 0:
            return logits.new_zeros(self.rows.shape[0], logits.shape[1])
        return logits.index_select(0, self.rows.clamp(min=0))


@dataclass(frozen=True)
class Upstream:
    """Gradients that reach the selected logprobs and the entropies of m positions.

    ids: int64 [m, k], tokens whose logprobs have gradients, counted from the first of the logits;
    what is none of theirs is another's, or nobody's. gradients: fp32 [m, k], 0 of what is nobody's
    or constant. totals: fp32 [m], their sums. of_entropies: fp32 [m], or None.
    """

    ids: Tensor
    gradients: Tensor
    totals: Tensor
    of_entropies: Tensor | None

    @classmethod
    def of(
        cls, ids: Tensor, logprobs: Tensor, gradients: Tensor, of_entropies: Tensor | None
    ) -> Upstream:
        """Of the gradients of these logprobs; ids: negative for nobody's."""
        constant = (ids < 0) | (logprobs == -math.inf)
        gradients = gradients.float().masked_fill(constant, 0.0)
        return cls(ids, gradients, gradients.sum(1), of_entropies)

    def chunk(self, part: slice) -> Upstream:
        of_entropies = self.of_entropies
        return Upstream(
            self.ids[part],
            self.gradients[part],
            self.totals[part],
            None if of_entropies is None else of_entropies[part],
        )

    def of_tokens_from(self, first: int) -> Upstream:
        """For logits of which the first is that of token `first`."""
        return replace(self, ids=self.ids - first)


@dataclass(frozen=True)
class Forward:
    """What the forward pass told of m positions.

    normalisers: fp32 [m, 2], largest logits and log normalisers. entropies: fp32 [m]. num_kept:
    int32 [m], how many tokens were kept of each row, 0 for all; None where no filter was on.
    """

    normalisers: Tensor
    entropies: Tensor
    num_kept: Tensor | None

    def chunk(self, part: slice) -> Forward:
        kept = self.num_kept
        return Forward(
            self.normalisers[part], self.entropies[part], None if kept is None else kept[part]
        )


@dataclass
class PositionColumns:
    """The fields of `PositionRecord` for c rows [c], in its order; then the lists: top ids int64,
    top logprobs and given logprobs [c, the layout's capacity]."""

    largest: Tensor
    log_normaliser: Tensor
    logprob: Tensor
    rank: Tensor
    num_kept: Tensor
    entropy: Tensor
    flags: Tensor
    top_ids: Tensor
    top_logprobs: Tensor
    given_logprobs: Tensor

    @classmethod
    def nothing(cls, rows: int, layout: TableLayout, device: torch.device) -> PositionColumns:
        """Of rows in which nothing is told."""
        nan = torch.full((rows,), math.nan, dtype=torch.float32, device=device)
        zeros = torch.zeros(rows, dtype=torch.int64, device=device)
        return cls(
            largest=torch.full_like(nan, -math.inf),
            log_normaliser=torch.zeros_like(nan),
            logprob=nan,
            rank=zeros,
            num_kept=zeros,
            entropy=nan,
            flags=zeros + int(RowFlags.PADDING),
            top_ids=(zeros - 1).unsqueeze(1).expand(rows, layout.max_logprobs),
            top_logprobs=nan.unsqueeze(1).expand(rows, layout.max_logprobs),
            given_logprobs=nan.unsqueeze(1).expand(rows, layout.max_logprob_ids),
        )

    def packed(self) -> Tensor:
        """int32 [c, words]: the records, without the words that round their size up."""

        def real(values: Tensor) -> Tensor:
            return values.float().contiguous().view(torch.int32)

        header = [
            real(self.largest),
            real(self.log_normaliser),
            real(self.logprob),
            self.rank,
            self.num_kept,
            real(self.entropy),
            self.flags,
            torch.zeros_like(self.flags),
        ]
        lists = []
        if self.top_ids.shape[1]:  # what is empty has strides that no view takes
            lists += [self.top_ids.contiguous().view(torch.int32), real(self.top_logprobs)]
        if self.given_logprobs.shape[1]:
            lists.append(real(self.given_logprobs))
        return torch.cat([torch.stack([h.to(torch.int32) for h in header], 1), *lists], 1)


def write_positions(
    output: Tensor, layout: TableLayout, chosen: Tensor, columns: PositionColumns
) -> None:
    """Write records: where chosen (bool [c, 1]) the columns, elsewhere that nothing is told."""
    nothing = PositionColumns.nothing(output.shape[0], layout, output.device).packed()
    written = torch.where(chosen, columns.packed(), nothing)
    output[:, : written.shape[1]].copy_(written)


def write_nothing(output: Tensor, layout: TableLayout) -> None:
    """Records that say that nothing is told."""
    nothing = PositionColumns.nothing(output.shape[0], layout, output.device).packed()
    output[:, : nothing.shape[1]].copy_(nothing)
