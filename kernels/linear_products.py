"""The three products of a linear layer, from codes in the layouts that the cast kernel writes.

    forward          y  = x w^T     sums over K
    data gradient    dx = dy w      sums over N
    weight gradient  dw = dy^T x    sums over the rows (tokens)

x is (rows, K), w is (N, K), dy is (rows, N). The tensor core takes FP8 only with the summed
dimension in order in memory, so each operand comes as it is or transposed: a cast with a transpose
writes both. Options are those of `fp8lab.kernels.matmul.matmul`, for the product's own a and b.
"""

from __future__ import annotations

from typing import Any

import torch

from fp8lab.kernels.matmul import matmul


def forward(x: torch.Tensor, w: torch.Tensor, **options: Any) -> torch.Tensor:
    """y = x w^T, (rows, N).

    Args:
        x: (rows, K) codes, row-major: a of the product.
        w: (N, K) codes, row-major: b is its transpose.
        options: Of `matmul`.
    """
    return matmul(x, w.t(), **options)


def data_gradient(dy: torch.Tensor, w_transposed: torch.Tensor, **options: Any) -> torch.Tensor:
    """dx = dy w, (rows, K).

    Args:
        dy: (rows, N) codes, row-major: a of the product.
        w_transposed: (K, N) codes, row-major: b is its transpose.
        options: Of `matmul`.
    """
    return matmul(dy, w_transposed.t(), **options)


def weight_gradient(
    dy_transposed: torch.Tensor,
    x_transposed: torch.Tensor,
    *,
    accumulate: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """dw = dy^T x, (N, K), or with `accumulate` that gradient plus dw.

    Args:
        dy_transposed: (N, rows) codes, row-major: a of the product.
        x_transposed: (K, rows) codes, row-major: b is its transpose.
        accumulate: A float32 gradient (N, K), contiguous, that is overwritten by the sum: each
            element is gradient + result, rounded once, after the scales.
        options: Of `matmul`.

    Returns:
        The gradient; `accumulate` itself where it is given.
    """
    if accumulate is not None:
        options |= {"bias": accumulate, "out": accumulate}
    return matmul(dy_transposed, x_transposed.t(), **options)
