"""Whether a file's rows are those of an experiment: each experiment says what its rows hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fp8lab.errors import UserError
from fp8lab.records import Row
from fp8lab.saved_values import is_count as is_count

Kinds = Mapping[str, Callable[[Any], bool]]


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_table(value: Any) -> bool:
    return isinstance(value, dict)


def is_list(value: Any) -> bool:
    return isinstance(value, list)


def is_truth(value: Any) -> bool:
    return isinstance(value, bool)


def is_number(value: Any) -> bool:
    """A number, also one that JSON lacks, as `fp8lab.records.to_json` writes it.

    A whole number that is beyond float64 is none: nothing can be drawn or averaged with it.
    """
    if isinstance(value, bool):
        return False
    if isinstance(value, int):
        return abs(value) < 1 << 1023
    return isinstance(value, float) or (is_text(value) and value in ("nan", "inf", "-inf"))


def are_numbers(value: Any) -> bool:
    return is_list(value) and all(map(is_number, value))


def _short(value: Any) -> str:
    """The beginning of a value, as text; whole numbers may have more digits than Python writes."""
    try:
        return str(value)[:40]
    except ValueError:
        return "a number of thousands of digits"


def one_of(*accepted: str) -> Callable[[Any], bool]:
    """Whether a value is one of them."""
    return lambda value: is_text(value) and value in accepted


def is_positive(value: Any) -> bool:
    """Whether a ratio or a mean can be made of it and others."""
    return is_number(value) and 0 < float(value) < float("inf")


def table_of(kinds: Kinds) -> Callable[[Any], bool]:
    """Whether a value is a table that holds such values, by key."""
    return lambda value: (
        is_table(value)
        and all(key in value and is_right(value[key]) for key, is_right in kinds.items())
    )


def check_row(row: Any, kinds: Kinds, source: Path, line: int) -> None:
    """Raise a UserError where a row is no table, or lacks what it must hold, by key."""
    damaged = f"{source}, line {line}, is damaged"
    if not isinstance(row, dict):
        raise UserError(f"{damaged}: it holds no JSON object")
    if lacks := sorted(set(kinds) - set(row)):
        raise UserError(f"{damaged}: it lacks {', '.join(lacks)}")
    for key, is_right in kinds.items():
        if not is_right(row[key]):
            raise UserError(f"{damaged}: {key} is {_short(row[key])!r}")


def check_once(rows: Sequence[Row], keys: Sequence[str], source: Path) -> None:
    """Raise a UserError where two rows, the head aside, have these values in common."""
    seen = set()
    for line, row in enumerate(rows[1:], start=2):
        place = tuple(row.get(key) for key in keys)
        if place in seen:
            said = ", ".join(f"{key} {_short(row.get(key))}" for key in keys)
            raise UserError(f"{source}, line {line}, is damaged: {said} stands there twice")
        seen.add(place)


def checker(
    experiment: str, head: Kinds, row: Kinds, *, once: Sequence[str] = ()
) -> Callable[[list[Any], Path], list[Row]]:
    """What checks the rows of an experiment: takes them and their file, and gives them back.

    Args:
        experiment: Its name; the first row has this key.
        head: What else the first row must hold, by key.
        row: What each other row must hold.
        once: No two other rows may have these keys' values in common; they are among `row`.
    """

    def check(rows: list[Any], source: Path) -> list[Row]:
        """The rows; a UserError where they are something else, or one lacks something."""
        if not rows or not isinstance(rows[0], dict) or experiment not in rows[0]:
            raise UserError(f"{source} holds no rows of {experiment}; name another file")
        for line, found in enumerate(rows, start=1):
            kinds = row if line > 1 else {experiment: is_table, **head}
            check_row(found, kinds, source, line)
        if once:
            check_once(rows, once, source)
        return rows

    return check
