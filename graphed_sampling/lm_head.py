"""Logprobs from hidden states and the LM head's weight: what the ops of linear logprobs do.

Logits exist for a chunk of positions at a time. The backward pass works them out anew, one matrix
product more than a pass that had kept them all.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from graphed_sampling.backends.position_records import Forward, Positions, Upstream
from graphed_sampling.layout import TableLayout
from graphed_sampling.positions import score_positions, write_gradients

CHUNK_BYTES: Final = 256 * 2**20
"""Of logits that exist at a time, where the caller does not say of how many positions."""


def chunk_size(weight: Tensor, chunk_rows: int) -> int:
    """How many positions' logits exist at a time; chunk_rows: the caller's choice, 0 for none."""
    if chunk_rows:
        return chunk_rows
    return max(CHUNK_BYTES // max(weight.shape[0] * weight.element_size(), 1), 1)


def _chunks(
    hidden: Tensor, weight: Tensor, positions: Positions, chunk_rows: int
) -> Iterator[tuple[slice, Tensor, Tensor, Positions]]:
    """Of each chunk: its part of the positions, hidden states, logits, and itself, in order.

    The logits lie in one buffer, and hold until the next chunk.
    """
    count = positions.rows.shape[0]
    at_once = min(chunk_size(weight, chunk_rows), max(count, 1))
    buffer = torch.empty(at_once, weight.shape[0], dtype=hidden.dtype, device=hidden.device)
    place = torch.arange(at_once, device=hidden.device)
    for start in range(0, count, at_once):
        part = slice(start, min(start + at_once, count))
        chunk = positions.chunk(part)
        states = chunk.logits(hidden, part)
        logits = buffer[: part.stop - start]
        torch.mm(states, weight.t(), out=logits)
        rows = place[: part.stop - start].masked_fill(chunk.rows < 0, -1)
        yield part, states, logits, replace(chunk, rows=rows, in_order=True)


def score_hidden(
    hidden: Tensor,
    weight: Tensor,
    positions: Positions,
    output: Tensor,
    layout: TableLayout,
    module: Any,
    chunk_rows: int,
    *,
    rank: bool,
    entropy: bool,
) -> None:
    """`score_positions` of the logits hidden @ weight.T."""
    for part, _, logits, chunk in _chunks(hidden, weight, positions, chunk_rows):
        score_positions(logits, chunk, output[part], layout, module, rank=rank, entropy=entropy)


def hidden_gradients(
    hidden: Tensor,
    weight: Tensor,
    positions: Positions,
    upstream: Upstream,
    forward: Forward,
    vocab_size: int,
    module: Any,
    chunk_rows: int,
    *,
    of_hidden: bool,
    of_weight: bool,
) -> tuple[Tensor, Tensor]:
    """The gradients of hidden states and weight, empty where they are not wanted.

    That of the weight is added up over chunks in fp32, and so is that of hidden states which
    several positions may share.
    """
    nothing = hidden.new_empty(0)
    hidden_gradient, weight_gradient = nothing, nothing
    if of_hidden:
        dtype = hidden.dtype if positions.in_order else torch.float32
        hidden_gradient = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    if of_weight:
        weight_gradient = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
    for part, states, logits, chunk in _chunks(hidden, weight, positions, chunk_rows):
        # In the logits' place.
        write_gradients(
            logits, logits, chunk, upstream.chunk(part), forward.chunk(part), vocab_size, module
        )
        if of_hidden:
            of_states = logits @ weight
            if positions.in_order:
                hidden_gradient[part] = of_states
            elif hidden.shape[0] > 0:
                rows = positions.rows[part].clamp(min=0)
                hidden_gradient.index_add_(0, rows, of_states.float())
        if of_weight:
            _add_product(weight_gradient, logits, states)
    return hidden_gradient.to(hidden.dtype), weight_gradient.to(weight.dtype)


def _add_product(total: Tensor, gradient: Tensor, states: Tensor) -> None:
    """total += gradient.T @ states, in fp32 whatever the operands' dtype."""
    if gradient.dtype == torch.float32:
        total.addmm_(gradient.t(), states)
    elif not gradient.is_cuda:
        total.addmm_(gradient.float().t(), states.float())
    elif _adds_to_fp32(gradient.device, gradient.dtype):
        torch.addmm(total, gradient.t(), states, out_dtype=torch.float32, out=total)
    else:
        # Through a product of its own, of a part of the vocabulary at a time.
        step = max(CHUNK_BYTES // (4 * states.shape[1]), 1)
        for first in range(0, total.shape[0], step):
            part = gradient[:, first : first + step].t()
            total[first : first + step] += torch.mm(part, states, out_dtype=torch.float32)


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
