"""A language model of any size with random weights, for traces and benchmarks of the loop.

Plain torch, of the Llama family: its text means nothing, its time is that of a trained model of
its shape. On a GPU decoding is captured, one graph a bucket of rows, and reads last tokens,
positions and slots on the device.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from graphed_sampling.graph import GraphedSampler
from graphed_sampling.staging import PinnedRing, StagingStats
from graphed_sampling.step.batch import PrefillChunk, StepBatch


class Shape(NamedTuple):
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab_size: int


SMOLLM2_135M: Final = Shape(30, 576, 9, 3, 1536, 49152)
TINY: Final = Shape(2, 64, 4, 2, 128, 2048)
SHAPES: Final = {"tiny": TINY, "135m": SMOLLM2_135M}

_WARM_UPS: Final = 2


class RandomModel:
    """A cache of `num_slots` requests of `capacity` tokens, and one slot more for padding rows."""

    def __init__(
        self,
        shape: Shape,
        *,
        num_slots: int,
        capacity: int,
        device: torch.device,
        dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> None:
        """dtype: None is bf16 on a GPU, fp32 elsewhere."""
        self.shape, self.num_slots, self.capacity, self.device = shape, num_slots, capacity, device
        self.dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
        generator = torch.Generator().manual_seed(seed)
        head = shape.hidden // shape.heads
        kv = shape.kv_heads * head

        def matrix(rows: int, columns: int) -> Tensor:
            # This size keeps activations near 1 from layer to layer.
            values: Tensor = torch.randn(rows, columns, generator=generator)
            return (values / math.sqrt(columns)).to(device, self.dtype)

        self.embedding = matrix(shape.vocab_size, shape.hidden) * shape.hidden**0.5
        self.head = matrix(shape.vocab_size, shape.hidden) * 3  # so that some tokens stand out
        self.layers = [
            (
                matrix(shape.hidden + 2 * kv, shape.hidden),
                matrix(shape.hidden, shape.hidden),
                matrix(2 * shape.intermediate, shape.hidden),
                matrix(shape.hidden, shape.intermediate),
            )
            for _ in range(shape.layers)
        ]
        size = (shape.layers, 2, num_slots + 1, shape.kv_heads, capacity, head)
        self.cache = torch.zeros(size, dtype=self.dtype, device=device)
        angles = torch.outer(torch.arange(capacity), 10000.0 ** -torch.arange(0, 1, 2 / head))
        # Of rotary embeddings: x * cos, and x with its halves exchanged times sin.
        cos, sin = angles.cos(), angles.sin()
        self.cos = torch.cat([cos, cos], -1).to(device, self.dtype)
        self.sin = torch.cat([-sin, sin], -1).to(device, self.dtype)

    def hidden(self, token_ids: Tensor, positions: Tensor, slots: Tensor, span: int) -> Tensor:
        """[n, hidden] after the last of each row's tokens.

        token_ids, positions: int64 [n, t]. slots: int64 [n]. span: above all positions.
        """
        # Few kernels a layer: so small a model takes the time of its kernels' number.
        shape = self.shape
        n, t = token_ids.shape
        groups, head = shape.heads // shape.kv_heads, shape.hidden // shape.heads
        turned = shape.heads + shape.kv_heads
        # Heads that share keys are rows of one matrix: [n * kv_heads, t * groups, head].
        hidden_from = torch.arange(span, device=self.device) > positions.unsqueeze(-1)
        bias = torch.zeros(n, t, span, dtype=self.dtype, device=self.device)
        bias = bias.masked_fill_(hidden_from, -torch.inf).repeat_interleave(groups, 1)
        bias = bias.repeat_interleave(shape.kv_heads, 0)
        cos, sin = self.cos[positions].unsqueeze(2), self.sin[positions].unsqueeze(2)
        x = self.embedding[token_ids].view(n * t, shape.hidden)
        rows = slots.unsqueeze(1)
        both = torch.cat([slots, slots + self.num_slots + 1])  # keys, and values behind them
        for (attend, merge, widen, narrow), cache in zip(self.layers, self.cache, strict=True):
            packed = (F.rms_norm(x, (shape.hidden,)) @ attend.T).view(n, t, -1, head)
            mixed, value = packed.split([turned, shape.kv_heads], 2)
            mixed = torch.addcmul(mixed * cos, mixed.roll(head // 2, -1), sin)
            query, key = mixed.split([shape.heads, shape.kv_heads], 2)
            cache[0][rows, :, positions] = key
            cache[1][rows, :, positions] = value
            keys, values = cache.flatten(0, 1)[both, :, :span].view(2, -1, span, head)
            query = query.reshape(n, t, shape.kv_heads, groups, head).transpose(1, 2)
            query = query.reshape(n * shape.kv_heads, t * groups, head)
            scores = torch.baddbmm(bias, query, keys.transpose(1, 2), alpha=head**-0.5)
            attended = torch.bmm(scores.softmax(-1), values)
            attended = attended.view(n, shape.kv_heads, t, groups, head).transpose(1, 2)
            x = torch.addmm(x, attended.reshape(n * t, shape.hidden), merge.T)
            gate, up = (F.rms_norm(x, (shape.hidden,)) @ widen.T).chunk(2, -1)
            x = torch.addmm(x, F.silu(gate) * up, narrow.T)
        return F.rms_norm(x.view(n, t, -1)[:, -1], (shape.hidden,))

    def write_logits(self, hidden: Tensor, out: Tensor) -> None:
        torch.mm(hidden, self.head.T, out=out)


class RandomForward:
    """`forward` of a StepLoop over a `RandomModel`.

    last_token_ids, positions: int64 [num_slots] on the device, a table's: of each slot the last
    token, and the index of the next one. logits: [rows, vocab_size], where rows of a step go.
    row_buckets: captured on a GPU, in the constructor; no slot may be admitted then.
    """

    def __init__(
        self,
        model: RandomModel,
        last_token_ids: Tensor,
        positions: Tensor,
        logits: Tensor,
        row_buckets: Sequence[int],
    ) -> None:
        self.model = model
        self._last_token_ids, self._positions = last_token_ids, positions
        self._logits = logits
        self._buckets = row_buckets
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        rows = row_buckets[-1]
        self._slots = torch.full((rows,), -1, dtype=torch.int32, device=model.device)
        self._ring = PinnedRing(model.device, rows, 4, StagingStats())
        if model.device.type == "cuda":
            self._capture()

    @classmethod
    def of(cls, model: RandomModel, sampler: GraphedSampler) -> RandomForward:
        """For a loop with this sampler: into its input buffer, in its buckets."""
        table, buckets = sampler.table, sampler.row_buckets
        logits = sampler.logits_buffer(buckets[-1])
        return cls(model, table.last_token_ids, table.positions, logits, buckets)

    def _capture(self) -> None:
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(self.model.device)
        stream.wait_stream(torch.cuda.current_stream())
        for rows in reversed(self._buckets):
            with torch.no_grad(), torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):
                    self._decode(rows, self.model.capacity)
            graph = torch.cuda.CUDAGraph()
            with (
                torch.no_grad(),
                torch.cuda.graph(
                    graph, pool=pool, stream=stream, capture_error_mode="thread_local"
                ),
            ):
                self._decode(rows, self.model.capacity)
            self._graphs[rows] = graph
        torch.cuda.current_stream().wait_stream(stream)

    def _decode(self, rows: int, span: int) -> None:
        """From `self._slots` to logits, all of it on the device."""
        model = self.model
        slots = self._slots[:rows].long()
        held = slots.clamp(min=0)
        # A padding row reads token 0 at position 0 of the slot that is nobody's.
        real = slots >= 0
        token_ids = self._last_token_ids[held].clamp(min=0)
        positions = (self._positions[held] - 1).masked_fill(~real, 0).clamp(0, span - 1)
        slots = slots.masked_fill(~real, model.num_slots)
        hidden = model.hidden(token_ids.unsqueeze(1), positions.unsqueeze(1), slots, span)
        model.write_logits(hidden, self._logits[:rows])

    def __call__(self, batch: StepBatch) -> Tensor:
        count = batch.num_decoding
        if count:
            self.decode(batch.slots[:count].numpy(), batch.span)
        logits = self._logits[: len(batch.slots)]
        # Pieces of one shape are one call: launches take the time.
        alike: dict[tuple[int, int], list[tuple[int, PrefillChunk]]] = {}
        row = count
        for chunk in batch.prefill:
            alike.setdefault((chunk.start, len(chunk.token_ids)), []).append((row, chunk))
            row += chunk.last
        for (start, _), pieces in alike.items():
            token_ids = np.stack([chunk.token_ids for _, chunk in pieces])
            hidden = self.prefill([chunk.slot for _, chunk in pieces], token_ids, start)
            rows = [row for row, chunk in pieces if chunk.last]
            if len(rows) == len(pieces) and rows[-1] - rows[0] == len(rows) - 1:
                self.model.write_logits(hidden, logits[rows[0] : rows[0] + len(rows)])
                continue
            for number, (row, chunk) in enumerate(pieces):
                if chunk.last:
                    self.model.write_logits(hidden[number : number + 1], logits[row : row + 1])
        return logits

    def decode(self, slots: npt.NDArray[np.int32], span: int) -> None:
        """Logits of the next tokens of slots, int32 [n], to the first rows of the buffer."""
        rows = self._buckets[bisect_left(self._buckets, len(slots))] if self._graphs else len(slots)
        padded = np.full(rows, -1, np.int32)
        padded[: len(slots)] = slots
        self._ring.upload(padded, self._slots[:rows])
        if self._graphs:
            self._graphs[rows].replay()
        else:
            self._decode(rows, span)

    def prefill(self, slots: Sequence[int], token_ids: npt.NDArray[np.int64], start: int) -> Tensor:
        """[n, hidden] after a piece of each slot's prompt. token_ids: [n, t], from `start` on."""
        device = self.model.device
        ids = torch.from_numpy(token_ids).to(device, non_blocking=True)
        end = start + token_ids.shape[1]
        positions = torch.arange(start, end, device=device).expand(len(slots), -1)
        rows = torch.tensor(slots).to(device, non_blocking=True)
        return self.model.hidden(ids, positions, rows, end)
