"""The command line: `fp8lab sweep | train | plot | explain | verify | new-kernel | ...`.

A user's mistake ends in one line and exit code 2. Ctrl-C ends with 130 and says how to go on. Heavy
modules are imported by the command that needs them, so that `--help` and a mistake are quick.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8lab import __version__
from fp8lab.cli_checkpoint import add_checkpoint
from fp8lab.cli_kit import add_new_kernel, add_verify
from fp8lab.cli_parser import Parser
from fp8lab.cli_train import add_checkpoint_options, resume_training, start_training
from fp8lab.cli_watch import add_watch
from fp8lab.errors import UserError
from fp8lab.formats import FORMATS
from fp8lab.recipes import PRESETS, Recipe, recipe_from_json, recipe_from_toml, recipe_named

if TYPE_CHECKING:
    from fp8lab.training_config import TrainingConfig

# Extras of pyproject.toml, the target of the Makefile that installs them, and what they have.
_RUN = ("torch", "triton", "matplotlib", "joblib", "tqdm", "platformdirs", "safetensors")
_EXTRAS = (
    ("kernels,experiments", "sweep", _RUN),
    ("test", "test", ("hypothesis", "pytest")),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a path may hold what the terminal cannot show
            stream.reconfigure(errors="backslashreplace")
    parser = build_parser()
    given = parser.parse_args(arguments)
    given.command_line = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code: int = given.run(given)
    except UserError as error:
        return _mistake(given, str(error))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "fp8lab":
            raise
        return _mistake(given, _missing(error.name))
    except KeyboardInterrupt:
        print(f"\nfp8lab {given.command}: interrupted. {given.after_interrupt}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as in `fp8lab info | head -1`
        sys.stderr.close()
        return 141
    except OSError as error:
        place = f"{error.filename}: " if error.filename is not None else ""
        return _mistake(given, f"{place}{error.strerror or error}; nothing finished is lost")
    return code


def _missing(module: str) -> str:
    """What helps where a module is not installed: the extra of pyproject.toml that has it."""
    package = module.split(".")[0]
    for extras, target, packages in _EXTRAS:
        if package in packages:
            return (
                f'{package} is not installed; install "fp8lab[{extras}]" (in a checkout: make'
                f" {target})"
            )
    return f"{package} is not installed"


def _mistake(given: argparse.Namespace, message: str) -> int:
    """Say in one line what is wrong."""
    print(f"fp8lab {given.command}: {' '.join(message.splitlines())}", file=sys.stderr)
    return 2


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = Parser(prog="fp8lab", description="A laboratory for FP8 training.")
    parser.add_argument("--version", action="version", version=f"fp8lab {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_sweep(commands)
    _add_train(commands)
    add_watch(commands)
    _add_plot(commands)
    _add_explain(commands)
    add_verify(commands)
    add_new_kernel(commands)
    add_checkpoint(commands)
    info = commands.add_parser("info", help="versions, devices and formats")
    info.add_argument(
        "--formats", action="store_true", help="only the formats and the overflow policies"
    )
    info.set_defaults(run=_info, after_interrupt="")
    return parser


def _add_sweep(commands: Any) -> None:
    sweep = commands.add_parser(
        "sweep",
        help="train with each scaling policy and compare",
        description="Train with each policy and seed, print a table and draw a figure. A sweep that"
        " was interrupted goes on where it stopped when the same command is given again.",
    )
    sweep.add_argument(
        "--policies",
        metavar="A,B",
        help=f"policies, separated by commas: {', '.join(PRESETS)}, with settings after colons as"
        " in delayed:history=64:margin=1 (default: bf16, current, delayed, blockwise, and static"
        " with and without a scale that fits)",
    )
    sweep.add_argument("--seeds", type=int, metavar="N", help="seeds a policy (default 3)")
    _add_training_options(sweep)
    sweep.add_argument(
        "--jobs", type=int, default=-1, metavar="N", help="runs at a time (-1: cores)"
    )
    sweep.add_argument(
        "--out",
        type=Path,
        default=Path("runs/sweep"),
        metavar="FOLDER",
        help="(default runs/sweep)",
    )
    sweep.add_argument(
        "--figure",
        type=Path,
        metavar="FILE",
        help="the figure; its rows go beside it (default: in figures/, named as --out)",
    )
    sweep.set_defaults(
        run=_sweep, after_interrupt="Finished runs are kept; give the same command to go on."
    )


def _add_train(commands: Any) -> None:
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
    _add_training_options(train)
    train.add_argument(
        "--out",
        type=Path,
        default=Path("runs/train"),
        metavar="FOLDER",
        help="(default runs/train)",
    )
    add_checkpoint_options(train)
    train.set_defaults(
        run=_train,
        after_interrupt="The rows so far are in metrics.jsonl; --resume goes on from a checkpoint.",
    )


def _add_training_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, metavar="N", help="optimizer steps (default 160)")
    parser.add_argument(
        "--device", default="cpu", choices=("cpu", "cuda"), help="where it runs (default cpu)"
    )
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="train on this text instead of the plays"
    )
    parser.add_argument("--context", type=int, metavar="N", help="bytes a sequence (default 64)")
    parser.add_argument("--batch", type=int, metavar="N", help="sequences a step (default 16)")
    parser.add_argument("--width", type=int, metavar="N", help="width of the model (default 128)")
    parser.add_argument("--layers", type=int, metavar="N", help="blocks of the model (default 2)")
    parser.add_argument("--heads", type=int, metavar="N", help="attention heads (gpt; default 4)")
    parser.add_argument("--warmup", type=int, metavar="N", help="warm-up steps (default 40)")
    parser.add_argument("--peak-lr", type=float, metavar="LR", help="(default 0.003)")
    parser.add_argument(
        "--model", default="gpt", choices=("gpt", "mlp"), help="which model (default gpt)"
    )
    parser.add_argument(
        "--products",
        choices=("codes", "decoded"),
        help="multiply FP8 codes with the card's bits, or decoded operands in float32 (default:"
        " codes on cuda; decoded on cpu, where codes take the oracle about 20 times as long)",
    )
    parser.add_argument(
        "--microbatches", type=int, metavar="N", help="parts that a batch is cut into (default 1)"
    )
    parser.add_argument(
        "--loss-scale",
        metavar="S|dynamic",
        help="a factor on the loss; dynamic starts at 65536 and adapts (default 1)",
    )
    parser.add_argument(
        "--exp-avg",
        metavar="NAME",
        help="format of AdamW's first moments: float32, bfloat16, e4m3_128_settle, ... (default"
        " float32)",
    )
    parser.add_argument(
        "--exp-avg-sq",
        metavar="NAME",
        help="of its second moments: float32, e4m3_128_keep, ... (default float32)",
    )
    parser.add_argument(
        "--master",
        metavar="NAME",
        help="master weights: float32, bfloat16_remainder, ... (default float32)",
    )
    parser.add_argument("--autocast", action="store_true", help="bfloat16 outside the FP8 layers")


def _add_plot(commands: Any) -> None:
    plot = commands.add_parser(
        "plot", help="draw a sweep's figure again", description="Draw a figure from rows alone."
    )
    plot.add_argument(
        "runs", type=Path, metavar="RUNS", help="a sweep's folder, or a .jsonl of rows"
    )
    plot.add_argument("--figure", type=Path, metavar="FILE", help="(default: beside the rows)")
    plot.set_defaults(run=_plot, after_interrupt="")


def _add_explain(commands: Any) -> None:
    explain = commands.add_parser(
        "explain",
        help="why a value becomes the code it does",
        description="Show a value's neighbours in a format, the midpoint between them, which way"
        " each rounding goes and why, and the code under each overflow policy.",
    )
    explain.add_argument(
        "value",
        metavar="VALUE",
        help="a number, inf, nan, or bits such as 0x42FC7A2A; after -- where it begins with -",
    )
    explain.add_argument("--format", default="E4M3", metavar="NAME", help="(default E4M3)")
    explain.add_argument("--scale", type=float, metavar="S", help="multiplies the value first")
    explain.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "float64", "float16", "bfloat16"),
        help="the type of VALUE (default float32)",
    )
    explain.set_defaults(run=_explain, after_interrupt="")


def _training_config(given: argparse.Namespace, recipe: Recipe, seed: int) -> TrainingConfig:
    from fp8lab.models import MlpConfig, TransformerConfig
    from fp8lab.training_config import TrainingConfig

    sizes = _given(given, ("context", "width", "layers", "heads"))
    if given.model == "mlp" and "heads" in sizes:
        raise UserError("--heads is given with --model mlp, which has none; leave it out")
    names = ("steps", "batch", "device", "products", "microbatches", "autocast")
    states = ("exp_avg", "exp_avg_sq", "master")
    settings = _given(given, (*names, *states, "warmup", "peak_lr"))
    settings.setdefault("products", "codes" if given.device == "cuda" else "decoded")
    settings |= _loss_scale(given.loss_scale)
    model = replace(MlpConfig() if given.model == "mlp" else TransformerConfig(), **sizes)
    return TrainingConfig(recipe, seed=seed, model=model, **settings)


def _loss_scale(given: str | None) -> dict[str, Any]:
    """The settings that `--loss-scale` stands for."""
    if given is None:
        return {}
    if given == "dynamic":
        return {"loss_scale": 65536.0, "dynamic_loss_scale": True}
    try:
        return {"loss_scale": float(given)}
    except ValueError:
        raise UserError(f"--loss-scale is {given!r}; accepted: a number, or dynamic") from None


def _given(given: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(given, name)) is not None}


def _sweep(given: argparse.Namespace) -> int:
    from fp8lab.experiments.plot import check_figure, draw
    from fp8lab.experiments.sweep import DEFAULT_POLICIES, SweepConfig, run_sweep

    figure = given.figure
    if figure is None:
        figure = Path("figures") / f"{given.out.resolve().name}.png"
    check_figure(figure, given.out)
    policies = DEFAULT_POLICIES
    if given.policies is not None:
        policies = tuple(part.strip() for part in given.policies.split(",") if part.strip())
    training = _training_config(given, recipe_named("bf16"), 0)
    config = SweepConfig(policies, **_given(given, ("seeds", "text")), training=training)
    summary = run_sweep(config, given.out, jobs=given.jobs)
    rows = draw(given.out, figure) if summary["policies"] else None
    print(_table(summary))
    if rows is not None:
        print(f"\nfigure: {figure}\nits rows: {rows}\nruns: {given.out}")
    if summary["failed"]:
        names = ", ".join(summary["failed"])
        print(f"fp8lab sweep: failed: {names}; see {given.out / 'failed'}", file=sys.stderr)
        return 1
    return 0


def _table(summary: dict[str, Any]) -> str:
    head: tuple[str, ...] = ("policy", "final loss", "seed spread", "above BF16", "in BF16 spreads")
    head += ("overflow", "underflow", "diverged")
    lines = [head]
    for policy, entry in summary["policies"].items():
        above, spreads = entry["above_bf16"], entry["above_bf16_in_spreads"]
        lines.append(
            (
                policy,
                f"{entry['validation_loss']:.4f}",
                f"{entry['seed_spread']:.4f}",
                "-" if above is None else f"{above:+.4f}",
                "-" if spreads is None else f"{spreads:+.1f}",
                f"{entry['overflow']:.1e}",
                f"{entry['underflow']:.1e}",
                f"{entry['diverged']} of {len(entry['seeds'])}",
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def _train(given: argparse.Namespace) -> int:
    if given.resume is not None:
        return resume_training(given)
    return start_training(given, _training_config(given, _recipe(given.recipe), given.seed))


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


def _plot(given: argparse.Namespace) -> int:
    from fp8lab.experiments.plot import draw

    figure = given.figure
    if figure is None:
        figure = given.runs / "sweep.png" if given.runs.is_dir() else given.runs.with_suffix(".png")
    rows = draw(given.runs, figure)
    print(f"figure: {figure}\nits rows: {rows}")
    return 0


def _explain(given: argparse.Namespace) -> int:
    from fp8lab.explain import explain, target_named

    fmt = target_named(given.format)
    print(explain(given.value, fmt, scale=given.scale, dtype=given.dtype))
    return 0


def _info(given: argparse.Namespace) -> int:
    if given.formats:
        from fp8lab.numerics_tables import choices_table, formats_table, policies_table

        print("\n\n".join((formats_table(), choices_table(), policies_table())))
        return 0
    from fp8lab.records import environment

    device = "cpu"
    try:
        torch = importlib.import_module("torch")
        device = "cuda" if torch.cuda.is_available() else "cpu"
    except ModuleNotFoundError:
        pass
    found = environment(device)
    packages = found.pop("packages")
    for key, value in (*found.items(), *packages.items()):
        print(f"{key:<12} {json.dumps(value) if isinstance(value, dict) else value or 'not there'}")
    print(
        f"\n{'format':<10} {'bits':<6} {'bias':>4} {'largest':>12} {'normal':>12} {'smallest':>12}"
        f" {'NaN':>5} {'Inf':>5}"
    )
    for fmt in FORMATS.values():
        infinity = "-" if fmt.infinity_code is None else f"0x{fmt.infinity_code:02X}"
        bits = f"{int(fmt.signed)}.{fmt.exponent_bits}.{fmt.mantissa_bits}"
        print(
            f"{fmt.name:<10} {bits:<6} {fmt.bias:>4} {fmt.max_finite:>12.6g}"
            f" {fmt.min_normal:>12.6g} {fmt.min_subnormal:>12.6g} {fmt.nan_code:>#5x} {infinity:>5}"
        )
    return 0
