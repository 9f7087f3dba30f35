"""How the experiments' commands end, and that their committed rows are still whole."""

from __future__ import annotations

import errno
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from fp8lab.checkpoint import CheckpointError
from fp8lab.errors import UserError
from fp8lab.experiments import audit_run, incident_rows, plot_curves, plot_fallback, plot_tolerance
from fp8lab.experiments.commands import command_of, exit_code, made_by, rows_and_figure
from fp8lab.experiments.plot import check_figure
from fp8lab.experiments.plot_casts import draw_casts
from fp8lab.experiments.preset_run import configuration
from fp8lab.records import Row, read_rows, to_json

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = sorted(
    path.stem
    for path in (ROOT / "experiments").glob("*.py")
    if 'if __name__ == "__main__"' in path.read_text(encoding="utf-8")
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


def test_commands_are_those_that_were_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["x.py", "--condition", "history 16"])
    said = "python -m fp8lab.experiments.resume_incident --condition 'history 16'"
    assert command_of("resume_incident") == said
    assert command_of("sweep", ["--jobs", "2"]) == "python -m fp8lab.experiments.sweep --jobs 2"
    assert command_of("sweep", []) == "python -m fp8lab.experiments.sweep"
    made = made_by("resume_incident")
    assert made["command"] == said
    assert date.fromisoformat(made["date"]) >= date(2026, 11, 30)


def test_each_experiment_says_its_own_name() -> None:
    """Also those that need a card, whose rows no test here makes."""
    call = re.compile(r"\b(?:command_of|made_by)\(\s*\"(\w+)\"")
    files = {name: ROOT / "experiments" / f"{name}.py" for name in COMMANDS}
    named = {name: set(call.findall(file.read_text("utf-8"))) for name, file in files.items()}
    said = {name: own for name, own in named.items() if own}
    assert len(said) > 10
    assert said == {name: {name} for name in said}


def test_notes_say_what_became_of_rows(capsys: pytest.CaptureFixture[str]) -> None:
    for error in (KeyboardInterrupt(), UserError("x"), OSError(errno.ENOSPC, "No space left")):
        error.add_note("rows so far: 3,\nin y.jsonl")

        def main(raised: BaseException = error) -> None:
            raise raised

        assert exit_code(main) in (2, 130)
        assert capsys.readouterr().err.endswith("; rows so far: 3, in y.jsonl\n")


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
        ["resume_incident", "--after", "0"],
        ["plot_optimizer", "nowhere.jsonl"],
        ["search_matmul", "--rounds", "x"],
    ],
)
def test_a_process_says_one_line_and_ends_with_2(tmp_path: Path, words: list[str]) -> None:
    done = subprocess.run(
        command(*words), cwd=tmp_path, capture_output=True, text=True, check=False, env=_path()
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", COMMANDS)
def test_an_unknown_option_is_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    main = importlib.import_module(f"fp8lab.experiments.{name}").main
    with pytest.raises(SystemExit, match="2"):
        main(["--nope"])
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.endswith("--help)\n")


FIGURES = str(ROOT / "figures")
MISTAKES = [
    "layer_tolerance --batches 0",
    "fallback_spike --seeds 0",
    "audit_run --presets fp4",
    "bench_checkpoint --megabytes 0",
    "resume_incident --condition nope",
    "resume_incident --variants exact,exact",
    "bench_matmul_emulation --sizes 0 0 0",
    "bench_matmul_emulation --sizes 16 -1 16",
    "bench_matmul_emulation --sizes 16 16 16 --repeats 0",
    "bench_matmul_emulation --peers nope",
    "bench_matmul --seconds nan",
    "bench_matmul --only nope",
    "bench_linear_products --tokens 0",
    "bench_linear_products --seconds 0",
    "bench_casting --elements 3",
    "bench_casting --jobs 0",
    "bench_casting --only [",
    "bench_telemetry --rounds 0",
    "bench_telemetry --recipes nope",
    "bench_telemetry --only blocks,blocks",
    "bench_optimizer --only nope",
    "bench_blocks --rounds 0",
    "bench_blocks --groups blocks,blocks",
    "bench_checkpoint --folder nope",
    "bench_checkpoint --repeats 0",
    "kernel_variants --jobs 0",
    "kernel_variants --only [",
    "plot_optimizer /dev/null",
    f"plot_optimizer {FIGURES}/h200/optimizer.jsonl --figure x.pdf",
    f"optimizer_states --redraw --out {FIGURES}/sweep",
    f"bench_emulation --out {FIGURES}/sweep.jsonl",
]


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_found_before_the_work(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    _is_one_line(words.split(), capsys)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words",
    [
        "audit_run --out FILE/x.jsonl",
        "bench_blocks --out FILE",
        "bench_casting --out FILE",
        "bench_checkpoint --out FILE/x.jsonl",
        "bench_emulation --out FILE/x.jsonl",
        "bench_linear_products --out FILE",
        "bench_matmul --out FILE",
        "bench_matmul_emulation --out FILE/x.jsonl",
        "bench_optimizer --out FILE",
        "bench_telemetry --out FILE",
        "fallback_spike --out FILE/x.png",
        "format_error --out FILE",
        "layer_tolerance --out FILE/x.png",
        "optimizer_states --out FILE/x",
        f"plot_casting {FIGURES}/h200/casting.jsonl --figure FILE/x.png",
        f"plot_optimizer {FIGURES}/h200/optimizer.jsonl --figure FILE/x.png",
        "preset_curves --out FILE/x.png",
        "probe_adamw --golden FILE/x.npz",
        "probe_transpose --out FILE",
        "record_golden --out FILE",
        "resume_incident --out FILE/x.png",
    ],
)
def test_what_cannot_be_written_is_found_before_the_work(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    text = ["--text", str(ROOT / "CONTRIBUTING.md")] if words.startswith("audit_run") else []
    said = _is_one_line([*words.replace("FILE", str(tmp_path / "file")).split(), *text], capsys)
    assert "cannot write " in said
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_figure_of_a_sweep_is_looked_at_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*Not a directory; name another --figure"):
        check_figure(tmp_path / "file" / "x.png", tmp_path / "sweep")


def test_a_figure_of_casts_replaces_no_other_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    beside = tmp_path / "x.jsonl"
    beside.write_text('{"sweep": {}}\n')
    figure = str(tmp_path / "x.png")
    said = _is_one_line(
        ["plot_casting", f"{FIGURES}/h200/casting.jsonl", "--figure", figure], capsys
    )
    assert said == f"{beside} holds something else than such rows; name another --figure\n"
    with pytest.raises(UserError, match="holds something else than such rows"):
        draw_casts(tmp_path / "run", tmp_path / "x.png")
    assert beside.read_text() == '{"sweep": {}}\n'
    assert list(tmp_path.iterdir()) == [beside]


def _is_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    main = importlib.import_module(f"fp8lab.experiments.{words[0]}").main
    try:
        code: object = exit_code(main, words[1:])
    except SystemExit as error:
        code = error.code
    said = capsys.readouterr().err
    assert code == 2, said
    assert said.count("\n") == 1
    assert "needs a CUDA device" not in said
    return said


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
        ("resume-incident", incident_rows.check_rows),
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
