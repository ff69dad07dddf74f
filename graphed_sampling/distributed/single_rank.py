"""`SingleRankSampler`: one rank of a group samples, and tells the others what came of it.

    source   logits  --a step-->  records  --broadcast-->
    others                                 --apply_records-->  the same state, the same outputs

While no admitted request wants logprobs or ranks, 16 bytes for each row of the bucket are sent,
else whole records, `table.layout.output_words` words a row.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from graphed_sampling import backends, checks
from graphed_sampling.distributed.agreement import (
    Description,
    StepAgreement,
    describe_table,
    describe_to_all,
    member_group,
)
from graphed_sampling.distributed.collectives import Collectives
from graphed_sampling.eager import never_compiled
from graphed_sampling.graph import (
    BucketedSampler,
    bucket_of,
    capture_graphs,
    check_buckets,
    check_dtype,
    check_width,
)
from graphed_sampling.layout import Output
from graphed_sampling.params import as_int
from graphed_sampling.sampler import (
    StepInputs,
    StepOutput,
    TableStep,
    new_output,
    register_refusals,
)
from graphed_sampling.table import RequestTable, device_guard

_BRIEF_WORDS = 4  # token; finish reason and flags; generation; number kept
_FLAGS_SHIFT = 8


class SingleRankSampler:
    """`GraphedSampler` on one rank of a group; the others get its outputs, and their tables move on
    as its does. For pipeline stages, or where all ranks have the same logits.

    table: this rank's; the tables of all ranks are made alike, with one seed, and told of the same
    requests in the same order. group: default, for None, the default group; NCCL for GPUs.
    source_rank: the rank of the group that samples. row_buckets, logits_dtype, logits_width,
    backend, options: as for `GraphedSampler`.
    overlap: on GPUs, the broadcast and what follows from it run on a stream of their own, beside
    whatever the caller enqueues after the call, until `wait`; the next call waits by itself.
    Without it the call's stream waits before the call returns.
    timeout: seconds that a step may take, with the work before it on its stream: 0.01 to 1e6.

    ValueError, on all ranks, where they are not alike. A step raises `RankError` where a rank is
    late or gone or steps something else; so do all later calls, and the tables are then of no use.
    """

    def __init__(
        self,
        table: RequestTable,
        group: dist.ProcessGroup | None = None,
        source_rank: int = 0,
        *,
        row_buckets: Sequence[int] | None = None,
        logits_dtype: torch.dtype = torch.float32,
        logits_width: int | None = None,
        backend: str = "auto",
        overlap: bool = False,
        timeout: float = 60.0,
        **options: str,
    ) -> None:
        group = member_group(group)
        buckets: tuple[int, ...] = ()
        width = 0

        def describe() -> Description:
            nonlocal buckets, width, backend
            accepted = f"an integer in [0, {group.size()})"
            if not 0 <= as_int("source_rank", source_rank, accepted) < group.size():
                raise ValueError(f"source_rank = {source_rank} is not accepted: {accepted}")
            backend = backends.resolve(backends.with_options(backend, options), table.device)
            buckets = check_buckets(row_buckets, table.max_requests)
            width = check_width(logits_width, table.vocab_size, "the table's vocab_size")
            check_dtype(logits_dtype)
            alike = describe_table(table, group, timeout) | {
                "source_rank": source_rank,
                "row_buckets": buckets,
                # Each of the others refuses what the source's backend lacks.
                "backend": backend,
            }
            return Description(alike, {"name": secrets.token_hex(8)})

        with device_guard(table.device):
            told = describe_to_all(group, describe)
        self.table, self.group, self.source_rank = table, group, source_rank
        self.row_buckets, self.backend = buckets, backend
        with device_guard(table.device):
            self._agreement = StepAgreement(group, table, timeout, told[0]["name"])
            self._agreement.collectives.warm_up(table.device)
            self._channel = _Channel(
                self._agreement.collectives, source_rank, table.device, overlap=overlap
            )
            parts = (self._agreement, self._channel)
            self._source: _Source | None = None
            if group.rank() == source_rank:
                self._source = _Source(table, buckets, logits_dtype, width, backend, *parts)
            else:
                self._listener = _Listener(self, table, buckets, backend, *parts)

    def logits_buffer(self, n: int) -> Tensor:
        """[n, logits_width] on the source: see `GraphedSampler`. ValueError on other ranks."""
        if self._source is None:
            raise ValueError(f"logits are the source's, rank {self.source_rank}")
        return self._source.logits_buffer(n)

    @never_compiled
    def __call__(
        self,
        logits: Tensor | None,
        slots: Tensor,
        *,
        grammar_bitmask: Tensor | None = None,
        words: Tensor | None = None,
    ) -> StepOutput:
        """One step, as `GraphedSampler.__call__`, on all ranks. logits: None but on the source,
        which alone heeds grammar_bitmask and words.

        The returned views are valid until this sampler's next call; with overlap, on ranks other
        than the source, only behind `wait`.
        """
        with device_guard(self.table.device):
            self._channel.wait()
            if self._source is None:
                if logits is not None:
                    raise ValueError(f"logits are the source's, rank {self.source_rank}: not None")
                return self._listener(slots)
            if logits is None:
                raise ValueError("logits are None: this rank is the source")
            return self._source(logits, slots, grammar_bitmask=grammar_bitmask, words=words)

    def wait(self) -> None:
        """Make the current stream wait until the last step's tokens are there: this rank's outputs,
        and what the table says of last tokens and positions. On the CPU they are."""
        with device_guard(self.table.device):
            self._channel.wait()

    def close(self) -> None:
        """End the sampler: no step comes after it, and it stops watching the other ranks. It comes
        by itself when the sampler goes."""
        self._agreement.close()


class _Channel:
    """Broadcasts from the source, on GPUs on a stream of their own."""

    def __init__(
        self, collectives: Collectives, source_rank: int, device: torch.device, *, overlap: bool
    ) -> None:
        self._collectives, self._source_rank = collectives, source_rank
        self._overlap = overlap
        self._stream: torch.cuda.Stream | None = None
        self._behind = False
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._end = torch.cuda.Event()

    def carry(self, packet: Tensor, then: Callable[[], None]) -> None:
        """Broadcast the packet, and behind it enqueue what `then` does."""
        if self._stream is None:
            self._collectives.broadcast(packet, self._source_rank)
            then()
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._collectives.broadcast(packet, self._source_rank)
            then()
            self._end.record()
        self._behind = True
        if not self._overlap:
            self.wait()

    def wait(self) -> None:
        """Let the current stream wait for what was carried last."""
        if self._behind:
            torch.cuda.current_stream().wait_event(self._end)
            self._behind = False


class _Packets:
    """What is broadcast of a step: whole records, or what matters while nobody wants a report."""

    def __init__(self, table: RequestTable, rows: int) -> None:
        self.records = new_output(table, rows).record
        with torch.inference_mode(False):
            self._brief = self.records.new_zeros(rows, _BRIEF_WORDS)

    def packet(self, rows: int, *, brief: bool) -> Tensor:
        """int32 [rows, words]"""
        return (self._brief if brief else self.records)[:rows]

    def abridge(self, rows: int) -> None:
        """Write the brief packet from the records."""
        records = self.records[:rows]
        codes = records[:, Output.FINISH_REASON] | records[:, Output.FLAGS] << _FLAGS_SHIFT
        columns = [
            records[:, Output.TOKEN_ID],  # its low word, which tells -1 too
            codes,
            records[:, Output.GENERATION],
            records[:, Output.NUM_KEPT],
        ]
        self._brief[:rows].copy_(torch.stack(columns, 1))

    def expand(self, rows: int, records: Tensor) -> None:
        """Write the headers of records from the brief packet."""
        token, codes, generation, num_kept = self._brief[:rows].unbind(1)
        record = records[:rows]
        record.view(torch.int64)[:, Output.TOKEN_ID // 2].copy_(token)
        record[:, Output.NUM_KEPT].copy_(num_kept)
        record[:, Output.FINISH_REASON].copy_(codes & (1 << _FLAGS_SHIFT) - 1)
        record[:, Output.FLAGS].copy_(codes >> _FLAGS_SHIFT)
        record[:, Output.GENERATION].copy_(generation)


class _SourceStep(TableStep):
    """`TableStep` that leaves its records in packets."""

    def __init__(
        self,
        owner: object,
        table: RequestTable,
        backend: str,
        rows: int,
        logits_dtype: torch.dtype,
    ) -> None:
        super().__init__(owner, table, backend, rows, (logits_dtype,))
        self.packets = _Packets(table, rows)
        self.output = StepOutput(self.packets.records, table.layout)

    def __call__(
        self,
        logits: Tensor,
        slots: Tensor,
        grammar_bitmask: Tensor | None,
        words: Tensor | None,
        given: Tensor | None = None,
        group_stats: Tensor | None = None,
    ) -> None:
        super().__call__(logits, slots, grammar_bitmask, words, given, group_stats)
        self.packets.abridge(slots.shape[0])


class _Source(BucketedSampler):
    """Steps the table, and broadcasts what came of it."""

    _step: _SourceStep

    def __init__(
        self,
        table: RequestTable,
        row_buckets: tuple[int, ...],
        logits_dtype: torch.dtype,
        logits_width: int,
        backend: str,
        agreement: StepAgreement,
        channel: _Channel,
    ) -> None:
        self._agreement, self._channel = agreement, channel
        super().__init__(
            table,
            row_buckets,
            logits_dtype,
            logits_width,
            lambda rows: _SourceStep(self, table, backend, rows, logits_dtype),
            least_width=table.vocab_size,
            pads=True,
        )

    def _run(self, rows: int, bucket: int) -> None:
        brief = self.table.num_reporting == 0
        self._agreement.enter(rows, bucket, int(brief), self._inputs.claim)
        super()._run(rows, bucket)
        packet = self._step.packets.packet(bucket, brief=brief)
        self._channel.carry(packet, self._agreement.leave)


class _Listener:
    """Hears from the source what came of its step, and moves the table on."""

    def __init__(
        self,
        owner: object,
        table: RequestTable,
        row_buckets: tuple[int, ...],
        backend: str,
        agreement: StepAgreement,
        channel: _Channel,
    ) -> None:
        register_refusals(owner, table, backend)  # the source's, which this rank must not admit
        self.table, self.row_buckets = table, row_buckets
        self._agreement, self._channel = agreement, channel
        rows = row_buckets[-1]
        self._layout = table.layout.to_ints()
        self._inputs = StepInputs(table, rows)
        self._packets = _Packets(table, rows)
        self._records = {False: self._packets.records, True: _unreported(table, rows)}
        self._graphs: dict[bool, dict[int, torch.cuda.CUDAGraph]] = {}
        if table.device.type == "cuda":
            for brief in (False, True):
                # All slots are -1 here, so that these write nothing.
                step = partial(self._apply, brief)
                self._graphs[brief], _ = capture_graphs(table.device, row_buckets, step)

    def __call__(self, slots: Tensor) -> StepOutput:
        inputs = self._inputs
        checks.check_vector("slots", slots, slots.numel(), torch.int32)
        rows = slots.shape[0]
        bucket = bucket_of(rows, self.row_buckets)
        inputs.check_rows(rows, slots, None, None)
        brief = self.table.num_reporting == 0
        if rows:
            self.table.upload(inputs.claim)
            inputs.set_slots(slots, bucket)
            self._agreement.enter(rows, bucket, int(brief), inputs.claim)
            packet = self._packets.packet(bucket, brief=brief)
            self._channel.carry(packet, partial(self._hear, brief, bucket))
        return StepOutput(self._records[brief][:rows], self.table.layout)

    def _hear(self, brief: bool, bucket: int) -> None:
        if self._graphs:
            self._graphs[brief][bucket].replay()
        else:
            self._apply(brief, bucket)
        self._agreement.leave()

    def _apply(self, brief: bool, bucket: int) -> None:
        if brief:
            self._packets.expand(bucket, self._records[True])
        torch.ops.graphed_sampling.apply_records(
            self._records[brief],
            self._inputs.slots[:bucket],
            self.table.state,
            self.table.tables,
            self._layout,
        )


def _unreported(table: RequestTable, rows: int) -> Tensor:
    """int32 [rows, output_words]: records in which nothing is reported."""
    output = new_output(table, rows)
    output.logprobs.fill_(math.nan)
    output.top_token_ids.fill_(-1)
    output.top_logprobs.fill_(math.nan)
    output.given_logprobs.fill_(math.nan)
    return output.record
