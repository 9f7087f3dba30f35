"""The plain Triton matrix product: what runs on the device.

A persistent grid walks the tiles; tensor descriptors bring the operands in and mask their edges
with zeros, which change no bit. On a card `tl.dot` on FP8 becomes wgmma. The interpreter has
neither that arithmetic nor a right decoding of FP8: there, operands are read as bytes, decoded in
integer operations and multiplied as float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fp8lab.kernels.float_device import decoded, float_of, fma, narrowed

Scaling = Literal["none", "tensor", "vectors", "blocks"]


@dataclass(frozen=True)
class ProductPlan:
    """What is known of a product when its kernel is compiled.

    Attributes:
        block_m, block_n, block_k: Sizes of a tile, and how much of K a step takes.
        group_m: Tiles that are visited down a column before the next column.
        promote: Whether each step's partial sum starts from zero and is added to a total.
        scaling: "tensor": one factor; "vectors": one a column, then one a row; "blocks": those of
            each step, inside the sum.
        rows_per_scale, columns_per_scale: Elements that share an entry of the scales.
        scale_a_e8m0, scale_b_e8m0: Whether scales are E8M0 codes; otherwise float32.
        start: Whether the sum starts from an accumulator.
        bias: What is added at the end: nothing, a "vector" along N, or a "matrix".
        bfloat16: Whether the result is rounded to bfloat16; otherwise it is float32.
        out_descriptor: Whether `out` is a tensor descriptor; otherwise a pointer.
        hardware: Whether the card's instructions are there.
        warp_specialize: As `tl.range` takes it.
        swap: Whether the tile is computed transposed, as b^T a^T: wgmma has at least 64 rows, but
            as few as 8 columns, which then are the rows of a. The arithmetic is symmetric.
        overlap: Whether the next kernel may begin to start before this one has ended; it waits
            before it reads or writes.
    """

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    promote: bool
    scaling: Scaling
    rows_per_scale: int
    columns_per_scale: int
    scale_a_e8m0: bool
    scale_b_e8m0: bool
    start: bool
    bias: Literal["none", "vector", "matrix"]
    bfloat16: bool
    out_descriptor: bool
    hardware: bool
    warp_specialize: bool
    swap: bool
    overlap: bool


# Of the sizes only n decides how memory is reached; the others would only multiply compilations.
@triton.jit(
    do_not_specialize=[
        "m",
        "k",
        "scale_a_stride_m",
        "scale_a_stride_k",
        "scale_b_stride_k",
        "scale_b_stride_n",
    ]
)
def matmul_kernel(
    a,  # descriptor of (m, k)
    b,  # descriptor of (n, k)
    out,  # descriptor of or pointer to (m, n): float32, or int16 for bfloat16
    scale_a,
    scale_b,
    bias,
    start,
    m,
    n,
    k,
    scale_a_stride_m,
    scale_a_stride_k,
    scale_b_stride_k,
    scale_b_stride_n,
    PLAN: tl.constexpr,
    A_CODE: tl.constexpr,
    B_CODE: tl.constexpr,
    OUT_CODE: tl.constexpr,  # bfloat16
):
    """Every num_programs-th tile a program."""
    BLOCK_M: tl.constexpr = PLAN.block_m
    BLOCK_N: tl.constexpr = PLAN.block_n
    BLOCK_K: tl.constexpr = PLAN.block_k
    tiles_m = tl.cdiv(m, BLOCK_M)
    tiles_n = tl.cdiv(n, BLOCK_N)
    steps = tl.cdiv(k, BLOCK_K)
    if PLAN.overlap:
        gdc_wait()
        gdc_launch_dependents()
    for tile in tl.range(
        tl.program_id(0),
        tiles_m * tiles_n,
        tl.num_programs(0),
        flatten=True,
        warp_specialize=PLAN.warp_specialize,
    ):
        tile_m, tile_n = _place(tile, tiles_m, tiles_n, PLAN.group_m)
        first_m = tile_m * BLOCK_M
        first_n = tile_n * BLOCK_N
        rows = first_m + tl.arange(0, BLOCK_M)
        columns = first_n + tl.arange(0, BLOCK_N)
        inside = (rows < m)[:, None] & (columns < n)[None, :]
        places = rows.to(tl.int64)[:, None] * n + columns[None, :]

        if PLAN.start:
            total = tl.load(start + places, mask=inside, other=0.0)
        else:
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if PLAN.swap:
            total = total.T
        if PLAN.scaling == "blocks":
            a_scales = scale_a + (rows // PLAN.rows_per_scale) * scale_a_stride_m
            b_scales = scale_b + (columns // PLAN.columns_per_scale) * scale_b_stride_n

        for step in range(steps):
            x = a.load([first_m, step * BLOCK_K])
            y = b.load([first_n, step * BLOCK_K])
            if not PLAN.hardware:
                x = decoded(x, A_CODE, False)
                y = decoded(y, B_CODE, False)
            if PLAN.scaling == "blocks":
                by_row = _scales(a_scales + step * scale_a_stride_k, rows < m, PLAN.scale_a_e8m0)
                by_column = _scales(
                    b_scales + step * scale_b_stride_k, columns < n, PLAN.scale_b_e8m0
                )
                if PLAN.swap:
                    by_row, by_column = by_row[None, :], by_column[:, None]
                else:
                    by_row, by_column = by_row[:, None], by_column[None, :]
                partial = _partial(x, y, PLAN.swap)
                if PLAN.rows_per_scale == 1 and PLAN.columns_per_scale == 1:
                    partial = partial * by_row
                    factor = tl.broadcast_to(by_column, partial.shape)
                else:
                    factor = by_row * by_column
                total = fma(partial, factor, total, PLAN.hardware)
            elif PLAN.promote:
                total += _partial(x, y, PLAN.swap)
            elif PLAN.swap:
                total = tl.dot(y, x.T, total)
            else:
                total = tl.dot(x, y.T, total)

        if PLAN.swap:
            total = total.T
        if PLAN.scaling == "tensor":
            total = total * (tl.load(scale_a) * tl.load(scale_b))
        elif PLAN.scaling == "vectors":
            by_row = tl.load(scale_a + rows * scale_a_stride_m, mask=rows < m, other=0.0)
            by_column = tl.load(scale_b + columns * scale_b_stride_n, mask=columns < n, other=0.0)
            total = (total * by_column[None, :]) * by_row[:, None]
        if PLAN.bias == "vector":
            total = total + tl.load(bias + columns, mask=columns < n, other=0.0)[None, :]
        elif PLAN.bias == "matrix":
            total = total + tl.load(bias + places, mask=inside, other=0.0)

        if PLAN.bfloat16:
            result = narrowed(total, OUT_CODE, PLAN.hardware)
        else:
            result = total
        if PLAN.out_descriptor:
            out.store([first_m, first_n], result)
        else:
            tl.store(out + places, result, mask=inside)


@triton.jit
def _partial(x, y, SWAP: tl.constexpr):
    """A product from zero."""
    if SWAP:
        partial = tl.dot(y, x.T)
    else:
        partial = tl.dot(x, y.T)
    return partial


@triton.jit
def _place(tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Row and column of a tile.

    Groups of GROUP rows of tiles are walked column by column, so that tiles in flight share
    operands in the L2 cache.
    """
    first = tile // (GROUP * tiles_n) * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    within = tile % (GROUP * tiles_n)
    return first + within % height, within // height


@triton.jit
def _scales(pointers, mask, E8M0: tl.constexpr):
    """float32 scales; E8M0 code c is 2**(c - 127), and 255 NaN."""
    if E8M0:
        code = tl.load(pointers, mask=mask, other=0).to(tl.int32)
        bits = tl.where(code == 0, 0x00400000, code << 23)
        value = float_of(tl.where(code == 255, 0x7FFFFFFF, bits))
    else:
        value = tl.load(pointers, mask=mask, other=0.0)
    return value
