"""float32 operations that NumPy does not have: the fused multiply-add and integer powers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Float32Array = npt.NDArray[np.float32]


def fma(a: npt.ArrayLike, b: npt.ArrayLike, c: npt.ArrayLike) -> Float32Array:
    """a*b + c, rounded once to float32, to nearest even.

    The product of two float32 is exact in float64: 48 bits, exponents from -298 to 256. The sum
    with c is rounded to float64, its error recovered exactly (Knuth's TwoSum: nothing overflows,
    and sums do not underflow), and the sum is made odd where the error is not zero and its last bit
    is even: rounded to odd, in other words. Rounding that to float32 equals rounding the exact sum,
    because 53 bits are at least two more than 24, and more than that below the normal range
    (Boldo and Melquiond, 2008). Plain float64 would round twice.

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
        x, y, z = (np.asarray(v, dtype=np.float32).astype(np.float64) for v in (a, b, c))
        product = x * y
        total = np.atleast_1d(product + z)
        back = total - product
        error = (product - (total - back)) + (z - back)
        words = total.view(np.int64)
        inexact = (error != 0) & np.isfinite(total) & ((words & 1) == 0)
        # Toward the exact sum: away from zero where the error has the sum's sign.
        step = np.where((error > 0) == (total > 0), np.int64(1), np.int64(-1))
        odd = np.where(inexact, words + step, words).view(np.float64)
        shape = np.broadcast_shapes(x.shape, y.shape, z.shape)
        return np.asarray(odd.astype(np.float32)).reshape(shape)


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
