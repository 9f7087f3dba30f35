"""The formats against ml_dtypes' own description of them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from fp8lab.formats import (
    E4M3,
    E5M2,
    FORMATS,
    Float8Format,
    OverflowPolicy,
    format_named,
    overflow_policy,
)

EVERY = pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda fmt: fmt.name)


@EVERY
def test_derived_values_are_those_of_ml_dtypes(fmt: Float8Format) -> None:
    info = ml_dtypes.finfo(fmt.dtype)  # type: ignore[no-untyped-call]
    assert fmt.max_finite == float(info.max)
    assert fmt.min_normal == float(info.smallest_normal)
    assert fmt.min_subnormal == float(info.smallest_subnormal)
    assert fmt.dtype.itemsize == 1


@EVERY
def test_codes_count_finite_magnitudes_in_order(fmt: Float8Format) -> None:
    magnitudes = np.arange(fmt.max_code + 1, dtype=np.uint8)
    values = [fmt.value_of_magnitude(int(m)) for m in magnitudes]
    assert values == magnitudes.view(fmt.dtype).astype(np.float64).tolist()
    assert values == sorted(set(values))


@EVERY
def test_special_codes_are_what_ml_dtypes_decodes(fmt: Float8Format) -> None:
    def decoded(code: int) -> float:
        return float(np.uint8(code).view(fmt.dtype).astype(np.float64))

    assert np.isnan(decoded(fmt.nan_code))
    if fmt.infinity_code is not None:
        assert decoded(fmt.infinity_code) == np.inf
    if fmt.has_negative_zero:
        assert decoded(0x80) == 0
        assert np.signbit(decoded(0x80))


def test_well_known_numbers() -> None:
    assert (E4M3.max_finite, E4M3.min_subnormal) == (448.0, 2.0**-9)
    assert (E5M2.max_finite, E5M2.min_subnormal) == (57344.0, 2.0**-16)
    assert (E4M3.overflow_edge, E5M2.overflow_edge) == (464.0, 61440.0)


@pytest.mark.parametrize("name", ["E4M4", "e4m3", "", None, ["E4M3"]])
def test_an_unknown_format_lists_those_there_are(name: str) -> None:
    with pytest.raises(ValueError, match=r"unknown format .*accepted: E4M3, E5M2, E4M3FNUZ"):
        format_named(name)


def test_overflow_policies_by_name() -> None:
    assert overflow_policy("saturate") is overflow_policy("ptx_satfinite")
    assert overflow_policy("ieee") is overflow_policy("ml_dtypes")
    mine = OverflowPolicy("mine", "infinity_or_nan", "max_finite", "canonical", "kept")
    assert overflow_policy(mine) is mine
    with pytest.raises(ValueError, match="finite is 'wrap'; accepted: max_finite, infinity_or_nan"):
        OverflowPolicy("mine", "wrap", "max_finite", "canonical", "kept")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"unknown overflow policy 'wrap'; accepted: saturate"):
        overflow_policy("wrap")
