"""Checkpoints on one machine: a folder that is whole or not there, and checked before it is used.

    step-000005/
      manifest.json        format version, step, fingerprint, files with their SHA-256, tensors
      manifest.sha256      the manifest's own SHA-256, as `sha256sum -c` reads it
      state.json           everything that is no tensor, by part
      PART.safetensors     the tensors of one part, bit for bit

`docs/checkpoints.md` has the format. No pickle is written or read. A checkpoint is read whole and
checked against its digests before anything of it is believed; what does not fit is refused in one
line that names the part.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fp8lab.checkpoint_files import (
    digest,
    entry_of,
    new_folder,
    tensors_from_bytes,
    tensors_to_bytes,
)
from fp8lab.checkpoint_manifest import (
    MANIFEST,
    STATE,
    SUM,
    CheckpointError,
    Manifest,
    canonical,
    check_fingerprint,
    migrated,
    parsed,
    read_file,
    read_manifest,
    sum_line,
)
from fp8lab.checkpoint_tree import Taken, Tree, rebuild, take

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Manifest",
    "State",
    "load",
    "read_manifest",
    "save",
    "take_state",
    "verify",
    "write",
]

State = Mapping[str, Tree]  # part -> tree

_PART = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read and found whole.

    Attributes:
        folder: Where it lies.
        manifest: What it says of itself.
        state: Its parts; tensors are on the CPU.
    """

    folder: Path
    manifest: Manifest
    state: dict[str, Tree]


def take_state(state: State) -> dict[str, Taken]:
    """Copy every part to host memory; `write` can do the rest later, in another thread.

    Raises:
        ValueError: A part's name is not made of small letters, digits and "_".
        TypeError: A part holds what cannot be kept without pickle.
    """
    for part in state:
        if not _PART.fullmatch(part):
            raise ValueError(f"part {part!r}; accepted: small letters, digits and _")
    return {part: take(tree) for part, tree in state.items()}


def save(
    folder: Path,
    state: State,
    *,
    step: int,
    fingerprint: Mapping[str, Any] | None = None,
    metric: float | None = None,
) -> Manifest:
    """Write a checkpoint and wait until it is on the disk.

    Args:
        folder: Its name afterwards; must not exist.
        state: Parts by name.
        step, fingerprint, metric: As in `Manifest`.

    Raises:
        CheckpointError: The folder exists, or the system refuses (disk full, no permission). What
            else lies beside the folder is untouched, and nothing half-written stays.
    """
    return write(folder, take_state(state), step=step, fingerprint=fingerprint, metric=metric)


def write(
    folder: Path,
    taken: Mapping[str, Taken],
    *,
    step: int,
    fingerprint: Mapping[str, Any] | None = None,
    metric: float | None = None,
) -> Manifest:
    """What `save` does, with parts that were taken before."""
    files: dict[str, dict[str, Any]] = {}
    name = STATE
    try:
        with ThreadPoolExecutor(1) as pool, new_folder(folder) as write_file:

            def add(file: str, data: bytes) -> None:
                nonlocal name
                name = file
                summed = pool.submit(digest, data)  # while the system writes
                write_file(file, data)
                files[file] = {"bytes": len(data), "sha256": summed.result()}

            parts = {part: json.loads(own.json) for part, own in taken.items()}
            add(STATE, json.dumps(parts, separators=(",", ":")).encode())
            for part, own in taken.items():
                if own.tensors:
                    add(_tensor_file(part), tensors_to_bytes(own.tensors))
            entries = {
                part: {path: entry_of(tensor) for path, tensor in own.tensors.items()}
                for part, own in taken.items()
            }
            manifest = Manifest(step, dict(fingerprint or {}), metric, dict(files), entries)
            text = canonical(asdict(manifest))
            add(MANIFEST, text)
            add(SUM, sum_line(text))
            name = "putting it in its place"
    except OSError as error:
        raise CheckpointError(
            f"cannot write the checkpoint {folder} ({name}): {error.strerror or error};"
            " earlier checkpoints are untouched"
        ) from error
    return manifest


def load(folder: Path, *, fingerprint: Mapping[str, Any] | None = None) -> Checkpoint:
    """Read a checkpoint, whole, and check all of it.

    Args:
        folder: A folder that `save` wrote; it may have been moved or copied.
        fingerprint: Where given, the checkpoint's must be equal.

    Raises:
        CheckpointError: A file is missing or changed, the version is another, or the fingerprint.
    """
    manifest = read_manifest(folder)
    if fingerprint is not None:
        check_fingerprint(folder, manifest.fingerprint, fingerprint)
    texts = parsed(folder, STATE, _checked(folder, manifest, STATE))
    _check_parts(folder, manifest, texts)
    state: dict[str, Tree] = {}
    for part, plain in texts.items():
        tensors: dict[str, Tensor] = {}
        file = STATE
        try:
            if entries := manifest.tensors[part]:
                file = _tensor_file(part)
                tensors = tensors_from_bytes(_checked(folder, manifest, file), entries)
                file = STATE
            state[part] = rebuild(json.dumps(plain), tensors)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{folder / file} cannot be used: {error}") from None
    return Checkpoint(folder, manifest, migrated(state, manifest.version))


def verify(folder: Path) -> Manifest:
    """Read all of a checkpoint as `load` does, and return its manifest.

    Raises:
        CheckpointError: As `load`.
    """
    return load(folder).manifest


def _check_parts(folder: Path, manifest: Manifest, texts: Mapping[str, Any]) -> None:
    """Refuse a manifest that tells of other parts or files than there are in the state."""
    entries = manifest.tensors
    files = {STATE, *(_tensor_file(part) for part, own in entries.items() if own)}
    for there, said, what in (
        (texts.keys(), entries.keys(), "part"),
        (files, manifest.files.keys(), "file"),
    ):
        if odd := sorted(there ^ said):
            raise CheckpointError(
                f"{folder / MANIFEST} is damaged: it and {STATE} differ in the {what} {odd[0]}"
            )


def _tensor_file(part: str) -> str:
    return f"{part}.safetensors"


def _checked(folder: Path, manifest: Manifest, file: str) -> bytes:
    """A file's content; it is the bytes whose digest the manifest has."""
    said = manifest.files.get(file)
    if said is None:
        raise CheckpointError(f"{folder / MANIFEST} does not list {file}: it is damaged")
    data = read_file(folder, file)
    if len(data) != said["bytes"] or digest(data) != said["sha256"]:
        raise CheckpointError(
            f"{folder / file} is damaged: it has {len(data)} bytes, the manifest says"
            f" {said['bytes']}, and the SHA-256 differs"
        )
    return data
