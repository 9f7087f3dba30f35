"""One scale a row: a program takes whole rows, so that each is read once where it fits."""

from __future__ import annotations

import triton
import triton.language as tl

from fp8lab.kernels.casting_arithmetic import (
    MAGNITUDE,
    as_bits,
    as_floats,
    as_words,
    cast_to_codes,
    random_word,
    widened,
)
from fp8lab.kernels.scaling_arithmetic import block_factors


@triton.jit(do_not_specialize=["height", "seed", "offset"])
def quantize_rows_kernel(
    x,  # (height, width), neighbours in a row side by side
    codes,  # (height, width) contiguous
    kept,  # (height,)
    height,
    width,
    stride,  # elements from a row of x to the next
    seed,
    offset,
    SCALING: tl.constexpr,  # a ScaleRule
    RULE: tl.constexpr,  # a CastRule
    ROWS: tl.constexpr,  # rows a program
    COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr,  # runs of COLUMNS that a row takes: 1 keeps it in registers
    EVEN: tl.constexpr,  # rows and chunks fill the matrix
):
    """ROWS rows a program. A row of several chunks is read twice."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    lines = as_words(x) + row * stride
    bits = _load(lines, row, 0, height, width, x.dtype.element_ty, RULE, COLUMNS, EVEN)
    seen = bits & MAGNITUDE
    if CHUNKS > 1:
        for chunk in range(1, CHUNKS):
            more = _load(
                lines, row, chunk * COLUMNS, height, width, x.dtype.element_ty, RULE, COLUMNS, EVEN
            )
            seen = tl.maximum(seen, more & MAGNITUDE)
    largest = tl.max(seen, axis=1, keep_dims=True)
    factor, stored = block_factors(largest, SCALING)
    tl.store(as_words(kept) + row, stored, mask=row < height)
    if CHUNKS == 1:
        _cast(bits, factor, codes, row, 0, height, width, seed, offset, RULE, COLUMNS, EVEN)
    else:
        for chunk in range(CHUNKS):
            left = chunk * COLUMNS
            bits = _load(lines, row, left, height, width, x.dtype.element_ty, RULE, COLUMNS, EVEN)
            _cast(bits, factor, codes, row, left, height, width, seed, offset, RULE, COLUMNS, EVEN)


@triton.jit
def _load(
    lines,
    row,
    left,
    height,
    width,
    element: tl.constexpr,
    RULE: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
):
    column = left + tl.arange(0, COLUMNS)[None, :]
    if EVEN:
        words = tl.load(lines + column)
    else:
        words = tl.load(lines + column, mask=(row < height) & (column < width), other=0)
    return widened(words, element, RULE.hardware)


@triton.jit
def _cast(
    bits,
    factor,
    codes,
    row,
    left,
    height,
    width,
    seed,
    offset,
    RULE: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
):
    column = left + tl.arange(0, COLUMNS)[None, :]
    random = None
    if RULE.rounding == "stochastic":
        random = random_word(seed, offset, row * width + column)
    y = as_bits(as_floats(bits) * factor)
    result = cast_to_codes(y, bits, random, RULE)
    places = as_words(codes) + row * width + column
    if EVEN:
        tl.store(places, result)
    else:
        tl.store(places, result, mask=(row < height) & (column < width))
