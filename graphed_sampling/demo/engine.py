"""Requests and answers of the demo, served by a `StepLoop` over the demo's model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from graphed_sampling import (
    DeltaStream,
    FinishReason,
    GraphedSampler,
    LoopTotals,
    RequestTable,
    SamplingParams,
    StepBatch,
    StepLoop,
    TokenDecoder,
    Tracer,
)
from graphed_sampling.demo.model import SlottedModel

MAX_PROMPTS = 1
"""How many prompts one step takes in: a prompt costs a CPU about as much as a step of the running
requests does, so more of them would make those stutter."""


class SlottedForward:
    """`forward` of a StepLoop: the model, whose head writes into the sampler's own input buffer."""

    def __init__(self, model: SlottedModel, sampler: GraphedSampler) -> None:
        self._model = model
        self._sampler = sampler

    def __call__(self, batch: StepBatch) -> Tensor:
        model, device = self._model, self._model.device
        hidden = []
        if batch.num_decoding:
            slots = batch.slots[: batch.num_decoding].to(device, torch.int64, non_blocking=True)
            token_ids = batch.last_token_ids[slots].unsqueeze(1)
            # The table's position is of the token to be drawn; the model reads the one before it.
            positions = batch.positions[slots].unsqueeze(1) - 1
            hidden.append(model.forward(token_ids, positions, slots, span=batch.span))
        for chunk in batch.prefill:
            end = chunk.start + len(chunk.token_ids)
            ids = torch.from_numpy(chunk.token_ids).to(device, non_blocking=True).unsqueeze(0)
            positions = torch.arange(chunk.start, end, device=device).unsqueeze(0)
            slots = torch.tensor([chunk.slot]).to(device, non_blocking=True)
            after = model.forward(ids, positions, slots, span=end)
            if chunk.last:
                hidden.append(after)
        logits = self._sampler.logits_buffer(len(batch.slots))
        if hidden:
            model.write_logits(torch.cat(hidden), out=logits)
        return logits


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
    """A request and its answer so far. started: when it got its slot, None before."""

    request: Request
    started: float | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.NONE
    finished: float | None = None

    @property
    def seconds(self) -> float:
        if self.started is None:
            return 0.0
        return (self.finished or time.perf_counter()) - self.started


class Engine:
    def __init__(
        self,
        model: SlottedModel,
        *,
        num_slots: int,
        eos_token_ids: Sequence[int],
        backend: str = "auto",
        seed: int | None = None,
        depth: int = 1,
        max_prompts: int = MAX_PROMPTS,
        max_waiting: int = 1024,
        new_decoder: Callable[[], TokenDecoder] | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """seed: of the requests that bring none; None draws those from the operating system.
        depth, max_prompts, max_waiting, new_decoder, tracer: of the `StepLoop`."""
        self.table = RequestTable(
            num_slots,
            model.vocab_size,
            device=model.device,
            eos_token_ids=eos_token_ids,
            seed=seed,
        )
        self.sampler = GraphedSampler(self.table, logits_dtype=model.dtype, backend=backend)
        self.loop = StepLoop(
            self.table,
            self.sampler,
            SlottedForward(model, self.sampler),
            depth=depth,
            max_prompts=max_prompts,
            max_length=model.capacity,
            max_waiting=max_waiting,
            new_decoder=new_decoder,
            tracer=tracer,
        )
        self.running: list[Generation] = []
        """What is being answered, in the order in which it got a slot."""

    @property
    def totals(self) -> LoopTotals:
        return self.loop.totals

    @property
    def num_waiting(self) -> int:
        return self.loop.num_waiting

    async def answer(
        self,
        requests: Sequence[Request],
        on_answer: Callable[[Generation], None] = lambda generation: None,
    ) -> list[Generation]:
        """Answer all of them, in the order of the requests, and close the loop.

        on_answer: is called with each when it is complete. ValueError, before anything is answered,
        for a request that a slot cannot hold or the table does not accept.
        """
        async with self.loop:
            streams = [
                self.loop.generate(request.prompt_token_ids, request.params) for request in requests
            ]
            return await asyncio.gather(
                *(
                    self._follow(Generation(request=request), stream, on_answer)
                    for request, stream in zip(requests, streams, strict=True)
                )
            )

    async def _follow(
        self, generation: Generation, stream: DeltaStream, on_answer: Callable[[Generation], None]
    ) -> Generation:
        count = generation.request.params.logprobs
        async for delta in stream:
            if generation.started is None:
                generation.started = stream.started
                self.running.append(generation)
            generation.token_ids += delta.token_ids
            generation.logprobs += [token.logprob for token in delta.logprobs]
            if count:
                generation.top_logprobs += [list(token.top) for token in delta.logprobs]
            generation.finish_reason = delta.finish_reason
        generation.finished = time.perf_counter()
        self.running.remove(generation)
        on_answer(generation)
        return generation
