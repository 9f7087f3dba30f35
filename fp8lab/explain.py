"""Why a value becomes the code it does: its neighbours, the midpoint, each rounding and policy."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np

from fp8lab.emulation.casting import quantize
from fp8lab.errors import UserError
from fp8lab.formats import (
    BFLOAT16,
    FLOAT16,
    OVERFLOW_POLICIES,
    TARGETS,
    FloatFormat,
    overflow_policy,
)

INPUT_TYPES = {
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
# The types narrower than float32, to which NumPy would go by way of float32 or float64.
_NARROW = {np.dtype(np.float16): FLOAT16, np.dtype(ml_dtypes.bfloat16): BFLOAT16}
Value = np.ndarray[Any, np.dtype[Any]]  # of shape ()


def explain(text: str, fmt: FloatFormat, *, scale: float | None = None, dtype: str) -> str:
    """The story of one cast.

    Args:
        text: A decimal or hexadecimal number, inf, nan, or the bits of a value such as 0x42FC7A2A.
        fmt: The target.
        scale: Multiplies the value first.
        dtype: The type of the value: a name in `INPUT_TYPES`.

    Returns:
        Lines of text.

    Raises:
        UserError: A value or scale that cannot be read, or a scale that casts do not take.
    """
    x = parse_value(text, INPUT_TYPES[dtype])
    lines = [f"value        {_described(x)}"]
    y = x
    if scale is not None:
        y = _scaled(x, scale)
        factor = float(np.asarray(scale).astype(y.dtype))
        lines.append(
            f"times scale  {_described(y)}, the product with {factor!r} rounded to nearest"
        )
    lines += _place(float(y), fmt)
    lines += ["", *_roundings(y, fmt), "", *_policies(y, fmt)]
    return "\n".join(lines)


def parse_value(text: str, dtype: np.dtype[np.generic]) -> Value:
    """A number, or the bits of one: 0x and hexadecimal digits alone are bits of that type."""
    word = text.strip().lower()
    digits = word.removeprefix("0x")
    width = 2 * dtype.itemsize
    try:
        if re.fullmatch("0x[0-9a-f]+", word):
            bits = int(digits, 16)
            if bits >> (8 * dtype.itemsize):
                raise UserError(
                    f"{text} has more than the {width} digits of a {dtype}; see --dtype"
                )
            return np.array(bits, dtype=f"u{dtype.itemsize}").view(dtype)
        if "0x" in word and not set(word) & set(".p"):
            raise ValueError("neither bits nor a hexadecimal number")
        number = float.fromhex(word) if "0x" in word else _rounded_to_odd(word)
    except ValueError:
        raise UserError(
            f"cannot read {text!r}; accepted: 126.24, 0x1.f8p6, inf, -nan, or the bits of a"
            f" {dtype} as 0x and {width} digits"
        ) from None
    except OverflowError:
        raise UserError(f"{text} is beyond float64") from None
    if dtype in _NARROW:
        return np.asarray(quantize(np.float64(number), _NARROW[dtype], overflow="ieee"))
    with np.errstate(all="ignore"):
        return np.array(number).astype(dtype)


def _rounded_to_odd(text: str) -> float:
    """A decimal as float64, so that rounding it on to a narrower type rounds only once.

    Where float64 does not hold the number, it is cut toward zero and its last bit set: no midpoint
    of a narrower type is hit that the number itself does not hit.
    """
    near = float(text)
    if not math.isfinite(near) or near == 0 or len(text) > 1000:
        return near
    exact = Fraction(text)
    if Fraction(near) == exact:
        return near
    if abs(Fraction(near)) > abs(exact):
        near = math.nextafter(near, 0.0)
    return float((np.float64(near).view(np.uint64) | np.uint64(1)).view(np.float64))


def _scaled(x: Value, scale: float) -> Value:
    wide = np.float64 if x.dtype == np.float64 else np.float32
    with np.errstate(all="ignore"):
        factor = wide(scale)
        if not (np.isfinite(factor) and factor > 0):
            raise UserError(
                f"--scale is {scale}; accepted: finite, above zero (in {wide.__name__})"
            )
        return np.asarray(np.multiply(x, factor, dtype=wide))


@dataclass(frozen=True)
class Between:
    """Where a magnitude lies strictly between two neighbouring codes (without sign)."""

    lower: int
    upper: int
    middle: Fraction
    share: Fraction

    @property
    def side(self) -> str:
        """On which side of the midpoint."""
        half = Fraction(1, 2)
        return "on" if self.share == half else "above" if self.share > half else "below"


def between(magnitude: float, fmt: FloatFormat) -> Between | int | None:
    """The two codes around a magnitude; or the code that it is; or None where there are no two.

    The upper one may be one past the largest code, the value that would come next. None is below
    the smallest value of a format without zero, or at or past the value that would come next.
    """
    low, high = -1, fmt.max_code + 1  # low: not above the magnitude, or -1
    if not magnitude < fmt.value_of_magnitude(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if fmt.value_of_magnitude(middle) <= magnitude:
            low = middle
        else:
            high = middle
    if low < 0:
        return None
    if magnitude == fmt.value_of_magnitude(low):
        return low
    first, last = (Fraction(fmt.value_of_magnitude(code)) for code in (low, high))
    share = (Fraction(magnitude) - first) / (last - first)
    return Between(low, high, (first + last) / 2, share)


def _place(y: float, fmt: FloatFormat) -> list[str]:
    """Where the value lies among the format's values."""
    start = f"in {fmt.name:<10}"
    if not math.isfinite(y):
        return [f"{start}not a finite value: the policy says what it becomes"]
    sign, sign_bit = ("-", fmt.sign_bit) if math.copysign(1, y) < 0 else ("", 0)
    place = between(abs(y), fmt)
    if place is None:
        if abs(y) < fmt.min_subnormal:
            return [f"{start}below the smallest value, {fmt.min_subnormal!r}"]
        edge = fmt.value_of_magnitude(fmt.max_code + 1)
        return [f"{start}not below {sign}{edge!r}, which would come after the largest value"]
    if isinstance(place, int):
        return [f"{start}exactly {sign}{fmt.value_of_magnitude(place)!r}"]
    low, high = (fmt.value_of_magnitude(code) for code in (place.lower, place.upper))
    above = _hex(place.upper | sign_bit, fmt)
    if place.upper > fmt.max_code:
        above = "which the format does not have"
    middle = float(place.middle)
    return [
        f"{start}between {sign}{low!r} ({_hex(place.lower | sign_bit, fmt)}) and {sign}{high!r}"
        f" ({above})",
        f"midpoint     {sign}{middle!r}: {float(place.share):.6g} of the way, {place.side} the"
        " midpoint",
    ]


def _roundings(y: Value, fmt: FloatFormat) -> list[str]:
    """What each rounding gives, and why."""
    names = ("nearest_even", "toward_zero") if fmt.signed else ("nearest", "floor", "up")
    place = between(abs(float(y)), fmt)
    lines = [f"{'rounding':<13}(where it overflows: saturate)"]
    for name in names:
        reason = _reason(place, fmt) if name.startswith("nearest") else ""
        lines.append(f"{name:<13}{_code(quantize(y, fmt, rounding=name), fmt)}{reason}")
    lines.append(f"{'stochastic':<13}{_chances(y, fmt, place)}")
    return lines


def _reason(place: Between | int | None, fmt: FloatFormat) -> str:
    if not isinstance(place, Between):
        return ""
    if place.side != "on":
        return f": the value is {place.side} the midpoint"
    if fmt.mantissa_bits == 0:
        return ": every tie goes up in E8M0"
    return f": a tie goes to the even code, {'lower' if place.lower % 2 == 0 else 'upper'} here"


def _chances(y: Value, fmt: FloatFormat, place: Between | int | None) -> str:
    """Both outcomes of stochastic rounding: r = 0 goes up if any does, the largest r does not."""
    up, down = (
        quantize(y, fmt, rounding="stochastic", random_bits=np.uint32(word))
        for word in (0, 0xFFFFFFFF)
    )
    if not isinstance(place, Between) or up.view(fmt.code_dtype) == down.view(fmt.code_dtype):
        return f"{_code(up, fmt)} whatever the bits"
    return f"{_code(up, fmt)} in {float(place.share):.6g} of the draws, else {_code(down, fmt)}"


def _policies(y: Value, fmt: FloatFormat) -> list[str]:
    """The code under each policy, rounded to nearest."""
    lines = [f"{'policy':<17}(rounded to nearest)"]
    for name in OVERFLOW_POLICIES:
        same = overflow_policy(name, fmt).name
        alias = "" if same == name else f", the same as {same}"
        code = quantize(y, fmt, overflow=name)
        lines.append(f"{name:<17}{_code(code, fmt)}{alias}")
    return lines


def _described(x: Value) -> str:
    bits = int(x.view(f"u{x.dtype.itemsize}"))
    return f"{float(x)!r} ({x.dtype} 0x{bits:0{2 * x.dtype.itemsize}X})"


def _code(code: Value, fmt: FloatFormat) -> str:
    return f"{float(code.astype(np.float64))!r} ({_hex(int(code.view(fmt.code_dtype)), fmt)})"


def _hex(code: int, fmt: FloatFormat) -> str:
    return f"0x{code:0{fmt.bits // 4}X}"


def target_named(name: str) -> FloatFormat:
    """The target of that name, whatever its case; a UserError lists those there are."""
    found = {known.lower(): fmt for known, fmt in TARGETS.items()}.get(name.lower())
    if found is None:
        raise UserError(f"unknown format {name!r}; accepted: {', '.join(TARGETS)}")
    return found
