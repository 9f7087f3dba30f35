"""Sensitive layers by name: which they are in models of several shapes, and what `keep` does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import fp8lab
from fp8lab.conversion import keep_in_bf16
from fp8lab.conversion_names import sensitive_layers
from fp8lab.errors import UserError
from fp8lab.linear import Fp8Linear
from fp8lab.models import Mlp, MlpConfig, Transformer, TransformerConfig
from fp8lab.recipes import recipe_named


def block(width: int = 32) -> nn.ModuleDict:
    return nn.ModuleDict(
        {"mlp": nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))}
    )


class Language(nn.Module):
    """An input projection, three blocks, a tied head."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.tokens = nn.Embedding(64, 32)
        self.into = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.head = nn.Linear(32, 64, bias=False)
        if tied:
            self.head.weight = self.tokens.weight


class Experts(nn.Module):
    """Blocks of many experts: the blocks hold more layers than any list of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(16, 16) for _ in range(4))})
            for _ in range(2)
        )


class Aliased(nn.Module):
    """A block, a layer of a block, or the head, with another name that comes first."""

    def __init__(self, what: str) -> None:
        super().__init__()
        blocks = [nn.ModuleDict({"a": nn.Linear(16, 16), "b": nn.Linear(16, 16)}) for _ in "12"]
        head = nn.Linear(16, 16)
        own = {"block": blocks[0], "last": blocks[1], "layer": blocks[0]["a"], "head": head}
        self.x = own[what]
        self.into = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(blocks)
        self.head = head


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)


def transformer(layers: int) -> nn.Module:
    config = TransformerConfig(context=8, width=16, layers=layers, heads=2)
    return Transformer(config, recipe_named("tensorwise"))


PARTS = ("qkv", "proj", "up", "down")
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, list[str]]]] = {
    "transformer": (
        lambda: transformer(3),
        {
            "first": [f"blocks.0.{part}" for part in PARTS],
            "last": [f"blocks.2.{part}" for part in PARTS],
            "head": ["head"],
        },
    ),
    "one block": (lambda: transformer(1), {"first": [f"blocks.0.{part}" for part in PARTS]}),
    "mlp": (
        lambda: Mlp(MlpConfig(context=8, width=8, layers=3, window=2), recipe_named("bf16")),
        {"first": ["hidden.0"], "last": ["hidden.2"], "head": ["head"]},
    ),
    "tied": (
        Language,
        {
            "first": ["blocks.0.mlp.0", "blocks.0.mlp.2"],
            "last": ["blocks.2.mlp.0", "blocks.2.mlp.2"],
            "head": ["head"],
            "embeddings": ["head"],
        },
    ),
    "experts": (
        Experts,
        {
            "first": [f"layers.0.experts.{place}" for place in range(4)],
            "head": ["layers.1.experts.3"],
        },
    ),
    "sequential": (
        lambda: nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 16)),
        {"first": ["0"], "last": ["3"], "head": ["3"]},
    ),
    "whole": (
        lambda: nn.Sequential(
            nn.Embedding(8, 16), nn.Sequential(block(16), block(16)), nn.Linear(16, 16)
        ),
        {"first": ["1.0.mlp.0", "1.0.mlp.2"], "head": ["2"]},
    ),
    "a block has two names": (
        lambda: Aliased("block"),
        {"first": ["x.a", "x.b"], "last": ["blocks.1.a", "blocks.1.b"], "head": ["head"]},
    ),
    "the last block has two names": (
        lambda: Aliased("last"),
        {"first": ["blocks.0.a", "blocks.0.b"], "last": ["x.a", "x.b"], "head": ["head"]},
    ),
    "a layer has two names": (
        lambda: Aliased("layer"),
        {"first": ["x", "blocks.0.b"], "last": ["blocks.1.a", "blocks.1.b"], "head": ["head"]},
    ),
    "the head has two names": (lambda: Aliased("head"), {"head": ["x"]}),
    "no list": (Pair, {"first": ["a"], "last": ["b"], "head": ["b"]}),
    "alone": (lambda: nn.Linear(16, 16), {"first": [""], "head": [""]}),
}


@pytest.mark.parametrize("case", CASES)
def test_what_the_names_mean(case: str) -> None:
    build, expected = CASES[case]
    model = build()
    for name, layers in expected.items():
        assert sensitive_layers(model, [name]) == layers
    everything = [name for name, own in model.named_modules() if isinstance(own, nn.Linear)]
    assert sensitive_layers(model, ["*"]) == everything
    assert sensitive_layers(model, ["*", "first"]) == everything


@pytest.mark.parametrize(
    ("build", "names", "message"),
    [
        (Language, ["blocks.9.*"], r"pattern 'blocks\.9\.\*' matches no linear layer; there are:"),
        (Language, ["First"], "by position: first, last, head, embeddings"),
        (CASES["sequential"][0], ["embeddings"], "'embeddings' matches nothing: the model has no"),
        (
            lambda: Language(tied=False),
            ["head", "embeddings"],
            "'embeddings' matches nothing: no linear layer shares the weight of an embedding",
        ),
        (nn.Tanh, ["first"], "pattern 'first' matches nothing: the model has no linear layer"),
    ],
)
def test_a_name_that_matches_nothing_is_an_error(
    build: Callable[[], nn.Module], names: list[str], message: str
) -> None:
    model = build()
    with pytest.raises(UserError, match=message) as error:
        sensitive_layers(model, names)
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="matches n"):
        fp8lab.convert(model, "tensorwise", keep=names)
    assert not any(isinstance(own, Fp8Linear) for own in model.modules())


def test_a_layer_with_two_names_is_kept() -> None:
    for what in ("block", "layer"):
        model = fp8lab.convert(Aliased(what), "tensorwise", keep=["first"])
        report = fp8lab.conversion_report(model).converted
        assert sum(own == "bf16" for own in report.values()) == 2
        block = model.get_submodule("blocks.0")
        assert {own.recipe.name for own in block.modules() if isinstance(own, Fp8Linear)} == {
            "bf16"
        }


def test_a_layer_that_is_named_like_a_place_is_meant_by_a_pattern() -> None:
    model = nn.Sequential()
    for name in ("last", "middle", "first"):
        model.add_module(name, nn.Linear(16, 16))
    assert sensitive_layers(model, ["first"]) == ["last"]
    assert sensitive_layers(model, ["[f]irst"]) == ["first"]


def test_a_module_that_holds_itself_is_no_trouble() -> None:
    model = Pair()
    model.a.add_module("model", model)
    assert sensitive_layers(model, ["head"]) == ["b"]


def test_kept_layers_take_bf16_and_the_rest_the_recipe() -> None:
    model = fp8lab.convert(
        Language(), "tensorwise", exclude="into", keep=["first", "head"], strict=True
    )
    report = fp8lab.conversion_report(model)
    bf16 = {"blocks.0.mlp.0", "blocks.0.mlp.2", "head"}
    assert {name for name, own in report.converted.items() if own == "bf16"} == bf16
    assert sum(own == "tensorwise" for own in report.converted.values()) == 4
    assert report.unchosen == ("into",)


def test_a_kept_layer_that_fp8_does_not_fit_is_no_mistake() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 10))
    fp8lab.convert(model, "tensorwise", keep="head", strict=True)
    report = fp8lab.conversion_report(model)
    assert report.converted == {"0": "tensorwise"}
    assert list(report.left) == ["1"]


def test_layers_of_a_converted_model_can_be_kept_later() -> None:
    model = fp8lab.convert(Language(tied=False), "delayed", include="blocks.*", products="decoded")
    keep_in_bf16(model, ["last", "head"])  # the head was never FP8
    converted = fp8lab.conversion_report(model).converted
    assert [name for name, own in converted.items() if own == "bf16"] == [
        "blocks.2.mlp.0",
        "blocks.2.mlp.2",
    ]
    kept = model.get_submodule("blocks.2.mlp.0")
    assert isinstance(kept, Fp8Linear)
    assert kept.products == "decoded"
    x = torch.ones(4, 32)
    assert torch.isfinite(kept(x)).all()
    with pytest.raises(UserError, match="'last1' matches no linear layer"):
        keep_in_bf16(model, "last1")
