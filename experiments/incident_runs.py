"""The runs of `resume_incident`: what each is, what it leaves out, and its row."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fp8lab.checkpoint import load
from fp8lab.checkpoint_store import CheckpointStore, checkpoint_name
from fp8lab.data import Corpus
from fp8lab.experiments.large_model import LARGE_TRAINING
from fp8lab.experiments.plot_resume import EARLY
from fp8lab.models import TransformerConfig
from fp8lab.recipes import OPERANDS, DelayedScaling, recipe_named
from fp8lab.records import Row, short_float32, to_json
from fp8lab.resume import state_of
from fp8lab.resume_config import fingerprint_of
from fp8lab.training import TrainingRun
from fp8lab.training_config import TrainingConfig

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

OF_E = (ord("e"), 0)  # of the embedding: the commonest letter
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

    @property
    def is_outlier(self) -> bool:
        """Whether the gradients of this step are larger than they should be."""
        every = self.condition.outlier_every
        return every is not None and self.step % every == 0

    def eager_now(self) -> bool:
        """An outlier is no part of a CUDA graph."""
        return self.is_outlier

    def _loss(self, batch: tuple[Any, ...]) -> Tensor:
        loss = super()._loss(batch)
        if not self.is_outlier or not torch.is_grad_enabled():
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
    return replace(config, **LARGE_TRAINING, device="cuda", products="codes", autocast=True)


@dataclass(frozen=True)
class Setting:
    """What all runs of a file of rows have in common.

    Attributes:
        before, after: Steps before and after the resume.
        large: Which model; see `configuration`.
        text: A file in place of the plays.
        work: Where the state that is resumed from is kept, a checkpoint a condition and seed.
        sha256: Of the corpus.
    """

    before: int
    after: int
    large: bool
    text: Path | None
    work: Path
    sha256: str


@dataclass(frozen=True)
class Case:
    """One run: "continuous", a variant of `LOST`, or "common", the steps before the resume."""

    condition: str
    seed: int
    variant: str

    def configuration(self, setting: Setting) -> TrainingConfig:
        """Of all steps, before and after the resume."""
        chosen, steps = CONDITIONS[self.condition], (setting.before, setting.after)
        return configuration(chosen, self.seed, *steps, large=setting.large)

    def begun(self, setting: Setting, corpus: Corpus) -> IncidentRun:
        """The run at step 0."""
        return IncidentRun(self.configuration(setting), corpus, CONDITIONS[self.condition])

    def checkpoint(self, setting: Setting) -> Path:
        """Where the state at the resume is, once the common part was done.

        The folder's name ends in a digest of all that the state depends on, and of the length of
        the schedule, so that commands with other options may share `Setting.work`.
        """
        config = self.configuration(setting).to_dict()
        whole = to_json([config, asdict(CONDITIONS[self.condition]), setting.sha256])
        digest = hashlib.sha256(whole.encode()).hexdigest()[:12]
        name = self.condition.replace(", ", "-").replace(" ", "-")
        return setting.work / f"{name}-seed-{self.seed}-{digest}" / checkpoint_name(setting.before)


def cases_of(conditions: Sequence[str], seeds: int, variants: Sequence[str]) -> list[Case]:
    """The runs: the continuous one of each condition and seed, then what each can lose."""
    return [
        Case(condition, seed, variant)
        for seed in range(seeds)
        for condition in conditions
        for variant in ("continuous", *(v for v in LOST if v in variants))
        if variant == "continuous" or can_lose(condition, variant)
    ]


def can_lose(condition: str, variant: str) -> bool:
    """Whether a run has what the variant leaves out: without delayed scaling, no scales."""
    recipe = recipe_named(CONDITIONS[condition].recipe)
    delayed = any(isinstance(recipe.operand(r).scaling, DelayedScaling) for r in OPERANDS)
    return delayed or not any(path.startswith("model/") for path in LOST[variant])


def row_of(case: Case, setting: Setting, corpus: Corpus) -> Row | None:
    """Do one run; None of "common", which leaves the checkpoint alone.

    A row has condition, variant, seed, `missing` (how many parts), `validation_loss` after the last
    step, the loss of every step, and of the `observed` ones (see `is_observed`) `overflow` and
    `underflow` (means over all casts) and `scale` (the median over the casts of the output
    gradient).
    """
    run = case.begun(setting, corpus)
    place = case.checkpoint(setting)
    fingerprint = fingerprint_of(run.config, corpus)
    missing = 0
    if case.variant in ("continuous", "common"):
        for _ in range(setting.before):
            run.advance()
        store = CheckpointStore(place.parent)
        store.save(state_of(run).capture(), step=setting.before, fingerprint=fingerprint)
        if case.variant == "common":
            return None
    else:
        state = without(load(place, fingerprint=fingerprint).state, LOST[case.variant])
        if case.variant == "one ulp":
            state = one_ulp(state, large=setting.large)
        missing = len(state_of(run).restore(state, strict=False))
    named = {"condition": case.condition, "seed": case.seed, "variant": case.variant}
    return {**named, "missing": missing, **_followed(run, setting)}


def is_observed(step: int, *, large: bool) -> bool:
    """Whether the casts are looked at in a step after the resume: each early one, then fewer."""
    if step <= EARLY:
        return True
    if not large:
        return step % 10 == 0
    return (
        step % (20 if step <= 300 else 200) == 0
    )  # a look at a GPU's casts takes seven steps' time


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


def one_ulp(state: State, *, large: bool) -> State:
    """The state with one float32 moved by one ulp, which the loss feels within a few steps.

    A weight that is cast hides such a change from every product, until a rounding of its code tips
    over. In float32 the embedding shows it at once. In the large model all that the embedding feeds
    is rounded to bfloat16 or FP8, and the change was not felt in 2,000 steps of delayed scaling
    (one seed; BF16 runs that begin with it do feel it, see `preset_run`). The last norm scales
    every element of the head's input, so that some rounding tips over soon.
    """
    name, place = ("norm.weight", (0,)) if large else ("tokens.weight", OF_E)
    weight = state["model"][name].clone()
    move_one_ulp(weight, place)
    return {**state, "model": {**state["model"], name: weight}}


@torch.no_grad()
def move_one_ulp(weight: Tensor, place: tuple[int, ...]) -> None:
    """Move one float32 one step further from zero."""
    weight.view(torch.int32)[place] += 1


def _followed(run: TrainingRun, setting: Setting) -> Row:
    config, rows = run.config, []
    for step in range(1, setting.after + 1):
        every = 1 if is_observed(step, large=setting.large) else 10**9
        run.config = replace(config, observe_every=every)
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
