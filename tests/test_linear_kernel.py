"""The layer on the kernels: in the interpreter where no order of accumulation matters, and on a GPU
with everything, against the oracle's layer on the CPU.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8lab
from fp8lab.gradients import LossScaler, UpdateStep, accumulate_in_float32
from fp8lab.linear import Fp8Linear, advance_scaling, recompute_contexts
from fp8lab.optimizer import AdamW
from fp8lab.recipes import recipe_named
from fp8lab.testing import assert_bits_equal, to_numpy
from fp8lab.testing.linear_reference import PRESETS as SPECS
from fp8lab.testing.products import order_free

DTYPES = [torch.float32, torch.bfloat16]


def layer_of(spec: str, sizes: tuple[int, int], products: str, dtype: torch.dtype) -> Fp8Linear:
    return Fp8Linear(*sizes, recipe_named(spec), bias=True, products=products, dtype=dtype)


def ternary(seed: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """-1, 0 and 1: whatever the scale, all codes of a block have one magnitude."""
    numbers = np.random.default_rng(seed).integers(-1, 2, shape)
    return torch.from_numpy(numbers).to(dtype)


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [*((spec, torch.float32) for spec in SPECS), ("tensorwise", torch.bfloat16)],
)
def test_interpreted_kernels_give_the_oracles_bits(
    spec: str, dtype: torch.dtype, device: str
) -> None:
    rows, k, n = 24, 144, 48
    weight, bias = ternary(1, (n, k), dtype), ternary(2, (n,), dtype)
    found = []
    for products, place in (("codes", "cpu"), ("kernels", device)):
        layer = layer_of(spec, (k, n), products, dtype)
        with torch.no_grad():
            layer.weight.copy_(weight)
            layer.bias.copy_(bias)
        layer.to(place)
        for step in range(2):
            x = ternary(3 + step, (rows, k), dtype).to(place).requires_grad_()
            y = layer(x)
            y.backward(ternary(5 + step, (rows, n), dtype).to(place))
            advance_scaling(layer)
        found.append((y, x.grad, layer.weight.grad, layer.bias.grad, *layer.buffers()))
        plain = layer.cast_of("input").cast(x).plain
        _, codes = layer.weight_codes(layer.weight)
        assert plain is not None
        assert codes is not None
        if products == "codes":
            order_free(to_numpy(plain.codes), to_numpy(codes.codes).T)
    for one, two in zip(*found, strict=True):
        assert one is not None
        assert two is not None
        assert_bits_equal(two, one)


def networks(spec: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    """The same model on the CPU and on the card; nothing but FP8 layers and ReLU has to agree."""
    torch.manual_seed(0)
    here = nn.Sequential(
        nn.Linear(144, 272, bias=False), nn.ReLU(), nn.Linear(272, 160, bias=False)
    ).to(dtype)
    fp8lab.convert(here, spec)
    return here, copy.deepcopy(here).cuda()


def batch(seed: int, dtype: torch.dtype = torch.float32, rows: int = 200) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 144, generator=generator) * 2.0 ** (seed % 5)
    x[rows // 2] = 0 if rows > 1 else 1
    dy = torch.randn(rows, 160, generator=generator) * 1e-3
    return x.to(dtype), dy.to(dtype)


def assert_same(here: nn.Module, there: nn.Module, *, weight_grads: bool = True) -> None:
    for one, two in zip(here.state_dict().values(), there.state_dict().values(), strict=True):
        assert_bits_equal(two, one)
    for first, second in zip(here.parameters(), there.parameters(), strict=True):
        if first.grad is not None and second.grad is not None and weight_grads:
            assert_bits_equal(second.grad, first.grad)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 37, 200])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", SPECS)
def test_the_card_gives_the_oracles_bits(spec: str, dtype: torch.dtype, rows: int) -> None:
    here, there = networks(spec, dtype)
    in_fp8 = not spec.endswith("gw_hp")
    for step in range(3):
        x, dy = batch(step, dtype, rows)
        results = []
        for model in (here, there):
            device = next(model.parameters()).device
            ours = x.detach().to(device).requires_grad_()
            y = model(ours)
            y.backward(dy.to(device))
            results.append((y, ours.grad))
            advance_scaling(model)
        for one, two in zip(*results, strict=True):
            assert one is not None
            assert two is not None
            assert_bits_equal(two, one)
        assert_same(here, there, weight_grads=in_fp8)


@contextmanager
def quiet_host(wanted: bool) -> Iterator[None]:
    """Inside, waiting for the card is an error."""
    if not wanted:
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode warns of itself
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("spec", ["tensorwise", "delayed:history=2", "rowwise", "blockwise", "mx"])
@pytest.mark.parametrize("main_grad", [False, True])
def test_whole_steps_on_the_card_are_the_cpus(spec: str, main_grad: bool) -> None:
    """Microbatches, loss scale, clip, a step that is skipped, AdamW: every bit of the state."""
    here, there = networks(spec)
    updates = []
    for model in (here, there):
        if main_grad:
            accumulate_in_float32(model)
        optimizer = AdamW(model.parameters(), capturable=next(model.parameters()).is_cuda)
        scaler = LossScaler(1024.0, dynamic=True, interval=2)
        updates.append(UpdateStep(model, optimizer, scaler=scaler, clip_norm=0.5))
    for step in range(5):
        skips = []
        for model, update in zip((here, there), updates, strict=True):
            update.zero_grad()
            device = next(model.parameters()).device
            for micro in range(2):
                x, dy = batch(10 * step + micro)
                if step == 2 and micro == 1:
                    dy[5, 7] = float("nan")
                y = model(x.to(device))
                y.backward(dy.to(device) * update.scaler.scale)
            with quiet_host(device.type == "cuda" and step > 2):
                summary = update()
            skips.append((int(summary.skip), float(summary.norm), float(update.scaler.scale)))
        assert skips[0][0] == skips[1][0] == int(step == 2)
        if step != 2:
            assert skips[0] == skips[1]
        assert_same(here, there, weight_grads=step != 2)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of the compiler's parts
@pytest.mark.parametrize("spec", ["tensorwise", "delayed", "rowwise", "blockwise", "mx", "bf16"])
def test_recomputed_compiled_and_frozen_on_the_card(spec: str) -> None:
    _, plain = networks(spec, torch.bfloat16)
    again, compiled = copy.deepcopy(plain), copy.deepcopy(plain)
    run = torch.compile(compiled, fullgraph=True)
    for step in range(2):
        x, dy = (side.cuda() for side in batch(step, torch.bfloat16))
        y = plain(x)
        y.backward(dy)
        checkpoint(again, x, use_reentrant=False, context_fn=recompute_contexts).backward(dy)
        z = run(x)
        z.backward(dy)
        assert_bits_equal(z, y)
        for model in (plain, again, compiled):
            advance_scaling(model)
        assert_same(plain, again)
        assert_same(plain, compiled)
    plain.eval()
    expected = plain(x)
    frozen = fp8lab.freeze(copy.deepcopy(plain))
    assert_bits_equal(frozen(x), expected)
