"""The way from the host to the device records: pinned rings and the packed scatter of dirty rows.

A packet is what one copy brings: descriptors of `DESCRIPTOR_WORDS` int32 words, then the payload.

    word 0   target (`Target`) | start of the segment's payload, in words, << 2
    word 1   length in words
    word 2,3 flat destination offset in the target, in words: 64 bits, low word first

Segments follow each other in the payload without gaps, and no two of a packet overlap.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from graphed_sampling.captures import captures_left_alone

Words = npt.NDArray[np.int32]

DESCRIPTOR_WORDS: Final = 4
# A segment is never longer, so that any segment fits any ring entry.
_MAX_SEGMENT_WORDS: Final = 4096


class Target(IntEnum):
    """The tensor that a segment is written to."""

    PARAMS = 0
    STATE = 1
    TABLES = 2


@dataclass(frozen=True)
class Segments:
    """Writes to come.

    descriptors: int64 [k, 2], each the four words of a descriptor but for the payload's start.
    payload: the segments' words, one after the other.
    """

    descriptors: npt.NDArray[np.int64]
    payload: Words

    @classmethod
    def run(cls, target: Target, offset: int, payload: Words) -> Segments:
        """One contiguous write, cut where it is too long for one segment."""
        starts = np.arange(0, len(payload), _MAX_SEGMENT_WORDS, dtype=np.int64)
        lengths = np.minimum(len(payload) - starts, _MAX_SEGMENT_WORDS)
        return cls._describe(target, offset + starts, lengths, payload)

    @classmethod
    def single_words(
        cls, target: Target, offsets: npt.NDArray[np.int64], values: Words
    ) -> Segments:
        """Scattered writes of one word each; the offsets differ."""
        return cls._describe(target, offsets, np.ones(len(offsets), np.int64), values)

    @classmethod
    def _describe(
        cls,
        target: Target,
        offsets: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
        payload: Words,
    ) -> Segments:
        descriptors = np.empty((len(offsets), 2), np.int64)
        descriptors[:, 0] = (lengths << 32) | int(target)
        descriptors[:, 1] = offsets
        return cls(descriptors, payload)

    @classmethod
    def join(cls, parts: list[Segments]) -> Segments:
        if len(parts) == 1:
            return parts[0]
        return cls(
            np.concatenate([p.descriptors for p in parts]),
            np.concatenate([p.payload for p in parts]),
        )

    def packets(self, capacity: int) -> Iterator[tuple[npt.NDArray[np.int64], Words]]:
        """Descriptors and payload of packets of at most `capacity` words each."""
        lengths = self.descriptors[:, 0] >> 32
        ends = np.cumsum(lengths)
        described = self.descriptors.copy()
        described[:, 0] += (ends - lengths) << 2
        if DESCRIPTOR_WORDS * len(ends) + len(self.payload) <= capacity:
            yield described, self.payload
            return
        sizes = np.cumsum(lengths + DESCRIPTOR_WORDS)
        first, sent, begin = 0, 0, 0
        while first < len(ends):
            last = int(np.searchsorted(sizes, sent + capacity, side="right"))
            end = int(ends[last - 1])
            packet = described[first:last]
            packet[:, 0] -= begin << 2
            yield packet, self.payload[begin:end]
            first, sent, begin = last, int(sizes[last - 1]), end


@dataclass
class StagingStats:
    """What staging has done so far. A wait means that every ring entry was still in flight."""

    copies: int = 0
    bytes: int = 0
    waits: int = 0
    wait_seconds: float = 0.0


class _Entry:
    """One pinned buffer of a ring, and the event behind the last copy from it.

    mirror: where its words go on the device, for a ring that has such; else None.
    """

    def __init__(self, words: int, device: torch.device, mirrored: bool) -> None:
        on_gpu = device.type == "cuda"
        self.host = torch.empty(words, dtype=torch.int32, device="cpu", pin_memory=on_gpu)
        self.numpy: Words = self.host.numpy()
        self.mirror = (
            torch.empty(words, dtype=torch.int32, device=device)
            if mirrored and device.type != "cpu"
            else None
        )
        self.event = torch.cuda.Event() if on_gpu else None
        self.in_flight = False


class PinnedRing:
    """A ring of pinned buffers of int32 words; on devices other than CUDA, plain memory.

    An entry is re-used only after the event behind its copy. When all are in flight, the host waits
    for the oldest one, and `stats` counts it.
    """

    def __init__(
        self,
        device: torch.device,
        words: int,
        depth: int,
        stats: StagingStats,
        *,
        mirrored: bool = False,
    ) -> None:
        self.words = words
        self._on_gpu = device.type == "cuda"
        self._stats = stats
        self._entries = [_Entry(words, device, mirrored) for _ in range(depth)]
        self._next = 0

    def acquire(self) -> _Entry:
        if self._on_gpu and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "an upload inside a CUDA graph capture would be repeated for ever, with whatever "
                "the host's buffer holds by then: call RequestTable.upload() before the capture "
                "and before each replay, and capture steps with slots that are on the device"
            )
        entry = self._entries[self._next]
        self._next = (self._next + 1) % len(self._entries)
        if entry.event is not None and entry.in_flight:
            with captures_left_alone():
                self._wait(entry.event)
        return entry

    def _wait(self, event: torch.cuda.Event) -> None:
        if event.query():
            return
        start = time.perf_counter()
        event.synchronize()
        self._stats.waits += 1
        self._stats.wait_seconds += time.perf_counter() - start

    def release(self, entry: _Entry, words: int) -> None:
        """What reads `words` words of `entry` has been enqueued on the current stream."""
        self._stats.copies += 1
        self._stats.bytes += 4 * words
        if entry.event is not None:
            entry.event.record()
            entry.in_flight = True

    def upload(self, source: Words, destination: torch.Tensor) -> None:
        """Copy `source` (1-D) to `destination` (int32, contiguous, 1-D, of the same length)."""
        entry = self.acquire()
        words = len(source)
        try:
            entry.numpy[:words] = source
            destination.copy_(entry.host[:words], non_blocking=True)
        finally:
            self.release(entry, words)


class Uploader:
    """Sends segments to a table's tensors: one pinned copy and one scatter a packet."""

    def __init__(self, device: torch.device, *, entry_words: int = 2**16, depth: int = 4) -> None:
        self.stats = StagingStats()
        self._ring = PinnedRing(device, entry_words, depth, self.stats, mirrored=True)

    def send(
        self,
        segments: Segments,
        params: torch.Tensor,
        state: torch.Tensor,
        tables: torch.Tensor,
    ) -> None:
        """Enqueue the writes on the current stream."""
        for descriptors, payload in segments.packets(self._ring.words):
            entry = self._ring.acquire()
            header = DESCRIPTOR_WORDS * len(descriptors)
            used = header + len(payload)
            try:
                entry.numpy[:header] = descriptors.view(np.int32).reshape(-1)
                entry.numpy[header:used] = payload
                packet = entry.host
                if entry.mirror is not None:
                    packet = entry.mirror
                    packet[:used].copy_(entry.host[:used], non_blocking=True)
                torch.ops.graphed_sampling.scatter_segments(
                    params, state, tables, packet, len(descriptors), len(payload)
                )
            finally:
                self._ring.release(entry, used)
