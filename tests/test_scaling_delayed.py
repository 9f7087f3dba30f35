"""Delayed scaling: TransformerEngine's history, other stacks' presets, states that are kept."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra import numpy as hnp

from fp8lab.emulation.casting import dequantize, quantize
from fp8lab.emulation.scaling import (
    DELAYED_PRESETS,
    DelayedScalingState,
    amax,
    merge_amax,
    quantize_delayed,
    record_amax,
    resize_history,
    scale_from_amax,
    step_delayed,
    update_delayed,
)
from fp8lab.formats import E4M3, E5M2, E8M0
from fp8lab.testing import assert_bits_equal

Array = np.ndarray[Any, Any]

AMAXES = st.one_of(
    st.sampled_from([0.0, 1.0, np.inf, np.nan, 1e-36, 6e-37, 3e38]),
    st.floats(0, float(np.finfo(np.float32).max), width=32),
)


def step(state: DelayedScalingState, *seen: float, **options: Any) -> DelayedScalingState:
    """Casts that see these amaxes, then an update."""
    for value in seen:
        state = record_amax(state, value)
    return update_delayed(state, E4M3, **options)


class OneTensor:
    """TransformerEngine's delayed scaling for one tensor, on Python lists and floats."""

    def __init__(self, length: int) -> None:
        self.scale = 1.0
        self.history = [0.0] * length

    def step(self, seen: float, margin: int, most_recent: bool, power_of_two: bool) -> None:
        self.history[0] = larger(self.history[0], seen)
        last = self.history[0]
        if last == 0:
            return
        chosen = last
        if not most_recent:
            for value in self.history:
                chosen = larger(chosen, value)
        if np.isfinite(chosen) and chosen > 0:
            top = np.float32(448.0 / 2**margin)
            with np.errstate(over="ignore"):
                scale = min(float(top / np.float32(chosen)), float(np.finfo(np.float32).max))
            if power_of_two:
                scale = 2.0 ** (np.frexp(scale)[1] - 1)
            self.scale = scale
        self.history = [0.0, *self.history[2:], last] if len(self.history) > 1 else [0.0]


def larger(a: float, b: float) -> float:
    """The larger one; NaN beats all."""
    return a if np.isnan(a) or (a >= b and not np.isnan(b)) else b


@given(
    st.integers(1, 5),
    st.lists(AMAXES, max_size=12),
    st.integers(0, 6),
    st.booleans(),
    st.booleans(),
)
def test_the_history_is_that_of_plain_lists(
    length: int, steps: list[float], margin: int, most_recent: bool, power_of_two: bool
) -> None:
    state, plain = DelayedScalingState.fresh(length), OneTensor(length)
    for seen in steps:
        algorithm = "most_recent" if most_recent else "max"
        state = step(state, seen, margin=margin, algorithm=algorithm, power_of_two=power_of_two)
        plain.step(seen, margin, most_recent, power_of_two)
        assert_bits_equal(state.scale, np.asarray(plain.scale, np.float32))
        assert_bits_equal(state.amax_history, np.array(plain.history, np.float32))


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


def test_an_algorithm_of_ones_own() -> None:
    mean = step(DelayedScalingState.fresh(2), 2.0, algorithm=lambda history: history.mean(axis=0))
    assert float(mean.scale) == 448


def test_titan_698_the_scale_changes() -> None:
    first = step(DelayedScalingState.fresh(2), 1.0)
    assert float(first.scale) == 448
    assert float(step(first, 8.0).scale) == 56


def test_te_825_a_layer_that_did_not_run_keeps_its_state() -> None:
    state = step(DelayedScalingState.fresh(3), 4.0)
    kept = state
    for _ in range(5):
        state = step(state, 0.0)
    assert_bits_equal(state.scale, kept.scale)
    assert_bits_equal(state.amax_history, kept.amax_history)


@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_infinity_freezes_the_scale_for_as_many_steps_as_the_history_has(
    length: int, bad: float
) -> None:
    state = step(step(DelayedScalingState.fresh(length), 1.0), bad)
    frozen = 1
    while float(state.scale) == 448:
        assert frozen <= length
        state = step(state, 2.0)
        frozen += 1
    assert frozen - 1 == length
    assert float(state.scale) == 224
    recent = step(step(DelayedScalingState.fresh(length), 1.0), bad, algorithm="most_recent")
    assert float(step(recent, 2.0, algorithm="most_recent").scale) == 224


def test_a_nan_stays_whatever_is_recorded_after_it() -> None:
    state = record_amax(record_amax(DelayedScalingState.fresh(2), np.nan), 1.0)
    assert np.isnan(state.amax_history[0])


def test_the_oldest_entry_is_the_one_that_goes() -> None:
    state = DelayedScalingState.fresh(4)
    for seen in (1.0, 2.0, 3.0):
        state = step(state, seen)
    assert state.amax_history.tolist() == [0, 1, 2, 3]
    assert step(state, 4.0).amax_history.tolist() == [0, 2, 3, 4]


def test_a_shorter_history_keeps_the_newest_entries() -> None:
    state = DelayedScalingState.fresh(4)
    for seen in (8.0, 2.0, 1.0):
        state = step(state, seen)
    assert resize_history(state, 3).amax_history.tolist() == [0, 2, 1]
    assert resize_history(state, 1).amax_history.tolist() == [0]
    grown = resize_history(state, 6)
    assert grown.amax_history.tolist() == [0, 0, 0, 8, 2, 1]
    for _ in range(3):  # the same steps from here on, as long as the short one remembers
        state, grown = step(state, 0.5), step(grown, 0.5)
    assert float(state.scale) == 448
    assert float(grown.scale) == 56


def test_several_casts_of_a_step_and_a_group() -> None:
    state = record_amax(record_amax(DelayedScalingState.fresh(2), 3.0), 1.0)
    assert state.amax_history.tolist() == [3, 0]
    grouped = update_delayed(state, E4M3, group_amax=7.0)
    assert float(grouped.scale) == 64
    assert grouped.amax_history.tolist() == [0, 7]


@given(hnp.arrays(np.float32, (3, 4), elements=AMAXES), hnp.arrays(np.float32, 4, elements=AMAXES))
def test_ranks_of_a_group_have_one_scale(seen: Array, before: Array) -> None:
    ranks = [
        record_amax(record_amax(DelayedScalingState.fresh(3, (4,)), before), mine) for mine in seen
    ]
    group = merge_amax(*(rank.amax_history[0] for rank in ranks))
    after = [update_delayed(rank, E4M3, group_amax=group) for rank in ranks]
    alone = DelayedScalingState(ranks[0].scale, np.stack([group, *ranks[0].amax_history[1:]]))
    expected = update_delayed(alone, E4M3)
    ran = group != 0
    for state in after:
        assert_bits_equal(state.scale, expected.scale)
        assert_bits_equal(state.amax_history[:, ran], expected.amax_history[:, ran])


def test_te_1723_what_is_kept_are_copies() -> None:
    """Keep the metadata, overwrite the live arrays, recompute, restore: the kept values return."""
    live = step(DelayedScalingState.fresh(2), 5.0)
    kept = live.to_arrays()
    live.scale[...] = 9
    live.amax_history[...] = 9
    recomputed = step(live, 3.0)
    recomputed.amax_history[...] = 8
    restored = DelayedScalingState.from_arrays(kept)
    assert float(restored.scale) == np.float32(448) / np.float32(5)
    assert restored.amax_history.tolist() == [0, 5]
    kept["scale"][...] = 0
    assert float(restored.scale) == np.float32(448) / np.float32(5)


def test_steps_are_pure() -> None:
    state = DelayedScalingState.fresh(2)
    record_amax(state, 5.0)
    update_delayed(state, E4M3, group_amax=5.0)
    update_delayed(record_amax(state, 5.0), E4M3, algorithm=lambda history: history.max(axis=0))
    for preset in DELAYED_PRESETS:
        step_delayed(state, 5.0, E4M3, preset=preset)
    assert state.amax_history.tolist() == [0, 0]
    after = step(state, 5.0)
    after.amax_history[:] = 9
    assert state.amax_history.tolist() == [0, 0]
    idle = step(state)
    idle.amax_history[:] = 9
    idle.scale[...] = 9
    assert state.amax_history.tolist() == [0, 0]
    assert state.scale == 1


def test_te_123_a_loaded_state_has_its_inverse_scale_before_any_update() -> None:
    saved = DelayedScalingState(np.array(64, np.float32), np.zeros(4, np.float32)).to_arrays()
    loaded = DelayedScalingState.from_arrays(saved)
    assert_bits_equal(loaded.inverse_scale, np.asarray(2.0**-6, np.float32))
    codes, inverse, _ = quantize_delayed(loaded, np.ones(2, np.float32), E4M3)
    assert dequantize(codes, inverse_scale=inverse).tolist() == [1, 1]


def test_te_1047_cached_weight_codes_keep_the_inverse_scale_they_were_made_with() -> None:
    weight = np.random.default_rng(2).standard_normal(300).astype(np.float32)
    state = step(DelayedScalingState.fresh(2), float(amax(weight)))
    codes, inverse, state = quantize_delayed(state, weight, E4M3)
    before = dequantize(codes, inverse_scale=inverse)
    state = update_delayed(record_amax(state, 100.0), E4M3)
    assert state.inverse_scale != inverse
    assert_bits_equal(dequantize(codes, inverse_scale=inverse), before)
    # The cached weight is not cast again, so its amax is 0 and nothing rolls.
    assert_bits_equal(update_delayed(state, E4M3).amax_history, state.amax_history)


def test_a_cast_uses_the_scale_of_before_and_notes_the_amax_of_now() -> None:
    x = np.array([1, -7, 0.1], np.float32)
    state = step(DelayedScalingState.fresh(2), 3.5)
    codes, inverse, after = quantize_delayed(state, x, E4M3)
    assert_bits_equal(codes, quantize(x, E4M3, scale=128.0))
    assert float(inverse) == 2.0**-7
    assert after.amax_history.tolist() == [7, 3.5]
    assert float(after.scale) == 128


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
        assert_bits_equal(together.scale[place], state.scale[()])
        assert_bits_equal(together.amax_history[:, place], state.amax_history)


def test_te_preset_is_record_then_update() -> None:
    state = step(DelayedScalingState.fresh(3), 4.0)
    used, after = step_delayed(state, 2.0, E4M3, margin=1)
    assert_bits_equal(used, state.scale)
    assert_bits_equal(after.amax_history, step(state, 2.0).amax_history)
    assert float(after.scale) == 56
    _, recent = step_delayed(state, 2.0, E4M3, preset="megatron")
    assert float(recent.scale) == 224


def test_torchao_preset() -> None:
    state = DelayedScalingState.fresh(DELAYED_PRESETS["torchao"].history)
    used, state = step_delayed(state, 4.0, E4M3, preset="torchao", warm_up=True)
    assert float(used) == 112  # already the first cast has its own scale
    assert state.amax_history[:3].tolist() == [4, 4, 0]
    for _ in range(14):
        used, state = step_delayed(state, 1.0, E4M3, preset="torchao")
    assert float(state.scale) == 112
    used, state = step_delayed(state, 1.0, E4M3, preset="torchao")
    assert (float(used), float(state.scale)) == (112, 112)  # the second 4, of the first sync
    used, state = step_delayed(state, 1.0, E4M3, preset="torchao")
    assert (float(used), float(state.scale)) == (112, 448)
    for _ in range(16):
        _, state = step_delayed(state, 0.0, E4M3, preset="torchao")
    assert_bits_equal(state.scale, np.asarray(448 / 1e-12, np.float32))
    _, infinite = step_delayed(state, np.inf, E4M3, preset="torchao")
    assert float(infinite.scale) == 0
    _, lost = step_delayed(state, np.nan, E4M3, preset="torchao")
    assert np.isnan(lost.scale)


@pytest.mark.parametrize(
    ("largest", "margin", "scale"),
    [
        (3.5, 0, 128.0),
        (3.4, 0, 128.0),
        (3.5000002, 0, 64.0),
        (3.5, 2, 32.0),
        (896.0, 0, 0.5),
        (1000.0, 0, 0.25),
        (1.3e-36, 0, np.inf),
        (1.32e-36, 0, 2.0**127),
        (3e38, 10, 0.0),  # 2**-130 is 1 / 2**130, and 2**130 is Inf there
        (0.0, 0, 1.0),
        (np.inf, 0, 1.0),  # masked to 0
        (np.nan, 0, 1.0),
    ],
)
def test_ms_amp_preset_has_powers_of_two(largest: float, margin: int, scale: float) -> None:
    fresh = DelayedScalingState.fresh(16)
    used, state = step_delayed(fresh, largest, E4M3, preset="ms_amp", margin=margin)
    assert used == 1
    assert_bits_equal(state.scale, np.asarray(scale, np.float32))


@given(st.floats(2.0**-112, float(np.finfo(np.float32).max), width=32))
def test_ms_amp_scale_is_a_power_of_two_that_fits(largest: float) -> None:
    _, state = step_delayed(DelayedScalingState.fresh(2), largest, E5M2, preset="ms_amp")
    quotient = float(np.float32(57344) / np.float32(largest))
    scale = float(state.scale)
    assert np.frexp(scale)[0] == 0.5
    assert scale <= quotient < 2 * scale


def test_ms_amp_window_and_warm_up() -> None:
    state = DelayedScalingState.fresh(3)
    used, state = step_delayed(state, 4.0, E4M3, preset="ms_amp", warm_up=True)
    assert (float(used), float(state.scale)) == (64, 64)
    assert state.amax_history.tolist() == [0, 4, 0]
    scales = []
    for seen in (np.inf, 1.0, 1.0, 1.0):
        _, state = step_delayed(state, seen, E4M3, preset="ms_amp")
        scales.append(float(state.scale))
    assert scales == [64, 64, 256, 256]
    # A window of 1 is current scaling; Inf there gives the inverse of the scale before.
    one = DelayedScalingState(np.array(8, np.float32), np.zeros(1, np.float32))
    assert float(step_delayed(one, 4.0, E4M3, preset="ms_amp")[0]) == 64
    assert float(step_delayed(one, np.inf, E4M3, preset="ms_amp")[0]) == 0.125
    assert float(step_delayed(one, np.nan, E4M3, preset="ms_amp")[0]) == 8


@pytest.mark.parametrize("preset", DELAYED_PRESETS)
def test_presets_agree_with_themselves_for_many_tensors(preset: str) -> None:
    seen = np.array([0, 1, 3, 1e-37, 1e38, np.inf, np.nan], np.float32)
    together = DelayedScalingState.fresh(3, (7,))
    apart = [DelayedScalingState.fresh(3) for _ in seen]
    for turn in range(4):
        used, together = step_delayed(together, np.roll(seen, turn), E5M2, preset=preset)
        for place, value in enumerate(np.roll(seen, turn)):
            mine, apart[place] = step_delayed(apart[place], value, E5M2, preset=preset)
            assert_bits_equal(used[place], mine[()])
            assert_bits_equal(together.scale[place], apart[place].scale[()])
            assert_bits_equal(together.amax_history[:, place], apart[place].amax_history)


def test_te_scale_is_that_of_current_scaling_one_step_later() -> None:
    state = step(DelayedScalingState.fresh(4), 3.3, margin=2)
    assert_bits_equal(state.scale, scale_from_amax(3.3, E4M3, margin=2))


FRESH = DelayedScalingState.fresh(1)
ONE = np.ones((), np.float32)


@pytest.mark.parametrize(
    ("error", "call", "message"),
    [
        (
            ValueError,
            lambda: DelayedScalingState.fresh(0),
            "history is 0; accepted: an integer, 1 and up",
        ),
        (ValueError, lambda: DelayedScalingState.fresh(True), "history is True"),
        (ValueError, lambda: resize_history(FRESH, 0), "history is 0; accepted"),
        (TypeError, lambda: DelayedScalingState(1.0, ONE), "scale is float; accepted: float32"),  # type: ignore[arg-type]
        (
            TypeError,
            lambda: DelayedScalingState(ONE, np.zeros(2)),  # type: ignore[arg-type]
            "amax_history is float64; accepted: float32",
        ),
        (
            ValueError,
            lambda: DelayedScalingState(np.ones(3, np.float32), np.zeros((2, 4), np.float32)),
            r"amax_history has shape \(2, 4\) and scale \(3,\)",
        ),
        (ValueError, lambda: DelayedScalingState.from_arrays({"scale": ONE}), r"arrays are \['sc"),
        (
            ValueError,
            lambda: DelayedScalingState.from_arrays({"scale": 0 * ONE, "amax_history": [ONE]}),
            "scale holds values that are not finite and above zero",
        ),
        (
            ValueError,
            lambda: DelayedScalingState.from_arrays({"scale": ONE, "amax_history": [-ONE]}),
            "amax_history holds negative values",
        ),
        (ValueError, lambda: record_amax(FRESH, -1.0), "amax holds negative values"),
        (ValueError, lambda: record_amax(FRESH, [1.0, 2.0]), r"amax has shape \(2,\)"),
        (TypeError, lambda: record_amax(FRESH, "1"), "amax has dtype <U1"),
        (ValueError, lambda: step(FRESH, 1.0, algorithm="mean"), "unknown algorithm 'mean'; acc"),
        (ValueError, lambda: step(FRESH, 1.0, margin=-1), "margin is -1; accepted"),
        (
            ValueError,
            lambda: step(FRESH, 1.0, algorithm=lambda history: history),
            r"the algorithm gave shape \(1,\); accepted: \(\)",
        ),
        (ValueError, lambda: update_delayed(FRESH, E8M0), "E8M0 is a format of scales"),
        (ValueError, lambda: update_delayed(FRESH, E4M3, group_amax=[1, 2]), "group_amax has sha"),
        (
            ValueError,
            lambda: quantize_delayed(DelayedScalingState.fresh(1, (2,)), ONE, E4M3),
            r"scales of shape \(2,\); accepted: one",
        ),
        (
            ValueError,
            lambda: step_delayed(FRESH, 1.0, E4M3, preset="apex"),
            "unknown preset 'apex'; accepted: transformer_engine, megatron, torchao, ms_amp",
        ),
        (ValueError, lambda: step_delayed(FRESH, 1.0, E4M3, warm_up=True), "has no warm-up"),
        (
            ValueError,
            lambda: step_delayed(FRESH, 1.0, E4M3, preset="torchao", margin=1),
            "margin is 1 with preset 'torchao'; accepted: 0",
        ),
        (
            ValueError,
            lambda: step_delayed(FRESH, [1.0], E4M3, preset="ms_amp"),
            r"amax has shape \(1,\); accepted: \(\)",
        ),
    ],
)
def test_bad_input_is_refused(error: type[Exception], call: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        call()
