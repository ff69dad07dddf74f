"""`OutputRing`: packed outputs of steps on their way to the host."""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType

import torch
from torch import Tensor

from graphed_sampling.params import as_int
from graphed_sampling.step.futures import HostStream, Wait, check_wait, gpu_future


class OutputSlot:
    """One entry of a ring, held by whoever acquired it until `release`, or the end of a `with`.

    host: int32 [rows, words], pinned where there is a GPU. What `fill` brought is there once
    the future that `arrival` gives is done, and stays until the entry is released.
    """

    def __init__(self, ring: OutputRing, host: Tensor) -> None:
        self.host = host
        self._ring = ring
        self._held = False

    def fill(self, record: Tensor) -> None:
        """Enqueue the copy of `record`, int32 [n, words], behind the current stream's work.

        The current stream goes on at once: `OutputRing.protect` before the record is written anew.
        ValueError for a record that does not fit. RuntimeError when the entry is not held.
        """
        self._ring._fill(self, record)

    def release(self) -> None:
        """Let the next copy overwrite it. RuntimeError where it is not held."""
        if not self._held:
            raise RuntimeError("this entry of the ring is not held")
        self._held = False
        self._ring._take_back(self)

    def __enter__(self) -> OutputSlot:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


class OutputRing:
    """Pinned buffers that outputs are copied to, on a stream of their own.

    device: of the records. rows, words: the shape of the largest one. depth: entries; a reader
    that holds one keeps it from being overwritten, so a ring is as deep as steps are in flight or
    being read. wait: how a copy's end is waited for, as for `gpu_future`.
    All methods but `OutputSlot.fill` belong to the event loop's thread.
    """

    def __init__(
        self, device: torch.device, rows: int, words: int, depth: int, *, wait: Wait = "auto"
    ) -> None:
        for name, value in (("rows", rows), ("words", words), ("depth", depth)):
            if as_int(name, value, "an integer >= 1") < 1:
                raise ValueError(f"{name} = {value} is not accepted: it must be an integer >= 1")
        check_wait(wait)
        self.device = device
        self.depth = depth
        self._wait = wait
        on_gpu = device.type == "cuda"
        with torch.inference_mode(False):
            self._free = [
                OutputSlot(
                    self,
                    torch.zeros(rows, words, dtype=torch.int32, device="cpu", pin_memory=on_gpu),
                )
                for _ in range(depth)
            ]
        self._shape = (rows, words)
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._stream = torch.cuda.Stream(device) if on_gpu else None
        self._copied: torch.cuda.Event | None = None

    @property
    def num_free(self) -> int:
        return len(self._free)

    def try_acquire(self) -> OutputSlot | None:
        """A free entry, None where all are held."""
        if not self._free:
            return None
        slot = self._free.pop()
        slot._held = True
        return slot

    async def acquire(self) -> OutputSlot:
        """A free entry, as soon as there is one."""
        while (slot := self.try_acquire()) is None:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            try:
                await future
            except asyncio.CancelledError:
                if future.done() and not future.cancelled() and self._free:
                    self._wake_one()  # it was this one's turn
                raise
        return slot

    def arrival(self, host_stream: HostStream | None = None) -> asyncio.Future[None]:
        """Done when every copy enqueued so far is. host_stream: where `fill` runs, on the CPU."""
        return gpu_future(self._stream or host_stream, wait=self._wait)

    def protect(self) -> None:
        """Make the current stream wait until the last record was copied: before it is rewritten."""
        if self._copied is not None:
            self._copied.wait()

    def _fill(self, slot: OutputSlot, record: Tensor) -> None:
        if not slot._held:
            raise RuntimeError("this entry of the ring is not held")
        rows, words = self._shape
        if not (
            record.dtype == torch.int32
            and record.dim() == 2
            and record.shape[0] <= rows
            and record.shape[1] == words
        ):
            raise ValueError(
                f"record is {record.dtype} {list(record.shape)}: it must be torch.int32 "
                f"[<= {rows}, {words}]"
            )
        target = slot.host[: record.shape[0]]
        if self._stream is None:
            target.copy_(record)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            target.copy_(record, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def _take_back(self, slot: OutputSlot) -> None:
        self._free.append(slot)
        self._wake_one()

    def _wake_one(self) -> None:
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(None)
                return
