"""Logprobs of given tokens from sharded logits: the ranks exchange a small record a position.

Each rank scores its shard as if that were the vocabulary. From all ranks' largest logits and
normalisers (and the entropies of their shards) follow those of the whole row, and from the logits
of the given and the best tokens, which their owners tell, the logprobs: in float64 and in the order
of the ranks, so that all of them have the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from graphed_sampling import checks, positions
from graphed_sampling.backends.exact_math import log
from graphed_sampling.backends.position_records import (
    Forward,
    Positions,
    Selection,
    Upstream,
    join_gradients,
)
from graphed_sampling.distributed.agreement import member_group
from graphed_sampling.distributed.collectives import all_gather_single
from graphed_sampling.distributed.shards import check_vocab_ranges
from graphed_sampling.layout import RowFlags
from graphed_sampling.logprobs import PromptLogprobs
from graphed_sampling.wishes import (
    MAX_TOP_N,
    Wishes,
)

_COMPARED_ELEMENTS: Final = 2**24
"""Of logits that are compared with a token's at a time, for its rank."""


def vocab_parallel_prompt_logprobs(
    logits: Tensor,
    next_token_ids: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    vocab_ranges: Sequence[tuple[int, int]],
    rows: Tensor | None = None,
    num_rows: Tensor | None = None,
    given_ids: Tensor | None = None,
    top_n: int = 0,
    rank: bool = False,
    entropy: bool = False,
    backend: str = "auto",
) -> PromptLogprobs:
    """`prompt_logprobs` of logits that are sharded over the ranks of a group; raw logprobs.

    logits: this rank's, [n, >= its tokens]; an empty shard's may have no columns. group: the
    default group for None. vocab_ranges: of each rank the first token it has and the one behind the
    last, as `even_vocab_ranges` makes them. All other arguments are those of `prompt_logprobs`, and
    the same on every rank, as the results are, bit for bit.

    A position sends 8 * (5 + 2 * top_n + given ids) bytes to every rank, and 8 more for ranks.
    Gradients as of `prompt_logprobs`: every rank gets those of its own logits, without another
    exchange, for a loss that all ranks work out alike.

    ValueError for what this rank can see is wrong, before anything is sent; the other ranks then
    wait as long as the group lets them.
    """
    group = member_group(group)
    for name, value in (("logits", logits), ("next_token_ids", next_token_ids)):
        checks.check_tensor(name, value)
    ranges = check_vocab_ranges(None, group.size(), None, vocab_ranges)
    start, end = ranges[group.rank()]
    top_n = checks.check_count("top_n", top_n, 0, MAX_TOP_N)
    shard = _Shard(group, ranges[-1][1], start, end, top_n, rank, entropy, backend)
    if given_ids is None:
        given_ids = next_token_ids.new_empty(next_token_ids.numel(), 0)
    apply: Any = _ShardedLogprobs.apply
    return PromptLogprobs(*apply(logits, next_token_ids, given_ids, rows, num_rows, shard))


class _Shard(NamedTuple):
    """What is asked of a shard: the tokens [start, end) of the vocabulary."""

    group: dist.ProcessGroup
    vocab_size: int
    start: int
    end: int
    top_n: int
    rank: bool
    entropy: bool
    backend: str

    def local(self, ids: Tensor) -> Tensor:
        """Where in the shard tokens are; -1 for those that are not."""
        outside = (ids < self.start) | (ids >= self.end)
        return (ids - self.start).masked_fill(outside, -1)

    def gather(self, told: Tensor) -> Tensor:
        """[ranks, *shape]: every rank's."""
        size = self.group.size()
        gathered = told.new_empty(size, *told.shape)
        if told.numel():
            all_gather_single(gathered.view(-1), told.contiguous().view(-1), group=self.group)
        return gathered


class _ShardedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        next_token_ids: Tensor,
        given_ids: Tensor,
        rows: Tensor | None,
        num_rows: Tensor | None,
        shard: _Shard,
    ) -> tuple[Tensor, ...]:
        with torch.autocast(logits.device.type, enabled=False):
            asked = _check(logits, next_token_ids, given_ids, rows, num_rows, shard)
            ids = torch.cat([asked.accepted_token_ids.unsqueeze(1), asked.accepted_given_ids], 1)
            told = _score_shard(logits, asked, ids, shard)
            result, all_ids, all_logprobs = _merge(shard.gather(told), asked, ids, logits, shard)
        ctx.mark_non_differentiable(
            result.top_token_ids, result.ranks, result.num_kept, result.flags, result.normalisers
        )
        ctx.set_materialize_grads(False)
        ctx.shard, ctx.in_order, ctx.num_given = shard, asked.in_order, given_ids.shape[1]
        ctx.save_for_backward(
            logits, asked.rows, all_ids, all_logprobs, result.entropies, result.normalisers
        )
        return tuple(result)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        of_logprobs, of_given, of_top, of_entropies = gradients[:4]
        shard: _Shard = ctx.shard
        logits, rows, ids, logprobs, entropies, normalisers = ctx.saved_tensors
        joined = join_gradients(of_logprobs, of_given, of_top, logprobs, ctx.num_given)
        upstream = Upstream.of(
            ids, logprobs, joined, of_entropies if shard.entropy else None
        ).of_tokens_from(shard.start)
        forward = Forward(normalisers, entropies, None)
        selection = Selection(logits.shape[0], rows >= 0 if ctx.in_order else rows)
        chosen = Positions(selection, ids[:, 0], ids[:, :0], shard.vocab_size)
        with torch.autocast(logits.device.type, enabled=False):
            module = positions.scoring_module(shard.backend, logits.device)
            gradient = positions.logit_gradients(
                logits, chosen, upstream, forward, shard.end - shard.start, module
            )
        return gradient, None, None, None, None, None


def _check(
    logits: Tensor,
    next_token_ids: Tensor,
    given_ids: Tensor,
    rows: Tensor | None,
    num_rows: Tensor | None,
    shard: _Shard,
) -> Positions:
    """The positions, with ids of the whole vocabulary."""
    checks.check_logits(logits, shard.end - shard.start)
    # Of a shard without tokens too.
    asked = Wishes.check_rows(
        logits, shard.vocab_size, shard.backend, next_token_ids, rows, num_rows, given_ids,
        None, None, None, None, None, shard.top_n, shard.rank, shard.entropy,
    )  # fmt: skip
    return asked.positions


def _score_shard(logits: Tensor, asked: Positions, ids: Tensor, shard: _Shard) -> Tensor:
    """float64 [m, k], what this rank tells of its shard: the largest logit, the log normaliser, the
    entropy, whether there is NaN, the logits of ids (-inf where they are not its own), then the
    logits of the best tokens and their ids (-inf and -1 where there are fewer)."""
    count, device = asked.count, logits.device
    width, top_n = shard.end - shard.start, shard.top_n
    if width == 0 or logits.shape[0] == 0:
        told = ids.new_full((count, 4 + ids.shape[1] + 2 * top_n), -math.inf, dtype=torch.float64)
        told[:, 1:4] = 0.0
        told[:, told.shape[1] - top_n :] = -1.0
        return told
    layout = positions.position_layout(width, top_n, 0)
    output = torch.empty(count, layout.output_words, dtype=torch.int32, device=device)
    nowhere = torch.full_like(asked.token_ids, -1)
    positions.score_positions(
        logits,
        replace(asked, token_ids=nowhere, given_ids=nowhere.unsqueeze(1)[:, :0]),
        output,
        layout,
        positions.scoring_module(shard.backend, device),
        rank=False,
        entropy=shard.entropy,
    )
    scored = PromptLogprobs(*positions.split_record(output, layout))
    row = asked.rows.clamp(min=0).unsqueeze(1)

    def logits_at(local: Tensor) -> Tensor:
        values = logits[row, local.clamp(min=0)].double()
        # Adding zero turns -0.0 into 0.0.
        return values.masked_fill(values.isnan() | (local < 0), -math.inf).add_(0.0)

    top = scored.top_token_ids
    return torch.cat(
        [
            scored.normalisers.double(),
            scored.entropies.double().nan_to_num(nan=0.0).unsqueeze(1),
            (scored.flags & int(RowFlags.NAN)).double().unsqueeze(1),
            logits_at(shard.local(ids)),
            logits_at(top),
            torch.where(top < 0, top, top + shard.start).double(),
        ],
        1,
    )


def _merge(
    told: Tensor, asked: Positions, ids: Tensor, logits: Tensor, shard: _Shard
) -> tuple[PromptLogprobs, Tensor, Tensor]:
    """The results, by what all ranks told [ranks, m, k]; and ids [m, j] with their logprobs: of the
    token, the given ones and the best ones."""
    largest, log_normalisers, entropies, has_nan = told[:, :, :4].unbind(2)
    maximum = largest.amax(0)
    absent, empty, infinite = asked.rows < 0, maximum == -math.inf, maximum == math.inf

    def relative(values: Tensor) -> Tensor:
        """float64, to the maximum. Of rows with +inf these alone count: the others are -inf."""
        difference = (values - maximum).masked_fill(values == maximum, 0.0)
        return difference.masked_fill(values == -math.inf, -math.inf)

    log_shares = relative(largest) + log_normalisers
    log_total = log(_sum_of_ranks(log_shares.exp()).masked_fill(empty, 1.0))
    log_shares = log_shares - log_total

    best_ids, best = _best(told, shard.top_n)
    at_ids = told[:, :, 4 : 4 + ids.shape[1]].amax(0)  # others than the owner tell -inf
    all_ids = torch.cat([ids, best_ids], 1)
    exact = relative(torch.cat([at_ids, best], 1).t()).t() - log_total.unsqueeze(1)
    all_ids[:, ids.shape[1] :].masked_fill_(exact[:, ids.shape[1] :] == -math.inf, -1)
    unasked = absent.unsqueeze(1).expand(exact.shape).clone()
    unasked[:, : ids.shape[1]] |= ids < 0
    logprobs = exact.float().masked_fill_(unasked, math.nan)
    all_ids.masked_fill_(absent.unsqueeze(1), -1)

    entropy = torch.full_like(maximum, math.nan)
    if shard.entropy:
        shares = log_shares.exp()
        parts = (shares * (entropies - log_shares)).masked_fill(shares == 0, 0.0)
        entropy = _sum_of_ranks(parts).clamp(min=0.0).masked_fill_(absent | empty, math.nan)
    ranks = torch.zeros_like(asked.token_ids)
    if shard.rank:
        larger = _count_larger(logits, asked, at_ids[:, 0], shard)
        ranks = shard.gather(larger).sum(0).add_(1).masked_fill_(absent | (ids[:, 0] < 0), 0)
    flags = has_nan.amax(0).long() + infinite * int(RowFlags.POS_INF) + empty * int(RowFlags.EMPTY)
    normalisers = torch.stack([maximum, log_total], 1).float()
    result = PromptLogprobs(
        logprobs=logprobs[:, 0].clone(),
        given_logprobs=logprobs[:, 1 : ids.shape[1]].clone(),
        top_logprobs=logprobs[:, ids.shape[1] :].clone(),
        entropies=entropy.float(),
        top_token_ids=all_ids[:, ids.shape[1] :].clone(),
        ranks=ranks.to(torch.int32),
        num_kept=torch.zeros_like(ranks, dtype=torch.int32),
        flags=flags.masked_fill(absent, int(RowFlags.PADDING)).to(torch.int32),
        normalisers=normalisers,
    )
    return result, all_ids, logprobs


def _sum_of_ranks(values: Tensor) -> Tensor:
    """[...] of [ranks, ...], in the order of the ranks."""
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def _best(told: Tensor, top_n: int) -> tuple[Tensor, Tensor]:
    """int64 and float64 [m, top_n]: ids of the best tokens of all ranks and their logits."""

    def listed(start: int) -> Tensor:
        lists = told[:, :, start : start + top_n]
        return lists.transpose(0, 1).flatten(1)

    start = told.shape[2] - 2 * top_n
    values, all_ids = listed(start), listed(start + top_n)
    # Ids ascend with the ranks, and among equals within a rank: the stable sort keeps them so.
    order = torch.sort(values, dim=1, descending=True, stable=True).indices[:, :top_n]
    return all_ids.gather(1, order).long(), values.gather(1, order)


def _count_larger(logits: Tensor, asked: Positions, at_token: Tensor, shard: _Shard) -> Tensor:
    """int64 [m]: how many of the shard's logits are larger than the token's; NaN never is."""
    width = shard.end - shard.start
    counts = torch.zeros_like(asked.rows)
    if width == 0 or logits.shape[0] == 0:
        return counts
    values = at_token.to(logits.dtype)  # exact: it is one of them
    step = max(1, _COMPARED_ELEMENTS // width)
    for begin in range(0, counts.shape[0], step):
        part = slice(begin, begin + step)
        chunk = asked.chunk(part).logits(logits, part)[:, :width]
        counts[part] = (chunk > values[part].unsqueeze(1)).sum(1)
    return counts
