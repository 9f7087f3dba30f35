"""The fast matrix product for sm_90, in Gluon: what runs on the device.

A program per multiprocessor walks the tiles: one warp starts the copies into a ring of stages, and
one to three warpgroups each own 64 rows of the tile, or two own 128, and sum them up as
`fp8lab.kernels.matmul_gluon_sums` says. None waits for another: one can be ahead by the stages of
the ring, and then its end of a tile overlaps with the others' products.

The kernel has a left operand, whose rows are wgmma's 64, and a right one, whose rows are wgmma's
columns, 16 and up. They are a and b, or, for a narrow a, b and a: the arithmetic is symmetric, and
only the way out differs.

The bits are those of the plain kernel in `fp8lab.kernels.matmul_device`; nothing here runs in the
interpreter.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fp8lab.kernels.matmul_gluon_out import elements, write
from fp8lab.kernels.matmul_gluon_promotion import BAND_ROWS, block_scales
from fp8lab.kernels.matmul_gluon_sums import chained, next_stage, one_by_one, promoted


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
    left_scale_desc,  # (blocks of k, rows): for "blocks", by row; else anything
    right_scale_desc,  # (blocks of k, columns): for "blocks", by column; else anything
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
    COLUMNS: gl.constexpr = PLAN.columns
    DEPTH: gl.constexpr = PLAN.depth
    OUT: gl.constexpr = gl.bfloat16 if PLAN.bfloat16 else gl.float32
    GROUPS: gl.constexpr = PLAN.groups
    BOX: gl.constexpr = PLAN.box
    BOXES: gl.constexpr = PLAN.boxes
    left = gl.allocate_shared_memory(
        left_desc.dtype, [STAGES * BOXES, BOX, DEPTH], left_desc.layout
    )
    right = gl.allocate_shared_memory(right_desc.dtype, [STAGES, COLUMNS, DEPTH], right_desc.layout)
    HEIGHT: gl.constexpr = PLAN.piece[0]
    WIDTH: gl.constexpr = PLAN.piece[1]
    out_tiles = gl.allocate_shared_memory(OUT, [2 * GROUPS, HEIGHT, WIDTH], out_desc.layout)
    left_scales = left
    right_scales = right
    if PLAN.by_row:
        left_scales = gl.allocate_shared_memory(
            gl.float32, [STAGES * BOXES, PLAN.slices, BOX], left_scale_desc.layout
        )
    if PLAN.by_column:
        SCALES: gl.constexpr = PLAN.scale_columns
        right_scales = gl.allocate_shared_memory(
            gl.float32, [STAGES, PLAN.slices, SCALES], right_scale_desc.layout
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
    elif GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (0, out_desc, out_tiles, rings, sizes, extras, PLAN)),
                (_multiply, (1, out_desc, out_tiles, rings, sizes, extras, PLAN)),
                (_copy, (copied, rings, sizes, PLAN)),
            ],
            [4, 1],
            [232, 40],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (0, out_desc, out_tiles, rings, sizes, extras, PLAN)),
                (_multiply, (1, out_desc, out_tiles, rings, sizes, extras, PLAN)),
                (_multiply, (2, out_desc, out_tiles, rings, sizes, extras, PLAN)),
                (_copy, (copied, rings, sizes, PLAN)),
            ],
            [4, 4, 1],
            [160, 160, 32],
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
    BOX: gl.constexpr = PLAN.box
    BOXES: gl.constexpr = PLAN.boxes
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
            for box in gl.static_range(BOXES):
                tma.async_copy_global_to_shared(
                    left_desc,
                    [row + box * BOX, step * DEPTH],
                    ready,
                    left.index(stage * BOXES + box),
                )
            tma.async_copy_global_to_shared(
                right_desc, [column, step * DEPTH], ready, right.index(stage)
            )
            if PLAN.by_row:
                for box in gl.static_range(BOXES):
                    tma.async_copy_global_to_shared(
                        left_scale_desc,
                        [step * PLAN.slices, row + box * BOX],
                        ready,
                        left_scales.index(stage * BOXES + box),
                    )
            if PLAN.by_column:
                tma.async_copy_global_to_shared(
                    right_scale_desc, [step * PLAN.slices, column], ready, right_scales.index(stage)
                )
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _multiply(GROUP: gl.constexpr, out_desc, out_tiles, rings, sizes, extras, PLAN: gl.constexpr):
    """A consumer: one or two bands of 64 rows of each tile."""
    PART: gl.constexpr = PLAN.part
    PARTS: gl.constexpr = PLAN.parts
    BANDS: gl.constexpr = PLAN.bands
    L: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, PART, 32]
    )
    m, n, steps = sizes
    tiles_m, tiles_n = _tiles(sizes, PLAN)
    # The stage to multiply next with its phase, and the stage to release next.
    ring = (0, 0, 0)
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        row, column = _place(tile, tiles_m, tiles_n, PLAN)
        first = row + GROUP * BANDS * BAND_ROWS
        way_out = (out_desc, out_tiles, first, column, m, n, extras)
        total = ()
        for index in gl.static_range(BANDS * PARTS):
            if PLAN.start:
                band = first + index // PARTS * BAND_ROWS
                place = column + index % PARTS * PART
                places, inside = elements(band, place, m, n, PART, L, PLAN)
                total += (gl.load(extras[7] + places, mask=inside, other=0.0),)  # type: ignore[assignment]
            else:
                total += (gl.zeros((BAND_ROWS, PART), gl.float32, layout=L),)  # type: ignore[assignment]
        if PLAN.drain:
            scales = block_scales(first, column, m, n, extras, PLAN)
            if PLAN.partials == 1:
                total, ring = one_by_one(GROUP, total, ring, rings, scales, steps, way_out, PLAN)
            else:
                total, ring = promoted(GROUP, total, ring, rings, scales, steps, PLAN)
        else:
            total, ring = chained(GROUP, total, ring, rings, steps, PLAN)
        if PLAN.early:
            if steps == 0:
                write(GROUP, total[:1], 0, way_out, PLAN)
            write(GROUP, total[1:], 1, way_out, PLAN)
        else:
            write(GROUP, total, 0, way_out, PLAN)
    tma.store_wait(0)
