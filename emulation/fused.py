"""float32 operations that NumPy does not have: the fused multiply-add and integer powers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Float32Array = npt.NDArray[np.float32]


def fma(a: npt.ArrayLike, b: npt.ArrayLike, c: npt.ArrayLike) -> Float32Array:
    """a*b + c, rounded once to float32, to nearest even.

    The product of two float32 is exact in float64: 48 bits, exponents from -298 to 256. Only the
    sum with c rounds there, and rounding that to float32 goes wrong only where the float64 sum
    looks like a tie (its low 29 bits are 100...0) or lies among float32's subnormals, whose ties
    sit elsewhere. Those sums are rounded to odd first: their error is recovered exactly (Knuth's
    two-sum), and an even last bit is moved toward the exact sum (Boldo and Melquiond, 2008).

    Args:
        a, b, c: float32, or what converts to it exactly; they broadcast together.

    Returns:
        float32 of the broadcast shape. NaN, infinities and the sign of zero follow IEEE 754:
        Inf*0 is NaN whatever c, and an exact cancellation gives +0.

    >>> import numpy as np
    >>> x = np.float32(1 + 2**-12)
    >>> float(fma(x, x, -1 - 2**-11)), float(x * x - np.float32(1 + 2**-11))
    (5.960464477539063e-08, 0.0)
    """
    with np.errstate(all="ignore"):
        x, y, z = (np.asarray(v, dtype=np.float32) for v in (a, b, c))
        product = np.multiply(x, y, dtype=np.float64)
        total = np.asarray(product + z)
        shape = total.shape
        wide = total.reshape(-1)
        suspect = (wide.view(np.int64) & 0x1FFFFFFF) == 0x10000000
        suspect |= (np.abs(wide) < 2.0**-126) & (wide != 0)
        if suspect.any():
            addend = np.broadcast_to(z, shape).reshape(-1)[suspect].astype(np.float64)
            first = np.broadcast_to(product, shape).reshape(-1)[suspect]
            wide[suspect] = _rounded_to_odd(wide[suspect], first, addend)
        return wide.astype(np.float32).reshape(shape)


def _rounded_to_odd(total: Array, first: Array, addend: Array) -> Array:
    """total = first + addend in float64, made odd where that was not exact."""
    back = total - first
    lost = (first - (total - back)) + (addend - back)  # NaN where something is not finite
    words = total.view(np.int64)
    # Toward the exact sum: away from zero where the error has the sum's sign.
    step = np.where((lost > 0) == (total > 0), 1, -1)
    even_and_inexact = (lost != 0) & np.isfinite(lost) & (words & 1 == 0)
    odd: Array = np.where(even_and_inexact, words + step, words).view(np.float64)
    return odd


def power(base: float, exponent: int) -> float:
    """base**exponent in float64 by square and multiply, from the lowest bit of the exponent up.

    Spelled out so that a kernel, which has no correctly rounded power, computes the same:

        result = 1
        while exponent: if exponent is odd, result = result*base; base = base*base; halve exponent

    Args:
        base: A float in [0, 1].
        exponent: At least 0.

    >>> power(0.5, 3)
    0.125
    """
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result
