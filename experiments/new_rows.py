"""Rows of a measurement that is done in one go, and takes the place of the one before as a whole.

Until then they lie beside it, in a file of their own: no file of finished rows is ever replaced by
fewer. For what several sittings fill see `fp8lab.experiments.sittings`.
"""

from __future__ import annotations

import json
from io import FileIO
from itertools import count
from pathlib import Path
from types import TracebackType

from fp8lab.errors import UserError
from fp8lab.experiments.commands import check_writable
from fp8lab.experiments.sittings import write_synced
from fp8lab.records import Row, environment, to_json, today


class NewRows:
    """The rows of one measurement, each on the disk as it ends.

        with NewRows(path, head) as new:
            for ...:
                new.add(row)
        draw(new.rows, new.path.with_suffix(".png"))

    At the end they are put in the place of `path`, unless that has more rows: then it stays as it
    is, and they stay beside it in `NAME.partial.jsonl`, or `NAME.partial-2.jsonl` where that is
    taken. So they do after an error or Ctrl-C, which gets a note that says so.

    Attributes:
        path: Where the rows are, once it has ended.
        rows: The head, and those that were added.

    Raises:
        UserError: The file cannot be written, or holds something else. Nothing is changed then.
    """

    def __init__(self, path: Path, head: Row) -> None:
        """Look whether there is a place for the rows.

        Args:
            path: A .jsonl; its folder is made.
            head: The first row. An equal first key must be in that of a file that is there.
        """
        check_writable(path)
        check_same(path, head)
        self.path, self.rows = path, [head]

    def __enter__(self) -> NewRows:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._beside, self._file = _begun(self.path)
        try:
            self._append(self.rows[0])
        except BaseException:
            self._drop()
            raise
        return self

    def add(self, *rows: Row) -> None:
        """Append rows and wait until they are on the disk."""
        self._append(*rows)
        self.rows += rows

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        there, here = _length(self.path), len(self.rows)
        if error is None and here >= there:
            self._file.close()
            self._beside.replace(self.path)
        elif here == 1:
            self._drop()
            if error is not None and there:
                error.add_note(f"{self.path} is as it was")
        else:
            self._file.close()
            if error is None:
                said = f"{self.path} has {there} rows, these are {here}: it stays as it is"
                print(f"{said}, and they are in {self._beside}")
            else:
                stays = f"; {self.path} is as it was" if there else ""
                error.add_note(f"rows so far: {here - 1}, in {self._beside}{stays}")
            self.path = self._beside

    def _append(self, *rows: Row) -> None:
        write_synced(self._file, "".join(to_json(row) + "\n" for row in rows), self._beside)

    def _drop(self) -> None:
        self._file.close()
        self._beside.unlink()


def card_head(command: str, rounds: int) -> Row:
    """The first row of a benchmark on a card."""
    return {
        "environment": environment("cuda"),
        "rounds": rounds,
        "date": today(),
        "command": command,
    }


def _begun(path: Path) -> tuple[Path, FileIO]:
    """A new file beside it, which no other process has."""
    for number in count(1):
        middle = ".partial" if number == 1 else f".partial-{number}"
        beside = path.with_name(f"{path.stem}{middle}{path.suffix}")
        try:
            return beside, FileIO(beside, "x")
        except FileExistsError:
            continue
    raise AssertionError


def _length(path: Path) -> int:
    """How many rows a file has; 0 where there is none."""
    try:
        return sum(1 for line in path.read_bytes().splitlines() if line.strip())
    except FileNotFoundError:
        return 0


def check_same(path: Path, head: Row, option: str = "--out") -> None:
    """Refuse to replace what is no rows of this kind; a file that is not there, or empty, may be.

    Raises:
        UserError: Its first row lacks the first key of the head.
    """
    if not _length(path):
        return
    with path.open("rb") as file:
        line = file.readline()
    try:
        first = json.loads(line)
    except (ValueError, RecursionError):
        first = None
    if not isinstance(first, dict) or next(iter(head)) not in first:
        raise UserError(f"{path} holds something else than such rows; name another {option}")
