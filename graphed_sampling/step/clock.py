"""When the device did what: events on a GPU, so that nothing waits, and the clock elsewhere."""

from __future__ import annotations

import time

import torch

from graphed_sampling.captures import captures_left_alone


class Base:
    """A moment on the GPU whose time on the host's clock is known."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record(stream)
        with captures_left_alone():
            self.event.synchronize()
        self.seconds = time.perf_counter()


class Mark:
    """A moment of the device's work."""

    def __init__(self, base: Base | None) -> None:
        self._base = base
        if base is None:
            self._time = time.perf_counter()
        else:
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    def until(self, later: Mark) -> float:
        """Seconds; both have passed."""
        if self._base is None:
            return later._time - self._time
        return float(self._event.elapsed_time(later._event)) / 1000

    def seconds(self) -> float:
        """On the host's clock."""
        if self._base is None:
            return self._time
        return self._base.seconds + float(self._base.event.elapsed_time(self._event)) / 1000


class Clock:
    """When a step's GPU phase began and ended on the device."""

    def __init__(self, base: Base | None) -> None:
        self._base = base
        self.begin: Mark | None = None
        self.end: Mark | None = None

    def start(self) -> None:
        self.begin = Mark(self._base)

    def stop(self) -> None:
        self.end = Mark(self._base)
