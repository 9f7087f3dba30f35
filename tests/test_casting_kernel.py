"""The cast kernels against the oracle, bit for bit, and what the casts compile to."""

from __future__ import annotations

from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8lab.emulation import casting as oracle
from fp8lab.emulation.scaling import amax
from fp8lab.formats import E4M3, E5M2, E8M0, Float8Format, overflow_policy
from fp8lab.kernels.casting import (
    _INPUT_WORDS,
    cast_constants,
    dequantize,
    quantize,
)
from fp8lab.kernels.launch import CastSettings, ElementwiseSettings
from fp8lab.testing import (
    assert_bits_equal,
    cast_inputs,
    compiled_ptx,
    edge_values,
    ragged_sizes,
    run_kernel,
    scales,
    special_values,
    to_numpy,
    to_torch,
)

FORMATS = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
POLICIES = ("saturate", "ieee")
DTYPES = tuple(np.dtype(t) for t in (np.float32, np.float16, ml_dtypes.bfloat16))
BLOCK = 128
SMALL = CastSettings(block=BLOCK, num_warps=1)


def check(
    x: np.ndarray[Any, Any], fmt: Float8Format, device: str, scale: Any = None, **options: Any
) -> None:
    """The kernel's codes and amax of x are the oracle's."""
    largest = torch.zeros(1, dtype=torch.float32, device=device)
    overflow = options.get("overflow", "saturate")
    codes = run_kernel(
        quantize, to_torch(x, device=device), fmt, scale=scale, amax_out=largest, **options
    )
    factor = to_numpy(scale) if isinstance(scale, torch.Tensor) else scale
    expected = oracle.quantize(x, fmt, scale=factor, overflow=overflow)
    assert_bits_equal(codes, expected, inputs=x)
    assert_bits_equal(largest.reshape(()), amax(x))


@FORMATS
@given(data=st.data())
def test_quantize_equals_the_oracle(fmt: Float8Format, device: str, data: st.DataObject) -> None:
    scale = data.draw(st.none() | scales(), label="scale")
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    x = data.draw(cast_inputs(fmt, scale=scale, dtype=dtype, sizes=ragged_sizes(BLOCK)), label="x")
    by_tensor = scale is not None and data.draw(st.booleans(), label="scale as a tensor")
    given_scale = torch.tensor([scale], device=device) if by_tensor else scale
    overflow = data.draw(st.sampled_from(POLICIES), label="overflow")
    check(x, fmt, device, given_scale, overflow=overflow, settings=SMALL)


@FORMATS
@pytest.mark.parametrize("overflow", POLICIES)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_every_16_bit_pattern(
    fmt: Float8Format, overflow: str, dtype: np.dtype[Any], device: str
) -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    check(every, fmt, device, overflow=overflow)
    check(every, fmt, device, 0.7, overflow=overflow)


@FORMATS
@pytest.mark.parametrize("overflow", POLICIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [None, 2.0**-60, 1 / 3])
def test_every_tie_and_its_neighbours(
    fmt: Float8Format, overflow: str, dtype: np.dtype[Any], scale: float | None, device: str
) -> None:
    x = np.concatenate([edge_values(fmt, scale=scale, dtype=dtype), special_values(dtype)])
    check(x, fmt, device, scale, overflow=overflow)


@FORMATS
def test_shape_and_dtype_are_kept(fmt: Float8Format, device: str) -> None:
    for shape in [(), (0,), (3, 0, 2), (5, 7, 3)]:
        codes = quantize(torch.ones(shape, device=device), fmt)
        assert codes.shape == shape
        assert codes.dtype == getattr(torch, fmt.dtype_name)
        assert dequantize(codes).shape == shape


@pytest.mark.parametrize(
    ("held", "x", "after"),
    [
        (0.0, [1.0, -3.0], 3.0),
        (5.0, [1.0, -3.0], 5.0),
        (2.0, [], 2.0),
        (2.0, [np.inf, 1.0], np.inf),
        (np.inf, [1.0], np.inf),
        (np.inf, [-np.nan, 1.0], np.nan),
        (np.nan, [np.inf], np.nan),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_amax_merges_into_what_is_held(
    held: float, x: list[float], after: float, dtype: torch.dtype, device: str
) -> None:
    largest = torch.tensor([held], device=device)
    quantize(torch.tensor(x, dtype=dtype, device=device), E4M3, scale=7.0, amax_out=largest)
    assert_bits_equal(largest, np.array([after], np.float32))


def test_amax_is_merged_across_programs(device: str) -> None:
    x = torch.zeros(5 * BLOCK + 3, device=device)
    x[4 * BLOCK + 5] = -9.0
    largest = torch.zeros((), device=device)
    quantize(x, E5M2, amax_out=largest, settings=SMALL)
    assert largest.item() == 9.0


@FORMATS
@given(
    codes=st.lists(st.integers(0, 255), max_size=2 * BLOCK + 1),
    inverse_scale=st.none() | st.floats(width=32),
    by_tensor=st.booleans(),
)
def test_dequantize_equals_the_oracle(
    fmt: Float8Format,
    device: str,
    codes: list[int],
    inverse_scale: float | None,
    by_tensor: bool,
) -> None:
    array = np.array([*range(256), *codes], dtype=np.uint8).view(fmt.dtype)
    factor: Any = inverse_scale
    if by_tensor and inverse_scale is not None:
        factor = torch.tensor(inverse_scale, device=device)
    values = run_kernel(
        dequantize,
        to_torch(array, device=device),
        inverse_scale=factor,
        settings=ElementwiseSettings(block=BLOCK),
    )
    expected = oracle.dequantize(array, inverse_scale=inverse_scale)
    assert_bits_equal(values, expected, inputs=array)


def test_bad_input_is_refused_with_what_is_accepted(device: str) -> None:
    x = torch.ones(4, 6, device=device)
    one = torch.ones(1, device=device)
    call: Any = quantize  # untyped: some of these no type checker would let through
    refused: list[tuple[type[Exception], str, Any]] = [
        (TypeError, "list; accepted: a torch tensor", partial(call, [1.0], E4M3)),
        (TypeError, "x has dtype torch.float64", partial(quantize, x.double(), E4M3)),
        (ValueError, "strides.*contiguous", partial(quantize, x.t(), E4M3)),
        (TypeError, "fmt is 'E4M3'", partial(call, x, "E4M3")),
        (ValueError, "fmt is E8M0", partial(quantize, x, E8M0)),
        (ValueError, "unknown rounding 'up'", partial(quantize, x, E4M3, rounding="up")),
        (ValueError, "unknown overflow policy", partial(quantize, x, E4M3, overflow="wrap")),
        (TypeError, "scale is a str", partial(call, x, E4M3, scale="1")),
        (TypeError, "scale has dtype", partial(quantize, x, E4M3, scale=one.double())),
        (ValueError, "one element", partial(quantize, x, E4M3, scale=x)),
        (ValueError, "one element", partial(quantize, x, E4M3, amax_out=x)),
        (TypeError, "amax_out has dtype", partial(quantize, x, E4M3, amax_out=one.half())),
        (TypeError, "codes have|codes has dtype", partial(dequantize, x)),
        (ValueError, "block is 100", partial(CastSettings, block=100)),
        (ValueError, "unknown cast_path", partial(CastSettings, cast_path="fast")),  # type: ignore[arg-type]
    ]
    refused += [
        (ValueError, "above zero", partial(quantize, x, E4M3, scale=bad))
        for bad in (0.0, -1.0, np.inf, np.nan, 1e-60, 1e60)
    ]
    elsewhere = torch.ones(1, device="meta")
    refused += [
        (ValueError, "x is on meta; accepted: a CUDA device", partial(quantize, elsewhere, E4M3)),
        (ValueError, "scale is on meta", partial(quantize, x, E4M3, scale=elsewhere)),
    ]
    for error, message, attempt in refused:
        with pytest.raises(error, match=message):
            attempt()


def test_hardware_path_is_refused_where_there_is_none(device: str) -> None:
    x = torch.ones(4, device=device)
    hardware = CastSettings(cast_path="hardware")
    with pytest.raises(ValueError, match="accepted here: auto, integer"):
        quantize(x, E4M3, overflow="ieee", settings=hardware)


@FORMATS
def test_compiled_cast(fmt: Float8Format) -> None:
    """On sm_90 one instruction casts two values; the integer form does not use it."""
    signature = {
        "x": "*i16",
        "codes": "*u8",
        "n": "i64",
        "scale": "*fp32",
        "amax_out": "*i32",
    }
    constants = {
        "INPUT": "bfloat16",
        "SCALE": "tensor",
        "BLOCK": 1024,
        **cast_constants(fmt, overflow_policy("saturate")),
    }
    instruction = f"cvt.rn.satfinite.{fmt.name.lower()}x2.f32"
    kernel = "fp8lab.kernels.casting:quantize_kernel"
    hardware = compiled_ptx(kernel, signature, {**constants, "HARDWARE": True})
    assert instruction in hardware
    assert "max.s32" in hardware  # amax, as integers
    integer = compiled_ptx(kernel, signature, {**constants, "HARDWARE": False}, capability=80)
    assert "satfinite" not in integer
    assert "fma." not in hardware + integer


@pytest.mark.gpu
@FORMATS
@given(data=st.data())
def test_both_paths_give_the_same_bits(fmt: Float8Format, data: st.DataObject) -> None:
    scale = data.draw(st.none() | scales(), label="scale")
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    x = data.draw(cast_inputs(fmt, scale=scale, dtype=dtype, sizes=ragged_sizes(BLOCK)), label="x")
    for path in ("integer", "hardware"):
        settings = CastSettings(block=BLOCK, num_warps=1, cast_path=path)
        check(x, fmt, "cuda", scale, settings=settings)


@pytest.mark.gpu
@FORMATS
def test_every_float32_pattern_on_the_card(fmt: Float8Format) -> None:
    """Both paths on all 2**32, and the oracle on one pattern in 1021 of them."""
    chunk, stride = 1 << 28, 1021
    for start in range(0, 1 << 32, chunk):
        # 2**31 and up are the negative int32.
        first = start if start < 1 << 31 else start - (1 << 32)
        words = torch.arange(first, first + chunk, dtype=torch.int32, device="cuda")
        x = words.view(torch.float32)
        integer = quantize(x, fmt, settings=CastSettings(cast_path="integer"))
        hardware = quantize(x, fmt, settings=CastSettings(cast_path="hardware"))
        if not torch.equal(integer.view(torch.uint8), hardware.view(torch.uint8)):
            assert_bits_equal(integer, hardware, inputs=x)
        sample = to_numpy(x[start % 7 :: stride])
        assert_bits_equal(
            hardware[start % 7 :: stride], oracle.quantize(sample, fmt), inputs=sample
        )


@pytest.mark.gpu
def test_more_than_2_to_31_elements() -> None:
    """Offsets are 64 bits wide: the last elements of a tensor past 2**31 are read and written."""
    n = (1 << 31) + 4097
    x = torch.zeros(n, dtype=torch.bfloat16, device="cuda")
    x[-3:] = torch.tensor([1.0, -448.0, 3.0])
    largest = torch.zeros(1, device="cuda")
    codes = quantize(x, E4M3, amax_out=largest)
    assert_bits_equal(codes[-3:].view(torch.uint8), np.array([0x38, 0xFE, 0x44], np.uint8))
    assert largest.item() == 448.0
    assert int(torch.count_nonzero(codes.view(torch.uint8))) == 3


def test_integer_words_have_the_width_of_their_type() -> None:
    assert {dtype.itemsize: word.itemsize for dtype, word in _INPUT_WORDS.items()} == {4: 4, 2: 2}
