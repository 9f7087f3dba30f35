"""Hypotheses of the cast with a scale, and of the largest magnitude."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8lab.emulation.amax import amax
from fp8lab.testing.faults.chosen import format_of, policy_of
from fp8lab.testing.faults.elements import (
    ElementCast,
    direction_faults,
    element_faults,
    stochastic_cast,
)
from fp8lab.testing.faults.hypothesis import (
    NARROW,
    Arrays,
    Hypothesis,
    Settings,
    float32,
    flushed,
    through_bfloat16,
)

Array = npt.NDArray[Any]
_TAILS = (32, 64, 128, 256, 512, 1024, 2048, 4096)


def of_cast(settings: Settings, inputs: Arrays, expected: Arrays) -> Iterator[Hypothesis]:
    """Hypotheses of `check_cast`."""
    fmt = format_of(settings)
    if not fmt.signed:
        return
    rounding = str(settings.get("rounding", "nearest_even"))
    # Where words decide, the cast toward zero gives what they add to.
    nearest = ElementCast(fmt, policy_of(settings), "nearest_even")
    right = replace(nearest, rounding="toward_zero") if rounding != "nearest_even" else nearest
    # float64 is scaled and cast as it is; what is narrower becomes float32.
    x = inputs["x"] if inputs["x"].dtype == np.float64 else float32(inputs["x"])
    scale = float32(inputs.get("scale", np.float32(1))).astype(x.dtype)
    y = np.asarray(x * scale)
    cast: Callable[[Array], Array] = right
    faults = element_faults(right, y)
    if rounding == "stochastic":
        words = inputs["random_bits"].astype(np.uint32)
        cast = partial(stochastic_cast, right, words)
        faults = _stochastic(right, y, words)
    scalings = _scalings(cast, x, scale)
    if x.dtype == np.float64:
        yield "double-rounding-float32", {"codes": cast(float32(y))}
    for fault, codes in chain(faults, scalings):
        yield fault, {"codes": codes}


def _scalings(
    cast: Callable[[Array], Array], x: Array, scale: Array
) -> Iterator[tuple[str, Array]]:
    inverse = np.float32(1) / scale
    yield "product-not-rounded", cast(x.astype(np.float64) * np.float64(scale))
    yield "subnormal-inputs-flushed", cast(flushed(x) * scale)
    yield "scale-inverted-twice", cast(x / inverse)
    yield "scale-inverted-twice", cast(x * (np.float32(1) / inverse))
    for narrow in NARROW:
        yield "scale-in-16-bits", cast(x * narrow(scale))
        yield "input-in-16-bits", cast(narrow(x) * scale)
    yield "scale-ignored", cast(x)
    yield "scale-divides", cast(x / scale)
    yield "scale-divides", cast(x * inverse)
    yield "scale-twice", cast(x * scale * scale)


def _stochastic(right: ElementCast, y: Array, words: Array) -> Iterator[tuple[str, Array]]:
    # r <= floor(fraction * 2**32): as r - 1 < that, and r = 0 always goes up.
    below = np.maximum(words, np.uint32(1)) - np.uint32(1)
    low = right(y)
    always = (words == 0) & np.isfinite(y) & (low & np.uint8(0x7F) < right.fmt.max_code)
    codes = np.where(always, low + np.uint8(1), stochastic_cast(right, below, y))
    yield "random-comparison-off-by-one", codes
    for count in (8, 16, 24, 31):
        yield "random-bits-cut", stochastic_cast(right, words, y, count)
        high = words >> np.uint32(32 - count) << np.uint32(32 - count)
        yield "random-bits-cut", stochastic_cast(right, high, y)
    yield "random-bits-complemented", stochastic_cast(right, ~words, y)
    yield from _stochastic_small(right, y, words)
    first = np.full_like(words, words.reshape(-1)[:1].sum())
    yield "random-bits-shared", stochastic_cast(right, first, y)
    yield "random-bits-ignored", replace(right, rounding="nearest_even")(y)
    yield "random-bits-ignored", right(y)
    yield from direction_faults(right, y)


def _stochastic_small(right: ElementCast, y: Array, words: Array) -> Iterator[tuple[str, Array]]:
    """Small results and zeros lost."""
    codes, zero = stochastic_cast(right, words, y), np.uint8(0)
    small = codes & np.uint8(0x7F) < 1 << right.fmt.mantissa_bits
    sign = codes & np.uint8(right.fmt.sign_bit if right.fmt.has_negative_zero else 0)
    for flush in (small, np.abs(y) < right.fmt.min_normal, np.abs(y) < right.fmt.min_subnormal):
        for kept in (sign, np.zeros_like(codes)):
            yield "subnormals-flushed", np.where(flush, kept, codes)
    if right.fmt.has_negative_zero:
        yield "minus-zero-lost", np.where(codes == right.fmt.sign_bit, zero, codes)


def of_amax(settings: Settings, inputs: Arrays, expected: Arrays) -> Iterator[Hypothesis]:
    """Hypotheses of `check_amax`."""
    name = next(iter(expected), "amax")
    for fault, largest in _largest(float32(inputs["x"]).reshape(-1)):
        yield fault, {name: float32(largest)}


def _largest(flat: Array) -> Iterator[tuple[str, Any]]:
    """Wrong largest magnitudes of all elements."""
    yield "nan-lost", amax(flat[~np.isnan(flat)])
    yield "nan-lost", amax(np.where(np.isnan(flat), np.float32(np.inf), flat))
    yield "infinity-lost", amax(flat[~np.isinf(flat)])
    yield "infinity-lost", amax(flat[np.isfinite(flat)])
    yield "infinity-lost", np.minimum(amax(flat), np.finfo(np.float32).max)
    for size in _TAILS:
        yield "tail-left-out", amax(flat[: flat.size // size * size])
    yield "tail-left-out", amax(flat[:-1])
    yield "tail-left-out", amax(flat[1:])
    yield "subnormal-inputs-flushed", amax(flushed(flat))
    yield "result-flushed", flushed(amax(flat))
    for narrow in NARROW:
        yield "amax-in-16-bits", amax(narrow(flat))
    high, low = (which(flat) if flat.size else -np.inf for which in (np.max, np.min))
    for largest in (high, max(high, 0.0), -low, abs(high)):
        yield "magnitude-forgotten", largest
    yield "magnitude-forgotten", through_bfloat16(high)
