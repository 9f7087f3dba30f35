"""A compiled backward pass is that of its own forward pass, whatever happened in between."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8lab
from fp8lab import linear_tickets
from fp8lab.errors import UserError
from fp8lab.linear import Fp8Linear, advance_scaling, recompute_contexts
from fp8lab.recipes import OPERANDS, Recipe, recipe_named
from fp8lab.swiglu import SwiGlu
from fp8lab.testing import assert_bits_equal

Change = Callable[[nn.Module], Any]

# torch's own, of the compiler's parts.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def one_layer() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 32))


def joined_layers() -> nn.Module:
    return SwiGlu(nn.Linear(32, 96), nn.Linear(48, 16))


MODELS = pytest.mark.parametrize("make", [one_layer, joined_layers])
RECIPES = pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise", "bf16"])


def layers_of(model: nn.Module) -> list[Fp8Linear]:
    return [module for module in model.modules() if isinstance(module, Fp8Linear)]


def in_bf16(*roles: str) -> Change:
    def change(model: nn.Module) -> None:
        for layer in layers_of(model):
            layer.set_bf16_roles(roles)

    return change


def double_weights(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)


def step_optimizer(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()


CHANGES = {
    "nothing": lambda _: None,
    **{role: in_bf16(role) for role in OPERANDS},
    "advance": advance_scaling,
    "weights": double_weights,
    "optimizer": step_optimizer,
}


def model_of(
    make: Callable[[], nn.Module], recipe: str | Recipe, products: str = "codes"
) -> nn.Module:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = make()
    fp8lab.convert(model, recipe, products=products)
    return model


def inputs(model: nn.Module, rows: int = 16, seed: int = 0) -> tuple[Tensor, Tensor]:
    layer = layers_of(model)[-1]
    generator = torch.Generator().manual_seed(seed)
    x = 3 * torch.randn(rows, 32, generator=generator)
    dy = torch.randn(rows, layer.out_features, generator=generator)
    return x.to(layer.weight.device).requires_grad_(), dy.to(layer.weight.device)


def gradients(model: nn.Module, run: Any, change: Change, x: Tensor, dy: Tensor) -> list[Any]:
    """y, dx and the parameters' gradients, with a change between forward and backward pass."""
    x = x.detach().requires_grad_()
    y = run(x)
    change(model)
    y.backward(dy)
    found = [y.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]
    model.zero_grad()
    return found


def check(model: nn.Module, change: Change, **options: Any) -> None:
    """Two steps of a model as it is and of a compiled copy; the first one without a history."""
    twin = copy.deepcopy(model)
    compiled = torch.compile(twin, fullgraph=True, **options)
    for seed in range(2):
        x, dy = inputs(model, seed=seed)
        expected = gradients(model, model, change, x, dy)
        found = gradients(twin, compiled, change, x, dy)
        for one, two in zip(found, expected, strict=True):
            assert (one is None) == (two is None)
            if one is not None:
                assert_bits_equal(one, two)
        for own in (model, twin):
            in_bf16()(own)
            advance_scaling(own)
    for name, value in model.state_dict().items():
        assert_bits_equal(twin.state_dict()[name], value)


@MODELS
@RECIPES
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_waits_for_the_backward_pass(
    make: Callable[[], nn.Module], recipe: str, change: Change
) -> None:
    check(model_of(make, recipe), change, backend="aot_eager")


@MODELS
@pytest.mark.parametrize("change", [in_bf16("grad_output"), advance_scaling])
def test_frozen_weights_and_decoded_products(make: Callable[[], nn.Module], change: Change) -> None:
    check(model_of(make, "delayed", "decoded"), change, backend="aot_eager")
    frozen = model_of(make, "delayed").requires_grad_(False)
    check(frozen, change, backend="aot_eager")


def test_a_new_recipe_is_traced() -> None:
    """What a recipe answers is there before it is asked, as decoded products do not ask early."""
    recipe = replace(recipe_named("delayed"), name="of this test alone")
    check(model_of(one_layer, recipe, "decoded"), CHANGES["nothing"], backend="aot_eager")


@MODELS
def test_sizes_that_are_symbols(make: Callable[[], nn.Module]) -> None:
    check(model_of(make, "delayed"), advance_scaling, backend="aot_eager", dynamic=True)


@MODELS
@pytest.mark.gpu
def test_on_the_card(make: Callable[[], nn.Module]) -> None:
    for recipe in ("delayed", "blockwise"):
        for change in (in_bf16("grad_output"), advance_scaling, double_weights):
            check(model_of(make, recipe).cuda(), change, backend="aot_eager")


@MODELS
@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # the compiler's own, of settings that would be faster
def test_on_the_card_by_its_compiler(make: Callable[[], nn.Module]) -> None:
    model = model_of(make, "delayed").cuda()
    for layer in layers_of(model):
        layer.register_parameter("bias", None)  # the compiler sums its gradient in another order
    check(model, advance_scaling)


@MODELS
def test_passes_in_any_order(make: Callable[[], nn.Module]) -> None:
    model = model_of(make, "delayed")
    twin = copy.deepcopy(model)
    found = []
    for own, run in ((model, model), (twin, torch.compile(twin, backend="aot_eager"))):
        given = [inputs(own, seed=seed) for seed in range(2)]
        results = []
        for x, _ in given:
            results.append(run(x))
            advance_scaling(own)
        for (_, dy), y in zip(given, results, strict=True):
            y.backward(dy, retain_graph=True)
            y.backward(dy)
        found.append([x.grad for x, _ in given] + [p.grad for p in own.parameters()])
    for one, two in zip(*found, strict=True):
        assert one is not None
        assert two is not None
        assert_bits_equal(one, two)


@pytest.mark.parametrize("contexts", [False, True])
def test_recomputed_around_a_compiled_layer(contexts: bool) -> None:
    model = model_of(one_layer, "delayed")
    twin = copy.deepcopy(model)
    options: Any = {"context_fn": recompute_contexts} if contexts else {}
    found = []
    for own, run in ((model, model), (twin, torch.compile(twin, backend="aot_eager"))):
        x, dy = inputs(own)
        y = checkpoint(run, x, use_reentrant=False, **options)
        if contexts:
            advance_scaling(own)
        y.backward(dy)
        found.append([y.detach(), x.grad, *(p.grad for p in own.parameters())])
    for one, two in zip(*found, strict=True):
        assert_bits_equal(one, two)


def test_what_a_forward_pass_keeps_goes_with_it() -> None:
    """Old codes live as long as autograd keeps them, and no longer."""
    model = model_of(one_layer, "tensorwise")
    compiled = torch.compile(model, backend="aot_eager")
    x, dy = inputs(model)
    compiled(x).backward(dy)  # compiles
    gc.collect()
    before = len(linear_tickets._SIDES)
    kept = []
    for _ in range(3):
        double_weights(model)
        kept.append(compiled(x))
    assert len(linear_tickets._SIDES) == before + 2  # one is the layer's own
    kept.pop().backward(dy)
    assert len(linear_tickets._SIDES) == before + 2
    for y in kept:
        y.backward(dy)
    assert len(linear_tickets._SIDES) == before


def test_no_second_set_of_codes() -> None:
    """What a ticket stands for are the layer's own codes, not a copy."""
    model = model_of(one_layer, "tensorwise")
    (layer,) = layers_of(model)
    x, _ = inputs(model)
    y = torch.compile(model, backend="aot_eager")(x)
    assert layer._cached is not None
    side = layer._cached.sides["data_grad"]
    assert side in linear_tickets._KNOWN
    assert linear_tickets._SIDES[linear_tickets._KNOWN[side].number] is side
    assert y.requires_grad


def test_saved_tensor_hooks_that_copy() -> None:
    model = model_of(one_layer, "tensorwise")
    compiled = torch.compile(model, backend="aot_eager")
    x, dy = inputs(model)
    expected = gradients(model, model, CHANGES["nothing"], x, dy)
    copied = torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda kept: kept)
    with copied:
        found = gradients(model, compiled, CHANGES["nothing"], x, dy)
    for one, two in zip(found, expected, strict=True):
        assert_bits_equal(one, two)
    with copied:
        y = compiled(x)
    double_weights(model)
    gradients(model, model, CHANGES["nothing"], x, dy)  # the layer casts its weight anew
    with pytest.raises(UserError, match="layer '0': the weight codes of a compiled forward pass"):
        y.backward(dy)


@MODELS
def test_a_weight_that_is_its_own_operand_must_not_change(
    make: Callable[[], nn.Module],
) -> None:
    """In BF16 a bfloat16 weight is not cast: as torch does, its change is refused."""
    torch.compiler.reset()
    model = make().to(torch.bfloat16)
    fp8lab.convert(model, "bf16")
    for run in (model, torch.compile(model, backend="aot_eager")):
        x, dy = (given.detach().to(torch.bfloat16) for given in inputs(model))
        y = run(x.requires_grad_())
        double_weights(model)
        with pytest.raises(
            (RuntimeError, UserError),
            match=r"was changed in place|modified by an inplace operation",
        ):
            y.backward(dy)
