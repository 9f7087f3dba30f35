"""The fast form of a tensor core's chain: NumPy on tiles that fit the cache.

Two versions of a step, each exact in the arithmetic it uses:

- `NarrowSteps`, in float32, for the FP8 cores that keep 13 fraction bits;
- `_WideSteps`, in float64, for every other.

Infinities and NaN are taken out of the operands first; what they give is computed apart, by IEEE
arithmetic in float64, and put in its place. Tested against `fp8lab.emulation.dot`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from fp8lab.emulation.chain_narrow import NarrowSteps, Workspace
from fp8lab.emulation.chain_operands import Array, Float32Array, Operand, TileOperands
from fp8lab.emulation.fused import fma
from fp8lab.emulation.tensorcore import FLOAT8_OPERANDS, TensorCore

# Rows and columns of a tile; with fewer columns it has more rows. Its largest temporary, 33 x 8 x
# 1024 float32, is 1 MiB: it stays in the L2 cache.
TILE_M, TILE_N = 8, 1024

# NumPy copies operands of short inner loops into buffers of this many elements; by default (8192)
# that costs an outer product of 512 columns two thirds of its speed.
BUFFER = 512

StepsOnTile = Callable[[slice, slice, Workspace], "Steps"]


class Steps(Protocol):
    """Walks some steps on one tile."""

    def __call__(self, first: int, last: int, c: Float32Array) -> Float32Array:
        """The accumulator after the steps `first` to `last` (not included), started from c."""
        ...


def steps_of(a: Operand, b: Operand, core: TensorCore, *, tiny: bool) -> StepsOnTile:
    """How to make the steps of a tile, given its rows, its columns and a thread's workspace.

    Args:
        tiny: Whether C may hold values below `SMALLEST_C` that are not zero.
    """
    if core.fraction_bits is None:
        return lambda rows, columns, _: _FusedSteps(a, b, rows, columns)
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
        return partial(NarrowSteps, a, b, a.exponent_bytes(63), b.exponent_bytes(64))
    return lambda rows, columns, _: _WideSteps(a, b, core, rows, columns)


class _WideSteps(TileOperands):
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


class _FusedSteps(TileOperands):
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
