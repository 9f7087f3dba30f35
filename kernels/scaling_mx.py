"""Microscaling (MX), the twins of `fp8lab.emulation.mx`: an E8M0 scale for 32 elements."""

from __future__ import annotations

import torch

from fp8lab.formats import Float8Format, OverflowPolicy
from fp8lab.kernels.checks import check_tensor
from fp8lab.kernels.launch import MX_TILES, TileSettings
from fp8lab.kernels.scaling_matrix import (
    BlockSettings,
    BothLayouts,
    both_layouts,
    checked_cast,
    dequantized,
    one_layout,
)
from fp8lab.kernels.scaling_rules import Block, ScaleRule, mx_rule

MX_BLOCK: Block = (1, 32)


def quantize_mx(
    x: torch.Tensor,
    fmt: Float8Format,
    *,
    block: Block = MX_BLOCK,
    scale_rounding: str = "floor",
    rounding: str = "nearest_even",
    overflow: str | OverflowPolicy = "saturate",
    seed: int | torch.Tensor | None = None,
    offset: int = 0,
    bit_count: int = 32,
    settings: BlockSettings | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to MX blocks: FP8 elements with one E8M0 scale a block.

    Bit for bit `fp8lab.emulation.scaling.quantize_mx`.

    Args:
        x, fmt, rounding, overflow, seed, offset, bit_count: As for `quantize_blocks`.
        block: (1, 32), (32, 1), or another that `quantize_blocks` takes.
        scale_rounding: "floor", "up" or "nearest", see `mx_scale`.
        settings: How the kernels are launched; None is what suits the block.

    Returns:
        Codes of x's shape, and float8_e8m0fnu scales (ceil(M / rows), ceil(N / columns)), laid out
        as the inverse scales of `quantize_blocks`: those of blocks of one row lie side by side for
        all rows, then come the next blocks'.

    Raises:
        TypeError, ValueError: As `quantize_blocks`.
    """
    scaling = _mx_scaling(fmt, block, scale_rounding)
    settings = settings or _settings_for(block)
    cast = checked_cast(x, fmt, block, rounding, overflow, seed, offset, bit_count, settings)
    codes, kept = one_layout(x, fmt, block, scaling, cast, settings)
    return codes, kept.view(torch.float8_e8m0fnu)


def quantize_mx_with_transpose(
    x: torch.Tensor,
    fmt: Float8Format,
    *,
    block: Block = MX_BLOCK,
    scale_rounding: str = "floor",
    rounding: str = "nearest_even",
    overflow: str | OverflowPolicy = "saturate",
    seed: int | torch.Tensor | None = None,
    offset: int = 0,
    bit_count: int = 32,
    settings: BlockSettings | None = None,
) -> BothLayouts:
    """`quantize_mx` of x and of x.t(), each quantised from x itself, from one read."""
    scaling = _mx_scaling(fmt, block, scale_rounding)
    settings = settings or _settings_for(block)
    cast = checked_cast(x, fmt, block, rounding, overflow, seed, offset, bit_count, settings)
    both = both_layouts(x, fmt, block, scaling, cast, settings)
    e8m0 = torch.float8_e8m0fnu
    return both._replace(scales=both.scales.view(e8m0), scales_t=both.scales_t.view(e8m0))


def dequantize_mx(
    codes: torch.Tensor,
    scale: torch.Tensor,
    *,
    block: Block = MX_BLOCK,
    settings: TileSettings = TileSettings(),  # noqa: B008 (frozen)
) -> torch.Tensor:
    """Decode MX blocks: the code's value times its block's scale, in float32.

    Bit for bit `fp8lab.emulation.scaling.dequantize_mx`, but for the payload of NaN.

    Args:
        codes, block, settings: As for `dequantize_blocks`.
        scale: float8_e8m0fnu (ceil(M / rows), ceil(N / columns)), of any strides.

    Raises:
        TypeError, ValueError: As `dequantize_blocks`.
    """
    check_tensor("scale", scale, (torch.float8_e8m0fnu,), contiguous=False)
    return dequantized(codes, scale.view(torch.uint8), block, True, settings)


def _mx_scaling(fmt: Float8Format, block: Block, rounding: str) -> ScaleRule:
    if None in block:
        raise ValueError(f"block is {block!r}; accepted: (1, 32), (32, 1) or other powers of two")
    return mx_rule(fmt, rounding)


def _settings_for(block: Block) -> BlockSettings:
    smallest = min(MX_TILES.rows, MX_TILES.columns)
    fits = all(size is not None and size <= smallest for size in block)
    return BlockSettings(tiles=MX_TILES) if fits else BlockSettings()
