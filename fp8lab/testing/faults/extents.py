"""Amaxes of blocks that were taken over the wrong elements."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8lab.emulation.amax import amax
from fp8lab.emulation.blocks import expand_blocks
from fp8lab.emulation.tiling import Block

Array = npt.NDArray[Any]


def wrong_amaxes(x: Array, block: Block, largest: Array) -> Iterator[tuple[str, Array]]:
    """One amax a block, from other elements than its own.

    Args:
        x: (M, N) float32.
        block: The right block.
        largest: Its amaxes.
    """
    yield "edge-block-wrong", _whole_blocks_only(x, block, largest, before=False)
    yield "edge-block-wrong", _whole_blocks_only(x, block, largest, before=True)
    for other in _other_blocks(block):
        yield "wrong-extent", _sampled(x, other, block) if x.size else largest
    # The block before it in its row; the first keeps its own.
    yield "wrong-extent", np.concatenate([largest[:, :1], largest[:, :-1]], axis=1)


def _other_blocks(block: Block) -> Iterator[Block]:
    rows, columns = block
    for factor in (2, 4):
        if columns is not None:
            yield rows, max(columns // factor, 1)
            yield rows, columns * factor
        if rows is not None:
            yield max(rows // factor, 1), columns
            yield rows * factor, columns
    yield columns, rows
    if columns is not None:
        yield 1, columns
        yield columns, columns
        yield rows, columns - 1
    yield 1, None
    yield None, 1
    yield None, None


def _sampled(x: Array, other: Block, block: Block) -> Array:
    """For each block the amax of the other block in which its first element lies."""
    height, width = x.shape
    sizes = tuple(None if size is None else max(size, 1) for size in other)
    spread = expand_blocks(amax(x, block=(sizes[0], sizes[1])), (sizes[0], sizes[1]), x.shape)
    rows, columns = block
    return spread[:: rows or height, :: columns or width]


def _whole_blocks_only(x: Array, block: Block, largest: Array, *, before: bool) -> Array:
    """A smaller block at the edge has the amax of nothing, or that of the block before it."""
    found = largest.copy()
    rows, columns = block
    if columns is not None and x.shape[1] % columns:
        found[:, -1] = found[:, -2] if before and found.shape[1] > 1 else 0
    if rows is not None and x.shape[0] % rows:
        found[-1, :] = found[-2, :] if before and found.shape[0] > 1 else 0
    return found
