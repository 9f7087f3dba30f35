"""The orders of operations of AdamW on the device: each element's way through a step.

The twin of `fp8lab.emulation.adamw_orders`. k points to a row of constants: decay, beta1, weight1,
beta2, weight2, correction1, correction2, eps, lr.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp8lab.kernels.float_device import fma, negated


@triton.jit
def with_l2(p, g, k, offsets, n, ORDER: tl.constexpr, STEP: tl.constexpr):
    HARDWARE: tl.constexpr = STEP.hardware
    decay = tl.load(k)
    if ORDER.l2 == "rounded":
        result = g + decay * p
    else:
        result = fma(decay, p, g, HARDWARE)
    if ORDER.l2 == "first_rounded":
        # Four neighbours a thread of torch's kernel, or four elements 512 apart.
        places = tl.where(n % 4 == 0, offsets, offsets >> 9)
        result = tl.where(places & 3 == 0, g + decay * p, result)
    if ORDER.skips_zero_decay:
        result = tl.where(decay == 0, g, result)
    return result


@triton.jit
def first_moment(m, g, k, ORDER: tl.constexpr, STEP: tl.constexpr):
    HARDWARE: tl.constexpr = STEP.hardware
    beta = tl.load(k + 1)
    weight = tl.load(k + 2)
    if ORDER.first_moment == "weighted":
        result = beta * m + weight * g
    elif ORDER.first_moment == "decay_fused":
        result = fma(beta, m, weight * g, HARDWARE)
    elif ORDER.first_moment == "nested_fused":
        result = fma(beta, m, fma(negated(beta), g, g, HARDWARE), HARDWARE)
    else:
        small = weight < 0.5
        coefficient = tl.where(small, weight, weight - 1.0)
        result = fma(coefficient, g - m, tl.where(small, m, g), HARDWARE)
    return result


@triton.jit
def second_moment(
    v, g, k, offsets, n, ORDER: tl.constexpr, STEP: tl.constexpr, MASKED: tl.constexpr
):
    RULE: tl.constexpr = ORDER.second_moment
    TAIL: tl.constexpr = ORDER.tail
    result = _second_by(v, g, k, RULE, STEP)
    if MASKED and TAIL is not None:
        result = tl.where(offsets < n // 8 * 8, result, _second_by(v, g, k, TAIL, STEP))
    return result


@triton.jit
def _second_by(v, g, k, RULE: tl.constexpr, STEP: tl.constexpr):
    HARDWARE: tl.constexpr = STEP.hardware
    beta = tl.load(k + 3)
    weight = tl.load(k + 4)
    if RULE == "square":
        result = beta * v + weight * (g * g)
    elif RULE == "weight_fused":
        result = fma(weight * g, g, beta * v, HARDWARE)
    elif RULE == "decay_fused":
        result = fma(beta, v, (weight * g) * g, HARDWARE)
    elif RULE == "square_fused":
        result = fma(weight, g * g, beta * v, HARDWARE)
    else:
        square = g * g
        result = fma(beta, v, fma(negated(beta), square, square, HARDWARE), HARDWARE)
    return result


@triton.jit
def new_param(p, m, v, k, ORDER: tl.constexpr, STEP: tl.constexpr):
    HARDWARE: tl.constexpr = STEP.hardware
    decay = tl.load(k)
    correction1 = tl.load(k + 5)
    correction2 = tl.load(k + 6)
    eps = tl.load(k + 7)
    lr = tl.load(k + 8)
    if STEP.decoupled:
        if ORDER.decay == "multiply":
            p = p * decay
        elif ORDER.decay == "subtract":
            p = p - decay * p
        elif ORDER.decay == "subtract_fused":
            p = tl.where(decay == 0, p, fma(negated(decay), p, p, HARDWARE))
    if ORDER.denominator == "corrected_square":
        denominator = tl.sqrt_rn(tl.div_rn(v, correction2)) + eps
    else:
        denominator = tl.div_rn(tl.sqrt_rn(v), correction2) + eps
    if ORDER.update == "moment":
        p = p - lr * tl.div_rn(tl.div_rn(m, correction1), denominator)
    elif ORDER.update == "step_size":
        p = p - tl.div_rn(correction1 * m, denominator)
    elif ORDER.update == "step_size_fused":
        p = fma(negated(correction1), tl.div_rn(m, denominator), p, HARDWARE)
    else:
        update = tl.div_rn(tl.div_rn(m, correction1), denominator)
        if STEP.decoupled:
            update = fma(decay, p, update, HARDWARE)
        p = fma(negated(lr), update, p, HARDWARE)
    return p
