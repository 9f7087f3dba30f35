"""Runs as their rows tell them, read as they come.

A line that a running process has half written waits for its end, and what a resumed run cut off is
forgotten.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from fp8lab.errors import UserError
from fp8lab.records import Row, number, object_of
from fp8lab.watch_checks import is_row

_SILENT_AFTER = 120.0  # seconds without a row after which a run is not called running


class RowFile:
    """The rows of a JSON lines file that may still grow.

    Attributes:
        path: The file.
        rows: Those read so far.
        damaged: Whole lines that hold no row: no JSON object, or one that says odd things of a
            step (`fp8lab.watch_checks`).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Row] = []
        self.damaged = 0
        self._offset = 0
        self._file = 0

    def refresh(self) -> float | None:
        """Read what was added; returns when the file last changed, None where there is none."""
        try:
            with self.path.open("rb") as file:
                status = self.path.stat()
                # A resumed run writes the file anew, without what came after its checkpoint.
                if status.st_ino != self._file or status.st_size < self._offset:
                    self.rows, self.damaged, self._offset = [], 0, 0
                    self._file = status.st_ino
                file.seek(self._offset)
                added = file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UserError(f"cannot read rows from {self.path}: {error.strerror}") from None
        whole = added.rfind(b"\n") + 1  # the rest is half a line
        self._offset += whole
        for line in added[:whole].splitlines():
            row = object_of(line)
            if row is None:
                self.damaged += 1
            elif "step" in row:  # the first line of a sweep's rows says what the sweep is
                if is_row(row):
                    self.rows.append(row)
                else:
                    self.damaged += 1
        return status.st_mtime


@dataclass
class Run:
    """One run.

    Attributes:
        name: What it is called: its folder, or its policy and seed.
        rows: Its rows.
        steps: How many it will have, where that is known.
        recipe: Its recipe's name, where that is known.
        finished: Whether its result is there.
        changed: When it last changed, seconds since 1970; None where rows say nothing.
        damaged: Lines that hold no row.
    """

    name: str
    rows: Sequence[Row] = ()
    steps: int | None = None
    recipe: str | None = None
    finished: bool = False
    changed: float | None = None
    damaged: int = 0

    @property
    def state(self) -> str:
        """Whether it is finished, diverged or running, or for how long no row came."""
        if self.rows and not math.isfinite(number(self.rows[-1].get("loss", math.nan))):
            return "diverged"
        if self.finished:
            return "finished"
        if self.changed is None:
            return "rows alone"
        silent = time.time() - self.changed
        return "running" if silent < _SILENT_AFTER else f"no row for {silent / 60:.0f} min"

    @property
    def going(self) -> bool:
        """Whether rows may still come."""
        return self.state == "running" or self.state.startswith("no row")


@dataclass
class Source:
    """Where runs are read from; keeps its files open between looks."""

    path: Path
    _files: dict[Path, RowFile] = field(default_factory=dict)

    def runs(self) -> list[Run]:
        """All runs there are now.

        Raises:
            UserError: No run, no sweep and no file of rows.
        """
        if self.path.is_file():
            return self._of_file()
        if (self.path / "sweep.json").exists() or (self.path / "runs").is_dir():
            folders = sorted((self.path / "runs").glob("*/*/"))
            return [self._of_folder(f, _run_name(f)) for f in folders if f.is_dir()]
        if any((self.path / name).exists() for name in ("metrics.jsonl", "config.json")):
            return [self._of_folder(self.path, str(self.path))]
        kind = "holds no run" if self.path.is_dir() else "is not there"
        raise UserError(
            f"{self.path} {kind}; accepted: the folder of a run (with metrics.jsonl) or of a sweep,"
            " or a .jsonl file of rows"
        )

    def _rows(self, path: Path) -> tuple[RowFile, float | None]:
        file = self._files.setdefault(path, RowFile(path))
        return file, file.refresh()

    def _of_folder(self, folder: Path, name: str) -> Run:
        file, changed = self._rows(folder / "metrics.jsonl")
        config = _table(folder / "config.json")
        recipe = config.get("recipe")
        steps = config.get("steps")
        return Run(
            name,
            file.rows,
            steps if isinstance(steps, int) else None,
            recipe.get("name") if isinstance(recipe, dict) else None,
            (folder / "result.json").exists(),
            changed,
            file.damaged,
        )

    def _of_file(self) -> list[Run]:
        file, _ = self._rows(self.path)
        found: dict[str, list[Row]] = {}
        for row in file.rows:
            parts = [str(row[key]) for key in ("policy", "seed") if key in row]
            found.setdefault(" seed ".join(parts) or str(self.path), []).append(row)
        if not found:
            raise UserError(f"{self.path} holds no rows of a run (JSON objects with a step)")
        runs = [Run(name, rows) for name, rows in found.items()]
        runs[0].damaged = file.damaged  # nobody knows whose they are: counted once
        return runs


def _run_name(folder: Path) -> str:
    seed = folder.name.partition(".partial")[0].replace("-", " ")
    return f"{unquote(folder.parent.name)} {seed}"


def _table(path: Path) -> dict[str, Any]:
    """A JSON object, empty where it is missing or not whole: rows are what counts."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return table if isinstance(table, dict) else {}
