"""Transport "symmetric": one kernel a rank, over memory that all GPUs of a host reach.

Every rank reads its shard once and sends all ranks what is to know of it; then each finishes every
row, reading the few logits that matter from their owners. No collective is called, no row is moved,
and every rank has the bits of a single device's step with the `cuda` backend.
"""

from __future__ import annotations

import time
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from graphed_sampling import backends
from graphed_sampling.distributed.shards import VocabRanges
from graphed_sampling.sampler import TableStep
from graphed_sampling.table import RequestTable

_LOOK_SECONDS: Final = 0.005
"""At least so much time lies between two looks for a failure: a fast loop has none every step."""
_ALIGNMENT: Final = 16  # bytes


class SymmetricMemory(NamedTuple):
    """own: [count], this rank's. addresses: where each rank's lie for this rank's device, as long
    as `mapping` lives."""

    own: Tensor
    addresses: tuple[int, ...]
    mapping: object


def symmetric_memory(
    group: dist.ProcessGroup, count: int, dtype: torch.dtype, device: torch.device
) -> SymmetricMemory:
    """Zeros [count] on every rank, which all ranks' devices reach.

    The same arguments on all ranks, which meet here.
    """
    from torch.distributed import _symmetric_memory as symm_mem

    with torch.inference_mode(False):
        tensor: Tensor = symm_mem.empty(count, dtype=dtype, device=device)
    handle: Any = symm_mem.rendezvous(tensor, group)
    tensor.zero_()
    addresses = list(handle.buffer_ptrs)
    offset = tensor.data_ptr() - addresses[group.rank()]
    torch.cuda.synchronize(device)
    dist.barrier(group)  # nobody writes there before it is zero
    return SymmetricMemory(tensor, tuple(address + offset for address in addresses), handle)


class SymmetricStep(TableStep):
    """`TableStep` for logits that are sharded.

    widths: of the ranks' logits. limit: seconds that the device waits for another rank's. rows: of
    the largest step.
    """

    def __init__(
        self,
        owner: object,
        table: RequestTable,
        logits_dtype: torch.dtype,
        vocab_ranges: VocabRanges,
        widths: list[int],
        group: dist.ProcessGroup,
        limit: float,
        rows: int,
    ) -> None:
        super().__init__(owner, table, "cuda", rows, (logits_dtype,))
        self._kernels: Any = backends.module("cuda")
        device = table.device
        # Rows lie equally far apart on all ranks, and are aligned.
        unit = _ALIGNMENT // logits_dtype.itemsize
        stride = -(-max(widths) // unit) * unit
        logits = symmetric_memory(group, rows * stride, logits_dtype, device)
        self.logits = logits.own.view(rows, stride)[:, : widths[group.rank()]]
        """[rows, width]: the input buffer, which other ranks read during a step."""
        words = self._kernels.exchange_words(table.layout, rows)
        exchange = symmetric_memory(group, words, torch.int32, device)
        self._memory = (logits, exchange)
        self._exchange = exchange.own
        self._shards = self._kernels.Shards(
            rank=group.rank(),
            starts=(0, *(end for _, end in vocab_ranges)),
            logits_addresses=logits.addresses,
            exchange_addresses=exchange.addresses,
            limit_ns=int(limit * 1e9),
        )
        on_gpu = device.type == "cuda"
        self._told_words = exchange.own[: self._kernels.FAILURE_WORDS]
        self._told = torch.zeros(
            self._kernels.FAILURE_WORDS, dtype=torch.int32, device="cpu", pin_memory=on_gpu
        )
        self._stream = torch.cuda.Stream(device) if on_gpu else None
        self._last_look = 0.0

    def failure(self) -> tuple[str, tuple[int, ...]] | None:
        """Why this rank's device has given up in an earlier step, and whose fault that is.

        It does not wait: what is found is what the device told by the time of the look before. What
        has failed stays so, and looks lie beside the steps, on a stream of their own.
        """
        now = time.monotonic()
        if now - self._last_look < _LOOK_SECONDS:
            return None
        self._last_look = now
        if self._stream is None:
            self._told.copy_(self._told_words)
        else:
            with torch.cuda.stream(self._stream):
                self._told.copy_(self._told_words, non_blocking=True)
        failure = self._kernels.failure(self._told)
        return None if failure is None else (str(failure), (failure.rank,))

    def __call__(
        self,
        logits: Tensor,
        slots: Tensor,
        grammar_bitmask: Tensor | None,
        words: Tensor | None,
        given: Tensor | None = None,
        group_stats: Tensor | None = None,
    ) -> None:
        """logits: the first rows of the input buffer."""
        if group_stats is not None:
            raise ValueError("group_stats are of whole rows: there are none of shards")
        self._kernels.sharded_step(
            logits,
            slots,
            self.table.params,
            self.table.state,
            self.table.tables,
            self.output.record,
            self._scratch,
            self._exchange,
            self.table.layout,
            self._shards,
            grammar_bitmask=grammar_bitmask,
            words=words,
            given=given,
        )
