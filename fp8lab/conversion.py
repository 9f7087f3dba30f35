"""Turning a model's linear layers into FP8 ones, and back.

    model = fp8lab.convert(model, "delayed", exclude=["lm_head"])
    print(fp8lab.conversion_report(model))
    fp8lab.restore(model)

A layer's class is changed, not the layer: its parameters, hooks, names and place stay, and so does
whatever else refers to it. A layer that stands in two places is converted once; parameters that are
shared stay shared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn

from fp8lab.conversion_names import is_matched, nothing_matched, patterns_of, sensitive_layers
from fp8lab.errors import UserError
from fp8lab.linear import Fp8Linear
from fp8lab.linear_checks import DTYPES, check_kernels, check_products
from fp8lab.recipes import Recipe, recipe_named

MULTIPLE = 16  # what both dimensions of an FP8 layer are multiples of
_ATTRIBUTE = "_fp8lab_conversion"


@dataclass(frozen=True)
class ConversionReport:
    """What `convert` did to a model.

    Attributes:
        converted: The recipe's name of each layer that is FP8 now, by the layer's name.
        left: Why a chosen layer stays as it was, by name.
        unchosen: Linear layers that no rule chose, or that one excluded.
    """

    converted: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    unchosen: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{name}: {recipe}" for name, recipe in self.converted.items()]
        lines += [f"{name}: left as it was: {why}" for name, why in self.left.items()]
        lines += [f"{name}: not chosen" for name in self.unchosen]
        return "\n".join(lines)


def convert(
    model: nn.Module,
    recipe: Recipe | str | Mapping[str, Recipe | str],
    *,
    include: str | Sequence[str] = "*",
    exclude: str | Sequence[str] = (),
    keep: str | Sequence[str] = (),
    smallest: int = MULTIPLE,
    products: str = "codes",
    strict: bool = False,
) -> nn.Module:
    """Turn linear layers into FP8 ones, in place.

    Layers are chosen by the names of `model.named_modules()`, with the patterns of `fnmatch`:
    "blocks.*.mlp.*", "lm_head". A chosen layer stays as it was, and is listed in
    `conversion_report`, where FP8 does not fit: a dimension that is not a multiple of 16 or is
    smaller than `smallest`, a subclass of `torch.nn.Linear` (whose forward pass is its own), a
    dtype that is not float32, bfloat16 or float16. A layer that is FP8 already takes the new
    recipe, with fresh scaling state.

    Args:
        model: Any module; may itself be a linear layer.
        recipe: A recipe, a name of one (`fp8lab.recipes.recipe_named`), or recipes by pattern: then
            `include` must be left alone.
        include: Patterns, one of which a layer's name must match.
        exclude: Patterns that it must not match.
        keep: Sensitive layers, which take the recipe "bf16" in place of yours: "first", "last",
            "head", "embeddings" (`fp8lab.conversion_names` tells what these are in any model), or
            patterns. What `include` does not choose stays as it was.
        smallest: The smallest dimension that is worth it.
        products: How the layers compute their products; see `fp8lab.linear.Fp8Linear`.
        strict: Whether a chosen layer that FP8 does not fit is an error.

    Returns:
        The model. Parameters are the same objects under the same names.

    Raises:
        UserError: A pattern that matches no linear layer, rules that contradict each other, a layer
            that FP8 does not fit where `strict` or a pattern without wildcards asks for it, or
            kernels asked for where they do not run. The model is as it was then.
    """
    chosen_by = patterns_of(include, "include")
    if not chosen_by:
        raise UserError("include is empty; name at least one pattern")
    rules = _rules(recipe, chosen_by)
    without = patterns_of(exclude, "exclude")
    both = sorted(set(rules) & set(without))
    if both:
        raise UserError(f"pattern {both[0]!r} is both included and excluded; keep one of them")
    for chosen in rules.values():
        check_products(chosen, products)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    for pattern in (*rules, *without):
        if not any(fnmatchcase(name, pattern) for name in layers):
            raise UserError(nothing_matched(pattern, layers))
    kept = set(sensitive_layers(model, patterns_of(keep, "keep")))

    chosen_recipes: dict[str, Recipe] = {}
    left: dict[str, str] = {}
    for name, layer in layers.items():
        found = _recipe_for(name, rules)
        if found is None or is_matched(name, without):
            continue
        if name in kept:
            found = _as_recipe("bf16")
        reason = why_not(layer, smallest)
        if reason is None:
            if products == "kernels":
                check_kernels(layer.weight.device)
            chosen_recipes[name] = found
            continue
        if (strict or name in rules) and name not in kept:
            raise UserError(
                f"recipe {found.name!r} asks for FP8 in layer {name!r}, which cannot have it:"
                f" {reason}; exclude the layer"
            )
        left[name] = reason

    for name, found in chosen_recipes.items():
        layer = layers[name]
        if type(layer) is nn.Linear:
            layer.__class__ = Fp8Linear
        assert isinstance(layer, Fp8Linear)
        layer.prepare(found, products)
        layer.label = name
    # Of an earlier call, what this one did not touch is FP8 still.
    names = {n: layer.recipe.name for n, layer in layers.items() if isinstance(layer, Fp8Linear)}
    unchosen = tuple(name for name in layers if name not in names and name not in left)
    object.__setattr__(model, _ATTRIBUTE, ConversionReport(names, left, unchosen))
    return model


def conversion_report(model: nn.Module) -> ConversionReport:
    """What the last `convert` did to this model.

    Raises:
        UserError: It was not converted.
    """
    report = getattr(model, _ATTRIBUTE, None)
    if report is None:
        raise UserError("the model was not converted; call fp8lab.convert(model, recipe) first")
    assert isinstance(report, ConversionReport)
    return report


def restore(model: nn.Module) -> nn.Module:
    """Turn a model's FP8 layers back into `torch.nn.Linear`, in place, with the same parameters.

    Scaling state is dropped. Returns the model.
    """
    for layer in list(model.modules()):
        if isinstance(layer, Fp8Linear):
            del layer.casts
            own = ("recipe", "products", "label", "_cached", "_handle")
            for name in (*own, "bf16_roles", "active_recipe"):
                delattr(layer, name)
            layer.__class__ = nn.Linear  # type: ignore[assignment]
    if hasattr(model, _ATTRIBUTE):
        object.__delattr__(model, _ATTRIBUTE)
    return model


def keep_in_bf16(model: nn.Module, names: str | Sequence[str]) -> nn.Module:
    """Give sensitive FP8 layers of a converted model the recipe "bf16", for good.

    Args:
        model: What `convert` made.
        names: As `keep` of `convert`. What is no FP8 layer stays as it is.

    Returns:
        The model.

    Raises:
        UserError: A name or pattern that matches nothing. The model is as it was then.
    """
    chosen = set(sensitive_layers(model, patterns_of(names, "keep")))
    layers = dict(model.named_modules())
    for name in (*chosen,):
        layer = layers[name]
        if isinstance(layer, Fp8Linear):
            convert(model, "bf16", include=name, products=layer.products)
    return model


def why_not(layer: nn.Linear, smallest: int = MULTIPLE) -> str | None:
    """Why a linear layer cannot be FP8; None where it can."""
    if type(layer) not in (nn.Linear, Fp8Linear):
        return f"it is a {type(layer).__name__}, whose forward pass is its own"
    if layer.weight.dtype not in DTYPES:
        return f"its weight is {layer.weight.dtype}; accepted: float32, bfloat16, float16"
    sizes = (layer.in_features, layer.out_features)
    if any(size % MULTIPLE for size in sizes):
        return f"its sizes {sizes} are not both multiples of {MULTIPLE}"
    if min(sizes) < smallest:
        return f"its sizes {sizes} are not both at least {smallest}"
    return None


def _rules(
    recipe: Recipe | str | Mapping[str, Recipe | str], include: tuple[str, ...]
) -> dict[str, Recipe]:
    if not isinstance(recipe, Mapping):
        return dict.fromkeys(include, _as_recipe(recipe))
    if include != ("*",):
        raise UserError("include is given beside recipes by pattern; their patterns say it already")
    if not recipe:
        raise UserError("no recipes; name at least one pattern")
    patterns_of(tuple(recipe), "recipe")
    return {pattern: _as_recipe(found) for pattern, found in recipe.items()}


def _as_recipe(recipe: Recipe | str) -> Recipe:
    if isinstance(recipe, str):
        return recipe_named(recipe)
    if not isinstance(recipe, Recipe):
        raise UserError(f"recipe is {recipe!r}; accepted: a Recipe, a name, or these by pattern")
    return recipe


def _recipe_for(name: str, rules: Mapping[str, Recipe]) -> Recipe | None:
    """The recipe of the rules that match a layer; a rule that names it alone wins."""
    if name in rules:
        return rules[name]
    matching = {pattern: r for pattern, r in rules.items() if fnmatchcase(name, pattern)}
    if len(set(matching.values())) > 1:
        shown = " and ".join(f"{pattern!r} ({r.name})" for pattern, r in matching.items())
        raise UserError(f"layer {name!r} is matched by {shown}; make the patterns exclusive")
    return next(iter(matching.values()), None)
