"""`Sampler`: one eager step of a `RequestTable`; and what every sampler returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Final

import numpy as np
import torch
from torch import Tensor

from graphed_sampling import backends, checks
from graphed_sampling.eager import never_compiled
from graphed_sampling.layout import Output, TableLayout
from graphed_sampling.params import UnsupportedFeatureError
from graphed_sampling.staging import PinnedRing
from graphed_sampling.statistics import group_stats_shape
from graphed_sampling.table import RequestTable, SlotClaim, check_table, device_guard

_RING_DEPTH: Final = 4


class StepOutput:
    """The outputs of one step: device views of one packed record per logits row.

    record: int32 [n, output_words]. One copy of it takes everything to the host, where
    `StepOutput(record.cpu(), table.layout)` names its parts again.
    """

    def __init__(self, record: Tensor, layout: TableLayout) -> None:
        self.record = record
        self._layout = layout

    @cached_property
    def token_ids(self) -> Tensor:
        """int64 [n]: the drawn tokens, -1 where nothing was drawn."""
        return self.record.view(torch.int64)[:, Output.TOKEN_ID // 2]

    @cached_property
    def logprobs(self) -> Tensor:
        """fp32 [n]: the drawn tokens' logprobs in each request's mode, NaN where not asked."""
        return self.record.view(torch.float32)[:, Output.LOGPROB]

    @cached_property
    def ranks(self) -> Tensor:
        """int32 [n]: 1 + the number of tokens with a larger logit, 0 where not asked."""
        return self.record[:, Output.RANK]

    @cached_property
    def num_kept(self) -> Tensor:
        """int32 [n]: survivors where a filter is on, 1 for greedy and EMPTY rows, 0 otherwise."""
        return self.record[:, Output.NUM_KEPT]

    @cached_property
    def top_token_ids(self) -> Tensor:
        """int64 [n, max_logprobs]: the best tokens, -1 where not asked or not there."""
        start = self._layout.top_ids // 2
        return self.record.view(torch.int64)[:, start : start + self._layout.max_logprobs]

    @cached_property
    def top_logprobs(self) -> Tensor:
        """fp32 [n, max_logprobs]: their logprobs, NaN where not asked, -inf where not there."""
        start = self._layout.top_logprobs
        return self.record.view(torch.float32)[:, start : start + self._layout.max_logprobs]

    @cached_property
    def given_logprobs(self) -> Tensor:
        """fp32 [n, max_logprob_ids]: logprobs of `logprob_token_ids`, NaN where not asked."""
        start = self._layout.given_logprobs
        return self.record.view(torch.float32)[:, start : start + self._layout.max_logprob_ids]

    @cached_property
    def finish_reason(self) -> Tensor:
        """int32 [n]: `FinishReason` of the request after this step."""
        return self.record[:, Output.FINISH_REASON]

    @cached_property
    def flags(self) -> Tensor:
        """int32 [n]: `RowFlags`."""
        return self.record[:, Output.FLAGS]

    @cached_property
    def generation(self) -> Tensor:
        """int32 [n]: the generation of the slot that the row belonged to, 0 for padding."""
        return self.record[:, Output.GENERATION]


def new_output(table: RequestTable, rows: int) -> StepOutput:
    """Outputs for steps of up to `rows` rows, at an address of their own."""
    rows = checks.check_count("rows", rows, 0)
    with torch.inference_mode(False):
        record = torch.zeros(
            rows, table.layout.output_words, dtype=torch.int32, device=table.device
        )
    return StepOutput(record, table.layout)


def new_scratch(table: RequestTable, backend: str, rows: int) -> Tensor:
    """int32 scratch for steps of up to `rows` rows of `backend`: zeros, which a step leaves as the
    next one needs them."""
    backend = backends.resolve(backend, table.device)
    rows = checks.check_count("rows", rows, 0)
    words = backends.module(backend).scratch_words(table.layout, rows)
    with torch.inference_mode(False):
        return torch.zeros(words, dtype=torch.int32, device=table.device)


def outlive_stream(*tensors: Tensor) -> None:
    """Keep the memory of tensors that are let go until the current stream is through with them."""
    for tensor in tensors:
        if tensor.device.type == "cuda":
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


class StepInputs:
    """The small inputs of a step, checked and brought to the device: slots, bitmask, words.

    CPU tensors are checked by value and uploaded through pinned rings; device tensors are taken as
    they are. Slots that are the same as in the step before are neither checked nor uploaded again.

    least_width: the fewest columns of logits, by default the table's vocab_size.
    """

    def __init__(self, table: RequestTable, rows: int, least_width: int | None = None) -> None:
        self.table = table
        self._least_width = table.vocab_size if least_width is None else least_width
        self._checked_slots = b""
        self.claim: SlotClaim | None = None
        """Of the slots checked last, where they were on the CPU."""
        self._buffers: tuple[Tensor, ...] = ()
        self.reserve(rows)

    def reserve(self, rows: int) -> None:
        """Make room for steps of up to `rows` rows, at new addresses."""
        device, words = self.table.device, self.table.layout.bitmap_words
        with torch.inference_mode(False):
            slots = torch.full((rows,), -1, dtype=torch.int32, device=device)
            row_words = torch.zeros(rows, dtype=torch.int64, device=device)
            bitmask = torch.full((rows, words), -1, dtype=torch.int32, device=device)
        outlive_stream(*self._buffers)
        self._buffers = self.slots, self.words, self.grammar_bitmask = slots, row_words, bitmask
        self.rows = rows
        # What is on the device, and None while that is uncertain.
        self._uploaded_slots: tuple[bytes, int] | None = None
        self._slot_views: dict[int, Tensor] = {}
        self._rings: dict[str, PinnedRing] = {}
        self._ring("slots", rows)  # the others are made when they are first used

    def check(
        self, logits: Tensor, slots: Tensor, grammar_bitmask: Tensor | None, words: Tensor | None
    ) -> None:
        """ValueError for whatever a step would not accept, before anything is enqueued."""
        table = self.table
        checks.check_logits(logits, self._least_width)
        if logits.device != table.device:
            raise ValueError(f"logits are on {logits.device}: the table is on {table.device}")
        self.check_rows(logits.shape[0], slots, grammar_bitmask, words)

    def check_rows(
        self, rows: int, slots: Tensor, grammar_bitmask: Tensor | None, words: Tensor | None
    ) -> None:
        """`check` but for the logits."""
        table = self.table
        checks.check_vector("slots", slots, rows, torch.int32)
        self._check_place("slots", slots)
        if grammar_bitmask is not None:
            checks.check_bitmask(grammar_bitmask, rows, table.layout.bitmap_words)
            self._check_place("grammar_bitmask", grammar_bitmask)
        if words is not None:
            checks.check_vector("words", words, rows, torch.int64)
            self._check_place("words", words)
        if slots.device.type == "cpu":
            array = slots.numpy()
            content, claim = array.tobytes(), self.claim
            if claim is None or claim.tenancy != table.tenancy or content != self._checked_slots:
                self.claim = None
                self.claim = table.claim_slots(array)
                self._checked_slots = content
        else:
            self.claim = None

    def check_group_stats(self, stats: Tensor, logits: Tensor, *, asked: bool) -> None:
        """ValueError for statistics that a step would not accept, or is not made for."""
        if not asked:
            raise ValueError("group_stats are given to a sampler made without group_stats=True")
        shape = group_stats_shape(logits.shape[0], self.table.vocab_size)
        checks.check_group_stats(stats, shape)
        checks.check_device("group_stats", stats, self.table.device)

    def set_slots(self, slots: Tensor, rows: int) -> None:
        """Bring slots to the first rows of `self.slots`; the rest, up to `rows`, is padding."""
        count = slots.shape[0]
        if slots.device == self.slots.device:
            self._uploaded_slots = None
            if count not in self._slot_views:  # a slice costs as much as the copy's launch
                self._slot_views[count] = self.slots[:count]
            self._slot_views[count].copy_(slots)
            if rows > count:
                self.slots[count:rows].fill_(-1)
            return
        content = slots.numpy().tobytes()
        if self._uploaded_slots != (content, rows):
            self._uploaded_slots = None
            padded = np.full(rows, -1, np.int32)
            padded[:count] = slots.numpy()
            self._ring("slots", self.rows).upload(padded, self.slots[:rows])
            self._uploaded_slots = (content, rows)

    def set_words(self, words: Tensor) -> None:
        target = self.words[: words.shape[0]]
        if words.device == self.words.device:
            target.copy_(words)
        else:
            source = np.ascontiguousarray(words.numpy()).view(np.int32)
            self._ring("words", 2 * self.rows).upload(source, target.view(torch.int32))

    def set_grammar_bitmask(self, bitmask: Tensor) -> None:
        target = self.grammar_bitmask[: bitmask.shape[0]]
        bitmask = bitmask[:, : target.shape[1]]
        if bitmask.device == self.grammar_bitmask.device:
            target.copy_(bitmask)
        else:
            ring = self._ring("grammar_bitmask", self.grammar_bitmask.numel())
            ring.upload(np.ascontiguousarray(bitmask.numpy()).reshape(-1), target.view(-1))

    def _check_place(self, name: str, tensor: Tensor) -> None:
        device = tensor.device
        if device.type != "cpu" and device != self.table.device:
            raise ValueError(f"{name} is on {device}: it must be on {self.table.device} or the CPU")

    def _ring(self, name: str, words: int) -> PinnedRing:
        ring = self._rings.get(name)
        if ring is None:
            ring = PinnedRing(self.table.device, words, _RING_DEPTH, self.table.staging_stats)
            self._rings[name] = ring
        return ring


def register_refusals(owner: object, table: RequestTable, backend: str) -> None:
    """While `owner` lives, the table refuses what the backend lacks."""
    module = backends.module(backend)
    table.register_refusals(owner, backend, module.REFUSES, getattr(module, "REMEDIES", {}))


class TableStep:
    """The op `sample_step` bound to a table and a backend, with the memory that it writes to.

    owner: the sampler, for whose lifetime the table refuses what the backend lacks.
    logits_dtypes: of the logits that will come. group_stats: whether their statistics will come
    too; UnsupportedFeatureError where the backend does not take them.
    """

    def __init__(
        self,
        owner: object,
        table: RequestTable,
        backend: str,
        rows: int,
        logits_dtypes: Sequence[torch.dtype] = checks.LOGITS_DTYPES,
        *,
        group_stats: bool = False,
    ) -> None:
        self.table = table
        self.backend = backends.resolve(backend, table.device)
        module = backends.module(self.backend)
        if group_stats:
            backends.check_takes_group_stats(module)
        register_refusals(owner, table, self.backend)
        self.takes_words = "words" not in module.REFUSES
        self._about_words = getattr(module, "REMEDIES", {}).get("words", "")
        module.warm_up(table.layout, table.device, logits_dtypes)
        self._layout = table.layout.to_ints()
        self.output = new_output(table, rows)
        self._scratch = new_scratch(table, self.backend, rows)

    def check_words(self, words: Tensor | None) -> None:
        """UnsupportedFeatureError where words are given that the backend does not draw with."""
        if words is not None and not self.takes_words:
            refusal = f"the backend {self.backend!r} does not support words"
            raise UnsupportedFeatureError("; ".join(filter(None, [refusal, self._about_words])))

    def reserve(self, rows: int) -> None:
        """Make room for steps of up to `rows` rows, at new addresses."""
        output = new_output(self.table, rows)
        scratch = new_scratch(self.table, self.backend, rows)
        outlive_stream(self.output.record, self._scratch)
        self.output, self._scratch = output, scratch

    def __call__(
        self,
        logits: Tensor,
        slots: Tensor,
        grammar_bitmask: Tensor | None,
        words: Tensor | None,
        given: Tensor | None = None,
        group_stats: Tensor | None = None,
    ) -> None:
        step: Callable[..., None] = torch.ops.graphed_sampling.sample_step
        if group_stats is not None:
            step = partial(step, group_stats=group_stats)  # who gives none does not pay for it
        step(
            logits,
            slots,
            self.table.params,
            self.table.state,
            self.table.tables,
            self.output.record,
            self._scratch,
            self._layout,
            self.backend,
            grammar_bitmask=grammar_bitmask,
            words=words,
            given=given,
        )


class Sampler:
    """Steps a table eagerly, on the current stream, without waiting for the device.

    table: the requests. backend: a name of `graphed_sampling.backends.NAMES`, or "auto".
    group_stats: whether steps may be given the statistics of their logits.
    options: the backend's, where it has any, such as route="slab" of `flashinfer`.
    ValueError where the backend cannot run on the table's device, or takes no such options;
    UnsupportedFeatureError where an admitted request needs a feature that it lacks, or it does not
    take the statistics.
    """

    def __init__(
        self,
        table: RequestTable,
        backend: str = "auto",
        *,
        group_stats: bool = False,
        **options: str,
    ) -> None:
        check_table(table)
        self.table = table
        backend = backends.with_options(backend, options)
        self._step = TableStep(self, table, backend, table.max_requests, group_stats=group_stats)
        self._takes_group_stats = group_stats
        self.backend = self._step.backend
        self._inputs = StepInputs(table, table.max_requests)

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
        """Draw one token for each row of logits and advance the state of its slot.

        logits: [n, >= vocab_size] fp32, bf16 or fp16 on the table's device, last dimension
        contiguous; not modified. slots: int32 [n], -1 for padding rows; a CPU tensor is checked by
        value, a device tensor is not. grammar_bitmask: int32 [n, >= ceil(vocab_size / 32)], bit set
        where a token is allowed. words: int64 [n], random words to draw with instead of the
        requests' own. group_stats: fp32 `group_stats_shape(n, vocab_size)` on the table's device,
        the logits' statistics, of a sampler that was made for them. Others than these logits' make
        tokens and logprobs wrong. Returns device views, valid until this sampler's next call.
        ValueError for anything not accepted, before anything is enqueued.
        """
        inputs = self._inputs
        self._step.check_words(words)
        inputs.check(logits, slots, grammar_bitmask, words)
        if group_stats is not None:
            inputs.check_group_stats(group_stats, logits, asked=self._takes_group_stats)
            group_stats = group_stats.detach()
        rows = logits.shape[0]
        if rows > inputs.rows:
            # The inputs last: only their rows tell that there is room.
            self._step.reserve(rows)
            inputs.reserve(rows)
        if logits.requires_grad:
            logits = logits.detach()  # nothing here is differentiable
        with device_guard(self.table.device):
            self.table.upload(inputs.claim)
            if slots.device != logits.device:
                inputs.set_slots(slots, rows)
                slots = inputs.slots[:rows]
            if words is not None and words.device != logits.device:
                inputs.set_words(words)
                words = inputs.words[:rows]
            if grammar_bitmask is not None and grammar_bitmask.device != logits.device:
                inputs.set_grammar_bitmask(grammar_bitmask)
                grammar_bitmask = inputs.grammar_bitmask[:rows]
            self._step(logits, slots, grammar_bitmask, words, None, group_stats)
        return StepOutput(self._step.output.record[:rows], self.table.layout)
