"""What a cast to both layouts costs beside a copy, taken apart.

    python -m fp8lab.experiments.probe_transpose [--out FOLDER]

Both layouts are one stream of reads and two of writes, one of them in rows that lie far apart. The
same bytes are moved in other ways: a flat cast that writes its codes once, then twice; and both
layouts of as many elements in other shapes. Where a matrix has as many rows as a tile, a tile's
transposed codes lie side by side, and every program writes one run of memory.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
import triton
import triton.language as tl

from fp8lab.errors import UserError
from fp8lab.experiments.bench_cases import Case
from fp8lab.experiments.bench_casting import ELEMENTS, measure, save, table
from fp8lab.experiments.bench_casting import ROWS as FILE
from fp8lab.experiments.commands import Parser, check_writable, exit_code
from fp8lab.formats import E4M3
from fp8lab.kernels.casting import quantize_with_transpose
from fp8lab.kernels.casting_arithmetic import (
    MAGNITUDE,
    as_bits,
    as_floats,
    as_words,
    cast_to_codes,
    widened,
)
from fp8lab.kernels.casting_rules import cast_rule
from fp8lab.kernels.launch import launch

BLOCK = 8192
ROWS = (8, 10, 12, 13, 14, 15, 16, 18, 20)  # powers of two


@triton.jit  # type: ignore[untyped-decorator]
def cast_twice_kernel(  # type: ignore[no-untyped-def]
    x,
    codes,
    again,  # where the same codes go once more, or None
    scale,
    amax_out,
    RULE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK elements a program, as `quantize_kernel` casts them; whole blocks alone."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bits = widened(tl.load(as_words(x) + places), x.dtype.element_ty, RULE.hardware)
    y = as_bits(as_floats(bits) * tl.load(scale))
    result = cast_to_codes(y, bits, None, RULE)
    tl.store(as_words(codes) + places, result)
    if again is not None:
        tl.store(as_words(again) + places, result)
    tl.atomic_max(as_words(amax_out), tl.max(bits & MAGNITUDE, axis=0), sem="relaxed")


def cases(elements: int) -> list[Case]:
    """The device copy first."""
    x = torch.randn(elements, device="cuda").bfloat16()
    scale, largest = torch.full((1,), 64.0, device="cuda"), torch.zeros(1, device="cuda")
    target = torch.empty_like(x)
    codes, again = (torch.empty(elements, dtype=torch.uint8, device="cuda") for _ in range(2))
    rule = cast_rule(E4M3, x.device)

    def flat(second: torch.Tensor | None) -> None:
        grid = (elements // BLOCK,)
        args = (x, codes, second, scale, largest)
        launch(cast_twice_kernel, grid, *args, RULE=rule, BLOCK=BLOCK, num_warps=8)

    found = [
        Case("copy", "device", elements, 4 * elements, lambda: target.copy_(x)),
        Case("flat, codes once", "fp8lab", elements, 3 * elements, partial(flat, None)),
        Case("flat, codes twice", "fp8lab", elements, 4 * elements, partial(flat, again)),
    ]
    for power in ROWS:
        matrix = x.view(1 << power, -1)
        call = partial(quantize_with_transpose, matrix, E4M3, scale=scale, amax_out=largest)
        name = f"both layouts, {matrix.shape[0]} x {matrix.shape[1]}"
        found.append(Case(name, "fp8lab", elements, 4 * elements, call))
    return found


def main(given: list[str] | None = None) -> None:
    """The command line."""
    parser = Parser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder of rows.jsonl")
    arguments = parser.parse_args(given)
    if arguments.out is not None:
        check_writable(arguments.out / FILE)
    if not torch.cuda.is_available():
        raise UserError("there is no CUDA device to measure")
    tried = cases(ELEMENTS)
    measured = measure(tried, tried[0])
    rows = [result.row(case) for case, result in zip(tried, measured, strict=True)]
    if arguments.out is not None:
        command = "python -m fp8lab.experiments.probe_transpose"
        save(arguments.out, rows, bench="transpose", command=command)
    print(table(rows))


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
