"""`fp8lab explain` and `fp8lab info --formats`: what they say is what the casts do."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8lab.cli import main
from fp8lab.emulation.casting import quantize
from fp8lab.errors import UserError
from fp8lab.explain import INPUT_TYPES, Between, between, explain, parse_value, target_named
from fp8lab.formats import E4M3, E5M2, E8M0, OVERFLOW_POLICIES, TARGETS, FloatFormat
from fp8lab.numerics_tables import TABLES

EVERY = pytest.mark.parametrize("fmt", TARGETS.values(), ids=lambda fmt: fmt.name)


@EVERY
@given(word=st.integers(0, (1 << 32) - 1) | st.integers(0, 511).map(lambda top: top << 23))
def test_the_codes_are_those_of_the_casts(fmt: FloatFormat, word: int) -> None:
    value = np.uint32(word).view(np.float32)
    text = explain(f"0x{word:08X}", fmt, dtype="float32")
    for name in OVERFLOW_POLICIES:
        code = int(quantize(value, fmt, overflow=name).view(fmt.code_dtype))
        found = re.search(rf"^{name} .*\((0x[0-9A-F]+)\)", text, flags=re.MULTILINE)
        assert found is not None
        assert int(found[1], 16) == code


@EVERY
@given(value=st.floats(min_value=0, allow_infinity=False))
def test_neighbours_are_around_the_value(fmt: FloatFormat, value: float) -> None:
    place = between(value, fmt)
    if isinstance(place, Between):
        assert place.upper == place.lower + 1 <= fmt.max_code + 1
        low, high = (fmt.value_of_magnitude(code) for code in (place.lower, place.upper))
        assert low < value < high
        assert place.side == (
            "on" if value == place.middle else "above" if value > place.middle else "below"
        )
    elif place is None:
        assert value >= fmt.value_of_magnitude(fmt.max_code + 1) or value < fmt.min_subnormal
    else:
        assert fmt.value_of_magnitude(place) == value


def test_a_reported_fault_told() -> None:
    assert explain("0x42FC7A2A", E4M3, dtype="float32").splitlines()[:7] == [
        "value        126.23860168457031 (float32 0x42FC7A2A)",
        "in E4M3      between 120.0 (0x6F) and 128.0 (0x70)",
        "midpoint     124.0: 0.779825 of the way, above the midpoint",
        "",
        "rounding     (where it overflows: saturate)",
        "nearest_even 128.0 (0x70): the value is above the midpoint",
        "toward_zero  120.0 (0x6F)",
    ]


@pytest.mark.parametrize(
    ("value", "fmt", "scale", "line"),
    [
        ("464", E4M3, None, "in E4M3      between 448.0 (0x7E) and 480.0 (which the format does"),
        ("464", E4M3, None, "nearest_even 448.0 (0x7E): a tie goes to the even code, lower here"),
        ("1e9", E5M2, None, "in E5M2      not below 65536.0, which would come after the largest"),
        ("1e9", E5M2, None, "ieee             inf (0x7C), the same as ml_dtypes"),
        ("nan", E4M3, None, "in E4M3      not a finite value: the policy says what it becomes"),
        ("3", E8M0, None, "nearest      4.0 (0x81): every tie goes up in E8M0"),
        ("0", E8M0, None, "in E8M0      below the smallest value, 5.877471754111438e-39"),
        ("448", E4M3, None, "in E4M3      exactly 448.0"),
        ("1.75", E4M3, None, "stochastic   1.75 (0x3E) whatever the bits"),
        ("1.78125", E4M3, None, "stochastic   1.875 (0x3F) in 0.25 of the draws, else 1.75 (0x3E)"),
        ("0.1", E4M3, 3.0, "times scale  0.30000001192092896 (float32 0x3E99999A), the product"),
        ("-1e-4", E5M2, 2.0, "in E5M2      between -0.00018310546875 (0x8A) and -0.0002136"),
    ],
)
def test_what_is_said(value: str, fmt: FloatFormat, scale: float | None, line: str) -> None:
    text = explain(value, fmt, scale=scale, dtype="float32")
    assert any(found.startswith(line) for found in text.splitlines()), text


@pytest.mark.parametrize(
    ("text", "dtype", "bits"),
    [
        ("0x42FC7A2A", "float32", 0x42FC7A2A),
        ("0x7fc00001", "float32", 0x7FC00001),
        ("0x3C00", "float16", 0x3C00),
        ("1", "bfloat16", 0x3F80),
        ("0x1.8p1", "float32", 0x40400000),
        ("-inf", "float32", 0xFF800000),
        ("1e400", "float32", 0x7F800000),
        ("0x3FEefffffffffffe", "float64", 0x3FEEFFFFFFFFFFFE),
    ],
)
def test_values_are_read(text: str, dtype: str, bits: int) -> None:
    value = parse_value(text, INPUT_TYPES[dtype])
    assert int(value.view(f"u{value.dtype.itemsize}")) == bits


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["abc"], "cannot read 'abc'; accepted: 126.24"),
        (["0x"], "cannot read '0x'"),
        (["0x1FFFFFFFF"], "0x1FFFFFFFF has more than the 8 digits of a float32; see --dtype"),
        (["1", "--format", "E9"], "unknown format 'E9'; accepted: E4M3, E5M2"),
        (["1", "--scale", "0"], "--scale is 0.0; accepted: finite, above zero (in float32)"),
        (["1", "--scale", "nan"], "--scale is nan; accepted"),
        (["1", "--scale", "1e-60"], "--scale is 1e-60; accepted"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_formats_go_by_any_case() -> None:
    assert target_named("e4m3") is E4M3
    assert target_named("BFLOAT16").name == "bfloat16"


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--format", "e5m2", "--", "-0x1p-17"]) == 0
    assert "a tie goes to the even code, lower here" in capsys.readouterr().out
    assert main(["info", "--formats"]) == 0
    printed = capsys.readouterr().out
    assert all(TABLES[name]() in printed for name in ("formats", "choices", "policies"))


@pytest.mark.parametrize(
    ("text", "dtype", "bits"),
    [
        ("1.00390625000001", "bfloat16", 0x3F81),  # just above a tie of bfloat16
        ("1.00390625000000000001", "bfloat16", 0x3F81),  # of which float64 sees nothing
        ("1.00000005960464477540", "float32", 0x3F800001),
        ("-1.00048828125000001", "float16", 0xBC01),
        ("1.00048828125", "float16", 0x3C00),  # the tie itself
    ],
)
def test_a_decimal_is_rounded_once(text: str, dtype: str, bits: int) -> None:
    x = parse_value(text, INPUT_TYPES[dtype])
    assert int(x.view(f"u{x.dtype.itemsize}")) == bits


@pytest.mark.parametrize("text", ["0x1_0", "0x 10", "0x+10", "0x-1", "0x0x10", "-0x42FC7A2A", "0x"])
def test_what_only_looks_like_bits_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="cannot read"):
        parse_value(text, INPUT_TYPES["float32"])
