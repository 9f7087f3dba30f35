"""What can go wrong when values that are scaled already are cast to FP8, element by element."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8lab.emulation.casting import quantize
from fp8lab.formats import (
    E4M3,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    FLOAT16,
    Float8Format,
    OverflowPolicy,
)
from fp8lab.testing.faults.hypothesis import float32, through_bfloat16, through_float16
from fp8lab.testing.faults.interpreter import interpreted

Array = npt.NDArray[Any]
Codes = npt.NDArray[np.uint8]
Wrong = tuple[str, Codes]

FORMATS = (E4M3, E5M2, E4M3FNUZ, E5M2FNUZ)
_PARTNERS = {E4M3: E4M3FNUZ, E4M3FNUZ: E4M3, E5M2: E5M2FNUZ, E5M2FNUZ: E5M2}
_LARGEST = np.float32(3e38)
# The choices of a policy, the most visible first.
_CHOICES = {
    "finite": ("max_finite", "infinity_or_nan"),
    "infinity": ("max_finite", "infinity_or_nan"),
    "nan_code": ("canonical", "quiet"),
    "nan_sign": ("positive", "kept"),
}


@dataclass(frozen=True)
class ElementCast:
    """The right cast of scaled values: codes as bytes, of their shape.

    Attributes:
        fmt: A signed format.
        policy: What becomes of overflow, Inf and NaN.
        rounding: "nearest_even" or "toward_zero".
    """

    fmt: Float8Format
    policy: OverflowPolicy
    rounding: str = "nearest_even"

    def __call__(self, y: Array) -> Codes:
        return quantize(y, self.fmt, rounding=self.rounding, overflow=self.policy).view(np.uint8)


def element_faults(right: ElementCast, y: Array) -> Iterator[Wrong]:
    """Wrong codes of values, from faults that touch a few to those that touch nearly all.

    Args:
        right: The right cast.
        y: float32 (float64 where the input is), scaled.
    """
    yield from _special_faults(right, y)
    yield from _range_faults(right, y)
    yield "double-rounding-float16", right(through_float16(y))
    yield "double-rounding-float16", right(_cut_to_float16(y))
    yield "double-rounding-bfloat16", right(through_bfloat16(y))
    yield "double-rounding-bfloat16", right(_cut_to_bfloat16(y))
    if right.rounding == "nearest_even":
        yield from _tie_faults(right, y)
    else:
        yield "rounds-to-nearest", replace(right, rounding="nearest_even")(y)
    yield from direction_faults(right, y)
    yield from _encoding_faults(right, y)
    if y.dtype == np.float32:
        yield "triton-interpreter", interpreted(right.fmt, y)


def _special_faults(right: ElementCast, y: Array) -> Iterator[Wrong]:
    fmt, codes = right.fmt, right(y)
    if fmt.has_negative_zero:
        zero = np.uint8(0)
        yield "minus-zero-lost", np.where((y == 0) & np.signbit(y), zero, codes)
        yield "minus-zero-lost", np.where(codes == fmt.sign_bit, zero, codes)
    for number in (0.0, fmt.max_finite, -fmt.max_finite):
        yield "nan-becomes-number", right(np.where(np.isnan(y), np.float32(number), y))
    yield from _policy_faults(right, y)
    # An overflow that becomes NaN keeps its sign, though a NaN does not.
    past = np.abs(y) > fmt.overflow_edge
    signed_nan = codes & np.uint8(fmt.sign_bit) | np.uint8(fmt.nan_code)
    for where in (past, past & np.isfinite(y)):
        yield "saturation-missing", np.where(where, signed_nan, codes)


def _policy_faults(right: ElementCast, y: Array) -> Iterator[Wrong]:
    """One wrong choice of the policy, then two, ...: the first of them names the fault."""
    policy = right.policy
    for count in range(1, len(_CHOICES) + 1):
        for changed in combinations(_CHOICES, count):
            other: dict[str, Any] = {
                name: next(c for c in _CHOICES[name] if c != getattr(policy, name))
                for name in changed
            }
            wrong = replace(right, policy=replace(policy, **other))
            yield _policy_fault(changed[0], policy), wrong(y)


def _policy_fault(choice: str, policy: OverflowPolicy) -> str:
    saturates = getattr(policy, choice) == "max_finite"
    return {
        "finite": "saturation-missing" if saturates else "saturation-unasked",
        "infinity": "infinity-kept" if saturates else "infinity-saturated",
        "nan_code": "wrong-nan-code",
        "nan_sign": "wrong-nan-sign",
    }[choice]


def _range_faults(right: ElementCast, y: Array) -> Iterator[Wrong]:
    fmt, codes = right.fmt, right(y)
    magnitude = codes & np.uint8(0x7F)
    # From where on a value overflows: the edge itself, anything past the largest finite value, or
    # only what lies past the value that would come next.
    beyond = 2 * fmt.overflow_edge - fmt.max_finite
    for over in (
        np.abs(y) >= fmt.overflow_edge,
        np.abs(y) > fmt.max_finite,
        np.abs(y) >= beyond,
    ):
        yield "wrong-overflow-edge", _overflow_where(right, over, y)
    for other in FORMATS:
        if other.max_finite != fmt.max_finite:
            limit = np.float32(other.max_finite)
            yield "wrong-largest-value", right(np.clip(y, -limit, limit))
    lower = np.minimum(magnitude, np.uint8(fmt.max_code - 1)) | (codes & np.uint8(0x80))
    yield "largest-value-lost", np.where(codes == fmt.nan_code, codes, lower)
    signs = (codes & np.uint8(fmt.sign_bit)) if fmt.has_negative_zero else np.zeros_like(codes)
    number = codes != fmt.nan_code
    for small in (magnitude < 1 << fmt.mantissa_bits, np.abs(y) < np.float32(fmt.min_normal)):
        for zero in (signs, np.zeros_like(codes)):
            yield "subnormals-flushed", np.where(small & number, zero, codes)


def _overflow_where(right: ElementCast, over: Array, y: Array) -> Codes:
    limit = np.float32(right.fmt.max_finite)
    inside = right(np.where(np.isnan(y), y, np.clip(y, -limit, limit)))
    codes = np.where(over, right(np.copysign(_LARGEST, y)), inside)
    return np.where(np.isinf(y), right(y), codes).astype(np.uint8)


def _cut_to_float16(y: Array) -> Array:
    """Toward zero to float16, as `cvt.rz.f16.f32` does; NaN stays."""
    cut = quantize(y, FLOAT16, rounding="toward_zero").astype(np.float32)
    return float32(np.where(np.isnan(y), y, cut))


def _cut_to_bfloat16(y: Array) -> Array:
    words = float32(y).view(np.uint32) & np.uint32(0xFFFF0000)
    return float32(np.where(np.isnan(y), y, words.view(np.float32)))


def _tie_faults(right: ElementCast, y: Array) -> Iterator[Wrong]:
    fmt, negative = right.fmt, np.signbit(y)
    low, part = _below(fmt, y)
    tie, more = part == 0.5, part > 0.5
    yield "ties-away", _encoded(right, low + (more | tie), y)
    yield "ties-toward-zero", _encoded(right, low + more, y)
    yield "ties-to-odd", _encoded(right, low + (more | (tie & (low & 1 == 0))), y)
    yield "ties-up", _encoded(right, low + (more | (tie & ~negative)), y)
    # A mantissa that rounds up past its last bit: it wraps to 0, or stays as it was.
    top = (1 << fmt.mantissa_bits) - 1
    up = more | (tie & (low & 1 == 1))
    carry = up & (low & top == top)
    yield "lost-carry", _encoded(right, np.where(carry, low - top, low + up), y)
    yield "lost-carry", _encoded(right, np.where(carry, low, low + up), y)
    cut = replace(right, rounding="toward_zero")(y)
    small = np.abs(y) < np.float32(fmt.min_normal)
    yield "subnormals-truncated", np.where(small, cut, right(y))
    yield "truncation", cut
    yield "truncation", _encoded(right, low, y)


def direction_faults(right: ElementCast, y: Array) -> Iterator[Wrong]:
    """Codes of values that are all rounded in one direction."""
    low, part = _below(right.fmt, y)
    between, negative = part > 0, np.signbit(y)
    yield "rounds-away", _encoded(right, low + between, y)
    yield "rounds-up", _encoded(right, low + (between & ~negative), y)
    yield "rounds-down", _encoded(right, low + (between & negative), y)


def _below(fmt: Float8Format, y: Array) -> tuple[Array, Array]:
    """The code below each magnitude, and where in the gap it lies (exact in float64)."""
    finite = np.where(np.isfinite(y), np.abs(y), 0)
    low = quantize(finite, fmt, rounding="toward_zero").view(np.uint8).astype(np.int64)
    values = np.array([fmt.value_of_magnitude(code) for code in range(fmt.max_code + 2)])
    part = (finite.astype(np.float64) - values[low]) / (values[low + 1] - values[low])
    return low, part


def _encoded(right: ElementCast, magnitude: Array, y: Array) -> Codes:
    """Magnitudes with y's sign; past the largest one, and where y is not finite, as the policy."""
    fmt = right.fmt
    sign = np.where(np.signbit(y), fmt.sign_bit, 0)
    if not fmt.has_negative_zero:
        sign = np.where(magnitude == 0, 0, sign)
    overflow = right(np.copysign(_LARGEST, y))
    codes = np.where(magnitude > fmt.max_code, overflow, magnitude + sign)
    return np.where(np.isfinite(y), codes, right(y)).astype(np.uint8)


def _encoding_faults(right: ElementCast, y: Array) -> Iterator[Wrong]:
    yield "sign-lost", right(np.abs(y))
    partner = _PARTNERS[right.fmt]
    yield "wrong-bias", replace(right, fmt=partner)(y)
    for factor in (2, 0.5):
        yield "wrong-bias", right(y * np.float32(factor))
    for other in FORMATS:
        if other not in (right.fmt, partner):
            yield "wrong-format", replace(right, fmt=other)(y)


def stochastic_cast(right: ElementCast, words: Array, y: Array, bit_count: int = 32) -> Codes:
    """Codes rounded by random words, below 2**32."""
    return quantize(
        y,
        right.fmt,
        rounding="stochastic",
        overflow=right.policy,
        random_bits=words.astype(np.uint32),
        bit_count=bit_count,
    ).view(np.uint8)
