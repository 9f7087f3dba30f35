"""How fast the oracle is, beside other libraries in the same run; rows first, then a figure.

    python -m fp8lab.experiments.bench_emulation [--only TEXT] [--elements N] [--repeats N]

A case is one piece of work and everybody who does it. Each repeat runs every contestant once, so
that a machine that slows down slows all of them; the median over the repeats counts. Inputs are
shuffled: sorted ones flatter code that branches. To add cases, add a function to `SUITES`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from fp8lab.emulation.casting import dequantize, quantize
from fp8lab.emulation.scaling import (
    DelayedScalingState,
    dequantize_blocks,
    dequantize_mx,
    quantize_blocks,
    quantize_mx,
    update_delayed,
)
from fp8lab.errors import UserError
from fp8lab.experiments.commands import ROWS as SUFFIX
from fp8lab.experiments.commands import (
    Parser,
    check_at_least,
    check_suffix,
    check_writable,
    command_of,
    exit_code,
)
from fp8lab.experiments.new_rows import NewRows
from fp8lab.formats import E4M3, E5M2, Float8Format
from fp8lab.peers import GFLOAT, ML_DTYPES
from fp8lab.records import Row, environment, today

Array = npt.NDArray[Any]
Work = Callable[[], object]

OURS = "fp8lab"
ROWS = Path("figures/bench-emulation.jsonl")
FEW = 4096  # elements with which every case can be made; so can all multiples
SLOW = 32  # a slow peer gets one element in so many, and its rate is of those


@dataclass(frozen=True)
class Case:
    """One piece of work and those who do it.

    Attributes:
        name: What is done, to what.
        elements: How many elements one call works on.
        contestants: From a name to a call that does the work once; `OURS` among them.
        against: Whose time over ours is the ratio.
        goal: The ratio that is aimed at; None where there is none.
        shares: Contestants whose call works on fewer elements, and how many.
        clock: "thread", the time that the calling thread ran for, which other programs on the
            machine do not lengthen; or "wall", for work that several threads share.
    """

    name: str
    elements: int
    contestants: Mapping[str, Work]
    against: str
    goal: float | None = None
    shares: Mapping[str, int] = field(default_factory=dict)
    clock: str = "thread"


def inputs(elements: int, seed: int = 0) -> dict[str, npt.NDArray[np.float32]]:
    """Shuffled float32: normally distributed, and with exponents spread over 50 binades."""
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal(elements)
    wide = rng.standard_normal(elements) * np.exp2(rng.integers(-30, 20, elements))
    return {"normal": normal.astype(np.float32), "wide": wide.astype(np.float32)}


def cast_cases(elements: int) -> Iterator[Case]:
    """Quantise and dequantise, every input type, against ml_dtypes, torch and gfloat."""
    for fmt in (E4M3, E5M2):
        for kind, values in inputs(elements).items():
            for dtype, goal in _INPUT_GOALS.items():
                with np.errstate(over="ignore", under="ignore"):
                    x = values.astype(dtype)
                yield _quantize_case(fmt, kind, x, goal)
            yield _dequantize_case(fmt, kind, quantize(values, fmt))


def thread_cases(elements: int) -> Iterator[Case]:
    """Two threads against one."""
    x = inputs(elements)["normal"]
    contestants: dict[str, Work] = {
        OURS: lambda: quantize(x, E4M3, threads=2),
        "one thread": lambda: quantize(x, E4M3, threads=1),
    }
    yield Case(
        "quantize E4M3 float32 normal, two threads",
        elements,
        contestants,
        "one thread",
        1.5,
        clock="wall",
    )


def block_cases(elements: int) -> Iterator[Case]:
    """Blocks, MX and their decoding against a cast with one scale."""
    x = inputs(elements)["normal"].reshape(-1, 4096)
    codes = quantize(x, E4M3, scale=2.0)
    peer = "one scale"
    casts: dict[str, Work] = {
        "1x128": lambda: quantize_blocks(x, E4M3, block=(1, 128)),
        "128x1": lambda: quantize_blocks(x, E4M3, block=(128, 1)),
        "128x128": lambda: quantize_blocks(x, E4M3, block=(128, 128)),
        "one a row": lambda: quantize_blocks(x, E4M3, block=(1, None)),
        "MX 1x32": lambda: quantize_mx(x, E4M3),
        "MX 32x1": lambda: quantize_mx(x, E4M3, block=(32, 1)),
    }
    for name, work in casts.items():
        one: dict[str, Work] = {OURS: work, peer: lambda: quantize(x, E4M3, scale=2.0)}
        yield Case(f"quantize E4M3 in blocks, {name}", x.size, one, peer, 0.5)
    blocks, mx = quantize_blocks(x, E4M3), quantize_mx(x, E4M3)
    decodings: dict[str, Work] = {
        "1x128": lambda: dequantize_blocks(*blocks),
        "MX 1x32": lambda: dequantize_mx(*mx),
    }
    for name, work in decodings.items():
        one = {OURS: work, peer: lambda: dequantize(codes, inverse_scale=0.5)}
        yield Case(f"dequantize E4M3 in blocks, {name}", x.size, one, peer, 0.5)


def update_cases(tensors: int) -> Iterator[Case]:
    """Delayed scaling's update of many tensors; an element is a tensor."""
    rng = np.random.default_rng(0)
    few = tensors // 100
    for length in (16, 1024):
        history = np.abs(rng.standard_normal((length, tensors))).astype(np.float32)
        history[0, ::10] = 0  # some did not run
        state = DelayedScalingState(np.ones(tensors, np.float32), history)
        apart = [
            DelayedScalingState(np.ones((), np.float32), history[:, place].copy())
            for place in range(few)
        ]
        contestants: dict[str, Work] = {
            OURS: partial(update_delayed, state, E4M3),
            "one by one": partial(_update_each, apart),
        }
        name = f"update of delayed scales, history {length}"
        yield Case(name, tensors, contestants, "one by one", shares={"one by one": few})


def _update_each(states: list[DelayedScalingState]) -> None:
    for state in states:
        update_delayed(state, E4M3)


_INPUT_GOALS: dict[np.dtype[Any], float] = {
    np.dtype(np.float32): 5.0,
    np.dtype(np.float64): 2.0,
    np.dtype(np.float16): 2.0,
    np.dtype(ml_dtypes.bfloat16): 2.0,
}


def _quantize_case(fmt: Float8Format, kind: str, x: Array, goal: float) -> Case:
    few = x[::SLOW].copy()
    contestants: dict[str, Work] = {
        OURS: lambda: quantize(x, fmt, overflow="ml_dtypes"),
        ML_DTYPES.name: lambda: ML_DTYPES.cast(x, fmt),
    }
    if GFLOAT.lacking() is None:
        contestants[GFLOAT.name] = lambda: GFLOAT.cast(few, fmt)
    if (tensor := _torch_tensor(x)) is not None:
        import torch

        contestants["torch CPU"] = lambda: tensor.to(getattr(torch, fmt.dtype_name))
    name = f"quantize {fmt.name} {x.dtype.name} {kind}"
    return Case(name, x.size, contestants, ML_DTYPES.name, goal, {GFLOAT.name: few.size})


def _dequantize_case(fmt: Float8Format, kind: str, codes: Array) -> Case:
    contestants: dict[str, Work] = {
        OURS: lambda: dequantize(codes),
        ML_DTYPES.name: lambda: codes.astype(np.float32),
    }
    if (tensor := _torch_tensor(codes)) is not None:
        contestants["torch CPU"] = lambda: tensor.float()
    return Case(f"dequantize {fmt.name} {kind}", codes.size, contestants, ML_DTYPES.name, 4.0)


def _torch_tensor(x: Array) -> Any:
    try:
        import torch
    except ModuleNotFoundError:
        return None
    from fp8lab.testing import to_torch

    torch.set_num_threads(1)
    return to_torch(x)


@dataclass(frozen=True)
class Suite:
    """Cases, and on how many elements they run unless somebody says otherwise."""

    cases: Callable[[int], Iterator[Case]]
    elements: int


SUITES = (
    Suite(cast_cases, 1 << 22),
    Suite(thread_cases, 1 << 24),
    Suite(block_cases, 1 << 24),
    Suite(update_cases, 10_000),
)


def run_case(case: Case, repeats: int) -> Row:
    """Time a case: each repeat runs every contestant once, in a turning order."""
    names = list(case.contestants)
    now = time.thread_time if case.clock == "thread" else time.perf_counter
    for name in names:
        case.contestants[name]()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(repeats):
        turn = repeat % len(names)
        for name in names[turn:] + names[:turn]:
            start = now()
            case.contestants[name]()
            seconds[name].append(now() - start)
    per_element = {
        name: statistics.median(times) / case.shares.get(name, case.elements)
        for name, times in seconds.items()
    }
    return {
        "case": case.name,
        "elements": case.elements,
        "rates": {name: round(1 / value) for name, value in per_element.items()},
        "clock": case.clock,
        "against": case.against,
        "ratio": round(per_element[case.against] / per_element[OURS], 3),
        "goal": case.goal,
    }


def run(
    only: str, elements: int | None, repeats: int, out: Path, command: str
) -> tuple[list[Row], Path]:
    """Run the cases whose name holds `only`, and write the rows.

    Returns:
        The rows, the head first, and the file that they are in.

    Raises:
        UserError: `only` is in no name, or the file cannot be written.
    """
    from tqdm import tqdm

    described = {
        "command": command,
        "date": today(),
        "repeats": repeats,
        "environment": environment("cpu"),
        "peers": {package: _version(package) for package in ("gfloat", "torch", "ml_dtypes")},
    }
    new = NewRows(out, {"bench": described})
    names = [case.name for suite in SUITES for case in suite.cases(FEW)]
    if not any(only in name for name in names):
        raise UserError(f"--only is {only!r}; accepted: a part of {'; '.join(names)}")
    cases = (case for suite in SUITES for case in suite.cases(elements or suite.elements))
    with new, tqdm(unit="case") as bar:
        for case in cases:
            if only in case.name:
                bar.set_postfix_str(case.name)
                new.add(run_case(case, repeats))
            bar.update()
    return new.rows, new.path


def report(rows: list[Row]) -> str:
    """One line a case: our rate, the ratio, the goal."""
    lines = [f"{'case':<44} {'M elements/s':>12} {'ratio':>7} {'goal':>5}  against"]
    for row in rows[1:]:
        rate = row["rates"][OURS] / 1e6
        goal = "-" if row["goal"] is None else f"{row['goal']:g}"
        lines.append(
            f"{row['case']:<44} {rate:>12.1f} {row['ratio']:>7.2f} {goal:>5}  {row['against']}"
        )
    return "\n".join(lines)


def draw(rows: list[Row], figure: Path) -> None:
    """Bars of millions of elements a second, one group a case, from rows alone."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from fp8lab.experiments.plot import COLOURS

    cases = rows[1:]
    names = list(dict.fromkeys(name for row in cases for name in row["rates"]))
    height = 0.8 / len(names)
    picture, axis = plt.subplots(figsize=(9, 1 + 0.55 * len(cases)), layout="constrained")
    for place, name in enumerate(names):
        at = [(i + (place + 0.5) * height - 0.4, row) for i, row in enumerate(cases)]
        bars = [(y, row["rates"][name] / 1e6) for y, row in at if name in row["rates"]]
        places, rates = [y for y, _ in bars], [rate for _, rate in bars]
        axis.barh(places, rates, height=height, label=name, color=COLOURS[place])
    labels = [f"{row['case']}\n{row['ratio']:.1f} times {row['against']}" for row in cases]
    axis.set_yticks(range(len(cases)), labels, fontsize=8)
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.set_xlabel("million elements a second")
    axis.set_title(rows[0]["bench"]["environment"]["processor"], fontsize=10)
    axis.grid(axis="x", alpha=0.25)
    axis.legend(fontsize=8)
    picture.savefig(figure, dpi=110, metadata={"Software": None})
    plt.close(picture)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def main(arguments: list[str] | None = None) -> int:
    """Run, write the rows, print them, draw them."""
    parser = Parser(description="How fast the oracle is, beside other libraries.")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name holds TEXT")
    parser.add_argument("--elements", type=int, metavar="N", help="(default: each suite's own)")
    parser.add_argument("--repeats", type=int, default=15, metavar="N", help="(default 15)")
    parser.add_argument("--out", type=Path, default=ROWS, metavar="FILE", help=f"(default {ROWS})")
    given = parser.parse_args(arguments)
    check_suffix(given.out, (SUFFIX,))
    check_writable(given.out.with_suffix(".png"))
    check_at_least(given.repeats, 1, "--repeats")
    if given.elements is not None and (given.elements < FEW or given.elements % FEW):
        raise UserError(f"--elements is {given.elements}; accepted: multiples of {FEW}")
    command = command_of("bench_emulation", arguments)
    rows, path = run(given.only, given.elements, given.repeats, given.out, command)
    print(report(rows))
    draw(rows, path.with_suffix(".png"))
    print(f"\nrows: {path}\nfigure: {path.with_suffix('.png')}")
    return 0


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
