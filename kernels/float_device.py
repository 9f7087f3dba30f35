"""Floating-point pieces that kernels share: widening, narrowing, one fused multiply-add.

Each has a form in integer or float64 operations, which runs everywhere, and the card's instruction.
Both give the same bits; the interpreter's own conversions and its `tl.fma` are not the card's.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from fp8lab.formats import FloatFormat

MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INFINITY = tl.constexpr(0x7F800000)
_HIDDEN = tl.constexpr(0x00800000)
_SIGN = tl.constexpr(-(1 << 31))
_FLOAT16_REBIAS = tl.constexpr(2.0 ** (127 - 15))
_INFINITY64 = tl.constexpr(0x7FF0000000000000)


@dataclass(frozen=True)
class ElementCode:
    """A format's numbers, flat, as a compile-time argument.

    Attributes:
        name: The format's name.
        mantissa_bits, min_exponent, max_code, max_finite: As in `FloatFormat`.
        overflow_code: What a finite value past the largest one becomes.
        infinity_code, nan_code: What Inf and NaN become.
        sign_shift: How far a float32's sign moves down to the code's.
    """

    name: str
    mantissa_bits: int
    min_exponent: int
    max_code: int
    max_finite: float
    overflow_code: int
    infinity_code: int
    nan_code: int
    sign_shift: int

    @classmethod
    def of(cls, fmt: FloatFormat, *, saturate: bool) -> ElementCode:
        """The codes of a format.

        Args:
            fmt: A format with a sign.
            saturate: Whether finite overflow stays finite; otherwise it becomes Inf.
        """
        infinity = fmt.nan_code if fmt.infinity_code is None else fmt.infinity_code
        return cls(
            fmt.name,
            fmt.mantissa_bits,
            fmt.min_exponent,
            fmt.max_code,
            fmt.max_finite,
            fmt.max_code if saturate else infinity,
            infinity,
            fmt.nan_code,
            32 - fmt.bits,
        )


@triton.jit
def bits_of(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def negated(x):
    """-x, of a zero too: Triton's own minus is 0 - x, which makes +0 of +0."""
    return float_of(bits_of(x) ^ _SIGN)


@triton.jit
def widened(words, INPUT: tl.constexpr, HARDWARE: tl.constexpr):
    """The float32 of the words of a float32, bfloat16 or float16; exact."""
    if INPUT == "float32":
        value = float_of(words)
    elif INPUT == "bfloat16":
        value = float_of(words.to(tl.int32) << 16)
    elif HARDWARE:
        value = words.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        # Read as a float32, a float16 magnitude is too small by the ratio of the biases, and so is
        # a subnormal. Inf and NaN keep their mantissa and take the whole exponent field.
        magnitude = (words.to(tl.int32) & 0x7FFF) << 13
        bits = bits_of(float_of(magnitude) * _FLOAT16_REBIAS)
        bits = tl.where(magnitude >= (0x7C00 << 13), magnitude | INFINITY, bits)
        value = float_of(bits | ((words.to(tl.int32) & 0x8000) << 16))
    return value


@triton.jit
def decoded(codes, E: tl.constexpr, HARDWARE: tl.constexpr):
    """The float32 of codes (uint8, or int16 for the 16-bit formats); exact."""
    if E.name == "bfloat16":
        value = widened(codes, "bfloat16", HARDWARE)
    elif E.name == "float16":
        value = widened(codes, "float16", HARDWARE)
    elif HARDWARE:
        if E.name == "E4M3":
            value = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        else:
            value = codes.to(tl.float8e5, bitcast=True).to(tl.float32)
    else:
        code = codes.to(tl.int32)
        magnitude = code & 0x7F
        field = magnitude >> E.mantissa_bits
        hidden = tl.where(field > 0, 1 << E.mantissa_bits, 0)
        significand = (magnitude & ((1 << E.mantissa_bits) - 1)) | hidden
        exponent = tl.maximum(field, 1) - 1 + (E.min_exponent - E.mantissa_bits)
        bits = bits_of(significand.to(tl.float32) * power_of_two(exponent))
        special = tl.where(magnitude == E.infinity_code, INFINITY, MAGNITUDE)
        if E.infinity_code == E.nan_code:
            special = tl.where(magnitude > E.max_code, MAGNITUDE, special)
        bits = tl.where(magnitude > E.max_code, special, bits)
        value = float_of(bits | ((code & 0x80) << 24))
    return value


@triton.jit
def narrowed(x, E: tl.constexpr, HARDWARE: tl.constexpr):
    """The codes of a float32, rounded to nearest even: uint8, or int16 for the 16-bit formats."""
    bits = bits_of(x)
    magnitude = bits & MAGNITUDE
    if HARDWARE:
        if E.name == "bfloat16":
            code = x.to(tl.bfloat16).to(tl.int16, bitcast=True)
        elif E.name == "float16":
            code = x.to(tl.float16).to(tl.int16, bitcast=True)
        else:
            if E.name == "E4M3":
                code = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
            else:
                code = x.to(tl.float8e5).to(tl.uint8, bitcast=True)
            # The instruction saturates infinities.
            sign = (bits >> E.sign_shift) & 0x80
            if E.infinity_code == E.nan_code:
                special = tl.full(sign.shape, E.nan_code, tl.int32)
            else:
                special = E.infinity_code | sign
            code = tl.where(magnitude == INFINITY, special.to(tl.uint8), code)
    else:
        field = tl.maximum(magnitude >> 23, 1)
        significand = (magnitude & (_HIDDEN - 1)) | tl.where(magnitude >= _HIDDEN, _HIDDEN, 0)
        binade = tl.maximum(field, E.min_exponent + 127)
        # 24 bits of significand lie below half of the last kept bit once 25 are dropped.
        shift = tl.minimum(23 - E.mantissa_bits + binade - field, 25)
        kept = significand >> shift
        kept = (significand + (1 << (shift - 1)) - 1 + (kept & 1)) >> shift
        # Codes count magnitudes in order: a carry is the next binade's first code.
        result = ((binade - (E.min_exponent + 127)) << E.mantissa_bits) + kept
        result = tl.where(result > E.max_code, E.overflow_code, result)
        result = tl.where(magnitude == INFINITY, E.infinity_code, result)
        result = tl.where(magnitude > INFINITY, E.nan_code, result)
        sign = (bits >> E.sign_shift) & (1 << (31 - E.sign_shift))
        result = tl.where(result == E.nan_code, result, result | sign)
        if E.sign_shift == 24:
            code = result.to(tl.uint8)
        else:
            code = result.to(tl.int16)
    return code


@triton.jit
def power_of_two(exponent):
    """2**exponent as a float32, for exponents of normal numbers."""
    return float_of((exponent + 127) << 23)


@triton.jit
def fma(a, b, c, HARDWARE: tl.constexpr):
    """a*b + c, float32, rounded once.

    Without the instruction: the product is exact in float64, the sum is rounded to odd there, and
    rounding that to float32 is rounding the exact sum.
    """
    if HARDWARE:
        result = tl.fma(a, b, c)
    else:
        product = a.to(tl.float64) * b.to(tl.float64)
        addend = c.to(tl.float64)
        total = product + addend
        back = total - product
        error = (product - (total - back)) + (addend - back)
        words = total.to(tl.int64, bitcast=True)
        finite = (words & _INFINITY64) != _INFINITY64
        even = (words & 1) == 0
        step = tl.where((error > 0) ^ (total > 0), -1, 1).to(tl.int64)
        words = tl.where((error != 0) & finite & even, words + step, words)
        result = words.to(tl.float64, bitcast=True).to(tl.float32)
    return result
