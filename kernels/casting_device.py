"""The elementwise kernels of the casts: quantise, dequantise, requantise, a flat run of elements.

Full blocks carry no mask: where n is not a multiple of the vector width, one would make every
access a scalar one. Each branch holds the whole body, so that neither decides how the other spreads
its elements over threads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp8lab.kernels.casting_arithmetic import (
    INFINITY,
    MAGNITUDE,
    as_bits,
    as_floats,
    as_words,
    cast_to_codes,
    decoded,
    given_factor,
    random_words,
    widened,
)


# Only the last block looks at n: whether it is a multiple of 16 is not worth another compilation.
@triton.jit(do_not_specialize=["n", "seed", "offset"])
def quantize_kernel(
    x,
    codes,
    n,
    scale,  # None, a float32, or a pointer to one
    amax_out,  # None or a pointer to one float32
    seed,  # None, an integer, or a pointer to one
    offset,  # the first group's place in the stream of random words
    RULE: tl.constexpr,  # a CastRule
    BLOCK: tl.constexpr,
):
    """BLOCK elements a program."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    largest = tl.full([], 0, tl.int32)
    if start + BLOCK <= n:
        largest = _quantize_block(x, codes, n, scale, seed, offset, start, False, RULE, BLOCK)
    else:
        # In pieces, or scalar accesses would take twice the registers, and all programs with them.
        PIECES: tl.constexpr = 8 if BLOCK >= 1024 else 1
        PIECE: tl.constexpr = BLOCK // PIECES
        for piece in range(PIECES):
            found = _quantize_block(
                x, codes, n, scale, seed, offset, start + piece * PIECE, True, RULE, PIECE
            )
            largest = tl.maximum(largest, found)
    if amax_out is not None:
        tl.atomic_max(as_words(amax_out), largest, sem="relaxed")


@triton.jit
def _quantize_block(
    x,
    codes,
    n,
    scale,
    seed,
    offset,
    start,
    MASKED: tl.constexpr,
    RULE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Load, scale, cast, store; the largest magnitude."""
    places = start + tl.arange(0, BLOCK)
    if MASKED:
        words = tl.load(as_words(x) + places, mask=places < n, other=0)
    else:
        words = tl.load(as_words(x) + places)
    bits = widened(words, x.dtype.element_ty, RULE.hardware)
    y = bits
    if scale is not None:
        y = as_bits(as_floats(bits) * given_factor(scale))
    random = None
    if RULE.rounding == "stochastic":
        random = random_words(seed, offset + (start >> 2), BLOCK)
    result = cast_to_codes(y, bits, random, RULE)
    if MASKED:
        tl.store(as_words(codes) + places, result, mask=places < n)
    else:
        tl.store(as_words(codes) + places, result)
    return tl.max(bits & MAGNITUDE, axis=0)


@triton.jit(do_not_specialize=["n"])
def dequantize_kernel(
    codes,
    values,  # float32
    n,
    inverse_scale,  # None, a float32, or a pointer to one
    RULE: tl.constexpr,  # a DecodeRule
    BLOCK: tl.constexpr,
):
    """BLOCK elements a program."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    if start + BLOCK <= n:
        _dequantize_block(codes, values, n, inverse_scale, start, False, RULE, BLOCK)
    else:
        _dequantize_block(codes, values, n, inverse_scale, start, True, RULE, BLOCK)


@triton.jit
def _dequantize_block(
    codes,
    values,
    n,
    inverse_scale,
    start,
    MASKED: tl.constexpr,
    RULE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Load, decode, scale, store."""
    places = start + tl.arange(0, BLOCK)
    if MASKED:
        code = tl.load(as_words(codes) + places, mask=places < n, other=0).to(tl.int32)
    else:
        code = tl.load(as_words(codes) + places).to(tl.int32)
    value = decoded(code, RULE)
    if inverse_scale is not None:
        value = value * given_factor(inverse_scale)
    if MASKED:
        tl.store(as_words(values) + places, as_bits(value), mask=places < n)
    else:
        tl.store(as_words(values) + places, as_bits(value))


@triton.jit
def requantize_kernel(
    codes,
    result,
    n,
    inverse_scale,  # None or a pointer to one float32, as is scale
    scale,
    DECODE: tl.constexpr,
    RULE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK elements a program."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < n
    code = tl.load(as_words(codes) + places, mask=inside, other=0).to(tl.int32)
    value = decoded(code, DECODE)
    if inverse_scale is not None or scale is not None:
        # At most 4 + 24 + 24 bits, and exponents far inside float64: no product is rounded.
        exact = value.to(tl.float64)
        if inverse_scale is not None:
            exact = exact * tl.load(inverse_scale).to(tl.float64)
        if scale is not None:
            exact = exact * tl.load(scale).to(tl.float64)
        y = _rounded_to_odd(exact)
    else:
        y = as_bits(value)
    signs = as_bits(value)
    if RULE.keep_nan_sign:
        # A NaN that was decoded is positive.
        signs = tl.where((signs & MAGNITUDE) > INFINITY, MAGNITUDE, signs)
    tl.store(as_words(result) + places, cast_to_codes(y, signs, None, RULE), mask=inside)


@triton.jit
def _rounded_to_odd(exact):
    """The bits of float32, toward zero, with the last one set where something was cut off.

    Rounding that to the few bits of an FP8 format gives what rounding the float64 would: the last
    bit keeps it off every tie and every representable value that it is not.
    """
    near = exact.to(tl.float32)
    back = near.to(tl.float64)
    bits = as_bits(near)
    bits = tl.where(tl.abs(back) > tl.abs(exact), bits - 1, bits)
    inexact = (back != exact) & ((bits & MAGNITUDE) < INFINITY)
    return tl.where(inexact, bits | 1, bits)
