"""The oracle's matrix product: against real cards, its own slow form, and hand-worked numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8lab.emulation.dot import FLOAT32, dot, rounded
from fp8lab.emulation.fused import fma
from fp8lab.emulation.matmul import (
    HOPPER_FP8,
    HOPPER_FP8_VIA_F16,
    IEEE_FLOAT32,
    TENSOR_CORES,
    TensorCore,
    matmul,
    matmul_at,
)
from fp8lab.formats import E4M3, Float8Format
from fp8lab.testing import assert_bits_equal
from fp8lab.testing.products import (
    ACCUMULATOR_KINDS,
    OPERAND_KINDS,
    accumulator_values,
    operand_values,
)

GOLDEN = Path(__file__).parent / "golden"
DOCUMENT = Path(__file__).parent.parent / "docs" / "numerics.md"
CUBLASLT_K = (32, 64, 128, 256, 512, 1024, 2048)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
Array = np.ndarray[Any, Any]


@lru_cache
def golden(name: str) -> Mapping[str, Array]:
    with np.load(GOLDEN / f"{name}.npz") as file:
        return dict(file)


def operands(file: Mapping[str, Array], key: str) -> tuple[Array, Array]:
    return file[f"{key}_A"].view(E4M3.dtype), file[f"{key}_B"].view(E4M3.dtype).T


def codes(values: Any, fmt: Float8Format = E4M3) -> Array:
    return np.array(values, dtype=np.float32).astype(fmt.dtype)


def f32(values: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.array(values, dtype=np.float32)


# Outputs of a card.


@pytest.mark.parametrize("fast", [0, 1])
@pytest.mark.parametrize("k", CUBLASLT_K)
def test_equals_cublaslt(k: int, fast: int) -> None:
    file = golden("cublaslt_scaled_mm")
    a, b = operands(file, f"{k}_{fast}")
    product = matmul(a, b, promote_every=None if fast else 128)
    assert_bits_equal(product, file[f"{k}_{fast}_D"])


@pytest.mark.parametrize("promote", [None, 128, 64, 32])
def test_equals_triton(promote: int | None) -> None:
    file = golden("hopper_chain_and_epilogue")
    product = matmul(*operands(file, str(promote)), promote_every=promote)
    assert_bits_equal(product, file[f"{promote}_128_128_128_D"])


@pytest.mark.parametrize("fast", [0, 1])
def test_equals_cublaslt_with_scales(fast: int) -> None:
    file = golden("hopper_chain_and_epilogue")
    a, b = operands(file, "row")
    promote = None if fast else 128
    by_row = matmul(
        a,
        b,
        promote_every=promote,
        inverse_scale_a=file["row_sa"],
        inverse_scale_b=file["row_sb"],
        out_dtype=BFLOAT16,
    )
    assert_bits_equal(by_row.view(np.int16), file[f"row_D{fast}"])
    by_tensor = matmul(a, b, promote_every=promote, inverse_scale_a=0.37, inverse_scale_b=1.7)
    assert_bits_equal(by_tensor, file[f"ten_D{fast}"])


def test_equals_cublaslt_with_blocks() -> None:
    file = golden("hopper_chain_and_epilogue")
    a, b = operands(file, "row")
    product = matmul(
        a,
        b,
        inverse_scale_a=file["blk_sa"].T,
        inverse_scale_b=file["blk_sb"].T,
        out_dtype=BFLOAT16,
    )
    assert_bits_equal(product.view(np.int16), file["blk_D"])


def test_every_parameter_leaves_its_mark_on_the_card() -> None:
    """A core that differs in one parameter gives other bits: the outputs above do decide."""
    file = golden("hopper_chain_and_epilogue")
    a, b = operands(file, "None")
    rows, columns = np.arange(16), np.arange(16)
    expected = file["None_128_128_128_D"][:16, :16]
    others = [
        replace(HOPPER_FP8, step_k=16),
        replace(HOPPER_FP8, fraction_bits=12),
        replace(HOPPER_FP8, fraction_bits=14),
        replace(HOPPER_FP8, significand_bits=13),
        replace(HOPPER_FP8, significand_bits=15),
        replace(HOPPER_FP8, rounding="nearest_even"),
    ]
    assert_bits_equal(matmul_at(a, b, rows, columns), expected)
    for core in others:
        with pytest.raises(AssertionError, match="elements differ"):
            assert_bits_equal(matmul_at(a, b, rows, columns, core=core), expected)


# The slow form.


@pytest.mark.parametrize("core", TENSOR_CORES.values(), ids=TENSOR_CORES)
@settings(max_examples=40)
@given(data=st.data())
def test_both_forms_agree(core: TensorCore, data: st.DataObject) -> None:
    m, n = data.draw(st.integers(1, 3), label="m"), data.draw(st.integers(1, 3), label="n")
    k = data.draw(st.one_of(st.integers(0, 70), st.sampled_from([16, 32, 64])), label="k")
    kinds = st.sampled_from(OPERAND_KINDS)
    special = data.draw(st.booleans(), label="special")
    matrices = []
    for name, shape in (("a", (m, k)), ("b", (n, k))):
        dtype = data.draw(st.sampled_from(core.operands), label=f"type of {name}")
        kind, seed = data.draw(kinds, label=name), data.draw(st.integers(0, 2**32 - 1))
        matrices.append(operand_values(seed, shape, dtype, kind, special=special))
    a, b = matrices[0], matrices[1].T
    kind = data.draw(st.sampled_from(ACCUMULATOR_KINDS), label="c")
    c = accumulator_values(data.draw(st.integers(0, 99)), (m, n), core.accumulator, kind)

    product = matmul(a, b, core=core, accumulator=c)
    expected = [
        [dot(a[i], b[:, j], core, accumulator=float(c[i, j])) for j in range(n)] for i in range(m)
    ]
    assert_bits_equal(product, np.array(expected, np.float32).reshape(m, n))


@settings(max_examples=30)
@given(data=st.data())
def test_promotion_is_chains_from_zero_and_float32_additions(data: st.DataObject) -> None:
    promote = data.draw(st.sampled_from([32, 64, 128]))
    k = data.draw(st.integers(0, 300))
    a = operand_values(data.draw(st.integers(0, 99)), (2, k), "float8_e4m3fn", "ordinary")
    b = operand_values(data.draw(st.integers(0, 99)), (k, 3), "float8_e5m2", "exponents")
    total = accumulator_values(data.draw(st.integers(0, 99)), (2, 3), "float32", "ordinary")
    product = matmul(a, b, accumulator=total, promote_every=promote)
    for first in range(0, k, promote):
        part = slice(first, first + promote)
        total = total + matmul(a[:, part], b[part])
    assert_bits_equal(product, total)


floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=300)
@given(x=floats, y=floats, z=floats, near=st.booleans())
def test_the_fused_multiply_add_rounds_once(x: float, y: float, z: float, near: bool) -> None:
    if near:  # z so near x * y that they cancel, or one lies at the other's last bits
        with np.errstate(all="ignore"):
            z = float(np.float32(-x * y * (1 + z % 3 * 2.0**-24)))
        if not np.isfinite(z):
            return
    exact = Fraction(x) * Fraction(y) + Fraction(z)
    expected = rounded(exact, 24, FLOAT32, nearest=True)
    got = fma(f32([x]), f32([y]), f32([z]))
    assert float(got[0]) == float(expected)


@pytest.mark.parametrize(
    ("x", "y", "z", "bits"),
    [
        # A tie of float32 in float64's eyes, broken by what float64 dropped.
        (1 + 2.0**-23, 1 + 2.0**-23, 2.0**24, 0x4B800001),
        (2.0**-75, 2.0**-75, 1 + 2.0**-23, 0x3F800001),
        (2.0**-100, 2.0**-50, 2.0**-149 * 3, 0x00000004),
        (1.5 * 2.0**-100, 2.0**-50, 2.0**-149, 0x00000002),
        (2.0**-100, -(2.0**-50), 2.0**-148, 0x00000002),
    ],
)
def test_the_fused_multiply_add_at_ties(x: float, y: float, z: float, bits: int) -> None:
    got = fma(f32([x]), f32([y]), f32([z]))
    assert got.view(np.uint32).tolist() == [bits]


# By hand.


def test_the_worked_example_of_the_document() -> None:
    """docs/numerics.md works this element out, step by step."""
    a, b = codes([[448, 1.125, 0.015625]]), codes([[1.75], [0.9375], [0.0078125]])
    assert matmul(a, b).item() == 785.0
    c = f32([[1.0]])
    assert matmul(a, b, accumulator=c).item() == 786.0
    assert matmul(a, b, core=IEEE_FLOAT32).item() == 785.0548095703125


def test_the_document_recomputes_from_its_own_table() -> None:
    """Every number of the example follows from those before it, by the rules that it states."""
    text = DOCUMENT.read_text(encoding="utf-8").split("### One element by hand")[1]
    text = text.split("###")[0]
    lines = [line for line in text.splitlines() if re.match(r"\| \d+ \|", line)]
    assert len(lines) == 3
    exponents, values = [], []
    for line in lines:
        _, a, b, significands, product, exponent, value = (
            cell.strip() for cell in line.strip("|").split("|")
        )
        sides = [re.fullmatch(r"(?:([\d.]+) = )?([\d.]+) · 2\^(-?\d+).*", side) for side in (a, b)]
        total = 0
        for side, significand in zip(sides, significands.split(" · "), strict=True):
            assert side is not None
            assert significand == side[2]
            total += int(side[3])
            if side[1] is not None:
                assert Fraction(side[1]) == Fraction(side[2]) * Fraction(2) ** int(side[3])
        left, right = (Fraction(part) for part in significands.split(" · "))
        assert Fraction(product) == left * right
        assert int(exponent) == total
        stated = Fraction(2) ** int(value[2:]) if value.startswith("2^") else Fraction(value)
        assert stated == Fraction(product) * Fraction(2) ** total
        exponents.append(total)
        values.append(stated)
    unit = Fraction(2) ** (max(exponents) - 13)
    assert f"The unit is 2^({max(exponents)} - 13) = {unit}" in text
    terms = [value / unit for value in values]
    assert f"{terms[0]}, {float(terms[1])} and {terms[2]}" in text.replace("\n", " ")
    cut = [math.floor(term) for term in terms]
    assert 1 / unit == 32
    for total in (sum(cut), sum(cut) + 32):
        assert str(total) in text
        assert str(float(total * unit)) in text
        # 14 significant bits of a number from 512 to 1024 end at 1/16.
        assert str(float(math.floor(total * unit * 16) / 16)) in text


def test_what_is_cut() -> None:
    big, small = codes([[256.0]]), codes([[1.0]])
    # emax = 8: terms are cut to multiples of 2**-5.
    a, b = codes([[256, 0.9375, -0.9375]]), codes([[1], [0.0625], [0.0625]])
    assert matmul(a, b).item() == 256.03125 - 0.03125
    a = codes([[256, 0.25, 0.25]])
    assert matmul(a, codes([[1], [0.0625], [0.0625]])).item() == 256.0  # both below 2**-5
    assert matmul(a[:, 1:], codes([[0.0625], [0.0625]]), accumulator=f32([[256]])) == 256.0
    # Not normalised: 1.75 * 1.75 = 3.0625 has the exponent 0 and keeps 13 bits below 1.
    assert matmul(codes([[1.75]]), codes([[1.75]])).item() == 3.0625
    # 14 bits: 16384 + 1 is cut, 16384 + 2 is not.
    assert matmul(big, codes([[64.0]]), accumulator=f32([[1.0]])).item() == 16384.0
    assert matmul(big, codes([[64.0]]), accumulator=f32([[2.0]])).item() == 16386.0
    assert matmul(small, small, accumulator=f32([[2.0**-20]])).item() == 1.0


@pytest.mark.parametrize("k", range(2, 32))
def test_the_order_of_the_fallback(k: int) -> None:
    """Two steps of 16: the k with k % 4 < 2, then the rest.

    256 and -256 stand in the first step. A product of 2**-18 is cut beside them, and kept where it
    comes after them.
    """
    row, column = np.zeros((1, 32)), np.zeros((32, 1))
    row[0, :2], column[:2, 0] = 1.0, (256.0, -256.0)
    row[0, k] = column[k, 0] = 2.0**-9
    got = matmul(codes(row), codes(column), core=HOPPER_FP8_VIA_F16).item()
    assert got == (0.0 if k % 4 < 2 else 2.0**-18)
