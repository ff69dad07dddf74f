"""`gpu_future`: every way of waiting, cancelled, abandoned, failed, by the hundred thousand.

Without a GPU the streams are threads: what is tested is all of the Python, and eventfds are real.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch

from graphed_sampling import GraphSignal, HostStream, gpu_future
from graphed_sampling.step import futures
from graphed_sampling.step.futures import DESCRIPTORS, event_future

needs_eventfd = pytest.mark.skipif(not hasattr(os, "eventfd"), reason="no eventfd on this system")
WAITS = [pytest.param("eventfd", marks=needs_eventfd), "poll", "thread"]
WAITED_FOR = 20.0  # seconds: where something is wrong a test fails, and does not hang


_this_run = threading.local()


class StreamEvent:
    """An event that the test lets pass, as a stream would; and the signal that goes with it."""

    def __init__(self) -> None:
        self.passed = threading.Event()
        self.error: Exception | None = None
        self.fd: int | None = None
        getattr(_this_run, "events", []).append(self.passed)

    def query(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.passed.is_set()

    def synchronize(self) -> None:
        self.passed.wait()

    def signal(self, fd: int) -> None:
        self.fd = fd

    def happen(self) -> None:
        self.passed.set()
        if self.fd is not None:
            os.eventfd_write(self.fd, 1)


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def limited() -> None:
        _this_run.events = []
        try:
            await asyncio.wait_for(main(), WAITED_FOR)
        finally:  # else threads that wait for them would keep a test that fails from ending
            for event in _this_run.__dict__.pop("events"):
                event.set()

    asyncio.run(limited())


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("wait", WAITS)
def test_a_future_is_done_when_its_event_has_passed_and_not_before(wait: str) -> None:
    async def main() -> None:
        events = [StreamEvent() for _ in range(5)]
        waiting = [event_future(event, wait, event.signal) for event in events]
        for event, future in zip(events, waiting, strict=True):
            await asyncio.sleep(0.005)
            assert not future.done()
            threading.Timer(0.005, event.happen).start()
            assert await future is None

    run(main)


@pytest.mark.parametrize("wait", WAITS)
def test_a_cancelled_future_stays_cancelled(wait: str) -> None:
    async def main() -> None:
        event, other = StreamEvent(), StreamEvent()
        future = event_future(event, wait, event.signal)
        waiting = event_future(other, wait, other.signal)
        future.cancel()
        event.happen()
        await asyncio.sleep(0.01)
        assert future.cancelled() and not waiting.done()
        other.happen()
        await waiting

    run(main)


@needs_eventfd
def test_the_descriptor_of_a_cancelled_future_is_not_used_again_before_its_signal() -> None:
    async def main() -> None:
        event = StreamEvent()
        event_future(event, "eventfd", event.signal).cancel()
        later = [StreamEvent() for _ in range(100)]
        waiting = [event_future(e, "eventfd", e.signal) for e in later]
        assert event.fd not in {e.fd for e in later}
        event.happen()
        await asyncio.sleep(0.01)
        assert not any(future.done() for future in waiting)
        for e in later:
            e.happen()
        await asyncio.gather(*waiting)
        assert event.fd in DESCRIPTORS.spare

    run(main)


@needs_eventfd
def test_a_closed_loop_leaves_no_signal_for_others() -> None:
    """The descriptors of its futures come back once their late signals were there."""
    orphan = StreamEvent()

    async def leave() -> None:
        event_future(orphan, "eventfd", orphan.signal)

    run(leave)

    async def main() -> None:
        event = StreamEvent()
        future = event_future(event, "eventfd", event.signal)
        assert event.fd != orphan.fd and orphan.fd in DESCRIPTORS.adrift
        orphan.happen()
        await asyncio.sleep(0.01)
        assert not future.done()
        event.happen()
        await future
        DESCRIPTORS.spare.clear()
        assert DESCRIPTORS.take() == orphan.fd

    spare = list(DESCRIPTORS.spare)
    run(main)
    DESCRIPTORS.spare.extend(spare)


@needs_eventfd
def test_descriptors_do_not_outlive_exec_nor_reach_a_child() -> None:
    fd = DESCRIPTORS.take()
    assert not os.get_inheritable(fd)
    DESCRIPTORS.give_back(fd)
    child = os.fork()
    if child == 0:
        os._exit(len(DESCRIPTORS.spare))
    assert os.waitpid(child, 0)[1] == 0 and fd in DESCRIPTORS.spare


@pytest.mark.parametrize("wait", WAITS)
def test_an_error_of_the_device_reaches_the_waiter(
    wait: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Callbacks are not run then: it is the watchdog that tells."""
    monkeypatch.setattr(futures, "WATCHDOG_SECONDS", 0.01)

    class Failing(StreamEvent):
        def synchronize(self) -> None:
            self.passed.wait()
            raise RuntimeError("CUDA error: an illegal memory access")

    async def main() -> None:
        event, healthy = Failing(), StreamEvent()
        future = event_future(event, wait, event.signal)
        other = event_future(healthy, wait, healthy.signal)
        await asyncio.sleep(0.03)
        assert not future.done()
        event.error = RuntimeError("CUDA error: an illegal memory access")
        event.passed.set()
        with pytest.raises(RuntimeError, match="illegal memory access"):
            await future
        healthy.happen()
        await other
        assert event.fd is None or event.fd in DESCRIPTORS.adrift

    run(main)


@needs_eventfd
def test_a_lost_signal_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futures, "WATCHDOG_SECONDS", 0.01)

    async def main() -> None:
        event = StreamEvent()
        future = event_future(event, "eventfd", event.signal)
        event.passed.set()  # and no signal
        await future
        assert event.fd in DESCRIPTORS.adrift

    run(main)


@needs_eventfd
def test_a_signal_that_cannot_be_sent_raises_at_once() -> None:
    def refuse(fd: int) -> None:
        raise RuntimeError("signal_fd: no")

    async def main() -> None:
        before = open_descriptors()
        for _ in range(3):
            with pytest.raises(RuntimeError, match="signal_fd: no"):
                event_future(StreamEvent(), "eventfd", refuse)
        assert open_descriptors() <= before + 1

    run(main)


@needs_eventfd
def test_a_hundred_thousand_futures_leak_nothing() -> None:
    """Every tenth is cancelled while it is in flight."""

    async def some(count: int) -> None:
        events = [StreamEvent() for _ in range(count)]
        waiting = [event_future(event, "eventfd", event.signal) for event in events]
        for future in waiting[::10]:
            future.cancel()
        for event in events:
            event.happen()
        await asyncio.gather(*waiting, return_exceptions=True)
        while futures._Hub.of(asyncio.get_running_loop())._in_flight:
            await asyncio.sleep(0)

    async def main() -> None:
        for count in (500, 500, 99_000 // 500 * 500):
            gc.collect()
            descriptors, blocks = open_descriptors(), sys.getallocatedblocks()
            for _ in range(count // 500):
                await some(500)
        gc.collect()
        assert open_descriptors() <= descriptors
        assert sys.getallocatedblocks() - blocks < 2000

    asyncio.run(main())


@pytest.mark.parametrize("wait", WAITS)
def test_many_loops_in_many_threads(wait: str) -> None:
    def one(number: int) -> int:
        async def main() -> None:
            for _ in range(20):
                events = [StreamEvent() for _ in range(5)]
                waiting = [event_future(event, wait, event.signal) for event in events]
                for event in events[::-1]:
                    event.happen()
                await asyncio.gather(*waiting)

        run(main)
        return number

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        assert list(threads.map(one, range(8))) == list(range(8))


@needs_eventfd
def test_uvloop() -> None:
    if importlib.util.find_spec("uvloop") is None:
        pytest.skip("uvloop is not installed")
    import uvloop

    async def main() -> None:
        before = open_descriptors()
        for _ in range(50):
            events = [StreamEvent() for _ in range(10)]
            waiting = [event_future(event, "eventfd", event.signal) for event in events]
            waiting[3].cancel()
            for event in events:
                threading.Thread(target=event.happen).start()
            await asyncio.gather(*waiting, return_exceptions=True)
            assert all(future.done() for future in waiting)
        assert open_descriptors() <= before + 20

    loop = uvloop.new_event_loop()
    loop.run_until_complete(asyncio.wait_for(main(), WAITED_FOR))
    loop.close()


def test_a_host_stream_works_in_order_and_its_future_waits_for_all_before() -> None:
    async def main() -> None:
        stream = HostStream()
        done: list[int] = []
        gate = threading.Event()
        jobs = [stream.submit(gate.wait)] + [
            stream.submit(lambda i=i: done.append(i)) for i in range(100)
        ]
        future = gpu_future(stream)
        later = stream.submit(lambda: done.append(100))
        assert not future.done()
        gate.set()
        await future
        assert done[:100] == list(range(100))
        later.result(WAITED_FOR)
        assert done == list(range(101)) and all(job.done() for job in jobs)
        stream.close()
        with pytest.raises(RuntimeError, match="closed"):
            stream.submit(gate.wait)

    run(main)


def test_an_error_of_a_job_stays_with_the_job() -> None:
    async def main() -> None:
        stream = HostStream()
        job = stream.submit(lambda: 1 // 0)
        await gpu_future(stream)
        with pytest.raises(ZeroDivisionError):
            job.result()
        assert stream.submit(lambda: 7).result(WAITED_FOR) == 7
        stream.close()

    run(main)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu_an_executor_completes_it() -> None:
    async def main() -> None:
        assert await gpu_future() is None
        assert await gpu_future(wait="poll") is None

    run(main)


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match=r"wait = 'abacus' is not accepted: one of 'auto'"):
            gpu_future(wait="abacus")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="stream is int"):
            gpu_future(3)  # type: ignore[arg-type]
        monkeypatch.setattr(futures, "load_native", lambda: False)
        with pytest.raises(ValueError, match=r"native library is not in use; wait='poll' serves"):
            gpu_future(wait="eventfd")
        with pytest.raises(ValueError, match="GraphSignal cannot be made: the native library"):
            GraphSignal()
        monkeypatch.delattr(os, "eventfd", raising=False)
        with pytest.raises(ValueError, match=r"no eventfd; wait='poll' serves"):
            gpu_future(wait="eventfd")

    run(main)


@needs_eventfd
def test_a_graph_signal_gives_each_replay_its_future() -> None:
    async def main() -> None:
        signal = GraphSignal.__new__(GraphSignal)
        signal._open()
        before = open_descriptors()
        waiting = [signal.future(StreamEvent()) for _ in range(4)]
        for done in range(4):
            os.eventfd_write(signal._fd, 1)
            await waiting[done]
            assert [future.done() for future in waiting] == [i <= done for i in range(4)]
        os.eventfd_write(signal._fd, 2)  # two replays that were over before anyone asked
        await asyncio.sleep(0.01)
        await signal.future(StreamEvent())
        await signal.future(StreamEvent())
        left = signal.future(StreamEvent())
        signal.close()
        assert left.cancelled() and open_descriptors() == before - 1

    run(main)


@needs_eventfd
def test_a_graph_signal_tells_of_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futures, "WATCHDOG_SECONDS", 0.01)

    async def main() -> None:
        signal = GraphSignal.__new__(GraphSignal)
        signal._open()
        event = StreamEvent()
        future = signal.future(event)
        event.error = RuntimeError("CUDA error")
        with pytest.raises(RuntimeError, match="CUDA error"):
            await future
        signal.close()

    run(main)


@needs_eventfd
def test_a_graph_signal_has_one_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often nothing is in flight in between."""
    monkeypatch.setattr(futures, "WATCHDOG_SECONDS", 60.0)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        signal = GraphSignal.__new__(GraphSignal)
        signal._open()
        timers: list[Any] = []
        call_later = loop.call_later

        def counted(delay: float, callback: Any, *args: Any) -> asyncio.TimerHandle:
            if callback == signal._look:
                timers.append(call_later(delay, callback, *args))
                return timers[-1]
            return call_later(delay, callback, *args)

        monkeypatch.setattr(loop, "call_later", counted)
        for _ in range(20):
            future = signal.future(StreamEvent())
            os.eventfd_write(signal._fd, 1)
            await future
        assert len(timers) == 1
        signal._look()  # nothing is in flight: it ends, and the next future starts another
        assert len(timers) == 1
        waiting = signal.future(StreamEvent())
        assert len(timers) == 2
        signal._look()
        assert len(timers) == 3
        signal.close()
        assert waiting.cancelled()
        for timer in timers:
            timer.cancel()

    run(main)


# --------------------------------------------------------------------------- on a GPU

gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def gpu_work(stream: torch.cuda.Stream, milliseconds: float = 20) -> Callable[[], bool]:
    """Keeps the stream busy; returns whether it is done."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(int(1.5e6 * milliseconds))
        event = torch.cuda.Event()
        event.record()
    return event.query


@gpu
@needs_gpu
@pytest.mark.parametrize("wait", ["auto", "eventfd", "poll", "thread"])
def test_on_a_gpu_the_work_is_done_when_the_future_is(wait: Any) -> None:
    async def main() -> None:
        streams = [torch.cuda.Stream() for _ in range(4)]
        for _ in range(3):
            probes = [gpu_work(stream) for stream in streams]
            waiting = [gpu_future(stream, wait=wait) for stream in streams]
            assert not any(future.done() for future in waiting)
            for probe, future in zip(probes, waiting, strict=True):
                await future
                assert probe()
        with torch.cuda.stream(streams[0]):
            probe = gpu_work(streams[0])
            await gpu_future(wait=wait)
            assert probe()

    run(main)


@gpu
@needs_gpu
def test_on_a_gpu_a_signal_does_not_hold_up_its_stream_and_leaks_nothing() -> None:
    async def main() -> None:
        stream = torch.cuda.Stream()
        for _ in range(100):
            await gpu_future(stream)
        descriptors = open_descriptors()
        for round_ in range(1000):
            waiting = [gpu_future(stream, wait="eventfd") for _ in range(100)]
            if round_ % 10 == 0:
                waiting[5].cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        await asyncio.sleep(0.05)
        assert open_descriptors() <= descriptors + 100

    asyncio.run(main())


@gpu
@needs_gpu
def test_on_a_gpu_a_captured_signal_completes_a_future_each_replay() -> None:
    async def main() -> None:
        stream = torch.cuda.Stream()
        x = torch.zeros(1, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            torch.cuda._sleep(2_000_000)
            x += 1
            with pytest.raises(ValueError, match="GraphSignal"):
                gpu_future(stream)
            signal = GraphSignal()
            # Behind the signal, which does not wait for it; so long that a host which others keep
            # busy is not late.
            torch.cuda._sleep(40_000_000)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for replay in range(5):
                graph.replay()
                await signal.future()
                assert not gpu_done(stream), "the signal waited for what comes after it"
                stream.synchronize()
                assert x.item() == replay + 1
            graph.replay()
            first = signal.future()
            graph.replay()
            await asyncio.gather(first, signal.future())
        signal.close()
        graph.replay()  # its own descriptor is still there
        torch.cuda.synchronize()

    run(main)


def gpu_done(stream: torch.cuda.Stream) -> bool:
    return stream.query()


@gpu
@needs_gpu
def test_a_graph_signal_needs_a_capture() -> None:
    with pytest.raises(ValueError, match="while the stream captures"):
        GraphSignal()


@gpu
@needs_gpu
def test_on_a_gpu_a_signal_does_not_wait_for_another_stream() -> None:
    async def main() -> None:
        busy, idle = torch.cuda.Stream(), torch.cuda.Stream()
        for stream in (busy, idle):  # what the first signal makes may wait for the device
            await gpu_future(stream, wait="eventfd")
        probe = gpu_work(busy, 400)
        slow = gpu_future(busy, wait="eventfd")
        await gpu_future(idle, wait="eventfd")
        assert not probe() and not slow.done()
        await slow
        assert probe()

    run(main)


@gpu
@needs_gpu
def test_on_a_gpu_it_is_the_stream_itself_that_must_not_capture() -> None:
    async def main() -> None:
        stream, other = torch.cuda.Stream(), torch.cuda.Stream()
        await gpu_future(other)
        x = torch.zeros(1, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"):
            x += 1
            with pytest.raises(ValueError, match="while the stream captures"):
                GraphSignal(other)
            waiting = gpu_future(other)
            with torch.cuda.stream(other):
                with pytest.raises(ValueError, match="is being captured"):
                    gpu_future(stream)
                signal = GraphSignal(stream)
        await waiting
        with torch.cuda.stream(stream):
            graph.replay()
            await signal.future()
        signal.close()
        assert x.item() == 1

    run(main)
