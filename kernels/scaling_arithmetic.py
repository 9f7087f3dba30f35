"""The arithmetic of scales, on blocks in registers. Exponents come from bits."""

from __future__ import annotations

import triton
import triton.language as tl

from fp8lab.kernels.casting_arithmetic import (
    BIAS,
    HIDDEN,
    INFINITY,
    MAGNITUDE,
    as_bits,
    as_floats,
)

ONE = tl.constexpr(0x3F800000)
LARGEST = tl.constexpr(0x7F7FFFFF)
SMALLEST_SCALE = tl.constexpr(0x00400000)  # 2**-127


@triton.jit
def scale_of_amax(largest, previous, RULE: tl.constexpr):
    """The scale of `scale_from_amax`, as int32 bits.

    Args:
        largest: int32 bits of magnitudes.
        previous: int32 bits of the scale that stays where largest is 0, Inf or NaN.
        RULE: A `ScaleRule`, not of MX.
    """
    if RULE.kind == "power_of_two":
        scale = power_of_two(_scale_exponent(largest, RULE))
    else:
        TOP: tl.constexpr = RULE.top
        top = tl.full(largest.shape, TOP, tl.float32)
        quotient = as_bits(tl.div_rn(top, as_floats(largest)))
        # Not negative, so bit patterns are in the order of the values.
        scale = tl.minimum(tl.maximum(quotient, SMALLEST_SCALE), LARGEST)
    usable = (largest > 0) & (largest < INFINITY)
    return tl.where(usable, scale, previous)


@triton.jit
def inverse_of_scale(scale):
    """1 / scale, rounded to nearest even; bits to bits."""
    one = tl.full(scale.shape, 1.0, tl.float32)
    return as_bits(tl.div_rn(one, as_floats(scale)))


@triton.jit
def block_factors(largest, RULE: tl.constexpr):
    """From the amax of blocks: the float32 that multiplies, and what is kept for the block.

    What is kept is the E8M0 code (uint8) of MX, otherwise the bits (int32) of the inverse scale.
    """
    if RULE.is_mx:
        finite = _finite_mx_code(largest, RULE)
        is_nan = largest > INFINITY
        special = largest >= INFINITY
        kept = tl.where(special, tl.where(is_nan, 0xFF, 0xFE), finite).to(tl.uint8)
        # A finite amax leaves the code far below 254, so no such factor is subnormal.
        factor = (-finite + 2 * BIAS) << 23
        factor = tl.where(special, tl.where(is_nan, MAGNITUDE, SMALLEST_SCALE), factor)
        factor = as_floats(factor)
    elif RULE.kind == "power_of_two":
        exponent = _scale_exponent(largest, RULE)
        exponent = tl.where((largest > 0) & (largest < INFINITY), exponent, 0)
        if RULE.exponent > 1:
            factor = as_floats((exponent + BIAS) << 23)
        else:
            factor = as_floats(power_of_two(exponent))
        kept = power_of_two(-exponent)
    else:
        one = tl.full(largest.shape, ONE, tl.int32)
        scale = scale_of_amax(largest, one, RULE)
        factor = as_floats(scale)
        kept = inverse_of_scale(scale)
    return factor, kept


@triton.jit
def spread(
    factor,  # (HIGH, WIDE): one a block
    HIGH: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Repeated over the elements of the blocks, or what broadcasts to that."""
    SHOWN: tl.constexpr = WIDE * WIDTH if WIDE > 1 else 1
    if WIDE > 1 and WIDTH > 1:
        wide = tl.broadcast_to(factor[:, :, None], [HIGH, WIDE, WIDTH])
        factor = tl.reshape(wide, [HIGH, SHOWN])
    if HIGH > 1 and HEIGHT > 1:
        high = tl.broadcast_to(factor[:, None, :], [HIGH, HEIGHT, SHOWN])
        factor = tl.reshape(high, [HIGH * HEIGHT, SHOWN])
    return factor


@triton.jit
def mx_code(largest, RULE: tl.constexpr):
    """The E8M0 code, as int32, of blocks whose amax has these bits."""
    code = _finite_mx_code(largest, RULE)
    code = tl.where(largest == INFINITY, 0xFE, code)
    return tl.where(largest > INFINITY, 0xFF, code)


@triton.jit
def _finite_mx_code(largest, RULE: tl.constexpr):
    EXPONENT: tl.constexpr = RULE.exponent
    TOP_MANTISSA: tl.constexpr = RULE.mantissa
    mantissa = largest & (HIDDEN - 1)
    code = (largest >> 23) - EXPONENT
    if RULE.kind == "mx_up":
        code += (mantissa > TOP_MANTISSA).to(tl.int32)
    elif RULE.kind == "mx_nearest":
        code += (mantissa >= HIDDEN // 2).to(tl.int32)
    # A subnormal amax ends here too, whatever its bits: the exponent of the top is at least 7.
    return tl.maximum(code, 0)


@triton.jit
def power_of_two(exponent):
    """The bits of 2**exponent, for exponents from -127 (a subnormal) to 127."""
    return tl.where(exponent < -126, SMALLEST_SCALE, (exponent + BIAS) << 23)


@triton.jit
def _scale_exponent(largest, RULE: tl.constexpr):
    """floor(log2(top / largest)), from -127 to 127, for finite largest above zero.

    Dividing in float32 and clearing the mantissa gives the same: the quotient of two floats whose
    mantissas differ lies at least half an ulp and a bit from the power of two that it could be
    rounded up to.
    """
    EXPONENT: tl.constexpr = RULE.exponent
    TOP_MANTISSA: tl.constexpr = RULE.mantissa
    if EXPONENT > 1:
        # Then every subnormal amax has the largest scale, and no scale is below 2**-126. The bits
        # that are added carry into the exponent field where the mantissa is above the top's.
        field = (largest + (HIDDEN - 1 - TOP_MANTISSA)) >> 23
        exponent = tl.minimum(-field + (EXPONENT + BIAS), 127)
    else:
        subnormal = largest < HIDDEN
        # Converting the bits of a subnormal to a float normalises them: times 2**-149.
        bits = tl.where(subnormal, as_bits(largest.to(tl.float32)), largest)
        field = (bits >> 23) - tl.where(subnormal, 149, 0)
        below = ((bits & (HIDDEN - 1)) > TOP_MANTISSA).to(tl.int32)
        # The block comes first: under the interpreter a constant minus a block is no block.
        exponent = -(field + below) + (EXPONENT + BIAS)
        exponent = tl.minimum(tl.maximum(exponent, -127), 127)
    return exponent
