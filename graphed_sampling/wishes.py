"""What is asked of many positions: the arguments that the ops of prompt logprobs share, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from graphed_sampling.backends.position_records import AskedFilters, Positions, Selection
from graphed_sampling.checks import check_count, check_device, check_vector, check_vocab_size
from graphed_sampling.layout import TableLayout
from graphed_sampling.positions import position_layout, scoring_module

MAX_TOP_N: Final = 1024
"""Of the best tokens at a position."""


@dataclass(frozen=True)
class Wishes:
    """The arguments that the ops of prompt logprobs share, checked."""

    positions: Positions
    layout: TableLayout
    module: Any
    rank: bool
    entropy: bool

    @classmethod
    def check(
        cls,
        logits: Tensor,
        next_token_ids: Tensor,
        rows: Tensor | None = None,
        num_rows: Tensor | None = None,
        given_ids: Tensor | None = None,
        temperature: Tensor | None = None,
        top_k: Tensor | None = None,
        top_p: Tensor | None = None,
        min_p: Tensor | None = None,
        processed: Tensor | None = None,
        top_n: int = 0,
        rank: bool = False,
        entropy: bool = False,
        vocab_size: int = -1,
        backend: str = "auto",
    ) -> Wishes:
        size = check_vocab_size(logits, vocab_size)
        return cls.check_rows(
            logits, size, backend, next_token_ids, rows, num_rows, given_ids, temperature, top_k,
            top_p, min_p, processed, top_n, rank, entropy,
        )  # fmt: skip

    @classmethod
    def check_rows(
        cls,
        matrix: Tensor,
        size: int,
        backend: str,
        next_token_ids: Tensor,
        rows: Tensor | None,
        num_rows: Tensor | None,
        given_ids: Tensor | None,
        temperature: Tensor | None,
        top_k: Tensor | None,
        top_p: Tensor | None,
        min_p: Tensor | None,
        processed: Tensor | None,
        top_n: int,
        rank: bool,
        entropy: bool,
    ) -> Wishes:
        """matrix: the logits, or hidden states that logits come from; size: of the vocabulary."""
        device, count = matrix.device, _count_positions(matrix, rows)
        check_vector("next_token_ids", next_token_ids, count, torch.int64, device)
        _check_num_rows(rows, num_rows, device)
        if given_ids is None:
            given_ids = next_token_ids.new_empty(count, 0)
        elif not (
            given_ids.dim() == 2 and given_ids.shape[0] == count and given_ids.dtype == torch.int64
        ):
            raise ValueError(
                f"given_ids is {given_ids.dtype} {list(given_ids.shape)}: it must be torch.int64 "
                f"[{count}, number of ids]"
            )
        check_device("given_ids", given_ids, device)
        check_count("top_n", top_n, 0, MAX_TOP_N)
        if processed is not None:
            check_vector("processed", processed, count, torch.bool, device)
        filters = AskedFilters(temperature, top_k, top_p, min_p)
        for name, value in filters._asdict().items():
            dtype = torch.int32 if name == "top_k" else torch.float32
            if value is not None:
                check_vector(name, value, count, dtype, device)
        any_asked = processed is not None or any(value is not None for value in filters)
        module = scoring_module(backend, device)
        if num_rows is not None and rows is not None and is_on_cpu(num_rows):
            _check_numbers("rows", rows[: max(int(num_rows), 0)], matrix.shape[0])
        elif rows is not None and rows.dtype != torch.bool:
            _check_numbers("rows", rows, matrix.shape[0])
        selection = Selection(matrix.shape[0], rows, num_rows)
        positions = Positions(
            selection, next_token_ids, given_ids, size, filters if any_asked else None, processed
        )
        if next_token_ids.device.type == "cpu" and is_on_cpu(positions.rows):
            # What is not asked for may hold anything.
            asked = positions.rows >= 0
            _check_numbers("next_token_ids", next_token_ids[asked], size)
            _check_numbers("given_ids", given_ids[asked], size)
        return cls(
            positions,
            position_layout(size, top_n, given_ids.shape[1]),
            module,
            rank,
            entropy,
        )


def _count_positions(logits: Tensor, rows: Tensor | None) -> int:
    """How many positions there are; checks rows: a mask of the logits, or a list of their rows."""
    if rows is None:
        return logits.shape[0]
    if rows.dtype == torch.bool:
        check_vector("rows", rows, logits.shape[0], torch.bool, logits.device)
    elif not (rows.dim() == 1 and rows.dtype == torch.int64):
        raise ValueError(
            f"rows is {rows.dtype} {list(rows.shape)}: it must be a mask, torch.bool "
            f"[{logits.shape[0]}], or a list of rows, torch.int64 [m]"
        )
    check_device("rows", rows, logits.device)
    return rows.shape[0]


def _check_num_rows(rows: Tensor | None, num_rows: Tensor | None, device: torch.device) -> None:
    if num_rows is None:
        return
    if rows is None or rows.dtype == torch.bool:
        raise ValueError("num_rows is the length of a list of rows: rows must be torch.int64 [m]")
    check_vector("num_rows", num_rows, 1, torch.int32, device)


def is_on_cpu(tensor: Tensor) -> bool:
    """Whether its values can be looked at without waiting for a device; a fake has none."""
    return tensor.device.type == "cpu" and type(tensor) in (Tensor, torch.nn.Parameter)


def _check_numbers(name: str, numbers: Tensor, end: int) -> None:
    """ValueError for CPU tensors that hold what is neither -1 nor in [0, end)."""
    if not is_on_cpu(numbers) or not numbers.numel():
        return
    low, high = (int(v) for v in numbers.aminmax())
    if low < -1 or high >= end:
        wrong = low if low < -1 else high
        raise ValueError(
            f"{name} holds {wrong}, which is not accepted: -1 for none, or in [0, {end})"
        )
