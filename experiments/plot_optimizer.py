"""The picture of the optimizer's benchmark, drawn from its rows alone."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from fp8lab.errors import UserError
from fp8lab.records import Row

PREDICTED, MEASURED, PEER = "#E69F00", "#0072B2", "#999999"


def draw(rows: list[Row], figure: Path) -> None:
    """Two panels: share of the copy's rate by kernel, and time a step by state format.

    Args:
        rows: What `bench_optimizer` measured.
        figure: Where the picture goes.

    Raises:
        UserError: No measurements among the rows.
    """
    measured = [row for row in rows if "group" in row]
    kernels = [row for row in measured if row["group"].startswith(("norm", "AdamW"))]
    states = [row for row in measured if row["group"].startswith(("states", "sharded"))]
    if not kernels or not states:
        raise UserError("the rows hold no measurements to draw; run the benchmark first")
    picture, (left, right) = plt.subplots(1, 2, figsize=(14, 7), layout="constrained")
    _shares(left, kernels)
    _times(right, states)
    device = rows[0].get("environment", {}).get("device", "")
    picture.suptitle(f"The optimizer's kernels on {device}: medians of interleaved rounds")
    picture.savefig(figure, dpi=110, metadata={"Software": None})
    plt.close(picture)


def _shares(axis: Axes, rows: list[Row]) -> None:
    labels = [f"{row['group']}\n{row['name']}" for row in rows]
    colours = [MEASURED if row["name"].startswith("fp8lab") else PEER for row in rows]
    bars = axis.barh(labels, [row["share_of_copy"] for row in rows], color=colours)
    axis.bar_label(bars, fmt="%.2f", padding=2, fontsize=8)
    axis.margins(x=0.1)
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set_xlabel("share of the device copy's rate in the same run")
    axis.tick_params(axis="y", labelsize=7)
    axis.invert_yaxis()


def _times(axis: Axes, rows: list[Row]) -> None:
    places = range(len(rows))
    labels = [
        f"{row['group'].split(':')[0]}: {row['name']} ({row['bytes_per_element']:.4g} B)"
        for row in rows
    ]
    predicted = [row["elements"] * row["bytes_per_element"] / row["copy"] / 1e6 for row in rows]
    axis.barh([p - 0.2 for p in places], predicted, 0.4, color=PREDICTED, label="bytes / copy rate")
    measured = [row["milliseconds"] for row in rows]
    bars = axis.barh([p + 0.2 for p in places], measured, 0.4, color=MEASURED, label="measured")
    axis.bar_label(bars, fmt="%.2f", padding=2, fontsize=8)
    axis.set_yticks(list(places), labels, fontsize=7)
    axis.margins(x=0.1)
    axis.set_xlabel("milliseconds a step")
    axis.invert_yaxis()
    axis.legend(loc="lower right")
