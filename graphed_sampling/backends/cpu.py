"""The `cpu` backend: numba kernels, rows spread over threads.

The kernels (cpu_kernels.py) run without the GIL on threads of one pool; numba's own threading is
not used, since its default layer must not be entered from two threads at once. Rows are
independent, so the number of threads decides nothing. numba is imported when the backend is first
considered for a table on the CPU.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphed_sampling.backends.position_records import Positions
from graphed_sampling.layout import TableLayout

Array = np.ndarray[Any, Any]

NAME = "cpu"
CHOSEN_FOR = "tables on the CPU, where numba is installed"
REFUSES: frozenset[str] = frozenset()

# Below so many logits a task, handing rows to another thread costs more than it saves: waking
# one takes some 20 us, in which a core goes through about this much of a row.
_TASK_LOGITS = 32768


def unusable(device: torch.device) -> str:
    if device.type != "cpu":
        return "it runs on the CPU only"
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed"
    return _numba_error()


@functools.cache
def _numba_error() -> str:
    """Why numba, which is installed, does not import: a numpy that it does not know yet, say."""
    try:
        importlib.import_module("numba")
    except Exception as error:
        return " ".join(f"numba does not import: {type(error).__name__}: {error}".split())
    return ""


def canonical_order(vocab_size: int) -> Tensor:
    return torch.arange(vocab_size, device="cpu")


def scratch_words(layout: TableLayout, rows: int) -> int:
    return 0  # working buffers belong to the threads


def sample_step(
    logits: Tensor,
    slots: Tensor,
    params: Tensor,
    state: Tensor,
    tables: Tensor,
    output: Tensor,
    scratch: Tensor,
    layout: TableLayout,
    *,
    grammar_bitmask: Tensor | None,
    words: Tensor | None,
    given: Tensor | None,
) -> None:
    rows = slots.shape[0]
    if rows == 0:
        return
    if given is not None:
        bitmask_counts, words_count = given.tolist()
        grammar_bitmask = grammar_bitmask if bitmask_counts else None
        words = words if words_count else None
    kernels = _compiled("step_rows")
    flat_logits, row_stride = _flat_rows(logits)
    flat_bitmask, mask_stride = (
        _flat_rows(grammar_bitmask) if grammar_bitmask is not None else (None, 0)
    )
    arguments = (
        flat_logits.view(torch.uint8).numpy(),
        _KINDS[logits.dtype],
        row_stride,
        slots.contiguous().numpy(),
        params.view(-1).numpy(),
        state.view(-1).numpy(),
        tables.numpy(),
        output.view(-1).numpy(),
        flat_bitmask.numpy() if flat_bitmask is not None else _EMPTY_INT32,
        mask_stride,
        words.contiguous().numpy() if words is not None else _EMPTY_INT64,
        _sizes(layout),
    )
    size = kernels.workspace_bytes(layout.vocab_size)

    def step(first: int, last: int) -> None:
        kernels.step_rows(first, last, *arguments, _buffer(size))

    block = max(1, _TASK_LOGITS // layout.vocab_size)
    _for_blocks(step, rows, block)


def warm_up(
    layout: TableLayout, device: torch.device, logits_dtypes: Sequence[torch.dtype]
) -> None:
    """Compiles the kernels, or loads them from numba's cache: a step never waits for it."""
    _compiled("step_rows")


def score_rows(
    logits: Tensor,
    positions: Positions,
    output: Tensor,
    layout: TableLayout,
    *,
    rank: bool,
    entropy: bool,
) -> None:
    """Raw logprobs at many positions: see `backends`. The first call of a process compiles."""
    kernels = _compiled("score_rows")
    count = positions.count
    flat_logits, row_stride = _flat_rows(logits)
    arguments = (
        flat_logits.view(torch.uint8).numpy(),
        _KINDS[logits.dtype],
        row_stride,
        positions.rows.contiguous().numpy(),
        positions.accepted_token_ids.contiguous().numpy(),
        positions.accepted_given_ids.reshape(-1).numpy(),
        layout.max_logprob_ids,
        output.view(-1).numpy(),
        rank,
        entropy,
        _sizes(layout),
    )
    size = kernels.workspace_bytes(layout.vocab_size)

    def score(first: int, last: int) -> None:
        kernels.score_rows(first, last, *arguments, _buffer(size))

    _for_blocks(score, count, max(1, _TASK_LOGITS // layout.vocab_size))


_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # cpu_kernels.FLOAT32, ...
# No tensors: this module may be imported first while torch makes fake ones.
_EMPTY_INT32 = np.empty(0, np.int32)
_EMPTY_INT64 = np.empty(0, np.int64)


def _flat_rows(matrix: Tensor) -> tuple[Tensor, int]:
    """All elements from the first row to the last as one dimension, and the rows' distance."""
    rows, width = matrix.shape
    stride = matrix.stride(0) if rows > 1 else width
    return matrix.detach().as_strided(((rows - 1) * stride + width,), (1,)), stride


@functools.lru_cache
def _sizes(layout: TableLayout) -> Array:
    """The layout as the kernels take it."""
    from graphed_sampling.backends.cpu_kernels import Offsets

    return np.array([getattr(layout, name) for name in Offsets._fields], np.int64)


# --------------------------------------------------------------------------- compilation

_compiling = threading.Lock()


@functools.lru_cache
def _compiled(entry: str) -> ModuleType:
    """The kernels, with that entry of theirs compiled."""
    with _compiling:
        from graphed_sampling.backends import cpu_kernels

        nothing = {"step_rows": _step_nothing, "score_rows": _score_nothing}[entry]
        # numba looks at the kernels' own file only before it takes them from its cache.
        if nothing(cpu_kernels) != cpu_kernels.OFFSETS_DIGEST:
            getattr(cpu_kernels, entry).recompile()
        return cpu_kernels


_NO_LAYOUT = TableLayout(1, 1, 0, 0, 0, 0, 0, 0, 0)


def _step_nothing(kernels: ModuleType) -> int:
    """Steps no row, with arguments of the one signature that is used."""
    empty = _EMPTY_INT32
    digest: int = kernels.step_rows(
        0, 0, np.empty(0, np.uint8), 0, 0, empty, empty, empty, empty, empty,
        empty, 0, _EMPTY_INT64, _sizes(_NO_LAYOUT), _buffer(0),
    )  # fmt: skip
    return digest


def _score_nothing(kernels: ModuleType) -> int:
    """The same of `score_rows`."""
    empty = _EMPTY_INT64
    digest: int = kernels.score_rows(
        0, 0, np.empty(0, np.uint8), 0, 0, empty, empty, empty, 0, _EMPTY_INT32, False,
        False, _sizes(_NO_LAYOUT), _buffer(0),
    )  # fmt: skip
    return digest


# --------------------------------------------------------------------------- threads

_local = threading.local()
_pool_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None
_pool_size = 0


def _buffer(size: int) -> Array:
    """This thread's working memory, of at least `size` bytes, 64-byte aligned."""
    buffer: Array | None = getattr(_local, "buffer", None)
    if buffer is None or len(buffer) < size:
        memory = np.empty(size + 64, np.uint8)
        buffer = _local.buffer = memory[-memory.ctypes.data % 64 :]
    return buffer


def _helpers(count: int) -> ThreadPoolExecutor:
    """The process's pool, with at least `count` threads."""
    global _pool, _pool_size
    with _pool_lock:
        if _pool is None or _pool_size < count:
            # A smaller pool is dropped, not shut down: another thread may be about to use it.
            _pool = ThreadPoolExecutor(count, thread_name_prefix="graphed-sampling")
            _pool_size = count
        return _pool


def _forget_pool() -> None:
    # A child has the pool's object but none of its threads, and perhaps a lock held by one.
    global _pool, _pool_lock, _compiling
    _pool = None
    _pool_lock = threading.Lock()
    _compiling = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)


def _for_blocks(step: Callable[[int, int], None], rows: int, block: int) -> None:
    """Calls step(first, last) for blocks of rows, on up to torch.get_num_threads() threads.

    The caller works too, so a pool that another table keeps busy delays nobody.
    """
    threads = min(torch.get_num_threads(), -(-rows // block))
    if threads <= 1:
        step(0, rows)
        return
    firsts = itertools.count(0, block)

    def work() -> None:
        while (first := next(firsts)) < rows:
            step(first, min(first + block, rows))

    pool = _helpers(threads - 1)
    helpers: list[Future[Any]] = [pool.submit(work) for _ in range(threads - 1)]
    try:
        work()
    finally:
        for helper in helpers:
            if not helper.cancel():
                helper.result()
