"""The norm of all gradients as torch tensors: the oracle for the CPU, the kernel for a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fp8lab.bridge import to_numpy
from fp8lab.emulation.gradients import gradient_norm as oracle
from fp8lab.observe import observed


@dataclass(frozen=True)
class GradientSummary:
    """What a step needs to know of all gradients together, on their device; one element each.

    Attributes:
        norm: float32, of the unscaled gradients, before clipping.
        skip: int32: 0 where every unscaled element is finite, else 1.
        factor: float32: what unscales and clips the raw gradients.
    """

    norm: Tensor
    skip: Tensor
    factor: Tensor


class GradientNorm:
    """The norm of all gradients, step after step; see `fp8lab.emulation.gradients.gradient_norm`.

    On a GPU the table of where the gradients lie is kept as long as they lie there.

    Args:
        max_norm: What the norm is clipped to; None for no clipping.
    """

    def __init__(self, max_norm: float | None = None) -> None:
        self.max_norm = max_norm
        self._plan: Any = None
        self._places: list[tuple[int, int, torch.dtype]] = []
        self._limit: Tensor | None = None

    @observed("norm")
    def __call__(self, grads: Sequence[Tensor], *, inverse_scale: Tensor) -> GradientSummary:
        """Read all gradients once.

        Args:
            grads: float32, bfloat16 or float16, of one device, at least one.
            inverse_scale: One float32 on their device, above zero.

        Raises:
            TypeError: A gradient is sparse, or of another dtype.
            ValueError: There are none.
        """
        if not grads:
            raise ValueError("no gradients given; accepted: at least one")
        for grad in grads:
            if grad.layout != torch.strided:
                raise TypeError(f"a gradient has layout {grad.layout}; accepted: dense gradients")
        dense = [grad.detach().contiguous() for grad in grads]
        if dense[0].is_cuda:
            return self._by_kernel(dense, inverse_scale)
        seen = oracle(
            [to_numpy(grad) for grad in dense],
            inverse_scale=float(inverse_scale),
            max_norm=self.max_norm,
        )
        return GradientSummary(
            torch.from_numpy(np.array([seen.norm])),
            torch.tensor([int(not seen.finite)], dtype=torch.int32),
            torch.from_numpy(np.array([seen.factor])),
        )

    def place(self, grads: Sequence[Tensor]) -> Any:
        """Lay out gradients ahead of the call, for a CUDA graph of it; arguments as for that.

        Returns:
            What the graph will read, which must live as long as it; None on a CPU.
        """
        return self._lay_out([grad.detach() for grad in grads]) if grads[0].is_cuda else None

    def _by_kernel(self, grads: list[Tensor], inverse_scale: Tensor) -> GradientSummary:
        found = self._lay_out(grads).run(inverse_scale=inverse_scale, max_norm=self._limit)
        return GradientSummary(found.norm, found.skip, found.factor)

    def _lay_out(self, grads: list[Tensor]) -> Any:
        from fp8lab.kernels.gradients import GradientPlan

        places = [(grad.data_ptr(), grad.numel(), grad.dtype) for grad in grads]
        if places != self._places:
            self._plan, self._places = GradientPlan(grads), places
        if self.max_norm is not None and self._limit is None:
            self._limit = torch.full((1,), self.max_norm, device=grads[0].device)
        return self._plan


def gradient_norm(
    grads: Sequence[Tensor], *, inverse_scale: Tensor, max_norm: float | None = None
) -> GradientSummary:
    """`GradientNorm` once."""
    return GradientNorm(max_norm)(grads, inverse_scale=inverse_scale)
