"""Logprobs of given tokens at many positions: what the ops of that name do.

Raw rows go to the backend's `score_rows`, and so do those that a temperature alone processes where
it takes them; other processed ones go through its own sampling step: a row's logprob then has the
bits of the step's by construction. Rows are taken in chunks, so that the memory beyond the logits
does not grow with their number.
Nothing here waits for the device, so that all of it can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from graphed_sampling import backends
from graphed_sampling.backends.position_records import (
    Forward,
    PositionColumns,
    Positions,
    Upstream,
    write_nothing,
)
from graphed_sampling.layout import (
    Output,
    Param,
    ParamFlags,
    PositionRecord,
    RowFlags,
    TableLayout,
)
from graphed_sampling.params import UnsupportedFeatureError
from graphed_sampling.stateless import Filters, neutral_params, write_params

CHUNK_BYTES: Final = 64 * 2**20
"""Of scratch, and of gathered logits, that rows which go through a step take at a time."""
GRADIENT_ELEMENTS: Final = 2**23
"""Of logits whose gradient is worked out at a time: some 100 MB of fp32 copies."""
_MOST_STEP_ROWS: Final = 1024


def position_layout(vocab_size: int, top_n: int, num_given: int) -> TableLayout:
    """Where the lists of a position's record lie."""
    return TableLayout(vocab_size, 0, top_n, 0, 0, 0, 0, num_given, 0)


def split_record(record: Tensor, layout: TableLayout) -> tuple[Tensor, ...]:
    """Views of records: what the op returns, in its order."""
    real, end = record.view(torch.float32), layout.top_ids // 2 + layout.max_logprobs
    return (
        real[:, PositionRecord.LOGPROB],
        real[:, layout.given_logprobs : layout.given_logprobs + layout.max_logprob_ids],
        real[:, layout.top_logprobs : layout.top_logprobs + layout.max_logprobs],
        real[:, PositionRecord.ENTROPY],
        record.view(torch.int64)[:, layout.top_ids // 2 : end],
        record[:, PositionRecord.RANK],
        record[:, PositionRecord.NUM_KEPT],
        record[:, PositionRecord.FLAGS],
        real[:, PositionRecord.LARGEST : PositionRecord.LOG_NORMALISER + 1],
    )


def scoring_module(name: str, device: torch.device) -> Any:
    """The backend's module. ValueError where it cannot run there, or does not score positions."""
    name = backends.resolve(name, device)
    module = backends.module(name)
    if not hasattr(module, "score_rows"):
        raise UnsupportedFeatureError(f"the backend {name!r} does not support prompt_logprobs")
    return module


def score_positions(
    logits: Tensor,
    positions: Positions,
    output: Tensor,
    layout: TableLayout,
    module: Any,
    *,
    rank: bool,
    entropy: bool,
) -> None:
    """Fill output, int32 [m, layout.output_words], records of `PositionRecord`."""
    if positions.count == 0:
        return
    asked = positions.asked_filters
    wants = {"rank": rank, "entropy": entropy}
    if asked is None or (asked.only_temperature and getattr(module, "SCORES_TEMPERATURES", False)):
        module.score_rows(logits, positions, output, layout, **wants)
        return
    if positions.processed is not None:
        raw = replace(positions, asked_filters=None, processed=None).without(positions.processed)
        module.score_rows(logits, raw, output, layout, **wants)
    else:
        write_nothing(output, layout)
    score_by_step(logits, positions, output, layout, module, **wants)


def score_by_step(
    logits: Tensor,
    positions: Positions,
    output: Tensor,
    layout: TableLayout,
    module: Any,
    *,
    rank: bool,
    entropy: bool,
) -> None:
    """The records of processed rows, by the backend's own sampling step. Other rows' records stay
    as they are."""
    count, vocab_size = positions.count, layout.vocab_size
    step_layout = TableLayout(
        vocab_size, 1, max(layout.max_logprobs, 1), 0, 0, 0, 0, 1 + layout.max_logprob_ids, 0
    )
    row_bytes = 4 * module.scratch_words(step_layout, 1)
    if not positions.in_order:
        row_bytes = max(row_bytes, logits.shape[1] * logits.element_size())
    at_once = min(max(CHUNK_BYTES // max(row_bytes, 1), 1), _MOST_STEP_ROWS, count)
    step = _Step(step_layout, at_once, logits.device, module)
    for start in range(0, count, at_once):
        part = slice(start, min(start + at_once, count))
        chunk = positions.chunk(part)
        chunk_logits = chunk.logits(logits, part)
        chosen = chunk.rows >= 0
        if chunk.processed is not None:
            chosen = chosen & chunk.processed
        columns = step(chunk_logits, chunk, chosen, rank=rank, entropy=entropy)
        columns.top_ids = columns.top_ids[:, : layout.max_logprobs]
        columns.top_logprobs = columns.top_logprobs[:, : layout.max_logprobs]
        written = columns.packed()
        target = output[part, : written.shape[1]]
        target.copy_(torch.where(chosen.unsqueeze(1), written, target))


class _Step:
    """A sampling step of rows that belong to no table, for what it reports of a given token."""

    def __init__(self, layout: TableLayout, rows: int, device: torch.device, module: Any) -> None:
        self.module = module
        values = layout.to_ints()
        values[1] = rows
        self.layout = TableLayout.from_ints(values)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.params = neutral_params(self.layout, device)
        self.state = zeros(self.layout.rows, self.layout.state_words)
        self.tables = zeros(self.layout.tables_words)
        self.output = zeros(rows, self.layout.output_words)
        self.scratch = zeros(module.scratch_words(self.layout, rows))

    def __call__(
        self, logits: Tensor, chunk: Positions, chosen: Tensor, *, rank: bool, entropy: bool
    ) -> PositionColumns:
        layout, rows, device = self.layout, logits.shape[0], logits.device
        ids = torch.cat([chunk.accepted_token_ids.unsqueeze(1), chunk.accepted_given_ids], 1)
        filters = chunk.filters
        assert filters is not None
        write_params(self.params, filters, ParamFlags.LOGPROBS | ParamFlags.PROCESSED)
        self.params[:rows, Param.TOP_LOGPROBS] = layout.max_logprobs
        self.params[:rows, Param.NUM_GIVEN] = ids.shape[1]
        self.params[:rows, layout.given_ids : layout.given_ids + ids.shape[1]] = ids.clamp(min=0)
        slots = torch.arange(rows, dtype=torch.int32, device=device)
        self.module.sample_step(
            logits, slots.masked_fill(~chosen, -1), self.params, self.state, self.tables,
            self.output, self.scratch, layout, grammar_bitmask=None, words=None, given=None,
        )  # fmt: skip
        return self._columns(logits, chunk, filters, ids, rank=rank, entropy=entropy)

    def _columns(
        self,
        logits: Tensor,
        chunk: Positions,
        filters: Filters,
        ids: Tensor,
        *,
        rank: bool,
        entropy: bool,
    ) -> PositionColumns:
        layout = self.layout
        record = self.output[: logits.shape[0]]
        real = record.view(torch.float32)
        given = real[:, layout.given_logprobs : layout.given_logprobs + ids.shape[1]]
        given = given.masked_fill(ids < 0, math.nan)
        start, end = layout.top_ids // 2, layout.top_ids // 2 + layout.max_logprobs
        top_ids = record.view(torch.int64)[:, start:end]
        top = real[:, layout.top_logprobs : layout.top_logprobs + layout.max_logprobs]
        flags = record[:, Output.FLAGS]
        num_kept = record[:, Output.NUM_KEPT]
        infinite = (flags & int(RowFlags.POS_INF)) != 0
        empty = (flags & int(RowFlags.EMPTY)) != 0
        best = top_ids[:, :1]
        largest = logits.gather(1, best.clamp(min=0))[:, 0].float()
        largest = largest.masked_fill((best[:, 0] < 0) | empty, -math.inf)
        ranks = torch.zeros_like(num_kept)
        if rank:
            ranks = self._ranks(logits, chunk.accepted_token_ids, infinite, empty)
        entropies = torch.full_like(largest, math.nan)
        if entropy:
            entropies = self._entropies(logits, filters, largest, num_kept)
            entropies = entropies.masked_fill(empty, 0.0)
        return PositionColumns(
            largest=largest,
            log_normaliser=(-top[:, 0]).masked_fill(empty, 0.0),
            logprob=given[:, 0],
            rank=ranks,
            num_kept=num_kept,
            entropy=entropies,
            flags=flags,
            top_ids=top_ids,
            top_logprobs=top,
            given_logprobs=given[:, 1:],
        )

    def _ranks(self, logits: Tensor, token_ids: Tensor, infinite: Tensor, empty: Tensor) -> Tensor:
        """1 + how many y are larger than each row's token: NaN never is, and counts as -inf."""
        values = logits[:, : self.layout.vocab_size]
        value = values.gather(1, token_ids.clamp(min=0).unsqueeze(1))
        value = value.masked_fill(value.isnan(), -math.inf)
        # Of rows with +inf all others are equals, -inf.
        finite = torch.finfo(value.dtype).max
        value = torch.where(infinite.unsqueeze(1), value.clamp(min=finite), value)
        ranks = (values > value).sum(1).add_(1)
        ranks = torch.where(empty, 1 + (token_ids != 0).long(), ranks)
        return ranks.masked_fill_(token_ids < 0, 0)

    def _entropies(
        self, logits: Tensor, filters: Filters, largest: Tensor, num_kept: Tensor
    ) -> Tensor:
        torch_backend = backends.module("torch")
        scale = filters.scale()
        step = max(1, torch_backend.ENTROPY_ELEMENTS // self.layout.vocab_size)
        parts = []
        for start in range(0, logits.shape[0], step):
            part = slice(start, start + step)
            values, _ = torch_backend.sanitised(logits[part], self.layout.vocab_size)
            number = num_kept[part].long()
            number = number.masked_fill(number == 0, self.layout.vocab_size)
            infinite = (largest[part] == math.inf).unsqueeze(1)
            values = values.masked_fill(infinite & (values < math.inf), -math.inf)
            kept = torch_backend.leading(values, number)
            parts.append(torch_backend.mode_entropies(values, largest[part], scale[part], kept))
        return torch.cat(parts)


# Gradients.


def logit_gradients(
    logits: Tensor,
    positions: Positions,
    upstream: Upstream,
    forward: Forward,
    vocab_size: int,
    module: Any,
) -> Tensor:
    """The gradient of the logits, in their shape and dtype. They may be of a part of the
    vocabulary, of vocab_size tokens, where upstream and forward are of all of it.

    What is constant has no gradient: logprobs of -inf, rows with +inf or without a finite entry,
    greedy rows. Nor has the set of survivors.
    """
    result = torch.zeros_like(logits, memory_format=torch.contiguous_format)
    if logits.shape[0] == 0 or vocab_size == 0:
        return result
    if positions.in_order:
        write_gradients(result, logits, positions, upstream, forward, vocab_size, module)
        return result
    count = positions.count
    at_once = _rows_at_once(forward, logits.shape[1])
    for start in range(0, count, at_once):
        part = slice(start, min(start + at_once, count))
        chunk = positions.chunk(part)
        gradient = _chunk_gradient(
            chunk.logits(logits, part)[:, :vocab_size], chunk, upstream.chunk(part),
            forward.chunk(part),
        ).to(logits.dtype)  # fmt: skip
        # Positions may share a row.
        result[:, :vocab_size].index_add_(0, chunk.rows.clamp(min=0), gradient)
    return result


def write_gradients(
    result: Tensor,
    logits: Tensor,
    positions: Positions,
    upstream: Upstream,
    forward: Forward,
    vocab_size: int,
    module: Any,
) -> None:
    """The gradients of positions in order into result [m, width], which may be the logits."""
    if vocab_size < result.shape[1]:
        result[:, vocab_size:] = 0.0
    by_kernel = None if forward.num_kept is not None else _gradient_module(module, logits.device)
    if by_kernel is not None:
        scale = _inverse_temperatures(positions)
        by_kernel.gradient_rows(result, logits, positions, upstream, forward, scale, vocab_size)
        return
    count = positions.count
    at_once = _rows_at_once(forward, vocab_size)
    for start in range(0, count, at_once):
        part = slice(start, min(start + at_once, count))
        result[part, :vocab_size] = _chunk_gradient(
            logits[part, :vocab_size], positions.chunk(part), upstream.chunk(part),
            forward.chunk(part),
        )  # fmt: skip


def _rows_at_once(forward: Forward, width: int) -> int:
    # Survivors are found by sorting, which takes several times as much.
    elements = GRADIENT_ELEMENTS if forward.num_kept is None else GRADIENT_ELEMENTS // 4
    return max(1, elements // width)


def _gradient_module(module: Any, device: torch.device) -> Any:
    """The backend whose kernel works gradients out; None for torch operations. Their bits are not
    the step's business, so that on a GPU Triton serves who has no kernel."""
    if hasattr(module, "gradient_rows"):
        return module
    triton = backends.module("triton")
    return triton if device.type == "cuda" and not triton.unusable(device) else None


def _chunk_gradient(
    logits: Tensor,
    chunk: Positions,
    upstream: Upstream,
    forward: Forward,
) -> Tensor:
    """fp32 [c, V]: zeros where a position has no row."""
    largest, log_normaliser = forward.normalisers[:, :1], forward.normalisers[:, 1:]
    scale = _inverse_temperatures(chunk)
    # log p; what is no number, or is beside +inf, has p = 0.
    log_p = logits - largest  # fp32, and never the logits themselves
    if scale is not None:
        log_p.mul_(scale)
    log_p.sub_(log_normaliser).nan_to_num_(nan=-math.inf, posinf=-math.inf, neginf=-math.inf)
    p = log_p.exp()
    if forward.num_kept is not None:
        number = forward.num_kept.long()
        number.masked_fill_(number == 0, logits.shape[1])
        # By the logits themselves: log p rounds, and then other tokens would come first.
        torch_backend = backends.module("torch")
        values, _ = torch_backend.sanitised(logits, logits.shape[1])
        p.masked_fill_(~torch_backend.leading(values, number), 0.0)
    constant = (chunk.rows < 0).unsqueeze(1) | ~largest.isfinite()
    factor = -upstream.totals.unsqueeze(1).masked_fill(constant, 0.0)
    if upstream.of_entropies is None:
        result = p.mul_(factor)
    else:
        of_entropy = upstream.of_entropies.unsqueeze(1).masked_fill(constant, 0.0)
        entropy = forward.entropies.unsqueeze(1).masked_fill(constant, 0.0)
        # d H / d z_i = -p_i (ln p_i + H)
        slope = log_p.add_(entropy).mul_(-of_entropy).add_(factor)
        result = slope.masked_fill_(p == 0, 0.0).mul_(p)
    within = upstream.ids.clamp(0, logits.shape[1] - 1)
    elsewhere = within != upstream.ids
    result.scatter_add_(1, within, upstream.gradients.masked_fill(elsewhere | constant, 0.0))
    if scale is not None:
        result.mul_(scale)
    return result.masked_fill_(constant, 0.0)


def _inverse_temperatures(chunk: Positions) -> Tensor | None:
    """fp32 [c, 1]: 1 / T of processed rows, 0 of greedy ones, 1 of raw ones; None: all 1."""
    filters = chunk.filters
    if filters is None:
        return None
    temperature = filters.temperature
    scale = (1.0 / temperature).masked_fill(temperature == 0, 0.0)
    if chunk.processed is not None:
        scale = scale.masked_fill(~chunk.processed, 1.0)
    return scale.unsqueeze(1)
