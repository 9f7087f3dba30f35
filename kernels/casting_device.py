"""The kernels of the casts: what runs on the device.

Two forms of the cast live here and give the same bits: integer operations on the bits of float32,
which run everywhere, and the conversion instruction of sm_90 and newer. The interpreter's own FP8
and bfloat16 conversions are not the card's, so inputs are read, widened and written as integers.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Bit patterns of float32: 31 magnitude bits, the exponent field (also the bits of Inf), the hidden
# bit, the bias.
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_INFINITY = tl.constexpr(0x7F800000)
_HIDDEN = tl.constexpr(0x00800000)
_BIAS = tl.constexpr(127)
_FLOAT16_REBIAS = tl.constexpr(2.0 ** (127 - 15))


@triton.jit
def quantize_kernel(
    x,  # the words of the input
    codes,  # uint8
    n,
    scale,  # as SCALE says: None, a float32, or a pointer to one
    amax_out,  # None or a pointer to the bits of one float32
    INPUT: tl.constexpr,
    SCALE: tl.constexpr,
    HARDWARE: tl.constexpr,
    FLOAT8: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
    MAX_CODE: tl.constexpr,
    OVERFLOW_CODE: tl.constexpr,
    INFINITY_CODE: tl.constexpr,
    NAN_CODE: tl.constexpr,
    KEEP_NAN_SIGN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK elements a program."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    # Full blocks carry no mask: where n is not a multiple of the vector width, one would make every
    # access a scalar one. Each branch holds the whole body, so that neither decides how the other
    # spreads its elements over threads.
    if start + BLOCK <= n:
        _quantize_block(
            x,
            codes,
            n,
            scale,
            amax_out,
            start,
            False,
            INPUT,
            SCALE,
            HARDWARE,
            FLOAT8,
            MANTISSA_BITS,
            MIN_EXPONENT,
            MAX_CODE,
            OVERFLOW_CODE,
            INFINITY_CODE,
            NAN_CODE,
            KEEP_NAN_SIGN,
            BLOCK,
        )
    else:
        _quantize_block(
            x,
            codes,
            n,
            scale,
            amax_out,
            start,
            True,
            INPUT,
            SCALE,
            HARDWARE,
            FLOAT8,
            MANTISSA_BITS,
            MIN_EXPONENT,
            MAX_CODE,
            OVERFLOW_CODE,
            INFINITY_CODE,
            NAN_CODE,
            KEEP_NAN_SIGN,
            BLOCK,
        )


@triton.jit
def _quantize_block(
    x,
    codes,
    n,
    scale,
    amax_out,
    start,
    MASKED: tl.constexpr,
    INPUT: tl.constexpr,
    SCALE: tl.constexpr,
    HARDWARE: tl.constexpr,
    FLOAT8: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
    MAX_CODE: tl.constexpr,
    OVERFLOW_CODE: tl.constexpr,
    INFINITY_CODE: tl.constexpr,
    NAN_CODE: tl.constexpr,
    KEEP_NAN_SIGN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Load, amax, scale, cast, store."""
    offsets = start + tl.arange(0, BLOCK)
    if MASKED:
        words = tl.load(x + offsets, mask=offsets < n, other=0)
    else:
        words = tl.load(x + offsets)
    bits = _widened(words, INPUT, HARDWARE)
    if amax_out is not None:
        tl.atomic_max(amax_out, tl.max(bits & _MAGNITUDE, axis=0), sem="relaxed")

    if SCALE == "none":
        y = bits
    else:
        if SCALE == "tensor":
            factor = tl.load(scale)
        else:
            factor = scale
        y = (bits.to(tl.float32, bitcast=True) * factor).to(tl.int32, bitcast=True)
    if HARDWARE:
        value = y.to(tl.float32, bitcast=True)
        if FLOAT8 == "fp8e4nv":
            result = value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        else:
            result = value.to(tl.float8e5).to(tl.uint8, bitcast=True)
    else:
        magnitude = _rounded(y & _MAGNITUDE, MANTISSA_BITS, MIN_EXPONENT)
        magnitude = tl.where(magnitude > MAX_CODE, OVERFLOW_CODE, magnitude)
        magnitude = tl.where((y & _MAGNITUDE) == _INFINITY, INFINITY_CODE, magnitude)
        magnitude = tl.where((y & _MAGNITUDE) > _INFINITY, NAN_CODE, magnitude)
        # The sign is x's: a card's multiply gives NaN without one.
        sign = (bits >> 24) & 0x80
        if not KEEP_NAN_SIGN:
            sign = tl.where(magnitude == NAN_CODE, 0, sign)
        result = (magnitude | sign).to(tl.uint8)
    if MASKED:
        tl.store(codes + offsets, result, mask=offsets < n)
    else:
        tl.store(codes + offsets, result)


@triton.jit
def _widened(words, INPUT: tl.constexpr, HARDWARE: tl.constexpr):
    """The bits of float32, as int32, of the words of a float32, bfloat16 or float16."""
    if INPUT == "float32":
        bits = words
    elif INPUT == "bfloat16":
        bits = words.to(tl.int32) << 16
    elif HARDWARE:
        # Exact, but for the sign and payload of NaN, which satfinite does not keep either.
        value = words.to(tl.float16, bitcast=True).to(tl.float32)
        bits = value.to(tl.int32, bitcast=True)
    else:
        # Read as a float32, a float16 magnitude is too small by the ratio of the biases, and so is
        # a subnormal. Inf and NaN keep their mantissa and take the whole exponent field.
        magnitude = (words.to(tl.int32) & 0x7FFF) << 13
        value = magnitude.to(tl.float32, bitcast=True) * _FLOAT16_REBIAS
        bits = value.to(tl.int32, bitcast=True)
        bits = tl.where(magnitude >= (0x7C00 << 13), magnitude | _INFINITY, bits)
        bits = bits | ((words.to(tl.int32) & 0x8000) << 16)
    return bits


@triton.jit
def _rounded(magnitude, MANTISSA_BITS: tl.constexpr, MIN_EXPONENT: tl.constexpr):
    """The code of a float32 magnitude, to nearest even, as if the format's exponents had no end."""
    field = tl.maximum(magnitude >> 23, 1)
    significand = (magnitude & (_HIDDEN - 1)) | tl.where(magnitude >= _HIDDEN, _HIDDEN, 0)
    binade = tl.maximum(field, MIN_EXPONENT + _BIAS)
    # 24 bits of significand lie below half of the last kept bit once 25 are dropped.
    shift = tl.minimum(23 - MANTISSA_BITS + binade - field, 25)
    kept = significand >> shift
    kept = (significand + (1 << (shift - 1)) - 1 + (kept & 1)) >> shift
    # Codes count magnitudes in order: a carry out of the mantissa is the next binade's first code.
    return ((binade - (MIN_EXPONENT + _BIAS)) << MANTISSA_BITS) + kept


@triton.jit
def dequantize_kernel(
    codes,  # uint8
    values,  # the bits of float32
    n,
    inverse_scale,  # as SCALE says: None, a float32, or a pointer to one
    SCALE: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
    MAX_CODE: tl.constexpr,
    INFINITY_CODE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK elements a program; one body for a full block and one for the last, as above."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    if start + BLOCK <= n:
        _dequantize_block(
            codes,
            values,
            n,
            inverse_scale,
            start,
            False,
            SCALE,
            MANTISSA_BITS,
            MIN_EXPONENT,
            MAX_CODE,
            INFINITY_CODE,
            BLOCK,
        )
    else:
        _dequantize_block(
            codes,
            values,
            n,
            inverse_scale,
            start,
            True,
            SCALE,
            MANTISSA_BITS,
            MIN_EXPONENT,
            MAX_CODE,
            INFINITY_CODE,
            BLOCK,
        )


@triton.jit
def _dequantize_block(
    codes,
    values,
    n,
    inverse_scale,
    start,
    MASKED: tl.constexpr,
    SCALE: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
    MAX_CODE: tl.constexpr,
    INFINITY_CODE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Load, decode, scale, store."""
    offsets = start + tl.arange(0, BLOCK)
    if MASKED:
        code = tl.load(codes + offsets, mask=offsets < n, other=0).to(tl.int32)
    else:
        code = tl.load(codes + offsets).to(tl.int32)

    magnitude = code & 0x7F
    field = magnitude >> MANTISSA_BITS
    hidden = tl.where(field > 0, 1 << MANTISSA_BITS, 0)
    significand = (magnitude & ((1 << MANTISSA_BITS) - 1)) | hidden
    # significand * 2**exponent, both exact, the power made from its bits; no subnormal on the way.
    exponent = tl.maximum(field, 1) - 1 + (MIN_EXPONENT - MANTISSA_BITS)
    power = ((exponent + _BIAS) << 23).to(tl.float32, bitcast=True)
    bits = (significand.to(tl.float32) * power).to(tl.int32, bitcast=True)
    special = tl.where(magnitude == INFINITY_CODE, _INFINITY, _MAGNITUDE)
    bits = tl.where(magnitude > MAX_CODE, special, bits)
    value = (bits | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)
    if SCALE == "tensor":
        value = value * tl.load(inverse_scale)
    elif SCALE == "number":
        value = value * inverse_scale
    if MASKED:
        tl.store(values + offsets, value.to(tl.int32, bitcast=True), mask=offsets < n)
    else:
        tl.store(values + offsets, value.to(tl.int32, bitcast=True))
