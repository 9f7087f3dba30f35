"""What a run leaves behind: its configuration, its environment, rows of metrics, how it ended.

A folder holds `config.json`, `environment.json`, `metrics.jsonl` (one JSON object a line, appended)
and, once the run has ended, `result.json`. Rows are the same bits for the same configuration, seed
and backend; wall-clock values are kept apart under the key "time".
"""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from fp8lab import __version__
from fp8lab.errors import UserError
from fp8lab.watch_checks import is_row

Row = dict[str, Any]

PACKAGES = ("numpy", "ml_dtypes", "torch", "triton", "matplotlib", "joblib")


def short_float32(value: float) -> float:
    """The float64 with the fewest digits that is the same float32: rows stay short and exact."""
    return float(str(np.float32(value)))


def to_json(data: Any, *, indent: int | None = None) -> str:
    """JSON by the standard: NaN and infinities, which it lacks, become the strings "nan", "inf"."""
    return json.dumps(_finite(data), indent=indent, allow_nan=False)


def number(value: float | str) -> float:
    """A number of a row, also where it was written as "nan", "inf" or "-inf"."""
    return float(value)


def read_rows(path: Path) -> list[Row]:
    """The rows of a JSON lines file.

    Raises:
        UserError: The file is missing or a line is not JSON; with the line's number.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"cannot read rows from {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text, so it holds no rows") from None
    return [_table(line, f"{path}, line {place},") for place, line in enumerate(lines, start=1)]


def read_table(path: Path) -> dict[str, Any]:
    """One JSON object from a file.

    Raises:
        UserError: The file is missing, or holds anything else.
    """
    try:
        return _table(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is damaged: it is not UTF-8 text") from None


def _table(text: str, source: str) -> dict[str, Any]:
    try:
        table = json.loads(text, parse_constant=_no_json)
    except (ValueError, RecursionError):
        raise UserError(f"{source} is damaged: it is not JSON") from None
    if not isinstance(table, dict):
        raise UserError(f"{source} is damaged: it holds no JSON object")
    return table


def _no_json(constant: str) -> Any:
    raise ValueError(f"JSON has no {constant}")  # `to_json` writes "nan" and the like


def write_atomically(path: Path, text: str) -> None:
    """Write a whole file or nothing: a reader never sees half of it, whenever the power goes."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


class RunRecorder:
    """Writes the folder of one run while it goes.

    Rows are flushed one by one, so that a run that dies leaves the rows it had.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], device: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        write_atomically(folder / "config.json", to_json(config, indent=2) + "\n")
        write_atomically(folder / "environment.json", to_json(environment(device), indent=2) + "\n")
        self._open("w", 0.0)

    @classmethod
    def reopen(cls, folder: Path, last_step: int) -> tuple[RunRecorder, list[Row]]:
        """Go on in a run's folder after `last_step`; rows past it are cut off, in one go.

        Returns:
            The recorder, whose clock goes on from the last row's, and the rows that stay.

        Raises:
            UserError: There are no rows up to that step, or one is damaged; the file is as it was.
        """
        path = folder / "metrics.jsonl"
        rows: list[Row] = []
        kept = []
        for line in _row_lines(path):
            row = _row_of(line)
            if row is None or row["step"] > last_step:
                break  # what a run that was killed wrote after its checkpoint, whole or torn
            rows.append(row)
            kept.append(line)
        if [row["step"] for row in rows] != list(range(1, last_step + 1)):
            raise UserError(
                f"{path} has no whole rows up to step {last_step}, one a step; it was changed"
            )
        write_atomically(path, "".join(line + "\n" for line in kept))
        recorder = cls.__new__(cls)
        recorder.folder = folder
        recorder._open("a", rows[-1].get("time", {}).get("seconds", 0.0))
        return recorder, rows

    def _open(self, mode: str, seconds: float) -> None:
        self._started = time.perf_counter() - seconds
        self._rows = (self.folder / "metrics.jsonl").open(mode, encoding="utf-8")

    def __enter__(self) -> RunRecorder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._rows.close()

    def add(self, row: Row) -> None:
        """Append a row, with the seconds since the start under "time"."""
        seconds = round(time.perf_counter() - self._started, 4)
        self._rows.write(to_json({**row, "time": {"seconds": seconds}}) + "\n")
        self._rows.flush()

    def sync(self) -> None:
        """Wait until the rows so far are on the disk."""
        os.fsync(self._rows.fileno())

    def finish(self, result: Mapping[str, Any]) -> None:
        """Say how the run ended; a folder with this file is complete."""
        self.sync()  # the result must not reach the disk before its rows
        seconds = round(time.perf_counter() - self._started, 4)
        whole = {**result, "time": {"seconds": seconds}}
        write_atomically(self.folder / "result.json", to_json(whole, indent=2) + "\n")


def _row_lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise UserError(f"cannot read rows from {path}: {error.strerror}") from None


def object_of(line: str | bytes) -> Row | None:
    """The JSON object that a line holds; None where it holds none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # UnicodeDecodeError is one
        return None
    return row if isinstance(row, dict) else None


def _row_of(line: str) -> Row | None:
    """A step's row, or None where the line is none."""
    row = object_of(line)
    if row is None or not {"step", "loss"} <= set(row) or not is_row(row):
        return None
    return row if math.isfinite(number(row.get("time", {}).get("seconds", 0.0))) else None


def environment(device: str) -> dict[str, Any]:
    """Versions, machine, git revision and device: what a reader needs to run it again."""
    versions = {"fp8lab": __version__} | {name: _version(name) for name in PACKAGES}
    return {
        "python": platform.python_version(),
        "packages": versions,
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "device": device_name(device),
        "git": _git_revision(),
    }


def today() -> str:
    """The day of UTC: 2026-11-30."""
    return datetime.now(UTC).date().isoformat()


def device_name(device: str) -> str:
    """The GPU's name, or "cpu"."""
    if device == "cpu":
        return "cpu"
    import torch

    return torch.cuda.get_device_name(device)


def without_time(row: Row) -> Row:
    """The part of a row that must repeat."""
    return {key: value for key, value in row.items() if key != "time"}


def _finite(data: Any) -> Any:
    if isinstance(data, float) and not math.isfinite(data):
        return str(data)
    if isinstance(data, Mapping):
        return {str(key): _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return data


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    """The processor's name: rows may differ between instruction sets."""
    if sys.platform == "linux":
        for line in _lines_of(Path("/proc/cpuinfo")):
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def _lines_of(path: Path) -> Iterator[str]:
    try:
        yield from path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return


def _git_revision() -> str | None:
    """The commit of the checkout that this package lies in, with "-dirty" when it was changed."""
    folder = Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
