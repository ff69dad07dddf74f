"""Words, floats and masses."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphed_sampling.backends.triton_kernels.constants import (
    C0,
    C1,
    C2,
    C3,
    C4,
    C5,
    C6,
    C7,
    C8,
    C9,
    LN_2,
    MASS_BITS,
    ONE,
    ROUND,
)


@triton.jit
def _f32(pointer):
    return tl.load(pointer).to(tl.float32, bitcast=True)


@triton.jit
def _i64(pointer):
    low = tl.load(pointer).to(tl.int64) & 0xFFFFFFFF
    return (tl.load(pointer + 1).to(tl.int64) << 32) | low


@triton.jit
def _store_i64(pointer, value, mask=None):
    tl.store(pointer, value.to(tl.int32), mask=mask)
    tl.store(pointer + 1, (value >> 32).to(tl.int32), mask=mask)


@triton.jit
def _store_f32(pointer, value, mask=None):
    tl.store(pointer, value.to(tl.int32, bitcast=True), mask=mask)


@triton.jit
def _key(y):
    """int32 in the order of the floats, none of them -0.0."""
    bits = y.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _from_key(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _bit_count(bits):
    """How many of int32 bits are set."""
    pairs = bits - ((bits >> 1) & 0x55555555)
    nibbles = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    return ((((nibbles + (nibbles >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24) & 0xFF


@triton.jit
def _lowest_bit(bits):
    """The index of the lowest bit of int32 bits that is set; of none, anything."""
    # A power of two is its exponent as a float.
    lowest = (bits & -bits).to(tl.uint32, bitcast=True).to(tl.float32)
    return (lowest.to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def _exp2(z):
    """2**z, float64; exponents below -1000 count as -1000. The bits of `exact_math.exp2`."""
    z = tl.maximum(z, -1000.0)
    whole = (z + ROUND) - ROUND
    f = z - whole
    r = C9 * f + C8
    r = r * f + C7
    r = r * f + C6
    r = r * f + C5
    r = r * f + C4
    r = r * f + C3
    r = r * f + C2
    r = r * f + C1
    r = r * f + C0
    power = (whole.to(tl.int64) + 1023) << 52
    return r * power.to(tl.float64, bitcast=True)


@triton.jit
def _z(y, largest, scale):
    """(y - largest) * scale in fp32, where the difference may exceed what fp32 holds."""
    return tl.fma(y, 0.5, largest * -0.5) * (scale * 2.0)


@triton.jit
def _exp2_ftz(z):
    # ex2.approx by itself costs two more instructions, which save results below 2**-126.
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [z], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _exp2_any(z):
    return tl.exp2(z)


_fast_exp2 = _exp2_any if triton.knobs.runtime.interpret or torch.version.hip else _exp2_ftz


@triton.jit
def _masses(weights):
    """int64 masses of float64 weights in [0, 1]."""
    return ((weights * ONE + ROUND) - ROUND).to(tl.int64)


@triton.jit
def _log_mass(mass):
    """float64 ln of an int64 mass, in units of the largest weight, within 2**-22; 0 for none."""
    bits = tl.maximum(mass, 1).to(tl.float64).to(tl.int64, bitcast=True)
    exponent = (bits >> 52) - (1023 + MASS_BITS)
    mantissa = (bits & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000
    small = tl.log2(mantissa.to(tl.float64, bitcast=True).to(tl.float32))
    return (exponent.to(tl.float64) + small.to(tl.float64)) * LN_2


@triton.jit
def _round_down(value):
    """The largest fp32 <= value (float64)."""
    near = value.to(tl.float32) + 0.0
    return tl.where(near.to(tl.float64) > value, _from_key(_key(near) - 1), near)


@triton.jit
def _target(share, total):
    """The mass that a share of a total takes: ceil(share * total), share fp32."""
    return tl.ceil(share.to(tl.float64) * total.to(tl.float64)).to(tl.int64)


@triton.jit
def _share(word, total, before, mass):
    """float64 in [0, 1): how far into a part of a total, from `before` on and of that mass, the
    word reaches."""
    # What the multiplication leaves over is how far into its integer part, in 1 / 2**64. Of that
    # the first bits: all of them would round up to a whole, and reach a boundary that the word does
    # not reach.
    fraction = ((word * total).to(tl.uint64) >> 58).to(tl.float64) * 0.015625
    inside = (_mulhi(word, total) - before).to(tl.float64)
    return (inside + fraction) / mass.to(tl.float64)


@triton.jit
def _mulhi(word, total):
    """floor(word * total / 2**64) of 64 unsigned bits and an int64 >= 0."""
    return tl.umulhi(word.to(tl.uint64), total.to(tl.uint64)).to(tl.int64)


@triton.jit
def _round_up(value):
    """The smallest fp32 >= value (float64)."""
    near = value.to(tl.float32) + 0.0
    return tl.where(near.to(tl.float64) < value, _from_key(_key(near) + 1), near)
