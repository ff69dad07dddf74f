"""The torch ops: schemas, fakes and their Python implementations. The only file with torch.library.

    torch.ops.graphed_sampling.sample            stateless: one parameter row per logits row
    torch.ops.graphed_sampling.flashinfer_sample the same with FlashInfer's draws
    torch.ops.graphed_sampling.sample_step       one step of a `RequestTable`, in place
    torch.ops.graphed_sampling.cuda_step         the same by the `cuda` backend, little checked
    torch.ops.graphed_sampling.cuda_sharded_step the same of a rank that has one shard of the logits
    torch.ops.graphed_sampling.apply_records     what a step's records say, done to another table
    torch.ops.graphed_sampling.prompt_logprobs   logprobs of given tokens, with a gradient
    torch.ops.graphed_sampling.prompt_logprobs_out    the same into memory that is there
    torch.ops.graphed_sampling.linear_logprobs   the same from hidden states and the head's weight
    torch.ops.graphed_sampling.cuda_score_rows   logprobs by the `cuda` backend, little checked
    torch.ops.graphed_sampling.philox_words      the random words of many draws
    torch.ops.graphed_sampling.scatter_segments  the packed scatter of dirty rows
    torch.ops.graphed_sampling.signal_fd         a stream's signal to an eventfd, of `step.futures`
    torch.ops.graphed_sampling.capture_signal_fd the same from a captured graph

Native implementations, where they were built, replace the Python ones of their device; signals
have no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, NoReturn

import torch
from torch import Tensor

from graphed_sampling import backends, lm_head, philox, positions
from graphed_sampling._build_info import load_native
from graphed_sampling.advance import apply_records
from graphed_sampling.backends import flashinfer
from graphed_sampling.backends.position_records import (
    AskedFilters,
    Forward,
    Positions,
    Selection,
    Upstream,
    accepted_ids,
    join_gradients,
)
from graphed_sampling.checks import (
    check_bitmask,
    check_device,
    check_group_stats,
    check_linear,
    check_logits,
    check_vector,
    check_vocab_size,
)
from graphed_sampling.layout import (
    Output,
    Param,
    ParamFlags,
    State,
    TableLayout,
)
from graphed_sampling.staging import DESCRIPTOR_WORDS, Target
from graphed_sampling.stateless import Filters, neutral_params, write_params
from graphed_sampling.statistics import group_stats_shape
from graphed_sampling.wishes import Wishes

_LIBRARY = torch.library.Library("graphed_sampling", "DEF")
_LIBRARY.define(
    "sample(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, "
    "Tensor seed, Tensor position, int vocab_size=-1) -> (Tensor token_ids, Tensor logprobs)"
)
_LIBRARY.define(
    "flashinfer_sample(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, "
    "Tensor min_p, Tensor seed, Tensor(a!) offset, int vocab_size=-1, "
    "str filter_order='top_k_first') -> (Tensor token_ids, Tensor logprobs)"
)
_LIBRARY.define(
    "sample_step(Tensor logits, Tensor slots, Tensor params, Tensor(a!) state, Tensor(b!) tables, "
    "Tensor(c!) output, Tensor(d!) scratch, int[] layout, str backend, *, "
    "Tensor? grammar_bitmask=None, Tensor? words=None, Tensor? given=None, "
    "Tensor? group_stats=None) -> ()"
)
_LIBRARY.define(
    "cuda_step(Tensor logits, Tensor slots, Tensor params, Tensor(a!) state, Tensor(b!) tables, "
    "Tensor(c!) output, Tensor(d!) scratch, int[] layout, Tensor? grammar_bitmask=None, "
    "Tensor? words=None, Tensor? given=None, Tensor? group_stats=None) -> ()"
)
_LIBRARY.define(
    "cuda_sharded_step(Tensor logits, Tensor slots, Tensor params, Tensor(a!) state, "
    "Tensor(b!) tables, Tensor(c!) output, Tensor(d!) scratch, Tensor(e!) exchange, int[] layout, "
    "int rank, int[] starts, int[] logits_addresses, int[] exchange_addresses, int limit_ns, "
    "int phases, Tensor? grammar_bitmask=None, Tensor? words=None, Tensor? given=None) -> ()"
)
_LIBRARY.define(
    "apply_records(Tensor records, Tensor slots, Tensor(a!) state, Tensor(b!) tables, "
    "int[] layout) -> ()"
)
_WISHES: Final = (
    "Tensor? rows=None, Tensor? num_rows=None, Tensor? given_ids=None, "
    "Tensor? temperature=None, Tensor? top_k=None, Tensor? top_p=None, Tensor? min_p=None, "
    "Tensor? processed=None, int top_n=0, bool rank=False, bool entropy=False, "
    "int vocab_size=-1, str backend='auto'"
)
_LIBRARY.define(
    f"prompt_logprobs(Tensor logits, Tensor next_token_ids, {_WISHES}) -> (Tensor logprobs, "
    "Tensor given_logprobs, Tensor top_logprobs, Tensor entropies, Tensor top_token_ids, "
    "Tensor ranks, Tensor num_kept, Tensor flags, Tensor normalisers)"
)
_LIBRARY.define(
    f"prompt_logprobs_out(Tensor logits, Tensor next_token_ids, Tensor(a!) output, {_WISHES}) -> ()"
)
_FORWARD: Final = (
    "Tensor ids, Tensor logprobs, Tensor gradients, Tensor? entropy_gradients, Tensor entropies, "
    "Tensor normalisers, Tensor? rows, Tensor? num_rows, Tensor? temperature, Tensor? processed, "
    "Tensor? num_kept, int vocab_size, str backend"
)
_LIBRARY.define(f"prompt_logprobs_backward(Tensor logits, {_FORWARD}) -> Tensor")
_LIBRARY.define(
    f"linear_logprobs(Tensor hidden, Tensor weight, Tensor next_token_ids, {_WISHES}, "
    "int chunk_rows=0, SymInt saved_rows=0) -> (Tensor logprobs, Tensor given_logprobs, "
    "Tensor top_logprobs, Tensor entropies, Tensor top_token_ids, Tensor ranks, Tensor num_kept, "
    "Tensor flags, Tensor normalisers, Tensor saved)"
)
_LIBRARY.define(
    f"linear_logprobs_backward(Tensor hidden, Tensor weight, Tensor saved, {_FORWARD}, "
    "int chunk_rows, bool of_hidden, bool of_weight) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "cuda_score_rows(Tensor logits, Tensor? rows, Tensor? num_rows, Tensor token_ids, "
    "Tensor given_ids, Tensor? temperature, Tensor? processed, Tensor(a!) output, "
    "Tensor(b!) scratch, int[] layout, bool rank, bool entropy) -> ()"
)
_LIBRARY.define("philox_words(Tensor seed, Tensor position, int stream=0) -> Tensor")
_LIBRARY.define(
    "scatter_segments(Tensor(a!) params, Tensor(b!) state, Tensor(c!) tables, Tensor packet, "
    "int num_segments, int num_words) -> ()"
)
_LIBRARY.define("signal_fd(int device, int stream, int event, int fd) -> ()")
_LIBRARY.define("capture_signal_fd(int stream, int fd) -> ()")


def _sample_step(
    logits: Tensor,
    slots: Tensor,
    params: Tensor,
    state: Tensor,
    tables: Tensor,
    output: Tensor,
    scratch: Tensor,
    layout: list[int],
    backend: str,
    *,
    grammar_bitmask: Tensor | None = None,
    words: Tensor | None = None,
    given: Tensor | None = None,
    group_stats: Tensor | None = None,
) -> None:
    sizes = TableLayout.from_ints(layout)
    rows, device = logits.shape[0], logits.device
    check_logits(logits, sizes.vocab_size)
    check_vector("slots", slots, rows, torch.int32, device)
    _check_words("params", params, (sizes.rows, sizes.params_words), device)
    _check_words("state", state, (sizes.rows, sizes.state_words), device)
    _check_words("tables", tables, (sizes.tables_words,), device)
    if not (
        output.dim() == 2
        and output.shape[0] >= rows
        and output.shape[1] == sizes.output_words
        and output.dtype == torch.int32
        and output.is_contiguous()
    ):
        raise ValueError(
            f"output is {output.dtype} {list(output.shape)}: it must be contiguous torch.int32 "
            f"[>= {rows}, {sizes.output_words}]"
        )
    check_device("output", output, device)
    if grammar_bitmask is not None:
        check_bitmask(grammar_bitmask, rows, sizes.bitmap_words)
        check_device("grammar_bitmask", grammar_bitmask, device)
    if words is not None:
        check_vector("words", words, rows, torch.int64, device)
    if given is not None:
        check_vector("given", given, 2 if group_stats is None else 3, torch.int32, device)
    module = backends.module(backends.resolve(backend, device))
    step = module.sample_step
    if group_stats is not None:
        backends.check_takes_group_stats(module)
        check_group_stats(group_stats, group_stats_shape(rows, sizes.vocab_size))
        check_device("group_stats", group_stats, device)
        step = partial(step, group_stats=group_stats)  # not an argument of every backend's
    needed = module.scratch_words(sizes, rows)
    if not (
        scratch.dim() == 1
        and scratch.dtype == torch.int32
        and scratch.numel() >= needed
        and scratch.is_contiguous()
        and (needed == 0 or scratch.data_ptr() % 16 == 0)
    ):
        raise ValueError(
            f"scratch is {scratch.dtype} {list(scratch.shape)}: it must be contiguous torch.int32 "
            f"[>= {needed}], aligned to 16 bytes"
        )
    check_device("scratch", scratch, device)
    if rows == 0:
        return
    with torch.no_grad():
        step(
            logits,
            slots,
            params,
            state,
            tables,
            output,
            scratch,
            sizes,
            grammar_bitmask=grammar_bitmask,
            words=words,
            given=given,
        )


def _check_words(name: str, tensor: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    if not (tensor.shape == shape and tensor.dtype == torch.int32 and tensor.is_contiguous()):
        raise ValueError(
            f"{name} is {tensor.dtype} {list(tensor.shape)}: it must be contiguous torch.int32 "
            f"{list(shape)}"
        )
    check_device(name, tensor, device)


def _apply_records(
    records: Tensor, slots: Tensor, state: Tensor, tables: Tensor, layout: list[int]
) -> None:
    """Advance the table by a step that another table of the same requests took: position, last and
    recent tokens, counts and finish reason then have the bits of the table that stepped.

    records: int32 [>= n, output_words], that step's; slots: int32 [n], its slots, -1 for rows to
    leave alone. Rows in which nothing was drawn, and those of another generation than the slot's,
    change nothing.
    """
    sizes = TableLayout.from_ints(layout)
    device = state.device
    check_vector("slots", slots, slots.numel(), torch.int32, device)
    _check_words("state", state, (sizes.rows, sizes.state_words), device)
    _check_words("tables", tables, (sizes.tables_words,), device)
    rows = max([slots.shape[0], *records.shape[:1]])
    _check_words("records", records, (rows, sizes.output_words), device)
    if slots.shape[0]:
        apply_records(records, slots, state, tables, sizes)


def _check_sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
    vocab_size: int,
    name_of_position: str = "position",
) -> int:
    """Check the arguments of `sample`; returns the vocabulary size."""
    size = check_vocab_size(logits, vocab_size)
    rows, device = logits.shape[0], logits.device
    for name, tensor, dtype in (
        ("temperature", temperature, torch.float32),
        ("top_k", top_k, torch.int32),
        ("top_p", top_p, torch.float32),
        ("min_p", min_p, torch.float32),
        ("seed", seed, torch.int64),
        (name_of_position, position, torch.int64),
    ):
        check_vector(name, tensor, rows, dtype, device)
    return size


def _sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
    vocab_size: int = -1,
) -> tuple[Tensor, Tensor]:
    backend = backends.resolve("auto", logits.device)
    size = _check_sample(logits, temperature, top_k, top_p, min_p, seed, position, vocab_size)
    layout = _stateless_layout(logits, size)
    words = backends.module(backend).scratch_words(layout, logits.shape[0])
    scratch = torch.zeros(words, dtype=torch.int32, device=logits.device)
    step = partial(_sample_step, backend=backend)
    return _stateless(
        logits, temperature, top_k, top_p, min_p, seed, position, layout, scratch, step
    )


def _flashinfer_sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    offset: Tensor,
    vocab_size: int = -1,
    filter_order: str = "top_k_first",
) -> tuple[Tensor, Tensor]:
    """`sample` with FlashInfer's draws, which keep all ties; the offsets advance by all that a draw
    may consume, so that a replay draws afresh."""
    size = _check_sample(
        logits, temperature, top_k, top_p, min_p, seed, offset, vocab_size, "offset"
    )
    options = {"ties": "keep", "filter_order": filter_order}
    name = backends.with_options("flashinfer", options)
    module = backends.module(backends.resolve(name, logits.device))

    def step(*arguments: Any) -> None:
        *tensors, layout = arguments
        module.sample_step(
            *tensors,
            TableLayout.from_ints(layout),
            grammar_bitmask=None,
            words=None,
            given=None,
            offset_step=1,
        )

    layout = _stateless_layout(logits, size)
    words = module.scratch_words(layout, logits.shape[0])
    scratch = torch.empty(words, dtype=torch.int32, device=logits.device)  # most of it written soon
    drawn = _stateless(
        logits, temperature, top_k, top_p, min_p, seed, offset, layout, scratch, step
    )
    offset.add_(flashinfer.OFFSET_STEP)
    return drawn


def _stateless_layout(logits: Tensor, vocab_size: int) -> TableLayout:
    """Of a table that has a slot a row, and no lists."""
    return TableLayout(vocab_size, logits.shape[0], 0, 0, 0, 0, 0, 0, 0)


def _stateless(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
    layout: TableLayout,
    scratch: Tensor,
    step: Callable[..., None],
) -> tuple[Tensor, Tensor]:
    """A step, `sample_step` up to its argument `layout`, of a table made for it."""
    rows, device, size = logits.shape[0], logits.device, layout.vocab_size

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    with torch.no_grad():
        filters = Filters(temperature, top_k, top_p, min_p).clamped(size)
        params = neutral_params(layout, device)
        state = zeros(layout.rows, layout.state_words)
        write_params(params, filters, ParamFlags.LOGPROBS | ParamFlags.RAW)
        params.view(torch.int64)[:rows, Param.SEED // 2] = seed
        state.view(torch.int64)[:rows, State.POSITION // 2] = position

        output = zeros(rows, layout.output_words)
        if rows:
            step(
                logits,
                torch.arange(rows, dtype=torch.int32, device=device),
                params,
                state,
                zeros(layout.tables_words),
                output,
                scratch,
                layout.to_ints(),
            )
        token_ids = output.view(torch.int64)[:, Output.TOKEN_ID // 2].clone()
        return token_ids, output.view(torch.float32)[:, Output.LOGPROB].clone()


@contextmanager
def _undisturbed(tensor: Tensor) -> Iterator[None]:
    """On the tensor's device, without gradients, and in the dtypes that are written here."""
    with (
        torch.no_grad(),
        torch.cuda.device_of(tensor),
        torch.autocast(tensor.device.type, enabled=False),
    ):
        yield


def _prompt_logprobs_out(
    logits: Tensor, next_token_ids: Tensor, output: Tensor, *wishes: Any, **named: Any
) -> None:
    checked = Wishes.check(logits, next_token_ids, *wishes, **named)
    count, words = next_token_ids.shape[0], checked.layout.output_words
    if not (
        output.dim() == 2
        and output.shape[0] >= count
        and output.shape[1] == words
        and output.dtype == torch.int32
        and output.is_contiguous()
    ):
        raise ValueError(
            f"output is {output.dtype} {list(output.shape)}: it must be contiguous torch.int32 "
            f"[>= {count}, {words}]"
        )
    check_device("output", output, logits.device)
    with _undisturbed(logits):
        positions.score_positions(
            logits, checked.positions, output[:count], checked.layout, checked.module,
            rank=checked.rank, entropy=checked.entropy,
        )  # fmt: skip


def _prompt_logprobs(
    logits: Tensor, next_token_ids: Tensor, *wishes: Any, **named: Any
) -> tuple[Tensor, ...]:
    checked = Wishes.check(logits, next_token_ids, *wishes, **named)
    layout = checked.layout
    output = torch.empty(
        next_token_ids.shape[0], layout.output_words, dtype=torch.int32, device=logits.device
    )
    with _undisturbed(logits):
        positions.score_positions(
            logits, checked.positions, output, layout, checked.module,
            rank=checked.rank, entropy=checked.entropy,
        )  # fmt: skip
    return tuple(part.clone() for part in positions.split_record(output, layout))


def _linear_logprobs(
    hidden: Tensor, weight: Tensor, next_token_ids: Tensor, *arguments: Any
) -> tuple[Tensor, ...]:
    *wishes, vocab_size, backend, chunk_rows, saved_rows = _all_wishes(arguments)
    size = check_linear(hidden, weight, vocab_size, chunk_rows, saved_rows)
    checked = Wishes.check_rows(hidden, size, backend, next_token_ids, *wishes)
    layout, count = checked.layout, next_token_ids.shape[0]
    output = torch.empty(count, layout.output_words, dtype=torch.int32, device=hidden.device)
    saved = hidden.new_empty(min(saved_rows, count), size)
    with _undisturbed(hidden):
        lm_head.score_hidden(
            hidden, weight[:size], checked.positions, output, saved, layout, checked.module,
            chunk_rows, rank=checked.rank, entropy=checked.entropy,
        )  # fmt: skip
    return (*(part.clone() for part in positions.split_record(output, layout)), saved)


def _all_wishes(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Wishes up to saved_rows; the dispatcher leaves out what has its default at the end."""
    defaults = (*[None] * 8, 0, False, False, -1, "auto", 0, 0)
    return (*given, *defaults[len(given) :])


def _empty_results(like: Tensor, layout: TableLayout, count: int) -> tuple[Tensor, ...]:
    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return like.new_empty((count, *shape), dtype=dtype)

    real, number = torch.float32, torch.int32
    return (
        empty(real),
        empty(real, layout.max_logprob_ids),
        empty(real, layout.max_logprobs),
        empty(real),
        empty(torch.int64, layout.max_logprobs),
        empty(number),
        empty(number),
        empty(number),
        empty(real, 2),
    )


def _prompt_logprobs_fake(
    logits: Tensor, next_token_ids: Tensor, *wishes: Any, **named: Any
) -> tuple[Tensor, ...]:
    layout = Wishes.check(logits, next_token_ids, *wishes, **named).layout
    return _empty_results(logits, layout, next_token_ids.shape[0])


def _linear_logprobs_fake(
    hidden: Tensor, weight: Tensor, next_token_ids: Tensor, *arguments: Any
) -> tuple[Tensor, ...]:
    *wishes, vocab_size, backend, chunk_rows, saved_rows = _all_wishes(arguments)
    size = check_linear(hidden, weight, vocab_size, chunk_rows, saved_rows)
    layout = Wishes.check_rows(hidden, size, backend, next_token_ids, *wishes).layout
    count = next_token_ids.shape[0]
    saved = hidden.new_empty(min(saved_rows, count), size)
    return (*_empty_results(hidden, layout, count), saved)


def _save_for_backward(
    ctx: Any,
    sources: tuple[Tensor, ...],
    next_token_ids: Tensor,
    wishes: tuple[Any, ...],
    vocab_size: int,
    output: Sequence[Tensor],
) -> None:
    rows, num_rows, given_ids, temperature, top_k, top_p, min_p, processed = wishes[:8]
    logprobs, given, top, entropies, top_ids, ranks, num_kept, flags, normalisers = output
    ctx.mark_non_differentiable(top_ids, ranks, num_kept, flags, normalisers, *sources[2:])
    ctx.set_materialize_grads(False)
    if given_ids is None:
        given_ids = next_token_ids.new_empty(next_token_ids.shape[0], 0)
    filtered = any(value is not None for value in (top_k, top_p, min_p))
    if temperature is None and (filtered or processed is not None):
        temperature = torch.ones_like(logprobs)
    ctx.vocab_size, ctx.backend, ctx.num_given = vocab_size, wishes[12], given_ids.shape[1]
    ctx.entropy = wishes[10]
    ctx.save_for_backward(
        *sources,
        torch.cat([next_token_ids.unsqueeze(1), given_ids, top_ids], 1),
        torch.cat([logprobs.unsqueeze(1), given, top], 1),
        entropies,
        normalisers,
        rows,
        num_rows,
        temperature,
        processed,
        num_kept if filtered else None,
    )


def _backward_arguments(ctx: Any, sources: int, gradients: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of the backward op: what was saved, and the gradients that came."""
    of_logprobs, of_given, of_top, of_entropies = gradients[:4]
    if not ctx.entropy:
        # What was not asked for is NaN, and 0 times NaN, which a compiled function passes, no 0.
        of_entropies = None
    saved = ctx.saved_tensors
    ids, logprobs, entropies, normalisers, *selection = saved[sources:]
    joined = join_gradients(of_logprobs, of_given, of_top, logprobs, ctx.num_given)
    return (
        *saved[:sources], ids, logprobs, joined, of_entropies, entropies, normalisers, *selection,
        ctx.vocab_size, ctx.backend,
    )  # fmt: skip


def _prompt_logprobs_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, next_token_ids, *wishes = inputs
    size = logits.shape[1] if wishes[11] == -1 else wishes[11]
    _save_for_backward(ctx, (logits,), next_token_ids, tuple(wishes), size, output)


def _prompt_logprobs_autograd(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    arguments = _backward_arguments(ctx, 1, gradients)
    gradient = torch.ops.graphed_sampling.prompt_logprobs_backward(*arguments)
    return (gradient, *[None] * 14)


def _linear_logprobs_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, next_token_ids, *wishes = inputs
    size = weight.shape[0] if wishes[11] == -1 else wishes[11]
    ctx.chunk_rows = wishes[13]
    *told, saved = output
    _save_for_backward(ctx, (hidden, weight, saved), next_token_ids, tuple(wishes), size, told)


def _linear_logprobs_autograd(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    arguments = _backward_arguments(ctx, 3, gradients)
    wanted = ctx.needs_input_grad[:2]
    found = torch.ops.graphed_sampling.linear_logprobs_backward(*arguments, ctx.chunk_rows, *wanted)
    kept = [g if wants else None for g, wants in zip(found, wanted, strict=True)]
    return (*kept, *[None] * 16)


def _of_backward(
    matrix: Tensor,
    vocab_size: int,
    ids: Tensor,
    logprobs: Tensor,
    gradients: Tensor,
    entropy_gradients: Tensor | None,
    entropies: Tensor,
    normalisers: Tensor,
    rows: Tensor | None,
    num_rows: Tensor | None,
    temperature: Tensor | None,
    processed: Tensor | None,
    num_kept: Tensor | None,
) -> tuple[Positions, Upstream, Forward]:
    """What the backward ops work on, of their arguments."""
    filters = None if temperature is None else AskedFilters(temperature)
    return (
        Positions(
            Selection(matrix.shape[0], rows, num_rows),
            ids[:, 0],
            ids[:, 1:],
            vocab_size,
            filters,
            processed,
        ),
        Upstream.of(accepted_ids(ids, vocab_size), logprobs, gradients, entropy_gradients),
        Forward(normalisers, entropies, num_kept),
    )


def _prompt_logprobs_backward(logits: Tensor, *arguments: Any) -> Tensor:
    *saved, vocab_size, backend = arguments
    with _undisturbed(logits):
        asked = _of_backward(logits, vocab_size, *saved)
        module = positions.scoring_module(backend, logits.device)
        return positions.logit_gradients(logits, *asked, vocab_size, module)


def _linear_logprobs_backward(
    hidden: Tensor, weight: Tensor, saved: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor]:
    *told, vocab_size, backend, chunk_rows, of_hidden, of_weight = arguments
    rows = told[6]
    with _undisturbed(hidden):
        asked = _of_backward(hidden, vocab_size, *told)
        module = positions.scoring_module(backend, hidden.device)
        return lm_head.hidden_gradients(
            hidden, weight, saved, *asked, vocab_size, module, chunk_rows,
            of_hidden=of_hidden, of_weight=of_weight, selected=rows is not None,
        )  # fmt: skip


def _no_second_derivative(_ctx: Any, *_gradients: Tensor) -> NoReturn:
    raise RuntimeError("logprobs have a gradient, but no second derivative")


def _prompt_logprobs_backward_fake(logits: Tensor, *_arguments: Any) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _linear_logprobs_backward_fake(
    hidden: Tensor, weight: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor]:
    of_hidden, of_weight = arguments[-2:]
    contiguous = torch.contiguous_format
    return (
        torch.empty_like(hidden, memory_format=contiguous) if of_hidden else hidden.new_empty(0),
        torch.empty_like(weight, memory_format=contiguous) if of_weight else hidden.new_empty(0),
    )


def _scatter_segments(
    params: Tensor, state: Tensor, tables: Tensor, packet: Tensor, num_segments: int, num_words: int
) -> None:
    """The scatter in torch operations: every word's destination, by its segment."""
    if num_segments == 0:
        return
    end = num_segments * DESCRIPTOR_WORDS
    descriptors = packet[:end].view(num_segments, DESCRIPTOR_WORDS)
    payload = packet[end : end + num_words]
    start = (descriptors[:, 0] >> 2).long()
    offset = packet[:end].view(torch.int64).view(num_segments, DESCRIPTOR_WORDS // 2)[:, 1]
    segment = torch.repeat_interleave(descriptors[:, 1].long(), output_size=num_words)
    word = torch.arange(num_words, device=packet.device)
    destination = (offset - start)[segment] + word
    target = (descriptors[:, 0] & 3)[segment]
    for number, tensor in ((Target.PARAMS, params), (Target.STATE, state), (Target.TABLES, tables)):
        # Words of other targets go to the last word, which belongs to the padding row.
        flat = tensor.view(-1)
        flat.index_copy_(0, torch.where(target == number, destination, flat.numel() - 1), payload)


def _no_result(*args: object, **named: object) -> None:
    """Of ops that write in place. One tensor on meta among others leads here too, where nothing
    would be done and nobody told."""
    tensors = [value for value in (*args, *named.values()) if isinstance(value, Tensor)]
    devices = sorted({str(tensor.device) for tensor in tensors})
    if len(devices) > 1:
        raise ValueError(f"tensors are on {' and '.join(devices)}: they must be on one device")


def _check_philox_words(seed: Tensor, position: Tensor) -> None:
    check_vector("seed", seed, seed.numel(), torch.int64)
    check_vector("position", position, seed.numel(), torch.int64, seed.device)


def _philox_words(seed: Tensor, position: Tensor, stream: int = 0) -> Tensor:
    _check_philox_words(seed, position)
    return philox.words(seed, position, stream)


def _sample_fake(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
    vocab_size: int = -1,
) -> tuple[Tensor, Tensor]:
    _check_sample(logits, temperature, top_k, top_p, min_p, seed, position, vocab_size)
    rows = logits.shape[0]
    return logits.new_empty(rows, dtype=torch.int64), logits.new_empty(rows, dtype=torch.float32)


def _flashinfer_sample_fake(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    offset: Tensor,
    vocab_size: int = -1,
    filter_order: str = "top_k_first",
) -> tuple[Tensor, Tensor]:
    backends.with_options("flashinfer", {"filter_order": filter_order})
    return _sample_fake(logits, temperature, top_k, top_p, min_p, seed, offset, vocab_size)


def _philox_words_fake(seed: Tensor, position: Tensor, stream: int = 0) -> Tensor:
    _check_philox_words(seed, position)
    return torch.empty_like(seed)


def _sample_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    # The raw logprobs of drawn tokens have a gradient, but this op does not compute it: training
    # must not take it for zero.
    ctx.mark_non_differentiable(*output)


def _sample_backward(ctx: Any, *_gradients: Tensor) -> tuple[None, ...]:
    return (None,) * 8


# Plain torch operations serve every device; native implementations are registered for one device
# and take precedence there.
_LIBRARY.impl("sample", _sample, "CompositeExplicitAutograd")
_LIBRARY.impl("flashinfer_sample", _flashinfer_sample, "CompositeExplicitAutograd")
_LIBRARY.impl("sample_step", _sample_step, "CompositeExplicitAutograd")
_LIBRARY.impl("apply_records", _apply_records, "CompositeExplicitAutograd")
_LIBRARY.impl("prompt_logprobs", _prompt_logprobs, "CompositeExplicitAutograd")
_LIBRARY.impl("prompt_logprobs_out", _prompt_logprobs_out, "CompositeExplicitAutograd")
_LIBRARY.impl("prompt_logprobs_backward", _prompt_logprobs_backward, "CompositeExplicitAutograd")
_LIBRARY.impl("linear_logprobs", _linear_logprobs, "CompositeExplicitAutograd")
_LIBRARY.impl("linear_logprobs_backward", _linear_logprobs_backward, "CompositeExplicitAutograd")
_LIBRARY.impl("philox_words", _philox_words, "CompositeExplicitAutograd")
_LIBRARY.impl("scatter_segments", _scatter_segments, "CompositeExplicitAutograd")
torch.library.register_fake("graphed_sampling::sample", _sample_fake, lib=_LIBRARY)
torch.library.register_fake(
    "graphed_sampling::flashinfer_sample", _flashinfer_sample_fake, lib=_LIBRARY
)
torch.library.register_fake("graphed_sampling::sample_step", _no_result, lib=_LIBRARY)
torch.library.register_fake("graphed_sampling::cuda_step", _no_result, lib=_LIBRARY)
torch.library.register_fake("graphed_sampling::cuda_sharded_step", _no_result, lib=_LIBRARY)
torch.library.register_fake("graphed_sampling::apply_records", _no_result, lib=_LIBRARY)
torch.library.register_fake(
    "graphed_sampling::prompt_logprobs", _prompt_logprobs_fake, lib=_LIBRARY
)
torch.library.register_fake("graphed_sampling::prompt_logprobs_out", _no_result, lib=_LIBRARY)
torch.library.register_fake(
    "graphed_sampling::prompt_logprobs_backward", _prompt_logprobs_backward_fake, lib=_LIBRARY
)
torch.library.register_fake(
    "graphed_sampling::linear_logprobs", _linear_logprobs_fake, lib=_LIBRARY
)
torch.library.register_fake(
    "graphed_sampling::linear_logprobs_backward", _linear_logprobs_backward_fake, lib=_LIBRARY
)
torch.library.register_fake("graphed_sampling::cuda_score_rows", _no_result, lib=_LIBRARY)
torch.library.register_fake("graphed_sampling::philox_words", _philox_words_fake, lib=_LIBRARY)
torch.library.register_fake("graphed_sampling::scatter_segments", _no_result, lib=_LIBRARY)
torch.library.register_autograd(
    "graphed_sampling::sample", _sample_backward, setup_context=_sample_context, lib=_LIBRARY
)
torch.library.register_autograd(
    "graphed_sampling::prompt_logprobs",
    _prompt_logprobs_autograd,
    setup_context=_prompt_logprobs_context,
    lib=_LIBRARY,
)
torch.library.register_autograd(
    "graphed_sampling::linear_logprobs",
    _linear_logprobs_autograd,
    setup_context=_linear_logprobs_context,
    lib=_LIBRARY,
)
for _op in ("prompt_logprobs_backward", "linear_logprobs_backward"):
    torch.library.register_autograd(f"graphed_sampling::{_op}", _no_second_derivative, lib=_LIBRARY)
load_native()
