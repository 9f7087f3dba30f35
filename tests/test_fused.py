"""The exact fused multiply-add against fractions, and the power against exact arithmetic."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8lab.emulation.fused import fma, power
from fp8lab.testing import assert_bits_equal
from fp8lab.testing.values import random_words, special_values

FLOATS = st.integers(0, 2**32 - 1).map(lambda word: np.uint32(word).view(np.float32))


def rounded(exact: Fraction) -> np.float32:
    """The float32 nearest to a fraction, ties to even: by comparison with its two neighbours."""
    sign = -1 if exact < 0 else 1
    magnitude = abs(exact)
    words = [np.uint32(0), np.uint32(0x7F800000)]
    while words[1] - words[0] > 1:  # magnitudes are ordered as their bits are
        middle = np.uint32((int(words[0]) + int(words[1])) // 2)
        words[value_of(middle) > magnitude] = middle
    low, high = words
    gap_low, gap_high = magnitude - value_of(low), value_of(high) - magnitude
    nearest = low if gap_low < gap_high or (gap_low == gap_high and low % 2 == 0) else high
    return np.float32(sign) * np.uint32(nearest).view(np.float32)


def value_of(word: np.uint32) -> Fraction:
    """The value of a magnitude; Inf counts as the value that would come next."""
    return Fraction(2**128) if word == 0x7F800000 else Fraction(float(word.view(np.float32)))


@given(FLOATS, FLOATS, FLOATS)
@settings(max_examples=300)
def test_fma_rounds_the_exact_value_once(a: np.float32, b: np.float32, c: np.float32) -> None:
    if not np.isfinite([a, b, c]).all():
        return
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    found = fma(a, b, c)
    if exact:
        assert_bits_equal(found, np.asarray(rounded(exact)))
    else:
        assert found == 0


@pytest.mark.parametrize("exponent", [-149, -140, -126, -20, 0, 100])
def test_fma_where_two_roundings_differ(exponent: int) -> None:
    """A sum just beside a tie of float32: float64 rounds it onto the tie."""
    one, quantum = np.float32(2.0**exponent), max(exponent - 23, -149)
    a, b = np.float32(1 + 2.0**-23), np.float32(1.5)
    for c in (np.float32(2.0 ** (quantum + 30)), one, -one):
        exact = Fraction(float(a * one)) * Fraction(float(b)) + Fraction(float(c))
        assert_bits_equal(fma(a * one, b, c), np.asarray(rounded(exact)))
    tie = np.float32(1 + 2.0**-12)
    small = np.float32(2.0**-60)
    plain = np.float32(float(tie) * float(tie) + float(small))
    assert plain != fma(tie, tie, small)


def beside_ties(size: int = 4096) -> tuple[Any, Any, Any]:
    """a*b is a tie of float32, and c, far below float64's last bit, says to which side."""
    words = random_words(4, size)
    odd = (1 + 2 * (words[:, 0] % np.uint64(1 << 10))).astype(np.float64)
    a = (1 + odd * 2.0**-12).astype(np.float32)
    b = np.full(size, 1 + 2.0**-12, np.float32)
    c = np.where(words[:, 1] % np.uint64(2), 1, -1).astype(np.float32) * np.float32(2.0**-60)
    return a, b, c


def test_fma_beside_every_tie() -> None:
    a, b, c = beside_ties(300)
    rows = zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    exact = [rounded(Fraction(x) * Fraction(y) + Fraction(z)) for x, y, z in rows]
    assert_bits_equal(fma(a, b, c), np.array(exact, np.float32))
    twice = (a.astype(np.float64) * b + c).astype(np.float32)
    assert (twice != exact).mean() > 0.3, "the cases are hard"


def test_fma_keeps_ieee_special_cases() -> None:
    inf, nan, zero = np.float32(np.inf), np.float32(np.nan), np.float32(0)
    assert np.isnan(fma(inf, zero, nan))
    assert np.isnan(fma(inf, zero, np.float32(1)))
    assert np.isnan(fma(inf, np.float32(1), -inf))
    assert fma(np.float32(1), inf, np.float32(1)) == inf
    assert not np.signbit(fma(np.float32(1), np.float32(1), np.float32(-1)))
    assert np.signbit(fma(-zero, np.float32(1), -zero))
    assert fma(np.float32(3e38), np.float32(2), np.float32(-3e38)) == np.float32(3e38)


def test_fma_agrees_with_its_parts_where_one_rounding_is_all() -> None:
    values = np.concatenate(
        [special_values(), random_words(1, 500)[:, 0].astype(np.uint32).view("f4")]
    )
    with np.errstate(all="ignore"):
        assert_bits_equal(fma(values, np.float32(1), values[::-1]), values + values[::-1])
        product = values * values[::-1]
        usable = product != 0  # x*y - 0 has the sign of the product, x*y + 0 has not
        assert_bits_equal(fma(values, values[::-1], np.float32(0))[usable], product[usable])


def test_fma_broadcasts() -> None:
    assert fma(np.ones((3, 1), np.float32), np.ones(4, np.float32), np.float32(1)).shape == (3, 4)
    assert fma(np.float32(1), np.float32(1), np.float32(1)).shape == ()
    assert fma(np.ones(0, np.float32), np.float32(1), np.float32(1)).shape == (0,)


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.95, 0.999, 0.9999])
def test_power_gives_the_float32_constants_of_the_exact_power(beta: float) -> None:
    for step in [*range(1, 200), 999, 1000, 12345, 10**6]:
        found = power(beta, step)
        assert np.float32(1 - found) == np.float32(1 - beta**step)
        exact = Fraction(beta) ** min(step, 200)
        if step <= 200:
            assert abs(Fraction(found) - exact) <= exact * Fraction(step, 2**53)


def test_power_of_a_large_step_ends() -> None:
    assert power(0.999, 10**12) == 0.0
    assert power(0.0, 3) == 0.0
    assert power(0.7, 0) == 1.0
