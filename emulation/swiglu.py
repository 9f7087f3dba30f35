"""SwiGLU, silu(gate) * up, and its gradients: float32 operations in an order that a GPU repeats.

exp is no operation of IEEE 754, and each library and card has its own. Here it is made of sums,
products and fused multiply-adds, each rounded to nearest even, so that a kernel has the same bits.
With constants of `fp8lab.swiglu_constants`, for each element, widened to float32:

    x = min(max(gate, -87), 30)
    z = fma(x, -log2(e), shifter);  n = z - shifter           the integer nearest to -x / ln 2
    y = fma(n, -ln2_low, fma(n, -ln2_high, -x))               what is left, |y| <= ln(2) / 2
    p = 1 + y*(1 + y*(c2 + y*(c3 + y*(c4 + y*(c5 + y*c6)))))  each step one fma
    e = p * 2^n                                               exp(-x), exact
    s = 1 / (1 + e)                                           the sigmoid

    silu = max(gate, -87) * s;  result = silu * up
    dup = dh * silu;  dgate = (dh * up) * fma(x * s, e * s, s)

Results are rounded once more, to the inputs' type.

The sigmoid is within 2.5 units in the last place of the exact one for gates from -87 up. Below, it
is that of -87, about 2**-125.5: silu's limit of -0 becomes a number no larger than 1.5e-36, in
bfloat16 and float32 alike, and so for a gate of -Inf. max and min keep a NaN; a gate of +Inf gives
silu +Inf and a derivative of 1. Everything else follows IEEE 754: Inf * 0 is NaN.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from fp8lab.emulation.fused import fma
from fp8lab.swiglu_constants import EXP, HIGHEST, LN2_HIGH, LN2_LOW, LOG2_E, LOWEST, SHIFTER

Array = npt.NDArray[Any]
Float32Array = npt.NDArray[np.float32]

_DTYPES = tuple(np.dtype(t) for t in (np.float32, np.float16, ml_dtypes.bfloat16))
_PIECE = 1 << 14  # elements that a pass works on: its dozen temporaries stay in the cache
# Of each type: unsigned integers of its size, and the NaN that results have.
_NAN = {4: (np.uint32, 0x7FFFFFFF), 2: (np.uint16, 0x7FFF)}


def sigmoid(x: npt.ArrayLike) -> Float32Array:
    """1 / (1 + exp(-x)) of x between -87 and 30, and of the nearer end beyond.

    Args:
        x: float32 array of any shape.

    Returns:
        float32 of x's shape, above 0 and at most 1; NaN where x is.

    >>> [float(s) for s in sigmoid(np.float32([0, 30, 1]))]
    [0.5, 1.0, 0.7310585975646973]
    """
    with np.errstate(all="ignore"):
        return _parts(np.asarray(x, np.float32)).sigmoid


def swiglu(gate: npt.ArrayLike, up: npt.ArrayLike) -> Array:
    """silu(gate) * up, bit for bit as `fp8lab.kernels.swiglu.swiglu`.

    Args:
        gate, up: float32, float16 or bfloat16 arrays of one shape and type; may be empty.

    Returns:
        An array of that shape and type. Order of operations: see the module. A NaN is 0x7FFF or
        0x7FFFFFFF; float16 overflows to Inf.

    Raises:
        TypeError: Another type, or two of them.
        ValueError: Shapes that differ.

    >>> swiglu(np.float32([1.0, -2.0]), np.float32([2.0, 3.0])).tolist()
    [1.4621171951293945, -0.7152175307273865]
    """
    arrays = _checked(gate=gate, up=up)
    (result,) = _in_pieces(lambda g, u: (_parts(g).silu * u,), arrays)
    return result


def swiglu_grad(dh: npt.ArrayLike, gate: npt.ArrayLike, up: npt.ArrayLike) -> tuple[Array, Array]:
    """The gradients of `swiglu` with respect to gate and up.

    Args:
        dh: The gradient of the result.
        gate, up: As given to `swiglu`. All three have one shape and type.

    Returns:
        (dgate, dup), of that shape and type.

    Raises:
        TypeError, ValueError: As `swiglu`.

    >>> dgate, dup = swiglu_grad(np.float32([1.0]), np.float32([0.0]), np.float32([4.0]))
    >>> dgate.tolist(), dup.tolist()
    ([2.0], [0.0])
    """
    arrays = _checked(dh=dh, gate=gate, up=up)
    dgate, dup = _in_pieces(_gradients, arrays)
    return dgate, dup


def _gradients(dh: Array, gate: Array, up: Array) -> tuple[Array, Array]:
    parts = _parts(gate)
    slope = fma(parts.x * parts.sigmoid, parts.exp * parts.sigmoid, parts.sigmoid)
    return (dh * up) * slope, dh * parts.silu


class _Parts(NamedTuple):
    x: Float32Array
    exp: Float32Array
    sigmoid: Float32Array
    silu: Float32Array


def _parts(gate: Float32Array) -> _Parts:
    raised = np.maximum(gate, np.float32(LOWEST))
    x = np.minimum(raised, np.float32(HIGHEST))
    z = fma(x, -LOG2_E, SHIFTER)
    n = z - np.float32(SHIFTER)
    y = fma(n, -LN2_LOW, fma(n, -LN2_HIGH, -x))
    p: Float32Array = np.full_like(x, EXP[0])
    for coefficient in (*EXP[1:], 1.0, 1.0):
        p = fma(p, y, coefficient)
    # The low bits of z are n; where x is NaN this is some number, and what follows is NaN.
    exp = (p.view(np.int32) + (z.view(np.int32) << 23)).view(np.float32)
    sigmoid = np.where(np.isnan(x), x, np.float32(1) / (np.float32(1) + exp))
    return _Parts(x, exp, sigmoid, raised * sigmoid)


def _checked(**arrays: npt.ArrayLike) -> list[Array]:
    given = {name: np.asarray(array) for name, array in arrays.items()}
    first = next(iter(given.values()))
    for name, array in given.items():
        if array.dtype not in _DTYPES:
            raise TypeError(f"{name} has dtype {array.dtype}; accepted: float32, float16, bfloat16")
        if array.dtype != first.dtype:
            raise TypeError(f"{name} has dtype {array.dtype}; accepted here: {first.dtype}")
        if array.shape != first.shape:
            raise ValueError(f"{name} has shape {array.shape}; accepted here: {first.shape}")
    return list(given.values())


def _in_pieces(function: Any, arrays: list[Array]) -> list[Array]:
    """float32 results of a function of pieces, each rounded to the arrays' type."""
    shape, dtype = arrays[0].shape, arrays[0].dtype
    flat = [np.ascontiguousarray(array).reshape(-1) for array in arrays]
    results: list[list[Array]] = []
    with np.errstate(all="ignore"):
        for start in range(0, max(flat[0].size, 1), _PIECE):
            pieces = [array[start : start + _PIECE].astype(np.float32) for array in flat]
            results.append([_rounded(wide, dtype) for wide in function(*pieces)])
    return [np.concatenate(parts).reshape(shape) for parts in zip(*results, strict=True)]


def _rounded(wide: Array, dtype: np.dtype[Any]) -> Array:
    narrow: Array = wide.astype(dtype)
    word, nan = _NAN[dtype.itemsize]
    narrow.view(word)[np.isnan(wide)] = nan
    return narrow
