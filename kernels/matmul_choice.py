"""Which settings a matrix product takes unless told otherwise. None changes a bit of any result.

Chosen on an H200 from the rows of searches over shapes: cubes, layers of Llama 3 8B and 70B, and 16
to 512 rows. Tiles of 192 and 256 rows were searched with 4096 rows and more; with fewer they are
taken where they give every multiprocessor one.
"""

from __future__ import annotations

from dataclasses import replace

from fp8lab.kernels.matmul_scales import BLOCK
from fp8lab.kernels.matmul_settings import (
    BROAD_FAST,
    DEEP_FAST,
    LARGE,
    LEAN_FAST,
    NARROW,
    NARROW_FAST,
    PAIRED_BROAD_FAST,
    PAIRED_FAST,
    PROMOTED_CANDIDATES,
    SMALL,
    SMALL_FAST,
    SQUARE,
    SQUARE_FAST,
    TALL_FAST,
    THIN,
    THIN_DEEP_FAST,
    THIN_DEEP_SHORT_FAST,
    THIN_FAST,
    THIN_SHORT_FAST,
    WIDE_FAST,
    GluonSettings,
    MatmulSettings,
    fits,
)

# What an element of a tile costs, of the largest one's: smaller tiles bring operands in more often.
_COSTS = {
    WIDE_FAST: 1.0,
    SQUARE_FAST: 1.005,
    SMALL_FAST: 1.1,
    NARROW_FAST: 1.25,
    DEEP_FAST: 1.25,
    LEAN_FAST: 1.25,
}
# The same of partial sums of 128 that are promoted. Where scales are not of blocks, 192 rows pay if
# K is long.
_PAIRED_COST = 0.993
_TALL_COST, _TALL_LONG_COST = 1.005, 0.993
_LONG_K = 8192
_MANY_ROWS = 8192
_ROW_COSTS = {PAIRED_FAST: 0.98}  # scales of blocks, each row its own
_BOTH_COSTS = {PAIRED_FAST: 0.872, TALL_FAST: 0.872}  # and each column, too
_WIDE_BOTH_COST = 0.916


def plain_settings(
    m: int, n: int, *, promoted: bool, wide: bool, multiprocessors: int
) -> MatmulSettings:
    """For the plain kernel: the largest tile that fits and gives every multiprocessor one.

    Where partial sums are promoted, a total beside them leaves no registers for the largest. Few
    rows are taken as columns of wgmma, which needs only 16.

    Args:
        m, n: The result's sizes.
        promoted: Whether partial sums are.
        wide: Whether a tile of float32 passes through shared memory at the end.
        multiprocessors: Of the device.
    """
    if m <= 32:
        return replace(THIN, block_m=16 if m <= 16 else 32)
    candidates = PROMOTED_CANDIDATES[:-1] if promoted else (LARGE, SQUARE, SMALL, NARROW)
    for settings in candidates:
        tiles = -(-m // settings.block_m) * -(-n // settings.block_n)
        wasteful = m <= settings.block_m // 2
        if fits(settings, wide=wide) and tiles >= multiprocessors and not wasteful:
            return settings
    return SMALL if n > 64 * multiprocessors else NARROW


def fast_settings(
    m: int,
    n: int,
    k: int,
    *,
    promote: int | None,
    blocks: bool,
    by_row: bool,
    by_column: bool,
    multiprocessors: int,
    matrices: int = 0,
) -> GluonSettings:
    """For the fast kernel: by the number of waves of tiles, and what a tile costs.

    With up to 64 rows the time is that of reading b, and the tile is as low as the rows allow.

    Args:
        m, n, k: The product's sizes.
        promote: k of a partial sum that is promoted, or None.
        blocks: Whether scales are of blocks.
        by_row, by_column: Whether each row, and each column, has its own scales of blocks.
        multiprocessors: Of the device.
        matrices: How many are added: an accumulator before, a bias after.
    """
    promoted = promote is not None
    if m <= 32:
        many = -(-n // 64) > multiprocessors
        if promoted:
            thin = THIN_SHORT_FAST if many else THIN_FAST
        else:
            thin = THIN_DEEP_SHORT_FAST if many else THIN_DEEP_FAST
        return replace(thin, block_m=16 if m <= 16 else 32)
    if m <= 64:
        return NARROW_FAST if promoted else DEEP_FAST
    lowest = DEEP_FAST if not promoted else NARROW_FAST if blocks else LEAN_FAST
    costs = {settings: _COSTS[settings] for settings in (SQUARE_FAST, SMALL_FAST, lowest)}
    large: dict[GluonSettings, float] = {}
    if promote is None:
        large = {WIDE_FAST: _COSTS[WIDE_FAST]}
    elif promote == BLOCK:
        # With scales of less of k the widest tile has too few registers.
        if by_row and by_column:
            large = {WIDE_FAST: _WIDE_BOTH_COST}
        if not matrices:
            large |= _promoted_costs((m, n, k), blocks=blocks, by_row=by_row, by_column=by_column)
    costs |= {s: cost for s, cost in large.items() if _tiles(s, m, n) >= multiprocessors}

    def cost(settings: GluonSettings) -> float:
        waves = -(-_tiles(settings, m, n) // multiprocessors)
        return waves * settings.block_m * settings.block_n * costs[settings]

    return min(costs, key=cost)


def _promoted_costs(
    sizes: tuple[int, int, int], *, blocks: bool, by_row: bool, by_column: bool
) -> dict[GluonSettings, float]:
    """Tiles of more than 128 rows, or as many columns, for partial sums of 128."""
    m, n, k = sizes
    if blocks:
        return {} if not by_row else _BOTH_COSTS if by_column else _ROW_COSTS
    # Along the longer side, or the rows where they are many.
    upright = m >= n or m >= _MANY_ROWS
    paired, tall = (PAIRED_FAST, TALL_FAST) if upright else (PAIRED_BROAD_FAST, BROAD_FAST)
    return {paired: _PAIRED_COST, tall: _TALL_LONG_COST if k >= _LONG_K else _TALL_COST}


def _tiles(settings: GluonSettings, m: int, n: int) -> int:
    return -(-m // settings.block_m) * -(-n // settings.block_n)
