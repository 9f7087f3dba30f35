"""AdamW on the GPU, in place: the Triton twin of `fp8lab.emulation.adamw`."""

from __future__ import annotations

import math

import torch

from fp8lab.kernels.adamw_plan import AdamPlan
from fp8lab.kernels.adamw_settings import AdamSettings
from fp8lab.kernels.adamw_tensors import AdamTensors, MomentTensors
from fp8lab.kernels.checks import as_integer
from fp8lab.kernels.launch import to_float32
from fp8lab.optimizer_formats import AdamOrder, order_named


def adamw(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    order: str | AdamOrder = "plain",
    decoupled: bool = True,
    powers: tuple[float, float] | None = None,
    settings: AdamSettings | None = None,
    hardware: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One AdamW step (Loshchilov and Hutter, 2019) on float32 tensors, in place.

    Bit for bit `fp8lab.emulation.adamw.adamw`, whose contract this is. For lists of tensors, other
    formats and steps counted on the device, see `fp8lab.kernels.adamw_plan.AdamPlan`.

    Args:
        param, exp_avg, exp_avg_sq: float32, one shape and device, contiguous; overwritten.
        grad: float32, bfloat16 or float16; the same otherwise; only read.
        step: Which step this is, from 1.
        lr, betas, eps, weight_decay: Python floats; lr, eps and weight_decay at least 0, each beta
            in [0, 1).
        order, decoupled, powers: As for the oracle.
        settings, hardware: See `AdamPlan`.

    Returns:
        (param, exp_avg, exp_avg_sq): the tensors given, now holding the new values.

    Raises:
        TypeError: A tensor of another dtype, or a step that is no integer.
        ValueError: Shapes or devices differ, a tensor is not contiguous, two of them share memory,
            or a number is outside its range.
    """
    chosen = order_named(order)
    tensors = AdamTensors(
        param.detach() if isinstance(param, torch.Tensor) else param,
        grad.detach() if isinstance(grad, torch.Tensor) else grad,
        MomentTensors(exp_avg),
        MomentTensors(exp_avg_sq),
    )
    plan = AdamPlan([tensors], chosen, decoupled, settings=settings, hardware=hardware)
    constants = step_constants(
        chosen,
        step=step,
        lr=lr,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        decoupled=decoupled,
        powers=powers,
    )
    plan.launch(constants.to(param.device))
    # As torch's own in-place operations: a graph that saved one of these refuses to run backward.
    torch.autograd.graph.increment_version([param, exp_avg, exp_avg_sq])
    return param, exp_avg, exp_avg_sq


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
) -> torch.Tensor:
    """The constants of a step, made on the host: float32, (1, 9), on the CPU.

    Raises:
        ValueError: A number is outside its range.
    """
    _check_hyperparameters(step, lr, betas, eps, weight_decay)
    beta1, beta2 = betas
    weight1, weight2 = 1 - beta1, 1 - beta2
    if order.constants != "double":
        beta1, beta2 = to_float32(beta1), to_float32(beta2)
        # Exact in float64, so this rounds once, as the float32 difference does.
        weight1, weight2 = 1 - beta1, 1 - beta2
    power1, power2 = powers or (_power(beta1, step), _power(beta2, step))
    by_step_size = order.update in ("step_size", "step_size_fused")
    by_root = order.denominator == "corrected_root"
    if order.constants == "float32":
        # float64 operations on float32 values, rounded to float32, are float32 operations.
        lr, decay = to_float32(lr), to_float32(weight_decay)
        decay = lr * decay if decoupled else decay
        correction1 = to_float32(1 - to_float32(power1))
        correction2 = to_float32(1 - to_float32(power2))
    else:
        correction1, correction2 = 1 - power1, 1 - power2
        decay = weight_decay
        if decoupled and order.decay != "inside":
            decay = lr * weight_decay
            if order.decay == "multiply":
                decay = 1 - decay
    if by_step_size:
        correction1 = _quotient(lr, correction1)
    if by_root:
        correction2 = math.sqrt(correction2)
    constants = (decay, beta1, weight1, beta2, weight2, correction1, correction2, eps, lr)
    return torch.tensor([[to_float32(constant) for constant in constants]], dtype=torch.float32)


def _quotient(a: float, b: float) -> float:
    """a / b of numbers that are not negative, where Python would refuse a zero."""
    if b:
        return a / b
    return math.inf if a else math.nan


def _power(base: float, exponent: int) -> float:
    """base**exponent in float64, square and multiply from the lowest bit up, as the device does."""
    result = 1.0
    for bit in bin(exponent)[:1:-1]:
        if bit == "1":
            result *= base
        base *= base
    return result


def _check_hyperparameters(
    step: int, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> None:
    if as_integer(step) is None:
        raise TypeError(f"step is {step!r}; accepted: an integer, 1 and up")
    if step < 1:
        raise ValueError(f"step is {step}; accepted: 1 and up (the first step is 1)")
    for name, number in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        if not 0 <= number < float("inf"):
            raise ValueError(f"{name} is {number}; accepted: finite, at least 0")
    if len(betas) != 2:
        raise ValueError(f"betas is {betas}; accepted: two numbers, at least 0 and below 1")
    for index, beta in enumerate(betas, start=1):
        if not 0 <= beta < 1:
            raise ValueError(f"beta{index} is {beta}; accepted: at least 0 and below 1")
