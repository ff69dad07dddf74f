"""`SamplingParams`: what is refused and in which words, what is accepted, what cannot change."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, fields, replace
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphed_sampling import philox
from graphed_sampling.params import SamplingParams, UnsupportedFeatureError

INF, NAN = float("inf"), float("nan")
INT32_MAX = 2**31 - 1
FP32_MAX = float(np.finfo(np.float32).max)
FP32_TINY = 2.0**-149  # the smallest positive fp32
BELOW_ONE = 1 - 2.0**-24  # the largest fp32 below 1

REALS = "finite and >= 0"
NOT_NUMBERS = [NAN, True, np.True_, "1", None, [1.0], 1j, Decimal(1)]

# Field, refused values, and what the message must say is accepted.
REFUSED: list[tuple[str, list[Any], str]] = [
    ("temperature", [-1, -1e-9, INF, -INF, 1e39, 10**400, *NOT_NUMBERS], REALS),
    ("top_k", [-2, 1.0, 0.5, "3", None, True, np.False_, NAN], "0 or -1 (off), or >= 1"),
    ("top_p", [0, -0.1, 1.0001, 1 + 1e-12, 1e-60, INF, *NOT_NUMBERS], "in (0, 1]"),
    ("min_p", [-1e-9, 1.0001, 1 + 1e-12, INF, *NOT_NUMBERS], "in [0, 1]"),
    ("top_n_sigma", [-1, -1e-9, INF, 1e39, *NOT_NUMBERS], REALS),
    ("typical_p", [0, -0.1, 1.0001, 1e-60, INF, *NOT_NUMBERS], "in (0, 1]"),
    # 1 - 1e-9 is 1 where fp32 stores it.
    ("epsilon_cutoff", [-1e-9, 1, 1.5, 1 - 1e-9, INF, *NOT_NUMBERS], "in [0, 1)"),
    ("eta_cutoff", [-1e-9, 1, 1.5, 1 - 1e-9, INF, *NOT_NUMBERS], "in [0, 1)"),
    # 1e-60 is 0 and 1e39 is inf where fp32 stores them.
    ("repetition_penalty", [0, -1, 1e-60, INF, 1e39, *NOT_NUMBERS], "finite and > 0"),
    ("frequency_penalty", [-2.001, 2.001, 2 + 1e-12, INF, *NOT_NUMBERS], "in [-2, 2]"),
    ("presence_penalty", [-2.001, 2.001, -2 - 1e-12, -INF, *NOT_NUMBERS], "in [-2, 2]"),
    (
        "logit_bias",
        [{-1: 1.0}, {True: 1.0}, {"a": 1.0}, {1.0: 1.0}, [(0, 1.0)], None, 3],
        "a mapping of token ids to finite biases or -inf",
    ),
    ("allowed_token_ids", [[], (), np.array([], dtype=np.int64)], "None or a non-empty sequence"),
    ("allowed_token_ids", [3, "12", b"12", {1: 2}], "a sequence of token ids >= 0"),
    ("bad_words_ids", [3, "12", None, {1: [2]}], "a sequence of non-empty sequences of token ids"),
    ("min_tokens", [-1, 1.0, True, None, 2**31], f"in [0, {INT32_MAX}]"),
    ("max_tokens", [0, -1, 1.0, True, 2**31], f"None or in [1, {INT32_MAX}]"),
    ("stop_token_ids", [3, "12", None, {1: 2}], "a sequence of token ids >= 0"),
    ("ignore_eos", [0, 1, None, "no", 1.0], "a bool"),
    ("seed", [-(2**63) - 1, 2**64, 1.0, True, "7"], "None or in [-2**63, 2**64 - 1]"),
    ("logprobs", [-1, 1.0, True, "3"], "None or >= 0"),
    ("logprobs_mode", ["RAW", "", None, 0, True, "final"], "'raw' or 'processed'"),
    ("logprob_token_ids", [3, "12", None, {1: 2}], "a sequence of token ids >= 0"),
    ("rank", [0, 1, None, "no"], "a bool"),
]


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        pytest.param(name, value, accepted, id=f"{name}={str(value)[:20]}-{type(value).__name__}")
        for name, values, accepted in REFUSED
        for value in values
    ],
)
def test_refused(name: str, value: Any, accepted: str) -> None:
    with pytest.raises(ValueError) as error:
        SamplingParams(**{name: value})
    message = str(error.value)
    assert message.startswith(f"{name} = ")
    shown = tuple(value) if isinstance(value, list | np.ndarray) and len(value) == 0 else value
    assert repr(shown) in message or (name == "logit_bias" and isinstance(value, dict))
    assert accepted in message


# Values refused inside a sequence or mapping: the message names the element.
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("stop_token_ids", [1, -2], "stop_token_ids[1] = -2 is not accepted: it must be a token"),
        ("stop_token_ids", [True], "stop_token_ids[0] = True is not accepted: it must be a token"),
        ("stop_token_ids", [1.0], "stop_token_ids[0] = 1.0 is not accepted: it must be a token"),
        ("allowed_token_ids", [-1], "allowed_token_ids[0] = -1 is not accepted: it must be a"),
        ("logprob_token_ids", [0, "1"], "logprob_token_ids[1] = '1' is not accepted: it must be"),
        ("bad_words_ids", [[1], []], "bad_words_ids[1] = () is not accepted: it must be a non-"),
        ("bad_words_ids", [[1, -1]], "bad_words_ids[0][1] = -1 is not accepted: it must be a"),
        ("bad_words_ids", ["ab"], "bad_words_ids[0] = 'ab' is not accepted: it must be a seq"),
        ("bad_words_ids", [5], "bad_words_ids[0] = 5 is not accepted: it must be a sequence"),
        ("bad_words_ids", [[False]], "bad_words_ids[0][0] = False is not accepted: it must be"),
        ("logit_bias", {3: INF}, "logit_bias[3] = inf is not accepted: it must be finite or -inf"),
        ("logit_bias", {3: NAN}, "logit_bias[3] = nan is not accepted: it must be finite or -inf"),
        ("logit_bias", {3: True}, "logit_bias[3] = True is not accepted: it must be finite or"),
        ("logit_bias", {3: "1"}, "logit_bias[3] = '1' is not accepted: it must be finite or -inf"),
        ("logit_bias", {3: 1e39}, "logit_bias[3] = 1e+39 is not accepted: it must be finite or"),
        ("logit_bias", {3: -1e39}, "logit_bias[3] = -1e+39 is not accepted: it must be finite"),
        ("logit_bias", {-3: 1.0}, "logit_bias = -3 is not accepted: it must be a mapping of"),
    ],
)
def test_refused_element(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:
        SamplingParams(**{name: value})
    assert str(error.value).startswith(message)


def test_refused_max_tokens_below_min_tokens() -> None:
    with pytest.raises(ValueError, match=r"^max_tokens = 3 .* must be >= min_tokens = 4$"):
        SamplingParams(min_tokens=4, max_tokens=3)


def test_every_field_has_a_refused_value() -> None:
    assert {f.name for f in fields(SamplingParams)} == {name for name, _, _ in REFUSED}


def test_refused_positional_and_unknown() -> None:
    with pytest.raises(TypeError):
        SamplingParams(0.5)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        SamplingParams(temprature=0.5)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0),
        ("temperature", FP32_TINY),
        ("temperature", FP32_MAX),
        ("top_k", -1),
        ("top_k", 0),
        ("top_k", 1),
        ("top_k", 2**40),  # off: no vocabulary is so large
        ("top_p", FP32_TINY),
        ("top_p", 1),
        ("min_p", 0),
        ("min_p", 1),
        ("top_n_sigma", 0.0),
        ("top_n_sigma", FP32_MAX),
        ("typical_p", FP32_TINY),
        ("typical_p", 1),
        ("epsilon_cutoff", 0),
        ("epsilon_cutoff", BELOW_ONE),
        ("eta_cutoff", 0),
        ("eta_cutoff", BELOW_ONE),
        ("repetition_penalty", FP32_TINY),
        ("repetition_penalty", FP32_MAX),
        ("frequency_penalty", -2),
        ("frequency_penalty", 2),
        ("presence_penalty", -2),
        ("presence_penalty", 2),
        ("min_tokens", 0),
        ("max_tokens", 1),
        ("max_tokens", INT32_MAX),
        ("max_tokens", None),
        ("ignore_eos", True),
        ("seed", -(2**63)),
        ("seed", 2**64 - 1),
        ("seed", None),
        ("logprobs", 0),
        ("logprobs", None),
        ("logprobs_mode", "raw"),
        ("logprobs_mode", "processed"),
        ("rank", True),
    ],
)
def test_accepted_extremes(name: str, value: Any) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


def test_accepted_min_tokens_equal_to_max_tokens() -> None:
    params = SamplingParams(min_tokens=INT32_MAX, max_tokens=INT32_MAX)
    assert params.min_tokens == params.max_tokens == INT32_MAX


def test_accepted_bias_extremes() -> None:
    bias = {0: -INF, 1: FP32_MAX, 2: -FP32_MAX, 3: 0}
    assert dict(SamplingParams(logit_bias=bias).logit_bias) == bias


@pytest.mark.parametrize("scalar", [np.float16, np.float32, np.float64])
def test_numpy_floats_are_accepted(scalar: type[np.floating[Any]]) -> None:
    params = SamplingParams(temperature=scalar(0.5), top_p=scalar(0.25))  # type: ignore[arg-type]
    assert (params.temperature, params.top_p) == (0.5, 0.25)
    assert type(params.temperature) is float


@pytest.mark.parametrize("scalar", [np.int8, np.int32, np.int64, np.uint16])
def test_numpy_integers_are_accepted(scalar: type[np.integer[Any]]) -> None:
    params = SamplingParams(
        top_k=scalar(3),  # type: ignore[arg-type]
        seed=scalar(7),  # type: ignore[arg-type]
        temperature=scalar(2),  # type: ignore[arg-type]
        stop_token_ids=[scalar(5)],  # type: ignore[arg-type]
        logit_bias={scalar(4): np.float32(0.5)},  # type: ignore[dict-item]
    )
    assert (params.top_k, params.seed, params.temperature) == (3, 7, 2.0)
    assert params.stop_token_ids == (5,)
    assert params.logit_bias == {4: 0.5}
    assert type(params.top_k) is int
    assert type(params.temperature) is float
    assert type(params.stop_token_ids[0]) is int


def test_numpy_bools_are_accepted_as_bools() -> None:
    params = SamplingParams(rank=np.True_, ignore_eos=np.False_)  # type: ignore[arg-type]
    assert params.rank is True
    assert params.ignore_eos is False


def test_sequences_become_tuples() -> None:
    def ids() -> Iterator[int]:
        yield from (4, 5)

    params = SamplingParams(
        allowed_token_ids=np.array([1, 2]),  # type: ignore[arg-type]
        stop_token_ids=[3],  # type: ignore[arg-type]
        logprob_token_ids=ids(),  # type: ignore[arg-type]
        bad_words_ids=[[6, 7], (8,)],  # type: ignore[arg-type]
    )
    assert params.allowed_token_ids == (1, 2)
    assert params.stop_token_ids == (3,)
    assert params.logprob_token_ids == (4, 5)
    assert params.bad_words_ids == ((6, 7), (8,))


def test_later_changes_of_the_arguments_do_not_matter() -> None:
    stop, bias = [3], {1: 0.5}
    params = SamplingParams(stop_token_ids=stop, logit_bias=bias)  # type: ignore[arg-type]
    stop.append(4)
    bias[1] = 2.0
    assert params.stop_token_ids == (3,)
    assert params.logit_bias == {1: 0.5}


def full() -> SamplingParams:
    return SamplingParams(
        temperature=0.7,
        top_k=40,
        top_p=0.9,
        min_p=0.05,
        top_n_sigma=1.5,
        typical_p=0.8,
        epsilon_cutoff=0.001,
        eta_cutoff=0.002,
        repetition_penalty=1.1,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        logit_bias={1: 0.5, 2: -INF},
        allowed_token_ids=(1, 2, 3),
        bad_words_ids=((1, 2),),
        min_tokens=2,
        max_tokens=8,
        stop_token_ids=(3,),
        ignore_eos=True,
        seed=11,
        logprobs=5,
        logprobs_mode="processed",
        logprob_token_ids=(1,),
        rank=True,
    )


def test_frozen() -> None:
    params = full()
    for f in fields(params):
        with pytest.raises(FrozenInstanceError):
            setattr(params, f.name, getattr(params, f.name))
    bias: Any = params.logit_bias
    changes = [
        lambda: bias.__setitem__(1, 9.0),
        lambda: bias.__delitem__(1),
        lambda: bias.__ior__({1: 9.0}),
        lambda: bias.update({1: 9.0}),
        lambda: bias.setdefault(7, 9.0),
        lambda: bias.pop(1),
        bias.popitem,
        bias.clear,
    ]
    for change in changes:
        with pytest.raises(TypeError, match="make new SamplingParams"):
            change()
    assert params == full()


@pytest.mark.parametrize("params", [SamplingParams(), full()], ids=["default", "full"])
def test_pickles_copies_and_hashes(params: SamplingParams) -> None:
    for clone in (
        pickle.loads(pickle.dumps(params)),
        copy.copy(params),
        copy.deepcopy(params),
        replace(params),
    ):
        assert clone == params
        assert hash(clone) == hash(params)
    assert {params: 1}[replace(params)] == 1
    with pytest.raises(TypeError, match="make new SamplingParams"):
        pickle.loads(pickle.dumps(params)).logit_bias[1] = 2.0


def test_equality_sees_every_field() -> None:
    default = SamplingParams()
    for f in fields(default):
        changed = replace(default, **{f.name: getattr(full(), f.name)})
        assert changed != default, f.name


def test_replace_checks_again() -> None:
    with pytest.raises(ValueError, match=r"^top_p = 2 is not accepted"):
        replace(full(), top_p=2)


def test_is_greedy_compares_in_fp32() -> None:
    # fp32(1e-5) is 9.99999974737875163555145263671875e-06; its predecessor is 2**-40 less.
    stored = float(np.float32(1e-5))
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(temperature=stored - 2.0**-40).is_greedy
    assert not SamplingParams(temperature=1e-5).is_greedy
    assert not SamplingParams(temperature=stored).is_greedy
    assert not SamplingParams(temperature=stored - 2.0**-60).is_greedy  # rounds up to it
    assert not SamplingParams().is_greedy


def test_features_of_the_defaults() -> None:
    assert SamplingParams().features() == frozenset()
    assert SamplingParams(temperature=0.3, seed=5).features() == frozenset()


def test_features_name_what_is_on() -> None:
    always_served = {"temperature", "seed"}
    assert full().features() == {f.name for f in fields(SamplingParams)} - always_served


@pytest.mark.parametrize("name", sorted({f.name for f in fields(SamplingParams)}))
def test_each_feature_alone(name: str) -> None:
    alone = replace(SamplingParams(), **{name: getattr(full(), name)})
    assert alone.features() == {name} - {"temperature", "seed"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_k", 0),
        ("top_k", -1),
        ("top_p", 1),
        ("top_p", 1 - 1e-9),  # 1 where fp32 stores it
        ("min_p", 1e-60),
        ("top_n_sigma", 1e-60),
        ("typical_p", 1 - 1e-9),
        ("epsilon_cutoff", 1e-60),
        ("eta_cutoff", 1e-60),
        ("repetition_penalty", 1 + 1e-9),
        ("frequency_penalty", -1e-60),
        ("presence_penalty", -0.0),
        ("logit_bias", {}),
        ("bad_words_ids", []),
        ("stop_token_ids", []),
        ("logprobs_mode", "raw"),
    ],
)
def test_features_leave_out_what_is_off(name: str, value: Any) -> None:
    assert SamplingParams(**{name: value}).features() == frozenset()


def test_logprobs_zero_is_a_feature() -> None:
    assert SamplingParams(logprobs=0).features() == {"logprobs"}


def test_children_differ_in_the_seed_alone() -> None:
    parent = full()
    children = [parent.child(i) for i in range(100)]
    seeds = {c.seed for c in children}
    assert len(seeds) == 100
    assert parent.seed not in seeds
    assert all(replace(c, seed=parent.seed) == parent for c in children)
    assert parent.child(3) == children[3]


def test_children_of_neighbouring_seeds_differ() -> None:
    seeds = {SamplingParams(seed=s).child(i).seed for s in range(32) for i in range(32)}
    assert len(seeds) == 32 * 32


def test_a_childs_seed_is_no_word_that_draws_tokens() -> None:
    drawn = {philox.word(11, i, stream) for i in range(100) for stream in range(4)}
    assert not drawn & {full().child(i).seed for i in range(100)}


def test_a_child_without_a_seed_draws_its_own() -> None:
    assert SamplingParams().child(3).seed is None


@pytest.mark.parametrize("index", [-1, 2**64, 1.0, True, None])
def test_refused_child(index: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^index = .* is not accepted: it must be an integer in \[0, 2\*\*64\)"
    ):
        full().child(index)


def test_a_refusal_of_a_backend_is_a_value_error() -> None:
    assert issubclass(UnsupportedFeatureError, ValueError)


@given(
    st.floats(allow_nan=True),
    st.sampled_from([f.name for f in fields(SamplingParams) if isinstance(f.default, float)]),
)
def test_any_float_is_either_stored_or_refused(value: float, name: str) -> None:
    try:
        params = SamplingParams(**{name: value})  # type: ignore[arg-type]
    except ValueError as error:
        assert str(error).startswith(f"{name} = ")
    else:
        assert getattr(params, name) == value
        assert np.isfinite(np.float32(value))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bad_words_ids", torch.tensor(1)),
        ("bad_words_ids", torch.tensor([1, 2])),
        ("stop_token_ids", np.array(1)),
        ("logprobs_mode", np.array("raw")),
        ("logprobs_mode", np.array(["raw", "raw"])),
        ("top_k", torch.tensor(True)),
    ],
)
def test_arrays_of_the_wrong_shape_or_type_are_named(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})
