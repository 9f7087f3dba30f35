"""One scale a block, a row or a column: the twins of `fp8lab.emulation.blocks`.

Inverse scales are laid out as a product wants them: one value a block for all rows, then the next
blocks. So (1, 128) blocks of an (M, K) matrix have inverse scales of shape (M, K / 128) in which
neighbours in a column lie side by side. Those of square blocks are contiguous.
"""

from __future__ import annotations

import torch

from fp8lab.formats import Float8Format, OverflowPolicy
from fp8lab.kernels.checks import check_tensor
from fp8lab.kernels.launch import TileSettings
from fp8lab.kernels.scaling_matrix import (
    BlockSettings,
    BothLayouts,
    both_layouts,
    checked_cast,
    dequantized,
    one_layout,
)
from fp8lab.kernels.scaling_rules import GUARDED_PRESETS, Block, ScaleRule, scale_rule


def quantize_blocks(
    x: torch.Tensor,
    fmt: Float8Format,
    *,
    block: Block = (1, 128),
    margin: int = 0,
    power_of_two: bool = True,
    preset: str = "fp8lab",
    rounding: str = "nearest_even",
    overflow: str | OverflowPolicy = "saturate",
    seed: int | torch.Tensor | None = None,
    offset: int = 0,
    bit_count: int = 32,
    settings: BlockSettings = BlockSettings(),  # noqa: B008 (frozen)
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise with one scale a block, each from its own amax.

    Bit for bit `fp8lab.emulation.scaling.quantize_blocks`: for each block, amax; the scale of
    `scale_from_amax`; y = x * scale, rounded to nearest even in float32; y is cast; inverse_scale =
    1 / scale, rounded to nearest even.

    Args:
        x: (M, N) float32, float16 or bfloat16; rows may lie any distance apart, neighbours in a row
            lie side by side. May be empty; sizes need not be multiples of the block.
        fmt: E4M3, E5M2, E4M3FNUZ or E5M2FNUZ.
        block: (rows, columns): rows 1 or a power of two from 4, columns a power of two, both no
            larger than a tile of the settings; or (1, None), one scale a row, or (None, 1), one a
            column (which reads x twice).
        margin: Headroom in powers of two ("fp8lab" alone has one).
        power_of_two: Round scales down to powers of two.
        preset: "fp8lab" or "transformer_engine".
        rounding, overflow, seed, offset, bit_count: As for `fp8lab.kernels.casting.quantize`.
        settings: How the kernels are launched.

    Returns:
        Codes of x's shape, and float32 inverse scales (ceil(M / rows), ceil(N / columns)), laid out
        as above.

    Raises:
        TypeError: x, fmt or block of a type that is not accepted.
        ValueError: Another device, format, block, preset, rounding or policy; a margin or seed out
            of range or not asked for; or an x that is no such matrix.
    """
    scaling = _scaling(fmt, margin, power_of_two, preset)
    cast = checked_cast(x, fmt, block, rounding, overflow, seed, offset, bit_count, settings)
    codes, kept = one_layout(x, fmt, block, scaling, cast, settings)
    return codes, kept


def quantize_blocks_with_transpose(
    x: torch.Tensor,
    fmt: Float8Format,
    *,
    block: Block = (1, 128),
    margin: int = 0,
    power_of_two: bool = True,
    preset: str = "fp8lab",
    rounding: str = "nearest_even",
    overflow: str | OverflowPolicy = "saturate",
    seed: int | torch.Tensor | None = None,
    offset: int = 0,
    bit_count: int = 32,
    settings: BlockSettings = BlockSettings(),  # noqa: B008 (frozen)
) -> BothLayouts:
    """`quantize_blocks` of x and of x.t(), each quantised from x itself, from one read.

    With (1, None), one scale a row and one a column, x is read twice: once for the amaxes.

    Args:
        x, fmt, block, ...: As for `quantize_blocks`. An element has one random word, by its place
            in x, for both of its codes.

    Returns:
        See `BothLayouts`; `scales_t` are laid out for x.t() as `scales` are for x. Square blocks
        hold the same elements either way: their codes are transposed, and so are their scales.
    """
    scaling = _scaling(fmt, margin, power_of_two, preset)
    cast = checked_cast(x, fmt, block, rounding, overflow, seed, offset, bit_count, settings)
    return both_layouts(x, fmt, block, scaling, cast, settings)


def dequantize_blocks(
    codes: torch.Tensor,
    inverse_scale: torch.Tensor,
    *,
    block: Block = (1, 128),
    settings: TileSettings = TileSettings(),  # noqa: B008 (frozen)
) -> torch.Tensor:
    """Decode codes that have one inverse scale a block.

    The code's value (exact in float32) times its block's inverse scale, rounded to nearest even in
    float32. Bit for bit `fp8lab.emulation.scaling.dequantize_blocks`, but for the payload of NaN.

    Args:
        codes: (M, N) FP8 codes; neighbours in a row lie side by side.
        inverse_scale: float32 (ceil(M / rows), ceil(N / columns)), of any strides.
        block: The block they were made with; powers of two, or None for a whole dimension.
        settings: How the kernel is launched, and how it decodes.

    Returns:
        float32 of the shape of codes, contiguous.

    Raises:
        TypeError: Other dtypes, or a block that is no pair.
        ValueError: Another device, block, or shape of inverse_scale.
    """
    check_tensor("inverse_scale", inverse_scale, (torch.float32,), contiguous=False)
    return dequantized(codes, inverse_scale, block, False, settings)


def _scaling(fmt: Float8Format, margin: int, power_of_two: bool, preset: str) -> ScaleRule:
    if preset not in GUARDED_PRESETS:
        raise ValueError(f"preset is {preset!r}; accepted: {', '.join(GUARDED_PRESETS)}")
    if margin and preset != "fp8lab":
        raise ValueError(f"margin is {margin} with preset {preset!r}; accepted: 0")
    return scale_rule(fmt, margin=margin, power_of_two=power_of_two)
