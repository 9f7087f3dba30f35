"""Runs that were stopped and resumed: rows and state are those of a run that nobody stopped."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from fp8lab import resume, resume_check
from fp8lab.checkpoint import CheckpointError, load, read_manifest, save
from fp8lab.checkpoint_store import checkpoints_in
from fp8lab.cli import main
from fp8lab.data import load_corpus
from fp8lab.errors import UserError
from fp8lab.gradients import UpdateStep
from fp8lab.linear_casts import OperandCast
from fp8lab.models import MlpConfig, TransformerConfig
from fp8lab.optimizer_formats import MASTER_FORMATS, MOMENT_FORMATS
from fp8lab.recipes import PRESETS, recipe_named
from fp8lab.records import Row, read_rows, without_time
from fp8lab.resume import CheckpointPlan, resume_run, start_run
from fp8lab.resume_config import config_from_dict
from fp8lab.training import TrainingRun, training_rows
from fp8lab.training_config import TrainingConfig

ROOT = Path(__file__).resolve().parent.parent
TEXT = ROOT / "CONTRIBUTING.md"
CONFIG = TrainingConfig(
    recipe_named("delayed:history=4"),
    steps=10,
    batch=4,
    model=MlpConfig(context=8, width=8, layers=2, window=4),
    warmup=3,
    observe_every=3,
    validate_every=4,
    validation_count=6,
)
TRANSFORMER = TransformerConfig(context=8, width=16, layers=1, heads=2)


def do(folder: Path, config: TrainingConfig, plan: CheckpointPlan) -> list[Row]:
    """Start a run and do it up to where the plan says."""
    with start_run(folder, config, load_corpus(TEXT), plan, text=TEXT) as run:
        return list(run.rows())


def go_on(folder: Path, **plan: Any) -> list[Row]:
    """Resume a run and do the rest."""
    with resume_run(folder, CheckpointPlan(**plan)) as run:
        return list(run.rows())


def rows_of(folder: Path) -> list[Row]:
    return [without_time(row) for row in read_rows(folder / "metrics.jsonl")]


def files_of(checkpoint: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in checkpoint.iterdir()}


def assert_resumes_exactly(config: TrainingConfig, root: Path) -> None:
    """Ten steps against five, saved and loaded, and five more: rows, result, every file's bytes."""
    whole, parts = root / "whole", root / "parts"
    do(whole, config, CheckpointPlan(every=10))
    do(parts, config, CheckpointPlan(stop_after=5))
    assert len(rows_of(parts)) == 5
    assert not (parts / "result.json").exists()
    go_on(parts)
    assert rows_of(parts) == rows_of(whole)
    assert without_time(json.loads((parts / "result.json").read_text())) == without_time(
        json.loads((whole / "result.json").read_text())
    )
    last = "checkpoints/step-000010"
    assert files_of(parts / last) == files_of(whole / last)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_resumes_exactly(preset: str, tmp_path: Path) -> None:
    assert_resumes_exactly(replace(CONFIG, recipe=recipe_named(preset)), tmp_path)


def test_a_history_of_one_resumes_exactly(tmp_path: Path) -> None:
    """Its buffer is one element of a strided column, which torch cannot view as bytes."""
    assert_resumes_exactly(replace(CONFIG, recipe=recipe_named("delayed:history=1")), tmp_path)


@pytest.mark.parametrize("moment", MOMENT_FORMATS)
def test_every_format_of_moments_resumes_exactly(moment: str, tmp_path: Path) -> None:
    model = MlpConfig(context=8, width=8, layers=1, window=4)
    rows: dict[str, Any] = {"observe_every": 10, "validate_every": 10}
    config = replace(CONFIG, model=model, exp_avg=moment, exp_avg_sq=moment, **rows)
    assert_resumes_exactly(config, tmp_path)


OTHERS: list[dict[str, Any]] = [
    *({"master": master} for master in MASTER_FORMATS),
    {"master": "bfloat16_remainder", "exp_avg": "bfloat16", "exp_avg_sq": "e4m3_128_keep"},
    {"loss_scale": 2.0**60, "dynamic_loss_scale": True},
    {"microbatches": 2},
    {"autocast": True},
    {"products": "codes", "model": TRANSFORMER},
    {"recipe": recipe_named("tensorwise"), "model": TRANSFORMER, "seed": 2**40},
]


@pytest.mark.parametrize("changes", OTHERS, ids=lambda c: "-".join(c))
def test_every_setting_resumes_exactly(changes: dict[str, Any], tmp_path: Path) -> None:
    assert_resumes_exactly(replace(CONFIG, **changes), tmp_path)


def test_saving_and_checking_change_no_row(tmp_path: Path) -> None:
    """The check's step is taken back to the last bit; and a run may stop as often as it likes."""
    plain = list(training_rows(CONFIG, load_corpus(TEXT)))
    assert do(tmp_path / "often", CONFIG, CheckpointPlan(every=1)) == plain
    do(tmp_path / "stops", CONFIG, CheckpointPlan(stop_after=1))
    for stop in (2, 3, 7):
        go_on(tmp_path / "stops", stop_after=stop)
    go_on(tmp_path / "stops", check=False)
    assert rows_of(tmp_path / "stops") == rows_of(tmp_path / "often")
    names = [path.name for path in checkpoints_in(tmp_path / "stops" / "checkpoints")]
    assert names == [f"step-{step:06d}" for step in (1, 2, 3, 7, 10)]
    resumed = read_rows(tmp_path / "stops" / "resumed.jsonl")
    assert [(row["step"], row["checked"]) for row in resumed] == [
        (1, True),
        (2, True),
        (3, True),
        (7, False),
    ]


@pytest.mark.parametrize("torn", [b"", b'{"step": 8, "loss": 5.', b"\xff\xfe\n{}\n"])
def test_rows_after_the_checkpoint_are_done_again(tmp_path: Path, torn: bytes) -> None:
    """A run that was killed leaves rows past its checkpoint, the last one torn."""
    do(tmp_path / "whole", CONFIG, CheckpointPlan(every=5))
    killed = shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    (killed / "result.json").unlink()
    shutil.rmtree(killed / "checkpoints" / "step-000010")
    (killed / "checkpoints" / ".step-000010.partial-1-00").mkdir()
    lines = (killed / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (killed / "metrics.jsonl").write_bytes(b"".join(lines[:7]) + torn)
    go_on(killed)
    assert rows_of(killed) == rows_of(tmp_path / "whole")
    last = "checkpoints/step-000010"
    assert files_of(killed / last) == files_of(tmp_path / "whole" / last)
    assert len(list((killed / "checkpoints").iterdir())) == 2
    seconds = [row["time"]["seconds"] for row in read_rows(killed / "metrics.jsonl")]
    assert seconds == sorted(seconds)


def command(*arguments: str) -> str:
    """The command line in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "fp8lab", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_across_processes_and_in_another_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text"
    shutil.copy(TEXT, text)
    sizes = ["--steps", "10", "--context", "8", "--width", "16", "--layers", "1", "--batch", "2"]
    train = ["train", "--recipe", "blockwise", "--text", str(text), *sizes, "--out"]
    assert main([*train, str(tmp_path / "whole"), "--checkpoint-every", "5"]) == 0
    capsys.readouterr()
    assert main([*train, str(tmp_path / "parts"), "--stop-after", "5"]) == 0
    shown = capsys.readouterr().out
    assert "stopped after step 5 of 10; go on with: fp8lab train --resume" in shown
    moved = tmp_path / "another place"
    shutil.move(tmp_path / "parts", moved)
    text.rename(tmp_path / "moved text")
    shown = command("train", "--resume", str(moved), "--text", str(tmp_path / "moved text"))
    assert "going on after step 5 of 10" in shown
    assert "validation loss" in shown
    assert rows_of(moved) == rows_of(tmp_path / "whole")
    assert main(["checkpoint", "diff", str(moved), str(tmp_path / "whole")]) == 0
    assert "the same bits" in capsys.readouterr().out


def test_the_last_and_the_best_of_a_run_are_kept(tmp_path: Path) -> None:
    config = replace(CONFIG, validate_every=2, peak_lr=0.1)
    plan = CheckpointPlan(every=1, stop_after=8, keep_last=1, keep_best=1)
    do(tmp_path / "run", config, plan)
    go_on(tmp_path / "run")
    root = tmp_path / "run" / "checkpoints"
    validated = {
        r["step"]: r["validation_loss"] for r in rows_of(tmp_path / "run") if "validation_loss" in r
    }
    best = min(validated, key=lambda step: validated[step])
    found = checkpoints_in(root)
    assert {read_manifest(path).step for path in found} == {best, 10}
    assert read_manifest(root / f"step-{best:06d}").metric == validated[best]


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """A run with checkpoints at steps 3 and 5, of 10."""
    do(tmp_path / "run", CONFIG, CheckpointPlan(every=3, stop_after=5))
    return tmp_path / "run"


def change_config(run: Path, **changes: Any) -> None:
    described = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(described | changes))


def cut_rows(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:4]))


def damage(run: Path) -> None:
    (run / "checkpoints" / "step-000005" / "optimizer.safetensors").write_bytes(b"")


def rename(run: Path) -> None:
    (run / "checkpoints" / "step-000003").rename(run / "checkpoints" / "step-000007")


def change_a_row(run: Path) -> None:
    rows = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join([rows[1], *rows[1:]]))


def use_other_text(run: Path) -> None:
    (run / "other").write_text("another text" * 50)
    change_config(
        run,
        corpus=json.loads((run / "config.json").read_text())["corpus"]
        | {"path": str(run / "other")},
    )


REFUSED: list[tuple[Callable[[Path], object], str]] = [
    (lambda run: (run / "config.json").unlink(), "holds no run"),
    (lambda run: (run / "config.json").write_text("[]"), "is damaged"),
    (lambda run: (run / "result.json").write_text("{}"), "is finished"),
    (lambda run: shutil.rmtree(run / "checkpoints"), "has no checkpoint to go on from"),
    (damage, r"optimizer.safetensors is damaged.*\(remove step-000005 to go on from step-000003\)"),
    (rename, r"step-000007 was renamed or copied over: what is inside is step-000003 \(remove"),
    (cut_rows, "has no whole rows up to step 5"),
    (change_a_row, "has no whole rows up to step 5, one a step; it was changed"),
    (lambda run: (run / "metrics.jsonl").unlink(), "cannot read rows"),
    (lambda run: change_config(run, seed=1), "saved with training.seed 0, but this run has 1"),
    (lambda run: change_config(run, batch=0), "batch is 0"),
    (lambda run: change_config(run, model={"x": 1}), "its model is none that there is"),
    (lambda run: change_config(run, betas=3), "config.json is damaged"),
    (
        lambda run: change_config(run, recipe=recipe_named("delayed:history=5").to_dict()),
        r"saved with recipe.name .*but this run has",
    ),
    (
        lambda run: change_config(run, corpus={"name": "x", "path": "/nowhere", "sha256": ""}),
        "no more at /nowhere; say where it is: --text FILE",
    ),
    (use_other_text, "is another text"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_what_does_not_belong_together_is_refused(
    stopped: Path, change: Callable[[Path], object], message: str
) -> None:
    change(stopped)
    before = sorted(stopped.rglob("*"))
    with pytest.raises(UserError, match=message) as error:
        go_on(stopped)
    assert "\n" not in str(error.value)
    kept = [path for path in sorted(stopped.rglob("*")) if path.name != ".lock"]
    assert kept == [path for path in before if path.name != ".lock"]


def test_a_run_without_scales_is_refused(stopped: Path) -> None:
    """What a stack that keeps no scale metadata would have written: it is named, and refused."""
    newest = stopped / "checkpoints" / "step-000005"
    found = load(newest)
    state = dict(found.state)
    state["model"] = {n: v for n, v in state["model"].items() if not n.endswith("amax_history")}
    shutil.rmtree(newest)
    save(newest, state, step=5, fingerprint=found.manifest.fingerprint)
    with pytest.raises(CheckpointError, match="amax history") as error:
        go_on(stopped)
    assert "casts.grad_output.amax_history (amax history): missing (and 5 more)" in str(error.value)


def test_only_one_process_works_on_a_run(stopped: Path) -> None:
    with (stopped / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another process works on the run"):
            go_on(stopped)
    go_on(stopped)


def test_a_run_that_began_meanwhile_is_not_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes found the folder empty; the other one has begun, and even ended, first."""
    run = tmp_path / "run"

    def other_was_here(folder: Path, what: str, advice: str) -> AbstractContextManager[None]:
        (folder / "config.json").write_text("another's")
        return nullcontext()

    monkeypatch.setattr(resume, "held", other_was_here)
    with pytest.raises(UserError, match="exists and is not empty; choose another --out"):
        do(run, CONFIG, CheckpointPlan())
    assert (run / "config.json").read_text() == "another's"


@pytest.mark.parametrize("stop", [3, 5, 11])
def test_a_stop_that_cannot_be(stopped: Path, stop: int) -> None:
    with pytest.raises(UserError, match=rf"stop_after is {stop}; accepted: 6 to 10"):
        go_on(stopped, stop_after=stop)
    with pytest.raises(UserError, match="stop_after is 11; accepted: 1 to 10"):
        do(stopped.parent / "new", CONFIG, CheckpointPlan(stop_after=11))
    assert not (stopped.parent / "new").exists()
    for name in ("every", "stop_after", "keep_last"):
        with pytest.raises(UserError, match=f"{name} is 0; accepted: a whole number, 1 and up"):
            replace(CheckpointPlan(), **{name: 0})  # type: ignore[arg-type]


def other_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not gelu's own approximation: of small values it gives the same amax.
    monkeypatch.setattr(functional, "gelu", functional.silu)


def other_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    real = TrainingRun.__init__

    def changed(self: TrainingRun, *arguments: Any) -> None:
        real(self, *arguments)
        scaler = self.update.scaler
        self.update = UpdateStep(self.model, self.optimizer, scaler=scaler, clip_norm=0.5)

    monkeypatch.setattr(TrainingRun, "__init__", changed)


def other_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    real = OperandCast.cast

    def changed(self: OperandCast, x: torch.Tensor, **options: Any) -> Any:
        return real(self, x * (1.5 if self.operand.format == "E5M2" else 1), **options)

    monkeypatch.setattr(OperandCast, "cast", changed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_forward, r"the amax of hidden.1.input"),
        (other_gradient, r"the gradient norm|the amax of .*grad_output"),
        (other_clip, r"the updated parameter"),
    ],
)
def test_the_resume_check_finds_what_the_state_does_not_hold(
    stopped: Path,
    change: Callable[[pytest.MonkeyPatch], None],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another activation, another gradient, another clip norm: each is named where it shows."""
    change(monkeypatch)
    rows = (stopped / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match=message) as error:
        go_on(stopped)
    assert "the resume check failed: a step on the fixed batch gives" in str(error.value)
    assert "versions, processor and device are the same" in str(error.value)
    assert (stopped / "metrics.jsonl").read_bytes() == rows
    go_on(stopped, check=False)  # and who knows better may go on
    assert len(rows_of(stopped)) == 10


def test_the_resume_check_says_which_versions_differ(
    stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other_clip(monkeypatch)
    real = resume_check.comparable
    monkeypatch.setattr("fp8lab.resume.comparable", lambda found: real(found) | {"torch": "9.0"})
    with pytest.raises(CheckpointError, match=re.escape(f"torch was {torch.__version__}, is 9.0")):
        go_on(stopped)


def test_a_full_disk_stops_a_run_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = os.rename

    def full(self: Path, target: Path) -> Path:
        if target.name == "step-000006":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(self, target)
        return target

    monkeypatch.setattr(Path, "rename", full)
    run = tmp_path / "run"
    sizes = ["--steps", "9", "--context", "8", "--width", "16", "--layers", "1", "--batch", "2"]
    train = ["train", "--text", str(TEXT), *sizes, "--checkpoint-every", "3", "--out", str(run)]
    assert main(train) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "step-000006" in error
    assert "No space left on device; earlier checkpoints are untouched" in error
    monkeypatch.undo()
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000003"]
    assert main(["train", "--resume", str(run)]) == 0
    assert [row["step"] for row in rows_of(run)] == list(range(1, 10))


def test_a_loss_that_is_not_finite_ends_a_run_without_a_checkpoint_of_it(tmp_path: Path) -> None:
    config = replace(CONFIG, peak_lr=1e30, warmup=0, weight_decay=0.0)
    rows = do(tmp_path / "run", config, CheckpointPlan(every=1))
    assert len(rows) < 10
    assert checkpoints_in(tmp_path / "run" / "checkpoints")[-1].name != f"step-{len(rows):06d}"
    assert json.loads((tmp_path / "run" / "result.json").read_text())["diverged"]


def test_a_configuration_comes_back_from_its_record() -> None:
    for config in (CONFIG, *(replace(CONFIG, **changes) for changes in OTHERS)):
        assert config_from_dict(json.loads(json.dumps(config.to_dict())), "here") == config
    described = CONFIG.to_dict()
    del described["clip_norm"]
    with pytest.raises(UserError, match="lacks clip_norm"):
        config_from_dict(described, "here")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--resume", "nowhere"], "nowhere holds no run"),
        (["--resume", "nowhere", "--seed", "3"], "leave out --seed"),
        (["--resume", "nowhere", "--loss-scale", "dynamic"], "leave out --loss-scale"),
        (["--resume", "nowhere", "--steps", "160"], "leave out --steps"),  # the default
        (["--resume", "nowhere", "--recipe=delayed"], "leave out --recipe"),
        (["--resume", "nowhere", "--out", "runs/train"], "leave out --out"),
        (["--checkpoint-every", "0"], "every is 0; accepted: a whole number, 1 and up"),
        (["--stop-after", "200"], "stop_after is 200; accepted: 1 to 160"),
    ],
)
def test_mistakes_on_the_command_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    text = [] if "--resume" in arguments else ["--text", str(TEXT)]
    assert main(["train", *arguments, *text]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_resumes_exactly_on_the_card(preset: str, tmp_path: Path, device: str) -> None:
    model = TransformerConfig(context=16, width=64, layers=1, heads=2)
    config = replace(
        CONFIG, recipe=recipe_named(preset), device=device, products="codes", model=model, batch=8
    )
    assert_resumes_exactly(config, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("moment", MOMENT_FORMATS)
def test_every_format_of_moments_resumes_exactly_on_the_card(
    moment: str, tmp_path: Path, device: str
) -> None:
    config = replace(CONFIG, device=device, exp_avg=moment, exp_avg_sq=moment)
    assert_resumes_exactly(config, tmp_path)
