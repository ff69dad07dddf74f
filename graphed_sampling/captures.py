"""Looking at events while another thread captures a CUDA graph.

A capture in CUDA's global mode, torch's default, breaks where any thread does what might wait for
the device, a query of an event included; but for threads that are in the thread-local mode
(`cuThreadExchangeStreamCaptureMode`): what they do concerns their own captures alone.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

_THREAD_LOCAL: Final = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


@functools.cache
def _exchange() -> Callable[[Any], int] | None:
    """The driver's function; None on devices that are not NVIDIA's, and where there are none."""
    try:
        exchange = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return None
    exchange.argtypes = [ctypes.POINTER(ctypes.c_int)]
    return exchange


def leave_captures_alone() -> None:
    """From here on this thread disturbs no other one's capture."""
    exchange = _exchange()
    if exchange is not None:
        exchange(ctypes.byref(ctypes.c_int(_THREAD_LOCAL)))


@contextmanager
def captures_left_alone() -> Iterator[None]:
    """Inside, this thread disturbs no other one's capture."""
    exchange = _exchange()
    if exchange is None:
        yield
        return
    mode = ctypes.c_int(_THREAD_LOCAL)
    exchange(ctypes.byref(mode))  # now the one before
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))
