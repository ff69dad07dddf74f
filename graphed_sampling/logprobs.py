"""Logprobs of given tokens at many positions: prompts, evaluation, policy ratios.

`prompt_logprobs` is `torch.ops.graphed_sampling.prompt_logprobs` for callers who have
`SamplingParams`; `next_token_ids` makes its tokens from packed prompts; `PromptLogprobs.of` names
the parts of the records that `torch.ops.graphed_sampling.prompt_logprobs_out` fills.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from graphed_sampling import backends, checks, lm_head, positions
from graphed_sampling.packing import active_features
from graphed_sampling.params import SamplingParams, UnsupportedFeatureError
from graphed_sampling.wishes import MAX_TOP_N

FILTERS: Final = frozenset({"top_k", "top_p", "min_p"})
"""What processed logprobs of given tokens take into account, beside the temperature."""
_MOST_ROWS: Final = 2**31
"""That may be asked for at a time, or to be saved."""
_REPORTS: Final = frozenset(
    {"logprobs", "logprobs_mode", "logprob_token_ids", "rank", "max_tokens", "stop_token_ids"}
) | {"ignore_eos", "seed"}
"""Fields that do not change a distribution: of these only `logprobs_mode` is looked at."""


class PromptLogprobs(NamedTuple):
    """What m positions say of their tokens. A position without a row: NaN, -1, 0, flag PADDING.

    logprobs: fp32 [m], of the given next tokens; NaN where there is none.
    given_logprobs: fp32 [m, g], of `given_ids`; NaN where there is none.
    top_logprobs: fp32 [m, n], of the best tokens; -inf where fewer have a probability.
    entropies: fp32 [m], of the row's distribution in nats; NaN where not asked, or where a raw row
        has nothing above -inf.
    top_token_ids: int64 [m, n], by (logit descending, id ascending); -1 where there is none.
    ranks: int32 [m], 1 + the number of tokens with a strictly larger logit; 0 where not asked.
    num_kept: int32 [m], of processed rows: survivors where a filter is on, 1 for greedy rows.
    flags: int32 [m], `RowFlags`.
    normalisers: fp32 [m, 2], the largest logit, and ln of the sum of weights relative to it: in raw
        rows the sum of both is logsumexp.

    The first four have a gradient where the logits require one.
    """

    logprobs: Tensor
    given_logprobs: Tensor
    top_logprobs: Tensor
    entropies: Tensor
    top_token_ids: Tensor
    ranks: Tensor
    num_kept: Tensor
    flags: Tensor
    normalisers: Tensor

    @classmethod
    def of(cls, record: Tensor, top_n: int = 0, num_given: int = 0) -> PromptLogprobs:
        """Views of a record that `prompt_logprobs_out` filled with so many top and given tokens.

        ValueError for what cannot be such a record.
        """
        words = _record_words(top_n, num_given)
        checks.check_tensor("record", record)
        if not (record.dtype == torch.int32 and record.dim() == 2 and record.shape[1] == words):
            raise ValueError(
                f"record is {record.dtype} {list(record.shape)}: with top_n = {top_n} and "
                f"num_given = {num_given} it must be torch.int32 [positions, {words}]"
            )
        layout = positions.position_layout(1, top_n, num_given)
        return cls(*positions.split_record(record, layout))


def new_prompt_output(
    rows: int, top_n: int = 0, num_given: int = 0, *, device: torch.device | str
) -> Tensor:
    """int32 [rows, words], the record that `prompt_logprobs_out` fills: one copy takes all of it to
    the host, where `PromptLogprobs.of` names its parts."""
    rows = checks.check_count("rows", rows, 0)
    words = _record_words(top_n, num_given)
    with torch.inference_mode(False):
        return torch.zeros(rows, words, dtype=torch.int32, device=device)


def _record_words(top_n: int, num_given: int) -> int:
    top_n = checks.check_count("top_n", top_n, 0, MAX_TOP_N)
    num_given = checks.check_count("num_given", num_given, 0)
    return positions.position_layout(1, top_n, num_given).output_words


def prompt_logprobs(
    logits: Tensor,
    next_token_ids: Tensor,
    *,
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    rows: Tensor | None = None,
    num_rows: Tensor | None = None,
    given_ids: Tensor | None = None,
    top_n: int = 0,
    rank: bool = False,
    entropy: bool = False,
    vocab_size: int = -1,
    backend: str = "auto",
) -> PromptLogprobs:
    """Logprobs of m given tokens, each at a row of logits, in one pass over the rows asked for.

    logits: [n, >= vocab_size] fp32, bf16 or fp16, last dimension contiguous; not modified.
    next_token_ids: int64 [m], the token that follows each position; -1 for none.
    params: of each position, or of all. `logprobs_mode` "raw" takes the model's logits as they are,
        "processed" counts temperature, min_p, top_k and top_p. Default: raw.
    rows: bool [n], which rows to touch: position i is row i, and m is n. Or int64 [m], the row of
        each position, -1 for none. Default: all, in order.
    num_rows: int32 [1] on the device: only so many first entries of a list of rows count.
    given_ids: int64 [m, g], other tokens of interest; -1 for none. top_n: how many best tokens.
    rank, entropy: whether these are wanted. vocab_size: -1 for all columns.

    All tensors are on one device; nothing waits for it. Ids out of range raise ValueError on the
    CPU and count as -1 elsewhere. Each logprob has the bits that the backend's sampling step gives
    for that row. Gradients with respect to the logits: of logprobs, given_logprobs, top_logprobs
    and entropies, for fixed survivors; logprobs of -inf and rows that hold +inf have none.

    ValueError for shapes, dtypes and devices that are not accepted; UnsupportedFeatureError, which
    is one, naming the field, where a processed position's params need a history or another filter.
    """
    _check_tensors(logits=logits, next_token_ids=next_token_ids)
    _check_tensors(rows=rows, num_rows=num_rows, given_ids=given_ids)
    vocab_size = checks.check_count("vocab_size", vocab_size, -1)
    top_n = checks.check_count("top_n", top_n, 0, MAX_TOP_N)
    backends.check_name(backend)
    filters: dict[str, Tensor] = {}
    if params is not None:
        size = checks.check_vocab_size(logits, vocab_size)
        filters = _filter_tensors(params, next_token_ids, size)
    return PromptLogprobs(
        *torch.ops.graphed_sampling.prompt_logprobs(
            logits, next_token_ids, rows, num_rows, given_ids, top_n=top_n, rank=rank,
            entropy=entropy, vocab_size=vocab_size, backend=backend, **filters,
        )
    )  # fmt: skip


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    next_token_ids: Tensor,
    *,
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    rows: Tensor | None = None,
    num_rows: Tensor | None = None,
    given_ids: Tensor | None = None,
    top_n: int = 0,
    rank: bool = False,
    entropy: bool = False,
    vocab_size: int = -1,
    backend: str = "auto",
    chunk_rows: int = 0,
    saved_rows: int = -1,
) -> PromptLogprobs:
    """`prompt_logprobs` of the logits hidden @ weight.T, of which few need be there at once.

    hidden: [n, h] fp32, bf16 or fp16; weight: [>= vocab_size, h] of the same dtype and device.
    chunk_rows: how many positions' logits exist at a time beside those that are saved, 0 for as
        many as take 256 MB. Logits are rounded to the dtype of hidden, and their bits may depend on
        chunk_rows and saved_rows, as those of a matrix product do on its shape.
    saved_rows: of how many positions, the first ones, the logits are saved for the backward pass,
        which works out the others anew. -1: where hidden or weight require a gradient, chunk_rows
        is 0 and no position has filters, as many as leave both passes, gradients included, below
        2 GB; else 0.
    Gradients with respect to hidden and weight. Those of logits are rounded to the dtype of hidden;
    what is summed over parts of the logits is summed in fp32. Other arguments, results and errors:
    as of `prompt_logprobs`.
    """
    _check_tensors(hidden=hidden, weight=weight, next_token_ids=next_token_ids)
    _check_tensors(rows=rows, num_rows=num_rows, given_ids=given_ids)
    vocab_size = checks.check_count("vocab_size", vocab_size, -1)
    top_n = checks.check_count("top_n", top_n, 0, MAX_TOP_N)
    chunk_rows = checks.check_count("chunk_rows", chunk_rows, 0, _MOST_ROWS)
    saved_rows = checks.check_count("saved_rows", saved_rows, -1, _MOST_ROWS)
    backends.check_name(backend)
    size = checks.check_linear(hidden, weight, vocab_size, chunk_rows)
    filters = {} if params is None else _filter_tensors(params, next_token_ids, size)
    if saved_rows == -1:
        differentiable = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
        saved_rows = 0
        if differentiable and chunk_rows == 0 and not FILTERS & filters.keys():
            saved_rows = lm_head.default_saved_rows(hidden, weight, next_token_ids.numel(), rows)
    *told, _saved = torch.ops.graphed_sampling.linear_logprobs(
        hidden, weight, next_token_ids, rows, num_rows, given_ids, top_n=top_n, rank=rank,
        entropy=entropy, vocab_size=vocab_size, backend=backend, chunk_rows=chunk_rows,
        saved_rows=saved_rows, **filters,
    )  # fmt: skip
    return PromptLogprobs(*told)


def _check_tensors(**named: object) -> None:
    for name, value in named.items():
        if value is not None:
            checks.check_tensor(name, value)


def _filter_tensors(
    params: SamplingParams | Sequence[SamplingParams], like: Tensor, vocab_size: int
) -> dict[str, Tensor]:
    """The op's arguments for these params; empty where all of them are raw."""
    checks.check_vector("next_token_ids", like, like.numel(), torch.int64)
    count = like.shape[0]
    if isinstance(params, SamplingParams):
        params = [params] * count
    elif not isinstance(params, Sequence) or len(params) != count:
        raise ValueError(
            f"params is not accepted: it must be SamplingParams, or {count} of them, one a position"
        )
    for p in {id(p): p for p in params}.values():
        if not isinstance(p, SamplingParams):
            raise ValueError(f"params hold {p!r}: they must be SamplingParams")
        if p.logprobs_mode == "processed":
            refused = active_features(p, vocab_size) - FILTERS - _REPORTS
            if refused:
                raise UnsupportedFeatureError(
                    "processed logprobs of given tokens do not support "
                    f"{', '.join(sorted(refused))}"
                )
    processed = [p.logprobs_mode == "processed" for p in params]
    if not any(processed):
        return {}

    def column(values: list[float] | list[int] | list[bool], dtype: torch.dtype) -> Tensor:
        host = torch.tensor(values, dtype=dtype, device="cpu")
        if like.device.type == "cuda":
            host = host.pin_memory()
        return host.to(like.device, non_blocking=True)

    filters = {"temperature": column([p.temperature for p in params], torch.float32)}
    if any(p.top_k > 0 for p in params):
        # More than the vocabulary is off, and need not fit.
        filters["top_k"] = column([min(p.top_k, vocab_size) for p in params], torch.int32)
    if any(p.top_p < 1 for p in params):
        filters["top_p"] = column([p.top_p for p in params], torch.float32)
    if any(p.min_p > 0 for p in params):
        filters["min_p"] = column([p.min_p for p in params], torch.float32)
    if not all(processed):
        filters["processed"] = column(processed, torch.bool)
    return filters


def next_token_ids(token_ids: Tensor, cu_lengths: Tensor, following: Tensor) -> Tensor:
    """int64 [t]: the token that follows each position of packed prompts; -1 behind the last one.

    token_ids: int64 [t], prompts (or their chunks of this step) one behind the other.
    cu_lengths: int32 or int64 [r + 1], cumulative lengths: prompt i is token_ids[cu_lengths[i] :
        cu_lengths[i + 1]]. Prompts may be empty; positions from cu_lengths[r] on are slack.
    following: int64 [r], what follows each prompt's last position: the sampled token, or where only
        a chunk of a prompt was prefilled the next chunk's first token; -1 for none.

    All on one device; nothing waits for it. ValueError for shapes and dtypes not accepted.
    """
    _check_tensors(token_ids=token_ids, cu_lengths=cu_lengths, following=following)
    checks.check_vector("token_ids", token_ids, token_ids.numel(), torch.int64)
    device, count = token_ids.device, token_ids.shape[0]
    if not (
        cu_lengths.dim() == 1
        and cu_lengths.shape[0] >= 1
        and cu_lengths.dtype in (torch.int32, torch.int64)
        and cu_lengths.device == device
    ):
        raise ValueError(
            f"cu_lengths is {cu_lengths.dtype} {list(cu_lengths.shape)} on {cu_lengths.device}: it "
            f"must be torch.int32 or torch.int64 [number of prompts + 1] on {device}"
        )
    checks.check_vector("following", following, cu_lengths.shape[0] - 1, torch.int64, device)
    starts, ends = cu_lengths[:-1].long(), cu_lengths[1:].long()
    if device.type == "cpu" and cu_lengths.numel():
        rising = bool((starts <= ends).all()) and int(cu_lengths[0]) >= 0
        if not rising or int(cu_lengths[-1]) > count:
            raise ValueError(
                f"cu_lengths = {cu_lengths.tolist()} is not accepted: it must rise within "
                f"[0, {count}]"
            )
    # A place behind the last one takes what belongs nowhere: the tokens after empty prompts.
    result = torch.full((count + 1,), -1, dtype=torch.int64, device=device)
    result[: max(count - 1, 0)] = token_ids[1:]
    place = torch.arange(count + 1, device=device)
    result.masked_fill_((place < cu_lengths[:1]) | (place >= cu_lengths[-1:]), -1)
    last = torch.where((starts >= 0) & (starts < ends) & (ends <= count), ends - 1, count)
    result.index_copy_(0, last, following)
    return result[:count]
