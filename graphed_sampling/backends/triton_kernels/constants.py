"""What the kernels share with the host: sizes, offsets in scratch, words of the records."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from graphed_sampling.backends import triton as host
from graphed_sampling.backends.exact_math import EXP2_COEFFICIENTS
from graphed_sampling.backends.exact_math import LN_2 as _LN_2
from graphed_sampling.backends.exact_math import MASS_BITS as _MASS_BITS
from graphed_sampling.layout import (
    FinishReason,
    Output,
    Param,
    ParamFlags,
    PositionRecord,
    RowFlags,
    State,
)
from graphed_sampling.params import LOG2_E as _LOG2_E


def _constant(value: Any) -> Any:
    """A value that kernels may use; the interpreter wants it bare."""
    return value if triton.knobs.runtime.interpret else tl.constexpr(value)


GROUP = _constant(host.GROUP)
TILE = _constant(host.TILE)
ROW_TILE = _constant(host.ROW_TILE)
GROUPS_OF_TILE = _constant(host.TILE // host.GROUP)
LISTED = _constant(host.LISTED)
BRACKETED = _constant(host.BRACKETED)
BINS = _constant(host.BINS)
SUPERS = _constant(host.SUPERS)
SHORT = _constant(host.SHORT)
TINY = _constant(32)
MIDDLE = _constant(128)
LONGER = _constant(256)  # the longest list that `finish` works on
BATCH = _constant(32)  # groups that are read again at a time
FEW = _constant(8)  # the same where more is to be worked out
MAX_LISTED_TOP_K = _constant(1024)
MAX_GROUPS_READ = _constant(640)  # of a row by `finish`; `dense` reads more of them faster

INF = _constant(float("inf"))
NEG_INF = _constant(float("-inf"))
NEG_INF_BITS = _constant(-0x800000)
NOTHING = _constant(-0x7FFFFFFFFFFFFFFF)  # below every order of a token
FLT_MAX = _constant(3.4028234663852886e38)
LOG2_E = _constant(_LOG2_E)
LN_2 = _constant(_LN_2)
MASS_BITS = _constant(_MASS_BITS)
ONE = _constant(2.0**_MASS_BITS)  # the mass of a row's largest probability
ROUND = _constant(1.5 * 2.0**52)  # x + ROUND - ROUND is rint(x) for |x| < 2**51

# Scratch of a row, in words: arrays of one word a group, then lists. See `scratch_words`.
SUMS, RAW_MAXIMA, RAW_SUMS, MOMENTS, GROUP_LIST = (_constant(i) for i in range(1, 6))

# Then the list of supers that hold a listed group.
SUPER_LIST = _constant(6)

# What `LAW` says of the filters, and of what is to be found out.
KEEP_TIES, JOINT, DECIDE, SLAB = (
    _constant(bit) for bit in (host.KEEP_TIES, host.JOINT, host.DECIDE, host.SLAB)
)

# What `mode` says of optional inputs.
HAS_BITMASK, HAS_WORDS, HAS_GIVEN = (
    _constant(bit) for bit in (host.HAS_BITMASK, host.HAS_WORDS, host.HAS_GIVEN)
)

# What a row's plan says is left of it for `dense`.
DONE, BY_ROW, BY_LIST, BY_BRACKET, BY_SIGMA = (_constant(i) for i in range(5))

# Words of a plan: what `finish` found out, the bracket of a flat row's cut, and what
# `dense` counts there.
PLAN_BANS, PLAN_NAN, PLAN_COUNT, PLAN_LOW, PLAN_HIGH, PLAN_FACTOR, PLAN_LISTED, PLAN_ABOVE = (
    _constant(i) for i in range(8)
)

PLAN_LARGEST = PLAN_COUNT  # of a flat row, whose list is another
PLAN_Z_BOUND = PLAN_LOW  # of a row that goes by its list: a float64, two words
PLAN_BY_ROW = _constant(11)  # whether `dense` went over the whole row in the end

# How many tiles of a flat row `dense` is through with; and, in the first row's plan, how many tiles
# and rows its programs have taken.
PLAN_COLLECTED, PLAN_TILES_TAKEN, PLAN_ROWS_TAKEN = (_constant(i) for i in range(8, 11))

# Words of a decision, what is known of a row before its token is drawn; see deciding.py.
D_FLAGS, D_HIGHEST, D_LOWEST, D_LOWEST_ID, D_NUM_KEPT = (_constant(i) for i in range(5))
D_TOTAL, D_RAW_TOTAL = _constant(5), _constant(7)  # two words each
D_SPECIAL, D_FALLBACK, D_LARGEST, D_BANS = (_constant(i) for i in range(9, 13))
DECISION_WORDS = _constant(host.DECISION_WORDS)
SLAB_SIZE = _constant(host.SLAB_SIZE)
TOLD_APART = _constant(1.0 + 2.0**-16)  # more than rounding makes of a softmax's probabilities

# What a row's processing has to look at.
CHECK_GRAMMAR, CHECK_ALLOWED, CHECK_PENALTIES = _constant(1), _constant(2), _constant(4)

# Rows whose processed logits the contract replaces.
NORMAL, POSITIVE_INFINITY, EMPTY_ROW = _constant(0), _constant(1), _constant(2)
P_FLAGS = _constant(int(Param.FLAGS))
P_TEMPERATURE = _constant(int(Param.TEMPERATURE))
P_TOP_K = _constant(int(Param.TOP_K))
P_TOP_P = _constant(int(Param.TOP_P))
P_MIN_P = _constant(int(Param.MIN_P))
P_SIGMA = _constant(int(Param.TOP_N_SIGMA))
P_TYPICAL = _constant(int(Param.TYPICAL_P))
P_EPSILON = _constant(int(Param.EPSILON_CUTOFF))
P_ETA = _constant(int(Param.ETA_CUTOFF))
P_REPETITION = _constant(int(Param.REPETITION_PENALTY))
P_FREQUENCY = _constant(int(Param.FREQUENCY_PENALTY))
P_PRESENCE = _constant(int(Param.PRESENCE_PENALTY))
P_MIN_TOKENS = _constant(int(Param.MIN_TOKENS))
P_MAX_TOKENS = _constant(int(Param.MAX_TOKENS))
P_SEED = _constant(int(Param.SEED))
P_MIN_P_OFFSET = _constant(int(Param.MIN_P_OFFSET))
P_TOP_LOGPROBS = _constant(int(Param.TOP_LOGPROBS))
P_NUM_BIAS = _constant(int(Param.NUM_BIAS))
P_NUM_STOP = _constant(int(Param.NUM_STOP))
P_NUM_BAD_WORDS = _constant(int(Param.NUM_BAD_WORDS))
P_NUM_GIVEN = _constant(int(Param.NUM_GIVEN))
P_SCALE = _constant(int(Param.SCALE))
P_WIDE_SCALE = _constant(int(Param.WIDE_SCALE))
F_ADMITTED = _constant(int(ParamFlags.ADMITTED))
F_GREEDY = _constant(int(ParamFlags.GREEDY))
F_FILTERED = _constant(int(ParamFlags.FILTERED))
F_LOGPROBS = _constant(int(ParamFlags.LOGPROBS))
F_PROCESSED = _constant(int(ParamFlags.PROCESSED))
F_RANK = _constant(int(ParamFlags.RANK))
F_ALLOWED = _constant(int(ParamFlags.ALLOWED))
F_PENALTIES = _constant(int(ParamFlags.PENALTIES))
F_TOTAL = _constant(int(ParamFlags.TOTAL))
F_MEAN = _constant(int(ParamFlags.MEAN))
F_RAW = _constant(int(ParamFlags.RAW))
F_LISTS = _constant(int(ParamFlags.LISTS))
S_POSITION = _constant(int(State.POSITION))
S_LAST_TOKEN = _constant(int(State.LAST_TOKEN))
S_NUM_GENERATED = _constant(int(State.NUM_GENERATED))
S_FINISH_REASON = _constant(int(State.FINISH_REASON))
S_GENERATION = _constant(int(State.GENERATION))
S_RECENT = _constant(int(State.RECENT))
O_TOKEN_ID = _constant(int(Output.TOKEN_ID))
O_LOGPROB = _constant(int(Output.LOGPROB))
O_RANK = _constant(int(Output.RANK))
O_NUM_KEPT = _constant(int(Output.NUM_KEPT))
O_FINISH_REASON = _constant(int(Output.FINISH_REASON))
O_FLAGS = _constant(int(Output.FLAGS))
O_GENERATION = _constant(int(Output.GENERATION))
O_LISTS = _constant(int(Output.LISTS))
POSITION_LARGEST = _constant(int(PositionRecord.LARGEST))
POSITION_LOG = _constant(int(PositionRecord.LOG_NORMALISER))
POSITION_LOGPROB = _constant(int(PositionRecord.LOGPROB))
POSITION_RANK = _constant(int(PositionRecord.RANK))
POSITION_NUM_KEPT = _constant(int(PositionRecord.NUM_KEPT))
POSITION_ENTROPY = _constant(int(PositionRecord.ENTROPY))
POSITION_FLAGS = _constant(int(PositionRecord.FLAGS))
R_PADDING = _constant(int(RowFlags.PADDING))
R_NAN = _constant(int(RowFlags.NAN))
R_POS_INF = _constant(int(RowFlags.POS_INF))
R_EMPTY = _constant(int(RowFlags.EMPTY))
R_FINISHED = _constant(int(RowFlags.FINISHED))
FINISH_STOP = _constant(int(FinishReason.STOP))
FINISH_LENGTH = _constant(int(FinishReason.LENGTH))
C0, C1, C2, C3, C4, C5, C6, C7, C8, C9 = (_constant(c) for c in EXP2_COEFFICIENTS)
