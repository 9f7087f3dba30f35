"""The orders of operations of AdamW: the float32 constants, and what each element goes through.

`fp8lab.optimizer_formats.AdamOrder` says what each choice computes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fp8lab.emulation.fused import Array, Float32Array, fma, power
from fp8lab.optimizer_formats import AdamOrder

VECTOR = 8  # elements that torch's CPU kernel takes at a time
THREADS, PER_THREAD = 512, 4  # of a block of torch's CUDA kernel; elements that a thread takes
F32 = np.float32


@dataclass(frozen=True)
class StepConstants:
    """The float32 constants of one step, and what they are made from decides their rounding.

    Attributes:
        decay: lr*wd; 1 - lr*wd where the order multiplies; wd where decay is inside the update or
            in the gradient.
        beta1, weight1: b1 and 1 - b1.
        beta2, weight2: b2 and 1 - b2.
        correction1: 1 - b1**t, or the step size lr / (1 - b1**t), as the update takes it.
        correction2: 1 - b2**t, or its root, as the denominator takes it.
        eps, lr: As given.
    """

    decay: F32
    beta1: F32
    weight1: F32
    beta2: F32
    weight2: F32
    correction1: F32
    correction2: F32
    eps: F32
    lr: F32


def step_constants(
    order: AdamOrder,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool = True,
    powers: tuple[float, float] | None = None,
) -> StepConstants:
    """The constants of a step.

    Args:
        order: Which order; its `constants` says in what they are made.
        step, lr, betas, eps, weight_decay: As for `adamw`.
        decoupled: Whether the decay is decoupled.
        powers: b1**step and b2**step where they are known better than this computes them. Made
            here: by square and multiply in float64 (`power`); for "float32", the float32 nearest to
            that power of the float32 beta, from which CUDA's powf may be some ulps away.

    Returns:
        What the elements are combined with.
    """
    with np.errstate(all="ignore"):
        if order.constants == "float32":
            return _in_float32(order, step, lr, betas, eps, weight_decay, decoupled, powers)
        beta1, beta2 = betas
        weight1, weight2 = F32(1 - beta1), F32(1 - beta2)
        if order.constants == "float32_betas":
            weight1, weight2 = F32(1) - F32(beta1), F32(1) - F32(beta2)
            beta1, beta2 = float(F32(beta1)), float(F32(beta2))
        power1, power2 = powers or (power(beta1, step), power(beta2, step))
        c1, c2 = 1 - power1, 1 - power2
        if not decoupled or order.decay == "inside":
            decay = weight_decay
        elif order.decay == "multiply":
            decay = 1 - lr * weight_decay
        else:
            decay = lr * weight_decay
        return StepConstants(
            F32(decay),
            F32(beta1),
            weight1,
            F32(beta2),
            weight2,
            F32(lr / c1 if order.update.startswith("step_size") else c1),
            F32(math.sqrt(c2) if order.denominator == "corrected_root" else c2),
            F32(eps),
            F32(lr),
        )


def _in_float32(
    order: AdamOrder,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    powers: tuple[float, float] | None,
) -> StepConstants:
    b1, b2, lr32, wd, one = F32(betas[0]), F32(betas[1]), F32(lr), F32(weight_decay), F32(1)
    power1, power2 = powers or (power(float(b1), step), power(float(b2), step))
    c1, c2 = one - F32(power1), one - F32(power2)
    return StepConstants(
        lr32 * wd if decoupled else wd,
        b1,
        one - b1,
        b2,
        one - b2,
        F32(lr32 / c1 if order.update.startswith("step_size") else c1),
        F32(np.sqrt(c2) if order.denominator == "corrected_root" else c2),
        F32(eps),
        lr32,
    )


def new_moments(
    param: Array,
    grad: Float32Array,
    exp_avg: Float32Array,
    exp_avg_sq: Float32Array,
    k: StepConstants,
    order: AdamOrder,
    decoupled: bool,
) -> tuple[Float32Array, Float32Array]:
    """Both moments of this step, float32. Decay that is not decoupled joins the gradient first."""
    with np.errstate(all="ignore"):
        g = grad
        if not decoupled and not (order.skips_zero_decay and k.decay == 0):
            g = _with_l2(param, g, k, order)
        return _first(exp_avg, g, k, order), _second(exp_avg_sq, g, k, order)


def new_param(
    param: Float32Array,
    exp_avg: Float32Array,
    exp_avg_sq: Float32Array,
    k: StepConstants,
    order: AdamOrder,
    decoupled: bool,
) -> Float32Array:
    """The parameter after the step, float32, from the moments that `new_moments` gave."""
    with np.errstate(all="ignore"):
        p = param
        if decoupled and order.decay != "inside":
            p = _decayed(p, k, order, decoupled)
        if order.denominator == "corrected_square":
            denominator = np.sqrt(exp_avg_sq / k.correction2) + k.eps
        else:
            denominator = np.sqrt(exp_avg_sq) / k.correction2 + k.eps
        if order.update == "moment":
            p = p - k.lr * ((exp_avg / k.correction1) / denominator)
        elif order.update == "step_size":
            p = p - (k.correction1 * exp_avg) / denominator
        elif order.update == "step_size_fused":
            p = fma(-k.correction1, exp_avg / denominator, p)
        else:
            update = (exp_avg / k.correction1) / denominator
            if decoupled:
                update = fma(k.decay, p, update)
            p = fma(-k.lr, update, p)
        return np.asarray(p, dtype=np.float32)


def _with_l2(p: Array, g: Float32Array, k: StepConstants, order: AdamOrder) -> Float32Array:
    rounded = np.asarray(g + k.decay * p, dtype=np.float32)
    if order.l2 == "rounded":
        return rounded
    fused = fma(k.decay, p, g)
    if order.l2 == "fused":
        return fused
    # A thread takes 4 neighbours with one load where n allows it, else 4 elements 512 apart.
    places = np.arange(g.size).reshape(g.shape)
    if g.size % PER_THREAD:
        places //= THREADS
    return np.asarray(np.where(places % PER_THREAD == 0, rounded, fused), dtype=np.float32)


def _decayed(p: Float32Array, k: StepConstants, order: AdamOrder, decoupled: bool) -> Float32Array:
    if order.decay == "multiply":
        return np.asarray(p * k.decay)
    if order.skips_zero_decay and k.decay == 0:
        return p
    if order.decay == "subtract":
        return np.asarray(p - k.decay * p)
    return fma(-k.decay, p, p)


def _first(m: Float32Array, g: Float32Array, k: StepConstants, order: AdamOrder) -> Float32Array:
    if order.first_moment == "weighted":
        return np.asarray(k.beta1 * m + k.weight1 * g)
    if order.first_moment == "decay_fused":
        return fma(k.beta1, m, k.weight1 * g)
    if order.first_moment == "nested_fused":
        return fma(k.beta1, m, fma(-k.beta1, g, g))
    if k.weight1 < 0.5:
        return fma(k.weight1, g - m, m)
    return fma(k.weight1 - F32(1), g - m, g)


def _second(v: Float32Array, g: Float32Array, k: StepConstants, order: AdamOrder) -> Float32Array:
    result = _second_by(order.second_moment, v, g, k)
    last = v.size % VECTOR
    if order.tail is None or last == 0:
        return result
    flat = result.reshape(-1)
    flat[-last:] = _second_by(order.tail, v.reshape(-1)[-last:], g.reshape(-1)[-last:], k)
    return flat.reshape(v.shape)


def _second_by(rule: str, v: Float32Array, g: Float32Array, k: StepConstants) -> Float32Array:
    if rule == "square":
        return np.asarray(k.beta2 * v + k.weight2 * (g * g))
    if rule == "weight_fused":
        return fma(k.weight2 * g, g, k.beta2 * v)
    if rule == "decay_fused":
        return fma(k.beta2, v, (k.weight2 * g) * g)
    square = g * g
    if rule == "square_fused":
        return fma(k.weight2, square, k.beta2 * v)
    return fma(k.beta2, v, fma(-k.beta2, square, square))
