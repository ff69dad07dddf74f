"""The torch ops: schemas, fakes and their Python implementations. The only file with torch.library.

    torch.ops.graphed_sampling.sample            stateless: one parameter row per logits row
    torch.ops.graphed_sampling.flashinfer_sample the same with FlashInfer's draws
    torch.ops.graphed_sampling.sample_step       one step of a `RequestTable`, in place
    torch.ops.graphed_sampling.cuda_step         the same by the `cuda` backend, little checked
    torch.ops.graphed_sampling.philox_words      the random words of many draws
    torch.ops.graphed_sampling.scatter_segments  the packed scatter of dirty rows

Native implementations, where they were built, replace the Python ones of their device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from graphed_sampling import backends, philox
from graphed_sampling._build_info import load_native
from graphed_sampling.backends import flashinfer
from graphed_sampling.layout import (
    MAX_VOCAB_SIZE,
    Output,
    Param,
    ParamFlags,
    State,
    TableLayout,
)
from graphed_sampling.staging import DESCRIPTOR_WORDS, Target
from graphed_sampling.stateless import Filters, write_params

LOGITS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

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
    "Tensor? grammar_bitmask=None, Tensor? words=None, Tensor? given=None) -> ()"
)
_LIBRARY.define(
    "cuda_step(Tensor logits, Tensor slots, Tensor params, Tensor(a!) state, Tensor(b!) tables, "
    "Tensor(c!) output, Tensor(d!) scratch, int[] layout, Tensor? grammar_bitmask=None, "
    "Tensor? words=None, Tensor? given=None) -> ()"
)
_LIBRARY.define("philox_words(Tensor seed, Tensor position, int stream=0) -> Tensor")
_LIBRARY.define(
    "scatter_segments(Tensor(a!) params, Tensor(b!) state, Tensor(c!) tables, Tensor packet, "
    "int num_segments, int num_words) -> ()"
)


def _last_dimension_is_contiguous(matrix: Tensor) -> bool:
    # Strides of dimensions with at most one element mean nothing.
    return matrix.stride(1) == 1 or matrix.shape[1] == 1 or matrix.shape[0] == 0


def check_logits(logits: Tensor, vocab_size: int) -> None:
    """ValueError unless logits are [n, >= vocab_size], of a known dtype, last stride 1."""
    _check_tensor("logits", logits)
    if not (logits.dim() == 2 and logits.shape[1] >= vocab_size):
        raise ValueError(
            f"logits have shape {tuple(logits.shape)}: they must be [n, >= {vocab_size}]"
        )
    if logits.dtype not in LOGITS_DTYPES:
        raise ValueError(
            f"logits have dtype {logits.dtype}: it must be one of "
            f"{', '.join(str(d) for d in LOGITS_DTYPES)}"
        )
    if not _last_dimension_is_contiguous(logits):
        raise ValueError(
            f"logits have strides {logits.stride()}: the last dimension must be contiguous"
        )


def check_vector(
    name: str, tensor: Tensor, rows: int, dtype: torch.dtype, device: torch.device | None = None
) -> None:
    """ValueError unless tensor is [rows] of the dtype, on the device where one is named."""
    _check_tensor(name, tensor)
    if not (tensor.shape == (rows,) and tensor.dtype == dtype):
        raise ValueError(
            f"{name} is {tensor.dtype} {list(tensor.shape)}: it must be {dtype} [{rows}]"
        )
    if device is not None:
        _check_device(name, tensor, device)


def check_bitmask(bitmask: Tensor, rows: int, bitmap_words: int) -> None:
    """ValueError unless bitmask is int32 [rows, >= bitmap_words], last stride 1."""
    _check_tensor("grammar_bitmask", bitmask)
    if not (
        bitmask.dim() == 2
        and bitmask.shape[0] == rows
        and bitmask.shape[1] >= bitmap_words
        and bitmask.dtype == torch.int32
        and _last_dimension_is_contiguous(bitmask)
    ):
        raise ValueError(
            f"grammar_bitmask is {bitmask.dtype} {list(bitmask.shape)}: it must be torch.int32 "
            f"[{rows}, >= {bitmap_words}] with a contiguous last dimension"
        )


def _check_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} is {type(value).__name__}: it must be a torch.Tensor")


def _check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}: it must be on {device}")


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
) -> None:
    sizes = TableLayout.from_ints(layout)
    rows, device = logits.shape[0], logits.device
    check_logits(logits, sizes.vocab_size)
    check_vector("slots", slots, rows, torch.int32, device)
    for name, tensor, shape in (
        ("params", params, (sizes.rows, sizes.params_words)),
        ("state", state, (sizes.rows, sizes.state_words)),
        ("tables", tables, (sizes.tables_words,)),
    ):
        if not (tensor.shape == shape and tensor.dtype == torch.int32 and tensor.is_contiguous()):
            raise ValueError(
                f"{name} is {tensor.dtype} {list(tensor.shape)}: it must be contiguous torch.int32 "
                f"{list(shape)}"
            )
        _check_device(name, tensor, device)
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
    _check_device("output", output, device)
    if grammar_bitmask is not None:
        check_bitmask(grammar_bitmask, rows, sizes.bitmap_words)
        _check_device("grammar_bitmask", grammar_bitmask, device)
    if words is not None:
        check_vector("words", words, rows, torch.int64, device)
    if given is not None:
        check_vector("given", given, 2, torch.int32, device)
    module = backends.module(backends.resolve(backend, device))
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
    _check_device("scratch", scratch, device)
    if rows == 0:
        return
    with torch.no_grad():
        module.sample_step(
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
    if logits.dim() != 2:
        raise ValueError(f"logits have shape {tuple(logits.shape)}: they must be [n, V]")
    width = logits.shape[1]
    size = width if vocab_size == -1 else vocab_size
    if not (1 <= size <= min(width, MAX_VOCAB_SIZE)):
        raise ValueError(
            f"vocab_size = {vocab_size} is not accepted: it must be -1 (all columns of the logits) "
            f"or in [1, {min(width, MAX_VOCAB_SIZE)}]"
        )
    check_logits(logits, size)
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
        params, state = (
            zeros(layout.rows, layout.params_words),
            zeros(layout.rows, layout.state_words),
        )
        flags = zeros(rows) + int(ParamFlags.LOGPROBS | ParamFlags.RAW)
        write_params(params, layout, filters, flags)
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


def _no_result(*_args: object, **_kwargs: object) -> None:
    return None


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
_LIBRARY.impl("philox_words", philox.words, "CompositeExplicitAutograd")
_LIBRARY.impl("scatter_segments", _scatter_segments, "CompositeExplicitAutograd")
torch.library.register_fake("graphed_sampling::sample", _sample_fake, lib=_LIBRARY)
torch.library.register_fake(
    "graphed_sampling::flashinfer_sample", _flashinfer_sample_fake, lib=_LIBRARY
)
torch.library.register_fake("graphed_sampling::sample_step", _no_result, lib=_LIBRARY)
torch.library.register_fake("graphed_sampling::cuda_step", _no_result, lib=_LIBRARY)
torch.library.register_fake("graphed_sampling::philox_words", _philox_words_fake, lib=_LIBRARY)
torch.library.register_fake("graphed_sampling::scatter_segments", _no_result, lib=_LIBRARY)
torch.library.register_autograd(
    "graphed_sampling::sample", _sample_backward, setup_context=_sample_context, lib=_LIBRARY
)
load_native()
