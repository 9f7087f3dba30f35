"""How a kernel turns an amax into a scale, as frozen data that it is compiled for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

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
    powers = as_integer(margin)
    highest = _exponent(fmt) + 126
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
def _exponent(fmt: Float8Format) -> int:
    return math.frexp(fmt.max_finite)[1] - 1


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
    if not isinstance(block, tuple | list) or len(block) != 2:
        raise TypeError(_refusal(block, most_rows, most_columns))
    rows, columns = (None if size is None else as_integer(size) for size in block)
    if (rows is None) != (block[0] is None) or (columns is None) != (block[1] is None):
        raise TypeError(_refusal(block, most_rows, most_columns))
    if (rows, columns) in ((1, None), (None, 1)):
        return rows, columns
    if not (_is_power(rows, most_rows) and _is_power(columns, most_columns)) or rows == 2:
        raise ValueError(_refusal(block, most_rows, most_columns))
    return rows, columns


def _is_power(size: int | None, most: int | None) -> bool:
    return size is not None and 1 <= size <= (most or size) and not size & (size - 1)


def _refusal(block: Any, most_rows: int | None, most_columns: int | None) -> str:
    limits = [f" up to {most}" if most else "" for most in (most_rows, most_columns)]
    return (
        f"block is {block!r}; accepted: (1, None), (None, 1), or (rows, columns): rows 1 or a power"
        f" of two from 4{limits[0]}, columns a power of two{limits[1]}"
    )
