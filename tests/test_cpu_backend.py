"""What is particular to the cpu backend: masses, selections, threads. The contract is elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from graphed_sampling.params import SamplingParams, fp32
from graphed_sampling.reference import RowResult, sample_row
from graphed_sampling.sampler import StepOutput
from graphed_sampling.table import RequestTable
from graphed_sampling.testing import EXTREME_WORDS

pytest.importorskip("numba")

from graphed_sampling.backends import cpu

CPU = torch.device("cpu")


def step(
    table: RequestTable,
    logits: Tensor,
    slots: Tensor,
    *,
    grammar_bitmask: Tensor | None = None,
    words: Tensor | None = None,
    given: Tensor | None = None,
) -> StepOutput:
    """One step of the backend itself, into a poisoned record."""
    table.upload()
    output = torch.full((slots.shape[0] + 1, table.layout.output_words), 0x7FC0DEAD)
    output = output.to(torch.int32)
    cpu.sample_step(
        logits,
        slots,
        table.params,
        table.state,
        table.tables,
        output,
        torch.empty(0, dtype=torch.int32),
        table.layout,
        grammar_bitmask=grammar_bitmask,
        words=words,
        given=given,
    )
    assert (output[-1] == 0x7FC0DEAD).all(), "wrote past the rows"
    return StepOutput(output[:-1], table.layout)


def slots_of(*slots: int) -> Tensor:
    return torch.tensor(slots, dtype=torch.int32)


# What a row may ask for: every filter, alone and together.
FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 100.0},
    {"temperature": 2e-5},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 50, "temperature": 0.8, "top_p": 0.95},
    {"top_k": 300, "min_p": 0.01},
    {"top_p": 1e-6},
    {"top_p": 0.3},
    {"top_p": 0.999, "temperature": 3.0},
    {"min_p": 1.0},
    {"min_p": 0.1, "top_p": 0.9},
    {"top_n_sigma": 1.0},
    {"top_n_sigma": 0.3, "min_p": 0.3, "top_k": 7, "top_p": 0.8},
    {"typical_p": 0.2},
    {"typical_p": 0.95, "top_k": 40},
    {"epsilon_cutoff": 3e-3},
    {"eta_cutoff": 0.2},
    {"typical_p": 0.5, "epsilon_cutoff": 0.01, "eta_cutoff": 0.1, "top_p": 0.97, "top_k": 30},
]


def random_params(rng: np.random.Generator, vocab: int, base: dict[str, Any]) -> SamplingParams:
    """`base` with penalties, lists and logprobs thrown in."""

    def ids(most: int) -> tuple[int, ...]:
        return tuple(int(i) for i in rng.integers(0, vocab, rng.integers(1, most + 1)))

    extra: dict[str, Any] = {"seed": int(rng.integers(2**63))}
    if rng.random() < 0.5:
        extra |= {
            "logprobs": int(rng.integers(0, 9)),
            "logprobs_mode": ("raw", "processed")[rng.integers(2)],
            "logprob_token_ids": ids(3),
            "rank": bool(rng.integers(2)),
        }
    if rng.random() < 0.3:
        extra |= {
            "repetition_penalty": float(rng.choice([1.0, 1.3, 0.5])),
            "frequency_penalty": float(rng.choice([0.0, 0.7, -1.1])),
            "presence_penalty": float(rng.choice([0.0, 0.3, -2.0])),
        }
    if rng.random() < 0.3:
        extra["logit_bias"] = {
            i: float(rng.choice([3.5, -1e38, 3e38, -math.inf, -0.7])) for i in ids(6)
        }
    if rng.random() < 0.2:
        extra["allowed_token_ids"] = ids(20)
    if rng.random() < 0.3:
        extra |= {"min_tokens": int(rng.integers(0, 5)), "stop_token_ids": ids(4)}
    if rng.random() < 0.3:
        extra["max_tokens"] = max(7, extra.get("min_tokens", 0))
    if rng.random() < 0.3:
        extra["bad_words_ids"] = tuple(ids(3) for _ in range(rng.integers(1, 4)))
    return SamplingParams(**base, **extra)


def random_row(rng: np.random.Generator, vocab: int) -> np.ndarray[Any, Any]:
    """A row of logits: plain, tied, steep, flat or bad."""
    kind = rng.integers(8)
    row = (rng.standard_normal(vocab) * rng.choice([0.1, 2.0, 20.0])).astype(np.float32)
    if kind == 0:  # many ties
        row = np.round(row)
    elif kind == 1:
        row[:] = row[0]
    elif kind == 2:  # adjacent floats and subnormals
        row = np.arange(vocab, dtype=np.int32).view(np.float32) * rng.choice([-1, 1])
        row = rng.permutation(row.astype(np.float32))
    elif kind == 3:
        row[rng.random(vocab) < 0.5] = -np.inf
        row[rng.random(vocab) < 0.1] = np.nan
    elif kind == 4 and rng.random() < 0.5:
        row[rng.random(vocab) < 0.2] = np.inf
    elif kind == 5:
        row = np.clip(row.astype(np.float64) * 1e37, -3.4e38, 3.4e38).astype(np.float32)
    elif kind == 6 and rng.random() < 0.3:
        row[:] = -np.inf if rng.integers(2) else np.nan
    return np.asarray(row, dtype=np.float32)


def check(
    output: StepOutput, i: int, expected: RowResult, params: SamplingParams, vocab: int
) -> None:
    """Row i of a step against the reference, where rounding cannot decide otherwise."""
    assert int(output.flags[i]) == expected.flags
    if expected.margin < 1e-9:
        return
    token = int(output.token_ids[i])
    assert int(output.num_kept[i]) == expected.num_kept
    assert token in expected.tokens_near(vocab * 2.0**-38), (token, expected.token_id)
    if token != expected.token_id:
        return
    assert int(output.finish_reason[i]) == expected.finish_reason
    assert int(output.ranks[i]) == expected.rank

    def near(values: Sequence[float]) -> Any:
        return pytest.approx([fp32(v) for v in values], rel=1e-6, abs=2e-6, nan_ok=True)

    assert [float(output.logprobs[i])] == near([expected.logprob])
    wanted = params.logprobs or 0
    assert output.top_token_ids[i, :wanted].tolist() == list(expected.top_token_ids)
    top = output.top_logprobs[i, :wanted].tolist()
    assert top == near(expected.top_logprobs)
    assert (output.top_token_ids[i, wanted:] == -1).all()
    assert output.top_logprobs[i, wanted:].isnan().all()
    num_given = len(params.logprob_token_ids)
    given = output.given_logprobs[i, :num_given].tolist()
    assert given == near(expected.given_logprobs)
    assert output.given_logprobs[i, num_given:].isnan().all()


@pytest.mark.parametrize("vocab", [1, 2, 31, 32, 33, 63, 64, 65, 111, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_follow_the_reference(vocab: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(vocab)
    rows = 2 * len(FILTERS)
    for _ in range(3):
        eos = (int(rng.integers(vocab)),)
        table = RequestTable(rows, vocab, device="cpu", eos_token_ids=eos, max_logprobs=9)
        logits = torch.full((rows, vocab + int(rng.integers(0, 3))), math.nan)
        logits[:, :vocab] = torch.from_numpy(
            np.stack([random_row(rng, vocab) for _ in range(rows)])
        )
        logits = logits.to(dtype)
        words = torch.from_numpy(rng.integers(-(2**63), 2**63, rows))
        words[:4] = torch.tensor([*EXTREME_WORDS, *EXTREME_WORDS])
        bitmask = torch.from_numpy(
            rng.integers(-(2**31), 2**31, (rows, -(-vocab // 32) + 1)).astype(np.int32)
        )
        bitmask[: rows // 2] = -1
        requests = []
        order = [int(i) for i in rng.permutation(rows)]
        for i in range(rows):
            prompt, output_ids = rng.integers(0, vocab, 5), rng.integers(0, vocab, 4)
            params = random_params(rng, vocab, FILTERS[i % len(FILTERS)])
            requests.append((params, prompt.tolist(), output_ids.tolist()))
            table.admit(
                params, prompt.tolist(), output_token_ids=output_ids.tolist(), slot=order[i]
            )
        result = step(table, logits, slots_of(*order), words=words, grammar_bitmask=bitmask)
        for i, (params, prompt_ids, output_list) in enumerate(requests):
            expected = sample_row(
                logits[i].float().numpy(),
                params,
                vocab_size=vocab,
                prompt_token_ids=prompt_ids,
                output_token_ids=output_list,
                eos_token_ids=eos,
                grammar_bitmask=bitmask[i].numpy(),
                word=int(words[i]),
            )
            check(result, i, expected, params, vocab)
