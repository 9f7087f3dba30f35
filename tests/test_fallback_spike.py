"""The spike experiment: its rows, and a figure that is drawn from them alone."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from fp8lab.experiments import fallback_spike
from fp8lab.experiments.plot_fallback import table
from fp8lab.records import read_rows

TEXT = Path(__file__).resolve().parent.parent / "CONTRIBUTING.md"


def test_rows_figure_and_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallback_spike, "SPIKE", (4, 4))
    monkeypatch.setattr(fallback_spike, "FACTOR", 300.0)
    figure = tmp_path / "spike.png"
    options = ["--seeds", "1", "--steps", "8", "--text", str(TEXT), "--out", str(figure)]
    fallback_spike.main(options)
    rows = read_rows(figure.with_suffix(".jsonl"))
    variants = [(row["condition"], row["variant"]) for row in rows[1:]]
    assert variants == [
        ("", "bf16"),
        ("static", "fp8"),
        ("static", "fallback"),
        ("static", "one ulp"),
        ("delayed", "fp8"),
        ("delayed", "fallback"),
        ("delayed", "one ulp"),
    ]
    assert all(len(row["loss"]) == 8 for row in rows[1:])
    events = {(row["condition"], row["variant"]): row["events"] for row in rows[1:]}
    assert not [e for (_, variant), own in events.items() if variant != "fallback" for e in own]
    fell = {(e["role"], e["step"]) for e in events["delayed", "fallback"] if e["to"] == "bf16"}
    assert ("weight", 5) in fell  # the step after the one whose learning rate was too high
    losses = {row["variant"]: row["loss"] for row in rows[1:] if row["condition"] != "static"}
    assert losses["fp8"][5] != losses["fallback"][5] != losses["bf16"][5]
    assert len(table(rows).splitlines()) == 2 + 2 * 4
    before = figure.read_bytes()
    figure.unlink()
    fallback_spike.main(["--redraw", "--out", str(figure)])
    assert figure.read_bytes() == before
