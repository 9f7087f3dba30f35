"""What a cast did to a tensor, counted on the GPU: the twin of `fp8lab.emulation.telemetry`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton

from fp8lab.formats import Float8Format
from fp8lab.kernels import telemetry_device as device_code
from fp8lab.kernels.casting_rules import FORMAT_OF, decode_rule
from fp8lab.kernels.checks import check_like, check_tensor
from fp8lab.kernels.gradients_device import LEAF
from fp8lab.kernels.launch import interpreted, launch

Block = tuple[int | None, int | None]

COLUMNS = int(device_code.COLUMNS)
BINS = int(device_code.BINS)
INPUTS = (torch.float32, torch.bfloat16, torch.float16)
_FIRST_EXPONENT = -112
_WORD = {4: torch.int32, 2: torch.int16}


@dataclass(frozen=True)
class TelemetrySettings:
    """How the kernels are launched. No setting changes a bit of any result.

    Attributes:
        programs: The most programs of a launch; each takes several leaves of 16384 elements.
        num_warps: Warps a program has.
        bin_block: Elements a program of `magnitude_bins_` takes, a power of two.
    """

    programs: int = 1056
    num_warps: int = 8
    bin_block: int = 4096


def count_cast_(
    row: torch.Tensor,
    x: torch.Tensor,
    codes: torch.Tensor | None,
    *,
    inverse_scale: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    block: Block | None = None,
    sums: bool = True,
    settings: TelemetrySettings = TelemetrySettings(),
) -> None:
    """Add what a cast did to a row of counts: one launch, nothing waits for the device.

    The contract is `fp8lab.emulation.telemetry.count_cast`'s; `telemetry_device` says what a row
    holds.

    Args:
        row: int64 (COLUMNS,), contiguous; zeros for nothing yet.
        x: (M, N) float32, bfloat16 or float16, contiguous.
        codes: FP8 codes of that shape, contiguous; None for a cast to BF16.
        inverse_scale: float32 or E8M0: one element, or one a block (2-d); needed with codes.
        scale: One float32; None is 1 / inverse_scale.
        block: (rows, columns) of a block, None for a whole dimension.
        sums: Whether the two sums are formed.
        settings: How the kernel is launched.

    Raises:
        TypeError, ValueError: A tensor that does not fit.
    """
    check_tensor("x", x, INPUTS)
    check_tensor("row", row, (torch.int64,))
    if x.dim() != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; accepted: a matrix")
    if row.shape != (COLUMNS,):
        raise ValueError(f"row has shape {tuple(row.shape)}; accepted: ({COLUMNS},)")
    if x.numel() == 0:
        return
    rule, limit, e8m0 = None, 0, False
    down = across = 0
    strides = (0, 0)
    if codes is not None:
        check_tensor("codes", codes, FORMAT_OF)
        check_like("codes", codes, "x", x)
        if inverse_scale is None:
            raise ValueError("codes are given without an inverse_scale")
        check_tensor(
            "inverse_scale",
            inverse_scale,
            (torch.float32, torch.float8_e8m0fnu),
            contiguous=False,
        )
        fmt = FORMAT_OF[codes.dtype]
        rule, limit = decode_rule(fmt, x.device), _overflow_bits(fmt)
        e8m0 = inverse_scale.dtype == torch.float8_e8m0fnu
        if block is not None:
            down, across = (size or 0 for size in block)
            _check_blocks(inverse_scale, x, block)
            strides = (inverse_scale.stride(0), inverse_scale.stride(1))
        codes = codes.view(torch.uint8)
        inverse_scale = inverse_scale.view(torch.uint8) if e8m0 else inverse_scale
    leaves = triton.cdiv(x.numel(), int(LEAF))
    launch(
        device_code.cast_counts_kernel,
        (min(leaves, settings.programs),),
        x.view(_WORD[x.element_size()]),
        codes,
        inverse_scale,
        scale,
        row,
        x.numel(),
        x.shape[1],
        *strides,
        INPUT=str(x.dtype).removeprefix("torch."),
        RULE=rule,
        LIMIT=limit,
        DOWN=down,
        ACROSS=across,
        E8M0=e8m0,
        SUMS=sums,
        HARDWARE=not interpreted(),
        num_warps=settings.num_warps,
    )


def magnitude_bins_(
    bins: torch.Tensor,
    values: torch.Tensor,
    *,
    settings: TelemetrySettings = TelemetrySettings(),
) -> None:
    """Add to 64 counts; the contract is `fp8lab.emulation.telemetry.magnitude_bins`'.

    Args:
        bins: int64 (64,), contiguous.
        values: float32, contiguous.
        settings: How the kernel is launched.

    Raises:
        TypeError, ValueError: A tensor that does not fit.
    """
    check_tensor("values", values, (torch.float32,))
    check_tensor("bins", bins, (torch.int64,))
    if bins.shape != (BINS,):
        raise ValueError(f"bins have shape {tuple(bins.shape)}; accepted: ({BINS},)")
    launch(
        device_code.magnitude_bins_kernel,
        (triton.cdiv(values.numel(), settings.bin_block),),
        values.view(torch.int32),
        bins,
        values.numel(),
        FIRST_EXPONENT=_FIRST_EXPONENT,
        BLOCK=settings.bin_block,
        num_warps=settings.num_warps,
    )


def _overflow_bits(fmt: Float8Format) -> int:
    """The bits of the smallest scaled magnitude that rounds past the largest finite code."""
    edge = int(np.float32(fmt.overflow_edge).view(np.int32))
    return edge if fmt.max_code % 2 else edge + 1


def _check_blocks(inverse: torch.Tensor, x: torch.Tensor, block: Block) -> None:
    wanted = tuple(
        1 if size is None else triton.cdiv(whole, size)
        for whole, size in zip(x.shape, block, strict=True)
    )
    if tuple(inverse.shape) != wanted:
        raise ValueError(f"inverse_scale has shape {tuple(inverse.shape)}; accepted: {wanted}")
