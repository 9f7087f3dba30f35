"""Launch settings of matrix products, as frozen data. No setting changes a bit of any result."""

from __future__ import annotations

from dataclasses import dataclass, replace

SHARED_MEMORY = 227 * 1024  # bytes that a program may take on sm_90
MOST_STAGES = 16


@dataclass(frozen=True)
class MatmulSettings:
    """How the plain kernel is launched.

    Attributes:
        block_m, block_n: A tile's rows and columns, powers of two. wgmma's rows are 64 to 256, its
            columns 16 to 256; with fewer rows the compiler would leave wgmma, whose arithmetic the
            contract is.
        block_k: How much of K a step takes, 32 to 256. Where partial sums are promoted, the launch
            takes the length of those instead.
        num_warps: 4 or 8.
        num_stages: Steps whose operands are in flight, 1 to 16.
        group_m: Tiles that are visited down a column before the next column.
        warp_specialize: Whether copies and products are left to different warps.
        swap: Whether wgmma's rows are the tile's columns: then block_m may be 16, and block_n not
            less than 64.
    """

    block_m: int = 128
    block_n: int = 128
    block_k: int = 128
    num_warps: int = 8
    num_stages: int = 4
    group_m: int = 8
    warp_specialize: bool = False
    swap: bool = False

    def __post_init__(self) -> None:
        rows, columns = (16, 64) if self.swap else (64, 16)
        for name, value, smallest, largest in (
            ("block_m", self.block_m, rows, 256),
            ("block_n", self.block_n, columns, 256),
            ("block_k", self.block_k, 32, 256),
            ("num_warps", self.num_warps, 4, 8),
            ("group_m", self.group_m, 1, 64),
        ):
            _check_power(name, value, smallest, largest)
        if not 1 <= self.num_stages <= MOST_STAGES:
            raise ValueError(f"num_stages is {self.num_stages}; accepted: 1 to {MOST_STAGES}")

    def with_block_k(self, block_k: int, *, scaled: bool = False) -> MatmulSettings:
        """The same with another step, as many bytes of operands in flight, if registers allow.

        Args:
            block_k: The step.
            scaled: Whether each row and column has a scale of each step, in flight with them.
        """
        most = 8
        if scaled:
            # Those scales are in registers. So many stages spill nothing, as ptxas says for sm_90,
            # where n is a multiple of 16 and nothing is added; with 8, 128 x 128 spills 5 KB a
            # thread, and 64 x 64 1.6 KB.
            columns = self.block_m if self.swap else self.block_n
            most = 8 if columns == 16 else 16 // self.num_warps
        stages = max(1, min(most, self.num_stages * self.block_k // block_k))
        return replace(self, block_k=block_k, num_stages=stages)


@dataclass(frozen=True)
class GluonSettings:
    """How the fast kernel of sm_90 is launched.

    Attributes:
        block_m, block_n: A tile's rows and columns. wgmma's rows are 64, 128, 192 or 256, its
            columns a power of two from 16 to 256, or to 128 beside 192 rows and more. Which
            products 256 rows are for, `takes` says.
        block_k: How much of K a stage holds: 128, or 256, which promoted products do not take.
        group: Tiles that are visited down a column before the next column.
        most_stages: Stages are as many as fit, but no more: 2 to 16, as one is awaited before the
            one before is released.
        swap: Whether wgmma's rows are the tile's columns, as in `MatmulSettings`.
        drain: Where partial sums are promoted: how many there are between points where a warpgroup
            has no wgmma in flight, in whole stages. With 192 of wgmma's rows and more, or 256
            columns, every stage ends with such a point.
    """

    block_m: int = 128
    block_n: int = 256
    block_k: int = 128
    group: int = 8
    most_stages: int = 16
    swap: bool = False
    drain: int = 8

    def __post_init__(self) -> None:
        rows, columns = self.tile
        row_name, column_name = ("block_n", "block_m") if self.swap else ("block_m", "block_n")
        if rows not in (64, 128, 192, 256):
            raise ValueError(f"{row_name} is {rows}; accepted: 64, 128, 192, 256")
        _check_power(column_name, columns, 16, 128 if rows > 128 else 256)
        _check_power("block_k", self.block_k, 128, 256)
        _check_power("group", self.group, 1, 64)
        _check_power("drain", self.drain, 1, 16)
        if not 2 <= self.most_stages <= MOST_STAGES:
            raise ValueError(f"most_stages is {self.most_stages}; accepted: 2 to {MOST_STAGES}")

    @property
    def tile(self) -> tuple[int, int]:
        """wgmma's rows and columns of a tile."""
        tile = self.block_m, self.block_n
        return tile[::-1] if self.swap else tile

    def takes(self, *, promote: int | None, blocks: bool, matrices: int) -> bool:
        """Whether there are registers enough for a product.

        256 rows are for partial sums that are promoted. Beside them there is no room for scales of
        rows and columns at every 32 of k, nor for the places of two matrices that are added.

        Args:
            promote: k of a partial sum that is promoted, or None.
            blocks: Whether scales are of blocks.
            matrices: How many are added: an accumulator before, a bias after.
        """
        if self.tile[0] < 256:
            return True
        return promote is not None and not (blocks and promote < 128) and matrices < 2


def _check_power(name: str, value: int, smallest: int, largest: int) -> None:
    if not smallest <= value <= largest or value & (value - 1):
        raise ValueError(f"{name} is {value}; accepted: powers of two from {smallest} to {largest}")


LARGE = MatmulSettings(128, 256, num_stages=3)
SQUARE = MatmulSettings(128, 128)
LOW = MatmulSettings(64, 256, num_warps=4, num_stages=4)
SMALL = MatmulSettings(64, 128, num_warps=4, num_stages=6)
NARROW = MatmulSettings(64, 64, num_warps=4, num_stages=8)
THIN = MatmulSettings(16, 64, 256, num_warps=4, num_stages=8, swap=True)

WIDE_FAST = GluonSettings(128, 256)
# In taller groups, for large results: operands are brought in from farther away less often.
TALL_FAST = GluonSettings(192, 128, group=32)
BROAD_FAST = GluonSettings(128, 192, group=32, swap=True)
PAIRED_FAST = GluonSettings(256, 128, group=32)
PAIRED_BROAD_FAST = GluonSettings(128, 256, group=32, swap=True)
SQUARE_FAST = GluonSettings(128, 128)
SMALL_FAST = GluonSettings(64, 128)
NARROW_FAST = GluonSettings(64, 64)
DEEP_FAST = GluonSettings(64, 64, 256)
LEAN_FAST = GluonSettings(128, 32)
# Where there are fewer tiles than multiprocessors, one program has all of the shared memory;
# otherwise the next kernel's programs find room beside those of this one.
THIN_FAST = GluonSettings(16, 64, swap=True)
THIN_DEEP_FAST = GluonSettings(16, 64, 256, swap=True)
THIN_SHORT_FAST = GluonSettings(16, 64, most_stages=10, swap=True)
THIN_DEEP_SHORT_FAST = GluonSettings(16, 64, 256, most_stages=5, swap=True)

# What a search over settings may choose from.
NATIVE_CANDIDATES = (
    LARGE,
    replace(LARGE, warp_specialize=True),
    SQUARE,
    LOW,
    SMALL,
    NARROW,
    THIN,
)
PROMOTED_CANDIDATES = (SQUARE, SMALL, NARROW, THIN)
FAST_NATIVE_CANDIDATES = (
    WIDE_FAST,
    SQUARE_FAST,
    SMALL_FAST,
    NARROW_FAST,
    DEEP_FAST,
    THIN_DEEP_FAST,
    THIN_DEEP_SHORT_FAST,
)
FAST_PROMOTED_CANDIDATES = (
    SQUARE_FAST,
    WIDE_FAST,
    TALL_FAST,
    BROAD_FAST,
    PAIRED_FAST,
    PAIRED_BROAD_FAST,
    SMALL_FAST,
    NARROW_FAST,
    LEAN_FAST,
    THIN_FAST,
    THIN_SHORT_FAST,
)


def fits(settings: MatmulSettings, *, wide: bool) -> bool:
    """Whether operands in flight and a tile of the result fit a multiprocessor's shared memory.

    Args:
        wide: Whether the tile passes through as float32, not as bfloat16.
    """
    operands = (settings.block_m + settings.block_n) * settings.block_k * settings.num_stages
    result = settings.block_m * settings.block_n * (4 if wide else 2)
    return operands + result + 1024 <= SHARED_MEMORY  # barriers take less than 1 KiB
