"""Norm, clip and unscale in plain torch; and what can be planted in them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from fp8lab.testing.mutants.registry import Choices, mutant, right

Tensor = torch.Tensor
LANES, ROWS = 1024, 16


@right("norm")
class Norm:
    """kernel(gradients) -> 0-d float32, by the fixed tree: leaves of 16 rows of 1024 lanes."""

    def __init__(self, choices: Choices) -> None:
        del choices

    def __call__(self, gradients: Sequence[Tensor]) -> Tensor:
        leaves = [self.leaves(self.squared(self.seen(g))) for g in self.listed(gradients)]
        total = order_free_sum(torch.cat([torch.zeros(1, dtype=torch.float64), *leaves]))
        return self.root(total)

    def listed(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        return gradients

    def seen(self, g: Tensor) -> Tensor:
        return g.reshape(-1)

    def squared(self, g: Tensor) -> Tensor:
        wide = g.double()
        return wide * wide

    def leaves(self, squares: Tensor) -> Tensor:
        """The sum of each leaf: rows one after the other, then lanes in any order."""
        size = LANES * ROWS
        padded = torch.nn.functional.pad(squares, (0, -squares.numel() % size))
        rows = padded.view(-1, ROWS, LANES)
        lanes = torch.zeros(rows.shape[0], LANES, dtype=torch.float64)
        for row in range(ROWS):
            lanes = lanes + rows[:, row]
        return torch.stack([order_free_sum(leaf) for leaf in lanes] or [lanes.new_zeros(())])

    def root(self, total: Tensor) -> Tensor:
        return torch.sqrt(total).float()


def order_free_sum(terms: Tensor) -> Tensor:
    """Terms counted in units of 2**-60 of the largest one's binade, as integers."""
    if not bool(torch.isfinite(terms).all()):
        return terms.sum()
    top = float(terms.max())
    if top == 0:
        return terms.new_zeros(())
    unit = math.frexp(top)[1] - 61
    counted = (terms * 2.0**-unit).long()
    high, low = int((counted >> 30).sum()), int((counted & ((1 << 30) - 1)).sum())
    return torch.tensor(math.ldexp(float(high) * 2.0**30 + float(low), unit), dtype=torch.float64)


@mutant("norm", "nan-lost")
class NormSkipsNan(Norm):
    """NaN elements count as zero."""

    def seen(self, g: Tensor) -> Tensor:
        return torch.where(torch.isnan(g), 0.0, g).reshape(-1)


@mutant("norm", "sum-in-float32")
class NormInFloat32(Norm):
    """Squares are float32, and overflow."""

    def squared(self, g: Tensor) -> Tensor:
        return (g * g).double()


@mutant("norm", "sum-in-plain-order")
class NormInPlainOrder(Norm):
    """Squares are added one after the other, in float64."""

    def __call__(self, gradients: Sequence[Tensor]) -> Tensor:
        flat = torch.cat([torch.zeros(1), *(g.reshape(-1) for g in gradients)])
        return self.root(self.squared(flat).cumsum(0)[-1])


@mutant("norm", "sum-in-plain-order")
class NormWithoutLanes(Norm):
    """All squares of a tensor are added at once, without lanes."""

    def leaves(self, squares: Tensor) -> Tensor:
        return order_free_sum(torch.cat([squares, torch.zeros(1).double()])).reshape(1)


@mutant("norm", "norm-of-rounded-norms")
class NormOfNorms(Norm):
    """The norm of float32 norms, one a tensor."""

    def __call__(self, gradients: Sequence[Tensor]) -> Tensor:
        norms = [super(NormOfNorms, self).__call__([g]) for g in gradients]
        return super().__call__([torch.stack(norms)] if norms else [])


@mutant("norm", "root-missing")
class NormSquared(Norm):
    """The sum of squares is given."""

    def root(self, total: Tensor) -> Tensor:
        return total.float()


@mutant("norm", "tail-left-out")
class NormWithoutTail(Norm):
    """The elements behind the last whole 128 of a tensor are left out."""

    def seen(self, g: Tensor) -> Tensor:
        return g.reshape(-1)[: g.numel() // 128 * 128]


@mutant("norm", "last-tensor-left-out")
class NormWithoutLast(Norm):
    """The last tensor of the list is left out."""

    def listed(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        return gradients[:-1]


@right("clip")
class Clip:
    """kernel(gradients, max_norm) -> gradients."""

    def __init__(self, choices: Choices) -> None:
        self.norm = Norm(choices)

    def __call__(self, gradients: Sequence[Tensor], max_norm: float) -> list[Tensor]:
        coefficient = self.coefficient(self.norm(gradients), torch.tensor(max_norm).float())
        return [g * coefficient for g in gradients]

    def coefficient(self, norm: Tensor, limit: Tensor) -> Tensor:
        return self.held(self.raw(norm + self.eps(), limit))

    def eps(self) -> float:
        return 1e-6

    def raw(self, norm: Tensor, limit: Tensor) -> Tensor:
        return norm.reciprocal() * limit

    def held(self, coefficient: Tensor) -> Tensor:
        return coefficient.clamp(max=1)


@mutant("clip", "clip-not-clamped")
class ClipGrows(Clip):
    """Small gradients are scaled up to the limit."""

    def held(self, coefficient: Tensor) -> Tensor:
        return coefficient


@mutant("clip", "eps-missing")
class ClipWithoutEps(Clip):
    """No eps is added to the norm."""

    def eps(self) -> float:
        return 0.0


@mutant("clip", "coefficient-divided")
class ClipDivides(Clip):
    """max_norm / (norm + eps): one division."""

    def raw(self, norm: Tensor, limit: Tensor) -> Tensor:
        return limit / norm


@mutant("clip", "clip-of-nan")
class ClipHidesNan(Clip):
    """A NaN norm leaves the gradients as they are."""

    def held(self, coefficient: Tensor) -> Tensor:
        return torch.where(torch.isnan(coefficient), 1.0, super().held(coefficient))


@mutant("clip", "clip-each-tensor")
class ClipsEachTensor(Clip):
    """Each tensor is clipped by its own norm."""

    def __call__(self, gradients: Sequence[Tensor], max_norm: float) -> list[Tensor]:
        return [super(ClipsEachTensor, self).__call__([g], max_norm)[0] for g in gradients]


@mutant("clip", "clip-by-value")
class ClipsByValue(Clip):
    """Elements are clamped one by one."""

    def __call__(self, gradients: Sequence[Tensor], max_norm: float) -> list[Tensor]:
        return [g.clamp(-max_norm, max_norm) for g in gradients]


@right("unscale")
class Unscale:
    """kernel(gradients, inverse_loss_scale) -> (gradients, found_inf)."""

    def __init__(self, choices: Choices) -> None:
        del choices

    def __call__(
        self, gradients: Sequence[Tensor], inverse_loss_scale: float
    ) -> tuple[list[Tensor], Tensor]:
        inverse = torch.tensor(inverse_loss_scale, dtype=torch.float32)
        unscaled = [self.scaled(g, inverse) for g in gradients]
        return unscaled, self.found(gradients, unscaled)

    def scaled(self, g: Tensor, inverse: Tensor) -> Tensor:
        return g * inverse

    def found(self, gradients: Sequence[Tensor], unscaled: Sequence[Tensor]) -> Tensor:
        return torch.tensor(any(not self.finite(g) for g in unscaled))

    def finite(self, g: Tensor) -> bool:
        return bool(torch.isfinite(g).all())


@mutant("unscale", "nan-lost")
class UnscaleMissesNan(Unscale):
    """Only Inf is looked for."""

    def finite(self, g: Tensor) -> bool:
        return not bool(torch.isinf(g).any())


@mutant("unscale", "infinity-lost")
class UnscaleMissesMinusInf(Unscale):
    """-Inf is not looked for."""

    def finite(self, g: Tensor) -> bool:
        return not bool((torch.isnan(g) | (g == torch.inf)).any())


@mutant("unscale", "check-before-unscaling")
class ChecksBeforeUnscaling(Unscale):
    """The scaled gradients are looked at."""

    def found(self, gradients: Sequence[Tensor], unscaled: Sequence[Tensor]) -> Tensor:
        return super().found(gradients, gradients)


@mutant("unscale", "last-tensor-alone")
class LastFlagWins(Unscale):
    """Each tensor overwrites the flag."""

    def found(self, gradients: Sequence[Tensor], unscaled: Sequence[Tensor]) -> Tensor:
        return super().found(gradients, unscaled[-1:])


@mutant("unscale", "check-by-sum")
class ChecksTheSum(Unscale):
    """The flag comes from the sum, which may overflow."""

    def finite(self, g: Tensor) -> bool:
        return bool(torch.isfinite(g.sum()))


@mutant("unscale", "scale-divides")
class DividesByInverseLossScale(Unscale):
    """The inverse loss scale divides."""

    def scaled(self, g: Tensor, inverse: Tensor) -> Tensor:
        return g / inverse


@mutant("unscale", "scale-twice")
class UnscalesTwice(Unscale):
    """Gradients are divided by the loss scale twice (pytorch 94060)."""

    def scaled(self, g: Tensor, inverse: Tensor) -> Tensor:
        return g * inverse * inverse
