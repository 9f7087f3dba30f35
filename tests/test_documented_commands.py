"""README and docs: each command that they name is accepted, and each recipe file is a recipe."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from fp8lab.cli import build_parser
from fp8lab.fallback_run import fallback_from_text
from fp8lab.recipes import recipe_from_toml, recipe_named

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# In code between backticks, or on a line of a block; there a note may follow after two spaces.
COMMAND = re.compile(r"(?:`|^(?: {4}|\$ )?)(fp8lab [a-z][^`\n]*)", re.MULTILINE)
EXPERIMENT = re.compile(r"python -m fp8lab\.experiments\.(\w+)((?:\\\n|[^`|\\\n])*)")
TOML = re.compile(r"^```toml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBERS = {"N", "S"}  # what stands for a number on a line that shows all options
NO_BRACKETS = str.maketrans("[]", "  ")


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def arguments(text: str) -> list[str]:
    """Those of a command, whose optional ones may stand in brackets."""
    words = shlex.split(text.translate(NO_BRACKETS))
    return ["1" if word in NUMBERS else word for word in words]


def commands() -> Iterator[str]:
    for page in PAGES:
        for match in COMMAND.finditer(text_of(page)):
            yield match.group(1).partition("  ")[0].strip()


def experiments() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for match in EXPERIMENT.finditer(text_of(page)):
            yield match.group(1), " ".join(match.group(2).replace("\\\n", " ").split())


def test_the_commands_are_found() -> None:
    found = set(commands())
    assert "fp8lab train --checkpoint-every 40 --out runs/a" in found
    assert any(command.startswith("fp8lab watch RUN [--once]") for command in found)
    assert "fp8lab checkpoint diff A B" in found
    assert any(command.startswith("fp8lab train --fallback overflow=") for command in found)
    assert {name for name, _ in experiments()} >= {"layer_tolerance", "resume_incident"}


@pytest.mark.parametrize("command", sorted(set(commands())))
def test_a_command_is_accepted(command: str) -> None:
    words = arguments(command)[1:]
    if len(words) == 1:  # a command's name alone
        with pytest.raises(SystemExit, match="0"):
            build_parser().parse_args([*words, "--help"])
        return
    given = build_parser().parse_args(words)
    if given.command == "train" and given.fallback not in (None, "SETTINGS"):
        fallback_from_text(given.fallback)
    if given.command == "train" and not given.recipe.endswith((".toml", ".json", "FILE")):
        recipe_named(given.recipe)
    if given.command == "sweep" and given.policies is not None:
        for policy in given.policies.split(","):
            recipe_named(policy)


class _Accepted(Exception):
    """The options were parsed; the experiment itself is not wanted."""


@pytest.mark.parametrize(("name", "options"), sorted(set(experiments())))
def test_options_of_an_experiment_are_accepted(
    name: str, options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parse = argparse.ArgumentParser.parse_args

    def parsed(parser: argparse.ArgumentParser, *given: Any) -> NoReturn:
        parse(parser, *given)
        raise _Accepted

    module = importlib.import_module(f"fp8lab.experiments.{name}")
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    monkeypatch.setattr(sys, "argv", [name, *arguments(options)])
    with pytest.raises(_Accepted):
        module.main()


def test_a_recipe_file_is_one() -> None:
    found = [(page, text) for page in PAGES for text in TOML.findall(text_of(page))]
    assert len(found) >= 2
    for page, text in found:
        assert recipe_from_toml(text, source=page.name).name == "mine"
