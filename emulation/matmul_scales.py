"""The inverse scales of a matrix product: which of the accepted shapes was given, and its factors.

`ceil(K / 128)` is written K/128 here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8lab.emulation.casting import dequantize
from fp8lab.emulation.fused import fma
from fp8lab.formats import E8M0

Array = npt.NDArray[Any]
Float32Array = npt.NDArray[np.float32]

BLOCK = 128
MX_BLOCK = 32


@dataclass(frozen=True)
class Factors:
    """The scales of both operands.

    Attributes:
        a: float32 (1 or M, 1 or blocks of K).
        b: float32 (1 or blocks of K, 1 or N).
        block_k: How many k share a scale; None where all do.
        squares: Whether 128 rows of a, or 128 columns of b, share those of a block.
        given: Whether there is any scale at all.
    """

    a: Float32Array
    b: Float32Array
    block_k: int | None
    squares: bool
    given: bool

    def applied(self, result: Float32Array) -> Float32Array:
        """The result (M, N) scaled. Only without blocks.

        One entry each: result * (scale_a * scale_b). One a row, or one a column: first by b's, then
        by a's.
        """
        if self.a.size == 1 and self.b.size == 1:
            return np.asarray(result * (self.a * self.b))
        return np.asarray((result * self.b) * self.a)

    def promoted(
        self,
        partial: Float32Array,
        total: Float32Array,
        block: int,
        rows: slice,
        columns: slice,
    ) -> Float32Array:
        """The total of a tile, with the partial sum of one block of K added, scaled.

        Where squares of 128 share a scale, fma(partial, scale_a * scale_b, total); else
        fma(partial * scale_a, scale_b, total).
        """
        a = self.a[:, min(block, self.a.shape[1] - 1)]
        b = self.b[min(block, self.b.shape[0] - 1)]
        by_row = (a if a.size == 1 else a[rows])[:, None]
        by_column = (b if b.size == 1 else b[columns])[None, :]
        if self.squares:
            return fma(partial, by_row * by_column, total)
        return fma(partial * by_row, by_column, total)

    def at(self, rows: Array, columns: Array) -> Factors:
        """Those of some rows of A and columns of B."""
        return Factors(
            self.a if self.a.shape[0] == 1 else self.a[rows],
            self.b if self.b.shape[1] == 1 else self.b[:, columns],
            self.block_k,
            self.squares,
            self.given,
        )


def factors_from(
    inverse_scale_a: npt.ArrayLike | None,
    inverse_scale_b: npt.ArrayLike | None,
    m: int,
    k: int,
    n: int,
) -> Factors:
    """Tell by its shape what each scale is for.

    Raises:
        TypeError: A scale that is neither floating nor E8M0.
        ValueError: A shape that is none of the accepted ones, or blocks of different lengths.
    """
    a, block_a, square_a = _by_row("inverse_scale_a", inverse_scale_a, m, k, transposed=False)
    # B's scales are A's with rows and columns swapped.
    b, block_b, square_b = _by_row("inverse_scale_b", inverse_scale_b, n, k, transposed=True)
    if block_a is not None and block_b is not None and block_a != block_b:
        raise ValueError(
            f"inverse_scale_a has blocks of {block_a} along K and inverse_scale_b of {block_b};"
            " accepted: one length"
        )
    given = inverse_scale_a is not None or inverse_scale_b is not None
    block = block_a if block_a is not None else block_b
    return Factors(a, b.T, block, square_a or square_b, given)


def _by_row(
    name: str, scale: npt.ArrayLike | None, rows: int, k: int, *, transposed: bool
) -> tuple[Float32Array, int | None, bool]:
    """A scale as (1 or rows, 1 or blocks of K), the length of the blocks, and if 128 rows share."""
    if scale is None:
        return np.ones((1, 1), dtype=np.float32), None, False
    given = _float32(name, scale)
    if given.size == 1:
        return given.reshape(1, 1), None, False
    table = given.T if transposed else given
    blocks, mx_blocks, row_blocks = -(-k // BLOCK), -(-k // MX_BLOCK), -(-rows // BLOCK)
    if table.shape == (rows, 1):
        return table, None, False
    if table.shape == (rows, blocks):
        return table, BLOCK, False
    if table.shape == (rows, mx_blocks):
        return table, MX_BLOCK, False
    if table.shape == (row_blocks, blocks):
        return np.repeat(table, BLOCK, axis=0)[:rows], BLOCK, True
    shapes = [(rows, 1), (rows, blocks), (rows, mx_blocks), (row_blocks, blocks)]
    if transposed:
        shapes = [(second, first) for first, second in shapes]
    accepted = ", ".join(str(shape) for shape in dict.fromkeys(shapes))
    raise ValueError(f"{name} has shape {given.shape}; accepted: one value, {accepted}")


def _float32(name: str, scale: npt.ArrayLike) -> Float32Array:
    given = np.asarray(scale)
    if given.dtype == E8M0.dtype:
        return np.asarray(dequantize(given), dtype=np.float32)
    if given.dtype.kind not in "fiu":
        raise TypeError(f"{name} has dtype {given.dtype}; accepted: float32, E8M0")
    with np.errstate(all="ignore"):
        return given.astype(np.float32)
