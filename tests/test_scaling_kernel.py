"""The scaling kernels against the oracle, bit for bit: blocks, rows, MX, scales, histories."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8lab import ops
from fp8lab.emulation import scaling as oracle
from fp8lab.emulation.casting import quantize as oracle_quantize
from fp8lab.emulation.random import random_words
from fp8lab.experiments.kernel_variants import (
    ROW_SETTINGS,
    SMALL_TILE_SETTINGS,
    TILE_SETTINGS,
    launches,
)
from fp8lab.formats import E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, Float8Format
from fp8lab.kernels import scaling
from fp8lab.kernels.launch import RowSettings, TileSettings
from fp8lab.testing import (
    assert_bits_equal,
    cast_inputs,
    run_kernel,
    special_values,
    to_numpy,
    to_torch,
)

EVERY_FORMAT = (E4M3, E5M2, E4M3FNUZ, E5M2FNUZ)
ALL_FORMATS = pytest.mark.parametrize("fmt", EVERY_FORMAT, ids=lambda fmt: fmt.name)
DTYPES = tuple(np.dtype(t) for t in (np.float32, np.float16, ml_dtypes.bfloat16))
TILE = TileSettings(rows=32, columns=32, num_warps=1)
# Rows of more than 64 elements take several chunks.
SMALL = scaling.BlockSettings(TILE, RowSettings(block=64, num_warps=1, longest=64))
TILED_BLOCKS = ((1, 32), (32, 32), (1, 8), (8, 4), (4, 1), (32, 1), (1, 1))
BOTH_WAYS = ((1, 32), (32, 32), (1, 4), (8, 4))
# A program of the interpreter takes a millisecond or two.
MORE = 2 if torch.cuda.is_available() else 1
LINES = ((1, None), (None, 1))
Array = np.ndarray[Any, Any]


@st.composite
def matrices(draw: st.DrawFn, fmt: Float8Format, most: int = TILE.rows + 9) -> Array:
    """Matrices that are hard to cast, of sizes around the edges of tiles, some with lines of 0."""
    rows, columns = draw(st.integers(0, most)), draw(st.integers(0, most))
    dtype = draw(st.sampled_from(DTYPES))
    x: Array = draw(cast_inputs(fmt, dtype=dtype, sizes=st.just(rows * columns)))
    x = x.reshape(rows, columns)
    if rows and draw(st.booleans()):
        x[draw(st.integers(0, rows - 1))] = 0
    if columns and draw(st.booleans()):
        x[:, draw(st.integers(0, columns - 1))] = 2.0**-14
    return x


@st.composite
def casts(draw: st.DrawFn) -> dict[str, Any]:
    """How elements are cast, as both the kernel and the oracle are told."""
    rounding = draw(st.sampled_from(["nearest_even"] * 3 + ["toward_zero", "stochastic"]))
    seeded = {"seed": 7, "offset": 3, "bit_count": 20} if rounding == "stochastic" else {}
    return {"rounding": rounding, "overflow": draw(st.sampled_from(["saturate", "ieee"])), **seeded}


def for_oracle(options: dict[str, Any], x: Array, *, transposed: bool = False) -> dict[str, Any]:
    """The same options for the oracle: the words of a seed are given, by their place in x."""
    told = {key: value for key, value in options.items() if key not in ("seed", "offset")}
    if "seed" in options:
        words = random_words(options["seed"], x.shape, offset=options["offset"])
        told["random_bits"] = np.ascontiguousarray(words.T) if transposed else words
    return told


def check_blocks(x: torch.Tensor, fmt: Float8Format, block: Any, **options: Any) -> None:
    """Codes and inverse scales of `quantize_blocks` are the oracle's, and decode as its do."""
    how = options.pop("settings", SMALL)
    found = run_kernel(scaling.quantize_blocks, x, fmt, block=block, settings=how, **options)
    array = to_numpy(x)
    expected = oracle.quantize_blocks(array, fmt, block=block, **for_oracle(options, array))
    for actual, wanted in zip(found, expected, strict=True):
        assert_bits_equal(actual, wanted)
    decoded = run_kernel(scaling.dequantize_blocks, *found, block=block, settings=how.tiles)
    assert_bits_equal(decoded, oracle.dequantize_blocks(*expected, block=block))


def check_both(x: torch.Tensor, fmt: Float8Format, block: Any, **options: Any) -> None:
    """Both layouts are the oracle's of x and of its transpose."""
    how = options.pop("settings", SMALL)
    found = run_kernel(
        scaling.quantize_blocks_with_transpose, x, fmt, block=block, settings=how, **options
    )
    array = to_numpy(x)
    along = oracle.quantize_blocks(array, fmt, block=block, **for_oracle(options, array))
    told = for_oracle(options, array, transposed=True)
    down = oracle.quantize_blocks(np.ascontiguousarray(array.T), fmt, block=block, **told)
    for actual, wanted in zip(found, (*along, *down), strict=True):
        assert_bits_equal(actual, wanted)


def check_mx(x: torch.Tensor, fmt: Float8Format, **options: Any) -> None:
    """MX elements and scales in both layouts are the oracle's, and decode as its do."""
    how = options.pop("settings", SMALL)
    found = run_kernel(scaling.quantize_mx_with_transpose, x, fmt, settings=how, **options)
    array = to_numpy(x)
    along = oracle.quantize_mx(array, fmt, **for_oracle(options, array))
    told = for_oracle(options, array, transposed=True)
    down = oracle.quantize_mx(np.ascontiguousarray(array.T), fmt, **told)
    expected = (*along, *down)
    for actual, wanted in zip(found, expected, strict=True):
        assert_bits_equal(actual, wanted)
    one = run_kernel(scaling.quantize_mx, x, fmt, settings=how, **options)
    for actual, wanted in zip(one, along, strict=True):
        assert_bits_equal(actual, wanted)
    decoded = run_kernel(scaling.dequantize_mx, *one, settings=how.tiles)
    assert_bits_equal(decoded, oracle.dequantize_mx(*along))


@ALL_FORMATS
@settings(max_examples=10 * MORE)
@given(data=st.data())
def test_blocks_equal_the_oracle(fmt: Float8Format, device: str, data: st.DataObject) -> None:
    x = to_torch(data.draw(matrices(fmt), label="x"), device=device)
    block = data.draw(st.sampled_from(TILED_BLOCKS + LINES), label="block")
    options = data.draw(casts(), label="cast")
    power_of_two = data.draw(st.booleans(), label="power_of_two")
    margin = data.draw(st.sampled_from([0, 0, 1, 9, 60]), label="margin")
    check_blocks(x, fmt, block, power_of_two=power_of_two, margin=margin, **options)


@ALL_FORMATS
@settings(max_examples=6 * MORE)
@given(data=st.data())
def test_both_layouts_of_blocks_equal_the_oracle(
    fmt: Float8Format, device: str, data: st.DataObject
) -> None:
    x = to_torch(data.draw(matrices(fmt), label="x"), device=device)
    block = data.draw(st.sampled_from((*BOTH_WAYS, (1, None))), label="block")
    options = data.draw(casts(), label="cast")
    check_both(x, fmt, block, power_of_two=data.draw(st.booleans()), **options)


@ALL_FORMATS
@settings(max_examples=6 * MORE)
@given(data=st.data())
def test_mx_equals_the_oracle(fmt: Float8Format, device: str, data: st.DataObject) -> None:
    x = to_torch(data.draw(matrices(fmt), label="x"), device=device)
    options = data.draw(casts(), label="cast")
    rounding = data.draw(st.sampled_from(scaling.MX_ROUNDINGS), label="scale_rounding")
    check_mx(x, fmt, scale_rounding=rounding, **options)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("overflow", ["saturate", "ieee", "ml_dtypes", "torch_2_11_cuda"])
def test_a_nan_of_mx_is_positive(fmt: Float8Format, overflow: str, device: str) -> None:
    """Also where the policy keeps signs, and for elements that are NaN themselves."""
    x = np.ones((32, 64), np.float32)
    x[3, :4] = -np.nan, np.nan, -1.0, -0.0
    x[7, 40] = -np.nan
    check_mx(to_torch(x, device=device), fmt, overflow=overflow)
    codes, scale = oracle.quantize_mx(x, fmt, overflow=overflow)
    nan = oracle_quantize(np.float32(np.nan), fmt, overflow=overflow).view(np.uint8)
    assert nan < 0x80
    assert (codes[3, :32].view(np.uint8) == nan).all()
    assert (codes[7, 32:].view(np.uint8) == nan).all()
    assert (scale.view(np.uint8) == 0xFF).sum() == 2


def test_rows_may_lie_any_distance_apart(device: str) -> None:
    wide = torch.randn(40, 90, generator=torch.Generator().manual_seed(0)).to(device)
    for block in (*TILED_BLOCKS, *LINES):
        check_blocks(wide[3:, 5:70], E4M3, block)
    check_both(wide[3:, 5:70], E4M3, (1, 32))
    codes, inverse = scaling.quantize_blocks(wide, E4M3, block=(1, 1), settings=SMALL)
    apart = run_kernel(
        scaling.dequantize_blocks, codes[:, :64], inverse[:, :64], block=(1, 1), settings=TILE
    )
    expected = oracle.dequantize_blocks(
        to_numpy(codes[:, :64]), to_numpy(inverse[:, :64]), block=(1, 1)
    )
    assert_bits_equal(apart, expected)


def test_inverse_scales_lie_as_a_product_wants_them(device: str) -> None:
    x = torch.ones(40, 64, device=device)
    both = scaling.quantize_blocks_with_transpose(x, E4M3, block=(1, 32), settings=SMALL)
    assert both.scales.shape == (40, 2)
    assert both.scales.stride() == (1, 40)
    assert both.scales_t.shape == (64, 2)
    assert both.scales_t.stride() == (1, 64)
    assert both.codes_t.stride() == (48, 1)
    square = scaling.quantize_blocks_with_transpose(x, E4M3, block=(32, 32), settings=SMALL)
    assert square.scales.is_contiguous()
    assert scaling.quantize_mx(x, E4M3, settings=SMALL)[1].stride() == (1, 40)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_amax_equals_the_oracle(dtype: np.dtype[Any], device: str) -> None:
    special = special_values(dtype)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((37, 200)).astype(dtype)
    x[5, :21] = special[:21]
    x[9, 7] = np.inf
    for array in (x, x[:0], x[:, :0], x[9:30]):
        tensor = to_torch(array.copy(), device=device)
        assert_bits_equal(run_kernel(scaling.amax, tensor), oracle.amax(array))
        for block in LINES:
            found = run_kernel(scaling.amax, tensor, block=block)
            assert_bits_equal(found, oracle.amax(array, block=block))


def amaxes() -> Array:
    """Every exponent of float32 with the mantissas where a rule may turn; the specials."""
    mantissas = [0, 1, 0x3FFFFF, 0x400000, 0x400001, 0x7FFFFE, 0x7FFFFF]
    for turn in (0x600000, 0x700000):  # of 1.75 and 1.875
        mantissas += [turn - 1, turn, turn + 1]
    fields = np.arange(256, dtype=np.uint32)[:, None] << np.uint32(23)
    subnormals = np.uint32(1) << np.arange(23, dtype=np.uint32)
    words = np.concatenate(
        [(fields | np.array(mantissas, np.uint32)).ravel(), subnormals, 7 * subnormals // 4]
    )
    return words.view(np.float32)


@ALL_FORMATS
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("margin", [0, 3, 20, 64, 120])
def test_scale_from_amax_equals_the_oracle(
    fmt: Float8Format, power_of_two: bool, margin: int, device: str
) -> None:
    seen = amaxes()
    previous = np.full_like(seen, 3.0)
    inverse = torch.empty(seen.shape, device=device)
    found = run_kernel(
        scaling.scale_from_amax,
        to_torch(seen, device=device),
        fmt,
        margin=margin,
        power_of_two=power_of_two,
        previous=to_torch(previous, device=device),
        inverse_out=inverse,
    )
    expected = oracle.scale_from_amax(
        seen, fmt, margin=margin, power_of_two=power_of_two, previous=previous
    )
    assert_bits_equal(found, expected, inputs=seen)
    assert_bits_equal(inverse, oracle.inverse_scale(expected), inputs=seen)


@ALL_FORMATS
@pytest.mark.parametrize("preset", scaling.CURRENT_PRESETS)
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("eps", [None, 1e-3])
def test_current_scale_equals_the_oracle(
    fmt: Float8Format, preset: str, power_of_two: bool, eps: float | None, device: str
) -> None:
    seen = amaxes()
    options: dict[str, Any] = {"preset": preset, "power_of_two": power_of_two, "eps": eps}
    found = run_kernel(scaling.current_scale, to_torch(seen, device=device), fmt, **options)
    with np.errstate(invalid="ignore"):  # signalling NaN become float64
        expected = oracle.current_scale(seen, fmt, **options)
    assert_bits_equal(found, expected, inputs=seen)


@ALL_FORMATS
@pytest.mark.parametrize("rounding", scaling.MX_ROUNDINGS)
def test_mx_scale_equals_the_oracle(fmt: Float8Format, rounding: str, device: str) -> None:
    seen = amaxes()
    found = run_kernel(scaling.mx_scale, to_torch(seen, device=device), fmt, rounding=rounding)
    assert_bits_equal(found, oracle.mx_scale(seen, fmt, rounding=rounding), inputs=seen)


@settings(max_examples=20 * MORE)
@given(data=st.data())
def test_update_delayed_equals_the_oracle(device: str, data: st.DataObject) -> None:
    length = data.draw(st.sampled_from([1, 2, 3, 7, 16, 1030]), label="length")
    shape = data.draw(st.sampled_from([(), (1,), (0,), (3,), (9,), (2, 5)]), label="shape")
    fmt = data.draw(st.sampled_from(EVERY_FORMAT), label="fmt")
    options: dict[str, Any] = {
        "margin": data.draw(st.sampled_from([0, 4])),
        "algorithm": data.draw(st.sampled_from(scaling.ALGORITHMS)),
        "power_of_two": data.draw(st.booleans()),
    }
    rng = np.random.default_rng(data.draw(st.integers(0, 99), label="seed"))
    pool = np.array([0, 0, 1e-36, 1e-40, 0.3, 1, 7, 448, 3e38, np.inf, np.nan], np.float32)
    upto = data.draw(st.sampled_from([2, 9, 11]), label="pool")
    state = oracle.DelayedScalingState(
        np.asarray(rng.choice(pool[4:9], shape), np.float32),
        np.asarray(rng.choice(pool[:upto], (length, *shape)), np.float32),
    )
    grouped = data.draw(st.booleans(), label="group")
    group = np.asarray(rng.choice(pool, shape), np.float32) if grouped else None
    expected = oracle.update_delayed(state, fmt, group_amax=group, **options)

    before = scaling.DelayedScalingState(
        to_torch(state.scale, device=device).clone(),
        to_torch(state.amax_history, device=device).clone(),
    )
    told = None if group is None else to_torch(group, device=device)
    after = run_kernel(scaling.update_delayed, before, fmt, group_amax=told, **options)
    assert_bits_equal(before.amax_history, state.amax_history)
    run_kernel(scaling.update_delayed_, before, fmt, group_amax=told, **options)
    for found in (after, before):
        assert_bits_equal(found.scale, expected.scale)
        assert_bits_equal(found.amax_history, expected.amax_history)
    assert_bits_equal(after.inverse_scale, expected.inverse_scale)


STEP_SCALES = np.array([1.0, 2.0**-127, 3.7e5, 2.0**127, 0.0, np.inf], np.float32)
STEP_AMAXES = np.array(
    [0, 1e-45, 1e-38, 1.2e-36, 1e-3, 3, 448, 1e30, 3.4e38, np.inf, np.nan], np.float32
)


@settings(max_examples=20 * MORE)
@given(data=st.data())
@pytest.mark.parametrize("preset", list(scaling.DELAYED_PRESETS))
def test_step_delayed_equals_the_oracle(preset: str, device: str, data: st.DataObject) -> None:
    """Several steps, each from the oracle's state; new tensors and the same ones."""
    n = data.draw(st.sampled_from([0, 1, 9]), label="tensors")
    length = data.draw(st.sampled_from([1, 2, 3, 16, 1030]), label="length")
    rule = scaling.DELAYED_PRESETS[preset].rule
    margin = 0 if rule == "torchao" else data.draw(st.sampled_from([0, 2, 100]), label="margin")
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32), label="seed"))
    usable = 4 if rule == "transformer_engine" else len(STEP_SCALES)
    state = oracle.DelayedScalingState(
        generator.choice(STEP_SCALES[:usable], n), generator.choice(STEP_AMAXES, (length, n))
    )
    for step in range(2):
        warm_up = rule != "transformer_engine" and step == 0
        seen = generator.choice(STEP_AMAXES, n)
        options: dict[str, Any] = {"preset": preset, "margin": margin, "warm_up": warm_up}
        used, after = oracle.step_delayed(state, seen, E4M3, **options)
        mine = scaling.DelayedScalingState(
            to_torch(state.scale, device=device).clone(),
            to_torch(state.amax_history, device=device).clone(),
        )
        amax = to_torch(seen, device=device)
        found, moved = run_kernel(scaling.step_delayed, mine, amax, E4M3, **options)
        assert_bits_equal(found, used)
        again = run_kernel(scaling.step_delayed_, mine, amax, E4M3, **options)
        assert_bits_equal(again, used)
        for one in (moved, mine):
            assert_bits_equal(one.scale, after.scale)
            assert_bits_equal(one.amax_history, after.amax_history)
        state = after


def test_a_group_amax_has_the_last_word(device: str) -> None:
    """It takes the place of slot 0, also where it is smaller, in the oracle and on the device."""
    state = oracle.DelayedScalingState(
        np.ones(2, np.float32), np.array([[4, 4], [1, 1], [2, 0]], np.float32)
    )
    group = np.array([3, 0], np.float32)
    expected = oracle.update_delayed(state, E4M3, group_amax=group)
    assert expected.amax_history.tolist() == [[0, 4], [2, 1], [3, 0]]
    assert expected.scale.tolist() == [np.float32(448 / 3), 1]
    mine = scaling.DelayedScalingState(
        to_torch(state.scale, device=device), to_torch(state.amax_history, device=device)
    )
    found = scaling.update_delayed(mine, E4M3, group_amax=to_torch(group, device=device))
    assert_bits_equal(found.scale, expected.scale)
    assert_bits_equal(found.amax_history, expected.amax_history)


def test_recorded_amaxes_are_used_a_step_later(device: str) -> None:
    state = scaling.DelayedScalingState.fresh(3, (2,), device=device)
    told = oracle.DelayedScalingState.fresh(3, (2,))
    for seen in ([1.0, 0.0], [8.0, np.inf], [np.nan, 2.0], [0.5, 0.5]):
        amax = np.array(seen, np.float32)
        state = scaling.record_amax(state, to_torch(amax, device=device))
        told = oracle.record_amax(told, amax)
        state = run_kernel(scaling.update_delayed, state, E4M3)
        told = oracle.update_delayed(told, E4M3)
        assert_bits_equal(state.scale, told.scale)
        assert_bits_equal(state.amax_history, told.amax_history)


def test_bad_input_is_refused_with_what_is_accepted(device: str) -> None:
    x = torch.ones(4, 6, device=device)
    amax = torch.ones(2, device=device)
    call: Any = scaling.quantize_blocks  # untyped: some of these no type checker would let through
    codes, inverse = scaling.quantize_blocks(x, E4M3)
    state = scaling.DelayedScalingState.fresh(2, (3,), device=device)
    step = partial(scaling.step_delayed, state, torch.ones(3, device=device), E4M3)
    refused: list[tuple[type[Exception], str, Any]] = [
        (TypeError, "x has dtype torch.float64", partial(call, x.double(), E4M3)),
        (ValueError, "two dimensions", partial(call, x[0], E4M3)),
        (ValueError, "neighbours in a row", partial(call, x.t(), E4M3)),
        (TypeError, "block is 128; accepted", partial(call, x, E4M3, block=128)),
        (TypeError, "block is", partial(call, x, E4M3, block=(1, 1.5))),
        (ValueError, r"block is \(1, 48\); accepted", partial(call, x, E4M3, block=(1, 48))),
        (ValueError, r"block is \(1, 256\)", partial(call, x, E4M3, block=(1, 256))),
        (ValueError, r"block is \(2, 2\)", partial(call, x, E4M3, block=(2, 2))),
        (ValueError, "preset is 'torchao'", partial(call, x, E4M3, preset="torchao")),
        (ValueError, "accepted: 0", partial(call, x, E4M3, margin=1, preset="transformer_engine")),
        (ValueError, "margin is 200", partial(call, x, E4M3, margin=200)),
        (TypeError, "fmt is 'E4M3'", partial(call, x, "E4M3")),
        (
            ValueError,
            "accepted here",
            partial(scaling.quantize_blocks_with_transpose, x, E4M3, block=(None, 1)),
        ),
        (
            ValueError,
            "unknown rounding 'down'",
            partial(scaling.quantize_mx, x, E4M3, scale_rounding="down"),
        ),
        (ValueError, "block is", partial(scaling.quantize_mx, x, E4M3, block=(1, None))),
        (ValueError, "have shape", partial(scaling.dequantize_blocks, codes, inverse[:2])),
        (TypeError, "inverse_scale has", partial(scaling.dequantize_blocks, codes, codes)),
        (TypeError, "scale has dtype", partial(scaling.dequantize_mx, codes, inverse)),
        (ValueError, "accepted: None, ", partial(scaling.amax, x, block=(1, 2))),
        (TypeError, "amax has dtype", partial(scaling.scale_from_amax, amax.half(), E4M3)),
        (ValueError, "previous has", partial(scaling.scale_from_amax, amax, E4M3, previous=x)),
        (ValueError, "unknown preset", partial(scaling.current_scale, amax, E4M3, preset="me")),
        (ValueError, "eps is -1", partial(scaling.current_scale, amax, E4M3, eps=-1.0)),
        (ValueError, "unknown rounding", partial(scaling.mx_scale, amax, E4M3, rounding="in")),
        (
            ValueError,
            "unknown algorithm 'min'",
            partial(scaling.update_delayed, state, E4M3, algorithm="min"),
        ),
        (
            ValueError,
            "group_amax has shape",
            partial(scaling.update_delayed, state, E4M3, group_amax=amax),
        ),
        (
            ValueError,
            r"accepted: \(L, ...\)",
            partial(scaling.update_delayed, replace(state, scale=amax), E4M3),
        ),
        (ValueError, "history is 0", partial(scaling.DelayedScalingState.fresh, 0)),
        (ValueError, "unknown preset", partial(step, preset="me")),
        (ValueError, "no warm-up", partial(step, warm_up=True)),
        (ValueError, "margin is 1 with", partial(step, preset="torchao", margin=1)),
        (ValueError, "margin is -1", partial(step, preset="ms_amp", margin=-1)),
        (ValueError, "amax has shape", partial(scaling.step_delayed, state, amax, E4M3)),
    ]
    for error, message, attempt in refused:
        with pytest.raises(error, match=message):
            attempt()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(512, 1024), (300, 1021), (1023, 272), (5, 40001)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_setting_gives_the_same_bits(shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(shape[0])
    x = torch.randn(shape, generator=generator, device="cuda")
    spread = torch.exp2(12 * torch.randn(shape, generator=generator, device="cuda"))
    x = (x * spread).to(dtype)
    x[2] = 0
    for tile in TILE_SETTINGS:
        for power_of_two in (True, False):
            how = scaling.BlockSettings(tiles=tile)
            check_both(x, E4M3, (1, 128), settings=how, power_of_two=power_of_two)
            check_both(x, E5M2, (128, 128), settings=how, power_of_two=power_of_two)
            check_both(x, E4M3, (1, None), settings=how, power_of_two=power_of_two)
    for tile in (*SMALL_TILE_SETTINGS, *TILE_SETTINGS):
        check_mx(x, E4M3, settings=scaling.BlockSettings(tiles=tile))
        check_blocks(x, E4M3, (1, 64), settings=scaling.BlockSettings(tiles=tile))
    for row in ROW_SETTINGS:
        check_blocks(x, E4M3, (1, None), settings=scaling.BlockSettings(rows=row))


@pytest.mark.gpu
def test_both_paths_give_the_same_bits() -> None:
    x = torch.randn(300, 400, device="cuda") * 100
    found = []
    for path in ("integer", "hardware"):
        how = scaling.BlockSettings(
            TileSettings(cast_path=path),
            RowSettings(cast_path=path),
        )
        both = [
            scaling.quantize_blocks_with_transpose(x, E4M3, block=block, settings=how)
            for block in ((1, 128), (128, 128), (1, None))
        ]
        found.append([*both, scaling.quantize_mx_with_transpose(x, E5M2, settings=how)])
    for integer, hardware in zip(*found, strict=True):
        for one, other in zip(integer, hardware, strict=True):
            assert_bits_equal(one, to_numpy(other))


@pytest.mark.gpu
def test_a_hundred_runs_give_the_same_bits() -> None:
    for name, call in launches("cuda"):
        if any(word in name for word in ("update", "cast", "transpose", "in place")):
            continue  # they merge amaxes or advance a state
        first = tensors_of(call())
        assert first, name
        for _ in range(100):
            for one, other in zip(first, tensors_of(call()), strict=True):
                # Flat: a tensor of no dimension cannot be seen as bytes.
                one, other = (v.reshape(-1).view(torch.uint8) for v in (one, other))
                assert torch.equal(one, other), name


def tensors_of(result: Any) -> list[torch.Tensor]:
    """A result's tensors, those of a state inside it too."""
    if isinstance(result, scaling.DelayedScalingState):
        result = tuple(getattr(result, field.name) for field in fields(result))
    if isinstance(result, tuple):
        return [tensor for part in result for tensor in tensors_of(part)]
    return [result] if isinstance(result, torch.Tensor) else []


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_nothing_waits_for_the_device() -> None:
    """Current, delayed and block scaling, as the training path calls them."""
    x = torch.randn(64, 256, device="cuda")
    scale, history = torch.ones((), device="cuda"), torch.zeros(5, device="cuda")

    def step() -> None:
        current = ops.scale_from_amax(ops.amax(x), E4M3)
        ops.dequantize(ops.quantize(x, E4M3, scale=current), inverse_scale=1.0 / current)
        ops.quantize(x, E4M3, scale=scale, amax_out=history[:1])
        ops.update_delayed_(scale, history, E4M3)
        ops.quantize_blocks(x, E4M3, block=(1, 128))

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = oracle.scale_from_amax(oracle.amax(to_numpy(x)), E4M3)
    assert_bits_equal(scale, expected)


@pytest.mark.gpu
def test_more_than_2_to_31_elements() -> None:
    rows, columns = (1 << 15) + 3, 1 << 16
    x = torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda")
    x[-1, -1] = 3.0
    for block in ((1, 128), (1, None)):
        codes, inverse = scaling.quantize_blocks(x, E4M3, block=block)
        assert int(torch.count_nonzero(codes.view(torch.uint8))) == 1
        tail = to_numpy(x[-1:, -128:])
        expected = oracle.quantize_blocks(tail, E4M3)
        assert_bits_equal(codes[-1:, -128:], expected[0])
        assert_bits_equal(inverse[-1:, -1:], expected[1])
