"""The three products of a linear layer, straight from what the cast kernels write, on a card."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from fp8lab.emulation.matmul import matmul_at
from fp8lab.formats import E4M3, E5M2
from fp8lab.kernels.casting import quantize_with_transpose
from fp8lab.kernels.linear_products import data_gradient, forward, weight_gradient
from fp8lab.kernels.scaling import quantize_blocks_with_transpose
from fp8lab.testing import assert_bits_equal, to_numpy

pytestmark = pytest.mark.gpu
ROWS, COLUMNS, INNER = 384, 512, 640
AT = [0, 3, 127, 128, 300], [0, 1, 130, 255, 383]  # rows and columns of a sample


Product = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Operands:
    """What a product takes: (M, K) and (N, K) codes, and its options."""

    left: torch.Tensor
    right: torch.Tensor
    options: dict[str, Any]


def of_layer(scaling: str) -> tuple[Operands, Operands, Operands]:
    """Operands of forward, data gradient and weight gradient, as the docstrings say."""
    torch.manual_seed(3)
    x, w, dy = (
        torch.randn(shape, device="cuda").bfloat16()
        for shape in ((ROWS, INNER), (COLUMNS, INNER), (ROWS, COLUMNS))
    )
    if scaling == "tensor":
        scales = [torch.tensor(value, device="cuda") for value in (8.0, 3.0, 50.0)]
        codes = [
            quantize_with_transpose(tensor, fmt, scale=scale)
            for tensor, fmt, scale in zip((x, w, dy), (E4M3, E4M3, E5M2), scales, strict=True)
        ]
        inverse_x, inverse_w, inverse_dy = (1 / scale for scale in scales)
        (x, x_t), (w, w_t), (dy, dy_t) = codes
        return (
            Operands(x, w, {"inverse_scale_a": inverse_x, "inverse_scale_b": inverse_w}),
            Operands(dy, w_t, {"inverse_scale_a": inverse_dy, "inverse_scale_b": inverse_w}),
            Operands(dy_t, x_t, {"inverse_scale_a": inverse_dy, "inverse_scale_b": inverse_x}),
        )
    of_x = quantize_blocks_with_transpose(x, E4M3)
    of_w = quantize_blocks_with_transpose(w, E4M3, block=(128, 128))
    of_dy = quantize_blocks_with_transpose(dy, E4M3, power_of_two=False)
    return (
        Operands(
            of_x.codes,
            of_w.codes,
            {"inverse_scale_a": of_x.scales, "inverse_scale_b": of_w.scales.t()},
        ),
        Operands(
            of_dy.codes,
            of_w.codes_t,
            {"inverse_scale_a": of_dy.scales, "inverse_scale_b": of_w.scales_t.t()},
        ),
        Operands(
            of_dy.codes_t,
            of_x.codes_t,
            {"inverse_scale_a": of_dy.scales_t, "inverse_scale_b": of_x.scales_t.t()},
        ),
    )


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("promote", [None, 128])
@pytest.mark.parametrize("scaling", ["tensor", "blocks"])
def test_equals_the_oracle(scaling: str, promote: int | None, narrow: bool) -> None:
    held = torch.randn(COLUMNS, INNER, device="cuda")
    products: tuple[Product, ...] = (forward, data_gradient, weight_gradient)
    for product, operands in zip(products, of_layer(scaling), strict=True):
        options = operands.options | {"promote_every": promote}
        kind = torch.bfloat16 if narrow else torch.float32
        got = product(operands.left, operands.right, out_dtype=kind, **options)
        check(got, operands, options, out_dtype="bfloat16" if narrow else "float32")
        if product is weight_gradient:
            gradient = held.clone()
            same = weight_gradient(operands.left, operands.right, accumulate=gradient, **options)
            assert same is gradient
            check(gradient, operands, options, bias=to_numpy(held))


def check(got: torch.Tensor, operands: Operands, options: dict[str, Any], **others: Any) -> None:
    """A sample of a product, over all of its K."""
    values = {
        name: to_numpy(value.contiguous()) if isinstance(value, torch.Tensor) else value
        for name, value in options.items()
    }
    left, right = to_numpy(operands.left.contiguous()), to_numpy(operands.right.contiguous())
    expected = matmul_at(left, right.T, AT[0], AT[1], **(values | others))
    assert_bits_equal(to_numpy(got)[np.ix_(*AT)], expected)
