"""Counts of what a cast did: the oracle against a slow form, the kernel against the oracle."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8lab.bridge import to_numpy
from fp8lab.emulation import telemetry as oracle
from fp8lab.emulation.blocks import expand_blocks
from fp8lab.emulation.casting import quantize
from fp8lab.emulation.gradients import LANES, LEAF
from fp8lab.emulation.telemetry import UNIT, CastCounts
from fp8lab.formats import E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, Float8Format
from fp8lab.kernels.telemetry import COLUMNS, TelemetrySettings, count_cast_, magnitude_bins_
from fp8lab.linear_casts import OperandCast
from fp8lab.ops_linear import through_kernels
from fp8lab.ops_operands import Codes
from fp8lab.ops_telemetry import CastTable, count_cast, counts_of, to_host
from fp8lab.recipes import recipe_named
from fp8lab.testing import assert_bits_equal, compiled_ptx, run_kernel, to_torch
from fp8lab.testing.values import random_words, special_values, wide_floats

DTYPES = tuple(np.dtype(t) for t in (np.float32, ml_dtypes.bfloat16, np.float16))
FORMATS = (E4M3, E5M2, E4M3FNUZ, E5M2FNUZ)
BLOCKS = (None, (1, None), (1, 128), (128, 128), (1, 32))
POLICIES = ("static:scale=3", "current", "rowwise", "blockwise", "mx", "hybrid", "bf16")


def values_of(seed: int, shape: tuple[int, int], dtype: Any, low: int = -20) -> Any:
    size = math.prod(shape)
    with np.errstate(all="ignore"):
        x = wide_floats(random_words(seed, max(size, 1))[:size, 1], low, low + 24)
        if size > 8:
            some = special_values(np.float32)[: size // 4]
            x[:: max(size // max(len(some), 1), 1)][: len(some)] = some
        x[3::7] = 0
        return x.reshape(shape).astype(dtype)


def slow_counts(
    x: Any, codes: Any, fmt: Float8Format | None, inverse: Any, scale: Any
) -> CastCounts:
    """Element by element; `inverse` and `scale` have x's shape."""
    elements = list(_elements(x, codes, inverse, scale))
    sums: dict[str, int] = {"noise_special": 0}
    for name, place in (("signal", 0), ("noise", 1)):
        total = Fraction(0)
        for start in range(0, len(elements), LEAF):
            lanes = [0.0] * LANES
            for index, element in enumerate(elements[start : start + LEAF]):
                term = element[place]
                lanes[index % LANES] += term * term
            if all(map(math.isfinite, lanes)):
                total += _any_order(lanes)
            else:  # of the errors alone
                special = 2 if any(map(math.isnan, lanes)) else 1
                sums["noise_special"] = max(sums["noise_special"], special)
        sums[name] = int(total / Fraction(2) ** UNIT)
    found = CastCounts(elements=len(elements), **sums)
    for _, _, value, decoded_zero, scaled, own in elements:
        limit = math.inf if fmt is None else fmt.overflow_edge
        over = abs(scaled) > limit or (abs(scaled) == limit and (fmt is None or fmt.max_code % 2))
        bits = int(np.float32(abs(value)).view(np.uint32))
        found += CastCounts(
            zeros=int(value == 0),
            nonfinite=int(not math.isfinite(value)),
            overflow=int(math.isfinite(value) and bool(over)),
            underflow=int(value != 0 and decoded_zero),
            amax_bits=0x7FFFFFFF if math.isnan(value) else bits,
            scale_bits=int(own.view(np.uint32)) if value != 0 else None,
        )
    return found


def _elements(x: Any, codes: Any, inverse: Any, scale: Any) -> Iterator[tuple[Any, ...]]:
    """Signal, error, value, whether the code is a zero, the scaled value, the scale."""
    with np.errstate(all="ignore"):
        for index in range(x.size):
            value = np.float32(x.flat[index])
            own = np.float32(scale.flat[index])
            if codes is None:
                plain = back = np.float32(np.asarray(value).astype(ml_dtypes.bfloat16))
                scaled = back
            else:
                plain = np.float32(codes.flat[index])
                back = np.float32(plain * np.float32(inverse.flat[index]))
                scaled = np.float32(value * own)
            finite = math.isfinite(value)
            signal = float(value) if finite else 0.0
            error = float(value) - float(back) if finite else 0.0
            yield signal, error, float(value), plain == 0, float(scaled), own


def _any_order(lanes: list[float]) -> Fraction:
    """The oracle's `order_free_sum`, in whole numbers."""
    top = max(lanes)
    if top == 0:
        return Fraction(0)
    unit = Fraction(2) ** (math.frexp(top)[1] - 1 - 60)
    numbers = [int(Fraction(lane) / unit) for lane in lanes]
    upper, lower = sum(n >> 30 for n in numbers), sum(n & (2**30 - 1) for n in numbers)
    return Fraction(float(upper) * 2.0**30 + float(lower)) * unit


@settings(max_examples=30)
@given(data=st.data())
def test_the_oracle_is_the_slow_form(data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from([(0, 3), (1, 1), (3, 5), (7, 150), (2, 1025)]))
    dtype = data.draw(st.sampled_from(DTYPES))
    x = values_of(data.draw(st.integers(0, 999)), shape, dtype, data.draw(st.integers(-60, 20)))
    fmt = data.draw(st.sampled_from([None, *FORMATS]))
    if fmt is None:
        ones = np.ones(shape, np.float32)
        assert oracle.count_cast(x, None) == slow_counts(x, None, None, ones, ones)
        return
    scale = np.float32(data.draw(st.sampled_from([1.0, 3.0, 2.0**-7, 1e5])))
    codes = quantize(x, fmt, scale=scale)
    inverse: Any = np.float32(1) / scale
    block = data.draw(st.sampled_from(BLOCKS))
    whole: Any = np.full(shape, inverse)
    given: dict[str, Any] = {"inverse_scale": inverse, "scale": scale}
    wide_scale: Any = np.full(shape, scale)
    if block is not None and x.size:
        count = tuple(-(-side // (size or side)) for side, size in zip(shape, block, strict=True))
        powers = np.ldexp(1.0, np.arange(math.prod(count)) % 9 - 4)
        inverse = powers.reshape(count).astype(np.float32)
        whole = expand_blocks(inverse, block, shape)
        wide_scale = np.float32(1) / whole
        codes = quantize(x, fmt, scale=wide_scale)
        given = {"inverse_scale": inverse, "block": block}
    assert oracle.count_cast(x, codes, **given) == slow_counts(x, codes, fmt, whole, wide_scale)


def test_pieces_and_leaves_add_up_exactly() -> None:
    """More than one piece of the fast form, and sums that float64 would round."""
    x = values_of(1, (70, LEAF), np.float32)
    codes = quantize(x, E4M3)
    whole = oracle.count_cast(x, codes, inverse_scale=1.0)
    rows = [oracle.count_cast(x[i : i + 1], codes[i : i + 1], inverse_scale=1.0) for i in range(70)]
    assert whole == sum(rows, CastCounts())
    exact = sum(int(value) ** 2 for value in (x[:2].astype(np.float64) * 2.0**100).flat if value)
    found = sum(rows[:2], CastCounts()).signal
    assert abs(found - exact * 2 ** (-UNIT - 200)) <= found >> 45 or not np.isfinite(x[:2]).all()


def test_what_numbers_come_of_counts() -> None:
    assert CastCounts().sqnr_db == math.inf
    assert (CastCounts().amax, CastCounts().scale) == (0.0, 1.0)
    assert CastCounts(signal=1000, noise=10).sqnr_db == pytest.approx(20.0)
    assert CastCounts(signal=1, noise_special=1).sqnr_db == -math.inf
    assert math.isnan(CastCounts(signal=1, noise_special=2).sqnr_db)
    assert math.isnan(CastCounts(scale_bits=-1).scale)
    half = CastCounts(elements=4, zeros=2, underflow=1, overflow=1)
    assert (half.share("underflow"), half.share("overflow")) == (0.5, 0.25)
    x = np.array([[1.0, 3.4e38]], np.float32)
    bad = oracle.count_cast(x, quantize(x, E4M3), inverse_scale=np.float32(1e37))
    assert bad.sqnr_db == -math.inf
    with pytest.raises(TypeError, match="x has dtype float64; accepted: float32"):
        oracle.count_cast(np.zeros((1, 1)), None)
    with pytest.raises(ValueError, match=r"codes have shape \(1, 1\); x has \(1, 2\)"):
        oracle.count_cast(x, quantize(x[:, :1], E4M3))


def kernel_counts(device: str, x: Any, codes: Any, *, times: int = 1, **given: Any) -> CastCounts:
    row = torch.zeros(COLUMNS, dtype=torch.int64, device=device)
    options = given.pop("settings", TelemetrySettings())
    tensors: dict[str, Any] = {
        name: to_torch(value, device=device) if isinstance(value, np.ndarray) else value
        for name, value in given.items()
    }
    narrow = None if codes is None else to_torch(codes, device=device)
    for _ in range(times):
        run_kernel(
            count_cast_, row, to_torch(x, device=device), narrow, settings=options, **tensors
        )
    return counts_of(row.cpu().numpy())


def check_policies(device: str, shape: tuple[int, int], dtype: Any, low: int) -> None:
    """Every policy's casts, by the kernel and by the oracle, on the same tensors."""
    x = to_torch(values_of(7, shape, dtype, low), device=device)
    for name in POLICIES:
        for role in ("input", "grad_output"):
            operand = recipe_named(name).operand(role)
            codes: Codes | None = None
            with through_kernels(device == "cuda"):
                if name != "bf16":
                    found = OperandCast(operand, device=device).cast(x, transposed=False)
                    codes = found.plain
            with through_kernels():
                kernel = count_cast(x, codes)
            here = None if codes is None else to_numpy(codes.codes)
            expected = oracle.count_cast(
                to_numpy(x),
                here,
                inverse_scale=None if codes is None else to_numpy(codes.inverse),
                scale=None if codes is None or codes.scale is None else to_numpy(codes.scale),
                block=None if codes is None else codes.block,
            )
            assert kernel == expected, (name, role)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_counts_as_the_oracle(dtype: Any) -> None:
    check_policies("cpu", (37, 150), dtype, -20)


def test_empty_and_odd_shapes() -> None:
    for shape in ((0, 5), (1, 1), (3, 257)):
        check_policies("cpu", shape, np.float32, -40)


@settings(max_examples=10)
@given(data=st.data())
def test_the_kernel_for_any_format_and_launch(data: st.DataObject, device: str) -> None:
    shape = data.draw(st.sampled_from([(1, 1), (5, 33), (40, 1030), (9, 2048)]))
    x = values_of(
        data.draw(st.integers(0, 999)),
        shape,
        data.draw(st.sampled_from(DTYPES)),
        data.draw(st.integers(-140, 100)),
    )
    fmt = data.draw(st.sampled_from(FORMATS))
    scale = np.float32(data.draw(st.sampled_from([1.0, 0.1, 2.0**60, 2.0**-100])))
    inverse = np.float32(1) / scale
    codes = quantize(x, fmt, scale=scale)
    launched = TelemetrySettings(
        # More than there are rows; the interpreter runs each program by itself.
        programs=data.draw(st.sampled_from([1, 2, 1000 if device == "cuda" else 50])),
        num_warps=data.draw(st.sampled_from([4, 8])),
    )
    sums = data.draw(st.booleans())
    given: dict[str, Any] = {"inverse_scale": np.array(inverse), "scale": np.array(scale)}
    given["sums"] = sums
    expected = oracle.count_cast(x, codes, **given)
    assert kernel_counts(device, x, codes, settings=launched, **given) == expected
    twice = kernel_counts(device, x, codes, times=2, **given)
    assert twice == expected + expected


def test_scales_that_are_nan_and_errors_that_are_infinite(device: str) -> None:
    x = np.array([[1.0, 2.0, 3.0, 0.0], [1e38, -1e38, np.nan, np.inf]], np.float32)
    codes = quantize(x, E4M3)
    for scales in ([127, 255], [255, 127], [127, 254], [0, 1]):
        inverse = np.array(scales, np.uint8).reshape(2, 1).view(ml_dtypes.float8_e8m0fnu)
        given: dict[str, Any] = {"inverse_scale": inverse, "block": (1, 32)}
        found = kernel_counts(device, x, codes, **given)
        assert found == oracle.count_cast(x, codes, **given)
        assert (found.scale_bits == -1) == (255 in scales)
    assert oracle.count_cast(x, codes, **given).nonfinite == 2


def test_bins_of_magnitudes(device: str) -> None:
    some = [0.0, -0.0, 1.0, -1.5, 2.0, 3.9, 4.0, 2.0**-112, 2.0**-113, 1e-45, 3e38, np.inf, np.nan]
    listed = oracle.magnitude_bins(np.array(some, np.float32))
    by_hand = np.zeros(64, np.int64)
    for value in some:
        if value == 0:
            place = 0
        elif not math.isfinite(value):
            place = 63
        else:
            place = min(max((math.frexp(value)[1] - 1 + 114) // 2, 1), 62)
        by_hand[place] += 1
    assert listed.tolist() == by_hand.tolist()
    wide = values_of(3, (50, 200), np.float32, -60)
    for values in (np.array(some, np.float32), wide, np.zeros(0, np.float32)):
        bins = torch.zeros(64, dtype=torch.int64, device=device)
        run_kernel(magnitude_bins_, bins, to_torch(values, device=device))
        assert_bits_equal(bins, oracle.magnitude_bins(values))


def test_bad_tensors_are_refused(device: str) -> None:
    row = torch.zeros(COLUMNS, dtype=torch.int64, device=device)
    x = torch.ones(4, 4, device=device)
    codes = x.to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"row has shape \(3,\); accepted: \(80,\)"):
        count_cast_(row[:3], x, None)
    with pytest.raises(ValueError, match="codes are given without an inverse_scale"):
        count_cast_(row, x, codes)
    with pytest.raises(ValueError, match=r"inverse_scale has shape \(1, 1\); accepted: \(4, 1\)"):
        count_cast_(row, x, codes, inverse_scale=x[:1, :1], block=(1, 128))
    with pytest.raises(ValueError, match=r"bins have shape \(80,\); accepted: \(64,\)"):
        magnitude_bins_(row, x)


def test_a_table_is_read_in_one_copy() -> None:
    table = CastTable(3)
    x = torch.randn(40, 50, generator=torch.Generator().manual_seed(0))
    with through_kernels():
        table.add(0, x, None)
        table.add(2, x, None)
        table.add(2, x, None)
    one, none, two = table.counts(to_host(table.tensors()))
    assert one == oracle.count_cast(to_numpy(x), None)
    assert none == CastCounts()
    assert two == one + one
    table.clear()
    assert table.counts(to_host(table.tensors())) == [CastCounts()] * 3


def test_compiled_without_fusion_and_with_wide_loads() -> None:
    from fp8lab.kernels.casting_rules import DecodeRule

    signature = {
        "x": "*i16",
        "codes": "*u8",
        "inverse": "*fp32",
        "row": "*i64",
        "n": "i32",
        "columns": "i32",
        "stride_down": "i32",
        "stride_across": "i32",
    }
    constants = {
        "scale": None,
        "INPUT": "bfloat16",
        "RULE": DecodeRule(True, "fp8e4nv", 3, -6, 126, -1, True),
        "LIMIT": 0x43E80001,
        "DOWN": 1,
        "ACROSS": 128,
        "E8M0": False,
        "SUMS": True,
        "HARDWARE": True,
    }
    ptx = compiled_ptx(
        "fp8lab.kernels.telemetry_device:cast_counts_kernel",
        signature,
        constants,
        num_warps=8,
        aligned=("x", "codes", "row", "n", "columns"),
    )
    assert "fma.rn.f64" not in ptx
    assert "ld.global.v2.b32" in ptx


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(257, 4096), (3, 7), (0, 128)], ids=str)
def test_the_card_counts_as_the_oracle(dtype: Any, shape: tuple[int, int]) -> None:
    check_policies("cuda", shape, dtype, -20)


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_the_card_on_a_large_tensor_and_any_launch(fmt: Float8Format) -> None:
    x = values_of(5, (1500, 2049), ml_dtypes.bfloat16)
    codes = quantize(x, fmt, scale=2.0)
    given: dict[str, Any] = {"inverse_scale": np.array(np.float32(0.5))}
    given["scale"] = np.array(np.float32(2))
    expected = oracle.count_cast(x, codes, **given)
    for programs in (1, 100, 1056):
        chosen = TelemetrySettings(programs=programs)
        assert kernel_counts("cuda", x, codes, settings=chosen, **given) == expected
    bins = torch.zeros(64, dtype=torch.int64, device="cuda")
    wide = x.astype(np.float32)
    magnitude_bins_(bins, to_torch(wide, device="cuda"))
    assert_bits_equal(bins, oracle.magnitude_bins(wide))
