"""What a cast did to a tensor, counted exactly, and the two sums behind its SQNR.

Counts are integers, and so are the two sums: each is a whole number of units of 2**UNIT. They are
formed so that no launch of a kernel changes a bit:

1. The tensor, in C order, is cut into leaves of 16 rows of 1024 lanes, the last one filled up with
   zeros (as in `fp8lab.emulation.gradients`).
2. Each lane of a leaf adds its 16 squares in float64, row after row. The square of an element x is
   exact; that of an error is e*e rounded, with e = x - decoded rounded, both in float64.
3. The 1024 lanes of a leaf are added by `order_free_sum`, to a float64.
4. Leaves, microbatches and steps are added exactly, as integers.

Elements that are not finite add nothing to either sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from fp8lab.emulation.amax import amax, float_array
from fp8lab.emulation.blocks import expand_blocks
from fp8lab.emulation.casting import dequantize
from fp8lab.emulation.gradients import LANES, LEAF, ROWS, order_free_sum
from fp8lab.formats import FORMATS, Float8Format

Array = npt.NDArray[Any]
Block = tuple[int | None, int | None]

UNIT = -352  # below the last bit of every sum of squares of float32
BINS = 64
FIRST_EXPONENT = -112  # of bin 1, which holds this exponent and the next
_PIECE = 64 * LEAF
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITY = 0x7F800000


@dataclass(frozen=True)
class CastCounts:
    """What one cast did, or several together. All integers, so that they add up exactly.

    Attributes:
        elements: How many there were.
        zeros: Those that are zero.
        nonfinite: Those that are NaN or Inf.
        overflow: Those that are finite, but whose scaled value rounds past the largest finite code
            (for BF16: whose rounded value is infinite).
        underflow: Those that are not zero, but whose code is a zero.
        amax_bits: The largest magnitude, as the bits of a float32: Inf when present, and 0x7FFFFFFF
            when a NaN is.
        scale_bits: The smallest scale of the elements that are not zero, likewise; None where there
            is no such element, and -1 for a scale that is NaN.
        signal: The sum of squares of the finite elements, in units of 2**UNIT.
        noise: Likewise, of their errors.
        noise_special: 0; 1 where an error is infinite, 2 where one is NaN: a finite element whose
            decoded value is not.
    """

    elements: int = 0
    zeros: int = 0
    nonfinite: int = 0
    overflow: int = 0
    underflow: int = 0
    amax_bits: int = 0
    scale_bits: int | None = None
    signal: int = 0
    noise: int = 0
    noise_special: int = 0

    def __add__(self, other: CastCounts) -> CastCounts:
        scales = [bits for bits in (self.scale_bits, other.scale_bits) if bits is not None]
        return CastCounts(
            self.elements + other.elements,
            self.zeros + other.zeros,
            self.nonfinite + other.nonfinite,
            self.overflow + other.overflow,
            self.underflow + other.underflow,
            max(self.amax_bits, other.amax_bits),
            min(scales) if scales else None,
            self.signal + other.signal,
            self.noise + other.noise,
            max(self.noise_special, other.noise_special),
        )

    @property
    def amax(self) -> float:
        """The largest magnitude, 0 of nothing."""
        return float(np.uint32(self.amax_bits).view(np.float32))

    @property
    def scale(self) -> float:
        """The smallest scale; 1 where no element is other than zero."""
        if self.scale_bits is None:
            return 1.0
        return math.nan if self.scale_bits < 0 else float(np.uint32(self.scale_bits).view("f4"))

    @property
    def sqnr_db(self) -> float:
        """10 log10(signal / noise), decibels: Inf where nothing was lost, -Inf or NaN where an
        error is infinite or NaN.
        """
        if self.noise_special:
            return -math.inf if self.noise_special == 1 else math.nan
        return 10 * math.log10(self.signal / self.noise) if self.noise else math.inf

    def share(self, name: str) -> float:
        """A count as a share: of all elements, but `underflow` of those that are not zero."""
        whole = self.elements - (self.zeros if name == "underflow" else 0)
        return float(getattr(self, name)) / max(whole, 1)


def count_cast(
    x: npt.ArrayLike,
    codes: Array | None,
    *,
    inverse_scale: npt.ArrayLike | None = None,
    scale: npt.ArrayLike | None = None,
    block: Block | None = None,
    sums: bool = True,
) -> CastCounts:
    """Count what a cast did to a matrix.

    The decoded value of an element is its code's value times the inverse scale, rounded to float32;
    its scale is `scale`, or where that is None 1 / inverse scale, rounded to float32; its scaled
    value x * scale, rounded to float32. A scale that is NaN counts no overflow.

    Args:
        x: (M, N), float32, bfloat16 or float16: what was cast.
        codes: FP8 codes of that shape (an ml_dtypes type of `fp8lab.formats`, a FNUZ one too); None
            for a cast to BF16, to nearest even.
        inverse_scale: float32 or E8M0: one element, or one a block; None is 1.
        scale: One float32: what x was multiplied by.
        block: (rows, columns) of a block, None for a whole dimension; None is one scale for all.
        sums: Whether the two sums are formed; otherwise they are 0.

    Raises:
        TypeError: x or codes are of another dtype.
        ValueError: Their shapes differ.

    Source: the sums are `fp8lab.emulation.gradients`' leaves; SQNR is the usual one of the
    quantisation literature.

    >>> x = np.float32([[1.0, 0.0, 500.0, 1e-6]])
    >>> found = count_cast(x, x.astype(ml_dtypes.float8_e4m3fn), inverse_scale=1.0)
    >>> found.zeros, found.underflow
    (1, 1)
    """
    values = float_array("x", x)
    if values.dtype == np.float64:
        raise TypeError("x has dtype float64; accepted: float32, float16, bfloat16")
    if codes is not None and codes.shape != values.shape:
        raise ValueError(f"codes have shape {codes.shape}; x has {values.shape}")
    one, wide = _inverse_scales(inverse_scale, block, values.shape)
    given = None if scale is None else np.float32(np.asarray(scale).reshape(()))
    largest = int(amax(values).view(np.uint32))
    total = CastCounts(amax_bits=int(_MAGNITUDE) if largest > _INFINITY else largest)
    flat = np.ascontiguousarray(values).reshape(-1)
    flat_codes = None if codes is None else np.ascontiguousarray(codes).reshape(-1)
    fmt = None if codes is None else _format_of(codes)
    for start in range(0, flat.size, _PIECE):
        part = slice(start, start + _PIECE)
        inverse = one if wide is None else wide[part]
        with np.errstate(all="ignore"):
            piece = flat[part].astype(np.float32)
            if fmt is None or flat_codes is None:
                found = _bfloat16_cast(piece)
            else:
                factor = given if given is not None else np.float32(1) / inverse
                found = _float8_cast(piece, flat_codes[part], fmt, inverse, factor)
            total += _counted(piece, *found, sums=sums)
    return total


def magnitude_bins(values: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """How many float32 values have which magnitude: 64 counts.

    Bin 0 counts zeros, bin 63 what is not finite. Bin b from 1 to 62 counts magnitudes from
    2**(2b - 114) up to, not including, 2**(2b - 112); what is smaller or larger goes to bin 1 or
    62.

    Args:
        values: float32, of any shape.

    >>> np.flatnonzero(magnitude_bins(np.float32([0.0, 1.0, 2.0**-40]))).tolist()
    [0, 37, 57]
    """
    words = np.ascontiguousarray(values, dtype=np.float32).reshape(-1).view(np.uint32) & _MAGNITUDE
    exponent = (words >> 23).astype(np.int64) - 127
    bins = 1 + np.clip((exponent - FIRST_EXPONENT) >> 1, 0, BINS - 3)
    bins = np.where(words == 0, 0, np.where(exponent == 128, BINS - 1, bins))
    return np.bincount(bins, minlength=BINS).astype(np.int64)


def leaf_square_sums(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Steps 2 and 3: the sum of squares of each leaf of a flat float64 array.

    >>> leaf_square_sums(np.float64([3.0, 4.0])).tolist()
    [25.0]
    """
    count = -(-values.size // LEAF)
    padded = np.zeros(count * LEAF)
    padded[: values.size] = values
    rows = padded.reshape(count, ROWS, LANES)
    lanes = np.zeros((count, LANES))
    with np.errstate(all="ignore"):
        for row in range(ROWS):
            lanes += rows[:, row] * rows[:, row]
    return order_free_sum(lanes)


def exact_units(sums: npt.NDArray[np.float64]) -> int:
    """The exact sum of finite float64 numbers, none negative, in units of 2**UNIT.

    >>> exact_units(np.float64([1.0, 2.0**-300])) == 2**352 + 2**52
    True
    """
    mantissas, exponents = np.frexp(sums)
    whole = (mantissas * 2.0**53).astype(np.int64).tolist()
    return sum(
        number << (int(exponent) - 53 - UNIT)
        for number, exponent in zip(whole, exponents, strict=True)
        if number
    )


def _counted(
    x: Array, decoded: Array, lost: Array, clipped: Array, scale: Array, *, sums: bool
) -> CastCounts:
    """Counts of a flat piece; `decoded` float32, `scale` of its shape or one."""
    finite = np.isfinite(x)
    filled = x != 0
    used = scale if scale.ndim == 0 else scale[filled]
    scale_bits = None
    if filled.any():
        scale_bits = -1 if np.isnan(used).any() else int(used.view(np.uint32).min())
    signal = noise = special = 0
    if sums:
        exact = np.where(finite, x, 0).astype(np.float64)
        signal = exact_units(leaf_square_sums(exact))
        errors = leaf_square_sums(np.where(finite, x.astype(np.float64) - decoded, 0))
        special = 2 if np.isnan(errors).any() else int(np.isinf(errors).any())
        noise = exact_units(errors[np.isfinite(errors)])
    return CastCounts(
        elements=x.size,
        zeros=int(x.size - filled.sum()),
        nonfinite=int(x.size - finite.sum()),
        overflow=int((finite & clipped).sum()),
        underflow=int((filled & lost).sum()),
        scale_bits=scale_bits,
        signal=signal,
        noise=noise,
        noise_special=special,
    )


def _bfloat16_cast(x: Array) -> tuple[Array, Array, Array, Array]:
    """Decoded values; which codes are zeros; which overflow; the scale."""
    rounded = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    return rounded, rounded == 0, np.isinf(rounded), np.asarray(np.float32(1))


def _float8_cast(
    x: Array, codes: Array, fmt: Float8Format, inverse: Array, scale: Array | np.float32
) -> tuple[Array, Array, Array, Array]:
    values = dequantize(codes)
    y = np.abs(x * scale)
    edge = np.float32(fmt.overflow_edge)
    clipped = y >= edge if fmt.max_code % 2 else y > edge
    return values * inverse, values == 0, clipped, np.asarray(scale)


def _inverse_scales(
    given: npt.ArrayLike | None, block: Block | None, shape: tuple[int, ...]
) -> tuple[Array, Array | None]:
    """One float32 for all, or one an element, flat."""
    found = np.asarray(np.float32(1) if given is None else given).astype(np.float32)
    if block is None:
        return found.reshape(()), None
    whole = expand_blocks(found, block, shape)
    return np.asarray(np.float32(1)), np.ascontiguousarray(whole).reshape(-1)


def _format_of(codes: Array) -> Float8Format:
    for fmt in FORMATS.values():
        if fmt.dtype == codes.dtype and fmt.signed:
            return fmt
    names = ", ".join(fmt.dtype_name for fmt in FORMATS.values() if fmt.signed)
    raise TypeError(f"codes have dtype {codes.dtype}; accepted: {names}")
