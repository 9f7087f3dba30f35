"""Rows that are JSON, but odd: left out and counted, never a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fp8lab.cli import main
from fp8lab.watch import view
from fp8lab.watch_rows import Source
from fp8lab.watch_text import Style, spark

CAST = {"amax": 1.0, "scale": 2.0, "overflow": 0.0, "underflow": 0.5}
GOOD: dict[str, Any] = {
    "step": 1,
    "loss": 2.0,
    "validation_loss": "nan",
    "loss_scale": 4.0,
    "casts": {"a.input": {**CAST, "sqnr_db": "inf"}},
    "events": [{"layer": "a"}, "moved"],
    "time": {"seconds": 3.0},
    "note": [1],
}
ODD = [
    '{"step": "abc"}',
    '{"step": null}',
    '{"step": true}',
    '{"step": 1.5}',
    '{"step": -1}',
    '{"step": 1e400}',
    f'{{"step": {10**400}}}',
    '{"step": 2, "loss": "abc"}',
    '{"step": 2, "loss": null}',
    '{"step": 2, "loss": [1]}',
    f'{{"step": 2, "loss": {10**400}}}',
    '{"step": 2, "casts": 5}',
    '{"step": 2, "casts": {"a.input": {}}}',
    '{"step": 2, "casts": {"a.input": 1}}',
    json.dumps({"step": 2, "casts": {"a": {**CAST, "overflow": "x"}}}),
    json.dumps({"step": 2, "casts": {"a": {**CAST, "sqnr_db": None}}}),
    '{"step": 2, "events": 5}',
    '{"step": 2, "events": null}',
    '{"step": 2, "time": 5}',
    '{"step": 2, "time": {"seconds": "late"}}',
    '{"step": 2, "validation_loss": null}',
    '{"step": 2, "loss_scale": "x"}',
    "[" * 100_000,
]


@pytest.mark.parametrize("odd", ODD, ids=[own[:40] for own in ODD])
def test_an_odd_row_is_left_out_and_counted(
    odd: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "metrics.jsonl"
    rows.write_text(f"{json.dumps(GOOD)}\n{odd}\n{json.dumps(GOOD | {'step': 3})}\n")
    assert main(["watch", str(tmp_path), "--once"]) == 0
    shown = capsys.readouterr().out
    assert "step 3" in shown
    assert "1 damaged lines were left out" in shown


def test_a_figure_leaves_odd_rows_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("\n".join([json.dumps(GOOD), *ODD]) + "\n")
    figure = tmp_path / "casts.png"
    assert main(["watch", str(tmp_path), "--figure", str(figure)]) == 0
    assert len(figure.with_suffix(".jsonl").read_text().splitlines()) == 1


def test_damaged_lines_of_a_sweep_are_counted_once(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [json.dumps({"policy": "mx", "seed": seed, **GOOD}) for seed in (0, 1)]
    path.write_text("\n".join([*rows, ODD[0]]) + "\n")
    text = view(Source(path).runs(), Style(), 3)
    assert text.splitlines()[-1] == "1 damaged lines were left out"


def test_what_rows_write_for_numbers_that_json_lacks(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(GOOD | {"loss": "-inf", "time": {"seconds": "inf"}}) + "\n")
    [run] = Source(path).runs()
    assert "step 1  diverged  inf s" in view([run], Style(), 3)


def test_a_curve_over_all_numbers_there_are() -> None:
    assert spark([-1.7e308, 0.0, 1.7e308], Style()) == ".+@"
