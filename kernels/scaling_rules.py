"""How a kernel turns an amax into a scale, as frozen data that it is compiled for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from fp8lab.formats import Float8Format
from fp8lab.kernels.casting_rules import check_format
from fp8lab.kernels.checks import as_integer

MX_ROUNDINGS = ("floor", "up", "nearest")
# What they compute alike; torchao's is for whole tensors alone.
GUARDED_PRESETS = ("fp8lab", "transformer_engine")
CURRENT_PRESETS = (*GUARDED_PRESETS, "torchao")
SMALLEST_NORMAL = 2.0**-126

Block = tuple[int | None, int | None]


@dataclass(frozen=True, eq=False)
class ScaleRule:
    """Compile-time constants of every kernel that makes scales. One object for each combination.

    Attributes:
        kind: "divide": top / amax; "power_of_two": that with its mantissa cleared; "mx_floor",
            "mx_up", "mx_nearest": an E8M0 code.
        top: fmt.max_finite * 2**-margin, a normal float32.
        exponent: floor(log2(top)).
        mantissa: The 23 mantissa bits of top.
    """

    kind: Literal["divide", "power_of_two", "mx_floor", "mx_up", "mx_nearest"]
    top: float
    exponent: int
    mantissa: int

    @property
    def is_mx(self) -> bool:
        """Whether scales are E8M0 codes."""
        return self.kind.startswith("mx")

    @property
    def dtype(self) -> torch.dtype:
        """What is kept for each block: the E8M0 scale, or the float32 inverse scale."""
        return torch.uint8 if self.is_mx else torch.float32


def scale_rule(fmt: Float8Format, *, margin: int = 0, power_of_two: bool = False) -> ScaleRule:
    """The constants of `scale_from_amax`.

    Raises:
        TypeError: fmt is no format.
        ValueError: A format that the kernels do not have; a margin that is negative, no integer, or
            takes the format's top below the normal float32.
    """
    check_format(fmt)
    highest = math.frexp(fmt.max_finite)[1] - 1 + 126
    powers = as_integer(margin)
    if powers is None or not 0 <= powers <= highest:
        raise ValueError(
            f"margin is {margin!r}; accepted: an integer from 0 to {highest} (powers of two)"
        )
    return _rule(fmt, powers, "power_of_two" if power_of_two else "divide")


def mx_rule(fmt: Float8Format, rounding: str) -> ScaleRule:
    """The constants of `mx_scale`.

    Raises:
        TypeError: fmt is no format. ValueError: Another format, or an unknown rounding.
    """
    check_format(fmt)
    if rounding not in MX_ROUNDINGS:
        raise ValueError(f"unknown rounding {rounding!r}; accepted: {', '.join(MX_ROUNDINGS)}")
    return _rule(fmt, 0, f"mx_{rounding}")


@cache
def _rule(fmt: Float8Format, margin: int, kind: str) -> ScaleRule:
    top = fmt.max_finite * 2.0**-margin
    fraction, exponent = math.frexp(top)
    mantissa = int((2 * fraction - 1) * 2**23)
    return ScaleRule(kind, top, exponent - 1, mantissa)  # type: ignore[arg-type]


def check_block(block: Block, most_rows: int | None, most_columns: int | None) -> Block:
    """A block in Python's integers; refuses one that the tile kernels cannot have.

    Args:
        most_rows, most_columns: What a tile holds; None where a block may be larger.

    Raises:
        TypeError: Not a pair of integers or None.
        ValueError: Other sizes.
    """
    limits = [f" up to {most}" if most else "" for most in (most_rows, most_columns)]
    accepted = (
        f"(1, None), (None, 1), or (rows, columns): rows 1 or a power of two from 4{limits[0]},"
        f" columns a power of two{limits[1]}"
    )
    if not isinstance(block, tuple | list) or len(block) != 2:
        raise TypeError(f"block is {block!r}; accepted: {accepted}")
    found = tuple(None if size is None else as_integer(size) for size in block)
    if any(size is not None and number is None for size, number in zip(block, found, strict=True)):
        raise TypeError(f"block is {block!r}; accepted: {accepted}")
    rows, columns = found
    if found in ((1, None), (None, 1)):
        return rows, columns
    for size, most in zip(found, (most_rows, most_columns), strict=True):
        if size is None or size < 1 or size & (size - 1) or size > (most or size):
            raise ValueError(f"block is {block!r}; accepted: {accepted}")
    if rows == 2:
        raise ValueError(f"block is {block!r}; accepted: {accepted}")
    return rows, columns
