"""Some elements of the oracle's matrix product are those of the whole, whichever are picked."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8lab.emulation.matmul import matmul, matmul_at, matmul_picked
from fp8lab.formats import E8M0
from fp8lab.testing import assert_bits_equal
from fp8lab.testing.products import operand_values

Array = np.ndarray[Any, Any]
Picks = tuple[list[int], list[int]]

# What each operand's scale is for; None is no scale.
KINDS = (None, "one", "rows", "blocks", "squares", "mx", "e8m0")
LENGTHS = {"blocks": 128, "squares": 128, "mx": 32, "e8m0": 32}
PAIRS = [
    (a, b) for a in KINDS for b in KINDS if len({LENGTHS[k] for k in (a, b) if k in LENGTHS}) < 2
]
# One row, one column, blocks of one row and one column, and one block of K among them.
SHAPES = [(1, 1, 300), (1, 130, 40), (129, 1, 300), (3, 4, 128), (5, 3, 129), (2, 130, 20)]


def scale(kind: str | None, rows: int, k: int, rng: np.random.Generator) -> Array | None:
    """An inverse scale (rows, blocks of K) of that kind."""
    if kind is None:
        return None
    down = {"one": 1, "squares": -(-rows // 128)}.get(kind, rows)
    across = -(-k // LENGTHS[kind]) if kind in LENGTHS else 1
    if kind == "e8m0":
        return rng.integers(100, 150, (down, across), np.uint8).view(E8M0.dtype)
    return rng.random((down, across), np.float32) + np.float32(0.1)


def options_for(
    kinds: tuple[str | None, str | None], m: int, n: int, k: int, rng: np.random.Generator
) -> dict[str, Any]:
    by_column = scale(kinds[1], n, k, rng)
    return {
        "inverse_scale_a": scale(kinds[0], m, k, rng),
        "inverse_scale_b": None if by_column is None else by_column.T,
    }


def picks_of(m: int, n: int) -> dict[str, Picks]:
    every = list(range(m)), list(range(n))
    return {
        "one": ([m - 1], [n // 2]),
        "a row": ([m // 2], every[1]),
        "a column": (every[0], [n - 1]),
        "repeated": ([0, m - 1, 0], [n - 1, n - 1]),
        "one, repeated": ([m - 1, m - 1], [0]),
        "none": ([], [0]),
        "all": every,
        "all, turned round": (every[0][::-1], every[1][::-1]),
    }


def check(a: Array, b: Array, picks: Picks, options: dict[str, Any]) -> None:
    """Both forms against the whole."""
    rows, columns = picks
    part = np.ix_(rows, columns)
    expected = matmul(a, b, **options)[part]
    assert_bits_equal(matmul_at(a, b, rows, columns, **options), expected)
    own = dict(options)
    if "accumulator" in own:
        own["accumulator"] = own["accumulator"][part]
    if "bias" in own:
        own["bias"] = own["bias"][columns] if own["bias"].ndim == 1 else own["bias"][part]
    shape = a.shape[0], b.shape[1]
    found = matmul_picked(a[rows], b[:, columns], rows, columns, shape, **own)
    assert_bits_equal(found, expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kinds", PAIRS, ids=str)
def test_every_kind_of_pick_and_scale(
    kinds: tuple[str | None, str | None], shape: tuple[int, int, int]
) -> None:
    m, n, k = shape
    a = operand_values(1, (m, k), "float8_e4m3fn", "ordinary")
    b = operand_values(2, (k, n), "float8_e5m2", "ordinary")
    options = options_for(kinds, m, n, k, np.random.default_rng(m + n + k))
    for picks in picks_of(m, n).values():
        check(a, b, picks, options)


@pytest.mark.parametrize("kinds", [("rows", "rows"), ("one", "rows"), ("rows", "one")], ids=str)
def test_one_element_at_a_time_is_scaled_as_the_whole(kinds: tuple[str, str]) -> None:
    """(result * scale_b) * scale_a, whose bits are often not those of result * (scale_a * scale_b).

    With a size of one the second rule would be taken.
    """
    a = operand_values(3, (16, 64), "float8_e4m3fn", "ordinary")
    b = operand_values(4, (64, 16), "float8_e4m3fn", "ordinary")
    options = options_for(kinds, 16, 16, 64, np.random.default_rng(0))
    whole = matmul(a, b, **options)
    alone = [[matmul_at(a, b, [i], [j], **options).item() for j in range(16)] for i in range(16)]
    assert_bits_equal(np.array(alone, np.float32), whole)
    by_one, by_column = options["inverse_scale_a"], options["inverse_scale_b"]
    with np.errstate(all="ignore"):
        other = matmul(a, b) * (by_one * by_column)
    assert (other != whole).any()  # the rules differ here


@settings(max_examples=150)
@given(data=st.data())
def test_picks_with_all_that_lies_around_the_sum(data: st.DataObject) -> None:
    m, n = (data.draw(st.sampled_from([1, 2, 3, 129])) for _ in "mn")
    k = data.draw(st.sampled_from([0, 1, 32, 33, 128, 129, 260]))
    seed = data.draw(st.integers(0, 99))
    rng = np.random.default_rng(seed)
    values = data.draw(st.sampled_from(["ordinary", "exponents", "patterns"]))
    a = operand_values(seed, (m, k), "float8_e4m3fn", values)
    b = operand_values(seed + 1, (k, n), "float8_e4m3fn", values)
    kinds = data.draw(st.sampled_from(PAIRS))
    options = options_for(kinds, m, n, k, rng)
    if not any(kind in LENGTHS for kind in kinds):
        options["promote_every"] = data.draw(st.sampled_from([None, 32, 128]))
    if data.draw(st.booleans()):
        # Tiny ones change how a chain is computed, not its bits.
        reach = data.draw(st.sampled_from([1.0, 2.0**-120, 2.0**-140]))
        options["accumulator"] = rng.standard_normal((m, n), np.float32) * np.float32(reach)
    if data.draw(st.booleans()):
        shape = data.draw(st.sampled_from([(n,), (m, n)]))
        dtype = data.draw(st.sampled_from([np.float32, ml_dtypes.bfloat16]))
        options["bias"] = rng.standard_normal(shape, np.float32).astype(dtype)
    if data.draw(st.booleans()):
        options["out_dtype"] = ml_dtypes.bfloat16
    kept = data.draw(st.sampled_from([*picks_of(m, n), "drawn"]))
    drawn = tuple(data.draw(st.lists(st.integers(0, size - 1), max_size=4)) for size in (m, n))
    check(a, b, (drawn[0], drawn[1]) if kept == "drawn" else picks_of(m, n)[kept], options)
