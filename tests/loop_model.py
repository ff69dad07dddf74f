"""A model for tests of the loop: what a slot has seen decides its logits.

Each slot keeps a hash of its whole sequence, as a cache of keys and values would: a token too many,
too few or in the wrong order changes every later token. It also checks what a batch promises.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from graphed_sampling import (
    FinishReason,
    RequestTable,
    Sampler,
    SamplingParams,
    StepBatch,
)

VOCAB_SIZE = 61
EOS = 0
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
_PRIME = 1009
_STATES = 211


def decode(token_ids: Sequence[int]) -> str:
    """One letter a token, and none for the EOS."""
    return "".join(LETTERS[i] for i in token_ids if i != EOS)


class LoopModel:
    """`forward` of a StepLoop. All rows are computed at once, by slot: constant shapes."""

    def __init__(self, num_slots: int, device: torch.device | str = "cpu") -> None:
        generator = torch.Generator().manual_seed(5)
        self.logits = (2 * torch.randn(_STATES, VOCAB_SIZE, generator=generator)).to(device)
        self.device = torch.device(device)
        self.state = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.length = [0] * num_slots  # of a prompt so far, where one is under way
        self.occupied: set[int] = set()
        self.freed: list[int] = []
        self.batches: list[StepBatch] = []
        self.fail_at = -1
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, batch: StepBatch) -> Tensor:
        assert self.gate.wait(20)
        if len(self.batches) == self.fail_at:
            raise RuntimeError("device-side assert")
        self.batches.append(batch)
        for slot in batch.freed:
            # A slot that was never given a chunk may be freed too.
            self.occupied.discard(slot)
            self.freed.append(slot)
        slots = batch.slots[: batch.num_decoding].long()
        assert all(int(slot) in self.occupied for slot in slots)
        on_device = slots.to(self.device)
        tokens = batch.last_token_ids[on_device]
        self.state[on_device] = (self.state[on_device] * 31 + tokens + 1) % _PRIME
        last = []
        for chunk in batch.prefill:
            if chunk.start == 0:
                assert chunk.slot not in self.occupied
                self.occupied.add(chunk.slot)
                self.state[chunk.slot] = 0
                self.length[chunk.slot] = 0
            assert self.length[chunk.slot] == chunk.start
            self.length[chunk.slot] += len(chunk.token_ids)
            assert batch.span >= self.length[chunk.slot]
            state = int(self.state[chunk.slot])
            for token in chunk.token_ids.tolist():
                state = (state * 31 + token + 1) % _PRIME
            self.state[chunk.slot] = state
            if chunk.last:
                last.append(chunk.slot)
        assert batch.slots[batch.num_decoding :].tolist() == last
        return self.logits[self.state[batch.slots.long().to(self.device)] % _STATES]


def usual_loop(
    prompt: Sequence[int], params: SamplingParams
) -> tuple[list[int], list[float], FinishReason]:
    """One request alone, step by step: tokens, logprobs, finish reason."""
    return _usual_loop(tuple(prompt), params)


@functools.cache
def _usual_loop(
    prompt: tuple[int, ...], params: SamplingParams
) -> tuple[list[int], list[float], FinishReason]:
    table = RequestTable(1, VOCAB_SIZE, device="cpu", eos_token_ids=[EOS])
    sampler = Sampler(table, "torch")
    model = LoopModel(1)
    slot = table.admit(params, prompt)
    state = 0
    for token in prompt:
        state = (state * 31 + token + 1) % _PRIME
    tokens, logprobs = [], []
    while True:
        logits = model.logits[state % _STATES].unsqueeze(0)
        output = sampler(logits, torch.tensor([slot], dtype=torch.int32))
        tokens.append(int(output.token_ids))
        logprobs.append(float(output.logprobs))
        if reason := FinishReason(int(output.finish_reason)):
            return tokens, logprobs, reason
        state = (state * 31 + tokens[-1] + 1) % _PRIME
