"""`fp8lab checkpoint inspect | verify | diff`: what is inside, is it whole, what differs."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fp8lab.checkpoint_manifest import Manifest

_PATH_HELP = "a checkpoint's folder (step-...), or a run's: its newest checkpoint"


def add_checkpoint(commands: Any) -> None:
    """Add the command to the parser's subcommands."""
    checkpoint = commands.add_parser(
        "checkpoint",
        help="look into checkpoints, check and compare them",
        description="Show what a checkpoint holds, read and check all of it, or compare two.",
    )
    actions = checkpoint.add_subparsers(dest="action", required=True, metavar="ACTION")
    inspect = actions.add_parser("inspect", help="what is inside, from the manifest")
    inspect.add_argument("path", type=Path, metavar="PATH", help=_PATH_HELP)
    inspect.add_argument("--tensors", action="store_true", help="a line for each tensor")
    inspect.set_defaults(run=_inspect, after_interrupt="")
    verify = actions.add_parser("verify", help="read it whole and check every file")
    verify.add_argument("path", type=Path, metavar="PATH", help=_PATH_HELP)
    verify.set_defaults(run=_verify, after_interrupt="")
    diff = actions.add_parser(
        "diff", help="compare two states bit by bit; exit code 1 when they differ"
    )
    diff.add_argument("first", type=Path, metavar="A", help=_PATH_HELP)
    diff.add_argument("second", type=Path, metavar="B", help="the same")
    diff.set_defaults(run=_diff, after_interrupt="")


def _inspect(given: argparse.Namespace) -> int:
    from fp8lab.checkpoint import read_manifest
    from fp8lab.checkpoint_store import find_checkpoint

    folder = find_checkpoint(given.path)
    manifest = read_manifest(folder)
    print(f"{folder}: step {manifest.step}, format {manifest.version}, fp8lab {manifest.fp8lab}")
    if manifest.metric is not None:
        print(f"metric {manifest.metric}")
    for name, value in manifest.fingerprint.items():
        text = json.dumps(value)
        print(f"{name}: {text if len(text) <= 200 else text[:197] + '...'}")
    print()
    print(_table(_tensor_lines(manifest) if given.tensors else _part_lines(manifest)))
    print(
        f"\n{manifest.bytes} bytes in {len(manifest.files)} files; `verify` reads and checks them"
    )
    return 0


def _part_lines(manifest: Manifest) -> list[Sequence[str]]:
    lines: list[Sequence[str]] = [("part", "tensors", "elements", "dtypes")]
    for part, entries in manifest.tensors.items():
        dtypes = Counter(entry["dtype"] for entry in entries.values())
        shown = ", ".join(f"{count} {dtype}" for dtype, count in dtypes.most_common())
        elements = sum(_elements(entry) for entry in entries.values())
        lines.append((part, str(len(entries)), str(elements), shown or "values alone"))
    return lines


def _tensor_lines(manifest: Manifest) -> list[Sequence[str]]:
    from fp8lab.state_names import kind_of

    lines: list[Sequence[str]] = [("tensor", "what", "shape", "dtype")]
    for part, entries in manifest.tensors.items():
        for name, entry in entries.items():
            path = f"{part}/{name}"
            shape = " x ".join(map(str, entry["shape"])) or "one"
            lines.append((path, kind_of(path), shape, entry["dtype"]))
    return lines


def _elements(entry: Mapping[str, Any]) -> int:
    count = 1
    for size in entry["shape"]:
        count *= size
    return count


def _verify(given: argparse.Namespace) -> int:
    from fp8lab.checkpoint import verify
    from fp8lab.checkpoint_store import find_checkpoint

    folder = find_checkpoint(given.path)
    manifest = verify(folder)
    tensors = sum(len(entries) for entries in manifest.tensors.values())
    print(
        f"{folder} is whole: step {manifest.step}, {tensors} tensors, {manifest.bytes} bytes in"
        f" {len(manifest.files)} files, each with the SHA-256 that the manifest has"
    )
    return 0


def _diff(given: argparse.Namespace) -> int:
    from fp8lab.checkpoint import load
    from fp8lab.checkpoint_diff import differences
    from fp8lab.checkpoint_store import find_checkpoint
    from fp8lab.checkpoint_tree import leaves
    from fp8lab.state_names import kind_of

    first, second = (load(find_checkpoint(path)) for path in (given.first, given.second))
    lines: list[Sequence[str]] = [("path", "what", "differ", "first")]
    for found in differences(first.state, second.state):
        share = "" if found.elements is None else f"{found.elements[0]} of {found.elements[1]}"
        lines.append((found.path, kind_of(found.path), share, found.first))
    both = f"{first.folder} and {second.folder}"
    if len(lines) == 1:
        count = sum(1 for _ in leaves(first.state))
        print(f"{both}: the same bits, all {count} tensors and values")
        return 0
    print(_table(lines))
    print(f"\n{both}: {len(lines) - 1} tensors and values differ")
    return 1


def _table(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
