"""Does FP8 cost anything against BF16? Validation losses of each preset, seed by seed.

    python -m fp8lab.experiments.preset_curves [--presets A,B] [--seeds 0,1,2] [--steps N] [--large]
                                               [--device cuda] [--jobs N] [--seconds S] [--out FILE]
    python -m fp8lab.experiments.preset_curves --redraw [--out FILE] [--document docs/training.md]

A seed decides the initial weights and the batches, the same in every preset, so a preset is
compared with BF16 seed by seed. So is `bf16_one_ulp`, BF16 with one weight moved by one ulp: two
runs drift apart by chaos alone, and that is how far. Runs may be spread over many sittings: each is
written to a file of rows as it ends, and a later call with the same settings does only what is
missing. The first row says what the settings are; then comes one row a run, see
`preset_run.finished`. --out names that file (.jsonl) or the figure (.png, .pdf, .svg), and the
other lies beside it (default figures/preset-curves.*; with --large figures/h200/preset-curves.*).
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import torch

from fp8lab.data import load_corpus
from fp8lab.errors import UserError
from fp8lab.experiments.commands import Parser, check_distinct, exit_code, listed, rows_and_figure
from fp8lab.experiments.documents import check_document, fill
from fp8lab.experiments.plot_curves import check_rows, draw, section, section_name
from fp8lab.experiments.preset_run import CONTROL, attempt, configuration, head_of
from fp8lab.experiments.sittings import Sitting
from fp8lab.experiments.turns import check_jobs, in_turn
from fp8lab.recipes import PRESETS
from fp8lab.records import read_rows
from fp8lab.training import check_device
from fp8lab.training_config import TrainingConfig

# "current" is "tensorwise"; "static" is no way to train (its scale is 1).
DEFAULT = (*(name for name in PRESETS if name not in ("current", "static")), CONTROL)
COMMAND = "python -m fp8lab.experiments.preset_curves"


def do_missing(
    sitting: Sitting, runs: list[TrainingConfig], options: argparse.Namespace, command: str
) -> int:
    """Do the runs whose rows are not there, in their order; returns how many failed.

    A run that fails is told on stderr, leaves no row, and stops no other.
    """

    def missing() -> list[TrainingConfig]:
        done = {(row["preset"], row["seed"]) for row in sitting.rows}
        return [own for own in runs if (own.recipe.name, own.seed) not in done]

    print(f"{len(runs) - len(missing())} of {len(runs)} runs are done already")
    failed = 0
    work = partial(attempt, text=options.text)
    gpus = torch.cuda.device_count() if options.device == "cuda" else 0
    limits = {"jobs": options.jobs, "seconds": options.seconds, "gpus": gpus}
    for run, row in in_turn(missing(), work, **limits):
        named = f"{run.recipe.name} seed {run.seed}"
        if isinstance(row, str):
            failed += 1
            print(f"{named} failed\n{row}", file=sys.stderr)
            continue
        sitting.add(row | {"command": command})
        print(
            f"{named}: {row['validation_loss']:.4f} nats a byte, {row['skipped']} steps skipped,"
            f" {row['time']['seconds']:.0f} s" + ", diverged" * row["diverged"],
            flush=True,
        )
    if left := missing():
        names = ", ".join(f"{run.recipe.name} seed {run.seed}" for run in left)
        print(f"{len(left)} of {len(runs)} runs are left: {names}")
    return failed


def _named(given: argparse.Namespace) -> list[TrainingConfig]:
    """The runs that were asked for, seed by seed: an early end leaves whole seeds."""
    presets, texts = listed(given.presets, "--presets"), listed(given.seeds, "--seeds")
    wrong = [text for text in texts if not text.isdecimal()]
    if wrong:
        raise UserError(f"--seeds has {wrong[0]!r}; accepted: whole numbers, such as 0,1,2")
    seeds = tuple(map(int, texts))
    check_distinct(seeds, "--seeds")
    options = {"steps": given.steps, "device": given.device, "large": given.large}
    runs = [configuration(name, seed, **options) for seed in seeds for name in presets]
    check_distinct(tuple(run.recipe.name for run in runs[: len(presets)]), "--presets")
    return runs


def _sit(given: argparse.Namespace, path: Path) -> int:
    """Do what is missing; returns how many runs failed."""
    check_jobs(given.jobs, given.seconds)
    runs = _named(given)
    check_device(given.device)
    corpus = load_corpus(given.text)
    corpus.check_context(runs[0].model.context)
    large = " --large" * given.large
    command = f"{COMMAND}{large} --device {given.device} --steps {given.steps}"
    with Sitting(path, head_of(runs[0], corpus, large=given.large), check=check_rows) as sitting:
        failed = do_missing(sitting, runs, given, command)
        sitting.sort(lambda row: (row["seed"], row["preset"]))
    return failed


def _parser() -> argparse.ArgumentParser:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--presets", default=",".join(DEFAULT), metavar="A,B", help="(default all)")
    parser.add_argument("--seeds", default="0,1,2", metavar="A,B", help="which (default 0,1,2)")
    parser.add_argument("--steps", type=int, metavar="N", help="(default 200; 2000 with --large)")
    parser.add_argument("--large", action="store_true", help="122M parameters")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="(default cpu; --large: cuda)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes (default 1)")
    parser.add_argument(
        "--seconds", type=float, metavar="S", help="begin no run after them (default no limit)"
    )
    parser.add_argument("--text", type=Path, metavar="FILE", help="in place of the plays")
    parser.add_argument("--out", type=Path, metavar="FILE", help="rows, or figure")
    parser.add_argument("--redraw", action="store_true", help="from the rows that are there")
    parser.add_argument("--document", type=Path, metavar="FILE", help="put the table into it")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run what is missing, or only draw. Returns 1 where a run failed."""
    given = _parser().parse_args(arguments)
    given.steps = given.steps if given.steps is not None else (2000 if given.large else 200)
    given.device = given.device or ("cuda" if given.large else "cpu")
    folder = Path("figures/h200" if given.large else "figures")
    path, figure = rows_and_figure(given.out or folder / "preset-curves.jsonl")
    if given.document is not None and not given.redraw:
        check_document(given.document, section_name(given.large))
    failed = 0 if given.redraw else _sit(given, path)
    rows = check_rows(read_rows(path), path)
    if given.redraw or len(rows) > 1:
        if given.document is not None:
            check_document(given.document, section_name(rows[0]["preset_curves"]["large"]))
        draw(rows, figure)
        print(section(rows))
        if given.document is not None:
            fill(given.document, section_name(rows[0]["preset_curves"]["large"]), section(rows))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
