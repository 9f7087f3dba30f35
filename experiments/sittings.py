"""Rows that several sittings fill: finished ones stay in a file, and only what is missing is done.

A file of rows begins with a head that says what the experiment is; each other row is a finished
piece of work, appended and synced as it ends. So a sitting may be killed at any moment, and the
next one goes on. Sittings may be days and commits apart: what the head's `environment` says of
these, and of the command, each row says, too.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

from fp8lab.errors import UserError
from fp8lab.records import Row, to_json

STAMP = ("date", "when", "command", "git")
"""Of the environment, what each row says of its own sitting."""


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
        UserError: The file holds other settings, rows of another machine or something else, is
            damaged, cannot be written, or another process works on it. It is as it was then.
    """

    def __init__(
        self,
        path: Path,
        head: Row,
        *,
        check: Callable[[list[Any], Path], object] | None = None,
        late: str | None = None,
    ) -> None:
        """Open the file, or begin it.

        Args:
            path: A .jsonl; its folder is made.
            head: What the experiment is, under its first key, and more. An equal head must stand in
                a file that is there; of `environment` only device and packages count.
            check: Raises a UserError where the rows that are there, the head first, are not whole.
            late: A key of the head whose value is not known yet: `know` must be called before a
                row is added.
        """
        self.path, self._late = path, late
        here = head.get("environment") or {}
        self._stamp = {key: here[key] for key in STAMP if key in here}
        self._file = _locked(path)
        try:
            self._begin(json.loads(to_json(head)), check)
        except BaseException:
            self._file.close()
            raise

    def _begin(self, head: Row, check: Callable[[list[Any], Path], object] | None) -> None:
        """Look at what is there; only a file of this experiment is changed."""
        found, length = _whole_rows(self._file.readall() or b"", head, self.path)
        if found:
            _check_head(found[0], head, self.path, self._late)
            if check is not None:
                check(found, self.path)
            self._cut(length)
        self.head, self.rows = (found or [head])[0], found[1:]
        self._begun = bool(found)
        if not self._begun and self._late is None:
            self._cut(0)
            self._append(self.head)
            self._begun = True

    def __enter__(self) -> Sitting:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if not self._begun and not os.fstat(self._file.fileno()).st_size:
                self.path.unlink(missing_ok=True)  # nothing came of it
        finally:
            self._file.close()

    def know(self, value: Any) -> None:
        """Say what the `late` key of the head is.

        Raises:
            UserError: The rows that are there were made with another.
        """
        assert self._late is not None
        said = json.loads(to_json(value))
        if self._begun:
            _check_head(self.head, {**self.head, self._late: said}, self.path)
            return
        self.head = {**self.head, self._late: said}
        self._cut(0)
        self._append(self.head)
        self._begun = True

    def add(self, row: Row) -> None:
        """Append a row, with the `STAMP` of this sitting; wait until it is on the disk.

        A row that has an environment of its own says all that itself.
        """
        assert self._begun
        if "environment" not in row:
            row = row | self._stamp
        self._append(row)
        self.rows.append(row)

    def sort(self, key: Callable[[Row], Any]) -> None:
        """Put the rows in an order that does not depend on which ended first."""
        self.replace(sorted(self.rows, key=key))

    def replace(self, rows: list[Row]) -> None:
        """Put these rows in the place of those that are there: all of them, or none."""
        if rows == self.rows:
            return
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            new = _locked(temporary)  # before it has the name: nobody comes between
            try:
                new.truncate(0)
                write_synced(
                    new, "".join(to_json(row) + "\n" for row in (self.head, *rows)), temporary
                )
                temporary.replace(self.path)
            except BaseException:
                new.close()
                raise
        finally:
            temporary.unlink(missing_ok=True)
        self._file.close()
        self._file, self.rows = new, rows

    def _append(self, row: Row) -> None:
        write_synced(self._file, to_json(row) + "\n", self.path)

    def _cut(self, length: int) -> None:
        """Cut off the end that a kill left; a last row whose line's end is missing gets it."""
        size = os.fstat(self._file.fileno()).st_size
        if size > length:
            self._file.truncate(length)
        elif size < length:
            write_synced(self._file, "\n", self.path)


def _locked(path: Path) -> FileIO:
    """The file, for this process alone; a file that took its name meanwhile is opened instead."""
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and not path.is_file():
                raise UserError(f"{path} is no plain file; name another --out")
            file = FileIO(path, "a+")
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}; name another --out") from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise UserError(f"another process works on {path}; wait for it") from None
        if _has_name(file, path):
            file.seek(0)
            return file
        file.close()


def _has_name(file: FileIO, path: Path) -> bool:
    """Whether the file that is open is the one that has the name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def write_synced(file: FileIO, text: str, path: Path) -> None:
    """Append it all and wait until it is on the disk; where that fails the file is as it was."""
    before = os.fstat(file.fileno()).st_size
    left = memoryview(text.encode())
    try:
        while left:
            left = left[file.write(left) :]
        os.fsync(file.fileno())
    except OSError as error:
        file.truncate(before)
        raise UserError(
            f"cannot write {path}: {error.strerror}; rows that are finished are kept"
        ) from None


def _whole_rows(data: bytes, head: Row, path: Path) -> tuple[list[Any], int]:
    """The rows, and how many bytes they take with their lines' ends.

    A last line that a kill cut short is none, if the file is of this experiment.
    """
    *lines, last = data.split(b"\n")
    length = len(data) - len(last)
    if last and _is_row(last):  # all but its line's end
        lines, length = [*lines, last], len(data) + 1
    elif last and not lines and not _is_half(last, head):
        raise UserError(f"{path} holds something else than {next(iter(head))}; name another --out")
    try:
        return [json.loads(line) for line in lines], length
    except (ValueError, RecursionError):
        raise UserError(
            f"{path} is damaged: a line is not JSON; name another --out, or remove the file"
        ) from None


def _is_row(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _is_half(line: bytes, head: Row) -> bool:
    """Whether that is all that a kill left of this head."""
    opening = (to_json(head).partition('"environment"')[0]).encode()
    return line.startswith(opening) or opening.startswith(line)


def _check_head(found: Any, wanted: Row, path: Path, late: str | None = None) -> None:
    """Refuse to go on with rows that were made otherwise."""
    experiment = next(iter(wanted))
    if not isinstance(found, dict) or experiment not in found:
        raise UserError(f"{path} holds something else than {experiment}; name another --out")

    def comparable(head: Row) -> Row:
        here = head.get("environment")
        here = here if isinstance(here, dict) else {}
        own = {key: value for key, value in head.items() if key not in ("environment", late)}
        return own | {key: here.get(key) for key in ("device", "packages")}

    if (difference := _difference(comparable(found), comparable(wanted))) is not None:
        keys, was, now = difference
        raise UserError(
            f"{path} holds rows of another {', '.join(keys)}: {to_json(was)}, now {to_json(now)};"
            " choose another --out, or remove the file"
        )


def _difference(was: Any, now: Any) -> tuple[list[str], Any, Any] | None:
    """The first difference of two tables: the keys that lead to it, and what is there."""
    if was == now:
        return None
    if isinstance(was, dict) and isinstance(now, dict):
        key = next(key for key in now | was if was.get(key) != now.get(key))
        inner = _difference(was.get(key), now.get(key))
        assert inner is not None
        return [key, *inner[0]], *inner[1:]
    return [], was, now
