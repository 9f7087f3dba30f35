"""A cast to FP8 in plain torch.

It counts quanta in float64: a magnitude over the quantum of its binade is exact there, its floor is
the significand, and the rest decides the rounding. The oracle works on bits and tables.
"""

from __future__ import annotations

import torch

from fp8lab.testing.mutants.registry import Choices, right

Tensor = torch.Tensor

EXHAUSTED = 1 << 32  # random words are below it


@right("cast")
class Cast:
    """kernel(x, scale) or kernel(x, scale, random_bits) -> codes as bytes."""

    def __init__(self, choices: Choices) -> None:
        self.fmt = choices.fmt
        self.rounding = choices.rounding
        self.saturates = choices.overflow == "saturate"

    def __call__(self, x: Tensor, scale: float, words: Tensor | None = None) -> Tensor:
        return self.codes(self.scaled(x, torch.tensor(scale, dtype=torch.float32)), words)

    def scaled(self, x: Tensor, scale: Tensor) -> Tensor:
        return x * scale

    def codes(self, y: Tensor, words: Tensor | None = None) -> Tensor:
        """Scaled values to codes."""
        finite = torch.isfinite(y)
        magnitude = torch.where(finite, y.abs(), torch.zeros_like(y)).double()
        exponent = self.exponent(magnitude)
        steps = magnitude / torch.exp2((exponent - self.fmt.mantissa_bits).double())
        low = steps.floor()
        up = self.rounds_up(low.long(), steps - low, torch.signbit(y), words)
        code = self.assembled(exponent - self.fmt.min_exponent, low.long(), up.long())
        code = self.small(code, magnitude)
        code = torch.where(self.overflows(code, magnitude), self.overflow_code(), code)
        code = torch.where(torch.isinf(y), self.infinity_code(), code)
        code = torch.where(torch.isnan(y), self.nan_code(), code)
        return self.signed(code, y).to(torch.uint8)

    def exponent(self, magnitude: Tensor) -> Tensor:
        """The exponent of a value's binade; subnormals share the smallest."""
        exponent = torch.where(magnitude > 0, torch.frexp(magnitude)[1].long() - 1, -200)
        return exponent.clamp(min=self.fmt.min_exponent)

    def rounds_up(
        self, low: Tensor, rest: Tensor, negative: Tensor, words: Tensor | None
    ) -> Tensor:
        """Whether a value goes to the larger magnitude; `rest` is in [0, 1)."""
        if self.rounding == "toward_zero":
            return torch.zeros_like(negative)
        if words is not None:
            return self.drawn(rest, words)
        return (rest > 0.5) | ((rest == 0.5) & (low % 2 == 1))

    def drawn(self, rest: Tensor, words: Tensor) -> Tensor:
        return words < (rest * EXHAUSTED).floor().long()

    def assembled(self, binade: Tensor, low: Tensor, up: Tensor) -> Tensor:
        """Exponent field and mantissa as one integer, so that a carry moves on by itself."""
        return (binade << self.fmt.mantissa_bits) + low + up

    def small(self, code: Tensor, magnitude: Tensor) -> Tensor:
        return code

    def overflows(self, code: Tensor, magnitude: Tensor) -> Tensor:
        return code > self.fmt.max_code

    def overflow_code(self) -> int:
        if self.saturates or self.rounding == "toward_zero":
            return self.fmt.max_code
        return self.beyond()

    def infinity_code(self) -> int:
        return self.fmt.max_code if self.saturates else self.beyond()

    def beyond(self) -> int:
        infinity = self.fmt.infinity_code
        return self.nan_code() if infinity is None else infinity

    def nan_code(self) -> int:
        # Under the IEEE rule E5M2 has the quiet NaN, as ml_dtypes.
        return 0x7E if self.fmt.has_infinity and not self.saturates else self.fmt.nan_code

    def signed(self, code: Tensor, y: Tensor) -> Tensor:
        """The sign on top; NaN has none where the cast saturates."""
        sign = torch.signbit(y).long() << 7
        if not self.fmt.has_negative_zero:
            return torch.where((code == 0) | (code == self.fmt.nan_code), code, code | sign)
        return torch.where(self.keeps_sign(code, y), code | sign, code)

    def keeps_sign(self, code: Tensor, y: Tensor) -> Tensor:
        return ~(torch.isnan(y) & self.saturates)
