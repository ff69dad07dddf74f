"""What a `StepLoop` asks of `forward`, and of a sampler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from graphed_sampling.sampler import StepOutput
from graphed_sampling.table import RequestTable


@dataclass(frozen=True)
class PrefillChunk:
    """A piece of a prompt that was admitted to `slot`; `last` when the prompt ends with it."""

    slot: int
    token_ids: npt.NDArray[np.int64]
    start: int
    """Position of the first of them."""
    last: bool


@dataclass(frozen=True)
class StepBatch:
    """What `forward` is to compute.

    slots: int32 [n] on the CPU, the rows whose next token will be drawn: first `num_decoding` that
    read their last token (`last_token_ids[slot]`, at position `positions[slot] - 1`, on the
    device), then one for each chunk of `prefill` that is the last of its prompt, in that order.
    prefill: chunks of prompts. freed: slots that were given back since the last call; a chunk with
    start 0 begins anew in its slot. span: no position of this step is >= it.
    last_token_ids, positions: int64 [max_requests], the table's; they hold for all admitted slots.
    grammar_bitmask: int32 [n, words] on the CPU, or None: for a forward that samples itself.
    """

    slots: Tensor
    num_decoding: int
    prefill: tuple[PrefillChunk, ...]
    freed: tuple[int, ...]
    span: int
    last_token_ids: Tensor
    positions: Tensor
    grammar_bitmask: Tensor | None


Forward = Callable[[StepBatch], "Tensor | StepOutput"]


class SamplerLike(Protocol):
    """`Sampler` or `GraphedSampler`."""

    table: RequestTable

    def __call__(
        self, logits: Tensor, slots: Tensor, *, grammar_bitmask: Tensor | None = None
    ) -> StepOutput: ...
