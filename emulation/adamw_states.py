"""AdamW on stored states: master weights and moments in the formats that they are kept in."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from fp8lab.emulation.adamw import GRADIENTS, check_hyperparameters
from fp8lab.emulation.adamw_orders import new_moments, new_param, step_constants
from fp8lab.emulation.fused import Array
from fp8lab.emulation.masters import Int16Array, join_master, round_master, split_master
from fp8lab.emulation.moments import StoredMoment, read_moment, store_moment
from fp8lab.optimizer_formats import AdamOrder, order_named

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class AdamState:
    """Everything of one parameter that a step reads and writes.

    Attributes:
        param: float32, or the bfloat16 weight.
        exp_avg, exp_avg_sq: The moments as stored, of param's shape.
        remainder: int16, beside a bfloat16 param: the rest of the float32 master.
    """

    param: Array
    exp_avg: StoredMoment
    exp_avg_sq: StoredMoment
    remainder: Int16Array | None = None


def adamw_state(
    state: AdamState,
    grad: Array,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    order: str | AdamOrder = "plain",
    decoupled: bool = True,
    powers: tuple[float, float] | None = None,
    grad_factor: float | np.float32 | None = None,
    skip: bool = False,
    random_words: Array | None = None,
) -> AdamState:
    """One step from stored state to stored state.

    Order: master, moments and gradient are widened or decoded to float32; with a `grad_factor`,
    g = g * grad_factor, rounded; the step of `fp8lab.emulation.adamw.adamw`; the parameter is
    updated from the float32 moments, before they are stored; moments are stored by `store_moment`
    (the guard "settle" looks at g), the master by its form:

    - float32: as it is;
    - bfloat16 and a remainder: `split_master`;
    - bfloat16 alone: `round_master` with `random_words`.

    Args:
        state: Not changed.
        grad: float32, bfloat16 or float16, of param's shape.
        step, lr, betas, eps, weight_decay, order, decoupled, powers: As for `adamw`.
        grad_factor: Multiplies the gradient: what unscales and clips it, rounded to float32.
        skip: Whether a gradient was not finite; then the state comes back as it was.
        random_words: uint32 of param's shape, for a bfloat16 param without a remainder.

    Returns:
        The new state.

    Raises:
        TypeError: A dtype that is not accepted.
        ValueError: Shapes differ, a number is outside its range, or random words are missing.
    """
    chosen = order_named(order)
    check_hyperparameters(step, lr, betas, eps, weight_decay)
    stochastic = state.param.dtype == BFLOAT16 and state.remainder is None
    _check(state, grad, random_words if stochastic else None, stochastic)
    if skip:
        return state
    if state.remainder is not None:
        p = join_master(state.param, state.remainder)
    else:
        with np.errstate(all="ignore"):
            p = state.param.astype(np.float32)
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
    with np.errstate(all="ignore"):
        g = grad.astype(np.float32)
        if grad_factor is not None:
            g = g * np.float32(grad_factor)
    m, v = new_moments(
        p,
        g,
        read_moment(state.exp_avg),
        read_moment(state.exp_avg_sq),
        constants,
        chosen,
        decoupled,
    )
    p = new_param(p, m, v, constants, chosen, decoupled)
    exp_avg = store_moment(m, state.exp_avg.fmt, grad=g)
    exp_avg_sq = store_moment(v, state.exp_avg_sq.fmt, grad=g)
    remainder = None
    if state.remainder is not None:
        p, remainder = split_master(p)
    elif stochastic:
        assert random_words is not None
        p = round_master(p, random_words)
    return AdamState(p, exp_avg, exp_avg_sq, remainder)


def _check(state: AdamState, grad: Array, random_words: Array | None, stochastic: bool) -> None:
    if state.param.dtype not in (np.dtype(np.float32), BFLOAT16):
        raise TypeError(f"param has dtype {state.param.dtype}; accepted: float32, bfloat16")
    if grad.dtype not in GRADIENTS:
        raise TypeError(f"grad has dtype {grad.dtype}; accepted: float32, bfloat16, float16")
    shapes = {
        "grad": grad,
        "exp_avg": state.exp_avg.codes,
        "exp_avg_sq": state.exp_avg_sq.codes,
        "remainder": state.remainder,
        "random_words": random_words,
    }
    for name, array in shapes.items():
        if array is not None and array.shape != state.param.shape:
            raise ValueError(f"{name} has shape {array.shape}; param has {state.param.shape}")
    if stochastic and random_words is None:
        raise ValueError("a bfloat16 param without a remainder needs random_words")
