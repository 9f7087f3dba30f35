"""Range expansion of a block of moments, after COAT, made safe: log2, exp2 and the block's power.

A block of magnitudes between `bottom` and `top` (zeros apart) spans log2(top / bottom) binades.
Raised to the power k, it spans about 16.6 of them, which E4M3 holds between 448 and 2**-7.8. The
power needs a logarithm and an exponential; both are spelled out here in rounded float32 operations,
so that a kernel computes the same bits.

Source: COAT (Xi et al., 2024), with two changes. Magnitudes are taken relative to the largest
instead of the geometric mean, which is the same map but stores two numbers in place of three and
gives the largest magnitude back exactly. And smallest and largest are taken over the magnitudes
that are finite and not zero, whatever the order, with a power that is always finite.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from fp8lab.emulation.fused import Array, Float32Array
from fp8lab.optimizer_formats import EXPANDED_LOG2, EXPANSION_STEPS

F32 = np.float32
_ROOT_HALF, _ROOT_TWO = F32(math.sqrt(0.5)), F32(math.sqrt(2))
# 2/ln(2) * (s + s**3/3 + s**5/5 + s**7/7 + s**9/9) is log2 of (1 + s)/(1 - s).
LOG2_SERIES = tuple(F32(2 / math.log(2) / odd) for odd in (9, 7, 5, 3, 1))
# 2**f is the sum of (f*ln(2))**i / i!
EXP2_SERIES = tuple(F32(math.log(2) ** i / math.factorial(i)) for i in range(7, -1, -1))


@np.errstate(all="ignore")
def log2_ratio(x: npt.ArrayLike, top: npt.ArrayLike) -> Float32Array:
    """log2(x / top), float32, exactly 0 where they are equal; no ratio overflows or underflows.

    Order: e = the difference of the exponents (of subnormals, those of the normalised numbers);
    q = the quotient of the significands, rounded; where q > sqrt(2), q = q/2 and e = e + 1; where
    q < sqrt(1/2), q = 2*q and e = e - 1; s = (q - 1)/(q + 1), z = s*s; then Horner over
    `LOG2_SERIES` in z, times s, plus e, each operation rounded. Within 2**-22 of the logarithm,
    relative where it is below 1/2.

    Args:
        x, top: Positive, finite float32 that broadcast together. (0 gives some number.)
    """
    exponent_x, significand_x = _split(x)
    exponent_top, significand_top = _split(top)
    e = exponent_x - exponent_top
    q = significand_x / significand_top
    high, low = q > _ROOT_TWO, q < _ROOT_HALF
    q = np.where(high, q * F32(0.5), np.where(low, q * F32(2), q))
    e = e + high - low
    s = (q - F32(1)) / (q + F32(1))
    z = s * s
    series: Array = np.asarray(LOG2_SERIES[0])
    for coefficient in LOG2_SERIES[1:]:
        series = series * z + coefficient
    return np.asarray(e.astype(np.float32) + s * series)


@np.errstate(all="ignore")
def scaled_exp2(top: npt.ArrayLike, t: Float32Array) -> Float32Array:
    """top * 2**t, float32, exactly top where t is 0.

    Order: n = floor(t + 1/2), f = t - n; Horner over `EXP2_SERIES` in f, each operation rounded;
    then ((top * 2**(n >> 1)) * series) * 2**(n - (n >> 1)), so that only the result underflows.

    Args:
        top: float32, not negative.
        t: float32 from -280 to 0.
    """
    n = np.floor(t + F32(0.5))
    f = t - n
    series: Array = np.asarray(EXP2_SERIES[0])
    for coefficient in EXP2_SERIES[1:]:
        series = series * f + coefficient
    whole = n.astype(np.int32)
    half = whole >> 1
    return np.asarray(
        ((np.asarray(top) * _power_of_two(half)) * series) * _power_of_two(whole - half)
    )


@np.errstate(all="ignore")
def expansion_power(bottom: npt.ArrayLike, top: npt.ArrayLike) -> Float32Array:
    """The power k of a block, float32.

    k = max(floor(c / d), 1) / 16 with c = 16*log2(448**2 / 2) rounded to float32 and
    d = -log2_ratio(bottom, top), the quotient rounded; 1 where d is 0 (equal magnitudes, or none).
    So a block of equal magnitudes comes back exactly, and what is not zero never codes to 0.

    Args:
        bottom, top: The smallest and largest finite magnitude of a block that is not zero; 0 where
            there is none.
    """
    d = -log2_ratio(bottom, top)
    steps = np.maximum(np.floor(F32(EXPANSION_STEPS * EXPANDED_LOG2) / d), F32(1))
    return np.where(d > 0, steps / F32(EXPANSION_STEPS), F32(1)).astype(np.float32)


def _split(x: npt.ArrayLike) -> tuple[Array, Float32Array]:
    """The exponent (int32) and the significand in [1, 2) of a positive float32."""
    values = np.asarray(x, dtype=np.float32)
    subnormal = values < F32(2.0**-126)
    words = np.where(subnormal, values * F32(2.0**24), values).astype(np.float32).view(np.int32)
    exponent = (words >> 23) - 127 - 24 * subnormal
    significand = ((words & 0x007FFFFF) | 0x3F800000).view(np.float32)
    return exponent.astype(np.int32), significand


def _power_of_two(exponent: Array) -> Float32Array:
    """2**exponent, float32, for exponents of normal numbers."""
    return np.asarray((exponent + 127) << 23, dtype=np.int32).view(np.float32)
