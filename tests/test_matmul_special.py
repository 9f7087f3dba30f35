"""Special values, empty sums, and sums free of order in the oracle's matrix product."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8lab.emulation.matmul import (
    HOPPER_FP8,
    HOPPER_FP8_F16,
    HOPPER_FP8_VIA_F16,
    IEEE_FLOAT32,
    TENSOR_CORES,
    TensorCore,
    matmul,
)
from fp8lab.formats import E4M3, E5M2, Float8Format
from fp8lab.testing import assert_bits_equal
from fp8lab.testing.products import (
    operand_values,
    order_free,
    order_free_products,
)

Array = np.ndarray[Any, Any]


def codes(values: Any, fmt: Float8Format = E4M3) -> Array:
    return np.array(values, dtype=np.float32).astype(fmt.dtype)


def f32(values: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.array(values, dtype=np.float32)


def f16(values: Any) -> np.ndarray[Any, np.dtype[np.float16]]:
    return np.array(values, dtype=np.float16)


@pytest.mark.parametrize("core", [HOPPER_FP8, HOPPER_FP8_VIA_F16, HOPPER_FP8_F16])
@pytest.mark.parametrize("promote", [None, 32])
def test_special_values(core: TensorCore, promote: int | None) -> None:
    inf, nan = np.inf, np.nan
    cases = [
        ([inf, 1], [1, 1], inf),
        ([inf, 1], [-2, 1], -inf),
        ([inf, 1], [0, 1], nan),
        ([inf, inf], [1, -1], nan),
        ([nan, 1], [0, 1], nan),
        ([inf, nan], [1, 1], nan),
        ([-0.0, 1], [1, -0.0], 0.0),
        ([1, -1], [1, 1], 0.0),
    ]
    for left, right, expected in cases:
        a, b = codes([left], E5M2), codes(right, E5M2)[:, None]
        got = matmul(a, b, core=core, promote_every=promote)
        assert_bits_equal(got, f32([[expected]]))
        if np.isnan(expected):
            assert got.view(np.uint32).item() == 0x7FFFFFFF


def test_infinities_far_apart_meet_in_the_sum() -> None:
    a = np.zeros((1, 200), np.float32)
    a[0, 3], a[0, 190] = np.inf, -np.inf
    ones = codes(np.ones((200, 1)))
    for promote in (None, 32, 128):
        assert np.isnan(matmul(codes(a, E5M2), ones, promote_every=promote)).all()
    a[0, 190] = 5
    assert matmul(codes(a, E5M2), ones, promote_every=128).item() == np.inf


def test_special_accumulators() -> None:
    a, b = codes([[1.0]]), codes([[2.0]])
    for start, expected in [(np.inf, np.inf), (-np.inf, -np.inf), (np.nan, np.nan), (-0.0, 2.0)]:
        c = f32([[start]])
        assert_bits_equal(matmul(a, b, accumulator=c), f32([[expected]]))
    inf = codes([[np.inf]], E5M2)
    assert np.isnan(matmul(inf, a, accumulator=f32([[-np.inf]]))).all()


def test_zero_operands_keep_14_bits_of_the_accumulator() -> None:
    patterns = np.arange(0, 1 << 32, 99991, dtype=np.uint32)
    c = patterns.view(np.float32)[None, :]
    got = matmul(codes(np.zeros((1, 32))), codes(np.zeros((32, c.shape[1]))), accumulator=c)
    kept = patterns & np.uint32(0xFFFFFC00)
    kept[kept == 0x80000000] = 0
    kept[np.isnan(c[0])] = 0x7FFFFFFF
    assert_bits_equal(got[0].view(np.uint32), kept)


def test_float16_accumulators_round_and_overflow() -> None:
    a, b = codes([[1.0, 1.0]]), codes([[1.0], [2.0**-9]])
    run = partial(matmul, core=HOPPER_FP8_F16)
    assert run(a, b, accumulator=f16([[2048]])).item() == 2048.0
    assert run(a, b, accumulator=f16([[2050]])).item() == 2052.0  # a tie, to even
    big = codes([[448.0]])
    assert run(big, codes([[448.0]])).item() == np.inf
    assert run(big, codes([[128.0]])).item() == 57344.0


def test_no_k_keeps_the_accumulator() -> None:
    empty_a, empty_b = np.empty((2, 0), E4M3.dtype), np.empty((0, 3), E4M3.dtype)
    assert_bits_equal(matmul(empty_a, empty_b), np.zeros((2, 3), np.float32))
    c = np.full((2, 3), 1 + 2.0**-23, np.float32)
    assert_bits_equal(matmul(empty_a, empty_b, accumulator=c), c)
    scaled = matmul(empty_a, empty_b, inverse_scale_a=np.ones((2, 0)), bias=np.ones(3, np.float32))
    assert_bits_equal(scaled, np.ones((2, 3), np.float32))
    assert matmul(np.empty((0, 5), E4M3.dtype), np.empty((5, 3), E4M3.dtype)).shape == (0, 3)
    assert matmul(np.empty((2, 5), E4M3.dtype), np.empty((5, 0), E4M3.dtype)).shape == (2, 0)


@given(k=st.integers(1, 70), more=st.integers(1, 64), seed=st.integers(0, 99))
def test_zeros_at_the_end_of_k_change_nothing(k: int, more: int, seed: int) -> None:
    a = operand_values(seed, (2, k), "float8_e4m3fn", "exponents")
    b = operand_values(seed + 1, (k, 2), "float8_e5m2", "ordinary")
    for core in (HOPPER_FP8, HOPPER_FP8_VIA_F16):
        for promote in (None, 32):
            run = partial(matmul, core=core, promote_every=promote)
            long = run(np.pad(a, ((0, 0), (0, more))), np.pad(b, ((0, more), (0, 0))))
            assert_bits_equal(long, run(a, b))


@settings(max_examples=25)
@given(
    product=order_free_products(
        ("float8_e4m3fn", "float8_e5m2"),
        sizes=(st.integers(0, 4), st.integers(0, 4), st.integers(0, 300)),
    )
)
def test_order_free_products_are_exact_in_every_order(product: Any) -> None:
    exact = product.a.astype(np.float64) @ product.b.astype(np.float64)
    expected = (exact + 0.0).astype(np.float32)
    for core in (HOPPER_FP8, HOPPER_FP8_VIA_F16, IEEE_FLOAT32, TENSOR_CORES["ada_fp8"]):
        assert_bits_equal(matmul(product.a, product.b, core=core), expected)
    assert_bits_equal(matmul(product.a, product.b, promote_every=32), expected)


def test_order_free_refuses_what_it_cannot_prove() -> None:
    with pytest.raises(ValueError, match="add up to"):
        order_free(codes([[448.0, 0.5]]), codes([[448.0], [0.5]]))
    # 2**-9 is subnormal: it counts as exponent -6, and with 2**8 a core cuts at 2**(2 - 13).
    tiny = codes([[2.0**-9]])
    with pytest.raises(ValueError, match="reach exponent"):
        order_free(np.hstack([tiny, tiny]), codes([[256.0], [2.0**-4]]))
