"""The fast matrix product for sm_90, in Gluon: what runs on the device.

A program per multiprocessor walks the tiles: one warp starts the copies into a ring of stages, and
one or two warpgroups each own 64 rows of the tile and sum them up as
`fp8lab.kernels.matmul_gluon_sums` says. Neither waits for the other: one can be ahead by the stages
of the ring, and then its end of a tile overlaps with the other's products.

The kernel has a left operand, whose rows are wgmma's 64, and a right one, whose rows are wgmma's
columns, 16 and up. They are a and b, or, for a narrow a, b and a: the arithmetic is symmetric, and
only the way out differs.

The bits are those of the plain kernel in `fp8lab.kernels.matmul_device`; nothing here runs in the
interpreter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fp8lab.kernels.matmul_gluon_out import elements, write
from fp8lab.kernels.matmul_gluon_sums import GROUP_ROWS, chained, next_stage, promoted


@dataclass(frozen=True)
class GluonPlan:
    """What is known of a product when its kernel is compiled.

    Attributes:
        rows: Of a tile, 64 for each warpgroup: 64 or 128.
        columns: Of a tile, a power of two, 16 to 256.
        depth: k of a stage: 128, or also 256 where nothing is promoted.
        stages: Stages of the ring.
        group: Tiles that are visited down a column before the next column.
        drain: Partial sums between points where no wgmma is in flight, a power of two; 0 where
            nothing is promoted.
        stagger: Whether the second warpgroup's points lie between those of the first.
        swap: Whether the left operand is b, and the tile is of the result's transpose.
        scaling: As in `ProductPlan`.
        by_row, by_column: For "blocks", whether each row, each column of a tile has its own scale
            of 128 of k; otherwise it is one for the tile.
        squares: For "blocks", whether 128 rows of a, or 128 columns of b, share a scale: then the
            two scales are multiplied first, else the partial sum by a's.
        start, bias, bfloat16: As in `ProductPlan`.
    """

    rows: int
    columns: int
    depth: int
    stages: int
    group: int
    drain: int
    stagger: bool
    swap: bool
    scaling: Literal["none", "tensor", "vectors", "blocks"]
    by_row: bool
    by_column: bool
    squares: bool
    start: bool
    bias: Literal["none", "vector", "matrix"]
    bfloat16: bool

    @property
    def out_columns(self) -> int:
        """Columns of a piece of the result on its way out."""
        return min(64, self.columns)

    @property
    def piece(self) -> list[int]:
        """The shape of such a piece in the result, of one warpgroup."""
        return [self.out_columns, 64] if self.swap else [64, self.out_columns]

    @property
    def scale_columns(self) -> int:
        """Scales of columns in a stage: 128 bytes at least, as the copy engine places them."""
        return max(32, self.columns)

    @property
    def bytes_of_a_stage(self) -> int:
        """What the copy engine brings at a time."""
        scales = self.rows * self.by_row + self.scale_columns * self.by_column
        return (self.rows + self.columns) * self.depth + 4 * scales


# Of the sizes only n decides how memory is reached; the others would only multiply compilations.
@gluon.jit(
    do_not_specialize=[
        "m",
        "k",
        "left_stride",
        "left_stride_k",
        "right_stride",
        "right_stride_k",
    ]
)
def matmul_kernel(
    left_desc,  # (m, k), or (n, k) with `swap`
    right_desc,  # (n, k), or (m, k)
    out_desc,  # (m, n)
    left_scale_desc,  # (k/128, rows): for "blocks", by row; else anything
    right_scale_desc,  # (k/128, columns): for "blocks", by column; else anything
    left_scale,  # for "vectors": one a row; for "blocks": one for each 128
    right_scale,
    bias,
    start,
    m,
    n,
    k,
    left_stride,
    left_stride_k,
    right_stride,
    right_stride_k,
    PLAN: gl.constexpr,
):
    """Every num_programs-th tile a program."""
    STAGES: gl.constexpr = PLAN.stages
    ROWS: gl.constexpr = PLAN.rows
    COLUMNS: gl.constexpr = PLAN.columns
    DEPTH: gl.constexpr = PLAN.depth
    OUT: gl.constexpr = gl.bfloat16 if PLAN.bfloat16 else gl.float32
    GROUPS: gl.constexpr = PLAN.rows // 64
    left = gl.allocate_shared_memory(left_desc.dtype, [STAGES, ROWS, DEPTH], left_desc.layout)
    right = gl.allocate_shared_memory(right_desc.dtype, [STAGES, COLUMNS, DEPTH], right_desc.layout)
    HEIGHT: gl.constexpr = PLAN.piece[0]
    WIDTH: gl.constexpr = PLAN.piece[1]
    out_tiles = gl.allocate_shared_memory(OUT, [2 * GROUPS, HEIGHT, WIDTH], out_desc.layout)
    left_scales = left
    right_scales = right
    if PLAN.by_row:
        left_scales = gl.allocate_shared_memory(
            gl.float32, [STAGES, 1, ROWS], left_scale_desc.layout
        )
    if PLAN.by_column:
        SCALES: gl.constexpr = PLAN.scale_columns
        right_scales = gl.allocate_shared_memory(
            gl.float32, [STAGES, 1, SCALES], right_scale_desc.layout
        )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=GROUPS)  # one arrival from each warpgroup
    # The next kernel may begin to start, and waits here in its turn.
    gdc_wait()
    gdc_launch_dependents()

    rings = (left, right, left_scales, right_scales, full, empty)
    sizes = (m, n, gl.cdiv(k, DEPTH))
    extras = (
        left_scale,
        left_stride,
        left_stride_k,
        right_scale,
        right_stride,
        right_stride_k,
        bias,
        start,
    )
    copied = (left_desc, right_desc, left_scale_desc, right_scale_desc)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_multiply, (0, out_desc, out_tiles, rings, sizes, extras, PLAN)),
                (_copy, (copied, rings, sizes, PLAN)),
            ],
            [1],
            [40],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (0, out_desc, out_tiles, rings, sizes, extras, PLAN)),
                (_multiply, (1, out_desc, out_tiles, rings, sizes, extras, PLAN)),
                (_copy, (copied, rings, sizes, PLAN)),
            ],
            [4, 1],
            [232, 40],
        )


@gluon.jit
def _tiles(sizes, PLAN: gl.constexpr):
    """How many rows and columns of tiles there are."""
    m, n, _ = sizes
    if PLAN.swap:
        counts = gl.cdiv(n, PLAN.rows), gl.cdiv(m, PLAN.columns)
    else:
        counts = gl.cdiv(m, PLAN.rows), gl.cdiv(n, PLAN.columns)
    return counts


@gluon.jit
def _place(tile, tiles_m, tiles_n, PLAN: gl.constexpr):
    """First row and column of a tile: groups of rows of tiles, walked column by column."""
    GROUP: gl.constexpr = PLAN.group
    first = tile // (GROUP * tiles_n) * GROUP
    height = gl.minimum(tiles_m - first, GROUP)
    within = tile % (GROUP * tiles_n)
    return (first + within % height) * PLAN.rows, within // height * PLAN.columns


@gluon.jit
def _copy(copied, rings, sizes, PLAN: gl.constexpr):
    """The producer: operands, and scales of rows and columns, into the ring."""
    left_desc, right_desc, left_scale_desc, right_scale_desc = copied
    STAGES: gl.constexpr = PLAN.stages
    DEPTH: gl.constexpr = PLAN.depth
    BYTES: gl.constexpr = PLAN.bytes_of_a_stage
    left, right, left_scales, right_scales, full, empty = rings
    steps = sizes[2]
    tiles_m, tiles_n = _tiles(sizes, PLAN)
    stage = 0
    phase = 1  # a fresh barrier counts as having completed phase 1
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        row, column = _place(tile, tiles_m, tiles_n, PLAN)
        for step in range(steps):
            ready = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(ready, BYTES)
            tma.async_copy_global_to_shared(
                left_desc, [row, step * DEPTH], ready, left.index(stage)
            )
            tma.async_copy_global_to_shared(
                right_desc, [column, step * DEPTH], ready, right.index(stage)
            )
            if PLAN.by_row:
                tma.async_copy_global_to_shared(
                    left_scale_desc, [step, row], ready, left_scales.index(stage)
                )
            if PLAN.by_column:
                tma.async_copy_global_to_shared(
                    right_scale_desc, [step, column], ready, right_scales.index(stage)
                )
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _multiply(GROUP: gl.constexpr, out_desc, out_tiles, rings, sizes, extras, PLAN: gl.constexpr):
    """A consumer: 64 rows of each tile."""
    COLUMNS: gl.constexpr = PLAN.columns
    L: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 32]
    )
    m, n, steps = sizes
    left_scale, left_stride, left_stride_k, right_scale, right_stride, right_stride_k = extras[:6]
    tiles_m, tiles_n = _tiles(sizes, PLAN)
    # The stage to multiply next with its phase, and the stage to release next.
    ring = (0, 0, 0)
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        row, column = _place(tile, tiles_m, tiles_n, PLAN)
        first = row + GROUP * GROUP_ROWS
        if PLAN.start:
            places, inside = elements(first, column, m, n, COLUMNS, L, PLAN)
            total = gl.load(extras[7] + places, mask=inside, other=0.0)
        else:
            total = gl.zeros((GROUP_ROWS, COLUMNS), gl.float32, layout=L)
        if PLAN.drain:
            scales = (
                left_scale + row // 128 * left_stride,
                left_stride_k,
                right_scale + column // 128 * right_stride,
                right_stride_k,
            )
            total, ring = promoted(GROUP, total, ring, rings, scales, steps, PLAN)
        else:
            total, ring = chained(GROUP, total, ring, rings, steps, PLAN)
        write(GROUP, out_desc, out_tiles, total, first, column, m, n, extras, PLAN)
    tma.store_wait(0)
