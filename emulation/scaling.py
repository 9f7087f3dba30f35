"""Scales: amax, the scale it gives, delayed scaling's history, and blocks.

`scale` multiplies when quantising, `inverse_scale` when dequantising. Exponents come from bits,
never from a logarithm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8lab.emulation.casting import quantize
from fp8lab.formats import Float8Format, OverflowPolicy

Array = npt.NDArray[Any]
Float32Array = npt.NDArray[np.float32]
# From the history, shape (L, ...), to the amax that the next scale is made for, shape (...).
AmaxAlgorithm = Callable[[Float32Array], Float32Array]

ALGORITHMS = ("max", "most_recent")
FLT_MAX = np.finfo(np.float32).max


def amax(x: npt.ArrayLike, *, block: tuple[int, int] | None = None) -> Float32Array:
    """The largest magnitude, of everything or of each block.

    Magnitudes are compared as float32 bit patterns without their sign, so that nothing is lost: a
    NaN wins over everything (the one with the largest payload), Inf over every finite value.

    Args:
        x: float32, float16 or bfloat16 (exact), or float64 (rounded to float32 first), any shape.
        block: (rows, columns) of the blocks into which the last two dimensions are cut; the last
            block of a row or column may be smaller. None takes all elements together.

    Returns:
        float32: 0-d without a block, else (..., ceil(M / rows), ceil(N / columns)). Of nothing it
        is 0.

    Raises:
        ValueError: A block dimension below 1, or a block for an array with fewer than 2 dimensions.

    >>> float(amax([1.0, -3.0])), float(amax([1.0, float("inf"), float("nan")]))
    (3.0, nan)
    >>> amax([[1.0, -2.0, 3.0]], block=(1, 2)).tolist()
    [[2.0, 3.0]]
    """
    with np.errstate(all="ignore"):
        values = np.ascontiguousarray(x).astype(np.float32)
    magnitudes = values.view(np.uint32) & np.uint32(0x7FFFFFFF)
    if block is None:
        largest = np.asarray(magnitudes.max(initial=0), dtype=np.uint32)
        return largest.view(np.float32)
    tiles = _tiles(magnitudes, block)
    return np.asarray(tiles.max(axis=(-3, -1), initial=0)).view(np.float32)


def scale_from_amax(
    amax: npt.ArrayLike,
    fmt: Float8Format,
    *,
    margin: int = 0,
    power_of_two: bool = False,
    previous: npt.ArrayLike = 1.0,
) -> Float32Array:
    """The scale that brings `amax` to the top of a format.

    Order, in float32: scaled_max = fmt.max_finite * 2**-margin (exact); scale = scaled_max / amax,
    rounded to nearest even; an infinite scale becomes FLT_MAX; with `power_of_two` the mantissa is
    then cleared (the next power of two toward zero). Where amax is 0, Inf or NaN the scale is
    `previous`. Source: TransformerEngine's delayed scaling (the division comes after the margin:
    the other order overflows earlier).

    Args:
        amax: float32 magnitudes of any shape.
        fmt: The target format.
        margin: Unused headroom in powers of two, an integer, 0 or more.
        power_of_two: Keep sign and exponent of the scale only.
        previous: The scale that stays where amax says nothing; 1 gives current scaling.

    Returns:
        float32 scales of amax's shape, finite and above zero.

    Raises:
        ValueError: A negative margin.

    >>> from fp8lab.formats import E4M3
    >>> float(scale_from_amax(3.5, E4M3)), float(scale_from_amax(0.0, E4M3))
    (128.0, 1.0)
    """
    check_margin(margin)
    with np.errstate(all="ignore"):
        largest = np.asarray(amax).astype(np.float32)
        scaled_max = np.float32(fmt.max_finite * 2.0**-margin)
        scale = np.minimum(scaled_max / largest, FLT_MAX)
        if power_of_two:
            scale = _cleared_mantissa(scale)
        usable = np.isfinite(largest) & (largest > 0)
        kept = np.broadcast_to(np.asarray(previous, dtype=np.float32), largest.shape)
        return np.where(usable, scale, kept).astype(np.float32)


@dataclass(frozen=True)
class DelayedScalingState:
    """What delayed scaling must remember, for one tensor or for many at once.

    Attributes:
        scale: float32, shape (...): the scale that the next cast uses.
        amax_history: float32, shape (L, ...). Slot 0 collects the present step's amax; the slots
            from 1 on hold older ones, the oldest at 1.
    """

    scale: Float32Array
    amax_history: Float32Array

    @classmethod
    def fresh(cls, history: int, shape: tuple[int, ...] = ()) -> DelayedScalingState:
        """Scale 1 and a history of zeros, as TransformerEngine starts."""
        if history < 1:
            raise ValueError(f"history is {history}; accepted: 1 and up")
        return cls(np.ones(shape, np.float32), np.zeros((history, *shape), np.float32))


def record_amax(state: DelayedScalingState, amax: npt.ArrayLike) -> DelayedScalingState:
    """Merge a cast's amax into slot 0: the larger magnitude bit pattern stays (NaN is never lost).

    Args:
        state: The state before the cast.
        amax: float32, not negative, of the shape of state.scale.

    Returns:
        A new state; the given one is not changed.
    """
    history = state.amax_history.copy()
    seen = np.asarray(amax, dtype=np.float32)
    slot = np.maximum(history[0].view(np.uint32), seen.view(np.uint32) & np.uint32(0x7FFFFFFF))
    history[0] = slot.view(np.float32)
    return DelayedScalingState(state.scale, history)


def update_delayed(
    state: DelayedScalingState,
    fmt: Float8Format,
    *,
    margin: int = 0,
    algorithm: str | AmaxAlgorithm = "max",
    power_of_two: bool = False,
    group_amax: npt.ArrayLike | None = None,
) -> DelayedScalingState:
    """Advance delayed scaling by one step, as TransformerEngine does.

    The last amax is slot 0 (or `group_amax`, the maximum of slot 0 over a group of ranks, which is
    put into slot 0 first). Where it is 0, nothing changes: a layer that did not run keeps its
    state. Elsewhere the amax is chosen ("max": the largest bit pattern of all L slots;
    "most_recent": slot 0; or your function of the history), the scale follows by `scale_from_amax`
    with the present scale as `previous`, and the history rolls: slot i + 1 moves to i, slot 0 to
    the end, and slot 0 becomes 0. So the amax of step t is used from step t + 1 on, and the oldest
    is dropped.

    Returns:
        A new state; the given one is not changed.

    Raises:
        ValueError: An unknown algorithm or a negative margin.

    >>> from fp8lab.formats import E4M3
    >>> state = record_amax(DelayedScalingState.fresh(2), 3.5)
    >>> state = update_delayed(state, E4M3)
    >>> float(state.scale), state.amax_history.tolist()
    (128.0, [0.0, 3.5])
    """
    history = state.amax_history.copy()
    if group_amax is not None:
        history[0] = np.asarray(group_amax, dtype=np.float32)
    chosen = _chosen_amax(history, algorithm)
    scale = scale_from_amax(
        chosen, fmt, margin=margin, power_of_two=power_of_two, previous=state.scale
    )
    rolled = np.roll(history, -1, axis=0)
    rolled[0] = 0
    ran = history[0] != 0
    return DelayedScalingState(
        np.where(ran, scale, state.scale), np.where(ran, rolled, state.amax_history)
    )


def quantize_blocks(
    x: npt.ArrayLike,
    fmt: Float8Format,
    *,
    block: tuple[int, int] = (1, 128),
    margin: int = 0,
    power_of_two: bool = True,
    overflow: str | OverflowPolicy = "saturate",
) -> tuple[Array, Float32Array]:
    """Quantise with one scale a block, each from its own amax.

    For each block: `amax`, then `scale_from_amax` with previous = 1 (so a block that is all zero or
    holds NaN or Inf has scale 1), then `quantize`, then inverse_scale = 1 / scale rounded to
    float32 (exact for powers of two, whose reciprocal may be subnormal).

    Args:
        x: As for `quantize`, at least 2-D; blocks lie in its last two dimensions.
        block: (rows, columns); sizes need not be multiples of it.

    Returns:
        Codes of x's shape, and float32 inverse scales (..., ceil(M / rows), ceil(N / columns)).

    >>> import numpy as np
    >>> from fp8lab.formats import E4M3
    >>> x = np.array([[1, 2, 1000]], np.float32)
    >>> codes, inverse_scale = quantize_blocks(x, E4M3, block=(1, 2))
    >>> inverse_scale.tolist()
    [[0.0078125, 4.0]]
    """
    values = np.asarray(x)
    scale = scale_from_amax(
        amax(values, block=block), fmt, margin=margin, power_of_two=power_of_two
    )
    codes = quantize(
        values, fmt, scale=expand_blocks(scale, block, values.shape), overflow=overflow
    )
    with np.errstate(all="ignore"):
        return codes, (np.float32(1) / scale).astype(np.float32)


def expand_blocks(per_block: Array, block: tuple[int, int], shape: tuple[int, ...]) -> Array:
    """Repeat one value a block over the elements of the block: the result has `shape`."""
    rows, columns = block
    wide = np.repeat(np.repeat(per_block, rows, axis=-2), columns, axis=-1)
    return wide[..., : shape[-2], : shape[-1]]


def check_margin(margin: int) -> None:
    """Refuse a margin that is not an integer of at least 0."""
    if not isinstance(margin, int) or isinstance(margin, bool) or margin < 0:
        raise ValueError(f"margin is {margin!r}; accepted: an integer, 0 or more (powers of two)")


def _chosen_amax(history: Float32Array, algorithm: str | AmaxAlgorithm) -> Float32Array:
    if callable(algorithm):
        return np.asarray(algorithm(history), dtype=np.float32)
    if algorithm == "max":
        return np.asarray(history.view(np.uint32).max(axis=0)).view(np.float32)
    if algorithm == "most_recent":
        return np.asarray(history[0])
    raise ValueError(
        f"unknown algorithm {algorithm!r}; accepted: {', '.join(ALGORITHMS)}, or a function of the"
        " history"
    )


def _cleared_mantissa(scale: Array) -> Float32Array:
    words = np.asarray(scale, dtype=np.float32).view(np.uint32)
    return np.asarray(words & np.uint32(0xFF800000)).view(np.float32)


def _tiles(magnitudes: npt.NDArray[np.uint32], block: tuple[int, int]) -> npt.NDArray[np.uint32]:
    """Cut the last two dimensions into (row blocks, rows, column blocks, columns), zero padded."""
    rows, columns = block
    if rows < 1 or columns < 1:
        raise ValueError(f"block is {block}; accepted: (rows, columns), each at least 1")
    if magnitudes.ndim < 2:
        raise ValueError(f"x has shape {magnitudes.shape}; blocks need at least 2 dimensions")
    *rest, height, width = magnitudes.shape
    down, across = -(-height // rows), -(-width // columns)
    padding = [(0, 0)] * len(rest) + [(0, down * rows - height), (0, across * columns - width)]
    padded = np.pad(magnitudes, padding) if any(p[1] for p in padding) else magnitudes
    return padded.reshape(*rest, down, rows, across, columns)
