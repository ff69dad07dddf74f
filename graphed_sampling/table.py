"""`RequestTable`: the requests of an engine as rows of device tensors at fixed addresses."""

from __future__ import annotations

import heapq
import os
import secrets
import threading
import weakref
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from graphed_sampling import philox
from graphed_sampling.eager import never_compiled
from graphed_sampling.layout import (
    HEADER_WORDS,
    MAX_BAD_WORD_IDS,
    MAX_VOCAB_SIZE,
    State,
    TableLayout,
)
from graphed_sampling.packing import (
    NEUTRAL_HEADER,
    PENALTIES,
    active_features,
    pack_params,
    pack_state,
    pack_vacancy,
)
from graphed_sampling.params import SamplingParams, UnsupportedFeatureError, as_int
from graphed_sampling.staging import Segments, StagingStats, Uploader

TokenIds = Sequence[int] | npt.NDArray[np.integer] | torch.Tensor

_MASK64 = 0xFFFFFFFFFFFFFFFF
_NO_GUARD: AbstractContextManager[object] = nullcontext()


class TableFullError(RuntimeError):
    """Every slot of the table is taken."""


class SlotClaim(NamedTuple):
    """The slots of a step, checked, and what they held when they were."""

    slots: npt.NDArray[np.int32]
    generations: npt.NDArray[np.int32]
    tenancy: int


class _Refusals(NamedTuple):
    """What a backend that steps a table refuses, and what would serve instead."""

    backend: str
    refused: frozenset[str]
    remedies: Mapping[str, str]


@dataclass(frozen=True)
class AdmittedRequest:
    """What the host knows of the request in a slot. `generation` tells the slot's tenants apart."""

    params: SamplingParams
    seed: int
    generation: int
    num_output_tokens: int  # at admission


class RequestTable:
    """One row (slot) per request: parameters, sampling state, token counts.

    The parameter records are the host's truth and are uploaded when they change. The state records
    are the device's truth: the host writes them at admission, and every step advances them.
    `admit`, `update`, `release` and `upload` may be called from any thread; they take one lock.
    One sampler steps a table at a time, on one stream. After a fork the table refuses to be used.

    Device tensors, int32, described in `graphed_sampling.layout`: `params`, `state`, `tables`.
    """

    def __init__(
        self,
        max_requests: int,
        vocab_size: int,
        *,
        device: torch.device | str,
        eos_token_ids: Iterable[int] = (),
        max_logprobs: int = 20,
        max_logit_bias: int = 300,
        max_stop_ids: int = 16,
        max_bad_words: int = 16,
        max_bad_word_length: int = 8,
        max_logprob_ids: int = 16,
        penalties: bool = True,
        seed: int | None = None,
    ) -> None:
        """
        max_requests, vocab_size: slots, and tokens that may be sampled (at most 2**22).
        eos_token_ids: they end every request that does not set ignore_eos.
        max_logprobs: the most `logprobs` a request may ask for. max_logit_bias, max_stop_ids,
        max_bad_words, max_bad_word_length, max_logprob_ids: entries a request may bring of each
        (ids a bad word, for the length; at most 2**20 ids of all bad words). penalties: whether
        prompt and output tokens are counted, which costs 4 * vocab_size + vocab_size / 4 bytes a
        slot (`bytes_per_slot`).
        seed: of the stream from which requests without a seed get theirs; None takes OS entropy.
        ValueError names the argument that is not accepted.
        """
        sizes = {
            "max_requests": (max_requests, 1, 2**24),
            "vocab_size": (vocab_size, 1, MAX_VOCAB_SIZE),
            "max_logprobs": (max_logprobs, 0, 2**16),
            "max_logit_bias": (max_logit_bias, 0, 2**16),
            "max_stop_ids": (max_stop_ids, 0, 2**16),
            "max_bad_words": (max_bad_words, 0, 2**16),
            "max_bad_word_length": (max_bad_word_length, 1, 2**10),
            "max_logprob_ids": (max_logprob_ids, 0, 2**16),
        }
        if not isinstance(penalties, bool):
            raise ValueError(f"penalties = {penalties!r} is not accepted: it must be a bool")
        try:
            self.device = torch.empty(0, device=device).device  # with the index of its tensors
        except (RuntimeError, AssertionError, TypeError) as error:
            raise ValueError(f"device = {device!r} is not accepted: {error}") from error
        if device is None or self.device.type == "meta":
            raise ValueError(f"device = {device!r} is not accepted: it must be one that computes")
        checked = {}
        for name, (value, low, high) in sizes.items():
            accepted = f"an integer in [{low}, {high}]"
            checked[name] = as_int(name, value, accepted)
            if not low <= checked[name] <= high:
                raise ValueError(f"{name} = {value!r} is not accepted: it must be {accepted}")
        words = checked["max_bad_words"] * checked["max_bad_word_length"]
        if words > MAX_BAD_WORD_IDS:
            raise ValueError(
                f"max_bad_words * max_bad_word_length = {words} is not accepted: it must be at "
                f"most {MAX_BAD_WORD_IDS}"
            )
        if not isinstance(eos_token_ids, Iterable):
            raise ValueError(f"eos_token_ids = {eos_token_ids!r} must be a sequence of ids")
        eos_ids = _as_ids("eos_token_ids", [*eos_token_ids], checked["vocab_size"])
        self.eos_token_ids = tuple(dict.fromkeys(eos_ids.tolist()))
        checked["max_stop_ids"] += len(self.eos_token_ids)
        self.layout = TableLayout(**checked, penalties=int(penalties))
        max_requests = self.layout.max_requests
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self.seed = None if seed is None else _as_seed(seed)
        """Of the stream from which requests without a seed get theirs, where one was given."""
        self._seed = secrets.randbits(64) if self.seed is None else self.seed
        self._num_seeds = 0

        self._requests: list[AdmittedRequest | None] = [None] * max_requests
        self._admitted = np.zeros(max_requests, np.bool_)
        self.tenancy = 0
        """How often a slot was taken or given back: unchanged, the same slots are admitted."""
        self.num_reporting = 0
        """How many admitted requests want logprobs or ranks."""
        self._generations = np.zeros(max_requests, np.int32)
        # Of all that was told of each slot's request; the last one is padding rows'.
        self._digests = np.zeros(max_requests + 1, np.uint32)
        # A heap of slots, each at most once; those that were taken by name are skipped.
        self._free = list(range(max_requests))
        self._in_free = [True] * max_requests
        self._refusals: dict[int, _Refusals] = {}
        # What the next upload sends, a slot's newest alone.
        self._dirty_params: dict[int, Segments] = {}
        self._dirty_state: dict[int, Segments] = {}

        rows = self.layout.rows
        with torch.inference_mode(False), torch.device(self.device):
            self.params = torch.zeros(rows, self.layout.params_words, dtype=torch.int32)
            self.params[:, :HEADER_WORDS] = torch.from_numpy(NEUTRAL_HEADER.copy())
            self.state = torch.zeros(rows, self.layout.state_words, dtype=torch.int32)
            self.tables = torch.zeros(self.layout.tables_words, dtype=torch.int32)
            long = self.state.view(torch.int64)
            self.positions = long[:max_requests, State.POSITION // 2]
            """int64 [max_requests]: index, in each request's sequence, of its next token."""
            self.last_token_ids = long[:max_requests, State.LAST_TOKEN // 2]
            """int64 [max_requests]: each request's last token, -1 where there is none."""
            with device_guard(self.device):
                self._uploader = Uploader(self.device)

    @property
    def max_requests(self) -> int:
        return self.layout.max_requests

    @property
    def vocab_size(self) -> int:
        return self.layout.vocab_size

    @property
    def num_free_slots(self) -> int:
        return int(self.max_requests - np.count_nonzero(self._admitted))

    @property
    def staging_stats(self) -> StagingStats:
        """Copies, bytes and waits of all uploads so far, those of slots and masks included."""
        return self._uploader.stats

    @property
    def bytes_per_slot(self) -> dict[str, int]:
        """Device bytes that one slot costs, by part."""
        bitmap = 4 * self.layout.bitmap_words
        parts = {
            "params": 4 * self.layout.params_words,
            "state": 4 * self.layout.state_words,
            "allowed_bits": bitmap,
        }
        if self.layout.penalties:
            parts |= {"prompt_bits": bitmap, "output_bits": bitmap, "counts": 4 * self.vocab_size}
        return parts

    def request(self, slot: int) -> AdmittedRequest:
        """The request in `slot`; ValueError where there is none."""
        with self._lock:
            return self._request(slot)[1]

    def admit(
        self,
        params: SamplingParams,
        prompt_token_ids: TokenIds = (),
        *,
        output_token_ids: TokenIds = (),
        num_prompt_tokens: int | None = None,
        slot: int | None = None,
    ) -> int:
        """Give a request a slot; returns it. The device learns of it at the next upload.

        prompt_token_ids, output_token_ids: ids, in order; output tokens are those of an earlier
        admission, whose stream the request resumes. num_prompt_tokens: the prompt's length, where
        its ids are not given (repetition_penalty then sees the output alone).
        slot: a free slot of the caller's choice; without it the lowest free one.
        TableFullError when there is none; ValueError for a value that is not accepted;
        UnsupportedFeatureError for a feature that a sampler of this table lacks.
        On an error nothing has changed.
        """
        self._check_process()
        prompt, output, prompt_length = self._check_request(
            params, prompt_token_ids, output_token_ids, num_prompt_tokens
        )
        with self._lock:
            self._check_supported(params)
            slot = self._free_slot(slot)
            generation = int(self._generations[slot]) % (2**31 - 1) + 1
            seed = self._next_seed() if params.seed is None else params.seed & _MASK64
            request = AdmittedRequest(params, seed, generation, len(output))
            state = pack_state(self.layout, slot, generation, prompt, output, prompt_length)
            record = self._pack_params(slot, request)
            # From here on nothing can fail.
            self._num_seeds += params.seed is None
            self._dirty_params[slot], self._dirty_state[slot] = record, state
            self._generations[slot] = generation
            self._requests[slot] = request
            self.num_reporting += params.reports
            self._digests[slot] = zlib.crc32(state.payload.data, zlib.crc32(record.payload.data))
            self._admitted[slot] = True
            self.tenancy += 1
        return slot

    def check(self, params: SamplingParams, prompt_token_ids: TokenIds = ()) -> None:
        """Raise what `admit` would for this request, but for the want of a slot."""
        self._check_request(params, prompt_token_ids, (), None)
        with self._lock:
            self._check_supported(params)

    def update(self, slot: int, params: SamplingParams) -> None:
        """Change the parameters of the request in `slot`, and nothing of its state.

        A seed of None keeps the request's seed. A max_tokens that the answer has reached already is
        accepted, since only the device knows how long that is: the next step draws one more token,
        and ends the request by LENGTH. Other errors as `admit`; on an error nothing has changed.
        """
        self._check_process()
        _check_params(params)
        self._check_fits(params)
        with self._lock:
            slot, old = self._request(slot)
            self._check_supported(params)
            seed = old.seed if params.seed is None else params.seed & _MASK64
            request = AdmittedRequest(params, seed, old.generation, old.num_output_tokens)
            record = self._pack_params(slot, request)
            self._dirty_params[slot] = record
            self._digests[slot] = zlib.crc32(record.payload.data, int(self._digests[slot]))
            self.num_reporting += params.reports - old.params.reports
            self._requests[slot] = request

    def release(self, slot: int) -> None:
        """Give the slot back; ValueError where it holds no request.

        A step in flight may still name it: its output row carries the old generation.
        """
        self._check_process()
        with self._lock:
            slot, request = self._request(slot)
            self._dirty_params[slot] = pack_vacancy(self.layout, slot)
            self.num_reporting -= request.params.reports
            self._requests[slot] = None
            self._admitted[slot] = False
            self.tenancy += 1
            if not self._in_free[slot]:
                self._in_free[slot] = True
                heapq.heappush(self._free, slot)

    @never_compiled
    def upload(self, claim: SlotClaim | None = None) -> None:
        """Enqueue what changed since the last upload on the current stream, without waiting.

        The samplers call it before every step. Where `sample_step` sits in a graph of your own,
        call it before each replay, on the stream of the replay, never inside the capture. Changes
        of k rows are one pinned copy and one scatter; no change is no work. The host waits only
        when it is several uploads ahead of the device, and `staging_stats` counts that.

        claim: of the step to come. ValueError, with nothing sent, where one of its slots has
        changed hands since it was checked, by another thread's doing.
        """
        self._check_process()
        unchanged = claim is None or claim.tenancy == self.tenancy
        if unchanged and not self._dirty_params and not self._dirty_state:
            return
        with self._lock, device_guard(self.device):
            if claim is not None and claim.tenancy != self.tenancy:
                self._check_slots(claim.slots)
                changed = self._generations[claim.slots] != claim.generations
                if changed[claim.slots >= 0].any():
                    raise ValueError(
                        f"slot {claim.slots[changed & (claim.slots >= 0)][0]} was given to another "
                        "request while the step that names it was being made"
                    )
            parts = [*self._dirty_params.values(), *self._dirty_state.values()]
            if parts:
                self._uploader.send(Segments.join(parts), self.params, self.state, self.tables)
            self._dirty_params.clear()
            self._dirty_state.clear()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a RequestTable cannot be copied or pickled: its device memory is its identity"
        )

    def claim_slots(self, slots: npt.NDArray[np.int32]) -> SlotClaim:
        """The slots of a step: ValueError unless each is -1, or admitted and named once."""
        with self._lock:
            self._check_slots(slots)
            return SlotClaim(slots.copy(), self._generations[slots], self.tenancy)

    def fingerprint(self, slots: npt.NDArray[np.int32]) -> int:
        """Of slots, which were checked, and of what was told of their requests: equal on tables
        that were told the same."""
        return zlib.crc32(self._digests[slots].tobytes(), zlib.crc32(slots.tobytes()))

    def _check_slots(self, slots: npt.NDArray[np.int32]) -> None:
        if not slots.size:
            return
        named = slots[slots >= 0]
        if slots.min() < -1 or slots.max() >= self.max_requests:
            wrong = slots[(slots < -1) | (slots >= self.max_requests)][0]
            raise ValueError(
                f"slots holds {wrong}: it must be -1 (padding) or in [0, {self.max_requests})"
            )
        if not self._admitted[named].all():
            raise ValueError(
                f"slots holds {named[~self._admitted[named]][0]}, which is not admitted"
            )
        if named.size > 1:
            counts = np.bincount(named)
            if counts.max() > 1:
                raise ValueError(f"slots holds {counts.argmax()} more than once")

    def register_refusals(
        self,
        owner: object,
        backend: str,
        refused: frozenset[str],
        remedies: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """While `owner` lives, admit and update refuse requests that need one of the fields.

        remedies: what the error says of a field, if anything. UnsupportedFeatureError if a request
        already admitted needs one of the fields.
        """
        if not refused:
            return
        refusals = _Refusals(backend, refused, remedies)
        with self._lock:
            for slot, request in enumerate(self._requests):
                if request is not None:
                    self._check_refused(request.params, refusals, f" (slot {slot})")
            key = id(owner)
            self._refusals[key] = refusals
            weakref.finalize(owner, self._refusals.pop, key, None)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError("a RequestTable cannot be used after a fork: make it in the child")

    def _check_request(
        self,
        params: SamplingParams,
        prompt_token_ids: TokenIds,
        output_token_ids: TokenIds,
        num_prompt_tokens: int | None,
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], int]:
        """Prompt and output as arrays, and the prompt's length; errors as `admit`."""
        _check_params(params)
        prompt = _as_ids("prompt_token_ids", prompt_token_ids, self.vocab_size)
        output = _as_ids("output_token_ids", output_token_ids, self.vocab_size)
        prompt_length = len(prompt)
        if num_prompt_tokens is not None:
            accepted = "an integer in [0, 2**62]"
            prompt_length = as_int("num_prompt_tokens", num_prompt_tokens, accepted)
            if not 0 <= prompt_length <= 2**62:
                raise ValueError(f"num_prompt_tokens = {prompt_length}: it must be {accepted}")
            if len(prompt) not in (0, prompt_length):
                raise ValueError(
                    f"num_prompt_tokens = {prompt_length} is not accepted: "
                    f"prompt_token_ids has {len(prompt)} ids"
                )
        self._check_fits(params)
        if params.max_tokens is not None and params.max_tokens <= len(output):
            raise ValueError(
                f"max_tokens = {params.max_tokens} is not accepted: it must be greater than the "
                f"number of tokens already output, {len(output)}"
            )
        return prompt, output, prompt_length

    def _request(self, slot: int) -> tuple[int, AdmittedRequest]:
        """The slot as an int, whatever integer names it: a tensor is another key than its equal."""
        index = as_int("slot", slot, f"an integer in [0, {self.max_requests})")
        if not 0 <= index < self.max_requests:
            raise ValueError(
                f"slot = {index} is not accepted: it must be in [0, {self.max_requests})"
            )
        request = self._requests[index]
        if request is None:
            raise ValueError(f"slot = {index} is not accepted: it holds no request")
        return index, request

    def _free_slot(self, slot: int | None) -> int:
        if slot is not None:
            index = as_int("slot", slot, f"a free slot in [0, {self.max_requests})")
            if not 0 <= index < self.max_requests or self._requests[index] is not None:
                raise ValueError(
                    f"slot = {index} is not accepted: it must be a free slot in "
                    f"[0, {self.max_requests})"
                )
            return index
        while self._free:
            index = self._free[0]
            if self._requests[index] is None:
                return index  # and left there: it is skipped once the request is in
            self._in_free[heapq.heappop(self._free)] = False
        raise TableFullError(f"all {self.max_requests} slots are taken")

    def _next_seed(self) -> int:
        return philox.word(self._seed, self._num_seeds + 1, philox.Stream.ADMISSION_SEED)

    def _pack_params(self, slot: int, request: AdmittedRequest) -> Segments:
        return pack_params(self.layout, slot, request.params, request.seed, self.eos_token_ids)

    def _check_supported(self, params: SamplingParams) -> None:
        # A copy: a sampler that dies meanwhile takes its entry away.
        for refusals in list(self._refusals.values()):
            self._check_refused(params, refusals)

    def _check_refused(self, params: SamplingParams, refusals: _Refusals, where: str = "") -> None:
        needed = sorted(refusals.refused & active_features(params, self.vocab_size))
        if needed:
            names = ", ".join(f"{name} = {getattr(params, name)!r}" for name in needed)
            remedies = dict.fromkeys(refusals.remedies.get(name) for name in needed)
            raise UnsupportedFeatureError(
                "; ".join(
                    [
                        f"the backend {refusals.backend!r} does not support {names}{where}",
                        *filter(None, remedies),
                    ]
                )
            )

    def _check_fits(self, params: SamplingParams) -> None:
        layout = self.layout
        stop_capacity = layout.max_stop_ids - len(self.eos_token_ids)
        for name, length, capacity in (
            ("logit_bias", len(params.logit_bias), layout.max_logit_bias),
            (
                "stop_token_ids",
                len(set(params.stop_token_ids).difference(self.eos_token_ids)),
                stop_capacity,
            ),
            ("bad_words_ids", len(params.bad_words_ids), layout.max_bad_words),
            ("logprob_token_ids", len(params.logprob_token_ids), layout.max_logprob_ids),
        ):
            if length > capacity:
                raise ValueError(
                    f"{name} has {length} entries: the table was made for at most {capacity}"
                )
        if params.logprobs is not None and params.logprobs > layout.max_logprobs:
            raise ValueError(
                f"logprobs = {params.logprobs} is not accepted: it must be None or in "
                f"[0, {layout.max_logprobs}], the table's max_logprobs"
            )
        for word in params.bad_words_ids:
            if len(word) > layout.max_bad_word_length:
                raise ValueError(
                    f"bad_words_ids holds a sequence of {len(word)} ids: the table was made for "
                    f"at most {layout.max_bad_word_length}"
                )
        if not layout.penalties:
            for name in PENALTIES & params.features():
                raise ValueError(
                    f"{name} = {getattr(params, name)} is not accepted: the table was made "
                    "with penalties=False"
                )
        for name, ids in (
            ("logit_bias", params.logit_bias),
            ("allowed_token_ids", params.allowed_token_ids or ()),
            ("bad_words_ids", [i for word in params.bad_words_ids for i in word]),
            ("stop_token_ids", params.stop_token_ids),
            ("logprob_token_ids", params.logprob_token_ids),
        ):
            if ids and max(ids) >= self.vocab_size:
                raise ValueError(
                    f"{name} holds the id {max(ids)}: ids must be in [0, {self.vocab_size})"
                )


def device_guard(device: torch.device) -> AbstractContextManager[object]:
    """Makes `device` current where it is a CUDA device that is not; nothing elsewhere."""
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return _NO_GUARD
    return torch.cuda.device(device)


def check_table(table: object) -> None:
    if not isinstance(table, RequestTable):
        raise ValueError(f"table is {type(table).__name__}: it must be a RequestTable")


def _check_params(params: object) -> None:
    if not isinstance(params, SamplingParams):
        raise ValueError(f"params is {type(params).__name__}: it must be SamplingParams")


def _as_seed(seed: int) -> int:
    accepted = "None or in [-2**63, 2**64 - 1]"
    value = as_int("seed", seed, accepted)
    if not -(2**63) <= value < 2**64:
        raise ValueError(f"seed = {seed!r} is not accepted: it must be {accepted}")
    return value


def as_array(name: str, ids: TokenIds) -> npt.NDArray[Any]:
    try:
        return np.asarray(ids)
    except (RuntimeError, TypeError, ValueError) as error:  # ragged lists, tensors with no array
        raise ValueError(f"{name} must be a flat sequence of integers") from error


def _as_ids(name: str, ids: TokenIds, vocab_size: int) -> npt.NDArray[np.int64]:
    """Token ids as int64 [n]; ValueError unless they are integers in [0, vocab_size)."""
    if isinstance(ids, torch.Tensor):
        if ids.device.type != "cpu":
            raise ValueError(f"{name} is on {ids.device}: token ids are given on the CPU")
        if ids.is_floating_point() or ids.is_complex():
            raise ValueError(f"{name} must be a flat sequence of integers")
    array = as_array(name, ids)
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"{name} must be a flat sequence of integers")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"{name} holds the id {low if low < 0 else high}: ids must be in [0, {vocab_size})"
        )
    return array.astype(np.int64, copy=False)
