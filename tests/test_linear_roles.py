"""A layer whose operands move to BF16 and back: which products, which bits, what goes on."""

from __future__ import annotations

import copy
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8lab
from fp8lab.errors import UserError
from fp8lab.linear import Fp8Linear, advance_scaling, recompute_contexts
from fp8lab.recipes import OPERANDS, PRODUCTS, Recipe, recipe_from_dict, recipe_named
from fp8lab.testing import assert_bits_equal

ROWS, K, N = 32, 128, 128

# The one product that a role in BF16 leaves in FP8.
LEFT = {"input": "data_grad", "weight": "weight_grad", "grad_output": "forward"}
SUBSETS = [roles for count in (0, 1, 2, 3) for roles in combinations(OPERANDS, count)]
SPECS = ["delayed:history=3", "tensorwise", "blockwise", "mx", "torchao_rowwise_with_gw_hp"]


def layer_of(recipe: str | Recipe, products: str = "codes") -> Fp8Linear:
    found = recipe_named(recipe) if isinstance(recipe, str) else recipe
    layer = Fp8Linear(K, N, found, products=products)
    nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(1))
    return layer


def operands(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, K, generator=generator).requires_grad_()
    return x, torch.randn(ROWS, N, generator=generator) * 1e-3


def step(layer: nn.Module, seed: int = 0) -> list[Tensor]:
    """y, dx and dw of a forward and a backward pass; the scales move on."""
    weight = next(p for p in layer.parameters() if p.dim() == 2)
    x, dy = (own.detach().to(weight.device) for own in operands(seed))
    x.requires_grad_()
    y = layer(x)
    y.backward(dy)
    assert x.grad is not None
    assert weight.grad is not None
    found = [y.detach(), x.grad, weight.grad]
    layer.zero_grad()
    advance_scaling(layer)
    return found


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert_bits_equal(one, other)


@pytest.mark.parametrize("roles", SUBSETS, ids=lambda roles: "+".join(roles) or "none")
def test_which_products_leave_fp8(roles: tuple[str, ...]) -> None:
    layer = layer_of("tensorwise")
    layer.set_bf16_roles(roles)
    for name in PRODUCTS:
        assert layer.active_recipe.in_fp8(name) == all(LEFT[role] == name for role in roles)
    assert layer.recipe == recipe_named("tensorwise")
    assert ("in BF16" in repr(layer)) == bool(roles)


@pytest.mark.parametrize("products", ["codes", "decoded"])
@pytest.mark.parametrize("spec", SPECS)
def test_the_bits_are_those_of_the_recipe_in_force(spec: str, products: str) -> None:
    """There and back, on three steps each: as a layer that was built so, given the same scales."""
    assert_bits_of_the_recipe_in_force(spec, products, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("spec", SPECS)
def test_the_bits_on_the_card_too(spec: str) -> None:
    assert_bits_of_the_recipe_in_force(spec, "kernels", "cuda")


def assert_bits_of_the_recipe_in_force(spec: str, products: str, device: str) -> None:
    for roles in SUBSETS:
        layer, never = (layer_of(spec, products).to(device) for _ in range(2))
        assert_same(step(layer, 1), step(never, 1))
        layer.set_bf16_roles(roles)
        built = layer_of(layer.active_recipe, products).to(device)
        built.load_state_dict(layer.state_dict())
        assert_same(step(layer, 2), step(built, 2))
        step(never, 2)
        for name, value in never.state_dict().items():  # histories went on, and scales moved
            assert_bits_equal(layer.state_dict()[name], value)
        layer.set_bf16_roles(())
        assert_same(step(layer, 3), step(never, 3))


def test_a_second_policy_does_not_lose_the_history() -> None:
    """The input is delayed in the forward product alone, which the weight takes out of FP8."""
    described = recipe_named("delayed:history=3").to_dict()
    described["input"] = {**described["input"], "transposed": {"kind": "current"}}  # type: ignore[dict-item]
    recipe = recipe_from_dict(described)
    layer, never = layer_of(recipe), layer_of(recipe)
    layer.set_bf16_roles(["weight"])
    step(layer)
    step(never)
    assert float(layer.cast_of("input").scale) != 1
    assert_bits_equal(layer.cast_of("input").scale, never.cast_of("input").scale)


def test_nothing_is_recorded_in_evaluation_nor_in_a_recomputation() -> None:
    layer = layer_of("delayed:history=3")
    layer.set_bf16_roles(OPERANDS)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    layer.eval()
    with torch.no_grad():
        layer(operands()[0])
    for name, value in layer.state_dict().items():
        assert_bits_equal(value, before[name])
    layer.train()
    layer(operands()[0])
    assert_bits_equal(layer.cast_of("weight").amax_history[0], layer.weight.detach().abs().max())
    x, dy = operands(5)
    checkpoint(layer, x, use_reentrant=False).backward(dy)
    seen = torch.cat([x.detach(), operands()[0].detach()]).abs().max()
    assert_bits_equal(layer.cast_of("input").amax_history[0], seen)


@pytest.mark.parametrize("roles", [("input",), ("weight",), OPERANDS], ids="+".join)
def test_what_is_observed_in_bf16_is_what_fp8_would_have_done(roles: tuple[str, ...]) -> None:
    layer, never = layer_of("delayed:history=3"), layer_of("delayed:history=3")
    for own in (layer, never):
        step(own, 0)
    layer.set_bf16_roles(roles)
    for own in (layer, never):
        own(operands(1)[0])  # the weight is cast without being observed
        for role in OPERANDS:
            own.cast_of(role).observe = True
        x, dy = operands(1)
        own(x * 100).backward(dy * 100)
    for role in OPERANDS:
        seen = layer.cast_of(role).statistics
        assert seen == never.cast_of(role).statistics
        assert seen is not None
        assert (seen.overflow > 0.5) == (role != "weight")
    for name, value in never.state_dict().items():
        assert_bits_equal(layer.state_dict()[name], value)


@pytest.mark.parametrize("contexts", [False, True])
def test_a_switch_waits_for_the_backward_pass(contexts: bool) -> None:
    """Forward, switch, backward: the backward pass is that of its forward pass."""
    layer, never = layer_of("tensorwise"), layer_of("tensorwise")
    expected = step(never)
    x, dy = operands()
    if contexts:
        y = checkpoint(layer, x, use_reentrant=False, context_fn=recompute_contexts)
    else:
        y = layer(x)
    layer.set_bf16_roles(OPERANDS)
    y.backward(dy)
    assert x.grad is not None
    assert layer.weight.grad is not None
    assert_same([y.detach(), x.grad, layer.weight.grad], expected)


@pytest.mark.parametrize("spec", SPECS[:4])
def test_a_compiled_layer_follows(spec: str) -> None:
    torch.compiler.reset()
    layer = layer_of(spec)
    other = copy.deepcopy(layer)
    compiled: Any = torch.compile(other, fullgraph=True, backend="aot_eager")
    for seed, roles in enumerate([(), ("weight",), ("input",), ("grad_output",), OPERANDS, ()]):
        for own in (layer, other):
            own.set_bf16_roles(roles)
        assert_same(step(compiled, seed), step(layer, seed))
    for name, value in layer.state_dict().items():
        assert_bits_equal(other.state_dict()[name], value)


@pytest.mark.parametrize("roles", [("input",), ("grad_output",)])
def test_a_frozen_layer_keeps_its_roles(roles: tuple[str, ...]) -> None:
    layer = layer_of("delayed:history=3")
    step(layer)
    layer.set_bf16_roles(roles)
    x = operands(3)[0].detach()
    with torch.no_grad():
        expected = layer.eval()(x)
        frozen = fp8lab.freeze(layer)
        assert_bits_equal(frozen(x), expected)


def test_copies_keep_their_roles_and_restored_layers_have_none() -> None:
    layer = layer_of("tensorwise")
    layer.set_bf16_roles(["weight"])
    twin = copy.deepcopy(layer)
    assert twin.bf16_roles == {"weight"}
    assert_same(step(twin), step(layer))
    plain = fp8lab.restore(layer)
    assert type(plain) is nn.Linear
    assert not hasattr(plain, "bf16_roles")


def test_an_unknown_role_is_refused() -> None:
    layer = layer_of("tensorwise")
    with pytest.raises(UserError, match="role 'output': accepted: input, weight, grad_output"):
        layer.set_bf16_roles(["weight", "output"])
    assert layer.bf16_roles == set()
