"""Operands of matrix products: those that break a tensor core's emulation, and those whose product
no order of accumulation can change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt

from fp8lab.emulation.casting import dequantize
from fp8lab.formats import TARGETS, FloatFormat
from fp8lab.testing.values import random_words, wide_floats

Array = npt.NDArray[Any]
Float32Array = npt.NDArray[np.float32]

OPERAND_KINDS = ("ordinary", "exponents", "patterns", "sparse", "opposed")
_FORMATS = {fmt.dtype_name: fmt for fmt in TARGETS.values()}


def operand_values(
    seed: int, shape: tuple[int, int], dtype_name: str, kind: str, *, special: bool = False
) -> Array:
    """A matrix of codes for a product.

    Args:
        seed: Of the random words.
        shape: Rows and columns.
        dtype_name: The type's NumPy or ml_dtypes name: FP8, bfloat16 or float16.
        kind: "ordinary" (normal numbers), "exponents" (all exponents alike, subnormals included),
            "patterns" (any finite bits), "sparse" (mostly zeros of either sign), or "opposed"
            (pairs of columns that cancel all but a little).
        special: Whether one element in a hundred may be NaN or infinite.

    Returns:
        An array of that dtype; finite unless `special`.
    """
    fmt = _FORMATS[dtype_name]
    rows, columns = shape
    words = random_words(seed, rows * columns)
    low, high = words[:, 0], words[:, 1]
    unsigned = fmt.code_dtype
    codes = high.astype(unsigned)
    magnitude = codes & unsigned.type(fmt.sign_bit - 1)
    sign = codes & unsigned.type(fmt.sign_bit)
    codes = np.where(magnitude > fmt.max_code, sign, codes)  # a zero for what is not finite
    if kind in ("ordinary", "opposed"):
        largest = int(np.log2(fmt.max_finite))
        # Around the middle of the positive exponents: products stay in range, small ones get lost.
        near = wide_floats(high, largest // 2 - 6, largest // 2 - 1)
        codes = near.astype(fmt.dtype).view(unsigned)
    elif kind == "sparse":
        codes = np.where(low % np.uint64(8) == 0, codes, sign)
    elif kind == "exponents":
        top = fmt.min_exponent + (fmt.max_code >> fmt.mantissa_bits) - 1
        spread = wide_floats(high, max(fmt.min_exponent - fmt.mantissa_bits, -149), top - 1)
        codes = spread.astype(fmt.dtype).view(unsigned)
    elif kind != "patterns":
        raise ValueError(f"unknown kind {kind!r}; accepted: {', '.join(OPERAND_KINDS)}")
    matrix = codes.astype(unsigned).reshape(shape)
    if kind == "opposed":
        matrix[:, 1::2] = matrix[:, : columns - columns % 2 : 2] ^ unsigned.type(fmt.sign_bit)
        nudged = (low.reshape(shape) % np.uint64(3)).astype(unsigned)
        matrix = np.where(matrix & unsigned.type(7) < 4, matrix + nudged, matrix)
    if special:
        pool = [fmt.nan_code, fmt.nan_code | fmt.sign_bit]
        if fmt.infinity_code is not None:
            pool += [fmt.infinity_code, fmt.infinity_code | fmt.sign_bit] * 2
        chosen = np.array(pool, unsigned)[(low >> np.uint64(32)).reshape(shape) % len(pool)]
        matrix = np.where((low.reshape(shape) >> np.uint64(8)) % 100 == 0, chosen, matrix)
    return matrix.astype(unsigned).view(fmt.dtype)


def accumulator_values(seed: int, shape: tuple[int, int], dtype_name: str, kind: str) -> Array:
    """A matrix to start a product from.

    Args:
        dtype_name: "float32" or "float16".
        kind: "zero" (of both signs), "ordinary", "wide" (all exponents, subnormals included),
            "huge" (near overflow), or "special" (any bit pattern).
    """
    dtype = np.dtype(dtype_name)
    words = random_words(seed, shape[0] * shape[1])[:, 1]
    half = dtype == np.float16
    if kind == "special":
        unsigned = np.dtype(f"u{dtype.itemsize}")
        return words.astype(unsigned).view(dtype).reshape(shape)
    if kind == "zero":
        return np.where(words % np.uint64(2) == 0, 0.0, -0.0).astype(dtype).reshape(shape)
    low, high = {
        "ordinary": (-6, 12),
        "wide": (-24, 15) if half else (-149, 127),
        "huge": (12, 15) if half else (110, 127),
    }[kind]
    with np.errstate(over="ignore"):  # the largest round to infinity in a narrower type
        return wide_floats(words, low, high).astype(dtype).reshape(shape)


ACCUMULATOR_KINDS = ("zero", "ordinary", "wide", "huge", "special")


@dataclass(frozen=True, eq=False)
class OrderFreeProduct:
    """Operands whose product every order of accumulation computes with the same bits.

    Attributes:
        a: (M, K) codes.
        b: (K, N) codes.
        unit: Every product of two elements is a multiple of it.
        bound: The largest sum of magnitudes of an element's products.
    """

    a: Array
    b: Array
    unit: float
    bound: float


def order_free(a: Array, b: Array) -> OrderFreeProduct:
    """Prove that no order of accumulation changes a bit of a product, or raise.

    Let u be a power of two that divides every a[m, k] * b[k, n]. If for each element the magnitudes
    add up to less than 2**14 u, then every partial sum, in any order and grouping, is a multiple of
    u below 2**14 u: 14 bits hold it, float32 and the FP8 tensor cores alike. The tensor cores also
    cut terms to multiples of 2**(emax - 13); emax is at most 13 + log2(u) for sums, and is checked
    for products, whose exponent counts subnormals as larger than they are. So nothing is ever cut
    or rounded, and -0 appears in no sum, since a chain starts from +0.

    Args:
        a: (M, K) FP8 codes, finite.
        b: (K, N) FP8 codes, finite.

    Raises:
        ValueError: The proof fails for these operands.
    """
    x, y = dequantize(a).astype(np.float64), dequantize(b).astype(np.float64)
    unit = _common_unit(x) * _common_unit(y)
    with np.errstate(invalid="ignore"):
        bound = float((np.abs(x) @ np.abs(y)).max(initial=0.0))
    if not bound < 2.0**14 * unit:
        raise ValueError(f"magnitudes add up to {bound}; below {2.0**14 * unit} every sum is exact")
    top = _largest_exponent(x, a) + _largest_exponent(y, b)
    if top > 13 + np.log2(unit):
        raise ValueError(f"products reach exponent {top}, where a core cuts below the unit {unit}")
    return OrderFreeProduct(a, b, unit, bound)


@st.composite
def order_free_products(
    draw: st.DrawFn,
    dtype_names: tuple[str, str],
    *,
    sizes: tuple[st.SearchStrategy[int], st.SearchStrategy[int], st.SearchStrategy[int]],
) -> OrderFreeProduct:
    """Operands that `order_free` proves: small integers times a power of two.

    Args:
        dtype_names: The FP8 types of a and b.
        sizes: M, N and K.
    """
    m, n, k = (draw(size) for size in sizes)
    seed = draw(st.integers(0, 2**32 - 1))
    matrices = []
    for side, (name, shape) in enumerate(zip(dtype_names, ((m, k), (k, n)), strict=True)):
        values = small_integers(seed + side, shape, _FORMATS[name], k).astype(np.float32)
        scale = np.float32(2.0 ** draw(st.integers(-2, 2)))
        matrices.append((values * scale).astype(_FORMATS[name].dtype))
    return order_free(*matrices)


def small_integers(
    seed: int, shape: tuple[int, int], fmt: FloatFormat, k: int, *, zeros: bool = True
) -> Array:
    """A matrix of integers so small that a sum of k products of two such stays below 2**14.

    Args:
        seed: Of the random words.
        shape: Rows and columns.
        fmt: The format of the codes.
        k: How many products a sum has.
        zeros: Whether 0 is among them. Without it no sum is -0, even where one starts from its
            first product instead of from +0.
    """
    largest = min(15, int(np.sqrt((2.0**14 - 1) / max(k, 1))))
    integers = np.arange(-largest, largest + 1).astype(np.float32)
    exact = integers[integers.astype(fmt.dtype).astype(np.float32) == integers]
    exact = exact if zeros else exact[exact != 0]
    words = random_words(seed, shape[0] * shape[1])[:, 1]
    return np.asarray(exact[words % np.uint64(len(exact))].astype(fmt.dtype)).reshape(shape)


def _common_unit(values: Array) -> float:
    """The largest power of two that divides every value; 1 if all are zero."""
    mantissa, exponent = np.frexp(values[values != 0])
    if mantissa.size == 0:
        return 1.0
    integers = np.ldexp(np.abs(mantissa), 53).astype(np.int64)
    lowest = np.frexp((integers & -integers).astype(np.float64))[1] - 1
    return float(2.0 ** int((exponent - 53 + lowest).min()))


def _largest_exponent(values: Array, codes: Array) -> int:
    fmt = _FORMATS[codes.dtype.name]
    nonzero = values[values != 0]
    if nonzero.size == 0:
        return -1000
    return max(int(np.frexp(nonzero)[1].max()) - 1, fmt.min_exponent)
