"""The checkpoints of one run: which there are, which are kept, and writing without waiting."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from fp8lab.checkpoint import (
    CheckpointError,
    State,
    read_manifest,
    take_state,
    write,
)
from fp8lab.checkpoint_files import remove_folder, remove_leftovers
from fp8lab.checkpoint_tree import Taken

_NAME = re.compile(r"step-(\d{6,})")


def checkpoint_name(step: int) -> str:
    """What a checkpoint's folder is called: step-000005."""
    return f"step-{step:06d}"


def checkpoints_in(root: Path) -> list[Path]:
    """The checkpoints in a folder, by their steps.

    A name that stands there is a whole checkpoint; whether it was changed since, `verify` says.
    """
    if not root.is_dir():
        return []
    found = [(int(match[1]), path) for path in root.iterdir() if (match := _named(path))]
    return [path for _, path in sorted(found)]


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that a path means: itself, or the newest of a run or of its `checkpoints`.

    Raises:
        CheckpointError: There is none.
    """
    if (path / "manifest.json").exists() or _named(path):
        return path
    for root in (path / "checkpoints", path):
        if found := checkpoints_in(root):
            return found[-1]
    raise CheckpointError(
        f"no checkpoint in {path}; name a checkpoint's folder (step-...), or a run's"
    )


@dataclass(frozen=True)
class CheckpointStore:
    """Where a run's checkpoints lie, and how many stay.

    One process at a time may save into it; the newest checkpoint is never removed.

    Attributes:
        root: Their folder.
        keep_last: How many of the newest stay; None for all.
        keep_best: How many of those with the lowest metric stay besides.
    """

    root: Path
    keep_last: int | None = None
    keep_best: int = 0

    def __post_init__(self) -> None:
        if self.keep_last is not None and self.keep_last < 1:
            raise ValueError(f"keep_last is {self.keep_last}; accepted: 1 and up, or None")
        if self.keep_best < 0:
            raise ValueError(f"keep_best is {self.keep_best}; accepted: 0 and up")

    def save(
        self,
        state: State,
        *,
        step: int,
        fingerprint: Mapping[str, Any] | None = None,
        metric: float | None = None,
    ) -> Path:
        """Write `step-...`, wait for it, then remove what is not kept; see `checkpoint.save`."""
        return self.write(take_state(state), step=step, fingerprint=fingerprint, metric=metric)

    def write(
        self,
        taken: Mapping[str, Taken],
        *,
        step: int,
        fingerprint: Mapping[str, Any] | None = None,
        metric: float | None = None,
    ) -> Path:
        """What `save` does, with parts that were taken before."""
        folder = self.root / checkpoint_name(step)
        write(folder, taken, step=step, fingerprint=fingerprint, metric=metric)
        self.prune()
        return folder

    def prune(self) -> None:
        """Remove what is neither among the last nor among the best, and what killed saves left.

        Raises:
            CheckpointError: The system refuses.
        """
        self._remove(self._not_kept())

    def _remove(self, folders: list[Path]) -> None:
        try:
            remove_leftovers(self.root)
            for folder in folders:
                remove_folder(folder)
        except OSError as error:
            raise CheckpointError(
                f"cannot remove an old checkpoint in {self.root} ({error.filename}):"
                f" {error.strerror or error}; the new one is whole: remove what is in the way, or"
                " keep all"
            ) from error

    def _not_kept(self) -> list[Path]:
        there = checkpoints_in(self.root)
        if self.keep_last is None:
            return []
        rest = there[: -self.keep_last]
        measured = [(_metric(folder), folder) for folder in there] if self.keep_best else []
        best = sorted(pair for pair in measured if math.isfinite(pair[0]))[: self.keep_best]
        kept = {folder for _, folder in best}
        return [folder for folder in rest if folder not in kept]


class AsyncWriter:
    """Saves into a store while training goes on: the copy to host memory is all that is waited for.

    One save is under way at a time; the next one waits for it. Its error is raised by the next
    `save`, or by `close`, so it is never lost.

        with AsyncWriter(store) as writer:
            writer.save(state, step=100)
    """

    def __init__(self, store: CheckpointStore) -> None:
        self.store = store
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(
        self,
        state: State,
        *,
        step: int,
        fingerprint: Mapping[str, Any] | None = None,
        metric: float | None = None,
    ) -> None:
        """Copy the state to host memory and return; a thread writes it. As `checkpoint.save`.

        Raises:
            CheckpointError: What the save before this one raised; this one is not begun then.
        """
        self.write(take_state(state), step=step, fingerprint=fingerprint, metric=metric)

    def write(
        self,
        taken: Mapping[str, Taken],
        *,
        step: int,
        fingerprint: Mapping[str, Any] | None = None,
        metric: float | None = None,
    ) -> None:
        """What `save` does, with parts that were taken before and that nobody changes."""
        self.wait()

        def work() -> None:
            try:
                self.store.write(taken, step=step, fingerprint=fingerprint, metric=metric)
            except BaseException as error:  # raised again where the caller sees it
                self._error = error

        # Not a daemon: an interpreter that ends waits for the file.
        self._thread = threading.Thread(target=work, name=f"checkpoint {step}")
        self._thread.start()

    def wait(self) -> None:
        """Until the save under way is on the disk; raise what it raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    close = wait

    def __enter__(self) -> AsyncWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except Exception as own:
            if error is None:
                raise
            error.add_note(f"the last checkpoint was not written, too: {own}")


def _named(path: Path) -> re.Match[str] | None:
    return _NAME.fullmatch(path.name) if path.is_dir() else None


def _metric(folder: Path) -> float:
    """A checkpoint's metric; NaN, which is never best, where it has none or is damaged.

    A damaged one is for its owner to find, not for a clean-up to stop at.
    """
    try:
        metric = read_manifest(folder).metric
    except CheckpointError:
        return math.nan
    return math.nan if metric is None else metric
