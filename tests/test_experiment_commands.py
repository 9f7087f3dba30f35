"""How the experiments' commands end, and that their committed rows are still whole."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from fp8lab.checkpoint import CheckpointError
from fp8lab.errors import UserError
from fp8lab.experiments import audit_run, incident_runs, plot_curves, plot_fallback, plot_tolerance
from fp8lab.experiments.commands import exit_code, rows_and_figure
from fp8lab.experiments.preset_run import configuration
from fp8lab.records import Row, read_rows, to_json

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = sorted(
    path.stem
    for path in (ROOT / "experiments").glob("*.py")
    if "__main__" in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_ends_in_one_way(name: str) -> None:
    text = (ROOT / "experiments" / f"{name}.py").read_text(encoding="utf-8")
    assert text.endswith('if __name__ == "__main__":\n    raise SystemExit(exit_code(main))\n')


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UserError("x is 1;\naccepted: 2"), 2, "x is 1; accepted: 2"),
        (CheckpointError("none there"), 2, "none there"),
        (OSError(errno.ENOSPC, "No space left", "f"), 2, "f: No space left; rows that are"),
        (KeyboardInterrupt(), 130, "interrupted; rows that are finished stay"),
    ],
)
def test_mistakes_are_one_line(
    capsys: pytest.CaptureFixture[str], error: BaseException, code: int, said: str
) -> None:
    def main() -> None:
        raise error

    assert exit_code(main) == code
    found = capsys.readouterr().err
    assert said in found
    assert found.count("\n") == 1


def test_faults_of_the_code_are_no_mistakes() -> None:
    assert exit_code(lambda: None) == 0
    assert exit_code(lambda: 1) == 1
    assert exit_code(lambda words: len(words), ["a", "b", "c"]) == 3
    with pytest.raises(ZeroDivisionError):
        exit_code(lambda: 1 // 0)


def test_out_means_the_same_two_files(tmp_path: Path) -> None:
    for suffix in (".jsonl", ".png"):
        found = rows_and_figure(tmp_path / f"x{suffix}")
        assert found == (tmp_path / "x.jsonl", tmp_path / "x.png")
    assert rows_and_figure(tmp_path / "x.svg")[1] == tmp_path / "x.svg"
    (tmp_path / "y.jsonl").mkdir()
    for wrong in ("y.png", "x", "x.json", "x.jpg"):
        with pytest.raises(UserError, match=r"another --out|accepted: a file in"):
            rows_and_figure(tmp_path / wrong)


def command(name: str, *options: str) -> list[str]:
    return [sys.executable, "-m", f"fp8lab.experiments.{name}", *options]


@pytest.mark.parametrize(
    "words",
    [
        ["layer_tolerance", "--batches", "0"],
        ["fallback_spike", "--seeds", "0"],
        ["resume_incident", "--after", "0"],
        ["audit_run", "--presets", "fp4"],
        ["bench_checkpoint", "--megabytes", "0"],
        ["plot_optimizer", "nowhere.jsonl"],
    ],
)
def test_a_process_says_one_line_and_ends_with_2(tmp_path: Path, words: list[str]) -> None:
    done = subprocess.run(
        command(*words), cwd=tmp_path, capture_output=True, text=True, check=False, env=_path()
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_ctrl_c_is_one_line_and_keeps_rows(tmp_path: Path, jobs: str) -> None:
    text = str(ROOT / "CONTRIBUTING.md")
    out = tmp_path / "x.jsonl"
    words = ["--presets", "bf16", "--seeds", "0,1,2,3", "--steps", "3", "--jobs", jobs]
    run = subprocess.Popen(
        command("preset_curves", *words, "--text", text, "--out", str(out)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=_path(),
        start_new_session=True,
    )
    end = time.monotonic() + 120
    while run.poll() is None and (not out.exists() or out.read_bytes().count(b"\n") < 2):
        assert time.monotonic() < end
        time.sleep(0.01)
    if run.poll() is None:
        os.killpg(run.pid, signal.SIGINT)  # as a terminal does: to the children, too
    _, said = run.communicate(timeout=60)
    assert run.returncode == 130, said
    assert said == "interrupted; rows that are finished stay where they are\n"
    assert len(read_rows(out)) >= 2


def _path() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("fallback-spike", plot_fallback.check_rows),
        ("layer-tolerance", plot_tolerance.check_rows),
        ("h200/layer-tolerance", plot_tolerance.check_rows),
        ("resume-incident", incident_runs.check_rows),
        ("h200/preset-curves", plot_curves.check_rows),
        ("h200/audit", audit_run.check_rows),
    ],
)
def test_committed_rows_are_whole(name: str, check: Callable[[list[Any], Path], list[Row]]) -> None:
    path = ROOT / "figures" / f"{name}.jsonl"
    rows = read_rows(path)
    assert check(rows, path) == rows
    assert len(rows) > 1


def test_the_large_curves_can_be_gone_on_with() -> None:
    head = read_rows(ROOT / "figures" / "h200" / "preset-curves.jsonl")[0]
    config = configuration("bf16", 0, steps=head["steps"], device="cuda", large=True).to_dict()
    for key in ("recipe", "seed"):
        del config[key]
    for key in ("preset_curves", "corpus", "environment"):
        del head[key]
    assert head == json.loads(to_json(config))
