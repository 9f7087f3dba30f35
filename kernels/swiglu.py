"""SwiGLU and its gradients, and the FP8 codes of what they give, from one read.

The twins of `fp8lab.emulation.swiglu`, followed by the casts of `casting` and `scaling_blocks`: the
codes are those of the rounded result, bit for bit, so that it makes no difference whether a result
was written and read again or never written. Gate and up are the left and the right half of one
matrix, as one linear layer gives them, and so are their gradients.
"""

from __future__ import annotations

import torch

from fp8lab.formats import Float8Format
from fp8lab.kernels.casting import checked_factor
from fp8lab.kernels.casting_rules import cast_rule
from fp8lab.kernels.checks import check_one_element
from fp8lab.kernels.launch import PairSettings, TileSettings
from fp8lab.kernels.scaling_matrix import BothLayouts, empty_kept
from fp8lab.kernels.scaling_rules import scale_rule
from fp8lab.kernels.swiglu_launch import checked, launch_swiglu

# Of the result, and of the gradients, which take three operands and twice the registers.
ONE_SCALE = TileSettings(128, 64, 8, pairs=(PairSettings(128, 128, 8),))
ONE_SCALE_GRAD = TileSettings(64, 64, 8, pairs=(PairSettings(128, 128, 8, 128),))
BLOCKS = TileSettings(128, 128, 16, pairs=(PairSettings(128, 128, 8, 80),))
BLOCKS_GRAD = TileSettings(128, 128, 16, pairs=(PairSettings(128, 128, 8, 128),))


def swiglu(gate_up: torch.Tensor, *, settings: TileSettings = ONE_SCALE) -> torch.Tensor:
    """silu(gate) * up, bit for bit `fp8lab.emulation.swiglu.swiglu`.

    Args:
        gate_up: (M, 2F) float32, float16 or bfloat16: gate in the first F columns, up in the rest.
            Rows may lie any distance apart, neighbours in a row lie side by side. May be empty.
        settings: How the kernel is launched.

    Returns:
        (M, F) of its type, contiguous.

    Raises:
        TypeError: Another dtype. ValueError: Another device, or no such matrix.
    """
    work = checked(gate_up, None)
    values = work.empty_values()
    launch_swiglu(work, values=values, settings=settings)
    return values


def swiglu_grad(
    dh: torch.Tensor, gate_up: torch.Tensor, *, settings: TileSettings = ONE_SCALE_GRAD
) -> torch.Tensor:
    """The gradients of gate and up side by side, bit for bit the oracle's `swiglu_grad`.

    Args:
        dh: (M, F), the gradient of the result, of gate_up's type.
        gate_up, settings: As for `swiglu`.

    Returns:
        (M, 2F) of their type, contiguous.

    Raises:
        TypeError, ValueError: As `swiglu`.
    """
    work = checked(gate_up, dh)
    values = work.empty_values()
    launch_swiglu(work, values=values, settings=settings)
    return values


def quantize_swiglu(
    gate_up: torch.Tensor,
    fmt: Float8Format,
    *,
    dh: torch.Tensor | None = None,
    scale: float | torch.Tensor | None = None,
    transposed: bool = True,
    amax_out: torch.Tensor | None = None,
    values_out: torch.Tensor | None = None,
    settings: TileSettings | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Codes of `swiglu(gate_up)`, or with dh of `swiglu_grad(dh, gate_up)`, with one scale.

    Bit for bit `casting.quantize` (saturating, to nearest even) of that tensor.

    Args:
        gate_up, dh: As for `swiglu_grad`.
        fmt: E4M3, E5M2, E4M3FNUZ or E5M2FNUZ.
        scale, amax_out: As for `casting.quantize`; the amax is that of the rounded result.
        transposed: Whether the transposed codes are wanted.
        values_out: Where the result itself goes: of its shape and type, contiguous; None for
            nowhere.
        settings: How the kernel is launched; None for the fastest on an H200.

    Returns:
        Codes of the result's shape, contiguous; and transposed, whose rows begin at multiples of 16
        bytes, or None.

    Raises:
        TypeError, ValueError: As `swiglu` and `casting.quantize`; for a `values_out` that does not
            fit.
    """
    work = checked(gate_up, dh)
    settings = settings or (ONE_SCALE if dh is None else ONE_SCALE_GRAD)
    factor = checked_factor("scale", scale, gate_up.device)
    if amax_out is not None:
        check_one_element("amax_out", amax_out, gate_up.device)
    work.check_values(values_out)
    codes, codes_t = work.empty_codes(transposed)
    rule = cast_rule(fmt, gate_up.device, path=settings.cast_path)
    launch_swiglu(
        work,
        rule=rule,
        codes=codes,
        codes_t=codes_t,
        scale=factor,
        amax_out=amax_out,
        values=values_out,
        settings=settings,
    )
    dtype = getattr(torch, fmt.dtype_name)
    return codes.view(dtype), None if codes_t is None else codes_t.view(dtype)


def quantize_swiglu_blocks(
    gate_up: torch.Tensor,
    fmt: Float8Format,
    *,
    dh: torch.Tensor | None = None,
    length: int = 128,
    power_of_two: bool = True,
    values_out: torch.Tensor | None = None,
    settings: TileSettings | None = None,
) -> BothLayouts:
    """The same with one scale for each block of one row, in both layouts.

    Bit for bit `scaling_blocks.quantize_blocks_with_transpose` of that tensor.

    Args:
        gate_up, fmt, dh, values_out, settings: As for `quantize_swiglu`.
        length: Elements of a block, a power of two from 4, no larger than a tile. With dh, F must
            be a multiple of the tile's columns, so that no block holds both gradients.
        power_of_two: Round scales down to powers of two.

    Returns:
        See `BothLayouts`.

    Raises:
        TypeError, ValueError: As `quantize_swiglu`; for a length that does not fit.
    """
    work = checked(gate_up, dh)
    settings = settings or (BLOCKS if dh is None else BLOCKS_GRAD)
    largest = min(settings.rows, settings.columns)
    if not 4 <= length <= largest or length & (length - 1):
        raise ValueError(f"length is {length}; accepted: powers of two from 4 to {largest}")
    if dh is not None and work.width % settings.columns:
        raise ValueError(
            f"gate and up have {work.width} columns; accepted with dh and blocks: multiples of"
            f" {settings.columns}"
        )
    work.check_values(values_out)
    scaling = scale_rule(fmt, power_of_two=power_of_two)
    codes, codes_t = work.empty_codes(True)
    assert codes_t is not None
    block, device = (1, length), gate_up.device
    kept = empty_kept(codes.shape, block, scaling, device)
    kept_t = empty_kept(codes_t.shape, block, scaling, device)
    launch_swiglu(
        work,
        rule=cast_rule(fmt, device, path=settings.cast_path),
        codes=codes,
        codes_t=codes_t,
        scaling=scaling,
        length=length,
        kept=kept,
        kept_t=kept_t,
        values=values_out,
        settings=settings,
    )
    dtype = getattr(torch, fmt.dtype_name)
    return BothLayouts(codes.view(dtype), kept, codes_t.view(dtype), kept_t)


def fits_blocks(columns: int, length: int, *, gradients: bool) -> bool:
    """Whether `quantize_swiglu_blocks` makes such blocks of a result of so many columns."""
    settings = BLOCKS_GRAD if gradients else BLOCKS
    largest = min(settings.rows, settings.columns)
    lengths = 4 <= length <= largest and not length & (length - 1)
    return lengths and not (gradients and columns % (2 * settings.columns))
