"""The spike experiment: its rows, and a figure that is drawn from them alone."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from fp8lab.errors import UserError
from fp8lab.experiments import fallback_spike
from fp8lab.experiments.commands import command_of
from fp8lab.experiments.plot_fallback import table
from fp8lab.records import Row, read_rows
from tests.unstamped import rows_of as unstamped

TEXT = Path(__file__).resolve().parent.parent / "CONTRIBUTING.md"


def test_rows_figure_and_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallback_spike, "SPIKE", (4, 4))
    monkeypatch.setattr(fallback_spike, "FACTOR", 300.0)
    figure = tmp_path / "spike.png"
    options = ["--seeds", "1", "--steps", "8", "--text", str(TEXT), "--out", str(figure)]
    fallback_spike.main(options)
    rows = read_rows(figure.with_suffix(".jsonl"))
    assert "date" in rows[0]["environment"]
    assert rows[0]["environment"]["command"] == command_of("fallback_spike", options)
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


def test_a_kill_leaves_the_rows_that_are_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fallback_spike, "SPIKE", (2, 2))
    figure = tmp_path / "spike.png"
    options = ["--seeds", "2", "--steps", "3", "--text", str(TEXT), "--out", str(figure)]
    fallback_spike.main(options)
    path = figure.with_suffix(".jsonl")
    whole, rows = path.read_bytes(), unstamped(path)
    done: list[tuple[str, str, int]] = []

    def killed(condition: str, variant: str, seed: int, text: Path | None, steps: int) -> Row:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append((condition, variant, seed))
        return rows_of(condition, variant, seed, text, steps)

    rows_of = fallback_spike.rows_of
    lines = whole.splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:4], lines[7], lines[9][:50]]))  # head, 4 rows, half a row
    monkeypatch.setattr(fallback_spike, "rows_of", killed)
    with pytest.raises(KeyboardInterrupt):
        fallback_spike.main(options)
    assert done == [("static", "fp8", 1), ("static", "fallback", 0)]
    assert len(read_rows(path)) == 1 + 4 + 2
    fallback_spike.main([*options, "--redraw"])  # what there is
    path.write_bytes(b"".join(lines[:3]))
    with pytest.raises(UserError, match="runs are missing"):
        fallback_spike.main([*options, "--redraw"])
    monkeypatch.setattr(fallback_spike, "rows_of", rows_of)
    fallback_spike.main(options)
    assert unstamped(path) == rows


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--seeds", "0"], "--seeds is 0; accepted: 1 and up"),
        (["--seeds", "-1"], "--seeds is -1; accepted: 1 and up"),
        (["--jobs", "0"], "--jobs is 0; accepted: 1 and up"),
        (["--steps", "3"], "--steps is 3; accepted: 60 and up"),
        (["--out", "x.xyz"], "--out is 'x.xyz'; accepted: a file in"),
        (["--document", "nowhere.md"], "cannot read nowhere.md"),
    ],
)
def test_mistakes_are_said_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str], said: str
) -> None:
    monkeypatch.setattr(fallback_spike, "rows_of", None)
    with pytest.raises(UserError, match=said):
        fallback_spike.main(["--text", str(TEXT), "--out", str(tmp_path / "x.png"), *given])
    assert not list(tmp_path.iterdir())
