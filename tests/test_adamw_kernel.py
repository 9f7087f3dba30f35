"""The AdamW kernel against the oracle, bit for bit, and what it compiles to."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from fp8lab.emulation import adamw as oracle
from fp8lab.kernels.adamw import adamw
from fp8lab.kernels.adamw_device import StepCode
from fp8lab.kernels.adamw_settings import AdamSettings
from fp8lab.kernels.moments_device import MomentCode
from fp8lab.optimizer_formats import MOMENT_FORMATS, ORDERS
from fp8lab.testing import (
    AdamWCase,
    adamw_states,
    assert_bits_equal,
    compiled_ptx,
    ragged_sizes,
    run_kernel,
    to_torch,
)
from fp8lab.testing.values import random_words, wide_floats

BLOCK = 128
SMALL = AdamSettings(block=BLOCK)
OPTIONS: dict[str, Any] = {
    "step": 3,
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.1,
}
NAMES = ("param", "exp_avg", "exp_avg_sq")


def check(case: AdamWCase, device: str, settings: AdamSettings) -> None:
    """The kernel's three tensors are the oracle's."""
    tensors = [to_torch(array.copy(), device=device) for array in case.tensors]
    results = run_kernel(adamw, *tensors, **case.options, settings=settings)
    expected = oracle.adamw(*case.tensors, **case.options)
    inputs = dict(zip(("param", "grad", "exp_avg", "exp_avg_sq"), case.tensors, strict=True))
    for name, result, want in zip(NAMES, results, expected, strict=True):
        try:
            assert_bits_equal(result, want, inputs=inputs)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
    assert_bits_equal(tensors[1], case.grad, compare_nan_bits=True)


@given(case=adamw_states(sizes=ragged_sizes(BLOCK)))
def test_equals_the_oracle(case: AdamWCase, device: str) -> None:
    check(case, device, SMALL)


def test_many_steps_stay_equal(device: str) -> None:
    """Errors would add up: 20 steps from zero moments."""
    rng = np.random.default_rng(0)
    state = [rng.normal(size=1000).astype(np.float32), *np.zeros((2, 1000), np.float32)]
    tensors = [to_torch(array.copy(), device=device) for array in state]
    for step in range(1, 21):
        grad = rng.normal(size=1000).astype(np.float32)
        options = {**OPTIONS, "step": step}
        state = list(oracle.adamw(state[0], grad, state[1], state[2], **options))
        adamw(tensors[0], to_torch(grad, device=device), tensors[1], tensors[2], **options)
    for result, want in zip(tensors, state, strict=True):
        assert_bits_equal(result, want)


def test_works_in_place_and_returns_what_it_was_given(device: str) -> None:
    tensors = [torch.ones(3, 5, device=device) for _ in range(4)]
    tensors[0].requires_grad_()
    before = tensors[0]._version
    param, exp_avg, exp_avg_sq = adamw(*tensors, **OPTIONS)
    assert param is tensors[0]
    assert exp_avg is tensors[2]
    assert exp_avg_sq is tensors[3]
    assert param._version > before
    assert not torch.equal(param, torch.ones_like(param))
    assert torch.equal(tensors[1], torch.ones_like(param))


def test_empty_tensors(device: str) -> None:
    tensors = [torch.ones(4, 0, device=device) for _ in range(4)]
    assert adamw(*tensors, **OPTIONS)[0].shape == (4, 0)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"step": 0}, "step is 0"),
        ({"lr": -1e-3}, "lr is -0.001"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"eps": -1.0}, "eps is -1.0"),
        ({"weight_decay": float("inf")}, "weight_decay is inf"),
        ({"betas": (1.0, 0.999)}, "beta1 is 1.0"),
        ({"betas": (0.9, -0.1)}, "beta2 is -0.1"),
        ({"order": "adam"}, "unknown order 'adam'; accepted: plain, torch"),
    ],
)
def test_numbers_out_of_range_are_refused(
    option: dict[str, Any], message: str, device: str
) -> None:
    tensors = [torch.ones(3, device=device) for _ in range(4)]
    with pytest.raises(ValueError, match=message):
        adamw(*tensors, **{**OPTIONS, **option})
    assert all(torch.equal(tensor, torch.ones_like(tensor)) for tensor in tensors)


@pytest.mark.parametrize("place", range(4))
def test_tensors_that_do_not_fit_are_refused(place: int, device: str) -> None:
    name = ("param", "grad", "exp_avg", "exp_avg_sq")[place]
    good = [torch.ones(4, 4, device=device) for _ in range(4)]

    def with_bad(bad: torch.Tensor) -> list[torch.Tensor]:
        return [bad if index == place else tensor for index, tensor in enumerate(good)]

    with pytest.raises(TypeError, match=f"{name} has dtype torch.float64; accepted: torch.float"):
        adamw(*with_bad(good[0].double()), **OPTIONS)
    with pytest.raises(ValueError, match="shape"):
        adamw(*with_bad(torch.ones(4, 5, device=device)), **OPTIONS)
    with pytest.raises(ValueError, match=f"{name} has shape .* contiguous"):
        adamw(*with_bad(torch.ones(4, 8, device=device)[:, ::2]), **OPTIONS)
    with pytest.raises(ValueError, match="share memory"):
        adamw(*with_bad(good[(place + 1) % 4]), **OPTIONS)
    assert all(torch.equal(tensor, torch.ones_like(tensor)) for tensor in good)


SIGNATURE = {
    "table": "*i64",
    "chunk_tensor": "*i32",
    "constants": "*fp32",
    "factor": "*fp32",
    "skip": "*i32",
    "seed": "*i64",
    "tops": "*i32",
}


def ptx_of(order: str, moment: str, step: StepCode) -> str:
    code = MomentCode.of(MOMENT_FORMATS[moment])
    constants = {"ORDER": ORDERS[order], "M": code, "V": code, "STEP": step, "ONLY_TOPS": False}
    return compiled_ptx("fp8lab.kernels.adamw_device:adamw_kernel", SIGNATURE, constants)


ROUNDED = {
    *("mul.f32", "add.f32", "sub.f32", "mul.rn.f32", "add.rn.f32", "sub.rn.f32"),
    *("div.rn.f32", "sqrt.rn.f32"),
}


def operations_of(ptx: str) -> list[str]:
    return re.findall(r"\b(?:fma|mul|add|sub|div|sqrt|rcp|rsqrt)\.[a-z.]*f32\b", ptx)


def test_compiled_without_fused_or_approximate_operations() -> None:
    step = StepCode("float32", "float32", None, None, True, False, True, 1024)
    ptx = ptx_of("plain", "float32", step)
    assert {"div.rn.f32", "sqrt.rn.f32"} <= set(operations_of(ptx)) <= ROUNDED
    assert "ld.global.v4.b32" in ptx, "16 bytes a thread"
    assert "st.global.v4.b32" in ptx, "16 bytes a thread"


def test_compiled_with_fused_operations_in_quotients_and_roots_alone() -> None:
    """8 elements a thread, each with three quotients (one divisor is its own) and a root."""
    step = StepCode("float32", "float32", None, None, True, True, True, 1024)
    found = Counter(operations_of(ptx_of("plain", "float32", step)))
    approximate = {"rcp.approx.ftz.f32", "rsqrt.approx.ftz.f32"}
    assert set(found) - ROUNDED == approximate | {"fma.rn.f32"}
    reciprocals, roots = found["rcp.approx.ftz.f32"], found["rsqrt.approx.ftz.f32"]
    assert (reciprocals, roots) == (8 + 2, 8)
    assert found["fma.rn.f32"] == 2 * reciprocals + 2 * roots + 2 * 3 * 8


def test_compiled_with_the_cards_conversions() -> None:
    step = StepCode("bfloat16", "bfloat16_remainder", None, None, True, True, True, 2048)
    ptx = ptx_of("torch", "e4m3_128", step)
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
    assert "fma.rn.f32" in ptx
    assert "ld.global.v4.b32" in ptx


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1 << 20, (1 << 20) + 3])
def test_wide_exponents_on_the_card(size: int) -> None:
    tensors = [wide_floats(random_words(seed, size)[:, 1], -140, 20) for seed in range(4)]
    check(
        AdamWCase(tensors[0], tensors[1], tensors[2], np.abs(tensors[3]), **OPTIONS),
        "cuda",
        AdamSettings(),
    )
