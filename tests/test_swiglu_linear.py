"""gate and up, SwiGLU, down, joined: the bits of the layers one after the other."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.utils.checkpoint import checkpoint

import fp8lab
from fp8lab import ops_swiglu
from fp8lab.auditing import audit
from fp8lab.errors import UserError
from fp8lab.linear import Fp8Linear, advance_scaling, recompute_contexts
from fp8lab.recipes import Operand, Recipe, StaticScaling
from fp8lab.swiglu import SwiGlu, swiglu, swiglu_linear
from fp8lab.testing import assert_bits_equal

STATIC = Recipe(
    "static",
    Operand("E4M3", StaticScaling(4.0)),
    Operand("E4M3", StaticScaling(16.0)),
    Operand("E5M2", StaticScaling(64.0)),
)
JOINED = ["delayed:history=2", "blockwise", STATIC]
OTHERS = ["tensorwise", "rowwise", "mx", "bf16", "hybrid", "torchao_rowwise_with_gw_hp"]


def name_of(recipe: Any) -> str:
    return recipe if isinstance(recipe, str) else str(recipe.name)


def pair(
    recipe: Any, *, features: int = 128, bias: bool = True, dtype: torch.dtype = torch.float32,
    device: str = "cpu", products: str = "codes",
) -> tuple[Any, Any]:  # fmt: skip
    """The same two layers twice."""
    torch.manual_seed(0)
    part = SwiGlu(nn.Linear(64, 2 * features, bias=bias), nn.Linear(features, 48, bias=bias))
    model = nn.ModuleDict({"part": part.to(dtype)}).to(device)
    fp8lab.convert(model, recipe, products=products)
    return model["part"], copy.deepcopy(model)["part"]


def batch(seed: int, device: str = "cpu", rows: int = 24) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, rows, 64, generator=generator) * 3
    dy = torch.randn(2, rows, 48, generator=generator)
    return x.to(device, torch.bfloat16), dy.to(device, torch.bfloat16)


def plain(part: Any, x: Tensor) -> Any:
    return part.down(swiglu(part.gate_up(x)))


def assert_same(one: nn.Module, two: nn.Module) -> None:
    for name, value in one.state_dict().items():
        assert_bits_equal(two.state_dict()[name], value)
    for first, second in zip(one.parameters(), two.parameters(), strict=True):
        assert (first.grad is None) == (second.grad is None)
        if first.grad is not None and second.grad is not None:
            assert_bits_equal(second.grad, first.grad)


def check_steps(part: Any, other: Any, run: Any, device: str = "cpu", rows: int = 24) -> None:
    """Steps of two microbatches: results, gradients, amaxes and scales."""
    for step in range(3):
        for micro in range(2):
            x, dy = batch(10 * step + micro, device, rows)
            ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
            y, z = run(ours), plain(other, theirs)
            assert_bits_equal(y, z)
            y.backward(dy)
            z.backward(dy)
            assert ours.grad is not None
            assert theirs.grad is not None
            assert_bits_equal(ours.grad, theirs.grad)
            assert_same(part, other)
        for model in (part, other):
            advance_scaling(model)


@contextmanager
def counted() -> Iterator[list[str]]:
    """What is written inside, of SwiGLU's results and gradients."""
    seen: list[str] = []
    plain_forms = ops_swiglu.swiglu, ops_swiglu.swiglu_grad
    lock = threading.Lock()

    def counting(function: Any) -> Any:
        def call(*args: Any) -> Any:
            with lock:
                seen.append(function.__name__)
            return function(*args)

        return call

    ops_swiglu.swiglu, ops_swiglu.swiglu_grad = map(counting, plain_forms)
    try:
        yield seen
    finally:
        ops_swiglu.swiglu, ops_swiglu.swiglu_grad = plain_forms


@pytest.mark.parametrize("recipe", [*JOINED, *OTHERS], ids=name_of)
def test_joined_is_one_after_the_other(recipe: Any) -> None:
    part, other = pair(recipe)
    check_steps(part, other, part)


@pytest.mark.parametrize("products", ["codes", "decoded"])
def test_other_types_sizes_and_products(products: str) -> None:
    part, other = pair("delayed", features=80, dtype=torch.bfloat16, products=products)
    check_steps(part, other, part, rows=5)


@pytest.mark.parametrize("recipe", JOINED, ids=name_of)
def test_kernels_make_the_operand_as_they_cast_it(recipe: Any, device: str) -> None:
    part, other = pair(recipe, device=device, bias=False, products="kernels")
    with counted() as written:
        x, dy = batch(0, device, 8)
        y = part(x.requires_grad_())
        y.backward(dy)
    assert written == []
    ours = x.grad
    x.grad = None
    z = plain(other, x)
    z.backward(dy)
    assert_bits_equal(y, z)
    assert ours is not None
    assert x.grad is not None
    assert_bits_equal(ours, x.grad)
    assert_same(part, other)


def test_what_is_written_where_it_is_not_joined(device: str) -> None:
    part, _ = pair("tensorwise", device=device, bias=False, products="kernels")
    x, dy = batch(0, device, 8)
    with counted() as written:
        part(x).backward(dy)
    assert written == ["swiglu", "swiglu_grad"]


@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
def test_frozen_parts_and_no_gradients(recipe: str) -> None:
    for frozen in (["gate_up"], ["down"], ["gate_up", "down"]):
        part, other = pair(recipe)
        for model in (part, other):
            for name in frozen:
                getattr(model, name).requires_grad_(False)
        x, dy = batch(1)
        for needs in (False, True):
            if not needs and len(frozen) == 2:
                continue
            ours, theirs = (x.clone().requires_grad_(needs) for _ in range(2))
            part(ours).backward(dy)
            plain(other, theirs).backward(dy)
            assert_same(part, other)
            if needs:
                assert ours.grad is not None
                assert theirs.grad is not None
                assert_bits_equal(ours.grad, theirs.grad)
    part, other = pair(recipe)
    with torch.no_grad():
        assert_bits_equal(part(x), plain(other, x))
    for model in (part, other):
        model.eval()
    assert_bits_equal(part(x), plain(other, x))
    assert_same(part, other)
    assert_bits_equal(fp8lab.freeze(copy.deepcopy(part))(x), part(x))


def test_recomputation_records_once() -> None:
    part, other = pair("delayed:history=2")
    for step in range(2):
        x, dy = batch(step)
        y = checkpoint(part, x, use_reentrant=False, context_fn=recompute_contexts)
        z = checkpoint(plain, other, x, use_reentrant=False, context_fn=recompute_contexts)
        for model in (part, other):
            advance_scaling(model)  # between forward and backward: scales have moved on
        y.backward(dy)
        z.backward(dy)
        assert_bits_equal(y, z)
        assert_same(part, other)


def test_gradients_accumulate_in_float32() -> None:
    part, other = pair("delayed", dtype=torch.bfloat16, bias=False)
    for model in (part, other):
        for weight in model.parameters():
            weight.main_grad = torch.ones(weight.shape)
    x, dy = batch(0)
    part(x).backward(dy)
    plain(other, x).backward(dy)
    for one, two in zip(part.parameters(), other.parameters(), strict=True):
        assert one.grad is None
        assert_bits_equal(one.main_grad, two.main_grad)


def test_under_autocast_and_in_roles_of_bf16() -> None:
    part, other = pair("delayed")
    for model in (part, other):
        model.down.set_bf16_roles({"input"})
        model.gate_up.set_bf16_roles({"grad_output"})
    x, dy = batch(0)
    with torch.autocast("cpu", torch.bfloat16):
        y, z = part(x.float()), plain(other, x.float())
    assert y.dtype == torch.bfloat16
    y.backward(dy)
    z.backward(dy)
    assert_bits_equal(y, z)
    assert_same(part, other)


def test_an_audit_sees_every_cast(device: str) -> None:
    reports = []
    for form in (SwiGlu.forward, plain):
        part, _ = pair("delayed", device=device, products="kernels")
        x, dy = batch(0, device, 8)
        with audit(model=part) as report:
            form(part, x).backward(dy)
        reports.append(str(report))
    assert reports[0] == reports[1]


def test_an_observed_cast_is_seen() -> None:
    part, other = pair("delayed")
    x, dy = batch(0)
    for model, form in ((part, SwiGlu.forward), (other, plain)):
        for layer, role in ((model.down, "input"), (model.gate_up, "grad_output")):
            layer.cast_of(role).observe = True
        form(model, x).backward(dy)
    for name, role in (("down", "input"), ("gate_up", "grad_output")):
        one, two = (getattr(model, name).cast_of(role).statistics for model in (part, other))
        assert one is not None
        assert one == two


def test_a_hook_on_a_layer_is_called() -> None:
    part, other = pair("delayed")
    called: list[Any] = []
    part.down.register_forward_hook(lambda *given: called.append(given[1][0].shape))
    check_steps(part, other, part)
    assert called == [(2, 24, 128)] * 6


class Twice(Fp8Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def of_its_own(layer: Any, called: list[Any]) -> Any:
    forward = layer.forward

    def own(x: Tensor) -> Any:
        called.append(None)
        return forward(x)

    layer.forward = own


HOOKS: dict[str, Any] = {
    "full_backward_pre": lambda layer, called: layer.register_full_backward_pre_hook(
        lambda *given: called.append(given)
    ),
    "full_backward": lambda layer, called: layer.register_full_backward_hook(
        lambda *given: called.append(given)
    ),
    "all modules, forward": lambda layer, called: modules.register_module_forward_hook(
        lambda module, *_: called.append(None) if module is layer else None
    ),
    "all modules, forward_pre": lambda layer, called: modules.register_module_forward_pre_hook(
        lambda module, *_: called.append(None) if module is layer else None
    ),
    "all modules, backward": lambda layer, called: modules.register_module_full_backward_hook(
        lambda module, *_: called.append(None) if module is layer else None
    ),
    "its own forward": of_its_own,
}


@pytest.mark.parametrize("register", HOOKS.values(), ids=HOOKS)
@pytest.mark.parametrize("name", ["gate_up", "down"])
def test_whoever_waits_for_a_layer_is_called(register: Any, name: str) -> None:
    part, other = pair("delayed")
    called: list[Any] = []
    hook = register(getattr(part, name), called)
    try:
        check_steps(part, other, part)
    finally:
        if hook is not None:
            hook.remove()
    assert len(called) == 6


@pytest.mark.parametrize("name", ["gate_up", "down"])
def test_a_subclass_has_its_own_forward(name: str) -> None:
    part, other = pair("delayed")
    for model in (part, other):
        getattr(model, name).__class__ = Twice
    check_steps(part, other, part)


def test_layers_that_do_not_fit_and_that_are_not_fp8() -> None:
    with pytest.raises(UserError, match="gate_up has 96 output features; accepted: 128"):
        SwiGlu(nn.Linear(64, 96), nn.Linear(64, 32))
    for layers, name in (
        ((nn.Sequential(nn.Linear(64, 64)), nn.Linear(32, 32)), "gate_up"),
        ((nn.Linear(64, 64), nn.Identity()), "down"),
    ):
        with pytest.raises(UserError, match=rf"{name} is \w+; accepted: torch.nn.Linear"):
            SwiGlu(*layers)
    model = nn.ModuleDict({"one": nn.Linear(64, 96), "two": nn.Linear(64, 32)})
    message = "has 96 output features; accepted: 128, twice the 64 input features of down"
    with pytest.raises(UserError, match=f"gate_up {message}"):
        swiglu_linear(model["one"], model["two"], torch.ones(2, 64))
    fp8lab.convert(model, "delayed")
    with pytest.raises(UserError, match=rf"gate_up \(layer 'one'\) {message}"):
        swiglu_linear(model["one"], model["two"], torch.ones(2, 64))
    for shape in ((4, 7), (7,), ()):
        with pytest.raises(UserError, match=r"gate_up has shape \(.*\); accepted: \(\.\.\., 2F\)"):
            swiglu(torch.ones(shape))
    assert swiglu(torch.ones(4, 0)).shape == (4, 0)
    part = SwiGlu(nn.Linear(64, 64), nn.Linear(32, 48)).to(torch.bfloat16)
    x, _ = batch(0)
    assert_bits_equal(part(x), plain(part, x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of the compiler's parts
@pytest.mark.parametrize("recipe", [*JOINED, "tensorwise", "bf16"], ids=name_of)
def test_compiled(recipe: Any) -> None:
    torch.compiler.reset()
    part, other = pair(recipe, bias=False)
    run: Any = torch.compile(part, fullgraph=True, backend="aot_eager")
    check_steps(part, other, run)
    with torch.no_grad():
        x, _ = batch(5)
        assert_bits_equal(run(x), plain(other, x))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("recipe", [*JOINED, "tensorwise"], ids=name_of)
@pytest.mark.parametrize("features", [256, 80])
def test_on_the_card(recipe: Any, features: int) -> None:
    """Whole tiles and ragged ones; eager and compiled; the oracle's bits."""
    torch.compiler.reset()
    there, again = pair(recipe, features=features, device="cuda", bias=False)
    here, _ = pair(recipe, features=features, bias=False)
    check_steps(there, again, there, "cuda", 128)
    for step in range(3):
        for micro in range(2):
            x, dy = batch(10 * step + micro, rows=128)
            here(x).backward(dy)
        advance_scaling(here)
    assert_same(here, there)
    part, other = pair(recipe, features=features, device="cuda", bias=False)
    check_steps(part, other, torch.compile(part, fullgraph=True), "cuda", 128)
