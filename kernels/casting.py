"""Casts to and from FP8 on the GPU: the Triton twins of `fp8lab.emulation.casting`.

Here is what runs on the host; the kernels are in `fp8lab.kernels.casting_device` and, where the
transposed codes are wanted too, `fp8lab.kernels.casting_tiles`.
"""

from __future__ import annotations

from numbers import Real

import torch

from fp8lab.formats import Float8Format, OverflowPolicy
from fp8lab.kernels.casting_device import dequantize_kernel, quantize_kernel, requantize_kernel
from fp8lab.kernels.casting_matrix import (
    INPUTS,
    Cast,
    check_matrix,
    empty_transposed,
    quantize_tiles,
)
from fp8lab.kernels.casting_rules import FORMAT_OF, ROUNDINGS, cast_rule, check_format, decode_rule
from fp8lab.kernels.checks import as_integer, check_one_element, check_tensor
from fp8lab.kernels.launch import (
    TRANSPOSE_TILES,
    CastSettings,
    DecodeSettings,
    TileSettings,
    cdiv,
    interpreted,
    launch,
    to_float32,
)

__all__ = [
    "ROUNDINGS",
    "dequantize",
    "quantize",
    "quantize_with_transpose",
    "requantize",
]


def quantize(
    x: torch.Tensor,
    fmt: Float8Format,
    *,
    scale: float | torch.Tensor | None = None,
    rounding: str = "nearest_even",
    overflow: str | OverflowPolicy = "saturate",
    seed: int | torch.Tensor | None = None,
    offset: int = 0,
    bit_count: int = 32,
    amax_out: torch.Tensor | None = None,
    settings: CastSettings = CastSettings(),  # noqa: B008 (frozen)
) -> torch.Tensor:
    """Cast a tensor to FP8 codes, optionally scaled first and with its amax, in one pass.

    Order: x is widened to float32 (exact); with a scale, y = x * scale is rounded to nearest even
    in float32; y is rounded once to `fmt`. Bit for bit `fp8lab.emulation.casting.quantize`, with
    `random_bits = fp8lab.emulation.random.random_words(seed, x.shape, offset=offset)` where it is
    stochastic.

    Args:
        x: float32, float16 or bfloat16, any shape, contiguous; may be empty.
        fmt: E4M3, E5M2, E4M3FNUZ or E5M2FNUZ.
        scale: Multiplies x. A number, finite and above zero once rounded to float32; or a float32
            tensor of one element on x's device, which is not looked at on the host: whoever makes
            it sees that it is finite and above zero.
        rounding: "nearest_even", "toward_zero" or "stochastic".
        overflow: "saturate" (every overflow and Inf becomes the largest finite value, NaN the
            positive NaN code), "ieee" (Inf or NaN, as ml_dtypes), another name of
            `OVERFLOW_POLICIES`, or an `OverflowPolicy`.
        seed: For "stochastic": the key of Philox, an integer of 64 bits, or an int64 tensor of one
            element on x's device (so that a CUDA graph can be replayed with others).
        offset: For "stochastic": where in the seed's stream the tensor's words begin, counted in
            groups of four elements; at least 0.
        bit_count: For "stochastic": how many of the low random bits count, 1 to 32.
        amax_out: A float32 tensor of one element on x's device, holding a magnitude (sign bit
            clear). It becomes the larger of itself and the largest magnitude of x, before scaling,
            as bit patterns: a NaN wins over Inf, Inf over what is finite, and nothing is lost. As
            slot 0 of TransformerEngine's amax history.
        settings: How the kernel is launched, and which form of the cast it takes.

    Returns:
        Codes of x's shape, in torch's dtype for the format. -0 stays -0 where the format has one;
        an underflow keeps its sign likewise.

    Raises:
        TypeError: A dtype that is not accepted, or something that is not a tensor or a format.
        ValueError: An unknown rounding or policy, another format, a scale out of range, a seed that
            is missing or not asked for, a tensor on another device or not contiguous, or a hardware
            path that this device, format, rounding or policy lacks.
    """
    check_tensor("x", x, INPUTS)
    rule = cast_rule(
        fmt,
        x.device,
        rounding=rounding,
        overflow=overflow,
        path=settings.cast_path,
        bit_count=bit_count,
    )
    factor = checked_factor("scale", scale, x.device)
    seed, offset = checked_seed(seed, offset, rounding, x)
    if amax_out is not None:
        check_one_element("amax_out", amax_out, x.device)
    # As bytes: Triton refuses pointers to formats that a device does not convert.
    codes = torch.empty_like(x, dtype=torch.uint8)
    launch(
        quantize_kernel,
        (cdiv(x.numel(), settings.block),),
        x,
        codes,
        x.numel(),
        factor,
        amax_out,
        seed,
        offset,
        RULE=rule,
        BLOCK=settings.block,
        num_warps=settings.num_warps,
    )
    return codes.view(getattr(torch, fmt.dtype_name))


def quantize_with_transpose(
    x: torch.Tensor,
    fmt: Float8Format,
    *,
    scale: float | torch.Tensor | None = None,
    rounding: str = "nearest_even",
    overflow: str | OverflowPolicy = "saturate",
    seed: int | torch.Tensor | None = None,
    offset: int = 0,
    bit_count: int = 32,
    amax_out: torch.Tensor | None = None,
    settings: TileSettings = TRANSPOSE_TILES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize` of a matrix, and the same codes transposed, from one read.

    The three products of a linear layer each want their operands K-major, so each operand is wanted
    in both layouts.

    Args:
        x: (M, N) float32, float16 or bfloat16; rows may lie any distance apart, neighbours in a row
            lie side by side. May be empty.
        fmt, scale, rounding, overflow, seed, offset, bit_count, amax_out: As for `quantize`; an
            element's random word goes by its place in x.
        settings: How the kernel is launched, and which form of the cast it takes.

    Returns:
        Codes (M, N), contiguous; and (N, M), whose rows begin at multiples of 16 bytes, so that
        they are contiguous where M is a multiple of 16.

    Raises:
        TypeError, ValueError: As `quantize`; and for an x that is no such matrix.
    """
    check_matrix("x", x)
    rule = cast_rule(
        fmt,
        x.device,
        rounding=rounding,
        overflow=overflow,
        path=settings.cast_path,
        bit_count=bit_count,
    )
    factor = checked_factor("scale", scale, x.device)
    seed, offset = checked_seed(seed, offset, rounding, x)
    if amax_out is not None:
        check_one_element("amax_out", amax_out, x.device)
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    codes_t = empty_transposed(x)
    quantize_tiles(
        x,
        Cast(rule, seed, offset),
        codes,
        codes_t,
        scale=factor,
        amax_out=amax_out,
        settings=settings,
    )
    dtype = getattr(torch, fmt.dtype_name)
    return codes.view(dtype), codes_t.view(dtype)


def dequantize(
    codes: torch.Tensor,
    *,
    inverse_scale: float | torch.Tensor | None = None,
    settings: DecodeSettings = DecodeSettings(),  # noqa: B008 (frozen)
) -> torch.Tensor:
    """Decode FP8 codes to float32, optionally multiplied by an inverse scale.

    Every code is exact in float32. With an inverse scale the product is rounded to nearest even.
    Bit for bit `fp8lab.emulation.casting.dequantize`, but for the payload of NaN.

    Args:
        codes: float8_e4m3fn, float8_e5m2 or their FNUZ forms, any shape, contiguous; may be empty.
        inverse_scale: Multiplies the values. Any number, rounded to float32; or a float32 tensor of
            one element on the device of codes.
        settings: How the kernel is launched, and how it decodes.

    Returns:
        float32 of the shape of codes. A NaN code gives a NaN, 0x80 gives -0 where the format has
        one, E5M2's infinities stay.

    Raises:
        TypeError: codes are not of one of those dtypes.
        ValueError: codes or inverse_scale on another device, or not contiguous.
    """
    check_tensor("codes", codes, FORMAT_OF)
    factor = checked_factor("inverse_scale", inverse_scale, codes.device)
    values = torch.empty_like(codes, dtype=torch.float32)
    launch(
        dequantize_kernel,
        (cdiv(codes.numel(), settings.block),),
        codes.view(torch.uint8),
        values,
        codes.numel(),
        factor,
        RULE=decode_rule(FORMAT_OF[codes.dtype], codes.device, settings.cast_path),
        BLOCK=settings.block,
        num_warps=settings.num_warps,
    )
    return values


def requantize(
    codes: torch.Tensor,
    fmt: Float8Format,
    *,
    inverse_scale: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    rounding: str = "nearest_even",
    overflow: str | OverflowPolicy = "saturate",
    settings: CastSettings = CastSettings(),  # noqa: B008 (frozen)
) -> torch.Tensor:
    """Codes at one scale to codes at another, rounded once.

    Order: the code's value times inverse_scale times scale, exact (at most 52 bits, in float64);
    rounded once to `fmt`. Bit for bit `fp8lab.emulation.casting.requantize`.

    Args:
        codes: float8_e4m3fn, float8_e5m2 or their FNUZ forms, any shape, contiguous; may be empty.
        fmt: The format of the result.
        inverse_scale: What the codes are decoded with; 1 when None. A float32 tensor of one element
            on the device of codes, finite and above zero.
        scale: What the result is quantised with; likewise.
        rounding: "nearest_even" or "toward_zero".
        overflow: As for `quantize`.
        settings: How the kernel is launched, and which form of the cast it takes.

    Returns:
        Codes of the same shape. A NaN code becomes the policy's positive NaN, Inf what it makes of
        Inf.

    Raises:
        TypeError, ValueError: As `quantize`.
    """
    check_tensor("codes", codes, FORMAT_OF)
    check_format(fmt)
    if rounding == "stochastic":
        raise ValueError("rounding is 'stochastic'; accepted: nearest_even, toward_zero")
    rule = cast_rule(
        fmt, codes.device, rounding=rounding, overflow=overflow, path=settings.cast_path
    )
    for name, factor in (("inverse_scale", inverse_scale), ("scale", scale)):
        if factor is not None:
            check_one_element(name, factor, codes.device)
    result = torch.empty_like(codes, dtype=torch.uint8)
    launch(
        requantize_kernel,
        (cdiv(codes.numel(), settings.block),),
        codes.view(torch.uint8),
        result,
        codes.numel(),
        inverse_scale,
        scale,
        DECODE=decode_rule(FORMAT_OF[codes.dtype], codes.device),
        RULE=rule,
        BLOCK=settings.block,
        num_warps=settings.num_warps,
    )
    return result.view(getattr(torch, fmt.dtype_name))


def checked_seed(
    seed: int | torch.Tensor | None, offset: int, rounding: str, x: torch.Tensor
) -> tuple[int | torch.Tensor | None, int]:
    """Seed and offset as a kernel takes them.

    Raises:
        TypeError: A seed that is no integer.
        ValueError: One that is missing, not asked for, or not of 64 bits; or an offset that is
            negative or leaves 64 bits.
    """
    if rounding != "stochastic":
        if seed is not None:
            raise ValueError(f"seed given with rounding {rounding!r}; only stochastic uses it")
        return None, 0
    if isinstance(seed, torch.Tensor):
        check_tensor("seed", seed, (torch.int64,))
        if seed.numel() != 1 or seed.device != x.device:
            raise ValueError(
                f"seed has shape {tuple(seed.shape)} on {seed.device}; accepted: one element on"
                f" {x.device}"
            )
    elif seed is None:
        raise ValueError("stochastic rounding needs a seed: an integer, or an int64 tensor")
    else:
        number = as_integer(seed)
        if number is None:
            raise TypeError(f"seed is {seed!r}; accepted: an integer or an int64 tensor")
        if not -(1 << 63) <= number < 1 << 64:
            raise ValueError(f"seed is {seed}; accepted: -2**63 to 2**64 - 1")
        seed = number
    groups = cdiv(x.numel(), 4)
    first = as_integer(offset)
    if first is None or not 0 <= first <= (1 << 63) - 1 - groups:
        raise ValueError(f"offset is {offset!r}; accepted: an integer from 0 to 2**63 - {groups}")
    return seed, first


def checked_factor(
    name: str, factor: float | torch.Tensor | None, device: torch.device
) -> float | torch.Tensor | None:
    """A factor as a kernel takes it: None, a float32 number, or a tensor of one."""
    if factor is None:
        return None
    if isinstance(factor, torch.Tensor):
        check_one_element(name, factor, device)
        return factor
    if not isinstance(factor, Real):
        raise TypeError(
            f"{name} is a {type(factor).__name__}; accepted: a number or a float32 tensor"
        )
    rounded = to_float32(float(factor))
    if name == "scale" and not 0 < rounded < float("inf"):
        raise ValueError(f"scale is {factor!r}; accepted: finite values above zero (in float32)")
    if interpreted():
        # It would take a float32 subnormal for a float64, and Triton 3.6's loses the sign of -0.
        return torch.tensor(rounded, device=device)
    return rounded
