"""Wrong shared exponents of MX blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8lab.emulation.mx import MX_ROUNDINGS, mx_scale
from fp8lab.formats import Float8Format
from fp8lab.testing.faults.hypothesis import NARROW, flushed, through_bfloat16

Array = npt.NDArray[Any]


def mx_code_faults(fmt: Float8Format, rounding: str, largest: Array) -> Iterator[tuple[str, Array]]:
    """Wrong E8M0 codes of blocks, from faults that touch a few to those that touch nearly all.

    Args:
        fmt: The format of the elements.
        rounding: How the right scale rounds.
        largest: The blocks' amaxes, float32.
    """

    def by_rule(amax: Array) -> Array:
        return mx_scale(amax, fmt, rounding=rounding).view(np.uint8)

    codes = by_rule(largest)
    for fault, where, others in (
        ("zero-block-scale", largest == 0, (127, 1, 254, 255)),
        ("nan-lost", np.isnan(largest), (254, 0, 127, 253)),
        ("infinite-amax", np.isinf(largest), (255, 0, 127, 253)),
    ):
        for other in others:
            yield fault, np.where(where, np.uint8(other), codes)
    for least in (1, 2):
        yield "smallest-scale", np.maximum(codes, np.uint8(least))
    for logarithm in (np.log2(largest), through_bfloat16(np.log2(largest))):
        yield "exponent-from-logarithm", _by_logarithm(largest, logarithm, fmt, rounding, codes)
    for narrow in NARROW:
        yield "amax-in-16-bits", by_rule(narrow(largest))
    yield "subnormal-inputs-flushed", by_rule(flushed(largest))
    for rule in MX_ROUNDINGS:
        if rule != rounding:
            yield "scale-rounded-otherwise", mx_scale(largest, fmt, rounding=rule).view(np.uint8)
    emax = int(np.log2(fmt.max_finite))
    field, mantissa = largest.view(np.uint32) >> 23, largest.view(np.uint32) & 0x7FFFFF
    # What the rule adds for the mantissa, seen at an exponent where nothing is clamped.
    middle = (np.uint32(128 << 23) | mantissa).astype(np.uint32).view(np.float32)
    added = by_rule(middle).astype(np.int64) - (128 - emax)
    for shift in (1, -1, emax, 7 - emax, 8 - emax):
        if shift:
            moved = np.clip(field.astype(np.int64) - emax + added + shift, 0, 254)
            yield "scale-exponent-off", np.where(codes >= 254, codes, moved).astype(np.uint8)


def _by_logarithm(
    largest: Array, logarithm: Array, fmt: Float8Format, rounding: str, codes: Array
) -> Array:
    """The exponent from a float32 logarithm, which rounds up just below powers of two."""
    emax = int(np.log2(fmt.max_finite))
    if rounding == "up":
        exponent = np.ceil(np.log2(largest / np.float32(fmt.max_finite)))
    elif rounding == "nearest":
        exponent = np.floor(logarithm + np.float32(0.5)) - emax
    else:
        exponent = np.floor(logarithm) - emax
    usable = np.isfinite(largest) & (largest > 0)
    found = np.clip(np.where(usable, exponent, 0) + 127, 0, 254).astype(np.uint8)
    return np.where(usable, found, codes)
