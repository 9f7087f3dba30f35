"""Master weights in fewer bits: bfloat16 with the other 16 bits beside it, and bfloat16 alone."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from fp8lab.emulation.fused import Array, Float32Array

Int16Array = np.ndarray[tuple[int, ...], np.dtype[np.int16]]
_INFINITY = np.uint32(0x7F800000)


def split_master(master: Float32Array) -> tuple[Array, Int16Array]:
    """Split float32 into a bfloat16 weight and the 16 bits that it leaves out.

    The remainder is the lower half of the float32 as a signed integer; where it is negative (the
    discarded part is half a step or more) the upper half is counted up by one. So the weight is the
    float32 rounded to nearest with ties away from zero: where a cast to bfloat16 rounds a tie to
    the even neighbour below, the two differ. `join_master` gives every finite float32 and both
    infinities back exactly. A magnitude that rounds past the largest bfloat16 has the weight Inf,
    as a cast would, and still comes back. NaN becomes 0x7FFF with remainder 0: counted up,
    0x7FFFFFFF would become -0.

    Args:
        master: float32, any shape.

    Returns:
        bfloat16 weights and int16 remainders of that shape.

    Source: TransformerEngine's `store_param_remainders`, with the guard for NaN.

    >>> import numpy as np
    >>> weight, remainder = split_master(np.uint32([0x3F808000]).view(np.float32))
    >>> hex(int(weight.view(np.uint16)[0])), int(remainder[0])
    ('0x3f81', -32768)
    """
    words = np.ascontiguousarray(master, dtype=np.float32).view(np.uint32)
    up = (words >> np.uint32(15)) & np.uint32(1)
    high = (words >> np.uint32(16)) + up
    nan = (words & np.uint32(0x7FFFFFFF)) > _INFINITY
    high = np.where(nan, np.uint32(0x7FFF), high).astype(np.uint16)
    low = np.where(nan, np.uint32(0), words & np.uint32(0xFFFF)).astype(np.uint16)
    shape = np.shape(master)
    return high.view(ml_dtypes.bfloat16).reshape(shape), low.view(np.int16).reshape(shape)


def join_master(weight: Array, remainder: Int16Array) -> Float32Array:
    """The float32 that `split_master` split.

    >>> weight, remainder = split_master(np.float32([1 / 3]))
    >>> float(join_master(weight, remainder)[0]) == float(np.float32(1 / 3))
    True
    """
    low = np.ascontiguousarray(remainder).view(np.uint16).astype(np.uint32)
    high = np.ascontiguousarray(weight).view(np.uint16).astype(np.uint32)
    high = (high - (low >> np.uint32(15))) & np.uint32(0xFFFF)
    words = (high << np.uint32(16)) | low
    return words.view(np.float32).reshape(np.shape(weight))


def round_master(master: Float32Array, random_words: Array) -> Array:
    """Round float32 to bfloat16 stochastically: up exactly when r < the lower 16 bits.

    r is the low 16 bits of the random word, so a value a fraction f of the way to its neighbour
    away from zero goes there in f of the draws; a representable value stays. A finite value never
    becomes Inf: it stays the largest finite one. NaN becomes 0x7FFF, Inf stays.

    Args:
        master: float32, any shape.
        random_words: uint32 of that shape.

    >>> third = np.float32([1 / 3, 1 / 3])  # 0x3EAAAAAB
    >>> [hex(w) for w in round_master(third, np.uint32([0xAAAA, 0xAAAB])).view(np.uint16).tolist()]
    ['0x3eab', '0x3eaa']
    """
    words = np.ascontiguousarray(master, dtype=np.float32).view(np.uint32)
    draws = np.ascontiguousarray(random_words, dtype=np.uint32) & np.uint32(0xFFFF)
    magnitude = words & np.uint32(0x7FFFFFFF)
    up = (draws < (words & np.uint32(0xFFFF))) & (magnitude < np.uint32(0x7F7F0000))
    high = (words >> np.uint32(16)) + up
    high = np.where(magnitude > _INFINITY, np.uint32(0x7FFF), high).astype(np.uint16)
    return np.asarray(high.view(ml_dtypes.bfloat16)).reshape(np.shape(master))
