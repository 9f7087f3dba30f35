"""The ranks, the picture and the table of `layer_tolerance`, made from its rows alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm

from fp8lab.errors import UserError
from fp8lab.experiments.plot import save
from fp8lab.experiments.row_checks import checker, is_count, is_number, is_table, is_text
from fp8lab.records import Row, number

ALL = "all"
MEASURES = {
    "loss_difference": "|difference of the loss|, nats a byte",
    "gradient_error": "relative error of all gradients",
    "own_gradient_error": "relative error of its own gradient",
}
SHOWN = 12  # layers of a recipe in the table: those with the largest gradient errors
SMALLEST = 1e-7  # what a colour is least


check_rows = checker(
    "layer_tolerance",
    {
        "layer_tolerance": lambda value: (
            is_table(value) and is_count(value.get("batches")) and is_table(value.get("training"))
        ),
        "bf16": lambda value: (
            is_table(value) and is_count(value.get("parameters")) and is_number(value.get("loss"))
        ),
        "environment": lambda value: is_table(value) and is_text(value.get("device")),
    },
    {
        **dict.fromkeys(("layer", "recipe", "role"), is_text),
        **dict.fromkeys(("loss", *MEASURES), is_number),
    },
    once=("layer", "recipe", "role"),
)
"""The rows of `layer_tolerance`, or a UserError that says what is wrong with them."""


def ranked(rows: list[Row]) -> list[Row]:
    """The rows with `loss_rank` and `gradient_rank` within their recipe and role: 1 is worst.

    Losses by magnitude, since a difference of either sign is an error; what is not a number is
    worst.
    """
    found = [dict(row) for row in rows]
    for rank, key in (("loss_rank", "loss_difference"), ("gradient_rank", "gradient_error")):
        for group in _groups(found).values():
            group.sort(key=lambda row: -_size(row, key))
            for place, row in enumerate(group, start=1):
                row[rank] = place
    return found


def table(rows: list[Row]) -> str:
    """In Markdown, a line for each of the `SHOWN` most sensitive layers of a recipe."""
    head = (
        "recipe",
        "rank",
        "layer",
        "gradient error",
        "own gradient error",
        "loss difference (rank)",
    )
    roles = [role for role in _distinct(rows, "role") if role != ALL]
    lines = [(*head, *(f"{role} alone" for role in roles)), ("---",) * (len(head) + len(roles))]
    groups = _groups(rows)
    for (recipe, role), group in groups.items():
        if role != ALL:
            continue
        for row in sorted(group, key=lambda row: int(row["gradient_rank"]))[:SHOWN]:
            alone = [
                _shown(own["gradient_error"])
                for other in roles
                for own in groups.get((recipe, other), [])
                if own["layer"] == row["layer"]
            ]
            lines.append(
                (
                    recipe,
                    str(row["gradient_rank"]),
                    f"`{row['layer']}`",
                    _shown(row["gradient_error"]),
                    _shown(row["own_gradient_error"]),
                    f"{number(row['loss_difference']):+.1e} ({row['loss_rank']})",
                    *alone,
                )
            )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def draw(rows: list[Row], figure: Path) -> None:
    """Heat maps over kinds of layers and blocks: a line a recipe and role, a column a measure.

    Raises:
        UserError: No layer is scanned.
    """
    groups = _groups(rows)
    if not groups:
        raise UserError("no layer is scanned yet; give the command without --redraw first")
    kinds, places = _axes_of(rows)
    height = 0.9 + 0.28 * len(kinds)
    picture, axes = plt.subplots(
        len(groups),
        len(MEASURES),
        figsize=(15, 0.8 + height * len(groups)),
        layout="constrained",
        squeeze=False,
    )
    for column, (key, title) in enumerate(MEASURES.items()):
        sizes = [_size(row, key) for row in rows if key in row]
        finite = [size for size in sizes if math.isfinite(size)] or [SMALLEST]
        low, high = max(min(finite), SMALLEST), max(*finite, SMALLEST * 10)
        norm = LogNorm(min(low, high / 10), high)
        for (recipe, role), axis in zip(groups, axes[:, column], strict=True):
            image = _heat(axis, groups[recipe, role], key, (kinds, places), norm)
            what = recipe if role == ALL else f"{recipe}, {role} alone"
            axis.set_title(f"{what}: {title}", fontsize=8)
        picture.colorbar(image, ax=axes[:, column], shrink=0.8, aspect=30)
    picture.suptitle(_title(rows), fontsize=11)
    save(picture, figure)


def _heat(
    axis: Axes, group: list[Row], key: str, sides: tuple[list[str], list[str]], norm: LogNorm
) -> Any:
    """One heat map; what is not a number is red, what there is not is white."""
    kinds, places = sides
    grid = np.full((len(kinds), len(places)), np.nan)
    for row in group:
        kind, place = _split(row["layer"])
        grid[kinds.index(kind), places.index(place)] = max(_size(row, key), SMALLEST)
    colours = plt.get_cmap("viridis").with_extremes(over="#D55E00")
    image = axis.imshow(grid, aspect="auto", cmap=colours, norm=norm)
    axis.set_yticks(range(len(kinds)), kinds, fontsize=8)
    axis.set_xticks(range(len(places)), places, fontsize=7)
    return image


def _title(rows: list[Row]) -> str:
    head = rows[0]
    settings, base = head["layer_tolerance"], head["bf16"]
    return (
        f"One layer alone in FP8, the rest BF16: {base['parameters'] / 1e6:.1f}M parameters on"
        f" {head['environment']['device']}, {settings['batches']} batches; loss in BF16"
        f" {number(base['loss']):.3f}"
    )


def _split(layer: str) -> tuple[str, str]:
    """Kind and block of a layer: blocks.3.qkv is ("qkv", "3"), head is ("head", "")."""
    parts = layer.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    if not numbers:
        return layer, ""
    first = numbers[0]
    return ".".join(parts[first + 1 :]) or ".".join(parts[:first]), parts[first]


def _axes_of(rows: list[Row]) -> tuple[list[str], list[str]]:
    split = [_split(layer) for layer in _distinct(rows, "layer")]
    kinds = list(dict.fromkeys(kind for kind, _ in split))
    places = sorted({place for _, place in split}, key=lambda place: (place == "", place.zfill(6)))
    return kinds, places


def _groups(rows: list[Row]) -> dict[tuple[str, str], list[Row]]:
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if "layer" in row:
            groups.setdefault((row["recipe"], row["role"]), []).append(row)
    return groups


def _size(row: Row, key: str) -> float:
    size = abs(number(row[key]))
    return math.inf if math.isnan(size) else size


def _shown(value: float | str) -> str:
    return f"{number(value):.2e}"


def _distinct(rows: list[Row], key: str) -> list[str]:
    return list(dict.fromkeys(row[key] for row in rows if key in row))
