"""`RequestTable`: the requests of an engine as rows of device tensors at fixed addresses."""

from __future__ import annotations

import heapq
import math
import os
import secrets
import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from graphed_sampling import philox
from graphed_sampling.layout import (
    HEADER_WORDS,
    MAX_VOCAB_SIZE,
    FinishReason,
    Param,
    ParamFlags,
    State,
    TableLayout,
)
from graphed_sampling.params import SamplingParams, UnsupportedFeatureError, as_int, fp32
from graphed_sampling.staging import Segments, StagingStats, Target, Uploader, Words

TokenIds = Sequence[int] | npt.NDArray[np.integer] | torch.Tensor

_MASK64 = 0xFFFFFFFFFFFFFFFF
_PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")
_FILTERS = (
    "top_k",
    "top_p",
    "min_p",
    "top_n_sigma",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
)
# Fields that change nothing of a greedy request.
_NOT_GREEDY = frozenset(_FILTERS)


class TableFullError(RuntimeError):
    """Every slot of the table is taken."""


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
        eos_token_ids: end a request that does not set ignore_eos; at least as many as fit.
        max_logprobs: the most `logprobs` a request may ask for. max_logit_bias, max_stop_ids,
        max_bad_words, max_bad_word_length, max_logprob_ids: entries a request may bring of each
        (ids a bad word, for the length). penalties: whether prompt and output tokens are counted,
        which costs 4 * vocab_size + vocab_size / 4 bytes a slot (`bytes_per_slot`).
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
        checked = {}
        for name, (value, low, high) in sizes.items():
            accepted = f"an integer in [{low}, {high}]"
            checked[name] = as_int(name, value, accepted)
            if not low <= checked[name] <= high:
                raise ValueError(f"{name} = {value!r} is not accepted: it must be {accepted}")
        self.eos_token_ids = tuple(
            dict.fromkeys(
                int(i) for i in _as_ids("eos_token_ids", tuple(eos_token_ids), vocab_size)
            )
        )
        checked["max_stop_ids"] += len(self.eos_token_ids)
        self.layout = TableLayout(**checked, penalties=int(bool(penalties)))
        self.device = torch.empty(0, device=device).device  # with the index that its tensors have
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._seed = secrets.randbits(64) if seed is None else as_int("seed", seed, "an integer")
        self._num_seeds = 0

        self._requests: list[AdmittedRequest | None] = [None] * max_requests
        self._admitted = np.zeros(max_requests, np.bool_)
        self._generations = [0] * max_requests
        self._free = list(range(max_requests))  # a heap; entries taken by name are skipped
        self._refusals: dict[int, tuple[str, frozenset[str]]] = {}
        # What the next upload sends, a slot's newest alone.
        self._dirty_params: dict[int, Segments] = {}
        self._dirty_state: dict[int, Segments] = {}

        rows = self.layout.rows
        with torch.inference_mode(False), torch.device(self.device):
            self.params = torch.zeros(rows, self.layout.params_words, dtype=torch.int32)
            self.params[:, :HEADER_WORDS] = torch.from_numpy(_neutral_header())
            self.state = torch.zeros(rows, self.layout.state_words, dtype=torch.int32)
            self.tables = torch.zeros(self.layout.tables_words, dtype=torch.int32)
            long = self.state.view(torch.int64)
            self.positions = long[:max_requests, State.POSITION // 2]
            """int64 [max_requests]: index, in each request's sequence, of its next token."""
            self.last_token_ids = long[:max_requests, State.LAST_TOKEN // 2]
            """int64 [max_requests]: each request's last token, -1 where there is none."""
            with _device_guard(self.device):
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
        """Copies, bytes and waits of all uploads so far."""
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
            return self._request(slot)

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
        with self._lock:
            self._check_supported(params)
            slot = self._take_slot(slot)
            generation = self._generations[slot] % (2**31 - 1) + 1
            request = AdmittedRequest(params, self._new_seed(params), generation, len(output))
            state = self._state_segments(slot, request, prompt, output, prompt_length)
            self._dirty_params[slot] = self._params_segments(slot, request)
            self._dirty_state[slot] = state
            self._generations[slot] = generation
            self._requests[slot] = request
            self._admitted[slot] = True
        return slot

    def update(self, slot: int, params: SamplingParams) -> None:
        """Change the parameters of the request in `slot`, and nothing of its state.

        A seed of None keeps the request's seed. Errors as `admit`; on an error nothing has changed.
        """
        self._check_process()
        _check_params(params)
        self._check_fits(params)
        with self._lock:
            old = self._request(slot)
            self._check_supported(params)
            seed = old.seed if params.seed is None else params.seed & _MASK64
            request = AdmittedRequest(params, seed, old.generation, old.num_output_tokens)
            self._dirty_params[slot] = self._params_segments(slot, request)
            self._requests[slot] = request

    def release(self, slot: int) -> None:
        """Give the slot back; ValueError where it holds no request.

        A step in flight may still name it: its output row carries the old generation.
        """
        self._check_process()
        with self._lock:
            self._request(slot)
            self._dirty_params[slot] = Segments.run(
                Target.PARAMS, slot * self.layout.params_words, _neutral_header()
            )
            self._requests[slot] = None
            self._admitted[slot] = False
            heapq.heappush(self._free, slot)

    def upload(self) -> None:
        """Enqueue what changed since the last upload on the current stream, without waiting.

        The samplers call it before every step. Where `sample_step` sits in a graph of your own,
        call it before each replay, never inside the capture. Changes of k rows are one pinned copy
        and one scatter; no change is no work.
        """
        self._check_process()
        if not self._dirty_params and not self._dirty_state:
            return
        with self._lock, _device_guard(self.device), torch.inference_mode(False):
            if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "RequestTable.upload() inside a CUDA graph capture would replay this "
                    "upload for ever: call it before the capture and before each replay"
                )
            parts = [*self._dirty_params.values(), *self._dirty_state.values()]
            if parts:
                self._uploader.send(Segments.join(parts), self.params, self.state, self.tables)
            self._dirty_params.clear()
            self._dirty_state.clear()

    def check_slots(self, slots: npt.NDArray[np.int32]) -> None:
        """ValueError unless every slot is -1, or admitted and named once."""
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

    def register_refusals(self, owner: object, backend: str, refused: frozenset[str]) -> None:
        """While `owner` lives, admit and update refuse requests that need one of the fields.

        UnsupportedFeatureError if a request already admitted needs one.
        """
        if not refused:
            return
        with self._lock:
            for slot, request in enumerate(self._requests):
                if request is not None:
                    _check_refused(request.params, backend, refused, f" (slot {slot})")
            key = id(owner)
            self._refusals[key] = (backend, refused)
            weakref.finalize(owner, self._refusals.pop, key, None)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError("a RequestTable cannot be used after a fork: make it in the child")

    def _request(self, slot: int) -> AdmittedRequest:
        index = as_int("slot", slot, f"an integer in [0, {self.max_requests})")
        if not 0 <= index < self.max_requests:
            raise ValueError(
                f"slot = {index} is not accepted: it must be in [0, {self.max_requests})"
            )
        request = self._requests[index]
        if request is None:
            raise ValueError(f"slot = {index} is not accepted: it holds no request")
        return request

    def _take_slot(self, slot: int | None) -> int:
        if slot is not None:
            index = as_int("slot", slot, f"a free slot in [0, {self.max_requests})")
            if not 0 <= index < self.max_requests or self._requests[index] is not None:
                raise ValueError(
                    f"slot = {index} is not accepted: it must be a free slot in "
                    f"[0, {self.max_requests})"
                )
            return index
        while self._free:
            index = heapq.heappop(self._free)
            if self._requests[index] is None:
                return index
        raise TableFullError(f"all {self.max_requests} slots are taken")

    def _new_seed(self, params: SamplingParams) -> int:
        if params.seed is not None:
            return params.seed & _MASK64
        self._num_seeds += 1
        return philox.word(self._seed, self._num_seeds, philox.Stream.ADMISSION_SEED)

    def _check_supported(self, params: SamplingParams) -> None:
        for backend, refused in self._refusals.values():
            _check_refused(params, backend, refused)

    def _check_fits(self, params: SamplingParams) -> None:
        layout = self.layout
        stop_capacity = layout.max_stop_ids - len(self.eos_token_ids)
        for name, length, capacity in (
            ("logit_bias", len(params.logit_bias), layout.max_logit_bias),
            ("stop_token_ids", len(set(params.stop_token_ids)), stop_capacity),
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
            for name in _PENALTIES:
                if name in params.features():
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

    def _params_segments(self, slot: int, request: AdmittedRequest) -> Segments:
        """The slot's parameter record: its header, and the used part of each list."""
        layout, params = self.layout, request.params
        header = _neutral_header()
        real, long, double = (header.view(t) for t in (np.float32, np.uint64, np.float64))
        greedy = params.is_greedy
        filters = () if greedy else tuple(f for f in _FILTERS if f in params.features())
        top_k = params.top_k if 0 < params.top_k < layout.vocab_size else 0
        if "top_k" in filters and not top_k:
            filters = tuple(f for f in filters if f != "top_k")
        stop_ids = dict.fromkeys(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= dict.fromkeys(self.eos_token_ids)

        flags = ParamFlags.ADMITTED
        for flag, condition in (
            (ParamFlags.GREEDY, greedy),
            (ParamFlags.FILTERED, bool(filters)),
            (ParamFlags.LOGPROBS, params.logprobs is not None),
            (ParamFlags.PROCESSED, params.logprobs_mode == "processed"),
            (ParamFlags.RANK, params.rank),
            (ParamFlags.ALLOWED, params.allowed_token_ids is not None),
            (ParamFlags.PENALTIES, any(p in params.features() for p in _PENALTIES)),
        ):
            if condition:
                flags |= flag
        header[Param.FLAGS] = flags
        header[Param.TOP_K] = top_k if "top_k" in filters else 0
        if not greedy:
            real[Param.TEMPERATURE] = params.temperature
        for word, name in (
            (Param.TOP_P, "top_p"),
            (Param.MIN_P, "min_p"),
            (Param.TOP_N_SIGMA, "top_n_sigma"),
            (Param.TYPICAL_P, "typical_p"),
            (Param.EPSILON_CUTOFF, "epsilon_cutoff"),
            (Param.ETA_CUTOFF, "eta_cutoff"),
        ):
            if name in filters:
                real[word] = getattr(params, name)
        real[Param.REPETITION_PENALTY] = params.repetition_penalty
        real[Param.FREQUENCY_PENALTY] = params.frequency_penalty
        real[Param.PRESENCE_PENALTY] = params.presence_penalty
        header[Param.MIN_TOKENS] = params.min_tokens
        header[Param.MAX_TOKENS] = params.max_tokens or 0
        long[Param.SEED // 2] = request.seed
        if "min_p" in filters and fp32(params.min_p) > 0:
            double[Param.MIN_P_OFFSET // 2] = fp32(params.temperature) * math.log(
                fp32(params.min_p)
            )
        header[Param.TOP_LOGPROBS] = params.logprobs or 0
        header[Param.NUM_BIAS] = len(params.logit_bias)
        header[Param.NUM_STOP] = len(stop_ids)
        header[Param.NUM_BAD_WORDS] = len(params.bad_words_ids)
        header[Param.NUM_GIVEN] = len(params.logprob_token_ids)

        bad_words = np.full((len(params.bad_words_ids), layout.max_bad_word_length), -1, np.int32)
        for row, word_ids in zip(bad_words, params.bad_words_ids, strict=True):
            row[: len(word_ids)] = word_ids[::-1]
        record = slot * layout.params_words
        parts = [Segments.run(Target.PARAMS, record, header)]
        for start, values in (
            (layout.bias_ids, np.fromiter(params.logit_bias, np.int32)),
            (
                layout.bias_values,
                np.fromiter(params.logit_bias.values(), np.float32).view(np.int32),
            ),
            (layout.stop_ids, np.fromiter(stop_ids, np.int32)),
            (layout.bad_words, bad_words.reshape(-1)),
            (layout.given_ids, np.array(params.logprob_token_ids, np.int32)),
        ):
            if len(values):
                parts.append(Segments.run(Target.PARAMS, record + start, values))
        if params.allowed_token_ids is not None:
            bits = self._bitmap(np.array(params.allowed_token_ids, np.int64))
            parts.append(self._bitmap_row(layout.allowed_bits, slot, bits))
        return Segments.join(parts)

    def _state_segments(
        self,
        slot: int,
        request: AdmittedRequest,
        prompt: npt.NDArray[np.int64],
        output: npt.NDArray[np.int64],
        prompt_length: int,
    ) -> Segments:
        layout = self.layout
        record = np.zeros(layout.state_words, np.int32)
        long = record.view(np.int64)
        long[State.POSITION // 2] = prompt_length + len(output)
        last = output[-1:] if len(output) else prompt[-1:]
        long[State.LAST_TOKEN // 2] = last[0] if len(last) else -1
        record[State.NUM_GENERATED] = len(output)
        record[State.FINISH_REASON] = FinishReason.NONE
        record[State.GENERATION] = request.generation
        recent = record[State.RECENT : State.RECENT + layout.recent_tokens]
        recent[:] = -1
        newest = output[::-1][: layout.recent_tokens]
        recent[: len(newest)] = newest
        parts = [Segments.run(Target.STATE, slot * layout.state_words, record)]
        if layout.penalties:
            parts.append(self._bitmap_row(layout.prompt_bits, slot, self._bitmap(prompt)))
            parts.append(self._bitmap_row(layout.output_bits, slot, self._bitmap(output)))
            if len(output):
                ids, counts = np.unique(output, return_counts=True)
                offsets = layout.counts + slot * layout.vocab_size + ids
                parts.append(Segments.single_words(Target.TABLES, offsets, counts.astype(np.int32)))
        return Segments.join(parts)

    def _bitmap(self, ids: npt.NDArray[np.int64]) -> Words:
        member = np.zeros(32 * self.layout.bitmap_words, np.uint8)
        member[ids] = 1
        return np.packbits(member, bitorder="little").view(np.int32)

    def _bitmap_row(self, start: int, slot: int, bits: Words) -> Segments:
        return Segments.run(Target.TABLES, start + slot * self.layout.bitmap_words, bits)


class _device_guard:
    """Makes `device` current where it is a CUDA device; nothing elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._guard = torch.cuda.device(device) if device.type == "cuda" else None

    def __enter__(self) -> None:
        if self._guard is not None:
            self._guard.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._guard is not None:
            self._guard.__exit__(*error)


def _neutral_header() -> Words:
    """A parameter record's header with everything off: of a slot that holds no request."""
    header = np.zeros(HEADER_WORDS, np.int32)
    for word in (Param.TEMPERATURE, Param.TOP_P, Param.TYPICAL_P, Param.REPETITION_PENALTY):
        header.view(np.float32)[word] = 1.0
    return header


def _check_params(params: object) -> None:
    if not isinstance(params, SamplingParams):
        raise ValueError(f"params is {type(params).__name__}: it must be SamplingParams")


def _check_refused(
    params: SamplingParams, backend: str, refused: frozenset[str], where: str = ""
) -> None:
    needed = refused & params.features()
    if params.is_greedy:
        needed -= _NOT_GREEDY
    if needed:
        names = ", ".join(f"{name} = {getattr(params, name)!r}" for name in sorted(needed))
        raise UnsupportedFeatureError(f"the backend {backend!r} does not support {names}{where}")


def _as_ids(name: str, ids: TokenIds, vocab_size: int) -> npt.NDArray[np.int64]:
    """Token ids as int64 [n]; ValueError unless they are integers in [0, vocab_size)."""
    if isinstance(ids, torch.Tensor):
        if ids.device.type != "cpu":
            raise ValueError(f"{name} is on {ids.device}: token ids are given on the CPU")
        ids = ids.numpy()
    array = np.asarray(ids)
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
