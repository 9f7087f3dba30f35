"""The experiment that audits whole runs: its rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fp8lab.data import load_corpus
from fp8lab.experiments import audit_run
from fp8lab.models import TransformerConfig
from fp8lab.records import read_rows
from fp8lab.training import TrainingConfig

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
    assert row["time"]["audited"] > 0


def test_the_command_writes_a_row_a_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_run, "configuration", tiny)
    out = tmp_path / "rows" / "audit.jsonl"
    options = ["--steps", "1", "--sample", "1", "--text", str(text(tmp_path)), "--out", str(out)]
    audit_run.main(["--presets", "mx", *options])
    head, row = read_rows(out)
    assert head["audit"]["presets"] == ["mx"]
    assert (row["preset"], row["differences"]) == ("mx", 0)


def test_the_large_model_is_the_one_that_is_said() -> None:
    config = audit_run.configuration("delayed", 1, "cpu", large=True)
    assert isinstance(config.model, TransformerConfig)
    per_block = 12 * config.model.width**2  # of the four linear layers
    assert round(config.model.layers * per_block / 1e6) == 120
