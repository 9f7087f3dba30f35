"""Moments as they are stored, written once more for the audit: `emulation.moments` in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8lab.emulation.expansion import EXP2_SERIES, LOG2_SERIES
from fp8lab.emulation.moments import SCALED, UNSCALED
from fp8lab.emulation.scalar import quantize_scalar
from fp8lab.optimizer_formats import (
    EXPANDED_LOG2,
    EXPANSION_STEPS,
    MIN_INVERSE_SCALE,
    MomentFormat,
)

Array = npt.NDArray[Any]


@np.errstate(all="ignore")
def r(values: Any) -> Array:
    """float64 rounded to float32, held in float64."""
    return np.asarray(np.asarray(values, np.float64).astype(np.float32), np.float64)


def read(fmt: MomentFormat, codes: Array, scale: Array | None, power: Array | None) -> Array:
    """`fp8lab.emulation.moments.read_moment`: float32 values in float64, 1-D."""
    values = codes.reshape(-1).astype(np.float64)
    if scale is None:
        return values
    tops = _spread(scale.astype(np.float64), fmt, values.size)
    if power is None:
        return r(values * tops)
    assert fmt.element is not None
    magnitude = np.abs(values)
    usable = (magnitude > 0) & (magnitude < np.inf)
    ratio = _log2_ratio(np.where(usable, magnitude, 1.0), fmt.element.max_finite)
    t = r(ratio / _spread(power.astype(np.float64), fmt, values.size))
    return np.where(usable, np.copysign(_scaled_exp2(tops, t), values), values)


def store(
    fmt: MomentFormat, values: Array, grad: Array, chosen: Sequence[int]
) -> tuple[Array, Array | None, Array | None]:
    """`fp8lab.emulation.moments.store_moment`, with the codes of the chosen elements alone.

    Args:
        fmt: How it is stored.
        values, grad: float32 values in float64, 1-D, of whole blocks.
        chosen: Of which elements codes are wanted.

    Returns:
        Codes of those; scales and powers of all blocks.
    """
    if fmt.element is None:
        return values[chosen].astype(np.float32), None, None
    element = fmt.element
    if not fmt.scaled:
        words = [quantize_scalar(values[i], element, overflow=UNSCALED) for i in chosen]
        return np.array(words, element.code_dtype).view(element.dtype), None, None
    length = fmt.block or max(values.size, 1)
    starts = range(0, values.size, length) if values.size else range(1)
    tops, bottoms = zip(*(_extremes(values[s : s + length]) for s in starts), strict=True)
    top, power = np.array(tops), None
    if fmt.expanded:
        scale, power = (
            top,
            np.array([_power_of_block(*ends) for ends in zip(bottoms, tops, strict=True)]),
        )
        factor = None
    else:
        scale = np.maximum(r(top / element.max_finite), MIN_INVERSE_SCALE)
        factor = r(1 / scale)
    found = []
    for i in chosen:
        block = 0 if fmt.block is None else i // length
        x = float(values[i])
        if factor is not None:
            y = float(r(x * factor[block]))
        elif x == 0 or not math.isfinite(x):
            y = x
        else:
            t = r(power[block] * _log2_ratio(abs(x), top[block]))  # type: ignore[index]
            y = math.copysign(float(_scaled_exp2(element.max_finite, t)), x)
        toward = fmt.guard == "settle" and grad[i] == 0
        rounding = "toward_zero" if toward else "nearest_even"
        code = quantize_scalar(y, element, rounding=rounding, overflow=SCALED)
        lost = x != 0 and code & (element.sign_bit - 1) == 0
        found.append(code | int(fmt.guard == "keep" and lost))
    codes = np.array(found, element.code_dtype).view(element.dtype)
    narrow = None if power is None else power.astype(np.float32)
    return codes, scale.astype(np.float32), narrow


def _extremes(block: Array) -> tuple[float, float]:
    """The largest and the smallest finite magnitude that is not zero; 0 of none."""
    usable = [abs(x) for x in block.tolist() if x != 0 and math.isfinite(x)]
    return (max(usable), min(usable)) if usable else (0.0, 0.0)


def _spread(per_block: Array, fmt: MomentFormat, size: int) -> Array:
    return per_block if fmt.block is None else np.repeat(per_block, fmt.block)[:size]


def _power_of_block(bottom: float, top: float) -> float:
    if top == 0 or bottom == top:
        return 1.0
    d = -float(_log2_ratio(bottom, top))
    if not d > 0:
        return 1.0
    steps = math.floor(float(r(float(r(EXPANSION_STEPS * EXPANDED_LOG2)) / d)))
    return float(r(max(steps, 1) / EXPANSION_STEPS))


def _log2_ratio(x: Any, top: Any) -> Array:
    fraction_x, exponent_x = np.frexp(np.asarray(x, np.float64))
    fraction_top, exponent_top = np.frexp(np.asarray(top, np.float64))
    with np.errstate(all="ignore"):
        q, e = r(fraction_x / fraction_top), exponent_x - exponent_top
        high, low = q > float(r(math.sqrt(2))), q < float(r(math.sqrt(0.5)))
        q = np.where(high, q / 2, np.where(low, q * 2, q))
        e = e + high - low
        s = r(r(q - 1) / r(q + 1))
        z = r(s * s)
        series: Array = np.asarray(float(LOG2_SERIES[0]))
        for coefficient in LOG2_SERIES[1:]:
            series = r(r(series * z) + float(coefficient))
        return r(e + r(s * series))


def _scaled_exp2(top: Any, t: Array) -> Array:
    with np.errstate(all="ignore"):
        n = np.floor(r(t + 0.5))
        f = r(t - n)
        series: Array = np.asarray(float(EXP2_SERIES[0]))
        for coefficient in EXP2_SERIES[1:]:
            series = r(r(series * f) + float(coefficient))
        half = np.floor(n / 2)
        return r(r(r(np.asarray(top, np.float64) * 2.0**half) * series) * 2.0 ** (n - half))
