"""Hypotheses of what begins with codes: dequantise, and requantise to another format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8lab.emulation.casting import dequantize
from fp8lab.formats import Float8Format
from fp8lab.testing.faults.chosen import format_of, policy_of
from fp8lab.testing.faults.elements import FORMATS, ElementCast, element_faults
from fp8lab.testing.faults.hypothesis import (
    NARROW,
    Arrays,
    Hypothesis,
    Settings,
    float32,
    flushed,
)

Array = npt.NDArray[Any]


def of_dequantize(settings: Settings, inputs: Arrays, expected: Arrays) -> Iterator[Hypothesis]:
    """Hypotheses of `check_dequantize`."""
    fmt, codes = format_of(settings), inputs["codes"].view(np.uint8)
    inverse = float32(inputs.get("inverse_scale", np.float32(1)))
    name = next(iter(expected), "values")
    for fault, values in _dequantized(fmt, codes, inverse):
        yield fault, {name: float32(values)}


def _dequantized(fmt: Float8Format, codes: Array, inverse: Array) -> Iterator[tuple[str, Array]]:
    values = dequantize(codes.view(fmt.dtype))
    right = values * inverse
    zero = np.float32(0)
    yield "minus-zero-lost", np.where(right == 0, zero, right)
    yield "minus-zero-lost", np.where(values == 0, zero, values) * inverse
    special = ~np.isfinite(values)
    if not fmt.signed:
        shifted = (codes.astype(np.uint32) << 23).view(np.float32)
        yield "exponent-shifted-alone", shifted * inverse
        yield "exponent-shifted-alone", np.where(special, values, shifted) * inverse
        yield "exponent-shifted-alone", np.where(codes == 0, values, shifted) * inverse
    if fmt.signed:
        numbers = _as_if_numbers(codes, fmt)
        yield "special-codes-decoded", np.where(special, numbers, values) * inverse
        yield "special-codes-decoded", np.where(np.isnan(values), numbers, values) * inverse
    yield "special-codes-decoded", np.where(special, zero, values) * inverse
    yield "infinity-lost", np.where(np.isinf(values), np.float32(np.nan), values) * inverse
    small = np.abs(values) < np.float32(fmt.min_normal)
    yield "subnormals-flushed", np.where(small, np.copysign(zero, values), values) * inverse
    yield "result-flushed", flushed(right)
    for narrow in NARROW:
        yield "scale-in-16-bits", values * narrow(inverse)
        yield "result-in-16-bits", narrow(right)
    yield "scale-ignored", values
    yield "scale-divides", values / inverse
    yield "scale-inverted-twice", values / (np.float32(1) / inverse)
    if fmt.signed:
        yield "sign-lost", np.abs(values) * inverse
        for other in FORMATS:
            fault = "wrong-bias" if other.mantissa_bits == fmt.mantissa_bits else "wrong-format"
            if other != fmt:
                yield fault, dequantize(codes.view(other.dtype)) * inverse
    for factor in (2, 0.5):
        yield "wrong-bias", values * np.float32(factor) * inverse


def _as_if_numbers(codes: Array, fmt: Float8Format) -> Array:
    """Every code read by the rule of the normal and subnormal ones."""
    table = float32([fmt.value_of_magnitude(code) for code in range(128)])
    magnitude = table[codes & np.uint8(0x7F)]
    return np.asarray(np.where(codes & np.uint8(0x80) != 0, -magnitude, magnitude))


def of_requantize(settings: Settings, inputs: Arrays, expected: Arrays) -> Iterator[Hypothesis]:
    """Hypotheses of `check_requantize`."""
    right = ElementCast(format_of(settings, "target"), policy_of(settings, "target"))
    source = format_of(settings, "source")
    values = dequantize(inputs["codes"].view(np.uint8).view(source.dtype))
    inverse, scale = float32(inputs["inverse_scale"]), float32(inputs["scale"])
    for fault, codes in _requantized(right, values, inverse, scale):
        yield fault, {"codes": codes}


def _requantized(
    right: ElementCast, values: Array, inverse: Array, scale: Array
) -> Iterator[tuple[str, Array]]:
    def exact(*factors: Array) -> Array:
        """A product that is not rounded: float64 holds it."""
        product = np.asarray(1.0)
        for factor in factors:
            product = product * factor.astype(np.float64)
        return product

    decoded = values * inverse
    y = exact(values, inverse, scale)
    yield "double-rounding-float32", right(float32(y))
    yield "double-rounding-float32", right(decoded * scale)
    yield "double-rounding-float32", right(exact(decoded, scale))
    for product in (exact(values, inverse * scale), values * (inverse * scale)):
        yield "scales-combined", right(product)
    yield from element_faults(right, y)
    for narrow in NARROW:
        yield "input-in-16-bits", right(exact(narrow(decoded), scale))
        yield "input-in-16-bits", right(narrow(decoded) * scale)
        yield "scale-in-16-bits", right(exact(values, narrow(inverse), narrow(scale)))
    for kept in (exact(values, scale), exact(values, inverse), values):
        yield "scale-ignored", right(kept)
    yield "scale-divides", right(exact(values, inverse) / scale.astype(np.float64))
    yield "scale-divides", right(exact(values, scale) / inverse.astype(np.float64))
