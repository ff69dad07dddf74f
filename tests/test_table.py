"""`RequestTable`: slots, what is accepted, what reaches the device, and at what cost."""

from __future__ import annotations

import math
import os
import pickle
import threading
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch

from graphed_sampling import (
    GraphedSampler,
    RequestTable,
    Sampler,
    SamplingParams,
    TableFullError,
    UnsupportedFeatureError,
    backends,
    new_output,
    new_scratch,
)
from graphed_sampling.layout import HEADER_WORDS, FinishReason, Param, ParamFlags, State
from graphed_sampling.sampler import StepInputs
from graphed_sampling.staging import DESCRIPTOR_WORDS

V = 100
PROCESSED = {"logprobs_mode": "processed"}


def device_params() -> list[object]:
    gpu = torch.cuda.is_available()
    marks = [pytest.mark.gpu, pytest.mark.skipif(not gpu, reason="needs a CUDA device")]
    return ["cpu", pytest.param("cuda", marks=marks)]


@pytest.fixture(params=device_params())
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make_table(device: str = "cpu", requests: int = 4, **kwargs: object) -> RequestTable:
    arguments: dict[str, object] = {"eos_token_ids": (2,), "seed": 5, **kwargs}
    return RequestTable(requests, V, device=device, **arguments)  # type: ignore[arg-type]


def bitmap(table: RequestTable, start: int, slot: int) -> set[int]:
    words = table.layout.bitmap_words
    row = table.tables[start + slot * words :][:words].cpu().numpy()
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def counts(table: RequestTable, slot: int) -> list[int]:
    start = table.layout.counts + slot * V
    return table.tables[start : start + V].tolist()


# Slots.


def test_slots_are_given_lowest_first_and_given_back() -> None:
    table = make_table()
    assert [table.admit(SamplingParams()) for _ in range(4)] == [0, 1, 2, 3]
    assert table.num_free_slots == 0
    with pytest.raises(TableFullError, match="all 4 slots"):
        table.admit(SamplingParams())
    table.release(2)
    table.release(0)
    assert table.num_free_slots == 2
    assert [table.admit(SamplingParams()) for _ in range(2)] == [0, 2]


def test_engines_may_own_the_slot_numbers() -> None:
    table = make_table()
    assert table.admit(SamplingParams(), slot=2) == 2
    assert [table.admit(SamplingParams()) for _ in range(2)] == [0, 1]
    for slot in (2, 4, -1):
        with pytest.raises(ValueError, match=rf"slot = {slot} is not accepted"):
            table.admit(SamplingParams(), slot=slot)
    assert table.admit(SamplingParams()) == 3


def test_the_list_of_free_slots_does_not_grow() -> None:
    table = make_table()
    for _ in range(100):
        table.release(table.admit(SamplingParams(), slot=3))
        table.release(table.admit(SamplingParams()))
    assert len(table._free) <= 4
    assert [table.admit(SamplingParams()) for _ in range(4)] == [0, 1, 2, 3]


def test_tables_cannot_be_copied() -> None:
    table = make_table()
    for copy in (pickle.dumps, deepcopy):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            copy(table)


def test_stop_ids_that_are_eos_ids_take_no_room() -> None:
    table = make_table(eos_token_ids=(1, 2), max_stop_ids=1)
    table.admit(SamplingParams(stop_token_ids=[1, 2, 5]))
    with pytest.raises(ValueError, match="stop_token_ids has 2 entries"):
        table.admit(SamplingParams(stop_token_ids=[1, 2, 5, 6]))


def test_release_takes_only_what_is_admitted() -> None:
    table = make_table()
    slot = table.admit(SamplingParams())
    table.release(slot)
    for wrong in (slot, 3, 4, -1):
        with pytest.raises(ValueError, match=f"slot = {wrong}"):
            table.release(wrong)
    with pytest.raises(ValueError, match="slot = True"):
        table.release(True)


def test_generations_tell_the_tenants_of_a_slot_apart(device: str) -> None:
    table = make_table(device)
    for expected in (1, 2, 3):
        slot = table.admit(SamplingParams())
        assert table.request(slot).generation == expected
        table.upload()
        assert table.state[slot, State.GENERATION] == expected
        table.release(slot)


# What is accepted.


@pytest.mark.parametrize(
    ("match", "kwargs"),
    [
        ("max_requests = 0", {"max_requests": 0}),
        ("max_requests = 1.5", {"max_requests": 1.5}),
        ("vocab_size = 0", {"vocab_size": 0}),
        ("vocab_size = 4194305", {"vocab_size": 2**22 + 1}),
        ("vocab_size = True", {"vocab_size": True}),
        ("max_logprobs = -1", {"max_logprobs": -1}),
        ("max_logit_bias = -1", {"max_logit_bias": -1}),
        ("max_stop_ids = -1", {"max_stop_ids": -1}),
        ("max_bad_words = -1", {"max_bad_words": -1}),
        (
            r"max_bad_words \* max_bad_word_length = 1050624 is not accepted",
            {"max_bad_words": 2048, "max_bad_word_length": 513},
        ),
        ("max_bad_word_length = 0", {"max_bad_word_length": 0}),
        ("max_logprob_ids = -1", {"max_logprob_ids": -1}),
        ("eos_token_ids holds the id 100", {"eos_token_ids": (100,)}),
        ("eos_token_ids must be", {"eos_token_ids": (1.5,)}),
        ("eos_token_ids = 5", {"eos_token_ids": 5}),
        ("seed = 'x'", {"seed": "x"}),
        ("seed = 18446744073709551616", {"seed": 2**64}),
        ("penalties = 'no'", {"penalties": "no"}),
        ("device = None", {"device": None}),
        ("device = 'meta'", {"device": "meta"}),
        ("device = 'foo'", {"device": "foo"}),
        ("device = 'cuda:99'", {"device": "cuda:99"}),
        ("device = 99", {"device": 99}),
        ("device = 1.5", {"device": 1.5}),
    ],
)
def test_tables_name_what_they_do_not_accept(match: str, kwargs: dict[str, object]) -> None:
    arguments: dict[str, object] = {"max_requests": 2, "vocab_size": V, "device": "cpu", **kwargs}
    with pytest.raises(ValueError, match=match):
        RequestTable(**arguments)  # type: ignore[arg-type]


def test_samplers_and_their_memory_name_what_they_do_not_accept() -> None:
    table: Any = make_table()
    wrong: Any
    for wrong in (None, 5, ["torch"]):
        with pytest.raises(ValueError, match="is not known; there are cpu"):
            Sampler(table, wrong)
        with pytest.raises(ValueError, match="table is "):
            Sampler(wrong)
    for wrong in (-1, 1.5, True):
        with pytest.raises(ValueError, match=f"rows = {wrong}"):
            new_output(table, wrong)
        with pytest.raises(ValueError, match=f"rows = {wrong}"):
            new_scratch(table, "torch", wrong)


@pytest.mark.parametrize(
    ("match", "params"),
    [
        (
            "logit_bias has 4 entries: the table was made for at most 3",
            {"logit_bias": dict.fromkeys(range(4), 1.0)},
        ),
        ("logit_bias holds the id 100", {"logit_bias": {100: 1.0}}),
        ("stop_token_ids has 3 entries", {"stop_token_ids": [1, 3, 4]}),
        ("stop_token_ids holds the id 100", {"stop_token_ids": [100]}),
        ("bad_words_ids has 3 entries", {"bad_words_ids": [[1]] * 3}),
        ("bad_words_ids holds a sequence of 4 ids", {"bad_words_ids": [[1, 2, 3, 4]]}),
        ("bad_words_ids holds the id 100", {"bad_words_ids": [[1, 100]]}),
        ("allowed_token_ids holds the id 100", {"allowed_token_ids": [1, 100]}),
        ("logprob_token_ids has 3 entries", {"logprob_token_ids": [1, 2, 3]}),
        ("logprob_token_ids holds the id 100", {"logprob_token_ids": [100]}),
        (r"logprobs = 6 is not accepted: it must be None or in \[0, 5\]", {"logprobs": 6}),
    ],
)
def test_admit_and_update_refuse_what_the_table_was_not_made_for(
    match: str, params: dict[str, object]
) -> None:
    table = make_table(
        max_logit_bias=3,
        max_stop_ids=2,
        max_bad_words=2,
        max_bad_word_length=3,
        max_logprob_ids=2,
        max_logprobs=5,
    )
    slot = table.admit(SamplingParams(top_k=7))
    table.upload()
    before = table.params.clone(), table.state.clone()
    with pytest.raises(ValueError, match=match):
        table.admit(SamplingParams(**params))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=match):
        table.update(slot, SamplingParams(**params))  # type: ignore[arg-type]
    assert table.num_free_slots == 3
    table.upload()
    assert torch.equal(table.params, before[0])
    assert torch.equal(table.state, before[1])


@pytest.mark.parametrize("name", ["repetition_penalty", "frequency_penalty", "presence_penalty"])
def test_a_table_without_penalties_has_no_counts_and_says_so(name: str) -> None:
    table = make_table(penalties=False)
    assert table.tables.numel() == 5 * 4  # a bitmap of 100 bits for each of 4 + 1 rows
    assert set(table.bytes_per_slot) == {"params", "state", "allowed_bits"}
    with pytest.raises(ValueError, match=f"{name} = 1.5.*penalties=False"):
        table.admit(SamplingParams(**{name: 1.5}))
    table.admit(SamplingParams(), prompt_token_ids=[1], output_token_ids=[2])
    table.upload()


@pytest.mark.parametrize(
    ("match", "args", "kwargs"),
    [
        ("prompt_token_ids holds the id 100", ([1, 100],), {}),
        ("prompt_token_ids holds the id -1", ([1, -1],), {}),
        ("prompt_token_ids must be", ([1.0],), {}),
        ("prompt_token_ids must be", ([[1]],), {}),
        ("prompt_token_ids must be", ([[1], [1, 2]],), {}),
        ("prompt_token_ids must be", (torch.tensor([1, 2]).to_sparse(),), {}),
        ("prompt_token_ids must be", (torch.tensor([1.0], dtype=torch.bfloat16),), {}),
        ("prompt_token_ids must be", (torch.tensor([1.0], requires_grad=True),), {}),
        ("output_token_ids holds the id 100", ((),), {"output_token_ids": [100]}),
        ("num_prompt_tokens = 3 is not accepted", ([1],), {"num_prompt_tokens": 3}),
        ("num_prompt_tokens = -1", ((),), {"num_prompt_tokens": -1}),
        ("max_tokens = 2 is not accepted", ((),), {"output_token_ids": [1, 1]}),
    ],
)
def test_admit_checks_prompt_and_output(
    match: str, args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    table = make_table()
    with pytest.raises(ValueError, match=match):
        table.admit(SamplingParams(max_tokens=2), *args, **kwargs)  # type: ignore[arg-type]
    assert table.num_free_slots == 4
    with pytest.raises(ValueError, match="params is dict"):
        table.admit({"top_k": 1})  # type: ignore[arg-type]


def test_token_ids_come_as_lists_arrays_and_tensors() -> None:
    table = make_table()
    for ids in ([5, 6], (5, 6), np.array([5, 6]), torch.tensor([5, 6]), np.array([5, 6], np.uint8)):
        slot = table.admit(SamplingParams(), prompt_token_ids=ids)
        table.upload()
        assert table.last_token_ids[slot] == 6
        assert bitmap(table, table.layout.prompt_bits, slot) == {5, 6}
        table.release(slot)


def test_a_backend_s_refusals_hold_while_its_sampler_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backends.module("torch"), "REFUSES", frozenset({"typical_p", "top_k"}))
    table = make_table()
    slot = table.admit(SamplingParams(typical_p=0.5))
    with pytest.raises(UnsupportedFeatureError, match=r"'torch' does not support typical_p = 0.5"):
        Sampler(table, "torch")
    table.release(slot)
    for make in (Sampler, GraphedSampler):
        sampler = make(table, backend="torch")
        with pytest.raises(UnsupportedFeatureError, match=r"typical_p = 0\.5"):
            table.admit(SamplingParams(typical_p=0.5))
        slot = table.admit(SamplingParams(min_p=0.5))
        with pytest.raises(UnsupportedFeatureError, match="top_k = 3"):
            table.update(slot, SamplingParams(top_k=3))
        # What is off, or means nothing for the request, is not needed.
        table.update(slot, SamplingParams(top_k=V, typical_p=1.0))
        table.update(slot, SamplingParams(temperature=0.0, typical_p=0.5))
        table.release(slot)
        del sampler
        slot = table.admit(SamplingParams(typical_p=0.5))
        table.release(slot)


# What reaches the device.


def test_admission_sets_the_state(device: str) -> None:
    table = make_table(device)
    slot = table.admit(
        SamplingParams(), prompt_token_ids=[7, 8, 8], output_token_ids=[9, 3, 9, 4, 1, 0, 5, 6, 9]
    )
    bare = table.admit(SamplingParams(), num_prompt_tokens=12)
    nothing = table.admit(SamplingParams())
    table.upload()
    assert table.positions.tolist() == [12, 12, 0, 0]
    assert table.last_token_ids.tolist()[:3] == [9, -1, -1]
    assert table.state[slot, State.NUM_GENERATED] == 9
    recent = table.state[slot, State.RECENT : State.RECENT + 7].tolist()
    assert recent == [9, 6, 5, 0, 1, 4, 9]  # newest first: what the longest bad word looks at
    assert bitmap(table, table.layout.prompt_bits, slot) == {7, 8}
    assert bitmap(table, table.layout.output_bits, slot) == {0, 1, 3, 4, 5, 6, 9}
    row = counts(table, slot)
    assert row[9] == 3 and row[3] == row[0] == 1
    assert bitmap(table, table.layout.prompt_bits, bare) == set()
    assert table.state[nothing, State.NUM_GENERATED] == 0


def test_a_slot_s_next_tenant_finds_nothing_of_the_last(device: str) -> None:
    table = make_table(device)
    first = table.admit(
        SamplingParams(allowed_token_ids=[5], stop_token_ids=[1], logit_bias={3: 1.0}),
        prompt_token_ids=[7],
        output_token_ids=[9, 9],
    )
    table.upload()
    table.release(first)
    second = table.admit(SamplingParams(frequency_penalty=1.0), prompt_token_ids=[1, 2])
    assert second == first
    table.upload()
    assert bitmap(table, table.layout.prompt_bits, second) == {1, 2}
    assert bitmap(table, table.layout.output_bits, second) == set()  # so its counts mean nothing
    header = table.params[second, :HEADER_WORDS].cpu().numpy()
    assert header[Param.NUM_BIAS] == 0
    assert header[Param.NUM_STOP] == 1  # the table's EOS id
    assert not header[Param.FLAGS] & ParamFlags.ALLOWED


def test_the_header_holds_what_fp32_stores(device: str) -> None:
    table = make_table(device)
    params = SamplingParams(
        temperature=0.7, top_k=9, top_p=0.9, min_p=0.05, seed=-1, max_tokens=8, min_tokens=3,
        logprobs=4, logprobs_mode="processed", rank=True, presence_penalty=0.3,
    )  # fmt: skip
    slot = table.admit(params)
    greedy = table.admit(SamplingParams(temperature=9e-6, top_k=9, min_p=0.5))
    off = table.admit(SamplingParams(top_k=V, top_p=1 - 1e-9))
    table.upload()
    headers = table.params[:, :HEADER_WORDS].cpu().numpy()
    header, real = headers[slot], headers[slot].view(np.float32)
    assert real[Param.TEMPERATURE] == np.float32(0.7)
    assert real[Param.TOP_P] == np.float32(0.9)
    assert header[Param.TOP_K] == 9
    assert (header[Param.MIN_TOKENS], header[Param.MAX_TOKENS]) == (3, 8)
    assert headers[slot].view(np.int64)[Param.SEED // 2] == -1
    expected = float(np.float32(0.7)) * math.log(float(np.float32(0.05)))
    assert header.view(np.float64)[Param.MIN_P_OFFSET // 2] == expected
    flags = ParamFlags(int(header[Param.FLAGS]))
    assert flags == (
        ParamFlags.ADMITTED
        | ParamFlags.FILTERED
        | ParamFlags.LOGPROBS
        | ParamFlags.PROCESSED
        | ParamFlags.RANK
        | ParamFlags.PENALTIES
        | ParamFlags.LISTS
    )
    scale = math.log2(math.e) / float(np.float32(0.7))
    assert header.view(np.float64)[Param.WIDE_SCALE // 2] == scale
    assert real[Param.SCALE] == np.float32(scale)
    assert ParamFlags(int(headers[greedy][Param.FLAGS])) == ParamFlags.ADMITTED | ParamFlags.GREEDY
    assert headers[greedy][Param.TOP_K] == 0
    assert headers[greedy].view(np.float32)[Param.TEMPERATURE] == 1.0
    assert headers[greedy].view(np.float32)[Param.SCALE] == np.float32(math.log2(math.e))
    assert ParamFlags(int(headers[off][Param.FLAGS])) == ParamFlags.ADMITTED | ParamFlags.TOTAL


def flags_of(device: str, params: dict[str, Any]) -> ParamFlags:
    """Those of the header of a request that has been uploaded."""
    table = make_table(device)
    slot = table.admit(SamplingParams(**params))
    table.upload()
    return ParamFlags(int(table.params[slot, Param.FLAGS]))


@pytest.mark.parametrize(
    "params, expected",
    [
        ({}, ParamFlags.TOTAL),
        ({"logprobs": 0}, ParamFlags.TOTAL | ParamFlags.RAW),
        ({"rank": True}, ParamFlags.TOTAL | ParamFlags.RAW),
        ({"logprob_token_ids": [1]}, ParamFlags.TOTAL | ParamFlags.RAW),
        ({"logprobs": 0, "logprobs_mode": "processed"}, ParamFlags.TOTAL),
        ({"top_p": 0.9}, ParamFlags.TOTAL),
        ({"epsilon_cutoff": 0.1}, ParamFlags.TOTAL),
        ({"typical_p": 0.9}, ParamFlags.TOTAL | ParamFlags.MEAN),
        ({"eta_cutoff": 0.1}, ParamFlags.TOTAL | ParamFlags.MEAN),
        ({"typical_p": 0.9, "top_p": 0.9}, ParamFlags.TOTAL),
        ({"top_k": 5, "typical_p": 0.9}, ParamFlags(0)),
        ({"min_p": 0.1, "top_p": 0.9}, ParamFlags(0)),
        ({"top_n_sigma": 1.0, "eta_cutoff": 0.1}, ParamFlags(0)),
        ({"temperature": 0.0, "typical_p": 0.9}, ParamFlags(0)),
        ({"logit_bias": {1: 1.0}}, ParamFlags.TOTAL | ParamFlags.LISTS),
        ({"bad_words_ids": [[1]]}, ParamFlags.TOTAL | ParamFlags.LISTS),
        ({"min_tokens": 1}, ParamFlags.TOTAL | ParamFlags.LISTS),
        ({"stop_token_ids": [1]}, ParamFlags.TOTAL),
    ],
    ids=str,
)
def test_the_header_says_what_sums_a_row_needs(
    device: str, params: dict[str, Any], expected: ParamFlags
) -> None:
    flags = flags_of(device, params)
    mask = ParamFlags.TOTAL | ParamFlags.MEAN | ParamFlags.RAW | ParamFlags.LISTS
    assert flags & mask == expected


@pytest.mark.parametrize(
    "params, lowered",
    [
        ({"top_k": 2, "repetition_penalty": 1.1}, True),
        ({"top_k": 2, "top_p": 0.9, "presence_penalty": 0.1, "logprobs": 3, "rank": True}, True),
        ({"temperature": 0.0, "frequency_penalty": 0.1, "top_p": 0.9}, True),
        ({"top_k": 2, "frequency_penalty": 0.1, "logprobs": 0, **PROCESSED}, True),
        ({"top_k": 2, "frequency_penalty": 0.1, "logprobs": 1, **PROCESSED}, False),
        ({"top_k": 2, "frequency_penalty": 0.1, "rank": True, **PROCESSED}, False),
        ({"top_k": 2}, False),
        ({"top_p": 0.9, "repetition_penalty": 1.1}, False),
        ({"top_k": V, "repetition_penalty": 1.1}, False),
        ({"top_k": 2, "min_p": 0.1, "repetition_penalty": 1.1}, False),
        ({"top_k": 2, "typical_p": 0.9, "repetition_penalty": 1.1}, False),
        ({"top_k": 2, "repetition_penalty": 0.9}, False),
        ({"top_k": 2, "repetition_penalty": 1.1, "frequency_penalty": -0.1}, False),
        ({"top_k": 2, "repetition_penalty": 1.1, "presence_penalty": -0.1}, False),
        ({"top_k": 2, "repetition_penalty": 1.1, "allowed_token_ids": [1]}, False),
        ({"top_k": 2, "repetition_penalty": 1.1, "logit_bias": {1: -1.0}}, False),
        ({"top_k": 2, "repetition_penalty": 1.1, "bad_words_ids": [[1]]}, False),
    ],
    ids=str,
)
def test_the_header_says_whether_no_logit_rises_and_the_best_are_wanted(
    device: str, params: dict[str, Any], lowered: bool
) -> None:
    assert bool(flags_of(device, params) & ParamFlags.LOWERED) == lowered


@pytest.mark.parametrize(
    "name_slot", [torch.tensor, np.int32, np.array], ids=["0-d", "numpy", "array"]
)
def test_any_integer_names_a_slot(name_slot: Any) -> None:
    """What is told last counts, and free slots stay what they are."""
    table = RequestTable(2, 10, device="cpu")
    sampler = Sampler(table)
    slots = torch.tensor([table.admit(SamplingParams()) for _ in range(2)], dtype=torch.int32)

    def tokens() -> list[int]:
        return sampler(torch.zeros(2, 10), slots).token_ids.tolist()  # type: ignore[no-any-return]

    for slot in (0, 1):
        table.release(name_slot(slot))
    for _ in range(2):
        assert type(table.admit(SamplingParams(allowed_token_ids=[5]))) is int
    assert table.num_free_slots == 0 and tokens() == [5, 5]
    table.update(0, SamplingParams(allowed_token_ids=[3]))
    table.update(name_slot(0), SamplingParams(allowed_token_ids=[4]))
    table.update(0, SamplingParams(allowed_token_ids=[6]))
    assert tokens() == [6, 5]


def test_update_changes_parameters_and_nothing_of_the_state(device: str) -> None:
    table = make_table(device)
    slot = table.admit(SamplingParams(seed=77), prompt_token_ids=[1, 2])
    table.upload()
    state, tables = table.state.clone(), table.tables.clone()
    table.update(slot, SamplingParams(top_k=3))
    assert table.request(slot).seed == 77  # None keeps it
    table.upload()
    assert table.params[slot, Param.TOP_K] == 3
    assert table.params[slot].cpu().view(torch.int64)[Param.SEED // 2] == 77
    table.update(slot, SamplingParams(seed=78))
    table.upload()
    assert table.params[slot].cpu().view(torch.int64)[Param.SEED // 2] == 78
    assert torch.equal(table.state, state)
    assert torch.equal(table.tables, tables)
    with pytest.raises(ValueError, match="slot = 3"):
        table.update(3, SamplingParams())


def test_a_lower_max_tokens_ends_the_request_at_once(device: str) -> None:
    table = make_table(device)
    slot = table.admit(SamplingParams(temperature=0.0, max_tokens=9), [1], output_token_ids=[2, 3])
    sampler = Sampler(table)
    logits, slots = torch.zeros(1, V, device=device), torch.tensor([slot], dtype=torch.int32)
    for _ in range(3):
        assert sampler(logits, slots).finish_reason.tolist() == [FinishReason.NONE]
    table.update(slot, SamplingParams(temperature=0.0, max_tokens=2))
    assert sampler(logits, slots).finish_reason.tolist() == [FinishReason.LENGTH]
    assert table.positions[slot] == 7


def test_requests_without_a_seed_get_the_table_s_own_stream() -> None:
    def seeds(table_seed: int | None) -> list[int]:
        table = make_table(seed=table_seed)
        return [table.request(table.admit(SamplingParams())).seed for _ in range(4)]

    assert seeds(1) == seeds(1)
    assert len({*seeds(1), *seeds(2), *seeds(None), *seeds(None)}) == 16


def test_addresses_never_change(device: str) -> None:
    table = make_table(device)
    before = [t.data_ptr() for t in (table.params, table.state, table.tables, table.positions)]
    for _ in range(3):
        slot = table.admit(SamplingParams(), prompt_token_ids=[1])
        Sampler(table, "torch")(
            torch.zeros(1, V, device=device), torch.tensor([slot], dtype=torch.int32)
        )
        table.release(slot)
    after = [t.data_ptr() for t in (table.params, table.state, table.tables, table.positions)]
    assert before == after


# At what cost.


def test_only_changed_rows_are_uploaded(device: str) -> None:
    """512 slots, 8 of them changed: one copy of 8 headers, and nothing when nothing changed."""
    table = RequestTable(512, V, device=device)
    for _ in range(512):
        table.admit(SamplingParams())
    table.upload()
    before = table.params.clone()
    copies, sent = table.staging_stats.copies, table.staging_stats.bytes
    table.upload()
    assert (table.staging_stats.copies, table.staging_stats.bytes) == (copies, sent)
    changed = list(range(0, 512, 64))
    for slot in changed:
        table.update(slot, SamplingParams(top_k=slot + 1, seed=slot))
    table.upload()
    assert table.staging_stats.copies == copies + 1
    assert table.staging_stats.bytes - sent == 8 * 4 * (HEADER_WORDS + DESCRIPTOR_WORDS)
    different = (table.params != before).any(1).nonzero().flatten().tolist()
    assert different == changed


def test_changes_of_one_slot_are_sent_once() -> None:
    table = make_table()
    slot = table.admit(SamplingParams())
    table.upload()
    sent = table.staging_stats.bytes
    for k in range(1, 50):
        table.update(slot, SamplingParams(top_k=k))
    table.upload()
    assert table.staging_stats.bytes - sent == 4 * (HEADER_WORDS + 1 + 2 * DESCRIPTOR_WORDS)
    assert table.params[slot, Param.TOP_K] == 49


def test_a_long_prompt_is_sent_in_pieces(device: str) -> None:
    """More than a ring entry holds: 100,000 output tokens, most of them different."""
    vocab_size = 128256
    table = RequestTable(2, vocab_size, device=device)
    table.admit(SamplingParams())
    rng = np.random.default_rng(0)
    prompt, output = rng.integers(vocab_size, size=(2, 100_000))
    slot = table.admit(SamplingParams(), prompt_token_ids=prompt, output_token_ids=output)
    table.upload()
    assert table.staging_stats.copies > 1
    layout = table.layout
    assert bitmap(table, layout.prompt_bits, slot) == set(prompt.tolist())
    assert bitmap(table, layout.output_bits, slot) == set(output.tolist())
    start = layout.counts + slot * vocab_size
    row = table.tables[start : start + vocab_size].cpu().numpy()
    assert np.array_equal(row, np.bincount(output, minlength=vocab_size))
    assert table.positions.tolist() == [0, 200_000]


def test_bytes_per_slot_are_those_of_the_tensors() -> None:
    for penalties in (False, True):
        table = make_table(penalties=penalties)
        total = sum(4 * t.numel() for t in (table.params, table.state, table.tables))
        assert sum(table.bytes_per_slot.values()) * table.layout.rows == total


# Threads and processes.


def test_admissions_from_many_threads_are_all_there() -> None:
    table = RequestTable(64, V, device="cpu")
    slots: list[list[int]] = [[] for _ in range(8)]

    def work(own: list[int]) -> None:
        for _ in range(50):
            slot = table.admit(SamplingParams(top_k=3), prompt_token_ids=[1, 2])
            table.upload()
            table.release(slot)
        own.extend(table.admit(SamplingParams(top_k=5)) for _ in range(8))

    threads = [threading.Thread(target=work, args=(own,)) for own in slots]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(s for own in slots for s in own) == list(range(64))
    table.upload()
    assert (table.params[:64, Param.TOP_K] == 5).all()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_after_a_fork_the_table_refuses_to_be_used() -> None:
    table = make_table()
    slot = table.admit(SamplingParams())
    calls = (
        lambda: table.admit(SamplingParams()),
        lambda: table.update(slot, SamplingParams()),
        lambda: table.release(slot),
        lambda: table.upload(),
    )
    child = os.fork()
    if child == 0:
        refused = 0
        for call in calls:
            try:
                call()
            except RuntimeError as error:
                refused += "after a fork" in str(error)
        os._exit(refused)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == len(calls)


# Steps, and what other threads or failures do between their parts.


def slots_of(*slots: int) -> torch.Tensor:
    return torch.tensor(slots, dtype=torch.int32)


@pytest.mark.parametrize("make", [Sampler, GraphedSampler])
def test_slots_that_were_released_are_refused_although_they_are_last_step_s(
    make: type[Sampler] | type[GraphedSampler], device: str
) -> None:
    table = make_table(device)
    slot = table.admit(SamplingParams())
    sampler = make(table, backend="torch")
    logits = torch.zeros(1, V, device=device)
    sampler(logits, slots_of(slot))
    sampler(logits, slots_of(slot))
    table.release(slot)
    with pytest.raises(ValueError, match="is not admitted"):
        sampler(logits, slots_of(slot))


@pytest.mark.parametrize("make", [Sampler, GraphedSampler])
def test_a_slot_that_changes_hands_during_a_call_is_refused(
    make: type[Sampler] | type[GraphedSampler], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = make_table(device)
    slot, other = table.admit(SamplingParams()), table.admit(SamplingParams())
    sampler = make(table, backend="torch")
    logits = torch.zeros(1, V, device=device)
    upload = table.upload

    def give_away(claim: object) -> None:
        table.release(slot)
        table.admit(SamplingParams(), [4] * 10, slot=slot)
        upload(claim)  # type: ignore[arg-type]

    def change_another(claim: object) -> None:
        table.release(other)
        upload(claim)  # type: ignore[arg-type]

    monkeypatch.setattr(table, "upload", give_away)
    with pytest.raises(ValueError, match=f"slot {slot} was given to another request"):
        sampler(logits, slots_of(slot))
    monkeypatch.setattr(table, "upload", upload)
    table.upload()
    assert table.positions[slot] == 10  # the new request did not step
    monkeypatch.setattr(table, "upload", change_another)
    sampler(logits, slots_of(slot))
    assert table.positions[slot] == 11


def test_more_rows_than_slots_and_a_growth_that_fails(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = make_table(device, requests=2)
    slot = table.admit(SamplingParams(allowed_token_ids=[7]))
    sampler = Sampler(table, "torch")
    logits = torch.zeros(5, V, device=device)
    slots = slots_of(-1, -1, slot, -1, -1)

    def fail(*_args: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr("graphed_sampling.sampler.new_output", fail)
        sampler(logits, slots)
    assert sampler(logits, slots).token_ids.tolist() == [-1, -1, 7, -1, -1]
    assert sampler(logits[:1], slots[2:3]).token_ids.tolist() == [7]


def test_an_admission_that_fails_leaves_its_slot_free(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = []
    for fails in (False, True):
        table = make_table(requests=2)

        def fail(*_args: object) -> None:
            raise MemoryError

        if fails:
            with monkeypatch.context() as patch, pytest.raises(MemoryError):
                patch.setattr("graphed_sampling.table.pack_state", fail)
                table.admit(SamplingParams())
            table.register_refusals(table, "some", frozenset({"top_k"}))
            with pytest.raises(UnsupportedFeatureError):
                table.admit(SamplingParams(top_k=3))
        slots = [table.admit(SamplingParams()) for _ in range(2)]
        assert slots == [0, 1]
        seeds.append([table.request(s).seed for s in slots])
        assert [table.request(s).generation for s in slots] == [1, 1]
    assert seeds[0] == seeds[1]


def test_slots_whose_upload_failed_are_uploaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device holds one thing and the host remembers another: only until the next step."""
    inputs = StepInputs(make_table(), 4)

    class Elsewhere:
        """A CPU tensor as a GPU's inputs see it: on another device."""

        shape, device = (1,), torch.device("meta")

        def __init__(self, slot: int) -> None:
            self.numpy = lambda: np.array([slot], np.int32)

    def interrupt(*_args: object) -> None:
        raise KeyboardInterrupt

    inputs.set_slots(Elsewhere(0), 2)  # type: ignore[arg-type]
    assert inputs.slots.tolist() == [0, -1, -1, -1]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("graphed_sampling.staging.PinnedRing.release", interrupt)
        inputs.set_slots(Elsewhere(1), 2)  # type: ignore[arg-type]
    inputs.set_slots(Elsewhere(0), 2)  # type: ignore[arg-type]
    assert inputs.slots.tolist() == [0, -1, -1, -1]
    inputs.slots.fill_(9)
    inputs.set_slots(Elsewhere(0), 4)  # type: ignore[arg-type]  # more padding than before
    assert inputs.slots.tolist() == [0, -1, -1, -1]


@pytest.mark.parametrize("backend", backends.NAMES)
def test_given_tells_which_inputs_count(backend: str) -> None:
    if backends.module(backend).unusable(torch.device("cpu")):
        pytest.skip(backends.module(backend).unusable(torch.device("cpu")))
    if "words" in backends.module(backend).REFUSES:
        pytest.skip(f"{backend} refuses words")
    table = make_table(requests=1)
    slot = table.admit(SamplingParams(seed=4))
    mask = torch.zeros(1, table.layout.bitmap_words, dtype=torch.int32)
    mask[0, 0] = 1 << 9 | 1 << 11
    drawn = {}
    for given in ((0, 0), (0, 1), (1, 0), (1, 1)):
        output = new_output(table, 1)
        table.upload()
        state, tables = table.state.clone(), table.tables.clone()
        torch.ops.graphed_sampling.sample_step(
            torch.zeros(1, V), slots_of(slot), table.params, state, tables, output.record,
            new_scratch(table, backend, 1), table.layout.to_ints(), backend,
            grammar_bitmask=mask, words=torch.tensor([-1]), given=slots_of(*given),
        )  # fmt: skip
        drawn[given] = int(output.token_ids)
    assert drawn[0, 1] == V - 1  # the last of the 2**64 words
    assert drawn[1, 1] == 11
    assert drawn[1, 0] in (9, 11)
    assert drawn[0, 0] not in (9, 11, V - 1)


# What several ranks compare.


def test_it_is_known_how_many_requests_want_reports() -> None:
    table = RequestTable(4, V, device="cpu")
    wanted = [
        {}, {"logprobs": 0}, {"rank": True}, {"logprob_token_ids": [3]}
    ]  # fmt: skip
    counts = []
    for values in wanted:
        table.admit(SamplingParams(**values))
        counts.append(table.num_reporting)
    assert counts == [0, 1, 2, 3]
    table.update(0, SamplingParams(logprobs=2))
    table.update(1, SamplingParams())
    assert table.num_reporting == 3
    with pytest.raises(ValueError):
        table.update(3, SamplingParams(logprob_token_ids=[V]))
    for slot in range(4):
        table.release(slot)
    assert table.num_reporting == 0


def test_fingerprints_are_of_slots_and_of_what_was_told_of_them() -> None:
    def told(
        params: SamplingParams = SamplingParams(top_k=3),  # noqa: B008
        prompt: list[int] | None = None,
        slots: tuple[int, ...] = (0, 1, -1),
        others: int = 0,
        seed: int = 5,
    ) -> int:
        table = RequestTable(8, V, device="cpu", seed=seed)
        table.admit(params, prompt or [1, 2], slot=0)
        table.admit(SamplingParams(seed=1), slot=1)
        for slot in range(others):
            table.admit(SamplingParams(seed=1), slot=2 + slot)
        claim = table.claim_slots(np.array(slots, np.int32))
        return table.fingerprint(claim.slots)

    usual = told()
    assert told() == usual
    assert told(others=3) == usual  # which are not in the step
    assert told(SamplingParams(top_k=4)) != usual
    assert told(SamplingParams(top_k=3, logit_bias={4: 1.0})) != usual
    assert told(prompt=[1, 3]) != usual  # the last token, and what penalties count
    assert told(slots=(1, 0, -1)) != usual and told(slots=(0, 1)) != usual
    assert told(seed=6) != usual  # from which the first request has its own
    table = RequestTable(8, V, device="cpu", seed=5)
    table.admit(SamplingParams(top_k=3), [1, 2])
    slots = np.zeros(1, np.int32)
    before = table.fingerprint(slots)
    table.update(0, SamplingParams(top_k=3))
    assert table.fingerprint(slots) != before  # a change of parameters is one of the history
