"""What the samplers are measured against: one read of the logits, and other samplers.

Every rival is used as an engine would use it inside a CUDA graph: per-request parameters in
tensors, a seed per row, and fresh draws at each replay where the rival can. Nothing is compiled by
FlashInfer here: a variant whose module was not built beforehand is absent, with the reason.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # torch's CPU wheels come without it
    triton = None

os.environ.setdefault("FLASHINFER_DISABLE_JIT", "1")  # read when a module is asked for

Sampler: TypeAlias = Callable[[Tensor], Tensor]
"""Logits (or, where said, probabilities) [n, V] to token ids [n]."""
Logprob: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Logits [n, V] and token ids [n] to raw logprobs fp32 [n]."""


class CheckFailedError(AssertionError):
    """A contender computed something else than it should: its time means nothing."""


# One read.

if triton is not None:

    @triton.jit
    def _read_kernel(x, out, size, BLOCK: tl.constexpr):
        """One maximum per BLOCK contiguous elements."""
        block = tl.program_id(0)
        offsets = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(x + offsets, mask=offsets < size, other=float("-inf"))
        tl.store(out + block, tl.max(values.to(tl.float32), 0))

    @triton.jit
    def _partial_sums_kernel(x, stride, maxima, sums, vocab, BLOCK: tl.constexpr):
        """Maximum and sum of exponentials of BLOCK elements of a row."""
        part = tl.program_id(0)
        row = tl.program_id(1).to(tl.int64)
        ids = part * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(x + row * stride + ids, mask=ids < vocab, other=float("-inf"))
        values = values.to(tl.float32)
        largest = tl.max(values, 0)
        place = row * tl.num_programs(0) + part
        tl.store(maxima + place, largest)
        tl.store(sums + place, tl.sum(tl.exp(values - largest), 0))

    @triton.jit
    def _gather_logprob_kernel(
        x, stride, tokens, maxima, sums, logprobs, parts, PARTS: tl.constexpr
    ):
        """The logprob of each row's token, from its partial sums."""
        row = tl.program_id(0).to(tl.int64)
        part = tl.arange(0, PARTS)
        largest = tl.load(maxima + row * parts + part, mask=part < parts, other=float("-inf"))
        total = tl.load(sums + row * parts + part, mask=part < parts, other=0.0)
        maximum = tl.max(largest, 0)
        normaliser = maximum + tl.log(tl.sum(total * tl.exp(largest - maximum), 0))
        token = tl.load(tokens + row).to(tl.int64)
        value = tl.load(x + row * stride + token).to(tl.float32)
        tl.store(logprobs + row, value - normaliser)


READ_SHAPES: Final = ((2048, 4), (4096, 4), (4096, 8), (8192, 8), (8192, 16))
"""Block sizes and warps among which the read-once kernel takes the fastest."""


class ReadOnce:
    """Reads every logit once and stores a maximum per block: the floor. On the CPU `max()`."""

    def __init__(self, inputs: Sequence[Tensor], shape: tuple[int, int] = READ_SHAPES[1]) -> None:
        self.inputs = inputs
        self.block, self.warps = shape
        first = inputs[0]
        self.size = first.numel()
        self.uses_triton = first.is_cuda
        if self.uses_triton and triton is None:
            raise RuntimeError("the read-once kernel needs triton")
        self.blocks = -(-self.size // self.block) if self.uses_triton else 1
        self.out = torch.empty(self.blocks, device=first.device)

    def call(self, i: int) -> None:
        logits = self.inputs[i % len(self.inputs)]
        if self.uses_triton:
            _read_kernel[(self.blocks,)](
                logits, self.out, self.size, BLOCK=self.block, num_warps=self.warps
            )
        else:
            self.out[0] = logits.max()

    def check(self) -> None:
        """The largest of the maxima is the largest logit."""
        self.call(0)
        if float(self.out.max()) != float(self.inputs[0].max()):
            raise CheckFailedError("the read-once kernel did not read everything")

    def reset(self) -> None:
        """Nothing to undo."""


# Raw logprobs.


def log_softmax_logprob(logits: Tensor, tokens: Tensor) -> Tensor:
    """What engines do: all logprobs, of which one is read."""
    logprobs = torch.log_softmax(logits, -1, dtype=torch.float32)
    return logprobs.gather(1, tokens.long()[:, None])[:, 0]


_SUM_BLOCK: Final = 4096


def one_read_logprob(logits: Tensor, tokens: Tensor) -> Tensor:
    """The least that it takes: one more read of the row."""
    if not logits.is_cuda or triton is None:
        chosen = logits.gather(1, tokens.long()[:, None])[:, 0].float()
        return chosen - torch.logsumexp(logits.float(), -1)
    rows, vocab = logits.shape
    parts = triton.cdiv(vocab, _SUM_BLOCK)
    maxima = torch.empty(rows, parts, device=logits.device)
    sums = torch.empty(rows, parts, device=logits.device)
    logprobs = torch.empty(rows, device=logits.device)
    stride = logits.stride(0)
    _partial_sums_kernel[(parts, rows)](
        logits, stride, maxima, sums, vocab, BLOCK=_SUM_BLOCK, num_warps=4
    )
    _gather_logprob_kernel[(rows,)](
        logits,
        stride,
        tokens,
        maxima,
        sums,
        logprobs,
        parts,
        PARTS=triton.next_power_of_2(parts),
        num_warps=1,
    )
    return logprobs


LOGPROBS: Final[dict[str, Logprob]] = {
    "log_softmax": log_softmax_logprob,
    "one-read logprob": one_read_logprob,
}

LOGPROB_TOLERANCE: Final = 1e-4
"""Of logprobs against float64's: fp32 sums of 2**18 terms in any sensible order are within."""


def check_logprobs(logits: Tensor, tokens: Tensor, logprobs: Tensor, what: str) -> None:
    """Every row's logprob is the float64 log_softmax at its token."""
    worst = 0.0
    for first in range(0, logits.shape[0], 64):
        rows = slice(first, first + 64)
        exact = torch.log_softmax(logits[rows].double(), -1)
        exact = exact.gather(1, tokens[rows].long()[:, None])[:, 0]
        difference = (logprobs[rows].double() - exact).abs().max()
        worst = max(worst, float(torch.nan_to_num(difference, nan=torch.inf)))
    if not worst <= LOGPROB_TOLERANCE:
        raise CheckFailedError(f"{what}: a logprob is off by {worst:.3g}")


# The rivals.


@dataclass(frozen=True)
class Filters:
    """What all rows of a batch ask for, as far as rivals know it."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def names(self) -> frozenset[str]:
        """Which filters are on; greedy stands for itself."""
        if self.temperature == 0:
            return frozenset({"greedy"})
        on = {"top_k": self.top_k > 0, "top_p": self.top_p < 1, "min_p": self.min_p > 0}
        return frozenset(name for name, is_on in on.items() if is_on)


class Batch:
    """The parameters of a batch as the tensors that an engine keeps."""

    def __init__(self, filters: Filters, rows: int, device: torch.device) -> None:
        self.filters, self.rows, self.device = filters, rows, device
        self.temperature = torch.full((rows,), filters.temperature, device=device)
        self.top_k = torch.full((rows,), filters.top_k, dtype=torch.int32, device=device)
        self.top_p = torch.full((rows,), filters.top_p, device=device)
        self.min_p = torch.full((rows,), filters.min_p, device=device)
        self.seed = torch.arange(rows, dtype=torch.int64, device=device)
        self.offset = torch.zeros(rows, dtype=torch.int64, device=device)

    @cached_property
    def random(self) -> dict[str, Tensor]:
        """FlashInfer's seed per row and position in its stream."""
        return {"seed": self.seed, "offset": self.offset}


def sort_sampler(batch: Batch) -> Sampler:
    """Plain torch: sort, cumulate, mask, draw by exponential noise; argmax where greedy."""
    filters = batch.filters
    if "greedy" in filters.names:
        return lambda logits: logits.argmax(-1)
    temperature = batch.temperature[:, None]

    def draw(probabilities: Tensor) -> Tensor:
        noise = torch.empty_like(probabilities).exponential_()
        return probabilities.div_(noise).argmax(-1)

    def unsorted(logits: Tensor) -> Tensor:
        return draw(torch.softmax(logits.float() / temperature, -1))

    def sorted_rows(logits: Tensor) -> Tensor:
        y, ids = (logits.float() / temperature).sort(-1, descending=True)
        if filters.top_k:
            rank = torch.arange(y.shape[1], device=y.device)
            y = y.masked_fill_(rank >= batch.top_k[:, None], -torch.inf)
        if filters.min_p:
            y = y.masked_fill_(y < y[:, :1] + batch.min_p.log()[:, None], -torch.inf)
        probabilities = torch.softmax(y, -1)
        if filters.top_p < 1:
            before = probabilities.cumsum(-1) - probabilities
            probabilities.masked_fill_(before >= batch.top_p[:, None], 0.0)
        return ids.gather(1, draw(probabilities)[:, None])[:, 0]

    return sorted_rows if filters.names else unsorted


_STEP: Final = 32
"""Random numbers that FlashInfer reserves per row and call."""


def flashinfer_joint(batch: Batch) -> Sampler:
    """softmax(T), then the rejection sampler with both filters at once."""
    sampling = flashinfer("sampling")

    def sample(logits: Tensor) -> Tensor:
        tokens = sampling.top_k_top_p_sampling_from_probs(
            sampling.softmax(logits, batch.temperature),
            batch.top_k,
            batch.top_p,
            filter_apply_order="joint",
            **batch.random,
        )
        batch.offset.add_(_STEP)
        return tokens

    return sample


def flashinfer_renorm(batch: Batch) -> Sampler:
    """softmax(T), the k best renormalised, then top-p among them: the law of top_k_first, without
    the module that FlashInfer's own call needs for it."""
    sampling = flashinfer("sampling")

    def sample(logits: Tensor) -> Tensor:
        probabilities = sampling.softmax(logits, batch.temperature)
        probabilities = sampling.top_k_renorm_probs(probabilities, batch.top_k)
        tokens = sampling.top_p_sampling_from_probs(probabilities, batch.top_p, **batch.random)
        batch.offset.add_(_STEP)
        return tokens

    return sample


def flashinfer_top_k_first(batch: Batch) -> Sampler:
    """softmax(T), then the k best, then top-p among them; top_k_max as tight as it can be."""
    sampling = flashinfer("sampling")

    def sample(logits: Tensor) -> Tensor:
        tokens = sampling.top_k_top_p_sampling_from_probs(
            sampling.softmax(logits, batch.temperature),
            batch.top_k,
            batch.top_p,
            filter_apply_order="top_k_first",
            top_k_max=batch.filters.top_k,
            **batch.random,
        )
        batch.offset.add_(_STEP)
        return tokens

    return sample


def flashinfer_cake(batch: Batch) -> Sampler:
    """softmax(T), then cake. A replay repeats its draw: cake takes no seed from a tensor."""
    softmax, from_probabilities = flashinfer("sampling").softmax, cake_alone(batch)
    return lambda logits: from_probabilities(softmax(logits, batch.temperature))


def cake_alone(batch: Batch) -> Sampler:
    """Cake from probabilities that somebody else made, in fp32."""
    cake = flashinfer("cake_sampling")
    maximum = batch.filters.top_k

    def sample(probabilities: Tensor) -> Tensor:
        return cake.top_k_top_p_sampling_from_probs(
            probabilities, batch.top_k, batch.top_p, top_k_max=maximum
        )

    return sample


def flashinfer_top_p(batch: Batch) -> Sampler:
    sampling = flashinfer("sampling")

    def sample(logits: Tensor) -> Tensor:
        probabilities = sampling.softmax(logits, batch.temperature)
        tokens = sampling.top_p_sampling_from_probs(probabilities, batch.top_p, **batch.random)
        batch.offset.add_(_STEP)
        return tokens

    return sample


def flashinfer_min_p_top_p(batch: Batch) -> Sampler:
    """Top-p first, and min-p among what it kept: no call of FlashInfer's does both."""
    sampling = flashinfer("sampling")

    def sample(logits: Tensor) -> Tensor:
        probabilities = sampling.softmax(logits, batch.temperature)
        probabilities = sampling.top_p_renorm_probs(probabilities, batch.top_p)
        tokens = sampling.min_p_sampling_from_probs(probabilities, batch.min_p, **batch.random)
        batch.offset.add_(_STEP)
        return tokens

    return sample


def flashinfer_unfiltered(batch: Batch) -> Sampler:
    sampling = flashinfer("sampling")

    def sample(logits: Tensor) -> Tensor:
        probabilities = sampling.softmax(logits, batch.temperature)
        tokens = sampling.sampling_from_probs(probabilities, **batch.random)
        batch.offset.add_(_STEP)
        return tokens

    return sample


def flashinfer_gumbel(batch: Batch) -> Sampler:
    """Gumbel noise on the logits; it knows no temperature, so that only T = 1 is fair."""
    sampling = flashinfer("sampling")

    def sample(logits: Tensor) -> Tensor:
        tokens = sampling.sampling_from_logits(logits, **batch.random)
        batch.offset.add_(_STEP)
        return tokens

    return sample


def vllm_triton(batch: Batch) -> Sampler:
    """vLLM's Triton masks of top-k and top-p, softmax, and its draw by exponential noise."""
    mask = importlib.import_module("vllm.v1.sample.ops.topk_topp_triton").apply_top_k_top_p_triton
    filters = batch.filters
    top_k = batch.top_k if filters.top_k else None
    top_p = batch.top_p if filters.top_p < 1 else None

    def sample(logits: Tensor) -> Tensor:
        y = logits.float() / batch.temperature[:, None]
        probabilities = torch.softmax(mask(y, top_k, top_p), -1)
        noise = torch.empty_like(probabilities).exponential_()
        return probabilities.div_(noise).argmax(-1)

    return sample


def flashinfer(name: str) -> Any:
    """A module of FlashInfer, without its package's __init__, which imports 400 modules."""
    if "flashinfer" not in sys.modules:
        spec = importlib.util.find_spec("flashinfer")
        if spec is None or spec.submodule_search_locations is None:
            raise ImportError("flashinfer is not installed")
        package = types.ModuleType("flashinfer")
        package.__spec__, package.__path__ = spec, list(spec.submodule_search_locations)
        sys.modules["flashinfer"] = package
        known = importlib.import_module("flashinfer.version")
        package.__dict__["__version__"] = known.__version__
    return importlib.import_module(f"flashinfer.{name}")


def flashinfer_version() -> str:
    try:
        return str(flashinfer("version").__version__)
    except Exception:  # whatever keeps it from being imported
        return ""


def _reason(attempt: Callable[[], object]) -> str:
    """Why an attempt fails, in one line; empty where it does not."""
    try:
        attempt()
    except Exception as error:  # of a package that we do not know: a reason, not a failure
        return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    return ""


@cache
def missing(need: str) -> str:
    """Why something that a rival needs cannot be used here; empty where it can."""
    if need == "":
        return ""
    if not torch.cuda.is_available():
        return "no CUDA device"
    attempts: dict[str, Callable[[], object]] = {
        "flashinfer sampling": lambda: flashinfer("sampling").get_sampling_module(),
        "flashinfer topk": lambda: flashinfer("topk").get_topk_module(),
        "flashinfer cake": lambda: flashinfer("jit.cake_sampling").load_cake_sampling_module(),
        "vllm": lambda: importlib.import_module("vllm.v1.sample.ops.topk_topp_triton"),
    }
    return _reason(attempts[need])


@dataclass(frozen=True)
class Rival:
    """One way to sample. serves: the sets of filters that it is for."""

    name: str
    make: Callable[[Batch], Sampler]
    serves: tuple[frozenset[str], ...]
    needs: tuple[str, ...] = ()
    given_probabilities: bool = False
    only_unit_temperature: bool = False
    joint: bool = False
    """Whether top-p counts the mass of the whole row, not that of the k best."""

    @property
    def absent(self) -> str:
        """Why it cannot be used here; empty where it can."""
        return next((reason for need in self.needs if (reason := missing(need))), "")

    def is_for(self, filters: Filters) -> bool:
        fair = not self.only_unit_temperature or filters.temperature == 1
        return filters.names in self.serves and fair


def _sets(*names: str) -> tuple[frozenset[str], ...]:
    return tuple(frozenset(n.split()) for n in names)


_BOTH: Final = _sets("top_k top_p")
_SAMPLING: Final = ("flashinfer sampling",)
RIVALS: Final = (
    Rival("FlashInfer joint", flashinfer_joint, _BOTH, _SAMPLING, joint=True),
    Rival("FlashInfer top_k_renorm, top_p", flashinfer_renorm, _BOTH, _SAMPLING),
    Rival("FlashInfer cake", flashinfer_cake, _BOTH, (*_SAMPLING, "flashinfer cake")),
    Rival(
        "FlashInfer cake, probabilities given",
        cake_alone,
        _BOTH,
        ("flashinfer cake",),
        given_probabilities=True,
    ),
    Rival(
        "FlashInfer top_k_first",
        flashinfer_top_k_first,
        _BOTH,
        (*_SAMPLING, "flashinfer topk"),
    ),
    Rival("FlashInfer top_p", flashinfer_top_p, _sets("top_p"), _SAMPLING),
    Rival(
        "FlashInfer top_p, min_p",
        flashinfer_min_p_top_p,
        _sets("top_p min_p"),
        _SAMPLING,
        joint=True,
    ),
    Rival("FlashInfer softmax, draw", flashinfer_unfiltered, _sets(""), _SAMPLING),
    Rival(
        "FlashInfer Gumbel",
        flashinfer_gumbel,
        _sets(""),
        _SAMPLING,
        only_unit_temperature=True,
    ),
    Rival("vLLM Triton", vllm_triton, _sets("top_k top_p", "top_p"), ("vllm",)),
    Rival("plain torch", sort_sampler, _sets("top_k top_p", "top_p", "top_p min_p", "", "greedy")),
)


def support(logits: Tensor, filters: Filters, *, joint: bool) -> Tensor:
    """bool [V]: what a sampler may draw from one row, in float64, equals and near misses included.

    joint: filters look at the row, each for itself; otherwise each sees what the one before kept,
    min-p, top-k, top-p.
    """
    y = logits.double()
    if "greedy" in filters.names:
        return y == y.max()
    p = torch.softmax(y / filters.temperature, -1)
    ordered = p.sort(descending=True).values
    kept = ordered.numel()
    slack = 1 + 1e-4
    if filters.min_p:
        kept = int((ordered * slack >= filters.min_p * ordered[0]).sum())
    if filters.top_k:
        kept = min(kept, filters.top_k)
    if filters.top_p < 1:
        total = ordered.sum() if joint else ordered[:kept].sum()
        before = ordered.cumsum(0) - ordered
        kept = min(kept, int((before < (filters.top_p * total) + 1e-5).sum()))
    return p * slack >= ordered[kept - 1]


class Contestant:
    """A rival on rotating inputs: its tokens and, where asked, their raw logprobs."""

    def __init__(
        self, rival: Rival, logprob: Logprob | None, buffers: Sequence[Tensor], filters: Filters
    ) -> None:
        self.rival, self.logprob, self.filters = rival, logprob, filters
        self.logits = buffers
        self.inputs = buffers
        if rival.given_probabilities:
            self.inputs = [torch.softmax(b.float() / filters.temperature, -1) for b in buffers]
        rows, device = buffers[0].shape[0], buffers[0].device
        self.sample = rival.make(Batch(filters, rows, device))
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.logprobs: Tensor | None = None

    def call(self, i: int) -> None:
        i %= len(self.inputs)
        self.tokens = self.sample(self.inputs[i])
        if self.logprob is not None:
            self.logprobs = self.logprob(self.logits[i], self.tokens)

    def check(self) -> None:
        """Tokens of the first input lie in the support, in some rows; all logprobs are right."""
        self.call(0)
        logits = self.logits[0]
        if not bool(((self.tokens >= 0) & (self.tokens < logits.shape[1])).all()):
            raise CheckFailedError(f"{self.rival.name} drew an id outside the vocabulary")
        for row in sorted({0, 1, logits.shape[0] - 1} & set(range(logits.shape[0]))):
            token = int(self.tokens[row])
            allowed = support(logits[row], self.filters, joint=self.rival.joint)
            if not bool(allowed[token]):
                raise CheckFailedError(f"{self.rival.name} drew {token} outside the support")
        if self.logprobs is not None:
            check_logprobs(logits, self.tokens, self.logprobs, self.rival.name)

    def reset(self) -> None:
        """Nothing to undo: rivals keep a random stream at most."""
