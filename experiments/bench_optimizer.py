"""The optimizer's speed on a GPU, as a share of the device copy of the same run.

    python -m fp8lab.experiments.bench_optimizer [--out FOLDER] [--tune] [--only GROUP] [--redraw]

The card is warmed up first. Every round times the copy and all cases of a group once, one after
the other, so that clocks and heat are shared; what is reported is the median of the rounds. Each
is queued behind another copy, so that the host's time to launch is not part of it; only launches
against a CUDA graph are timed without. Rows go to FOLDER/optimizer.jsonl, the picture that is drawn
from them to FOLDER/optimizer.png.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fp8lab.errors import UserError
from fp8lab.experiments.bench_rows import checked_optimizer
from fp8lab.experiments.commands import Parser, check_writable, exit_code
from fp8lab.experiments.new_rows import NewRows
from fp8lab.experiments.optimizer_cases import (
    BFLOAT16_MOMENTS,
    EIGHT_BIT,
    FLOAT32,
    MODELS,
    REMAINDER,
    STATE_CASES,
    Shapes,
    StateCase,
    make_plan,
    sharded,
)
from fp8lab.experiments.optimizer_streams import streams
from fp8lab.experiments.plot_optimizer import draw
from fp8lab.kernels.adamw import step_constants
from fp8lab.kernels.adamw_plan import AdamPlan
from fp8lab.kernels.adamw_settings import AdamSettings
from fp8lab.kernels.gradients import GradientPlan
from fp8lab.optimizer_formats import order_named
from fp8lab.records import Row, environment, read_rows, today

ROUNDS = 15
WARM_UP_SECONDS = 3.0
COPY_ELEMENTS = 1 << 28  # float32: 1 GiB in, 1 GiB out
OPTIONS: dict[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.1,
}
# What --tune tries: elements a program, its warps, registers a thread.
LAUNCHES: tuple[tuple[int, int, int | None], ...] = (
    (128, 1, None),
    (256, 1, None),
    (256, 1, 80),
    (256, 1, 64),
    (256, 2, None),
    (512, 1, 128),
    (512, 2, None),
    (512, 2, 80),
    (512, 4, None),
    (1024, 2, 128),
    (1024, 4, None),
    (1024, 8, None),
    (2048, 8, None),
)
TUNED = (FLOAT32, REMAINDER, BFLOAT16_MOMENTS, EIGHT_BIT)
ONE_BY_ONE = "torch, one kernel an operation"
Step = Callable[[], Any]
# name -> (the step, elements, bytes it must move for each)
Group = dict[str, tuple[Step, int, float]]


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark, or draw its rows again."""
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("figures/h200"))
    parser.add_argument("--tune", action="store_true", help="try launch settings, too")
    parser.add_argument(
        "--only",
        default="",
        metavar="GROUP",
        help="run the groups whose title begins so, and keep the other rows of the file",
    )
    parser.add_argument("--redraw", action="store_true", help="draw the rows that are there")
    options = parser.parse_args(arguments)
    rows_file = options.out / "optimizer.jsonl"
    check_writable(rows_file.with_suffix(".png"))
    if options.redraw:
        rows = checked_optimizer(read_rows(rows_file), rows_file)
    else:
        if not any(title.startswith(options.only) for title, _ in groups(options.tune)):
            raise UserError(f"--only is {options.only!r}, with which no group's title begins")
        kept = []
        if options.only:
            there = checked_optimizer(read_rows(rows_file), rows_file)
            kept = [row for row in there if _is_kept(row, options.only)]
        if not torch.cuda.is_available():
            raise UserError("the benchmark needs a CUDA device; torch finds none")
        command = "python -m fp8lab.experiments.bench_optimizer --out FOLDER"
        head = {
            "environment": environment("cuda"),
            "rounds": ROUNDS,
            "date": today(),
            "command": command + (" --tune" if options.tune else ""),
        }
        with NewRows(rows_file, kept[0] if kept else head) as new:
            new.add(*kept[1:])
            for row in measure(options.tune, options.only):
                new.add(row)
                print(line_of(row), flush=True)
        rows, rows_file = new.rows, new.path
    draw(rows, rows_file.with_suffix(".png"))


def _is_kept(row: Row, only: str) -> bool:
    return "group" not in row or not row["group"].startswith(only)


def measure(tune: bool, only: str) -> Iterator[Row]:
    """All groups whose title begins with `only`, each on fresh memory."""
    _warm_up()
    for title, make in groups(tune):
        if title.startswith(only):
            yield from _run(title, make())


def groups(tune: bool) -> Iterator[tuple[str, Callable[[], Group]]]:
    """The titles, and what makes each group."""
    for name, shapes in MODELS.items():
        yield f"norm: {name}", partial(norm_group, shapes)
        yield f"AdamW: {name}", partial(adamw_group, name, shapes)
    shapes = MODELS["1.3B (24 layers of 2048)"]
    yield "states: 1.3B", lambda: {ONE_BY_ONE: torch_step(shapes, {"foreach": False}, 80)}
    for case in STATE_CASES:
        yield "states: 1.3B", partial(step_group, shapes, (case,))
    yield "states: 2^28, no arithmetic", streams_group
    for ranks in (8, 64):
        part = sharded(shapes, ranks)
        yield f"sharded over {ranks}: 1.3B", partial(step_group, part, (FLOAT32, EIGHT_BIT))
    yield "graph: 1.3B over 64", partial(graph_group, sharded(shapes, 64))
    if tune:
        for case in TUNED:
            yield f"tune: {case.name}", partial(tune_group, case)


def step_group(shapes: Shapes, cases: Iterable[StateCase]) -> Group:
    """The lab's kernel on several states."""
    return {case.name: step_of(shapes, case) for case in cases}


def norm_group(shapes: Shapes) -> Group:
    """Unscale, finite check and norm of float32 gradients against torch's norm alone."""
    grads = [torch.randn(shape, device="cuda") for shape in shapes]
    elements = sum(grad.numel() for grad in grads)
    plan = GradientPlan(grads)
    scale, limit = (torch.ones(1, device="cuda") for _ in range(2))
    return {
        "fp8lab": (lambda: plan.run(inverse_scale=scale, max_norm=limit), elements, 4),
        "torch foreach": (
            lambda: torch.nn.utils.get_total_norm(grads, foreach=True),
            elements,
            4,
        ),
    }


def adamw_group(name: str, shapes: Shapes) -> Group:
    """float32 everywhere: the lab's orders against torch's own kernels."""
    group = {"fp8lab plain": step_of(shapes, FLOAT32)}
    if name == next(iter(MODELS)):
        for order in ("torch", "torch_cuda", "apex"):
            group[f"fp8lab {order}"] = step_of(shapes, replace(FLOAT32, order=order))
        group["torch foreach"] = torch_step(shapes, {"foreach": True}, 28)
    group["torch fused"] = torch_step(shapes, {"fused": True}, 28)
    return group


def torch_step(
    shapes: Shapes, options: dict[str, bool], bytes_moved: float
) -> tuple[Step, int, float]:
    """A step of torch.optim.AdamW."""
    params = [torch.nn.Parameter(torch.randn(shape, device="cuda")) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer = torch.optim.AdamW(params, **OPTIONS, **options)  # type: ignore[arg-type]
    return optimizer.step, sum(param.numel() for param in params), bytes_moved


def streams_group() -> Group:
    """What the bytes of the 14-byte step cost without its arithmetic."""
    elements = 1 << 28
    return {
        f"block {block}, {warps} warps": (streams(elements, block, warps), elements, 14.125)
        for block, warps in ((256, 1), (512, 2), (1024, 4))
    }


def step_of(
    shapes: Shapes, case: StateCase, settings: AdamSettings | None = None
) -> tuple[Step, int, float]:
    """A step of the lab's kernel with gradient factor, skip flag and constants on the device."""
    plan = make_plan(shapes, case, settings)
    elements = sum(t.param.numel() for t in plan.tensors)
    return launcher(plan, case), elements, case.bytes_moved


def launcher(plan: AdamPlan, case: StateCase) -> Step:
    """One step of a plan, as training takes it."""
    constants = step_constants(order_named(case.order), step=10, **OPTIONS).cuda()
    flags = {
        "factor": torch.ones(1, device="cuda"),
        "skip": torch.zeros(1, dtype=torch.int32, device="cuda"),
        "seed": torch.zeros(1, dtype=torch.int64, device="cuda"),
    }
    return lambda: plan.launch(constants, **flags)


def graph_group(shapes: Shapes) -> Group:
    """A whole step (norm, constants, update) launched, and replayed from a CUDA graph."""
    plan = make_plan(shapes, FLOAT32)
    grads = GradientPlan([t.grad for t in plan.tensors])
    numbers = torch.tensor([[1e-3, 0.9, 0.999, 1e-8, 0.1]], dtype=torch.float64, device="cuda")
    steps = torch.zeros(1, dtype=torch.int64, device="cuda")
    constants = torch.zeros(1, 9, device="cuda")
    one = torch.ones(1, device="cuda")

    def whole() -> None:
        summary = grads.run(inverse_scale=one, max_norm=one)
        plan.advance(numbers, steps, constants, skip=summary.skip)
        plan.launch(constants, factor=summary.factor, skip=summary.skip)

    whole()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        whole()
    elements = sum(t.param.numel() for t in plan.tensors)
    return {"launched": (whole, elements, 32), "graph": (graph.replay, elements, 32)}


def tune_group(case: StateCase) -> Group:
    """Launch settings on one tensor."""
    shapes = MODELS["one tensor of 2^28"]
    group = {}
    for block, warps, registers in LAUNCHES:
        settings = AdamSettings(block, warps, registers)
        name = f"block {block}, {warps} warps, " + (
            "any registers" if registers is None else f"{registers} registers"
        )
        group[name] = step_of(shapes, case, settings)
    return group


def _warm_up() -> None:
    """Copy until the clocks have settled: a card that was idle is slower at first."""
    source = torch.empty(COPY_ELEMENTS, device="cuda")
    target = torch.empty_like(source)
    until = time.monotonic() + WARM_UP_SECONDS
    while time.monotonic() < until:
        for _ in range(100):
            target.copy_(source)
        torch.cuda.synchronize()


def _run(title: str, group: Group) -> Iterator[Row]:
    """Time a group in interleaved rounds, beside the copy; then let its memory go."""
    source = torch.empty(COPY_ELEMENTS, device="cuda")
    target = torch.empty_like(source)
    cases: Group = {"copy": (partial(target.copy_, source), COPY_ELEMENTS, 8), **group}
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(2):  # compiled, and warm
        for step, _, _ in cases.values():
            step()
    torch.cuda.synchronize()
    for _ in range(ROUNDS):
        for name, (step, _, _) in cases.items():
            if not title.startswith("graph"):
                cases["copy"][0]()
            times[name].append(_milliseconds(step))
    rates = {
        name: elements * size / statistics.median(times[name]) / 1e6
        for name, (_, elements, size) in cases.items()
    }
    for name, (_, elements, size) in group.items():
        yield {
            "group": title,
            "name": name,
            "elements": elements,
            "bytes_per_element": size,
            "milliseconds": round(statistics.median(times[name]), 4),
            "spread": round(max(times[name]) / min(times[name]), 3),
            "gigabytes_per_second": round(rates[name], 1),
            "copy": round(rates["copy"], 1),
            "share_of_copy": round(rates[name] / rates["copy"], 4),
        }
    group.clear()
    cases.clear()
    del source, target, step  # or the next group finds no room
    gc.collect()
    torch.cuda.empty_cache()


def _milliseconds(step: Step) -> float:
    start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    start.record()
    step()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def line_of(row: Row) -> str:
    """A row as a line of the printed table."""
    return (
        f"{row['group']:<34} {row['name']:<36} {row['bytes_per_element']:6.2f} B"
        f" {row['milliseconds']:9.3f} ms {row['gigabytes_per_second']:7.0f} GB/s"
        f" {row['share_of_copy']:6.3f} of copy"
    )


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
