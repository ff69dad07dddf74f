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
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Final

import torch
from torch import Tensor

from graphed_sampling.advance import advance
from graphed_sampling.backends import exact_math
from graphed_sampling.backends.exact_math import LN_2, MASS_BITS
from graphed_sampling.backends.position_records import (
    PositionColumns,
    Positions,
    write_positions,
)
from graphed_sampling.layout import (
    HEADER_WORDS,
    FinishReason,
    Param,
    ParamFlags,
    RowFlags,
    State,
    TableLayout,
)
from graphed_sampling.params import LOG2_E

NAME: Final = "torch"
CHOSEN_FOR: Final = "any device that no other backend serves"
REFUSES: Final[frozenset[str]] = frozenset()

# Rows are worked on in chunks of at most so many logits, which bounds the working memory to about
# 2 GB. A row's result does not depend on the chunk it is in.
_CHUNK_ELEMENTS: Final = 2**24
_FLT_MAX: Final = torch.finfo(torch.float32).max
_SCALE: Final = 2.0**MASS_BITS
_FLAG_COLUMN: Final = {flag: i for i, flag in enumerate(ParamFlags)}


def unusable(device: torch.device) -> str:
    """Why the backend cannot run on `device`; empty where it can."""
    if device.type == "mps":
        return "the device has no float64"
    return ""


def canonical_order(vocab_size: int) -> Tensor:
    """int64 [vocab_size]: ids ascending."""
    return torch.arange(vocab_size, device="cpu")


def scratch_words(layout: TableLayout, rows: int) -> int:
    """int32 words of scratch that a step of `rows` rows needs: none, torch's allocator serves."""
    return 0


def warm_up(
    layout: TableLayout, device: torch.device, logits_dtypes: Sequence[torch.dtype]
) -> None:
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
    n = slots.shape[0]
    rows = _Rows.load(slots, params, state, layout)
    word = torch.ops.graphed_sampling.philox_words(
        rows.params.i64(Param.SEED), rows.state.i64(State.POSITION)
    )
    if words is not None:
        word = words if given is None else torch.where(given[1] != 0, words, word)
    chunk_rows = max(1, _CHUNK_ELEMENTS // layout.vocab_size)
    chunks = []
    for start in range(0, n, chunk_rows):
        chunk = slice(start, start + chunk_rows)
        allowed = None
        if grammar_bitmask is not None:
            allowed = _unpack_bits(grammar_bitmask[chunk, : layout.bitmap_words], layout.vocab_size)
            if given is not None:
                allowed |= given[0] == 0
        chunks.append(_draw_chunk(logits[chunk], rows.chunk(chunk), tables, allowed, word[chunk]))
    drawn = _Drawn.join(chunks)
    finish = _finish_reasons(rows, drawn.token)
    _write_output(output[:n], rows, drawn, finish)
    # Rows that are not live write to the padding row.
    target = rows.slot.masked_fill(~rows.live, layout.max_requests)
    advance(state, tables, layout, rows.state.int32, target, drawn.token, finish)


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
    """What is known of the rows of a step before their logits are looked at.

    slot: int64 [n], the table's row to read: the padding row for rows without a slot.
    flags: bool [n, flags], a column for each of ParamFlags. reals: float64 [n, HEADER_WORDS], the
    header's fp32 values. top_k: int32 [n], 1 for greedy rows. inverse_temperature: float64 [n],
    log2(e) / T. admitted, finished, live: bool [n].
    stop_ids, given_ids: int64 [n, capacity], `vocab_size` where an entry is not used.
    banned_ids: the same, of stop ids while min_tokens is not reached, and bad words to complete.
    """

    layout: TableLayout
    params: _Record
    state: _Record
    slot: Tensor
    flags: Tensor
    reals: Tensor
    top_k: Tensor
    inverse_temperature: Tensor
    admitted: Tensor
    finished: Tensor
    live: Tensor
    stop_ids: Tensor
    given_ids: Tensor
    banned_ids: Tensor

    @classmethod
    def load(cls, slots: Tensor, params: Tensor, state: Tensor, layout: TableLayout) -> _Rows:
        outside = (slots < 0) | (slots >= layout.max_requests)
        slot = slots.long().masked_fill_(outside, layout.max_requests)
        param = _Record(params.index_select(0, slot))
        states = _Record(state.index_select(0, slot))
        bits = 1 << torch.arange(len(ParamFlags), device=slots.device, dtype=torch.int32)
        flags = (_column(param.i32(Param.FLAGS)) & bits) != 0
        admitted = flags[:, _FLAG_COLUMN[ParamFlags.ADMITTED]]
        ended = states.i32(State.FINISH_REASON) != FinishReason.NONE
        reals = param.int32[:, :HEADER_WORDS].view(torch.float32).double()
        top_k = param.i32(Param.TOP_K)
        top_k = top_k.masked_fill(top_k <= 0, layout.vocab_size)
        stop_ids = _used(param, layout, layout.stop_ids, layout.max_stop_ids, Param.NUM_STOP)
        return cls(
            layout=layout,
            params=param,
            state=states,
            slot=slot,
            flags=flags,
            reals=reals,
            top_k=top_k.masked_fill_(flags[:, _FLAG_COLUMN[ParamFlags.GREEDY]], 1),
            inverse_temperature=LOG2_E / reals[:, Param.TEMPERATURE],
            admitted=admitted,
            finished=admitted & ended,
            live=admitted & ~ended,
            stop_ids=stop_ids,
            given_ids=_used(
                param, layout, layout.given_ids, layout.max_logprob_ids, Param.NUM_GIVEN
            ),
            banned_ids=_banned_ids(param, states, layout, stop_ids),
        )

    def chunk(self, rows: slice) -> _Rows:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, value in values.items():
            if isinstance(value, Tensor):
                values[name] = value[rows]
            elif isinstance(value, _Record):
                values[name] = _Record(value.int32[rows])
        return _Rows(**values)

    def flag(self, flag: ParamFlags) -> Tensor:
        return self.flags[:, _FLAG_COLUMN[flag]]

    def real(self, word: Param) -> Tensor:
        """float64 [n, 1]: an fp32 value of the header."""
        return self.reals[:, word : word + 1]


def _column(row_values: Tensor) -> Tensor:
    return row_values.unsqueeze(1)


def _unpack_bits(bits: Tensor, vocab_size: int) -> Tensor:
    """bool [c, vocab_size] of a bitmap int32 [c, W]."""
    # Bit 31 is the sign bit, so the words' bytes are taken apart instead of the words.
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    unpacked = (bits.contiguous().view(torch.uint8).unsqueeze(-1) >> shifts) & 1
    return unpacked.view(torch.bool).flatten(1)[:, :vocab_size]


def _bitmap(tables: Tensor, start: int, rows: _Rows) -> Tensor:
    """int32 [c, W]: the rows of a bitmap."""
    layout = rows.layout
    bitmap = tables[start : start + layout.rows * layout.bitmap_words]
    return bitmap.view(layout.rows, layout.bitmap_words).index_select(0, rows.slot)


def _used(params: _Record, layout: TableLayout, start: int, capacity: int, count: Param) -> Tensor:
    ids = params.ids(start, capacity)
    position = torch.arange(capacity, device=ids.device)
    return ids.masked_fill_(position >= _column(params.i32(count)), layout.vocab_size)


def _banned_ids(params: _Record, state: _Record, layout: TableLayout, stop_ids: Tensor) -> Tensor:
    enough = state.i32(State.NUM_GENERATED) >= params.i32(Param.MIN_TOKENS)
    stop_ids = stop_ids.masked_fill(_column(enough), layout.vocab_size)
    if not layout.max_bad_words:
        return stop_ids
    size = layout.max_bad_words * layout.max_bad_word_length
    bad_words = params.ids(layout.bad_words, size)
    bad_words = bad_words.view(-1, layout.max_bad_words, layout.max_bad_word_length)
    prefix = bad_words[:, :, 1:]
    recent = state.ids(State.RECENT, layout.recent_tokens).unsqueeze(1)
    differs = ((prefix != -1) & (prefix != recent)).any(2)
    position = torch.arange(layout.max_bad_words, device=prefix.device)
    unused = position >= _column(params.i32(Param.NUM_BAD_WORDS))
    banned = bad_words[:, :, 0].masked_fill(differs | unused, layout.vocab_size)
    return torch.cat([stop_ids, banned], 1)


@dataclass
class _Drawn:
    """What the logits gave, for c rows: enough to finish them without looking at V tokens again.

    ids: int64 [c, m], the drawn token, the given ids and the top ids, in this order; raw, processed
    and kept are what raw logits, processed logits and the survivors' mask hold there. rank is of
    the drawn token. The rest are sums and maxima of `_Kept` and `_RawSums`, and bool row flags.
    """

    token: Tensor
    ids: Tensor
    raw: Tensor
    processed: Tensor
    kept: Tensor
    rank: Tensor
    num_kept: Tensor
    raw_maximum: Tensor
    raw_total: Tensor
    maximum: Tensor
    z_maximum: Tensor
    total: Tensor
    has_nan: Tensor
    positive_infinity: Tensor
    empty: Tensor

    @classmethod
    def join(cls, chunks: list[_Drawn]) -> _Drawn:
        if len(chunks) == 1:
            return chunks[0]
        return cls(*(torch.cat([getattr(c, f.name) for c in chunks]) for f in fields(cls)))


def _draw_chunk(
    logits: Tensor, rows: _Rows, tables: Tensor, allowed: Tensor | None, word: Tensor
) -> _Drawn:
    layout = rows.layout
    vocab_size = layout.vocab_size
    raw, is_nan = sanitised(logits, vocab_size)
    y, positive_infinity, empty = _process(raw, rows, tables, allowed)
    kept = _filter(y, rows)
    token = kept.draw(word)

    processed_mode = _column(rows.flag(ParamFlags.PROCESSED))
    ranked = torch.where(processed_mode, y, raw)
    rank = (ranked > ranked.gather(1, _column(token))).sum(1) + 1
    ids = [_column(token)]
    if layout.max_logprob_ids:
        ids.append(rows.given_ids.clamp(max=vocab_size - 1))
    if layout.max_logprobs:
        values = ranked.masked_fill_(processed_mode & ~kept.mask, -torch.inf)
        ids.append(_top(values, min(layout.max_logprobs, vocab_size)))
    all_ids = torch.cat(ids, 1)
    raw_maximum, raw_total = _raw_sums(raw)
    return _Drawn(
        token=token,
        ids=all_ids,
        raw=raw.gather(1, all_ids),
        processed=y.gather(1, all_ids),
        kept=kept.mask.gather(1, all_ids),
        rank=rank,
        num_kept=kept.count,
        raw_maximum=raw_maximum,
        raw_total=raw_total,
        maximum=kept.maximum,
        z_maximum=kept.z_maximum,
        total=kept.total,
        has_nan=is_nan.any(1),
        positive_infinity=positive_infinity,
        empty=empty,
    )


def sanitised(logits: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """fp32 [c, vocab_size], NaN as -inf and -0.0 as 0.0; and bool, where NaN was."""
    raw = logits[:, :vocab_size].float()
    is_nan = raw.isnan()
    # Adding zero turns -0.0 into 0.0.
    return raw.masked_fill(is_nan, -torch.inf).add_(0.0), is_nan


def _process(
    raw: Tensor, rows: _Rows, tables: Tensor, allowed: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The contract's y, fp32 [c, V], -inf where banned; and which rows hold +inf, or nothing.

    Masks, bias and penalties come in the contract's order, and each operation rounds once.
    """
    layout = rows.layout
    vocab_size = layout.vocab_size
    ids = torch.arange(vocab_size, device=raw.device)
    banned = raw == -torch.inf
    if allowed is not None:
        banned |= ~allowed
    allowed_ids = _unpack_bits(_bitmap(tables, layout.allowed_bits, rows), vocab_size)
    banned |= _column(rows.flag(ParamFlags.ALLOWED)) & ~allowed_ids
    banned |= torch.zeros(
        raw.shape[0], vocab_size + 1, dtype=torch.bool, device=raw.device
    ).scatter_(1, rows.banned_ids, True)[:, :vocab_size]

    y = raw
    if layout.max_logit_bias:
        bias_ids = _used(
            rows.params, layout, layout.bias_ids, layout.max_logit_bias, Param.NUM_BIAS
        )
        # Unused entries go to a column past the vocabulary.
        bias = torch.zeros(raw.shape[0], vocab_size + 1, dtype=torch.float32, device=raw.device)
        bias.scatter_(1, bias_ids, rows.params.f32_list(layout.bias_values, layout.max_logit_bias))
        bias = bias[:, :vocab_size]
        banned |= bias == -torch.inf
        y = y + bias
    if layout.penalties:
        y = _penalise(y, rows, tables)
    y = y.clamp(-_FLT_MAX, _FLT_MAX).add_(0.0)

    infinite = (raw == torch.inf) & ~banned
    positive_infinity = infinite.any(1)
    is_infinite_row = _column(positive_infinity)
    y.masked_fill_(banned | (is_infinite_row & ~infinite), -torch.inf)
    y.masked_fill_(infinite, 0.0)
    empty = (y == -torch.inf).all(1)
    fallback: Tensor | int = 0
    if allowed is not None:
        first = ids.masked_fill(~allowed, vocab_size).amin(1, keepdim=True)
        fallback = first.masked_fill_(first == vocab_size, 0)
    y.masked_fill_(_column(empty) & (ids == fallback), 0.0)
    return y, positive_infinity, empty


def _penalise(y: Tensor, rows: _Rows, tables: Tensor) -> Tensor:
    layout, record = rows.layout, rows.params
    prompt = _unpack_bits(_bitmap(tables, layout.prompt_bits, rows), layout.vocab_size)
    output = _unpack_bits(_bitmap(tables, layout.output_bits, rows), layout.vocab_size)
    counts = tables[layout.counts : layout.tables_words].view(layout.rows, layout.vocab_size)
    counts = counts.index_select(0, rows.slot).masked_fill_(~output, 0).float()
    repetition = _column(record.f32(Param.REPETITION_PENALTY))
    penalised = torch.where(y > 0, y / repetition, y * repetition)
    y = torch.where(prompt | output, penalised, y)
    # Two operations, never one fused: the product is rounded before the subtraction.
    y = y - counts.mul_(_column(record.f32(Param.FREQUENCY_PENALTY)))
    return y.sub_(output * _column(record.f32(Param.PRESENCE_PENALTY)))


@dataclass
class _Kept:
    """The survivors of all filters. z is log2 of a weight; the row's largest weight is 1.

    mask: bool [c, V] by id. masses: int64 [c, V] by id, zero outside. total, count: int64 [c].
    maximum, z_maximum: of the row's logits (fp32 [c]) and of the survivors' z (float64 [c]).
    """

    mask: Tensor
    masses: Tensor
    total: Tensor
    count: Tensor
    maximum: Tensor
    z_maximum: Tensor

    def draw(self, word: Tensor) -> Tensor:
        """int64 [c]: the first id whose cumulative mass exceeds floor(word * total / 2**64)."""
        threshold = exact_math.multiply_high(word, self.total)
        cumulative = exact_math.cumulative_sum(self.masses)
        return (cumulative <= _column(threshold)).sum(1)


def _filter(y: Tensor, rows: _Rows) -> _Kept:
    # The stable sort keeps ids ascending among equals.
    y_sorted, order = torch.sort(y, dim=1, descending=True, stable=True)
    maximum = y_sorted[:, :1]
    kept = y_sorted > -torch.inf
    z = (y_sorted.double() - maximum.double()) * _column(rows.inverse_temperature)
    weights = exact_math.exp2(z)
    masses = exact_math.masses(weights)
    rank = torch.arange(y.shape[1], device=y.device)

    kept &= _within_sigma(y_sorted, kept, rows.real(Param.TOP_N_SIGMA))
    offset = _column(rows.params.f64(Param.MIN_P_OFFSET))
    bound = exact_math.round_down_to_fp32(maximum.double() + offset)
    kept &= (y_sorted >= bound) | (rows.real(Param.MIN_P) <= 0)
    kept &= rank < _column(rows.top_k)
    kept &= _within_top_p(masses, kept, rows.real(Param.TOP_P))
    kept &= _within_typical(z, masses, kept, rows.real(Param.TYPICAL_P))

    # typical_p may drop the row's maximum: masses start again from the survivors' own.
    first = rank.masked_fill(~kept, y.shape[1]).amin(1, keepdim=True)
    weights = weights / weights.gather(1, first)
    masses = exact_math.masses(weights.masked_fill(~kept, 0.0))
    z_maximum = z.gather(1, first)
    is_maximum = y_sorted == y_sorted.gather(1, first)
    cutoff = rows.real(Param.EPSILON_CUTOFF)
    total = masses.sum(1, keepdim=True).double() * (1.0 / _SCALE)
    kept &= (weights >= cutoff * total) | is_maximum
    masses.masked_fill_(~kept, 0)

    cutoff = rows.real(Param.ETA_CUTOFF)
    total = masses.sum(1, keepdim=True).double()
    mean = _mean_z(z - z_maximum, masses, total)
    eta = torch.minimum(cutoff * (total * (1.0 / _SCALE)), cutoff.sqrt() * exact_math.exp2(mean))
    kept &= (weights >= eta) | is_maximum
    masses.masked_fill_(~kept, 0)

    return _Kept(
        mask=torch.zeros_like(kept).scatter_(1, order, kept),
        masses=torch.zeros_like(masses).scatter_(1, order, masses),
        total=masses.sum(1),
        count=kept.sum(1),
        maximum=maximum[:, 0],
        z_maximum=z_maximum[:, 0],
    )


def _within_sigma(y: Tensor, kept: Tensor, n_sigma: Tensor) -> Tensor:
    """y >= maximum - n * standard deviation; sums in integers, scaled by the row's own range."""
    values = y.double()
    maximum = values[:, :1]
    smallest = values.masked_fill(~kept, torch.inf).amin(1, keepdim=True)
    spread = (maximum - smallest).clamp_(min=torch.finfo(torch.float64).tiny)
    count = kept.sum(1, keepdim=True).double() * _SCALE
    distance = ((maximum - values) / spread).masked_fill_(~kept, 0.0)
    mean = exact_math.masses(distance).sum(1, keepdim=True).double() / count
    square = distance.sub_(mean).square_().masked_fill_(~kept, 0.0)
    variance = exact_math.masses(square).sum(1, keepdim=True).double() / count
    bound = maximum - n_sigma * (variance.sqrt() * spread)
    return (values >= bound) | (n_sigma <= 0)


def _target(fraction: Tensor, total: Tensor) -> Tensor:
    """int64 [c, 1]: the mass that a prefix must reach."""
    # At least 1, also in a thread that takes a subnormal fraction for 0.
    return (fraction * total.double()).ceil_().long().clamp_(min=1).minimum(total)


def _within_top_p(masses: Tensor, kept: Tensor, top_p: Tensor) -> Tensor:
    masses = masses.masked_fill(~kept, 0)
    cumulative = exact_math.cumulative_sum(masses)
    target = _target(top_p, cumulative[:, -1:])
    return (cumulative - masses < target) | (top_p >= 1)


def _mean_z(z: Tensor, masses: Tensor, total: Tensor) -> Tensor:
    """float64 [c, 1]: the mean of z under the distribution masses / total.

    -H / ln 2 = mean - log2(total), so that entropies need no logarithm of their own.
    """
    # |w log2 w| <= log2(e) / e = 0.531, which keeps the integers in range.
    moment = (masses.double() * z).masked_fill_(masses == 0, 0.0).round_().long()
    return moment.sum(1, keepdim=True).double() / total


def _within_typical(z: Tensor, masses: Tensor, kept: Tensor, typical_p: Tensor) -> Tensor:
    """The nearest to the mean of z until their mass reaches p; equal distances all stay.

    |-ln p - H| = |z - mean| ln 2. Along the sorted row the distances fall, then rise, so that the
    tokens within a distance are an interval of it, found by binary search for every token's own.
    """
    masses = masses.masked_fill(~kept, 0)
    cumulative = exact_math.cumulative_sum(masses)
    total = cumulative[:, -1:]
    before = torch.nn.functional.pad(cumulative, (1, 0))
    mean = _mean_z(z, masses, total.double())
    ascending = (mean - z).masked_fill_(~kept, torch.inf)
    distance = ascending.abs()
    mass = before.gather(1, torch.searchsorted(ascending, distance, right=True))
    mass -= before.gather(1, torch.searchsorted(ascending, -distance, right=False))
    short = ~kept | (mass < _target(typical_p, total))
    cutoff = distance.masked_fill(short, torch.inf).amin(1, keepdim=True)
    return (distance <= cutoff) | (typical_p >= 1)


def _raw_sums(raw: Tensor) -> tuple[Tensor, Tensor]:
    """What log_softmax of sanitised logits [c, V] needs: their maximum fp32 [c], and int64 [c] the
    mass of all of them, relative to the maximum's. +inf entries are each other's equals.
    """
    maximum = raw.amax(1, keepdim=True)
    finite_maximum = maximum.double().masked_fill_(maximum.isinf(), 0.0)
    weights = exact_math.exp2(((raw.double() - finite_maximum) * LOG2_E).clamp_(max=0.0))
    weights.masked_fill_((raw == -torch.inf) | ((maximum == torch.inf) & (raw < maximum)), 0.0)
    return maximum[:, 0], exact_math.masses(weights).sum(1)


def raw_logprobs(raw: Tensor, maximum: Tensor, total: Tensor) -> Tensor:
    """float64 [c, m]: log_softmax at sanitised logits [c, m], from `_raw_sums` of their rows."""
    maximum = _column(maximum)
    # Equals of the maximum are told apart, since the difference of infinities is NaN.
    difference = (raw.double() - maximum.double()).masked_fill_(raw == maximum, 0.0)
    # A row without a candidate has total 0, and only entries of -inf.
    log_total = _column(exact_math.log(total.clamp(min=1).double() * (1.0 / _SCALE)))
    return (difference - log_total).masked_fill_(raw == -torch.inf, -torch.inf)


def _processed_logprobs(rows: _Rows, drawn: _Drawn) -> Tensor:
    """float64 [n, m]: log of the survivors' renormalised probabilities, -inf outside."""
    z = (drawn.processed.double() - _column(drawn.maximum).double()) * _column(
        rows.inverse_temperature
    )
    log_total = _column(exact_math.log(drawn.total.double() * (1.0 / _SCALE)))
    logprobs = (z - _column(drawn.z_maximum)) * LN_2 - log_total
    return logprobs.masked_fill_(~drawn.kept, -torch.inf)


def _top(values: Tensor, count: int) -> Tensor:
    """int64 [c, count]: ids of the largest values (fp32 [c, V]) in (value desc, id asc)."""
    bits = values.view(torch.int32)
    # Signed integers in the order of the floats: negative floats have their other bits flipped.
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    ids = torch.arange(values.shape[1], device=values.device)
    keys = (ordered << 32) + (0x7FFFFFFF - ids)  # distinct, so that no tie is left to topk
    return 0x7FFFFFFF - (keys.topk(count, dim=1).values & 0xFFFFFFFF)


def _finish_reasons(rows: _Rows, token: Tensor) -> Tensor:
    """int32 [n]: `FinishReason` after this step."""
    stops = (rows.stop_ids == _column(token)).any(1)
    max_tokens = rows.params.i32(Param.MAX_TOKENS)
    full = (max_tokens > 0) & (rows.state.i32(State.NUM_GENERATED) + 1 >= max_tokens)
    finish = full * int(FinishReason.LENGTH)
    finish = finish.masked_fill_(stops, int(FinishReason.STOP)).to(torch.int32)
    finish = torch.where(rows.finished, rows.state.i32(State.FINISH_REASON), finish)
    return finish.masked_fill_(~rows.admitted, int(FinishReason.NONE))


def _write_output(output: Tensor, rows: _Rows, drawn: _Drawn, finish: Tensor) -> None:
    """Fill the output record of every row."""
    layout = rows.layout
    idle = ~rows.live
    exact = torch.where(
        _column(rows.flag(ParamFlags.PROCESSED)),
        _processed_logprobs(rows, drawn),
        raw_logprobs(drawn.raw, drawn.raw_maximum, drawn.raw_total),
    )
    logprobs = exact.float()
    logprob = logprobs[:, 0].masked_fill(idle | ~rows.flag(ParamFlags.LOGPROBS), math.nan)
    rank = drawn.rank.masked_fill(idle | ~rows.flag(ParamFlags.RANK), 0)
    counted = rows.flag(ParamFlags.FILTERED) | rows.flag(ParamFlags.GREEDY) | drawn.empty
    flags = (
        drawn.has_nan * int(RowFlags.NAN)
        + drawn.positive_infinity * int(RowFlags.POS_INF)
        + drawn.empty * int(RowFlags.EMPTY)
    )
    flags.masked_fill_(rows.finished, int(RowFlags.FINISHED))
    flags.masked_fill_(~rows.admitted, int(RowFlags.PADDING))
    generation = rows.state.i32(State.GENERATION).masked_fill(~rows.admitted, 0)

    fields = [
        _column(drawn.token.masked_fill(idle, -1)).view(torch.int32),
        _column(logprob).view(torch.int32),
        _column(rank),
        _column(drawn.num_kept.masked_fill(idle | ~counted, 0)),
        _column(finish),
        _column(flags),
        _column(generation),
    ]
    given, top = logprobs[:, 1:].split(
        [layout.max_logprob_ids, logprobs.shape[1] - 1 - layout.max_logprob_ids], 1
    )
    if layout.max_logprobs:
        count = top.shape[1]
        # By the exact ones: a token whose logprob overflows fp32 is there nevertheless.
        ids = drawn.ids[:, -count:].masked_fill(exact[:, -count:] == -torch.inf, -1)
        missing = (0, layout.max_logprobs - count)  # columns that the vocabulary cannot fill
        ids = torch.nn.functional.pad(ids, missing, value=-1)
        top = torch.nn.functional.pad(top, missing, value=-math.inf)
        column = torch.arange(layout.max_logprobs, device=top.device)
        unasked = column >= _column(rows.params.i32(Param.TOP_LOGPROBS))
        unasked |= _column(idle)
        fields.append(ids.masked_fill(unasked, -1).view(torch.int32))
        fields.append(top.masked_fill(unasked, math.nan).view(torch.int32))
    if layout.max_logprob_ids:
        unasked = (rows.given_ids == layout.vocab_size) | _column(idle)
        fields.append(given.masked_fill(unasked, math.nan).view(torch.int32))
    written = torch.cat([f.to(torch.int32) for f in fields], 1)
    output[:, : written.shape[1]].copy_(written)


# Logprobs at many positions.

# Of logits whose entropy is taken at a time, in float64 and int64: some 100 MB of them.
ENTROPY_ELEMENTS: Final = 2**21


def score_rows(
    logits: Tensor,
    positions: Positions,
    output: Tensor,
    layout: TableLayout,
    *,
    rank: bool,
    entropy: bool,
) -> None:
    """Raw logprobs at many positions: see `backends`. It reads every row, chosen or not."""
    count = positions.count
    chunk_rows = max(1, _CHUNK_ELEMENTS // layout.vocab_size)
    for start in range(0, count, chunk_rows):
        part = slice(start, min(start + chunk_rows, count))
        chunk = positions.chunk(part)
        _score_chunk(
            chunk.logits(logits, part), chunk, output[part], layout, rank=rank, entropy=entropy
        )


def _score_chunk(
    logits: Tensor,
    chunk: Positions,
    output: Tensor,
    layout: TableLayout,
    *,
    rank: bool,
    entropy: bool,
) -> None:
    token_ids, given_ids = chunk.accepted_token_ids, chunk.accepted_given_ids
    chosen = _column(chunk.rows >= 0)
    raw, is_nan = sanitised(logits, layout.vocab_size)
    count, missing = layout.max_logprobs, layout.max_logprobs
    ids = [_column(token_ids), given_ids]
    if count:
        count = min(count, layout.vocab_size)
        missing -= count
        ids.append(_top(raw, count))
    all_ids = torch.cat(ids, 1)
    at_ids = raw.gather(1, all_ids.clamp(min=0))
    maximum, total = _raw_sums(raw)
    exact = raw_logprobs(at_ids, maximum, total)
    logprobs = exact.float().masked_fill_((all_ids < 0) | ~chosen, math.nan)
    top_ids = torch.nn.functional.pad(
        all_ids[:, all_ids.shape[1] - count :].masked_fill(
            exact[:, exact.shape[1] - count :] == -torch.inf, -1
        ),
        (0, missing),
        value=-1,
    )
    top = logprobs[:, logprobs.shape[1] - count :]
    top = torch.nn.functional.pad(top, (0, missing), value=-math.inf)
    ranks = torch.zeros_like(token_ids)
    if rank:
        ranks = (raw > at_ids[:, :1]).sum(1).add_(1).masked_fill_(token_ids < 0, 0)
    entropies = torch.full_like(maximum, math.nan)
    if entropy:
        entropies = mode_entropies(raw, maximum, None, None)
    infinite, empty = maximum == torch.inf, maximum == -torch.inf
    flags = (
        is_nan.any(1) * int(RowFlags.NAN)
        + infinite * int(RowFlags.POS_INF)
        + empty * int(RowFlags.EMPTY)
    )
    log_normaliser = exact_math.log(total.clamp(min=1).double() * (1.0 / _SCALE))
    write_positions(
        output, layout, chosen,
        PositionColumns(
            maximum, log_normaliser.masked_fill(empty, 0.0), logprobs[:, 0], ranks,
            torch.zeros_like(ranks), entropies, flags, top_ids, top,
            logprobs[:, 1 : 1 + given_ids.shape[1]],
        ),
    )  # fmt: skip


def mode_entropies(
    values: Tensor, maximum: Tensor, inverse_temperature: Tensor | None, kept: Tensor | None
) -> Tensor:
    """fp32 [c]: entropies in nats of the distributions over sanitised or processed logits [c, V].

    maximum: fp32 [c], the rows' own; +inf where the +inf entries alone count, -inf of empty rows,
    whose entropy is NaN. inverse_temperature: float64 [c], log2(e) / T, default T = 1. kept: bool
    [c, V], the survivors, among them the maximum; default all.
    """
    step = max(1, ENTROPY_ELEMENTS // values.shape[1])
    parts = []
    for start in range(0, values.shape[0], step):
        part = slice(start, start + step)
        top = _column(maximum[part])
        scale = LOG2_E if inverse_temperature is None else _column(inverse_temperature[part])
        finite_top = top.double().masked_fill(top.isinf(), 0.0)
        z = (values[part].double() - finite_top) * scale
        z.masked_fill_(top == torch.inf, -1000.0).masked_fill_(values[part] == top, 0.0)
        z.clamp_(min=-1000.0, max=0.0)
        masses = exact_math.masses(exact_math.exp2(z))
        masses.masked_fill_(values[part] == -torch.inf, 0)
        if kept is not None:
            masses.masked_fill_(~kept[part], 0)
        total = masses.sum(1, keepdim=True)
        mean = _mean_z(z, masses, total.clamp(min=1).double())
        log_total = exact_math.log(total.clamp(min=1).double() * (1.0 / _SCALE))
        entropy = (log_total - mean * LN_2).clamp_(min=0.0)
        parts.append(entropy.masked_fill_(total == 0, math.nan)[:, 0].float())
    return torch.cat(parts) if parts else maximum.new_empty(0)


def leading(values: Tensor, count: Tensor) -> Tensor:
    """bool [c, V]: the first count (int64 [c]) of each row by (value descending, id ascending)."""
    order = torch.sort(values, dim=1, descending=True, stable=True).indices
    rank = torch.arange(values.shape[1], device=values.device).expand_as(order)
    return torch.zeros_like(values, dtype=torch.bool).scatter_(1, order, rank < _column(count))
