"""The rule of the fallback: when it fires, when it returns, what it refuses, what it remembers."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8lab.errors import UserError
from fp8lab.fallback import FallbackRule, FallbackState, Switch, WindowSigns, advance

BAD, NEITHER, GOOD = WindowSigns(0.5), WindowSigns(0.008), WindowSigns(0.0)
WINDOWS = {"b": BAD, "n": NEITHER, "g": GOOD, "-": WindowSigns()}
RULE = FallbackRule(overflow=0.01, after=2, recover=3, longest=12)


def walk(
    text: str, rule: FallbackRule = RULE, state: FallbackState | None = None
) -> tuple[FallbackState, str, list[Switch]]:
    """The state after some windows; where the role was after each, as F or B; the switches."""
    state, places, switches = state or FallbackState(), "", []
    for letter in text:
        state, switch = advance(rule, state, WINDOWS[letter])
        places += "B" if state.fallen else "F"
        if switch is not None:
            switches.append(switch)
    return state, places, switches


@pytest.mark.parametrize(
    ("windows", "places"),
    [
        ("gggg", "FFFF"),
        ("bb", "FB"),
        ("bgb", "FFF"),  # not in a row
        ("bnb", "FFB"),  # a window that is neither does not interrupt
        ("b-b", "FFB"),
        ("bbggg", "FBBBF"),
        ("bbggbggg", "FBBBBBBF"),  # a bad one begins the wait again
        ("bbgngng", "FBBBBBF"),
        ("bbnnnnnn", "FBBBBBBB"),  # never good
        ("bb------", "FBBBBBBB"),
    ],
)
def test_when_it_falls_and_returns(windows: str, places: str) -> None:
    assert walk(windows)[1] == places


def test_a_return_that_does_not_last_makes_the_next_wait_longer() -> None:
    _, _, switches = walk("bb" + "ggg" + "bb" + "gggggg" + "bb" + "g" * 12 + "bb")
    assert [s.wait for s in switches if s.to == "bf16"] == [3, 6, 12, 12]
    _, _, switches = walk("bb" + "ggg" + "gggg" + "bb")  # this one did
    assert [s.wait for s in switches if s.to == "bf16"] == [3, 3]
    state, _, switches = walk("bb" + "ggg" + "g" + "bb")  # the third window after it
    assert [s.wait for s in switches if s.to == "bf16"] == [3, 6]
    assert state.falls == 2


def test_a_layer_that_fails_whenever_it_is_fp8_is_left_alone_more_and_more() -> None:
    """Bad in FP8, good in BF16: without the waits it would switch every few windows."""
    rule = FallbackRule(overflow=0.01, after=1, recover=1, patience=2, longest=64)
    state, switches = FallbackState(), 0
    for _ in range(1000):
        state, switch = advance(rule, state, GOOD if state.fallen else BAD)
        switches += switch is not None
    # Waits of 1, 2, 4, ..., 32 take 69 windows with 12 switches; then 2 for each 65.
    assert switches <= 12 + 2 * math.ceil((1000 - 69) / 65) + 1


@pytest.mark.parametrize(
    ("signs", "reason"),
    [
        (WindowSigns(overflow=0.02), "overflow"),
        (WindowSigns(overflow=math.nan), "overflow"),
        (WindowSigns(sqnr_db=19.9), "sqnr_db"),
        (WindowSigns(sqnr_db=-math.inf), "sqnr_db"),
        (WindowSigns(gradient_spike=11.0), "gradient_spike"),
        (WindowSigns(gradient_spike=math.inf), "gradient_spike"),
        (WindowSigns(0.01, 20.0, 10.0), None),
        (WindowSigns(), None),
    ],
)
def test_each_sign_has_its_limit(signs: WindowSigns, reason: str | None) -> None:
    rule = FallbackRule(0.01, 20.0, 10.0, after=1, margin=2.0)
    state, switch = advance(rule, FallbackState(), signs)
    assert state.fallen == (reason is not None)
    assert (None if switch is None else switch.reason) == reason
    assert not rule.is_good(signs)


def test_the_band_between_bad_and_good() -> None:
    rule = FallbackRule(0.01, 20.0, 10.0, margin=2.0)
    edge = 20 + 20 * math.log10(2)
    assert rule.is_good(WindowSigns(0.005, edge, 5.0))
    assert not rule.is_good(WindowSigns(0.0051, edge, 5.0))
    assert not rule.is_good(WindowSigns(0.005, edge - 0.01, 5.0))
    assert not rule.is_good(WindowSigns(0.005, edge, 5.1))
    assert rule.is_good(WindowSigns(sqnr_db=math.inf))


@given(st.text("bng-", max_size=60), st.text("bng-", max_size=60))
def test_a_state_that_was_saved_goes_on_alike(first: str, second: str) -> None:
    middle, _, _ = walk(first)
    loaded = FallbackState.from_dict(middle.to_dict())
    assert loaded == middle
    assert walk(second, state=loaded) == walk(second, state=middle)
    assert all(type(value) is int for value in middle.to_dict().values())


@given(st.text("bng-", max_size=200))
def test_switches_alternate_and_are_counted(windows: str) -> None:
    state, places, switches = walk(windows)
    assert [s.to for s in switches] == ["bf16", "fp8"] * (len(switches) // 2) + ["bf16"] * (
        len(switches) % 2
    )
    assert state.falls == sum(s.to == "bf16" for s in switches)
    assert state.wait <= RULE.longest
    assert places.count("B") == 0 or "bb" in windows.replace("n", "").replace("-", "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overflow": None}, "no sign has a limit, so the rule can never fire"),
        ({"overflow": 1.0}, r"overflow is 1.0; accepted: 0 up to, but not, 1"),
        ({"overflow": -0.1}, r"overflow is -0.1"),
        ({"overflow": math.nan}, "overflow is nan"),
        ({"overflow": True}, "overflow is True"),
        ({"sqnr_db": -math.inf}, "sqnr_db is -inf; accepted: a finite number"),
        ({"gradient_spike": 1.0}, "gradient_spike is 1.0; accepted: above 1"),
        ({"gradient_spike": math.inf}, "gradient_spike is inf"),
        ({"gradient_spike": 1.5}, "the role could never return"),
        ({"after": 0}, "after is 0; accepted: an integer, 1 and up"),
        ({"recover": 2.5}, r"recover is 2.5"),
        ({"patience": 0}, "patience is 0"),
        ({"margin": 0.5}, r"margin is 0.5; accepted: 1 and up"),
        ({"margin": math.inf}, "margin is inf"),
        ({"recover": 5, "longest": 4}, "longest is 4; accepted: at least recover, 5"),
    ],
)
def test_a_rule_that_cannot_work_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        FallbackRule(**options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"wait": -1}, "wait is -1; accepted: an integer, 0 and up"),
        ({"since": -2}, "since is -2; accepted: an integer, -1 and up"),
        ({"bad": 1.5}, r"bad is 1.5"),
        ({"more": 1}, "a fallback state holds bad, fallen, falls, good, more"),
    ],
)
def test_a_damaged_state_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        FallbackState.from_dict({**FallbackState().to_dict(), **change})
