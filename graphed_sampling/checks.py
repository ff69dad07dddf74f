"""What tensors and sizes are accepted: ValueError, naming the argument, for all else."""

from __future__ import annotations

import torch
from torch import Tensor

from graphed_sampling.layout import MAX_VOCAB_SIZE
from graphed_sampling.params import as_int

LOGITS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _last_dimension_is_contiguous(matrix: Tensor) -> bool:
    # Strides of dimensions with at most one element mean nothing.
    return matrix.stride(1) == 1 or matrix.shape[1] == 1 or matrix.shape[0] == 0


def check_logits(logits: Tensor, vocab_size: int) -> None:
    """ValueError unless logits are [n, >= vocab_size], of a known dtype, last stride 1."""
    check_tensor("logits", logits)
    if not (logits.dim() == 2 and logits.shape[1] >= vocab_size):
        raise ValueError(
            f"logits have shape {tuple(logits.shape)}: they must be [n, >= {vocab_size}]"
        )
    if logits.dtype not in LOGITS_DTYPES:
        raise ValueError(
            f"logits have dtype {logits.dtype}: it must be one of "
            f"{', '.join(str(d) for d in LOGITS_DTYPES)}"
        )
    if not _last_dimension_is_contiguous(logits):
        raise ValueError(
            f"logits have strides {logits.stride()}: the last dimension must be contiguous"
        )


def check_vector(
    name: str, tensor: Tensor, rows: int, dtype: torch.dtype, device: torch.device | None = None
) -> None:
    """ValueError unless tensor is [rows] of the dtype, on the device where one is named."""
    check_tensor(name, tensor)
    if not (tensor.shape == (rows,) and tensor.dtype == dtype):
        raise ValueError(
            f"{name} is {tensor.dtype} {list(tensor.shape)}: it must be {dtype} [{rows}]"
        )
    if device is not None:
        check_device(name, tensor, device)


def check_bitmask(bitmask: Tensor, rows: int, bitmap_words: int) -> None:
    """ValueError unless bitmask is int32 [rows, >= bitmap_words], last stride 1."""
    check_tensor("grammar_bitmask", bitmask)
    if not (
        bitmask.dim() == 2
        and bitmask.shape[0] == rows
        and bitmask.shape[1] >= bitmap_words
        and bitmask.dtype == torch.int32
        and _last_dimension_is_contiguous(bitmask)
    ):
        raise ValueError(
            f"grammar_bitmask is {bitmask.dtype} {list(bitmask.shape)}: it must be torch.int32 "
            f"[{rows}, >= {bitmap_words}] with a contiguous last dimension"
        )


def check_group_stats(stats: Tensor, shape: tuple[int, int, int]) -> None:
    """ValueError unless stats are contiguous fp32 of the shape, aligned to 16 bytes."""
    check_tensor("group_stats", stats)
    if not (
        stats.shape == shape
        and stats.dtype == torch.float32
        and stats.is_contiguous()
        and stats.data_ptr() % 16 == 0
    ):
        raise ValueError(
            f"group_stats is {stats.dtype} {list(stats.shape)}: it must be contiguous "
            f"torch.float32 {list(shape)}, aligned to 16 bytes"
        )


def check_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} is {type(value).__name__}: it must be a torch.Tensor")
    if value.layout != torch.strided or value.is_nested:
        raise ValueError(f"{name} is sparse or nested: it must be a dense tensor")


def check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}: it must be on {device}")


def check_vocab_size(logits: Tensor, vocab_size: int) -> int:
    """Check the logits; returns the vocabulary size, -1 being all of their columns."""
    check_tensor("logits", logits)
    if logits.dim() != 2:
        raise ValueError(f"logits have shape {tuple(logits.shape)}: they must be [n, V]")
    size = size_within(logits.shape[1], vocab_size, "columns of the logits")
    check_logits(logits, size)
    return size


def size_within(width: int, vocab_size: int, of: str) -> int:
    size = width if vocab_size == -1 else vocab_size
    if not (1 <= size <= min(width, MAX_VOCAB_SIZE)):
        raise ValueError(
            f"vocab_size = {vocab_size} is not accepted: it must be -1 (all {of}) "
            f"or in [1, {min(width, MAX_VOCAB_SIZE)}]"
        )
    return size


def check_count(name: str, value: object, low: int, high: int | None = None) -> int:
    """`value` as an int; ValueError unless it is an integer in [low, high], None being any."""
    accepted = f"an integer >= {low}" if high is None else f"an integer in [{low}, {high}]"
    number = as_int(name, value, accepted)
    if number < low or (high is not None and number > high):
        raise ValueError(f"{name} = {number} is not accepted: it must be {accepted}")
    return number


def check_linear(
    hidden: Tensor, weight: Tensor, vocab_size: int, chunk_rows: int, saved_rows: int = 0
) -> int:
    """Check what `linear_logprobs` makes logits from; returns the vocabulary size."""
    for name, matrix in (("hidden", hidden), ("weight", weight)):
        if matrix.dim() != 2 or matrix.dtype not in LOGITS_DTYPES:
            raise ValueError(
                f"{name} is {matrix.dtype} {list(matrix.shape)}: it must have two dimensions and "
                f"one of the dtypes {', '.join(str(d) for d in LOGITS_DTYPES)}"
            )
    if weight.shape[1] != hidden.shape[1] or weight.dtype != hidden.dtype:
        raise ValueError(
            f"weight is {weight.dtype} {list(weight.shape)}: it must be {hidden.dtype} "
            f"[>= vocab_size, {hidden.shape[1]}]"
        )
    check_device("weight", weight, hidden.device)
    if chunk_rows < 0:
        raise ValueError(f"chunk_rows = {chunk_rows} is not accepted: it must be >= 0, 0 for any")
    if saved_rows < 0:
        raise ValueError(f"saved_rows = {saved_rows} is not accepted: it must be >= 0")
    return size_within(weight.shape[0], vocab_size, "rows of the weight")
