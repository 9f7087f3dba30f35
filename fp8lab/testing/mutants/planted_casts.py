"""What can be planted in a cast."""

from __future__ import annotations

import torch

from fp8lab.formats import E4M3, E4M3FNUZ, E5M2
from fp8lab.testing.mutants.casts import EXHAUSTED, Cast, Tensor
from fp8lab.testing.mutants.registry import Choices, mutant


@mutant("cast", "ties-away", fmt=E4M3)
class TiesAway(Cast):
    """A tie goes away from zero, as in the Triton interpreter."""

    def rounds_up(
        self, low: Tensor, rest: Tensor, negative: Tensor, words: Tensor | None
    ) -> Tensor:
        return rest >= 0.5


@mutant("cast", "ties-toward-zero", fmt=E5M2)
class TiesTowardZero(Cast):
    """A tie goes toward zero."""

    def rounds_up(
        self, low: Tensor, rest: Tensor, negative: Tensor, words: Tensor | None
    ) -> Tensor:
        return rest > 0.5


@mutant("cast", "ties-to-odd", fmt=E4M3)
class TiesToOdd(Cast):
    """A tie goes to the odd code: the wrong bit is looked at."""

    def rounds_up(
        self, low: Tensor, rest: Tensor, negative: Tensor, words: Tensor | None
    ) -> Tensor:
        return (rest > 0.5) | ((rest == 0.5) & (low % 2 == 0))


@mutant("cast", "ties-up", fmt=E4M3)
class TiesUp(Cast):
    """floor(x + 0.5): a tie goes up, whatever the sign."""

    def rounds_up(
        self, low: Tensor, rest: Tensor, negative: Tensor, words: Tensor | None
    ) -> Tensor:
        return (rest > 0.5) | ((rest == 0.5) & ~negative)


@mutant("cast", "truncation", fmt=E4M3)
class Truncates(Cast):
    """The bits that do not fit are dropped."""

    def rounds_up(
        self, low: Tensor, rest: Tensor, negative: Tensor, words: Tensor | None
    ) -> Tensor:
        return torch.zeros_like(negative)


@mutant("cast", "rounds-away", fmt=E5M2)
class RoundsAway(Cast):
    """Whatever is between two codes goes to the larger magnitude."""

    def rounds_up(
        self, low: Tensor, rest: Tensor, negative: Tensor, words: Tensor | None
    ) -> Tensor:
        return rest > 0


@mutant("cast", "rounds-down", fmt=E4M3)
class RoundsDown(Cast):
    """floor: whatever is between two codes goes toward minus infinity."""

    def rounds_up(
        self, low: Tensor, rest: Tensor, negative: Tensor, words: Tensor | None
    ) -> Tensor:
        return (rest > 0) & negative


@mutant("cast", "rounds-to-nearest", fmt=E4M3, rounding="toward_zero")
class NearestForTruncation(Cast):
    """To nearest where truncation is asked for."""

    def rounds_up(
        self, low: Tensor, rest: Tensor, negative: Tensor, words: Tensor | None
    ) -> Tensor:
        return (rest > 0.5) | ((rest == 0.5) & (low % 2 == 1))


@mutant("cast", "lost-carry", fmt=E4M3)
class LosesCarry(Cast):
    """A mantissa that rounds up to 2 wraps to 1; the exponent stays (triton 8322)."""

    def assembled(self, binade: Tensor, low: Tensor, up: Tensor) -> Tensor:
        bits = self.fmt.mantissa_bits
        whole = super().assembled(binade, low, up)
        before = super().assembled(binade, low, torch.zeros_like(up))
        return (before >> bits << bits) | (whole & ((1 << bits) - 1))


@mutant("cast", "lost-carry", fmt=E5M2)
class CarryHeldBack(Cast):
    """A mantissa of all ones is never rounded up."""

    def assembled(self, binade: Tensor, low: Tensor, up: Tensor) -> Tensor:
        full = low & ((1 << self.fmt.mantissa_bits) - 1) == (1 << self.fmt.mantissa_bits) - 1
        return super().assembled(binade, low, torch.where(full, torch.zeros_like(up), up))


@mutant("cast", "double-rounding-float16", fmt=E4M3)
class ThroughCutFloat16(Cast):
    """float32 is cut to float16 first, then rounded, as on sm_89 (triton 11753)."""

    def codes(self, y: Tensor, words: Tensor | None = None) -> Tensor:
        half = y.half()
        words16 = half.view(torch.int16)
        too_large = half.float().abs() > y.abs()
        cut = torch.where(too_large, words16 - 1, words16).view(torch.float16)
        return super().codes(torch.where(torch.isfinite(y), cut.float(), y), words)


@mutant("cast", "double-rounding-float16", fmt=E5M2)
class ThroughFloat16(Cast):
    """float32 is rounded to float16 first."""

    def codes(self, y: Tensor, words: Tensor | None = None) -> Tensor:
        return super().codes(y.half().float(), words)


@mutant("cast", "double-rounding-bfloat16", fmt=E4M3)
class ThroughBfloat16(Cast):
    """The scaled value is rounded to bfloat16 first."""

    def codes(self, y: Tensor, words: Tensor | None = None) -> Tensor:
        return super().codes(y.bfloat16().float(), words)


@mutant("cast", "subnormals-flushed", fmt=E4M3)
class FlushesSubnormals(Cast):
    """Codes below the smallest normal one become zero."""

    def small(self, code: Tensor, magnitude: Tensor) -> Tensor:
        return torch.where(code < 1 << self.fmt.mantissa_bits, 0, code)


@mutant("cast", "subnormals-flushed", fmt=E5M2)
class FlushesBelowNormal(Cast):
    """Values below the smallest normal one become zero before they are rounded."""

    def small(self, code: Tensor, magnitude: Tensor) -> Tensor:
        return torch.where(magnitude < self.fmt.min_normal, 0, code)


@mutant("cast", "subnormals-truncated", fmt=E4M3)
class TruncatesSubnormals(Cast):
    """Subnormal codes are not rounded, only cut."""

    def rounds_up(
        self, low: Tensor, rest: Tensor, negative: Tensor, words: Tensor | None
    ) -> Tensor:
        normal = low >= 1 << self.fmt.mantissa_bits
        return super().rounds_up(low, rest, negative, words) & normal


@mutant("cast", "subnormal-inputs-flushed", fmt=E4M3)
class FlushesInputs(Cast):
    """float32 subnormals in the input count as zero (-ftz=true)."""

    def scaled(self, x: Tensor, scale: Tensor) -> Tensor:
        return torch.where(x.abs() < 2.0**-126, x * 0, x) * scale


@mutant("cast", "saturation-missing", fmt=E4M3)
class DoesNotSaturate(Cast):
    """What is beyond 448 becomes NaN, as torch.to does on a GPU."""

    def overflow_code(self) -> int:
        return self.fmt.nan_code

    def infinity_code(self) -> int:
        return self.fmt.nan_code


@mutant("cast", "saturation-missing", fmt=E5M2)
class OverflowsToInfinity(Cast):
    """What is beyond 57344 becomes Inf."""

    def overflow_code(self) -> int:
        return self.beyond()

    def infinity_code(self) -> int:
        return self.beyond()


@mutant("cast", "infinity-kept", fmt=E5M2)
class KeepsInfinity(Cast):
    """Finite values saturate, Inf stays."""

    def infinity_code(self) -> int:
        return self.beyond()


@mutant("cast", "saturation-unasked", fmt=E4M3, overflow="ieee")
class SaturatesUnasked(Cast):
    """Finite values saturate where they should become NaN."""

    def overflow_code(self) -> int:
        return self.fmt.max_code


@mutant("cast", "wrong-overflow-edge", fmt=E4M3, overflow="ieee")
class EdgeAtLargest(Cast):
    """Everything above 448 overflows, also what rounds to it."""

    def overflows(self, code: Tensor, magnitude: Tensor) -> Tensor:
        return magnitude > self.fmt.max_finite


@mutant("cast", "wrong-overflow-edge", fmt=E4M3, overflow="ieee")
class EdgeIncluded(Cast):
    """464 overflows, though as a tie it goes to the even 448."""

    def overflows(self, code: Tensor, magnitude: Tensor) -> Tensor:
        return magnitude >= self.fmt.overflow_edge


@mutant("cast", "wrong-largest-value", fmt=E4M3)
class ClampsTooLow(Cast):
    """Values are clamped to the largest one of the FNUZ form."""

    def codes(self, y: Tensor, words: Tensor | None = None) -> Tensor:
        return super().codes(y.clamp(-240, 240), words)


@mutant("cast", "largest-value-lost", fmt=E4M3)
class LosesLargest(Cast):
    """Exponent all ones is taken for special, as in IEEE formats: 416 is the largest value."""

    def overflows(self, code: Tensor, magnitude: Tensor) -> Tensor:
        return code >= self.fmt.max_code

    def overflow_code(self) -> int:
        return self.fmt.max_code - 1

    def infinity_code(self) -> int:
        return self.fmt.max_code - 1


@mutant("cast", "nan-becomes-number", fmt=E4M3)
class ClampsNan(Cast):
    """A clamp that drops NaN (fmin, fmax) makes 448 of it."""

    def nan_code(self) -> int:
        return self.fmt.max_code


@mutant("cast", "wrong-nan-code", fmt=E5M2)
class QuietNan(Cast):
    """NaN becomes 0x7E, as in ml_dtypes."""

    def nan_code(self) -> int:
        return 0x7E


@mutant("cast", "wrong-nan-sign", fmt=E4M3)
class SignedNan(Cast):
    """NaN keeps its sign, as in torch."""

    def keeps_sign(self, code: Tensor, y: Tensor) -> Tensor:
        return torch.ones_like(y, dtype=torch.bool)


@mutant("cast", "minus-zero-lost", fmt=E4M3)
class LosesMinusZero(Cast):
    """The sign comes from x < 0, so -0 becomes +0."""

    def keeps_sign(self, code: Tensor, y: Tensor) -> Tensor:
        return super().keeps_sign(code, y) & (y != 0)


@mutant("cast", "minus-zero-lost", fmt=E5M2)
class LosesUnderflowSign(Cast):
    """Whatever becomes zero becomes +0."""

    def keeps_sign(self, code: Tensor, y: Tensor) -> Tensor:
        return super().keeps_sign(code, y) & (code != 0)


@mutant("cast", "wrong-bias", fmt=E4M3)
class FnuzBias(Cast):
    """The codes are E4M3FNUZ's: the bias is 8."""

    def __init__(self, choices: Choices) -> None:
        super().__init__(choices)
        self.fmt = E4M3FNUZ


@mutant("cast", "wrong-bias", fmt=E5M2)
class BiasOffByOne(Cast):
    """Every value is cast as if it were twice as large."""

    def scaled(self, x: Tensor, scale: Tensor) -> Tensor:
        return super().scaled(x, scale) * 2


@mutant("cast", "wrong-format", fmt=E4M3)
class OtherFormat(Cast):
    """The codes are E5M2's."""

    def __init__(self, choices: Choices) -> None:
        super().__init__(choices)
        self.fmt = E5M2


@mutant("cast", "sign-lost", fmt=E4M3)
class LosesSign(Cast):
    """The magnitude is cast and the sign forgotten."""

    def scaled(self, x: Tensor, scale: Tensor) -> Tensor:
        return super().scaled(x, scale).abs()


@mutant("cast", "scale-divides", fmt=E4M3)
class DividesByScale(Cast):
    """The scale divides."""

    def scaled(self, x: Tensor, scale: Tensor) -> Tensor:
        return x / scale


@mutant("cast", "scale-inverted-twice", fmt=E4M3)
class DividesByInverse(Cast):
    """The scale is inverted, and the inverse divides."""

    def scaled(self, x: Tensor, scale: Tensor) -> Tensor:
        return x / scale.reciprocal()


@mutant("cast", "scale-in-16-bits", fmt=E5M2)
class ScaleInBfloat16(Cast):
    """The scale is loaded as bfloat16."""

    def scaled(self, x: Tensor, scale: Tensor) -> Tensor:
        return x * scale.bfloat16().float()


@mutant("cast", "input-in-16-bits", fmt=E4M3)
class InputInBfloat16(Cast):
    """The input is rounded to bfloat16 before it is scaled."""

    def scaled(self, x: Tensor, scale: Tensor) -> Tensor:
        return x.bfloat16().float() * scale


@mutant("cast", "product-not-rounded", fmt=E4M3)
class ScalesInFloat64(Cast):
    """The product with the scale stays in float64."""

    def scaled(self, x: Tensor, scale: Tensor) -> Tensor:
        return x.double() * scale.double()


@mutant("cast", "random-comparison-off-by-one", fmt=E4M3, rounding="stochastic")
class DrawsOneTooMany(Cast):
    """A value goes up where r <= floor(fraction * 2**32)."""

    def drawn(self, rest: Tensor, words: Tensor) -> Tensor:
        return words <= (rest * EXHAUSTED).floor().long()


@mutant("cast", "random-bits-complemented", fmt=E4M3, rounding="stochastic")
class AddsRandomBits(Cast):
    """The word is added to the dropped bits, and a carry rounds up."""

    def drawn(self, rest: Tensor, words: Tensor) -> Tensor:
        return words + (rest * EXHAUSTED).floor().long() >= EXHAUSTED


@mutant("cast", "random-bits-cut", fmt=E5M2, rounding="stochastic")
class UsesHalfTheBits(Cast):
    """Only the low 16 bits of a word count."""

    def drawn(self, rest: Tensor, words: Tensor) -> Tensor:
        return words % 65536 < (rest * 65536).floor().long()


@mutant("cast", "random-bits-ignored", fmt=E5M2, rounding="stochastic")
class IgnoresRandomBits(Cast):
    """Stochastic rounding goes to nearest even."""

    def codes(self, y: Tensor, words: Tensor | None = None) -> Tensor:
        return super().codes(y)
