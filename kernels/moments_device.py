"""Moments of an optimizer on the device: read from their stored form, and stored again.

The twin of `fp8lab.emulation.moments` and `fp8lab.emulation.expansion`, whose contracts say what is
computed in which order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import triton
import triton.language as tl

from fp8lab.kernels.expansion_device import (
    expansion_power,
    log2_ratio,
    scaled_exp2,
    with_sign,
)
from fp8lab.kernels.float_device import (
    INFINITY,
    MAGNITUDE,
    ElementCode,
    bits_of,
    decoded,
    float_of,
    narrowed,
)
from fp8lab.kernels.packed_device import e4m3_or_nan
from fp8lab.kernels.quotients_device import quotient, reciprocal
from fp8lab.kernels.words_device import load_words, store_words
from fp8lab.optimizer_formats import MIN_INVERSE_SCALE, MomentFormat

_LIFT = tl.constexpr(0x01000000)
_MIN_INVERSE_SCALE_BITS = tl.constexpr((int(math.log2(MIN_INVERSE_SCALE)) + 127) << 23)


@dataclass(frozen=True)
class MomentCode:
    """A moment's format, flat, as a compile-time argument.

    Attributes:
        stored: "float32", "unscaled", "scaled" or "expanded".
        element: The elements' format; float32's fields are not looked at.
        block: Elements that share a scale; 0 for the whole tensor.
        settle, keep: The guards.
    """

    stored: str
    element: ElementCode | None
    block: int
    settle: bool
    keep: bool

    @classmethod
    def of(cls, fmt: MomentFormat) -> MomentCode:
        """The numbers of a format."""
        if fmt.element is None:
            return cls("float32", None, 0, False, False)
        stored = "expanded" if fmt.expanded else "scaled" if fmt.scaled else "unscaled"
        element = ElementCode.of(fmt.element, saturate=fmt.scaled)
        return cls(stored, element, fmt.block or 0, fmt.guard == "settle", fmt.guard == "keep")

    @property
    def by_tensor(self) -> bool:
        """Whether the scale needs all of the tensor before any of it can be stored."""
        return self.stored == "scaled" and self.block == 0


@triton.jit
def read_moment(
    places,  # addresses of codes, scales and powers, as int64
    offsets,
    start,
    n,
    F: tl.constexpr,
    STEP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The float32 values of a block's elements."""
    E: tl.constexpr = F.element  # an attribute is no compile-time value when it is passed on
    ALIGNED: tl.constexpr = STEP.aligned
    HARDWARE: tl.constexpr = STEP.hardware
    BLOCK: tl.constexpr = STEP.block
    codes = places[0]
    if F.stored == "float32":
        x = float_of(load_words(codes, offsets, n, MASKED, tl.int32, ALIGNED))
    else:
        if F.element.sign_shift == 24:
            words = load_words(codes, offsets, n, MASKED, tl.uint8, ALIGNED)
        else:
            words = load_words(codes, offsets, n, MASKED, tl.int16, ALIGNED)
        x = decoded(words, E, HARDWARE)
        if F.stored == "scaled":
            if F.block == 0:
                x = x * tl.load(places[1].to(tl.pointer_type(tl.float32)))
            else:
                inverse = _load_blocks(places[1], start, n, F, MASKED, BLOCK)
                rows = tl.reshape(x, (BLOCK // F.block, F.block)) * inverse
                x = tl.reshape(rows, (BLOCK,))
        elif F.stored == "expanded":
            rows = tl.reshape(x, (BLOCK // F.block, F.block))
            magnitude = tl.abs(rows)
            top = _load_blocks(places[1], start, n, F, MASKED, BLOCK)
            k = _load_blocks(places[2], start, n, F, MASKED, BLOCK)
            largest = tl.full(magnitude.shape, F.element.max_finite, tl.float32)
            t = tl.div_rn(log2_ratio(magnitude, largest), k + tl.zeros_like(magnitude))
            wide = scaled_exp2(top, t)
            x = tl.reshape(with_sign(wide, rows), (BLOCK,))
    return x


@triton.jit
def moment_top(x):
    """The bits of the largest finite magnitude of a block's elements; 0 of nothing."""
    return _largest_finite(x, 0)


@triton.jit
def _largest_finite(x, AXIS: tl.constexpr):
    """The bits of the largest finite magnitudes along an axis; 0 of nothing."""
    # Without the sign and lifted by one exponent, Inf and NaN pass 2**32 and come out below.
    lifted = (bits_of(x) << 1).to(tl.uint32, bitcast=True) + _LIFT
    top = tl.maximum(tl.max(lifted, axis=AXIS), _LIFT) - _LIFT
    return (top >> 1).to(tl.int32, bitcast=True)


@triton.jit
def raise_to(pointer, value):
    """Make a number the larger of itself and a value: an atomic only where it may be smaller.

    Atomics on one address take turns; all but a few programs find a number that is large enough.
    It only grows, so that an old one that a cache still holds is good enough.
    """
    if value > tl.load(pointer):
        tl.atomic_max(pointer, value, sem="relaxed")


@triton.jit
def inverse_scale_of(top, F: tl.constexpr, HARDWARE: tl.constexpr):
    """The inverse scale for the bits of a largest magnitude."""
    largest = float_of(top)
    if HARDWARE:
        # The format's largest value is an integer times a power of two, and the quotient is normal
        # or below the least scale: no remainder is rounded.
        result = quotient(largest, F.element.max_finite, 1.0 / F.element.max_finite)
    else:
        result = tl.div_rn(largest, F.element.max_finite)
    # Positive floats are ordered as their bits are.
    return float_of(tl.maximum(bits_of(result), _MIN_INVERSE_SCALE_BITS))


@triton.jit
def _scale_of(inverse, HARDWARE: tl.constexpr):
    """1 / inverse scale, which lies in [2**-126, 2**120]."""
    if HARDWARE:
        scale = reciprocal(inverse)
    else:
        scale = tl.div_rn(1.0, inverse)
    return scale


@triton.jit
def write_moment(
    places,  # addresses of codes, scales and powers, as int64
    x,
    g,
    tensor_top,  # where the bits of the tensor's top are, for a scale a tensor
    offsets,
    start,
    n,
    F: tl.constexpr,
    STEP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Store a block's elements, and the scales of its blocks."""
    E: tl.constexpr = F.element
    ALIGNED: tl.constexpr = STEP.aligned
    HARDWARE: tl.constexpr = STEP.hardware
    BLOCK: tl.constexpr = STEP.block
    codes = places[0]
    if F.stored == "float32":
        store_words(codes, offsets, bits_of(x), n, MASKED, tl.int32, ALIGNED)
    else:
        y = x
        if F.stored == "scaled" and F.block == 0:
            inverse = inverse_scale_of(tl.load(tensor_top), F, HARDWARE)
            y = x * _scale_of(inverse, HARDWARE)
        elif F.stored != "unscaled":
            rows = tl.reshape(x, (BLOCK // F.block, F.block))
            top = _largest_finite(rows, 1)
            if F.stored == "scaled":
                inverse = inverse_scale_of(top, F, HARDWARE)
                factor = _scale_of(inverse, HARDWARE)
                y = tl.reshape(rows * factor[:, None], (BLOCK,))
                _store_blocks(places[1], inverse, start, n, F, MASKED, BLOCK)
            else:
                magnitude = bits_of(rows) & MAGNITUDE
                finite = tl.where(magnitude < INFINITY, magnitude, 0)
                bottom = tl.min(tl.where(finite > 0, finite, INFINITY), axis=1)
                bottom = float_of(tl.where(top > 0, bottom, 0))
                k = expansion_power(bottom, float_of(top))
                wide = tl.zeros_like(finite) + top[:, None]
                t = k[:, None] * log2_ratio(float_of(finite), float_of(wide))
                largest = tl.full(rows.shape, F.element.max_finite, tl.float32)
                y = with_sign(scaled_exp2(largest, t), rows)
                y = tl.reshape(y, (BLOCK,))
                _store_blocks(places[1], float_of(top), start, n, F, MASKED, BLOCK)
                _store_blocks(places[2], k, start, n, F, MASKED, BLOCK)
        if HARDWARE and E.name == "E4M3":
            code = e4m3_or_nan(y)
        else:
            code = narrowed(y, E, HARDWARE)
        if F.settle:
            # One code down where rounding to nearest went up: toward zero.
            up = tl.abs(decoded(code, E, HARDWARE)) > tl.abs(y)
            code = code - ((g == 0) & up).to(code.dtype)
        if F.keep:
            empty = (code.to(tl.int32) & ((1 << (31 - F.element.sign_shift)) - 1)) == 0
            code = code | (empty & ((bits_of(x) & MAGNITUDE) != 0)).to(code.dtype)
        if F.element.sign_shift == 24:
            store_words(codes, offsets, code, n, MASKED, tl.uint8, ALIGNED)
        else:
            store_words(codes, offsets, code, n, MASKED, tl.int16, ALIGNED)


@triton.jit
def _load_blocks(address, start, n, F: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """One float32 a block, (blocks, 1)."""
    pointer = address.to(tl.pointer_type(tl.float32))
    place = start // F.block + tl.arange(0, BLOCK // F.block)
    if MASKED:
        values = tl.load(pointer + place, mask=place * F.block < n, other=1.0)
    else:
        values = tl.load(pointer + place)
    return values[:, None]


@triton.jit
def _store_blocks(
    address, values, start, n, F: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr
):
    pointer = address.to(tl.pointer_type(tl.float32))
    place = start // F.block + tl.arange(0, BLOCK // F.block)
    if MASKED:
        tl.store(pointer + place, values, mask=place * F.block < n)
    else:
        tl.store(pointer + place, values)
