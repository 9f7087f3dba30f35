"""Stored moments: a slow form of each rule, round trips, guards, and states at the edges."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8lab.emulation.adamw_states import AdamState, adamw_state
from fp8lab.emulation.expansion import expansion_power, log2_ratio, scaled_exp2
from fp8lab.emulation.moments import StoredMoment, read_moment, store_moment, unguarded, zero_moment
from fp8lab.emulation.scalar import quantize_scalar
from fp8lab.formats import E4M3, E5M2
from fp8lab.optimizer_formats import MOMENT_FORMATS, MomentFormat, moment_format_named
from fp8lab.testing import assert_bits_equal, ragged_sizes, special_values
from fp8lab.testing.values import random_words, wide_floats

EVERY = pytest.mark.parametrize("name", sorted(MOMENT_FORMATS))
EXPANDED = [name for name in sorted(MOMENT_FORMATS) if "expanded" in name]
SCALED8 = [n for n, f in sorted(MOMENT_FORMATS.items()) if f.element in (E4M3, E5M2)]
OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}


def moment(seed: int, size: int, low: int = -40, high: int = -10) -> Any:
    words = random_words(seed, size)
    values = wide_floats(words[:, 1], low, high)
    values[words[:, 0] % 6 == 0] = 0
    return values


def slow_codes(values: Any, grad: Any, fmt: MomentFormat) -> list[int]:
    """The scaled rule, one block and one element at a time."""
    assert fmt.element is not None
    assert isinstance(fmt.element, type(E4M3))
    codes = []
    step = fmt.block or max(values.size, 1)
    for start in range(0, values.size, step):
        block = values[start : start + step]
        top = max((abs(x) for x in block if np.isfinite(x)), default=np.float32(0))
        inverse = max(np.float32(top) / np.float32(fmt.element.max_finite), np.float32(2.0**-126))
        scale = np.float32(1) / inverse
        for x, g in zip(block, grad[start : start + step], strict=True):
            y = float(np.float32(x * scale))
            if np.isinf(y):
                infinity = fmt.element.infinity_code
                code = fmt.element.nan_code if infinity is None else infinity
                code |= 0x80 if y < 0 and infinity is not None else 0
            else:
                rounding = "toward_zero" if fmt.guard == "settle" and g == 0 else "nearest_even"
                code = quantize_scalar(y, fmt.element, rounding=rounding)
            if fmt.guard == "keep" and x != 0 and code & 0x7F == 0:
                code |= 1
            codes.append(code)
    return codes


@given(
    name=st.sampled_from([name for name in SCALED8 if "expanded" not in name]),
    size=ragged_sizes(128),
    low=st.integers(-149, 90),
    span=st.integers(0, 37),
    seed=st.integers(0, 2**32 - 1),
    special=st.booleans(),
)
def test_scaled_codes_are_those_of_the_slow_form(
    name: str, size: int, low: int, span: int, seed: int, special: bool
) -> None:
    fmt = moment_format_named(name)
    values = moment(seed, size, low, low + span)
    grad = moment(seed + 1, size)
    if special:
        values[: min(size, 5)] = special_values()[3 : 3 + min(size, 5)]
        values[size // 2 : size // 2 + 1] = np.nan
    with np.errstate(all="ignore"):
        stored = store_moment(values, fmt, grad=grad)
        assert stored.codes.view(np.uint8).tolist() == slow_codes(values, grad, fmt)


@EVERY
def test_zeros_stay_zeros_and_give_no_nan(name: str) -> None:
    for size in (0, 1, 128, 300):
        zeros = np.zeros(size, np.float32)
        stored = store_moment(zeros, name, grad=zeros)
        assert_bits_equal(read_moment(stored), zeros)
        assert stored.scale is None or np.isfinite(stored.scale).all()
        assert stored.power is None or np.isfinite(stored.power).all()
    assert_bits_equal(
        read_moment(store_moment(-np.zeros(3, np.float32), name, grad=zeros[:3])),
        -np.zeros(3, np.float32),
    )


@EVERY
def test_an_all_zero_state_takes_a_first_step(name: str) -> None:
    """TransformerEngine's scale of an all-zero state is 0, and its inverse makes NaN."""
    param = np.ones(200, np.float32)
    grad = np.where(np.arange(200) % 2, np.float32(0.5), np.float32(0))
    state = AdamState(param, zero_moment((200,), name), zero_moment((200,), name))
    after = adamw_state(state, grad, step=1, **OPTIONS)
    assert np.isfinite(after.param).all()
    assert (after.param[1::2] < 1).all()
    assert_bits_equal(after.param[::2], param[::2])


@EVERY
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_shows_and_spares_its_neighbours(name: str, bad: float) -> None:
    values = moment(3, 256)
    values[7] = 0.0
    clean = read_moment(store_moment(values, name, grad=np.ones_like(values)))
    values[7] = bad
    found = read_moment(store_moment(values, name, grad=np.ones_like(values)))
    assert not np.isfinite(found[7])
    others = np.arange(256) != 7
    assert_bits_equal(found[others], clean[others])


@EVERY
def test_the_largest_of_a_block_keeps_its_magnitude(name: str) -> None:
    fmt = moment_format_named(name)
    values = moment(5, 512)
    found = read_moment(store_moment(values, fmt, grad=np.ones_like(values)))
    largest = np.abs(values).argmax()
    tolerance = {"float32": 0.0, "bfloat16": 2.0**-8}.get(name, 2.0**-22)
    assert abs(found[largest] - values[largest]) <= tolerance * abs(values[largest])


@pytest.mark.parametrize("name", EXPANDED)
@pytest.mark.parametrize("value", [1.0, 3.3e-5, 2.0**-149, 2.0**-126, 3.4e38, 1.1754942e-38])
def test_expansion_gives_equal_magnitudes_back_exactly(name: str, value: float) -> None:
    """COAT: a group of equal magnitudes gives an infinite power and NaN codes."""
    values = np.full(128, value, np.float32)
    values[::3] *= -1
    values[5] = 0
    stored = store_moment(values, name, grad=np.ones_like(values))
    assert_bits_equal(read_moment(stored), values)


@pytest.mark.parametrize("name", EXPANDED)
@given(seed=st.integers(0, 2**32 - 1), low=st.integers(-149, 60), span=st.integers(0, 60))
def test_expansion_depends_on_no_order(name: str, seed: int, low: int, span: int) -> None:
    """COAT: the minimum of a group depends on the order where a lane holds 0."""
    values = moment(seed, 128, low, low + span)
    order = np.random.default_rng(seed).permutation(128)
    grad = np.ones_like(values)
    stored = store_moment(values, name, grad=grad)
    permuted = store_moment(values[order], name, grad=grad)
    assert_bits_equal(permuted.codes, stored.codes[order])
    assert permuted.scale is not None
    assert stored.scale is not None
    assert_bits_equal(permuted.scale, stored.scale)


@given(seed=st.integers(0, 2**32 - 1), low=st.integers(-149, 60), span=st.integers(0, 67))
def test_expansion_loses_no_magnitude(seed: int, low: int, span: int) -> None:
    values = moment(seed, 128, low, low + span)
    found = read_moment(store_moment(values, "e4m3_128_expanded"))
    normal = np.abs(values) >= 2.0**-120
    assert ((found != 0) == (values != 0))[normal].all()
    assert (np.signbit(found) == np.signbit(values)).all()
    # Half a code is 1/16 of most magnitudes, and up to 0.22 of the smallest, 2**-7.8; the power k
    # shrinks that where it is above 1, and stretches it where it is below.
    magnitudes = np.abs(values[values != 0])
    if magnitudes.size:
        k = max(np.floor(265.8 / max(np.log2(magnitudes.max() / magnitudes.min()), 1e-9)), 1) / 16
        bound = 1.28 ** (1 / k) - 1 + 1e-5
        relative = np.abs(found / np.where(values == 0, 1, values) - 1)[normal & (values != 0)]
        assert (relative <= bound).all()


def test_logarithm_and_exponential_are_close() -> None:
    words = random_words(11, 4000)
    x, top = (np.abs(wide_floats(words[:, i], -149, 127)) for i in range(2))
    exact = np.log2(x.astype(np.float64)) - np.log2(top.astype(np.float64))
    found = log2_ratio(x, top)
    assert (np.abs(found - exact) <= 2.0**-22 * np.maximum(np.abs(exact), 0.5)).all()
    t = (-words[:, 0] % np.uint64(1 << 20)).astype(np.float32) * np.float32(-(2.0**-14))
    exact = np.exp2(t.astype(np.float64))
    found = scaled_exp2(np.float32(1), t)
    assert (np.abs(found - exact) <= 2.0**-22 * exact + 2.0**-149).all()
    assert_bits_equal(scaled_exp2(x, np.zeros_like(x)), x)
    assert not log2_ratio(x, x).any()


def test_the_power_of_a_block_is_coats_and_finite() -> None:
    two = np.float32(2.0)
    assert expansion_power(np.float32(2.0**-15), two) == 16 / 16  # floor(265.8 / 16) / 16
    assert expansion_power(two, two) == 1
    assert expansion_power(np.float32(0), np.float32(0)) == 1
    assert expansion_power(np.float32(2.0**-149), np.float32(3e38)) == 1 / 16
    beside = expansion_power(np.nextafter(two, np.float32(0)), two)
    assert np.isfinite(beside)
    assert beside > 1e6


def test_without_the_guard_a_lost_second_moment_throws_the_parameter() -> None:
    """torchao's AdamWFp8: v below amax/458752 codes to 0, and g = 0 beside m moves by 900*lr."""
    size = 256
    grads = np.zeros(size, np.float32)
    m, v = np.full(size, 1e-5, np.float32), np.full(size, 1e-10, np.float32)
    m[0], v[0] = 1e-3, 1e-3  # sets the scale of v
    moved = {}
    for name in ("e4m3_256", "e4m3_256_keep", "e4m3_128_expanded", "float32"):
        state = AdamState(
            np.zeros(size, np.float32), store_moment(m, "float32"), store_moment(v, name)
        )
        after = adamw_state(state, grads, step=1000, **OPTIONS)
        moved[name] = float(np.abs(after.param[1:]).max() / OPTIONS["lr"])
    assert moved["e4m3_256"] > 500
    assert moved["float32"] < 2
    assert moved["e4m3_256_keep"] < 2
    assert moved["e4m3_128_expanded"] < 2


def test_without_the_guard_a_stuck_first_moment_drifts_for_ever() -> None:
    """unsloth-zoo 962: gradient 0 for ever, quantised first moment."""
    size = 256
    grad = np.zeros(size, np.float32)
    grad[0] = 1.0  # one element keeps the scale of its block up
    m = np.full(size, 1e-3, np.float32)
    m[0] = 1.0
    v = np.full(size, 1e-6, np.float32)
    last = {}
    for name in ("e4m3_128", "e4m3_128_settle", "e5m2_256_settle", "e4m3_128_expanded_settle"):
        state = AdamState(
            np.zeros(size, np.float32), store_moment(m, name, grad=grad), store_moment(v, "float32")
        )
        for step in range(1000, 1400):
            before = state.param
            state = adamw_state(state, grad, step=step, **OPTIONS)
        last[name] = float(np.abs(state.param - before)[1:128].max())
    assert last["e4m3_128"] > 1e-5, "the fault is there to be guarded against"
    assert last["e4m3_128_settle"] == 0
    assert last["e5m2_256_settle"] == 0
    assert last["e4m3_128_expanded_settle"] < 1e-12


@EVERY
def test_zero_gradients_for_ever_leave_a_fresh_parameter_alone(name: str) -> None:
    param = moment(1, 300)
    zero = np.zeros(300, np.float32)
    state = AdamState(param, zero_moment((300,), name), zero_moment((300,), name))
    for step in range(1, 40):
        state = adamw_state(state, zero, step=step, **OPTIONS)
    assert_bits_equal(state.param, param)


@EVERY
def test_the_update_uses_the_moment_before_it_is_stored(name: str) -> None:
    rng = np.random.default_rng(1)
    grad = rng.normal(size=300).astype(np.float32)
    zeros = zero_moment((300,), name)
    param = np.zeros(300, np.float32)
    found = adamw_state(AdamState(param, zeros, zeros), grad, step=1, **OPTIONS)
    plain = zero_moment((300,), "float32")
    want = adamw_state(AdamState(param, plain, plain), grad, step=1, **OPTIONS)
    assert_bits_equal(found.param, want.param)


def test_formats_are_checked() -> None:
    with pytest.raises(ValueError, match=r"unknown moment format 'fp8'; accepted: float32, bfl"):
        moment_format_named("fp8")
    with pytest.raises(ValueError, match="block is 64; accepted: None, 128, 256"):
        MomentFormat("x", E4M3, True, 64)
    with pytest.raises(ValueError, match="an expanded moment is scaled by blocks"):
        MomentFormat("x", E4M3, expanded=True)
    with pytest.raises(ValueError, match="a scaled moment has an element format"):
        MomentFormat("x", None, scaled=True)
    with pytest.raises(
        ValueError, match=r"e4m3_128_settle needs grad, of the moment's shape \(3,\)"
    ):
        store_moment(np.zeros(3, np.float32), "e4m3_128_settle")
    assert unguarded("e4m3_128_settle") == MOMENT_FORMATS["e4m3_128"]
    assert replace(MOMENT_FORMATS["e4m3_128"]).bits_per_element == 8.25
    assert MOMENT_FORMATS["e4m3_128_expanded"].bits_per_element == 8.5
    assert MOMENT_FORMATS["float32"].bits_per_element == 32


def test_a_stored_moment_keeps_its_shape_and_is_a_copy() -> None:
    values = moment(2, 60).reshape(3, 20)
    for name in sorted(MOMENT_FORMATS):
        stored = store_moment(values, name, grad=values)
        assert isinstance(stored, StoredMoment)
        assert stored.codes.shape == (3, 20)
        assert not np.shares_memory(stored.codes, values)
        assert read_moment(stored).shape == (3, 20)
