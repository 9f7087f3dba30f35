"""A learning-rate spike with and without the fallback, beside BF16: what it costs, what it saves.

    python -m fp8lab.experiments.fallback_spike [--seeds N] [--text FILE] [--out FILE]

A small model is trained; for a few steps the learning rate is far too high, as after a mistake in
a schedule. Weights and activations outgrow scales that were right before: static ones, set to
what the first steps need, for good; delayed ones until their history has seen it. Each
condition is run in FP8, in FP8 with the fallback, and in BF16, on the same seeds and batches; and
once more in FP8 from a weight that is one ulp larger, which shows how far runs drift apart by chaos
alone. Rows go beside the figure, each as its run ends; given again, the command does what is
missing. --out names either file. --redraw draws the rows that are there. `docs/watching.md` tells
what was found.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from fp8lab.conversion import conversion_report
from fp8lab.data import load_corpus
from fp8lab.experiments.commands import Parser, check_at_least, exit_code, made_by, rows_and_figure
from fp8lab.experiments.documents import check_document, fill
from fp8lab.experiments.plot_fallback import check_rows, draw, table
from fp8lab.experiments.sittings import Sitting
from fp8lab.experiments.turns import check_jobs, in_turn
from fp8lab.fallback import FallbackRule
from fp8lab.fallback_run import FallbackConfig
from fp8lab.models import TransformerConfig
from fp8lab.recipes import recipe_named
from fp8lab.records import Row, environment, read_rows
from fp8lab.training import TrainingRun, ends, summary_of
from fp8lab.training_config import TrainingConfig

# Static scales: the largest powers of two that leave a factor of two above the largest magnitudes
# that BF16 shows in the first 20 steps (4.05, 0.098 and 0.0128).
CONDITIONS = {
    "static": "static:input.scale=32:weight.scale=2048:grad_output.scale=2097152",
    "delayed": "delayed",
}
SECTION = "fallback spike"  # of a document: where the table stands
VARIANTS = ("fp8", "fallback", "one ulp")
SPIKE = (60, 63)  # first and last step of the spike
FACTOR = 20.0  # on the learning rate
FALLBACK = FallbackConfig(FallbackRule(overflow=1e-3, after=1, recover=10), window=1)


class SpikedRun(TrainingRun):
    """A run whose learning rate is `FACTOR` times too high for a while."""

    def gradients(self, batch: tuple[Any, ...]) -> Tensor:
        """As ever; the optimizer's step comes after it."""
        if SPIKE[0] <= self.step <= SPIKE[1]:
            for group in self.optimizer.param_groups:
                group["lr"] *= FACTOR
        return super().gradients(batch)


def configuration(condition: str, variant: str, seed: int, steps: int) -> TrainingConfig:
    """A small model on the CPU; BF16 has no condition."""
    recipe = recipe_named("bf16" if variant == "bf16" else CONDITIONS[condition])
    return TrainingConfig(
        recipe,
        seed=seed,
        steps=steps,
        batch=8,
        model=TransformerConfig(context=32, width=64, layers=2, heads=4),
        warmup=20,
        observe_every=10**9,
        validate_every=20,
        fallback=FALLBACK if variant == "fallback" else None,
    )


def rows_of(condition: str, variant: str, seed: int, text: Path | None, steps: int) -> Row:
    """One run as one row: losses, validation losses by step, events."""
    run = SpikedRun(configuration(condition, variant, seed, steps), load_corpus(text))
    if variant == "one ulp":
        with torch.no_grad():
            weight = run.model.get_parameter("positions.weight").view(-1)
            weight[0] = torch.nextafter(weight[0], torch.tensor(float("inf")))
    rows = list(_train(run))
    validated = [(row["step"], row["validation_loss"]) for row in rows if "validation_loss" in row]
    return {
        "condition": condition,
        "variant": variant,
        "seed": seed,
        "loss": [row["loss"] for row in rows],
        "places": 3 * len(conversion_report(run.model).converted),
        "validation": {str(step): loss for step, loss in validated},
        "validation_loss": summary_of(rows)["validation_loss"],
        "skipped": [row["step"] for row in rows if "skipped" in row],
        "events": [event for row in rows for event in row.get("events", ())],
    }


def _train(run: TrainingRun) -> Iterator[Row]:
    while run.step < run.config.steps:
        row = run.advance()
        yield row
        if ends(row, run.config):
            return


def runs_of(seeds: int) -> list[tuple[str, str, int]]:
    """(condition, variant, seed) of each run; BF16 has no condition."""
    pairs = [("", "bf16"), *((c, v) for c in CONDITIONS for v in VARIANTS)]
    return [(*pair, seed) for pair in pairs for seed in range(seeds)]


def _work(run: tuple[str, str, int], text: Path | None, steps: int) -> Row:
    return rows_of(*run, text, steps)


def _sit(given: argparse.Namespace, path: Path, made: Row) -> None:
    """Do the runs whose rows are not there."""
    corpus = load_corpus(given.text)
    head: Row = {
        "fallback_spike": {"seeds": given.seeds, "spike": list(SPIKE), "factor": FACTOR},
        "configuration": configuration("static", "fallback", 0, given.steps).to_dict(),
        "recipes": CONDITIONS,
        "corpus": {"name": corpus.name, "sha256": corpus.sha256},
        "environment": environment("cpu") | made,
    }
    runs = runs_of(given.seeds)
    with Sitting(path, head, check=check_rows) as sitting:
        done = [_run_of(row) for row in sitting.rows]
        missing = [run for run in runs if run not in done]
        work = partial(_work, text=given.text, steps=given.steps)
        for _, row in tqdm(in_turn(missing, work, jobs=given.jobs), total=len(missing), unit="run"):
            sitting.add(row)
        order = {run: place for place, run in enumerate(runs)}
        sitting.sort(lambda row: order.get(_run_of(row), len(order)))


def _run_of(row: Row) -> tuple[str, str, int]:
    return row["condition"], row["variant"], row["seed"]


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, or draw what is there."""
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="(default 3)")
    parser.add_argument("--steps", type=int, default=160, help="of a run (default 160)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default 1)")
    parser.add_argument("--text", type=Path, metavar="FILE", help="in place of the plays")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("figures/fallback-spike.png"),
        metavar="FILE",
        help="figure, or rows",
    )
    parser.add_argument("--redraw", action="store_true", help="from the rows that are there")
    parser.add_argument("--document", type=Path, metavar="FILE", help="put the table there, too")
    given = parser.parse_args(arguments)
    path, figure = rows_and_figure(given.out)
    if given.document is not None:
        check_document(given.document, SECTION)
    if not given.redraw:
        check_jobs(given.jobs, None)
        check_at_least(given.seeds, 1, "--seeds")
        check_at_least(given.steps, SPIKE[0], "--steps")  # something to see after the spike
        _sit(given, path, made_by("fallback_spike", arguments))
    rows = check_rows(read_rows(path), path)
    draw(rows, figure)
    found = table(rows)
    print(found)
    if given.document is not None:
        fill(given.document, SECTION, found)


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
