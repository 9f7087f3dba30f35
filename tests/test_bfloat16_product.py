"""Products in BF16, on a CPU and with a GPU's tensor cores: exact where every sum is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp8lab.ops_linear import bfloat16_product
from fp8lab.testing import assert_bits_equal

ROWS, COLUMNS, INNER = 48, 80, 96


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def operands(request: pytest.FixtureRequest) -> tuple[Tensor, Tensor]:
    """Whole numbers up to 8: products and sums of them are exact in float32, in any order."""
    generator = torch.Generator().manual_seed(2)
    left = torch.randint(-8, 9, (ROWS, INNER), generator=generator).float()
    right = torch.randint(-8, 9, (COLUMNS, INNER), generator=generator).float()
    return left.to(request.param), right.to(request.param)


def expected(left: Tensor, right: Tensor) -> Tensor:
    return (left.cpu().double() @ right.cpu().double().t()).float()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_product(
    operands: tuple[Tensor, Tensor], out_dtype: torch.dtype, transposed: bool
) -> None:
    left, right = operands
    a, b = left, right
    if transposed:  # as the weight gradient has them
        a, b = (own.t().contiguous().t() for own in operands)
    found = bfloat16_product(a, b, out_dtype=out_dtype)
    assert_bits_equal(found, expected(left, right).to(out_dtype))


def test_a_bias_and_what_is_accumulated(operands: tuple[Tensor, Tensor]) -> None:
    left, right = operands
    bias = torch.arange(COLUMNS, device=left.device) / 4
    found = bfloat16_product(left, right, bias=bias)
    assert_bits_equal(found, expected(left, right) + bias.cpu())
    total = torch.full((ROWS, COLUMNS), 0.25, device=left.device)
    assert bfloat16_product(left, right, accumulate=total) is total
    assert_bits_equal(total, expected(left, right) + 0.25)


def test_operands_are_rounded_first(operands: tuple[Tensor, Tensor]) -> None:
    left, right = operands
    assert_bits_equal(bfloat16_product(left * (1 + 2.0**-12), right), expected(left, right))


def test_sums_are_float32(operands: tuple[Tensor, Tensor]) -> None:
    """2**20 + 1 has no place in BF16."""
    device = operands[0].device
    a = torch.zeros(16, 32, device=device)
    a[:, 0], a[:, 17] = 2.0**20, 1.0
    found = bfloat16_product(a, torch.ones(16, 32, device=device))
    assert_bits_equal(found, torch.full((16, 16), 2.0**20 + 1))
