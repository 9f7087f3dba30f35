"""What can be planted in a matrix product."""

from __future__ import annotations

from typing import Any

import torch

from fp8lab.formats import E4M3, E5M2
from fp8lab.testing.mutants.products import NOTHING, Matmul, Tensor, exponent
from fp8lab.testing.mutants.registry import Choices, mutant

_PROMOTED: dict[str, Any] = {"promote_every": 128}


@mutant("matmul", "promotion-missing", **_PROMOTED)
class NoPromotion(Matmul):
    """One chain over all of K where partial sums should be promoted."""

    def __init__(self, choices: Choices) -> None:
        super().__init__(choices)
        self.promote = None


@mutant("matmul", "promotion-interval", **_PROMOTED)
class PromotesHalfAsOften(Matmul):
    """Partial sums are promoted every 256 of k."""

    def __init__(self, choices: Choices) -> None:
        super().__init__(choices)
        self.promote = 256


@mutant("matmul", "promotion-unasked")
class PromotesUnasked(Matmul):
    """acc += dot(a, b): promoted at every tile of 64."""

    def __init__(self, choices: Choices) -> None:
        super().__init__(choices)
        self.promote = 64


@mutant("matmul", "promotion-cut", **_PROMOTED)
class PromotionInTensorCore(Matmul):
    """The total keeps 14 bits, too."""

    def promoted(self, total: Tensor, partial: Tensor) -> Tensor:
        return (super().promoted(total, partial).view(torch.int32) & -1024).view(torch.float32)


@mutant("matmul", "promotion-tail-lost", promote_every=96)
class LastPartialLost(Matmul):
    """The last, shorter stretch of k is never added."""

    def summed(self, a: Tensor, b: Tensor) -> Tensor:
        whole = a.shape[1] // 96 * 96
        return super().summed(a[:, :whole], b[:, :whole])


@mutant("matmul", "accumulator-late")
class AccumulatorLate(Matmul):
    """The accumulator is added in float32 to what the products alone give."""

    def step(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return c + super().step(a, b, torch.zeros_like(c))


@mutant("matmul", "accumulator-not-aligned")
class AccumulatorIgnoredInEmax(Matmul):
    """The accumulator's exponent does not count for emax."""

    def own_exponent(self, addend: Tensor) -> Tensor:
        return torch.full_like(addend, NOTHING, dtype=torch.long)


@mutant("matmul", "k-order")
class BackwardK(Matmul):
    """K is walked from its end."""

    def order(self, k: int) -> Tensor:
        return torch.arange(k).flip(0)


@mutant("matmul", "k-order", **_PROMOTED)
class InterleavedK(Matmul):
    """A step takes every n-th element of K instead of 32 neighbours."""

    def order(self, k: int) -> Tensor:
        places = torch.cat([torch.arange(k), torch.full((-k % 32,), -1)]).view(-1, 32).T
        return places[places >= 0]


@mutant("matmul", "k-tail-left-out")
class TailOfKLeftOut(Matmul):
    """K is rounded down to whole tiles of 32."""

    def order(self, k: int) -> Tensor:
        return torch.arange(k // 32 * 32)


@mutant("matmul", "k-tail-unmasked")
class TailOfKUnmasked(Matmul):
    """The last tile of K reads on into the next row of a, and column of b."""

    def operands(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        left, right = super().operands(a, b)
        return self.read_on(left), self.read_on(right)

    def read_on(self, rows: Tensor) -> Tensor:
        m, k = rows.shape
        more = -k % 32
        behind = torch.cat([rows.reshape(-1), torch.zeros(k + more, dtype=rows.dtype)])
        return behind[torch.arange(m)[:, None] * k + torch.arange(k + more)]


@mutant("matmul", "edge-tile-left-out")
class EdgeTileLeftOut(Matmul):
    """Rows and columns behind the last whole tile of 16 are never stored."""

    def stored(self, result: Tensor) -> Tensor:
        kept = torch.zeros_like(result)
        part = tuple(slice(n // 16 * 16) for n in result.shape)
        kept[part] = result[part]
        return kept


@mutant("matmul", "wide-accumulation")
class AccumulatesInFloat32(Matmul):
    """Products are summed in float32, one after the other."""

    def chain(self, a: Tensor, b: Tensor) -> Tensor:
        total = torch.zeros(a.shape[0], b.shape[0])
        for k in range(a.shape[1]):
            total = total + (a[:, k, None] * b[None, :, k]).float()
        return total


@mutant("matmul", "wide-accumulation", **_PROMOTED)
class AccumulatesInFloat64(Matmul):
    """The exact sum is rounded once."""

    def summed(self, a: Tensor, b: Tensor) -> Tensor:
        return (a[:, None, :] * b[None, :, :]).sum(2).float()


@mutant("matmul", "products-not-cut")
class ProductsNotCut(Matmul):
    """Products keep the bits below 2**(emax - 13)."""

    def aligned(self, terms: Tensor) -> Tensor:
        return terms if terms.ndim == 3 else terms.trunc()


@mutant("matmul", "alignment-bits")
class TwelveFractionBits(Matmul):
    """Terms keep 12 bits below the largest exponent."""

    fraction_bits = 12


@mutant("matmul", "alignment-rounds")
class AlignmentFloors(Matmul):
    """An arithmetic shift cuts negative terms toward minus infinity."""

    def aligned(self, terms: Tensor) -> Tensor:
        return terms.floor()


@mutant("matmul", "step-result-not-cut")
class ResultNotCut(Matmul):
    """A step's result keeps 24 bits."""

    significand_bits = 24


@mutant("matmul", "step-rounded-otherwise")
class ResultRounded(Matmul):
    """A step's result is rounded to nearest even."""

    def result(self, total: Tensor) -> Tensor:
        unit = torch.exp2(
            (exponent(total, -149) - self.significand_bits + 1).clamp(min=-149).double()
        )
        return ((total / unit).round() * unit + 0.0).float()


@mutant("matmul", "step-length")
class HalfStep(Matmul):
    """A step adds 16 products, as on Ada."""

    step_k = 16


@mutant("matmul", "product-normalised")
class NormalisesProducts(Matmul):
    """The exponent of a product is taken after it is normalised."""

    def exponents(self, a: Tensor, b: Tensor, products: Tensor) -> Tensor:
        return torch.where(products == 0, NOTHING, exponent(products, -200))


@mutant("matmul", "subnormals-flushed")
class FlushesOperands(Matmul):
    """Subnormal operands count as zero."""

    def decoded(self, codes: Tensor) -> Tensor:
        values = super().decoded(codes)
        return torch.where(values.abs() < E4M3.min_normal, 0.0, values)


@mutant("matmul", "nan-lost")
class OperandNanIsZero(Matmul):
    """A NaN operand counts as zero."""

    def decoded(self, codes: Tensor) -> Tensor:
        values = super().decoded(codes)
        return torch.where(torch.isnan(values), 0.0, values)


@mutant("matmul", "infinity-lost", formats=(E5M2, E4M3))
class OperandInfinityIsZero(Matmul):
    """An infinite operand counts as zero."""

    def decoded(self, codes: Tensor) -> Tensor:
        values = super().decoded(codes)
        return torch.where(torch.isinf(values), 0.0, values)


@mutant("matmul", "wrong-format", formats=(E5M2, E4M3))
class FormatOfBForBoth(Matmul):
    """The codes of a are read in the format of b."""

    def operands(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return super().operands(a.view(torch.uint8).view(b.dtype), b)

    def least(self, side: int) -> int:
        return self.formats[1].min_exponent


@mutant("matmul", "operand-transposed")
class ReadsBByRows(Matmul):
    """The memory of b is read row after row."""

    def operands(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        left, right = super().operands(a, b)
        return left, right.reshape(b.shape).T


@mutant("matmul", "scales-one-by-one")
class ScalesOneByOne(Matmul):
    """The result is multiplied by one scale, then by the other."""

    def scaled(self, total: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
        return (total * scale_a) * scale_b


@mutant("matmul", "scale-after-narrowing")
class ScalesAfterBfloat16(Matmul):
    """The sum is rounded to bfloat16 before it is scaled."""

    def scaled(self, total: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
        return super().scaled(total.bfloat16().float(), scale_a, scale_b)


@mutant("matmul", "scale-ignored")
class IgnoresScaleOfB(Matmul):
    """Only the scale of a is applied."""

    def scaled(self, total: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
        return total * scale_a


@mutant("matmul", "zero-sign")
class NegativeZeroSums(Matmul):
    """A sum that is zero is -0."""

    def scaled(self, total: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
        return torch.where(total == 0, -0.0, super().scaled(total, scale_a, scale_b))
