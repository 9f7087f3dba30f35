"""Timing contestants side by side on a card: CUDA graphs, rounds by turns, clock and power.

Each contestant is captured into a CUDA graph, so that only the device counts. Rounds are
interleaved, because the clock follows the heat: "hot" is back to back, "rested" short bursts with
pauses between them.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

# torch types neither.
_event: Any = torch.cuda.Event
_sleep: Any = torch.cuda._sleep

Launch = Callable[[int], object]  # of one piece of work, on operand set i

ROUNDS = 7
BURST_MS = 0.5
PAUSE_S = 0.004
MOST_LAUNCHES = 200
WARM_BURSTS = 8  # of the reference, before `against_reference` measures


def codes(rows: int, columns: int) -> torch.Tensor:
    """Random normal numbers as E4M3, row-major."""
    return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16).to(torch.float8_e4m3fn)


class Telemetry:
    """Clock, power and temperature of the card, twenty times a second, by nvidia-smi."""

    def __init__(self) -> None:
        query = "--query-gpu=clocks.sm,power.draw,temperature.gpu"
        self.samples: list[tuple[float, list[float]]] = []
        try:
            self._process: subprocess.Popen[str] | None = subprocess.Popen(
                ["nvidia-smi", query, "--format=csv,noheader,nounits", "-lms", "50"],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        except OSError:
            self._process = None
            return
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                values = [float(cell) for cell in line.split(",")]
            except ValueError:
                continue  # "[N/A]"
            self.samples.append((time.perf_counter(), values))

    def median(self, start: float, end: float) -> dict[str, float | None]:
        """Medians over a span of `time.perf_counter`; None where there is no sample."""
        inside = [values for when, values in list(self.samples) if start <= when <= end]
        names = ("clock_mhz", "power_w", "temperature_c")
        if not inside:
            return dict.fromkeys(names)
        return {
            name: statistics.median(values[place] for values in inside)
            for place, name in enumerate(names)
        }

    def close(self) -> None:
        if self._process is not None:
            self._process.terminate()


def captured(launch: Launch, count: int) -> torch.cuda.CUDAGraph:
    """A graph of so many launches, which has run once."""
    for index in range(2):
        launch(index)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(count):
            launch(index)
    graph.replay()
    torch.cuda.synchronize()
    return graph


def timed(graph: torch.cuda.CUDAGraph, *, cover: bool = False) -> float:
    """Milliseconds of one replay. `cover` hides the host's start behind a wait on the device."""
    begin, end = (_event(enable_timing=True) for _ in range(2))
    if cover:
        _sleep(1_000_000)
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end))


class Timed(NamedTuple):
    """What `side_by_side` measured.

    Attributes:
        times: Milliseconds a launch: by heat, by contestant, a value a round.
        hot: When the hot rounds began and ended, of `time.perf_counter`.
    """

    times: dict[str, dict[str, list[float]]]
    hot: tuple[float, float]


def side_by_side(
    contestants: Mapping[str, Launch], seconds: float, *, sets: int, rested: bool = True
) -> Timed:
    """Milliseconds of one launch of each contestant, round by round: "hot", and "rested".

    Args:
        contestants: Each by its name; the last decides how many launches a round has.
        seconds: Of hot work, of all contestants together.
        sets: Operand sets; a round goes through each at least once.
        rested: Whether to measure that too.
    """
    names = list(contestants)
    single = max(timed(captured(contestants[names[-1]], 1)), 1e-3)
    share = seconds * 1e3 / (len(names) * (ROUNDS + 1))
    count = int(min(MOST_LAUNCHES, max(sets, share / single)))
    graphs = {name: captured(launch, count) for name, launch in contestants.items()}
    start = time.perf_counter()
    found = {"hot": _rounds(graphs, count, replays=max(1, int(share / single / count)))}
    span = start, time.perf_counter()
    if rested:
        few = max(1, int(BURST_MS / single))
        short = {name: captured(launch, few) for name, launch in contestants.items()}
        found["rested"] = _rounds(short, few, pause=PAUSE_S)
    return Timed(found, span)


def _rounds(
    graphs: Mapping[str, torch.cuda.CUDAGraph], count: int, *, replays: int = 1, pause: float = 0
) -> dict[str, list[float]]:
    """By turns; the first round only warms up."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS + 1):
        for name, graph in graphs.items():
            if pause:
                time.sleep(pause)
            elapsed = [timed(graph, cover=bool(pause)) for _ in range(replays)]
            times[name].append(statistics.median(elapsed) / count)
    return {name: values[1:] for name, values in times.items()}


def ratios(times: Mapping[str, list[float]], ours: str, theirs: str) -> dict[str, float]:
    """Their time over ours, round by round: the median, the smallest and the largest."""
    found = [t / o for o, t in zip(times[ours], times[theirs], strict=True)]
    return {"ratio": statistics.median(found), "lowest": min(found), "highest": max(found)}


class Against(NamedTuple):
    """What `against_reference` measured.

    Attributes:
        ratios: The reference's time over the candidate's, a value a round.
        times: Milliseconds a launch of the candidate, a value a round.
        reference: Those of the reference, a value a burst.
    """

    ratios: dict[str, list[float]]
    times: dict[str, list[float]]
    reference: list[float]


def against_reference(
    reference: Launch,
    candidates: Mapping[str, Launch],
    *,
    sets: int,
    rounds: int,
    visit_ms: float,
    seed: int | str,
) -> Against:
    """Hot times of candidates, each visit between two bursts of a reference.

    Which kernel ran just before changes the clock, and so a time, by several percent: so the same
    one runs before each candidate, for as long, and is what the candidate is compared with.

    Args:
        reference: What runs between visits.
        candidates: Each by its name.
        sets: Operand sets; a visit goes through each at least once.
        rounds: How often each is visited.
        visit_ms: How long a visit would be with the reference's speed, in milliseconds; a launch
            for each set is the least.
        seed: Of the order.
    """
    single = max(timed(captured(reference, 1)), 1e-3)
    count = int(min(MOST_LAUNCHES, max(sets, visit_ms / single)))
    replays = max(1, round(visit_ms / single / count))
    graphs = {name: captured(launch, count) for name, launch in candidates.items()}
    between = captured(reference, count)

    def visit(graph: torch.cuda.CUDAGraph) -> float:
        return statistics.median(timed(graph) for _ in range(replays)) / count

    for _ in range(WARM_BURSTS):
        visit(between)
    order = schedule(list(candidates), rounds, seed)
    times = [visit(between if name is None else graphs[name]) for name in order]
    own: dict[str, list[float]] = {name: [] for name in candidates}
    for name, spent in zip(order, times, strict=True):
        if name is not None:
            own[name].append(spent)
    bursts = [spent for name, spent in zip(order, times, strict=True) if name is None]
    return Against(ratios_to_reference(order, times), own, bursts)


def schedule(names: Sequence[str], rounds: int, seed: int | str) -> list[str | None]:
    """Who runs when: each name once a round, in an order of its own, with the reference around.

    Returns:
        Names at odd places, None for the reference at even ones.
    """
    shuffle = random.Random(seed)
    found: list[str | None] = [None]
    for _ in range(rounds):
        for name in shuffle.sample(names, len(names)):
            found += [name, None]
    return found


def ratios_to_reference(
    order: Sequence[str | None], times: Sequence[float]
) -> dict[str, list[float]]:
    """The mean of the bursts before and after a visit, over its time: by name, a value a visit."""
    found: dict[str, list[float]] = {}
    for place in range(1, len(order), 2):
        name = order[place]
        assert name is not None
        around = (times[place - 1] + times[place + 1]) / 2
        found.setdefault(name, []).append(around / times[place])
    return found
