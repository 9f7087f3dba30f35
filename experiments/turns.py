"""Pieces of work in spawned processes, several at a time, until a sitting's time is up."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from fp8lab.errors import UserError

Task = TypeVar("Task")
Result = TypeVar("Result")

_LOOK_AGAIN = 0.2  # seconds after which it is seen that a task has become ready


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
    apart: bool = False,
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
        apart: Each task has a new process of its own, whose memory no other has touched.

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

    if jobs == 1 and not apart:
        while (task := following()) is not None:
            yield task, _done(work, task)
        return
    context = multiprocessing.get_context("spawn")
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        jobs,
        context,
        initializer=_begin_process,
        initargs=(context.Value("i", 0), gpus),
        max_tasks_per_child=1 if apart else None,
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
            " again" + ", with a smaller --jobs" * (jobs > 1)
        ) from None
    finally:
        if running:  # whoever asked does not want them any more
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the other's, which ends this one
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
