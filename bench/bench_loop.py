"""The loop: what waiting costs, how far GPU and CPU overlap, and both against the usual loop.

    python bench/bench_loop.py [--size 135m] [--batches 1 8 32 64 128] [--tokens 128] [--json FILE]

The model has the demo's shape and random weights, decoding captured. Four tables:

host      what a step costs the host beside the calls of model and sampler: planning, text, stop
          strings, logprobs, streaming to one task a request. More than a step of the device is idle
          time
waiting   a stream works for some milliseconds, again and again, and one task waits for it: the time
          from the end of the work to the waiter's next line, and the process's CPU time
overlap   the loop serves a batch with all of its bookkeeping (text, stop strings, logprobs): the
          device's idle share between steps, and the lag of the event loop, while all of them
          decode. Serial beside it
end       tokens / latency, the mean over requests, against the same model in a loop written the
          usual way: forward, FlashInfer (torch where that is missing) without a graph, `.cpu()`,
          the same bookkeeping, then the next step. Runs take turns, and the best of each counts

Without a GPU all of it runs on the CPU, with threads for streams: figures then say little.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import default_device, environment, synchronize
from rich.console import Console
from rich.table import Table

from graphed_sampling import (
    GraphedSampler,
    HostStream,
    IncrementalDecoder,
    LagProbe,
    RequestTable,
    SamplingParams,
    StepLoop,
    gpu_future,
    new_output,
)
from graphed_sampling.demo.random_model import SHAPES, RandomForward, RandomModel
from graphed_sampling.step.futures import eventfd_problem
from graphed_sampling.step.text import StopAutomaton, StopStrings

PROMPT_TOKENS = 32
STOPS = ("\n\nUser:", "<|stop|>")
PARTS = ["host", "waiting", "overlap", "end"]
SETTINGS = {
    "filtered": SamplingParams(temperature=0.8, top_k=50, top_p=0.95, logprobs=1, ignore_eos=True),
    "greedy": SamplingParams(temperature=0.0, logprobs=1, ignore_eos=True),
}


class Detokenizer:
    """Real detokenising, of made-up words: a `TokenDecoder`.

    By tokenizers where it is installed, as the demo does it; else in Python, which takes longer.
    """

    tokenizer: Any = None

    @classmethod
    def prepare(cls, vocab_size: int) -> None:
        if importlib.util.find_spec("tokenizers") is None:
            return
        from tokenizers import Tokenizer, decoders, models

        vocabulary = {f"\u0120word{i}": i for i in range(vocab_size)}
        cls.tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        cls.tokenizer.decoder = decoders.ByteLevel()

    def __init__(self) -> None:
        self._stream: Any = None
        if self.tokenizer is not None:
            from tokenizers.decoders import DecodeStream

            self._stream = DecodeStream(skip_special_tokens=True)
        self._incremental = IncrementalDecoder(lambda ids: "".join(f" word{i}" for i in ids))

    def push(self, token_id: int) -> str:
        if self._stream is None:
            return self._incremental.push(token_id)
        return self._stream.step(self.tokenizer, token_id) or ""

    def flush(self) -> str:
        return ""


# --------------------------------------------------------------------------- waiting


def gpu_worker(milliseconds: float) -> tuple[Any, Callable[[], Callable[[], float]]]:
    """A stream, and what gives it work and returns a function for the time of its end."""
    stream = torch.cuda.current_stream()
    probe = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    probe[0].record()
    torch.cuda._sleep(10_000_000)
    probe[1].record()
    torch.cuda.synchronize()
    cycles = int(10_000_000 * milliseconds / probe[0].elapsed_time(probe[1]))

    # The device's clock beside the host's, once: to ask for it in each round would be work too.
    base = torch.cuda.Event(enable_timing=True)
    base.record()
    base.synchronize()
    now = time.perf_counter()

    def work() -> Callable[[], float]:
        end = torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(cycles)
        end.record()
        return lambda: now + base.elapsed_time(end) / 1000

    return stream, work


def host_worker(milliseconds: float) -> tuple[Any, Callable[[], Callable[[], float]]]:
    stream = HostStream()

    def work() -> Callable[[], float]:
        def sleep() -> float:
            time.sleep(milliseconds / 1000)
            return time.perf_counter()

        return stream.submit(sleep).result

    return stream, work


async def wait_again_and_again(
    device: torch.device, wait: str, rounds: int, milliseconds: float
) -> dict[str, float]:
    stream, work = (gpu_worker if device.type == "cuda" else host_worker)(milliseconds)
    for _ in range(3):
        work()
        await gpu_future(stream, wait=wait)  # type: ignore[arg-type]
    probe = LagProbe(every=0.02)  # seldom: its thread is a part of the process's CPU time
    probe.start()
    wake_ups = []
    begun, cpu = time.perf_counter(), time.process_time()
    for _ in range(rounds):
        end = work()
        await gpu_future(stream, wait=wait)  # type: ignore[arg-type]
        wake_ups.append(time.perf_counter() - end())
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    probe.stop()
    return {
        "wake_up_p50_us": 1e6 * statistics.median(wake_ups),
        "wake_up_p99_us": 1e6 * sorted(wake_ups)[int(0.99 * (rounds - 1))],
        "cpu": cpu / seconds,
        "lag_p99_ms": 1e3 * probe.quantile(0.99),
    }


# --------------------------------------------------------------------------- the loops


class Contender:
    """One model with the two loops over it."""

    def __init__(self, size: str, batch: int, capacity: int, device: torch.device) -> None:
        self.shape, self.batch, self.capacity, self.device = SHAPES[size], batch, capacity, device
        self.model = RandomModel(self.shape, num_slots=batch, capacity=capacity, device=device)
        # The usual loop's own inputs and logits, as engines have them.
        self.tokens = torch.zeros(batch, dtype=torch.int64, device=device)
        self.positions = torch.ones(batch, dtype=torch.int64, device=device)
        self.logits = torch.zeros(
            batch, self.shape.vocab_size, dtype=self.model.dtype, device=device
        )
        self.sampling = FlashInferSampling if has_flashinfer(device) else TorchSampling
        self.table = RequestTable(batch, self.shape.vocab_size, device=device, seed=0)
        self.sampler = GraphedSampler(self.table, logits_dtype=self.model.dtype)
        self.step_forward = RandomForward.of(self.model, self.sampler)
        buckets = self.sampler.row_buckets
        self.forward = RandomForward(self.model, self.tokens, self.positions, self.logits, buckets)

    def prompts(self) -> list[list[int]]:
        size = self.shape.vocab_size
        return [[(17 * i + j) % size for j in range(PROMPT_TOKENS)] for i in range(self.batch)]

    def lengths(self, tokens: int) -> list[int]:
        """From half of `tokens` to all of them: requests end at different times."""
        return [tokens - (i * 7919) % (tokens // 2 + 1) for i in range(self.batch)]

    def make_loop(self, depth: int) -> StepLoop:
        return StepLoop(
            self.table,
            self.sampler,
            self.step_forward,
            depth=depth,
            max_length=self.capacity,
            max_prompts=self.batch,
            max_prefill_tokens=PROMPT_TOKENS * self.batch,
            max_unread=self.capacity,
            new_decoder=Detokenizer,
        )


def run_step_loop(
    contender: Contender, params: SamplingParams, tokens: int, depth: int
) -> dict[str, float]:
    """Rates from the first moment on; the rest while all requests decode."""
    loop, probe = contender.make_loop(depth), LagProbe()
    begun = 0
    totals: dict[str, float] = {}

    async def one(prompt: list[int], length: int) -> float:
        nonlocal begun
        start, count = time.perf_counter(), 0
        own = dataclasses.replace(params, max_tokens=length)
        async for delta in loop.generate(prompt, own, stop=STOPS):
            count += len(delta.token_ids)
            if count == 1:
                begun += 1
                if begun == contender.batch:
                    probe.start()
                    totals.update(
                        vars(loop.totals), cpu=time.process_time(), now=time.perf_counter()
                    )
            if count == length and not probe.stopped:  # the first that ends
                probe.stop()
                for name, value in vars(loop.totals).items():
                    totals[name] = value - totals[name]
                totals["cpu"] = time.process_time() - totals["cpu"]
                totals["now"] = time.perf_counter() - totals["now"]
        assert count == length
        return count / (time.perf_counter() - start)

    async def main() -> list[float]:
        async with loop:
            requests = zip(contender.prompts(), contender.lengths(tokens), strict=True)
            return list(await asyncio.gather(*(one(*request) for request in requests)))

    rates = asyncio.run(main())
    return {
        "rate": statistics.mean(rates),
        "idle": totals["gpu_idle_seconds"] / (totals["gpu_seconds"] + totals["gpu_idle_seconds"]),
        "step_ms": 1e3 * totals["gpu_seconds"] / totals["steps"],
        "lag_p50_ms": 1e3 * probe.quantile(0.5),
        "lag_p99_ms": 1e3 * probe.quantile(0.99),
        "cpu": totals["cpu"] / totals["now"],
        "tokens_per_second": totals["tokens"] / totals["now"],
    }


def has_flashinfer(device: torch.device) -> bool:
    return device.type == "cuda" and importlib.util.find_spec("flashinfer") is not None


class TorchSampling:
    """Temperature, top-k and top-p by a sort, and a multinomial draw."""

    name = "torch"

    def __init__(self, params: SamplingParams, rows: int, device: torch.device) -> None:
        self.params = params
        self.top_k = torch.full((rows,), params.top_k or 2**30, dtype=torch.int32, device=device)
        self.top_p = torch.full((rows,), params.top_p, device=device)

    def draw(self, logits: torch.Tensor) -> torch.Tensor:
        if self.params.is_greedy:
            return logits.argmax(-1)
        values, ids = logits.sort(-1, descending=True)
        ranks = torch.arange(values.shape[1], device=values.device)
        values = values.masked_fill(ranks >= self.top_k[: len(logits), None], -torch.inf)
        shares = values.softmax(-1)
        before = shares.cumsum(-1) - shares
        shares = shares.masked_fill(before >= self.top_p[: len(logits), None], 0.0)
        return ids.gather(1, shares.multinomial(1))[:, 0]

    def __call__(self, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Tokens, their logprobs, the best tokens and theirs."""
        logits = logits.float()
        token_ids = self.draw(logits if self.params.is_greedy else logits / self.params.temperature)
        logprobs = logits.log_softmax(-1)
        top = logprobs.topk(self.params.logprobs or 1, -1)
        return token_ids, logprobs.gather(1, token_ids[:, None])[:, 0], top.indices, top.values


class FlashInferSampling(TorchSampling):
    name = "FlashInfer"

    def draw(self, logits: torch.Tensor) -> torch.Tensor:
        import flashinfer

        if self.params.is_greedy:
            return logits.argmax(-1)
        rows = len(logits)
        return flashinfer.sampling.top_k_top_p_sampling_from_logits(
            logits, self.top_k[:rows], self.top_p[:rows]
        ).long()


def run_usual_loop(contender: Contender, params: SamplingParams, tokens: int) -> dict[str, float]:
    """Forward, sampling, `.cpu()`, bookkeeping, and again."""
    lengths, prompts = contender.lengths(tokens), contender.prompts()
    sampling = contender.sampling(params, contender.batch, contender.device)
    answers: list[list[int]] = [[] for _ in prompts]
    logprobs: list[list[tuple[float, list[tuple[int, float]]]]] = [[] for _ in prompts]
    texts = ["" for _ in prompts]
    detokenizers = [Detokenizer() for _ in prompts]
    automaton = StopAutomaton(STOPS)
    stops = [StopStrings(automaton) for _ in prompts]
    rates: list[float] = []
    begun = time.perf_counter()

    def bookkeep(rows: Sequence[int], outputs: Sequence[torch.Tensor]) -> None:
        token_ids, chosen, top_ids, top_values = (output.cpu().tolist() for output in outputs)
        for row, number in enumerate(rows):
            answers[number].append(token_ids[row])
            best = list(zip(top_ids[row], top_values[row], strict=True))
            logprobs[number].append((chosen[row], best))
            text, stop = stops[number].push(detokenizers[number].push(token_ids[row]))
            assert stop is None
            texts[number] += text
            if len(answers[number]) == lengths[number]:
                rates.append(lengths[number] / (time.perf_counter() - begun))

    with torch.no_grad():
        hidden = contender.forward.prefill(range(len(prompts)), np.array(prompts), 0)
        contender.model.write_logits(hidden, contender.logits)
        bookkeep(range(len(prompts)), sampling(contender.logits))
        while running := [i for i in range(len(prompts)) if len(answers[i]) < lengths[i]]:
            last = torch.tensor([answer[-1] for answer in answers])
            ends = torch.tensor([PROMPT_TOKENS + len(answer) for answer in answers])
            contender.tokens.copy_(last, non_blocking=True)
            contender.positions.copy_(ends, non_blocking=True)
            span = int(ends.max())
            contender.forward.decode(np.array(running, np.int32), span)
            bookkeep(running, sampling(contender.logits[: len(running)]))
    return {"rate": statistics.mean(rates)}


# --------------------------------------------------------------------------- the host


class InstantStream(HostStream):
    """Does its work at once: what is left is the loop itself."""

    def run(self, function: Callable[[], Any]) -> asyncio.Future[Any]:
        future = asyncio.get_running_loop().create_future()
        future.set_result(function())
        return future


def host_microseconds(batch: int, steps: int) -> float:
    """Of the loop, its callers included, for a step of a model and a sampler that take no time."""
    vocab_size = 2048
    table = RequestTable(batch, vocab_size, device="cpu", seed=0)
    output = new_output(table, batch)
    output.token_ids.fill_(7)
    output.logprobs.fill_(-1.0)
    output.top_token_ids.fill_(3)
    output.top_logprobs.fill_(-1.0)
    loop = StepLoop(
        table,
        None,
        lambda _batch: output,
        max_length=steps + 2,
        max_prompts=batch,
        max_unread=steps,
        new_decoder=Detokenizer,
    )
    loop._host_stream = InstantStream()
    params = dataclasses.replace(SETTINGS["greedy"], max_tokens=steps)

    async def one(number: int) -> None:
        async for _ in loop.generate([number, 1], params, stop=STOPS):
            pass

    async def main() -> None:
        async with loop:
            await asyncio.gather(*(one(number) for number in range(batch)))

    begun = time.perf_counter()
    asyncio.run(main())
    return 1e6 * (time.perf_counter() - begun) / loop.totals.steps


# --------------------------------------------------------------------------- the tables


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", choices=[*SHAPES], default=None)
    parser.add_argument("--batches", type=int, nargs="+", default=None)
    parser.add_argument("--overlap-batch", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=300, help="of waiting")
    parser.add_argument("--repeats", type=int, default=3, help="of each end-to-end run")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.tokens < 4:
        parser.error("--tokens: at least 4, so that there is a time in which all requests decode")
    device = default_device()
    on_gpu = device.type == "cuda"
    if not on_gpu:
        torch.set_num_threads(1)  # barriers between threads would cost more than so small a model
    size = options.size or ("135m" if on_gpu else "tiny")
    batches = options.batches or ([1, 8, 32, 64, 128] if on_gpu else [1, 8])
    parts = options.parts
    capacity = PROMPT_TOKENS + options.tokens
    Detokenizer.prepare(SHAPES[size].vocab_size)
    console = Console(width=110)
    record: dict[str, Any] = {"environment": environment(device), "size": size}

    if "host" in parts:
        table = Table("the loop itself", "a step", "a row")
        for batch in (1, 8, 64, 256):
            best = min(host_microseconds(batch, 200) for _ in range(3))
            record.setdefault("host", {})[str(batch)] = best
            table.add_row(f"batch {batch}", f"{best:.0f} us", f"{best / batch:.1f} us")
        console.print(table)

    if "waiting" in parts:
        waits = ["poll", "thread"] if eventfd_problem() else ["eventfd", "poll", "thread"]
        table = Table("waiting", "wake-up p50", "p99", "CPU", "loop lag p99")
        for wait in waits if on_gpu else ["auto"]:
            found = asyncio.run(wait_again_and_again(device, wait, options.rounds, 5.0))
            record.setdefault("waiting", {})[wait] = found
            table.add_row(
                wait if on_gpu else "a thread's work",
                f"{found['wake_up_p50_us']:.0f} us",
                f"{found['wake_up_p99_us']:.0f} us",
                f"{found['cpu']:.0%}",
                f"{found['lag_p99_ms']:.2f} ms",
            )
        console.print(table)

    if "overlap" in parts:
        batch = options.overlap_batch if on_gpu else min(options.overlap_batch, 16)
        contender = Contender(size, batch, capacity, device)
        title = f"overlap: batch {batch}, sampler backend {contender.sampler.backend}"
        columns = ("idle", "step", "loop lag p50", "p99", "CPU", "tokens/s")
        table = Table("depth", *columns, title=title, title_justify="left")
        for depth in (1, 1, 2, 0):  # the first warms up
            found = run_step_loop(contender, SETTINGS["filtered"], options.tokens, depth)
            record.setdefault("overlap", {})[str(depth)] = found
            if depth == 1 and len(record["overlap"]) == 1 and table.row_count == 0:
                table.add_row("1 (first)", *_overlap_cells(found))
            else:
                table.add_row(str(depth), *_overlap_cells(found))
        console.print(table)

    if "end" in parts:
        table = Table("end to end", "batch", "usual", "this loop", "ratio")
        for batch in batches:
            contender = Contender(size, batch, capacity, device)
            for name, params in SETTINGS.items():
                usual, ours = 0.0, 0.0
                for repeat in range(options.repeats + 1):
                    synchronize()
                    one = run_usual_loop(contender, params, options.tokens)["rate"]
                    synchronize()
                    other = run_step_loop(contender, params, options.tokens, 1)["rate"]
                    if repeat > 0:
                        usual, ours = max(usual, one), max(ours, other)
                found = {"usual": usual, "loop": ours, "ratio": ours / usual}
                found_by_name = record.setdefault("end", {}).setdefault(str(batch), {})
                found_by_name[name] = found | {"usual_sampling": contender.sampling.name}
                table.add_row(
                    f"{name}, against {contender.sampling.name}",
                    str(batch),
                    f"{usual:.1f}",
                    f"{ours:.1f}",
                    f"{ours / usual:.2f}",
                )
        console.print(table)

    if options.json:
        options.json.write_text(json.dumps(record, indent=1))


def _overlap_cells(found: dict[str, float]) -> list[str]:
    return [
        f"{found['idle']:.1%}",
        f"{found['step_ms']:.2f} ms",
        f"{found['lag_p50_ms']:.2f} ms",
        f"{found['lag_p99_ms']:.2f} ms",
        f"{found['cpu']:.0%}",
        f"{found['tokens_per_second']:.0f}",
    ]


if __name__ == "__main__":
    main()
