"""Processes that are the ranks of a group, for tests."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

GROUP_TIMEOUT = timedelta(seconds=60)
RUN_TIMEOUT = 200.0
"""Seconds for a run: a first one may compile for more than a minute."""


class Ranks:
    """`run` calls a function of a module in `size` processes, as fn(group, *args).

    The store that brings them together is this process's, so that it outlives any of them.
    """

    def __init__(self, size: int, backend: str = "gloo") -> None:
        self.size = size
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        self._runs = 0
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, self._store.port, rank, size, backend), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def run(
        self, function: Callable[..., Any], *arguments: Any, ranks: Sequence[int] | None = None
    ) -> list[Any]:
        """What the function returns on each rank, None where the process ended meanwhile; ranks:
        those that make the group, default all. AssertionError with the trace of one that raised."""
        members = list(range(self.size)) if ranks is None else list(ranks)
        self._runs += 1
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send((self._runs, function, arguments, members))
        results: list[Any] = []
        failures = []
        for rank in range(self.size):
            try:
                run = 0
                while run < self._runs:  # what an earlier one still had to say is of no interest
                    assert self._pipes[rank].poll(RUN_TIMEOUT), f"rank {rank} hangs"
                    run, failed, result = self._pipes[rank].recv()
            except (EOFError, OSError):
                failed, result = False, None
            if failed:
                failures.append(f"rank {rank}: {result[-1500:]}")
            elif rank in members:
                results.append(result)
        assert not failures, failures[0]
        return results

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def _serve(pipe: Connection, port: int, rank: int, size: int, backend: str) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=GROUP_TIMEOUT)
    while True:
        try:
            run, function, arguments, members = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        failed, result = False, None
        try:
            group = dist.new_group(members)  # of its own: an earlier one may be broken
            if rank in members:
                result = function(group, *arguments)
        except BaseException:
            failed, result = True, traceback.format_exc()
        pipe.send((run, failed, result))
