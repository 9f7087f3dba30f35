"""Delayed scaling on the device, the twins of `fp8lab.emulation.delayed`: no step waits for it.

The state of many tensors is flat: one scale each, and one history whose slot i of all of them lies
together. So slot 0, the amaxes of the present step, is one contiguous vector: what a MAX over ranks
takes in one call; and one launch moves all of them on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from fp8lab.formats import Float8Format
from fp8lab.kernels.checks import as_integer, check_tensor
from fp8lab.kernels.launch import cdiv, launch, next_power_of_2
from fp8lab.kernels.scaling_device import update_delayed_kernel
from fp8lab.kernels.scaling_rules import ScaleRule, scale_rule

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
        slots = as_integer(history)
        if slots is None or slots < 1:
            raise ValueError(f"history is {history}; accepted: an integer, 1 and up")
        ones = torch.ones(shape, dtype=torch.float32, device=device)
        return cls(ones, torch.zeros((slots, *shape), dtype=torch.float32, device=device))

    @property
    def inverse_scale(self) -> torch.Tensor:
        """What dequantises the codes of a cast that uses the present scale."""
        return self.scale.reciprocal()


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
        group_amax: The largest slot 0 of all ranks, float32 of the shape of state.scale. It takes
            the place of slot 0 as it is, also where it is smaller.

    Returns:
        A new state.

    Raises:
        TypeError: Another dtype, or no format.
        ValueError: An unknown algorithm, a margin out of range, or shapes that do not fit.
    """
    after = empty_state(state)
    _update(state, after, fmt, margin, algorithm, power_of_two, group_amax)
    return after


def empty_state(state: DelayedScalingState) -> DelayedScalingState:
    """Room for another state of the same shapes."""
    return DelayedScalingState(
        torch.empty_like(state.scale, memory_format=torch.contiguous_format),
        torch.empty_like(state.amax_history, memory_format=torch.contiguous_format),
    )


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
    check_state(state)
    if group_amax is not None:
        check_amax("group_amax", group_amax, state)
    launch_update(state, after, rule, algorithm, group_amax)


def check_state(state: DelayedScalingState) -> None:
    """Refuse a state that no kernel can advance.

    Raises:
        TypeError: Another dtype. ValueError: Shapes or devices that do not fit, or not contiguous.
    """
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


def check_amax(name: str, amax: torch.Tensor, state: DelayedScalingState) -> None:
    """Refuse amaxes that are not one float32 for each scale, beside it."""
    check_tensor(name, amax, (torch.float32,))
    scale = state.scale
    if amax.shape != scale.shape or amax.device != scale.device:
        raise ValueError(
            f"{name} has shape {tuple(amax.shape)} on {amax.device}; accepted:"
            f" {tuple(scale.shape)} on {scale.device}"
        )


class Cut(NamedTuple):
    """How many tensors a program advances, how many slots it holds at a time, and its warps."""

    tensors: int
    slots: int
    num_warps: int


def cut(state: DelayedScalingState) -> Cut:
    """How a state is cut among programs."""
    tensors = min(_TENSORS, next_power_of_2(max(state.scale.numel(), 1)))
    slots = min(_ELEMENTS // tensors, next_power_of_2(len(state.amax_history)))
    return Cut(tensors, slots, 8 if slots * tensors > 1024 else 4)


def launch_update(
    state: DelayedScalingState,
    after: DelayedScalingState,
    rule: ScaleRule,
    algorithm: str,
    amax: torch.Tensor | None,
    *,
    merged: bool = False,
) -> None:
    """Advance a checked state as `update_delayed`.

    Args:
        after: Where the next state goes: the same tensors, or others.
        amax: What slot 0 becomes first (`merged`: at least becomes); None leaves it.
    """
    n, size = state.scale.numel(), cut(state)
    launch(
        update_delayed_kernel,
        (cdiv(n, size.tensors),),
        state.scale,
        state.amax_history,
        after.scale,
        after.amax_history,
        amax,
        n,
        n,
        n,
        SCALING=rule,
        ALGORITHM=algorithm,
        MERGED=merged,
        LENGTH=len(state.amax_history),
        TENSORS=size.tensors,
        SLOTS=size.slots,
        num_warps=size.num_warps,
    )
