"""Which checkpoints stay, and what a damaged config.json says of it: kept as told, or refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8lab.checkpoint_store import checkpoints_in
from fp8lab.cli import main
from fp8lab.errors import UserError
from fp8lab.resume import CheckpointPlan
from tests.test_resume import CONFIG, change_config, do, go_on, rows_of

STEPS = CONFIG.steps  # 10, of which 4, 8 and the last one validate


def steps_in(run: Path) -> list[int]:
    return [int(path.name[-6:]) for path in checkpoints_in(run / "checkpoints")]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"keep_best": 1}, "keep_best is 1 without keep_last, so every checkpoint stays"),
        ({"keep_best": 1, "every": 2}, "keep_best is 1 without keep_last"),
        ({"keep_last": 1}, "keep_last is 1, but no checkpoint is written; give --checkpoint-every"),
        ({"keep_last": 1, "keep_best": 1}, "no checkpoint is written; give --checkpoint-every"),
        # Steps 3, 6, 9 and 10; steps 5 and 10.
        ({"every": 3, "keep_last": 1, "keep_best": 2}, "1 of 4 checkpoints are at steps that val"),
        ({"stop_after": 5, "keep_last": 1, "keep_best": 2}, "1 of 2 checkpoints are at steps"),
        ({"keep_last": 1.5, "every": 1}, "keep_last is 1.5; accepted: a whole number, 1 and up"),
        ({"keep_best": True}, "keep_best is True; accepted: a whole number, 0 and up"),
    ],
)
def test_a_plan_that_keeps_not_what_it_says_is_refused(
    plan: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=re.escape(message)) as error:
        do(tmp_path / "run", CONFIG, CheckpointPlan(**plan))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "plan",
    [
        {"every": 2, "keep_last": 1, "keep_best": 2},
        {"every": 2, "keep_last": 1, "keep_best": 3},
        {"every": 3, "keep_last": 1, "keep_best": 1},
        {"every": 2, "stop_after": 5, "keep_last": 1, "keep_best": 2},  # goes on with the same plan
        {"stop_after": 4, "keep_last": 1, "keep_best": 2},
        {"every": 10, "keep_last": 1, "keep_best": 2},  # there is one in all
    ],
)
def test_a_plan_that_is_accepted_keeps_what_it_says(plan: dict[str, Any], tmp_path: Path) -> None:
    run = tmp_path / "run"
    do(run, CONFIG, CheckpointPlan(**plan))
    if "stop_after" in plan:
        go_on(run)
    every, stop = plan.get("every", STEPS), plan.get("stop_after", STEPS)
    saved = {step for step in range(1, STEPS + 1) if step % every == 0} | {stop, STEPS}
    losses = {
        row["step"]: row["validation_loss"]
        for row in rows_of(run)
        if "validation_loss" in row and row["step"] in saved
    }
    best = sorted(losses, key=lambda step: losses[step])[: plan["keep_best"]]
    assert len(best) == min(plan["keep_best"], len(saved))
    assert steps_in(run) == sorted({*best, STEPS})


def test_a_resumed_plan_is_held_to_the_same(tmp_path: Path) -> None:
    run = tmp_path / "run"
    do(run, CONFIG, CheckpointPlan(every=3, stop_after=5))
    with pytest.raises(UserError, match="keep_best is 1 without keep_last"):
        go_on(run, keep_best=1)
    with pytest.raises(UserError, match="keep_best is 2, but 1 of 5 checkpoints are at steps"):
        go_on(run, keep_last=1, keep_best=2)
    assert steps_in(run) == [3, 5]
    go_on(run, keep_last=2, keep_best=1)
    assert steps_in(run) == [9, 10]


def test_none_is_as_started_and_0_is_none(tmp_path: Path) -> None:
    for given, kept in (({}, [4, 8, 10]), ({"keep_best": 0}, [10])):
        run = tmp_path / str(len(kept))
        do(run, CONFIG, CheckpointPlan(every=2, stop_after=5, keep_last=1, keep_best=3))
        go_on(run, **given)
        assert steps_in(run) == kept


def _change_plan(**changes: Any) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        plan = json.loads((run / "config.json").read_text())["checkpoints"]
        change_config(run, checkpoints=plan | changes)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_change_plan(keep_last="x"), "config.json is damaged: of checkpoints, keep_last is 'x'"),
        (_change_plan(keep_last=1.5), "of checkpoints, keep_last is 1.5; accepted: a whole number"),
        (_change_plan(keep_last=0), "of checkpoints, keep_last is 0; accepted: a whole number, 1"),
        (_change_plan(keep_best=[]), "of checkpoints, keep_best is []; accepted"),
        (_change_plan(every={}), "of checkpoints, every is {}; accepted"),
        (lambda run: change_config(run, checkpoints="x"), "damaged: checkpoints is no table"),
        (lambda run: change_config(run, checkpoints=None), "damaged: checkpoints is no table"),
        (lambda run: change_config(run, corpus=[]), "damaged: corpus is no table"),
        (lambda run: change_config(run, corpus={"path": 5}), "or its path no text"),
    ],
)
def test_a_damaged_plan_is_refused_in_one_line(
    change: Callable[[Path], None],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    do(run, CONFIG, CheckpointPlan(every=3, stop_after=5))
    change(run)
    assert main(["train", "--resume", str(run)]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_no_limit_at_all_is_none(tmp_path: Path) -> None:
    """What a run writes that was given none, and what an older version wrote."""
    run = tmp_path / "run"
    do(run, CONFIG, CheckpointPlan(every=3, stop_after=5))
    _change_plan(keep_best=None, keep_last=None)(run)
    go_on(run)
    assert steps_in(run) == [3, 5, 6, 9, 10]


def test_a_checkpoint_is_given_up_only_for_one_that_would_load(tmp_path: Path) -> None:
    run = tmp_path / "run"
    do(run, CONFIG, CheckpointPlan(every=2, stop_after=6))
    newest, middle = (run / "checkpoints" / f"step-{step:06d}" for step in (6, 4))
    model = json.loads((run / "config.json").read_text())["model"]
    change_config(run, model=model | {"width": 16})
    with pytest.raises(UserError, match=r"saved with model.width 8, but this run has 16") as error:
        go_on(run)
    assert "remove" not in str(error.value)
    change_config(run, model=model)
    for folder in (newest, middle):
        (folder / "optimizer.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"\(remove step-000004, step-000006 to go on from step-00"):
        go_on(run)
    (run / "checkpoints" / "step-000002" / "state.json").write_bytes(b"")
    with pytest.raises(UserError, match=r"step-000006.*is damaged") as error:
        go_on(run)
    assert "remove" not in str(error.value)
