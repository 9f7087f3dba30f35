"""The slow, obviously right cast: one value at a time, by looking at a format's own values.

Nothing here shifts or masks the input's bits. A value is compared, as an exact fraction, with the
two values of the format around it. The vectorised and table forms are tested against this one.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from fractions import Fraction
from functools import lru_cache

from fp8lab.formats import FloatFormat, OverflowPolicy, overflow_policy


@lru_cache
def _magnitudes(fmt: FloatFormat) -> tuple[Fraction, ...]:
    """Every finite magnitude in the order of its code, then the one that would come next.

    The extra value is where the next code would be if the format went on: rounding first acts as if
    it did, and overflow is what lands there or beyond.
    """
    return tuple(Fraction(fmt.value_of_magnitude(code)) for code in range(fmt.max_code + 2))


def quantize_scalar(
    value: float,
    fmt: FloatFormat,
    *,
    rounding: str = "nearest_even",
    overflow: str | OverflowPolicy = "saturate",
    random_bits: int = 0,
    bit_count: int = 32,
) -> int:
    """The code of one Python float, by the contract of `fp8lab.emulation.casting.quantize`.

    Args:
        value: Any float64, NaN, infinities and both zeros included.
        fmt: Any format.
        rounding: "nearest_even", "toward_zero", "up" (away from zero) or "stochastic".
        overflow: A policy or its name.
        random_bits: For "stochastic", an unsigned integer below 2**bit_count.
        bit_count: How many random bits there are, 1 to 32.

    Returns:
        The code.

    >>> from fp8lab.formats import E4M3
    >>> hex(quantize_scalar(126.24, E4M3))  # the carry goes into the exponent: 128
    '0x70'
    """
    policy = overflow_policy(overflow, fmt)
    sign = fmt.sign_bit if math.copysign(1.0, value) < 0 else 0
    if math.isnan(value):
        return _nan(fmt, policy, sign)
    if not fmt.signed:
        if value == 0:
            return 0 if policy.zero == "smallest" else fmt.nan_code
        if value < 0 and policy.negative == "nan":
            return fmt.nan_code
    if math.isinf(value):
        return _beyond(fmt, policy, policy.infinity, sign)

    magnitude = Fraction(abs(value))
    magnitudes = _magnitudes(fmt)
    lower = bisect_right(magnitudes, magnitude) - 1
    if lower < 0:  # below the smallest value of a format without zero
        return 0
    if lower == fmt.max_code + 1:  # at or past where the next code would be
        if rounding == "toward_zero":
            return _signed(fmt, fmt.max_code, sign)
        return _beyond(fmt, policy, policy.finite, sign)

    fraction = (magnitude - magnitudes[lower]) / (magnitudes[lower + 1] - magnitudes[lower])
    if rounding == "toward_zero":
        up = False
    elif rounding == "nearest_even":
        # Codes alternate between even and odd significands; without mantissa bits all are odd, and
        # IEEE 754 sends a tie to the larger neighbour.
        odd = lower % 2 == 1 or fmt.mantissa_bits == 0
        up = fraction > Fraction(1, 2) or (fraction == Fraction(1, 2) and odd)
    elif rounding == "up":
        up = fraction > 0
    else:
        up = random_bits < math.floor(fraction * 2**bit_count)
    code = lower + up
    if code > fmt.max_code:
        return _beyond(fmt, policy, policy.finite, sign)
    return _signed(fmt, code, sign)


def _signed(fmt: FloatFormat, magnitude: int, sign: int) -> int:
    return magnitude if magnitude == 0 and not fmt.has_negative_zero else magnitude | sign


def _nan(fmt: FloatFormat, policy: OverflowPolicy, sign: int) -> int:
    if fmt.nan == "negative_zero":  # the one NaN there is; it has no second sign
        return fmt.nan_code
    code = fmt.nan_code
    if policy.nan_code == "quiet" and fmt.nan == "ieee":
        code = fmt.max_code + 1 + (1 << (fmt.mantissa_bits - 1))
    return code | sign if policy.nan_sign == "kept" else code


def _beyond(fmt: FloatFormat, policy: OverflowPolicy, choice: str, sign: int) -> int:
    if choice == "max_finite":
        return fmt.max_code | sign
    infinity = fmt.infinity_code
    return _nan(fmt, policy, sign) if infinity is None else infinity | sign
