"""The states' experiment: rows give a figure, and finished rows are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from fp8lab.errors import UserError
from fp8lab.experiments.commands import command_of
from fp8lab.experiments.optimizer_states import FORMATS, check_rows, main
from fp8lab.records import read_rows

ROOT = Path(__file__).resolve().parent.parent
TEXT = ["--text", str(ROOT / "CONTRIBUTING.md")]


def test_a_shorter_run_lies_beside_the_longer_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "states"
    main([*TEXT, "--steps", "2", "--out", str(out)])
    rows, figure = out.with_suffix(".jsonl"), out.with_suffix(".png")
    assert [row["step"] for row in read_rows(rows)[1:]] == [1] * len(FORMATS) + [2] * len(FORMATS)
    command = command_of("optimizer_states", [*TEXT, "--steps", "2", "--out", str(out)])
    assert read_rows(rows)[0]["command"] == command
    assert "date" in read_rows(rows)[0]
    before = rows.read_bytes(), figure.read_bytes()
    main([*TEXT, "--steps", "1", "--out", str(out)])
    assert (rows.read_bytes(), figure.read_bytes()) == before
    assert len(read_rows(tmp_path / "states.partial.jsonl")) == 1 + len(FORMATS)
    assert (tmp_path / "states.partial.png").read_bytes().startswith(b"\x89PNG")
    assert f"{rows} has 15 rows, these are 8: it stays as it is" in capsys.readouterr().out
    main(["--redraw", "--out", str(out)])
    assert figure.read_bytes() == before[1]


@pytest.mark.parametrize("steps", ["0", "-1"])
def test_without_steps_nothing_is_done(tmp_path: Path, steps: str) -> None:
    with pytest.raises(UserError, match=f"--steps is {steps}; accepted: 1 and up"):
        main([*TEXT, "--steps", steps, "--out", str(tmp_path / "x")])
    assert not list(tmp_path.iterdir())


def test_the_committed_rows_are_whole() -> None:
    path = ROOT / "figures" / "optimizer-states.jsonl"
    rows = read_rows(path)
    assert check_rows(rows, path) == rows
    with pytest.raises(UserError, match="holds no rows of optimizer_states, or damaged ones"):
        check_rows(rows[:1], path)
