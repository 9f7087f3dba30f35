"""Which scaling policies train as BF16 does? Policies times seeds, in parallel, safe to interrupt.

A sweep's folder:

    sweep.json                      what the sweep is: policies, seeds, training settings, corpus
    runs/POLICY/seed-S/             one finished run (config, environment, metrics, result)
    runs/POLICY/seed-S.partial-PID/ one under way, or cut short; the next start removes it
    failed/POLICY-seed-S.txt        the traceback of one that failed
    summary.json                    the table
    .lock                           held by the process that works on this sweep

A run's folder gets its final name in one step when the run is complete, so a finished run is whole
and is never done twice.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import joblib
from joblib.externals.loky.process_executor import TerminatedWorkerError
from tqdm import tqdm

from fp8lab.data import Corpus, load_corpus
from fp8lab.errors import UserError
from fp8lab.folder_lock import held
from fp8lab.recipes import recipe_named
from fp8lab.records import (
    Row,
    RunRecorder,
    read_rows,
    read_table,
    to_json,
    without_time,
    write_atomically,
)
from fp8lab.training import check_device, summary_of, training_rows
from fp8lab.training_config import TrainingConfig

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
        if not 1 <= self.seeds <= 10_000:
            raise UserError(f"seeds is {self.seeds}; accepted: 1 to 10000")
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
        UserError: The folder holds something else or another process works on it, a run in it is
            damaged, the device is missing, the corpus too short, or a worker was killed.
    """
    if jobs == 0 or jobs < -1:
        raise UserError(f"jobs is {jobs}; accepted: 1 and up, or -1 for one a core")
    check_device(config.training.device)
    corpus = load_corpus(config.text)
    corpus.check_context(config.training.model.context)
    _claim(out, json.loads(to_json(config.identity(corpus))))
    with held(out, "works on the sweep", "wait for it, or choose another --out"):
        for leftover in out.glob("runs/*/seed-*.partial-*"):
            shutil.rmtree(leftover)
        runs = config.runs()
        pending = [run for run in runs if _finished_run(out, run.recipe.name, run.seed) is None]
        if len(pending) < len(runs):
            tqdm.write(f"{len(runs) - len(pending)} of {len(runs)} runs are done already")
        _run_all(pending, out, config.text, jobs, len(runs))
        return summarize(out)


def run_folder(out: Path, policy: str, seed: int) -> Path:
    """Where a finished run lies."""
    return out / "runs" / _folder_name(policy) / f"seed-{seed}"


def summarize(out: Path) -> dict[str, Any]:
    """The table, from the finished runs alone; also written to summary.json.

    For each policy: each seed's result, the mean of the final validation losses, its distance from
    BF16's mean, and that distance in BF16's seed spreads (largest minus smallest over the seeds).
    """
    identity = read_identity(out)
    policies: dict[str, Any] = {}
    for policy in identity["policies"]:
        results = {
            seed: run["result"]
            for seed in range(identity["seeds"])
            if (run := _finished_run(out, policy, seed)) is not None
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
    failed = [
        f"{policy} seed {seed}"
        for policy in identity["policies"]
        for seed in range(identity["seeds"])
        if not run_folder(out, policy, seed).exists() and _failure(out, policy, seed).exists()
    ]
    summary = {"policies": policies, "failed": failed}
    write_atomically(out / "summary.json", to_json(summary, indent=2) + "\n")
    return summary


def read_identity(out: Path) -> dict[str, Any]:
    """The content of sweep.json.

    Raises:
        UserError: The folder holds no sweep.
    """
    path = out / "sweep.json"
    if not path.exists():
        raise UserError(f"{out} holds no sweep (no sweep.json is in it); choose another folder")
    identity = read_table(path)
    check_identity(identity, str(path))
    return identity


def check_identity(identity: Any, source: str) -> None:
    """Refuse what does not describe a sweep: a list of policies, a number of seeds, a corpus."""
    usable = (
        isinstance(identity, dict)
        and isinstance(identity.get("policies"), list)
        and all(isinstance(policy, str) for policy in identity["policies"])
        and isinstance(identity.get("seeds"), int)
        and isinstance(identity.get("corpus"), dict)
        and isinstance(identity["corpus"].get("name"), str)
    )
    if not usable:
        raise UserError(f"{source} is damaged: it does not describe a sweep")


def collect_rows(out: Path) -> list[Row]:
    """All rows of a sweep's finished runs, without wall-clock values.

    The first row says what the sweep is and where it ran. A figure needs nothing else.
    """
    identity = read_identity(out)
    rows: list[Row] = []
    environments: list[Any] = []
    for policy in identity["policies"]:
        for seed in range(identity["seeds"]):
            run = _finished_run(out, policy, seed)
            if run is None:
                continue
            if run["environment"] not in environments:
                environments.append(run["environment"])
            for row in run["rows"]:
                rows.append({"policy": policy, "seed": seed, **without_time(row)})
    return [{"sweep": identity, "environments": environments}, *rows]


def _finished_run(out: Path, policy: str, seed: int) -> dict[str, Any] | None:
    """The result, environment and rows of a finished run; None where it is not finished.

    Raises:
        UserError: It counts as finished, but is not whole.
    """
    folder = run_folder(out, policy, seed)
    if not folder.exists():
        return None
    try:
        result = read_table(folder / "result.json")
        rows = read_rows(folder / "metrics.jsonl")
        environment = read_table(folder / "environment.json")
    except UserError as error:
        raise UserError(f"{error}; remove {folder}, and the run will be done again") from None
    whole = {"steps", "loss", "validation_loss", "diverged", "overflow", "underflow"} <= set(result)
    if not whole or [row.get("step") for row in rows] != list(range(1, result["steps"] + 1)):
        raise UserError(f"the run in {folder} is not whole; remove the folder to do it again")
    return {"result": result, "environment": environment, "rows": rows}


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
    # Hidden files are no content: an operating system's own, or our lock.
    if out.is_dir() and any(not path.name.startswith(".") for path in out.iterdir()):
        found = read_identity(out)
        if found != identity:
            differs = ", ".join(key for key in identity if found.get(key) != identity[key])
            raise UserError(
                f"{out} holds another sweep (different {differs}); choose another --out"
            )
        return
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "sweep.json", to_json(identity, indent=2) + "\n")


def _run_all(
    pending: list[TrainingConfig], out: Path, text: Path | None, jobs: int, total: int
) -> None:
    done = total - len(pending)
    parallel = joblib.Parallel(n_jobs=jobs, return_as="generator_unordered", batch_size=1)
    with tqdm(total=total, initial=done, unit="run", desc="sweep", smoothing=0) as bar:
        # Ctrl-C reaches the whole group; the parent alone answers it, and ends the others. Workers
        # inherit that they ignore it, so that none is caught while it still imports.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            tasks = parallel(
                joblib.delayed(_run_one)(run, out, text, os.getpid()) for run in pending
            )
        finally:
            signal.signal(signal.SIGINT, handler)
        try:
            for finished in tasks:
                bar.set_postfix_str(finished)
                bar.update()
        except TerminatedWorkerError:
            raise UserError(
                "a run's process was killed (out of memory?); finished runs are kept: give the same"
                " command again, with a smaller --jobs"
            ) from None


def _failure(out: Path, policy: str, seed: int) -> Path:
    return out / "failed" / f"{_folder_name(policy)}-seed-{seed}.txt"


def _run_one(run: TrainingConfig, out: Path, text: Path | None, parent: int) -> str:
    """One run, in a process of its own unless jobs is 1. Returns a word about how it went."""
    final = run_folder(out, run.recipe.name, run.seed)
    partial = final.with_name(f"{final.name}.partial-{os.getpid()}")
    failure = _failure(out, run.recipe.name, run.seed)
    failure.unlink(missing_ok=True)
    name = f"{run.recipe.name} seed {run.seed}"
    worker = multiprocessing.current_process().name != "MainProcess"
    try:
        rows = []
        with RunRecorder(partial, run.to_dict(), run.device) as recorder:
            for row in training_rows(run, load_corpus(text)):
                if worker and os.getppid() != parent:
                    os._exit(1)  # nobody waits any more, and nobody holds the lock
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


def _folder_name(policy: str) -> str:
    """A policy's name as a folder's: no two policies share one, and none is too long."""
    name = quote(policy, safe="=:+")
    if len(name) <= 100:
        return name
    return f"{name[:60]}-{hashlib.sha256(policy.encode()).hexdigest()[:16]}"
