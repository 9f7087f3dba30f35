"""The tables of matrix products in docs/performance.md, made from rows alone."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from fp8lab.records import Row

SECTION = "products"
# The least geometric mean of ratios to cuBLASLt while hot, and the one aimed at.
GOALS = {
    "native": (1.00, 1.05),
    "promoted 128": (1.02, 1.05),
    "1x128 by 128x128": (1.08, 1.15),
}
HEATS = ("hot", "rested")


def section(rows: list[Row]) -> str:
    """What is said of a run of `bench_matmul`, and of `bench_linear_products` where it ran."""
    head = next(row for row in rows if row["kind"] == "run")
    packages = head["environment"]["packages"]
    speed = [row for row in rows if row["kind"] == "speed"]
    different = sum(row["different"] for row in speed)
    lines = [
        f"Measured on {head['when'][:10]} on one {head['environment']['device']} (torch"
        f" {packages['torch']}, Triton {packages['triton']}), with `{head['command']}`:"
        " `torch._scaled_mm` of the same contract, in turns, random operands, bfloat16 results."
        f" Over {len(speed)} rows {different} elements differ from its.",
        "",
        *_summary(speed),
        "",
        "Their time over ours, hot; smallest to largest of seven rounds in brackets; then rested:",
        "",
        *_by_shape(speed),
    ]
    linear = [row for row in rows if row["kind"] == "linear"]
    if linear:
        lines += ["", *_of_layers(linear)]
    return "\n".join(lines)


def _summary(rows: list[Row]) -> Iterable[str]:
    yield "| mode | goal (hot) | geometric mean hot | worst hot | geometric mean rested | met |"
    yield "|---|---|---|---|---|---|"
    for mode, (least, aim) in GOALS.items():
        mine = [row for row in rows if row["mode"] == mode]
        means = {
            heat: statistics.geometric_mean(row[heat]["ratio"] for row in mine) for heat in HEATS
        }
        worst = min(mine, key=lambda row: float(row["hot"]["ratio"]))
        met = "yes" if means["hot"] >= aim else "the least" if means["hot"] >= least else "no"
        yield (
            f"| {mode} | {least:.2f}, aimed at {aim:.2f} | {means['hot']:.3f} |"
            f" {worst['hot']['ratio']:.3f}, {worst['shape']} | {means['rested']:.3f} | {met} |"
        )


def _by_shape(rows: list[Row]) -> Iterable[str]:
    modes = list(GOALS)
    yield "| layer and tokens | M, N, K | " + " | ".join(modes) + " | native, TFLOP/s hot |"
    yield "|---|---|" + "---|" * (len(modes) + 1)
    for shape in dict.fromkeys(row["shape"] for row in rows):
        of_mode = {row["mode"]: row for row in rows if row["shape"] == shape}
        cells = []
        for mode in modes:
            hot, rested = of_mode[mode]["hot"], of_mode[mode]["rested"]
            spread = f"({hot['lowest']:.2f} to {hot['highest']:.2f})"
            cells.append(f"{hot['ratio']:.3f} {spread}; {rested['ratio']:.3f}")
        first = of_mode[modes[0]]
        sizes = f"{first['m']}, {first['n']}, {first['k']}"
        rate = first["hot"]["fp8lab_tflops"]
        yield f"| {shape} | {sizes} | " + " | ".join(cells) + f" | {rate:.0f} |"


def _of_layers(rows: list[Row]) -> Iterable[str]:
    tokens = rows[0]["m"]
    yield (
        f"The three products of a linear layer, {tokens} tokens, hot: geometric means over the"
        " layers of Llama 3 8B and 70B."
    )
    yield ""
    yield "| scales | product | TFLOP/s | torch's time over ours | smallest | elements differ |"
    yield "|---|---|---|---|---|---|"
    for scaling, product in dict.fromkeys((row["scaling"], row["product"]) for row in rows):
        mine = [row for row in rows if (row["scaling"], row["product"]) == (scaling, product)]
        rate = statistics.geometric_mean(row["fp8lab_tflops"] for row in mine)
        ratios = [float(row["ratio"]) for row in mine]
        yield (
            f"| {scaling} | {product} | {rate:.0f} | {statistics.geometric_mean(ratios):.3f} |"
            f" {min(ratios):.3f} | {sum(row['different'] for row in mine)} |"
        )
