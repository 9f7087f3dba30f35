"""Random words that decide a stochastic cast: at the threshold and one to either side of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fp8lab.formats import FloatFormat

Array = npt.NDArray[Any]

_COMMON = (0, 1, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)


def decisive_words(x: Array, fmt: FloatFormat, scale: float) -> tuple[Array, Array]:
    """Each value beside a few words, among them those around the fraction that decides.

    A value rounds away from zero exactly when its word is below floor(fraction * 2**32), fraction
    being its place between its two neighbours in the format. The words are that number, and one to
    either side (modulo 2**32), one from anywhere, and 0, 1, 2**31 - 1, 2**31 and 2**32 - 1, in
    turn.

    Args:
        x: Values of any shape.
        fmt: The format.
        scale: What multiplies them.

    Returns:
        The values, and int64 words from 0 to 2**32 - 1; the shape of x, or four times as many in
        one dimension where x has one.
    """
    if x.ndim == 1:
        x = np.repeat(x, 4)
    with np.errstate(all="ignore"):
        y = np.abs((x.astype(np.float32) * np.float32(scale)).astype(np.float64))
    values = np.array([fmt.value_of_magnitude(code) for code in range(fmt.max_code + 2)])
    inside = np.isfinite(y) & (y < values[-1])
    y = np.where(inside, y, 0.0)
    below = np.clip(np.searchsorted(values, y, side="right") - 1, 0, values.size - 2)
    low, high = values[below], values[below + 1]
    threshold = np.floor((y - low) / (high - low) * 2.0**32).astype(np.int64)
    place = np.arange(x.size).reshape(x.shape)
    anywhere = place * np.int64(0x9E3779B1)  # an odd multiplier spreads them over 2**32
    near = np.where(place % 4 == 3, anywhere, threshold + place % 4 - 1)
    common = np.array(_COMMON, dtype=np.int64)[place % len(_COMMON)]
    # Where the fraction says nothing (representable values, overflow), the common words.
    words = np.where(threshold > 0, near, common)
    return x, np.asarray(words & np.int64(0xFFFFFFFF))
