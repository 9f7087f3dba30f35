"""The testing kit itself: what it must find, planted; what it must not report; its bridges."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import hypothesis
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8lab.emulation import adamw as adamw_oracle
from fp8lab.emulation import casting as oracle
from fp8lab.formats import E4M3, E5M2, E8M0, FORMATS, Float8Format
from fp8lab.testing import (
    CAST_KINDS,
    AdamWCase,
    adamw_states,
    assert_bits_equal,
    cast_inputs,
    cast_values,
    compiled_ptx,
    edge_values,
    ragged_sizes,
    run_kernel,
    scales,
    special_values,
    to_numpy,
    to_torch,
)
from fp8lab.testing.values import random_words

Array = np.ndarray[Any, np.dtype[Any]]

WIDE = [np.dtype(t) for t in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)]
NARROW = [fmt.dtype for fmt in FORMATS.values()]
OTHERS = [np.dtype(t) for t in (np.bool_, np.int8, np.int32, np.uint8, np.uint64)]
BOTH = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)


def array_of(dtype: Any, *values: float) -> Array:
    return np.array(values, dtype=dtype)


def codes(fmt: Float8Format, *bits: int) -> Array:
    return np.array(bits, dtype=np.uint8).view(fmt.dtype)


def random_array(dtype: np.dtype[Any], size: int) -> Array:
    """Any bits; booleans are 0 and 1."""
    words = random_words(size, size)[:, 0].astype(f"u{dtype.itemsize}")
    return words % 2 == 1 if dtype == np.bool_ else words.view(dtype)


# assert_bits_equal


@pytest.mark.parametrize("dtype", [*WIDE, *NARROW, *OTHERS], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 0), (2, 3, 5)])
def test_equal_arrays_pass_whatever_holds_them(
    dtype: np.dtype[Any], shape: tuple[int, ...]
) -> None:
    first = random_array(dtype, int(np.prod(shape))).reshape(shape)
    for actual in (first, first.copy(), to_torch(first)):
        for expected in (first, first.copy(order="F"), to_torch(first)):
            assert_bits_equal(actual, expected, compare_nan_bits=True)


@given(
    dtype=st.sampled_from([*WIDE, *NARROW]),
    size=st.integers(1, 300),
    data=st.data(),
    as_tensor=st.booleans(),
)
def test_one_flipped_bit_anywhere_is_reported(
    dtype: np.dtype[Any], size: int, data: st.DataObject, as_tensor: bool
) -> None:
    expected = random_array(dtype, size)
    place = data.draw(st.integers(0, size - 1), label="place")
    bit = data.draw(st.integers(0, 8 * dtype.itemsize - 1), label="bit")
    actual = expected.copy()
    words = actual.view(f"u{dtype.itemsize}")
    words[place] ^= words.dtype.type(1 << bit)
    report = rf"^1 of {size} elements differ \({dtype}, .* first at {place}\n"
    with pytest.raises(AssertionError, match=report):
        assert_bits_equal(
            to_torch(actual) if as_tensor else actual, expected, compare_nan_bits=True
        )


@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_nan_equals_any_nan_in_wide_types_but_no_number(dtype: np.dtype[Any]) -> None:
    nan = special_values(np.float32 if dtype == np.float64 else dtype)
    with np.errstate(invalid="ignore"):
        nan = nan[np.isnan(nan.astype(np.float32))].astype(dtype)
    one = np.full(nan.shape, nan[0], dtype=dtype)
    assert_bits_equal(nan, one)
    with pytest.raises(AssertionError, match="NaN of other bits"):
        assert_bits_equal(nan, one, compare_nan_bits=True)
    for number in (0.0, np.inf, 1.0):
        for actual, expected in [(one[0], number), (number, one[0])]:
            with pytest.raises(AssertionError, match="1 NaN against a number"):
                assert_bits_equal(array_of(dtype, actual), array_of(dtype, expected))


def test_nan_codes_of_fp8_count() -> None:
    for fmt, first, second in [(E4M3, 0x7F, 0xFF), (E5M2, 0x7F, 0x7E)]:
        assert_bits_equal(codes(fmt, first), codes(fmt, first))
        with pytest.raises(AssertionError, match="1 NaN of other bits"):
            assert_bits_equal(codes(fmt, first), codes(fmt, second))


@pytest.mark.parametrize("dtype", [*WIDE, E4M3.dtype, E5M2.dtype], ids=str)
def test_signed_zeros_differ(dtype: np.dtype[Any]) -> None:
    with pytest.raises(AssertionError, match=r"distance  0 ulp\n1 zero of the wrong sign"):
        assert_bits_equal(array_of(dtype, 0.0), array_of(dtype, -0.0))


def test_shape_and_dtype_count() -> None:
    ones = np.ones((2, 3), np.float32)
    with pytest.raises(AssertionError, match=r"shapes differ: actual \(3, 2\), expected \(2, 3\)"):
        assert_bits_equal(ones.T, ones)
    with pytest.raises(AssertionError, match="shapes differ"):
        assert_bits_equal(ones[0, 0], ones[0, :1])
    with pytest.raises(AssertionError, match="dtypes differ: actual float64, expected float32"):
        assert_bits_equal(ones.astype(np.float64), ones)
    with pytest.raises(AssertionError, match="dtypes differ: actual uint8, expected float8_e4m3fn"):
        assert_bits_equal(codes(E4M3, 1).view(np.uint8), codes(E4M3, 1))


def test_unfit_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="actual has dtype complex64"):
        assert_bits_equal(np.ones(1, np.complex64), np.ones(1))
    with pytest.raises(ValueError, match=r"weight has shape \(2,\), which does not broadcast"):
        assert_bits_equal(np.ones(3), np.ones(3), inputs={"weight": np.ones(2)})


def test_report_in_full() -> None:
    x = np.array([[1.0, 126.24], [0.001, 464.0]], np.float32)
    expected = codes(E4M3, 0x38, 0x70, 0x01, 0x7E).reshape(2, 2)
    actual = codes(E4M3, 0x38, 0x6F, 0x81, 0x7F).reshape(2, 2)
    with pytest.raises(AssertionError) as failure:
        assert_bits_equal(to_torch(actual), expected, inputs={"x": x, "scale": np.float32(1)})
    assert str(failure.value) == "\n".join(
        [
            "3 of 4 elements differ (float8_e4m3fn, shape (2, 2)); first at (0, 1)",
            "  x         126.24 (0x42FC7AE1)",
            "  scale     1.0 (0x3F800000)",
            "  expected  128.0 (0x70)",
            "  actual    120.0 (0x6F)",
            "  distance  1 ulp",
            "largest distance 2 ulp; 1 NaN against a number",
            "index   x                    scale             expected            actual"
            "               distance",
            "(0, 1)  126.24 (0x42FC7AE1)  1.0 (0x3F800000)  128.0 (0x70)        120.0 (0x6F)"
            "         1 ulp",
            "(1, 0)  0.001 (0x3A83126F)   1.0 (0x3F800000)  0.001953125 (0x01)  -0.001953125 (0x81)"
            "  2 ulp",
            "(1, 1)  464.0 (0x43E80000)   1.0 (0x3F800000)  448.0 (0x7E)        nan (0x7F)"
            "           NaN",
        ]
    )


def test_the_report_of_a_cast_names_a_fault_that_explains_every_code() -> None:
    x = edge_values(E4M3)
    expected = oracle.quantize(x, E4M3, scale=0.5)
    away = ties_away(x * np.float32(0.5), E4M3)
    inputs = {"x": x, "scale": np.float32(0.5)}
    with pytest.raises(AssertionError, match="probable fault: ties-away: A value halfway between"):
        assert_bits_equal(away, expected, inputs=inputs)
    away.view(np.uint8)[7] ^= 1  # one more code is wrong: nothing explains them all
    with pytest.raises(AssertionError, match=r"elements differ(?s:(?!probable fault).)*\Z"):
        assert_bits_equal(away, expected, inputs=inputs)


def test_long_reports_are_short() -> None:
    with pytest.raises(AssertionError, match="1000 of 1000 elements differ") as failure:
        assert_bits_equal(np.zeros(1000, np.float32), np.ones(1000, np.float32))
    assert "largest distance 1065353216 ulp" in str(failure.value)
    assert len(str(failure.value).splitlines()) == 14


@pytest.mark.parametrize(
    ("actual", "expected", "ulps"),
    [
        (np.float32(-(2.0**-149)), np.float32(2.0**-149), 2),
        (np.float64(np.inf), np.float64(np.finfo(np.float64).max), 1),
        (np.float64(-np.inf), np.float64(np.inf), 2 * 0x7FF0000000000000),
        (codes(E8M0, 0)[0], codes(E8M0, 254)[0], 254),
        (np.uint64(2**64 - 1), np.uint64(0), 2**64 - 1),
        (np.int64(-(2**63)), np.int64(2**63 - 1), 2**64 - 1),
    ],
)
def test_distances(actual: Any, expected: Any, ulps: int) -> None:
    with pytest.raises(AssertionError, match=f"distance  {ulps} ulp"):
        assert_bits_equal(actual, expected)


def test_comparison_and_strategies_need_no_torch() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "import numpy as np, fp8lab.testing as kit\n"
        "from fp8lab.formats import E4M3\n"
        "kit.assert_bits_equal(kit.edge_values(E4M3), kit.edge_values(E4M3))\n"
        "kit.run_kernel(np.negative, np.ones(3))\n"
        "kit.assert_bits_equal(np.ones(3), np.zeros(3))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert "AssertionError: 3 of 3 elements differ" in done.stderr, done.stderr


# The bridge


@pytest.mark.parametrize("dtype", [*WIDE, *NARROW, *OTHERS[:-1]], ids=str)
def test_bridge_keeps_every_bit_both_ways(dtype: np.dtype[Any], device: str) -> None:
    array = random_array(dtype, 256).reshape(2, 128)
    for given_array in (array, array[::-1, 1::3], array.T, array[:0], array[0, 0, ...]):
        there = to_torch(given_array, device=device)
        assert str(there.dtype) == f"torch.{given_array.dtype.name}"
        assert there.device.type == device
        assert_bits_equal(to_numpy(there), given_array, compare_nan_bits=True)


@pytest.mark.parametrize("dtype", [*WIDE, *NARROW], ids=str)
def test_bridge_shares_memory_on_the_cpu(dtype: np.dtype[Any]) -> None:
    array = np.zeros(4, dtype)
    tensor = to_torch(array)
    to_numpy(tensor)[2] = 1
    assert array[2] == 1
    array.flags.writeable = False
    to_numpy(to_torch(array))[2] = 0.5  # a read-only array is copied
    assert array[2] == 1


def test_bridge_takes_parameters() -> None:
    assert_bits_equal(torch.nn.Parameter(torch.ones(3)), np.ones(3, np.float32))


# The values


@BOTH
@pytest.mark.parametrize("dtype", WIDE[1:], ids=str)
def test_edges_hold_every_tie_and_its_neighbours(fmt: Float8Format, dtype: np.dtype[Any]) -> None:
    values = [fmt.value_of_magnitude(code) for code in range(fmt.max_code + 1)]
    values.append(2 * values[-1] - values[-2])
    ties = (np.array(values[:-1]) + np.array(values[1:])) / 2
    edges = edge_values(fmt, dtype=dtype)
    words = edges.view(f"u{dtype.itemsize}").astype(np.int64)
    assert len(np.unique(words)) == len(words)
    for sign in (1, -1):
        wanted = (sign * ties).astype(dtype)
        assert (wanted.astype(np.float64) == sign * ties).all()
        for step in (-1, 0, 1):
            assert np.isin(wanted.view(f"u{dtype.itemsize}").astype(np.int64) + step, words).all()


def test_scaled_edges_land_on_the_ties() -> None:
    for scale in (0.3, 2.0**-40, 3e20):
        y = edge_values(E4M3, scale=scale) * np.float32(scale)
        ties = edge_values(E4M3)[::5]
        nearest = np.abs(y[None, :] - ties[:, None]).min(axis=1)
        assert (nearest <= 4 * np.spacing(np.abs(ties))).all()


def test_values_of_a_seed_do_not_depend_on_how_many_are_asked_for() -> None:
    whole = cast_values(random_words(5, 100), CAST_KINDS, E5M2)
    part = cast_values(random_words(5, 20, skip=30), CAST_KINDS, E5M2)
    assert_bits_equal(part, whole[30:50], compare_nan_bits=True)
    with pytest.raises(ValueError, match=r"unknown kinds \['odd'\]"):
        cast_values(random_words(5, 1), ["odd"], E5M2)
    with pytest.raises(TypeError, match="dtype is int32"):
        edge_values(E4M3, dtype=np.int32)


@given(scale=scales())
def test_scales_are_what_a_cast_accepts(scale: float) -> None:
    assert 0 < scale < np.inf
    assert scale == float(np.float32(scale))


@given(case=adamw_states())
def test_adamw_states_are_what_a_step_accepts(case: AdamWCase) -> None:
    shapes = {array.shape for array in case.tensors}
    assert shapes == {case.param.shape}
    assert not (case.exp_avg_sq < 0).any()
    adamw_oracle.adamw(*case.tensors, **case.options)


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 127, 129, 191, 193])
def test_ragged_sizes_reach_the_edges(size: int) -> None:
    assert hypothesis.find(ragged_sizes(64), lambda drawn: drawn == size) == size


# Planted faults: a strategy that does not find them is of no use

Cast = Callable[[Array, Float8Format], Array]


def ties_away(x: Array, fmt: Float8Format) -> Array:
    """Right but for ties, which go to the larger magnitude."""
    values = np.array([fmt.value_of_magnitude(code) for code in range(fmt.max_code + 1)])
    ties = (values[:-1] + values[1:]) / 2
    is_tie = np.isin(np.abs(x), ties)
    upper = np.searchsorted(values, np.where(is_tie, np.abs(x), 0)).astype(np.uint8)
    signed = np.where(np.signbit(x), upper | 0x80, upper).astype(np.uint8)
    right = oracle.quantize(x, fmt).view(np.uint8)
    return np.where(is_tie, signed, right).view(fmt.dtype)


def without_subnormals(x: Array, fmt: Float8Format) -> Array:
    bits = oracle.quantize(x, fmt).view(np.uint8)
    small = (bits & 0x7F) < 1 << fmt.mantissa_bits
    return np.where(small, bits & 0x80, bits).view(fmt.dtype)


def without_negative_zero(x: Array, fmt: Float8Format) -> Array:
    bits = oracle.quantize(x, fmt).view(np.uint8)
    return np.where(bits == 0x80, 0, bits).astype(np.uint8).view(fmt.dtype)


def nan_lost_in_clamp(x: Array, fmt: Float8Format) -> Array:
    limit = np.float32(fmt.max_finite)
    return oracle.quantize(np.fmin(np.fmax(x, -limit), limit), fmt)


def through_float16(x: Array, fmt: Float8Format) -> Array:
    with np.errstate(all="ignore"):
        return oracle.quantize(x.astype(np.float16), fmt)


def as_torch_casts(x: Array, fmt: Float8Format) -> Array:
    """No saturation, or NaN with a sign: what differs depends on the release."""
    return to_numpy(torch.from_numpy(x.copy()).to(getattr(torch, fmt.dtype_name)))


FAULTS: dict[str, Cast] = {
    "ties away": ties_away,
    "truncation": lambda x, fmt: oracle.quantize(x, fmt, rounding="toward_zero"),
    "no saturation": lambda x, fmt: oracle.quantize(x, fmt, overflow="ieee"),
    "torch": as_torch_casts,
    "no subnormals": without_subnormals,
    "no negative zero": without_negative_zero,
    "NaN lost in clamp": nan_lost_in_clamp,
    "double rounding": through_float16,
}


def smallest(strategy: st.SearchStrategy[Any], differs: Callable[[Any], bool]) -> Any:
    """The smallest example found; hypothesis.errors.NoSuchExample when there is none."""
    settings = hypothesis.settings(derandomize=True, database=None, max_examples=200)
    return hypothesis.find(strategy, differs, settings=settings)


def unequal(actual: Any, expected: Any) -> bool:
    try:
        assert_bits_equal(actual, expected)
    except AssertionError:
        return True
    return False


@BOTH
@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_casts_are_found_and_shrink_to_one_element(fmt: Float8Format, fault: str) -> None:
    cast = FAULTS[fault]
    found = smallest(cast_inputs(fmt), lambda x: unequal(cast(x, fmt), oracle.quantize(x, fmt)))
    assert found.shape == (1,)


@BOTH
def test_a_right_cast_is_not_reported(fmt: Float8Format) -> None:
    """The oracle's other form, which goes through float64, stands for somebody's right kernel."""

    def differs(x: Array) -> bool:
        with np.errstate(invalid="ignore"):  # signalling NaN
            wide = x.astype(np.float64)
        return unequal(oracle.quantize(wide, fmt), oracle.quantize(x, fmt))

    with pytest.raises(hypothesis.errors.NoSuchExample):
        smallest(cast_inputs(fmt), differs)


@BOTH
@pytest.mark.parametrize(
    "scaled",
    [
        lambda x, scale: x.astype(np.float64) * float(scale),
        lambda x, scale: x / (np.float32(1) / scale),
        lambda x, scale: (x.astype(ml_dtypes.bfloat16) * scale).astype(np.float32),
    ],
    ids=["not rounded to float32", "divided by the inverse", "scaled in bfloat16"],
)
def test_wrong_scaling_is_found(fmt: Float8Format, scaled: Callable[..., Array]) -> None:
    scale = np.float32(0.3)

    def differs(x: Array) -> bool:
        with np.errstate(all="ignore"):
            y = scaled(x, scale)
        return unequal(oracle.quantize(y, fmt), oracle.quantize(x, fmt, scale=scale))

    assert smallest(cast_inputs(fmt, scale=0.3), differs).shape == (1,)


def moments_fused(case: AdamWCase) -> Array:
    beta1, gained = np.float32(case.betas[0]), np.float32(1 - case.betas[0])
    product = (gained * case.grad).astype(np.float64)
    return (float(beta1) * case.exp_avg.astype(np.float64) + product).astype(np.float32)


def decay_of_rounded_factors(case: AdamWCase) -> Array:
    """lr * weight_decay from two float32 instead of two float64."""
    return np.asarray(np.float32(case.lr) * np.float32(case.weight_decay) * case.param)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        (moments_fused, lambda case: adamw_oracle.adamw(*case.tensors, **case.options)[1]),
        (
            decay_of_rounded_factors,
            lambda case: np.float32(case.lr * case.weight_decay) * case.param,
        ),
    ],
    ids=["fused multiply-add", "decay rounded twice"],
)
def test_wrong_optimizers_are_found(
    wrong: Callable[[AdamWCase], Array], right: Callable[[AdamWCase], Array]
) -> None:
    def differs(case: AdamWCase) -> bool:
        with np.errstate(all="ignore"):
            return unequal(wrong(case), right(case))

    assert smallest(adamw_states(), differs).param.shape == (1,)


# Calling and compiling kernels


def test_run_kernel_lets_nan_and_overflow_be() -> None:
    def kernel(x: Array, *, offset: float) -> Array:
        return np.asarray(x * np.float32(3e38) - np.float32(offset))

    huge = np.array([np.inf, 3e38], np.float32)
    result = run_kernel(kernel, huge, offset=np.inf)
    assert_bits_equal(result, array_of(np.float32, np.nan, np.nan))


def test_a_kernel_that_does_not_compile_says_why() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)does not compile for sm_90.*no_such_kernel"):
        compiled_ptx("fp8lab.testing.ptx:no_such_kernel", {}, {})
