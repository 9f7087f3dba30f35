"""What is kept from launch to launch, descriptors and plans; launches that differ in little."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.tools.tensor_descriptor import TensorDescriptor

from fp8lab.formats import E4M3
from fp8lab.kernels.casting import quantize, quantize_with_transpose
from fp8lab.kernels.descriptors import DescriptorKind
from fp8lab.kernels.matmul import checked_product
from fp8lab.kernels.matmul_product import by_description
from fp8lab.kernels.matmul_settings import SMALL, SQUARE


def test_a_kind_makes_the_descriptor_that_triton_makes() -> None:
    kind = DescriptorKind(TensorDescriptor, torch.bfloat16, (16, 16))
    wide = torch.zeros(64, 64, dtype=torch.bfloat16)
    for matrix in (wide, wide[8:, 8:], wide[:, :48]):
        made = kind(matrix)
        assert made == TensorDescriptor.from_tensor(matrix, [16, 16])
        assert type(made) is TensorDescriptor
        assert made.base is matrix


def test_a_kind_refuses_what_triton_refuses() -> None:
    kind = DescriptorKind(TensorDescriptor, torch.bfloat16, (16, 16))
    wide = torch.zeros(64, 64, dtype=torch.bfloat16)
    kind(wide)
    for matrix in (wide[:, 1:], wide.t(), wide[:0], torch.zeros(4, 3).bfloat16()):
        with pytest.raises(AssertionError) as its:
            TensorDescriptor.from_tensor(matrix, [16, 16])
        with pytest.raises(AssertionError) as ours:
            kind(matrix)
        assert str(ours.value) == str(its.value)


def test_a_descriptor_of_another_dtype_is_triton_s_own() -> None:
    kind = DescriptorKind(TensorDescriptor, torch.bfloat16, (16, 16))
    wide = torch.zeros(64, 64)
    for _ in range(2):
        assert kind(wide) == TensorDescriptor.from_tensor(wide, [16, 16])
    narrow = wide.bfloat16()
    assert kind(narrow) == TensorDescriptor.from_tensor(narrow, [16, 16])


@pytest.mark.skipif(
    not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs the interpreter or a CUDA device",
)
def test_products_that_differ_have_plans_of_their_own() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    a, b, c = (
        torch.zeros(size, 64, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
        for size in (64, 64, 32)
    )
    one, rows = torch.ones((), device=device), torch.ones(64, 1, device=device)
    made = []

    @by_description
    def plan(product: Any, settings: Any) -> object:
        made.append(settings)
        return object()

    cases: list[dict[str, Any]] = [
        {},
        {"inverse_scale_a": one, "inverse_scale_b": one},
        {"inverse_scale_a": rows, "inverse_scale_b": one},
        {"promote_every": 32},
        {"promote_every": 128},
        {"out_dtype": torch.bfloat16},
        {"bias": torch.zeros(64, device=device)},
        {"bias": torch.zeros(64, 64, device=device)},
        {"accumulator": torch.zeros(64, 64, device=device)},
    ]
    products = [checked_product(a, b.t(), **case) for case in cases]
    products += [checked_product(c, b.t()), checked_product(a, b.view(torch.float8_e5m2).t())]
    plans = [plan(product, settings) for product in products for settings in (SQUARE, SMALL)]
    assert len(set(plans)) == len(plans) == len(made)
    again = [plan(product, settings) for product in products for settings in (SQUARE, SMALL)]
    assert again == plans
    assert len(made) == len(plans)


@pytest.mark.gpu
def test_variants_are_not_mixed_up_on_the_card() -> None:
    from fp8lab import ops

    values = torch.randn(1 << 13, device="cuda").mul_(100)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = values.to(dtype)
        # At 16 bytes, off it, at it; sizes that are multiples of 16, are not, are 1.
        for start, size in ((0, 4096), (1, 4096), (0, 4095), (3, 1), (8, 1), (0, 4096), (1, 4095)):
            part = x[start : start + size]
            for scale in (None, torch.full((4,), 0.5, device="cuda")[1:2]):
                codes = quantize(part, E4M3, scale=scale)
                cpu_scale = None if scale is None else scale.cpu()
                expected = ops.quantize(part.cpu(), E4M3, scale=cpu_scale)
                assert torch.equal(codes.cpu().view(torch.uint8), expected.view(torch.uint8))
        for rows, columns, pitch in (
            (64, 64, 64),
            (64, 64, 72),
            (64, 64, 65),
            (1, 64, 64),
            (63, 1, 1),
        ):
            for first in (0, 1, 8):
                matrix = x[first:].as_strided((rows, columns), (pitch, 1))
                codes, codes_t = quantize_with_transpose(matrix, E4M3)
                expected = ops.quantize(matrix.cpu().contiguous(), E4M3).view(torch.uint8)
                assert torch.equal(codes.cpu().view(torch.uint8), expected)
                assert torch.equal(codes_t.cpu().view(torch.uint8), expected.t())


@pytest.mark.gpu
def test_products_are_not_mixed_up_on_the_card() -> None:
    from fp8lab.kernels.matmul import matmul
    from fp8lab.ops_linear import matmul as by_place
    from fp8lab.ops_operands import Codes

    random = torch.Generator().manual_seed(1)
    memory = torch.randint(0, 120, (1 << 16,), generator=random, dtype=torch.uint8)
    memory = memory.view(torch.float8_e4m3fn)
    scale = torch.tensor([1.0, 0.25, 3.0, 0.5])
    there, scale_there = memory.cuda(), scale.cuda()
    for first, shift, (m, n, k) in (
        (0, 0, (64, 64, 128)),
        (1, 1, (64, 64, 128)),
        (0, 1, (64, 64, 128)),
        (16, 0, (64, 72, 144)),
        (0, 2, (17, 33, 65)),
        (0, 0, (1, 1, 1)),
        (0, 0, (64, 64, 128)),
    ):
        (a, b), (a_there, b_there) = (
            (codes[first : first + m * k].view(m, k), codes[first + 99 :][: n * k].view(n, k))
            for codes in (memory, there)
        )
        one, other = scale[shift], scale[shift + 1]
        for promote in (None, 128):
            for dtype in (torch.float32, torch.bfloat16):
                options: dict[str, Any] = {"promote_every": promote, "out_dtype": dtype}
                found = matmul(
                    a_there,
                    b_there.t(),
                    inverse_scale_a=scale_there[shift],
                    inverse_scale_b=scale_there[shift + 1],
                    **options,
                )
                expected = by_place(Codes(a, one), Codes(b, other), **options)
                assert torch.equal(found.cpu(), expected)
