"""What the fast kernel compiles to for sm_90. No card is needed; one does run it in
tests/test_matmul_card.py.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fp8lab.emulation.casting import dequantize
from fp8lab.formats import E8M0
from fp8lab.kernels import matmul_launch
from fp8lab.kernels.matmul import checked_product
from fp8lab.kernels.matmul_choice import fast_settings
from fp8lab.kernels.matmul_gluon import gluon_plan
from fp8lab.kernels.matmul_gluon_scales import SideScales, by_block, by_stage
from fp8lab.kernels.matmul_launch import candidates_for, launch_product
from fp8lab.kernels.matmul_product import Product
from fp8lab.kernels.matmul_settings import (
    PAIRED_BROAD_FAST,
    PAIRED_FAST,
    SQUARE_FAST,
    WIDE_FAST,
    GluonSettings,
)
from fp8lab.testing import assert_bits_equal

ROOT = Path(__file__).resolve().parent.parent

# In a process of its own: one that was started for the interpreter compiles nothing.
CHILD = """
    import json, subprocess, sys, tempfile
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource
    from fp8lab.kernels.matmul_gluon_device import matmul_kernel
    from fp8lab.kernels.matmul_gluon_plan import GluonPlan

    plan = GluonPlan(**json.load(sys.stdin))
    layout = gl.NVMMASharedLayout.get_default_for

    def operand(rows):
        block = [rows, plan.depth]
        return f"tensordesc<fp8e4nv{block},{layout(block, gl.float8e4nv)!r}>"

    out, name = (gl.bfloat16, "bf16") if plan.bfloat16 else (gl.float32, "fp32")
    flat = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    signature = dict.fromkeys(matmul_kernel.arg_names, "i32")
    signature |= dict.fromkeys(["left_scale", "right_scale", "bias", "start"], "*fp32")
    signature |= {
        "left_desc": operand(plan.box),
        "right_desc": operand(plan.columns),
        "out_desc": f"tensordesc<{name}{plan.piece},{layout(plan.piece, out)!r}>",
        "left_scale_desc": f"tensordesc<fp32[{plan.slices}, {plan.box}],{flat!r}>",
        "right_scale_desc": f"tensordesc<fp32[{plan.slices}, {plan.scale_columns}],{flat!r}>",
        "PLAN": "constexpr",
    }
    compiled = triton.compile(
        GluonASTSource(matmul_kernel, signature, constexprs={"PLAN": plan}),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": 4, "enable_fp_fusion": False},
    )
    ptxas = triton.knobs.nvidia.ptxas.path
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(compiled.asm["ptx"])
        file.flush()
        assembled = subprocess.run(
            [ptxas, "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"],
            capture_output=True, text=True, check=True,
        )
    shared = compiled.metadata.shared
    json.dump({"ptx": compiled.asm["ptx"], "log": assembled.stderr, "shared": shared}, sys.stdout)
"""

PLAN = {
    "rows": 128,
    "columns": 128,
    "depth": 128,
    "stages": 5,
    "group": 8,
    "length": 128,
    "drain": 8,
    "swap": False,
    "scaling": "none",
    "by_row": False,
    "by_column": False,
    "squares": False,
    "start": False,
    "bias": "none",
    "bfloat16": True,
}
BLOCKS = {"scaling": "blocks", "by_row": True, "squares": True}
BOTH = {"scaling": "blocks", "by_row": True, "by_column": True}
WIDE = {"columns": 256, "stages": 4, "drain": 1}
TALL = {"rows": 192, "stages": 5, "drain": 1}
PAIRED = {"rows": 256, "stages": 4, "drain": 1}
MX = BOTH | {"length": 32, "drain": 2}


def compiled(**options: Any) -> dict[str, Any]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CHILD)],
        cwd=ROOT,
        env=environment,
        input=json.dumps(PLAN | options),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize(
    ("options", "shape", "count"),
    [
        # Two warpgroups; 8 + 4 + 2 + 1 partial sums, each of four steps.
        (BLOCKS, "m64n128k32", 2 * 15 * 4),
        (BOTH, "m64n128k32", 2 * 15 * 4),
        # Two warpgroups, a loop over stages of four parts.
        (WIDE, "m64n64k32", 2 * 4 * 4),
        (WIDE | BLOCKS, "m64n64k32", 2 * 4 * 4),
        (WIDE | BOTH, "m64n64k32", 2 * 4 * 4),
        # Three warpgroups, a loop over stages of four steps.
        (TALL | {"scaling": "tensor"}, "m64n128k32", 3 * 4),
        (TALL | {"scaling": "vectors", "bias": "vector", "swap": True}, "m64n128k32", 3 * 4),
        (TALL | BLOCKS | {"start": True}, "m64n128k32", 3 * 4),
        (TALL | BLOCKS | {"by_row": False}, "m64n128k32", 3 * 4),
        (TALL | BLOCKS | {"by_row": False, "by_column": True}, "m64n128k32", 3 * 4),
        (TALL | BOTH, "m64n128k32", 3 * 4),
        # Two warpgroups, a loop over stages of four steps.
        (
            {"columns": 256, "stages": 4, "drain": 0, "scaling": "vectors"},
            "m64n256k32",
            2 * 4,
        ),
        # One warpgroup, stages of eight steps.
        (
            {
                "rows": 64,
                "columns": 16,
                "depth": 256,
                "length": 256,
                "stages": 8,
                "drain": 0,
                "swap": True,
            },
            "m64n16k32",
            8,
        ),
        # Two warpgroups; 2 + 1 stages, each of four steps, of which each or each pair is promoted.
        (MX, "m64n128k32", 2 * 3 * 4),
        (MX | {"swap": True}, "m64n128k32", 2 * 3 * 4),
        (MX | {"bias": "matrix"}, "m64n128k32", 2 * 3 * 4),
        ({"length": 32, "drain": 2, "scaling": "tensor"}, "m64n128k32", 2 * 3 * 4),
        ({"length": 64, "drain": 2, "scaling": "vectors"}, "m64n128k32", 2 * 3 * 4),
        # One warpgroup, likewise.
        (MX | {"rows": 64, "stages": 7}, "m64n128k32", 3 * 4),
        (MX | {"rows": 64, "columns": 64, "stages": 8}, "m64n64k32", 3 * 4),
        (MX | {"rows": 64, "columns": 16, "stages": 10, "swap": True}, "m64n16k32", 3 * 4),
        # Two warpgroups, a loop over stages of four parts of four steps.
        (WIDE | {"length": 32}, "m64n64k32", 2 * 4 * 4),
        # Three warpgroups, a loop over stages of four steps.
        (TALL | {"length": 32}, "m64n128k32", 3 * 4),
        # Two warpgroups, a loop over stages of two bands of four steps.
        (PAIRED | {"scaling": "tensor"}, "m64n128k32", 2 * 2 * 4),
        (PAIRED | {"bfloat16": False, "swap": True}, "m64n128k32", 2 * 2 * 4),
        (PAIRED | {"start": True}, "m64n128k32", 2 * 2 * 4),
        (PAIRED | {"bias": "matrix", "bfloat16": False}, "m64n128k32", 2 * 2 * 4),
        (PAIRED | {"scaling": "vectors", "bias": "vector"}, "m64n128k32", 2 * 2 * 4),
        (
            PAIRED | {"scaling": "vectors", "bias": "vector", "swap": True},
            "m64n128k32",
            2 * 2 * 4,
        ),
        (PAIRED | BLOCKS, "m64n128k32", 2 * 2 * 4),
        (PAIRED | BLOCKS | {"by_row": False, "by_column": True}, "m64n128k32", 2 * 2 * 4),
        (PAIRED | BOTH, "m64n128k32", 2 * 2 * 4),
        (PAIRED | BOTH | {"swap": True}, "m64n128k32", 2 * 2 * 4),
        (PAIRED | BOTH | {"start": True, "bfloat16": False}, "m64n128k32", 2 * 2 * 4),
        (PAIRED | BOTH | {"bias": "matrix", "bfloat16": False}, "m64n128k32", 2 * 2 * 4),
        (PAIRED | {"length": 32}, "m64n128k32", 2 * 2 * 4),
    ],
    ids=[
        "1x128 by 128x128",
        "1x128 by 1x128",
        "wide",
        "wide, 1x128 by 128x128",
        "wide, 1x128 by 1x128",
        "tall",
        "tall, swapped",
        "tall, 1x128 by 128x128",
        "tall, 128x128 by 128x128",
        "tall, 128x128 by 1x128",
        "tall, 1x128 by 1x128",
        "native",
        "few rows",
        "MX",
        "MX, swapped",
        "MX, with a matrix added",
        "32 of k",
        "64 of k",
        "MX, low",
        "MX, low and narrow",
        "MX, few rows",
        "wide, 32 of k",
        "tall, 32 of k",
        "paired",
        "paired, swapped, float32",
        "paired, with an accumulator",
        "paired, with a matrix added",
        "paired, vectors",
        "paired, vectors, swapped",
        "paired, 1x128 by 128x128",
        "paired, 128x128 by 1x128",
        "paired, 1x128 by 1x128",
        "paired, 1x128 by 1x128, swapped",
        "paired, 1x128 by 1x128, with an accumulator",
        "paired, 1x128 by 1x128, with a matrix added",
        "paired, 32 of k",
    ],
)
def test_the_fast_kernel_compiles_without_spills_or_serialised_products(
    options: dict[str, Any], shape: str, count: int
) -> None:
    """ptxas says C7510 to C7514 where it serialises wgmma, and Triton hides it."""
    found = compiled(**options)
    steps = re.findall(rf"wgmma\.mma_async\.sync\.aligned\.{shape}\.f32\.e4m3\.e4m3", found["ptx"])
    assert len(steps) == count
    assert ("fma.rn.f32" in found["ptx"]) == (options.get("scaling") == "blocks")
    assert "C75" not in found["log"]
    assert "0 bytes spill stores, 0 bytes spill loads" in found["log"]
    assert found["shared"] <= 227 * 1024
    # Nothing is read before the kernel before has ended.
    wait, copy = found["ptx"].index("griddepcontrol.wait"), found["ptx"].index("cp.async.bulk")
    assert wait < copy


@pytest.mark.parametrize("scaling", ["none", "vectors"])
def test_a_band_is_written_while_the_other_one_s_products_are_in_flight(scaling: str) -> None:
    """Where that needs few registers; then there is a way out for no product at all, too."""
    ptx = compiled(**PAIRED, scaling=scaling)["ptx"]
    early = scaling == "none"
    in_flight = r"wgmma\.commit_group(?:(?!wgmma\.wait_group).)*cp\.async\.bulk\.tensor\.2d\.global"
    # Of each of two warpgroups.
    assert len(re.findall(in_flight, ptx, re.DOTALL)) == 2 * early
    pieces = 2 if early else 4
    written = ptx.count("cp.async.bulk.tensor.2d.global")
    assert written == 2 * pieces * (3 if early else 2)


def product_of(**options: Any) -> Product:
    a, b = (
        torch.zeros(size, 256, dtype=torch.uint8).view(torch.float8_e4m3fn) for size in (512, 384)
    )
    return checked_product(a, b.t(), **options)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize(("a", "b"), [("own", "own"), ("own", "shared"), ("shared", "own")])
def test_the_plan_tells_whose_scales_are_each_rows_own(a: str, b: str, swap: bool) -> None:
    """Of the operand that wgmma takes its rows from, and of the other one."""
    scales_a = {"own": torch.ones(512, 2), "shared": torch.ones(4, 2)}[a]
    scales_b = {"own": torch.ones(2, 384), "shared": torch.ones(2, 3)}[b]
    product = product_of(inverse_scale_a=scales_a, inverse_scale_b=scales_b)
    plan = gluon_plan(product, replace(SQUARE_FAST, swap=swap))
    own = (a == "own", b == "own")
    assert (plan.by_row, plan.by_column) == (own[::-1] if swap else own)
    plain = gluon_plan(product_of(promote_every=128), replace(SQUARE_FAST, swap=swap))
    assert (plain.by_row, plain.by_column) == (False, False)


@pytest.mark.parametrize("settings", [PAIRED_FAST, PAIRED_BROAD_FAST], ids=str)
def test_256_rows_are_for_products_that_registers_hold(
    settings: GluonSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul_launch, "_is_fast", lambda product: True)
    both = {"inverse_scale_a": torch.ones(512, 2), "inverse_scale_b": torch.ones(2, 384)}
    mx = {"inverse_scale_a": torch.ones(512, 8), "inverse_scale_b": torch.ones(8, 384)}
    matrix = torch.zeros(512, 384)
    taken: list[dict[str, Any]] = [
        {"promote_every": 128},
        {"promote_every": 32, "accumulator": matrix},
        {"promote_every": 128, "bias": matrix},
        {"promote_every": 128, "bias": matrix[0].clone(), "accumulator": matrix},
        both,
    ]
    refused: list[dict[str, Any]] = [
        {},
        mx,
        {"promote_every": 128, "bias": matrix, "accumulator": matrix},
    ]
    for options in taken:
        product = product_of(**options)
        assert settings in candidates_for(product)
        for narrow in (False, True):
            out = torch.empty(512, 384, dtype=torch.bfloat16 if narrow else torch.float32)
            assert gluon_plan(product._replace(out=out), settings).stages == 4
    for options in refused:
        product = product_of(**options)
        assert settings not in candidates_for(product)
        assert SQUARE_FAST in candidates_for(product)
        with pytest.raises(ValueError, match="too few registers for this product"):
            launch_product(product, settings)


@pytest.mark.parametrize("shared", ["", "rows", "all"])
@pytest.mark.parametrize("kinds", ["ee", "ef", "fe", "ff"])
@pytest.mark.parametrize(("m", "n", "blocks"), [(1, 1030, 1), (5, 3, 4), (2050, 16, 7), (5, 3, 0)])
def test_scales_in_whole_stages(
    device: str, kinds: str, shared: str, m: int, n: int, blocks: int
) -> None:
    """Every E8M0 code, float32 of any bits; beyond K, scales that leave a total as it is."""
    rng = np.random.default_rng(m + blocks)
    sides, expected = [], []
    for rows, kind in zip((m, n), kinds, strict=True):
        shape = {"": (rows, blocks), "rows": (rows, 1), "all": (1, 1)}[shared]
        if kind == "e":
            codes = np.resize(np.arange(256, dtype=np.uint8), shape)
            given = torch.from_numpy(codes).to(device)
            values = dequantize(codes.view(E8M0.dtype)).astype(np.float32)
            values.view(np.uint32)[codes == E8M0.nan_code] = 0x7FFFFFFF
        else:
            values = rng.integers(0, 1 << 32, shape, dtype=np.uint32).view(np.float32)
            given = torch.from_numpy(values).to(device)
        stride = 0 if shared == "all" else given.stride(0)
        stride_k = 0 if shared else given.stride(1)
        sides.append(SideScales(given, stride, stride_k, rows))
        expected.append(np.broadcast_to(values, (rows, blocks)))
    tables = by_stage(sides[0], sides[1], blocks, 4)
    height = max(-(-blocks // 4), 1) * 4
    for table, values, beyond in zip(tables, expected, (-0.0, 0.0), strict=True):
        assert table.shape[0] == height
        assert table.stride(0) % 4 == 0
        wanted = np.full((height, values.shape[0]), beyond, np.float32)
        wanted[:blocks] = values.T
        found = table[:, : values.shape[0]].contiguous()
        assert_bits_equal(found.view(torch.int32), np.ascontiguousarray(wanted).view(np.int32))


def test_scales_that_are_in_whole_stages_are_taken_as_they_lie(device: str) -> None:
    given = torch.rand(8, 64, device=device).t()
    ready = SideScales(given, given.stride(0), given.stride(1), 64)
    short = torch.rand(6, 64, device=device).t()
    left, right = by_stage(ready, ready, 8, 4)
    assert left.data_ptr() == right.data_ptr() == given.data_ptr()
    left, _ = by_stage(SideScales(short, short.stride(0), short.stride(1), 64), ready, 6, 4)
    assert left.data_ptr() != short.data_ptr()


def test_one_scale_a_row_is_one_for_each_block(device: str) -> None:
    given = torch.rand(8, 1, device=device)
    table = by_block(SideScales(given, 1, 0, 8), 3)
    assert torch.equal(table, given.t().expand(3, 8))


def test_the_widest_tile_is_not_chosen_for_mx() -> None:
    """With scales of 32 of k it spills."""
    for promote, expected in ((128, WIDE_FAST), (32, SQUARE_FAST)):
        chosen = fast_settings(
            8192,
            8192,
            8192,
            promote=promote,
            blocks=True,
            by_row=True,
            by_column=True,
            multiprocessors=132,
            matrices=1,
        )
        assert chosen == expected
