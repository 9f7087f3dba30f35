"""Unscale, finite check, global norm and clip factor on the GPU: one read of all gradients.

The twin of `fp8lab.emulation.gradients`, whose module says how the sum is formed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

import torch
import triton

from fp8lab.kernels import gradients_device as device_code
from fp8lab.kernels.checks import check_one_element, check_tensor
from fp8lab.kernels.launch import interpreted, launch

GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)
_ALIGNMENT = 16


@dataclass(frozen=True)
class GradientSettings:
    """How the kernels are launched. No setting changes a bit of any result.

    Attributes:
        num_warps: Warps of a program that reads a leaf.
        final_block: Leaves that the one last program takes at a time, a power of two.
    """

    num_warps: int = 8
    final_block: int = 1024


@dataclass(frozen=True)
class GradientSummary:
    """What a step needs to know of all gradients together, on their device.

    Attributes:
        norm: float32, one element: see the oracle's `GradientSummary`.
        skip: int32, one element: 0 where every unscaled element is finite, else 1.
        factor: float32, one element: what unscales and clips the raw gradients.
    """

    norm: torch.Tensor
    skip: torch.Tensor
    factor: torch.Tensor


def gradient_norm(
    grads: Sequence[torch.Tensor],
    *,
    inverse_scale: float | torch.Tensor = 1.0,
    max_norm: float | torch.Tensor | None = None,
    settings: GradientSettings = GradientSettings(),
) -> GradientSummary:
    """The norm of all gradients together, whether they are finite, and what to multiply them by.

    Bit for bit `fp8lab.emulation.gradients.gradient_norm`. Nothing waits for the device. For the
    same gradients again and again, in a CUDA graph too, keep a `GradientPlan`.

    Args:
        grads: float32, bfloat16 or float16, in any mix, of one device, contiguous; may be empty.
        inverse_scale: What unscales them: a number, or one float32 on the device (which is not
            looked at on the host).
        max_norm: What the norm is clipped to: a number, one float32 on the device, or None.
        settings: How the kernels are launched.

    Raises:
        TypeError: A gradient is not a dense tensor of one of those dtypes.
        ValueError: No gradients, several devices, a gradient that is not contiguous, or a number
            outside its range.
    """
    return GradientPlan(grads, settings).run(inverse_scale=inverse_scale, max_norm=max_norm)


class GradientPlan:
    """A list of gradients, checked and laid out; they must stay where they are.

    Args:
        grads, settings: As for `gradient_norm`.
    """

    def __init__(
        self,
        grads: Sequence[torch.Tensor],
        settings: GradientSettings = GradientSettings(),
    ) -> None:
        if not grads:
            raise ValueError("no gradients given; accepted: at least one")
        for index, grad in enumerate(grads):
            name = f"gradient {index}"
            check_tensor(name, grad, GRADIENTS)
            if grad.device != grads[0].device:
                raise ValueError(f"{name} is on {grad.device}; gradient 0 is on {grads[0].device}")
        self.settings = settings
        self.device = grads[0].device
        self._parts: list[tuple[torch.dtype, bool, torch.Tensor, torch.Tensor, int, int]] = []
        total = 0
        for dtype in GRADIENTS:
            chosen = [grad for grad in grads if grad.dtype == dtype and grad.numel()]
            if chosen:
                total += self._lay_out(dtype, chosen, total)
        self._leaves = torch.zeros(max(total, 1), dtype=torch.float64, device=self.device)

    def _lay_out(self, dtype: torch.dtype, grads: list[torch.Tensor], offset: int) -> int:
        rows, leaf_tensor, first = [], [], 0
        for index, grad in enumerate(grads):
            leaves = triton.cdiv(grad.numel(), int(device_code.LEAF))
            rows.append([grad.numel(), first, grad.data_ptr()])
            leaf_tensor.append(torch.full((leaves,), index, dtype=torch.int32))
            first += leaves
        table = self._placed(torch.tensor(rows, dtype=torch.int64))
        aligned = all(grad.data_ptr() % _ALIGNMENT == 0 for grad in grads)
        which = self._placed(torch.cat(leaf_tensor))
        self._parts.append((dtype, aligned, table, which, offset, first))
        return first

    def run(
        self,
        *,
        inverse_scale: float | torch.Tensor = 1.0,
        max_norm: float | torch.Tensor | None = None,
    ) -> GradientSummary:
        """Read all gradients once; see `gradient_norm`."""
        unscale = self._number("inverse_scale", inverse_scale, positive=True)
        limit = None if max_norm is None else self._number("max_norm", max_norm, positive=False)
        hardware = not interpreted()
        for dtype, aligned, table, which, offset, count in self._parts:
            launch(
                device_code.leaf_kernel,
                (count,),
                table,
                which,
                self._leaves[offset:],
                unscale,
                INPUT=str(dtype).removeprefix("torch."),
                ALIGNED=aligned,
                HARDWARE=hardware,
                num_warps=self.settings.num_warps,
            )
        summary = GradientSummary(
            torch.empty(1, dtype=torch.float32, device=self.device),
            torch.empty(1, dtype=torch.int32, device=self.device),
            torch.empty(1, dtype=torch.float32, device=self.device),
        )
        launch(
            device_code.norm_kernel,
            (1,),
            self._leaves,
            self._leaves.numel(),
            unscale,
            limit,
            summary.norm,
            summary.skip,
            summary.factor,
            BLOCK=self.settings.final_block,
            num_warps=self.settings.num_warps,
        )
        return summary

    def _number(self, name: str, number: float | torch.Tensor, *, positive: bool) -> torch.Tensor:
        if isinstance(number, torch.Tensor):
            check_one_element(name, number, self.device)
            return number
        if not isinstance(number, Real):
            raise TypeError(f"{name} is {number!r}; accepted: a number or a float32 tensor")
        tensor = torch.tensor([number], dtype=torch.float32)
        value = float(tensor)
        if not (0 < value < float("inf") if positive else 0 <= value < float("inf")):
            accepted = "above 0" if positive else "at least 0"
            raise ValueError(f"{name} is {number}; accepted: finite, {accepted} in float32")
        return self._placed(tensor)

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        """On the device, without waiting for what it is doing."""
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor
