"""How fast the cast and scaling kernels are, as shares of the device copy of the same run.

    python -m fp8lab.experiments.bench_casting --out FOLDER          measure, and write rows
    python -m fp8lab.experiments.bench_casting --tune                compare launch settings
    python -m fp8lab.experiments.plot_casting ROWS --figure F --document D

Necessary bytes are what must be read and written once. Every kernel is timed in each repeat, after
a device copy of that repeat: its share of the copy is taken within the repeat, and the median over
the repeats is reported, with the smallest and the largest.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from fp8lab.errors import UserError
from fp8lab.experiments.bench_cases import Case, large_cases, peer_cases, small_cases, tuning_cases
from fp8lab.experiments.commands import (
    Parser,
    check_at_least,
    check_pattern,
    check_writable,
    command_of,
    exit_code,
)
from fp8lab.experiments.kernel_variants import in_processes
from fp8lab.experiments.new_rows import NewRows
from fp8lab.records import Row, environment, today

ROWS = "rows.jsonl"
ELEMENTS = 1 << 28
FEW = 1 << 23  # enough for whole tiles
REPEATS = 3
LAUNCHES = 10
PEERS = 4  # of torch.compile


@dataclass(frozen=True)
class Measured:
    """What the repeats of one case gave.

    Attributes:
        seconds: Of one call, the median of each repeat.
        shares: Bytes a second over the copy's of the same repeat; empty where bytes do not matter.
    """

    seconds: list[float]
    shares: list[float]

    def row(self, case: Case) -> dict[str, Any]:
        """The row of a result, without what is the same for the whole run."""
        row: dict[str, Any] = {
            "case": case.name,
            "kind": case.kind,
            "elements": case.elements,
            "bytes": case.bytes,
            "microseconds": _spread([1e6 * s for s in self.seconds]),
        }
        if self.shares:
            row["share_of_copy"] = _spread(self.shares)
        return row


def measure(cases: list[Case], copy: Case, repeats: int = REPEATS) -> list[Measured]:
    """Time every case in every repeat, one after the other, each after its warm-up."""
    results = [Measured([], []) for _ in cases]
    for _ in range(repeats):
        rate = copy.bytes / device_seconds(copy.call)
        for case, result in zip(cases, results, strict=True):
            seconds = timed(case)
            result.seconds.append(seconds)
            if case.bytes:
                result.shares.append(case.bytes / seconds / rate)
    return results


def timed(case: Case) -> float:
    """Seconds a call, by the clock that the case asks for."""
    if case.graph:
        return graph_seconds(case.call)
    return device_seconds(case.call, LAUNCHES if case.bytes else 100)


def device_seconds(call: Callable[[], Any], launches: int = LAUNCHES) -> float:
    """The median of several calls' device time, each between two events."""
    for _ in range(2):
        call()
    Event: Any = torch.cuda.Event  # untyped in torch
    events = [(Event(enable_timing=True), Event(enable_timing=True)) for _ in range(launches)]
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return float(statistics.median(start.elapsed_time(end) for start, end in events)) / 1e3


def graph_seconds(call: Callable[[], Any], inside: int = 20, replays: int = 10) -> float:
    """Seconds a call when a CUDA graph holds `inside` of them: launches cost the host nothing."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(inside):
            call()
    return device_seconds(graph.replay, replays) / inside


def host_seconds(call: Callable[[], Any], calls: int = 200) -> float:
    """Seconds a call when many follow each other: the host's time, where the device is faster."""
    for _ in range(10):
        call()
    torch.cuda.synchronize()
    start = perf_counter()
    for _ in range(calls):
        call()
    torch.cuda.synchronize()
    return (perf_counter() - start) / calls


def bench(elements: int, *, compiled_peers: bool) -> list[dict[str, Any]]:
    """Rows of the large sizes, then of the small ones."""
    cases = large_cases(elements, compiled_peers=compiled_peers)
    rows = [result.row(case) for case, result in zip(cases, measure(cases, cases[0]), strict=True)]
    del cases
    torch.cuda.empty_cache()
    for case in small_cases():
        repeats = [(host_seconds(case.call), graph_seconds(case.call)) for _ in range(REPEATS)]
        host, graph = ([1e6 * pair[i] for pair in repeats] for i in range(2))
        rows.append(
            {
                "case": case.name,
                "kind": case.kind,
                "elements": case.elements,
                "bytes": case.bytes,
                "microseconds": _spread(host),
                "microseconds_in_graph": _spread(graph),
            }
        )
    return rows


def tune(elements: int, only: str = "") -> list[dict[str, Any]]:
    """Rows of the device copy and of every candidate setting whose name has `only` (a regular
    expression) in it.
    """
    cases = _chosen(tuning_cases(elements), only)
    return [
        result.row(case) for case, result in zip(cases, measure(cases, cases[0], 2), strict=True)
    ]


def compile_large(share: int, shares: int) -> int:
    """In a process of its own: a share of the large cases, on few elements, so that Triton keeps
    what it compiles.
    """
    return _run(large_cases(FEW, compiled_peers=False)[share::shares])


def compile_all(share: int, shares: int, elements: int = ELEMENTS) -> int:
    """The same, and a share of what torch.compile makes."""
    mine = range(share, PEERS, shares)
    peers = [peer_cases(elements)[place] for place in mine] if mine else []
    return compile_large(share, shares) + _run(peers)


def compile_tuned(share: int, shares: int, only: str = "") -> int:
    """The same of the candidate settings."""
    return _run(_chosen(tuning_cases(FEW), only)[share::shares])


def _chosen(cases: list[Case], only: str) -> list[Case]:
    return cases[:1] + [case for case in cases[1:] if re.search(only, f"{case.name} {case.kind}")]


def _run(cases: list[Case]) -> int:
    for case in cases:
        case.call()
    torch.cuda.synchronize()
    return len(cases)


def table(rows: list[dict[str, Any]]) -> str:
    """The rows, one a line."""
    lines = [f"{'case':<54} {'us':>9} {'graph us':>9} {'of copy':>8}  smallest to largest"]
    for row in rows:
        line = f"{_title(row):<54} {row['microseconds']['median']:>9.2f}"
        graph = row.get("microseconds_in_graph")
        line += f" {graph['median']:>9.2f}" if graph else " " * 10
        if share := row.get("share_of_copy"):
            line += f" {share['median']:>8.3f}  {share['smallest']:.3f} to {share['largest']:.3f}"
        lines.append(line)
    return "\n".join(lines)


def _title(row: dict[str, Any]) -> str:
    size = row["elements"]
    shown = f"2^{size.bit_length() - 1}" if size and not size & (size - 1) else str(size)
    return f"{row['case']} [{row['kind']}] {shown}"


def _spread(values: list[float]) -> dict[str, float]:
    return {
        "median": statistics.median(values),
        "smallest": min(values),
        "largest": max(values),
    }


def save(folder: Path, rows: list[Row], *, bench: str, command: str) -> Path:
    """Write `rows.jsonl`: each row with what was run, when, and on what.

    Returns:
        Where they are: beside `rows.jsonl` where that has more.
    """
    common = {
        "bench": bench,
        "date": today(),
        "command": command,
        **environment("cuda"),
    }
    first, *rest = [{**row, **common} for row in rows]
    with NewRows(folder / ROWS, first) as new:
        new.add(*rest)
    return new.path


def main(given: list[str] | None = None) -> None:
    """The command line."""
    parser = Parser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder of rows.jsonl")
    parser.add_argument("--tune", action="store_true", help="compare launch settings")
    parser.add_argument("--only", default="", help="with --tune: a regular expression of names")
    parser.add_argument(
        "--elements", type=int, default=ELEMENTS, help="of a large case: a multiple of 2**22"
    )
    parser.add_argument("--no-compiled-peers", action="store_true", help="no torch.compile")
    parser.add_argument("--jobs", type=int, default=16, help="processes that compile first")
    arguments = parser.parse_args(given)
    check_at_least(arguments.jobs, 1, "--jobs")
    check_pattern(arguments.only, "--only")
    if arguments.elements < 1 or arguments.elements % (1 << 22):
        raise UserError(f"--elements is {arguments.elements}; accepted: multiples of {1 << 22}")
    if arguments.out is not None:
        check_writable(arguments.out / ROWS)
    if not torch.cuda.is_available():
        raise UserError("there is no CUDA device to measure")
    if arguments.jobs > 1:
        with_peers = partial(compile_all, elements=arguments.elements)
        large = compile_large if arguments.no_compiled_peers else with_peers
        tuned = partial(compile_tuned, only=arguments.only)
        in_processes(tuned if arguments.tune else large, arguments.jobs)
    if arguments.tune:
        rows = tune(arguments.elements, arguments.only)
    else:
        rows = bench(arguments.elements, compiled_peers=not arguments.no_compiled_peers)
    if arguments.out is not None:
        command = command_of("bench_casting", given)
        save(arguments.out, rows, bench="casting", command=command)
    print(table(rows))


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
