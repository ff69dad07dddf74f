"""What calls cost the host: `pytest bench/test_host.py`, with pytest-benchmark.

Each call finds the device idle: it is waited for before, which is not timed. On a GPU the time is
that until the call returns, the step itself goes on; on the CPU it includes the step, so that the
vocabulary is small there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from common import default_device, synchronize

from graphed_sampling import GraphedSampler, RequestTable, Sampler, SamplingParams

pytest.importorskip("pytest_benchmark")

DEVICE = default_device()
ON_GPU = DEVICE.type == "cuda"
VOCAB = 128256 if ON_GPU else 1024
REQUESTS = 512 if ON_GPU else 32
ROWS = sorted({1, 32, REQUESTS})
ROUNDS = 200 if ON_GPU else 20
PARAMS = {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "logprobs": 0}


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def table() -> RequestTable:
    table = RequestTable(REQUESTS, VOCAB, device=DEVICE)
    for seed in range(REQUESTS):
        table.admit(SamplingParams(seed=seed, **PARAMS))
    return table


@pytest.fixture(scope="module")
def graphed(table: RequestTable) -> GraphedSampler:
    return GraphedSampler(table, row_buckets=ROWS)


def measure(
    benchmark: Any, call: Callable[[], object], before: Callable[[], object] = lambda: None
) -> None:
    """Time `call`, each time behind `before` and with an idle device."""

    def setup() -> None:
        before()
        synchronize()

    benchmark.pedantic(call, setup=setup, rounds=ROUNDS, warmup_rounds=5)
    synchronize()


def device_of(place: str) -> torch.device | str:
    return DEVICE if place == "device" else "cpu"


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("place", ["host", "device"] if ON_GPU else ["host"])
def test_graphed_call(benchmark: Any, graphed: GraphedSampler, rows: int, place: str) -> None:
    """Nothing changed since the last step."""
    slots = torch.arange(rows, dtype=torch.int32, device=device_of(place))
    logits = graphed.logits_buffer(rows).normal_()
    measure(benchmark, lambda: graphed(logits, slots))
    assert (graphed(logits, slots).token_ids >= 0).all()


@pytest.mark.parametrize("rows", ROWS)
def test_eager_call(benchmark: Any, table: RequestTable, rows: int) -> None:
    sampler = Sampler(table)
    slots = torch.arange(rows, dtype=torch.int32)
    logits = torch.randn(rows, VOCAB, device=DEVICE)
    measure(benchmark, lambda: sampler(logits, slots))


@pytest.mark.parametrize("rows", ROWS)
def test_call_with_new_slots(benchmark: Any, graphed: GraphedSampler, rows: int) -> None:
    """Other slots on the host than in the step before: they are checked and uploaded."""
    orders = [torch.arange(rows, dtype=torch.int32), torch.arange(rows, dtype=torch.int32).flip(0)]
    if rows == 1:
        orders[1] = torch.ones(1, dtype=torch.int32)
    logits = graphed.logits_buffer(rows).normal_()

    def call() -> None:
        orders.reverse()
        graphed(logits, orders[0])

    measure(benchmark, call)


def test_call_after_8_updates(benchmark: Any, graphed: GraphedSampler, table: RequestTable) -> None:
    """Parameters of 8 rows changed: one copy and one scatter before the step."""
    slots = torch.arange(REQUESTS, dtype=torch.int32)
    logits = graphed.logits_buffer(REQUESTS).normal_()

    def change() -> None:
        for slot in range(8):
            table.update(slot, SamplingParams(seed=slot, **PARAMS))

    measure(benchmark, lambda: graphed(logits, slots), change)


def test_idle_upload(benchmark: Any, table: RequestTable) -> None:
    """Nothing changed."""
    table.upload()
    measure(benchmark, table.upload)


def test_upload_of_8_updates(benchmark: Any, table: RequestTable) -> None:
    def change() -> None:
        for slot in range(8):
            table.update(slot, SamplingParams(seed=slot, **PARAMS))

    measure(benchmark, table.upload, change)


@pytest.mark.parametrize("prompt", [0, 1000, 100_000])
def test_admit(benchmark: Any, prompt: int) -> None:
    """A request and its prompt into the table; the upload comes later."""
    small = RequestTable(1, VOCAB, device=DEVICE)
    ids = torch.randint(VOCAB, (prompt,))
    params = SamplingParams(seed=1, **PARAMS)
    admitted: list[int] = []

    def leave() -> None:
        while admitted:
            small.release(admitted.pop())
        small.upload()

    measure(benchmark, lambda: admitted.append(small.admit(params, ids)), leave)


def test_params(benchmark: Any) -> None:
    """`SamplingParams` alone: its checks."""
    benchmark(lambda: SamplingParams(seed=1, **PARAMS))


def test_output_to_host(benchmark: Any, graphed: GraphedSampler) -> None:
    """One copy takes all outputs of a step to the host; the wait for it is timed."""
    slots = torch.arange(REQUESTS, dtype=torch.int32)
    logits = graphed.logits_buffer(REQUESTS).normal_()
    output = graphed(logits, slots)
    measure(benchmark, lambda: output.record.cpu())
