"""Master weights in fewer bits: the split over patterns, the guards, stochastic rounding."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from fp8lab.emulation.adamw_states import AdamState, adamw_state
from fp8lab.emulation.casting import quantize
from fp8lab.emulation.masters import join_master, round_master, split_master
from fp8lab.emulation.moments import zero_moment
from fp8lab.emulation.random import random_words as philox_words
from fp8lab.formats import BFLOAT16
from fp8lab.testing import assert_bits_equal

OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}


def floats(*words: int) -> Any:
    """The float32 of these bits."""
    return np.array(words, np.uint32).view(np.float32)


def every_upper_half() -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """All 65,536 upper halves, each with the lower halves where rounding turns."""
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    return (np.arange(1 << 16, dtype=np.uint32)[:, None] << np.uint32(16) | lower).view(np.float32)


def test_the_split_is_exact_for_every_finite_pattern_and_infinities() -> None:
    values = every_upper_half()
    weight, remainder = split_master(values)
    assert weight.dtype == ml_dtypes.bfloat16
    assert remainder.dtype == np.int16
    nan = np.isnan(values)
    assert_bits_equal(join_master(weight, remainder)[~nan], values[~nan])


def test_nan_stays_nan_on_both_sides() -> None:
    """TransformerEngine: canonical NaN 0x7FFFFFFF becomes -0.0 in the bfloat16 half."""
    values = every_upper_half()
    nan = np.isnan(values)
    weight, remainder = split_master(values[nan])
    assert np.isnan(weight.astype(np.float32)).all()
    assert np.isnan(join_master(weight, remainder)).all()


def test_the_weight_is_a_cast_but_at_ties() -> None:
    """apex 1842: float32 master 0x3F808000, and where the split differs from a cast to even."""
    weight, remainder = split_master(floats(0x3F808000))
    assert weight.view(np.uint16)[0] == 0x3F81
    assert_bits_equal(join_master(weight, remainder), floats(0x3F808000))
    values = every_upper_half()
    values = values[~np.isnan(values)]
    words = values.view(np.uint32)
    cast = quantize(values, BFLOAT16, overflow="ieee").view(np.uint16)
    differs = split_master(values)[0].view(np.uint16) != cast
    tie_above_even = ((words & 0xFFFF) == 0x8000) & ((words >> 16) & 1 == 0)
    assert (differs == (tie_above_even & np.isfinite(values))).all()


def test_stochastic_rounding_goes_up_in_its_share_of_draws() -> None:
    draws = np.arange(1 << 16, dtype=np.uint32)
    for word in (0x3F800001, 0x3F80AAAB, 0xBF80FFFF, 0x00000001, 0x3F800000):
        values = np.full(1 << 16, word, np.uint32).view(np.float32)
        up = round_master(values, draws).view(np.uint16) != word >> 16
        assert up.sum() == word & 0xFFFF
        # High bits of the word do not matter.
        assert (
            round_master(values, draws | np.uint32(0xABCD0000)).view(np.uint16) != word >> 16
        ).sum() == up.sum()


def test_stochastic_rounding_at_the_edges() -> None:
    never, always = np.full(4, 0xFFFF, np.uint32), np.zeros(4, np.uint32)
    values = floats(0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FFFFFFF)
    for draws in (never, always):
        assert round_master(values, draws).view(np.uint16).tolist() == [
            0x7F7F,
            0x7F80,
            0xFF80,
            0x7FFF,
        ]


@pytest.mark.parametrize("word", [0x7FFFFFFF, 0xFFC00000, 0x7F800001])
def test_a_nan_master_stays_one(word: int) -> None:
    values = floats(word, 0x3F800000)
    weight, remainder = split_master(values)
    state = AdamState(weight, zero_moment((2,), "float32"), zero_moment((2,), "float32"), remainder)
    for step in range(1, 4):
        state = adamw_state(state, np.ones(2, np.float32), step=step, **OPTIONS)
    assert np.isnan(state.param.astype(np.float32))[0]
    assert state.remainder is not None
    assert np.isfinite(join_master(state.param, state.remainder)[1])


def test_small_updates_survive_in_every_master_but_a_rounded_one() -> None:
    """A step of 1e-5 from 1 is below half a bfloat16 step: the remainder and the draws keep it."""
    one = np.ones(4096, np.float32)
    weight, remainder = split_master(one)
    moments = zero_moment((4096,), "float32"), zero_moment((4096,), "float32")
    options = OPTIONS | {"lr": 1e-5}
    exact = AdamState(one, *moments)
    kept = AdamState(weight, *moments, remainder)
    drawn = AdamState(weight, *moments)
    for step in range(1, 51):
        exact = adamw_state(exact, one, step=step, **options)
        kept = adamw_state(kept, one, step=step, **options)
        words = philox_words(step, 4096)
        drawn = adamw_state(drawn, one, step=step, random_words=words, **options)
    assert kept.remainder is not None
    assert_bits_equal(join_master(kept.param, kept.remainder), exact.param)
    moved, wanted = 1 - drawn.param.astype(np.float64).mean(), 1 - float(exact.param[0])
    # 50 steps of at most one bfloat16 step (2**-8) below 1, 4096 elements: three deviations.
    deviation = 2.0**-8 * np.sqrt(50 * 0.25 / 4096)
    assert abs(moved - wanted) <= 3 * deviation
    assert moved > 0


def test_what_does_not_fit_is_refused() -> None:
    weight, remainder = split_master(np.ones(3, np.float32))
    moments = zero_moment((3,), "float32"), zero_moment((3,), "float32")
    grad = np.ones(3, np.float32)
    with pytest.raises(ValueError, match="without a remainder needs random_words"):
        adamw_state(AdamState(weight, *moments), grad, step=1, **OPTIONS)
    with pytest.raises(ValueError, match=r"random_words has shape \(2,\); param has \(3,\)"):
        adamw_state(
            AdamState(weight, *moments),
            grad,
            step=1,
            random_words=np.zeros(2, np.uint32),
            **OPTIONS,
        )
    with pytest.raises(TypeError, match="param has dtype float64; accepted: float32, bfloat16"):
        adamw_state(AdamState(np.ones(3), *moments), grad, step=1, **OPTIONS)
    with pytest.raises(TypeError, match="grad has dtype int64; accepted: float32, bfloat16"):
        adamw_state(AdamState(grad, *moments), np.ones(3, np.int64), step=1, **OPTIONS)
    with pytest.raises(ValueError, match=r"remainder has shape \(2,\); param has \(3,\)"):
        adamw_state(AdamState(weight, *moments, remainder[:2]), grad, step=1, **OPTIONS)


def test_a_skipped_step_is_the_state_itself() -> None:
    state = AdamState(
        np.ones(3, np.float32), zero_moment((3,), "e4m3_128"), zero_moment((3,), "e4m3_128")
    )
    assert adamw_state(state, np.full(3, np.nan, np.float32), step=1, skip=True, **OPTIONS) is state
