"""The picture and the table of `resume_incident`, made from its rows alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from fp8lab.records import Row, number

COLOURS = {
    "exact": "#000000",
    "one ulp": "#999999",
    "no amax history": "#0072B2",
    "no scales": "#56B4E9",
    "no scales, no history": "#D55E00",
    "no moments' scales": "#CC79A7",
    "no loss scaler": "#E69F00",
    "no random state": "#009E73",
}
SMOOTHED = 10  # steps that a point of the gap is the mean of
EARLY = 20  # steps after the resume that are observed and shown apart


def gaps(rows: list[Row], condition: str, variant: str) -> Any:
    """Loss minus the continuous run's: (seeds, steps), float64."""
    own, whole = (
        _values(_chosen(rows, condition, name), "loss") for name in (variant, "continuous")
    )
    return own - whole


def table(rows: list[Row]) -> str:
    """A line a condition and variant, in Markdown.

    The mean gap of the loss over the first steps and over the second half; the gap of the
    validation loss after the last step, with its range over the seeds; steps whose loss differs in
    bits; overflow and underflow over the observed steps, and how many times the continuous run's.
    """
    head = (
        "condition",
        "missing",
        f"gap, steps 1 to {EARLY}",
        "gap, second half",
        "validation gap (range over seeds)",
        "steps that differ",
        "overflow",
        "underflow",
    )
    lines = [head, ("---",) * len(head)]
    for condition in _names(rows, "condition"):
        for variant in _names(rows, "variant")[1:]:
            if _chosen(rows, condition, variant):
                lines.append((condition, variant, *_measures(rows, condition, variant)))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _measures(rows: list[Row], condition: str, variant: str) -> tuple[str, ...]:
    gap = gaps(rows, condition, variant)
    ends = [
        np.array([number(row["validation_loss"]) for row in _chosen(rows, condition, name)])
        for name in (variant, "continuous")
    ]
    end = ends[0] - ends[1]
    return (
        f"{gap[:, :EARLY].mean():+.4f}",
        f"{gap[:, gap.shape[1] // 2 :].mean():+.4f}",
        f"{end.mean():+.4f} ({end.min():+.4f} to {end.max():+.4f})",
        f"{(gap != 0).sum(1).max()} of {gap.shape[1]}",
        *(_times(rows, condition, variant, key) for key in ("overflow", "underflow")),
    )


def _times(rows: list[Row], condition: str, variant: str, key: str) -> str:
    """The share over the observed steps, and how many times it is the continuous run's."""
    own, whole = (
        _values(_chosen(rows, condition, name), key).mean() for name in (variant, "continuous")
    )
    return f"{own:.1e} ({own / whole:.2f} times)" if whole > 0 else f"{own:.1e} (it had 0)"


def draw(rows: list[Row], figure: Path) -> None:
    """A row of panels a condition: gap over steps, scale trajectories, underflow."""
    conditions = _names(rows, "condition")
    picture, axes = plt.subplots(
        len(conditions), 3, figsize=(14, 3.4 * len(conditions)), layout="constrained", squeeze=False
    )
    for condition, panels in zip(conditions, axes, strict=True):
        for variant, colour in COLOURS.items():
            chosen = _chosen(rows, condition, variant)
            if not chosen:
                continue
            gap = np.abs(gaps(rows, condition, variant)).mean(0)
            width = min(SMOOTHED, len(gap))
            steps = np.arange(1, len(gap) + 1)
            smooth = np.convolve(gap, np.ones(width) / width, mode="valid")
            panels[0].plot(steps[width - 1 :], smooth, color=colour, label=variant)
            seen = chosen[0]["observed"]
            panels[1].plot(seen, _values(chosen, "scale")[0], color=colour)
            panels[2].plot(seen, _values(chosen, "underflow").mean(0), color=colour)
        _finish(panels, condition)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=10)
    picture.suptitle("A resumed run that lacks a part of its state, against the run that went on")
    picture.savefig(figure, dpi=110, metadata={"Software": None})
    plt.close(picture)


def _finish(panels: list[Axes], condition: str) -> None:
    titles = (
        f"{condition}: |gap| of the loss (mean of {SMOOTHED} steps; 0 at 1e-7)",
        "scale of the output gradient (median, seed 0)",
        "underflow, mean over the casts",
    )
    panels[0].set_yscale("symlog", linthresh=1e-7)
    panels[1].set_yscale("log")
    for axis, title in zip(panels, titles, strict=True):
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("steps after the resume")
        axis.grid(alpha=0.25)


def _chosen(rows: list[Row], condition: str, variant: str) -> list[Row]:
    return [r for r in rows if r.get("condition") == condition and r["variant"] == variant]


def _values(chosen: list[Row], key: str) -> Any:
    return np.array([[number(value) for value in row[key]] for row in chosen])


def _names(rows: list[Row], key: str) -> list[str]:
    return list(dict.fromkeys(row[key] for row in rows if key in row))
