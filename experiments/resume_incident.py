"""What a resumed run loses that lacks a part of its state: each part left out, beside controls.

    python -m fp8lab.experiments.resume_incident [--seeds N] [--condition NAME] [--variants A,B]
                                  [--large] [--jobs N] [--seconds S] [--out FILE]

A run is stopped after some steps. Its continuation is compared, step by step and on the same
batches, with resumed runs that lack one part of the state; what is missing is as in a new run, as
`TrainingState.restore(strict=False)` leaves it. Two controls: everything restored, whose gap must
be 0 bits at every step; and everything restored, with one weight moved by one ulp, which shows how
far two runs drift apart by chaos alone.

Rows go beside the figure, each as its run ends; given again, the command does what is missing.
--out names either file. The state that is resumed from is a checkpoint in --work; where that is
gone the common part is trained again, to the same bits. One command at a time works there: a second
one is refused. Several GPUs share the processes. --redraw draws the rows that are there.
`docs/checkpoints.md` tells what was found.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from fp8lab.checkpoint_files import remove_folder
from fp8lab.data import load_corpus
from fp8lab.errors import UserError
from fp8lab.experiments.commands import (
    Parser,
    check_at_least,
    check_distinct,
    exit_code,
    made_by,
    rows_and_figure,
)
from fp8lab.experiments.incident_rows import check_rows, without_partner
from fp8lab.experiments.incident_runs import (
    CONDITIONS,
    LOST,
    Case,
    Setting,
    can_lose,
    cases_of,
    row_of,
)
from fp8lab.experiments.plot_resume import draw, table
from fp8lab.experiments.sittings import Sitting
from fp8lab.experiments.turns import check_jobs, in_turn
from fp8lab.folder_lock import held
from fp8lab.records import Row, environment, read_rows


def _in_process(case: Case, setting: Setting) -> Row | None:
    return row_of(case, setting, load_corpus(setting.text))


@contextmanager
def locked(work: Path) -> Iterator[None]:
    """Hold the folder of the common part's checkpoints for this process alone.

    Raises:
        UserError: Another process holds it, or the folder cannot be made.
    """
    with ExitStack() as resources:
        try:
            work.mkdir(parents=True, exist_ok=True)
            resources.enter_context(held(work, "works", "wait for it, or name another --work"))
        except OSError as error:
            raise UserError(
                f"cannot write in {work}: {error.strerror}; name another --work"
            ) from None
        yield


def tasks_of(cases: Sequence[Case], rows: Sequence[Row], setting: Setting) -> list[Case]:
    """The cases that have no row yet, and "common" where only its checkpoint is missing."""
    done = {Case(row["condition"], row["seed"], row["variant"]) for row in rows}
    tasks: list[Case] = []
    for case in cases:
        place = case.checkpoint(setting)
        if case in done:
            continue
        if case.variant == "continuous":
            # What an earlier sitting left may be of other code: it is made again beside the row.
            if place.is_dir():
                remove_folder(place)
        elif not place.is_dir():
            makers = [replace(case, variant=name) for name in ("continuous", "common")]
            if not any(maker in tasks for maker in makers):
                tasks.append(makers[1])
        tasks.append(case)
    return tasks


def do_missing(
    sitting: Sitting,
    cases: Sequence[Case],
    setting: Setting,
    *,
    jobs: int = 1,
    seconds: float | None = None,
) -> int:
    """Do the runs whose rows are not there; returns how many are missing still."""
    tasks = tasks_of(cases, sitting.rows, setting)
    left = sum(case.variant != "common" for case in tasks)

    def ready(case: Case) -> bool:
        begins = case.variant in ("continuous", "common")
        return begins or case.checkpoint(setting).is_dir()

    work = partial(_in_process, setting=setting)
    gpus = torch.cuda.device_count() if setting.large else 0
    with tqdm(total=left, unit="run") as bar:
        for case, row in in_turn(tasks, work, jobs=jobs, seconds=seconds, gpus=gpus, ready=ready):
            if row is not None:
                sitting.add(row)
                left -= 1
                bar.set_postfix_str(f"{case.condition}, seed {case.seed}: {case.variant}")
                bar.update()
    return left


def variants_named(text: str | None) -> tuple[str, ...]:
    """Variants from a list with commas; all where there is none. Names may hold commas.

    Raises:
        UserError: There is no such variant.
    """
    if text is None:
        return tuple(LOST)
    rest, found = text.strip(), []
    while rest:
        name = max((v for v in LOST if f"{rest},".startswith(f"{v},")), key=len, default=None)
        if name is None:
            raise UserError(f"--variants has {rest!r}; accepted: {'; '.join(LOST)}")
        found.append(name)
        rest = rest[len(name) :].lstrip(", ")
    if not found:
        raise UserError(f"--variants names none; accepted: {'; '.join(LOST)}")
    check_distinct(tuple(found), "--variants")
    return tuple(found)


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing of all conditions and variants, or draw again."""
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="(default 3)")
    parser.add_argument("--before", type=int, default=120, metavar="N", help="steps (default 120)")
    parser.add_argument("--after", type=int, default=300, metavar="N", help="steps (default 300)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes (default 1)")
    parser.add_argument("--seconds", type=float, metavar="S", help="begin nothing after S seconds")
    parser.add_argument("--condition", choices=tuple(CONDITIONS), help="one alone (default all)")
    parser.add_argument("--variants", metavar="A,B", help=f"of: {'; '.join(LOST)} (default all)")
    parser.add_argument("--large", action="store_true", help="122M parameters, on a GPU")
    parser.add_argument("--text", type=Path, metavar="FILE", help="in place of the plays")
    parser.add_argument("--out", type=Path, metavar="FILE", help="figure, or rows")
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("runs/resume-incident"),
        metavar="FOLDER",
        help="where the common part's checkpoints are kept (default runs/resume-incident)",
    )
    parser.add_argument("--redraw", action="store_true", help="from all rows that are there")
    given = parser.parse_args(arguments)
    folder = Path("figures/h200" if given.large else "figures")
    path, figure = rows_and_figure(given.out or folder / "resume-incident.png")
    if not given.redraw:
        _sit(given, path, made_by("resume_incident", arguments))
    rows = check_rows(read_rows(path), path)
    alone = without_partner(rows[1:])
    compared = [row for row in rows[1:] if row not in alone]
    if any(row["variant"] != "continuous" for row in compared):
        draw([rows[0], *compared], figure)
        print(table([rows[0], *compared]))
        for row in alone:
            print(
                f"left out: {row['condition']}, seed {row['seed']}: {row['variant']}; its"
                " continuous run is not there"
            )
    elif given.redraw:
        raise UserError(f"{path} holds nothing to compare yet; give the command without --redraw")


def _sit(given: argparse.Namespace, path: Path, made: Row) -> None:
    check_jobs(given.jobs, given.seconds)
    for option in ("seeds", "before", "after"):
        check_at_least(getattr(given, option), 1, f"--{option}")
    device = "cuda" if given.large else "cpu"
    if given.large and not torch.cuda.is_available():
        raise UserError("--large needs a CUDA device, and torch finds none; leave it out")
    variants = variants_named(given.variants)
    names = list(CONDITIONS) if given.condition is None else [given.condition]
    for variant in () if given.variants is None else variants:
        if not any(can_lose(name, variant) for name in names):
            raise UserError(
                f"--variants has {variant!r}, which the condition {', '.join(names)} cannot lose:"
                " it has no such state; name another"
            )
    corpus = load_corpus(given.text)
    settings = {"seeds": given.seeds, "before": given.before, "after": given.after}
    if given.large:
        settings["large"] = True
    head: Row = {
        "resume_incident": settings,
        "corpus": {"name": corpus.name, "sha256": corpus.sha256},
        "environment": environment(device) | made,
    }
    work = given.work / ("large" if given.large else "small")
    setting = Setting(given.before, given.after, given.large, given.text, work, corpus.sha256)
    with locked(work), Sitting(path, head, check=check_rows) as sitting:
        cases = cases_of(names, given.seeds, variants)
        left = do_missing(sitting, cases, setting, jobs=given.jobs, seconds=given.seconds)
        order = ["continuous", *LOST]
        sitting.sort(
            lambda row: (
                list(CONDITIONS).index(row["condition"]),
                row["seed"],
                order.index(row["variant"]),
            )
        )
    if left:
        print(f"{left} runs are missing; the same command goes on with them")


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
