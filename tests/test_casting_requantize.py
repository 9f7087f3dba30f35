"""Codes at one scale to codes at another: the oracle against exact rationals, the kernel against
it; and integers of any kind as arguments.
"""

from __future__ import annotations

from fractions import Fraction
from functools import partial
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8lab.emulation import casting as oracle
from fp8lab.emulation import scaling as oracle_scaling
from fp8lab.emulation.random import random_words
from fp8lab.emulation.scalar import quantize_scalar
from fp8lab.formats import E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, E8M0, Float8Format, overflow_policy
from fp8lab.kernels import scaling
from fp8lab.kernels.casting import quantize, requantize
from fp8lab.kernels.launch import CastSettings, RowSettings, TileSettings
from fp8lab.testing import assert_bits_equal, run_kernel, scales, to_torch

EVERY_FORMAT = (E4M3, E5M2, E4M3FNUZ, E5M2FNUZ)
ALL_FORMATS = pytest.mark.parametrize("fmt", EVERY_FORMAT, ids=lambda fmt: fmt.name)
EVERY_CODE = np.arange(256, dtype=np.uint8)
SETTINGS = CastSettings(block=128, num_warps=1)


@ALL_FORMATS
@pytest.mark.parametrize("rounding", ["nearest_even", "toward_zero"])
@settings(max_examples=5)
@given(
    source=st.sampled_from(EVERY_FORMAT),
    inverse_scale=st.none() | scales(),
    scale=st.none() | scales(),
    overflow=st.sampled_from(["saturate", "ieee"]),
)
def test_the_oracle_rounds_the_exact_product_once(
    fmt: Float8Format,
    rounding: str,
    source: Float8Format,
    inverse_scale: float | None,
    scale: float | None,
    overflow: str,
) -> None:
    codes = EVERY_CODE.view(source.dtype)
    found = oracle.requantize(
        codes,
        fmt,
        inverse_scale=inverse_scale,
        scale=scale,
        rounding=rounding,
        overflow=overflow,
    ).view(np.uint8)
    policy = overflow_policy(overflow, fmt)
    factor = Fraction(inverse_scale or 1) * Fraction(scale or 1)
    for code, value in enumerate(oracle.dequantize(codes).tolist()):
        y = value
        if np.isfinite(value) and value:
            exact = Fraction(value) * factor
            y = float(exact)
            assert Fraction(y) == exact  # float64 holds it
        expected = quantize_scalar(y, fmt, rounding=rounding, overflow=policy)
        assert found[code] == expected, (code, y)


@ALL_FORMATS
@pytest.mark.parametrize("rounding", ["nearest_even", "toward_zero"])
@given(inverse_scale=st.none() | scales(), scale=st.none() | scales())
@settings(max_examples=6)
def test_the_kernel_is_the_oracle(
    fmt: Float8Format,
    rounding: str,
    device: str,
    inverse_scale: float | None,
    scale: float | None,
) -> None:
    """All 256 codes of every format."""
    by_name: dict[str, Any] = {"inverse_scale": inverse_scale, "scale": scale}
    tensors: dict[str, Any] = {
        name: None if factor is None else torch.tensor([factor], device=device)
        for name, factor in by_name.items()
    }
    for source, overflow in product(EVERY_FORMAT, ("saturate", "ieee")):
        codes = EVERY_CODE.view(source.dtype)
        options: dict[str, Any] = {"rounding": rounding, "overflow": overflow}
        found = run_kernel(
            requantize,
            to_torch(codes, device=device),
            fmt,
            settings=SETTINGS,
            **tensors,
            **options,
        )
        expected = oracle.requantize(codes, fmt, **by_name, **options)
        assert_bits_equal(found, expected, inputs=codes)


def test_requantize_does_not_round_twice(device: str) -> None:
    """The exact product lies just above the tie of 1 and 1.125; in float32 it is the tie."""
    inverse_scale = np.nextafter(np.float32(17 / 18), np.float32(0))
    scale = np.float32(1 + 2.0**-23)
    assert np.float32(np.float32(1.125) * inverse_scale) * scale == 1.0625
    codes = np.array([0x39], np.uint8).view(E4M3.dtype)
    twice = oracle.quantize(
        oracle.dequantize(codes, inverse_scale=inverse_scale), E4M3, scale=scale
    )
    once = oracle.requantize(codes, E4M3, inverse_scale=inverse_scale, scale=scale)
    assert [int(code.view(np.uint8)[0]) for code in (twice, once)] == [0x38, 0x39]
    found = requantize(
        to_torch(codes, device=device),
        E4M3,
        inverse_scale=torch.tensor([float(inverse_scale)], device=device),
        scale=torch.tensor([float(scale)], device=device),
    )
    assert_bits_equal(found, once)


def test_factors_of_blocks_broadcast() -> None:
    codes = EVERY_CODE.view(E4M3.dtype).reshape(16, 16)
    rows = np.float32(2.0) ** np.arange(-8, 8, dtype=np.float32)[:, None]
    found = oracle.requantize(codes, E5M2, inverse_scale=rows, scale=np.float32(3))
    for row in range(16):
        alone = oracle.requantize(codes[row], E5M2, inverse_scale=rows[row], scale=3)
        assert_bits_equal(found[row], alone)
    assert oracle.requantize(codes[:0], E5M2).shape == (0, 16)


RECORD: Any = np.zeros(2, dtype=[("a", np.float32)])
CODES: Any = EVERY_CODE[:2].view(E4M3.dtype)


def requantize_codes(codes: Any = CODES, fmt: Any = E4M3, **options: Any) -> Any:
    return oracle.requantize(codes, fmt, **options)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            partial(requantize_codes, codes=CODES.view(np.uint8)),
            TypeError,
            "codes have dtype uint8",
        ),
        (partial(requantize_codes, codes=CODES.view(E8M0.dtype)), TypeError, "codes have dtype"),
        (
            partial(requantize_codes, rounding="stochastic"),
            ValueError,
            "accepted: nearest_even, to",
        ),
        (partial(requantize_codes, scale=0.0), ValueError, "scale is 0.0; accepted"),
        (partial(requantize_codes, inverse_scale=np.inf), ValueError, "inverse_scale is inf"),
        (partial(requantize_codes, scale=np.ones(3)), ValueError, "scale has shape"),
        (partial(requantize_codes, fmt="E4M3"), TypeError, "fmt is 'E4M3'"),
        (partial(requantize_codes, scale=RECORD), TypeError, "scale has dtype"),
        (partial(oracle.quantize, np.ones(2), E4M3, scale=RECORD), TypeError, "scale has dtype"),
        (partial(oracle.dequantize, CODES, inverse_scale=RECORD), TypeError, "inverse_scale has"),
        (partial(oracle_scaling.scale_from_amax, RECORD, E4M3), TypeError, "amax has dtype"),
        (partial(oracle_scaling.static_scale, RECORD), TypeError, "scale has dtype"),
    ],
)
def test_bad_input_is_refused(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_a_scale_of_ml_dtypes_is_a_number() -> None:
    scale = np.array(2, ml_dtypes.bfloat16)
    assert_bits_equal(
        oracle.quantize(np.ones(1), E4M3, scale=scale), oracle.quantize(2 * np.ones(1), E4M3)
    )


check_margin: Any = oracle_scaling.check_margin


def words_of(shape: Any) -> Any:
    return random_words(0, shape)


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8])
def test_integers_of_numpy_are_integers(kind: Any, device: str) -> None:
    """Margins, blocks, counts of bits, histories, offsets, shapes, seeds and threads."""
    x = np.linspace(-3, 3, 96, dtype=np.float32).reshape(3, 32)
    words = random_words(3, x.shape, offset=2)
    assert_bits_equal(random_words(kind(3), (kind(3), kind(32)), offset=kind(2)), words)
    assert random_words(0, kind(3)).shape == (3,)
    stochastic: dict[str, Any] = {"rounding": "stochastic", "random_bits": words}
    codes = oracle.quantize(x, E4M3, bit_count=5, **stochastic)
    assert_bits_equal(
        oracle.quantize(x, E4M3, bit_count=kind(5), threads=kind(1), **stochastic), codes
    )
    blocks = oracle_scaling.quantize_blocks(x, E4M3, block=(1, 16), margin=2)
    again = oracle_scaling.quantize_blocks(x, E4M3, block=(kind(1), kind(16)), margin=kind(2))
    history = oracle_scaling.DelayedScalingState.fresh(kind(4))
    assert oracle_scaling.resize_history(history, kind(2)).amax_history.shape == (2,)
    tensor = to_torch(x, device=device)
    seeded: dict[str, Any] = {"rounding": "stochastic", "settings": SETTINGS}
    assert_bits_equal(
        quantize(tensor, E4M3, seed=kind(3), offset=kind(2), bit_count=kind(5), **seeded), codes
    )
    small = scaling.BlockSettings(TileSettings(16, 16, 1), RowSettings(64, 1, longest=64))
    found = scaling.quantize_blocks(
        tensor, E4M3, block=(kind(1), kind(16)), margin=kind(2), settings=small
    )
    for one in (again, found):
        for actual, wanted in zip(one, blocks, strict=True):
            assert_bits_equal(actual, wanted)
    assert scaling.DelayedScalingState.fresh(kind(4), device=device).amax_history.shape == (4,)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (partial(words_of, -1), ValueError, "shape is -1; accepted: an integer, or"),
        (partial(words_of, (3, -1)), ValueError, r"shape is \(3, -1\)"),
        (partial(words_of, (3, 1.0)), TypeError, r"shape is \(3, 1.0\)"),
        (partial(words_of, None), TypeError, "shape is None"),
        (partial(words_of, True), TypeError, "shape is True"),
        (partial(check_margin, True), ValueError, "margin is True"),
        (partial(check_margin, 1.0), ValueError, "margin is 1.0; accepted: an int"),
    ],
)
def test_what_is_no_integer_is_refused(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
