"""AdamW, bit for bit: one step on float32 tensors, every operation rounded, in a named order."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from fp8lab.emulation.adamw_orders import new_moments, new_param, step_constants
from fp8lab.emulation.integers import as_integer
from fp8lab.optimizer_formats import AdamOrder, order_named

Array = npt.NDArray[Any]
Float32Array = npt.NDArray[np.float32]

GRADIENTS = tuple(np.dtype(t) for t in (np.float32, ml_dtypes.bfloat16, np.float16))


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
    order: str | AdamOrder = "plain",
    decoupled: bool = True,
    powers: tuple[float, float] | None = None,
) -> tuple[Float32Array, Float32Array, Float32Array]:
    """One AdamW step (Loshchilov and Hutter, 2019), decoupled weight decay first.

    The order "plain". Computed in float64 from the Python floats and rounded once to float32:
    beta1, 1 - beta1, beta2, 1 - beta2, lr, lr * weight_decay, eps, c1 = 1 - beta1**step,
    c2 = 1 - beta2**step, the powers by square and multiply (`fp8lab.emulation.fused.power`). Then,
    for each element, every operation rounded to nearest even in float32, no fused multiply-add:

        p = p - (lr*wd)*p
        m = beta1*m + (1-beta1)*g
        v = beta2*v + (1-beta2)*(g*g)
        p = p - lr*((m/c1) / (sqrt(v/c2) + eps))

    No operation is skipped when weight_decay is 0. NaN and Inf follow IEEE 754. What the other
    orders compute is said by `fp8lab.optimizer_formats.AdamOrder`.

    Args:
        param, exp_avg, exp_avg_sq: float32 arrays of one shape; not modified.
        grad: float32, bfloat16 or float16 of that shape; widened exactly.
        step: Which step this is, from 1.
        lr, betas, eps, weight_decay: Python floats; lr, eps and weight_decay at least 0, each beta
            in [0, 1).
        order: "plain", "torch", "torch_cuda", "torch_foreach", "torch_foreach_cuda", "apex", or an
            `AdamOrder`.
        decoupled: False for Adam with L2 regularisation (Kingma and Ba, 2015): the gradient becomes
            g + wd*p, both operations rounded, or one fused multiply-add where the order says so
            (`AdamOrder.l2`).
        powers: beta1**step and beta2**step, where a card computes them its own way ("torch_cuda":
            CUDA's powf).

    Returns:
        The new (param, exp_avg, exp_avg_sq), float32.

    Raises:
        TypeError: An array is of another dtype, or the step is no integer.
        ValueError: Shapes differ, a number is outside its range, or the order is unknown.

    >>> import numpy as np
    >>> one, zero = np.ones(1, np.float32), np.zeros(1, np.float32)
    >>> p, m, v = adamw(one, one, zero, zero, step=1, lr=0.1, betas=(0.9, 0.999), eps=1e-8,
    ...                 weight_decay=0.0)
    >>> p.tolist(), m.tolist()
    ([0.8999999761581421], [0.10000000149011612])
    """
    chosen = order_named(order)
    tensors = {"param": param, "grad": grad, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    for name, tensor in tensors.items():
        accepted = GRADIENTS if name == "grad" else GRADIENTS[:1]
        if tensor.dtype not in accepted:
            names = ", ".join(str(dtype) for dtype in accepted)
            raise TypeError(f"{name} has dtype {tensor.dtype}; accepted: {names}")
        if tensor.shape != param.shape:
            raise ValueError(f"{name} has shape {tensor.shape}; param has {param.shape}")
    check_hyperparameters(step, lr, betas, eps, weight_decay)

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
    with np.errstate(all="ignore"):  # a signalling NaN
        g = np.asarray(grad, dtype=np.float32)
    m, v = new_moments(param, g, exp_avg, exp_avg_sq, constants, chosen, decoupled)
    return new_param(param, m, v, constants, chosen, decoupled), m, v


def check_hyperparameters(
    step: int, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> None:
    """Refuse numbers that no AdamW step takes, naming the one and its range."""
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
