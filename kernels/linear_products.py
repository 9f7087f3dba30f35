"""The three products of a linear layer, from codes in the layouts that the cast kernel writes.

    forward          y  = x w^T     sums over K
    data gradient    dx = dy w      sums over N
    weight gradient  dw = dy^T x    sums over the rows (tokens)

x is (rows, K), w is (N, K), dy is (rows, N). The tensor core takes FP8 only with the summed
dimension in order in memory, so each operand comes as it is or transposed: a cast with a transpose
writes both. Options are those of `fp8lab.kernels.matmul.matmul`, for the product's own a and b.

How to call each. With one scale a tensor, from `casting.quantize_with_transpose`:

    x, x_t = quantize_with_transpose(x, E4M3, scale=scale_x)        # the same of w and dy
    forward(x, w, inverse_scale_a=inverse_x, inverse_scale_b=inverse_w)
    data_gradient(dy, w_t, inverse_scale_a=inverse_dy, inverse_scale_b=inverse_w)
    weight_gradient(dy_t, x_t, inverse_scale_a=inverse_dy, inverse_scale_b=inverse_x)

With one scale a row, `scaling.quantize_blocks_with_transpose(x, E4M3, block=(1, None))` gives
scales (rows, 1) and, of x_t, (K, 1): inverse_scale_a as they are, inverse_scale_b transposed. With
scales of blocks, x and dy in 1x128 and w in 128x128:

    x = quantize_blocks_with_transpose(x, E4M3)                     # the same of dy
    w = quantize_blocks_with_transpose(w, E4M3, block=(128, 128))
    forward(x.codes, w.codes, inverse_scale_a=x.scales, inverse_scale_b=w.scales.t())
    data_gradient(dy.codes, w.codes_t, inverse_scale_a=dy.scales, inverse_scale_b=w.scales_t.t())
    weight_gradient(
        dy.codes_t, x.codes_t, inverse_scale_a=dy.scales_t, inverse_scale_b=x.scales_t.t()
    )

There x.scales is (rows, K/128), w.scales (N/128, K/128), w.scales_t (K/128, N/128), dy.scales
(rows, N/128), dy.scales_t (N, rows/128) and x.scales_t (K, rows/128), each rounded up. Scales of
1x128 lie as the cast writes them, those of all rows of a block together; in any other order they
are copied first. Gradients are usually promoted (`promote_every=128`); blocks always are.

On sm_90 the fast kernel takes all of these where rows of the result are multiples of 16 bytes.
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
