"""The largest magnitude: of everything, of blocks, of several casts or ranks."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from fp8lab.emulation.tiling import MAGNITUDE, TILE, Block, Float32Array, amax_words, layout_of

Array = npt.NDArray[Any]

_FLOATS = tuple(np.dtype(t) for t in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16))


def amax(x: npt.ArrayLike, *, block: Block | None = None) -> Float32Array:
    """The largest magnitude, of everything or of each block.

    Magnitudes are compared as float32 bit patterns without their sign, so that nothing is lost: a
    NaN wins over everything (the one with the largest payload), Inf over every finite value.

    Args:
        x: float32, float16 or bfloat16 (exact), or float64 (rounded to nearest even in float32
            first), any shape, strided or empty. Lists of Python numbers are float64.
        block: (rows, columns) of the blocks into which the last two dimensions are cut; the last
            block of a row or column may be smaller. None for a dimension spans it: (1, None) is
            one block a row, (None, 1) one a column. None alone takes all elements together.

    Returns:
        float32: 0-d without a block, else (..., ceil(M / rows), ceil(N / columns)), 1 where the
        block has None. Of nothing it is 0.

    Raises:
        TypeError: x is not of a floating dtype, or the block is not a pair of integers or None.
        ValueError: A block dimension below 1, or a block for an array with fewer than 2 dimensions.

    Source: TransformerEngine and torchao take the same maximum; where theirs drops NaN (fmax), ours
    keeps it.

    >>> float(amax([1.0, -3.0])), float(amax([1.0, float("inf"), float("nan")]))
    (3.0, nan)
    >>> amax([[1.0, -2.0, 3.0]], block=(1, 2)).tolist()
    [[2.0, 3.0]]
    >>> amax([[1.0, -2.0], [3.0, 0.5]], block=(None, 1)).tolist()
    [[3.0, 2.0]]
    """
    values = float_array("x", x)
    if block is None:
        return _of_everything(values)
    layout = layout_of(values.shape, block)
    found = np.zeros(layout.per_block, dtype=np.uint32)
    matrices, blocks = layout.matrices(values), layout.matrices(found)
    for tile in layout.tiles():
        step = max(1, TILE // tile.size)  # many small matrices are taken together
        for start in range(0, len(matrices), step):
            some = slice(start, start + step)
            piece = as_float32(matrices[some, tile.rows, tile.columns])
            blocks[some, tile.down, tile.across] = amax_words(piece, tile.block)
    return found.view(np.float32)


def merge_amax(*amaxes: npt.ArrayLike) -> Float32Array:
    """The larger of several amaxes, element by element: of several casts, or of a group of ranks.

    Compared as `amax` compares, so NaN is never lost and the order does not matter.

    Args:
        amaxes: One or more arrays of magnitudes that broadcast together; float64 is rounded to
            float32.

    Returns:
        float32 of the shape they broadcast to.

    Raises:
        TypeError: Not numbers. ValueError: None given, or a negative one.

    >>> merge_amax(1.0, [0.5, float("inf")]).tolist()
    [1.0, inf]
    """
    if not amaxes:
        raise ValueError("no amax given; accepted: one or more")
    largest = magnitudes("amax", amaxes[0]).view(np.uint32)
    for other in amaxes[1:]:
        largest = np.asarray(np.maximum(largest, magnitudes("amax", other).view(np.uint32)))
    return largest.view(np.float32)


def magnitudes(name: str, given: npt.ArrayLike) -> Float32Array:
    """Amaxes as float32 without a sign; refuses what is not a number or is below zero."""
    values = np.asarray(given)
    if values.dtype.kind not in "fiu" and values.dtype not in _FLOATS:
        raise TypeError(f"{name} has dtype {values.dtype}; accepted: floating or integer numbers")
    with np.errstate(invalid="ignore"):  # a comparison with a bfloat16 NaN raises the flag
        negative = values < 0
    if negative.any():
        raise ValueError(f"{name} holds negative values; accepted: magnitudes, 0 and up, Inf, NaN")
    words = np.ascontiguousarray(as_float32(values)).view(np.uint32) & MAGNITUDE
    return np.asarray(words, dtype=np.uint32).reshape(values.shape).view(np.float32)


def float_array(name: str, given: npt.ArrayLike) -> Array:
    """An array of one of the four floating types that the oracle takes."""
    values = np.asarray(given)
    if values.dtype not in _FLOATS:
        raise TypeError(
            f"{name} has dtype {values.dtype}; accepted: float64, float32, float16, bfloat16"
        )
    return values


def as_float32(values: Array) -> Float32Array:
    """Contiguous float32, without a copy where it is that already; quiet about what overflows."""
    with np.errstate(all="ignore"):
        return np.ascontiguousarray(values, dtype=np.float32).reshape(values.shape)


def _of_everything(values: Array) -> Float32Array:
    flat = values.reshape(-1)
    largest = np.uint32(0)
    for start in range(0, flat.size, TILE):
        words = as_float32(flat[start : start + TILE]).view(np.uint32) & MAGNITUDE
        largest = max(largest, words.max())
    return np.asarray(largest, dtype=np.uint32).view(np.float32)
