"""The oracle's AdamW against the contract, one element at a time."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from fp8lab.emulation.adamw import adamw
from fp8lab.testing import AdamWCase, adamw_states, assert_bits_equal

SETTINGS: dict[str, Any] = {
    "step": 1,
    "lr": 1e-3,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "weight_decay": 0.1,
}


def one_element(p: Any, g: Any, m: Any, v: Any, case: AdamWCase) -> tuple[Any, Any, Any]:
    """The contract, written once more with a rounding after each operation.

    float64 operations on float32 values, rounded to float32, are float32 operations: 53 bits are at
    least twice 24 and two more (Figueroa, 1995).
    """

    def r(value: Any) -> Any:
        return np.float64(np.float32(value))

    p, g, m, v = (np.float64(value) for value in (p, g, m, v))
    beta1, beta2 = case.betas
    b1, nb1, b2, nb2 = r(beta1), r(1 - beta1), r(beta2), r(1 - beta2)
    lr, decay, eps = r(case.lr), r(case.lr * case.weight_decay), r(case.eps)
    c1, c2 = r(1 - beta1**case.step), r(1 - beta2**case.step)
    p = r(p - r(decay * p))
    m = r(r(b1 * m) + r(nb1 * g))
    v = r(r(b2 * v) + r(nb2 * r(g * g)))
    denominator = r(r(np.sqrt(r(v / c2))) + eps)
    p = r(p - r(lr * r(r(m / c1) / denominator)))
    return np.float32(p), np.float32(m), np.float32(v)


@given(adamw_states())
def test_each_operation_is_rounded_in_the_order_of_the_contract(case: AdamWCase) -> None:
    found = adamw(*case.tensors, **case.options)
    with np.errstate(all="ignore"):
        rows = [one_element(*row, case) for row in zip(*case.tensors, strict=True)]
    for place, tensor in enumerate(found):
        assert_bits_equal(tensor, np.array([row[place] for row in rows], np.float32))


def test_inputs_are_not_changed() -> None:
    tensors = [np.full(3, value, np.float32) for value in (1, 2, 3, 4)]
    adamw(*tensors, **SETTINGS)
    assert [float(t[0]) for t in tensors] == [1, 2, 3, 4]


def test_zero_gradients_and_states_only_decay() -> None:
    zero = np.zeros(4, np.float32)
    p, m, v = adamw(np.ones(4, np.float32), zero, zero, zero, **SETTINGS)
    assert_bits_equal(p, np.full(4, np.float32(1) - np.float32(1e-4), np.float32))
    assert not m.any()
    assert not v.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": 0}, "step is 0; accepted: 1 and up"),
        ({"lr": -1.0}, "lr is -1.0; accepted: finite, at least 0"),
        ({"lr": float("nan")}, "lr is nan; accepted"),
        ({"eps": float("inf")}, "eps is inf; accepted"),
        ({"betas": (1.0, 0.9)}, "beta1 is 1.0; accepted: at least 0 and below 1"),
        ({"betas": (0.9, -0.1)}, "beta2 is -0.1; accepted"),
        ({"betas": (0.9,)}, "betas is (0.9,); accepted: two numbers, at least 0 and below 1"),
        ({"order": "adam"}, "unknown order 'adam'; accepted: plain, torch"),
    ],
)
def test_bad_numbers_are_refused(change: dict[str, Any], message: str) -> None:
    tensors = [np.ones(2, np.float32)] * 4
    with pytest.raises(ValueError, match=re.escape(message)):
        adamw(*tensors, **(SETTINGS | change))


def test_bad_tensors_are_refused() -> None:
    one = np.ones(2, np.float32)
    with pytest.raises(TypeError, match=r"step is 1.5; accepted: an integer, 1 and up"):
        adamw(one, one, one, one, **(SETTINGS | {"step": 1.5}))
    with pytest.raises(TypeError, match="grad has dtype float64; accepted: float32"):
        adamw(one, one.astype(np.float64), one, one, **SETTINGS)
    with pytest.raises(ValueError, match=r"exp_avg has shape \(3,\); param has \(2,\)"):
        adamw(one, one, np.ones(3, np.float32), one, **SETTINGS)
