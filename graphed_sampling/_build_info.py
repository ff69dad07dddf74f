"""What was built, with what, and whether this process could load it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypedDict

# The only place that holds the version: pyproject.toml reads it from here.
__version__ = "0.1.0"

_PACKAGE = Path(__file__).parent
_LIBRARY = _PACKAGE / "_C.so"
_RECORD = _PACKAGE / "_build.json"  # written by setup.py


class BuildInfo(TypedDict):
    """`native` and the fields after it tell of the build, `loaded` and `load_error` of this run."""

    version: str
    native: bool
    reason: str | None  # why there is no native library; None when there is one
    nvcc: str | None
    architectures: list[str]
    torch: str | None
    loaded: bool
    load_error: str | None  # why the library is not loaded; None when it is


# None: not tried yet. "": loaded. Anything else: why it is not loaded.
_load_error: str | None = None


def load_native() -> bool:
    """Load the native library once; later calls return the first answer.

    The schemas must be defined by then: the library holds only implementations.
    """
    global _load_error
    if _load_error is None:
        _load_error = _try_load()
    return _load_error == ""


def _try_load() -> str:
    if not _LIBRARY.is_file():
        return _missing_reason()

    import torch

    if torch.version.hip is not None:
        # ROCm builds of torch answer to the dispatch key that the CUDA kernels are registered for.
        return "the native library is for CUDA, and this torch is built for ROCm"
    ops: Any = torch.ops  # whether it counts as typed depends on what else mypy has read
    try:
        ops.load_library(str(_LIBRARY))
    except (OSError, RuntimeError) as error:
        return str(error)
    return ""


def _missing_reason() -> str:
    record = _read_record()
    return record["reason"] or f"{_LIBRARY.name} is missing although it was built"


def _read_record() -> BuildInfo:
    info = BuildInfo(
        version=__version__,
        native=False,
        reason="not built",
        nvcc=None,
        architectures=[],
        torch=None,
        loaded=False,
        load_error=None,
    )
    if _RECORD.is_file():
        record = json.loads(_RECORD.read_text())
        info["native"] = record["native"]
        info["reason"] = record["reason"]
        info["nvcc"] = record["nvcc"]
        info["architectures"] = record["architectures"]
        info["torch"] = record["torch"]
    return info


def build_info() -> BuildInfo:
    """Tell what the build made, and whether this process uses it. Loads nothing by itself."""
    info = _read_record()
    info["loaded"] = _load_error == ""
    info["load_error"] = "not tried" if _load_error is None else (_load_error or None)
    return info
