"""Who notices that a rank is late, gone, or in another step, and names it.

A thread posts to the group's store, a few times within the timeout, which steps this rank entered.
Nothing is read there while all goes well but one key, an error that another rank has met. Only
where a step does not end within the timeout are the posts compared.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

_HISTORY: Final = 64
"""Steps that a post tells of: the host may be so many ahead of the device."""
_POSTS_IN_TIMEOUT: Final = 8
_LONGEST_INTERVAL: Final = 1.0  # seconds
_EVENTS: Final = 256


class RankError(RuntimeError):
    """A step did not end because of these ranks, or they stepped something else.

    ranks: ranks of the group, ascending; empty where it could not be told.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class StepHeader(NamedTuple):
    """What all ranks must do alike in a step. fingerprint: 0 where it is not known to the host."""

    step: int
    rows: int
    bucket: int
    inputs: int
    fingerprint: int = 0


class _Enqueued(NamedTuple):
    """A step on a GPU, the event behind it, and when that was recorded."""

    step: int
    event: torch.cuda.Event
    since: float


class Watchdog:
    """Bounds the waits of one sampler's steps on one rank.

    name: the same on all ranks, and no other watchdog's of the group. timeout: seconds that a step
    may take, with what comes before it on its stream.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, timeout: float, name: str
    ) -> None:
        self.group, self.timeout = group, timeout
        self.rank, self.size = group.rank(), group.size()
        self.interval = min(timeout / _POSTS_IN_TIMEOUT, _LONGEST_INTERVAL)
        self.failure: RankError | None = None
        self._on_gpu = device.type == "cuda"
        store: Any = distributed_c10d._get_process_group_store(group)
        # A connection of its own: a wait of another thread's must not hold this one up.
        self._store = distributed_c10d.PrefixStore(f"graphed_sampling/{name}", store.clone())
        self._store.set_timeout(timedelta(seconds=max(timeout, 1.0)))
        self._lock = threading.Lock()
        self._headers = deque([StepHeader(0, 0, 0, 0)], maxlen=_HISTORY)
        self._entered: _Enqueued | None = None
        self._pending: _Enqueued | None = None
        self._events = [torch.cuda.Event() for _ in range(_EVENTS)] if self._on_gpu else []
        self._beat = 0
        self._closed = threading.Event()
        thread = threading.Thread(
            target=_watch, args=(weakref.ref(self), self._closed, self.interval), daemon=True
        )
        weakref.finalize(self, self._closed.set)
        thread.start()

    def close(self) -> None:
        """End the thread. Later steps are not watched."""
        self._closed.set()

    def check(self) -> None:
        """Raise what has failed."""
        if self.failure is not None:
            raise self.failure

    def enter(self, header: StepHeader) -> None:
        """A step begins; raises what failed before."""
        self.check()
        self._headers.append(header)

    def leave(self) -> None:
        """The step's work has been done, or on a GPU enqueued on the current stream."""
        if self._on_gpu:
            step = self._headers[-1].step
            event = self._events[step % _EVENTS]
            event.record()
            self._entered = _Enqueued(step, event, time.monotonic())

    def fail(self, message: str, ranks: Sequence[int]) -> RankError:
        """Make this the failure of all ranks, unless there is one; returns the one that counts."""
        with self._lock:
            if self.failure is None:
                failure: dict[str, Any] = {"message": message, "ranks": list(ranks)}
                try:
                    # The first rank to say so is right; later ones may see its consequences.
                    found = self._store.compare_set("failure", "", json.dumps(failure))
                    failure = json.loads(found)
                except (RuntimeError, ValueError):
                    pass  # without a store everyone keeps its own opinion
                self.failure = RankError(failure["message"], failure["ranks"])
            return self.failure

    def diagnose(self, cause: str, step: int | None = None) -> RankError:
        """What all ranks' posts say of a step that did not end, by default the last one; it waits
        for the posts to come."""
        if step is None:
            step = self._headers[-1].step
        try:
            if self._adopt_failure():
                assert self.failure is not None
                return self.failure
            posts, silent = self._collect_posts(step)
        except RuntimeError as error:
            return self.fail(
                f"step {step} did not end ({_first_line(cause)}), and the group's store does not "
                "answer: the process that keeps it, rank 0 unless a launcher does, has ended "
                f"({_first_line(str(error))})",
                (),
            )
        headers = {rank: post.get(step) for rank, post in posts.items()}
        missing = [rank for rank, header in headers.items() if header is None]
        if missing:
            names = ", ".join(map(str, missing))
            gone = ", ".join(str(rank) for rank in missing if rank in silent)
            told = f"; the process of rank {gone} does not answer" if gone else ""
            return self.fail(
                f"step {step} did not end: rank {names} did not reach it within {self.timeout:g} s"
                f"{told} ({_first_line(cause)})",
                missing,
            )
        return self.disagreement(
            {rank: header for rank, header in headers.items() if header is not None}
        ) or self.fail(
            f"step {step} did not end within {self.timeout:g} s, although all ranks reached it "
            f"({_first_line(cause)})",
            (),
        )

    def disagreement(self, headers: Mapping[int, StepHeader]) -> RankError | None:
        """The failure that ranks have other headers than most; None where all are equal."""
        for name in StepHeader._fields:
            values = {rank: getattr(header, name) for rank, header in headers.items()}
            usual = Counter(values.values()).most_common(1)[0][0]
            others = [rank for rank, value in values.items() if value != usual]
            if others:
                told = ", ".join(f"{value} on rank {rank}" for rank, value in values.items())
                if name == "fingerprint":
                    names = ", ".join(map(str, others))
                    told = f"rank {names} differs in slots, parameters or state of requests"
                step = headers[self.rank].step
                return self.fail(f"step {step}: the ranks disagree in {name}: {told}", others)
        return None

    # The thread's part, and what diagnosis shares with it.

    def _post(self) -> None:
        self._beat += 1
        headers = [list(header) for header in tuple(self._headers)]
        self._store.set(f"post/{self.rank}", json.dumps({"beat": self._beat, "headers": headers}))

    def _adopt_failure(self) -> bool:
        """Take over another rank's failure, if there is one."""
        if self.failure is None and self._store.check(["failure"]):
            found: dict[str, Any] = json.loads(self._store.get("failure"))
            with self._lock:
                self.failure = self.failure or RankError(found["message"], found["ranks"])
        return self.failure is not None

    def _collect_posts(self, step: int) -> tuple[dict[int, dict[int, StepHeader]], set[int]]:
        """Every rank's headers by step, as soon as all tell of the step, or nobody else will; and
        the ranks that posted nothing meanwhile."""
        self._post()
        end = time.monotonic() + 3 * self.interval
        first_beats: dict[int, int] = {}
        while True:
            posts, silent = {}, set()
            for rank in range(self.size):
                key = f"post/{rank}"
                found = json.loads(self._store.get(key)) if self._store.check([key]) else {}
                headers = [StepHeader(*header) for header in found.get("headers", ())]
                posts[rank] = {header.step: header for header in headers}
                beat = found.get("beat", 0)
                if first_beats.setdefault(rank, beat) == beat:
                    silent.add(rank)
            if all(step in post for post in posts.values()) or time.monotonic() > end:
                return posts, silent
            time.sleep(self.interval / 4)

    def watch(self) -> None:
        """One round of the thread. RuntimeError where the store has gone."""
        self._post()
        if self._adopt_failure() or not self._on_gpu:
            return
        # Steps follow each other on one stream: look at one until it has ended, then at the newest.
        pending, newest = self._pending or self._entered, self._entered
        self._pending = None
        if pending is None or newest is None or pending.event.query():
            return
        if newest.step - pending.step >= _EVENTS:
            return  # its event is another step's by now
        self._pending = pending
        if time.monotonic() - pending.since > self.timeout:
            self.diagnose("the device has not finished it", pending.step)
            # What hangs in a collective ends only with the communicator.
            self.group.abort()


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:200]


def _watch(reference: weakref.ref[Watchdog], closed: threading.Event, interval: float) -> None:
    while not closed.wait(interval):
        watchdog = reference()
        if watchdog is None:
            return
        try:
            watchdog.watch()
        except RuntimeError:
            return  # the store has gone; a step that fails of it says so
        del watchdog
