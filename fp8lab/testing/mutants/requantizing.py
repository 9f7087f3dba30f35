"""From one FP8 format to another in plain torch, and what can be planted in it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fp8lab.formats import E4M3, E5M2
from fp8lab.testing.mutants.casts import Cast
from fp8lab.testing.mutants.decoding import Dequantize
from fp8lab.testing.mutants.planted_casts import DoesNotSaturate, TiesAway
from fp8lab.testing.mutants.registry import Choices, mutant, right

Tensor = torch.Tensor
_NARROWER: dict[str, Any] = {"source": E5M2, "target": E4M3}


@right("requantize")
class Requantize:
    """kernel(codes, inverse_scale, scale) -> codes of the target."""

    def __init__(self, choices: Choices) -> None:
        self.decode = Dequantize(replace(choices, fmt=choices.source))
        self.cast = Cast(replace(choices, fmt=choices.target))

    def __call__(self, codes: Tensor, inverse_scale: float, scale: float) -> Tensor:
        values = self.decode(codes, 1.0)
        inverse, factor = (torch.tensor(s, dtype=torch.float32) for s in (inverse_scale, scale))
        return self.cast.codes(self.scaled(values, inverse, factor))

    def scaled(self, values: Tensor, inverse: Tensor, factor: Tensor) -> Tensor:
        """Exact in float64: 4 bits times 24 bits times 24 bits."""
        return values.double() * inverse.double() * factor.double()


@mutant("requantize", "scales-combined", **_NARROWER)
class CombinesScales(Requantize):
    """The two scales are multiplied in float32 first."""

    def scaled(self, values: Tensor, inverse: Tensor, factor: Tensor) -> Tensor:
        return values.double() * (inverse * factor).double()


@mutant("requantize", "double-rounding-float32", **_NARROWER)
class RequantizesInFloat32(Requantize):
    """Both products are rounded to float32."""

    def scaled(self, values: Tensor, inverse: Tensor, factor: Tensor) -> Tensor:
        return (values * inverse) * factor


@mutant("requantize", "input-in-16-bits", **_NARROWER)
class RequantizesThroughBfloat16(Requantize):
    """The decoded values are stored as bfloat16 in between."""

    def scaled(self, values: Tensor, inverse: Tensor, factor: Tensor) -> Tensor:
        return (values * inverse).bfloat16().double() * factor.double()


@mutant("requantize", "scale-ignored", **_NARROWER)
class IgnoresInverseScale(Requantize):
    """The codes keep their old scale."""

    def scaled(self, values: Tensor, inverse: Tensor, factor: Tensor) -> Tensor:
        return values.double() * factor.double()


@mutant("requantize", "ties-away", **_NARROWER)
class RequantizesTiesAway(Requantize):
    """A tie goes away from zero."""

    def __init__(self, choices: Choices) -> None:
        super().__init__(choices)
        self.cast = TiesAway(replace(choices, fmt=choices.target))


@mutant("requantize", "saturation-missing", **_NARROWER)
class RequantizesToNan(Requantize):
    """What is beyond 448 becomes NaN."""

    def __init__(self, choices: Choices) -> None:
        super().__init__(choices)
        self.cast = DoesNotSaturate(replace(choices, fmt=choices.target))
