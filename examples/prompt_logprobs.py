"""Prompt logprobs of a mixed batch, captured once, on a stream and in a memory pool of their own.

    python examples/prompt_logprobs.py

A step's logits stand in one buffer: rows of prompts and rows that decode. Which rows ask for their
logprobs is a list on the device with a length on the device, so one graph serves every step, and
rows that do not ask are not read. The records go to the host by one copy, beside the next step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from graphed_sampling import PromptLogprobs, backends, new_prompt_output, next_token_ids

VOCAB_SIZE, MOST_ROWS, TOP_N = 4096, 64, 3


class PromptScorer:
    """Scores up to MOST_ROWS positions of the logits buffer; eager where there is no GPU.

    The logits must not change, nor `score` be called again, before `results` has returned.
    """

    def __init__(self, logits: Tensor, backend: str) -> None:
        device = logits.device
        self.logits, self.backend = logits, backend
        self.tokens = torch.full((MOST_ROWS,), -1, dtype=torch.int64, device=device)
        self.rows = torch.full((MOST_ROWS,), -1, dtype=torch.int64, device=device)
        self.num_rows = torch.zeros(1, dtype=torch.int32, device=device)
        self.record = new_prompt_output(MOST_ROWS, TOP_N, device=device)
        self.host = torch.empty_like(self.record, device="cpu", pin_memory=device.type == "cuda")
        self.graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)
            self._capture()

    def score(self, rows: Tensor, tokens: Tensor) -> None:
        """Enqueue the logprobs of tokens, int64 [m], at rows of the logits, int64 [m]."""
        count = rows.shape[0]
        self.rows[:count].copy_(rows)
        self.tokens[:count].copy_(tokens)
        self.num_rows.fill_(count)
        with self._beside():
            if self.graph is None:
                self._call()
            else:
                self.graph.replay()
            self.host.copy_(self.record, non_blocking=True)

    def results(self, count: int) -> PromptLogprobs:
        """What the last call of `score` found, on the host. Waits for it."""
        if self.graph is not None:
            self.stream.synchronize()
        return PromptLogprobs.of(self.host[:count], TOP_N)

    def _call(self) -> None:
        torch.ops.graphed_sampling.prompt_logprobs_out(
            self.logits,
            self.tokens,
            self.record,
            self.rows,
            self.num_rows,
            top_n=TOP_N,
            rank=True,
            backend=self.backend,
        )

    def _capture(self) -> None:
        with self._beside():
            self._call()  # compiles what is not compiled yet
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(
                graph,
                pool=torch.cuda.graph_pool_handle(),
                stream=self.stream,
                capture_error_mode="thread_local",
            ):
                self._call()
        self.graph = graph

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Work on the scorer's own stream, behind what the current one has been given so far."""
        if self.logits.device.type == "cpu":
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    logits = torch.zeros(MOST_ROWS, VOCAB_SIZE, device=device)
    scorer = PromptScorer(logits, backends.resolve("auto", device))
    # Two prompts, packed, before two requests that decode and do not ask.
    prompts = torch.tensor([11, 12, 13, 14, 21, 22], device=device)
    cu_lengths = torch.tensor([0, 4, 6], dtype=torch.int32, device=device)
    for step in range(3):
        logits.normal_()  # the model writes its logits here
        sampled = logits[[3, 5]].argmax(1)
        tokens = next_token_ids(prompts, cu_lengths, sampled)
        scorer.score(torch.arange(6, device=device), tokens)
        got = scorer.results(6)
        print(step, got.logprobs.tolist(), got.ranks.tolist())


if __name__ == "__main__":
    main()
