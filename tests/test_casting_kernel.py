"""The cast kernels against the oracle, bit for bit, and what the casts compile to."""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8lab.emulation import casting as oracle
from fp8lab.emulation.random import random_words
from fp8lab.emulation.scaling import amax
from fp8lab.experiments.kernel_variants import (
    CAST_SETTINGS,
    DECODE_SETTINGS,
    SMALL_TILE_SETTINGS,
    TILE_SETTINGS,
)
from fp8lab.formats import E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, E8M0, Float8Format, overflow_policy
from fp8lab.kernels.casting import (
    dequantize,
    quantize,
    quantize_with_transpose,
    requantize,
)
from fp8lab.kernels.casting_rules import CastRule, DecodeRule
from fp8lab.kernels.launch import (
    TRANSPOSE_TILES,
    CastSettings,
    DecodeSettings,
    TileSettings,
)
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
from fp8lab.testing.ptx import assembled, spilled_bytes

FORMATS = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
EVERY_FORMAT = (E4M3, E5M2, E4M3FNUZ, E5M2FNUZ)
ALL_FORMATS = pytest.mark.parametrize("fmt", EVERY_FORMAT, ids=lambda fmt: fmt.name)
POLICIES = ("saturate", "ieee")
DTYPES = tuple(np.dtype(t) for t in (np.float32, np.float16, ml_dtypes.bfloat16))
BLOCK = 128
SMALL = CastSettings(block=BLOCK, num_warps=1)
TILE = TileSettings(rows=32, columns=16, num_warps=1)
NVIDIA = Path(triton.__file__).parent / "backends/nvidia/bin"
# A program of the interpreter takes a millisecond or two.
MORE = 2 if torch.cuda.is_available() else 1


def check(
    x: np.ndarray[Any, Any], fmt: Float8Format, device: str, scale: Any = None, **options: Any
) -> None:
    """The kernel's codes and amax of x are the oracle's."""
    largest = torch.zeros(1, dtype=torch.float32, device=device)
    codes = run_kernel(
        quantize, to_torch(x, device=device), fmt, scale=scale, amax_out=largest, **options
    )
    assert_bits_equal(codes, expected_codes(x, fmt, scale, **options), inputs=x)
    assert_bits_equal(largest.reshape(()), amax(x))


def expected_codes(
    x: np.ndarray[Any, Any],
    fmt: Float8Format,
    scale: Any = None,
    *,
    overflow: str = "saturate",
    rounding: str = "nearest_even",
    seed: int | None = None,
    offset: int = 0,
    bit_count: int = 32,
    settings: Any = None,
) -> np.ndarray[Any, Any]:
    """The oracle's codes for the arguments of a kernel."""
    words = None if seed is None else random_words(seed, x.shape, offset=offset)
    return oracle.quantize(
        x,
        fmt,
        scale=to_numpy(scale) if isinstance(scale, torch.Tensor) else scale,
        overflow=overflow,
        rounding=rounding,
        random_bits=words,
        bit_count=bit_count,
    )


@st.composite
def roundings(draw: st.DrawFn) -> dict[str, Any]:
    """A rounding and what it needs."""
    rounding = draw(st.sampled_from(["nearest_even", "toward_zero", "stochastic"]))
    if rounding != "stochastic":
        return {"rounding": rounding}
    return {
        "rounding": rounding,
        "seed": draw(st.sampled_from([0, 1, -1, 2**40 + 3, -(2**63), 2**64 - 1])),
        "offset": draw(st.sampled_from([0, 1, 2**31, 2**40 + 5])),
        "bit_count": draw(st.sampled_from([1, 19, 32])),
    }


@ALL_FORMATS
@settings(max_examples=40 * MORE)
@given(data=st.data())
def test_quantize_equals_the_oracle(fmt: Float8Format, device: str, data: st.DataObject) -> None:
    scale = data.draw(st.none() | scales(), label="scale")
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    x = data.draw(cast_inputs(fmt, scale=scale, dtype=dtype, sizes=ragged_sizes(BLOCK)), label="x")
    by_tensor = scale is not None and data.draw(st.booleans(), label="scale as a tensor")
    given_scale = torch.tensor([scale], device=device) if by_tensor else scale
    overflow = data.draw(st.sampled_from(POLICIES), label="overflow")
    rounding = data.draw(roundings(), label="rounding")
    check(x, fmt, device, given_scale, overflow=overflow, settings=SMALL, **rounding)


@ALL_FORMATS
@settings(max_examples=8 * MORE)
@given(data=st.data())
def test_both_layouts_equal_the_oracle(fmt: Float8Format, device: str, data: st.DataObject) -> None:
    scale = data.draw(st.none() | scales(), label="scale")
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    rows = data.draw(st.integers(0, 2 * TILE.rows + 1), label="rows")
    columns = data.draw(st.integers(0, 2 * TILE.columns + 1), label="columns")
    sizes = st.just(rows * columns)
    x = data.draw(cast_inputs(fmt, scale=scale, dtype=dtype, sizes=sizes), label="x")
    matrix = x.reshape(rows, columns)
    # Rows may lie any distance apart.
    wide = to_torch(np.concatenate([matrix, matrix[:, :3]], axis=1), device=device)
    rounding = data.draw(roundings(), label="rounding")
    check_layouts(wide[:, :columns], fmt, scale, settings=TILE, **rounding)


def check_layouts(x: torch.Tensor, fmt: Float8Format, scale: Any = None, **options: Any) -> None:
    """Both layouts and the amax of x are the oracle's."""
    largest = torch.zeros(1, device=x.device)
    codes, codes_t = run_kernel(
        quantize_with_transpose, x, fmt, scale=scale, amax_out=largest, **options
    )
    expected = expected_codes(to_numpy(x), fmt, scale, **options)
    assert_bits_equal(codes, expected, inputs=x)
    assert_bits_equal(codes_t, expected.T, inputs=x.t())
    assert_bits_equal(largest.reshape(()), amax(to_numpy(x)))
    assert codes_t.numel() == 0 or codes_t.data_ptr() % 16 == codes_t.stride(0) % 16 == 0


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


@ALL_FORMATS
@settings(max_examples=20 * MORE)
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
        settings=DecodeSettings(block=BLOCK, num_warps=1),
    )
    expected = oracle.dequantize(array, inverse_scale=inverse_scale)
    assert_bits_equal(values, expected, inputs=array)


def test_a_seed_on_the_device_gives_the_same_bits(device: str) -> None:
    x = torch.linspace(-3, 3, 300, device=device)
    seed = torch.tensor([-5], device=device)
    options: dict[str, Any] = {"rounding": "stochastic", "settings": SMALL}
    by_tensor = quantize(x, E4M3, seed=seed, offset=9, **options)
    assert_bits_equal(by_tensor, quantize(x, E4M3, seed=-5, offset=9, **options))
    assert_bits_equal(by_tensor[4:], quantize(x[4:], E4M3, seed=-5, offset=10, **options))


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
        (TypeError, "codes has dtype", partial(dequantize, x)),
        (TypeError, "codes has dtype", partial(requantize, x, E4M3)),
        (ValueError, "two dimensions", partial(quantize_with_transpose, x[0], E4M3)),
        (ValueError, "neighbours", partial(quantize_with_transpose, x.t(), E4M3)),
        (ValueError, "rows is 8; accepted", partial(TileSettings, rows=8)),
        (ValueError, "band is 0", partial(TileSettings, band=0)),
        (ValueError, "block is 100", partial(CastSettings, block=100)),
        (ValueError, "unknown cast_path", partial(CastSettings, cast_path="fast")),  # type: ignore[arg-type]
    ]
    refused += [
        (ValueError, "above zero", partial(quantize, x, E4M3, scale=bad))
        for bad in (0.0, -1.0, np.inf, np.nan, 1e-60, 1e60)
    ]
    stochastic = partial(quantize, x, E4M3, rounding="stochastic")
    refused += [
        (ValueError, "needs a seed", stochastic),
        (ValueError, "only stochastic", partial(quantize, x, E4M3, seed=1)),
        (TypeError, "seed is 1.5", partial(call, x, E4M3, rounding="stochastic", seed=1.5)),
        (ValueError, "accepted: -2", partial(stochastic, seed=1 << 64)),
        (
            ValueError,
            "seed has shape",
            partial(stochastic, seed=torch.zeros(2, device=device).long()),
        ),
        (ValueError, "offset is -1", partial(stochastic, seed=1, offset=-1)),
        (ValueError, "bit_count is 33", partial(stochastic, seed=1, bit_count=33)),
        (
            ValueError,
            "accepted: nearest_even, toward_zero",
            partial(requantize, quantize(x, E4M3), E4M3, rounding="stochastic"),
        ),
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


def rule_of(fmt: Float8Format, *, hardware: bool) -> CastRule:
    """What a cast is compiled for on a card, made without one."""
    policy = overflow_policy("saturate", fmt)
    assert policy.finite == "max_finite"
    return CastRule(
        hardware=hardware,
        float8={"E4M3": "fp8e4nv", "E5M2": "fp8e5"}.get(fmt.name, ""),
        mantissa_bits=fmt.mantissa_bits,
        min_exponent=fmt.min_exponent,
        max_code=fmt.max_code,
        overflow_code=fmt.max_code,
        infinity_code=fmt.max_code,
        nan_code=fmt.nan_code,
        keep_nan_sign=False,
        negative_zero=fmt.has_negative_zero,
        rounding="nearest_even",
        bit_count=32,
    )


FLAT = {"x": "*bf16", "codes": "*u8", "n": "i64", "scale": "*fp32", "amax_out": "*fp32"}


@FORMATS
def test_compiled_cast(fmt: Float8Format, tmp_path: Path) -> None:
    """On sm_90 one instruction casts two values, accesses are 16 bytes wide, nothing spills; the
    integer form does not use the instruction.
    """
    constants = {"BLOCK": 8192, "seed": None, "offset": 0}
    instruction = f"cvt.rn.satfinite.{fmt.name.lower()}x2.f32"
    kernel = "fp8lab.kernels.casting_device:quantize_kernel"
    compiled = partial(compiled_ptx, kernel, FLAT, num_warps=8)
    hardware = compiled({**constants, "RULE": rule_of(fmt, hardware=True)}, aligned=FLAT)
    assert instruction in hardware
    assert "max.s32" in hardware  # amax, as integers
    assert hardware.count("ld.global.v4.b32") >= 4  # 32 elements of 2 bytes a thread
    assert hardware.count("st.global.v4.b32") >= 2
    assert spilled_bytes(hardware, tmp_path) == 0
    integer = compiled({**constants, "RULE": rule_of(fmt, hardware=False)}, capability=80)
    assert "satfinite" not in integer
    assert "fma." not in hardware + integer


def test_a_size_that_is_odd_keeps_wide_accesses() -> None:
    aligned = [name for name in FLAT if name != "n"]
    constants = {"BLOCK": 8192, "seed": None, "offset": 0, "RULE": rule_of(E4M3, hardware=True)}
    kernel = "fp8lab.kernels.casting_device:quantize_kernel"
    ptx = compiled_ptx(kernel, FLAT, constants, num_warps=8, aligned=aligned)
    assert ptx.count("ld.global.v4.b32") == 4
    assert ptx.count("st.global.v4.b32") == 2


def test_compiled_decode(tmp_path: Path) -> None:
    signature = {"codes": "*u8", "values": "*fp32", "n": "i64", "inverse_scale": "*fp32"}
    rule = DecodeRule(True, "fp8e4nv", 3, -6, 0x7E, -1, True)
    kernel = "fp8lab.kernels.casting_device:dequantize_kernel"
    ptx = compiled_ptx(kernel, signature, {"RULE": rule, "BLOCK": 4096}, aligned=signature)
    assert "cvt.rn.f16x2.e4m3x2" in ptx
    assert ptx.count("st.global.v4.b32") >= 8
    assert spilled_bytes(ptx, tmp_path) == 0


def compiled_tiles(fmt: Float8Format, *, even: bool) -> str:
    """The PTX of a cast to both layouts, by the instruction, in tiles of 128 x 64."""
    pointers = {"x": "*bf16", "codes": "*u8", "codes_t": "*u8", "scale": "*fp32"}
    sizes = dict.fromkeys(("height", "width", "stride"), "i64")
    signature = {**pointers, **sizes, "stride_t": "i64", "amax_out": "*fp32"}
    unused = ("kept", "kept_t", "scale_t", "seed", "SCALING")
    zeros = ("down", "across", "down_t", "across_t", "offset")
    blocks = ("BLOCK_ROWS", "BLOCK_COLUMNS", "T_BLOCK_ROWS", "T_BLOCK_COLUMNS")
    constants = {
        **dict.fromkeys(unused),
        **dict.fromkeys(zeros, 0),
        **dict.fromkeys(blocks, 1),
        "SCALES": "one",
        "RULE": rule_of(fmt, hardware=True),
        "ROWS": 128,
        "COLUMNS": 64,
        "BAND": 1,
        "EVEN": even,
    }
    kernel = "fp8lab.kernels.casting_tiles:quantize_tiles_kernel"
    aligned = [name for name in signature if even or name not in sizes]
    return compiled_ptx(kernel, signature, constants, aligned=aligned)


def test_compiled_tiles_transpose_words(tmp_path: Path) -> None:
    """Loads and both stores are 16 bytes wide; four codes move between threads as one word."""
    ptx = compiled_tiles(E4M3, even=True)
    assert ptx.count("ld.global.v4.b32") == 8  # 64 elements of 2 bytes a thread
    assert ptx.count("st.global.v4.b32") == 8
    assert "st.shared.b8" not in ptx
    assert spilled_bytes(ptx, tmp_path) == 0


@FORMATS
def test_assembled_tiles_read_no_register_that_is_not_set(
    fmt: Float8Format, tmp_path: Path
) -> None:
    """ptxas lets two conversions merge; where a code of the first had another use, that one read R1
    in its place, the stack pointer, so that two codes of four were constants.
    """
    ptx = compiled_tiles(fmt, even=False)
    cubin, said = assembled(ptx, tmp_path)
    disassembler = shutil.which("nvdisasm", path=NVIDIA) or shutil.which("nvdisasm")
    if disassembler is None:
        pytest.skip("there is no nvdisasm")
    done = subprocess.run([disassembler, cubin], capture_output=True, text=True, check=True)
    assert "0 bytes stack frame" in said
    uses = re.findall(r"^.*\bR1\b.*$", done.stdout, re.MULTILINE)
    assert "STG.E.U8" in done.stdout
    assert len(uses) == 1, uses  # where it is set


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
    """Both paths on all 2**32 patterns, and the oracle on one in 1021 of them."""
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


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "columns"), [((1 << 15) + 3, (1 << 16) + 8), (1 << 15, (1 << 16) + 128)]
)
def test_more_than_2_to_31_elements_in_both_layouts(rows: int, columns: int) -> None:
    """By tiles with a ragged edge, and by whole ones, which the kernel for pairs takes."""
    x = torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda")
    x[-1, -3:] = torch.tensor([1.0, -448.0, 3.0])
    codes, codes_t = quantize_with_transpose(x, E4M3)
    last = np.array([0x38, 0xFE, 0x44], np.uint8)
    assert_bits_equal(codes[-1, -3:].view(torch.uint8), last)
    assert_bits_equal(codes_t[-3:, -1].view(torch.uint8), last)
    for found in (codes, codes_t):
        assert int(torch.count_nonzero(found.view(torch.uint8))) == 3


@pytest.mark.gpu
@FORMATS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_subnormals_in_every_lane(fmt: Float8Format, dtype: torch.dtype) -> None:
    """Inputs whose codes are subnormal, and subnormals of the input, at each place of a block."""
    generator = torch.Generator("cuda").manual_seed(1)
    n = 8 * 8192
    small = torch.rand(n, generator=generator, device="cuda") * fmt.min_normal
    for x in (small.to(dtype), (small * 0 + torch.finfo(dtype).smallest_normal / 8).to(dtype)):
        expected = oracle.quantize(to_numpy(x), fmt)
        for settings_ in CAST_SETTINGS:
            assert_bits_equal(quantize(x, fmt, settings=settings_), expected, inputs=x)
        matrix = x.view(-1, 256)
        for tile in (*SMALL_TILE_SETTINGS, *TILE_SETTINGS, TRANSPOSE_TILES):
            codes, codes_t = quantize_with_transpose(matrix, fmt, settings=tile)
            assert_bits_equal(codes.view(-1), expected, inputs=x)
            assert_bits_equal(codes_t, expected.reshape(-1, 256).T)


def normal_matrix(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Normal numbers of many magnitudes, on the card."""
    generator = torch.Generator("cuda").manual_seed(rows)
    x = torch.randn(rows, columns, generator=generator, device="cuda")
    return (x * torch.exp2(12 * torch.randn(x.shape, generator=generator, device="cuda"))).to(dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(512, 1024), (300, 1021), (1023, 272)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_setting_gives_the_same_bits(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = normal_matrix(*shape, dtype)
    expected = oracle.quantize(to_numpy(x), E4M3, scale=0.7)
    for settings_, path in product(CAST_SETTINGS, ("hardware", "integer")):
        chosen = CastSettings(settings_.block, settings_.num_warps, path)  # type: ignore[arg-type]
        assert_bits_equal(quantize(x, E4M3, scale=0.7, settings=chosen), expected, inputs=x)
    for tile in (*SMALL_TILE_SETTINGS, *TILE_SETTINGS):
        check_layouts(x, E4M3, 0.7, settings=tile)
    values = oracle.dequantize(expected, inverse_scale=np.float32(0.3))
    for decode, path in product(DECODE_SETTINGS, ("hardware", "integer")):
        how = DecodeSettings(decode.block, decode.num_warps, path)  # type: ignore[arg-type]
        codes = to_torch(expected, device="cuda")
        assert_bits_equal(dequantize(codes, inverse_scale=0.3, settings=how), values)


@pytest.mark.gpu
def test_a_hundred_runs_give_the_same_bits() -> None:
    x = normal_matrix(1000, 1200, torch.bfloat16)
    largest = torch.zeros(1, device="cuda")
    first = quantize_with_transpose(x, E4M3, scale=0.7, amax_out=largest)
    for _ in range(100):
        again = torch.zeros(1, device="cuda")
        found = quantize_with_transpose(x, E4M3, scale=0.7, amax_out=again)
        flat = quantize(x, E4M3, scale=0.7)
        assert torch.equal(again, largest)
        for one, other in zip((*found, flat), (*first, first[0]), strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.gpu
def test_a_graph_replays_with_another_seed() -> None:
    x = normal_matrix(64, 64, torch.float32)
    seed = torch.zeros(1, dtype=torch.int64, device="cuda")
    quantize(x, E4M3, rounding="stochastic", seed=seed)
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        codes = quantize(x, E4M3, rounding="stochastic", seed=seed)
    for value in (3, -7):
        seed.fill_(value)
        graph.replay()
        expected = expected_codes(to_numpy(x), E4M3, rounding="stochastic", seed=value)
        assert_bits_equal(codes, expected, inputs=x)
