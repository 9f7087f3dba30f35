"""Recipes by name: the lab's own, and those of other stacks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from fp8lab.formats import E4M3, E5M2
from fp8lab.recipes_model import OPERANDS, PRODUCTS, Operand, Product, Recipe
from fp8lab.recipes_policies import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    MxScaling,
    NoScaling,
    RecipeError,
    RowScaling,
    Scaling,
    StaticScaling,
    shortened,
)
from fp8lab.recipes_text import operand_dict, operand_from, product_from

_FAST = Product(accumulation="native")
_EXACT = Product(accumulation="promoted")


def uniform(name: str, scaling: Scaling, *, gradient: str = E5M2.name) -> Recipe:
    """One scaling for all operands: E4M3 for input and weight, `gradient` for the output gradient.

    The forward product is native, the two of the backward pass are promoted.
    """
    return Recipe(
        name,
        Operand(E4M3.name, scaling),
        Operand(E4M3.name, scaling),
        Operand(gradient, scaling),
        forward=_FAST,
        data_grad=_EXACT,
        weight_grad=_EXACT,
    )


def blocks(name: str) -> Recipe:
    """All E4M3: 1x128 for input and output gradient, 128x128 for the weight; promoted."""
    runs = Operand(E4M3.name, BlockScaling())
    squares = Operand(E4M3.name, BlockScaling(square=True))
    return Recipe(name, runs, squares, runs)


def microscaling(name: str) -> Recipe:
    """All E4M3, in blocks of 32 with E8M0 scales that are rounded up."""
    operand = Operand(E4M3.name, MxScaling())
    return Recipe(name, operand, operand, operand)


def _hybrid() -> Recipe:
    """The policy that each operand can best afford."""
    return Recipe(
        "hybrid",
        Operand(E4M3.name, DelayedScaling()),
        Operand(E4M3.name, CurrentScaling()),
        Operand(E5M2.name, CurrentScaling()),
        forward=_FAST,
        data_grad=_EXACT,
        weight_grad=_EXACT,
    )


def _torchao_rowwise(name: str, *, weight_grad_fp8: bool) -> Recipe:
    """torchao's row-wise recipes: all E4M3, scales that are powers of two."""
    rows = Operand(E4M3.name, RowScaling(power_of_two=True))
    weight, last = rows, _EXACT
    if not weight_grad_fp8:
        whole = CurrentScaling(power_of_two=True, preset="torchao")
        weight, last = replace(rows, transposed=whole), Product(fp8=False)
    return Recipe(name, rows, weight, rows, forward=_FAST, data_grad=_EXACT, weight_grad=last)


PRESETS: dict[str, Callable[[], Recipe]] = {
    "bf16": lambda: uniform("bf16", NoScaling()),
    "static": lambda: uniform("static", StaticScaling()),
    "current": lambda: uniform("current", CurrentScaling()),
    "tensorwise": lambda: uniform("tensorwise", CurrentScaling()),
    "rowwise": lambda: uniform("rowwise", RowScaling(), gradient=E4M3.name),
    "delayed": lambda: uniform("delayed", DelayedScaling()),
    "blockwise": lambda: blocks("blockwise"),
    "mx": lambda: microscaling("mx"),
    "hybrid": _hybrid,
}
# What other stacks call their recipes; each with the semantics that stack documents.
STACK_RECIPES: dict[str, Callable[[], Recipe]] = {
    "te_delayed": lambda: uniform("te_delayed", DelayedScaling(history=1024)),
    "te_current": lambda: uniform("te_current", CurrentScaling(preset="transformer_engine")),
    "te_blockwise": lambda: blocks("te_blockwise"),
    "te_mxfp8": lambda: microscaling("te_mxfp8"),
    "torchao_tensorwise": lambda: uniform("torchao_tensorwise", CurrentScaling(preset="torchao")),
    "torchao_rowwise": lambda: _torchao_rowwise("torchao_rowwise", weight_grad_fp8=True),
    "torchao_rowwise_with_gw_hp": lambda: _torchao_rowwise(
        "torchao_rowwise_with_gw_hp", weight_grad_fp8=False
    ),
}
# The stacks' own names for them.
STACK_NAMES = {
    "DelayedScaling": "te_delayed",
    "Float8CurrentScaling": "te_current",
    "Float8BlockScaling": "te_blockwise",
    "MXFP8BlockScaling": "te_mxfp8",
    "rowwise_with_gw_hp": "torchao_rowwise_with_gw_hp",
}


def recipe_named(spec: str) -> Recipe:
    """A preset by name, with settings after colons.

    `delayed`, `delayed:history=64:margin=1`, `static:scale=0.5`. A setting of the scaling policy
    applies to all three operands, or to one with its name before it:
    `static:scale=1:grad_output.scale=4096`. One of a product has the product's name before it:
    `tensorwise:weight_grad.fp8=false`, `rowwise:data_grad.accumulation=native`. The recipe is named
    by the whole text. Names of other stacks' recipes are accepted too (`STACK_RECIPES`,
    `STACK_NAMES`).

    Raises:
        RecipeError: No such preset or setting, or a value that cannot be.
    """
    preset, *settings = spec.split(":")
    makers = PRESETS | STACK_RECIPES
    maker = makers.get(STACK_NAMES.get(preset, preset))
    if maker is None:
        raise RecipeError(
            f"unknown policy {shortened(preset)!r}; accepted: {', '.join(makers)}"
            " (settings follow after colons: delayed:history=64:margin=1)"
        )
    recipe = replace(maker(), name=spec)
    for setting in settings:
        recipe = _with_setting(recipe, setting, preset, spec)
    return recipe


def _with_setting(recipe: Recipe, setting: str, preset: str, spec: str) -> Recipe:
    key, equals, text = setting.partition("=")
    if not equals:
        raise RecipeError(f"setting {setting!r} of policy {preset!r} must be KEY=VALUE")
    source = f"policy {shortened(spec)!r}"
    role, dot, name = key.rpartition(".")
    if role in PRODUCTS:
        table = asdict(recipe.product(role)) | {name: _parsed(text)}
        return replace(recipe, **{role: product_from(table, source)})  # type: ignore[arg-type]
    if dot:
        recipe.operand(role)  # refuses an unknown one
    if name == "kind":
        raise RecipeError(f"policy {spec!r}: the kind follows from the preset {preset!r}")
    for target in (role,) if dot else OPERANDS:
        changed = operand_dict(recipe.operand(target))
        changed["scaling"][name] = _parsed(text)
        changes: dict[str, Any] = {target: operand_from(changed, source)}
        recipe = replace(recipe, **changes)
    return recipe


def _parsed(text: str) -> Any:
    """A command line's value: a JSON number or boolean, otherwise the text itself."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # also a number of more digits than Python reads
        return text
    return value if isinstance(value, int | float | bool) else text
