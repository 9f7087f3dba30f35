"""A failing case as a small file: readable, without pickle, replayed by `fp8lab verify --case`."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from fp8lab.errors import UserError

Array = npt.NDArray[Any]
Arrays = dict[str, Array]

VERSION = 1
FOLDER = ".fp8lab/cases"  # in the working directory; FP8LAB_CASES names another, or none when empty
_DTYPES: dict[str, np.dtype[Any]] = {
    np.dtype(kind).name: np.dtype(kind)
    for kind in (
        *(np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32),
        *(np.uint64, np.float16, np.float32, np.float64, ml_dtypes.bfloat16),
        *(ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fnuz),
        *(ml_dtypes.float8_e5m2fnuz, ml_dtypes.float8_e8m0fnu),
    )
}


@dataclass(frozen=True, eq=False)
class Case:
    """One input of a contract, and what a kernel made of it.

    Attributes:
        contract: The contract's name.
        settings: What chooses its semantics, as JSON values.
        inputs: The inputs by name. Strides count: they are what the kernel was given.
        actual: What the kernel gave, by name; empty where it gave nothing.
        problem: What was wrong, in one line.
        kernel: Whose output it is, as "FILE:FUNCTION" where that is known.
        device: Where the kernel ran: "cpu", or the GPU's name.
    """

    contract: str
    settings: Mapping[str, Any]
    inputs: Mapping[str, Array]
    actual: Mapping[str, Array] = field(default_factory=dict)
    problem: str = ""
    kernel: str = ""
    device: str = ""

    def to_json(self) -> str:
        """The file's text."""
        return json.dumps(
            {
                "fp8lab_case": VERSION,
                "contract": self.contract,
                "settings": dict(self.settings),
                "problem": self.problem,
                "kernel": self.kernel,
                "device": self.device,
                "inputs": {name: _encoded(array) for name, array in self.inputs.items()},
                "actual": {name: _encoded(array) for name, array in self.actual.items()},
            },
            indent=1,
        )

    @property
    def file_name(self) -> str:
        """A name that is the same for the same case."""
        digest = hashlib.sha256(self.to_json().encode()).hexdigest()[:10]
        return f"{self.contract}-{digest}.json"


def save_case(case: Case, folder: Path | None = None) -> Path | None:
    """Write a case into a folder (made where it is missing).

    Args:
        case: The case.
        folder: Where it goes. None: what FP8LAB_CASES names, else `.fp8lab/cases` in the working
            directory; an empty FP8LAB_CASES saves nothing.

    Returns:
        The file, or None where nothing is saved.

    Raises:
        OSError: The folder cannot be written.
    """
    if folder is None:
        named = os.environ.get("FP8LAB_CASES", FOLDER)
        if not named:
            return None
        folder = Path(named)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / case.file_name
    # Whoever reads it at the same time sees it whole or not at all.
    handle, scratch = tempfile.mkstemp(dir=folder, suffix=".part")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(case.to_json() + "\n")
    Path(scratch).replace(path)
    return path


def load_case(path: Path) -> Case:
    """Read a case.

    Raises:
        UserError: The file is missing, or is no case of this version.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read the case {path}: {reason}") from None
    try:
        found = json.loads(text)
        if found["fp8lab_case"] != VERSION:
            raise UserError(
                f"{path} is a case of version {found['fp8lab_case']}; accepted: {VERSION}"
            )
        return Case(
            contract=str(found["contract"]),
            settings=dict(found["settings"]),
            inputs={str(name): _decoded(array) for name, array in found["inputs"].items()},
            actual={str(name): _decoded(array) for name, array in found["actual"].items()},
            problem=str(found["problem"]),
            kernel=str(found["kernel"]),
            device=str(found["device"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise UserError(
            f"{path} is not a saved case ({type(error).__name__}: {error}); accepted: a file that"
            " fp8lab verify or a check of fp8lab.testing has saved"
        ) from None


def spaced(array: Array) -> Array:
    """The same values with a gap after each element of the last axis: not contiguous."""
    wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
    wide[..., ::2] = array
    return wide[..., ::2]


def laid_out_as(array: Array, pattern: Array) -> Array:
    """The values of one array in the kind of layout that another has: rows, columns or spaced."""
    if pattern.ndim == 0 or pattern.flags.c_contiguous:
        return np.ascontiguousarray(array).reshape(array.shape)
    if pattern.flags.f_contiguous:
        return np.asfortranarray(array)
    return spaced(array)


def layout_of(array: Array) -> str:
    """What the strides are like: "rows" (C order), "columns" (Fortran order) or "spaced"."""
    if array.flags.c_contiguous:
        return "rows"
    return "columns" if array.flags.f_contiguous else "spaced"


_LAYOUTS: dict[str, Callable[[Array], Array]] = {
    "rows": lambda array: array,  # as it is read
    "columns": np.asfortranarray,
    "spaced": spaced,
}


def _encoded(array: Array) -> dict[str, Any]:
    dense = np.ascontiguousarray(array).reshape(array.shape)
    words = dense.reshape(-1).view(f"u{array.dtype.itemsize}")
    digits = 2 * array.dtype.itemsize
    return {
        "dtype": array.dtype.name,
        "shape": list(array.shape),
        "layout": layout_of(array),
        "bits": " ".join(f"{word:0{digits}X}" for word in words.tolist()),
    }


def _decoded(found: Mapping[str, Any]) -> Array:
    dtype = _DTYPES[found["dtype"]]
    words = [int(word, 16) for word in found["bits"].split()]
    array = np.array(words, dtype=f"u{dtype.itemsize}").view(dtype).reshape(found["shape"])
    return _LAYOUTS[found["layout"]](array)
