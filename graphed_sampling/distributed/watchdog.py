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
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from graphed_sampling.captures import leave_captures_alone

_HISTORY: Final = 64
"""Steps that a post tells of: the host may be so many ahead of the device."""
_TRAIL_STEPS: Final = 64
"""From hash to hash: of more steps than a post's headers tell of."""
_POSTS_IN_TIMEOUT: Final = 8
_LONGEST_INTERVAL: Final = 1.0  # seconds
_EVENTS: Final = 256
_JOIN_SECONDS: Final = 5.0
"""For the thread's last words with the store, which take milliseconds while that answers."""


class RankError(RuntimeError):
    """A step did not end because of these ranks, or they stepped something else.

    ranks: ranks of the group, ascending; empty where it could not be told. Where ranks disagree,
    those that differ from most; of two, the second.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class StepHeader(NamedTuple):
    """What all ranks must do alike in a step.

    sampler: a number of its own. rows, bucket: how many there are, and the bucket they run in.
    inputs: which optional ones there are. fingerprint: `RequestTable.fingerprint`, 0 where slots
    are on a GPU.
    """

    sampler: int
    step: int
    rows: int
    bucket: int
    inputs: int
    fingerprint: int


class _Enqueued(NamedTuple):
    """A step on a GPU, the event behind it, and when that was recorded."""

    step: int
    event: torch.cuda.Event
    since: float


class _Post(NamedTuple):
    """What a rank tells: a number that grows, its last headers by step, and hashes of all steps up
    to some that are further back."""

    beat: int
    headers: dict[int, StepHeader]
    trails: dict[int, int]

    @property
    def newest(self) -> int:
        """The last step that the rank has entered; -1 of one that has not posted yet."""
        return max(self.headers, default=-1)


class Watchdog:
    """Bounds the waits of one sampler's steps on one rank.

    name: hexadecimal, the same on all ranks, and no other watchdog's of the group. timeout: seconds
    that a step may take, with what comes before it on its stream. aborts: whether to end a step
    that hangs on a GPU with the group's communicator.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        timeout: float,
        name: str,
        *,
        aborts: bool,
    ) -> None:
        self.group, self.timeout = group, timeout
        self.rank, self.size = group.rank(), group.size()
        self.interval = min(timeout / _POSTS_IN_TIMEOUT, _LONGEST_INTERVAL)
        self.failure: RankError | None = None
        self._on_gpu, self._aborts = device.type == "cuda", aborts
        store: Any = distributed_c10d._get_process_group_store(group)
        # A connection of its own: a wait of another thread's must not hold this one up.
        self._store = distributed_c10d.PrefixStore(f"graphed_sampling/{name}", store.clone())
        self._store.set_timeout(timedelta(seconds=max(timeout, 1.0)))
        self._lock = threading.Lock()
        # Tuples, which the thread may read while a step puts others in their place.
        before_all = StepHeader(int(name, 16) & 2**63 - 1, 0, 0, 0, 0, 0)
        self._headers: tuple[StepHeader, ...] = (before_all,)
        self._trail = 0
        self._trails: tuple[tuple[int, int], ...] = ()
        self._newest: _Enqueued | None = None
        self._pending: _Enqueued | None = None
        self._events = [torch.cuda.Event() for _ in range(_EVENTS)] if self._on_gpu else []
        self._beat = 0
        self._closed = threading.Event()
        self._store_answers = True
        thread = threading.Thread(
            target=_watch,
            args=(weakref.ref(self), self._closed, self.interval, self._on_gpu),
            daemon=True,
        )
        # When the interpreter exits too: a thread that comes back from the store then ends it.
        self._finalizer = weakref.finalize(self, _end, self._closed, thread)
        thread.start()

    def close(self) -> None:
        """End the thread, and the sampler's steps."""
        self._finalizer()

    @property
    def header(self) -> StepHeader:
        """Of the last step that was entered."""
        return self._headers[-1]

    def enter(self, header: StepHeader) -> None:
        """A step begins; raises what failed before."""
        if self.failure is not None:
            raise self.failure
        if self._closed.is_set():
            raise RuntimeError("the sampler was closed: it takes no more steps")
        self._headers = (*self._headers[1 - _HISTORY :], header)
        self._trail = hash((self._trail, header))
        if header.step % _TRAIL_STEPS == 0:
            self._trails = (*self._trails[1 - _HISTORY :], (header.step, self._trail))

    def leave(self) -> None:
        """The step's work has been done, or on a GPU enqueued on the current stream."""
        if self._on_gpu:
            step = self.header.step
            event = self._events[step % _EVENTS]
            event.record()
            self._newest = _Enqueued(step, event, time.monotonic())

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
            step = self.header.step
        try:
            if self._adopt_failure():
                assert self.failure is not None
                return self.failure
            posts, silent = self._wait_for_posts(step)
        except RuntimeError as error:
            return self.fail(
                f"step {step} did not end ({_first_line(cause)}), and the group's store does not "
                "answer: the process that keeps it, rank 0 unless a launcher does, has ended "
                f"({_first_line(str(error))})",
                (),
            )
        missing = [rank for rank, post in posts.items() if post.newest < step]
        if missing:
            gone = [rank for rank in missing if rank in silent]
            told = f"; the process of rank {_listed(gone)} does not answer" if gone else ""
            return self.fail(
                f"step {step} did not end: rank {_listed(missing)} did not reach it within "
                f"{self.timeout:g} s{told} ({_first_line(cause)})",
                missing,
            )
        # Hosts that are far ahead tell no more of the step.
        headers = {r: post.headers[step] for r, post in posts.items() if step in post.headers}
        return self.disagreement(step, headers) or self.fail(
            f"step {step} did not end within {self.timeout:g} s, although all ranks reached it "
            f"({_first_line(cause)})",
            (),
        )

    def disagreement(self, step: int, headers: Mapping[int, StepHeader]) -> RankError | None:
        """The failure that ranks have other headers than most; None where all are equal."""
        for name in StepHeader._fields:
            values = {rank: getattr(header, name) for rank, header in headers.items()}
            usual = Counter(values.values()).most_common(1)
            others = [rank for rank, value in values.items() if value != usual[0][0]]
            if others:
                told = f"{name}: " + ", ".join(f"{v} on rank {rank}" for rank, v in values.items())
                if name == "fingerprint":
                    told = f"rank {_listed(others)} has other slots, or other requests in them"
                if name == "sampler":
                    told = f"rank {_listed(others)} steps another sampler of the group"
                return self.fail(f"step {step}: the ranks disagree, {told}", others)
        return None

    # The thread's part, and what diagnosis shares with it.

    def watch(self) -> None:
        """One round of the thread."""
        if self._store_answers:
            try:
                self._post()
                self._adopt_failure()
                if self._on_gpu and self.failure is None:
                    self._compare()
            except RuntimeError:
                self._store_answers = False  # a step that fails of it says so
        if not self._on_gpu:
            return  # there a step begins with a comparison, and all waits are bounded
        pending = self._find_pending()
        if pending is None:
            return
        waited = time.monotonic() - pending.since
        if self.failure is None and waited > self.timeout:
            self.diagnose("the device has not finished it", pending.step)
        if self.failure is not None and waited > self.timeout / 2 and self._aborts:
            # What hangs in a collective, on whatever rank, ends only with the communicator.
            self._aborts = False
            self.group.abort()

    def _find_pending(self) -> _Enqueued | None:
        """A step that the device has not ended. Steps follow each other on one stream: one is
        looked at until it has ended, then the newest."""
        pending, newest = self._pending or self._newest, self._newest
        self._pending = None
        # One that is so old has an event that is another's by now.
        if pending is None or newest is None or newest.step - pending.step >= _EVENTS:
            return None
        if not pending.event.query():
            self._pending = pending
        return self._pending

    def _post(self) -> None:
        self._beat += 1
        post = {
            "beat": self._beat,
            "headers": self._headers,
            "trails": self._trails,
        }
        self._store.set(f"post/{self.rank}", json.dumps(post))

    def _read_posts(self) -> dict[int, _Post]:
        posts = {}
        for rank in range(self.size):
            key = f"post/{rank}"
            found = json.loads(self._store.get(key)) if self._store.check([key]) else {}
            headers = [StepHeader(*header) for header in found.get("headers", ())]
            posts[rank] = _Post(
                found.get("beat", 0),
                {header.step: header for header in headers},
                dict(found.get("trails", ())),
            )
        return posts

    def _wait_for_posts(self, step: int) -> tuple[dict[int, _Post], set[int]]:
        """Every rank's post, as soon as all tell of the step, or nobody else will; and the ranks
        that posted nothing meanwhile."""
        self._post()
        end = time.monotonic() + 3 * self.interval
        first = self._read_posts()
        while True:
            posts = self._read_posts()
            if all(post.newest >= step for post in posts.values()) or time.monotonic() > end:
                return posts, {r for r, post in posts.items() if post.beat == first[r].beat}
            time.sleep(self.interval / 4)

    def _compare(self) -> None:
        """Fail where ranks have entered different steps, as far as their posts tell of the same."""
        posts = self._read_posts()
        common = set.intersection(*(set(post.headers) for post in posts.values()))
        for step in sorted(common):
            if self.disagreement(step, {r: post.headers[step] for r, post in posts.items()}):
                return
        common = set.intersection(*(set(post.trails) for post in posts.values()))
        for step in sorted(common):
            trails = [post.trails[step] for post in posts.values()]
            usual = max(trails, key=trails.count)
            others = [rank for rank, trail in zip(posts, trails, strict=True) if trail != usual]
            if others:
                told = f"rank {_listed(others)} stepped other rows, slots or requests"
                self.fail(f"at step {step} or before: {told}", others)
                return

    def _adopt_failure(self) -> bool:
        """Take over another rank's failure, if there is one."""
        if self.failure is None and self._store.check(["failure"]):
            found: dict[str, Any] = json.loads(self._store.get("failure"))
            with self._lock:
                self.failure = self.failure or RankError(found["message"], found["ranks"])
        return self.failure is not None


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:200]


def _watch(
    reference: weakref.ref[Watchdog], closed: threading.Event, interval: float, on_gpu: bool
) -> None:
    if on_gpu:
        leave_captures_alone()
    while not closed.wait(interval):
        watchdog = reference()
        if watchdog is None:
            return
        try:
            watchdog.watch()
        except RuntimeError:
            return  # the device has failed: whatever comes next there says so
        del watchdog


def _end(closed: threading.Event, thread: threading.Thread) -> None:
    closed.set()
    if thread is not threading.current_thread():
        thread.join(_JOIN_SECONDS)
