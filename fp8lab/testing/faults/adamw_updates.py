"""Wrong ways from the right moments to the new parameter, in AdamW's order "plain"."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fp8lab.emulation.adamw_orders import StepConstants

Array = npt.NDArray[Any]
_ONE = np.float32(1)


class Given(NamedTuple):
    """What a step was given: parameter, gradient, moments, and the weight decay."""

    p: Array
    g: Array
    m: Array
    v: Array
    weight_decay: float


def wrong_updates(
    given: Given, m: Array, v: Array, k: StepConstants, lr: float
) -> Iterator[tuple[str, Array]]:
    """The new parameter by a wrong computation.

    Args:
        given: What the step was given.
        m, v: The new moments.
        k: The step's constants.
        lr: The learning rate.
    """
    p, weight_decay = given.p, np.float32(given.weight_decay)
    decayed, corrected = p - k.decay * p, v / k.correction2
    root = np.sqrt(corrected)
    mean, denominator = m / k.correction1, root + k.eps
    ratio = mean / denominator
    step = k.lr * ratio

    after = p - step
    yield "decay-after-update", after - k.decay * after
    yield "decay-after-update", after * np.float32(1 - lr * given.weight_decay)
    yield "decay-of-old-parameter", after - k.decay * p
    for other in (
        np.sqrt(corrected + k.eps),
        np.sqrt(corrected + k.eps * k.eps),
        np.sqrt((v + k.eps) / k.correction2),
    ):
        yield "eps-inside-root", decayed - k.lr * (mean / other)
    before = (np.sqrt(v) + k.eps) / np.sqrt(k.correction2)
    yield "eps-before-correction", decayed - k.lr * (mean / before)
    yield "eps-missing", decayed - k.lr * (mean / root)
    yield "eps-as-maximum", decayed - k.lr * (mean / np.maximum(root, k.eps))
    for other in _approximate_roots(corrected, root):
        yield "root-approximate", decayed - k.lr * (mean / (other + k.eps))
    yield "root-missing", decayed - k.lr * (mean / (corrected + k.eps))
    yield from _reciprocals(decayed, m, v, mean, denominator, k)
    for numerator in (k.lr * mean, (k.lr / k.correction1) * m):
        yield "lr-multiplied-early", decayed - numerator / denominator
    yield "lr-multiplied-early", decayed - (k.lr / k.correction1) * (m / denominator)
    old_root = np.sqrt(given.v / k.correction2) + k.eps
    old_mean = given.m / k.correction1
    for other in (old_mean / denominator, mean / old_root, old_mean / old_root):
        yield "old-moments-used", decayed - k.lr * other
    yield "gradient-for-moment", decayed - k.lr * ((given.g / k.correction1) / denominator)
    yield "gradient-for-moment", decayed - k.lr * (given.g / denominator)
    yield "update-sign", decayed + step
    yield "decay-sign", (p + k.decay * p) - step
    yield "decay-without-lr", (p - weight_decay * p) - step
    yield "decay-inside-update", p - k.lr * (ratio + weight_decay * p)


def _approximate_roots(corrected: Array, root: Array) -> Iterator[Array]:
    product = corrected * (_ONE / root)
    yield np.where(corrected > 0, product, root)
    yield product
    yield _ONE / (_ONE / root)


def _reciprocals(
    decayed: Array, m: Array, v: Array, mean: Array, denominator: Array, k: StepConstants
) -> Iterator[tuple[str, Array]]:
    """Divisions done as multiplications: those by the corrections, by the denominator, by all."""
    near_mean = m * (_ONE / k.correction1)
    near = np.sqrt(v * (_ONE / k.correction2)) + k.eps
    for update in (
        near_mean / near,
        near_mean / denominator,
        mean / near,
        mean * (_ONE / denominator),
        near_mean * (_ONE / denominator),
        near_mean * (_ONE / near),
    ):
        yield "division-by-reciprocal", decayed - k.lr * update
