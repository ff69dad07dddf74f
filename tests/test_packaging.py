"""The package as it is built and imported, and the native scatter that comes with it."""

from __future__ import annotations

import importlib.metadata
import os
import random
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import graphed_sampling
from graphed_sampling import _build_info, ops

ROOT = Path(__file__).parent.parent
LIBRARY = Path(graphed_sampling.__file__).parent / "_C.so"

needs_sources = pytest.mark.skipif(
    not (ROOT / "setup.py").is_file(), reason="the tests run without the sources"
)


def run_python(*args: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args], cwd=cwd, env=os.environ | env, capture_output=True, text=True
    )


def test_import_leaves_optional_packages_alone() -> None:
    names = ["triton", "numba", "transformers", "flashinfer"]
    # Torch itself may import triton, so only what the package adds is looked at.
    code = (
        "import sys, torch; before = set(sys.modules); import graphed_sampling;"
        f"print([n for n in {names} if n in sys.modules and n not in before])"
    )
    result = run_python("-c", code)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


def test_version_has_one_source() -> None:
    assert importlib.metadata.version("graphed-sampling") == _build_info.__version__


def test_build_info_is_consistent() -> None:
    info = _build_info.build_info()
    assert info["version"] == _build_info.__version__
    assert info["native"] == (info["reason"] is None)
    assert info["loaded"] == (info["load_error"] is None)
    assert info["loaded"] == _build_info.load_native()
    if info["native"]:
        assert info["nvcc"] and info["architectures"] and info["torch"]
        # Built here means usable here, the CPU-only torch included: the CUDA symbol is weak.
        assert info["loaded"], info["load_error"]


def test_source_tree_that_was_never_built(tmp_path: Path) -> None:
    shutil.copy(_build_info.__file__, tmp_path)
    code = "import _build_info as b; print(b.load_native(), b.build_info()['load_error'])"
    result = run_python("-c", code, cwd=tmp_path)
    assert result.stdout.strip() == "False not built", result.stdout + result.stderr


def test_library_that_does_not_load_is_reported(tmp_path: Path) -> None:
    shutil.copy(_build_info.__file__, tmp_path)
    (tmp_path / "_C.so").write_text("not a library")
    code = "import _build_info as b; print(b.load_native(), b.build_info()['load_error'])"
    result = run_python("-c", code, cwd=tmp_path)
    assert result.stdout.startswith("False ") and "_C.so" in result.stdout, result


@pytest.mark.skipif(not LIBRARY.is_file(), reason="no native library was built")
@pytest.mark.skipif(shutil.which("nm") is None, reason="nm is not installed")
def test_library_holds_no_python_symbol() -> None:
    output = subprocess.run(
        ["nm", "--dynamic", str(LIBRARY)], check=True, capture_output=True, text=True
    )
    symbols = [line.split()[-1] for line in output.stdout.splitlines()]
    assert "aoti_torch_get_current_cuda_stream" in symbols
    assert [s for s in symbols if s.startswith(("Py", "_Py"))] == []


@needs_sources
def test_build_that_cannot_see_torch_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('hidden by the test')")
    arguments = ["egg_info", "-e", str(tmp_path), "build", "-b", str(tmp_path / "build")]
    result = run_python("setup.py", "-q", *arguments, PYTHONPATH=str(tmp_path))
    assert result.returncode != 0
    assert result.stderr.strip().endswith(
        "from source it is `pip install --no-build-isolation .` (or GRAPHED_SAMPLING_PURE=1)"
    )


@needs_sources
def test_pure_wheel_on_request(tmp_path: Path) -> None:
    result = run_python(
        "setup.py",
        *("-q", "egg_info", "-e", str(tmp_path), "build", "-b", str(tmp_path / "build")),
        *("bdist_wheel", "-d", str(tmp_path), "-b", str(tmp_path / "wheel")),
        GRAPHED_SAMPLING_PURE="1",
    )
    assert result.returncode == 0, result.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "graphed_sampling/py.typed" in names
    assert not [n for n in names if n.endswith(".so") or n.startswith("tests/")]


@needs_sources
def test_a_source_distribution_has_what_its_tests_need(tmp_path: Path) -> None:
    result = run_python(
        "setup.py", "-q", "egg_info", "-e", str(tmp_path), GRAPHED_SAMPLING_PURE="1"
    )
    assert result.returncode == 0, result.stderr
    listed = {*(tmp_path / "graphed_sampling.egg-info" / "SOURCES.txt").read_text().splitlines()}
    needed = [
        path
        for folder in ("bench", "csrc", "docs", "examples", "graphed_sampling", "tests")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".md", ".h", ".cu", ".cpp", ".typed")
    ]
    needed += [ROOT / "CMakeLists.txt", *ROOT.glob("*.md")]
    assert {path.relative_to(ROOT).as_posix() for path in needed} <= listed
    assert not [name for name in listed if name.endswith((".so", ".o", ".pyc"))]


# --- scatter_segments -------------------------------------------------------------------------

no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, no_gpu])]

# Lengths in words. Around the sizes at which the CUDA kernel changes its way of copying: 4 words a
# lane, 256 a warp, one segment a warp up to 8192 segments.
LENGTHS = {
    "none": [],
    "one-word": [1],
    "empty-among-others": [0, 1, 0, 5, 0],
    "records-16x40": [40] * 16,
    "bitmap-row-4751": [4751],
    "around-256": [255, 256, 257, 511, 512, 513],
    "8192-ones": [1] * 8192,
    "8193-ones": [1] * 8193,
    "long-row-among-20001-short": [1, 2, 3, 4, 5] * 4000 + [4751],
}


def make_packet(
    lengths: list[int], sizes: tuple[int, int, int], rng: random.Random
) -> tuple[list[int], int, list[tuple[int, int, list[int]]]]:
    """A packet in shuffled order, its number of words, and what it writes where."""
    free = [0, 0, 0]
    writes: list[tuple[int, int, list[int]]] = []
    for length in lengths:
        fitting = [t for t in (0, 1, 2) if free[t] + length <= sizes[t]]
        target = rng.choice(fitting)
        words = [rng.randrange(-(2**31), 2**31) for _ in range(length)]
        writes.append((target, free[target], words))
        free[target] += length + rng.randrange(3)
    rng.shuffle(writes)
    descriptors: list[int] = []
    payload: list[int] = []
    for target, offset, words in writes:
        descriptors += [target | len(payload) << 2, len(words), offset & 0xFFFFFFFF, offset >> 32]
        payload += words
    return descriptors + payload, len(payload), writes


# The op is native where that is built. The torch operations behind it elsewhere are tested always.
IMPLEMENTATIONS = {
    "op": torch.ops.graphed_sampling.scatter_segments,
    "torch": ops._scatter_segments,
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", LENGTHS)
def test_scatter_segments_writes_what_the_packet_says(
    name: str, implementation: str, device: str
) -> None:
    shapes = ((8, 24), (8, 40), (100_003,))
    targets = [torch.arange(torch.Size(s).numel(), dtype=torch.int32).view(s) for s in shapes]
    expected = [t.clone().flatten() for t in targets]
    sizes = (expected[0].numel() - 1, expected[1].numel() - 1, expected[2].numel() - 1)
    words, num_words, writes = make_packet(LENGTHS[name], sizes, random.Random(name))
    for target, offset, values in writes:
        expected[target][offset : offset + len(values)] = torch.tensor(values, dtype=torch.int32)
    # Two words of slack in front: nothing may rely on more than 8-byte alignment.
    packet = torch.tensor([0, 0, *words]).to(torch.int32).to(device)[2:]
    params, state, tables = (t.to(device) for t in targets)
    IMPLEMENTATIONS[implementation](params, state, tables, packet, len(writes), num_words)
    for got, want in zip((params, state, tables), expected, strict=True):
        # The torch operations keep the last word for themselves: it is a table's padding.
        assert torch.equal(got.cpu().flatten()[:-1], want[:-1])


@pytest.mark.skipif(not _build_info.load_native(), reason="only the native code checks")
@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, torch.zeros(1, 4), "params must be int32"),
        (0, torch.zeros(4, dtype=torch.int32), "params must have 2"),
        (1, torch.zeros(4, 2, dtype=torch.int32).t(), "state must be contiguous"),
        (2, torch.zeros(1, 4, dtype=torch.int32), "tables must have 1"),
        (4, -1, "num_segments must be in"),
        (4, 2, "do not fit"),
        (5, 2**29, "num_words must be in"),
        (5, 2, "do not fit"),
        (3, torch.tensor([3, 1, 0, 0, 9], dtype=torch.int32), "malformed"),  # no such target
        (3, torch.tensor([4, 1, 0, 0, 9], dtype=torch.int32), "malformed"),  # after the payload
        (3, torch.tensor([0, -1, 0, 0, 9], dtype=torch.int32), "malformed"),
        (3, torch.tensor([0, 1, 4, 0, 9], dtype=torch.int32), "outside its target"),
        (3, torch.tensor([0, 1, -1, -1, 9], dtype=torch.int32), "outside its target"),
        (3, torch.tensor([0, 1, 0, 1, 9], dtype=torch.int32), "outside its target"),
    ],
)
def test_scatter_segments_rejects(index: int, value: object, message: str) -> None:
    arguments: list[object] = [
        torch.zeros(1, 4, dtype=torch.int32),
        torch.zeros(1, 4, dtype=torch.int32),
        torch.zeros(4, dtype=torch.int32),
        torch.tensor([0, 1, 0, 0, 9], dtype=torch.int32),
        1,
        1,
    ]
    arguments[index] = value
    with pytest.raises(RuntimeError, match=message):
        torch.ops.graphed_sampling.scatter_segments(*arguments)
