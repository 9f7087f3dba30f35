"""From codes back to numbers, the largest magnitude; and what can be planted in them."""

from __future__ import annotations

import torch

from fp8lab.formats import E4M3, E4M3FNUZ, E5M2, Float8Format
from fp8lab.testing.mutants.registry import Choices, mutant, right

Tensor = torch.Tensor


def values_of(codes: Tensor, fmt: Float8Format) -> tuple[Tensor, Tensor]:
    """Magnitudes (float32) of codes read as numbers, and their exponent fields."""
    words = codes.view(torch.uint8).long()
    field = (words >> fmt.mantissa_bits) & ((1 << fmt.exponent_bits) - 1)
    mantissa = words & ((1 << fmt.mantissa_bits) - 1)
    hidden = torch.where(field > 0, 1 << fmt.mantissa_bits, 0)
    exponent = field.clamp(min=1) - fmt.bias - fmt.mantissa_bits
    magnitude = (mantissa + hidden).double() * torch.exp2(exponent.double())
    return magnitude.float(), field


@right("dequantize")
class Dequantize:
    """kernel(codes, inverse_scale) -> float32."""

    def __init__(self, choices: Choices) -> None:
        self.fmt = choices.fmt

    def __call__(self, codes: Tensor, inverse_scale: float) -> Tensor:
        words = codes.view(torch.uint8).long()
        values = self.magnitudes(codes, words & 0x7F)
        values = torch.where(words >= 0x80, -values, values)
        if not self.fmt.has_negative_zero:
            values = torch.where(words == 0x80, torch.nan, values)
        return self.scaled(values, torch.tensor(inverse_scale, dtype=torch.float32))

    def magnitudes(self, codes: Tensor, magnitude: Tensor) -> Tensor:
        values = self.numbers(codes)
        if self.fmt.infinity_code is not None:
            values = torch.where(magnitude == self.fmt.infinity_code, torch.inf, values)
        if self.fmt.has_negative_zero:
            last = self.fmt.infinity_code or self.fmt.max_code
            values = torch.where(magnitude > last, torch.nan, values)
        return values

    def numbers(self, codes: Tensor) -> Tensor:
        return values_of(codes, self.fmt)[0]

    def scaled(self, values: Tensor, inverse: Tensor) -> Tensor:
        return values * inverse


@mutant("dequantize", "special-codes-decoded", fmt=E4M3)
class DecodesNan(Dequantize):
    """0x7F is decoded as 480."""

    def magnitudes(self, codes: Tensor, magnitude: Tensor) -> Tensor:
        return self.numbers(codes)


@mutant("dequantize", "special-codes-decoded", fmt=E5M2)
class DecodesInfinity(Dequantize):
    """Inf is decoded as 65536, and NaN as larger numbers."""

    def magnitudes(self, codes: Tensor, magnitude: Tensor) -> Tensor:
        return self.numbers(codes)


@mutant("dequantize", "subnormals-flushed", fmt=E4M3)
class DecodesSubnormalsAsZero(Dequantize):
    """A code with exponent field 0 is zero."""

    def numbers(self, codes: Tensor) -> Tensor:
        values, field = values_of(codes, self.fmt)
        return torch.where(field == 0, 0.0, values)


@mutant("dequantize", "minus-zero-lost", fmt=E5M2)
class DecodesMinusZero(Dequantize):
    """0x80 is decoded as +0."""

    def scaled(self, values: Tensor, inverse: Tensor) -> Tensor:
        return torch.where(values == 0, 0.0, values) * inverse


@mutant("dequantize", "wrong-bias", fmt=E4M3)
class DecodesFnuz(Dequantize):
    """Codes of E4M3 are decoded as E4M3FNUZ."""

    def __init__(self, choices: Choices) -> None:
        super().__init__(choices)
        self.fmt = E4M3FNUZ


@mutant("dequantize", "scale-divides", fmt=E4M3)
class DividesByInverseScale(Dequantize):
    """The inverse scale divides."""

    def scaled(self, values: Tensor, inverse: Tensor) -> Tensor:
        return values / inverse


@mutant("dequantize", "result-in-16-bits", fmt=E4M3)
class DequantizesInBfloat16(Dequantize):
    """The product is rounded to bfloat16."""

    def scaled(self, values: Tensor, inverse: Tensor) -> Tensor:
        return (values * inverse).bfloat16().float()


@mutant("dequantize", "result-flushed", fmt=E5M2)
class FlushesProducts(Dequantize):
    """Products that are float32 subnormals become zero."""

    def scaled(self, values: Tensor, inverse: Tensor) -> Tensor:
        product = values * inverse
        return torch.where(product.abs() < 2.0**-126, product * 0, product)


@mutant(
    "dequantize",
    "product-not-rounded",
    fmt=E4M3,
    equivalent="A code has at most 4 significant bits and the inverse scale 24, so their product"
    " has at most 28 and is exact in float64, whose exponents reach twice as far as is needed."
    " The conversion to float32 is then the only rounding, as in the float32 product.",
)
class DequantizesInFloat64(Dequantize):
    """The product is formed in float64 and then rounded to float32."""

    def scaled(self, values: Tensor, inverse: Tensor) -> Tensor:
        return (values.double() * inverse.double()).float()


@right("amax")
class Amax:
    """kernel(x) -> 0-d float32: magnitudes compared as integers."""

    def __init__(self, choices: Choices) -> None:
        self.nothing = torch.zeros((), dtype=torch.float32)

    def __call__(self, x: Tensor) -> Tensor:
        flat = self.seen(x.reshape(-1))
        return self.largest(flat) if flat.numel() else self.nothing

    def seen(self, flat: Tensor) -> Tensor:
        return flat

    def largest(self, flat: Tensor) -> Tensor:
        return flat.abs().view(torch.int32).max().view(torch.float32)


@mutant("amax", "nan-lost")
class AmaxDropsNan(Amax):
    """A maximum that drops NaN (fmax)."""

    def seen(self, flat: Tensor) -> Tensor:
        return flat[~torch.isnan(flat)]


@mutant("amax", "infinity-lost")
class AmaxDropsInfinity(Amax):
    """Infinities are masked out."""

    def seen(self, flat: Tensor) -> Tensor:
        return flat[~torch.isinf(flat)]


@mutant("amax", "magnitude-forgotten")
class AmaxOfPositive(Amax):
    """The largest value, not the largest magnitude."""

    def largest(self, flat: Tensor) -> Tensor:
        return flat.max().clamp(min=0)


@mutant("amax", "tail-left-out")
class AmaxWithoutTail(Amax):
    """The elements behind the last whole block of 128 are left out."""

    def seen(self, flat: Tensor) -> Tensor:
        return flat[: flat.numel() // 128 * 128]


@mutant("amax", "amax-in-16-bits")
class AmaxInBfloat16(Amax):
    """Elements are rounded to bfloat16 on the way in."""

    def seen(self, flat: Tensor) -> Tensor:
        return flat.bfloat16().float()


@mutant("amax", "subnormal-inputs-flushed")
class AmaxFlushes(Amax):
    """Subnormals count as zero."""

    def seen(self, flat: Tensor) -> Tensor:
        return torch.where(flat.abs() < 2.0**-126, 0.0, flat)
