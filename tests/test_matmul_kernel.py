"""The matrix product kernel under the interpreter, what it refuses, and what it compiles to.

The interpreter does not have the tensor core's arithmetic. So the operands here are such that no
order of accumulation changes a bit, which the strategy proves; scales, promotion and bias are
computed outside the tensor core, in one order, and are as wild as anywhere.
"""

from __future__ import annotations

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

from fp8lab.emulation.matmul import matmul as oracle
from fp8lab.formats import E4M3, E5M2, E8M0, Float8Format
from fp8lab.kernels.linear_products import data_gradient, forward, weight_gradient
from fp8lab.kernels.matmul import checked_product, matmul
from fp8lab.kernels.matmul_scales import scales_from
from fp8lab.kernels.matmul_settings import (
    NATIVE_CANDIDATES,
    PROMOTED_CANDIDATES,
    GluonSettings,
    MatmulSettings,
)
from fp8lab.testing import assert_bits_equal, run_kernel, to_torch
from fp8lab.testing.products import OrderFreeProduct, order_free_products

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


@pytest.mark.parametrize("kind", [*KINDS, "mx by 128x128", "128x128 by mx", "1x128 by mx"])
@pytest.mark.parametrize("promote", [None, 32, 64, 128])
def test_scales_of_no_k_at_all(kind: str, promote: int | None, device: str) -> None:
    """The accumulator stays as it is, or takes the scales that do not depend on K.

    Blocks, of which there are none, are of any length that is asked for.
    """
    none = np.zeros((5, 0), E4M3.dtype), np.zeros((0, 3), E4M3.dtype)
    start = np.arange(15, dtype=np.float32).reshape(5, 3)
    options: dict[str, Any] = {"accumulator": start, "promote_every": promote}
    sides = {"tensor": "tensor", "vectors": "vectors", "mx": "mx by mx"}.get(kind, kind)
    for name, side in zip("ab", sides.split(" by ") * 2, strict=False):
        found = {
            "tensor": np.full((1, 1), 3, np.float32),
            "vectors": np.exp2(np.arange(5 if name == "a" else 3, dtype=np.float32)),
            "1x128": np.zeros((5 if name == "a" else 3, 0), np.float32),
            "128x128": np.zeros((1, 0), np.float32),
            "mx": np.zeros((5 if name == "a" else 3, 0), E8M0.dtype),
        }[side]
        found = found[:, None] if side == "vectors" else found
        options[f"inverse_scale_{name}"] = found if name == "a" else np.ascontiguousarray(found.T)
    check(none[0], none[1], device, **options)


def test_lengths_that_no_k_is_promoted_by() -> None:
    """Those that are refused with a longer K for themselves are refused here."""
    a, b = torch.zeros(5, 0, dtype=torch.uint8), torch.zeros(3, 0, dtype=torch.uint8)
    codes = a.view(torch.float8_e4m3fn), b.view(torch.float8_e4m3fn).t()
    scales: dict[str, Any] = {"inverse_scale_a": torch.ones(5, 0)}
    scales["inverse_scale_b"] = torch.ones(0, 3)
    wrong: Any
    for wrong in (0, 33, 256, True, 32.0, np.array([32, 64]), torch.tensor([32, 64])):
        with pytest.raises(ValueError, match=r"promote_every is .*; accepted: None, 32, 64, 128"):
            checked_product(*codes, promote_every=wrong, **scales)
    longer: dict[str, Any] = {"inverse_scale_a": torch.ones(5, 2)}
    longer["inverse_scale_b"] = torch.ones(2, 3)
    wide = [torch.zeros(rows, 256, dtype=torch.uint8).view(torch.float8_e4m3fn) for rows in (5, 3)]
    for wrong in (32, 64, np.array([32, 64]), torch.tensor([32, 64])):
        with pytest.raises(ValueError, match="blocks of 128 along K; accepted: that number"):
            checked_product(wide[0], wide[1].t(), promote_every=wrong, **longer)


@pytest.mark.parametrize(
    ("dtypes", "shapes", "promote", "length"),
    [
        ("ff", "rr", None, 128),
        ("ff", "rr", 32, 32),
        ("ff", "rr", 64, 128),
        ("ff", "rr", 128, 128),
        ("ee", "rr", None, 32),
        ("fe", "rr", None, 32),
        ("ee", "rr", 128, 128),
        ("ee", "rs", None, 128),
        ("fe", "sr", None, 128),
        ("ff", "rs", 32, 128),
    ],
)
def test_how_long_blocks_of_no_k_are(
    dtypes: str, shapes: str, promote: int | None, length: int
) -> None:
    """f: float32, e: E8M0; r: a scale for each row, s: squares."""
    types = {"f": torch.float32, "e": torch.float8_e8m0fnu}
    a, b = (
        torch.empty(rows if shape == "r" else 1, 0, dtype=types[dtype])
        for rows, dtype, shape in zip((5, 6), dtypes, shapes, strict=True)
    )
    scales = scales_from(a, b.t(), 5, 0, 6, torch.device("cpu"), promote)
    assert (scales.kind, scales.block_k) == ("blocks", length)


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), E8M0.dtype])
def test_shapes_alone_tell_how_long_blocks_of_some_k_are(dtype: Any, device: str) -> None:
    a = np.full((5, 256), 2.0, np.float32).astype(E4M3.dtype)
    b = np.full((256, 3), 1.0, np.float32).astype(E4M3.dtype)
    scales = {"inverse_scale_a": np.array([[1, 4]] * 5, np.float32).astype(dtype)}
    scales["inverse_scale_b"] = np.array([[2] * 3, [0.5] * 3], np.float32).astype(dtype)
    for promote in (None, 128):
        check(a, b, device, promote_every=promote, **scales)
    with pytest.raises(ValueError, match="blocks of 128 along K"):
        run(a, b, device, promote_every=32, **scales)


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
