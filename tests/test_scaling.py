"""amax, scales, delayed scaling's history, blocks."""

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
    FLT_MAX,
    DelayedScalingState,
    amax,
    expand_blocks,
    quantize_blocks,
    record_amax,
    scale_from_amax,
    update_delayed,
)
from fp8lab.formats import E4M3, E5M2
from fp8lab.testing import assert_bits_equal

FLOATS = hnp.arrays(np.float32, hnp.array_shapes(max_dims=3, min_side=0, max_side=9))


@given(FLOATS)
def test_amax_is_numpys_maximum_and_loses_no_nan(x: np.ndarray[Any, Any]) -> None:
    expected = np.abs(x).max(initial=0) if x.size else np.float32(0)
    assert_bits_equal(amax(x), np.asarray(expected, np.float32))


def test_amax_of_special_values() -> None:
    assert np.isnan(amax(np.array([1, np.nan, np.inf], np.float32)))
    assert amax(np.array([1, -np.inf], np.float32)) == np.inf
    assert amax(np.zeros((0, 3), np.float32)) == 0
    assert amax(np.array([-2.5], ml_dtypes.bfloat16)) == 2.5
    assert not np.signbit(amax(np.array([-0.0], np.float32)))


@given(
    hnp.arrays(np.float32, st.tuples(st.integers(1, 9), st.integers(1, 9))),
    st.tuples(st.integers(1, 5), st.integers(1, 5)),
)
def test_amax_of_blocks_is_that_of_each_piece(
    x: np.ndarray[Any, Any], block: tuple[int, int]
) -> None:
    found = amax(x, block=block)
    rows, columns = block
    for i in range(found.shape[0]):
        for j in range(found.shape[1]):
            piece = x[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            assert_bits_equal(found[i, j], amax(piece))
    assert_bits_equal(
        expand_blocks(found, block, x.shape)[-1, -1], np.asarray(found[-1, -1], np.float32)
    )


@pytest.mark.parametrize(
    ("largest", "margin", "scale"),
    [
        (3.5, 0, 128.0),
        (3.5, 2, 32.0),
        (448.0, 0, 1.0),
        (0.0, 0, 7.0),  # nothing seen: the previous scale
        (np.inf, 0, 7.0),
        (np.nan, 0, 7.0),
        (6e-37, 0, FLT_MAX),  # TE 786
        # The margin before the division: FLT_MAX the other way round.
        (1e-36, 4, np.float32(28) / np.float32(1e-36)),
    ],
)
def test_scale_from_amax(largest: float, margin: int, scale: float) -> None:
    found = scale_from_amax(np.float32(largest), E4M3, margin=margin, previous=7.0)
    assert_bits_equal(found, np.asarray(scale, np.float32))


@given(st.floats(2.0**-126, 2.0**127, width=32), st.integers(0, 8))
def test_a_power_of_two_scale_is_the_next_one_toward_zero(largest: float, margin: int) -> None:
    exact = float(scale_from_amax(largest, E5M2, margin=margin))
    power = float(scale_from_amax(largest, E5M2, margin=margin, power_of_two=True))
    assert np.frexp(power)[0] == 0.5
    assert power <= exact < 2 * power


def step(state: DelayedScalingState, *seen: float, **options: Any) -> DelayedScalingState:
    """Casts that see these amaxes, then an update."""
    for value in seen:
        state = record_amax(state, value)
    return update_delayed(state, E4M3, **options)


def test_delayed_scaling_is_one_step_late_and_takes_the_largest() -> None:
    state = DelayedScalingState.fresh(3)
    assert state.scale == 1
    scales = []
    for seen in (4.0, 2.0, 1.0, 1.0, 1.0):
        state = step(state, seen)
        scales.append(float(state.scale))
    # The 4 counts for the update of its own step and the two after it.
    assert scales == [112, 112, 112, 224, 448]


def test_most_recent_takes_the_last_step_alone() -> None:
    state = DelayedScalingState.fresh(3)
    scales = [
        float((state := step(state, seen, algorithm="most_recent")).scale) for seen in (4.0, 1.0)
    ]
    assert scales == [112, 448]


def test_titan_698_the_scale_changes() -> None:
    first = step(DelayedScalingState.fresh(2), 1.0)
    assert float(first.scale) == 448
    assert float(step(first, 8.0).scale) == 56


def test_te_825_a_layer_that_did_not_run_keeps_its_state() -> None:
    state = step(DelayedScalingState.fresh(3), 4.0)
    kept = state
    for _ in range(5):
        state = step(state)
    assert_bits_equal(state.scale, kept.scale)
    assert_bits_equal(state.amax_history, kept.amax_history)


def test_infinity_freezes_the_scale_until_it_leaves_the_history() -> None:
    state = step(DelayedScalingState.fresh(2), 1.0)
    state = step(state, np.inf)
    assert float(state.scale) == 448
    state = step(state, 2.0)
    assert float(state.scale) == 448
    assert float(step(state, 2.0).scale) == 224
    assert np.isnan(record_amax(record_amax(state, np.nan), 1.0).amax_history[0])


def test_the_oldest_entry_is_the_one_that_goes() -> None:
    state = DelayedScalingState.fresh(4)
    for seen in (1.0, 2.0, 3.0):
        state = step(state, seen)
    assert state.amax_history.tolist() == [0, 1, 2, 3]
    assert step(state, 4.0).amax_history.tolist() == [0, 2, 3, 4]


def test_several_casts_of_a_step_and_a_group() -> None:
    state = record_amax(record_amax(DelayedScalingState.fresh(2), 3.0), 1.0)
    assert state.amax_history.tolist() == [3, 0]
    grouped = update_delayed(state, E4M3, group_amax=7.0)
    assert float(grouped.scale) == 64
    assert grouped.amax_history.tolist() == [0, 7]


def test_steps_are_pure_and_te_1723_keep_copies() -> None:
    state = DelayedScalingState.fresh(2)
    record_amax(state, 5.0)
    update_delayed(state, E4M3, group_amax=5.0)
    assert state.amax_history.tolist() == [0, 0]
    after = step(state, 5.0)
    after.amax_history[:] = 9
    assert state.amax_history.tolist() == [0, 0]


def test_many_tensors_at_once_are_as_one_by_one() -> None:
    rng = np.random.default_rng(0)
    together = DelayedScalingState.fresh(3, (5,))
    apart = [DelayedScalingState.fresh(3) for _ in range(5)]
    for _ in range(6):
        seen = (rng.standard_normal(5) ** 2).astype(np.float32)
        seen[rng.integers(5)] = 0
        together = step(together, seen)  # type: ignore[arg-type]
        apart = [step(state, float(value)) for state, value in zip(apart, seen, strict=True)]
    for place, state in enumerate(apart):
        assert_bits_equal(together.scale[place], np.asarray(state.scale))
        assert_bits_equal(together.amax_history[:, place], state.amax_history)


def test_an_algorithm_of_ones_own() -> None:
    mean = step(DelayedScalingState.fresh(2), 2.0, algorithm=lambda history: history.mean(axis=0))
    assert float(mean.scale) == 448


@given(
    hnp.arrays(np.float32, st.tuples(st.integers(1, 5), st.integers(1, 300))),
    st.booleans(),
)
def test_blocks_are_cast_one_by_one(x: np.ndarray[Any, Any], power_of_two: bool) -> None:
    codes, inverse = quantize_blocks(x, E4M3, power_of_two=power_of_two)
    for i in range(inverse.shape[0]):
        for j in range(inverse.shape[1]):
            part = slice(j * 128, (j + 1) * 128)
            scale = scale_from_amax(amax(x[i, part]), E4M3, power_of_two=power_of_two)
            assert_bits_equal(codes[i, part], quantize(x[i, part], E4M3, scale=scale))
            with np.errstate(all="ignore"):
                assert_bits_equal(inverse[i, j], np.float32(1) / scale)


def test_te_2589_a_tiny_block_leaves_its_neighbours_alone() -> None:
    x = np.ones((1, 384), np.float32)
    alone, _ = quantize_blocks(x, E4M3)
    x[0, 128:256] = 1e-37
    codes, inverse = quantize_blocks(x, E4M3)
    assert_bits_equal(codes[0, :128], alone[0, :128])
    assert_bits_equal(codes[0, 256:], alone[0, 256:])
    decoded = dequantize(codes) * expand_blocks(inverse, (1, 128), x.shape)
    assert np.isfinite(decoded).all()


def test_ao_4713_a_row_of_zeros() -> None:
    codes, inverse = quantize_blocks(np.zeros((2, 64), np.float32), E4M3, block=(1, 64))
    assert (codes.view(np.uint8) == 0).all()
    assert (inverse == 1).all()


def test_ao_1766_small_float16_values_do_not_become_nan() -> None:
    x = np.array([[0, 0, 0.1, 0.1]], np.float16)
    codes, inverse = quantize_blocks(x, E5M2, power_of_two=False)
    decoded = dequantize(codes) * inverse
    assert decoded[0, :2].tolist() == [0, 0]
    assert np.allclose(decoded[0, 2:], 0.1, rtol=0.125)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: amax(np.ones((2, 2), np.float32), block=(0, 1)), r"block is \(0, 1\)"),
        (lambda: amax(np.ones(2, np.float32), block=(1, 1)), "blocks need at least 2 dimensions"),
        (lambda: scale_from_amax(1.0, E4M3, margin=-1), "margin is -1; accepted: an integer"),
        (lambda: DelayedScalingState.fresh(0), "history is 0; accepted: 1 and up"),
        (
            lambda: update_delayed(
                record_amax(DelayedScalingState.fresh(1), 1.0), E4M3, algorithm="mean"
            ),
            "unknown algorithm 'mean'; accepted: max, most_recent",
        ),
    ],
)
def test_bad_input_is_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
