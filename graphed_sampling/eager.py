"""Functions that torch.compile must leave alone."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_REASON = (
    "uploads run in Python: compile torch.ops.graphed_sampling.sample_step, and call "
    "RequestTable.upload() before the compiled function"
)


def never_compiled(function: Callable[P, R]) -> Callable[P, R]:
    """`torch.compiler.disable`, without its import of the compiler, which takes over a second.

    Where the compiler was never imported there is nothing to keep it from.
    """
    disabled: list[Callable[P, R]] = []

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function, reason=_REASON))
        return disabled[0](*args, **kwargs)

    return call
