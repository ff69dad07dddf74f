"""Positions whose logprobs are wanted, and their records as torch operations write them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from graphed_sampling.layout import RowFlags, TableLayout
from graphed_sampling.stateless import Filters


def accepted_ids(ids: Tensor, vocab_size: int) -> Tensor:
    """ids, -1 where there is none: outside of [0, vocab_size)."""
    return ids.masked_fill((ids < 0) | (ids >= vocab_size), -1)


@dataclass(frozen=True)
class Selection:
    """Which rows of a matrix of matrix_rows rows m positions are about, as it was asked for.

    rows: None where position i is about row i; bool [m], it is where that is true, else about none;
    int64 [m], the row of each, none where it is outside of [0, matrix_rows). num_rows: int32 [1],
    so many positions of such a list are about any, None for all.
    """

    matrix_rows: int
    rows: Tensor | None = None
    num_rows: Tensor | None = None

    @property
    def in_order(self) -> bool:
        """Whether position i is about row i or none."""
        return self.rows is None or self.rows.dtype == torch.bool

    @property
    def count(self) -> int:
        """How many positions there are."""
        return self.matrix_rows if self.rows is None else self.rows.shape[0]

    def row_of_each(self, device: torch.device) -> Tensor:
        """int64 [m]: the row of each position, -1 for none."""
        place = torch.arange(self.count, device=device)
        if self.rows is None:
            return place
        if self.rows.dtype == torch.bool:
            return place.masked_fill(~self.rows, -1)
        outside = (self.rows < 0) | (self.rows >= self.matrix_rows)
        if self.num_rows is not None:
            outside |= place >= self.num_rows
        return self.rows.masked_fill(outside, -1)


class AskedFilters(NamedTuple):
    """Of `Filters` those that were asked for, in any range; the others, None, are off."""

    temperature: Tensor | None = None
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None

    @property
    def only_temperature(self) -> bool:
        return self.top_k is None and self.top_p is None and self.min_p is None

    def chunk(self, part: slice) -> AskedFilters:
        return AskedFilters(*(None if f is None else f[part] for f in self))

    def complete(self, like: Tensor, vocab_size: int) -> Filters:
        """All of them, clamped, as many as `like` has."""

        def column(given: Tensor | None, off: float, dtype: torch.dtype) -> Tensor:
            return torch.full_like(like, off, dtype=dtype) if given is None else given

        return Filters(
            column(self.temperature, 1.0, torch.float32),
            column(self.top_k, 0, torch.int32),
            column(self.top_p, 1.0, torch.float32),
            column(self.min_p, 0.0, torch.float32),
        ).clamped(vocab_size)


@dataclass(frozen=True)
class Positions:
    """What is asked about rows of logits, or of what logits come from; all tensors are on its
    device.

    token_ids: int64 [m]; given_ids: int64 [m, g]; none where they are outside of [0, vocab_size).
    asked_filters: where any row is processed. processed: bool [m], which rows are, None for all of
    them where there are filters. A kernel that finds out by itself what is none takes these; it is
    several operations less than `rows`, `filters` and the accepted ids.
    """

    selection: Selection
    token_ids: Tensor
    given_ids: Tensor
    vocab_size: int
    asked_filters: AskedFilters | None = None
    processed: Tensor | None = None

    @property
    def count(self) -> int:
        return self.token_ids.shape[0]

    @property
    def in_order(self) -> bool:
        return self.selection.in_order

    @cached_property
    def rows(self) -> Tensor:
        """int64 [m]: the row of each position, -1 for none."""
        return self.selection.row_of_each(self.token_ids.device)

    @cached_property
    def accepted_token_ids(self) -> Tensor:
        """int64 [m], -1 for none."""
        return accepted_ids(self.token_ids, self.vocab_size)

    @cached_property
    def accepted_given_ids(self) -> Tensor:
        """int64 [m, g], -1 for none."""
        return accepted_ids(self.given_ids, self.vocab_size)

    @cached_property
    def filters(self) -> Filters | None:
        """[m] each, clamped."""
        asked = self.asked_filters
        return None if asked is None else asked.complete(self.token_ids, self.vocab_size)

    def chunk(self, part: slice) -> Positions:
        """Some of the positions: in order, of as many rows; else of any of all rows."""
        selection, filters = self.selection, self.asked_filters
        if not self.in_order:
            selection = Selection(selection.matrix_rows, self.rows[part])
        else:
            mask = None if selection.rows is None else selection.rows[part]
            selection = Selection(self.token_ids[part].shape[0], mask)
        return Positions(
            selection,
            self.token_ids[part],
            self.given_ids[part],
            self.vocab_size,
            asked_filters=None if filters is None else filters.chunk(part),
            processed=None if self.processed is None else self.processed[part],
        )

    def without(self, left_out: Tensor) -> Positions:
        """The same, but positions that are left out, bool [m], are about no row."""
        if self.in_order:
            mask = self.selection.rows
            rows = ~left_out if mask is None else mask & ~left_out
        else:
            rows = self.rows.masked_fill(left_out, -1)
        return replace(self, selection=Selection(self.selection.matrix_rows, rows))

    def logits(self, logits: Tensor, part: slice) -> Tensor:
        """[c, width]: of a chunk, the part of all positions, its logits; any rows where none is."""
        if self.in_order:
            return logits[part]
        if logits.shape[0] == 0:
            return logits.new_zeros(self.count, logits.shape[1])
        return logits.index_select(0, self.rows.clamp(min=0))


def join_gradients(
    of_logprobs: Tensor | None,
    of_given: Tensor | None,
    of_top: Tensor | None,
    logprobs: Tensor,
    num_given: int,
) -> Tensor:
    """[m, k], as logprobs of the next token, of num_given given ones and of the best, side by side:
    what came upstream for each, [m], [m, g] and [m, n]; zeros where nothing did."""
    count, width = logprobs.shape
    parts = (None if of_logprobs is None else of_logprobs.unsqueeze(1), of_given, of_top)
    widths = (1, num_given, width - 1 - num_given)
    return torch.cat(
        [
            logprobs.new_zeros(count, size) if part is None else part
            for part, size in zip(parts, widths, strict=True)
        ],
        1,
    )


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
