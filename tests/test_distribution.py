"""Real draws, from seeds and positions, follow the law that the reference computes.

Every test has fixed seeds, so that it passes or fails for good; the false-alarm rate says how
often a right sampler would have failed by the choice of seeds: 1e-4 for a backend on a device,
split over the tests here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers import BackendDevice, Case, check_independence, check_law, draw

from graphed_sampling import GraphedSampler, RequestTable, SamplingParams
from graphed_sampling.testing import chi_square, lm_like_logits

VOCAB = 64


def lm_row(seed: int) -> np.ndarray:
    generator = torch.Generator().manual_seed(seed)
    return lm_like_logits(1, VOCAB, generator)[0].numpy()


def case(seed: int, **params: Any) -> Case:
    return Case(lm_row(seed), SamplingParams(**params))


CASES = {
    "unfiltered": case(0),
    "hot": case(1, temperature=2.5),
    "cold": case(2, temperature=0.4),
    "top_k": case(3, top_k=20),
    "top_p": case(4, top_p=0.8),
    "top_k-top_p": case(5, top_k=30, top_p=0.7, temperature=1.3),
    "min_p": case(6, min_p=0.05),
    "typical": case(7, typical_p=0.6),
    "eta": case(8, eta_cutoff=0.02),
    "epsilon": case(9, epsilon_cutoff=0.01),
    "top_n_sigma": case(10, top_n_sigma=1.2),
    "bias": case(11, logit_bias={3: 6.0, 4: 5.0, 7: -np.inf}),
    "allowed": case(12, allowed_token_ids=list(range(5, VOCAB, 3))),
    "penalties": Case(
        lm_row(13),
        SamplingParams(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2),
        prompt=tuple(range(0, 30)),
        output=(1, 1, 2, 50),
    ),
    "greedy": case(14, temperature=0.0),
    "plus-inf": Case(np.where(np.arange(VOCAB) % 20 == 7, np.inf, 0).astype(np.float32)),
    "nan": Case(np.where(np.arange(VOCAB) % 2, np.nan, lm_row(15)).astype(np.float32)),
    "bitmask": Case(lm_row(16), bitmask=np.full(-(-VOCAB // 32), 0x0F0F0F0F, np.int32)),
}

# Of 1e-4: one test a case, and five more.
FALSE_ALARM = 1e-4 / (len(CASES) + 5)


@pytest.mark.parametrize("name", CASES)
def test_draws_of_one_distribution(backend_device: BackendDevice, name: str) -> None:
    check_law(backend_device, [CASES[name]], false_alarm=FALSE_ALARM)


def test_neighbours_differ_in_everything(backend_device: BackendDevice) -> None:
    """All cases in one batch, row by row."""
    cases = [c for c in CASES.values() if not backend_device.refused(c.params)]
    check_law(backend_device, cases, false_alarm=FALSE_ALARM, draws=10_000)


def test_a_large_vocabulary(backend_device: BackendDevice) -> None:
    """The tail is pooled, but a hit outside of the survivors fails whatever the count."""
    generator = torch.Generator().manual_seed(5)
    row = lm_like_logits(1, 10_000, generator, torch.bfloat16)[0].float().numpy()
    cases = [Case(row), Case(row, SamplingParams(top_p=0.9))]
    check_law(backend_device, cases, false_alarm=FALSE_ALARM, slots=64, draws=500)


def test_consecutive_draws_are_uncorrelated(backend_device: BackendDevice) -> None:
    logits = np.log(np.array([0.3, 0.25, 0.2, 0.1, 0.1, 0.05])).astype(np.float32)
    one = Case(logits)
    backend_device.require_speed()
    drawn = draw(backend_device, [one], 256, 200, first_seed=7)
    check_independence(drawn, one.probabilities(backend_device), FALSE_ALARM)


def test_thousand_replays_of_one_graph(backend_device: BackendDevice) -> None:
    """Replayed on a GPU, eager on the CPU: 1000 steps follow the law and repeat under their seeds.

    The state goes on all the while; the rows have no penalties.
    """
    backend_device.require_speed()
    cases = [CASES["unfiltered"], CASES["top_k-top_p"], CASES["typical"], CASES["min_p"]]
    logits = torch.from_numpy(np.stack([c.logits for c in cases] * 4)).to(backend_device.device)
    rows = len(logits)

    def run(steps: int) -> torch.Tensor:
        table = RequestTable(rows, VOCAB, device=backend_device.device, seed=3)
        for i in range(rows):
            backend_device.require(cases[i % 4].params)
            table.admit(cases[i % 4].params, [1] * i)  # seeds come from the table's own
        sampler = GraphedSampler(table, (rows,), backend=backend_device.backend)
        slots = torch.arange(rows, dtype=torch.int32, device=backend_device.device)
        drawn = [sampler(logits, slots).token_ids.clone() for _ in range(steps)]
        return torch.stack(drawn).cpu()

    first = run(1000)
    for i, one in enumerate(cases):
        hits = torch.bincount(first[:, i::4].flatten(), minlength=VOCAB)
        chi_square(hits, one.probabilities(backend_device), false_alarm=FALSE_ALARM / 4)
    assert torch.equal(run(200), first[:200])


def test_graphed_draws_of_mixed_rows(backend_device: BackendDevice) -> None:
    cases = [CASES[name] for name in ("unfiltered", "greedy", "top_p", "penalties", "bitmask")]
    check_law(backend_device, cases, false_alarm=FALSE_ALARM, draws=10_000, graphed=True)


def test_children_of_one_seed_are_independent(backend_device: BackendDevice) -> None:
    """n samples of one request: their draws at one position are as good as n seeds'."""
    backend_device.require_speed()
    parent = SamplingParams(seed=42)
    backend_device.require(parent)
    probability = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    table = RequestTable(512, 4, device=backend_device.device)
    for i in range(512):
        table.admit(parent.child(i))
    sampler = GraphedSampler(table, (512,), backend=backend_device.backend)
    logits = probability.log().float().expand(512, 4).contiguous().to(backend_device.device)
    slots = torch.arange(512, dtype=torch.int32, device=backend_device.device)
    drawn = torch.stack([sampler(logits, slots).token_ids.clone() for _ in range(100)]).cpu()
    check_independence(drawn, probability, FALSE_ALARM / 2)
    chi_square(
        torch.bincount(drawn.flatten(), minlength=4), probability, false_alarm=FALSE_ALARM / 2
    )
