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

and, where it takes part in `prompt_logprobs`, raw logprobs of given tokens at many positions,
which have the bits of its step's:

    score_rows(logits, positions, output, layout, *, rank, entropy) -> None
                                              every position's record, see `layout.PositionRecord`;
                                              what is asked for may be out of range, see `Positions`
    gradient_rows(result, logits, positions, upstream, forward, scale, vocab_size) -> None
                                              where it has a kernel: their gradients; optional

REFUSES may hold "words" too, the argument of a step. A backend may also have

    REMEDIES: Mapping[str, str]               of what it refuses, what would serve
    configured(options) -> object             the same names, for options other than the default
    TAKES_GROUP_STATS: bool                   whether its step takes `group_stats`
    SCORES_TEMPERATURES: bool                 whether its `score_rows` takes rows that a temperature
                                              and nothing else processes, as its step does

Options follow a backend's name: "flashinfer:route=slab,..." is `flashinfer` with that option.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# By name: importing the backends of those names rebinds `torch` and `cuda` in this package.
from torch import Tensor
from torch import device as Device
from torch.cuda import is_available as has_gpu

from graphed_sampling.params import UnsupportedFeatureError

NAMES = ("cpu", "cuda", "triton", "torch", "flashinfer")
"""Every backend, in the order in which `auto` tries them."""


def check_name(name: object) -> None:
    """ValueError unless it is a string; whether a backend has it, `module` finds."""
    if not isinstance(name, str):
        raise ValueError(f"backend = {name!r} is not known; there are {', '.join(NAMES)}")


@functools.cache
def module(name: str) -> Any:
    """The backend's module, imported on first use; with options, what stands for it.

    ValueError for an unknown name or option.
    """
    plain, colon, options = name.partition(":")
    if plain not in NAMES:
        raise ValueError(f"backend = {name!r} is not known; there are {', '.join(NAMES)}")
    found = importlib.import_module(f"{__name__}.{plain}")
    if not colon:
        return found
    if not hasattr(found, "configured"):
        raise ValueError(f"the backend {plain!r} takes no options: {options!r}")
    pairs = [option.partition("=") for option in options.split(",")]
    return found.configured({key: value for key, _, value in pairs})


def with_options(name: str, options: Mapping[str, str]) -> str:
    """The name of a backend with options; ValueError where it does not take them."""
    if not options:
        return name
    if name == "auto":
        raise ValueError(f"{', '.join(options)}: options go with a backend that is named")
    joined = f"{name}:" + ",".join(f"{key}={value}" for key, value in options.items())
    return str(module(joined).NAME)


def resolve(name: str, device: Device) -> str:
    """The name of the backend that serves `device`; "auto" takes the first that is usable."""
    check_name(name)
    if name == "auto":
        # On the CPU these only run in an interpreter and an emulation, for those who ask for them.
        names = [n for n in NAMES if n not in ("cuda", "triton") or device.type != "cpu"]
        names.remove("flashinfer")  # it lacks what a request may need
        return next(n for n in names if not module(n).unusable(device))
    reason = module(name).unusable(device)
    if reason:
        raise ValueError(f"backend {name!r} cannot be used on {device}: {reason}")
    return str(module(name).NAME)


def check_takes_group_stats(backend: Any) -> None:
    """UnsupportedFeatureError unless the backend, a module, takes the logits' statistics."""
    if not getattr(backend, "TAKES_GROUP_STATS", False):
        takers = [n for n in NAMES if getattr(module(n), "TAKES_GROUP_STATS", False)]
        raise UnsupportedFeatureError(
            f"the backend {backend.NAME!r} does not support group_stats; {', '.join(takers)} does"
        )


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
