"""How fast the oracle's matrix product is on a CPU, beside two other emulators in the same run.

    python -m fp8lab.experiments.bench_matmul_emulation [--peers FOLDER] [--repeats N]

The peers are MMA-Sim 2.1.1 and mmaemu 0.1.0 from PyPI (`pip install --no-deps --target FOLDER
mmasim==2.1.1 mmaemu==0.1.0`; both need torch). Each repeat runs every contestant once, the median
counts, and every contestant's bits are compared with ours. "rate" is multiply-adds a second of wall
time; "cpu_rate" counts the processor time of all threads, which other programs do not stretch.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fp8lab.bridge import to_numpy, to_torch
from fp8lab.emulation.casting import quantize
from fp8lab.emulation.matmul import matmul
from fp8lab.errors import UserError
from fp8lab.experiments.commands import Parser, check_at_least, exit_code
from fp8lab.experiments.new_rows import NewRows
from fp8lab.formats import E4M3
from fp8lab.records import Row, environment

ROWS = Path("figures/bench-matmul-emulation.jsonl")
Array = np.ndarray[Any, Any]
OURS = "fp8lab"


@dataclass(frozen=True)
class Contestant:
    """An emulator at a task.

    Attributes:
        name: Who.
        threads: How many threads it may use.
        share: It gets one row of A in so many: slow ones would take minutes.
        work: From A (M, K) and B (K, N) to the float32 product.
    """

    name: str
    threads: int
    share: int
    work: Callable[[Array, Array], Array]


def mma_sim() -> Callable[[Array, Array], Array]:
    """MMA-Sim's wgmma of Hopper: m64n128k32, tile by tile, one step after the other over K."""
    step = import_module("mmasim.nv_ptx.sim").WGMMA("Hopper", "m64n128k32.f32.e4m3.e4m3")

    def work(a: Array, b: Array) -> Array:
        left, right = to_torch(a), to_torch(np.ascontiguousarray(b.T)).t()
        (m, k), n = a.shape, b.shape[1]
        total = torch.zeros(m, n)
        for row, column in product(range(0, m, 64), range(0, n, 128)):
            tile = total[row : row + 64, column : column + 128]
            for first in range(0, k, 32):
                ks = slice(first, first + 32)
                x, y = left[row : row + 64, ks], right[ks, column : column + 128]
                tile.copy_(step(x, y, tile.clone()))
        return to_numpy(total)

    return work


def mmaemu() -> Callable[[Array, Array], Array]:
    """mmaemu's CPU reference."""
    module = import_module("mmaemu")

    def work(a: Array, b: Array) -> Array:
        left, right = to_torch(a), to_torch(np.ascontiguousarray(b.T))
        result = module.accumulate(left, right, use_fast_accum=True, splitk=1)
        return to_numpy(result)

    return work


def contestants() -> list[Contestant]:
    """Ours with one and two threads, and the peers that are installed."""
    found = [
        Contestant(OURS, threads, 1, lambda a, b, t=threads: matmul(a, b, threads=t))  # type: ignore[misc]
        for threads in (1, 2)
    ]
    for name, make, share in (("MMA-Sim", mma_sim, 8), ("mmaemu", mmaemu, 1)):
        try:
            work = make()
        except ImportError as error:
            print(f"{name} is left out: {error}")
            continue
        found += [Contestant(name, threads, share, work) for threads in (1, 2)]
    return found


def operands(m: int, n: int, k: int) -> tuple[Array, Array]:
    """Normal numbers, which fill eleven binades of E4M3, both signs, some subnormal."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((m, k)), rng.standard_normal((k, n))
    return quantize(a.astype(np.float32), E4M3), quantize(b.astype(np.float32), E4M3)


def run(sizes: tuple[int, int, int], repeats: int) -> list[Row]:
    """Measure everyone; a row each."""
    a, b = operands(*sizes)
    entries = contestants()
    wall: dict[Contestant, list[float]] = {entry: [] for entry in entries}
    busy: dict[Contestant, list[float]] = {entry: [] for entry in entries}
    different: dict[Contestant, int] = {}
    reference = matmul(a, b)
    torch_threads = torch.get_num_threads()
    for repeat in range(repeats + 1):  # the first warms up
        for entry in entries:
            torch.set_num_threads(entry.threads)
            part = a[:: entry.share]
            start, cpu = time.perf_counter(), time.process_time()
            result = entry.work(part, b)
            wall[entry].append(time.perf_counter() - start)
            busy[entry].append(time.process_time() - cpu)
            if repeat == 0:
                expected = reference[:: entry.share].view(np.uint32)
                different[entry] = int((result.view(np.uint32) != expected).sum())
    torch.set_num_threads(torch_threads)
    rows = []
    for entry in entries:
        count = a[:: entry.share].size * b.shape[1]
        rows.append(
            {
                "kind": "speed",
                "name": entry.name,
                "threads": entry.threads,
                "sizes": [len(a[:: entry.share]), sizes[1], sizes[2]],
                "rate": count / statistics.median(wall[entry][1:]),
                "cpu_rate": count / statistics.median(busy[entry][1:]),
                "different": different[entry],
            }
        )
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a line a contestant, write the rows."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--peers", type=Path, help="folder that the peers were installed into")
    parser.add_argument("--sizes", type=int, nargs=3, default=[512, 1024, 1024], metavar="N")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROWS, help="the file of rows")
    chosen = parser.parse_args(arguments)
    for size in chosen.sizes:
        check_at_least(size, 1, "--sizes")
    check_at_least(chosen.repeats, 1, "--repeats")
    if chosen.peers is not None:
        if not chosen.peers.is_dir():
            raise UserError(f"--peers is {chosen.peers}; accepted: a folder that there is")
        sys.path.append(str(chosen.peers))
    m, n, k = chosen.sizes
    head = {
        "kind": "run",
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": "python -m fp8lab.experiments.bench_matmul_emulation --peers FOLDER",
        "peers": {"mmasim": "2.1.1", "mmaemu": "0.1.0"},
        "environment": environment("cpu"),
    }
    new = NewRows(chosen.out, head)  # a mistake is found before anything runs
    rows = run((m, n, k), chosen.repeats)
    for row in rows:
        best = next(r for r in rows if r["name"] == OURS and r["threads"] == row["threads"])
        print(
            f"{row['name']:<8} threads {row['threads']}: {row['rate'] / 1e6:8.1f} M/s wall,"
            f" {row['cpu_rate'] / 1e6:8.1f} M/s of processor time,"
            f" ours is {best['rate'] / row['rate']:6.2f} times as fast,"
            f" {row['different']} elements differ"
        )
    with new:
        new.add(*rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
