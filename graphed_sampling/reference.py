"""The sampling contract as an executable specification: one row, in float64, slow and short.

Every backend computes what `sample_row` computes. Read the file top to bottom, it follows the
order of the contract:

    logits x -> sanitise -> bans (grammar bitmask, allowed ids, bias -inf, min_tokens, bad words)
      -> logit bias -> repetition -> frequency -> presence = y (fp32)
      -> top_n_sigma -> min_p -> top_k -> top_p -> typical_p -> epsilon -> eta -> draw
      -> logprobs, rank -> finish reason

y is computed in fp32, each operation rounded once; what follows is float64 and exact integers.
All comparisons of logits are on y, before the division by the temperature.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from graphed_sampling import philox
from graphed_sampling.layout import FinishReason, RowFlags
from graphed_sampling.params import SamplingParams, fp32

Bools: TypeAlias = NDArray[np.bool_]
Ids: TypeAlias = NDArray[np.int64]
Floats32: TypeAlias = NDArray[np.float32]
Floats64: TypeAlias = NDArray[np.float64]
Kept: TypeAlias = tuple[Bools, float]
"""What a filter returns: which survivors it keeps, and the margin of that decision."""

_FLT_MAX: Final = np.finfo(np.float32).max
_WORD_BITS: Final = 64
_MASS_BITS: Final = 100  # the largest mass is 2**100, so float64 is the coarsest step of the draw


@dataclass(frozen=True, eq=False)
class RowResult:
    """Outcome of one row. The first nine fields are those of `StepOutput`, the rest is for tests.

    token_id: the id drawn.
    logprob: its logprob in the request's mode (float64); NaN where not asked for.
    rank: its rank, from 1; 0 where not asked for.
    num_kept: number of survivors where a filter is on, 1 for greedy and EMPTY rows, else 0.
    top_token_ids, top_logprobs: as many entries as the request's `logprobs`; the list is filled up
        with id -1 and logprob -inf where fewer tokens have a probability.
    given_logprobs: one for each of the request's `logprob_token_ids`.
    finish_reason: why the request ends with this token, or NONE.
    flags: NAN, POS_INF and EMPTY.

    processed_logits: y, fp32 [vocab_size]; -inf where banned.
    survivors: ids that survived all filters, int64, in canonical order.
    probabilities: theirs, float64, aligned with `survivors`.
    cumulative: running sums of their exact integer masses, aligned with `survivors`.
    word: the word that was drawn, in [0, 2**64).
    margins: by filter, how far its decision was from going the other way: an upper bound on the
        rounding under which another implementation must keep the same set. Distances are relative:
        of masses to the total (top_p, typical_p), of logits to n * sigma (top_n_sigma) or to the
        temperature (min_p), of probabilities to the cutoff (epsilon, eta).
    """

    token_id: int
    logprob: float
    rank: int
    num_kept: int
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]
    given_logprobs: tuple[float, ...]
    finish_reason: FinishReason
    flags: RowFlags
    processed_logits: Floats32
    survivors: Ids
    probabilities: Floats64
    cumulative: tuple[int, ...]
    word: int
    margins: Mapping[str, float]

    @property
    def margin(self) -> float:
        """The smallest of the margins; inf where no filter rounds."""
        return min(self.margins.values(), default=math.inf)

    @cached_property
    def boundaries(self) -> tuple[Fraction, ...]:
        """The cumulative distribution over `survivors` in canonical order, exact; the last is 1."""
        return tuple(Fraction(c, self.cumulative[-1]) for c in self.cumulative)

    def tokens_near(self, tolerance: float) -> set[int]:
        """Ids that a sampler may draw whose boundaries lie within `tolerance` of the exact ones.

        tolerance: in probability, >= 0. `token_id` is always among them.
        """
        total, position = self.cumulative[-1], self.word * self.cumulative[-1] >> _WORD_BITS
        slack = math.ceil(Fraction(tolerance) * total)
        first = bisect_right(self.cumulative, position - slack)
        last = bisect_right(self.cumulative, min(position + slack, total - 1))
        return {int(i) for i in self.survivors[first : last + 1]}


# Sanitise, bans, bias and penalties: everything up to y.


def sanitise(logits: ArrayLike, vocab_size: int | None = None) -> Floats32:
    """The model's logits as the contract counts them: fp32 [vocab_size], NaN as -inf, -0.0 as 0.0.

    logits: [>= vocab_size], bf16, fp16 or fp32 (or what fp32 stores of it). What lies beyond
    vocab_size is never looked at. NumPy has no bf16: hand such a tensor over as `tensor.float()`.
    """
    x = np.asarray(logits, dtype=np.float32)
    size = x.size if vocab_size is None else vocab_size
    if x.ndim != 1 or not 1 <= size <= x.size:
        raise ValueError(
            f"logits of shape {x.shape} are not accepted: they must be one row of at least "
            f"vocab_size = {vocab_size} >= 1 elements"
        )
    x = x[:size]
    return np.where(np.isnan(x), np.float32(-np.inf), x) + np.float32(0)


def _allowed_by_bitmask(grammar_bitmask: ArrayLike, vocab_size: int) -> Bools:
    """Bit i of word w of the int32 bitmask stands for token 32 w + i, set = allowed."""
    words = np.asarray(grammar_bitmask)
    if words.dtype != np.int32 or words.ndim != 1 or words.size < -(-vocab_size // 32):
        raise ValueError(
            f"grammar_bitmask of dtype {words.dtype} and shape {words.shape} is not accepted: it "
            f"must be int32 with at least {-(-vocab_size // 32)} elements"
        )
    ids = np.arange(vocab_size)
    allowed: Bools = (words[ids // 32] >> (ids % 32) & 1) != 0
    return allowed


def _banned(
    x: Floats32,
    params: SamplingParams,
    allowed_by_grammar: Bools,
    output: Sequence[int],
    stop_ids: Collection[int],
    num_generated: int,
) -> Bools:
    """Tokens that cannot be drawn. Bans are kept apart from y: an overflow of y is no ban."""
    banned: Bools = (x == -np.inf) | ~allowed_by_grammar
    if params.allowed_token_ids is not None:
        allowed = np.zeros_like(banned)
        allowed[list(params.allowed_token_ids)] = True
        banned |= ~allowed
    banned[[i for i, bias in params.logit_bias.items() if bias == -math.inf]] = True
    if num_generated < params.min_tokens:
        banned[list(stop_ids)] = True
    for *prefix, last in params.bad_words_ids:
        if prefix == list(output[len(output) - len(prefix) :]):
            banned[last] = True
    return banned


def _biased_and_penalised(
    x: Floats32, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> Floats32:
    """y before bans: fp32, every operation rounded once, the overflow of a step kept as inf."""
    y = x.copy()
    with np.errstate(over="ignore", under="ignore"):
        for token_id, bias in params.logit_bias.items():
            if bias != -math.inf:
                y[token_id] += np.float32(bias)

        seen = np.zeros(y.size, dtype=np.bool_)
        seen[[*prompt, *output]] = True
        repetition = np.float32(params.repetition_penalty)
        y = np.where(seen, np.where(y > 0, y / repetition, y * repetition), y)

        counts = np.zeros(y.size, dtype=np.float32)
        for token_id, count in Counter(output).items():
            counts[token_id] = count
        y = y - np.float32(params.frequency_penalty) * counts
        y = np.where(counts > 0, y - np.float32(params.presence_penalty), y)
    # + 0.0 turns -0.0 into 0.0.
    return np.clip(y, -_FLT_MAX, _FLT_MAX) + np.float32(0)


# The filters. Each sees the survivors of the one before, by descending y, and their y alone.


def _weights(y: Floats32, temperature: float) -> Floats64:
    """Unnormalised probabilities, the largest 1. Takes any survivors in any order."""
    wide = y.astype(np.float64)
    weights: Floats64 = np.exp((wide - wide.max()) / temperature)
    return weights


def _log_probabilities(y: Floats32, temperature: float) -> Floats64:
    """log_softmax(y / temperature), in an order of operations that never overflows."""
    wide = y.astype(np.float64)
    scaled: Floats64 = (wide - wide.max()) / temperature
    return scaled - math.log(np.exp(scaled).sum())


def _entropy(log_probabilities: Floats64) -> float:
    return -float(np.sum(np.exp(log_probabilities) * log_probabilities))


def _nearest(distances: Floats64) -> float:
    return float(distances.min(initial=np.inf))


def _keep_top_n_sigma(y: Floats32, _temperature: float, *, n: float) -> Kept:
    """y >= y_max - n sigma, sigma the population standard deviation (Tang et al. 2024).

    As the first filter it sees every unbanned token, which is what sigma is defined over.
    """
    wide = y.astype(np.float64)
    reach = n * float(wide.std())
    bound = wide[0] - reach
    margin = _nearest(np.abs(wide - bound)[y < y[0]])
    return wide >= bound, margin / reach if reach > 0 else math.inf


def _keep_min_p(y: Floats32, temperature: float, *, min_p: float) -> Kept:
    """p >= min_p * p_max (Nguyen et al. 2024), as y >= y_max + T ln(min_p).

    The bound is evaluated in float64 and rounded down to fp32, so that backends agree exactly.
    """
    exact = float(y[0]) + temperature * math.log(min_p)
    with np.errstate(over="ignore"):
        bound = np.float32(exact)
        if float(bound) > exact:
            bound = np.nextafter(bound, np.float32(-np.inf))
    margin = _nearest(np.abs(y.astype(np.float64) - exact)[y < y[0]]) / temperature
    return y >= bound, margin


def _keep_top_k(y: Floats32, _temperature: float, *, k: int) -> Kept:
    """The first k by (y descending, id ascending)."""
    return np.arange(y.size) < k, math.inf


def _keep_top_p(y: Floats32, temperature: float, *, p: float) -> Kept:
    """The smallest prefix whose mass is >= p of the total (Holtzman et al. 2020)."""
    mass = np.cumsum(_weights(y, temperature))
    mass /= mass[-1]
    last = int(np.argmax(mass >= p))
    # Only the sums before and at the cut can move it; the sum of all is 1 whatever rounds.
    near_cut = [mass[i] for i in (last - 1, last) if 0 <= i < y.size - 1]
    return np.arange(y.size) <= last, _nearest(np.abs(np.array(near_cut) - p))


def _keep_typical_p(y: Floats32, temperature: float, *, p: float) -> Kept:
    """Locally typical sampling (Meister et al. 2023), the rule of Hugging Face transformers.

    By ascending distance |-ln p_i - entropy|, the distance at which the mass first reaches p is
    the cutoff; all tokens up to it are kept, so equal distances are kept together.
    """
    log_p = _log_probabilities(y, temperature)
    distance = np.abs(-log_p - _entropy(log_p))
    nearest_first = np.argsort(distance, kind="stable")
    mass = np.cumsum(np.exp(log_p)[nearest_first])
    mass /= mass[-1]
    crossing = nearest_first[np.argmax(mass >= p)]
    cutoff = distance[crossing]
    # The cut moves when the mass below the cutoff, or up to it, crosses p, or when a token of
    # another logit passes the one at the cutoff.
    num_below, num_up_to = int(np.sum(distance < cutoff)), int(np.sum(distance <= cutoff))
    near_cut = [mass[n - 1] for n in (num_below, num_up_to) if 0 < n < y.size]
    margin = min(
        _nearest(np.abs(np.array(near_cut) - p)),
        _nearest(np.abs(distance - cutoff)[y != y[crossing]]),
    )
    return distance <= cutoff, margin


def _keep_probable(y: Floats32, log_p: Floats64, cutoff: float) -> Kept:
    """p >= cutoff; the equals of the largest y always."""
    is_max = y == y.max()
    p = np.exp(log_p)
    return (p >= cutoff) | is_max, _nearest(np.abs(p / cutoff - 1)[~is_max])


def _keep_epsilon(y: Floats32, temperature: float, *, epsilon: float) -> Kept:
    """p >= epsilon (Hewitt et al. 2022)."""
    return _keep_probable(y, _log_probabilities(y, temperature), epsilon)


def _keep_eta(y: Floats32, temperature: float, *, epsilon: float) -> Kept:
    """p >= min(epsilon, sqrt(epsilon) exp(-entropy)) (Hewitt et al. 2022)."""
    log_p = _log_probabilities(y, temperature)
    eta = min(epsilon, math.sqrt(epsilon) * math.exp(-_entropy(log_p)))
    return _keep_probable(y, log_p, eta)


Filter: TypeAlias = Callable[[Floats32, float], Kept]


def _filters(params: SamplingParams, vocab_size: int) -> list[tuple[str, Filter]]:
    """The filters that are on, in the contract's order. Greedy is top_k = 1 and nothing else."""
    if params.is_greedy:
        return [("top_k", partial(_keep_top_k, k=1))]
    filters: list[tuple[str, Filter]] = []
    if (n := fp32(params.top_n_sigma)) > 0:
        filters.append(("top_n_sigma", partial(_keep_top_n_sigma, n=n)))
    if (min_p := fp32(params.min_p)) > 0:
        filters.append(("min_p", partial(_keep_min_p, min_p=min_p)))
    if 0 < params.top_k < vocab_size:
        filters.append(("top_k", partial(_keep_top_k, k=params.top_k)))
    if (p := fp32(params.top_p)) < 1:
        filters.append(("top_p", partial(_keep_top_p, p=p)))
    if (p := fp32(params.typical_p)) < 1:
        filters.append(("typical_p", partial(_keep_typical_p, p=p)))
    if (epsilon := fp32(params.epsilon_cutoff)) > 0:
        filters.append(("epsilon_cutoff", partial(_keep_epsilon, epsilon=epsilon)))
    if (epsilon := fp32(params.eta_cutoff)) > 0:
        filters.append(("eta_cutoff", partial(_keep_eta, epsilon=epsilon)))
    return filters


# The draw.


class _Draw(NamedTuple):
    token_id: int
    cumulative: tuple[int, ...]


def _draw(survivors: Ids, weights: Floats64, word: int) -> _Draw:
    """Inverse CDF: the first survivor whose cumulative mass exceeds floor(word * total / 2**64).

    survivors: in canonical order; weights: aligned with it, the largest 1.
    """
    masses = (int(math.ldexp(weight, _MASS_BITS)) for weight in weights.tolist())
    cumulative = tuple(accumulate(masses))
    chosen = bisect_right(cumulative, word * cumulative[-1] >> _WORD_BITS)
    return _Draw(int(survivors[chosen]), cumulative)


# Logprobs.


def raw_logprobs(logits: ArrayLike, *, vocab_size: int | None = None) -> Floats64:
    """log_softmax of the sanitised logits, float64 [vocab_size].

    Before any ban, bias, penalty or temperature. Where the row holds +inf, its +inf entries share
    the mass equally; where it holds no finite entry either, all are -inf.
    Prompt logprobs are this function at each position, read at the next token.
    """
    x = sanitise(logits, vocab_size)
    logprobs = np.full(x.size, -np.inf)
    largest = x == np.inf
    if largest.any():
        logprobs[largest] = -math.log(int(largest.sum()))
    elif (x > -np.inf).any():
        finite = x > -np.inf
        logprobs[finite] = _log_probabilities(x[finite], 1.0)
    return logprobs


def _by_logit(ids: Ids, logits: Floats32) -> Ids:
    """`ids`, which ascend, by (logit descending, id ascending)."""
    return ids[np.argsort(-logits[ids], kind="stable")]


def sample_row(
    logits: ArrayLike,
    params: SamplingParams,
    *,
    vocab_size: int | None = None,
    prompt_token_ids: Sequence[int] = (),
    output_token_ids: Sequence[int] = (),
    eos_token_ids: Sequence[int] = (),
    grammar_bitmask: ArrayLike | None = None,
    word: int | None = None,
    position: int | None = None,
    seed: int | None = None,
    stream: int = philox.Stream.TARGET,
    order: ArrayLike | None = None,
    num_generated: int | None = None,
) -> RowResult:
    """Draw one token: the whole contract for one live row.

    logits: [V], bf16, fp16 or fp32 (see `sanitise`); never modified.
    vocab_size: in [1, V], default V.
    prompt_token_ids, output_token_ids: the request's sequence so far, ids in [0, vocab_size).
    eos_token_ids: the table's.
    grammar_bitmask: int32 [>= ceil(vocab_size / 32)], bit set = allowed.
    word: the 64-bit word of the draw, as unsigned or in two's complement. Default: Philox at
        (seed, position, stream), seed defaulting to `params.seed` and position to
        len(prompt_token_ids) + len(output_token_ids). Greedy rows need neither.
    order: the canonical order of the draw, a permutation of range(vocab_size); default ascending.
    num_generated: tokens generated before this one, default len(output_token_ids).

    Raises ValueError for wrong shapes, for ids outside the vocabulary, and for a missing seed.
    """
    x = sanitise(logits, vocab_size)
    all_ids = np.arange(x.size)
    _check_ids(params, x.size, prompt_token_ids, output_token_ids, eos_token_ids)
    if num_generated is None:
        num_generated = len(output_token_ids)
    stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
    flags = RowFlags(0)
    if np.isnan(np.asarray(logits, dtype=np.float32)[: x.size]).any():
        flags |= RowFlags.NAN

    allowed_by_grammar = np.ones(x.size, dtype=np.bool_)
    if grammar_bitmask is not None:
        allowed_by_grammar = _allowed_by_bitmask(grammar_bitmask, x.size)
    banned = _banned(x, params, allowed_by_grammar, output_token_ids, stop_ids, num_generated)

    infinite = (x == np.inf) & ~banned
    if banned.all():
        flags |= RowFlags.EMPTY
        banned = all_ids != np.argmax(allowed_by_grammar)  # the lowest; 0 where none is
        y = np.zeros_like(x)
    elif infinite.any():
        flags |= RowFlags.POS_INF
        banned = ~infinite
        y = np.zeros_like(x)
    else:
        y = _biased_and_penalised(x, params, prompt_token_ids, output_token_ids)
    y = np.where(banned, np.float32(-np.inf), y)

    temperature = 1.0 if params.is_greedy else fp32(params.temperature)
    kept = _by_logit(all_ids[~banned], y)
    filters = _filters(params, x.size)
    margins: dict[str, float] = {}
    for name, keep in filters:
        mask, margins[name] = keep(y[kept], temperature)
        kept = kept[mask]

    if word is None:
        word = _word(params, seed, position, stream, prompt_token_ids, output_token_ids)
    word = int(word) % 2**_WORD_BITS
    is_kept = np.zeros(x.size, dtype=np.bool_)
    is_kept[kept] = True
    canonical = all_ids if order is None else _checked_order(order, x.size)
    survivors = canonical[is_kept[canonical]]
    weights = _weights(y[survivors], temperature)
    token_id, cumulative = _draw(survivors, weights, word)

    if params.logprobs_mode == "raw":
        mode_logits, logprobs = x, raw_logprobs(logits, vocab_size=vocab_size)
    else:
        mode_logits, logprobs = y, np.full(x.size, -np.inf)
        logprobs[kept] = _log_probabilities(y[kept], temperature)
    top_n = params.logprobs or 0
    best = _by_logit(all_ids[logprobs > -np.inf], mode_logits)[:top_n]
    padding = top_n - best.size

    finish_reason = FinishReason.NONE
    if params.max_tokens is not None and num_generated + 1 >= params.max_tokens:
        finish_reason = FinishReason.LENGTH
    if token_id in stop_ids:
        finish_reason = FinishReason.STOP

    return RowResult(
        token_id=token_id,
        logprob=math.nan if params.logprobs is None else float(logprobs[token_id]),
        rank=1 + int(np.sum(mode_logits > mode_logits[token_id])) if params.rank else 0,
        num_kept=len(kept) if filters or RowFlags.EMPTY in flags else 0,
        top_token_ids=(*best.tolist(), *[-1] * padding),
        top_logprobs=(*logprobs[best].tolist(), *[-math.inf] * padding),
        given_logprobs=tuple(logprobs[list(params.logprob_token_ids)].tolist()),
        finish_reason=finish_reason,
        flags=flags,
        processed_logits=y,
        survivors=survivors,
        probabilities=weights / weights.sum(),
        cumulative=cumulative,
        word=word,
        margins=margins,
    )


@dataclass(frozen=True, eq=False)
class ScoredRow:
    """What one row of logits says of a given token; see `score_row`.

    logprob, rank, top_token_ids, top_logprobs, given_logprobs, num_kept, flags: as of `RowResult`,
    of the given token. entropy: of the mode's distribution, in nats; NaN where there is none.
    probabilities: that distribution, float64 [vocab_size]; zeros where there is none.
    margin: as `RowResult.margin`.
    """

    logprob: float
    rank: int
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]
    given_logprobs: tuple[float, ...]
    entropy: float
    num_kept: int
    flags: RowFlags
    probabilities: Floats64
    margin: float


def score_row(
    logits: ArrayLike,
    token_id: int,
    params: SamplingParams,
    *,
    vocab_size: int | None = None,
) -> ScoredRow:
    """Logprob of a given token at one position, and what else `prompt_logprobs` tells.

    logits, vocab_size: as for `sample_row`. params: mode, filters, and as wishes `logprobs` (how
    many of the best tokens) and `logprob_token_ids`. Raises ValueError as `sample_row` does.
    """
    row = sample_row(logits, params, vocab_size=vocab_size, word=0)
    _check_ids(params, row.processed_logits.size, [token_id], (), ())
    if params.logprobs_mode == "raw":
        mode_logits = sanitise(logits, vocab_size)
        logprobs = raw_logprobs(logits, vocab_size=vocab_size)
    else:
        mode_logits = row.processed_logits
        temperature = 1.0 if params.is_greedy else fp32(params.temperature)
        logprobs = np.full(mode_logits.size, -np.inf)
        logprobs[row.survivors] = _log_probabilities(mode_logits[row.survivors], temperature)
    probabilities = np.exp(logprobs)
    has_any = (logprobs > -np.inf).any()
    return ScoredRow(
        logprob=float(logprobs[token_id]),
        rank=1 + int(np.sum(mode_logits > mode_logits[token_id])),
        top_token_ids=row.top_token_ids,
        top_logprobs=row.top_logprobs,
        given_logprobs=row.given_logprobs,
        entropy=_entropy(logprobs[logprobs > -np.inf]) if has_any else math.nan,
        num_kept=0 if params.logprobs_mode == "raw" else row.num_kept,
        flags=row.flags,
        probabilities=probabilities,
        margin=math.inf if params.logprobs_mode == "raw" else row.margin,
    )


def _word(
    params: SamplingParams,
    seed: int | None,
    position: int | None,
    stream: int,
    prompt: Sequence[int],
    output: Sequence[int],
) -> int:
    if params.is_greedy:
        return 0  # any word draws the sole survivor
    seed = params.seed if seed is None else seed
    if seed is None:
        raise ValueError("seed = None is not accepted: it must be an integer if no word is given")
    position = len(prompt) + len(output) if position is None else position
    return philox.word(int(seed), int(position), stream)


def _checked_order(order: ArrayLike, vocab_size: int) -> Ids:
    ids: Ids = np.asarray(order, dtype=np.int64)
    if not np.array_equal(np.sort(ids), np.arange(vocab_size)):
        raise ValueError(f"order is not accepted: it must be a permutation of range({vocab_size})")
    return ids


def _check_ids(
    params: SamplingParams,
    vocab_size: int,
    prompt_token_ids: Sequence[int],
    output_token_ids: Sequence[int],
    eos_token_ids: Sequence[int],
) -> None:
    """What a table checks at admission; NumPy would let negative ids pass."""
    named: dict[str, Any] = {
        "prompt_token_ids": prompt_token_ids,
        "output_token_ids": output_token_ids,
        "eos_token_ids": eos_token_ids,
        "logit_bias": params.logit_bias,
        "allowed_token_ids": params.allowed_token_ids or (),
        "bad_words_ids": [i for ids in params.bad_words_ids for i in ids],
        "stop_token_ids": params.stop_token_ids,
        "logprob_token_ids": params.logprob_token_ids,
    }
    for name, ids in named.items():
        for token_id in ids:
            if not 0 <= token_id < vocab_size:
                raise ValueError(
                    f"{name} holds {token_id}, which is not accepted: ids must be in "
                    f"[0, {vocab_size})"
                )
