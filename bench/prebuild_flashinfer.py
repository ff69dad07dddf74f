"""Builds FlashInfer's sampling ahead of time, for a GPU machine that has no network or compiler.

    python bench/prebuild_flashinfer.py [--work build/flashinfer] [--out build/flashinfer/out]

It needs torch, CUDA's nvcc, a C++ compiler and a package index, but no GPU. FlashInfer's wheel
holds no binaries for sampling and is 0.7 GB unpacked. What comes out, in --out, is

    flashinfer-<version>-sm<arch>.tar.xz   FlashInfer's own files, as far as sampling needs them,
                                           and the modules, where FlashInfer looks for binaries
    apache_tvm_ffi-*.whl                   for --python; the one thing else that torch's usual
                                           company (numpy, packaging, nvidia-ml-py, tqdm, requests)
                                           leaves out

and on the GPU machine, whose CUDA must be of the same major version:

    python3 -m tarfile -e flashinfer-*.tar.xz site
    python3 -m pip install --no-index --no-deps --target site apache_tvm_ffi-*.whl
    export PYTHONPATH=$PWD/site FLASHINFER_DISABLE_JIT=1

FLASHINFER_DISABLE_JIT makes a module that is missing an error, instead of a compilation. A home
folder that can be written to is still wanted, or FLASHINFER_WORKSPACE_BASE, for a log.

Modules, with the time each takes on two cores:

    sampling        2 minutes   softmax and all of flashinfer.sampling but what `topk` has
    cake_sampling   8 minutes   cake_top_k_top_p_sampling_from_probs; one core, 3 GB of memory
    topk            15 minutes  top_k_first with top_k_max. Only if --modules names it; else raises

A second call builds only what is missing, so that `--modules sampling` first costs nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

VERSION = "0.7.4"
TVM_FFI = "apache-tvm-ffi>=0.1.11,<0.2"
# What `import flashinfer.sampling` and a build need of the packages that FlashInfer asks for.
NEEDS = (TVM_FFI, "filelock", "ninja", "numpy", "nvidia-ml-py", "packaging", "requests", "tqdm")
CURAND = "nvidia-curand==10.4.0.35"  # CUDA 13.0's; only its headers are used.
MODULES = ("sampling", "cake_sampling", "topk")

# Prints the module's name, which holds a hash for some, and its library.
BUILD = """
import importlib, sys
name = sys.argv[1]
spec = getattr(importlib.import_module(f"flashinfer.jit.{name}"), f"gen_{name}_module")()
spec.build(verbose=True)
print(spec.name, spec.get_library_path())
"""

# Prints the files that were imported.
TRACE = """
import json, sys
import flashinfer.cake_sampling, flashinfer.sampling, flashinfer.topk
print(json.dumps([m.__file__ for m in sys.modules.values() if getattr(m, "__file__", None)]))
"""

# Fails unless every module is found as a binary.
CHECK = """
import importlib, sys
import flashinfer.sampling
for name in sys.argv[1:]:
    spec = getattr(importlib.import_module(f"flashinfer.jit.{name}"), f"gen_{name}_module")()
    assert spec.is_aot, spec.name
"""


@dataclass(frozen=True)
class Workshop:
    """A folder with FlashInfer, what it needs, and what it builds."""

    folder: Path
    arch: str  # as in 9.0a
    jobs: int

    @property
    def site(self) -> Path:
        return self.folder / "site"

    @property
    def cuda_home(self) -> Path:
        return Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))

    def path(self, name: str) -> str:
        return str(self.folder / name)

    @cached_property
    def environment(self) -> dict[str, str]:
        inherited = {
            # Some of FLASHINFER's variables change what is built: JIT_VERBOSE=1 turns -O3 off.
            name: value
            for name, value in os.environ.items()
            if not name.startswith("FLASHINFER_")
        }

        def before(name: str, *first: str) -> str:
            return os.pathsep.join([*first, *filter(None, [inherited.get(name)])])

        return inherited | {
            "PYTHONPATH": os.pathsep.join([str(self.site), self.path("needs")]),
            "PATH": before("PATH", self.path("needs/bin")),
            "CPATH": before("CPATH", *map(str, self.folder.glob("curand/nvidia/*/include"))),
            "LIBRARY_PATH": before("LIBRARY_PATH", self.path("stub")),
            "CUDA_HOME": str(self.cuda_home),
            "FLASHINFER_CUDA_ARCH_LIST": self.arch,
            "FLASHINFER_WORKSPACE_BASE": self.path("cache"),
            "MAX_JOBS": str(self.jobs),
        }

    def prepare(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        install(self.site, f"flashinfer-python=={VERSION}", "--no-deps")
        install(self.folder / "needs", *NEEDS)
        if not (self.cuda_home / "include/curand_kernel.h").exists():
            install(self.folder / "curand", CURAND, "--no-deps")
        # FlashInfer links with -lcuda. The driver brings that, so a machine without one has none.
        stub = self.folder / "stub/libcuda.so"
        stub.parent.mkdir(exist_ok=True)
        run("c++", "-shared", "-xc++", "/dev/null", "-Wl,-soname,libcuda.so.1", "-o", str(stub))

    def python(self, code: str, *arguments: str) -> str:
        """What the code prints, in a Python that has FlashInfer."""
        command = [sys.executable, "-c", code, *arguments]
        return subprocess.check_output(command, env=self.environment, text=True)

    def build(self, module: str) -> tuple[str, Path]:
        """The module's full name and its library."""
        log = self.folder / f"{module}.log"
        print(f"building {module}; see {log}", flush=True)
        began = time.perf_counter()
        with log.open("w") as stream:
            command = [sys.executable, "-c", BUILD, module]
            done = subprocess.run(
                command, env=self.environment, stdout=stream, stderr=subprocess.STDOUT
            )
        output = log.read_text()
        if done.returncode:
            raise SystemExit(f"{output[-4000:]}\nbuilding {module} failed; all of it is in {log}")
        print(f"  {time.perf_counter() - began:.0f} s", flush=True)
        name, library = output.splitlines()[-1].split(maxsplit=1)
        return name, Path(library)

    def python_files(self) -> list[Path]:
        """Those that the import reads, and their neighbours.

        The neighbours are for machines with more packages, where FlashInfer imports more.
        """
        imported = map(Path, json.loads(self.python(TRACE).splitlines()[-1]))
        folders = {path.parent for path in imported if path.is_relative_to(self.site)}
        return sorted(path for folder in folders for path in folder.glob("*.py"))

    def pack(self, libraries: dict[str, Path], file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        data = self.site / "flashinfer/data"
        members = [
            *self.python_files(),
            *self.site.glob("flashinfer_python-*.dist-info"),
            # The sources make the name of cake's module, and it reads a manifest among them.
            data / "csrc/cake_sampling",
        ]
        with tarfile.open(file, "w:xz") as archive:
            for path in members:
                archive.add(path, path.relative_to(self.site), filter=not_compiled)
            # It must be there, but nothing in it is read.
            archive.add(data / "include", "flashinfer/data/include", recursive=False)
            for name, library in libraries.items():
                archive.add(library, f"flashinfer/data/aot/{name}/{name}.so")

    def check(self, modules: Sequence[str], file: Path) -> None:
        """The archive, unpacked, has all that is imported, and the modules."""
        with tempfile.TemporaryDirectory() as folder, tarfile.open(file) as archive:
            archive.extractall(folder)
            environment = self.environment | {
                "PYTHONPATH": os.pathsep.join([folder, self.path("needs")]),
                "FLASHINFER_WORKSPACE_BASE": folder,
                "FLASHINFER_DISABLE_JIT": "1",
            }
            command = [sys.executable, "-c", CHECK, *modules]
            subprocess.run(command, env=environment, check=True)


def not_compiled(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if "__pycache__" in member.name else member


def run(*command: str) -> None:
    print("$", *command, flush=True)
    subprocess.run(command, check=True)


def pip(*arguments: str) -> None:
    run(sys.executable, "-m", "pip", *arguments)


def install(folder: Path, *arguments: str) -> None:
    """Once; a second time would make all that was built look older than its sources."""
    if folder.exists():
        return
    # Whole or not at all, so that what is there need not be looked into.
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    pip("install", "-q", "--no-compile", "--target", str(partial), *arguments)
    partial.rename(folder)


def fetch_wheel(requirement: str, python: str, folder: Path) -> None:
    platforms = (f"manylinux_2_{n}_{platform.machine()}" for n in (17, 24, 27, 28))
    pip(
        "download",
        "-q",
        "--no-deps",
        "--only-binary=:all:",
        f"--python-version={python}",
        *(f"--platform={name}" for name in platforms),
        f"--dest={folder}",
        requirement,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=Path("build/flashinfer"))
    parser.add_argument("--out", type=Path, help="default: the folder `out` in --work")
    parser.add_argument("--arch", default="9.0a", help="compute capability; default: 9.0a")
    parser.add_argument("--python", default="3.12", help="the GPU machine's; default: 3.12")
    parser.add_argument("--modules", choices=MODULES, nargs="+", default=MODULES[:2])
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    arguments = parser.parse_args()

    out = arguments.out or arguments.work / "out"
    workshop = Workshop(arguments.work.resolve(), arguments.arch, arguments.jobs)
    workshop.prepare()
    libraries = dict(workshop.build(module) for module in arguments.modules)
    file = out / f"flashinfer-{VERSION}-sm{arguments.arch.replace('.', '')}.tar.xz"
    workshop.pack(libraries, file)
    workshop.check(arguments.modules, file)
    fetch_wheel(TVM_FFI, arguments.python, out)
    for path in sorted(out.iterdir()):
        print(f"{path}: {path.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
