"""Launch settings of matrix products, as frozen data. No setting changes a bit of any result."""

from __future__ import annotations

from dataclasses import dataclass, replace

SHARED_MEMORY = 227 * 1024  # bytes that a program may take on sm_90


@dataclass(frozen=True)
class MatmulSettings:
    """How a product is launched.

    Attributes:
        block_m, block_n: A tile's rows and columns, powers of two: 64 to 256, and 32 to 256. With
            fewer rows the compiler would leave wgmma, whose arithmetic the contract is.
        block_k: How much of K a step takes, 32 to 256. Where partial sums are promoted, the launch
            takes the length of those instead.
        num_warps: 4 or 8.
        num_stages: Steps whose operands are in flight, 1 to 8.
        group_m: Tiles that are visited down a column before the next column.
        warp_specialize: Whether copies and products are left to different warps.
    """

    block_m: int = 128
    block_n: int = 128
    block_k: int = 128
    num_warps: int = 8
    num_stages: int = 4
    group_m: int = 8
    warp_specialize: bool = False

    def __post_init__(self) -> None:
        for name, value, smallest, largest in (
            ("block_m", self.block_m, 64, 256),
            ("block_n", self.block_n, 32, 256),
            ("block_k", self.block_k, 32, 256),
            ("num_warps", self.num_warps, 4, 8),
        ):
            if not smallest <= value <= largest or value & (value - 1):
                raise ValueError(
                    f"{name} is {value}; accepted: powers of two from {smallest} to {largest}"
                )
        for name, value, largest in (
            ("num_stages", self.num_stages, 8),
            ("group_m", self.group_m, 64),
        ):
            if not 1 <= value <= largest:
                raise ValueError(f"{name} is {value}; accepted: 1 to {largest}")

    def with_block_k(self, block_k: int) -> MatmulSettings:
        """The same with another step, as many bytes of operands in flight."""
        stages = max(1, min(8, self.num_stages * self.block_k // block_k))
        return replace(self, block_k=block_k, num_stages=stages)


LARGE = MatmulSettings(128, 256, num_stages=3)
SQUARE = MatmulSettings(128, 128)
LOW = MatmulSettings(64, 256, num_warps=4, num_stages=4)
SMALL = MatmulSettings(64, 128, num_warps=4, num_stages=6)
NARROW = MatmulSettings(64, 64, num_warps=4, num_stages=8)

# What a search over settings may choose from.
NATIVE_CANDIDATES = (
    LARGE,
    replace(LARGE, warp_specialize=True),
    SQUARE,
    LOW,
    SMALL,
    NARROW,
)
PROMOTED_CANDIDATES = (SQUARE, SMALL, NARROW)


def fits(settings: MatmulSettings, *, wide: bool) -> bool:
    """Whether operands in flight and a tile of the result fit a multiprocessor's shared memory.

    Args:
        wide: Whether the tile passes through as float32, not as bfloat16.
    """
    operands = (settings.block_m + settings.block_n) * settings.block_k * settings.num_stages
    result = settings.block_m * settings.block_n * (4 if wide else 2)
    return operands + result + 1024 <= SHARED_MEMORY  # barriers take less than 1 KiB


def settings_for(
    m: int, n: int, *, promoted: bool, wide: bool, multiprocessors: int
) -> MatmulSettings:
    """The settings that a product of that shape takes unless told otherwise.

    The largest tile that fits and still gives every multiprocessor one. Where partial sums are
    promoted, a total beside them leaves no registers for the largest.
    """
    candidates = PROMOTED_CANDIDATES if promoted else (LARGE, SQUARE, SMALL, NARROW)
    for settings in candidates:
        tiles = -(-m // settings.block_m) * -(-n // settings.block_n)
        wasteful = m <= settings.block_m // 2
        if fits(settings, wide=wide) and tiles >= multiprocessors and not wasteful:
            return settings
    return SMALL if n > 64 * multiprocessors else NARROW
