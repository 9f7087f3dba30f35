"""Rows of experiments: no run may stand there twice, in whatever file."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8lab.errors import UserError
from fp8lab.experiments import (
    audit_run,
    incident_rows,
    plot_curves,
    plot_fallback,
    plot_tolerance,
    preset_curves,
    search_matmul_rows,
)
from fp8lab.experiments.commands import exit_code
from fp8lab.records import Row, read_rows

FIGURES = Path(__file__).parent.parent / "figures"
CHECKS = {
    "h200/audit": audit_run.check_rows,
    "h200/layer-tolerance": plot_tolerance.check_rows,
    "h200/preset-curves": plot_curves.check_rows,
    "h200/resume-incident": incident_rows.check_rows,
    "h200/search-matmul": search_matmul_rows.check_rows,
    "fallback-spike": plot_fallback.check_rows,
}


@pytest.mark.parametrize(("name", "check"), CHECKS.items(), ids=CHECKS)
def test_a_run_that_stands_there_twice(name: str, check: Callable[[Any, Path], list[Row]]) -> None:
    rows = read_rows(FIGURES / f"{name}.jsonl")
    assert check(rows, Path("a")) == rows
    for row in (rows[1], rows[-1]):
        with pytest.raises(UserError, match=rf"a, line {len(rows) + 1}, is damaged: .* twice"):
            check([*rows, row], Path("a"))


def test_curves_with_a_run_twice_are_not_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "preset-curves.jsonl"
    shutil.copy(FIGURES / "h200" / "preset-curves.jsonl", path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines, lines[-1]]))
    words = ["--large", "--redraw", "--out", str(tmp_path / "preset-curves.png")]
    assert exit_code(preset_curves.main, words) == 2
    found = capsys.readouterr().err
    assert "preset tensorwise, seed 2 stands there twice" in found
    assert found.count("\n") == 1
    assert not (tmp_path / "preset-curves.png").exists()
