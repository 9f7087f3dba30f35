"""Unscale, finite check and norm on the device: the twin of `fp8lab.emulation.gradients`."""

from __future__ import annotations

import triton
import triton.language as tl

from fp8lab.kernels.float_device import INFINITY, bits_of, float_of, widened
from fp8lab.kernels.words_device import load_words

# The contract's tree: a leaf is ROWS rows of LANES.
LANES = tl.constexpr(1024)
ROWS = tl.constexpr(16)
LEAF = tl.constexpr(16 * 1024)

# Columns of the table: one row a gradient, as int64.
COLUMNS = tl.constexpr(3)
SIZE = tl.constexpr(0)
FIRST_LEAF = tl.constexpr(1)
ADDRESS = tl.constexpr(2)

_INFINITY64 = tl.constexpr(0x7FF0000000000000)
_NAN64 = tl.constexpr(0x7FF8000000000000)
_MAGNITUDE64 = tl.constexpr(0x7FFFFFFFFFFFFFFF)
_CLIP_EPS = tl.constexpr(1e-6)


@triton.jit
def leaf_kernel(
    table,
    leaf_tensor,  # int32: which gradient each program's leaf is of
    leaves,  # float64, one a leaf
    inverse_scale,  # float32
    INPUT: tl.constexpr,
    ALIGNED: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """One leaf of one gradient a program: the sum of its squares."""
    leaf = tl.program_id(0)
    row = table + tl.load(leaf_tensor + leaf) * COLUMNS
    n = tl.load(row + SIZE)
    start = (leaf - tl.load(row + FIRST_LEAF)) * LEAF
    address = tl.load(row + ADDRESS)
    unscale = tl.load(inverse_scale)
    # A whole leaf carries no mask: one that depends on n would make every access a scalar one.
    if start + LEAF <= n:
        lanes = _lanes(address, start, n, unscale, INPUT, ALIGNED, HARDWARE, False)
    else:
        lanes = _lanes(address, start, n, unscale, INPUT, ALIGNED, HARDWARE, True)
    words = lanes.to(tl.int64, bitcast=True) & _MAGNITUDE64
    top = tl.max(words, axis=0)
    upper, lower = counted(lanes, top)
    total = total_of(tl.sum(upper, axis=0), tl.sum(lower, axis=0), top)
    tl.store(leaves + leaf, total)


@triton.jit
def _lanes(
    address,
    start,
    n,
    unscale,
    INPUT: tl.constexpr,
    ALIGNED: tl.constexpr,
    HARDWARE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The sum of squares of each lane, float64, row after row."""
    lanes = tl.zeros((LANES,), tl.float64)
    for row in tl.static_range(ROWS):
        offsets = start + row * LANES + tl.arange(0, LANES)
        if INPUT == "float32":
            words = load_words(address, offsets, n, MASKED, tl.int32, ALIGNED)
        else:
            words = load_words(address, offsets, n, MASKED, tl.int16, ALIGNED)
        x = (widened(words, INPUT, HARDWARE) * unscale).to(tl.float64)
        lanes += x * x
    return lanes


@triton.jit
def norm_kernel(
    leaves,
    count,
    inverse_scale,  # float32
    max_norm,  # None or a float32
    norm,  # float32
    skip,  # int32: 1 where an element is not finite
    factor,  # float32
    BLOCK: tl.constexpr,
):
    """One program: the order-free sum of all leaves, and what follows from it."""
    top_each = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        terms = tl.load(leaves + place, mask=place < count, other=0)
        top_each = tl.maximum(top_each, terms.to(tl.int64, bitcast=True) & _MAGNITUDE64)
    top = tl.max(top_each, axis=0)
    uppers = tl.zeros((BLOCK,), tl.int64)
    lowers = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        terms = tl.load(leaves + place, mask=place < count, other=0)
        upper, lower = counted(terms, top)
        uppers += upper
        lowers += lower
    total = total_of(tl.sum(uppers, axis=0), tl.sum(lowers, axis=0), top)
    root = tl.sqrt(total).to(tl.float32)
    tl.store(norm, root)
    tl.store(skip, (top >= _INFINITY64).to(tl.int32))
    result = tl.load(inverse_scale)
    if max_norm is not None:
        coefficient = tl.div_rn(1.0, root + _CLIP_EPS) * tl.load(max_norm)
        bits = bits_of(coefficient)
        # Positive floats are ordered as their bits are; NaN stays.
        above = (bits > 0x3F800000) & (bits <= INFINITY)
        coefficient = float_of(tl.where(above, 0x3F800000, bits))
        result = result * coefficient
    tl.store(factor, result)


@triton.jit
def _exponent(top):
    usable = (top > 0) & (top < _INFINITY64)
    return tl.where(usable, (top >> 52) - 1023, 0)


@triton.jit
def counted(terms, top):
    """Terms in units of 2**-60 of the largest one's binade: upper part and lower 30 bits."""
    scale = _power_of_two64(60 - _exponent(top))
    finite = (terms.to(tl.int64, bitcast=True) & _MAGNITUDE64) < _INFINITY64
    integers = tl.where(finite & (top < _INFINITY64), terms * scale, 0.0).to(tl.int64)
    return integers >> 30, integers & 0x3FFFFFFF


@triton.jit
def total_of(upper, lower, top):
    """The sum from its two integers; NaN or Inf where a term is one."""
    sum_of_both = upper.to(tl.float64) * _power_of_two64(top * 0 + 30) + lower.to(tl.float64)
    total = sum_of_both * _power_of_two64(_exponent(top) - 60)
    bits = total.to(tl.int64, bitcast=True)
    bits = tl.where(top == _INFINITY64, _INFINITY64, bits)
    bits = tl.where(top > _INFINITY64, _NAN64, bits)
    return bits.to(tl.float64, bitcast=True)


@triton.jit
def _power_of_two64(exponent):
    return ((exponent + 1023) << 52).to(tl.float64, bitcast=True)
