"""AdamW on the GPU, in place: the Triton twin of `fp8lab.emulation.adamw`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fp8lab.kernels.checks import check_apart, check_like, check_tensor
from fp8lab.kernels.launch import ElementwiseSettings, launch, to_float32

ORDERS = ("plain",)


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
    order: str = "plain",
    settings: ElementwiseSettings = ElementwiseSettings(),  # noqa: B008 (frozen)
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One AdamW step (Loshchilov and Hutter, 2019), decoupled weight decay first, in place.

    Computed in float64 from the Python floats and rounded once to float32: beta1, 1 - beta1, beta2,
    1 - beta2, lr, lr * weight_decay, eps, c1 = 1 - beta1**step, c2 = 1 - beta2**step. Then, for
    each element, every operation rounded to nearest even in float32, no fused multiply-add:

        p = p - (lr*wd)*p
        m = beta1*m + (1-beta1)*g
        v = beta2*v + (1-beta2)*(g*g)
        p = p - lr*((m/c1) / (sqrt(v/c2) + eps))

    No operation is skipped when weight_decay is 0. NaN and Inf follow IEEE 754.

    Args:
        param, exp_avg, exp_avg_sq: float32, one shape and device, contiguous; overwritten.
        grad: The same, only read.
        step: Which step this is, from 1.
        lr, betas, eps, weight_decay: Python floats; lr, eps and weight_decay at least 0, each beta
            in [0, 1).
        order: "plain" (the one above).
        settings: How the kernel is launched.

    Returns:
        (param, exp_avg, exp_avg_sq): the tensors given, now holding the new values.

    Raises:
        TypeError: A tensor is not a float32 torch tensor.
        ValueError: Shapes or devices differ, a tensor is not contiguous, two of them share memory,
            or a number is outside its range.
    """
    tensors = {"param": param, "grad": grad, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    for name, tensor in tensors.items():
        check_tensor(name, tensor, (torch.float32,))
        check_like(name, tensor, "param", param)
    check_apart(tensors)
    _check_hyperparameters(step, lr, betas, eps, weight_decay, order)

    launch(
        adamw_kernel,
        (triton.cdiv(param.numel(), settings.block),),
        param.detach(),
        grad.detach(),
        exp_avg,
        exp_avg_sq,
        param.numel(),
        *_float32_constants(step, lr, betas, eps, weight_decay),
        BLOCK=settings.block,
        num_warps=settings.num_warps,
    )
    # As torch's own in-place operations: a graph that saved one of these refuses to run backward.
    torch.autograd.graph.increment_version([param, exp_avg, exp_avg_sq])
    return param, exp_avg, exp_avg_sq


def _float32_constants(
    step: int, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> tuple[float, ...]:
    """The kernel's constants in its order: made in float64, rounded once to float32."""
    beta1, beta2 = betas
    constants = (
        lr * weight_decay,
        beta1,
        1 - beta1,
        beta2,
        1 - beta2,
        1 - beta1**step,
        1 - beta2**step,
        eps,
        lr,
    )
    return tuple(to_float32(constant) for constant in constants)


def _check_hyperparameters(
    step: int, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, order: str
) -> None:
    if order not in ORDERS:
        raise ValueError(f"unknown order {order!r}; accepted: {', '.join(ORDERS)}")
    if step < 1:
        raise ValueError(f"step is {step}; accepted: 1 and up (the first step is 1)")
    for name, number in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        if not 0 <= number < float("inf"):
            raise ValueError(f"{name} is {number}; accepted: finite, at least 0")
    for index, beta in enumerate(betas, start=1):
        if not 0 <= beta < 1:
            raise ValueError(f"beta{index} is {beta}; accepted: at least 0 and below 1")


@triton.jit
def adamw_kernel(
    param,
    grad,
    exp_avg,
    exp_avg_sq,
    n,
    decay,  # lr * weight_decay
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    correction1,  # 1 - beta1**step
    correction2,  # 1 - beta2**step
    eps,
    lr,
    BLOCK: tl.constexpr,
):
    """BLOCK elements a program."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = start + tl.arange(0, BLOCK)
    # Full blocks carry no mask: one that depends on n would make every access a scalar one unless
    # n is a multiple of the vector width.
    if start + BLOCK <= n:
        p = tl.load(param + offsets)
        g = tl.load(grad + offsets)
        m = tl.load(exp_avg + offsets)
        v = tl.load(exp_avg_sq + offsets)
    else:
        mask = offsets < n
        p = tl.load(param + offsets, mask=mask, other=0.0)
        g = tl.load(grad + offsets, mask=mask, other=0.0)
        m = tl.load(exp_avg + offsets, mask=mask, other=0.0)
        v = tl.load(exp_avg_sq + offsets, mask=mask, other=0.0)

    # Cast, because the interpreter would take a float32 subnormal for a float64.
    p = p - tl.cast(decay, tl.float32) * p
    m = tl.cast(beta1, tl.float32) * m + tl.cast(one_minus_beta1, tl.float32) * g
    v = tl.cast(beta2, tl.float32) * v + tl.cast(one_minus_beta2, tl.float32) * (g * g)
    root = tl.sqrt_rn(tl.div_rn(v, tl.cast(correction2, tl.float32)))
    denominator = root + tl.cast(eps, tl.float32)
    p = p - tl.cast(lr, tl.float32) * tl.div_rn(
        tl.div_rn(m, tl.cast(correction1, tl.float32)), denominator
    )

    if start + BLOCK <= n:
        tl.store(param + offsets, p)
        tl.store(exp_avg + offsets, m)
        tl.store(exp_avg_sq + offsets, v)
    else:
        mask = offsets < n
        tl.store(param + offsets, p, mask=mask)
        tl.store(exp_avg + offsets, m, mask=mask)
        tl.store(exp_avg_sq + offsets, v, mask=mask)
