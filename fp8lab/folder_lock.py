"""A folder that one process at a time works in."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fp8lab.errors import UserError

LOCK = ".lock"


@contextmanager
def held(folder: Path, what: str, advice: str) -> Iterator[None]:
    """Hold a folder for this process; the system lets go of it however the process ends.

    Its `.lock` names the process.

    Args:
        folder: It exists.
        what: What is done there, for the refusal: "works on the run".
        advice: What to do about it: "wait for it".

    Raises:
        UserError: Another process holds it.
        OSError: The folder cannot be written to.
    """
    with (folder / LOCK).open("a+") as file:  # what another process wrote is not erased
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            number = file.read().strip()
            who = f"process {number}" if number else "another process"
            raise UserError(f"{who} {what} in {folder}; {advice}") from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield
