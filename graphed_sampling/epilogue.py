"""For kernels of Triton's that make logits: `store_group_stats`, their groups' statistics.

Called on each tile of a GEMM, beside the store of the tile itself, it leaves what `group_stats` of
`graphed_sampling.statistics` would work out from the stored logits, without a read of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphed_sampling import statistics

_GROUP = tl.constexpr(statistics.GROUP_SIZE)
_WINDOW = tl.constexpr(statistics.WINDOW_SIZE)
_PIECE = tl.constexpr(statistics.PIECE_SIZE)
_UNIT = tl.constexpr(statistics.UNIT)
_NEG_INF = tl.constexpr(float("-inf"))
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def store_group_stats(logits, stats, rows, first_token, num_rows, vocab_size):
    """Store the statistics of a tile of logits.

    logits: [M, N], as they are stored: rounded to the logits' dtype. N is a multiple of 128.
    stats: pointer to fp32, contiguous [>= num_rows, 2, groups], see `group_stats_shape`.
    rows: int [M], the tile's rows; those from num_rows on are left out.
    first_token: of the tile's columns, a multiple of 128. Columns from vocab_size on do not count;
    groups without tokens get -inf and 0.
    """
    M: tl.constexpr = logits.shape[0]
    N: tl.constexpr = logits.shape[1]
    tl.static_assert(N % _WINDOW == 0, "a tile of logits must hold whole windows of 128 tokens")
    WINDOWS: tl.constexpr = N // _WINDOW
    OF_WINDOW: tl.constexpr = _WINDOW // _GROUP
    tokens = first_token + tl.arange(0, N)
    x = tl.where((tokens < vocab_size)[None, :], logits.to(tl.float32), _NEG_INF)
    # A window's pieces belong to its groups in turns.
    x = tl.reshape(x, (M, WINDOWS, _GROUP // _PIECE, OF_WINDOW, _PIECE))
    maxima = tl.max(tl.max(x, 4), 2)
    base = tl.where(maxima == _NEG_INF, 0.0, maxima)
    sums = tl.sum(tl.sum(tl.exp2((x - base[:, :, None, :, None]) * _LOG2_E), 4), 2)
    groups = tl.cdiv(vocab_size, _GROUP * _UNIT) * _UNIT
    window = first_token // _WINDOW + tl.arange(0, WINDOWS)
    group = (window * OF_WINDOW)[:, None] + tl.arange(0, OF_WINDOW)[None, :]
    place = stats + rows.to(tl.int64)[:, None, None] * (2 * groups) + group[None, :, :]
    inside = (rows < num_rows)[:, None, None] & (group < groups)[None, :, :]
    tl.store(place, maxima, mask=inside)
    tl.store(place + groups, sums, mask=inside)
