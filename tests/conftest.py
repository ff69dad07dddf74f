"""Fixtures of all tests."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    # Without a GPU the triton backend's kernels run in Triton's interpreter, on the CPU. Triton
    # looks at this when it is imported. A 0 given from outside leaves these tests out.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from helpers import BackendDevice, backend_devices

# Tests work on small tensors, often on busy machines, where the barriers between OpenMP's threads
# cost ten times the work. That the number of threads changes no bit is a test of its own.
torch.set_num_threads(1)


def quicken_interpreter() -> None:
    """Have Triton's interpreter patch its language once a launch and module, and sort by numpy.

    It does so at every call of a jitted function, which is half its time and changes nothing. A
    sort, which is jitted too, goes through hundreds of reductions element by element.
    """
    language: Any = importlib.import_module("triton.language")
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    executor, function = interpreter.GridExecutor, interpreter.InterpretedFunction
    launch, patch = executor.__call__, interpreter._patch_lang
    patched: set[int] = set()

    def launch_afresh(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        return launch(self, *args, **kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = id(self.fn.__globals__)
        if module not in patched:
            patch(self.fn)
            patched.add(module)
        return self.rewrite()(*args, **kwargs)

    def sort(x: Any, dim: Any = None, descending: Any = False) -> Any:
        values = np.sort(x.handle.data, axis=-1)
        if getattr(descending, "value", descending):
            values = values[..., ::-1]
        handle = interpreter.TensorHandle(np.ascontiguousarray(values), x.handle.dtype)
        return language.core.tensor(handle, x.type)

    executor.__call__, function.__call__, language.sort = launch_afresh, call, sort


if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    quicken_interpreter()


@pytest.fixture(params=backend_devices())
def backend_device(request: pytest.FixtureRequest) -> BackendDevice:
    """Every backend on every device that it can be used on."""
    pair: BackendDevice = request.param
    return pair
