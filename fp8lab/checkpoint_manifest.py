"""A checkpoint's manifest: what it says of its files and of the run, and how it is checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8lab import __version__
from fp8lab.checkpoint_files import Entry, digest
from fp8lab.checkpoint_tree import Tree
from fp8lab.errors import UserError

FORMAT = "fp8lab checkpoint"
VERSION = 1
MANIFEST, SUM, STATE = "manifest.json", "manifest.sha256", "state.json"

# From a version to the next: takes the parts as that version kept them, returns them as the next
# version does. There is no older version yet.
MIGRATIONS: dict[int, Callable[[dict[str, Tree]], dict[str, Tree]]] = {}


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
    if not isinstance(version, int) or version > VERSION:
        raise CheckpointError(
            f"{folder} has format version {version}; this fp8lab reads up to {VERSION}: install"
            f" fp8lab {table.get('fp8lab')} or newer"
        )
    if any(older not in MIGRATIONS for older in range(version, VERSION)):
        raise CheckpointError(
            f"{folder} has format version {version}, which this fp8lab reads no more:"
            f" install fp8lab {table.get('fp8lab')}"
        )
    return Manifest(**table)


def migrated(state: dict[str, Tree], version: int) -> dict[str, Tree]:
    """The parts of an older version's checkpoint as this version keeps them."""
    for older in range(version, VERSION):
        state = MIGRATIONS[older](state)
    return state


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
