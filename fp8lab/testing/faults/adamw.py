"""Hypotheses of AdamW: each slip in the order of operations, and in the constants of a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8lab.emulation.adamw_orders import StepConstants, new_moments, new_param, step_constants
from fp8lab.emulation.fused import fma, power
from fp8lab.optimizer_formats import ORDERS, AdamOrder
from fp8lab.testing.faults.adamw_updates import Given, wrong_updates
from fp8lab.testing.faults.chosen import order_of
from fp8lab.testing.faults.hypothesis import (
    NARROW,
    Arrays,
    Hypothesis,
    Settings,
    float32,
    flushed,
)

Array = npt.NDArray[Any]
F32 = np.float32
NAMES = ("param", "exp_avg", "exp_avg_sq")
_TAILS = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
# Choices of an order that another stack makes, one at a time, and what a kernel that makes one of
# them is told.
_CHANGES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("decay-multiplied", {"decay": "multiply"}),
    ("square-associated-otherwise", {"second_moment": "weight_fused"}),
    ("root-corrected-apart", {"denominator": "corrected_root"}),
    ("step-size-first", {"update": "step_size"}),
    ("betas-from-float32", {"constants": "float32_betas"}),
    ("corrections-in-float32", {"constants": "float32"}),
    ("first-moment-interpolated", {"first_moment": "lerp_fused"}),
    ("fused-multiply-add", {"first_moment": "nested_fused"}),
    ("fused-multiply-add", {"second_moment": "nested_fused"}),
    ("fused-multiply-add", {"update": "step_size_fused"}),
    ("decay-inside-update", {"decay": "inside", "update": "inside_fused"}),
    ("root-corrected-apart", {"denominator": "corrected_root", "update": "step_size"}),
)


class _Step:
    """One AdamW step: the right one, or with constants, an order or moments of its own."""

    def __init__(self, settings: Settings, inputs: Arrays) -> None:
        self.order = order_of(settings)
        self.p, self.g, self.m, self.v = (
            float32(inputs[name]) for name in ("param", "grad", "exp_avg", "exp_avg_sq")
        )
        beta1, beta2 = (float(beta) for beta in inputs["betas"])
        self.numbers: dict[str, Any] = {
            "step": int(inputs["step"]),
            "betas": (beta1, beta2),
            **{name: float(inputs[name]) for name in ("lr", "eps", "weight_decay")},
        }

    def constants(self, order: AdamOrder | None = None, **changes: Any) -> StepConstants:
        return step_constants(order or self.order, **{**self.numbers, **changes})

    def __call__(
        self,
        k: StepConstants | None = None,
        *,
        order: AdamOrder | None = None,
        decoupled: bool = True,
        grad: Array | None = None,
        moments: tuple[Array, Array] | None = None,
    ) -> Arrays:
        """The outputs by name."""
        chosen = order or self.order
        k = k or self.constants(chosen, decoupled=decoupled)
        g = self.g if grad is None else grad
        m, v = moments or new_moments(self.p, g, self.m, self.v, k, chosen, decoupled)
        return _named(new_param(self.p, m, v, k, chosen, decoupled), m, v)


def of_adamw(settings: Settings, inputs: Arrays, expected: Arrays) -> Iterator[Hypothesis]:
    """Hypotheses of `check_adamw`."""
    step = _Step(settings, inputs)
    k, right = step.constants(), step()
    zero_decay = replace(step.order, skips_zero_decay=not step.order.skips_zero_decay)
    yield "zero-decay-skipped", step(order=zero_decay)
    if step.order.name == "plain":
        m, v = right["exp_avg"], right["exp_avg_sq"]
        given = Given(step.p, step.g, step.m, step.v, step.numbers["weight_decay"])
        for fault, p in wrong_updates(given, m, v, k, step.numbers["lr"]):
            yield fault, _named(p, m, v)
        yield from _wrong_moments(step, k)
        yield from _contracted(step, k)
    for fault, other in _constants(step):
        yield fault, step(other)
    for fault, change in _CHANGES:
        yield fault, step(order=replace(step.order, **change))
    yield "weight-decay-in-gradient", step(decoupled=False)
    coupled = step.g + F32(step.numbers["weight_decay"]) * step.p
    yield "weight-decay-in-gradient", step(step.constants(weight_decay=0.0), grad=coupled)
    yield from _narrowed(step, right)
    yield from _left_out(step, right)
    for order in ORDERS.values():
        if order != step.order:
            yield "other-order", step(order=order)


def _named(p: Array, m: Array, v: Array) -> Arrays:
    return dict(zip(NAMES, (float32(p), float32(m), float32(v)), strict=True))


def _wrong_moments(step: _Step, k: StepConstants) -> Iterator[Hypothesis]:
    g, m, v = step.g, step.m, step.v
    first, second = k.beta1 * m + k.weight1 * g, k.beta2 * v + k.weight2 * (g * g)
    yield "first-moment-interpolated", step(k, moments=(m + k.weight1 * (g - m), second))
    yield (
        "square-associated-otherwise",
        step(k, moments=(first, k.beta2 * v + (k.weight2 * g) * g)),
    )
    yield "gradient-not-squared", step(k, moments=(first, k.beta2 * v + k.weight2 * np.abs(g)))


def _contracted(step: _Step, k: StepConstants) -> Iterator[Hypothesis]:
    """Every choice of multiplications and additions that a compiler may fuse."""
    p, g, m, v = step.p, step.g, step.m, step.v
    square = g * g
    firsts = (
        k.beta1 * m + k.weight1 * g,
        fma(k.beta1, m, k.weight1 * g),
        fma(k.weight1, g, k.beta1 * m),
    )
    seconds = (
        k.beta2 * v + k.weight2 * square,
        fma(k.beta2, v, k.weight2 * square),
        fma(k.weight2, square, k.beta2 * v),
    )
    decays = (p - k.decay * p, fma(-k.decay, p, p))
    for first, second, decay, last in product(range(3), range(3), range(2), range(2)):
        if not (first or second or decay or last):
            continue
        ratio = (firsts[first] / k.correction1) / (np.sqrt(seconds[second] / k.correction2) + k.eps)
        before = decays[decay]
        p2 = fma(-k.lr, ratio, before) if last else before - k.lr * ratio
        yield "fused-multiply-add", _named(p2, firsts[first], seconds[second])


def _constants(step: _Step) -> Iterator[tuple[str, StepConstants]]:
    numbers = step.numbers
    t, (b1, b2) = numbers["step"], numbers["betas"]
    k, one = step.constants(), F32(1)
    small1, small2 = one - F32(b1), one - F32(b2)
    for weights in (
        {"weight1": small1, "weight2": small2},
        {"weight1": small1},
        {"weight2": small2},
    ):
        yield "betas-from-float32", replace(k, **weights)
    yield "decay-in-float32", replace(k, decay=F32(numbers["lr"]) * F32(numbers["weight_decay"]))
    p1, p2 = power(b1, t), power(b2, t)
    for q1, q2 in (
        (_float32_power(b1, t), _float32_power(b2, t)),
        (F32(power(float(F32(b1)), t)), F32(power(float(F32(b2)), t))),
        (F32(p1), F32(p2)),
    ):
        c1, c2 = one - q1, one - q2
        narrow = replace(k, correction1=c1, correction2=c2)
        yield "corrections-in-float32", narrow
        yield "corrections-in-float32", replace(narrow, weight1=small1, weight2=small2)
    for other in (t - 1, t + 1):
        # NumPy's floats divide by zero, which the correction of step 0 is.
        o1, o2 = np.float64(power(b1, other)), np.float64(power(b2, other))
        for powers in ((o1, o2), (o1, p2), (p1, o2)):
            yield "step-off-by-one", step.constants(powers=powers)
    # A counter in bfloat16 sticks at 256, one in float16 at 2048; or the number is rounded.
    for count in (
        min(t, 256),
        min(t, 2048),
        *(int(np.nan_to_num(n(t), posinf=65504)) for n in NARROW),
    ):
        yield "step-in-16-bits", step.constants(powers=(power(b1, count), power(b2, count)))
    for without in ((0.0, 0.0), (0.0, p2), (p1, 0.0)):
        yield "bias-correction-missing", step.constants(powers=without)
    yield "betas-swapped", step.constants(betas=(b2, b1))
    yield "betas-swapped", replace(k, correction1=k.correction2, correction2=k.correction1)
    yield "decay-missing", step.constants(weight_decay=0.0)
    yield "decay-without-lr", replace(k, decay=F32(numbers["weight_decay"]))
    for eps in (1e-8, 1e-7, 1e-6, 1e-5, 1e-10, 1e-12):
        yield "wrong-eps", step.constants(eps=eps)


def _float32_power(beta: float, t: int) -> F32:
    return F32(np.power(F32(beta), F32(t)))


def _narrowed(step: _Step, right: Arrays) -> Iterator[Hypothesis]:
    """State, gradient or results in 16 bits, or without subnormals."""
    m, v = right["exp_avg"], right["exp_avg_sq"]
    for narrow in NARROW:
        for names in (("exp_avg",), ("exp_avg_sq",), ("exp_avg", "exp_avg_sq"), ("param",), NAMES):
            rounded = {name: narrow(right[name]) for name in names}
            yield "state-in-16-bits", {**right, **rounded}
        for moments in ((narrow(m), narrow(v)), (narrow(m), v), (m, narrow(v))):
            yield "state-in-16-bits", step(moments=moments)
        yield "input-in-16-bits", step(grad=narrow(step.g))
    yield "result-flushed", {name: flushed(array) for name, array in right.items()}
    yield "subnormal-inputs-flushed", step(grad=flushed(step.g))


def _left_out(step: _Step, right: Arrays) -> Iterator[Hypothesis]:
    """Elements or whole tensors that stay as they were."""
    before = {"param": step.p, "exp_avg": step.m, "exp_avg_sq": step.v}
    for name in NAMES:
        yield "output-not-written", {**right, name: before[name]}
    size = step.p.size
    for start in (*(size // vector * vector for vector in _TAILS), max(size - 1, 0)):
        place = np.arange(size).reshape(step.p.shape)
        yield (
            "tail-left-out",
            {name: np.where(place < start, right[name], before[name]) for name in NAMES},
        )
