"""Time and memory of logprobs at many positions, beside one read of the logits and log_softmax.

    python bench/bench_prompt_logprobs.py [--rows 512 2048 8192] [--vocab 128256] [--json FILE]
    python bench/bench_prompt_logprobs.py --no-linear --no-memory --backends triton --dtype bf16

On a GPU: `prompt_logprobs_out` as replays of a CUDA graph over logits of more than four times the
L2 (rotating over several where one is smaller), each case checked against a float64 log_softmax
before it is timed; "x read" is in multiples of the read-once kernel at that shape. On the CPU:
calls by the clock, in turns with torch.log_softmax on the same threads, the least of each, where
the ratio is what counts. The exit status is 1 if a case failed.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import common
import peers
import torch
from common import DTYPES
from rich.console import Console
from rich.table import Table
from torch import Tensor

from graphed_sampling import PromptLogprobs, backends, linear_logprobs, new_prompt_output

OPS = torch.ops.graphed_sampling
BARS: Final = {"logprob": 1.15, "top 20": 1.5, "half of the rows": 0.6 * 1.15}
"""Multiples of one read, on an H200 from 2048 rows on."""
CPU_BAR: Final = 1.5
"""Of 512 rows of 128256 on the CPU, multiples of log_softmax."""
LINEAR_BAR: Final = 1.15
"""Of forward and backward, multiples of torch's three products with a cross entropy."""


@dataclass(frozen=True)
class Case:
    """What is asked of every row."""

    name: str
    wishes: dict[str, Any]
    filters: dict[str, float] | None = None
    half: bool = False


CASES: Final = [
    Case("logprob", {}),
    Case("half of the rows", {}, half=True),
    Case("top 20", {"top_n": 20}),
    Case("rank", {"rank": True}),
    Case("entropy", {"entropy": True}),
    Case("processed, T = 0.8", {}, {"temperature": 0.8}),
    Case("processed, top-k 50, top-p 0.95", {}, {"temperature": 0.8, "top_k": 50, "top_p": 0.95}),
]


def make_call(
    case: Case, inputs: list[Tensor], tokens: Tensor, backend: str
) -> tuple[Callable[[int], None], Tensor]:
    """A call that scores input i, and the record that it writes."""
    count, device = tokens.shape[0], tokens.device
    top_n = case.wishes.get("top_n", 0)
    record = new_prompt_output(count, top_n, device=device)
    arguments: dict[str, Any] = dict(case.wishes)
    for name, value in (case.filters or {}).items():
        dtype = torch.int32 if name == "top_k" else torch.float32
        arguments[name] = torch.full((count,), value, dtype=dtype, device=device)
    if case.half:
        # Every other row, as they stand in a mixed batch.
        arguments["rows"] = torch.arange(count, device=device) % 2 == 0

    def call(i: int) -> None:
        OPS.prompt_logprobs_out(
            inputs[i % len(inputs)], tokens, record, backend=backend, **arguments
        )

    return call, record


def check(case: Case, logits: Tensor, tokens: Tensor, record: Tensor) -> None:
    """Of some rows, raw logprobs (and those at a temperature) are those of float64."""
    if case.filters and len(case.filters) > 1:
        return  # the tests compare filtered rows with the reference
    got = PromptLogprobs.of(record, case.wishes.get("top_n", 0)).logprobs
    rows = torch.arange(0, logits.shape[0], max(logits.shape[0] // 16, 1) * 2)
    exact = logits[rows].double() / (case.filters or {}).get("temperature", 1.0)
    expected = exact.log_softmax(1).gather(1, tokens[rows, None])[:, 0]
    tolerance = 2e-6 * (expected.abs() / 8).clamp(min=1)
    if not ((got[rows].double() - expected).abs() <= tolerance).all():
        raise peers.CheckFailedError(f"{case.name}: not the logprobs of float64")


class GPU:
    """The benchmark on a GPU."""

    def __init__(self, arguments: argparse.Namespace, device: torch.device) -> None:
        self.arguments, self.device = arguments, device
        self.timer = common.GraphTimer(device)
        self.results: list[dict[str, Any]] = []
        self.failed = False
        self.console = Console()

    def run(self) -> None:
        for dtype in self.arguments.dtype:
            for rows in self.arguments.rows:
                self.compare(dtype, rows)
        if self.arguments.memory:
            self.memory()
        if self.arguments.linear:
            self.linear()

    def compare(self, dtype: str, rows: int) -> None:
        vocab = self.arguments.vocab
        inputs = common.Inputs(self.device, rows)
        logits = inputs.buffers("lm", vocab, DTYPES[dtype], rows)
        generator = torch.Generator(self.device).manual_seed(3)
        tokens = torch.randint(vocab, (rows,), generator=generator, device=self.device)
        reads = [peers.ReadOnce(logits, shape) for shape in peers.READ_SHAPES]
        read = min(self.timer.time(r.call, len(logits)).median for r in reads)
        table = Table(title=f"{rows} rows of {vocab}, {dtype}: one read takes {read:.1f} us")
        table.add_column("case")
        for name in ("us", "x read", "bar", "ok"):
            table.add_column(name, justify="right")

        def add(name: str, call: Callable[[int], None], bar: float | None) -> None:
            timing = self.timer.time(call, len(logits))
            ratio = timing.median / read
            self.results.append(
                {"case": name, "dtype": dtype, "rows": rows, "vocab": vocab, "us": timing.median,
                 "p90": timing.p90, "read_us": read, "x_read": ratio, "bar": bar}
            )  # fmt: skip
            ok = "" if bar is None else "yes" if ratio <= bar else "no"
            table.add_row(name, f"{timing.median:.1f}", f"{ratio:.2f}", f"{bar or ''}", ok)

        for backend in self.arguments.backends:
            for case in CASES:
                if not any(part in case.name for part in self.arguments.only):
                    continue
                call, record = make_call(case, logits, tokens, backend)
                try:
                    call(0)
                    check(case, logits[0], tokens, record)
                    add(
                        f"{backend}: {case.name}",
                        call,
                        BARS.get(case.name) if rows >= 2048 else None,
                    )
                except Exception as error:
                    self.failed = True
                    table.add_row(f"{backend}: {case.name}", "FAILED", str(error)[:60], "", "")

        def engine(i: int) -> None:
            peers.log_softmax_logprob(logits[i % len(logits)].float(), tokens)

        add("log_softmax(x.float()).gather", engine, None)
        add("a logsumexp in one read", lambda i: one_read(logits[i % len(logits)], tokens), None)
        self.console.print(table)

    def memory(self) -> None:
        """Bytes beyond the logits, of 32768 positions at V = 151936."""
        vocab, count = 151936, 32768
        rows = torch.randn(1024, vocab, device=self.device, dtype=torch.bfloat16)
        logits = rows.repeat(count // 1024, 1)
        tokens = torch.randint(vocab, (count,), device=self.device)
        for backend in self.arguments.backends:
            for case in CASES:
                call, _ = make_call(case, [logits], tokens, backend)
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                call(0)
                torch.cuda.synchronize()
                peak = torch.cuda.max_memory_allocated() - before
                self.results.append(
                    {
                        "case": f"{backend}: {case.name}",
                        "memory": peak,
                        "rows": count,
                        "vocab": vocab,
                    }
                )
                print(f"{count} x {vocab} bf16, {backend}, {case.name}: {peak / 1e6:.0f} MB")

    def linear(self) -> None:
        """Forward and backward from hidden states, against torch's products and cross entropy."""
        count, width, vocab = self.arguments.positions, 2048, self.arguments.vocab
        generator = torch.Generator(self.device).manual_seed(4)
        hidden = torch.randn(count, width, generator=generator, device=self.device).bfloat16()
        weight = (
            torch.randn(vocab, width, generator=generator, device=self.device).bfloat16() * 0.02
        )
        tokens = torch.randint(vocab, (count,), generator=generator, device=self.device)
        hidden.requires_grad_()
        weight.requires_grad_()

        def plain() -> None:
            loss = torch.nn.functional.cross_entropy(hidden @ weight.t(), tokens, reduction="sum")
            torch.autograd.grad(loss, (hidden, weight))

        def ours(**options: int) -> Callable[[], None]:
            def call() -> None:
                got = linear_logprobs(hidden, weight, tokens, **options)
                torch.autograd.grad(-got.logprobs.sum(), (hidden, weight))

            return call

        contenders = {
            "torch: products and cross entropy": plain,
            "linear_logprobs": ours(),
            "linear_logprobs, saved_rows = 0": ours(saved_rows=0),
            f"linear_logprobs, saved_rows = {count}": ours(saved_rows=count),
            "linear_logprobs, chunk_rows = 512": ours(chunk_rows=512),
        }
        times, peaks = self.in_turns(contenders)
        for name, milliseconds in times.items():
            ratio, peak = milliseconds / next(iter(times.values())), peaks[name]
            self.results.append({"case": name, "ms": milliseconds, "memory": peak, "rows": count})
            print(
                f"{count} x {width} x {vocab} bf16, {name}: {milliseconds:.2f} ms "
                f"({ratio:.2f}x, bar {LINEAR_BAR}), peak {peak / 1e9:.2f} GB"
            )

    def in_turns(
        self, contenders: dict[str, Callable[[], None]]
    ) -> tuple[dict[str, float], dict[str, int]]:
        """Of calls, in turns since matrix products heat the device: median milliseconds, and the
        peaks of bytes beyond what was there."""
        times: dict[str, list[float]] = {name: [] for name in contenders}
        peaks = {}
        for turn in range(12):
            for name, call in contenders.items():
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                call()
                end.record()
                torch.cuda.synchronize()
                if turn > 0:  # the first takes its memory, and compiles
                    times[name].append(start.elapsed_time(end))
                    peaks[name] = torch.cuda.max_memory_allocated() - before
        return {name: statistics.median(of) for name, of in times.items()}, peaks


def one_read(logits: Tensor, tokens: Tensor) -> None:
    peers.one_read_logprob(logits, tokens)


def run_on_cpu(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Ratios to log_softmax, which writes to memory that it is given."""
    torch.set_num_threads(arguments.threads)
    results = []
    for dtype in arguments.dtype:
        for rows in arguments.rows:
            inputs = common.Inputs(torch.device("cpu"), 1, least_rows=rows)
            logits = inputs.rows("lm", arguments.vocab, DTYPES[dtype])[:rows]
            tokens = torch.randint(arguments.vocab, (rows,))
            result = torch.empty_like(logits)

            def peer(logits: Tensor = logits, result: Tensor = result) -> None:
                torch.log_softmax(logits, -1, out=result)

            table = Table(
                title=f"{rows} rows of {arguments.vocab}, {dtype}, threads: {arguments.threads}"
            )
            table.add_column("case")
            for name in ("ms", "log_softmax, ms", "ratio"):
                table.add_column(name, justify="right")
            for backend in arguments.backends:
                for case in CASES:
                    if not any(part in case.name for part in arguments.only):
                        continue
                    call, record = make_call(case, [logits], tokens, backend)
                    call(0)
                    check(case, logits, tokens, record)
                    ours, theirs = common.least_times(
                        [lambda call=call: call(0), peer], arguments.rounds
                    )
                    results.append(
                        {"case": f"{backend}: {case.name}", "dtype": dtype, "rows": rows,
                         "ms": ours * 1e3, "log_softmax_ms": theirs * 1e3}
                    )  # fmt: skip
                    table.add_row(
                        f"{backend}: {case.name}", f"{ours * 1e3:.1f}", f"{theirs * 1e3:.1f}",
                        f"{ours / theirs:.2f}",
                    )  # fmt: skip
            Console().print(table)
    print(f"The bar for logprobs of 512 rows of 128256, cpu: {CPU_BAR}")
    return results


def main() -> None:
    device = common.default_device()
    on_gpu = device.type == "cuda"
    candidates = ("cuda", "triton", "torch") if on_gpu else ("cpu", "torch")
    usable = [n for n in candidates if not backends.module(n).unusable(device)]
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--rows", type=int, nargs="*", default=[512, 2048, 8192] if on_gpu else [512]
    )
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--dtype", nargs="+", default=["fp32", "bf16"], choices=DTYPES)
    parser.add_argument(
        "--backends", nargs="+", default=[n for n in usable if n != "torch"] or usable
    )
    parser.add_argument(
        "--only", nargs="+", default=[""], help="cases whose name holds one of these"
    )
    parser.add_argument("--positions", type=int, default=8192, help="of the linear form")
    parser.add_argument("--no-memory", dest="memory", action="store_false")
    parser.add_argument("--no-linear", dest="linear", action="store_false")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="on the CPU")
    parser.add_argument("--rounds", type=int, default=10, help="on the CPU")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    failed = False
    if on_gpu:
        benchmark = GPU(arguments, device)
        benchmark.run()
        results, failed = benchmark.results, benchmark.failed
    else:
        results = run_on_cpu(arguments)
    if arguments.json:
        record = {"environment": common.environment(device), "results": results}
        arguments.json.write_text(json.dumps(record, indent=1))
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
