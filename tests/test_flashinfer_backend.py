"""The flashinfer backend's own: options and refusals, FlashInfer's laws, and fresh draws.

Without a GPU, tests/flashinfer_stand_in.py stands for FlashInfer between the backend's kernels. The
tests of the contract run for the backend without options; what its options change is checked here
against a few lines of numpy.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import math
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flashinfer_stand_in import StandIn, uniform
from helpers import (
    DTYPES,
    INF,
    NAN,
    BackendDevice,
    CheckedTable,
    assert_logprobs,
    check_fresh_draws,
    check_independence,
    on_host,
    place,
)
from test_triton_backend import run_python

from graphed_sampling import (
    GraphedSampler,
    RequestTable,
    RowFlags,
    Sampler,
    SamplingParams,
    UnsupportedFeatureError,
    backends,
    new_output,
    new_scratch,
)
from graphed_sampling.backends import flashinfer, triton
from graphed_sampling.backends.triton import GROUP
from graphed_sampling.layout import TableLayout
from graphed_sampling.reference import sample_row
from graphed_sampling.testing import chi_square, lm_like_logits

OPS = torch.ops.graphed_sampling
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
EXACT, KEEP = "flashinfer", "flashinfer:ties=keep"
JOINT, JOINT_EXACT = "flashinfer:filter_order=joint,ties=keep", "flashinfer:filter_order=joint"
LAWS_OF = (EXACT, KEEP, JOINT, JOINT_EXACT)
SLAB = "flashinfer:route=slab"
VOCAB = 192
"""Three groups of 64 tokens: a group is drawn first, then a token of it."""

REASONS = {kind: flashinfer.unusable(torch.device(kind)) for kind in ("cpu", "cuda")}


def _devices() -> list[Any]:
    skip_cpu = pytest.mark.skipif(bool(REASONS["cpu"]), reason=REASONS["cpu"] or "usable")
    skip_gpu = pytest.mark.skipif(bool(REASONS["cuda"]), reason=REASONS["cuda"] or "usable")
    return [
        pytest.param(CPU, id="cpu", marks=skip_cpu),
        pytest.param(CUDA, id="cuda", marks=[pytest.mark.gpu, skip_gpu]),
    ]


everywhere = pytest.mark.parametrize("device", _devices())
on_gpu = pytest.mark.parametrize("device", _devices()[1:])
eager_and_graphed = pytest.mark.parametrize("graphed", [False, True], ids=["eager", "graphed"])


def require_compiled(device: torch.device, backend: str) -> None:
    """Skip the one law on the GPU that compiles no branch which another has not."""
    if device.type == "cuda" and backend == JOINT_EXACT:
        pytest.skip("on the GPU the other three laws stand for it, branch by branch")


def few(device: torch.device, many: int, number: int) -> int:
    """How many rows or steps: few in Triton's interpreter."""
    return many if device.type == "cuda" else number


# Where it runs.


def test_it_says_why_it_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    unusable = flashinfer.unusable
    assert unusable(torch.device("meta")) == "FlashInfer runs on CUDA GPUs"
    monkeypatch.setattr(flashinfer, "STAND_IN", None)
    assert unusable(CPU) == "FlashInfer runs on CUDA GPUs"
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "flashinfer" else found(name)
    )
    expected = "flashinfer is not installed: it needs flashinfer-python==0.7.4"
    assert unusable(CUDA) == expected
    with pytest.raises(ValueError, match=expected):
        backends.resolve("flashinfer", CUDA)


@pytest.mark.parametrize("version", ["0.7.3", "0.7.5", "0.6.18", None])
def test_another_version_is_named(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    def answer(name: str) -> str:
        assert name == "flashinfer-python"
        if version is None:
            raise importlib.metadata.PackageNotFoundError
        return version

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib.metadata, "version", answer)
    shown = version or "of an unknown version"
    assert flashinfer.unusable(CUDA) == f"flashinfer-python is {shown}: it needs 0.7.4, exactly"


def test_auto_never_takes_it() -> None:
    for device in (CPU, CUDA):
        if device.type == "cuda" and not torch.cuda.is_available():
            continue
        assert backends.resolve("auto", device) != "flashinfer"
    assert backends.NAMES[-1] == "flashinfer"


def test_a_step_never_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    class Spec:
        is_aot = False

        def build_and_load(self) -> object:
            raise AssertionError("it compiled")

    monkeypatch.setattr(flashinfer, "_loaded", [])
    monkeypatch.setattr(flashinfer, "_spec", Spec)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with pytest.raises(RuntimeError, match=r"no step compiles: call .*flashinfer\.load"):
        flashinfer._functions(CUDA)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="before it is captured"):
        flashinfer._functions(CUDA)


def test_more_than_flashinfer_can_count() -> None:
    """Tokens by slab, groups of 64 otherwise."""
    layout = RequestTable(1, 2**22, device="cpu", penalties=False).layout
    slab = backends.module(SLAB)
    assert slab.scratch_words(layout, 1023) > 1023 * 2**22
    with pytest.raises(ValueError, match=r"1024 rows of 4194304 tokens are too many .* tokens in"):
        slab.scratch_words(layout, 1024)
    assert flashinfer.scratch_words(layout, 2**16 - 1) > 2**32 - 2**16
    with pytest.raises(
        ValueError, match=r"65536 rows of 4194304 .* 2\*\*32 groups of 64 in a step"
    ):
        flashinfer.scratch_words(layout, 2**16)


# Options.


def test_options_make_a_name() -> None:
    assert backends.with_options("flashinfer", {}) == "flashinfer"
    assert backends.with_options("flashinfer", {"ties": "exact"}) == "flashinfer"
    assert backends.with_options("flashinfer", {"ties": "keep"}) == KEEP
    both = {"ties": "keep", "filter_order": "joint"}
    assert backends.with_options("flashinfer", both) == JOINT
    assert backends.module(JOINT).NAME == JOINT
    assert backends.module(KEEP) is backends.module(KEEP)


@pytest.mark.parametrize(
    ("backend", "options", "message"),
    [
        ("flashinfer", {"ties": "split"}, r"ties = 'split' is not accepted: .*'exact' or 'keep'"),
        ("flashinfer", {"filter_order": "top_p_first"}, "filter_order = 'top_p_first'"),
        ("flashinfer", {"route": "cake"}, "route = 'cake' is not accepted: .*'direct' or 'slab'"),
        ("flashinfer", {"route": "slab", "ties": "keep"}, "filter_order and ties do not go with"),
        ("flashinfer", {"order": "joint"}, "has no option 'order'; it has route, filter_order"),
        ("torch", {"ties": "keep"}, "'torch' takes no options: 'ties=keep'"),
        ("auto", {"ties": "keep"}, "ties: options go with a backend that is named"),
    ],
)
def test_options_that_are_not_there(backend: str, options: dict[str, str], message: str) -> None:
    table = RequestTable(1, 8, device="cpu")
    for make in (Sampler, GraphedSampler):
        with pytest.raises(ValueError, match=message):
            make(table, backend=backend, **options)  # type: ignore[arg-type]


def test_a_sampler_knows_its_options() -> None:
    if REASONS["cpu"]:
        pytest.skip(REASONS["cpu"])
    table = RequestTable(1, 8, device="cpu")
    assert Sampler(table, "flashinfer", ties="keep").backend == KEEP
    assert GraphedSampler(table, backend=KEEP).backend == KEEP


# Refusals.

REFUSED = {
    "seed": (SamplingParams(seed=3), "numbers depend on the row"),
}


@everywhere
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_what_would_serve(device: torch.device, name: str) -> None:
    params, remedy = REFUSED[name]
    assert name in flashinfer.REFUSES
    admitted = RequestTable(2, 16, device=device)
    admitted.admit(params)
    for make in (Sampler, GraphedSampler):
        with pytest.raises(UnsupportedFeatureError, match=f"{name} = .*{remedy}"):
            make(admitted, backend="flashinfer")
    table = RequestTable(2, 16, device=device)
    sampler = Sampler(table, "flashinfer")
    slot = table.admit(SamplingParams())
    for refused in (lambda: table.admit(params), lambda: table.update(slot, params)):
        with pytest.raises(UnsupportedFeatureError, match=f"{name} = .*{remedy}"):
            refused()
    # Where it means nothing, nothing is refused.
    table.update(slot, replace(params, temperature=0.0))
    del sampler
    table.admit(params)


@everywhere
@pytest.mark.parametrize("backend", LAWS_OF)
def test_no_filter_is_refused(device: torch.device, backend: str) -> None:
    require_compiled(device, backend)
    assert {"seed", "words"} == backends.module(backend).REFUSES
    table = RequestTable(2, 16, device=device)
    sampler = Sampler(table, backend)
    table.admit(SamplingParams(top_k=3, top_p=0.5, min_p=0.1))
    with pytest.raises(UnsupportedFeatureError, match="seed = 1"):
        table.admit(SamplingParams(seed=1))
    assert sampler.backend == backend


@everywhere
def test_words_are_refused(device: torch.device) -> None:
    table = RequestTable(2, 16, device=device)
    slots = torch.tensor([table.admit(SamplingParams())], dtype=torch.int32)
    logits, words = torch.zeros(1, 16, device=device), torch.zeros(1, dtype=torch.int64)
    for make in (Sampler, GraphedSampler):
        sampler: Any = make(table, backend="flashinfer")
        with pytest.raises(UnsupportedFeatureError, match="words; FlashInfer draws with its own"):
            sampler(logits, slots, words=words)
    table.upload()
    with pytest.raises(UnsupportedFeatureError, match="words; FlashInfer draws with its own"):
        OPS.sample_step(
            logits, slots.to(device), table.params, table.state, table.tables,
            new_output(table, 1).record, new_scratch(table, "flashinfer", 1),
            table.layout.to_ints(), "flashinfer", words=words.to(device),
        )  # fmt: skip
    assert int(table.positions[0]) == 0


# The laws.


@dataclass
class Law:
    """What a row keeps, and the probabilities drawn with: ids ascending."""

    kept: np.ndarray
    probabilities: np.ndarray


def law_of(row: np.ndarray, params: SamplingParams, backend: str) -> Law:
    """min_p, top_k, top_p, with all ties kept or the first ids of them; joint: each looks at the
    whole row."""
    y = row.astype(np.float64)
    weights = np.exp((y - y.max()) / params.temperature)
    weights[y == -INF] = 0.0
    kept = y > -INF
    if params.min_p:
        kept &= y >= y.max() + params.temperature * math.log(params.min_p)
    # A token's place: among equals their first one's, or its own.
    order = np.argsort(-y, kind="stable")
    place = np.empty(len(y), int)
    place[order] = np.arange(len(y))
    if "ties=keep" in backend:
        place = np.searchsorted(-y[order], -y, side="left")
    whole = weights.sum()
    if 0 < params.top_k < kept.sum():
        kept &= place < params.top_k
    if params.top_p < 1:
        mass = whole if "joint" in backend else weights[kept].sum()
        up_to = np.concatenate([[0.0], np.cumsum(np.where(kept, weights, 0.0)[order])])
        kept &= up_to[place] < params.top_p * mass
    p = np.where(kept, weights, 0.0)
    return Law(np.flatnonzero(kept), p / p.sum())


def lm_row(seed: int, vocab: int = VOCAB) -> np.ndarray:
    return lm_like_logits(1, vocab, torch.Generator().manual_seed(seed))[0].numpy()


def tied(row: np.ndarray) -> np.ndarray:
    return np.round(row).astype(np.float32)


LAWS: dict[str, SamplingParams] = {
    "unfiltered": SamplingParams(),
    "hot": SamplingParams(temperature=2.5),
    "top_k": SamplingParams(top_k=20),
    "top_p": SamplingParams(top_p=0.8),
    "top_k-top_p": SamplingParams(top_k=12, top_p=0.7, temperature=1.3),
    "min_p": SamplingParams(min_p=0.05),
    "min_p-top_k-top_p": SamplingParams(min_p=0.02, top_k=15, top_p=0.9, temperature=0.8),
    "top_k-one": SamplingParams(top_k=1),
    "top_k-all": SamplingParams(top_k=1000, top_p=0.999),
}


@everywhere
@pytest.mark.parametrize("backend", LAWS_OF)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ["smooth", "tied"])
def test_every_law_keeps_what_it_should(
    device: torch.device, backend: str, dtype: str, rows: str
) -> None:
    """num_kept and processed logprobs of all tokens are the law's; the draws lie in it."""
    require_compiled(device, backend)
    values = np.stack([lm_row(i) for i in range(len(LAWS))])
    logits = torch.from_numpy(tied(values) if rows == "tied" else values).to(DTYPES[dtype])
    exact = logits.float().numpy()
    table = RequestTable(len(LAWS), VOCAB, device=device, max_logprobs=VOCAB, seed=1)
    for params in LAWS.values():
        table.admit(replace(params, logprobs=VOCAB, logprobs_mode="processed"))
    sampler = Sampler(table, backend)
    slots = torch.arange(len(LAWS), dtype=torch.int32)
    for _ in range(few(device, 50, 1)):
        host = on_host(sampler(logits.to(device), slots))
        for i, (name, params) in enumerate(LAWS.items()):
            law = law_of(exact[i], params, backend)
            filtered = params.features() - {"temperature"} and params.top_k < VOCAB
            if filtered or params.top_p < 1:
                assert int(host.num_kept[i]) == len(law.kept), name
            token = int(host.token_ids[i])
            assert law.probabilities[token] > 0, name
            assert_logprobs(host.logprobs[i], math.log(law.probabilities[token]), name)
            shown = host.top_token_ids[i][host.top_token_ids[i] >= 0].tolist()
            assert sorted(shown) == law.kept.tolist(), name
            expected = np.log(law.probabilities[shown])
            assert_logprobs(host.top_logprobs[i, : len(shown)], expected, name)


def test_the_laws_differ_where_they_should() -> None:
    """Else the test above would not tell one from another."""
    rows = [tied(lm_row(i)) for i in range(len(LAWS))]
    kept = {
        backend: tuple(
            tuple(law_of(row, params, backend).kept)
            for row, params in zip(rows, LAWS.values(), strict=True)
        )
        for backend in LAWS_OF
    }
    assert len(set(kept.values())) == len(LAWS_OF)
    for row, params, exact in zip(rows, LAWS.values(), kept[EXACT], strict=True):
        assert exact == tuple(sorted(sample_row(row, params, word=0).survivors))


@everywhere
@pytest.mark.parametrize("length", ["short", "long"])
@pytest.mark.parametrize("backend", [KEEP, JOINT, JOINT_EXACT])
def test_laws_of_long_lists_and_flat_rows(device: torch.device, backend: str, length: str) -> None:
    """Rows whose survivors are more than a list holds, ties and all."""
    require_compiled(device, backend)
    # On the GPU rows for which other tests have the kernels compiled.
    vocab = 5000 if length == "short" else few(device, 128_256, 40_000)
    rng = np.random.default_rng(vocab)
    flat = rng.normal(0, 0.3, vocab).astype(np.float32)
    coarse = (np.round(flat * 8) / 8).astype(np.float32)
    many = SamplingParams(top_k=1500, top_p=0.9)
    cases = [
        (flat, SamplingParams(top_p=0.9)),
        (coarse, SamplingParams(top_p=0.9)),
        (coarse, SamplingParams(top_k=300)),
        (flat, many),
        (coarse, many),
        (flat, SamplingParams(top_k=200, top_p=0.02)),
    ]
    if vocab > 10_000 and device.type == "cpu":
        cases = cases[:2]
    table = RequestTable(len(cases), vocab, device=device, seed=1)
    for _, params in cases:
        table.admit(replace(params, logprobs=0, logprobs_mode="processed"))
    sampler = GraphedSampler(table, (len(cases),), torch.float32, backend=backend)
    logits = torch.from_numpy(np.stack([row for row, _ in cases])).to(device)
    host = on_host(sampler(logits, torch.arange(len(cases), dtype=torch.int32)))
    for i, (row, params) in enumerate(cases):
        law = law_of(row, params, backend)
        # A token's mass of a flat row is near what rounding may move the cut by.
        assert abs(int(host.num_kept[i]) - len(law.kept)) <= (row is flat), (i, params)
        token = int(host.token_ids[i])
        assert law.probabilities[token] > 0
        tolerance = 1e-4 if row is flat else 2e-6
        assert float(host.logprobs[i]) == pytest.approx(
            math.log(law.probabilities[token]), abs=tolerance * 8
        )


# The route by slab.


def slab_rows(dtype: torch.dtype, vocab: int) -> tuple[torch.Tensor, list[SamplingParams]]:
    """Rows whose k-th token stands apart, and rows in which it does not."""
    asked = [
        {"top_k": 1},
        {"top_k": 7, "top_p": 0.8},
        {"top_k": 50, "min_p": 0.05, "temperature": 0.7},
        {"top_k": 40, "temperature": 1e4},
        {"top_k": vocab - 1},
        {"top_k": vocab - 2, "typical_p": 0.8},
        {"top_k": 1023, "eta_cutoff": 0.01},
        {"top_k": 5, "top_n_sigma": 1.0},
        {"top_k": 6, "logit_bias": {0: 9.0, 1: -INF}},
        {"top_p": 0.9},
        {},
        {"temperature": 0.0},
    ]
    values = np.stack([lm_row(i, vocab) for i in range(len(asked))])
    values[1] = tied(values[1])
    values[2, vocab // 2] = NAN
    return torch.from_numpy(values).to(dtype), [
        SamplingParams(seed=i, logprobs=2, logprobs_mode="processed", **fields)
        for i, fields in enumerate(asked)
    ]


@everywhere
@pytest.mark.parametrize("vocab", [2, 3, 40, 1024, 1100], ids=lambda v: f"V{v}")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_slab_s_rows_are_the_reference_s(device: torch.device, dtype: str, vocab: int) -> None:
    if reason := backends.module(SLAB).unusable(device):
        pytest.skip(reason)
    if device.type == "cpu" and dtype == "bf16" and vocab not in (3, 1100):
        pytest.skip("in Triton's interpreter a short and a long row say that bf16 is copied")
    logits, asked = slab_rows(DTYPES[dtype], vocab)
    checked = CheckedTable(BackendDevice(SLAB, device), vocab, len(asked))
    for slot, params in enumerate(asked):
        checked.admit(params, slot=slot)
    for step in range(few(device, 20, 2)):
        words = torch.from_numpy(np.random.default_rng(step).integers(-(2**63), 2**63, len(asked)))
        checked.step(logits.to(device), range(len(asked)), words=None if step % 2 else words)
    checked.check_state()
    checked.tally.check()


@everywhere
def test_a_slab_is_what_rows_are_drawn_from(device: torch.device) -> None:
    """Where the k-th stands apart its list is the slab's; a slab that holds others shows."""
    if device.type != "cpu":
        pytest.skip("only a stand-in's slab can be wrong")
    table = RequestTable(1, VOCAB, device=device)
    table.admit(SamplingParams(top_k=3, seed=1))
    sampler = Sampler(table, "flashinfer", route="slab")
    row = np.linspace(0.0, 30.0, VOCAB, dtype=np.float32)

    class Worst(StandIn):
        def top_k_probs_to_slab(self, p: Any, top_k: Any, /, **given: Any) -> None:
            super().top_k_probs_to_slab(p, top_k, **given)
            given["out_idx"][0, :4] = VOCAB - 1 - given["out_idx"][0, :4]

    stand_in = flashinfer.STAND_IN
    try:
        flashinfer.STAND_IN = Worst()
        host = on_host(sampler(torch.from_numpy(row)[None], torch.zeros(1, dtype=torch.int32)))
    finally:
        flashinfer.STAND_IN = stand_in
    assert int(host.num_kept[0]) < 3 or int(host.token_ids[0]) < VOCAB - 4


@pytest.mark.parametrize("wrong", [-1, VOCAB, 2**31 - 1, -(2**31)])
def test_a_slab_that_names_what_does_not_exist_tells_nothing(
    monkeypatch: pytest.MonkeyPatch, wrong: int
) -> None:
    """Its row is drawn from what we find ourselves, and no memory is read at such a place."""
    if REASONS["cpu"]:
        pytest.skip(REASONS["cpu"])

    class Wrong(StandIn):
        def top_k_probs_to_slab(self, p: Any, top_k: Any, /, **given: Any) -> None:
            super().top_k_probs_to_slab(p, top_k, **given)
            given["out_idx"][0, 2] = wrong

    monkeypatch.setattr(flashinfer, "STAND_IN", Wrong())
    checked = CheckedTable(BackendDevice(SLAB, CPU), VOCAB, 2)
    for slot in range(2):
        checked.admit(SamplingParams(top_k=3, seed=slot, logprobs=3), slot=slot)
    row = torch.linspace(0.0, 30.0, VOCAB)
    for _ in range(3):
        checked.step(row.expand(2, -1).contiguous(), range(2))
    checked.check_state()
    checked.tally.check()


# Draws.


@dataclass
class Stream:
    """A table of rows that share their laws in turn, and all that was drawn from it."""

    device: torch.device
    backend: str
    params: list[SamplingParams]
    logits: torch.Tensor
    seed: int = 5

    def run(self, steps: int, *, graphed: bool = True) -> torch.Tensor:
        """int64 [steps, rows]"""
        rows, vocab = self.logits.shape
        table = RequestTable(rows, vocab, device=self.device, seed=self.seed)
        for i in range(rows):
            table.admit(self.params[i % len(self.params)], [1] * (i % 3))
        sampler: Any = (
            GraphedSampler(table, (rows,), self.logits.dtype, backend=self.backend)
            if graphed
            else Sampler(table, self.backend)
        )
        slots = torch.arange(rows, dtype=torch.int32, device=self.device)
        logits = self.logits.to(self.device)
        drawn = [sampler(logits, slots).token_ids.clone() for _ in range(steps)]
        return torch.stack(drawn).cpu()


def mixed_stream(device: torch.device, backend: str, dtype: torch.dtype, rows: int) -> Stream:
    params = [*LAWS.values(), SamplingParams(temperature=0.0)]
    values = np.stack([lm_row(100 + i % len(params)) for i in range(rows)])
    return Stream(device, backend, params, torch.from_numpy(values).to(dtype))


# A right sampler fails one of these tests once in ten thousand choices of seeds.
FALSE_ALARM = 1e-4 / 20


@on_gpu
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("backend", [KEEP, JOINT])
def test_a_thousand_replays_follow_the_law(device: torch.device, backend: str, dtype: str) -> None:
    """Neighbours differ in everything; each law by itself, from one graph's replays."""
    stream = mixed_stream(device, backend, DTYPES[dtype], 80)
    drawn = stream.run(1000)
    number = len(stream.params)
    for i, params in enumerate(stream.params):
        row = stream.logits[i].float().numpy()
        column = drawn[:, i::number].flatten()
        if params.is_greedy:
            assert set(column.tolist()) == {int(row.argmax())}
            continue
        law = law_of(row, params, backend)
        hits = torch.bincount(column, minlength=VOCAB)
        expected = torch.from_numpy(law.probabilities)
        chi_square(hits, expected, false_alarm=FALSE_ALARM / number)
    # And a replay draws what an eager step draws.
    assert torch.equal(stream.run(40, graphed=False), drawn[:40])
    assert torch.equal(stream.run(40), drawn[:40])


@on_gpu
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_large_vocabulary_follows_the_law(device: torch.device, dtype: str) -> None:
    """FlashInfer's kernels for long rows, of one cluster each."""
    vocab, rows = 128_256, 64
    row = lm_row(3, vocab)
    logits = torch.from_numpy(row).to(DTYPES[dtype]).expand(rows, vocab).contiguous()
    params = [SamplingParams(top_k=50, top_p=0.95), SamplingParams(top_p=0.9), SamplingParams()]
    drawn = Stream(device, KEEP, params, logits).run(1000)
    for i, one in enumerate(params):
        law = law_of(logits[0].float().numpy(), one, KEEP)
        hits = torch.bincount(drawn[:, i :: len(params)].flatten(), minlength=vocab)
        # Of the tail some hits may be outside by rounding; inside the head there are none.
        expected = torch.from_numpy(law.probabilities)
        outside = hits[expected == 0].sum()
        assert int(outside) <= 3, f"{one}: {int(outside)} draws outside"
        hits[expected == 0] = 0
        chi_square(hits, expected, false_alarm=FALSE_ALARM / 3)


@everywhere
@eager_and_graphed
def test_no_draw_tells_of_the_next(device: torch.device, graphed: bool) -> None:
    """FlashInfer's offset + 1 is the neighbouring step's numbers, shifted (known of it)."""
    p = torch.tensor([0.3, 0.25, 0.2, 0.1, 0.1, 0.05], dtype=torch.float64)
    ids = torch.tensor([0, 63, 64, 90, 91, 130])  # two, three and one of a group
    rows = few(device, 256, 8)
    logits = torch.full((rows, VOCAB), -INF)
    logits[:, ids] = p.log().float()
    stream = Stream(device, "flashinfer", [SamplingParams()], logits)
    if device.type == "cpu" and graphed:
        # Without graphs to replay these draws are the eager steps', which are tested.
        assert torch.equal(stream.run(3), stream.run(3, graphed=False))
        return
    drawn = stream.run(few(device, 200, 30), graphed=graphed)
    assert torch.isin(drawn, ids).all()
    drawn = torch.searchsorted(ids, drawn)
    check_independence(drawn, p, FALSE_ALARM)
    hits = torch.bincount(drawn.flatten(), minlength=6)
    chi_square(hits, p, false_alarm=FALSE_ALARM)


@everywhere
def test_a_replay_draws_afresh(device: torch.device) -> None:
    """A captured FlashInfer call repeats its draw for ever (Megatron #5697, flashinfer #2284)."""
    stream = Stream(device, "flashinfer", [SamplingParams()], torch.zeros(2, 1024))
    drawn = stream.run(few(device, 1000, 30))
    for column in drawn.T.tolist():
        check_fresh_draws(column)
    assert (drawn[:, 0] != drawn[:, 1]).any()
    hits = torch.bincount(drawn.flatten() // 32, minlength=32)
    chi_square(hits, torch.full((32,), 1 / 32), false_alarm=FALSE_ALARM)


def test_a_stand_in_draws_with_curand_s_numbers() -> None:
    """cuRAND's Philox: curand_init(seed, subsequence, offset) is block offset / 4, element % 4."""
    numbers = {uniform(7, 3, offset) for offset in range(64)}
    assert len(numbers) == 64 and all(0 < u <= 1 for u in numbers)
    assert uniform(7, 4, 0) != uniform(7, 3, 0) != uniform(8, 3, 0)


@on_gpu
@pytest.mark.parametrize("vocab", [50, 64, 2048])
def test_the_stand_in_draws_what_flashinfer_draws(device: torch.device, vocab: int) -> None:
    """By the same numbers, of short rows and of rows as long as groups are many."""
    rows = 16
    p = torch.softmax(torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1)), 1)
    seeds = torch.arange(rows) * 12345678901
    offsets = torch.arange(rows) * 4 + torch.arange(rows) % 2
    drawn = []
    for functions, place_ in ((StandIn(), CPU), (flashinfer.load(), device)):
        samples = torch.zeros(rows, dtype=torch.int32, device=place_)
        functions.sampling_from_probs(  # type: ignore[attr-defined]
            p.to(place_), samples, torch.zeros(rows, dtype=torch.bool, device=place_), None, True,
            seeds.to(place_), 0, offsets.to(place_), 0,
        )  # fmt: skip
        drawn.append(samples.cpu())
    assert torch.equal(*drawn)


# What FlashInfer's samplers have got wrong in public.

BAD_ROWS_ASK = [
    pytest.param(SamplingParams(logprobs=1), id="unfiltered"),
    pytest.param(SamplingParams(logprobs=1, top_k=3, top_p=0.9), id="filtered"),
]


@everywhere
@eager_and_graphed
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("asked", BAD_ROWS_ASK)
def test_bad_rows_never_reach_flashinfer(
    device: torch.device, graphed: bool, dtype: str, asked: SamplingParams
) -> None:
    """NaN, infinities, nothing at all (flashinfer #1575, #2402, #769, #3623): flags, bounded ids,
    neighbours right. The stand-in fails on NaN."""
    rows = [lm_row(1), np.full(VOCAB, NAN), lm_row(2), np.full(VOCAB, -INF), lm_row(3), lm_row(4)]
    rows[2] = np.where(np.arange(VOCAB) % 3 == 0, NAN, rows[2])
    rows[4] = np.where(np.arange(VOCAB) % 9 == 4, INF, rows[4])
    bad = torch.from_numpy(np.stack(rows).astype(np.float32)).to(DTYPES[dtype])
    good = bad.clone()
    for i in (1, 2, 3, 4):
        good[i] = good[0]
    records = []
    for logits in (good, bad):
        table = RequestTable(8, VOCAB, device=device, seed=1)
        for _ in rows:
            table.admit(asked)
        sampler: Any = Sampler(table, "flashinfer")
        if graphed:
            sampler = GraphedSampler(table, (8,), DTYPES[dtype], backend="flashinfer")
        slots = torch.arange(len(rows), dtype=torch.int32)
        for _ in range(few(device, 3, 2)):
            host = on_host(sampler(logits.to(device), slots))
        records.append(host)
    nan, inf, empty = RowFlags.NAN, RowFlags.POS_INF, RowFlags.EMPTY
    assert records[1].flags.tolist() == [0, nan | empty, nan, empty, inf, 0]
    assert records[1].token_ids[[1, 3]].tolist() == [0, 0]
    assert int(records[1].token_ids[2]) % 3 != 0
    assert int(records[1].token_ids[4]) % 9 == 4
    for row in (0, 5):
        assert torch.equal(records[0].record[row], records[1].record[row])


@everywhere
def test_padding_that_holds_nan_is_harmless(device: torch.device) -> None:
    """Rows without a request hold whatever the model left there."""
    table = RequestTable(4, VOCAB, device=device, seed=2)
    slot = table.admit(SamplingParams())
    sampler = Sampler(table, "flashinfer")
    logits = torch.full((4, VOCAB), NAN)
    logits[2] = 0.0
    host = on_host(sampler(logits.to(device), torch.tensor([-1, -1, slot, -1]).int()))
    assert host.token_ids.tolist()[:2] == [-1, -1] and 0 <= int(host.token_ids[2]) < VOCAB


@everywhere
def test_greedy_rows_are_the_lowest_id_of_the_largest(device: torch.device) -> None:
    """T = 0 makes FlashInfer's softmax uniform, or NaN beside -inf; top_k = 1 keeps all equals."""
    rows = np.zeros((3, VOCAB), np.float32)
    rows[0, [7, 40]] = 3.0
    rows[1, [9, 63]] = 3.0
    rows[1, 20:30] = -INF
    rows[2] = -5.0
    table = RequestTable(3, VOCAB, device=device, seed=3)
    for _ in rows:
        table.admit(SamplingParams(temperature=0.0, logprobs=0, logprobs_mode="processed"))
    sampler = Sampler(table, "flashinfer")
    for dtype in DTYPES.values():
        logits = torch.from_numpy(rows).to(dtype).to(device)
        host = on_host(sampler(logits, torch.arange(3, dtype=torch.int32)))
        assert host.token_ids.tolist() == [7, 9, 0]
        assert host.logprobs.tolist() == [0.0, 0.0, 0.0]


@everywhere
def test_ties_at_the_kth_are_what_was_asked_for(device: torch.device) -> None:
    """[.4, .3, .3, 0], k = 2 (flashinfer #3774): three kept, by name; refused without it."""
    with np.errstate(divide="ignore"):
        row = np.log(np.array([0.4, 0.3, 0.3, 0.0])).astype(np.float32)
    table = RequestTable(1, 4, device=device, seed=3)
    sampler = Sampler(table, "flashinfer", ties="keep")
    table.admit(SamplingParams(top_k=2, logprobs=4, logprobs_mode="processed"))
    logits = torch.from_numpy(row)[None].to(device)
    host = on_host(sampler(logits, torch.zeros(1, dtype=torch.int32)))
    assert int(host.num_kept[0]) == 3
    assert host.top_token_ids[0, :4].tolist() == [0, 1, 2, -1]
    assert_logprobs(host.top_logprobs[0, :3], np.log([0.4, 0.3, 0.3]))


@everywhere
@pytest.mark.parametrize("backend", [KEEP, JOINT])
def test_the_token_that_crosses_is_kept(device: torch.device, backend: str) -> None:
    """top_p = 0.5 of [.4, .3, .2, .1] keeps two (flashinfer #2202), top_p = 1e-6 one; and top_k
    with top_p, which asserted or dropped one of them (Megatron), has both."""
    p = np.array([0.4, 0.3, 0.2, 0.1])
    asked = [{"top_p": 0.5}, {"top_p": 1e-6}, {"top_k": 3, "top_p": 0.75}]
    kept = [2, 1, 2 if backend == KEEP else 3]
    table = RequestTable(3, 4, device=device, seed=3)
    sampler = Sampler(table, backend)
    for fields in asked:
        table.admit(SamplingParams(**fields))
    logits = torch.from_numpy(np.log(np.stack([p] * 3)).astype(np.float32)).to(device)
    host = on_host(sampler(logits, torch.arange(3, dtype=torch.int32)))
    assert host.num_kept.tolist() == kept


@on_gpu
def test_the_last_id_takes_no_missing_mass(device: torch.device) -> None:
    """bf16 probabilities add up to anything but 1; the last id must not have the rest."""
    vocab = 4096
    row = torch.randn(vocab, generator=torch.Generator().manual_seed(1)).bfloat16()
    logits = row.expand(256, vocab).contiguous()
    drawn = Stream(device, "flashinfer", [SamplingParams()], logits).run(400)
    p = torch.softmax(row.double(), 0)
    last = torch.bincount(drawn.flatten() // 64, minlength=vocab // 64)
    chi_square(last, p.view(-1, 64).sum(1), false_alarm=FALSE_ALARM)


@everywhere
@pytest.mark.parametrize("temperature", [1e-4, 50.0, 100.0, 1e4, 3e38])
@pytest.mark.parametrize("scale", [1.0, 1e30, 2.0**-149])
def test_ranges_in_which_fp32_probabilities_fail(
    device: torch.device, temperature: float, scale: float
) -> None:
    """Where a softmax's 1 / T and y / T leave fp32's range (flashinfer #769, #3623: subnormals)
    rows keep what they should."""
    row = (np.arange(VOCAB, dtype=np.float64) * scale).astype(np.float32)
    table = RequestTable(2, VOCAB, device=device, seed=3)
    sampler = Sampler(table, "flashinfer", ties="keep")
    table.admit(SamplingParams(temperature=temperature, top_k=5))
    table.admit(SamplingParams(temperature=temperature, min_p=1.0))
    logits = torch.from_numpy(np.stack([row] * 2)).to(device)
    for _ in range(2):
        host = on_host(sampler(logits, torch.arange(2, dtype=torch.int32)))
        assert host.num_kept.tolist() == [5, 1]
        assert VOCAB - 5 <= int(host.token_ids[0]) < VOCAB
        assert int(host.token_ids[1]) == VOCAB - 1


@everywhere
@pytest.mark.parametrize("placement", ["strided", "padded", "unaligned"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_rows_that_flashinfer_cannot_read_as_they_are(
    device: torch.device, placement: str, dtype: str
) -> None:
    """Strides (flashinfer #1866), padded vocabularies (Megatron): as contiguous rows."""
    values = np.stack([lm_row(i) for i in range(4)])
    records = []
    for name in ("contiguous", placement):
        table = RequestTable(4, VOCAB, device=device, seed=3)
        for _ in range(4):
            table.admit(SamplingParams(logprobs=2, min_p=0.01))
        placed = place(values, device, DTYPES[dtype], name)
        host = on_host(Sampler(table, "flashinfer")(placed.logits, torch.arange(4).int()))
        placed.check_unmodified()
        records.append(host)
    for field in ("num_kept", "top_token_ids", "flags"):
        assert torch.equal(getattr(records[0], field), getattr(records[1], field))
    assert torch.equal(records[0].token_ids, records[1].token_ids)


@everywhere
def test_what_flashinfer_draws_from(device: torch.device) -> None:
    """The groups' probabilities, and those of the tokens of the group that it draws."""
    cases: list[tuple[SamplingParams, SamplingParams | None]] = [
        (SamplingParams(), None),
        (SamplingParams(temperature=3.0), None),
        (SamplingParams(min_p=0.1), None),
        (SamplingParams(top_k=9, top_p=0.9), None),
        (SamplingParams(logit_bias={5: 2.0}), SamplingParams()),
        (SamplingParams(logit_bias={5: 2.0}, top_p=0.8), SamplingParams(top_p=0.8)),
        (SamplingParams(allowed_token_ids=list(range(70, 2100))), SamplingParams()),
        (SamplingParams(presence_penalty=1.5, top_k=100), SamplingParams(top_k=100)),
        (SamplingParams(temperature=0.0), SamplingParams(top_k=1)),
    ]
    vocab, output = 2500, [3, 64, 2400, 2400]
    values = np.stack([tied(2 * lm_row(i, vocab)) / 2 for i in range(len(cases))])
    table = RequestTable(len(cases) + 1, vocab, device=device, seed=3)
    for params, _ in cases:
        table.admit(params, output_token_ids=output)
    sampler = Sampler(table, EXACT)
    slots = torch.tensor([*range(len(cases)), -1], dtype=torch.int32)
    logits = torch.from_numpy(np.concatenate([values, values[:1]])).to(device)
    sampler(logits, slots)
    buffers = flashinfer._Buffers.of(sampler._step._scratch, table.layout, len(slots))
    groups = buffers.group_probabilities.double().cpu().numpy()
    tokens = buffers.token_probabilities.double().cpu().numpy()
    drawn = buffers.groups.tolist()
    for i, (params, filters) in enumerate(cases):
        y = values[i].copy()
        for token, bias in params.logit_bias.items():
            y[token] += bias
        if params.allowed_token_ids:
            y[[t for t in range(vocab) if t not in set(params.allowed_token_ids)]] = -INF
        y[list(set(output))] -= params.presence_penalty
        p = law_of(y, filters or params, EXACT).probabilities
        padded = np.zeros(groups.shape[1] * 64)
        padded[:vocab] = p
        expected = padded.reshape(-1, 64)
        np.testing.assert_allclose(groups[i], expected.sum(1), rtol=1e-5, atol=1e-12)
        inside = expected[drawn[i]] / expected[drawn[i]].sum()
        np.testing.assert_allclose(tokens[i], inside, rtol=1e-5, atol=1e-12)
    # A row of nobody has something to draw from too.
    assert groups[-1, 0] == tokens[-1, 0] == groups[-1].sum() == tokens[-1].sum() == 1.0


@everywhere
def test_seeds_and_offsets_are_the_requests(device: torch.device) -> None:
    """Every row has a seed of its own, not the first one's (flashinfer #4861, TRT-LLM #17172), and
    two numbers of a position's own."""
    table = RequestTable(3, VOCAB, device=device, seed=3)
    slots = [table.admit(SamplingParams(), [1] * i) for i in range(3)]
    sampler = Sampler(table, "flashinfer")
    logits = torch.zeros(3, VOCAB, device=device)
    for step in range(3):
        sampler(logits, torch.arange(3, dtype=torch.int32))
        buffers = flashinfer._Buffers.of(sampler._step._scratch, table.layout, 3)
        seeds = [table.request(slot).seed for slot in slots]
        assert [s % 2**64 for s in buffers.seeds.tolist()] == seeds
        assert buffers.group_offsets.tolist() == [4 * (i + step) for i in range(3)]
        assert buffers.token_offsets.tolist() == [4 * (i + step) + 1 for i in range(3)]
        assert bool(buffers.valid.all())


@on_gpu
@pytest.mark.parametrize("backend", [KEEP, JOINT])
def test_two_tables_on_two_streams(device: torch.device, backend: str) -> None:
    """Scratch of one process (flashinfer #3618, #4692), CTAs that wait for each other (#4544,
    #3610): two graphs replayed 1000 times at once, while other kernels fill the GPU."""
    vocab, rows, rounds = 128_256, 32, 1000

    def stepper(number: int) -> Callable[[], torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        logits = torch.randn(rows, vocab, generator=generator).to(device) * 3
        table = RequestTable(rows, vocab, device=device, seed=number, penalties=False)
        for i in range(rows):
            table.admit(SamplingParams(top_k=50 * (i % 2), top_p=0.9, logprobs=0))
        sampler = GraphedSampler(table, (rows,), backend=backend)
        slots = torch.arange(rows, dtype=torch.int32, device=device)
        records = torch.empty(rounds, rows, table.layout.output_words, dtype=torch.int32)
        records = records.to(device)

        def steps() -> torch.Tensor:
            for record in records:
                record.copy_(sampler(logits, slots).record)
            return records.cpu()

        return steps

    alone = [stepper(number)() for number in (1, 2)]
    steppers = [stepper(number) for number in (1, 2)]
    torch.cuda.synchronize()
    results: dict[int, torch.Tensor] = {}
    barrier = threading.Barrier(3)

    def run(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream(device)):
            barrier.wait()
            results[index] = steppers[index]()

    def occupy() -> None:
        with torch.cuda.stream(torch.cuda.Stream(device)):
            a = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
            barrier.wait()
            for _ in range(1000):
                a @ a

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    threads.append(threading.Thread(target=occupy))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(2):
        assert torch.equal(results[index], alone[index])


@on_gpu
def test_a_replay_allocates_nothing(device: torch.device) -> None:
    table = RequestTable(32, 32000, device=device, seed=3)
    for _ in range(32):
        table.admit(SamplingParams(top_k=50, top_p=0.9, logprobs=2))
    sampler = GraphedSampler(table, (32,), backend=KEEP)
    logits = sampler.logits_buffer(32).normal_()
    slots = torch.arange(32, dtype=torch.int32, device=device)
    sampler(logits, slots)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(10):
        sampler(logits, slots)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@on_gpu
def test_reruns_are_equal_bit_for_bit(device: torch.device) -> None:
    """1000 reruns (flashinfer #5034: 99 of 99 differed)."""
    vocab, rows = 32_000, 64
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(rows, vocab, generator=generator) * 2).to(device)
    table = RequestTable(rows, vocab, device=device, seed=3, penalties=False)
    for i in range(rows):
        table.admit(SamplingParams(top_k=0 if i % 3 else 40, top_p=0.9, logprobs=3))
    sampler = GraphedSampler(table, (rows,), backend=KEEP)
    slots = torch.arange(rows, dtype=torch.int32, device=device)
    table.upload()
    state = table.state.clone()
    first = None
    for _ in range(1000):
        table.state.copy_(state)
        record = sampler(logits, slots).record
        first = record.clone() if first is None else first
        assert torch.equal(record, first)


# The op.


def op_arguments(device: torch.device, rows: int = 6, vocab: int = VOCAB) -> dict[str, Any]:
    def full(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype, device=device)

    return {
        "logits": torch.from_numpy(np.stack([lm_row(i, vocab) for i in range(rows)])).to(device),
        "temperature": full(0.9),
        "top_k": full(8, torch.int32),
        "top_p": full(0.9),
        "min_p": full(0.0),
        "seed": torch.arange(rows, device=device),
        "offset": full(0, torch.int64),
    }


@everywhere
@pytest.mark.parametrize("filter_order", ["top_k_first", "joint"])
def test_the_op_draws_by_the_law(device: torch.device, filter_order: str) -> None:
    arguments = op_arguments(device)
    rows = arguments["logits"].cpu().numpy()
    params = SamplingParams(temperature=0.9, top_k=8, top_p=0.9)
    seen = []
    for step in range(few(device, 200, 4)):
        tokens, logprobs = OPS.flashinfer_sample(**arguments, filter_order=filter_order)
        assert tokens.dtype == torch.int64 and logprobs.dtype == torch.float32
        assert arguments["offset"].tolist() == [4 * (step + 1)] * 6
        raw = torch.log_softmax(arguments["logits"].double(), 1).gather(1, tokens[:, None])[:, 0]
        torch.testing.assert_close(logprobs.double(), raw, rtol=0, atol=1e-5)
        for i, token in enumerate(tokens.tolist()):
            law = law_of(rows[i], params, JOINT if filter_order == "joint" else KEEP)
            assert law.probabilities[token] > 0
        seen.append(tuple(tokens.tolist()))
    assert len(set(seen)) > 0.9 * len(seen)
    arguments["offset"].zero_()
    again, _ = OPS.flashinfer_sample(**arguments, filter_order=filter_order)
    assert tuple(again.tolist()) == seen[0]


@everywhere
def test_the_op_reads_every_row_s_seed(device: torch.device) -> None:
    """Seeds 1111, 2222, 3333, 4444 against 1111 x 4 (flashinfer #4861, TRT-LLM #17172)."""
    arguments = op_arguments(device, 4, 1024)
    arguments |= {"logits": torch.zeros(4, 1024, device=device)}
    arguments["top_k"].zero_()
    arguments["top_p"].fill_(1.0)
    drawn = {}
    for seeds in ((1111, 2222, 3333, 4444), (1111,) * 4):
        arguments["seed"].copy_(torch.tensor(seeds))
        arguments["offset"].zero_()
        drawn[seeds], _ = OPS.flashinfer_sample(**arguments)
    one, other = drawn.values()
    assert int(one[0]) == int(other[0])
    assert (one[1:] != other[1:]).all()


@everywhere
def test_the_op_takes_what_sample_takes(device: torch.device) -> None:
    arguments = op_arguments(device)
    arguments["temperature"][0] = 0.0
    arguments["temperature"][1] = NAN
    arguments["top_p"][2] = 7.0
    tokens, _ = OPS.flashinfer_sample(**arguments)
    greedy = arguments["logits"].argmax(1)
    assert torch.equal(tokens[:2], greedy[:2])
    for name, wrong in (
        ("offset", arguments["offset"].int()),
        ("offset", arguments["offset"][:3]),
        ("seed", arguments["seed"].float()),
        ("logits", arguments["logits"].double()),
    ):
        with pytest.raises(ValueError, match=name):
            OPS.flashinfer_sample(**(arguments | {name: wrong}))
    with pytest.raises(ValueError, match="filter_order = 'either'"):
        OPS.flashinfer_sample(**arguments, filter_order="either")
    none = {name: value[:0] for name, value in arguments.items()}
    tokens, logprobs = OPS.flashinfer_sample(**none)
    assert tokens.shape == logprobs.shape == (0,)


@everywhere
def test_opcheck_accepts_the_op(device: torch.device) -> None:
    arguments = op_arguments(device)
    torch.library.opcheck(OPS.flashinfer_sample.default, tuple(arguments.values()))


def test_the_op_has_a_fake() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        real, long = torch.empty(2), torch.empty(2, dtype=torch.int64)
        tokens, logprobs = OPS.flashinfer_sample(
            torch.empty(2, 8), real, long.int(), real, real, long, long
        )
    assert tokens.shape == logprobs.shape == (2,)
    assert tokens.dtype == torch.int64


@on_gpu
def test_the_op_in_a_graph_draws_afresh(device: torch.device) -> None:
    arguments = op_arguments(device, 8, 32000)
    OPS.flashinfer_sample(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, _ = OPS.flashinfer_sample(**arguments)
    arguments["offset"].zero_()
    replayed = []
    for _ in range(50):
        graph.replay()
        replayed.append(tokens.tolist())
    assert len({tuple(t) for t in replayed}) > 25
    arguments["offset"].zero_()
    eager = [OPS.flashinfer_sample(**arguments)[0].tolist() for _ in range(50)]
    assert eager == replayed


@on_gpu
def test_the_example_shows_what_it_says(device: torch.device) -> None:
    """A naive capture repeats its draw, or torch refuses it; the right ways do not."""
    path = Path(__file__).parents[1] / "examples/flashinfer_graph.py"
    if not path.is_file():
        pytest.skip("the sources are not here")
    # By itself: what a capture that fails leaves behind is no other test's business.
    result = subprocess.run([sys.executable, str(path)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    lines = {line[:18].strip(): line[18:].strip() for line in result.stdout.splitlines()}
    for name in ("tensors, advanced", "this package's op"):
        assert len(set(ast.literal_eval(lines[name]))) > 6, result.stdout
    naive = lines["naive capture"]
    assert naive.startswith("not captured") or len(set(ast.literal_eval(naive))) == 1


COMPILE = """
import torch
from triton_compile import arguments_of, compiled
from graphed_sampling.backends import triton
from graphed_sampling.layout import TableLayout

arguments = arguments_of(torch.bfloat16, 8)
layout = TableLayout(1000, 4, 3, 3, 3, 3, 3, 3, 1)
f32, gpu = torch.float32, torch.device("cuda")
draw = triton.Draw(triton.DECIDE | triton.KEEP_TIES | triton.JOINT, 4, f32, f32)
by_slab = triton.launches(arguments, layout, 1, gpu, triton.Draw(triton.SLAB))
# By slab, `stream` and `dense` are the triton backend's own, which its test compiles.
by_slab = [launch for launch in by_slab if launch.kernel.fn.__name__ in ("ask", "finish")]
for launch in [*triton.launches(arguments, layout, 1, gpu, draw), *by_slab]:
    # Of `dense` its passes too, which may fail on what a LAW leaves of a branch. The others' take
    # long.
    compiled(launch, "ttgir" if launch.kernel.fn.__name__ == "dense" else "")
    print(launch.kernel.fn.__name__)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the tests on the GPU compile all")
def test_the_kernels_are_what_the_compiler_takes() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    compiled = run_python(COMPILE)
    drawn = ["stream", "finish", "dense", "group_probabilities", "token_probabilities"]
    assert compiled == [*drawn, "conclude", "ask", "finish"]


def test_laws_share_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling takes minutes: a kernel is another one only where a law makes it one."""
    if REASONS["cpu"]:
        pytest.skip(REASONS["cpu"])
    monkeypatch.setattr(triton, "_capability", lambda device: (9, 0))
    layout = TableLayout(1000, 4, 3, 3, 3, 3, 3, 3, 1)
    dtype, i32, i64 = torch.bfloat16, torch.int32, torch.int64
    arguments = triton._Arguments(
        dtype, *[i32] * 7, i64, i32,
        stride=8, bitmask_stride=0, logits_bytes=2, unit=8, mode=0,
    )  # fmt: skip
    compiled: dict[str, set[int]] = {}
    laws = [
        flashinfer.FlashInfer(filter_order=order, ties=ties)._law
        for order in ("top_k_first", "joint")
        for ties in ("exact", "keep")
    ]
    for law in (0, flashinfer.FlashInfer(route="slab")._law, *laws):
        draw = triton.Draw(law, 4, torch.float32, torch.float32) if law else None
        for launch in triton.launches(arguments, layout, 1, CUDA, draw):
            compiled.setdefault(launch.kernel.fn.__name__, set()).add(launch.keywords["LAW"])
    numbers = {name: len(laws) for name, laws in compiled.items()}
    assert numbers == {
        "ask": 1,
        "stream": 2,
        "finish": 6,
        "dense": 5,
        "group_probabilities": 1,
        "token_probabilities": 1,
        "conclude": 2,
    }


class Drawing(StandIn):
    """Draws a group and a place in it, whatever is likely."""

    def __init__(self, *draws: int) -> None:
        self.draws = list(draws)

    def sampling_from_probs(self, probabilities: Any, samples: Any, *rest: Any) -> None:
        samples.fill_(self.draws.pop(0))


@pytest.mark.parametrize(
    "draws",
    [(VOCAB // GROUP, 0), (63, 63), (0, -1), (0, -64), (0, GROUP), (-1, 63), (2**25, 0), (-7, 1)],
)
def test_a_draw_of_no_token_stays_in_its_slot(draws: tuple[int, int]) -> None:
    """Groups behind the vocabulary have no probability; FlashInfer's word is all that says so."""
    if REASONS["cpu"]:
        pytest.skip(REASONS["cpu"])
    table = RequestTable(3, VOCAB, device="cpu")
    for slot in range(3):
        table.admit(SamplingParams(repetition_penalty=1.5), slot=slot)
    table.upload()
    slot = 1
    others = [matrix[[0, 2]].clone() for matrix in (table.params, table.state)]
    in_others = torch.ones(table.tables.numel(), dtype=torch.bool)
    layout = table.layout
    first = layout.counts + slot * VOCAB
    in_others[first : first + VOCAB] = False
    first = layout.output_bits + slot * layout.bitmap_words
    in_others[first : first + layout.bitmap_words] = False
    tables = table.tables.clone()
    sampler = Sampler(table, backend="flashinfer")
    stand_in = flashinfer.STAND_IN
    flashinfer.STAND_IN = Drawing(*draws)
    try:
        output = sampler(torch.from_numpy(lm_row(0))[None], torch.tensor([slot], dtype=torch.int32))
    finally:
        flashinfer.STAND_IN = stand_in
    assert 0 <= int(output.token_ids[0]) < VOCAB
    for matrix, before in zip((table.params, table.state), others, strict=True):
        assert torch.equal(matrix[[0, 2]], before)
    assert torch.equal(table.tables[in_others], tables[in_others])
    assert not torch.equal(table.tables, tables)


def test_what_the_checks_rest_on() -> None:
    """`CheckedTable` accepts any survivor of this backend, and nothing else."""
    if REASONS["cpu"]:
        pytest.skip(REASONS["cpu"])
    pair = BackendDevice("flashinfer", CPU)
    checked = CheckedTable(pair, VOCAB, 1)
    checked.admit(SamplingParams(min_p=0.2, logprobs=1), slot=0)
    stand_in = flashinfer.STAND_IN
    assert isinstance(stand_in, StandIn)
    logits = torch.from_numpy(lm_row(0))[None]
    checked.step(logits, [0])
    worst = int(np.argmin(lm_row(0)))
    flashinfer.STAND_IN = Drawing(worst // GROUP, worst % GROUP)
    try:
        with pytest.raises(AssertionError):
            checked.step(logits, [0])
    finally:
        flashinfer.STAND_IN = stand_in
