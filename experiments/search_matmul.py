"""Which launch settings of the fast product are fastest, each between two bursts of cuBLASLt.

    python -m fp8lab.experiments.search_matmul [--modes A,B] [--shapes TEXT] [--groups 8,16,32]
                  [--tiles NAME,...] [--rounds N] [--seconds S] [--out FOLDER]
    python -m fp8lab.experiments.search_matmul --report FILE

The second needs no card: it prints the tables of a file, with what `fast_settings` chooses today.

In hot work a card is limited by power, and which kernel ran just before changes a time by several
percent. So before and after each visit to a candidate cuBLASLt runs for about as long, candidates
are visited in another order each round, and a ratio is the mean of the two bursts over the visit
(`fp8lab.experiments.card_timing.against_reference`). Where cuBLASLt lacks the contract (mx), our
default settings are the reference.

A candidate whose bits differ from the default's, that fails, or that takes more than three times as
long, is not timed; its row says so. Given again, the command does what is missing of its file.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

import torch

from fp8lab.errors import UserError
from fp8lab.experiments.bench_matmul import shapes
from fp8lab.experiments.card_timing import WARM_BURSTS, Launch, against_reference
from fp8lab.experiments.commands import Parser, check_at_least, command_of, exit_code, listed
from fp8lab.experiments.search_matmul_card import Card, Contest
from fp8lab.experiments.search_matmul_report import report
from fp8lab.experiments.search_matmul_rows import (
    MODES,
    Search,
    candidate_name,
    check_rows,
    check_tiles,
    identity,
    named_shapes,
    place_of,
)
from fp8lab.experiments.sittings import Sitting
from fp8lab.experiments.turns import check_jobs
from fp8lab.kernels.matmul_settings import GluonSettings
from fp8lab.records import Row, read_rows

ROWS = "search-matmul.jsonl"
Piece = tuple[str, str]  # a shape and a mode


def missing_of(
    search: Search,
    available: Mapping[str, list[GluonSettings]],
    multiprocessors: int,
    rows: Iterable[Row],
) -> dict[Piece, list[GluonSettings]]:
    """Candidates that have no row yet, by shape and mode; pieces that have them all are left out.

    Args:
        search: What is searched.
        available: The tiles of each mode.
        multiprocessors: Of the card: what is chosen today depends on it.
        rows: Those that there are, without the head.
    """
    done = {place_of(row) for row in rows}
    found = {}
    for shape, sizes in search.shapes.items():
        for mode in search.modes:
            choice = MODES[mode].choice(*sizes, multiprocessors)
            lacking = [
                settings
                for settings in search.candidates(available[mode], choice)
                if place_of({"mode": mode, "shape": shape, **identity(settings)}) not in done
            ]
            if lacking:
                found[shape, mode] = lacking
    return found


def estimate(search: Search, pieces: Iterable[list[GluonSettings]]) -> float:
    """Seconds of visits and bursts; products that take longer than a visit, and slow ones, add."""
    bursts = sum(2 * search.rounds * len(piece) + 1 + WARM_BURSTS for piece in pieces)
    return bursts * search.visit_ms / 1e3


def measure(
    search: Search,
    piece: Piece,
    candidates: list[GluonSettings],
    contest: Contest,
    default: GluonSettings,
) -> Iterator[Row]:
    """The rows of a shape and a mode: first those of candidates that are not timed."""
    shape, mode = piece
    m, n, k = search.shapes[shape]
    base: Row = {"mode": mode, "shape": shape, "m": m, "n": n, "k": k}
    sound: dict[str, Row] = {}
    launches: dict[str, Launch] = {}
    contest.prepare(candidates)
    for settings in candidates:
        row = base | identity(settings) | {"default": settings == default}
        row["reference"] = contest.reference_name
        if (problem := contest.problem(settings)) is not None:
            yield row | {"left_out": problem}
            contest.check_device()
        else:
            sound[candidate_name(row)] = row
            launches[candidate_name(row)] = contest.launch(settings)
    if not sound:
        return
    found = against_reference(
        contest.reference,
        launches,
        sets=contest.sets,
        rounds=search.rounds,
        visit_ms=search.visit_ms,
        seed=f"{search.seed} {mode} {shape}",
    )

    def rate(times: list[float]) -> float:
        return 2e-9 * m * n * k / statistics.median(times)

    for name, row in sound.items():
        yield row | {
            "ratio": statistics.median(found.ratios[name]),
            "lowest": min(found.ratios[name]),
            "highest": max(found.ratios[name]),
            "tflops": rate(found.times[name]),
            "reference_tflops": rate(found.reference),
            "sets": contest.sets,
        }


def run(
    search: Search,
    folder: Path,
    seconds: float | None,
    card: Card,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Measure what has no row yet, a line a row, and print the tables.

    Args:
        search: What is searched.
        folder: Where the rows go, or are.
        seconds: After so many nothing new is begun; None: no limit.
        card: What is searched on.
        clock: Seconds, for that limit.
    """
    begun = clock()
    available = {mode: card.available(MODES[mode]) for mode in search.modes}
    check_tiles(search.tiles, [tile for tiles in available.values() for tile in tiles])
    count, path = card.multiprocessors(), folder / ROWS
    with Sitting(path, search.head(count, card.environment()), check=check_rows) as sitting:
        pieces = missing_of(search, available, count, sitting.rows)
        print(
            f"{len(pieces)} products, {sum(map(len, pieces.values()))} candidates: about"
            f" {estimate(search, pieces.values()):.0f} s of launches, and compilation",
            flush=True,
        )
        for piece, candidates in pieces.items():
            if seconds is not None and clock() - begun >= seconds:
                break
            mode, sizes = MODES[piece[1]], search.shapes[piece[0]]
            default = mode.choice(*sizes, count)
            for row in measure(search, piece, candidates, card.contest(mode, sizes), default):
                sitting.add(row)
                print(_said(row), flush=True)
        missing = missing_of(search, available, count, sitting.rows)
        print(report([sitting.head, *sitting.rows]))
    print(path)
    if missing:
        names = "; ".join(f"{shape}, {mode}" for shape, mode in missing)
        print(f"missing: {names}; the same command goes on with them")


def _said(row: Row) -> str:
    name = f"{row['shape']:<22} {row['mode']:<17} {candidate_name(row):<36}"
    if "left_out" in row:
        return f"{name} left out: {row['left_out']}"
    return (
        f"{name} {row['ratio']:6.3f} ({row['lowest']:.3f} to {row['highest']:.3f})"
        f" {row['tflops']:5.0f} TFLOP/s"
    )


def main(arguments: list[str] | None = None) -> None:
    """Search, or print the tables of a search."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--modes", default=",".join(MODES), metavar="A,B", help="(default all)")
    parser.add_argument(
        "--shapes",
        action="append",
        metavar="TEXT",
        help="those of bench_matmul whose name holds this text, or another's where given again",
    )
    parser.add_argument("--groups", default="8", metavar="N,N", help="of tiles (default 8)")
    parser.add_argument("--tiles", metavar="NAME,...", help="such as 128x256x128 (default all)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="(default 5)")
    parser.add_argument("--seconds", type=float, metavar="S", help="begin nothing after S seconds")
    parser.add_argument("--out", type=Path, default=Path("figures/h200"), help="where rows go")
    parser.add_argument("--report", type=Path, metavar="FILE", help="print its tables alone")
    given = parser.parse_args(arguments)
    if given.report is not None:
        print(report(check_rows(read_rows(given.report), given.report)))
        return
    check_jobs(1, given.seconds)
    check_at_least(given.rounds, 1, "--rounds")
    search = Search(
        listed(given.modes, "--modes"),
        named_shapes(shapes(), given.shapes or [""]),
        _numbers(listed(given.groups, "--groups")),
        () if given.tiles is None else listed(given.tiles, "--tiles"),
        given.rounds,
    )
    if not torch.cuda.is_available():
        raise UserError(
            "search_matmul needs a CUDA device; --report FILE prints a file's tables without"
        )
    command = command_of("search_matmul", arguments)
    when = datetime.now(UTC).isoformat(timespec="seconds")
    run(search, given.out, given.seconds, Card({"when": when, "command": command}))


def _numbers(words: tuple[str, ...]) -> tuple[int, ...]:
    try:
        return tuple(map(int, words))
    except ValueError:
        raise UserError(
            f"--groups names {', '.join(words)}; accepted: whole numbers, separated by commas"
        ) from None


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
