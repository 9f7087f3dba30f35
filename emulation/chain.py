"""The fast form of a tensor core's chain: NumPy on tiles that fit the cache.

Two versions of a step, each exact in the arithmetic it uses:

- `_NarrowSteps`, in float32, for the FP8 cores that keep 13 fraction bits;
- `_WideSteps`, in float64, for every other.

Infinities and NaN are taken out of the operands first; what they give is computed apart, by IEEE
arithmetic in float64, and put in its place. Tested against `fp8lab.emulation.dot`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fp8lab.emulation.casting import dequantize
from fp8lab.emulation.fused import fma
from fp8lab.emulation.tensorcore import FLOAT8_OPERANDS, TensorCore
from fp8lab.formats import FORMATS, TARGETS

Array = npt.NDArray[Any]
Float32Array = npt.NDArray[np.float32]

# Rows and columns of a tile. Its largest temporary, 33 x 8 x 1024 float32, is 1 MiB: it stays in
# the L2 cache. Threads hand over the interpreter lock at every call, so they take longer ones, of
# twice the rows, and lose less by the cache than they would by waiting.
TILE_M, TILE_M_THREADED, TILE_N = 8, 16, 1024

# NumPy copies operands of short inner loops into buffers of this many elements; by default (8192)
# that costs an outer product of 512 columns two thirds of its speed.
BUFFER = 512

# Steps whose exponents are added in one go: with fewer and longer calls, threads wait for the
# interpreter lock less often.
_GROUP = 2

# The narrow steps add exponents as bytes: those of A biased by 63 and of B by 64, so that a sum is
# biased as in a float32 word. A zero operand has this byte in the place of its exponent. With any
# other it stays below the sum of every product, and two of them make 14, whose scale below is one
# that float32 can hold.
_ZERO = 7
# The smallest C that the narrow steps align: the largest sum with a zero's byte in it, unbiased.
SMALLEST_C = 2.0 ** (_ZERO + 64 + 15 - 127)

# The exponent of a zero elsewhere: with any other it stays below every min_exponent.
_NOTHING = -1000

_FLOAT8 = {fmt.dtype for fmt in FORMATS.values()}


@dataclass(frozen=True)
class Operand:
    """One operand, decoded, cut into steps: shape (steps, step_k, rows of A or columns of B).

    Attributes:
        values: float32; 0 in the place of what is not finite.
        exponents: int16; `_NOTHING` for a zero.
        raw: The values with what is not finite, or None where everything is.
    """

    values: Float32Array
    exponents: npt.NDArray[np.int16]
    raw: Float32Array | None

    def exponent_bytes(self, bias: int) -> npt.NDArray[np.uint8]:
        """Biased exponents of FP8 values, `_ZERO` for a zero."""
        biased = np.where(self.exponents == _NOTHING, _ZERO, self.exponents + np.int16(bias))
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
    exponents[values == 0] = _NOTHING
    return Operand(values, exponents, raw if special.any() else None)


StepsOnTile = Callable[[slice, slice], "Steps"]


class Steps(Protocol):
    """Walks some steps on one tile."""

    def __call__(self, first: int, last: int, c: Float32Array) -> Float32Array:
        """The accumulator after the steps `first` to `last` (not included), started from c."""
        ...


def steps_of(a: Operand, b: Operand, core: TensorCore, *, tiny: bool) -> StepsOnTile:
    """How to make the steps of a tile, given its rows and columns.

    Args:
        tiny: Whether C may hold values below `SMALLEST_C` that are not zero.
    """
    if core.fraction_bits is None:
        return partial(_FusedSteps, a, b)
    narrow = (
        core.fraction_bits == 13
        and core.significand_bits == 14
        and core.rounding == "toward_zero"
        and core.accumulator == "float32"
        and core.step_k <= 32
        and core.operands == FLOAT8_OPERANDS
        and core.read_as is None
    )
    if narrow and not tiny:
        return partial(_NarrowSteps, a, b, a.exponent_bytes(63), b.exponent_bytes(64))
    return partial(_WideSteps, a, b, core)


class _Tile:
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


class _NarrowSteps(_Tile):
    """FP8 with 13 fraction bits and 14 significand bits, in float32.

    Why float32 is exact here. A product of two FP8 values has at most 8 significant bits. Scaled
    by 2**(13 - emax) it is below 2**15, so cut toward zero it is an integer of at most 15 bits, and
    C likewise one of at most 14. The sum of 32 such products and C stays below 2**21: every partial
    sum is an integer that float32 holds. Scaling it back by a power of two is exact, and the cut to
    14 bits clears the low 10 bits of the word. Where emax is C's and so large that a scaled product
    underflows, the product is below one unit and cut to zero anyway.
    """

    def __init__(
        self,
        a: Operand,
        b: Operand,
        a_bytes: npt.NDArray[np.uint8],
        b_bytes: npt.NDArray[np.uint8],
        rows: slice,
        columns: slice,
    ) -> None:
        super().__init__(a, b, rows, columns)
        self.a_bytes, self.b_bytes = a_bytes[:, :, rows], b_bytes[:, :, columns]
        step_k, m, n = self.a.shape[1], self.a.shape[2], self.b.shape[2]
        self.terms = np.empty((step_k + 1, m, n), np.float32)  # the last one is C
        self.sums = np.empty((_GROUP, step_k, m, n), np.uint8)

    def __call__(self, first: int, last: int, c: Float32Array) -> Float32Array:
        special = self.outcome(first, last, c)
        if special is not None:
            c = np.where(np.isfinite(c), c, np.float32(0))
        for start in range(first, last, _GROUP):
            stop = min(start + _GROUP, last)
            for step, emax in zip(range(start, stop), self._emax(start, stop), strict=True):
                c = self._step(step, emax, c)
        if special is not None:
            c = np.where(np.isfinite(special), c, special.astype(np.float32))
        return c

    def _emax(self, start: int, stop: int) -> npt.NDArray[np.uint32]:
        """emax of the products of each step, as it stands in a float32 word: biased, shifted."""
        a, b = self.a_bytes[start:stop], self.b_bytes[start:stop]
        sums = self.sums[: len(a)]
        np.add(a[:, :, :, None], b[:, :, None, :], out=sums)
        emax: npt.NDArray[np.uint32] = np.maximum.reduce(sums, axis=1).astype(np.uint32)
        emax <<= np.uint32(23)
        return emax

    def _step(self, step: int, emax: npt.NDArray[np.uint32], c: Float32Array) -> Float32Array:
        terms = self.terms
        np.multiply(self.a[step][:, :, None], self.b[step][:, None, :], out=terms[:-1])
        terms[-1] = c
        np.maximum(emax, c.view(np.uint32) & np.uint32(0x7F800000), out=emax)
        scale = (np.uint32((127 + 127 + 13) << 23) - emax).view(np.float32)  # 2**(13 - emax)
        terms *= scale
        np.trunc(terms, out=terms)
        # From 0.0, because a sum of nothing but -0 is +0 on the card.
        total = np.add.reduce(terms, axis=0, initial=np.float32(0))
        total /= scale
        total.view(np.uint32)[...] &= np.uint32(0xFFFFFC00)
        return np.asarray(total)


class _WideSteps(_Tile):
    """Any number of fraction bits up to 25, in float64, one step at a time.

    A product of two operands of at most 11 significant bits is exact in float64. Aligned and cut,
    terms are integers below 2**27, so the sum of 33 is exact.
    """

    def __init__(
        self, a: Operand, b: Operand, core: TensorCore, rows: slice, columns: slice
    ) -> None:
        super().__init__(a, b, rows, columns)
        self.core = core
        self.a_exponents = a.exponents[:, :, rows]
        self.b_exponents = b.exponents[:, :, columns]
        assert core.fraction_bits is not None
        self.fraction_bits = core.fraction_bits

    def __call__(self, first: int, last: int, c: Float32Array) -> Float32Array:
        for step in range(first, last):
            special = self.outcome(step, step + 1, c)
            if special is not None:
                c = np.where(np.isfinite(c), c, np.float32(0))
            c = self._step(step, c)
            if special is not None:
                c = np.where(np.isfinite(special), c, special.astype(np.float32))
        return c

    def _step(self, step: int, c: Float32Array) -> Float32Array:
        core = self.core
        accumulator_min = -14 if core.accumulator == "float16" else -126
        products = np.multiply(self.a[step][:, :, None], self.b[step][:, None, :], dtype=np.float64)
        exponents = self.a_exponents[step][:, :, None] + self.b_exponents[step][:, None, :]
        own = np.where(c == 0, core.min_exponent, np.maximum(_exponent(c), accumulator_min))
        emax = np.maximum(
            exponents.max(axis=0).astype(np.int32), np.maximum(own, core.min_exponent)
        )
        scale = _power_of_two(self.fraction_bits - emax)
        total = np.trunc(products * scale).sum(axis=0, initial=0.0)
        total += np.trunc(c.astype(np.float64) * scale)
        total *= _power_of_two(emax - self.fraction_bits)
        return _rounded(total, core.significand_bits, core.accumulator, core.rounding)


class _FusedSteps(_Tile):
    """IEEE_FLOAT32: one fused multiply-add after the other."""

    def __call__(self, first: int, last: int, c: Float32Array) -> Float32Array:
        x = self.a if self.raw_a is None else self.raw_a
        y = self.b if self.raw_b is None else self.raw_b
        for step in range(first, last):
            c = fma(x[step, 0][:, None], y[step, 0][None, :], c)
        return c


def _exponent(x: Array) -> npt.NDArray[np.int32]:
    """floor(log2|x|); of no meaning for zero."""
    return np.asarray(np.frexp(x)[1] - 1)


def _power_of_two(exponent: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
    """2**exponent for -1022 to 1023, from its bits."""
    return (exponent.astype(np.int64) + 1023 << 52).view(np.float64)


def _rounded(total: Array, significand_bits: int, accumulator: str, rounding: str) -> Float32Array:
    """A float64 sum at the accumulator's precision and range, held in float32."""
    smallest = -24 if accumulator == "float16" else -149
    quantum = np.maximum(_exponent(total) - significand_bits + 1, smallest)
    with np.errstate(over="ignore"):
        steps = total * _power_of_two(-quantum)
        steps = np.rint(steps) if rounding == "nearest_even" else np.trunc(steps)
        # + 0.0: a sum of nothing but -0, or one that is cut to zero, is +0 on the card.
        result = (steps * _power_of_two(quantum) + 0.0).astype(np.float32)
        if accumulator == "float16":
            result = np.where(np.abs(result) >= 2.0**16, np.copysign(np.inf, result), result)
    return result.astype(np.float32)
