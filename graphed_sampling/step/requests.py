"""A request of a `StepLoop`: what its caller sees, and what the loop keeps of it."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from graphed_sampling.layout import FinishReason, RowFlags
from graphed_sampling.params import SamplingParams
from graphed_sampling.step.text import StopStrings, TokenDecoder
from graphed_sampling.table import as_array


class StepLoopError(RuntimeError):
    """The loop has failed or was closed; the cause, if any, is in `__cause__`."""


class QueueFullError(RuntimeError):
    """As many samples wait for a slot as the loop lets wait."""


def message_of(error: BaseException) -> str:
    """What it says; its name where it says nothing."""
    return str(error) or repr(error)


class Matcher(Protocol):
    """What a request's grammar must be able to do; `xgrammar.GrammarMatcher` is one.

    It is called in a thread of its own, one call at a time.
    """

    def accept_token(self, token_id: int, /) -> bool:
        """Take the token that was drawn; False where the grammar does not allow it."""
        ...

    def fill_next_token_bitmask(self, bitmask: Tensor, index: int = 0, /) -> bool:
        """Fill row `index` of int32 [n, words] with what may come next."""
        ...

    def is_terminated(self) -> bool:
        """Whether nothing may come any more."""
        ...


class TokenLogprobs(NamedTuple):
    """Of one token, as far as the request's parameters ask for it.

    logprob: NaN where not asked. rank: 0 where not asked. top: the best tokens and their logprobs,
    best first. given: of `logprob_token_ids`, in that order.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]
    given: tuple[float, ...]


class Delta(NamedTuple):
    """What one step added to an answer.

    sample: its number, below n. text: what became certain; a step may add tokens and no text.
    logprobs: one a token where the parameters ask for any, else empty. finish_reason: NONE until
    the sample's last delta. stop: the stop string that ended it, None where something else did.
    flags: of the row that the step drew from: NAN where the model's logits held NaN, EMPTY where no
    token was left and a fallback was drawn. The loop goes on with either.
    """

    sample: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason
    stop: str | None
    flags: RowFlags = RowFlags(0)


class Sample:
    """One of the n answers of a request, as the loop keeps it."""

    __slots__ = (
        "bitmask",
        "decoder",
        "enqueued",
        "given",
        "index",
        "limit",
        "mask_ready",
        "matcher",
        "params",
        "prefilled",
        "prompt",
        "received",
        "reports",
        "sink",
        "slot",
        "stops",
        "taken",
    )

    def __init__(
        self,
        sink: Sink,
        index: int,
        prompt: npt.NDArray[np.int64],
        params: SamplingParams,
        *,
        limit: int,
        decoder: TokenDecoder | None,
        stops: StopStrings | None,
        matcher: Matcher | None,
        bitmask: Tensor | None,
    ) -> None:
        self.sink = sink
        self.index = index
        self.prompt = prompt
        self.params = params
        self.limit = limit  # tokens that it can get
        self.decoder = decoder
        self.stops = stops
        self.matcher = matcher
        self.bitmask = bitmask  # int32 [1, words] on the CPU, that of the token to come
        self.mask_ready = matcher is None
        self.slot = -1
        self.prefilled = 0  # prompt tokens given to the model
        self.enqueued = 0  # tokens whose drawing has been enqueued
        self.received = 0  # tokens that have come from the device
        self.taken = 0  # tokens that the caller has got
        self.given = len(params.logprob_token_ids)
        self.reports = params.logprobs is not None or params.rank or bool(self.given)

    @property
    def done(self) -> bool:
        """Nothing of it is wanted any more."""
        return self.sink.ended[self.index]


class Sink:
    """Deltas on their way from the loop to the caller of one request."""

    __slots__ = ("_waiter", "deltas", "ended", "error", "samples", "started")

    def __init__(self, n: int) -> None:
        self.deltas: deque[Delta] = deque()
        self.samples: list[Sample] = []
        self.started: float | None = None
        self.ended = [False] * n
        self.error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, delta: Delta) -> None:
        self.deltas.append(delta)
        if delta.finish_reason:
            self.ended[delta.sample] = True
        self._wake()

    def end(self, error: BaseException | None) -> None:
        """Nothing more will come; the error, if any, after what has come."""
        self.ended = [True] * len(self.ended)
        self.error = error
        self._wake()

    async def get(self) -> Delta | None:
        """The next delta, None at the end."""
        if self._waiter is not None:
            raise RuntimeError("another task waits for this request already")
        while not self.deltas:
            if self.error is not None:
                # One exception for each who waits: a shared one would gather their tracebacks.
                raise StepLoopError(message_of(self.error)) from self.error
            if all(self.ended):
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self.deltas.popleft()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class DeltaStream:
    """The deltas of one request: `async for`, then it is over; `aclose()` cancels the request.

    A task that is cancelled while it waits here cancels the request too, as does dropping the
    object. It belongs to the loop's event loop. Deltas of n samples come as they are made,
    each sample's in order. StepLoopError when the loop fails, or is closed, before the end.
    """

    def __init__(
        self,
        sink: Sink,
        read: Callable[[Sample], None],
        cancel: Callable[[Sink], None],
        event_loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._sink = sink
        self._read = read
        self._cancel = cancel
        # Whoever drops the object may do so in any thread, or in the midst of the loop's own work.
        self._dropped = weakref.finalize(self, _cancel_soon, event_loop, cancel, sink)
        self._dropped.atexit = False

    @property
    def started(self) -> float | None:
        """When its first sample got a slot, in seconds of `time.perf_counter`; None before."""
        return self._sink.started

    def __aiter__(self) -> DeltaStream:
        return self

    async def __anext__(self) -> Delta:
        sink = self._sink
        try:
            delta = await sink.get()
        except asyncio.CancelledError:
            self._cancel(sink)
            raise
        if delta is None:
            raise StopAsyncIteration
        sample = sink.samples[delta.sample]
        sample.taken += len(delta.token_ids)
        self._read(sample)
        return delta

    async def aclose(self) -> None:
        """End the request now: its slots are free at the next step. Harmless at any time."""
        self._cancel(self._sink)
        self._sink.deltas.clear()

    async def __aenter__(self) -> DeltaStream:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()


def _cancel_soon(
    event_loop: asyncio.AbstractEventLoop, cancel: Callable[[Sink], None], sink: Sink
) -> None:
    if not all(sink.ended) and not event_loop.is_closed():
        event_loop.call_soon_threadsafe(cancel, sink)


def as_prompt(prompt_token_ids: Sequence[int] | npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """A prompt as an array; what is in it is checked by the table."""
    prompt = as_array("prompt_token_ids", prompt_token_ids)
    if prompt.ndim != 1 or prompt.size == 0 or prompt.dtype.kind not in "iu":
        raise ValueError("prompt_token_ids must be a flat sequence of at least one token id")
    return prompt.astype(np.int64)
