"""Importing a user's file, and finding the kernels in it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from fp8lab.testing.contracts.base import Kernel
from fp8lab.testing.marks import marks_of
from fp8lab.testing.running import described

# What a kernel, its test and the kit import, beside the standard library.
_NEEDED = frozenset(
    {"cupy", "fp8lab", "hypothesis", "ml_dtypes", "numpy", "pytest", "torch", "tqdm", "triton"}
)


class CannotLoad(Exception):
    """A file that is no module, or that has no such function; the message says which."""


def hides_a_module(name: str) -> bool:
    """Whether a user's file of that name would be imported where another module is meant."""
    return name in sys.stdlib_module_names or name in _NEEDED


def load_file(path: Path) -> ModuleType:
    """Import a file; what lies beside it can be imported by it.

    Raises:
        CannotLoad: There is no such file, or importing it raises.
    """
    if not path.is_file():
        raise CannotLoad(f"there is no file {path}")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise CannotLoad(f"{path} is no Python module; accepted: a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # Triton looks for the source of a kernel through it
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise CannotLoad(f"importing {path} raised {described(error)}") from error
    return module


def marked_kernels(module: ModuleType) -> dict[str, Kernel]:
    """The functions of a module that have marks, by name, in the order in which they stand.

    One that has several names counts under its first.
    """
    kernels: dict[str, Kernel] = {}
    for name, found in vars(module).items():
        marked = callable(found) and marks_of(found) and not isinstance(found, type)
        if marked and not any(found is kernel for kernel in kernels.values()):
            kernels[name] = found
    return kernels


def function_named(module: ModuleType, name: str) -> Kernel:
    """A function of a module, marked or not.

    Raises:
        CannotLoad: There is none of that name.
    """
    found: Any = getattr(module, name, None)
    if not callable(found):
        marked = ", ".join(marked_kernels(module)) or "none"
        raise CannotLoad(f"{module.__name__} has no function {name}; marked kernels: {marked}")
    return found  # type: ignore[no-any-return]
