"""The audit of products: which rows of the operands it takes, and when."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fp8lab
from fp8lab import audit_product, ops_linear
from fp8lab.bridge import to_numpy
from fp8lab.emulation.matmul import matmul
from fp8lab.gradients import accumulate_in_float32
from fp8lab.linear import Fp8Linear, advance_scaling
from fp8lab.recipes import recipe_named
from tests.audit_cases import ROWS, K, Loop, N, network


@pytest.mark.parametrize("spec", ["tensorwise", "blockwise", "mx"])
def test_of_a_products_operands_only_drawn_rows_come_to_the_host(
    spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And each element has its own: the wrong ones are shown with the rows that they come from."""
    operands: dict[tuple[int, ...], tuple[Any, Any]] = {}
    taken: list[tuple[int, ...]] = []
    multiply, take = matmul, to_numpy

    def wrong(a: Any, b: Any, **options: Any) -> Any:
        found = np.array(multiply(a, b, **options))
        operands[found.shape] = a, b.T
        found.view(np.uint32)[...] ^= 1
        return found

    def noted(tensor: Tensor) -> Any:
        if tensor.dtype == torch.float8_e4m3fn:
            taken.append(tuple(tensor.shape))
        return take(tensor)

    monkeypatch.setattr(ops_linear, "oracle_matmul", wrong)
    monkeypatch.setattr(audit_product, "to_numpy", noted)
    layer = Fp8Linear(K, N, recipe_named(spec), bias=False)
    nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(1))
    x = torch.randn(ROWS, K, generator=torch.Generator().manual_seed(2))
    with fp8lab.audit(sample=6, on_difference="count") as report:
        for _ in range(4):
            layer(x)
            advance_scaling(layer)
    assert taken == [(2, K), (3, K)] * 4
    assert len(report.found) == 4
    left, right = operands[ROWS, N]
    for difference in report.found:
        row, column = difference.element
        assert difference.count == 6
        assert np.array_equal(difference.inputs["a"].view(np.uint8), left[row].view(np.uint8))
        assert np.array_equal(difference.inputs["b"].view(np.uint8), right[column].view(np.uint8))


def test_what_is_changed_in_place_is_read_before() -> None:
    model = network()
    accumulate_in_float32(model)
    loop = Loop(model)
    with fp8lab.audit(sample=64) as report:
        loop.step(microbatches=3)
    assert report.differences == 0
    key = ("0", "weight_grad product")
    assert report.lines[key].checks == 3
