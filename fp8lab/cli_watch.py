"""`fp8lab watch`: a run or a sweep in the terminal, from its rows alone; and its casts drawn."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from fp8lab.errors import UserError

_LINES_BESIDE = 18  # of the view, beside its casts
_CASTS = 24  # where there is no terminal to fill


def add_watch(commands: Any) -> None:
    """Add `watch` to the commands."""
    watch = commands.add_parser(
        "watch",
        help="look at a run or a sweep while it runs",
        description="Show losses, casts and events of a run, or a line for each run of a sweep,"
        " from its rows alone. On a terminal the view is renewed until the run ends.",
    )
    watch.add_argument(
        "run_folder",
        type=Path,
        metavar="RUN",
        help="folder of a run or a sweep, or a .jsonl of rows",
    )
    watch.add_argument("--once", action="store_true", help="print it one time")
    watch.add_argument(
        "--interval", type=float, default=2.0, metavar="S", help="seconds between looks (default 2)"
    )
    watch.add_argument(
        "--casts", type=int, metavar="N", help="casts to show (default: what the terminal holds)"
    )
    watch.add_argument(
        "--figure", type=Path, metavar="FILE", help="draw all casts over all steps, and end"
    )
    watch.set_defaults(run=_watch, after_interrupt="The run goes on.")


def _watch(given: argparse.Namespace) -> int:
    from fp8lab.watch import watch
    from fp8lab.watch_text import Style

    if not 0.1 <= given.interval <= 3600:
        raise UserError(f"--interval is {given.interval}; accepted: 0.1 to 3600 seconds")
    if given.casts is not None and given.casts < 0:
        raise UserError(f"--casts is {given.casts}; accepted: 0 and up")
    if given.figure is not None:
        from fp8lab.experiments.plot_casts import draw_casts

        rows = draw_casts(given.run_folder, given.figure)
        print(f"figure: {given.figure}\nits rows: {rows}")
        return 0
    out = sys.stdout
    terminal = out.isatty()

    def casts() -> int:
        if given.casts is not None:
            return int(given.casts)
        lines = shutil.get_terminal_size().lines if terminal else _CASTS + _LINES_BESIDE
        return max(lines - _LINES_BESIDE, 3)

    watch(
        given.run_folder,
        out,
        style=Style(
            colour=terminal and "NO_COLOR" not in os.environ,
            unicode=(out.encoding or "").lower().startswith("utf"),
        ),
        casts=casts,
        interval=given.interval,
        once=given.once or not terminal,
    )
    return 0
