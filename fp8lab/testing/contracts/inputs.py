"""The inputs that contracts have in common: sizes, scales, every code, and how they get simpler."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from fp8lab.formats import FloatFormat
from fp8lab.testing.profiles import Profile

Array = npt.NDArray[Any]
Arrays = dict[str, Array]

# Around the sizes that kernels cut their work into.
SIZES = (1, 2, 3, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 257, 512, 1023, 1024, 1025, 0)
WIDE_SIZES = (2047, 2049, 4095, 4097, 8193, 65537)
SHAPES = ((), (1, 1), (3, 5), (129, 33), (2, 3, 4), (2, 3, 1, 5), (0, 7), (7, 0))
# Beside powers of two, in the middle, tiny and huge, subnormal, and the extremes of float32.
SCALES = (
    *(1.0, 1 / 3, 0.1, 1.9999999, 2.0**-7, 1000.0, 2.0**40, 3e20, 1e-20, 2.0**-126, 1.5e-40),
    *(2.0**-149, 2.0**127, float(np.finfo(np.float32).max)),
)
POWERS_OF_TWO = (1.0, 0.5, 4.0, 2.0**-7, 2.0**10, 2.0**-40, 2.0**40, 2.0**-120, 2.0**120)

_DTYPES: dict[str, np.dtype[Any]] = {
    np.dtype(t).name: np.dtype(t) for t in (np.float32, np.float16, ml_dtypes.bfloat16, np.float64)
}


def dtype_named(name: str) -> np.dtype[Any]:
    """The floating type of an input.

    Raises:
        ValueError: It is none that a contract draws.
    """
    try:
        return _DTYPES[name]
    except (KeyError, TypeError):
        accepted = ", ".join(_DTYPES)
        raise ValueError(f"unknown dtype {name!r}; accepted: {accepted}") from None


def check_dtypes(dtypes: object) -> None:
    """Refuse input types that a contract cannot draw.

    Raises:
        ValueError: They are no tuple or list of names, none at all, or one is unknown.
    """
    if not isinstance(dtypes, tuple | list) or not dtypes:
        raise ValueError(f"dtypes is {dtypes!r}; accepted: a tuple of some of {', '.join(_DTYPES)}")
    for name in dtypes:
        dtype_named(name)


def sizes(profile: Profile) -> tuple[int, ...]:
    """Element counts to try."""
    return SIZES + WIDE_SIZES if profile.wide else SIZES


def scales(traits: frozenset[str]) -> tuple[float, ...]:
    """Scales to try, those alone that an adapter can pass on."""
    return POWERS_OF_TWO if "power_of_two_scales" in traits else SCALES


def repeated(pool: Array, size: int) -> Array:
    """The first `size` values of a pool that is repeated; spread over it where it is longer."""
    if size == 0 or pool.size == 0:
        return pool[:0]
    stride = max(1, pool.size // size) | 1  # odd, so that both signs and all steps come up
    return pool[(np.arange(size) * stride) % pool.size]


def every_code(fmt: FloatFormat) -> Array:
    """All codes of an 8-bit format."""
    return np.arange(256, dtype=np.uint8).view(fmt.dtype)


def every_pattern(dtype: np.dtype[Any]) -> Array:
    """Every pattern of a 16-bit type; of float32 those whose lower 16 bits are 0, 1, 0x8000 and
    0xFFFF (the neighbours of what bfloat16 holds); of float64 the same values.
    """
    upper = np.arange(1 << 16, dtype=np.uint32)
    if dtype.itemsize == 2:
        return upper.astype(np.uint16).view(dtype)
    lower = np.array([0, 1, 0x8000, 0xFFFF], np.uint32)
    narrow = ((upper << np.uint32(16))[:, None] | lower).reshape(-1).view(np.float32)
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return narrow.astype(dtype, copy=False)


def plainness(values: Array) -> npt.NDArray[np.float64]:
    """How hard a value is on a reader: NaN and Inf most, then many mantissa bits, then far from 1,
    then the negative.
    """
    with np.errstate(all="ignore"):
        wide = values.astype(np.float64)
        finite = np.isfinite(wide)
        mantissa, exponent = np.frexp(np.where(finite, wide, 0))
        bits = np.ldexp(np.abs(mantissa), 53).astype(np.uint64)
        lowest = bits & (~bits + np.uint64(1))
        length = np.where(bits > 0, 53 - np.log2(np.maximum(lowest, 1)), 0)
        hard = length * 1000 + np.abs(exponent) * 2 + (wide < 0)
    return np.where(finite, hard, 1e9 + (wide < 0))


def with_plainer_scale(inputs: Mapping[str, Array], values: str, scale: str) -> Iterator[Arrays]:
    """The inputs with a scale of 1, and the values multiplied by what it was."""
    factor = inputs[scale].astype(np.float64)
    if factor == 1:
        return
    with np.errstate(all="ignore"):
        moved = (inputs[values].astype(np.float64) * factor).astype(inputs[values].dtype)
    yield {**inputs, values: moved, scale: np.ones_like(inputs[scale])}
    yield {**inputs, scale: np.ones_like(inputs[scale])}
