"""The scales of the blocks of a tile: part of `casting_tiles`.

A tile is four blocks of rows: block j holds rows j, j + 4, j + 8, ...
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp8lab.kernels.casting_arithmetic import MAGNITUDE, as_words
from fp8lab.kernels.scaling_arithmetic import block_factors, spread


@triton.jit
def largest_of_four(b0, b1, b2, b3):
    """The largest magnitude at each place of the four blocks."""
    low = tl.maximum(b0 & MAGNITUDE, b1 & MAGNITUDE)
    high = tl.maximum(b2 & MAGNITUDE, b3 & MAGNITUDE)
    return tl.maximum(low, high)


@triton.jit
def block_scales(
    b0,
    b1,
    b2,
    b3,
    kept,
    top,
    left,
    height,
    width,
    down,
    across,
    SCALING: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    QUARTER: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The factors of the four blocks, each made from its own amax; what is kept is stored."""
    at_top = top // BLOCK_ROWS
    at_left = left // BLOCK_COLUMNS
    blocks_down = tl.cdiv(height, BLOCK_ROWS) - at_top
    blocks_across = tl.cdiv(width, BLOCK_COLUMNS) - at_left
    corner = kept + at_top * down + at_left * across
    if BLOCK_ROWS == 1:
        l0 = _largest_of(b0 & MAGNITUDE, 1, BLOCK_COLUMNS, QUARTER, COLUMNS)
        l1 = _largest_of(b1 & MAGNITUDE, 1, BLOCK_COLUMNS, QUARTER, COLUMNS)
        l2 = _largest_of(b2 & MAGNITUDE, 1, BLOCK_COLUMNS, QUARTER, COLUMNS)
        l3 = _largest_of(b3 & MAGNITUDE, 1, BLOCK_COLUMNS, QUARTER, COLUMNS)
        # Stored together: to store a column of values they change places between threads.
        WIDE: tl.constexpr = COLUMNS // BLOCK_COLUMNS
        every = tl.join(tl.join(l0, l2), tl.join(l1, l3))
        every = tl.reshape(tl.permute(every, [0, 2, 3, 1]), [4 * QUARTER, WIDE])
        _keep(every, corner, blocks_down, blocks_across, down, across, SCALING, 4 * QUARTER, WIDE)
        f0 = _spread_factors(l0, SCALING, 1, BLOCK_COLUMNS, QUARTER, COLUMNS)
        f1 = _spread_factors(l1, SCALING, 1, BLOCK_COLUMNS, QUARTER, COLUMNS)
        f2 = _spread_factors(l2, SCALING, 1, BLOCK_COLUMNS, QUARTER, COLUMNS)
        f3 = _spread_factors(l3, SCALING, 1, BLOCK_COLUMNS, QUARTER, COLUMNS)
    else:
        HEIGHT: tl.constexpr = BLOCK_ROWS // 4
        HIGH: tl.constexpr = QUARTER // HEIGHT
        SHOWN: tl.constexpr = COLUMNS // BLOCK_COLUMNS
        largest = largest_of_four(b0, b1, b2, b3)
        largest = _largest_of(largest, HEIGHT, BLOCK_COLUMNS, QUARTER, COLUMNS)
        _keep(largest, corner, blocks_down, blocks_across, down, across, SCALING, HIGH, SHOWN)
        f0 = _spread_factors(largest, SCALING, HEIGHT, BLOCK_COLUMNS, QUARTER, COLUMNS)
        f1, f2, f3 = f0, f0, f0
    return f0, f1, f2, f3


@triton.jit
def _largest_of(
    magnitudes,  # (QUARTER, COLUMNS)
    HEIGHT: tl.constexpr,  # of a block, in rows of these
    WIDTH: tl.constexpr,
    QUARTER: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The largest of each block: (QUARTER // HEIGHT, COLUMNS // WIDTH)."""
    HIGH: tl.constexpr = QUARTER // HEIGHT
    WIDE: tl.constexpr = COLUMNS // WIDTH
    largest = magnitudes
    if WIDE == 1:
        largest = tl.max(largest, axis=1, keep_dims=True)
    elif WIDTH > 1:
        largest = tl.max(tl.reshape(largest, [QUARTER, WIDE, WIDTH]), axis=2)
    if HIGH == 1:
        largest = tl.max(largest, axis=0, keep_dims=True)
    elif HEIGHT > 1:
        largest = tl.max(tl.reshape(largest, [HIGH, HEIGHT, WIDE]), axis=1)
    return largest


@triton.jit
def _keep(
    largest,  # (HIGH, WIDE)
    corner,
    blocks_down,
    blocks_across,
    down,
    across,
    SCALING: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Store what is kept of blocks with these amaxes."""
    _, kept = block_factors(largest, SCALING)
    row = tl.arange(0, HIGH)[:, None]
    column = tl.arange(0, WIDE)[None, :]
    places = as_words(corner) + row.to(tl.int64) * down + column.to(tl.int64) * across
    tl.store(places, kept, mask=(row < blocks_down) & (column < blocks_across))


@triton.jit
def _spread_factors(
    largest,
    SCALING: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    QUARTER: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One factor a block, in a shape that broadcasts to (QUARTER, COLUMNS)."""
    factor, _ = block_factors(largest, SCALING)
    return spread(factor, QUARTER // HEIGHT, HEIGHT, COLUMNS // WIDTH, WIDTH)
