"""The `flashinfer` backend: FlashInfer draws, between kernels of our own.

One step is, in order and all of it in a CUDA graph if there is one:

    stream, finish, dense   of the `triton` backend: masks, penalties, bias; which tokens a row's
                            filters keep; seeds and offsets of the draws
    group_probabilities     ours: of each 64 consecutive tokens, of those that are kept
    sampling_from_probs     FlashInfer's: draws a group
    token_probabilities     ours: of the group's tokens
    sampling_from_probs     FlashInfer's: draws one of them
    conclude                ours: logprobs, ranks, stop detection, state, the packed record

A group by its probability, then a token by its own among the group's: that is the law of one draw
from all tokens, whose probabilities would have to be written and read for it.

With route="slab" the draw is the `triton` backend's, from the tokens that FlashInfer's cake module
found to be the best, for rows with top_k below 1024:

    ask                     how many tokens of each row are looked for
    softmax, radix_topk     FlashInfer's
    stream, finish, dense   of the `triton` backend, which take the tokens from there if the one
                            that comes next stands apart, and else find them themselves

In the direct route, FlashInfer's numbers come from the request's seed, the row, and an offset that
the request's position makes: a replay draws afresh because the position, on the device, has
advanced.

Its functions are called as its modules export them, with outputs that lie in the step's scratch:
a step allocates nothing, and takes nothing from caches that processes share.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, Final, Protocol

import torch
from torch import Tensor

from graphed_sampling.backends import triton
from graphed_sampling.layout import TableLayout
from graphed_sampling.params import UnsupportedFeatureError

VERSION: Final = "0.7.4"
"""Of flashinfer-python: earlier ones read one seed for all rows, or share scratch between streams,
and the functions that are called here are not its public interface."""
OFFSET_STEP: Final = 4
"""Random numbers of a row and step: cuRAND makes four at a time, of which the two draws take one
each."""
CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "route": ("direct", "slab"),
    "filter_order": ("top_k_first", "joint"),
    "ties": ("exact", "keep"),
}
"""Options and their values, the default first."""
_OR_SLAB: Final = 'route="slab" does what the contract says'


class Functions(Protocol):
    """What is called of FlashInfer's module `sampling`."""

    def softmax(
        self,
        workspace: Tensor,
        logits: Tensor,
        probabilities: Tensor,
        temperature: Tensor | None,
        temperature_value: float,
        enable_pdl: bool,
        /,
    ) -> None: ...

    def sampling_from_probs(
        self,
        probabilities: Tensor,
        samples: Tensor,
        valid: Tensor,
        indices: Tensor | None,
        deterministic: bool,
        seed: Tensor | None,
        seed_value: int,
        offset: Tensor | None,
        offset_value: int,
        /,
    ) -> None: ...


class SlabFunctions(Protocol):
    """What is called of FlashInfer's Python module `cake_sampling`."""

    def top_k_probs_to_slab(
        self,
        probabilities: Tensor,
        top_k: Tensor,
        /,
        *,
        top_k_max: int,
        out_vals: Tensor,
        out_idx: Tensor,
        out_count: Tensor,
    ) -> object: ...


STAND_IN: Any = None
"""For tests on the CPU: what computes the same there, of `Functions` and of `SlabFunctions`."""


def load() -> Functions:
    """FlashInfer's functions; where its binaries are not there it compiles them, for minutes.

    Samplers call it when they are made. Steps never compile: a process that calls the ops by
    themselves, where FlashInfer was installed without binaries, calls this before.
    """
    functions: Functions = _spec().build_and_load()
    _loaded.append(functions)
    return functions


_loaded: Final[list[Functions]] = []


@functools.cache
def _spec() -> Any:
    return importlib.import_module("flashinfer.jit.sampling").gen_sampling_module()


def _functions(device: torch.device) -> Functions:
    """FlashInfer's functions, for a step."""
    if device.type == "cpu":
        stand_in: Functions = STAND_IN  # without it the backend is unusable there
        return stand_in
    if not _loaded:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "FlashInfer is not loaded: run the step once before it is captured, or call "
                "graphed_sampling.backends.flashinfer.load()"
            )
        if not _spec().is_aot:
            raise RuntimeError(
                "FlashInfer has no binaries here, and no step compiles: call "
                "graphed_sampling.backends.flashinfer.load() before, or make a sampler"
            )
        load()
    return _loaded[0]


@functools.cache
def _slab_functions() -> SlabFunctions:
    """FlashInfer's cake module, whose binary must be there: it takes ten minutes to compile."""
    functions: SlabFunctions = importlib.import_module("flashinfer.cake_sampling")
    importlib.import_module("flashinfer.jit.cake_sampling").load_cake_sampling_module()
    return functions


@functools.cache
def _missing_for_slab() -> str:
    """Why the route by slab cannot be taken; empty where it can."""
    try:
        spec = importlib.import_module("flashinfer.jit.cake_sampling").gen_cake_sampling_module()
    except Exception as error:
        return " ".join(f"flashinfer: {type(error).__name__}: {error}".split())
    return "" if spec.is_aot else "FlashInfer's module cake_sampling has not been built before"


def _missing() -> str:
    """Why FlashInfer cannot be used on a GPU; empty where it can."""
    if importlib.util.find_spec("flashinfer") is None:
        return f"flashinfer is not installed: it needs flashinfer-python=={VERSION}"
    try:
        version = importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        version = "of an unknown version"
    if version != VERSION:
        return f"flashinfer-python is {version}: it needs {VERSION}, exactly"
    return ""


@dataclass(frozen=True)
class _Buffers:
    """What a step of so many rows keeps behind the scratch of the `triton` backend.

    seeds, group_offsets, token_offsets: int64 [rows]. groups, tokens: int32 [rows], drawn: a group,
    and a token's place in it. valid: bool [rows]. group_probabilities, token_probabilities: fp32
    [rows, group_count], [rows, GROUP].
    """

    seeds: Tensor
    group_offsets: Tensor
    token_offsets: Tensor
    groups: Tensor
    tokens: Tensor
    valid: Tensor
    group_probabilities: Tensor
    token_probabilities: Tensor

    @classmethod
    def of(cls, scratch: Tensor, layout: TableLayout, rows: int) -> _Buffers:
        start = _start(layout, rows)
        words = scratch[start : start + 9 * rows].view(9, rows)
        long = scratch[start : start + 6 * rows].view(torch.int64).view(3, rows)
        first = start + rows * (9 + triton.DECISION_WORDS)
        first += -first % 4
        groups = triton.group_count(layout)
        each = groups + triton.GROUP
        both = scratch[first : first + rows * each].view(torch.float32)
        of_groups, of_tokens = both.split([rows * groups, rows * triton.GROUP])
        return cls(
            seeds=long[0],
            group_offsets=long[1],
            token_offsets=long[2],
            groups=words[6],
            tokens=words[7],
            valid=words[8].view(torch.bool)[:rows],
            group_probabilities=of_groups.view(rows, groups),
            token_probabilities=of_tokens.view(rows, triton.GROUP),
        )


@dataclass(frozen=True)
class _SlabBuffers:
    """The same for the route by slab.

    sizes, counts: int32 [rows], asked for and found. values, ids: fp32, int32 [rows, SLAB_SIZE].
    probabilities, logits: fp32 [rows, vocab_size].
    """

    sizes: Tensor
    counts: Tensor
    values: Tensor
    ids: Tensor
    probabilities: Tensor
    logits: Tensor

    @classmethod
    def of(cls, scratch: Tensor, layout: TableLayout, rows: int) -> _SlabBuffers:
        start, vocab_size = _start(layout, rows), layout.vocab_size
        sizes = scratch[start : start + 2 * rows].view(2, rows)
        slab = start + 2 * rows
        slab += -slab % 4
        after = slab + 2 * rows * triton.SLAB_SIZE
        found = scratch[slab:after].view(2, rows, triton.SLAB_SIZE)
        wide = scratch[after : after + 2 * rows * vocab_size].view(torch.float32)
        wide = wide.view(2, rows, vocab_size)
        return cls(sizes[0], sizes[1], found[0].view(torch.float32), found[1], wide[0], wide[1])


def _start(layout: TableLayout, rows: int) -> int:
    """Where the draw's inputs begin in scratch, a multiple of 4 words."""
    words = triton.scratch_words(layout, rows)
    return words + -words % 4


@dataclass(frozen=True)
class FlashInfer:
    """The backend with its options: the same names as a backend's module.

    route: "direct" and "slab" as described above; "slab" keeps to the contract in everything, and
    takes no other option. filter_order: "top_k_first", as the contract has it,
    renormalises what top_k keeps before top_p; under "joint", FlashInfer's own law, min_p, top_k
    and top_p each look at the whole row. ties: "exact", as the contract has it, keeps of equals
    those with the lowest ids; under "keep", as FlashInfer has it, all tokens stay that equal the
    last one that top_k or top_p keeps.
    """

    route: str = "direct"
    filter_order: str = "top_k_first"
    ties: str = "exact"

    def __post_init__(self) -> None:
        for name, values in CHOICES.items():
            if getattr(self, name) not in values:
                accepted = " or ".join(map(repr, values))
                raise ValueError(
                    f"{name} = {getattr(self, name)!r} is not accepted: it must be {accepted}"
                )
        if self.route == "slab" and (self.filter_order, self.ties) != ("top_k_first", "exact"):
            raise ValueError(
                "route = 'slab' keeps to the contract: filter_order and ties do not go with it"
            )

    @cached_property
    def NAME(self) -> str:
        chosen = [
            f"{field.name}={getattr(self, field.name)}"
            for field in fields(self)
            if getattr(self, field.name) != field.default
        ]
        return ":".join(["flashinfer", *([",".join(chosen)] if chosen else [])])

    CHOSEN_FOR: ClassVar[str] = "nobody: who wants FlashInfer's draws asks for them"

    @cached_property
    def REFUSES(self) -> frozenset[str]:
        return frozenset() if self.route == "slab" else frozenset({"seed", "words"})

    REMEDIES: ClassVar[Mapping[str, str]] = {
        "seed": f"FlashInfer's numbers depend on the row that a request is in: {_OR_SLAB}",
        "words": f"FlashInfer draws with its own numbers: {_OR_SLAB}",
    }

    @property
    def _law(self) -> int:
        if self.route == "slab":
            return triton.SLAB
        keep = triton.KEEP_TIES if self.ties == "keep" else 0
        return triton.DECIDE | keep | (triton.JOINT if self.filter_order == "joint" else 0)

    def unusable(self, device: torch.device) -> str:
        """Why the backend cannot run on `device`; empty where it can."""
        if device.type == "cpu":
            if STAND_IN is None:
                return "FlashInfer runs on CUDA GPUs"
        elif device.type != "cuda":
            return "FlashInfer runs on CUDA GPUs"
        elif reason := _missing() or (_missing_for_slab() if self.route == "slab" else ""):
            return reason
        return triton.unusable(device)

    def canonical_order(self, vocab_size: int) -> Tensor:
        """int64 [vocab_size]: ids ascending."""
        return triton.canonical_order(vocab_size)

    def scratch_words(self, layout: TableLayout, rows: int) -> int:
        """int32 words of scratch that a step of `rows` rows needs, its probabilities among them.

        ValueError for so many that FlashInfer, which counts their elements in 32 bits, would read
        elsewhere.
        """
        slab = self.route == "slab"
        width = layout.vocab_size if slab else triton.group_count(layout)
        if rows * width >= 2**32:
            raise ValueError(
                f"{rows} rows of {layout.vocab_size} tokens are too many for FlashInfer: it counts "
                f"up to 2**32 {'tokens' if slab else f'groups of {triton.GROUP}'} in a step"
            )
        own = 9 + triton.DECISION_WORDS + width + triton.GROUP
        if slab:
            own = 2 + 2 * triton.SLAB_SIZE + 2 * width
        return _start(layout, rows) + rows * own + 4

    def warm_up(
        self, layout: TableLayout, device: torch.device, logits_dtypes: Sequence[torch.dtype]
    ) -> None:
        """Load FlashInfer, compiling it where it has no binaries, and compile our kernels."""
        if device.type != "cuda":
            return
        if not _loaded:
            load()
        if self.route == "slab":
            _slab_functions()
        draw = triton.Draw(self._law, OFFSET_STEP, torch.float32, torch.float32)
        triton.compile_kernels(layout, device, logits_dtypes, draw)

    def sample_step(
        self,
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
        offset_step: int = OFFSET_STEP,
    ) -> None:
        """One step in place; arguments as the op `sample_step`, checked there.

        offset_step: by how much FlashInfer's offset grows with a request's position.
        """
        if words is not None and "words" in self.REFUSES:
            raise UnsupportedFeatureError(
                f"the backend {self.NAME!r} does not support words; {self.REMEDIES['words']}"
            )
        rows, device = slots.shape[0], logits.device
        functions = _functions(device)
        arguments = triton.step_arguments(
            logits,
            slots,
            params,
            state,
            tables,
            output,
            scratch,
            layout,
            grammar_bitmask=grammar_bitmask,
            words=words,
            given=given,
        )
        if self.route == "slab":
            self._step_by_slab(arguments, functions, logits, scratch, layout)
            return
        buffers = _Buffers.of(scratch, layout, rows)
        draw = triton.Draw(
            self._law, offset_step, buffers.group_probabilities, buffers.token_probabilities
        )
        *before, between, after = triton.launches(arguments, layout, rows, device, draw)
        with triton.interpreter_lock():
            for launch in before:
                launch()
            _sample(
                functions,
                buffers,
                buffers.group_probabilities,
                buffers.group_offsets,
                out=buffers.groups,
            )
            between()
            _sample(
                functions,
                buffers,
                buffers.token_probabilities,
                buffers.token_offsets,
                out=buffers.tokens,
            )
            after()

    def _step_by_slab(
        self,
        arguments: Any,
        functions: Functions,
        logits: Tensor,
        scratch: Tensor,
        layout: TableLayout,
    ) -> None:
        rows, device, vocab_size = logits.shape[0], logits.device, layout.vocab_size
        # Of one or two tokens a slab has nothing to tell.
        draw = triton.Draw(triton.SLAB) if vocab_size > 2 else None
        launches = list(triton.launches(arguments, layout, rows, device, draw))
        with triton.interpreter_lock():
            if draw is not None:
                launches.pop(0)()
                buffers = _SlabBuffers.of(scratch, layout, rows)
                # FlashInfer's softmax takes fp32 rows of the vocabulary, one behind the other.
                as_given = (
                    logits.dtype == torch.float32
                    and logits.shape[1] == vocab_size
                    and logits.is_contiguous()
                    and logits.data_ptr() % 16 == 0
                )
                if not as_given:
                    logits = buffers.logits.copy_(logits[:, :vocab_size])
                # The best are the best at any temperature, and 1 keeps them apart.
                functions.softmax(
                    buffers.sizes, logits, buffers.probabilities, None, 1.0, triton.has_pdl(device)
                )
                slab: SlabFunctions = STAND_IN if device.type == "cpu" else _slab_functions()
                slab.top_k_probs_to_slab(
                    buffers.probabilities,
                    buffers.sizes,
                    top_k_max=min(triton.SLAB_SIZE, vocab_size - 1),
                    out_vals=buffers.values,
                    out_idx=buffers.ids,
                    out_count=buffers.counts,
                )
            for launch in launches:
                launch()


def _sample(
    functions: Functions, buffers: _Buffers, probabilities: Tensor, offsets: Tensor, *, out: Tensor
) -> None:
    """FlashInfer's draw from rows of probabilities, each with its own seed and offset."""
    functions.sampling_from_probs(
        probabilities, out, buffers.valid, None, True, buffers.seeds, 0, offsets, 0
    )


def configured(options: Mapping[str, str]) -> FlashInfer:
    """The backend with these options; ValueError for one that it does not have."""
    for name in options:
        if name not in CHOICES:
            raise ValueError(
                f"the backend 'flashinfer' has no option {name!r}; it has {', '.join(CHOICES)}"
            )
    return FlashInfer(**options)


_DEFAULT: Final = FlashInfer()
NAME: Final = _DEFAULT.NAME
CHOSEN_FOR: Final = _DEFAULT.CHOSEN_FOR
REFUSES: Final = _DEFAULT.REFUSES
REMEDIES: Final = _DEFAULT.REMEDIES
unusable = _DEFAULT.unusable
canonical_order = _DEFAULT.canonical_order
scratch_words = _DEFAULT.scratch_words
warm_up = _DEFAULT.warm_up
sample_step = _DEFAULT.sample_step
