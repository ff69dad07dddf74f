"""`GraphedSampler`: the step as CUDA graphs, one a bucket of rows, captured once and replayed."""

from __future__ import annotations

import itertools
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from graphed_sampling import backends, checks
from graphed_sampling.eager import never_compiled
from graphed_sampling.params import as_int
from graphed_sampling.sampler import StepInputs, StepOutput, TableStep
from graphed_sampling.statistics import group_stats_shape
from graphed_sampling.table import RequestTable, check_table, device_guard

_WARM_UP_STEPS: Final = 2
# A capture begins with a synchronisation of the device, which CUDA refuses while another thread's
# capture is under way.
_CAPTURE_LOCK: Final = threading.Lock()


@dataclass(frozen=True)
class BucketCapture:
    """What the capture of one bucket took."""

    rows: int
    seconds: float
    bytes: int


@dataclass(frozen=True)
class CaptureReport:
    """What warm-up and capture took: device bytes of the graphs, their pool and the buffers."""

    buckets: tuple[BucketCapture, ...]
    seconds: float
    bytes: int


class BoundStep(Protocol):
    """The op `sample_step`, or what stands for it, bound to a table: `sampler.TableStep`."""

    backend: str
    takes_words: bool
    output: StepOutput

    def check_words(self, words: Tensor | None) -> None: ...

    def __call__(
        self,
        logits: Tensor,
        slots: Tensor,
        grammar_bitmask: Tensor | None,
        words: Tensor | None,
        given: Tensor | None = None,
        group_stats: Tensor | None = None,
    ) -> None: ...


class BucketedSampler:
    """Steps a table in buckets of rows: by CUDA graphs where there are such, else eagerly.

    row_buckets: checked, ascending. least_width: the fewest columns that logits must have;
    logits_width: those of the input buffer. new_step, new_logits: make the step for so many rows,
    and its input buffer [rows, logits_width]. pads: whether eager steps are padded to buckets too.
    group_stats: whether the logits' statistics have an input buffer too.
    """

    def __init__(
        self,
        table: RequestTable,
        row_buckets: tuple[int, ...],
        logits_dtype: torch.dtype,
        logits_width: int,
        new_step: Callable[[int], BoundStep],
        *,
        least_width: int,
        new_logits: Callable[[int], Tensor] | None = None,
        pads: bool = False,
        group_stats: bool = False,
    ) -> None:
        self.table = table
        self.device = table.device
        self.row_buckets = row_buckets
        self.logits_dtype, self.logits_width = logits_dtype, logits_width
        rows = row_buckets[-1]
        start, bytes_before = time.perf_counter(), _device_bytes(self.device)
        self._step = new_step(rows)
        self.backend = self._step.backend
        self._uses_graphs = self.device.type == "cuda"
        self._pads = pads or self._uses_graphs
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

        with device_guard(self.device), torch.inference_mode(False):
            if new_logits is None:
                self._logits = torch.zeros(
                    rows, logits_width, dtype=logits_dtype, device=self.device
                )
            else:
                self._logits = new_logits(rows)
            self._inputs = StepInputs(table, rows, least_width)
            self._group_stats: Tensor | None = None
            if group_stats:
                shape = group_stats_shape(rows, table.vocab_size)
                self._group_stats = torch.zeros(shape, dtype=torch.float32, device=self.device)
            # Which optional inputs count in this step: bitmask, words, statistics. A captured graph
            # reads them all, and these tell it which to heed.
            self._given_choices = torch.tensor(
                list(itertools.product([0, 1], repeat=3 if group_stats else 2)),
                dtype=torch.int32,
                device=self.device,
            )
            self._given = self._given_choices[0].clone()
            self._given_now = 0
            self._outputs: dict[int, StepOutput] = {}
            captures: tuple[BucketCapture, ...] = ()
            if self._uses_graphs:
                # All slots are -1 here, so that these steps write nothing.
                self._graphs, captures = capture_graphs(
                    self.device, self.row_buckets, self._step_of_bucket
                )
        self.capture_report = CaptureReport(
            captures, time.perf_counter() - start, _device_bytes(self.device) - bytes_before
        )

    def logits_buffer(self, n: int) -> Tensor:
        """[n, logits_width]: the input buffer that the graphs read. An LM head that writes its
        logits there, under no_grad, spares the copy that others cost (a read and a write of all).
        """
        if as_int("n", n, "an integer >= 0") < 0:
            raise ValueError(f"n = {n} is not accepted: it must be an integer >= 0")
        bucket_of(n, self.row_buckets)
        # Detached: what autograd notes of a write to it must not stay with the buffer.
        return self._logits.detach()[:n]

    def group_stats_buffer(self, n: int) -> Tensor:
        """fp32 `group_stats_shape(n, vocab_size)`: the same for the logits' statistics. A kernel
        that writes them there spares their copy. ValueError for a sampler made without."""
        if self._group_stats is None:
            raise ValueError("there are no statistics: make the sampler with group_stats=True")
        if as_int("n", n, "an integer >= 0") < 0:
            raise ValueError(f"n = {n} is not accepted: it must be an integer >= 0")
        bucket_of(n, self.row_buckets)
        return self._group_stats.detach()[:n]

    @never_compiled
    def __call__(
        self,
        logits: Tensor,
        slots: Tensor,
        *,
        grammar_bitmask: Tensor | None = None,
        words: Tensor | None = None,
        group_stats: Tensor | None = None,
    ) -> StepOutput:
        """One step, as `Sampler.__call__`; n is at most the largest bucket.

        The returned views are valid until this sampler's next call.
        """
        self._step.check_words(words)
        self._inputs.check(logits, slots, grammar_bitmask, words)
        if logits.dtype != self.logits_dtype:
            raise ValueError(f"logits have dtype {logits.dtype}: captured was {self.logits_dtype}")
        n = logits.shape[0]
        if logits.shape[1] > self.logits_width:
            raise ValueError(
                f"logits have {logits.shape[1]} columns: captured were {self.logits_width}"
            )
        bucket = bucket_of(n, self.row_buckets)
        if group_stats is not None:
            asked = self._group_stats is not None
            self._inputs.check_group_stats(group_stats, logits, asked=asked)
            group_stats = group_stats.detach()
        if logits.requires_grad:
            logits = logits.detach()  # nothing here is differentiable
        if self._pads:
            check_overlap("logits", logits, self._logits)
            if group_stats is not None and self._group_stats is not None:
                check_overlap("group_stats", group_stats, self._group_stats)
            with device_guard(self.device):
                self._padded_step(logits, slots, grammar_bitmask, words, group_stats, bucket)
        else:
            self.table.upload(self._inputs.claim)
            self._step(logits, slots, grammar_bitmask, words, None, group_stats)
        output = self._outputs.get(n)
        if output is None:
            output = StepOutput(self._step.output.record[:n], self.table.layout)
            self._outputs[n] = output
        return output

    def _padded_step(
        self,
        logits: Tensor,
        slots: Tensor,
        grammar_bitmask: Tensor | None,
        words: Tensor | None,
        group_stats: Tensor | None,
        bucket: int,
    ) -> None:
        n = logits.shape[0]
        if n == 0:
            return
        self.table.upload(self._inputs.claim)
        self._inputs.set_slots(slots, bucket)
        if not is_buffer(logits, self._logits):
            self._logits[:n, : logits.shape[1]].copy_(logits)
        if grammar_bitmask is not None:
            self._inputs.set_grammar_bitmask(grammar_bitmask)
        if words is not None:
            self._inputs.set_words(words)
        given = 2 * (grammar_bitmask is not None) + (words is not None)
        if self._group_stats is not None:
            given = 2 * given + (group_stats is not None)
            if group_stats is not None and not is_buffer(group_stats, self._group_stats):
                self._group_stats[:n].copy_(group_stats)
        if given != self._given_now:
            self._given_now = -1  # uncertain, until the copy is enqueued
            self._given.copy_(self._given_choices[given])
            self._given_now = given
        self._run(n, bucket)

    def _run(self, rows: int, bucket: int) -> None:
        """The step of a bucket whose inputs, of so many rows, are in their places."""
        if self._uses_graphs:
            self._graphs[bucket].replay()
        else:
            self._step_of_bucket(bucket)

    def _step_of_bucket(self, rows: int) -> None:
        inputs = self._inputs
        self._step(
            self._logits[:rows],
            inputs.slots[:rows],
            inputs.grammar_bitmask[:rows],
            inputs.words[:rows] if self._step.takes_words else None,
            self._given,
            None if self._group_stats is None else self._group_stats[:rows],
        )


def is_buffer(tensor: Tensor, buffer: Tensor) -> bool:
    """Whether a tensor is rows of the buffer, from its first one on."""
    same_rows = tensor.shape[0] == 1 or tensor.stride(0) == buffer.stride(0)
    return tensor.data_ptr() == buffer.data_ptr() and same_rows


def check_overlap(name: str, tensor: Tensor, buffer: Tensor) -> None:
    """ValueError for other parts of an input buffer than its first rows."""
    start = buffer.data_ptr()
    end = start + buffer.stride(0) * len(buffer) * buffer.element_size()
    inside = tensor.numel() > 0 and start <= tensor.data_ptr() < end
    if inside and not is_buffer(tensor, buffer):
        raise ValueError(
            f"{name} are a part of the sampler's own buffer: they must be {name}_buffer(n)"
        )


def bucket_of(n: int, row_buckets: tuple[int, ...]) -> int:
    """The smallest bucket that holds n rows; ValueError where none does."""
    if n > row_buckets[-1]:
        raise ValueError(
            f"{n} rows are more than the largest bucket, {row_buckets[-1]}: "
            "make the sampler with larger row_buckets"
        )
    return row_buckets[bisect_left(row_buckets, n)]


def capture_graphs(
    device: torch.device, row_buckets: Sequence[int], step: Callable[[int], None]
) -> tuple[dict[int, torch.cuda.CUDAGraph], tuple[BucketCapture, ...]]:
    """A graph of step(rows) for each bucket, in one private pool, on the current device.

    Warm-up runs the steps too, and they are captured on a stream that follows the current one.
    """
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream())
    graphs, captures = {}, []
    with _CAPTURE_LOCK:
        # The largest first: smaller buckets then fit into the memory that its capture left.
        for rows in reversed(row_buckets):
            start, bytes_before = time.perf_counter(), _device_bytes(device)
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UP_STEPS):
                    step(rows)
            graphs[rows] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(
                graphs[rows], pool=pool, stream=stream, capture_error_mode="thread_local"
            ):
                step(rows)
            seconds = time.perf_counter() - start
            captures.append(BucketCapture(rows, seconds, _device_bytes(device) - bytes_before))
    torch.cuda.current_stream().wait_stream(stream)
    return graphs, tuple(reversed(captures))


def _device_bytes(device: torch.device) -> int:
    """Device memory taken by torch's allocator, graphs' pools included."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


class GraphedSampler(BucketedSampler):
    """Steps a table by replaying CUDA graphs; on devices without graphs it runs eagerly.

    table: the requests.
    row_buckets: numbers of rows to capture; n rows run in the smallest bucket that holds them,
    padded with slot -1. Default: powers of two up to the table's max_requests, and that.
    logits_dtype, logits_width: of the logits, fixed at capture; the width is that of the padded
    vocabulary, by default the table's vocab_size. backend, options: as for `Sampler`.
    group_stats: whether steps may be given the statistics of their logits, for which there is a
    buffer too.

    `capture_report` tells seconds and bytes. Graphs, their pool and the buffers go with the object.
    One thread calls a sampler at a time; samplers of different tables do not disturb each other.
    While one is made, no other code may capture on the same device: CUDA's own restriction.
    """

    def __init__(
        self,
        table: RequestTable,
        row_buckets: Sequence[int] | None = None,
        logits_dtype: torch.dtype = torch.float32,
        logits_width: int | None = None,
        backend: str = "auto",
        *,
        group_stats: bool = False,
        **options: str,
    ) -> None:
        check_table(table)
        backend = backends.with_options(backend, options)
        super().__init__(
            table,
            check_buckets(row_buckets, table.max_requests),
            check_dtype(logits_dtype),
            check_width(logits_width, table.vocab_size, "the table's vocab_size"),
            lambda rows: TableStep(
                self, table, backend, rows, (logits_dtype,), group_stats=group_stats
            ),
            least_width=table.vocab_size,
            group_stats=group_stats,
        )


def check_dtype(logits_dtype: torch.dtype) -> torch.dtype:
    if logits_dtype not in checks.LOGITS_DTYPES:
        raise ValueError(
            f"logits_dtype = {logits_dtype} is not accepted: one of {checks.LOGITS_DTYPES}"
        )
    return logits_dtype


def check_width(logits_width: int | None, least: int, what: str) -> int:
    """The columns of an input buffer: at least so many, which are the default."""
    if logits_width is None:
        return least
    accepted = f"an integer >= {what}, {least}"
    width = as_int("logits_width", logits_width, accepted)
    if width < least:
        raise ValueError(f"logits_width = {logits_width} is not accepted: it must be {accepted}")
    return width


def check_buckets(row_buckets: Sequence[int] | None, max_requests: int) -> tuple[int, ...]:
    if row_buckets is not None and not isinstance(row_buckets, Iterable):
        raise ValueError(f"row_buckets = {row_buckets!r} is not accepted: integers >= 1")
    if row_buckets is None:
        powers = [2**i for i in range(max_requests.bit_length()) if 2**i < max_requests]
        return (*powers, max_requests)
    buckets = sorted({as_int("row_buckets", b, "integers >= 1") for b in row_buckets})
    if not buckets or buckets[0] < 1:
        raise ValueError(f"row_buckets = {row_buckets!r} is not accepted: integers >= 1")
    return tuple(buckets)
