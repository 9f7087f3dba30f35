"""Train in a folder, with checkpoints, and go on from the newest one as if nothing had happened.

    RUN/
      config.json, environment.json, metrics.jsonl, result.json    see fp8lab.records
      checkpoints/step-000005/                                     see fp8lab.checkpoint
      resumed.jsonl          a row for each time that it was resumed: step, environment
      .lock                  held by the process that works on the run

Rows and the final state of a run that was stopped, or killed, and resumed are those of one that was
not, bit for bit, on the same kind of machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from fp8lab.checkpoint import Checkpoint, CheckpointError, load, read_manifest
from fp8lab.checkpoint_manifest import first_difference
from fp8lab.checkpoint_store import checkpoint_name, checkpoints_in
from fp8lab.data import Corpus
from fp8lab.errors import UserError
from fp8lab.folder_lock import LOCK, held
from fp8lab.records import RunRecorder, environment, read_table, to_json
from fp8lab.resume_check import comparable, compare_trials, trial
from fp8lab.resume_config import config_from_dict, corpus_again, fingerprint_of
from fp8lab.resume_folder import CheckpointPlan, FolderRun, state_of
from fp8lab.state_random import seed_globals
from fp8lab.training import TrainingRun
from fp8lab.training_config import TrainingConfig

__all__ = ["CheckpointPlan", "FolderRun", "resume_run", "start_run", "state_of"]

_KEPT = ("every", "keep_last", "keep_best")  # of a plan: what a run keeps for when it is resumed


def start_run(
    folder: Path,
    config: TrainingConfig,
    corpus: Corpus,
    plan: CheckpointPlan,
    *,
    text: Path | None = None,
) -> FolderRun:
    """Begin a run in a folder.

    Args:
        folder: Its folder; must be empty or not there.
        config: What it is.
        corpus, text: What it trains on; and the file that this was read from, if not the plays.
        plan: When it saves.

    Raises:
        UserError: The folder holds something, the settings do not fit, see `TrainingRun`, or the
            plan keeps what is never written.
    """
    _check_stop(plan, config.steps, done=0)
    _check_best(plan, config, [], done=0)
    if plan.keep_last is not None and not plan.saves:
        raise UserError(
            f"keep_last is {plan.keep_last}, but no checkpoint is written; give --checkpoint-every,"
            " too"
        )
    _check_empty(folder)
    seed_globals(config.seed)  # they are part of the state: two equal runs have equal states
    run = TrainingRun(config, corpus)
    described = {**config.to_dict(), "corpus": {"name": corpus.name, "sha256": corpus.sha256}}
    if text is not None:
        described["corpus"]["path"] = str(text.resolve())
    if plan.saves:
        described["checkpoints"] = {name: getattr(plan, name) for name in _KEPT}
    with ExitStack() as resources:
        folder.mkdir(parents=True, exist_ok=True)
        resources.enter_context(held(folder, "works on the run", "wait for it"))
        _check_empty(folder)  # another process may have been here meanwhile
        recorder = resources.enter_context(RunRecorder(folder, described, config.device))
        here = read_table(folder / "environment.json")
        return FolderRun(folder, run, corpus, plan, recorder, [], here, resources.pop_all())


def resume_run(folder: Path, plan: CheckpointPlan, *, text: Path | None = None) -> FolderRun:
    """Go on with a run from its newest checkpoint.

    Args:
        folder: The run's folder; may have been moved.
        plan: When it saves; what is None is as the run was started with.
        text: Where its text lies now, if not where it was.

    Raises:
        UserError: No such run, or it is finished, or at work in another process.
        CheckpointError: The checkpoint is damaged, of other settings, or the resume check failed.
    """
    source = folder / "config.json"
    if not source.is_file():
        raise UserError(f"{folder} holds no run (no config.json is in it); name a run's folder")
    described = read_table(source)
    config = config_from_dict(described, str(source))
    if (folder / "result.json").exists():
        raise UserError(f"the run in {folder} is finished (it has a result.json)")
    plan = _as_started(plan, described.get("checkpoints", {}), source)
    corpus = corpus_again(described.get("corpus", {}), text, str(source))
    with ExitStack() as resources:
        resources.enter_context(held(folder, "works on the run", "wait for it"))
        checkpoint = _newest(folder, fingerprint_of(config, corpus))
        step = checkpoint.manifest.step
        _check_stop(plan, config.steps, done=step)
        _check_best(plan, config, checkpoints_in(folder / "checkpoints"), done=step)
        run = TrainingRun(config, corpus)
        saved = dict(checkpoint.state)
        unchecked = "check" not in saved
        record = saved.pop("check", None)
        state = state_of(run)
        if first_difference(saved.get("progress"), {"step": step}) is not None:
            raise CheckpointError(
                f"{checkpoint.folder} is damaged: the manifest says step {step}, the state does not"
            )
        state.restore(saved)
        here = environment(config.device)
        checked = plan.check and not unchecked
        if checked:
            now = {**trial(run, state, saved), "environment": comparable(here)}
            place, recorded = str(checkpoint.folder), checkpoint.manifest.version > 1
            compare_trials(record, now, source=place, buffers=recorded)
        recorder, past = RunRecorder.reopen(folder, step)
        resources.enter_context(recorder)
        with (folder / "resumed.jsonl").open("a", encoding="utf-8") as file:
            file.write(to_json({"step": step, "checked": checked, "environment": here}) + "\n")
        kept = resources.pop_all()
        return FolderRun(folder, run, corpus, plan, recorder, past, here, kept, checked=checked)


def _check_empty(folder: Path) -> None:
    if folder.exists() and (
        not folder.is_dir() or any(path.name != LOCK for path in folder.iterdir())
    ):
        raise UserError(f"{folder} exists and is not empty; choose another --out")


def _as_started(plan: CheckpointPlan, before: Any, source: Path) -> CheckpointPlan:
    """A plan with what was not given taken from the one that the run was started with."""
    if not isinstance(before, dict):
        raise UserError(f"{source} is damaged: checkpoints is no table")
    try:
        kept: dict[str, Any] = {name: before.get(name) for name in _KEPT}
        started = CheckpointPlan(**kept)
    except UserError as error:
        raise UserError(f"{source} is damaged: of checkpoints, {error}") from None
    missing = [name for name in _KEPT if getattr(plan, name) is None]
    return replace(plan, **{name: getattr(started, name) for name in missing})


def _check_best(
    plan: CheckpointPlan, config: TrainingConfig, there: Sequence[Path], *, done: int
) -> None:
    """Refuse a plan that cannot keep as many of the best as it says.

    Args:
        plan, config: Of the run.
        there: Its checkpoints so far.
        done: Its steps so far.
    """
    if not plan.keep_best:
        return
    if plan.keep_last is None:
        raise UserError(
            f"keep_best is {plan.keep_best} without keep_last, so every checkpoint stays; give"
            " --keep-last, too"
        )
    # Of the run to its end: what stops on the way goes on with the same plan.
    steps, often = config.steps, config.validate_every
    count, measured = len(there) + 1, sum(map(_has_metric, there)) + 1  # and that of the last step
    if plan.every is not None:
        both = math.lcm(plan.every, often)
        count += (steps - 1) // plan.every - done // plan.every
        measured += (steps - 1) // both - done // both
    stop = plan.stop_after
    if stop is not None and stop < steps and (plan.every is None or stop % plan.every):
        count, measured = count + 1, measured + (stop % often == 0)
    if measured < min(plan.keep_best, count):
        raise UserError(
            f"keep_best is {plan.keep_best}, but {measured} of {count} checkpoints are at steps"
            f" that validate (each {often}th, and the last): let {often} divide"
            " --checkpoint-every, or give a smaller --keep-best"
        )


def _has_metric(folder: Path) -> bool:
    try:
        return read_manifest(folder).metric is not None
    except CheckpointError:
        return False


def _newest(folder: Path, fingerprint: Mapping[str, Any]) -> Checkpoint:
    """The newest checkpoint of a run. A damaged one is refused, never passed over in silence."""
    found = checkpoints_in(folder / "checkpoints")
    if not found:
        raise CheckpointError(
            f"the run in {folder} has no checkpoint to go on from; start again with another --out"
        )
    try:
        checkpoint = load(found[-1], fingerprint=fingerprint)
        # Renamed or copied over, an older one would pass for the newest.
        if found[-1].name != (name := checkpoint_name(checkpoint.manifest.step)):
            raise CheckpointError(
                f"{found[-1]} was renamed or copied over: what is inside is {name}"
            )
        return checkpoint
    except CheckpointError as error:
        for place in range(len(found) - 2, -1, -1):
            if _would_load(found[place], fingerprint):
                names = ", ".join(path.name for path in found[place + 1 :])
                raise CheckpointError(
                    f"{error} (remove {names} to go on from {found[place].name})"
                ) from None
        raise


def _would_load(folder: Path, fingerprint: Mapping[str, Any]) -> bool:
    """Whether a run could go on from a checkpoint: nobody is told to remove one in vain."""
    try:
        step = load(folder, fingerprint=fingerprint).manifest.step
    except CheckpointError:
        return False
    return folder.name == checkpoint_name(step)


def _check_stop(plan: CheckpointPlan, steps: int, *, done: int) -> None:
    if plan.stop_after is not None and not done < plan.stop_after <= steps:
        raise UserError(
            f"stop_after is {plan.stop_after}; accepted: {done + 1} to {steps} (the run has {steps}"
            f" steps, {done} are done)"
        )
