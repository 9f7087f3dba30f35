"""Cutting arrays into pieces that fit the cache, and sharing the pieces between threads.

NumPy releases the interpreter's lock in the loops that the casts are made of, so threads help. The
result does not depend on the number of threads: pieces are independent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from fp8lab.emulation.integers import as_integer

PIECE = 1 << 15  # elements: a thread's scratch memory takes a third of a 2 MiB L2 cache

Index = tuple[int | slice, ...]

_default_threads = 1


def set_threads(count: int) -> int:
    """Set how many threads the casts use unless a call says otherwise; return the count before.

    It starts at 1: experiments and tests already fill the cores with processes.

    Args:
        count: At least 1.

    Raises:
        ValueError: count is not an integer of at least 1.

    >>> before = set_threads(2)
    >>> set_threads(before)
    2
    """
    global _default_threads
    before, _default_threads = _default_threads, checked_threads(count)
    return before


def checked_threads(count: int | None) -> int:
    """The number of threads to use: `count`, or the default for None."""
    if count is None:
        return _default_threads
    threads = as_integer(count)
    if threads is None or threads < 1:
        raise ValueError(f"threads is {count!r}; accepted: an integer, 1 or more")
    return threads


def pieces(shape: tuple[int, ...], limit: int = PIECE) -> Iterator[Index]:
    """Indices that cut an array of that shape, in memory order, into runs of at most `limit`.

    Each piece is contiguous in a C-ordered array. Nothing is cut of an array without elements.
    """
    if 0 in shape:
        return
    if not shape:
        yield ()
        return
    axis, inner = 0, math.prod(shape[1:])
    while inner > limit:
        axis += 1
        inner //= shape[axis]
    step = limit // inner
    for outer in np.ndindex(*shape[:axis]):
        for start in range(0, shape[axis], step):
            yield (*outer, slice(start, start + step))


def run_pieces(
    work: Callable[[Sequence[Index]], None], shape: tuple[int, ...], threads: int
) -> None:
    """Call `work` with the pieces of an array: all of them, or a share of them in each thread."""
    every = list(pieces(shape))
    threads = min(threads, len(every))
    if threads <= 1:
        work(every)
        return
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(work, [every[first::threads] for first in range(threads)]):
            pass
