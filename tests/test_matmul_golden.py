"""The oracle against what a card returned for accumulators, special values and other cores."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp8lab.emulation.matmul import TENSOR_CORES
from fp8lab.experiments.record_golden import GoldenCase, cases, expected, inputs
from fp8lab.testing import assert_bits_equal

FILE = Path(__file__).parent / "golden" / "hopper_products.npz"
recorded = pytest.mark.skipif(not FILE.exists(), reason=f"{FILE.name} is not recorded yet")


@lru_cache
def golden() -> dict[str, Any]:
    with np.load(FILE) as file:
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


@recorded
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_equals_the_card(case: GoldenCase) -> None:
    arrays = arrays_of(case)
    assert_bits_equal(expected(case, arrays), arrays["d"])


@recorded
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
