"""The checkpoint's benchmark: it measures, prints a table and writes rows."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from fp8lab.experiments import bench_checkpoint
from fp8lab.experiments.bench_checkpoint import main, measure
from fp8lab.experiments.commands import command_of
from fp8lab.records import Row, read_rows


def test_the_first_copy_is_the_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of all that is timed: whatever comes before has memory made that it would find."""
    count = itertools.count(1)
    monkeypatch.setattr(bench_checkpoint, "_timed", lambda work: (work(), next(count))[1])
    seconds = measure(1, tmp_path, "cpu", 1)["seconds"]
    assert list(seconds.values()) == list(range(1, 1 + len(seconds)))
    assert next(iter(seconds)) == "first copy to host"


def test_each_size_has_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bench_checkpoint, "measure", _process)
    main(["--megabytes", "1,2", "--out", str(tmp_path / "rows.jsonl")])
    processes = {row["process"] for row in read_rows(tmp_path / "rows.jsonl")[1:]}
    assert len(processes | {os.getpid()}) == 3


def _process(megabytes: int, **_: object) -> Row:
    return {"bytes": megabytes, "process": os.getpid(), "seconds": {"none": 1.0}}


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
