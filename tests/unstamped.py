"""Rows without what says when and with which command they were made."""

from __future__ import annotations

from pathlib import Path

from fp8lab.experiments.sittings import STAMP
from fp8lab.records import Row, read_rows


def rows_of(path: Path) -> list[Row]:
    """The rows below the head, all of which are stamped, without their stamps."""
    rows = read_rows(path)[1:]
    for row in rows:
        assert {"date", "command", "git"} <= set(row), row
    return [{key: value for key, value in row.items() if key not in STAMP} for row in rows]
