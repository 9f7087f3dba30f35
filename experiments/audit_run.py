"""Does every FP8 operation of a training run have the oracle's bits, and what does asking cost?

    python -m fp8lab.experiments.audit_run [--presets A,B] [--steps N] [--every N] [--large]
                          [--device cuda] [--jobs N] [--seconds S] [--out FILE]

Each preset trains under `fp8lab.audit`, which counts differing elements. A row a preset goes to
FILE (default figures/audit.jsonl) as its run ends: what was compared, what differed, and the median
seconds of a step with the audit closed (afterwards; on a GPU a step is then a CUDA graph), open but
not looking, and looking. "ratio" has how many times a closed step's time an audited step takes
(`looking`), and a step of the whole run (`run`). A validation after the last step is a step of its
own.

Given again, the command does the presets that are missing. The checks run on the host, so that
several presets at once (--jobs) take little more time than one; their seconds are then those of
processes that share a GPU.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import fp8lab
from fp8lab.data import Corpus, load_corpus
from fp8lab.experiments.commands import (
    ROWS,
    Parser,
    check_at_least,
    check_suffix,
    exit_code,
    listed,
    made_by,
)
from fp8lab.experiments.large_model import LARGE_TRAINING
from fp8lab.experiments.row_checks import checker, is_text
from fp8lab.experiments.sittings import Sitting
from fp8lab.experiments.turns import check_jobs, in_turn
from fp8lab.recipes import PRESETS, recipe_named
from fp8lab.records import Row, environment
from fp8lab.training import TrainingRun, check_device
from fp8lab.training_config import TrainingConfig

CLOSED = 5  # steps that are timed with the audit closed
CAPTURED = 6  # steps before those on a GPU: until one was captured, and replayed once
DEFAULT = tuple(name for name in PRESETS if name not in ("bf16", "current"))  # which is tensorwise


def configuration(
    preset: str, steps: int, device: str, *, large: bool, products: str = "codes"
) -> TrainingConfig:
    """A run with E4M3 moments; on a GPU with the layers outside FP8 in bfloat16."""
    large_only: dict[str, Any] = LARGE_TRAINING if large else {}
    return TrainingConfig(
        recipe_named(preset),
        steps=steps,
        device=device,
        products=products,
        exp_avg="e4m3_128",
        exp_avg_sq="e4m3_128_keep",
        observe_every=10**9,
        validate_every=10**9,
        autocast=device == "cuda",
        **large_only,
    )


def audited_run(config: TrainingConfig, corpus: Corpus, every: int, sample: int | None) -> Row:
    """One run under the audit, as a row; some steps more with it closed, for their time."""
    run = TrainingRun(config, corpus)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    with fp8lab.audit(every, sample, on_difference="count") as report:
        for step in range(config.steps):
            seconds[step % every == 0].append(_timed_step(run))
    for _ in range(CAPTURED if config.device == "cuda" else 0):
        run.advance()
    closed = _median([_timed_step(run) for _ in range(min(CLOSED, config.steps))])
    plain, audited = _median(seconds[False]), _median(seconds[True])
    looks = len(seconds[True]) / config.steps
    whole = looks * audited + (1 - looks) * plain
    return {
        "preset": config.recipe.name,
        "parameters": sum(param.numel() for param in run.model.parameters()),
        "steps": report.steps,
        "audited": report.audited,
        "checked": report.checked,
        "elements": report.elements,
        "differences": report.differences,
        "unchecked": report.unchecked,
        "longest_period": max(line.period for line in report.lines.values()),
        "found": [str(difference) for difference in report.found[:4]],
        "time": {
            "closed": round(closed, 4),
            "plain": round(plain, 4),
            "audited": round(audited, 4),
            "ratio": {"looking": round(audited / closed, 2), "run": round(whole / closed, 2)},
        },
    }


def _timed_step(run: TrainingRun) -> float:
    before = time.perf_counter()
    run.advance()
    if run.config.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - before


def _median(seconds: list[float]) -> float:
    """Of all but the first, where there are more: it compiles."""
    return statistics.median(seconds[1:] or seconds or [0.0])


check_rows = checker("audit", {}, {"preset": is_text}, once=("preset",))
"""The rows of this experiment, or a UserError that says what is wrong with them."""


@dataclass(frozen=True)
class Settings:
    """What all presets of a file have in common; see the command's options."""

    steps: int
    every: int
    sample: int | None
    large: bool
    device: str
    text: Path | None = None


def preset_row(preset: str, settings: Settings) -> Row:
    """The row of a preset."""
    config = configuration(preset, settings.steps, settings.device, large=settings.large)
    return audited_run(config, load_corpus(settings.text), settings.every, settings.sample)


def _said(row: Row) -> str:
    seconds = row["time"]
    return (
        f"{row['preset']}: {row['differences']} of {row['elements']} elements differ;"
        f" {row['audited']} of {row['steps']} steps audited; {seconds['closed']:.3f} s a step,"
        f" {seconds['audited']:.3f} s audited, {seconds['ratio']['run']:.2f} times over the run"
    )


def main(arguments: list[str] | None = None) -> None:
    """Run the presets that have no row yet."""
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--presets", default=",".join(DEFAULT), metavar="A,B", help="(default all)")
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="(default 200)")
    parser.add_argument("--every", type=int, default=20, metavar="N", help="(default 20)")
    parser.add_argument("--sample", type=int, metavar="N", help="see fp8lab.audit")
    parser.add_argument("--large", action="store_true", help="122M parameters")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="(default cpu)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="presets at a time")
    parser.add_argument("--seconds", type=float, metavar="S", help="begin nothing after S seconds")
    parser.add_argument("--text", type=Path, metavar="FILE", help="in place of the plays")
    parser.add_argument("--out", type=Path, default=Path("figures/audit.jsonl"))
    given = parser.parse_args(arguments)
    check_suffix(given.out, (ROWS,))
    names = listed(given.presets, "--presets")
    check_jobs(given.jobs, given.seconds)
    check_at_least(given.every, 1, "--every")
    if given.sample is not None:
        check_at_least(given.sample, 1, "--sample")
    for name in names:  # a mistake is found before anything runs
        configuration(name, given.steps, given.device, large=given.large)
    check_device(given.device)
    settings = Settings(
        given.steps, given.every, given.sample, given.large, given.device, given.text
    )
    said: Row = vars(settings) | {"text": None}
    corpus = load_corpus(given.text)
    head = {
        "audit": said,
        "corpus": {"name": corpus.name, "sha256": corpus.sha256},
        "environment": environment(given.device) | made_by("audit_run", arguments),
    }
    with Sitting(given.out, head, check=check_rows) as sitting:
        done = {row["preset"] for row in sitting.rows}
        tasks = [name for name in names if name not in done]
        work = partial(preset_row, settings=settings)
        gpus = torch.cuda.device_count() if given.device == "cuda" else 0
        for _, row in in_turn(tasks, work, jobs=given.jobs, seconds=given.seconds, gpus=gpus):
            sitting.add(row)
            print(_said(row), flush=True)
        missing = [name for name in names if name not in {row["preset"] for row in sitting.rows}]
    if missing:
        print(f"missing: {', '.join(missing)}; the same command goes on with them")


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
