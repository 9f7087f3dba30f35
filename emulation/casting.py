"""Casts to and from FP8 (and to bfloat16 and float16), bit for bit: quantise, dequantise.

Three forms of the cast check each other: `fp8lab.emulation.scalar`, which a reader can follow;
`fp8lab.emulation.rounding`, which works on the bits of whole arrays; and `fp8lab.emulation.tables`,
several times faster, for FP8 targets and roundings without random bits. Here they are put together:
inputs are checked, scaled, cut into pieces and handed to the fastest form that serves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8lab.emulation.cast_arguments import (
    ROUNDINGS,
    check_broadcast,
    check_format,
    checked_bit_count,
    checked_random_bits,
    checked_scale,
    input_array,
    numbers,
    rounding_named,
    wide_dtype,
)
from fp8lab.emulation.pieces import PIECE, Index, checked_threads, run_pieces
from fp8lab.emulation.rounding import round_bits
from fp8lab.emulation.tables import (
    TableCast,
    TableDecode,
    Widen,
    has_table,
)
from fp8lab.formats import TARGETS, FloatFormat, OverflowPolicy, overflow_policy

__all__ = ["ROUNDINGS", "dequantize", "quantize", "requantize"]

Array = npt.NDArray[Any]
Cast = Callable[[Array, Array, Array | None], None]  # (values, codes, random bits), 1-D

_ROUND_BITS_PIECE = 1 << 14  # it has a dozen temporaries


def quantize(
    x: npt.ArrayLike,
    fmt: FloatFormat,
    *,
    scale: npt.ArrayLike | None = None,
    rounding: str = "nearest_even",
    overflow: str | OverflowPolicy = "saturate",
    random_bits: npt.ArrayLike | None = None,
    bit_count: int = 32,
    threads: int | None = None,
) -> Array:
    """Cast an array to the codes of a format, optionally scaled first.

    Order: x is widened to float32 (float64 stays); with a scale, y = x * scale is rounded to
    nearest even in that type; y is rounded once to `fmt`. float64 never passes through float32.

    Args:
        x: float64, float32, float16 or bfloat16 array of any shape, strided or empty.
        fmt: E4M3, E5M2, E4M3FNUZ, E5M2FNUZ, E8M0, BFLOAT16 or FLOAT16.
        scale: Multiplies x. Finite and above zero; one value or an array that broadcasts to x's
            shape. Rounded to float32 first (kept in float64 for float64 x).
        rounding: "nearest_even"; "toward_zero"; or "stochastic": away from zero exactly when the
            low `bit_count` bits r of `random_bits` satisfy r < floor(fraction * 2**bit_count),
            where fraction is the distance from the lower neighbour over the gap. Representable
            values stay. For E8M0 also "floor" (toward zero), "up" (away from zero) and "nearest"
            (ties up, and so is "nearest_even"); what is not zero and lies below 2**-127 becomes
            2**-127 under all of them.
        overflow: "saturate" (every overflow and Inf becomes the largest finite value, NaN the
            positive NaN code), "ieee" (Inf or NaN, as ml_dtypes), another name of
            `OVERFLOW_POLICIES`, or an `OverflowPolicy`. Under "toward_zero" a finite value never
            overflows: it becomes the largest finite one. For E8M0 it also says what zero and
            negative values become.
        random_bits: For "stochastic": unsigned integers of x's shape.
        bit_count: For "stochastic": how many of the low random bits count, 1 to 32.
        threads: How many threads share the work; None: see `fp8lab.emulation.pieces.set_threads`.

    Returns:
        Codes of dtype `fmt.dtype` and x's shape. -0 stays -0 where the format has one; an
        underflow keeps its sign likewise.

    Raises:
        TypeError: x, fmt, scale or random_bits is of a type that is not accepted.
        ValueError: An unknown rounding or policy, a scale that is zero, negative or not finite, or
            random bits that are missing, of another shape, or not asked for.

    Source: OCP OFP8 1.0 (formats, both overflow rules); PTX ISA `cvt.rn.satfinite`; the presets
    are measured, see `docs/numerics.md`.

    >>> import numpy as np
    >>> from fp8lab.formats import E4M3, E8M0
    >>> quantize(np.array([0.1, 126.24, 500, np.nan], np.float32), E4M3).view(np.uint8).tolist()
    [29, 112, 126, 127]
    >>> quantize(np.float32([3.0, 0.75]), E8M0, rounding="floor").view(np.uint8).tolist()
    [128, 126]
    """
    values = input_array(x)
    check_format(fmt)
    policy = overflow_policy(overflow, fmt)
    rounding = rounding_named(rounding, fmt)
    bit_count = checked_bit_count(bit_count)
    bits = checked_random_bits(random_bits, bit_count, rounding, values.shape)
    factor = None if scale is None else checked_scale(scale, values)
    count = checked_threads(threads)

    shape = values.shape
    if factor is None or factor.ndim == 0:  # nothing to broadcast: cut it as one row
        values = np.ascontiguousarray(values).reshape(-1)
        bits = None if bits is None else bits.reshape(-1)
    codes = np.empty(values.shape, dtype=fmt.code_dtype)
    dtype = values.dtype if factor is None else wide_dtype(values.dtype)

    def work(share: Sequence[Index]) -> None:
        size = min(PIECE, values.size)
        cast = _cast(fmt, rounding, policy, dtype, size, bit_count)
        scaled = None if factor is None else _Scaled(factor, values.shape, dtype, size)
        # A thread starts with NumPy's defaults, where a NaN would warn.
        with np.errstate(all="ignore"):
            for index in share:
                piece, out = values[index], codes[index]
                if scaled is not None:
                    piece, out = scaled(piece, index), out.reshape(-1)
                cast(piece, out, None if bits is None else bits[index].reshape(-1))

    run_pieces(work, values.shape, count)
    return codes.view(fmt.dtype).reshape(shape)


def dequantize(
    codes: Array, *, inverse_scale: npt.ArrayLike | None = None, threads: int | None = None
) -> Array:
    """Decode codes to float32, optionally multiplied by an inverse scale.

    Every code is exact in float32. With an inverse scale the product is rounded to nearest even.

    Args:
        codes: Array of an ml_dtypes FP8 type (`fmt.dtype`; E8M0 too), bfloat16 or float16, of any
            shape.
        inverse_scale: Multiplies the values; rounded to float32; one value or an array that
            broadcasts to the shape of codes.
        threads: How many threads share the work; None: see `fp8lab.emulation.pieces.set_threads`.

    Returns:
        float32 array of the shape of codes. A NaN code gives a NaN, 0x80 gives -0 where the format
        has one, infinities stay.

    Raises:
        TypeError: codes are of another dtype, or inverse_scale is not of numbers.
        ValueError: inverse_scale does not broadcast to the shape of codes.

    Source: the formats' specifications, see `fp8lab.formats`.

    >>> import numpy as np
    >>> from fp8lab.formats import E4M3
    >>> dequantize(np.array([0x7E, 0x01], np.uint8).view(E4M3.dtype)).tolist()
    [448.0, 0.001953125]
    """
    codes = np.asarray(codes)
    fmt = next((f for f in TARGETS.values() if f.dtype == codes.dtype), None)
    if fmt is None:
        accepted = ", ".join(f.dtype_name for f in TARGETS.values())
        raise TypeError(
            f"codes have dtype {codes.dtype}; accepted: {accepted} (view raw bytes as fmt.dtype)"
        )
    factor = None
    if inverse_scale is not None:
        given = numbers("inverse_scale", inverse_scale)
        with np.errstate(all="ignore"):
            factor = given.astype(np.float32)
        check_broadcast("inverse_scale", factor.shape, "codes", codes.shape)
    shape, count = codes.shape, checked_threads(threads)
    if factor is None or factor.ndim == 0:
        codes = codes.reshape(-1)
    codes = np.ascontiguousarray(codes)
    values = np.empty(codes.shape, dtype=np.float32)
    factors = None if factor is None else np.broadcast_to(factor, codes.shape)

    def work(share: Sequence[Index]) -> None:
        decode = TableDecode(fmt, min(PIECE, codes.size)) if fmt.bits == 8 else None
        with np.errstate(all="ignore"):
            for index in share:
                piece = values[index]
                if decode is None:
                    np.copyto(piece, codes[index], casting="unsafe")
                else:
                    decode(codes[index].reshape(-1).view(np.uint8), piece.reshape(-1))
                if factors is not None:
                    np.multiply(piece, factors[index], out=piece)

    run_pieces(work, codes.shape, count)
    return values.reshape(shape)


def requantize(
    codes: Array,
    fmt: FloatFormat,
    *,
    inverse_scale: npt.ArrayLike | None = None,
    scale: npt.ArrayLike | None = None,
    rounding: str = "nearest_even",
    overflow: str | OverflowPolicy = "saturate",
    threads: int | None = None,
) -> Array:
    """Codes at one scale to codes at another, rounded once.

    Order: y = value of the code * inverse_scale * scale in float64, where it is exact: at most 4
    significant bits times 24 times 24, and no exponent near float64's ends. y is cast to `fmt` as
    `quantize` casts float64. To dequantise and quantise again would round in float32 on the way,
    and can end on another code.

    Args:
        codes: Array of an ml_dtypes FP8 type of values, of any shape.
        fmt: The format of the result.
        inverse_scale: What the codes are decoded with: finite and above zero, one value or an array
            that broadcasts to the shape of codes, rounded to float32; 1 when None.
        scale: What the result is quantised with; likewise.
        rounding: "nearest_even" or "toward_zero".
        overflow: As for `quantize`.
        threads: As for `quantize`.

    Returns:
        Codes of dtype `fmt.dtype` and the shape of codes. -0 stays -0 where both formats have one,
        a NaN code becomes the policy's positive NaN (`dequantize` gives one), an infinite one what
        the policy makes of Inf.

    Raises:
        TypeError: codes, fmt or a factor of a type that is not accepted.
        ValueError: A factor that is not finite and above zero or does not broadcast; another
            rounding; an unknown policy.

    >>> import numpy as np
    >>> from fp8lab.formats import E4M3, E5M2
    >>> codes = quantize(np.float32([1.125, 448, -2**-9]), E4M3)
    >>> requantize(codes, E5M2, scale=2.0).view(np.uint8).tolist()
    [64, 99, 156]
    """
    codes = np.asarray(codes)
    accepted = [f for f in TARGETS.values() if f.bits == 8 and f.signed]
    if codes.dtype not in [f.dtype for f in accepted]:
        names = ", ".join(f.dtype_name for f in accepted)
        raise TypeError(f"codes have dtype {codes.dtype}; accepted: {names}")
    if rounding == "stochastic":
        raise ValueError("rounding is 'stochastic'; accepted: nearest_even, toward_zero")
    exact = dequantize(codes, threads=threads).astype(np.float64)
    narrow = np.empty(codes.shape, np.float32)  # whose shape and type a factor is checked against
    for name, given in (("inverse_scale", inverse_scale), ("scale", scale)):
        if given is not None:
            factor = checked_scale(given, narrow, name)
            with np.errstate(invalid="ignore"):
                exact = exact * factor.astype(np.float64)
    return quantize(exact, fmt, rounding=rounding, overflow=overflow, threads=threads)


class _Scaled:
    """x * scale for one piece at a time, rounded to nearest even in the wide type; 1-D."""

    def __init__(
        self, factor: Array, shape: tuple[int, ...], dtype: np.dtype[Any], size: int
    ) -> None:
        self._factor = np.broadcast_to(factor, shape)
        self._out = np.empty(size, dtype=dtype)
        self._widen = Widen(size)

    def __call__(self, piece: Array, index: Index) -> Array:
        flat = self._out[: piece.size]
        out = flat.reshape(piece.shape)
        if piece.dtype.itemsize == 2:
            self._widen(np.ascontiguousarray(piece).reshape(-1), flat)
            piece = out
        np.multiply(piece, self._factor[index], out=out)
        return flat


def _cast(
    fmt: FloatFormat,
    rounding: str,
    policy: OverflowPolicy,
    dtype: np.dtype[Any],
    size: int,
    bit_count: int,
) -> Cast:
    """The fastest form that serves, ready for pieces of at most `size` elements."""
    if rounding != "stochastic" and has_table(fmt):
        return TableCast(fmt, rounding, policy, dtype, size)

    def by_bits(values: Array, codes: Array, random: Array | None) -> None:
        for start in range(0, values.size, _ROUND_BITS_PIECE):
            part = slice(start, start + _ROUND_BITS_PIECE)
            wide = values[part].astype(wide_dtype(values.dtype), copy=False)
            words = None if random is None else random[part]
            codes[part] = round_bits(wide, fmt, rounding, policy, words, bit_count)

    return by_bits
