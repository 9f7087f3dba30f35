"""The experiment that audits whole runs: its rows."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fp8lab.data import load_corpus
from fp8lab.errors import UserError
from fp8lab.experiments import audit_run
from fp8lab.experiments.commands import command_of
from fp8lab.models import TransformerConfig
from fp8lab.records import read_rows
from fp8lab.training_config import TrainingConfig

TINY = TransformerConfig(context=8, width=16, layers=1, heads=1)


def tiny(*args: Any, **options: Any) -> TrainingConfig:
    config = FULL(*args, **options)
    return replace(config, model=TINY, batch=2, validation_count=2)


FULL = audit_run.configuration


def text(folder: Path) -> Path:
    path = folder / "text.txt"
    path.write_bytes(bytes(range(32, 127)) * 40)
    return path


def test_a_row_tells_what_was_compared(tmp_path: Path) -> None:
    config = tiny("delayed", 3, "cpu", large=False)
    row = audit_run.audited_run(config, load_corpus(text(tmp_path)), 2, 1)
    # With the validation at the end.
    assert (row["steps"], row["audited"], row["differences"]) == (4, 2, 0)
    assert row["checked"] > 0
    assert row["found"] == []
    seconds = row["time"]
    assert seconds["audited"] > 0
    assert seconds["closed"] > 0
    assert seconds["ratio"]["looking"] == pytest.approx(
        seconds["audited"] / seconds["closed"], rel=0.1
    )
    assert seconds["ratio"]["run"] > 0


def test_the_command_does_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(audit_run, "configuration", tiny)
    out = tmp_path / "rows" / "audit.jsonl"
    options = ["--steps", "1", "--sample", "1", "--text", str(text(tmp_path)), "--out", str(out)]
    audit_run.main(["--presets", "mx", *options])
    head, row = read_rows(out)
    assert (head["audit"]["steps"], head["audit"]["sample"]) == (1, 1)
    command = command_of("audit_run", ["--presets", "mx", *options])
    assert head["environment"]["command"] == command
    assert row["command"] == command
    assert (row["preset"], row["differences"]) == ("mx", 0)
    assert "0 of" in capsys.readouterr().out
    audit_run.main(["--presets", "mx,delayed", *options])
    assert read_rows(out)[:2] == [head, row]
    assert [own["preset"] for own in read_rows(out)[1:]] == ["mx", "delayed"]
    with pytest.raises(UserError, match="holds rows of another audit"):
        audit_run.main(["--presets", "mx", *options, "--every", "7"])


def test_an_unknown_preset_is_refused_before_anything_runs(tmp_path: Path) -> None:
    out = tmp_path / "audit.jsonl"
    with pytest.raises(UserError, match="unknown policy 'fp4'"):
        audit_run.main(["--presets", "mx,fp4", "--out", str(out)])
    assert not out.exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--every", "0"], "--every is 0; accepted: 1 and up"),
        (["--sample", "0"], "--sample is 0; accepted: 1 and up"),
        (["--steps", "0"], "steps is 0; accepted: 1 to"),
        (["--presets", "mx,mx"], "--presets names mx, mx; accepted"),
        (["--out", "x.png"], "--out is 'x.png'; accepted: a file in .jsonl"),
    ],
)
def test_mistakes_are_said_before_any_work(tmp_path: Path, given: list[str], said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        audit_run.main(["--text", str(text(tmp_path)), "--out", str(tmp_path / "a.jsonl"), *given])
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_the_large_model_is_the_one_that_is_said() -> None:
    config = audit_run.configuration("delayed", 1, "cpu", large=True)
    assert isinstance(config.model, TransformerConfig)
    per_block = 12 * config.model.width**2  # of the four linear layers
    assert round(config.model.layers * per_block / 1e6) == 120
