"""How a warpgroup of the fast matrix product sums up its part of a tile, in Gluon, for sm_90.

Native products are one chain of wgmma, and the next is started before the last has ended. A
promoted one takes 128 of k, or a slice of 32 or 64 of a stage, into a fresh accumulator, a partial
sum, which is then added to the total, with scales of blocks in a fused multiply-add. There are two
partials, so that one is in flight while the other is promoted; with three warpgroups, or two of two
bands, only one fits, and then the tensor core has the others' wgmma. A wide total has parts, side
by side, each as wide as a partial: the rows of the left operand are kept in registers for all of
them, so that shared memory is read once. A high total has bands, one below the other.

The last stage may have slices that lie beyond K. Operands are zeros there, and so is the partial:
without scales, +0 is added to a total that no partial has left at -0; scales of such slices make it
-0 (`fp8lab.kernels.matmul_gluon_scales`), which changes no total.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fp8lab.kernels.matmul_gluon_out import write
from fp8lab.kernels.matmul_gluon_promotion import BAND_ROWS, added, column_scales, step_scales


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
        left = _rows(GROUP, rings, stage, 0, PLAN)
        total = warpgroup_mma(left, _columns(rings, stage, 0, 0, PLAN), total, is_async=True)
        # The one before has ended, so its stage is free.
        total = warpgroup_mma_wait(1, deps=(total,))
        mbarrier.arrive(empty.index(release), count=1, pred=step > 0)
        release = stage
        stage, phase = next_stage(stage, phase, STAGES)
    total = warpgroup_mma_wait(0, deps=(total,))
    mbarrier.arrive(empty.index(release), count=1, pred=steps > 0)
    return (total,), (stage, phase, stage)


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
def one_by_one(GROUP: gl.constexpr, total, ring, rings, scales, steps, way_out, PLAN: gl.constexpr):
    """As `promoted`, with one partial sum at a time, of one band.

    The tensor core has others' wgmma while this warpgroup has none in flight, if that time is
    short: so the stage before is released, and the next one awaited, while there is one. The end of
    the tile is longer: if `early`, a band that is complete is written before the last one is.
    """
    STAGES: gl.constexpr = PLAN.stages
    PART: gl.constexpr = PLAN.part
    BANDS: gl.constexpr = PLAN.bands
    SLICES: gl.constexpr = PLAN.slices
    L: gl.constexpr = total[0].type.layout
    full, empty = rings[4], rings[5]
    stage, phase, release = ring
    mbarrier.wait(full.index(stage), phase, pred=steps > 0)
    for step in range(steps):
        # As in `_several`.
        partial = gl.zeros((BAND_ROWS, PART), gl.float32, layout=L)
        for along in gl.static_range(SLICES):
            sums = ()
            shared = (step, step)
            for band in gl.static_range(BANDS):
                left = _rows(GROUP * BANDS + band, rings, stage, along, PLAN)
                right = _columns(rings, stage, 0, along, PLAN)
                flying = warpgroup_mma(left, right, partial, use_acc=False, is_async=True)
                shared = step_scales(
                    GROUP * BANDS + band, shared, rings, scales, step, stage, 0, along, L, PLAN
                )
                by_row, by_column = shared
                if along == 0 and band == 0:
                    mbarrier.arrive(empty.index(release), count=1, pred=step > 0)
                    release = stage
                if along + 1 == SLICES and band + 1 == BANDS:
                    stage, phase = next_stage(stage, phase, STAGES)
                    mbarrier.wait(full.index(stage), phase, pred=step + 1 < steps)
                    if PLAN.early:  # noqa: SIM102 (decided when it is compiled)
                        if step + 1 == steps:
                            write(GROUP, sums, 0, way_out, PLAN)
                partial = warpgroup_mma_wait(0, deps=(flying,))
                if PLAN.by_column:
                    by_column = column_scales(rings, release, 0, along, L, PLAN)
                sums += (added(total[band], partial, by_row, by_column, PLAN),)  # type: ignore[assignment]
            total = sums
    mbarrier.arrive(empty.index(release), count=1, pred=steps > 0)
    return total, (stage, phase, stage)


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
    SLICES: gl.constexpr = PLAN.slices
    COUNT: gl.constexpr = SIZE * PLAN.slices * PLAN.parts
    L: gl.constexpr = total[0].type.layout
    empty = rings[5]
    stage, phase, release = ring
    # An operand of the wgmma that it ignores. A dead partial in its place below makes the next one
    # live in that one's registers; with zeros ptxas keeps a third set, and spills.
    partial = gl.zeros((BAND_ROWS, PART), gl.float32, layout=L)
    flying, left, stage, phase = _issue(GROUP, 0, partial, rings, stage, phase, 0, L, PLAN)
    sums = ()
    shared = (step, step)
    for index in gl.static_range(COUNT):
        shared = step_scales(
            GROUP,
            shared,
            rings,
            scales,
            step + index // (PARTS * SLICES),
            release,
            index % PARTS,
            index // PARTS % SLICES,
            L,
            PLAN,
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
            by_column = column_scales(
                rings, release, index % PARTS, index // PARTS % SLICES, L, PLAN
            )
        sums += (added(total[index % PARTS], partial, by_row, by_column, PLAN),)  # type: ignore[assignment]
        if index % PARTS + 1 == PARTS:
            total = sums
            sums = ()
            if index // PARTS % SLICES + 1 == SLICES:
                mbarrier.arrive(empty.index(release), count=1)
                release = gl.where(release + 1 == STAGES, 0, release + 1)
    return total, (stage, phase, release)


@gluon.jit
def _rows(BAND: gl.constexpr, rings, stage, ALONG: gl.constexpr, PLAN: gl.constexpr):
    """A band of the left operand, in a slice along K."""
    FIRST: gl.constexpr = BAND * BAND_ROWS
    box = rings[0].index(stage * PLAN.boxes + FIRST // PLAN.box)
    rows = box.slice(FIRST % PLAN.box, BAND_ROWS, 0)
    if PLAN.slices > 1:
        rows = rows.slice(ALONG * PLAN.length, PLAN.length, 1)
    return rows


@gluon.jit
def _columns(rings, stage, PLACE: gl.constexpr, ALONG: gl.constexpr, PLAN: gl.constexpr):
    """A part of the right operand in a slice along K, transposed."""
    PART: gl.constexpr = PLAN.part
    columns = rings[1].index(stage).slice(PLACE * PART, PART, 0)
    if PLAN.slices > 1:
        columns = columns.slice(ALONG * PLAN.length, PLAN.length, 1)
    return columns.permute((1, 0))


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
    the rows that the first of a slice finds are kept for the rest.
    """
    STAGES: gl.constexpr = PLAN.stages
    REGISTERS: gl.constexpr = gl.DotOperandLayout(0, L, 4)
    PARTS: gl.constexpr = PLAN.parts
    PLACE: gl.constexpr = INDEX % PARTS
    SLICES: gl.constexpr = PLAN.slices
    ALONG: gl.constexpr = INDEX // PARTS % SLICES
    if PLACE == 0:
        if ALONG == 0:
            mbarrier.wait(rings[4].index(stage), phase)
        left = _rows(GROUP, rings, stage, ALONG, PLAN)
        if PARTS > 1:
            left = left.load(REGISTERS)
    right = _columns(rings, stage, PLACE, ALONG, PLAN)
    flying = warpgroup_mma(left, right, unused, use_acc=False, is_async=True)
    if PLACE + 1 == PARTS and ALONG + 1 == SLICES:
        stage, phase = next_stage(stage, phase, STAGES)
    return flying, left, stage, phase
