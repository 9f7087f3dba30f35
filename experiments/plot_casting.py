"""From the rows of `bench_casting`: the table of `docs/performance.md`, and the roofline plot.

python -m fp8lab.experiments.plot_casting ROWS --figure figures/h200/casting.png
python -m fp8lab.experiments.plot_casting ROWS --document docs/performance.md
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from fp8lab.experiments.bench_rows import checked_casting
from fp8lab.experiments.commands import Parser, check_suffix, check_writable, exit_code
from fp8lab.experiments.documents import check_document, fill
from fp8lab.experiments.new_rows import NewRows, check_same
from fp8lab.records import Row, read_rows

OURS = "fp8lab"
COLOURS = {OURS: "#0072B2", "torch": "#D55E00", "torch.compile": "#009E73"}
MARKERS = {OURS: "o", "torch": "s", "torch.compile": "^"}
SECTION = "casts"


@dataclass(frozen=True)
class Goal:
    """What a kernel is to reach.

    Attributes:
        case: Its name in the rows.
        share: Of the device copy's bytes a second.
        times: As fast as this peer, so many times; None where only the share counts.
        microseconds: At most; instead of a share.
    """

    case: str
    share: float | None = None
    times: float | None = None
    microseconds: float | None = None

    def __str__(self) -> str:
        if self.microseconds is not None:
            return f"under {self.microseconds:g} us in a CUDA graph"
        text = f"{self.share:.2f} of copy"
        return text if self.times is None else f"{text}; {self.times:g} times torch"


GOALS = (
    Goal("cast with amax", share=0.98, times=3),
    Goal("cast with transpose and amax", share=0.93),
    Goal("blocks 1x128, both", share=0.85),
    Goal("blocks 128x128, both", share=0.85),
    Goal("MX, both", share=0.85),
    Goal("row-wise", share=0.90),
    Goal("dequantise", share=0.95),
    Goal("scale update", microseconds=20),
)


def large(rows: list[Row]) -> list[Row]:
    """The rows of large sizes: those that are no small size's, which have two clocks."""
    return [row for row in rows if "microseconds_in_graph" not in row]


def section(rows: list[Row]) -> str:
    """The text between the markers."""
    first = rows[0]
    packages = first["packages"]
    lines = [
        f"Measured on {first['date']} on one {first['device']} (torch {packages['torch']}, Triton"
        f" {packages['triton']}), with `{first['command']}`. A share is necessary bytes a second"
        " over what the device copy of the same repeat moves; medians of three interleaved repeats,"
        " smallest to largest in brackets.",
        "",
        "| kernel | goal | measured | met | peers |",
        "|---|---|---|---|---|",
    ]
    lines += [_goal_line(goal, large(rows)) for goal in GOALS]
    lines += ["", "Without a goal:", "", "| kernel | measured | peers |", "|---|---|---|"]
    stated = {goal.case for goal in GOALS}
    for row in large(rows):
        if row["kind"] == OURS and row["case"] not in stated:
            peers = _peers(row, large(rows))
            lines.append(f"| {row['case']} | {_measured(row)} | {peers} |")
    copy = next(row for row in rows if row["case"] == "copy")
    rate = copy["bytes"] / copy["microseconds"]["median"] / 1e3
    lines += ["", f"The device copy moved {rate:.0f} GB/s (read and written).", "", *_small(rows)]
    return "\n".join(lines)


def _goal_line(goal: Goal, rows: list[Row]) -> str:
    row = next((r for r in rows if r["case"] == goal.case and r["kind"] == OURS), None)
    if row is None:
        return f"| {goal.case} | {goal} | not measured | | |"
    if goal.microseconds is not None:
        met = row["microseconds"]["median"] < goal.microseconds
    else:
        met = row["share_of_copy"]["median"] >= (goal.share or 0)
    torchs = next((r for r in rows if r["case"] == goal.case and r["kind"] == "torch"), None)
    if goal.times is not None and torchs is not None:
        faster = torchs["microseconds"]["median"] / row["microseconds"]["median"]
        met = met and faster >= goal.times
    peers = _peers(row, rows)
    return f"| {goal.case} | {goal} | {_measured(row)} | {'yes' if met else 'no'} | {peers} |"


def _measured(row: Row) -> str:
    time = f"{row['microseconds']['median']:.1f} us"
    share = row.get("share_of_copy")
    if not share:
        spread = row["microseconds"]
        return f"{time} ({spread['smallest']:.1f} to {spread['largest']:.1f})"
    return f"{share['median']:.3f} ({share['smallest']:.3f} to {share['largest']:.3f}), {time}"


def _peers(row: Row, rows: list[Row]) -> str:
    told = []
    for peer in rows:
        if peer["case"] == row["case"] and peer["kind"] != OURS:
            times = peer["microseconds"]["median"] / row["microseconds"]["median"]
            told.append(f"{peer['kind']} {peer['microseconds']['median']:.1f} us ({times:.2f}x)")
    return "; ".join(told)


def _small(rows: list[Row]) -> list[str]:
    small = [row for row in rows if "microseconds_in_graph" in row]
    lines = [
        "Small sizes, microseconds a call: called one after the other, and in a CUDA graph.",
        "",
        "| elements | operation | " + " | ".join((OURS, "torch")) + " |",
        "|---|---|---|---|",
    ]
    for case, size in dict.fromkeys((row["case"], row["elements"]) for row in small):
        cells = []
        for kind in (OURS, "torch"):
            found = [
                r for r in small if (r["case"], r["elements"], r["kind"]) == (case, size, kind)
            ]
            cells += [
                f"{r['microseconds']['median']:.1f}, {r['microseconds_in_graph']['median']:.1f}"
                for r in found
            ] or [""]
        lines.append(f"| 2^{size.bit_length() - 1} | {case} | {' | '.join(cells)} |")
    return lines


def draw(rows: list[Row], figure: Path) -> None:
    """The roofline: elements a second against the bytes that an element needs, under the copy."""
    picture, axes = plt.subplots(1, 2, figsize=(13, 5.5), layout="constrained")
    copy = next(row for row in rows if row["case"] == "copy")
    rate = copy["bytes"] / copy["microseconds"]["median"] * 1e6
    _roofline(axes[0], [row for row in large(rows) if row["bytes"]], rate)
    _sizes(axes[1], [row for row in rows if row["case"] == "cast with amax"], rate)
    picture.suptitle(f"Casts on one {copy['device']}, {copy['date']}")
    figure.parent.mkdir(parents=True, exist_ok=True)
    # Without the version that matplotlib writes, the same rows give the same file.
    picture.savefig(figure, dpi=110, metadata={"Software": None})
    plt.close(picture)
    with NewRows(figure.with_suffix(".jsonl"), rows[0]) as beside:
        beside.add(*rows[1:])


def _roofline(axis: Axes, rows: list[Row], rate: float) -> None:
    needs = sorted({row["bytes"] / row["elements"] for row in rows})
    line = [needs[0] * 0.9, needs[-1] * 1.1]
    axis.plot(line, [rate / need / 1e9 for need in line], color="black", label="device copy")
    for kind, colour in COLOURS.items():
        chosen = [row for row in rows if row["kind"] == kind]
        axis.plot(
            [row["bytes"] / row["elements"] for row in chosen],
            [row["elements"] / row["microseconds"]["median"] / 1e3 for row in chosen],
            linestyle="none",
            marker=MARKERS[kind],
            markersize=7,
            color=colour,
            alpha=0.75,
            label=kind,
        )
    axis.set(xscale="log", yscale="log")
    axis.set_xlabel("necessary bytes an element")
    axis.set_ylabel("10^9 elements a second")
    axis.set_title(f"2^{rows[0]['elements'].bit_length() - 1} elements", fontsize=11)
    axis.set_xticks([2, 3, 4, 5, 6], ["2", "3", "4", "5", "6"])
    axis.minorticks_off()
    axis.grid(alpha=0.25)
    axis.legend()


def _sizes(axis: Axes, rows: list[Row], rate: float) -> None:
    for kind in (OURS, "torch"):
        chosen = sorted((r for r in rows if r["kind"] == kind), key=lambda row: row["elements"])
        for clock, style in (("microseconds", "-"), ("microseconds_in_graph", ":")):
            # Large sizes have one clock: the device's.
            points = [(r["elements"], r.get(clock) or r["microseconds"]) for r in chosen]
            axis.plot(
                [n for n, _ in points],
                [3 * n / time["median"] / 1e3 for n, time in points],
                style,
                marker=MARKERS[kind],
                color=COLOURS[kind],
                label=f"{kind}{', in a graph' if style == ':' else ''}",
            )
    axis.axhline(rate / 1e9, color="black")
    axis.set(xscale="log", yscale="log")
    axis.set_xlabel("elements")
    axis.set_ylabel("GB/s of necessary bytes")
    axis.set_title("cast of bfloat16 to E4M3 with amax", fontsize=11)
    axis.grid(alpha=0.25)
    axis.legend()


def main(given: list[str] | None = None) -> None:
    """The command line."""
    parser = Parser(description=__doc__)
    parser.add_argument("rows", type=Path, help="rows.jsonl of bench_casting")
    parser.add_argument("--figure", type=Path, help="where the plot goes; its rows go beside it")
    parser.add_argument("--document", type=Path, help="whose table is filled")
    arguments = parser.parse_args(given)
    if arguments.figure is not None:
        check_suffix(arguments.figure, (".png",), "--figure")
        check_writable(arguments.figure, "--figure")
        check_same(arguments.figure.with_suffix(".jsonl"), {"case": ""}, "--figure")
    if arguments.document is not None:
        check_document(arguments.document, SECTION)
    rows = checked_casting(read_rows(arguments.rows), arguments.rows)
    if arguments.figure is not None:
        draw(rows, arguments.figure)
    if arguments.document is not None:
        fill(arguments.document, SECTION, section(rows))


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
