"""The constants of an AdamW step, made on the device: what a CUDA graph can repeat."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

# A row of constants: float32, in this order.
CONSTANTS = tl.constexpr(9)
HYPERPARAMETERS = tl.constexpr(5)  # lr, beta1, beta2, eps, weight_decay: float64


@triton.jit
def constants_kernel(
    hyperparameters,  # float64, HYPERPARAMETERS a group
    steps,  # int64, one a group: steps taken
    constants,  # float32, CONSTANTS a group
    skip,  # None or an int32: leave everything as it is unless it is 0
    ORDER: tl.constexpr,
    DECOUPLED: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """One group a program: count the step and make its constants, on the device alone."""
    if skip is not None:  # noqa: SIM102 (decided when it is compiled)
        if tl.load(skip) != 0:
            return
    group = tl.program_id(0)
    row = hyperparameters + group * HYPERPARAMETERS
    lr = tl.load(row)
    beta1 = tl.load(row + 1)
    beta2 = tl.load(row + 2)
    decay = tl.load(row + 4)
    step = tl.load(steps + group) + 1
    tl.store(steps + group, step)

    one = lr * 0 + 1.0  # float64: a literal would be float32
    weight1 = (one - beta1).to(tl.float32)
    weight2 = (one - beta2).to(tl.float32)
    lr32 = lr.to(tl.float32)
    if ORDER.constants != "double":
        beta1 = beta1.to(tl.float32).to(tl.float64)
        beta2 = beta2.to(tl.float32).to(tl.float64)
        weight1 = one.to(tl.float32) - beta1.to(tl.float32)
        weight2 = one.to(tl.float32) - beta2.to(tl.float32)
    if ORDER.constants == "float32":
        one = one.to(tl.float32)
        if HARDWARE:
            power1 = libdevice.pow(beta1.to(tl.float32), step.to(tl.float32))
            power2 = libdevice.pow(beta2.to(tl.float32), step.to(tl.float32))
        else:
            power1 = _power(beta1, step).to(tl.float32)
            power2 = _power(beta2, step).to(tl.float32)
        correction1 = one - power1
        correction2 = one - power2
        if ORDER.denominator == "corrected_root":
            correction2 = tl.sqrt_rn(correction2)
        if ORDER.update != "moment" and ORDER.update != "inside_fused":
            correction1 = tl.div_rn(lr32, correction1)
        decay32 = decay.to(tl.float32)
        if DECOUPLED:
            decay32 = lr32 * decay32
    else:
        correction1 = one - _power(beta1, step)
        correction2 = one - _power(beta2, step)
        if ORDER.denominator == "corrected_root":
            correction2 = tl.sqrt(correction2)
        if ORDER.update != "moment" and ORDER.update != "inside_fused":
            correction1 = lr / correction1
        if DECOUPLED and ORDER.decay != "inside":
            decay = lr * decay
            if ORDER.decay == "multiply":
                decay = one - decay
        decay32 = decay.to(tl.float32)
    out = constants + group * CONSTANTS
    tl.store(out, decay32)
    tl.store(out + 1, beta1.to(tl.float32))
    tl.store(out + 2, weight1)
    tl.store(out + 3, beta2.to(tl.float32))
    tl.store(out + 4, weight2)
    tl.store(out + 5, correction1.to(tl.float32))
    tl.store(out + 6, correction2.to(tl.float32))
    tl.store(out + 7, tl.load(row + 3).to(tl.float32))
    tl.store(out + 8, lr32)


@triton.jit
def _power(base, exponent):
    """base**exponent in float64, by square and multiply from the lowest bit up."""
    result = base * 0 + 1.0
    for bit in tl.static_range(40):
        result = tl.where((exponent >> bit) & 1 != 0, result * base, result)
        base = base * base
    return result
