"""Moments as they are stored between steps: float32, 16-bit floats, FP8 with scales."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fp8lab.emulation.casting import quantize
from fp8lab.emulation.expansion import expansion_power, log2_ratio, scaled_exp2
from fp8lab.emulation.fused import Array, Float32Array
from fp8lab.formats import FloatFormat, OverflowPolicy
from fp8lab.optimizer_formats import MIN_INVERSE_SCALE, MomentFormat, moment_format_named

F32 = np.float32
_INFINITY = 0x7F800000
# What is past the largest value saturates where scales keep that to a rounding. NaN stays NaN, and
# Inf becomes it where the format has no Inf: a broken state shows.
SCALED = OverflowPolicy("moments", "max_finite", "infinity_or_nan", "canonical", "positive")
UNSCALED = OverflowPolicy(
    "moments_16_bit", "infinity_or_nan", "infinity_or_nan", "canonical", "positive"
)


@dataclass(frozen=True)
class StoredMoment:
    """A moment between steps.

    Attributes:
        fmt: How it is stored.
        codes: The elements, in the tensor's shape and the element format's dtype.
        scale: float32, one a block (one in all without blocks): the inverse scale; of an expanded
            moment the block's largest magnitude. None where elements are not scaled.
        power: float32, one a block: the power of an expanded moment.
    """

    fmt: MomentFormat
    codes: Array
    scale: Float32Array | None = None
    power: Float32Array | None = None


def zero_moment(shape: tuple[int, ...], fmt: str | MomentFormat) -> StoredMoment:
    """The moment that training starts from: the stored form of zeros."""
    zeros = np.zeros(shape, np.float32)
    return store_moment(zeros, fmt, grad=zeros)


def store_moment(
    moment: Float32Array, fmt: str | MomentFormat, *, grad: Float32Array | None = None
) -> StoredMoment:
    """Store a moment.

    Elements are taken in C order, in blocks of `fmt.block` (the last may be shorter) or all as one.

    - float32: as it is. bfloat16: rounded to nearest even; what overflows becomes Inf.
    - Scaled: top is the largest finite magnitude of the block (0 of nothing);
      inverse_scale = max(top / max_finite, 2**-126) and scale = 1 / inverse_scale, quotients
      rounded; y = x * scale, rounded; the code is y rounded to nearest even.
    - Expanded: top and bottom are the largest and smallest finite magnitude that is not zero, k
      their `expansion_power`; y = scaled_exp2(448, k * log2_ratio(|x|, top)), the product rounded;
      the code is y rounded to nearest even, with x's sign. 0 stays 0.
    - Guard "settle": where grad is 0, y is rounded toward zero instead. Guard "keep": what is not 0
      and would code to 0 gets the smallest code, with its sign.

    NaN becomes a NaN code, Inf the format's Inf or, in E4M3, NaN; neither changes the scale of its
    neighbours. -0 stays -0.

    Args:
        moment: float32, any shape, empty too.
        fmt: A `MomentFormat` or its name.
        grad: float32 of the same shape: this step's gradient, for the guard "settle".

    Returns:
        The stored form.

    Raises:
        ValueError: The guard "settle" without a gradient of the moment's shape.

    >>> import numpy as np
    >>> stored = store_moment(np.float32([1.0, -0.5, 0.0]), "e4m3_128")
    >>> bool(stored.scale == np.float32(1) / np.float32(448)), read_moment(stored).tolist()
    (True, [1.0, -0.5, 0.0])
    """
    chosen = moment_format_named(fmt)
    if chosen.element is None:
        return StoredMoment(chosen, np.array(moment, dtype=np.float32))
    flat = np.ascontiguousarray(moment, dtype=np.float32).reshape(-1)
    if not chosen.scaled:
        codes = quantize(flat, chosen.element, overflow=UNSCALED)
        return StoredMoment(chosen, codes.reshape(moment.shape))
    toward_zero = None
    if chosen.guard == "settle":
        if grad is None or grad.shape != moment.shape:
            raise ValueError(f"{chosen.name} needs grad, of the moment's shape {moment.shape}")
        toward_zero = np.ascontiguousarray(grad).reshape(-1) == 0
    with np.errstate(all="ignore"):
        top, bottom = _extremes(flat, chosen.block)
        power = None
        if chosen.expanded:
            scale, power = top, expansion_power(bottom, top)
            y = _expanded(flat, chosen, scale, power)
        else:
            largest = F32(chosen.element.max_finite)
            scale = np.maximum(top / largest, F32(MIN_INVERSE_SCALE))
            y = flat * _spread(F32(1) / scale, chosen, flat.size)
    codes = _coded(y, flat, chosen.element, toward_zero, keep=chosen.guard == "keep")
    return StoredMoment(chosen, codes.reshape(moment.shape), scale, power)


def read_moment(stored: StoredMoment) -> Float32Array:
    """The float32 values of a stored moment.

    Scaled: code * inverse_scale, rounded. Expanded: scaled_exp2(top, log2_ratio(|code|, 448) / k)
    with the code's sign, the quotient rounded; a code of 0 is 0. Otherwise exact.
    """
    with np.errstate(all="ignore"):
        values = np.array(stored.codes, dtype=np.float32).reshape(-1)
        if stored.power is not None:
            values = _contracted(values, stored)
        elif stored.scale is not None:
            values = values * _spread(stored.scale, stored.fmt, values.size)
    return values.reshape(stored.codes.shape)


def unguarded(fmt: str | MomentFormat) -> MomentFormat:
    """The same format without its guard: what other stacks store."""
    chosen = moment_format_named(fmt)
    return replace(chosen, name=chosen.name.removesuffix(f"_{chosen.guard}"), guard="none")


def _extremes(flat: Float32Array, block: int | None) -> tuple[Float32Array, Float32Array]:
    """Each block's largest and smallest finite magnitude that is not zero; 0 if there is none."""
    words = flat.view(np.uint32) & np.uint32(0x7FFFFFFF)
    usable = (words < _INFINITY) & (words > 0)
    size = max(flat.size, 1) if block is None else block
    blocks = 1 if block is None else -(-flat.size // block)
    padded = np.zeros((2, blocks * size), np.uint32)
    padded[1] = 0xFFFFFFFF
    padded[0, : flat.size] = np.where(usable, words, 0)
    padded[1, : flat.size] = np.where(usable, words, np.uint32(0xFFFFFFFF))
    largest = padded[0].reshape(blocks, size).max(axis=1)
    smallest = padded[1].reshape(blocks, size).min(axis=1)
    smallest = np.where(largest == 0, np.uint32(0), smallest)
    return largest.view(np.float32), smallest.astype(np.uint32).view(np.float32)


def _spread(per_block: Float32Array, fmt: MomentFormat, size: int) -> Float32Array:
    if fmt.block is None:
        return per_block
    return np.repeat(per_block, fmt.block)[:size]


def _expanded(
    flat: Float32Array, fmt: MomentFormat, top: Float32Array, power: Float32Array
) -> Float32Array:
    assert fmt.element is not None
    magnitude = np.abs(flat)
    t = _spread(power, fmt, flat.size) * log2_ratio(magnitude, _spread(top, fmt, flat.size))
    y = np.copysign(scaled_exp2(F32(fmt.element.max_finite), t), flat)
    return np.where((magnitude > 0) & (magnitude < np.inf), y, flat)


def _contracted(values: Float32Array, stored: StoredMoment) -> Float32Array:
    assert stored.fmt.element is not None
    assert stored.scale is not None
    assert stored.power is not None
    magnitude = np.abs(values)
    ratio = log2_ratio(magnitude, F32(stored.fmt.element.max_finite))
    t = ratio / _spread(stored.power, stored.fmt, values.size)
    x = np.copysign(scaled_exp2(_spread(stored.scale, stored.fmt, values.size), t), values)
    return np.where((magnitude > 0) & (magnitude < np.inf), x, values)


def _coded(
    y: Float32Array,
    moment: Float32Array,
    element: FloatFormat,
    toward_zero: Array | None,
    *,
    keep: bool,
) -> Array:
    codes = quantize(y, element, overflow=SCALED)
    if toward_zero is not None:
        down = quantize(y, element, rounding="toward_zero", overflow=SCALED)
        codes = np.where(toward_zero, down.view(element.code_dtype), codes.view(element.code_dtype))
        codes = codes.view(element.dtype)
    if keep:
        words = codes.view(element.code_dtype)
        lost = (moment != 0) & (words & element.code_dtype.type(element.sign_bit - 1) == 0)
        codes = (words | lost.astype(element.code_dtype)).view(element.dtype)
    return codes
