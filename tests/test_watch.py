"""`fp8lab watch`: what it shows of rows that grow, are half written, cut off or damaged."""

from __future__ import annotations

import io
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp8lab import watch as watching
from fp8lab.cli import main
from fp8lab.errors import UserError
from fp8lab.experiments.plot_casts import draw_casts, table
from fp8lab.records import Row, read_rows, to_json
from fp8lab.watch import events_of, view, watch
from fp8lab.watch_rows import RowFile, Run, Source
from fp8lab.watch_text import Style, aligned, level, spark

PLAIN = Style()


def cast(overflow: float = 0.0, underflow: float = 0.0, scale: float = 64.0) -> dict[str, float]:
    return {"amax": 3.5, "scale": scale, "overflow": overflow, "underflow": underflow}


def row(step: int, **more: Any) -> Row:
    return {"step": step, "loss": 5.0 / step, "grad_norm": 1.0, "lr": 1e-3, **more}


def write(folder: Path, rows: list[Row], *, steps: int = 20, tail: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = {"steps": steps, "recipe": {"name": "delayed"}}
    (folder / "config.json").write_text(json.dumps(config))
    text = "".join(to_json({**own, "time": {"seconds": own["step"] / 2}}) + "\n" for own in rows)
    (folder / "metrics.jsonl").write_text(text + tail)
    return folder


def text_of(path: Path, casts: int = 10, style: Style = PLAIN) -> str:
    return view(Source(path).runs(), style, casts)


def test_a_run_is_shown_with_its_losses_casts_and_events(tmp_path: Path) -> None:
    casts = {"0.input": cast(underflow=0.5), "0.weight": cast(overflow=0.25, scale=2.0)}
    rows = [row(1, casts=casts, loss_scale=4.0), row(2, skipped=True, loss_scale=2.0)]
    rows.append(row(3, validation_loss=1.5, casts=casts))
    shown = text_of(write(tmp_path / "run", rows))
    for part in (
        "recipe delayed",
        "step 3 of 20  running  2 s, 0.5 s a step",
        "validation",
        "lowest 1.5 at step 3",
        "casts at step 3",
        "step 2: skipped: a gradient was not finite",
        "step 2: loss scale 4 to 2",
    ):
        assert part in shown
    lines = {line.split()[0]: line.split() for line in shown.splitlines()}
    assert lines["0.input"][1:5] == ["3.5", "64", "0", "0.5"]
    assert lines["0.weight"][1:5] == ["3.5", "2", "0.25", "0"]


def test_only_the_worst_casts_are_shown_where_there_is_no_room(tmp_path: Path) -> None:
    casts = {f"{i}.input": cast(underflow=i / 100) for i in range(9)} | {"x": cast(overflow=1e-6)}
    shown = text_of(write(tmp_path, [row(1, casts=casts)]), casts=3)
    names = [line.split()[0] for line in shown.splitlines() if "3.5" in line]
    assert names == ["x", "8.input", "7.input"]
    assert "and 7 more, none worse" in shown


def test_half_a_line_waits_and_damaged_ones_are_counted(tmp_path: Path) -> None:
    path = write(tmp_path, [row(1)], tail='{"step": 2, "lo') / "metrics.jsonl"
    file = RowFile(path)
    file.refresh()
    assert [own["step"] for own in file.rows] == [1]
    with path.open("a") as out:
        out.write('ss": 1.0}\nnot json\n\xff\n[1]\n')
    file.refresh()
    assert [own["step"] for own in file.rows] == [1, 2]
    assert file.damaged == 3
    assert "3 damaged lines were left out" in text_of(tmp_path)


def test_what_a_resumed_run_cut_off_is_forgotten(tmp_path: Path) -> None:
    file = RowFile(write(tmp_path, [row(1), row(2), row(3)]) / "metrics.jsonl")
    file.refresh()
    replaced = tmp_path / "new"
    replaced.write_text(to_json(row(1)) + "\n" + to_json(row(2) | {"loss": 0.125}) + "\n" * 1)
    replaced.replace(file.path)
    file.refresh()
    assert [own["loss"] for own in file.rows] == [5.0, 0.125]


def test_the_state_of_a_run(tmp_path: Path) -> None:
    folder = write(tmp_path, [row(1)])
    [run] = Source(folder).runs()
    assert (run.state, run.going) == ("running", True)
    old = time.time() - 600
    os.utime(folder / "metrics.jsonl", (old, old))
    [run] = Source(folder).runs()
    assert (run.state, run.going) == ("no row for 10 min", True)
    (folder / "result.json").write_text("{}")
    [run] = Source(folder).runs()
    assert (run.state, run.going) == ("finished", False)
    [run] = Source(write(folder, [row(1), row(2, loss="nan")])).runs()
    assert run.state == "diverged"
    assert "step 2: the loss is nan" in view([run], PLAIN, 3)


def test_a_sweep_is_a_line_a_run(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text("{}")
    write(tmp_path / "runs" / "mx%3Arounding%3Dup" / "seed-0", [row(1, casts={"a": cast(0.5)})])
    write(tmp_path / "runs" / "mx%3Arounding%3Dup" / "seed-1.partial-77", [])
    lines = text_of(tmp_path).splitlines()
    assert lines[1].split()[:4] == ["mx:rounding=up", "seed", "0", "1/20"]
    assert " 0.5 " in lines[1]
    assert lines[2].split()[:4] == ["mx:rounding=up", "seed", "1", "0"]


def test_a_file_of_rows(tmp_path: Path) -> None:
    rows = [{"policy": "mx", "seed": seed, **row(step)} for seed in (0, 1) for step in (1, 2)]
    path = tmp_path / "sweep.jsonl"
    path.write_text("".join(to_json(own) + "\n" for own in [{"sweep": {}}, *rows]))
    runs = Source(path).runs()
    assert [(run.name, len(run.rows), run.damaged) for run in runs] == [
        ("mx seed 0", 2, 0),
        ("mx seed 1", 2, 0),
    ]


def test_events_that_rows_list_are_shown() -> None:
    rows = [row(4, events=["moved", {"layer": "0", "role": "input"}])]
    assert list(events_of(rows)) == [(4, "moved"), (4, "layer 0, role input")]


def test_a_terminal_is_renewed_until_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path, [row(1)])
    slept = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            write(folder, [row(1), row(2)])
            (folder / "result.json").write_text("{}")

    monkeypatch.setattr(watching, "sleep", sleep)
    out = io.StringIO()
    watch(folder, out, style=PLAIN, casts=lambda: 3, interval=0.5, once=False)
    looks = out.getvalue().split("\x1b[H\x1b[J")[1:]
    assert slept == [0.5, 0.5]
    assert ["step 1 of" in look for look in looks] == [True, True, False]
    assert "step 2 of 20  finished" in looks[2]


def test_colours_do_not_move_columns() -> None:
    style = Style(colour=True, unicode=True)
    lines = list(aligned([("a", style.alarm("1", True), ""), ("b", "22", "")]))
    assert lines[0] == "  a   \x1b[31m1\x1b[0m"
    assert lines[1] == "  b  22"


def test_curves_and_shades() -> None:
    assert spark([0.0, 1.0, float("nan")], Style(unicode=True)) == "▁█!"
    assert len(spark(list(range(1000)), PLAIN)) == 40
    assert spark([2.0, 2.0], PLAIN) == ".."
    shares = (0.0, 1e-6, 1e-4, 5e-3, 0.05, 0.5)
    assert "".join(level(share, PLAIN) for share in shares) == " .-+#@"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "run", [row(1, casts={"0.input": cast()})])
    assert main(["watch", str(tmp_path / "run"), "--once", "--casts", "5"]) == 0
    shown = capsys.readouterr().out
    assert "step 1 of 20" in shown
    assert "\x1b" not in shown
    figure = tmp_path / "figures" / "casts.png"
    assert main(["watch", str(tmp_path / "run"), "--figure", str(figure)]) == 0
    assert figure.stat().st_size > 0
    assert read_rows(figure.with_suffix(".jsonl")) == [{"step": 1, "casts": {"0.input": cast()}}]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing"], "missing is not there; accepted: the folder of a run"),
        (["."], "holds no run; accepted"),
        ([".", "--interval", "0"], "--interval is 0.0; accepted: 0.1 to 3600"),
        ([".", "--casts", "-1"], "--casts is -1; accepted: 0 and up"),
        ([".", "--figure", "x.gif"], "accepted: a file in .png, .svg, .pdf"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["watch", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_figure_needs_one_run_with_casts(tmp_path: Path) -> None:
    figure = tmp_path / "x.png"
    with pytest.raises(UserError, match=r"no row of .* holds observed casts"):
        draw_casts(write(tmp_path / "run", [row(1)]), figure)
    rows = [{"policy": "mx", "seed": seed, **row(1)} for seed in (0, 1)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(to_json(own) + "\n" for own in rows))
    with pytest.raises(UserError, match="holds 2 runs; name the folder of one"):
        draw_casts(path, figure)
    with pytest.raises(UserError, match="would overwrite its rows"):
        draw_casts(path, path.with_suffix(".png"))


def test_the_same_rows_give_the_same_figure(tmp_path: Path) -> None:
    rows = [row(step, casts={"a": cast(1e-3, 0.1, 2.0**step), "b": cast()}) for step in (1, 5, 9)]
    del rows[1]["casts"]["b"]
    source = write(tmp_path / "run", rows)
    first, second = tmp_path / "1.png", tmp_path / "2.png"
    again = draw_casts(source, first)
    draw_casts(again, second)
    assert first.with_suffix(".jsonl").read_bytes() == second.with_suffix(".jsonl").read_bytes()
    wanted = np.array([[2, 32, 512], [64, np.nan, 64]])
    assert np.array_equal(table(rows, ["a", "b"], "scale"), wanted, equal_nan=True)


def test_no_rows_yet(tmp_path: Path) -> None:
    assert "no rows yet" in text_of(write(tmp_path / "run", []))
    assert Run("x").state == "rows alone"
    (tmp_path / "sweep.json").write_text("{}")
    assert text_of(tmp_path) == "no runs yet"
