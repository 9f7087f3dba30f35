"""The loads and stores of the 14-byte step and nothing else: what its bytes alone cost."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from fp8lab.kernels.launch import launch


@triton.jit  # type: ignore[untyped-decorator]
def streams_kernel(  # type: ignore[no-untyped-def]
    param, grad, remainder, first, second, scales, BLOCK: tl.constexpr
):
    """Every stream is read, and all but the gradient written again, with a bit flipped."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    p = tl.load(param + place)
    g = tl.load(grad + place)
    r = tl.load(remainder + place)
    m = tl.load(first + place)
    v = tl.load(second + place)
    block = tl.program_id(0) * (BLOCK // 64) + tl.arange(0, BLOCK // 64)
    s = tl.load(scales + block)
    tl.store(param + place, p ^ (g & 1))
    tl.store(remainder + place, r ^ 1)
    tl.store(first + place, m ^ 1)
    tl.store(second + place, v ^ 1)
    tl.store(scales + block, s ^ 1)


def streams(elements: int, block: int, num_warps: int) -> Callable[[], None]:
    """A call that moves 14.125 bytes an element: 3 tensors of 16 bits, 2 of 8, scales by 128.

    Args:
        elements: A multiple of the block.
        block, num_warps: How it is launched; a block is at least 64.
    """
    wide = [torch.zeros(elements, dtype=torch.int16, device="cuda") for _ in range(3)]
    narrow = [torch.zeros(elements, dtype=torch.uint8, device="cuda") for _ in range(2)]
    scales = torch.zeros(elements // 64, dtype=torch.int32, device="cuda")

    def run() -> None:
        launch(
            streams_kernel,
            (elements // block,),
            *wide,
            *narrow,
            scales,
            BLOCK=block,
            num_warps=num_warps,
        )

    return run
