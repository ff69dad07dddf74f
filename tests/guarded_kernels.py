"""Kernels that reach outside of what they are given."""

import triton
import triton.language as tl


@triton.jit
def write(values, at, count):
    """Writes `count` words of 128 from `at` on."""
    i = tl.arange(0, 128)
    tl.store(values + at + i, i, mask=i < count)


@triton.jit
def read(values, other, at, count):
    i = tl.arange(0, 128)
    found = tl.load(values + at + i, mask=i < count, other=0)
    tl.store(other + i, found, mask=i < count)


@triton.jit
def add(values, at, count):
    i = tl.arange(0, 128)
    tl.atomic_add(values + at + i, i, mask=i < count)
