"""Quotients and roots without checks against those that check: every operand, or very many."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from fp8lab.emulation.fused import fma
from fp8lab.formats import E4M3, E5M2, FLOAT16, FloatFormat
from fp8lab.kernels.float_device import ElementCode
from fp8lab.kernels.launch import launch
from fp8lab.kernels.moments_device import MomentCode, inverse_scale_of
from fp8lab.kernels.quotients_device import quotient, reciprocal, root

BLOCK = 1024
SCALED = pytest.mark.parametrize("fmt", [E4M3, E5M2, FLOAT16], ids=lambda fmt: fmt.name)


@SCALED
def test_a_top_over_the_formats_largest_value_needs_no_check(fmt: FloatFormat) -> None:
    """Every significand at the top of float32; one in 63 where the quotient nears the least."""
    largest = np.float32(fmt.max_finite)
    inverse = np.float32(1 / fmt.max_finite)
    significands = np.arange(1 << 23, dtype=np.uint32)
    lowest = int(np.log2(fmt.max_finite)) + 1  # the quotient's exponent is the first normal one
    for field in (254, lowest, lowest + 1, 1, 0):
        chosen = significands if field == 254 else significands[::63]
        top = ((np.uint32(field) << 23) | chosen).view(np.float32)
        with np.errstate(all="ignore"):
            near = top * inverse
            found = fma(inverse, fma(largest, -near, top), near)
            want = top / largest
        least = np.float32(2.0**-126)
        assert np.array_equal(np.maximum(found, least), np.maximum(want, least))


@triton.jit  # type: ignore[untyped-decorator]
def reciprocals(first, differing, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    bits = first + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = bits.to(tl.float32, bitcast=True)
    wrong = reciprocal(x).to(tl.int32, bitcast=True) != tl.div_rn(1.0, x).to(tl.int32, bitcast=True)
    tl.atomic_add(differing, tl.sum(wrong.to(tl.int32), axis=0))


@triton.jit  # type: ignore[untyped-decorator]
def roots(first, differing, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    bits = first + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = bits.to(tl.float32, bitcast=True)
    wrong = root(x).to(tl.int32, bitcast=True) != tl.sqrt_rn(x).to(tl.int32, bitcast=True)
    tl.atomic_add(differing, tl.sum(wrong.to(tl.int32), axis=0))


@triton.jit  # type: ignore[untyped-decorator]
def inverse_scales(first, differing, F: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    bits = first + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    found = inverse_scale_of(bits, F, True).to(tl.int32, bitcast=True)
    wrong = found != inverse_scale_of(bits, F, False).to(tl.int32, bitcast=True)
    tl.atomic_add(differing, tl.sum(wrong.to(tl.int32), axis=0))


@triton.jit  # type: ignore[untyped-decorator]
def quotients(divisors, seed, differing, EVERY: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A divisor and every significand, or any divisor and any dividend in the range."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if EVERY:
        divisor = tl.load(divisors + tl.program_id(1))
        dividend = (place | 0x3F800000).to(tl.float32, bitcast=True)
    else:
        first, second, _, _ = tl.randint4x(seed, place)
        # Exponents from -53 to 39 and from -84 to 73.
        divisor = ((first & 0x7FFFFF) | ((((first >> 23) & 0x1FF) % 93 + 74) << 23)).to(
            tl.float32, bitcast=True
        )
        dividend = ((second & 0x7FFFFF) | ((((second >> 23) & 0x1FF) % 158 + 43) << 23)).to(
            tl.float32, bitcast=True
        )
    d = divisor + tl.zeros_like(dividend)
    found = quotient(dividend, d, reciprocal(d))
    wrong = found.to(tl.int32, bitcast=True) != tl.div_rn(dividend, d).to(tl.int32, bitcast=True)
    tl.atomic_add(differing, tl.sum(wrong.to(tl.int32), axis=0))


def swept(kernel: Any, low: float, high: float, **options: Any) -> int:
    """How many of the float32 from low to below high, two powers of two, differ."""
    first, last = (int(bits) for bits in np.array([low, high], np.float32).view(np.int32))
    differing = torch.zeros(1, dtype=torch.int32, device="cuda")
    for start in range(first, last, 1 << 28):
        count = min(1 << 28, last - start)
        launch(kernel, (count // BLOCK,), start, differing, BLOCK=BLOCK, **options)
    return int(differing)


@pytest.mark.gpu
def test_every_reciprocal_and_root_on_the_card() -> None:
    assert swept(reciprocals, 2.0**-126, 2.0**126) == 0
    assert swept(roots, 2.0**-101, np.inf) == 0


@pytest.mark.gpu
@SCALED
def test_every_inverse_scale_on_the_card(fmt: FloatFormat) -> None:
    code = MomentCode("scaled", ElementCode.of(fmt, saturate=True), 128, False, False)
    assert swept(inverse_scales, 0.0, np.inf, F=code) == 0


@pytest.mark.gpu
def test_very_many_quotients_on_the_card() -> None:
    """Every significand over the corrections of 500 steps; 2**34 pairs of the whole range."""
    steps = np.arange(1, 501)
    corrections = np.concatenate([1 - beta**steps for beta in (0.9, 0.95, 0.99, 0.999)])
    divisors = torch.from_numpy(corrections.astype(np.float32)).cuda()
    differing = torch.zeros(1, dtype=torch.int32, device="cuda")
    grid = ((1 << 23) // BLOCK, divisors.numel())
    launch(quotients, grid, divisors, 0, differing, EVERY=True, BLOCK=BLOCK)
    for seed in range(16):
        grid = ((1 << 30) // BLOCK, 1)
        launch(quotients, grid, divisors, seed, differing, EVERY=False, BLOCK=BLOCK)
    assert int(differing) == 0
