"""Where everything lies in the device records: the one description that host and backends share.

A table owns three int32 tensors at fixed addresses, and a sampler a fourth. All have one row a
request slot (or logits row) and are made of 32-bit words; floats are bit patterns, 64-bit values
take two words, low word first.

    params  [max_requests + 1, params_words]  the host's truth, uploaded when it changes
    state   [max_requests + 1, state_words]   the device's truth, advanced by every step
    tables  [tables_words]                    bitmaps and counts, see `TableLayout.tables_words`
    output  [rows, output_words]              one packed record per logits row

Logprobs at many positions fill records of the same size, see `PositionRecord`.

Row `max_requests` of each is the padding row: rows that must write nothing (slot -1, finished
or not admitted) write there. A slot that holds no request has neutral parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum, IntFlag
from functools import cached_property, lru_cache
from typing import Final

MAX_VOCAB_SIZE: Final = 2**22
"""Probability masses are 40-bit integers; sums of so many stay inside 62 bits."""
MAX_BAD_WORD_IDS: Final = 2**20
"""Of all bad words of a request. With it no offset into a record leaves 32 bits."""


class FinishReason(IntEnum):
    """Why a request ended, as the step that ended it reports it."""

    NONE = 0
    STOP = 1
    LENGTH = 2


class RowFlags(IntFlag):
    """What was special about an output row.

    PADDING: the row had no slot. NAN: the logits held NaN, which counted as -inf. POS_INF: +inf
    entries alone survived. EMPTY: no candidate was left, a fallback id was emitted. FINISHED: the
    slot's request had ended before; nothing was drawn.
    """

    PADDING = 1
    NAN = 2
    POS_INF = 4
    EMPTY = 8
    FINISHED = 16


class ParamFlags(IntFlag):
    """Bits of `Param.FLAGS`."""

    ADMITTED = 1
    GREEDY = 2
    FILTERED = 4  # any filter is on, so that num_kept is reported
    LOGPROBS = 8  # the drawn token's logprob is wanted
    PROCESSED = 16  # logprobs_mode == "processed"
    RANK = 32
    ALLOWED = 64  # the slot's row of the allowed bitmap counts
    PENALTIES = 128  # any of the three penalties is on
    # What a backend that works from sums over the row needs to know before it reads the row:
    TOTAL = 256  # the first filter, or the draw, needs the mass of all tokens
    MEAN = 512  # and their mean logit: typical_p or eta_cutoff sees all tokens
    RAW = 1024  # raw logprobs or ranks are wanted
    LISTS = 2048  # logit_bias, bad_words_ids or min_tokens may change single logits
    # Penalties are all that changes logits, and raise none; of what they leave the best tokens are
    # asked for: greedy, or top_k and after it at most top_p.
    LOWERED = 4096


class Param(IntEnum):
    """Word offsets of the parameter record's header; the lists follow it (see `TableLayout`)."""

    FLAGS = 0
    TEMPERATURE = 1  # fp32; 1 for greedy rows
    TOP_K = 2  # int32; 0 is off
    TOP_P = 3  # fp32; 1 is off
    MIN_P = 4  # fp32; 0 is off
    TOP_N_SIGMA = 5  # fp32; 0 is off
    TYPICAL_P = 6  # fp32; 1 is off
    EPSILON_CUTOFF = 7  # fp32; 0 is off
    ETA_CUTOFF = 8  # fp32; 0 is off
    REPETITION_PENALTY = 9  # fp32; 1 is off
    FREQUENCY_PENALTY = 10  # fp32; 0 is off
    PRESENCE_PENALTY = 11  # fp32; 0 is off
    MIN_TOKENS = 12  # int32
    MAX_TOKENS = 13  # int32; 0 is no limit
    SEED = 14  # 64 bits
    MIN_P_OFFSET = 16  # float64: temperature * ln(min_p); min_p's bound is maximum + this
    TOP_LOGPROBS = 18  # int32: how many of the best tokens' logprobs are wanted
    NUM_BIAS = 19  # int32: used length of each list
    NUM_STOP = 20
    NUM_BAD_WORDS = 21
    NUM_GIVEN = 22
    SCALE = 23  # fp32: log2(e) / temperature
    WIDE_SCALE = 24  # float64: the same


HEADER_WORDS: Final = 32  # 128 bytes: one cache line, most requests have no list


class State(IntEnum):
    """Word offsets of the state record; the recent output tokens follow, newest first."""

    POSITION = 0  # int64: absolute index, in the request's sequence, of the token to be drawn
    LAST_TOKEN = 2  # int64: -1 where there is none
    NUM_GENERATED = 4
    FINISH_REASON = 5
    GENERATION = 6  # of the slot, from 1; 0 is a slot never used
    RECENT = 8  # max_bad_word_length - 1 words, -1 where there is none


class Output(IntEnum):
    """Word offsets of the output record; the lists follow it (see `TableLayout`)."""

    TOKEN_ID = 0  # int64
    LOGPROB = 2  # fp32
    RANK = 3
    NUM_KEPT = 4
    FINISH_REASON = 5
    FLAGS = 6
    GENERATION = 7
    LISTS = 8


class PositionRecord(IntEnum):
    """Word offsets of the record of a position whose token is given; lists follow as in `Output`.

    What both records hold stands at the same place, so that the same code writes it.
    """

    LARGEST = 0  # fp32: the largest logit, -inf where there is none
    LOG_NORMALISER = 1  # fp32: ln of the sum of all weights, relative to the largest
    LOGPROB = 2
    RANK = 3
    NUM_KEPT = 4
    ENTROPY = 5  # fp32
    FLAGS = 6
    LISTS = 8


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class TableLayout:
    """Sizes and offsets of one table's records. All capacities are numbers of entries.

    max_stop_ids counts the table's EOS ids too: both lie in one list. `penalties` is 0 or 1.
    """

    vocab_size: int
    max_requests: int
    max_logprobs: int
    max_logit_bias: int
    max_stop_ids: int
    max_bad_words: int
    max_bad_word_length: int
    max_logprob_ids: int
    penalties: int

    def to_ints(self) -> list[int]:
        """The layout as the `int[] layout` argument of `sample_step`."""
        return [getattr(self, name) for name in _FIELDS]

    @staticmethod
    def from_ints(values: Sequence[int]) -> TableLayout:
        """What `to_ints` is of: the same object for the same values, as a step asks for it."""
        return _from_ints(tuple(values))

    # The parameter record: header, then the lists at their full capacity. Bad words are rows of
    # max_bad_word_length words: the banned id, then the prefix from its last token backwards,
    # -1 (matches anything) where the sequence is shorter.
    @cached_property
    def bias_ids(self) -> int:
        return HEADER_WORDS

    @cached_property
    def bias_values(self) -> int:
        return self.bias_ids + self.max_logit_bias

    @cached_property
    def stop_ids(self) -> int:
        return self.bias_values + self.max_logit_bias

    @cached_property
    def bad_words(self) -> int:
        return self.stop_ids + self.max_stop_ids

    @cached_property
    def given_ids(self) -> int:
        return self.bad_words + self.max_bad_words * self.max_bad_word_length

    @cached_property
    def params_words(self) -> int:
        return _round_up(self.given_ids + self.max_logprob_ids, 4)

    @cached_property
    def state_words(self) -> int:
        return _round_up(State.RECENT + self.recent_tokens, 4)

    @cached_property
    def recent_tokens(self) -> int:
        """How many of the last output tokens the state holds: what the longest bad word needs."""
        return max(self.max_bad_word_length - 1, 0)

    # tables: allowed bits [R + 1, W], then with penalties prompt bits [R + 1, W], output bits
    # [R + 1, W] and output counts [R + 1, vocab_size]. A count is valid only where the output bit
    # is set, so that resetting a slot costs its two bitmap rows and not its counts.
    @cached_property
    def bitmap_words(self) -> int:
        """W: words of a bitmap row, bit i of word w standing for token 32 w + i."""
        return -(-self.vocab_size // 32)

    @cached_property
    def rows(self) -> int:
        return self.max_requests + 1

    @cached_property
    def allowed_bits(self) -> int:
        return 0

    @cached_property
    def prompt_bits(self) -> int:
        return self.rows * self.bitmap_words

    @cached_property
    def output_bits(self) -> int:
        return 2 * self.rows * self.bitmap_words

    @cached_property
    def counts(self) -> int:
        return 3 * self.rows * self.bitmap_words

    @cached_property
    def tables_words(self) -> int:
        if not self.penalties:
            return self.rows * self.bitmap_words
        return self.counts + self.rows * self.vocab_size

    # The output record: header, top ids (int64), top logprobs, given logprobs.
    @cached_property
    def top_ids(self) -> int:
        return Output.LISTS

    @cached_property
    def top_logprobs(self) -> int:
        return self.top_ids + 2 * self.max_logprobs

    @cached_property
    def given_logprobs(self) -> int:
        return self.top_logprobs + self.max_logprobs

    @cached_property
    def output_words(self) -> int:
        return _round_up(self.given_logprobs + self.max_logprob_ids, 4)


_FIELDS: Final = tuple(field.name for field in fields(TableLayout))


@lru_cache
def _from_ints(values: tuple[int, ...]) -> TableLayout:
    if len(values) != len(_FIELDS) or values[-1] not in (0, 1):
        raise ValueError(f"layout = {list(values)} is not what TableLayout.to_ints() gives")
    return TableLayout(*values)
