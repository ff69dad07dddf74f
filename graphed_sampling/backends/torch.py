"""The portable backend: the whole contract in plain torch operations, on any device.

Nothing here depends on the data: no synchronisation, no data-dependent shape, so that a step can be
captured into a CUDA graph. Rows are sorted; the filters then are cuts of the sorted row:
every filter but typical_p keeps a prefix in (logit descending, id ascending), typical_p an
interval.

No floating-point sum decides anything, since torch's order of summation depends on shape and
alignment: probability masses are int64 (`exact_math.masses`), and so is every other sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from graphed_sampling import philox
from graphed_sampling.backends import exact_math
from graphed_sampling.backends.exact_math import LN_2, LOG2_E, MASS_BITS
from graphed_sampling.layout import (
    FinishReason,
    Output,
    Param,
    ParamFlags,
    RowFlags,
    State,
    TableLayout,
)

NAME: Final = "torch"
CHOSEN_FOR: Final = "any device that no other backend serves"
REFUSES: Final[frozenset[str]] = frozenset()

# Rows are worked on in chunks of so many logits, which bounds the working memory to about 1 GB.
_CHUNK_ELEMENTS: Final = 2**23
_FLT_MAX: Final = torch.finfo(torch.float32).max
_SCALE: Final = 2.0**MASS_BITS


def unusable(device: torch.device) -> str:
    """Why the backend cannot run on `device`; empty where it can."""
    if device.type == "mps":
        return "the device has no float64"
    return ""


def canonical_order(vocab_size: int) -> Tensor:
    """int64 [vocab_size]: ids ascending."""
    return torch.arange(vocab_size)


def scratch_words(layout: TableLayout, rows: int) -> int:
    """int32 words of scratch that a step of `rows` rows needs: none, torch's allocator serves."""
    return 0


def warm_up(layout: TableLayout) -> None:
    """Nothing to compile."""


def sample_step(
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
) -> None:
    """One step in place; arguments as the op `sample_step`, checked there."""
    chunk = max(1, _CHUNK_ELEMENTS // layout.vocab_size)
    for start in range(0, slots.shape[0], chunk):
        rows = slice(start, start + chunk)
        _sample_rows(
            logits[rows],
            slots[rows],
            params,
            state,
            tables,
            output[: slots.shape[0]][rows],
            layout,
            None if grammar_bitmask is None else grammar_bitmask[rows],
            None if words is None else words[rows],
            given,
        )


class _Record:
    """Rows of a packed record, read by word offset."""

    def __init__(self, rows: Tensor) -> None:
        self.int32 = rows
        self._float32 = rows.view(torch.float32)
        self._int64 = rows.view(torch.int64)
        self._float64 = rows.view(torch.float64)

    def i32(self, word: int) -> Tensor:
        return self.int32[:, word]

    def f32(self, word: int) -> Tensor:
        return self._float32[:, word]

    def i64(self, word: int) -> Tensor:
        return self._int64[:, word // 2]

    def f64(self, word: int) -> Tensor:
        return self._float64[:, word // 2]

    def ids(self, word: int, length: int) -> Tensor:
        return self.int32[:, word : word + length].long()

    def f32_list(self, word: int, length: int) -> Tensor:
        return self._float32[:, word : word + length]


@dataclass
class _Rows:
    """What every stage needs to know of a chunk of rows; c rows, V tokens."""

    layout: TableLayout
    params: _Record
    state: _Record
    slot: Tensor  # int64 [c]: the table's row to read, the padding row for rows without a slot
    flags: Tensor  # int32 [c]: ParamFlags
    ids: Tensor  # int64 [V]

    def flag(self, flag: ParamFlags) -> Tensor:
        return (self.flags & int(flag)) != 0


def _column(row_values: Tensor) -> Tensor:
    return row_values.unsqueeze(1)


def _unpack_bits(bits: Tensor, vocab_size: int) -> Tensor:
    """bool [c, vocab_size] of a bitmap int32 [c, W]."""
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    return ((bits.unsqueeze(-1) >> shifts) & 1).bool().flatten(1)[:, :vocab_size]


def _bitmap(tables: Tensor, start: int, layout: TableLayout) -> Tensor:
    words = layout.rows * layout.bitmap_words
    return tables[start : start + words].view(layout.rows, layout.bitmap_words)


def _counts(tables: Tensor, layout: TableLayout) -> Tensor:
    return tables[layout.counts : layout.tables_words].view(layout.rows, layout.vocab_size)


def _sample_rows(
    logits: Tensor,
    slots: Tensor,
    params: Tensor,
    state: Tensor,
    tables: Tensor,
    output: Tensor,
    layout: TableLayout,
    grammar_bitmask: Tensor | None,
    words: Tensor | None,
    given: Tensor | None,
) -> None:
    padding_row = layout.max_requests
    slot = slots.long()
    slot = torch.where((slot >= 0) & (slot < layout.max_requests), slot, padding_row)
    param_record = _Record(params.index_select(0, slot))
    state_record = _Record(state.index_select(0, slot))
    rows = _Rows(
        layout=layout,
        params=param_record,
        state=state_record,
        slot=slot,
        flags=param_record.i32(Param.FLAGS),
        ids=torch.arange(layout.vocab_size, device=logits.device),
    )
    admitted = rows.flag(ParamFlags.ADMITTED)
    finished = admitted & (state_record.i32(State.FINISH_REASON) != FinishReason.NONE)
    live = admitted & ~finished

    allowed = None
    if grammar_bitmask is not None:
        allowed = _unpack_bits(grammar_bitmask[:, : layout.bitmap_words], layout.vocab_size)
        if given is not None:
            allowed = allowed | (given[0] == 0)
    raw = logits[:, : layout.vocab_size].float()
    has_nan = raw.isnan()
    # Adding zero turns -0.0 into 0.0.
    raw = torch.where(has_nan, -torch.inf, raw) + 0.0
    processed = _process(raw, rows, tables, allowed)
    kept = _filter(processed.logits, rows)

    word = philox.words(param_record.i64(Param.SEED), state_record.i64(State.POSITION))
    if words is not None:
        word = words if given is None else torch.where(given[1] != 0, words, word)
    token = _draw(kept, word)

    _write_output(
        output,
        rows,
        raw,
        processed,
        kept,
        token,
        nan_rows=has_nan.any(1),
        admitted=admitted,
        finished=finished,
    )
    _advance(state, tables, rows, token, finish=output[:, Output.FINISH_REASON], live=live)


@dataclass
class _Processed:
    """logits: fp32 [c, V], the contract's y; -inf where banned. Row flags: bool [c]."""

    logits: Tensor
    positive_infinity: Tensor
    empty: Tensor


def _process(raw: Tensor, rows: _Rows, tables: Tensor, allowed: Tensor | None) -> _Processed:
    """Masks, bias and penalties, in the contract's order; each operation rounds once."""
    layout, record = rows.layout, rows.params
    vocab_size = layout.vocab_size
    banned = raw == -torch.inf
    if allowed is not None:
        banned |= ~allowed
    allowed_bits = _bitmap(tables, layout.allowed_bits, layout).index_select(0, rows.slot)
    banned |= _column(rows.flag(ParamFlags.ALLOWED)) & ~_unpack_bits(allowed_bits, vocab_size)
    banned |= _banned_ids(rows)

    y = raw
    if layout.max_logit_bias:
        bias_ids = _used(rows, layout.bias_ids, layout.max_logit_bias, Param.NUM_BIAS)
        # Unused entries go to a column past the vocabulary.
        bias = torch.zeros(raw.shape[0], vocab_size + 1, device=raw.device)
        bias.scatter_(1, bias_ids, record.f32_list(layout.bias_values, layout.max_logit_bias))
        bias = bias[:, :vocab_size]
        banned |= bias == -torch.inf
        y = y + bias
    if layout.penalties:
        y = _penalise(y, rows, tables)
    y = torch.where(banned, -torch.inf, y.clamp(-_FLT_MAX, _FLT_MAX)) + 0.0

    infinite = (raw == torch.inf) & ~banned
    positive_infinity = infinite.any(1)
    y = torch.where(
        _column(positive_infinity), torch.zeros_like(y).masked_fill_(~infinite, -torch.inf), y
    )
    empty = (y == -torch.inf).all(1)
    fallback = torch.zeros_like(rows.slot)
    if allowed is not None:
        first = torch.where(allowed, rows.ids, vocab_size).amin(1)
        fallback = torch.where(first < vocab_size, first, 0)
    y = torch.where(_column(empty) & (rows.ids == _column(fallback)), 0.0, y)
    return _Processed(y, positive_infinity, empty)


def _used(rows: _Rows, start: int, capacity: int, count: Param) -> Tensor:
    """int64 [c, capacity]: the ids of a list, `vocab_size` where an entry is not used."""
    ids = rows.params.ids(start, capacity)
    position = torch.arange(capacity, device=ids.device)
    return torch.where(position < _column(rows.params.i32(count)), ids, rows.layout.vocab_size)


def _banned_ids(rows: _Rows) -> Tensor:
    """bool [c, V]: stop ids while min_tokens is not reached, and bad words that would complete."""
    layout, record = rows.layout, rows.params
    stop_ids = _used(rows, layout.stop_ids, layout.max_stop_ids, Param.NUM_STOP)
    too_few = rows.state.i32(State.NUM_GENERATED) < record.i32(Param.MIN_TOKENS)
    banned_ids = [torch.where(_column(too_few), stop_ids, layout.vocab_size)]
    if layout.max_bad_words:
        shape = (-1, layout.max_bad_words, layout.max_bad_word_length)
        size = layout.max_bad_words * layout.max_bad_word_length
        bad_words = record.ids(layout.bad_words, size).view(shape)
        prefix = bad_words[:, :, 1:]
        recent = rows.state.ids(State.RECENT, layout.recent_tokens).unsqueeze(1)
        matches = ((prefix == -1) | (prefix == recent)).all(2)
        used = torch.arange(layout.max_bad_words, device=prefix.device) < _column(
            record.i32(Param.NUM_BAD_WORDS)
        )
        banned_ids.append(torch.where(matches & used, bad_words[:, :, 0], layout.vocab_size))
    banned = torch.zeros(
        rows.slot.shape[0], layout.vocab_size + 1, dtype=torch.bool, device=rows.slot.device
    )
    return banned.scatter_(1, torch.cat(banned_ids, 1), True)[:, : layout.vocab_size]


def _penalise(y: Tensor, rows: _Rows, tables: Tensor) -> Tensor:
    layout, record = rows.layout, rows.params
    prompt, output = (
        _unpack_bits(_bitmap(tables, start, layout).index_select(0, rows.slot), layout.vocab_size)
        for start in (layout.prompt_bits, layout.output_bits)
    )
    counts = torch.where(output, _counts(tables, layout).index_select(0, rows.slot), 0).float()
    repetition = torch.where(prompt | output, _column(record.f32(Param.REPETITION_PENALTY)), 1.0)
    y = torch.where(y > 0, y / repetition, y * repetition)
    # Two operations, never one fused: the product is rounded before the subtraction.
    penalty = _column(record.f32(Param.FREQUENCY_PENALTY)) * counts
    y = y - penalty
    return y - torch.where(output, _column(record.f32(Param.PRESENCE_PENALTY)), 0.0)


@dataclass
class _Kept:
    """The survivors of all filters. z is log2 of a weight; the row's largest weight is 1.

    mask: bool [c, V] by id. masses: int64 [c, V] by id, zero outside. total: int64 [c].
    inverse_temperature: float64 [c], log2(e) / T. maximum, z_maximum: of the row's logits
    (fp32 [c]) and of the survivors' z (float64 [c]).
    """

    mask: Tensor
    masses: Tensor
    total: Tensor
    count: Tensor
    inverse_temperature: Tensor
    maximum: Tensor
    z_maximum: Tensor

    def logprob(self, logits: Tensor) -> Tensor:
        """float64 [c, m] of survivors' logits [c, m]: log of the renormalised probability."""
        z = (logits.double() - _column(self.maximum).double()) * _column(self.inverse_temperature)
        return (z - _column(self.z_maximum)) * LN_2 - _column(_log_of(self.total))


def _log_of(total: Tensor) -> Tensor:
    return exact_math.log(total.double() * (1.0 / _SCALE))


def _first(sorted_mask: Tensor, values: Tensor) -> Tensor:
    """The first value under the mask of each row."""
    position = torch.where(
        sorted_mask, torch.arange(values.shape[1], device=values.device), values.shape[1] - 1
    ).amin(1, keepdim=True)
    return values.gather(1, position)


def _filter(y: Tensor, rows: _Rows) -> _Kept:
    record = rows.params
    inverse_temperature = LOG2_E / record.f32(Param.TEMPERATURE).double()
    # The stable sort keeps ids ascending among equals.
    y_sorted, order = torch.sort(y, dim=1, descending=True, stable=True)
    maximum = y_sorted[:, :1]
    kept = y_sorted > -torch.inf
    z = (y_sorted.double() - maximum.double()) * _column(inverse_temperature)
    weights = exact_math.exp2(z)
    masses = exact_math.masses(weights)
    rank = torch.arange(y.shape[1], device=y.device)

    kept = kept & _within_sigma(y_sorted, kept, record.f32(Param.TOP_N_SIGMA))
    bound = exact_math.round_down_to_fp32(maximum[:, 0].double() + record.f64(Param.MIN_P_OFFSET))
    kept &= (y_sorted >= _column(bound)) | _column(record.f32(Param.MIN_P) <= 0)
    top_k = torch.where(rows.flag(ParamFlags.GREEDY), 1, record.i32(Param.TOP_K))
    kept &= (rank < _column(top_k)) | _column(top_k <= 0)
    kept &= _within_top_p(masses, kept, record.f32(Param.TOP_P))
    kept &= _within_typical(z, masses, kept, record.f32(Param.TYPICAL_P))

    # typical_p may drop the row's maximum: masses start again from the survivors' own.
    weights = weights / _first(kept, weights)
    masses = exact_math.masses(torch.where(kept, weights, 0.0))
    z_maximum = _first(kept, z)
    is_maximum = y_sorted == _first(kept, y_sorted)
    cutoff = _column(record.f32(Param.EPSILON_CUTOFF).double())
    total = _column(masses.sum(1)).double() * (1.0 / _SCALE)
    kept &= (weights >= cutoff * total) | is_maximum
    masses = masses.masked_fill(~kept, 0)

    cutoff = _column(record.f32(Param.ETA_CUTOFF).double())
    total = _column(masses.sum(1)).double() * (1.0 / _SCALE)
    mean = _mean_z(z - z_maximum, masses, kept)
    eta = torch.minimum(cutoff * total, cutoff.sqrt() * exact_math.exp2(mean))
    kept &= (weights >= eta) | is_maximum
    masses = masses.masked_fill(~kept, 0)

    return _Kept(
        mask=torch.zeros_like(kept).scatter_(1, order, kept),
        masses=torch.zeros_like(masses).scatter_(1, order, masses),
        total=masses.sum(1),
        count=kept.sum(1),
        inverse_temperature=inverse_temperature,
        maximum=maximum[:, 0],
        z_maximum=z_maximum[:, 0],
    )


def _within_sigma(y: Tensor, kept: Tensor, n_sigma: Tensor) -> Tensor:
    """y >= maximum - n * standard deviation; sums in integers, scaled by the row's own range."""
    values = y.double()
    maximum = values[:, :1]
    spread = (maximum - torch.where(kept, values, torch.inf).amin(1, keepdim=True)).clamp(
        min=torch.finfo(torch.float64).tiny
    )
    count = _column(kept.sum(1)).double()
    distance = torch.where(kept, (maximum - values) / spread, 0.0)
    mean = _column(exact_math.masses(distance).sum(1)).double() / (count * _SCALE)
    square = torch.where(kept, (distance - mean).square(), 0.0)
    variance = _column(exact_math.masses(square).sum(1)).double() / (count * _SCALE)
    bound = maximum - _column(n_sigma).double() * (variance.sqrt() * spread)
    return (values >= bound) | _column(n_sigma <= 0)


def _target(fraction: Tensor, total: Tensor) -> Tensor:
    """int64 [c, 1]: the mass that a prefix must reach."""
    return _column((fraction.double() * total.double()).ceil().long())


def _within_top_p(masses: Tensor, kept: Tensor, top_p: Tensor) -> Tensor:
    masses = masses.masked_fill(~kept, 0)
    cumulative = masses.cumsum(1)
    target = _target(top_p, cumulative[:, -1])
    return (cumulative - masses < target) | _column(top_p >= 1)


def _mean_z(z: Tensor, masses: Tensor, kept: Tensor) -> Tensor:
    """float64 [c, 1]: the mean of z under the survivors' distribution.

    -H / ln 2 = mean - log2(total), so entropies need no logarithm of their own.
    """
    # |w log2 w| <= log2(e) / e = 0.531, which keeps the integers in range.
    moment = torch.where(kept & (masses > 0), masses.double() * z, 0.0).round().long().sum(1)
    return _column(moment.double() / masses.masked_fill(~kept, 0).sum(1).double())


def _within_typical(z: Tensor, masses: Tensor, kept: Tensor, typical_p: Tensor) -> Tensor:
    """The nearest to the mean of z until their mass reaches p; equal distances all stay.

    |-ln p - H| = |z - mean| ln 2. Along the sorted row the distances fall, then rise, so that the
    tokens within a distance are an interval of it, found by binary search for every token's own.
    """
    masses = masses.masked_fill(~kept, 0)
    cumulative = masses.cumsum(1)
    before = torch.nn.functional.pad(cumulative, (1, 0))
    mean = _mean_z(z, masses, kept)
    ascending = torch.where(kept, mean - z, torch.inf)
    distance = ascending.abs()
    low = torch.searchsorted(ascending, -distance, right=False)
    high = torch.searchsorted(ascending, distance, right=True)
    mass = before.gather(1, high) - before.gather(1, low)
    reaches = kept & (mass >= _target(typical_p, cumulative[:, -1]))
    cutoff = torch.where(reaches, distance, torch.inf).amin(1, keepdim=True)
    return (distance <= cutoff) | _column(typical_p >= 1)


def _draw(kept: _Kept, word: Tensor) -> Tensor:
    """int64 [c]: the first id whose cumulative mass exceeds floor(word * total / 2**64)."""
    threshold = exact_math.multiply_high(word, kept.total)
    return (kept.masses.cumsum(1) <= _column(threshold)).sum(1)


@dataclass
class RawDistribution:
    """log_softmax of sanitised logits, without forming it: what one row's logprobs need.

    maximum: fp32 [c, 1]. log_total: float64 [c, 1], the log of the sum of exp(x - maximum), or of
    the number of +inf entries where there are some.
    """

    maximum: Tensor
    log_total: Tensor

    @classmethod
    def of(cls, raw: Tensor) -> RawDistribution:
        maximum = raw.amax(1, keepdim=True)
        finite_maximum = maximum.nan_to_num(posinf=0.0, neginf=0.0).double()
        z = (raw.double() - finite_maximum) * LOG2_E
        weights = exact_math.exp2(z.clamp_(max=0.0)).masked_fill_(raw == -torch.inf, 0.0)
        # Where the maximum is +inf only its equals count; where it is -inf the sum is never read.
        weights = torch.where(maximum == torch.inf, (raw == torch.inf).double(), weights)
        total = exact_math.masses(weights).sum(1).clamp(min=1)
        return cls(maximum, _column(_log_of(total)))

    def logprob(self, logits: Tensor) -> Tensor:
        """float64 [c, m] of sanitised logits [c, m]."""
        difference = torch.where(
            logits == self.maximum, 0.0, logits.double() - self.maximum.double()
        )
        logprob = difference - self.log_total
        return torch.where(logits == -torch.inf, -torch.inf, logprob)


def _top(values: Tensor, count: int) -> Tensor:
    """int64 [c, count]: ids of the largest values (fp32 [c, V]) in (value desc, id asc)."""
    bits = values.view(torch.int32)
    # Signed integers in the order of the floats: negative floats have their other bits flipped.
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    ids = torch.arange(values.shape[1], device=values.device)
    keys = (ordered << 32) + (0x7FFFFFFF - ids)  # distinct, so that no tie is left to topk
    return 0x7FFFFFFF - (keys.topk(count, dim=1).values & 0xFFFFFFFF)


def _write_output(
    output: Tensor,
    rows: _Rows,
    raw: Tensor,
    processed: _Processed,
    kept: _Kept,
    token: Tensor,
    *,
    nan_rows: Tensor,
    admitted: Tensor,
    finished: Tensor,
) -> None:
    """Fill the output record of every row."""
    layout, record = rows.layout, rows.params
    live = admitted & ~finished
    distribution = RawDistribution.of(raw)
    in_processed = _column(rows.flag(ParamFlags.PROCESSED))

    def logprobs_of(ids: Tensor) -> Tensor:
        of_raw = distribution.logprob(raw.gather(1, ids))
        of_kept = kept.logprob(processed.logits.gather(1, ids))
        of_kept = torch.where(kept.mask.gather(1, ids), of_kept, -torch.inf)
        return torch.where(in_processed, of_kept, of_raw).float()

    drawn = _column(token)
    wanted = live & rows.flag(ParamFlags.LOGPROBS)
    logprob = torch.where(_column(wanted), logprobs_of(drawn), math.nan)

    ranked = torch.where(in_processed, processed.logits, raw)
    rank = (ranked > ranked.gather(1, drawn)).sum(1) + 1
    rank = torch.where(live & rows.flag(ParamFlags.RANK), rank, 0)

    one = rows.flag(ParamFlags.GREEDY) | processed.empty
    num_kept = torch.where(rows.flag(ParamFlags.FILTERED) | one, kept.count, 0)

    generated = rows.state.i32(State.NUM_GENERATED) + 1
    stop_ids = _used(rows, layout.stop_ids, layout.max_stop_ids, Param.NUM_STOP)
    stops = (stop_ids == drawn).any(1)
    max_tokens = record.i32(Param.MAX_TOKENS)
    full = (max_tokens > 0) & (generated >= max_tokens)
    finish = torch.where(full, int(FinishReason.LENGTH), int(FinishReason.NONE))
    finish = torch.where(stops, int(FinishReason.STOP), finish)
    finish = torch.where(finished, rows.state.i32(State.FINISH_REASON), finish)

    flags = (
        nan_rows * int(RowFlags.NAN)
        + processed.positive_infinity * int(RowFlags.POS_INF)
        + processed.empty * int(RowFlags.EMPTY)
    )
    flags = torch.where(finished, int(RowFlags.FINISHED), flags)
    flags = torch.where(admitted, flags, int(RowFlags.PADDING))

    fields = [
        _column(torch.where(live, token, -1)).view(torch.int32),
        logprob.view(torch.int32),
        _column(rank),
        _column(torch.where(live, num_kept, 0)),
        _column(torch.where(admitted, finish, 0)),
        _column(flags),
        _column(torch.where(admitted, rows.state.i32(State.GENERATION), 0)),
    ]
    if layout.max_logprobs:
        values = ranked.masked_fill(in_processed & ~kept.mask, -torch.inf)
        count = min(layout.max_logprobs, layout.vocab_size)
        ids = _top(values, count)
        listed = values.gather(1, ids) > -torch.inf
        logprobs = torch.where(listed, logprobs_of(ids), -torch.inf)
        ids = torch.where(listed, ids, -1)
        missing = (0, layout.max_logprobs - count)
        ids = torch.nn.functional.pad(ids, missing, value=-1)
        logprobs = torch.nn.functional.pad(logprobs, missing, value=-math.inf)
        column = torch.arange(layout.max_logprobs, device=raw.device)
        asked = (column < _column(record.i32(Param.TOP_LOGPROBS))) & _column(live)
        fields.append(torch.where(asked, ids, -1).view(torch.int32))
        fields.append(torch.where(asked, logprobs, math.nan).view(torch.int32))
    if layout.max_logprob_ids:
        ids = _used(rows, layout.given_ids, layout.max_logprob_ids, Param.NUM_GIVEN)
        asked = (ids < layout.vocab_size) & _column(live)
        given = logprobs_of(ids.clamp(max=layout.vocab_size - 1))
        fields.append(torch.where(asked, given, math.nan).view(torch.int32))
    written = torch.cat([f.to(torch.int32) for f in fields], 1)
    output[:, : written.shape[1]].copy_(written)


def _advance(
    state: Tensor, tables: Tensor, rows: _Rows, token: Tensor, *, finish: Tensor, live: Tensor
) -> None:
    """Advance the state of live rows; the others write to the padding row."""
    layout, record = rows.layout, rows.state
    target = torch.where(live, rows.slot, layout.max_requests)
    token32 = _column(token.to(torch.int32))
    advanced = record.int32.clone()
    advanced[:, State.POSITION : State.POSITION + 2] = _column(record.i64(State.POSITION) + 1).view(
        torch.int32
    )
    advanced[:, State.LAST_TOKEN : State.LAST_TOKEN + 2] = _column(token).view(torch.int32)
    advanced[:, State.NUM_GENERATED] += 1
    advanced[:, State.FINISH_REASON] = finish
    if layout.recent_tokens:
        recent = record.int32[:, State.RECENT : State.RECENT + layout.recent_tokens - 1]
        advanced[:, State.RECENT : State.RECENT + layout.recent_tokens] = torch.cat(
            [token32, recent], 1
        )
    state.index_copy_(0, target, advanced)
    if not layout.penalties:
        return
    word = layout.output_bits + target * layout.bitmap_words + token // 32
    bit = torch.ones_like(token) << (token % 32)
    bits = tables.index_select(0, word).long()
    count_at = layout.counts + target * layout.vocab_size + token
    count = torch.where((bits & bit) != 0, tables.index_select(0, count_at), 0) + 1
    tables.index_copy_(0, count_at, count.to(torch.int32))
    tables.index_copy_(0, word, (bits | bit).to(torch.int32))
