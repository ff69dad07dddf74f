"""`VocabParallelSampler`: a step over logits of which every rank has a part of the vocabulary."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from graphed_sampling import backends
from graphed_sampling.distributed.agreement import (
    Description,
    StepAgreement,
    describe_table,
    describe_to_all,
    member_group,
)
from graphed_sampling.distributed.exchange import ExchangeStep
from graphed_sampling.distributed.shards import VocabRanges, check_vocab_ranges
from graphed_sampling.distributed.symmetric import SymmetricStep
from graphed_sampling.distributed.transports import (
    TRANSPORTS,
    Place,
    choose_transport,
    place_of,
)
from graphed_sampling.graph import BucketedSampler, check_buckets, check_dtype, check_width
from graphed_sampling.table import RequestTable, device_guard


class VocabParallelSampler(BucketedSampler):
    """`GraphedSampler` for vocab-sharded logits: the same call on every rank, with its own part of
    the logits, gives every rank the same outputs and leaves every table in the same state.

    table: this rank's; the tables of all ranks are made alike, with one seed, and told of the same
    requests in the same order. group: the ranks that share the vocabulary, the default group for
    None; NCCL for tables on GPUs.
    shard_sizes, vocab_ranges: of every rank, how many tokens it has, or which: (start, end), each
    range beginning where the one before ended, from 0 to the table's vocab_size; a range may be
    empty. Default: `even_vocab_ranges(vocab_size, ranks)`.
    logits_width: the columns of this rank's input buffer, its padded shard. Default: the size of
    its shard, with the default ranges the largest shard's.
    row_buckets, logits_dtype, backend, options: as for `GraphedSampler`. The exchange shares rows
    out, so that its buckets are rounded up to multiples of the number of ranks.
    transport: "symmetric", the kernel of the `cuda` backend over memory that the GPUs of one host
    share; "exchange", collectives of any backend and host; "auto", symmetric where it serves.
    timeout: seconds that a step may take, with the work before it on its stream: 0.01 to 1e6.

    ValueError, on all ranks, where they are not alike. A step raises `RankError` where a rank is
    late or gone or steps something else; so do all later calls, and the tables are then of no use.
    """

    def __init__(
        self,
        table: RequestTable,
        group: dist.ProcessGroup | None = None,
        *,
        shard_sizes: Sequence[int] | None = None,
        vocab_ranges: Sequence[tuple[int, int]] | None = None,
        logits_width: int | None = None,
        row_buckets: Sequence[int] | None = None,
        logits_dtype: torch.dtype = torch.float32,
        backend: str = "auto",
        transport: str = "auto",
        timeout: float = 60.0,
        **options: str,
    ) -> None:
        group = member_group(group)
        rank, size = group.rank(), group.size()
        ranges: VocabRanges = ()
        buckets: tuple[int, ...] = ()
        width = 0

        def describe() -> Description:
            nonlocal ranges, buckets, width, backend, transport
            backend = backends.resolve(backends.with_options(backend, options), table.device)
            ranges = check_vocab_ranges(table.vocab_size, size, shard_sizes, vocab_ranges)
            buckets = check_buckets(row_buckets, table.max_requests)
            own_size = ranges[rank][1] - ranges[rank][0]
            padded = shard_sizes is None and vocab_ranges is None and logits_width is None
            width = check_width(
                ranges[0][1] if padded else logits_width, own_size, "the size of the rank's shard"
            )
            if transport not in TRANSPORTS:
                raise ValueError(
                    f"transport = {transport!r} is not accepted: one of {', '.join(TRANSPORTS)}"
                )
            alike = describe_table(table, group, timeout) | {
                "vocab_ranges": ranges,
                "row_buckets": buckets,
                "logits_dtype": str(check_dtype(logits_dtype)),
                "backend": backend,
                "transport": transport,
            }
            place = tuple(place_of(table, backend, size))
            own = {"width": width, "name": secrets.token_hex(8), "place": place}
            return Description(alike, own)

        with device_guard(table.device):
            told = describe_to_all(group, describe)
        self.group, self.vocab_ranges = group, ranges
        self.transport = choose_transport(transport, [Place(*own["place"]) for own in told])
        widths = [own["width"] for own in told]
        exchanges = self.transport == "exchange"
        if exchanges:
            buckets = tuple(sorted({-(-rows // size) * size for rows in buckets}))
        with device_guard(table.device):
            self._agreement = StepAgreement(
                group, table, timeout, told[0]["name"], aborts=exchanges
            )
            collectives = self._agreement.collectives
            # Captures use the communicator, which must be there before.
            collectives.warm_up(table.device)
            new_step: Callable[[int], ExchangeStep | SymmetricStep]
            new_logits: Callable[[int], Tensor] | None = None
            if exchanges:
                new_step = partial(
                    ExchangeStep, self, table, backend, logits_dtype, ranges, widths, collectives
                )
            else:
                step = SymmetricStep(
                    self, table, logits_dtype, ranges, widths, group, timeout, buckets[-1]
                )
                self._agreement.device_failure = step.failure
                new_step, new_logits = lambda _: step, lambda _: step.logits
            super().__init__(
                table,
                buckets,
                logits_dtype,
                width,
                new_step,
                least_width=ranges[rank][1] - ranges[rank][0],
                new_logits=new_logits,
                pads=True,
            )

    def close(self) -> None:
        """End the sampler: no step comes after it. It stops watching the other ranks, and lets go
        of its graphs, which hold the group's communicator: `destroy_process_group` would wait for
        them. It comes by itself when the sampler goes."""
        self._graphs.clear()  # first: the watchdog may be ending the communicator
        self._agreement.close()

    def _run(self, rows: int, bucket: int) -> None:
        self._agreement.enter(rows, bucket, self._given_now, self._inputs.claim)
        super()._run(rows, bucket)
        self._agreement.leave()
