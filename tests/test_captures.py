"""What looks at events leaves captures of other threads alone."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_futures import WAITS, StreamEvent, run

from graphed_sampling import RequestTable, SamplingParams, captures, gpu_future
from graphed_sampling.captures import captures_left_alone, leave_captures_alone
from graphed_sampling.step import futures
from graphed_sampling.step.futures import event_future

GLOBAL, THREAD_LOCAL = 0, 1


class Driver(threading.local):
    """A stand-in for CUDA's: each thread has a mode, at first the global one."""

    mode = GLOBAL

    def exchange(self, pointer: Any) -> int:
        given = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_int)).contents
        given.value, self.mode = self.mode, given.value
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    stand_in = Driver()
    monkeypatch.setattr(captures, "_exchange", lambda: stand_in.exchange)
    monkeypatch.setattr(futures, "_threads", None)  # those that are there have begun without it
    yield stand_in


def test_the_mode_is_a_thread_s_own_and_comes_back(driver: Driver) -> None:
    with captures_left_alone():
        assert driver.mode == THREAD_LOCAL
        with pytest.raises(KeyError), captures_left_alone():
            raise KeyError
        assert driver.mode == THREAD_LOCAL
        others: list[int] = []
        thread = threading.Thread(target=lambda: others.append(driver.mode))
        thread.start()
        thread.join()
        assert others == [GLOBAL]
    assert driver.mode == GLOBAL
    leave_captures_alone()
    assert driver.mode == THREAD_LOCAL
    with captures_left_alone():
        pass
    assert driver.mode == THREAD_LOCAL


def test_without_a_driver_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captures, "_exchange", lambda: None)
    leave_captures_alone()
    with pytest.raises(KeyError), captures_left_alone():
        raise KeyError


@pytest.mark.parametrize("wait", WAITS)
def test_futures_look_in_the_thread_s_own_mode(
    wait: str, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(futures, "WATCHDOG_SECONDS", 0.005)
    modes: list[int] = []

    class Watching(StreamEvent):
        def query(self) -> bool:
            modes.append(driver.mode)
            return super().query()

        def synchronize(self) -> None:
            modes.append(driver.mode)
            super().synchronize()

    async def main() -> None:
        event = Watching()
        future = event_future(event, wait, event.signal)
        await asyncio.sleep(0.05)
        event.happen()
        await future

    run(main)
    assert modes and set(modes) == {THREAD_LOCAL}
    assert driver.mode == GLOBAL


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("what", ["auto", "poll", "thread", "upload"])
def test_on_a_gpu_another_thread_s_capture_goes_on(what: Any) -> None:
    """In the global mode, torch's default."""
    device = torch.device("cuda")
    capturing, end = threading.Event(), threading.Event()
    errors: list[BaseException] = []
    x = torch.ones(4, device=device)
    graph = torch.cuda.CUDAGraph()

    def capture() -> None:
        try:
            with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
                y.add_(x)
                capturing.set()
                end.wait(20)
                y.add_(x)
        except BaseException as error:
            errors.append(error)
            capturing.set()

    async def wait_for_work() -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
        await gpu_future(stream, wait=what)

    y = torch.zeros(4, device=device)
    table = RequestTable(2, 64, device=device)
    slot = table.admit(SamplingParams())
    for _ in range(8):  # once round the ring, so that its events are there
        table.update(slot, SamplingParams(seed=1))
        table.upload()
    torch.cuda.synchronize()
    thread = threading.Thread(target=capture)
    thread.start()
    capturing.wait(20)
    try:
        if what == "upload":
            for seed in range(8):
                table.update(slot, SamplingParams(seed=seed))
                table.upload()
        else:
            run(wait_for_work)
    finally:
        end.set()
        thread.join()
    assert not errors, errors
    graph.replay()
    torch.cuda.synchronize()
    assert y.tolist() == [2.0] * 4
