"""What telemetry costs: ms of a step without it, of one it does not watch, of one it watches.

    python -m fp8lab.experiments.bench_telemetry [--out FOLDER] [--rounds N] [--recipes A,B]
                                                 [--only blocks,model]

"blocks" are the four Llama blocks of `bench_blocks` (2 x 4096 tokens, forward and backward,
compiled), with counts and SQNR of every cast; "model" is the byte model of 122M parameters in whole
training steps with AdamW, all of them CUDA graphs, and parameters watched, too. A round times each
kind of step by turns, with the clock of the host from one wait for the device to the next. A
watched step is timed with the one after it, less one that is not watched: so that its time has what
it takes to change from one graph to the other and back. Rows go to FOLDER/telemetry.jsonl: medians
of the rounds, and from them the mean step at a rate of every 100 and every 10 steps, over a step
without telemetry.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fp8lab.data import Corpus, load_corpus
from fp8lab.errors import UserError
from fp8lab.experiments.audit_run import configuration
from fp8lab.experiments.block_cases import Shape, Variant, blocks_and_step
from fp8lab.experiments.commands import Parser, check_at_least, check_writable, exit_code, listed
from fp8lab.experiments.new_rows import NewRows, card_head
from fp8lab.recipes import recipe_named
from fp8lab.records import Row
from fp8lab.telemetry import Telemetry
from fp8lab.training import TrainingRun
from fp8lab.training_config import TrainingConfig

ROWS = "telemetry.jsonl"
RATES = (100, 10)
STEPS = 4  # timed together, where they are not watched
WARM_UP = 4
NEVER = 10**9
Step = Callable[[], Any]


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark."""
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("figures/h200"))
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="(default 7)")
    parser.add_argument("--recipes", default="delayed,blockwise", metavar="A,B")
    parser.add_argument("--only", default="blocks,model", metavar="A,B", help="(default both)")
    options = parser.parse_args(arguments)
    check_at_least(options.rounds, 1, "--rounds")
    groups = listed(options.only, "--only")
    if set(groups) - {"blocks", "model"}:
        raise UserError(f"only is {options.only!r}; accepted: blocks, model, separated by a comma")
    recipes = listed(options.recipes, "--recipes")
    for recipe in recipes:
        recipe_named(recipe)
    check_writable(options.out / ROWS)
    if not torch.cuda.is_available():
        raise UserError("the benchmark needs a CUDA device; torch finds none")
    command = "python -m fp8lab.experiments.bench_telemetry"
    command += f" --recipes {','.join(recipes)} --only {','.join(groups)}"
    with NewRows(options.out / ROWS, card_head(command, options.rounds)) as new:
        for row in measure(groups, recipes, options.rounds):
            new.add(row)
            print(line_of(row), flush=True)


def measure(groups: Sequence[str], recipes: Sequence[str], rounds: int) -> Iterator[Row]:
    """One row a group and recipe."""
    corpus = load_corpus(None) if "model" in groups else None
    for group in groups:
        for recipe in recipes:
            if group == "blocks":
                found = blocks_kinds(recipe, Shape())
            else:
                assert corpus is not None
                config = configuration(recipe, NEVER, "cuda", large=True)
                config = replace(config, exp_avg="float32", exp_avg_sq="float32")
                found = model_kinds(config, corpus)
            yield {"group": group, "recipe": recipe, **summary(timed(found, rounds))}
            del found
            gc.collect()
            torch.cuda.empty_cache()


def blocks_kinds(
    recipe: str, shape: Shape, *, device: str = "cuda", compiled: bool = True
) -> dict[str, Step]:
    """Steps of the blocks: without telemetry, not watched, watched."""
    model, step = blocks_and_step(
        Variant("fp8lab", recipe), shape, device=device, compiled=compiled
    )
    telemetry = Telemetry(model)

    def inside(watch: bool) -> Any:
        telemetry.begin_step(watch)
        step()
        return telemetry.end_step()

    return {
        "without": step,
        "unwatched": lambda: inside(False),
        "watched": lambda: inside(True),
    }


def model_kinds(config: TrainingConfig, corpus: Corpus) -> dict[str, Step]:
    """Steps of training: without telemetry, not watched, watched."""
    runs = {on: TrainingRun(replace(config, telemetry=on), corpus) for on in (False, True)}

    def step(on: bool, every: int) -> Row:
        run = runs[on]
        run.config = replace(run.config, observe_every=every)
        return run.advance()

    return {
        "without": lambda: step(False, NEVER),
        "unwatched": lambda: step(True, NEVER),
        "watched": lambda: step(True, 1),
    }


def timed(kinds: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of a step of each kind, a number a round; by turns."""
    for step in kinds.values():
        for _ in range(WARM_UP):
            step()
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(rounds):
        for name in ("without", "unwatched"):
            kinds[name]()  # a graph that was left is entered again
            times[name].append(_milliseconds([kinds[name]] * STEPS) / STEPS)
        both = _milliseconds([kinds["watched"], kinds["unwatched"]])
        times["watched"].append(both - times["unwatched"][-1])
    return times


def _milliseconds(steps: list[Step]) -> float:
    """Of steps one after the other, until the device is done."""
    _wait()
    start = time.perf_counter()
    for step in steps:
        step()
    _wait()
    return (time.perf_counter() - start) * 1e3


def summary(times: dict[str, list[float]]) -> Row:
    """Medians, and the mean step at each rate over a step without telemetry."""
    middle = {name: statistics.median(found) for name, found in times.items()}
    row: Row = {f"{name}_ms": round(value, 3) for name, value in middle.items()}
    row["without_ms_range"] = [round(min(times["without"]), 3), round(max(times["without"]), 3)]
    for every in RATES:
        mean = ((every - 1) * middle["unwatched"] + middle["watched"]) / every
        row[f"every_{every}"] = round(mean / middle["without"], 5)
    return row


def line_of(row: Row) -> str:
    """One line for the terminal."""
    rates = ", ".join(f"every {n}: {(row[f'every_{n}'] - 1) * 100:+.2f} %" for n in RATES)
    return (
        f"{row['group']} {row['recipe']}: {row['without_ms']} ms without,"
        f" {row['unwatched_ms']} not watched, {row['watched_ms']} watched; {rates}"
    )


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
