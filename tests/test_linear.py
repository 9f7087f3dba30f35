"""The FP8 linear layer: its three products against torch and against the oracle's own operands."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fp8lab.emulation import casting, scaling
from fp8lab.formats import E4M3, E5M2, Float8Format
from fp8lab.linear import Fp8Linear, OperandCast, advance_scaling, operand_casts
from fp8lab.recipes import (
    BlockScaling,
    DelayedScaling,
    Operand,
    StaticScaling,
    recipe_named,
)
from fp8lab.testing import assert_bits_equal, to_numpy, to_torch

ROWS, K, N = 20, 136, 144

Decode = Callable[[Tensor, Float8Format], Tensor]


def layer_of(spec: str, *, bias: bool = False) -> Fp8Linear:
    layer = Fp8Linear(K, N, recipe_named(spec), bias=bias)
    nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(1))
    return layer


def operands(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, K, generator=generator).requires_grad_()
    return x, torch.randn(ROWS, N, generator=generator) * 1e-3


def test_representable_operands_give_torchs_bits() -> None:
    rng = np.random.default_rng(0)
    x, w, dy = (
        torch.from_numpy(rng.integers(-3, 4, shape).astype(np.float32))
        for shape in ((4, 5, K), (N, K), (4, 5, N))
    )
    bias = torch.arange(N, dtype=torch.float32)
    layer = Fp8Linear(K, N, recipe_named("static"))
    with torch.no_grad():
        layer.weight.copy_(w)
        assert layer.bias is not None
        layer.bias.copy_(bias)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    plain = nn.Linear(K, N)
    plain.load_state_dict({"weight": w, "bias": bias})
    y = layer(ours)
    expected = plain(theirs)
    y.backward(dy)
    expected.backward(dy)
    for found, wanted in (
        (y, expected),
        (ours.grad, theirs.grad),
        (layer.weight.grad, plain.weight.grad),
        (layer.bias.grad, plain.bias.grad),
    ):
        assert found is not None
        assert wanted is not None
        assert_bits_equal(found, wanted)


def per_tensor(x: Tensor, fmt: Float8Format) -> Tensor:
    array = to_numpy(x)
    scale = scaling.scale_from_amax(scaling.amax(array), fmt)
    codes = casting.quantize(array, fmt, scale=scale)
    return to_torch(casting.dequantize(codes, inverse_scale=np.float32(1) / scale))


def blocks_of_128(x: Tensor, fmt: Float8Format) -> Tensor:
    codes, inverse = scaling.quantize_blocks(to_numpy(x), fmt)
    wide = scaling.expand_blocks(inverse, (1, 128), x.shape)
    return to_torch(casting.dequantize(codes, inverse_scale=wide))


def to_bfloat16(x: Tensor, fmt: Float8Format) -> Tensor:
    return x.bfloat16().float()


def static_1(x: Tensor, fmt: Float8Format) -> Tensor:
    return to_torch(casting.dequantize(casting.quantize(to_numpy(x), fmt)))


@pytest.mark.parametrize(
    ("spec", "decode"),
    [
        ("current", per_tensor),
        ("blockwise", blocks_of_128),
        ("bf16", to_bfloat16),
        ("static", static_1),
        ("delayed", static_1),  # the first step's scale is 1
    ],
)
def test_three_products_of_the_oracles_operands(spec: str, decode: Decode) -> None:
    layer = layer_of(spec)
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


def test_delayed_scaling_uses_the_step_before_and_keeps_state() -> None:
    layer = layer_of("delayed:history=4")
    x, dy = operands()
    layer(x).backward(dy)
    cast = layer.casts["input"]
    assert isinstance(cast, OperandCast)
    largest = scaling.amax(to_numpy(x))
    assert float(cast.scale) == 1
    assert_bits_equal(cast.amax_history[0], largest)

    advance_scaling(layer)
    expected = scaling.scale_from_amax(largest, E4M3)
    assert_bits_equal(cast.scale, expected)
    assert cast.amax_history.tolist() == [0, 0, 0, float(largest)]
    codes = casting.quantize(to_numpy(x), E4M3, scale=expected)
    assert_bits_equal(cast(x)[0], casting.dequantize(codes, inverse_scale=np.float32(1) / expected))

    state = layer.state_dict()
    assert {"casts.input.scale", "casts.grad_output.amax_history"} <= set(state)
    fresh = layer_of("delayed:history=4")
    fresh.load_state_dict(state)
    assert_bits_equal(fresh(x), layer(x))


def test_evaluation_leaves_the_history_alone() -> None:
    layer = layer_of("delayed").eval()
    x, _ = operands()
    with torch.no_grad():
        layer(x)
    assert all(not c.amax_history.any() for _, c in operand_casts(layer))


def test_a_backward_uses_its_own_forwards_scale() -> None:
    layer = layer_of("delayed")
    x, dy = operands()
    layer(x).backward(dy)
    expected = layer.weight.grad
    assert expected is not None

    again = layer_of("delayed")
    y = again(x)
    first = again.casts["input"]
    assert isinstance(first, OperandCast)
    first.advance()  # the state moves on between forward and backward
    y.backward(dy)
    assert again.weight.grad is not None
    assert_bits_equal(again.weight.grad, expected)


def test_the_scale_follows_what_a_layer_sees() -> None:
    layer = layer_of("delayed:history=2")
    cast = layer.casts["input"]
    assert isinstance(cast, OperandCast)
    seen = []
    for factor in (1.0, 8.0, 1.0, 1.0):
        x, dy = operands()
        layer(x * factor).backward(dy)
        advance_scaling(layer)
        seen.append(float(cast.scale))
    assert seen[0] == 8 * seen[1]
    assert seen[1] == seen[2]
    assert seen[3] == seen[0]


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


def test_an_empty_batch_and_a_single_row() -> None:
    for spec in ("current", "blockwise", "delayed"):
        layer = layer_of(spec)
        assert layer(torch.zeros(0, K)).shape == (0, N)
        assert layer(torch.ones(K)).shape == (N,)


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
            here.advance()
            there.advance()
            for name, buffer in here.named_buffers():
                assert_bits_equal(there.get_buffer(name), buffer)


def test_bad_input_is_refused() -> None:
    layer = layer_of("current")
    with pytest.raises(TypeError, match=r"x has dtype torch.bfloat16; accepted: float32"):
        layer(torch.zeros(2, K, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"x has shape \(2, 3\); accepted: \(..., 136\)"):
        layer(torch.zeros(2, 3))


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
