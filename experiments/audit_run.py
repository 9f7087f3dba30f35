"""Does every FP8 operation of a training run have the oracle's bits, and what does asking cost?

    python -m fp8lab.experiments.audit_run [--presets A,B] [--steps N] [--every N] [--large]
                                           [--device cuda] [--out FILE]

Each preset trains under `fp8lab.audit`, which counts differing elements. A row a preset goes to
FILE (default figures/audit.jsonl): what was compared, what differed, and the median seconds of
steps that were audited and of those that were not. A validation after the last step is a step of
its own.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import fp8lab
from fp8lab.data import Corpus, load_corpus
from fp8lab.errors import UserError
from fp8lab.models import TransformerConfig
from fp8lab.recipes import PRESETS, recipe_named
from fp8lab.records import Row, environment, to_json, write_atomically
from fp8lab.training import TrainingConfig, TrainingRun

LARGE = TransformerConfig(context=1024, width=768, layers=17, heads=12)  # 122M parameters
DEFAULT = tuple(name for name in PRESETS if name not in ("bf16", "current"))  # which is tensorwise


def configuration(
    preset: str, steps: int, device: str, *, large: bool, products: str = "codes"
) -> TrainingConfig:
    """A run with E4M3 moments; on a GPU with the layers outside FP8 in bfloat16."""
    large_only: dict[str, Any] = {"model": LARGE, "batch": 8} if large else {}
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
    """One run under the audit, as a row."""
    run = TrainingRun(config, corpus)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    with fp8lab.audit(every, sample, on_difference="count") as report:
        for step in range(config.steps):
            before = time.perf_counter()
            run.advance()
            if config.device == "cuda":
                torch.cuda.synchronize()
            seconds[step % every == 0].append(time.perf_counter() - before)
    plain, audited = (statistics.median(some[1:] or some or [0.0]) for some in seconds.values())
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
        "time": {"plain": round(plain, 4), "audited": round(audited, 4)},
    }


def main(arguments: list[str] | None = None) -> None:
    """Run the presets, one after the other."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--presets", default=",".join(DEFAULT), metavar="A,B", help="(default all)")
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="(default 200)")
    parser.add_argument("--every", type=int, default=20, metavar="N", help="(default 20)")
    parser.add_argument("--sample", type=int, metavar="N", help="see fp8lab.audit")
    parser.add_argument("--large", action="store_true", help="122M parameters")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="(default cpu)")
    parser.add_argument("--text", type=Path, metavar="FILE", help="in place of the plays")
    parser.add_argument("--out", type=Path, default=Path("figures/audit.jsonl"))
    given = parser.parse_args(arguments)
    names = [name.strip() for name in given.presets.split(",") if name.strip()]
    if not names:
        raise UserError("--presets names none; accepted: recipes, separated by commas")
    corpus = load_corpus(given.text)
    rows: list[Row] = [{"audit": vars(given) | {"text": None, "out": None, "presets": names}}]
    rows[0] |= {"environment": environment(given.device)}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    for name in names:
        config = configuration(name, given.steps, given.device, large=given.large)
        row = audited_run(config, corpus, given.every, given.sample)
        rows.append(row)
        seconds = row["time"]
        print(
            f"{name}: {row['differences']} of {row['elements']} elements differ;"
            f" {row['audited']} of {row['steps']} steps audited;"
            f" {seconds['plain']:.3f} s a step, {seconds['audited']:.3f} s audited"
        )
        write_atomically(given.out, "".join(to_json(own) + "\n" for own in rows))


if __name__ == "__main__":
    main()
