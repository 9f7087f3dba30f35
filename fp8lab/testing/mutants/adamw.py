"""AdamW in plain torch, every operation rounded."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fp8lab.testing.mutants.registry import Choices, right

Tensor = torch.Tensor

Three = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Constants:
    """The float32 constants of a step, 0-d tensors, and the numbers that they come from."""

    decay: Tensor
    beta1: Tensor
    weight1: Tensor
    beta2: Tensor
    weight2: Tensor
    c1: Tensor
    c2: Tensor
    eps: Tensor
    lr: Tensor
    weight_decay: float


def number(value: float) -> Tensor:
    """A Python float rounded once to float32."""
    return torch.tensor(value, dtype=torch.float32)


def power(base: float, exponent: int) -> float:
    """By square and multiply, in float64."""
    result = 1.0
    while exponent > 0:
        result = result * base if exponent % 2 else result
        base, exponent = base * base, exponent // 2
    return result


@right("adamw")
class AdamW:
    """kernel(param, grad, exp_avg, exp_avg_sq, *, step, ...) -> the three new tensors."""

    def __init__(self, choices: Choices) -> None:
        del choices  # the order is "plain"

    def __call__(
        self,
        param: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        *,
        step: int,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> Three:
        k = self.constants(step, lr, betas, eps, weight_decay)
        g = self.gradient(grad, param, k)
        m, v = self.first(exp_avg, g, k), self.second(exp_avg_sq, g, k)
        p = self.updated(param, self.ratio(m, v, k), k)
        return self.stored((p, m, v), (param, exp_avg, exp_avg_sq))

    def constants(
        self, step: int, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> Constants:
        b1, b2 = betas
        return Constants(
            number(lr * weight_decay),
            number(b1),
            self.complement(b1),
            number(b2),
            self.complement(b2),
            self.correction(b1, step),
            self.correction(b2, step),
            number(eps),
            number(lr),
            weight_decay,
        )

    def complement(self, beta: float) -> Tensor:
        return number(1 - beta)

    def correction(self, beta: float, step: int) -> Tensor:
        return number(1 - power(beta, step))

    def gradient(self, g: Tensor, p: Tensor, k: Constants) -> Tensor:
        return g

    def first(self, m: Tensor, g: Tensor, k: Constants) -> Tensor:
        return k.beta1 * m + k.weight1 * g

    def second(self, v: Tensor, g: Tensor, k: Constants) -> Tensor:
        return k.beta2 * v + k.weight2 * (g * g)

    def ratio(self, m: Tensor, v: Tensor, k: Constants) -> Tensor:
        return (m / k.c1) / self.denominator(v, k)

    def denominator(self, v: Tensor, k: Constants) -> Tensor:
        return self.root(v / k.c2) + k.eps

    def root(self, x: Tensor) -> Tensor:
        return torch.sqrt(x.double()).float()  # torch's own may be a vector's approximation

    def updated(self, p: Tensor, ratio: Tensor, k: Constants) -> Tensor:
        return self.decayed(p, k) - k.lr * ratio

    def decayed(self, p: Tensor, k: Constants) -> Tensor:
        return p - k.decay * p

    def stored(self, new: Three, old: Three) -> Three:
        return new


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a*b + c through float64: the product is exact there, and the sum nearly so."""
    return (a.double() * b.double() + c.double()).float()
