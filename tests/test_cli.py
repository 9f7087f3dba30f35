"""The command line: what it writes, and how it answers mistakes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fp8lab.cli import main
from fp8lab.recipes import recipe_named
from fp8lab.records import read_rows, without_time

ROOT = Path(__file__).resolve().parent.parent
TEXT = str(ROOT / "LICENSE")
SIZES = ["--width", "16", "--layers", "1", "--context", "16", "--batch", "4", "--text", TEXT]
POLICIES = ["bf16", "static", "delayed:history=2"]


def sweep_arguments(folder: Path, *, seeds: int = 2, steps: int = 6, jobs: int = 1) -> list[str]:
    return [
        "sweep",
        "--policies",
        ",".join(POLICIES),
        "--seeds",
        str(seeds),
        "--steps",
        str(steps),
        "--out",
        str(folder / "runs"),
        "--figure",
        str(folder / "figures" / "sweep.png"),
        "--jobs",
        str(jobs),
        *SIZES,
    ]


def rows_of(runs: Path) -> dict[str, list[dict[str, Any]]]:
    return {
        str(path.parent.relative_to(runs)): [without_time(row) for row in read_rows(path)]
        for path in sorted(runs.glob("runs/*/seed-?/metrics.jsonl"))
    }


def results_of(runs: Path) -> dict[str, str]:
    """The whole text of each result, wall-clock included: it changes when a run is done again."""
    return {str(p): p.read_text() for p in sorted(runs.glob("runs/*/seed-?/result.json"))}


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str], *words: str) -> None:
    """The command ends with 2 and one line that holds these words."""
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1, shown.err
    for word in words:
        assert word in shown.err


def test_a_sweep_from_start_to_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(sweep_arguments(tmp_path)) == 0
    table = capsys.readouterr().out
    for policy in POLICIES:
        assert policy in table
    runs, figure = tmp_path / "runs", tmp_path / "figures" / "sweep.png"
    assert figure.read_bytes().startswith(b"\x89PNG")
    found = rows_of(runs)
    assert len(found) == 6
    assert all(len(rows) == 6 for rows in found.values())
    for folder in runs.glob("runs/*/seed-*"):
        config = json.loads((folder / "config.json").read_text())
        assert config["recipe"] == recipe_named(config["recipe"]["name"]).to_dict()
        environment = json.loads((folder / "environment.json").read_text())
        assert environment["packages"]["numpy"]
        for row in read_rows(folder / "metrics.jsonl"):
            assert set(row["time"]) == {"seconds"}

    # Again: nothing is done twice. Then from the rows alone: the same picture.
    before, picture = results_of(runs), figure.read_bytes()
    assert main(sweep_arguments(tmp_path)) == 0
    assert results_of(runs) == before
    redrawn = tmp_path / "again.png"
    assert main(["plot", str(figure.with_suffix(".jsonl")), "--figure", str(redrawn)]) == 0
    assert redrawn.read_bytes() == picture
    assert main(["plot", str(runs)]) == 0
    assert (runs / "sweep.png").read_bytes() == picture

    # Another sweep may not take the folder.
    kept = {path: path.read_bytes() for path in runs.glob("**/*") if path.is_file()}
    capsys.readouterr()
    refused(capsys, sweep_arguments(tmp_path, steps=7), "holds another sweep", "training")
    refused(capsys, sweep_arguments(tmp_path, seeds=3), "holds another sweep", "seeds")
    assert {path: path.read_bytes() for path in runs.glob("**/*") if path.is_file()} == kept


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of 60 steps that nobody interrupted."""
    folder = tmp_path_factory.mktemp("straight")
    assert main(sweep_arguments(folder, steps=60)) == 0
    return folder


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_interrupted_sweep_goes_on(jobs: int, straight: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    command = [sys.executable, "-m", "fp8lab", *sweep_arguments(broken, steps=60, jobs=jobs)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    runs = broken / "runs"
    deadline = time.monotonic() + 120
    while not (results_of(runs) and list(runs.glob("runs/*/*.partial-*/metrics.jsonl"))):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)  # Ctrl-C reaches the whole group
    message = process.communicate(timeout=60)[1]
    assert process.returncode == 130, message
    assert "interrupted. Finished runs are kept" in message
    assert "Traceback" not in message
    finished = results_of(runs)
    assert 0 < len(finished) < 6

    assert main(sweep_arguments(broken, steps=60)) == 0
    after = results_of(runs)
    assert {path: after[path] for path in finished} == finished
    assert rows_of(runs) == rows_of(straight / "runs")
    assert not list(runs.glob("runs/*/*.partial-*"))


def test_a_run_that_fails_is_reported_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = sweep_arguments(tmp_path, seeds=1)
    assert main(arguments) == 0
    runs = tmp_path / "runs"
    shutil.rmtree(runs / "runs")
    # A file where a run's folder must go: a fault of the machine, not of the user.
    (runs / "runs").mkdir()
    (runs / "runs" / "static").write_text("in the way")
    capsys.readouterr()
    assert main(arguments) == 1
    shown = capsys.readouterr()
    assert "failed: static seed 0" in shown.err
    assert "bf16" in shown.out
    assert "NotADirectoryError" in (runs / "failed" / "static-seed-0.txt").read_text()

    (runs / "runs" / "static").unlink()
    assert main(arguments) == 0
    assert not list((runs / "failed").iterdir())


def test_policies_never_share_a_folder(tmp_path: Path) -> None:
    arguments = sweep_arguments(tmp_path, seeds=1)
    arguments[2] = "static:scale=1e+3,static:scale=1e-3," + "static" + ":scale=1" * 60
    assert main(arguments) == 0
    assert len(rows_of(tmp_path / "runs")) == 3


def test_one_process_at_a_time_and_none_outlives_its_parent(tmp_path: Path) -> None:
    arguments = sweep_arguments(tmp_path, steps=400, jobs=2)
    command = [sys.executable, "-m", "fp8lab", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL)
    runs = tmp_path / "runs"
    deadline = time.monotonic() + 120
    while not list(runs.glob("runs/*/*.partial-*/metrics.jsonl")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    second = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert second.returncode == 2
    assert f"process {process.pid} works on the sweep in " in second.stderr

    process.kill()  # the parent alone
    process.wait()
    partial = [path.parent.name for path in runs.glob("runs/*/*.partial-*/metrics.jsonl")]
    workers = [int(name.rpartition("-")[2]) for name in partial]
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    for path in runs.glob("runs/*/seed-?/metrics.jsonl"):
        assert len(read_rows(path)) == 400


@pytest.fixture(scope="module")
def small_sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished sweep of one seed."""
    folder = tmp_path_factory.mktemp("sweep")
    assert main(sweep_arguments(folder, seeds=1)) == 0
    return folder


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("sweep.json", b"[]"),
        ("sweep.json", b"{}"),
        ("sweep.json", b"\xff"),
        ("runs/bf16/seed-0/result.json", b""),
        ("runs/bf16/seed-0/result.json", b"{}"),
        ("runs/bf16/seed-0/environment.json", b"1"),
        ("runs/bf16/seed-0/metrics.jsonl", b""),
        ("runs/bf16/seed-0/metrics.jsonl", b'{"step": 1, "loss": 1}'),
        ("runs/bf16/seed-0/metrics.jsonl", b"{}{"),
        ("runs/bf16/seed-0/metrics.jsonl", b"\xff"),
    ],
)
def test_what_is_damaged_is_named_and_never_counted(
    file: str, content: bytes, small_sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = small_sweep / "runs" / file
    kept = path.read_bytes()
    path.write_bytes(content)
    try:
        part = "seed-0" if "seed-0" in file else file
        refused(capsys, sweep_arguments(small_sweep, seeds=1), part)
        refused(capsys, ["plot", str(small_sweep / "runs")], part)
    finally:
        path.write_bytes(kept)


def test_a_figure_overwrites_nothing_but_a_figure(
    small_sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = str(small_sweep / "runs")
    precious = tmp_path / "mine.jsonl"
    precious.write_text("precious")
    refused(capsys, ["plot", runs, "--figure", str(tmp_path / "mine.png")], "holds something else")
    assert precious.read_text() == "precious"
    rows = tmp_path / "rows.png"
    rows.write_bytes((small_sweep / "figures" / "sweep.jsonl").read_bytes())
    refused(capsys, ["plot", str(rows)], "would overwrite its rows")
    (tmp_path / "folder.png").mkdir()
    refused(capsys, ["plot", runs, "--figure", str(tmp_path / "folder.png")], "is a folder")
    damaged = tmp_path / "damaged.jsonl"
    for content in ("1", '"sweep"', '{"sweep":{}}\n{}', '{"sweep":{"policies":1}}'):
        damaged.write_text(content)
        refused(capsys, ["plot", str(damaged)], "damaged.jsonl")
    for suffix in (".png", ".svg", ".pdf"):
        pictures = []
        for name in ("one", "two"):
            figure = tmp_path / f"{name}{suffix}"
            assert main(["plot", runs, "--figure", str(figure)]) == 0
            pictures.append(figure.read_bytes())
        assert pictures[0] == pictures[1]


def test_a_mistake_of_the_parser_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    wrong: list[list[str]] = [
        ["sweep", "--steps", "1e3"],
        ["train", "--device", "tpu"],
        ["fly"],
        [],
    ]
    for arguments in wrong:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
        assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["sweep", "--policies", "fp4"], ["unknown policy 'fp4'; accepted: bf16, static"]),
        (["sweep", "--policies", "bf16,bf16"], ["policy bf16 is named twice"]),
        (["sweep", "--policies", ","], ["no policies; name at least one"]),
        (["sweep", "--policies", "delayed:margin=-1"], ["margin is -1; accepted"]),
        (["sweep", "--policies", "delayed:history=0"], ["history is 0; accepted"]),
        (["sweep", "--seeds", "0"], ["seeds is 0; accepted: 1 to 10000"]),
        (["sweep", "--steps", "0"], ["steps is 0; accepted: 1 to 1000000000"]),
        (["sweep", "--batch", "9" * 20], ["accepted: 1 to 65536"]),
        (["sweep", "--figure", "x.bmp"], ["the figure is 'x.bmp'; accepted: a file in .png"]),
        (["sweep", "--figure", ""], ["the figure is '.'; accepted: a file in .png"]),
        (["sweep", "--figure", "/dev/null/x.png", *SIZES, "--out", "/dev/null/x"], ["/dev/null"]),
        (["train", "--out", "/proc/nowhere/x", *SIZES], ["/proc/nowhere"]),
        (["sweep", "--jobs", "0"], ["jobs is 0; accepted: 1 and up, or -1"]),
        (["sweep", "--width", "30"], ["width 30 is not a multiple of its 4 heads"]),
        (["sweep", "--text", "missing.txt"], ["missing.txt"]),
        (["train", "--recipe", "missing.toml"], ["cannot read the recipe missing.toml"]),
        (["train", "--recipe", "fp4"], ["unknown policy 'fp4'"]),
        (["train", "--seed", "9" * 30], ["seed is 999"]),
        (["train", "--seed", "-1"], ["seed is -1; accepted: 0 to"]),
        (["train", "--keep-best", "2"], ["keep_best is 2 without keep_last"]),
        (["train", "--exp-avg", "fp4"], ["exp_avg is 'fp4'; accepted: float32, ", "e4m3_128"]),
        (["sweep", "--exp-avg-sq", "e3m4"], ["exp_avg_sq is 'e3m4'; accepted: float32, "]),
        (["train", "--master", "half"], ["master is 'half'; accepted: float32, bfloat16_remain"]),
        (["plot", "nowhere"], ["cannot read rows from nowhere"]),
    ],
)
def test_mistakes_end_in_one_line(
    arguments: list[str],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    refused(capsys, arguments, *words)
    assert list(tmp_path.iterdir()) == []


def test_a_gpu_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for command in ("train", "sweep"):
        out = tmp_path / command
        refused(
            capsys,
            [command, "--device", "cuda", "--out", str(out), *SIZES],
            "device cuda was asked for, but torch finds no CUDA device",
        )
        assert not out.exists()


def test_corpora_that_are_too_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty, short = tmp_path / "empty.txt", tmp_path / "short.txt"
    empty.write_text("")
    short.write_text("To be, or not to be")
    out = tmp_path / "out"
    for command in ("sweep", "train"):
        refused(capsys, [command, "--text", str(empty), "--out", str(out)], "is empty")
        refused(capsys, [command, "--text", str(short), "--out", str(out)], "context of 64")
    assert not out.exists()


def test_folders_that_hold_something_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    refused(capsys, ["train", "--out", str(tmp_path), *SIZES], "is not empty")
    refused(capsys, ["sweep", "--out", str(tmp_path), *SIZES], "holds no sweep")
    refused(capsys, ["plot", str(tmp_path)], "holds no sweep")
    file = tmp_path / "thesis.tex"
    refused(capsys, ["sweep", "--out", str(file), *SIZES], "is a file; name a folder")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    assert file.read_text() == "precious"


def test_a_training_run_by_recipe_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text(recipe_named("delayed:history=3").to_toml())
    out = tmp_path / "run"
    arguments = ["train", "--recipe", str(recipe), "--steps", "5", "--out", str(out), *SIZES]
    assert main(arguments) == 0
    assert "validation loss" in capsys.readouterr().out
    rows = read_rows(out / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    again = tmp_path / "again"
    assert main([*arguments[:6], str(again), *SIZES]) == 0
    assert [*map(without_time, read_rows(again / "metrics.jsonl"))] == [*map(without_time, rows)]


def test_optimizer_states_by_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    states = {
        "exp_avg": "e4m3_128_settle",
        "exp_avg_sq": "e4m3_128_keep",
        "master": "bfloat16_remainder",
    }
    out = tmp_path / "run"
    given = [part for name, fmt in states.items() for part in (f"--{name.replace('_', '-')}", fmt)]
    short = ["--recipe", "tensorwise", "--steps", "2", "--stop-after", "1", "--out", str(out)]
    assert main(["train", *short, *given, *SIZES]) == 0
    config = json.loads((out / "config.json").read_text())
    assert states.items() <= config.items()
    assert main(["checkpoint", "inspect", "--tensors", str(out)]) == 0
    shown = capsys.readouterr().out
    for kind in ("exp_avg_scale", "remainder", "float8_e4m3fn", "int16", "bfloat16"):
        assert kind in shown
    refused(capsys, ["train", "--resume", str(out), *given[:2]], "leave out --exp-avg")
    assert main(["train", "--resume", str(out)]) == 0
    assert len(read_rows(out / "metrics.jsonl")) == 2


def test_info_shows_versions_and_formats(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    shown = capsys.readouterr().out
    for word in ("numpy", "torch", "E4M3", "E5M2", "448", "57344"):
        assert word in shown


def test_a_package_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "fp8lab.experiments.plot", raising=False)
    assert main(["plot", "runs"]) == 2
    assert "matplotlib is not installed; install" in capsys.readouterr().err
