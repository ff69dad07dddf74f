"""Steps over vocab-sharded logits: our transports, beside all-gathers and one GPU's step.

    torchrun --nproc-per-node 2 bench/bench_distributed.py [--rows 1 32 256] [--vocab 128256]
        [--dtype bf16] [--steps 100000] [--json FILE]
    python bench/bench_distributed.py [--ranks 2] [--rows 1 8 32]

Every contender is a CUDA graph of many steps, replayed on all ranks at once; time per step =
replay / steps, the slowest rank's, of which the median over the replays is shown. Logits lie where
an LM head would have left them: one buffer, in the L2 as far as it fits, for all contenders alike.
Rows are those of a language model ("lm" in common.py); requests have T = 0.8, top-k 50, top-p 0.95
and want the logprob of their token.

Before a time is taken, every rank's tokens must be those of one GPU that has all logits
(FlashInfer's must lie in the support). The long run then replays steps of the default transport:
all tokens of all steps, hashed on the device, must be equal on all ranks and on one GPU, and their
numbers must follow the law of their row. The exit status is 1 if a check failed, not if a bar was
missed.

Without torchrun all ranks are streams of one GPU, which wait for each other as they would across a
link: what a step costs when the link costs nothing, and they share the GPU. So many rows that the
kernels of all ranks do not fit side by side cannot be run so.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import common
import peers
import torch
import torch.distributed as dist
from common import DTYPES
from rich.console import Console
from rich.table import Table
from torch import Tensor

from graphed_sampling import GraphedSampler, RequestTable, SamplingParams
from graphed_sampling.backends import cuda
from graphed_sampling.distributed import VocabParallelSampler
from graphed_sampling.graph import BucketedSampler
from graphed_sampling.sampler import new_output, new_scratch
from graphed_sampling.testing import chi_square

FILTERS: Final = peers.Filters(temperature=0.8, top_k=50, top_p=0.95)
BARS: Final = {1: 15.0, 32: 20.0}
"""Microseconds of a step of so many rows; of 256, 1.3 times the step of one GPU on its part of the
vocabulary, and 10."""
STEPS_OF_GRAPH: Final = 50
REPLAYS: Final = 40
FALSE_ALARM: Final = 1e-6
OPS: Final = torch.ops.graphed_sampling
RIVAL: Final = "FlashInfer top_k_renorm, top_p"

Step = Callable[[], None]


@dataclass
class Bench:
    """What all contenders share, on this rank."""

    device: torch.device
    rank: int
    size: int
    vocab: int
    dtype: torch.dtype

    def table(self, rows: int, vocab: int, params: SamplingParams) -> RequestTable:
        table = RequestTable(rows, vocab, device=self.device, seed=1, penalties=False)
        for i in range(rows):
            table.admit(params, [i])
        return table

    def logits(self, rows: int) -> Tensor:
        """[rows, vocab], the same on all ranks."""
        inputs = common.Inputs(self.device, 1, least_rows=rows)
        logits = inputs.rows("lm", self.vocab, self.dtype)[:rows].contiguous()
        dist.broadcast(logits, 0)
        return logits

    def everywhere(self, value: float) -> list[float]:
        """Of all ranks."""
        told: list[Any] = [None] * self.size
        dist.all_gather_object(told, value)
        return told

    def capture(self, step: Step, steps: int) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(steps):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        return graph

    def time(self, step: Step) -> float:
        """Microseconds a step."""
        graph = self.capture(step, STEPS_OF_GRAPH)
        samples = []
        for _ in range(REPLAYS):
            dist.barrier()
            torch.cuda.synchronize()
            # What is timed is enqueued while the device spins, so that ranks begin together.
            torch.cuda._sleep(2_000_000)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            samples.append(max(self.everywhere(1e3 * start.elapsed_time(end) / STEPS_OF_GRAPH)))
        return statistics.median(samples)


def step_of(sampler: BucketedSampler, rows: int) -> Step:
    """The sampler's step of the slots up to rows, as it is captured, for graphs of many."""
    bucket = sampler.row_buckets[-1]
    sampler.table.upload()
    sampler._inputs.set_slots(torch.arange(rows, dtype=torch.int32), bucket)
    return lambda: sampler._step_of_bucket(bucket)


class Contenders:
    """Of so many rows. Each is made when it is asked for: name -> step, and its tokens."""

    def __init__(self, bench: Bench, rows: int, params: SamplingParams) -> None:
        self.bench, self.rows, self.params = bench, rows, params
        self.logits = bench.logits(rows)

    def sharded(self, transport: str) -> tuple[Step, Tensor]:
        b = self.bench
        table = b.table(self.rows, b.vocab, self.params)
        sampler = VocabParallelSampler(
            table, row_buckets=(self.rows,), logits_dtype=b.dtype, backend="cuda",
            transport=transport,
        )  # fmt: skip
        start, end = sampler.vocab_ranges[b.rank]
        sampler.logits_buffer(self.rows)[:, : end - start] = self.logits[:, start:end]
        return step_of(sampler, self.rows), sampler._step.output.token_ids[: self.rows]

    def one_gpu(self, logits: Tensor) -> tuple[Step, Tensor]:
        table = self.bench.table(self.rows, logits.shape[1], self.params)
        sampler = GraphedSampler(table, (self.rows,), self.bench.dtype, backend="cuda")
        sampler.logits_buffer(self.rows).copy_(logits)
        return step_of(sampler, self.rows), sampler._step.output.token_ids[: self.rows]

    def part(self) -> Tensor:
        """[rows, vocab / ranks], rounded up: this rank's shard."""
        width = -(-self.bench.vocab // self.bench.size)
        part = self.logits[:, self.bench.rank * width : (self.bench.rank + 1) * width]
        return torch.nn.functional.pad(part, (0, width - part.shape[1])).contiguous()

    def gather(self) -> tuple[Step, Tensor]:
        """An all-gather of the logits, and where they end up: [rows, >= vocab]."""
        size, part = self.bench.size, self.part()
        gathered = part.new_empty(size, *part.shape)
        whole = part.new_empty(self.rows, size * part.shape[1])

        def step() -> None:
            dist.all_gather_into_tensor(gathered.view(-1), part.view(-1))
            whole.view(self.rows, size, -1).copy_(gathered.transpose(0, 1))

        return step, whole

    def gathered_then_ours(self) -> tuple[Step, Tensor]:
        gather, whole = self.gather()
        table = self.bench.table(self.rows, self.bench.vocab, self.params)
        sampler = GraphedSampler(
            table, (self.rows,), self.bench.dtype, logits_width=whole.shape[1], backend="cuda"
        )
        gather()
        # As if gathered to where the step reads.
        sampler._logits = whole
        step = step_of(sampler, self.rows)

        def both() -> None:
            gather()
            step()

        return both, sampler._step.output.token_ids[: self.rows]

    def gathered_then_flashinfer(self) -> tuple[Step, Tensor]:
        gather, whole = self.gather()
        batch = peers.Batch(FILTERS, self.rows, self.bench.device)
        rival = next(r for r in peers.RIVALS if r.name == RIVAL)
        sample = rival.make(batch)
        tokens = torch.zeros(self.rows, dtype=torch.int64, device=self.bench.device)
        logprobs = torch.zeros(self.rows, device=self.bench.device)

        def step() -> None:
            gather()
            logits = whole[:, : self.bench.vocab].contiguous()
            tokens.copy_(sample(logits))
            logprobs.copy_(peers.one_read_logprob(logits, tokens))

        return step, tokens


def check_tokens(bench: Bench, contenders: Contenders, step: Step, tokens: Tensor) -> bool:
    """Whether the tokens of three steps are those of one GPU, on all ranks."""
    reference, expected = contenders.one_gpu(contenders.logits)
    equal = True
    for _ in range(3):
        step()
        reference()
        equal &= torch.equal(tokens, expected)
    return all(bench.everywhere(float(equal)))


def check_support(bench: Bench, contenders: Contenders, step: Step, tokens: Tensor) -> bool:
    step()
    inside = all(
        bool(peers.support(row, FILTERS, joint=False)[token])
        for row, token in zip(contenders.logits, tokens.tolist(), strict=True)
    )
    return all(bench.everywhere(float(inside)))


def run_rows(bench: Bench, rows: int, results: list[dict[str, Any]]) -> bool:
    """Times of all contenders for so many rows; whether all checks passed."""
    params = SamplingParams(
        temperature=FILTERS.temperature, top_k=FILTERS.top_k, top_p=FILTERS.top_p, logprobs=0
    )
    contenders = Contenders(bench, rows, params)
    absent = next(r for r in peers.RIVALS if r.name == RIVAL).absent
    exact: Any = check_tokens
    cases: list[tuple[str, Callable[[], tuple[Step, Tensor]], Any, str]] = [
        ("symmetric", lambda: contenders.sharded("symmetric"), exact, ""),
        ("exchange", lambda: contenders.sharded("exchange"), exact, ""),
        ("one GPU, its part", lambda: contenders.one_gpu(contenders.part()), None, ""),
        ("all-gather, our step", contenders.gathered_then_ours, exact, ""),
        (f"all-gather, {RIVAL}", contenders.gathered_then_flashinfer, check_support, absent),
    ]
    passed = True
    found: dict[str, float] = {}
    for name, make, check, reason in cases:
        outcome = reason
        made = None
        if not reason:
            try:
                made = make()
            except ValueError as error:  # a transport that does not serve here
                outcome = str(error)
        if made is not None:
            step, tokens = made
            if check is not None and not check(bench, contenders, step, tokens):
                outcome, passed = "FAILED", False
            else:
                found[name] = bench.time(step)
        results.append({"rows": rows, "name": name, "us": found.get(name), "outcome": outcome})
    if bench.rank == 0:
        part = found["one GPU, its part"]
        bar = BARS.get(rows, 1.3 * part + 10.0)
        show(rows, bar, [r for r in results if r["rows"] == rows])
    return passed


def show(rows: int, bar: float, results: list[dict[str, Any]]) -> None:
    table = Table(title=f"{rows} rows, us a step; bar of ours: {bar:.1f}")
    table.add_column("contender")
    table.add_column("us", justify="right")
    table.add_column("within the bar")
    for result in results:
        us = result["us"]
        ours = result["name"] == "symmetric"
        within = ("yes" if us <= bar else "NO") if ours and us is not None else ""
        table.add_row(result["name"], result["outcome"] if us is None else f"{us:.1f}", within)
    Console().print(table)


def run_long(bench: Bench, steps: int, rows: int = 32) -> dict[str, Any]:
    """Many steps whose rows are all the same one, without filters; what they draw, counted."""
    params = SamplingParams(logprobs=0)
    contenders = Contenders(bench, rows, params)
    contenders.logits[:] = contenders.logits[0]
    results: dict[str, Any] = {"steps": steps, "rows": rows}
    hashes = []
    for name in ("all ranks", "one GPU"):
        if name == "all ranks":
            step, tokens = contenders.sharded("auto")
        else:
            step, tokens = contenders.one_gpu(contenders.logits)
        trail = torch.zeros(1, dtype=torch.int64, device=bench.device)
        counts = torch.zeros(bench.vocab, dtype=torch.int64, device=bench.device)
        ones = torch.ones(rows, dtype=torch.int64, device=bench.device)
        weights = torch.arange(1, 2 * rows, 2, device=bench.device) * 0x9E3779B97F4A7C1

        def counted(
            step: Step = step, tokens: Tensor = tokens, trail: Tensor = trail,
            counts: Tensor = counts, ones: Tensor = ones, weights: Tensor = weights,
        ) -> None:  # fmt: skip
            step()
            counts.index_add_(0, tokens, ones)
            trail.mul_(6364136223846793005).add_((tokens * weights).sum())

        graph = bench.capture(counted, STEPS_OF_GRAPH)
        for i in range(-(-steps // STEPS_OF_GRAPH)):
            graph.replay()
            if i % 100 == 99:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        hashes.append(int(trail))
        if name == "all ranks":
            probabilities = contenders.logits[0, : bench.vocab].double().softmax(0)
            try:
                results["p_value"] = chi_square(counts, probabilities, false_alarm=FALSE_ALARM)
            except AssertionError as error:
                results["failure"] = str(error)
    told: list[Any] = [None] * bench.size
    dist.all_gather_object(told, hashes)
    results["equal on all ranks"] = all(t[0] == told[0][0] for t in told)
    results["equal to one GPU"] = hashes[0] == hashes[1]
    return results


class RanksOfOneGPU:
    """Steps of several ranks, each on a stream of its own."""

    def __init__(self, rows: int, vocab: int, dtype: torch.dtype, ranks: int) -> None:
        device = torch.device("cuda")
        params = SamplingParams(
            temperature=FILTERS.temperature, top_k=FILTERS.top_k, top_p=FILTERS.top_p, logprobs=0
        )
        self.table = RequestTable(rows, vocab, device=device, seed=1, penalties=False)
        for i in range(rows):
            self.table.admit(params, [i])
        self.table.upload()
        self.layout = self.table.layout
        inputs = common.Inputs(device, 1, least_rows=rows)
        self.logits = inputs.rows("lm", vocab, dtype)[:rows].contiguous()
        width = -(-vocab // ranks)
        starts = tuple(min(rank * width, vocab) for rank in range(ranks + 1))
        self.parts = [
            torch.nn.functional.pad(self.logits[:, a:b], (0, width - (b - a))).contiguous()
            for a, b in pairwise(starts)
        ]
        words = cuda.exchange_words(self.layout, rows)
        self.exchanges = [
            torch.zeros(words, dtype=torch.int32, device=device) for _ in range(ranks)
        ]
        self.shards = [
            cuda.Shards(
                rank=rank,
                starts=starts,
                logits_addresses=tuple(part.data_ptr() for part in self.parts),
                exchange_addresses=tuple(e.data_ptr() for e in self.exchanges),
                limit_ns=1_000_000_000,
            )
            for rank in range(ranks)
        ]
        self.slots = torch.arange(rows, dtype=torch.int32, device=device)
        self.states = [self.table.state.clone() for _ in range(ranks)]
        self.outputs = [new_output(self.table, rows) for _ in range(ranks)]
        self.scratches = [new_scratch(self.table, "cuda", rows) for _ in range(ranks)]
        self.streams = [torch.cuda.Stream() for _ in range(ranks)]
        torch.cuda.synchronize()

    def launch(self, rank: int) -> None:
        cuda.sharded_step(
            self.parts[rank], self.slots, self.table.params, self.states[rank], self.table.tables,
            self.outputs[rank].record, self.scratches[rank], self.exchanges[rank], self.layout,
            self.shards[rank],
        )  # fmt: skip

    def one_step(self) -> None:
        for rank, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                self.launch(rank)
        torch.cuda.synchronize()

    def check(self) -> bool:
        """Whether all ranks draw what one GPU draws, step by step."""
        state = self.table.state.clone()
        output = new_output(self.table, self.slots.numel())
        scratch = new_scratch(self.table, "cuda", self.slots.numel())
        equal = True
        for _ in range(3):
            self.one_step()
            OPS.cuda_step(
                self.logits, self.slots, self.table.params, state, self.table.tables,
                output.record, scratch, self.layout.to_ints(),
            )  # fmt: skip
            equal &= all(torch.equal(o.record, output.record) for o in self.outputs)
        return equal and not any(cuda.failure(exchange) for exchange in self.exchanges)

    def time(self) -> float:
        """Microseconds a step of all ranks together."""
        graphs = []
        for rank, stream in enumerate(self.streams):
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1], stream=stream):
                for _ in range(STEPS_OF_GRAPH):
                    self.launch(rank)
        samples = []
        for _ in range(REPLAYS):
            torch.cuda.synchronize()
            torch.cuda._sleep(2_000_000)
            start, *ends = (
                torch.cuda.Event(enable_timing=True) for _ in range(1 + len(self.streams))
            )
            start.record()
            for stream, graph, end in zip(self.streams, graphs, ends, strict=True):
                stream.wait_event(start)
                with torch.cuda.stream(stream):
                    graph.replay()
                    end.record()
            torch.cuda.synchronize()
            samples.append(max(1e3 * start.elapsed_time(end) for end in ends) / STEPS_OF_GRAPH)
        return statistics.median(samples)


def run_on_one_gpu(rows: list[int], vocab: int, dtype: torch.dtype, ranks: int) -> bool:
    """Times of all ranks on one GPU, beside one rank that has its part alone, sharded or not."""
    table = Table(title=f"V = {vocab}, ranks on one GPU, us a step")
    for column in ("rows", f"{ranks} ranks", "one rank, its part, sharded", "not sharded"):
        table.add_column(column, justify="right")
    passed = True
    for n in rows:
        together = RanksOfOneGPU(n, vocab, dtype, ranks)
        alone = RanksOfOneGPU(n, -(-vocab // ranks), dtype, 1)
        equal = together.check() and alone.check()
        passed &= equal
        plain = GraphedSampler(alone.table, (n,), dtype, backend="cuda")
        plain.logits_buffer(n).copy_(alone.logits)
        bench = Bench(torch.device("cuda"), 0, 1, vocab, dtype)
        graph = bench.capture(step_of(plain, n), STEPS_OF_GRAPH)
        samples = []
        for _ in range(REPLAYS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(2_000_000)
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            samples.append(1e3 * start.elapsed_time(end) / STEPS_OF_GRAPH)
        table.add_row(
            str(n), f"{together.time():.1f}" if equal else "FAILED", f"{alone.time():.1f}",
            f"{statistics.median(samples):.1f}",
        )  # fmt: skip
    Console().print(table)
    return passed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, nargs="*")
    parser.add_argument("--ranks", type=int, default=2, help="of one GPU, without torchrun")
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument("--steps", type=int, default=100_000, help="of the long run; 0: none")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        if not torch.cuda.is_available():
            raise SystemExit("this needs a GPU, or several and torchrun --nproc-per-node")
        dtype = DTYPES[arguments.dtype]
        with torch.no_grad():
            done = run_on_one_gpu(
                arguments.rows or [1, 8, 32], arguments.vocab, dtype, arguments.ranks
            )
        raise SystemExit(0 if done else 1)
    if torch.cuda.device_count() < 2:
        raise SystemExit("this needs two GPUs")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    bench = Bench(
        device, dist.get_rank(), dist.get_world_size(), arguments.vocab, DTYPES[arguments.dtype]
    )
    results: list[dict[str, Any]] = []
    passed = True
    with torch.no_grad():
        for rows in arguments.rows or [1, 32, 256]:
            passed &= run_rows(bench, rows, results)
        long_run = run_long(bench, arguments.steps) if arguments.steps else {}
    if long_run:
        passed &= "failure" not in long_run and long_run["equal on all ranks"]
        passed &= long_run["equal to one GPU"]
        if bench.rank == 0:
            Console().print(long_run)
    if arguments.json and bench.rank == 0:
        record = {
            "environment": common.environment(device), "ranks": bench.size,
            "arguments": {k: str(v) for k, v in vars(arguments).items()},
            "results": results, "long_run": long_run,
        }  # fmt: skip
        arguments.json.write_text(json.dumps(record, indent=1))
    dist.destroy_process_group()
    if not passed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
