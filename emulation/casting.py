"""Casts to and from FP8, bit for bit: quantise, dequantise.

Two forms live here. `_round_bits` works on the bits of float64, to which every accepted input
widens exactly, and does every rounding. A table of 65,536 codes, filled by it, serves the
deterministic roundings of 32-bit and narrower inputs several times faster. Both are tested against
`fp8lab.emulation.scalar`, which shares no arithmetic with them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from fp8lab.formats import FORMATS, Float8Format, OverflowPolicy, overflow_policy

Array = npt.NDArray[Any]

ROUNDINGS = ("nearest_even", "toward_zero", "stochastic")
_NARROW = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
_CHUNK = 1 << 16  # elements a pass of the table form works on: its temporaries stay in the L2 cache


def quantize(
    x: npt.ArrayLike,
    fmt: Float8Format,
    *,
    scale: npt.ArrayLike | None = None,
    rounding: str = "nearest_even",
    overflow: str | OverflowPolicy = "saturate",
    random_bits: npt.ArrayLike | None = None,
    bit_count: int = 32,
) -> Array:
    """Cast an array to FP8 codes, optionally scaled first.

    Order: x is widened to float32 (float64 stays); with a scale, y = x * scale is rounded to
    nearest even in that type; y is rounded once to `fmt`. float64 never passes through float32.

    Args:
        x: float64, float32, float16 or bfloat16 array of any shape, strided or empty.
        fmt: E4M3, E5M2, E4M3FNUZ or E5M2FNUZ.
        scale: Multiplies x. Finite and above zero; one value or an array that broadcasts to x's
            shape. Rounded to float32 first (kept in float64 for float64 x).
        rounding: "nearest_even"; "toward_zero"; or "stochastic": away from zero exactly when the
            low `bit_count` bits r of `random_bits` satisfy r < floor(fraction * 2**bit_count),
            where fraction is the distance from the lower neighbour over the gap. Representable
            values stay.
        overflow: "saturate" (every overflow and Inf becomes the largest finite value, NaN the
            positive NaN code), "ieee" (Inf or NaN, as ml_dtypes), or an `OverflowPolicy`. Under
            "toward_zero" a finite value never overflows: it becomes the largest finite one.
        random_bits: For "stochastic": unsigned integers of x's shape.
        bit_count: For "stochastic": how many of the low random bits count, 1 to 32.

    Returns:
        Codes of dtype `fmt.dtype` and x's shape. -0 stays -0 where the format has one; an
        underflow keeps its sign likewise.

    Raises:
        TypeError: x, scale or random_bits has a dtype that is not accepted.
        ValueError: An unknown rounding or policy, a scale that is zero, negative or not finite, or
            random bits that are missing, of another shape, or not asked for.

    Source: OCP OFP8 1.0 (formats, both overflow rules); PTX ISA `cvt.rn.satfinite`.

    >>> import numpy as np
    >>> from fp8lab.formats import E4M3
    >>> quantize(np.array([0.1, 126.24, 500, np.nan], np.float32), E4M3).view(np.uint8).tolist()
    [29, 112, 126, 127]
    """
    values = _input_array(x)
    _check_format(fmt)
    policy = overflow_policy(overflow)
    if rounding not in ROUNDINGS:
        raise ValueError(f"unknown rounding {rounding!r}; accepted: {', '.join(ROUNDINGS)}")
    bits = _checked_random_bits(random_bits, bit_count, rounding, values.shape)

    if scale is not None:
        values = _scaled(values, scale)
    if rounding != "stochastic" and values.dtype in _NARROW:
        codes = _look_up(values, _table(fmt, rounding, policy))
    else:
        codes = _round_bits(values.astype(np.float64), fmt, rounding, policy, bits, bit_count)
    return codes.view(fmt.dtype).reshape(values.shape)


def dequantize(codes: Array, *, inverse_scale: npt.ArrayLike | None = None) -> Array:
    """Decode FP8 codes to float32, optionally multiplied by an inverse scale.

    Every code is exact in float32. With an inverse scale the product is rounded to nearest even.

    Args:
        codes: Array of an ml_dtypes FP8 type (`fmt.dtype`; E8M0 too), of any shape.
        inverse_scale: Multiplies the values; rounded to float32; one value or an array that
            broadcasts to the shape of codes.

    Returns:
        float32 array of the shape of codes. A NaN code gives a NaN, 0x80 gives -0 where the format
        has one, E5M2's infinities stay.

    Raises:
        TypeError: codes are not of an FP8 dtype.

    >>> import numpy as np
    >>> from fp8lab.formats import E4M3
    >>> dequantize(np.array([0x7E, 0x01], np.uint8).view(E4M3.dtype)).tolist()
    [448.0, 0.001953125]
    """
    codes = np.asarray(codes)
    fmt = next((f for f in FORMATS.values() if f.dtype == codes.dtype), None)
    if fmt is None:
        accepted = ", ".join(f.dtype_name for f in FORMATS.values())
        raise TypeError(
            f"codes have dtype {codes.dtype}; accepted: {accepted} (view raw bytes as fmt.dtype)"
        )
    values = _decoded(fmt)[codes.view(np.uint8)]
    if inverse_scale is None:
        return values
    with np.errstate(all="ignore"):
        factor = np.asarray(inverse_scale).astype(np.float32)
        return np.asarray(values * factor, dtype=np.float32)


def _input_array(x: npt.ArrayLike) -> Array:
    values = np.asarray(x)
    if values.dtype != np.float64 and values.dtype not in _NARROW:
        raise TypeError(
            f"x has dtype {values.dtype}; accepted: float64, float32, float16, bfloat16"
        )
    return values


def _check_format(fmt: Float8Format) -> None:
    accepted = "E4M3, E5M2, E4M3FNUZ, E5M2FNUZ (from fp8lab.formats)"
    if not isinstance(fmt, Float8Format):
        raise TypeError(f"fmt is {fmt!r}; accepted: {accepted}")
    if not fmt.has_subnormals:
        raise ValueError(f"{fmt.name} is a format of scales, not of values; accepted: {accepted}")


def _checked_random_bits(
    random_bits: npt.ArrayLike | None, bit_count: int, rounding: str, shape: tuple[int, ...]
) -> Array | None:
    if rounding != "stochastic":
        if random_bits is not None:
            raise ValueError(
                f"random_bits given with rounding {rounding!r}; only stochastic uses them"
            )
        return None
    if not 1 <= bit_count <= 32:
        raise ValueError(f"bit_count is {bit_count}; accepted: 1 to 32")
    if random_bits is None:
        raise ValueError("stochastic rounding needs random_bits: unsigned integers of x's shape")
    bits = np.asarray(random_bits)
    if bits.dtype.kind != "u":
        raise TypeError(f"random_bits have dtype {bits.dtype}; accepted: unsigned integers")
    if bits.shape != shape:
        raise ValueError(f"random_bits have shape {bits.shape}; x has {shape}: they must be equal")
    return bits.astype(np.uint64) & np.uint64((1 << bit_count) - 1)


def _scaled(values: Array, scale: npt.ArrayLike) -> Array:
    wide: type[np.floating[Any]] = np.float64 if values.dtype == np.float64 else np.float32
    with np.errstate(all="ignore"):
        factor: Array = np.asarray(scale).astype(wide)
        if not (np.isfinite(factor) & (factor > 0)).all():
            raise ValueError(
                f"scale is {scale!r}; accepted: finite values above zero (in {np.dtype(wide).name})"
            )
        if np.broadcast_shapes(values.shape, factor.shape) != values.shape:
            raise ValueError(
                f"scale has shape {factor.shape}, which does not fit x's {values.shape}"
            )
        return np.asarray(values.astype(wide) * factor, dtype=wide)


def _look_up(values: Array, table: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """The codes of float32, float16 or bfloat16 values, through the table.

    A float32 is first rounded to odd at bfloat16: its upper half, with the lowest bit set when the
    lower half was not zero. That keeps every comparison with a midpoint of a target of at most five
    mantissa bits, so looking up the result rounds once (Boldo and Melquiond, 2008).
    """
    if values.dtype == ml_dtypes.bfloat16:
        return table[np.ascontiguousarray(values).reshape(-1).view(np.uint16)]
    with np.errstate(all="ignore"):
        words = np.ascontiguousarray(values, dtype=np.float32).reshape(-1).view(np.uint32)
    codes = np.empty(words.size, dtype=np.uint8)
    low = np.uint32(0xFFFF)
    for start in range(0, words.size, _CHUNK):
        chunk = words[start : start + _CHUNK]
        key = chunk & low
        key += low  # bit 16 is now set exactly when the lower half was not zero
        key |= chunk
        key >>= np.uint32(16)
        codes[start : start + _CHUNK] = table[key]
    return codes


@lru_cache
def _table(fmt: Float8Format, rounding: str, policy: OverflowPolicy) -> npt.NDArray[np.uint8]:
    """The code of every bfloat16 pattern."""
    words = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    with np.errstate(invalid="ignore"):  # signalling NaN patterns
        every = words.view(np.float32).astype(np.float64)
    table = _round_bits(every, fmt, rounding, policy, None, 0)
    table.flags.writeable = False
    return table


@lru_cache
def _decoded(fmt: Float8Format) -> npt.NDArray[np.float32]:
    """The float32 value of every code."""
    table = np.full(256, np.nan, dtype=np.float32)
    for magnitude in range(fmt.max_code + 1):
        table[magnitude] = fmt.value_of_magnitude(magnitude)
        if fmt.signed and (magnitude or fmt.has_negative_zero):
            table[magnitude | 0x80] = -table[magnitude]
    if fmt.infinity_code is not None:
        table[fmt.infinity_code] = np.inf
        table[fmt.infinity_code | 0x80] = -np.inf
    table.flags.writeable = False
    return table


def _round_bits(
    values: Array,
    fmt: Float8Format,
    rounding: str,
    policy: OverflowPolicy,
    random_bits: Array | None,
    bit_count: int,
) -> npt.NDArray[np.uint8]:
    """Round float64 values to codes by integer arithmetic on their bits; flat uint8 result."""
    words = np.ascontiguousarray(values).reshape(-1).view(np.uint64)
    sign = ((words >> np.uint64(56)) & np.uint64(0x80)).astype(np.int64)
    field = ((words >> np.uint64(52)) & np.uint64(0x7FF)).astype(np.int64)
    mantissa = (words & np.uint64((1 << 52) - 1)).astype(np.int64)
    nan = (field == 0x7FF) & (mantissa != 0)
    infinite = (field == 0x7FF) & (mantissa == 0)

    # value = significand * 2**(exponent - 52); the last kept bit weighs 2**(quantum_exponent).
    significand = np.where(field == 0, mantissa, mantissa | (1 << 52))
    exponent = np.maximum(field, 1) - 1023
    binade = np.maximum(exponent, fmt.min_exponent)
    # Bits to drop. Past 62 the whole significand (53 bits) lies below a quarter of the last kept
    # bit, and stays there, so the cap changes no comparison.
    drop = 52 - fmt.mantissa_bits + (binade - exponent)
    shift = np.minimum(drop, 62)
    kept = significand >> shift
    rest = significand - (kept << shift)

    if rounding == "nearest_even":
        half = np.int64(1) << (shift - 1)
        up = (rest > half) | ((rest == half) & (kept & 1 == 1))
    elif rounding == "toward_zero":
        up = np.zeros(kept.shape, dtype=bool)
    else:
        assert random_bits is not None
        up = random_bits.reshape(-1).astype(np.int64) < _floor_of_fraction(rest, drop, bit_count)
    # Codes count magnitudes in order: a carry out of the mantissa is the next binade's first code.
    magnitude = ((binade - fmt.min_exponent) << fmt.mantissa_bits) + kept + up

    finite = fmt.max_code if rounding == "toward_zero" else _beyond(fmt, policy, policy.finite)
    magnitude = np.where(magnitude > fmt.max_code, finite, magnitude)
    magnitude = np.where(infinite, _beyond(fmt, policy, policy.infinity), magnitude)
    magnitude = np.where(nan, _nan_magnitude(fmt, policy), magnitude)

    is_nan = nan | (magnitude == _nan_magnitude(fmt, policy))
    unsigned = is_nan if policy.nan_sign == "positive" or not fmt.has_negative_zero else False
    if not fmt.has_negative_zero:
        unsigned = unsigned | (magnitude == 0)
    codes = np.where(unsigned, magnitude, magnitude | sign)
    return codes.astype(np.uint8)


def _floor_of_fraction(
    rest: npt.NDArray[np.int64], drop: npt.NDArray[np.int64], bit_count: int
) -> npt.NDArray[np.int64]:
    """floor(rest / 2**drop * 2**bit_count), exact. `rest` is below 2**53 and below 2**drop."""
    right = np.clip(drop - bit_count, 0, 63)
    left = np.clip(bit_count - drop, 0, 63)  # drop is at least 47, so only for few kept bits
    return (rest >> right) << left


def _nan_magnitude(fmt: Float8Format, policy: OverflowPolicy) -> int:
    if policy.nan_code == "quiet" and fmt.nan == "ieee":
        return fmt.max_code + 1 + (1 << (fmt.mantissa_bits - 1))
    return fmt.nan_code


def _beyond(fmt: Float8Format, policy: OverflowPolicy, choice: str) -> int:
    """The code, without its sign, of what is past the largest finite value."""
    if choice == "max_finite":
        return fmt.max_code
    infinity = fmt.infinity_code
    return _nan_magnitude(fmt, policy) if infinity is None else infinity
