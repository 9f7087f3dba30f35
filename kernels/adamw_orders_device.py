"""The orders of operations of AdamW on the device: each element's way through a step.

The twin of `fp8lab.emulation.adamw_orders`. k points to a row of constants: decay, beta1, weight1,
beta2, weight2, correction1, correction2, eps, lr.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp8lab.kernels.float_device import bits_of, fma, negated
from fp8lab.kernels.quotients_device import quotient, reciprocal, root

# Bits without the sign, shifted up by one; the span is that of m and of v.
_LEAST_M = tl.constexpr((127 - 60) << 24)
_LEAST_V = tl.constexpr((127 - 90) << 24)
_SPAN = tl.constexpr(110 << 24)
_LEAST_C = tl.constexpr(2.0**-24)
_MOST_C = tl.constexpr(2.0**8)
_MOST_EPS = tl.constexpr(2.0**20)


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
def new_param(p, m, v, k, ORDER: tl.constexpr, STEP: tl.constexpr, MASKED: tl.constexpr):
    HARDWARE: tl.constexpr = STEP.hardware
    decay = tl.load(k)
    if STEP.decoupled:
        if ORDER.decay == "multiply":
            p = p * decay
        elif ORDER.decay == "subtract":
            p = p - decay * p
        elif ORDER.decay == "subtract_fused":
            p = tl.where(decay == 0, p, fma(negated(decay), p, p, HARDWARE))
    if HARDWARE and not MASKED:
        if _is_ordinary(m, v, k):
            p = _moved(p, m, v, k, ORDER, STEP, True)
        else:
            p = _moved(p, m, v, k, ORDER, STEP, False)
    else:
        p = _moved(p, m, v, k, ORDER, STEP, False)
    return p


@triton.jit
def _is_ordinary(m, v, k):
    """Whether no quotient or root of a block, nor anything on the way to one, leaves float32.

    With |m| in [2**-60, 2**50), |v| in [2**-90, 2**20), both corrections in [2**-24, 2**8) and eps
    below 2**20: v/c2 is in [2**-98, 2**44), a denominator in [2**-53, 2**31), a dividend in
    [2**-84, 2**74), the update in [2**-115, 2**127).
    """
    # A number's bits, without the sign: (exponent + 127) << 24 and below.
    first = (bits_of(m) << 1).to(tl.uint32, bitcast=True) - _LEAST_M
    second = (bits_of(v) << 1).to(tl.uint32, bitcast=True) - _LEAST_V
    c1 = tl.load(k + 5)
    c2 = tl.load(k + 6)
    constants = (tl.minimum(c1, c2) >= _LEAST_C) & (tl.maximum(c1, c2) < _MOST_C)
    return (
        constants
        & (tl.load(k + 7) < _MOST_EPS)
        & (tl.max(tl.maximum(first, second), axis=0) < _SPAN)
    )


@triton.jit
def _moved(p, m, v, k, ORDER: tl.constexpr, STEP: tl.constexpr, ORDINARY: tl.constexpr):
    """The parameter after its update."""
    HARDWARE: tl.constexpr = STEP.hardware
    decay = tl.load(k)
    correction1 = tl.load(k + 5)
    correction2 = tl.load(k + 6)
    eps = tl.load(k + 7)
    lr = tl.load(k + 8)
    if ORDER.denominator == "corrected_square":
        denominator = _root(_quotient(v, correction2, ORDINARY), ORDINARY) + eps
    else:
        denominator = _quotient(_root(v, ORDINARY), correction2, ORDINARY) + eps
    if ORDER.update == "step_size":
        p = p - _quotient(correction1 * m, denominator, ORDINARY)
    elif ORDER.update == "step_size_fused":
        p = fma(negated(correction1), _quotient(m, denominator, ORDINARY), p, HARDWARE)
    else:
        update = _quotient(_quotient(m, correction1, ORDINARY), denominator, ORDINARY)
        if ORDER.update == "moment":
            p = p - lr * update
        else:
            if STEP.decoupled:
                update = fma(decay, p, update, HARDWARE)
            p = fma(negated(lr), update, p, HARDWARE)
    return p


@triton.jit
def _quotient(n, d, ORDINARY: tl.constexpr):
    if ORDINARY:
        result = quotient(n, d, reciprocal(d))
    else:
        result = tl.div_rn(n, d)
    return result


@triton.jit
def _root(x, ORDINARY: tl.constexpr):
    if ORDINARY:
        result = root(x)
    else:
        result = tl.sqrt_rn(x)
    return result
