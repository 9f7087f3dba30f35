"""The inverse scales of a matrix product: which of the accepted shapes was given, and its factors.

`ceil(K / 128)` is written K/128 here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
class Side:
    """The scale of one operand; its rows are those of a, or the columns of b.

    Attributes:
        table: float32 (rows, 1 or blocks of K); (1, 1) where all share one entry.
        per_row: Whether each row has entries of its own. The shape of the whole product's scale
            tells; the size does not, since of many rows one alone may be wanted.
        block_k: How many k share an entry; None where all do.
        squares: Whether 128 rows share those of a block.
    """

    table: Float32Array
    per_row: bool
    block_k: int | None = None
    squares: bool = False

    def of(self, rows: slice, block: int = 0) -> Float32Array:
        """Those of some rows in one block of K; one entry where all share it."""
        column = self.table[:, 0 if self.block_k is None else block]
        return column[rows] if self.per_row else column

    def at(self, rows: Array) -> Side:
        """That of some rows, which may come more than once."""
        return replace(self, table=self.table[rows]) if self.per_row else self


@dataclass(frozen=True)
class Factors:
    """The scales of both operands.

    Attributes:
        a, b: Of each.
        given: Whether there is any scale at all.
    """

    a: Side
    b: Side
    given: bool

    @property
    def block_k(self) -> int | None:
        """How many k share a scale; None where all do."""
        return self.b.block_k if self.a.block_k is None else self.a.block_k

    def applied(self, result: Float32Array) -> Float32Array:
        """The result (M, N) scaled. Only without blocks.

        One entry each: result * (scale_a * scale_b). One a row, or one a column: first by b's, then
        by a's.
        """
        every = slice(None)
        by_row, by_column = self.a.of(every)[:, None], self.b.of(every)[None, :]
        if not self.a.per_row and not self.b.per_row:
            return np.asarray(result * (by_row * by_column))
        return np.asarray((result * by_column) * by_row)

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
        by_row, by_column = self.a.of(rows, block)[:, None], self.b.of(columns, block)[None, :]
        if self.a.squares or self.b.squares:
            return fma(partial, by_row * by_column, total)
        return fma(partial * by_row, by_column, total)

    def at(self, rows: Array, columns: Array) -> Factors:
        """Those of some rows of A and columns of B, of the same kinds."""
        return replace(self, a=self.a.at(rows), b=self.b.at(columns))


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
    a = _side("inverse_scale_a", inverse_scale_a, m, k, transposed=False)
    # B's scales are A's with rows and columns swapped.
    b = _side("inverse_scale_b", inverse_scale_b, n, k, transposed=True)
    if a.block_k is not None and b.block_k is not None and a.block_k != b.block_k:
        raise ValueError(
            f"inverse_scale_a has blocks of {a.block_k} along K and inverse_scale_b of {b.block_k};"
            " accepted: one length"
        )
    return Factors(a, b, inverse_scale_a is not None or inverse_scale_b is not None)


def _side(name: str, scale: npt.ArrayLike | None, rows: int, k: int, *, transposed: bool) -> Side:
    if scale is None:
        return Side(np.ones((1, 1), dtype=np.float32), per_row=False)
    given = _float32(name, scale)
    if given.size == 1:
        return Side(given.reshape(1, 1), per_row=False)
    table = given.T if transposed else given
    blocks, mx_blocks, row_blocks = -(-k // BLOCK), -(-k // MX_BLOCK), -(-rows // BLOCK)
    if table.shape == (rows, 1):
        return Side(table, per_row=True)
    if table.shape == (rows, blocks):
        return Side(table, per_row=True, block_k=BLOCK)
    if table.shape == (rows, mx_blocks):
        return Side(table, per_row=True, block_k=MX_BLOCK)
    if table.shape == (row_blocks, blocks):
        wide = np.repeat(table, BLOCK, axis=0)[:rows]
        return Side(wide, per_row=True, block_k=BLOCK, squares=True)
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
