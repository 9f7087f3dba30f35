"""Blocks and MX: one scale a block, in any direction, held to one element at a time."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis.extra import numpy as hnp

from fp8lab.emulation.casting import dequantize, quantize
from fp8lab.emulation.scalar import quantize_scalar
from fp8lab.emulation.scaling import (
    MX_ROUNDINGS,
    amax,
    dequantize_blocks,
    dequantize_mx,
    expand_blocks,
    inverse_scale,
    mx_scale,
    quantize_blocks,
    quantize_mx,
    scale_from_amax,
)
from fp8lab.formats import E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, E8M0, Float8Format
from fp8lab.testing import assert_bits_equal

Array = np.ndarray[Any, Any]
Block = tuple[int | None, int | None]

VALUE_FORMATS = (E4M3, E5M2, E4M3FNUZ, E5M2FNUZ)
FORMATS = st.sampled_from(VALUE_FORMATS)
BLOCKS = st.tuples(st.none() | st.integers(1, 40), st.none() | st.integers(1, 40))
# Any bit pattern, and patterns near each other: one block with everything is mostly NaN.
ELEMENTS = st.one_of(
    st.floats(width=32),
    st.floats(-(2.0**10), 2.0**10, width=32),
    st.sampled_from([0.0, -0.0, 2.0**-130, 1e-37, 448.0, np.inf, np.nan]),
)
MATRICES = hnp.arrays(
    np.float32, st.tuples(st.integers(0, 6), st.integers(0, 70)), elements=ELEMENTS
)


def pieces(shape: tuple[int, int], block: Block) -> list[tuple[int, int, slice, slice]]:
    """(block row, block column, rows, columns) of every block."""
    rows, columns = (size or max(length, 1) for size, length in zip(block, shape, strict=True))
    return [
        (i, j, slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
        for i in range(-(-shape[0] // rows))
        for j in range(-(-shape[1] // columns))
    ]


@given(MATRICES, FORMATS, BLOCKS, st.booleans())
def test_blocks_are_cast_one_by_one(
    x: Array, fmt: Float8Format, block: Block, power_of_two: bool
) -> None:
    codes, inverse = quantize_blocks(x, fmt, block=block, power_of_two=power_of_two)
    decoded = dequantize_blocks(codes, inverse, block=block)
    for i, j, rows, columns in pieces(x.shape, block):
        part = x[rows, columns]
        scale = scale_from_amax(amax(part), fmt, power_of_two=power_of_two)
        expected = quantize(part, fmt, scale=scale)
        assert_bits_equal(codes[rows, columns], expected)
        assert_bits_equal(inverse[i, j], inverse_scale(scale)[()])
        values = dequantize(expected, inverse_scale=inverse_scale(scale))
        assert_bits_equal(decoded[rows, columns], values)
    assert codes.shape == decoded.shape == x.shape


def by_fractions(
    part: Array, fmt: Float8Format, rounding: str
) -> tuple[int, list[int], list[float]]:
    """An MX block one element at a time: its E8M0 code, the codes and the decoded values."""
    magnitudes = [abs(float(value)) for value in part.reshape(-1)]
    shared = mx_scale_by_fractions(magnitudes, fmt, rounding)
    codes, decoded = [], []
    for value in part.reshape(-1):
        if shared == 255:
            codes.append(quantize_scalar(float("nan"), fmt))
        elif not np.isfinite(value):
            codes.append(quantize_scalar(float(value), fmt))
        else:
            quotient = Fraction(float(value)) * Fraction(2) ** (127 - shared)
            # float64 holds it exactly; -0 has no fraction.
            y = float(quotient) if quotient else float(value)
            codes.append(quantize_scalar(y, fmt))
        of_code = float(dequantize(np.array([codes[-1]], np.uint8).view(fmt.dtype))[0])
        scale = float("nan") if shared == 255 else 2.0 ** (shared - 127)
        with np.errstate(over="ignore"):
            decoded.append(float(np.float32(of_code * scale)))
    return shared, codes, decoded


def mx_scale_by_fractions(magnitudes: list[float], fmt: Float8Format, rounding: str) -> int:
    """The E8M0 code of a block, by comparing powers of two with exact fractions."""
    if any(np.isnan(m) for m in magnitudes):
        return 255
    largest = max(magnitudes, default=0.0)
    if np.isinf(largest):
        return 254
    powers = [Fraction(2) ** exponent for exponent in range(-127, 128)]
    emax = max(p for p in powers if p <= fmt.max_finite)
    if rounding == "up":
        wanted = Fraction(largest) / Fraction(fmt.max_finite)
        return next(code for code, power in enumerate(powers) if power >= wanted)
    wanted = Fraction(largest) / emax
    below = max([code for code, power in enumerate(powers) if power <= wanted], default=0)
    if rounding == "nearest" and wanted - powers[below] >= powers[below + 1] - wanted:
        return below + 1
    return below


@settings(max_examples=60)
@given(
    MATRICES, FORMATS, st.sampled_from(MX_ROUNDINGS), st.sampled_from([(1, 32), (32, 1), (2, 5)])
)
def test_mx_blocks_by_exact_fractions(
    x: Array, fmt: Float8Format, rounding: str, block: tuple[int, int]
) -> None:
    codes, shared = quantize_mx(x, fmt, block=block, scale_rounding=rounding)
    decoded = dequantize_mx(codes, shared, block=block)
    assert shared.dtype == E8M0.dtype
    for i, j, rows, columns in pieces(x.shape, block):
        expected = by_fractions(x[rows, columns], fmt, rounding)
        assert int(shared.view(np.uint8)[i, j]) == expected[0]
        found = codes[rows, columns]
        assert_bits_equal(found.view(np.uint8).reshape(-1), np.array(expected[1], np.uint8))
        values = np.array(expected[2], np.float32).reshape(found.shape)
        assert_bits_equal(decoded[rows, columns], values)


@given(st.integers(0, 0x7FFFFFFF), FORMATS, st.sampled_from(MX_ROUNDINGS))
@example(0x437FFFFF, E4M3, "floor")
@example(0x00000001, E5M2, "up")
def test_mx_scales_by_exact_fractions(word: int, fmt: Float8Format, rounding: str) -> None:
    largest = np.array(word, np.uint32).view(np.float32)
    found = int(mx_scale(largest, fmt, rounding=rounding).view(np.uint8))
    assert found == mx_scale_by_fractions([float(largest)], fmt, rounding)


def test_every_exponent_and_the_mantissas_where_a_rule_turns() -> None:
    """Against the cast to E8M0, which shares no code with `mx_scale`."""
    turns = [0, 1, 0x3FFFFF, 0x400000, 0x400001, 0x5FFFFF, 0x600000, 0x600001, 0x700000, 0x7FFFFF]
    words = (np.arange(255, dtype=np.uint32)[:, None] << np.uint32(23)) | np.array(turns, np.uint32)
    largest = words.reshape(-1).view(np.float32)
    largest = largest[largest > 0].astype(np.float64)  # so that the quotients are exact
    for fmt in VALUE_FORMATS:
        emax = 2.0 ** (np.frexp(fmt.max_finite)[1] - 1)
        for rounding in ("floor", "nearest"):
            expected = quantize(largest / emax, E8M0, rounding=rounding)
            assert_bits_equal(mx_scale(largest, fmt, rounding=rounding), expected)
    # A quotient by 1.75 or 1.875 is not exact, but float64 holds more than float32's last bit.
    expected = quantize(largest / 448, E8M0, rounding="up")
    assert_bits_equal(mx_scale(largest, E4M3, rounding="up"), expected)


@pytest.mark.parametrize(
    ("value", "floor", "up", "nearest"),
    [(3.0, 2.0, 4.0, 4.0), (12.0, 8.0, 16.0, 16.0), (0.75, 0.5, 1.0, 1.0), (2.5, 2.0, 4.0, 2.0)],
)
def test_onnx_7030_ml_dtypes_298_each_rounding_gives_what_its_name_says(
    value: float, floor: float, up: float, nearest: float
) -> None:
    for rounding, expected in (("floor", floor), ("nearest", nearest)):
        code = mx_scale(np.float32(value * 2**8), E4M3, rounding=rounding)
        assert float(dequantize(code)) == expected
    assert float(dequantize(mx_scale(np.float32(value * 448), E4M3, rounding="up"))) == up


def test_te_3262_codes_of_the_edges() -> None:
    codes = np.array([[0, 1, 254, 255]], np.uint8).view(E8M0.dtype)
    one = np.full((1, 4), 0x38, np.uint8).view(E4M3.dtype)
    decoded = dequantize_mx(one, codes, block=(1, 1))
    expected = np.array([[2.0**-127, 2.0**-126, 2.0**127, np.nan]], np.float32)
    assert_bits_equal(decoded, expected)


def test_ao_4725_exponents_come_from_bits() -> None:
    largest = np.array(0x437FFFFF, np.uint32).view(np.float32)  # 256 less one ulp
    assert int(mx_scale(largest, E4M3).view(np.uint8)) == 126
    assert int(mx_scale(np.float32(256), E4M3).view(np.uint8)) == 127


def test_zero_infinity_and_nan() -> None:
    largest = np.array([0, np.inf, np.nan], np.float32)
    for rounding in MX_ROUNDINGS:
        found = mx_scale(largest, E5M2, rounding=rounding)
        assert found.view(np.uint8).tolist() == [0x00, 0xFE, 0xFF]
    x = np.zeros((3, 32), np.float32)
    x[0, 3] = -0.0
    x[1, :3] = np.inf, 3e38, 1
    x[2, :3] = np.nan, np.inf, 1
    codes, shared = quantize_mx(x, E4M3)
    decoded = dequantize_mx(codes, shared)
    assert_bits_equal(decoded[0], x[0])
    assert decoded[1, :3].tolist() == [np.inf, 1.75 * 2.0**127, 0]
    assert (codes[2].view(np.uint8) == 0x7F).all()
    assert np.isnan(decoded[2]).all()


def test_te_2589_a_tiny_block_leaves_its_neighbours_alone() -> None:
    for length, cast, decode in (
        (128, quantize_blocks, dequantize_blocks),
        (32, quantize_mx, dequantize_mx),
    ):
        x = np.ones((1, 3 * length), np.float32)
        alone, scales_alone = cast(x, E4M3, block=(1, length))
        x[0, length : 2 * length] = 1e-37
        codes, scales = cast(x, E4M3, block=(1, length))
        for kept in (slice(length), slice(2 * length, None)):
            assert_bits_equal(codes[0, kept], alone[0, kept])
        assert_bits_equal(scales[0, ::2], scales_alone[0, ::2])
        decoded = decode(codes, scales, block=(1, length))
        assert (np.abs(decoded - x) <= x / 16).all()
    assert scales.view(np.uint8)[0, 1] == 0  # the E8M0 of 1e-37


@pytest.mark.parametrize("zeros", [0, 1])
def test_ao_4713_ao_3356_a_row_of_zeros(zeros: int) -> None:
    x = np.random.default_rng(3).standard_normal((2, 64)).astype(np.float32)
    x[zeros] = 0
    codes, inverse = quantize_blocks(x, E4M3, block=(1, None), power_of_two=False)
    assert inverse.shape == (2, 1)
    assert np.isfinite(inverse).all()
    assert inverse[zeros, 0] == 1
    assert (codes[zeros].view(np.uint8) == 0).all()
    assert (codes[1 - zeros].view(np.uint8) != 0).any()
    shared = quantize_mx(np.zeros((1, 32), np.float32), E4M3)
    assert_bits_equal(dequantize_mx(*shared), np.zeros((1, 32), np.float32))


def test_ao_1766_small_float16_values_do_not_become_nan() -> None:
    x = np.array([[0, 0, 0.1, 0.1]], np.float16)
    decoded = dequantize_blocks(*quantize_blocks(x, E5M2, power_of_two=False))
    assert decoded[0, :2].tolist() == [0, 0]
    assert (np.abs(decoded[0, 2:] - 0.1) <= 0.1 / 8).all()


@pytest.mark.parametrize("block", [(1, 128), (128, 128), (1, 32), (1, None), (7, 50)])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
def test_along_columns_is_along_rows_of_the_transpose(block: Block, dtype: Any) -> None:
    x = np.random.default_rng(4).standard_normal((200, 300)).astype(dtype)
    turned = (block[1], block[0])
    codes, inverse = quantize_blocks(x, E4M3, block=block)
    codes_t, inverse_t = quantize_blocks(x.T, E4M3, block=turned)
    assert_bits_equal(codes_t.T, codes)
    assert_bits_equal(inverse_t.T, inverse)
    decoded = dequantize_blocks(codes, inverse, block=block)
    assert_bits_equal(dequantize_blocks(codes.T, inverse.T, block=turned).T, decoded)
    codes, shared = quantize_mx(x, E4M3, block=block)
    codes_t, shared_t = quantize_mx(x.T, E4M3, block=turned)
    assert_bits_equal(codes_t.T, codes)
    assert_bits_equal(shared_t.T, shared)


@pytest.mark.parametrize("shape", [(3, 5, 40), (2, 2, 4, 64), (3, 4, 0), (0, 4, 8), (2, 0, 8)])
@pytest.mark.parametrize("block", [(1, 32), (2, 32), (4, None), (None, 1)])
def test_leading_dimensions_are_so_many_matrices(shape: tuple[int, ...], block: Block) -> None:
    x = np.random.default_rng(5).standard_normal(shape).astype(np.float32)
    codes, inverse = quantize_blocks(x, E5M2, block=block)
    assert codes.shape == shape
    assert inverse.shape == amax(x, block=block).shape
    for place in np.ndindex(*shape[:-2]):
        one, one_inverse = quantize_blocks(x[place], E5M2, block=block)
        assert_bits_equal(codes[place], one)
        assert_bits_equal(inverse[place], one_inverse)
    assert dequantize_blocks(codes, inverse, block=block).shape == shape


def test_no_block_sees_another() -> None:
    """Change one element: only its own block changes, whatever the tiles and pieces inside are."""
    x = np.random.default_rng(6).standard_normal((300, 1000)).astype(np.float32)
    block = (17, 31)
    codes, inverse = quantize_blocks(x, E4M3, block=block, power_of_two=False)
    changed = x.copy()
    changed[150, 500] = 1e6
    codes2, inverse2 = quantize_blocks(changed, E4M3, block=block, power_of_two=False)
    where = np.argwhere(inverse != inverse2)
    assert where.tolist() == [[150 // 17, 500 // 31]]
    outside = expand_blocks(inverse == inverse2, block, x.shape)
    assert_bits_equal(codes2[outside], codes[outside])


@pytest.mark.parametrize("fmt", VALUE_FORMATS, ids=lambda fmt: fmt.name)
def test_round_trips_of_every_code_are_exact(fmt: Float8Format) -> None:
    every = np.arange(256, dtype=np.uint8).view(fmt.dtype)
    finite = every[np.isfinite(dequantize(every))]
    for exponent in (-100, -7, 0, 9, 100):
        # With the largest value in each block of two, every scale is the same power of two.
        values = np.stack([dequantize(finite), np.full(finite.size, fmt.max_finite)], axis=1)
        x = np.ldexp(values, exponent).astype(np.float32)
        codes, inverse = quantize_blocks(x, fmt, block=(1, 2))
        assert_bits_equal(codes[:, 0], finite)
        assert_bits_equal(dequantize_blocks(codes, inverse, block=(1, 2)), x)
        for rounding in ("floor", "up"):
            codes, shared = quantize_mx(x, fmt, scale_rounding=rounding)
            assert_bits_equal(codes[:, 0], finite)
            assert_bits_equal(dequantize_mx(codes, shared), x)


@pytest.mark.parametrize("fmt", VALUE_FORMATS, ids=lambda fmt: fmt.name)
def test_what_saturates_under_each_rule(fmt: Float8Format) -> None:
    rng = np.random.default_rng(7)
    x = np.exp(rng.uniform(-60, 60, (2000, 1))).astype(np.float32)
    for rounding in MX_ROUNDINGS:
        codes, shared = quantize_mx(x, fmt, block=(1, 1), scale_rounding=rounding)
        y = x / dequantize(shared)
        if rounding == "floor":
            assert (y > fmt.max_finite).any()
            assert (y < 2.0 ** np.frexp(fmt.max_finite)[1]).all()
        else:
            assert (y <= fmt.max_finite).all()
        decoded = dequantize_mx(codes, shared, block=(1, 1))
        step = 2.0 ** -(fmt.mantissa_bits + 1)
        fits = y <= fmt.max_finite
        assert (np.abs(decoded - x)[fits] <= x[fits] * step).all()


def test_float64_is_scaled_and_rounded_once() -> None:
    # A tie in float32 that float64 knows to lie above; the other element sets the scale to 1.
    x = np.array([[1.0625 + 2.0**-30, 448.0]])
    assert dequantize(quantize_blocks(x, E4M3)[0])[0, 0] == 1.125
    assert dequantize(quantize_mx(x, E4M3)[0])[0, 0] == 1.125
    assert dequantize(quantize_blocks(x.astype(np.float32), E4M3)[0])[0, 0] == 1.0


def test_stochastic_rounding_of_blocks_uses_the_bits_of_each_element() -> None:
    rng = np.random.default_rng(8)
    x = rng.standard_normal((5, 70)).astype(np.float32)
    bits = rng.integers(0, 2**32, x.shape, dtype=np.uint32)
    codes, inverse = quantize_blocks(
        x, E4M3, block=(2, 32), rounding="stochastic", random_bits=bits
    )
    for i, j, rows, columns in pieces(x.shape, (2, 32)):
        expected = quantize(
            x[rows, columns],
            E4M3,
            scale=1 / inverse[i, j],
            rounding="stochastic",
            random_bits=bits[rows, columns],
        )
        assert_bits_equal(codes[rows, columns], expected)
    mx, _ = quantize_mx(x, E4M3, rounding="stochastic", random_bits=bits)
    assert (mx.view(np.uint8) != quantize_mx(x, E4M3)[0].view(np.uint8)).any()


def test_threads_change_nothing() -> None:
    x = np.random.default_rng(9).standard_normal((513, 700)).astype(np.float32)
    for block in ((1, 128), (128, 128), (32, 1)):
        one = quantize_blocks(x, E4M3, block=block)
        two = quantize_blocks(x, E4M3, block=block, threads=2)
        for found, expected in zip(two, one, strict=True):
            assert_bits_equal(found, expected)
        assert_bits_equal(
            dequantize_blocks(*two, block=block, threads=2), dequantize_blocks(*one, block=block)
        )


X = np.ones((2, 64), np.float32)


@pytest.mark.parametrize("cast", [quantize_blocks, quantize_mx])
@pytest.mark.parametrize(
    ("error", "arguments", "message"),
    [
        (ValueError, {"block": (0, 32)}, r"block is \(0, 32\); accepted"),
        (ValueError, {"block": (1, -1)}, r"block is \(1, -1\); accepted"),
        (TypeError, {"block": 32}, "block is 32; accepted"),
        (TypeError, {"block": (1, 32.0)}, r"block is \(1, 32.0\)"),
        (TypeError, {"block": (1, True)}, r"block is \(1, True\)"),
        (TypeError, {"x": X.astype(int)}, "x has dtype int64; accepted: float64, float32"),
        (ValueError, {"x": np.ones(3, np.float32)}, "blocks need at least 2 dimensions"),
        (ValueError, {"rounding": "nearest"}, "unknown rounding 'nearest'"),
        (ValueError, {"x": X[:0], "rounding": "nearest"}, "unknown rounding 'nearest'"),
        (ValueError, {"overflow": "wrap"}, "unknown overflow policy 'wrap'"),
        (ValueError, {"rounding": "stochastic"}, "stochastic rounding needs random_bits"),
        (
            ValueError,
            {"rounding": "stochastic", "random_bits": np.zeros(128, np.uint32)},
            r"random_bits have shape \(128,\)",
        ),
        (ValueError, {"fmt": E8M0}, "E8M0 is a format of scales"),
        (TypeError, {"fmt": "E4M3"}, "fmt is 'E4M3'; accepted"),
    ],
)
def test_bad_input_is_refused(
    cast: Any, error: type[Exception], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(error, match=message):
        cast(**({"x": X, "fmt": E4M3} | arguments))


CODES, INVERSE = quantize_blocks(X, E4M3)


@pytest.mark.parametrize(
    ("error", "call", "message"),
    [
        (ValueError, lambda: quantize_blocks(X, E4M3, margin=-1), "margin is -1; accepted"),
        (ValueError, lambda: quantize_blocks(X, E4M3, preset="te"), "unknown preset 'te'"),
        (
            ValueError,
            lambda: quantize_blocks(X, E4M3, preset="torchao", margin=1),
            "margin is 1 with preset 'torchao'; accepted: 0",
        ),
        (
            ValueError,
            lambda: quantize_blocks(X * np.float32(np.inf), E4M3, preset="torchao"),
            "preset 'torchao' gives scales of 0, Inf or NaN",
        ),
        (ValueError, lambda: mx_scale(1.0, E4M3, rounding="ceil"), "unknown rounding 'ceil'; acc"),
        (ValueError, lambda: mx_scale(-1.0, E4M3), "amax holds negative values"),
        (TypeError, lambda: mx_scale("1", E4M3), "amax has dtype <U1"),
        (ValueError, lambda: quantize_mx(X, E4M3, scale_rounding="even"), "unknown rounding 'even"),
        (
            ValueError,
            lambda: dequantize_blocks(CODES, INVERSE, block=(1, 32)),
            r"inverse_scale has shape \(2, 1\); codes of shape \(2, 64\) in blocks of \(1, 32\)",
        ),
        (
            TypeError,
            lambda: dequantize_blocks(CODES.view(np.uint8), INVERSE),
            "codes have dtype uint8; accepted",
        ),
        (TypeError, lambda: dequantize_mx(CODES, INVERSE), "scale has dtype float32; accepted: fl"),
    ],
)
def test_more_bad_input_is_refused(error: type[Exception], call: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_presets_of_blocks_are_their_current_scales() -> None:
    from fp8lab.emulation.scaling import CURRENT_PRESETS, current_scale

    x = np.random.default_rng(10).standard_normal((4, 256)).astype(np.float32) * np.float32(3.3)
    for preset in CURRENT_PRESETS:
        for power_of_two in (False, True):
            codes, inverse = quantize_blocks(x, E4M3, preset=preset, power_of_two=power_of_two)
            scale = current_scale(
                amax(x, block=(1, 128)), E4M3, preset=preset, power_of_two=power_of_two
            )
            assert_bits_equal(inverse, inverse_scale(scale))
            wide = expand_blocks(scale, (1, 128), x.shape)
            assert_bits_equal(codes, quantize(x, E4M3, scale=wide))
