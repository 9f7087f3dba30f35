"""What a hypothesis is, and roundings that many of them share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Float32Array = npt.NDArray[np.float32]
Arrays = Mapping[str, Array]
Settings = Mapping[str, object]

# A fault's name, and the outputs that the wrong computation gives.
Hypothesis = tuple[str, Arrays]
# (settings, inputs, expected) -> hypotheses, from the narrowest to the widest. They are generators,
# so that nothing is computed that nobody asks for.
Hypotheses = Callable[[Settings, Arrays, Arrays], Iterator[Hypothesis]]


def float32(values: npt.ArrayLike) -> Float32Array:
    """An array of float32."""
    return np.asarray(values, dtype=np.float32)


def through_bfloat16(x: npt.ArrayLike) -> Float32Array:
    """float32 values rounded to bfloat16, to nearest even, and back."""
    return float32(x).astype(ml_dtypes.bfloat16).astype(np.float32)


def through_float16(x: npt.ArrayLike) -> Float32Array:
    """float32 values rounded to float16, to nearest even, and back."""
    return float32(x).astype(np.float16).astype(np.float32)


NARROW = (through_bfloat16, through_float16)


def flushed(x: npt.ArrayLike) -> Float32Array:
    """float32 values with every subnormal replaced by a zero of its sign."""
    values = float32(x)
    zero = np.copysign(np.float32(0), values)
    return np.where(np.abs(values) < np.float32(2.0**-126), zero, values)


def same_bits(first: Arrays, second: Arrays) -> bool:
    """Whether arrays of the same names have the same bits; floating NaN equal each other."""
    return all(name in second and _same(first[name], second[name]) for name in first)


def _same(first: Array, second: Array) -> bool:
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if first.dtype.kind != "f":
        return bool(np.array_equal(first, second))
    words = np.dtype(f"u{first.dtype.itemsize}")
    one, other = np.ascontiguousarray(first), np.ascontiguousarray(second)
    equal = (one.view(words) == other.view(words)) | (np.isnan(one) & np.isnan(other))
    return bool(equal.all())
