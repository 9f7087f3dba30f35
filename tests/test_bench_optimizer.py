"""The optimizer benchmark's bookkeeping: what its rows become. The timing itself needs a card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fp8lab.errors import UserError
from fp8lab.experiments.bench_optimizer import groups, main
from fp8lab.experiments.documents import fill, markers
from fp8lab.experiments.optimizer_cases import EIGHT_BIT, FLOAT32, STATE_CASES, sharded
from fp8lab.experiments.plot_optimizer import GOALS, SECTION, draw, section

HEAD: dict[str, Any] = {
    "environment": {"device": "a card", "packages": {"torch": "2.11.0", "triton": "3.6.0"}},
    "date": "2026-11-29",
    "command": "python -m fp8lab.experiments.bench_optimizer --out FOLDER",
    "rounds": 15,
}


def row(group: str, name: str, size: float, milliseconds: float, share: float) -> dict[str, Any]:
    return {
        "group": group,
        "name": name,
        "elements": 10**9,
        "bytes_per_element": size,
        "milliseconds": milliseconds,
        "copy": 4000.0,
        "share_of_copy": share,
    }


ROWS = [
    HEAD,
    row(GOALS[3][1], "fp8lab plain", 28, 7.0, 0.99),
    row(GOALS[3][1], "torch fused", 28, 8.33, 0.8),
    row(GOALS[4][1], "fp8lab plain", 28, 7.0, 0.92),
    row(GOALS[4][1], "torch fused", 28, 8.4, 0.8),
    row("states: 1.3B", "torch, one kernel an operation", 80, 21.0, 0.9),
    row("states: 1.3B", "float32", 28, 7.0, 0.99),
    row("states: 1.3B", EIGHT_BIT.name, 14, 4.0, 0.86),
    row("sharded over 8: 1.3B", "float32", 28, 0.9, 0.97),
]


def told() -> dict[str, str]:
    lines = section(ROWS).splitlines()
    return {line.split(" | ")[0].lstrip("| "): line for line in lines if line.startswith("|")}


def test_goals_are_compared_as_they_are_stated() -> None:
    lines = told()
    assert "0.990, 7.000 ms | no |" in lines["AdamW float32: 2^28"], "8.33 is not 1.2 times 7"
    assert "torch fused 8.330 ms (1.19x)" in lines["AdamW float32: 2^28"]
    assert "| no |" in lines["AdamW float32: 1.3B"], "faster than torch, but 0.92 of copy"
    assert "0.860, 4.000 ms | yes |" in lines["AdamW, 14 bytes a parameter: 1.3B"]
    assert "float32 7.000 ms (1.75x)" in lines["AdamW, 14 bytes a parameter: 1.3B"]
    assert "not measured" in lines["norm, unscale, finite check: 8B"]


def test_the_account_predicts_from_bytes_and_the_copy() -> None:
    lines = told()
    assert lines["torch, one kernel an operation"].endswith("| 80 | 20.000 | 21.000 | 0.900 |")
    assert lines["torch fused, float32"].endswith("| 28 | 7.000 | 8.400 | 0.800 |")
    assert lines["float32, 8 ranks"].endswith("| 3.5 | 7.000 | 0.900 | 0.970 |")


def test_a_document_is_filled_again_and_again(tmp_path: Path) -> None:
    document = tmp_path / "performance.md"
    begin, end = markers(SECTION)
    document.write_text(f"before\n{begin}\nstale\n{end}\nafter\n", encoding="utf-8")
    for _ in range(2):
        fill(document, SECTION, section(ROWS))
    whole = document.read_text(encoding="utf-8")
    assert whole.startswith("before\n")
    assert whole.endswith("after\n")
    assert whole.count("AdamW float32: 2^28") == 1
    assert "stale" not in whole
    document.write_text("no markers", encoding="utf-8")
    with pytest.raises(UserError, match="lacks the markers"):
        fill(document, SECTION, "text")


def test_it_is_drawn_from_rows_alone(tmp_path: Path) -> None:
    figure = tmp_path / "optimizer.png"
    draw(ROWS, figure)
    assert figure.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="the rows hold no measurements; run the benchmark first"):
        draw([HEAD], figure)


def test_every_goal_has_its_group() -> None:
    titles = {title for title, _ in groups(tune=False)}
    assert {group for _, group, *_ in GOALS} <= titles


def test_bytes_are_counted_once_each_way() -> None:
    assert FLOAT32.bytes_moved == 28
    assert EIGHT_BIT.bytes_moved == 14.125
    by_tensor = next(case for case in STATE_CASES if case.name == "e4m3_tensor")
    assert by_tensor.bytes_moved == 4 + 2 * 2 + 6 + 4, "moments and gradient are read twice"
    assert sharded([(10, 3), (1,)], 8) == [(2, 3), (1,)]


def test_without_a_card_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UserError, match="the benchmark needs a CUDA device; torch finds none"):
        main(["--out", str(tmp_path)])
