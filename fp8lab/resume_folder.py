"""A run that lives in a folder: its steps, its rows, and when it saves."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from fp8lab.checkpoint import take_state
from fp8lab.checkpoint_store import AsyncWriter, CheckpointStore
from fp8lab.checkpoint_tree import rebuild, take
from fp8lab.data import Corpus
from fp8lab.errors import UserError
from fp8lab.records import Row, RunRecorder
from fp8lab.resume_check import comparable, trial
from fp8lab.resume_config import StepCount, fingerprint_of
from fp8lab.state import Stateful, TrainingState
from fp8lab.training import TrainingRun, ends, summary_of


@dataclass(frozen=True)
class CheckpointPlan:
    """When checkpoints are written, and how many stay. No setting changes a run's rows.

    Attributes:
        every: Steps between checkpoints; None for none on the way.
        stop_after: The step after which the run stops, with a checkpoint; None for its last.
        keep_last, keep_best: As in `CheckpointStore`; best is the lowest validation loss, so that
            only checkpoints of validated steps count. None for all, and for none, or, where a run
            is resumed, as it was started.
        check: Whether a checkpoint records the resume check's step, and a resumed run takes it.
    """

    every: int | None = None
    stop_after: int | None = None
    keep_last: int | None = None
    keep_best: int | None = None
    check: bool = True

    def __post_init__(self) -> None:
        for name, smallest in (("every", 1), ("stop_after", 1), ("keep_last", 1), ("keep_best", 0)):
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < smallest:
                raise UserError(f"{name} is {value!r}; accepted: a whole number, {smallest} and up")

    @property
    def saves(self) -> bool:
        """Whether a run that is started with it has checkpoints; one that is resumed always has."""
        return self.every is not None or self.stop_after is not None


class FolderRun:
    """A run that lives in a folder: started with `start_run` or gone on with by `resume_run`.

        with start_run(folder, config, corpus, plan) as run:
            for row in run.rows():
                ...

    Attributes:
        folder: Its folder.
        run: Its live objects.
        plan: When it saves.
        past: Rows of the steps that are done.
        checked: Whether it was resumed, and the resume check made.
    """

    def __init__(
        self,
        folder: Path,
        run: TrainingRun,
        corpus: Corpus,
        plan: CheckpointPlan,
        recorder: RunRecorder,
        past: list[Row],
        environment: Mapping[str, Any],
        resources: ExitStack,
        *,
        checked: bool = False,
    ) -> None:
        self.folder, self.run, self.plan, self.past = folder, run, plan, past
        self.checked = checked
        self._recorder, self._resources = recorder, resources
        self._resumed = bool(past)
        self._state = state_of(run)
        self._fingerprint = fingerprint_of(run.config, corpus)
        self._environment = comparable(environment)

    def __enter__(self) -> FolderRun:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._resources.close()

    @property
    def end(self) -> int:
        """The step after which `rows` ends."""
        steps = self.run.config.steps
        return steps if self.plan.stop_after is None else min(self.plan.stop_after, steps)

    @property
    def is_finished(self) -> bool:
        """Whether all steps are done, or the last loss was not finite."""
        diverged = bool(self.past) and ends(self.past[-1], self.run.config)
        return diverged or self.run.step == self.run.config.steps

    def rows(self) -> Generator[Row, None, None]:
        """Do the steps that are left, recording and yielding each row.

        A loss that is not finite ends the run with that row. When the run has ended, and was not
        merely stopped, its folder has a result.json.

        Raises:
            CheckpointError: A checkpoint could not be written; the rows are there.
        """
        store = CheckpointStore(
            self.folder / "checkpoints", self.plan.keep_last, self.plan.keep_best or 0
        )
        with AsyncWriter(store) as writer:
            while self.run.step < self.end and not self.is_finished:
                row = self.run.advance()
                self._recorder.add(row)
                self.past.append(row)
                if self._is_due() and not ends(row, self.run.config):
                    self._save(writer)
                yield row
        if self.is_finished:
            self._recorder.finish(summary_of(self.past))

    def _is_due(self) -> bool:
        step, every = self.run.step, self.plan.every
        if not (self.plan.saves or self._resumed):
            return False
        return step == self.end or (every is not None and step % every == 0)

    def _save(self, writer: AsyncWriter) -> None:
        taken = take_state(self._state.capture())
        if self.plan.check:
            before = {part: rebuild(own.json, own.tensors) for part, own in taken.items()}
            record = trial(self.run, self._state, before)
            taken["check"] = take({**record, "environment": self._environment})
        self._recorder.sync()  # a checkpoint's rows must not reach the disk after it
        metric = self.past[-1].get("validation_loss", math.nan)
        writer.write(
            taken,
            step=self.run.step,
            fingerprint=self._fingerprint,
            metric=metric if math.isfinite(metric) else None,
        )


def state_of(run: TrainingRun) -> TrainingState:
    """All of a run's state. The learning rate follows from the step."""
    others: dict[str, Stateful] = {"progress": StepCount(run)}
    if run.fallback is not None:
        others["fallback"] = run.fallback
    if run.config.telemetry:
        others["telemetry"] = run.telemetry
    return TrainingState(
        run.model,
        run.optimizer,
        scaler=run.update.scaler,
        generators={"batches": run.rng},
        others=others,
    )
