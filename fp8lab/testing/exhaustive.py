"""Every input of a cast: 65,536 of a half type, all 2**32 of float32.

The reference is the oracle's own table (`fp8lab.emulation.tables`), on the device. A float32 is
rounded to odd at 16 bits, which keeps every comparison that the cast makes; the upper 16 bits are
the place in the table.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fp8lab.bridge import to_torch
from fp8lab.emulation.tables import code_table, has_table
from fp8lab.formats import overflow_policy
from fp8lab.testing.contracts.base import Kernel, float32
from fp8lab.testing.contracts.casts import Cast
from fp8lab.testing.contracts.inputs import dtype_named
from fp8lab.testing.launch import run_kernel

if TYPE_CHECKING:
    import torch

Array = npt.NDArray[Any]
Arrays = dict[str, Array]

CHUNKS = {"cpu": 1 << 22, "cuda": 1 << 26}
_KEPT = 4096  # wrong inputs that are looked at more closely


@dataclass(frozen=True)
class Swept:
    """What trying every input gave.

    Attributes:
        tried: How many inputs.
        seconds: How long it took.
        dtype: The input type with the first difference; empty where there is none.
        words: The bits of some inputs whose code is wrong there.
        problem: What else went wrong, as the end of a sentence about the kernel.
    """

    tried: int
    seconds: float
    dtype: str = ""
    words: tuple[int, ...] = ()
    problem: str = ""

    @property
    def inputs(self) -> Arrays:
        """The inputs that are wrong, as the contract takes them."""
        dtype = dtype_named(self.dtype)
        words = np.array(self.words or (0,), dtype=f"u{dtype.itemsize}")
        return {"x": words.view(dtype), "scale": float32(1.0)}


def swept(contract: Cast, kernel: Kernel, *, device: str) -> Swept:
    """Try every input of a cast at scale 1, chunk by chunk, until a code is wrong.

    On a CPU, where all of float32 takes minutes, it says on standard error about how long.

    Args:
        contract: The cast; its `dtypes` are tried one after the other.
        kernel: kernel(x, scale).
        device: "cpu" or "cuda".

    Raises:
        ValueError: Stochastic rounding, float64, or a format without a table.
    """
    if contract.stochastic or not has_table(contract.fmt) or "float64" in contract.dtypes:
        raise ValueError(
            f"{contract}: not every input can be tried; accepted: FP8 formats without random bits,"
            " from float32, float16 and bfloat16"
        )
    started = time.perf_counter()
    tried = 0
    for name in contract.dtypes:
        table = _table(contract, name, device)
        total = 1 << 8 * dtype_named(name).itemsize
        size = min(total, CHUNKS[device.partition(":")[0]])
        for start in range(0, total, size):
            problem, words = _chunk(kernel, contract, table, name, start, size)
            tried += size
            seconds = time.perf_counter() - started
            if problem or words:
                return Swept(tried, seconds, name, words, problem)
            if start == 0 and device == "cpu" and total > size:
                about = seconds * total / size
                print(f"fp8lab: {total} inputs on the CPU: about {about:.0f} s", file=sys.stderr)
    return Swept(tried, time.perf_counter() - started)


def _table(contract: Cast, name: str, device: str) -> torch.Tensor:
    """The code of each 16-bit key of an input type."""
    policy = overflow_policy(contract.overflow, contract.fmt)
    table = code_table(contract.fmt, contract.rounding, policy, dtype_named(name))
    return to_torch(table.copy(), device=device)


def _chunk(
    kernel: Kernel, contract: Cast, table: torch.Tensor, name: str, start: int, size: int
) -> tuple[str, tuple[int, ...]]:
    """What else went wrong, and the bits of the inputs whose code is wrong."""
    import torch

    words = torch.arange(start, start + size, dtype=torch.int64, device=table.device)
    half = dtype_named(name).itemsize == 2
    if half:
        key = words
        x = words.to(torch.int16).view(getattr(torch, name))
    else:
        # To odd: the lowest kept bit is set when one that is dropped was.
        key = ((words & 0xFFFF) + 0xFFFF | words) >> 16
        x = words.to(torch.int32).view(torch.float32)
    try:
        codes = run_kernel(kernel, x, 1.0)
    except Exception as error:
        return f"raised {type(error).__name__}: {' '.join(str(error).split())[:300]}", ()
    accepted = (contract.fmt.dtype_name, "uint8")
    given = getattr(codes, "dtype", type(codes).__name__)
    if str(given).removeprefix("torch.") not in accepted or codes.shape != x.shape:
        return f"gave codes of {given}; accepted: {', '.join(accepted)} of x's shape", ()
    wrong = codes.view(torch.uint8) != table[key]
    if not bool(wrong.any()):
        return "", ()
    return "", tuple(words[wrong][:_KEPT].tolist())
