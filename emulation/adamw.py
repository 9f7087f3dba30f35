"""AdamW, bit for bit: one step on float32 tensors, every operation rounded, in a fixed order."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Float32Array = npt.NDArray[np.float32]

ORDERS = ("plain",)


def adamw(
    param: Array,
    grad: Array,
    exp_avg: Array,
    exp_avg_sq: Array,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    order: str = "plain",
) -> tuple[Float32Array, Float32Array, Float32Array]:
    """One AdamW step (Loshchilov and Hutter, 2019), decoupled weight decay first.

    Computed in float64 from the Python floats and rounded once to float32: beta1, 1 - beta1,
    beta2, 1 - beta2, lr, lr * weight_decay, eps, c1 = 1 - beta1**step, c2 = 1 - beta2**step. Then,
    for each element, every operation rounded to nearest even in float32, no fused multiply-add:

        p = p - (lr*wd)*p
        m = beta1*m + (1-beta1)*g
        v = beta2*v + (1-beta2)*(g*g)
        p = p - lr*((m/c1) / (sqrt(v/c2) + eps))

    No operation is skipped when weight_decay is 0. NaN and Inf follow IEEE 754.

    Args:
        param, grad, exp_avg, exp_avg_sq: float32 arrays of one shape; not modified.
        step: Which step this is, from 1.
        lr, betas, eps, weight_decay: Python floats; lr, eps and weight_decay at least 0, each beta
            in [0, 1).
        order: "plain" (the one above).

    Returns:
        The new (param, exp_avg, exp_avg_sq), float32.

    Raises:
        TypeError: An array is not float32.
        ValueError: Shapes differ, or a number is outside its range.

    >>> import numpy as np
    >>> one, zero = np.ones(1, np.float32), np.zeros(1, np.float32)
    >>> p, m, v = adamw(one, one, zero, zero, step=1, lr=0.1, betas=(0.9, 0.999), eps=1e-8,
    ...                 weight_decay=0.0)
    >>> p.tolist(), m.tolist()
    ([0.8999999761581421], [0.10000000149011612])
    """
    tensors = {"param": param, "grad": grad, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    for name, tensor in tensors.items():
        if tensor.dtype != np.float32:
            raise TypeError(f"{name} has dtype {tensor.dtype}; accepted: float32")
        if tensor.shape != param.shape:
            raise ValueError(f"{name} has shape {tensor.shape}; param has {param.shape}")
    check_hyperparameters(step, lr, betas, eps, weight_decay, order)

    beta1, beta2 = betas
    f = np.float32
    b1, one_minus_b1, b2, one_minus_b2 = f(beta1), f(1 - beta1), f(beta2), f(1 - beta2)
    lr32, decay, eps32 = f(lr), f(lr * weight_decay), f(eps)
    c1, c2 = f(1 - beta1**step), f(1 - beta2**step)

    with np.errstate(all="ignore"):
        p: Array = param - decay * param
        m = b1 * exp_avg + one_minus_b1 * grad
        v = b2 * exp_avg_sq + one_minus_b2 * (grad * grad)
        p = p - lr32 * ((m / c1) / (np.sqrt(v / c2) + eps32))
    return np.asarray(p), np.asarray(m), np.asarray(v)


def check_hyperparameters(
    step: int, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, order: str
) -> None:
    """Refuse numbers that no AdamW step takes, naming the one and its range."""
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
