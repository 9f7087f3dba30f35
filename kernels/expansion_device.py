"""Dynamic range expansion on the device: the twin of `fp8lab.emulation.expansion`."""

from __future__ import annotations

import math

import triton
import triton.language as tl

from fp8lab.kernels.float_device import INFINITY, MAGNITUDE, bits_of, float_of, power_of_two
from fp8lab.optimizer_formats import EXPANDED_LOG2, EXPANSION_STEPS

_HIDDEN = tl.constexpr(0x00800000)
_EXPANSION = tl.constexpr(EXPANSION_STEPS * EXPANDED_LOG2)
_STEPS = tl.constexpr(float(EXPANSION_STEPS))
_TWO_24 = tl.constexpr(2.0**24)
_ROOT_HALF = tl.constexpr(math.sqrt(0.5))
_ROOT_TWO = tl.constexpr(math.sqrt(2))
_LOG1, _LOG3, _LOG5, _LOG7, _LOG9 = (tl.constexpr(2 / math.log(2) / odd) for odd in (1, 3, 5, 7, 9))
_EXP1, _EXP2, _EXP3, _EXP4, _EXP5, _EXP6, _EXP7 = (
    tl.constexpr(math.log(2) ** i / math.factorial(i)) for i in range(1, 8)
)


@triton.jit
def with_sign(y, x):
    """The magnitude y with the sign of x; x itself where it is 0, Inf or NaN."""
    bits = bits_of(x)
    magnitude = bits & MAGNITUDE
    signed = bits_of(y) | (bits ^ magnitude)
    return float_of(tl.where((magnitude > 0) & (magnitude < INFINITY), signed, bits))


@triton.jit
def _split(x):
    """Exponent and significand of a positive float32."""
    subnormal = bits_of(x) < _HIDDEN
    bits = bits_of(tl.where(subnormal, x * _TWO_24, x))
    exponent = (bits >> 23) - tl.where(subnormal, 127 + 24, 127)
    return exponent, float_of((bits & (_HIDDEN - 1)) | 0x3F800000)


@triton.jit
def log2_ratio(x, top):
    """log2(x / top) of positive float32: each operation rounded, in the oracle's order."""
    exponent, significand = _split(x)
    exponent_top, significand_top = _split(top)
    e = exponent - exponent_top
    q = tl.div_rn(significand, significand_top)
    high = q > _ROOT_TWO
    low = q < _ROOT_HALF
    q = tl.where(high, q * 0.5, tl.where(low, q * 2.0, q))
    e = tl.where(high, e + 1, tl.where(low, e - 1, e))
    s = tl.div_rn(q - 1.0, q + 1.0)
    z = s * s
    series = ((((_LOG9 * z + _LOG7) * z) + _LOG5) * z + _LOG3) * z + _LOG1
    return e.to(tl.float32) + s * series


@triton.jit
def scaled_exp2(top, t):
    """top * 2**t."""
    n = tl.floor(t + 0.5)
    f = t - n
    series = ((_EXP7 * f + _EXP6) * f + _EXP5) * f + _EXP4
    series = (((series * f + _EXP3) * f + _EXP2) * f + _EXP1) * f + 1.0
    whole = n.to(tl.int32)
    half = whole >> 1
    return ((top * power_of_two(half)) * series) * power_of_two(whole - half)


@triton.jit
def expansion_power(bottom, top):
    """The power that spreads magnitudes from bottom to top over the format's range."""
    d = -log2_ratio(bottom, top)
    spread = d > 0
    steps = tl.floor(tl.div_rn(_EXPANSION, tl.where(spread, d, 1.0)))
    steps = tl.where(steps > 1.0, steps, 1.0)
    return tl.where(spread, steps * (1.0 / _STEPS), 1.0)
