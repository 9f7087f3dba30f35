"""Training speed on a GPU: Llama-8B-shaped blocks in BF16 and in FP8, of this lab and of torchao.

    python -m fp8lab.experiments.bench_blocks [--out FOLDER] [--model] [--rounds N] [--only A,B]

Four blocks, 2 x 4096 tokens, forward and backward; with --model a whole byte model of 1.1 billion
parameters with clip and AdamW, too. All variants are compiled and warmed up first, and each is
timed as the host issues it and as a CUDA graph of its whole step (`graph` in its rows). A round
times each of them once, one after the other, so that clocks and heat are shared; what is reported
is the median of the rounds, and the median of the ratios to BF16 of the same kind within a round.
(The whole model's two kinds have rounds of their own: both do not fit.) Then steps of each graph go
through torch's profiler: where the time goes. Rows go to FOLDER/blocks.jsonl.
"""

from __future__ import annotations

import argparse
import gc
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from fp8lab.errors import UserError
from fp8lab.experiments.block_cases import VARIANTS, Shape, Variant, blocks_step, model_step
from fp8lab.experiments.commands import exit_code
from fp8lab.records import Row, environment, to_json, write_atomically

BASELINE = "torch bf16"
STEPS = 3  # timed together
WARM_UP = 4  # with which our graph of a model is captured
KINDS_OF_STEP = (False, True)  # without a CUDA graph, and as one
MODEL = Shape(layers=5)  # with embedding and head 1.1 billion parameters
# Kernels by name: the first that matches; the rest is norms, activations, rotary positions, sums.
KINDS = (
    ("attention", r"flash|fmha|sdpa|attention"),
    ("product", r"nvjet|gemm|cutlass|^matmul_kernel|cublas"),
    ("cast", r"quantize|amax|scale_from|update_delayed|swiglu"),
    ("optimizer", r"adam|leaf_kernel|norm_kernel|constants_kernel|multi_tensor"),
)
Step = Callable[[], Any]
Steps = dict[tuple[str, bool], Step]  # by variant, and whether it is a graph


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("figures/h200"))
    parser.add_argument("--model", action="store_true", help="time the whole model, too")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="(default 9)")
    parser.add_argument("--only", metavar="A,B", help="variants by name, BF16 always among them")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise UserError("the benchmark needs a CUDA device; torch finds none")
    if options.rounds < 1:
        raise UserError(f"rounds is {options.rounds}; accepted: 1 and up")
    chosen = chosen_variants(options.only)
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = [
        {
            "environment": environment("cuda"),
            "rounds": options.rounds,
            "date": datetime.now(UTC).date().isoformat(),
            "command": "python -m fp8lab.experiments.bench_blocks",
        }
    ]
    for row in measure(chosen, rounds=options.rounds, model=options.model):
        rows.append(row)
        print(line_of(row), flush=True)
        write_atomically(options.out / "blocks.jsonl", "".join(to_json(r) + "\n" for r in rows))


def chosen_variants(only: str | None) -> list[Variant]:
    """The variants that were asked for and can run here.

    Raises:
        UserError: A name that there is not.
    """
    wanted = None if only is None else {part.strip() for part in only.split(",")} | {BASELINE}
    names = [variant.name for variant in VARIANTS]
    unknown = sorted((wanted or set()) - set(names))
    if unknown:
        raise UserError(f"unknown variant {unknown[0]!r}; accepted: {', '.join(names)}")
    return [
        variant
        for variant in VARIANTS
        if (wanted is None or variant.name in wanted) and variant.missing() is None
    ]


def measure(chosen: list[Variant], *, rounds: int, model: bool) -> Iterator[Row]:
    """The blocks, then the whole model where it is asked for."""
    yield from run_group("blocks", chosen, Shape(), blocks_step, rounds)
    for graph in KINDS_OF_STEP if model else ():
        gc.collect()
        torch.cuda.empty_cache()
        yield from run_group("model", chosen, MODEL, model_step, rounds, (graph,))


def run_group(
    title: str,
    chosen: list[Variant],
    shape: Shape,
    make: Callable[..., Step],
    rounds: int,
    kinds: Sequence[bool] = KINDS_OF_STEP,
) -> Iterator[Row]:
    """Prepare all, time all, then account for each variant: as a graph where there is one."""
    # Graphs run one after the other, so that they may share what memory they do not keep.
    pool = torch.cuda.graph_pool_handle()
    steps = {
        (variant.name, graph): prepared(make(variant, shape, graph=graph, pool=pool))
        for variant in chosen
        for graph in kinds
    }
    yield from timed(title, steps, shape, rounds)
    for (name, graph), step in steps.items():
        if graph == kinds[-1]:
            yield {"group": title, "variant": name, "graph": graph, "account": account(step)}


def prepared(step: Step) -> Step:
    """The step, after the runs that compile it."""
    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    return step


def timed(title: str, steps: Steps, shape: Shape, rounds: int) -> Iterator[Row]:
    """Interleaved rounds: one row a variant and kind."""
    times: dict[tuple[str, bool], list[float]] = {key: [] for key in steps}
    for _ in range(rounds):
        for key, step in steps.items():
            times[key].append(_milliseconds(step))
    for (name, graph), found in times.items():
        base = times[BASELINE, graph]
        ratios = [one / own for one, own in zip(base, found, strict=True)]
        middle = statistics.median(found)
        hosts = [_host_milliseconds(steps[name, graph]) for _ in range(3)]
        yield {
            "group": title,
            "variant": name,
            "graph": graph,
            "shape": asdict(shape),
            "ms": round(middle, 3),
            "ms_range": [round(min(found), 3), round(max(found), 3)],
            "tokens_per_second": round(shape.tokens / middle * 1e3),
            "host_ms": round(statistics.median(hosts), 3),
            "over_bf16": round(statistics.median(ratios), 4),
            "over_bf16_range": [round(min(ratios), 4), round(max(ratios), 4)],
        }


def _milliseconds(step: Step) -> float:
    """Of one step, by the device's clock, several steps together."""
    event: Any = torch.cuda.Event
    start, end = (event(enable_timing=True) for _ in range(2))
    step()  # the host is ahead of the device from here on
    start.record()
    for _ in range(STEPS):
        step()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / STEPS


def _host_milliseconds(step: Step) -> float:
    """What the host needs to issue a step: near `ms`, it is the host that is timed."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return spent * 1e3


def account(step: Step) -> dict[str, Any]:
    """Milliseconds of one step by kind of kernel, and the kernels that take longest."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    kinds: dict[str, float] = {}
    kernels: dict[str, float] = {}
    for event in profiler.key_averages():
        spent = event.self_device_time_total / 1e3 / STEPS
        if spent:
            kind = kind_of(event.key)
            kinds[kind] = kinds.get(kind, 0.0) + spent
            kernels[event.key[:60]] = kernels.get(event.key[:60], 0.0) + spent
    longest = sorted(kernels.items(), key=lambda item: -item[1])[:12]
    return {
        "ms": {kind: round(spent, 3) for kind, spent in sorted(kinds.items())},
        "longest": {name: round(spent, 3) for name, spent in longest},
    }


def kind_of(kernel: str) -> str:
    """What a kernel is for, by its name."""
    for kind, pattern in KINDS:
        if re.search(pattern, kernel, re.IGNORECASE):
            return kind
    return "rest"


def line_of(row: Row) -> str:
    """A row for people."""
    kind = "graph" if row["graph"] else "host"
    head = f"{row['group']:<7} {row['variant']:<20} {kind:<5}"
    if "account" in row:
        parts = ", ".join(f"{kind} {ms:.2f}" for kind, ms in row["account"]["ms"].items())
        return f"{head} {parts} ms"
    return (
        f"{head} {row['ms']:8.2f} ms {row['tokens_per_second']:>8} tokens/s"
        f" {row['over_bf16']:.3f} of BF16 (host {row['host_ms']:.1f} ms)"
    )


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
