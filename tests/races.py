"""A plugin of pytest, for `make races`: a test fails if kernels had a data race in it.

The emulation's library must be the one that looks for them; csrc/emulation/races.cpp says what it
finds.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from collections.abc import Iterator
from functools import cache

import pytest
from helpers import EMULATED

ADDRESS = re.compile(r"\+(0x[0-9a-f]+)")


@cache
def place(address: str) -> str:
    """Where in the sources the code of that address is from: a line, and those it was inlined in.

    Lines of the emulation, of an atomic for instance, are left out.
    """
    command = ["addr2line", "-e", str(EMULATED), "-i", address]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    # Some end in " (discriminator 2)".
    paths = [os.path.relpath(line.split(" ")[0], EMULATED.parents[1]) for line in lines]
    kernel = [path for path in paths if not path.startswith("csrc/emulation/emulation.h")]
    return " in ".join(kernel or paths)


def races_since_the_last_call(library: ctypes.CDLL) -> list[str]:
    text = ctypes.create_string_buffer(1 << 20)
    library.graphed_sampling_emulation_races(text, len(text))
    races = text.value.decode().splitlines()
    return [ADDRESS.sub(lambda match: place(match[1]), race) for race in races]


@pytest.fixture(scope="session")
def detector() -> ctypes.CDLL:
    library = ctypes.CDLL(str(EMULATED))
    library.graphed_sampling_emulation_races.argtypes = [ctypes.c_char_p, ctypes.c_int]
    return library


@pytest.fixture(autouse=True)
def no_races(detector: ctypes.CDLL, request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    races = races_since_the_last_call(detector)
    # The emulation's own tests have races that are to be found.
    if races and "emulated" not in request.fixturenames:
        pytest.fail("\n".join([f"data races: {len(races)}", *races]), pytrace=False)
