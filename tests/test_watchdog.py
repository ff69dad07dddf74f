"""The watchdog of a sampler's steps: what it says of ranks, and how it ends. Ranks are watchdogs of
one process here, with a store that they share."""

from __future__ import annotations

import gc
import itertools
import secrets
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from graphed_sampling.distributed import RankError
from graphed_sampling.distributed.watchdog import Watchdog, _Enqueued

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch has no distributed")

Make = Callable[..., list[Watchdog]]


class Group:
    """What a watchdog needs of a process group."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self.aborts = 0

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def abort(self) -> None:
        self.aborts += 1


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    """Watchdogs of the ranks of a group."""
    store = dist.HashStore()
    monkeypatch.setattr(distributed_c10d, "_get_process_group_store", lambda group: store)

    def make(size: int, *, timeout: float = 0.4, device: str = "cpu") -> list[Watchdog]:
        name = secrets.token_hex(8)
        return [
            Watchdog(Group(rank, size), torch.device(device), timeout, name, aborts=True)  # type: ignore[arg-type]
            for rank in range(size)
        ]

    return make


def enter(watchdog: Watchdog, steps: int, **others: int) -> None:
    """So many steps more, whose headers are all alike but for what `others` says of the last."""
    for left in range(steps - 1, -1, -1):
        header = watchdog.header._replace(step=watchdog.header.step + 1, rows=1, bucket=1)
        watchdog.enter(header._replace(**({} if left else others)))


@pytest.mark.parametrize(
    ("entered", "step", "missing"),
    [
        ((100, 100, 100), 100, ()),
        ((200, 200, 200), 20, ()),  # hosts that run ahead of what hangs tell no more of it
        ((200, 120, 200), 100, ()),
        ((200, 19, 200), 20, (1,)),
        ((200, 0, 150), 20, (1,)),
        ((19, 200, 10), 20, (0, 2)),
    ],
)
def test_who_reached_a_step_that_hangs(
    make: Make, entered: tuple[int, ...], step: int, missing: tuple[int, ...]
) -> None:
    watchdogs = make(len(entered))
    for watchdog, steps in zip(watchdogs, entered, strict=True):
        enter(watchdog, steps)
    for watchdog in watchdogs:
        error = watchdog.diagnose("it hangs", step)
        assert error.ranks == missing, str(error)
        assert f"step {step} did not end" in str(error)
        assert ("although all ranks reached it" in str(error)) == (not missing)


@pytest.mark.parametrize("field", ["sampler", "rows", "bucket", "inputs", "fingerprint"])
def test_what_differs_in_a_step_that_hangs(make: Make, field: str) -> None:
    watchdogs = make(3)
    for rank, watchdog in enumerate(watchdogs):
        enter(watchdog, 5, **({field: 7} if rank == 1 else {}))
    error = watchdogs[2].diagnose("it hangs")
    assert error.ranks == (1,) and "step 5: the ranks disagree" in str(error)
    with pytest.raises(RankError) as raised:
        enter(watchdogs[2], 1)
    assert raised.value is error


class Gone:
    """A store whose server has ended."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("Broken pipe")


class NeverThere:
    def query(self) -> bool:
        return False


def test_a_step_that_hangs_is_ended_though_the_store_has_gone(make: Make) -> None:
    (watchdog,) = make(1)
    enter(watchdog, 3)
    watchdog._store = Gone()
    watchdog._on_gpu = True
    watchdog._newest = _Enqueued(3, NeverThere(), time.monotonic() - 1.0)  # type: ignore[arg-type]
    group: Any = watchdog.group
    end = time.monotonic() + 10.0
    while not group.aborts and time.monotonic() < end:
        time.sleep(0.01)
    assert group.aborts == 1
    with pytest.raises(RankError, match=r"step 3 did not end .* store does not answer"):
        enter(watchdog, 1)


def watching() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if "_watch" in t.name}


def test_the_thread_ends_with_the_sampler(make: Make) -> None:
    before = watching()
    closed, forgotten = make(2)
    assert len(watching() - before) == 2
    closed.close()
    assert len(watching() - before) == 1
    closed.close()
    with pytest.raises(RuntimeError, match="the sampler was closed"):
        enter(closed, 1)
    gone = weakref.ref(forgotten)
    del forgotten
    for _ in itertools.takewhile(lambda _: gone() is not None, range(1000)):
        gc.collect()  # its thread may hold it for a moment
        time.sleep(0.01)
    assert not watching() - before


EXITING = """
import time, torch
import torch.distributed as dist
from datetime import timedelta
from graphed_sampling.distributed.watchdog import Watchdog

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
watchdogs = []
for i in range(200):
    watchdog = Watchdog(dist.group.WORLD, torch.device("cpu"), 0.01, f"{i}", aborts=False)
    store = watchdog._store
    store.set_timeout(timedelta(seconds=0.05 + 0.001 * i))
    # Not in Python, as whatever is asked of a store that is slow.
    watchdog._post = lambda store=store: store.wait(["what nobody sets"])
    watchdogs.append(watchdog)
time.sleep(0.1)
"""


def test_an_interpreter_exits_while_the_thread_talks_with_the_store() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", EXITING], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr[-500:]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_others_capture_graphs_meanwhile(make: Make) -> None:
    """In CUDA's global mode too, in which no thread may ask for events that has not said how."""
    (watchdog,) = make(1, device="cuda", timeout=2.0)
    numbers = torch.zeros(8, device="cuda")
    for _ in range(3):
        enter(watchdog, 1)
        watchdog.leave()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="global"):
            numbers.add_(1)
            time.sleep(2 * watchdog.interval)
        graph.replay()
    assert numbers.tolist() == [3.0] * 8
