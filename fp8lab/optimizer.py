"""The lab's AdamW as a torch optimizer, on float32 master weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from fp8lab import ops


class AdamW(torch.optim.Optimizer):
    """AdamW in the order "plain": the oracle's on a CPU, the kernel's on a GPU.

    The contract is `fp8lab.emulation.adamw.adamw`'s.

    Args:
        params: float32 parameters, or groups of them, as torch takes them.
        lr: Learning rate; a schedule writes `group["lr"]`.
        betas, eps, weight_decay: As in `torch.optim.AdamW`.

    State of a parameter: `step` (Python int), `exp_avg`, `exp_avg_sq` (float32).
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)
        return loss

    def _update(self, param: nn.Parameter, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        state["step"] += 1
        assert param.grad is not None
        ops.adamw_(
            param,
            param.grad.contiguous(),
            state["exp_avg"],
            state["exp_avg_sq"],
            step=state["step"],
            lr=group["lr"],
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
        )
