"""Rows that several sittings fill: what is there stays, other settings are refused."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8lab.errors import UserError
from fp8lab.experiments.sittings import Sitting, in_turn
from fp8lab.records import read_rows

HEAD: dict[str, Any] = {"it": {"steps": 3}, "environment": {"device": "cpu", "git": "a"}}


def test_a_second_sitting_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "rows" / "x.jsonl"
    with Sitting(path, HEAD) as sitting:
        sitting.add({"a": 2})
        sitting.add({"a": 1})
    other = {**HEAD, "environment": {"device": "cpu", "git": "b"}}
    with Sitting(path, other) as sitting:
        assert sitting.rows == [{"a": 2}, {"a": 1}]
        sitting.add({"a": 0})
        sitting.sort(lambda row: row["a"])
    assert read_rows(path) == [HEAD, {"a": 0}, {"a": 1}, {"a": 2}]


def test_what_a_kill_cut_short_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    with Sitting(path, HEAD) as sitting:
        sitting.add({"a": 1})
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"a": 2, "loss": [1.0, 2')
    with Sitting(path, HEAD) as sitting:
        assert sitting.rows == [{"a": 1}]
        sitting.add({"a": 2})
    assert path.read_bytes() == whole + b'{"a": 2}\n'
    path.write_bytes(whole[:5])  # killed within the head
    with Sitting(path, HEAD) as sitting:
        assert sitting.rows == []


@pytest.mark.parametrize(
    ("head", "said"),
    [
        ({**HEAD, "it": {"steps": 4}}, 'another it: {"steps": 3}, now {"steps": 4}'),
        ({**HEAD, "environment": {"device": "gpu"}}, 'another device: "cpu", now "gpu"'),
        ({**HEAD, "more": 1}, "another more: null, now 1"),
    ],
)
def test_other_settings_are_refused(tmp_path: Path, head: dict[str, Any], said: str) -> None:
    path = tmp_path / "x.jsonl"
    with Sitting(path, HEAD):
        pass
    before = path.read_bytes()
    with pytest.raises(UserError, match=said):
        Sitting(path, head)
    assert path.read_bytes() == before


def test_damage_and_another_process_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    with Sitting(path, HEAD), pytest.raises(UserError, match="another process works on"):
        Sitting(path, HEAD)
    path.write_text("no JSON\n")
    with pytest.raises(UserError, match="is damaged"):
        Sitting(path, HEAD)


def _square(task: int) -> tuple[int, int]:
    return task * task, os.getpid()


def _killed(task: int) -> None:
    os._exit(task)


def test_processes_share_the_tasks() -> None:
    found = dict(in_turn([1, 2, 3], _square, jobs=2))
    assert {task: result for task, (result, _) in found.items()} == {1: 1, 2: 4, 3: 9}
    assert os.getpid() not in {process for _, process in found.values()}
    with pytest.raises(UserError, match="a process was killed"):
        list(in_turn([1], _killed, jobs=2))


def test_nothing_begins_after_the_time_and_what_waits_comes_later() -> None:
    def slow(task: int) -> int:
        time.sleep(0.02)
        return task

    done = [task for task, _ in in_turn(range(100), slow, seconds=0.1)]
    assert 1 <= len(done) < 10
    assert done == list(range(len(done)))
    finished: list[int] = []
    for task, _ in in_turn([2, 1], slow, ready=lambda task: task == 1 or 1 in finished):
        finished.append(task)
    assert finished == [1, 2]


def test_numbers_that_cannot_be() -> None:
    with pytest.raises(UserError, match="--jobs is 0"):
        list(in_turn([1], _square, jobs=0))
    with pytest.raises(UserError, match="--seconds is 0"):
        list(in_turn([1], _square, seconds=0))


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_processes_end_with_the_one_that_began_them() -> None:
    code = (
        "import time; from fp8lab.experiments.sittings import in_turn;"
        " list(in_turn([60.0, 60.0], time.sleep, jobs=2))"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")

    def begun() -> list[str]:
        """Those that have read their task; the other child is multiprocessing's own tracker."""
        found = [pid for pid in children.read_text().split() if _threads(pid) > 1]
        return found if len(found) == 2 else []

    processes = _awaited(begun)
    parent.kill()
    parent.wait()
    assert _awaited(lambda: not any(_threads(pid) for pid in processes))


def _threads(pid: str) -> int:
    """How many threads a process has; 0 where it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    if "State:\tZ" in status:
        return 0
    return int(status.partition("Threads:")[2].split()[0])


def _awaited(condition: Callable[[], Any]) -> Any:
    """What it gives once that is true."""
    end = time.monotonic() + 60
    while not (found := condition()):
        assert time.monotonic() < end, "nothing happened in a minute"
        time.sleep(0.05)
    return found
