"""The backends, and when each is chosen.

A backend is one module of this package with these names:

    NAME: str
    CHOSEN_FOR: str                           when `auto` takes it
    REFUSES: frozenset[str]                   fields of SamplingParams that it lacks
    unusable(device: torch.device) -> str     why it cannot run there; "" where it can
    canonical_order(vocab_size) -> Tensor     int64 [vocab_size]: ids in the order of the draw
    scratch_words(layout, rows) -> int        int32 words of scratch for a step of so many rows
    warm_up(layout, device, dtypes) -> None   compile what logits of these dtypes need
    sample_step(...)                          one step, in place: the op of the same name in ops.py
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType

# By name: importing the backends of those names rebinds `torch` and `cuda` in this package.
from torch import Tensor
from torch import device as Device
from torch.cuda import is_available as has_gpu

NAMES = ("cpu", "triton", "torch", "cuda")
"""Every backend, in the order in which `auto` tries them."""


def module(name: str) -> ModuleType:
    """The backend's module, imported on first use; ValueError for an unknown name."""
    if name not in NAMES:
        raise ValueError(f"backend = {name!r} is not known; there are {', '.join(NAMES)}")
    return importlib.import_module(f"{__name__}.{name}")


def resolve(name: str, device: Device) -> str:
    """The name of the backend that serves `device`; "auto" takes the first that is usable."""
    if name == "auto":
        # On the CPU Triton only runs in its interpreter, which is for those who ask for it.
        names = [n for n in NAMES if n != "triton" or device.type != "cpu"]
        return next(n for n in names if not module(n).unusable(device))
    reason = module(name).unusable(device)
    if reason:
        raise ValueError(f"backend {name!r} cannot be used on {device}: {reason}")
    return name


def canonical_order(vocab_size: int, backend: str) -> Tensor:
    """int64 [vocab_size]: all token ids in the order in which `backend` lays out a draw."""
    order: Tensor = module(backend).canonical_order(vocab_size)
    return order


@dataclass(frozen=True)
class BackendInfo:
    """One backend on this machine, as `describe` reports it."""

    name: str
    usable: bool
    reason: str
    refuses: tuple[str, ...]
    chosen_for: str


def describe(device: Device | str | None = None) -> list[BackendInfo]:
    """Every backend on `device` (a GPU where there is one): usable or why not, what it refuses."""
    if device is None:
        device = "cuda" if has_gpu() else "cpu"
    infos = []
    for name in NAMES:
        backend = module(name)
        reason = backend.unusable(Device(device))
        refuses = tuple(sorted(backend.REFUSES))
        infos.append(BackendInfo(name, not reason, reason, refuses, backend.CHOSEN_FOR))
    return infos
