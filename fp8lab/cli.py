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
from io import TextIOWrapper
from typing import Any

from fp8lab import __version__
from fp8lab.cli_checkpoint import add_checkpoint
from fp8lab.cli_kit import add_new_kernel, add_verify
from fp8lab.cli_parser import Parser
from fp8lab.cli_sweep import add_plot, add_sweep
from fp8lab.cli_train import add_train
from fp8lab.cli_watch import add_watch
from fp8lab.errors import UserError
from fp8lab.formats import FORMATS

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
    add_sweep(commands)
    add_train(commands)
    add_watch(commands)
    add_plot(commands)
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
