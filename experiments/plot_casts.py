"""Heat maps of casts over steps: scale, overflow, underflow, SQNR if there; from rows alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import numpy.typing as npt
from matplotlib.colors import LogNorm, Normalize

from fp8lab.errors import UserError
from fp8lab.experiments.commands import check_writable
from fp8lab.experiments.new_rows import check_same
from fp8lab.records import Row, number, to_json, write_atomically
from fp8lab.watch_rows import Source

SUFFIXES = {".png": "Software", ".svg": "Date", ".pdf": "CreationDate"}
SHOWN_FROM = 1e-7  # a share below it, 0 too, is left white
_ROW = 0.18  # inches a cast

Table = npt.NDArray[np.float64]


def draw_casts(source: Path, figure: Path) -> Path:
    """Draw one run's casts.

    Args:
        source: The folder of a run, or a file of one run's rows.
        figure: Where the picture goes: .png, .pdf or .svg.

    Returns:
        The path of the rows that it was drawn from, beside the figure.

    Raises:
        UserError: More than one run, no observed casts, or another suffix.
    """
    if figure.suffix not in SUFFIXES:
        accepted = ", ".join(SUFFIXES)
        raise UserError(f"the figure is {str(figure)!r}; accepted: a file in {accepted}")
    beside = figure.with_suffix(".jsonl")
    if source.resolve() in (figure.resolve(), beside.resolve()):
        raise UserError(f"the figure would overwrite its rows, {source}; name another --figure")
    for path in (figure, beside):
        check_writable(path, "--figure")
    check_same(beside, {"casts": {}}, "--figure")
    runs = Source(source).runs()
    if len(runs) != 1:
        raise UserError(f"{source} holds {len(runs)} runs; name the folder of one of them")
    observed = [row for row in runs[0].rows if row.get("casts")]
    if not observed:
        raise UserError(f"no row of {source} holds observed casts; there is nothing to draw yet")
    figure.parent.mkdir(parents=True, exist_ok=True)
    _draw(Path(runs[0].name).name, observed, figure)
    kept = ("step", "casts")
    rows = [{key: row[key] for key in kept} for row in observed]
    write_atomically(beside, "".join(to_json(row) + "\n" for row in rows))
    return beside


def table(rows: list[Row], names: list[str], key: str) -> Table:
    """(casts, observed steps): a number of each, NaN where a cast has none."""
    found = np.full((len(names), len(rows)), np.nan)
    for column, row in enumerate(rows):
        for place, name in enumerate(names):
            if key in row["casts"].get(name, {}):
                found[place, column] = number(row["casts"][name][key])
    return found


def _draw(name: str, rows: list[Row], figure: Path) -> None:
    names = list(dict.fromkeys(cast for row in rows for cast in row["casts"]))
    height = max(3.0, 1.6 + _ROW * len(names))
    with np.errstate(all="ignore"):
        scales = np.log2(table(rows, names, "scale"))
    panels: list[tuple[str, Table, Normalize]] = [
        ("log2 of the scale", scales, Normalize()),
        *(
            (
                f"{key} (white: below {SHOWN_FROM:g})",
                table(rows, names, key),
                LogNorm(SHOWN_FROM, 1),
            )
            for key in ("overflow", "underflow")
        ),
    ]
    if any("sqnr_db" in cast for row in rows for cast in row["casts"].values()):
        panels.append(("SQNR, dB", table(rows, names, "sqnr_db"), Normalize()))
    picture, axes = plt.subplots(
        1, len(panels), figsize=(5 * len(panels), height), layout="constrained", sharey=True
    )
    for axis, (title, values, norm) in zip(axes, panels, strict=True):
        shares = isinstance(norm, LogNorm)
        hidden = ~np.isfinite(values) | ((values < SHOWN_FROM) & shares)
        colours = "viridis" if not shares else "magma_r"
        image: Any = axis.imshow(
            np.ma.masked_array(values, hidden),
            aspect="auto",
            interpolation="nearest",
            norm=norm,
            cmap=colours,
        )
        axis.set_title(title, fontsize=11)
        axis.set_xlabel("step")
        places = np.unique(np.linspace(0, len(rows) - 1, min(len(rows), 9)).astype(int))
        axis.set_xticks(places, [str(rows[place]["step"]) for place in places])
        picture.colorbar(image, ax=axis, fraction=0.05)
    axes[0].set_yticks(range(len(names)), names, fontsize=7)
    picture.suptitle(f"Casts of {name}", fontsize=13, parse_math=False)
    try:
        with plt.rc_context({"svg.hashsalt": "fp8lab"}):
            picture.savefig(figure, dpi=110, metadata={SUFFIXES[figure.suffix]: None})
    finally:
        plt.close(picture)
