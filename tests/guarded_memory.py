"""Triton's interpreter, kept to the memory that a launch was given.

The interpreter writes wherever a kernel's pointers lead: an entry too far spoils Python's own
memory, and a test that has nothing to do with it crashes minutes later. Here it is an error at
once, as a GPU's memcheck has it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]


def guard_memory(interpreter: Any) -> None:
    """Patch Triton's interpreter for good, before anything else takes its memory from it."""
    guarded = GuardedMemory(interpreter._interpreter)
    interpreter._interpreter = guarded
    executor = interpreter.GridExecutor
    launch = executor.__call__

    def launch_guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        guarded.give([*args, *kwargs.values()])
        return launch(self, *args, **kwargs)

    executor.__call__ = launch_guarded


class GuardedMemory:
    """The interpreter's way to memory, for addresses inside the tensors of the launch alone."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self._begins: list[int] = []
        self._ends: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)

    def give(self, arguments: list[Any]) -> None:
        """The arguments of the launch that begins."""
        self._begins, self._ends = [], []
        for begin, end in sorted(_extent(t) for t in _tensors(arguments) if t.numel() > 0):
            if self._ends and begin < self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
            else:
                self._begins.append(begin)
                self._ends.append(end)

    def load(self, at: Array, mask: Array, other: Array, dtype: Any) -> Array:
        self._check(at, mask, np.dtype(dtype).itemsize, "reads")
        result: Array = self._memory.load(at, mask, other, dtype)
        return result

    def store(self, at: Array, value: Array, mask: Array) -> None:
        self._check(at, mask, np.asarray(value).dtype.itemsize, "writes")
        self._memory.store(at, value, mask)

    def atomic_rmw(self, operation: Any, at: Array, value: Array, mask: Array, order: Any) -> Array:
        self._check(at, mask, np.asarray(value).dtype.itemsize, "writes")
        result: Array = self._memory.atomic_rmw(operation, at, value, mask, order)
        return result

    def atomic_cas(self, at: Array, expected: Array, value: Array, order: Any) -> Array:
        self._check(at, np.ones(np.shape(at), bool), np.asarray(value).dtype.itemsize, "writes")
        result: Array = self._memory.atomic_cas(at, expected, value, order)
        return result

    def _check(self, at: Array, mask: Array, size: int, what: str) -> None:
        # Descriptors hand over views of memory, and integers will do for a mask.
        used = np.asarray(at)[np.asarray(mask).astype(bool, copy=False)]
        if used.size == 0:
            return
        first, last = int(used.min()), int(used.max()) + size
        place = bisect_right(self._begins, first) - 1
        if place >= 0 and last <= self._ends[place]:
            return
        for address in map(int, used.reshape(-1)):  # perhaps in several tensors
            place = bisect_right(self._begins, address) - 1
            if place < 0 or address + size > self._ends[place]:
                where = "before the first"
                if place >= 0:
                    begin, end = self._begins[place], self._ends[place]
                    where = f"{address - begin} bytes behind the beginning of {end - begin}"
                raise AssertionError(
                    f"a kernel {what} {size} bytes at {address:#x}, outside the tensors that it "
                    f"was launched with: {where}"
                )


def _tensors(arguments: Any) -> Iterator[torch.Tensor]:
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, tuple | list):
            yield from _tensors(argument)
        elif isinstance(base := getattr(argument, "base", None), torch.Tensor):
            yield base  # of a descriptor


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Where its memory begins, and ends."""
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in strides)
    return tensor.data_ptr(), tensor.data_ptr() + elements * tensor.element_size()
