"""One run of `preset_curves`: its settings, and what becomes its row."""

from __future__ import annotations

import gc
import hashlib
import time
import traceback
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from fp8lab.data import Corpus, load_corpus
from fp8lab.experiments.incident_runs import OF_E, move_one_ulp
from fp8lab.experiments.large_model import LARGE_TRAINING
from fp8lab.recipes import recipe_named
from fp8lab.records import Row, environment, today
from fp8lab.training import TrainingRun, ends, summary_of
from fp8lab.training_config import TrainingConfig

AVERAGED = 10  # steps that a training loss in a row is the mean of
# BF16 with one weight moved: what differs from BF16 then is chaos, and nothing else.
CONTROL = "bf16_one_ulp"


def configuration(
    preset: str, seed: int, *, steps: int, device: str, large: bool
) -> TrainingConfig:
    """A run; on a GPU with the kernels, and the layers outside FP8 in bfloat16.

    The large model's blocks are compiled there, in every preset. `CONTROL` is a preset, too.
    """
    control = preset == CONTROL
    cuda = device == "cuda"
    sizes = {**LARGE_TRAINING, "validate_every": 100, "compile": cuda} if large else {}
    recipe = replace(recipe_named("bf16"), name=CONTROL) if control else recipe_named(preset)
    return TrainingConfig(
        recipe,
        seed=seed,
        steps=steps,
        device=device,
        products="codes" if cuda else "decoded",
        autocast=cuda,
        observe_every=10**9,
        **sizes,
    )


def head_of(config: TrainingConfig, corpus: Corpus, *, large: bool) -> Row:
    """What all runs of a file have in common: its first row."""
    training = config.to_dict()
    del training["recipe"], training["seed"]
    return {
        "preset_curves": {"large": large},
        "corpus": {"name": corpus.name, "sha256": corpus.sha256},
        **training,
        "environment": environment(config.device),
    }


def finished(config: TrainingConfig, corpus: Corpus) -> Row:
    """Train; return the run's row.

    It has preset, seed, parameters (their number), initial (a digest of the weights it began with,
    before the control moves one), batches (a digest of the random state after its last batch),
    steps (those that were done), loss (of training, the mean of each `AVERAGED` steps), validation
    (pairs of step and loss, nats a byte), validation_loss (the last one), skipped (steps), diverged
    (see `fp8lab.training.summary_of`), and seconds under "time".
    """
    before = time.perf_counter()
    run = TrainingRun(config, corpus)
    parameters = list(run.model.parameters())
    weights = hashlib.sha256()
    for parameter in parameters:
        weights.update(parameter.detach().float().cpu().numpy().tobytes())
    if config.recipe.name == CONTROL:
        move_one_ulp(run.model.get_parameter("tokens.weight"), OF_E)
    rows: list[Row] = []
    while run.step < config.steps and not (rows and ends(rows[-1], config)):
        rows.append(run.advance())
    losses = [row["loss"] for row in rows]
    ended = summary_of(rows)
    return {
        "preset": config.recipe.name,
        "seed": config.seed,
        "parameters": sum(parameter.numel() for parameter in parameters),
        "initial": weights.hexdigest()[:16],
        "batches": hashlib.sha256(str(run.rng.bit_generator.state).encode()).hexdigest()[:16],
        "steps": ended["steps"],
        "loss": [
            round(float(np.mean(losses[start : start + AVERAGED])), 6)
            for start in range(0, len(losses), AVERAGED)
        ],
        "validation": [
            [row["step"], row["validation_loss"]] for row in rows if "validation_loss" in row
        ],
        **{key: ended[key] for key in ("validation_loss", "skipped", "diverged")},
        "time": {"seconds": round(time.perf_counter() - before, 1)},
    }


def attempt(config: TrainingConfig, text: Path | None) -> Row | str:
    """A run's row with its environment and date, or why it failed: the others go on then."""
    try:
        row = finished(config, load_corpus(text))
    except Exception:
        return traceback.format_exc()
    else:
        return {**row, "environment": environment(config.device), "date": today()}
    finally:
        if config.device == "cuda":
            # The next run of this process has the memory, and torch.compile's limit, for itself.
            torch.compiler.reset()
            gc.collect()
            torch.cuda.empty_cache()
