"""Numbers, little curves and columns for a terminal."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_BARS, _PLAIN_BARS = "▁▂▃▄▅▆▇█", ".:-=+*#@"
_SHADES, _PLAIN_SHADES = "·░▒▓█", ".-+#@"
_DECADES = (-5, -3, -2, -1)  # where a share takes the next shade
WIDTH = 40  # of a curve
_CODES = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Style:
    """What the output can show.

    Attributes:
        colour: ANSI colours.
        unicode: Block characters; otherwise ASCII.
    """

    colour: bool = False
    unicode: bool = False

    def alarm(self, text: str, on: bool) -> str:
        """Red where it is on."""
        return f"\x1b[31m{text}\x1b[0m" if on and self.colour else text

    def warn(self, text: str, on: bool) -> str:
        """Yellow where it is on."""
        return f"\x1b[33m{text}\x1b[0m" if on and self.colour else text


def shown(value: float) -> str:
    """Four digits."""
    return f"{value:.4g}"


def spark(values: Sequence[float], style: Style, width: int = WIDTH) -> str:
    """A curve: each character the mean of its part of the values, "!" where one is not finite."""
    count = min(width, len(values))
    parts = [
        values[i * len(values) // count : (i + 1) * len(values) // count] for i in range(count)
    ]
    means = [sum(part) / len(part) for part in parts]
    finite = [mean for mean in means if math.isfinite(mean)]
    if not finite:
        return "!" * count
    low, high = min(finite), max(finite)
    bars = _BARS if style.unicode else _PLAIN_BARS
    span = (high / 2 - low / 2) or 1.0  # halves: it may be more than the largest number
    return "".join(
        bars[min(int((mean / 2 - low / 2) / span * len(bars)), len(bars) - 1)]
        if math.isfinite(mean)
        else "!"
        for mean in means
    )


def level(share: float, style: Style) -> str:
    """A share as one shade of a heat map, by decades: none, to 1e-5, 1e-3, 1e-2, 0.1, above."""
    shades = _SHADES if style.unicode else _PLAIN_SHADES
    if not share > 0:
        return " "
    return shades[sum(share >= 10.0**decade for decade in _DECADES)]


def aligned(lines: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Lines in columns: the first to the left, numbers to the right, the last as it is."""
    if not lines:
        return
    widths = [max(_length(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        cells = [f"  {line[0]}{' ' * (widths[0] - _length(line[0]))}"]
        cells += [
            f"{' ' * (width - _length(cell))}{cell}"
            for cell, width in zip(line[1:-1], widths[1:-1], strict=True)
        ]
        yield "  ".join([*cells, line[-1]]).rstrip()


def _length(cell: str) -> int:
    return len(_CODES.sub("", cell))
