"""The picture and the tables of the optimizer's benchmark, made from its rows alone.

python -m fp8lab.experiments.plot_optimizer ROWS --figure figures/h200/optimizer.png
python -m fp8lab.experiments.plot_optimizer ROWS --document docs/performance.md
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from fp8lab.errors import UserError
from fp8lab.experiments.bench_rows import checked_optimizer
from fp8lab.experiments.commands import Parser, check_suffix, check_writable, exit_code
from fp8lab.experiments.documents import check_document, fill
from fp8lab.records import Row, read_rows

PREDICTED, MEASURED, PEER = "#E69F00", "#0072B2", "#999999"
SECTION = "optimizer"
ONE, SMALL, LARGE = (
    "one tensor of 2^28",
    "1.3B (24 layers of 2048)",
    "8B shapes (8 of 32 layers)",
)
EIGHT_BIT = "e4m3_128, bf16 + remainder"
# What is shown: the kernel, its group and name in the rows, the share of copy asked for, and the
# peer of the same group that it must be faster than, by that factor.
GOALS: tuple[tuple[str, str, str, float, str, float], ...] = (
    ("norm, unscale, finite check: 2^28", f"norm: {ONE}", "fp8lab", 0.90, "torch foreach", 1.0),
    ("norm, unscale, finite check: 1.3B", f"norm: {SMALL}", "fp8lab", 0.90, "torch foreach", 1.0),
    ("norm, unscale, finite check: 8B", f"norm: {LARGE}", "fp8lab", 0.90, "torch foreach", 1.0),
    ("AdamW float32: 2^28", f"AdamW: {ONE}", "fp8lab plain", 0.98, "torch fused", 1.2),
    ("AdamW float32: 1.3B", f"AdamW: {SMALL}", "fp8lab plain", 0.93, "torch fused", 1.0),
    ("AdamW float32: 8B", f"AdamW: {LARGE}", "fp8lab plain", 0.93, "torch fused", 1.0),
    ("AdamW, 14 bytes a parameter: 1.3B", "states: 1.3B", EIGHT_BIT, 0.85, "float32", 1.7),
)


def main(arguments: list[str] | None = None) -> None:
    """Draw the picture, fill the document, or both."""
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rows", type=Path, help="what the benchmark wrote")
    parser.add_argument("--figure", type=Path, help="where the picture goes")
    parser.add_argument("--document", type=Path, help="whose tables are filled")
    options = parser.parse_args(arguments)
    if options.figure is not None:
        check_suffix(options.figure, (".png",), "--figure")
        check_writable(options.figure, "--figure")
    if options.document is not None:
        check_document(options.document, SECTION)
    rows = checked_optimizer(read_rows(options.rows), options.rows)
    if options.figure is not None:
        draw(rows, options.figure)
    if options.document is not None:
        fill(options.document, SECTION, section(rows))


def section(rows: list[Row]) -> str:
    """The tables: goals, and the account of bytes and time.

    Raises:
        UserError: No measurements among the rows.
    """
    _measurements(rows)
    about = rows[0]
    packages = about["environment"]["packages"]
    lines = [
        f"Measured on {about['date']} on one {about['environment']['device']} (torch"
        f" {packages['torch']}, Triton {packages['triton']}), with `{about['command']}`; medians of"
        f" {about['rounds']} interleaved rounds. A share is bytes that must be moved a second, over"
        " what the device copy of the same rounds moves.",
        "",
        "| kernel | goal | measured | met | peers |",
        "|---|---|---|---|---|",
        *(_goal_line(rows, *goal) for goal in GOALS),
        *_graph_lines(rows),
        "",
        "The account, for the parameters of the 1.3B model. Predicted is the bytes at the copy's"
        " rate; ranks hold equal parts, and their rows are one rank's part on this card.",
        "",
        "| state | bytes a parameter | predicted ms | measured ms | share of copy |",
        "|---|---|---|---|---|",
        *(_account_line(row) for row in _account(rows)),
    ]
    return "\n".join(lines)


def _measurements(rows: list[Row]) -> list[Row]:
    found = [row for row in rows if "group" in row]
    if not found:
        raise UserError("the rows hold no measurements; run the benchmark first")
    return found


def _find(rows: list[Row], group: str, name: str) -> Row | None:
    return next((r for r in rows if r.get("group") == group and r["name"] == name), None)


def _goal_line(
    rows: list[Row], title: str, group: str, name: str, goal: float, peer: str, factor: float
) -> str:
    row = _find(rows, group, name)
    than = f"faster than {peer}" if factor == 1 else f"{factor} times {peer}"
    wanted = f"{goal:.2f} of copy; {than}"
    if row is None:
        return f"| {title} | {wanted} | not measured | | |"
    met = row["share_of_copy"] >= goal
    peers = []
    for other in rows:
        torch_too = peer.startswith("torch") and other.get("name", "").startswith("torch")
        if other.get("group") == group and (other["name"] == peer or torch_too):
            ratio = other["milliseconds"] / row["milliseconds"]
            peers.append(f"{other['name']} {other['milliseconds']:.3f} ms ({ratio:.2f}x)")
            if other["name"] == peer:
                met = met and (ratio > 1 if factor == 1 else ratio >= factor)
    return (
        f"| {title} | {wanted} | {row['share_of_copy']:.3f}, {row['milliseconds']:.3f} ms |"
        f" {'yes' if met else 'no'} | {'; '.join(peers)} |"
    )


def _graph_lines(rows: list[Row]) -> list[str]:
    group = "graph: 1.3B over 64"
    launched, graph = _find(rows, group, "launched"), _find(rows, group, "graph")
    if launched is None or graph is None:
        return []
    return [
        "| norm, constants and step in a CUDA graph: 1.3B over 64 ranks | measured |"
        f" {graph['milliseconds']:.3f} ms | | launched {launched['milliseconds']:.3f} ms"
        f" ({launched['milliseconds'] / graph['milliseconds']:.2f}x) |"
    ]


def _account(rows: list[Row]) -> list[Row]:
    """What the account shows, in its order: the torch peers first."""
    shown = []
    fused = _find(rows, f"AdamW: {SMALL}", "torch fused")
    states = [row for row in rows if row.get("group") == "states: 1.3B"]
    shown += [row | {"title": row["name"]} for row in states if row["name"].startswith("torch")]
    if fused is not None:
        shown.append(fused | {"title": "torch fused, float32"})
    shown += [row | {"title": row["name"]} for row in states if not row["name"].startswith("torch")]
    for ranks in (8, 64):
        for row in rows:
            if row.get("group") == f"sharded over {ranks}: 1.3B":
                title = f"{row['name']}, {ranks} ranks"
                shown.append(row | {"title": title, "ranks": ranks})
    return shown


def _account_line(row: Row) -> str:
    moved = row["bytes_per_element"] / row.get("ranks", 1)
    return (
        f"| {row['title']} | {moved:.4g} | {_predicted(row):.3f} | {row['milliseconds']:.3f} |"
        f" {row['share_of_copy']:.3f} |"
    )


def _predicted(row: Row) -> float:
    """Milliseconds that the bytes take at the copy's rate."""
    return float(row["elements"] * row["bytes_per_element"] / row["copy"] / 1e6)


def draw(rows: list[Row], figure: Path) -> None:
    """Two panels: share of the copy's rate by kernel, and the account of bytes and time.

    Args:
        rows: What `bench_optimizer` measured.
        figure: Where the picture goes.

    Raises:
        UserError: No measurements among the rows.
    """
    measured = _measurements(rows)
    kernels = [row for row in measured if row["group"].startswith(("norm", "AdamW"))]
    picture, (left, right) = plt.subplots(1, 2, figsize=(15, 8), layout="constrained")
    _shares(left, kernels)
    _times(right, _account(measured))
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
        f"{row['title']} ({row['bytes_per_element'] / row.get('ranks', 1):.4g} B)" for row in rows
    ]
    predicted = [_predicted(row) for row in rows]
    axis.barh([p - 0.2 for p in places], predicted, 0.4, color=PREDICTED, label="bytes / copy rate")
    measured = [row["milliseconds"] for row in rows]
    bars = axis.barh([p + 0.2 for p in places], measured, 0.4, color=MEASURED, label="measured")
    axis.bar_label(bars, fmt="%.2f", padding=2, fontsize=8)
    axis.set_yticks(list(places), labels, fontsize=7)
    axis.margins(x=0.1)
    axis.set_xlabel("milliseconds a step, 1.3 billion parameters")
    axis.invert_yaxis()
    axis.legend(loc="lower right")


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
