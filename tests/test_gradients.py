"""The norm's tree against exact sums, its freedom of order, and the clip factor against torch."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8lab.emulation.adamw import adamw
from fp8lab.emulation.gradients import (
    LANES,
    LEAF,
    ROWS,
    clip_coefficient,
    gradient_norm,
    order_free_sum,
    square_sums,
)
from fp8lab.testing import assert_bits_equal
from fp8lab.testing.values import random_words, wide_floats


def gradient(seed: int, size: int, low: int = -30, high: int = 4) -> Any:
    return wide_floats(random_words(seed, size)[:, 1], low, high)


def slow_sum(terms: list[float]) -> float:
    """`order_free_sum` in Python's integers."""
    top = max(terms)
    if top == 0:
        return 0.0
    exponent = math.frexp(top)[1] - 1
    counted = [int(Fraction(term) * Fraction(2) ** (60 - exponent)) for term in terms]
    upper, lower = sum(c >> 30 for c in counted), sum(c & (2**30 - 1) for c in counted)
    return float((float(upper) * 2.0**30 + float(lower)) * 2.0 ** (exponent - 60))


def slow_leaves(grad: Any, inverse_scale: Any) -> list[float]:
    """The tree of a gradient, in Python's floats."""
    sums = []
    flat = [float(np.float32(x) * inverse_scale) for x in grad.reshape(-1)]
    for start in range(0, len(flat), LEAF):
        lanes = [0.0] * LANES
        for place, x in enumerate(flat[start : start + LEAF]):
            lanes[place % LANES] += x * x
        sums.append(slow_sum(lanes))
    return sums


@pytest.mark.parametrize("size", [1, 1000, LEAF, LEAF + 1, 2 * LEAF + 1500])
@pytest.mark.parametrize("inverse_scale", [1.0, 2.0**-16, 0.7])
def test_the_tree_is_the_contracts(size: int, inverse_scale: float) -> None:
    grad = gradient(size, size, -149, 60)
    scale = np.float32(inverse_scale)
    assert square_sums(grad, inverse_scale=scale).tolist() == slow_leaves(grad, scale)
    found = gradient_norm([grad], inverse_scale=inverse_scale)
    want = np.float32(math.sqrt(slow_sum([0.0, *slow_leaves(grad, scale)])))
    assert_bits_equal(found.norm, want)


def test_the_constants_of_the_tree() -> None:
    assert (LEAF, ROWS * LANES) == (16384, 16384)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=60), st.randoms())
def test_a_sum_of_squares_is_the_same_in_every_order(words: list[int], random: Any) -> None:
    values = np.array(words, np.uint32).view(np.float32).astype(np.float64)
    terms = np.where(np.isfinite(values), values, 0) ** 2
    shuffled = list(terms)
    random.shuffle(shuffled)
    assert order_free_sum(terms) == order_free_sum(np.array(shuffled)) == slow_sum(list(terms))


@given(seed=st.integers(0, 2**32 - 1), size=st.integers(1, 3000))
def test_the_sum_is_close_to_exact(seed: int, size: int) -> None:
    terms = gradient(seed, size, -149, 127).astype(np.float64) ** 2
    exact = sum(Fraction(float(term)) for term in terms)
    found = Fraction(float(order_free_sum(terms)))
    assert abs(found - exact) <= exact * (Fraction(size, 2**60) + Fraction(1, 2**52))


def test_neither_order_nor_grouping_nor_cutting_changes_a_bit() -> None:
    grads = [gradient(seed, size) for seed, size in enumerate((5, 70000, 0, 4096, 1, 40000))]
    whole = gradient_norm(grads)
    assert gradient_norm(grads[::-1]) == whole
    cut = [*np.split(grads[1], [LEAF, 3 * LEAF]), grads[0], *grads[2:]]
    assert gradient_norm(cut) == whole
    leaves = [square_sums(grad) for group in (grads[:2], grads[2:]) for grad in group]
    assert np.float32(np.sqrt(order_free_sum(np.concatenate(leaves)))) == whole.norm
    assert gradient_norm([grad.reshape(-1, 1) for grad in grads]) == whole


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_seen(dtype: Any, bad: float) -> None:
    grads = [np.ones(3, dtype), np.ones(LEAF + 5, dtype)]
    assert gradient_norm(grads).finite
    grads[1][-1] = bad
    found = gradient_norm(grads, max_norm=1.0)
    assert not found.finite
    assert np.isnan(found.norm) == np.isnan(bad)
    both = gradient_norm([*grads, np.array([np.nan], dtype)])
    assert np.isnan(both.norm)


def test_an_overflow_in_unscaling_is_seen() -> None:
    assert not gradient_norm([np.full(1, 1e30, np.float32)], inverse_scale=1e30).finite


def test_a_finite_gradient_whose_norm_leaves_float32() -> None:
    found = gradient_norm([np.full(4, 3e38, np.float32)], max_norm=1.0)
    assert found.finite
    assert np.isinf(found.norm)
    assert found.factor == 0


def test_of_nothing_the_norm_is_zero() -> None:
    found = gradient_norm([], max_norm=1.0)
    assert found.finite
    assert found.norm == 0
    assert found.factor == 1
    assert gradient_norm([np.zeros(0, np.float32)]).norm == 0


@given(
    norm=st.floats(0, width=32) | st.just(float("nan")),
    max_norm=st.floats(0, 1e30),
)
def test_the_clip_coefficient_is_torchs(norm: float, max_norm: float) -> None:
    theirs = torch.clamp(max_norm / (torch.tensor(norm) + 1e-6), max=1.0)
    assert_bits_equal(clip_coefficient(np.float32(norm), max_norm), theirs)


def test_clipping_is_close_to_torchs_clip_grad_norm() -> None:
    """torch rounds its norm another way; the result may be an ulp or two apart, not more."""
    grads = [gradient(seed, 5000) for seed in range(3)]
    params = [torch.nn.Parameter(torch.zeros(5000)) for _ in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = torch.from_numpy(grad.copy())
    norm = torch.nn.utils.clip_grad_norm_(params, 0.5)
    found = gradient_norm(grads, max_norm=0.5)
    assert abs(float(norm) - float(found.norm)) <= 4 * np.spacing(found.norm)
    assert params[0].grad is not None
    ours = grads[0] * found.factor
    assert np.allclose(ours, params[0].grad.numpy(), rtol=2.0**-20, atol=0)


def test_unscaled_once() -> None:
    """pytorch 94060: loss scale 65536, unscale, clip, then a step: equal to the unscaled run."""
    grads = [gradient(seed, 3000, -20, 0) for seed in range(2)]
    scaled = [grad * np.float32(65536) for grad in grads]
    plain = gradient_norm(grads, max_norm=1.0)
    unscaled = gradient_norm(scaled, inverse_scale=1 / 65536, max_norm=1.0)
    assert_bits_equal(unscaled.norm, plain.norm)
    assert plain.factor < 1, "clipping takes part"
    options: dict[str, Any] = {
        "step": 1,
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.1,
    }
    zero = np.zeros(3000, np.float32)
    for grad, raw in zip(grads, scaled, strict=True):
        want = adamw(zero, grad * plain.factor, zero, zero, **options)
        found = adamw(zero, raw * unscaled.factor, zero, zero, **options)
        for got, expected in zip(found, want, strict=True):
            assert_bits_equal(got, expected)


def test_bad_arguments_are_refused() -> None:
    one = np.ones(1, np.float32)
    with pytest.raises(TypeError, match="a gradient has dtype float64; accepted: float32, bfloat"):
        gradient_norm([np.ones(1)])
    for bad in (0.0, -1.0, float("nan"), float("inf"), 1e-60):
        with pytest.raises(ValueError, match=r"inverse_scale is .*; accepted: finite, above 0"):
            gradient_norm([one], inverse_scale=bad)
    with pytest.raises(
        ValueError, match=r"max_norm is -1.0; accepted: finite, at least 0, or None"
    ):
        gradient_norm([one], max_norm=-1.0)
