"""Files that are whole or not there: a folder is written beside its place, synced, then renamed.

Also how tensors lie in a file: safetensors, in their own dtypes where every version of safetensors
takes them, otherwise as bytes; the manifest keeps the true dtype and shape.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from fp8lab.checkpoint_tree import bytes_of, dtype_name

# safetensors 0.8 writes E8M0 and cannot read it again; its older versions lack the FNUZ formats.
_STORED_AS_THEY_ARE = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
        *(torch.float8_e4m3fn, torch.float8_e5m2),
    }
)

Entry = dict[str, Any]  # of a manifest: dtype and shape of one tensor


def tensors_to_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """A safetensors file of host tensors; the same tensors give the same bytes."""
    stored = {}
    for name, tensor in tensors.items():
        as_is = tensor.dtype in _STORED_AS_THEY_ARE
        stored[name] = tensor if as_is else bytes_of(tensor)
    return safetensors.torch.save(stored)


def tensors_from_bytes(data: bytes, entries: Mapping[str, Entry]) -> dict[str, Tensor]:
    """The tensors of a safetensors file, in the dtypes and shapes that the manifest's entries say.

    Raises:
        ValueError: The file does not hold these tensors, or this torch lacks a dtype.
    """
    try:
        stored = safetensors.torch.load(data)
    except (safetensors.SafetensorError, KeyError) as error:
        raise ValueError(f"safetensors cannot read it ({error})") from None
    if stored.keys() != entries.keys():
        names = sorted(stored.keys() ^ entries.keys())
        raise ValueError(f"it and the manifest differ in {names[0]}")
    return {name: _as_entry(name, stored[name], entry) for name, entry in entries.items()}


def entry_of(tensor: Tensor) -> Entry:
    """What the manifest says of a tensor."""
    return {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape)}


def _as_entry(name: str, stored: Tensor, entry: Entry) -> Tensor:
    dtype = getattr(torch, entry["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(
            f"{name} has dtype {entry['dtype']}, which torch {torch.__version__} lacks"
        )
    if dtype not in _STORED_AS_THEY_ARE:
        typed = stored.view(dtype) if stored.numel() else torch.empty(0, dtype=dtype)
        stored = typed.reshape(entry["shape"])
    if entry_of(stored) != entry:
        raise ValueError(f"{name} is {entry_of(stored)}, the manifest says {entry}")
    return stored


def digest(data: bytes) -> str:
    """SHA-256 in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


@contextmanager
def new_folder(final: Path) -> Iterator[Callable[[str, bytes], None]]:
    """Make a folder that appears under its name only when the block has ended without an error.

    The block gets a function that writes one file. Files and folders are synced before and after
    the rename, so that after a power cut, too, the folder is whole or not there. On an error what
    was written is removed; what a killed process leaves is named `.NAME.partial-...` beside it.

    Raises:
        OSError: What the system says; `FileExistsError` where the folder is there already.
    """
    if os.path.lexists(final):
        raise FileExistsError(17, "it exists already", str(final))
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = final.with_name(f".{final.name}.partial-{os.getpid()}-{secrets.token_hex(4)}")

    def write(name: str, data: bytes) -> None:
        with (temporary / name).open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    try:
        temporary.mkdir()
        yield write
        _sync_folder(temporary)
        temporary.rename(final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _sync_folder(final.parent)


def remove_folder(folder: Path) -> None:
    """Remove a folder so that its name never stands for half of it; of a link, the link alone."""
    if folder.is_symlink():
        folder.unlink()
        return
    condemned = folder.with_name(f".{folder.name}.partial-removed-{secrets.token_hex(4)}")
    folder.rename(condemned)
    shutil.rmtree(condemned)


def remove_leftovers(root: Path) -> None:
    """Remove what killed processes left; nobody else may write in `root` meanwhile."""
    for leftover in root.glob(".*.partial-*"):
        if leftover.is_symlink() or not leftover.is_dir():
            leftover.unlink()
        else:
            shutil.rmtree(leftover)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
