"""The floating-point formats and the rules for what does not fit, as frozen data.

Every other part of the lab reads its numbers from here: the oracle and the kernels share these
declarations and no arithmetic. Derived values (largest finite, smallest normal, ...) are derived,
never typed in.

Sources: the OCP 8-bit Floating Point Specification (OFP8) for E4M3 and E5M2; the OCP Microscaling
Formats (MX) specification for E8M0; Noune et al., "8-bit Numerical Formats for Deep Neural
Networks" (2022), for the FNUZ forms; IEEE 754-2019 for float16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args, get_type_hints

import ml_dtypes
import numpy as np

NanEncoding = Literal["ieee", "all_ones", "negative_zero"]


@dataclass(frozen=True)
class FloatFormat:
    """One floating-point format of at most 16 bits.

    Attributes:
        name: The name used on command lines, in recipes and in reports.
        exponent_bits: Width of the exponent field.
        mantissa_bits: Width of the stored mantissa field (the hidden bit is not counted).
        bias: A normal number with exponent field e is
            2**(e - bias) * (1 + mantissa / 2**mantissa_bits).
        signed: Whether the top bit is a sign. E8M0 has none.
        has_subnormals: Whether exponent field 0 holds zero and the subnormals. E8M0 has neither.
        nan: Where NaN lives. "ieee": exponent all ones, mantissa not zero, as in IEEE 754;
            "all_ones": only the code whose exponent and mantissa are all ones;
            "negative_zero": only the code that would be -0 (so there is no -0).
        has_infinity: Whether exponent all ones with mantissa zero is an infinity.
        dtype_name: The name of the ml_dtypes or NumPy scalar type that stores the codes.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    nan: NanEncoding
    has_infinity: bool
    dtype_name: str
    signed: bool = True
    has_subnormals: bool = True

    @property
    def bits(self) -> int:
        """The width of a code: sign, exponent and mantissa."""
        return int(self.signed) + self.exponent_bits + self.mantissa_bits

    @property
    def sign_bit(self) -> int:
        """The code of a sign alone, 0x80 in the signed 8-bit formats; 0 where there is no sign."""
        return 1 << (self.bits - 1) if self.signed else 0

    @property
    def max_code(self) -> int:
        """The code of the largest finite value (sign bit clear)."""
        top = (1 << (self.exponent_bits + self.mantissa_bits)) - 1
        if self.nan == "ieee":
            return top - (1 << self.mantissa_bits)
        return top - 1 if self.nan == "all_ones" else top

    @property
    def max_finite(self) -> float:
        """The largest finite value: 448 for E4M3, 57344 for E5M2."""
        return self.value_of_magnitude(self.max_code)

    @property
    def overflow_edge(self) -> float:
        """Half a step past the largest finite value: what is above it rounds to no finite code.

        464 for E4M3, 61440 for E5M2. The edge itself is a tie, which goes to the even code: it is
        an overflow exactly where `max_code` is odd.
        """
        return (self.max_finite + self.value_of_magnitude(self.max_code + 1)) / 2

    @property
    def min_exponent(self) -> int:
        """The exponent of the smallest normal value."""
        return (1 if self.has_subnormals else 0) - self.bias

    @property
    def min_normal(self) -> float:
        """The smallest positive normal value."""
        return 2.0**self.min_exponent

    @property
    def min_subnormal(self) -> float:
        """The smallest positive value (the smallest normal one where there are no subnormals)."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits)

    @property
    def nan_code(self) -> int:
        """The canonical NaN: 0x7F in E4M3 and E5M2, 0x80 in the FNUZ forms, 0xFF in E8M0."""
        if self.nan == "negative_zero":
            return self.sign_bit
        return (1 << (self.exponent_bits + self.mantissa_bits)) - 1

    @property
    def infinity_code(self) -> int | None:
        """The code of +Inf, or None where the format has no infinity."""
        return self.max_code + 1 if self.has_infinity else None

    @property
    def has_negative_zero(self) -> bool:
        """Whether 0x80 is -0. In the FNUZ forms it is NaN; E8M0 has no sign."""
        return self.signed and self.nan != "negative_zero"

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The ml_dtypes (NumPy for float16) type that stores the codes."""
        dtype: np.dtype[np.generic] = np.dtype(getattr(ml_dtypes, self.dtype_name, self.dtype_name))
        return dtype

    @property
    def code_dtype(self) -> np.dtype[np.unsignedinteger]:
        """The unsigned integers of the width of a code."""
        return np.dtype(np.uint8 if self.bits <= 8 else np.uint16)

    def value_of_magnitude(self, magnitude: int) -> float:
        """The value of a finite code without its sign bit, exact in a Python float.

        Args:
            magnitude: The exponent and mantissa fields as one integer, 0 to `max_code`; one more
                gives the value that would come next if the format went on.
        """
        field, mantissa = divmod(magnitude, 1 << self.mantissa_bits)
        if field == 0 and self.has_subnormals:
            return float(mantissa * 2.0 ** (self.min_exponent - self.mantissa_bits))
        return float((1 + mantissa / (1 << self.mantissa_bits)) * 2.0 ** (field - self.bias))


@dataclass(frozen=True)
class Float8Format(FloatFormat):
    """One 8-bit floating-point format: a code is a byte."""

    def __post_init__(self) -> None:
        if self.bits != 8:
            raise ValueError(f"{self.name} has {self.bits} bits; a Float8Format has 8")


E4M3 = Float8Format("E4M3", 4, 3, 7, "all_ones", False, "float8_e4m3fn")
E5M2 = Float8Format("E5M2", 5, 2, 15, "ieee", True, "float8_e5m2")
E4M3FNUZ = Float8Format("E4M3FNUZ", 4, 3, 8, "negative_zero", False, "float8_e4m3fnuz")
E5M2FNUZ = Float8Format("E5M2FNUZ", 5, 2, 16, "negative_zero", False, "float8_e5m2fnuz")
E8M0 = Float8Format(
    "E8M0", 8, 0, 127, "all_ones", False, "float8_e8m0fnu", signed=False, has_subnormals=False
)

FORMATS: dict[str, Float8Format] = {f.name: f for f in (E4M3, E5M2, E4M3FNUZ, E5M2FNUZ, E8M0)}

BFLOAT16 = FloatFormat("bfloat16", 8, 7, 127, "ieee", True, "bfloat16")
FLOAT16 = FloatFormat("float16", 5, 10, 15, "ieee", True, "float16")

# What a cast may produce: the FP8 formats, and the two 16-bit ones of mixed precision.
TARGETS: dict[str, FloatFormat] = {**FORMATS, BFLOAT16.name: BFLOAT16, FLOAT16.name: FLOAT16}


def format_named(name: str) -> Float8Format:
    """The FP8 format of that name, or a ValueError that lists the names there are.

    >>> format_named("E5M2").max_finite
    57344.0
    """
    try:
        return FORMATS[name]
    except (KeyError, TypeError):
        accepted = ", ".join(FORMATS)
        raise ValueError(f"unknown format {name!r}; accepted: {accepted}") from None


@dataclass(frozen=True)
class OverflowPolicy:
    """What a cast yields for what has no code of its own. Six separate, named choices.

    Attributes:
        name: What it is called in reports.
        finite: A finite value that rounds past the largest finite one: "max_finite" keeps the sign
            and saturates; "infinity_or_nan" gives Inf where the format has one, else NaN.
        infinity: The same choice for an infinite input.
        nan_code: "canonical" gives the format's `nan_code`; "quiet" gives the code whose mantissa
            has only its top bit set. They differ where exponent all ones holds several NaN: in E5M2
            (0x7F and 0x7E), bfloat16 and float16.
        nan_sign: "positive" drops the sign of a NaN, "kept" keeps it where the format has room.
        zero: Zero of either sign in a format without zero (E8M0): "smallest" gives the smallest
            value, "nan" gives NaN.
        negative: A negative number or -Inf in a format without a sign (E8M0): "magnitude" drops the
            sign, "nan" gives NaN.
    """

    name: str
    finite: Literal["max_finite", "infinity_or_nan"]
    infinity: Literal["max_finite", "infinity_or_nan"]
    nan_code: Literal["canonical", "quiet"]
    nan_sign: Literal["positive", "kept"]
    zero: Literal["smallest", "nan"] = "smallest"
    negative: Literal["magnitude", "nan"] = "magnitude"

    def __post_init__(self) -> None:
        for choice, kind in get_type_hints(type(self)).items():
            accepted = get_args(kind)
            given = getattr(self, choice)
            if accepted and given not in accepted:
                raise ValueError(f"{choice} is {given!r}; accepted: {', '.join(accepted)}")


@dataclass(frozen=True)
class OverflowPreset:
    """The policies under one name: one for most formats, and those of the formats that differ."""

    policy: OverflowPolicy
    exceptions: tuple[tuple[str, OverflowPolicy], ...] = ()

    def for_format(self, fmt: FloatFormat) -> OverflowPolicy:
        """What the preset does in that format."""
        return dict(self.exceptions).get(fmt.name, self.policy)


# PTX `cvt.rn.satfinite`: measured on an H200 for E4M3 and E5M2. For E8M0, what CUDA's own headers
# do on the host for `cvt.rz/rp.satfinite.ue8m0x2` (sm_100).
_PTX_SATFINITE = OverflowPreset(
    OverflowPolicy("ptx_satfinite", "max_finite", "max_finite", "canonical", "positive")
)
_ML_DTYPES = OverflowPreset(
    OverflowPolicy("ml_dtypes", "infinity_or_nan", "infinity_or_nan", "quiet", "kept", "nan", "nan")
)
_TORCH_2_11_CUDA = OverflowPreset(
    OverflowPolicy("torch_2_11_cuda", "infinity_or_nan", "infinity_or_nan", "canonical", "kept")
)
# Between 2.11 and 2.13 torch's cast to E4M3 began to saturate, and no other one did.
_TORCH_2_13_CPU = OverflowPreset(
    OverflowPolicy("torch_2_13_cpu", "infinity_or_nan", "infinity_or_nan", "canonical", "kept"),
    (("E4M3", OverflowPolicy("torch_2_13_cpu", "max_finite", "max_finite", "canonical", "kept")),),
)

OVERFLOW_POLICIES: dict[str, OverflowPreset] = {
    "saturate": _PTX_SATFINITE,
    "ieee": _ML_DTYPES,
    "ptx_satfinite": _PTX_SATFINITE,
    "ml_dtypes": _ML_DTYPES,
    "torch_2_11_cuda": _TORCH_2_11_CUDA,
    "torch_2_13_cpu": _TORCH_2_13_CPU,
}


def overflow_policy(
    overflow: str | OverflowPolicy, fmt: FloatFormat | None = None
) -> OverflowPolicy:
    """The policy of that name in a format (a policy is returned as it is).

    Args:
        overflow: A preset's name, or a policy.
        fmt: The format that is cast to. A preset that is the same in every format needs none.

    Raises:
        ValueError: The name is unknown, or it stands for several policies and `fmt` is not given.

    >>> [overflow_policy("torch_2_13_cpu", fmt).finite for fmt in (E4M3, E5M2)]
    ['max_finite', 'infinity_or_nan']
    """
    if isinstance(overflow, OverflowPolicy):
        return overflow
    try:
        preset = OVERFLOW_POLICIES[overflow]
    except (KeyError, TypeError):
        accepted = ", ".join(OVERFLOW_POLICIES)
        raise ValueError(
            f"unknown overflow policy {overflow!r}; accepted: {accepted}, or an OverflowPolicy"
        ) from None
    if fmt is not None:
        return preset.for_format(fmt)
    if preset.exceptions:
        raise ValueError(f"overflow policy {overflow!r} differs between formats; say which format")
    return preset.policy
