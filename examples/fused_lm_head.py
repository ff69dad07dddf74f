"""An LM head whose kernel tells the sampling step of its logits, against cuBLAS and a plain step.

    python examples/fused_lm_head.py [--batch B ...]

A GEMM has every logit in its registers once. Here it leaves each 64 logits' maximum and sum beside
them (`store_group_stats`), and the step, given these, reads only the groups that may be drawn. GEMM
and step are one CUDA graph. It needs a GPU that the `cuda` backend runs on, and prints what both
ways take and which one wins: where this GEMM is slower than cuBLAS by more than the step gains, it
is the other one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from graphed_sampling import (
    GROUP_SIZE,
    WINDOW_SIZE,
    RequestTable,
    SamplingParams,
    StepOutput,
    group_stats,
    group_stats_shape,
    new_output,
    new_scratch,
)
from graphed_sampling.epilogue import store_group_stats

VOCAB_SIZE, HIDDEN_SIZE = 128256, 4096
BATCHES = (1, 8, 32, 64, 128, 256)
CALLS, REPLAYS = 10, 20


# The LM head.


@triton.jit
def lm_head_kernel(
    hidden, weight, logits, stats, num_rows, vocab_size, hidden_size, stride,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, STATISTICS: tl.constexpr,
):  # fmt: skip
    # Tiles of the same tokens lie side by side, so that the weight comes from memory once.
    row_tiles = tl.cdiv(num_rows, M)
    first_row = tl.program_id(0) % row_tiles * M
    first_token = tl.program_id(0) // row_tiles * N
    sums = tl.zeros((M, N), tl.float32)
    for k in range(0, hidden_size, K):
        sums = tl.dot(hidden.load([first_row, k]), weight.load([first_token, k]).T, sums)
    tile = sums.to(logits.dtype.element_ty)
    rows = first_row + tl.arange(0, M)
    tokens = first_token + tl.arange(0, N)
    places = rows.to(tl.int64)[:, None] * stride + tokens[None, :]
    tl.store(
        logits + places, tile, mask=(rows < num_rows)[:, None] & (tokens < vocab_size)[None, :]
    )
    if STATISTICS:
        store_group_stats(tile, stats, rows, first_token, num_rows, vocab_size)


class Tile(NamedTuple):
    """Rows, tokens and inputs of a tile; warps that work on it, and loads ahead."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


# Whole windows of tokens, which `store_group_stats` wants. Up to 110 KB of loads ahead leave room
# for a second tile, which loads while the first one ends.
TILES = (
    Tile(16, 128, 64, 4, 5),
    Tile(16, 128, 128, 4, 3),
    Tile(16, 128, 128, 4, 5),
    Tile(32, 128, 64, 4, 5),
    Tile(32, 128, 128, 4, 4),
    Tile(64, 128, 64, 4, 4),
    Tile(64, 128, 128, 4, 3),
    Tile(64, 256, 64, 8, 4),
    Tile(128, 128, 64, 8, 3),
    Tile(128, 128, 64, 8, 4),
    Tile(128, 256, 64, 8, 3),
    Tile(128, 256, 64, 8, 4),
)


def tiles_for(rows: int) -> list[Tile]:
    """Those that have no more rows than are there, rounded up, and not many less."""
    fitting = max(16, triton.next_power_of_2(rows))
    return [t for t in TILES if min(fitting, 64) <= t.m <= fitting]


def lm_head(
    hidden: Tensor, weight: Tensor, logits: Tensor, stats: Tensor, tile: Tile, *,
    statistics: bool = True,
) -> None:  # fmt: skip
    """hidden [B, H] times weight [V, H] into logits [B, >= V], and their statistics into stats."""
    (rows, size), vocab = hidden.shape, weight.shape[0]
    grid = (triton.cdiv(rows, tile.m) * triton.cdiv(vocab, tile.n),)
    lm_head_kernel[grid](
        TensorDescriptor.from_tensor(hidden, [tile.m, tile.k]),
        TensorDescriptor.from_tensor(weight, [tile.n, tile.k]),
        logits, stats, rows, vocab, size, logits.stride(0), tile.m, tile.n, tile.k, statistics,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def best_tile(rows: int, run: Callable[[Tile], None]) -> Tile:
    times: dict[Tile, float] = {}
    for tile in tiles_for(rows):
        try:
            times[tile] = triton.testing.do_bench(lambda t=tile: run(t), warmup=5, rep=30)
        except triton.OutOfResources:  # another GPU's shared memory
            continue
    return min(times, key=times.__getitem__)


# Steps behind it.


class Steps:
    """Requests of the usual kind, all at their first token, and steps of them by the op."""

    def __init__(self, rows: int, vocab: int, device: torch.device, backend: str) -> None:
        self.table = RequestTable(rows, vocab, device=device, penalties=False, seed=0)
        for seed in range(rows):
            params = SamplingParams(temperature=0.8, top_k=50, top_p=0.95, seed=seed, logprobs=0)
            self.table.admit(params, [1])
        self.table.upload()
        self.backend = backend
        self.slots = torch.arange(rows, dtype=torch.int32, device=device)
        self.output: StepOutput = new_output(self.table, rows)
        self.scratch = new_scratch(self.table, backend, rows)

    def step(self, logits: Tensor, stats: Tensor | None = None) -> None:
        torch.ops.graphed_sampling.sample_step(
            logits,
            self.slots,
            self.table.params,
            self.table.state,
            self.table.tables,
            self.output.record,
            self.scratch,
            self.table.layout.to_ints(),
            self.backend,
            group_stats=stats,
        )


class Result(NamedTuple):
    """Tokens of both steps on the fused head's logits, and of cuBLAS and a plain step."""

    fused: Tensor
    plain: Tensor
    cublas: Tensor


class Pipelines:
    """Both ways, on the same hidden states and weight."""

    def __init__(self, hidden: Tensor, weight: Tensor, backend: str = "cuda") -> None:
        self.hidden, self.weight, self.backend = hidden, weight, backend
        (rows, _), vocab = hidden.shape, weight.shape[0]
        self.logits = torch.empty(rows, vocab, dtype=hidden.dtype, device=hidden.device)
        shape = group_stats_shape(rows, vocab)
        self.stats = torch.zeros(shape, dtype=torch.float32, device=hidden.device)
        self.tile = tiles_for(rows)[0]
        self.steps = self.new_steps()

    def new_steps(self) -> Steps:
        rows, vocab = self.logits.shape
        return Steps(rows, vocab, self.hidden.device, self.backend)

    def triton_gemm(self, tile: Tile | None = None, *, statistics: bool = True) -> None:
        lm_head(
            self.hidden, self.weight, self.logits, self.stats, tile or self.tile,
            statistics=statistics,
        )  # fmt: skip

    def cublas_gemm(self) -> None:
        torch.matmul(self.hidden, self.weight.T, out=self.logits)

    def fused(self) -> None:
        self.triton_gemm()
        self.steps.step(self.logits, self.stats)

    def plain(self) -> None:
        self.cublas_gemm()
        self.steps.step(self.logits)

    def check(self) -> Result:
        """The statistics are those of the stored logits, and the steps that are given them draw
        what those draw that read all; cuBLAS rounds its logits otherwise."""
        self.triton_gemm()
        fused_logits = self.logits.clone()
        # Behind the last window nothing is written.
        windows = -(-self.weight.shape[0] // WINDOW_SIZE)
        written = windows * WINDOW_SIZE // GROUP_SIZE
        stored, expected = (s[..., :written] for s in (self.stats, group_stats(fused_logits, -1)))
        assert torch.equal(stored[:, 0], expected[:, 0]), "maxima are not those of stored logits"
        torch.testing.assert_close(stored[:, 1], expected[:, 1])
        tokens = []
        for stats in (self.stats, None):
            steps = self.new_steps()
            steps.step(fused_logits, stats)
            tokens.append(steps.output.token_ids.clone())
        self.cublas_gemm()
        torch.testing.assert_close(self.logits.float(), fused_logits.float(), rtol=0.02, atol=0.02)
        steps = self.new_steps()
        steps.step(self.logits)
        result = Result(*tokens, steps.output.token_ids.clone())
        if not torch.equal(result.fused, result.plain):
            raise AssertionError("the step drew other tokens with statistics than without")
        return result


# Times.


def microseconds(call: Callable[[], None]) -> float:
    """Of a call, in a graph of several; the weight alone is larger than any cache."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        call()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(CALLS):
                call()
        times = []
        for _ in range(REPLAYS + 1):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(1e3 * start.elapsed_time(end) / CALLS)
    return median(times[1:])  # the first one warms up


def compare(rows: int, weight: Tensor) -> str:
    generator = torch.Generator(weight.device).manual_seed(rows)
    hidden = torch.randn(
        rows, weight.shape[1], generator=generator, device=weight.device, dtype=weight.dtype
    )
    ways = Pipelines(hidden, weight)
    ways.tile = best_tile(rows, ways.triton_gemm)
    result = ways.check()
    alike = (result.fused == result.cublas).double().mean()
    bare = microseconds(lambda: ways.triton_gemm(statistics=False))
    gemm, total = microseconds(ways.triton_gemm), microseconds(ways.fused)
    cublas, plain = microseconds(ways.cublas_gemm), microseconds(ways.plain)
    winner = "fused" if total < plain else "cuBLAS"
    return (
        f"{rows:5} {cublas:9.1f} {plain - cublas:7.1f} {plain:9.1f} {bare:9.1f} {gemm - bare:7.1f} "
        f"{total - gemm:7.1f} {total:9.1f} {100 * (plain / total - 1):+7.1f} %  {winner:7} "
        f"{100 * alike:6.1f} %  {'x'.join(map(str, ways.tile[:3]))}"
    )


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=BATCHES)
    batches = parser.parse_args().batch
    if not torch.cuda.is_available():
        raise SystemExit("fused_lm_head.py needs a GPU: it compares times")
    generator = torch.Generator("cuda").manual_seed(0)
    weight = torch.randn(
        VOCAB_SIZE, HIDDEN_SIZE, generator=generator, device="cuda", dtype=torch.bfloat16
    ).div_(HIDDEN_SIZE**0.5 / 3)  # logits deviate by 3 or so
    name = torch.cuda.get_device_name()
    print(f"{name}, V = {VOCAB_SIZE}, H = {HIDDEN_SIZE}, bf16, top-k 50 + top-p 0.95; microseconds")
    print("`+ step`: what the step adds to its GEMM; `+ stats`: what the statistics add to theirs")
    print(
        f"{'B':>5} {'cuBLAS':>9} {'+ step':>7} {'total':>9} {'Triton':>9} {'+ stats':>7} "
        f"{'+ step':>7} {'total':>9} {'gain':>9}  {'winner':7} {'alike':>8}  tile"
    )
    for rows in batches:
        print(compare(rows, weight), flush=True)


if __name__ == "__main__":
    main()
