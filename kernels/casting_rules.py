"""What a cast kernel is compiled for, as frozen data: a format, a policy, a rounding, a path."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from fp8lab.formats import (
    E4M3,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    Float8Format,
    OverflowPolicy,
    overflow_policy,
)
from fp8lab.kernels.checks import as_integer
from fp8lab.kernels.launch import CastPath, interpreted

FORMATS = (E4M3, E5M2, E4M3FNUZ, E5M2FNUZ)
ROUNDINGS = ("nearest_even", "toward_zero", "stochastic")
FORMAT_OF = {getattr(torch, fmt.dtype_name): fmt for fmt in FORMATS}
# The formats that sm_90 converts to and from, under Triton's names.
_HARDWARE_TYPES = {E4M3.name: "fp8e4nv", E5M2.name: "fp8e5"}
_HARDWARE_CAPABILITY = (9, 0)


@dataclass(frozen=True, eq=False)
class CastRule:
    """Compile-time constants of every kernel that casts.

    There is one object for each combination, so that comparing and hashing them, which each launch
    does, costs nothing; what Triton keeps on disk goes by their text.

    Attributes:
        hardware: Whether the conversion instruction casts; otherwise integer operations do.
        float8: Triton's name of the format, "" where it has none that is of use.
        mantissa_bits, min_exponent, max_code, negative_zero: The format's.
        overflow_code, infinity_code, nan_code: The magnitudes of what has no code of its own.
        keep_nan_sign: Whether a NaN keeps its sign.
        rounding: One of `ROUNDINGS`.
        bit_count: For "stochastic": how many of the low random bits count.
    """

    hardware: bool
    float8: str
    mantissa_bits: int
    min_exponent: int
    max_code: int
    overflow_code: int
    infinity_code: int
    nan_code: int
    keep_nan_sign: bool
    negative_zero: bool
    rounding: str
    bit_count: int


@dataclass(frozen=True, eq=False)
class DecodeRule:
    """Compile-time constants of every kernel that decodes.

    Attributes:
        hardware: Whether the conversion instruction decodes.
        float8, mantissa_bits, min_exponent, max_code, negative_zero: As in `CastRule`.
        infinity_code: The code of Inf, -1 where there is none.
    """

    hardware: bool
    float8: str
    mantissa_bits: int
    min_exponent: int
    max_code: int
    infinity_code: int
    negative_zero: bool


def cast_rule(
    fmt: Float8Format,
    device: torch.device,
    *,
    rounding: str = "nearest_even",
    overflow: str | OverflowPolicy = "saturate",
    path: CastPath = "auto",
    bit_count: int = 32,
) -> CastRule:
    """The constants of a cast on a device.

    Raises:
        TypeError: fmt is no format, or bit_count no integer.
        ValueError: A format, rounding, policy or bit_count that is not accepted; or the hardware
            path where the device, format, rounding or policy has none.
    """
    try:
        return _cast_rule(fmt, device, rounding, overflow, path, bit_count)
    except TypeError:  # something that does not even hash; or that is of the wrong type
        check_format(fmt)
        raise


@cache
def _cast_rule(
    fmt: Float8Format,
    device: torch.device,
    rounding: str,
    overflow: str | OverflowPolicy,
    path: CastPath,
    bit_count: int,
) -> CastRule:
    check_format(fmt)
    if rounding not in ROUNDINGS:
        raise ValueError(f"unknown rounding {rounding!r}; accepted: {', '.join(ROUNDINGS)}")
    count = as_integer(bit_count)
    if count is None or not 1 <= count <= 32:
        raise ValueError(f"bit_count is {bit_count!r}; accepted: an integer, 1 to 32")
    policy = overflow_policy(overflow, fmt)
    nan_code = fmt.nan_code
    if policy.nan_code == "quiet" and fmt.nan == "ieee":
        nan_code = fmt.max_code + 1 + (1 << (fmt.mantissa_bits - 1))
    infinity_code = nan_code if fmt.infinity_code is None else fmt.infinity_code
    beyond = {"max_finite": fmt.max_code, "infinity_or_nan": infinity_code}
    return CastRule(
        hardware=_uses_hardware(path, fmt, rounding, policy, device),
        float8=_HARDWARE_TYPES.get(fmt.name, ""),
        mantissa_bits=fmt.mantissa_bits,
        min_exponent=fmt.min_exponent,
        max_code=fmt.max_code,
        # Toward zero, what is finite does not overflow.
        overflow_code=fmt.max_code if rounding == "toward_zero" else beyond[policy.finite],
        infinity_code=beyond[policy.infinity],
        nan_code=nan_code,
        keep_nan_sign=policy.nan_sign == "kept",
        negative_zero=fmt.has_negative_zero,
        rounding=rounding,
        bit_count=count,
    )


@cache
def decode_rule(fmt: Float8Format, device: torch.device, path: CastPath = "auto") -> DecodeRule:
    """The constants of decoding a format on a device.

    Raises:
        ValueError: The hardware path where the device or format has none.
    """
    lacking = _lacking(fmt, device)
    if lacking and path == "hardware":
        raise ValueError(f"cast_path is 'hardware', but {lacking}; accepted here: auto, integer")
    return DecodeRule(
        hardware=lacking is None and path != "integer",
        float8=_HARDWARE_TYPES.get(fmt.name, ""),
        mantissa_bits=fmt.mantissa_bits,
        min_exponent=fmt.min_exponent,
        max_code=fmt.max_code,
        infinity_code=-1 if fmt.infinity_code is None else fmt.infinity_code,
        negative_zero=fmt.has_negative_zero,
    )


def check_format(fmt: Float8Format) -> None:
    """Refuse what is not a format of values.

    Raises:
        TypeError: Not a `Float8Format`. ValueError: One that the kernels do not cast to.
    """
    if any(fmt is known for known in FORMATS):
        return
    accepted = ", ".join(known.name for known in FORMATS)
    if not isinstance(fmt, Float8Format):
        raise TypeError(f"fmt is {fmt!r}; accepted: {accepted} (from fp8lab.formats)")
    if fmt not in FORMATS:
        raise ValueError(f"fmt is {fmt.name}; the kernels accept: {accepted}")


def _uses_hardware(
    path: CastPath,
    fmt: Float8Format,
    rounding: str,
    policy: OverflowPolicy,
    device: torch.device,
) -> bool:
    """Whether the conversion instruction casts; a ValueError where it was asked for and cannot."""
    if path == "integer":
        return False
    lacking = _lacking(fmt, device)
    if lacking is None and rounding != "nearest_even":
        lacking = f"the instruction rounds to nearest even, not {rounding}"
    if lacking is None and not _is_satfinite(policy):
        lacking = f"the instruction saturates as ptx_satfinite, not as {policy.name}"
    if lacking and path == "hardware":
        raise ValueError(f"cast_path is 'hardware', but {lacking}; accepted here: auto, integer")
    return lacking is None


def _lacking(fmt: Float8Format, device: torch.device) -> str | None:
    """Why a device has no instruction for a format, or None."""
    if interpreted():
        return "the interpreter does not have the card's conversion"
    if torch.cuda.get_device_capability(device) < _HARDWARE_CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} is older than sm_90"
    if fmt.name not in _HARDWARE_TYPES:
        return f"sm_90 has no conversion to {fmt.name}"
    return None


def _is_satfinite(policy: OverflowPolicy) -> bool:
    satfinite = overflow_policy("ptx_satfinite")
    fields = ("finite", "infinity", "nan_code", "nan_sign")
    return all(getattr(policy, field) == getattr(satfinite, field) for field in fields)
