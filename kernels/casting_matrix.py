"""Launching the tile kernel: a matrix to codes, to transposed codes, or to both, from one read."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fp8lab.kernels.casting_pairs import launch_pairs, pairs_for
from fp8lab.kernels.casting_rules import CastRule
from fp8lab.kernels.casting_tiles import quantize_tiles_kernel
from fp8lab.kernels.checks import check_tensor
from fp8lab.kernels.launch import TileSettings, cdiv, launch
from fp8lab.kernels.scaling_rules import ScaleRule

INPUTS = (torch.float32, torch.bfloat16, torch.float16)
# What the copy engine wants of the distance between rows, in bytes.
PITCH = 16


class Cast(NamedTuple):
    """How elements are cast, checked: the rule, and where random words come from."""

    rule: CastRule
    seed: int | torch.Tensor | None = None
    offset: int = 0


def check_matrix(name: str, x: torch.Tensor, dtypes: tuple[torch.dtype, ...] = INPUTS) -> None:
    """Refuse what the tile kernels cannot read: they want neighbours in a row side by side.

    Raises:
        TypeError: Not a tensor, or another dtype.
        ValueError: Another device, not two dimensions, or rows that are not contiguous.
    """
    check_tensor(name, x, dtypes, contiguous=False)
    if x.dim() != 2:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; accepted: two dimensions")
    if x.shape[1] > 1 and x.stride(1) != 1 and x.numel():
        raise ValueError(
            f"{name} has strides {x.stride()}; accepted: any distance between rows, but neighbours"
            " in a row side by side (call .contiguous() first)"
        )


def empty_transposed(x: torch.Tensor) -> torch.Tensor:
    """An uninitialised (columns, rows) matrix of bytes whose rows begin at multiples of 16 bytes.

    So the copy engine (and a product that wants its operands K-major) can read it whatever its
    size. It is contiguous where the rows of x are a multiple of 16.
    """
    rows, columns = x.shape
    pitch = -(-rows // PITCH) * PITCH
    whole = torch.empty((columns, pitch), dtype=torch.uint8, device=x.device)
    return whole if pitch == rows else whole[:, :rows]


def quantize_tiles(
    x: torch.Tensor,
    cast: Cast,
    codes: torch.Tensor | None,
    codes_t: torch.Tensor | None,
    *,
    scales: str = "one",
    scale: float | torch.Tensor | None = None,
    scale_t: torch.Tensor | None = None,
    scaling: ScaleRule | None = None,
    block: tuple[int, int] = (1, 1),
    kept: torch.Tensor | None = None,
    kept_t: torch.Tensor | None = None,
    amax_out: torch.Tensor | None = None,
    settings: TileSettings,
) -> None:
    """Fill codes, codes_t and what is kept for their blocks. Everything is checked already.

    Args:
        x: (rows, columns), see `check_matrix`.
        cast: How a value becomes a code.
        codes: Bytes (Triton refuses pointers to formats that a device does not convert),
            contiguous, of x's shape; or None.
        codes_t: From `empty_transposed`; or None.
        scales: Where the factors come from: "one" (scale: a number, one element, or None),
            "columns" (scale: one a column), "vectors" (codes: scale, one a row; codes_t: scale_t,
            one a column of x), "blocks" (from the amax of each block, by `scaling`).
        block: For "blocks": those of codes. Those of codes_t, seen in x, have rows and columns
            swapped.
        kept: For "blocks": (blocks down, blocks across); of any strides, but the blocks of all rows
            side by side where a block is of one row.
        kept_t: For "blocks" that are not square: (blocks across codes_t's rows, down), as if made
            for x.t().
        amax_out: As for `quantize`.
        settings: How it is launched.
    """
    if scales in ("one", "blocks") and codes is not None and codes_t is not None:
        pairs = pairs_for(x, cast.rule, scaling, block, settings.pairs)
        if pairs is not None:
            launch_pairs(
                x, cast.rule, codes, codes_t, scaling, block, kept, kept_t, scale, amax_out, pairs
            )
            return
    height, width = x.shape
    even = height % settings.rows == 0 and width % settings.columns == 0
    down, across = (0, 0) if kept is None else kept.stride()
    across_t, down_t = (0, 0) if kept_t is None else kept_t.stride()
    launch(
        quantize_tiles_kernel,
        (cdiv(height, settings.rows) * cdiv(width, settings.columns),),
        x,
        codes,
        codes_t,
        kept,
        kept_t,
        height,
        width,
        x.stride(0) if height > 1 else width,
        0 if codes_t is None else codes_t.stride(0),
        down,
        across,
        down_t,
        across_t,
        scale,
        scale_t,
        amax_out,
        cast.seed,
        cast.offset,
        SCALES=scales,
        SCALING=scaling,
        BLOCK_ROWS=block[0],
        BLOCK_COLUMNS=block[1],
        T_BLOCK_ROWS=block[1],
        T_BLOCK_COLUMNS=block[0],
        RULE=cast.rule,
        ROWS=settings.rows,
        COLUMNS=settings.columns,
        BAND=settings.band,
        EVEN=even,
        **settings.options,
    )
