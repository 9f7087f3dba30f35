"""How a warpgroup of the fast matrix product sums up its part of a tile, in Gluon, for sm_90.

Native products are one chain of wgmma, and the next is started before the last has ended. A
promoted one takes 128 of k into a fresh accumulator, a partial sum, which is then added to the
total, with scales of blocks in a fused multiply-add. There are two partials, so that one is in
flight while the other is promoted; with three warpgroups only one fits, and then the tensor core
has the others' wgmma. A wide total has parts, side by side, each as wide as a partial: the rows of
the left operand are kept in registers for all of them, so that shared memory is read once.
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
    """One chain of wgmma over all of K, on from the total, which is one part."""
    STAGES: gl.constexpr = PLAN.stages
    full, empty = rings[4], rings[5]
    stage, phase, release = ring
    total = total[0]
    for step in range(steps):
        mbarrier.wait(full.index(stage), phase)
        left = _rows(GROUP, rings, stage, PLAN)
        total = warpgroup_mma(left, _columns(rings, stage, 0, PLAN), total, is_async=True)
        # The one before has ended, so its stage is free.
        total = warpgroup_mma_wait(1, deps=(total,))
        mbarrier.arrive(empty.index(release), count=1, pred=step > 0)
        release = stage
        stage, phase = next_stage(stage, phase, STAGES)
    total = warpgroup_mma_wait(0, deps=(total,))
    mbarrier.arrive(empty.index(release), count=1, pred=steps > 0)
    return (total,), (stage, phase, stage)


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
def promoted(GROUP: gl.constexpr, total, ring, rings, scales, steps, PLAN: gl.constexpr):
    """Each partial sum added to the total.

    `scales` are what `block_scales` returns.
    """
    DRAIN: gl.constexpr = PLAN.drain
    whole = steps // DRAIN * DRAIN
    # Nothing stays in flight over a loop's back edge: ptxas would serialise every wgmma.
    for step in range(0, whole, DRAIN):
        total, ring = _several(GROUP, total, ring, rings, scales, step, DRAIN, PLAN)
    # What is left, in halves of a drain.
    step = whole
    for part in gl.static_range(1, DRAIN.bit_length()):
        if (steps - whole) & (DRAIN >> part):
            total, ring = _several(GROUP, total, ring, rings, scales, step, DRAIN >> part, PLAN)
            step += DRAIN >> part
    return total, ring


@gluon.jit
def one_by_one(GROUP: gl.constexpr, total, ring, rings, scales, steps, PLAN: gl.constexpr):
    """As `promoted`, with one partial sum, a stage at a time.

    The tensor core has others' wgmma while this warpgroup has none in flight, if that time is
    short: so the stage before is released, and the next one awaited, while there is one.
    """
    STAGES: gl.constexpr = PLAN.stages
    PART: gl.constexpr = PLAN.part
    total = total[0]
    L: gl.constexpr = total.type.layout
    full, empty = rings[4], rings[5]
    stage, phase, release = ring
    mbarrier.wait(full.index(stage), phase, pred=steps > 0)
    for step in range(steps):
        left = _rows(GROUP, rings, stage, PLAN)
        right = _columns(rings, stage, 0, PLAN)
        unused = gl.zeros((GROUP_ROWS, PART), gl.float32, layout=L)
        flying = warpgroup_mma(left, right, unused, use_acc=False, is_async=True)
        by_row, by_column = _scales(GROUP, (step, step), rings, scales, step, stage, 0, L, PLAN)
        mbarrier.arrive(empty.index(release), count=1, pred=step > 0)
        release = stage
        stage, phase = next_stage(stage, phase, STAGES)
        mbarrier.wait(full.index(stage), phase, pred=step + 1 < steps)
        partial = warpgroup_mma_wait(0, deps=(flying,))
        if PLAN.by_column:
            by_column = _column_scales(rings, release, 0, L, PLAN)
        total = _add(total, partial, by_row, by_column, PLAN)
    mbarrier.arrive(empty.index(release), count=1, pred=steps > 0)
    return (total,), (stage, phase, stage)


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
    """The partial sums of SIZE stages added to the total, the next in flight while one is added."""
    STAGES: gl.constexpr = PLAN.stages
    PART: gl.constexpr = PLAN.part
    PARTS: gl.constexpr = PLAN.parts
    COUNT: gl.constexpr = SIZE * PLAN.parts
    L: gl.constexpr = total[0].type.layout
    empty = rings[5]
    stage, phase, release = ring
    # An operand of the wgmma that it ignores. A dead partial in its place below makes the next one
    # live in that one's registers; with zeros ptxas keeps a third set, and spills.
    partial = gl.zeros((GROUP_ROWS, PART), gl.float32, layout=L)
    flying, left, stage, phase = _issue(GROUP, 0, partial, rings, stage, phase, 0, L, PLAN)
    sums = ()
    shared = (step, step)
    for index in gl.static_range(COUNT):
        shared = _scales(
            GROUP, shared, rings, scales, step + index // PARTS, release, index % PARTS, L, PLAN
        )
        by_row, by_column = shared
        if index + 1 < COUNT:
            next_one, left, stage, phase = _issue(
                GROUP, left, partial, rings, stage, phase, index + 1, L, PLAN
            )
            partial = warpgroup_mma_wait(1, deps=(flying,))
            flying = next_one
        else:
            partial = warpgroup_mma_wait(0, deps=(flying,))
        if PLAN.by_column:
            # Only now: these are many registers.
            by_column = _column_scales(rings, release, index % PARTS, L, PLAN)
        sums += (_add(total[index % PARTS], partial, by_row, by_column, PLAN),)  # type: ignore[assignment]
        if index % PARTS + 1 == PARTS:
            total = sums
            sums = ()
            mbarrier.arrive(empty.index(release), count=1)
            release = gl.where(release + 1 == STAGES, 0, release + 1)
    return total, (stage, phase, release)


@gluon.jit
def _rows(GROUP: gl.constexpr, rings, stage, PLAN: gl.constexpr):
    """This warpgroup's rows of the left operand."""
    FIRST: gl.constexpr = GROUP * GROUP_ROWS
    box = rings[0].index(stage * PLAN.boxes + FIRST // PLAN.box)
    return box.slice(FIRST % PLAN.box, GROUP_ROWS, 0)


@gluon.jit
def _columns(rings, stage, PLACE: gl.constexpr, PLAN: gl.constexpr):
    """A part of the right operand, transposed."""
    PART: gl.constexpr = PLAN.part
    return rings[1].index(stage).slice(PLACE * PART, PART, 0).permute((1, 0))


@gluon.jit
def _issue(
    GROUP: gl.constexpr,
    left,
    unused,
    rings,
    stage,
    phase,
    INDEX: gl.constexpr,
    L: gl.constexpr,
    PLAN: gl.constexpr,
):
    """Start the wgmma of a group's INDEX-th part from zero; the first of a stage waits for it, and
    the rows that it finds are kept for the rest.
    """
    STAGES: gl.constexpr = PLAN.stages
    REGISTERS: gl.constexpr = gl.DotOperandLayout(0, L, 4)
    PARTS: gl.constexpr = PLAN.parts
    PLACE: gl.constexpr = INDEX % PARTS
    if PLACE == 0:
        mbarrier.wait(rings[4].index(stage), phase)
        left = _rows(GROUP, rings, stage, PLAN)
        if PARTS > 1:
            left = left.load(REGISTERS)
    right = _columns(rings, stage, PLACE, PLAN)
    flying = warpgroup_mma(left, right, unused, use_acc=False, is_async=True)
    if PLACE + 1 == PARTS:
        stage, phase = next_stage(stage, phase, STAGES)
    return flying, left, stage, phase


@gluon.jit
def _scales(
    GROUP: gl.constexpr,
    before,
    rings,
    scales,
    step,
    stage,
    PLACE: gl.constexpr,
    L: gl.constexpr,
    PLAN: gl.constexpr,
):
    """The scales of rows, and what columns of a part share; vectors have come with the stage.

    `before` are those of the part before, which may be the same. What is not there is a number that
    is not read.
    """
    PART: gl.constexpr = PLAN.part
    left, left_stride, right, right_stride = scales
    by_row, by_column = before
    if PLAN.by_row and PLACE == 0:
        FIRST: gl.constexpr = GROUP * GROUP_ROWS
        rows = rings[2].index(stage * PLAN.boxes + FIRST // PLAN.box).reshape((PLAN.box,))
        by_row = rows.slice(FIRST % PLAN.box, GROUP_ROWS, 0).load(gl.SliceLayout(1, L))
    elif PLAN.scaling == "blocks" and PLACE == 0:
        by_row = gl.load(left + step * left_stride)
    if PLAN.scaling == "blocks" and not PLAN.by_column and PLACE * PART % 128 == 0:
        by_column = gl.load(right[PLACE * PART // 128] + step * right_stride)
    return by_row, by_column


@gluon.jit
def _column_scales(rings, stage, PLACE: gl.constexpr, L: gl.constexpr, PLAN: gl.constexpr):
    """The scales of each column of a part, which have come with the stage."""
    columns = rings[3].index(stage).reshape((rings[3].shape[2],))
    return columns.slice(PLACE * PLAN.part, PLAN.part, 0).load(gl.SliceLayout(0, L))


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
