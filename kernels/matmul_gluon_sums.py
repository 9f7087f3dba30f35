"""How a warpgroup of the fast matrix product sums up its part of a tile, in Gluon, for sm_90.

Native products are one chain of wgmma, and the next is started before the last has ended. A
promoted one takes 128 of k into a fresh accumulator, a partial sum, which is then added to the
total, with scales of blocks in a fused multiply-add. There are two partials, so that one is in
flight while the other is promoted.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

GROUP_ROWS = gl.constexpr(64)  # of one warpgroup


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """The stage of the ring after this one; the phase flips at its end."""
    stage += 1
    if stage == STAGES:
        stage = 0
        phase = phase ^ 1
    return stage, phase


@gluon.jit
def chained(GROUP: gl.constexpr, total, ring, rings, steps, PLAN: gl.constexpr):
    """One chain of wgmma over all of K, on from the total."""
    STAGES: gl.constexpr = PLAN.stages
    full, empty = rings[4], rings[5]
    stage, phase, release = ring
    for step in range(steps):
        mbarrier.wait(full.index(stage), phase)
        left, right = _operands(GROUP, rings, stage)
        total = warpgroup_mma(left, right, total, is_async=True)
        # The one before has ended, so its stage is free.
        total = warpgroup_mma_wait(1, deps=(total,))
        mbarrier.arrive(empty.index(release), count=1, pred=step > 0)
        release = stage
        stage, phase = next_stage(stage, phase, STAGES)
    total = warpgroup_mma_wait(0, deps=(total,))
    mbarrier.arrive(empty.index(release), count=1, pred=steps > 0)
    return total, (stage, phase, stage)


@gluon.jit
def promoted(GROUP: gl.constexpr, total, ring, rings, scales, steps, PLAN: gl.constexpr):
    """Each partial sum added to the total.

    `scales` are pointers to the scales of this tile's block of rows and block of columns, each with
    its stride along K; what is not there is never read.
    """
    DRAIN: gl.constexpr = PLAN.drain
    first = 0
    if PLAN.stagger and GROUP == 1:  # noqa: SIM102 (known when it is compiled; the next is not)
        # So that the two warpgroups do not drain at the same time.
        if steps >= DRAIN // 2:
            total, ring = _several(GROUP, total, ring, rings, scales, 0, DRAIN // 2, PLAN)
            first = DRAIN // 2
    whole = first + (steps - first) // DRAIN * DRAIN
    # Nothing stays in flight over a loop's back edge: ptxas would serialise every wgmma.
    for step in range(first, whole, DRAIN):
        total, ring = _several(GROUP, total, ring, rings, scales, step, DRAIN, PLAN)
    # What is left, in halves of a drain.
    step = whole
    for part in gl.static_range(1, DRAIN.bit_length()):
        if (steps - whole) & (DRAIN >> part):
            total, ring = _several(GROUP, total, ring, rings, scales, step, DRAIN >> part, PLAN)
            step += DRAIN >> part
    return total, ring


@gluon.jit
def _several(
    GROUP: gl.constexpr,
    total,
    ring,
    rings,
    scales,
    step,
    SIZE: gl.constexpr,
    PLAN: gl.constexpr,
):
    """SIZE partial sums added to the total, the next in flight while one is added."""
    STAGES: gl.constexpr = PLAN.stages
    COLUMNS: gl.constexpr = PLAN.columns
    L: gl.constexpr = total.type.layout
    empty = rings[5]
    stage, phase, release = ring
    # An operand of the wgmma that it ignores. A dead partial in its place below makes the next one
    # live in that one's registers; with zeros ptxas keeps a third set, and spills.
    partial = gl.zeros((GROUP_ROWS, COLUMNS), gl.float32, layout=L)
    flying = _issue(GROUP, partial, rings, stage, phase)
    stage, phase = next_stage(stage, phase, STAGES)
    for index in gl.static_range(SIZE):
        by_row, by_column = _scales(GROUP, rings, scales, step + index, release, total, PLAN)
        if index + 1 < SIZE:
            next_one = _issue(GROUP, partial, rings, stage, phase)
            stage, phase = next_stage(stage, phase, STAGES)
            partial = warpgroup_mma_wait(1, deps=(flying,))
            flying = next_one
        else:
            partial = warpgroup_mma_wait(0, deps=(flying,))
        if PLAN.by_column:
            # Only now: these are many registers.
            columns = rings[3].index(release).reshape((rings[3].shape[2],))
            by_column = columns.slice(0, COLUMNS, 0).load(gl.SliceLayout(0, L))
        total = _add(total, partial, by_row, by_column, PLAN)
        mbarrier.arrive(empty.index(release), count=1)
        release = gl.where(release + 1 == STAGES, 0, release + 1)
    return total, (stage, phase, release)


@gluon.jit
def _operands(GROUP: gl.constexpr, rings, stage):
    """This warpgroup's rows of the left operand, and all of the right one, transposed."""
    left = rings[0].index(stage).slice(GROUP * GROUP_ROWS, GROUP_ROWS, 0)
    return left, rings[1].index(stage).permute((1, 0))


@gluon.jit
def _issue(GROUP: gl.constexpr, unused, rings, stage, phase):
    """Wait for a stage and start its wgmma from zero."""
    mbarrier.wait(rings[4].index(stage), phase)
    left, right = _operands(GROUP, rings, stage)
    return warpgroup_mma(left, right, unused, use_acc=False, is_async=True)


@gluon.jit
def _scales(GROUP: gl.constexpr, rings, scales, step, stage, total, PLAN: gl.constexpr):
    """The scales of rows, and what columns share; vectors have come with the stage.

    What is not there is a number that is not read.
    """
    L: gl.constexpr = total.type.layout
    left, left_stride, right, right_stride = scales
    by_row = step
    by_column = step
    if PLAN.by_row:
        rows = rings[2].index(stage).reshape((rings[2].shape[2],))
        by_row = rows.slice(GROUP * GROUP_ROWS, GROUP_ROWS, 0).load(gl.SliceLayout(1, L))
    elif PLAN.scaling == "blocks":
        by_row = gl.load(left + step * left_stride)
    if PLAN.scaling == "blocks" and not PLAN.by_column:
        by_column = gl.load(right + step * right_stride)
    return by_row, by_column


@gluon.jit
def _add(total, partial, by_row, by_column, PLAN: gl.constexpr):
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
