"""What can be planted in AdamW."""

from __future__ import annotations

import math

import torch

from fp8lab.testing.mutants.adamw import AdamW, Constants, Tensor, Three, fma, number, power
from fp8lab.testing.mutants.registry import mutant


@mutant("adamw", "decay-after-update")
class DecaysAfterwards(AdamW):
    """Weight decay comes after the update."""

    def updated(self, p: Tensor, ratio: Tensor, k: Constants) -> Tensor:
        return self.decayed(p - k.lr * ratio, k)


@mutant("adamw", "decay-of-old-parameter")
class DecaysByOldParameter(AdamW):
    """Weight decay of the old parameter is subtracted last."""

    def updated(self, p: Tensor, ratio: Tensor, k: Constants) -> Tensor:
        return (p - k.lr * ratio) - k.decay * p


@mutant("adamw", "decay-multiplied")
class DecayMultiplies(AdamW):
    """p * (1 - lr*wd), as torch."""

    def decayed(self, p: Tensor, k: Constants) -> Tensor:
        return p * number(1 - float(k.lr.double()) * k.weight_decay)

    def constants(
        self, step: int, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> Constants:
        self.keep = number(1 - lr * weight_decay)
        return super().constants(step, lr, betas, eps, weight_decay)


@mutant("adamw", "weight-decay-in-gradient")
class DecaysGradient(AdamW):
    """Adam with L2: weight decay joins the gradient."""

    def gradient(self, g: Tensor, p: Tensor, k: Constants) -> Tensor:
        return g + number(k.weight_decay) * p

    def decayed(self, p: Tensor, k: Constants) -> Tensor:
        return p


@mutant("adamw", "decay-without-lr")
class DecaysWithoutLr(AdamW):
    """Weight decay is not multiplied by the learning rate."""

    def decayed(self, p: Tensor, k: Constants) -> Tensor:
        return p - number(k.weight_decay) * p


@mutant("adamw", "zero-decay-skipped")
class SkipsZeroDecay(AdamW):
    """A decay of 0 is left out, so that Inf stays Inf."""

    def decayed(self, p: Tensor, k: Constants) -> Tensor:
        return p if k.decay == 0 else super().decayed(p, k)


@mutant("adamw", "decay-in-float32")
class DecayInFloat32(AdamW):
    """lr*wd is a product of float32 numbers."""

    def decayed(self, p: Tensor, k: Constants) -> Tensor:
        return p - (k.lr * number(k.weight_decay)) * p


@mutant("adamw", "eps-inside-root")
class EpsInsideRoot(AdamW):
    """eps is added under the root."""

    def denominator(self, v: Tensor, k: Constants) -> Tensor:
        return self.root(v / k.c2 + k.eps)


@mutant("adamw", "eps-missing")
class NoEps(AdamW):
    """eps is left out."""

    def denominator(self, v: Tensor, k: Constants) -> Tensor:
        return self.root(v / k.c2)


@mutant("adamw", "eps-before-correction")
class EpsBeforeCorrection(AdamW):
    """eps is added before the denominator is corrected."""

    def denominator(self, v: Tensor, k: Constants) -> Tensor:
        return (self.root(v) + k.eps) / self.root(k.c2)


@mutant("adamw", "root-corrected-apart")
class CorrectsRoot(AdamW):
    """sqrt(v) / sqrt(c2) + eps, as torch."""

    def denominator(self, v: Tensor, k: Constants) -> Tensor:
        return self.root(v) / self.corrected + k.eps

    def constants(
        self, step: int, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> Constants:
        self.corrected = number(math.sqrt(1 - power(betas[1], step)))
        return super().constants(step, lr, betas, eps, weight_decay)


@mutant("adamw", "root-approximate")
class RootByReciprocal(AdamW):
    """x * rsqrt(x)."""

    def root(self, x: Tensor) -> Tensor:
        root = super().root(x)
        return torch.where(x > 0, x * (1 / root), root)


@mutant("adamw", "division-by-reciprocal")
class MultipliesByReciprocal(AdamW):
    """The division by the denominator is a multiplication by its reciprocal."""

    def ratio(self, m: Tensor, v: Tensor, k: Constants) -> Tensor:
        return (m / k.c1) * self.denominator(v, k).reciprocal()


@mutant("adamw", "step-off-by-one")
class StepOneBehind(AdamW):
    """The bias correction is that of the step before: the counter is raised too late."""

    def correction(self, beta: float, step: int) -> Tensor:
        return super().correction(beta, step - 1)


@mutant("adamw", "step-off-by-one")
class StepOneAhead(AdamW):
    """The bias correction is that of the next step: the counter is raised twice."""

    def correction(self, beta: float, step: int) -> Tensor:
        return super().correction(beta, step + 1)


@mutant("adamw", "bias-correction-missing")
class NoCorrection(AdamW):
    """The moments are used without bias correction."""

    def correction(self, beta: float, step: int) -> Tensor:
        return number(1.0)


@mutant("adamw", "betas-from-float32")
class ComplementInFloat32(AdamW):
    """1 - beta is formed in float32."""

    def complement(self, beta: float) -> Tensor:
        return 1 - number(beta)


@mutant("adamw", "corrections-in-float32")
class CorrectionInFloat32(AdamW):
    """1 - beta**step is formed in float32, from a power rounded to float32."""

    def correction(self, beta: float, step: int) -> Tensor:
        return 1 - number(power(beta, step))


@mutant("adamw", "fused-multiply-add")
class FusesUpdate(AdamW):
    """The last multiplication and subtraction are one operation."""

    def updated(self, p: Tensor, ratio: Tensor, k: Constants) -> Tensor:
        return fma(-k.lr, ratio, self.decayed(p, k))


@mutant("adamw", "fused-multiply-add")
class FusesFirstMoment(AdamW):
    """beta1*m is fused into the sum."""

    def first(self, m: Tensor, g: Tensor, k: Constants) -> Tensor:
        return fma(k.beta1, m, k.weight1 * g)


@mutant("adamw", "fused-multiply-add")
class FusesEverything(AdamW):
    """What a compiler does that may contract: four fused operations."""

    def first(self, m: Tensor, g: Tensor, k: Constants) -> Tensor:
        return fma(k.weight1, g, k.beta1 * m)

    def second(self, v: Tensor, g: Tensor, k: Constants) -> Tensor:
        return fma(k.weight2, g * g, k.beta2 * v)

    def updated(self, p: Tensor, ratio: Tensor, k: Constants) -> Tensor:
        return fma(-k.lr, ratio, fma(-k.decay, p, p))


@mutant("adamw", "first-moment-interpolated")
class Interpolates(AdamW):
    """m + (1-beta1)*(g - m)."""

    def first(self, m: Tensor, g: Tensor, k: Constants) -> Tensor:
        return m + k.weight1 * (g - m)


@mutant("adamw", "square-associated-otherwise")
class WeightsBeforeSquaring(AdamW):
    """((1-beta2)*g)*g."""

    def second(self, v: Tensor, g: Tensor, k: Constants) -> Tensor:
        return k.beta2 * v + (k.weight2 * g) * g


@mutant("adamw", "lr-multiplied-early")
class LrEarly(AdamW):
    """The learning rate is multiplied in before the division."""

    def updated(self, p: Tensor, ratio: Tensor, k: Constants) -> Tensor:
        return self.decayed(p, k) - ratio

    def ratio(self, m: Tensor, v: Tensor, k: Constants) -> Tensor:
        return (k.lr * (m / k.c1)) / self.denominator(v, k)


@mutant("adamw", "betas-swapped")
class BetasSwapped(AdamW):
    """beta1 and beta2 change places."""

    def constants(
        self, step: int, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> Constants:
        return super().constants(step, lr, (betas[1], betas[0]), eps, weight_decay)


@mutant("adamw", "state-in-16-bits")
class FirstMomentInBfloat16(AdamW):
    """The first moment is stored as bfloat16."""

    def stored(self, new: Three, old: Three) -> Three:
        return new[0], new[1].bfloat16().float(), new[2]


@mutant("adamw", "output-not-written")
class SecondMomentNotWritten(AdamW):
    """The second moment is not written back."""

    def stored(self, new: Three, old: Three) -> Three:
        return new[0], new[1], old[2].clone()


@mutant("adamw", "tail-left-out")
class TailNotUpdated(AdamW):
    """The elements behind the last whole vector of 4 stay as they were."""

    def stored(self, new: Three, old: Three) -> Three:
        whole = new[0].numel() // 4 * 4
        p, m, v = (torch.cat([n[:whole], o[whole:]]) for n, o in zip(new, old, strict=True))
        return p, m, v


@mutant("adamw", "update-sign")
class AddsUpdate(AdamW):
    """The update is added."""

    def updated(self, p: Tensor, ratio: Tensor, k: Constants) -> Tensor:
        return self.decayed(p, k) + k.lr * ratio
