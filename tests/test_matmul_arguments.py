"""What the oracle's matrix product refuses, and what its cores and lowering say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fp8lab.emulation.matmul import (
    HOPPER_BF16,
    HOPPER_F16,
    HOPPER_FP8,
    HOPPER_FP8_F16,
    HOPPER_FP8_VIA_F16,
    TENSOR_CORES,
    lowering,
    matmul,
    matmul_at,
    matmul_picked,
)
from fp8lab.formats import E4M3, Float8Format

Array = np.ndarray[Any, Any]


def codes(values: Any, fmt: Float8Format = E4M3) -> Array:
    return np.array(values, dtype=np.float32).astype(fmt.dtype)


def f32(values: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.array(values, dtype=np.float32)


def test_bad_input_is_refused_with_what_is_accepted() -> None:
    a, b = codes(np.ones((2, 64))), codes(np.ones((64, 3)))
    half = codes(np.ones((2, 64))).astype(np.float16)
    wide_a, wide_b = codes(np.ones((2, 256))), codes(np.ones((256, 3)))
    uneven = f32(np.full((2, 3), 1 + 2.0**-12))
    refused: list[tuple[type[Exception], str, tuple[Any, Any], dict[str, Any]]] = [
        (ValueError, r"\(2, 64\) and b \(2, 64\)", (a, a), {}),
        (TypeError, "a is of float32; hopper_fp8 takes", (a.astype(np.float32), b), {}),
        (TypeError, "b is of uint8.*view raw bytes", (a, b.view(np.uint8)), {}),
        (TypeError, "a is of list", ([[1.0]], b), {}),
        (TypeError, "hopper_bf16 takes: bfloat16", (a, b), {"core": HOPPER_BF16}),
        (ValueError, "two dimensions", (a[0], b), {}),
        (ValueError, "a multiple of 32", (a, b), {"promote_every": 48}),
        (ValueError, "a multiple of 32", (a, b), {"promote_every": 0}),
        (ValueError, "of 16", (half, half.T), {"core": HOPPER_F16, "promote_every": 8}),
        (ValueError, "accumulator has shape", (a, b), {"accumulator": f32(np.zeros((3, 2)))}),
        (TypeError, "accumulator has dtype float64", (a, b), {"accumulator": np.zeros((2, 3))}),
        (ValueError, "float16 does not", (a, b), {"core": HOPPER_FP8_F16, "accumulator": uneven}),
        (ValueError, "inverse_scale_a has shape", (a, b), {"inverse_scale_a": np.ones((1, 2))}),
        (ValueError, "inverse_scale_b has shape", (a, b), {"inverse_scale_b": np.ones((3, 1))}),
        (TypeError, "inverse_scale_a has dtype", (a, b), {"inverse_scale_a": "1"}),
        (
            ValueError,
            "accepted: one length",
            (wide_a, wide_b),
            {"inverse_scale_a": np.ones((2, 2)), "inverse_scale_b": np.ones((8, 3))},
        ),
        (
            ValueError,
            "blocks of 32",
            (a, b),
            {"inverse_scale_a": np.ones((2, 2)), "promote_every": 64},
        ),
        (ValueError, "bias has shape", (a, b), {"bias": f32(np.ones(2))}),
        (TypeError, "bias has dtype float64", (a, b), {"bias": np.ones(3)}),
        (TypeError, "out_dtype is float16", (a, b), {"out_dtype": np.float16}),
        (ValueError, "threads is 0", (a, b), {"threads": 0}),
    ]
    for error, message, (left, right), options in refused:
        with pytest.raises(error, match=message):
            matmul(left, right, **options)
    with pytest.raises(ValueError, match="order must hold"):
        replace(HOPPER_FP8, order=(0, 2))


def test_rows_and_columns_that_are_not_there_are_refused() -> None:
    a, b = np.zeros((3, 32), E4M3.dtype), np.zeros((32, 2), E4M3.dtype)
    assert matmul_at(a, b, [], [1]).shape == (0, 1)
    for rows, columns, message in (
        ([-1], [0], "rows goes from -1 to -1; accepted: from 0 to 2"),
        ([0], [0, 2], "columns goes from 0 to 2; accepted: from 0 to 1"),
    ):
        with pytest.raises(ValueError, match=message):
            matmul_at(a, b, rows, columns)
    for rows in ([0.5], [True], 1):  # type: ignore[assignment]
        with pytest.raises(TypeError, match=r"rows is .*; accepted: a list of integers"):
            matmul_at(a, b, rows, [0])
    with pytest.raises(ValueError, match="a has 3 rows and b 2 columns; accepted: the 1 and 2"):
        matmul_picked(a, b, [1], [0, 1], (3, 2))
    with pytest.raises(ValueError, match="rows goes from 3 to 3; accepted: from 0 to 2"):
        matmul_picked(a[:1], b, [3], [0, 1], (3, 2))
    with pytest.raises(TypeError, match="core is 'hopper_fp8'; accepted: a TensorCore"):
        matmul(a, b, core="hopper_fp8")  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(9.5, 9), (9, 9, 9), (9,), (), None, 9, (-9, 9), (True, 9)])
def test_a_shape_that_is_no_pair_of_integers_is_refused(shape: Any) -> None:
    a, b = np.zeros((1, 32), E4M3.dtype), np.zeros((32, 1), E4M3.dtype)
    with pytest.raises(ValueError, match=r"shape is .*; accepted: two integers, \(M, N\)"):
        matmul_picked(a, b, [0], [0], shape)


@pytest.mark.parametrize("name", ["scaled_as", "whole", "shapes"])
def test_samples_take_no_option_that_matmul_does_not_have(name: str) -> None:
    a, b = np.zeros((1, 32), E4M3.dtype), np.zeros((32, 1), E4M3.dtype)
    message = f"unknown option '{name}'; accepted: core, accumulator, promote_every,"
    options: dict[str, Any] = {name: (3, 3)}
    with pytest.raises(TypeError, match=message):
        matmul_at(a, b, [0], [0], **options)
    with pytest.raises(TypeError, match=message):
        matmul_picked(a, b, [0], [0], (9, 9), **options)


def test_lowering() -> None:
    assert lowering(128, 256, 128, 8).core is HOPPER_FP8
    assert lowering(128, 256, 128, 8).promote_every is None
    assert lowering(64, 64, 64, 4, 32).promote_every == 32
    for block_m, warps, promote in ((16, 4, None), (32, 4, 128), (64, 2, None), (64, 4, 0)):
        found = lowering(block_m, 64, 128, warps, promote)
        assert found.core is HOPPER_FP8_VIA_F16
        assert found.promote_every is None
    refused: list[tuple[Any, ...]] = [
        (64, 64, 64, 4, 128),
        (60, 64, 64, 4),
        (64, 64, 64, 4, None, 89),
        (64, 64, 64, 4, 16),
    ]
    for bad in refused:
        with pytest.raises(ValueError, match=r"accept|known"):
            lowering(*bad)


def test_only_what_was_measured_is_called_exact() -> None:
    for core in TENSOR_CORES.values():
        kinds = {source.kind for source in core.sources}
        assert kinds, core.name
        assert core.exact == ("read" not in kinds)
    exact = {core.name for core in TENSOR_CORES.values() if core.exact}
    assert exact == {"hopper_fp8", "hopper_fp8_f16", "hopper_fp8_via_f16", "ieee_float32"}
