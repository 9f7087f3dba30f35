"""The oracle's casts: its forms against each other and against ml_dtypes and gfloat's rules."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from fp8lab.emulation.casting import dequantize, quantize
from fp8lab.emulation.scalar import quantize_scalar
from fp8lab.formats import E4M3, E5M2, E8M0, FORMATS, Float8Format
from fp8lab.testing import assert_bits_equal

CASTS = [fmt for fmt in FORMATS.values() if fmt is not E8M0]
EVERY = pytest.mark.parametrize("fmt", CASTS, ids=lambda fmt: fmt.name)
POLICIES = pytest.mark.parametrize("overflow", ["saturate", "ieee"])
ROUNDINGS = pytest.mark.parametrize("rounding", ["nearest_even", "toward_zero"])

BFLOAT16 = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)


def midpoints_and_neighbours(fmt: Float8Format) -> npt.NDArray[np.float64]:
    """Every finite value, every midpoint between two (the overflow edge too), one ulp around."""
    values = [fmt.value_of_magnitude(code) for code in range(fmt.max_code + 1)]
    values.append(2 * values[-1] - values[-2])
    points = np.array(values)
    points = np.concatenate([points, (points[1:] + points[:-1]) / 2])
    for dtype in (np.float32, np.float64):
        near = points.astype(dtype)
        points = np.concatenate([points, np.nextafter(near, dtype(np.inf)), np.nextafter(near, -1)])
    return np.concatenate([points, -points])


def scalar_codes(x: npt.NDArray[Any], fmt: Float8Format, **options: Any) -> npt.NDArray[Any]:
    codes = [quantize_scalar(float(value), fmt, **options) for value in x.astype(np.float64)]
    return np.array(codes, dtype=np.uint8).view(fmt.dtype)


@EVERY
@POLICIES
def test_every_bfloat16_pattern_against_the_scalar_form(fmt: Float8Format, overflow: str) -> None:
    with np.errstate(invalid="ignore"):
        expected = scalar_codes(BFLOAT16, fmt, overflow=overflow)
    assert_bits_equal(quantize(BFLOAT16, fmt, overflow=overflow), expected, inputs=BFLOAT16)


@EVERY
def test_every_bfloat16_pattern_against_ml_dtypes(fmt: Float8Format) -> None:
    with np.errstate(invalid="ignore"):
        expected = BFLOAT16.astype(np.float32).astype(fmt.dtype)
    assert_bits_equal(quantize(BFLOAT16, fmt, overflow="ieee"), expected, inputs=BFLOAT16)


@EVERY
@POLICIES
@ROUNDINGS
def test_midpoints_and_their_neighbours(fmt: Float8Format, overflow: str, rounding: str) -> None:
    points = midpoints_and_neighbours(fmt)
    expected = scalar_codes(points, fmt, overflow=overflow, rounding=rounding)
    assert_bits_equal(quantize(points, fmt, overflow=overflow, rounding=rounding), expected)
    # The points that float32 holds, through the table; ml_dtypes as well where it has that rule.
    narrow = points[points == points.astype(np.float32)].astype(np.float32)
    found = quantize(narrow, fmt, overflow=overflow, rounding=rounding)
    assert_bits_equal(found, scalar_codes(narrow, fmt, overflow=overflow, rounding=rounding))
    if (overflow, rounding) == ("ieee", "nearest_even"):
        assert_bits_equal(found, narrow.astype(fmt.dtype), inputs=narrow)


@EVERY
@ROUNDINGS
def test_the_table_and_the_bits_agree_on_random_patterns(fmt: Float8Format, rounding: str) -> None:
    words = np.random.default_rng(0).integers(0, 1 << 32, 1 << 20, dtype=np.uint32)
    x = words.view(np.float32)
    with np.errstate(invalid="ignore"):
        wide = x.astype(np.float64)
    assert_bits_equal(quantize(x, fmt, rounding=rounding), quantize(wide, fmt, rounding=rounding))


@EVERY
@pytest.mark.parametrize("bit_count", [1, 7, 13, 32])
def test_stochastic_rounding_against_the_scalar_form(fmt: Float8Format, bit_count: int) -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal(5000) * 2.0 ** rng.integers(-40, 20, 5000)
    x[:5] = 0.0, -0.0, np.inf, -np.inf, np.nan
    words = rng.integers(0, 1 << 32, 5000, dtype=np.uint32)
    found = quantize(x, fmt, rounding="stochastic", random_bits=words, bit_count=bit_count)
    expected = [
        quantize_scalar(
            float(value),
            fmt,
            rounding="stochastic",
            random_bits=int(word) & ((1 << bit_count) - 1),
            bit_count=bit_count,
        )
        for value, word in zip(x, words, strict=True)
    ]
    assert_bits_equal(found, np.array(expected, np.uint8).view(fmt.dtype), inputs=x)


@pytest.mark.parametrize(
    ("value", "fmt", "code"),
    [
        (np.uint32(0x42FC7A2A).view(np.float32), E4M3, 0x70),  # triton 8322: the carry
        (np.float32(1.97), E4M3, 0x40),  # triton 8322
        (np.float32(1.97), E5M2, 0x40),
        (np.uint32(0x3F880001).view(np.float32), E4M3, 0x39),  # triton 11753: one rounding
        (np.float64(float.fromhex("0x1.efffffffffffep-1")), E4M3, 0x37),  # ml_dtypes, torch
        (np.float32(464), E4M3, 0x7E),  # ml_dtypes 260: a tie to even, under every policy
        (np.float32(0.0009765625), E4M3, 0x00),  # half of the smallest subnormal: a tie to even
        (np.float32(-0.0009765625), E4M3, 0x80),
    ],
)
@POLICIES
def test_reported_faults(value: Any, fmt: Float8Format, code: int, overflow: str) -> None:
    assert int(quantize(value, fmt, overflow=overflow).view(np.uint8)) == code


def test_special_values_by_policy() -> None:
    x = np.array([np.inf, -np.inf, 1e9, -1e9, np.nan, -np.nan, -0.0], np.float32)
    x[5] = np.copysign(np.nan, np.float32(-1))

    def codes(fmt: Float8Format, overflow: str) -> list[int]:
        found: list[int] = quantize(x, fmt, overflow=overflow).view(np.uint8).tolist()
        return found

    assert codes(E4M3, "saturate") == [0x7E, 0xFE, 0x7E, 0xFE, 0x7F, 0x7F, 0x80]
    assert codes(E5M2, "saturate") == [0x7B, 0xFB, 0x7B, 0xFB, 0x7F, 0x7F, 0x80]
    assert codes(E4M3, "ieee") == [0x7F, 0xFF, 0x7F, 0xFF, 0x7F, 0xFF, 0x80]
    assert codes(E5M2, "ieee") == [0x7C, 0xFC, 0x7C, 0xFC, 0x7E, 0xFE, 0x80]


def test_a_scale_is_rounded_and_multiplied_in_float32_first() -> None:
    x = np.random.default_rng(2).standard_normal(1000).astype(np.float32)
    scaled = x * np.float32(0.1)
    assert_bits_equal(quantize(x, E4M3, scale=0.1), quantize(scaled, E4M3))
    assert_bits_equal(
        quantize(x.astype(ml_dtypes.bfloat16), E4M3, scale=0.1),
        quantize(x.astype(ml_dtypes.bfloat16).astype(np.float32) * np.float32(0.1), E4M3),
    )
    wide = x.astype(np.float64) * 0.1
    assert_bits_equal(quantize(x.astype(np.float64), E4M3, scale=0.1), quantize(wide, E4M3))
    rows = np.array([[2], [4]], np.float32)
    both = quantize(np.stack([x, x]), E4M3, scale=rows)
    assert_bits_equal(both[1], quantize(x, E4M3, scale=4.0))


def test_shapes_strides_and_nothing() -> None:
    x = np.random.default_rng(3).standard_normal((6, 8)).astype(np.float32)
    assert_bits_equal(quantize(x.T[::2], E4M3), quantize(np.ascontiguousarray(x.T[::2]), E4M3))
    assert quantize(np.zeros((3, 0), np.float32), E5M2).shape == (3, 0)
    assert quantize(np.float32(1), E5M2).shape == ()
    x.flags.writeable = False
    quantize(x, E4M3)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda fmt: fmt.name)
def test_every_code_decodes_as_in_ml_dtypes_and_comes_back(fmt: Float8Format) -> None:
    codes = np.arange(256, dtype=np.uint8).view(fmt.dtype)
    values = dequantize(codes)
    assert_bits_equal(values, codes.astype(np.float32))
    if fmt is not E8M0:
        again = quantize(values, fmt, overflow="ieee")
        numbers = ~np.isnan(values)
        assert_bits_equal(again[numbers], codes[numbers])
        assert np.isnan(dequantize(again[~numbers])).all()


def test_dequantize_rounds_the_product_once() -> None:
    codes = np.arange(0x7F, dtype=np.uint8).view(E4M3.dtype)
    expected = codes.astype(np.float32) * np.float32(0.3)
    assert_bits_equal(dequantize(codes, inverse_scale=0.3), expected)


@pytest.mark.parametrize(
    ("x", "options", "error", "message"),
    [
        (np.array([1], np.int32), {}, TypeError, "x has dtype int32; accepted: float64, float32"),
        (
            np.array([1], np.float32),
            {"fmt": "E4M3"},
            TypeError,
            "fmt is 'E4M3'; accepted: E4M3, E5M2",
        ),
        (np.array([1], np.float32), {"fmt": E8M0}, ValueError, "E8M0 is a format of scales"),
        (
            np.array([1], np.float32),
            {"rounding": "nearest"},
            ValueError,
            "unknown rounding 'nearest'",
        ),
        (
            np.array([1], np.float32),
            {"overflow": "wrap"},
            ValueError,
            "unknown overflow policy 'wrap'",
        ),
        (
            np.array([1], np.float32),
            {"scale": 0.0},
            ValueError,
            "scale is 0.0; accepted: finite values",
        ),
        (
            np.array([1], np.float32),
            {"scale": -1.0},
            ValueError,
            "accepted: finite values above zero",
        ),
        (
            np.array([1], np.float32),
            {"scale": np.nan},
            ValueError,
            "accepted: finite values above zero",
        ),
        (
            np.array([1], np.float32),
            {"scale": 1e-60},
            ValueError,
            "accepted: finite values above zero",
        ),
        (np.array([1], np.float32), {"scale": [1.0, 2.0]}, ValueError, "scale has shape"),
        (np.array([1], np.float32), {"rounding": "stochastic"}, ValueError, "needs random_bits"),
        (
            np.array([1], np.float32),
            {"random_bits": np.array([1], np.uint32)},
            ValueError,
            "only stochastic uses",
        ),
        (
            np.array([1], np.float32),
            {"rounding": "stochastic", "random_bits": np.array([1, 2], np.uint32)},
            ValueError,
            "random_bits have shape",
        ),
        (
            np.array([1], np.float32),
            {"rounding": "stochastic", "random_bits": np.array([1], np.int32)},
            TypeError,
            "accepted: unsigned integers",
        ),
        (
            np.array([1], np.float32),
            {"rounding": "stochastic", "random_bits": np.array([1], np.uint32), "bit_count": 33},
            ValueError,
            "bit_count is 33; accepted: 1 to 32",
        ),
    ],
)
def test_bad_input_is_refused(
    x: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        quantize(x, options.pop("fmt", E4M3), **options)


def test_dequantize_refuses_raw_bytes() -> None:
    with pytest.raises(TypeError, match="codes have dtype uint8; accepted: float8_e4m3fn"):
        dequantize(np.array([1], np.uint8))
