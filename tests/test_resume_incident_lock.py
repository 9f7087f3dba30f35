"""One command at a time works in the incident's folder: another could remove its checkpoint."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fp8lab.errors import UserError
from fp8lab.experiments.resume_incident import locked, main

ROOT = Path(__file__).parent.parent
SMALL = ["--condition", "blockwise", "--variants", "exact", "--seeds", "1", "--after", "1"]


def arguments(tmp_path: Path, out: str) -> list[str]:
    text, work = str(ROOT / "CONTRIBUTING.md"), str(tmp_path / "work")
    return [*SMALL, "--text", text, "--work", work, "--out", str(tmp_path / out)]


def test_a_second_command_is_refused_and_the_lock_goes_with_the_first(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fp8lab.experiments.resume_incident"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    first = subprocess.Popen(
        [*command, *arguments(tmp_path, "first.png"), "--before", "1000000", "--jobs", "2"],
        env=environment,
        stderr=subprocess.DEVNULL,
    )
    work = tmp_path / "work" / "small"
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "first.jsonl").exists():  # begun once the folder is held
            assert first.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        second = [*arguments(tmp_path, "second.png"), "--before", "1"]
        done = subprocess.run(
            [*command, *second], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        assert done.stderr == (
            f"process {first.pid} works in {work}; wait for it, or name another --work\n"
        )
        assert not (tmp_path / "second.jsonl").exists()
    finally:
        first.kill()
        first.wait()
    main(second)  # the killed one's processes hold nothing
    assert (work / ".lock").read_text() == f"{os.getpid()}\n"
    assert (tmp_path / "second.png").exists()


def test_the_lock_is_let_go_of_when_the_work_fails(tmp_path: Path) -> None:
    def fail() -> None:
        with locked(tmp_path):
            raise ZeroDivisionError

    with locked(tmp_path):
        said = f"process {os.getpid()} works in {tmp_path}; wait for it, or name another --work"
        with pytest.raises(UserError, match=re.escape(said)):
            fail()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            fail()


def test_a_work_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "work").touch()
    with pytest.raises(UserError, match=r"cannot write in .*small: .*; name another --work"):
        main(arguments(tmp_path, "x.png"))
    assert not (tmp_path / "x.jsonl").exists()
