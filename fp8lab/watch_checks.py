"""Whether a JSON object is a row of a run: checked once where it is read, and relied on after."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fp8lab.records import Row

_LARGEST = 2**63 - 1
_WORDS = ("nan", "inf", "-inf")  # what rows write for what JSON has no numbers for
_NUMBERS = ("loss", "validation_loss", "grad_norm", "lr", "loss_scale")
_OF_A_CAST = ("amax", "scale", "overflow", "underflow")  # that each has; it may have more


def is_row(row: Row) -> bool:
    """Whether all that is shown of a row is what it should be; other keys may hold anything.

    `step`: an integer, 0 to 2^63 - 1. `loss` and other numbers, where they are there: a number, or
    "nan", "inf", "-inf". `casts`: null, or by name a table of numbers, amax, scale, overflow and
    underflow among them. `events`: a list. `time`: a table, whose `seconds` is a number.
    """
    step = row["step"]
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step <= _LARGEST:
        return False
    time = row.get("time", {})
    return (
        all(_is_number(row[key]) for key in _NUMBERS if key in row)
        and _are_casts(row.get("casts"))
        and isinstance(row.get("events", []), list)
        and isinstance(time, dict)
        and _is_number(time.get("seconds", 0.0))
    )


def _are_casts(casts: Any) -> bool:
    if casts is None:
        return True
    return isinstance(casts, dict) and all(
        isinstance(cast, dict)
        and all(key in cast for key in _OF_A_CAST)
        and all(_is_number(value) for value in cast.values())
        for cast in casts.values()
    )


def _is_number(value: Any) -> bool:
    if isinstance(value, str):
        return value in _WORDS
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, float) or abs(value) <= _LARGEST
