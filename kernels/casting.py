"""Casts to and from FP8 on the GPU: the Triton twins of `fp8lab.emulation.casting`.

Here is what runs on the host; the kernels are in `fp8lab.kernels.casting_device`.
"""

from __future__ import annotations

from functools import lru_cache
from numbers import Real
from typing import Any

import torch
import triton

from fp8lab.formats import E4M3, E5M2, Float8Format, OverflowPolicy, overflow_policy
from fp8lab.kernels.casting_device import dequantize_kernel, quantize_kernel
from fp8lab.kernels.checks import check_one_element, check_tensor
from fp8lab.kernels.launch import (
    CastPath,
    CastSettings,
    ElementwiseSettings,
    interpreted,
    launch,
    to_float32,
)

FORMATS = (E4M3, E5M2)
ROUNDINGS = ("nearest_even",)
# The integer type through which a kernel reads each input type.
_INPUT_WORDS = {
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}
_HARDWARE_CAPABILITY = (9, 0)


def quantize(
    x: torch.Tensor,
    fmt: Float8Format,
    *,
    scale: float | torch.Tensor | None = None,
    rounding: str = "nearest_even",
    overflow: str | OverflowPolicy = "saturate",
    amax_out: torch.Tensor | None = None,
    settings: CastSettings = CastSettings(),  # noqa: B008 (frozen)
) -> torch.Tensor:
    """Cast a tensor to FP8 codes, optionally scaled first and with its amax, in one pass.

    Order: x is widened to float32 (exact); with a scale, y = x * scale is rounded to nearest even
    in float32; y is rounded once to `fmt`. Bit for bit `fp8lab.emulation.casting.quantize`.

    Args:
        x: float32, float16 or bfloat16, any shape, contiguous; may be empty.
        fmt: E4M3 or E5M2.
        scale: Multiplies x. A number, finite and above zero once rounded to float32; or a float32
            tensor of one element on x's device, which is not looked at on the host: whoever makes
            it sees that it is finite and above zero.
        rounding: "nearest_even".
        overflow: "saturate" (every overflow and Inf becomes the largest finite value, NaN the
            positive NaN code), "ieee" (Inf or NaN, as ml_dtypes), or an `OverflowPolicy`.
        amax_out: A float32 tensor of one element on x's device, holding a magnitude (sign bit
            clear). It becomes the larger of itself and the largest magnitude of x, before scaling,
            as bit patterns: a NaN wins over Inf, Inf over what is finite, and nothing is lost. As
            slot 0 of TransformerEngine's amax history.
        settings: How the kernel is launched, and which form of the cast it takes.

    Returns:
        Codes of x's shape, in torch's dtype for the format. -0 stays -0, an underflow keeps its
        sign.

    Raises:
        TypeError: A dtype that is not accepted, or something that is not a tensor or a format.
        ValueError: An unknown rounding or policy, another format, a scale out of range, a tensor on
            another device or not contiguous, or a hardware path that this device or policy lacks.
    """
    check_tensor("x", x, _INPUT_WORDS)
    _check_format(fmt)
    if rounding not in ROUNDINGS:
        raise ValueError(f"unknown rounding {rounding!r}; accepted: {', '.join(ROUNDINGS)}")
    policy = overflow_policy(overflow)
    hardware = _use_hardware(settings.cast_path, policy, x.device)
    factor, scale_kind = _checked_factor("scale", scale, x.device)
    if amax_out is not None:
        check_one_element("amax_out", amax_out, x.device)

    codes = torch.empty_like(x, dtype=getattr(torch, fmt.dtype_name))
    launch(
        quantize_kernel,
        (triton.cdiv(x.numel(), settings.block),),
        x.view(_INPUT_WORDS[x.dtype]),
        codes.view(torch.uint8),
        x.numel(),
        factor,
        None if amax_out is None else amax_out.view(torch.int32),
        INPUT=str(x.dtype).removeprefix("torch."),
        SCALE=scale_kind,
        HARDWARE=hardware,
        **cast_constants(fmt, policy),
        BLOCK=settings.block,
        num_warps=settings.num_warps,
    )
    return codes


def dequantize(
    codes: torch.Tensor,
    *,
    inverse_scale: float | torch.Tensor | None = None,
    settings: ElementwiseSettings = ElementwiseSettings(block=4096),  # noqa: B008 (frozen)
) -> torch.Tensor:
    """Decode FP8 codes to float32, optionally multiplied by an inverse scale.

    Every code is exact in float32. With an inverse scale the product is rounded to nearest even.
    Bit for bit `fp8lab.emulation.casting.dequantize`, but for the payload of NaN.

    Args:
        codes: float8_e4m3fn or float8_e5m2, any shape, contiguous; may be empty.
        inverse_scale: Multiplies the values. Any number, rounded to float32; or a float32 tensor of
            one element on the device of codes.
        settings: How the kernel is launched.

    Returns:
        float32 of the shape of codes. A NaN code gives a NaN, 0x80 gives -0, E5M2's infinities
        stay.

    Raises:
        TypeError: codes are not of one of those dtypes.
        ValueError: codes or inverse_scale on another device, or not contiguous.
    """
    formats = {getattr(torch, fmt.dtype_name): fmt for fmt in FORMATS}
    check_tensor("codes", codes, formats)
    fmt = formats[codes.dtype]
    factor, scale_kind = _checked_factor("inverse_scale", inverse_scale, codes.device)

    values = torch.empty_like(codes, dtype=torch.float32)
    launch(
        dequantize_kernel,
        (triton.cdiv(codes.numel(), settings.block),),
        codes.view(torch.uint8),
        values.view(torch.int32),
        codes.numel(),
        factor,
        SCALE=scale_kind,
        MANTISSA_BITS=fmt.mantissa_bits,
        MIN_EXPONENT=fmt.min_exponent,
        MAX_CODE=fmt.max_code,
        INFINITY_CODE=-1 if fmt.infinity_code is None else fmt.infinity_code,
        BLOCK=settings.block,
        num_warps=settings.num_warps,
    )
    return values


@lru_cache
def cast_constants(fmt: Float8Format, policy: OverflowPolicy) -> dict[str, Any]:
    """The compile-time constants of `quantize_kernel` that follow from a format and a policy."""
    nan_code = fmt.nan_code
    if policy.nan_code == "quiet" and fmt.nan == "ieee":
        nan_code = fmt.max_code + 1 + (1 << (fmt.mantissa_bits - 1))
    infinity_code = nan_code if fmt.infinity_code is None else fmt.infinity_code
    beyond = {"max_finite": fmt.max_code, "infinity_or_nan": infinity_code}
    return {
        "FLOAT8": "fp8e4nv" if fmt == E4M3 else "fp8e5",
        "MANTISSA_BITS": fmt.mantissa_bits,
        "MIN_EXPONENT": fmt.min_exponent,
        "MAX_CODE": fmt.max_code,
        "OVERFLOW_CODE": beyond[policy.finite],
        "INFINITY_CODE": beyond[policy.infinity],
        "NAN_CODE": nan_code,
        "KEEP_NAN_SIGN": policy.nan_sign == "kept",
    }


def _check_format(fmt: Float8Format) -> None:
    accepted = ", ".join(known.name for known in FORMATS)
    if not isinstance(fmt, Float8Format):
        raise TypeError(f"fmt is {fmt!r}; accepted: {accepted} (from fp8lab.formats)")
    if fmt not in FORMATS:
        raise ValueError(f"fmt is {fmt.name}; the kernels accept: {accepted}")


@lru_cache
def _use_hardware(path: CastPath, policy: OverflowPolicy, device: torch.device) -> bool:
    """Whether the conversion instruction casts; a ValueError where it was asked for and cannot."""
    if path == "integer":
        return False
    lacking = None
    if interpreted():
        lacking = "the interpreter does not have the card's conversion"
    elif torch.cuda.get_device_capability(device) < _HARDWARE_CAPABILITY:
        lacking = f"{torch.cuda.get_device_name(device)} is older than sm_90"
    elif not _is_satfinite(policy):
        lacking = f"the instruction saturates as ptx_satfinite, not as {policy.name}"
    if lacking and path == "hardware":
        raise ValueError(f"cast_path is 'hardware', but {lacking}; accepted here: auto, integer")
    return lacking is None


def _is_satfinite(policy: OverflowPolicy) -> bool:
    satfinite = overflow_policy("ptx_satfinite")
    fields = ("finite", "infinity", "nan_code", "nan_sign")
    return all(getattr(policy, field) == getattr(satfinite, field) for field in fields)


def _checked_factor(
    name: str, factor: float | torch.Tensor | None, device: torch.device
) -> tuple[float | torch.Tensor | None, str]:
    """The factor as a kernel takes it, and how: "none", "number" or "tensor"."""
    if factor is None:
        return None, "none"
    if isinstance(factor, torch.Tensor):
        check_one_element(name, factor, device)
        return factor, "tensor"
    if not isinstance(factor, Real):
        raise TypeError(
            f"{name} is a {type(factor).__name__}; accepted: a number or a float32 tensor"
        )
    rounded = to_float32(float(factor))
    if name == "scale" and not 0 < rounded < float("inf"):
        raise ValueError(f"scale is {factor!r}; accepted: finite values above zero (in float32)")
    if interpreted():
        # It would take a float32 subnormal for a float64, and Triton 3.6's loses the sign of -0.
        return torch.tensor(rounded, device=device), "tensor"
    return rounded, "number"
