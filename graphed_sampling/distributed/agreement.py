"""What the ranks of a group must have in common: when a sampler is made, and in every step."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from graphed_sampling.distributed.collectives import Collectives
from graphed_sampling.distributed.watchdog import StepHeader, Watchdog
from graphed_sampling.table import RequestTable, SlotClaim

_TIMEOUTS: Final = (0.01, 1e6)
"""Seconds. To gloo less than a millisecond is no limit at all."""


def member_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group, by default the default one; ValueError where this process is not in it."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("there is no process group: call torch.distributed.init_process_group")
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"group = {group!r} is not accepted: a group that this process is in")
    return group


class Description(NamedTuple):
    """What a rank says of itself: what must be alike on all ranks, and what is its own."""

    alike: dict[str, object]
    own: dict[str, Any]


def describe_to_all(
    group: dist.ProcessGroup, describe: Callable[[], Description]
) -> list[dict[str, Any]]:
    """What every rank says is its own. ValueError, on all ranks, where they are not alike.

    describe: may raise an error, of which then all ranks hear.
    """
    failure: Exception | None = None
    said = Description({}, {})
    try:
        said = describe()
    except Exception as error:  # whatever it is, the others wait
        failure = error
    told: list[tuple[str, Description]] = [("", said)] * group.size()
    # Objects of this package are not sent: tuples and strings say it all.
    dist.all_gather_object(
        told, ("" if failure is None else str(failure), tuple(said)), group=group
    )
    if failure is not None:
        raise failure
    for rank, (error_text, _) in enumerate(told):
        if error_text:
            raise ValueError(f"rank {rank}: {error_text}")
    descriptions = [Description(*parts) for _, parts in told]
    for name in said.alike:
        check_alike(name, [d.alike.get(name) for d in descriptions])
    return [d.own for d in descriptions]


def check_alike(name: str, values: Sequence[object]) -> None:
    """ValueError naming the ranks whose value is not what most ranks have."""
    usual = max(values, key=values.count)
    others = [rank for rank, value in enumerate(values) if value != usual]
    if others:
        told = "; ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
        raise ValueError(
            f"{name} must be the same on all ranks; rank {', '.join(map(str, others))} differs: "
            f"{told}"
        )


def describe_table(
    table: RequestTable, group: dist.ProcessGroup, timeout: float
) -> dict[str, object]:
    """What tables, and how samplers wait for each other, must have in common.

    ValueError for a table that cannot be stepped by several ranks, or a timeout that is none.
    """
    if not (isinstance(timeout, int | float) and _TIMEOUTS[0] <= timeout <= _TIMEOUTS[1]):
        raise ValueError(f"timeout = {timeout!r} is not accepted: seconds in {list(_TIMEOUTS)}")
    if table.seed is None:
        raise ValueError(
            "the table was made with seed=None, and would give requests without a seed other ones "
            "on every rank: make the tables of all ranks with the same seed"
        )
    device = table.device
    try:
        engine = group._get_backend(device).name()
    except RuntimeError as error:
        raise ValueError(f"the group has no backend for {device.type}: {error}") from error
    if device.type == "cuda" and engine != "nccl":
        raise ValueError(f"the group's backend for CUDA is {engine!r}: it must be nccl")
    return {
        "table's sizes": str(table.layout),
        "table's eos_token_ids": table.eos_token_ids,
        # Seeds need not be told to say whether they are equal.
        "table's seed": hashlib.sha256(str(table.seed).encode()).hexdigest()[:12],
        "table's device": device.type,
        "timeout": float(timeout),
    }


class StepAgreement:
    """That all ranks take the same steps of one sampler.

    name, aborts: see `Watchdog`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        table: RequestTable,
        timeout: float,
        name: str,
        *,
        aborts: bool = True,
    ) -> None:
        self.watchdog = Watchdog(group, table.device, timeout, name, aborts=aborts)
        self.collectives = Collectives(group, table.device, self.watchdog)
        self._table = table
        self.device_failure: Callable[[], tuple[str, tuple[int, ...]] | None] = lambda: None
        """What a step that has ended left behind on the device, and which ranks are to blame."""

    def enter(self, rows: int, bucket: int, inputs: int, claim: SlotClaim | None) -> None:
        """A step begins, whose inputs are in their places. RankError where one before it has
        failed, as far as the host knows; on the CPU also unless all ranks have entered the same.

        inputs: a number that says which optional ones there are. claim: of the slots, None where
        they are on a GPU: what these are is not compared.
        """
        last = self.watchdog.header
        failed = self.device_failure()
        if failed is not None:
            message, ranks = failed
            self.watchdog.fail(f"in step {last.step} or before, {message}", ranks)
        fingerprint = 0 if claim is None else self._table.fingerprint(claim.slots)
        self.watchdog.enter(
            StepHeader(last.sampler, last.step + 1, rows, bucket, inputs, fingerprint)
        )
        if self._table.device.type != "cuda":
            self._confirm()

    def _confirm(self) -> None:
        header = self.watchdog.header
        own = torch.tensor(header)
        told = torch.zeros(self.collectives.size, len(own), dtype=torch.int64)
        self.collectives.all_gather(told.view(-1), own)
        headers = {rank: StepHeader(*row) for rank, row in enumerate(told.tolist())}
        disagreement = self.watchdog.disagreement(header.step, headers)
        if disagreement is not None:
            raise disagreement

    def leave(self) -> None:
        """The step is done, or on a GPU enqueued on the current stream."""
        self.watchdog.leave()

    def close(self) -> None:
        self.watchdog.close()
