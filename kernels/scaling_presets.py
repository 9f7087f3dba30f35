"""Delayed scaling as other stacks advance it: the twin of `fp8lab.emulation.delayed_presets`.

One launch moves all tensors of a flat state on, by any of the rules; nothing waits for the device.
"""

from __future__ import annotations

import torch

from fp8lab.delayed_presets import DELAYED_PRESETS
from fp8lab.formats import Float8Format
from fp8lab.kernels.casting_rules import check_format
from fp8lab.kernels.checks import as_integer
from fp8lab.kernels.launch import cdiv, launch
from fp8lab.kernels.scaling_delayed import (
    DelayedScalingState,
    check_amax,
    check_state,
    cut,
    empty_state,
    launch_update,
)
from fp8lab.kernels.scaling_presets_device import step_ms_amp_kernel, step_torchao_kernel
from fp8lab.kernels.scaling_rules import scale_rule


def step_delayed(
    state: DelayedScalingState,
    amax: torch.Tensor,
    fmt: Float8Format,
    *,
    preset: str = "transformer_engine",
    margin: int = 0,
    warm_up: bool = False,
) -> tuple[torch.Tensor, DelayedScalingState]:
    """One whole step of a stack: the scale that this step's cast uses, and the state after it.

    Bit for bit `fp8lab.emulation.delayed_presets.step_delayed`, which says how each stack goes. The
    sign of an amax is not looked at.

    Args:
        state: Of one tensor or of many; it is not changed.
        amax: Of this step's cast, float32 of the shape of state.scale.
        fmt: The target format.
        preset: A name of `DELAYED_PRESETS`.
        margin: Powers of two of headroom (not for "torchao", which has none).
        warm_up: Whether this is the first use (torchao) or the warm-up (MS-AMP).

    Returns:
        (float32 scales of this step's cast, the state after the step).

    Raises:
        TypeError: Another dtype, or no format.
        ValueError: An unknown preset, a margin or warm_up that the stack does not have, a margin
            out of range, or shapes or devices that do not fit.
    """
    after = empty_state(state)
    return _step(state, after, amax, fmt, preset, margin, warm_up), after


def step_delayed_(
    state: DelayedScalingState,
    amax: torch.Tensor,
    fmt: Float8Format,
    *,
    preset: str = "transformer_engine",
    margin: int = 0,
    warm_up: bool = False,
) -> torch.Tensor:
    """`step_delayed` in place; returns the scales of this step's cast, a tensor of their own."""
    return _step(state, state, amax, fmt, preset, margin, warm_up)


def _step(
    state: DelayedScalingState,
    after: DelayedScalingState,
    amax: torch.Tensor,
    fmt: Float8Format,
    preset: str,
    margin: int,
    warm_up: bool,
) -> torch.Tensor:
    chosen = DELAYED_PRESETS.get(preset) if isinstance(preset, str) else None
    if chosen is None:
        accepted = ", ".join(DELAYED_PRESETS)
        raise ValueError(f"unknown preset {preset!r}; accepted: {accepted}")
    check_state(state)
    check_amax("amax", amax, state)
    if chosen.rule == "transformer_engine":
        if warm_up:
            raise ValueError(f"preset {preset!r} has no warm-up; accepted: warm_up=False")
        rule = scale_rule(fmt, margin=margin)
        used = state.scale.clone() if after is state else state.scale
        launch_update(state, after, rule, chosen.algorithm, amax, merged=True)
        return used
    check_format(fmt)
    powers = as_integer(margin)
    if powers is None or powers < 0:
        raise ValueError(f"margin is {margin!r}; accepted: an integer, 0 or more (powers of two)")
    if powers and chosen.rule == "torchao":
        raise ValueError(f"margin is {margin} with preset 'torchao'; accepted: 0")
    used = torch.empty_like(state.scale)
    size, n = cut(state), state.scale.numel()
    launch(
        step_torchao_kernel if chosen.rule == "torchao" else step_ms_amp_kernel,
        (cdiv(n, size.tensors),),
        state.scale,
        state.amax_history,
        after.scale,
        after.amax_history,
        used,
        amax,
        n,
        min(powers, 1 << 10),  # past the range of float32 they do no more
        TOP=fmt.max_finite,
        WARM_UP=bool(warm_up),
        LENGTH=len(state.amax_history),
        TENSORS=size.tensors,
        SLOTS=size.slots,
        num_warps=size.num_warps,
    )
    return used
