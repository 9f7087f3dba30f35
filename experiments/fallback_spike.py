"""A learning-rate spike with and without the fallback, beside BF16: what it costs, what it saves.

    python -m fp8lab.experiments.fallback_spike [--seeds N] [--text FILE] [--out FIGURE]

A small model is trained; for a few steps the learning rate is far too high, as after a mistake in
a schedule. Weights and activations outgrow scales that were right before: static ones, set to
what the first steps need, for good; delayed ones until their history has seen it. Each
condition is run in FP8, in FP8 with the fallback, and in BF16, on the same seeds and batches; and
once more in FP8 from a weight that is one ulp larger, which shows how far runs drift apart by chaos
alone. Rows go beside the figure; --redraw draws the rows that are there. `docs/watching.md` tells
what was found.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import joblib
import torch
from torch import Tensor
from tqdm import tqdm

from fp8lab.conversion import conversion_report
from fp8lab.data import load_corpus
from fp8lab.experiments.documents import fill
from fp8lab.experiments.plot_fallback import draw, table
from fp8lab.fallback import FallbackRule
from fp8lab.fallback_run import FallbackConfig
from fp8lab.models import TransformerConfig
from fp8lab.recipes import recipe_named
from fp8lab.records import Row, environment, read_rows, to_json, write_atomically
from fp8lab.training import TrainingRun, ends, summary_of
from fp8lab.training_config import TrainingConfig

# Static scales: the largest powers of two that leave a factor of two above the largest magnitudes
# that BF16 shows in the first 20 steps (4.05, 0.098 and 0.0128).
CONDITIONS = {
    "static": "static:input.scale=32:weight.scale=2048:grad_output.scale=2097152",
    "delayed": "delayed",
}
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


def main(arguments: list[str] | None = None) -> None:
    """Run it, or draw what is there."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="(default 3)")
    parser.add_argument("--steps", type=int, default=160, help="of a run (default 160)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default 1)")
    parser.add_argument("--text", type=Path, metavar="FILE", help="in place of the plays")
    parser.add_argument("--out", type=Path, default=Path("figures/fallback-spike.png"))
    parser.add_argument("--redraw", action="store_true", help="from the rows that are there")
    parser.add_argument("--document", type=Path, metavar="FILE", help="put the table there, too")
    given = parser.parse_args(arguments)
    path = given.out.with_suffix(".jsonl")
    if not given.redraw:
        corpus = load_corpus(given.text)
        head: Row = {
            "fallback_spike": {"seeds": given.seeds, "spike": list(SPIKE), "factor": FACTOR},
            "configuration": configuration("static", "fallback", 0, given.steps).to_dict(),
            "recipes": CONDITIONS,
            "corpus": {"name": corpus.name, "sha256": corpus.sha256},
            "environment": environment("cpu"),
        }
        pairs = [("", "bf16"), *((c, v) for c in CONDITIONS for v in VARIANTS)]
        runs = [(*pair, seed) for pair in pairs for seed in range(given.seeds)]
        work = joblib.Parallel(n_jobs=given.jobs, return_as="generator")(
            joblib.delayed(rows_of)(*run, given.text, given.steps) for run in runs
        )
        rows = [head, *tqdm(work, total=len(runs), unit="run")]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, "".join(to_json(row) + "\n" for row in rows))
    rows = read_rows(path)
    draw(rows, given.out)
    found = table(rows)
    print(found)
    if given.document is not None:
        fill(given.document, "fallback spike", found)


if __name__ == "__main__":
    main()
