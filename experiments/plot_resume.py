"""The picture and the table of `resume_incident`, made from its rows alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from fp8lab.experiments.plot import save
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
SMOOTHED = 10  # steps that a point of |gap| is the mean of
LONG = 50  # the same of the gap with its sign, where batches should cancel
EARLY = 20  # steps after the resume that are observed and shown apart
FIRST = 300  # steps of which overflow and underflow are shown
SHOWN_AT_LEAST = 1e-7  # a share of 0 has no place on a logarithmic axis


def gaps(rows: list[Row], condition: str, variant: str) -> Any:
    """Loss minus the continuous run's: (seeds, steps), float64."""
    own, whole = (_values(chosen, "loss") for chosen in _pairs(rows, condition, variant))
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
        for variant in _names(rows, "variant"):
            if _pairs(rows, condition, variant)[0] and variant != "continuous":
                lines.append((condition, variant, *_measures(rows, condition, variant)))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _measures(rows: list[Row], condition: str, variant: str) -> tuple[str, ...]:
    gap = gaps(rows, condition, variant)
    ends = [
        np.array([number(row["validation_loss"]) for row in chosen])
        for chosen in _pairs(rows, condition, variant)
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
    own, whole = (_values(chosen, key).mean() for chosen in _pairs(rows, condition, variant))
    return f"{own:.1e} ({own / whole:.2f} times)" if whole > 0 else f"{own:.1e} (it had 0)"


def draw(rows: list[Row], figure: Path) -> None:
    """A row of panels a condition: |gap| and gap over steps, scales, overflow and underflow."""
    conditions = _names(rows, "condition")
    picture, axes = plt.subplots(
        len(conditions), 4, figsize=(19, 3.6 * len(conditions)), layout="constrained", squeeze=False
    )
    for condition, panels in zip(conditions, axes, strict=True):
        for variant, colour in COLOURS.items():
            chosen, _ = _pairs(rows, condition, variant)
            if chosen:
                _lines(panels, chosen, gaps(rows, condition, variant), variant, colour)
        _finish(panels, condition)
    named = {
        label: handle
        for handles, labels in (panels[0].get_legend_handles_labels() for panels in axes)
        for handle, label in zip(handles, labels, strict=True)
    }
    picture.legend(
        named.values(), named.keys(), loc="outside lower center", ncols=len(COLOURS), fontsize=10
    )
    picture.suptitle("A resumed run that lacks a part of its state, against the run that went on")
    figure.parent.mkdir(parents=True, exist_ok=True)
    save(picture, figure)


def _lines(panels: list[Axes], chosen: list[Row], gap: Any, variant: str, colour: str) -> None:
    """A variant's lines; `gap` is (seeds, steps)."""
    steps, means = _smoothed(np.abs(gap), SMOOTHED)
    panels[0].plot(steps, means.mean(0), color=colour, label=variant, linewidth=1.3)
    steps, means = _smoothed(gap, LONG)
    panels[1].plot(steps, means.mean(0), color=colour, linewidth=1.3)
    panels[1].fill_between(steps, means.min(0), means.max(0), color=colour, alpha=0.08, linewidth=0)
    seen = np.array(chosen[0]["observed"])
    panels[2].plot(seen, _values(chosen, "scale")[0], color=colour)
    early = seen <= FIRST
    for key, style in (("underflow", "-"), ("overflow", ":")):
        share = np.maximum(_values(chosen, key).mean(0), SHOWN_AT_LEAST)
        panels[3].plot(seen[early], share[early], style, color=colour, linewidth=1.2)


def _smoothed(gap: Any, width: int) -> tuple[Any, Any]:
    """The last step of each run of `width` steps, and the means over these: (seeds, runs)."""
    width = min(width, gap.shape[1])
    means = [np.convolve(own, np.ones(width) / width, mode="valid") for own in gap]
    return np.arange(width, gap.shape[1] + 1), np.array(means)


def _finish(panels: list[Axes], condition: str) -> None:
    titles = (
        f"{condition}: |gap| of the loss (mean of {SMOOTHED} steps)",
        f"gap of the loss (mean of {LONG} steps; bands: seeds)",
        "scale of the output gradient (median, seed 0)",
        f"underflow (lines), overflow (dots), first {FIRST} steps",
    )
    panels[0].set_yscale("symlog", linthresh=1e-7)
    panels[1].set_yscale("symlog", linthresh=1e-3)
    panels[2].set_yscale("log")
    panels[3].set_yscale("log")
    for axis, title in zip(panels, titles, strict=True):
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("steps after the resume")
        axis.grid(alpha=0.25)


def _pairs(rows: list[Row], condition: str, variant: str) -> tuple[list[Row], list[Row]]:
    """The rows of a variant, and beside each the continuous run's of its seed, where both are."""
    whole = {row["seed"]: row for row in _chosen(rows, condition, "continuous")}
    own = [row for row in _chosen(rows, condition, variant) if row["seed"] in whole]
    return own, [whole[row["seed"]] for row in own]


def _chosen(rows: list[Row], condition: str, variant: str) -> list[Row]:
    return [r for r in rows if r.get("condition") == condition and r["variant"] == variant]


def _values(chosen: list[Row], key: str) -> Any:
    return np.array([[number(value) for value in row[key]] for row in chosen])


def _names(rows: list[Row], key: str) -> list[str]:
    return list(dict.fromkeys(row[key] for row in rows if key in row))
