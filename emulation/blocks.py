"""One scale a block: 1x128, 128x128, one a row, one a column, any size in either direction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8lab.emulation.amax import amax, float_array
from fp8lab.emulation.casting import dequantize, quantize
from fp8lab.emulation.scale_rules import (
    bounded_scale,
    check_margin,
    check_value_format,
    current_scale,
    inverse_scale,
)
from fp8lab.emulation.tiling import Block, Float32Array, Layout, Tile, in_blocks, layout_of
from fp8lab.formats import Float8Format, OverflowPolicy

Array = npt.NDArray[Any]
# From the amax of blocks: what is kept for each, and the float32 that multiplies its elements.
ScaleRule = Callable[[Float32Array], tuple[Array, Float32Array]]


def quantize_blocks(
    x: npt.ArrayLike,
    fmt: Float8Format,
    *,
    block: Block = (1, 128),
    margin: int = 0,
    power_of_two: bool = True,
    preset: str = "fp8lab",
    rounding: str = "nearest_even",
    overflow: str | OverflowPolicy = "saturate",
    random_bits: npt.ArrayLike | None = None,
    bit_count: int = 32,
    threads: int | None = None,
) -> tuple[Array, Float32Array]:
    """Quantise with one scale a block, each from its own amax.

    For each block: `amax`; `scale_from_amax` with previous = 1, so that a block that is all zero or
    holds NaN or Inf has scale 1 (another preset: its `current_scale`); y = x * scale, rounded to
    nearest even in float32 (float64 for float64 x); y is cast as `quantize` casts; inverse_scale =
    1 / scale, rounded to float32 (exact for powers of two). No block sees another.

    Args:
        x: float64, float32, float16 or bfloat16, at least 2-D, strided or empty; blocks lie in its
            last two dimensions.
        fmt: E4M3, E5M2, E4M3FNUZ or E5M2FNUZ.
        block: (rows, columns), None for the whole dimension: (1, 128) for activations, (128, 128)
            for weights, (128, 1) for what is summed over rows, (1, None) one scale a row, (None, 1)
            one a column. Sizes need not be multiples of it; the last block is smaller.
        margin: Headroom in powers of two ("fp8lab" alone has one).
        power_of_two: Round scales down to powers of two.
        preset: A name of `CURRENT_PRESETS`.
        rounding, overflow, random_bits, bit_count, threads: As for `quantize`; random_bits have x's
            shape.

    Returns:
        Codes of dtype `fmt.dtype` and x's shape, and float32 inverse scales
        (..., ceil(M / rows), ceil(N / columns)).

    Raises:
        TypeError: x, fmt, block or random_bits of a type that is not accepted.
        ValueError: A block dimension below 1, x of fewer than 2 dimensions, an unknown preset,
            rounding or policy, a margin with another preset, or a preset's scale that is 0 or NaN
            (torchao's for an amax of Inf or NaN).

    Source: DeepSeek-V3's recipe as TransformerEngine and torchao have it.

    >>> import numpy as np
    >>> from fp8lab.formats import E4M3
    >>> x = np.array([[1, 2, 1000]], np.float32)
    >>> codes, inverse_scale = quantize_blocks(x, E4M3, block=(1, 2))
    >>> inverse_scale.tolist()
    [[0.0078125, 4.0]]
    >>> dequantize_blocks(codes, inverse_scale, block=(1, 2)).tolist()
    [[1.0, 2.0, 1024.0]]
    """
    margin = check_margin(margin)
    if margin and preset != "fp8lab":
        raise ValueError(f"margin is {margin} with preset {preset!r}; accepted: 0")

    def rule(largest: Float32Array) -> tuple[Array, Float32Array]:
        if preset == "fp8lab":
            scale = bounded_scale(largest, fmt, margin, power_of_two)
        else:
            scale = current_scale(largest, fmt, preset=preset, power_of_two=power_of_two)
            if not (np.isfinite(scale) & (scale > 0)).all():
                raise ValueError(f"preset {preset!r} gives scales of 0, Inf or NaN for this x")
        return inverse_scale(scale), scale

    cast: dict[str, Any] = {"rounding": rounding, "overflow": overflow, "threads": threads}
    cast |= {"random_bits": random_bits, "bit_count": bit_count}
    return quantize_by_rule(x, fmt, block, rule, cast)


def quantize_by_rule(
    x: npt.ArrayLike, fmt: Float8Format, block: Block, rule: ScaleRule, cast: dict[str, Any]
) -> tuple[Array, Array]:
    """Codes, and what `rule` keeps for each block: what every kind of block goes through.

    The scales broadcast over a view of the elements, inside `quantize`, which works piece by piece:
    they are never expanded. A block whose scale is NaN gets NaN codes alone.

    Args:
        cast: The other arguments of `quantize`.
    """
    values = float_array("x", x)
    check_value_format(fmt)
    layout = layout_of(values.shape, block)
    bits = cast["random_bits"]
    if bits is not None:
        bits = np.asarray(bits)
        if bits.shape != values.shape:
            raise ValueError(f"random_bits have shape {bits.shape}; x has {values.shape}")
    # On nothing, so that a wrong argument is refused whatever x holds; and the code of NaN.
    no_bits = None if bits is None else bits.reshape(-1)[:0]
    quantize(values.reshape(-1)[:0], fmt, **{**cast, "random_bits": no_bits})
    nan = quantize(np.float32(np.nan), fmt, overflow=cast["overflow"]).view(np.uint8)

    kept, scale = rule(amax(values, block=block))
    poisoned = np.isnan(scale)
    scales = layout.matrices(np.where(poisoned, np.float32(1), scale))
    matrices, poisons = layout.matrices(values), layout.matrices(poisoned)
    done = []
    for region in layout.regions():
        if bits is not None:
            cast = {**cast, "random_bits": in_blocks(layout.matrices(bits), region)}
        found = quantize(
            in_blocks(matrices, region), fmt, scale=one_a_block(scales, region), **cast
        )
        poison = one_a_block(poisons, region)
        if poison.any():
            np.copyto(found.view(np.uint8), nan, where=poison)
        done.append((region, found))
    return joined(done, layout, fmt.dtype), kept


def dequantize_blocks(
    codes: Array,
    inverse_scale: npt.ArrayLike,
    *,
    block: Block = (1, 128),
    threads: int | None = None,
) -> Float32Array:
    """Decode codes that have one inverse scale a block.

    For each element: the code's value (exact in float32) times its block's inverse scale, rounded
    to nearest even in float32.

    Args:
        codes: Of an ml_dtypes FP8 type, at least 2-D: what `quantize_blocks` gave.
        inverse_scale: float32 of shape (..., ceil(M / rows), ceil(N / columns)).
        block: The block they were made with.
        threads: As for `dequantize`.

    Returns:
        float32 of the shape of codes. NaN codes give NaN; a product beyond float32 gives Inf; -0
        stays.

    Raises:
        TypeError: Codes that are no FP8 codes, or a block that is not a pair.
        ValueError: A block dimension below 1, or inverse scales of another shape.

    >>> import numpy as np
    >>> from fp8lab.formats import E4M3
    >>> codes, inverse_scale = quantize_blocks(np.full((2, 3), 448.0), E4M3, block=(None, 1))
    >>> dequantize_blocks(codes, inverse_scale, block=(None, 1))[0].tolist()
    [448.0, 448.0, 448.0]
    """
    codes = np.asarray(codes)
    layout = layout_of(codes.shape, block)
    inverse = np.asarray(inverse_scale, dtype=np.float32)
    if inverse.shape != layout.per_block:
        raise ValueError(
            f"inverse_scale has shape {inverse.shape}; codes of shape {codes.shape} in blocks of"
            f" {block} have {layout.per_block}"
        )
    dequantize(codes.reshape(-1)[:0])  # refuses a wrong dtype, also of nothing
    matrices, scales = layout.matrices(codes), layout.matrices(inverse)
    done = []
    for region in layout.regions():
        inverse = one_a_block(scales, region)
        values = dequantize(in_blocks(matrices, region), inverse_scale=inverse, threads=threads)
        done.append((region, values))
    return joined(done, layout, np.dtype(np.float32))


def expand_blocks(per_block: Array, block: Block, shape: tuple[int, ...]) -> Array:
    """Repeat one value a block over the elements of the block.

    Args:
        per_block: (..., ceil(M / rows), ceil(N / columns)).
        block: (rows, columns), None for the whole dimension.
        shape: The (..., M, N) of the result.

    >>> import numpy as np
    >>> expand_blocks(np.array([[1, 2]]), (1, 2), (1, 3)).tolist()
    [[1, 1, 2]]
    """
    rows, columns = layout_of(shape, block).block
    wide = np.repeat(np.repeat(per_block, rows, axis=-2), columns, axis=-1)
    return wide[..., : shape[-2], : shape[-1]]


def joined(parts: list[tuple[Tile, Array]], layout: Layout, dtype: np.dtype[Any]) -> Array:
    """The array whose regions, as `in_blocks` shapes them, these are."""
    if len(parts) == 1:
        return parts[0][1].reshape(layout.shape)  # nothing to copy
    whole = np.empty(layout.shape, dtype=dtype)
    matrices = layout.matrices(whole)
    for region, part in parts:
        place = matrices[:, region.rows, region.columns]
        place[...] = part.reshape(place.shape)
    return whole


def one_a_block(per_block: Array, region: Tile) -> Array:
    """The part of (batch, blocks down, blocks across) that broadcasts to `in_blocks`."""
    return per_block[:, region.down, None, region.across, None]
