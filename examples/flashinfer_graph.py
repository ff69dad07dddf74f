"""FlashInfer's sampling in a CUDA graph: captured as it comes, and so that replays draw afresh.

    python examples/flashinfer_graph.py

It needs a GPU and flashinfer-python. A graph keeps the arguments of its kernels: without a seed and
an offset in tensors, FlashInfer asks torch's generator on the host, once, and all replays draw with
what it answered. With them, and with the offset's advance in the graph too, each draws anew. The
third way is this package's op, which does that and reports logprobs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

VOCAB_SIZE, REPLAYS = 1024, 12
DRAW_STEP = 256
"""More random numbers than a draw takes: each round of FlashInfer's takes one, and 150 are the
most that there can be."""


class Ways:
    """Ways to draw one token from a flat row, each as a function of nothing to be captured."""

    def __init__(self) -> None:
        device = torch.device("cuda")
        self.logits = torch.zeros(1, VOCAB_SIZE, device=device)
        self.one = torch.ones(1, device=device)
        self.top_k = torch.full((1,), VOCAB_SIZE, dtype=torch.int32, device=device)
        self.seed = torch.full((1,), 7, dtype=torch.int64, device=device)
        self.offset = torch.zeros(1, dtype=torch.int64, device=device)

    def naive(self) -> Tensor:
        from flashinfer import sampling

        probabilities = sampling.softmax(self.logits, self.one)
        tokens: Tensor = sampling.top_k_top_p_sampling_from_probs(
            probabilities, self.top_k, self.one, filter_apply_order="joint"
        )
        return tokens

    def advanced(self) -> Tensor:
        from flashinfer import sampling

        probabilities = sampling.softmax(self.logits, self.one)
        tokens: Tensor = sampling.top_k_top_p_sampling_from_probs(
            probabilities,
            self.top_k,
            self.one,
            filter_apply_order="joint",
            seed=self.seed,
            offset=self.offset,
        )
        self.offset.add_(DRAW_STEP)
        return tokens

    def op(self) -> Tensor:
        import graphed_sampling  # noqa: F401  its ops

        tokens, _logprobs = torch.ops.graphed_sampling.flashinfer_sample(
            self.logits,
            self.one,
            self.top_k,
            self.one,
            torch.zeros_like(self.one),
            self.seed,
            self.offset,
        )
        return tokens


def replays(draw: Callable[[], Tensor]) -> list[int]:
    """What replays of one capture draw."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        draw()  # compiles, loads, takes scratch: not in the capture
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = draw()
    drawn = []
    for _ in range(REPLAYS):
        graph.replay()
        drawn.append(int(tokens))
    return drawn


def main() -> dict[str, list[int] | str]:
    ways = Ways()
    results: dict[str, list[int] | str] = {}
    for name, draw in (
        ("tensors, advanced", ways.advanced),
        ("this package's op", ways.op),
        # The last one: a capture that fails may leave torch's generator unusable.
        ("naive capture", ways.naive),
    ):
        try:
            results[name] = replays(draw)
        except RuntimeError as error:
            results[name] = f"not captured: {' '.join(str(error).split())[:120]}"
        print(f"{name:<18} {results[name]}")
    return results


if __name__ == "__main__":
    if not torch.cuda.is_available():
        raise SystemExit("this example needs a GPU, and flashinfer-python")
    main()
