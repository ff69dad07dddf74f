"""Fixtures of all tests."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    # Without a GPU the triton backend's kernels run in Triton's interpreter, on the CPU. Triton
    # looks at this when it is imported. A 0 given from outside leaves these tests out.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from guarded_memory import guard_memory
from helpers import BackendDevice, backend_devices
from quick_interpreter import QuickLanguage, quicken_interpreter

# Tests work on small tensors, often on busy machines, where the barriers between OpenMP's threads
# cost ten times the work. That the number of threads changes no bit is a test of its own.
torch.set_num_threads(1)


QUICK = None
if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    guard_memory(importlib.import_module("triton.runtime.interpreter"))
    QUICK = quicken_interpreter()


def compile_once() -> None:
    """Let processes compile a kernel of Triton's one after the other: all but the first find it in
    Triton's cache. At once, every process that tests would compile all of them for itself. What is
    compiled must have all barriers that it needs."""
    import fcntl

    import ptx_hazards
    from triton import __version__, compiler, knobs

    plain = compiler.compile
    locks = Path(knobs.cache.dir) / "graphed_sampling_tests"
    locks.mkdir(parents=True, exist_ok=True)
    # Who compiles and who looks at it: another one of either looks again.
    by = f"{__version__} {Path(ptx_hazards.__file__).read_text()}"

    def compile_locked(source: Any, target: Any = None, options: Any = None, **rest: Any) -> Any:
        key = f"{source.hash()} {target} {sorted((options or {}).items())} {by}"
        with open(locks / hashlib.sha256(key.encode()).hexdigest(), "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            kernel = plain(source, target=target, options=options, **rest)
            if lock.tell() == 0 and "ptx" in kernel.asm:  # nobody has looked at it
                ours = source.fn.fn.__module__.startswith("graphed_sampling.")
                if ours and kernel.metadata.num_warps > 1:
                    hazards = ptx_hazards.hazards_of(kernel.asm["ptx"])
                    assert not hazards, hazards
                lock.write("no barrier is missing")
            return kernel

    compiler.compile = compile_locked  # where a kernel's first launch or warm-up looks it up


if torch.cuda.is_available() and importlib.util.find_spec("triton"):
    compile_once()


@pytest.fixture
def quick_language() -> QuickLanguage:
    """What quickens Triton's interpreter, where that is in use."""
    if QUICK is None:
        pytest.skip("Triton's interpreter is not in use")
    return QUICK


@pytest.fixture(params=backend_devices())
def backend_device(request: pytest.FixtureRequest) -> BackendDevice:
    """Every backend on every device that it can be used on."""
    pair: BackendDevice = request.param
    return pair
