"""What the fast matrix product for sm_90 is compiled for. No Gluon here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class GluonPlan:
    """What is known of a product when its kernel is compiled.

    Attributes:
        rows: Of a tile, 64 for each warpgroup: 64, 128 or 192.
        columns: Of a tile, a power of two, 16 to 256, or to 128 beside 192 rows.
        depth: k of a stage: 128, or also 256 where nothing is promoted.
        stages: Stages of the ring.
        group: Tiles that are visited down a column before the next column.
        length: k of a partial sum: 32, 64 or 128; that of a stage where nothing is promoted.
        drain: Stages between points where no wgmma is in flight, a power of two; 0 where nothing
            is promoted.
        swap: Whether the left operand is b, and the tile is of the result's transpose.
        scaling: As in `ProductPlan`.
        by_row, by_column: For "blocks", whether each row, each column of a tile has its own scale
            of each partial sum; otherwise it is one for the tile, of 128 of k.
        squares: For "blocks", whether 128 rows of a, or 128 columns of b, share a scale: then the
            two scales are multiplied first, else the partial sum by a's.
        start, bias, bfloat16: As in `ProductPlan`.
    """

    rows: int
    columns: int
    depth: int
    stages: int
    group: int
    length: int
    drain: int
    swap: bool
    scaling: Literal["none", "tensor", "vectors", "blocks"]
    by_row: bool
    by_column: bool
    squares: bool
    start: bool
    bias: Literal["none", "vector", "matrix"]
    bfloat16: bool

    @property
    def box(self) -> int:
        """Rows of the left operand that the copy engine brings at a time: a power of two."""
        return self.rows & -self.rows

    @property
    def boxes(self) -> int:
        """Such boxes in a stage."""
        return self.rows // self.box

    @property
    def slices(self) -> int:
        """Partial sums of a stage, one after the other along K."""
        return self.depth // self.length

    @property
    def part(self) -> int:
        """Columns of a partial sum: all, or where they are many so few that registers hold two."""
        return 64 if self.drain and self.columns > 128 else self.columns

    @property
    def parts(self) -> int:
        """Partial sums of a stage, side by side."""
        return self.columns // self.part

    @property
    def partials(self) -> int:
        """Partial sums that registers hold beside the total: three warpgroups have less room."""
        return 2 if self.rows <= 128 else 1

    @property
    def out_columns(self) -> int:
        """Columns of a piece of the result on its way out."""
        # Few, where with more the ring would have a stage less.
        if self.rows > 128:
            return 16 if self.by_row or self.by_column or not self.bfloat16 else 32
        few = self.drain and self.columns > 128 and (self.by_column or not self.bfloat16)
        return min(32 if few else 64, self.columns)

    @property
    def piece(self) -> list[int]:
        """The shape of such a piece in the result, of one warpgroup."""
        return [self.out_columns, 64] if self.swap else [64, self.out_columns]

    @property
    def scale_columns(self) -> int:
        """Scales of columns in a stage: 128 bytes at least, as the copy engine places them."""
        return max(32, self.columns)

    @property
    def bytes_of_a_stage(self) -> int:
        """What the copy engine brings at a time."""
        scales = self.rows * self.by_row + self.scale_columns * self.by_column
        return (self.rows + self.columns) * self.depth + 4 * self.slices * scales
