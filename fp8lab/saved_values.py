"""Reading what a `state_dict` of this project kept, before anything is changed by it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fp8lab.errors import UserError


def is_count(value: Any) -> bool:
    """A whole number of 64 bits, from 0."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def value_of(saved: object, key: str, who: str) -> Any:
    """One value of a saved table.

    Args:
        saved: The table, as it was found.
        key: The value's name.
        who: Whose state it is, for the messages: "telemetry".

    Raises:
        UserError: It is no table, or the value is missing.
    """
    if not isinstance(saved, Mapping):
        raise UserError(f"the saved {who} holds {saved!r}; accepted: a table with {key!r}")
    if key not in saved:
        raise UserError(f"the saved {who} is damaged: {key!r} is missing")
    return saved[key]


def table_of(saved: object, key: str, who: str) -> Mapping[str, Any]:
    """A table within a saved one. Arguments and errors as for `value_of`; or it is no table."""
    found = value_of(saved, key, who)
    if not isinstance(found, Mapping):
        raise UserError(f"the saved {who}'s {key} is {found!r}; accepted: a table")
    return found


def list_of(saved: object, key: str, who: str) -> list[Any]:
    """A list within a saved table. Arguments and errors as for `value_of`; or it is no list."""
    found = value_of(saved, key, who)
    if not isinstance(found, list | tuple):
        raise UserError(f"the saved {who}'s {key} is {found!r}; accepted: a list")
    return list(found)


def whole_number(saved: object, key: str, who: str, most: float = math.inf) -> int:
    """An integer from 0 to `most` within a saved table.

    Arguments and errors as for `value_of`; or it is no such integer.
    """
    found = value_of(saved, key, who)
    if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found <= most:
        upper = "and up" if most == math.inf else f"to {most}"
        raise UserError(f"the saved {who}'s {key} is {found!r}; accepted: an integer, 0 {upper}")
    return found
