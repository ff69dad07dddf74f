"""The emulator of CUDA for the CPU: what it computes, and the faults in kernels that it finds."""

from __future__ import annotations

import ctypes

import pytest
from helpers import EMULATED


@pytest.fixture(scope="module")
def emulated() -> ctypes.CDLL:
    if not EMULATED.exists():
        pytest.skip(f"{EMULATED.name} was not built: `make tests/{EMULATED.name}`")
    library = ctypes.CDLL(str(EMULATED))
    library.graphed_sampling_emulation_set_order.argtypes = [ctypes.c_uint64]
    library.graphed_sampling_emulation_set_order.restype = None
    library.graphed_sampling_emulation_selftest.argtypes = [ctypes.c_char_p, ctypes.c_int]
    return library


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 2**64 - 1])
def test_selftest(emulated: ctypes.CDLL, seed: int) -> None:
    message = ctypes.create_string_buffer(4096)
    emulated.graphed_sampling_emulation_set_order(seed)
    try:
        failed = emulated.graphed_sampling_emulation_selftest(message, len(message))
    finally:
        emulated.graphed_sampling_emulation_set_order(0)
    assert not failed, message.value.decode()
