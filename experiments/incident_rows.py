"""Whether rows are those of `resume_incident`, and which of them can be compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fp8lab.errors import UserError
from fp8lab.experiments.incident_runs import CONDITIONS, LOST
from fp8lab.experiments.row_checks import (
    are_numbers,
    checker,
    is_count,
    is_list,
    is_number,
    is_table,
    one_of,
)
from fp8lab.records import Row


def check_rows(rows: list[Any], source: Path) -> list[Row]:
    """The rows of `resume_incident`.

    Raises:
        UserError: They are something else, one is not whole, or a run stands there twice.
    """
    after = _check_kinds(rows, source)[0]["resume_incident"]["after"]
    for place, row in enumerate(rows[1:], start=2):
        damaged = f"{source}, line {place}, is damaged"
        lengths = [len(row[key]) for key in ("observed", "overflow", "underflow", "scale")]
        if len(row["loss"]) != after or len(set(lengths)) > 1:
            raise UserError(f"{damaged}: a list has another length")
        steps = row["observed"]
        if not all(0 < step <= after for step in steps) or sorted(set(steps)) != steps:
            raise UserError(f"{damaged}: observed is not steps from 1 to {after}, in their order")
        if steps != rows[1]["observed"]:
            raise UserError(f"{damaged}: observed has other steps than line 2")
    return rows


def without_partner(rows: Sequence[Row]) -> list[Row]:
    """The rows, without the head, that there is no continuous run to compare with."""
    whole = {(row["condition"], row["seed"]) for row in rows if row["variant"] == "continuous"}
    return [row for row in rows if (row["condition"], row["seed"]) not in whole]


def _is_settings(value: Any) -> bool:
    names = ("seeds", "before", "after")
    return is_table(value) and all(is_count(value.get(name)) and value[name] for name in names)


def _are_steps(value: Any) -> bool:
    return is_list(value) and bool(value) and all(map(is_count, value))


_check_kinds = checker(
    "resume_incident",
    {"resume_incident": _is_settings, "corpus": is_table, "environment": is_table},
    {
        "condition": one_of(*CONDITIONS),
        "seed": is_count,
        "variant": one_of("continuous", *LOST),
        "validation_loss": is_number,
        **dict.fromkeys(("loss", "overflow", "underflow", "scale"), are_numbers),
        "observed": _are_steps,
    },
    once=("condition", "seed", "variant"),
)
