"""Scales in plain torch: from an amax, and the step of delayed scaling."""

from __future__ import annotations

import torch

from fp8lab.testing.mutants.registry import Choices, right

Tensor = torch.Tensor

FLT_MAX = torch.finfo(torch.float32).max

SMALLEST = 2.0**-127


@right("scale_from_amax")
class ScaleFromAmax:
    """kernel(amax) -> scale."""

    def __init__(self, choices: Choices) -> None:
        self.margin = choices.margin
        self.max_finite = choices.fmt.max_finite
        self.power_of_two = choices.power_of_two

    def __call__(self, amax: Tensor, previous: Tensor | float = 1.0) -> Tensor:
        scale = self.bounded(self.quotient(amax))
        if self.power_of_two:
            scale = self.cleared(scale)
        return self.guarded(scale, amax, torch.as_tensor(previous).expand(amax.shape))

    def top(self) -> float:
        return self.max_finite * 2.0**-self.margin

    def quotient(self, amax: Tensor) -> Tensor:
        return torch.full_like(amax, self.top()) / amax

    def bounded(self, scale: Tensor) -> Tensor:
        return scale.clamp(SMALLEST, FLT_MAX)

    def cleared(self, scale: Tensor) -> Tensor:
        """The power of two at or below: the smallest one is a subnormal of one bit."""
        kept = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
        return torch.where(kept == 0, SMALLEST, kept)

    def guarded(self, scale: Tensor, amax: Tensor, previous: Tensor) -> Tensor:
        return torch.where(torch.isfinite(amax) & (amax > 0), scale, previous)


@right("scale_update")
class ScaleUpdate:
    """kernel(scale, amax_history) -> (scale, amax_history)."""

    def __init__(self, choices: Choices) -> None:
        self.rule = ScaleFromAmax(choices)
        self.algorithm = choices.algorithm

    def __call__(self, scale: Tensor, history: Tensor) -> tuple[Tensor, Tensor]:
        idle = self.idle(history)
        new_scale = self.rule(self.chosen(history), scale)
        new_history = self.moved(history)
        return torch.where(idle, scale, new_scale), torch.where(idle, history, new_history)

    def idle(self, history: Tensor) -> Tensor:
        return history[0] == 0

    def chosen(self, history: Tensor) -> Tensor:
        if self.algorithm == "most_recent":
            return history[0].clone()
        return largest(history)

    def moved(self, history: Tensor) -> Tensor:
        after = torch.roll(history, -1, 0)
        after[0] = 0
        return after


def largest(history: Tensor) -> Tensor:
    """The largest magnitude of each column, as integers; 0 of nothing."""
    words = torch.cat([torch.zeros_like(history[:1]), history]).view(torch.int32)
    return words.max(0).values.view(torch.float32)
