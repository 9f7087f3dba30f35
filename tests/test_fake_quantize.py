"""Fake quantisation and its straight-through derivative."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra import numpy as hnp

from fp8lab.emulation.casting import dequantize, quantize
from fp8lab.emulation.scaling import (
    amax,
    dequantize_blocks,
    dequantize_mx,
    expand_blocks,
    fake_quantize,
    fake_quantize_grad,
    inverse_scale,
    quantize_blocks,
    quantize_mx,
    scale_from_amax,
)
from fp8lab.formats import E4M3, E5M2, Float8Format
from fp8lab.testing import assert_bits_equal

Array = np.ndarray[Any, Any]

MATRICES = hnp.arrays(np.float32, st.tuples(st.integers(0, 5), st.integers(0, 70)))
FORMATS = st.sampled_from([E4M3, E5M2])


@given(MATRICES, FORMATS, st.integers(0, 3), st.booleans())
def test_it_is_quantize_then_dequantize(
    x: Array, fmt: Float8Format, margin: int, power_of_two: bool
) -> None:
    options: dict[str, Any] = {"margin": margin, "power_of_two": power_of_two}
    scale = scale_from_amax(amax(x), fmt, **options)
    expected = dequantize(quantize(x, fmt, scale=scale), inverse_scale=inverse_scale(scale))
    assert_bits_equal(fake_quantize(x, fmt, **options), expected)
    for block in ((1, 32), (None, 1)):
        expected = dequantize_blocks(*quantize_blocks(x, fmt, block=block, **options), block=block)
        assert_bits_equal(fake_quantize(x, fmt, block=block, **options), expected)
    for rounding in ("floor", "up"):
        expected = dequantize_mx(*quantize_mx(x, fmt, scale_rounding=rounding))
        assert_bits_equal(fake_quantize(x, fmt, scale="mx", scale_rounding=rounding), expected)


@given(MATRICES, FORMATS, st.floats(2.0**-126, 2.0**127, width=32))
def test_with_a_scale_of_ones_own(x: Array, fmt: Float8Format, scale: float) -> None:
    expected = dequantize(quantize(x, fmt, scale=scale), inverse_scale=inverse_scale(scale))
    assert_bits_equal(fake_quantize(x, fmt, scale=scale), expected)


@given(hnp.arrays(np.float32, 20), FORMATS)
def test_a_second_time_changes_nothing(x: Array, fmt: Float8Format) -> None:
    once = fake_quantize(x, fmt, scale=1.0)
    assert_bits_equal(fake_quantize(once, fmt, scale=1.0), once)


@given(MATRICES, FORMATS, st.floats(2.0**-20, 2.0**20, width=32))
def test_the_gradient_passes_but_for_what_a_clamp_would_stop(
    x: Array, fmt: Float8Format, scale: float
) -> None:
    grad = np.arange(x.size, dtype=np.float32).reshape(x.shape) - 7
    assert_bits_equal(fake_quantize_grad(x, grad, fmt, scale=scale), grad)
    found = fake_quantize_grad(x, grad, fmt, scale=scale, clipped="zero")
    for place in np.ndindex(*x.shape):
        with np.errstate(all="ignore"):
            stopped = abs(x[place] * np.float32(scale)) > fmt.max_finite
        assert_bits_equal(found[place], np.float32(0) if stopped else grad[place])


def test_infinity_is_clipped_and_nan_is_not() -> None:
    x = np.array([np.inf, -np.inf, np.nan, 448, -449], np.float32)
    found = fake_quantize_grad(x, np.ones(5, np.float32), E4M3, scale=1.0, clipped="zero")
    assert found.tolist() == [0, 0, 1, 1, 0]


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_the_gradient_keeps_its_dtype_and_is_a_copy(dtype: Any) -> None:
    x = np.array([[1, 1000], [2, 3]], np.float32)
    grad = np.ones((2, 2), dtype)
    for clipped in ("pass", "zero"):
        found = fake_quantize_grad(x, grad, E4M3, scale=1.0, clipped=clipped)
        assert found.dtype == grad.dtype
        found[...] = 5
        assert (grad == 1).all()


def test_with_blocks_each_element_meets_the_scale_of_its_own() -> None:
    # The floor rule: the block's 2**9 - 1 is clipped at 448, the other block's is not.
    x = np.array([[511, 3, 256, 3]], np.float32)
    grad = np.ones((1, 4), np.float32)
    options: dict[str, Any] = {"scale": "mx", "block": (1, 2), "clipped": "zero"}
    assert fake_quantize_grad(x, grad, E4M3, **options).tolist() == [[0, 1, 1, 1]]
    up = fake_quantize_grad(x, grad, E4M3, scale_rounding="up", **options)
    assert up.tolist() == [[1, 1, 1, 1]]
    current = fake_quantize_grad(x, grad, E4M3, block=(1, 2), clipped="zero")
    assert current.shape == (1, 4)


@given(MATRICES)
def test_power_of_two_scales_made_from_x_clip_nothing(x: Array) -> None:
    x = np.nan_to_num(x, posinf=1, neginf=1)
    scale = scale_from_amax(amax(x, block=(1, 32)), E4M3, power_of_two=True)
    assert (np.abs(x * expand_blocks(scale, (1, 32), x.shape)) <= 448).all()
    grad = np.ones(x.shape, np.float32)
    found = fake_quantize_grad(x, grad, E4M3, block=(1, 32), power_of_two=True, clipped="zero")
    assert_bits_equal(found, grad)


def test_stochastic_rounding_passes_through() -> None:
    x = np.full((1, 64), 1.0625, np.float32)
    bits = np.arange(64, dtype=np.uint32).reshape(1, 64)
    found = fake_quantize(x, E4M3, scale=1.0, rounding="stochastic", random_bits=bits, bit_count=6)
    assert (found == 1.125).sum() == 32


X = np.ones((2, 32), np.float32)


@pytest.mark.parametrize(
    ("error", "arguments", "message"),
    [
        (ValueError, {"scale": 0.0}, "scale is 0.0; accepted"),
        (ValueError, {"scale": float("nan")}, "scale is nan; accepted"),
        (ValueError, {"scale": "delayed"}, "scale is 'delayed'; accepted: current, mx, or"),
        (ValueError, {"scale": 1.0, "block": (1, 32)}, "with a scale given; accepted: None"),
        (ValueError, {"scale": 1.0, "margin": 1}, "margin and power_of_two are for current"),
        (ValueError, {"scale": "mx", "power_of_two": True}, "margin and power_of_two are for"),
        (ValueError, {"scale_rounding": "up"}, "scale_rounding is for scale 'mx'"),
        (ValueError, {"margin": -1}, "margin is -1; accepted"),
        (ValueError, {"block": (0, 1)}, r"block is \(0, 1\); accepted"),
        (ValueError, {"scale": [1.0, 1.0, 1.0]}, "scale has shape"),
        (TypeError, {"fmt": "E4M3"}, "fmt is 'E4M3'; accepted"),
        (TypeError, {"x": X.astype(int)}, "x has dtype int64; accepted"),
    ],
)
def test_bad_input_is_refused(
    error: type[Exception], arguments: dict[str, Any], message: str
) -> None:
    given: dict[str, Any] = {"x": X, "fmt": E4M3} | arguments
    with pytest.raises(error, match=message):
        fake_quantize(**given)
    with pytest.raises(error, match=message):
        fake_quantize_grad(**given, grad=X, clipped="zero")


def test_bad_gradients_are_refused() -> None:
    with pytest.raises(ValueError, match=r"grad has shape \(2, 31\); x has \(2, 32\)"):
        fake_quantize_grad(X, X[:, 1:], E4M3)
    with pytest.raises(TypeError, match="grad has dtype int64"):
        fake_quantize_grad(X, X.astype(int), E4M3)
    with pytest.raises(ValueError, match="clipped is 'half'; accepted: pass, zero"):
        fake_quantize_grad(X, X, E4M3, clipped="half")
