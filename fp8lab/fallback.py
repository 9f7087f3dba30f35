"""When a layer's role leaves FP8 for BF16, and when it comes back: a rule and its state, pure.

A run is watched in windows. A window of a role is bad when any of its signs is past its limit, and
good when all are well inside; between the two lies a band where it is neither. After `after` bad
windows in a row the role falls back, and it returns after `recover` good ones in a row; a window
that is neither counts for neither row, and interrupts none. A return that does not last makes the
next wait longer. Band and wait are the hysteresis.

Rule and state are frozen data, a step is `(rule, state, signs) -> (state, switch)`, and the state
is plain numbers, so that it survives a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from fp8lab.errors import UserError

SIGNS = ("overflow", "sqnr_db", "gradient_spike")
FINEST = 3  # mantissa bits of the finest 8-bit format, E4M3


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def most_sqnr_db(mantissa_bits: int) -> float:
    """The SQNR, decibels, that a format gives to values which are spread over its steps.

    The squared error of rounding to a step is its square over 12 in the mean, and a value is less
    than 2^(mantissa_bits + 1) steps. Values that happen to be codes lose less.
    """
    return 20 * math.log10(2.0 ** (mantissa_bits + 1)) + 10 * math.log10(12)


@dataclass(frozen=True)
class WindowSigns:
    """What one window of one role of one layer showed; None for what was not observed.

    Attributes:
        overflow: Share of the elements that are finite and were clipped, 0 to 1; the largest of the
            window. NaN or Inf in the tensor itself counts as 1.
        sqnr_db: Signal to quantisation noise, decibels; the smallest of the window.
        gradient_spike: The largest gradient norm of the window over the median of those before.
    """

    overflow: float | None = None
    sqnr_db: float | None = None
    gradient_spike: float | None = None


@dataclass(frozen=True)
class FallbackRule:
    """When a role falls back and returns.

    Attributes:
        overflow: A window whose overflow is above this is bad; None: overflow says nothing.
        sqnr_db: One whose SQNR is below this is bad, above 0; None likewise. With the margin on
            top it must be within what a format gives, see `most_sqnr_db`.
        gradient_spike: One whose gradient norm is more than this many times the usual is bad; None
            likewise.
        after: Bad windows in a row before the fall, 1 and up.
        recover: Good windows in a row before the return, 1 and up.
        margin: How far inside its limit every sign must be for a window to be good: overflow and
            spike at most the limit divided by this, SQNR at least the limit plus 20 log10 of it
            (decibels). 1 is no band; 1 and up.
        patience: After a return, a fall within `recover` windows multiplies the next wait by this,
            1 and up; a return that lasts longer makes it `recover` again.
        longest: The longest wait, windows; at least `recover`.
    """

    overflow: float | None = 1e-3
    sqnr_db: float | None = None
    gradient_spike: float | None = None
    after: int = 3
    recover: int = 10
    margin: float = 2.0
    patience: int = 2
    longest: int = 1000

    def __post_init__(self) -> None:
        """Refuse a rule that can never fire, or never return."""
        if all(getattr(self, sign) is None for sign in SIGNS):
            raise UserError(
                f"fallback: no sign has a limit, so the rule can never fire; set one of"
                f" {', '.join(SIGNS)}"
            )
        limits: tuple[tuple[str, str, Callable[[float], bool]], ...] = (
            ("overflow", "0 up to, but not, 1 (at 1 it can never fire)", lambda v: 0 <= v < 1),
            (
                "sqnr_db",
                "a finite number of decibels above 0 (at 0 nothing of a tensor is left, so at less"
                " it can never fire)",
                lambda v: 0 < v < math.inf,
            ),
            ("gradient_spike", "above 1, finite", lambda v: 1 < v < math.inf),
        )
        for name, accepted, ok in limits:
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and ok(value)):
                raise UserError(f"fallback: {name} is {value!r}; accepted: {accepted}, or None")
        for name in ("after", "recover", "patience", "longest"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UserError(f"fallback: {name} is {value!r}; accepted: an integer, 1 and up")
        if not (_is_number(self.margin) and 1 <= self.margin < math.inf):
            raise UserError(f"fallback: margin is {self.margin!r}; accepted: 1 and up, finite")
        if self.gradient_spike is not None and self.gradient_spike / self.margin < 1:
            raise UserError(
                f"fallback: gradient_spike {self.gradient_spike:g} over margin {self.margin:g} is"
                " below 1, which no gradient norm stays under for long: the role could never"
                " return; raise the limit or lower the margin"
            )
        if self.sqnr_to_return > most_sqnr_db(FINEST):
            raise UserError(
                f"fallback: sqnr_db {self.sqnr_db:g} with margin {self.margin:g} asks for"
                f" {self.sqnr_to_return:.1f} dB before a return, and no 8-bit format gives more"
                f" than {most_sqnr_db(FINEST):.1f}: the role could never return; lower the limit or"
                " the margin"
            )
        if self.longest < self.recover:
            raise UserError(
                f"fallback: longest is {self.longest}; accepted: at least recover, {self.recover}"
            )

    @property
    def sqnr_to_return(self) -> float:
        """The SQNR, decibels, from which a window is good; minus infinity where it says nothing."""
        if self.sqnr_db is None:
            return -math.inf
        return self.sqnr_db + 20 * math.log10(self.margin)

    def why_bad(self, signs: WindowSigns) -> str | None:
        """Which sign makes a window bad; None where none does. NaN is bad."""
        for name in SIGNS:
            limit, value = getattr(self, name), getattr(signs, name)
            if limit is None or value is None:
                continue
            beyond = value < limit if name == "sqnr_db" else value > limit
            if beyond or math.isnan(value):
                return name
        return None

    def is_good(self, signs: WindowSigns) -> bool:
        """Whether every sign that has a limit was observed somewhere safe; one at least was."""
        seen = False
        for name in SIGNS:
            limit, value = getattr(self, name), getattr(signs, name)
            if limit is None or value is None:
                continue
            seen = True
            if name == "sqnr_db":
                safe = value >= self.sqnr_to_return
            else:
                safe = value <= limit / self.margin
            if not safe:  # NaN is never safe
                return False
        return seen


@dataclass(frozen=True)
class FallbackState:
    """Where one role of one layer stands.

    Attributes:
        fallen: Whether it is in BF16.
        bad: Bad windows in a row, in FP8.
        good: Good windows in a row, in BF16.
        wait: Good windows that the return needs, or that the last return needed; 0 before a fall.
        since: Windows since the last return, counted up to one past the rule's `recover`; -1 before
            the first return, and in BF16.
        falls: How often it fell.
    """

    fallen: bool = False
    bad: int = 0
    good: int = 0
    wait: int = 0
    since: int = -1
    falls: int = 0

    def to_dict(self) -> dict[str, int]:
        """Plain integers by name: what a checkpoint keeps."""
        return {name: int(value) for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> FallbackState:
        """The state of such a table.

        Raises:
            UserError: A name is missing or unknown, or a value is no integer that can be.
        """
        names = [own.name for own in fields(cls)]
        if not isinstance(table, Mapping):
            raise UserError(f"a fallback state is {table!r}; accepted: {', '.join(names)}")
        if set(table) != set(names):
            found = ", ".join(sorted(map(str, table)))
            raise UserError(f"a fallback state holds {found}; accepted: {', '.join(names)}")
        for name, value in table.items():
            least = -1 if name == "since" else 0
            if not isinstance(value, int) or value < least:
                raise UserError(
                    f"a fallback state's {name} is {value!r}; accepted: an integer, {least} and up"
                )
        return cls(**{**table, "fallen": bool(table["fallen"])})


@dataclass(frozen=True)
class Switch:
    """One fall or return, for the rows.

    Attributes:
        to: "bf16" or "fp8".
        reason: The sign that made the last window bad, or "recovered".
        wait: Of a fall: how many good windows the return will need.
    """

    to: str
    reason: str
    wait: int = 0


def advance(
    rule: FallbackRule, state: FallbackState, signs: WindowSigns
) -> tuple[FallbackState, Switch | None]:
    """One window of one role.

    Args:
        rule: The rule.
        state: Before the window; not changed.
        signs: What the window showed. Of a role in BF16 they are those that FP8 would have had
            (telemetry casts on the side); where nothing was observed the window counts for
            nothing.

    Returns:
        The state after it; and the switch, where there was one.

    >>> rule = FallbackRule(overflow=0.01, after=2, recover=1)
    >>> state, switch = advance(rule, FallbackState(), WindowSigns(overflow=0.5))
    >>> switch is None, advance(rule, state, WindowSigns(overflow=0.5))[1].to
    (True, 'bf16')
    """
    if state.fallen:
        return _in_bf16(rule, state, signs)
    return _in_fp8(rule, state, signs)


def _in_fp8(
    rule: FallbackRule, state: FallbackState, signs: WindowSigns
) -> tuple[FallbackState, Switch | None]:
    since = state.since if state.since < 0 else min(state.since + 1, rule.recover + 1)
    reason = rule.why_bad(signs)
    if reason is None:
        # A window that is not bad, but not good either, does not end a row of bad ones.
        bad = 0 if rule.is_good(signs) else state.bad
        return replace(state, bad=bad, since=since), None
    bad = state.bad + 1
    if bad < rule.after:
        return replace(state, bad=bad, since=since), None
    wait = rule.recover
    if 0 <= since <= rule.recover:  # the last return did not last
        wait = min(state.wait * rule.patience, rule.longest)
    return FallbackState(True, wait=wait, falls=state.falls + 1), Switch("bf16", reason, wait)


def _in_bf16(
    rule: FallbackRule, state: FallbackState, signs: WindowSigns
) -> tuple[FallbackState, Switch | None]:
    if rule.why_bad(signs) is not None:
        return replace(state, good=0), None
    good = state.good + rule.is_good(signs)
    if good < state.wait:
        return replace(state, good=good), None
    return replace(state, fallen=False, good=0, bad=0, since=0), Switch("fp8", "recovered")
