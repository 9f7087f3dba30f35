"""Fake quantisation: quantise, dequantise, and go on in float32; and its derivative."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fp8lab.emulation.amax import amax, float_array
from fp8lab.emulation.blocks import dequantize_blocks, expand_blocks, quantize_blocks
from fp8lab.emulation.cast_arguments import check_broadcast
from fp8lab.emulation.casting import dequantize, quantize
from fp8lab.emulation.mx import MX_BLOCK, dequantize_mx, mx_scale, quantize_mx
from fp8lab.emulation.scale_rules import (
    check_value_format,
    inverse_scale,
    scale_from_amax,
    static_scale,
)
from fp8lab.emulation.tiling import Block, Float32Array
from fp8lab.formats import Float8Format, OverflowPolicy

Array = npt.NDArray[Any]

CLIPPED = ("pass", "zero")


def fake_quantize(
    x: npt.ArrayLike,
    fmt: Float8Format,
    *,
    scale: str | npt.ArrayLike = "current",
    block: Block | None = None,
    margin: int = 0,
    power_of_two: bool = False,
    scale_rounding: str = "floor",
    rounding: str = "nearest_even",
    overflow: str | OverflowPolicy = "saturate",
    random_bits: npt.ArrayLike | None = None,
    bit_count: int = 32,
) -> Float32Array:
    """Quantise and dequantise again: the float32 values that an FP8 operand stands for.

    Order: that of `quantize_blocks` then `dequantize_blocks` for "current" with a block; of
    `quantize_mx` then `dequantize_mx` for "mx"; otherwise `amax` and `scale_from_amax` of all of x
    (or the scale given), `quantize`, 1 / scale in float32, `dequantize`. The same bits as those
    calls give.

    Args:
        x: float64, float32, float16 or bfloat16; of any shape, at least 2-D with blocks.
        fmt: E4M3, E5M2, E4M3FNUZ or E5M2FNUZ.
        scale: "current" makes it from x, "mx" makes E8M0 scales from x, and numbers are used as
            they are: static or delayed scaling. They broadcast to x's shape.
        block: For "current": None takes one scale for all of x, else one a block. For "mx": None
            is (1, 32). With numbers: None.
        margin, power_of_two: For "current".
        scale_rounding: For "mx": how `mx_scale` rounds.
        rounding, overflow, random_bits, bit_count: As for `quantize`.

    Returns:
        float32 of x's shape. NaN gives NaN; -0 stays where the format has one.

    Raises:
        TypeError: x, fmt, scale or block of a type that is not accepted.
        ValueError: A scale below 2**-126, above 2**127 or NaN; an unknown name; a block of 0, or
            one together with numbers; an argument that the way of scaling does not have.

    >>> import numpy as np
    >>> from fp8lab.formats import E4M3
    >>> fake_quantize(np.float32([1.0, 0.3, 448.0]), E4M3).tolist()
    [1.0, 0.3125, 448.0]
    >>> fake_quantize(np.float32([1.0, 0.3, 500.0]), E4M3, scale=1.0).tolist()
    [1.0, 0.3125, 448.0]
    """
    _check_arguments(fmt, scale, block, margin, power_of_two, scale_rounding)
    bits: dict[str, Any] = {"random_bits": random_bits, "bit_count": bit_count}
    cast: dict[str, Any] = {"rounding": rounding, "overflow": overflow, **bits}
    if isinstance(scale, str) and scale == "mx":
        shape = MX_BLOCK if block is None else block
        codes, shared = quantize_mx(x, fmt, block=shape, scale_rounding=scale_rounding, **cast)
        return dequantize_mx(codes, shared, block=shape)
    if block is not None:
        codes, inverse = quantize_blocks(
            x, fmt, block=block, margin=margin, power_of_two=power_of_two, **cast
        )
        return dequantize_blocks(codes, inverse, block=block)
    factor = _factor(float_array("x", x), fmt, scale, block, margin, power_of_two, scale_rounding)
    codes = quantize(x, fmt, scale=factor, **cast)
    return dequantize(codes, inverse_scale=inverse_scale(factor))


def fake_quantize_grad(
    x: npt.ArrayLike,
    grad: npt.ArrayLike,
    fmt: Float8Format,
    *,
    clipped: str = "pass",
    scale: str | npt.ArrayLike = "current",
    block: Block | None = None,
    margin: int = 0,
    power_of_two: bool = False,
    scale_rounding: str = "floor",
) -> Array:
    """The straight-through derivative of `fake_quantize`: from the result's gradient to x's.

    Rounding counts as the identity and scales as constants (no derivative goes through amax). So
    the gradient passes, unchanged to the bit, but for what was clipped when `clipped` is "zero":
    where |x * scale| (rounded as the cast rounds it) is above fmt.max_finite the gradient becomes
    +0, as the derivative of a clamp is. Inf is clipped, NaN is not: its gradient passes. "pass",
    what FP8 training stacks do, lets everything through: then clipped values can come back.

    With scales made from x little or nothing is clipped; a scale of one's own, and MX's floor rule,
    do clip.

    Args:
        x: What was given to `fake_quantize`.
        grad: Of a floating dtype and x's shape.
        fmt: The format.
        clipped: "pass" or "zero".
        scale, block, margin, power_of_two, scale_rounding: What was given to `fake_quantize`.

    Returns:
        A new array of grad's dtype and shape.

    Raises:
        TypeError: x or grad of a dtype that is not accepted.
        ValueError: Shapes that differ, an unknown `clipped`, and all that `fake_quantize` refuses.

    Source: Bengio et al., "Estimating or Propagating Gradients Through Stochastic Neurons" (2013);
    "zero" is torch's `fake_quantize`.

    >>> import numpy as np
    >>> from fp8lab.formats import E4M3
    >>> x, grad = np.float32([1.0, 500.0]), np.float32([7.0, 7.0])
    >>> fake_quantize_grad(x, grad, E4M3, scale=1.0, clipped="zero").tolist()
    [7.0, 0.0]
    """
    values, gradient = float_array("x", x), float_array("grad", grad)
    if values.shape != gradient.shape:
        raise ValueError(f"grad has shape {gradient.shape}; x has {values.shape}: they must agree")
    if clipped not in CLIPPED:
        raise ValueError(f"clipped is {clipped!r}; accepted: {', '.join(CLIPPED)}")
    _check_arguments(fmt, scale, block, margin, power_of_two, scale_rounding)
    factor = _factor(values, fmt, scale, block, margin, power_of_two, scale_rounding)
    if clipped == "pass":
        return np.array(gradient)
    wide = np.float64 if values.dtype == np.float64 else np.float32
    with np.errstate(all="ignore"):
        y = values.astype(wide) * factor.astype(wide)
    return np.where(np.abs(y) > fmt.max_finite, gradient.dtype.type(0), gradient)


def _check_arguments(
    fmt: Float8Format,
    scale: str | npt.ArrayLike,
    block: Block | None,
    margin: int,
    power_of_two: bool,
    scale_rounding: str,
) -> None:
    """Refuse a format that holds no values, and what the chosen way of scaling would ignore."""
    check_value_format(fmt)
    kind = scale if isinstance(scale, str) else "a number"
    if kind not in ("current", "mx", "a number"):
        raise ValueError(f"scale is {scale!r}; accepted: current, mx, or numbers")
    if kind == "a number" and block is not None:
        raise ValueError(f"block is {block} with a scale given; accepted: None")
    if kind != "current" and (margin or power_of_two):
        raise ValueError(f"margin and power_of_two are for current scales; scale is {kind}")
    if kind != "mx" and scale_rounding != "floor":
        raise ValueError(f"scale_rounding is for scale 'mx'; scale is {kind}")


def _factor(
    values: Array,
    fmt: Float8Format,
    scale: str | npt.ArrayLike,
    block: Block | None,
    margin: int,
    power_of_two: bool,
    scale_rounding: str,
) -> Float32Array:
    """What multiplies x: one scale, or one an element."""
    if not isinstance(scale, str):
        given = static_scale(scale)
        check_broadcast("scale", given.shape, "x", values.shape)
        return given
    if scale == "mx":
        shape = MX_BLOCK if block is None else block
        shared = dequantize(mx_scale(amax(values, block=shape), fmt, rounding=scale_rounding))
        return expand_blocks(inverse_scale(shared), shape, values.shape)
    found = scale_from_amax(
        amax(values, block=block), fmt, margin=margin, power_of_two=power_of_two
    )
    return found if block is None else expand_blocks(found, block, values.shape)
