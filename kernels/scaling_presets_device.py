"""The kernels of delayed scaling by other stacks' rules: TENSORS tensors a program.

Both roll the history upwards: slot i moves to i + 1. In place, what a thread stores is what others
load, so that all loads of a piece come before its stores, and the pieces go downwards.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp8lab.kernels.casting_arithmetic import (
    INFINITY,
    MAGNITUDE,
    as_bits,
    as_floats,
    as_words,
)
from fp8lab.kernels.scaling_arithmetic import ONE, SMALLEST_SCALE, inverse_of_scale

_TORCHAO_EPS = tl.constexpr(1e-12)


@triton.jit(do_not_specialize=["n", "margin"])
def step_torchao_kernel(
    scale,  # (n,)
    history,  # (LENGTH, n)
    scale_after,  # the same place as scale, or another; so with history
    history_after,
    used,  # (n,) the scales of this step's cast
    amax,  # (n,)
    n,
    margin,  # 0: there is none
    TOP: tl.constexpr,
    WARM_UP: tl.constexpr,
    LENGTH: tl.constexpr,
    TENSORS: tl.constexpr,  # tensors a program
    SLOTS: tl.constexpr,  # slots at a time
):
    """The scale from the history with this amax in slot 0; after rolling in warm-up, twice."""
    tensor = tl.program_id(0).to(tl.int64) * TENSORS + tl.arange(0, TENSORS)
    here = tensor < n
    seen = tl.load(as_words(amax) + tensor, mask=here, other=0) & MAGNITUDE
    kept = tl.load(as_words(scale) + tensor, mask=here, other=ONE)
    # The last slot rolls out before the next scale is made; in warm-up slot 0 is this amax already.
    first = tl.load(as_words(history) + tensor, mask=here, other=0)
    if WARM_UP:
        first = seen
    older = _largest(history, tensor, here, n, 1, LENGTH - 1, TENSORS, SLOTS)
    before = kept
    if WARM_UP:
        last = tl.load(as_words(history) + (LENGTH - 1) * n + tensor, mask=here, other=0)
        if LENGTH == 1:
            last = seen
        before = _torchao_scale(tl.maximum(tl.maximum(seen, older), last), TOP)
    largest = tl.maximum(seen, older)
    if LENGTH > 1:
        largest = tl.maximum(largest, first)
    after = _torchao_scale(largest, TOP)
    _roll(history, history_after, tensor, here, n, seen, first, LENGTH, TENSORS, SLOTS)
    tl.store(as_words(used) + tensor, before, mask=here)
    tl.store(as_words(scale_after) + tensor, after, mask=here)


@triton.jit(do_not_specialize=["n", "margin"])
def step_ms_amp_kernel(
    scale,
    history,
    scale_after,
    history_after,
    used,
    amax,
    n,
    margin,
    TOP: tl.constexpr,
    WARM_UP: tl.constexpr,
    LENGTH: tl.constexpr,
    TENSORS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """The next scale from all slots, this amax in slot 0 (0 for Inf and NaN); then slot 0 is 0."""
    tensor = tl.program_id(0).to(tl.int64) * TENSORS + tl.arange(0, TENSORS)
    here = tensor < n
    seen = tl.load(as_words(amax) + tensor, mask=here, other=0) & MAGNITUDE
    before = tl.load(as_words(scale) + tensor, mask=here, other=ONE)
    if WARM_UP or LENGTH == 1:
        own = _ms_amp_scale(seen, before, 0, TOP)
        before = tl.where(seen == INFINITY, inverse_of_scale(before), own)
    finite = tl.where(seen < INFINITY, seen, 0)
    older = _largest(history, tensor, here, n, 1, LENGTH, TENSORS, SLOTS)
    after = _ms_amp_scale(tl.maximum(finite, older), before, margin, TOP)
    _roll(history, history_after, tensor, here, n, finite * 0, finite, LENGTH, TENSORS, SLOTS)
    tl.store(as_words(used) + tensor, before, mask=here)
    tl.store(as_words(scale_after) + tensor, after, mask=here)


@triton.jit
def _largest(
    history,
    tensor,
    here,
    n,
    FIRST: tl.constexpr,
    END: tl.constexpr,
    TENSORS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """The largest of slots FIRST to END, without END: 0 where there is none. Bit patterns are in
    the order of magnitudes, NaN above all.
    """
    largest = tl.full([TENSORS], 0, tl.int32)
    for start in range(FIRST, END, SLOTS):
        slot = start + tl.arange(0, SLOTS)[:, None]
        places = as_words(history) + slot.to(tl.int64) * n + tensor[None, :]
        words = tl.load(places, mask=(slot < END) & here[None, :], other=0)
        largest = tl.maximum(largest, tl.max(words, axis=0))
    return largest


@triton.jit
def _roll(
    history,
    history_after,
    tensor,
    here,
    n,
    slot0,  # what the slots 0 and 1 become
    slot1,
    LENGTH: tl.constexpr,
    TENSORS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    PIECES: tl.constexpr = (LENGTH + SLOTS - 1) // SLOTS
    # What was loaded of slots that are stored to.
    tl.debug_barrier()
    for piece in range(PIECES):
        slot = (PIECES - 1 - piece) * SLOTS + tl.arange(0, SLOTS)[:, None]
        inside = (slot < LENGTH) & here[None, :]
        below = as_words(history) + (slot - 1).to(tl.int64) * n + tensor[None, :]
        words = tl.load(below, mask=inside & (slot > 1), other=0)
        words = tl.where(slot == 0, slot0[None, :], words)
        words = tl.where(slot == 1, slot1[None, :], words)
        tl.debug_barrier()
        places = as_words(history_after) + slot.to(tl.int64) * n + tensor[None, :]
        tl.store(places, words, mask=inside)
        tl.debug_barrier()


@triton.jit
def _torchao_scale(largest, TOP: tl.constexpr):
    """As torchao makes a scale: in float64, nothing guarded."""
    wide = as_floats(largest).to(tl.float64)
    eps = tl.full(largest.shape, _TORCHAO_EPS, tl.float64)
    # NaN compares as false and stays.
    wide = tl.where(wide < eps, eps, wide)
    found = as_bits((tl.full(largest.shape, TOP, tl.float64) / wide).to(tl.float32))
    return tl.where(largest > INFINITY, MAGNITUDE, found)


@triton.jit
def _ms_amp_scale(largest, before, margin, TOP: tl.constexpr):
    """2**(floor(log2(top / largest)) - margin), `before` where largest is 0, Inf or NaN."""
    top = tl.full(largest.shape, TOP, tl.float32)
    # A finite quotient is never subnormal: the top is at least 240.
    quotient = as_bits(tl.div_rn(top, as_floats(largest)))
    field = (quotient >> 23) - margin
    scale = tl.where(field == 0, SMALLEST_SCALE, field << 23)
    scale = tl.where(field < 0, 0, scale)
    scale = tl.where(quotient == INFINITY, INFINITY, scale)
    return tl.where((largest > 0) & (largest < INFINITY), scale, before)
