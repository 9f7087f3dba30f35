"""What can be planted in scales and their histories."""

from __future__ import annotations

from typing import Any

import torch

from fp8lab.formats import E4M3, E5M2
from fp8lab.testing.mutants.registry import Choices, mutant
from fp8lab.testing.mutants.scales import (
    FLT_MAX,
    SMALLEST,
    ScaleFromAmax,
    ScaleUpdate,
    Tensor,
    largest,
)

_MARGIN: dict[str, Any] = {"fmt": E4M3, "margin": 3}


@mutant("scale_from_amax", "zero-amax-scale", fmt=E4M3)
class ZeroAmaxGivesLargest(ScaleFromAmax):
    """An amax of 0 gives the largest scale there is."""

    def guarded(self, scale: Tensor, amax: Tensor, previous: Tensor) -> Tensor:
        return torch.where(torch.isfinite(amax), scale, previous)


@mutant("scale_from_amax", "infinite-amax", fmt=E4M3)
class InfiniteAmaxDivides(ScaleFromAmax):
    """An amax of Inf is divided by: the scale is the smallest one."""

    def guarded(self, scale: Tensor, amax: Tensor, previous: Tensor) -> Tensor:
        usable = ~torch.isnan(amax) & (amax > 0)
        return torch.where(usable, torch.where(torch.isinf(amax), 0.0, scale), previous)


@mutant("scale_from_amax", "nan-lost", fmt=E5M2)
class NanAmaxLargest(ScaleFromAmax):
    """A NaN amax gives the largest scale: a clamp has dropped it."""

    def guarded(self, scale: Tensor, amax: Tensor, previous: Tensor) -> Tensor:
        return torch.where(torch.isnan(amax), FLT_MAX, super().guarded(scale, amax, previous))


@mutant("scale_from_amax", "scale-unbounded", fmt=E4M3)
class InfiniteScale(ScaleFromAmax):
    """The scale of a tiny amax is Inf (TransformerEngine 786)."""

    def bounded(self, scale: Tensor) -> Tensor:
        return scale.clamp(min=SMALLEST)


@mutant("scale_from_amax", "scale-unbounded", fmt=E4M3, margin=12)
class VanishingScale(ScaleFromAmax):
    """A large margin and a huge amax give a scale whose inverse is Inf."""

    def bounded(self, scale: Tensor) -> Tensor:
        return scale.clamp(max=FLT_MAX)


@mutant("scale_from_amax", "reciprocal-multiplied", fmt=E4M3)
class MultipliesReciprocal(ScaleFromAmax):
    """max_finite times the reciprocal of amax."""

    def quotient(self, amax: Tensor) -> Tensor:
        return amax.reciprocal() * self.top()


@mutant("scale_from_amax", "margin-sign", **_MARGIN)
class MarginGrows(ScaleFromAmax):
    """The margin makes the scale larger."""

    def top(self) -> float:
        return self.max_finite * 2.0**self.margin


@mutant("scale_from_amax", "margin-after-division", **_MARGIN)
class MarginAfterDivision(ScaleFromAmax):
    """The margin comes after the division, which has overflowed by then."""

    def quotient(self, amax: Tensor) -> Tensor:
        return (torch.full_like(amax, self.max_finite) / amax) * 2.0**-self.margin


@mutant("scale_from_amax", "margin-linear", **_MARGIN)
class MarginDivides(ScaleFromAmax):
    """The margin divides as a number."""

    def top(self) -> float:
        return self.max_finite / self.margin


@mutant("scale_from_amax", "exponent-from-logarithm", fmt=E4M3, power_of_two=True)
class ScaleByLogarithm(ScaleFromAmax):
    """2**floor(log2(scale)), whose logarithm rounds up just below powers of two."""

    def cleared(self, scale: Tensor) -> Tensor:
        exponent = torch.floor(torch.log2(scale)).int()
        return ((exponent + 127) << 23).view(torch.float32)


@mutant("scale_from_amax", "power-of-two-up", fmt=E4M3, power_of_two=True)
class ScaleRoundedUp(ScaleFromAmax):
    """The scale is rounded up to a power of two."""

    def cleared(self, scale: Tensor) -> Tensor:
        below = super().cleared(scale)
        return torch.where(below == scale, below, below.clamp(max=2.0**126) * 2)


@mutant("scale_from_amax", "amax-in-16-bits", fmt=E4M3, power_of_two=True)
class ScaleFromBfloat16(ScaleFromAmax):
    """The amax is bfloat16."""

    def quotient(self, amax: Tensor) -> Tensor:
        return super().quotient(amax.bfloat16().float())


@mutant("scale_from_amax", "amax-raised", fmt=E4M3)
class AmaxRaised(ScaleFromAmax):
    """The amax is raised to 1e-12."""

    def quotient(self, amax: Tensor) -> Tensor:
        return super().quotient(amax.clamp(min=1e-12))


@mutant("scale_from_amax", "scale-is-inverse", fmt=E4M3)
class GivesInverse(ScaleFromAmax):
    """amax / max_finite: the inverse scale."""

    def quotient(self, amax: Tensor) -> Tensor:
        return amax / torch.full_like(amax, self.top())

    def bounded(self, scale: Tensor) -> Tensor:
        return scale


@mutant(
    "scale_from_amax",
    "product-not-rounded",
    fmt=E4M3,
    equivalent="The quotient of two float32 that is rounded to float64 and then to float32 is the"
    " quotient rounded once, since 53 >= 2*24 + 2 (Figueroa 1995), where the result is a normal"
    " float32. It is: 448 / amax is at least 448 / FLT_MAX, about 2**-119; and what overflows is"
    " clamped to FLT_MAX either way.",
)
class DividesInFloat64(ScaleFromAmax):
    """The division is done in float64."""

    def quotient(self, amax: Tensor) -> Tensor:
        wide = amax.double()
        return (torch.full_like(wide, self.top()) / wide).float()


@mutant("scale_update", "history-not-rolled", fmt=E4M3)
class HistoryStays(ScaleUpdate):
    """Slot 0 is cleared, and nothing moves."""

    def moved(self, history: Tensor) -> Tensor:
        after = history.clone()
        after[0] = 0
        return after


@mutant("scale_update", "history-rolled-backward", fmt=E4M3)
class HistoryRollsBackward(ScaleUpdate):
    """The history moves in the other direction."""

    def moved(self, history: Tensor) -> Tensor:
        after = torch.roll(history, 1, 0)
        after[0] = 0
        return after


@mutant("scale_update", "slot-not-cleared", fmt=E4M3)
class SlotNotCleared(ScaleUpdate):
    """Slot 0 keeps what rolled into it."""

    def moved(self, history: Tensor) -> Tensor:
        return torch.roll(history, -1, 0)


@mutant("scale_update", "newest-amax-dropped", fmt=E4M3)
class NewestDropped(ScaleUpdate):
    """Slot 0 is cleared before the history moves."""

    def moved(self, history: Tensor) -> Tensor:
        cleared = history.clone()
        cleared[0] = 0
        return torch.roll(cleared, -1, 0)


@mutant("scale_update", "newest-amax-left-out", fmt=E4M3)
class NewestLeftOut(ScaleUpdate):
    """The scale is made from the older slots alone: one step late."""

    def chosen(self, history: Tensor) -> Tensor:
        return largest(history[1:])


@mutant("scale_update", "oldest-amax-left-out", fmt=E4M3)
class OldestLeftOut(ScaleUpdate):
    """The scale is made after the oldest amax has gone."""

    def chosen(self, history: Tensor) -> Tensor:
        return largest(torch.cat([history[:1], history[2:]]))


@mutant("scale_update", "wrong-amax-algorithm", fmt=E4M3)
class MostRecentForMax(ScaleUpdate):
    """The scale is made from the most recent amax alone."""

    def chosen(self, history: Tensor) -> Tensor:
        return history[0].clone()


@mutant("scale_update", "wrong-slot", fmt=E4M3, algorithm="most_recent")
class ReadsLastSlot(ScaleUpdate):
    """The most recent amax is taken from the last slot."""

    def chosen(self, history: Tensor) -> Tensor:
        return history[-1].clone()


@mutant("scale_update", "idle-step-changes-state", fmt=E4M3)
class IdleStepCounts(ScaleUpdate):
    """A step with amax 0 moves the history (TransformerEngine 825)."""

    def idle(self, history: Tensor) -> Tensor:
        return torch.zeros_like(history[0], dtype=torch.bool)


@mutant("scale_update", "nan-lost", fmt=E5M2)
class HistoryDropsNan(ScaleUpdate):
    """A maximum that drops NaN (fmaxf)."""

    def chosen(self, history: Tensor) -> Tensor:
        return largest(torch.where(torch.isnan(history), 0.0, history))


@mutant("scale_update", "scale-unbounded", fmt=E4M3)
class UpdateUnbounded(ScaleUpdate):
    """The scale of a tiny amax is Inf."""

    def __init__(self, choices: Choices) -> None:
        super().__init__(choices)
        self.rule = InfiniteScale(choices)


@mutant("scale_update", "margin-ignored", fmt=E4M3, margin=2)
class UpdateWithoutMargin(ScaleUpdate):
    """The margin is not applied."""

    def __init__(self, choices: Choices) -> None:
        super().__init__(choices)
        self.rule.margin = 0
