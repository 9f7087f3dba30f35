"""Rows of benchmarks are looked at before anything is drawn or told from them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8lab.errors import UserError
from fp8lab.experiments import bench_matmul, bench_optimizer, plot_casting, plot_optimizer
from fp8lab.experiments.bench_rows import checked_casting, checked_optimizer, checked_products
from fp8lab.experiments.commands import exit_code
from fp8lab.records import Row, read_rows, to_json

FIGURES = Path(__file__).parent.parent / "figures" / "h200"
FILES = {
    "bench-matmul": lambda rows, path: checked_products(rows, ("speed", "error"), path),
    "bench-linear-products": lambda rows, path: checked_products(rows, ("linear",), path),
    "optimizer": checked_optimizer,
    "casting": checked_casting,
}


@pytest.mark.parametrize(("name", "check"), FILES.items(), ids=FILES)
def test_committed_rows_are_sound(name: str, check: Callable[[Any, Path], list[Row]]) -> None:
    path = FIGURES / f"{name}.jsonl"
    rows = read_rows(path)
    assert check(rows, path) == rows


def problem_with(check: Callable[[Any, Path], list[Row]], rows: Any) -> str | None:
    try:
        check(rows, Path("a"))
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize(("name", "check"), FILES.items(), ids=FILES)
def test_every_lost_or_wrong_entry_that_is_used_is_refused(
    name: str, check: Callable[[Any, Path], list[Row]]
) -> None:
    """In the first row, the second and the last; nothing ends in another error."""
    rows = read_rows(FIGURES / f"{name}.jsonl")
    refused = set()
    wrong: tuple[Any, ...] = (None, [], "x", -1, {}, 10**400)
    for place in (0, 1, len(rows) - 1):
        for key in rows[place]:
            others = {other: value for other, value in rows[place].items() if other != key}
            for row in (others, *(others | {key: value} for value in wrong)):
                said = problem_with(check, [*rows[:place], row, *rows[place + 1 :]])
                if said is not None and "no row of the device copy" not in said:
                    assert said.startswith(f"a, line {place + 1}, is damaged: ")
                    assert key in said
                    refused.add((place, key))
    used = {
        "bench-matmul": {(1, "hot"), (1, "shape"), (1, "different"), (len(rows) - 1, "card")},
        "bench-linear-products": {(1, "ratio"), (1, "layer"), (0, "environment")},
        "optimizer": {(0, "rounds"), (1, "group"), (1, "milliseconds")},
        "casting": {(0, "packages"), (1, "microseconds"), (1, "share_of_copy"), (1, "case")},
    }[name]
    assert used <= refused


@pytest.mark.parametrize(("name", "check"), FILES.items(), ids=FILES)
def test_rows_that_are_none_or_stand_twice(
    name: str, check: Callable[[Any, Path], list[Row]]
) -> None:
    rows = read_rows(FIGURES / f"{name}.jsonl")
    for few in ([], rows[:1]):
        with pytest.raises(UserError, match="a holds no measurements; run the benchmark first"):
            check(few, Path("a"))
    with pytest.raises(UserError, match="a, line 3, is damaged: it holds no JSON object"):
        check([*rows[:2], 3, *rows[2:]], Path("a"))
    with pytest.raises(UserError, match="stands there twice"):
        check([*rows, rows[-1]], Path("a"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in FILES:
        shutil.copy(FIGURES / f"{name}.jsonl", tmp_path)
    shutil.copy(FIGURES.parent.parent / "docs" / "performance.md", tmp_path)
    return tmp_path


def lose_a_shape(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.get("shape") != "cube 8192"]


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        ("bench-matmul", lose_a_shape, "lacks 3 of 78 products, such as cube 8192, native; --doc"),
        (
            "bench-matmul",
            lambda rows: [*rows, rows[1] | {"mode": "zz"}],
            "has a product that is not measured today: cube 4096, zz",
        ),
        ("bench-matmul", lambda rows: [*rows, rows[1]], "line 116, is damaged: kind speed, mode"),
        (
            "bench-matmul",
            lambda rows: [rows[0], {}, *rows[1:]],
            "line 2, is damaged: it lacks kind",
        ),
        ("bench-linear-products", None, "run bench_linear_products --out"),
        ("bench-linear-products", lambda rows: rows[:1], "holds no measurements"),
    ],
)
def test_a_document_of_products_is_filled_from_whole_rows_alone(
    folder: Path, file: str, change: Any, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is wrong is one line, and neither document nor figure is touched."""
    words = ["--draw", str(folder), "--document", str(folder / "performance.md")]
    before = (folder / "performance.md").read_bytes()
    path = folder / f"{file}.jsonl"
    rows = read_rows(path)
    path.unlink()
    if change is not None:
        path.write_text("".join(f"{to_json(row)}\n" for row in change(rows)))
    assert exit_code(bench_matmul.main, words) == 2
    found = capsys.readouterr().err
    assert said in found
    assert found.count("\n") == 1
    assert (folder / "performance.md").read_bytes() == before
    assert not list(folder.glob("*.png"))


def test_a_document_is_not_of_some_shapes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--out", str(folder), "--document", str(folder / "performance.md"), "--only", "cube"]
    assert exit_code(bench_matmul.main, words) == 2
    assert "--document tells of all shapes; leave --only out" in capsys.readouterr().err


@pytest.mark.parametrize("main", [plot_optimizer.main, plot_casting.main, bench_optimizer.main])
def test_damaged_rows_end_in_one_line(
    main: Any, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / ("casting.jsonl" if main is plot_casting.main else "optimizer.jsonl")
    lines = path.read_text().splitlines(keepends=True)
    damaged = json.loads(lines[3])
    del damaged["elements"]
    lines[3] = to_json(damaged) + "\n"
    path.write_text("".join(lines))
    words = [str(path), "--figure", str(folder / "a.png")]
    if main is bench_optimizer.main:
        words = ["--out", str(folder), "--redraw"]
    assert exit_code(main, words) == 2
    found = capsys.readouterr().err
    assert "line 4, is damaged: it lacks elements" in found
    assert found.count("\n") == 1
    assert path.read_text() == "".join(lines)
