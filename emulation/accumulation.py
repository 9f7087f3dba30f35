"""The sum over K of a matrix product, tile by tile, with promotion and the scales of blocks."""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8lab.emulation.chain import (
    BUFFER,
    TILE_M,
    TILE_N,
    Steps,
    steps_of,
)
from fp8lab.emulation.chain_narrow import Workspace
from fp8lab.emulation.chain_operands import SMALLEST_C, decoded
from fp8lab.emulation.matmul_scales import Factors
from fp8lab.emulation.tensorcore import TensorCore

Array = npt.NDArray[Any]
Float32Array = npt.NDArray[np.float32]


def accumulate(
    a: Array,
    b: Array,
    core: TensorCore,
    *,
    start: Float32Array,
    promote: int | None,
    factors: Factors,
    threads: int,
) -> Float32Array:
    """One chain over all of K, or a total of chains over each `promote` of k.

    Args:
        a, b: Codes, (M, K) and (K, N).
        core: The arithmetic of a step.
        start: (M, N), what the chain or the total starts from.
        promote: k after which a partial sum is added to the total, a multiple of core.block_k, or
            None. Scales of blocks take part in that addition, in one fused multiply-add.
        factors: The scales; those that are not of blocks are left to the caller.
        threads: How many threads share the tiles.

    Returns:
        (M, N) float32. Where nothing is promoted, values of the core's accumulator type.
    """
    total = start.copy()
    m, n = total.shape
    left, right = decoded(np.asarray(a).T, core), decoded(np.asarray(b), core)
    magnitude = np.abs(start)
    # A total is never aligned, only what a chain starts from.
    tiny = promote is None and bool(((magnitude > 0) & (magnitude < SMALLEST_C)).any())
    steps_on_tile = steps_of(left, right, core, tiny=tiny)
    count = left.values.shape[0]
    tiles = list(product(_slices(m, _height(m, n, threads)), _slices(n, TILE_N)))
    left_over = iter(tiles)

    def work() -> None:
        """The tiles that no other thread has taken, one by one."""
        workspace = Workspace()
        old = np.setbufsize(BUFFER)
        try:
            with np.errstate(all="ignore"):
                for tile in left_over:
                    steps = steps_on_tile(*tile, workspace)
                    if promote is None:
                        total[tile] = steps(0, count, total[tile])
                    else:
                        length = promote // core.step_k
                        total[tile] = _promoted(steps, count, length, total[tile], factors, tile)
        finally:
            np.setbufsize(old)

    workers = min(threads, len(tiles))
    if workers <= 1:
        work()
        return total
    with ThreadPoolExecutor(workers) as pool:
        # NumPy keeps the buffer's size in a context variable: each thread needs a context.
        for done in [pool.submit(contextvars.copy_context().run, work) for _ in range(workers)]:
            done.result()
    return total


def _promoted(
    steps: Steps,
    count: int,
    length: int,
    total: Float32Array,
    factors: Factors,
    tile: tuple[slice, slice],
) -> Float32Array:
    """The total of a tile: chains of `length` steps from zero, added one after the other."""
    zero = np.zeros_like(total)
    for block, first in enumerate(range(0, count, length)):
        partial = steps(first, min(first + length, count), zero)
        if factors.block_k is None:
            total = total + partial
        else:
            total = factors.promoted(partial, total, block, *tile)
    return total


def _height(m: int, n: int, threads: int) -> int:
    """Rows of a tile: as many more as its columns are fewer, while each thread still has a tile.

    NumPy's calls for a small tile cost more than the arithmetic in it.
    """
    as_large = TILE_M * TILE_N // max(min(n, TILE_N), 1)
    return max(TILE_M, min(as_large, -(-m // threads)))


def _slices(size: int, step: int) -> Iterator[slice]:
    return (slice(first, min(first + step, size)) for first in range(0, size, step))
