"""Which elements of a large result an audit computes again: every one of them once in a period.

The places 0 to n-1 are walked in steps of a stride that shares no factor with n, so that a walk of
n steps meets each place once and neighbours are far apart. Start and stride come from the seed, the
result's name and the walk's number: nothing is favoured, and the same run takes the same sample.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from zlib import crc32

import numpy as np
import numpy.typing as npt

from fp8lab.emulation.random import random_words

Places = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Draw:
    """A sample of a matrix: where the chosen rows and columns cross.

    Attributes:
        rows, columns: Indices.
        period: After how many draws every element was chosen once.
    """

    rows: Places
    columns: Places
    period: int


class Sampler:
    """Draws samples, and counts the draws of each result.

    Args:
        seed: Of the places at which walks start.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._turns: dict[tuple[str, tuple[int, ...]], int] = {}

    def elements(self, name: str, size: int, count: int) -> tuple[Places, int]:
        """At most `count` of `size` places, in order; and the period.

        Args:
            name: Of the result: draws of one name and size follow each other.
            size: How many places there are.
            count: How many are wanted, at least 1; all of them where that is not fewer.
        """
        if size <= count:
            return np.arange(size, dtype=np.int64), 1
        period = -(-size // count)
        turn, cycle = self._turn(name, (size,), period)
        steps = np.arange(turn * count, min((turn + 1) * count, size), dtype=np.int64)
        return np.sort(self._walk(f"{name} {cycle}", size, steps)), period

    def grid(self, name: str, shape: tuple[int, int], wide: tuple[int, int]) -> Draw:
        """Some rows and some columns of a matrix.

        Args:
            name: As for `elements`.
            shape: Of the matrix.
            wide: How many rows, and how many columns, are wanted at most.
        """
        counts = [max(1, -(-size // some)) for size, some in zip(shape, wide, strict=True)]
        period = counts[0] * counts[1]
        turn, cycle = self._turn(name, shape, period)
        pair = int(self._walk(f"{name} {cycle}", period, np.array([turn], np.int64))[0])
        chosen = []
        for axis, place in enumerate(divmod(pair, counts[1])):
            size, some = shape[axis], wide[axis]
            steps = np.arange(place * some, min((place + 1) * some, size), dtype=np.int64)
            chosen.append(np.sort(self._walk(f"{name} {cycle} {axis}", size, steps)))
        return Draw(chosen[0], chosen[1], period)

    def _turn(self, name: str, shape: tuple[int, ...], period: int) -> tuple[int, int]:
        """Which draw of its walk this is, and of which walk."""
        count = self._turns.get((name, shape), 0)
        self._turns[name, shape] = count + 1
        cycle, turn = divmod(count, period)
        return turn, cycle

    def _walk(self, name: str, size: int, steps: Places) -> Places:
        """The places at those steps of a walk over `size` of them."""
        if size == 0:
            return steps[:0]
        start, stride = random_words(self.seed, 2, offset=crc32(name.encode())).tolist()
        stride %= size
        while math.gcd(stride, size) != 1:
            stride += 1
        return np.asarray((start + steps * stride) % size, dtype=np.int64)
