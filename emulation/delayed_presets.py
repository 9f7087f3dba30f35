"""Delayed scaling as other stacks advance it, by name, one whole step at a time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fp8lab.delayed_presets import DELAYED_PRESETS
from fp8lab.emulation.amax import magnitudes
from fp8lab.emulation.delayed import DelayedScalingState, record_amax, update_delayed
from fp8lab.emulation.scale_rules import check_margin, check_value_format, current_scale
from fp8lab.emulation.tiling import Float32Array
from fp8lab.formats import Float8Format


def step_delayed(
    state: DelayedScalingState,
    amax: npt.ArrayLike,
    fmt: Float8Format,
    *,
    preset: str = "transformer_engine",
    margin: int = 0,
    warm_up: bool = False,
) -> tuple[Float32Array, DelayedScalingState]:
    """One whole step of a stack: the scale that this step's cast uses, and the state after it.

    `amax` is that of this step's cast (of the group, where ranks share). Slot i of the history is
    the stack's own slot i, after its update.

    "transformer_engine", "megatron": the cast uses state.scale; then `record_amax` and
    `update_delayed`, with all slots or the last. There is no warm-up.

    "torchao" (its variant of 2024, gone since): on the first use (warm_up) history[0] = amax and
    the scale is made from the history, before the cast. Then the history rolls: slot i moves to
    i + 1, slot 0 becomes amax, and the next scale is made from the largest slot. The scale is
    `current_scale` of preset "torchao": an amax of 0 counts and gives up to 448e12, Inf gives 0,
    NaN gives NaN for as long as it is in the history. A layer that did not run shows its last amax
    again: give history[0].

    "ms_amp": while warming up, and always with a window of 1, the cast uses a scale made from this
    very amax. Then an Inf or NaN amax is taken for 0, the next scale is made from the largest of
    all slots with amax in slot 0, slot i moves to i + 1, and slot 0 becomes 0. The scale is
    2**(floor(log2(q)) - margin) with q = fmt.max_finite / amax rounded in float32, the exponent
    read from the bits of q: Inf from 2**128 on (amax below 1.32e-36 in E4M3), 0 below 2**-127. An
    amax of 0 keeps the scale before; in warm-up NaN does too, and Inf gives 1 / scale, as there.
    MS-AMP warms up until L steps went without Inf or NaN.

    Args:
        state: As it was after the last step; `DelayedScalingState.fresh` at the start.
        amax: Not negative, of the shape of state.scale.
        fmt: The target format.
        preset: A name of `DELAYED_PRESETS`.
        margin: Powers of two of headroom (not for "torchao", which has none).
        warm_up: Whether this is the first use (torchao) or the warm-up (MS-AMP).

    Returns:
        (float32 scales of this step's cast, the state after the step); the given state is not
        changed.

    Raises:
        TypeError: fmt is not a format of values, or amax holds no numbers.
        ValueError: An unknown preset; a margin or warm_up that the stack does not have; a negative
            margin or amax.

    Source: TransformerEngine `delayed_scaling.cu`; torchao 0.6 `sync_float8_amax_and_scale_history`
    (but its cap of 65504 for float16 tensors); MS-AMP `LBOptimizer._update_scaling_factors` and
    `ScalingMeta.compute_scaling_factor`.

    >>> from fp8lab.formats import E4M3
    >>> fresh = DelayedScalingState.fresh(2)
    >>> for name in ("transformer_engine", "torchao", "ms_amp"):
    ...     used, state = step_delayed(fresh, 3.0, E4M3, preset=name)
    ...     print(name, float(used), float(state.scale), state.amax_history.tolist())
    transformer_engine 1.0 149.3333282470703 [0.0, 3.0]
    torchao 1.0 149.3333282470703 [3.0, 0.0]
    ms_amp 1.0 128.0 [0.0, 3.0]
    """
    try:
        chosen = DELAYED_PRESETS[preset]
    except (KeyError, TypeError):
        accepted = ", ".join(DELAYED_PRESETS)
        raise ValueError(f"unknown preset {preset!r}; accepted: {accepted}") from None
    margin = check_margin(margin)
    check_value_format(fmt)
    if chosen.rule == "transformer_engine":
        if warm_up:
            raise ValueError(f"preset {preset!r} has no warm-up; accepted: warm_up=False")
        recorded = record_amax(state, amax)
        after = update_delayed(recorded, fmt, margin=margin, algorithm=chosen.algorithm)
        return state.scale, after
    seen = magnitudes("amax", amax)
    if seen.shape != np.shape(state.scale):
        raise ValueError(f"amax has shape {seen.shape}; accepted: {np.shape(state.scale)}")
    if chosen.rule == "torchao":
        if margin:
            raise ValueError(f"margin is {margin} with preset 'torchao'; accepted: 0")
        return _torchao(state, seen, fmt, warm_up)
    return _ms_amp(state, seen, fmt, margin, warm_up)


def _torchao(
    state: DelayedScalingState, seen: Float32Array, fmt: Float8Format, first: bool
) -> tuple[Float32Array, DelayedScalingState]:
    history, used = state.amax_history.copy(), state.scale
    if first:
        history[0] = seen
        used = current_scale(_largest(history), fmt, preset="torchao")
    history = np.roll(history, 1, axis=0)
    history[0] = seen
    scale = current_scale(_largest(history), fmt, preset="torchao")
    return used, DelayedScalingState(scale, history)


def _ms_amp(
    state: DelayedScalingState, seen: Float32Array, fmt: Float8Format, margin: int, warm_up: bool
) -> tuple[Float32Array, DelayedScalingState]:
    history, used = state.amax_history.copy(), state.scale
    if warm_up or history.shape[0] == 1:
        used = _ms_amp_scale(seen, used, fmt, 0)
        # Its where() for negative exponents comes last, and catches the exponent of 0, -Inf.
        used = np.where(np.isinf(seen), _reciprocal_power(state.scale), used)
    history[0] = np.where(np.isfinite(seen), seen, np.float32(0))
    scale = _ms_amp_scale(_largest(history), used, fmt, margin)
    history = np.roll(history, 1, axis=0)
    history[0] = 0
    return used, DelayedScalingState(scale, history)


def _reciprocal_power(scale: Float32Array) -> Float32Array:
    with np.errstate(all="ignore"):
        return np.asarray(np.float32(1) / scale, dtype=np.float32)


def _ms_amp_scale(
    largest: Float32Array, before: Float32Array, fmt: Float8Format, margin: int
) -> Float32Array:
    """2**(floor(log2(max_finite / largest)) - margin), `before` where largest says nothing."""
    with np.errstate(all="ignore"):
        quotient = np.float32(fmt.max_finite) / largest
        # frexp reads the bits: quotient is fraction * 2**exponent with fraction in [0.5, 1).
        exponent = np.frexp(quotient)[1] - 1 - margin
        scale = np.ldexp(np.float32(1), exponent)
    # It takes 2**-e as 1 / 2**e, and 2**128 is Inf.
    scale = np.where(exponent < -127, np.float32(0), scale)
    scale = np.where(np.isinf(quotient), np.float32(np.inf), scale)
    usable = np.isfinite(largest) & (largest > 0)
    return np.where(usable, scale, before).astype(np.float32)


def _largest(history: Float32Array) -> Float32Array:
    words = history.view(np.uint32).max(axis=0)
    return np.asarray(words, dtype=np.uint32).view(np.float32)
