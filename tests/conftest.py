"""Fixtures of all tests."""

from __future__ import annotations

import pytest
import torch
from helpers import BackendDevice, backend_devices

# Tests work on small tensors, often on busy machines, where the barriers between OpenMP's threads
# cost ten times the work. That the number of threads changes no bit is a test of its own.
torch.set_num_threads(1)


@pytest.fixture(params=backend_devices())
def backend_device(request: pytest.FixtureRequest) -> BackendDevice:
    """Every backend on every device that it can be used on."""
    pair: BackendDevice = request.param
    return pair
