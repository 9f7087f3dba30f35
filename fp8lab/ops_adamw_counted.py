"""Learning rates, other numbers and step counts that live on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fp8lab.ops_adamw import StepNumbers


class CountedNumbers:
    """The numbers and steps of a list of parameters on their device.

    Args:
        params: The parameters.
        steps: How many steps each has taken.

    Attributes:
        params: As given.
        numbers: float64, one row a parameter: lr, beta1, beta2, eps, weight_decay.
        counts: int64, one a parameter.
    """

    def __init__(self, params: list[nn.Parameter], steps: list[int]) -> None:
        self.params = params
        device = params[0].device
        self.numbers = torch.zeros((len(params), 5), dtype=torch.float64, device=device)
        self.counts = torch.tensor(steps, dtype=torch.int64, device=device)
        self._last: list[list[float]] = []

    def set(self, rows: list[list[float]]) -> None:
        """Copy the numbers to the device where they changed.

        Raises:
            RuntimeError: They changed while a CUDA graph is captured.
        """
        if rows == self._last:
            return
        if self.numbers.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "learning rates or other numbers changed since the last step; call update_numbers()"
                " before the capture"
            )
        staged = torch.tensor(rows, dtype=torch.float64)
        # From pinned memory: a schedule changes them every step, and the host must not wait.
        staged = staged.pin_memory() if self.numbers.is_cuda else staged
        self.numbers.copy_(staged, non_blocking=True)
        self._last = rows


def numbers_row(own: StepNumbers | dict[str, Any]) -> list[float]:
    """lr, beta1, beta2, eps, weight_decay, of a step's numbers or a group."""
    numbers = vars(own) if isinstance(own, StepNumbers) else own
    return [numbers["lr"], *numbers["betas"], numbers["eps"], numbers["weight_decay"]]
