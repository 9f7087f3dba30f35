"""Figures of the matrix products on a card, drawn from the rows of `bench_matmul` alone."""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator

from fp8lab.records import Row

OURS, THEIRS, PROMOTED = "#0072B2", "#E69F00", "#009E73"


def draw(rows: list[Row], folder: Path) -> list[Path]:
    """Draw what the rows allow.

    Args:
        rows: Of `bench_matmul`: of kinds "run", "speed" and "error".
        folder: Where the pictures go.

    Returns:
        The pictures' paths.
    """
    device = next((r["environment"]["device"] for r in rows if r["kind"] == "run"), "a card")
    speed = [row for row in rows if row["kind"] == "speed"]
    error = [row for row in rows if row["kind"] == "error"]
    paths = []
    if speed:
        paths.append(_draw_rates(speed, device, folder / "matmul-rates.png"))
        paths.append(_draw_ratios(speed, device, folder / "matmul-ratios.png"))
        paths.append(_draw_card(speed, device, folder / "matmul-card.png"))
    if error:
        paths.append(_draw_errors(error, device, folder / "matmul-errors.png"))
    return paths


def _draw_rates(rows: list[Row], device: str, path: Path) -> Path:
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    picture, axes = plt.subplots(
        len(modes), 1, figsize=(12, 3.4 * len(modes)), layout="constrained", squeeze=False
    )
    for axis, mode in zip(axes[:, 0], modes, strict=True):
        mine = [row for row in rows if row["mode"] == mode]
        places = range(len(mine))
        for name, key, colour, shift in (
            ("fp8lab", "fp8lab_tflops", OURS, -0.2),
            ("cuBLASLt", "cublaslt_tflops", THEIRS, 0.2),
        ):
            heights = [row["hot"][key] for row in mine]
            axis.bar([p + shift for p in places], heights, 0.4, color=colour, label=name)
        axis.set_title(f"{mode}, hot", fontsize=11)
        axis.set_ylabel("TFLOP/s")
        _name_shapes(axis, mine)
    axes[0, 0].legend()
    picture.suptitle(f"FP8 products on {device}, interleaved medians", fontsize=13)
    return _saved(picture, path)


def _draw_ratios(rows: list[Row], device: str, path: Path) -> Path:
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    picture, axis = plt.subplots(figsize=(12, 5), layout="constrained")
    for mode, colour in zip(modes, (OURS, PROMOTED, THEIRS), strict=False):
        mine = [row for row in rows if row["mode"] == mode]
        for heat, style in (("hot", "-"), ("rested", ":")):
            ratios = [row[heat]["ratio"] for row in mine]
            axis.plot(ratios, style, marker="o", ms=4, color=colour, label=f"{mode}, {heat}")
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_ylabel("cuBLASLt's time over ours")
    axis.set_yscale("log", base=2)
    axis.yaxis.set_major_locator(FixedLocator([0.9, 0.95, 1, 1.05, 1.1, 1.2, 1.4, 1.6, 1.8]))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_title(f"FP8 products on {device}: above 1 is faster than cuBLASLt")
    _name_shapes(axis, [row for row in rows if row["mode"] == modes[0]])
    axis.legend(ncols=3)
    return _saved(picture, path)


def _draw_card(rows: list[Row], device: str, path: Path) -> Path:
    """What the card was doing: the share of its own ceiling, its clock, its power."""
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    panels = (
        ("share_of_ceiling", "share of 8192 FLOP\na clock and multiprocessor"),
        ("clock_mhz", "clock, MHz"),
        ("power_w", "power, W"),
    )
    picture, axes = plt.subplots(3, 1, figsize=(12, 9), layout="constrained", sharex=True)
    for axis, (key, label) in zip(axes, panels, strict=True):
        for mode, colour in zip(modes, (OURS, PROMOTED, THEIRS), strict=False):
            mine = [row for row in rows if row["mode"] == mode]
            # A row that the sensors missed leaves a gap.
            heights = [row.get(key) or math.nan for row in mine]
            axis.plot(heights, "-", marker="o", ms=4, color=colour, label=mode)
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
    _name_shapes(axes[-1], [row for row in rows if row["mode"] == modes[0]])
    for axis in axes:
        axis.grid(alpha=0.25, axis="y")
    axes[0].legend(ncols=len(modes))
    axes[0].set_title(f"{device} while FP8 products ran: medians over each row")
    return _saved(picture, path)


def _draw_errors(rows: list[Row], device: str, path: Path) -> Path:
    picture, axis = plt.subplots(figsize=(8, 5), layout="constrained")
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    for mode, colour in zip(modes, (OURS, PROMOTED, THEIRS), strict=False):
        mine = [row for row in rows if row["mode"] == mode]
        ks = [row["k"] for row in mine]
        axis.plot(ks, [row["card"] for row in mine], color=colour, label=f"{mode}: card")
        axis.plot(
            ks, [row["oracle"] for row in mine], "o", mfc="none", color=colour, label="oracle"
        )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel("K")
    axis.set_ylabel("relative error (Frobenius norm)")
    axis.set_title(f"What accumulation loses on {device}, random normal operands")
    axis.grid(alpha=0.25)
    axis.legend(ncols=len(modes))
    return _saved(picture, path)


def _name_shapes(axis: Axes, rows: list[Row]) -> None:
    names = [row["shape"] for row in rows]
    axis.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=8)
    axis.grid(alpha=0.25, axis="y")


def _saved(picture: Figure, path: Path) -> Path:
    # Without the version that matplotlib writes, the same rows give the same file.
    picture.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(picture)
    return path
