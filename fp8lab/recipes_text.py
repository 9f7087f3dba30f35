"""Recipes as plain data, JSON and TOML, there and back."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from fp8lab.formats import E4M3
from fp8lab.recipes_model import OPERANDS, PRODUCTS, Operand, Product, Recipe
from fp8lab.recipes_policies import SCALINGS, RecipeError, Scaling


def recipe_dict(recipe: Recipe) -> dict[str, Any]:
    """Plain data: what `recipe_from_dict` takes."""
    data: dict[str, Any] = {"name": recipe.name}
    data |= {role: operand_dict(recipe.operand(role)) for role in OPERANDS}
    return data | {name: asdict(recipe.product(name)) for name in PRODUCTS}


def recipe_json(recipe: Recipe) -> str:
    """The recipe as a JSON text."""
    return json.dumps(recipe_dict(recipe), indent=2)


def recipe_toml(recipe: Recipe) -> str:
    """The recipe as a TOML text."""
    data = recipe_dict(recipe)
    lines = [f"name = {_toml_text(recipe.name)}"]
    for part in (*OPERANDS, *PRODUCTS):
        table = data[part]
        plain = {key: value for key, value in table.items() if not isinstance(value, dict)}
        lines += ["", f"[{part}]", *_toml_lines(plain)]
        for key in table.keys() - plain.keys():
            lines += ["", f"[{part}.{key}]", *_toml_lines(table[key])]
    return "\n".join(lines) + "\n"


def _toml_lines(table: Mapping[str, Any]) -> list[str]:
    # JSON's strings, numbers and booleans are TOML's as well.
    return [f"{key} = {json.dumps(value)}" for key, value in table.items()]


def _toml_text(text: str) -> str:
    """A TOML basic string: JSON's, but for characters beyond 16 bits and for DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def recipe_from_dict(data: Mapping[str, Any], *, source: str = "recipe") -> Recipe:
    """Build a recipe from plain data, refusing unknown keys and impossible values.

    The products may be left out: they are then FP8, and promoted.

    Raises:
        RecipeError: With the place, what was given and what is accepted.
    """
    _check_keys(data, ("name", *OPERANDS, *PRODUCTS), source)
    missing = [key for key in ("name", *OPERANDS) if key not in data]
    if missing:
        raise RecipeError(f"{source}: missing {', '.join(missing)}")
    if not isinstance(data["name"], str) or not data["name"]:
        raise RecipeError(f"{source}: name is {data['name']!r}; accepted: a text that is not empty")
    operands = {role: operand_from(data[role], f"{source}: {role}") for role in OPERANDS}
    products = {
        name: product_from(data[name], f"{source}: {name}") for name in PRODUCTS if name in data
    }
    parts: dict[str, Any] = {**operands, **products}
    return Recipe(data["name"], **parts)


def recipe_from_json(text: str, *, source: str = "recipe") -> Recipe:
    """Read a recipe from JSON."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"{source} is not JSON: {error}") from None
    return recipe_from_dict(_as_table(data, source), source=source)


def recipe_from_toml(text: str, *, source: str = "recipe") -> Recipe:
    """Read a recipe from TOML."""
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"{source} is not TOML: {error}") from None
    return recipe_from_dict(data, source=source)


def operand_dict(operand: Operand) -> dict[str, Any]:
    """An operand as plain data; without `transposed` where that is the same policy."""
    data: dict[str, Any] = {"format": operand.format, "scaling": _scaling_dict(operand.scaling)}
    if operand.transposed is not None:
        data["transposed"] = _scaling_dict(operand.transposed)
    return data


def operand_from(data: Any, source: str) -> Operand:
    """An operand from plain data."""
    table = _as_table(data, source)
    _check_keys(table, ("format", "scaling", "transposed"), source)
    scaling = _scaling_from(table.get("scaling"), source, "scaling")
    transposed = None
    if "transposed" in table:
        transposed = _scaling_from(table["transposed"], source, "transposed")
    try:
        return Operand(table.get("format", E4M3.name), scaling, transposed)
    except RecipeError as error:
        raise RecipeError(f"{source}: {error}") from None


def product_from(data: Any, source: str) -> Product:
    """A product from plain data."""
    table = _as_table(data, source)
    _check_keys(table, tuple(f.name for f in fields(Product)), source)
    try:
        return Product(**table)
    except RecipeError as error:
        raise RecipeError(f"{source}: {error}") from None


def _scaling_dict(scaling: Scaling) -> dict[str, Any]:
    return {"kind": scaling.kind, **asdict(scaling)}


def _scaling_from(data: Any, source: str, key: str) -> Scaling:
    settings = dict(_as_table(data, f"{source}: {key}"))
    kind = settings.pop("kind", None)
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise RecipeError(f"{source}: {key} kind is {kind!r}; accepted: {', '.join(SCALINGS)}")
    cls = SCALINGS[kind]
    _check_keys(settings, tuple(f.name for f in fields(cls)), f"{source}: {key} {kind!r}")
    try:
        return cls(**settings)
    except RecipeError as error:
        raise RecipeError(f"{source}: {error}") from None


def _as_table(data: Any, source: str) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise RecipeError(f"{source} is {data!r}; accepted: a table of keys and values")
    return data


def _check_keys(data: Mapping[str, Any], accepted: tuple[str, ...], source: str) -> None:
    for key in data:
        if key not in accepted:
            names = ", ".join(accepted) or "none (it has no settings)"
            raise RecipeError(f"{source}: unknown key {key!r}; accepted: {names}")
