"""The checks of the other files can fail: each catches a sampler with a stated defect.

A mutant is the true op with its inputs or outputs changed on the way, so that every backend is one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    BackendDevice,
    Case,
    CheckedTable,
    check_extreme_words,
    check_fresh_draws,
    check_independence,
    check_law,
    check_padded_ids,
    check_padding_writes_nothing,
    check_seeds,
    check_spaced_words,
    draw,
    flat_draws,
    place,
)

from graphed_sampling import RequestTable, Sampler, SamplingParams, philox
from graphed_sampling.layout import Output, Param, ParamFlags, State, TableLayout
from graphed_sampling.testing import recommended_draws

ROW = np.log(np.array([0.3, 0.25, 0.2, 0.1, 0.1, 0.05])).astype(np.float32)
FALSE_ALARM = 1e-6


class Step(SimpleNamespace):
    """Arguments of one call of the op `sample_step`, by name."""

    NAMES = (
        "logits",
        "slots",
        "params",
        "state",
        "tables",
        "output",
        "scratch",
        "layout",
        "backend",
    )

    @property
    def live_slots(self) -> torch.Tensor:
        return self.slots[self.slots >= 0].long()

    def words_of_output(self, offset: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """One field of the output rows, as a view."""
        size = torch.empty(0, dtype=dtype).element_size() // 4
        return self.output.view(dtype)[: len(self.slots), offset // size]


@dataclass(frozen=True)
class Mutant:
    """defect: changes the arguments of a step, and returns what is to be done after it, if any."""

    defect: Callable[[Step], Callable[[], object] | None]

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        step_op = torch.ops.graphed_sampling.sample_step

        def mutated(*args: Any, **kwargs: Any) -> None:
            step = Step(**dict(zip(Step.NAMES, args, strict=True)), **kwargs)
            after = self.defect(step)
            step_op(
                *(getattr(step, name) for name in Step.NAMES),
                grammar_bitmask=step.grammar_bitmask,
                words=step.words,
            )
            if after:
                after()

        monkeypatch.setattr(torch.ops.graphed_sampling, "sample_step", mutated)


# Defects.


def one_probability_off(step: Step) -> None:
    step.logits = step.logits.float().clone()
    step.logits[:, 1] += math.log(1.1)


def top_k_keeps_one_more(step: Step) -> None:
    step.params = step.params.clone()
    step.params[:, Param.TOP_K] += (step.params[:, Param.TOP_K] > 0).int()


def top_p_keeps_one_more(step: Step) -> None:
    """p grows past the cut: .6 of ROW keeps three of it (.75), .76 four."""
    step.params = step.params.clone()
    top_p = step.params.view(torch.float32)[:, Param.TOP_P]
    top_p.copy_(torch.where((top_p > 0.59) & (top_p < 0.61), 0.76, top_p))


def word_is_frozen(step: Step) -> None:
    step.words = torch.full_like(step.slots, 0x1234567, dtype=torch.int64) << 36


def position_is_frozen(step: Step) -> Callable[[], object]:
    positions = step.state.view(torch.int64)[:, State.POSITION // 2]
    before = positions.clone()
    return lambda: positions.copy_(before)


def seed_of_the_first_row(step: Step) -> None:
    step.params = step.params.clone()
    seeds = step.params.view(torch.int64)[:, Param.SEED // 2]
    seeds.fill_(seeds[int(step.slots[0])].item())


def seed_and_position_are_added(step: Step) -> None:
    slots = step.slots.long()
    seeds = step.params.view(torch.int64)[slots, Param.SEED // 2]
    positions = step.state.view(torch.int64)[slots, State.POSITION // 2]
    step.words = philox.words(seeds + positions, torch.zeros_like(positions))


def parameters_of_the_neighbour(step: Step) -> None:
    step.params = step.params.clone()
    slots = step.live_slots
    step.params[slots] = step.params[slots.roll(1)]


def counts_do_not_advance(step: Step) -> Callable[[], object]:
    before = step.tables.clone()
    return lambda: step.tables.copy_(before)


def recent_tokens_do_not_advance(step: Step) -> Callable[[], object]:
    recent = step.state[:, State.RECENT :]
    before = recent.clone()
    return lambda: recent.copy_(before)


def padded_ids_are_drawn(step: Step) -> Callable[[], object]:
    tokens = step.words_of_output(Output.TOKEN_ID, torch.int64)
    return lambda: tokens.copy_(step.logits.float().nan_to_num(0.0).argmax(1))


def padded_ids_are_normalised(step: Step) -> Callable[[], object]:
    vocab = TableLayout.from_ints(step.layout).vocab_size
    whole = step.logits.double().logsumexp(1) - step.logits[:, :vocab].double().logsumexp(1)
    logprobs = step.words_of_output(Output.LOGPROB, torch.float32)
    return lambda: logprobs.sub_(whole.float())


def padding_rows_take_slot_0(step: Step) -> None:
    step.slots = step.slots.clamp(min=0)


def bitmask_is_dropped(step: Step) -> None:
    step.grammar_bitmask = None


def last_word_draws_id_v(step: Step) -> Callable[[], object] | None:
    if step.words is None:
        return None
    tokens = step.words_of_output(Output.TOKEN_ID, torch.int64)
    vocab = TableLayout.from_ints(step.layout).vocab_size
    return lambda: tokens.copy_(torch.where(step.words == -1, vocab, tokens))


def first_word_draws_a_masked_id(step: Step) -> Callable[[], object]:
    tokens = step.words_of_output(Output.TOKEN_ID, torch.int64)
    return lambda: tokens.copy_(torch.where(step.words == 0, 0, tokens))


def logprobs_of_the_other_mode(step: Step) -> None:
    step.params = step.params.clone()
    step.params[:, Param.FLAGS] ^= int(ParamFlags.PROCESSED)


def rank_counts_equals(step: Step) -> Callable[[], object]:
    ranks = step.words_of_output(Output.RANK)
    return lambda: ranks.add_((ranks > 0).int())


def top_n_breaks_ties_by_the_higher_id(step: Step) -> Callable[[], object]:
    layout = TableLayout.from_ints(step.layout)
    first, second = (step.words_of_output(layout.top_ids + 2 * i, torch.int64) for i in range(2))

    def after() -> None:
        logprobs = [step.words_of_output(layout.top_logprobs + i, torch.float32) for i in (0, 1)]
        swapped = (logprobs[0] == logprobs[1]) & (first >= 0)
        low, high = torch.minimum(first, second), torch.maximum(first, second)
        first.copy_(torch.where(swapped, high, first))
        second.copy_(torch.where(swapped, low, second))

    return after


def stale_generation(step: Step) -> Callable[[], object]:
    generations = step.words_of_output(Output.GENERATION)
    return lambda: generations.sub_((generations > 0).int())


def logprob_rounded_to_bf16(step: Step) -> Callable[[], object]:
    logprobs = step.words_of_output(Output.LOGPROB, torch.float32)
    return lambda: logprobs.copy_(logprobs.bfloat16())


def finish_reason_is_lost(step: Step) -> Callable[[], object]:
    reasons = step.state[:, State.FINISH_REASON]
    return lambda: reasons.zero_()


def logits_are_scaled_in_place(step: Step) -> Callable[[], object]:
    return lambda: step.logits.mul_(0.5)


def temperature_is_applied_twice(step: Step) -> None:
    step.params = step.params.clone()
    real, wide = step.params.view(torch.float32), step.params.view(torch.float64)
    temperature = real[:, Param.TEMPERATURE]
    real[:, Param.SCALE].div_(temperature)
    wide[:, Param.WIDE_SCALE // 2].div_(temperature)
    temperature.square_()


# The checks, each as a function of backend and device.


def spaced(case: Case) -> Callable[[BackendDevice], None]:
    def check(pair: BackendDevice) -> None:
        pair.require_speed()
        check_spaced_words(pair, case, 2**13)

    return check


def law(case: Case) -> Callable[[BackendDevice], None]:
    draws = recommended_draws(0.25, len(ROW))
    return lambda pair: check_law(pair, [case], false_alarm=FALSE_ALARM, draws=draws)


def mixed_law(pair: BackendDevice) -> None:
    cases = [PLAIN, Case(ROW, SamplingParams(top_k=2)), Case(ROW, SamplingParams(temperature=3.0))]
    check_law(pair, cases, false_alarm=FALSE_ALARM, draws=5000)


def independence(pair: BackendDevice) -> None:
    pair.require_speed()
    drawn = draw(pair, [PLAIN], 64, 100)
    check_independence(drawn, PLAIN.probabilities(pair), FALSE_ALARM)


def fresh(pair: BackendDevice) -> None:
    check_fresh_draws(flat_draws(pair, [3], 50, 512)[:, 0].tolist())


def reference_steps(pair: BackendDevice) -> None:
    """Three steps of requests that use much of what there is, each checked field by field."""
    checked = CheckedTable(pair, 12, 6)
    common: dict[str, Any] = {"logprobs": 3, "rank": True}
    for i, values in enumerate(
        (
            {"frequency_penalty": 1.0, "logprobs_mode": "processed"},
            {"top_k": 3, "temperature": 0.5, "logprobs_mode": "processed"},
            {"temperature": 0.0, "bad_words_ids": [[4, 5], [5, 4], [4, 4], [5, 5]]},
            {"top_p": 0.6},
            {"max_tokens": 2},
        )
    ):
        checked.admit(SamplingParams(seed=i, **common, **values), [1, 2], slot=i)
    rng = np.random.default_rng(0)
    for _ in range(3):
        values = np.round(rng.normal(0, 1, (6, 12)), 1).astype(np.float32)
        values[:, [4, 5]] = 2.5
        placed = place(values, pair.device)
        checked.step(placed.logits, [0, 1, 2, 3, 4, -1])
        placed.check_unmodified()
        checked.check_state()


PLAIN = Case(ROW)
MASKED = Case(ROW, bitmask=np.array([0b101110], np.int32))
TOP_K = Case(ROW, SamplingParams(top_k=2))
TOP_P = Case(ROW, SamplingParams(top_p=0.6))

Check = Callable[[BackendDevice], None]
MUTANTS: list[tuple[Callable[[Step], Any], dict[str, Check]]] = [
    (
        one_probability_off,
        {"words": spaced(PLAIN), "law": law(PLAIN), "steps": reference_steps},
    ),
    (
        top_k_keeps_one_more,
        {"words": spaced(TOP_K), "law": law(TOP_K), "steps": reference_steps},
    ),
    (top_p_keeps_one_more, {"words": spaced(TOP_P), "law": law(TOP_P), "steps": reference_steps}),
    (
        word_is_frozen,
        {"law": law(PLAIN), "independence": independence, "fresh": fresh, "steps": reference_steps},
    ),
    (position_is_frozen, {"independence": independence, "fresh": fresh, "steps": reference_steps}),
    (
        seed_of_the_first_row,
        {"seeds": check_seeds, "independence": independence, "steps": reference_steps},
    ),
    (seed_and_position_are_added, {"independence": independence}),
    (parameters_of_the_neighbour, {"mixed": mixed_law, "steps": reference_steps}),
    (counts_do_not_advance, {"steps": reference_steps}),
    (recent_tokens_do_not_advance, {"steps": reference_steps}),
    (padded_ids_are_drawn, {"padded": check_padded_ids}),
    (padded_ids_are_normalised, {"padded": check_padded_ids}),
    (padding_rows_take_slot_0, {"padding": check_padding_writes_nothing}),
    (bitmask_is_dropped, {"words": spaced(MASKED), "law": law(MASKED)}),
    (
        last_word_draws_id_v,
        {"extremes": lambda pair: check_extreme_words(pair, PLAIN)},
    ),
    (
        first_word_draws_a_masked_id,
        {"extremes": lambda pair: check_extreme_words(pair, MASKED)},
    ),
    (logprobs_of_the_other_mode, {"steps": reference_steps}),
    (rank_counts_equals, {"steps": reference_steps}),
    (logprob_rounded_to_bf16, {"steps": reference_steps}),
    (finish_reason_is_lost, {"steps": reference_steps}),
    (top_n_breaks_ties_by_the_higher_id, {"steps": reference_steps}),
    (stale_generation, {"steps": reference_steps}),
    (logits_are_scaled_in_place, {"steps": reference_steps}),
    (temperature_is_applied_twice, {"steps": reference_steps}),
]
NEEDS: dict[Callable[[Step], Any], set[str]] = {
    word_is_frozen: {"words"},
    seed_of_the_first_row: {"seed"},
    seed_and_position_are_added: {"words"},
}
"""Features without which a defect is none: who refuses them draws with numbers of his own."""
PASSED: set[tuple[BackendDevice, Check]] = set()  # what the true op has passed already
PAIRS = [
    pytest.param(defect, check, id=f"{defect.__name__}-{name}")
    for defect, checks in MUTANTS
    for name, check in checks.items()
]


@pytest.mark.parametrize("defect, check", PAIRS)
def test_mutant_is_caught(
    backend_device: BackendDevice,
    defect: Callable[[Step], Any],
    check: Check,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend_device.require_features(NEEDS.get(defect, set()))
    if (backend_device, check) not in PASSED:
        check(backend_device)
        PASSED.add((backend_device, check))
    Mutant(defect).install(monkeypatch)
    with pytest.raises(AssertionError):
        check(backend_device)


class Recorded(Exception):
    """A step ends where the op would have run."""


@pytest.mark.parametrize("defect", [defect for defect, _ in MUTANTS])
def test_what_a_mutant_needs_is_said(
    defect: Callable[[Step], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Words that it makes up, and seeds that alone it changes: some backends refuse these, and on
    them it would raise, or go unnoticed, where thousands of rows are drawn: on a GPU."""
    table = RequestTable(4, len(ROW), device="cpu", seed=1)
    for seed in range(4):
        table.admit(SamplingParams(seed=seed, top_k=seed, top_p=0.6, temperature=0.5 + seed))
    recorded: dict[str, Any] = {}

    def record(*args: Any, **kwargs: Any) -> None:
        recorded.update(zip(Step.NAMES, args, strict=True), **kwargs)
        raise Recorded

    monkeypatch.setattr(torch.ops.graphed_sampling, "sample_step", record)
    sampler = Sampler(table, "torch")
    Mutant(defect).install(monkeypatch)
    mask = torch.full((4, 1), -1, dtype=torch.int32)
    with pytest.raises(Recorded):
        sampler(torch.zeros(4, len(ROW)), torch.arange(4, dtype=torch.int32), grammar_bitmask=mask)
    needs = set()
    if recorded["words"] is not None:
        needs.add("words")
    same = recorded["params"] == table.params
    seed = slice(Param.SEED, Param.SEED + 2)
    if not same[:, seed].all():
        same[:, seed] = True
        if same.all():
            needs.add("seed")
    assert NEEDS.get(defect, set()) == needs


def test_tally_bounds_what_rounding_may_explain(backend_device: BackendDevice) -> None:
    """A test whose rows all lie within rounding of a cut proves nothing, and says so."""
    checked = CheckedTable(backend_device, 4, 40)
    # Half of a flat row's mass is two tokens exactly: p lies on the cut.
    for i in range(40):
        checked.admit(SamplingParams(top_p=0.5, seed=i))
    checked.step(torch.zeros(40, 4, device=backend_device.device), range(40))
    assert checked.tally.ambiguous == 40
    with pytest.raises(AssertionError):
        checked.tally.check()
