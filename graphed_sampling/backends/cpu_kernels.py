# mypy: allow-untyped-defs
"""The numba kernels of the `cpu` backend: one row at a time, no threads of their own.

A row goes through four forms:

    raw      `Workspace.y` holds the row's first `vocab_size` logits in fp32, NaN where an entry
             is no candidate, and `group_keys` the maximum of every 64 as an integer key;
    y        the same, after bans, bias and penalties (the contract's section 3);
    dense    the survivors are the y at or above one threshold: what top_n_sigma and min_p leave;
    listed   the survivors stand in `ids` and `values`, ids ascending: what every other filter
             needs. What can be told of the survivors from the groups bounds them first, so that
             the list is short wherever the row allows it.

NaN stands for a banned entry while y is made, because it passes through every operation and
compares false; an intermediate infinity is thus not mistaken for a ban.

Probability masses are integers of 2^-40 of the survivors' maximum: their sums do not depend on
an order, so no launch shape can decide a token. Nothing here may be contracted or reassociated:
no fastmath anywhere.

Every selection is a radix descent over integer keys, which takes a few passes over its list
whatever the values are; nothing sorts the vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from enum import IntEnum
from typing import Any, Final, NamedTuple

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.extending import intrinsic

from graphed_sampling.layout import (
    FinishReason,
    Output,
    Param,
    ParamFlags,
    PositionRecord,
    RowFlags,
    State,
)
from graphed_sampling.philox import Stream

GROUP: Final = 64
"""Entries that share a maximum and a mass."""

PARTS: Final = 8
"""Parts of a group, whose maxima bound a large top-k."""

FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2
"""Codes of the logits' element types."""

_NAN = np.float32(np.nan)
_INF = np.float32(np.inf)
_FLT_MAX = np.finfo(np.float32).max
_LN2 = math.log(2.0)
_LOG2_E = 1.0 / _LN2
_MASS_BITS = 40
_ONE = 2.0**_MASS_BITS
_LISTED_GROUPS = 128  # so few are listed whole for typical_p, epsilon_cutoff and eta_cutoff
_Z_MIN = -64.0  # 2^-64 of the maximum: its mass is 0, as is everything's below 2^-41

# Keys: int32 in the order of the floats. No float that is a number has the key _BANNED.
_BANNED = -(2**31)
_MAGNITUDE = 0x7FFFFFFF
_INF_BITS = 0x7F800000

# Adding 1.5 * 2^52 rounds a float64 of magnitude below 2^51 to an integer, ties to even, and
# leaves that integer in the low bits: rint and the conversion in one addition.
_ROUND = 1.5 * 2.0**52
_ROUND_BITS = int(np.float64(_ROUND).view(np.int64))

# (2^f - 1) / f on [-1/2, 1/2], interpolated at the Chebyshev points: 2^f within 2^-38 relative.
_EXP2 = (
    0.6931471805568324,
    0.24022650695888503,
    0.055504109063258665,
    0.00961812913523614,
    0.0013333478473685416,
    0.00015403475186530786,
    1.5303700711365693e-05,
    1.325080551750225e-06,
)

# The same in fp32, within 2^-23, and what shifts an fp32's low bits to 2^24 times a power of 2.
_EXP2_FLOAT = (
    np.float32(0.6931469775964132),
    np.float32(0.24022242086993517),
    np.float32(0.05550733752241752),
    np.float32(0.00967151258527019),
    np.float32(0.0013264724110600569),
)
_PART_BITS = 24
_ROUND_FLOAT = np.float32(1.5 * 2.0**23 + _PART_BITS)
_LOG2_E_FLOAT = np.float32(_LOG2_E)
_Z_MIN_FLOAT = np.float32(-_PART_BITS - 2)

_F_ADMITTED = int(ParamFlags.ADMITTED)
_F_GREEDY = int(ParamFlags.GREEDY)
_F_FILTERED = int(ParamFlags.FILTERED)
_F_LOGPROBS = int(ParamFlags.LOGPROBS)
_F_PROCESSED = int(ParamFlags.PROCESSED)
_F_RANK = int(ParamFlags.RANK)
_F_ALLOWED = int(ParamFlags.ALLOWED)
_F_PENALTIES = int(ParamFlags.PENALTIES)

_R_PADDING = int(RowFlags.PADDING)
_R_NAN = int(RowFlags.NAN)
_R_POS_INF = int(RowFlags.POS_INF)
_R_EMPTY = int(RowFlags.EMPTY)
_R_FINISHED = int(RowFlags.FINISHED)

_NONE = int(FinishReason.NONE)
_STOP = int(FinishReason.STOP)
_LENGTH = int(FinishReason.LENGTH)
_TARGET = int(Stream.TARGET)


class Offsets(NamedTuple):
    """The sizes and offsets of a `TableLayout` that the kernels need, in the layout's names."""

    vocab_size: int
    max_requests: int
    params_words: int
    state_words: int
    output_words: int
    bitmap_words: int
    bias_ids: int
    bias_values: int
    stop_ids: int
    bad_words: int
    max_bad_word_length: int
    given_ids: int
    recent_tokens: int
    allowed_bits: int
    prompt_bits: int
    output_bits: int
    counts: int
    max_logprobs: int
    max_logprob_ids: int
    penalties: int
    top_ids: int
    top_logprobs: int
    given_logprobs: int


class Workspace(NamedTuple):
    """Buffers of one thread. V stands for the vocabulary rounded up to whole groups."""

    y: np.ndarray[Any, Any]  # float32 [V]: the row; NaN where an entry is no candidate
    group_keys: np.ndarray[Any, Any]  # int32 [V / GROUP]: key of each group's maximum
    group_mass: np.ndarray[Any, Any]  # int64 [V / GROUP]
    dirty: np.ndarray[Any, Any]  # uint8 [V / GROUP]: whether group_keys must be renewed
    wide: np.ndarray[Any, Any]  # float32 [GROUP]: a group of 16-bit logits
    lanes: np.ndarray[Any, Any]  # float64 [2 * GROUP]: partial sums
    ids: np.ndarray[Any, Any]  # int32 [V]: the listed survivors, ascending
    values: np.ndarray[Any, Any]  # float32 [V]: their y
    mass: np.ndarray[Any, Any]  # int64 [V]: their masses, relative to the largest of them
    keys: np.ndarray[Any, Any]  # uint64 [V]: what a selection orders by
    left_keys: np.ndarray[Any, Any]  # uint64 [V]: keys that a selection has not ruled out
    left_mass: np.ndarray[Any, Any]  # int64 [V]: their masses
    bins: np.ndarray[Any, Any]  # int64 [2048]: the histogram of one round of a selection


def workspace_bytes(vocab_size: int) -> int:
    groups = -(-vocab_size // GROUP)
    return groups * (GROUP * (4 * 8 + 3 * 4) + 8 + 4 + 1) + 8 * (2 * GROUP + 2048) + 4 * GROUP


def _jit(function: Callable[..., Any]) -> Any:
    """A function of these kernels. Only the entry is cached: it contains all that it calls."""
    return njit(nogil=True, error_model="numpy")(function)


def _jit_once(function: Callable[..., Any]) -> Any:
    """A large function with one caller, into which it is put before LLVM sees either.

    Else it would be optimised once more with every caller above it: some seconds of compilation.
    """
    return njit(nogil=True, error_model="numpy", inline="always")(function)


def _entry(function: Callable[..., Any]) -> Any:
    try:
        return njit(nogil=True, error_model="numpy", cache=True)(function)
    except RuntimeError:  # numba found no directory to write a cache to
        return _jit(function)


def _bitcast(name: str, source: Any, target: Any, target_ir: ir.Type) -> Any:
    def typed(_context: Any, value: Any) -> Any:
        def generate(_c: Any, builder: Any, _s: Any, args: Any) -> Any:
            return builder.bitcast(args[0], target_ir)

        return target(source), generate

    typed.__name__ = name
    return intrinsic(typed)


_bits64 = _bitcast("_bits64", types.float64, types.int64, ir.IntType(64))
_float64 = _bitcast("_float64", types.int64, types.float64, ir.DoubleType())
_bits32 = _bitcast("_bits32", types.float32, types.int32, ir.IntType(32))
_float32 = _bitcast("_float32", types.int32, types.float32, ir.FloatType())


def _count_trailing_zeros(_context: Any, value: Any) -> Any:
    def generate(_c: Any, builder: Any, _s: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.int64), generate


_lowest_bit: Any = intrinsic(_count_trailing_zeros)  # of an int64 that is not 0


def _count_leading_zeros(_context: Any, value: Any) -> Any:
    def generate(_c: Any, builder: Any, _s: Any, args: Any) -> Any:
        return builder.ctlz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), generate


_leading_zeros: Any = intrinsic(_count_leading_zeros)


def _set_vector_width(_context: Any) -> Any:
    def generate(context: Any, builder: Any, _s: Any, _a: Any) -> Any:
        # llvmlite lists no attributes with values, but prints what its set holds.
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.void(), generate


_prefer_wide_vectors: Any = intrinsic(_set_vector_width)
"""Called in a kernel whose arithmetic pays for them: LLVM takes half of AVX-512 by default."""


@_jit
def _workspace(buffer, vocab_size):
    """The buffers, carved from one of `workspace_bytes`: passing them one by one takes time."""
    groups = (vocab_size + GROUP - 1) // GROUP
    size = groups * GROUP
    at = 0
    # By falling alignment.
    mass = buffer[at : at + 8 * size].view(np.int64)
    at += 8 * size
    keys = buffer[at : at + 8 * size].view(np.uint64)
    at += 8 * size
    left_keys = buffer[at : at + 8 * size].view(np.uint64)
    at += 8 * size
    left_mass = buffer[at : at + 8 * size].view(np.int64)
    at += 8 * size
    lanes = buffer[at : at + 8 * 2 * GROUP].view(np.float64)
    at += 8 * 2 * GROUP
    bins = buffer[at : at + 8 * 2048].view(np.int64)
    at += 8 * 2048
    y = buffer[at : at + 4 * size].view(np.float32)
    at += 4 * size
    values = buffer[at : at + 4 * size].view(np.float32)
    at += 4 * size
    ids = buffer[at : at + 4 * size].view(np.int32)
    at += 4 * size
    wide = buffer[at : at + 4 * GROUP].view(np.float32)
    at += 4 * GROUP
    group_mass = buffer[at : at + 8 * groups].view(np.int64)
    at += 8 * groups
    group_keys = buffer[at : at + 4 * groups].view(np.int32)
    at += 4 * groups
    dirty = buffer[at : at + groups]
    return Workspace(
        y, group_keys, group_mass, dirty, wide, lanes, ids, values, mass, keys, left_keys,
        left_mass, bins,
    )  # fmt: skip


# --------------------------------------------------------------------------- numbers


@_jit
def _key_of_bits(bits):
    """The int32 key of a float32's bits. Narrow at every step: numba would widen to 64 bits."""
    return np.int32(bits ^ np.int32(np.int32(bits >> np.int32(31)) & np.int32(_MAGNITUDE)))


@_jit
def _key(value):
    """The int32 key of a float32 that is not NaN."""
    return _key_of_bits(_bits32(value))


@_jit
def _falling(key):
    """A uint64 of 32 bits that orders keys the other way round, for selections."""
    return np.uint64(_MAGNITUDE - np.int64(key))


@_jit
def _value(key):
    """The float32 of a key."""
    return _float32(_key_of_bits(np.int32(key)))


@_jit
def _next_up(value):
    """The least float32 above one that is not NaN or +inf."""
    if value == 0.0:
        return _value(1)
    return _value(_key(value) + 1)


@_jit
def _round_down(value):
    """The largest float32 that is at most `value`."""
    rounded = np.float32(value)
    return -_next_up(-rounded) if rounded > value else rounded


@_jit
def _round_up(value):
    """The least float32 that is at least `value`."""
    rounded = np.float32(value)
    return _next_up(rounded) if rounded < value else rounded


@_jit
def _z(value, maximum, scale):
    """log2 of the probability of a y over the maximum's. scale: log2(e) / temperature."""
    return (np.float64(value) - np.float64(maximum)) * scale


@_jit
def _mass_bits(z):
    """rint(2^40 * 2^z) + _ROUND_BITS, for -64 <= z <= 0.

    Left as the bits of a float64, so that a loop over it stays in vector registers: the sum of
    n masses is the sum of n of these less n * _ROUND_BITS (modulo 2^64).
    """
    return _bits64(_weight(z) + _ROUND)


@_jit
def _weight(z):
    """2^40 * 2^z, for -64 <= z <= 0."""
    t = z + (_ROUND + _MASS_BITS)  # so that the shift below scales by 2^40, too
    f = z - (t - (_ROUND + _MASS_BITS))
    p = _EXP2[7] * f + _EXP2[6]
    p = p * f + _EXP2[5]
    p = p * f + _EXP2[4]
    p = p * f + _EXP2[3]
    p = p * f + _EXP2[2]
    p = p * f + _EXP2[1]
    p = p * f + _EXP2[0]
    p = p * f + 1.0
    return _float64(_bits64(p) + (_bits64(t) << 52))


@_jit
def _mass(z):
    """rint(2^40 * 2^z) for z <= 0, -inf and NaN (a mass of 0) among them."""
    return _mass_bits(z if z > _Z_MIN else _Z_MIN) - _ROUND_BITS


@_jit
def _high_product(a, b):
    """floor(a * b / 2^64) of two uint64."""
    low = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    a0, a1 = a & low, a >> half
    b0, b1 = b & low, b >> half
    middle = a1 * b0 + ((a0 * b0) >> half)
    other = a0 * b1 + (middle & low)
    return a1 * b1 + (middle >> half) + (other >> half)


@_jit
def _philox_word(seed, position, stream):
    """`philox.word` on uint64s."""
    low = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    key0, key1 = seed & low, seed >> half
    c0, c1, c2, c3 = position & low, position >> half, stream, np.uint64(0)
    for _ in range(10):
        product0 = c0 * np.uint64(0xD2511F53)
        product1 = c2 * np.uint64(0xCD9E8D57)
        c0 = (product1 >> half) ^ c1 ^ key0
        c1 = product1 & low
        c2 = (product0 >> half) ^ c3 ^ key1
        c3 = product0 & low
        key0 = (key0 + np.uint64(0x9E3779B9)) & low
        key1 = (key1 + np.uint64(0xBB67AE85)) & low
    return (c1 << half) | c0


@_jit
def _read64(words, at):
    """The int64 of two int32 words, low word first."""
    return (np.int64(words[at + 1]) << 32) | (np.int64(words[at]) & 0xFFFFFFFF)


@_jit
def _write64(words, at, value):
    words[at] = np.int32(value)
    words[at + 1] = np.int32(value >> 32)


@_jit
def _read_float(words, at):
    return _float32(words[at])


# --------------------------------------------------------------------------- loading a row


@_jit
def _widen_half(bits):
    """The float32 of a float16's bits (int16)."""
    wide = np.int32(bits)
    magnitude = np.int32(np.int32(wide & np.int32(0x7FFF)) << np.int32(13))
    # The exponent lies 112 too low; the product is exact, of subnormals too.
    finite = _bits32(_float32(magnitude) * np.float32(2.0**112))
    special = np.int32(magnitude | np.int32(_INF_BITS))
    unsigned = special if magnitude >= np.int32(0x0F800000) else finite
    sign = np.int32(np.int32(wide & np.int32(0x8000)) << np.int32(16))
    return _float32(np.int32(unsigned | sign))


@_jit
def _widen_brain(bits):
    """The float32 of a bfloat16's bits (int16)."""
    return _float32(np.int32(np.int32(bits) << np.int32(16)))


@_jit
def _logit(logits, kind, at):
    """Entry `at` of the logits as float32, whatever it is."""
    if kind == FLOAT32:
        return logits.view(np.float32)[at]
    if kind == BFLOAT16:
        return _widen_brain(logits.view(np.int16)[at])
    return _widen_half(logits.view(np.int16)[at])


@_jit
def _load_group(logits, place, y, group):
    """Copies the `place`-th group of `logits` to the `group`-th of y, -0.0 as 0.0.

    Returns (key of the maximum, bits of the largest magnitude).
    """
    # Slices, so that indices are seen to be >= 0; made here, for as arguments they cost vectors.
    source = logits[place * GROUP : place * GROUP + GROUP]
    target = y[group * GROUP : group * GROUP + GROUP]
    best = np.int32(_BANNED)
    magnitude = np.int32(0)
    for j in range(GROUP):
        value = source[j] + np.float32(0.0)
        target[j] = value
        bits = _bits32(value)
        best = max(best, _key_of_bits(bits))
        magnitude = max(magnitude, np.int32(bits & np.int32(_MAGNITUDE)))
    return best, magnitude


@_jit
def _widen_group(kind, logits, place, count, wide):
    """Widens up to GROUP 16-bit logits."""
    source = logits[place * GROUP : place * GROUP + GROUP]
    if kind == BFLOAT16 and count == GROUP:
        for j in range(GROUP):
            wide[j] = _widen_brain(source[j])
    elif kind == FLOAT16 and count == GROUP:
        for j in range(GROUP):
            wide[j] = _widen_half(source[j])
    else:
        for j in range(count):
            wide[j] = _widen_brain(source[j]) if kind == BFLOAT16 else _widen_half(source[j])


@_jit
def _load_row(logits, kind, start, size, ws):
    """The raw form of the row that starts at entry `start`; returns whether it holds a NaN."""
    whole = size // GROUP
    rest = size - whole * GROUP
    y, wide, keys = ws.y, ws.wide, ws.group_keys
    ws.dirty[: (size + GROUP - 1) // GROUP] = 0
    magnitude = np.int32(0)
    floats = logits.view(np.float32)[start : start + size] if kind == FLOAT32 else wide
    shorts = logits.view(np.int16)[start : start + size]
    for group in range(whole):
        if kind == FLOAT32:
            best, largest = _load_group(floats, group, y, group)
        else:
            _widen_group(kind, shorts, group, GROUP, wide)
            best, largest = _load_group(wide, 0, y, group)
        keys[group] = best
        magnitude = max(magnitude, largest)
    if rest > 0:
        if kind == FLOAT32:
            wide[:rest] = floats[whole * GROUP :]
        else:
            _widen_group(kind, shorts, whole, rest, wide)
        wide[rest:] = -_FLT_MAX  # beats nothing but -inf, which is seen below
        best, largest = _load_group(wide, 0, y, whole)
        keys[whole] = best
        magnitude = max(magnitude, largest)
        y[size : (whole + 1) * GROUP] = _NAN
    if magnitude >= _INF_BITS:  # NaN or an infinity is there: rare, so in a pass of its own
        groups = (size + GROUP - 1) // GROUP
        for i in range(size):
            y[i] = y[i] if y[i] > -_INF else _NAN
        ws.dirty[:groups] = 1
        _renew_groups(groups, ws)
    return magnitude > _INF_BITS


@_jit
def _group_key(values):
    """Key of the maximum of a group, NaN left out."""
    best = np.int32(_BANNED)
    for j in range(GROUP):
        value = values[j]
        key = _key_of_bits(_bits32(value))
        best = np.int32(max(best, key if value == value else np.int32(_BANNED)))
    return best


@_jit
def _renew_groups(groups, ws):
    """Takes the maxima of the dirty groups anew."""
    for group in range(groups):
        if ws.dirty[group]:
            ws.dirty[group] = 0
            ws.group_keys[group] = _group_key(ws.y[group * GROUP : (group + 1) * GROUP])


@_jit
def _best_key(groups, ws):
    best = np.int32(_BANNED)
    for group in range(groups):
        best = np.int32(max(best, ws.group_keys[group]))
    return best


@_jit
def _first_equal(groups, key, ws):
    """The lowest id whose y has this key, which is the row's maximum."""
    value = _value(key)
    for group in range(groups):
        if ws.group_keys[group] == key:
            for i in range(group * GROUP, (group + 1) * GROUP):
                if ws.y[i] == value:
                    return i
    return 0


# --------------------------------------------------------------------------- raw logprobs


@_jit
def _group_mass(y, group, maximum, scale):
    """The mass of a group of y, relative to the row's maximum."""
    _prefer_wide_vectors()
    values = y[group * GROUP : group * GROUP + GROUP]
    bits = 0
    for j in range(GROUP):
        z = _z(values[j], maximum, scale)
        bits += _mass_bits(z if z > _Z_MIN else _Z_MIN)  # NaN, too
    return bits - GROUP * _ROUND_BITS


@_jit
def _group_mass_above(y, group, maximum, scale, threshold):
    """The mass of those y of a group that reach `threshold`."""
    _prefer_wide_vectors()
    values = y[group * GROUP : group * GROUP + GROUP]
    bits = 0
    for j in range(GROUP):
        z = _z(values[j], maximum, scale)
        bits += _mass_bits(z if (z > _Z_MIN) & (values[j] >= threshold) else _Z_MIN)
    return bits - GROUP * _ROUND_BITS


@_jit
def _add_masses(groups, maximum, scale, threshold, ws):
    """Mass of every group's y at or above `threshold`, into `group_mass`; returns the sum."""
    y, keys, masses = ws.y, ws.group_keys, ws.group_mass
    total = 0
    threshold_key = _key(threshold)
    limited = threshold > -_INF
    for group in range(groups):
        key = keys[group]
        mass = 0  # where all round to 0
        if key >= threshold_key and _z(_value(key), maximum, scale) > -42.0:
            if limited:
                mass = _group_mass_above(y, group, maximum, scale, threshold)
            else:
                mass = _group_mass(y, group, maximum, scale)
        masses[group] = mass
        total += mass
    return total


@_jit
def _raw_part(y, group, maximum):
    """The sum of exp(y - maximum) over a group, whose maximum it is, in units of 2^-24.

    In fp32, twice as fast as masses are, since no draw depends on it.
    """
    _prefer_wide_vectors()
    values = y[group * GROUP : group * GROUP + GROUP]
    total = np.int32(0)
    for j in range(GROUP):
        z = (values[j] - maximum) * _LOG2_E_FLOAT
        z = z if z > _Z_MIN_FLOAT else _Z_MIN_FLOAT  # NaN, too
        t = z + _ROUND_FLOAT
        f = z - (t - _ROUND_FLOAT)
        p = _EXP2_FLOAT[4] * f + _EXP2_FLOAT[3]
        p = p * f + _EXP2_FLOAT[2]
        p = p * f + _EXP2_FLOAT[1]
        p = p * f + _EXP2_FLOAT[0]
        p = p * f + np.float32(1.0)
        power = np.int32(_bits32(t) << np.int32(23))
        part = _float32(np.int32(_bits32(p) + power))
        total = np.int32(total + np.int32(part + np.float32(0.5)))
    return total


@_jit
def _raw_normaliser(groups, ws):
    """(maximum, ln of the normaliser relative to it) of a row in raw form.

    With +inf in the row the normaliser is their number; without a finite entry the maximum is
    -inf. `_raw_logprob` takes both.

    Groups whose maximum is at least 1/16 of the row's are summed as masses: fp32 would leave
    nothing of a logprob near 0. The others are within some 2^-22 of their own sums.
    """
    y, keys, parts = ws.y, ws.group_keys, ws.group_mass
    key = _best_key(groups, ws)
    if key == _BANNED:
        return -_INF, 0.0
    maximum = _value(key)
    if maximum == _INF:
        count = 0
        for i in range(groups * GROUP):
            count += 1 if y[i] == _INF else 0
        return maximum, math.log(np.float64(count))
    total = 0
    for group in range(groups):
        value = _value(keys[group])
        if _z(value, maximum, _LOG2_E) >= -4.0:
            total += _group_mass(y, group, maximum, _LOG2_E)
            parts[group] = 0
        else:
            parts[group] = _raw_part(y, group, value)
    for group in range(groups):
        mass = np.float64(_mass(_z(_value(keys[group]), maximum, _LOG2_E)))
        total += int(mass * np.float64(parts[group]) * 2.0**-_PART_BITS)
    return maximum, math.log(np.float64(total) / _ONE)


@_jit
def _raw_logprob(logit, maximum, log_normaliser):
    """log_softmax of one raw logit, the row's normaliser given."""
    if not logit > -_INF:  # NaN counts as -inf
        return -_INF
    if maximum == _INF:
        return np.float32(-log_normaliser) if logit == _INF else -_INF
    return np.float32((np.float64(logit) - np.float64(maximum)) - log_normaliser)


# --------------------------------------------------------------------------- selections


@_jit
def _select(mass, weighted, count, target, ws):
    """The least of the first `count` keys up to which the weights reach `target`, and the weight
    strictly below it.

    Weights are `mass`, or 1 each if not `weighted`; all together they reach the target. A radix
    descent from the highest bit in which keys differ, over what is left of them: at most ten
    rounds, whatever the keys.
    """
    keys, left, left_mass, bins = ws.keys, ws.left_keys, ws.left_mass, ws.bins
    differing = np.uint64(0)
    for i in range(count):
        differing |= keys[i] ^ keys[0]
    shift = 64 - np.int64(_leading_zeros(differing))
    below = 0
    first = True
    while shift > 0 and (first or count > 1):
        # Few keys are worth few bins: each is cleared and looked at.
        width = min(shift, 11 if count > 1000 else 7)
        shift -= width
        drop, mask = np.uint64(shift), np.uint64((1 << width) - 1)
        bins[: 1 << width] = 0
        source = keys if first else left
        source_mass = mass if first else left_mass
        if weighted:
            for i in range(count):
                bins[(source[i] >> drop) & mask] += source_mass[i]
        else:
            for i in range(count):
                bins[(source[i] >> drop) & mask] += 1
        b = 0
        while b < (1 << width) - 1 and below + bins[b] < target:
            below += bins[b]
            b += 1
        chosen = np.uint64(b)
        kept = np.uint64(0)  # unsigned: as an index it is not checked for wrapping around
        one, none = np.uint64(1), np.uint64(0)
        if weighted:
            for i in range(count):
                left[kept] = source[i]
                left_mass[kept] = source_mass[i]
                kept += one if (source[i] >> drop) & mask == chosen else none
        else:
            for i in range(count):
                left[kept] = source[i]
                kept += one if (source[i] >> drop) & mask == chosen else none
        count = int(kept)
        first = False
    return keys[0] if first else left[0], below


@_jit
def _descending_keys(count, ws):
    """32-bit keys that order the listed survivors by falling y."""
    for i in range(count):
        ws.keys[i] = _falling(_key(ws.values[i]))


@_jit
def _are_equal(count, ws):
    """Whether all y of the list are. A row of equals lists the whole vocabulary."""
    values = ws.values
    first = values[0]
    others = 0
    for i in range(count):
        others += 1 if values[i] != first else 0
    return others == 0


@_jit
def _cut(count, weighted, target, ws):
    """Keeps the smallest prefix, in (y falling, id rising), whose weight reaches `target`, which is
    at least 1.

    Returns how many are kept and their weight; `ids`, `values` and `mass` are closed up.
    """
    # Equal y have equal masses, so it is known how many of them are kept.
    if _are_equal(count, ws):
        weight = ws.mass[0] if weighted else 1
        kept = -(-target // weight)
        return kept, kept * weight
    _descending_keys(count, ws)
    last, reached = _select(ws.mass, weighted, count, target, ws)
    weight = ws.mass[_first_with(0, last, ws)] if weighted else 1
    number = -((reached - target) // weight)
    kept = _keep(count, last, _end_of_equals(count, last, number, ws), ws)
    return kept, reached + number * weight


@_jit
def _first_with(start, key, ws):
    """The first place of the list from `start` on that has a key, which one has."""
    at = start
    while ws.keys[at] != key:
        at += 1
    return at


@_jit
def _end_of_equals(count, key, number, ws):
    """The place behind the `number`-th of the list's first `count` that have a key; there are so
    many."""
    keys = ws.keys
    left = number
    for start in range(0, count, GROUP):
        here = 0  # beside what lies behind the list, which comes too late to matter
        for j in range(GROUP):
            here += 1 if keys[np.uint64(start + j)] == key else 0
        if here >= left:
            at = start
            for _ in range(left):
                at = _first_with(at, key, ws) + 1
            return at
        left -= here
    return count


@_jit
def _up_to(keys, start, last):
    """A bit for each of the GROUP keys from `start` on: whether it is at most `last`."""
    first = np.uint64(start)  # unsigned: as an index it is not checked for wrapping around
    bits = np.int64(0)
    for j in range(GROUP):
        bits |= np.int64(1) << np.int64(j) if keys[first + np.uint64(j)] <= last else np.int64(0)
    return bits


@_jit
def _keep(count, last, end, ws):
    """Keeps of the list's first `count` those whose key is below `last`, and before place `end`
    those whose key it is. Returns their number.
    """
    keys, ids, values, mass = ws.keys, ws.ids, ws.values, ws.mass
    for i in range(count, -(-count // GROUP) * GROUP):
        keys[i] = np.uint64(0xFFFFFFFFFFFFFFFF)
    kept = 0
    for start in range(0, count, GROUP):
        bits = _up_to(keys, start, last) if start < end else 0
        if start + GROUP > end:
            bits &= (np.int64(1) << (end - start)) - 1 if start < end else 0
            if last > np.uint64(0):
                bits |= _up_to(keys, start, last - np.uint64(1))
        if bits == -1 and kept == start:  # they lie where they belong
            kept += GROUP
            continue
        while bits != 0:
            source, target = np.uint64(start + _lowest_bit(bits)), np.uint64(kept)
            bits &= bits - 1
            ids[target] = ids[source]
            values[target] = values[source]
            mass[target] = mass[source]
            kept += 1
    return kept


@_jit
def _reaching(y, group, threshold):
    """A bit for each y of a group: whether it reaches `threshold`."""
    _prefer_wide_vectors()
    values = y[group * GROUP : group * GROUP + GROUP]
    bits = np.int64(0)
    for j in range(GROUP):
        bits |= np.int64(1) << np.int64(j) if values[j] >= threshold else np.int64(0)
    return bits


@_jit
def _gather(groups, threshold, ws):
    """Lists the y at or above `threshold`, ids ascending; returns their number."""
    y, ids, values = ws.y, ws.ids, ws.values
    threshold_key = _key(threshold)
    count = np.uint64(0)  # unsigned: as an index it is not checked for wrapping around
    for group in range(groups):
        key = ws.group_keys[group]
        if key < threshold_key or key == _BANNED:
            continue
        first = group * GROUP
        bits = _reaching(y, group, threshold)
        if bits == -1:
            for j in range(GROUP):
                values[count + np.uint64(j)] = y[np.uint64(first + j)]
            for j in range(GROUP):
                ids[count + np.uint64(j)] = np.int32(np.int32(first) + np.int32(j))
            count += np.uint64(GROUP)
            continue
        while bits != 0:
            i = np.uint64(first + _lowest_bit(bits))
            bits &= bits - 1
            ids[count] = i
            values[count] = y[i]
            count += np.uint64(1)
    return np.int64(count)


@_jit
def _part_keys(groups, ws):
    """Falling keys of the maxima of all groups' parts: every PARTS-th of their entries."""
    y, keys = ws.y, ws.keys
    for group in range(groups):
        first, target = np.uint64(group * GROUP), np.uint64(group * PARTS)
        for j in range(PARTS):
            best = -_INF
            for k in range(GROUP // PARTS):
                value = y[first + np.uint64(k * PARTS + j)]
                best = value if value > best else best  # NaN is not
            keys[target + np.uint64(j)] = _falling(_key(best))


@_jit
def _largest_bound(groups, wanted, ws):
    """A float32 that at least `wanted` of the y reach, if so many are candidates; else -inf.

    It is the wanted-th largest of the groups' maxima, or of their parts', where these are more by
    enough for few y besides to reach it. Else it is the wanted-th largest y.
    """
    y, keys = ws.y, ws.keys
    if wanted <= groups * 3 // 4:
        count = groups
        for group in range(groups):
            keys[group] = _falling(ws.group_keys[group])
    elif wanted <= groups * PARTS * 3 // 4:
        count = groups * PARTS
        _part_keys(groups, ws)
    else:
        count = groups * GROUP
        for i in range(count):
            keys[i] = _falling(_key(y[i]) if y[i] == y[i] else np.int32(_BANNED))
    last, _ = _select(ws.mass, False, count, wanted, ws)
    key = np.int32(_MAGNITUDE - np.int64(last))
    return -_INF if key == _BANNED else _value(key)


@_jit
def _list_largest(groups, wanted, threshold, ws):
    """Lists the `wanted` first y >= threshold in (y falling, id rising); ids ascend in the list."""
    count = _gather(groups, max(threshold, _largest_bound(groups, wanted, ws)), ws)
    if count > wanted:
        count, _ = _cut(count, False, wanted, ws)
    return count


@_jit
def _sort_list(count, ws):
    """Leaves in `keys` the list's places in (y falling, id rising). Heap sort: bounded."""
    keys = ws.keys
    for i in range(count):
        # Places ascend with ids, so equal y fall by place.
        keys[i] = (_falling(_key(ws.values[i])) << np.uint64(32)) | np.uint64(i)
    for end in range(2 * count - 1, 0, -1):
        # The first count rounds build the heap from its leaves up, the others take its top away.
        if end >= count:
            root, size = end - count, count
        else:
            root, size = 0, end
            keys[0], keys[end] = keys[end], keys[0]
        while True:
            child = 2 * root + 1
            if child >= size:
                break
            if child + 1 < size and keys[child + 1] > keys[child]:
                child += 1
            if keys[root] >= keys[child]:
                break
            keys[root], keys[child] = keys[child], keys[root]
            root = child
    for i in range(count):
        keys[i] &= np.uint64(0xFFFFFFFF)


# --------------------------------------------------------------------------- y


@_jit
def _ban(token, size, ws):
    if 0 <= token < size:
        ws.y[token] = _NAN
        ws.dirty[token // GROUP] = 1


@_jit
def _clamp(value):
    """Into the finite range, -0.0 to 0.0; NaN, a ban, stays."""
    if value > _FLT_MAX:
        return _FLT_MAX
    if value < -_FLT_MAX:
        return -_FLT_MAX
    return value + np.float32(0.0)


@_jit
def _apply_bitmaps(bitmask, mask_at, tables, allowed_at, size, ws):
    """Bans what the grammar bitmask or the slot's allowed bitmap lacks; an offset < 0 is none."""
    for w in range((size + 31) // 32):
        word = np.int32(-1)
        if mask_at >= 0:
            word = np.int32(word & bitmask[mask_at + w])
        if allowed_at >= 0:
            word = np.int32(word & tables[allowed_at + w])
        if word == -1:
            continue
        ws.dirty[w * 32 // GROUP] = 1
        values = ws.y[w * 32 : (w + 1) * 32]  # the padding behind the row is NaN already
        for j in range(32):
            allowed = np.int32(word & np.int32(np.int32(1) << np.int32(j))) != 0
            values[j] = values[j] if allowed else _NAN


@_jit
def _apply_penalties(params, p, slot, tables, off, ws):
    repetition = _read_float(params, p + Param.REPETITION_PENALTY)
    frequency = _read_float(params, p + Param.FREQUENCY_PENALTY)
    presence = _read_float(params, p + Param.PRESENCE_PENALTY)
    prompt = off.prompt_bits + slot * off.bitmap_words
    output = off.output_bits + slot * off.bitmap_words
    counts = off.counts + slot * off.vocab_size
    for w in range(off.bitmap_words):
        in_output = np.int64(tables[output + w]) & 0xFFFFFFFF
        seen = in_output | (np.int64(tables[prompt + w]) & 0xFFFFFFFF)
        while seen != 0:
            bit = _lowest_bit(seen)
            seen &= seen - 1
            token = w * 32 + bit
            value = ws.y[token]
            value = value / repetition if value > 0 else value * repetition
            if (in_output >> bit) & 1:
                value = value - frequency * np.float32(tables[counts + token])
                value = value - presence
            ws.y[token] = _clamp(value)
            ws.dirty[token // GROUP] = 1


@_jit
def _apply_bad_words(params, p, state, s, off, ws):
    length = off.max_bad_word_length
    for k in range(params[p + Param.NUM_BAD_WORDS]):
        at = p + off.bad_words + k * length
        matches = True
        for j in range(1, length):
            token = params[at + j]
            matches &= token == -1 or token == state[s + State.RECENT + j - 1]
        if matches:
            _ban(np.int64(params[at]), off.vocab_size, ws)


@_jit_once
def _make_y(logits, kind, start, bitmask, mask_at, params, p, state, s, slot, tables, off, ws):
    """From the raw form to y. Returns (whether anything changed, whether +inf entries survive)."""
    size = off.vocab_size
    groups = (size + GROUP - 1) // GROUP
    flags = params[p + Param.FLAGS]
    pos_inf = _best_key(groups, ws) == _INF_BITS
    changed = pos_inf
    allowed_at = off.allowed_bits + slot * off.bitmap_words if flags & _F_ALLOWED else -1
    if mask_at >= 0 or allowed_at >= 0:
        changed = True
        _apply_bitmaps(bitmask, mask_at, tables, allowed_at, size, ws)
    for k in range(params[p + Param.NUM_BIAS]):
        changed = True
        token = np.int64(params[p + off.bias_ids + k])
        bias = _read_float(params, p + off.bias_values + k)
        ws.y[token] = _NAN if bias == -_INF else ws.y[token] + bias
        ws.dirty[token // GROUP] = 1
    if state[s + State.NUM_GENERATED] < params[p + Param.MIN_TOKENS]:
        for k in range(params[p + Param.NUM_STOP]):
            changed = True
            _ban(np.int64(params[p + off.stop_ids + k]), size, ws)
    if flags & _F_PENALTIES:
        changed = True
        _apply_penalties(params, p, slot, tables, off, ws)
    if params[p + Param.NUM_BAD_WORDS] > 0:
        changed = True
        _apply_bad_words(params, p, state, s, off, ws)
    if not changed:
        return False, False
    for k in range(params[p + Param.NUM_BIAS]):
        token = np.int64(params[p + off.bias_ids + k])
        ws.y[token] = _clamp(ws.y[token])
    if pos_inf:
        pos_inf = False
        for i in range(size):
            if ws.y[i] == ws.y[i] and _logit(logits, kind, start + i) == _INF:
                pos_inf = True
    if pos_inf:
        for i in range(size):
            survives = ws.y[i] == ws.y[i] and _logit(logits, kind, start + i) == _INF
            ws.y[i] = np.float32(0.0) if survives else _NAN
        for group in range(groups):
            ws.dirty[group] = 1
    _renew_groups(groups, ws)
    return True, pos_inf


# --------------------------------------------------------------------------- filters


@_jit
def _sigma_bound(groups, maximum, sigmas, ws):
    """top_n_sigma's bound: maximum - sigmas * population standard deviation of the y."""
    lanes = ws.lanes[:GROUP]
    count = 0
    lanes[:] = 0.0
    # 64 partial sums, each in the order of the ids: a function of the row, and vectors.
    for group in range(groups):
        for j in range(GROUP):
            value = ws.y[group * GROUP + j]
            present = value == value
            count += 1 if present else 0
            lanes[j] += np.float64(value) if present else 0.0
    total = 0.0
    for j in range(GROUP):
        total += lanes[j]
    mean = total / count
    lanes[:] = 0.0
    for group in range(groups):
        for j in range(GROUP):
            value = ws.y[group * GROUP + j]
            distance = np.float64(value) - mean if value == value else 0.0
            lanes[j] += distance * distance
    total = 0.0
    for j in range(GROUP):
        total += lanes[j]
    return _round_up(np.float64(maximum) - np.float64(sigmas) * math.sqrt(total / count))


@_jit
def _weigh(count, scale, ws):
    """Masses of the listed survivors relative to their maximum; returns that and their sum."""
    _prefer_wide_vectors()
    key = np.int32(_BANNED)
    for i in range(count):
        key = np.int32(max(key, _key(ws.values[i])))
    maximum = _value(key)
    total = 0
    for i in range(count):
        mass = _mass(_z(ws.values[i], maximum, scale))
        ws.mass[i] = mass
        total += mass
    return maximum, total


@_jit
def _sum_masses(count, ws):
    """The mass of the listed survivors."""
    total = 0
    for i in range(count):
        total += ws.mass[i]
    return total


@_jit
def _mean_z(count, total, maximum, scale, ws):
    """The mean of z over the listed survivors' masses."""
    weighted = 0.0
    for i in range(count):
        if ws.mass[i] > 0:
            weighted += np.float64(ws.mass[i]) * _z(ws.values[i], maximum, scale)
    return weighted / np.float64(total)


@_jit
def _share(total, share):
    """The mass that `share` (float32, in (0, 1)) of `total` takes."""
    # At least 1, also in a thread that takes a subnormal share for 0.
    return max(np.int64(math.ceil(np.float64(share) * np.float64(total))), np.int64(1))


@_jit
def _typical_cut(count, total, share, mean, maximum, scale, ws):
    """Keeps the survivors whose information lies nearest to the entropy, up to mass `share`.

    mean: of z, over all of mass `total`.
    """
    for i in range(count):
        # |-ln p - H| = ln 2 * |z - mean|; floats >= 0 are ordered as their bits.
        ws.keys[i] = np.uint64(_bits64(abs(_z(ws.values[i], maximum, scale) - mean)))
    last, _ = _select(ws.mass, True, count, _share(total, share), ws)
    return _keep(count, last, count, ws)


@_jit
def _bound_cut(count, bound, maximum, scale, ws):
    """Keeps the survivors with z >= bound, and the maximum's equals."""
    for i in range(count):
        z = _z(ws.values[i], maximum, scale)
        ws.keys[i] = np.uint64(0) if (z >= bound) | (z == 0.0) else np.uint64(1)
    return _keep(count, np.uint64(0), count, ws)


@_jit
def _survey_group(y, group, maximum, scale, threshold, weights, moments):
    """The mass of those y of a group that reach `threshold`; their weights and weights times z are
    added to 64 partial sums of each."""
    _prefer_wide_vectors()
    values = y[group * GROUP : group * GROUP + GROUP]
    bits = 0
    for j in range(GROUP):
        z = _z(values[j], maximum, scale)
        z = z if (z > _Z_MIN) & (values[j] >= threshold) else _Z_MIN  # a weight of 2^-64
        weight = _weight(z)
        bits += _bits64(weight + _ROUND)
        weights[j] += weight
        moments[j] += weight * z
    return bits - GROUP * _ROUND_BITS


@_jit
def _survey(groups, maximum, scale, threshold, ws):
    """(mass, weight, mean of z) of all y at or above `threshold`, without a list of them; the mass
    of every group's into `group_mass`.

    The weight is the mass before it is rounded token by token.
    """
    # Partial sums, each in the order of the ids: a function of the row, and vectors.
    weights, moments = ws.lanes[:GROUP], ws.lanes[GROUP:]
    weights[:] = 0.0
    moments[:] = 0.0
    threshold_key = _key(threshold)
    total = 0
    for group in range(groups):
        key = ws.group_keys[group]
        mass = 0
        # Below, weights are 2^-42 and less of the largest.
        if key >= threshold_key and _z(_value(key), maximum, scale) > -42.0:
            mass = _survey_group(ws.y, group, maximum, scale, threshold, weights, moments)
        ws.group_mass[group] = mass
        total += mass
    weight, moment = 0.0, 0.0
    for j in range(GROUP):
        weight += weights[j]
        moment += moments[j]
    return total, weight, moment / weight


@_jit
def _later_bound(groups, total, mean, typical, epsilon, eta, size, maximum, scale, ws):
    """A float32 that every survivor of typical_p, or else epsilon_cutoff, or else eta_cutoff of a
    dense row reaches, and so do the largest y, survivors or not."""
    if typical < 1:
        # What lies below weighs no more than typical_p leaves out, and nothing lies as far above
        # the mean as that is below: what is nearer than both suffices.
        bound = _top_p_bound(groups, _share(total, typical), total, size, maximum, scale, ws)
        return min(bound, _y_at(2.0 * mean - 1e-3, maximum, scale))
    log_total = math.log2(np.float64(total) / _ONE)
    if epsilon > 0:
        return _y_at(min(math.log2(np.float64(epsilon)) + log_total, 0.0), maximum, scale)
    log_eta = math.log2(np.float64(eta))
    return _y_at(min(log_eta + log_total, 0.5 * log_eta + mean, 0.0), maximum, scale)


@_jit
def _tail_cutoff(spare, size):
    """z such that `size` entries below it weigh no more than `spare`, each 2^(40 + z) + 1 at most;
    not below -41, where a mass is 0."""
    room = np.float64(spare) / size * (1.0 - 1e-9) - 1.0
    return math.log2(room) - _MASS_BITS if room > 0.5 else -1.0 - _MASS_BITS


@_jit
def _y_at(z, maximum, scale):
    """A float32 that every y with that z, relative to the maximum, reaches."""
    return _round_down(np.float64(maximum) + (z - 1e-6) / scale)


@_jit
def _top_p_bound(groups, target, total, size, maximum, scale, ws):
    """A float32 that every y of the top-p prefix of a dense row reaches.

    target: the prefix's mass, of `total`. The maxima of the groups with the largest ones often
    weigh so much by themselves; then the last of them is the bound.
    """
    weight = 0
    for group in range(groups):
        key = ws.group_keys[group]
        ws.keys[group] = _falling(key)
        mass = _mass(_z(_value(key), maximum, scale))
        mass = min(mass, ws.group_mass[group])  # 0 where no y of the group survives
        ws.mass[group] = mass
        weight += mass
    if weight >= target:
        key, _ = _select(ws.mass, True, groups, target, ws)
        return _value(_MAGNITUDE - np.int64(key))
    # The prefix ends before what weighs no more than it leaves out.
    return _y_at(_tail_cutoff(total - target, size), maximum, scale)


# --------------------------------------------------------------------------- the draw


@_jit
def _draw_dense(groups, maximum, scale, threshold, r, ws):
    """The first id whose cumulative mass exceeds r; `group_mass` holds the groups'."""
    group = 0
    while group < groups - 1 and r >= ws.group_mass[group]:
        r -= ws.group_mass[group]
        group += 1
    token = 0
    for i in range(group * GROUP, (group + 1) * GROUP):
        value = ws.y[i]
        if value >= threshold:
            mass = _mass(_z(value, maximum, scale))
            if r < mass:
                return i
            r -= mass
            token = i
    return token


@_jit
def _draw_listed(count, r, ws):
    """The place in the list of the first survivor whose cumulative mass exceeds r."""
    first = 0
    while first + GROUP < count:
        mass = 0
        for j in range(GROUP):
            mass += ws.mass[np.uint64(first + j)]
        if r < mass:
            break
        r -= mass
        first += GROUP
    for i in range(first, count):
        if r < ws.mass[i]:
            return i
        r -= ws.mass[i]
    return count - 1


@_jit
def _find(count, token, ws):
    """The place of `token` in the list, or -1."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if ws.ids[middle] < token:
            low = middle + 1
        else:
            high = middle
    return low if low < count and ws.ids[low] == token else -1


@_jit
def _count_larger(groups, value, ws):
    """How many of the row are strictly larger than `value`, which may be -inf."""
    key = _key(value)
    larger = 0
    for group in range(groups):
        if ws.group_keys[group] > key:
            for i in range(group * GROUP, (group + 1) * GROUP):
                larger += 1 if ws.y[i] > value else 0
    return larger


# --------------------------------------------------------------------------- the output record


@_jit
def _clear_lists(output, o, off):
    """Lists that nothing was asked of."""
    nan = _bits32(_NAN)
    for j in range(2 * off.max_logprobs):
        output[o + off.top_ids + j] = -1
    for j in range(off.max_logprobs):
        output[o + off.top_logprobs + j] = nan
    for j in range(off.max_logprob_ids):
        output[o + off.given_logprobs + j] = nan


@_jit
def _clear_record(output, o, off):
    """A record that says nothing was drawn; the lists unasked for."""
    for j in range(off.output_words):
        output[o + j] = 0
    _write64(output, o + Output.TOKEN_ID, np.int64(-1))
    output[o + Output.LOGPROB] = _bits32(_NAN)
    _clear_lists(output, o, off)


@_jit
def _write_top(output, o, off, k, token, logprob):
    _write64(output, o + off.top_ids + 2 * k, np.int64(token))
    output[o + off.top_logprobs + k] = _bits32(logprob)


@_jit_once
def _write_raw_top(output, o, off, wanted, groups, maximum, log_norm, ws):
    """The best raw logprobs of a row in raw form. Uses the list."""
    # Beside +inf nothing else has a probability.
    count = _list_largest(groups, wanted, _INF if maximum == _INF else -_INF, ws)
    _sort_list(count, ws)
    for k in range(wanted):
        if k < count:
            place = np.int64(ws.keys[k])
            logprob = _raw_logprob(ws.values[place], maximum, log_norm)
            _write_top(output, o, off, k, ws.ids[place], logprob)
        else:
            _write_top(output, o, off, k, np.int32(-1), -_INF)


@_jit
def _advance(state, s, token, finish, tables, slot, off):
    """The slot's state after `token`."""
    _write64(state, s + State.POSITION, _read64(state, s + State.POSITION) + 1)
    _write64(state, s + State.LAST_TOKEN, np.int64(token))
    state[s + State.NUM_GENERATED] += 1
    state[s + State.FINISH_REASON] = finish
    for j in range(off.recent_tokens - 1, 0, -1):
        state[s + State.RECENT + j] = state[s + State.RECENT + j - 1]
    if off.recent_tokens > 0:
        state[s + State.RECENT] = token
    if off.penalties:
        word = off.output_bits + slot * off.bitmap_words + token // 32
        bit = np.int32(np.int64(1) << (token % 32))
        count = off.counts + slot * off.vocab_size + token
        tables[count] = tables[count] + 1 if tables[word] & bit else 1
        tables[word] |= bit


@_jit
def _finish_reason(token, params, p, generated, off):
    for k in range(params[p + Param.NUM_STOP]):
        if params[p + off.stop_ids + k] == token:
            return _STOP
    limit = params[p + Param.MAX_TOKENS]
    return _LENGTH if 0 < limit <= generated else _NONE


# --------------------------------------------------------------------------- a row


@_jit_once
def _step_row(
    row, slot, logits, kind, start, params, state, tables, output,
    bitmask, mask_at, words, off, ws,
):  # fmt: skip
    o = row * off.output_words
    p = slot * off.params_words
    s = slot * off.state_words
    if slot < 0 or slot >= off.max_requests or not params[p + Param.FLAGS] & _F_ADMITTED:
        _clear_record(output, o, off)
        output[o + Output.FLAGS] = _R_PADDING
        return
    _clear_record(output, o, off)
    output[o + Output.GENERATION] = state[s + State.GENERATION]
    finish = state[s + State.FINISH_REASON]
    if finish != _NONE:
        output[o + Output.FINISH_REASON] = finish
        output[o + Output.FLAGS] = _R_FINISHED
        return

    size = off.vocab_size
    groups = (size + GROUP - 1) // GROUP
    flags = params[p + Param.FLAGS]
    num_top = np.int64(params[p + Param.TOP_LOGPROBS])
    num_given = np.int64(params[p + Param.NUM_GIVEN])
    processed = flags & _F_PROCESSED != 0
    wants_logprobs = flags & _F_LOGPROBS != 0 or num_top > 0 or num_given > 0
    row_flags = _R_NAN if _load_row(logits, kind, start, size, ws) else 0

    raw_max, raw_log = _INF, 0.0
    if wants_logprobs and not processed:
        raw_max, raw_log = _raw_normaliser(groups, ws)
        if num_top > 0:
            _write_raw_top(output, o, off, num_top, groups, raw_max, raw_log, ws)

    changed, pos_inf = _make_y(
        logits, kind, start, bitmask, mask_at, params, p, state, s, slot, tables, off, ws
    )
    if pos_inf:
        row_flags |= _R_POS_INF

    # Survivors: dense (count = -1) or listed. `total` is their mass where masses are needed.
    key = _best_key(groups, ws)
    maximum = _value(key)
    threshold = -_INF
    scale = _LOG2_E / np.float64(_read_float(params, p + Param.TEMPERATURE))
    count = -1
    total = 0
    place = 0
    num_kept = 0
    if key == _BANNED or flags & _F_GREEDY:
        if key == _BANNED:
            row_flags |= _R_EMPTY
            token = 0
            if mask_at >= 0:
                for i in range(size):
                    if (bitmask[mask_at + i // 32] >> (i % 32)) & 1:
                        token = i
                        break
            maximum = np.float32(0.0)
        else:
            token = _first_equal(groups, key, ws)
        count, num_kept = 1, 1
        ws.ids[0] = token
        ws.values[0] = maximum
        _, total = _weigh(count, 1.0, ws)
    else:
        count, threshold, maximum, total = _filter_row(params, p, groups, maximum, scale, off, ws)
        word = np.uint64(0)
        if words.size > 0:
            word = np.uint64(words[row])
        else:
            seed = np.uint64(_read64(params, p + Param.SEED))
            position = np.uint64(_read64(state, s + State.POSITION))
            word = _philox_word(seed, position, np.uint64(_TARGET))
        r = np.int64(_high_product(word, np.uint64(total)))
        if count < 0:
            token = _draw_dense(groups, maximum, scale, threshold, r, ws)
        else:
            place = _draw_listed(count, r, ws)
            token = int(ws.ids[place])
        if flags & _F_FILTERED:
            num_kept = count
            if count < 0:
                num_kept = 0
                for i in range(groups * GROUP):
                    num_kept += 1 if ws.y[i] >= threshold else 0

    generated = state[s + State.NUM_GENERATED] + 1
    finish = _finish_reason(token, params, p, generated, off)
    _write64(output, o + Output.TOKEN_ID, np.int64(token))
    output[o + Output.NUM_KEPT] = num_kept
    output[o + Output.FINISH_REASON] = finish
    output[o + Output.FLAGS] = row_flags

    if flags & _F_RANK and processed:
        value = ws.y[token] if count < 0 else ws.values[place]
        output[o + Output.RANK] = 1 + _count_larger(groups, value, ws)
    if wants_logprobs and processed:
        log_total = math.log(np.float64(total) / _ONE)
        _write_processed(
            output, o, token, params, p, count, threshold, groups, maximum, scale, log_total,
            off, ws,
        )  # fmt: skip
    if not processed:
        logit = _logit(logits, kind, start + token)
        if flags & _F_LOGPROBS:
            output[o + Output.LOGPROB] = _bits32(_raw_logprob(logit, raw_max, raw_log))
        for k in range(num_given):
            given = np.int64(params[p + off.given_ids + k])
            other = _logit(logits, kind, start + given)
            logprob = _raw_logprob(other, raw_max, raw_log)
            output[o + off.given_logprobs + k] = _bits32(logprob)
        if flags & _F_RANK:
            if changed:
                _load_row(logits, kind, start, size, ws)
            value = logit if logit > -_INF else -_INF
            output[o + Output.RANK] = 1 + _count_larger(groups, value, ws)
    _advance(state, s, token, finish, tables, slot, off)


@_jit_once
def _filter_row(params, p, groups, maximum, scale, off, ws):
    """Applies the filters in the contract's order; returns (count, threshold, the survivors'
    maximum, their mass).

    count < 0: the survivors are the y >= threshold, and `group_mass` holds their masses. Else
    they are listed, with their masses.
    """
    top_k = np.int64(params[p + Param.TOP_K])
    top_p = _read_float(params, p + Param.TOP_P)
    typical = _read_float(params, p + Param.TYPICAL_P)
    epsilon = _read_float(params, p + Param.EPSILON_CUTOFF)
    eta = _read_float(params, p + Param.ETA_CUTOFF)
    sigmas = _read_float(params, p + Param.TOP_N_SIGMA)
    threshold = -_INF
    if sigmas > 0:
        threshold = _sigma_bound(groups, maximum, sigmas, ws)
    if _read_float(params, p + Param.MIN_P) > 0:
        offset = _float64(_read64(params, p + Param.MIN_P_OFFSET))
        threshold = max(threshold, _round_down(np.float64(maximum) + offset))

    total, mean, has_mean = 0, 0.0, False
    count = -1
    if 0 < top_k < off.vocab_size:
        count = _list_largest(groups, top_k, threshold, ws)
        _, total = _weigh(count, scale, ws)
        if top_p < 1:
            count, total = _cut(count, True, _share(total, top_p), ws)
    elif top_p < 1:
        total = _add_masses(groups, maximum, scale, threshold, ws)
        target = _share(total, top_p)
        bound = _top_p_bound(groups, target, total, off.vocab_size, maximum, scale, ws)
        count = _gather(groups, max(threshold, bound), ws)
        _weigh(count, scale, ws)
        count, total = _cut(count, True, target, ws)
    elif typical < 1 or epsilon > 0 or eta > 0:
        if groups > _LISTED_GROUPS:
            total, _, mean = _survey(groups, maximum, scale, threshold, ws)
            has_mean = True
            bound = _later_bound(
                groups, total, mean, typical, epsilon, eta, off.vocab_size, maximum, scale, ws
            )
            count = _gather(groups, max(threshold, bound), ws)
            _weigh(count, scale, ws)
        else:
            count = _gather(groups, threshold, ws)
            _, total = _weigh(count, scale, ws)
    else:
        return count, threshold, maximum, _add_masses(groups, maximum, scale, threshold, ws)

    if typical < 1:
        if not has_mean:
            mean = _mean_z(count, total, maximum, scale, ws)
        count = _typical_cut(count, total, typical, mean, maximum, scale, ws)
        maximum, total = _weigh(count, scale, ws)  # the largest may be gone
        has_mean = False
    if epsilon > 0:
        log_total = math.log2(np.float64(total) / _ONE)
        bound = math.log2(np.float64(epsilon)) + log_total
        count = _bound_cut(count, bound, maximum, scale, ws)
        total = _sum_masses(count, ws)
        has_mean = False
    if eta > 0:
        if not has_mean:
            mean = _mean_z(count, total, maximum, scale, ws)
        log_total = math.log2(np.float64(total) / _ONE)
        log_eta = math.log2(np.float64(eta))
        bound = min(log_eta + log_total, 0.5 * log_eta + mean)
        count = _bound_cut(count, bound, maximum, scale, ws)
        total = _sum_masses(count, ws)
    return count, threshold, maximum, total


@_jit_once
def _write_processed(
    output, o, token, params, p, count, threshold, groups, maximum, scale, log_total, off, ws
):
    """Token's, given and top logprobs of the distribution that was drawn from."""
    if params[p + Param.FLAGS] & _F_LOGPROBS:
        logprob = _processed_logprob(token, count, threshold, maximum, scale, log_total, ws)
        output[o + Output.LOGPROB] = _bits32(logprob)
    for k in range(params[p + Param.NUM_GIVEN]):
        given = np.int64(params[p + off.given_ids + k])
        logprob = _processed_logprob(given, count, threshold, maximum, scale, log_total, ws)
        output[o + off.given_logprobs + k] = _bits32(logprob)
    wanted = np.int64(params[p + Param.TOP_LOGPROBS])
    if wanted == 0:
        return
    if count < 0:
        count = _list_largest(groups, wanted, threshold, ws)
    elif count > wanted:
        count, _ = _cut(count, False, wanted, ws)
    _sort_list(count, ws)
    for k in range(wanted):
        if k < count:
            place = np.int64(ws.keys[k])
            z = _z(ws.values[place], maximum, scale)
            logprob = np.float32(z * _LN2 - log_total)
            _write_top(output, o, off, k, ws.ids[place], logprob)
        else:
            _write_top(output, o, off, k, np.int32(-1), -_INF)


@_jit
def _processed_logprob(token, count, threshold, maximum, scale, log_total, ws):
    if count < 0:
        value = ws.y[token]
        if not value >= threshold:
            return -_INF
    else:
        place = _find(count, token, ws)
        if place < 0:
            return -_INF
        value = ws.values[place]
    return np.float32(_z(value, maximum, scale) * _LN2 - log_total)


# --------------------------------------------------------------------------- a given token


@_jit
def _raw_entropy(groups, maximum, log_norm, ws):
    """The entropy in nats of a row in raw form; NaN without a finite entry."""
    if maximum == _INF:
        return np.float32(log_norm)
    if maximum == -_INF:
        return _NAN
    _, weight, mean = _survey(groups, maximum, _LOG2_E, -_INF, ws)
    return np.float32(max(math.log(weight / _ONE) - mean * _LN2, 0.0))


@_jit_once
def _score_row(
    position, logits, kind, start, token, given_ids, num_given, output, rank, entropy, off, ws
):
    """The record of a position whose row starts at entry `start`; start < 0: it has none."""
    o = position * off.output_words
    for j in range(off.output_words):
        output[o + j] = 0
    _clear_lists(output, o, off)
    output[o + PositionRecord.LARGEST] = _bits32(-_INF)
    output[o + PositionRecord.LOGPROB] = _bits32(_NAN)
    output[o + PositionRecord.ENTROPY] = _bits32(_NAN)
    if start < 0:
        output[o + PositionRecord.FLAGS] = _R_PADDING
        return
    size = off.vocab_size
    groups = (size + GROUP - 1) // GROUP
    row_flags = _R_NAN if _load_row(logits, kind, start, size, ws) else 0
    maximum, log_norm = _raw_normaliser(groups, ws)
    if maximum == _INF:
        row_flags |= _R_POS_INF
    elif maximum == -_INF:
        row_flags |= _R_EMPTY
    output[o + PositionRecord.LARGEST] = _bits32(maximum)
    output[o + PositionRecord.LOG_NORMALISER] = _bits32(np.float32(log_norm))
    output[o + PositionRecord.FLAGS] = row_flags
    if off.max_logprobs > 0:
        _write_raw_top(output, o, off, off.max_logprobs, groups, maximum, log_norm, ws)
    if entropy:
        output[o + PositionRecord.ENTROPY] = _bits32(_raw_entropy(groups, maximum, log_norm, ws))
    if token >= 0:
        logit = _logit(logits, kind, start + token)
        output[o + PositionRecord.LOGPROB] = _bits32(_raw_logprob(logit, maximum, log_norm))
        if rank:
            value = logit if logit > -_INF else -_INF
            output[o + PositionRecord.RANK] = 1 + _count_larger(groups, value, ws)
    for k in range(num_given):
        given = given_ids[position * num_given + k]
        if given >= 0:
            logprob = _raw_logprob(_logit(logits, kind, start + given), maximum, log_norm)
            output[o + off.given_logprobs + k] = _bits32(logprob)


def _offsets_digest() -> int:
    """A number that changes with the record offsets, which the compiled code holds as constants."""
    kinds: tuple[type[IntEnum], ...] = (Param, State, Output, PositionRecord)
    text = repr([sorted(kind.__members__.items()) for kind in kinds])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")


OFFSETS_DIGEST: Final = _offsets_digest()


@_jit
def _offsets(sizes):
    return Offsets(
        sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7],
        sizes[8], sizes[9], sizes[10], sizes[11], sizes[12], sizes[13], sizes[14], sizes[15],
        sizes[16], sizes[17], sizes[18], sizes[19], sizes[20], sizes[21], sizes[22],
    )  # fmt: skip


@_entry
def step_rows(
    first, last, logits, kind, row_stride, slots, params, state, tables, output,
    bitmask, mask_stride, words, sizes, buffer,
):  # fmt: skip
    """Steps rows [first, last). Returns OFFSETS_DIGEST as it was compiled in.

    logits: uint8, `kind` its element type, rows `row_stride` elements apart. bitmask: int32, rows
    `mask_stride` words apart, or empty. words: int64, or empty. The records: int32, flat.
    sizes: int64, the fields of `Offsets`, in order (a named tuple takes 50 us to pass).
    buffer: uint8, `workspace_bytes` of this thread's, 64-byte aligned.
    """
    off = _offsets(sizes)
    if first < last:
        ws = _workspace(buffer, off.vocab_size)
        for row in range(first, last):
            mask_at = row * mask_stride if bitmask.size > 0 else -1
            _step_row(
                row, np.int64(slots[row]), logits, kind, row * row_stride, params, state, tables,
                output, bitmask, mask_at, words, off, ws,
            )  # fmt: skip
    return OFFSETS_DIGEST


@_entry
def score_rows(
    first, last, logits, kind, row_stride, rows, token_ids, given_ids, num_given, output, rank,
    entropy, sizes, buffer,
):  # fmt: skip
    """Fills the records of positions [first, last). Returns OFFSETS_DIGEST as it was compiled in.

    logits, kind, row_stride, sizes, buffer: as for `step_rows`. rows: int64, the row of each
    position, negative for none. token_ids, given_ids: int64, flat, negative for none. output:
    int32, flat, of `PositionRecord`.
    """
    off = _offsets(sizes)
    if first < last:
        ws = _workspace(buffer, off.vocab_size)
        for position in range(first, last):
            row = rows[position]
            start = row * row_stride if row >= 0 else -1
            _score_row(
                position, logits, kind, start, token_ids[position], given_ids, num_given, output,
                rank, entropy, off, ws,
            )  # fmt: skip
    return OFFSETS_DIGEST
