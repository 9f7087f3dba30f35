"""The matrix product kernel under the interpreter, what it refuses, and what it compiles to.

The interpreter does not have the tensor core's arithmetic. So the operands here are such that no
order of accumulation changes a bit, which the strategy proves; scales, promotion and bias are
computed outside the tensor core, in one order, and are as wild as anywhere.
"""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8lab.emulation.matmul import lowering
from fp8lab.emulation.matmul import matmul as oracle
from fp8lab.formats import BFLOAT16, E4M3, E5M2, E8M0, Float8Format
from fp8lab.kernels.float_device import ElementCode
from fp8lab.kernels.linear_products import data_gradient, forward, weight_gradient
from fp8lab.kernels.matmul import matmul
from fp8lab.kernels.matmul_choice import fast_settings, plain_settings
from fp8lab.kernels.matmul_device import ProductPlan
from fp8lab.kernels.matmul_product import Product
from fp8lab.kernels.matmul_scales import scales_from
from fp8lab.kernels.matmul_settings import (
    NATIVE_CANDIDATES,
    PROMOTED_CANDIDATES,
    GluonSettings,
    MatmulSettings,
    fits,
)
from fp8lab.testing import assert_bits_equal, compiled_ptx, run_kernel, to_torch
from fp8lab.testing.products import OrderFreeProduct, order_free_products
from fp8lab.testing.ptx import spilled_bytes

ROOT = Path(__file__).resolve().parent.parent
Array = np.ndarray[Any, Any]
TINY = MatmulSettings(64, 32, 128, num_warps=4, num_stages=1)
SWAPPED = MatmulSettings(32, 64, 128, num_warps=4, num_stages=1, swap=True)
DTYPES = ("float8_e4m3fn", "float8_e5m2")
SIZES = (st.integers(1, 70), st.integers(1, 40), st.sampled_from([0, 1, 31, 32, 33, 130, 256]))


def run(a: Array, b: Array, device: str, **options: Any) -> torch.Tensor:
    """The kernel on NumPy operands: a (M, K), b (K, N)."""
    wrapped: dict[str, Any] = {
        name: to_torch(np.ascontiguousarray(value), device=device)
        if isinstance(value, np.ndarray)
        else value
        for name, value in options.items()
    }
    left = to_torch(np.ascontiguousarray(a), device=device)
    right = to_torch(np.ascontiguousarray(b.T), device=device).t()
    return run_kernel(matmul, left, right, **wrapped)


def check(a: Array, b: Array, device: str, **options: Any) -> None:
    """The kernel's bits are the oracle's, in float32 and, computed transposed, in bfloat16."""
    for narrow, launch in ((False, TINY), (True, SWAPPED)):
        kernel_type = torch.bfloat16 if narrow else torch.float32
        oracle_type = ml_dtypes.bfloat16 if narrow else np.float32
        got = run(a, b, device, out_dtype=kernel_type, settings=launch, **options)
        assert_bits_equal(got, oracle(a, b, out_dtype=oracle_type, **options))


def scales_of(kind: str, seed: int, m: int, k: int, n: int) -> dict[str, Array]:
    """Random inverse scales of both operands."""
    rng = np.random.default_rng(seed)
    blocks, mx_blocks = -(-k // 128), -(-k // 32)
    shapes: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
        "tensor": ((1, 1), (1, 1)),
        "vectors": ((m, 1), (1, n)),
        "1x128 by 128x128": ((m, blocks), (blocks, -(-n // 128))),
        "1x128 by 1x128": ((m, blocks), (blocks, n)),
        "128x128 by 1x128": ((-(-m // 128), blocks), (blocks, n)),
        "mx": ((m, mx_blocks), (mx_blocks, n)),
    }
    values = [np.exp2(rng.uniform(-4, 4, shape)).astype(np.float32) for shape in shapes[kind]]
    if kind == "mx":
        codes = [rng.integers(120, 134, shape).astype(np.uint8) for shape in shapes[kind]]
        values = [code.view(E8M0.dtype) for code in codes]
    return {"inverse_scale_a": values[0], "inverse_scale_b": values[1]}


KINDS = ("tensor", "vectors", "1x128 by 128x128", "1x128 by 1x128", "128x128 by 1x128", "mx")


@settings(max_examples=15)
@given(data=st.data())
def test_equals_the_oracle(device: str, data: st.DataObject) -> None:
    names = tuple(data.draw(st.sampled_from(DTYPES), label=side) for side in "ab")
    product = data.draw(order_free_products((names[0], names[1]), sizes=SIZES), label="product")
    m, n = product.a.shape[0], product.b.shape[1]
    options: dict[str, Any] = {"promote_every": data.draw(st.sampled_from([None, 32, 64, 128]))}
    seed = data.draw(st.integers(0, 99), label="seed")
    rng = np.random.default_rng(seed)
    if data.draw(st.booleans(), label="accumulator"):
        options["accumulator"] = small_start(product, seed, (m, n))
    if data.draw(st.booleans(), label="bias"):
        shape = data.draw(st.sampled_from([(n,), (m, n)]))
        options["bias"] = rng.standard_normal(shape).astype(np.float32)
    check(product.a, product.b, device, **options)


def small_start(product: OrderFreeProduct, seed: int, shape: tuple[int, int]) -> Array:
    """Accumulators that leave a product free of order: multiples of its unit, and few of them."""
    room = int(2.0**14 - product.bound / product.unit) - 1
    rng = np.random.default_rng(seed)
    steps = rng.integers(-min(room, 50), min(room, 50) + 1, shape)
    return (steps * product.unit + 0.0).astype(np.float32)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=3)
@given(data=st.data())
def test_scales(kind: str, device: str, data: st.DataObject) -> None:
    sizes = (st.integers(1, 70), st.integers(1, 40), st.sampled_from([1, 96, 130, 256]))
    product = data.draw(order_free_products(("float8_e4m3fn", "float8_e5m2"), sizes=sizes))
    (m, k), n = product.a.shape, product.b.shape[1]
    if "128x128 by" in kind or kind.endswith("128x128"):
        m, n = min(m, 3), min(n, 3)
        product = replace(product, a=product.a[:m], b=product.b[:, :n])
    scales = scales_of(kind, data.draw(st.integers(0, 99)), m, k, n)
    check(product.a, product.b, device, **scales)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("promote", [None, 32, 128])
def test_scales_of_no_k_at_all(kind: str, promote: int | None, device: str) -> None:
    """The accumulator stays as it is, or takes the scales that do not depend on K."""
    length = {"tensor": promote, "vectors": promote, "mx": 32}.get(kind, 128)
    if promote not in (None, length):
        pytest.skip("scales of other blocks")
    none = np.zeros((5, 0), E4M3.dtype), np.zeros((0, 3), E4M3.dtype)
    start = np.arange(15, dtype=np.float32).reshape(5, 3)
    options: dict[str, Any] = {"accumulator": start, "promote_every": promote}
    options |= scales_of(kind, 1, 5, 0, 3)
    check(none[0], none[1], device, **options)


@pytest.mark.parametrize(
    ("dtypes", "promote", "length"),
    [
        (("float32", "float32"), None, 128),
        (("float32", "float32"), 32, 32),
        (("float32", "float32"), 128, 128),
        (("float8_e8m0fnu", "float8_e8m0fnu"), None, 32),
        (("float32", "float8_e8m0fnu"), None, 32),
        (("float8_e8m0fnu", "float8_e8m0fnu"), 128, 128),
    ],
)
def test_how_long_blocks_of_no_k_are(
    dtypes: tuple[str, str], promote: int | None, length: int
) -> None:
    """As with any other K, so that what launches those launches these."""
    a, b = (torch.empty(0, dtype=getattr(torch, name)) for name in dtypes)
    device = torch.device("cpu")
    scales = scales_from(a.view(5, 0), b.view(0, 6), 5, 0, 6, device, promote)
    assert (scales.kind, scales.block_k) == ("blocks", length)


def test_blocks_of_128_rows_and_columns(device: str) -> None:
    a = np.full((130, 140), 1.0, np.float32).astype(E4M3.dtype)
    b = np.full((140, 132), 2.0, np.float32).astype(E5M2.dtype)
    for kind in ("1x128 by 128x128", "128x128 by 1x128"):
        check(a, b, device, **scales_of(kind, 5, 130, 140, 132))


def test_every_setting_gives_the_same_bits(device: str) -> None:
    rng = np.random.default_rng(1)
    a = rng.integers(-4, 5, (65, 160)).astype(np.float32).astype(E4M3.dtype)
    b = rng.integers(-4, 5, (160, 66)).astype(np.float32).astype(E4M3.dtype)
    expected = oracle(a, b)
    for candidate in NATIVE_CANDIDATES:
        assert_bits_equal(run(a, b, device, settings=candidate), expected)
    for candidate in PROMOTED_CANDIDATES:
        assert_bits_equal(run(a, b, device, settings=candidate, promote_every=64), expected)


def test_strided_operands_and_scales_are_read_where_they_lie(device: str) -> None:
    rng = np.random.default_rng(2)
    wide = rng.integers(-4, 5, (8, 64)).astype(np.float32).astype(E4M3.dtype)
    a = to_torch(wide, device=device)[1::2, 16:48]
    b = to_torch(wide, device=device)[::2, 3:35]  # not aligned
    scale = torch.rand(8, 2, device=device)[::2, :1]
    got = run_kernel(matmul, a, b.t(), inverse_scale_a=scale, inverse_scale_b=scale.t())
    factor = scale.cpu().numpy()
    expected = oracle(
        wide[1::2, 16:48], wide[::2, 3:35].T, inverse_scale_a=factor, inverse_scale_b=factor.T
    )
    assert_bits_equal(got, expected)


def test_nothing_gives_nothing(device: str) -> None:
    for m, k, n in ((0, 5, 3), (2, 5, 0), (2, 0, 3)):
        a, b = np.zeros((m, k), E4M3.dtype), np.zeros((k, n), E5M2.dtype)
        assert_bits_equal(run(a, b, device), np.zeros((m, n), np.float32))
    start = np.full((2, 3), 1 + 2.0**-23, np.float32)
    got = run(np.zeros((2, 0), E4M3.dtype), np.zeros((0, 3), E4M3.dtype), device, accumulator=start)
    assert_bits_equal(got, start)


def test_the_three_products_of_a_linear_layer(device: str) -> None:
    rng = np.random.default_rng(3)

    def codes(rows: int, columns: int, fmt: Float8Format) -> Array:
        return rng.integers(-3, 4, (rows, columns)).astype(np.float32).astype(fmt.dtype)

    def on_device(array: Array) -> torch.Tensor:
        return to_torch(np.ascontiguousarray(array), device=device)

    x, w, dy = codes(33, 48, E4M3), codes(20, 48, E4M3), codes(33, 20, E5M2)
    y = run_kernel(forward, on_device(x), on_device(w))
    assert_bits_equal(y, oracle(x, w.T))
    dx = run_kernel(data_gradient, on_device(dy), on_device(w.T))
    assert_bits_equal(dx, oracle(dy, w))
    scale = torch.tensor(0.3, device=device)
    dw = run_kernel(weight_gradient, on_device(dy.T), on_device(x.T), inverse_scale_a=scale)
    expected = oracle(dy.T, x, inverse_scale_a=np.float32(0.3))
    assert_bits_equal(dw, expected)
    held = rng.standard_normal((20, 48), np.float32)
    gradient = on_device(held.copy())
    result = run_kernel(
        weight_gradient,
        on_device(dy.T),
        on_device(x.T),
        inverse_scale_a=scale,
        accumulate=gradient,
    )
    assert result is gradient
    assert_bits_equal(gradient, held + expected)


def test_bad_input_is_refused_before_any_launch(device: str) -> None:
    a = to_torch(np.zeros((64, 256), E4M3.dtype), device=device)
    b = to_torch(np.zeros((48, 256), E4M3.dtype), device=device).t()
    one = torch.ones((), device=device)
    call: Any = matmul
    ones = partial(torch.ones, device=device)
    elsewhere = torch.zeros(48, 256, dtype=torch.float8_e4m3fn, device="meta").t()
    refused: list[tuple[type[Exception], str, Any]] = [
        (TypeError, "a is a list", partial(call, [1], b)),
        (ValueError, r"\(64, 256\) and b \(64, 256\)", partial(matmul, a, a)),
        (ValueError, "two dimensions", partial(matmul, a[0], b)),
        (TypeError, "a has dtype torch.float32", partial(matmul, a.float(), b)),
        (TypeError, "b has dtype torch.uint8", partial(matmul, a, b.view(torch.uint8))),
        (ValueError, "b has strides.*column-major", partial(matmul, a, b.contiguous())),
        (ValueError, "a has strides.*row-major", partial(matmul, a[:, ::2], b[::2])),
        (ValueError, "a has strides", partial(matmul, a[:1].expand(9, -1), b)),
        (ValueError, "b is on meta", partial(matmul, a, elsewhere)),
        (ValueError, "promote_every is 48", partial(matmul, a, b, promote_every=48)),
        (
            ValueError,
            "promote_every is 32.0",
            partial(matmul, a, b, promote_every=32.0),  # type: ignore[arg-type]
        ),
        (ValueError, "promote_every is 256", partial(matmul, a, b, promote_every=256)),
        (TypeError, "out_dtype is torch.float16", partial(matmul, a, b, out_dtype=torch.half)),
        (ValueError, "out has shape", partial(matmul, a, b, out=ones(48, 64))),
        (TypeError, "out has dtype", partial(matmul, a, b, out=ones(64, 48).bfloat16())),
        (ValueError, "out has.*contiguous", partial(matmul, a, b, out=ones(48, 64).t())),
        (ValueError, "bias has shape", partial(matmul, a, b, bias=ones(64))),
        (TypeError, "bias has dtype", partial(matmul, a, b, bias=ones(48).half())),
        (ValueError, "accumulator has shape", partial(matmul, a, b, accumulator=ones(48))),
        (TypeError, "inverse_scale_a is a float", partial(call, a, b, inverse_scale_a=1.0)),
        (TypeError, "inverse_scale_a has dtype", partial(matmul, a, b, inverse_scale_a=one.half())),
        (ValueError, "inverse_scale_b has shape", partial(matmul, a, b, inverse_scale_b=ones(48))),
        (
            ValueError,
            "inverse_scale_a has shape",
            partial(matmul, a, b, inverse_scale_a=ones(2, 64)),
        ),
        (
            ValueError,
            "one length",
            partial(matmul, a, b, inverse_scale_a=ones(64, 2), inverse_scale_b=ones(8, 48)),
        ),
        (
            ValueError,
            "blocks of 128",
            partial(matmul, a, b, inverse_scale_a=ones(64, 2), promote_every=64),
        ),
        (ValueError, "block_m is 32", partial(MatmulSettings, block_m=32)),
        (ValueError, "num_warps is 2", partial(MatmulSettings, num_warps=2)),
        (ValueError, "num_stages is 17", partial(MatmulSettings, num_stages=17)),
        (ValueError, "block_n is 32", partial(MatmulSettings, block_n=32, swap=True)),
        (ValueError, "block_m is 32", partial(GluonSettings, block_m=32)),
        (ValueError, "block_n is 256; .* to 128", partial(GluonSettings, 192, 256)),
        (ValueError, "block_n is 512; .* 256", partial(GluonSettings, 64, 512, swap=True)),
        (ValueError, "block_n is 256; .* to 128", partial(GluonSettings, 256, 256)),
        (ValueError, "block_m is 256; .* to 128", partial(GluonSettings, 256, 256, swap=True)),
        (ValueError, "most_stages is 1; .* 2 to", partial(GluonSettings, most_stages=1)),
    ]
    for error, message, attempt in refused:
        with pytest.raises(error, match=message):
            attempt()


def wgmma_tile(settings: MatmulSettings) -> tuple[int, int]:
    """Rows and columns of a tile, as tl.dot is given them."""
    tile = settings.block_m, settings.block_n
    return tile[::-1] if settings.swap else tile


SHAPES = [(m, n) for m in (1, 16, 32, 64, 65, 128, 512, 4096, 16384) for n in (1, 128, 4096, 28672)]


@pytest.mark.parametrize("promoted", [False, True])
@pytest.mark.parametrize("wide", [False, True])
def test_plain_settings_keep_the_arithmetic_and_fit_the_card(promoted: bool, wide: bool) -> None:
    for m, n in SHAPES:
        chosen = plain_settings(m, n, promoted=promoted, wide=wide, multiprocessors=132)
        steps = [chosen.with_block_k(32, scaled=scaled) for scaled in (False, True)]
        for one in (chosen, *steps, chosen.with_block_k(128)):
            found = lowering(*wgmma_tile(one), one.block_k, one.num_warps)
            assert found.core.name == "hopper_fp8"
            assert fits(one, wide=wide)


@pytest.mark.parametrize(
    ("promote", "blocks", "by_row", "by_column"),
    [
        (None, False, False, False),
        (128, False, False, False),
        (32, False, False, False),
        (128, True, True, False),
        (128, True, False, True),
        (128, True, True, True),
        (32, True, True, True),
    ],
)
@pytest.mark.parametrize("k", [128, 4096, 28672])
@pytest.mark.parametrize("matrices", [0, 1, 2])
def test_fast_settings_waste_few_multiprocessors(
    promote: int | None, blocks: bool, by_row: bool, by_column: bool, k: int, matrices: int
) -> None:
    """Tiles are hardly higher than the rows, and half as many as the smallest would be or more."""
    for m, n in SHAPES:
        chosen = fast_settings(
            m,
            n,
            k,
            promote=promote,
            blocks=blocks,
            by_row=by_row,
            by_column=by_column,
            multiprocessors=132,
            matrices=matrices,
        )
        assert chosen.takes(promote=promote, blocks=blocks, matrices=matrices)
        assert chosen.block_m < 2 * max(m, 16) or chosen.block_m == 64
        tiles = -(-m // chosen.block_m) * -(-n // chosen.block_n)
        smallest = -(-m // 64) * -(-n // 64)
        assert tiles >= min(64, smallest) // 2
        assert chosen.block_k == 128 or promote is None


@pytest.mark.parametrize(
    ("m", "n", "sides", "tile"),
    [
        (28672, 4096, "both", (192, 128)),
        (4096, 4096, "both", (256, 128)),
        (8192, 8192, "both", (192, 128)),
        (4096, 4096, "rows", (256, 128)),
        (8192, 8192, "rows", (256, 128)),
        (4096, 4096, "columns", (128, 128)),
        # Fewer large tiles than multiprocessors.
        (1024, 4096, "both", (128, 128)),
        (128, 28672, "both", (128, 128)),
        (128, 28672, "rows", (128, 128)),
    ],
)
def test_fast_settings_of_blocks(m: int, n: int, sides: str, tile: tuple[int, int]) -> None:
    """Large tiles where each row has its own scales, as measured."""
    rest: dict[str, Any] = {
        "promote": 128,
        "blocks": True,
        "by_row": sides != "columns",
        "by_column": sides != "rows",
        "multiprocessors": 132,
    }
    chosen = fast_settings(m, n, 4096, **rest)
    assert (chosen.block_m, chosen.block_n) == tile
    added = fast_settings(m, n, 4096, matrices=1, **rest)
    wide = sides == "both" and m >= 4096
    assert (added.block_m, added.block_n) == ((128, 256) if wide else (128, 128))


@pytest.mark.parametrize(
    ("m", "n", "k", "tile"),
    [
        (4096, 4096, 4096, (256, 128)),
        (8192, 8192, 8192, (192, 128)),
        (4096, 10240, 8192, (128, 256)),
        (16384, 8192, 28672, (192, 128)),
        (16384, 10240, 8192, (256, 128)),
        # A last wave of square tiles is better filled.
        (4096, 28672, 4096, (128, 128)),
        # Fewer large tiles than multiprocessors.
        (512, 4096, 4096, (128, 128)),
    ],
)
def test_fast_settings_of_promoted_products(m: int, n: int, k: int, tile: tuple[int, int]) -> None:
    """Large tiles in tall groups, along the longer side, where partial sums are of 128 of k."""
    rest: dict[str, Any] = {
        "blocks": False,
        "by_row": False,
        "by_column": False,
        "multiprocessors": 132,
    }
    chosen = fast_settings(m, n, k, promote=128, **rest)
    assert (chosen.block_m, chosen.block_n) == tile
    assert chosen.group == (32 if 192 in tile or 256 in tile else 8)
    for other in (
        fast_settings(m, n, k, promote=128, matrices=1, **rest),
        fast_settings(m, n, k, promote=64, **rest),
    ):
        assert other.block_m <= 128
        assert other.group == 8


def test_which_scales_are_of_each_row_and_column() -> None:
    """Not one that all rows, or 128, share."""
    blocks, square, one = torch.ones(3, 5).t(), torch.ones(3, 1), torch.ones(())
    alike = (5, 384, 6, torch.device("cpu"))
    for a, b, expected in (
        (blocks, torch.ones(3, 6), (True, True)),
        (blocks, square, (True, False)),
        (blocks, one, (True, False)),
        (square.t(), torch.ones(3, 6), (False, True)),
        (one, torch.ones(3, 6), (False, True)),
        (torch.ones(5, 1), torch.ones(3, 6), (True, True)),
        (torch.ones(5, 1), torch.ones(1, 6), (False, False)),  # not of blocks
        (one, one, (False, False)),
    ):
        scales = scales_from(a, b, *alike)
        assert (scales.by_row, scales.by_column) == expected


def test_tuned_products_are_told_apart_by_their_scales() -> None:
    """1x128 by 1x128 is fastest with other settings than 1x128 by 128x128."""
    a, b = torch.empty(5, 384), torch.empty(6, 384)
    sides = torch.ones(3, 6), torch.ones(3, 1)
    keys = {
        Product(a, b, torch.empty(5, 6), None, 128, scales, None).key
        for scales in (scales_from(torch.ones(5, 3), side, 5, 384, 6, a.device) for side in sides)
    }
    assert len(keys) == 2


PLAN = ProductPlan(
    block_m=128,
    block_n=128,
    block_k=128,
    group_m=8,
    promote=False,
    scaling="none",
    rows_per_scale=1,
    columns_per_scale=1,
    scale_a_e8m0=False,
    scale_b_e8m0=False,
    start=False,
    bias="none",
    bfloat16=True,
    out_descriptor=True,
    hardware=True,
    warp_specialize=False,
    swap=False,
    overlap=True,
)


def arguments_of(plan: ProductPlan) -> tuple[dict[str, str], dict[str, Any]]:
    """The types of what a launch is given, and the values of what it is compiled for."""
    sizes = ("m", "n", "k", "scale_a_stride_m", "scale_a_stride_k")
    signature = dict.fromkeys((*sizes, "scale_b_stride_k", "scale_b_stride_n"), "i32")
    signature |= {
        "a": f"tensordesc<fp8e4nv[{plan.block_m}, {plan.block_k}]>",
        "b": f"tensordesc<fp8e5[{plan.block_n}, {plan.block_k}]>",
        "out": f"tensordesc<i16[{plan.block_m}, {plan.block_n}]>"
        if plan.out_descriptor
        else "*fp32",
    }
    constants: dict[str, Any] = {
        "PLAN": plan,
        "A_CODE": ElementCode.of(E4M3, saturate=True),
        "B_CODE": ElementCode.of(E5M2, saturate=True),
        "OUT_CODE": ElementCode.of(BFLOAT16, saturate=False),
    }
    present = {
        "scale_a": (plan.scaling != "none", plan.scale_a_e8m0),
        "scale_b": (plan.scaling != "none", plan.scale_b_e8m0),
        "bias": (plan.bias != "none", False),
        "start": (plan.start, False),
    }
    for name, (there, e8m0) in present.items():
        if there:
            signature[name] = "*u8" if e8m0 else "*fp32"
        else:
            constants[name] = None
    return signature, constants


def ptx_of(plan: ProductPlan, num_warps: int = 8) -> str:
    kernel = "fp8lab.kernels.matmul_device:matmul_kernel"
    return compiled_ptx(kernel, *arguments_of(plan), num_warps=num_warps)


def test_compiled_native_chain() -> None:
    """wgmma on both formats as they are, fed by the copy engine; nothing else adds."""
    ptx = ptx_of(PLAN)
    assert "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e5m2" in ptx
    assert "cp.async.bulk.tensor" in ptx
    assert not re.search(r"mma\.sync|add\.(rn\.)?f32|fma", ptx)


def test_compiled_promotion() -> None:
    plain = ptx_of(replace(PLAN, promote=True))
    assert "wgmma.mma_async.sync.aligned.m64n128k32" in plain
    assert re.search(r"add\.(rn\.)?f32", plain)
    assert "fma" not in plain
    blocks = replace(
        PLAN, promote=True, scaling="blocks", columns_per_scale=128, bfloat16=False,
        out_descriptor=False, bias="matrix", start=True,
    )  # fmt: skip
    ptx = ptx_of(blocks)
    assert "fma.rn.f32" in ptx
    assert "wgmma.mma_async" in ptx


def test_compiled_with_rows_and_columns_swapped() -> None:
    """16 rows of a are 16 columns of wgmma; the types swap with the operands."""
    ptx = ptx_of(replace(PLAN, block_m=16, block_n=64, block_k=256, swap=True), num_warps=4)
    assert "wgmma.mma_async.sync.aligned.m64n16k32.f32.e5m2.e4m3" in ptx
    assert "mma.sync" not in ptx


# In a process of its own, as `compiled_ptx`, which leaves the number of stages to Triton.
CHILD = """
import pickle, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from fp8lab.kernels.matmul_device import matmul_kernel

given, constants, aligned, options = pickle.load(sys.stdin.buffer)
names = matmul_kernel.arg_names
signature = {name: given.get(name, "constexpr") for name in names}
divisible = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
source = ASTSource(matmul_kernel, signature, constexprs=constants, attrs=divisible)
print(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])
"""


@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize(
    "candidate", [*PROMOTED_CANDIDATES, replace(PROMOTED_CANDIDATES[-1], block_m=32)], ids=str
)
def test_compiled_without_spills_where_scales_are_of_32_of_k(
    candidate: MatmulSettings, bfloat16: bool, tmp_path: Path
) -> None:
    """Scales of all stages are in registers, so that these decide how many stages there are."""
    chosen = candidate.with_block_k(32, scaled=True)
    assert 2 <= chosen.num_stages <= candidate.with_block_k(32).num_stages
    plan = replace(
        PLAN,
        block_m=chosen.block_m,
        block_n=chosen.block_n,
        block_k=32,
        promote=True,
        scaling="blocks",
        scale_a_e8m0=True,
        scale_b_e8m0=True,
        bfloat16=bfloat16,
        out_descriptor=bfloat16,
        swap=chosen.swap,
    )
    signature, constants = arguments_of(plan)
    aligned = ["n", *(name for name, kind in signature.items() if kind.startswith("*"))]
    options = {
        "num_warps": chosen.num_warps,
        "num_stages": chosen.num_stages,
        "enable_fp_fusion": False,
    }
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        cwd=ROOT,
        env=environment,
        input=pickle.dumps((signature, constants, aligned, options)),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert spilled_bytes(done.stdout.decode(), tmp_path) == 0


def test_compiled_so_that_the_next_kernel_can_start() -> None:
    """It waits before it reads anything, and only then lets the next one start."""
    ptx = ptx_of(PLAN)
    waits, lets = ptx.index("griddepcontrol.wait"), ptx.index("griddepcontrol.launch_dependents")
    assert waits < lets < ptx.index("cp.async.bulk.tensor")
    assert "griddepcontrol" not in ptx_of(replace(PLAN, overlap=False))
