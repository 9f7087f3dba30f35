"""The operands of a chain of steps: decoded, cut into steps, and a tile's part of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8lab.emulation.casting import dequantize
from fp8lab.emulation.tensorcore import TensorCore
from fp8lab.formats import FORMATS, TARGETS

Array = npt.NDArray[Any]
Float32Array = npt.NDArray[np.float32]

# The narrow steps add exponents as bytes: those of A biased by 63 and of B by 64, so that a sum is
# biased as in a float32 word. A zero operand has this byte in the place of its exponent. With any
# other it stays below the sum of every product, and two of them make 14, whose scale below is one
# that float32 can hold.
_ZERO = 7
# The smallest C that the narrow steps align: the largest sum with a zero's byte in it, unbiased.
SMALLEST_C = 2.0 ** (_ZERO + 64 + 15 - 127)

# The exponent of a zero elsewhere: with any other it stays below every min_exponent.
NOTHING = -1000

_FLOAT8 = {fmt.dtype for fmt in FORMATS.values()}


@dataclass(frozen=True)
class Operand:
    """One operand, decoded, cut into steps: shape (steps, step_k, rows of A or columns of B).

    Attributes:
        values: float32; 0 in the place of what is not finite.
        exponents: int16; `NOTHING` for a zero.
        raw: The values with what is not finite, or None where everything is.
    """

    values: Float32Array
    exponents: npt.NDArray[np.int16]
    raw: Float32Array | None

    def exponent_bytes(self, bias: int) -> npt.NDArray[np.uint8]:
        """Biased exponents of FP8 values, `_ZERO` for a zero."""
        biased = np.where(self.exponents == NOTHING, _ZERO, self.exponents + np.int16(bias))
        return biased.astype(np.uint8)


def decoded(matrix: Array, core: TensorCore) -> Operand:
    """Decode a (K, rows) matrix, pad K to whole blocks, and bring k into the core's order."""
    k, width = matrix.shape
    if matrix.dtype in _FLOAT8:
        raw = dequantize(np.ascontiguousarray(matrix))
    else:
        with np.errstate(invalid="ignore"):
            raw = matrix.astype(np.float32)
    raw = np.pad(raw, ((0, -k % core.block_k), (0, 0)))
    padded = raw.shape[0]
    if core.order:
        size = len(core.order)
        raw = raw.reshape(padded // size, size, width)[:, list(core.order)]
    raw = np.ascontiguousarray(raw.reshape(padded // core.step_k, core.step_k, width))

    special = ~np.isfinite(raw)
    values = np.where(special, np.float32(0), raw) if special.any() else raw
    name = core.read_as or matrix.dtype.name
    fmt = next(fmt for fmt in TARGETS.values() if fmt.dtype_name == name)
    field = ((values.view(np.int32) >> 23) & 0xFF).astype(np.int16)
    exponents = np.maximum(field - np.int16(127), np.int16(fmt.min_exponent))
    exponents[values == 0] = NOTHING
    return Operand(values, exponents, raw if special.any() else None)


class TileOperands:
    """What a tile's steps share: its part of the operands, and what is not finite in it."""

    def __init__(self, a: Operand, b: Operand, rows: slice, columns: slice) -> None:
        self.a, self.b = a.values[:, :, rows], b.values[:, :, columns]
        self.raw_a = None if a.raw is None else a.raw[:, :, rows]
        self.raw_b = None if b.raw is None else b.raw[:, :, columns]
        self.special = self.raw_a is not None or self.raw_b is not None

    def outcome(self, first: int, last: int, c: Float32Array) -> Array | None:
        """What IEEE arithmetic gives where an operand or C is not finite; None if all are.

        In float64, where no finite sum of these ranges overflows: it is finite exactly where no
        NaN and no infinity takes part.
        """
        if not self.special and np.isfinite(c).all():
            return None
        x = self.a if self.raw_a is None else self.raw_a
        y = self.b if self.raw_b is None else self.raw_b
        left = x[first:last].reshape(-1, x.shape[2]).astype(np.float64)
        right = y[first:last].reshape(-1, y.shape[2]).astype(np.float64)
        return np.asarray(left.T @ right + c)
