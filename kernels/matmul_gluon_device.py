"""The fast promoted matrix product for sm_90, in Gluon: what runs on the device.

A program per multiprocessor walks the tiles with three partitions: one warp starts the copies into
a ring of stages, and two warpgroups each own 64 rows of the tile. A partial sum is one wgmma of
64x128 over 128 of k into a fresh accumulator; it is then added to the total, or, with scales of
blocks, total = fma(partial, scale_a * scale_b, total). Each warpgroup has two partials, so that the
next one is in flight while this one is promoted.

The bits are those of the plain kernel in `fp8lab.kernels.matmul_device`; nothing here runs in the
interpreter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# The barrier of one partition's warps has another name from Triton 3.7 on.
_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier

BLOCK_M = 128
BLOCK_N = 128
BLOCK_K = 128  # k between promotions
_ROWS = gl.constexpr(64)  # of one warpgroup
_BM = gl.constexpr(BLOCK_M)
_BN = gl.constexpr(BLOCK_N)
_BK = gl.constexpr(BLOCK_K)


@dataclass(frozen=True)
class GluonPlan:
    """What is known of a product when its kernel is compiled.

    Attributes:
        stages: Stages of the ring; each holds 128x128 of both operands.
        group_m: Tiles that are visited down a column before the next column.
        drain: Partials between points where no wgmma is in flight; a power of two.
        scaling: As in `ProductPlan`. "blocks" are 1x128 of a by 128x128 of b.
        start, bias, bfloat16: As in `ProductPlan`.
    """

    stages: int
    group_m: int
    drain: int
    scaling: Literal["none", "tensor", "vectors", "blocks"]
    start: bool
    bias: Literal["none", "vector", "matrix"]
    bfloat16: bool


# Of the sizes only n decides how memory is reached; the others would only multiply compilations.
@gluon.jit(
    do_not_specialize=[
        "m",
        "k",
        "scale_a_stride_m",
        "scale_b_stride_k",
        "scale_b_stride_n",
    ]
)
def matmul_kernel(
    a_desc,  # (m, k)
    b_desc,  # (n, k)
    out_desc,  # (m, n)
    scale_desc,  # (k/128, m): scales of a, for "blocks"; else anything
    scale_a,  # for "vectors": one a row
    scale_b,  # for "vectors": one a column; for "blocks": one a 128x128
    bias,
    start,
    m,
    n,
    k,
    scale_a_stride_m,
    scale_b_stride_k,
    scale_b_stride_n,
    PLAN: gl.constexpr,
):
    """Every num_programs-th tile a program."""
    STAGES: gl.constexpr = PLAN.stages
    OUT: gl.constexpr = gl.bfloat16 if PLAN.bfloat16 else gl.float32
    a_ring = gl.allocate_shared_memory(a_desc.dtype, [STAGES, _BM, _BK], a_desc.layout)
    b_ring = gl.allocate_shared_memory(b_desc.dtype, [STAGES, _BN, _BK], b_desc.layout)
    out_tiles = gl.allocate_shared_memory(OUT, [2, _ROWS, _BN], out_desc.layout)
    if PLAN.scaling == "blocks":
        s_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 1, _BM], scale_desc.layout)
    else:
        s_ring = a_ring
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)  # one arrival from each warpgroup

    rings = (a_ring, b_ring, s_ring, full, empty)
    sizes = (m, n, gl.cdiv(k, _BK))
    extras = (
        scale_a,
        scale_b,
        bias,
        start,
        scale_a_stride_m,
        scale_b_stride_k,
        scale_b_stride_n,
    )
    gl.warp_specialize(
        [
            (_multiply, (0, out_desc, out_tiles, rings, sizes, extras, PLAN)),
            (_multiply, (1, out_desc, out_tiles, rings, sizes, extras, PLAN)),
            (_copy, (a_desc, b_desc, scale_desc, rings, sizes, PLAN)),
        ],
        [4, 1],
        [216, 72],
    )


@gluon.jit
def _place(tile, tiles_m, tiles_n, GROUP: gl.constexpr):
    """Row and column of a tile: groups of GROUP rows of tiles, walked column by column."""
    first = tile // (GROUP * tiles_n) * GROUP
    height = gl.minimum(tiles_m - first, GROUP)
    within = tile % (GROUP * tiles_n)
    return first + within % height, within // height


@gluon.jit
def _next(stage, phase, STAGES: gl.constexpr):
    stage += 1
    if stage == STAGES:
        stage = 0
        phase = phase ^ 1
    return stage, phase


@gluon.jit
def _copy(a_desc, b_desc, scale_desc, rings, sizes, PLAN: gl.constexpr):
    """The producer: operands, and scales of a, into the ring."""
    GROUP: gl.constexpr = PLAN.group_m
    STAGES: gl.constexpr = PLAN.stages
    SCALES: gl.constexpr = _BM * 4 if PLAN.scaling == "blocks" else 0
    BYTES: gl.constexpr = (_BM + _BN) * _BK + SCALES
    a_ring, b_ring, s_ring, full, empty = rings
    m, n, steps = sizes
    tiles_m = gl.cdiv(m, _BM)
    tiles_n = gl.cdiv(n, _BN)
    stage = 0
    phase = 1  # a fresh barrier counts as having completed phase 1
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = _place(tile, tiles_m, tiles_n, GROUP)
        for step in range(steps):
            ready = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(ready, BYTES)
            tma.async_copy_global_to_shared(
                a_desc, [tile_m * _BM, step * _BK], ready, a_ring.index(stage)
            )
            tma.async_copy_global_to_shared(
                b_desc, [tile_n * _BN, step * _BK], ready, b_ring.index(stage)
            )
            if PLAN.scaling == "blocks":
                tma.async_copy_global_to_shared(
                    scale_desc, [step, tile_m * _BM], ready, s_ring.index(stage)
                )
            stage, phase = _next(stage, phase, STAGES)


@gluon.jit
def _multiply(HALF: gl.constexpr, out_desc, out_tiles, rings, sizes, extras, PLAN: gl.constexpr):
    """A consumer: the 64 rows of each tile that start at 64 * HALF."""
    GROUP: gl.constexpr = PLAN.group_m
    DRAIN: gl.constexpr = PLAN.drain
    L: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32]
    )
    m, n, steps = sizes
    scale_a, scale_b, bias, start, scale_a_stride_m, scale_b_stride_k, scale_b_stride_n = extras
    tiles_m = gl.cdiv(m, _BM)
    tiles_n = gl.cdiv(n, _BN)
    whole = steps // DRAIN * DRAIN
    # The stage to multiply next with its phase, and the stage to release next.
    ring = (0, 0, 0)
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = _place(tile, tiles_m, tiles_n, GROUP)
        first_m = tile_m * _BM + HALF * _ROWS
        first_n = tile_n * _BN
        rows = first_m + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, L))
        columns = first_n + gl.arange(0, _BN, layout=gl.SliceLayout(0, L))
        rows_in = rows < m
        columns_in = columns < n
        inside = gl.expand_dims(rows_in, 1) & gl.expand_dims(columns_in, 0)
        places = gl.expand_dims(rows.to(gl.int64) * n, 1) + gl.expand_dims(columns, 0)
        if PLAN.start:
            total = gl.load(start + places, mask=inside, other=0.0)
        else:
            total = gl.zeros((_ROWS, _BN), gl.float32, layout=L)

        b_scales = scale_b + tile_n * scale_b_stride_n
        # Nothing stays in flight over a loop's back edge: ptxas would serialise every wgmma.
        for step in range(0, whole, DRAIN):
            total, ring = _promoted(
                HALF, total, ring, rings, b_scales, scale_b_stride_k, step, DRAIN, L, PLAN
            )
        # What is left, in halves of a drain.
        step = whole
        for part in gl.static_range(1, DRAIN.bit_length()):
            if steps & (DRAIN >> part):
                total, ring = _promoted(
                    HALF,
                    total,
                    ring,
                    rings,
                    b_scales,
                    scale_b_stride_k,
                    step,
                    DRAIN >> part,
                    L,
                    PLAN,
                )
                step += DRAIN >> part

        if PLAN.scaling == "tensor":
            total = total * (gl.load(scale_a) * gl.load(scale_b))
        elif PLAN.scaling == "vectors":
            by_row = gl.load(scale_a + rows * scale_a_stride_m, mask=rows_in, other=0.0)
            by_column = gl.load(scale_b + columns * scale_b_stride_n, mask=columns_in, other=0.0)
            total = (total * gl.expand_dims(by_column, 0)) * gl.expand_dims(by_row, 1)
        if PLAN.bias == "vector":
            added = gl.load(bias + columns, mask=columns_in, other=0.0)
            total = total + gl.expand_dims(added, 0)
        elif PLAN.bias == "matrix":
            total = total + gl.load(bias + places, mask=inside, other=0.0)

        tma.store_wait(0)  # the buffer holds the tile before
        _barrier()
        out_tile = out_tiles.index(HALF)
        out_tile.store(total.to(out_desc.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(out_desc, [first_m, first_n], out_tile)
    tma.store_wait(0)


@gluon.jit
def _promoted(
    HALF: gl.constexpr,
    total,
    ring,
    rings,
    b_scales,
    scale_b_stride_k,
    step,
    SIZE: gl.constexpr,
    L: gl.constexpr,
    PLAN: gl.constexpr,
):
    """SIZE partial sums added to the total, the next in flight while one is added."""
    STAGES: gl.constexpr = PLAN.stages
    a_ring, b_ring, s_ring, full, empty = rings
    stage, phase, release = ring
    # An operand of the wgmma that it ignores. A dead partial in its place below makes the next one
    # live in that one's registers; with zeros ptxas keeps a third set, and spills.
    partial = gl.zeros((_ROWS, _BN), gl.float32, layout=L)
    flying = _issue(HALF, partial, a_ring, b_ring, full, stage, phase)
    stage, phase = _next(stage, phase, STAGES)
    factor = gl.zeros((_ROWS,), gl.float32, layout=gl.SliceLayout(1, L))
    for index in gl.static_range(SIZE):
        if PLAN.scaling == "blocks":
            # The row scales have come with the stage.
            halves = s_ring.index(release).reshape((_BM,))
            by_row = halves.slice(HALF * _ROWS, _ROWS, 0).load(gl.SliceLayout(1, L))
            factor = by_row * gl.load(b_scales + (step + index) * scale_b_stride_k)
        if index + 1 < SIZE:
            next_one = _issue(HALF, partial, a_ring, b_ring, full, stage, phase)
            stage, phase = _next(stage, phase, STAGES)
            partial = warpgroup_mma_wait(1, deps=(flying,))
            flying = next_one
        else:
            partial = warpgroup_mma_wait(0, deps=(flying,))
        mbarrier.arrive(empty.index(release), count=1)
        release = gl.where(release + 1 == STAGES, 0, release + 1)
        total = _add(total, partial, factor, PLAN)
    return total, (stage, phase, release)


@gluon.jit
def _issue(HALF: gl.constexpr, unused, a_ring, b_ring, full, stage, phase):
    """Wait for a stage and start its wgmma from zero."""
    mbarrier.wait(full.index(stage), phase)
    a = a_ring.index(stage).slice(HALF * _ROWS, _ROWS, 0)
    b = b_ring.index(stage).permute((1, 0))
    return warpgroup_mma(a, b, unused, use_acc=False, is_async=True)


@gluon.jit
def _add(total, partial, factor, PLAN: gl.constexpr):
    """One promotion, rounded once.

    Volatile assembly keeps the compiler from sinking the additions below the next wgmma, which
    would keep one more partial alive and spill.
    """
    if PLAN.scaling == "blocks":
        result = gl.inline_asm_elementwise(
            "fma.rn.f32 $0, $1, $2, $3;",
            "=f,f,f,f",
            [partial, gl.expand_dims(factor, 1), total],
            gl.float32,
            is_pure=False,
            pack=1,
        )
    else:
        result = gl.inline_asm_elementwise(
            "add.rn.f32 $0, $1, $2;",
            "=f,f,f",
            [total, partial],
            gl.float32,
            is_pure=False,
            pack=1,
        )
    return result
