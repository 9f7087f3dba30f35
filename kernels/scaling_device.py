"""The smaller kernels of scaling: amax, scales from it, delayed scaling, decoding by blocks."""

from __future__ import annotations

import triton
import triton.language as tl

from fp8lab.kernels.casting_arithmetic import (
    HIDDEN,
    INFINITY,
    MAGNITUDE,
    as_bits,
    as_floats,
    as_words,
    decoded,
    widened,
)
from fp8lab.kernels.scaling_arithmetic import (
    ONE,
    inverse_of_scale,
    mx_code,
    scale_of_amax,
    spread,
)


@triton.jit(do_not_specialize=["n"])
def amax_kernel(x, largest, n, BLOCK: tl.constexpr):
    """BLOCK elements a program; largest, one float32, holds 0 or an amax before."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    places = start + tl.arange(0, BLOCK)
    if start + BLOCK <= n:
        words = tl.load(as_words(x) + places)
        bits = widened(words, x.dtype.element_ty, False)
        tl.atomic_max(as_words(largest), tl.max(bits & MAGNITUDE, axis=0), sem="relaxed")
    else:
        words = tl.load(as_words(x) + places, mask=places < n, other=0)
        bits = widened(words, x.dtype.element_ty, False)
        tl.atomic_max(as_words(largest), tl.max(bits & MAGNITUDE, axis=0), sem="relaxed")


@triton.jit(do_not_specialize=["height"])
def amax_lines_kernel(
    x,  # (height, width), neighbours in a row side by side
    of_rows,  # (height,) float32, 0 before; or None
    of_columns,  # (width,) likewise
    height,
    width,
    stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """The amax of every row and of every column from one read: a tile a program."""
    across = tl.cdiv(width, COLUMNS).to(tl.int32)
    top = (tl.program_id(0) // across).to(tl.int64) * ROWS
    left = (tl.program_id(0) % across).to(tl.int64) * COLUMNS
    row = top + tl.arange(0, ROWS)
    column = left + tl.arange(0, COLUMNS)
    places = as_words(x) + row[:, None] * stride + column[None, :]
    if EVEN:
        words = tl.load(places)
    else:
        inside = (row < height)[:, None] & (column < width)[None, :]
        words = tl.load(places, mask=inside, other=0)
    magnitudes = widened(words, x.dtype.element_ty, False) & MAGNITUDE
    if of_rows is not None:
        largest = tl.max(magnitudes, axis=1)
        tl.atomic_max(as_words(of_rows) + row, largest, mask=row < height, sem="relaxed")
    if of_columns is not None:
        largest = tl.max(magnitudes, axis=0)
        tl.atomic_max(as_words(of_columns) + column, largest, mask=column < width, sem="relaxed")


@triton.jit(do_not_specialize=["n"])
def scale_from_amax_kernel(
    amax,
    scale,
    inverse,  # None, or where 1 / scale goes
    previous,  # None (1), or the scales that stay
    n,
    SCALING: tl.constexpr,  # a ScaleRule, not of MX
    EPS: tl.constexpr,  # the bits of the least amax
    BLOCK: tl.constexpr,
):
    """BLOCK amaxes a program."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < n
    largest = tl.load(as_words(amax) + places, mask=inside, other=0) & MAGNITUDE
    largest = tl.maximum(largest, EPS)  # a NaN is larger, as bits
    if previous is None:
        before = tl.full([BLOCK], ONE, tl.int32)
    else:
        before = tl.load(as_words(previous) + places, mask=inside, other=ONE)
    found = scale_of_amax(largest, before, SCALING)
    tl.store(as_words(scale) + places, found, mask=inside)
    if inverse is not None:
        tl.store(as_words(inverse) + places, inverse_of_scale(found), mask=inside)


@triton.jit(do_not_specialize=["n"])
def torchao_scale_kernel(
    amax,
    scale,
    least,  # a pointer to one float64
    n,
    POWER_OF_TWO: tl.constexpr,
    TOP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """As torchao makes a scale: in float64, nothing guarded."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < n
    bits = tl.load(as_words(amax) + places, mask=inside, other=0) & MAGNITUDE
    largest = as_floats(bits).to(tl.float64)
    eps = tl.load(least)
    # NaN compares as false and stays.
    largest = tl.where(largest < eps, eps, largest)
    found = as_bits((tl.full([BLOCK], TOP, tl.float64) / largest).to(tl.float32))
    if POWER_OF_TWO:
        # 448 over the largest float32 is normal, so no scale here is subnormal.
        found = found & (MAGNITUDE ^ (HIDDEN - 1))
    found = tl.where(bits > INFINITY, MAGNITUDE, found)
    tl.store(as_words(scale) + places, found, mask=inside)


@triton.jit(do_not_specialize=["n"])
def mx_scale_kernel(amax, codes, n, SCALING: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK amaxes a program."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < n
    largest = tl.load(as_words(amax) + places, mask=inside, other=0) & MAGNITUDE
    tl.store(codes + places, mx_code(largest, SCALING).to(tl.uint8), mask=inside)


@triton.jit
def update_delayed_kernel(
    scale,  # (n,)
    history,  # (L, n), its rows `stride` apart
    scale_after,  # the same place as scale, or another; so with history
    history_after,
    group_amax,  # (n,) what slot 0 becomes first, or None
    n,
    stride,
    stride_after,
    SCALING: tl.constexpr,
    ALGORITHM: tl.constexpr,
    MERGED: tl.constexpr,  # slot 0 becomes the larger of it and of group_amax
    LENGTH: tl.constexpr,
    TENSORS: tl.constexpr,  # tensors a program
    SLOTS: tl.constexpr,  # slots at a time
):
    """TENSORS tensors a program: choose the amax, make the scale, roll the history."""
    tensor = tl.program_id(0).to(tl.int64) * TENSORS + tl.arange(0, TENSORS)
    here = tensor < n
    before = as_words(history) + tensor
    after = as_words(history_after) + tensor
    first = tl.load(before, mask=here, other=0)
    last = first
    if group_amax is not None:
        last = tl.load(as_words(group_amax) + tensor, mask=here, other=0) & MAGNITUDE
        if MERGED:
            last = tl.maximum(first & MAGNITUDE, last)
    idle = last == 0
    chosen = last
    if ALGORITHM == "max":
        # Never negative, so bit patterns are in the order of magnitudes, NaN above all.
        for start in range(1, LENGTH, SLOTS):
            slot = start + tl.arange(0, SLOTS)[:, None]
            inside = (slot < LENGTH) & here[None, :]
            words = tl.load(before[None, :] + slot.to(tl.int64) * stride, mask=inside, other=0)
            chosen = tl.maximum(chosen, tl.max(words, axis=0))
    kept = tl.load(as_words(scale) + tensor, mask=here, other=ONE)
    found = tl.where(idle, kept, scale_of_amax(chosen, kept, SCALING))
    # In place, what a thread stores is what others load: all loads of a piece come first, and the
    # pieces go upwards, so that none is overwritten before it is read.
    tl.debug_barrier()
    for start in range(0, LENGTH, SLOTS):
        slot = start + tl.arange(0, SLOTS)[:, None]
        inside = (slot < LENGTH) & here[None, :]
        source = tl.where(idle[None, :], slot, slot + 1).to(tl.int64)
        older = (source < LENGTH) & ((slot > 0) | idle[None, :])
        words = tl.load(before[None, :] + source * stride, mask=inside & older, other=0)
        newest = (slot == LENGTH - 1) & (slot > 0) & ~idle[None, :]
        words = tl.where(newest, last[None, :], words)
        tl.debug_barrier()
        tl.store(after[None, :] + slot.to(tl.int64) * stride_after, words, mask=inside)
    tl.store(as_words(scale_after) + tensor, found, mask=here)


@triton.jit(do_not_specialize=["height", "down", "across"])
def dequantize_tiles_kernel(
    codes,  # (height, width), neighbours in a row side by side
    values,  # (height, width) contiguous float32
    factors,  # float32 inverse scales, or E8M0 codes as uint8: one a block
    height,
    width,
    stride,
    down,  # elements of factors from a block to the one below, and to the one on the right
    across,
    RULE: tl.constexpr,  # a DecodeRule
    MX: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """A tile a program."""
    HEIGHT: tl.constexpr = BLOCK_ROWS if BLOCK_ROWS < ROWS else ROWS
    WIDTH: tl.constexpr = BLOCK_COLUMNS if BLOCK_COLUMNS < COLUMNS else COLUMNS
    tiles_across = tl.cdiv(width, COLUMNS).to(tl.int32)
    top = (tl.program_id(0) // tiles_across).to(tl.int64) * ROWS
    left = (tl.program_id(0) % tiles_across).to(tl.int64) * COLUMNS
    row = top + tl.arange(0, ROWS)[:, None]
    column = left + tl.arange(0, COLUMNS)[None, :]
    inside = (row < height) & (column < width)
    if EVEN:
        code = tl.load(as_words(codes) + row * stride + column)
    else:
        code = tl.load(as_words(codes) + row * stride + column, mask=inside, other=0)
    HIGH: tl.constexpr = ROWS // HEIGHT
    WIDE: tl.constexpr = COLUMNS // WIDTH
    block_row = top + HEIGHT * tl.arange(0, HIGH)
    block_column = left + WIDTH * tl.arange(0, WIDE)
    down_places = as_words(factors) + (block_row // BLOCK_ROWS) * down
    across_places = (block_column // BLOCK_COLUMNS) * across
    if WIDE == 1:
        # In one dimension: as a column of a matrix each thread would load it several times over.
        places = down_places + (left // BLOCK_COLUMNS) * across
        factor = tl.load(places, mask=block_row < height, other=0)[:, None]
    else:
        there = (block_row < height)[:, None] & (block_column < width)[None, :]
        factor = tl.load(down_places[:, None] + across_places[None, :], mask=there, other=0)
    if MX:
        exponent = factor.to(tl.int32)
        factor = tl.where(exponent == 0, HIDDEN // 2, exponent << 23)
        factor = tl.where(exponent == 0xFF, MAGNITUDE, factor)
    factor = spread(as_floats(factor), HIGH, HEIGHT, WIDE, WIDTH)
    value = decoded(code.to(tl.int32), RULE) * factor
    if EVEN:
        tl.store(as_words(values) + row * width + column, as_bits(value))
    else:
        tl.store(as_words(values) + row * width + column, as_bits(value), mask=inside)
