"""What holds of logprobs at many positions for rows and parameters that hypothesis looks for."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers import INF, NAN, BackendDevice
from test_prompt_logprobs import assert_same, scorers

from graphed_sampling import PromptLogprobs, SamplingParams, prompt_logprobs

pytest.importorskip("hypothesis")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


@pytest.fixture(params=scorers())
def pair(request: pytest.FixtureRequest) -> BackendDevice:
    chosen: BackendDevice = request.param
    return chosen


@st.composite
def scored_rows(draw: st.DrawFn) -> tuple[np.ndarray, list[SamplingParams]]:
    """Up to 4 rows of a small vocabulary, some of their logits equal, huge or infinite."""
    count, vocab = draw(st.integers(1, 4)), draw(st.integers(1, 40))
    logit = st.one_of(
        st.floats(-20, 20, width=32),
        st.sampled_from([-INF, 0.0, 1.0, -1.0, NAN, 1e37, -1e37, INF]),
    )
    values = draw(st.lists(logit, min_size=count * vocab, max_size=count * vocab))
    params = st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.3, 1.0, 5.0]),
        top_k=st.integers(0, 8),
        top_p=st.sampled_from([0.1, 0.9, 1.0]),
        min_p=st.sampled_from([0.0, 0.1, 1.0]),
        logprobs_mode=st.sampled_from(["raw", "processed"]),
    )
    rows = np.array(values, np.float32).reshape(count, vocab)
    return rows, draw(st.lists(params, min_size=count, max_size=count))


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=scored_rows(), seed=st.integers(0, 2**32 - 1))
def test_invariants(
    pair: BackendDevice, case: tuple[np.ndarray, list[SamplingParams]], seed: int
) -> None:
    """Of the logprobs of all tokens: they are a distribution, whose entropy and order are told; and
    positions in another order have the same bits."""
    if pair.interpreted and seed % 4:
        return  # a call takes a tenth of a second here: the seed decides which are made
    rows, params = case
    count, vocab = rows.shape
    logits = torch.from_numpy(rows).to(pair.device)
    everything = torch.arange(vocab, device=pair.device).expand(count, vocab)
    rng = np.random.default_rng(seed)
    tokens = torch.from_numpy(rng.integers(0, vocab, count)).to(pair.device)
    options: dict[str, Any] = {
        "top_n": 5, "rank": True, "entropy": True, "backend": pair.backend
    }  # fmt: skip
    got = prompt_logprobs(logits, tokens, params=params, given_ids=everything, **options)
    order = torch.from_numpy(rng.permutation(count)).to(pair.device)
    permuted = prompt_logprobs(
        logits, tokens[order], rows=order, given_ids=everything,
        params=[params[i] for i in order.tolist()], **options,
    )  # fmt: skip
    assert_same(permuted, PromptLogprobs(*(t[order] for t in got)))
    log_p = got.given_logprobs.cpu().double()
    assert torch.equal(got.logprobs.cpu(), log_p.float().gather(1, tokens.cpu()[:, None])[:, 0])
    for i in range(count):
        p = log_p[i].exp()
        if params[i].logprobs_mode == "raw" and not (rows[i] > -INF).any():
            assert not p.any() and math.isnan(got.entropies[i])
            continue
        assert float(p.sum()) == pytest.approx(1.0, abs=1e-5)
        entropy = -float((p * log_p[i].nan_to_num(neginf=0.0)).sum())
        assert float(got.entropies[i]) == pytest.approx(entropy, abs=1e-5)
        best = [t for t in got.top_token_ids[i].tolist() if t >= 0]
        chances = sorted(log_p[i][log_p[i] > -INF].tolist(), reverse=True)
        assert log_p[i][best].tolist() == chances[: len(best)]
        assert len(best) == min(5, len(chances))
        if best and int(tokens[i]) == best[0]:
            assert got.ranks[i] == 1
