"""Amaxes, and scales from them: the twins of `fp8lab.emulation.amax` and `.scale_rules`.

Nothing here looks at a value on the host, so nothing waits for the device.
"""

from __future__ import annotations

import torch

from fp8lab.formats import Float8Format
from fp8lab.kernels.casting_matrix import INPUTS, check_matrix
from fp8lab.kernels.casting_rules import check_format
from fp8lab.kernels.checks import check_tensor
from fp8lab.kernels.launch import ElementwiseSettings, TileSettings, cdiv, launch
from fp8lab.kernels.scaling_device import (
    amax_kernel,
    amax_lines_kernel,
    mx_scale_kernel,
    scale_from_amax_kernel,
    torchao_scale_kernel,
)
from fp8lab.kernels.scaling_rules import (
    CURRENT_PRESETS,
    GUARDED_PRESETS,
    Block,
    ScaleRule,
    mx_rule,
    scale_rule,
)

_SMALL = 256  # amaxes a program: there are few


def amax(
    x: torch.Tensor,
    *,
    block: Block | None = None,
    settings: ElementwiseSettings = ElementwiseSettings(block=16384, num_warps=8),  # noqa: B008
) -> torch.Tensor:
    """The largest magnitude, of everything, of each row or of each column, in one read.

    Magnitudes are compared as bit patterns, so that nothing is lost: a NaN wins over everything,
    Inf over every finite value. Bit for bit `fp8lab.emulation.scaling.amax`.

    Args:
        x: float32, float16 or bfloat16; contiguous, of any shape, where block is None; else (M, N)
            whose neighbours in a row lie side by side. May be empty.
        block: None for all elements together, (1, None) for each row, (None, 1) for each column.
        settings: How the kernel is launched where block is None.

    Returns:
        float32: 0-d; or (M, 1) or (1, N). Of nothing it is 0.

    Raises:
        TypeError: x of another dtype. ValueError: Another block, device, or x not contiguous.
    """
    if block is not None:
        if tuple(block) not in ((1, None), (None, 1)):
            raise ValueError(f"block is {block!r}; accepted: None, (1, None), (None, 1)")
        of_rows, of_columns = amax_of_lines(x, rows=block[0] == 1, columns=block[1] == 1)
        return of_columns[None, :] if of_rows is None else of_rows[:, None]
    check_tensor("x", x, INPUTS)
    largest = torch.zeros((), dtype=torch.float32, device=x.device)
    launch(
        amax_kernel,
        (cdiv(x.numel(), settings.block),),
        x,
        largest,
        x.numel(),
        BLOCK=settings.block,
        num_warps=settings.num_warps,
    )
    return largest


def amax_of_lines(
    x: torch.Tensor,
    *,
    rows: bool = True,
    columns: bool = True,
    settings: TileSettings = TileSettings(),  # noqa: B008 (frozen)
) -> tuple[torch.Tensor, torch.Tensor]:
    """The amax of each row, (M,), and of each column, (N,), from one read; None for what is off."""
    check_matrix("x", x)
    height, width = x.shape
    zeros = [
        torch.zeros(size, dtype=torch.float32, device=x.device) if wanted else None
        for size, wanted in ((height, rows), (width, columns))
    ]
    launch(
        amax_lines_kernel,
        (cdiv(height, settings.rows) * cdiv(width, settings.columns),),
        x,
        *zeros,
        height,
        width,
        x.stride(0) if height > 1 else width,
        ROWS=settings.rows,
        COLUMNS=settings.columns,
        EVEN=height % settings.rows == 0 and width % settings.columns == 0,
        **settings.options,
    )
    return zeros[0], zeros[1]  # type: ignore[return-value]


def scale_from_amax(
    amax: torch.Tensor,
    fmt: Float8Format,
    *,
    margin: int = 0,
    power_of_two: bool = False,
    previous: torch.Tensor | None = None,
    inverse_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The scale that brings amax to the top of a format.

    Bit for bit `fp8lab.emulation.scaling.scale_from_amax`; the sign of amax is not looked at.

    Args:
        amax: float32 magnitudes, contiguous, any shape.
        fmt: The target format.
        margin: Unused headroom in powers of two; fmt.max_finite * 2**-margin must be a normal
            float32.
        power_of_two: Keep sign and exponent of the scale only.
        previous: float32 of amax's shape: the scales that stay where amax is 0, Inf or NaN. 1 when
            None.
        inverse_out: float32 of amax's shape; becomes 1 / scale, rounded to nearest even.

    Returns:
        float32 scales of amax's shape.

    Raises:
        TypeError: Another dtype, or no format. ValueError: A margin out of range, or a tensor of
            another shape or device.
    """
    rule = scale_rule(fmt, margin=margin, power_of_two=power_of_two)
    check_tensor("amax", amax, (torch.float32,))
    for name, tensor in (("previous", previous), ("inverse_out", inverse_out)):
        if tensor is not None:
            _check_alike(name, tensor, amax)
    return scales_by_rule(amax, rule, previous=previous, inverse_out=inverse_out)


def current_scale(
    amax: torch.Tensor,
    fmt: Float8Format,
    *,
    preset: str = "fp8lab",
    power_of_two: bool = False,
    eps: float | None = None,
) -> torch.Tensor:
    """The scale of current scaling, as a named stack computes it.

    Bit for bit `fp8lab.emulation.scaling.current_scale` of a float32 amax.

    Args:
        amax: float32 magnitudes, contiguous, any shape.
        fmt: The target format.
        preset: "fp8lab", "transformer_engine" or "torchao".
        power_of_two: Keep sign and exponent of the scale only.
        eps: The least amax; None takes the preset's (0, or 1e-12 for torchao).

    Raises:
        TypeError: Another dtype, or no format. ValueError: An unknown preset, or an eps that is
            negative or not finite.
    """
    if preset not in CURRENT_PRESETS:
        raise ValueError(f"unknown preset {preset!r}; accepted: {', '.join(CURRENT_PRESETS)}")
    check_format(fmt)
    check_tensor("amax", amax, (torch.float32,))
    guarded = preset in GUARDED_PRESETS
    least = (0.0 if guarded else 1e-12) if eps is None else eps
    if not 0 <= least < float("inf"):
        raise ValueError(f"eps is {eps!r}; accepted: a finite number, 0 or more")
    if guarded:
        bits = int(torch.tensor(least, dtype=torch.float32).view(torch.int32))
        return scales_by_rule(amax, scale_rule(fmt, power_of_two=power_of_two), eps_bits=bits)
    scale = torch.empty_like(amax)
    launch(
        torchao_scale_kernel,
        (cdiv(amax.numel(), _SMALL),),
        amax,
        scale,
        torch.full((), least, dtype=torch.float64, device=amax.device),
        amax.numel(),
        POWER_OF_TWO=power_of_two,
        TOP=fmt.max_finite,
        BLOCK=_SMALL,
        num_warps=4,
    )
    return scale


def inverse_scale(scale: torch.Tensor) -> torch.Tensor:
    """1 / scale, rounded to nearest even in float32: what dequantising multiplies by.

    Args:
        scale: float32 of any shape, on any device.
    """
    return scale.reciprocal()


def mx_scale(amax: torch.Tensor, fmt: Float8Format, *, rounding: str = "floor") -> torch.Tensor:
    """The shared scale of MX blocks, as E8M0 codes.

    Bit for bit `fp8lab.emulation.scaling.mx_scale`; the sign of amax is not looked at.

    Args:
        amax: float32 magnitudes, contiguous, any shape.
        fmt: The format of the elements.
        rounding: "floor", "up" or "nearest".

    Returns:
        float8_e8m0fnu of amax's shape.

    Raises:
        TypeError: Another dtype, or no format. ValueError: An unknown rounding.
    """
    rule = mx_rule(fmt, rounding)
    check_tensor("amax", amax, (torch.float32,))
    codes = torch.empty_like(amax, dtype=torch.uint8)
    launch(
        mx_scale_kernel,
        (cdiv(amax.numel(), _SMALL),),
        amax,
        codes,
        amax.numel(),
        SCALING=rule,
        BLOCK=_SMALL,
        num_warps=4,
    )
    return codes.view(torch.float8_e8m0fnu)


def scales_by_rule(
    amax: torch.Tensor,
    rule: ScaleRule,
    *,
    eps_bits: int = 0,
    previous: torch.Tensor | None = None,
    inverse_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`scale_from_amax` of arguments that are known to be right, of an amax raised to eps."""
    scale = torch.empty_like(amax)
    launch(
        scale_from_amax_kernel,
        (cdiv(amax.numel(), _SMALL),),
        amax,
        scale,
        inverse_out,
        previous,
        amax.numel(),
        SCALING=rule,
        EPS=eps_bits,
        BLOCK=_SMALL,
        num_warps=4,
    )
    return scale


def _check_alike(name: str, tensor: torch.Tensor, amax: torch.Tensor) -> None:
    check_tensor(name, tensor, (torch.float32,))
    if tensor.shape != amax.shape or tensor.device != amax.device:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} on {tensor.device}; accepted: amax's,"
            f" {tuple(amax.shape)} on {amax.device}"
        )
