"""Which settings a matrix product takes unless told otherwise. None changes a bit of any result.

Chosen on an H200 from the rows of a search over shapes: cubes, layers of Llama 3 8B and 70B, and 16
to 512 rows.
"""

from __future__ import annotations

from dataclasses import replace

from fp8lab.kernels.matmul_settings import (
    DEEP_FAST,
    LARGE,
    LEAN_FAST,
    NARROW,
    NARROW_FAST,
    PROMOTED_CANDIDATES,
    SMALL,
    SMALL_FAST,
    SQUARE,
    SQUARE_FAST,
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
# The same of 128 x 256, where 1x128 by 1x128 is promoted: 128 x 128 takes 1.10 times as long.
_WIDE_PROMOTED_COST = 0.916


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
    *,
    promoted: bool,
    blocks: bool,
    by_both: bool,
    multiprocessors: int,
    short: bool = False,
) -> GluonSettings:
    """For the fast kernel: by the number of waves of tiles, and what a tile costs.

    With up to 64 rows the time is that of reading b, and the tile is as low as the rows allow.

    Args:
        m, n: The result's sizes.
        promoted: Whether partial sums are.
        blocks: Whether scales are of blocks.
        by_both: Whether each row and each column has its own scales of blocks, 1x128 by 1x128.
        multiprocessors: Of the device.
        short: Whether partial sums are of less than 128 of k. With scales of blocks the widest tile
            then has too few registers.
    """
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
    candidates = [SQUARE_FAST, SMALL_FAST, lowest]
    if ((by_both and not short) or not promoted) and _tiles(WIDE_FAST, m, n) >= multiprocessors:
        candidates.append(WIDE_FAST)
    costs = _COSTS | ({WIDE_FAST: _WIDE_PROMOTED_COST} if promoted else {})

    def cost(settings: GluonSettings) -> float:
        waves = -(-_tiles(settings, m, n) // multiprocessors)
        return waves * settings.block_m * settings.block_n * costs[settings]

    return min(candidates, key=cost)


def _tiles(settings: GluonSettings, m: int, n: int) -> int:
    return -(-m // settings.block_m) * -(-n // settings.block_n)
