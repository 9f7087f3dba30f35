"""What the plain kernel of products becomes on sm_90: wgmma, promotion, no spills."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fp8lab.formats import BFLOAT16, E4M3, E5M2
from fp8lab.kernels.float_device import ElementCode
from fp8lab.kernels.matmul_device import ProductPlan
from fp8lab.kernels.matmul_settings import (
    PROMOTED_CANDIDATES,
    MatmulSettings,
)
from fp8lab.testing import compiled_ptx
from fp8lab.testing.ptx import spilled_bytes

ROOT = Path(__file__).resolve().parent.parent


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
