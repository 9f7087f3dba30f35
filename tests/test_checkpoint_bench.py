"""The checkpoint's benchmark: it measures, prints a table and writes rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8lab.experiments.bench_checkpoint import main
from fp8lab.experiments.commands import command_of
from fp8lab.records import read_rows


def test_rows_and_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--megabytes", "1", "--repeats", "1", "--folder", str(tmp_path)]
    main([*options, "--out", str(tmp_path / "rows.jsonl")])
    head, row = read_rows(tmp_path / "rows.jsonl")
    command = [*options, "--out", str(tmp_path / "rows.jsonl")]
    assert head["command"] == command_of("bench_checkpoint", command)
    assert head["date"][:2] == "20"
    assert "first copy to host" in row["seconds"]
    assert "processor" in head["bench_checkpoint"]
    assert row["bytes"] == 3 * 4 * 2**20
    assert all(seconds > 0 for seconds in row["seconds"].values())
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
