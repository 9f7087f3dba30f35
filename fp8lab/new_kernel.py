"""`fp8lab new-kernel NAME`: a kernel with its oracle, test and benchmark, to start from."""

from __future__ import annotations

import keyword
from pathlib import Path

from fp8lab.errors import UserError
from fp8lab.testing.loading import hides_a_module

# Where a template says it, the name stands.
_NAME = "NEW_KERNEL"

_KERNEL = '''"""NEW_KERNEL: a scale and a cast to E4M3, to start from."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fp8lab.testing import contract

BLOCK = 1024


@triton.jit
def NEW_KERNEL_kernel(x_ptr, codes_ptr, n, scale, BLOCK: tl.constexpr):
    """E4M3 codes in integer operations: the same on a GPU and in Triton's interpreter."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(x_ptr + index, mask=index < n, other=0.0) * scale
    word = y.to(tl.int32, bitcast=True)
    magnitude = word & 0x7FFFFFFF

    # Normal results: the 20 bits that E4M3 drops are rounded to nearest even, the carry goes on
    # into the exponent, and the bias of float32 (127) becomes that of E4M3 (7).
    rounded = magnitude + 0x7FFFF + ((magnitude >> 20) & 1)
    normal = (rounded >> 20) - (120 << 3)
    # Below 2**-6 codes are multiples of 2**-9. Added to 2**14, whose last bit is 2**-9, the value
    # is rounded to one of them by the addition, to nearest even.
    sum_ = magnitude.to(tl.float32, bitcast=True) + 16384.0
    subnormal = sum_.to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, subnormal, tl.minimum(normal, 0x7E))

    sign = (word >> 24) & 0x80
    code = tl.where(magnitude > 0x7F800000, 0x7F, code | sign)  # NaN has no sign
    tl.store(codes_ptr + index, code.to(tl.uint8), mask=index < n)


@contract("cast", fmt="E4M3")
def NEW_KERNEL(x: torch.Tensor, scale: float) -> torch.Tensor:
    """E4M3 codes (uint8) of x * scale, x float32, contiguous, of any shape."""
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    grid = (triton.cdiv(x.numel(), BLOCK),)
    if x.numel():
        NEW_KERNEL_kernel[grid](x, codes, x.numel(), scale, BLOCK=BLOCK)
    return codes
'''

_ORACLE = '''"""What NEW_KERNEL must give, bit for bit. Change it together with the kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fp8lab.emulation.casting import quantize
from fp8lab.formats import E4M3


def NEW_KERNEL(x: npt.NDArray[np.float32], scale: float) -> npt.NDArray[Any]:
    """E4M3 codes of x * scale: the product is rounded to float32, then cast to nearest even; beyond
    448 the code is that of 448, NaN is 0x7F."""
    return quantize(x, E4M3, scale=scale)
'''

_TEST = '''"""NEW_KERNEL against its contract, and against the oracle beside it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from fp8lab.formats import E4M3
from fp8lab.testing import assert_bits_equal, cast_inputs, run_kernel, to_torch
from NEW_KERNEL import NEW_KERNEL as kernel
from NEW_KERNEL_oracle import NEW_KERNEL as oracle


@pytest.mark.fp8_kernel("cast", fmt=E4M3)
def test_holds_the_contract():
    return kernel


@settings(deadline=None, max_examples=30)
@given(x=cast_inputs(E4M3, scale=0.3))
def test_gives_the_bits_of_the_oracle(device, x):
    codes = run_kernel(kernel, to_torch(x, device=device), 0.3)
    assert_bits_equal(codes, oracle(x, 0.3).view("uint8"), inputs=x)
'''

_BENCH = '''"""How fast NEW_KERNEL is: python bench_NEW_KERNEL.py [ELEMENTS]."""

from __future__ import annotations

import os
import sys
import time

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton sees the kernel

from NEW_KERNEL import NEW_KERNEL


def seconds_a_call(x: torch.Tensor, calls: int) -> float:
    """The median of some calls, each waited for."""
    times = []
    for _ in range(calls + 1):
        started = time.perf_counter()
        NEW_KERNEL(x, 0.3)
        if x.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return sorted(times[1:])[calls // 2]  # the first call compiles


def main() -> None:
    """Print one line."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    usual = 1 << 26 if device == "cuda" else 1 << 14
    elements = int(sys.argv[1]) if len(sys.argv) > 1 else usual
    x = torch.randn(elements, device=device)
    seconds = seconds_a_call(x, 20 if device == "cuda" else 3)
    moved = elements * 5  # four bytes in, one out
    rate = moved / seconds / 1e9
    print(f"{device}: {elements} elements, {seconds * 1e6:.1f} us, {rate:.1f} GB/s")


if __name__ == "__main__":
    main()
'''


def write_kernel(name: str, folder: Path) -> list[Path]:
    """Write the four files of a new kernel.

    Args:
        name: A Python identifier, the kernel's name and the stem of its files.
        folder: Where they go; it is made where it is missing.

    Returns:
        The kernel, its oracle, its test and its benchmark.

    Raises:
        UserError: The name is no identifier or that of a module, or one of the files exists;
            nothing is written then.
    """
    if not name.isidentifier() or keyword.iskeyword(name):
        raise UserError(f"NAME is {name!r}; accepted: a Python identifier, such as my_cast")
    if hides_a_module(name):
        raise UserError(f"NAME is {name!r}, the name of a module; choose another: my_{name}")
    texts = {
        f"{name}.py": _KERNEL,
        f"{name}_oracle.py": _ORACLE,
        f"test_{name}.py": _TEST,
        f"bench_{name}.py": _BENCH,
    }
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out is {folder}, which is no folder")
    files = {folder / file: text for file, text in texts.items()}
    there = [str(file) for file in files if file.exists()]
    if there:
        raise UserError(f"{', '.join(there)} exists already; choose another NAME or --out")
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        file.write_text(text.replace(_NAME, name), encoding="utf-8")
    return list(files)
