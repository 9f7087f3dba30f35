"""From an amax to a scale: our rule, and those of other stacks by name."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fp8lab.emulation.amax import magnitudes
from fp8lab.emulation.integers import as_integer
from fp8lab.emulation.tiling import Float32Array
from fp8lab.formats import Float8Format

FLT_MAX = np.finfo(np.float32).max
# The smallest scale given: below 2**-128 its inverse would be Inf. Nothing overflows for it, since
# the largest float32 times 2**-127 is below 2.
SMALLEST_SCALE = np.float32(2.0**-127)


def scale_from_amax(
    amax: npt.ArrayLike,
    fmt: Float8Format,
    *,
    margin: int = 0,
    power_of_two: bool = False,
    previous: npt.ArrayLike = 1.0,
) -> Float32Array:
    """The scale that brings `amax` to the top of a format.

    Order, in float32: scaled_max = fmt.max_finite * 2**-margin (exact for margins that are used);
    scale = scaled_max / amax, rounded to nearest even; a scale above FLT_MAX becomes FLT_MAX, one
    below 2**-127 becomes 2**-127; with `power_of_two` the mantissa is then cleared (the next power
    of two toward zero). Where amax is 0, Inf or NaN the scale is `previous`.

    Source: TransformerEngine's delayed scaling (the division comes after the margin: the other
    order overflows earlier). It has no lower bound, and so gives 0, whose inverse is Inf, where
    margin and amax are both huge.

    Args:
        amax: Magnitudes of any shape; float64 is rounded to float32 first.
        fmt: The target format.
        margin: Unused headroom in powers of two, an integer, 0 or more.
        power_of_two: Keep sign and exponent of the scale only.
        previous: The scale that stays where amax says nothing; 1 gives current scaling.

    Returns:
        float32 scales of amax's shape, finite and above zero, and so are their inverses.

    Raises:
        TypeError: fmt is not a format of values, or amax holds no numbers.
        ValueError: A negative margin or amax, or a `previous` that is not finite and above zero or
            does not fit amax's shape.

    >>> from fp8lab.formats import E4M3
    >>> float(scale_from_amax(3.5, E4M3)), float(scale_from_amax(0.0, E4M3))
    (128.0, 1.0)
    >>> scale_from_amax([3.0, 3.5], E4M3, margin=1, power_of_two=True).tolist()
    [64.0, 64.0]
    """
    margin = check_margin(margin)
    check_value_format(fmt)
    largest = magnitudes("amax", amax)
    with np.errstate(over="ignore"):
        kept = np.asarray(previous).astype(np.float32)
    if not (np.isfinite(kept) & (kept > 0)).all():
        raise ValueError(f"previous is {previous!r}; accepted: scales, finite and above zero")
    if np.broadcast_shapes(kept.shape, largest.shape) != largest.shape:
        raise ValueError(f"previous has shape {kept.shape}, which does not fit {largest.shape}")
    return bounded_scale(largest, fmt, margin, power_of_two, kept)


def bounded_scale(
    largest: Float32Array,
    fmt: Float8Format,
    margin: int,
    power_of_two: bool,
    previous: npt.ArrayLike = 1.0,
) -> Float32Array:
    """`scale_from_amax` of arguments that are known to be right."""
    with np.errstate(all="ignore"):
        # A margin past float64's exponents changes nothing more: the scale is the smallest one.
        scale = np.float32(fmt.max_finite * 2.0 ** -min(margin, 1000)) / largest
        scale = np.minimum(np.maximum(scale, SMALLEST_SCALE), FLT_MAX)
        if power_of_two:
            scale = cleared_mantissa(scale)
        usable = np.isfinite(largest) & (largest > 0)
    return np.asarray(np.where(usable, scale, previous), dtype=np.float32)


@dataclass(frozen=True)
class CurrentPreset:
    """How a stack turns the amax of a tensor into the scale of that same tensor.

    Attributes:
        name: The preset's name.
        eps: amax is raised to at least this, unless the caller gives another.
        float64: Divide in float64, then round to float32; otherwise divide in float32.
        guarded: An amax of 0, Inf or NaN gives 1, and a scale beyond float32 its largest finite
            value. Otherwise whatever the division gives: 0 for Inf, NaN for NaN.
    """

    name: str
    eps: float
    float64: bool
    guarded: bool


CURRENT_PRESETS: dict[str, CurrentPreset] = {
    preset.name: preset
    for preset in (
        CurrentPreset("fp8lab", eps=0.0, float64=False, guarded=True),
        CurrentPreset("transformer_engine", eps=0.0, float64=False, guarded=True),
        CurrentPreset("torchao", eps=1e-12, float64=True, guarded=False),
    )
}


def current_scale(
    amax: npt.ArrayLike,
    fmt: Float8Format,
    *,
    preset: str = "fp8lab",
    power_of_two: bool = False,
    eps: float | None = None,
) -> Float32Array:
    """The scale of current scaling, as a named stack computes it.

    Order: amax is raised to `eps` (NaN stays). "transformer_engine" and "fp8lab", in float32: 0,
    Inf and NaN give 1; else fmt.max_finite / amax to nearest even; Inf becomes FLT_MAX. "torchao",
    in float64: fmt.max_finite / amax, then rounded to nearest even in float32; NaN gives NaN and
    Inf gives 0, which `quantize` refuses. With `power_of_two` the mantissa is cleared last.

    torchao itself clears it by exp2(floor(log2(scale))) in float32, whose logarithm rounds up just
    below 2**k for k of 8 and more: there torchao's scale is twice ours, and overflows.

    Args:
        amax: Magnitudes of any shape, float32 (float64 is kept by "torchao", rounded by others).
        fmt: The target format.
        preset: A name of `CURRENT_PRESETS`.
        power_of_two: Keep sign and exponent of the scale only.
        eps: The least amax; None takes the preset's (0, or 1e-12 for torchao).

    Returns:
        float32 scales of amax's shape.

    Raises:
        TypeError: fmt is not a format of values, or amax holds no numbers.
        ValueError: An unknown preset, a negative amax, or an eps that is negative or not finite.

    Source: TransformerEngine `compute_scale_from_amax`; torchao `amax_to_scale`.

    >>> from fp8lab.formats import E4M3
    >>> [f"{current_scale(0.0, E4M3, preset=p):.3g}" for p in ("transformer_engine", "torchao")]
    ['1', '4.48e+14']
    """
    try:
        rule = CURRENT_PRESETS[preset]
    except (KeyError, TypeError):
        accepted = ", ".join(CURRENT_PRESETS)
        raise ValueError(f"unknown preset {preset!r}; accepted: {accepted}") from None
    check_value_format(fmt)
    least = rule.eps if eps is None else eps
    if not 0 <= least < np.inf:
        raise ValueError(f"eps is {eps!r}; accepted: a finite number, 0 or more")
    narrow = magnitudes("amax", amax)
    if rule.guarded:
        return scale_from_amax(
            np.maximum(narrow, np.float32(least)), fmt, power_of_two=power_of_two
        )
    wide = np.asarray(amax)
    with np.errstate(all="ignore"):
        largest = wide if wide.dtype == np.float64 else narrow.astype(np.float64)
        scale = np.asarray(fmt.max_finite / np.maximum(largest, least)).astype(np.float32)
    return cleared_mantissa(scale) if power_of_two else scale


def static_scale(scale: npt.ArrayLike) -> Float32Array:
    """A fixed scale, checked: float32, from 2**-126 to 2**127, so that its inverse is normal too.

    Args:
        scale: One value or an array of any shape; rounded to nearest even in float32.

    Returns:
        float32 of the same shape.

    Raises:
        TypeError: Not numbers. ValueError: A value out of the range, NaN included.

    >>> float(inverse_scale(static_scale(64)))
    0.015625
    """
    given = np.asarray(scale)
    if given.dtype.kind not in "fiu":
        raise TypeError(f"scale has dtype {given.dtype}; accepted: floating or integer numbers")
    with np.errstate(all="ignore"):
        rounded = given.astype(np.float32)
    if not ((rounded >= np.float32(2.0**-126)) & (rounded <= np.float32(2.0**127))).all():
        raise ValueError(f"scale is {scale!r}; accepted: numbers from 2**-126 to 2**127")
    return rounded


def inverse_scale(scale: npt.ArrayLike) -> Float32Array:
    """1 / scale, rounded to nearest even in float32: what dequantising multiplies by.

    Powers of two give powers of two, exactly. It is never state: it is written beside the codes
    when they are made, and read from there.

    Args:
        scale: float32 of any shape, as the functions here give.

    >>> inverse_scale([64.0, 3.0]).tolist()
    [0.015625, 0.3333333432674408]
    """
    with np.errstate(all="ignore"):
        return np.asarray(np.float32(1) / np.asarray(scale, dtype=np.float32), dtype=np.float32)


def cleared_mantissa(scale: npt.ArrayLike) -> Float32Array:
    """The power of two next to each scale toward zero. 0, Inf and NaN stay.

    Args:
        scale: float32, 0 or at least 2**-127.
    """
    values = np.asarray(scale, dtype=np.float32)
    words = np.asarray(values.view(np.uint32) & np.uint32(0xFF800000))
    # A subnormal's exponent field is 0; the only power of two there is from 2**-127 on is itself.
    words[(words == 0) & (values > 0)] = SMALLEST_SCALE.view(np.uint32)
    words[np.isnan(values)] = np.uint32(0x7FC00000)
    return words.view(np.float32)


def check_margin(margin: int) -> int:
    """A margin as a Python integer; refuses what is not an integer of at least 0."""
    powers = as_integer(margin)
    if powers is None or powers < 0:
        raise ValueError(f"margin is {margin!r}; accepted: an integer, 0 or more (powers of two)")
    return powers


def check_value_format(fmt: Float8Format) -> None:
    """Refuse what is not a format of values (E8M0 holds scales)."""
    accepted = "E4M3, E5M2, E4M3FNUZ, E5M2FNUZ (from fp8lab.formats)"
    if not isinstance(fmt, Float8Format):
        raise TypeError(f"fmt is {fmt!r}; accepted: {accepted}")
    if not fmt.signed:
        raise ValueError(f"{fmt.name} is a format of scales, not of values; accepted: {accepted}")
