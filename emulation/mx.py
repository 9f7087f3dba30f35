"""Microscaling (MX): 32 elements share one E8M0 scale, a power of two that multiplies on decoding.

Exponents come from bits: a logarithm in float32 is wrong just beside powers of two.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8lab.emulation.amax import magnitudes
from fp8lab.emulation.blocks import dequantize_blocks, quantize_by_rule
from fp8lab.emulation.casting import dequantize
from fp8lab.emulation.scale_rules import check_value_format, inverse_scale
from fp8lab.emulation.tiling import Block, Float32Array
from fp8lab.formats import E8M0, Float8Format, OverflowPolicy

Array = npt.NDArray[Any]

MX_BLOCK: Block = (1, 32)
MX_ROUNDINGS = ("floor", "up", "nearest")
_INFINITE_AMAX = np.uint8(0xFE)


def mx_scale(amax: npt.ArrayLike, fmt: Float8Format, *, rounding: str = "floor") -> Array:
    """The shared scale of MX blocks, as E8M0 codes.

    With emax = floor(log2(fmt.max_finite)) (8 for E4M3, 15 for E5M2), and all of it exact:

    - "floor" (the OCP standard): the largest power of two <= amax / 2**emax. Elements up to
      2**(emax + 1) follow, so those past fmt.max_finite saturate.
    - "up" (TransformerEngine, torchao's RCEIL): the smallest power of two >= amax /
      fmt.max_finite. Nothing saturates.
    - "nearest": the power of two nearest to amax / 2**emax, ties up (ml_dtypes' cast of that
      quotient to E8M0). Nothing saturates; elements reach 1.5 * 2**emax.

    Below 2**-127 the scale is 2**-127. An amax of 0 gives code 0x00, Inf 0xFE, NaN 0xFF.

    Args:
        amax: Magnitudes of any shape; float64 is rounded to float32 first.
        fmt: The format of the elements.
        rounding: "floor", "up" or "nearest".

    Returns:
        E8M0 codes (dtype `E8M0.dtype`) of amax's shape; code c is the scale 2**(c - 127).

    Raises:
        TypeError: fmt is not a format of values, or amax holds no numbers.
        ValueError: An unknown rounding, or a negative amax.

    Source: OCP Microscaling Formats (MX) 1.0, section 6.3; cuBLAS' block quantisation ("up").

    >>> import numpy as np
    >>> from fp8lab.formats import E4M3
    >>> amax = np.float32([448, 449, 0, np.inf, np.nan])
    >>> mx_scale(amax, E4M3).view(np.uint8).tolist()
    [127, 127, 0, 254, 255]
    >>> mx_scale(amax, E4M3, rounding="up").view(np.uint8).tolist()
    [127, 128, 0, 254, 255]
    >>> mx_scale(np.float32([383, 384]), E4M3, rounding="nearest").view(np.uint8).tolist()
    [127, 128]
    """
    check_value_format(fmt)
    if rounding not in MX_ROUNDINGS:
        raise ValueError(f"unknown rounding {rounding!r}; accepted: {', '.join(MX_ROUNDINGS)}")
    words = magnitudes("amax", amax).view(np.uint32)
    fraction, exponent = math.frexp(fmt.max_finite)  # max_finite = 2 * fraction * 2**emax
    mantissa = words & np.uint32(0x007FFFFF)
    code = (words >> np.uint32(23)).astype(np.int32) - (exponent - 1)
    if rounding == "up":
        code += mantissa > np.uint32((2 * fraction - 1) * 2**23)
    elif rounding == "nearest":
        code += mantissa >= np.uint32(1 << 22)
    # A subnormal amax ends here too, whatever its bits: emax is at least 7.
    code = np.maximum(code, 0)
    codes = np.where(words >= np.uint32(0x7F800000), _INFINITE_AMAX, code).astype(np.uint8)
    codes += words > np.uint32(0x7F800000)
    return np.asarray(codes, dtype=np.uint8).view(E8M0.dtype)


def quantize_mx(
    x: npt.ArrayLike,
    fmt: Float8Format,
    *,
    block: Block = MX_BLOCK,
    scale_rounding: str = "floor",
    rounding: str = "nearest_even",
    overflow: str | OverflowPolicy = "saturate",
    random_bits: npt.ArrayLike | None = None,
    bit_count: int = 32,
    threads: int | None = None,
) -> tuple[Array, Array]:
    """Quantise to MX blocks: FP8 elements with one E8M0 scale a block.

    For each block: `amax`; `mx_scale`; y = x * 2**(127 - code), in float32 (float64 for float64 x)
    and exact but where it underflows float32, far below the smallest FP8 value; y is cast as
    `quantize` casts. A block that holds NaN has scale NaN and only NaN codes; one that holds Inf
    (but no NaN) has scale 2**127: Inf decodes to Inf, and its finite elements to 0 or nearly so.

    Args:
        x: float64, float32, float16 or bfloat16, at least 2-D, strided or empty.
        fmt: The format of the elements.
        block: (1, 32) along rows, (32, 1) along columns; any (rows, columns) will do, and sizes
            need not be multiples of it.
        scale_rounding: How `mx_scale` rounds.
        rounding, overflow, random_bits, bit_count, threads: As for `quantize`, for the elements.

    Returns:
        Codes of dtype `fmt.dtype` and x's shape, and E8M0 codes (..., ceil(M / rows),
        ceil(N / columns)).

    Raises:
        TypeError: x, fmt, block or random_bits of a type that is not accepted.
        ValueError: A block dimension below 1, x of fewer than 2 dimensions, or an unknown rounding
            or policy.

    Source: OCP Microscaling Formats (MX) 1.0. TransformerEngine and torchao multiply by 1 instead
    of 2**127 (torchao's floor rule by 2**126) where the code is 0; see `docs/numerics.md`.

    >>> import numpy as np
    >>> from fp8lab.formats import E4M3
    >>> codes, scale = quantize_mx(np.float32([[1000, 1, 0]]), E4M3)
    >>> scale.view(np.uint8).tolist(), dequantize_mx(codes, scale).tolist()
    ([[128]], [[896.0, 1.0, 0.0]])
    """

    def rule(largest: Float32Array) -> tuple[Array, Float32Array]:
        scale = mx_scale(largest, fmt, rounding=scale_rounding)
        # 1 / 2**k is exact here, 2**127 being the largest power of two and 2**-127 a subnormal.
        return scale, inverse_scale(dequantize(scale))

    cast: dict[str, Any] = {"rounding": rounding, "overflow": overflow, "threads": threads}
    cast |= {"random_bits": random_bits, "bit_count": bit_count}
    return quantize_by_rule(x, fmt, block, rule, cast)


def dequantize_mx(
    codes: Array, scale: Array, *, block: Block = MX_BLOCK, threads: int | None = None
) -> Float32Array:
    """Decode MX blocks: the code's value times its block's scale, in float32.

    Exact for every pair of codes but where the product is beyond float32, which gives Inf. A NaN
    scale (0xFF) gives NaN. Code 0 is 2**-127, a float32 subnormal, and is not flushed.

    Args:
        codes: Of an ml_dtypes FP8 type, at least 2-D.
        scale: E8M0 codes (dtype `E8M0.dtype`), (..., ceil(M / rows), ceil(N / columns)).
        block: The block they were made with.
        threads: As for `dequantize`.

    Raises:
        TypeError: Codes or scales of another dtype.
        ValueError: A block dimension below 1, or scales of another shape.

    >>> import numpy as np
    >>> from fp8lab.formats import E4M3, E8M0
    >>> one = np.uint8([[0x38]]).view(E4M3.dtype)
    >>> dequantize_mx(one, np.uint8([[0]]).view(E8M0.dtype)).item() == 2.0**-127
    True
    """
    scale = np.asarray(scale)
    if scale.dtype != E8M0.dtype:
        raise TypeError(
            f"scale has dtype {scale.dtype}; accepted: {E8M0.dtype_name} (view raw bytes as it)"
        )
    return dequantize_blocks(codes, dequantize(scale), block=block, threads=threads)
