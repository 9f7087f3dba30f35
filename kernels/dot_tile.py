"""A kernel that only asks a card what `tl.dot` computes: one tile, no edges.

What it becomes is told by `fp8lab.emulation.matmul.lowering`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dot_tile(
    a,  # (M, K) row-major: FP8, bfloat16, float16, or float32 to be cast to E4M3 in registers
    b,  # (N, K) row-major
    start,  # (M, N), of the accumulator's type
    out,  # the same
    K,
    M: tl.constexpr,
    N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PROMOTE: tl.constexpr,  # max_num_imprecise_acc, or None
    CAST_A: tl.constexpr,
    HALF: tl.constexpr,  # whether accumulators are float16
):
    """out = start + a b^T by one chain of tl.dot."""
    rows, columns, ks = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BLOCK_K)
    places = rows[:, None] * N + columns[None, :]
    total = tl.load(start + places)
    for first in range(0, K, BLOCK_K):
        x = tl.load(a + rows[:, None] * K + first + ks[None, :])
        y = tl.load(b + columns[:, None] * K + first + ks[None, :])
        if CAST_A:
            x = x.to(tl.float8e4nv)
        if HALF:
            total = tl.dot(x, y.T, total, out_dtype=tl.float16)
        elif PROMOTE is None:
            total = tl.dot(x, y.T, total)
        else:
            total = tl.dot(x, y.T, total, max_num_imprecise_acc=PROMOTE)
    tl.store(out + places, total)
