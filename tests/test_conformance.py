"""The oracle's casts against other libraries: bit for bit where their rule is one of the presets.

What follows other rules is in a table of docs/numerics.md, which `test_numerics_tables` asks the
libraries for again. Faults that people reported about casts are at the end, each with its source.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8lab.emulation.casting import dequantize, quantize
from fp8lab.emulation.scalar import quantize_scalar
from fp8lab.formats import (
    E4M3,
    E5M2,
    E8M0,
    FORMATS,
    OVERFLOW_POLICIES,
    Float8Format,
    OverflowPolicy,
)
from fp8lab.peers import (
    GFLOAT,
    GFLOAT_SATURATED,
    ML_DTYPES,
    PEERS,
    TORCH_CPU,
    TORCHAO_SATURATED,
    Peer,
)
from fp8lab.testing import assert_bits_equal, edge_values, special_values, to_numpy, to_torch

Array = npt.NDArray[Any]

OCP = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
NARROW = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
PAIRS = [(peer, FORMATS[name]) for peer in PEERS for name in peer.formats]


def ask(peer: Peer) -> Callable[[Array, Float8Format], Array]:
    """The peer's cast; skips the test where it cannot be asked."""
    if reason := peer.lacking():
        pytest.skip(reason)
    return peer.cast


def inputs(dtype: np.dtype[Any], fmt: Float8Format) -> Array:
    """Every pattern of a 16-bit type; of float32 every edge of the format and random patterns."""
    if dtype.itemsize == 2:
        return np.arange(1 << 16, dtype=np.uint16).view(dtype)
    words = np.random.default_rng(7).integers(0, 1 << 32, 1 << 18, dtype=np.uint32)
    every = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    parts = [edge_values(fmt), special_values(), words.view(np.float32), every.view(np.float32)]
    return np.concatenate(parts)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize(
    ("peer", "fmt"),
    [pair for pair in PAIRS if pair[0].overflow is not None],
    ids=lambda part: part.name,
)
def test_a_library_gives_the_bits_of_its_policy(
    peer: Peer, fmt: Float8Format, dtype: np.dtype[Any]
) -> None:
    assert peer.overflow is not None
    cast = ask(peer)
    x = inputs(dtype, fmt)
    ours, theirs = quantize(x, fmt, overflow=peer.overflow), cast(x, fmt)
    same = np.full(x.shape, True)
    if fmt is E8M0:  # the test below
        same &= ~low_subnormals(x)
    if peer is TORCHAO_SATURATED and dtype.itemsize == 2:
        # torch's clamp of a 16-bit NaN gives a NaN of either sign; a NaN it is.
        nan = np.isnan(dequantize(ours))
        assert np.isnan(dequantize(theirs[nan])).all()
        same &= ~nan
    assert_bits_equal(theirs[same], ours[same], inputs=x[same])


def low_subnormals(x: Array) -> npt.NDArray[np.bool_]:
    with np.errstate(invalid="ignore"):
        magnitude = np.abs(x.astype(np.float32))
    return np.asarray((magnitude > 2.0**-127) & (magnitude < 1.5 * 2.0**-127))


@pytest.mark.parametrize("peer", [ML_DTYPES, TORCH_CPU], ids=lambda peer: peer.name)
def test_e8m0_rounds_low_subnormals_down_where_libraries_round_up(peer: Peer) -> None:
    """Above 2**-127 and below its midpoint with 2**-126, the nearest power of two is 2**-127."""
    x = inputs(NARROW[0], E8M0)
    x = x[low_subnormals(x) & (x > 0)]
    assert x.size > 20
    assert (quantize(x, E8M0).view(np.uint8) == 0).all()
    assert all(quantize_scalar(float(value), E8M0) == 0 for value in x)
    assert (ask(peer)(x, E8M0).view(np.uint8) == 1).all()


@OCP
@pytest.mark.parametrize("peer", [GFLOAT, GFLOAT_SATURATED], ids=lambda peer: peer.name)
def test_gfloat_gives_the_same_bits_but_for_the_code_of_nan(peer: Peer, fmt: Float8Format) -> None:
    cast = ask(peer)
    x = np.concatenate([inputs(dtype, fmt).astype(np.float32) for dtype in NARROW[1:]])
    x = np.concatenate([x, edge_values(fmt), special_values()])
    ours = quantize(x, fmt, overflow="saturate" if peer is GFLOAT_SATURATED else "ieee")
    theirs = cast(x, fmt)
    nan = np.isnan(dequantize(ours))
    assert_bits_equal(theirs[~nan], ours[~nan], inputs=x[~nan])
    assert (theirs[nan].view(np.uint8) == 0xFF).all()


@OCP
@pytest.mark.parametrize("peer", [GFLOAT, GFLOAT_SATURATED], ids=lambda peer: peer.name)
@given(x=st.floats(width=64))
def test_gfloat_rounds_float64_once_too(peer: Peer, fmt: Float8Format, x: float) -> None:
    overflow = "saturate" if peer is GFLOAT_SATURATED else "ieee"
    value = np.array([x])
    ours, theirs = quantize(value, fmt, overflow=overflow), ask(peer)(value, fmt)
    assert np.isnan(dequantize(ours)).all() or ours.view(np.uint8) == theirs.view(np.uint8)


@OCP
@pytest.mark.parametrize("bit_count", [2, 9, 24])
def test_stochastic_rounding_is_gfloats_with_the_bits_turned_around(
    fmt: Float8Format, bit_count: int
) -> None:
    """gfloat goes up when floor(fraction * 2**n) + r reaches 2**n; that is our r turned around."""
    gfloat = pytest.importorskip("gfloat")
    rng = np.random.default_rng(bit_count)
    x = rng.standard_normal(20_000) * np.exp2(rng.integers(-18, 16, 20_000))
    words = rng.integers(0, 1 << bit_count, x.size, dtype=np.uint32)
    info = getattr(gfloat.formats, f"format_info_ocp_{fmt.name.lower()}")
    theirs = gfloat.round_ndarray(
        info,
        x,
        gfloat.RoundMode.StochasticFastest,
        True,
        np.int64((1 << bit_count) - 1) - words,
        bit_count,
    )
    ours = quantize(x, fmt, rounding="stochastic", random_bits=words, bit_count=bit_count)
    assert_bits_equal(dequantize(ours).astype(np.float64), theirs, inputs=x)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda fmt: fmt.name)
def test_torch_decodes_every_code_to_the_same_value(fmt: Float8Format) -> None:
    codes = np.arange(256, dtype=np.uint8).view(fmt.dtype)
    assert_bits_equal(to_torch(codes).to(torch.float32), dequantize(codes))


def test_presets_are_not_each_other() -> None:
    """A policy that is not the library's would be seen: each differs from every other somewhere."""
    x = special_values()
    for fmt, distinct in ((E4M3, 3), (E5M2, 3), (E8M0, 3)):
        answers = {
            quantize(x, fmt, overflow=name).tobytes()
            for name in ("ptx_satfinite", "ml_dtypes", "torch_2_11_cuda", "torch_2_13_cpu")
        }
        assert len(answers) == distinct


def test_what_is_lacking_is_said() -> None:
    nowhere = Peer("nowhere", "no-such-package", None, (), None, ML_DTYPES.cast)
    assert nowhere.lacking() == "no-such-package is not installed"
    other = Peer("torch", "torch", "1.0", (), None, TORCH_CPU.cast)
    assert "its preset describes 1.0" in str(other.lacking())
    assert ML_DTYPES.lacking() is None


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_torch_on_the_card_gives_the_bits_of_its_preset(
    fmt: Float8Format, dtype: np.dtype[Any]
) -> None:
    if torch.__version__.split("+")[0].rsplit(".", 1)[0] != "2.11":
        pytest.skip(f"torch is {torch.__version__}; torch_2_11_cuda describes 2.11")
    x = inputs(dtype, fmt)
    if fmt is E8M0:  # float32's subnormals there, see the table of differences in docs/numerics.md
        with np.errstate(invalid="ignore"):
            magnitude = np.abs(x.astype(np.float64))
        x = x[~((magnitude > 2.0**-127) & (magnitude < 1.5 * 2.0**-127))]
    theirs = to_numpy(to_torch(x, device="cuda").to(getattr(torch, fmt.dtype_name)))
    ours = quantize(x, fmt, overflow="torch_2_11_cuda")
    if dtype == np.float16 and fmt.has_negative_zero:
        # The card widens float16 by an instruction that drops the sign of a NaN.
        ours.view(np.uint8)[np.isnan(x)] = fmt.nan_code
    assert_bits_equal(theirs, ours, inputs=x)


# --- Faults that people reported, as small inputs


def float32(word: int) -> np.float32:
    return np.uint32(word).view(np.float32)


NEAR_A_TIE = np.float64(float.fromhex("0x1.efffffffffffep-1"))


@pytest.mark.parametrize("overflow", OVERFLOW_POLICIES)
@pytest.mark.parametrize(
    ("value", "fmt", "code"),
    [
        pytest.param(float32(0x42FC7A2A), E4M3, 0x70, id="triton 8322: a carry, 126.24"),
        pytest.param(np.float32(1.97), E4M3, 0x40, id="triton 8322: a carry, 1.97"),
        pytest.param(np.float32(1.97), E5M2, 0x40, id="triton 8322: a carry, 1.97"),
        pytest.param(float32(0x3F880001), E4M3, 0x39, id="triton 11753: no detour through f16"),
        pytest.param(NEAR_A_TIE, E4M3, 0x37, id="ml_dtypes, torch: float64 is rounded once"),
        pytest.param(np.float32(464), E4M3, 0x7E, id="ml_dtypes 260: 464 is 448"),
        pytest.param(np.float32(-464), E4M3, 0xFE, id="ml_dtypes 260: -464 is -448"),
    ],
)
def test_reported_casts(value: Any, fmt: Float8Format, code: int, overflow: str) -> None:
    assert int(quantize(value, fmt, overflow=overflow).view(np.uint8)) == code
    assert quantize_scalar(float(value), fmt, overflow=overflow) == code


@pytest.mark.parametrize(
    ("overflow", "codes"),
    [
        ("ptx_satfinite", [0x7E, 0x7E, 0x7E, 0xFE]),
        ("ml_dtypes", [0x7F, 0x7F, 0x7F, 0xFF]),
        ("torch_2_11_cuda", [0x7F, 0x7F, 0x7F, 0xFF]),
        ("torch_2_13_cpu", [0x7E, 0x7E, 0x7E, 0xFE]),
        (OverflowPolicy("clip", "max_finite", "infinity_or_nan", "canonical", "positive"),
         [0x7E, 0x7E, 0x7F, 0x7F]),
    ],
)  # fmt: skip
def test_ml_dtypes_260_and_400_overflow_follows_the_named_policy(
    overflow: str | OverflowPolicy, codes: list[int]
) -> None:
    x = np.array([465, 1e4, np.inf, -np.inf], np.float32)
    assert quantize(x, E4M3, overflow=overflow).view(np.uint8).tolist() == codes


@pytest.mark.parametrize(
    ("rounding", "codes"),
    [("floor", [128, 130, 126]), ("up", [129, 131, 127]), ("nearest", [129, 131, 127])],
)
def test_onnx_7030_and_ml_dtypes_298_e8m0_rounds_as_its_name_says(
    rounding: str, codes: list[int]
) -> None:
    x = np.array([3.0, 12.0, 0.75], np.float32)
    assert quantize(x, E8M0, rounding=rounding).view(np.uint8).tolist() == codes
    below = np.nextafter(x, np.float32(0))  # not a tie any more: nearest goes down
    expected = codes if rounding == "up" else [128, 130, 126]
    assert quantize(below, E8M0, rounding=rounding).view(np.uint8).tolist() == expected


def test_te_3262_e8m0_codes_at_the_ends() -> None:
    codes = np.array([0, 1, 254, 255], np.uint8).view(E8M0.dtype)
    expected = np.array([2.0**-127, 2.0**-126, 2.0**127, np.nan], np.float32)
    assert_bits_equal(dequantize(codes), expected)
    assert_bits_equal(quantize(expected, E8M0), codes)


@OCP
def test_stochastic_rounding_jl_62_and_onednn_2903(fmt: Float8Format) -> None:
    """Half of the smallest subnormal goes up in half of all draws, and Inf stays what it is."""
    draws = np.arange(1 << 16, dtype=np.uint32)
    half = np.full(draws.shape, fmt.min_subnormal / 2, np.float32)
    options: dict[str, Any] = {"rounding": "stochastic", "random_bits": draws, "bit_count": 16}
    assert int(quantize(half, fmt, **options).view(np.uint8).sum()) == 1 << 15
    infinity = np.full(draws.shape, np.inf, np.float32)
    for overflow in OVERFLOW_POLICIES:
        codes = quantize(infinity, fmt, overflow=overflow, **options)
        assert_bits_equal(codes, quantize(infinity, fmt, overflow=overflow))


def test_ao_1766_zeros_stay_zeros_under_a_scale_that_float16_cannot_hold() -> None:
    x = np.array([0, 0, 0.1, 0.1], np.float16)
    codes = quantize(x, E5M2, scale=57344 / 0.1)
    assert codes.view(np.uint8).tolist() == [0, 0, 0x7B, 0x7B]
    assert dequantize(codes, inverse_scale=0.1 / 57344).tolist()[:2] == [0.0, 0.0]


def test_torchao_saturates_as_its_policy_says() -> None:
    """A clamp before the cast: Inf goes to the largest finite value and NaN stays NaN."""
    x = np.array([1e9, np.inf, -np.inf, np.nan], np.float32)
    codes = ask(TORCHAO_SATURATED)(x, E5M2)
    assert codes.view(np.uint8).tolist() == [0x7B, 0x7B, 0xFB, 0x7F]
