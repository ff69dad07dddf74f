"""What a step costs the host, the memory and the GPU: calls, uploads, admission, capture, replay.

    python bench/bench_host.py [--requests 512] [--vocab-size 128256] [--json FILE]

Times are medians over calls made as an engine makes them, one step enqueued behind the other, in
groups of four between synchronisations, which are not timed, so that a full launch queue never
hides in them; the first of a group, which finds the host asleep, is left out. Without a GPU the
same calls are timed on the CPU, where they include the step itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from common import default_device, environment, synchronize
from rich.console import Console
from rich.progress import track
from rich.table import Table

from graphed_sampling import GraphedSampler, RequestTable, Sampler, SamplingParams
from graphed_sampling.sampler import new_output, new_scratch

OPS = torch.ops.graphed_sampling
Row = tuple[str, float, str]


def median_microseconds(call: Callable[[], object], repeats: int, what: str) -> float:
    samples = []
    groups = repeats // 3 + 1
    for group in track(range(groups + groups // 10 + 1), description=what, transient=True):
        synchronize()
        for position in range(4):
            start = time.perf_counter()
            call()
            elapsed = time.perf_counter() - start
            if position > 0 and group > groups // 10:  # the first tenth warms up
                samples.append(1e6 * elapsed)
    synchronize()
    return statistics.median(samples)


def gpu_microseconds(call: Callable[[], object], repeats: int = 10) -> float:
    """Median GPU time of a call, a few at a time so that the GPU never waits for the host."""
    samples = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        call()
        start.record()
        for _ in range(3):
            call()
        end.record()
        end.synchronize()
        samples.append(1e3 * start.elapsed_time(end) / 3)
    return statistics.median(samples)


def measure_calls(table: RequestTable, slots: list[int], repeats: int) -> list[Row]:
    device = table.device
    rows: list[Row] = []
    start = time.perf_counter()
    sampler = GraphedSampler(table)
    synchronize()
    report = sampler.capture_report
    rows.append(("GraphedSampler(): seconds", time.perf_counter() - start, "s"))
    rows.append(
        (f"  of {len(sampler.row_buckets)} buckets: device memory", report.bytes / 2**20, "MiB")
    )
    for bucket in report.buckets:
        rows.append((f"  bucket {bucket.rows}: capture", bucket.seconds, "s"))
        rows.append((f"  bucket {bucket.rows}: memory", bucket.bytes / 2**20, "MiB"))

    changes = [SamplingParams(temperature=0.5 + 0.1 * i, seed=i) for i in range(8)]
    for n in sorted({1, min(32, len(slots)), len(slots)}):
        logits = sampler.logits_buffer(n)
        logits.normal_()
        on_host = torch.tensor(slots[:n], dtype=torch.int32)
        on_device = on_host.to(device)
        rows.append(
            (
                f"call, {n} rows, slots on the host",
                median_microseconds(
                    lambda a=logits, b=on_host: sampler(a, b), repeats, f"{n} rows, host slots"
                ),
                "us",
            )
        )
        rows.append(
            (
                f"call, {n} rows, slots on the device",
                median_microseconds(
                    lambda a=logits, b=on_device: sampler(a, b), repeats, f"{n} rows, device slots"
                ),
                "us",
            )
        )
        if graph := sampler._graphs.get(min(b for b in sampler.row_buckets if b >= n)):
            launch = median_microseconds(graph.replay, repeats, f"{n} rows, the launch")
            rows.append(("  of which cudaGraphLaunch takes", launch, "us"))
        samples = []
        for i in range(repeats // 10 + 1):
            for slot, params in zip(slots[:n], changes, strict=False):
                table.update(slot, params)
            before = table.staging_stats.bytes
            start = time.perf_counter()
            sampler(logits, on_host)
            samples.append(1e6 * (time.perf_counter() - start))
            sent = table.staging_stats.bytes - before
            if i % 3 == 2:  # fewer than the ring's entries in flight, so that it never waits
                synchronize()
        rows.append((f"call, {n} rows, {min(n, 8)} changed", statistics.median(samples), "us"))
        rows.append((f"  uploaded for {min(n, 8)} changed rows of {len(slots)}", sent, "bytes"))

        if device.type == "cuda":
            spent = gpu_microseconds(lambda a=logits, b=on_host: sampler(a, b))
            rows.append((f"  the step of {n} rows on the GPU ({sampler.backend})", spent, "us"))

    if device.type == "cuda":
        synchronize()
        torch.cuda._sleep(2_000_000_000)
        start = time.perf_counter()
        sampler(sampler.logits_buffer(n), on_host)
        rows.append(
            (f"call, {n} rows, behind a spinning GPU", 1e6 * (time.perf_counter() - start), "us")
        )
        start = time.perf_counter()
        synchronize()
        rows.append(("  the GPU then span on for", time.perf_counter() - start, "s"))
    return rows


def measure_ops(table: RequestTable, slots: list[int], repeats: int) -> list[Row]:
    """The ops by themselves, eager."""
    sampler = Sampler(table)
    backend, layout = sampler.backend, table.layout.to_ints()
    rows: list[Row] = []
    for n in sorted({1, min(32, len(slots))}):
        logits = torch.randn(n, table.vocab_size, device=table.device)
        some = torch.tensor(slots[:n], dtype=torch.int32, device=table.device)
        arguments = (
            logits,
            some,
            table.params,
            table.state,
            table.tables,
            new_output(table, n).record,
            new_scratch(table, backend, n),
            layout,
        )
        calls: dict[str, Callable[[], object]] = {
            "sample_step": lambda a=arguments: OPS.sample_step(*a, backend)
        }
        if backend == "cuda":
            calls["cuda_step"] = lambda a=arguments: OPS.cuda_step(*a)
        calls["a call of Sampler"] = lambda a=logits, b=some: sampler(a, b)
        for name, call in calls.items():
            spent = median_microseconds(call, repeats, f"{name}, {n} rows")
            rows.append((f"{name}, {n} rows, eager ({backend})", spent, "us"))
    return rows


def measure_admission(table: RequestTable, repeats: int) -> list[Row]:
    prompt = torch.randint(table.vocab_size, (100_000,))
    rows: list[Row] = []
    for name, ids in (("tensor", prompt), ("list", prompt.tolist())):
        admissions, uploads = [], []
        for i in range(max(repeats // 50, 5)):
            start = time.perf_counter()
            slot = table.admit(SamplingParams(seed=i), prompt_token_ids=ids)
            admissions.append(1e6 * (time.perf_counter() - start))
            synchronize()
            before = table.staging_stats.bytes
            start = time.perf_counter()
            table.upload()
            uploads.append(1e6 * (time.perf_counter() - start))
            sent = table.staging_stats.bytes - before
            synchronize()
            table.release(slot)
        rows.append((f"admit, 100,000 ids as a {name}", statistics.median(admissions), "us"))
        rows.append(("  its upload: host", statistics.median(uploads), "us"))
        rows.append(("  its upload: size", sent, "bytes"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--vocab-size", type=int, default=128256)
    parser.add_argument("--repeats", type=int, default=500)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = default_device()
    record = environment(device)

    table = RequestTable(options.requests, options.vocab_size, device=device)
    slots = [table.admit(SamplingParams(seed=i)) for i in range(options.requests - 1)]
    rows = [
        (f"bytes per slot: {part}", float(size), "bytes")
        for part, size in table.bytes_per_slot.items()
    ]
    rows += measure_admission(table, options.repeats)
    last = table.admit(SamplingParams())
    rows += measure_calls(table, [*slots, last], options.repeats)
    rows += measure_ops(table, [*slots, last], options.repeats)

    shown = Table(title=f"{options.requests} requests, V = {options.vocab_size}, {record['name']}")
    shown.add_column("what")
    shown.add_column("median", justify="right")
    shown.add_column("unit")
    for what, value, unit in rows:
        shown.add_row(what, f"{value:,.1f}" if value >= 10 else f"{value:.3f}", unit)
    Console(width=100).print(shown)
    if options.json:
        options.json.write_text(
            json.dumps(
                {
                    "environment": record,
                    "vocab_size": options.vocab_size,
                    "requests": options.requests,
                    "figures": [{"what": w, "value": v, "unit": u} for w, v, u in rows],
                },
                indent=1,
            )
        )


if __name__ == "__main__":
    main()
