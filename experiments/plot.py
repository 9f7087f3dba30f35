"""One figure of a sweep, drawn from its rows alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fp8lab.errors import UserError
from fp8lab.experiments.commands import FIGURES as SUFFIXES
from fp8lab.experiments.commands import check_writable
from fp8lab.experiments.sweep import check_identity, collect_rows
from fp8lab.records import Row, number, read_rows, to_json, write_atomically
from fp8lab.watch_checks import is_row

# Okabe and Ito's colours: told apart by colour-blind readers too. BF16 is black.
COLOURS = ("#000000", "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442")
LINES = ("-", "--", ":", "-.")  # when the colours are used up
WATCHED = "blocks.0.down.grad_output"
SHOWN_AT_LEAST = 1e-7  # a share of 0 has no place on a logarithmic axis

Curve = dict[int, list[float]]  # step -> one value a seed


def draw(source: Path, figure: Path) -> Path:
    """Draw the figure of a sweep's folder or of a file of its rows.

    Beside the figure go the rows it was drawn from: same name, `.jsonl`.

    Args:
        source: A sweep's folder, or the `.jsonl` that lies beside a figure.
        figure: Where the picture goes; its suffix (.png, .pdf, .svg) says what it becomes.

    Returns:
        The path of the rows.

    Raises:
        UserError: No rows there, or a suffix that matplotlib does not know.
    """
    check_figure(figure, source)
    rows = collect_rows(source) if source.is_dir() else read_rows(source)
    if not rows or "sweep" not in rows[0]:
        raise UserError(
            f"{source} holds no sweep's rows (its first row must say what the sweep is)"
        )
    identity, metrics = rows[0]["sweep"], rows[1:]
    check_identity(identity, str(source))
    if not metrics:
        raise UserError(f"no run of {source} is finished; there is nothing to draw yet")
    for place, row in enumerate(metrics, start=2):
        if fault := _fault_of(row, identity):
            raise UserError(f"{source} is damaged: row {place} {fault}")
    figure.parent.mkdir(parents=True, exist_ok=True)
    _draw(identity, metrics, figure)
    beside = figure.with_suffix(".jsonl")
    if beside.resolve() != source.resolve():
        write_atomically(beside, "".join(to_json(row) + "\n" for row in rows))
    return beside


def _fault_of(row: Row, identity: dict[str, Any]) -> str | None:
    """Why a row cannot be drawn; None where it can be."""
    if lacks := [key for key in ("policy", "seed", "step", "loss") if key not in row]:
        return f"lacks {', '.join(lacks)}"
    seed = row["seed"]
    if row["policy"] not in identity["policies"] or not (
        type(seed) is int and 0 <= seed < identity["seeds"]
    ):
        return "is of a policy or seed that the sweep does not have"
    return None if is_row(row) else "has a step, loss or casts that no run writes"


def check_figure(figure: Path, source: Path) -> None:
    """Refuse a figure that could not be drawn, or would overwrite what is no figure of a sweep.

    Raises:
        UserError: An unknown suffix, a folder, or rows of something else beside it.
    """
    if figure.suffix not in SUFFIXES:
        raise UserError(f"the figure is {str(figure)!r}; accepted: a file in {', '.join(SUFFIXES)}")
    beside = figure.with_suffix(".jsonl")
    for path in (figure, beside):
        if path.resolve() != source.resolve():  # rows that are only read may be no one's to write
            check_writable(path, "--figure")
    if figure.resolve() == source.resolve():
        raise UserError(f"the figure would overwrite its rows, {source}; name another --figure")
    if beside.exists() and beside.resolve() != source.resolve():
        with beside.open("rb") as file:
            if not file.readline().startswith(b'{"sweep":'):
                raise UserError(f"{beside} holds something else; name another --figure")


def _draw(identity: dict[str, Any], rows: list[Row], figure: Path) -> None:
    policies = [p for p in identity["policies"] if any(row["policy"] == p for row in rows)]
    picture, axes = plt.subplots(2, 3, figsize=(13, 7), layout="constrained")
    panels: list[tuple[Axes, str, Callable[[Row], float | None], bool]] = [
        (axes[0, 0], "training loss (nats a byte)", lambda row: number(row["loss"]), False),
        (axes[0, 1], "validation loss (nats a byte)", _validation, False),
        (axes[0, 2], "overflow: share clipped (0 at 1e-7)", _share("overflow"), True),
        (axes[1, 0], f"amax of {WATCHED}", _watched("amax"), True),
        (axes[1, 1], f"scale of {WATCHED}", _watched("scale"), True),
        (axes[1, 2], "underflow: share of non-zeros lost (0 at 1e-7)", _share("underflow"), True),
    ]
    for axis, title, value, logarithmic in panels:
        positive = False  # a logarithmic axis without a place for any value cannot be drawn
        for place, policy in enumerate(policies):
            chosen = [row for row in rows if row["policy"] == policy]
            colour = COLOURS[place % len(COLOURS)]
            line = LINES[place // len(COLOURS) % len(LINES)]
            curve = _curve(chosen, value)
            band(axis, curve, colour, line, policy)
            positive |= any(max(found) > 0 for found in curve.values())
        if logarithmic and positive:
            axis.set_yscale("log")
        axis.set_title(title, fontsize=11)
        axis.set_xlabel("step")
        axis.grid(alpha=0.25)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    longest = max(len(label) for label in labels)
    columns = max(1, min(len(labels), 120 // (longest + 6)))
    picture.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=11)
    picture.suptitle(
        f"Scaling policies on {identity['corpus']['name']}: mean over"
        f" {seeds_of(identity['seeds'])}, bands from the"
        " smallest to the largest",
        fontsize=13,
        parse_math=False,  # a file's name may hold a dollar sign
    )
    save(picture, figure)


def seeds_of(count: int) -> str:
    """So many seeds, in words.

    >>> seeds_of(1), seeds_of(3)
    ('1 seed', '3 seeds')
    """
    return f"{count} seed" + "s" * (count != 1)


def save(picture: Figure, figure: Path) -> None:
    """Write a picture and close it: the same rows give the same file.

    Left out are the date, version and random names that matplotlib writes.
    """
    unsaid = {".png": "Software", ".svg": "Date", ".pdf": "CreationDate"}[figure.suffix]
    try:
        with plt.rc_context({"svg.hashsalt": "fp8lab"}):
            picture.savefig(figure, dpi=110, metadata={unsaid: None})
    finally:
        plt.close(picture)


def _curve(rows: list[Row], value: Callable[[Row], float | None]) -> Curve:
    curve: Curve = defaultdict(list)
    for row in rows:
        found = value(row)
        if found is not None and np.isfinite(found):
            curve[row["step"]].append(found)
    return curve


def band(axis: Axes, curve: Curve, colour: str, line: str, label: str) -> None:
    steps = sorted(curve)
    means = [float(np.mean(curve[step])) for step in steps]
    marker = "o" if len(steps) < 4 else None  # a line of one point would not be seen
    axis.plot(steps, means, color=colour, linestyle=line, label=label, linewidth=1.6, marker=marker)
    low = [min(curve[step]) for step in steps]
    high = [max(curve[step]) for step in steps]
    axis.fill_between(steps, low, high, color=colour, alpha=0.18, linewidth=0)


def _validation(row: Row) -> float | None:
    return number(row["validation_loss"]) if "validation_loss" in row else None


def _share(key: str) -> Callable[[Row], float | None]:
    """The mean over all casts of a share, at least `SHOWN_AT_LEAST`."""

    def value(row: Row) -> float | None:
        casts = row.get("casts")
        if not casts:
            return None
        mean = float(np.mean([number(cast[key]) for cast in casts.values()]))
        return max(mean, SHOWN_AT_LEAST)

    return value


def _watched(key: str) -> Callable[[Row], float | None]:
    def value(row: Row) -> float | None:
        cast = (row.get("casts") or {}).get(WATCHED)
        return number(cast[key]) if cast else None

    return value
