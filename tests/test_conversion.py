"""convert, restore, freeze: what changes, what stays, and what is refused."""

from __future__ import annotations

import copy
import io
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import fp8lab
from fp8lab.conversion import ConversionReport
from fp8lab.errors import UserError
from fp8lab.gradients import accumulate_in_float32
from fp8lab.linear import Fp8Linear, advance_scaling
from fp8lab.recipes import PRESETS, Recipe, recipe_named
from fp8lab.testing import assert_bits_equal


class Network(nn.Module):
    """Two blocks, a tied head, one layer in two places, one that FP8 does not fit."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(32, 48), "down": nn.Linear(48, 32, bias=False)})
            for _ in range(2)
        )
        self.odd = nn.Linear(32, 20)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.tokens.weight
        self.blocks[1]["down"] = self.blocks[0]["down"]  # type: ignore[index,operator]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = x + block["down"](torch.tanh(block["up"](x)))  # type: ignore[index]
        return torch.cat([self.head(x), self.odd(x)], -1)


def network(**options: Any) -> Network:
    torch.manual_seed(0)
    model = Network()
    if options:
        fp8lab.convert(model, **options)
    return model


TOKENS = torch.arange(24).reshape(2, 12)


def test_layers_change_and_everything_else_stays() -> None:
    model = network()
    before = dict(model.named_parameters())
    keys = set(model.state_dict())
    modules = [name for name, _ in model.named_modules()]
    seen: list[str] = []
    model.head.register_forward_hook(lambda *_: seen.append("head"))
    assert fp8lab.convert(model, "delayed", exclude="head") is model
    report = fp8lab.conversion_report(model)
    assert report == ConversionReport(
        converted={
            "blocks.0.up": "delayed",
            "blocks.0.down": "delayed",
            "blocks.1.up": "delayed",
        },
        left={"odd": "its sizes (32, 20) are not both multiples of 16"},
        unchosen=("head",),
    )
    assert "odd: left as it was: its sizes" in str(report)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    extra = set(model.state_dict()) - keys
    assert "blocks.0.up.casts.input.amax_history" in extra
    assert all(".casts." in key for key in extra)
    assert model.blocks[0]["down"] is model.blocks[1]["down"]  # type: ignore[index]
    model(TOKENS).sum().backward()
    assert seen == ["head"]
    assert isinstance(model.blocks[0]["up"], nn.Linear)  # type: ignore[index]

    assert fp8lab.restore(model) is model
    assert set(model.state_dict()) == keys
    assert [name for name, _ in model.named_modules()] == modules
    assert all(type(m) is not Fp8Linear for m in model.modules())
    assert_bits_equal(model(TOKENS), network()(TOKENS))
    with pytest.raises(UserError, match="the model was not converted"):
        fp8lab.conversion_report(model)


def test_shared_weights_stay_shared_and_train() -> None:
    model = network(recipe="tensorwise", include="head")
    assert model.head.weight is model.tokens.weight
    assert fp8lab.conversion_report(model).converted == {"head": "tensorwise"}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    first = model(TOKENS)
    first.sum().backward()
    optimizer.step()
    assert not torch.equal(model(TOKENS), first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("preset", PRESETS)
def test_any_preset_in_any_dtype(preset: str, dtype: torch.dtype) -> None:
    model = network().to(dtype)
    fp8lab.convert(model, preset)
    y = model(TOKENS)
    assert y.dtype == dtype
    assert bool(y.isfinite().all())
    y.float().square().mean().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == dtype
        assert bool(parameter.grad.isfinite().all())


def test_autocast_gives_what_torchs_layer_gives() -> None:
    model = network(recipe="tensorwise")
    with torch.autocast("cpu", torch.bfloat16):
        assert model(TOKENS).dtype == torch.bfloat16


def test_recipes_by_pattern_and_again() -> None:
    rules: dict[str, Recipe | str] = {
        "blocks.*.up": "rowwise",
        "blocks.*.down": recipe_named("delayed:history=2"),
    }
    model = network(recipe=rules)
    found = fp8lab.conversion_report(model)
    assert found.converted["blocks.1.up"] == "rowwise"
    assert found.converted["blocks.0.down"] == "delayed:history=2"
    assert found.unchosen == ("odd", "head")
    # The name of one layer stands above a pattern.
    model = network(recipe={"blocks.0.up": "mx", "blocks.*": "tensorwise"})
    assert fp8lab.conversion_report(model).converted["blocks.0.up"] == "mx"
    fp8lab.convert(model, "blockwise", include="head")
    assert fp8lab.conversion_report(model).converted["head"] == "blockwise"
    assert fp8lab.conversion_report(model).converted["blocks.0.up"] == "mx"
    fp8lab.convert(model, "delayed", include="head")
    assert fp8lab.conversion_report(model).converted["head"] == "delayed"


def test_a_linear_layer_alone_and_a_size_that_is_too_small() -> None:
    layer = nn.Linear(32, 48)
    assert isinstance(fp8lab.convert(layer, "tensorwise"), Fp8Linear)
    model = network(recipe="tensorwise", smallest=48)
    assert fp8lab.conversion_report(model).left["blocks.0.up"] == (
        "its sizes (32, 48) are not both at least 48"
    )


class Own(nn.Linear):
    """A subclass with a forward pass of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def test_a_subclass_is_left_alone() -> None:
    model = nn.Sequential(Own(16, 16), nn.Linear(16, 16))
    fp8lab.convert(model, "tensorwise")
    assert fp8lab.conversion_report(model).left == {
        "0": "it is a Own, whose forward pass is its own"
    }
    assert type(model[0]) is Own


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"recipe": "delayed", "include": "layers.*"},
            "pattern 'layers.*' matches no linear layer; there are: blocks.0.up, blocks.0.down,",
        ),
        ({"recipe": "delayed", "exclude": ["lm_head"]}, "pattern 'lm_head' matches no linear"),
        ({"recipe": "delayed", "include": ["head", "hat"]}, "pattern 'hat' matches no linear"),
        (
            {"recipe": "delayed", "include": "head", "exclude": "head"},
            "pattern 'head' is both included and excluded; keep one of them",
        ),
        (
            {"recipe": {"blocks.*": "mx", "*.up": "delayed"}},
            "layer 'blocks.0.up' is matched by 'blocks.*' (mx) and '*.up' (delayed); make the",
        ),
        ({"recipe": {}}, "no recipes; name at least one pattern"),
        ({"recipe": {"*": "mx"}, "include": "head"}, "include is given beside recipes by pattern"),
        ({"recipe": "delayed", "include": []}, "include is empty; name at least one pattern"),
        ({"recipe": "delayed", "include": [3]}, "include holds 3; accepted: patterns, as texts"),
        ({"recipe": "delayed", "include": 3}, "include is 3; accepted: a pattern, or a list"),
        ({"recipe": "delayed", "exclude": None}, "exclude is None; accepted: a pattern, or a list"),
        ({"recipe": {3: "mx"}}, "recipe holds 3; accepted: patterns, as texts"),
        ({"recipe": 3}, "recipe is 3; accepted: a Recipe, a name, or these by pattern"),
        ({"recipe": "fast"}, "unknown policy 'fast'; accepted: bf16"),
        (
            {"recipe": "delayed", "include": "odd"},
            "recipe 'delayed' asks for FP8 in layer 'odd', which cannot have it: its sizes (32, 20)"
            " are not both multiples of 16; exclude the layer",
        ),
        ({"recipe": "delayed", "strict": True}, "asks for FP8 in layer 'odd', which cannot have"),
        ({"recipe": "delayed", "products": "gpu"}, "products is 'gpu'; accepted: codes, kernels"),
        ({"recipe": "blockwise:length=64"}, "blocks of 64; the FP8 product takes one length, 128"),
    ],
)
def test_rules_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    model = network()
    with pytest.raises(UserError, match=re.escape(message)):
        fp8lab.convert(model, **options)
    assert all(type(m) is not Fp8Linear for m in model.modules())


def test_kernels_on_a_cpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UserError, match='products is "kernels", but the layer is on cpu; move the'):
        network(recipe="tensorwise", products="kernels")
    with pytest.raises(UserError, match="the model has no linear layer"):
        fp8lab.convert(nn.ReLU(), "tensorwise")


def trained(preset: str, products: str = "codes") -> Network:
    model = network(recipe=preset, products=products)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(TOKENS).square().mean().backward()
        optimizer.step()
        advance_scaling(model)
    return model


@pytest.mark.parametrize("products", ["codes", "decoded"])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_frozen_model_has_the_bits_of_training(preset: str, products: str) -> None:
    model = trained(preset, products)
    training = model(TOKENS)
    expected = model.eval()(TOKENS)
    assert_bits_equal(training, expected)
    frozen = fp8lab.freeze(copy.deepcopy(model))
    assert_bits_equal(frozen(TOKENS), expected)
    assert "blocks.0.up.weight" not in frozen.state_dict()
    codes = frozen.get_buffer("blocks.0.up.weight_codes")
    assert codes.element_size() == (2 if preset == "bf16" else 1)
    file = io.BytesIO()
    torch.save(frozen.state_dict(), file)
    file.seek(0)
    other = fp8lab.freeze(network(recipe=preset, products=products))
    other.load_state_dict(torch.load(file))
    assert_bits_equal(other(TOKENS), expected)
    assert not [p for name, p in frozen.named_parameters() if "up" in name]


@pytest.mark.parametrize("products", ["codes", "decoded"])
@pytest.mark.parametrize("preset", ["delayed", "static:weight.scale=3", "blockwise", "mx", "bf16"])
def test_scales_and_codes_keep_their_bits_where_a_model_changes_its_type(
    preset: str, products: str
) -> None:
    """`model.to(dtype)` would round scales and turn codes into numbers."""
    models = []
    for moved_first in (True, False):
        model = network() if moved_first else network(recipe=preset, products=products)
        model = model.to(torch.bfloat16)
        if moved_first:
            fp8lab.convert(model, preset, products=products)
        for factor in (1, 2):
            model(TOKENS * factor).square().mean().backward()
            advance_scaling(model)
        models.append(model)
    one, other = models
    for (name, value), found in zip(
        one.state_dict().items(), other.state_dict().values(), strict=True
    ):
        assert found.dtype == (torch.float32 if ".casts." in name else torch.bfloat16)
        assert_bits_equal(found, value)
    frozen = fp8lab.freeze(other)
    expected = frozen(TOKENS)
    before = {n: value for n, value in frozen.state_dict().items() if ".weight_" in n}
    again = frozen.float().bfloat16()
    for name, value in before.items():
        assert again.state_dict()[name].dtype == value.dtype
        assert_bits_equal(again.state_dict()[name], value)
    assert_bits_equal(again(TOKENS), expected)


def test_a_frozen_layer_refuses_what_a_layer_refuses() -> None:
    frozen = fp8lab.freeze(fp8lab.convert(nn.Linear(16, 16), "tensorwise"))
    with pytest.raises(TypeError, match=r"x has dtype torch.float64; accepted: float32, bfloat16"):
        frozen(torch.ones(2, 16, dtype=torch.float64))


def test_scales_of_a_frozen_model_do_not_move() -> None:
    frozen = fp8lab.freeze(trained("delayed"))
    before = {name: value.clone() for name, value in frozen.state_dict().items()}
    frozen.train()
    frozen(TOKENS * 2)
    for name, value in frozen.state_dict().items():
        assert_bits_equal(value, before[name])
    with pytest.raises(UserError, match="the model has no FP8 layer to freeze"):
        fp8lab.freeze(nn.Linear(16, 16))


@pytest.mark.parametrize("preset", [*PRESETS, "torchao_rowwise_with_gw_hp"])
def test_a_compiled_model_has_the_same_bits(preset: str) -> None:
    """The whole graph, forward and backward, without a break."""
    torch.compiler.reset()
    model = network(recipe=preset)
    other = copy.deepcopy(model)
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    for factor in (1, 2):
        for net in (model, compiled):
            net(TOKENS * factor).square().mean().backward()
        advance_scaling(model)
        advance_scaling(other)
    for value, found in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert_bits_equal(found, value)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert one.grad is not None
        assert two.grad is not None
        assert_bits_equal(two.grad, one.grad)


def test_what_torch_compile_cannot_do_is_said() -> None:
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    fp8lab.convert(model, "tensorwise")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.ones(2, 16)
    accumulate_in_float32(model)
    with pytest.raises(RuntimeError, match="the weight has a main_grad"):
        compiled(x).sum().backward()
    frozen = fp8lab.freeze(model)
    with pytest.raises(Exception, match="a frozen FP8 layer breaks the graph"):
        torch.compile(frozen, fullgraph=True, backend="aot_eager")(x)
    assert_bits_equal(torch.compile(frozen, backend="aot_eager")(x), frozen(x))


def test_one_compiled_graph_serves_all_layers_of_a_shape() -> None:
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    layers = [fp8lab.convert(nn.Linear(16, 32), "tensorwise") for _ in range(12)]
    x = torch.ones(3, 16)

    def run(layer: nn.Module) -> Tensor:
        y: Tensor = layer(x)
        return y * 2

    compiled = torch.compile(run, fullgraph=True, backend=counter, dynamic=False)
    for layer in layers:
        assert_bits_equal(compiled(layer), run(layer))
    assert counter.frame_count == 1
