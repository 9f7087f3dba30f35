"""Where telemetry's rows go: a file of JSON lines, TensorBoard's events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fp8lab.errors import UserError
from fp8lab.records import Row, number, to_json


class JsonLines:
    """Appends each row to a file.

    Args:
        path: The file; its folder is made.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def __call__(self, row: Row) -> None:
        """Add a line."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(to_json(row) + "\n")


class TensorBoard:
    """Writes the numbers of each row as scalars: `casts/NAME/sqnr_db` and so on.

    Histograms of moments are not among them: rows have those.

    Args:
        folder: Where the events go.

    Raises:
        UserError: The package tensorboard is not installed.
    """

    def __init__(self, folder: Path | str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError(
                "events for TensorBoard need the package tensorboard, which is not installed;"
                " install it (pip install tensorboard), or keep rows alone"
            ) from None
        writer: Any = SummaryWriter
        self._writer = writer(str(folder))

    def __call__(self, row: Row) -> None:
        """Write a row's numbers at its step."""
        for tag, value in scalars_of(row):
            self._writer.add_scalar(tag, value, row["step"])
        self._writer.flush()

    def close(self) -> None:
        """Close the file of events."""
        self._writer.close()


def scalars_of(row: Row) -> list[tuple[str, float]]:
    """The numbers of a telemetry row, with the tag of each."""
    return [
        (f"{part}/{name}/{key}", number(value))
        for part in ("casts", "parameters")
        for name, entry in row.get(part, {}).items()
        for key, value in entry.items()
        if not isinstance(value, list)
    ]
