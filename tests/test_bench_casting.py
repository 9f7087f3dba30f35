"""The benchmark's bookkeeping: what its rows become. The timing itself needs a card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fp8lab.errors import UserError
from fp8lab.experiments.bench_casting import table
from fp8lab.experiments.documents import fill, markers
from fp8lab.experiments.plot_casting import SECTION, draw, section


def row(case: str, kind: str, share: float | None, microseconds: float, **more: Any) -> Any:
    """A row as the benchmark writes it."""

    def spread(value: float) -> dict[str, float]:
        return {"median": value, "smallest": 0.9 * value, "largest": 1.1 * value}

    found: dict[str, Any] = {
        "case": case,
        "kind": kind,
        "elements": 1 << 28,
        "bytes": 0 if share is None else 3 << 28,
        "microseconds": spread(microseconds),
        "date": "2026-11-29",
        "command": "python -m fp8lab.experiments.bench_casting",
        "device": "NVIDIA H200",
        "packages": {"torch": "2.11.0", "triton": "3.6.0"},
    }
    return found | ({} if share is None else {"share_of_copy": spread(share)}) | more


SMALL = {"elements": 1 << 10, "microseconds_in_graph": {"median": 2.5}}
ROWS = [
    row("copy", "device", 1.0, 250.0),
    row("cast with amax", "fp8lab", 0.98, 200.0),
    row("cast with amax", "torch", 0.3, 601.0),
    row("dequantise", "fp8lab", 0.94, 330.0),
    row("amax", "fp8lab", 1.0, 128.0),
    row("scale update", "fp8lab", None, 7.0),
    row("cast with amax", "fp8lab", None, 40.0, **SMALL),
    row("cast with amax", "torch", None, 30.0, **SMALL),
]


def test_goals_are_compared_as_they_are_stated() -> None:
    lines = section(ROWS).splitlines()
    told = {line.split(" | ")[0].lstrip("| "): line for line in lines if line.startswith("|")}
    assert "| yes |" in told["cast with amax"]
    assert "torch 601.0 us (3.00x)" in told["cast with amax"]
    assert "| no |" in told["dequantise"]
    assert "| yes |" in told["scale update"]
    assert "not measured" in told["MX, both"]
    assert "40.0, 2.5 | 30.0, 2.5" in told["2^10"]
    assert "cast with amax [torch] 2^28" in table(ROWS)


def test_a_document_is_filled_again_and_again(tmp_path: Path) -> None:
    document = tmp_path / "performance.md"
    begin, end = markers(SECTION)
    document.write_text(f"before\n{begin}\n{end}\nafter\n")
    fill(document, SECTION, "one")
    fill(document, SECTION, "two")
    assert document.read_text() == f"before\n{begin}\n\ntwo\n\n{end}\nafter\n"
    document.write_text("nothing")
    with pytest.raises(UserError, match="lacks the markers"):
        fill(document, SECTION, "three")


def test_the_same_rows_give_the_same_plot(tmp_path: Path) -> None:
    first, second = tmp_path / "a" / "one.png", tmp_path / "two.png"
    draw(ROWS, first)
    draw(ROWS, second)
    assert first.read_bytes() == second.read_bytes()
    assert len(first.with_suffix(".jsonl").read_text().splitlines()) == len(ROWS)
