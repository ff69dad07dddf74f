"""What is particular to the cpu backend: number formats, masses, selections, threads, memory."""

from __future__ import annotations

import functools
import itertools
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from graphed_sampling import philox
from graphed_sampling.params import SamplingParams, fp32
from graphed_sampling.reference import RowResult, raw_logprobs, sample_row
from graphed_sampling.sampler import StepOutput
from graphed_sampling.table import RequestTable
from graphed_sampling.testing import EXTREME_WORDS, lm_like_logits

numba = pytest.importorskip("numba")

from graphed_sampling.backends import cpu  # noqa: E402
from graphed_sampling.backends import cpu_kernels as kernels  # noqa: E402


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


# Numbers.


def each(function: Any, *columns: np.ndarray[Any, Any], dtype: Any) -> np.ndarray[Any, Any]:
    """One of the kernels' scalar functions, over arrays."""
    out = np.empty(columns[0].size, dtype)

    @numba.njit(error_model="numpy")
    def run_one(a, out):  # type: ignore[no-untyped-def]
        for i in range(out.size):
            out[i] = function(a[i])

    @numba.njit(error_model="numpy")
    def run_two(a, b, out):  # type: ignore[no-untyped-def]
        for i in range(out.size):
            out[i] = function(a[i], b[i])

    (run_one if len(columns) == 1 else run_two)(*columns, out)
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_logit_is_widened_as_torch_does(dtype: torch.dtype) -> None:
    bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    widen = kernels._widen_brain if dtype == torch.bfloat16 else kernels._widen_half
    ours = torch.from_numpy(each(widen, bits.numpy(), dtype=np.float32))
    theirs = bits.view(dtype).float()
    nan = theirs.isnan()
    assert torch.equal(ours.isnan(), nan)
    assert torch.equal(ours[~nan].view(torch.int32), theirs[~nan].view(torch.int32))


def test_keys_are_in_the_order_of_the_floats() -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(-(2**31), 2**31, 20000).astype(np.int32)
    values = np.sort(bits.view(np.float32)[~np.isnan(bits.view(np.float32))] + np.float32(0))
    keys = each(kernels._key, values, dtype=np.int32)
    assert np.array_equal(np.diff(values) > 0, np.diff(keys.astype(np.int64)) > 0)
    assert np.array_equal(each(kernels._value, keys, dtype=np.float32), values)
    assert keys[0] > kernels._BANNED


def test_bounds_are_rounded_towards_their_side() -> None:
    rng = np.random.default_rng(0)
    exact = np.concatenate(
        [
            rng.standard_normal(1000) * 10.0 ** rng.integers(-50, 39, 1000),
            np.array([0.0, -0.0, 1e-50, -1e-50, 1.0, -1.0, 3.5e38, -3.5e38, 1e300, -1e300]),
            rng.standard_normal(100).astype(np.float32).astype(np.float64),
        ]
    )
    down = each(kernels._round_down, exact, dtype=np.float32)
    up = each(kernels._round_up, exact, dtype=np.float32)
    assert (down <= exact).all() and (up >= exact).all()
    with np.errstate(over="ignore"):
        assert (np.nextafter(down, np.float32(np.inf)) > exact).all()
        assert (np.nextafter(up, np.float32(-np.inf)) < exact).all()


def test_random_words_are_philox_words() -> None:
    seeds = np.array([0, 1, 2**64 - 1, 0x123456789ABCDEF0], np.uint64)
    positions = np.array([0, 2**32, 7, 2**63 + 5], np.uint64)

    @numba.njit
    def word(seed, position):  # type: ignore[no-untyped-def]
        return kernels._philox_word(seed, position, np.uint64(0))

    words = each(word, seeds, positions, dtype=np.uint64)
    expected = [philox.word(int(s), int(p)) for s, p in zip(seeds, positions, strict=True)]
    assert words.tolist() == expected


def test_high_products_are_exact() -> None:
    rng = np.random.default_rng(0)
    extremes = np.array([0, 1, 2**32 - 1, 2**32, 2**62, 2**64 - 1], np.uint64)
    a = np.concatenate([extremes, extremes[::-1], rng.integers(0, 2**64, 100, np.uint64)])
    b = np.concatenate([extremes, extremes, rng.integers(0, 2**64, 100, np.uint64)])
    high = each(kernels._high_product, a, b, dtype=np.uint64)
    assert high.tolist() == [int(x) * int(y) >> 64 for x, y in zip(a, b, strict=True)]


def test_masses_are_the_formula_in_plain_float64_operations() -> None:
    """Bit for bit, so nothing was contracted or reassociated; and near 2^(40 + z)."""
    z = np.concatenate(
        [-np.random.default_rng(0).exponential(12, 4000), np.arange(-64.0, 1.0), [-1e-300, -0.5]]
    )
    masses = each(kernels._mass, z, dtype=np.int64)
    clamped = np.maximum(z, -64.0)
    whole = np.rint(clamped)
    f = clamped - whole
    p = np.full_like(f, kernels._EXP2[-1])
    for coefficient in [*kernels._EXP2[-2::-1], 1.0]:
        p = p * f + coefficient
    assert np.array_equal(masses, np.rint(np.ldexp(p, whole.astype(int) + 40)).astype(np.int64))
    exact = 2.0**40 * np.exp2(z)
    assert (abs(masses - exact) <= 0.5 + 2.0**-36 * exact).all()
    assert each(kernels._mass, np.array([0.0, -np.inf, np.nan]), dtype=np.int64).tolist() == [
        2**40,
        0,
        0,
    ]


def test_masses_are_not_fused() -> None:
    """In the vector loop either, on a machine that could fuse."""

    @numba.njit(error_model="numpy")
    def mass(y):  # type: ignore[no-untyped-def]
        return kernels._group_mass(y, 0, 0.0, 1.0)

    assert mass(np.zeros(64, np.float32)) == 64 * 2**40
    (code,) = mass.inspect_asm().values()
    assert not any(name in code for name in ("fmadd", "fnmadd", "fmsub", "fmla", "fmls"))


def test_penalties_round_twice() -> None:
    """frequency * count is rounded before it is subtracted: it makes or breaks a tie."""
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(200):
        x, frequency = (np.float32(v) for v in rng.uniform(0.5, 2.0, 2))
        twice = x - frequency * np.float32(3)
        once = np.float32(np.float64(x) - np.float64(frequency) * 3)
        if once == twice:
            continue
        # Token 3 equals another one, which wins or loses as the lower id does.
        other = 5 if once < twice else 1
        seen.add(other)
        logits = torch.full((1, 64), -100.0)
        logits[0, 3], logits[0, other] = float(x), float(twice)
        table = RequestTable(1, 64, device="cpu")
        table.admit(
            SamplingParams(temperature=0.0, frequency_penalty=float(frequency)),
            output_token_ids=[3, 3, 3],
        )
        assert step(table, logits, slots_of(0)).token_ids.tolist() == [min(3, other)]
    assert seen == {1, 5}


# Raw logprobs.


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 4.0, 30.0, 1e30])
def test_raw_logprobs_are_those_of_float64(spread: float) -> None:
    vocab, rows = 3001, 20
    table = RequestTable(rows, vocab, device="cpu")
    params = SamplingParams(logprobs=20, seed=0, temperature=0.5, top_k=3)
    slots = slots_of(*[table.admit(params) for _ in range(rows)])
    generator = torch.Generator().manual_seed(3)
    logits = spread * torch.randn(rows, vocab, generator=generator)
    result = step(table, logits, slots)
    for i in range(rows):
        expected = raw_logprobs(logits[i].numpy())
        top = result.top_token_ids[i].numpy()
        error = abs(result.top_logprobs[i].numpy().astype(np.float64) - expected[top])
        # The sum of all but the maximum is right within 2^-21, masses round, and so does fp32.
        rest = -math.expm1(expected.max())
        assert (error <= 2.0**-21 * rest + vocab * 2.0**-41 + 2.0**-23 * abs(expected[top])).all()


# Selections.


@functools.lru_cache
def compiled_select() -> Any:
    @numba.njit
    def run(keys, mass, target, buffer):  # type: ignore[no-untyped-def]
        ws = kernels._workspace(buffer, keys.size)
        ws.keys[: keys.size] = keys
        counted = kernels._select(mass, False, keys.size, min(target, keys.size), ws)
        weighed = kernels._select(mass, True, keys.size, target, ws)
        return counted, weighed

    return run


SELECTIONS: dict[str, Callable[[np.random.Generator, int], Any]] = {
    "spread": lambda rng, n: rng.integers(0, 2**64, n, np.uint64),
    "32 bits": lambda rng, n: rng.integers(0, 2**32, n, np.uint64),
    "ties": lambda rng, n: rng.integers(0, 3, n, np.uint64) << np.uint64(40),
    "equal": lambda rng, n: np.full(n, 2**63 + 5, np.uint64),
    "adjacent": lambda rng, n: rng.permutation(n).astype(np.uint64) + np.uint64(2**53 - n // 2),
    "one far": lambda rng, n: np.where(np.arange(n) == n // 2, 2**64 - 1, 7).astype(np.uint64),
}


@pytest.mark.parametrize("count", [1, 2, 63, 1000, 1001, 5000])
@pytest.mark.parametrize("kind", SELECTIONS)
def test_selections_agree_with_a_sort(kind: str, count: int) -> None:
    rng = np.random.default_rng(count)
    keys = SELECTIONS[kind](rng, count)
    mass = rng.integers(0, 2**40, count)
    mass[rng.random(count) < 0.3] = 0
    mass[0] = 2**40
    order = np.argsort(keys, kind="stable")
    buffer = np.zeros(kernels.workspace_bytes(count), np.uint8)
    for target in {1, count // 2 + 1, int(mass.sum()) // 3 + 1, int(mass.sum())}:
        for weights, result in zip(
            (np.ones_like(mass), mass), compiled_select()(keys, mass, target, buffer), strict=True
        ):
            wanted = min(target, count) if weights is not mass else target
            running = np.cumsum(weights[order])
            key = keys[order][np.searchsorted(running, wanted)]
            assert result == (key, weights[keys < key].sum())


def spoiled_workspace(y: np.ndarray[Any, Any]) -> Any:
    """A workspace whose y is this one, -inf in the place of a ban, and the rest of it spoiled."""
    vocab = y.size
    ws = kernels._workspace(np.full(kernels.workspace_bytes(vocab), 0x5B, np.uint8), vocab)
    ws.y[:] = np.nan
    ws.y[:vocab] = np.where(y > -np.inf, y, np.nan)
    groups = ws.group_keys.size
    ws.dirty[:] = 1
    kernels._renew_groups(groups, ws)
    return ws


ROWS: dict[str, Callable[[np.random.Generator, int], Any]] = {
    "spread": lambda rng, n: rng.standard_normal(n) * 4,
    "flat": lambda rng, n: rng.standard_normal(n) * 1e-3,
    "equal": lambda rng, n: np.full(n, 1.5),
    "two values": lambda rng, n: rng.integers(0, 2, n),
    "runs": lambda rng, n: rng.integers(0, 4, n // 50 + 1).repeat(50)[:n],
    "falling": lambda rng, n: -np.arange(n) / 16,
    "rising": lambda rng, n: np.arange(n) // 100,
    "banned": lambda rng, n: np.where(rng.random(n) < 0.9, -np.inf, rng.integers(0, 5, n)),
}
every_row = pytest.mark.parametrize(
    ("kind", "size"), list(itertools.product(ROWS, [1, 63, 64, 65, 128, 1000, 4096]))
)


def row(kind: str, size: int) -> np.ndarray[Any, Any]:
    y: np.ndarray[Any, Any] = ROWS[kind](np.random.default_rng(size), size).astype(np.float32)
    y[-1] = max(y.max(), 0)  # a candidate
    return y


def listed(ws: Any, count: int) -> list[tuple[int, float]]:
    return list(zip(ws.ids[:count].tolist(), ws.values[:count].tolist(), strict=True))


@every_row
def test_lists_hold_what_reaches_a_bound(kind: str, size: int) -> None:
    y = row(kind, size)
    ws = spoiled_workspace(y)
    for bound in {-np.inf, *np.quantile(y[y > -np.inf], [0, 0.1, 0.5, 0.99, 1], method="lower")}:
        count = kernels._gather(ws.group_keys.size, np.float32(bound), ws)
        ids = np.flatnonzero((y > -np.inf) & (y >= bound))
        assert listed(ws, count) == list(zip(ids.tolist(), y[ids].tolist(), strict=True))


@every_row
def test_the_largest_of_a_row(kind: str, size: int) -> None:
    """Bounded by groups, by their parts, and by all: few more than wanted are ever listed."""
    y = row(kind, size)
    ws = spoiled_workspace(y)
    groups = ws.group_keys.size
    order = np.argsort(-y, kind="stable")[: int((y > -np.inf).sum())]
    parts = groups * kernels.PARTS
    for wanted in {1, 2, 3 * groups // 4, 3 * groups // 4 + 1, 3 * parts // 4, size - 1, size}:
        if not 0 < wanted <= size:
            continue
        bound = kernels._largest_bound(groups, wanted, ws)
        assert (y >= bound).sum() >= min(wanted, order.size)
        count = kernels._list_largest(groups, wanted, np.float32(-np.inf), ws)
        ids = np.sort(order[:wanted])
        assert listed(ws, count) == list(zip(ids.tolist(), y[ids].tolist(), strict=True))


@every_row
def test_cuts_keep_the_smallest_prefix(kind: str, size: int) -> None:
    """By number and by mass; what is kept stays whole, and of equals the lowest ids."""
    y = row(kind, size)
    ws = spoiled_workspace(y)
    groups = ws.group_keys.size

    def fill() -> int:
        count = int(kernels._gather(groups, np.float32(-np.inf), ws))
        kernels._weigh(count, 1.0, ws)
        return count

    count = fill()
    order = np.argsort(-ws.values[:count], kind="stable")
    for weighted, weights in ((False, np.ones(count, np.int64)), (True, ws.mass[:count].copy())):
        running = np.cumsum(weights[order])
        total = int(running[-1])
        for target in {1, 2, total // 3 + 1, total // 2, int(running[count // 2]), total}:
            if not 0 < target <= total:
                continue
            fill()
            before = [column[:count].copy() for column in (ws.ids, ws.values, ws.mass)]
            number = int(np.searchsorted(running, target)) + 1
            kept, weight = kernels._cut(count, weighted, target, ws)
            assert (kept, weight) == (number, running[number - 1])
            places = np.sort(order[:number])
            for column, old in zip((ws.ids, ws.values, ws.mass), before, strict=True):
                assert np.array_equal(column[:kept], old[places])


@pytest.mark.parametrize("threshold", [-np.inf, 0.0])
@pytest.mark.parametrize("kind", ROWS)
def test_masses_of_groups(kind: str, threshold: float) -> None:
    """Both passes over a row leave the same."""
    y = row(kind, 1000)
    ws = spoiled_workspace(y)
    groups, highest, bound = ws.group_keys.size, np.float32(y.max()), np.float32(threshold)
    total = kernels._add_masses(groups, highest, 1.5, bound, ws)
    masses = ws.group_mass.copy()
    assert masses.sum() == total
    ws.group_mass[:] = -1
    surveyed, weight, mean = kernels._survey(groups, highest, 1.5, bound, ws)
    assert surveyed == total and np.array_equal(ws.group_mass, masses)
    kept = y[(y > -np.inf) & (y >= bound)].astype(np.float64)
    z = (kept - highest) * 1.5
    np.testing.assert_allclose(weight, np.exp2(40 + z).sum(), rtol=1e-9)
    np.testing.assert_allclose(mean, np.average(z, weights=np.exp2(z)), rtol=1e-9, atol=1e-9)


# Rows.


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


@pytest.mark.parametrize("vocab", [32000, 128256])
def test_large_rows_follow_the_reference(vocab: int) -> None:
    """Lists that hold most of the vocabulary, and bounds that keep them short."""
    rng = np.random.default_rng(1)
    generator = torch.Generator().manual_seed(2)
    flat = torch.randn(vocab, generator=generator) * 1e-3
    rows = [lm_like_logits(1, vocab, generator)[0], flat, torch.ones(vocab)]
    filters: list[dict[str, Any]]
    filters = [
        {"top_k": 50, "top_p": 0.95},
        {"top_k": vocab // 20},
        {"top_k": vocab // 2},
        {"top_p": 0.9},
        {"min_p": 0.5},
        {"typical_p": 0.5},
        {"typical_p": 0.95, "min_p": 1e-4},
        {"epsilon_cutoff": 1e-3},
        {"eta_cutoff": 1e-3, "typical_p": 0.9},
    ]
    cases = [(row, fields) for row in rows for fields in filters]
    table = RequestTable(len(cases), vocab, device="cpu")
    requests = [SamplingParams(logprobs=5, seed=0, rank=True, **fields) for _, fields in cases]
    slots = slots_of(*[table.admit(params) for params in requests])
    words = torch.from_numpy(rng.integers(-(2**63), 2**63, len(cases)))
    logits = torch.stack([row for row, _ in cases])
    result = step(table, logits, slots, words=words)
    for i, params in enumerate(requests):
        check(result, i, sample_row(logits[i].numpy(), params, word=int(words[i])), params, vocab)


# Memory.


def mixed_table(vocab: int) -> tuple[RequestTable, Tensor]:
    """A request of every kind; the same table whenever it is called."""
    rng = np.random.default_rng(vocab)
    table = RequestTable(len(FILTERS), vocab, device="cpu", max_logprobs=9, eos_token_ids=[1])
    for fields in FILTERS:
        params = random_params(rng, vocab, fields)
        table.admit(params, rng.integers(0, vocab, 9).tolist())
    return table, slots_of(*range(len(FILTERS)))


def mixed_logits(vocab: int) -> Tensor:
    rng = np.random.default_rng(vocab + 1)
    return torch.from_numpy(np.stack([random_row(rng, vocab) for _ in FILTERS]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab", [33, 64, 1000])
def test_strides_and_alignment_do_not_matter(dtype: torch.dtype, vocab: int) -> None:
    logits = mixed_logits(vocab).to(dtype)
    table, slots = mixed_table(vocab)
    expected = step(table, logits, slots).record
    for offset, stride in ((0, vocab + 1), (1, vocab + 64), (3, 2 * vocab + 7)):
        memory = torch.full((len(FILTERS) * stride + offset,), math.nan, dtype=dtype)
        strided = memory[offset:].view(len(FILTERS), stride)[:, :vocab]
        strided.copy_(logits)
        before = memory.clone()
        table, slots = mixed_table(vocab)
        assert torch.equal(step(table, strided, slots).record, expected)
        assert torch.equal(memory.view(torch.int8), before.view(torch.int8))


def test_one_row_may_serve_all() -> None:
    table, slots = mixed_table(111)
    other, _ = mixed_table(111)
    row = mixed_logits(111)[:1]
    shared = row.expand(len(FILTERS), -1)
    assert torch.equal(
        step(table, shared, slots).record, step(other, shared.contiguous(), slots).record
    )


# Threads.


def run_steps(vocab: int, steps: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Records of some steps of the mixed table, and what they left of its state."""
    table, slots = mixed_table(vocab)
    logits = mixed_logits(vocab)
    records = [step(table, logits.roll(i, 0), slots).record for i in range(steps)]
    return torch.stack(records), table.state, table.tables


@pytest.fixture
def threads() -> Any:
    """Sets the number of threads, and the size of the tasks that they share so that they do."""
    before, task = torch.get_num_threads(), cpu._TASK_LOGITS

    def set_threads(count: int) -> None:
        torch.set_num_threads(count)
        cpu._TASK_LOGITS = 1

    yield set_threads
    torch.set_num_threads(before)
    cpu._TASK_LOGITS = task


@pytest.mark.parametrize("vocab", [31, 1000])
def test_the_number_of_threads_does_not_matter(vocab: int, threads: Callable[[int], None]) -> None:
    expected = run_steps(vocab)
    for count in (1, 2, 5, 3):
        threads(count)
        for ours, theirs in zip(run_steps(vocab), expected, strict=True):
            assert torch.equal(ours, theirs)


def test_a_row_is_the_same_alone_and_in_any_batch() -> None:
    table, slots = mixed_table(1000)
    logits = mixed_logits(1000)
    expected = step(table, logits, slots).record
    alone, _ = mixed_table(1000)
    order = torch.randperm(len(FILTERS), generator=torch.Generator().manual_seed(0))
    for part in order.split([1, 7, 1, len(FILTERS) - 9]):
        with_padding = torch.cat([part, part[:1]])
        slots_here = with_padding.to(torch.int32)
        slots_here[-1] = -1
        record = step(alone, logits[with_padding], slots_here).record
        assert torch.equal(record[:-1], expected[part])
    assert torch.equal(alone.state[:-1], table.state[:-1])
    assert torch.equal(alone.tables, table.tables)


def test_tables_may_be_stepped_from_two_threads(threads: Callable[[int], None]) -> None:
    threads(2)
    vocabs = [1000, 64, 3001]
    expected = [run_steps(vocab) for vocab in vocabs]
    failures: list[str] = []

    def work(i: int) -> None:
        torch.set_num_threads(2)
        for _ in range(20):
            for ours, theirs in zip(run_steps(vocabs[i]), expected[i], strict=True):
                if not torch.equal(ours, theirs):
                    failures.append(f"vocab {vocabs[i]}")

    workers = [threading.Thread(target=work, args=(i,)) for i in range(len(vocabs))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_steps_with_threads_of_its_own(threads: Callable[[int], None]) -> None:
    threads(2)
    table, slots = mixed_table(1000)
    other, _ = mixed_table(1000)
    logits = mixed_logits(1000)
    expected = step(table, logits, slots).record  # starts the pool
    other.upload()
    output = torch.zeros_like(expected)
    child = os.fork()
    if child == 0:
        status = 1
        try:  # torch is left alone: its own threads do not live here
            cpu.sample_step(
                logits, slots, other.params, other.state, other.tables, output,
                torch.empty(0, dtype=torch.int32), other.layout,
                grammar_bitmask=None, words=None, given=None,
            )  # fmt: skip
            status = 0 if np.array_equal(output.numpy(), expected.numpy()) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# Records.


def test_rows_that_draw_nothing_leave_the_state_alone() -> None:
    table, _ = mixed_table(64)
    table.release(3)
    table.upload()
    table.state[5, 5] = 2  # finished
    before = [t.clone() for t in (table.state, table.tables)]
    result = step(table, mixed_logits(64)[:5], slots_of(-1, 3, 5, len(FILTERS), 2**31 - 1))
    assert result.token_ids.tolist() == [-1] * 5
    assert result.flags.tolist() == [1, 1, 16, 1, 1]
    assert result.finish_reason.tolist() == [0, 0, 2, 0, 0]
    assert result.generation.tolist() == [0, 0, 1, 0, 0]
    assert result.logprobs.isnan().all() and result.top_logprobs.isnan().all()
    assert (result.top_token_ids == -1).all() and (result.ranks == 0).all()
    assert all(torch.equal(a, b) for a, b in zip(before, (table.state, table.tables), strict=True))


def test_given_switches_optional_inputs_off() -> None:
    logits = mixed_logits(64)
    words = torch.zeros(len(FILTERS), dtype=torch.int64)
    bitmask = torch.full((len(FILTERS), 2), 0x0F0F)
    bitmask = bitmask.to(torch.int32)
    for use_bitmask in (0, 1):
        for use_words in (0, 1):
            table, slots = mixed_table(64)
            given = torch.tensor([use_bitmask, use_words], dtype=torch.int32)
            switched = step(table, logits, slots, words=words, grammar_bitmask=bitmask, given=given)
            table, slots = mixed_table(64)
            plain = step(
                table,
                logits,
                slots,
                words=words if use_words else None,
                grammar_bitmask=bitmask if use_bitmask else None,
            )
            assert torch.equal(switched.record, plain.record)


def test_it_says_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpu.unusable(torch.device("cpu")) == ""
    assert "CPU only" in cpu.unusable(torch.device("cuda"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cpu.unusable(torch.device("cpu")) == "numba is not installed"


def run_python(code: str, **env: str) -> str:
    """What a fresh process prints, in which no backend runs in an interpreter."""
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=plain | env, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_numba_that_does_not_import(tmp_path: Path) -> None:
    (tmp_path / "numba").mkdir()
    error = "Numba needs NumPy 1.9 or less.\\nGot NumPy 2.0."
    (tmp_path / "numba" / "__init__.py").write_text(
        f"print('tried', flush=True)\nraise ImportError('{error}')\n"
    )
    code = (
        "import torch\n"
        "from graphed_sampling import backends\n"
        "from graphed_sampling.backends import cpu\n"
        "assert cpu.unusable(torch.device('cuda')) == 'it runs on the CPU only'\n"
        "print('imported')\n"
        "print(backends.resolve('auto', torch.device('cpu')))\n"
        "print(cpu.unusable(torch.device('cpu')))\n"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    reason = "numba does not import: ImportError: Numba needs NumPy 1.9 or less. Got NumPy 2.0."
    assert run_python(code, PYTHONPATH=path).splitlines() == [
        "imported",
        "tried",
        "torch",
        reason,
    ]


def test_imported_and_stepped_under_other_defaults_of_torch() -> None:
    """The backend's own tensors are on the CPU, whatever the default device and type are."""
    code = """
import torch
torch.set_default_device("meta")
torch.set_default_dtype(torch.bfloat16)
from graphed_sampling.backends import cpu
torch.set_default_device(None)
torch.set_default_dtype(torch.float32)
from graphed_sampling.params import SamplingParams
from graphed_sampling.table import RequestTable

def step():
    table = RequestTable(2, 100, device="cpu")
    for _ in range(2):
        table.admit(SamplingParams(seed=7, top_p=0.9, logprobs=3, repetition_penalty=1.2), [1, 2])
    table.upload()
    logits = torch.linspace(-3, 3, 200).view(2, 100)
    output = torch.zeros(2, table.layout.output_words, dtype=torch.int32)
    slots, nothing = torch.arange(2, dtype=torch.int32), torch.empty(0, dtype=torch.int32)

    def inner():
        cpu._compiled.cache_clear()
        cpu.warm_up(table.layout, table.device, (torch.float32,))
        cpu.sample_step(
            logits, slots, table.params, table.state, table.tables, output, nothing, table.layout,
            grammar_bitmask=None, words=None, given=None,
        )
        order = cpu.canonical_order(100)
        assert (order.device.type, order.dtype) == ("cpu", torch.int64)
        return output

    return inner

expected = step()()
assert expected.any()
for device in ("cpu", "meta"):
    for dtype in (torch.float64, torch.bfloat16):
        inner = step()
        torch.set_default_dtype(dtype)
        with torch.device(device):
            output = inner()
        torch.set_default_dtype(torch.float32)
        assert torch.equal(output, expected), (device, dtype)
"""
    run_python(code)


@pytest.mark.parametrize("entry", ["step_rows", "score_rows"])
def test_codes_compiled_from_other_offsets_are_compiled_anew(
    entry: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """numba's cache looks at one file; the record offsets that are compiled in lie in another."""
    cpu._compiled(entry)  # with the digest as it is, whether or not the cache had it
    recompiled = []
    monkeypatch.setattr(kernels, "OFFSETS_DIGEST", kernels.OFFSETS_DIGEST + 1)
    monkeypatch.setattr(getattr(kernels, entry), "recompile", lambda: recompiled.append(True))
    cpu._compiled.cache_clear()
    cpu._compiled(entry)
    cpu._compiled.cache_clear()
    assert recompiled
