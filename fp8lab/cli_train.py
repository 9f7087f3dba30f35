"""`fp8lab train`: a run in a folder, with checkpoints, begun or gone on with."""

from __future__ import annotations

import argparse
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8lab.cli_options import add_out, add_training_options, training_config
from fp8lab.errors import UserError
from fp8lab.recipes import PRESETS, Recipe, recipe_from_json, recipe_from_toml, recipe_named

if TYPE_CHECKING:
    from fp8lab.resume import CheckpointPlan, FolderRun
    from fp8lab.training_config import TrainingConfig

# What may be given beside --resume: all else is the run's own.
_WITH_RESUME = ("checkpoint_every", "stop_after", "keep_last", "keep_best", "unchecked", "text")


def add_train(commands: Any) -> None:
    """Add `train` to the commands."""
    train = commands.add_parser(
        "train", help="train one model", description="Train the small transformer with one recipe."
    )
    train.add_argument(
        "--recipe",
        default="delayed",
        metavar="NAME|FILE",
        help=f"{', '.join(PRESETS)} (settings after colons), or a .json or .toml file"
        " (default delayed)",
    )
    train.add_argument("--seed", type=int, default=0, metavar="S", help="(default 0)")
    add_training_options(train)
    add_out(train, "runs/train")
    _add_checkpoint_options(train)
    train.set_defaults(
        run=_train,
        after_interrupt="The rows so far are in metrics.jsonl; --resume goes on from a checkpoint.",
    )


def _add_checkpoint_options(train: argparse.ArgumentParser) -> None:
    train.add_argument(
        "--checkpoint-every", type=int, metavar="N", help="steps between checkpoints (default none)"
    )
    train.add_argument(
        "--stop-after",
        type=int,
        metavar="N",
        help="stop after step N, with a checkpoint; --steps remains the schedule's length",
    )
    train.add_argument(
        "--keep-last", type=int, metavar="N", help="keep only the newest N checkpoints"
    )
    train.add_argument(
        "--keep-best",
        type=int,
        metavar="N",
        help="with --keep-last: and the N with the lowest validation loss, of those at validated"
        " steps (default 0)",
    )
    train.add_argument(
        "--resume",
        type=Path,
        metavar="FOLDER",
        help="go on with the run in FOLDER from its newest checkpoint, by its own settings",
    )
    train.add_argument(
        "--unchecked",
        action="store_true",
        help="with --resume: skip the resume check (another machine gives other bits); else: record"
        " none",
    )
    train.add_argument(
        "--fallback",
        nargs="?",
        const="",
        metavar="SETTINGS",
        help="move a layer's role to BF16 when it looks bad, and back: overflow=0.001:after=2:"
        "recover=10:window=5, see docs/watching.md (default: never; alone: the rule's defaults)",
    )
    train.add_argument(
        "--keep",
        metavar="NAMES",
        help="sensitive layers that stay in BF16: first, last, head, embeddings or patterns, with"
        " commas between",
    )
    train.add_argument(
        "--telemetry",
        action="store_true",
        help="rows of observed steps also have SQNR, zeros and values that are not finite of each"
        " cast, and norms and histograms of each parameter",
    )
    train.set_defaults(train_parser=train)


def _train(given: argparse.Namespace) -> int:
    if given.resume is not None:
        return _resume(given)
    return _start(given, training_config(given, _recipe(given.recipe), given.seed))


def _recipe(name: str) -> Recipe:
    readers = {".json": recipe_from_json, ".toml": recipe_from_toml}
    path = Path(name)
    if path.suffix not in readers:
        if path.is_file():
            raise UserError(
                f"recipe {name} is a file; accepted: files in .json or .toml, or a name"
            )
        return recipe_named(name)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read the recipe {name}: {reason}") from None
    return readers[path.suffix](text, source=name)


def _start(given: argparse.Namespace, config: TrainingConfig) -> int:
    """Begin a run; returns the exit code."""
    from fp8lab.data import load_corpus
    from fp8lab.fallback_run import fallback_from_text
    from fp8lab.resume import start_run
    from fp8lab.training import check_device

    check_device(config.device)
    if given.fallback is not None:
        config = replace(config, fallback=fallback_from_text(given.fallback))
    if given.keep is not None:
        config = replace(config, keep=tuple(name.strip() for name in given.keep.split(",")))
    if given.telemetry:
        config = replace(config, telemetry=True)
    plan = _plan(given)
    corpus = load_corpus(given.text)
    corpus.check_context(config.model.context)
    with start_run(given.out, config, corpus, plan, text=given.text) as run:
        return _do(run)


def _resume(given: argparse.Namespace) -> int:
    """Go on with a run; returns the exit code.

    Raises:
        UserError: An option is given that is the run's own.
    """
    from fp8lab.resume import resume_run

    own = [name for name in _named(given) if name not in (*_WITH_RESUME, "resume")]
    if own:
        option = "--" + own[0].replace("_", "-")
        raise UserError(f"--resume goes on with the run's own settings; leave out {option}")
    with resume_run(given.resume, _plan(given), text=given.text) as run:
        print(f"going on after step {run.run.step} of {run.run.config.steps}")
        if not (run.checked or given.unchecked):
            print("the resume check was not made: the checkpoint was saved with --unchecked")
        return _do(run)


def _named(given: argparse.Namespace) -> list[str]:
    """The options that the command line names, those at their defaults too."""
    parser: argparse.ArgumentParser = given.train_parser
    unset = object()
    bare = argparse.Namespace(**dict.fromkeys(vars(given), unset))
    after = given.command_line.index("train") + 1
    parser.parse_args(given.command_line[after:], bare)
    return [name for name, value in vars(bare).items() if value is not unset]


def _plan(given: argparse.Namespace) -> CheckpointPlan:
    from fp8lab.resume import CheckpointPlan

    return CheckpointPlan(
        every=given.checkpoint_every,
        stop_after=given.stop_after,
        keep_last=given.keep_last,
        keep_best=given.keep_best,
        check=not given.unchecked,
    )


def _do(run: FolderRun) -> int:
    from tqdm import tqdm

    from fp8lab.training import summary_of

    config = run.run.config
    bar = tqdm(total=run.end, initial=run.run.step, unit="step", desc=config.recipe.name)
    with bar, closing(run.rows()) as rows:
        for row in rows:
            bar.set_postfix_str(f"loss {row['loss']:.4f}", refresh=False)
            bar.update()
    if run.is_finished:
        loss = summary_of(run.past)["validation_loss"]
        print(f"validation loss {loss:.4f} nats a byte; rows in {run.folder}")
    else:
        print(
            f"stopped after step {run.run.step} of {config.steps}; go on with:"
            f" fp8lab train --resume {run.folder}"
        )
    return 0
