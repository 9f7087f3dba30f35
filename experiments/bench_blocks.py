"""Training speed on a GPU: Llama-8B-shaped blocks in BF16 and in FP8, of this lab and of torchao.

    python -m fp8lab.experiments.bench_blocks [--groups A,B] [--only A,B] [--rounds N]
                                              [--out FOLDER]

The groups: "blocks", four of them, 2 x 4096 tokens, forward and backward; "model", a whole byte
model of 1.1 billion parameters with clip and AdamW. All variants are compiled and warmed up first,
and timed as the host issues their steps, then all again as CUDA graphs of whole steps (`graph` in
the rows). A round times each variant once, one after the other, so that clocks and heat are shared;
what is reported is the median of the rounds, and the median of the ratios to BF16 within a round.
Then steps of each go through torch's profiler: where the time goes. Rows go to FOLDER, into a file
named after the groups.
"""

from __future__ import annotations

import gc
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from fp8lab.errors import UserError
from fp8lab.experiments.block_cases import VARIANTS, Shape, Variant, blocks_step, model_step
from fp8lab.experiments.commands import Parser, check_at_least, check_writable, exit_code, listed
from fp8lab.experiments.new_rows import NewRows, card_head
from fp8lab.records import Row

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
GROUPS: dict[str, tuple[Shape, Callable[..., Step]]] = {
    "blocks": (Shape(), blocks_step),
    "model": (MODEL, model_step),
}


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark."""
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("figures/h200"))
    parser.add_argument(
        "--groups", default="blocks", metavar="A,B", help="blocks, model (default blocks)"
    )
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="(default 9)")
    parser.add_argument("--only", metavar="A,B", help="variants by name, BF16 always among them")
    options = parser.parse_args(arguments)
    check_at_least(options.rounds, 1, "--rounds")
    asked = listed(options.groups, "--groups")
    unknown = sorted(set(asked) - set(GROUPS))
    if unknown:
        raise UserError(f"unknown group {unknown[0]!r}; accepted: {', '.join(GROUPS)}")
    groups = [group for group in GROUPS if group in asked]  # one order, so one file
    chosen = chosen_variants(options.only)
    file = options.out / f"{'-'.join(groups)}.jsonl"
    check_writable(file)
    if not torch.cuda.is_available():
        raise UserError("the benchmark needs a CUDA device; torch finds none")
    command = f"python -m fp8lab.experiments.bench_blocks --groups {','.join(groups)}"
    if options.only:
        command += f' --only "{options.only}"'
    with NewRows(file, card_head(command, options.rounds)) as new:
        for row in measure(chosen, rounds=options.rounds, groups=groups):
            new.add(row)
            print(line_of(row), flush=True)


def chosen_variants(only: str | None) -> list[Variant]:
    """The variants that were asked for and can run here.

    Raises:
        UserError: A name that there is not.
    """
    wanted = None if only is None else {*listed(only, "--only"), BASELINE}
    names = [variant.name for variant in VARIANTS]
    unknown = sorted((wanted or set()) - set(names))
    if unknown:
        raise UserError(f"unknown variant {unknown[0]!r}; accepted: {', '.join(names)}")
    return [
        variant
        for variant in VARIANTS
        if (wanted is None or variant.name in wanted) and variant.missing() is None
    ]


def measure(chosen: list[Variant], *, rounds: int, groups: Sequence[str]) -> Iterator[Row]:
    """Each group, as the host issues its steps and then as graphs."""
    for group in groups:
        for graph in KINDS_OF_STEP:
            gc.collect()
            torch.cuda.empty_cache()
            yield from run_group(group, chosen, rounds, graph=graph)


def run_group(group: str, chosen: list[Variant], rounds: int, *, graph: bool) -> Iterator[Row]:
    """Prepare all, time all, then account for each variant."""
    shape, make = GROUPS[group]
    # Graphs run one after the other, so that they may share what memory they do not keep.
    pool = torch.cuda.graph_pool_handle()
    steps = {
        variant.name: prepared(make(variant, shape, graph=graph, pool=pool)) for variant in chosen
    }
    for row in timed(steps, shape, rounds):
        yield {"group": group, "graph": graph, **row}
    for name, step in steps.items():
        yield {"group": group, "graph": graph, "variant": name, "account": account(step)}


def prepared(step: Step) -> Step:
    """The step, after the runs that compile it."""
    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    return step


def timed(steps: dict[str, Step], shape: Shape, rounds: int) -> Iterator[Row]:
    """Interleaved rounds: one row a variant."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(_milliseconds(step))
    base = times[BASELINE]
    for name, found in times.items():
        ratios = [one / own for one, own in zip(base, found, strict=True)]
        middle = statistics.median(found)
        hosts = [_host_milliseconds(steps[name]) for _ in range(3)]
        yield {
            "variant": name,
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
