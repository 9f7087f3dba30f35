"""How fast the three products of a linear layer are on a card, beside torch._scaled_mm.

    python -m fp8lab.experiments.bench_linear_products [--out FOLDER] [--tokens N] [--seconds S]

Forward, data gradient and weight gradient of the layers of Llama 3 8B and 70B, tensor-wise
(forward in one chain, gradients promoted every 128) and with scales of blocks. "weight gradient,
added" adds into a float32 gradient; beside it torch makes a float32 product and adds it. Timed as
`fp8lab.experiments.card_timing` says, hot.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from fp8lab.errors import UserError
from fp8lab.experiments.bench_matmul import LAYERS, LINEAR_ROWS
from fp8lab.experiments.card_timing import codes, ratios, side_by_side
from fp8lab.experiments.commands import (
    Parser,
    check_positive,
    check_writable,
    command_of,
    exit_code,
)
from fp8lab.experiments.new_rows import NewRows
from fp8lab.kernels.linear_products import data_gradient, forward, weight_gradient
from fp8lab.records import Row, environment

PRODUCTS = ("forward", "data gradient", "weight gradient", "weight gradient, added")
SCALINGS = ("tensor-wise", "blocks")


Product = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One product of a layer: (M, K) by (K, N).

    Attributes:
        product: Which of `PRODUCTS`.
        scaling: Which of `SCALINGS`.
        m, n, k: Its sizes.
    """

    product: str
    scaling: str
    m: int
    n: int
    k: int

    @property
    def added(self) -> bool:
        return self.product == PRODUCTS[3]


def cases(tokens: int, columns: int, inner: int) -> Iterator[Case]:
    """The products of a layer from `inner` to `columns` features."""
    sizes = {
        "forward": (tokens, columns, inner),
        "data gradient": (tokens, inner, columns),
        "weight gradient": (columns, inner, tokens),
        "weight gradient, added": (columns, inner, tokens),
    }
    for scaling in SCALINGS:
        for product in PRODUCTS:
            yield Case(product, scaling, *sizes[product])


class Contest:
    """The operands of a case, and both ways to multiply them."""

    def __init__(self, case: Case) -> None:
        m, n, k = case.m, case.n, case.k
        self.case = case
        self.a, self.b = codes(m, k), codes(n, k)
        kind = torch.float32 if case.added else torch.bfloat16
        self.out = torch.zeros(m, n, dtype=kind, device="cuda")
        self.gradient = torch.zeros(m, n, device="cuda") if case.added else None
        one = torch.ones((), device="cuda")
        self.scales = {"inverse_scale_a": one, "inverse_scale_b": one}
        if case.scaling == "blocks":
            # Rows of a block of k lie together, as the cast kernel writes them.
            by_row = (torch.rand(k // 128, m, device="cuda") + 0.1).t()
            by_column = torch.rand(k // 128, n, device="cuda") + 0.1
            squares = (torch.rand(n // 128, k // 128, device="cuda") + 0.1).t()
            weight = case.product.startswith("weight")
            self.scales = {
                "inverse_scale_a": by_row,
                "inverse_scale_b": by_column if weight else squares,
            }

    def ours(self, _: int) -> torch.Tensor:
        options: dict[str, Any] = {**self.scales}
        if self.case.product != "forward":
            options["promote_every"] = 128
        if self.gradient is not None:
            return weight_gradient(self.a, self.b, accumulate=self.gradient, **options)
        function: Product = weight_gradient
        if not self.case.product.startswith("weight"):
            function = forward if self.case.product == "forward" else data_gradient
        return function(self.a, self.b, out=self.out, out_dtype=torch.bfloat16, **options)

    def theirs(self, _: int) -> torch.Tensor:
        result: torch.Tensor = torch._scaled_mm(
            self.a,
            self.b.t(),
            scale_a=self.scales["inverse_scale_a"],
            scale_b=self.scales["inverse_scale_b"],
            out_dtype=self.out.dtype,
            use_fast_accum=self.case.product == "forward" and self.case.scaling == "tensor-wise",
        )
        return self.out.add_(result) if self.case.added else result

    def different(self) -> int:
        """Elements that differ, the product once."""
        ours, theirs = self.ours(0).clone(), self.theirs(0)
        return int((ours != theirs).sum())


def measure(name: str, case: Case, seconds: float) -> Row:
    """One row: both contestants, hot."""
    contest = Contest(case)
    different = contest.different()
    contestants = {"fp8lab": contest.ours, "torch": contest.theirs}
    times = side_by_side(contestants, seconds, sets=1, rested=False).times["hot"]
    flops = 2e-9 * case.m * case.n * case.k
    return {
        "kind": "linear",
        "layer": name,
        "product": case.product,
        "scaling": case.scaling,
        "m": case.m,
        "n": case.n,
        "k": case.k,
        "different": different,
        **ratios(times, "fp8lab", "torch"),
        **{f"{who}_tflops": flops / statistics.median(spent) for who, spent in times.items()},
    }


def summary(rows: list[Row]) -> str:
    """The geometric mean of the ratios of each product, and of the rates."""
    lines = []
    for scaling in SCALINGS:
        for product in PRODUCTS:
            mine = [
                row for row in rows if row.get("product") == product and row["scaling"] == scaling
            ]
            if mine:
                mean = statistics.geometric_mean(row["ratio"] for row in mine)
                rate = statistics.geometric_mean(row["fp8lab_tflops"] for row in mine)
                bits = sum(row["different"] for row in mine)
                lines.append(
                    f"{scaling:<12} {product:<23} {rate:5.0f} TFLOP/s, {mean:.3f} of"
                    f" torch._scaled_mm's, {bits} elements differ"
                )
    return "\n".join(lines)


def run(folder: Path, tokens: int, seconds: float, command: str) -> None:
    """Measure, print a line a row, and write the rows."""
    if tokens < 512 or tokens % 512:
        raise UserError(f"--tokens is {tokens}; accepted: multiples of 512")
    check_positive(seconds, "--seconds")
    check_writable(folder / LINEAR_ROWS)
    if not torch.cuda.is_available():
        raise UserError("bench_linear_products needs a CUDA device")
    head: Row = {
        "kind": "run",
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "environment": environment("cuda"),
    }
    with NewRows(folder / LINEAR_ROWS, head) as new:
        for name, layer in LAYERS.items():
            for case in cases(tokens, *layer):
                row = measure(name, case, seconds)
                new.add(row)
                print(
                    f"{name:<14} {case.scaling:<12} {case.product:<23} {row['fp8lab_tflops']:6.0f}"
                    f" {row['torch_tflops']:6.0f} {row['ratio']:6.3f}"
                    + (f"  {row['different']} differ" if row["different"] else ""),
                    flush=True,
                )
    print(summary(new.rows))


def main(arguments: list[str] | None = None) -> int:
    """Measure, and write the rows."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("figures/h200"), help="where rows go")
    parser.add_argument("--tokens", type=int, default=4096, help="of the batch")
    parser.add_argument("--seconds", type=float, default=0.2, help="of hot work a row")
    chosen = parser.parse_args(arguments)
    command = command_of("bench_linear_products", arguments)
    run(chosen.out, chosen.tokens, chosen.seconds, command)
    return 0


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
