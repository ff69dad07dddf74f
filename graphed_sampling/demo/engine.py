"""Continuous batching: requests wait for a slot, and every step gives each slot one token.

A step runs the model, lets its head write the logits into the sampler's own input buffer, and
calls the sampler once. Sampling parameters, last tokens and positions stay in the table on the
device; the host reads what it shows.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from graphed_sampling import (
    FinishReason,
    GraphedSampler,
    RequestTable,
    SamplingParams,
    StepOutput,
)
from graphed_sampling.demo.model import SlottedModel

ADMISSIONS_PER_STEP = 1
"""How many prompts one step takes in: a prompt costs a CPU about as much as a step of the running
requests does, so more of them would make those stutter."""


@dataclass(frozen=True, kw_only=True)
class Request:
    title: str
    prompt: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams

    @property
    def max_length(self) -> int:
        if self.params.max_tokens is None:
            raise ValueError(f"request {self.title!r} needs max_tokens: its slot has an end")
        return len(self.prompt_token_ids) + self.params.max_tokens


@dataclass(kw_only=True, eq=False)
class Generation:
    """A request that was admitted, and its answer so far."""

    request: Request
    slot: int
    started: float
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.NONE
    finished: float | None = None

    @property
    def length(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.token_ids)

    @property
    def seconds(self) -> float:
        return (self.finished or time.perf_counter()) - self.started


@dataclass
class Totals:
    """Over all steps so far. Milliseconds are the device's."""

    steps: int = 0
    tokens: int = 0
    model_ms: float = 0.0
    sampler_ms: float = 0.0


class Engine:
    def __init__(
        self,
        model: SlottedModel,
        *,
        num_slots: int,
        eos_token_ids: Sequence[int],
        backend: str = "auto",
        seed: int | None = None,
    ) -> None:
        """seed: of the requests that bring none; None draws those from the operating system."""
        self.table = RequestTable(
            num_slots,
            model.vocab_size,
            device=model.device,
            eos_token_ids=eos_token_ids,
            seed=seed,
        )
        self.sampler = GraphedSampler(self.table, logits_dtype=model.dtype, backend=backend)
        self.totals = Totals()
        self._model = model
        self._waiting: deque[Request] = deque()
        self._running: list[Generation] = []
        self._num_slots = num_slots

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> Sequence[Generation]:
        return self._running

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._running)

    def submit(self, request: Request) -> None:
        if request.max_length > self._model.capacity:
            raise ValueError(
                f"request {request.title!r} needs {request.max_length} tokens; "
                f"a slot of the cache holds {self._model.capacity}"
            )
        self._waiting.append(request)

    def step(self) -> list[Generation]:
        """Give one more token to each request that has a slot, and return those that are done."""
        decoding = list(self._running)
        admitted = self._admit()
        if not self._running:
            return []
        slots = torch.tensor([g.slot for g in self._running], dtype=torch.int32)
        clock = _Clock(self._model.device)
        hidden = [self._decode(decoding)] if decoding else []
        hidden += [self._prefill(generation) for generation in admitted]
        logits = self.sampler.logits_buffer(len(slots))
        self._model.write_logits(torch.cat(hidden), out=logits)
        clock.mark()
        record = self.sampler(logits, slots).record
        clock.mark()

        output = StepOutput(record.cpu(), self.table.layout)
        tokens = output.token_ids.tolist()
        logprobs = output.logprobs.tolist()
        reasons = output.finish_reason.tolist()
        top_ids = output.top_token_ids.tolist()
        top_logprobs = output.top_logprobs.tolist()
        self.totals.steps += 1
        self.totals.tokens += len(tokens)
        model_ms, sampler_ms = clock.milliseconds()
        self.totals.model_ms += model_ms
        self.totals.sampler_ms += sampler_ms
        for row, generation in enumerate(self._running):
            generation.token_ids.append(tokens[row])
            generation.logprobs.append(logprobs[row])
            if count := generation.request.params.logprobs:
                best = list(zip(top_ids[row], top_logprobs[row], strict=True))[:count]
                generation.top_logprobs.append(best)
            generation.finish_reason = FinishReason(reasons[row])
        return self._retire()

    def _admit(self) -> list[Generation]:
        admitted = []
        free = self._num_slots - len(self._running)
        for _ in range(min(ADMISSIONS_PER_STEP, free, len(self._waiting))):
            request = self._waiting.popleft()
            slot = self.table.admit(request.params, request.prompt_token_ids)
            admitted.append(Generation(request=request, slot=slot, started=time.perf_counter()))
        self._running += admitted
        return admitted

    def _retire(self) -> list[Generation]:
        done = [g for g in self._running if g.finish_reason is not FinishReason.NONE]
        for generation in done:
            generation.finished = time.perf_counter()
            self.table.release(generation.slot)
        self._running = [g for g in self._running if g.finish_reason is FinishReason.NONE]
        return done

    def _decode(self, generations: Sequence[Generation]) -> Tensor:
        slots = torch.tensor([g.slot for g in generations], device=self._model.device)
        token_ids = self.table.last_token_ids[slots].unsqueeze(1)
        # The table's position is of the token to be drawn; the model reads the one before it.
        positions = self.table.positions[slots].unsqueeze(1) - 1
        span = max(g.length for g in generations)
        return self._model.forward(token_ids, positions, slots, span=span)

    def _prefill(self, generation: Generation) -> Tensor:
        device = self._model.device
        token_ids = torch.tensor([generation.request.prompt_token_ids], device=device)
        positions = torch.arange(token_ids.shape[1], device=device).unsqueeze(0)
        slots = torch.tensor([generation.slot], device=device)
        return self._model.forward(token_ids, positions, slots, span=token_ids.shape[1])


class _Clock:
    """Times between marks: by events on a GPU, so that nothing waits, by the wall clock else."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._seconds: list[float] = []
        self.mark()

    def mark(self) -> None:
        if self._cuda:
            self._events.append(torch.cuda.Event(enable_timing=True))
            self._events[-1].record()
        else:
            self._seconds.append(time.perf_counter())

    def milliseconds(self) -> list[float]:
        """Of each stretch between marks. On a GPU the last mark must have passed."""
        if self._cuda:
            return [begin.elapsed_time(end) for begin, end in pairwise(self._events)]
        return [1000 * (end - begin) for begin, end in pairwise(self._seconds)]
