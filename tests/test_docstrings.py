"""The examples in the oracle's docstrings: they are there, and they give what they say."""

from __future__ import annotations

import doctest
import importlib
import inspect
from pathlib import Path
from types import FunctionType

import pytest

import fp8lab.emulation

MODULES = ["fp8lab.formats"] + [
    f"fp8lab.emulation.{path.stem}"
    for folder in fp8lab.emulation.__path__
    for path in sorted(Path(folder).glob("[!_]*.py"))
]
# What a user is sent to; the other modules are their parts.
OFFERED = ("adamw", "casting", "random", "scalar", "scaling")


@pytest.mark.parametrize("name", MODULES)
def test_examples_hold(name: str) -> None:
    done = doctest.testmod(importlib.import_module(name))
    assert done.failed == 0, f"{done.failed} of {done.attempted} examples of {name} fail"


@pytest.mark.parametrize("part", OFFERED)
def test_every_public_function_has_an_example(part: str) -> None:
    module = importlib.import_module(f"fp8lab.emulation.{part}")
    offered = getattr(module, "__all__", None) or [
        name
        for name, found in vars(module).items()
        if not name.startswith("_") and getattr(found, "__module__", "") == module.__name__
    ]
    functions = {
        name: found
        for name in offered
        # A check has nothing to show but its error, which tests look at.
        if isinstance(found := getattr(module, name), FunctionType) and not name.startswith("check")
    }
    assert functions
    lacking = [
        name for name, found in functions.items() if ">>>" not in (inspect.getdoc(found) or "")
    ]
    assert not lacking, f"{part}: no example in {', '.join(lacking)}"
