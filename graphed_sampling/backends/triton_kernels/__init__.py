"""The Triton kernels of the `triton` backend: stream, finish, dense. And those of `flashinfer`.

Logits are cut into groups of 64 consecutive tokens. `stream` reads a row once and keeps, for each
group, its maximum and its sum of exponentials. `finish`, one program a row, bounds from these what
can be drawn at all, reads the few groups again that hold such tokens, and does the rest on the
list of them. Rows whose list would be too long (flat distributions, enormous top_k) are left to
`dense`, which goes over the row itself.

Nothing here depends on the batch: groups, lists and the order of every floating-point sum are
functions of the row. Of the sums that a result is made of, those over groups are integers, whose
order does not matter; those inside a group, and over the groups of a super, go in one fixed order,
whatever layout the compiler chooses. Sums that only bound what has to be looked at, which is
checked afterwards, go as the compiler likes, though in every batch alike.

    streaming    the kernel `stream`: the first pass
    finishing    the kernel `finish`: the rest of most rows
    dense_rows   the kernel `dense`: the rows that are left
    drawing      the kernels `group_probabilities`, `token_probabilities` and `conclude`: where
                 FlashInfer draws a group and then a token of it, what comes before, between and
                 after; the others then find out what is to be drawn from. And `ask`: where
                 FlashInfer finds the best tokens of rows with top_k, how many of them
    scoring      the kernels `survey` and `score`: logprobs of given tokens at many positions
    gradients    the kernel `differentiate`: those of such logprobs, and of entropies

LAW, of all kernels: whether ties at a cut all stay (KEEP_TIES), whether top_p counts the mass of
all tokens, not of those that top_k keeps (JOINT), whether somebody else draws (DECIDE), or finds
the best tokens of rows with top_k (SLAB).

Names: x are the model's logits, y the processed ones, z = log2 of a weight relative to the
largest, q the integer mass rint(2**z * 2**40).
"""

from graphed_sampling.backends.triton_kernels.dense_rows import dense
from graphed_sampling.backends.triton_kernels.drawing import (
    ask,
    conclude,
    group_probabilities,
    token_probabilities,
)
from graphed_sampling.backends.triton_kernels.finishing import finish
from graphed_sampling.backends.triton_kernels.gradients import differentiate
from graphed_sampling.backends.triton_kernels.scoring import score, survey
from graphed_sampling.backends.triton_kernels.streaming import stream

__all__ = [
    "ask",
    "conclude",
    "dense",
    "differentiate",
    "finish",
    "group_probabilities",
    "score",
    "stream",
    "survey",
    "token_probabilities",
]
