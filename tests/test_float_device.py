"""The floating-point pieces of the kernels against the oracle: conversions, fused multiply-add."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from fp8lab.emulation.casting import quantize
from fp8lab.emulation.fused import fma as oracle_fma
from fp8lab.emulation.moments import SCALED, UNSCALED
from fp8lab.formats import BFLOAT16, E4M3, E5M2, FLOAT16, FloatFormat
from fp8lab.kernels.float_device import ElementCode, decoded, fma, narrowed
from fp8lab.kernels.launch import launch
from fp8lab.testing import assert_bits_equal, edge_values, special_values, to_numpy, to_torch
from fp8lab.testing.values import random_words, wide_floats

BLOCK = 1024
FORMATS = pytest.mark.parametrize("fmt", [BFLOAT16, FLOAT16, E4M3, E5M2], ids=lambda f: f.name)


@triton.jit  # type: ignore[untyped-decorator]
def fma_kernel(a, b, c, out, HARDWARE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    result = fma(tl.load(a + place), tl.load(b + place), tl.load(c + place), HARDWARE)
    tl.store(out + place, result)


@triton.jit  # type: ignore[untyped-decorator]
def narrow_kernel(x, codes, back, E: tl.constexpr, HARDWARE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    words = narrowed(tl.load(x + place), E, HARDWARE)
    tl.store(codes + place, words)
    tl.store(back + place, decoded(words, E, HARDWARE))


def whole_blocks(values: Any) -> Any:
    return np.resize(values, -(-values.size // BLOCK) * BLOCK)


def check_fma(device: str, hardware: bool) -> None:
    words = random_words(9, 8 * BLOCK)
    odd = (1 + 2 * (words[:, 0] % np.uint64(1 << 10))).astype(np.float64)
    side = np.where(words[:, 1] % np.uint64(2), 1, -1).astype(np.float32)
    # a*b is a tie of float32, and c, far below float64's last bit, says to which side.
    ties = [(1 + odd * 2.0**-12), np.full(odd.size, 1 + 2.0**-12), side * 2.0**-60]
    wide = [wide_floats(random_words(seed, 8 * BLOCK)[:, 1], -149, 127) for seed in range(3)]
    special = np.array(np.meshgrid(*[special_values()] * 3)).reshape(3, -1)
    for columns in (ties, wide, [*wide[:2], -wide[0]], list(special)):
        a, b, c = (whole_blocks(np.asarray(column, np.float32)) for column in columns)
        tensors = [to_torch(column, device=device) for column in (a, b, c)]
        out = torch.empty_like(tensors[0])
        launch(fma_kernel, (a.size // BLOCK,), *tensors, out, HARDWARE=hardware, BLOCK=BLOCK)
        assert_bits_equal(out, oracle_fma(a, b, c), inputs={"a": a, "b": b, "c": c})


def check_narrowing(fmt: FloatFormat, device: str, hardware: bool) -> None:
    words = random_words(5, 8 * BLOCK)[:, 0].astype(np.uint32).view(np.float32)
    values = [words, special_values(), wide_floats(random_words(6, BLOCK)[:, 1], -30, 20)]
    if fmt in (E4M3, E5M2):
        values.append(edge_values(fmt))
    scaled = fmt is not BFLOAT16
    x = whole_blocks(np.concatenate(values))
    if fmt is FLOAT16:  # what is stored is scaled: nothing finite overflows
        x = np.where(np.isfinite(x), np.clip(x, -65504, 65504), x)
    tensor = to_torch(x, device=device)
    carrier = torch.uint8 if fmt.bits == 8 else torch.int16
    codes, back = torch.empty_like(tensor, dtype=carrier), torch.empty_like(tensor)
    code = ElementCode.of(fmt, saturate=scaled)
    grid = (x.size // BLOCK,)
    launch(narrow_kernel, grid, tensor, codes, back, E=code, HARDWARE=hardware, BLOCK=BLOCK)
    want = quantize(x, fmt, overflow=SCALED if scaled else UNSCALED)
    found = to_numpy(codes).view(fmt.code_dtype)
    assert_bits_equal(found, want.view(fmt.code_dtype), inputs=x)
    with np.errstate(all="ignore"):
        assert_bits_equal(back, want.astype(np.float32))


def test_fma_without_the_instruction(device: str) -> None:
    check_fma(device, hardware=False)


@FORMATS
def test_narrowing_by_integers(fmt: FloatFormat, device: str) -> None:
    check_narrowing(fmt, device, hardware=False)


@pytest.mark.gpu
def test_fma_by_the_instruction() -> None:
    check_fma("cuda", hardware=True)


@pytest.mark.gpu
@FORMATS
def test_narrowing_by_the_instruction(fmt: FloatFormat) -> None:
    check_narrowing(fmt, "cuda", hardware=True)
