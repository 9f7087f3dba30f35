"""Every input of a cast: the reference is the oracle's, and one wrong input is found."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fp8lab.emulation.casting import quantize
from fp8lab.formats import E4M3, E5M2, FORMATS
from fp8lab.kernels.casting import quantize as quantize_kernel
from fp8lab.testing import (
    PROFILES,
    KernelFault,
    check_cast,
    contracts,
    exhaustive,
    to_numpy,
    to_torch,
)
from fp8lab.testing.exhaustive import swept

EVERY = replace(PROFILES["exhaustive"], examples=1, fixed=3)
HALVES = ("float16", "bfloat16")


def oracle(fmt: Any, **options: Any) -> Callable[[torch.Tensor, float], torch.Tensor]:
    def kernel(x: torch.Tensor, scale: float) -> torch.Tensor:
        return to_torch(quantize(to_numpy(x), fmt, scale=scale, **options))

    return kernel


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("overflow", ["saturate", "ieee"])
def test_every_half_passes(fmt: Any, overflow: str) -> None:
    cast = contracts.Cast(fmt, overflow=overflow, dtypes=HALVES)
    found = swept(cast, oracle(fmt, overflow=overflow), device="cpu")
    assert (found.tried, found.dtype, found.words) == (1 << 17, "", ())


@pytest.mark.parametrize("start", [0, 0x3F80_0000, 0x7F7F_0000, 0x8000_0000, 0xFFFF_0000])
@pytest.mark.parametrize("rounding", ["nearest_even", "toward_zero"])
def test_the_reference_for_float32_is_the_oracle(start: int, rounding: str) -> None:
    cast = contracts.Cast(E5M2, rounding=rounding)
    table = exhaustive._table(cast, "float32", "cpu")
    kernel = oracle(E5M2, rounding=rounding)
    assert exhaustive._chunk(kernel, cast, table, "float32", start, 1 << 16) == ("", ())


@pytest.mark.parametrize("word", [0x0000_0001, 0x3F88_0000, 0xBF88_0001])
def test_one_wrong_float32_is_found(word: int) -> None:
    def kernel(x: torch.Tensor, scale: float) -> torch.Tensor:
        codes = oracle(E4M3)(x, scale).view(torch.uint8)
        signed = int(np.array(word, np.uint32).view(np.int32))
        return torch.where(x.view(torch.int32).eq(signed), codes ^ 3, codes)

    start = word & ~0xFFFF
    cast = contracts.Cast(E4M3)
    table = exhaustive._table(cast, "float32", "cpu")
    assert exhaustive._chunk(kernel, cast, table, "float32", start, 1 << 16) == ("", (word,))


def test_the_first_wrong_chunk_ends_it_with_a_case(capsys: pytest.CaptureFixture[str]) -> None:
    def kernel(x: torch.Tensor, scale: float) -> torch.Tensor:
        codes = oracle(E4M3)(x, scale).view(torch.uint8)
        return torch.where(x.view(torch.int32).eq(0x0040_1234), codes ^ 3, codes)

    with pytest.raises(KernelFault) as caught:
        check_cast(kernel, E4M3, device="cpu", profile=EVERY)
    x = caught.value.finding.case.inputs["x"]
    assert x.view(np.uint32).tolist() == [0x0040_1234]
    assert "4294967296 inputs on the CPU: about" in capsys.readouterr().err


def test_what_else_goes_wrong_in_a_sweep() -> None:
    def kernel(x: torch.Tensor, scale: float) -> torch.Tensor:
        if x.numel() > 60_000:
            raise MemoryError("too large")
        return oracle(E4M3)(x, scale)

    with pytest.raises(KernelFault, match="it raised MemoryError: too large"):
        check_cast(kernel, E4M3, dtypes=("float16",), device="cpu", profile=EVERY)
    cast = contracts.Cast(E4M3, dtypes=("float16",))
    assert "gave codes of torch.float16" in swept(cast, lambda x, s: x, device="cpu").problem


def test_random_bits_cannot_be_enumerated() -> None:
    with pytest.raises(ValueError, match="not every input can be tried"):
        swept(contracts.Cast(E4M3, rounding="stochastic"), oracle(E4M3), device="cpu")
    with pytest.raises(ValueError, match="not every input can be tried"):
        swept(contracts.Cast(E4M3, dtypes=("float64",)), oracle(E4M3), device="cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_all_float32_on_the_gpu_in_seconds(fmt: Any) -> None:
    def kernel(x: torch.Tensor, scale: float) -> torch.Tensor:
        return quantize_kernel(x, fmt, scale=scale)

    found = swept(contracts.Cast(fmt), kernel, device="cuda")
    assert (found.tried, found.words, found.problem) == (1 << 32, (), "")
    print(f"{fmt.name}: all float32 in {found.seconds:.1f} s")
    if "PYTEST_XDIST_WORKER" not in os.environ:  # others would have the card, too
        assert found.seconds < 30
