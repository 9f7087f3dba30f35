"""The FP8 operations on torch tensors: the oracle for the CPU, the Triton kernels for a GPU.

Where a tensor lives decides, and nothing else: both give the same bits. Names and argument order
are those of `fp8lab.emulation`; a trailing underscore marks what changes its arguments in place.
Nothing here waits for a GPU: scales are made where their amaxes are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8lab.bridge import to_numpy, to_torch
from fp8lab.emulation import casting, scaling
from fp8lab.formats import Float8Format
from fp8lab.observe import observed


def quantize(
    x: Tensor,
    fmt: Float8Format,
    *,
    scale: Tensor | None = None,
    overflow: str = "saturate",
    amax_out: Tensor | None = None,
) -> Tensor:
    """Cast to FP8 codes; see `fp8lab.emulation.casting.quantize`.

    Args:
        x: float32, bfloat16 or float16, contiguous.
        fmt: E4M3 or E5M2.
        scale: One float32 element on x's device, finite and above zero.
        overflow: A policy's name.
        amax_out: One float32 element on x's device; becomes the larger bit pattern of itself and
            x's amax, as `fp8lab.emulation.scaling.record_amax` merges them.
    """
    if x.is_cuda:
        from fp8lab.kernels.casting import quantize as kernel

        codes: Tensor = kernel(x, fmt, scale=scale, overflow=overflow, amax_out=amax_out)
        return codes
    factor = None if scale is None else to_numpy(scale)
    codes = to_torch(casting.quantize(to_numpy(x), fmt, scale=factor, overflow=overflow))
    if amax_out is not None:
        words = amax_out.view(torch.int32)
        words.copy_(torch.maximum(words, amax(x).view(torch.int32)))
    return codes


def dequantize(codes: Tensor, *, inverse_scale: Tensor | None = None) -> Tensor:
    """Decode to float32; see `fp8lab.emulation.casting.dequantize`. inverse_scale: one element."""
    if codes.is_cuda:
        from fp8lab.kernels.casting import dequantize as kernel

        values: Tensor = kernel(codes, inverse_scale=inverse_scale)
        return values
    factor = None if inverse_scale is None else to_numpy(inverse_scale)
    return to_torch(casting.dequantize(to_numpy(codes), inverse_scale=factor))


@observed("amax")
def amax(x: Tensor) -> Tensor:
    """The largest magnitude, a 0-d float32 tensor on x's device; NaN and Inf when present."""
    if x.is_cuda:
        from fp8lab.kernels.scaling import amax as kernel

        largest: Tensor = kernel(x)
        return largest
    return to_torch(scaling.amax(to_numpy(x)))


@observed("scale")
def current_scale(
    amax: Tensor,
    fmt: Float8Format,
    *,
    margin: int = 0,
    power_of_two: bool = False,
    preset: str = "fp8lab",
) -> tuple[Tensor, Tensor]:
    """Current scaling's scale and its inverse, of amax's shape.

    By `scale_from_amax`, or for the preset "torchao" by `fp8lab.emulation.scaling.current_scale`,
    whose 0 and NaN (for an amax of Inf or NaN) are taken for 1, as the other presets give.
    """
    if preset == "torchao":
        scale = _torchao_scale(amax, fmt, power_of_two)
        scale = torch.where(scale.isfinite() & (scale > 0), scale, 1.0)
        return scale, scale.reciprocal()
    if amax.is_cuda:
        from fp8lab.kernels.scaling import scale_from_amax as kernel

        inverse = torch.empty_like(amax)
        found: Tensor = kernel(
            amax, fmt, margin=margin, power_of_two=power_of_two, inverse_out=inverse
        )
        return found, inverse
    scale = scale_from_amax(amax, fmt, margin=margin, power_of_two=power_of_two)
    return scale, scale.reciprocal()


def _torchao_scale(amax: Tensor, fmt: Float8Format, power_of_two: bool) -> Tensor:
    if amax.is_cuda:
        from fp8lab.kernels.scaling import current_scale as kernel

        scale: Tensor = kernel(amax, fmt, preset="torchao", power_of_two=power_of_two)
        return scale
    return to_torch(
        scaling.current_scale(to_numpy(amax), fmt, preset="torchao", power_of_two=power_of_two)
    )


def scale_from_amax(
    amax: Tensor, fmt: Float8Format, *, margin: int = 0, power_of_two: bool = False
) -> Tensor:
    """A scale from an amax; see `fp8lab.emulation.scaling.scale_from_amax` (previous is 1)."""
    if amax.is_cuda:
        from fp8lab.kernels.scaling import scale_from_amax as kernel

        scale: Tensor = kernel(amax, fmt, margin=margin, power_of_two=power_of_two)
        return scale
    return to_torch(
        scaling.scale_from_amax(to_numpy(amax), fmt, margin=margin, power_of_two=power_of_two)
    )


def quantize_blocks(
    x: Tensor, fmt: Float8Format, *, block: tuple[int, int], power_of_two: bool = True
) -> tuple[Tensor, Tensor]:
    """Codes and inverse scales of a matrix; see `fp8lab.emulation.scaling.quantize_blocks`."""
    if not x.is_cuda:
        codes, inverse = scaling.quantize_blocks(
            to_numpy(x), fmt, block=block, power_of_two=power_of_two
        )
        return to_torch(codes), to_torch(inverse)
    if _in_a_tile(block):
        from fp8lab.kernels.scaling import quantize_blocks as kernel

        found: tuple[Tensor, Tensor] = kernel(x, fmt, block=block, power_of_two=power_of_two)
        return found
    rows, columns = block
    down, across = -(-x.shape[0] // rows), -(-x.shape[1] // columns)
    padded = torch.nn.functional.pad(
        x.abs(), (0, across * columns - x.shape[1], 0, down * rows - x.shape[0])
    )
    largest = padded.view(down, rows, across, columns).amax(dim=(1, 3)).float()
    scale = scale_from_amax(largest, fmt, power_of_two=power_of_two)
    # A product of two float32 is rounded to nearest even here as in the oracle.
    return quantize(x * expand_blocks(scale, block, x.shape), fmt), scale.reciprocal()


def _in_a_tile(block: tuple[int, int]) -> bool:
    """Whether the kernel's tiles hold such blocks."""
    return block[0] != 2 and all(size <= 128 and not size & (size - 1) for size in block)


def expand_blocks(per_block: Tensor, block: tuple[int, int], shape: torch.Size) -> Tensor:
    """Repeat one value a block over the elements of the block: the result has `shape`."""
    rows, columns = block
    wide = per_block.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return wide[: shape[0], : shape[1]]


@observed("scale_update")
def update_delayed_(
    scale: Tensor,
    amax_history: Tensor,
    fmt: Float8Format,
    *,
    margin: int = 0,
    algorithm: str = "max",
    power_of_two: bool = False,
    group_amax: Tensor | None = None,
) -> None:
    """Advance delayed scaling in place; see `fp8lab.emulation.scaling.update_delayed`.

    Args:
        scale: float32, (...): one tensor's, or those of many.
        amax_history: (L, ...) float32; slot 0 holds this step's amax.
        group_amax: The largest slot 0 of all ranks, of scale's shape.
    """
    if scale.is_cuda:
        from fp8lab.kernels.scaling import DelayedScalingState
        from fp8lab.kernels.scaling import update_delayed_ as kernel

        kernel(
            DelayedScalingState(scale, amax_history),
            fmt,
            margin=margin,
            algorithm=algorithm,
            power_of_two=power_of_two,
            group_amax=group_amax,
        )
        # As torch does for its own: whoever derived something from the scale sees that it moved.
        torch.autograd.graph.increment_version([scale, amax_history])
        return
    state = scaling.update_delayed(
        scaling.DelayedScalingState(to_numpy(scale), to_numpy(amax_history)),
        fmt,
        margin=margin,
        algorithm=algorithm,
        power_of_two=power_of_two,
        group_amax=None if group_amax is None else to_numpy(group_amax),
    )
    scale.copy_(to_torch(state.scale))
    amax_history.copy_(to_torch(state.amax_history))
