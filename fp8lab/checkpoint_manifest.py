"""A checkpoint's manifest: what it says of its files and of the run, and how it is checked."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fp8lab import __version__
from fp8lab.checkpoint_files import Entry, digest
from fp8lab.checkpoint_tree import Tree
from fp8lab.errors import UserError
from fp8lab.saved_values import is_count

FORMAT = "fp8lab checkpoint"
VERSION = 2
_DIMENSIONS = 200  # of a tensor, more than anybody uses
MANIFEST, SUM, STATE = "manifest.json", "manifest.sha256", "state.json"


def _from_version_1(state: dict[str, Tree]) -> dict[str, Tree]:
    """Version 1 had no table of a parameter of which the optimizer kept nothing.

    A part of another kind that has this name stays as it is.
    """
    match state.get("optimizer"):
        case {"state": dict(kept), "param_groups": list(groups), **rest}:
            lists = [group.get("params") for group in groups if isinstance(group, dict)]
            names = [name for params in lists if isinstance(params, list) for name in params]
            kept = {n: kept.get(n, {}) for n in names if isinstance(n, str)} | kept
            return {**state, "optimizer": {"state": kept, "param_groups": groups, **rest}}
    return state


# From a version to the next: takes the parts as that version kept them, returns them as the next
# version does.
MIGRATIONS: dict[int, Callable[[dict[str, Tree]], dict[str, Tree]]] = {1: _from_version_1}


class CheckpointError(UserError):
    """A checkpoint that cannot be written, or that is refused; one line that names the part."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself.

    Attributes:
        step: Optimizer steps done.
        fingerprint: What a run must have in common with this one to go on from here: plain values
            by name (recipe, model, optimizer, data, ...).
        metric: What "best" is measured by, lower is better, finite; None where not measured.
        files: By name, `bytes` and `sha256`.
        tensors: By part and name, `dtype` and `shape`.
        written_by: Versions of fp8lab, and of the format.
    """

    step: int
    fingerprint: dict[str, Any]
    metric: float | None
    files: dict[str, dict[str, Any]]
    tensors: dict[str, dict[str, Entry]]
    version: int = VERSION
    fp8lab: str = __version__
    format: str = FORMAT

    @property
    def bytes(self) -> int:
        """Bytes of all files but the manifest and its sum."""
        return sum(int(file["bytes"]) for file in self.files.values())


def read_manifest(folder: Path) -> Manifest:
    """A checkpoint's manifest, checked against its sum; the other files are not looked at.

    Raises:
        CheckpointError: There is no checkpoint, the manifest is damaged, or another version's.
    """
    if not folder.is_dir():
        raise CheckpointError(f"no checkpoint at {folder}: there is no such folder")
    text = read_file(folder, MANIFEST)
    if read_file(folder, SUM) != sum_line(text):
        raise CheckpointError(
            f"{folder / MANIFEST} is damaged: it and {SUM} do not belong together"
        )
    table = parsed(folder, MANIFEST, text)
    if table.get("format") != FORMAT:
        raise CheckpointError(f"{folder} is no checkpoint of fp8lab")
    version = table.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version > VERSION:
        raise CheckpointError(
            f"{folder} has format version {version}; this fp8lab reads up to {VERSION}: install"
            f" fp8lab {table.get('fp8lab')} or newer"
        )
    if any(older not in MIGRATIONS for older in range(version, VERSION)):
        raise CheckpointError(
            f"{folder} has format version {version}, which this fp8lab reads no more:"
            f" install fp8lab {table.get('fp8lab')}"
        )
    _check_fields(folder, table)
    return Manifest(**table)


def migrated(state: dict[str, Tree], version: int) -> dict[str, Tree]:
    """The parts of an older version's checkpoint as this version keeps them."""
    for older in range(version, VERSION):
        state = MIGRATIONS[older](state)
    return state


def _check_fields(folder: Path, table: Mapping[str, Any]) -> None:
    """Refuse a manifest whose sum is right and that still is none: another program's, say."""
    names = [field.name for field in fields(Manifest)]
    odd = [name for name in names if name not in table] + [n for n in table if n not in names]
    for name in odd:
        problem = "unknown" if name in table else "missing"
        raise CheckpointError(f"{folder / MANIFEST} is damaged: {name} is {problem}")
    for name, (holds, accepted) in _FIELDS.items():
        if not holds(table[name]):
            raise CheckpointError(
                f"{folder / MANIFEST} is damaged: {name} is {_shown(table[name])}; accepted:"
                f" {accepted}"
            )


def _is_metric(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    whole = isinstance(value, int) and not isinstance(value, bool)
    return value is None or (whole and is_count(abs(value)))


def _is_file(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"bytes", "sha256"}
        and is_count(value["bytes"])
        and isinstance(value["sha256"], str)
    )


def _is_entry(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"dtype", "shape"}
        and isinstance(value["dtype"], str)
        and isinstance(value["shape"], list)
        and len(value["shape"]) <= _DIMENSIONS
        and all(map(is_count, value["shape"]))
    )


def _are(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Whether a value is a table of such values."""
    return lambda value: isinstance(value, dict) and all(map(holds, value.values()))


_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "step": (is_count, "a whole number, 0 and up"),
    "fingerprint": (lambda value: isinstance(value, dict), "a table"),
    "metric": (_is_metric, "a finite number, or null"),
    "files": (_are(_is_file), "of each file bytes and sha256"),
    "tensors": (_are(_are(_is_entry)), "of each part's tensors dtype and shape"),
    "fp8lab": (lambda value: isinstance(value, str), "a text"),
}


def check_fingerprint(folder: Path, saved: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of another run: of another recipe, model, corpus, ...

    Raises:
        CheckpointError: With the first difference.
    """
    here = json.loads(canonical(dict(given)))  # so that a tuple is the list that it became
    found = first_difference(dict(saved), here)
    if found is not None:
        place, old, new = found
        raise CheckpointError(
            f"{folder} was saved with {place} {_shown(old)}, but this run has {_shown(new)}; go on"
            " with what was saved, or start a new run"
        )


def first_difference(one: Any, other: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """Where two plain values differ first: (path, there, here); "(nothing)" where one lacks it."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in [*one, *(key for key in other if key not in one)]:
            pair = one.get(key, "(nothing)"), other.get(key, "(nothing)")
            found = first_difference(*pair, f"{path}.{key}" if path else key)
            if found is not None:
                return found
        return None
    return None if one == other and type(one) is type(other) else (path, one, other)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def sum_line(manifest: bytes) -> bytes:
    """What manifest.sha256 holds, for the manifest's bytes."""
    return f"{digest(manifest)}  {MANIFEST}\n".encode()


def canonical(value: Any) -> bytes:
    """A manifest's bytes."""
    return json.dumps(value, allow_nan=False, indent=1).encode() + b"\n"


def read_file(folder: Path, file: str) -> bytes:
    """A file of a checkpoint; a CheckpointError where it is missing or cannot be read."""
    try:
        return (folder / file).read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{folder} lacks {file}: it is no whole checkpoint") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {folder / file}: {error.strerror}") from None


def parsed(folder: Path, file: str, text: bytes) -> dict[str, Any]:
    """The JSON object that a file holds; a CheckpointError where it holds anything else."""
    try:
        table = json.loads(text)
    except (ValueError, RecursionError):
        raise CheckpointError(f"{folder / file} is damaged: it is not JSON") from None
    if not isinstance(table, dict):
        raise CheckpointError(f"{folder / file} is damaged: it holds no JSON object")
    return table
