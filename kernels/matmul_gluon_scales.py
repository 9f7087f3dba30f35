"""Inverse scales of blocks as the fast matrix product's copy engine brings them into its ring.

That is as float32 tables of blocks of K by rows. Where several blocks make a stage, tables have as
many rows as whole stages have blocks, and E8M0 codes are decoded; one kernel writes both tables.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fp8lab.kernels.float_device import bits_of, float_of
from fp8lab.kernels.launch import cdiv, interpreted, launch

_SIZE = 1024  # rows, or columns, of a program
# Beyond K a partial sum is +0. Times a scale of -0 it is -0, which changes no total, not even -0.
_BEYOND_LEFT = -(1 << 31)
_BEYOND_RIGHT = 0


class SideScales(NamedTuple):
    """The scales of one operand.

    Attributes:
        table: Of rows by blocks of K; float32, or bytes of E8M0.
        stride, stride_k: Along the rows and along K; 0 where an entry is shared.
        rows: How many rows the operand has.
    """

    table: torch.Tensor
    stride: int
    stride_k: int
    rows: int


def by_block(side: SideScales, blocks: int) -> torch.Tensor:
    """float32 scales as (blocks, rows), in rows that the copy engine can read."""
    table = side.table.t()
    if side.stride_k == 0 and table.shape[0] == 1:
        table = table.expand(max(blocks, 1), -1)
    if _readable(table):
        return table
    blocks, rows = table.shape
    copy = torch.zeros((max(blocks, 1), -(-rows // 4) * 4), device=table.device)
    copy[:blocks, :rows] = table
    return copy


def by_stage(
    left: SideScales, right: SideScales, blocks: int, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as (blocks, rows) float32, in whole stages.

    Args:
        left, right: Scales.
        blocks: Of K that there are.
        length: Blocks of a stage.

    Returns:
        Those of left and of right, with the blocks rounded up to whole stages. Of two scales beyond
        K one is -0 and the other +0.
    """
    height = max(cdiv(blocks, length), 1) * length
    sides = (left, right)
    ready = [_is_ready(side, height) for side in sides]
    tables = [
        side.table.t() if done else _new(side, height)
        for side, done in zip(sides, ready, strict=True)
    ]
    counts = [0 if done else side.rows for side, done in zip(sides, ready, strict=True)]
    programs = sum(cdiv(count, _SIZE) for count in counts)
    launch(
        _fill,
        (programs, height),
        tables[0],
        tables[1],
        left.table,
        right.table,
        counts[0],
        counts[1],
        left.stride,
        left.stride_k,
        right.stride,
        right.stride_k,
        tables[0].stride(0),
        tables[1].stride(0),
        blocks,
        SIZE=_SIZE,
        LEFT_E8M0=left.table.dtype == torch.uint8,
        RIGHT_E8M0=right.table.dtype == torch.uint8,
        LEFT_BEYOND=_BEYOND_LEFT,
        RIGHT_BEYOND=_BEYOND_RIGHT,
        OVERLAP=not interpreted(),
        num_warps=4,
        **({} if interpreted() else {"launch_pdl": True}),
    )
    return tables[0], tables[1]


def _readable(table: torch.Tensor) -> bool:
    """Whether the copy engine can read (blocks, rows) as they lie."""
    return (
        table.shape[0] > 0
        and table.stride(1) == 1
        and table.stride(0) > 0
        and table.stride(0) % 4 == 0
        and table.data_ptr() % 16 == 0
        and table.shape[1] >= 4
    )


def _is_ready(side: SideScales, height: int) -> bool:
    """Whether the scales are such a table as they are."""
    return (
        side.table.dtype == torch.float32
        and side.table.shape == (side.rows, height)
        and 0 not in (side.stride, side.stride_k)
        and _readable(side.table.t())
    )


def _new(side: SideScales, height: int) -> torch.Tensor:
    width = cdiv(side.rows, 4) * 4
    return torch.empty((height, width), dtype=torch.float32, device=side.table.device)


@triton.jit(
    do_not_specialize=[
        "left_rows",
        "right_rows",
        "left_stride",
        "left_stride_k",
        "right_stride",
        "right_stride_k",
        "left_width",
        "right_width",
        "blocks",
    ]
)
def _fill(
    left_out,  # (whole stages of blocks, left_width)
    right_out,
    left,  # float32, or E8M0 as uint8
    right,
    left_rows,  # 0 where the table is not to be written
    right_rows,
    left_stride,
    left_stride_k,
    right_stride,
    right_stride_k,
    left_width,
    right_width,
    blocks,
    SIZE: tl.constexpr,
    LEFT_E8M0: tl.constexpr,
    RIGHT_E8M0: tl.constexpr,
    LEFT_BEYOND: tl.constexpr,
    RIGHT_BEYOND: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """SIZE rows of one block of K a program: first the left ones, then the right ones."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    chunk = tl.program_id(0)
    block = tl.program_id(1)
    left_chunks = tl.cdiv(left_rows, SIZE)
    if chunk < left_chunks:
        rows = chunk * SIZE + tl.arange(0, SIZE)
        places = rows.to(tl.int64) * left_stride + block.to(tl.int64) * left_stride_k
        there = (rows < left_rows) & (block < blocks)
        bits = _bits(left + places, there, LEFT_BEYOND, LEFT_E8M0)
        out = left_out + block.to(tl.int64) * left_width + rows
        tl.store(out, float_of(bits), mask=rows < left_rows)
    else:
        rows = (chunk - left_chunks) * SIZE + tl.arange(0, SIZE)
        places = rows.to(tl.int64) * right_stride + block.to(tl.int64) * right_stride_k
        there = (rows < right_rows) & (block < blocks)
        bits = _bits(right + places, there, RIGHT_BEYOND, RIGHT_E8M0)
        out = right_out + block.to(tl.int64) * right_width + rows
        tl.store(out, float_of(bits), mask=rows < right_rows)


@triton.jit
def _bits(places, there, BEYOND: tl.constexpr, E8M0: tl.constexpr):
    """Those of a float32; E8M0 code c is 2**(c - 127), and 255 NaN."""
    if E8M0:
        code = tl.load(places, mask=there, other=0).to(tl.int32)
        bits = tl.where(code == 0, 0x00400000, code << 23)
        bits = tl.where(code == 255, 0x7FFFFFFF, bits)
    else:
        bits = bits_of(tl.load(places, mask=there, other=0.0))
    return tl.where(there, bits, BEYOND)
