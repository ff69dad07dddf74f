"""The collectives of a step: bounded on the CPU, enqueued and captured on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphed_sampling.distributed.watchdog import Watchdog

# Newer versions of torch have another name for it.
_NAME = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
all_gather_single: Callable[..., Any] = getattr(dist, _NAME)


class Collectives:
    """A group's collectives of one device. Tensors are contiguous."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, watchdog: Watchdog) -> None:
        self.group, self.watchdog = group, watchdog
        self.rank, self.size = group.rank(), group.size()
        self._waits = device.type == "cpu"

    def all_to_all(
        self, received: Tensor, sent: Tensor, received_sizes: list[int], sent_sizes: list[int]
    ) -> None:
        """Give every rank its part of `sent` [sum of sizes]; sizes are numbers of elements."""
        self._do(
            dist.all_to_all_single,
            received.view(torch.uint8),  # of any dtype, so that backends need not know it
            sent.view(torch.uint8),
            [size * received.element_size() for size in received_sizes],
            [size * sent.element_size() for size in sent_sizes],
        )

    def all_gather(self, received: Tensor, sent: Tensor) -> None:
        """Every rank's `sent`, in the order of the ranks."""
        self._do(all_gather_single, received, sent)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """source: a rank of the group."""
        self._do(dist.broadcast, tensor, group_src=source)

    def _do(self, collective: Callable[..., Any], *arguments: Any, **named: Any) -> None:
        if not self._waits:
            collective(*arguments, group=self.group, **named)
            return
        try:
            work = collective(*arguments, group=self.group, async_op=True, **named)
            work.wait(timedelta(seconds=self.watchdog.timeout))
        except RuntimeError as error:
            raise self.watchdog.diagnose(str(error)) from error

    def warm_up(self, device: torch.device) -> None:
        """Make the communicator, which a capture cannot."""
        sent = torch.zeros(self.size, dtype=torch.int32, device=device)
        self.all_to_all(torch.zeros_like(sent), sent, [1] * self.size, [1] * self.size)
        self.all_gather(torch.zeros_like(sent), sent[:1])
        self.broadcast(sent, 0)
