"""What the benchmarks share: the record of the machine, the timers, and logits to sample from."""

from __future__ import annotations

import gc
import math
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

import graphed_sampling
from graphed_sampling.testing import lm_like_logits

Call: TypeAlias = Callable[[int], None]
"""Enqueues one call on input `i`; a contender takes `i` modulo the number of its inputs."""

DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


# The record of the machine.


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def least_times(functions: Sequence[Callable[[], None]], rounds: int) -> list[float]:
    """The least time of each, in seconds, called in turns: other processes may share the cores."""
    least = [float("inf")] * len(functions)
    for _ in range(rounds):
        for i, function in enumerate(functions):
            start = time.perf_counter()
            function()
            least[i] = min(least[i], time.perf_counter() - start)
    return least


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _output_of(*command: str, folder: Path | None = None) -> str:
    """What a command prints; empty where it is missing, fails or hangs."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=folder, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def commit() -> str:
    """The commit of this tree, "+changes" where it has uncommitted ones, empty without git."""
    here = Path(__file__).resolve().parent
    head = _output_of("git", "rev-parse", "HEAD", folder=here)
    changed = head and _output_of("git", "status", "--porcelain", "-uno", folder=here.parent)
    return f"{head}+changes" if changed else head


def package_version(name: str) -> str:
    """The installed version of a distribution, empty where there is none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


_SMI_FIELDS: Final = (
    "name",
    "driver_version",
    "pstate",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "clocks.max.mem",
    "power.draw",
    "power.limit",
    "temperature.gpu",
)


def gpu_state() -> dict[str, str]:
    """Name, driver, clocks, power and temperature of the current GPU, as nvidia-smi tells them."""
    if not torch.cuda.is_available():
        return {}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    identity = str(getattr(properties, "uuid", ""))
    select = [f"--id=GPU-{identity}"] if identity else []
    query = f"--query-gpu={','.join(_SMI_FIELDS)}"
    line = _output_of("nvidia-smi", *select, query, "--format=csv,noheader") or _output_of(
        "nvidia-smi", query, "--format=csv,noheader"
    )
    values = [v.strip() for v in line.split("\n")[0].split(",")] if line else []
    return dict(zip(_SMI_FIELDS, values, strict=False))


def environment(device: torch.device) -> dict[str, Any]:
    """Everything about machine and software that a figure depends on, for the JSON files."""
    record: dict[str, Any] = {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "device": str(device),
        "name": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "triton": package_version("triton"),
        "threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
        "build": graphed_sampling.build_info(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        record |= {
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "l2_bytes": l2_bytes(device),
            "gpu": gpu_state(),
        }
    return record


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def l2_bytes(device: torch.device) -> int:
    """Size of the GPU's L2; 0 for the CPU, where inputs rotate over the least number alone."""
    if device.type != "cuda":
        return 0
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "L2_cache_size", 0)) or 60 * 2**20  # an H200's


class Deadline:
    """A time limit that is asked before each piece of work; None never ends."""

    def __init__(self, seconds: float | None) -> None:
        self.started = time.perf_counter()
        self.seconds = seconds

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.started

    @property
    def reached(self) -> bool:
        return self.seconds is not None and self.elapsed >= self.seconds


# Timers.


@dataclass(frozen=True)
class Timing:
    """Microseconds a call. Percentiles are over replays of a graph (on the CPU over calls)."""

    median: float
    p10: float
    p90: float
    p99: float
    calls: int
    """Calls in one graph."""
    distinct: int
    """Different inputs among them."""
    samples: int

    @classmethod
    def of(cls, samples: Sequence[float], calls: int, distinct: int) -> Timing:
        p10, median, p90, p99 = np.quantile(np.asarray(samples), [0.1, 0.5, 0.9, 0.99]).tolist()
        return cls(median, p10, p90, p99, calls, min(distinct, calls), len(samples))


def _nothing() -> None:
    pass


class Timer(Protocol):
    def time(self, call: Call, distinct: int, reset: Callable[[], None] = _nothing) -> Timing:
        """Time of a call that goes round `distinct` inputs; `reset` comes before each sample."""

    def each(self, call: Call, count: int, passes: int) -> list[float]:
        """Microseconds of each of `count` calls alone, up to a constant: the median of passes."""


_SLOW_US: Final = 5_000.0
_LEAST_REPLAY_US: Final = 2_000.0
_MOST_REPLAY_US: Final = 20_000.0
MOST_CALLS: Final = 1024
_SPAN_US: Final = 20_000.0


def calls_in_graph(estimate: float, distinct: int) -> int:
    """How often a graph calls something that takes about `estimate` microseconds.

    Once per input, and round again until a replay takes 2 ms, so that what surrounds a replay
    (about 10 us) is less than a hundredth of it. Never more calls than fill 20 ms (4 at least) or
    than 1024: whatever is so slow moves more than the L2 by itself. Above 5 ms one call is enough.
    """
    if estimate >= _SLOW_US:
        return 1
    rounds = math.ceil(_LEAST_REPLAY_US / (estimate * distinct))
    most = max(4, int(_MOST_REPLAY_US / estimate))
    return min(distinct * max(rounds, 1), most, MOST_CALLS)


class GraphTimer:
    """Times calls as replays of a CUDA graph, between events, enqueued behind a spinning kernel.

    Everything runs on one stream of its own: eager warm-up, capture and replay.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        one = torch.zeros(1, device=device)

        def least(_: int) -> None:
            one.add_(1)

        with torch.cuda.stream(self.stream):
            least(0)
        self.overhead = min(self._replay(self.capture(least, 1), 10, _nothing))
        """Microseconds between the events around a graph of one empty kernel."""

    def time(self, call: Call, distinct: int, reset: Callable[[], None] = _nothing) -> Timing:
        torch.cuda.synchronize(self.device)
        with torch.cuda.stream(self.stream):
            call(0)  # compiles and loads
        torch.cuda.synchronize(self.device)
        single = self.capture(call, 1)
        estimate = max(min(self._replay(single, 3, reset)) - self.overhead, 1.0)
        calls = calls_in_graph(estimate, distinct)
        graph = single if calls == 1 else self.capture(call, calls)
        replays = int(min(max(_SPAN_US / (estimate * calls), 5), 40))
        samples = [t / calls for t in self._replay(graph, replays, reset)]
        return Timing.of(samples, calls, distinct)

    def each(self, call: Call, count: int, passes: int) -> list[float]:
        torch.cuda.synchronize(self.device)
        with torch.cuda.stream(self.stream):
            call(0)
        pool = torch.cuda.graph_pool_handle()
        graphs = [self.capture(lambda _, i=i: call(i), 1, pool) for i in range(count)]
        times = [self._replay_all(graphs) for _ in range(passes + 1)][1:]  # the first warms up
        return np.median(np.asarray(times), axis=0).tolist()

    def capture(self, call: Call, calls: int, pool: Any = None) -> torch.cuda.CUDAGraph:
        """A graph of `calls` calls. `torch.cuda.graph` would also empty the allocator's cache."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        given = {} if pool is None else {"pool": pool}
        with torch.cuda.stream(self.stream), _no_garbage_collection():
            graph.capture_begin(capture_error_mode="thread_local", **given)
            try:
                for i in range(calls):
                    call(i)
            except BaseException:
                with suppress(RuntimeError):  # it repeats that the capture was spoiled
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph

    def _replay(
        self, graph: torch.cuda.CUDAGraph, replays: int, reset: Callable[[], None]
    ) -> list[float]:
        """Microseconds of each of `replays` replays, after one that warms up."""
        events = [_event_pair() for _ in range(replays)]
        with torch.cuda.stream(self.stream):
            graph.replay()
            self.spin()
            for start, end in events:
                reset()
                start.record()
                graph.replay()
                end.record()
        torch.cuda.synchronize(self.device)
        return [1e3 * start.elapsed_time(end) for start, end in events]

    def _replay_all(self, graphs: Sequence[torch.cuda.CUDAGraph]) -> list[float]:
        """Microseconds of each graph's replay, one behind the other."""
        times: list[float] = []
        for first in range(0, len(graphs), 100):  # the launch queue holds about a thousand
            group = graphs[first : first + 100]
            events = [_event_pair() for _ in group]
            with torch.cuda.stream(self.stream):
                self.spin()
                for graph, (start, end) in zip(group, events, strict=True):
                    start.record()
                    graph.replay()
                    end.record()
            torch.cuda.synchronize(self.device)
            times += [1e3 * start.elapsed_time(end) for start, end in events]
        return times

    def spin(self) -> None:
        """Keep the GPU busy for 2 ms or so, while the host enqueues what is to be timed."""
        torch.cuda._sleep(4_000_000)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """What a collection frees in the middle of a capture can spoil it."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _event_pair() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


class WallTimer:
    """Times calls by the clock, where there are no CUDA graphs."""

    def __init__(self, seconds: float = 0.1) -> None:
        self.seconds = seconds

    def time(self, call: Call, distinct: int, reset: Callable[[], None] = _nothing) -> Timing:
        call(0)
        samples: list[float] = []
        end = time.perf_counter() + self.seconds
        while len(samples) < 5 or (time.perf_counter() < end and len(samples) < 1000):
            reset()
            samples.append(self._one(call, len(samples)))
        return Timing.of(samples, distinct, distinct)

    def each(self, call: Call, count: int, passes: int) -> list[float]:
        call(0)
        times = [[self._one(call, i) for i in range(count)] for _ in range(passes)]
        return np.median(np.asarray(times), axis=0).tolist()

    def _one(self, call: Call, i: int) -> float:
        start = time.perf_counter()
        call(i)
        return 1e6 * (time.perf_counter() - start)


def make_timer(device: torch.device) -> Timer:
    return GraphTimer(device) if device.type == "cuda" else WallTimer()


# Logits.

_CHUNK_ROWS: Final = {"cuda": 256}
_FEW_ROWS: Final = 8
_LEAST_BUFFERS: Final = 4
_COLD_L2: Final = 4
FLAT_DEVIATION: Final = 2.0
MIXED_FLAT: Final = (5, 2)
"""Of mixed batches, the rows whose index modulo 5 is 2 are flat."""


def load_recorded(path: Path) -> Tensor:
    """[n, V] recorded logits on the CPU: "logits" of a torch or .npz file, or its sole tensor."""
    if path.suffix == ".npz":
        arrays = np.load(path)
        name = "logits" if "logits" in arrays.files else arrays.files[0]
        rows = torch.from_numpy(arrays[name])
    else:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
        rows = loaded["logits"] if isinstance(loaded, dict) else loaded
    if not (isinstance(rows, Tensor) and rows.dim() == 2 and rows.is_floating_point()):
        raise ValueError(f"{path} holds no [n, V] tensor of floats named 'logits'")
    return rows


def rows_for_cold(device: torch.device, row_bytes: int) -> int:
    """So many rows of which so much is read are 4 times the L2."""
    return math.ceil(_COLD_L2 * l2_bytes(device) / row_bytes)


@dataclass
class Inputs:
    """Rows of logits, made once per kind, vocabulary and dtype, and cut into rotating buffers.

    kinds: "lm" (-1.3 ln(rank) + N(0, 0.3²), ranks shuffled per row), "flat" (N(0, 2²)) and
    "recorded" (a file's rows, repeated as often as needed). All buffers of all batch sizes are
    parts of one tensor, so row r of the first buffer is the same row whatever the batch. Rows in
    bf16 are those in fp32, rounded.
    """

    device: torch.device
    largest_batch: int
    least_rows: int = 0
    """Rows to have at least: what `windows` needs."""
    recorded: Tensor | None = None
    _rows: dict[tuple[str, int, torch.dtype], Tensor] = field(default_factory=dict)

    def rows(self, kind: str, vocab: int, dtype: torch.dtype) -> Tensor:
        key = (kind, vocab, dtype)
        if key not in self._rows:
            count = max(
                _LEAST_BUFFERS * self.largest_batch,
                self.least_rows,
                min(rows_for_cold(self.device, vocab * dtype.itemsize), MOST_CALLS),
            )
            self._rows[key] = self._make(kind, vocab, dtype, count)
        return self._rows[key]

    def buffers(
        self,
        kind: str,
        vocab: int,
        dtype: torch.dtype,
        batch: int,
        row_bytes: int | None = None,
    ) -> list[Tensor]:
        """Inputs to rotate over: 4 at least, 4 times the L2 in all at least, 1024 at most.

        row_bytes: what is read of a row, where that is not all of it; the rows must be there.
        """
        if kind == "mixed":
            return self._mixed(vocab, dtype, batch)
        rows = self.rows(kind, vocab, dtype)
        row_bytes = row_bytes or vocab * dtype.itemsize
        wanted = max(_LEAST_BUFFERS, math.ceil(rows_for_cold(self.device, row_bytes) / batch))
        count = min(wanted, MOST_CALLS, rows.shape[0] // batch)
        return [rows[i * batch : (i + 1) * batch] for i in range(count)]

    def windows(
        self, kind: str, vocab: int, dtype: torch.dtype, batch: int, count: int
    ) -> list[Tensor]:
        """Up to `count` different batches: overlapping runs of rows, neighbours far apart."""
        rows = self.rows(kind, vocab, dtype)
        places = rows.shape[0] - batch + 1
        stride = max(int(0.38 * places), 1)
        while math.gcd(stride, places) != 1:
            stride += 1
        starts = [i * stride % places for i in range(min(count, places))]
        return [rows[start : start + batch] for start in starts]

    def release(self) -> None:
        """Give all rows back."""
        self._rows.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _make(self, kind: str, vocab: int, dtype: torch.dtype, count: int) -> Tensor:
        if kind == "recorded":
            if self.recorded is None or self.recorded.shape[1] != vocab:
                raise ValueError(f"there are no recorded logits of {vocab} tokens")
            order = torch.arange(count) % self.recorded.shape[0]
            return self.recorded[order].to(self.device, dtype)
        generator = torch.Generator(self.device).manual_seed(20 + ("lm", "flat").index(kind))
        rows = torch.empty(count, vocab, dtype=dtype, device=self.device)
        # Whole chunks, so that the first rows are the same however many there are.
        at_once = _CHUNK_ROWS.get(self.device.type, _FEW_ROWS)
        for first in range(0, count, at_once):
            if kind == "lm":
                chunk = lm_like_logits(at_once, vocab, generator)
            else:
                chunk = torch.randn(at_once, vocab, generator=generator, device=self.device)
                chunk *= FLAT_DEVIATION
            rows[first : first + at_once] = chunk[: count - first]
        return rows

    def _mixed(self, vocab: int, dtype: torch.dtype, batch: int) -> list[Tensor]:
        lm = self.buffers("lm", vocab, dtype, batch)
        flat = self.buffers("flat", vocab, dtype, batch)
        period, phase = MIXED_FLAT
        mixed = []
        for peaked, even in zip(lm, flat, strict=True):
            rows = peaked.clone()
            rows[phase::period] = even[phase::period]
            mixed.append(rows)
        return mixed
