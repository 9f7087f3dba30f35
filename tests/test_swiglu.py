"""SwiGLU's contract: against a scalar form operation by operation, and against exact numbers."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8lab.emulation.casting import quantize
from fp8lab.emulation.swiglu import sigmoid, swiglu, swiglu_grad
from fp8lab.formats import BFLOAT16, FLOAT16
from fp8lab.swiglu_constants import EXP, HIGHEST, LN2_HIGH, LN2_LOW, LOG2_E, LOWEST, SHIFTER
from fp8lab.testing import assert_bits_equal
from fp8lab.testing.values import special_values

F = np.float32
FLOATS = st.integers(0, 2**32 - 1).map(lambda word: np.uint32(word).view(np.float32))
GATES = st.one_of(FLOATS, st.floats(-100, 40, width=32).map(F))
NARROW = {BFLOAT16: ml_dtypes.bfloat16, FLOAT16: np.float16}


def scalar_fma(a: Any, b: Any, c: Any) -> np.float32:
    """a*b + c of finite numbers below 2**127, as an exact fraction rounded once."""
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    if not exact:
        return F(0) if not float(a) * float(b) == float(c) == 0 else F(a * b + c)
    _, exponent = math.frexp(float(exact))
    quantum = Fraction(2) ** max(exponent - 24, -149)
    return F(float(round(exact / quantum) * quantum))  # round: ties to even


def scalar_sigmoid(gate: np.float32) -> tuple[np.float32, ...]:
    """The gate, clamped from below and on both sides; exp(-x); the sigmoid."""
    raised = F(max(gate, F(LOWEST)))
    x = F(min(raised, F(HIGHEST)))
    n = round(Fraction(float(scalar_fma(x, -LOG2_E, SHIFTER))) - Fraction(SHIFTER))
    y = scalar_fma(n, -LN2_LOW, scalar_fma(n, -LN2_HIGH, -x))
    p = F(EXP[0])
    for coefficient in (*EXP[1:], 1.0, 1.0):
        p = scalar_fma(p, y, coefficient)
    exp = F(math.ldexp(float(p), n))
    return raised, x, exp, F(1) / (F(1) + exp)


@given(GATES, FLOATS, FLOATS)
@settings(max_examples=300)
def test_every_operation_is_the_contracts(gate: Any, up: Any, dh: Any) -> None:
    if np.isnan(gate):
        return
    with np.errstate(all="ignore"):
        raised, x, exp, s = scalar_sigmoid(gate)
        silu = raised * s
        slope = scalar_fma(x * s, exp * s, s)
        expected = silu * up, dh * up * slope, dh * silu
    one = [np.array([value]) for value in (dh, gate, up)]
    found = swiglu(one[1], one[2]), *swiglu_grad(*one)
    for actual, value in zip(found, expected, strict=True):
        assert_bits_equal(actual, np.array([value]))


def gates() -> np.ndarray[Any, np.dtype[np.float32]]:
    """Every bfloat16 in the sigmoid's range, and as many random float32."""
    words = np.arange(1 << 16, dtype=np.uint32) << 16
    every = words.astype(np.uint32).view(np.float32)
    every = every[(every >= LOWEST) & np.isfinite(every)]
    return np.concatenate([every, np.random.default_rng(0).uniform(LOWEST, 30, 200_000).astype(F)])


def test_sigmoid_is_within_its_bound() -> None:
    x = gates()
    exact = 1 / (1 + np.exp(-x.astype(np.longdouble)))
    unit = np.spacing(exact.astype(np.float32)).astype(np.longdouble)
    error = np.abs(sigmoid(x) - exact) / unit
    assert 1.5 < float(error.max()) < 2.5


def test_gradients_are_those_of_the_function() -> None:
    x = gates().astype(np.float64)
    s = 1 / (1 + np.exp(-x))
    exact = s * (1 + x * (1 - s))
    ones = np.ones(x.shape, F)
    dgate, dup = swiglu_grad(ones, x.astype(F), ones)
    assert np.all(np.abs(dgate - exact) <= 3e-7 * s * (1 + np.abs(x) * (1 - s)))
    assert np.all(np.abs(dup - x * s) <= 3e-7 * np.abs(x * s))


def test_special_values() -> None:
    infinity, nan = np.inf, np.nan
    tiny = float(F(LOWEST) * sigmoid(LOWEST))
    assert -1.5e-36 < tiny < -1.4e-36
    table = [  # gate, up, result; dgate and dup for dh = 1
        (0.0, 2.0, 0.0, 1.0, 0.0),
        (-0.0, 2.0, -0.0, 1.0, -0.0),
        (0.0, -2.0, -0.0, -1.0, 0.0),
        (infinity, 2.0, infinity, 2.0, infinity),
        (-infinity, 2.0, 2 * tiny, 2 * tiny, tiny),
        (-1e30, -1.0, -tiny, -tiny, tiny),
        (1e30, 2.0, 2e30, 2.0, 1e30),
        (1.0, infinity, infinity, infinity, None),
        (-1.0, infinity, -infinity, infinity, None),
        (0.0, infinity, nan, infinity, 0.0),
        (nan, 1.0, nan, nan, nan),
        (1.0, nan, nan, nan, None),
    ]
    for gate, up, result, dgate, dup in table:
        one = [np.array([value], F) for value in (1.0, gate, up)]
        found = swiglu(one[1], one[2]), *swiglu_grad(*one)
        for actual, value in zip(found, (result, dgate, dup), strict=True):
            if value is not None:
                np.testing.assert_allclose(actual, [value], rtol=0.02)
                assert np.isnan(value) or np.signbit(actual[0]) == np.signbit(value), (gate, up)


@pytest.mark.parametrize("fmt", [BFLOAT16, FLOAT16], ids=lambda fmt: fmt.name)
def test_results_are_rounded_once(fmt: Any) -> None:
    dtype = NARROW[fmt]
    special = special_values(dtype)
    gate = np.repeat(special, special.size)
    up = np.tile(special, special.size)
    dh = up[::-1].copy()
    wide = [array.astype(F) for array in (dh, gate, up)]
    expected = swiglu(wide[1], wide[2]), *swiglu_grad(*wide)
    found = swiglu(gate, up), *swiglu_grad(dh, gate, up)
    for actual, values in zip(found, expected, strict=True):
        assert actual.dtype == dtype
        assert_bits_equal(actual, quantize(values, fmt, overflow="ieee"))
        assert set(actual[np.isnan(actual)].view(np.uint16)) == {0x7FFF}


def test_shapes_and_what_is_refused() -> None:
    generator = np.random.default_rng(1)
    gate, up = generator.normal(0, 4, (2, 3, 7001)).astype(F)
    whole = swiglu(gate, up)  # more than one piece
    assert_bits_equal(whole[:, 5000:], swiglu(gate[:, 5000:], up[:, 5000:]))
    assert swiglu(gate[:0], up[:0]).shape == (0, 7001)
    with pytest.raises(TypeError, match="up has dtype float64; accepted: float32"):
        swiglu(gate, up.astype(np.float64))
    with pytest.raises(TypeError, match="up has dtype float16; accepted here: float32"):
        swiglu(gate, up.astype(np.float16))
    with pytest.raises(ValueError, match="gate has shape"):
        swiglu_grad(up[:2], gate, up)
