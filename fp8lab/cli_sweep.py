"""`fp8lab sweep` and `fp8lab plot`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from fp8lab.cli_options import add_out, add_training_options, stated, training_config
from fp8lab.recipes import PRESETS, recipe_named


def add_sweep(commands: Any) -> None:
    """Add `sweep` to the commands."""
    sweep = commands.add_parser(
        "sweep",
        help="train with each scaling policy and compare",
        description="Train with each policy and seed, print a table and draw a figure. A sweep that"
        " was interrupted goes on where it stopped when the same command is given again.",
    )
    sweep.add_argument(
        "--policies",
        metavar="A,B",
        help=f"policies, separated by commas: {', '.join(PRESETS)}, with settings after colons as"
        " in delayed:history=64:margin=1 (default: bf16, current, delayed, blockwise, and static"
        " with and without a scale that fits)",
    )
    sweep.add_argument("--seeds", type=int, metavar="N", help="seeds a policy (default 3)")
    add_training_options(sweep)
    sweep.add_argument(
        "--jobs", type=int, default=-1, metavar="N", help="runs at a time (-1: cores)"
    )
    add_out(sweep, "runs/sweep")
    sweep.add_argument(
        "--figure",
        type=Path,
        metavar="FILE",
        help="the figure; its rows go beside it (default: in figures/, named as --out)",
    )
    sweep.set_defaults(
        run=_sweep, after_interrupt="Finished runs are kept; give the same command to go on."
    )


def add_plot(commands: Any) -> None:
    """Add `plot` to the commands."""
    plot = commands.add_parser(
        "plot", help="draw a sweep's figure again", description="Draw a figure from rows alone."
    )
    plot.add_argument(
        "runs", type=Path, metavar="RUNS", help="a sweep's folder, or a .jsonl of rows"
    )
    plot.add_argument("--figure", type=Path, metavar="FILE", help="(default: beside the rows)")
    plot.set_defaults(run=_plot, after_interrupt="")


def _sweep(given: argparse.Namespace) -> int:
    from fp8lab.experiments.plot import check_figure, draw
    from fp8lab.experiments.sweep import DEFAULT_POLICIES, SweepConfig, run_sweep

    figure = given.figure
    if figure is None:
        figure = Path("figures") / f"{given.out.resolve().name}.png"
    check_figure(figure, given.out)
    policies = DEFAULT_POLICIES
    if given.policies is not None:
        policies = tuple(part.strip() for part in given.policies.split(",") if part.strip())
    training = training_config(given, recipe_named("bf16"), 0)
    config = SweepConfig(policies, **stated(given, ("seeds", "text")), training=training)
    summary = run_sweep(config, given.out, jobs=given.jobs)
    rows = draw(given.out, figure) if summary["policies"] else None
    print(_table(summary))
    if rows is not None:
        print(f"\nfigure: {figure}\nits rows: {rows}\nruns: {given.out}")
    if summary["failed"]:
        names = ", ".join(summary["failed"])
        print(f"fp8lab sweep: failed: {names}; see {given.out / 'failed'}", file=sys.stderr)
        return 1
    return 0


def _table(summary: dict[str, Any]) -> str:
    head: tuple[str, ...] = ("policy", "final loss", "seed spread", "above BF16", "in BF16 spreads")
    head += ("overflow", "underflow", "diverged")
    lines = [head]
    for policy, entry in summary["policies"].items():
        above, spreads = entry["above_bf16"], entry["above_bf16_in_spreads"]
        lines.append(
            (
                policy,
                f"{entry['validation_loss']:.4f}",
                f"{entry['seed_spread']:.4f}",
                "-" if above is None else f"{above:+.4f}",
                "-" if spreads is None else f"{spreads:+.1f}",
                f"{entry['overflow']:.1e}",
                f"{entry['underflow']:.1e}",
                f"{entry['diverged']} of {len(entry['seeds'])}",
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def _plot(given: argparse.Namespace) -> int:
    from fp8lab.experiments.plot import draw

    figure = given.figure
    if figure is None:
        figure = given.runs / "sweep.png" if given.runs.is_dir() else given.runs.with_suffix(".png")
    rows = draw(given.runs, figure)
    print(f"figure: {figure}\nits rows: {rows}")
    return 0
