"""The picture and the table of `fallback_spike`, made from its rows alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from fp8lab.errors import UserError
from fp8lab.experiments.plot import save
from fp8lab.experiments.row_checks import (
    are_numbers,
    checker,
    is_count,
    is_list,
    is_number,
    is_table,
    is_text,
    one_of,
)
from fp8lab.records import Row, number

COLOURS = {"bf16": "#000000", "one ulp": "#999999", "fp8": "#D55E00", "fallback": "#0072B2"}
LABELS = {
    "bf16": "BF16",
    "one ulp": "FP8, one weight moved by an ulp",
    "fp8": "FP8",
    "fallback": "FP8 with fallback",
}
ROLES = {"input": "#009E73", "weight": "#E69F00", "grad_output": "#CC79A7"}


def _is_event(value: Any) -> bool:
    return (
        is_table(value)
        and is_text(value.get("layer"))
        and is_count(value.get("step"))
        and value.get("role") in list(ROLES)
        and value.get("to") in ("bf16", "fp8")
    )


def _is_settings(value: Any) -> bool:
    spike: Any = value.get("spike") if is_table(value) else None
    whole = is_list(spike) and len(spike) == 2 and all(map(is_count, spike))
    return whole and is_number(value.get("factor"))


check_rows = checker(
    "fallback_spike",
    {"fallback_spike": _is_settings},
    {
        "condition": is_text,
        "variant": one_of(*COLOURS),
        "seed": is_count,
        "loss": lambda value: are_numbers(value) and bool(value),
        "places": lambda value: is_count(value) and value > 0,
        "validation": lambda value: is_table(value) and are_numbers([*value.values()]),
        "validation_loss": is_number,
        "events": lambda value: is_list(value) and all(map(_is_event, value)),
    },
    once=("condition", "variant", "seed"),
)
"""The rows of `fallback_spike`, or a UserError that says what is wrong with them."""


def table(rows: list[Row]) -> str:
    """A line a condition and variant, in Markdown.

    The validation loss after the last step, its mean and each seed's; the largest loss of a
    batch, and the mean one, from the spike on; falls and returns a run; the share of layers, roles
    and steps in BF16.
    """
    losses = ("validation loss (seeds)", "largest loss", "mean loss (seeds)")
    head = ("scales", "variant", *losses, "falls", "returns", "in BF16")
    lines = [head, ("---",) * len(head)]
    first = rows[0]["fallback_spike"]["spike"][0]
    for condition in _conditions(rows):
        for variant in COLOURS:
            chosen = _chosen(rows, condition, variant)
            if not chosen:
                continue
            final = [number(row["validation_loss"]) for row in chosen]
            # A run that ended before has its last loss there.
            kept = [row["loss"][first - 1 :] or row["loss"][-1:] for row in chosen]
            after = [[number(loss) for loss in losses] for losses in kept]
            moves = [
                np.mean([sum(e["to"] == to for e in row["events"]) for row in chosen])
                for to in ("bf16", "fp8")
            ]
            share = np.mean([_share(row) for row in chosen])
            lines.append(
                (
                    condition,
                    LABELS[variant],
                    _shown(final),
                    f"{max(map(max, after)):.2f}",
                    _shown([float(np.mean(losses)) for losses in after]),
                    *(f"{count:.0f}" for count in moves),
                    f"{share:.1%}" if variant == "fallback" else "-",
                )
            )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _shown(values: list[float]) -> str:
    return f"{np.mean(values):.4f} ({', '.join(f'{value:.4f}' for value in values)})"


def draw(rows: list[Row], figure: Path) -> None:
    """A column a condition: losses over steps, and which roles were in BF16 when (seed 0).

    Raises:
        UserError: There is no run yet of a condition with the fallback.
    """
    conditions = _conditions(rows)
    if not conditions or not all(_chosen(rows, own, "fallback") for own in conditions):
        raise UserError("runs are missing; give the command without --redraw first")
    picture, axes = plt.subplots(
        2,
        len(conditions),
        figsize=(6.5 * len(conditions), 8),
        layout="constrained",
        squeeze=False,
        sharex=True,
        height_ratios=(3, 2),
    )
    spike = rows[0]["fallback_spike"]["spike"]
    for place, condition in enumerate(conditions):
        _losses(axes[0, place], rows, condition)
        _strip(axes[1, place], _chosen(rows, condition, "fallback")[0])
        for axis in axes[:, place]:
            axis.axvspan(spike[0] - 0.5, spike[1] + 0.5, color="#999999", alpha=0.3, lw=0)
        axes[1, place].set_xlabel("step")
    axes[0, 0].set_ylabel("loss, nats a byte")
    picture.suptitle(
        f"A learning rate {rows[0]['fallback_spike']['factor']:g} times too high (grey):"
        " losses, and what the fallback moved to BF16"
    )
    save(picture, figure)


def _losses(axis: Axes, rows: list[Row], condition: str) -> None:
    """The loss of each step, mean of the seeds, and validation losses of every seed as dots."""
    for variant, colour in COLOURS.items():
        chosen = _chosen(rows, condition, variant)
        if not chosen:
            continue
        length = min(len(row["loss"]) for row in chosen)
        losses = np.array([[number(v) for v in row["loss"][:length]] for row in chosen])
        final = np.mean([number(row["validation_loss"]) for row in chosen])
        label = f"{LABELS[variant]}: validation {final:.3f}"
        axis.plot(np.arange(1, length + 1), losses.mean(0), color=colour, lw=1, label=label)
        for row in chosen:
            steps = [int(step) for step in row["validation"]]
            values = [number(value) for value in row["validation"].values()]
            axis.plot(steps, values, ".", color=colour, ms=5)
    axis.set_title(condition)
    axis.grid(alpha=0.25)
    axis.legend(fontsize=9)


def _strip(axis: Axes, row: Row) -> None:
    """A bar for each stretch that a role of a layer was in BF16."""
    stretches = _stretches(row)
    names = list(dict.fromkeys(place for place, _, _ in stretches))
    names.sort(key=lambda place: (place[0], list(ROLES).index(place[1])))
    for place, start, end in stretches:
        axis.barh(
            names.index(place), end - start, left=start + 0.5, color=ROLES[place[1]], height=0.8
        )
    axis.set_yticks(range(len(names)), [f"{layer} {role}" for layer, role in names], fontsize=6)
    axis.set_ylim(max(len(names), 1) - 0.5, -0.5)
    axis.set_title("roles in BF16 (seed 0)", fontsize=9)


def _stretches(row: Row) -> list[tuple[tuple[str, str], int, int]]:
    """(layer and role, last step before, last step in BF16)."""
    since: dict[tuple[str, str], int] = {}
    found = []
    for event in row["events"]:
        place = event["layer"], event["role"]
        if event["to"] == "bf16":
            since[place] = event["step"]
        else:
            found.append((place, since.pop(place), event["step"]))
    return found + [(place, start, len(row["loss"])) for place, start in since.items()]


def _share(row: Row) -> float:
    """Of layers, roles and steps: how much was in BF16."""
    moved = sum(end - start for _, start, end in _stretches(row))
    return moved / (int(row["places"]) * len(row["loss"]))


def _conditions(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(row["condition"] for row in rows if row.get("condition")))


def _chosen(rows: list[Row], condition: str, variant: str) -> list[Any]:
    """BF16 has no condition: it is the same under each."""
    return [
        row for row in rows if row.get("variant") == variant and row["condition"] in (condition, "")
    ]
