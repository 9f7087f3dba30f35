"""Recipes: which operand of a linear layer is cast how, and which product is computed how.

A linear layer has three operands: `input` x, `weight` w and `grad_output` dy, and three products:
forward y = x w^T, data gradient dx = dy w, weight gradient dw = dy^T x. A recipe gives each operand
a format and a scaling policy, and says for each product whether it multiplies FP8 codes and how
they are accumulated. It does not say where that is computed.

A recipe travels as JSON or TOML (`to_json`, `to_toml`, `recipe_from_json`, `recipe_from_toml`), or
on a command line as a preset's name with settings: `delayed:history=64:margin=1`.

The names live by topic in `recipes_policies`, `recipes_model`, `recipes_presets` and
`recipes_text`; this module offers them all.
"""

from fp8lab.recipes_model import (
    ACCUMULATIONS,
    OPERANDS,
    PRODUCT_OPERANDS,
    PRODUCTS,
    Operand,
    Product,
    Recipe,
)
from fp8lab.recipes_policies import (
    SCALINGS,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    MxScaling,
    NoScaling,
    RecipeError,
    RowScaling,
    Scaling,
    StaticScaling,
)
from fp8lab.recipes_presets import PRESETS, STACK_NAMES, STACK_RECIPES, recipe_named, uniform
from fp8lab.recipes_text import recipe_from_dict, recipe_from_json, recipe_from_toml

__all__ = [
    "ACCUMULATIONS",
    "OPERANDS",
    "PRESETS",
    "PRODUCTS",
    "PRODUCT_OPERANDS",
    "SCALINGS",
    "STACK_NAMES",
    "STACK_RECIPES",
    "BlockScaling",
    "CurrentScaling",
    "DelayedScaling",
    "MxScaling",
    "NoScaling",
    "Operand",
    "Product",
    "Recipe",
    "RecipeError",
    "RowScaling",
    "Scaling",
    "StaticScaling",
    "recipe_from_dict",
    "recipe_from_json",
    "recipe_from_toml",
    "recipe_named",
    "uniform",
]
