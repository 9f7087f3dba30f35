"""The oracle's casts: its three forms against each other, and every edge of their contract."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8lab.emulation.casting import dequantize, quantize
from fp8lab.emulation.pieces import PIECE, set_threads
from fp8lab.emulation.rounding import round_bits
from fp8lab.emulation.scalar import quantize_scalar
from fp8lab.formats import (
    BFLOAT16,
    E4M3,
    E5M2,
    E8M0,
    FLOAT16,
    FORMATS,
    OVERFLOW_POLICIES,
    TARGETS,
    FloatFormat,
    overflow_policy,
)
from fp8lab.testing import assert_bits_equal

Array = npt.NDArray[Any]

EVERY = pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda fmt: fmt.name)
TARGET = pytest.mark.parametrize("fmt", TARGETS.values(), ids=lambda fmt: fmt.name)
PRESETS = ("ptx_satfinite", "ml_dtypes", "torch_2_11_cuda", "torch_2_13_cpu")
POLICIES = pytest.mark.parametrize("overflow", PRESETS)
INPUTS = [np.dtype(t) for t in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)]

PATTERNS = np.arange(1 << 16, dtype=np.uint16)
SIXTEEN_BITS = {
    "bfloat16": PATTERNS.view(ml_dtypes.bfloat16),
    "float16": PATTERNS.view(np.float16),
}
# The names by which `quantize` and the two lower forms call the same rounding.
ROUNDINGS = {
    False: {"nearest_even": "nearest_even", "toward_zero": "toward_zero"},
    True: {"floor": "toward_zero", "up": "up", "nearest": "nearest_even"},
}


def roundings(fmt: FloatFormat) -> dict[str, str]:
    return ROUNDINGS[not fmt.signed]


def widened(x: Array) -> npt.NDArray[np.float64]:
    with np.errstate(invalid="ignore"):  # signalling NaN patterns
        return x.astype(np.float64)


def scalar_codes(x: Array, fmt: FloatFormat, **options: Any) -> Array:
    codes = [quantize_scalar(float(value), fmt, **options) for value in widened(x)]
    return np.array(codes, dtype=fmt.code_dtype).view(fmt.dtype)


def bits_codes(x: Array, fmt: FloatFormat, rounding: str, overflow: str, **options: Any) -> Array:
    """The vectorised form, in the input's own width where it has one."""
    with np.errstate(invalid="ignore"):
        wide = x if x.dtype.itemsize == 8 else x.astype(np.float32)
    return round_bits(wide, fmt, rounding, overflow_policy(overflow, fmt), **options).view(
        fmt.dtype
    )


def midpoints_and_neighbours(fmt: FloatFormat) -> npt.NDArray[np.float64]:
    """Every finite value, every midpoint (the overflow edge too), one ulp of both types around."""
    values = [fmt.value_of_magnitude(code) for code in range(fmt.max_code + 2)]
    if not fmt.has_subnormals:
        values.insert(0, 0.0)
    points = np.array(values)
    points = np.concatenate([points, (points[1:] + points[:-1]) / 2])
    with np.errstate(over="ignore", under="ignore"):
        for dtype in (np.float32, np.float64):
            near = points.astype(dtype)
            around = [np.nextafter(near, dtype(np.inf)), np.nextafter(near, dtype(-np.inf))]
            points = np.concatenate([points, *around])
    return np.unique(np.concatenate([points, -points, [0.0, np.inf, -np.inf, np.nan]]))


# --- The three forms against each other


@EVERY
@POLICIES
@pytest.mark.parametrize("name", SIXTEEN_BITS)
def test_every_16_bit_pattern_in_three_forms(fmt: FloatFormat, overflow: str, name: str) -> None:
    x = SIXTEEN_BITS[name]
    for rounding, plain in roundings(fmt).items():
        found = quantize(x, fmt, rounding=rounding, overflow=overflow)
        assert_bits_equal(found, bits_codes(x, fmt, plain, overflow), inputs=x)
        # One pattern in 7 through the slow form, others for each policy.
        some = slice(PRESETS.index(overflow), None, 7)
        expected = scalar_codes(x[some], fmt, rounding=plain, overflow=overflow)
        assert_bits_equal(found[some], expected, inputs=x[some])


@EVERY
def test_every_16_bit_pattern_in_the_scalar_form(fmt: FloatFormat) -> None:
    """All of them in one rounding and policy; the test above takes some in all."""
    for x in SIXTEEN_BITS.values():
        assert_bits_equal(quantize(x, fmt), scalar_codes(x, fmt), inputs=x)


@TARGET
@POLICIES
def test_midpoints_and_their_neighbours(fmt: FloatFormat, overflow: str) -> None:
    points = midpoints_and_neighbours(fmt)
    if fmt.bits == 16:  # too many for the scalar form: every 61st, a prime
        points = points[PRESETS.index(overflow) :: 61]
    with np.errstate(over="ignore", under="ignore"):
        narrow = points.astype(np.float32)
    narrow = narrow[np.isnan(points) | (narrow == points)]
    for rounding, plain in roundings(fmt).items():
        for x in (points, narrow):
            expected = scalar_codes(x, fmt, overflow=overflow, rounding=plain)
            assert_bits_equal(bits_codes(x, fmt, plain, overflow), expected, inputs=x)
            found = quantize(x, fmt, overflow=overflow, rounding=rounding)
            assert_bits_equal(found, expected, inputs=x)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_ten_million_random_patterns(fmt: FloatFormat) -> None:
    """The table, the bits and ml_dtypes; `fp8lab verify --exhaustive` does all 2**32."""
    rng = np.random.default_rng(0)
    for _ in range(10):
        x = rng.integers(0, 1 << 32, 10**6, dtype=np.uint32).view(np.float32)
        found = quantize(x, fmt, overflow="ml_dtypes")
        with np.errstate(all="ignore"):
            assert_bits_equal(found, x.astype(fmt.dtype), inputs=x)
            assert_bits_equal(found, bits_codes(x, fmt, "nearest_even", "ml_dtypes"), inputs=x)


@EVERY
@pytest.mark.parametrize("dtype", INPUTS, ids=str)
def test_random_patterns_of_every_input_type(fmt: FloatFormat, dtype: np.dtype[Any]) -> None:
    """Each input type's own table against the bits of float64."""
    rng = np.random.default_rng(1)
    words = rng.integers(0, 1 << 64, 1 << 17, dtype=np.uint64, endpoint=False)
    x = words.view(dtype)[: 1 << 18]
    if dtype == np.float64:  # random patterns are mostly out of range: bring exponents near it
        near = rng.standard_normal(1 << 17) * 2.0 ** rng.integers(-160, 140, 1 << 17)
        x = np.concatenate([x, near])
    wide = widened(x)
    for rounding, plain in roundings(fmt).items():
        for overflow in PRESETS:
            found = quantize(x, fmt, rounding=rounding, overflow=overflow)
            assert_bits_equal(found, bits_codes(wide, fmt, plain, overflow), inputs=x)


@TARGET
@pytest.mark.parametrize("bit_count", [1, 2, 7, 13, 24, 31, 32])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_stochastic_rounding_against_the_scalar_form(
    fmt: FloatFormat, bit_count: int, dtype: type[np.floating[Any]]
) -> None:
    rng = np.random.default_rng(bit_count)
    low, high = int(np.log2(fmt.min_subnormal)) - 4, int(np.log2(fmt.max_finite)) + 2
    exponents = np.ldexp(1.0, rng.integers(max(low, -140), min(high, 127), 1500))
    x = (rng.standard_normal(1500) * exponents).astype(dtype)
    x[:7] = 0.0, -0.0, np.inf, -np.inf, np.nan, fmt.max_finite, fmt.min_subnormal
    words = rng.integers(0, 1 << 32, x.size, dtype=np.uint32)
    words[10:20], words[20:30] = 0, 0xFFFFFFFF
    found = quantize(x, fmt, rounding="stochastic", random_bits=words, bit_count=bit_count)
    mask = (1 << bit_count) - 1
    expected = [
        quantize_scalar(
            float(value),
            fmt,
            rounding="stochastic",
            random_bits=int(word) & mask,
            bit_count=bit_count,
        )
        for value, word in zip(x, words, strict=True)
    ]
    assert_bits_equal(found, np.array(expected, fmt.code_dtype).view(fmt.dtype), inputs=x)


# --- Stochastic rounding


@TARGET
@POLICIES
@pytest.mark.parametrize("word", [0, 1, 0xFFFFFFFF])
def test_stochastic_rounding_never_moves_what_is_representable(
    fmt: FloatFormat, overflow: str, word: int
) -> None:
    every = np.arange(1 << fmt.bits, dtype=fmt.code_dtype).view(fmt.dtype)
    x = dequantize(every)
    x = np.concatenate([x[np.isfinite(x)], np.array([np.inf, -np.inf, np.nan], np.float32)])
    words = np.full(x.shape, word, np.uint32)
    for bit_count in (1, 16, 32):
        found = quantize(
            x,
            fmt,
            rounding="stochastic",
            overflow=overflow,
            random_bits=words,
            bit_count=bit_count,
        )
        assert_bits_equal(found, quantize(x, fmt, overflow=overflow), inputs=x)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_stochastic_rounding_is_unbiased_below_the_smallest_subnormal(fmt: FloatFormat) -> None:
    """StochasticRounding.jl 62, oneDNN 2903: half of it goes up in half of the draws, exactly."""
    half = np.full(1 << 8, fmt.min_subnormal / 2, np.float32)
    draws = np.arange(1 << 8, dtype=np.uint32)
    codes = quantize(half, fmt, rounding="stochastic", random_bits=draws, bit_count=8)
    assert codes.view(np.uint8).sum() == 1 << 7
    tiny = quantize(-half / 64, fmt, rounding="stochastic", random_bits=draws, bit_count=8)
    assert sorted(set(tiny.view(np.uint8).tolist())) == [0x80, 0x81]
    assert (tiny.view(np.uint8) == 0x81).sum() == 2  # 2**8 / 128


# --- What goes in and comes out


def test_special_values_by_policy() -> None:
    x = np.array([np.inf, -np.inf, 1e9, -1e9, np.nan, np.nan, -0.0], np.float32)
    x[5] = np.copysign(np.nan, np.float32(-1))

    def codes(fmt: FloatFormat, overflow: str) -> list[int]:
        found: list[int] = quantize(x, fmt, overflow=overflow).view(np.uint8).tolist()
        return found

    assert codes(E4M3, "saturate") == [0x7E, 0xFE, 0x7E, 0xFE, 0x7F, 0x7F, 0x80]
    assert codes(E5M2, "saturate") == [0x7B, 0xFB, 0x7B, 0xFB, 0x7F, 0x7F, 0x80]
    assert codes(E4M3, "ieee") == [0x7F, 0xFF, 0x7F, 0xFF, 0x7F, 0xFF, 0x80]
    assert codes(E5M2, "ieee") == [0x7C, 0xFC, 0x7C, 0xFC, 0x7E, 0xFE, 0x80]
    assert codes(E5M2, "torch_2_11_cuda") == [0x7C, 0xFC, 0x7C, 0xFC, 0x7F, 0xFF, 0x80]
    assert codes(E4M3, "torch_2_13_cpu") == [0x7E, 0xFE, 0x7E, 0xFE, 0x7F, 0xFF, 0x80]
    assert codes(E5M2, "torch_2_13_cpu") == [0x7C, 0xFC, 0x7C, 0xFC, 0x7F, 0xFF, 0x80]
    fnuz = FORMATS["E4M3FNUZ"]
    assert codes(fnuz, "saturate") == [0x7F, 0xFF, 0x7F, 0xFF, 0x80, 0x80, 0x00]
    assert codes(fnuz, "ieee") == [0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x00]
    assert codes(E8M0, "saturate") == [0xFE, 0xFE, 0x9D, 0x9D, 0xFF, 0xFF, 0x00]
    assert codes(E8M0, "ieee") == [0xFF, 0xFF, 0x9D, 0xFF, 0xFF, 0xFF, 0xFF]


@TARGET
def test_toward_zero_never_overflows_a_finite_value(fmt: FloatFormat) -> None:
    for overflow in PRESETS:
        largest = quantize(1e300, fmt, rounding="toward_zero", overflow=overflow)
        assert int(largest.view(fmt.code_dtype)) == fmt.max_code


@pytest.mark.parametrize("fmt", [BFLOAT16, FLOAT16], ids=lambda fmt: fmt.name)
def test_16_bit_targets_are_numpys_and_ml_dtypes(fmt: FloatFormat) -> None:
    words = np.random.default_rng(2).integers(0, 1 << 32, 1 << 18, dtype=np.uint32)
    with np.errstate(all="ignore"):
        edges = midpoints_and_neighbours(fmt).astype(np.float32)
        x = np.concatenate([words.view(np.float32), edges])
        expected = x.astype(fmt.dtype)
    assert_bits_equal(quantize(x, fmt, overflow="ml_dtypes"), expected, inputs=x)
    saturated = quantize(x, fmt)
    finite = np.isfinite(expected.astype(np.float32))
    assert_bits_equal(saturated[finite], expected[finite])
    beyond = ~finite & ~np.isnan(x)
    assert set(saturated[beyond].view(np.uint16).tolist()) == {
        fmt.max_code,
        fmt.max_code | fmt.sign_bit,
    }


def test_a_scale_is_rounded_and_multiplied_in_float32_first() -> None:
    x = np.random.default_rng(2).standard_normal(1000).astype(np.float32)
    scaled = x * np.float32(0.1)
    assert_bits_equal(quantize(x, E4M3, scale=0.1), quantize(scaled, E4M3))
    for dtype in INPUTS[2:]:
        narrow = x.astype(dtype)
        expected = quantize(narrow.astype(np.float32) * np.float32(0.1), E4M3)
        assert_bits_equal(quantize(narrow, E4M3, scale=0.1), expected)
    wide = x.astype(np.float64) * 0.1
    assert_bits_equal(quantize(x.astype(np.float64), E4M3, scale=0.1), quantize(wide, E4M3))


@pytest.mark.parametrize("dtype", INPUTS, ids=str)
@pytest.mark.parametrize(
    ("shape", "scale_shape"),
    [
        ((5, 7), (5, 1)),
        ((5, 7), (7,)),
        ((3, 4, 5), (4, 1)),
        ((2, 3 * PIECE // 2), (2, 1)),
        ((2 * PIECE + 3, 2), (2,)),
        ((4, 0), (4, 1)),
        ((6, 1), (1, 1)),
    ],
)
def test_a_scale_is_broadcast(
    dtype: np.dtype[Any], shape: tuple[int, ...], scale_shape: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(3)
    with np.errstate(over="ignore"):
        x = (rng.standard_normal(shape) * 100).astype(dtype)
    scale = np.exp2(rng.integers(-20, 20, scale_shape)).astype(np.float32) * np.float32(1.1)
    wide: Array = x.astype(np.float64 if dtype == np.float64 else np.float32)
    product = wide * scale
    assert_bits_equal(quantize(x, E5M2, scale=scale), quantize(product, E5M2))
    codes = quantize(x, E5M2)
    with np.errstate(over="ignore"):
        expected = codes.astype(np.float32) * scale
    assert_bits_equal(dequantize(codes, inverse_scale=scale), expected)


@TARGET
@pytest.mark.parametrize("dtype", INPUTS, ids=str)
def test_shapes_strides_and_nothing(fmt: FloatFormat, dtype: np.dtype[Any]) -> None:
    x = np.random.default_rng(3).standard_normal((6, 8)).astype(dtype)
    for view in (x.T[::2], x[::-1, 1::3], x[:, :0], x[2, 3], np.broadcast_to(x[0], (3, 8))):
        codes = quantize(view, fmt)
        assert codes.shape == view.shape
        assert codes.dtype == fmt.dtype
        assert_bits_equal(codes, quantize(np.array(view, order="C"), fmt))
        assert dequantize(codes).shape == view.shape
    strided = quantize(x, fmt)[::2, ::-3]
    assert_bits_equal(dequantize(strided), dequantize(strided.copy()))
    x.flags.writeable = False
    quantize(x, fmt)


@given(size=st.integers(0, 3 * PIECE), threads=st.integers(1, 5), seed=st.integers(0, 9))
def test_threads_and_pieces_change_nothing(size: int, threads: int, seed: int) -> None:
    x = np.random.default_rng(seed).standard_normal(size).astype(np.float32)
    with np.errstate(all="ignore"):
        codes = x.astype(E4M3.dtype)
    assert_bits_equal(quantize(x, E4M3, threads=threads), codes)
    assert_bits_equal(dequantize(codes, threads=threads), codes.astype(np.float32))
    before = set_threads(threads)
    try:
        assert_bits_equal(quantize(x, E4M3), codes)
    finally:
        assert set_threads(before) == threads


@TARGET
def test_every_code_decodes_as_in_ml_dtypes_and_comes_back(fmt: FloatFormat) -> None:
    codes = np.arange(1 << fmt.bits, dtype=fmt.code_dtype).view(fmt.dtype)
    values = dequantize(codes)
    with np.errstate(invalid="ignore"):
        assert_bits_equal(values, codes.astype(np.float32))
    numbers = ~np.isnan(values)
    for overflow in PRESETS:
        again = quantize(values, fmt, overflow=overflow)
        finite = np.isfinite(values)
        assert_bits_equal(again[finite], codes[finite])
        assert np.isnan(dequantize(again[~numbers])).all()
    assert_bits_equal(quantize(values, fmt, overflow="ieee")[numbers], codes[numbers])


def test_dequantize_rounds_the_product_once() -> None:
    codes = np.arange(0x7F, dtype=np.uint8).view(E4M3.dtype)
    expected = codes.astype(np.float32) * np.float32(0.3)
    assert_bits_equal(dequantize(codes, inverse_scale=0.3), expected)


# --- Bad input

ONE = np.array([1], np.float32)
WORD = np.array([1], np.uint32)


@pytest.mark.parametrize(
    ("x", "options", "error", "message"),
    [
        (np.array([1], np.int32), {}, TypeError, "x has dtype int32; accepted: float64, float32"),
        (np.array([1j]), {}, TypeError, "x has dtype complex128; accepted: float64"),
        (["1"], {}, TypeError, "x has dtype <U1; accepted: float64"),
        (ONE, {"fmt": "E4M3"}, TypeError, "fmt is 'E4M3'; accepted: E4M3, E5M2"),
        (ONE, {"fmt": "E4M4"}, TypeError, "fmt is 'E4M4'; accepted: E4M3, E5M2"),
        (ONE, {"rounding": "nearest"}, ValueError, "unknown rounding 'nearest'; accepted for E4M3"),
        (ONE, {"rounding": "up"}, ValueError, "unknown rounding 'up'; accepted for E4M3"),
        (ONE, {"rounding": None}, ValueError, "unknown rounding None"),
        (ONE, {"overflow": "wrap"}, ValueError, "unknown overflow policy 'wrap'; accepted: sat"),
        (ONE, {"scale": 0.0}, ValueError, "scale is 0.0; accepted: finite values above zero"),
        (ONE, {"scale": -1.0}, ValueError, "scale is -1.0; accepted: finite values above zero"),
        (ONE, {"scale": np.nan}, ValueError, "scale is nan; accepted: finite values above zero"),
        (ONE, {"scale": np.inf}, ValueError, "scale is inf; accepted: finite values above zero"),
        (ONE, {"scale": 1e-60}, ValueError, r"above zero \(in float32\)"),
        (ONE, {"scale": [1.0, 2.0]}, ValueError, r"scale has shape \(2,\), which does not fit x's"),
        (ONE, {"scale": "1"}, TypeError, "scale has dtype <U1; accepted: numbers"),
        (ONE, {"rounding": "stochastic"}, ValueError, "needs random_bits"),
        (ONE, {"random_bits": WORD}, ValueError, "only stochastic uses"),
        (
            ONE,
            {"rounding": "stochastic", "random_bits": np.array([1, 2], np.uint32)},
            ValueError,
            r"random_bits have shape \(2,\); x has \(1,\)",
        ),
        (
            ONE,
            {"rounding": "stochastic", "random_bits": np.array([1], np.int32)},
            TypeError,
            "random_bits have dtype int32; accepted: unsigned integers",
        ),
        (
            ONE,
            {"rounding": "stochastic", "random_bits": WORD, "bit_count": 33},
            ValueError,
            "bit_count is 33; accepted: an integer, 1 to 32",
        ),
        (
            ONE,
            {"rounding": "stochastic", "random_bits": WORD, "bit_count": 0},
            ValueError,
            "bit_count is 0; accepted: an integer, 1 to 32",
        ),
        (ONE, {"threads": 0}, ValueError, "threads is 0; accepted: an integer, 1 or more"),
    ],
)
def test_bad_input_is_refused(
    x: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    given = dict(options)
    with pytest.raises(error, match=message):
        quantize(x, given.pop("fmt", E4M3), **given)


def test_dequantize_refuses_raw_bytes_and_scales_that_do_not_fit() -> None:
    with pytest.raises(TypeError, match="codes have dtype uint8; accepted: float8_e4m3fn"):
        dequantize(np.array([1], np.uint8))
    codes = quantize(np.ones((2, 3), np.float32), E4M3)
    with pytest.raises(ValueError, match=r"inverse_scale has shape .* does not fit codes"):
        dequantize(codes, inverse_scale=[1.0, 2.0])


def test_a_policys_name_stands_for_one_policy_a_format() -> None:
    with pytest.raises(ValueError, match="'torch_2_13_cpu' differs between formats"):
        overflow_policy("torch_2_13_cpu")
    assert overflow_policy("torch_2_13_cpu", E4M3).finite == "max_finite"
    assert overflow_policy("torch_2_13_cpu", E5M2).finite == "infinity_or_nan"
    assert set(OVERFLOW_POLICIES) == {*PRESETS, "saturate", "ieee"}
