"""Recipes: round trips, and what is refused."""

from __future__ import annotations

import json
import re

import hypothesis.strategies as st
import pytest
from hypothesis import given

from fp8lab.recipes import (
    PRESETS,
    STACK_NAMES,
    STACK_RECIPES,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    MxScaling,
    NoScaling,
    Operand,
    Product,
    Recipe,
    RecipeError,
    RowScaling,
    Scaling,
    StaticScaling,
    recipe_from_dict,
    recipe_from_json,
    recipe_from_toml,
    recipe_named,
)

SCALINGS = st.one_of(
    st.just(NoScaling()),
    st.builds(StaticScaling, st.floats(2.0**-126, 2.0**127)),
    st.builds(CurrentScaling, st.integers(0, 64), st.booleans()),
    st.builds(
        DelayedScaling,
        st.integers(1, 65536),
        st.integers(0, 64),
        st.sampled_from(["max", "most_recent"]),
        st.booleans(),
    ),
    st.builds(BlockScaling, st.integers(1, 65536), st.booleans(), st.booleans()),
    st.builds(RowScaling, st.booleans()),
    st.builds(MxScaling, st.sampled_from(["floor", "up", "nearest"])),
    st.builds(CurrentScaling, preset=st.sampled_from(["transformer_engine", "torchao"])),
)
OPERANDS = st.builds(
    Operand,
    st.sampled_from(["E4M3", "E5M2"]),
    SCALINGS,
    st.none() | SCALINGS.filter(lambda scaling: scaling.kind != "delayed"),
)
PRODUCTS = st.builds(Product, st.booleans(), st.sampled_from(["native", "promoted"]))
# Surrogates are no characters: neither JSON nor TOML can carry one.
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
RECIPES = st.builds(Recipe, NAMES, OPERANDS, OPERANDS, OPERANDS, PRODUCTS, PRODUCTS, PRODUCTS)


@given(RECIPES)
def test_round_trips(recipe: Recipe) -> None:
    assert recipe_from_json(recipe.to_json()) == recipe
    assert recipe_from_toml(recipe.to_toml()) == recipe
    assert recipe_from_dict(recipe.to_dict()) == recipe


@pytest.mark.parametrize("name", [*PRESETS, *STACK_RECIPES, *STACK_NAMES])
def test_presets_are_named_as_they_are_asked_for(name: str) -> None:
    assert recipe_named(name).name == name


def test_a_file_without_products_is_promoted_fp8() -> None:
    """As all files were before recipes had products."""
    data = recipe_named("tensorwise").to_dict()
    for name in ("forward", "data_grad", "weight_grad"):
        del data[name]
    recipe = recipe_from_dict(data)
    assert recipe.forward == recipe.data_grad == recipe.weight_grad == Product()
    assert recipe.promote_every("forward") == 128


@pytest.mark.parametrize(
    ("name", "scaling", "gradient", "promoted"),
    [
        ("DelayedScaling", DelayedScaling(1024), "E5M2", (None, 128, 128)),
        (
            "Float8CurrentScaling",
            CurrentScaling(preset="transformer_engine"),
            "E5M2",
            (None, 128, 128),
        ),
        ("Float8BlockScaling", BlockScaling(), "E4M3", (None, None, None)),
        ("MXFP8BlockScaling", MxScaling("up"), "E4M3", (None, None, None)),
        ("torchao_tensorwise", CurrentScaling(preset="torchao"), "E5M2", (None, 128, 128)),
        ("torchao_rowwise", RowScaling(power_of_two=True), "E4M3", (None, 128, 128)),
    ],
)
def test_other_stacks_recipes_are_what_they_document(
    name: str, scaling: Scaling, gradient: str, promoted: tuple[int | None, ...]
) -> None:
    recipe = recipe_named(name)
    assert recipe.input == Operand("E4M3", scaling)
    assert recipe.grad_output == Operand(gradient, scaling)
    squares = BlockScaling(square=True) if name == "Float8BlockScaling" else scaling
    assert recipe.weight == Operand("E4M3", squares)
    found = [recipe.promote_every(p) for p in ("forward", "data_grad", "weight_grad")]
    assert tuple(found) == promoted
    assert all(recipe.in_fp8(p) for p in ("forward", "data_grad", "weight_grad"))


def test_a_weight_gradient_in_high_precision() -> None:
    recipe = recipe_named("rowwise_with_gw_hp")
    assert [recipe.in_fp8(p) for p in ("forward", "data_grad", "weight_grad")] == [
        True,
        True,
        False,
    ]
    assert recipe.weight.policy(False) == RowScaling(power_of_two=True)
    assert recipe.weight.policy(True) == CurrentScaling(power_of_two=True, preset="torchao")
    partly = recipe_named("tensorwise:weight_grad.fp8=false:data_grad.accumulation=native")
    assert not partly.in_fp8("weight_grad")
    assert partly.promote_every("data_grad") is None
    # An operand that is not FP8 takes the products with it that it enters.
    mixed = Recipe("mixed", grad_output=Operand(scaling=NoScaling()))
    assert [mixed.in_fp8(p) for p in ("forward", "data_grad", "weight_grad")] == [
        True,
        False,
        False,
    ]


def test_settings_of_a_policy_reach_all_operands_or_one() -> None:
    recipe = recipe_named("delayed:history=64:margin=1:weight.algorithm=most_recent")
    assert recipe.input.scaling == DelayedScaling(64, 1)
    assert recipe.weight.scaling == DelayedScaling(64, 1, "most_recent")
    assert recipe.grad_output == Operand("E5M2", DelayedScaling(64, 1))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("fp4", "unknown policy 'fp4'; accepted: bf16, static, current, tensorwise, rowwise"),
        ("delayed:margin=-1", "margin is -1; accepted: an integer, 0 to 64"),
        ("delayed:margin=1.5", "margin is 1.5; accepted: an integer, 0 to 64"),
        ("delayed:history=0", "history is 0; accepted: an integer, 1 to 65536"),
        ("delayed:history=true", "history is True; accepted: an integer"),
        ("delayed:algorithm=mean", "algorithm is 'mean'; accepted: max, most_recent"),
        ("delayed:size=3", "unknown key 'size'; accepted: history, margin, algorithm"),
        ("static:scale=0", "scale is 0; accepted: a number from 2**-126 to 2**127"),
        ("static:scale=nan", "scale is 'nan'; accepted: a number"),
        ("static:scale=1e60", "scale is 1e+60; accepted: a number"),
        ("blockwise:length=0", "length is 0; accepted: an integer, 1 to 65536"),
        ("current:power_of_two=1", "power_of_two is 1; accepted: true, false"),
        ("mx:rounding=down", "rounding is 'down'; accepted: floor, up, nearest"),
        ("rowwise:power_of_two=2", "power_of_two is 2; accepted: true, false"),
        ("tensorwise:preset=te", "preset is 'te'; accepted: fp8lab, transformer_engine, torchao"),
        ("torchao_tensorwise:margin=1", "margin is 1 with preset 'torchao'; accepted: 0"),
        ("mx:forward.accumulation=fast", "accumulation is 'fast'; accepted: native, promoted"),
        ("mx:forward.fp8=1", "fp8 is 1; accepted: true, false"),
        ("mx:forward.cores=2", "unknown key 'cores'; accepted: fp8, accumulation"),
        ("bf16:scale=1", "unknown key 'scale'; accepted: none (it has no settings)"),
        ("static:output.scale=1", "unknown operand 'output'; accepted: input, weight, grad_output"),
        ("static:scale", "setting 'scale' of policy 'static' must be KEY=VALUE"),
        ("", "unknown policy ''; accepted: bf16"),
        ("bf16:kind=current", "the kind follows from the preset 'bf16'"),
        ("static:scale=" + "1" * 5000, "static scaling: scale is '1111"),
        ("static:scale=" + "[" * 100_000, "static scaling: scale is '[[[["),
    ],
)
def test_an_impossible_policy_is_refused(spec: str, message: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(message)):
        recipe_named(spec)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": 1}, "unknown key 'extra'; accepted: name, input, weight, grad_output"),
        ({"input": None}, "input is None; accepted: a table"),
        ({"input": {"fmt": "E4M3"}}, "unknown key 'fmt'; accepted: format, scaling"),
        (
            {"input": {"scaling": {"kind": "none"}, "transposed": {"kind": "delayed"}}},
            "transposed is delayed scaling; accepted: policies without a history",
        ),
        ({"forward": {"fp8": "no"}}, "forward: fp8 is 'no'; accepted: true, false"),
        ({"input": {"format": "E4M4"}}, "scaling is None; accepted: a table"),
        (
            {"input": {"format": "E4M4", "scaling": {"kind": "none"}}},
            "format is 'E4M4'; accepted: E4M3, E5M2, E4M3FNUZ, E5M2FNUZ",
        ),
        (
            {"input": {"format": "E8M0", "scaling": {"kind": "none"}}},
            "format is 'E8M0'; accepted: E4M3",
        ),
        (
            {"input": {"scaling": {"kind": "fixed"}}},
            "kind is 'fixed'; accepted: none, static, current, delayed, row, block, mx",
        ),
        ({"name": ""}, "name is ''; accepted: a text that is not empty"),
    ],
)
def test_an_impossible_recipe_is_refused(change: dict[str, object], message: str) -> None:
    data = recipe_named("delayed").to_dict() | change
    with pytest.raises(RecipeError, match=re.escape(message)):
        recipe_from_json(json.dumps(data))


def test_what_is_missing_and_what_is_not_even_text() -> None:
    with pytest.raises(RecipeError, match="missing input, weight, grad_output"):
        recipe_from_toml('name = "x"')
    with pytest.raises(RecipeError, match="recipe is not TOML"):
        recipe_from_toml("name = ")
    for text in ("{", "[" * 100_000, "1" * 5000):
        with pytest.raises(RecipeError, match="recipe is not JSON"):
            recipe_from_json(text)
    with pytest.raises(RecipeError, match=r"recipe is \[\]; accepted: a table"):
        recipe_from_json("[]")
