"""How fast the FP8 products are on a card, beside cuBLASLt in the same run, and how exact.

    python -m fp8lab.experiments.bench_matmul [--out FOLDER] [--only TEXT] [--seconds S]
    python -m fp8lab.experiments.bench_matmul --draw FOLDER [--document docs/performance.md]

The second needs no card.

Launches are timed as `fp8lab.experiments.card_timing` says, and cycle through operands larger than
the L2 cache. Medians; operands are random normal numbers (zeros would draw less power and run
faster).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fp8lab.bridge import to_numpy
from fp8lab.emulation.matmul import matmul_at
from fp8lab.errors import UserError
from fp8lab.experiments.bench_rows import checked_products
from fp8lab.experiments.card_timing import Launch, Telemetry, codes, ratios, side_by_side
from fp8lab.experiments.commands import (
    Parser,
    check_positive,
    check_writable,
    command_of,
    exit_code,
)
from fp8lab.experiments.documents import check_document, fill
from fp8lab.experiments.matmul_table import SECTION, section
from fp8lab.experiments.new_rows import NewRows
from fp8lab.experiments.plot_matmul import draw
from fp8lab.kernels.matmul import matmul
from fp8lab.records import Row, environment, read_rows

ROWS = "bench-matmul.jsonl"
LINEAR_ROWS = "bench-linear-products.jsonl"
FLOPS_A_CLOCK = 8192  # FP8 multiply-adds count twice; of one multiprocessor of sm_90
CYCLED = 200 << 20  # bytes of operands that launches cycle through: more than three L2 caches
MOST_SETS = 12


# Columns and inner size of the layers of Llama 3.
LAYERS = {
    "8B qkv": (6144, 4096),
    "8B out": (4096, 4096),
    "8B gate, up": (28672, 4096),
    "8B down": (4096, 14336),
    "70B qkv": (10240, 8192),
    "70B out": (8192, 8192),
    "70B gate, up": (57344, 8192),
    "70B down": (8192, 28672),
}


def shapes() -> dict[str, tuple[int, int, int]]:
    """M (tokens), N and K of each product: cubes, the layers of Llama 3 8B and 70B, few tokens."""
    found = {"cube 4096": (4096, 4096, 4096), "cube 8192": (8192, 8192, 8192)}
    for tokens in (4096, 16384):
        found |= {f"{name} {tokens}": (tokens, *layer) for name, layer in LAYERS.items()}
    for tokens in (16, 64, 128, 512):
        for name in ("8B out", "8B gate, up"):
            found[f"{name} {tokens}"] = (tokens, *LAYERS[name])
    return found


@dataclass(frozen=True)
class Mode:
    """One contract, by us and by cuBLASLt.

    Attributes:
        name: What is compared.
        blocks: Whether scales are of blocks.
        promote: k between promotions, None for one chain.
    """

    name: str
    blocks: bool
    promote: int | None


MODES = (
    Mode("native", False, None),
    Mode("promoted 128", False, 128),
    Mode("1x128 by 128x128", True, 128),
)


class Operands:
    """Several sets of random operands of one shape, and one result."""

    def __init__(self, m: int, n: int, k: int) -> None:
        self.sizes = m, n, k
        self.count = min(MOST_SETS, max(1, CYCLED // ((m + n) * k)))
        self.a = [codes(m, k) for _ in range(self.count)]
        self.b = [codes(n, k).t() for _ in range(self.count)]
        self.out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
        self.one = torch.ones((), device="cuda")
        self.rows = (torch.rand(k // 128, m, device="cuda") + 0.1).t()
        self.squares = (torch.rand(n // 128, k // 128, device="cuda") + 0.1).t()

    def scales(self, mode: Mode) -> tuple[torch.Tensor, torch.Tensor]:
        return (self.rows, self.squares) if mode.blocks else (self.one, self.one)

    def ours(self, mode: Mode, index: int) -> torch.Tensor:
        a, b = self.scales(mode)
        return matmul(
            self.a[index % self.count],
            self.b[index % self.count],
            inverse_scale_a=a,
            inverse_scale_b=b,
            promote_every=mode.promote,
            out=self.out,
            out_dtype=torch.bfloat16,
        )

    def theirs(self, mode: Mode, index: int) -> torch.Tensor:
        a, b = self.scales(mode)
        result: torch.Tensor = torch._scaled_mm(
            self.a[index % self.count],
            self.b[index % self.count],
            scale_a=a,
            scale_b=b,
            out_dtype=torch.bfloat16,
            use_fast_accum=mode.promote is None,
        )
        return result


def measure(operands: Operands, mode: Mode, seconds: float, telemetry: Telemetry) -> Row:
    """One row: both contestants, hot and rested."""
    m, n, k = operands.sizes
    contestants: dict[str, Launch] = {
        "fp8lab": lambda index: operands.ours(mode, index),
        "cublaslt": lambda index: operands.theirs(mode, index),
    }
    different = int((operands.ours(mode, 0) != operands.theirs(mode, 0)).sum())
    found = side_by_side(contestants, seconds, sets=operands.count)
    sampled = telemetry.median(*found.hot)
    row: Row = {"kind": "speed", "mode": mode.name, "m": m, "n": n, "k": k}
    row |= {"operand_sets": operands.count, "different": different, **sampled}
    for heat, times in found.times.items():
        row[heat] = ratios(times, "fp8lab", "cublaslt") | {
            f"{name}_tflops": 2e-9 * m * n * k / statistics.median(values)
            for name, values in times.items()
        }
    if sampled["clock_mhz"]:
        units = torch.cuda.get_device_properties(0).multi_processor_count
        ceiling = units * FLOPS_A_CLOCK * sampled["clock_mhz"] * 1e6 / 1e12
        row["share_of_ceiling"] = row["hot"]["fp8lab_tflops"] / ceiling
    return row


def error_rows() -> Iterator[Row]:
    """The relative error of native and promoted sums as K grows: the card, and the oracle.

    The error is the norm of the difference from the exact product of the codes over the norm of
    that product, on a sample of 32 x 32 elements of a product of random normal operands.
    """
    for k in (2**power for power in range(5, 17)):
        torch.manual_seed(k)
        a, b = codes(256, k), codes(256, k).t()
        left, right = to_numpy(a), to_numpy(b)
        rows = columns = np.arange(0, 256, 8)
        exact = left[rows].astype(np.float64) @ right[:, columns].astype(np.float64)
        for name, promote in (("native", None), ("promoted 128", 128), ("promoted 32", 32)):
            card = to_numpy(matmul(a, b, promote_every=promote))[np.ix_(rows, columns)]
            oracle = matmul_at(left, right, rows, columns, promote_every=promote)
            yield {
                "kind": "error",
                "mode": name,
                "k": k,
                "card": _relative(card, exact),
                "oracle": _relative(oracle, exact),
                "different": int((card.view(np.uint32) != oracle.view(np.uint32)).sum()),
            }


def _relative(got: Any, exact: Any) -> float:
    return float(np.linalg.norm(got - exact) / np.linalg.norm(exact))


def summary(rows: list[Row]) -> str:
    """Ratios of each mode: the geometric mean, and the worst shape."""
    lines = []
    for mode in MODES:
        mine = [row for row in rows if row["kind"] == "speed" and row["mode"] == mode.name]
        if not mine:
            continue
        for heat in ("hot", "rested"):
            mean = statistics.geometric_mean(row[heat]["ratio"] for row in mine)
            worst = min(mine, key=lambda row: float(row[heat]["ratio"]))
            lines.append(
                f"{mode.name:<17} {heat:<7} geometric mean {mean:.3f}, worst"
                f" {worst[heat]['ratio']:.3f} at {worst['shape']}"
            )
        bits = sum(row["different"] for row in mine)
        lines.append(f"{mode.name:<17} elements that differ from cuBLASLt: {bits}")
    return "\n".join(lines)


def run(folder: Path, only: str, seconds: float, command: str) -> Path:
    """Measure, print a line a row, and write the rows; returns the file that they are in."""
    check_positive(seconds, "--seconds")
    chosen = {name: sizes for name, sizes in shapes().items() if only in name}
    if not chosen:
        raise UserError(f"--only is {only!r}; accepted: a part of {'; '.join(shapes())}")
    check_writable(folder / ROWS)
    if not torch.cuda.is_available():
        raise UserError(
            "bench_matmul needs a CUDA device; --draw FOLDER redraws its figures without"
        )
    head: Row = {
        "kind": "run",
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "environment": environment("cuda"),
    }
    new = NewRows(folder / ROWS, head)
    telemetry = Telemetry()
    print(f"{'shape':<22} {'mode':<17} hot: ours  cuBLASLt  ratio   rested ratio   MHz    W")
    with closing(telemetry), new:
        for name, sizes in chosen.items():
            operands = Operands(*sizes)
            for mode in MODES:
                row = measure(operands, mode, seconds, telemetry) | {"shape": name}
                new.add(row)
                hot, rested = row["hot"], row["rested"]
                print(
                    f"{name:<22} {mode.name:<17} {hot['fp8lab_tflops']:9.0f} "
                    f"{hot['cublaslt_tflops']:9.0f} {hot['ratio']:6.3f} {rested['ratio']:14.3f}"
                    f" {row['clock_mhz'] or 0:5.0f} {row['power_w'] or 0:4.0f}"
                    + (f"  {row['different']} differ" if row["different"] else ""),
                    flush=True,
                )
            del operands
        for row in error_rows():
            new.add(row)
    print(summary(new.rows))
    return new.path


def main(arguments: list[str] | None = None) -> int:
    """Measure, or draw what was measured."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("figures/h200"), help="where rows go")
    parser.add_argument("--only", default="", help="shapes whose name holds this text")
    parser.add_argument("--seconds", type=float, default=0.7, help="of hot work a row")
    parser.add_argument("--draw", type=Path, metavar="FOLDER", help="draw from rows alone")
    parser.add_argument("--document", type=Path, help="whose tables are filled")
    chosen = parser.parse_args(arguments)
    folder = chosen.draw or chosen.out
    of_layers: list[Row] = []
    if chosen.document is not None:
        check_document(chosen.document, SECTION)
        if chosen.only:
            raise UserError("--document tells of all shapes; leave --only out, or --document")
        of_layers = _rows_of_layers(folder)
    if chosen.draw is None:
        path = run(folder, chosen.only, chosen.seconds, command_of("bench_matmul", arguments))
        if path != folder / ROWS:  # figures and tables are of the whole rows, which stay
            return 0
    path = folder / ROWS
    rows = checked_products(read_rows(path), ("speed", "error"), path)
    if chosen.document is not None:
        _check_whole(rows, path)
    for figure in draw(rows, folder):
        print(figure)
    if chosen.document is not None:
        fill(chosen.document, SECTION, section(rows + of_layers))
    return 0


def _rows_of_layers(folder: Path) -> list[Row]:
    """Those of `bench_linear_products`, which the document's tables tell of, too."""
    path = folder / LINEAR_ROWS
    if not path.exists():
        raise UserError(
            f"--document tells of {path}, too, which is not there; run bench_linear_products --out"
            f" {folder} first"
        )
    return checked_products(read_rows(path), ("linear",), path)


def _check_whole(rows: list[Row], source: Path) -> None:
    """Whether a document's tables, and its goals, can be of all shapes."""
    there = {(row["shape"], row["mode"]) for row in rows if row["kind"] == "speed"}
    wanted = [(shape, mode.name) for shape in shapes() for mode in MODES]
    if lacking := [place for place in wanted if place not in there]:
        raise UserError(
            f"{source} lacks {len(lacking)} of {len(wanted)} products, such as"
            f" {', '.join(lacking[0])}; --document tells of all of them: measure without --only"
        )
    if unknown := sorted(there - set(wanted)):
        raise UserError(
            f"{source} has a product that is not measured today: {', '.join(unknown[0])}"
        )


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
