"""`StepLoop`: serial and overlapped, many requests, cancelled, failed, held, drained."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import importlib.util
import json
import math
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loop_model import EOS, LETTERS, VOCAB_SIZE, LoopModel, decode, usual_loop

from graphed_sampling import (
    Delta,
    DeltaStream,
    FinishReason,
    GraphedSampler,
    IncrementalDecoder,
    QueueFullError,
    RequestTable,
    RowFlags,
    Sampler,
    SamplingParams,
    StepBatch,
    StepLoop,
    StepLoopError,
    StepOutput,
    Tracer,
    new_output,
    new_scratch,
)
from graphed_sampling.step import loop as loop_module

WAITED_FOR = 60.0
DEPTHS = [0, 1, 3]
GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    ],
)


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), WAITED_FOR))


def make_loop(
    num_slots: int = 4, *, device: str = "cpu", model: LoopModel | None = None, **options: Any
) -> StepLoop:
    table = RequestTable(num_slots, VOCAB_SIZE, device=device, eos_token_ids=[EOS], seed=1)
    # Rows are independent, so "torch" stands for all backends: it compiles nothing.
    sampler = Sampler(table, "torch") if device == "cpu" else GraphedSampler(table)
    options = {"max_length": 64, "new_decoder": lambda: IncrementalDecoder(decode)} | options
    return StepLoop(table, sampler, model or LoopModel(num_slots, device), **options)


def model_of(loop: StepLoop) -> LoopModel:
    model = loop._forward
    assert isinstance(model, LoopModel)
    return model


async def collect(stream: DeltaStream) -> list[Delta]:
    return [delta async for delta in stream]


def tokens_of(deltas: Sequence[Delta], sample: int = 0) -> list[int]:
    return [i for delta in deltas if delta.sample == sample for i in delta.token_ids]


def text_of(deltas: Sequence[Delta], sample: int = 0) -> str:
    return "".join(delta.text for delta in deltas if delta.sample == sample)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def random_params(rng: random.Random) -> SamplingParams:
    choices: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"top_k": 5, "logprobs": 3},
        {"min_p": 0.05, "logprobs": 0, "rank": True},
        {"frequency_penalty": 1.0, "repetition_penalty": 1.3},
        {"logprob_token_ids": [3, 1], "logprobs_mode": "processed", "logprobs": 1},
        {"bad_words_ids": [[7, 8], [9]], "min_tokens": 3, "stop_token_ids": [11]},
    ]
    length = rng.choice([1, 2, 5, 12, 25, 40])
    params = SamplingParams(seed=rng.randrange(2**63), **rng.choice(choices))
    return dataclasses.replace(params, max_tokens=max(length, params.min_tokens))


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_request_gets_what_the_usual_loop_gives(depth: int) -> None:
    async def main() -> None:
        async with make_loop(depth=depth) as loop:
            for seed in range(6):
                prompt = [5 + seed, 9, 3]
                params = SamplingParams(seed=seed, logprobs=0, max_tokens=20)
                deltas = await collect(loop.generate(prompt, params))
                tokens, logprobs, reason = usual_loop(prompt, params)
                assert tokens_of(deltas) == tokens
                assert [p.logprob for d in deltas for p in d.logprobs] == logprobs
                assert deltas[-1].finish_reason is reason and deltas[-1].stop is None
                assert text_of(deltas) == decode(tokens)

    run(main)


@dataclasses.dataclass
class Case:
    prompt: list[int]
    params: SamplingParams
    n: int
    stop: tuple[str, ...]
    cancel_after: int | None  # deltas
    delay: int  # turns of the event loop before it is asked


def mixed_cases(count: int) -> list[Case]:
    rng = random.Random(3)
    return [
        Case(
            prompt=[rng.randrange(1, VOCAB_SIZE) for _ in range(rng.choice([1, 2, 7, 20]))],
            params=random_params(rng),
            n=rng.choice([1, 1, 1, 2]),
            stop=rng.choice([(), (), ("m", "bc"), (rng.choice(LETTERS) + rng.choice(LETTERS),)]),
            cancel_after=rng.choice([None, None, None, rng.randrange(1, 10)]),
            delay=rng.randrange(400),
        )
        for _ in range(count)
    ]


async def serve(loop: StepLoop, cases: Sequence[Case]) -> list[list[Delta]]:
    async def one(case: Case) -> list[Delta]:
        for _ in range(case.delay):
            await asyncio.sleep(0)
        stream = loop.generate(case.prompt, case.params, n=case.n, stop=case.stop)
        if case.cancel_after is None:
            return await collect(stream)
        deltas = []
        async for delta in stream:
            deltas.append(delta)
            if len(deltas) == case.cancel_after:
                break
        await stream.aclose()
        return deltas

    return await asyncio.gather(*map(one, cases))


def by_sample(deltas: Sequence[Delta], n: int) -> list[list[Delta]]:
    return [[d for d in deltas if d.sample == i] for i in range(n)]


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_serial_and_overlapped_are_equal(device: str) -> None:
    """200 mixed requests that arrive, end and are cancelled at random."""
    cases = mixed_cases(200)
    results: dict[int, list[list[Delta]]] = {}

    def at(depth: int) -> None:
        async def main() -> None:
            loop = make_loop(9, device=device, depth=depth, max_prefill_tokens=24, max_prompts=3)
            async with loop:
                results[depth] = await serve(loop, cases)
                await loop.drain()
                assert loop.num_active == loop.num_waiting == 0
            assert loop.table.num_free_slots == 9
            # What is wasted is bounded: `depth` row-steps a sample, one more for a stop string.
            if device == "cpu":
                samples = sum(case.n for case in cases)
                assert loop.totals.rows - loop.totals.tokens <= (depth + 1) * samples

        run(main)

    for depth in DEPTHS:
        at(depth)
    for i, case in enumerate(cases):
        for sample in range(case.n):
            serial, *others = [by_sample(results[depth][i], case.n)[sample] for depth in DEPTHS]
            for other in others:
                count = len(serial)
                if case.cancel_after is not None:
                    # Which sample's delta comes first may differ, and how far it got.
                    count = min(count, len(other))
                assert repr(other[:count]) == repr(serial[:count])
                assert case.cancel_after is not None or len(other) == len(serial)
    ended = [r[-1].finish_reason for r, c in zip(results[0], cases, strict=True) if r]
    assert {FinishReason.STOP, FinishReason.LENGTH} <= set(ended)
    assert any(d.stop for r in results[0] for d in r)


@pytest.mark.parametrize("depth", DEPTHS)
def test_row_steps_wasted(depth: int) -> None:
    """A request alone: none for a length, `depth` for a stop id, one more for a stop string."""

    async def rows(params: SamplingParams, stop: Sequence[str] = ()) -> int:
        async with make_loop(depth=depth) as loop:
            deltas = await collect(loop.generate([4, 2], params, stop=stop))
            await loop.drain()
            return loop.totals.rows - len(tokens_of(deltas))

    async def main() -> None:
        plain = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
        assert await rows(plain) == 0
        tokens, _, _ = usual_loop([4, 2], plain)
        stop_id = tokens[6]
        assert tokens.index(stop_id) == 6
        stopping = dataclasses.replace(plain, stop_token_ids=[stop_id])
        assert await rows(stopping) == depth
        assert depth <= await rows(plain, decode(tokens[5:7])) <= (depth + 1 if depth else 0)

    run(main)


def test_logprobs_go_to_those_who_asked() -> None:
    async def main() -> None:
        ask = [
            SamplingParams(seed=1, max_tokens=6),
            SamplingParams(seed=2, max_tokens=6, logprobs=0),
            SamplingParams(seed=3, max_tokens=6, logprobs=4, rank=True),
            SamplingParams(seed=4, max_tokens=6, logprob_token_ids=[7, 2]),
        ]
        async with make_loop() as loop:
            answers = await asyncio.gather(
                *(collect(loop.generate([8, i], p)) for i, p in enumerate(ask))
            )
        model = model_of(loop)
        for i, (params, deltas) in enumerate(zip(ask, answers, strict=True)):
            sequence = [8, i]
            for delta in deltas:
                state = 0
                for token in sequence:
                    state = (state * 31 + token + 1) % 1009
                row = model.logits[state % 211].log_softmax(0)
                sequence += delta.token_ids
                if i == 0:
                    assert delta.logprobs == ()
                    continue
                ((token, logprob, rank, top, given),) = delta.logprobs
                assert (token,) == delta.token_ids
                if params.logprobs is not None:
                    assert logprob == pytest.approx(float(row[token]), abs=1e-5)
                else:
                    assert math.isnan(logprob)
                assert rank == (int((row > row[token]).sum()) + 1 if params.rank else 0)
                best = row.topk(params.logprobs or 0)
                assert [t for t, _ in top] == best.indices.tolist()
                assert [v for _, v in top] == pytest.approx(best.values.tolist(), abs=1e-5)
                wanted = row[list(params.logprob_token_ids)].tolist()
                assert list(given) == pytest.approx(wanted, abs=1e-5)

    run(main)


@pytest.mark.parametrize("depth", DEPTHS)
def test_stop_strings_cut_the_text_where_they_begin(depth: int) -> None:
    async def main() -> None:
        async with make_loop(depth=depth) as loop:
            for seed in range(8):
                params = SamplingParams(
                    seed=seed, max_tokens=30, ignore_eos=True, logit_bias={0: -math.inf}
                )
                whole = decode(usual_loop([seed + 1], params)[0])
                for length in (1, 2, 3):
                    stop = whole[10 : 10 + length]
                    stops = [stop, "not in here"]
                    deltas = await collect(loop.generate([seed + 1], params, stop=stops))
                    end = whole.index(stop) + length
                    assert text_of(deltas) == whole[: end - length]
                    assert len(tokens_of(deltas)) == end
                    assert (deltas[-1].stop, deltas[-1].finish_reason) == (stop, FinishReason.STOP)
                # What looked like the beginning of one is shown in the end.
                deltas = await collect(loop.generate([seed + 1], params, stop=whole[-1] + "..."))
                assert text_of(deltas) == whole
                assert deltas[-1].finish_reason is FinishReason.LENGTH

    run(main)


def test_samples_share_their_stop_strings() -> None:
    async def main() -> None:
        loop = make_loop()
        stream = loop.submit([1], SamplingParams(max_tokens=2), n=3, stop=["ab", "c"])
        stops = [sample.stops for sample in stream._sink.samples]
        assert len({id(own) for own in stops}) == 3
        assert len({id(own._automaton) for own in stops if own is not None}) == 1
        await loop.aclose()

    run(main)


def test_n_samples_are_those_of_the_children() -> None:
    async def main() -> None:
        params = SamplingParams(seed=3, max_tokens=12)
        async with make_loop() as loop:
            deltas = await collect(loop.generate([1, 2, 3], params, n=7))
            for i in range(7):
                assert tokens_of(deltas, i) == usual_loop([1, 2, 3], params.child(i))[0]
            # Without a seed they differ all the same.
            deltas = await collect(loop.generate([1, 2, 3], SamplingParams(max_tokens=12), n=4))
            assert len({tuple(tokens_of(deltas, i)) for i in range(4)}) == 4

    run(main)


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("max_prefill_tokens", [1, 3, 7, 1000])
def test_prompts_in_chunks(max_prefill_tokens: int, depth: int) -> None:
    """The model checks that chunks are whole; tokens depend on every one of the prompt's."""

    async def main() -> None:
        loop = make_loop(3, depth=depth, max_prefill_tokens=max_prefill_tokens)
        params = SamplingParams(temperature=0.0, max_tokens=9)
        prompts = [
            [(7 * i + j) % 60 + 1 for j in range(length)]
            for i, length in enumerate([1, 20, 8, 7, 30])
        ]
        async with loop:
            answers = await asyncio.gather(*(collect(loop.generate(p, params)) for p in prompts))
        assert [tokens_of(a) for a in answers] == [usual_loop(p, params)[0] for p in prompts]
        for batch in model_of(loop).batches:
            assert sum(len(chunk.token_ids) for chunk in batch.prefill) <= max_prefill_tokens

    run(main)


def test_no_more_prompts_a_step_than_asked() -> None:
    async def main() -> None:
        loop = make_loop(6, max_prompts=2)
        params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
        async with loop:
            await asyncio.gather(*(collect(loop.generate([i + 1], params)) for i in range(6)))
        assert [len(batch.prefill) for batch in model_of(loop).batches][:3] == [2, 2, 2]

    run(main)


def test_freed_slots_are_told_once_and_before_they_are_used_again() -> None:
    async def main() -> None:
        loop = make_loop(2)
        params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        async with loop:
            for _ in range(5):
                await asyncio.gather(*(collect(loop.generate([i + 1], params)) for i in range(3)))
        # The model has checked that a prompt began in a slot that was told to be free.
        assert len(model_of(loop).freed) in (13, 14, 15)

    run(main)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_caller_who_does_not_read_is_held_and_holds_up_no_one(depth: int) -> None:
    async def main() -> None:
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        async with make_loop(depth=depth, max_unread=5) as loop:
            slow = loop.generate([3], params)
            fast = await collect(loop.generate([5], params))
            assert tokens_of(fast) == usual_loop([5], params)[0]
            (sample,) = slow._sink.samples
            assert (sample.enqueued, len(slow._sink.deltas)) == (5, 5)
            await asyncio.sleep(0.02)
            assert (sample.enqueued, len(slow._sink.deltas)) == (5, 5)
            assert tokens_of(await collect(slow)) == usual_loop([3], params)[0]

    run(main)


async def break_off(stream: DeltaStream, deltas: int) -> None:
    async for _ in stream:
        deltas -= 1
        if deltas <= 0:
            break


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_a_thousand_requests_closed_at_random_return_all_slots(device: str) -> None:
    """By aclose, by cancelling the task that reads, and by dropping the stream."""
    rng = random.Random(1)

    async def main() -> None:
        loop = make_loop(8, device=device, depth=1, max_waiting=2000)
        params = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)

        async def one(number: int) -> None:
            for _ in range(rng.randrange(3000)):
                await asyncio.sleep(0)
            stream = loop.generate([number % 60 + 1], params)
            deltas = rng.randrange(6)
            if number % 3 == 0:
                await break_off(stream, deltas)
                await stream.aclose()
            elif number % 3 == 1:
                task = asyncio.create_task(collect(stream))
                for _ in range(rng.randrange(400)):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
            else:
                await break_off(stream, deltas)

        async with loop:
            await asyncio.gather(*(one(i) for i in range(1000)))
            gc.collect()
            await until(lambda: loop.num_active == loop.num_waiting == 0)
            await until(lambda: loop.table.num_free_slots == 8)
            assert not loop._sinks
            assert (
                tokens_of(await collect(loop.generate([9], params))) == usual_loop([9], params)[0]
            )

    run(main)


def test_closing_frees_the_slot_for_who_waits() -> None:
    async def main() -> None:
        params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
        async with make_loop(1) as loop:
            first = loop.generate([1], params)
            second = loop.generate([2], params)
            assert (await first.__anext__()).token_ids
            assert loop.num_waiting == 1
            await first.aclose()
            with pytest.raises(StopAsyncIteration):
                await first.__anext__()
            assert tokens_of(await collect(second)) == usual_loop([2], params)[0]
            await first.aclose()  # harmless

    run(main)


@pytest.mark.parametrize("depth", DEPTHS)
def test_an_error_in_forward_reaches_every_waiter(depth: int) -> None:
    async def main() -> None:
        loop = make_loop(3, depth=depth)
        model_of(loop).fail_at = 4
        params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
        async with loop:
            waiting = [
                asyncio.create_task(collect(loop.generate([i + 1], params))) for i in range(7)
            ]
            await asyncio.wait(waiting)
            for task in waiting:
                error = task.exception()
                assert isinstance(error, StepLoopError) and str(error) == "device-side assert"
                assert isinstance(error.__cause__, RuntimeError)
            with pytest.raises(StepLoopError, match="the loop has failed: device-side assert"):
                loop.generate([1], params)
            await loop.drain()
        assert loop.table.num_free_slots == 3

    run(main)


@pytest.mark.parametrize(
    "error",
    [StopIteration("over"), asyncio.CancelledError(), SystemExit(3), KeyboardInterrupt()],
    ids=lambda error: type(error).__name__,
)
def test_whatever_forward_raises_ends_the_loop(error: BaseException) -> None:
    def forward(batch: StepBatch) -> torch.Tensor:
        raise error

    async def main() -> None:
        loop = make_loop(model=forward)  # type: ignore[arg-type]
        async with loop:
            with pytest.raises(StepLoopError, match=type(error).__name__) as caught:
                await collect(loop.generate([1], SamplingParams(max_tokens=2)))
            assert caught.value.__cause__ is not None
            assert caught.value.__cause__.__cause__ is error
            with pytest.raises(StepLoopError, match="the loop has failed"):
                loop.generate([1], SamplingParams(max_tokens=2))

    run(main)


@pytest.mark.parametrize(
    "error",
    [StopIteration("over"), asyncio.CancelledError(), ValueError()],
    ids=lambda error: type(error).__name__,
)
def test_whatever_forward_raises_in_the_loops_own_thread(error: BaseException) -> None:
    """As on a GPU, where no thread stands between."""

    def forward(batch: StepBatch) -> torch.Tensor:
        raise error

    async def main() -> None:
        loop = make_loop(model=forward)  # type: ignore[arg-type]
        loop._host_stream = None
        async with loop:
            # An error that says nothing is called by its name.
            with pytest.raises(StepLoopError, match=type(error).__name__):
                await collect(loop.generate([1], SamplingParams(max_tokens=2)))
            assert loop.failure is not None and not loop.is_open

    run(main)


@pytest.mark.parametrize("begun", [False, True])
def test_a_task_that_somebody_cancels_fails_the_loop(begun: bool) -> None:
    async def main() -> None:
        params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
        async with make_loop(2) as loop:
            stream = loop.generate([1], params)
            if begun:
                await stream.__anext__()
            assert loop._runner is not None
            loop._runner.cancel()
            with pytest.raises(StepLoopError, match="the loop's task was cancelled"):
                await collect(stream)
            with pytest.raises(StepLoopError, match="the loop has failed"):
                loop.generate([1], params)
            await loop.drain()
        assert loop.table.num_free_slots == 2

    run(main)


def test_an_error_of_one_request_is_its_own() -> None:
    class Broken:
        def push(self, token_id: int) -> str:
            raise UnicodeError("no such character")

        def flush(self) -> str:
            return ""

    async def main() -> None:
        decoders = iter([Broken(), IncrementalDecoder(decode)])
        params = SamplingParams(temperature=0.0, max_tokens=9)
        async with make_loop(new_decoder=lambda: next(decoders)) as loop:
            broken, whole = loop.generate([1], params), loop.generate([2], params)
            with pytest.raises(StepLoopError, match="no such character") as caught:
                await collect(broken)
            assert isinstance(caught.value.__cause__, UnicodeError)
            assert tokens_of(await collect(whole)) == usual_loop([2], params)[0]

    run(main)


def test_drain_lets_all_end_and_takes_no_more() -> None:
    async def main() -> None:
        loop = make_loop(2)
        params = SamplingParams(temperature=0.0, max_tokens=9)
        waiting = [asyncio.create_task(collect(loop.generate([i + 1], params))) for i in range(5)]
        await asyncio.sleep(0)
        await loop.drain()
        with pytest.raises(StepLoopError, match="takes no more requests"):
            loop.generate([1], params)
        answers = await asyncio.gather(*waiting)
        for i, deltas in enumerate(answers):
            assert tokens_of(deltas) == usual_loop([i + 1], params)[0]
        await until(lambda: loop.table.num_free_slots == 2)
        await loop.aclose()

    run(main)


def test_closing_the_loop_ends_every_request() -> None:
    async def main() -> None:
        loop = make_loop(2)
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=60)
        tasks = [asyncio.create_task(collect(loop.generate([i + 1], params))) for i in range(5)]
        await until(lambda: loop.totals.steps > 3)
        await loop.aclose()
        for task in tasks:
            with pytest.raises(StepLoopError, match="the loop was closed"):
                await task
        assert loop.table.num_free_slots == 2
        with pytest.raises(StepLoopError, match="takes no more"):
            loop.generate([1], params)
        await loop.aclose()

    run(main)


def test_closing_that_is_cancelled_goes_on_and_can_be_repeated() -> None:
    async def main() -> None:
        loop = make_loop(2)
        model_of(loop).gate.clear()  # a forward that runs, and that closing waits for
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=60)
        readers = [asyncio.create_task(collect(loop.generate([i + 1], params))) for i in range(3)]
        await until(lambda: loop.totals.steps > 0)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(loop.aclose(), 0.01)
        for reader in readers:  # they are told at once
            with pytest.raises(StepLoopError, match="the loop was closed"):
                await reader
        again = asyncio.create_task(loop.aclose())
        drained = asyncio.create_task(loop.drain())
        await asyncio.sleep(0)
        assert not again.done() and not drained.done()
        model_of(loop).gate.set()
        await asyncio.gather(again, drained)
        assert loop.table.num_free_slots == 2
        await loop.aclose()
        await loop.drain()

    run(main)


def test_draining_that_closing_cuts_short_returns() -> None:
    async def main() -> None:
        loop = make_loop(2)
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=60)
        stream = loop.generate([1], params)
        await stream.__anext__()
        drained = asyncio.create_task(loop.drain())
        await asyncio.sleep(0)
        await loop.aclose()
        assert await drained is None
        with pytest.raises(StepLoopError, match="the loop was closed"):
            await collect(stream)

    run(main)


def test_refusals_come_before_anything_is_queued() -> None:
    async def main() -> None:
        loop = make_loop(max_length=10, max_waiting=3)
        params = SamplingParams(max_tokens=4)
        refused: list[tuple[Any, ...]] = [
            ([], params, {}, "prompt_token_ids must be"),
            ([[1]], params, {}, "prompt_token_ids must be"),
            ([[1], [1, 2]], params, {}, "prompt_token_ids must be"),
            ([1.5], params, {}, "prompt_token_ids must be"),
            ([VOCAB_SIZE], params, {}, f"holds the id {VOCAB_SIZE}"),
            ([-1], params, {}, "holds the id -1"),
            ([1], {}, {}, "params is dict"),
            ([1], params, {"n": 0}, "n = 0 is not accepted"),
            ([1], params, {"n": True}, "n = True is not accepted"),
            ([1], params, {"stop": ""}, "stop = '' is not accepted"),
            ([1], params, {"stop": [3]}, r"stop = \[3\] is not accepted"),
            ([1], params, {"stop": "x" * 1025}, "stop has a string of 1025 characters"),
            ([1], params, {"grammar": 3}, "grammar must be a callable"),
            ([1] * 7, params, {}, "must fit into 10 tokens"),
            ([1] * 10, SamplingParams(), {}, "must fit into 10 tokens"),
            ([1] * 7, SamplingParams(min_tokens=4), {}, "min_tokens = 4 is not accepted"),
            ([1], SamplingParams(logprobs=21), {}, "logprobs = 21 is not accepted"),
            ([1], SamplingParams(stop_token_ids=[VOCAB_SIZE]), {}, "stop_token_ids holds"),
        ]
        for prompt, wrong, options, message in refused:
            with pytest.raises(ValueError, match=message):
                loop.submit(prompt, wrong, **options)
        assert loop.num_waiting == 0
        with pytest.raises(ValueError, match="n = 8 is not accepted: the loop holds at most 7"):
            loop.submit([1], params, n=8)
        assert loop.max_samples == 7 and loop.num_waiting == 0
        # Four of them will have a slot at the next step.
        streams = [loop.submit([1], params, n=5), loop.submit([1], params, n=2)]
        with pytest.raises(QueueFullError, match="4 samples would wait for a slot"):
            loop.submit([1], params)
        assert loop.num_waiting == 7 and len(streams) == 2
        without_text = make_loop(new_decoder=None)
        with pytest.raises(ValueError, match="the loop has no new_decoder"):
            without_text.submit([1], params, stop="x")
        await loop.aclose()
        await without_text.aclose()

    run(main)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": -1}, "depth = -1"),
        ({"depth": 1.0}, "depth = 1.0"),
        ({"max_length": 1}, "max_length = 1"),
        ({"max_waiting": 0}, "max_waiting = 0"),
        ({"max_prefill_tokens": 0}, "max_prefill_tokens = 0"),
        ({"max_prompts": 0}, "max_prompts = 0"),
        ({"max_unread": 0}, "max_unread = 0"),
        ({"wait": "always"}, "wait = 'always'"),
        ({"model": 3}, "forward is int"),
        ({"new_decoder": 3}, "new_decoder is int"),
        ({"tracer": 3}, "tracer is int"),
    ],
)
def test_loops_that_are_none(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_loop(**options)


def test_tables_that_do_not_serve() -> None:
    table = RequestTable(2, VOCAB_SIZE, device="cpu")
    other = Sampler(RequestTable(2, VOCAB_SIZE, device="cpu"), "torch")
    with pytest.raises(ValueError, match="table is NoneType"):
        StepLoop(None, other, LoopModel(2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sampler belongs to another table"):
        StepLoop(table, other, LoopModel(2))
    table.admit(SamplingParams())
    with pytest.raises(ValueError, match="table holds requests already"):
        StepLoop(table, Sampler(table, "torch"), LoopModel(2))


def test_a_table_belongs_to_one_open_loop() -> None:
    async def main() -> None:
        first = make_loop()
        sampler = Sampler(first.table, "torch")
        with pytest.raises(ValueError, match="belongs to another StepLoop, which is not closed"):
            StepLoop(first.table, sampler, LoopModel(4))
        await first.aclose()
        async with StepLoop(first.table, sampler, LoopModel(4)) as second:
            params = SamplingParams(seed=1, max_tokens=3)
            assert (
                tokens_of(await collect(second.generate([1], params)))
                == (usual_loop([1], params)[0])
            )

    run(main)


def test_steps_by_hand() -> None:
    """As an engine with a loop of its own calls them: bookkeeping one step behind."""

    async def main() -> None:
        loop = make_loop(2)
        params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
        streams = [loop.submit([i + 1], params) for i in range(2)]
        assert model_of(loop).batches == []
        before = await loop.async_forward()
        while before is not None:
            after = await loop.async_forward()
            await loop.async_bookkeep(before)
            before = after or await loop.async_forward()
        for i, stream in enumerate(streams):
            assert tokens_of(await collect(stream)) == usual_loop([i + 1], params)[0]
        assert await loop.async_forward() is None
        await loop.aclose()

    run(main)


@pytest.mark.parametrize("in_a_thread", [True, False])
def test_steps_by_hand_fail_the_loop(in_a_thread: bool) -> None:
    async def main() -> None:
        loop = make_loop(2)
        if not in_a_thread:
            loop._host_stream = None
        model_of(loop).fail_at = 0
        stream = loop.submit([1], SamplingParams(max_tokens=5))
        with pytest.raises(RuntimeError, match="device-side assert"):
            result = await loop.async_forward()
            assert result is not None
            await loop.async_bookkeep(result)
        assert str(loop.failure) == "device-side assert"
        with pytest.raises(StepLoopError, match="device-side assert"):
            await collect(stream)
        with pytest.raises(StepLoopError, match="the loop has failed: device-side assert"):
            await loop.async_forward()
        with pytest.raises(StepLoopError, match="the loop has failed"):
            loop.submit([1], SamplingParams(max_tokens=5))
        await loop.drain()  # returns at once
        await loop.aclose()
        assert loop.table.num_free_slots == 2

    run(main)


def test_a_forward_that_samples_itself() -> None:
    """As one graph of model and sampler would: it returns the output."""

    async def main() -> None:
        table = RequestTable(3, VOCAB_SIZE, device="cpu", eos_token_ids=[EOS])
        model = LoopModel(3)
        output, scratch = new_output(table, 3), new_scratch(table, "torch", 3)

        def forward(batch: StepBatch) -> Any:
            logits = model(batch)
            rows = len(batch.slots)
            torch.ops.graphed_sampling.sample_step(
                logits,
                batch.slots,
                table.params,
                table.state,
                table.tables,
                output.record[:rows],
                scratch,
                table.layout.to_ints(),
                "torch",
            )
            return StepOutput(output.record[:rows], table.layout)

        params = SamplingParams(seed=1, max_tokens=9)
        async with StepLoop(table, None, forward, max_length=64) as loop:
            answers = await asyncio.gather(
                *(collect(loop.generate([i + 1], params)) for i in range(7))
            )
        for i, deltas in enumerate(answers):
            assert tokens_of(deltas) == usual_loop([i + 1], params)[0]
            assert text_of(deltas) == ""
        async with StepLoop(table, None, LoopModel(3)) as loop:
            with pytest.raises(StepLoopError, match="must return a StepOutput"):
                await collect(loop.generate([1], params))
        async with StepLoop(table, Sampler(table, "torch"), forward) as loop:
            with pytest.raises(StepLoopError, match="must return logits: there is a sampler"):
                await collect(loop.generate([1], params))

    run(main)


def test_deltas_tell_of_rows_that_are_none() -> None:
    async def main() -> None:
        model = LoopModel(2)
        async with make_loop(2, model=model, max_prompts=1, depth=0) as loop:
            params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
            deltas = await collect(loop.generate([1], params))
            assert [delta.flags for delta in deltas] == [RowFlags(0)] * 3
            model.logits[:, 5] = math.nan
            deltas = await collect(loop.generate([1], params))
            assert [delta.flags for delta in deltas] == [RowFlags.NAN] * 3
            model.logits[:] = -math.inf
            deltas = await collect(loop.generate([1], params))
            assert [delta.flags for delta in deltas] == [RowFlags.EMPTY] * 3

    run(main)


def test_an_output_with_too_few_rows() -> None:
    async def main() -> None:
        table = RequestTable(3, VOCAB_SIZE, device="cpu")
        output = new_output(table, 1)
        async with StepLoop(table, None, lambda _batch: output) as loop:
            with pytest.raises(StepLoopError, match="StepOutput of 1 rows for 2 slots") as caught:
                await collect(loop.generate([1], SamplingParams(max_tokens=2), n=2))
            assert isinstance(caught.value.__cause__, ValueError)

    run(main)


@pytest.mark.parametrize("depth", DEPTHS)
def test_outputs_that_a_step_should_not_give(depth: int) -> None:
    """No finish reason where there must be one, and no token: no one hangs."""

    async def main() -> None:
        table = RequestTable(2, VOCAB_SIZE, device="cpu")
        output = new_output(table, 2)
        output.token_ids.fill_(7)

        def forward(batch: StepBatch) -> StepOutput:
            return StepOutput(output.record[: len(batch.slots)], table.layout)

        async with StepLoop(table, None, forward, depth=depth) as loop:
            deltas = await collect(loop.generate([1], SamplingParams(max_tokens=5)))
            assert tokens_of(deltas) == [7] * 5
            assert deltas[-1].finish_reason is FinishReason.LENGTH
            output.token_ids.fill_(-1)
            with pytest.raises(StepLoopError, match="drew no token for slot"):
                await collect(loop.generate([1], SamplingParams(max_tokens=5)))
            output.token_ids.fill_(8)
            assert tokens_of(await collect(loop.generate([1], SamplingParams(max_tokens=2)))) == [
                8,
                8,
            ]
            await loop.drain()
        assert table.num_free_slots == 2

    run(main)


def test_bookkeeping_yields_every_half_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that only the decoders move: each token takes a quarter of a slice."""
    now = [0.0]

    class Clock:
        perf_counter = staticmethod(lambda: now[0])

    class Slow:
        def push(self, token_id: int) -> str:
            now[0] += loop_module.SLICE_SECONDS / 4
            return ""

        def flush(self) -> str:
            return ""

    async def main() -> None:
        loop = make_loop(40, max_prompts=40, new_decoder=Slow)
        params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        streams = [loop.submit([i % 60 + 1], params) for i in range(40)]
        result = await loop.async_forward()
        assert result is not None
        await result.wait()
        assert result.arrived
        monkeypatch.setattr(loop_module, "time", Clock)
        turns = [now[0]]

        async def other() -> None:
            while True:
                turns.append(now[0])
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        await asyncio.sleep(0)
        await loop.async_bookkeep(result)
        task.cancel()
        gaps = np.diff(turns)
        assert gaps.max() <= loop_module.SLICE_SECONDS * 1.26 and 8 <= (gaps > 0).sum() <= 10
        monkeypatch.undo()
        await loop.aclose()
        for stream in streams:
            await stream.aclose()

    run(main)


def test_under_uvloop() -> None:
    if importlib.util.find_spec("uvloop") is None:
        pytest.skip("uvloop is not installed")
    import uvloop

    async def main() -> None:
        params = SamplingParams(temperature=0.0, max_tokens=20)
        async with make_loop(3) as loop:
            streams = [loop.generate([i + 1], params) for i in range(8)]
            await streams[5].aclose()
            for i, stream in enumerate(streams):
                tokens = tokens_of(await collect(stream))
                assert tokens == ([] if i == 5 else usual_loop([i + 1], params)[0])

    event_loop = uvloop.new_event_loop()
    event_loop.run_until_complete(asyncio.wait_for(main(), WAITED_FOR))
    event_loop.close()


def test_another_event_loop_is_refused() -> None:
    loop = make_loop()

    async def first() -> None:
        await collect(loop.generate([1], SamplingParams(max_tokens=2)))
        await loop.drain()

    run(first)

    async def second() -> None:
        with pytest.raises(ValueError, match="belongs to another event loop"):
            loop.submit([1], SamplingParams(max_tokens=2))

    run(second)


def test_two_tasks_cannot_read_one_stream() -> None:
    async def main() -> None:
        loop = make_loop()
        stream = loop.submit([1], SamplingParams(max_tokens=2))
        task = asyncio.create_task(stream.__anext__())
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="another task waits"):
            await stream.__anext__()
        loop.start()
        assert (await task).token_ids
        await loop.aclose()

    run(main)


def test_a_tracer_sees_every_step() -> None:
    async def main() -> None:
        tracer = Tracer()
        async with make_loop(tracer=tracer) as loop:
            await collect(
                loop.generate([1], SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))
            )
            await loop.drain()
        steps = loop.totals.steps
        names = [(span.lane, span.name) for span in tracer.spans]
        for step in range(steps):
            assert names.count(("GPU", f"step {step}")) == 1
            assert ("CPU phase", f"enqueue {step}") in names
            assert ("CPU phase", f"bookkeep {step}") in names
        assert all(span.start <= span.end for span in tracer.spans)
        gpu = [span for span in tracer.spans if span.lane == "GPU"]
        assert all(a.end <= b.start for a, b in pairwise(gpu))
        assert loop.totals.gpu_seconds == pytest.approx(sum(s.end - s.start for s in gpu))

    run(main)


# --------------------------------------------------------------------------- grammar


class Cycle:
    """A grammar for tests: an id of `groups[0]`, then one of `groups[1]` ... round and round."""

    def __init__(self, groups: Sequence[Sequence[int]], length: int) -> None:
        self.groups, self.left, self.at = groups, length, 0
        self.gate: threading.Event | None = None
        self.seen: list[int] = []

    def accept_token(self, token_id: int, /) -> bool:
        self.seen.append(token_id)
        allowed = token_id in self.groups[self.at]
        self.at = (self.at + 1) % len(self.groups)
        self.left -= 1
        return allowed

    def fill_next_token_bitmask(self, bitmask: torch.Tensor, index: int = 0, /) -> bool:
        if self.gate is not None:
            assert self.gate.wait(20)
        bits = np.zeros(32 * bitmask.shape[1], np.bool_)
        bits[list(self.groups[self.at])] = True
        bitmask[index] = torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32))
        return True

    def is_terminated(self) -> bool:
        return self.left == 0


GROUPS = [[3, 5, 9], [11, 40, 60], [1], [30, 31]]


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_grammar_row_obeys_its_grammar(depth: int) -> None:
    async def main() -> None:
        matchers: list[Cycle] = []

        def grammar() -> Cycle:
            matchers.append(Cycle(GROUPS, 13))
            return matchers[-1]

        async with make_loop(3, depth=depth) as loop:
            plain = SamplingParams(seed=2, max_tokens=25)
            streams = [
                loop.generate([i + 1], SamplingParams(seed=i), grammar=grammar) for i in range(4)
            ]
            other = await collect(loop.generate([7], plain))
            assert tokens_of(other) == usual_loop([7], plain)[0]
            for stream, matcher in zip(streams, matchers, strict=True):
                deltas = await collect(stream)
                tokens = tokens_of(deltas)
                assert tokens == matcher.seen and len(tokens) == 13
                assert all(t in GROUPS[i % 4] for i, t in enumerate(tokens))
                assert deltas[-1] == Delta(0, (), "", (), FinishReason.STOP, None)
                assert text_of(deltas) == decode(tokens)
        return

    run(main)


def test_grammar_overlapped_equals_serial() -> None:
    def answers(depth: int) -> list[list[int]]:
        found: list[list[int]] = []

        async def main() -> None:
            async with make_loop(3, depth=depth) as loop:
                streams = [
                    loop.generate(
                        [i + 1],
                        SamplingParams(seed=i, max_tokens=20, temperature=2.0),
                        grammar=(lambda: Cycle(GROUPS, 17)) if i % 2 else None,
                    )
                    for i in range(8)
                ]
                for stream in streams:
                    found.append(tokens_of(await collect(stream)))

        run(main)
        return found

    serial = answers(0)
    assert answers(1) == serial and answers(2) == serial
    assert len({tuple(a) for a in serial}) == 8


def test_other_rows_do_not_wait_for_a_mask() -> None:
    async def main() -> None:
        matcher = Cycle(GROUPS, 5)
        async with make_loop(3) as loop:
            held = loop.generate([1], SamplingParams(seed=1), grammar=lambda: matcher)
            assert (await held.__anext__()).token_ids
            matcher.gate = threading.Event()
            params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
            for i in range(3):
                deltas = await collect(loop.generate([5 + i], params))
                assert tokens_of(deltas) == usual_loop([5 + i], params)[0]
            assert loop.num_active >= 1 and len(matcher.seen) <= 2
            matcher.gate.set()
            assert len(tokens_of(await collect(held))) + 1 == 5

    run(main)


def test_a_token_that_the_grammar_refuses_ends_its_request() -> None:
    class Lying(Cycle):
        def accept_token(self, token_id: int, /) -> bool:
            return False

    async def main() -> None:
        async with make_loop(2) as loop:
            bad = loop.generate([1], SamplingParams(seed=1), grammar=lambda: Lying(GROUPS, 5))
            params = SamplingParams(temperature=0.0, max_tokens=9)
            assert (
                tokens_of(await collect(loop.generate([2], params))) == usual_loop([2], params)[0]
            )
            with pytest.raises(StepLoopError, match="the grammar does not allow the token"):
                await collect(bad)

    run(main)


def test_a_grammar_and_parameters_that_allow_nothing_together_end_the_request() -> None:
    async def main() -> None:
        async with make_loop(2) as loop:
            params = SamplingParams(seed=1, allowed_token_ids=[3, 5, 50])
            stream = loop.generate([1], params, grammar=lambda: Cycle(GROUPS, 9))
            assert (await stream.__anext__()).token_ids[0] in (3, 5)
            with pytest.raises(StepLoopError, match="no token was left to draw"):
                await stream.__anext__()

    run(main)


def test_what_a_matcher_says_of_ids_above_the_vocabulary_does_not_count() -> None:
    assert VOCAB_SIZE % 32, "there must be bits of no token"

    async def main() -> None:
        async with make_loop(2) as loop:
            above = loop.generate(
                [1], SamplingParams(seed=1), grammar=lambda: Cycle([[3], [VOCAB_SIZE]], 9)
            )
            with pytest.raises(StepLoopError, match="the grammar allows no token"):
                await collect(above)

    run(main)


def test_a_decoder_that_fails_at_a_grammars_end_ends_its_request() -> None:
    class Broken(IncrementalDecoder):
        def flush(self) -> str:
            raise UnicodeError("half a character")

    async def main() -> None:
        async with make_loop(2, new_decoder=lambda: Broken(decode)) as loop:
            stream = loop.generate([1], SamplingParams(seed=1), grammar=lambda: Cycle(GROUPS, 3))
            with pytest.raises(StepLoopError, match="half a character"):
                await collect(stream)

    run(main)


def test_a_grammar_without_a_way_on_ends_its_request() -> None:
    async def main() -> None:
        async with make_loop(2) as loop:
            stuck = loop.generate(
                [1], SamplingParams(seed=1), grammar=lambda: Cycle([[3, 5], [7], []], 9)
            )
            deltas = []
            with pytest.raises(StepLoopError, match="the grammar allows no token"):
                async for delta in stuck:
                    deltas.append(delta)
            assert tokens_of(deltas)[1:] == [7]

    run(main)


SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer"}},
        "required": ["name", "age"],
    }
)


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_a_json_schema_by_xgrammar(device: str) -> None:
    if importlib.util.find_spec("xgrammar") is None:
        pytest.skip("xgrammar, of the grammar extra, is not installed")
    import xgrammar

    vocabulary = [
        "</s>",
        *'{}[]":, abcdefghijklmnopqrstuvwxyz0123456789-+.\\/',
        '"name',
        '":',
        "age",
    ]
    vocabulary += [f"<{i}>" for i in range(VOCAB_SIZE - len(vocabulary))]
    info = xgrammar.TokenizerInfo(
        vocabulary, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[EOS]
    )
    compiled = xgrammar.GrammarCompiler(info).compile_json_schema(SCHEMA, any_whitespace=False)

    brief = {EOS: 9.0, vocabulary.index("}"): 6.0}  # else numbers have no end

    def answers(depth: int) -> list[list[int]]:
        found: list[list[int]] = []

        async def main() -> None:
            async with make_loop(4, device=device, depth=depth, max_length=100) as loop:
                streams = [
                    loop.generate(
                        [i + 1],
                        SamplingParams(seed=i, logit_bias=brief),
                        grammar=(lambda: xgrammar.GrammarMatcher(compiled)) if i != 2 else None,
                    )
                    for i in range(6)
                ]
                for stream in streams:
                    found.append(tokens_of(await collect(stream)))

        run(main)
        return found

    serial = answers(0)
    assert answers(2) == serial
    for i, tokens in enumerate(serial):
        if i == 2:
            continue
        text = "".join(vocabulary[t] for t in tokens if t != EOS)
        if tokens[-1] != EOS:
            continue  # an integer that never ended
        value = json.loads(text)
        assert set(value) == {"name", "age"} and isinstance(value["age"], int)
    assert sum(tokens[-1] == EOS for tokens in serial) >= 3


# --------------------------------------------------------------------------- the process


PATIENCE = 4.0
"""Seconds: it takes one on an idle machine, most of which is Python's own way out, and tests run
on busy ones. Without its care the process would wait for streams that take minutes."""


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "kill"])
def test_a_signal_ends_the_process_soon(number: int, device: str) -> None:
    program = """
        import asyncio, signal, sys, time
        from test_step_loop import *

        # A shell that runs the tests in the background has their children ignore it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        device = sys.argv[1]

        class Slow(LoopModel):
            def __call__(self, batch):
                time.sleep(0.02)
                return super().__call__(batch)

        async def main():
            model = Slow(2, device)
            async with make_loop(2, device=device, model=model, max_length=None) as loop:
                params = SamplingParams(temperature=0.0, ignore_eos=True)
                streams = [loop.generate([i + 1], params) for i in range(4)]
                tasks = [asyncio.create_task(collect(stream)) for stream in streams]
                while loop.totals.steps < 5:
                    await asyncio.sleep(0.001)
                print("runs", flush=True)
                await asyncio.gather(*tasks)

        asyncio.run(main())
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), device],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "runs\n"
    begun = time.monotonic()
    process.send_signal(number)
    _, errors = process.communicate(timeout=20)
    assert time.monotonic() - begun < PATIENCE, errors
    if number == signal.SIGTERM:
        assert process.returncode == -signal.SIGTERM
    else:
        assert errors.rstrip().endswith("KeyboardInterrupt"), errors


# --------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("wait", ["eventfd", "poll", "thread"])
def test_on_a_gpu_an_error_of_the_device_reaches_every_waiter(wait: str) -> None:
    """In a process of its own, whose context does not survive it."""
    program = """
        import asyncio, sys
        from test_step_loop import *

        class Failing(LoopModel):
            def __call__(self, batch):
                logits = super().__call__(batch)
                if len(self.batches) == 5:
                    self.logits[torch.full((1,), 10**6, device="cuda")]
                return logits

        async def main():
            loop = make_loop(2, device="cuda", model=Failing(2, "cuda"), wait=sys.argv[1])
            params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
            streams = [loop.generate([i + 1], params) for i in range(5)]
            tasks = [asyncio.create_task(collect(stream)) for stream in streams]
            await asyncio.wait(tasks)
            assert all(isinstance(task.exception(), StepLoopError) for task in tasks)
            print("every waiter:", tasks[0].exception(), flush=True)
            await loop.aclose()

        asyncio.run(asyncio.wait_for(main(), 30))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), wait],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parent,
    )
    assert "every waiter: " in done.stdout and "CUDA error" in done.stdout, done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("wait", ["eventfd", "poll", "thread"])
def test_on_a_gpu_the_gpu_phase_never_waits(wait: str) -> None:
    """A forward without a synchronisation, under torch's own watch."""

    async def main() -> None:
        table = RequestTable(8, VOCAB_SIZE, device="cuda", eos_token_ids=[EOS])
        logits = torch.randn(8, VOCAB_SIZE, device="cuda")
        sampler = GraphedSampler(table)

        def forward(batch: StepBatch) -> torch.Tensor:
            torch.cuda._sleep(1_000_000)
            return logits[: len(batch.slots)]

        loop = StepLoop(table, sampler, forward, max_length=64, wait=wait)
        params = SamplingParams(seed=1, max_tokens=20, logprobs=2)
        torch.cuda.set_sync_debug_mode("error")
        try:
            async with loop:
                streams = [loop.generate([i + 1], params) for i in range(20)]
                answers: Awaitable[Any] = asyncio.gather(*map(collect, streams))
                for deltas in await answers:
                    assert deltas[-1].finish_reason
        finally:
            torch.cuda.set_sync_debug_mode("default")

    run(main)
