"""Quantising a matrix by blocks: what `scaling_blocks` and `scaling_mx` share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from fp8lab.formats import Float8Format, OverflowPolicy
from fp8lab.kernels.casting import checked_seed
from fp8lab.kernels.casting_matrix import Cast, check_matrix, empty_transposed, quantize_tiles
from fp8lab.kernels.casting_rules import FORMAT_OF, cast_rule, decode_rule
from fp8lab.kernels.launch import (
    BLOCK_TILES,
    RowSettings,
    TileSettings,
    cdiv,
    launch,
    next_power_of_2,
)
from fp8lab.kernels.scaling_device import dequantize_tiles_kernel
from fp8lab.kernels.scaling_rows import quantize_rows_kernel
from fp8lab.kernels.scaling_rules import Block, ScaleRule, check_block
from fp8lab.kernels.scaling_scales import amax_of_lines, scales_by_rule

Quantized = tuple[torch.Tensor, torch.Tensor]  # codes, and what is kept of their blocks


@dataclass(frozen=True)
class BlockSettings:
    """How quantising by blocks is launched. No setting changes a bit of any result.

    Attributes:
        tiles: For blocks that lie in a tile, and for columns.
        rows: For one scale a row.
    """

    tiles: TileSettings = BLOCK_TILES
    rows: RowSettings = field(default_factory=RowSettings)


class BothLayouts(NamedTuple):
    """A matrix x quantised along its rows and along its columns: x, and x.t().

    Attributes:
        codes: (M, N), contiguous.
        scales: Of `codes`: float32 inverse scales, or E8M0 scales.
        codes_t: (N, M), whose rows begin at multiples of 16 bytes.
        scales_t: Of `codes_t`.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    codes_t: torch.Tensor
    scales_t: torch.Tensor


def checked_cast(
    x: torch.Tensor,
    fmt: Float8Format,
    block: Block,
    rounding: str,
    overflow: str | OverflowPolicy,
    seed: int | torch.Tensor | None,
    offset: int,
    bit_count: int,
    settings: BlockSettings,
) -> Cast:
    """Check everything that is no scale, and say how elements are cast."""
    check_matrix("x", x)
    check_block(block, settings.tiles.rows, settings.tiles.columns)
    seed, offset = checked_seed(seed, offset, rounding, x)
    path = settings.rows.cast_path if tuple(block) == (1, None) else settings.tiles.cast_path
    rule = cast_rule(
        fmt, x.device, rounding=rounding, overflow=overflow, path=path, bit_count=bit_count
    )
    return Cast(rule, seed, offset)


def one_layout(
    x: torch.Tensor,
    fmt: Float8Format,
    block: Block,
    scaling: ScaleRule,
    cast: Cast,
    settings: BlockSettings,
) -> Quantized:
    """Codes of x, and what is kept of their blocks."""
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    rows, columns = check_block(block, settings.tiles.rows, settings.tiles.columns)
    if columns is None:
        kept = torch.ones((x.shape[0], 1), dtype=scaling.dtype, device=x.device)
        _quantize_rows(x, codes, kept, scaling, cast, settings.rows)
    elif rows is None:
        _, largest = amax_of_lines(x, rows=False, settings=settings.tiles)
        scale, inverse = _line_scales(largest, scaling)
        quantize_tiles(x, cast, codes, None, scales="columns", scale=scale, settings=settings.tiles)
        kept = inverse[None, :]
    else:
        kept = empty_kept(x.shape, (rows, columns), scaling, x.device)
        quantize_tiles(
            x,
            cast,
            codes,
            None,
            scales="blocks",
            scaling=scaling,
            block=(rows, columns),
            kept=kept,
            settings=settings.tiles,
        )
    return codes.view(getattr(torch, fmt.dtype_name)), kept


def both_layouts(
    x: torch.Tensor,
    fmt: Float8Format,
    block: Block,
    scaling: ScaleRule,
    cast: Cast,
    settings: BlockSettings,
) -> BothLayouts:
    """Codes of x and of x.t(), and what is kept of their blocks."""
    dtype = getattr(torch, fmt.dtype_name)
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    codes_t = empty_transposed(x)
    rows, columns = check_block(block, settings.tiles.rows, settings.tiles.columns)
    if rows is None:
        raise ValueError(
            f"block is {block!r}; accepted here: (1, None), one a row and one a column"
        )
    if columns is None:
        of_rows, of_columns = amax_of_lines(x, settings=settings.tiles)
        scale, inverse = _line_scales(of_rows, scaling)
        scale_t, inverse_t = _line_scales(of_columns, scaling)
        quantize_tiles(
            x,
            cast,
            codes,
            codes_t,
            scales="vectors",
            scale=scale,
            scale_t=scale_t,
            settings=settings.tiles,
        )
        return BothLayouts(
            codes.view(dtype), inverse[:, None], codes_t.view(dtype), inverse_t[:, None]
        )
    check_block((columns, rows), settings.tiles.rows, settings.tiles.columns)
    kept = empty_kept(x.shape, (rows, columns), scaling, x.device)
    # Square blocks hold the same elements either way.
    kept_t = kept.t()
    if rows != columns:
        kept_t = empty_kept((x.shape[1], x.shape[0]), (rows, columns), scaling, x.device)
    quantize_tiles(
        x,
        cast,
        codes,
        codes_t,
        scales="blocks",
        scaling=scaling,
        block=(rows, columns),
        kept=kept,
        kept_t=kept_t,
        settings=settings.tiles,
    )
    return BothLayouts(codes.view(dtype), kept, codes_t.view(dtype), kept_t)


def _quantize_rows(
    x: torch.Tensor,
    codes: torch.Tensor,
    kept: torch.Tensor,
    scaling: ScaleRule,
    cast: Cast,
    settings: RowSettings,
) -> None:
    height, width = x.shape
    if not width:
        return
    whole = next_power_of_2(width)
    columns = whole if whole <= settings.longest else min(settings.block, settings.longest)
    rows = max(1, settings.block // columns)
    launch(
        quantize_rows_kernel,
        (cdiv(height, rows),),
        x,
        codes,
        kept,
        height,
        width,
        x.stride(0) if height > 1 else width,
        cast.seed,
        cast.offset,
        SCALING=scaling,
        RULE=cast.rule,
        ROWS=rows,
        COLUMNS=columns,
        CHUNKS=cdiv(width, columns),
        EVEN=height % rows == 0 and width % columns == 0,
        num_warps=settings.num_warps,
    )


def _line_scales(amax: torch.Tensor, scaling: ScaleRule) -> tuple[torch.Tensor, torch.Tensor]:
    inverse = torch.empty_like(amax)
    return scales_by_rule(amax, scaling, inverse_out=inverse), inverse


def empty_kept(
    shape: tuple[int, ...], block: tuple[int, int], scaling: ScaleRule, device: torch.device
) -> torch.Tensor:
    """Room for what is kept of the blocks, laid out as `scaling_blocks` says."""
    down, across = (cdiv(size, of) for size, of in zip(shape, block, strict=True))
    if block[0] > 1:
        return torch.empty((down, across), dtype=scaling.dtype, device=device)
    return torch.empty((across, down), dtype=scaling.dtype, device=device).t()


def dequantized(
    codes: torch.Tensor, factors: torch.Tensor, block: Block, mx: bool, settings: TileSettings
) -> torch.Tensor:
    """Codes times the factors of their blocks: inverse scales, or E8M0 codes as uint8."""
    check_matrix("codes", codes, tuple(FORMAT_OF))
    block = check_block(block, None, None)
    height, width = codes.shape
    down = 1 if block[0] is None else cdiv(height, block[0])
    across = 1 if block[1] is None else cdiv(width, block[1])
    if factors.shape != (down, across) or factors.device != codes.device:
        raise ValueError(
            f"the scales have shape {tuple(factors.shape)} on {factors.device}; codes of shape"
            f" {(height, width)} in blocks of {block} have {(down, across)} on {codes.device}"
        )
    values = torch.empty((height, width), dtype=torch.float32, device=codes.device)
    launch(
        dequantize_tiles_kernel,
        (cdiv(height, settings.rows) * cdiv(width, settings.columns),),
        codes.view(torch.uint8),
        values,
        factors,
        height,
        width,
        codes.stride(0) if height > 1 else width,
        # A block that spans a dimension has one scale: no step from one tile's to the next.
        0 if block[0] is None else factors.stride(0),
        0 if block[1] is None else factors.stride(1),
        RULE=decode_rule(FORMAT_OF[codes.dtype], codes.device, settings.cast_path),
        MX=mx,
        BLOCK_ROWS=block[0] or settings.rows,
        BLOCK_COLUMNS=block[1] or settings.columns,
        ROWS=settings.rows,
        COLUMNS=settings.columns,
        EVEN=height % settings.rows == 0 and width % settings.columns == 0,
        **settings.options,
    )
    return values
