"""Values that are hard to cast, as plain NumPy: to be enumerated, or drawn by `strategies`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from fp8lab.formats import Float8Format

Array = npt.NDArray[Any]
Words = npt.NDArray[np.uint64]

CAST_KINDS = ("edges", "special", "ordinary", "exponents", "subnormals", "patterns")
_INPUTS = tuple(np.dtype(t) for t in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16))


def random_words(seed: int, size: int, *, skip: int = 0) -> Words:
    """Rows `skip` to `skip + size` of an endless table of two random 64-bit words a row.

    Row i of a seed is the same whatever the size and the skip.
    """
    words = np.random.PCG64(seed).random_raw(2 * (skip + size))
    return np.asarray(words, dtype=np.uint64).reshape(-1, 2)[skip:]


def edge_values(
    fmt: Float8Format, *, scale: float | None = None, dtype: npt.DTypeLike = np.float32
) -> Array:
    """Every place where a cast to a format can go wrong, and its neighbours, without repetition.

    For each pair of neighbouring magnitudes of the format: both, their midpoint (a tie), and up to
    two ulps to either side of each. The first pair is zero and the smallest subnormal (underflow);
    the last is the largest finite value and the one that would come next (overflow). Both signs.

    Args:
        fmt: The format.
        scale: Divides the places, so that x * scale falls on them as nearly as the type allows.
        dtype: float64, float32, float16 or ml_dtypes.bfloat16. What does not fit is left out.

    Returns:
        Finite values of that dtype, ordered by their bits.

    >>> from fp8lab.formats import E4M3
    >>> bool(np.isin([464.0, 2.0**-10, 124.0], edge_values(E4M3)).all())
    True
    """
    return _edges(fmt, scale, _input_dtype(dtype)).copy()


def special_values(dtype: npt.DTypeLike = np.float32) -> Array:
    """Zeros, one, infinities, extreme magnitudes of a type, and NaN with several payloads; both
    signs of each.

    Args:
        dtype: float64, float32, float16 or ml_dtypes.bfloat16.
    """
    dtype = _input_dtype(dtype)
    words, infinity, hidden = _layout(dtype)
    magnitudes = [
        0,
        1,  # the smallest subnormal
        hidden - 1,  # the largest subnormal
        hidden,  # the smallest normal
        int(np.ones((), dtype).view(words)),
        infinity - 1,  # the largest finite value
        infinity,
        infinity + 1,  # signalling NaN, smallest payload
        infinity + hidden // 2,  # quiet NaN, no payload
        infinity + hidden // 2 + 1,
        infinity + hidden - 1,  # NaN, all payload bits
    ]
    return _with_both_signs(np.array(magnitudes, dtype=words)).view(dtype)


def cast_values(
    words: Words,
    kinds: Sequence[str],
    fmt: Float8Format,
    *,
    scale: float | None = None,
    dtype: npt.DTypeLike = np.float32,
) -> Array:
    """One value for each row of random words, each of one of the kinds.

    Args:
        words: Random words, shape (n, 2): see `random_words`.
        kinds: Some of `CAST_KINDS`.
        fmt: The format that "edges" and the range of "exponents" are about.
        scale: What the cast will multiply by.
        dtype: float64, float32, float16 or ml_dtypes.bfloat16.

    Returns:
        Shape (n,), of that dtype.

    Raises:
        ValueError: An unknown kind.
    """
    dtype = _input_dtype(dtype)
    if unknown := set(kinds) - set(CAST_KINDS):
        raise ValueError(f"unknown kinds {sorted(unknown)}; accepted: {', '.join(CAST_KINDS)}")
    chosen = words[:, 0] % np.uint64(len(kinds))
    values = np.empty(len(words), dtype=dtype)
    for index, kind in enumerate(kinds):
        mine = chosen == index
        values[mine] = _of_kind(kind, words[mine, 1], fmt, scale, dtype)
    return values


def wide_floats(words: Words, low: int, high: int) -> npt.NDArray[np.float32]:
    """float32 of either sign and any mantissa, with exponents evenly between two, both included.

    Args:
        words: Random words, one a value.
        low, high: Exponents from -149 (subnormals come out rounded) to 127.
    """
    span = np.uint64(high - low + 1)
    exponent = low + (words % span).astype(np.int64)
    mantissa = 1 + ((words >> np.uint64(32)) & np.uint64(0x7FFFFF)).astype(np.float64) * 2.0**-23
    sign = np.where(words >> np.uint64(63), -1.0, 1.0)
    return (sign * np.ldexp(mantissa, exponent)).astype(np.float32)


def _of_kind(
    kind: str, words: Words, fmt: Float8Format, scale: float | None, dtype: np.dtype[Any]
) -> Array:
    unsigned, _, hidden = _layout(dtype)
    factor = 1.0 if scale is None else float(np.float32(scale))
    if kind in ("edges", "special"):
        pool = _edges(fmt, scale, dtype) if kind == "edges" else special_values(dtype)
        return np.asarray(pool[words % np.uint64(len(pool))])
    if kind == "patterns":
        return words.astype(unsigned).view(dtype)
    if kind == "subnormals":
        sign = words >> np.uint64(63) << np.uint64(8 * dtype.itemsize - 1)
        return np.asarray((words % np.uint64(hidden) | sign).astype(unsigned).view(dtype))
    if kind == "exponents":
        # From two binades below the smallest subnormal to two above the largest finite value.
        low = max(fmt.min_exponent - fmt.mantissa_bits - 2, -149)
        high = min(int(np.log2(fmt.max_finite)) + 2, 127)
        values = wide_floats(words, low, high).astype(np.float64)
    else:
        high_half = (words >> np.uint64(32)).astype(np.float64)
        low_half = (words & np.uint64(0xFFFFFFFF)).astype(np.float64)
        radius = np.sqrt(-2 * np.log((high_half + 1) * 2.0**-32))
        values = radius * np.cos(2 * np.pi * low_half * 2.0**-32)  # Box and Muller's normal numbers
    with np.errstate(over="ignore", under="ignore"):
        return (values / factor).astype(dtype)


@lru_cache(maxsize=64)
def _edges(fmt: Float8Format, scale: float | None, dtype: np.dtype[Any]) -> Array:
    unsigned, infinity, _ = _layout(dtype)
    finite = [fmt.value_of_magnitude(code) for code in range(fmt.max_code + 1)]
    if not fmt.has_subnormals:
        finite.insert(0, 0.0)
    places = np.array([*finite, 2 * finite[-1] - finite[-2]])
    places = np.concatenate([places, (places[:-1] + places[1:]) / 2])
    factor = 1.0 if scale is None else float(np.float32(scale))
    with np.errstate(over="ignore", under="ignore"):
        near = (places / factor).astype(dtype).view(unsigned).astype(np.int64)
    around = np.unique(near[:, None] + np.arange(-2, 3))
    around = around[(around >= 0) & (around < infinity)]
    if around.size == 0:
        around = np.zeros(1, dtype=np.int64)
    edges = _with_both_signs(around.astype(unsigned)).view(dtype)
    edges.flags.writeable = False
    return edges


def _with_both_signs(magnitudes: Array) -> Array:
    sign = magnitudes.dtype.type(1 << (8 * magnitudes.dtype.itemsize - 1))
    return np.concatenate([magnitudes, magnitudes | sign])


def _layout(dtype: np.dtype[Any]) -> tuple[np.dtype[Any], int, int]:
    """The unsigned integers of a type's width, the bits of its Inf, and its hidden bit."""
    unsigned = np.dtype(f"u{dtype.itemsize}")
    infinity = int(np.array(np.inf, dtype=dtype).view(unsigned))
    return unsigned, infinity, infinity & -infinity


def _input_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    result = np.dtype(dtype)
    if result not in _INPUTS:
        accepted = ", ".join(str(known) for known in _INPUTS)
        raise TypeError(f"dtype is {result}; accepted: {accepted}")
    return result
