"""Unscale, finite check, global norm and clip coefficient, by a summation that no launch changes.

The norm is the root of a sum of squares over all elements of all gradients. Its tree, from the
bottom:

1. Each gradient, in C order, is cut into leaves of 16 rows of 1024 lanes, the last one filled up
   with zeros.
2. x = g * inverse_scale, rounded to float32; x*x is exact in float64. Each lane of a leaf adds its
   16 squares in float64, row after row.
3. The 1024 lanes of a leaf are added by `order_free_sum`, and so are all leaves of all gradients.

`order_free_sum` is the same for every permutation of its terms, so neither the order of the
gradients, nor their division into groups or at multiples of 16384 elements, nor the launch of a
kernel changes a bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8lab.emulation.adamw import GRADIENTS

Array = npt.NDArray[Any]
Float64Array = npt.NDArray[np.float64]

LANES = 1024
ROWS = 16
LEAF = ROWS * LANES
_INFINITY = np.float64(np.inf).view(np.int64)
_TOP_BITS = 60  # a term is counted in units of 2**-60 of the largest one's binade
_LOW_BITS = 30
_CLIP_EPS = np.float32(1e-6)


@dataclass(frozen=True)
class GradientSummary:
    """What a step needs to know of all gradients together.

    Attributes:
        norm: float32, of the unscaled gradients; Inf or NaN when `finite` is False, and Inf when a
            finite norm leaves float32.
        finite: Whether every unscaled element is finite.
        factor: float32: inverse_scale times the clip coefficient, rounded. One multiplication of
            the raw gradient by it unscales and clips.
    """

    norm: np.float32
    finite: bool
    factor: np.float32


def gradient_norm(
    grads: Sequence[Array], *, inverse_scale: float = 1.0, max_norm: float | None = None
) -> GradientSummary:
    """The norm of all gradients together, whether they are finite, and what to multiply them by.

    norm = sqrt(total) in float64, rounded to float32, with `total` from the tree above. The clip
    coefficient is torch's, in float32: min((1 / (norm + 1e-6)) * max_norm, 1), each operation
    rounded; NaN stays. factor = inverse_scale * coefficient, rounded.

    Args:
        grads: float32, bfloat16 or float16, of any shapes, empty ones too; not modified.
        inverse_scale: What unscales them: 1 / loss scale; finite and above 0; rounded to float32.
        max_norm: What the norm is clipped to, at least 0; None for no clipping.

    Returns:
        The summary. Of no elements the norm is 0.

    Raises:
        TypeError: A gradient of another dtype.
        ValueError: inverse_scale or max_norm is outside its range.

    >>> summary = gradient_norm([np.float32([3, 0]), np.float32([4])], max_norm=1.0)
    >>> float(summary.norm), summary.finite, float(summary.factor)
    (5.0, True, 0.19999995827674866)
    """
    unscale = np.float32(inverse_scale)
    if not (np.isfinite(unscale) and unscale > 0):
        raise ValueError(f"inverse_scale is {inverse_scale}; accepted: finite, above 0 in float32")
    if max_norm is not None and not 0 <= max_norm < float("inf"):
        raise ValueError(f"max_norm is {max_norm}; accepted: finite, at least 0, or None")
    leaves = [square_sums(grad, inverse_scale=unscale) for grad in grads]
    total = order_free_sum(np.concatenate([np.zeros(1), *leaves]))
    with np.errstate(all="ignore"):
        norm = np.float32(np.sqrt(total))
        factor = unscale
        if max_norm is not None:
            factor = unscale * clip_coefficient(norm, max_norm)
        return GradientSummary(norm, bool(np.isfinite(total)), np.float32(factor))


def clip_coefficient(norm: np.float32, max_norm: float) -> np.float32:
    """min((1 / (norm + 1e-6)) * max_norm, 1) in float32, each operation rounded; NaN stays.

    Source: torch.nn.utils.clip_grads_with_norm_ (a number over a tensor is its reciprocal, times
    the number).
    """
    with np.errstate(all="ignore"):
        coefficient = (np.float32(1) / (norm + _CLIP_EPS)) * np.float32(max_norm)
        return np.float32(np.minimum(coefficient, np.float32(1)))


def square_sums(grad: Array, *, inverse_scale: float | np.float32 = 1.0) -> Float64Array:
    """The sum of squares of each leaf of a gradient, float64: steps 1 to 3 within a leaf.

    A leaf that holds an element that is not finite once unscaled gives Inf, or NaN if one is NaN.
    """
    if grad.dtype not in GRADIENTS:
        raise TypeError(f"a gradient has dtype {grad.dtype}; accepted: float32, bfloat16, float16")
    count = -(-grad.size // LEAF)
    padded = np.zeros(count * LEAF, np.float32)
    with np.errstate(all="ignore"):
        np.multiply(
            np.ascontiguousarray(grad).reshape(-1).astype(np.float32),
            np.float32(inverse_scale),
            out=padded[: grad.size],
        )
        rows = padded.reshape(count, ROWS, LANES)
        lanes = np.zeros((count, LANES))
        for row in range(ROWS):
            x = rows[:, row].astype(np.float64)
            lanes += x * x
    return order_free_sum(lanes)


def order_free_sum(terms: Float64Array) -> Float64Array:
    """The sum over the last axis, the same for every order of the terms.

    With E the exponent of the largest term: each term is cut toward zero to a multiple of
    2**(E - 60), an integer of at most 61 bits; the integers' upper parts (from bit 30 up) and lower
    30 bits are added apart in int64, which is exact; then
    total = (float64(upper) * 2**30 + float64(lower)) * 2**(E - 60), conversions and sum rounded to
    nearest even. The cut costs less than n * 2**-60 of the sum.

    Args:
        terms: float64, not negative, (..., n) with n from 1 to 2**31; 0 or at least 2**-300, as
            squares of float32 are.

    Returns:
        float64, (...). NaN if a term is NaN, else Inf if one is.

    >>> float(order_free_sum(np.array([2.0**53, 1.0, 1.0])))
    9007199254740994.0
    """
    words = np.ascontiguousarray(terms, dtype=np.float64).view(np.int64)
    top = (words & np.int64(0x7FFFFFFFFFFFFFFF)).max(axis=-1, keepdims=True)
    exponent = np.where((top > 0) & (top < _INFINITY), (top >> 52) - 1023, 0)
    with np.errstate(all="ignore"):
        counted = np.where(top < _INFINITY, terms * _power_of_two(_TOP_BITS - exponent), 0)
        integers = counted.astype(np.int64)
        upper = (integers >> _LOW_BITS).sum(axis=-1, keepdims=True)
        lower = (integers & ((1 << _LOW_BITS) - 1)).sum(axis=-1, keepdims=True)
        total = upper.astype(np.float64) * 2.0**_LOW_BITS + lower.astype(np.float64)
        total = total * _power_of_two(exponent - _TOP_BITS)
    beyond = np.where(top > _INFINITY, np.nan, np.inf)
    return np.asarray(np.where(top < _INFINITY, total, beyond)[..., 0])


def _power_of_two(exponent: Array) -> Float64Array:
    return np.asarray((exponent.astype(np.int64) + 1023) << 52).view(np.float64)
