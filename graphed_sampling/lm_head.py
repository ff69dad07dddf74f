"""Logprobs from hidden states and the LM head's weight: what the ops of linear logprobs do.

Logits exist a part at a time: whole rows of them where logprobs are worked out, and in the backward
pass tiles, of which those that were not saved are worked out anew. A sum over tiles is held in
fp32, so tiles span all positions or the whole vocabulary, whichever leaves the smaller sum.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor

from graphed_sampling.backends.position_records import Forward, Positions, Selection, Upstream
from graphed_sampling.layout import TableLayout
from graphed_sampling.positions import score_positions, write_gradients

CHUNK_BYTES: Final = 256 * 2**20
"""Of logits that exist at a time, where the caller does not say of how many positions."""
MEMORY_BYTES: Final = 1980 * 10**6
"""Of what both passes hold, gradients included, for logits to be saved on the package's choice."""
_APART: Final = 2**22
"""Elements in fp32 that a product in two steps takes beside its operands."""
_EVEN: Final = 256
"""Matrix products like sizes that are multiples of it."""


def chunk_size(weight: Tensor, chunk_rows: int) -> int:
    """How many positions' logits exist at a time; chunk_rows: the caller's choice, 0 for none."""
    return chunk_rows or max(_rows_within(CHUNK_BYTES, weight), 1)


def default_saved_rows(hidden: Tensor, weight: Tensor, count: int, rows: Tensor | None) -> int:
    """Of how many of `count` positions without filters logits are saved, where the caller does not
    say: of as many as the backward pass leaves memory for. rows: the mask or list, if there is one.
    """
    of_hidden, of_weight = hidden.requires_grad, weight.requires_grad
    width, size = hidden.shape[1], hidden.element_size()
    tiles = _Tiles.of(count, weight, 0, of_hidden=of_hidden, of_weight=of_weight, filtered=False)
    taken = CHUNK_BYTES + sum(m.numel() * size for m in (hidden, weight) if m.requires_grad)
    # Sums in fp32.
    taken += 4 * width * tiles.rows if of_hidden else 0
    taken += 4 * width * weight.shape[0] if of_weight and not tiles.by_columns else 0
    if rows is not None:  # a copy of states, and of lists gradients in fp32
        taken += width * tiles.rows * size
        taken += 4 * hidden.numel() if of_hidden and rows.dtype != torch.bool else 0
    if hidden.device.type == "cpu":  # copies in fp32, and no kernel for gradients
        taken += CHUNK_BYTES
    return _rows_within(max(MEMORY_BYTES - taken, 0), weight)


@dataclass(frozen=True)
class _Tiles:
    """Of the logits in a backward pass. by_columns: of all positions, else of all tokens."""

    rows: int
    columns: int
    by_columns: bool

    @classmethod
    def of(
        cls,
        count: int,
        weight: Tensor,
        chunk_rows: int,
        *,
        of_hidden: bool,
        of_weight: bool,
        filtered: bool,
    ) -> _Tiles:
        vocab_size, rows = weight.shape[0], chunk_size(weight, chunk_rows)
        # A sum over tiles is of one gradient or the other. Survivors of filters are found among all
        # tokens.
        summed = count if of_hidden else 0, vocab_size if of_weight else 0
        if filtered or count == 0 or summed[0] > summed[1]:
            return cls(max(min(rows, count), 1), vocab_size, False)
        elements = chunk_rows * vocab_size or CHUNK_BYTES // weight.element_size()
        return cls(count, max(min(_evened(elements // count), vocab_size), 1), True)


def _rows_within(size: int, weight: Tensor) -> int:
    """How many rows of logits take up to so many bytes."""
    return _evened(size // max(weight.shape[0] * weight.element_size(), 1))


def _evened(size: int) -> int:
    return size - size % _EVEN if size > _EVEN else size


def score_hidden(
    hidden: Tensor,
    weight: Tensor,
    positions: Positions,
    output: Tensor,
    saved: Tensor,
    layout: TableLayout,
    module: Any,
    chunk_rows: int,
    *,
    rank: bool,
    entropy: bool,
) -> None:
    """`score_positions` of the logits hidden @ weight.T, of which the first fill saved."""
    count, num_saved = positions.count, saved.shape[0]
    at_once = min(chunk_size(weight, chunk_rows), max(count, 1))
    buffer = saved.new_empty(min(at_once, count - num_saved), saved.shape[1])
    bounds = [0] if num_saved > 0 else []
    bounds += [*range(num_saved, count, at_once), count]
    for start, end in pairwise(bounds):
        part = slice(start, end)
        chunk = positions.chunk(part)
        logits = saved[part] if start < num_saved else buffer[: end - start]
        torch.mm(chunk.logits(hidden, part), weight.t(), out=logits)
        if not chunk.in_order:  # the buffer's rows are
            chunk = replace(chunk, selection=Selection(end - start, chunk.rows >= 0))
        score_positions(logits, chunk, output[part], layout, module, rank=rank, entropy=entropy)


def hidden_gradients(
    hidden: Tensor,
    weight: Tensor,
    saved: Tensor,
    positions: Positions,
    upstream: Upstream,
    forward: Forward,
    vocab_size: int,
    module: Any,
    chunk_rows: int,
    *,
    of_hidden: bool,
    of_weight: bool,
    selected: bool,
) -> tuple[Tensor, Tensor]:
    """The gradients of hidden states and weight, empty where they are not wanted.

    weight: at least vocab_size rows, of which the others have no gradient. saved: the logits of the
    first positions. selected: whether there may be positions without a row. What is summed over
    tiles, or over positions that share a hidden state, is summed in fp32.
    """
    count, device = positions.count, hidden.device
    filtered = forward.num_kept is not None
    tiles = _Tiles.of(
        count, weight[:vocab_size], chunk_rows,
        of_hidden=of_hidden, of_weight=of_weight, filtered=filtered,
    )  # fmt: skip
    buffer = hidden.new_empty(tiles.rows * tiles.columns)
    hidden_gradient = weight_gradient = sums = hidden.new_empty(0)
    if of_hidden:
        dtype = hidden.dtype if positions.in_order else torch.float32
        hidden_gradient = torch.zeros(hidden.shape, dtype=dtype, device=device)
        sums = torch.empty(tiles.rows, hidden.shape[1], dtype=torch.float32, device=device)
    if of_weight:
        dtype = weight.dtype if tiles.by_columns else torch.float32
        weight_gradient = torch.empty(weight.shape, dtype=dtype, device=device)
        weight_gradient[vocab_size if tiles.by_columns else 0 :] = 0.0

    for part in _parts(count, tiles.rows):
        chunk = positions.chunk(part)
        states = chunk.logits(hidden, part)
        if selected and of_weight:
            # What nobody asked for may hold anything, and 0 times NaN is no 0.
            states = states.masked_fill(chunk.rows.unsqueeze(1) < 0, 0.0)
        known = saved[part], chunk, upstream.chunk(part), forward.chunk(part)
        of_states = sums[: states.shape[0]].zero_()
        for columns in _parts(vocab_size, tiles.columns):
            width = columns.stop - columns.start
            tile = buffer[: states.shape[0] * width].view(states.shape[0], width)
            _write_tile(tile, states, weight[columns], columns, *known, module)
            if of_weight and tiles.by_columns:
                torch.mm(tile.t(), states, out=weight_gradient[columns])
            elif of_weight:
                _add_product(weight_gradient[columns], tile.t(), states)
            if of_hidden:
                _add_product(of_states, tile, weight[columns])
        if of_hidden and positions.in_order:
            hidden_gradient[part] = of_states
        elif of_hidden and hidden.shape[0] > 0:
            hidden_gradient.index_add_(0, chunk.rows.clamp(min=0), of_states)
    return hidden_gradient.to(hidden.dtype), weight_gradient.to(weight.dtype)


def _parts(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def _write_tile(
    tile: Tensor,
    states: Tensor,
    weight: Tensor,
    columns: slice,
    saved: Tensor,
    positions: Positions,
    upstream: Upstream,
    forward: Forward,
    module: Any,
) -> None:
    """The gradients of logits into tile [positions, columns]; weight: the columns' alone."""
    upstream = upstream.of_tokens_from(columns.start)

    def write(rows: slice, logits: Tensor) -> None:
        write_gradients(
            tile[rows], logits, positions.chunk(rows), upstream.chunk(rows), forward.chunk(rows),
            tile.shape[1], module,
        )  # fmt: skip

    known, anew = slice(0, saved.shape[0]), slice(saved.shape[0], tile.shape[0])
    if known.stop > 0:
        write(known, saved[:, columns])
    if anew.start < anew.stop:
        write(anew, torch.mm(states[anew], weight.t(), out=tile[anew]))


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, in fp32 whatever the operands' dtype."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    elif left.is_cuda and _adds_to_fp32(left.device, left.dtype):
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    elif left.is_cuda:
        # Through a product of its own, of some rows at a time.
        for rows in _parts(total.shape[0], max(_APART // max(total.shape[1], 1), 1)):
            total[rows] += torch.mm(left[rows], right, out_dtype=torch.float32)
    else:
        for inner in _parts(left.shape[1], max(_APART // max(sum(total.shape), 1), 1)):
            total.addmm_(left[:, inner].float(), right[inner].float())


@functools.cache
def _adds_to_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch's addmm adds a product of 16-bit matrices to an fp32 one."""
    total = torch.zeros(8, 8, dtype=torch.float32, device=device)
    operand = torch.zeros(8, 8, dtype=dtype, device=device)
    try:
        torch.addmm(total, operand, operand, out_dtype=torch.float32, out=total)
    except RuntimeError:
        return False
    return True
