"""`SamplingParams`: what one request asks of the sampler, checked when it is made."""

from __future__ import annotations

import math
import numbers
import operator
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Final, Literal, NoReturn, cast

import numpy as np
import torch

from graphed_sampling import philox

LogprobsMode = Literal["raw", "processed"]

LOG2_E: Final = math.log2(math.e)
GREEDY_TEMPERATURE: Final = 1e-5
"""Temperatures below this (compared in fp32) take the argmax."""

_INT32_MAX: Final = 2**31 - 1
_FP32: Final = struct.Struct("f")


class UnsupportedFeatureError(ValueError):
    """A request needs a feature that a backend stepping its table lacks."""


class _FrozenDict(dict[int, float]):
    """A dict that cannot change; it pickles and hashes, which MappingProxyType does not."""

    def _refuse(self, *_args: object, **_kwargs: object) -> NoReturn:
        raise TypeError("SamplingParams.logit_bias cannot be changed; make new SamplingParams")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(sorted(self.items())))

    def __reduce__(self) -> tuple[type[_FrozenDict], tuple[dict[int, float]]]:
        return _FrozenDict, (dict(self),)


def _fail(name: str, value: object, accepted: str) -> NoReturn:
    raise ValueError(f"{name} = {value!r} is not accepted: it must be {accepted}")


def as_int(name: str, value: object, accepted: str) -> int:
    """`value` as an int; bools, floats and everything that is no integer raise ValueError."""
    if type(value) is int:
        return value  # and so in torch.compile, which knows sizes by their type alone
    if isinstance(value, bool | np.bool_) or getattr(value, "dtype", None) == torch.bool:
        _fail(name, value, accepted)
    try:
        return operator.index(cast(Any, value))
    except TypeError:
        _fail(name, value, accepted)


def fp32(value: float) -> float:
    """What fp32 stores of `value` (overflow gives inf)."""
    try:
        return float(_FP32.unpack(_FP32.pack(value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def _as_float(name: str, value: object, accepted: str) -> float:
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Real | np.floating):
        _fail(name, value, accepted)
    try:
        number = float(value)
    except OverflowError:
        _fail(name, value, accepted)
    if math.isnan(number):
        _fail(name, value, accepted)
    return number


def _elements(name: str, value: object, accepted: str) -> list[object]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        _fail(name, value, accepted)
    try:
        return list(value)
    except TypeError:  # arrays without a dimension say that they can be iterated over
        _fail(name, value, accepted)


def _as_ids(name: str, value: object) -> tuple[int, ...]:
    elements = _elements(name, value, "a sequence of token ids >= 0")
    ids = tuple(as_int(f"{name}[{i}]", v, "a token id >= 0") for i, v in enumerate(elements))
    for i, token_id in enumerate(ids):
        if token_id < 0:
            _fail(f"{name}[{i}]", token_id, "a token id >= 0")
    return ids


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request. Immutable; every value is checked at construction.

    Bounds that depend on a table (vocabulary size, capacities) are checked by `RequestTable.admit`.
    Floats take part as what fp32 stores of them. Errors are ValueError and name field, value and
    accepted range.

    temperature: >= 0, finite. Below 1e-5 the request is greedy: argmax, lowest id among equals.
    top_k: 0 or -1 for off, else >= 1; exactly k tokens survive, ties go to the lower id.
    top_p: in (0, 1]; the smallest prefix whose mass reaches p. 1 is off.
    min_p: in [0, 1]; keeps logits >= maximum + temperature * ln(min_p). 0 is off.
    top_n_sigma: >= 0; keeps logits >= maximum - n * standard deviation. 0 is off.
    typical_p: in (0, 1]; locally typical sampling (Meister et al. 2022). 1 is off.
    epsilon_cutoff, eta_cutoff: in [0, 1); truncation by probability (Hewitt et al. 2022). 0 is off.
    repetition_penalty: > 0; prompt and output tokens: y > 0 ? y / r : y * r.
    frequency_penalty, presence_penalty: in [-2, 2]; output tokens.
    logit_bias: token id -> finite bias, or -inf for a ban.
    allowed_token_ids: None for all, else the only ids that may be drawn.
    bad_words_ids: sequences of ids; the last id of one is banned where the output ends in the rest.
    min_tokens: stop ids are banned until so many tokens were generated.
    max_tokens: the request finishes with LENGTH after so many generated tokens; None for no limit.
    stop_token_ids: drawing one finishes the request with STOP, as the table's EOS ids do
        unless ignore_eos.
    seed: 64 bits, -2**63 .. 2**64 - 1; None draws one at admission.
    logprobs: None for none, 0 for the drawn token's, n for the n best tokens' too.
    logprobs_mode: "raw" (of the model's logits) or "processed" (of the distribution drawn from).
    logprob_token_ids: ids whose logprobs are wanted at every step.
    rank: whether the drawn token's rank is wanted.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    top_n_sigma: float = 0.0
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None
    bad_words_ids: Sequence[Sequence[int]] = ()
    min_tokens: int = 0
    max_tokens: int | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    logprobs_mode: LogprobsMode = "raw"
    logprob_token_ids: Sequence[int] = ()
    rank: bool = False

    def __post_init__(self) -> None:
        self._check_real("temperature", "finite and >= 0", low=0.0)
        self._check_int("top_k", "0 or -1 (off), or >= 1", low=-1)
        self._check_real("top_p", "in (0, 1]", low=0.0, high=1.0, low_open=True)
        self._check_real("min_p", "in [0, 1]", low=0.0, high=1.0)
        self._check_real("top_n_sigma", "finite and >= 0", low=0.0)
        self._check_real("typical_p", "in (0, 1]", low=0.0, high=1.0, low_open=True)
        self._check_real("epsilon_cutoff", "in [0, 1)", low=0.0, high=1.0, high_open=True)
        self._check_real("eta_cutoff", "in [0, 1)", low=0.0, high=1.0, high_open=True)
        self._check_real("repetition_penalty", "finite and > 0", low=0.0, low_open=True)
        self._check_real("frequency_penalty", "in [-2, 2]", low=-2.0, high=2.0)
        self._check_real("presence_penalty", "in [-2, 2]", low=-2.0, high=2.0)
        self._set("logit_bias", self._checked_bias())
        if self.allowed_token_ids is not None:
            allowed = _as_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                _fail("allowed_token_ids", allowed, "None or a non-empty sequence of token ids")
            self._set("allowed_token_ids", allowed)
        self._set("bad_words_ids", self._checked_bad_words())
        self._check_int("min_tokens", f"in [0, {_INT32_MAX}]", low=0, high=_INT32_MAX)
        if self.max_tokens is not None:
            self._check_int("max_tokens", f"None or in [1, {_INT32_MAX}]", low=1, high=_INT32_MAX)
            if self.max_tokens < self.min_tokens:
                _fail("max_tokens", self.max_tokens, f">= min_tokens = {self.min_tokens}")
        self._set("stop_token_ids", _as_ids("stop_token_ids", self.stop_token_ids))
        self._check_bool("ignore_eos")
        if self.seed is not None:
            low, high = -(2**63), 2**64 - 1
            self._check_int("seed", "None or in [-2**63, 2**64 - 1]", low=low, high=high)
        if self.logprobs is not None:
            self._check_int("logprobs", "None or >= 0", low=0)
        mode: object = self.logprobs_mode
        if not isinstance(mode, str) or mode not in ("raw", "processed"):
            _fail("logprobs_mode", self.logprobs_mode, "'raw' or 'processed'")
        self._set("logprob_token_ids", _as_ids("logprob_token_ids", self.logprob_token_ids))
        self._check_bool("rank")

    @property
    def is_greedy(self) -> bool:
        return fp32(self.temperature) < fp32(GREEDY_TEMPERATURE)

    @property
    def reports(self) -> bool:
        """Whether logprobs or ranks are wanted."""
        return self.logprobs is not None or self.rank or bool(self.logprob_token_ids)

    def child(self, index: int) -> SamplingParams:
        """Parameters of the `index`-th of n samples: the same but for an independent seed.

        Without a seed the child has none either, and draws its own at admission.
        """
        accepted = "an integer in [0, 2**64)"
        index = as_int("index", index, accepted)
        if not 0 <= index < 2**64:
            _fail("index", index, accepted)
        if self.seed is None:
            return self
        return replace(self, seed=philox.word(self.seed, index, philox.Stream.CHILD_SEED))

    def features(self) -> frozenset[str]:
        """Names of the fields that are on: what a backend must support to serve the request."""
        return self._features

    @cached_property
    def _features(self) -> frozenset[str]:
        return frozenset(
            f.name
            for f in fields(self)
            if f.name not in ("temperature", "seed") and self._is_on(f.name)
        )

    def _is_on(self, name: str) -> bool:
        value = getattr(self, name)
        if name == "top_k":
            return bool(value > 0)
        # 1 - 1e-9 is 1 in fp32, and so off.
        return bool((fp32(value) if isinstance(value, float) else value) != _OFF[name])

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # the dataclass is frozen

    def _check_real(
        self,
        name: str,
        accepted: str,
        *,
        low: float = -math.inf,
        high: float = math.inf,
        low_open: bool = False,
        high_open: bool = False,
    ) -> None:
        value = _as_float(name, getattr(self, name), accepted)
        stored = fp32(value)
        inside = low <= value <= high and low <= stored <= high and math.isfinite(stored)
        if not inside or (low_open and stored == low) or (high_open and stored == high):
            _fail(name, getattr(self, name), f"{accepted} as fp32 stores it")
        self._set(name, value)

    def _check_int(self, name: str, accepted: str, *, low: int, high: int | None = None) -> None:
        value = as_int(name, getattr(self, name), accepted)
        if value < low or (high is not None and value > high):
            _fail(name, value, accepted)
        self._set(name, value)

    def _check_bool(self, name: str) -> None:
        if not isinstance(getattr(self, name), bool | np.bool_):
            _fail(name, getattr(self, name), "a bool")
        self._set(name, bool(getattr(self, name)))

    def _checked_bias(self) -> _FrozenDict:
        accepted = "a mapping of token ids to finite biases or -inf"
        if not isinstance(self.logit_bias, Mapping):
            _fail("logit_bias", self.logit_bias, accepted)
        bias: dict[int, float] = {}
        for key, value in self.logit_bias.items():
            token_id = as_int("logit_bias", key, accepted)
            if token_id < 0:
                _fail("logit_bias", token_id, accepted)
            number = _as_float(f"logit_bias[{token_id}]", value, "finite or -inf as fp32 stores it")
            if number != -math.inf and not math.isfinite(fp32(number)):
                _fail(f"logit_bias[{token_id}]", value, "finite or -inf as fp32 stores it")
            bias[token_id] = number
        return _FrozenDict(bias)

    def _checked_bad_words(self) -> tuple[tuple[int, ...], ...]:
        accepted = "a sequence of non-empty sequences of token ids"
        elements = _elements("bad_words_ids", self.bad_words_ids, accepted)
        words = tuple(_as_ids(f"bad_words_ids[{i}]", w) for i, w in enumerate(elements))
        for i, ids in enumerate(words):
            if not ids:
                _fail(f"bad_words_ids[{i}]", ids, "a non-empty sequence of token ids")
        return words


_OFF: Final[dict[str, object]] = {
    f.name: getattr(SamplingParams(), f.name) for f in fields(SamplingParams)
}
