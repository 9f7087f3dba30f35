"""How kernels are launched: settings as frozen data, and the one call that launches.

Every launch of the lab goes through `launch`, so that no multiply and add is ever fused behind the
contract's back, and so that the interpreter computes with NaN and Inf as quietly as a GPU does.
"""

from __future__ import annotations

from ctypes import c_float
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
import torch
import triton

CastPath = Literal["auto", "integer", "hardware"]

# triton.jit reads this switch once, when a kernel is defined; a process stays in its mode for good.
_INTERPRETED = bool(triton.knobs.runtime.interpret)


def check_path(path: str) -> None:
    """Refuse a form of the cast that there is not.

    Raises:
        ValueError: Not one of `CastPath`.
    """
    if path not in get_args(CastPath):
        accepted = ", ".join(get_args(CastPath))
        raise ValueError(f"unknown cast_path {path!r}; accepted: {accepted}")


def _check_power_of_two(name: str, value: int, smallest: int, largest: int) -> None:
    if not smallest <= value <= largest or value & (value - 1):
        raise ValueError(f"{name} is {value}; accepted: powers of two from {smallest} to {largest}")


@dataclass(frozen=True)
class ElementwiseSettings:
    """How an elementwise kernel is launched. No setting changes a bit of any result.

    Attributes:
        block: Elements a program works on, a power of two.
        num_warps: Warps a program has, a power of two up to 32.
    """

    block: int = 1024
    num_warps: int = 4

    def __post_init__(self) -> None:
        for name, value, largest in (
            ("block", self.block, 1 << 20),
            ("num_warps", self.num_warps, 32),
        ):
            _check_power_of_two(name, value, 1, largest)


@dataclass(frozen=True)
class CastSettings(ElementwiseSettings):
    """How a cast is launched.

    Attributes:
        cast_path: "integer" rounds with integer operations and runs everywhere; "hardware" uses the
            conversion instruction of sm_90 and newer, for the one policy it has (ptx_satfinite);
            "auto" takes the hardware where it can. Both give the same bits.
    """

    block: int = 8192
    num_warps: int = 8
    cast_path: CastPath = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_path(self.cast_path)


@dataclass(frozen=True)
class DecodeSettings(CastSettings):
    """How decoding is launched. Five bytes an element, four of them written: smaller blocks do."""

    block: int = 1024
    num_warps: int = 4


@dataclass(frozen=True)
class PairSettings:
    """How the kernel that takes bfloat16 by pairs is launched (`casting_pairs`).

    Attributes:
        rows: Of a tile; a power of two, 64 to 512, and no smaller than a block of scales.
        columns: Likewise, 64 to 256.
        num_warps: Warps a program has, a power of two up to 32.
        registers: The most registers a thread may take; None leaves it to the compiler.
    """

    rows: int = 256
    columns: int = 128
    num_warps: int = 8
    registers: int | None = None

    def __post_init__(self) -> None:
        for name, value, smallest, largest in (
            ("rows", self.rows, 64, 512),
            ("columns", self.columns, 64, 256),
            ("num_warps", self.num_warps, 1, 32),
        ):
            _check_power_of_two(name, value, smallest, largest)

    @cached_property
    def options(self) -> dict[str, int]:
        """What goes to the launch beside the tile's size; not to be changed."""
        limit = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.num_warps, **limit}


@dataclass(frozen=True)
class TileSettings:
    """How a kernel that works on tiles of a matrix is launched. No setting changes a bit.

    Attributes:
        rows, columns: Of a tile; powers of two, 16 to 256, and no smaller than a block of scales.
        num_warps: Warps a program has, a power of two up to 32.
        band: Tiles are visited down this many rows of tiles before the next column of tiles, so
            that neighbours in both outputs are written at about the same time. 1 goes along rows.
        registers: The most registers a thread may take; None leaves it to the compiler.
        cast_path: As in `CastSettings`.
        pairs: Where both layouts are wanted of a bfloat16 matrix that whole tiles of one of these
            fill, the first such one, and the kernel of `casting_pairs`; see there what else it
            wants. Empty for the tile kernel always.
    """

    rows: int = 128
    columns: int = 128
    num_warps: int = 8
    band: int = 1
    registers: int | None = None
    cast_path: CastPath = "auto"
    pairs: tuple[PairSettings, ...] = ()

    def __post_init__(self) -> None:
        for name, value, smallest, largest in (
            ("rows", self.rows, 16, 256),
            ("columns", self.columns, 16, 256),
            ("num_warps", self.num_warps, 1, 32),
        ):
            _check_power_of_two(name, value, smallest, largest)
        if self.band < 1:
            raise ValueError(f"band is {self.band}; accepted: 1 and up")
        check_path(self.cast_path)

    @cached_property
    def options(self) -> dict[str, int]:
        """What goes to the launch beside the tile's size; not to be changed."""
        limit = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.num_warps, **limit}


# The fastest on an H200: for one scale, for blocks up to 128 x 128, for MX.
TRANSPOSE_TILES = TileSettings(
    256, 64, 8, pairs=(PairSettings(256, 128, 8, 96), PairSettings(128, 128, 8, 80))
)
_PAIRS = (PairSettings(256, 128, 8, 128), PairSettings(128, 128, 8, 80))
BLOCK_TILES = TileSettings(pairs=_PAIRS)
MX_TILES = TileSettings(128, 64, 4, 8, pairs=_PAIRS)


@dataclass(frozen=True)
class RowSettings(CastSettings):
    """How a kernel that works on whole rows is launched.

    Attributes:
        block: Elements a program works on where rows are short enough: one row or several.
        longest: Rows of up to so many elements stay in registers and are read once; longer ones are
            read twice, `block` elements at a time.
    """

    longest: int = 16384


def interpreted() -> bool:
    """Whether this process runs kernels in Triton's interpreter (TRITON_INTERPRET=1) on the CPU."""
    return _INTERPRETED


def cdiv(number: int, of: int) -> int:
    """number / of, rounded up. Triton's own passes through its front end and takes far longer."""
    return -(-number // of)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not less than a number above zero."""
    return 1 << (number - 1).bit_length()


def to_float32(number: float) -> float:
    """The nearest float32, ties to even, as a Python float: infinite past the largest one."""
    return c_float(number).value


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """Launch a `triton.jit` kernel on the device of its first tensor or tensor descriptor.

    Args:
        kernel: The jitted function.
        grid: Programs along each axis; nothing is launched when one of them is 0.
        args: The kernel's positional arguments, at least one of them a tensor or a descriptor.
        meta: Its keyword arguments, compile-time constants and num_warps included.
            `enable_fp_fusion` is always False and may not be given.
    """
    if 0 in grid:
        return
    if _INTERPRETED:
        # NaN and overflow inside would raise a warning, which the interpreter turns into an error.
        with np.errstate(all="ignore"):
            kernel[grid](*args, enable_fp_fusion=False, **meta)
        return
    device = _device_of(args)
    # Triton launches on the current device, whatever device the pointers belong to.
    if device.index == torch.cuda.current_device():
        kernel[grid](*args, enable_fp_fusion=False, **meta)
    else:
        with torch.cuda.device(device):
            kernel[grid](*args, enable_fp_fusion=False, **meta)


def _device_of(args: tuple[Any, ...]) -> torch.device:
    for arg in args:
        if isinstance(arg, torch.Tensor):
            return arg.device
        base = getattr(arg, "base", None)  # a descriptor's tensor is its base
        if isinstance(base, torch.Tensor):
            return base.device
    raise TypeError("none of the arguments of this launch is a tensor")
