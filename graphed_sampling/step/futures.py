"""`gpu_future`: what a stream has been given so far, as a future of asyncio.

    event = record on the stream
    eventfd   a side stream waits for the event, then a callback in C++ writes an eventfd, which the
              loop watches: nothing polls and no thread waits
    poll      event.query() by the loop itself, at first in every round, then ever more rarely
    thread    event.synchronize() in a thread

CUDA runs no callback once its context is in error. So each loop has a watchdog, which looks at the
events of everything in flight now and then: an error reaches the waiter as an exception.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, ClassVar, Final, Literal, Protocol, TypeVar, get_args

import torch

from graphed_sampling._build_info import load_native
from graphed_sampling.captures import captures_left_alone, leave_captures_alone

T = TypeVar("T")
Wait = Literal["auto", "eventfd", "poll", "thread"]

WATCHDOG_SECONDS: Final = 0.5
_EAGER_POLLS: Final = 50
"""So many rounds of the loop ask at once, some 10 us each; what takes longer can wait a little."""
_LONGEST_PAUSE: Final = 0.002
_SPARE_DESCRIPTORS: Final = 64
_WAITING_THREADS: Final = 16


class Event(Protocol):
    """What is needed of `torch.cuda.Event`."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


def eventfd_problem() -> str:
    """Why wait="eventfd" cannot be had here; empty where it can."""
    if not hasattr(os, "eventfd"):
        return "this system has no eventfd"
    if not load_native():
        return "the native library is not in use"
    return ""


def check_wait(wait: str) -> None:
    """ValueError for a way of waiting that is not known or cannot be had here."""
    if wait not in get_args(Wait):
        names = ", ".join(repr(name) for name in get_args(Wait))
        raise ValueError(f"wait = {wait!r} is not accepted: one of {names}")
    if wait == "eventfd" and (problem := eventfd_problem()):
        raise ValueError(f"wait = 'eventfd' is not accepted: {problem}; wait='poll' serves")


def gpu_future(
    stream: torch.cuda.Stream | HostStream | None = None, *, wait: Wait = "auto"
) -> asyncio.Future[None]:
    """A future of the running loop, done when everything enqueued on `stream` so far is.

    stream: None is torch's current one. wait: "eventfd", "poll" or "thread"; "auto" is eventfd
    where the native library and the system have it, and poll elsewhere. A `HostStream`, and None
    without CUDA, are work of the CPU, which an executor completes; `wait` does not matter there.
    The stream is not held up. A future may be cancelled at any time, which stops nothing that the
    stream does. An error of CUDA is the future's exception, after at most a second.
    ValueError for arguments that are not accepted, and for a stream that is being captured.
    """
    check_wait(wait)
    loop = asyncio.get_running_loop()
    if isinstance(stream, HostStream):
        return stream.future()
    if stream is None and not torch.cuda.is_available():
        return loop.run_in_executor(None, _nothing)
    if stream is None:
        stream = torch.cuda.current_stream()
    if not isinstance(stream, torch.cuda.Stream):
        raise ValueError(
            f"stream is {type(stream).__name__}: it must be a torch.cuda.Stream, a HostStream "
            "or None"
        )
    with torch.cuda.stream(stream):  # it is the one that is asked, whatever else captures
        if torch.cuda.is_current_stream_capturing():
            raise ValueError("stream is being captured: GraphSignal signals from inside a graph")
        if wait == "auto":
            wait = "poll" if eventfd_problem() else "eventfd"
        event = torch.cuda.Event(blocking=wait == "thread")
        event.record(stream)

    def signal(fd: int) -> None:
        device, handle = stream.device_index, stream.cuda_stream
        torch.ops.graphed_sampling.signal_fd(device, handle, event.cuda_event, fd)

    return event_future(event, wait, signal)


def event_future(event: Event, wait: str, signal: Callable[[int], None]) -> asyncio.Future[None]:
    """A future that is done when `event` has passed.

    signal: sees to it that a descriptor is written once then; for wait="eventfd".
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()
    if wait == "eventfd":
        _Hub.of(loop).watch(future, event, signal)
    elif wait == "poll":
        _Poll(loop, future, event)()
    else:
        return loop.run_in_executor(_waiting_threads(), event.synchronize)
    return future


def _nothing() -> None:
    pass


# --------------------------------------------------------------------------- poll, thread


class _Poll:
    def __init__(
        self, loop: asyncio.AbstractEventLoop, future: asyncio.Future[None], event: Event
    ) -> None:
        self._loop, self._future, self._event = loop, future, event
        self._rounds = 0

    def __call__(self) -> None:
        if self._future.done():  # cancelled
            return
        try:
            with captures_left_alone():
                passed = self._event.query()
        except Exception as error:
            self._future.set_exception(error)
            return
        if passed:
            self._future.set_result(None)
            return
        self._rounds += 1
        if self._rounds < _EAGER_POLLS:
            self._loop.call_soon(self)
        else:
            pause = 5e-5 * 2 ** min(self._rounds - _EAGER_POLLS, 10)
            self._loop.call_later(min(pause, _LONGEST_PAUSE), self)


_threads: ThreadPoolExecutor | None = None
_threads_lock = threading.Lock()


def _waiting_threads() -> ThreadPoolExecutor:
    global _threads
    with _threads_lock:
        if _threads is None:
            _threads = ThreadPoolExecutor(
                _WAITING_THREADS, thread_name_prefix="gpu-future", initializer=leave_captures_alone
            )
        return _threads


# --------------------------------------------------------------------------- eventfd


class _Descriptors:
    """The process's eventfds: in use, spare, or adrift.

    Adrift is one whose waiter is gone while its signal may still come: closing it would let the
    signal write to whatever gets its number next. It is of use again once the signal was there.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        # A child of a fork shares the parent's counters, so it leaves them alone.
        self._lock = threading.Lock()
        self.spare: list[int] = []
        self.adrift: list[int] = []

    def take(self) -> int:
        with self._lock:
            if not self.spare and self.adrift:
                self._look_for_late_signals()
            if self.spare:
                return self.spare.pop()
        return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def give_back(self, fd: int) -> None:
        """Its one signal has been read, or will never be sent."""
        with self._lock:
            if len(self.spare) < _SPARE_DESCRIPTORS:
                self.spare.append(fd)
                return
        os.close(fd)

    def set_adrift(self, fd: int) -> None:
        with self._lock:
            self.adrift.append(fd)

    def _look_for_late_signals(self) -> None:
        still = []
        for fd in self.adrift:
            try:
                os.eventfd_read(fd)
            except BlockingIOError:
                still.append(fd)
            else:
                self.spare.append(fd)
        self.adrift = still


DESCRIPTORS: Final = _Descriptors()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=DESCRIPTORS.reset)


class _Hub:
    """What one loop waits for by eventfd. All of it runs in the loop's own thread."""

    _hubs: ClassVar[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Hub]] = (
        weakref.WeakKeyDictionary()
    )
    _hubs_lock = threading.Lock()

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> _Hub:
        with cls._hubs_lock:
            hub = cls._hubs.get(loop)
            if hub is None:
                # Futures refer to their loop, so closed ones would stay for ever.
                for closed in [other for other in cls._hubs if other.is_closed()]:
                    cls._hubs.pop(closed)._abandon()
                hub = cls._hubs[loop] = cls()
            return hub

    def __init__(self) -> None:
        self._in_flight: dict[int, tuple[asyncio.Future[None], Event]] = {}
        self._passed: set[int] = set()  # by the watchdog's last look
        self._watched = False

    def _abandon(self) -> None:
        """The loop is closed, and with it whoever waited."""
        for fd in self._in_flight:
            DESCRIPTORS.set_adrift(fd)
        self._in_flight.clear()

    def watch(
        self, future: asyncio.Future[None], event: Event, signal: Callable[[int], None]
    ) -> None:
        loop = asyncio.get_running_loop()
        fd = DESCRIPTORS.take()
        try:
            loop.add_reader(fd, self._arrived, fd)
            signal(fd)
        except BaseException:
            loop.remove_reader(fd)
            DESCRIPTORS.give_back(fd)
            raise
        self._in_flight[fd] = future, event
        if not self._watched:
            self._watched = True
            loop.call_later(WATCHDOG_SECONDS, self._look)

    def _arrived(self, fd: int) -> None:
        try:
            os.eventfd_read(fd)
        except BlockingIOError:
            return
        future, _ = self._forget(fd)
        DESCRIPTORS.give_back(fd)
        if not future.done():
            future.set_result(None)

    def _forget(self, fd: int) -> tuple[asyncio.Future[None], Event]:
        asyncio.get_running_loop().remove_reader(fd)
        self._passed.discard(fd)
        return self._in_flight.pop(fd)

    def _look(self) -> None:
        """The watchdog: errors to their waiters, and whoever's signal got lost is not forgotten."""
        for fd, (future, event) in list(self._in_flight.items()):
            try:
                with captures_left_alone():
                    passed = event.query()
            except Exception as error:
                self._forget(fd)
                DESCRIPTORS.set_adrift(fd)
                if not future.done():
                    future.set_exception(error)
                continue
            # A signal may be on its way: only the second look in a row tells.
            if passed and fd in self._passed:
                self._forget(fd)
                DESCRIPTORS.set_adrift(fd)
                if not future.done():
                    future.set_result(None)
            elif passed:
                self._passed.add(fd)
        self._watched = bool(self._in_flight)
        if self._watched:
            asyncio.get_running_loop().call_later(WATCHDOG_SECONDS, self._look)


class GraphSignal:
    """A signal that is captured in a CUDA graph, so that each replay completes one future.

    Made while the stream (None: torch's current one) captures; it fires when all that was captured
    on the stream before it is done, on a branch that holds up nothing after it. Then, for each
    replay: `graph.replay()`, and `signal.future()` in a running loop, in this order. The object
    belongs to the loop that asks first; `close()` when the graph is not replayed any more.
    ValueError for a stream that does not capture, or where there is no eventfd.
    """

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        if problem := eventfd_problem():
            raise ValueError(f"a GraphSignal cannot be made: {problem}")
        stream = stream or torch.cuda.current_stream()
        with torch.cuda.stream(stream):
            if not torch.cuda.is_current_stream_capturing():
                raise ValueError("a GraphSignal is made while the stream captures")
            self._open()
            torch.ops.graphed_sampling.capture_signal_fd(stream.cuda_stream, self._fd)

    def _open(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._close = weakref.finalize(self, os.close, self._fd)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._issued = self._arrived = 0
        self._waiting: dict[int, tuple[asyncio.Future[None], Event]] = {}
        self._watched = False

    def future(self, event: Event | None = None) -> asyncio.Future[None]:
        """Of the replay that was enqueued last; one call for each replay.

        event: recorded behind the replay, for the watchdog; None records one on the current stream.
        """
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            loop.add_reader(self._fd, self._read)
        if loop is not self._loop:
            raise ValueError("this GraphSignal belongs to another event loop")
        if event is None:
            event = torch.cuda.Event()
            event.record()
        future: asyncio.Future[None] = loop.create_future()
        self._issued += 1
        if self._issued <= self._arrived:
            future.set_result(None)
        else:
            self._waiting[self._issued] = future, event
            if not self._watched:
                self._watched = True
                loop.call_later(WATCHDOG_SECONDS, self._look)
        return future

    def close(self) -> None:
        """Waiters that are left are cancelled."""
        if self._loop is not None and not self._loop.is_closed() and self._close.alive:
            self._loop.remove_reader(self._fd)
        for future, _ in self._waiting.values():
            future.cancel()
        self._waiting.clear()
        self._close()

    def _read(self) -> None:
        try:
            self._arrived += os.eventfd_read(self._fd)
        except BlockingIOError:
            return
        for ticket in [t for t in self._waiting if t <= self._arrived]:
            future, _ = self._waiting.pop(ticket)
            if not future.done():
                future.set_result(None)

    def _look(self) -> None:
        for ticket, (future, event) in list(self._waiting.items()):
            try:
                with captures_left_alone():
                    event.query()
            except Exception as error:
                del self._waiting[ticket]
                if not future.done():
                    future.set_exception(error)
        self._watched = bool(self._waiting)
        if self._watched:
            asyncio.get_running_loop().call_later(WATCHDOG_SECONDS, self._look)


# --------------------------------------------------------------------------- the CPU's stream


class HostStream:
    """Work of the CPU, done in order by one thread: to an event loop what a CUDA stream is.

    The thread is a daemon: a process that ends does not wait for it.
    """

    def __init__(self, name: str = "host-stream") -> None:
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=_work, args=(self._queue,), name=name, daemon=True)
        self._thread.start()
        weakref.finalize(self, self._queue.put, None)

    def submit(self, function: Callable[[], T]) -> concurrent.futures.Future[T]:
        """Have `function` called after everything before; its error is in the future alone."""
        if self._closed:
            raise RuntimeError("this HostStream is closed")
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._queue.put((future, function))
        return future

    def run(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """`submit`, with a future of the running loop; cancelling it does not stop the work."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def tell(job: concurrent.futures.Future[T]) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(_copy_result, job, future)

        self.submit(function).add_done_callback(tell)
        return future

    def future(self) -> asyncio.Future[None]:
        """Done, in the running loop, when everything submitted so far is."""
        return self.run(_nothing)

    def close(self) -> None:
        """End the thread after what was submitted; waits for nothing."""
        self._closed = True
        self._queue.put(None)


def plain_error(error: BaseException) -> Exception:
    """`error`, or one that it is the cause of where asyncio gives it a meaning of its own."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    plain = RuntimeError(f"{error!r} was raised")
    plain.__cause__ = error
    return plain


def _copy_result(job: concurrent.futures.Future[T], future: asyncio.Future[T]) -> None:
    if future.done():  # cancelled
        return
    if (error := job.exception()) is not None:
        future.set_exception(plain_error(error))
    else:
        future.set_result(job.result())


_Job = tuple[concurrent.futures.Future[Any], Callable[[], Any]]


def _work(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        future, function = job
        if not future.set_running_or_notify_cancel():
            continue
        try:
            result = function()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
        del job, future, function  # what they hold goes now, not with the next job
