"""The way from the host to the device records: pinned rings and the packed scatter of dirty rows.

A packet is what one copy brings: descriptors of `DESCRIPTOR_WORDS` int32 words, then the payload.

    word 0   target (`Target`) | start of the segment's payload, in words, << 2
    word 1   length in words
    word 2,3 flat destination offset in the target, in words: 64 bits, low word first

Segments follow each other in the payload without gaps, and no two of a packet overlap.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

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
    """Writes to come: int64 targets, offsets and lengths, one each a segment, and their payload."""

    targets: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    payload: Words

    @classmethod
    def run(cls, target: Target, offset: int, payload: Words) -> Segments:
        """One contiguous write, cut where it is too long for one segment."""
        starts = np.arange(0, len(payload), _MAX_SEGMENT_WORDS, dtype=np.int64)
        lengths = np.minimum(len(payload) - starts, _MAX_SEGMENT_WORDS)
        return cls(np.full(len(starts), target, np.int64), offset + starts, lengths, payload)

    @classmethod
    def single_words(
        cls, target: Target, offsets: npt.NDArray[np.int64], values: Words
    ) -> Segments:
        """Scattered writes of one word each; the offsets differ."""
        count = len(offsets)
        return cls(np.full(count, target, np.int64), offsets, np.ones(count, np.int64), values)

    @classmethod
    def join(cls, parts: list[Segments]) -> Segments:
        return cls(
            np.concatenate([p.targets for p in parts]),
            np.concatenate([p.offsets for p in parts]),
            np.concatenate([p.lengths for p in parts]),
            np.concatenate([p.payload for p in parts]),
        )

    def write_packet(self, first: int, last: int, packet: Words) -> tuple[int, int]:
        """Write segments first..last-1 into `packet`; returns the numbers of segments and words."""
        ends = np.cumsum(self.lengths)
        begin = int(ends[first] - self.lengths[first])
        end = int(ends[last - 1])
        count, words = last - first, end - begin
        descriptors = packet[: count * DESCRIPTOR_WORDS].reshape(count, DESCRIPTOR_WORDS)
        starts = ends[first:last] - self.lengths[first:last] - begin
        descriptors[:, 0] = self.targets[first:last] | (starts << 2)
        descriptors[:, 1] = self.lengths[first:last]
        descriptors[:, 2:4] = self.offsets[first:last].view(np.int32).reshape(count, 2)
        packet[count * DESCRIPTOR_WORDS :][:words] = self.payload[begin:end]
        return count, words

    def pieces(self, capacity: int) -> list[tuple[int, int]]:
        """Ranges of segments whose packets have at most `capacity` words each."""
        ends = np.cumsum(self.lengths + DESCRIPTOR_WORDS)
        pieces: list[tuple[int, int]] = []
        first, sent = 0, 0
        while first < len(ends):
            last = int(np.searchsorted(ends, sent + capacity, side="right"))
            pieces.append((first, last))
            first, sent = last, int(ends[last - 1])
        return pieces


@dataclass
class StagingStats:
    """What staging has done so far. A wait means that every ring entry was still in flight."""

    copies: int = 0
    bytes: int = 0
    waits: int = 0
    wait_seconds: float = 0.0


class _Entry:
    """One pinned buffer of a ring, and the event behind the last copy from it."""

    def __init__(self, words: int, pinned: bool) -> None:
        self.host = torch.empty(words, dtype=torch.int32, device="cpu", pin_memory=pinned)
        self.numpy: Words = self.host.numpy()
        self.event = torch.cuda.Event() if pinned else None
        self.in_flight = False


class PinnedRing:
    """A ring of pinned buffers of int32 words; on devices other than CUDA, plain memory.

    An entry is re-used only after the event behind its copy. When all are in flight, the host waits
    for the oldest one, and `stats` counts it.
    """

    def __init__(self, device: torch.device, words: int, depth: int, stats: StagingStats) -> None:
        self.words = words
        self._stats = stats
        self._entries = [_Entry(words, device.type == "cuda") for _ in range(depth)]
        self._next = 0

    def acquire(self) -> _Entry:
        entry = self._entries[self._next]
        self._next = (self._next + 1) % len(self._entries)
        if entry.event is not None and entry.in_flight and not entry.event.query():
            start = time.perf_counter()
            entry.event.synchronize()
            self._stats.waits += 1
            self._stats.wait_seconds += time.perf_counter() - start
        return entry

    def release(self, entry: _Entry, words: int) -> None:
        """The copy out of `entry` has been enqueued on the current stream."""
        self._stats.copies += 1
        self._stats.bytes += 4 * words
        if entry.event is not None:
            entry.event.record()
            entry.in_flight = True

    def upload(self, source: Words, destination: torch.Tensor) -> None:
        """Copy `source` (contiguous) to the first words of `destination` (int32, contiguous)."""
        entry = self.acquire()
        words = source.size
        entry.numpy[:words] = source.reshape(-1)
        destination.view(-1)[:words].copy_(entry.host[:words], non_blocking=True)
        self.release(entry, words)


class Uploader:
    """Sends segments to a table's tensors: one pinned copy and one scatter a packet."""

    def __init__(self, device: torch.device, *, entry_words: int = 2**16, depth: int = 4) -> None:
        self.stats = StagingStats()
        self._ring = PinnedRing(device, entry_words, depth, self.stats)
        # Where the scatter reads on the device: one buffer an entry, so that the event behind an
        # entry covers both.
        self._device_buffers = (
            {
                id(entry): torch.empty(entry_words, dtype=torch.int32, device=device)
                for entry in self._ring._entries
            }
            if device.type != "cpu"
            else {}
        )

    def send(
        self,
        segments: Segments,
        params: torch.Tensor,
        state: torch.Tensor,
        tables: torch.Tensor,
    ) -> None:
        """Enqueue the writes on the current stream."""
        for first, last in segments.pieces(self._ring.words):
            entry = self._ring.acquire()
            count, words = segments.write_packet(first, last, entry.numpy)
            packet = entry.host
            used = count * DESCRIPTOR_WORDS + words
            if self._device_buffers:
                packet = self._device_buffers[id(entry)]
                packet[:used].copy_(entry.host[:used], non_blocking=True)
            torch.ops.graphed_sampling.scatter_segments(params, state, tables, packet, count, words)
            self._ring.release(entry, used)
