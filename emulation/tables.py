"""The table cast: the codes of all short keys, filled once by `fp8lab.emulation.rounding`.

An input is first rounded *to odd* at a few more mantissa bits than the target has: cut toward zero,
and the last kept bit set when anything but zero was cut off. With at least two extra bits that
keeps every comparison with a value of the target and with a midpoint between two, so that rounding
the result gives what rounding the input would have given (Boldo and Melquiond, "Emulation of FMA
and correctly rounded sums: proved algorithms using rounding to odd", 2008). What is left is a key:

- float32: the upper 16 bits, a bfloat16 with 7 mantissa bits;
- float64: the upper 17 bits, with 5 mantissa bits;
- float16 and bfloat16: the whole pattern, nothing is cut.

FP8 formats have at most 3 mantissa bits. NaN stays NaN: the bits that were cut set the last one.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from fp8lab.emulation.rounding import round_bits
from fp8lab.formats import FORMATS, FloatFormat, OverflowPolicy

Array = npt.NDArray[Any]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT16 = np.dtype(np.float16)
FLOAT32 = np.dtype(np.float32)
FLOAT64 = np.dtype(np.float64)

_FLOAT64_KEY_BITS = 17
MANTISSA_BITS = 3  # of a target, at most


@lru_cache
def code_table(
    fmt: FloatFormat, rounding: str, policy: OverflowPolicy, dtype: np.dtype[Any]
) -> npt.NDArray[np.uint8]:
    """The code of every key of an input type; read-only."""
    if dtype == FLOAT64:
        words = np.arange(1 << _FLOAT64_KEY_BITS, dtype=np.uint64)
        every = (words << np.uint64(64 - _FLOAT64_KEY_BITS)).view(np.float64)
    elif dtype == FLOAT16:
        every = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    else:
        every = (np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(invalid="ignore"):  # signalling NaN patterns
        table = round_bits(every.astype(np.float64), fmt, rounding, policy)
    table.flags.writeable = False
    return np.asarray(table, dtype=np.uint8)


class TableCast:
    """Casts pieces of at most `size` elements; holds the scratch memory of one thread.

    Args:
        fmt: A target of at most `MANTISSA_BITS` mantissa bits.
        rounding: Any rounding of `round_bits` that needs no random bits.
        policy: What becomes of what has no code.
        dtype: float64, float32, float16 or bfloat16.
        size: Elements in the largest piece.
    """

    def __init__(
        self,
        fmt: FloatFormat,
        rounding: str,
        policy: OverflowPolicy,
        dtype: np.dtype[Any],
        size: int,
    ) -> None:
        self._table = code_table(fmt, rounding, policy, dtype)
        # `take` wants indices of the width of a pointer; others it would convert on every call.
        self._index = np.empty(size, dtype=np.int64)
        self._words = np.dtype(f"u{dtype.itemsize}")
        drop = {FLOAT32: 16, FLOAT64: 64 - _FLOAT64_KEY_BITS}.get(dtype, 0)
        # Arrays of no dimension: NumPy would make one of a scalar in every call.
        self._drop = np.array(drop, dtype=self._words)
        self._low = np.array((1 << drop) - 1, dtype=self._words)
        self._cuts = drop > 0
        # A float64's key has the width of an index and is made in its place.
        self._key = self._index.view(np.uint64)
        if dtype != FLOAT64:
            self._key = np.empty(size if drop else 0, dtype=self._words)

    def __call__(
        self, values: Array, codes: npt.NDArray[np.uint8], random: Array | None = None
    ) -> None:
        """Write the codes of 1-D contiguous values; there are no random bits to look at."""
        words, index = values.view(self._words), self._index[: values.size]
        if self._cuts:
            key, low = self._key[: values.size], self._low
            # Round to odd: the lowest kept bit is set when one that is dropped was set, because
            # adding `low` then carries into it.
            np.bitwise_and(words, low, key)
            np.add(key, low, key)
            np.bitwise_or(key, words, key)
            np.right_shift(key, self._drop, key)
            words = key
        if words.itemsize < 8:
            np.copyto(index, words)
        # Every key is in the table. "wrap" skips the check that "raise" makes for all of them
        # before the first is looked up.
        self._table.take(index, None, codes, "wrap")


@lru_cache
def value_table(fmt: FloatFormat) -> npt.NDArray[np.float32]:
    """The float32 value of every code of an 8-bit format; read-only."""
    table = np.full(256, np.nan, dtype=np.float32)
    for magnitude in range(fmt.max_code + 1):
        table[magnitude] = fmt.value_of_magnitude(magnitude)
        if fmt.signed and (magnitude or fmt.has_negative_zero):
            table[magnitude | fmt.sign_bit] = -table[magnitude]
    if fmt.infinity_code is not None:
        table[fmt.infinity_code] = np.inf
        table[fmt.infinity_code | fmt.sign_bit] = -np.inf
    table.flags.writeable = False
    return table


@lru_cache
def pair_table(fmt: FloatFormat) -> npt.NDArray[np.uint64]:
    """The two float32 values, as one word, of every pair of neighbouring codes; read-only.

    Pairs halve the number of look-ups. Both sides are in memory order, whatever the machine's.
    """
    pairs = np.arange(1 << 16, dtype=np.uint16).view(np.uint8)
    table = value_table(fmt)[pairs].view(np.uint64)
    table.flags.writeable = False
    return table


class TableDecode:
    """Decodes pieces of at most `size` codes to float32; holds one thread's scratch memory."""

    def __init__(self, fmt: FloatFormat, size: int) -> None:
        self._values, self._pairs = value_table(fmt), pair_table(fmt)
        self._index = np.empty((size + 1) // 2, dtype=np.int64)

    def __call__(self, codes: npt.NDArray[np.uint8], values: npt.NDArray[np.float32]) -> None:
        """Write the values of 1-D contiguous codes."""
        even = codes.size & ~1
        index = self._index[: even // 2]
        np.copyto(index, codes[:even].view(np.uint16))
        self._pairs.take(index, out=values[:even].view(np.uint64), mode="wrap")
        if even < codes.size:
            values[even] = self._values[codes[even]]


class Widen:
    """float16 or bfloat16 to float32 in pieces of at most `size`; holds one thread's memory."""

    def __init__(self, size: int) -> None:
        self._index = np.empty(size, dtype=np.int64)

    def __call__(self, values: Array, wide: npt.NDArray[np.float32]) -> None:
        """Write 1-D contiguous values as float32, exactly."""
        if values.dtype == BFLOAT16:  # the upper half of a float32
            words = wide.view(np.uint32)
            np.copyto(words, values.view(np.uint16))
            np.left_shift(words, np.uint32(16), out=words)
        else:  # NumPy's own cast of a float16 is slow on subnormals
            index = self._index[: values.size]
            np.copyto(index, values.view(np.uint16))
            _float16_values().take(index, out=wide, mode="wrap")


@lru_cache
def _float16_values() -> npt.NDArray[np.float32]:
    with np.errstate(invalid="ignore"):  # signalling NaN patterns
        return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


def has_table(fmt: FloatFormat) -> bool:
    """Whether the table form serves a target."""
    return fmt.name in FORMATS and fmt.mantissa_bits <= MANTISSA_BITS
