"""What lies around the sum in the oracle's matrix product: scales, bias, types, samples."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8lab.emulation.fused import fma
from fp8lab.emulation.matmul import (
    matmul,
    matmul_at,
    matmul_picked,
)
from fp8lab.formats import E4M3, E5M2, E8M0, Float8Format
from fp8lab.testing import assert_bits_equal
from fp8lab.testing.products import (
    operand_values,
)

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
Array = np.ndarray[Any, Any]


def codes(values: Any, fmt: Float8Format = E4M3) -> Array:
    return np.array(values, dtype=np.float32).astype(fmt.dtype)


def f32(values: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.array(values, dtype=np.float32)


@settings(max_examples=30)
@given(data=st.data())
def test_the_order_of_the_epilogue(data: st.DataObject) -> None:
    m, n, k = (data.draw(st.integers(1, size)) for size in (4, 5, 300))
    seed = data.draw(st.integers(0, 99))
    rng = np.random.default_rng(seed)
    a = operand_values(seed, (m, k), "float8_e4m3fn", "ordinary")
    b = operand_values(seed + 1, (k, n), "float8_e4m3fn", "ordinary")
    scale_a = rng.random((m, 1), np.float32)
    scale_b = rng.random((1, n), np.float32)
    bias = rng.standard_normal((n,), np.float32)
    got = matmul(a, b, inverse_scale_a=scale_a, inverse_scale_b=scale_b, bias=bias)
    one_each = m == n == 1
    result = matmul(a, b)
    scaled = result * (scale_a * scale_b) if one_each else (result * scale_b) * scale_a
    expected = scaled + bias
    assert_bits_equal(got, expected)
    narrow = matmul(
        a, b, inverse_scale_a=scale_a, inverse_scale_b=scale_b, bias=bias, out_dtype=BFLOAT16
    )
    assert_bits_equal(narrow, expected.astype(BFLOAT16))
    gradient = rng.standard_normal((m, n), np.float32)
    assert_bits_equal(matmul(a, b, bias=gradient), matmul(a, b) + gradient)


@pytest.mark.parametrize(("length", "rows", "columns"), [(128, 1, 128), (128, 1, 1), (32, 1, 1)])
def test_blocks_are_partials_fused_into_a_total(length: int, rows: int, columns: int) -> None:
    m, n, k = 5, 300, 330
    rng = np.random.default_rng(length + columns)
    a = operand_values(1, (m, k), "float8_e4m3fn", "ordinary")
    b = operand_values(2, (k, n), "float8_e5m2", "ordinary")
    blocks = -(-k // length)
    scale_a = rng.random((m, blocks), np.float32)
    scale_b = rng.random((blocks, -(-n // columns)), np.float32)
    got = matmul(a, b, inverse_scale_a=scale_a, inverse_scale_b=scale_b)
    wide = np.repeat(scale_b, columns, axis=1)[:, :n]
    total = np.zeros((m, n), np.float32)
    for block in range(blocks):
        part = slice(block * length, (block + 1) * length)
        partial, by_row = matmul(a[:, part], b[part]), scale_a[:, block : block + 1]
        if columns == 128:
            total = fma(partial, by_row * wide[block], total)
        else:
            total = fma(partial * by_row, wide[block][None], total)
    assert_bits_equal(got, total)


def test_square_blocks_of_a_and_one_scale_of_b() -> None:
    a = operand_values(3, (200, 256), "float8_e4m3fn", "ordinary")
    b = operand_values(4, (256, 4), "float8_e4m3fn", "ordinary")
    blocks = f32([[0.5, 3], [0.7, 0.1]])
    total = np.zeros((200, 4), np.float32)
    for block in range(2):
        part = slice(block * 128, (block + 1) * 128)
        factor = np.repeat(blocks[:, block] * np.float32(1.5), 128)[:200, None]
        total = fma(matmul(a[:, part], b[part]), factor, total)
    assert_bits_equal(matmul(a, b, inverse_scale_a=blocks, inverse_scale_b=1.5), total)


def test_mx_scales_are_decoded() -> None:
    a = operand_values(5, (3, 96), "float8_e4m3fn", "ordinary")
    b = operand_values(6, (96, 2), "float8_e4m3fn", "ordinary")
    exponents = np.array([[0, 127, 254], [128, 120, 126], [127, 127, 127]], np.uint8)
    values = np.ldexp(1.0, exponents.astype(int) - 127).astype(np.float32)
    got = matmul(a, b, inverse_scale_a=exponents.view(E8M0.dtype))
    assert_bits_equal(got, matmul(a, b, inverse_scale_a=values))
    assert np.isnan(
        matmul(a, b, inverse_scale_a=np.full((3, 3), 0xFF, np.uint8).view(E8M0.dtype))
    ).all()


def test_nan_and_infinity_in_bfloat16() -> None:
    a, b = codes([[np.nan], [1.0]], E5M2), codes([[np.inf, 1.0]], E5M2)
    got = matmul(a, b, out_dtype=BFLOAT16).view(np.uint16)
    assert got.tolist() == [[0x7FFF, 0x7FFF], [0x7F80, 0x3F80]]


@settings(max_examples=25)
@given(data=st.data())
def test_a_sample_is_a_part_of_the_whole(data: st.DataObject) -> None:
    m, n, k = 9, 150, 200
    rows = data.draw(st.lists(st.integers(0, m - 1), max_size=4))
    columns = data.draw(st.lists(st.integers(0, n - 1), max_size=4))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    a = operand_values(7, (m, k), "float8_e4m3fn", "ordinary")
    b = operand_values(8, (k, n), "float8_e4m3fn", "ordinary")
    by_shape: dict[str, dict[str, Any]] = {
        "none": {},
        "tensor": {"inverse_scale_a": 0.3},
        "rows": {"inverse_scale_a": rng.random((m, 1)), "inverse_scale_b": rng.random((1, n))},
        "blocks": {"inverse_scale_a": rng.random((m, 2)), "inverse_scale_b": rng.random((2, 2))},
        "squares": {"inverse_scale_a": rng.random((1, 2)), "inverse_scale_b": rng.random((2, n))},
        "mx": {"inverse_scale_a": rng.random((m, 7)), "inverse_scale_b": rng.random((7, n))},
    }
    options = dict(by_shape[data.draw(st.sampled_from(sorted(by_shape)))])
    if data.draw(st.booleans()):
        options["accumulator"] = rng.standard_normal((m, n), np.float32)
    if data.draw(st.booleans()):
        shape = data.draw(st.sampled_from([(n,), (m, n)]))
        options["bias"] = rng.standard_normal(shape, np.float32)
    part = np.ix_(rows, columns)
    expected = matmul(a, b, **options)[part]
    assert_bits_equal(matmul_at(a, b, rows, columns, **options), expected)
    # Of the rest of a and b nothing need be known.
    if "accumulator" in options:
        options["accumulator"] = options["accumulator"][part]
    if "bias" in options:
        own = options["bias"]
        options["bias"] = own[columns] if own.ndim == 1 else own[part]
    found = matmul_picked(a[rows], b[:, columns], rows, columns, (m, n), **options)
    assert_bits_equal(found, expected)


def test_threads_change_nothing() -> None:
    a = operand_values(9, (40, 96), "float8_e4m3fn", "ordinary")
    b = operand_values(10, (96, 700), "float8_e4m3fn", "exponents")
    assert_bits_equal(matmul(a, b, threads=3), matmul(a, b))


def test_the_height_of_a_tile_changes_nothing() -> None:
    """All rows at once, where there are few columns; few rows, where there are many."""
    a = operand_values(11, (40, 96), "float8_e4m3fn", "patterns")
    b = operand_values(12, (96, 1100), "float8_e4m3fn", "exponents")
    whole = matmul(a, b, promote_every=32)
    for columns in (slice(0, 3), slice(1000, 1100)):
        assert_bits_equal(matmul(a, b[:, columns], promote_every=32), whole[:, columns])
