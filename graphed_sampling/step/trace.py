"""What a loop did when: spans for a picture, and totals for whoever watches it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Final, NamedTuple

LANES: Final = ("GPU", "CPU phase", "event loop")


class Span(NamedTuple):
    """Something in a lane of `LANES`. Seconds of `time.perf_counter`."""

    lane: str
    name: str
    start: float
    end: float


class Tracer:
    """Collects spans, the newest `limit` of them."""

    def __init__(self, limit: int = 100_000) -> None:
        self.spans: deque[Span] = deque(maxlen=limit)

    def add(self, lane: str, name: str, start: float, end: float) -> None:
        self.spans.append(Span(lane, name, start, end))


@dataclass
class LoopTotals:
    """Of a loop so far. gpu_idle_seconds: between steps, unless there was nothing to do."""

    steps: int = 0
    tokens: int = 0
    rows: int = 0
    """Row-steps, those included whose request had ended by the time they were known."""
    gpu_seconds: float = 0.0
    gpu_idle_seconds: float = 0.0
    requests: int = 0
    cancelled: int = 0


class LagProbe:
    """How long the event loop lets others wait: a thread asks it now and then, and it answers.

    lags: seconds from the question to the answer, the newest `limit`. On the same clock a timer of
    asyncio's own would be late by up to a millisecond for its rounding alone.
    """

    def __init__(
        self,
        *,
        every: float = 0.001,
        limit: int = 100_000,
        tracer: Tracer | None = None,
    ) -> None:
        self.lags: deque[float] = deque(maxlen=limit)
        self._every = every
        self._tracer = tracer
        self._stop = threading.Event()

    def start(self) -> None:
        """In the running loop."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._ask, args=(loop,), name="lag-probe", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    @property
    def stopped(self) -> bool:
        return self._stop.is_set()

    def quantile(self, share: float) -> float:
        """Of the lags so far, in seconds; 0 where there is none."""
        lags = sorted(self.lags)
        return lags[min(int(share * len(lags)), len(lags) - 1)] if lags else 0.0

    def _ask(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._stop.wait(self._every):
            try:
                loop.call_soon_threadsafe(self._answer, time.perf_counter())
            except RuntimeError:
                return  # the loop is closed

    def _answer(self, asked: float) -> None:
        now = time.perf_counter()
        self.lags.append(now - asked)
        if self._tracer is not None:
            self._tracer.add("event loop", "lag", asked, now)
