"""Which scaling policies train as BF16 does? Policies times seeds, in parallel, safe to interrupt.

A sweep's folder:

    sweep.json                      what the sweep is: policies, seeds, training settings, corpus
    runs/POLICY/seed-S/             one finished run (config, environment, metrics, result)
    runs/POLICY/seed-S.partial/     one that was cut short; the next start does it anew
    failed/POLICY-seed-S.txt        the traceback of one that failed
    summary.json                    the table

A run's folder gets its final name in one step when the run is complete, so a finished run is whole
and is never done twice.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import shutil
import signal
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import joblib
from tqdm import tqdm

from fp8lab.data import Corpus, load_corpus
from fp8lab.errors import UserError
from fp8lab.recipes import recipe_named
from fp8lab.records import (
    Row,
    RunRecorder,
    read_rows,
    to_json,
    without_time,
    write_atomically,
)
from fp8lab.training import TrainingConfig, check_device, summary_of, training_rows

DEFAULT_POLICIES = (
    "bf16",
    "current",
    "delayed",
    "blockwise",
    "static",
    "static:grad_output.scale=65536",
)


@dataclass(frozen=True)
class SweepConfig:
    """What a sweep is.

    Attributes:
        policies: Recipes by `recipe_named`, each once.
        seeds: How many seeds, from 0; every policy runs with each.
        training: Settings of each run; its recipe and seed are replaced.
        text: A text file in place of the plays.
    """

    policies: tuple[str, ...] = DEFAULT_POLICIES
    seeds: int = 3
    training: TrainingConfig = TrainingConfig(recipe_named("bf16"))  # noqa: RUF009 (frozen)
    text: Path | None = None

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise UserError(f"seeds is {self.seeds}; accepted: 1 and up")
        if not self.policies:
            raise UserError("no policies; name at least one")
        repeated = sorted({p for p in self.policies if self.policies.count(p) > 1})
        if repeated:
            raise UserError(f"policy {', '.join(repeated)} is named twice; name each once")
        for policy in self.policies:
            recipe_named(policy)

    def runs(self) -> list[TrainingConfig]:
        """Every run, seed by seed, so that all policies have a first seed early."""
        return [
            replace(self.training, recipe=recipe_named(policy), seed=seed)
            for seed in range(self.seeds)
            for policy in self.policies
        ]

    def identity(self, corpus: Corpus) -> dict[str, Any]:
        """What must be equal for two sweeps to share a folder."""
        training = self.training.to_dict()
        del training["recipe"], training["seed"]
        return {
            "policies": list(self.policies),
            "seeds": self.seeds,
            "training": training,
            "corpus": {"name": corpus.name, "sha256": corpus.sha256},
        }


def run_sweep(config: SweepConfig, out: Path, *, jobs: int = -1) -> dict[str, Any]:
    """Do what is not done yet, with a progress bar; return the summary.

    Args:
        config: What to run.
        out: The sweep's folder; may hold this sweep, finished or not.
        jobs: Runs at a time; -1 takes one a core.

    Raises:
        UserError: The folder holds something else, the device is missing, the corpus too short.
    """
    if jobs == 0 or jobs < -1:
        raise UserError(f"jobs is {jobs}; accepted: 1 and up, or -1 for one a core")
    check_device(config.training.device)
    corpus = load_corpus(config.text)
    corpus.check_context(config.training.model.context)
    _claim(out, json.loads(to_json(config.identity(corpus))))
    pending = [run for run in config.runs() if not run_folder(out, run).exists()]
    total = len(config.runs())
    if len(pending) < total:
        tqdm.write(f"{total - len(pending)} of {total} runs are done already")
    _run_all(pending, out, config.text, jobs, total)
    return summarize(out)


def run_folder(out: Path, run: TrainingConfig) -> Path:
    """Where a finished run lies."""
    return out / "runs" / _slug(run.recipe.name) / f"seed-{run.seed}"


def summarize(out: Path) -> dict[str, Any]:
    """The table, from the finished runs alone; also written to summary.json.

    For each policy: each seed's result, the mean of the final validation losses, its distance from
    BF16's mean, and that distance in BF16's seed spreads (largest minus smallest over the seeds).
    """
    identity = read_identity(out)
    policies: dict[str, Any] = {}
    for policy in identity["policies"]:
        results = {
            seed: json.loads((folder / "result.json").read_text(encoding="utf-8"))
            for seed in range(identity["seeds"])
            if (folder := out / "runs" / _slug(policy) / f"seed-{seed}").exists()
        }
        if results:
            policies[policy] = _policy_summary(results)
    baseline = policies.get("bf16")
    for entry in policies.values():
        entry["above_bf16"] = None
        entry["above_bf16_in_spreads"] = None
        if baseline is not None:
            above = entry["validation_loss"] - baseline["validation_loss"]
            entry["above_bf16"] = above
            if baseline["seed_spread"] > 0:
                entry["above_bf16_in_spreads"] = above / baseline["seed_spread"]
    failed = sorted(path.stem for path in (out / "failed").glob("*.txt"))
    summary = {"policies": policies, "failed": failed}
    write_atomically(out / "summary.json", to_json(summary, indent=2) + "\n")
    return summary


def read_identity(out: Path) -> dict[str, Any]:
    """The content of sweep.json.

    Raises:
        UserError: The folder holds no sweep.
    """
    try:
        identity: dict[str, Any] = json.loads((out / "sweep.json").read_text(encoding="utf-8"))
    except OSError:
        raise UserError(f"{out} holds no sweep (there is no sweep.json in it)") from None
    except json.JSONDecodeError:
        raise UserError(f"{out / 'sweep.json'} is not JSON; choose another folder") from None
    return identity


def collect_rows(out: Path) -> list[Row]:
    """All rows of a sweep's finished runs, without wall-clock values.

    The first row says what the sweep is and where it ran. A figure needs nothing else.
    """
    identity = read_identity(out)
    rows: list[Row] = []
    environments: list[Any] = []
    for policy in identity["policies"]:
        for seed in range(identity["seeds"]):
            folder = out / "runs" / _slug(policy) / f"seed-{seed}"
            if not folder.exists():
                continue
            found = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
            if found not in environments:
                environments.append(found)
            for row in read_rows(folder / "metrics.jsonl"):
                rows.append({"policy": policy, "seed": seed, **without_time(row)})
    return [{"sweep": identity, "environments": environments}, *rows]


def _policy_summary(results: dict[int, dict[str, Any]]) -> dict[str, Any]:
    losses = [float(result["validation_loss"]) for result in results.values()]
    return {
        "seeds": results,
        "validation_loss": sum(losses) / len(losses),
        "seed_spread": max(losses) - min(losses),
        "diverged": sum(result["diverged"] for result in results.values()),
        "overflow": sum(result["overflow"] for result in results.values()) / len(results),
        "underflow": sum(result["underflow"] for result in results.values()) / len(results),
    }


def _claim(out: Path, identity: dict[str, Any]) -> None:
    """Make the folder this sweep's, or refuse it."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; name a folder for the sweep")
    if out.is_dir() and any(out.iterdir()):
        found = read_identity(out)
        if found != identity:
            differs = ", ".join(key for key in identity if found.get(key) != identity[key])
            raise UserError(
                f"{out} holds another sweep (different {differs}); choose another --out, or remove"
                " the folder"
            )
        return
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "sweep.json", to_json(identity, indent=2) + "\n")


def _run_all(
    pending: list[TrainingConfig], out: Path, text: Path | None, jobs: int, total: int
) -> None:
    done = total - len(pending)
    with tqdm(total=total, initial=done, unit="run", desc="sweep", smoothing=0) as bar:
        parallel = joblib.Parallel(n_jobs=jobs, return_as="generator_unordered", batch_size=1)
        for finished in parallel(joblib.delayed(_run_one)(run, out, text) for run in pending):
            bar.set_postfix_str(finished)
            bar.update()


def _run_one(run: TrainingConfig, out: Path, text: Path | None) -> str:
    """One run, in a process of its own unless jobs is 1. Returns a word about how it went."""
    if multiprocessing.current_process().name != "MainProcess":
        # Ctrl-C reaches the whole group; the parent alone answers it, and ends the others.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    final = run_folder(out, run)
    partial = final.with_name(final.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    failure = out / "failed" / f"{_slug(run.recipe.name)}-seed-{run.seed}.txt"
    failure.unlink(missing_ok=True)
    name = f"{run.recipe.name} seed {run.seed}"
    try:
        rows = []
        with RunRecorder(partial, run.to_dict(), run.device) as recorder:
            for row in training_rows(run, load_corpus(text)):
                recorder.add(row)
                rows.append(row)
            result = summary_of(rows)
            recorder.finish(result)
        partial.replace(final)
    except Exception:
        failure.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(failure, traceback.format_exc())
        return f"{name} failed"
    return f"{name}: {result['validation_loss']:.3f}"


def _slug(policy: str) -> str:
    """A policy's name as a folder's: everything but letters, digits, dots and _ becomes -."""
    return re.sub(r"[^A-Za-z0-9._]", "-", policy)
