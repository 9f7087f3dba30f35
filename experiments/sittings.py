"""Work that several sittings share: finished rows stay in a file, and only what is missing is done.

A file of rows begins with a head that says what the experiment is; each other row is a finished
piece of work, appended and synced as it ends. So a sitting may be killed at any moment, and the
next one goes on. `in_turn` does pieces of work in spawned processes, until a sitting's time is up.
"""

from __future__ import annotations

import fcntl
import gc
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from fp8lab.errors import UserError
from fp8lab.records import Row, to_json, write_atomically

Task = TypeVar("Task")
Result = TypeVar("Result")

_LOOK_AGAIN = 0.2  # seconds after which it is seen that a task has become ready


class Sitting:
    """The rows of an experiment, open for one process.

        with Sitting(path, head) as sitting:
            for ...:
                sitting.add(row)

    Attributes:
        path: The file.
        head: Its first row.
        rows: The finished rows: those that were there, then those of this sitting.

    Raises:
        UserError: The file holds other settings or rows of another machine, is damaged, or another
            process works on it.
    """

    def __init__(self, path: Path, head: Row) -> None:
        """Open the file, or begin it.

        Args:
            path: A .jsonl; its folder is made.
            head: What the experiment is. An equal head must stand in a file that is there; of
                `environment` only device and packages count.
        """
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise UserError(f"another process works on {path}; wait for it") from None
        try:
            found = self._whole_rows()
            if not found:
                self._write(head)
                found = [json.loads(to_json(head))]
            _check_head(found[0], json.loads(to_json(head)), path)
        except UserError:
            self._file.close()
            raise
        self.head, self.rows = found[0], found[1:]

    def __enter__(self) -> Sitting:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def add(self, row: Row) -> None:
        """Append a row and wait until it is on the disk."""
        self._write(row)
        self.rows.append(row)

    def sort(self, key: Callable[[Row], Any]) -> None:
        """Put the rows in an order that does not depend on which ended first."""
        self.rows.sort(key=key)
        write_atomically(self.path, "".join(to_json(row) + "\n" for row in (self.head, *self.rows)))

    def _write(self, row: Row) -> None:
        self._file.write(to_json(row) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def _whole_rows(self) -> list[Row]:
        """The rows that are there; a last line that a kill cut short is cut off."""
        self._file.seek(0)
        text = self._file.read()
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            os.truncate(self.path, len(whole.encode()))
        try:
            return [json.loads(line) for line in whole.splitlines()]
        except ValueError:
            raise UserError(
                f"{self.path} is damaged: a line is not JSON; remove the file"
            ) from None


def _check_head(found: Any, wanted: Row, path: Path) -> None:
    """Refuse to go on with rows that were made otherwise."""
    if not isinstance(found, dict):
        raise UserError(f"{path} is damaged: its first line does not say what it holds")

    def comparable(head: Row) -> Row:
        here = head.get("environment", {})
        own = {key: value for key, value in head.items() if key != "environment"}
        return own | {key: here.get(key) for key in ("device", "packages")}

    was, now = comparable(found), comparable(wanted)
    differs = [key for key in now | was if was.get(key) != now.get(key)]
    if differs:
        key = differs[0]
        raise UserError(
            f"{path} holds rows of another {key}: {to_json(was.get(key))}, now"
            f" {to_json(now.get(key))}; choose another --out, or remove the file"
        )


def check_jobs(jobs: int, seconds: float | None) -> None:
    """Refuse what `in_turn` cannot do.

    Raises:
        UserError: With what is accepted.
    """
    if jobs < 1:
        raise UserError(f"--jobs is {jobs}; accepted: 1 and up")
    if seconds is not None and not seconds > 0:
        raise UserError(f"--seconds is {seconds}; accepted: more than 0")


def in_turn(
    tasks: Sequence[Task],
    work: Callable[[Task], Result],
    *,
    jobs: int = 1,
    seconds: float | None = None,
    gpus: int = 0,
    ready: Callable[[Task], bool] = lambda _: True,
) -> Iterator[tuple[Task, Result]]:
    """Do tasks in their order, several at a time, and yield each with its result as it ends.

    Args:
        tasks: What to do.
        work: Does one; for more than one job it must be importable in a spawned process, and dies
            with this one.
        jobs: Processes at a time; with 1 this process works itself.
        seconds: After so many nothing new is begun; what was begun ends. None: no limit.
        gpus: Over how many GPUs the processes are spread; 0: none is chosen.
        ready: Whether a task can be begun yet; those that cannot wait for the others.

    Raises:
        UserError: A process was killed. What `work` raises is raised.
    """
    check_jobs(jobs, seconds)
    end = float("inf") if seconds is None else time.monotonic() + seconds
    waiting = list(tasks)

    def following() -> Task | None:
        if time.monotonic() >= end:
            waiting.clear()
        found = next((task for task in waiting if ready(task)), None)
        if found is not None:
            waiting.remove(found)
        return found

    if jobs == 1:
        while (task := following()) is not None:
            yield task, _done(work, task)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(
        jobs, context, initializer=_begin_process, initargs=(context.Value("i", 0), gpus)
    )
    running: dict[Future[Result], Task] = {}
    try:
        while True:
            while len(running) < jobs and (task := following()) is not None:
                running[pool.submit(_done, work, task)] = task
            if not running:
                return
            done, _ = wait(running, _LOOK_AGAIN if waiting else None, FIRST_COMPLETED)
            for future in done:
                yield running.pop(future), future.result()
    except BrokenProcessPool:
        raise UserError(
            "a process was killed (out of memory?); finished rows are kept: give the same command"
            " again, with a smaller --jobs"
        ) from None
    finally:
        pool.shutdown(wait=not running, cancel_futures=True)


def _done(work: Callable[[Task], Result], task: Task) -> Result:
    """Do a task, and give its GPU's memory back: the next one, or another process, needs it."""
    try:
        return work(task)
    finally:
        gc.collect()  # a run and its CUDA graph refer to each other
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def _begin_process(counter: Any, gpus: int) -> None:
    """Give a process its GPU, and see to it that it does not outlive the one that began it."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if gpus:
        import torch

        with counter.get_lock():
            place = counter.value
            counter.value += 1
        torch.cuda.set_device(place % gpus)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
