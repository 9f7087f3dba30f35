"""Moments of an optimizer on the device: read from their stored form, and stored again.

The twin of `fp8lab.emulation.moments` and `fp8lab.emulation.expansion`, whose contracts say what is
computed in which order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import triton
import triton.language as tl

from fp8lab.kernels.float_device import (
    INFINITY,
    MAGNITUDE,
    ElementCode,
    bits_of,
    decoded,
    float_of,
    narrowed,
    power_of_two,
)
from fp8lab.optimizer_formats import (
    EXPANDED_LOG2,
    EXPANSION_STEPS,
    MIN_INVERSE_SCALE,
    MomentFormat,
)

_HIDDEN = tl.constexpr(0x00800000)
_MIN_INVERSE_SCALE_BITS = tl.constexpr((int(math.log2(MIN_INVERSE_SCALE)) + 127) << 23)
_EXPANSION = tl.constexpr(EXPANSION_STEPS * EXPANDED_LOG2)
_STEPS = tl.constexpr(float(EXPANSION_STEPS))
_TWO_24 = tl.constexpr(2.0**24)
_ROOT_HALF = tl.constexpr(math.sqrt(0.5))
_ROOT_TWO = tl.constexpr(math.sqrt(2))
_LOG1, _LOG3, _LOG5, _LOG7, _LOG9 = (tl.constexpr(2 / math.log(2) / odd) for odd in (1, 3, 5, 7, 9))
_EXP1, _EXP2, _EXP3, _EXP4, _EXP5, _EXP6, _EXP7 = (
    tl.constexpr(math.log(2) ** i / math.factorial(i)) for i in range(1, 8)
)


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
def load_words(
    address, offsets, n, MASKED: tl.constexpr, WORD: tl.constexpr, ALIGNED: tl.constexpr
):
    """Elements of a tensor as integers, from its address; 0 past its end."""
    pointer = address.to(tl.pointer_type(WORD))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    if MASKED:
        words = tl.load(pointer + offsets, mask=offsets < n, other=0)
    else:
        words = tl.load(pointer + offsets)
    return words


@triton.jit
def store_words(
    address, offsets, words, n, MASKED: tl.constexpr, WORD: tl.constexpr, ALIGNED: tl.constexpr
):
    """Store integers to a tensor, given its address."""
    pointer = address.to(tl.pointer_type(WORD))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    if MASKED:
        tl.store(pointer + offsets, words, mask=offsets < n)
    else:
        tl.store(pointer + offsets, words)


@triton.jit
def read_moment(
    codes,  # addresses, as int64
    scale,
    power,
    offsets,
    start,
    n,
    F: tl.constexpr,
    MASKED: tl.constexpr,
    ALIGNED: tl.constexpr,
    HARDWARE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The float32 values of BLOCK elements."""
    E: tl.constexpr = F.element  # an attribute is no compile-time value when it is passed on
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
                x = x * tl.load(scale.to(tl.pointer_type(tl.float32)))
            else:
                inverse = _load_blocks(scale, start, n, F, MASKED, BLOCK)
                rows = tl.reshape(x, (BLOCK // F.block, F.block)) * inverse
                x = tl.reshape(rows, (BLOCK,))
        elif F.stored == "expanded":
            rows = tl.reshape(x, (BLOCK // F.block, F.block))
            magnitude = tl.abs(rows)
            top = _load_blocks(scale, start, n, F, MASKED, BLOCK)
            k = _load_blocks(power, start, n, F, MASKED, BLOCK)
            largest = tl.full(magnitude.shape, F.element.max_finite, tl.float32)
            t = tl.div_rn(_log2_ratio(magnitude, largest), k + tl.zeros_like(magnitude))
            wide = _scaled_exp2(top, t)
            x = tl.reshape(_with_sign(wide, rows), (BLOCK,))
    return x


@triton.jit
def moment_top(x, F: tl.constexpr, BLOCK: tl.constexpr):
    """The bits of the largest finite magnitude of BLOCK elements; 0 of nothing."""
    magnitude = bits_of(x) & MAGNITUDE
    return tl.max(tl.where(magnitude < INFINITY, magnitude, 0), axis=0)


@triton.jit
def inverse_scale_of(top, F: tl.constexpr):
    """The inverse scale for the bits of a largest magnitude."""
    quotient = tl.div_rn(float_of(top), F.element.max_finite)
    # Positive floats are ordered as their bits are.
    return float_of(tl.maximum(bits_of(quotient), _MIN_INVERSE_SCALE_BITS))


@triton.jit
def write_moment(
    codes,  # addresses, as int64
    scale,
    power,
    x,
    g,
    tensor_top,  # bits, for a scale a tensor
    offsets,
    start,
    n,
    F: tl.constexpr,
    MASKED: tl.constexpr,
    ALIGNED: tl.constexpr,
    HARDWARE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store BLOCK elements, and the scales of their blocks."""
    E: tl.constexpr = F.element
    if F.stored == "float32":
        store_words(codes, offsets, bits_of(x), n, MASKED, tl.int32, ALIGNED)
    else:
        y = x
        if F.stored == "scaled" and F.block == 0:
            inverse = inverse_scale_of(tensor_top, F)
            y = x * tl.div_rn(1.0, inverse)
        elif F.stored != "unscaled":
            rows = tl.reshape(x, (BLOCK // F.block, F.block))
            magnitude = bits_of(rows) & MAGNITUDE
            finite = tl.where(magnitude < INFINITY, magnitude, 0)
            top = tl.max(finite, axis=1)
            if F.stored == "scaled":
                inverse = inverse_scale_of(top, F)
                factor = tl.div_rn(1.0, inverse)
                y = tl.reshape(rows * factor[:, None], (BLOCK,))
                _store_blocks(scale, inverse, start, n, F, MASKED, BLOCK)
            else:
                bottom = tl.min(tl.where(finite > 0, finite, INFINITY), axis=1)
                bottom = float_of(tl.where(top > 0, bottom, 0))
                k = _expansion_power(bottom, float_of(top))
                wide = tl.zeros_like(finite) + top[:, None]
                t = k[:, None] * _log2_ratio(float_of(finite), float_of(wide))
                largest = tl.full(rows.shape, F.element.max_finite, tl.float32)
                y = _with_sign(_scaled_exp2(largest, t), rows)
                y = tl.reshape(y, (BLOCK,))
                _store_blocks(scale, float_of(top), start, n, F, MASKED, BLOCK)
                _store_blocks(power, k, start, n, F, MASKED, BLOCK)
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


@triton.jit
def _with_sign(y, x):
    """The magnitude y with the sign of x; x itself where it is 0, Inf or NaN."""
    bits = bits_of(x)
    magnitude = bits & MAGNITUDE
    signed = bits_of(y) | (bits ^ magnitude)
    return float_of(tl.where((magnitude > 0) & (magnitude < INFINITY), signed, bits))


@triton.jit
def _split(x):
    """Exponent and significand of a positive float32."""
    subnormal = bits_of(x) < _HIDDEN
    bits = bits_of(tl.where(subnormal, x * _TWO_24, x))
    exponent = (bits >> 23) - tl.where(subnormal, 127 + 24, 127)
    return exponent, float_of((bits & (_HIDDEN - 1)) | 0x3F800000)


@triton.jit
def _log2_ratio(x, top):
    exponent, significand = _split(x)
    exponent_top, significand_top = _split(top)
    e = exponent - exponent_top
    q = tl.div_rn(significand, significand_top)
    high = q > _ROOT_TWO
    low = q < _ROOT_HALF
    q = tl.where(high, q * 0.5, tl.where(low, q * 2.0, q))
    e = tl.where(high, e + 1, tl.where(low, e - 1, e))
    s = tl.div_rn(q - 1.0, q + 1.0)
    z = s * s
    series = ((((_LOG9 * z + _LOG7) * z) + _LOG5) * z + _LOG3) * z + _LOG1
    return e.to(tl.float32) + s * series


@triton.jit
def _scaled_exp2(top, t):
    n = tl.floor(t + 0.5)
    f = t - n
    series = ((_EXP7 * f + _EXP6) * f + _EXP5) * f + _EXP4
    series = (((series * f + _EXP3) * f + _EXP2) * f + _EXP1) * f + 1.0
    whole = n.to(tl.int32)
    half = whole >> 1
    return ((top * power_of_two(half)) * series) * power_of_two(whole - half)


@triton.jit
def _expansion_power(bottom, top):
    d = -_log2_ratio(bottom, top)
    spread = d > 0
    steps = tl.floor(tl.div_rn(_EXPANSION, tl.where(spread, d, 1.0)))
    steps = tl.where(steps > 1.0, steps, 1.0)
    return tl.where(spread, steps * (1.0 / _STEPS), 1.0)
