"""amax, the scales it gives, current scaling's presets, static scales.

Delayed scaling: test_scaling_delayed.py; blocks and MX: test_scaling_blocks.py.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis.extra import numpy as hnp

from fp8lab.emulation.casting import dequantize, quantize
from fp8lab.emulation.scaling import (
    CURRENT_PRESETS,
    FLT_MAX,
    SMALLEST_SCALE,
    amax,
    current_scale,
    expand_blocks,
    inverse_scale,
    merge_amax,
    scale_from_amax,
    static_scale,
)
from fp8lab.formats import BFLOAT16, E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, E8M0, Float8Format
from fp8lab.testing import assert_bits_equal

Array = np.ndarray[Any, Any]

FLOATS = hnp.arrays(np.float32, hnp.array_shapes(max_dims=3, min_side=0, max_side=9))
VALUE_FORMATS = (E4M3, E5M2, E4M3FNUZ, E5M2FNUZ)
FORMATS = st.sampled_from(VALUE_FORMATS)
# Every bit pattern of a magnitude: zeros, subnormals, Inf and NaN too.
MAGNITUDES = st.integers(0, 0x7FFFFFFF).map(
    lambda word: np.array(word, np.uint32).view(np.float32)[()]
)


def nearest_float32(value: Fraction) -> float:
    """A positive fraction rounded to nearest even in float32: the slow, obviously right way."""
    exponent = -149
    while value >= Fraction(2) ** (exponent + 24):
        exponent += 1
    steps = round(value / Fraction(2) ** exponent)  # Python rounds a tie to even
    return float("inf") if steps * Fraction(2) ** exponent >= 2**128 else steps * 2.0**exponent


def expected_scale(
    largest: float, fmt: Float8Format, margin: int, power_of_two: bool, previous: float
) -> float:
    """`scale_from_amax` of one number, by exact fractions."""
    if not np.isfinite(largest) or largest == 0:
        return previous
    top = Fraction(fmt.max_finite) / 2**margin
    scale = nearest_float32(top / Fraction(float(largest)))
    scale = max(min(scale, float(FLT_MAX)), 2.0**-127)
    if power_of_two:
        power = 2.0**-127
        while 2 * power <= scale:
            power *= 2
        scale = power
    return scale


@given(FLOATS)
def test_amax_is_numpys_maximum_and_loses_no_nan(x: Array) -> None:
    expected = np.abs(x).max(initial=0) if x.size else np.float32(0)
    assert_bits_equal(amax(x), np.asarray(expected, np.float32))


def test_amax_of_special_values() -> None:
    assert np.isnan(amax(np.array([1, np.nan, np.inf], np.float32)))
    assert amax(np.array([1, -np.inf], np.float32)) == np.inf
    assert amax(np.zeros((0, 3), np.float32)) == 0
    assert amax(np.array([-2.5], ml_dtypes.bfloat16)) == 2.5
    assert not np.signbit(amax(np.array([-0.0], np.float32)))
    assert amax(np.array([1e-320, 1e300])) == np.inf  # rounded to float32 first


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 200_000, 399_999])
def test_one_bad_value_among_many_is_the_answer(bad: float, place: int) -> None:
    x = np.ones(400_000, np.float32)
    x[place] = bad
    assert_bits_equal(amax(x), np.asarray(abs(bad), np.float32))
    assert_bits_equal(amax(x.reshape(4, -1), block=(None, None))[0, 0], np.float32(abs(bad)))


@given(
    hnp.arrays(np.float32, st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 9))),
    st.tuples(st.none() | st.integers(1, 5), st.none() | st.integers(1, 5)),
)
def test_amax_of_blocks_is_that_of_each_piece(
    x: Array, block: tuple[int | None, int | None]
) -> None:
    found = amax(x, block=block)
    rows, columns = (
        size or max(x.shape[axis], 1) for size, axis in zip(block, (1, 2), strict=True)
    )
    down = -(-x.shape[1] // rows) if block[0] else 1
    across = -(-x.shape[2] // columns) if block[1] else 1
    assert found.shape == (x.shape[0], down, across)
    for n, i, j in np.ndindex(*found.shape):
        piece = x[n, i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
        assert_bits_equal(found[n, i, j], amax(piece))
    if x.size:
        wide = expand_blocks(found, block, x.shape)
        assert_bits_equal(wide[-1, -1, -1], found[-1, -1, -1])


def test_amax_of_strided_and_narrow_inputs() -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((200, 300)).astype(np.float32)
    assert_bits_equal(amax(x.T, block=(32, 1)), amax(x, block=(1, 32)).T)
    assert_bits_equal(amax(x[::2, ::-3], block=(1, 7)), amax(x[::2, ::-3].copy(), block=(1, 7)))
    half = x.astype(ml_dtypes.bfloat16)
    assert_bits_equal(amax(half, block=(16, 16)), amax(half.astype(np.float32), block=(16, 16)))


@given(st.lists(MAGNITUDES, min_size=1, max_size=5), st.randoms())
def test_a_group_agrees_whatever_the_order(ranks: list[np.float32], random: Any) -> None:
    merged = merge_amax(*ranks)
    assert_bits_equal(merged, amax(np.array(ranks, np.float32)))
    random.shuffle(ranks)
    assert_bits_equal(merge_amax(*ranks), merged, compare_nan_bits=True)


@given(MAGNITUDES, FORMATS, st.integers(0, 20), st.booleans())
@example(np.float32(6e-37), E4M3, 0, False)
@example(np.float32(1e-36), E4M3, 4, False)
@example(FLT_MAX, E4M3, 20, True)
def test_scales_by_exact_fractions(
    largest: np.float32, fmt: Float8Format, margin: int, power_of_two: bool
) -> None:
    found = scale_from_amax(largest, fmt, margin=margin, power_of_two=power_of_two, previous=7.0)
    expected = expected_scale(float(largest), fmt, margin, power_of_two, 7.0)
    assert_bits_equal(found, np.asarray(expected, np.float32))
    assert np.isfinite(inverse_scale(found))


@pytest.mark.parametrize(
    ("largest", "margin", "scale"),
    [
        (3.5, 0, 128.0),
        (3.5, 2, 32.0),
        (448.0, 0, 1.0),
        (0.0, 0, 7.0),  # nothing seen: the previous scale
        (np.inf, 0, 7.0),
        (np.nan, 0, 7.0),
        # The margin before the division: FLT_MAX the other way round.
        (1e-36, 4, np.float32(28) / np.float32(1e-36)),
        (FLT_MAX, 60, 2.0**-127),  # without a bound it would be 0, and its inverse Inf
    ],
)
def test_scale_from_amax(largest: float, margin: int, scale: float) -> None:
    found = scale_from_amax(np.float32(largest), E4M3, margin=margin, previous=7.0)
    assert_bits_equal(found, np.asarray(scale, np.float32))


def test_te_786_a_tiny_amax_gives_a_finite_scale_and_finite_codes() -> None:
    x = np.array([6e-37, -3e-37, 0], np.float32)
    scale = scale_from_amax(amax(x), E4M3)
    assert_bits_equal(scale, np.asarray(FLT_MAX))
    codes = quantize(x, E4M3, scale=scale)
    decoded = dequantize(codes, inverse_scale=inverse_scale(scale))
    assert np.isfinite(dequantize(codes)).all()
    assert np.isfinite(decoded).all()
    assert (np.abs(decoded - x) <= np.abs(x) / 16).all()


@pytest.mark.parametrize("fmt", VALUE_FORMATS, ids=lambda fmt: fmt.name)
def test_the_smallest_amax_whose_scale_is_in_range(fmt: Float8Format) -> None:
    # E4M3: 1.3166e-36. One step below, the division overflows.
    edge = np.float32(fmt.max_finite / float(FLT_MAX))
    while fmt.max_finite / float(edge) >= 2.0**128 * (1 - 2.0**-25):
        edge = np.nextafter(edge, np.float32(1))
    assert scale_from_amax(edge, fmt) <= FLT_MAX
    assert_bits_equal(scale_from_amax(np.nextafter(edge, np.float32(0)), fmt), np.asarray(FLT_MAX))
    below = scale_from_amax(np.nextafter(edge, np.float32(0)), fmt, power_of_two=True)
    assert_bits_equal(below, np.asarray(2.0**127, np.float32))


@pytest.mark.parametrize("power", [-20, -3, 3, 8, 9, 20])
def test_pytorch_136181_ao_3171_one_power_of_two_scale_in_every_path(power: int) -> None:
    """bf16 whose amax is just under a power of two: alone, by rows, by blocks, widened, at once."""
    top = np.float32(2.0**power * (1 - 2.0**-8))  # the bf16 below 2**power
    x = np.full((4, 256), top, ml_dtypes.bfloat16)
    expected = np.float32(2.0 ** (8 - power))  # 448 / amax lies in [1.75, 2) * 2**(8 - power)
    wide = x.astype(np.float32)
    scales = [
        scale_from_amax(amax(given), E4M3, power_of_two=True)
        for given in (x, wide, x.astype(np.float64), x[0], wide[:, :1])
    ]
    scales += [
        scale_from_amax(amax(given, block=block), E4M3, power_of_two=True)
        for given in (x, wide)
        for block in ((1, None), (None, 1), (1, 128), (128, 128))
    ]
    scales += [current_scale(amax(x), E4M3, preset=p, power_of_two=True) for p in CURRENT_PRESETS]
    for scale in scales:
        assert (scale == expected).all()


def test_te_current_scaling_raises_to_eps_and_gives_one_for_what_says_nothing() -> None:
    largest = np.array([0, 1e-9, 1, np.inf, np.nan], np.float32)
    found = current_scale(largest, E4M3, preset="transformer_engine", eps=1e-6)
    small = np.float32(448) / np.float32(1e-6)
    assert_bits_equal(found, np.array([small, small, 448, 1, 1], np.float32))
    plain = current_scale(largest, E4M3, preset="transformer_engine")
    assert_bits_equal(plain, np.array([1, 448 / np.float32(1e-9), 448, 1, 1], np.float32))


def test_torchao_current_scaling_divides_in_float64() -> None:
    largest = np.array([0, 1e-30, 3.3, np.inf, np.nan], np.float32)
    found = current_scale(largest, E4M3, preset="torchao")
    wide = np.array([448 / 1e-12, 448 / 1e-12, 448 / float(np.float32(3.3)), 0, np.nan])
    assert_bits_equal(found, wide.astype(np.float32))
    cleared = current_scale(largest, E4M3, preset="torchao", power_of_two=True)
    assert_bits_equal(cleared, np.array([2.0**48, 2.0**48, 128, 0, np.nan], np.float32))


@given(st.lists(MAGNITUDES, max_size=5), FORMATS, st.booleans())
def test_our_current_scale_is_scale_from_amax(
    largest: list[np.float32], fmt: Float8Format, power_of_two: bool
) -> None:
    array = np.array(largest, np.float32)
    expected = scale_from_amax(array, fmt, power_of_two=power_of_two)
    for preset in ("fp8lab", "transformer_engine"):
        found = current_scale(array, fmt, preset=preset, power_of_two=power_of_two)
        assert_bits_equal(found, expected)


def test_current_scales_are_never_rounded_twice() -> None:
    # An amax in float64 that float32 would round to 1 first.
    assert_bits_equal(
        current_scale(1 + 2.0**-25, E4M3, preset="torchao"),
        np.asarray(448 / (1 + 2.0**-25), np.float32),
    )


def test_ao_1766_small_float16_values_do_not_become_nan() -> None:
    x = np.array([0, 0, 0.1, 0.1], np.float16)
    scale = scale_from_amax(amax(x), E5M2)  # 573,440: beyond float16
    decoded = dequantize(quantize(x, E5M2, scale=scale), inverse_scale=inverse_scale(scale))
    assert_bits_equal(decoded[:2], np.zeros(2, np.float32))
    assert (np.abs(decoded[2:] - x[2:].astype(np.float32)) <= 0.1 / 8).all()


def test_static_scales_keep_their_inverse_in_range() -> None:
    assert_bits_equal(static_scale(64), np.asarray(64, np.float32))
    for edge in (2.0**-126, 2.0**127):
        assert 1 / float(inverse_scale(static_scale(edge))) == edge


NAN = np.float32(np.nan)


@pytest.mark.parametrize(
    ("error", "call", "message"),
    [
        (ValueError, lambda: amax(np.ones((2, 2)), block=(0, 1)), r"block is \(0, 1\); accepted"),
        (TypeError, lambda: amax(np.ones((2, 2)), block=(1.5, 1)), r"block is \(1.5, 1\)"),  # type: ignore[arg-type]
        (TypeError, lambda: amax(np.ones((2, 2)), block=128), "block is 128; accepted"),  # type: ignore[arg-type]
        (ValueError, lambda: amax(np.ones(2), block=(1, 1)), "blocks need at least 2 dimensions"),
        (TypeError, lambda: amax(np.ones(2, int)), "x has dtype int64; accepted: float64"),
        (TypeError, lambda: amax(["a"]), "x has dtype <U1"),
        (ValueError, lambda: merge_amax(), "no amax given"),
        (ValueError, lambda: merge_amax(-1.0), "amax holds negative values"),
        (TypeError, lambda: merge_amax(1j), "amax has dtype complex128"),
        (ValueError, lambda: scale_from_amax(1.0, E4M3, margin=-1), "margin is -1; accepted: an"),
        (ValueError, lambda: scale_from_amax(1.0, E4M3, margin=0.5), "margin is 0.5"),  # type: ignore[arg-type]
        (ValueError, lambda: scale_from_amax(-1.0, E4M3), "amax holds negative values"),
        (ValueError, lambda: scale_from_amax(1.0, E8M0), "E8M0 is a format of scales"),
        (TypeError, lambda: scale_from_amax(1.0, "E4M3"), "fmt is 'E4M3'; accepted: E4M3, E5M2"),  # type: ignore[arg-type]
        (TypeError, lambda: scale_from_amax(1.0, BFLOAT16), "accepted: E4M3, E5M2"),  # type: ignore[arg-type]
        (
            ValueError,
            lambda: scale_from_amax(1.0, E4M3, previous=np.ones(2)),
            r"previous has shape \(2,\)",
        ),
        (ValueError, lambda: current_scale(1.0, E4M3, preset="te"), "unknown preset 'te'; accept"),
        (ValueError, lambda: current_scale(1.0, E4M3, eps=-1.0), "eps is -1.0; accepted"),
        (ValueError, lambda: current_scale(1.0, E4M3, eps=float(NAN)), "eps is nan; accepted"),
        (ValueError, lambda: static_scale(0.0), r"scale is 0.0; accepted: numbers from 2\*\*-126"),
        (ValueError, lambda: static_scale(NAN), r"scale is .*nan.*; accepted"),
        (ValueError, lambda: static_scale([1.0, -1.0]), "scale is"),
        (TypeError, lambda: static_scale("1"), "scale has dtype <U1"),
    ],
)
def test_bad_input_is_refused(error: type[Exception], call: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_the_bounds_are_what_the_document_says() -> None:
    assert_bits_equal(FLT_MAX, np.uint32(0x7F7FFFFF).view(np.float32))
    assert float(SMALLEST_SCALE) == 2.0**-127


@pytest.mark.parametrize("preset", ["fp8lab", "transformer_engine", "torchao"])
def test_a_signalling_nan_is_an_amax_like_any_nan(preset: str) -> None:
    signalling = np.uint32(0x7F800001).view(np.float32)  # widening it raises NumPy's invalid flag
    expected = current_scale(np.float32(np.nan), E4M3, preset=preset)
    assert_bits_equal(current_scale(signalling, E4M3, preset=preset), expected)


def test_a_bfloat16_nan_is_an_amax_like_any_nan() -> None:
    nan = np.array([np.nan], ml_dtypes.bfloat16)
    assert_bits_equal(scale_from_amax(nan, E4M3), np.ones(1, np.float32))


@pytest.mark.parametrize("previous", [0.0, -3.0, np.nan, np.inf, 1e300])
def test_a_previous_scale_must_be_one(previous: float) -> None:
    with pytest.raises(ValueError, match="accepted: scales, finite and above zero"):
        scale_from_amax(0.0, E4M3, previous=previous)


def test_any_margin_gives_a_scale_with_an_inverse() -> None:
    assert float(scale_from_amax(1.0, E4M3, margin=10**400)) == 2.0**-127
