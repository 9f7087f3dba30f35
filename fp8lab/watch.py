"""A run or a sweep as text, from its rows alone: losses, casts, events; live, or once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import sleep
from typing import Any, TextIO

from fp8lab.records import Row, number
from fp8lab.watch_rows import Run, Source
from fp8lab.watch_text import Style, aligned, level, shown, spark

_EVENTS = 6  # that are shown
_HISTORY = 16  # observations of a cast that are shown
_CLEAR = "\x1b[H\x1b[J"


def view(runs: Sequence[Run], style: Style, casts: int) -> str:
    """All that there is to see: of one run in full, of several a line each."""
    if len(runs) == 1:
        return "\n".join(_one(runs[0], style, casts))
    return "\n".join(_several(runs, style))


def _one(run: Run, style: Style, casts: int) -> Iterator[str]:
    title = [run.name, *([f"recipe {run.recipe}"] if run.recipe else [])]
    if not run.rows:
        yield "  ".join([*title, "no rows yet"])
        return
    last = run.rows[-1]
    of = f" of {run.steps}" if run.steps else ""
    yield "  ".join([*title, f"step {last['step']}{of}", run.state, *_pace(run)])
    lines = []
    for key, label in (
        ("loss", "loss"),
        ("validation_loss", "validation"),
        ("grad_norm", "grad norm"),
        ("lr", "learning rate"),
        ("loss_scale", "loss scale"),
    ):
        seen = [(row["step"], number(row[key])) for row in run.rows if key in row]
        if seen:
            lines.append(
                (label, shown(seen[-1][1]), spark([v for _, v in seen], style), _best(key, seen))
            )
    wide = max((len(curve) for _, _, curve, _ in lines), default=0)
    yield from aligned([(*line[:2], line[2].ljust(wide), line[3]) for line in lines])
    yield from _casts(run.rows, style, casts)
    events = list(events_of(run.rows))
    if events:
        yield f"events ({len(events)})"
        yield from (f"  step {step}: {text}" for step, text in events[-_EVENTS:])
    yield from _damaged([run])


def _damaged(runs: Sequence[Run]) -> Iterator[str]:
    lines = sum(run.damaged for run in runs)
    if lines:
        yield f"{lines} damaged lines were left out"


def _pace(run: Run) -> list[str]:
    clock = run.rows[-1].get("time", {}).get("seconds")
    if clock is None:
        return []
    clock = number(clock)
    return [f"{clock:.0f} s, {clock / max(int(run.rows[-1]['step']), 1):.3g} s a step"]


def _best(key: str, seen: Sequence[tuple[int, float]]) -> str:
    if key not in ("loss", "validation_loss"):
        return ""
    step, value = min(seen, key=lambda pair: math.inf if math.isnan(pair[1]) else pair[1])
    return f"lowest {shown(value)} at step {step}"


def _casts(rows: Sequence[Row], style: Style, most: int) -> Iterator[str]:
    observed = [row for row in rows if row.get("casts")]
    if not observed:
        return
    last = observed[-1]["casts"]
    names = list(last)
    if len(names) > most:  # the worst ones

        def loss(name: str) -> tuple[float, float]:
            return (-number(last[name]["overflow"]), -number(last[name]["underflow"]))

        names = sorted(names, key=loss)[:most]
    yield f"casts at step {observed[-1]['step']} (underflow over the last {_HISTORY} looks)"
    asked = any("sqnr_db" in last[name] for name in names)
    title = ("sqnr dB",) if asked else ()
    lines: list[tuple[str, ...]] = [("", "amax", "scale", "overflow", "underflow", *title, "")]
    for name in names:
        cast = last[name]
        over, under = number(cast["overflow"]), number(cast["underflow"])
        history = [
            number(row["casts"][name]["underflow"])
            for row in observed[-_HISTORY:]
            if name in row["casts"]
        ]
        lines.append(
            (
                name,
                shown(number(cast["amax"])),
                shown(number(cast["scale"])),
                style.alarm(shown(over), over > 0),
                style.warn(shown(under), under > 0.01),
                *([_sqnr(cast)] if asked else []),
                "".join(level(share, style) for share in history),
            )
        )
    yield from aligned(lines)
    if len(names) < len(last):
        yield f"  and {len(last) - len(names)} more, none worse"


def _sqnr(cast: dict[str, Any]) -> str:
    return f"{number(cast['sqnr_db']):.1f}" if "sqnr_db" in cast else "-"


def events_of(rows: Sequence[Row]) -> Iterator[tuple[int, str]]:
    """What happened: skipped steps, moves of the loss scale, a loss that is not finite, and what
    rows themselves list under "events" (texts, or objects).
    """
    scale: float | None = None
    for row in rows:
        step = int(row["step"])
        if row.get("skipped"):
            yield step, "skipped: a gradient was not finite"
        now = row.get("loss_scale")
        if now is not None and scale is not None and number(now) != scale:
            yield step, f"loss scale {shown(scale)} to {shown(number(now))}"
        scale = scale if now is None else number(now)
        if not math.isfinite(number(row.get("loss", 0.0))):
            yield step, f"the loss is {row['loss']}"
        for event in row.get("events", ()):
            if isinstance(event, dict):
                yield step, ", ".join(f"{key} {value}" for key, value in event.items())
            else:
                yield step, str(event)


def _several(runs: Sequence[Run], style: Style) -> Iterator[str]:
    if not runs:
        yield "no runs yet"
        return
    lines = [("run", "step", "loss", "validation", "overflow", "underflow", "state", "")]
    for run in runs:
        if not run.rows:
            lines.append((run.name, "0", "-", "-", "-", "-", run.state, ""))
            continue
        last = run.rows[-1]
        validated = [number(row["validation_loss"]) for row in run.rows if "validation_loss" in row]
        casts: dict[str, Any] = next(
            (row["casts"] for row in reversed(run.rows) if row.get("casts")), {}
        )
        over, under = (_mean(casts, key) for key in ("overflow", "underflow"))
        lines.append(
            (
                run.name,
                f"{last['step']}/{run.steps}" if run.steps else str(last["step"]),
                shown(number(last.get("loss", math.nan))),
                shown(validated[-1]) if validated else "-",
                style.alarm(shown(over), over > 0),
                style.warn(shown(under), under > 0.01),
                run.state,
                spark([number(row.get("loss", math.nan)) for row in run.rows], style),
            )
        )
    yield from aligned(lines)
    yield from _damaged(runs)


def _mean(casts: dict[str, Any], key: str) -> float:
    return sum(number(cast[key]) for cast in casts.values()) / max(len(casts), 1)


def watch(
    path: Path,
    out: TextIO,
    *,
    style: Style,
    casts: Callable[[], int],
    interval: float,
    once: bool,
) -> None:
    """Write the view, and again every `interval` seconds until no run goes on.

    Args:
        path: The folder of a run or of a sweep, or a file of rows.
        out: A terminal, unless `once`.
        style: How it may look.
        casts: How many casts to show at most, asked anew each time.
        interval: Seconds.
        once: Write it one time.

    Raises:
        UserError: There is nothing to watch.
    """
    source = Source(path)
    while True:
        runs = source.runs()
        text = view(runs, style, casts())
        out.write(f"{text}\n" if once else f"{_CLEAR}{text}\n")
        out.flush()
        if once or (runs and not any(run.going for run in runs)):
            return
        sleep(interval)
