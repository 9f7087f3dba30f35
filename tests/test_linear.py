"""The FP8 linear layer: its three products against torch and against the oracle's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fp8lab.emulation import casting, scaling
from fp8lab.errors import UserError
from fp8lab.formats import E4M3, E5M2, Float8Format
from fp8lab.linear import Fp8Linear, OperandCast, advance_scaling
from fp8lab.recipes import (
    BlockScaling,
    DelayedScaling,
    Operand,
    Recipe,
    RowScaling,
    StaticScaling,
    recipe_named,
)
from fp8lab.testing import assert_bits_equal, to_numpy, to_torch
from fp8lab.testing.linear_reference import PRESETS as REFERENCES
from fp8lab.testing.linear_reference import reference

ROWS, K, N = 20, 144, 160

Decode = Callable[[Tensor, Float8Format], Tensor]


def layer_of(
    spec: str, *, bias: bool = False, products: str = "codes", **options: Any
) -> Fp8Linear:
    layer = Fp8Linear(K, N, recipe_named(spec), bias=bias, products=products, **options)
    nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(1))
    return layer


def operands(seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, K, generator=generator).to(dtype).requires_grad_()
    return x, (torch.randn(ROWS, N, generator=generator) * 1e-3).to(dtype)


@pytest.mark.parametrize("products", ["codes", "decoded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_representable_operands_give_torchs_bits(products: str, dtype: torch.dtype) -> None:
    """Small integers: every product, sum and result is exact in each of the types."""
    rng = np.random.default_rng(0)
    x, w, dy = (
        torch.from_numpy(rng.integers(-1, 2, shape).astype(np.float32)).to(dtype)
        for shape in ((4, 5, K), (N, K), (4, 5, N))
    )
    bias = torch.arange(N).remainder(5).to(dtype)
    layer = Fp8Linear(K, N, recipe_named("static"), products=products, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(w)
        layer.bias.copy_(bias)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    plain = nn.Linear(K, N, dtype=dtype)
    plain.load_state_dict({"weight": w, "bias": bias})
    y = layer(ours)
    expected = plain(theirs)
    y.backward(dy)
    expected.backward(dy)
    assert y.dtype == dtype
    for found, wanted in (
        (y, expected),
        (ours.grad, theirs.grad),
        (layer.weight.grad, plain.weight.grad),
        (layer.bias.grad, plain.bias.grad),
    ):
        assert found is not None
        assert wanted is not None
        assert_bits_equal(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", REFERENCES)
def test_three_products_of_codes_are_the_oracles(spec: str, dtype: torch.dtype) -> None:
    layer = layer_of(spec, bias=True, dtype=dtype)
    nn.init.normal_(layer.bias, generator=torch.Generator().manual_seed(2))
    x, dy = operands(dtype=dtype)
    y = layer(x)
    y.backward(dy)
    expected = reference(
        spec,
        to_numpy(x),
        to_numpy(layer.weight),
        to_numpy(dy),
        bias=to_numpy(layer.bias),
        out=to_numpy(x).dtype,
    )
    assert_bits_equal(y, expected.y)
    assert_bits_equal(x.grad, expected.dx)
    dw: Any = expected.dw
    if dw is None:
        dw = (dy.bfloat16().float().t() @ x.detach().bfloat16().float()).to(dtype)
    assert_bits_equal(layer.weight.grad, dw)


@pytest.mark.parametrize("spec", REFERENCES)
def test_any_number_of_rows(spec: str) -> None:
    """No rows, one, and a third dimension."""
    layer = layer_of(spec)
    assert layer(torch.zeros(0, K)).shape == (0, N)
    assert layer(torch.ones(K)).shape == (N,)
    x, _ = operands()
    rows = layer(x)
    assert_bits_equal(layer(x.reshape(4, 5, K)).reshape(ROWS, N), rows)


def per_tensor(x: Tensor, fmt: Float8Format) -> Tensor:
    array = to_numpy(x)
    scale = scaling.scale_from_amax(scaling.amax(array), fmt)
    codes = casting.quantize(array, fmt, scale=scale)
    return to_torch(casting.dequantize(codes, inverse_scale=np.float32(1) / scale))


def to_bfloat16(x: Tensor, fmt: Float8Format) -> Tensor:
    return x.bfloat16().float()


def static_1(x: Tensor, fmt: Float8Format) -> Tensor:
    return to_torch(casting.dequantize(casting.quantize(to_numpy(x), fmt)))


@pytest.mark.parametrize(
    ("spec", "decode"),
    [
        ("current", per_tensor),
        ("bf16", to_bfloat16),
        ("static", static_1),
        ("delayed", static_1),  # the first step's scale is 1
    ],
)
def test_decoded_products_of_the_oracles_operands(spec: str, decode: Decode) -> None:
    layer = layer_of(spec, products="decoded")
    x, dy = operands()
    y = layer(x)
    y.backward(dy)

    def along(t: Tensor, fmt: Float8Format, dim: int) -> Tensor:
        """Decoded for a sum over `dim`: blocks lie along it."""
        t = t.detach()
        return decode(t, fmt) if dim == 1 else decode(t.t().contiguous(), fmt).t()

    w = layer.weight
    assert x.grad is not None
    assert w.grad is not None
    assert_bits_equal(y, along(x, E4M3, 1) @ along(w, E4M3, 1).t())
    assert_bits_equal(x.grad, along(dy, E5M2, 1) @ along(w, E4M3, 0))
    assert_bits_equal(w.grad, along(dy, E5M2, 0).t() @ along(x, E4M3, 0))


@pytest.mark.parametrize("spec", ["current", "delayed", "static", "blockwise", "bf16"])
def test_statistics_count_what_a_cast_did(spec: str) -> None:
    layer = layer_of(spec)
    x = torch.randn(ROWS, K, generator=torch.Generator().manual_seed(5)) * 300
    x[0] = 0
    x[1] = 1e-6
    cast = layer.casts["input"]
    assert isinstance(cast, OperandCast)
    cast.observe = True
    decoded, _ = cast(x)
    found = cast.statistics
    assert found is not None
    filled = x != 0
    assert found.amax == float(x.abs().max())
    assert found.underflow == float((filled & (decoded == 0)).sum()) / float(filled.sum())
    if spec in ("static", "delayed"):
        assert found.scale == 1
        assert found.overflow == float((x.abs() > 464).sum()) / x.numel() > 0
        assert found.underflow == K / float(filled.sum())
    else:
        assert found.overflow == 0


@pytest.mark.gpu
@pytest.mark.parametrize("spec", ["bf16", "static", "current", "delayed:history=3", "blockwise"])
def test_operands_on_the_card_are_the_oracles(spec: str, device: str) -> None:
    """Three steps of each cast: the card's decoded operands and state against the CPU's."""
    for role in ("input", "grad_output"):
        operand = recipe_named(spec).operand(role)
        here, there = OperandCast(operand), OperandCast(operand).to(device)
        for step in range(3):
            x = torch.randn(ROWS, 300, generator=torch.Generator().manual_seed(step))
            x *= 2.0 ** (5 * step)
            x[3] = 0
            x[4, :7] = torch.tensor([1e-30, 1e30, -0.0, 1e-9, 3e38, -1e-40, 460.0])
            for found, expected in zip(there(x.to(device)), here(x), strict=True):
                assert_bits_equal(found, expected)
            advance_scaling(here)
            advance_scaling(there)
            for name, buffer in here.named_buffers():
                assert_bits_equal(there.get_buffer(name), buffer)


def test_bad_input_is_refused() -> None:
    layer = layer_of("current")
    with pytest.raises(TypeError, match=r"x has dtype torch.int64; accepted: float32, bfloat16, f"):
        layer(torch.zeros(2, K, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"x has shape \(2, 3\); accepted: \(..., 144\)"):
        layer(torch.zeros(2, 3))
    with pytest.raises(UserError, match="products is 'fast'; accepted: codes, kernels, decoded"):
        layer_of("current", products="fast")
    with pytest.raises(UserError, match="the forward product has blocks of 64; the FP8 product"):
        layer_of("blockwise:length=64")
    mixed = Recipe("mixed", Operand("E4M3", BlockScaling(32)), Operand("E4M3", BlockScaling()))
    with pytest.raises(UserError, match="the forward product has blocks of 32, 128"):
        Fp8Linear(K, N, mixed)
    fnuz = Recipe("fnuz", Operand("E4M3FNUZ"))
    with pytest.raises(UserError, match="input is E4M3FNUZ; the FP8 product takes E4M3 and E5M2"):
        Fp8Linear(K, N, fnuz)
    assert Fp8Linear(K, N, fnuz, products="decoded")(torch.ones(1, K)).shape == (1, N)


def test_block_lengths_other_than_128() -> None:
    cast = OperandCast(Operand("E4M3", BlockScaling(length=32)))
    x, _ = operands()
    codes, inverse = scaling.quantize_blocks(to_numpy(x), E4M3, block=(1, 32))
    wide = scaling.expand_blocks(inverse, (1, 32), x.shape)
    assert_bits_equal(cast(x)[0], casting.dequantize(codes, inverse_scale=wide))
    assert not hasattr(OperandCast(Operand("E4M3", BlockScaling())), "scale")
    assert OperandCast(Operand("E4M3", DelayedScaling(history=5))).amax_history.shape == (5,)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_overflow_is_what_the_non_saturating_cast_cannot_hold(fmt: Float8Format) -> None:
    edge = np.float32(fmt.overflow_edge)
    near = [np.nextafter(edge, np.float32(0)), edge, np.nextafter(edge, np.float32(np.inf))]
    x = torch.tensor(np.array([near], np.float32))
    cast = OperandCast(Operand(fmt.name, StaticScaling(1.0)))
    cast.observe = True
    cast(x)
    assert cast.statistics is not None
    lost = ~np.isfinite(casting.dequantize(casting.quantize(to_numpy(x), fmt, overflow="ieee")))
    assert cast.statistics.overflow == lost.sum() / 3


def test_another_policy_for_the_transposed_layout() -> None:
    """Each of the three products with the policy that it was given, in both modes."""
    operand = Operand("E4M3", RowScaling(), transposed=StaticScaling(4.0))
    x, _ = operands()
    found = OperandCast(operand).cast(x)
    codes, inverse = scaling.quantize_blocks(to_numpy(x), E4M3, block=(1, None), power_of_two=False)
    assert found.plain is not None
    assert found.transposed is not None
    assert_bits_equal(found.plain.codes, codes)
    assert_bits_equal(found.plain.inverse, inverse)
    assert_bits_equal(found.transposed.codes, casting.quantize(to_numpy(x).T, E4M3, scale=4.0))
    assert float(found.transposed.inverse) == 0.25
    for products in ("codes", "decoded"):
        layer = Fp8Linear(K, N, Recipe("two", operand, operand, operand), products=products)
        layer(x).backward(torch.ones(ROWS, N))
        assert layer.weight.grad is not None


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("spec", "roles", "products"),
    [
        ("bf16", (), "codes"),
        ("delayed", ("input",), "codes"),
        ("delayed", ("grad_output",), "codes"),
        ("delayed", (), "decoded"),
        ("tensorwise", (), "codes"),
    ],
)
def test_autocast_rounds_the_input_and_nothing_else(
    spec: str, roles: tuple[str, ...], products: str, compiled: bool
) -> None:
    assert_autocast_rounds_the_input_alone(spec, roles, products, torch.bfloat16, compiled=compiled)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("spec", "roles"), [("bf16", ()), ("delayed", ("input",))])
def test_autocast_on_the_card(spec: str, roles: tuple[str, ...], dtype: torch.dtype) -> None:
    assert_autocast_rounds_the_input_alone(spec, roles, "codes", dtype, device="cuda")


def assert_autocast_rounds_the_input_alone(
    spec: str,
    roles: tuple[str, ...],
    products: str,
    dtype: torch.dtype,
    *,
    device: str = "cpu",
    compiled: bool = False,
) -> None:
    """y, and with the backward pass under autocast too, dx, dw and db."""
    found = []
    for autocast in (True, False):
        if compiled:
            torch.compiler.reset()
        layer = layer_of(spec, bias=True, products=products)
        nn.init.normal_(layer.bias, generator=torch.Generator().manual_seed(2))
        layer.set_bf16_roles(roles)
        layer.to(device)
        run: Any = torch.compile(layer, backend="aot_eager") if compiled else layer
        x, dy = (given.detach().to(device) for given in operands())
        x = x.requires_grad_() if autocast else x.to(dtype).requires_grad_()
        with torch.autocast(device, dtype, enabled=autocast):
            y = run(x)
            y.backward(dy.to(dtype))
        assert x.grad is not None
        found.append([y.detach(), x.grad.to(dtype), layer.weight.grad, layer.bias.grad])
    for one, other in zip(*found, strict=True):
        assert one is not None
        assert other is not None
        assert_bits_equal(one, other)
    if spec == "bf16" and device == "cpu":
        wide = x.detach().float() @ layer.weight.detach().to(torch.bfloat16).float().t()
        assert_bits_equal(found[0][0], (wide + layer.bias.detach()).to(dtype))
