"""The inverse scales of a matrix product on the device: which of the accepted shapes was given.

`ceil(K / 128)` is written K/128 here. The rules are those of `fp8lab.emulation.matmul`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from fp8lab.kernels.checks import as_integer
from fp8lab.kernels.launch import interpreted

BLOCK = 128
MX_BLOCK = 32
DTYPES = (torch.float32, torch.float8_e8m0fnu)


class Scales(NamedTuple):
    """Both scales as a kernel takes them.

    Attributes:
        a, b: float32, or bytes of E8M0; one element of 1 stands in for a scale that is not given,
            None for both.
        strides: Of a along M and along K, of b along K and along N; 0 where an entry is shared.
        kind: "none", "tensor" (one entry each), "vectors" (along M and N), "blocks" (along K too).
        block_k: How many k share an entry, for "blocks"; else None.
        rows_per_entry, columns_per_entry: How many rows of a, columns of b share an entry.
        a_e8m0, b_e8m0: Whether they are E8M0.
    """

    a: torch.Tensor | None
    b: torch.Tensor | None
    strides: tuple[int, int, int, int]
    kind: Literal["none", "tensor", "vectors", "blocks"]
    block_k: int | None
    rows_per_entry: int
    columns_per_entry: int
    a_e8m0: bool
    b_e8m0: bool

    @property
    def by_row(self) -> bool:
        """Whether scales are of blocks, and each row of a has its own."""
        return self.kind == "blocks" and self.rows_per_entry == 1 and self.strides[0] != 0

    @property
    def by_column(self) -> bool:
        """Whether scales are of blocks, and each column of b has its own."""
        return self.kind == "blocks" and self.columns_per_entry == 1 and self.strides[3] != 0


_NONE = Scales(None, None, (0, 0, 0, 0), "none", None, 1, 1, False, False)


class _Side(NamedTuple):
    """One operand's scale, as a table of rows (of a, or columns of b) by blocks of K."""

    table: torch.Tensor
    per_row: bool
    block_k: int | None
    rows_per_entry: int

    @property
    def strides(self) -> tuple[int, int]:
        """Along the rows and along K; 0 where every place shares one entry."""
        if not self.per_row:
            return 0, 0
        along_rows, along_k = self.table.stride()
        return along_rows, 0 if self.block_k is None else along_k


def scales_from(
    inverse_scale_a: torch.Tensor | None,
    inverse_scale_b: torch.Tensor | None,
    m: int,
    k: int,
    n: int,
    device: torch.device,
    promote_every: int | None = None,
) -> Scales:
    """Tell by its shape what each scale is for.

    Args:
        inverse_scale_a, inverse_scale_b: As `fp8lab.kernels.matmul.matmul` takes them.
        m, k, n: The product's sizes.
        device: Where the operands are.
        promote_every: What was asked for; with K = 0 it may tell how long blocks would be.

    Raises:
        TypeError: Not a tensor of float32 or E8M0.
        ValueError: A shape that is none of the accepted ones, blocks of different lengths, or
            another device.
    """
    if inverse_scale_a is None and inverse_scale_b is None:
        return _NONE
    a = _side("inverse_scale_a", inverse_scale_a, m, k, device, transposed=False)
    # b's scale is like a's with rows and columns swapped.
    b = _side("inverse_scale_b", inverse_scale_b, n, k, device, transposed=True)
    if k == 0:
        a, b = _of_no_k(a, b, promote_every)
    if a.block_k is not None and b.block_k is not None and a.block_k != b.block_k:
        raise ValueError(
            f"inverse_scale_a has blocks of {a.block_k} along K and inverse_scale_b of"
            f" {b.block_k}; accepted: one length"
        )
    block_k = b.block_k if a.block_k is None else a.block_k
    kind: Literal["tensor", "vectors", "blocks"] = "tensor"
    if block_k is not None:
        kind = "blocks"
    elif a.per_row or b.per_row:
        kind = "vectors"
    table_a, a_e8m0 = _table(a, kind)
    table_b, b_e8m0 = _table(b, kind)
    a_row, a_k = a.strides
    b_row, b_k = b.strides
    return Scales(
        table_a,
        table_b,
        (a_row, a_k, b_k, b_row),
        kind,
        block_k,
        a.rows_per_entry,
        b.rows_per_entry,
        a_e8m0,
        b_e8m0,
    )


def _of_no_k(a: _Side, b: _Side, promote_every: int | None) -> tuple[_Side, _Side]:
    """Sides whose blocks, of which there are none, have one length: no shape tells it.

    It is 32 where that is asked for, or likely (E8M0), and 128 else, so that the settings that
    launch a longer K launch this, too. Blocks of 128 rows are 128 long.
    """
    length = as_integer(promote_every)
    e8m0 = torch.float8_e8m0fnu in (a.table.dtype, b.table.dtype)
    short = length == MX_BLOCK or (length is None and e8m0)
    square = BLOCK in (a.rows_per_entry, b.rows_per_entry)
    block_k = MX_BLOCK if short and not square else BLOCK
    first, second = (
        side if side.block_k is None else side._replace(block_k=block_k) for side in (a, b)
    )
    return first, second


def _table(side: _Side, kind: str) -> tuple[torch.Tensor, bool]:
    """A side's table as the kernel takes it, and whether it is of E8M0."""
    if side.table.dtype != torch.float8_e8m0fnu:
        return side.table, False
    codes = side.table.view(torch.uint8)
    if kind == "blocks":
        return codes, True
    # K of one block or less: a few scales, which the kernel takes as float32.
    return _from_e8m0(codes), False


def _from_e8m0(codes: torch.Tensor) -> torch.Tensor:
    """float32 of E8M0 codes, from bits: code c is 2**(c - 127), and 255 NaN."""
    words = codes.to(torch.int32)
    bits = torch.where(words == 0, 0x00400000, words << 23)
    return torch.where(words == 255, 0x7FFFFFFF, bits).view(torch.float32)


def _side(
    name: str,
    scale: torch.Tensor | None,
    rows: int,
    k: int,
    device: torch.device,
    *,
    transposed: bool,
) -> _Side:
    if scale is None:
        return _Side(torch.ones(1, 1, device=device), False, None, 1)
    if not isinstance(scale, torch.Tensor):
        raise TypeError(f"{name} is a {type(scale).__name__}; accepted: a torch tensor")
    if scale.dtype not in DTYPES:
        raise TypeError(f"{name} has dtype {scale.dtype}; accepted: float32, float8_e8m0fnu")
    if scale.device != device or not (scale.is_cuda or interpreted()):
        raise ValueError(f"{name} is on {scale.device}; accepted: {device}, where a is")
    if scale.numel() == 1:
        return _Side(scale, False, None, 1)
    table = scale.t() if transposed and scale.dim() == 2 else scale
    shape = tuple(table.shape)
    blocks, mx_blocks, row_blocks = -(-k // BLOCK), -(-k // MX_BLOCK), -(-rows // BLOCK)
    if shape == (rows, 1):
        return _Side(table, True, None, 1)
    if shape == (rows, blocks):
        return _Side(table, True, BLOCK, 1)
    if shape == (rows, mx_blocks):
        return _Side(table, True, MX_BLOCK, 1)
    if shape == (row_blocks, blocks):
        return _Side(table, True, BLOCK, BLOCK)
    shapes = [(rows, 1), (rows, blocks), (rows, mx_blocks), (row_blocks, blocks)]
    if transposed:
        shapes = [(second, first) for first, second in shapes]
    accepted = ", ".join(str(known) for known in dict.fromkeys(shapes))
    raise ValueError(f"{name} has shape {tuple(scale.shape)}; accepted: one element, {accepted}")
