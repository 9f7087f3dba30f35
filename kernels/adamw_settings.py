"""How a step of AdamW is launched."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from fp8lab.kernels.launch import ElementwiseSettings


@dataclass(frozen=True)
class AdamSettings(ElementwiseSettings):
    """How a step is launched. No setting changes a bit of any result.

    Attributes:
        max_registers: Registers a thread at most, a multiple of 8; None leaves it to ptxas.
    """

    block: int = 1024
    num_warps: int = 4
    max_registers: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        registers = self.max_registers
        if registers is not None and (not 32 <= registers <= 248 or registers % 8):
            raise ValueError(
                f"max_registers is {registers}; accepted: None, multiples of 8 from 32 to 248"
            )


def settings_for(widths: Collection[int], *, expanded: bool) -> AdamSettings:
    """The settings that were the fastest on an H200; see `docs/performance.md`.

    Args:
        widths: Bits of an element of each tensor that a step reads.
        expanded: Whether a moment is stored expanded.
    """
    if min(widths) == 32:
        return AdamSettings()
    # A warp a program: neither its maxima nor the exchange of what its threads read need a barrier.
    # Fewer registers make room for more programs, until what is spilled costs more.
    registers = None if expanded else 64 if max(widths) <= 16 else 80
    return AdamSettings(block=256, num_warps=1, max_registers=registers)
