"""The picture and the table of `preset_curves`, made from its rows alone."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from fp8lab.errors import UserError
from fp8lab.experiments.plot import COLOURS, Curve, band, save, seeds_of
from fp8lab.experiments.row_checks import (
    checker,
    is_count,
    is_list,
    is_number,
    is_table,
    is_text,
    is_truth,
)
from fp8lab.recipes import PRESETS
from fp8lab.records import Row, number

BASELINE = "bf16"
CONFIDENCE = 0.95


def _is_curve(value: Any) -> bool:
    """Whether it is pairs of step and loss, one or more."""
    return (
        is_list(value)
        and bool(value)
        and all(
            is_list(pair) and len(pair) == 2 and is_count(pair[0]) and is_number(pair[1])
            for pair in value
        )
    )


def _has_packages(value: Any) -> bool:
    return is_table(value) and is_table(value.get("packages"))


check_rows = checker(
    "preset_curves",
    {
        "preset_curves": lambda value: is_table(value) and is_truth(value.get("large")),
        "corpus": lambda value: is_table(value) and is_text(value.get("name")),
        "environment": lambda value: is_table(value) and is_text(value.get("device")),
        "model": lambda value: is_table(value) and is_count(value.get("context")),
        "steps": is_count,
        "batch": is_count,
    },
    {
        **dict.fromkeys(("preset", "initial", "batches", "date", "command"), is_text),
        **dict.fromkeys(("seed", "parameters", "steps", "skipped"), is_count),
        "validation": _is_curve,
        "validation_loss": is_number,
        "diverged": is_truth,
        "environment": _has_packages,
    },
    once=("preset", "seed"),
)
"""The rows of `preset_curves`, or a UserError that says what is wrong with them."""


@dataclass(frozen=True)
class Paired:
    """A preset's final validation losses minus BF16's of the same seeds.

    Attributes:
        differences: By seed; nats a byte.
    """

    differences: dict[int, float]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.differences.values())

    @property
    def half_width(self) -> float | None:
        """Of the interval around the mean: t s / sqrt(n), Student's t; None for fewer than two."""
        count = len(self.differences)
        if count < 2:
            return None
        deviation = statistics.stdev(self.differences.values())
        return student_t(CONFIDENCE, count - 1) * deviation / math.sqrt(count)


def student_t(probability: float, freedom: int) -> float:
    """The t that Student's |T| stays below with that probability.

    Found by bisection of the distribution's finite series for whole degrees of freedom (Abramowitz
    and Stegun, 26.7.3 and 26.7.4).

    Args:
        probability: 0 to below 1.
        freedom: Degrees of freedom, 1 and up.
    """
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        if _student_share(middle, freedom) < probability:
            low = middle
        else:
            high = middle
    return math.sqrt(freedom) * math.tan((low + high) / 2)


def _student_share(angle: float, freedom: int) -> float:
    """P(|T| < t) for t = sqrt(freedom) tan(angle)."""
    odd = freedom % 2
    term = math.sin(angle) * (math.cos(angle) if odd else 1.0)
    total = 0.0
    for power in range(2 + odd, freedom + 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (power - 1) / power
    return (angle + total) * 2 / math.pi if odd else total


def paired(rows: list[Row], preset: str) -> Paired:
    """A preset's pairs: runs with the same initial weights and batches that ended finite."""
    baseline = {row["seed"]: row for row in rows[1:] if row["preset"] == BASELINE}
    differences = {}
    for row in rows[1:]:
        other = baseline.get(row["seed"])
        if row["preset"] != preset or other is None:
            continue
        same = all(row[key] == other[key] for key in ("initial", "batches"))
        difference = number(row["validation_loss"]) - number(other["validation_loss"])
        if same and math.isfinite(difference):
            differences[row["seed"]] = difference
    return Paired(differences)


def section_name(large: bool) -> str:
    """Which section of a document the rows of that model fill."""
    return "preset curves" + ", large" * large


def section(rows: list[Row]) -> str:
    """What was run, and a line a preset, in Markdown."""
    _, first, *_ = _whole(rows)
    packages = first["environment"]["packages"]
    versions = ", ".join(
        f"{name} {packages[name]}" for name in ("torch", "triton") if packages.get(name)
    )
    head = ("preset", "final validation loss", "minus BF16 (95 % interval)", "pairs")
    table: list[tuple[str, ...]] = [(*head, "diverged", "skipped steps"), ("---",) * 6]
    table += [_line(rows, preset) for preset in _presets(rows)]
    return "\n".join(
        [
            f"{_sizes(rows)}; {_seeds(rows)}; {first['date']}, {versions};"
            f" `{first['command']}`. Nats a byte.",
            "",
            *("| " + " | ".join(line) + " |" for line in table),
        ]
    )


def _line(rows: list[Row], preset: str) -> tuple[str, ...]:
    mine = [row for row in rows[1:] if row["preset"] == preset]
    losses = [loss for row in mine if math.isfinite(loss := number(row["validation_loss"]))]
    mean = f"{statistics.fmean(losses):.4f}" if losses else "not finite"
    pairs = paired(rows, preset)
    difference, count = "", ""
    if preset != BASELINE:
        count = f"{len(pairs.differences)} of {len(mine)}"
        difference = f"{pairs.mean:+.4f}" if pairs.differences else "no pair"
        half = pairs.half_width
        if half is not None:
            difference += f" ({pairs.mean - half:+.4f} to {pairs.mean + half:+.4f})"
        elif pairs.differences:
            difference += " (one pair: no interval)"
    diverged = f"{sum(row['diverged'] for row in mine)} of {len(mine)}"
    return preset, mean, difference, count, diverged, str(sum(row["skipped"] for row in mine))


def draw(rows: list[Row], figure: Path) -> None:
    """Three panels: validation loss, its difference from BF16 over steps, and at the end.

    Raises:
        UserError: No run is finished.
    """
    _whole(rows)
    picture, (losses, gaps, ends) = plt.subplots(
        1, 3, figsize=(16, 5), layout="constrained", width_ratios=(5, 5, 4)
    )
    presets = _presets(rows)
    colours = dict(zip(presets, COLOURS * len(presets), strict=False))
    for preset in presets:
        mine = [row for row in rows[1:] if row["preset"] == preset]
        curves = [dict(row["validation"]) for row in mine]
        band(losses, _curve(curves), colours[preset], "-", preset)
        if preset != BASELINE:
            gap = _curve(_gaps(rows, preset))
            band(gaps, gap, colours[preset], "-", preset)
    gaps.axhline(0, color="black", linewidth=0.8)
    _ends(ends, rows, [preset for preset in presets if preset != BASELINE], colours)
    titles = ("validation loss (nats a byte)", "minus BF16's, of the same seed")
    for axis, title in zip((losses, gaps), titles, strict=True):
        axis.set_title(title, fontsize=11)
        axis.set_xlabel("step")
        axis.grid(alpha=0.25)
    handles, labels = losses.get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=11)
    picture.suptitle(
        f"{_sizes(rows)}: mean over {_seeds(rows)}, bands from the smallest to the largest"
    )
    save(picture, figure)


def _ends(axis: Axes, rows: list[Row], presets: list[str], colours: dict[str, str]) -> None:
    """A line a preset: the single seeds, their mean and its interval."""
    intervals = False
    for place, preset in enumerate(presets):
        pairs = paired(rows, preset)
        if not pairs.differences:
            continue
        seeds = list(pairs.differences.values())
        axis.plot(seeds, [place] * len(seeds), "o", color=colours[preset], markersize=5)
        half = pairs.half_width
        intervals = intervals or half is not None
        axis.errorbar(
            pairs.mean, place, xerr=half, fmt="D", color="black", markersize=5, capsize=4, zorder=3
        )
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set_yticks(range(len(presets)), presets)
    axis.set_ylim(max(len(presets), 1) - 0.5, -0.5)
    axis.set_xlabel("nats a byte")
    axis.locator_params(axis="x", nbins=5)
    mean = "mean, 95 % interval" if intervals else "one seed, no interval"
    axis.set_title(f"at the last step ({mean})", fontsize=11)
    axis.grid(alpha=0.25)


def _gaps(rows: list[Row], preset: str) -> list[dict[int, float]]:
    """Of each pair: by step, the preset's validation loss minus BF16's."""
    found = []
    for seed in paired(rows, preset).differences:
        own, other = (
            dict(row["validation"])
            for name in (preset, BASELINE)
            for row in rows[1:]
            if (row["preset"], row["seed"]) == (name, seed)
        )
        found.append(
            {step: number(own[step]) - number(other[step]) for step in own if step in other}
        )
    return found


def _curve(runs: list[dict[int, float]]) -> Curve:
    curve: Curve = defaultdict(list)
    for run in runs:
        for step, value in run.items():
            if math.isfinite(number(value)):
                curve[step].append(number(value))
    return curve


def _whole(rows: list[Row]) -> list[Row]:
    if len(rows) < 2:
        raise UserError("no run is finished; there is nothing to draw yet")
    return rows


def _sizes(rows: list[Row]) -> str:
    """The model, the tokens of a run, the device."""
    head = rows[0]
    tokens = head["steps"] * head["batch"] * head["model"]["context"]
    device = head["environment"]["device"]
    return (
        f"{_short(rows[1]['parameters'])} parameters, {_short(tokens)} tokens of"
        f" {head['corpus']['name']}, {'a CPU' if device == 'cpu' else device}"
    )


def _seeds(rows: list[Row]) -> str:
    return seeds_of(len({row["seed"] for row in rows[1:]}))


def _short(count: int) -> str:
    """A number in thousands or millions.

    >>> _short(122_400_000), _short(470_528)
    ('122.4M', '471k')
    """
    return f"{count / 1e6:.1f}M" if count >= 1e6 else f"{count / 1e3:.0f}k"


def _presets(rows: list[Row]) -> list[str]:
    """In the order of the recipes, whatever order they were run in; others after them."""
    names = dict.fromkeys(row["preset"] for row in rows[1:])
    return [name for name in PRESETS if name in names] + sorted(set(names) - set(PRESETS))
