"""Bounds: what they allow, what they do not, and that right kernels of another order meet them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fp8lab.emulation.casting import quantize
from fp8lab.emulation.gradients import gradient_norm
from fp8lab.emulation.tensorcore import IEEE_FLOAT32
from fp8lab.formats import E4M3, E5M2
from fp8lab.testing import (
    PROFILES,
    KernelFault,
    any_order_bound,
    check_cast,
    check_matmul,
    check_norm,
    check_scale_from_amax,
    contracts,
    norm_any_order_bound,
    one_code_bound,
    reciprocal_scale_bound,
    to_numpy,
    to_torch,
)
from fp8lab.testing.bounds import BOUNDS, UNIT, gamma

FEW = replace(PROFILES["quick"], examples=3, fixed=9)


def in_order(a: torch.Tensor, b: torch.Tensor, step: int) -> torch.Tensor:
    """A float32 product that adds every `step` of k first."""
    left, right = to_numpy(a).astype(np.float32), to_numpy(b).astype(np.float32)
    total = np.zeros((left.shape[0], right.shape[1]), np.float32)
    for start in range(min(step, left.shape[1])):
        part = np.zeros_like(total)
        for k in range(start, left.shape[1], step):
            part = part + left[:, k, None] * right[None, k]
        total = total + part
    return torch.from_numpy(total)


@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E5M2, E4M3)], ids=str)
@pytest.mark.parametrize("step", [1, 32])
def test_any_order_of_float32_is_within_the_bound(formats: Any, step: int) -> None:
    def kernel(a: Any, b: Any, scale_a: torch.Tensor, scale_b: torch.Tensor) -> torch.Tensor:
        with np.errstate(all="ignore"):
            return in_order(a, b, step) * (scale_a * scale_b)

    options: dict[str, Any] = {"formats": formats, "core": IEEE_FLOAT32, "device": "cpu"}
    check_matmul(kernel, bound=any_order_bound, profile=FEW, **options)
    if step > 1:
        with pytest.raises(KernelFault):
            check_matmul(kernel, profile=FEW, **options)


def test_less_than_float32_is_not() -> None:
    def kernel(a: Any, b: Any, scale_a: torch.Tensor, scale_b: torch.Tensor) -> torch.Tensor:
        halves: torch.Tensor = (a.float() @ b.float()).to(torch.bfloat16).float()
        return halves * (scale_a * scale_b)

    with pytest.raises(KernelFault, match="bound: any_order: products of FP8 codes are exact"):
        check_matmul(kernel, core=IEEE_FLOAT32, bound=any_order_bound, device="cpu", profile=FEW)


@pytest.mark.parametrize("k", [1, 33, 1000])
def test_the_bound_is_as_wide_as_its_derivation(k: int) -> None:
    """A sum of k ones may be off by gamma(k + 2) * k and no more."""
    ones = np.ones((1, k), E4M3.dtype)
    one = np.ones((), np.float32)
    inputs = {"a": ones, "b": ones.T, "inverse_scale_a": one, "inverse_scale_b": one}
    expected = np.full((1, 1), k, np.float32)
    steps = int(gamma(k + 2) * k / np.spacing(np.float32(k)))  # whole ones within the bound
    for count, broken in [(0, 0), (steps, 0), (steps + 1, 1), (-steps - 2, 1)]:
        actual = expected + np.float32(count * np.spacing(np.float32(k)))
        assert any_order_bound.broken(inputs, "product", actual, expected).size == broken


def test_nan_and_infinity_have_no_room() -> None:
    """No distance is near to a NaN."""
    a = np.array([[1.0, np.nan], [1.0, 1.0]]).astype(E4M3.dtype)
    b = np.ones((2, 1), E4M3.dtype)
    one = np.ones((), np.float32)
    inputs = {"a": a, "b": b, "inverse_scale_a": one, "inverse_scale_b": one}
    expected = np.array([[np.nan], [2.0]], np.float32)
    assert not any_order_bound.broken(inputs, "product", expected, expected).size
    for wrong, place in [([[1.0], [2.0]], 0), ([[np.nan], [np.nan]], 1), ([[np.nan], [np.inf]], 1)]:
        actual = np.array(wrong, np.float32)
        found = any_order_bound.broken(inputs, "product", actual, expected)
        assert found.tolist() == [place]


def test_one_code() -> None:
    def twice_rounded(x: torch.Tensor, scale: float) -> torch.Tensor:
        """By the reciprocal of a rounded inverse scale: the product is an ulp off at times."""
        inverse = np.float32(1) / np.float32(scale)
        with np.errstate(all="ignore"):
            y = to_numpy(x) / inverse
        return to_torch(quantize(y.astype(np.float32), E5M2))

    plain = replace(FEW, fixed=4)
    for scale in (1 / 3, 0.1, 1000.0):
        x = to_torch(np.float32(np.random.default_rng(1).normal(size=4096) / scale))
        contract = contracts.Cast(E5M2)
        inputs = {"x": to_numpy(x), "scale": np.asarray(float(np.float32(scale)))}
        found = to_numpy(twice_rounded(x, float(np.float32(scale))))
        right = contract.expected(inputs)["codes"]
        assert not one_code_bound.broken(inputs, "codes", found, right).size

    def two_off(x: torch.Tensor, scale: float) -> torch.Tensor:
        codes = to_torch(quantize(to_numpy(x), E5M2, scale=scale)).view(torch.uint8)
        return torch.where(codes == 0x3C, codes + 2, codes)

    with pytest.raises(KernelFault, match="distance  2 ulp"):
        check_cast(two_off, E5M2, bound=one_code_bound, device="cpu", profile=plain)


def test_a_reciprocal_instead_of_a_quotient() -> None:
    largest = float(np.finfo(np.float32).max)

    def kernel(amax: torch.Tensor) -> torch.Tensor:
        with np.errstate(all="ignore"):
            inverse = np.float32(1) / to_numpy(amax)
            scale = np.clip(np.float32(E4M3.max_finite) * inverse, np.float32(2.0**-127), largest)
            usable = np.isfinite(to_numpy(amax)) & (to_numpy(amax) > 0)
            # Where the reciprocal itself is beyond float32 the bound says nothing of use.
            exact = np.clip(np.float32(E4M3.max_finite) / to_numpy(amax), 2.0**-127, largest)
            scale = np.where(np.isfinite(inverse) & (inverse > 2.0**-126), scale, exact)
        return torch.from_numpy(np.where(usable, scale, 1.0).astype(np.float32))

    check_scale_from_amax(kernel, E4M3, bound=reciprocal_scale_bound, device="cpu")
    with pytest.raises(KernelFault, match="gives other bits in scale"):
        check_scale_from_amax(kernel, E4M3, device="cpu")
    with pytest.raises(KernelFault):
        check_scale_from_amax(
            lambda amax: kernel(amax) * (1 + 2**-20),
            E4M3,
            bound=reciprocal_scale_bound,
            device="cpu",
        )


def test_a_norm_in_float32() -> None:
    def kernel(grads: list[torch.Tensor]) -> torch.Tensor:
        total = torch.zeros(())
        for grad in grads:
            total = total + (grad * grad).sum()
        return torch.sqrt(total.double()).float()

    check_norm(kernel, bound=norm_any_order_bound, device="cpu")
    with pytest.raises(KernelFault):
        check_norm(kernel, device="cpu")

    def less(grads: list[torch.Tensor]) -> torch.Tensor:
        return torch.as_tensor(gradient_norm([to_numpy(g) for g in grads]).norm) * (1 + 2**-10)

    with pytest.raises(KernelFault, match="bound: norm_any_order"):
        check_norm(less, bound=norm_any_order_bound, device="cpu")


def test_bounds_are_named_derived_and_for_their_contracts() -> None:
    for name, bound in BOUNDS.items():
        assert bound.name == name
        assert len(bound.derivation.split()) > 10
    with pytest.raises(ValueError, match="the bound any_order is for matmul; the contract is cast"):
        check_cast(lambda x, scale: x, E4M3, bound=any_order_bound, device="cpu")
    assert gamma(10) > 10 * UNIT
