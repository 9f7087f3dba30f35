"""Counting on the device what a cast did: the twin of `fp8lab.emulation.telemetry`.

A row of the table is COLUMNS int64. All of it is counts that are added and numbers of which the
largest is kept, so that the order in which programs come changes nothing, and a row of zeros is a
row of nothing. The two sums are added exactly: a leaf's float64 is an integer of 53 bits, shifted,
whose 32-bit words go to the words of a long integer; what they carry is left to the reader.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp8lab.kernels.casting_arithmetic import decoded
from fp8lab.kernels.float_device import INFINITY, MAGNITUDE, bits_of, float_of, widened
from fp8lab.kernels.gradients_device import LANES, LEAF, ROWS, counted, total_of

COLUMNS = tl.constexpr(80)
ELEMENTS = tl.constexpr(0)
ZEROS = tl.constexpr(1)
NONFINITE = tl.constexpr(2)
OVERFLOW = tl.constexpr(3)
UNDERFLOW = tl.constexpr(4)
AMAX = tl.constexpr(8)  # the largest magnitude's bits
SCALE = tl.constexpr(9)  # 2**31 less the smallest scale's bits, which are -1 of NaN; 0 of none
SPECIAL = tl.constexpr(10)  # of the errors: 1 where one is infinite, 2 where one is NaN
SIGNAL = tl.constexpr(16)  # 32 words each
NOISE = tl.constexpr(48)
WORDS = tl.constexpr(32)

BINS = tl.constexpr(64)

_NO_SCALE = tl.constexpr(0x7FFFFFFF)
_INFINITY64 = tl.constexpr(0x7FF0000000000000)
_MAGNITUDE64 = tl.constexpr(0x7FFFFFFFFFFFFFFF)
_HIDDEN64 = tl.constexpr(1 << 52)
_LOW32 = tl.constexpr(0xFFFFFFFF)
# A float64's exponent field less this is the place of its last bit, in units of 2**-352.
_FIELD_OF_UNIT = tl.constexpr(1075 - 352)


@triton.jit
def cast_counts_kernel(
    x,  # words of the elements
    codes,  # uint8; None for a cast to BF16
    inverse,  # float32, or E8M0 as uint8: one, or one a block; None for a cast to BF16
    scale,  # one float32; None where it is 1 / inverse
    row,  # int64, COLUMNS of them
    n,
    columns,
    stride_down,  # of inverse
    stride_across,
    INPUT: tl.constexpr,
    RULE: tl.constexpr,  # a DecodeRule, or None
    LIMIT: tl.constexpr,  # bits of the smallest scaled magnitude that overflows
    DOWN: tl.constexpr,  # rows of a block, 0 for all of them
    ACROSS: tl.constexpr,
    E8M0: tl.constexpr,
    SUMS: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """Each program takes every so many-th leaf."""
    zeros = tl.zeros((LANES,), tl.int32)
    nonfinite = tl.zeros((LANES,), tl.int32)
    overflow = tl.zeros((LANES,), tl.int32)
    underflow = tl.zeros((LANES,), tl.int32)
    largest = tl.zeros((LANES,), tl.int32)
    smallest = tl.full((LANES,), _NO_SCALE, tl.int32)
    signal = tl.zeros((WORDS,), tl.int64)
    noise = tl.zeros((WORDS,), tl.int64)
    special = tl.zeros((), tl.int64)
    for leaf in range(tl.program_id(0), tl.cdiv(n, LEAF), tl.num_programs(0)):
        squares = tl.zeros((LANES,), tl.float64)
        errors = tl.zeros((LANES,), tl.float64)
        start = tl.full((), LEAF, tl.int64) * leaf
        first_row = start // columns
        first_column = (start - first_row * columns).to(tl.int32)
        for line in range(ROWS):
            local = line * LANES + tl.arange(0, LANES)
            inside = start + local < n
            words = tl.load(x + start + local, mask=inside, other=0)
            value = widened(words, INPUT, HARDWARE)
            magnitude = bits_of(value) & MAGNITUDE
            if RULE is None:
                # To nearest even, on the magnitude; what is not finite stays.
                up = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) & -0x10000
                back_bits = tl.where(magnitude < INFINITY, up, magnitude)
                value = float_of(magnitude)
                back = float_of(back_bits)
                lost = back_bits == 0
                clipped = back_bits >= INFINITY
                scale_bits = tl.full((LANES,), 0x3F800000, tl.int32)
            else:
                code = tl.load(codes + start + local, mask=inside, other=0).to(tl.int32)
                plain = decoded(code, RULE)
                lost = (bits_of(plain) & MAGNITUDE) == 0
                place = first_column + local
                if DOWN == 0:
                    offset = tl.zeros((LANES,), tl.int32).to(tl.int64)
                else:
                    offset = ((first_row + place // columns) // DOWN) * stride_down
                if ACROSS != 0:
                    offset += ((place % columns) // ACROSS) * stride_across
                inverses = _inverse(inverse + offset, inside, E8M0)
                if scale is None:
                    factor = tl.div_rn(1.0, inverses)
                else:
                    factor = tl.load(scale) + tl.zeros((LANES,), tl.float32)
                back = plain * inverses
                y = bits_of(value * factor) & MAGNITUDE
                clipped = (y >= LIMIT) & (y <= INFINITY)
                scale_bits = bits_of(factor)
                scale_bits = tl.where((scale_bits & MAGNITUDE) > INFINITY, -1, scale_bits)
            finite = inside & (magnitude < INFINITY)
            filled = inside & (magnitude != 0)
            zeros += (inside & (magnitude == 0)).to(tl.int32)
            nonfinite += (inside & (magnitude >= INFINITY)).to(tl.int32)
            overflow += (finite & clipped).to(tl.int32)
            underflow += (filled & lost).to(tl.int32)
            largest = tl.maximum(largest, tl.where(magnitude > INFINITY, MAGNITUDE, magnitude))
            smallest = tl.minimum(smallest, tl.where(filled, scale_bits, _NO_SCALE))
            if SUMS:
                exact = value.to(tl.float64)
                error = tl.where(finite, exact - back.to(tl.float64), 0.0)
                exact = tl.where(finite, exact, 0.0)
                squares += exact * exact
                errors += error * error
        if SUMS:
            signal += _words(_leaf(squares))
            found = _leaf(errors)
            noise += _words(found)
            size = found.to(tl.int64, bitcast=True) & _MAGNITUDE64
            kind = tl.where(size > _INFINITY64, 2, tl.where(size == _INFINITY64, 1, 0))
            special = tl.maximum(special, kind.to(tl.int64))
    _add(row + ZEROS, zeros)
    _add(row + NONFINITE, nonfinite)
    _add(row + OVERFLOW, overflow)
    _add(row + UNDERFLOW, underflow)
    _keep_largest(row + AMAX, tl.max(largest, axis=0).to(tl.int64))
    least = tl.min(smallest, axis=0).to(tl.int64)
    _keep_largest(row + SCALE, tl.where(least == _NO_SCALE, 0, 0x80000000 - least))
    if tl.program_id(0) == 0:
        tl.atomic_add(row + ELEMENTS, tl.zeros((), tl.int64) + n, sem="relaxed")
    if SUMS:
        _keep_largest(row + SPECIAL, special)
        lanes = tl.arange(0, WORDS)
        tl.atomic_add(row + SIGNAL + lanes, signal, mask=signal != 0, sem="relaxed")
        tl.atomic_add(row + NOISE + lanes, noise, mask=noise != 0, sem="relaxed")


@triton.jit
def magnitude_bins_kernel(
    x,  # the words of float32
    bins,  # int64, BINS of them
    n,
    FIRST_EXPONENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK elements a program."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < n
    magnitude = tl.load(x + places, mask=inside, other=0) & MAGNITUDE
    exponent = (magnitude >> 23) - 127
    chosen = 1 + tl.minimum(tl.maximum((exponent - FIRST_EXPONENT) >> 1, 0), BINS - 3)
    chosen = tl.where(magnitude == 0, 0, tl.where(magnitude >= INFINITY, BINS - 1, chosen))
    counts = tl.histogram(chosen, BINS).to(tl.int64)
    lanes = tl.arange(0, BINS)
    # Lanes past the end were counted as zeros.
    outside = BLOCK - tl.sum(inside.to(tl.int32), axis=0)
    counts -= tl.where(lanes == 0, outside, 0)
    tl.atomic_add(bins + lanes, counts, mask=counts != 0, sem="relaxed")


@triton.jit
def _inverse(pointers, mask, E8M0: tl.constexpr):
    """float32 inverse scales; E8M0 code c is 2**(c - 127), and 255 NaN."""
    if E8M0:
        code = tl.load(pointers, mask=mask, other=127).to(tl.int32)
        bits = tl.where(code == 0, 0x00400000, code << 23)
        values = float_of(tl.where(code == 255, MAGNITUDE, bits))
    else:
        values = tl.load(pointers, mask=mask, other=1.0)
    return values


@triton.jit
def _leaf(lanes):
    """The sum over the lanes in any order: see `order_free_sum`."""
    top = tl.max(lanes.to(tl.int64, bitcast=True) & _MAGNITUDE64, axis=0)
    upper, lower = counted(lanes, top)
    return total_of(tl.sum(upper, axis=0), tl.sum(lower, axis=0), top)


@triton.jit
def _words(total):
    """A float64, not negative, as WORDS words of 32 bits in units of 2**-352; 0 of Inf and NaN."""
    bits = total.to(tl.int64, bitcast=True)
    counts = (bits > 0) & (bits < _INFINITY64)
    mantissa = tl.where(counts, (bits & (_HIDDEN64 - 1)) | _HIDDEN64, 0)
    place = tl.where(counts, (bits >> 52) - _FIELD_OF_UNIT, 0)
    shift = place & 31
    low = (mantissa & _LOW32) << shift
    high = (low >> 32) + ((mantissa >> 32) << shift)
    lane = tl.arange(0, WORDS).to(tl.int64) - (place >> 5)
    words = tl.where(lane == 0, low & _LOW32, 0)
    words = tl.where(lane == 1, high & _LOW32, words)
    return tl.where(lane == 2, high >> 32, words)


@triton.jit
def _add(pointer, lanes):
    """Add the lanes' counts, unless there are none."""
    count = tl.sum(lanes, axis=0).to(tl.int64)
    if count != 0:
        tl.atomic_add(pointer, count, sem="relaxed")


@triton.jit
def _keep_largest(pointer, value):
    if value > 0:
        tl.atomic_max(pointer, value, sem="relaxed")
