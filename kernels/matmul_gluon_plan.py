"""What the fast matrix product for sm_90 is compiled for. No Gluon here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class GluonPlan:
    """What is known of a product when its kernel is compiled.

    Attributes:
        rows: Of a tile: 64, 128, 192, or 256, which are not for all products
            (`GluonSettings.takes`).
        columns: Of a tile, a power of two, 16 to 256, or to 128 beside 192 rows and more.
        depth: k of a stage: 128, or also 256 where nothing is promoted.
        stages: Stages of the ring.
        group: Tiles that are visited down a column before the next column.
        length: k of a partial sum: 32, 64 or 128; that of a stage where nothing is promoted.
        drain: Stages between points where no wgmma is in flight, a power of two; 0 where nothing
            is promoted.
        swap: Whether the left operand is b, and the tile is of the result's transpose.
        scaling: As in `ProductPlan`.
        by_row, by_column: For "blocks", whether each row, each column of a tile has its own scale
            of each partial sum; otherwise it is one for 128 of them, and for 128 of k.
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
    def bands(self) -> int:
        """64 rows each, one below the other, that a warpgroup has of a tile."""
        return 2 if self.rows > 192 else 1

    @property
    def groups(self) -> int:
        """Warpgroups that multiply."""
        return self.rows // 64 // self.bands

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
        """Partial sums that registers hold beside the total: three warpgroups have less room, and
        so has one with two bands.
        """
        return 2 if self.rows <= 128 else 1

    @property
    def early(self) -> bool:
        """Whether the first band is written while the last wgmma of the second are in flight: where
        what comes after the sum needs few registers.
        """
        return self.bands > 1 and self.scaling != "vectors" and self.bias == "none"

    @property
    def out_columns(self) -> int:
        """Columns of a piece of the result on its way out."""
        # Few, where with more the ring would have a stage less, or registers would not do.
        if self.bands > 1:
            scales = self.by_row or self.by_column or self.scaling == "vectors"
            return min((64 if self.bfloat16 else 32) // (2 if scales else 1), self.columns)
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
