"""What a resumed run loses that lacks a part of its state: each part left out, beside controls.

    python -m fp8lab.experiments.resume_incident [--seeds N] [--text FILE] [--out FIGURE]

A run is stopped after some steps. Its continuation is compared, step by step and on the same
batches, with resumed runs that lack one part of the state; what is missing is as in a new run, as
`TrainingState.restore(strict=False)` leaves it. Two controls: everything restored, whose gap must
be 0 bits at every step; and everything restored, with one weight moved by one ulp, which shows how
far two runs drift apart by chaos alone. Rows go beside the figure; --redraw draws the rows that are
there. `docs/checkpoints.md` tells what was found.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from fp8lab.checkpoint import take_state
from fp8lab.checkpoint_tree import rebuild
from fp8lab.data import Corpus, load_corpus
from fp8lab.experiments.plot_resume import EARLY, draw, table
from fp8lab.models import TransformerConfig
from fp8lab.recipes import recipe_named
from fp8lab.records import Row, environment, read_rows, short_float32, to_json, write_atomically
from fp8lab.resume import state_of
from fp8lab.training import TrainingConfig, TrainingRun

State = dict[str, Any]


@dataclass(frozen=True)
class Condition:
    """Under which the parts are left out.

    Attributes:
        recipe: A recipe's name.
        outlier_every: Every so many steps the gradients are `outlier` times as large; None: never.
        outlier: See there.
    """

    recipe: str
    outlier_every: int | None = None
    outlier: float = 256.0


CONDITIONS = {
    "history 16": Condition("delayed:history=16"),
    "history 256, outliers": Condition("delayed:history=256", outlier_every=80),
    "blockwise": Condition("blockwise"),
}

# Each variant: which paths of the state are missing.
LOST: dict[str, tuple[str, ...]] = {
    "exact": (),
    "one ulp": (),
    "no amax history": ("model/*.amax_history",),
    "no scales": ("model/*.scale",),
    "no scales, no history": ("model/*.scale", "model/*.amax_history"),
    "no moments' scales": ("optimizer/state/*/exp_avg*_scale",),
    "no loss scaler": ("scaler",),
    "no random state": ("random/generator:batches",),
}


class IncidentRun(TrainingRun):
    """A run with a loss scale that has moved on from its start, and now and then an outlier."""

    def __init__(self, config: TrainingConfig, corpus: Corpus, condition: Condition) -> None:
        super().__init__(config, corpus)
        self.condition = condition
        self.update.scaler.interval = 32  # else 2000, and no short run would see it move

    def _loss(self, batch: tuple[Any, ...]) -> Tensor:
        loss = super()._loss(batch)
        every = self.condition.outlier_every
        if every is None or self.step % every or not torch.is_grad_enabled():
            return loss
        more = loss * (self.condition.outlier - 1)
        return loss + (more - more.detach())  # the same loss, a larger gradient


def configuration(
    condition: Condition, seed: int, before: int, after: int, *, large: bool = False
) -> TrainingConfig:
    """A small model on the CPU, or a large one on a GPU: E4M3 moments, a dynamic loss scale."""
    config = TrainingConfig(
        recipe_named(condition.recipe),
        seed=seed,
        steps=before + after,
        batch=8,
        model=TransformerConfig(context=32, width=32, layers=1, heads=2),
        observe_every=10**9,
        validate_every=10**9,
        exp_avg="e4m3_128_settle",
        exp_avg_sq="e4m3_128_keep",
        loss_scale=256.0,
        dynamic_loss_scale=True,
    )
    if not large:
        return config
    return replace(
        config,
        batch=8,
        model=TransformerConfig(context=1024, width=768, layers=17, heads=12),
        peak_lr=6e-4,
        warmup=200,
        device="cuda",
        products="codes",
    )


def incident_rows(
    condition: str, seed: int, corpus: Corpus, *, before: int, after: int, large: bool = False
) -> Iterator[Row]:
    """The continuation, then each variant that loses something under this condition.

    A row has condition, variant, seed, `missing` (how many parts), `validation_loss` after the last
    step, the loss of every step, and of the `observed` ones (each of the first, then every tenth)
    `overflow` and `underflow` (means over all casts) and `scale` (the median over the casts of the
    output gradient).
    """
    chosen = CONDITIONS[condition]
    config = configuration(chosen, seed, before, after, large=large)
    run = IncidentRun(config, corpus, chosen)
    for _ in range(before):
        run.advance()
    taken = take_state(state_of(run).capture())
    saved = {part: rebuild(own.json, own.tensors) for part, own in taken.items()}
    named = {"condition": condition, "seed": seed}
    yield {**named, "variant": "continuous", "missing": 0, **_followed(run, after)}
    for variant, patterns in LOST.items():
        state = without(saved, patterns)
        if variant == "one ulp":
            state = one_ulp(state)
        resumed = IncidentRun(config, corpus, chosen)
        missing = state_of(resumed).restore(state, strict=False)
        if missing or not patterns:
            counts = {"variant": variant, "missing": len(missing)}
            yield {**named, **counts, **_followed(resumed, after)}


def without(state: State, patterns: tuple[str, ...]) -> State:
    """The state without the entries whose paths match."""

    def kept(tree: Any, path: str) -> Any:
        if not isinstance(tree, dict):
            return tree
        places = {key: f"{path}/{key}".lstrip("/") for key in tree}
        return {
            key: kept(value, places[key])
            for key, value in tree.items()
            if not any(fnmatch(places[key], pattern) for pattern in patterns)
        }

    left: State = kept(state, "")
    return left


def one_ulp(state: State) -> State:
    """The state with one float32 of the embedding of the byte "e" one step further from zero.

    The embedding stays out of FP8. A weight that is cast hides such a change from every product,
    until a rounding of its code tips over.
    """
    weight = state["model"]["tokens.weight"].clone()
    weight.view(torch.int32)[ord("e"), 0] += 1
    return {**state, "model": {**state["model"], "tokens.weight": weight}}


def _followed(run: TrainingRun, steps: int) -> Row:
    config, rows = run.config, []
    for place in range(steps):
        run.config = replace(config, observe_every=1 if place < EARLY else 10)
        rows.append(run.advance())
    observed = [(place, row["casts"]) for place, row in enumerate(rows, start=1) if "casts" in row]

    def mean(key: str, casts: Row) -> float:
        return short_float32(float(np.mean([cast[key] for cast in casts.values()])))

    def scale(casts: Row) -> float:
        of_gradients = [c["scale"] for name, c in casts.items() if name.endswith("grad_output")]
        return short_float32(float(np.median(of_gradients)))

    return {
        "loss": [row["loss"] for row in rows],
        "validation_loss": rows[-1].get("validation_loss", float("nan")),
        "observed": [place for place, _ in observed],
        "overflow": [mean("overflow", casts) for _, casts in observed],
        "underflow": [mean("underflow", casts) for _, casts in observed],
        "scale": [scale(casts) for _, casts in observed],
    }


def _all_rows(condition: str, seed: int, text: Path | None, steps: dict[str, Any]) -> list[Row]:
    return list(incident_rows(condition, seed, load_corpus(text), **steps))


def main(arguments: list[str] | None = None) -> None:
    """Run all conditions and variants, or draw again."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="(default 3)")
    parser.add_argument("--before", type=int, default=120, metavar="N", help="steps (default 120)")
    parser.add_argument("--after", type=int, default=300, metavar="N", help="steps (default 300)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes (default 1)")
    parser.add_argument("--condition", choices=tuple(CONDITIONS), help="one alone (default all)")
    parser.add_argument("--large", action="store_true", help="120M parameters, on a GPU")
    parser.add_argument("--text", type=Path, metavar="FILE", help="in place of the plays")
    parser.add_argument("--out", type=Path, default=Path("figures/resume-incident.png"))
    parser.add_argument("--redraw", action="store_true", help="from the rows that are there")
    given = parser.parse_args(arguments)
    path = given.out.with_suffix(".jsonl")
    if not given.redraw:
        corpus = load_corpus(given.text)
        head: Row = {
            "resume_incident": {"seeds": given.seeds, "before": given.before, "after": given.after},
            "corpus": {"name": corpus.name, "sha256": corpus.sha256},
            "environment": environment("cuda" if given.large else "cpu"),
        }
        rows = [head]
        names = CONDITIONS if given.condition is None else [given.condition]
        runs = [(name, seed) for name in names for seed in range(given.seeds)]
        steps = {"before": given.before, "after": given.after, "large": given.large}
        work = joblib.Parallel(n_jobs=given.jobs, return_as="generator")(
            joblib.delayed(_all_rows)(name, seed, given.text, steps) for name, seed in runs
        )
        for own in tqdm(work, total=len(runs), unit="run"):
            rows += own
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, "".join(to_json(row) + "\n" for row in rows))
    rows = read_rows(path)
    draw(rows, given.out)
    print(table(rows))


if __name__ == "__main__":
    main()
