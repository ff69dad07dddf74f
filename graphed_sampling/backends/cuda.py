"""The `cuda` backend: the whole step in one kernel of the native library (csrc/sample_step.cu).

It runs on GPUs. For tests there is an emulation of the kernel on the CPU (csrc/emulation), which is
used where a test has loaded it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from graphed_sampling._build_info import build_info
from graphed_sampling.backends.position_records import Positions
from graphed_sampling.layout import TableLayout

NAME: Final = "cuda"
CHOSEN_FOR: Final = "tables on a GPU for which the native library is built"
REFUSES: Final[frozenset[str]] = frozenset()

# The geometry and the scratch of csrc: tokens of a group and groups of a tile; words of a row, of a
# group and of the list around the cut of a flat row, which smaller vocabularies go without.
_GROUP: Final = 64
_GROUPS_OF_TILE: Final = 32
_HEADER: Final = 32
_BY_ROW: Final = 1  # which of the header's words
_OF_GROUP: Final = 7
_BRACKET: Final = 2 * 16384
_LISTED: Final = 2048
# And of the kernel of many positions: blocks at most, and groups that shared memory holds.
_SCORING_BLOCKS: Final = 512
_SHARED_GROUPS: Final = 4096


def unusable(device: torch.device) -> str:
    """Why the backend cannot run on `device`; empty where it can."""
    if device.type not in ("cuda", "cpu"):
        return "its kernel runs on CUDA GPUs"
    if not _has_kernel("CUDA" if device.type == "cuda" else "CPU"):
        if device.type == "cpu":
            return "it runs on GPUs; on the CPU only in the emulation that its tests load"
        info = build_info()
        return f"the native library is not loaded: {info['load_error'] or info['reason']}"
    if device.type == "cpu":
        return ""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    major, minor = _capability(device)
    if not any(architecture <= 10 * major + minor for architecture in _architectures()):
        built = ", ".join(map(str, _architectures()))
        return f"it was built for {built}, and the GPU is {major}.{minor}"
    return ""


# A step asks whether it may run: neither answer changes.
@functools.lru_cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@functools.cache
def _architectures() -> tuple[int, ...]:
    """What the native library was built for: 90 is compute capability 9.0."""
    # CMake's names may go on, as in 90-real.
    numbers = (re.match(r"\d+", name) for name in build_info()["architectures"])
    return tuple(int(number[0]) for number in numbers if number)


def _has_kernel(key: str) -> bool:
    has_kernel: Any = torch._C._dispatch_has_kernel_for_dispatch_key
    return bool(has_kernel("graphed_sampling::cuda_step", key))


def canonical_order(vocab_size: int) -> Tensor:
    """int64 [vocab_size]: ids ascending."""
    return torch.arange(vocab_size, device="cpu")


def _groups(layout: TableLayout) -> int:
    """Of a row, whose last tile may have less tokens."""
    return -(-layout.vocab_size // (_GROUP * _GROUPS_OF_TILE)) * _GROUPS_OF_TILE


@functools.lru_cache
def scratch_words(layout: TableLayout, rows: int) -> int:
    """int32 words of scratch that a step of up to `rows` rows needs."""
    words = _HEADER + _OF_GROUP * _groups(layout) + layout.max_stop_ids + layout.max_bad_words
    if layout.vocab_size > _LISTED:
        words += _BRACKET
    return rows * (-(-words // 32) * 32)


def by_row(scratch: Tensor, layout: TableLayout, rows: int) -> list[bool]:
    """Of the rows of a last step: whether filters and draw of each went over the whole row, slowly.

    It says nothing of what else does: top_n_sigma, three times, and each of more top logprobs than
    a list holds.
    """
    return [bool(word) for word in scratch[_BY_ROW :: scratch_words(layout, 1)][:rows].tolist()]


def warm_up(
    layout: TableLayout, device: torch.device, logits_dtypes: Sequence[torch.dtype]
) -> None:
    """Nothing: the kernel is compiled already."""


def sample_step(
    logits: Tensor,
    slots: Tensor,
    params: Tensor,
    state: Tensor,
    tables: Tensor,
    output: Tensor,
    scratch: Tensor,
    layout: TableLayout,
    *,
    grammar_bitmask: Tensor | None,
    words: Tensor | None,
    given: Tensor | None,
) -> None:
    """One step in place; arguments as the op `sample_step`, checked there."""
    torch.ops.graphed_sampling.cuda_step(
        logits,
        slots.contiguous(),
        params,
        state,
        tables,
        output,
        scratch,
        layout.to_ints(),
        grammar_bitmask,
        None if words is None else words.contiguous(),
        given,
    )


def score_rows(
    logits: Tensor,
    positions: Positions,
    output: Tensor,
    layout: TableLayout,
    *,
    rank: bool,
    entropy: bool,
) -> None:
    """Raw logprobs at many positions: see `backends`."""
    scratch = torch.empty(
        _score_scratch_words(layout, entropy), dtype=torch.int32, device=logits.device
    )
    torch.ops.graphed_sampling.cuda_score_rows(
        logits,
        positions.rows.contiguous(),
        positions.token_ids.contiguous(),
        positions.given_ids.contiguous(),
        output,
        scratch,
        layout.to_ints(),
        rank,
        entropy,
    )


def _score_scratch_words(layout: TableLayout, entropy: bool) -> int:
    """int32 words of scratch: of each block three values of every group, where it needs any."""
    groups = _groups(layout)
    return _SCORING_BLOCKS * 3 * groups if entropy or groups > _SHARED_GROUPS else 0
