"""What is particular to the triton backend: where it runs, and what it compiles.

On a machine with a GPU the kernels are compiled; elsewhere Triton's interpreter runs them.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    DTYPES,
    PLACEMENTS,
    BackendDevice,
    CheckedTable,
    backend_devices,
    place,
)
from quick_interpreter import QuickLanguage
from test_ways_through_a_row import check_routes, route_cases

from graphed_sampling import (
    RequestTable,
    Sampler,
    SamplingParams,
    backends,
)
from graphed_sampling.backends import triton

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(params=[p for p in backend_devices() if p.values[0].backend == "triton"])
def pair(request: pytest.FixtureRequest) -> BackendDevice:
    value: BackendDevice = request.param
    return value


# Where it runs.


def run_python(code: str, path: Sequence[str] = (), **env: str) -> list[str]:
    """The lines that code prints, run by itself without an interpreter's being asked for."""
    plain = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    plain["PYTHONPATH"] = os.pathsep.join([*path, *sys.path])
    result = subprocess.run(
        [sys.executable, "-c", code], env=plain | env, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


ASK = """
import torch
from graphed_sampling import backends
for device in ("cpu", "cuda", "meta"):
    print(backends.module("triton").unusable(torch.device(device)))
print(backends.resolve("auto", torch.device("cpu")))
"""
ON_GPUS = "it runs on GPUs; on the CPU only in Triton's interpreter (TRITON_INTERPRET=1)"
ON_THE_CPU = "Triton's interpreter is on (TRITON_INTERPRET=1), which serves the CPU only"


def test_it_says_why_it_cannot_be_used() -> None:
    pytest.importorskip("triton")
    on_cpu, on_cuda, elsewhere, auto = run_python(ASK)
    assert on_cpu == ON_GPUS
    assert on_cuda == ("" if torch.cuda.is_available() else "there is no CUDA device")
    assert elsewhere == "Triton's kernels run on GPUs"
    assert auto != "triton"
    on_cpu, on_cuda, _, _ = run_python(ASK, TRITON_INTERPRET="1")
    assert (on_cpu, on_cuda) == ("", ON_THE_CPU)


def test_resolving_it_where_it_is_unusable_names_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton, "unusable", lambda device: "it rains")
    with pytest.raises(ValueError, match="backend 'triton' cannot be used on cpu: it rains"):
        backends.resolve("triton", CPU)


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for device in (CPU, CUDA):
        assert triton.unusable(device) == "triton is not installed"


def test_a_triton_that_does_not_import(tmp_path: Path) -> None:
    (tmp_path / "triton.py").write_text("raise ImportError('no\\n  libtriton')\n")
    reasons = run_python(ASK, [str(tmp_path)])[:2]
    assert reasons == ["triton does not import: ImportError: no libtriton"] * 2


def test_a_gpu_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "_triton_error", lambda: "")
    monkeypatch.setattr(triton, "_interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, reason in (
        ((7, 5), "the GPU is older than compute capability 8.0"),
        ((8, 0), ""),
        ((12, 0), ""),
    ):
        monkeypatch.setattr(triton, "_capability", lambda device, answer=capability: answer)
        assert triton.unusable(CUDA) == reason


def test_the_quick_interpreter_is_triton_s(
    quick_language: QuickLanguage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that numpy does by itself in these rows has the bits of Triton's own interpreter."""
    monkeypatch.setattr(quick_language, "checked", 0)
    names = ("short list, touched", "row of equals, touched", "long list of typical_p")
    cases = {name: case for name, case in route_cases().items() if name in names}
    check_routes(BackendDevice("triton", CPU), cases, torch.bfloat16, [])
    assert quick_language.checked is not None and quick_language.checked > 5000


@pytest.mark.parametrize("kernel", ["write", "read", "add"])
def test_a_kernel_that_reaches_elsewhere_is_an_error(
    kernel: str, quick_language: QuickLanguage
) -> None:
    import guarded_kernels

    launch = getattr(guarded_kernels, kernel)[(1,)]
    memory = torch.zeros(400, dtype=torch.int32)
    given = memory[100:200]  # in the middle of memory that is there, beside what others are given
    others = [torch.zeros(128, dtype=torch.int32)] if kernel == "read" else []
    for _ in range(3):  # the quick interpreter learns at the first
        for at, count in ((0, 100), (99, 1), (30, 70), (150, 0), (-50, 0)):
            launch(given, *others, at, count)
        for at, count in ((0, 101), (100, 1), (-1, 1), (-1, 2), (50, 51)):
            before = memory.clone()
            with pytest.raises(Exception, match="outside the tensors that it was launched with"):
                launch(given, *others, at, count)
            assert torch.equal(memory, before)


# Vocabularies that few have.


def test_the_last_super_ends_with_the_row(pair: BackendDevice) -> None:
    """Above 2**21 tokens a super has more groups than a tile of `stream`."""
    vocab = 2**21 + 100
    layout = RequestTable(1, vocab, device="cpu", penalties=False).layout
    at = triton._scratch(layout)
    assert at.groups % at.super_groups == 0
    assert at.groups * triton.GROUP % triton.TILE == 0
    if pair.interpreted:
        return  # a row takes minutes
    row = np.full(vocab, -30.0)
    row[:4096] = 0.0
    row[-100:] = 8.0
    checked = CheckedTable(pair, vocab, 3, penalties=False)
    for seed in range(3):
        checked.admit(SamplingParams(seed=seed, logprobs=0))
    logits = place(np.tile(row, (3, 1)), pair.device, torch.float32, "padded").logits
    checked.step(logits, range(3), words=torch.tensor([0, -1, 1 << 62]))
    checked.tally.check(ambiguous=0.5)


# Compilation.

COMPILE = """
import torch
from triton_compile import arguments_of, compiled
from graphed_sampling.backends import triton
from graphed_sampling.layout import TableLayout

for dtype, unit, vocab in ((torch.float32, 4, 1000), (torch.bfloat16, 1, 300001)):
    layout = TableLayout(vocab, 4, 3, 3, 3, 3, 3, 3, 1)
    for launch in triton.launches(arguments_of(dtype, unit), layout, 1, torch.device("cuda")):
        compiled(launch)
        print(launch.kernel.fn.__name__)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the tests on the GPU compile all")
def test_the_kernels_are_what_the_compiler_takes() -> None:
    """The interpreter lets pass what the compiler does not: types that change, names that a branch
    leaves undefined."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    assert run_python(COMPILE) == ["stream", "finish", "dense"] * 2


FAIL = """
import contextlib
from types import SimpleNamespace
import torch
from triton.runtime import _async_compile
from graphed_sampling.backends import triton
from graphed_sampling.layout import TableLayout

def fail():
    raise RuntimeError("PassManager::run failed")

def warmup(*, grid):
    _async_compile.active_mode.get().submit("kernel", fail, None)

torch.cuda.device = contextlib.nullcontext
launch = triton._Launch(SimpleNamespace(warmup=warmup), (1,), (), {})
triton.launches = lambda *_: [launch]
layout = TableLayout(1000, 4, 3, 3, 3, 3, 3, 3, 1)
for _ in range(2):
    try:
        triton.warm_up(layout, torch.device("cuda"), [torch.float32])
    except RuntimeError as error:
        print(error)
"""


def test_a_compilation_that_fails_leaves_nothing_behind() -> None:
    """The next one is told its own reason."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    assert run_python(FAIL) == ["PassManager::run failed"] * 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_no_step_waits_for_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sampler's making compiles, or takes from the disk, all that its steps need.

    Sizes, strides, capacities and addresses are arguments: what was compiled for one vocabulary
    serves all of its kind (odd, or a multiple of 16 bytes of logits; up to 32768 times a power of
    two).
    """
    if reason := triton.unusable(CUDA):
        pytest.skip(reason)
    compiled: list[str] = []

    def note(**details: Any) -> None:
        compiled.append(details["repr"])

    runtime = importlib.import_module("triton.knobs").runtime
    monkeypatch.setattr(runtime, "jit_post_compile_hook", note)
    kernels = triton._kernels()
    for kernel in (kernels.stream, kernels.finish, kernels.dense):
        kernel.device_caches.clear()
    asked = [
        SamplingParams(seed=1),
        SamplingParams(seed=2, top_k=5, top_p=0.9, logprobs=3, rank=True),
        SamplingParams(seed=3, frequency_penalty=0.5, logit_bias={1: 2.0}, logprobs=1),
        SamplingParams(temperature=0.0, bad_words_ids=[[3, 4]], logprob_token_ids=[1]),
    ]
    most = 100

    def compiled_for(vocab: int, **options: Any) -> list[str]:
        """What a sampler of such a table compiles when it is made; its steps compile nothing."""
        compiled.clear()
        table = RequestTable(most, vocab, device="cuda", **options)
        for i in range(most):
            table.admit(asked[i % len(asked)], [1, 2])
        sampler = Sampler(table, "triton")
        warming = list(compiled)
        compiled.clear()
        bitmask = torch.full((most, -(-vocab // 32)), -1, dtype=torch.int32)
        words = torch.zeros(most, dtype=torch.int64)
        values = torch.randn(most, vocab, generator=torch.Generator().manual_seed(0))
        for dtype, placement in itertools.product(DTYPES.values(), PLACEMENTS):
            logits = place(values, CUDA, dtype, placement).logits
            for rows in (1, 2, 3, 16, 17, 64, most):
                slots = torch.arange(rows, dtype=torch.int32)
                mask, given = bitmask[:rows], words[:rows]
                sampler(logits[:rows], slots)
                sampler(logits[most - rows :], slots, grammar_bitmask=mask)
                sampler(
                    logits[:rows], slots.cuda(), grammar_bitmask=mask.cuda(), words=given.cuda()
                )
        torch.cuda.synchronize()
        assert compiled == [], f"V = {vocab}"
        return warming

    assert compiled_for(32768), "the hook is never called"
    for vocab in (32767, 65536, 65535, 131072):
        compiled_for(vocab)
    small = {"max_logprobs": 5, "max_logit_bias": 16, "max_stop_ids": 3, "max_bad_words": 4}
    for vocab in (16, 17, 1000, 16384, 40000, 50257, 128256):
        assert compiled_for(vocab) == [], f"V = {vocab}"
    assert compiled_for(1000, **small) == []
