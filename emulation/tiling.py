"""How a matrix is cut into blocks.

A block is (rows, columns) of the last two dimensions; None spans a whole dimension. The last block
of a row or column may be smaller. A tile is a piece of a matrix that blocks of one size fill
exactly: so nothing is padded, and one value a block broadcasts over a view of the elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8lab.emulation.integers import as_integer

Array = npt.NDArray[Any]
Float32Array = npt.NDArray[np.float32]
Block = tuple[int | None, int | None]

# Elements of a tile where it matters: its temporaries stay in the L2 cache, and the few NumPy calls
# that a tile costs are small beside the work on it.
TILE = 1 << 17
MAGNITUDE = np.uint32(0x7FFFFFFF)


@dataclass(frozen=True)
class Tile:
    """A piece of a matrix that blocks of one size fill exactly.

    Attributes:
        rows, columns: Where it lies in the matrix.
        block: The size of its blocks.
        down, across: Where its blocks lie in the array of one value a block.
    """

    rows: slice
    columns: slice
    block: tuple[int, int]
    down: slice
    across: slice

    @property
    def size(self) -> int:
        """How many elements of a matrix it holds."""
        height: int = self.rows.stop - self.rows.start
        width: int = self.columns.stop - self.columns.start
        return height * width


@dataclass(frozen=True)
class Layout:
    """The blocks of an array.

    Attributes:
        shape: The array's shape; blocks lie in its last two dimensions.
        block: (rows, columns) with None replaced.
        per_block: The shape of an array with one value a block.
    """

    shape: tuple[int, ...]
    block: tuple[int, int]
    per_block: tuple[int, ...]

    def matrices(self, array: Array) -> Array:
        """An array of `shape` or of `per_block`, with its leading dimensions made one."""
        lead = int(np.prod(array.shape[:-2], dtype=np.int64))
        return array.reshape(lead, *array.shape[-2:])

    def regions(self) -> list[Tile]:
        """At most four pieces of each matrix, which blocks of one size each fill exactly."""
        *_, height, width = self.shape
        return [
            Tile(slice(y, y_end), slice(x, x_end), (rows, columns), down, across)
            for y, y_end, rows, down in _spans(height, self.block[0])
            for x, x_end, columns, across in _spans(width, self.block[1])
        ]

    def tiles(self) -> Iterator[Tile]:
        """The regions, cut so that a tile stays in the cache wherever a block does."""
        for region in self.regions():
            rows, columns = region.block
            width = region.columns.stop - region.columns.start
            wide = max(1, min(width, TILE // rows) // columns) * columns
            tall = max(1, TILE // (rows * wide)) * rows
            for y, down in _cut(region.rows, tall, rows, region.down):
                for x, across in _cut(region.columns, wide, columns, region.across):
                    yield Tile(y, x, region.block, down, across)


def layout_of(shape: tuple[int, ...], block: Block) -> Layout:
    """Check a block and lay it over a shape.

    Raises:
        TypeError: The block is not a pair of integers or None.
        ValueError: A block dimension below 1, or a shape of fewer than 2 dimensions.
    """
    rows, columns = _checked_block(block)
    if len(shape) < 2:
        raise ValueError(f"x has shape {shape}; blocks need at least 2 dimensions")
    *lead, height, width = shape
    # A dimension that one block spans has one value even when it is empty: the amax of nothing.
    down = 1 if rows is None else -(-height // rows)
    across = 1 if columns is None else -(-width // columns)
    rows = max(height, 1) if rows is None else rows
    columns = max(width, 1) if columns is None else columns
    return Layout(shape, (rows, columns), (*lead, down, across))


def amax_words(matrices: Float32Array, block: tuple[int, int]) -> npt.NDArray[np.uint32]:
    """The largest magnitude of each block, as float32 bit patterns.

    Args:
        matrices: (batch, M, N) float32, contiguous; whole blocks fill it.

    Returns:
        uint32, (batch, M / rows, N / columns).
    """
    batch, height, width = matrices.shape
    rows, columns = block
    words = matrices.view(np.uint32) & MAGNITUDE
    if rows > 1:
        words = words.reshape(batch, height // rows, rows, width).max(axis=2)
    if columns > 1:
        # Twice as fast as a maximum over the last dimension of a (..., columns) view.
        words = np.maximum.reduceat(words.reshape(-1), np.arange(0, words.size, columns))
    return words.reshape(batch, height // rows, width // columns)


def in_blocks(matrices: Array, tile: Tile) -> Array:
    """A view of a tile of (batch, M, N) as (batch, blocks down, rows, blocks across, columns)."""
    piece = matrices[:, tile.rows, tile.columns]
    batch, height, width = piece.shape
    rows, columns = tile.block
    # Dimensions are only split, which never copies, whatever the strides.
    return piece.reshape(batch, height // rows, rows, width // columns, columns)


def _checked_block(block: Block) -> Block:
    accepted = "(rows, columns), each an integer of at least 1, or None for the whole dimension"
    if not isinstance(block, tuple | list) or len(block) != 2:
        raise TypeError(f"block is {block!r}; accepted: {accepted}")
    sizes = [None if size is None else as_integer(size) for size in block]
    for size, found in zip(block, sizes, strict=True):
        if size is not None and found is None:
            raise TypeError(f"block is {block!r}; accepted: {accepted}")
        if found is not None and found < 1:
            raise ValueError(f"block is {block!r}; accepted: {accepted}")
    return sizes[0], sizes[1]


def _spans(size: int, block: int) -> Iterator[tuple[int, int, int, slice]]:
    """(start, end, block size, which blocks): all whole blocks, then the smaller one."""
    whole = size // block
    if whole:
        yield 0, whole * block, block, slice(0, whole)
    if size % block:
        yield whole * block, size, size % block, slice(whole, whole + 1)


def _cut(span: slice, step: int, block: int, blocks: slice) -> Iterator[tuple[slice, slice]]:
    """Parts of a span of at most `step` (a multiple of the block), and which blocks they hold."""
    for start in range(span.start, span.stop, step):
        end = min(start + step, span.stop)
        first = blocks.start + (start - span.start) // block
        yield slice(start, end), slice(first, first + (end - start) // block)
