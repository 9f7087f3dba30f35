"""`fp8lab plot` on rows that were changed: one line says it; what is odd but right is drawn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fp8lab.cli import main
from fp8lab.experiments.plot import WATCHED

HEAD = {"sweep": {"policies": ["bf16", "current"], "seeds": 1, "corpus": {"name": "c"}}}
CAST = {"amax": 1.0, "scale": 2.0, "overflow": 0.0, "underflow": 0.1}
ROW = {"policy": "current", "seed": 0, "step": 1, "loss": 3.0, "casts": {WATCHED: CAST}}


def drawn(folder: Path, rows: Sequence[Any]) -> int:
    source = folder / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return main(["plot", str(source)])


@pytest.mark.parametrize("value", [None, "x", -1, [], {}, 10**400, 1.5, True])
@pytest.mark.parametrize("key", ["policy", "seed", "step"])
def test_what_names_a_row_is_checked(
    key: str, value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert drawn(tmp_path, [HEAD, ROW, ROW | {key: value}]) == 2
    said = capsys.readouterr().err
    assert "rows.jsonl is damaged: row 3 " in said
    assert said.count("\n") == 1
    assert not (tmp_path / "rows.png").exists()


@pytest.mark.parametrize("value", ["x", [], 10**400, True], ids=lambda v: repr(v)[:9])
@pytest.mark.parametrize("key", ["loss", "validation_loss", "casts"])
def test_what_is_drawn_of_a_row_is_checked(
    key: str, value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert drawn(tmp_path, [HEAD, ROW | {key: value}]) == 2
    assert "row 2 has a step, loss or casts that no run writes" in capsys.readouterr().err


@pytest.mark.parametrize("key", CAST)
def test_each_cast_is_checked(key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong: tuple[Any, ...] = (None, "x", [], 10**400)
    for value in wrong:
        assert drawn(tmp_path, [HEAD, ROW | {"casts": {WATCHED: CAST | {key: value}}}]) == 2
        assert "row 2 has a step, loss or casts" in capsys.readouterr().err
    lacks = {name: own for name, own in CAST.items() if name != key}
    assert drawn(tmp_path, [HEAD, ROW | {"casts": {WATCHED: lacks}}]) == 2


@pytest.mark.parametrize("amax", ["nan", "inf", 0.0])
def test_what_has_no_place_on_a_logarithmic_axis_is_drawn_all_the_same(
    amax: Any, tmp_path: Path
) -> None:
    assert drawn(tmp_path, [HEAD, ROW | {"casts": {WATCHED: CAST | {"amax": amax}}}]) == 0


def test_rows_without_casts_are_drawn(tmp_path: Path) -> None:
    odd = [ROW | {"casts": None}, ROW | {"casts": {}, "step": 2}, ROW | {"loss": "nan", "step": 3}]
    assert drawn(tmp_path, [HEAD, *odd]) == 0
    assert (tmp_path / "rows.png").stat().st_size > 0
