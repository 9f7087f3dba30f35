"""The arithmetic of the casts, on blocks in registers: widen, scale, round, decode, random words.

Two forms of the cast live here and give the same bits: integer operations on the bits of float32,
which run everywhere, and the conversion instruction of sm_90 and newer. The interpreter's own FP8
and bfloat16 conversions are not the card's, so inputs are read, widened and written as integers.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Bit patterns of float32: 31 magnitude bits, the exponent field (also the bits of Inf), the hidden
# bit, the bias.
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INFINITY = tl.constexpr(0x7F800000)
HIDDEN = tl.constexpr(0x00800000)
BIAS = tl.constexpr(127)
_FLOAT16_REBIAS = tl.constexpr(2.0 ** (127 - 15))
_CONVERT_FOUR = """
    {
        .reg .b16 low, high;
        cvt.rn.satfinite.FORMATx2.f32 low, $2, $1;
        cvt.rn.satfinite.FORMATx2.f32 high, $4, $3;
        mov.b32 $0, {low, high};
    }
"""
_CONVERT_FOUR_E4M3 = tl.constexpr(_CONVERT_FOUR.replace("FORMAT", "e4m3"))
_CONVERT_FOUR_E5M2 = tl.constexpr(_CONVERT_FOUR.replace("FORMAT", "e5m2"))


@triton.jit
def as_words(pointer):
    """The same address as a pointer to integers of the width of what lies there."""
    if pointer.dtype.element_ty.primitive_bitwidth == 32:
        words = pointer.to(tl.pointer_type(tl.int32), bitcast=True)
    elif pointer.dtype.element_ty.primitive_bitwidth == 16:
        words = pointer.to(tl.pointer_type(tl.int16), bitcast=True)
    else:
        words = pointer.to(tl.pointer_type(tl.uint8), bitcast=True)
    return words


@triton.jit
def as_floats(bits):
    """int32 bit patterns as the float32 they are."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def as_bits(values):
    """float32 as its int32 bit patterns."""
    return values.to(tl.int32, bitcast=True)


@triton.jit
def widened(words, element: tl.constexpr, HARDWARE: tl.constexpr):
    """The bits of float32, as int32, of the words of a float32, bfloat16 or float16."""
    if element == tl.float32:
        bits = words
    elif element == tl.bfloat16:
        bits = words.to(tl.int32) << 16
    elif HARDWARE:
        # Exact, but for the sign and payload of NaN, which satfinite does not keep either.
        bits = as_bits(words.to(tl.float16, bitcast=True).to(tl.float32))
    else:
        # Read as a float32, a float16 magnitude is too small by the ratio of the biases, and so is
        # a subnormal. Inf and NaN keep their mantissa and take the whole exponent field.
        magnitude = (words.to(tl.int32) & 0x7FFF) << 13
        bits = as_bits(as_floats(magnitude) * _FLOAT16_REBIAS)
        bits = tl.where(magnitude >= (0x7C00 << 13), magnitude | INFINITY, bits)
        bits = bits | ((words.to(tl.int32) & 0x8000) << 16)
    return bits


@triton.jit
def cast_to_codes(y, bits, random, RULE: tl.constexpr):
    """Codes, as uint8, of values whose float32 bits are y.

    Args:
        y: int32, what is rounded.
        bits: int32, the input before scaling: the sign is its, since a card's multiply gives NaN
            without one.
        random: uint32 words for "stochastic", otherwise None.
        RULE: A `CastRule`.
    """
    if RULE.hardware:
        if RULE.float8 == "fp8e4nv":
            codes = as_floats(y).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        else:
            codes = as_floats(y).to(tl.float8e5).to(tl.uint8, bitcast=True)
    else:
        codes = _cast_by_integers(y & MAGNITUDE, bits, random, RULE).to(tl.uint8)
    return codes


@triton.jit
def cast_four_to_codes(y, bits, random, RULE: tl.constexpr):
    """As `cast_to_codes`, for codes that are used both one by one and as words of four."""
    if RULE.hardware:
        # Where the results of two conversions make a word, ptxas lets the second one merge them. It
        # then forgets other uses of the first: with 12.8 those read a register that was never set,
        # 13.0 crashes. So a result has one use here, its word, and codes are taken from that.
        codes = tl.inline_asm_elementwise(
            _CONVERT_FOUR_E4M3 if RULE.float8 == "fp8e4nv" else _CONVERT_FOUR_E5M2,
            "=r,r,r,r,r",
            [as_floats(y)],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )
    else:
        codes = _cast_by_integers(y & MAGNITUDE, bits, random, RULE).to(tl.uint8)
    return codes


@triton.jit
def _cast_by_integers(magnitude, bits, random, RULE: tl.constexpr):
    MAX_CODE: tl.constexpr = RULE.max_code
    OVERFLOW_CODE: tl.constexpr = RULE.overflow_code
    INFINITY_CODE: tl.constexpr = RULE.infinity_code
    NAN_CODE: tl.constexpr = RULE.nan_code
    code = _rounded(magnitude, random, RULE)
    code = tl.where(code > MAX_CODE, OVERFLOW_CODE, code)
    code = tl.where(magnitude == INFINITY, INFINITY_CODE, code)
    code = tl.where(magnitude > INFINITY, NAN_CODE, code)
    sign = (bits >> 24) & 0x80
    if not RULE.negative_zero:
        # NaN sits where -0 would be.
        sign = tl.where((code == 0) | (code == NAN_CODE), 0, sign)
    elif not RULE.keep_nan_sign:
        sign = tl.where(code == NAN_CODE, 0, sign)
    return code | sign


@triton.jit
def _rounded(magnitude, random, RULE: tl.constexpr):
    """The code of a float32 magnitude, as if the format's exponents had no end."""
    MANTISSA_BITS: tl.constexpr = RULE.mantissa_bits
    LOWEST_FIELD: tl.constexpr = RULE.min_exponent + BIAS
    BIT_COUNT: tl.constexpr = RULE.bit_count
    field = tl.maximum(magnitude >> 23, 1)
    significand = (magnitude & (HIDDEN - 1)) | tl.where(magnitude >= HIDDEN, HIDDEN, 0)
    binade = tl.maximum(field, LOWEST_FIELD)
    drop = 23 - MANTISSA_BITS + binade - field
    # 24 bits of significand lie below half of the last kept bit once 25 are dropped.
    shift = tl.minimum(drop, 25)
    kept = significand >> shift
    if RULE.rounding == "nearest_even":
        kept = (significand + (1 << (shift - 1)) - 1 + (kept & 1)) >> shift
    elif RULE.rounding == "stochastic":
        rest = (significand - (kept << shift)).to(tl.uint32)
        right = tl.minimum(tl.maximum(drop - BIT_COUNT, 0), 31).to(tl.uint32)
        left = tl.minimum(tl.maximum(BIT_COUNT - drop, 0), 31).to(tl.uint32)
        # floor(fraction * 2**BIT_COUNT)
        threshold = (rest >> right) << left
        if BIT_COUNT < 32:
            random = random & ((1 << BIT_COUNT) - 1)
        kept += (random < threshold).to(tl.int32)
    # Codes count magnitudes in order: a carry out of the mantissa is the next binade's first code.
    return ((binade - LOWEST_FIELD) << MANTISSA_BITS) + kept


@triton.jit
def decoded(code, RULE: tl.constexpr):
    """The float32 values of codes given as int32: each is exact. RULE: a `DecodeRule`."""
    if RULE.hardware:
        if RULE.float8 == "fp8e4nv":
            values = code.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
        else:
            values = code.to(tl.uint8).to(tl.float8e5, bitcast=True).to(tl.float32)
    else:
        MANTISSA_BITS: tl.constexpr = RULE.mantissa_bits
        LOWEST_EXPONENT: tl.constexpr = RULE.min_exponent - RULE.mantissa_bits
        MAX_CODE: tl.constexpr = RULE.max_code
        INFINITY_CODE: tl.constexpr = RULE.infinity_code
        magnitude = code & 0x7F
        field = magnitude >> MANTISSA_BITS
        hidden = tl.where(field > 0, 1 << MANTISSA_BITS, 0)
        significand = (magnitude & ((1 << MANTISSA_BITS) - 1)) | hidden
        # significand * 2**exponent, both exact, the power made from its bits; no subnormal on the
        # way.
        exponent = tl.maximum(field, 1) - 1 + LOWEST_EXPONENT
        power = as_floats((exponent + BIAS) << 23)
        bits = as_bits(significand.to(tl.float32) * power)
        if RULE.negative_zero:
            special = tl.where(magnitude == INFINITY_CODE, INFINITY, MAGNITUDE)
            bits = tl.where(magnitude > MAX_CODE, special, bits)
        else:
            bits = tl.where(code == 0x80, MAGNITUDE, bits)
        values = as_floats(bits | ((code & 0x80) << 24))
    return values


@triton.jit
def given_factor(factor):
    """A factor that is a number or a pointer to one."""
    if factor.dtype.is_ptr():
        value = tl.load(factor)
    else:
        value = factor
    return value


@triton.jit
def random_word(seed, offset, index):
    """The random word of an element: word index % 4 of Philox at offset + index // 4 (int64)."""
    first, second, third, fourth = tl.randint4x(given_factor(seed), offset + (index >> 2))
    place = index & 3
    low = tl.where(place == 0, first, second)
    high = tl.where(place == 2, third, fourth)
    return tl.where(place < 2, low, high).to(tl.uint32, bitcast=True)


@triton.jit
def random_words(seed, first_group, BLOCK: tl.constexpr):
    """The words of BLOCK neighbours, the first at a multiple of 4: one Philox call for four."""
    group = first_group + tl.arange(0, BLOCK // 4)
    first, second, third, fourth = tl.randint4x(given_factor(seed), group)
    words = tl.interleave(tl.interleave(first, third), tl.interleave(second, fourth))
    return words.to(tl.uint32, bitcast=True)
