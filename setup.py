"""Builds the native library with CMake, or a pure package when there is nothing to build it with.

Everything else about the package is in pyproject.toml.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent.resolve()
LIBRARY = "graphed_sampling/_C.so"
RECORD = "graphed_sampling/_build.json"

# One entry a GPU generation: A100, H100 and H200, B200, RTX 50. Newer minor versions run them too.
DEFAULT_ARCHITECTURES = ["80", "90", "100", "120"]

NO_TORCH = (
    "torch cannot be imported by this build: from source it is "
    "`pip install --no-build-isolation .` (or GRAPHED_SAMPLING_PURE=1)"
)


def find_program(name: str, *places: str | Path) -> str | None:
    """Look at `places` first: the scripts of an environment that is not activated miss in PATH."""
    return next(filter(None, (shutil.which(name, path=str(p)) for p in places)), shutil.which(name))


def find_nvcc() -> str | None:
    if "CUDACXX" in os.environ:
        return shutil.which(os.environ["CUDACXX"])
    return find_program("nvcc", Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin")


def ask_nvcc(nvcc: str, option: str) -> str:
    return subprocess.run([nvcc, option], check=True, capture_output=True, text=True).stdout


def choose_architectures(nvcc: str) -> list[str]:
    if chosen := os.environ.get("GRAPHED_SAMPLING_CUDA_ARCHITECTURES"):
        return chosen.split(";")
    known = ask_nvcc(nvcc, "--list-gpu-arch").split()
    return [a for a in DEFAULT_ARCHITECTURES if f"compute_{a}" in known]


def plan() -> dict[str, object]:
    """Decide what to build. The result is stored in the package and shown by `build_info()`."""
    pure = {"native": False, "nvcc": None, "architectures": [], "torch": None}
    if os.environ.get("GRAPHED_SAMPLING_PURE", "0") != "0":
        return pure | {"reason": "GRAPHED_SAMPLING_PURE was set"}
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        # Only building needs torch. Metadata and source archives are made without it.
        return pure | {"reason": NO_TORCH}
    pure |= {"torch": str(torch.__version__)}
    nvcc = find_nvcc()
    if nvcc is None:
        return pure | {"reason": "nvcc was not found"}
    if sys.platform != "linux":
        return pure | {"reason": "the native library is built on Linux only"}
    release = re.search(r"V(\d[\d.]*)", ask_nvcc(nvcc, "--version"))
    return {
        "native": True,
        "reason": None,
        "nvcc": release.group(1) if release else "unknown",
        "architectures": choose_architectures(nvcc),
        "torch": str(torch.__version__),
    }


PLAN = plan()


class BuildPy(build_py):
    """Stores the plan beside the modules, and clears what an earlier build has left there."""

    def run(self) -> None:
        if PLAN["reason"] == NO_TORCH:
            raise SystemExit(NO_TORCH)
        if self.editable_mode:
            into = ROOT
            (ROOT / LIBRARY).unlink(missing_ok=True)
        else:
            into = Path(self.build_lib)
            shutil.rmtree(into / "graphed_sampling", ignore_errors=True)
        super().run()
        (into / RECORD).write_text(json.dumps(PLAN, indent=2) + "\n")


class BuildExt(build_ext):
    """Lets CMake build the one extension."""

    def get_ext_filename(self, fullname: str) -> str:
        # torch.ops.load_library loads it, not Python's import: the name carries no Python version.
        return str(Path(*fullname.split("."))) + ".so"

    def build_extension(self, ext: Extension) -> None:
        torch = importlib.import_module("torch")
        scripts = sysconfig.get_path("scripts")
        cmake, ninja = find_program("cmake", scripts), find_program("ninja", scripts)
        if cmake is None:
            raise SystemExit("cmake was not found: `pip install cmake ninja`")
        # Not pip's folder for this one build: the next one compiles only what has changed.
        binary_dir = ROOT / "build" / "-".join(["cmake", *PLAN["architectures"]])
        output = Path(self.get_ext_fullpath(ext.name)).resolve()
        configure = [
            cmake,
            *("-S", str(ROOT), "-B", str(binary_dir)),
            *(["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []),
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DCMAKE_CUDA_COMPILER={find_nvcc()}",
            f"-DCMAKE_CUDA_ARCHITECTURES={';'.join(PLAN['architectures'])}",
            f"-DTORCH_DIR={Path(torch.__file__).parent}",
            f"-DOUTPUT_DIR={output.parent}",
        ]
        subprocess.run(configure, check=True)
        subprocess.run([cmake, "--build", str(binary_dir), "--parallel"], check=True)


class BdistWheel(bdist_wheel):
    """A native wheel depends on the platform, not on Python: the library holds no Python symbol."""

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        return ("py3", "none", platform) if PLAN["native"] else (python, abi, platform)


if int(setuptools.__version__.split(".")[0]) < 77:
    raise SystemExit("the build needs setuptools 77 or newer: `pip install -U setuptools`")

setup(
    ext_modules=[Extension("graphed_sampling._C", sources=[])] if PLAN["native"] else [],
    cmdclass={
        "build_py": BuildPy,
        "build_ext": BuildExt,
        "bdist_wheel": BdistWheel,
    },
)
