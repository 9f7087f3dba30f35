"""A matrix product in plain torch that follows the tensor core.

A step aligns 32 products and the accumulator in fixed point, in float64: the terms are integers
below 2**27 once they are cut, so that their sum is exact.
"""

from __future__ import annotations

import torch

from fp8lab.testing.mutants.registry import Choices, right

Tensor = torch.Tensor

NOTHING = -1000  # an exponent below every other


@right("matmul")
class Matmul:
    """kernel(a, b, inverse_scale_a, inverse_scale_b) -> float32, as FP8 wgmma gives it."""

    step_k, fraction_bits, significand_bits = 32, 13, 14

    def __init__(self, choices: Choices) -> None:
        self.promote = choices.promote_every
        self.formats = choices.formats

    def __call__(self, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
        left, right = self.operands(a, b)
        return self.stored(self.scaled(self.summed(left, right), scale_a, scale_b))

    def operands(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Both decoded to float64, (M, K) and (N, K)."""
        return self.decoded(a), self.decoded(b.T)

    def decoded(self, codes: Tensor) -> Tensor:
        return codes.double()

    def order(self, k: int) -> Tensor:
        return torch.arange(k)

    def summed(self, a: Tensor, b: Tensor) -> Tensor:
        order = self.order(a.shape[1])
        a, b = a[:, order], b[:, order]
        if self.promote is None:
            return self.chain(a, b)
        total = torch.zeros(a.shape[0], b.shape[0])
        for start in range(0, a.shape[1], self.promote):
            part = slice(start, start + self.promote)
            total = self.promoted(total, self.chain(a[:, part], b[:, part]))
        return total

    def promoted(self, total: Tensor, partial: Tensor) -> Tensor:
        return total + partial

    def chain(self, a: Tensor, b: Tensor) -> Tensor:
        c = torch.zeros(a.shape[0], b.shape[0])
        for start in range(0, a.shape[1], self.step_k):
            part = slice(start, start + self.step_k)
            c = self.step(a[:, part], b[:, part], c)
        return c

    def step(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        products = a[:, None, :] * b[None, :, :]
        outcome = products.sum(2) + c
        products = torch.where(torch.isfinite(products), products, 0.0)
        addend = torch.where(torch.isfinite(c), c, 0.0).double()
        exponents = self.exponents(a, b, products)
        emax = torch.maximum(exponents.amax(2), self.own_exponent(addend)).clamp(min=-133)
        quantum = torch.exp2((emax - self.fraction_bits).double())
        total = self.aligned(products / quantum[..., None]).sum(2) * quantum
        total = self.result(self.joined(total, addend, quantum))
        return torch.where(torch.isfinite(outcome), total, outcome.float())

    def exponents(self, a: Tensor, b: Tensor, products: Tensor) -> Tensor:
        """Sums of the operands' exponents, not normalised; nothing for a zero."""
        sums = exponent(a, self.least(0))[:, None, :] + exponent(b, self.least(1))[None, :, :]
        return torch.where(products == 0, NOTHING, sums)

    def least(self, side: int) -> int:
        """The exponent that subnormals share."""
        return self.formats[side].min_exponent

    def own_exponent(self, addend: Tensor) -> Tensor:
        return torch.where(addend == 0, NOTHING, exponent(addend, -126))

    def aligned(self, terms: Tensor) -> Tensor:
        return terms.trunc()

    def joined(self, total: Tensor, addend: Tensor, quantum: Tensor) -> Tensor:
        return total + self.aligned(addend / quantum) * quantum

    def result(self, total: Tensor) -> Tensor:
        """Cut toward zero to 14 bits, no finer than float32's subnormals; +0 for zero."""
        unit = torch.exp2(
            (exponent(total, -149) - self.significand_bits + 1).clamp(min=-149).double()
        )
        return ((total / unit).trunc() * unit + 0.0).float()

    def scaled(self, total: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
        return total * (scale_a * scale_b)

    def stored(self, result: Tensor) -> Tensor:
        return result


def exponent(values: Tensor, least: int) -> Tensor:
    """floor(log2|value|), at least `least`."""
    finite = torch.where(torch.isfinite(values), values, 0.0)
    return (torch.frexp(finite)[1].long() - 1).clamp(min=least)
