"""The casts' fast forms against each other and against other libraries, on float32 bit patterns.

`fp8lab verify --exhaustive` takes all 2**32; a sample takes the first so many of a random order. A
difference is counted, and the smallest pattern that shows it is kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8lab.emulation.casting import quantize
from fp8lab.emulation.rounding import round_bits
from fp8lab.errors import UserError
from fp8lab.formats import E4M3, E5M2, FloatFormat, overflow_policy
from fp8lab.peers import ML_DTYPES, TORCH_CPU, Peer
from fp8lab.records import environment, today

Array = npt.NDArray[Any]
Words = npt.NDArray[np.uint32]

FORMATS = (E4M3, E5M2)
PATTERNS = 1 << 32
CHUNK = 1 << 22
_ROUND_BITS_PIECE = 1 << 14
# The other presets are combinations of choices that these two have, and are compared on every
# 16-bit pattern by the tests.
_BY_BITS = (
    ("nearest_even", "ptx_satfinite"),
    ("nearest_even", "ml_dtypes"),
    ("toward_zero", "ptx_satfinite"),
)
# An odd multiplier permutes the patterns: its first so many are a sample spread over all of them.
_STRIDE = 0x9E3779B1


@dataclass(frozen=True)
class Check:
    """One comparison: the table form under a rounding and policy, and what it must equal.

    Attributes:
        name: What is compared with what.
        fmt: The format that is cast to.
        rounding, overflow: Of the table form.
        expected: From float32 values to the codes that are right.
    """

    name: str
    fmt: FloatFormat
    rounding: str
    overflow: str
    expected: Callable[[Array], Array]


@dataclass(frozen=True)
class Difference:
    """How often a check failed, and the smallest pattern on which it did."""

    check: str
    format: str
    count: int
    word: int
    actual: int
    expected: int

    def __str__(self) -> str:
        return (
            f"{self.format}, {self.check}: {self.count} differ; first 0x{self.word:08X}"
            f" ({np.uint32(self.word).view(np.float32)!s}): 0x{self.actual:02X}, expected"
            f" 0x{self.expected:02X}"
        )


def checks() -> tuple[list[Check], list[str]]:
    """What can be compared here, and what cannot, with the reason."""
    found, skipped = [], []
    for fmt in FORMATS:
        for rounding, overflow in _BY_BITS:
            bits = partial(_by_bits, fmt, rounding, overflow)
            name = f"table against bits, {rounding}, {overflow}"
            found.append(Check(name, fmt, rounding, overflow, bits))
        for peer in (ML_DTYPES, TORCH_CPU):
            name = f"table against {peer.name}, nearest_even, {peer.overflow}"
            if reason := peer.lacking():
                skipped.append(f"{fmt.name}, {name}: {reason}")
                continue
            expected = partial(_by_peer, peer, fmt)
            found.append(Check(name, fmt, "nearest_even", str(peer.overflow), expected))
    return found, skipped


def differences(words: Words, which: list[Check]) -> list[Difference]:
    """The checks that fail on some float32 patterns."""
    x = words.view(np.float32)
    found = []
    for check in which:
        codes = quantize(x, check.fmt, rounding=check.rounding, overflow=check.overflow)
        actual, expected = codes.view(np.uint8), check.expected(x).view(np.uint8)
        if np.array_equal(actual, expected):
            continue
        wrong = np.flatnonzero(actual != expected)
        first = wrong[np.argmin(words[wrong])]
        found.append(
            Difference(
                check.name,
                check.fmt.name,
                int(wrong.size),
                int(words[first]),
                int(actual[first]),
                int(expected[first]),
            )
        )
    return found


def verify(sample: int | None, jobs: int, *, command: str) -> dict[str, Any]:
    """Run every check with a progress bar.

    Args:
        sample: How many patterns of a fixed random order; None takes all 2**32.
        jobs: Processes.
        command: What is written down as the command.

    Returns:
        A row: command, date, environment, patterns, seconds, the checks with their differences
        (merged over all patterns), and what was skipped.

    Raises:
        UserError: A number that is out of range.
    """
    from tqdm import tqdm

    total = PATTERNS if sample is None else sample
    if not 1 <= total <= PATTERNS:
        raise UserError(f"--sample is {sample}; accepted: 1 to {PATTERNS}")
    if jobs < 1:
        raise UserError(f"--jobs is {jobs}; accepted: 1 or more")
    which, skipped = checks()
    started = time.perf_counter()
    merged: dict[tuple[str, str], Difference] = {}
    with (
        closing(_results(total, sample is not None, jobs)) as results,
        tqdm(total=total, unit="pattern", unit_scale=True) as bar,
    ):
        for count, found in results:
            for difference in found:
                key = (difference.format, difference.check)
                merged[key] = _merged(merged.get(key), difference)
            bar.set_postfix_str(f"{len(merged)} of {len(which)} checks fail", refresh=False)
            bar.update(count)
    return {
        "command": command,
        "date": today(),
        "environment": environment("cpu"),
        "patterns": total,
        "seconds": round(time.perf_counter() - started, 1),
        "checks": [
            {"format": check.fmt.name, "check": check.name, **_outcome(check, merged)}
            for check in which
        ],
        "skipped": skipped,
    }


def _by_peer(peer: Peer, fmt: FloatFormat, x: Array) -> Array:
    return peer.cast(x, fmt)


def _by_bits(fmt: FloatFormat, rounding: str, overflow: str, x: Array) -> Array:
    policy = overflow_policy(overflow, fmt)
    codes = np.empty(x.size, dtype=np.uint8)
    for start in range(0, x.size, _ROUND_BITS_PIECE):
        part = slice(start, start + _ROUND_BITS_PIECE)
        codes[part] = round_bits(x[part], fmt, rounding, policy)
    return codes


def _results(total: int, shuffled: bool, jobs: int) -> Generator[tuple[int, list[Difference]]]:
    """(patterns, differences) for each chunk, as they are done."""
    starts = range(0, total, CHUNK)
    work = partial(_chunk, total=total, shuffled=shuffled)
    if jobs == 1:
        yield from map(work, starts)
        return
    # A forked copy of a process with threads (torch's) may hang.
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"))
    try:
        yield from pool.map(work, starts)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _chunk(start: int, total: int, shuffled: bool) -> tuple[int, list[Difference]]:
    count = min(CHUNK, total - start)
    words = np.arange(start, start + count, dtype=np.uint64)
    if shuffled:
        words *= np.uint64(_STRIDE)
    return count, differences(words.astype(np.uint32), checks()[0])


def _merged(before: Difference | None, new: Difference) -> Difference:
    if before is None:
        return new
    first = min(before, new, key=lambda difference: difference.word)
    return Difference(
        new.check, new.format, before.count + new.count, first.word, first.actual, first.expected
    )


def _outcome(check: Check, merged: dict[tuple[str, str], Difference]) -> dict[str, Any]:
    difference = merged.get((check.fmt.name, check.name))
    if difference is None:
        return {"differences": 0}
    return {"differences": difference.count, "first": str(difference)}
