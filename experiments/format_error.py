"""What a format and a scaling policy cost, over the exponent of the input, by the oracle.

    python -m fp8lab.experiments.format_error [--out FOLDER] [--draw-only]

The input is one matrix. Row r holds values of one exponent, from 2**LOWEST up: random mantissas and
signs, the same in every row. Each policy casts the whole matrix at once, so that a policy with one
scale must serve all exponents, and one with a scale a block need not. A row of results says what
became of one exponent.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8lab.emulation.scaling import (
    DelayedScalingState,
    amax,
    fake_quantize,
    record_amax,
    update_delayed,
)
from fp8lab.errors import UserError
from fp8lab.experiments.commands import Parser, check_writable, exit_code, made_by
from fp8lab.experiments.new_rows import NewRows
from fp8lab.formats import E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, Float8Format
from fp8lab.records import Row, environment, read_rows

Float32Array = npt.NDArray[np.float32]
Policy = Callable[[Float32Array, Float8Format], Float32Array]

LOWEST, HIGHEST = -30, 20  # the exponents
COLUMNS = 4096  # a multiple of all block lengths
SEED = 0
GROWTH = 4  # by how much the tensor of `delayed` has grown since the step its scale is from
FORMATS = (E4M3, E5M2, E4M3FNUZ, E5M2FNUZ)
FIGURE = "format-error.png"


def _delayed(x: Float32Array, fmt: Float8Format) -> Float32Array:
    before = record_amax(DelayedScalingState.fresh(16), amax(x / np.float32(GROWTH)))
    return fake_quantize(x, fmt, scale=update_delayed(before, fmt).scale)


POLICIES: dict[str, Policy] = {
    "scale 1": lambda x, fmt: fake_quantize(x, fmt, scale=1.0),
    "current": lambda x, fmt: fake_quantize(x, fmt),
    "current, power of two": lambda x, fmt: fake_quantize(x, fmt, power_of_two=True),
    f"delayed, grown {GROWTH} times": _delayed,
    "1x128, power of two": lambda x, fmt: fake_quantize(x, fmt, block=(1, 128), power_of_two=True),
    "MX, floor": lambda x, fmt: fake_quantize(x, fmt, scale="mx"),
    "MX, up": lambda x, fmt: fake_quantize(x, fmt, scale="mx", scale_rounding="up"),
}


def inputs() -> Float32Array:
    """(exponents, COLUMNS) float32: in row e - LOWEST, magnitudes from 2**e to below 2**(e + 1)."""
    rng = np.random.default_rng(SEED)
    mantissas = 1 + rng.integers(0, 1 << 23, COLUMNS) * 2.0**-23
    signed = mantissas * rng.choice([-1.0, 1.0], COLUMNS)
    exponents = np.arange(LOWEST, HIGHEST + 1)[:, None]
    return np.asarray(np.ldexp(signed[None, :], exponents), dtype=np.float32)


def results() -> list[Row]:
    """One row for each format, policy and exponent."""
    x = inputs()
    exact = x.astype(np.float64)
    rows = []
    for fmt in FORMATS:
        for name, policy in POLICIES.items():
            error = policy(x, fmt).astype(np.float64) - exact
            largest = np.abs(error / exact).max(axis=1)
            noise = np.square(error).sum(axis=1)
            sqnr = 10 * np.log10(np.square(exact).sum(axis=1) / noise)
            for place in range(len(x)):
                rows.append(
                    {
                        "format": fmt.name,
                        "policy": name,
                        "exponent": LOWEST + place,
                        "largest_relative_error": float(f"{largest[place]:.6g}"),
                        "sqnr_db": round(float(sqnr[place]), 3),
                    }
                )
    return rows


def check_rows(rows: list[Row], source: Path) -> list[Row]:
    """The rows of this experiment.

    Raises:
        UserError: They are something else, or there is none to draw.
    """
    keys = {"format", "policy", "exponent", "largest_relative_error", "sqnr_db"}
    if len(rows) < 2 or "format_error" not in rows[0] or not all(keys <= set(r) for r in rows[1:]):
        raise UserError(f"{source} holds no rows of format_error, or damaged ones")
    return rows


def draw(rows: list[Row], figure: Path) -> None:
    """Four panels, from rows alone: formats above, policies below; error left, SQNR right."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from fp8lab.experiments.plot import COLOURS

    styles = ("-", "--", "-.", ":")
    picture, axes = plt.subplots(2, 2, figsize=(10, 6.2), layout="constrained", sharex=True)
    formats = list(dict.fromkeys(row["format"] for row in rows[1:]))
    policies = list(dict.fromkeys(row["policy"] for row in rows[1:]))
    panels: list[tuple[Any, str, str, list[tuple[str, dict[str, str]]]]] = [
        (
            axes[0],
            f"{policies[0]}, each format",
            "format",
            [(name, {"format": name, "policy": policies[0]}) for name in formats],
        ),
        (
            axes[1],
            f"{formats[0]}, each policy",
            "policy",
            [(name, {"format": formats[0], "policy": name}) for name in policies],
        ),
    ]
    measures = (("largest_relative_error", "largest relative error"), ("sqnr_db", "SQNR (dB)"))
    for pair, title, kind, curves in panels:
        for axis, (key, label) in zip(pair, measures, strict=True):
            for place, (name, wanted) in enumerate(curves):
                chosen = [row for row in rows[1:] if wanted.items() <= row.items()]
                axis.plot(
                    [row["exponent"] for row in chosen],
                    [row[key] for row in chosen],
                    color=COLOURS[place],
                    # Curves lie on each other where policies agree: dashes let both be seen.
                    linestyle=styles[place % len(styles)],
                    linewidth=1.8,
                    label=name,
                )
            axis.set_ylabel(label, fontsize=10)
            axis.set_title(title, fontsize=11)
            axis.grid(alpha=0.25)
        pair[0].set_yscale("log", base=2)
        pair[1].legend(fontsize=8.5, title=kind, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    for axis in axes[1]:
        axis.set_xlabel("exponent of the input", fontsize=10)
    picture.savefig(figure, dpi=110, metadata={"Software": None})
    plt.close(picture)


def main(arguments: list[str] | None = None) -> int:
    """Make the rows and draw them, or draw the rows that are there."""
    parser = Parser(description="Error and SQNR over the exponent of the input.")
    parser.add_argument(
        "--out", type=Path, default=Path("figures"), metavar="FOLDER", help="(default figures)"
    )
    parser.add_argument("--draw-only", action="store_true", help="draw the rows that are there")
    given = parser.parse_args(arguments)
    figure = given.out / FIGURE
    beside = figure.with_suffix(".jsonl")
    check_writable(figure)
    if given.draw_only:
        rows = check_rows(read_rows(beside), beside)
    else:
        described = {
            **made_by("format_error", arguments),
            "lowest": LOWEST,
            "highest": HIGHEST,
            "columns": COLUMNS,
            "seed": SEED,
            "environment": environment("cpu"),
        }
        with NewRows(beside, {"format_error": described}) as new:
            new.add(*results())
        rows, beside = new.rows, new.path
        figure = beside.with_suffix(".png")
    draw(rows, figure)
    print(f"rows: {beside}\nfigure: {figure}")
    return 0


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
