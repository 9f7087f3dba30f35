"""The figure of errors over the exponent of the input: its rows, and that it is drawn from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fp8lab.experiments import format_error
from fp8lab.records import Row, read_rows, to_json

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return format_error.results()


def curve(rows: list[Row], fmt: str, policy: str, key: str) -> dict[int, float]:
    return {
        row["exponent"]: row[key]
        for row in rows
        if row["format"] == fmt and row["policy"] == policy
    }


@pytest.mark.parametrize(
    ("fmt", "mantissa_bits", "low", "high"), [("E4M3", 3, -6, 7), ("E5M2", 2, -14, 14)]
)
def test_inside_a_formats_range_the_error_is_half_a_step(
    rows: list[Row], fmt: str, mantissa_bits: int, low: int, high: int
) -> None:
    found = curve(rows, fmt, "scale 1", "largest_relative_error")
    half = 2.0 ** -(mantissa_bits + 1)
    for exponent in range(low, high + 1):
        # The worst case is the tie above a power of two: half / (1 + half).
        assert 0.98 * half / (1 + half) < found[exponent] <= half / (1 + half)
    assert found[low - 1] > half
    assert found[high + 2] > half
    assert found[format_error.LOWEST] == 1


def test_blocks_do_not_care_about_the_exponent(rows: list[Row]) -> None:
    for policy in ("1x128, power of two", "MX, floor", "MX, up"):
        for key in ("largest_relative_error", "sqnr_db"):
            assert len(set(curve(rows, "E4M3", policy, key).values())) == 1


def test_one_scale_serves_the_largest_and_loses_the_smallest(rows: list[Row]) -> None:
    found = curve(rows, "E4M3", "current", "sqnr_db")
    assert found[format_error.HIGHEST] > 31
    assert found[format_error.LOWEST] == 0
    grown = curve(rows, "E4M3", f"delayed, grown {format_error.GROWTH} times", "sqnr_db")
    assert grown[format_error.HIGHEST] < 10  # clipped


def test_the_committed_rows_are_what_the_oracle_gives(rows: list[Row]) -> None:
    committed = read_rows(ROOT / "figures" / "format-error.jsonl")
    assert committed[1:] == rows


def test_a_run_writes_rows_and_draws_them(
    rows: list[Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    few = [row for row in rows if row["exponent"] % 10 == 0]
    monkeypatch.setattr(format_error, "results", lambda: few)
    assert format_error.main(["--out", str(tmp_path)]) == 0
    figure, beside = tmp_path / "format-error.png", tmp_path / "format-error.jsonl"
    assert read_rows(beside)[1:] == few
    assert str(figure) in capsys.readouterr().out
    first = figure.read_bytes()
    assert first.startswith(b"\x89PNG")
    # From the rows alone: the same rows draw the same picture, other rows another.
    format_error.main(["--out", str(tmp_path), "--draw-only"])
    assert figure.read_bytes() == first
    changed = [read_rows(beside)[0], *({**row, "sqnr_db": 1.0} for row in few)]
    beside.write_text("".join(to_json(row) + "\n" for row in changed), encoding="utf-8")
    format_error.main(["--out", str(tmp_path), "--draw-only"])
    assert figure.read_bytes() != first
