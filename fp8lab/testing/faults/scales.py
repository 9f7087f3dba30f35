"""Hypotheses of scales that are made from an amax."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8lab.emulation.scale_rules import FLT_MAX, SMALLEST_SCALE, bounded_scale, cleared_mantissa
from fp8lab.formats import Float8Format
from fp8lab.testing.faults.chosen import format_of, integer
from fp8lab.testing.faults.elements import FORMATS
from fp8lab.testing.faults.hypothesis import (
    NARROW,
    Arrays,
    Hypothesis,
    Settings,
    float32,
    flushed,
)

Array = npt.NDArray[Any]
Float32Array = npt.NDArray[np.float32]
_ONE = np.float32(1)


@dataclass(frozen=True, eq=False)
class ScaleRule:
    """`scale_from_amax` with its choices made: from amaxes to scales.

    Attributes:
        fmt, margin, power_of_two, previous: As for `scale_from_amax`.
    """

    fmt: Float8Format
    margin: int = 0
    power_of_two: bool = False
    previous: npt.ArrayLike = 1.0

    def __call__(self, largest: Array) -> Float32Array:
        return bounded_scale(
            float32(largest), self.fmt, self.margin, self.power_of_two, self.previous
        )

    @property
    def top(self) -> np.float32:
        """What is divided by the amax."""
        return np.float32(self.fmt.max_finite * 2.0**-self.margin)


def rule_faults(right: ScaleRule, largest: Array) -> Iterator[tuple[str, Float32Array]]:
    """Wrong scales of amaxes, from faults that touch a few to those that touch nearly all."""
    largest, top = float32(largest), right.top
    scale = right(largest)
    usable = np.isfinite(largest) & (largest > 0)

    def where_usable(other: Array) -> Float32Array:
        return float32(np.where(usable, other, scale))

    def power(raw: Array) -> Array:
        return cleared_mantissa(raw) if right.power_of_two else raw

    yield from _special_scales(right, largest, scale)
    quotient = top / largest
    # Each bound left out, then both.
    for raw in (np.maximum(quotient, SMALLEST_SCALE), np.minimum(quotient, FLT_MAX), quotient):
        yield "scale-unbounded", where_usable(power(raw))
    for other in (1.0, 0.0, np.inf):
        yield "scale-unbounded", float32(np.where(np.isinf(quotient), other, scale))
    # No amax is special, and the quotient has no bound, one, or both.
    for raw in (
        quotient,
        np.minimum(quotient, FLT_MAX),
        np.minimum(np.maximum(quotient, SMALLEST_SCALE), FLT_MAX),
    ):
        yield "amax-unguarded", float32(power(raw))
    yield "subnormal-inputs-flushed", right(flushed(largest))
    yield "result-flushed", flushed(scale)
    kinds = _power_faults if right.power_of_two else _quotient_faults
    for fault, raw in kinds(right, largest):
        yield fault, where_usable(raw)
    for narrow in NARROW:
        yield "scale-in-16-bits", narrow(scale)
        yield "scale-in-16-bits", where_usable(narrow(power(quotient)))
        near = narrow(largest)
        yield "amax-in-16-bits", right(near)
        # Where the guard looks at the amax itself.
        held = np.minimum(np.maximum(top / near, SMALLEST_SCALE), FLT_MAX)
        yield "amax-in-16-bits", where_usable(power(held))
    for eps in (1e-12, 1e-10, 1e-8, 1e-6, 1e-4):
        for raised in (np.maximum(largest, np.float32(eps)), largest + np.float32(eps)):
            yield "amax-raised", right(raised)
            yield "amax-raised", where_usable(right(raised))
    yield from _margin_faults(right, largest, usable)
    for fmt in FORMATS:
        if fmt.max_finite != right.fmt.max_finite:
            yield "wrong-largest-value", replace(right, fmt=fmt)(largest)
    yield "scale-is-inverse", where_usable(power(largest / top))
    yield "scale-is-inverse", where_usable(_ONE / scale)


def _power_faults(right: ScaleRule, largest: Array) -> Iterator[tuple[str, Array]]:
    """Wrong powers of two."""
    top, scale = right.top, np.minimum(right.top / largest, FLT_MAX)
    for logarithm in (np.log2(scale), np.log2(top) - np.log2(largest)):
        yield "exponent-from-logarithm", _power_of_two(np.floor(logarithm))
    below, above = cleared_mantissa(scale), _next_power(scale)
    yield "power-of-two-up", above
    yield "power-of-two-nearest", np.where(scale >= below * np.float32(1.5), above, below)
    yield "power-of-two-forgotten", replace(right, power_of_two=False)(largest)


def _quotient_faults(right: ScaleRule, largest: Array) -> Iterator[tuple[str, Array]]:
    """Wrong quotients."""
    top = right.top
    for raw in (
        (_ONE / largest) * top,
        _ONE / (largest / top),
        _ONE / (largest * (_ONE / top)),
    ):
        yield "reciprocal-multiplied", np.minimum(np.maximum(raw, SMALLEST_SCALE), FLT_MAX)
    yield "power-of-two-unasked", replace(right, power_of_two=True)(largest)


def _special_scales(
    right: ScaleRule, largest: Array, scale: Array
) -> Iterator[tuple[str, Float32Array]]:
    """What implementations give where the amax says nothing."""
    smallest = right.top / np.float32(1e-12)
    for other in (1.0, 0.0, FLT_MAX, np.inf, np.nan, right.top, smallest, 2.0**127):
        yield "zero-amax-scale", float32(np.where(largest == 0, other, scale))
        yield "infinite-amax", float32(np.where(np.isinf(largest), other, scale))
        yield "nan-lost", float32(np.where(np.isnan(largest), other, scale))
        yield "infinite-amax", float32(np.where(np.isfinite(largest), scale, other))
    # The division's own answers: 0 for Inf, NaN for NaN.
    yield "infinite-amax", float32(np.where(np.isfinite(largest), scale, right.top / largest))


def _margin_faults(
    right: ScaleRule, largest: Array, usable: Array
) -> Iterator[tuple[str, Float32Array]]:
    if not right.margin:
        return
    scale, low = right(largest), np.float32(2.0**-right.margin)
    whole = np.float32(right.fmt.max_finite)
    unbounded = (whole / largest) * low
    late = np.minimum(np.maximum(unbounded, SMALLEST_SCALE), FLT_MAX)
    early = replace(right, margin=0)(largest) * low
    for raw in (late, np.minimum(whole / largest, FLT_MAX) * low, early, unbounded):
        value = cleared_mantissa(raw) if right.power_of_two else raw
        yield "margin-after-division", float32(np.where(usable, value, scale))
    yield "margin-ignored", replace(right, margin=0)(largest)
    for fault, top in (
        ("margin-sign", whole / low),
        ("margin-linear", whole / np.float32(1 + right.margin)),
        ("margin-linear", whole / np.float32(right.margin)),
        ("margin-linear", whole - np.float32(right.margin)),
    ):
        raw = np.minimum(np.maximum(top / largest, SMALLEST_SCALE), FLT_MAX)
        value = cleared_mantissa(raw) if right.power_of_two else raw
        yield fault, float32(np.where(usable, value, scale))


def _power_of_two(exponent: Array) -> Array:
    """2**exponent; NumPy's exp2 is inexact at 127."""
    whole = np.nan_to_num(exponent, posinf=200, neginf=-200).astype(np.int32)
    return np.ldexp(np.float32(1), whole)


def _next_power(scale: Array) -> Array:
    """The power of two at or above a scale; the largest one stays."""
    below = cleared_mantissa(scale)
    return np.where(below == scale, below, np.minimum(below, np.float32(2.0**126)) * np.float32(2))


def of_scale_from_amax(
    settings: Settings, inputs: Arrays, expected: Arrays
) -> Iterator[Hypothesis]:
    """Hypotheses of `check_scale_from_amax`."""
    right = replace(rule_of(settings), previous=inputs.get("previous", _ONE))
    name = next(iter(expected), "scale")
    for fault, scale in rule_faults(right, inputs["amax"]):
        yield fault, {name: scale}


def rule_of(settings: Settings, *, power_of_two: bool = False) -> ScaleRule:
    """The rule that a contract's settings choose."""
    return ScaleRule(
        format_of(settings),
        integer(settings, "margin"),
        bool(settings.get("power_of_two", power_of_two)),
    )
