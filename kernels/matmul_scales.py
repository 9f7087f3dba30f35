"""The inverse scales of a matrix product on the device: which of the accepted shapes was given.

`ceil(K / 128)` is written K/128 here. The rules are those of `fp8lab.emulation.matmul`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from fp8lab.kernels.launch import interpreted

BLOCK = 128
MX_BLOCK = 32
DTYPES = (torch.float32, torch.float8_e8m0fnu)


@dataclass(frozen=True)
class Scales:
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


@dataclass(frozen=True)
class _Side:
    """One operand's scale, as a table of rows (of a, or columns of b) by blocks of K."""

    table: torch.Tensor
    per_row: bool
    block_k: int | None
    rows_per_entry: int

    @property
    def strides(self) -> tuple[int, int]:
        """Along the rows and along K; 0 where every place shares one entry."""
        along_rows = self.table.stride(0) if self.per_row else 0
        along_k = 0 if self.block_k is None else self.table.stride(1)
        return along_rows, along_k


def scales_from(
    inverse_scale_a: torch.Tensor | None,
    inverse_scale_b: torch.Tensor | None,
    m: int,
    k: int,
    n: int,
    device: torch.device,
) -> Scales:
    """Tell by its shape what each scale is for.

    Raises:
        TypeError: Not a tensor of float32 or E8M0.
        ValueError: A shape that is none of the accepted ones, blocks of different lengths, or
            another device.
    """
    if inverse_scale_a is None and inverse_scale_b is None:
        return Scales(None, None, (0, 0, 0, 0), "none", None, 1, 1, False, False)
    a = _side("inverse_scale_a", inverse_scale_a, m, k, device, transposed=False)
    # b's scale is like a's with rows and columns swapped.
    b = _side("inverse_scale_b", inverse_scale_b, n, k, device, transposed=True)
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
    e8m0 = [side.table.dtype == torch.float8_e8m0fnu for side in (a, b)]
    tables = [
        side.table.view(torch.uint8) if is_e8m0 else side.table
        for side, is_e8m0 in zip((a, b), e8m0, strict=True)
    ]
    if kind != "blocks":
        # K of one block or less: a few scales, which the kernel takes as float32.
        tables = [_from_e8m0(t) if is_e8m0 else t for t, is_e8m0 in zip(tables, e8m0, strict=True)]
        e8m0 = [False, False]
    return Scales(
        tables[0],
        tables[1],
        (a.strides[0], a.strides[1], b.strides[1], b.strides[0]),
        kind,
        block_k,
        a.rows_per_entry,
        b.rows_per_entry,
        *e8m0,
    )


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
        return _Side(scale.reshape(1, 1), False, None, 1)
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
