"""What the casts accept: the checks of their arguments, each saying what was given and accepted."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fp8lab.emulation.integers import as_integer
from fp8lab.emulation.tables import BFLOAT16, FLOAT16, FLOAT32, FLOAT64
from fp8lab.formats import TARGETS, FloatFormat

Array = npt.NDArray[Any]

ROUNDINGS = ("nearest_even", "toward_zero", "stochastic")
# E8M0 holds powers of two, and its roundings have the names of the MX scale's. With one significant
# bit both neighbours of a tie are odd, and IEEE 754 (4.3.1) then takes the larger: "nearest_even"
# is "nearest with ties up" there.
SCALE_ROUNDINGS = {"floor": "toward_zero", "up": "up", "nearest": "nearest_even"}


def wide_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type that a product with a scale is rounded to."""
    return FLOAT64 if dtype == FLOAT64 else FLOAT32


def input_array(x: npt.ArrayLike) -> Array:
    values = np.asarray(x)
    if values.dtype not in (FLOAT64, FLOAT32, FLOAT16, BFLOAT16):
        raise TypeError(
            f"x has dtype {values.dtype}; accepted: float64, float32, float16, bfloat16"
        )
    return values


def check_format(fmt: FloatFormat) -> None:
    if not isinstance(fmt, FloatFormat):
        accepted = ", ".join(TARGETS)
        raise TypeError(f"fmt is {fmt!r}; accepted: {accepted} (from fp8lab.formats)")


def rounding_named(rounding: str, fmt: FloatFormat) -> str:
    """The rounding's name in `round_bits`."""
    accepted = {name: name for name in ROUNDINGS}
    if not fmt.signed:
        accepted |= SCALE_ROUNDINGS
    if not isinstance(rounding, str) or rounding not in accepted:
        raise ValueError(
            f"unknown rounding {rounding!r}; accepted for {fmt.name}: {', '.join(accepted)}"
        )
    return accepted[rounding]


def checked_bit_count(bit_count: int) -> int:
    """How many random bits count, as a Python integer."""
    count = as_integer(bit_count)
    if count is None or not 1 <= count <= 32:
        raise ValueError(f"bit_count is {bit_count!r}; accepted: an integer, 1 to 32")
    return count


def checked_random_bits(
    random_bits: npt.ArrayLike | None, bit_count: int, rounding: str, shape: tuple[int, ...]
) -> Array | None:
    if rounding != "stochastic":
        if random_bits is not None:
            raise ValueError(
                f"random_bits given with rounding {rounding!r}; only stochastic uses them"
            )
        return None
    if random_bits is None:
        raise ValueError("stochastic rounding needs random_bits: unsigned integers of x's shape")
    bits = np.asarray(random_bits)
    if bits.dtype.kind != "u":
        raise TypeError(f"random_bits have dtype {bits.dtype}; accepted: unsigned integers")
    if 8 * bits.dtype.itemsize < bit_count:
        raise ValueError(
            f"random_bits have dtype {bits.dtype}, but bit_count is {bit_count}; accepted: at most"
            " as many bits as the dtype has"
        )
    if bits.shape != shape:
        raise ValueError(f"random_bits have shape {bits.shape}; x has {shape}: they must be equal")
    return bits.astype(np.uint32) & np.uint32((1 << bit_count) - 1)


def numbers(name: str, given: npt.ArrayLike) -> Array:
    """An array of real numbers: NumPy's or ml_dtypes' (whose kind is V, as that of records is)."""
    values = np.asarray(given)
    kind = values.dtype.kind
    if kind not in "fiu" and not (kind == "V" and values.dtype.type is not np.void):
        raise TypeError(f"{name} has dtype {values.dtype}; accepted: numbers")
    return values


def checked_scale(scale: npt.ArrayLike, values: Array, name: str = "scale") -> Array:
    wide = wide_dtype(values.dtype)
    given = numbers(name, scale)
    with np.errstate(all="ignore"):
        factor: Array = given.astype(wide)
        if not (np.isfinite(factor) & (factor > 0)).all():
            raise ValueError(f"{name} is {scale!r}; accepted: finite values above zero (in {wide})")
    check_broadcast(name, factor.shape, "x", values.shape)
    return factor


def check_broadcast(
    name: str, shape: tuple[int, ...], target_name: str, target: tuple[int, ...]
) -> None:
    try:
        fits = np.broadcast_shapes(shape, target) == target
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"{name} has shape {shape}, which does not fit {target_name}'s {target}")
