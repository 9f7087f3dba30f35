"""The oracle against what a card returned for accumulators, special values and other cores."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp8lab.emulation.fused import fma
from fp8lab.emulation.matmul import TENSOR_CORES, matmul
from fp8lab.experiments.record_golden import (
    EPILOGUES,
    PRODUCTS,
    GoldenCase,
    cases,
    epilogue_expected,
    epilogue_inputs,
    epilogue_name,
    epilogues,
    expected,
    inputs,
)
from fp8lab.testing import assert_bits_equal

FOLDER = Path(__file__).parent / "golden"


@lru_cache
def golden(name: str = PRODUCTS) -> dict[str, Any]:
    with np.load(FOLDER / name) as file:
        return dict(file)


def arrays_of(case: GoldenCase) -> dict[str, Any]:
    """A case's arrays as the oracle takes them."""
    types = {
        "a": case.dtypes[0],
        "b": case.dtypes[1],
        "start": TENSOR_CORES[case.core].accumulator,
        "bias": "float32",
        "d": "float32",
    }
    found = {}
    for name in ("a", "b", "start", "bias", "scale_a", "scale_b", "d"):
        if f"{case.name}_{name}" in golden():
            array = golden()[f"{case.name}_{name}"]
            found[name] = array.view(types[name]) if name in types else array
    return found


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_equals_the_card(case: GoldenCase) -> None:
    arrays = arrays_of(case)
    assert_bits_equal(expected(case, arrays), arrays["d"])


def test_the_file_holds_the_cases() -> None:
    stored = json.loads(str(golden()["cases"]))
    assert [case["name"] for case in stored] == [case.name for case in cases()]


def test_every_case_has_an_oracle() -> None:
    """What will be recorded can be computed, and the cases differ in name."""
    found = cases()
    assert len({case.name for case in found}) == len(found)
    for place, case in enumerate(found):
        product = expected(case, inputs(case, place))
        assert product.shape == case.sizes[:2]
        assert product.dtype == np.float32


@pytest.mark.parametrize("case", epilogues(), ids=lambda case: epilogue_name(*case))
def test_scales_and_bias_are_those_of_cublaslt(case: tuple[str, bool, str]) -> None:
    """Around the sum, the oracle does what torch._scaled_mm did, from the inputs it was given."""
    arrays = epilogue_inputs()
    for name in ("a", "b"):
        arrays[name] = golden(EPILOGUES)[name].view(arrays[name].dtype)
    scaling, _, dtype = case
    for name in ("bias", f"{scaling} a", f"{scaling} b"):
        arrays[name] = golden(EPILOGUES)[name]
    got = epilogue_expected(arrays, *case).astype(dtype or "float32")
    recorded = golden(EPILOGUES)[epilogue_name(*case)]
    assert_bits_equal(got.view(recorded.dtype), recorded)


def test_another_order_around_the_sum_would_show() -> None:
    """The recorded inputs tell the rules apart: what is close to them differs somewhere."""
    arrays = {name: golden(EPILOGUES)[name] for name in ("bias", "tensor a", "tensor b")}
    arrays |= {name: golden(EPILOGUES)[name].view("float8_e4m3fn") for name in ("a", "b")}
    unscaled = matmul(arrays["a"], arrays["b"].T)
    scaled = unscaled * (arrays["tensor a"] * arrays["tensor b"])
    bias = arrays["bias"].astype(np.float16).astype(np.float32)
    recorded = golden(EPILOGUES)["tensor, fast, float16"]
    rounded_twice = (scaled.astype(np.float16).astype(np.float32) + bias).astype(np.float16)
    assert (rounded_twice.view(np.uint16) != recorded).any()
    factor = np.broadcast_to(arrays["tensor a"] * arrays["tensor b"], scaled.shape)
    fused = fma(unscaled, factor, np.broadcast_to(bias, scaled.shape)).astype(np.float16)
    assert (fused.view(np.uint16) != recorded).any()
    recorded = golden(EPILOGUES)["1x128 by 1x128, promoted, no bias"].view(np.float32)
    by_row, by_column = (golden(EPILOGUES)[f"1x128 by 1x128 {side}"] for side in "ab")
    total = np.zeros(recorded.shape, np.float32)
    for block in range(by_row.shape[1]):
        part = slice(128 * block, 128 * (block + 1))
        partial = matmul(arrays["a"][:, part], arrays["b"][:, part].T)
        total = fma(partial, by_row[:, block : block + 1] * by_column[block], total)
    assert (total != recorded).any()
