"""How long a checkpoint takes: what training waits for, the whole save, a load, and a plain dd.

    python -m fp8lab.experiments.bench_checkpoint [--megabytes 64,512] [--folder FOLDER]

The state is a model's weights and two moments, float32, in tensors of 4 MiB. Each time is the least
of a few, but for the first copy: the host memory that it goes to is still to be had from the
system, and for a GPU to be page-locked; later ones find that done. So each size has a process of
its own. Files are synced to the disk, as dd's are (conv=fsync). Loads come from the page cache.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fp8lab.checkpoint import load, save, take_state
from fp8lab.checkpoint_store import AsyncWriter, CheckpointStore
from fp8lab.errors import UserError
from fp8lab.experiments.commands import (
    Parser,
    check_at_least,
    check_writable,
    exit_code,
    listed,
    made_by,
)
from fp8lab.experiments.new_rows import NewRows
from fp8lab.experiments.turns import in_turn
from fp8lab.records import Row, environment
from fp8lab.training import check_device

TENSOR = 1 << 20  # float32 elements
PARTS = ("weight", "exp_avg", "exp_avg_sq")


def state_of(megabytes: int, device: str) -> dict[str, Any]:
    """About so many megabytes in three kinds of tensors; at least one of each."""
    count = max(1, round(megabytes * 1e6 / (4 * TENSOR * len(PARTS))))
    generator = torch.Generator().manual_seed(0)
    return {
        name: {
            f"layer{place}": torch.randn(TENSOR, generator=generator).to(device)
            for place in range(count)
        }
        for name in PARTS
    }


def measure(megabytes: int, folder: Path, device: str, repeats: int) -> Row:
    """One row: bytes, and seconds of each thing."""
    state = state_of(megabytes, device)
    size = sum(tensor.nbytes for part in state.values() for tensor in part.values())
    store = CheckpointStore(folder, keep_last=1)
    step = 0

    def stall() -> float:
        nonlocal step
        step += 1
        writer = AsyncWriter(store)
        seconds = _timed(lambda: writer.save(state, step=step))
        writer.close()
        return seconds

    def whole() -> float:
        shutil.rmtree(folder / "sync", ignore_errors=True)
        return _timed(lambda: save(folder / "sync", state, step=1))

    def copied() -> float:
        target = folder / "dd"
        blocks = size // (4 * TENSOR)
        command = ["dd", "if=/dev/zero", f"of={target}", "bs=4M", f"count={blocks}", "conv=fsync"]
        return _timed(lambda: subprocess.run(command, check=True, capture_output=True))

    return {
        "bytes": size,
        "device": device,
        "seconds": {
            "first copy to host": round(_timed(lambda: take_state(state)), 4),
            "copy to host": _least(lambda: _timed(lambda: take_state(state)), repeats),
            "asynchronous save: wait": _least(stall, repeats),
            "synchronous save": _least(whole, repeats),
            "load and check": _least(lambda: _timed(lambda: load(folder / "sync")), repeats),
            "dd": _least(copied, repeats),
        },
    }


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _least(measured: Callable[[], float], repeats: int) -> float:
    return round(min(measured() for _ in range(repeats)), 4)


def main(arguments: list[str] | None = None) -> None:
    """Measure each size, print a table, write the rows."""
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", default="64,512", metavar="A,B", help="(default 64,512)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: temporary)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="(default 3)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the rows go")
    given = parser.parse_args(arguments)
    sizes = listed(given.megabytes, "--megabytes")
    wrong = [text for text in sizes if not text.isdecimal() or not int(text)]
    if wrong:
        raise UserError(f"--megabytes has {wrong[0]!r}; accepted: whole numbers from 1, as 64,512")
    check_at_least(given.repeats, 1, "--repeats")
    check_device(given.device)
    if given.folder is not None:
        check_writable(given.folder / "x", "--folder")
        if not given.folder.is_dir():
            raise UserError(f"--folder is {given.folder}; accepted: a folder that there is")
    head: Row = {
        "bench_checkpoint": environment(given.device),
        **made_by("bench_checkpoint", arguments),
    }
    rows = [head]
    with NewRows(given.out, head) if given.out is not None else nullcontext() as new:
        for megabytes in map(int, sizes):
            with tempfile.TemporaryDirectory(dir=given.folder) as folder:
                options = {"device": given.device, "repeats": given.repeats}
                work = partial(measure, folder=Path(folder), **options)
                [(_, row)] = in_turn([megabytes], work, apart=True)
            rows.append(row)
            if new is not None:
                new.add(rows[-1])
    kinds = list(rows[1]["seconds"])
    print("| bytes | " + " | ".join(kinds) + " |")
    print("| --- |" + " --- |" * len(kinds))
    for row in rows[1:]:
        cells = [
            f"{seconds:.3f} s ({row['bytes'] / max(seconds, 1e-9) / 1e9:.2f} GB/s)"
            for seconds in row["seconds"].values()
        ]
        print(f"| {row['bytes'] / 1e6:.0f} MB | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
