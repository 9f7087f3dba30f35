"""The tables of docs/numerics.md are what the code gives today."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8lab.numerics_tables import TABLES, with_tables
from fp8lab.peers import PEERS

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "numerics.md"


@pytest.mark.parametrize("name", TABLES)
def test_a_table_of_the_document_is_what_the_code_gives(name: str) -> None:
    lacking = [reason for peer in PEERS if (reason := peer.lacking())]
    if name == "differences" and lacking:
        pytest.skip("; ".join(lacking))
    text = DOCUMENT.read_text(encoding="utf-8")
    assert with_tables(text, {name: TABLES[name]}) == text, "run python -m fp8lab.numerics_tables"


def test_a_stale_table_is_found_and_a_missing_one_refused() -> None:
    stale = "a\n<!-- table: one -->\nold\n<!-- end: one -->\nb"
    fresh = with_tables(stale, {"one": lambda: "| new |"})
    assert fresh == "a\n<!-- table: one -->\n| new |\n<!-- end: one -->\nb"
    with pytest.raises(ValueError, match="0 places for the table 'two'"):
        with_tables(stale, {"two": lambda: ""})
