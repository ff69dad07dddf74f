"""Statistics of groups of logits: what whoever makes logits can tell a step of them.

A row's groups are `GROUP_SIZE` tokens each, two to a window of `WINDOW_SIZE` neighbours: group
2 w + i has of window w, in pieces of 8 tokens, those with even numbers (i = 0) or odd ones (i = 1).
Of every group there are its largest logit and the sum of exp(logit - largest), of the raw logits as
they are stored. A step that is given them (`group_stats`) does not read rows for which they
suffice, but for the few groups that may be drawn. `group_stats` works them out in torch operations;
`graphed_sampling.epilogue` has what a kernel of Triton's calls on its tiles of logits.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from graphed_sampling.checks import check_count, check_vocab_size

GROUP_SIZE: Final = 64
"""Tokens of a group."""
WINDOW_SIZE: Final = 128
"""Neighbouring tokens of which two groups have the pieces in turns."""
PIECE_SIZE: Final = 8
"""Neighbouring tokens of one group."""
UNIT: Final = 4
"""Of so many groups a row has a multiple. What stands at those without tokens is not looked at."""


def group_stats_shape(rows: int, vocab_size: int) -> tuple[int, int, int]:
    """(rows, 2, groups): of every row the maxima of its groups, then their sums.

    groups: ceil(vocab_size / GROUP_SIZE), up to a multiple of 4, so that each row's maxima and sums
    are whole vectors of 16 bytes. ValueError for numbers that are none of rows and tokens.
    """
    rows = check_count("rows", rows, 0)
    vocab_size = check_count("vocab_size", vocab_size, 1)
    return rows, 2, -(-vocab_size // (GROUP_SIZE * UNIT)) * UNIT


def group_stats(logits: Tensor, vocab_size: int) -> Tensor:
    """fp32 [n, 2, groups]: the statistics of logits [n, >= vocab_size], fp32, bf16 or fp16.

    [:, 0] are the maxima, -inf for groups without tokens. [:, 1] are the sums of
    exp(logit - maximum), 0 where that is -inf, NaN where the group holds NaN or +inf.
    vocab_size: the table's, or -1 for all columns; of padding there must be no statistics.
    ValueError for what is no such thing.
    """
    size = check_vocab_size(logits, check_count("vocab_size", vocab_size, -1))
    rows, _, groups = group_stats_shape(logits.shape[0], size)
    with torch.no_grad():
        padding = groups * GROUP_SIZE - size
        values = logits[:, :size].float()
        values = torch.nn.functional.pad(values, (0, padding), value=-math.inf)
        pieces = (GROUP_SIZE // PIECE_SIZE, WINDOW_SIZE // GROUP_SIZE, PIECE_SIZE)
        values = values.view(rows, groups * GROUP_SIZE // WINDOW_SIZE, *pieces)
        # NaN does not hide a maximum, which a step wants of the other groups alone.
        finite = values.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
        maxima = finite.amax((2, 4))
        base = maxima.masked_fill(maxima == -math.inf, 0.0)
        sums = (values - base[:, :, None, :, None]).exp().sum((2, 4))
        return torch.stack([maxima.view(rows, groups), sums.view(rows, groups)], 1)
