"""The vectorised cast: integer arithmetic on the bits of float32 or float64, every rounding.

It serves what the table form cannot (`fp8lab.emulation.tables`): stochastic rounding, and targets
with many mantissa bits. It also fills those tables, and is tested against
`fp8lab.emulation.scalar`, which shares no arithmetic with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8lab.formats import FloatFormat, OverflowPolicy

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class _Layout:
    """The bits of an input type, and the signed integers that its arithmetic fits in."""

    words: np.dtype[Any]
    mantissa_bits: int
    bias: int

    @property
    def hidden(self) -> int:
        return 1 << self.mantissa_bits

    @property
    def sign_shift(self) -> int:
        return 8 * self.words.itemsize - 1

    @property
    def top_field(self) -> int:
        return (1 << (self.sign_shift - self.mantissa_bits)) - 1


_LAYOUTS = {
    np.dtype(np.float32): _Layout(np.dtype(np.int32), 23, 127),
    np.dtype(np.float64): _Layout(np.dtype(np.int64), 52, 1023),
}


def round_bits(
    values: Array,
    fmt: FloatFormat,
    rounding: str,
    policy: OverflowPolicy,
    random_bits: Array | None = None,
    bit_count: int = 32,
) -> Array:
    """Round float32 or float64 values once to the codes of a format.

    Args:
        values: float32 or float64, 1-D.
        fmt: The target.
        rounding: "nearest_even", "toward_zero", "up" (away from zero) or "stochastic".
        policy: What becomes of what has no code.
        random_bits: For "stochastic": uint32 words of the shape of values, below 2**bit_count.
        bit_count: How many random bits there are.

    Returns:
        Codes, `fmt.code_dtype`, 1-D.
    """
    layout = _LAYOUTS[values.dtype]
    if not fmt.has_subnormals and fmt.min_exponent < 1 - layout.bias:
        # The target's last binades are the input's subnormals, which have no hidden bit.
        with np.errstate(invalid="ignore"):  # signalling NaN patterns
            wide = values.astype(np.float64)
        return round_bits(wide, fmt, rounding, policy, random_bits, bit_count)
    words = values.view(layout.words)
    integer = layout.words.type
    field = (words >> integer(layout.mantissa_bits)) & integer(layout.top_field)
    mantissa = words & integer(layout.hidden - 1)
    special = field == layout.top_field
    nan = special & (mantissa != 0)

    # |value| = significand * 2**(field - bias - mantissa_bits), a subnormal's field counting as 1.
    significand = mantissa | ((field != 0).astype(integer) << integer(layout.mantissa_bits))
    field = np.maximum(field, integer(1))
    # The binade of the result; below the smallest normal one all share its quantum.
    binade = np.maximum(field, integer(fmt.min_exponent + layout.bias))
    # Bits to drop. When two more than the significand has are dropped, it lies below a quarter of
    # the last kept bit and stays there, so the cap changes no comparison.
    drop = (binade - field) + integer(layout.mantissa_bits - fmt.mantissa_bits)
    shift = np.minimum(drop, integer(layout.mantissa_bits + 3))
    kept = significand >> shift
    rest = significand - (kept << shift)

    # Codes count magnitudes in order: a carry out of the mantissa is the next binade's first code.
    magnitude = (binade - integer(fmt.min_exponent + layout.bias)) << integer(fmt.mantissa_bits)
    magnitude += kept
    if rounding == "nearest_even":
        half = integer(1) << (shift - integer(1))
        magnitude += (rest > half) | ((rest == half) & ((kept & integer(1)) != 0))
    elif rounding == "up":
        magnitude += rest > 0
    elif rounding == "stochastic":
        assert random_bits is not None
        magnitude += random_bits < _floor_of_fraction(rest, drop, bit_count)
    if not fmt.has_subnormals:
        # Codes begin at the smallest normal value, and what lies below it becomes that.
        magnitude = np.maximum(magnitude - integer(1 << fmt.mantissa_bits), integer(0))

    # Overflow. Selecting by arithmetic is far quicker than by masks that the processor must guess.
    finite = fmt.max_code if rounding == "toward_zero" else _beyond(fmt, policy, policy.finite)
    infinity, nan_magnitude = _beyond(fmt, policy, policy.infinity), _nan_magnitude(fmt, policy)
    # In every format the code past the largest finite one is Inf or NaN, so the smaller of the two
    # is right. An infinite input and NaN lie past it, too.
    magnitude = np.minimum(magnitude, integer(finite))
    if infinity != finite:
        magnitude += special * integer(infinity - finite)
    if nan_magnitude != infinity:
        magnitude += nan * integer(nan_magnitude - infinity)

    if not fmt.signed:
        _apply_unsigned(magnitude, words < 0, significand == 0, fmt, policy)
        return np.asarray(magnitude, dtype=fmt.code_dtype)
    sign = (words >> integer(layout.sign_shift)) & integer(fmt.sign_bit)
    if not fmt.has_negative_zero:  # nor a NaN of either sign: one NaN sits where -0 would be
        sign *= (magnitude != 0) & (magnitude != fmt.nan_code)
    elif policy.nan_sign == "positive":
        # An overflow that became NaN counts as one, too.
        sign *= ~(nan | (magnitude == nan_magnitude))
    return np.asarray(magnitude + sign, dtype=fmt.code_dtype)


def _apply_unsigned(
    magnitude: Array, negative: Array, zero: Array, fmt: FloatFormat, policy: OverflowPolicy
) -> None:
    """What a format without a sign or zero makes of negative values and zeros, in place."""
    nan_code = magnitude.dtype.type(fmt.nan_code)
    if policy.negative == "nan":
        np.copyto(magnitude, nan_code, where=negative & ~zero)
    if policy.zero == "nan":
        np.copyto(magnitude, nan_code, where=zero)


def _floor_of_fraction(rest: Array, drop: Array, bit_count: int) -> Array:
    """floor(rest / 2**drop * 2**bit_count), exact, below 2**bit_count; rest is below 2**drop."""
    wide = np.uint32 if rest.dtype == np.int32 else np.uint64
    width = 8 * rest.dtype.itemsize
    right = np.clip(drop - bit_count, 0, width - 1).astype(wide)
    left = np.clip(bit_count - drop, 0, width - 1).astype(wide)
    floor: Array = (rest.astype(wide) >> right) << left
    return floor


def _nan_magnitude(fmt: FloatFormat, policy: OverflowPolicy) -> int:
    if policy.nan_code == "quiet" and fmt.nan == "ieee":
        return fmt.max_code + 1 + (1 << (fmt.mantissa_bits - 1))
    return fmt.nan_code


def _beyond(fmt: FloatFormat, policy: OverflowPolicy, choice: str) -> int:
    """The code, without its sign, of what is past the largest finite value."""
    if choice == "max_finite":
        return fmt.max_code
    infinity = fmt.infinity_code
    return _nan_magnitude(fmt, policy) if infinity is None else infinity
