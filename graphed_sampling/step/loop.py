"""`StepLoop`: steps of an engine whose GPU phase and CPU phase overlap, on one event loop.

    async_forward()         plan step N + 1, enqueue it: admissions, forward, sampler, output copy
    a future                step N's output is on the host
    async_bookkeep(result)  the CPU's side of step N, while step N + 1 runs

The next step's inputs are on the device already (the table's last tokens and positions), so
enqueuing needs nothing of the step before but who has ended, which is looked up first.
On a GPU the GPU phase is enqueued by the event loop's thread; on the CPU, where it is the work
itself, a `HostStream` does it. Only the GPU phase touches the table.
"""

from __future__ import annotations

import asyncio
import heapq
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from graphed_sampling.checks import check_count
from graphed_sampling.layout import FinishReason, RowFlags
from graphed_sampling.params import SamplingParams
from graphed_sampling.sampler import StepOutput
from graphed_sampling.step.batch import Forward, PrefillChunk, SamplerLike, StepBatch
from graphed_sampling.step.clock import Base, Clock, Mark
from graphed_sampling.step.futures import HostStream, Wait, gpu_future, plain_error
from graphed_sampling.step.reports import HostViews, Reports
from graphed_sampling.step.requests import (
    Delta,
    DeltaStream,
    Matcher,
    QueueFullError,
    Sample,
    Sink,
    StepLoopError,
    as_prompt,
    message_of,
)
from graphed_sampling.step.ring import OutputRing, OutputSlot
from graphed_sampling.step.text import (
    StopAutomaton,
    StopStrings,
    TokenDecoder,
    check_stop_strings,
)
from graphed_sampling.step.trace import LoopTotals, Tracer
from graphed_sampling.table import RequestTable, check_table, device_guard

SLICE_SECONDS: Final = 0.0005
"""Bookkeeping yields to the event loop at least so often."""
MAX_STOP_STRINGS: Final = 16
MAX_STOP_LENGTH: Final = 1024
_OWNERS: Final[weakref.WeakKeyDictionary[RequestTable, weakref.ref[StepLoop]]] = (
    weakref.WeakKeyDictionary()
)
"""The loop that a table belongs to."""
# By value: calling the enums takes ten times as long.
_REASONS: Final = tuple(FinishReason)
_FLAGS: Final = tuple(RowFlags(value) for value in range(2 * max(RowFlags)))


@dataclass(eq=False)
class StepResult:
    """One step that has been enqueued. `arrived` when its output is on the host."""

    number: int
    rows: tuple[Sample, ...]
    _arrival: asyncio.Future[Any]
    _slot: OutputSlot
    _clock: Clock
    _tokens: list[int] = field(default_factory=list)
    _reasons: list[int] = field(default_factory=list)
    _flags: list[int] = field(default_factory=list)
    _settled: bool = False
    _after_pause: bool = False

    @property
    def arrived(self) -> bool:
        """Whether the output, or an error, is there."""
        return self._arrival.done()

    async def wait(self) -> None:
        """Until it has arrived. May be cancelled, which stops nothing."""
        await asyncio.wait([self._arrival])


@dataclass(frozen=True)
class _Plan:
    """Of one step. What it holds does not change when samples do: it may be carried out later."""

    released: list[int]
    admitted: list[tuple[int, Sample]]  # with their slots
    batch: StepBatch | None
    rows: tuple[Sample, ...]


class StepLoop:
    """Serves requests by steps of `forward` and `sampler`, many at once.

    table: empty, and the loop's alone until it is closed. sampler: `Sampler` or `GraphedSampler` of
    it; None where `forward` samples itself, in a graph of both say, and returns the `StepOutput`.
    forward: called with a `StepBatch`, on the loop's stream under `torch.no_grad`; returns logits
    [len(batch.slots), >= vocab_size] on the table's device. It must not wait for the device.
    depth: steps enqueued beyond the one whose output is awaited. 0 is serial: nothing overlaps.
    A request that ends wastes at most `depth` row-steps, one that runs into a stop string one more.
    1 is enough where bookkeeping takes less than a step; beyond 3 the host may have to wait for an
    entry of the table's upload ring (`staging_stats` counts it).
    max_prefill_tokens: of prompts, in one step; longer prompts come in chunks. max_prompts: prompts
    in one step. max_length: tokens that a slot can hold, prompt and answer; None is no limit.
    max_waiting: samples that may wait for a slot. max_unread: tokens of a sample that may be
    under way or lie unread before the sample is held. new_decoder: makes each sample its
    `TokenDecoder`; without it there is no text. wait: how the GPU is waited for, as for
    `gpu_future`. tracer: is told what happens when. ValueError for arguments not accepted.

        async with StepLoop(table, sampler, forward) as loop:
            async for delta in loop.generate(prompt_ids, params): ...
    """

    def __init__(
        self,
        table: RequestTable,
        sampler: SamplerLike | None,
        forward: Forward,
        *,
        depth: int = 1,
        max_prefill_tokens: int = 2048,
        max_prompts: int = 8,
        max_length: int | None = None,
        max_waiting: int = 1024,
        max_unread: int = 256,
        new_decoder: Callable[[], TokenDecoder] | None = None,
        wait: Wait = "auto",
        tracer: Tracer | None = None,
    ) -> None:
        check_table(table)
        if table.num_free_slots != table.max_requests:
            raise ValueError("table holds requests already: a StepLoop admits its own")
        owner = _OWNERS.get(table)
        other = owner() if owner is not None else None
        if other is not None and not other._is_closed:
            raise ValueError("table belongs to another StepLoop, which is not closed")
        if sampler is not None and sampler.table is not table:
            raise ValueError("sampler belongs to another table")
        if not callable(forward):
            raise ValueError(f"forward is {type(forward).__name__}: it must be callable")
        if new_decoder is not None and not callable(new_decoder):
            raise ValueError(f"new_decoder is {type(new_decoder).__name__}: it must be callable")
        if tracer is not None and not callable(getattr(tracer, "add", None)):
            raise ValueError(f"tracer is {type(tracer).__name__}: it must be a Tracer")
        self.table = table
        self.depth = check_count("depth", depth, 0)
        self.max_length = None if max_length is None else check_count("max_length", max_length, 2)
        self.max_waiting = check_count("max_waiting", max_waiting, 1)
        self.tracer = tracer
        self.totals = LoopTotals()
        self._sampler = sampler
        self._forward = forward
        self._max_prefill_tokens = check_count("max_prefill_tokens", max_prefill_tokens, 1)
        self._max_prompts = check_count("max_prompts", max_prompts, 1)
        self._max_unread = check_count("max_unread", max_unread, 1)
        self._new_decoder = new_decoder

        buckets = getattr(sampler, "row_buckets", (table.max_requests,))
        self._num_slots = min(table.max_requests, buckets[-1])
        self._free = list(range(self._num_slots))
        self._waiting: deque[Sample] = deque()
        self._prefilling: list[Sample] = []
        self._running: dict[int, Sample] = {}
        self._released: list[int] = []  # for the table to learn of
        self._freed: list[int] = []  # for forward to learn of
        self._sinks: set[Sink] = set()

        # What a matcher says of ids above the vocabulary does not count.
        bits = np.zeros(32 * table.layout.bitmap_words, np.bool_)
        bits[: table.vocab_size] = True
        self._vocabulary = torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32))
        words = table.layout.output_words
        self._wait: Wait = wait
        self._ring = OutputRing(table.device, self._num_slots, words, self.depth + 2, wait=wait)
        self._views: dict[OutputSlot, HostViews] = {}
        on_gpu = table.device.type == "cuda"
        self._stream = torch.cuda.current_stream(table.device) if on_gpu else None
        self._host_stream = None if on_gpu else HostStream("step-loop")
        self._base: Base | None = Base(self._stream) if self._stream is not None else None
        self._last_end: Mark | None = None
        self._paused = True

        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._matchers: ThreadPoolExecutor | None = None
        self._runner: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._draining = self._closed = False
        self._closing: asyncio.Task[None] | None = None
        self._error: BaseException | None = None
        _OWNERS[table] = weakref.ref(self)

    # ----------------------------------------------------------------------- for callers

    @property
    def num_waiting(self) -> int:
        """Samples that wait for a slot."""
        return len(self._waiting)

    @property
    def num_active(self) -> int:
        """Samples that have a slot."""
        return len(self._prefilling) + len(self._running)

    @property
    def max_samples(self) -> int:
        """Samples that the loop holds at most, those that wait included."""
        return self._num_slots + self.max_waiting

    @property
    def is_open(self) -> bool:
        """Whether it takes requests: it has not failed, and is neither drained nor closed."""
        return self._error is None and not (self._closed or self._draining)

    @property
    def failure(self) -> BaseException | None:
        """What ended the loop, None while it is well."""
        return self._error

    def generate(
        self,
        prompt_token_ids: Sequence[int] | npt.NDArray[np.integer],
        params: SamplingParams,
        *,
        n: int = 1,
        stop: str | Sequence[str] = (),
        grammar: Callable[[], Matcher] | None = None,
    ) -> DeltaStream:
        """Queue a request, and start the loop's own task where it does not run yet.

        prompt_token_ids: at least one. params: of each sample; where n > 1 the i-th gets
        `params.child(i)`. stop: strings that end an answer and are not shown, at most 16
        of at most 1024 characters.
        grammar: makes a `Matcher`, one a sample; a row waits for the mask that follows from its
        last token, and other rows do not wait for it.
        ValueError, with nothing queued, for what is not accepted; QueueFullError when more than
        `max_waiting` samples would wait for a slot; StepLoopError when the loop has failed, drains
        or is closed.
        """
        stream = self.submit(prompt_token_ids, params, n=n, stop=stop, grammar=grammar)
        self.start()
        return stream

    def submit(
        self,
        prompt_token_ids: Sequence[int] | npt.NDArray[np.integer],
        params: SamplingParams,
        *,
        n: int = 1,
        stop: str | Sequence[str] = (),
        grammar: Callable[[], Matcher] | None = None,
    ) -> DeltaStream:
        """`generate` for whoever calls `async_forward` and `async_bookkeep` himself."""
        event_loop = asyncio.get_running_loop()
        if self._event_loop is None:
            self._event_loop = event_loop
        if event_loop is not self._event_loop:
            raise ValueError("this StepLoop belongs to another event loop")
        prompt = as_prompt(prompt_token_ids)
        n = check_count("n", n, 1)
        if n > self.max_samples:
            raise ValueError(
                f"n = {n} is not accepted: the loop holds at most {self.max_samples} samples"
            )
        stops = check_stop_strings(stop, MAX_STOP_STRINGS, MAX_STOP_LENGTH)
        if stops and self._new_decoder is None:
            raise ValueError("stop is not accepted: the loop has no new_decoder, and so no text")
        if grammar is not None and not callable(grammar):
            raise ValueError("grammar must be a callable that makes a Matcher")
        self.table.check(params, prompt)
        limit = 2**62
        if self.max_length is not None:
            limit = self.max_length - len(prompt)
            if limit < 1 or (params.max_tokens or 0) > limit:
                raise ValueError(
                    f"prompt_token_ids has {len(prompt)} ids, max_tokens = {params.max_tokens}: "
                    f"prompt and answer must fit into {self.max_length} tokens"
                )
            if params.max_tokens is None:
                if params.min_tokens > limit:
                    raise ValueError(
                        f"min_tokens = {params.min_tokens} is not accepted: the answer has at most "
                        f"{limit} tokens"
                    )
                params = replace(params, max_tokens=limit)
        limit = params.max_tokens or limit
        self._check_open()
        excess = self.num_waiting + n - len(self._free)
        if excess > self.max_waiting:
            raise QueueFullError(
                f"{excess} samples would wait for a slot: the loop lets {self.max_waiting} wait"
            )
        sink = Sink(n)
        automaton = StopAutomaton(stops) if stops else None
        words = self.table.layout.bitmap_words
        for index in range(n):
            sink.samples.append(
                Sample(
                    sink,
                    index,
                    prompt,
                    params.child(index) if n > 1 else params,
                    limit=limit,
                    decoder=self._new_decoder() if self._new_decoder else None,
                    stops=StopStrings(automaton) if automaton else None,
                    matcher=grammar() if grammar else None,
                    bitmask=torch.full((1, words), -1, dtype=torch.int32) if grammar else None,
                )
            )
        self._sinks.add(sink)
        self.totals.requests += 1
        for sample in sink.samples:
            self._waiting.append(sample)
            if sample.matcher is not None:
                self._ask_matcher(sample, None)
        self._wake.set()
        return DeltaStream(sink, self._on_read, self._cancel, event_loop)

    def start(self) -> None:
        """Start the task that steps, in the running event loop, unless it runs."""
        self._check_open()
        if self._runner is None:
            self._event_loop = asyncio.get_running_loop()
            self._runner = self._event_loop.create_task(self._run(), name="step-loop")
            self._runner.add_done_callback(self._on_exit)

    async def drain(self) -> None:
        """Take no more requests, and return when those that are there have ended, however.

        A caller who neither reads nor closes its stream keeps it from ending. Where steps are made
        by hand it returns at once: whoever makes them goes on until there is nothing to do.
        """
        self._draining = True
        self._wake.set()
        if self._runner is not None:
            await asyncio.wait([self._runner])

    async def aclose(self) -> None:
        """End all requests with StepLoopError, and free all slots when the device is done.

        It waits for the steps under way, on the CPU for a `forward` that runs. Cancelled, it goes
        on; called again, it waits for the same.
        """
        if not self._closed:
            self._closed = True
            self._end_all(StepLoopError("the loop was closed"))
        if self._closing is None or self._closing.cancelled():
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if self._runner is not None and not self._runner.done():
            if self._error is None:  # else it is about to end, and waits for the device
                self._runner.cancel()
            await asyncio.wait([self._runner])
        await self._release_all()
        if self._matchers is not None:
            self._matchers.shutdown(wait=False, cancel_futures=True)
        if self._host_stream is not None:
            self._host_stream.close()

    @property
    def _is_closed(self) -> bool:
        return self._closing is not None and self._closing.done()

    async def __aenter__(self) -> StepLoop:
        self.start()
        return self

    async def __aexit__(self, kind: object, error: object, traceback: object) -> None:
        await self.aclose()

    # ----------------------------------------------------------------------- the step

    async def async_forward(self) -> StepResult | None:
        """Plan a step and enqueue it; None, with nothing done, when there is nothing to do.

        It waits for no device, but for an entry of the output ring when `depth` + 2 results have
        not been bookkept. An error of `forward` is raised here on a GPU, and on the CPU by
        `async_bookkeep`; the loop has failed then.
        """
        started = time.perf_counter()
        slot = self._ring.try_acquire() or await self._ring.acquire()
        try:
            if self._error is not None:
                raise self._failed() from self._error
            plan = self._plan()
            if plan is None:
                slot.release()
                return None
            clock = Clock(self._base)
            phase = partial(self._gpu_phase, plan, slot, clock)
            if self._host_stream is not None:
                arrival: asyncio.Future[Any] = self._host_stream.run(phase)
            else:
                phase()
                # Without rows there is no copy to wait for.
                arrival = (
                    self._ring.arrival() if plan.rows else gpu_future(self._stream, wait=self._wait)
                )
        except BaseException as error:
            if slot._held:
                slot.release()
            self._fail(error)
            if isinstance(error, asyncio.CancelledError):  # forward's own: nobody cancelled this
                raise plain_error(error) from error
            raise
        arrival.add_done_callback(self._on_arrival)
        result = StepResult(self.totals.steps, plan.rows, arrival, slot, clock)
        if plan.batch is None:
            return result
        result._after_pause, self._paused = self._paused, False
        self.totals.steps += 1
        self.totals.rows += len(plan.rows)
        if self.tracer is not None:
            self.tracer.add("CPU phase", f"enqueue {result.number}", started, time.perf_counter())
        return result

    async def async_bookkeep(self, result: StepResult) -> None:
        """Do the CPU's side of a step: call it once for each result, in order.

        Waits for the output; then tokens, finish reasons, text, logprobs go to their callers, and
        slots of requests that ended are given back. Yields to the event loop every half a
        millisecond.
        """
        if not result.arrived:
            await result.wait()
        self._settle(result)
        rows = len(result.rows)
        begin = time.perf_counter()
        if rows:
            reports = Reports(self._views_of(result._slot), result.rows)
            tokens, reasons, flags = result._tokens, result._reasons, result._flags
            for row, sample in enumerate(result.rows):
                if sample.done:
                    continue  # a row-step that was under way when the request ended
                try:
                    self._advance(
                        sample, row, tokens[row], reasons[row], _FLAGS[flags[row]], reports
                    )
                except Exception as error:
                    self._end(sample.sink, error)
                now = time.perf_counter()
                if now - begin > SLICE_SECONDS:
                    self._trace_slice(result, begin, now)
                    await asyncio.sleep(0)
                    begin = time.perf_counter()
        result._slot.release()
        self._trace_slice(result, begin, time.perf_counter())
        await asyncio.sleep(0)

    def _plan(self) -> _Plan | None:
        released, self._released = self._released, []
        self._freed += released
        chunks: list[PrefillChunk] = []
        started = sum(sample.mask_ready for sample in self._prefilling)
        budget, prompts = self._max_prefill_tokens, self._max_prompts
        rows = [
            sample
            for sample in self._running.values()
            if sample.enqueued < sample.limit
            and sample.mask_ready
            and sample.enqueued - sample.taken < self._max_unread
        ]
        num_decoding = len(rows)
        admitted: list[tuple[int, Sample]] = []
        # Those that are in the midst of their prompts first: they hold slots.
        while budget and self._waiting and self._free and started + len(admitted) < prompts:
            sample = self._waiting.popleft()
            sample.slot = heapq.heappop(self._free)
            sample.sink.started = sample.sink.started or time.perf_counter()
            admitted.append((sample.slot, sample))
            self._prefilling.append(sample)
        for sample in list(self._prefilling):
            if not budget or not prompts:
                break
            left = len(sample.prompt) - sample.prefilled
            if left <= budget and not sample.mask_ready:
                continue
            start, count = sample.prefilled, min(left, budget)
            last = count == left
            ids = sample.prompt[start : start + count]
            chunks.append(PrefillChunk(sample.slot, ids, start, last))
            sample.prefilled += count
            budget -= count
            prompts -= 1
            if last:
                rows.append(sample)
                self._prefilling.remove(sample)
                self._running[sample.slot] = sample
        if not (rows or chunks):
            return _Plan(released, admitted, None, ()) if released or admitted else None
        span = max((c.start + len(c.token_ids) for c in chunks), default=1)
        bitmask = None
        for row, sample in enumerate(rows):
            span = max(span, len(sample.prompt) + sample.enqueued)
            sample.enqueued += 1
            if sample.bitmask is not None:
                if bitmask is None:
                    words = sample.bitmask.shape[1]
                    bitmask = torch.full((len(rows), words), -1, dtype=torch.int32)
                bitmask[row] = sample.bitmask[0]
                sample.mask_ready = False  # until its token is known
        slots = torch.from_numpy(np.fromiter((s.slot for s in rows), np.int32, len(rows)))
        for sample in rows:
            if sample.enqueued == sample.limit:
                self._vacate(sample)  # its last token: the next step may give the slot away
        freed, self._freed = self._freed, []
        table = self.table
        batch = StepBatch(
            slots,
            num_decoding,
            tuple(chunks),
            tuple(freed),
            span,
            table.last_token_ids,
            table.positions,
            bitmask,
        )
        return _Plan(released, admitted, batch, tuple(rows))

    def _gpu_phase(self, plan: _Plan, slot: OutputSlot, clock: Clock) -> None:
        """Everything that a step enqueues, in order; the only place that touches the table."""
        table = self.table
        on_stream = torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()
        with torch.no_grad(), device_guard(table.device), on_stream:
            for released in plan.released:
                table.release(released)
            for number, sample in plan.admitted:
                table.admit(sample.params, sample.prompt, slot=number)
            table.upload()
            batch = plan.batch
            if batch is None:
                return
            clock.start()
            if self._sampler is None:
                self._ring.protect()
            output = self._forward(batch)
            if len(plan.rows):
                if isinstance(output, StepOutput):
                    if self._sampler is not None:
                        # Its record could be rewritten while the last one is still being copied.
                        raise TypeError("forward must return logits: there is a sampler")
                    if len(output.record) < len(plan.rows):
                        raise ValueError(
                            f"forward returned a StepOutput of {len(output.record)} rows for "
                            f"{len(plan.rows)} slots"
                        )
                else:
                    if self._sampler is None:
                        raise TypeError("forward must return a StepOutput: there is no sampler")
                    self._ring.protect()
                    output = self._sampler(
                        output, batch.slots, grammar_bitmask=batch.grammar_bitmask
                    )
                clock.stop()  # before the copy, so that its end means that this has passed
                slot.fill(output.record[: len(plan.rows)])
            else:
                clock.stop()

    def _settle(self, result: StepResult) -> None:
        """Look up who has ended, so that the next step leaves them out. Cheap."""
        if result._settled:
            return
        result._settled = True
        error = result._arrival.exception()
        if error is not None:
            result._slot.release()
            self._fail(error)
            raise error
        rows = len(result.rows)
        if rows:
            views = self._views_of(result._slot)
            result._tokens = views.token_ids[:rows].tolist()
            result._reasons = views.finish_reason[:rows].tolist()
            result._flags = views.flags[:rows].tolist()
            for sample, reason in zip(result.rows, result._reasons, strict=True):
                if reason and sample.slot >= 0:
                    self._vacate(sample)
        self._time(result)

    def _views_of(self, slot: OutputSlot) -> HostViews:
        views = self._views.get(slot)
        if views is None:
            views = self._views[slot] = HostViews(StepOutput(slot.host, self.table.layout))
        return views

    def _advance(
        self,
        sample: Sample,
        row: int,
        token: int,
        reason: int,
        flags: RowFlags,
        reports: Reports,
    ) -> None:
        """One more token of a sample to its caller."""
        if token < 0:
            raise RuntimeError(f"the step drew no token for slot {sample.slot}")
        if sample.matcher is not None and flags & RowFlags.EMPTY:
            raise RuntimeError(
                "no token was left to draw: the grammar allows none that the parameters and the "
                "logits allow"
            )
        self.totals.tokens += 1
        sample.received += 1
        if not reason and sample.received == sample.limit:
            reason = FinishReason.LENGTH  # whatever a forward that samples itself reports
        text, stop = "", None
        if sample.decoder is not None:
            # The text of the token that ends an answer is not a part of it.
            if reason != FinishReason.STOP:
                text = sample.decoder.push(token)
            if reason:
                text += sample.decoder.flush()
            if sample.stops is not None:
                text, stop = sample.stops.push(text)
                if stop is not None:
                    reason = FinishReason.STOP
                elif reason:
                    text += sample.stops.flush()
        logprobs = (reports.of(sample, row, token),) if sample.reports else ()
        if reason:
            self._vacate(sample)
        elif sample.matcher is not None:
            self._ask_matcher(sample, token)
        delta = Delta(sample.index, (token,), text, logprobs, _REASONS[reason], stop, flags)
        self._put(sample.sink, delta)

    def _put(self, sink: Sink, delta: Delta) -> None:
        sink.put(delta)
        if delta.finish_reason and all(sink.ended):
            self._sinks.discard(sink)

    def _vacate(self, sample: Sample) -> None:
        """Give back what the sample holds: a slot, or its place in the queue."""
        slot = sample.slot
        if slot >= 0:
            sample.slot = -1
            if self._running.get(slot) is sample:
                del self._running[slot]
            else:
                self._prefilling.remove(sample)
            self._released.append(slot)
            heapq.heappush(self._free, slot)
        elif not sample.enqueued:
            with suppress(ValueError):
                self._waiting.remove(sample)

    # ----------------------------------------------------------------------- grammar

    def _ask_matcher(self, sample: Sample, token: int | None) -> None:
        """Have the mask of the token to come made in a thread."""
        if self._matchers is None:
            self._matchers = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        event_loop = self._event_loop
        assert event_loop is not None
        future = self._matchers.submit(_next_mask, sample, token, self._vocabulary)
        future.add_done_callback(partial(_call_soon, event_loop, self._on_mask, sample))

    def _on_mask(self, sample: Sample, future: Future[bool]) -> None:
        if sample.done or future.cancelled():
            return
        error = future.exception()
        if error is None:
            try:
                if future.result():
                    self._complete(sample)
                else:
                    sample.mask_ready = True
            except Exception as own:
                error = own
        if error is not None:
            self._end(sample.sink, error)
        self._wake.set()

    def _complete(self, sample: Sample) -> None:
        """The sample's grammar allows nothing more."""
        text, stop = sample.decoder.flush() if sample.decoder is not None else "", None
        if sample.stops is not None:
            text, stop = sample.stops.push(text)
            text += sample.stops.flush()
        self._vacate(sample)
        self._put(sample.sink, Delta(sample.index, (), text, (), FinishReason.STOP, stop))

    # ----------------------------------------------------------------------- requests' ends

    def _on_read(self, sample: Sample) -> None:
        if sample.enqueued - sample.taken == self._max_unread - 1:
            self._wake.set()  # it may have been held

    def _cancel(self, sink: Sink) -> None:
        if not all(sink.ended):
            self.totals.cancelled += 1
            self._end(sink, None)

    def _end(self, sink: Sink, error: BaseException | None) -> None:
        """End a request of which not everything was given."""
        for sample in sink.samples:
            if not sample.done:
                self._vacate(sample)
        sink.end(error)
        self._sinks.discard(sink)
        self._wake.set()

    def _end_all(self, error: BaseException) -> None:
        for sink in list(self._sinks):
            self._end(sink, error)

    def _fail(self, error: BaseException) -> None:
        if self._error is None and not self._closed:
            self._error = plain_error(error)
            self._end_all(self._error)
            self._wake.set()

    def _failed(self) -> StepLoopError:
        assert self._error is not None
        return StepLoopError(f"the loop has failed: {message_of(self._error)}")

    def _check_open(self) -> None:
        if self._error is not None:
            raise self._failed() from self._error
        if self._closed or self._draining:
            raise StepLoopError("the loop takes no more requests")

    # ----------------------------------------------------------------------- the task

    async def _run(self) -> None:
        in_flight: deque[StepResult] = deque()
        try:
            while True:
                self._wake.clear()
                await self._fill(in_flight)
                if in_flight and in_flight[0].arrived:
                    result = in_flight.popleft()
                    self._settle(result)
                    if self.depth:
                        await self._fill(in_flight)
                        await asyncio.sleep(0)  # enqueuing took a slice of its own
                    await self.async_bookkeep(result)
                elif not in_flight and self._draining and not self._sinks:
                    return
                else:
                    self._paused = not in_flight
                    await self._wake.wait()
        except BaseException as error:
            self._fail_of_task(error)
            if not isinstance(error, Exception):
                raise
        finally:
            # The device still writes to what these hold.
            if in_flight:
                await asyncio.wait([result._arrival for result in in_flight])

    def _fail_of_task(self, error: BaseException) -> None:
        if isinstance(error, asyncio.CancelledError):
            plain = RuntimeError("the loop's task was cancelled")
            plain.__cause__ = error
            error = plain
        self._fail(error)

    def _on_exit(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():  # perhaps before it began
            self._fail_of_task(asyncio.CancelledError())

    async def _fill(self, in_flight: deque[StepResult]) -> None:
        while len(in_flight) <= self.depth:
            result = await self.async_forward()
            if result is None:
                return
            in_flight.append(result)

    async def _release_all(self) -> None:
        """Tell the table of the slots that were given back, after the last step."""
        released, self._released = self._released, []
        self._freed += released

        def release() -> None:
            for slot in released:
                with suppress(ValueError):  # its admission was part of a phase that failed
                    self.table.release(slot)

        if self._host_stream is None:
            release()
        else:
            await self._host_stream.run(release)

    def _on_arrival(self, future: asyncio.Future[Any]) -> None:
        if not future.cancelled():
            future.exception()  # it is raised where the step is settled
        self._wake.set()

    # ----------------------------------------------------------------------- times

    def _time(self, result: StepResult) -> None:
        clock = result._clock
        if clock.begin is None or clock.end is None:
            return
        seconds = clock.begin.until(clock.end)
        self.totals.gpu_seconds += seconds
        if self._last_end is not None and not result._after_pause:
            self.totals.gpu_idle_seconds += max(self._last_end.until(clock.begin), 0.0)
        self._last_end = clock.end
        if self.tracer is not None:
            start = clock.begin.seconds()
            self.tracer.add("GPU", f"step {result.number}", start, start + seconds)

    def _trace_slice(self, result: StepResult, begin: float, end: float) -> None:
        if self.tracer is not None:
            self.tracer.add("CPU phase", f"bookkeep {result.number}", begin, end)


def _next_mask(sample: Sample, token: int | None, vocabulary: torch.Tensor) -> bool:
    """Whether the answer is complete; if not, the mask of its next token is in `sample.bitmask`."""
    matcher, bitmask = sample.matcher, sample.bitmask
    assert matcher is not None and bitmask is not None
    if token is not None:
        if not matcher.accept_token(token):
            raise RuntimeError(f"the grammar does not allow the token {token}, which was drawn")
        if matcher.is_terminated():
            return True
    bitmask.fill_(-1)
    matcher.fill_next_token_bitmask(bitmask, 0)
    bitmask &= vocabulary
    if not bitmask.any():
        raise RuntimeError("the grammar allows no token of the vocabulary here")
    return False


def _call_soon(
    event_loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: object
) -> None:
    with suppress(RuntimeError):  # the event loop is closed: nobody waits
        event_loop.call_soon_threadsafe(function, *arguments)
