"""Rows that several sittings fill: what is there stays, other settings are refused."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8lab.errors import UserError
from fp8lab.experiments.row_checks import checker, is_count
from fp8lab.experiments.sittings import Sitting
from fp8lab.experiments.turns import in_turn
from fp8lab.records import read_rows

HEAD: dict[str, Any] = {"it": {"steps": 3}, "environment": {"device": "cpu", "python": "3.11"}}


def test_a_second_sitting_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "rows" / "x.jsonl"
    with Sitting(path, HEAD) as sitting:
        sitting.add({"a": 2})
        sitting.add({"a": 1})
    other = {**HEAD, "environment": {"device": "cpu", "python": "3.12"}}
    with Sitting(path, other) as sitting:
        assert sitting.rows == [{"a": 2}, {"a": 1}]
        sitting.add({"a": 0})
        sitting.sort(lambda row: row["a"])
    assert read_rows(path) == [HEAD, {"a": 0}, {"a": 1}, {"a": 2}]


def test_rows_say_of_which_sitting_they_are(tmp_path: Path) -> None:
    """Days and commits may lie between sittings; the head says those of the first."""
    path = tmp_path / "x.jsonl"
    said = [
        {"device": "cpu", "date": f"2026-11-{day}", "command": f"c {day}", "git": f"{day:012x}"}
        for day in (29, 30)
    ]
    for place, environment in enumerate(said):
        with Sitting(path, {**HEAD, "environment": environment}) as sitting:
            sitting.add({"a": place})
            sitting.add({"b": place, "environment": {"git": "its own"}})
    stamps = [{key: own[key] for key in ("date", "command", "git")} for own in said]
    assert read_rows(path) == [
        {**HEAD, "environment": said[0]},
        {"a": 0, **stamps[0]},
        {"b": 0, "environment": {"git": "its own"}},
        {"a": 1, **stamps[1]},
        {"b": 1, "environment": {"git": "its own"}},
    ]


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
        ({**HEAD, "it": {"steps": 4}}, "another it, steps: 3, now 4"),
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


@pytest.mark.parametrize(
    "data",
    [
        b'{"my": "important results"}',
        b'{"my": "important results"}\n{"more": 1}',
        b"line1\nline2 precious",
        b"no end of line",
        b"5\nhalf",
        b"\xff\xfe",
        b"\xff\xfe\n",
        b'{"it": {"steps": 4}, "environment": {}}\n{"half',
        b'{"it": {"steps": 4}, "envi',
    ],
)
def test_a_file_of_something_else_stays_as_it_is(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"x\.jsonl (holds|is damaged)"):
        Sitting(path, HEAD)
    assert path.read_bytes() == data


def test_a_last_row_without_the_end_of_its_line_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    with Sitting(path, HEAD) as sitting:
        sitting.add({"a": 1})
    path.write_bytes(path.read_bytes()[:-1])
    with Sitting(path, HEAD) as sitting:
        sitting.add({"a": 2})
    assert read_rows(path) == [HEAD, {"a": 1}, {"a": 2}]


def test_rows_are_checked_before_anything_is_changed(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    check = checker("it", {}, {"a": is_count})
    with Sitting(path, HEAD, check=check) as sitting:
        sitting.add({"a": 1})
    whole = path.read_bytes()
    for line, said in (
        (b"5", "line 3, is damaged: it holds no JSON object"),
        (b'{"b": 1}', "line 3, is damaged: it lacks a"),
        (b'{"a": -1}', "line 3, is damaged: a is '-1'"),
    ):
        path.write_bytes(whole + line + b'\n{"a": 2')
        with pytest.raises(UserError, match=said):
            Sitting(path, HEAD, check=check)
        assert path.read_bytes() == whole + line + b'\n{"a": 2'


def test_an_orphan_s_lock_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second process has opened the file when the first puts a sorted one in its place."""
    path = tmp_path / "x.jsonl"
    first = Sitting(path, HEAD)
    first.add({"a": 2})
    first.add({"a": 1})
    lock = fcntl.flock

    def late(file: Any, how: int) -> None:
        monkeypatch.setattr("fcntl.flock", lock)
        first.sort(lambda row: row["a"])
        first.__exit__(None, None, None)
        lock(file, how)

    monkeypatch.setattr("fcntl.flock", late)
    with Sitting(path, HEAD) as second:
        second.add({"a": 3})
    assert read_rows(path) == [HEAD, {"a": 1}, {"a": 2}, {"a": 3}]


def test_a_sorted_file_is_locked_and_takes_rows(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    with Sitting(path, HEAD) as sitting:
        sitting.add({"a": 2})
        sitting.add({"a": 1})
        sitting.sort(lambda row: row["a"])
        with pytest.raises(UserError, match="another process works on"):
            Sitting(path, HEAD)
        sitting.add({"a": 3})
    assert read_rows(path) == [HEAD, {"a": 1}, {"a": 2}, {"a": 3}]
    assert [own.name for own in tmp_path.iterdir()] == ["x.jsonl"]


def test_a_full_disk_leaves_whole_rows(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    code = (
        "import resource; from pathlib import Path;"
        " from fp8lab.experiments.sittings import Sitting;"
        " resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300));"
        f" s = Sitting(Path({str(path)!r}), {HEAD!r}); s.add({{'a': 1}}); s.add({{'b': 'x' * 400}})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "UserError: cannot write" in done.stderr
    assert "File too large; rows that are finished are kept" in done.stderr
    assert path.read_bytes().endswith(b'\n{"a": 1}\n')


def test_places_where_no_rows_can_be(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").touch()
    for place in (tmp_path, tmp_path / "fifo", tmp_path / "file" / "x.jsonl"):
        with pytest.raises(UserError, match="name another --out"):
            Sitting(place, HEAD)


def test_a_head_may_be_known_later(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    head = {"it": 1, "base": None, "more": 2}
    with Sitting(path, head, late="base"):
        pass
    assert not path.exists()
    with Sitting(path, head, late="base") as sitting:
        sitting.know({"loss": 0.5})
        sitting.add({"a": 1})
    assert read_rows(path) == [{"it": 1, "base": {"loss": 0.5}, "more": 2}, {"a": 1}]
    with Sitting(path, head, late="base") as sitting:
        assert sitting.rows == [{"a": 1}]
        sitting.know({"loss": 0.5})
        with pytest.raises(UserError, match=r"another base, loss: 0\.5, now 0\.25"):
            sitting.know({"loss": 0.25})


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
        "import time; from fp8lab.experiments.turns import in_turn;"
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


def test_each_task_may_have_a_process_of_its_own() -> None:
    places = [place for _, place in in_turn([1, 2, 3], _process, apart=True)]
    assert len({*places, os.getpid()}) == 4


def test_a_single_job_is_not_told_to_be_fewer() -> None:
    with pytest.raises(UserError, match=r"give the same command again$"):
        list(in_turn([1], _kill, apart=True))
    with pytest.raises(UserError, match=r"with a smaller --jobs$"):
        list(in_turn([1, 2], _kill, jobs=2))


def _process(_: int) -> int:
    return os.getpid()


def _kill(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
