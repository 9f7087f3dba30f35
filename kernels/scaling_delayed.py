"""Delayed scaling on the device, the twins of `fp8lab.emulation.delayed`: no step waits for it.

The state of many tensors is flat: one scale each, and one history whose slot i of all of them lies
together. So slot 0, the amaxes of the present step, is one contiguous vector: what a MAX over ranks
takes in one call; and one launch moves all of them on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from fp8lab.formats import Float8Format
from fp8lab.kernels.checks import check_tensor
from fp8lab.kernels.launch import launch
from fp8lab.kernels.scaling_device import update_delayed_kernel
from fp8lab.kernels.scaling_rules import scale_rule

ALGORITHMS = ("max", "most_recent")
# Slots times tensors that a program holds, and tensors: 8 float32 are a sector of memory.
_ELEMENTS = 8192
_TENSORS = 8


@dataclass(frozen=True)
class DelayedScalingState:
    """What delayed scaling must remember, for one tensor or for many at once.

    Attributes:
        scale: float32, shape (...): the scale that the next cast uses.
        amax_history: float32, shape (L, ...), not negative. Slot 0 collects the present step's
            amax; the slots from 1 on hold older ones, the oldest at 1.
    """

    scale: torch.Tensor
    amax_history: torch.Tensor

    @classmethod
    def fresh(
        cls,
        history: int,
        shape: tuple[int, ...] = (),
        *,
        device: torch.device | str | None = None,
    ) -> DelayedScalingState:
        """Scale 1 and a history of zeros, as TransformerEngine starts.

        Args:
            history: L, how many steps the history holds.
            shape: () for one tensor, (n,) for n of them, ...
            device: Where the state lives.
        """
        if not isinstance(history, int) or isinstance(history, bool) or history < 1:
            raise ValueError(f"history is {history}; accepted: 1 and up")
        ones = torch.ones(shape, dtype=torch.float32, device=device)
        return cls(ones, torch.zeros((history, *shape), dtype=torch.float32, device=device))

    @property
    def inverse_scale(self) -> torch.Tensor:
        """What dequantises the codes of a cast that uses the present scale."""
        return 1.0 / self.scale


def record_amax(state: DelayedScalingState, amax: torch.Tensor) -> DelayedScalingState:
    """Merge a cast's amax into slot 0: the larger magnitude bit pattern stays (NaN is never lost).

    `fp8lab.kernels.casting.quantize` does it on its own where slot 0 is its `amax_out`.

    Args:
        state: The state before the cast; it is not changed.
        amax: float32 magnitudes of the shape of state.scale.
    """
    history = state.amax_history.clone()
    words = history[0].view(torch.int32)
    words.copy_(torch.maximum(words, amax.reshape(state.scale.shape).view(torch.int32)))
    return DelayedScalingState(state.scale, history)


def update_delayed(
    state: DelayedScalingState,
    fmt: Float8Format,
    *,
    margin: int = 0,
    algorithm: str = "max",
    power_of_two: bool = False,
    group_amax: torch.Tensor | None = None,
) -> DelayedScalingState:
    """Move on by one step: a new scale from the history, and an empty slot 0.

    Bit for bit `fp8lab.emulation.scaling.update_delayed`. Nothing waits for the device.

    Args:
        state: Of one tensor or of many; it is not changed.
        fmt: The target format.
        margin: Unused headroom in powers of two.
        algorithm: "max" of all slots, or the "most_recent" amax.
        power_of_two: Keep sign and exponent of the scale only.
        group_amax: The largest slot 0 of all ranks, float32 of the shape of state.scale.

    Returns:
        A new state.

    Raises:
        TypeError: Another dtype, or no format.
        ValueError: An unknown algorithm, a margin out of range, or shapes that do not fit.
    """
    after = DelayedScalingState(
        torch.empty_like(state.scale, memory_format=torch.contiguous_format),
        torch.empty_like(state.amax_history, memory_format=torch.contiguous_format),
    )
    _update(state, after, fmt, margin, algorithm, power_of_two, group_amax)
    return after


def update_delayed_(
    state: DelayedScalingState,
    fmt: Float8Format,
    *,
    margin: int = 0,
    algorithm: str = "max",
    power_of_two: bool = False,
    group_amax: torch.Tensor | None = None,
) -> None:
    """`update_delayed` in place: one launch for all tensors of the state."""
    _update(state, state, fmt, margin, algorithm, power_of_two, group_amax)


def _update(
    state: DelayedScalingState,
    after: DelayedScalingState,
    fmt: Float8Format,
    margin: int,
    algorithm: str,
    power_of_two: bool,
    group_amax: torch.Tensor | None,
) -> None:
    rule = scale_rule(fmt, margin=margin, power_of_two=power_of_two)
    if algorithm not in ALGORITHMS:
        raise ValueError(f"unknown algorithm {algorithm!r}; accepted: {', '.join(ALGORITHMS)}")
    scale, history = state.scale, state.amax_history
    check_tensor("scale", scale, (torch.float32,))
    check_tensor("amax_history", history, (torch.float32,))
    if history.dim() != scale.dim() + 1 or history.shape[1:] != scale.shape or not len(history):
        raise ValueError(
            f"amax_history has shape {tuple(history.shape)} and scale {tuple(scale.shape)};"
            " accepted: (L, ...) and (...), L at least 1"
        )
    if history.device != scale.device:
        raise ValueError(f"amax_history is on {history.device}; scale is on {scale.device}")
    if group_amax is not None:
        check_tensor("group_amax", group_amax, (torch.float32,))
        if group_amax.shape != scale.shape or group_amax.device != scale.device:
            raise ValueError(
                f"group_amax has shape {tuple(group_amax.shape)} on {group_amax.device}; accepted:"
                f" {tuple(scale.shape)} on {scale.device}"
            )
    n, length = scale.numel(), len(history)
    tensors = min(_TENSORS, triton.next_power_of_2(max(n, 1)))
    slots = min(_ELEMENTS // tensors, triton.next_power_of_2(length))
    launch(
        update_delayed_kernel,
        (triton.cdiv(n, tensors),),
        scale,
        history,
        after.scale,
        after.amax_history,
        group_amax,
        n,
        n,
        n,
        SCALING=rule,
        ALGORITHM=algorithm,
        LENGTH=length,
        TENSORS=tensors,
        SLOTS=slots,
        num_warps=8 if slots * tensors > 1024 else 4,
    )
