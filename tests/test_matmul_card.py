"""Matrix products on a card against the oracle: random bits, wide exponents, special values.

Every variant is compiled first, by many threads at a time; then the examples only launch.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8lab.emulation.matmul import (
    HOPPER_BF16,
    HOPPER_F16,
    HOPPER_FP8,
    HOPPER_FP8_F16,
    HOPPER_FP8_VIA_F16,
    TensorCore,
    lowering,
    matmul_at,
)
from fp8lab.emulation.matmul import matmul as oracle
from fp8lab.experiments.search_matmul_card import one_launcher_at_a_time
from fp8lab.formats import E4M3
from fp8lab.kernels.dot_tile import dot_tile
from fp8lab.kernels.linear_products import weight_gradient
from fp8lab.kernels.matmul import matmul
from fp8lab.kernels.matmul_launch import Settings
from fp8lab.kernels.matmul_settings import (
    FAST_NATIVE_CANDIDATES,
    FAST_PROMOTED_CANDIDATES,
    NATIVE_CANDIDATES,
    PAIRED_BROAD_FAST,
    PAIRED_FAST,
    PROMOTED_CANDIDATES,
    GluonSettings,
)
from fp8lab.testing import assert_bits_equal, run_kernel, to_numpy, to_torch
from fp8lab.testing.products import (
    ACCUMULATOR_KINDS,
    OPERAND_KINDS,
    accumulator_values,
    operand_values,
)

pytestmark = pytest.mark.gpu
Array = np.ndarray[Any, Any]
DTYPES = ("float8_e4m3fn", "float8_e5m2")
FULL = 1 << 24  # multiply-adds up to which every element is checked
DISTINCT = 192  # rows made anew; those of larger operands repeat them in a random order
ROWS = 6  # rows and columns of a sample of a larger product


@dataclass(frozen=True)
class Variant:
    """What decides which kernel is compiled.

    Attributes:
        dtypes: Of both operands.
        promote: k between promotions.
        scaling: None, or a name in `scales_of`.
        start, bias: Whether there is an accumulator, and the bias' shape: "", "vector", "matrix".
        narrow: Whether the result is bfloat16.
        launch: Settings; None lets the library choose.
    """

    dtypes: tuple[str, str] = ("float8_e4m3fn", "float8_e4m3fn")
    promote: int | None = None
    scaling: str | None = None
    start: bool = False
    bias: str = ""
    narrow: bool = False
    launch: Settings | None = None


def variants() -> list[Variant]:
    """Each option alone, and those that meet in training."""
    found = [Variant(dtypes=pair) for pair in product(DTYPES, DTYPES)]
    found += [Variant(launch=candidate, narrow=True) for candidate in NATIVE_CANDIDATES]
    found += [
        Variant(launch=candidate, promote=promote, narrow=True)
        for candidate in PROMOTED_CANDIDATES
        for promote in (32, 64, 128)
    ]
    found += [Variant(launch=candidate, narrow=True) for candidate in FAST_NATIVE_CANDIDATES]
    found += [
        Variant(launch=candidate, scaling=scaling, promote=128, narrow=True)
        for candidate in FAST_PROMOTED_CANDIDATES
        for scaling in (None, "1x128 by 128x128", "1x128 by 1x128", "128x128 by 1x128")
    ]
    # None as launch: on this card the fast kernel where it applies.
    found += [Variant(dtypes=pair, promote=128, narrow=True) for pair in product(DTYPES, DTYPES)]
    found += [
        Variant(promote=128, start=True),
        Variant(promote=128, scaling="vectors", bias="vector", narrow=True),
        Variant(promote=128, scaling="tensor", bias="matrix"),
        Variant(promote=128, start=True, bias="matrix"),
        Variant(start=True),
        Variant(scaling="tensor", narrow=True),
        Variant(scaling="vectors", bias="vector", narrow=True),
        Variant(scaling="tensor", bias="matrix"),
        Variant(scaling="1x128 by 128x128", narrow=True),
        Variant(scaling="1x128 by 128x128", dtypes=("float8_e5m2", "float8_e4m3fn"), narrow=True),
        Variant(scaling="1x128 by 128x128", bias="matrix"),
        Variant(scaling="1x128 by 128x128", start=True),
        Variant(scaling="1x128 by 128x128", narrow=True, launch=PROMOTED_CANDIDATES[0]),
        Variant(scaling="1x128 by 1x128", narrow=True),
        Variant(scaling="1x128 by 1x128", narrow=True, launch=PROMOTED_CANDIDATES[0]),
        Variant(scaling="1x128 by 1x128", bias="matrix"),
        Variant(scaling="1x128 by 1x128", start=True, launch=FAST_PROMOTED_CANDIDATES[-1]),
        Variant(scaling="128x128 by 1x128"),
        Variant(scaling="mx", narrow=True),
        Variant(scaling="mx", bias="vector"),
        Variant(scaling="mx", bias="matrix", dtypes=("float8_e5m2", "float8_e4m3fn")),
        Variant(scaling="mx", start=True),
        Variant(scaling="mx", narrow=True, launch=PROMOTED_CANDIDATES[0]),
        Variant(scaling="extreme mx"),
        Variant(scaling="extreme mx", start=True, launch=FAST_PROMOTED_CANDIDATES[-1]),
        Variant(scaling="1x32 by 1x32", narrow=True),
        Variant(scaling="1x32 by one column"),
        Variant(scaling="1x128 by one column"),
        Variant(promote=32, start=True),
        Variant(promote=64, scaling="vectors", bias="vector", narrow=True),
    ]
    found += [
        Variant(launch=candidate, scaling="mx", narrow=True)
        for candidate in FAST_PROMOTED_CANDIDATES
        if candidate.takes(promote=32, blocks=True, matrices=0)
    ]
    # What comes around the sum, with 256 rows: there it is one of two bands after the other.
    found += [
        Variant(
            launch=candidate,
            promote=128,
            scaling=scaling,
            start=start,
            bias=bias,
            narrow=narrow,
        )
        for candidate in (PAIRED_FAST, PAIRED_BROAD_FAST)
        for scaling, start, bias, narrow in (
            ("tensor", False, "", False),
            ("tensor", False, "", True),
            (None, True, "", False),
            ("tensor", False, "matrix", False),
            ("vectors", False, "vector", True),
            ("vectors", True, "", False),
            ("1x128 by 128x128", True, "vector", True),
            ("128x128 by 1x128", False, "matrix", False),
            ("1x128 by 1x128", True, "", False),
            ("1x128 by 1x128", False, "matrix", False),
        )
    ]
    found += [
        Variant(launch=candidate, promote=promote, narrow=True)
        for candidate in FAST_PROMOTED_CANDIDATES
        for promote in (32, 64)
    ]
    # What comes around the sum, with rows and columns swapped.
    found += [
        Variant(launch=FAST_NATIVE_CANDIDATES[-1], scaling=scaling, start=start, bias=bias)
        for scaling, start, bias in (
            ("vectors", False, "vector"),
            ("tensor", True, "matrix"),
            (None, False, "vector"),
        )
    ]
    return found


VARIANTS = variants()


def scales_of(kind: str | None, seed: int, m: int, k: int, n: int) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    blocks, mx_blocks = -(-k // 128), -(-k // 32)
    shapes: dict[str | None, tuple[tuple[int, int], tuple[int, int]]] = {
        "tensor": ((1, 1), (1, 1)),
        "vectors": ((m, 1), (1, n)),
        "1x128 by 128x128": ((m, blocks), (blocks, -(-n // 128))),
        "1x128 by 1x128": ((m, blocks), (blocks, n)),
        "128x128 by 1x128": ((-(-m // 128), blocks), (blocks, n)),
        "mx": ((m, mx_blocks), (mx_blocks, n)),
        "extreme mx": ((m, mx_blocks), (mx_blocks, n)),
        "1x32 by 1x32": ((m, mx_blocks), (mx_blocks, n)),
        "1x32 by one column": ((m, mx_blocks), (1, n)),
        "1x128 by one column": ((m, blocks), (1, n)),
    }
    if kind is None:
        return {}
    values: list[Array] = [np.exp2(rng.uniform(-6, 6, s)).astype(np.float32) for s in shapes[kind]]
    if kind in ("mx", "extreme mx"):
        codes = [rng.integers(110, 140, s).astype(np.uint8) for s in shapes[kind]]
        if kind == "extreme mx":
            # Subnormals before and after the scales, overflow, and a NaN here and there.
            ends = [0, 1, 2, 20, 120, 127, 134, 235, 253, 254]
            codes = [rng.choice(ends, s).astype(np.uint8) for s in shapes[kind]]
            for code in codes:
                code[rng.random(code.shape) < 0.002] = 255
        values = [code.view(ml_dtypes.float8_e8m0fnu) for code in codes]
    return {"inverse_scale_a": values[0], "inverse_scale_b": values[1]}


@dataclass(frozen=True, eq=False)
class Case:
    """Operands and options, as the oracle takes them."""

    a: Array
    b: Array
    options: dict[str, Any]


def make_case(
    variant: Variant,
    sizes: tuple[int, int, int],
    seed: int,
    kinds: tuple[str, str] = ("ordinary", "ordinary"),
    start_kind: str = "ordinary",
    special: bool = False,
) -> Case:
    m, n, k = sizes
    rng = np.random.default_rng(seed)
    sides = []
    for side, rows in enumerate((m, n)):
        few = min(rows, DISTINCT)
        codes = operand_values(
            seed + side, (few, k), variant.dtypes[side], kinds[side], special=special
        )
        sides.append(codes if few == rows else codes[rng.integers(0, few, rows)])
    a, b = sides[0], sides[1].T
    options: dict[str, Any] = scales_of(variant.scaling, seed, m, k, n)
    if variant.promote is not None:
        options["promote_every"] = variant.promote
    if variant.start:
        options["accumulator"] = accumulator_values(seed + 2, (m, n), "float32", start_kind)
    if variant.bias:
        shape = (1, n) if variant.bias == "vector" else (m, n)
        bias = accumulator_values(seed + 3, shape, "float32", "ordinary")
        options["bias"] = bias[0] if variant.bias == "vector" else bias
    return Case(a, b, options)


def launched(variant: Variant, case: Case) -> torch.Tensor:
    wrapped: dict[str, Any] = {
        name: to_torch(np.ascontiguousarray(value), device="cuda")
        if isinstance(value, np.ndarray)
        else value
        for name, value in case.options.items()
    }
    right = to_torch(np.ascontiguousarray(case.b.T), device="cuda").t()
    return matmul(
        to_torch(case.a, device="cuda"),
        right,
        out_dtype=torch.bfloat16 if variant.narrow else torch.float32,
        settings=variant.launch,
        **wrapped,
    )


def check(variant: Variant, case: Case, seed: int = 0) -> None:
    """All elements of a small product, a sample of a large one."""
    (m, k), n = case.a.shape, case.b.shape[1]
    got = to_numpy(run_kernel(launched, variant, case))
    options = dict(case.options)
    if variant.narrow:
        options["out_dtype"] = ml_dtypes.bfloat16
    if m * n * k <= FULL:
        assert_bits_equal(got, oracle(case.a, case.b, **options))
        return
    rng = np.random.default_rng(seed)
    rows = np.unique([0, m - 1, *rng.integers(0, m, ROWS)])
    columns = np.unique([0, n - 1, *rng.integers(0, n, 8 * ROWS)])
    expected = matmul_at(case.a, case.b, rows, columns, **options)
    assert_bits_equal(got[np.ix_(rows, columns)], expected)


def can_run(variant: Variant, n: int) -> bool:
    """Whether n lets the result's rows start where the fast kernel can write them."""
    return not isinstance(variant.launch, GluonSettings) or n % 16 == 0


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compile every variant, sixteen at a time: n of each alignment, m small and large.

    Several processes that test share a cache of what is compiled: each begins at another place.
    """
    torch.zeros(1, device="cuda")  # starts CUDA before the threads do

    def build(work: tuple[Variant, int, int]) -> None:
        variant, m, n = work
        launched(variant, make_case(variant, (m, n, 256), 1))

    works = []
    for variant in VARIANTS:
        chosen = variant.launch is None
        # n decides how memory is reached; where the library chooses, m decides the kernel.
        for m, n in product((16, 300) if chosen else (300,), (144, 136, 131)):
            if can_run(variant, n) and (chosen or n != 136):
                works.append((variant, m, n))
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    first = len(works) * worker // count
    with one_launcher_at_a_time(), ThreadPoolExecutor(max(1, 16 // count)) as pool:
        list(pool.map(build, works[first:] + works[:first]))
    torch.cuda.synchronize()


sizes_small = st.tuples(st.integers(1, 300), st.integers(1, 300), st.integers(0, 700))
sizes_odd = st.tuples(
    st.sampled_from([1, 16, 63, 64, 65, 127, 128, 129, 200, 384]),
    st.sampled_from([8, 16, 120, 128, 136, 256, 1000]),
    st.sampled_from([16, 32, 100, 127, 128, 129, 256, 896, 1024, 1025, 1152, 2048, 2176]),
)
sizes_large = st.tuples(
    st.sampled_from([512, 1000, 2048, 4096]),
    st.sampled_from([512, 1024, 1536, 4096, 7000]),
    st.sampled_from([1024, 1920, 4096, 5000, 14336]),
)


SIZES = {"small": sizes_small, "odd": sizes_odd, "large": sizes_large}


@pytest.mark.parametrize("sizes", SIZES)
@settings(max_examples=90)
@given(data=st.data())
def test_equals_the_oracle(sizes: str, data: st.DataObject) -> None:
    variant = data.draw(st.sampled_from(VARIANTS), label="variant")
    m, n, k = data.draw(SIZES[sizes], label="m, n, k")
    if not can_run(variant, n):
        n = -(-n // 16) * 16
    kinds = st.sampled_from(OPERAND_KINDS)
    case = make_case(
        variant,
        (m, n, k),
        data.draw(st.integers(0, 2**31), label="seed"),
        (data.draw(kinds, label="a"), data.draw(kinds, label="b")),
        data.draw(st.sampled_from(ACCUMULATOR_KINDS), label="start"),
        data.draw(st.booleans(), label="special"),
    )
    check(variant, case)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_each_variant_with_k_around_the_drain(variant: Variant) -> None:
    """The fast kernel drains every 8 blocks of 128 and takes what is left in halves."""
    for blocks in (1, 2, 3, 5, 7, 8, 9, 15, 16, 17):
        check(variant, make_case(variant, (192, 144, 128 * blocks - 3), blocks))


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_each_variant_without_any_k(variant: Variant) -> None:
    check(variant, make_case(variant, (300, 144, 0), 1))


@pytest.mark.parametrize("scaling", [None, "1x128 by 1x128"])
@pytest.mark.parametrize("launch", FAST_PROMOTED_CANDIDATES, ids=str)
def test_more_tiles_than_multiprocessors(launch: GluonSettings, scaling: str | None) -> None:
    """The ring, and what is on its way out, go on from tile to tile; the last ones have edges."""
    variant = Variant(launch=launch, promote=128, scaling=scaling, narrow=True)
    for k in (100, 640, 1152):
        check(variant, make_case(variant, (4000, 4112, k), k), k)


def test_the_fast_kernel_is_the_one_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is chosen by itself must be worth its name: not the plain kernel by mistake."""
    from fp8lab.kernels import matmul_gluon

    seen: list[Settings] = []
    original = matmul_gluon.launch_fast

    def noted(product: Any, launch: GluonSettings) -> None:
        seen.append(launch)
        original(product, launch)

    monkeypatch.setattr(matmul_gluon, "launch_fast", noted)
    for variant in (
        Variant(),
        Variant(promote=128),
        Variant(scaling="1x128 by 128x128", narrow=True),
        Variant(scaling="1x128 by 1x128"),
        Variant(scaling="mx"),
        Variant(promote=32),
    ):
        check(variant, make_case(variant, (256, 256, 512), 3))
    assert len(seen) == 6


@pytest.mark.parametrize("pair", list(product(DTYPES, DTYPES)), ids=str)
def test_every_pair_of_codes(pair: tuple[str, str]) -> None:
    """All 65,536, NaN and infinities included, alone and beside a one in each place of a step."""
    every = np.arange(256, dtype=np.uint8)
    a, b = every[:, None].view(pair[0]), every[None, :].view(pair[1])
    for place in (0, 1, 17, 31):
        wide_a = np.zeros((256, 32), np.float32).astype(pair[0])
        wide_b = np.zeros((32, 256), np.float32).astype(pair[1])
        wide_a[:, place], wide_b[place] = a[:, 0], b[0]
        other = (place + 5) % 32
        wide_a[:, other], wide_b[other] = np.float32(1), np.float32(1)
        check(Variant(dtypes=pair), Case(wide_a, wide_b, {}))
    check(Variant(dtypes=pair), Case(a, b, {}))


def test_zero_operands_with_every_accumulator() -> None:
    """C over all 2**32 patterns: 14 bits stay, -0 becomes +0, NaN becomes 0x7FFFFFFF."""
    side = 8192
    zero = torch.zeros(side, 32, dtype=torch.float8_e4m3fn, device="cuda")
    for chunk in range(1 << 6):
        first = (chunk << 26) - (1 << 32 if chunk >= 32 else 0)
        words = torch.arange(first, first + (1 << 26), dtype=torch.int32, device="cuda")
        start = words.view(torch.float32).view(side, side)
        got = matmul(zero, zero.t(), accumulator=start).view(torch.int32).view(-1)
        kept = words & -1024
        kept = torch.where(kept == -(1 << 31), 0, kept)
        kept = torch.where((words & 0x7FFFFFFF) > 0x7F800000, 0x7FFFFFFF, kept)
        if not torch.equal(got, kept):
            assert_bits_equal(got, to_numpy(kept), inputs=to_numpy(start.view(-1)))


def dot(
    core: TensorCore, a: Array, b: Array, start: Array, *, warps: int = 4, **options: Any
) -> torch.Tensor:
    """One tile by `tl.dot`; a is (M, K), b is (K, N)."""
    left, c = to_torch(np.ascontiguousarray(a), device="cuda"), to_torch(start, device="cuda")
    right = to_torch(np.ascontiguousarray(b.T), device="cuda")
    out = torch.empty_like(c)
    constants = {"PROMOTE": None, "CAST_A": False, "BLOCK_K": min(a.shape[1], 64)} | options
    run_kernel(
        dot_tile[(1,)],
        left,
        right,
        c,
        out,
        a.shape[1],
        M=a.shape[0],
        N=b.shape[1],
        HALF=core.accumulator == "float16",
        num_warps=warps,
        enable_fp_fusion=False,
        **constants,
    )
    return out


@pytest.mark.parametrize("core", [HOPPER_FP8_F16, HOPPER_BF16, HOPPER_F16, HOPPER_FP8], ids=str)
@settings(max_examples=25)
@given(data=st.data())
def test_other_cores(core: TensorCore, data: st.DataObject) -> None:
    k = data.draw(st.sampled_from([32, 64, 256]), label="k")
    seed, kinds = data.draw(st.integers(0, 2**31)), st.sampled_from(OPERAND_KINDS)
    special = data.draw(st.booleans(), label="special")
    dtypes = [data.draw(st.sampled_from(core.operands), label=side) for side in "ab"]
    a = operand_values(seed, (64, k), dtypes[0], data.draw(kinds), special=special)
    b = operand_values(seed + 1, (64, k), dtypes[1], data.draw(kinds), special=special).T
    kind = data.draw(st.sampled_from(ACCUMULATOR_KINDS), label="c")
    start = accumulator_values(seed + 2, (64, 64), core.accumulator, kind)
    got = to_numpy(dot(core, a, b, start)).astype(np.float32)
    assert_bits_equal(got, oracle(a, b, core=core, accumulator=start))


@pytest.mark.parametrize(
    ("m", "warps", "promote"), [(16, 4, None), (32, 4, None), (64, 2, None), (64, 4, 0)]
)
@settings(max_examples=10)
@given(seed=st.integers(0, 2**31), kind=st.sampled_from(OPERAND_KINDS))
def test_the_fallback_through_f16(
    m: int, warps: int, promote: int | None, seed: int, kind: str
) -> None:
    found = lowering(m, 64, 64, warps, promote)
    assert found.core is HOPPER_FP8_VIA_F16
    a = operand_values(seed, (m, 128), "float8_e4m3fn", kind)
    b = operand_values(seed + 1, (64, 128), "float8_e5m2", "ordinary").T
    start = accumulator_values(seed + 2, (m, 64), "float32", "ordinary")
    got = dot(found.core, a, b, start, warps=warps, PROMOTE=promote)
    assert_bits_equal(got, oracle(a, b, core=found.core, accumulator=start))


@settings(max_examples=10)
@given(seed=st.integers(0, 2**31), kind=st.sampled_from(OPERAND_KINDS))
def test_a_computed_in_registers(seed: int, kind: str) -> None:
    """float32 cast to E4M3 inside the kernel; wgmma then takes A from registers."""
    a = operand_values(seed, (64, 256), "float8_e4m3fn", kind)
    b = operand_values(seed + 1, (64, 256), "float8_e4m3fn", "ordinary").T
    start = accumulator_values(seed + 2, (64, 64), "float32", "ordinary")
    got = dot(HOPPER_FP8, a.astype(np.float32), b, start, CAST_A=True)
    assert_bits_equal(got, oracle(a, b, accumulator=start))


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("sizes", [(16, 512, 512), (512, 1024, 2048), (4096, 4096, 4096)])
def test_equals_torch_scaled_mm(sizes: tuple[int, int, int], fast: bool) -> None:
    m, n, k = sizes
    torch.manual_seed(k)
    a = torch.randn(m, k, device="cuda").to(torch.float8_e4m3fn)
    b = torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn).t()
    promote = None if fast else 128
    one, two = (torch.rand((), device="cuda") + 0.1 for _ in range(2))
    for dtype in (torch.bfloat16, torch.float32):
        theirs = torch._scaled_mm(
            a, b, scale_a=one, scale_b=two, out_dtype=dtype, use_fast_accum=fast
        )
        ours = matmul(
            a, b, inverse_scale_a=one, inverse_scale_b=two, out_dtype=dtype, promote_every=promote
        )
        assert_bits_equal(ours, theirs)
    rows, columns = torch.rand(m, 1, device="cuda") + 0.1, torch.rand(1, n, device="cuda") + 0.1
    theirs = torch._scaled_mm(
        a, b, scale_a=rows, scale_b=columns, out_dtype=torch.bfloat16, use_fast_accum=fast
    )
    ours = matmul(
        a,
        b,
        inverse_scale_a=rows,
        inverse_scale_b=columns,
        out_dtype=torch.bfloat16,
        promote_every=promote,
    )
    assert_bits_equal(ours, theirs)


@pytest.mark.parametrize("by_column", [False, True])
@pytest.mark.parametrize("sizes", [(16, 512, 512), (256, 256, 512), (1024, 2048, 4096)])
def test_equals_torch_scaled_mm_with_blocks(sizes: tuple[int, int, int], by_column: bool) -> None:
    """Where K/128 is a multiple of 4: elsewhere torch 2.11 reads the wrong scales."""
    m, n, k = sizes
    torch.manual_seed(k)
    a = torch.randn(m, k, device="cuda").to(torch.float8_e4m3fn)
    b = torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn).t()
    scale_a = (torch.rand(k // 128, m, device="cuda") + 0.1).t()
    scale_b = (torch.rand(n // 128, k // 128, device="cuda") + 0.1).t()
    if by_column:
        scale_b = torch.rand(k // 128, n, device="cuda") + 0.1
    for dtype in (torch.bfloat16, torch.float32):
        theirs = torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=dtype)
        ours = matmul(a, b, inverse_scale_a=scale_a, inverse_scale_b=scale_b, out_dtype=dtype)
        assert_bits_equal(ours, theirs)


@pytest.mark.parametrize("scaling", ["tensor", "vectors", "1x128 by 128x128"])
def test_equals_torch_scaled_mm_with_a_bias(scaling: str) -> None:
    """The scaled sum plus the bias, in float32; then one rounding to bfloat16."""
    m, n, k = 256, 384, 1024
    torch.manual_seed(7)
    a = torch.randn(m, k, device="cuda").to(torch.float8_e4m3fn)
    b = torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn).t()
    bias = (torch.randn(n, device="cuda") * 20).bfloat16()
    scales = {
        "tensor": (torch.tensor(0.37, device="cuda"), torch.tensor(1.7, device="cuda")),
        "vectors": (torch.rand(m, 1, device="cuda") + 0.1, torch.rand(1, n, device="cuda") + 0.1),
        "1x128 by 128x128": (
            (torch.rand(k // 128, m, device="cuda") + 0.1).t(),
            (torch.rand(n // 128, k // 128, device="cuda") + 0.1).t(),
        ),
    }
    scale_a, scale_b = scales[scaling]
    theirs = torch._scaled_mm(
        a, b, scale_a=scale_a, scale_b=scale_b, bias=bias, out_dtype=torch.bfloat16
    )
    ours = matmul(
        a,
        b,
        inverse_scale_a=scale_a,
        inverse_scale_b=scale_b,
        bias=bias.float(),
        promote_every=128,
        out_dtype=torch.bfloat16,
    )
    assert_bits_equal(ours, theirs)


@pytest.mark.parametrize("scaling", [None, "tensor", "1x128 by 1x128"])
@pytest.mark.parametrize("promote", [None, 128])
def test_gradients_accumulate_in_place(scaling: str | None, promote: int | None) -> None:
    variant = Variant(scaling=scaling, promote=promote)
    case = make_case(variant, (384, 512, 1000), 5)
    held = accumulator_values(6, (384, 512), "float32", "ordinary")
    gradient = to_torch(held.copy(), device="cuda")
    options = {
        name: to_torch(value, device="cuda") if isinstance(value, np.ndarray) else value
        for name, value in case.options.items()
    }
    result = run_kernel(
        weight_gradient,
        to_torch(case.a, device="cuda"),
        to_torch(np.ascontiguousarray(case.b.T), device="cuda"),
        accumulate=gradient,
        **options,
    )
    assert result is gradient
    rows, columns = [0, 1, 200, 383], [0, 7, 130, 511]
    expected = matmul_at(case.a, case.b, rows, columns, bias=held, **case.options)
    assert_bits_equal(to_numpy(gradient)[np.ix_(rows, columns)], expected)


def test_offsets_beyond_32_bits() -> None:
    """Past 2**31 elements of a, and of the result."""
    m, n, k = 70_000, 32_768, 32
    a = torch.zeros(m, k, dtype=torch.float8_e4m3fn, device="cuda")
    a[-1] = 1
    b = torch.ones(n, k, device="cuda").to(torch.float8_e4m3fn).t()
    got = matmul(a, b, bias=torch.zeros(n, device="cuda"))
    assert_bits_equal(got[-1], np.full(n, 32, np.float32))
    assert not got[:-1].any()
    assert to_numpy(a[-1:]).dtype == E4M3.dtype
