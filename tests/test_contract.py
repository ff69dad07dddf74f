"""Every backend computes the function of `reference.sample_row`: row by row, and step by step.

Given the same words or seeds, tokens, kept counts, ranks, ids, flags and finish reasons are equal
and logprobs are within `helpers.LOGPROB_TOLERANCE`. Where the reference itself says that rounding
may decide (`helpers.Tally`), the other outcome is accepted, counted and bounded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    BENIGN_KINDS,
    DTYPES,
    FLT_MAX,
    INF,
    KINDS,
    NAN,
    PLACEMENTS,
    BackendDevice,
    Case,
    CheckedTable,
    check_extreme_words,
    check_spaced_words,
    far_rows,
    place,
    random_bitmask,
    random_params,
    random_row,
    random_words,
)

from graphed_sampling import (
    GraphedSampler,
    RequestTable,
    RowFlags,
    Sampler,
    SamplingParams,
    StepOutput,
    new_output,
    new_scratch,
)
from graphed_sampling.backends import cuda

# Round sizes, and those next to a warp, to a bitmap's word and to nothing at all.
VOCABS = (1, 2, 31, 32, 33, 111, 1000, 32000)
ROWS = (0, 1, 3, 17)


def admit_random(
    checked: CheckedTable, rng: np.random.Generator, count: int, rate: float = 0.25
) -> list[int]:
    """Requests with random parameters, prompts and outputs, in random slots."""
    vocab = checked.table.vocab_size
    slots = [int(s) for s in rng.permutation(checked.table.max_requests)[:count]]
    for slot in slots:
        prompt, output = (
            [int(i) for i in rng.integers(0, vocab, rng.integers(0, 12))] for _ in range(2)
        )
        params = checked.pair.supported(random_params(rng, vocab, output, rate))
        checked.admit(params, prompt, output, slot)
    return slots


def random_rows(
    rng: np.random.Generator, rows: int, vocab: int, kinds: tuple[str, ...]
) -> np.ndarray:
    values = [random_row(rng, vocab, str(rng.choice(kinds))) for _ in range(rows)]
    return np.stack(values) if values else np.zeros((0, vocab), np.float32)


def run_random_steps(
    checked: CheckedTable,
    rng: np.random.Generator,
    slots: list[int],
    steps: int,
    *,
    kinds: tuple[str, ...] = KINDS,
    dtype: torch.dtype = torch.float32,
    placement: str = "contiguous",
    extremes: float = 0.0,
) -> None:
    """Steps with shuffled rows, padding among them, masks and given words now and then."""
    vocab, device = checked.table.vocab_size, checked.pair.device
    for step in range(steps):
        rows = [int(s) for s in rng.permutation(slots)]
        if len(rows) > 2:
            rows[int(rng.integers(len(rows)))] = -1
        values = random_rows(rng, len(rows), vocab, kinds)
        placed = place(values, device, dtype, placement)
        checked.step(
            placed.logits,
            rows,
            bitmask=random_bitmask(rng, len(rows), vocab) if step % 3 == 1 else None,
            words=random_words(rng, len(rows), extremes) if step % 3 != 2 else None,
            device_inputs=bool(step % 2),
        )
        placed.check_unmodified()
    checked.check_state()


@pytest.mark.parametrize("rows", ROWS, ids=lambda n: f"n{n}")
@pytest.mark.parametrize("vocab", VOCABS, ids=lambda v: f"V{v}")
def test_random_rows_equal_the_reference(
    backend_device: BackendDevice, vocab: int, rows: int
) -> None:
    rng = np.random.default_rng([vocab, rows])
    # Three rows are the fewest with padding among them.
    rows = backend_device.rows(
        rows, min(rows, 4 if vocab < 10_000 else 1), min(rows, 3 if vocab < 10_000 else 1)
    )
    checked = CheckedTable(backend_device, vocab, 20, eos_token_ids=[vocab // 2])
    slots = admit_random(checked, rng, rows)
    steps = backend_device.rows(4, 2)
    run_random_steps(checked, rng, slots, steps, extremes=0.2 if vocab < 200 else 0.0)
    if rows:
        # At V = 32000 a twentieth of the mass lies in tokens narrower than the tolerance.
        checked.tally.check(ambiguous=0.2 if vocab < 200 else 0.5)
    else:
        assert checked.tally.rows == 0


@pytest.mark.parametrize("vocab", [128256, 151936], ids=lambda v: f"V{v}")
def test_large_vocabularies_equal_the_reference(backend_device: BackendDevice, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    checked = CheckedTable(backend_device, vocab, 4)
    slots = admit_random(checked, rng, 3)
    steps = backend_device.rows(3, 1)
    run_random_steps(
        checked, rng, slots, steps, dtype=torch.bfloat16, placement="padded", kinds=("zipf", "nan")
    )
    checked.tally.check(ambiguous=0.5)


@pytest.mark.parametrize(
    "filters",
    [
        {"typical_p": 0.5},
        {"typical_p": 0.97},
        {"epsilon_cutoff": 1e-3},
        {"epsilon_cutoff": 0.9},  # nobody reaches it but the largest
        {"eta_cutoff": 1e-3},
        {"eta_cutoff": 0.9},
        {"typical_p": 0.9, "epsilon_cutoff": 1e-3, "eta_cutoff": 1e-2},
        {"min_p": 1e-4, "typical_p": 0.8},
        {"top_n_sigma": 3.0, "eta_cutoff": 1e-3},
    ],
    ids=lambda f: "-".join(f"{name}={value}" for name, value in f.items()),
)
def test_cutoffs_alone_on_large_rows(
    backend_device: BackendDevice, filters: dict[str, Any]
) -> None:
    """Where nothing before them has made the row short: backends bound what can be kept."""
    rng = np.random.default_rng(len(str(filters)))
    vocab, count = 9001, backend_device.rows(24, 2, 1)
    kinds = ("zipf", "smooth", "ties", "holes", "flat", "nan")
    checked = CheckedTable(backend_device, vocab, count)
    for slot in range(count):
        temperature = (0.25, 0.8, 3.0, 30.0)[slot // len(kinds)]
        checked.admit(SamplingParams(temperature=temperature, **filters), slot=slot)
    rows = [random_row(rng, vocab, kinds[slot % len(kinds)]) for slot in range(count)]
    checked.step(torch.from_numpy(np.stack(rows)).to(backend_device.device), range(count))
    checked.tally.check(ambiguous=0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_row_under_many_parameters(backend_device: BackendDevice, kind: str) -> None:
    rng = np.random.default_rng(KINDS.index(kind))
    checked = CheckedTable(backend_device, 37, 64, eos_token_ids=[0, 36])
    slots = admit_random(checked, rng, backend_device.rows(60, 20, 8), rate=0.4)
    run_random_steps(checked, rng, slots, backend_device.rows(3, 1), kinds=(kind,))
    # Subnormal logits differ by less than float64 tells apart in a probability: typical_p and the
    # cutoffs then rank what is equal but for rounding.
    limits = {"ambiguous": 0.3, "differences": 0.15} if kind == "subnormal" else {}
    checked.tally.check(**limits)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_and_memory_layouts(
    backend_device: BackendDevice, dtype: str, placement: str
) -> None:
    rng = np.random.default_rng(11)
    checked = CheckedTable(backend_device, 111, 8)
    slots = admit_random(checked, rng, backend_device.rows(5, 3))
    steps = backend_device.rows(3, 2)
    run_random_steps(checked, rng, slots, steps, dtype=DTYPES[dtype], placement=placement)
    checked.tally.check()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_layout_changes_no_bit(backend_device: BackendDevice, placement: str) -> None:
    """The packed record, bit for bit, against that of the plain copy of the same logits."""
    rows = backend_device.rows(7, 7, 4)
    values = random_rows(np.random.default_rng(3), rows, 1000, BENIGN_KINDS)
    records = []
    for name in ("contiguous", placement):
        rng = np.random.default_rng(5)
        checked = CheckedTable(backend_device, 1000, 7)
        slots = sorted(admit_random(checked, rng, rows))
        logits = place(values, backend_device.device, torch.bfloat16, name).logits
        records.append(checked.step(logits, slots).record)
    assert torch.equal(*records)


@pytest.mark.parametrize("vocab", [1, 5, 33, 200], ids=lambda v: f"V{v}")
def test_state_advances_over_many_steps(backend_device: BackendDevice, vocab: int) -> None:
    """Each step's history is what the steps before it drew, requests coming and going meanwhile."""
    rng = np.random.default_rng(vocab)
    checked = CheckedTable(backend_device, vocab, 9, eos_token_ids=[0])
    for round_number in range(backend_device.rows(6, 4, 3)):
        for slot, request in list(checked.requests.items()):
            if request.finish or rng.random() < 0.2:
                checked.release(slot)
            elif rng.random() < 0.3:
                params = random_params(rng, vocab, request.output)
                checked.update(slot, backend_device.supported(params))
        free = [s for s in range(9) if s not in checked.requests]
        for slot in free[:4]:
            prompt = [int(i) for i in rng.integers(0, vocab, 4)]
            params = backend_device.supported(random_params(rng, vocab))
            checked.admit(replace(params, max_tokens=None), prompt, slot=slot)
        steps = 1 + round_number % 3
        run_random_steps(checked, rng, list(checked.requests), steps, kinds=BENIGN_KINDS)
    assert max(len(r.output) for r in checked.requests.values()) > 3
    checked.tally.check()


@pytest.mark.parametrize("vocab", [1, 40], ids=lambda v: f"V{v}")
def test_table_without_any_list(backend_device: BackendDevice, vocab: int) -> None:
    """Every capacity 0 and no counts: filters and draws need none of them."""
    rng = np.random.default_rng(12)
    nothing = dict.fromkeys(
        ["max_logprobs", "max_logit_bias", "max_stop_ids", "max_bad_words", "max_logprob_ids"], 0
    )
    checked = CheckedTable(
        backend_device, vocab, 9, penalties=False, max_bad_word_length=1, **nothing
    )
    for slot in range(9):
        params = replace(
            random_params(rng, vocab, output=[0, 0]),
            repetition_penalty=1.0,
            frequency_penalty=0.0,
            presence_penalty=0.0,
            logit_bias={},
            bad_words_ids=(),
            stop_token_ids=(),
            logprob_token_ids=(),
            logprobs=0 if slot % 2 else None,
        )
        checked.admit(backend_device.supported(params), [0], [0, 0], slot)
    run_random_steps(checked, rng, list(range(9)), backend_device.rows(4, 4, 2))
    checked.tally.check()


def graphed(width: int) -> Any:
    def make(table: RequestTable, backend: str) -> GraphedSampler:
        return GraphedSampler(table, (1, 4, 16), torch.bfloat16, width, backend)

    return make


def test_graphed_sampler_equals_the_reference(backend_device: BackendDevice) -> None:
    """The same steps through the buckets: replayed on a GPU, eager on the CPU."""
    rng = np.random.default_rng(8)
    checked = CheckedTable(
        backend_device, 111, 12, sampler=graphed(116), eos_token_ids=[3, 4], max_logprobs=5
    )
    slots = admit_random(checked, rng, 12)
    steps = backend_device.rows(3, 3, 2)
    for count in (1, 2, 4, 5, backend_device.rows(12, 12, 6), 0, 3):
        run_random_steps(
            checked, rng, slots[:count], steps, dtype=torch.bfloat16, placement="padded"
        )
    checked.tally.check()


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphed"])
@pytest.mark.parametrize("device_inputs", [False, True], ids=["cpu-inputs", "device-inputs"])
def test_bitmask_wider_than_needed_and_strided(
    backend_device: BackendDevice, device_inputs: bool, eager: bool
) -> None:
    """xgrammar sizes its masks for the padded vocabulary, and engines slice them."""
    rng = np.random.default_rng(2)
    vocab, rows = 70, 4
    checked = CheckedTable(
        backend_device, vocab, rows, sampler=Sampler if eager else graphed(vocab)
    )
    slots = admit_random(checked, rng, rows)
    wide = torch.full((2 * rows, 9), -1, dtype=torch.int32)
    mask = wide[::2, 2:7]
    mask[:, :3] = random_bitmask(rng, rows, vocab)
    logits = place(random_rows(rng, rows, vocab, BENIGN_KINDS), backend_device.device).logits
    logits = logits.to(torch.bfloat16)
    if device_inputs:
        mask = wide.to(backend_device.device)[::2, 2:7]
    host = checked.step(logits, slots, bitmask=mask, device_inputs=device_inputs)
    bits = np.unpackbits(mask.cpu().contiguous().numpy().view(np.uint8), axis=1, bitorder="little")
    for row, token in enumerate(host.token_ids.tolist()):
        assert bits[row, token] or host.flags[row] & RowFlags.EMPTY
    checked.tally.check()


def test_device_slots_that_hold_nothing_are_padding(backend_device: BackendDevice) -> None:
    """Slots that the op gets are not checked: one released, never used or -1 writes nothing."""
    checked = CheckedTable(backend_device, 40, 6, sampler=UncheckedSampler)
    for slot in range(4):
        checked.admit(SamplingParams(seed=slot, logprobs=1), [1, 2], slot=slot)
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    logits = logits.to(backend_device.device)
    checked.step(logits[:4], [0, 1, 2, 3], device_inputs=True)
    checked.release(2)
    checked.step(logits, [3, 2, 5, -1, 0], device_inputs=True)
    checked.check_state()
    assert len(checked.requests[1].output) == 1
    assert checked.tally.rows == 6


class UncheckedSampler:
    """The op by itself, as in a graph of the user's own. On the CPU samplers check all slots."""

    def __init__(self, table: RequestTable, backend: str) -> None:
        self.table, self.backend = table, backend
        self._output = new_output(table, table.max_requests)
        self._scratch = new_scratch(table, backend, table.max_requests)

    def __call__(self, logits: torch.Tensor, slots: torch.Tensor, **given: Any) -> StepOutput:
        table = self.table
        table.upload()
        torch.ops.graphed_sampling.sample_step(
            logits,
            slots,
            table.params,
            table.state,
            table.tables,
            self._output.record,
            self._scratch,
            table.layout.to_ints(),
            self.backend,
            **given,
        )
        return StepOutput(self._output.record[: len(slots)], table.layout)


def test_no_rows_is_no_operation(backend_device: BackendDevice) -> None:
    checked = CheckedTable(backend_device, 40, 3)
    checked.admit(SamplingParams(seed=1), [7])
    for width in (40, 48):
        host = checked.step(torch.zeros(0, width, device=backend_device.device), [])
        assert host.token_ids.shape == (0,) and host.top_token_ids.shape == (0, 20)
    checked.check_state()


# Every class of filter by the words themselves.


def row_of(vocab: int) -> np.ndarray:
    """A row whose probabilities all are far above 2^-20, with ties."""
    rng = np.random.default_rng(vocab)
    return (np.round(rng.normal(0, 1.5, vocab) * 4) / 4).astype(np.float32)


def with_entries(vocab: int, value: float) -> np.ndarray:
    row = row_of(vocab)
    row[vocab // 3 :: 4] = value
    return row


def filter_cases(vocab: int) -> dict[str, Case]:
    """One case for each filter and each stage before them, by name."""
    row = row_of(vocab)
    mask = np.full(-(-vocab // 32), 0x5A5A5A5A, np.int32)
    half = tuple(range(0, vocab, 2))

    def case(logits: np.ndarray = row, **params: Any) -> Case:
        return Case(logits, SamplingParams(**params))

    return {
        "none": case(),
        "temperature": case(temperature=1.7),
        "top_k": case(top_k=max(1, vocab // 2)),
        "top_p": case(top_p=0.8),
        "min_p": case(min_p=0.15),
        "top_k-top_p": case(top_k=max(1, vocab // 2), top_p=0.8, temperature=0.9),
        "top_n_sigma": case(top_n_sigma=1.0),
        "typical": case(typical_p=0.7),
        "epsilon": case(epsilon_cutoff=0.02),
        "eta": case(eta_cutoff=0.3),
        "penalties": Case(
            row,
            SamplingParams(repetition_penalty=1.4, frequency_penalty=0.3, presence_penalty=0.6),
            prompt=half,
            output=(0, vocab - 1, 0),
        ),
        "bias": case(logit_bias={0: 1.25, vocab // 2: -INF if vocab > 1 else 0.5, vocab - 1: -2}),
        "allowed": case(allowed_token_ids=half),
        "bitmask": Case(row, bitmask=mask),
        "plus-inf": case(with_entries(vocab, INF), temperature=0.5),
        "nan": case(with_entries(vocab, NAN)),
        "minus-inf": case(with_entries(vocab, -INF)),
    }


FILTERS = tuple(filter_cases(2))


@pytest.mark.parametrize("vocab", [1, 2, 13, 100], ids=lambda v: f"V{v}")
@pytest.mark.parametrize("name", FILTERS)
def test_extreme_words_draw_first_and_last_survivor(
    backend_device: BackendDevice, name: str, vocab: int
) -> None:
    check_extreme_words(backend_device, filter_cases(vocab)[name])


@pytest.mark.parametrize("name", FILTERS)
def test_equally_spaced_words_give_the_probabilities_V13(
    backend_device: BackendDevice, name: str
) -> None:
    check_spaced_words(backend_device, filter_cases(13)[name])


@pytest.mark.parametrize("name", ["none", "typical", "penalties"])
def test_equally_spaced_words_give_the_probabilities_V100(
    backend_device: BackendDevice, name: str
) -> None:
    check_spaced_words(backend_device, filter_cases(100)[name])


@pytest.mark.parametrize("name", FILTERS)
def test_the_cases_do_what_their_names_say(name: str) -> None:
    """Each case changes the distribution; else the tests above would say nothing of its filter."""
    pair = BackendDevice("torch", torch.device("cpu"))
    cases = filter_cases(100)
    if name == "none":
        assert cases[name].expected(pair).num_kept == 0
    else:
        plain = cases["none"].probabilities(pair)
        assert float((cases[name].probabilities(pair) - plain).abs().sum()) > 0.05


WIDE = {
    "unfiltered": ([FLT_MAX] + [-FLT_MAX] * 127, {"temperature": 3e38}, -1),
    "of-two-groups": ([FLT_MAX] * 64 + [-FLT_MAX], {"temperature": 3e38}, -1),
    "top_p": ([FLT_MAX] * 64 + [-FLT_MAX], {"temperature": 3e38, "top_p": 0.999}, -1),
    "typical_p": ([1.8e38, -1.8e38] * 32, {"temperature": 1e38, "typical_p": 0.99}, -1),
    "epsilon_cutoff": ([0.0] + [-86.5] * 64, {"epsilon_cutoff": 1.5e-38}, 0),
    "eta_cutoff": ([0.0] + [-86.5] * 64, {"eta_cutoff": 1.5e-38}, 0),
    "min_p": ([0.0] + [-86.5] * 64, {"min_p": 1.5e-38}, 0),
}


@pytest.mark.parametrize("case", WIDE)
def test_differences_and_cutoffs_at_the_ends_of_fp32(
    backend_device: BackendDevice, case: str
) -> None:
    """Differences of logits that fp32 cannot hold, and probabilities that it hardly can."""
    values, params, word = WIDE[case]
    table = CheckedTable(backend_device, len(values), 1, max_logprobs=4)
    slot = table.admit(SamplingParams(**params, logprobs=4, logprobs_mode="processed", seed=1))
    logits = torch.tensor([values], dtype=torch.float32, device=backend_device.device)
    table.step(logits, [slot], words=torch.tensor([word]))
    table.tally.check()


@pytest.mark.parametrize("name", ["top_p", "typical_p"])
@pytest.mark.parametrize("row", ["falling", "equal", "one"])
def test_a_share_of_hardly_anything_keeps_a_token(
    backend_device: BackendDevice, name: str, row: str
) -> None:
    """Also in a thread that takes it for 0, as one that flushes subnormals does. A GPU's do not,
    and so those that stand for them need not."""
    backend_device.require_words()
    flushes = (False, True) if backend_device.backend in ("cpu", "torch") else (False,)
    vocab = {"falling": 1000, "equal": 65, "one": 1}[row]
    logits = torch.zeros(1, vocab) - (torch.arange(vocab) / 64 if row == "falling" else 0)
    logits = logits.to(backend_device.device)
    seen = []
    for flush in flushes:
        table = RequestTable(1, vocab, device=backend_device.device)
        slot = table.admit(SamplingParams(repetition_penalty=1.1, seed=3, **{name: 1e-40}))
        sampler = Sampler(table, backend_device.backend)
        torch.set_flush_denormal(flush)
        try:
            output = sampler(logits, torch.tensor([slot], dtype=torch.int32))
        finally:
            torch.set_flush_denormal(False)
        seen.append((output.token_ids.tolist(), output.num_kept.tolist()))
    tokens, kept = seen[0]
    if name == "top_p":
        assert (tokens, kept) == ([int(backend_device.order(vocab)[0])], [1])
    assert kept == [vocab if row == "equal" and name == "typical_p" else 1]
    assert seen == [(tokens, kept)] * len(flushes)


def test_words_on_both_sides_of_boundaries_of_equal_logits(backend_device: BackendDevice) -> None:
    """Masses of equal logits are exact, and so is where one ends and the next begins."""
    backend_device.require_words()
    vocab = 32
    order = backend_device.order(vocab)
    table = RequestTable(2, vocab, device=backend_device.device)
    slots = torch.tensor([table.admit(SamplingParams(seed=i)) for i in range(2)]).int()
    sampler = Sampler(table, backend_device.backend)
    logits = torch.full((2, vocab), 1.5, device=backend_device.device)
    for k in (1, 7, 15, 16, 31):
        boundary = k << 59
        words = [w - (1 << 64) if w >> 63 else w for w in (boundary - 1, boundary)]
        tokens = sampler(logits, slots, words=torch.tensor(words)).token_ids.tolist()
        assert tokens == [int(order[k - 1]), int(order[k])], k


def test_words_on_both_sides_of_the_middle_of_a_symmetric_row(
    backend_device: BackendDevice,
) -> None:
    """What is rounded in a sum over tokens must not carry a word over a boundary inside it."""
    backend_device.require_words()
    for vocab in (4, 8):
        order = backend_device.order(vocab)
        table = RequestTable(2, vocab, device=backend_device.device)
        slots = torch.tensor([table.admit(SamplingParams(seed=i)) for i in range(2)]).int()
        sampler = Sampler(table, backend_device.backend)
        generator = torch.Generator().manual_seed(vocab)
        for _ in range(backend_device.rows(50, 12)):
            half = torch.randn(vocab // 2, generator=generator) * 2
            row = torch.empty(vocab)
            row[torch.from_numpy(order).long()] = torch.cat([half, half.flip(0)])
            logits = row.expand(2, vocab).contiguous().to(backend_device.device)
            words = torch.tensor([(1 << 63) - 1, -(1 << 63)])
            tokens = sampler(logits, slots, words=words).token_ids.tolist()
            assert tokens == [int(order[vocab // 2 - 1]), int(order[vocab // 2])], half


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_raw_logprobs_of_flat_rows_with_lists(
    backend_device: BackendDevice, temperature: float
) -> None:
    """Raw weights are those before lists change y, where the row is flat and large too."""
    vocab = 66_000
    lists: list[dict[str, Any]] = [
        {},
        {"logit_bias": {5: 9.0}},
        {"logit_bias": {5: 11.0, 64_000: 3.0}},
        {"logit_bias": {5: -INF, 7: -20.0}},
        {"bad_words_ids": [[6]], "min_tokens": 3, "stop_token_ids": [9]},
        {"logit_bias": {8: 6.0}, "allowed_token_ids": range(1, vocab - 3)},
        {"logit_bias": {2: 5.0}, "presence_penalty": 1.0},
        {"logit_bias": {5: 9.0}, "logprobs": 3, "rank": True},
    ]
    checked = CheckedTable(backend_device, vocab, len(lists), max_logprobs=3)
    for seed, asked in enumerate(lists):
        params = {"seed": seed, "top_p": 0.97, "temperature": temperature, "logprobs": 0} | asked
        checked.admit(SamplingParams(**params), [1, 2], [3])
    logits = torch.randn(len(lists), vocab, generator=torch.Generator().manual_seed(6))
    checked.step(logits.to(backend_device.device), range(len(lists)))
    checked.tally.check(ambiguous=1.0)
    if backend_device.name == "cuda":  # by a bracket, not by what is slow
        scratch = checked.sampler._step._scratch
        assert set(cuda.ways(scratch, checked.table.layout, len(lists))) == {cuda.Way.LISTS}


@pytest.mark.parametrize(
    "asked",
    [
        {"top_p": 0.9},
        {"temperature": 0.7, "top_k": 20},
        {"temperature": 0.0},
        {"logit_bias": {5: -INF, 77: -INF}},
        {"top_p": 0.9, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
        {},
    ],
    ids=["top_p", "top_k", "greedy", "lists", "penalties", "unfiltered"],
)
def test_logits_far_from_0(backend_device: BackendDevice, asked: dict[str, Any]) -> None:
    rows, vocab = far_rows(3000), 3000
    checked = CheckedTable(backend_device, vocab, len(rows), max_logprobs=2)
    for seed in range(len(rows)):
        params = SamplingParams(seed=seed, logprobs=2, rank=True, **asked)
        checked.admit(params, [900], [2100, 5])
    values = torch.from_numpy(np.stack(list(rows.values())).astype(np.float32))
    checked.step(values.to(backend_device.device), range(len(rows)))
    checked.check_state()
    checked.tally.check(ambiguous=1.0, differences=0.3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_drawn_does_not_depend_on_what_is_reported(
    backend_device: BackendDevice, dtype: str
) -> None:
    """Where nothing is, backends may leave out what only that needs."""
    backend_device.require_dtype(dtype)
    vocab = 2504  # whole pieces of 16 bytes in each row, which have the fastest ways
    rng = np.random.default_rng(29)
    rows = {kind: random_row(rng, vocab, kind) for kind in KINDS} | far_rows(vocab)
    asked: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
        {"min_p": 0.1},
        {"top_p": 0.8},
        {},
    ]
    values = torch.from_numpy(np.stack(list(rows.values())).astype(np.float32))
    logits = values.to(DTYPES[dtype]).to(backend_device.device)
    for number, params in enumerate(asked):
        records = []
        for logprobs in (None, 0):
            table = RequestTable(len(rows), vocab, device=backend_device.device)
            seeds = [None if not backend_device.takes_words else i for i in range(len(rows))]
            slots = [
                table.admit(SamplingParams(seed=seed, logprobs=logprobs, **params))
                for seed in seeds
            ]
            words = random_words(np.random.default_rng(number), len(rows), 0.0)
            output = Sampler(table, backend_device.backend)(
                logits,
                torch.tensor(slots, dtype=torch.int32),
                words=words if backend_device.takes_words else None,
            )
            records.append((output.token_ids.cpu(), output.num_kept.cpu(), output.flags.cpu()))
        if backend_device.takes_words or params == asked[0]:
            assert torch.equal(records[0][0], records[1][0]), params
        for i in (1, 2):
            assert torch.equal(records[0][i], records[1][i]), params
