"""The FP8 cast of Triton's interpreter, which is not the card's."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fp8lab.formats import Float8Format

Array = npt.NDArray[Any]


def interpreted(fmt: Float8Format, y: Array) -> npt.NDArray[np.uint8]:
    """Codes of float32 values as `.to(tl.float8...)` gives them under TRITON_INTERPRET=1.

    The exponent is held between 0 and the largest field, so that overflow, Inf and NaN lose theirs;
    the first dropped bit alone rounds, so that ties go away; the rounded mantissa is joined by OR,
    so that a carry is lost where the exponent is odd; subnormal results are not rounded, and
    subnormal inputs are not shifted.

    Source: `_convert_float` in triton/runtime/interpreter.py, Triton 3.6 to 3.9.
    """
    words = np.ascontiguousarray(y).view(np.uint32).astype(np.int64)
    field, mantissa = (words >> 23) & 0xFF, words & 0x7FFFFF
    tiny = field == 0
    # A subnormal input is normalised: its leading bit moves out of the mantissa.
    length = np.where(mantissa > 0, np.frexp(mantissa.astype(np.float64))[1], 0)
    shift = np.where(tiny & (mantissa > 0), 24 - length, 0)
    mantissa = (mantissa << shift) & 0x7FFFFF
    exponent = np.where(tiny, np.where(mantissa | shift > 0, 1 - shift, 127 - fmt.bias), field)
    held = np.clip(exponent - 127 + fmt.bias, 0, (1 << fmt.exponent_bits) - 1)
    drop = 23 - fmt.mantissa_bits
    significand = (mantissa >> drop) + ((mantissa >> (drop - 1)) & 1)
    below = np.where((held == 0) & ~tiny, 1 - fmt.bias - (field - 127), 0)
    # A shift past the width gives 0 in NumPy.
    cut = significand >> np.minimum(below, 63)
    hidden = np.where(below <= fmt.mantissa_bits, 1 << np.maximum(fmt.mantissa_bits - below, 0), 0)
    significand = np.where(below > 0, cut | hidden, significand)
    codes = ((words >> 31) << 7) | (held << fmt.mantissa_bits) | significand
    return np.asarray(codes, dtype=np.uint8)
