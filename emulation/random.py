"""Philox 4x32-10, as Triton's `tl.randint4x`: random words that depend on nothing but their place.

A counter-based generator has no state to carry: word i of a seed is a function of the seed and i.
So a kernel's stochastic rounding can be replayed here, in any order and on any shape.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011); Triton's
`language/random.py` for how seed and offset become key and counter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8lab.emulation.integers import as_integer

Array = npt.NDArray[Any]
Words = npt.NDArray[np.uint32]

ROUNDS = 10
_KEY_STEPS = np.array([0x9E3779B9, 0xBB67AE85], dtype=np.uint32)
_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], dtype=np.uint64)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox(counter: Sequence[Array], key: tuple[int, int], *, rounds: int = ROUNDS) -> list[Words]:
    """Philox 4x32: four random words for each counter.

    Args:
        counter: Four uint32 arrays that broadcast together, lowest word first.
        key: Two unsigned 32-bit integers, lowest first.
        rounds: How many rounds; 10 is what is meant where nothing is said.

    Returns:
        Four uint32 arrays of the broadcast shape.

    >>> import numpy as np
    >>> zero = np.zeros((), np.uint32)
    >>> [hex(int(word)) for word in philox([zero] * 4, (0, 0))]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    c0, c1, c2, c3 = np.broadcast_arrays(*(np.asarray(c, dtype=np.uint32) for c in counter))
    k0, k1 = (np.uint32(word) for word in key)
    with np.errstate(over="ignore"):  # everything is modulo 2**32
        for _ in range(rounds):
            first = c0.astype(np.uint64) * _MULTIPLIERS[0]
            second = c2.astype(np.uint64) * _MULTIPLIERS[1]
            c0, c1, c2, c3 = (
                (second >> _HALF).astype(np.uint32) ^ c1 ^ k0,
                (second & _LOW).astype(np.uint32),
                (first >> _HALF).astype(np.uint32) ^ c3 ^ k1,
                (first & _LOW).astype(np.uint32),
            )
            k0, k1 = k0 + _KEY_STEPS[0], k1 + _KEY_STEPS[1]
    return [np.asarray(word) for word in (c0, c1, c2, c3)]


def randint4x(seed: int, offset: npt.ArrayLike, *, rounds: int = ROUNDS) -> list[Words]:
    """The four words that `tl.randint4x(seed, offset)` gives, as uint32.

    The key is the seed modulo 2**64. The counter is the offset: its low 32 bits, then, for a 64-bit
    offset, its high 32 bits; the other words are 0. So a negative int32 offset is not the negative
    int64 one, as in Triton.

    Args:
        seed: Any Python integer that fits 64 bits, signed or unsigned.
        offset: int32, uint32, int64 or uint64 array of any shape, or an integer.
        rounds: See `philox`.

    Returns:
        Four uint32 arrays of the shape of offset. Triton types them int32 or uint32; the bits are
        the same.

    Raises:
        TypeError: seed is not an integer, or offset has another dtype.
        ValueError: seed does not fit 64 bits.

    >>> [hex(int(word)) for word in randint4x(0, 0)]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    key = _key(seed)
    places = np.asarray(offset)
    if places.dtype.kind not in "iu" or places.dtype.itemsize not in (4, 8):
        raise TypeError(
            f"offset has dtype {places.dtype}; accepted: int32, uint32, int64 and uint64"
        )
    low = places.astype(np.uint32)
    high = np.zeros_like(low)
    if places.dtype.itemsize == 8:
        high = (places.astype(np.uint64) >> _HALF).astype(np.uint32)
    zero = np.zeros((), np.uint32)
    return philox((low, high, zero, zero), key, rounds=rounds)


def random_words(seed: int, shape: int | Sequence[int], *, offset: int = 0) -> Words:
    """One random word for each element of a tensor: what stochastic rounding takes as random bits.

    Element i, counted in C order, takes word i % 4 of `randint4x(seed, offset + i // 4)`, with
    64-bit offsets. One call of Philox thus serves four neighbours. A kernel that casts BLOCK
    elements from `start`, a multiple of 4, replays them with

        group = offset + start // 4 + tl.arange(0, BLOCK // 4)      # int64
        r0, r1, r2, r3 = tl.randint4x(seed, group)
        words = tl.interleave(tl.interleave(r0, r2), tl.interleave(r1, r3))

    Args:
        seed: See `randint4x`.
        shape: The tensor's shape; may hold 0.
        offset: The first group's place in the stream, at least 0. Tensors that share a seed take
            ranges of ceil(size / 4) places that do not overlap.

    Returns:
        uint32 array of that shape.

    Raises:
        TypeError, ValueError: As `randint4x`; a shape that is none; or an offset that is negative
            or leaves 64 bits.

    >>> [hex(int(word)) for word in random_words(0, 6)[:2]]
    ['0x6627e8d5', '0xe169c58d']
    """
    dimensions = _dimensions(shape)
    size = math.prod(dimensions)
    groups = -(-size // 4)
    first = as_integer(offset)
    if first is None or first < 0 or first + groups > 1 << 63:
        raise ValueError(f"offset is {offset!r}; accepted: an integer from 0 to 2**63 - {groups}")
    places = np.arange(first, first + groups, dtype=np.int64)
    words = np.stack(randint4x(seed, places), axis=-1)
    return words.reshape(-1)[:size].reshape(dimensions)


def _dimensions(shape: int | Sequence[int]) -> tuple[int, ...]:
    accepted = "an integer, or a sequence of them, each 0 or more"
    alone = as_integer(shape)
    try:
        given = tuple(shape) if alone is None else (alone,)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"shape is {shape!r}; accepted: {accepted}") from None
    sizes = [as_integer(size) for size in given]
    if None in sizes:
        raise TypeError(f"shape is {shape!r}; accepted: {accepted}")
    found = tuple(size for size in sizes if size is not None)
    if any(size < 0 for size in found):
        raise ValueError(f"shape is {shape!r}; accepted: {accepted}")
    return found


def _key(seed: int) -> tuple[int, int]:
    number = as_integer(seed)
    if number is None:
        raise TypeError(f"seed is {seed!r}; accepted: an integer")
    if not -(1 << 63) <= number < 1 << 64:
        raise ValueError(f"seed is {seed}; accepted: -2**63 to 2**64 - 1")
    unsigned = number % (1 << 64)
    return unsigned & 0xFFFFFFFF, unsigned >> 32
