"""Scales of blocks in the fast matrix product, and the promotion of a partial sum, in Gluon.

Scales of rows and columns come with a stage through the ring; one for 128 of them is read from
global memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

BAND_ROWS = gl.constexpr(64)  # of one wgmma


@gluon.jit
def block_scales(row, column, m, n, extras, PLAN: gl.constexpr):
    """Where the scales along K lie: of the block of a warpgroup's rows, from `row`, and of each of
    the tile's blocks of columns; with the strides along K. What is not there is never read.
    """
    BLOCKS: gl.constexpr = (PLAN.columns + 127) // 128
    left, left_stride, left_stride_k, right, right_stride, right_stride_k = extras[:6]
    # What lies past the edge is not kept: any scale will do.
    last_row = (n if PLAN.swap else m) - 1
    last = (m if PLAN.swap else n) - 1
    pointers = ()
    for index in gl.static_range(BLOCKS):
        pointers += (right + gl.minimum(column + index * 128, last) // 128 * right_stride,)  # type: ignore[assignment]
    left += gl.minimum(row, last_row) // 128 * left_stride
    return left, left_stride_k, pointers, right_stride_k


@gluon.jit
def step_scales(
    BAND: gl.constexpr,
    before,
    rings,
    scales,
    step,
    stage,
    PLACE: gl.constexpr,
    ALONG: gl.constexpr,
    L: gl.constexpr,
    PLAN: gl.constexpr,
):
    """The scales of rows, and what columns of a part share; vectors have come with the stage.

    `before` are those of the part before, which may be the same. What is not there is a number that
    is not read.
    """
    PART: gl.constexpr = PLAN.part
    # What the bands of a warpgroup share is read with the first.
    FIRST_BAND: gl.constexpr = BAND % PLAN.bands == 0
    left, left_stride, right, right_stride = scales
    by_row, by_column = before
    if PLAN.by_row and PLACE == 0:
        FIRST: gl.constexpr = BAND * BAND_ROWS
        INSIDE: gl.constexpr = ALONG * PLAN.box + FIRST % PLAN.box
        box = rings[2].index(stage * PLAN.boxes + FIRST // PLAN.box)
        rows = box.reshape((PLAN.slices * PLAN.box,))
        by_row = rows.slice(INSIDE, BAND_ROWS, 0).load(gl.SliceLayout(1, L))
    elif PLAN.scaling == "blocks" and PLACE == 0 and FIRST_BAND:
        by_row = gl.load(left + step * left_stride)
    if PLAN.scaling == "blocks" and not PLAN.by_column and PLACE * PART % 128 == 0 and FIRST_BAND:
        by_column = gl.load(right[PLACE * PART // 128] + step * right_stride)
    return by_row, by_column


@gluon.jit
def column_scales(
    rings, stage, PLACE: gl.constexpr, ALONG: gl.constexpr, L: gl.constexpr, PLAN: gl.constexpr
):
    """The scales of each column of a part, which have come with the stage."""
    columns = rings[3].index(stage).reshape((PLAN.slices * PLAN.scale_columns,))
    FIRST: gl.constexpr = ALONG * PLAN.scale_columns + PLACE * PLAN.part
    return columns.slice(FIRST, PLAN.part, 0).load(gl.SliceLayout(0, L))


@gluon.jit
def added(total, partial, by_row, by_column, PLAN: gl.constexpr):
    """One promotion, rounded once.

    Volatile assembly keeps the compiler from sinking the additions below the next wgmma, which
    would keep one more partial alive and spill.
    """
    if PLAN.scaling != "blocks":
        return gl.inline_asm_elementwise(
            "add.rn.f32 $0, $1, $2;",
            "=f,f,f",
            [total, partial],
            gl.float32,
            is_pure=False,
            pack=1,
        )
    elif PLAN.squares:
        return gl.inline_asm_elementwise(
            "fma.rn.f32 $0, $1, $2, $3;",
            "=f,f,f,f",
            [partial, _factor(by_row, by_column, PLAN), total],
            gl.float32,
            is_pure=False,
            pack=1,
        )
    else:
        left = gl.expand_dims(by_row, 1) if PLAN.by_row else by_row
        right = gl.expand_dims(by_column, 0) if PLAN.by_column else by_column
        # First the scales of a, on whichever side it is.
        return gl.inline_asm_elementwise(
            "{ .reg .f32 scaled; mul.rn.f32 scaled, $1, $2; fma.rn.f32 $0, scaled, $3, $4; }",
            "=f,f,f,f,f",
            [partial, right, left, total] if PLAN.swap else [partial, left, right, total],
            gl.float32,
            is_pure=False,
            pack=1,
        )


@gluon.jit
def _factor(by_row, by_column, PLAN: gl.constexpr):
    """The product of both scales, rounded; one of them at most is a vector."""
    if PLAN.by_row:
        return gl.expand_dims(by_row * by_column, 1)
    elif PLAN.by_column:
        return gl.expand_dims(by_row * by_column, 0)
    else:
        return by_row * by_column
